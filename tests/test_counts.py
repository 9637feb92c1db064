"""Counts beside a model, and the plans sparsify_ makes of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from twell.hf.counts import COUNTS_FILE, NeuronCounts, find_counts
from twell.hf.sparsify import desparsify_, sparsify_
from twell.nn import sparse_ffns

SHAPE = {"hidden_size": 16, "intermediate_size": 512, "num_hidden_layers": 2}
SHAPE |= {"num_attention_heads": 2, "vocab_size": 50}


def some_counts(layers: int = 2, F: int = 512) -> NeuronCounts:
    """A few neurons fire always, the rest never."""
    fired = torch.zeros(F, dtype=torch.int64)
    fired[:10] = 1000
    return NeuronCounts(fired=[fired.roll(i) for i in range(layers)], tokens=1000)


def test_round_trip(tmp_path: Path) -> None:
    counts = some_counts()
    counts.save(tmp_path / COUNTS_FILE)
    again = find_counts(str(tmp_path))
    assert again is not None
    assert again.tokens == 1000
    assert all(torch.equal(a, b) for a, b in zip(counts.fired, again.fired, strict=True))
    assert [p.name for p in tmp_path.iterdir()] == [COUNTS_FILE]
    assert [find_counts(name) for name in (None, "", str(tmp_path / "none"), "owner/name")] == [None] * 4


def test_broken_files_are_named(tmp_path: Path) -> None:
    path = tmp_path / COUNTS_FILE
    path.write_bytes(b"no zip")
    with pytest.raises(ValueError, match=r"holds no neuron counts: .*: delete the file"):
        NeuronCounts.load(path)
    for arrays, message in (({}, "holds no neuron counts"), ({"tokens": 2}, "between 0 and the 2 tokens")):
        np.savez(path, fired_0=np.array([3, 1]), **arrays)
        with pytest.raises(ValueError, match=message):
            NeuronCounts.load(path)
    with pytest.raises(FileNotFoundError):
        NeuronCounts.load(tmp_path / "none.npz")
    with pytest.raises(ValueError, match="at least one token"):
        NeuronCounts(fired=[], tokens=0)


def test_sparsify_plans_by_what_lies_beside_the_model(tmp_path: Path) -> None:
    LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="relu")).save_pretrained(tmp_path)
    some_counts().save(tmp_path / COUNTS_FILE)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = torch.randint(50, (2, 7))
    with torch.no_grad():
        expected = model(ids).logits
        report = sparsify_(model)
        torch.testing.assert_close(model(ids).logits, expected)
    assert all(row.plan.startswith("Plan(") for row in report.rows)
    assert "Plan(" in str(report)
    assert all(layer.mlp.plan is not None for layer in model.model.layers)
    desparsify_(model)
    with torch.no_grad():
        assert torch.equal(model(ids).logits, expected)


def test_counts_of_another_model_are_refused_and_without_counts_there_is_no_plan(tmp_path: Path) -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="relu"))
    for counts in (some_counts(layers=3), some_counts(F=256)):
        with pytest.raises(ValueError, match=r"^the counts are of .* FFNs"):
            sparsify_(model, counts)
    model.config._name_or_path = str(tmp_path)
    counts.save(tmp_path / COUNTS_FILE)
    with pytest.raises(ValueError, match=rf"{tmp_path}/{COUNTS_FILE}: the counts are of .*: delete .* twell calibrate"):
        sparsify_(model)
    assert not list(sparse_ffns(model))  # nothing has changed
    (tmp_path / COUNTS_FILE).unlink()
    assert all(row.plan == "" for row in sparsify_(model).rows)
    assert all(layer.mlp.plan is None for layer in model.model.layers)
