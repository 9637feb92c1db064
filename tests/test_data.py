"""Data and tokenizers: every file kind, packing, shuffling, held-out documents, errors."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twell.train import data
from twell.train.data import SAMPLE, Blocks, find_files, load_corpus, read_texts
from twell.train.tokenizer import load_tokenizer, train_bpe

END = 0


def encode(texts: list[str]) -> list[list[int]]:
    """One token a character."""
    return [[ord(c) for c in text] for text in texts]


def corpus_of(*paths: Path, **options: Any):
    settings = {"encode": encode, "end_of_text": END, "vocab_size": 256, "held_out": 0.2, "seed": 0, **options}
    return load_corpus(paths, **settings)


def documents_of(tokens: np.ndarray) -> list[str]:
    return "".join(map(chr, tokens)).split("\0")[:-1]


TEXTS = [f"document {i}" for i in range(10)]


def write(folder: Path, kind: str, texts: list[str]) -> Path:
    path = folder / f"data{kind}"
    packed = np.array([t for text in texts for t in (*encode([text])[0], END)], dtype="<u2").tobytes()
    if kind == ".txt":
        path.write_text("\n<|endoftext|>\n".join(texts))
    elif kind == ".jsonl":
        path.write_text("".join(json.dumps({"text": text, "id": 1}) + "\n" for text in texts))
    elif kind == ".u16":
        path.write_bytes(packed)
    else:
        path.write_bytes(lzma.compress(packed))
    return path


def test_every_kind_of_file_gives_the_same_corpus(tmp_path: Path) -> None:
    corpora = [corpus_of(write(tmp_path, kind, TEXTS)) for kind in (".txt", ".jsonl", ".u16", ".u16.xz")]
    for corpus in corpora:
        assert sorted(documents_of(corpus.train) + documents_of(corpus.held_out)) == TEXTS
        assert corpus.train.dtype == np.uint16
        assert (len(documents_of(corpus.train)), len(documents_of(corpus.held_out))) == (8, 2)
        assert np.array_equal(corpus.train, corpora[0].train)
        assert np.array_equal(corpus.held_out, corpora[0].held_out)


def test_parquet_files_are_read_and_what_they_need_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "data.parquet"
    path.write_bytes(b"PAR1")
    with monkeypatch.context() as m:
        m.setitem(sys.modules, "pyarrow", None)  # importing it fails
        with pytest.raises(ValueError, match="needs pyarrow"):
            corpus_of(path)
    with pytest.raises(ValueError, match=r"data\.parquet is no whole \.parquet file"):
        corpus_of(path)
    pyarrow.parquet.write_table(pyarrow.table({"text": [*TEXTS, None, ""]}), path)
    assert sorted(read_texts(path)) == TEXTS
    calls: list[tuple[int, int]] = []
    corpus = corpus_of(path, progress=lambda done, total: calls.append((done, total)))
    assert sorted(documents_of(corpus.train) + documents_of(corpus.held_out)) == TEXTS
    assert calls[-1] == (path.stat().st_size, path.stat().st_size)
    pyarrow.parquet.write_table(pyarrow.table({"body": TEXTS}), path)
    with pytest.raises(ValueError, match="no column 'text', only body"):
        corpus_of(path)
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), path)
    with pytest.raises(ValueError, match=r"data\.parquet: the column 'text' holds int, not text"):
        corpus_of(path)


@given(
    lengths=st.lists(st.integers(1, 9), min_size=2, max_size=30),
    held_out=st.floats(0.01, 0.99),
    seed=st.integers(0, 99),
)
def test_no_document_is_lost_or_doubled(lengths: list[int], held_out: float, seed: int, tmp_path_factory) -> None:
    texts = [chr(65 + i) * n for i, n in enumerate(lengths)]
    path = write(tmp_path_factory.mktemp("d"), ".u16", texts)
    corpus = corpus_of(path, held_out=held_out, seed=seed)
    train, kept = documents_of(corpus.train), documents_of(corpus.held_out)
    assert sorted(train + kept) == sorted(texts)
    assert train and kept


def test_shuffling_follows_the_seed_and_the_held_out_part_does_not(tmp_path: Path) -> None:
    path = write(tmp_path, ".jsonl", TEXTS)
    one, again, other = (corpus_of(path, seed=s) for s in (1, 1, 2))
    assert np.array_equal(one.train, again.train)
    assert not np.array_equal(one.train, other.train)
    assert np.array_equal(one.held_out, other.held_out)
    (tmp_path / "sub").mkdir()
    for name in ("b.txt", "a.jsonl", "sub/c.u16", "ignored.csv"):  # folders are searched in a fixed order
        (tmp_path / name).touch()
    assert [p.name for p in find_files([tmp_path])] == ["a.jsonl", "b.txt", "data.jsonl", "c.u16"]


def test_files_to_validate_on_replace_the_held_out_share(tmp_path: Path) -> None:
    (tmp_path / "validation").mkdir()
    train = write(tmp_path, ".jsonl", TEXTS)
    validation = write(tmp_path / "validation", ".u16", ["one", "two"])
    corpus = corpus_of(train, held_out=[validation])
    assert sorted(documents_of(corpus.train)) == TEXTS
    assert documents_of(corpus.held_out) == ["one", "two"]  # not shuffled
    assert not np.array_equal(corpus.train, corpus_of(train, held_out=[validation], seed=1).train)
    one = write(tmp_path, ".txt", ["a single document can be trained on"])
    assert len(documents_of(corpus_of(one, held_out=[str(validation)]).train)) == 1
    with pytest.raises(FileNotFoundError, match="missing"):
        corpus_of(train, held_out=[tmp_path / "missing.txt"])
    with pytest.raises(ValueError, match="no data files"):
        corpus_of(train, held_out=[])


@pytest.mark.parametrize("kind", [".txt", ".jsonl", ".u16"])
def test_batches_of_any_size_give_the_same_corpus(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path, kind, [*TEXTS, "", "the end"])
    batches: list[int] = []

    def counting(texts: list[str]) -> list[list[int]]:
        batches.append(len(texts))
        return encode(texts)

    expected = corpus_of(path, encode=counting)
    assert batches == ([] if kind == ".u16" else [11 + (kind == ".jsonl")])
    for characters, scanned in [(1, 1), (25, 7), (40, 1000)]:
        monkeypatch.setattr(data, "BATCH_CHARACTERS", characters)
        monkeypatch.setattr(data, "SCAN_TOKENS", scanned)
        batches.clear()
        corpus = corpus_of(path, encode=counting)
        assert np.array_equal(corpus.train, expected.train)
        assert np.array_equal(corpus.held_out, expected.held_out)
        assert kind == ".u16" or len(batches) > 2


def test_progress_counts_about_the_bytes_of_all_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data, "BATCH_CHARACTERS", 30)
    files = [write(tmp_path, kind, TEXTS) for kind in (".txt", ".jsonl", ".u16", ".u16.xz")]
    (tmp_path / "validation").mkdir()
    validation = write(tmp_path / "validation", ".jsonl", TEXTS)
    calls: list[tuple[int, int]] = []
    corpus_of(*files, held_out=[validation], progress=lambda done, total: calls.append((done, total)))
    sizes = [path.stat().st_size for path in (*files, validation)]
    done = [d for d, _ in calls]
    assert {total for _, total in calls} == {sum(sizes)} and done == sorted(done)
    assert {30, 60, *np.cumsum(sizes).tolist()} <= set(done)


def test_token_files_are_not_copied_and_a_last_document_is_ended(tmp_path: Path) -> None:
    [documents] = data.read_documents([write(tmp_path, ".u16", TEXTS)], encode, END, 256)
    assert len(documents) == 10
    assert all(document.base is not None and not document.flags.writeable for document in documents)  # of the map
    path = tmp_path / "x.u16"
    path.write_bytes(np.array([5, 6, END, 7, 8], dtype="<u2").tobytes())
    corpus = corpus_of(path, held_out=0.5)
    assert sorted([corpus.train.tolist(), corpus.held_out.tolist()]) == [[5, 6, END], [7, 8, END]]


def test_large_vocabularies_take_32_bits(tmp_path: Path) -> None:
    def long_tokens(texts: list[str]) -> list[list[int]]:
        return [[70_000] * len(text) for text in texts]

    corpus = corpus_of(write(tmp_path, ".txt", ["ab", "c"]), encode=long_tokens, vocab_size=70_001)
    assert corpus.train.dtype == np.uint32
    assert 70_000 in corpus.train
    short = corpus_of(write(tmp_path, ".u16", ["ab", "c"]), vocab_size=70_001)
    assert short.train.dtype == np.uint32
    assert documents_of(short.train) + documents_of(short.held_out) in (["ab", "c"], ["c", "ab"])
    with pytest.raises(ValueError, match="one document"):  # no 16-bit token can be that end-of-text
        corpus_of(tmp_path / "data.u16", vocab_size=70_001, end_of_text=70_000)


def test_blocks_cover_the_tokens_once() -> None:
    blocks = Blocks(np.arange(23, dtype=np.uint16), 5)
    seen = [t for i in range(len(blocks)) for t in blocks[i]["input_ids"].tolist()]
    assert seen == list(range(20))
    assert blocks[3]["labels"].tolist() == blocks[3]["input_ids"].tolist()
    with pytest.raises(IndexError):
        blocks[4]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.csv", b"", "expected one of .txt"),
        ("x.txt", b" \n", "holds no documents"),
        ("x.jsonl", b'{"text": "a"}\n{"body": "b"}\n', "line 2 has no field 'text'"),
        ("x.jsonl", b"{", "line 1 is not JSON"),
        ("x.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', "line 2 is not JSON"),
        ("x.jsonl", b'{"text": ' + b"[" * 100_000, "x.jsonl, line 1 is not JSON: maximum recursion"),
        ("x.jsonl", b'{"text": "a", "n": ' + b"9" * 5000 + b"}", "x.jsonl, line 1 is not JSON"),
        ("x.jsonl", b'{"text": "a\\ud800"}', "x.jsonl, line 1 holds half a character"),
        ("x.txt", "abc".encode("utf-16"), "x.txt is no text in UTF-8"),
        ("x.u16", b"", "holds no documents"),
        ("x.u16", b"abc", "not a whole number of 16-bit tokens"),
        ("x.u16.xz", b"nonsense", "not a whole .xz file"),
        ("x.u16", b"\xff\xff\x00\x00", "has token 65,535, but the model's vocabulary ends at 255"),
        ("x.txt", b"only one", "one document cannot be split"),
    ],
)
def test_bad_files_are_named(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        corpus_of(path)


def test_bad_requests_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"does not exist: .*\.jsonl.* owner/name\[:config\[:split\]\]"):
        corpus_of(tmp_path / "missing.txt")
    with pytest.raises(ValueError, match="holds no"):
        corpus_of(tmp_path)
    with pytest.raises(ValueError, match="no data files"):
        corpus_of()
    path = write(tmp_path, ".txt", TEXTS)
    with pytest.raises(ValueError, match="held_out must lie between"):
        corpus_of(path, held_out=1.5)
    with pytest.raises(ValueError, match="is no token of a vocabulary"):
        corpus_of(path, end_of_text=300)
    with pytest.raises(ValueError, match="do not fill one block"):
        Blocks(np.arange(3, dtype=np.uint16), 4)


def test_bundled_sample_with_a_bpe_of_its_own(tmp_path: Path) -> None:
    texts = list(read_texts(SAMPLE))
    assert len(texts) > 100
    tokenizer = train_bpe(texts[:20], 600)
    assert tokenizer.eos_token_id == 0
    assert len(tokenizer) == 600
    odd = "Dr. Müller said: 東京 🙂\n\n  twice"
    assert tokenizer.decode(tokenizer.encode(odd)) == odd
    tokenizer.save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).encode(odd) == tokenizer.encode(odd)
    from_file = load_tokenizer(tmp_path / "tokenizer.json")
    assert from_file.encode(odd) == tokenizer.encode(odd)
    assert from_file.eos_token_id == 0


def test_bad_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="does not exist"):
        load_tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a tokenizer"):
        load_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(ValueError, match="vocab_size must be at least 257"):
        train_bpe(["text"], 100)
