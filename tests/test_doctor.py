"""The doctor: which kernels would run, whether they are right, and the plans of a model's layers."""

from __future__ import annotations

import json
import re
import shutil
import sysconfig
import tomllib
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

from command_line import Twell
from interpreted import shorten_lists
from twell import cpu, plan
from twell.hf import LlamaSparseReluConfig, LlamaSparseReluForCausalLM
from twell.hf.counts import COUNTS_FILE, NeuronCounts
from twell.hf.sparsify import sparsify_
from twell.ops import backends
from twell.workbench import doctor
from twell.workbench.extras import EXTRAS

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


def predicted(forecast: doctor.LayerForecast) -> float:
    """The speedup over dense that the plan says; 1 if the layer runs densely."""
    found = re.search(r"predicted ([\d.]+)x", forecast.plan)
    return float(found[1]) if found else 1.0


THREE_LAYERS = fired_by(0), fired_by(200), fired_by(F)


# -- plans ------------------------------------------------------------------------------------------------


def test_plans_are_those_of_sparsify(relu_model: Path) -> None:
    keep_counts(relu_model, *THREE_LAYERS)
    plans = doctor.plans(str(relu_model))
    rows = sparsify_(AutoModelForCausalLM.from_pretrained(relu_model)).rows
    assert [p.layer for p in plans] == [row.layer for row in rows] == [f"model.layers.{i}.mlp" for i in range(3)]
    for shown, row in zip(plans, rows, strict=True):
        assert row.plan == f"Plan({shown.plan})"
    assert plans[0].plan.startswith(f"0 of {F} neurons hot, tokens long or heavy above ")
    assert plans[1].plan.startswith(f"256 of {F} neurons hot, ")
    assert plans[2] == doctor.LayerForecast("model.layers.2.mlp", "sparse", f"dense, {F} neurons")
    assert {p.runs for p in plans} == {"sparse"}
    assert predicted(plans[0]) > predicted(plans[1]) > 1.05
    (relu_model / "model.safetensors").unlink()  # no weights are read
    assert doctor.plans(str(relu_model)) == plans


def test_plans_follow_the_costs_of_the_gpu_that_is_there(relu_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keep_counts(relu_model, *THREE_LAYERS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    measured = plan.costs_for(torch.device("cpu"))
    monkeypatch.setattr(plan.costs, "_COSTS", {90: measured, 100: measured._replace(token=3 * F)})
    pays = [predicted(p) > 1 for p in doctor.plans(str(relu_model))]
    assert pays == [True, True, False]
    pretend_gpu(monkeypatch, (10, 0))
    sparse_up_to = [", sparse up to 32 tokens", ", sparse up to 32 tokens", ""]  # which has costs of its own
    assert [p.plan for p in doctor.plans(str(relu_model))] == [f"dense, {F} neurons{few}" for few in sparse_up_to]


def test_plain_ffns_are_planned_as_such(tmp_path: Path) -> None:
    def plan_of(gated: bool) -> doctor.LayerForecast:
        config = LlamaSparseReluConfig(**SHAPE | {"num_hidden_layers": 1}, sparsity_gated_mlp=gated)
        folder = saved(LlamaSparseReluForCausalLM(config), tmp_path / f"gated {gated}")
        keep_counts(folder, fired_by(0))
        return doctor.plans(str(folder))[0]

    costs = plan.costs_for(torch.device("cpu"))
    for gated, projections in ((True, 3), (False, 2)):
        expected = projections * F / (costs.gate * F + costs.token)
        assert predicted(plan_of(gated)) == pytest.approx(expected, abs=0.005)


def test_layers_without_a_plan_say_why(relu_model: Path, tmp_path: Path) -> None:
    plans = doctor.plans(str(relu_model))
    assert len(plans) == 3
    for p in plans:  # without counts
        assert p.plan.startswith("plans by its first batches; `twell calibrate ")
        assert f"{relu_model} --text FILE" in p.plan and "\n" not in p.plan
    handle = torch.nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        called = doctor.plans(str(relu_model))
    finally:
        handle.remove()
    assert {p[1:] for p in called} == {("called: there are global hooks on modules", "")}
    silu = doctor.plans(str(saved(LlamaForCausalLM(LlamaConfig(**SHAPE)), tmp_path / "silu")))
    assert {p[1:] for p in silu} == {("left alone: silu: call relufy_ first", "")}


def test_opts_layers_have_plans_too(tmp_path: Path) -> None:
    shape = {"hidden_size": 16, "word_embed_proj_dim": 16, "num_attention_heads": 2, "vocab_size": 50}
    opt = saved(OPTForCausalLM(OPTConfig(**shape, ffn_dim=F, num_hidden_layers=2)), tmp_path / "opt")
    assert all(p.runs == "sparse" and "twell calibrate" in p.plan for p in doctor.plans(str(opt)))
    keep_counts(opt, fired_by(0), fired_by(F))
    assert [p.plan.partition(",")[0] for p in doctor.plans(str(opt))] == [f"0 of {F} neurons hot", "dense"]


def test_counts_of_another_model_and_folders_without_one_are_refused(relu_model: Path, tmp_path: Path) -> None:
    for fired in ((fired_by(3), fired_by(3)), (fired_by(3, 256),) * 3):
        keep_counts(relu_model, *fired)
        with pytest.raises(ValueError, match=rf"the counts are of {len(fired)} FFNs .*, the model has 3"):
            doctor.plans(str(relu_model))
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


def test_kernels_that_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    assert doctor._kernels(None) == "none"
    for capability, said in (
        ((8, 0), "Triton, tiles of sm_80 on an sm_80 GPU; a few tokens not in Gluon (for sm_90)"),
        ((8, 7), "Triton, tiles of sm_86 on an sm_87 GPU; a few tokens not in Gluon (for sm_90)"),
        ((9, 0), "Triton, tiles of sm_90 on an sm_90 GPU; a few tokens in Gluon"),
        ((7, 5), "none"),
    ):
        pretend_gpu(monkeypatch, capability)
        assert doctor._kernels(torch.device("cuda")) == said
    monkeypatch.setattr(torch.version, "hip", "6.4")  # AMD's GPUs are called cuda, and may have a capability of 9.0
    pretend_gpu(monkeypatch, (9, 0))
    assert doctor._kernels(torch.device("cuda")) == "none"
    why = backends.why_unavailable("triton", torch.device("cuda"))
    assert why is not None and why.startswith("its kernels are written for NVIDIA's GPUs (PTX)")
    monkeypatch.setattr(backends, "_HAS_TRITON", False)
    assert doctor._kernels(torch.device("cuda")) == "none"


def test_a_gpu_is_part_of_the_self_test(monkeypatch: pytest.MonkeyPatch) -> None:
    problem: str | None = None
    tested = []

    def self_test(device: torch.device, *_: Any) -> str | None:
        tested.append(device.type)
        return problem if device.type == "cuda" else None

    pytest.importorskip("triton")
    monkeypatch.setattr(doctor, "self_test", self_test)
    pretend_gpu(monkeypatch, (9, 0))
    healthy, facts = doctor.examine()
    assert healthy and tested == ["cpu", "cuda"]
    assert facts["gpu"] == "a GPU"
    assert facts["kernels"].startswith("Triton, tiles of sm_90")
    assert facts["backend on cuda"].startswith("triton (not cpu: ")
    assert facts["self-test"] == "sparse equals dense, forward and backward, on the GPU too"
    problem = "on cuda: wrong"
    healthy, facts = doctor.examine()
    assert not healthy and facts["self-test"] == problem
    pretend_gpu(monkeypatch, (7, 5))  # too old for the kernels, not broken
    healthy, facts = doctor.examine()
    assert healthy and facts["self-test"] == "sparse equals dense, forward and backward"
    assert tested == ["cpu", "cuda"] * 2 + ["cpu"]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Arguments for a self-test in Triton's interpreter: tiny, and so that a few long tokens make heavy ones."""
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter runs where there is no GPU")
    shorten_lists(monkeypatch.setattr)
    small = {"tokens": 48, "width": 32, "hidden": 176}
    return {"device": torch.device("cpu"), "backend": "triton", "dtype": torch.float32, **small}


def test_the_kernels_pass(interpreted: dict[str, Any]) -> None:
    assert doctor.self_test(**interpreted) is None


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
    problem = doctor.self_test(**interpreted)
    assert problem is not None and problem.startswith("on cpu: sparse output is wrong")
    assert all(4 < tokens < (49 if part == "hot_activations" else 48) for tokens in changed)  # some light, some heavy


@pytest.mark.parametrize(("module", "part"), [("decode", "forward"), ("split_training", "backward")])
def test_broken_kernels_for_few_tokens_and_for_training_are_found(
    interpreted: dict[str, Any], monkeypatch: pytest.MonkeyPatch, module: str, part: str
) -> None:
    from twell.gpu.decode import few as decode
    from twell.gpu.training import split_training

    broken = {"decode": decode, "split_training": split_training}[module]
    right = getattr(broken, part)

    def wrong(*args: Any, **kwargs: Any) -> Any:
        result = right(*args, **kwargs)
        if module == "decode":
            return result * 1.01
        result.weights.up.mul_(1.01)
        return result

    monkeypatch.setattr(broken, part, wrong)
    problem = doctor.self_test(**interpreted)
    assert problem is not None and "is wrong" in problem


def test_the_self_test_passes_here(twell: Twell) -> None:
    result = twell("doctor", "--json")
    assert result.returncode == 0, result.stdout
    facts = json.loads(result.stdout)
    assert facts["healthy"] is True and facts["backend on cpu"].startswith("cpu")
    assert facts["self-test"] == "sparse equals dense, forward and backward"


def test_a_broken_cpu_path_is_found(twell: Twell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.block, "MIN_WORK", 20e6)  # as users have it: the self-test must still reach the fast path
    dots, backward = cpu.rows.sampled_dots, cpu.training.tail_backward

    def wrong(*args: Any) -> Any:
        gradients = backward(*args)
        gradients.weights.gate.mul_(1.001)
        return gradients

    with monkeypatch.context() as patch:
        patch.setattr(cpu.rows, "sampled_dots", lambda *args: dots(*args) * 1.01)
        result = twell("doctor", "--json")
    assert result.returncode == 1 and "sparse output is wrong" in json.loads(result.stdout)["self-test"]
    monkeypatch.setattr(cpu.training, "tail_backward", wrong)
    assert "dw_gate is wrong" in str(doctor.self_test(torch.device("cpu"), "auto", torch.float32, 256))


def test_unusable_amx_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(doctor, "_advertises_amx", lambda: True)
    monkeypatch.setattr(doctor, "_BF16_PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    problem = doctor.bf16_problem()
    assert problem is not None and "AMX" in problem and doctor.AMX_REMEDY in problem
    monkeypatch.setattr(doctor, "_BF16_PROBE", "pass")
    assert doctor.bf16_problem() is None
    monkeypatch.setattr(doctor, "_advertises_amx", lambda: False)
    monkeypatch.setattr(doctor, "_BF16_PROBE", "raise SystemExit(1)")
    assert doctor.bf16_problem() is None


def test_incomplete_extras_are_shown_with_their_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "EXTRAS", {"train": ("numpy",), "eval": ("no_such_thing", "numpy", "nor_this")})
    assert doctor._extras() == ("train installed; eval lacks no_such_thing, nor_this: pip install 'twell[eval]'")
    facts = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
    assert [*EXTRAS, "dev"] == [*facts["project"]["optional-dependencies"]]


def test_the_compiler_and_python_h_are_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name == "gcc" else None)
    assert doctor._compiler() == "/bin/gcc, Python.h"
    (tmp_path / "Python.h").unlink()
    monkeypatch.setattr(shutil, "which", lambda name: None)
    said = doctor._compiler()
    assert "a C compiler" in said and "Python.h (Debian" in said


def test_an_error_in_the_kernels_is_a_finding(interpreted: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise LookupError("no C compiler\nand much more")

    monkeypatch.setattr("twell.gpu.prefill.split.forward", fail)
    assert doctor.self_test(**interpreted) == "on cpu: LookupError: no C compiler"


@pytest.mark.gpu
def test_the_kernels_pass_on_a_gpu() -> None:
    assert doctor.self_test(torch.device("cuda"), "triton", torch.bfloat16, 2048) is None


# -- the command ------------------------------------------------------------------------------------------


def test_command_with_a_model(twell: Twell, relu_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "self_test", lambda *_: None)
    assert twell("doctor", str(relu_model)).stdout.count("plans by its first") == 1  # all layers on one line
    keep_counts(relu_model, fired_by(200), fired_by(200), fired_by(F))
    result = twell("doctor", str(relu_model), "--json")
    found, expected = json.loads(result.stdout), doctor.plans(str(relu_model))
    assert result.returncode == 0 and found["healthy"] is True and found["self-test"].startswith("sparse equals dense")
    assert found["plans"] == [p._asdict() for p in expected]
    assert set(found["plans"][0]) == {"layer", "runs", "plan"}
    assert "plans" not in json.loads(twell("doctor", "--json").stdout)

    monkeypatch.setattr(doctor, "_extras", lambda: "eval lacks lm-eval: pip install 'twell[eval]'")
    shown = twell("doctor", str(relu_model)).stdout
    assert "self-test" in shown and "pip install 'twell[eval]'" in shown
    assert shown.count("256 of 2048 neurons hot") == 1  # the first two layers on one line
    assert "model.layers.0.mlp to model.layers.1.mlp" in shown
    assert f"{predicted(expected[0]):.2f}x" in " ".join(shown.split())
    assert "dense, 2048 neurons" in shown
