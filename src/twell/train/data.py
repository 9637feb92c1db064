"""From files to blocks of tokens: documents read, tokenised, shuffled, packed, and split, the same every time.

A corpus is one long row of tokens, every document followed by an end-of-text token. Documents are shuffled once
(by seed), then packed without gaps and cut into blocks of the context length. Blocks do not overlap, so no
token is seen twice before an epoch ends; a sampler with a seed and a position is all it takes to resume.
Held-out documents are whole documents, chosen before the shuffle, so that they are the same for every seed.
"""

from __future__ import annotations

import dataclasses
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

SAMPLE = Path(__file__).with_name("sample.txt")  # bundled, public domain: see SAMPLE.md
END_OF_TEXT = "<|endoftext|>"
TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")
TOKEN_SUFFIXES = (".u16", ".u16.xz")

Encode = Callable[[str], Sequence[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Tokens of a training and a held-out part, each document followed by end-of-text."""

    train: np.ndarray  # [n] uint16 or uint32
    held_out: np.ndarray
    documents: int
    held_out_documents: int

    def __repr__(self) -> str:
        return (
            f"Corpus({len(self.train):,} training tokens in {self.documents - self.held_out_documents:,} documents, "
            f"{len(self.held_out):,} held out in {self.held_out_documents:,})"
        )


class Blocks(Dataset):
    """Blocks [length] of consecutive tokens; the last tokens that fill no block are left out.

    >>> blocks = Blocks(np.arange(10, dtype=np.uint16), 4)
    >>> len(blocks), blocks[1]["input_ids"].tolist()
    (2, [4, 5, 6, 7])
    """

    def __init__(self, tokens: np.ndarray, length: int) -> None:
        if length < 2:
            raise ValueError(f"blocks must hold at least 2 tokens, got {length}")
        if len(tokens) < length:
            raise ValueError(f"{len(tokens):,} tokens do not fill one block of {length:,}")
        self.tokens, self.length = tokens, length

    def __len__(self) -> int:
        return len(self.tokens) // self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(f"block {index} of {len(self)}")
        start = index * self.length
        ids = torch.from_numpy(self.tokens[start : start + self.length].astype(np.int64))
        return {"input_ids": ids, "labels": ids.clone()}


def load_corpus(
    paths: Sequence[Path | str],
    *,
    encode: Encode | None,
    end_of_text: int,
    vocab_size: int,
    held_out: float = 0.01,
    seed: int = 0,
    progress: Callable[[Path], None] = lambda path: None,
) -> Corpus:
    """Read files and folders into a corpus.

    ``encode`` turns text into token ids (without end-of-text); it may be None for tokenised files alone.
    ``held_out`` is the share of documents kept for validation, at least one. ``progress`` is called per file.
    """
    if not 0 < held_out < 1:
        raise ValueError(f"held_out must lie between 0 and 1, got {held_out}")
    if not 0 <= end_of_text < vocab_size:
        raise ValueError(f"end-of-text {end_of_text} is no token of a vocabulary of {vocab_size:,}")
    documents: list[np.ndarray] = []
    for path in find_files(paths):
        progress(path)
        before = len(documents)
        documents.extend(_read_documents(path, encode, end_of_text, vocab_size))
        if len(documents) == before:
            raise ValueError(f"{path} holds no documents")
    if len(documents) < 2:
        raise ValueError("one document cannot be split into a training and a held-out part; give more text")
    chosen = _held_out_indices(len(documents), held_out)
    rest = np.setdiff1d(np.arange(len(documents)), chosen)
    order = np.random.default_rng(seed).permutation(rest)
    return Corpus(
        train=np.concatenate([documents[i] for i in order]),
        held_out=np.concatenate([documents[i] for i in chosen]),
        documents=len(documents),
        held_out_documents=len(chosen),
    )


def find_files(paths: Sequence[Path | str]) -> list[Path]:
    """The readable files behind paths, folders searched, in a fixed order."""
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = [p for p in sorted(path.rglob("*")) if p.is_file() and _suffix(p)]
            if not inside:
                raise ValueError(f"{path} holds no {', '.join(TEXT_SUFFIXES + TOKEN_SUFFIXES)} files")
            found.extend(inside)
        elif not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
        elif not _suffix(path):
            known = ", ".join(TEXT_SUFFIXES + TOKEN_SUFFIXES)
            raise ValueError(f"{path}: expected one of {known}")
        else:
            found.append(path)
    if not found:
        raise ValueError("no data files given")
    return found


def read_texts(path: Path) -> Iterator[str]:
    """The documents of a text file: .txt cut at lines of end-of-text, .jsonl and .parquet by their "text"."""
    if path.suffix == ".txt":
        yield from _cut_text(path.read_text(encoding="utf-8"))
    elif path.suffix == ".jsonl":
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield _text_of(line, f"{path}, line {number}")
    else:
        try:
            import pyarrow.parquet as parquet
        except ImportError:
            raise ValueError(f"{path}: reading .parquet needs pyarrow: pip install pyarrow") from None
        table = parquet.ParquetFile(path)
        if "text" not in table.schema_arrow.names:
            raise ValueError(f"{path} has no column 'text', only {', '.join(table.schema_arrow.names)}")
        for batch in table.iter_batches(columns=["text"]):
            yield from (text for text in batch.column(0).to_pylist() if text)


def _cut_text(text: str) -> Iterable[str]:
    parts: list[list[str]] = [[]]
    for line in text.splitlines(keepends=True):
        if line.strip() == END_OF_TEXT:
            parts.append([])
        else:
            parts[-1].append(line)
    return (document for part in parts if (document := "".join(part).strip()))


def _text_of(line: str, where: str) -> str:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error.msg}") from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise ValueError(f"{where} has no field 'text' with a string")
    return record["text"]


def _read_documents(path: Path, encode: Encode | None, end_of_text: int, vocab_size: int) -> Iterator[np.ndarray]:
    """Token documents of one file, each ending in end-of-text."""
    dtype = np.uint16 if vocab_size <= 1 << 16 else np.uint32
    if _suffix(path) in TOKEN_SUFFIXES:
        tokens = _read_tokens(path)
        _check_ids(tokens, vocab_size, path)
        ends = np.flatnonzero(tokens == end_of_text) + 1
        if len(tokens) and (len(ends) == 0 or ends[-1] != len(tokens)):  # the last document was not ended
            tokens = np.append(tokens, np.uint16(end_of_text))
            ends = np.append(ends, len(tokens))
        starts = np.concatenate([[0], ends[:-1]])
        yield from (tokens[a:b].astype(dtype) for a, b in zip(starts, ends, strict=True) if b - a > 1)
        return
    if encode is None:
        raise ValueError(f"{path} is text: a tokenizer is needed to read it")
    for text in read_texts(path):
        ids = np.asarray(encode(text), dtype=np.int64)
        _check_ids(ids, vocab_size, path)
        if len(ids):
            yield np.append(ids, end_of_text).astype(dtype)


def _read_tokens(path: Path) -> np.ndarray:
    try:
        data = lzma.decompress(path.read_bytes()) if path.suffix == ".xz" else path.read_bytes()
    except lzma.LZMAError as error:
        raise ValueError(f"{path} is not a whole .xz file: {error}") from None
    if len(data) % 2:
        raise ValueError(f"{path} holds {len(data):,} bytes: not a whole number of 16-bit tokens")
    return np.frombuffer(data, dtype="<u2")


def _check_ids(ids: np.ndarray, vocab_size: int, path: Path) -> None:
    if len(ids) and int(ids.max()) >= vocab_size:
        raise ValueError(
            f"{path} has token {int(ids.max()):,}, but the model's vocabulary ends at {vocab_size - 1:,}: "
            f"another tokenizer?"
        )


def _held_out_indices(n_documents: int, share: float) -> np.ndarray:
    """Documents spread evenly over the corpus: the same for every seed."""
    n = min(n_documents - 1, max(1, round(n_documents * share)))
    return (np.arange(n) * n_documents) // n + n_documents // (2 * n)


def _suffix(path: Path) -> str | None:
    return next((s for s in TOKEN_SUFFIXES + TEXT_SUFFIXES if path.name.endswith(s)), None)
