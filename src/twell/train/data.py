"""From files to blocks of tokens: read, tokenise, shuffle, pack and split documents, the same way every time.

A corpus is one long sequence of tokens, each document followed by an end-of-text token. Documents are shuffled once, by
seed, then packed without gaps and cut into blocks of the context length. Blocks do not overlap, so an epoch sees each
token once, and a sampler's seed and position are enough to resume. Held-out documents are whole documents, chosen
before the shuffle, so they are the same for every seed.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import lzma
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from twell.progress import Progress, silent

SAMPLE = Path(__file__).with_name("sample.txt")  # bundled, public domain: see SAMPLE.md
END_OF_TEXT = "<|endoftext|>"
TEXT_SUFFIXES = (".txt", ".jsonl", ".parquet")
TOKEN_SUFFIXES = (".u16", ".u16.xz")

BATCH_CHARACTERS = 1 << 21  # encoded at once: enough for all cores, about a second's work
SCAN_TOKENS = 1 << 24  # tokens of a tokenised file to check at once
ONE_DOCUMENT = "one document cannot be split into a training and a held-out part; give more text"

Encode = Callable[[list[str]], Sequence[Sequence[int]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """The tokens of a training part and a held-out part, each document followed by end-of-text."""

    train: np.ndarray  # [n] uint16 or uint32
    held_out: np.ndarray

    def __repr__(self) -> str:
        return f"Corpus({len(self.train):,} training tokens, {len(self.held_out):,} held out)"


class Blocks(Dataset):
    """Blocks [length] of consecutive tokens, without the last tokens that fill no block.

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


class PaddedBlocks(Dataset):
    """Blocks, then blocks without labels up to a multiple of ``n``: equal shares for all, nothing counted twice."""

    def __init__(self, blocks: Blocks, n: int) -> None:
        self.blocks, self.length = blocks, -(-len(blocks) // n) * n

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if index < len(self.blocks):
            return self.blocks[index]
        block = self.blocks[0]
        return block | {"labels": torch.full_like(block["labels"], -100)}  # which cross-entropy ignores


def load_corpus(
    paths: Sequence[Path | str],
    *,
    encode: Encode,
    end_of_text: int,
    vocab_size: int,
    held_out: float | Sequence[Path | str] = 0.01,
    seed: int = 0,
    progress: Progress = silent,
) -> Corpus:
    """Read files and folders into a corpus.

    ``encode`` turns a list of texts into token ids, without end-of-text.
    ``held_out`` is the share of documents to validate on, at least one document, or the files to validate on instead.
    ``progress`` gets about the bytes read so far, and the bytes of all files.
    """
    check_request(held_out, end_of_text, vocab_size)
    files = find_files(paths)
    held_out_files = [] if isinstance(held_out, float) else find_files(held_out)
    per_file = read_documents(files + held_out_files, encode, end_of_text, vocab_size, progress)
    documents = [document for file in per_file[: len(files)] for document in file]
    if isinstance(held_out, float):
        if len(documents) < 2:
            raise ValueError(ONE_DOCUMENT)
        chosen = _held_out_indices(len(documents), held_out)
        kept = [documents[i] for i in chosen]
        rest = np.setdiff1d(np.arange(len(documents)), chosen)
    else:
        kept = [document for file in per_file[len(files) :] for document in file]
        rest = np.arange(len(documents))
    order = np.random.default_rng(seed).permutation(rest)
    dtype = token_dtype(vocab_size)
    return Corpus(
        train=np.concatenate([documents[i] for i in order], dtype=dtype),
        held_out=np.concatenate(kept, dtype=dtype),
    )


def check_request(held_out: float | Sequence[Path | str], end_of_text: int, vocab_size: int) -> None:
    """Refuse impossible arguments before any data is read."""
    if isinstance(held_out, float) and not 0 < held_out < 1:
        raise ValueError(f"held_out must lie between 0 and 1, got {held_out}")
    if not 0 <= end_of_text < vocab_size:
        raise ValueError(f"end-of-text {end_of_text} is no token of a vocabulary of {vocab_size:,}")


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest unsigned integers that hold every token, in memory and in files; little-endian."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def find_files(paths: Sequence[Path | str]) -> list[Path]:
    """The data files that paths name or, as folders, contain; in a fixed order."""
    known = ", ".join(TEXT_SUFFIXES + TOKEN_SUFFIXES)
    found: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            inside = [p for p in sorted(path.rglob("*")) if p.is_file() and _suffix(p)]
            if not inside:
                raise ValueError(f"{path} holds no {known} files")
            found.extend(inside)
        elif not path.exists():
            raise FileNotFoundError(
                f"{path} does not exist: expected a file ({known}), a folder of these, "
                f"or, to train on, a Hugging Face dataset as owner/name[:config[:split]]"
            )
        elif not _suffix(path):
            raise ValueError(f"{path}: expected one of {known}")
        else:
            found.append(path)
    if not found:
        raise ValueError("no data files given")
    return found


def read_texts(path: Path) -> Iterator[str]:
    """The documents of a text file: .txt is cut at lines of end-of-text, .jsonl and .parquet have a field "text"."""
    if path.suffix not in TEXT_SUFFIXES:
        raise ValueError(f"{path}: expected text, one of {', '.join(TEXT_SUFFIXES)}")
    if path.suffix == ".txt":
        return _cut_text(read_utf8(path))
    return _json_texts(path) if path.suffix == ".jsonl" else _parquet_texts(path)


def read_utf8(path: Path) -> str:
    """The text of a file."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{path} is no text in UTF-8") from None


def _cut_text(text: str) -> Iterator[str]:
    parts: list[list[str]] = [[]]
    for line in text.splitlines(keepends=True):
        if line.strip() == END_OF_TEXT:
            parts.append([])
        else:
            parts[-1].append(line)
    return (document for part in parts if (document := "".join(part).strip()))


def _json_texts(path: Path) -> Iterator[str]:
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                record: Any = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{where} is not JSON: {getattr(error, 'msg', error)}") from None
            text = record.get("text") if isinstance(record, dict) else None
            if not isinstance(text, str):
                raise ValueError(f"{where} has no field 'text' with a string")
            try:
                text.encode()
            except UnicodeEncodeError:  # JSON can hold \ud800 alone, which is no character
                raise ValueError(f"{where} holds half a character (a lone surrogate)") from None
            yield text


def _parquet_texts(path: Path) -> Iterator[str]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise ValueError(f"{path}: reading .parquet needs pyarrow: pip install pyarrow") from None
    try:
        table = parquet.ParquetFile(path)
        names = table.schema_arrow.names
        if "text" not in names:
            raise ValueError(f"{path} has no column 'text', only {', '.join(names)}")
        for batch in table.iter_batches(columns=["text"]):
            for text in batch.column(0).to_pylist():
                if not isinstance(text, str | None):
                    raise ValueError(f"{path}: the column 'text' holds {type(text).__name__}, not text")
                if text:
                    yield text
    except (pyarrow.ArrowException, OSError) as error:
        raise ValueError(f"{path} is no whole .parquet file: {error}") from None


def read_documents(
    files: Sequence[Path], encode: Encode, end_of_text: int, vocab_size: int, progress: Progress = silent
) -> list[list[np.ndarray]]:
    """The documents of each file as tokens, each ending in end-of-text."""
    sizes = [path.stat().st_size for path in files]
    per_file = []
    for number, path in enumerate(files):
        before, after = sum(sizes[:number]), sum(sizes[: number + 1])
        if _suffix(path) in TOKEN_SUFFIXES:
            documents = _token_documents(path, end_of_text, vocab_size)
        else:
            documents = []
            for n, batch in enumerate(encode_batches(read_texts(path), encode, end_of_text, vocab_size, path), 1):
                documents += batch
                progress(min(before + n * BATCH_CHARACTERS, after), sum(sizes))
        if not documents:
            raise ValueError(f"{path} holds no documents")
        per_file.append(documents)
        progress(after, sum(sizes))
    return per_file


def encode_batches(
    texts: Iterable[str], encode: Encode, end_of_text: int, vocab_size: int, where: object
) -> Iterator[list[np.ndarray]]:
    """Encode texts batch by batch, each text followed by end-of-text. Tokenizers use all cores for a batch."""
    dtype = token_dtype(vocab_size)

    def encoded() -> list[np.ndarray]:
        documents = [np.array([*tokens, end_of_text], dtype=np.int64) for tokens in encode(batch) if len(tokens)]
        for ids in documents:
            _check_ids(ids, vocab_size, where)
        return [ids.astype(dtype) for ids in documents]

    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text) + 1
        if characters >= BATCH_CHARACTERS:
            yield encoded()
            batch, characters = [], 0
    if batch:
        yield encoded()


def _token_documents(path: Path, end_of_text: int, vocab_size: int) -> list[np.ndarray]:
    """Views of the file's tokens, which may be many. Only a last document without end-of-text is copied."""
    tokens = _open_tokens(path)
    ends = [np.zeros(1, dtype=np.int64)]
    for start in range(0, len(tokens), SCAN_TOKENS):
        chunk = tokens[start : start + SCAN_TOKENS]
        _check_ids(chunk, vocab_size, path)
        ends.append(np.flatnonzero(chunk == end_of_text) + start + 1)
    bounds = np.concatenate(ends)
    documents = [tokens[a:b] for a, b in itertools.pairwise(bounds.tolist()) if b - a > 1]
    if len(rest := tokens[bounds[-1] :]):
        documents.append(np.append(rest, np.array(end_of_text, dtype=token_dtype(vocab_size))))
    return documents


def _open_tokens(path: Path) -> np.ndarray:
    """The tokens of a file: memory-mapped, unless the file is compressed."""
    data: bytes | np.ndarray
    if path.suffix == ".xz":
        try:
            data = lzma.decompress(path.read_bytes())
        except lzma.LZMAError as error:
            raise ValueError(f"{path} is not a whole .xz file: {error}") from None
    else:
        data = map_tokens(path, np.dtype("u1"))
    if len(data) % 2:
        raise ValueError(f"{path} holds {len(data):,} bytes: not a whole number of 16-bit tokens")
    return np.frombuffer(data, dtype="<u2")


def map_tokens(path: Path, dtype: np.dtype) -> np.ndarray:
    """A file as a memory-mapped array; an empty file, which cannot be mapped, as an empty array."""
    if path.stat().st_size == 0:
        return np.zeros(0, dtype=dtype)
    return np.asarray(np.memmap(path, dtype=dtype, mode="r"))  # a plain array: slices of a memmap are slow


def _check_ids(ids: np.ndarray, vocab_size: int, where: object) -> None:
    if len(ids) and int(ids.max()) >= vocab_size:
        raise ValueError(
            f"{where} has token {int(ids.max()):,}, but the model's vocabulary ends at {vocab_size - 1:,}: "
            f"another tokenizer?"
        )


def _held_out_indices(n_documents: int, share: float) -> np.ndarray:
    """Indices of documents spread evenly over the corpus, the same for every seed."""
    n = min(n_documents - 1, max(1, round(n_documents * share)))
    return (np.arange(n) * n_documents) // n + n_documents // (2 * n)


def _suffix(path: Path) -> str | None:
    return next((s for s in TOKEN_SUFFIXES + TEXT_SUFFIXES if path.name.endswith(s)), None)
