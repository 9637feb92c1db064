"""Tensor parallel models compute what whole ones do: two processes on the CPU against one.

This file is a program, too: the tests start it in two processes, once, since starting takes longer than computing.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2Config
from transformers.distributed import DistributedConfig

import twell
from interpreted import shorten_lists, speed_up_triton
from twell import cpu
from twell.hf import LlamaSparseReluConfig, Qwen2SparseReluConfig
from twell.hf.counts import NeuronCounts
from twell.nn import SparseFFNBase
from twell.ops import Stats
from twell.plan import Plan, choose_plan, costs_for
from twell.sparsity import Planner, restart_neurons_

STYLES = pytest.importorskip("transformers.distributed.tensor_parallel", reason="new in 5.16").ALL_PARALLEL_STYLES

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
CONFIGS = {
    # Biases; both parts of the loss about as large.
    "llama": LlamaSparseReluConfig(
        **SHAPE, intermediate_size=96, mlp_bias=True, sparsity_l1_coeff=0.03, tie_word_embeddings=False
    ),
    # A plain FFN of 65 neurons: 33 for one process, 32 for the other. Tied embeddings, running counts.
    "qwen2": Qwen2SparseReluConfig(
        **SHAPE,
        intermediate_size=65,
        sparsity_gated_mlp=False,
        sparsity_do_track=True,
        sparsity_l1_coeff=0.3,
        tie_word_embeddings=True,
    ),
    "dense": LlamaConfig(**SHAPE, intermediate_size=96, mlp_bias=True, hidden_act="relu"),
}
TOLERANCE = 1e-5  # relative, fp32; sums in another order make 1e-6
COUNTED_TOKENS = 1000


# -- what both sides do -----------------------------------------------------------------------------------


def make_models(folder: Path) -> None:
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
        for p in model.parameters():  # larger weights than at initialisation, and biases that are not 0
            nn.init.normal_(p, std=0.2) if p.dim() == 2 or not bool(p.any()) else None
        model.save_pretrained(folder / name)
    config = LlamaSparseReluConfig(**SHAPE, intermediate_size=96)
    model = AutoModelForCausalLM.from_config(config).eval()
    twell.quantize_(model)
    model.save_pretrained(folder / "fp8")


def batch() -> dict[str, Tensor]:
    """Three sequences, one of them padded; a third of the labels masked."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, SHAPE["vocab_size"], (3, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    labels = ids.masked_fill((torch.rand(ids.shape, generator=generator) < 0.3) | (mask == 0), -100)
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}


def fired(n_neurons: int) -> Tensor:
    """Counts whose halves differ: neurons that fire often are in the first."""
    return torch.where(torch.arange(n_neurons) < n_neurons // 16, COUNTED_TOKENS // 2, 1)


def whole(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def observe(model: Any) -> dict[str, Any]:
    """What a model computes, in a form that does not depend on the number of processes."""
    model.train()
    model.zero_grad()
    inputs = batch()
    out = model(**inputs)
    out.loss.backward()
    seen: dict[str, Any] = {
        "loss": out.loss.detach(),
        "gradients": {name: whole(p.grad) for name, p in model.named_parameters()},
    }
    if hasattr(out, "sparsity"):
        seen |= {"l1_loss": out.l1_loss.detach(), "l1_sums": torch.stack([s.l1_sum.detach() for s in out.sparsity])}
        seen["counts"] = torch.cat([torch.cat([s.counts, s.tokens.reshape(1)]) for s in out.sparsity])
    model.eval()
    del inputs["labels"]
    with torch.no_grad():
        seen["logits"] = model(**inputs).logits
        seen["tokens"] = model.generate(**inputs, max_new_tokens=6, do_sample=False)
    running = [torch.cat([ffn.neuron_counts, ffn.tokens_seen.reshape(1)]) for ffn in ffns(model) if ffn.track_counts]
    return seen | ({"running counts": torch.cat(running)} if running else {})


def ffns(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, SparseFFNBase)]


def restart(model: nn.Module) -> dict[str, Tensor]:
    """Weights after a third of the neurons got fresh ones."""
    for ffn in ffns(model):
        restart_neurons_(ffn, torch.arange(96) % 3 == 0, std=0.1, seed=3)
    return {name: whole(p) for name, p in model.named_parameters()}


def run_ffn(run: Any) -> dict[str, Tensor]:
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0), requires_grad=True)
    y, stats = run(x, None, True)
    (y.square().sum() + stats.l1_sum).backward()
    return {"y": y.detach(), "dx": whole(x.grad), "counts": stats.counts}


def share_out(ffn: Any, mesh: Any) -> None:
    """As transformers does by a plan."""
    for name in ffn.projections:
        linear, style = getattr(ffn, name), STYLES["rowwise" if name == ffn.projections[-1] else "colwise"]
        for parameter in ("weight", "bias"):
            style.shard_param(linear, parameter, mesh)
        style.install_forward(linear, mesh)


# -- the program ------------------------------------------------------------------------------------------


def run_by_plan(ffn: Any) -> dict[str, Tensor]:
    """y by the sparse kernels in Triton's interpreter: hot neurons, light and heavy tokens."""
    shorten_lists()
    speed_up_triton()
    ffn.backend = "triton"
    ffn.set_plan(Plan(n_neurons=48, hot=torch.tensor([5, 1]), cap=16, min_tokens=0))
    with torch.no_grad():
        return {"y": ffn(torch.randn(4, 32, generator=torch.Generator().manual_seed(0)))}


def run_with_hook(ffn: Any) -> dict[str, Tensor]:
    """Called projection by projection, each with its own neurons."""
    calls: list[Any] = []
    hook = ffn.up_proj.register_forward_hook(lambda *_: calls.append(1))
    assert "runs densely: up_proj has hooks" in repr(ffn)
    seen = run_ffn(ffn._ffn)
    hook.remove()
    assert calls == [1] and ffn.why_called() is None
    return seen


class Wrapper(nn.Module):
    """An adapter in the place of a projection."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def run_with_wrapper(ffn: Any) -> dict[str, Tensor]:
    linear, ffn.gate_proj = ffn.gate_proj, Wrapper(ffn.gate_proj)
    assert ffn.why_called() == "gate_proj is Wrapper, not a plain nn.Linear"
    seen = run_ffn(ffn._ffn)
    ffn.gate_proj = linear
    return seen


def run_copy(ffn: Any, copied: Any) -> dict[str, Tensor]:
    """A copy has weights of its own, also where it calls its projections."""
    new = copied(ffn)
    seen = run_ffn(new._ffn)
    assert_same(run_with_hook(new), seen, "copy with a hook")
    before = run_ffn(ffn._ffn)["y"]
    with torch.no_grad():
        new.down_proj.weight.zero_()
    torch.testing.assert_close(run_with_hook(new)["y"], whole(ffn.down_proj.bias).expand(4, -1))
    assert run_ffn(ffn._ffn)["y"].equal(before)
    return seen


def run_frozen(ffn: Any) -> dict[str, Tensor]:
    """Frozen state covers the process's own weights; it follows visible changes, and others after refresh_."""
    report = twell.freeze_(ffn)
    assert report.layers == 1 and ffn.frozen_bytes() == report.bytes >= 48 * 32 * 4
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        y = ffn(x)
        ffn.down_proj.weight.mul_(2)
        doubled = ffn(x)
        ffn.down_proj.weight.to_local().data.mul_(0.5)
        assert twell.refresh_(ffn) == 1
        again = ffn(x)
    bias = whole(ffn.down_proj.bias)
    torch.testing.assert_close(doubled - bias, 2 * (y - bias))
    torch.testing.assert_close(again, y)
    assert twell.thaw_(ffn) == 1
    return {"y": y}


def assert_same_plan(a: Plan, b: Plan) -> None:
    ours, theirs = a.state_dict(), b.state_dict()
    assert ours.pop("hot").equal(theirs.pop("hot")) and ours == theirs


def check_plans(rank: int) -> None:
    """Each process plans for its own neurons, from counts of all."""
    ffn: Any = twell.GatedSparseFFN(16, 4096)
    share_out(ffn, init_device_mesh("cpu", (2,)))
    own = slice(2048 * rank, 2048 * rank + 2048)
    costs = {training: costs_for(torch.device("cpu"), training=training) for training in (False, True)}
    expected = {t: choose_plan(fired(4096)[own], COUNTED_TOKENS, costs[t], width=16) for t in costs}
    assert [len(plan.hot) for plan in expected.values()] == ([0, 0] if rank else [256, 256])
    assert ffn.plan_from_counts(fired(4096), COUNTED_TOKENS).predicted == expected[False].predicted
    assert_same_plan(ffn.plan, expected[False])
    assert ffn.plan_from_counts(fired(4096)[own], COUNTED_TOKENS).hot.equal(expected[False].hot)
    ffn.backend = "triton"
    planner = Planner([ffn], every=1)
    for _ in range(2):
        planner.advance([Stats(torch.zeros(()), fired(4096).int(), torch.tensor(COUNTED_TOKENS))])
    assert_same_plan(ffn.plan, expected[True])


def observe_in_parallel(folder: Path, rank: int) -> dict[str, Any]:
    def load(name: str, **settings: Any) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder / name, **settings)

    two_shares = DistributedConfig(tp_size=2)
    seen: dict[str, Any] = {}

    with warnings.catch_warnings(record=True):  # newer versions would rather have distributed_config
        model = load("llama", tp_plan="auto")
    assert [ffn.share().own for ffn in ffns(model)] == [slice(48 * rank, 48 * rank + 48)] * 2
    assert {ffn.gate_proj.weight.to_local().shape for ffn in ffns(model)} == {(48, 32)}
    seen["llama"] = observe(model)
    model.save_pretrained(folder / "llama-saved")

    model.gradient_checkpointing_enable()
    seen["llama-checkpointed"] = observe(model)
    model.gradient_checkpointing_disable()

    ffn = ffns(model)[0]
    assert f"neurons {48 * rank} to {48 * rank + 47} here" in repr(ffn)
    assert ffn.why_called() is None and "runs densely" not in repr(ffn)
    seen["hooked"] = run_with_hook(ffn)
    seen["wrapped"] = run_with_wrapper(ffn)
    new = twell.GatedSparseFFN(32, 96, bias=True)  # weights loaded by transformers cannot be copied, dense ones too
    new.load_state_dict({name: whole(tensor) for name, tensor in ffn.state_dict().items()})
    share_out(new, ffn.share().mesh)
    seen["copied"] = run_copy(new, copy.deepcopy)
    seen["pickled"] = run_copy(new, lambda ffn: pickle.loads(pickle.dumps(ffn)))
    seen["frozen"] = run_frozen(ffn)
    seen["by plan"] = run_by_plan(ffn)
    with pytest.raises(ValueError, match="for 96 neurons, the layer has 96, 48 of them in this process"):
        ffn.set_plan(Plan(n_neurons=96, hot=torch.arange(2), cap=16))
    ffn._look_at(torch.randn(4096, 32))
    assert ffn.plan.n_neurons == 48
    seen["restarted"] = {"weights": restart(model)}

    seen["qwen2"] = observe(load("qwen2", distributed_config=two_shares))

    # A dense model that is parallel already.
    model = load("dense", distributed_config=two_shares)
    report = twell.sparsify_(model, NeuronCounts(fired=[fired(96)] * 2, tokens=COUNTED_TOKENS))
    plan = choose_plan(fired(96)[48 * rank :][:48], COUNTED_TOKENS, costs_for(torch.device("cpu")), width=32)
    assert [(row.became, row.plan) for row in report.rows] == [("GatedSparseFFN, relu", repr(plan))] * 2
    seen["dense"] = observe(model)
    seen["compiled"] = run_ffn(torch.compile(ffns(model)[0]._ffn, fullgraph=True, backend="aot_eager"))
    seen["hooked, by stock styles"] = run_with_hook(ffns(model)[0])
    twell.desparsify_(model)
    assert not ffns(model)
    seen["desparsified"] = observe(model)
    twell.relufy_(model, l1=0.03)
    assert [ffn.share().n_own for ffn in ffns(model)] == [48, 48]
    seen["relufied"] = observe(model)
    model.save_pretrained(folder / "relufied")

    check_plans(rank)

    # FSDP2 as transformers loads it: both processes see the same batch here, and gradients are averaged.
    model = load("llama", distributed_config=DistributedConfig(fsdp_size=2))
    assert {ffn.down_proj.weight.to_local().shape for ffn in ffns(model)} == {(16, 96)}
    seen["fsdp"] = observe(model)
    model = load("dense", distributed_config=DistributedConfig(fsdp_size=2))
    assert "not by neurons" in str(twell.sparsify_(model))

    # Pipeline stages as transformers makes them predict, and no more. (Wrong for padded sequences, dense ones too.)
    model = load("llama", distributed_config=DistributedConfig(pp_size=2))
    inputs = {name: tensor for name, tensor in batch().items() if name != "labels"}
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=6, do_sample=False)
        seen["pipeline"] = {"logits": model(**inputs).logits, "tokens": tokens[::2]}
    with pytest.raises(ValueError, match="pipeline parallel only predicts"):
        type(model).forward(model, **batch())

    # A plan of the user's own, with other styles that lay the weights out by neurons.
    stock = {f"model.{name}": style for name, style in LlamaConfig.base_model_tp_plan.items()}
    gathered = {"gate_proj": "colwise_gather_output", "up_proj": "colwise_gather_output"}
    stock |= {f"model.layers.*.mlp.{name}": style for name, style in gathered.items()}
    stock["model.layers.*.mlp.down_proj"] = "rowwise_split_input"
    model = load("llama", distributed_config=DistributedConfig(tp_size=2, tp_plan=stock))
    seen["gathered"] = observe(model)
    seen["gathered, hooked"] = run_with_hook(ffns(model)[0])

    with pytest.raises(ValueError, match="FP8 weights cannot be shared out over processes"):
        load("fp8", distributed_config=two_shares)
    return seen


def main(folder: Path) -> None:
    cpu.block.MIN_WORK = 0  # small shapes take the fast path
    dist.init_process_group("gloo")
    torch.save(observe_in_parallel(folder, dist.get_rank()), folder / f"{dist.get_rank()}.pt")
    dist.destroy_process_group()


# -- the tests --------------------------------------------------------------------------------------------


def observe_whole(folder: Path) -> dict[str, Any]:
    """The same of one process."""
    models = {name: AutoModelForCausalLM.from_pretrained(folder / name) for name in CONFIGS}
    seen = {name: observe(copy.deepcopy(model)) for name, model in models.items()}
    seen["llama-checkpointed"] = seen["fsdp"] = seen["gathered"] = seen["llama"]
    seen["desparsified"] = seen["dense"]
    seen["pipeline"] = {"logits": seen["llama"]["logits"], "tokens": seen["llama"]["tokens"][::2]}
    ffn = ffns(models["llama"])[0]
    seen["hooked"] = seen["wrapped"] = seen["copied"] = seen["pickled"] = seen["gathered, hooked"] = run_ffn(ffn._ffn)
    seen["by plan"] = seen["frozen"] = {"y": seen["hooked"]["y"]}
    seen["restarted"] = {"weights": restart(models["llama"])}
    ffn = twell.GatedSparseFFN.from_dense(models["dense"].model.layers[0].mlp)
    seen["compiled"] = seen["hooked, by stock styles"] = run_ffn(ffn._ffn)
    twell.relufy_(models["dense"], l1=0.03)
    seen["relufied"] = observe(models["dense"])
    return seen


def assert_same(found: Any, expected: Any, what: str) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), what
        for name in expected:
            assert_same(found[name], expected[name], f"{what}, {name}")
    elif expected.is_floating_point():
        difference = float((found - expected).norm() / expected.norm())
        assert difference < TOLERANCE, f"{what}: {difference}"
    else:
        assert found.equal(expected), what


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def start(folder: Path, rank: int, port: int) -> subprocess.Popen:
    """One of two processes, as torchrun starts them."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    more = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
    return subprocess.Popen(
        [sys.executable, __file__, folder],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {name: str(value) for name, value in (ranks | more).items()},
    )


def test_two_processes_compute_what_one_does(tmp_path: Path) -> None:
    make_models(tmp_path)
    processes = [start(tmp_path, rank, port) for port in [free_port()] for rank in (0, 1)]
    expected = observe_whole(tmp_path)
    assert expected["llama"]["loss"] > 1.1 * (expected["llama"]["loss"] - 0.03 * expected["llama"]["l1_loss"])
    for rank, process in enumerate(processes):
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors[-5000:]
        assert_same(torch.load(tmp_path / f"{rank}.pt"), expected, f"process {rank}")

    for saved, name in (("llama-saved", "llama"), ("relufied", "dense")):
        files = [load_file(tmp_path / folder / "model.safetensors") for folder in (saved, name)]
        assert_same(*files, saved)
        assert type(AutoModelForCausalLM.from_pretrained(tmp_path / saved)) is not LlamaForCausalLM


def test_plans_are_those_of_the_base_models() -> None:
    """Other engines read them: vLLM takes styles it does not know for replicated, SGLang raises."""
    for config, base in ((CONFIGS["llama"], LlamaConfig), (CONFIGS["qwen2"], Qwen2Config)):
        plan = AutoModelForCausalLM.from_config(config).tp_plan
        assert (
            plan
            == AutoModelForCausalLM.from_config(base(**SHAPE, tie_word_embeddings=config.tie_word_embeddings)).tp_plan
        )
        assert plan["model.layers.*.mlp.down_proj"] == "rowwise" and "tp_plan" not in config.to_json_string()


@contextlib.contextmanager
def second_of_two() -> Iterator[DeviceMesh]:
    """This process is the second of two; sums over processes leave tensors as they are."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with second_of_two() as mesh:
        yield mesh


def shared_out(mesh: DeviceMesh, **settings: Any) -> Any:
    torch.manual_seed(0)
    ffn = twell.GatedSparseFFN(32, 96, **settings)
    share_out(ffn, mesh)
    return ffn.eval()


def test_threads_share_a_parallel_ffn(mesh: DeviceMesh) -> None:
    ffn = shared_out(mesh, bias=True)
    xs = [torch.randn(4 + i % 3, 32) for i in range(64)]
    with torch.no_grad():
        expected = [ffn(x) for x in xs]
    weights = [(p, id(p)) for p in ffn.parameters()]

    def run(x: Tensor) -> Tensor:
        with torch.no_grad():
            return ffn(x)

    with ThreadPoolExecutor(8) as pool:
        for y, y_alone in zip(pool.map(run, xs), expected, strict=True):
            assert y.equal(y_alone)
    assert [(p, id(p)) for p in ffn.parameters()] == weights


def test_an_error_in_a_call_changes_nothing(mesh: DeviceMesh) -> None:
    ffn = shared_out(mesh, bias=True)
    before, x = {name: id(p) for name, p in ffn.named_parameters()}, torch.randn(4, 32)
    y = ffn(x)
    for wrong in (torch.randn(4, 31), torch.randn(4, 32, dtype=torch.float64), "x"):
        with pytest.raises(ValueError, match="GatedSparseFFN"):
            ffn(wrong)
    hook = ffn.up_proj.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        ffn(x)
    hook.remove()
    assert {name: id(p) for name, p in ffn.named_parameters()} == before and ffn(x).equal(y)


def test_a_copy_stays_parallel(mesh: DeviceMesh) -> None:
    ffn = shared_out(mesh, bias=True)
    stored = io.BytesIO()
    torch.save(ffn, stored)
    stored.seek(0)
    for new in (copy.deepcopy(ffn), torch.load(stored, weights_only=False)):
        assert type(new) is twell.GatedSparseFFN and new.share() == ffn.share() and new.why_called() is None
        assert repr(new) == repr(ffn) and "neurons 48 to 95 here" in repr(new)


def test_fsdp_along_neurons_is_not_tensor_parallel(mesh: DeviceMesh) -> None:
    """FSDP2 can divide each weight along its longest dimension: columns of down. In a call the weights are whole."""
    model: Any = nn.Sequential(twell.GatedSparseFFN(16, 4096))
    for module in (model[0], model):
        fully_shard(module, mesh=mesh, shard_placement_fn=lambda p: Shard(0 if p.shape[0] > p.shape[1] else 1))
    ffn = model[0]
    assert [p.to_local().numel() for p in ffn.parameters()] == [16 * 2048] * 3 and ffn.down_proj.weight.shape[0] == 16
    assert ffn.share() is None and "its weights are sharded" in repr(ffn)
    plan = ffn.plan_from_counts(fired(4096), COUNTED_TOKENS)
    y, stats = model[0](torch.randn(3, 16), return_stats=True)
    y.sum().backward()
    assert len(stats.counts) == 4096 and ffn.plan is plan and plan.n_neurons == 4096
    ffn.set_plan(Plan(n_neurons=4096, hot=torch.arange(2), cap=16))


def test_a_pickle_opens_without_other_processes(tmp_path: Path) -> None:
    """The weights are there, and a call says what is missing, as for DTensors."""
    with second_of_two() as mesh:
        torch.save(shared_out(mesh), tmp_path / "ffn.pt")
    ffn = torch.load(tmp_path / "ffn.pt", weights_only=False)
    assert ffn.gate_proj.weight.to_local().shape == (48, 32) and "neurons 48 to 95 here" in repr(ffn)
    with pytest.raises((RuntimeError, ValueError), match="process group"):
        ffn(torch.zeros(2, 32))


def test_neurons_divided_after_planning(mesh: DeviceMesh) -> None:
    """A plan of the whole layer would not fit."""
    torch.manual_seed(0)
    ffn: Any = twell.GatedSparseFFN(32, 96)
    ffn.set_plan(Plan(n_neurons=96, hot=torch.arange(2), cap=16))
    share_out(ffn, mesh)
    with torch.no_grad():
        ffn(torch.randn(4, 32))
    assert ffn.plan is None
    ffn.set_plan(Plan(n_neurons=48, hot=torch.arange(2), cap=16))


def test_layouts_not_divided_by_neurons_are_refused(mesh: DeviceMesh) -> None:
    """They raise instead of giving wrong results."""
    for name in twell.GatedSparseFFN.projections:
        ffn = shared_out(mesh)
        whole = nn.Linear(32, 96, bias=False) if name != "down_proj" else nn.Linear(96, 32, bias=False)
        setattr(ffn, name, whole)
        assert ffn.share() is None and ffn.why_called() is not None
        with pytest.raises((ValueError, RuntimeError)):
            ffn(torch.randn(4, 32))
    with pytest.raises(ValueError, match="an FFN of 1 neurons cannot be divided over 2 processes"):
        share_out(ffn := twell.SparseFFN(16, 1), mesh)
        ffn(torch.zeros(1, 16))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # on a busy machine torch's threads have been seen to abort the interpreter's shutdown
