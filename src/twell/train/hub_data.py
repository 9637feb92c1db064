"""A Hugging Face dataset as a corpus: streamed, tokenised on the way, and kept on disk as tokens.

A run reads only as many documents as it needs, and memory holds one batch of them. Two files keep the tokens of the
training and the held-out part, and are memory-mapped. Documents stay in the dataset's order; the sampler shuffles
blocks anyway.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import importlib
import json
import re
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from twell.progress import Progress, silent
from twell.train.data import (
    ONE_DOCUMENT,
    SAMPLE,
    TEXT_SUFFIXES,
    TOKEN_SUFFIXES,
    Corpus,
    Encode,
    check_request,
    encode_batches,
    find_files,
    map_tokens,
    read_documents,
    token_dtype,
)
from twell.train.files import PART, describe_file, flaw_of_files

# The datasets' own default is everything, ordered by crawl. This is a random sample of all crawls, 10 billion tokens;
# for more, name another: HuggingFaceFW/fineweb:sample-100BT.
DEFAULT_CONFIGS = {"HuggingFaceFW/fineweb": "sample-10BT", "HuggingFaceFW/fineweb-edu": "sample-10BT"}
TEXT_FIELD = "text"
HELD_OUT_MOST = 1_000_000  # tokens; more would make validation slower and hardly more precise

_NAME = re.compile(r"(?P<id>\w[\w.-]*/[\w.-]+)(:(?P<config>[^:/]+))?(:(?P<split>[^:/]+))?")


@dataclasses.dataclass(frozen=True)
class DatasetName:
    """A dataset on the Hugging Face hub, with configuration and split.

    >>> print(DatasetName("HuggingFaceFW/fineweb", "sample-10BT"))
    HuggingFaceFW/fineweb:sample-10BT:train
    """

    id: str
    config: str | None = None
    split: str = "train"

    def __str__(self) -> str:
        return ":".join([self.id, self.config or "default", self.split])


def find_dataset(data: Sequence[Path | str]) -> DatasetName | None:
    """The dataset that ``data`` names as owner/name[:config[:split]]; None if ``data`` names files.

    A name that exists on disk, or ends like a data file, is no dataset.
    """
    found = [dataset for name in data if (dataset := _parse(name))]
    if found and len(data) > 1:
        raise ValueError(
            f"{found[0].id} looks like a Hugging Face dataset (no such file): give it alone, or only files"
        )
    return found[0] if found else None


def _parse(name: Path | str) -> DatasetName | None:
    match = _NAME.fullmatch(str(name))
    if not match or str(name).endswith(TEXT_SUFFIXES + TOKEN_SUFFIXES) or Path(name).exists():
        return None
    config = match["config"] or DEFAULT_CONFIGS.get(match["id"])
    return DatasetName(match["id"], config, match["split"] or "train")


def read_dataset(dataset: DatasetName) -> Generator[str]:
    """Stream the texts of a dataset, except empty ones."""
    with contextlib.closing(_rows(dataset)) as rows:
        for row in rows:
            if TEXT_FIELD not in row:
                raise ValueError(f"{dataset} has no field {TEXT_FIELD!r}, only {', '.join(row)}")
            text = row[TEXT_FIELD]
            if not isinstance(text, str | None):
                raise ValueError(f"{dataset}: the field {TEXT_FIELD!r} holds {type(text).__name__}, not text")
            if text:
                yield text


def _rows(dataset: DatasetName) -> Generator[dict[str, Any]]:
    """Stream the rows of a dataset. The library's many kinds of errors become one line."""
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError as error:
        raise RuntimeError(
            f"there is no file {dataset.id}, and a Hugging Face dataset needs another package ({error}): "
            f"pip install 'twell[data]'"
        ) from None
    try:
        yield from iter(datasets.load_dataset(dataset.id, name=dataset.config, split=dataset.split, streaming=True))
    except Exception as error:
        reason = next(iter(str(error).strip().splitlines()), "no reason given")
        raise RuntimeError(
            f"the Hugging Face dataset {dataset} (no file has that name) could not be read: "
            f"{type(error).__name__}: {reason}"
        ) from error
    finally:
        # A stream of parquet files that is left half-read can abort the interpreter at exit, even when closed (datasets
        # issue 7467). Without a garbage collection 16 of 36 exits aborted, with it none of 46.
        gc.collect()


def stream_corpus(
    dataset: DatasetName,
    *,
    cache: Path,
    tokens_needed: int,
    encode: Encode,
    end_of_text: int,
    vocab_size: int,
    held_out: float | Sequence[Path | str] = 0.01,
    held_out_least: int = 1,
    wait: bool = False,
    progress: Progress = silent,
    say: Callable[[str], None] = lambda line: None,
) -> Corpus:
    """The first documents of a dataset: ``tokens_needed`` tokens to train on, and a held-out part.

    ``held_out``: the share of documents to validate on, or the files to validate on instead. These documents are taken
        at even distances from the first one on, up to 1M tokens, so they do not depend on the length of the run.
    ``held_out_least``: the least tokens of the held-out part; documents after the training part fill it up.
    ``cache``: the folder that keeps the tokens for the next time.
    ``wait``: wait until another process has written the cache, for all processes but the first.
    ``progress`` counts training tokens.
    """
    check_request(held_out, end_of_text, vocab_size)
    if tokens_needed < 1:
        raise ValueError(f"tokens_needed must be at least 1, got {tokens_needed}")
    share = held_out if isinstance(held_out, float) else 0.0
    kept = [] if isinstance(held_out, float) else find_files(held_out)
    identity = [dataclasses.astuple(dataset), tokens_needed, share, share and held_out_least, vocab_size, end_of_text]
    stored = _Stored(cache, dataset, [*identity, _fingerprint(encode)], token_dtype(vocab_size))
    if wait:
        while stored.flaw() is not None:
            time.sleep(0.5)
    elif (flaw := stored.flaw()) is not None:
        if stored.facts.exists():
            say(f"what {cache} holds of {dataset} is damaged ({flaw}) and is read again")
        with contextlib.closing(read_dataset(dataset)) as texts:
            batches = encode_batches(texts, encode, end_of_text, vocab_size, dataset)
            stored.write(batches, tokens_needed, share, held_out_least, progress)
    corpus = stored.open()
    if len(corpus.train) < tokens_needed:
        say(
            f"{dataset} ended after {len(corpus.train):,} of {tokens_needed:,} tokens: the run will see them "
            f"{tokens_needed / len(corpus.train):.1f} times; another configuration or dataset may hold more"
        )
    if not kept:
        return corpus
    per_file = read_documents(kept, encode, end_of_text, vocab_size)
    documents = [document for file in per_file for document in file]
    return dataclasses.replace(
        corpus,
        held_out=np.concatenate(documents, dtype=token_dtype(vocab_size)),
        held_out_documents=len(documents),
    )


def _fingerprint(encode: Encode) -> str:
    """Identifies a tokenizer by its tokens of a sample. Its own description changes when it is saved and loaded."""
    probe = SAMPLE.read_text(encoding="utf-8")[:50_000] + "\n\tx_1 = [0.5e-3, 2024];  // Ünïcödé, 東京, Привет 🙂\r\n"
    return hashlib.sha256(json.dumps([list(map(int, ids)) for ids in encode([probe])]).encode()).hexdigest()


class _Stored:
    """Two files of tokens and a .json, written last, with their checksums. Without a match they are read again."""

    def __init__(self, folder: Path, dataset: DatasetName, identity: list[Any], dtype: np.dtype) -> None:
        digest = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:10]
        stem = re.sub(r"[^\w.]+", "-", str(dataset)) + "-" + digest
        suffix = f".u{8 * dtype.itemsize}"
        self.dataset, self.dtype = dataset, dtype
        self.train = folder / f"{stem}{suffix}"
        self.held_out = folder / f"{stem}-held-out{suffix}"
        self.facts = folder / f"{stem}.json"

    def flaw(self) -> str | None:
        """What is missing or damaged; None if the files are sound."""
        try:
            files = self._read_facts()["files"]
            described = {path.name: files[path.name] for path in (self.train, self.held_out)}
            return flaw_of_files(self.facts.parent, described)
        except (OSError, ValueError, TypeError, KeyError):
            return f"{self.facts.name} cannot be read"

    def _read_facts(self) -> dict[str, Any]:
        return json.loads(self.facts.read_text(encoding="utf-8"))

    def open(self) -> Corpus:
        facts = self._read_facts()
        return Corpus(
            train=map_tokens(self.train, self.dtype),
            held_out=map_tokens(self.held_out, self.dtype),
            documents=facts["documents"],
            held_out_documents=facts["held_out_documents"],
        )

    def write(
        self,
        batches: Iterable[list[np.ndarray]],
        tokens_needed: int,
        share: float,
        held_out_least: int,
        progress: Progress,
    ) -> None:
        """Write under other names, then rename. An interrupted download starts again."""
        self.facts.parent.mkdir(parents=True, exist_ok=True)
        self.facts.unlink(missing_ok=True)
        parts = {path: path.with_name(path.name + PART) for path in (self.train, self.held_out, self.facts)}
        try:
            with parts[self.train].open("wb") as train_file, parts[self.held_out].open("wb") as held_out_file:
                train, held_out = _Part(train_file), _Part(held_out_file)
                _fill(train, held_out, batches, tokens_needed, share, held_out_least, progress)
            if train.documents + held_out.documents == 0:
                raise ValueError(f"{self.dataset} holds no documents")
            if train.documents == 0:
                raise ValueError(f"{self.dataset}: {ONE_DOCUMENT}")
            name = {"dataset": self.dataset.id, "config": self.dataset.config, "split": self.dataset.split}
            facts = {
                **name,
                "tokens_needed": tokens_needed,
                "tokens": train.tokens,
                "documents": train.documents,
                "held_out_tokens": held_out.tokens,
                "held_out_documents": held_out.documents,
                "files": {path.name: describe_file(parts[path]) for path in (self.train, self.held_out)},
            }
            parts[self.facts].write_text(json.dumps(facts, indent=1), encoding="utf-8")
            for path, part in parts.items():  # in this order: the facts last
                part.replace(path)
        finally:
            for part in parts.values():
                part.unlink(missing_ok=True)


class _Part:
    def __init__(self, file: BinaryIO) -> None:
        self.file, self.tokens, self.documents = file, 0, 0

    def add(self, document: np.ndarray) -> None:
        self.file.write(document.tobytes())
        self.tokens += len(document)
        self.documents += 1


def _fill(
    train: _Part,
    held_out: _Part,
    batches: Iterable[list[np.ndarray]],
    tokens_needed: int,
    share: float,
    held_out_least: int,
    progress: Progress,
) -> None:
    """Put every document into one part. The choice depends on the documents before it, not on batches."""
    for batch in batches:
        for document in batch:
            its_turn = held_out.documents <= share * (train.documents + held_out.documents)
            is_held_out = share and (train.tokens >= tokens_needed or (its_turn and held_out.tokens < HELD_OUT_MOST))
            (held_out if is_held_out else train).add(document)
            if train.tokens >= tokens_needed and (not share or held_out.tokens >= held_out_least):
                progress(tokens_needed, tokens_needed)
                return
        progress(min(train.tokens, tokens_needed), tokens_needed)
