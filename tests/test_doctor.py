"""The doctor: which kernels would run, whether they are right, and the plans of a model's layers."""

from __future__ import annotations

import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
)

from interpreted import shorten_lists
from twell import plan
from twell.hf import LlamaSparseReluConfig, LlamaSparseReluForCausalLM
from twell.hf.counts import COUNTS_FILE, NeuronCounts
from twell.hf.sparsify import sparsify_
from twell.nn import layers as nn
from twell.ops import backends
from twell.workbench import cli, doctor

F = 2048  # enough for a plan to pay
SHAPE = {
    "hidden_size": 16,
    "intermediate_size": F,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 50,
}


@pytest.fixture
def relu_model(tmp_path: Path) -> Path:
    return saved(LlamaForCausalLM(LlamaConfig(**SHAPE, hidden_act="relu")), tmp_path / "model")


def saved(model: PreTrainedModel, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


def keep_counts(folder: Path, *fired: torch.Tensor) -> None:
    NeuronCounts(fired=list(fired), tokens=1000).save(folder / COUNTS_FILE)


def fired_by(busy: int, F: int = F) -> torch.Tensor:
    """``busy`` neurons fire for 9 tokens in 10, the rest never."""
    fired = torch.zeros(F, dtype=torch.int64)
    fired[:busy] = 900
    return fired


THREE_LAYERS = fired_by(0), fired_by(200), fired_by(F)


# -- plans ------------------------------------------------------------------------------------------------


def test_plans_are_those_that_sparsify_chooses(relu_model: Path) -> None:
    keep_counts(relu_model, *THREE_LAYERS)
    plans = doctor.plans(str(relu_model))
    rows = sparsify_(AutoModelForCausalLM.from_pretrained(relu_model)).rows
    assert [p.layer for p in plans] == [row.layer for row in rows] == [f"model.layers.{i}.mlp" for i in range(3)]
    for shown, row in zip(plans, rows, strict=True):
        without_prediction = re.sub(r", predicted [\d.]+x", "", row.plan)
        assert without_prediction == f"Plan({shown.plan})"
    assert plans[0].plan.startswith(f"0 of {F} neurons hot, tokens heavy above ")
    assert plans[1].plan.startswith(f"256 of {F} neurons hot, ")
    assert plans[2] == doctor.LayerPlan("model.layers.2.mlp", "sparse", f"dense, {F} neurons", 1.0, 0)
    assert {p.runs for p in plans} == {"sparse"}
    assert plans[0].predicted is not None and plans[1].predicted is not None
    assert plans[0].predicted > plans[1].predicted > 1.05


def test_no_weights_are_read(relu_model: Path) -> None:
    keep_counts(relu_model, *THREE_LAYERS)
    expected = doctor.plans(str(relu_model))
    (relu_model / "model.safetensors").unlink()
    assert doctor.plans(str(relu_model)) == expected


def test_plans_follow_the_costs_of_the_gpu_that_is_there(relu_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_counts(relu_model, *THREE_LAYERS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    measured = plan.costs_for(torch.device("cpu"))
    monkeypatch.setattr(plan.costs, "_COSTS", {90: measured, 100: measured._replace(token=3 * F)})
    pays = [p.predicted is not None and p.predicted > 1 for p in doctor.plans(str(relu_model))]
    assert pays == [True, True, False]
    pretend_gpu(monkeypatch, (10, 0))
    sparse_up_to = [", sparse up to 32 tokens", ", sparse up to 32 tokens", ""]  # which has costs of its own
    assert [p.plan for p in doctor.plans(str(relu_model))] == [f"dense, {F} neurons{few}" for few in sparse_up_to]


def test_plain_ffns_are_planned_as_such(tmp_path: Path) -> None:
    def predicted(gated: bool) -> float | None:
        config = LlamaSparseReluConfig(**SHAPE | {"num_hidden_layers": 1}, sparsity_gated_mlp=gated)
        folder = saved(LlamaSparseReluForCausalLM(config), tmp_path / f"gated {gated}")
        keep_counts(folder, fired_by(0))
        return doctor.plans(str(folder))[0].predicted

    costs = plan.costs_for(torch.device("cpu"))
    for gated, projections in ((True, 3), (False, 2)):
        assert predicted(gated) == pytest.approx(projections * F / (costs.gate * F + costs.token))


def test_without_counts_the_command_that_makes_them_is_named(relu_model: Path) -> None:
    plans = doctor.plans(str(relu_model))
    assert len(plans) == 3
    for p in plans:
        assert p.plan.startswith("plans by its first batches; `twell calibrate ")
        assert f"{relu_model} --text FILE" in p.plan and "\n" not in p.plan
        assert p.predicted is None


def test_layers_without_a_plan_say_why(tmp_path: Path) -> None:
    silu = saved(LlamaForCausalLM(LlamaConfig(**SHAPE)), tmp_path / "silu")
    for p in doctor.plans(str(silu)):
        assert p[1:] == ("left alone: silu: call relufy_ first", "", None, 0)


def test_opts_layers_have_plans_too(tmp_path: Path) -> None:
    config = OPTConfig(
        hidden_size=16, ffn_dim=F, num_hidden_layers=2, num_attention_heads=2, vocab_size=50, word_embed_proj_dim=16
    )
    opt = saved(OPTForCausalLM(config), tmp_path / "opt")
    assert all(p.runs == "sparse" and "twell calibrate" in p.plan for p in doctor.plans(str(opt)))
    keep_counts(opt, fired_by(0), fired_by(F))
    assert [p.plan.partition(",")[0] for p in doctor.plans(str(opt))] == [f"0 of {F} neurons hot", "dense"]


def test_layers_whose_projections_are_called_say_why(relu_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        plans = doctor.plans(str(relu_model))
    finally:
        handle.remove()
    assert {p[1:] for p in plans} == {("called: there are global hooks on modules", "", None, 0)}


# -- what freezing adds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [16, 4096])
def test_frozen_bytes_on_a_cpu_are_those_of_freezing(width: int) -> None:
    layer = nn.GatedSparseFFN(width, F).eval()
    nn.neuron_major_(layer.down_proj)
    layer.freeze()
    assert doctor.frozen_bytes(layer, None) == layer.frozen_bytes()


@pytest.mark.parametrize(("hot", "few", "made_of"), [(32, 0, nn.GatedSparseFFN), (32, 4, nn.SparseFFN), (0, 4, None)])
def test_frozen_bytes_on_a_gpu_are_those_of_freezing(
    hot: int, few: int, made_of: type[nn.SparseFFNBase] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    layer = (made_of or nn.GatedSparseFFN)(16, 64, backend="triton", dtype=torch.bfloat16).eval()
    nn.neuron_major_(layer.down_proj)
    chosen = plan.Plan(n_neurons=64, hot=torch.arange(hot), cap=16, few_tokens=few, mean_active=0.5)
    layer.set_plan(chosen)
    layer.freeze()
    monkeypatch.setattr(doctor, "_gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(backends, "why_unavailable", lambda *_: None)
    assert doctor.frozen_bytes(layer, chosen) == layer.frozen_bytes() > 0
    assert doctor.frozen_bytes(layer, None) is None


@pytest.mark.parametrize("fired", [(fired_by(3), fired_by(3)), (fired_by(3, 256),) * 3])
def test_counts_of_another_model_are_refused(relu_model: Path, fired: tuple[torch.Tensor, ...]) -> None:
    keep_counts(relu_model, *fired)
    with pytest.raises(ValueError, match=rf"the counts are of {len(fired)} FFNs .*, the model has 3"):
        doctor.plans(str(relu_model))


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such model folder: .*nowhere"):
        doctor.plans(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match=r"no config\.json"):
        doctor.plans(str(tmp_path))


# -- facts and self-test ----------------------------------------------------------------------------------


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "a GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    facts = types.SimpleNamespace(
        name="NVIDIA H200", major=capability[0], minor=capability[1], multi_processor_count=132
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: facts)
    monkeypatch.setattr(backends, "_HAS_TRITON", True)


@pytest.mark.parametrize(
    ("capability", "tiles"),
    [
        ((8, 0), "sm_80 on an sm_80 GPU; a few tokens not in Gluon (for sm_90)"),
        ((8, 7), "sm_86 on an sm_87 GPU; a few tokens not in Gluon (for sm_90)"),
        ((9, 0), "sm_90 on an sm_90 GPU; a few tokens in Gluon"),
    ],
)
def test_kernels_that_would_run(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], tiles: str) -> None:
    pytest.importorskip("triton")
    pretend_gpu(monkeypatch, capability)
    plans = "measured costs of sm_90" if capability == (9, 0) else "none, so layers run densely"
    assert doctor._kernels(torch.device("cuda")).startswith(f"Triton, tiles of {tiles}; plans: {plans}")


def test_why_no_kernels_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor._kernels(None) == "none: torch sees no GPU; plans: measured costs of sm_90"
    pretend_gpu(monkeypatch, (7, 5))
    assert doctor._kernels(torch.device("cuda")).startswith("none: it needs compute capability 8.0")
    monkeypatch.setattr(torch.version, "hip", "6.4")  # AMD's GPUs are called cuda, and may have a capability of 9.0
    pretend_gpu(monkeypatch, (9, 0))
    assert doctor._kernels(torch.device("cuda")).startswith("none: its kernels are written for NVIDIA's GPUs (PTX)")
    monkeypatch.setattr(backends, "_HAS_TRITON", False)
    assert doctor._kernels(torch.device("cuda")).startswith("none: triton is not installed")


def test_a_gpu_is_part_of_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    problem: str | None = None
    tested = []

    def kernel_problem(device: torch.device) -> str | None:
        tested.append(device.type)
        return problem

    pytest.importorskip("triton")
    monkeypatch.setattr(doctor, "kernel_problem", kernel_problem)
    monkeypatch.setattr(doctor, "_self_test", lambda: None)
    pretend_gpu(monkeypatch, (9, 0))
    healthy, facts = doctor.examine()
    assert healthy and tested == ["cuda"]
    assert facts["gpu"] == "a GPU"
    assert facts["kernels"].startswith("Triton, tiles of sm_90")
    assert facts["backend on cuda"].startswith("triton (not cpu: ")
    assert facts["self-test"] == "sparse equals dense, forward and backward, on the GPU too"
    problem = "Triton kernels: wrong"
    healthy, facts = doctor.examine()
    assert not healthy and facts["self-test"] == problem
    pretend_gpu(monkeypatch, (7, 5))  # too old for the kernels, not broken
    healthy, facts = doctor.examine()
    assert healthy and facts["self-test"] == "sparse equals dense, forward and backward"
    assert len(tested) == 2


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments for a self-test in Triton's interpreter: tiny, and so that a few long tokens make heavy ones."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    shorten_lists(monkeypatch.setattr)
    return {"device": torch.device("cpu"), "dtype": torch.float32, "tokens": 48, "width": 32, "hidden": 176}


def test_the_kernels_pass(interpreted: dict[str, Any]) -> None:
    assert doctor.kernel_problem(**interpreted) is None


@pytest.mark.parametrize("part", ["hot_activations", "write_tail", "write_heavy_"])
def test_a_broken_part_of_the_kernels_is_found(
    interpreted: dict[str, Any], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    from twell.gpu.prefill import split

    right, changed = getattr(split, part), []

    def wrong(*args: Any, **kwargs: Any) -> None:
        """Where the part writes, it writes 1 % too much."""
        out = args[3] if part == "hot_activations" else args[0]
        before = out.clone()
        right(*args, **kwargs)
        written = ~((out == before) | (out.isnan() & before.isnan()))
        out[written] *= 1.01
        changed.append(int(written.any(1).sum()))

    monkeypatch.setattr(split, part, wrong)
    problem = doctor.kernel_problem(**interpreted)
    assert problem is not None and problem.startswith("Triton kernels: sparse output is wrong")
    assert all(4 < tokens < (49 if part == "hot_activations" else 48) for tokens in changed)  # some light, some heavy


@pytest.mark.parametrize(("module", "part"), [("decode", "forward"), ("hybrid", "backward")])
def test_broken_kernels_for_few_tokens_and_for_training_are_found(
    interpreted: dict[str, Any], monkeypatch: pytest.MonkeyPatch, module: str, part: str
) -> None:
    from twell.gpu.decode import few as decode
    from twell.gpu.training import hybrid

    broken = {"decode": decode, "hybrid": hybrid}[module]
    right = getattr(broken, part)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        if module == "decode":
            return result * 1.01
        result.weights.up.mul_(1.01)
        return result

    monkeypatch.setattr(broken, part, wrong)
    problem = doctor.kernel_problem(**interpreted)
    assert problem is not None and "is wrong" in problem


def test_a_broken_backward_on_the_cpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from twell import cpu

    assert doctor._self_test() is None
    right = cpu._tail_backward

    def wrong(*args: Any) -> Any:
        gradients = right(*args)
        gradients.weights.gate.mul_(1.001)
        return gradients

    monkeypatch.setattr(cpu, "_tail_backward", wrong)
    problem = doctor._self_test()
    assert problem is not None and "dw_gate is wrong" in problem


def test_extras_that_are_not_whole_come_with_their_command(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    required = ["torch>=2", "numpy>=1; extra == 'train'", 'no-such-thing>=2; extra == "eval"', "numpy; extra == 'eval'"]
    required += ["twell[train]; extra == 'dev'", "never-there; python_version > '3' and extra == 'dev'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: required)
    assert doctor._extras() == (
        "train installed; eval lacks no-such-thing: pip install 'twell[eval]'; "
        "dev lacks never-there: pip install 'twell[dev]'"
    )

    def missing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)
    assert doctor._extras().startswith("unknown: twell is not installed")


def test_what_triton_needs_to_build_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    import shutil
    import sysconfig

    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name == "gcc" else None)
    assert doctor._compiler() == "/bin/gcc, Python.h"
    (tmp_path / "Python.h").unlink()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    said = doctor._compiler()
    assert "a C compiler" in said and "Python.h (Debian" in said


def test_kernels_that_cannot_be_built_are_a_finding(
    interpreted: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: Any) -> None:
        raise LookupError("no C compiler\nand much more")

    monkeypatch.setattr("twell.gpu.prefill.split.forward", fail)
    assert doctor.kernel_problem(**interpreted) == "Triton kernels: LookupError: no C compiler"


@pytest.mark.gpu
def test_the_kernels_pass_on_a_gpu() -> None:
    assert doctor.kernel_problem(torch.device("cuda")) is None


# -- the command ------------------------------------------------------------------------------------------


def run(monkeypatch: pytest.MonkeyPatch, *args: str) -> int:
    monkeypatch.setattr(sys, "argv", ["twell", "doctor", *args])
    monkeypatch.setenv("COLUMNS", "140")
    monkeypatch.setattr(doctor, "_self_test", lambda: None)  # tests/test_cli.py has it
    with pytest.raises(SystemExit) as stop:
        cli.main()
    return int(stop.value.code or 0)


def test_command_with_a_model(
    relu_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    keep_counts(relu_model, fired_by(200), fired_by(200), fired_by(F))
    assert run(monkeypatch, str(relu_model), "--json") == 0
    found = json.loads(capsys.readouterr().out)
    expected = doctor.plans(str(relu_model))
    assert found["healthy"] is True and found["self-test"].startswith("sparse equals dense")
    assert found["plans"] == [p._asdict() for p in expected]
    assert set(found["plans"][0]) == {"layer", "runs", "plan", "predicted", "frozen_bytes"}
    assert "on a GPU a call runs densely" in found["without a plan"]

    monkeypatch.setattr(doctor, "_extras", lambda: "eval lacks lm-eval: pip install 'twell[eval]'")
    assert run(monkeypatch, str(relu_model)) == 0
    shown = capsys.readouterr().out
    assert "self-test" in shown and "pip install 'twell[eval]'" in shown
    assert shown.count("256 of 2048 neurons hot") == 1  # the first two layers on one line
    assert "model.layers.0.mlp to model.layers.1.mlp" in shown
    assert f"{expected[0].predicted:.2f}x" in shown
    assert "dense, 2048 neurons" in shown and "1.00x" in shown


def test_command_without_counts_or_model(
    relu_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(monkeypatch, str(relu_model)) == 0
    assert capsys.readouterr().out.count("plans by its first") == 1  # all layers on one line
    assert run(monkeypatch, "--json") == 0
    assert "plans" not in json.loads(capsys.readouterr().out)
    assert run(monkeypatch, "nowhere") == 2
    assert capsys.readouterr().err == "twell: error: no such model folder: nowhere\n"
