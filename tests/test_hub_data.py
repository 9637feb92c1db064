"""Hugging Face datasets: names, what a run reads of them, the tokens kept on disk, errors. The library is a fake."""

from __future__ import annotations

import json
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twell.train import data, hub_data
from twell.train.data import Blocks, Corpus
from twell.train.hub_data import DatasetName, find_dataset, read_dataset, stream_corpus
from twell.train.tokenizer import load_tokenizer, train_bpe

END = 0
NAME = DatasetName("owner/name", "config")
TEXTS = [f"document {i:03}" for i in range(300)]  # 12 characters: 13 tokens each


def encode(texts: list[str]) -> list[list[int]]:
    """One token a character."""
    return [[ord(c) for c in text] for text in texts]


def documents_of(tokens: np.ndarray) -> list[str]:
    return "".join(map(chr, tokens)).split("\0")[:-1]


class FakeHub:
    """Stands in for the module ``datasets``."""

    def __init__(self) -> None:
        self.rows: Callable[[], Iterable[dict[str, Any]]] = lambda: ({"text": text, "url": "x"} for text in TEXTS)
        self.loads: list[tuple[str, dict[str, Any]]] = []
        self.read = 0
        self.closed = 0

    def load_dataset(self, path: str, **options: Any) -> Iterator[dict[str, Any]]:
        self.loads.append((path, options))
        return self._iterate()

    def _iterate(self) -> Iterator[dict[str, Any]]:
        try:
            for row in self.rows():
                self.read += 1
                yield row
        finally:
            self.closed += 1


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub()
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=fake.load_dataset))
    monkeypatch.setattr(hub_data.gc, "collect", lambda: 0)  # which takes a quarter of a second here
    return fake


def corpus_of(cache: Path, **options: Any) -> Corpus:
    settings = {"tokens_needed": 1000, "encode": encode, "end_of_text": END, "vocab_size": 256, **options}
    return stream_corpus(settings.pop("dataset", NAME), cache=cache, **settings)


# -- names ------------------------------------------------------------------------------------------------


def test_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, dataset in {
        "owner/name": DatasetName("owner/name", None, "train"),
        "owner/na.me-2:config": DatasetName("owner/na.me-2", "config", "train"),
        "owner/name:config:validation": DatasetName("owner/name", "config", "validation"),
        "HuggingFaceFW/fineweb": DatasetName("HuggingFaceFW/fineweb", "sample-10BT"),
        "HuggingFaceFW/fineweb-edu": DatasetName("HuggingFaceFW/fineweb-edu", "sample-10BT"),
        "HuggingFaceFW/fineweb:CC-MAIN-2024-10": DatasetName("HuggingFaceFW/fineweb", "CC-MAIN-2024-10"),
        Path("owner/name:config"): DatasetName("owner/name", "config"),
    }.items():
        assert find_dataset([name]) == dataset
    others = ("name", "./owner/name", "../name", "/owner/name", "/owner", "~/name", "a/b/c", "owner/", "owner/x.txt")
    others += ("owner/x.jsonl", "owner/x.u16.xz", "owner/name:", "owner/name:a:b:c", "owner/two words", "")
    assert [name for name in others if find_dataset([name])] == [] and find_dataset([]) is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert find_dataset(["owner/name"]) is find_dataset(["owner/name", "also.txt"]) is None  # it exists on disk
    with pytest.raises(ValueError, match=r"owner/other looks like a Hugging Face dataset .* give it alone"):
        find_dataset(["owner/name", "owner/other"])


# -- what is read and kept --------------------------------------------------------------------------------


def test_a_dataset_becomes_a_corpus_on_disk(hub: FakeHub, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    lines: list[str] = []
    cache = tmp_path / "run" / "data"
    corpus = corpus_of(cache, progress=lambda *call: calls.append(call), say=lines.append)
    assert hub.loads == [("owner/name", {"name": "config", "split": "train", "streaming": True})]
    assert documents_of(corpus.held_out) == [TEXTS[0]]
    assert documents_of(corpus.train) == TEXTS[1:78]  # 77 documents of 13 tokens: the first to reach 1000
    assert corpus.train.dtype == np.uint16 and isinstance(corpus.train.base, np.memmap)
    assert calls[-1] == (1000, 1000) and lines == []
    assert Blocks(corpus.train, 10)[99]["input_ids"].tolist() == corpus.train[990:1000].tolist()

    manifest = json.loads((cache / "manifest.json").read_text())
    assert {name: file["bytes"] for name, file in manifest["files"].items()} == {"held-out.u16": 26, "train.u16": 2002}
    assert manifest["dataset"] == "owner/name:config:train" and manifest["tokens_needed"] == 1000


def test_only_what_is_needed_is_read_and_batches_change_nothing(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"tokens_needed": 3000, "held_out": 0.07, "held_out_least": 300}
    expected = corpus_of(tmp_path / "all", **options)
    for characters in (1, 91, 1300):
        monkeypatch.setattr(data, "BATCH_CHARACTERS", characters)
        corpus = corpus_of(tmp_path / str(characters), **options)
        assert np.array_equal(corpus.train, expected.train) and np.array_equal(corpus.held_out, expected.held_out)
    monkeypatch.setattr(data, "BATCH_CHARACTERS", 13 * 13)
    calls: list[tuple[int, int]] = []
    hub.read = hub.closed = 0
    corpus_of(tmp_path, progress=lambda *call: calls.append(call))
    assert (hub.read, hub.closed) == (78, 1)  # six batches
    assert calls == [(156, 1000), (325, 1000), (494, 1000), (663, 1000), (832, 1000), (1000, 1000)]


def test_held_out_documents_do_not_depend_on_the_length_of_the_run(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short, long = (corpus_of(tmp_path / str(n), tokens_needed=n, held_out=0.1) for n in (500, 3000))
    for corpus in (short, long):
        train, kept = documents_of(corpus.train), documents_of(corpus.held_out)
        assert sorted(train + kept) == TEXTS[: len(train) + len(kept)]  # nothing lost or doubled
        assert abs(len(kept) - len(train) / 10) <= 1
    assert documents_of(long.held_out)[: len(documents_of(short.held_out))] == documents_of(short.held_out)
    assert not set(documents_of(short.train)) & set(documents_of(long.held_out))
    assert documents_of(long.held_out)[:3] == [TEXTS[0], TEXTS[12], TEXTS[23]]  # a token for ten of training
    few = corpus_of(tmp_path, tokens_needed=100, held_out_least=60)
    assert documents_of(few.held_out) == TEXTS[:5] and len(few.train) == 104
    monkeypatch.setattr(hub_data, "HELD_OUT_MOST", 30)
    many = corpus_of(tmp_path, tokens_needed=3000, held_out=0.5)
    assert len(many.held_out) == 39  # the document that reaches the limit is the last
    assert len(many.train) >= 3000


def test_files_to_validate_on_leave_all_of_the_dataset_to_train_on(hub: FakeHub, tmp_path: Path) -> None:
    validation = tmp_path / "validation.txt"
    validation.write_text("one\n<|endoftext|>\ntwo")
    corpus = corpus_of(tmp_path / "data", held_out=[validation])
    assert documents_of(corpus.train) == TEXTS[:77]
    assert documents_of(corpus.held_out) == ["one", "two"]
    with pytest.raises(FileNotFoundError, match="missing"):
        corpus_of(tmp_path / "data", held_out=[tmp_path / "missing.txt"])
    assert len(hub.loads) == 1


def test_large_vocabularies_take_32_bits_and_empty_texts_are_left_out(hub: FakeHub, tmp_path: Path) -> None:
    corpus = corpus_of(tmp_path, encode=lambda texts: [[70_000, 1] for _ in texts], vocab_size=70_001)
    assert corpus.train.dtype == np.uint32
    assert corpus.train[:3].tolist() == [70_000, 1, END]
    assert len(list(tmp_path.glob("*.u32"))) == 2
    hub.rows = lambda: ({"text": text} for text in [None, "a", "", "b", None, "c"])
    corpus = corpus_of(tmp_path)
    assert (documents_of(corpus.held_out), documents_of(corpus.train)) == (["a"], ["b", "c"])


def test_a_stream_that_ends_early_is_used_and_said(hub: FakeHub, tmp_path: Path) -> None:
    for _ in range(2):  # read, and taken from the disk
        lines: list[str] = []
        corpus = corpus_of(tmp_path, tokens_needed=7722, say=lines.append)
        assert (len(documents_of(corpus.train)), len(documents_of(corpus.held_out))) == (297, 3)
        assert len(lines) == 1
        assert "ended after 3,861 of 7,722 tokens: the run will see them 2.0 times" in lines[0]
    assert len(hub.loads) == 1


# -- the cache --------------------------------------------------------------------------------------------


def test_the_cache_is_used_again_and_only_for_the_same(hub: FakeHub, tmp_path: Path) -> None:
    first, again = corpus_of(tmp_path), corpus_of(tmp_path)
    assert len(hub.loads) == 1 and repr(again) == repr(first)
    assert np.array_equal(again.train, first.train) and np.array_equal(again.held_out, first.held_out)
    others: list[dict[str, Any]] = [
        {"dataset": DatasetName("owner/name", "other")},
        {"dataset": DatasetName("owner/name", "config", "test")},
        {"dataset": DatasetName("owner/name2", "config")},
        {"tokens_needed": 1001},
        {"held_out": 0.02},
        {"held_out_least": 2},
        {"vocab_size": 257},
        {"end_of_text": 1},
        {"encode": lambda texts: [[*ids, 7] for ids in encode(texts)]},
    ]
    for n, other in enumerate(others, 2):
        corpus_of(tmp_path, **other)
        assert len(hub.loads) == n


def test_an_interrupted_download_starts_again(hub: FakeHub, tmp_path: Path) -> None:
    def breaks_off() -> Iterator[dict[str, Any]]:
        yield from ({"text": "wrong"} for _ in range(2000))
        raise KeyboardInterrupt

    whole, hub.rows = hub.rows, breaks_off
    with pytest.raises(KeyboardInterrupt):
        corpus_of(tmp_path, tokens_needed=1_000_000)
    hub.rows = whole
    said: list[str] = []
    corpus = corpus_of(tmp_path, say=said.append)
    assert documents_of(corpus.train) == TEXTS[1:78] and len(hub.loads) == 2 and said == []


def test_what_is_not_whole_is_read_again(hub: FakeHub, tmp_path: Path) -> None:
    expected = corpus_of(tmp_path).train.tolist()
    held_out, facts, train = sorted(tmp_path.iterdir())
    said: list[str] = []
    damages: list[Callable[[], Any]] = [
        *(path.unlink for path in (held_out, facts, train)),
        *(lambda path=path: path.write_bytes(path.read_bytes()[:-2]) for path in (held_out, train)),
        *(lambda content=content: facts.write_text(content) for content in ("", "{}", "[]", '{"tokens": 1')),
        lambda: train.write_bytes(train.read_bytes()[:-1] + b"\x7f"),
    ]
    for n, damage in enumerate(damages, 2):
        damage()
        assert corpus_of(tmp_path, say=said.append).train.tolist() == expected
        assert len(hub.loads) == n
    assert f"is damaged ({train.name} has another checksum); owner/name:config:train is read again" in said[-1]


def test_other_processes_wait_for_the_first(hub: FakeHub, tmp_path: Path) -> None:
    waiting: list[Corpus] = []
    thread = threading.Thread(target=lambda: waiting.append(corpus_of(tmp_path, wait=True)), daemon=True)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive() and hub.loads == []
    corpus = corpus_of(tmp_path)
    thread.join(5)
    assert np.array_equal(waiting[0].train, corpus.train) and len(hub.loads) == 1


def test_a_saved_tokenizer_finds_the_cache_of_the_one_it_was_saved_from(hub: FakeHub, tmp_path: Path) -> None:
    def load(tok: Any) -> Corpus:
        return corpus_of(
            tmp_path / "data",
            encode=lambda texts: tok(texts, add_special_tokens=False)["input_ids"],
            end_of_text=tok.eos_token_id,
            vocab_size=len(tok),
        )

    tok = train_bpe(read_dataset(NAME), 300)
    corpus = load(tok)
    assert tok.decode(corpus.train[: list(corpus.train).index(0)]) == TEXTS[1]
    tok.save_pretrained(tmp_path / "tokenizer")
    before = len(hub.loads)
    load(load_tokenizer(tmp_path / "tokenizer"))
    assert len(hub.loads) == before
    load(train_bpe(["other text"], 300))
    assert len(hub.loads) == before + 1


# -- errors -----------------------------------------------------------------------------------------------


def test_the_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it fails
    with pytest.raises(RuntimeError, match=r"there is no file owner/name.*pip install 'twell\[data\]'"):
        corpus_of(tmp_path)


def test_errors_of_the_library_become_one_line(hub: FakeHub, tmp_path: Path) -> None:
    def fails(before: int) -> Iterator[dict[str, Any]]:
        yield from [{"text": "a"}] * before
        raise ConnectionError("Couldn't reach the Hub\nand many more lines")

    for before in (0, 5):
        hub.rows = lambda before=before: fails(before)
        with pytest.raises(RuntimeError, match=r"dataset owner/name:config:train .*could not be read") as caught:
            corpus_of(tmp_path)
        assert str(caught.value).endswith("ConnectionError: Couldn't reach the Hub")
        assert isinstance(caught.value.__cause__, ConnectionError)


def test_bad_datasets_and_requests_are_refused(hub: FakeHub, tmp_path: Path) -> None:
    for options, message in [
        ({"held_out": 1.5}, "held_out must lie between"),
        ({"end_of_text": 300}, "is no token of a vocabulary"),
        ({"tokens_needed": 0}, "tokens_needed must be at least 1"),
    ]:
        with pytest.raises(ValueError, match=message):
            corpus_of(tmp_path, **options)
    assert hub.loads == []
    bad: list[tuple[list[dict[str, Any]], str]] = [
        ([], "owner/name:config:train holds no documents"),
        ([{"text": ""}], "holds no documents"),
        ([{"text": "only one"}], "one document cannot be split"),
        ([{"body": "a", "id": 1}], "has no field 'text', only body, id"),
        ([{"text": ["a"]}], "the field 'text' holds list, not text"),
        ([{"text": "a"}, {"text": "€"}], "has token 8,364, but the model's vocabulary ends at 255"),
    ]
    for rows, message in bad:
        hub.rows = lambda rows=rows: iter(rows)
        with pytest.raises(ValueError, match=message):
            corpus_of(tmp_path)
