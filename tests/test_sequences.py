"""A text as sequences of token ids: packed, cut, and refused with the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from small_models import TEXT, VOCAB
from twell.train.tokenizer import train_bpe
from twell.workbench.sequences import encode_beginning, sequences_of

DOCUMENTS = [f"The {word} fox jumps over the lazy dog, again and again." for word in ("quick", "brown", "sly")]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_bpe([TEXT], VOCAB)


@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_documents_are_packed_with_end_of_text_and_cut(kind: str, tokenizer: Any, tmp_path: Path) -> None:
    path = tmp_path / f"text{kind}"
    if kind == ".txt":
        path.write_text("\n<|endoftext|>\n".join(DOCUMENTS))
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*DOCUMENTS, ""]))
    ids = [i for text in DOCUMENTS for i in (*tokenizer.encode(text), tokenizer.eos_token_id)]
    for tokens, n_sequences in ((8192, len(ids) // 8), (30, 3), (8, 1)):
        found = sequences_of(tokenizer, path, tokens, 8, 64)
        assert found.tolist() == [ids[start : start + 8] for start in range(0, 8 * n_sequences, 8)]


def test_texts_and_ids_are_cut_to_the_tokens_wanted(tokenizer: Any) -> None:
    ids = tokenizer.encode(TEXT)
    for given_ids in (TEXT, ids, tuple(ids), torch.tensor(ids).int(), np.array(ids, dtype=np.uint16)):
        for tokens, length, shape in ((100, None, (1, 64)), (20, None, (1, 20)), (100, 9, (11, 9)), (2, None, (1, 2))):
            found = sequences_of(tokenizer, given_ids, tokens, length, 64)
            assert found.dtype == torch.int64 and found.shape == shape
            assert found.flatten().tolist() == ids[: found.numel()]
    assert sequences_of(tokenizer, ids[:37], 1000, None, 64).shape == (1, 37)  # the text is shorter than the context
    assert sequences_of(tokenizer, ids * 10, 8192, None, None).shape[1] == 1024


@given(st.text(alphabet="ab \n🦊", max_size=200), st.integers(2, 10))
@example(" " * 1000, 2)
@example("the lazy dog " * 100, 2)
def test_the_beginning_of_a_long_text_gives_the_same_tokens(tokenizer: Any, text: str, tokens: int) -> None:
    assert encode_beginning(tokenizer, text, tokens)[:tokens] == tokenizer.encode(text)[:tokens]


def test_more_than_the_beginning_is_encoded_only_where_tokens_are_long(tokenizer: Any) -> None:
    assert len(encode_beginning(tokenizer, TEXT * 100, 10)) < 1000

    class Lines:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return [len(line) for line in text.splitlines()]

    text = "\n".join("x" * n for n in range(990, 1000))
    assert encode_beginning(Lines(), text, 5) == list(range(990, 1000))


def test_errors_say_what_is_wrong(tokenizer: Any, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "short.txt").write_text("fox")
    (tmp_path / "tokens.u16").write_bytes(b"\0\0")
    n_short = len(tokenizer.encode("fox")) + 1
    ids = list(range(9))
    for text, tokens, length, message in (
        ("", 9, None, "^the text is empty$"),
        ([], 9, None, "^the text is empty$"),
        (tmp_path / "empty.txt", 9, None, r"empty\.txt is empty"),
        (tmp_path / "tokens.u16", 9, None, r"tokens\.u16: expected text"),
        (tmp_path / "short.txt", 90, 60, rf"short\.txt holds {n_short} tokens: too few for one sequence of 60"),
        ([7], 9, None, "the text holds 1 token: too few for one sequence of 2"),
        (ids, 90, 10, "the text holds 9 tokens: too few for one sequence of 10"),
        (ids, 20, 30, "20 tokens hold no sequence of 30"),
        (ids, 1, None, "tokens must be at least 2, got 1"),
        (ids, -5, None, "tokens must be at least 2, got -5"),
        (ids, 9, 1, "length must be at least 2, got 1"),
        ([1.0, 2.0], 9, None, r"token ids must be integers \[tokens\]"),
        ([[1, 2], [3, 4]], 9, None, r"token ids must be integers \[tokens\]"),
        (torch.ones(3, dtype=torch.bool), 9, None, r"token ids must be integers \[tokens\]"),
    ):
        with pytest.raises(ValueError, match=message):
            sequences_of(tokenizer, text, tokens, length, 64, shortest=2)
    with pytest.raises(FileNotFoundError, match=r"none\.txt does not exist"):
        sequences_of(tokenizer, tmp_path / "none.txt", 9, None, 64)
