"""A Hugging Face dataset as a corpus: streamed, tokenised on the way, and kept on disk as tokens.

A run reads only as many documents as it needs, and memory holds one batch of them. A folder with two files keeps the
tokens of the training and the held-out part; they are memory-mapped, and a manifest is written last. Documents stay in
the dataset's order; the sampler shuffles blocks anyway.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import hashlib
import importlib
import itertools
import json
import re
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from pathlib import Path
from typing import Any

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
from twell.train.files import MANIFEST_FILE, finish_folder, flaw_of_folder

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

    ``held_out``: the share of tokens to validate on, or the files to validate on instead. Documents are held out along
        the way, from the first one on, at least ``held_out_least`` and at most 1M tokens. So they do not depend on the
        length of the run.
    ``cache``: the folder that keeps the tokens for the next time.
    ``wait``: wait until another process has written the cache, for all processes but the first.
    ``progress`` counts training tokens.
    """
    check_request(held_out, end_of_text, vocab_size)
    if tokens_needed < 1:
        raise ValueError(f"tokens_needed must be at least 1, got {tokens_needed}")
    share = held_out if isinstance(held_out, float) else 0.0
    files = [] if share else find_files(held_out)  # type: ignore[arg-type]
    dtype = token_dtype(vocab_size)
    train, kept = (cache / f"{name}.u{8 * dtype.itemsize}" for name in ("train", "held-out"))
    request: dict[str, Any] = {
        "dataset": str(dataset),
        "tokens_needed": tokens_needed,
        "held_out": [share, held_out_least],
        "vocab_size": vocab_size,
        "end_of_text": end_of_text,
        "tokenizer": _fingerprint(encode),
    }
    while (flaw := flaw_of_folder(cache, request)) is not None and wait:
        time.sleep(0.5)
    if flaw is not None:
        if (cache / MANIFEST_FILE).exists():
            say(f"{cache} {flaw}; {dataset} is read again")
            (cache / MANIFEST_FILE).unlink()
        cache.mkdir(parents=True, exist_ok=True)
        with contextlib.closing(read_dataset(dataset)) as texts:
            batches = encode_batches(texts, encode, end_of_text, vocab_size, dataset)
            _split(dataset, batches, train, kept, tokens_needed, share, held_out_least, progress)
        finish_folder(cache, request)
    corpus = Corpus(train=map_tokens(train, dtype), held_out=map_tokens(kept, dtype))
    if len(corpus.train) < tokens_needed:
        say(
            f"{dataset} ended after {len(corpus.train):,} of {tokens_needed:,} tokens: the run will see them "
            f"{tokens_needed / len(corpus.train):.1f} times; another configuration or dataset may hold more"
        )
    if share:
        return corpus
    documents = itertools.chain(*read_documents(files, encode, end_of_text, vocab_size))
    return dataclasses.replace(corpus, held_out=np.concatenate(list(documents), dtype=dtype))


def _split(
    dataset: DatasetName,
    batches: Iterable[list[np.ndarray]],
    train: Path,
    kept: Path,
    tokens_needed: int,
    share: float,
    least: int,
    progress: Progress,
) -> None:
    """Write every document into one of two files. The choice depends on the documents before it, not on batches."""
    n_train = n_kept = 0
    with train.open("wb") as to_train, kept.open("wb") as to_keep:
        for batch in batches:
            for document in batch:
                if n_train >= tokens_needed:
                    break
                if share and n_kept < max(least, min(share * n_train, HELD_OUT_MOST)):
                    to_keep.write(document.tobytes())
                    n_kept += len(document)
                else:
                    to_train.write(document.tobytes())
                    n_train += len(document)
            progress(min(n_train, tokens_needed), tokens_needed)
            if n_train >= tokens_needed:
                break
    if n_train == 0:
        raise ValueError(f"{dataset}: {ONE_DOCUMENT}" if n_kept else f"{dataset} holds no documents")


def _fingerprint(encode: Encode) -> str:
    """Identifies a tokenizer by its tokens of a sample. Its own description changes when it is saved and loaded."""
    probe = SAMPLE.read_text(encoding="utf-8")[:50_000] + "\n\tx_1 = [0.5e-3, 2024];  // Ünïcödé, 東京, Привет 🙂\r\n"
    return hashlib.sha256(json.dumps([list(map(int, ids)) for ids in encode([probe])]).encode()).hexdigest()
