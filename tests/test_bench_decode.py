"""Steps of generation: dense against sparse, at the same place of the same text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP
from typer.testing import CliRunner

from short_benchmarks import fp8_kernels
from twell.fp8 import Fp8Linear
from twell.hf import LlamaSparseReluConfig, LlamaSparseReluForCausalLM
from twell.nn import SparseFFNBase
from twell.train.data import SAMPLE, read_texts
from twell.workbench.bench import decode, ffn, fp8
from twell.workbench.bench import model as bench_model
from twell.workbench.bench.model import without_twell
from twell.workbench.cli import app

__all__ = ["fp8_kernels"]  # a fixture


def llama(layers: int = 2) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=320,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=32,
        hidden_act="relu",
    )
    return LlamaForCausalLM(config).eval()


def test_a_row() -> None:
    row = decode.measure(llama(4), "skew29", 3, 8, graph=False, seconds=0)
    assert (row["bench"], row["batch"], row["context"], row["layers"], row["F"]) == ("decode", 3, 8, 4, 320)
    assert row["speedup"] == pytest.approx(row["dense_ms"]["p50"] / row["sparse_ms"]["p50"], abs=1e-3)
    assert row["tokens_per_second"]["dense"] == pytest.approx(3000 / row["dense_ms"]["p50"], rel=1e-2, abs=0.1)
    assert row["difference"] < 1e-5 and 10 < row["mean_active"] < 60
    assert row["frozen"] is True and row["frozen_bytes"] >= 0
    assert row["cpu"] and row["joules_per_token"] == {"dense": None, "sparse": None}


def test_the_sparse_model_is_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[bool] = []
    forward = SparseFFNBase.forward

    def watched(self: SparseFFNBase, *args: Any) -> Any:
        states.append(self.frozen is not None)
        return forward(self, *args)

    monkeypatch.setattr(decode, "check_models", lambda _: monkeypatch.setattr(SparseFFNBase, "forward", watched) or {})
    decode.measure(llama(), "skew29", 1, 4, graph=False, seconds=0)
    assert states and all(states)


def test_every_layer_has_tokens_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    forward = SparseFFNBase.forward

    def watched(self: SparseFFNBase, x: torch.Tensor, *rest: Any) -> Any:
        seen.append(x.clone())
        return forward(self, x, *rest)

    monkeypatch.setattr(SparseFFNBase, "forward", watched)
    decode.measure(llama(), "skew29", 1, 4, graph=False, seconds=0)
    steps = [x for x in seen if x.shape == (1, 1, 32)]
    assert len(steps) >= 4 and not torch.equal(steps[0], steps[1])
    assert torch.equal(steps[0], steps[2]) and torch.equal(steps[1], steps[3])


def test_steps_are_the_same_steps_each_time() -> None:
    ids = torch.randint(97, (2, 8))
    with torch.no_grad():
        steps = decode._Steps(llama(), ids, 5)
        first = steps.run()
        assert {int(layer.cumulative_length) for layer in steps.cache.layers} == {8}
        steps.rewind()
        assert torch.equal(steps.run(), first)
        torch.testing.assert_close(first, steps.model(ids).logits[:, 5:])


def sparse_llama() -> Any:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    config = LlamaSparseReluConfig(
        **shape, vocab_size=97, intermediate_size=320, max_position_embeddings=64, hidden_act="silu"
    )
    return LlamaSparseReluForCausalLM(config).eval()


def test_a_dense_twin_is_the_model_without_twell() -> None:
    model, ids = sparse_llama(), torch.randint(97, (2, 8))
    twin = without_twell(model)
    assert type(twin) is LlamaForCausalLM and type(twin.model.layers[0].mlp) is LlamaMLP and not twin.training
    torch.testing.assert_close(twin(ids).logits, model(ids).logits)
    plain = llama()
    assert type(without_twell(plain)) is LlamaForCausalLM and without_twell(plain) is not plain


def test_a_row_of_a_model_on_a_text(fp8_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "COUNTED_TOKENS", 32)
    ids = torch.randint(97, (decode.tokens_needed(3, 8),))
    row = decode.measure_text(sparse_llama(), "a model", ids, 3, 8, graph=False, seconds=0, in_fp8=True)
    assert (row["workload"], row["model"], row["batch"], row["context"], row["F"]) == ("text", "a model", 3, 8, 320)
    assert row["difference"] < 1e-5 and len(row["active"]) == 2 and 50 < row["mean_active"] < 270
    assert row["tokens_per_second"]["sparse_fp8"] > 0 and row["speedup_fp8"] > 0
    timed = ids[32:].view(3, 8 + decode.NEW_TOKENS)
    counts, n = decode._fired(sparse_llama(), [timed])
    assert n == timed.numel() and [round(c.sum().item() / n, 1) for c in counts] == row["active"]


def test_compiled_steps_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    compilers = []

    def compile_without_inductor(model: Any, **options: Any) -> Any:
        compilers.append(options)
        return original(model, **options, backend="aot_eager")

    original = torch.compile
    monkeypatch.setattr(torch, "compile", compile_without_inductor)
    row = decode.measure(llama(1), "skew29", 2, 4, graph=False, compiled=True, seconds=0)
    assert row["compiled"] and row["difference"] < 1e-5
    assert compilers == [{"dynamic": False}] * 2


def test_a_row_with_fp8(fp8_kernels: None) -> None:
    row = decode.measure(llama(), "skew29", 2, 4, graph=False, seconds=0, in_fp8=True)
    ways = ["dense", "sparse", "fp8", "fp8_weights", "sparse_fp8"]
    assert [way for way in ways if f"{way}_ms" in row] == list(row["tokens_per_second"]) == ways
    dense = min(row["fp8_ms"]["p50"], row["fp8_weights_ms"]["p50"])
    assert row["speedup_fp8"] == pytest.approx(dense / row["sparse_fp8_ms"]["p50"], abs=1e-3)
    assert row["speedup_over_fp8"] == pytest.approx(dense / row["sparse_ms"]["p50"], abs=1e-3)
    assert row["difference_fp8"] < 0.03 and row["difference"] < 1e-5
    assert list(row["error"]) == ways[2:]
    without = decode.measure(llama(), "skew29", 2, 4, graph=False, seconds=0)
    assert not [name for name in without if "fp8" in name]


@pytest.mark.parametrize(("kind", "says"), [(fp8.DenseFp8FFN, "fp8 output"), (Fp8Linear, "sparse_fp8 output")])
def test_wrong_fp8_is_not_timed(fp8_kernels: None, kind: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: 1.5 * right(self, x))
    with pytest.raises(ffn.WrongResult, match=says):
        decode.measure(llama(4), "skew29", 4, 4, graph=False, seconds=0, in_fp8=True)


def test_wrong_logits_of_fp8_are_not_timed() -> None:
    logits = {"dense": torch.ones(1, 1, 8), "sparse": torch.ones(1, 1, 8), "fp8": 1.2 * torch.ones(1, 1, 8)}
    near = {**logits, "sparse_fp8": 1.15 * torch.ones(1, 1, 8)}
    assert bench_model.check_models(near) == {"difference": 0.0, "difference_fp8": pytest.approx(0.0417, abs=1e-4)}
    for name, wrong in (("fp8", 1.5), ("sparse_fp8", 1.0), ("sparse_fp8", torch.nan)):
        with pytest.raises(ffn.WrongResult, match=f"the {name} model's logits"):
            bench_model.check_models({**near, name: wrong * torch.ones(1, 1, 8)})


def test_models_that_disagree_have_no_speedup(monkeypatch: pytest.MonkeyPatch) -> None:
    convert = decode.make_sparse_

    def wrongly(model: Any, *args: Any, **how: Any) -> None:
        convert(model, *args, **how)
        model.model.layers[0].mlp.register_forward_hook(lambda module, args, y: 1.5 * y)

    monkeypatch.setattr(decode, "make_sparse_", wrongly)
    with pytest.raises(ffn.WrongResult, match="logits differ"):
        decode.measure(llama(), "skew29", 1, 4, graph=False, seconds=0)


def test_command() -> None:
    command = ["bench", "decode", "--preset", "tiny", "--device", "cpu", "--context", "8", "--seconds", "0"]
    done = CliRunner().invoke(app, [*command, "--batch", "1", "--batch", "2", "--json"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(row["batch"], row["preset"], row["graph"]) for row in rows] == [(1, "tiny", False), (2, "tiny", False)]
    told = CliRunner().invoke(app, command)
    assert "a step of generation: tiny" in told.output and "1 after 8" in told.output and "frozen" in told.output
    for wrong in (["--batch", "0"], ["--context", "0"], ["-w", "skew"], ["--preset", "huge"], ["--fp8"]):
        assert CliRunner().invoke(app, [*command, *wrong]).exit_code != 0


def test_the_context_fits_the_model(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n".join(read_texts(SAMPLE)))
    command = ["bench", "decode", "sample", "--text", str(text), "--device", "cpu", "--seconds", "0"]
    done = CliRunner().invoke(app, [*command, "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout)["context"] == 256 - decode.NEW_TOKENS, done.output
    assert "must leave 16" in str(CliRunner().invoke(app, [*command, "--context", "256"]).exception)


def test_command_with_fp8(fp8_kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "applies", lambda *_: True)
    command = ["bench", "decode", "--preset", "tiny", "--device", "cpu", "--context", "4", "--seconds", "0"]
    told = CliRunner().invoke(app, command).output
    assert all(said in told for said in ("dense FP8", "FP8 weights", "sparse FP8", "over FP8: over the faster"))
    assert "FP8" not in CliRunner().invoke(app, [*command, "--no-fp8"]).output
