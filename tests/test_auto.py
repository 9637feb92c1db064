"""``twell.auto()``: models come out of transformers sparse, and it can be undone."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, LlamaConfig, OPTConfig, PreTrainedModel

import twell
from twell.hf import LlamaSparseReluConfig, LlamaSparseReluModel, Qwen2SparseReluConfig, Qwen2SparseReluModel
from twell.hf.auto import _depth
from twell.hf.counts import NeuronCounts
from twell.nn import sparse_ffns

SHAPE: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 61}
IDS = torch.arange(10)[None]
ORIGINAL = {name: vars(PreTrainedModel)[name] for name in ("from_pretrained", "_from_config")}


def config(activation: str = "relu") -> LlamaConfig:
    return LlamaConfig(**SHAPE, intermediate_size=64, hidden_act=activation)


@pytest.fixture
def relu(tmp_path: Path) -> Path:
    AutoModelForCausalLM.from_config(config()).save_pretrained(tmp_path / "relu")
    return tmp_path / "relu"


@pytest.fixture(autouse=True)
def off_again() -> Iterator[None]:
    yield
    twell.auto(False)
    assert {name: vars(PreTrainedModel)[name] for name in ORIGINAL} == ORIGINAL


def n_sparse(model: Any) -> int:
    return len(list(sparse_ffns(model)))


def test_models_come_out_sparse_until_it_is_turned_off(relu: Path) -> None:
    dense = AutoModelForCausalLM.from_pretrained(relu)
    assert n_sparse(dense) == 0
    twell.auto()
    twell.auto()  # changes nothing
    model = AutoModelForCausalLM.from_pretrained(relu)
    assert n_sparse(model) == 2 and not model.training
    assert model.state_dict().keys() == dense.state_dict().keys()
    torch.testing.assert_close(model(IDS).logits, dense(IDS).logits)
    assert not model.model.layers[0].mlp.down_proj.weight.is_contiguous()  # laid out, as by sparsify_
    base, info = AutoModel.from_pretrained(relu, output_loading_info=True)
    assert n_sparse(base) == 2 and not info["missing_keys"]
    assert n_sparse(AutoModelForCausalLM.from_config(config())) == 2
    assert n_sparse(AutoModelForCausalLM.from_config(OPTConfig(**SHAPE, ffn_dim=64, word_embed_proj_dim=32))) == 2
    twell.desparsify_(model)
    torch.testing.assert_close(model(IDS).logits, dense(IDS).logits, rtol=0, atol=0)
    twell.auto(False)
    twell.auto(False)
    assert n_sparse(AutoModelForCausalLM.from_pretrained(relu)) == 0


def test_counts_beside_a_model_make_plans(relu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts = NeuronCounts(fired=[torch.full((64,), 2) for _ in range(2)], tokens=1000)
    monkeypatch.setattr("twell.hf.sparsify.find_counts", lambda name: counts if name == str(relu) else None)
    twell.auto()
    model = AutoModelForCausalLM.from_pretrained(str(relu))
    assert all(ffn.plan is not None for _, ffn in sparse_ffns(model))


def test_what_is_not_relu_or_has_no_weights_stays(relu: Path, caplog: pytest.LogCaptureFixture) -> None:
    twell.auto()
    with caplog.at_level(logging.INFO, logger="twell.hf.auto"):
        model = AutoModelForCausalLM.from_config(config("silu"))
    assert n_sparse(model) == 0
    assert "LlamaForCausalLM: nothing is sparse: 2 dense: silu: call relufy_ first" in caplog.text
    empty = AutoModelForCausalLM.from_pretrained(relu, device_map="meta")
    assert empty.device.type == "meta" and n_sparse(empty) == 0


def test_an_error_while_loading_leaves_nothing_behind(relu: Path, tmp_path: Path) -> None:
    twell.auto()
    with pytest.raises(OSError):
        AutoModelForCausalLM.from_pretrained(tmp_path / "nothing")
    assert n_sparse(AutoModelForCausalLM.from_pretrained(relu)) == 2


def test_a_wrapper_around_ours_does_nothing_once_it_is_off(relu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    twell.auto()
    ours = vars(PreTrainedModel)["from_pretrained"].__func__
    twell.auto(False)
    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedModel, "from_pretrained", classmethod(lambda cls, *a, **k: ours(cls, *a, **k)))
        assert n_sparse(AutoModelForCausalLM.from_pretrained(relu)) == 0


def test_a_load_in_another_thread_is_no_outer_one(relu: Path) -> None:
    """Not by two real loads: in threads they leave transformers without ``tie_weights``, which each takes away."""
    twell.auto()

    def begin() -> None:
        _depth.calls += 1

    thread = threading.Thread(target=begin)
    thread.start()
    thread.join()
    assert n_sparse(AutoModelForCausalLM.from_pretrained(relu)) == 2


@pytest.mark.parametrize(
    ("config_class", "base"),
    [(LlamaSparseReluConfig, LlamaSparseReluModel), (Qwen2SparseReluConfig, Qwen2SparseReluModel)],
)
def test_auto_model_knows_the_sparse_types(config_class: Any, base: type, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(config_class(**SHAPE, num_key_value_heads=2, intermediate_size=64)).eval()
    model.save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path)
    assert type(loaded) is base
    hidden = loaded(IDS).last_hidden_state
    torch.testing.assert_close(hidden, model.model(IDS).last_hidden_state, rtol=0, atol=0)
    twell.auto()
    assert n_sparse(AutoModelForCausalLM.from_pretrained(tmp_path)) == 2
