"""Layers with plans in a model and over processes: the kernels train what the reference trains, in the interpreter.

This file is also the program that each of two processes runs.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

pytest.importorskip("triton")

from interpreted import gather_in_torch, shorten_lists, speed_up_triton
from twell import GatedSparseFFN
from twell.gpu.training import split_training
from twell.hf import LlamaSparseReluConfig, LlamaSparseReluForCausalLM, SparseCausalLMOutput, losses, models
from twell.plan import Plan

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")

TOLERANCE = 1e-4
Gradients = dict[str, Tensor]


class Runs:
    """How often the kernels ran, forward."""

    n = 0


def count_runs(set_attribute: Callable[[Any, str, Any], None] = setattr) -> Runs:
    runs, right = Runs(), split_training.forward

    def counted(*args: Any, **options: Any) -> Any:
        runs.n += 1
        return right(*args, **options)

    set_attribute(split_training, "forward", counted)
    return runs


def plan_of(n_neurons: int, n_hot: int, cap: int) -> Plan:
    hot = torch.randperm(n_neurons, generator=torch.Generator().manual_seed(n_hot))[:n_hot]
    return Plan(n_neurons=n_neurons, hot=hot, cap=cap, first=cap // 2, min_tokens=0)


def difference(a: Gradients, b: Gradients) -> float:
    """Largest relative difference of a tensor."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in b)


# -- a model ----------------------------------------------------------------------------------------------

IDS = torch.randint(64, (2, 4), generator=torch.Generator().manual_seed(3))  # [sequences, tokens]


@pytest.fixture(autouse=True)
def kernel_runs(monkeypatch: pytest.MonkeyPatch) -> Runs:
    shorten_lists(monkeypatch.setattr)
    return count_runs(monkeypatch.setattr)


@pytest.fixture
def pair() -> tuple[Any, Any]:
    return make_pair(bias=True)


def make_pair(*, bias: bool) -> tuple[Any, Any]:
    """The same model by the kernels and by the reference.

    With biases a fifth of the neurons fire: some tokens are heavy, some have lists. Without them half fire, and all
    tokens are heavy."""
    torch.manual_seed(0)
    config = LlamaSparseReluConfig(
        hidden_size=32,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        vocab_size=64,
        max_position_embeddings=16,
        mlp_bias=bias,
        sparsity_l1_coeff=0.1,
        sparsity_do_track=True,
    )
    planned = LlamaSparseReluForCausalLM(config).train()
    mlps = [layer.mlp for layer in planned.model.layers]
    for mlp in mlps:
        mlp.backend = "reference"
        if bias:
            nn.init.constant_(mlp.gate_proj.bias, -0.1)
    reference = copy.deepcopy(planned)
    for mlp, plan in zip(mlps, (plan_of(128, 16, 24), plan_of(128, 0, 22)), strict=True):
        mlp.backend = "triton"
        mlp.set_plan(plan)
    return planned, reference


def learn(model: Any, ids: Tensor, labels: Tensor | None = None, **options: Any) -> SparseCausalLMOutput:
    """A forward and a backward."""
    out = model(ids, labels=ids if labels is None else labels, use_cache=False, **options)
    out.loss.backward()
    return out


def gradients(model: nn.Module) -> Gradients:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_same(planned: Any, reference: Any, outs: tuple[SparseCausalLMOutput, SparseCausalLMOutput]) -> None:
    """Losses, statistics and the gradients of all parameters."""
    ours, theirs = outs
    for name in ("loss", "ce_loss", "l1_loss"):
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=TOLERANCE, atol=0)
    for a, b in zip(ours.sparsity, theirs.sparsity, strict=True):
        assert torch.equal(a.counts, b.counts) and a.tokens == b.tokens
    assert difference(gradients(planned), gradients(reference)) < TOLERANCE


@pytest.mark.parametrize("bias", [False, True])
def test_a_model_trains_by_the_kernels(bias: bool, kernel_runs: Runs) -> None:
    planned, reference = make_pair(bias=bias)
    outs = learn(planned, IDS), learn(reference, IDS)
    assert_same(planned, reference, outs)
    assert kernel_runs.n == 2
    assert len(gradients(planned)) == len(list(planned.parameters()))


def test_checkpointed_layers_count_once(pair: tuple[Any, Any], kernel_runs: Runs) -> None:
    planned, reference = pair
    planned.gradient_checkpointing_enable({"use_reentrant": False})
    outs = learn(planned, IDS), learn(reference, IDS)
    assert kernel_runs.n == 4  # two layers, each of them again in the backward
    assert_same(planned, reference, outs)
    for ours, theirs in zip(planned.model.layers, reference.model.layers, strict=True):
        assert int(ours.mlp.tokens_seen) == 6  # the last token of a sequence predicts nothing
        assert torch.equal(ours.mlp.neuron_counts, theirs.mlp.neuron_counts)


def test_gradients_accumulate(pair: tuple[Any, Any]) -> None:
    planned, reference = pair
    for ids in IDS.split(1):
        learn(planned, ids, num_items_in_batch=6)
    learn(reference, IDS, num_items_in_batch=6)
    assert difference(gradients(planned), gradients(reference)) < TOLERANCE


def test_masked_tokens_are_in_no_statistics(pair: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    planned, reference = pair
    labels = IDS.clone()
    labels[0, 2:], labels[1, 1] = losses.IGNORED_LABEL, losses.IGNORED_LABEL  # 1 and 2 tokens are left
    unmasked = copy.deepcopy(reference)
    outs = learn(planned, IDS, labels), learn(reference, IDS, labels)
    assert [int(s.tokens) for s in outs[0].sparsity] == [3, 3]
    assert_same(planned, reference, outs)
    monkeypatch.setattr(models, "counted_tokens", lambda *_: None)
    learn(unmasked, IDS, labels)
    assert difference(gradients(unmasked), gradients(reference)) > 0.01  # so a lost mask would be seen


def test_all_labels_masked(pair: tuple[Any, Any]) -> None:
    """A micro-batch of padding adds nothing."""
    planned, _ = pair
    out = learn(planned, IDS, torch.full_like(IDS, losses.IGNORED_LABEL), num_items_in_batch=6)
    assert out.l1_loss == 0 and all(s.tokens == 0 and not s.counts.any() for s in out.sparsity)
    assert not any(g.any() for g in gradients(planned).values())


def test_frozen_ffns_pass_gradients_on(pair: tuple[Any, Any], kernel_runs: Runs) -> None:
    planned, reference = pair
    for model in pair:
        for layer in model.model.layers:
            layer.mlp.requires_grad_(False)
    outs = learn(planned, IDS), learn(reference, IDS)
    assert kernel_runs.n == 2
    assert_same(planned, reference, outs)
    assert not any(".mlp." in name for name in gradients(planned))


def test_a_step_compiles_whole_and_once(pair: tuple[Any, Any], kernel_runs: Runs) -> None:
    """Dense; one layer split; both split, by other plans: one graph, compiled the first time."""
    planned, reference = pair
    mlps = [layer.mlp for layer in planned.model.layers]
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(planned, fullgraph=True, backend=counter)
    seen = []
    for plans in ((None, None), (None, plan_of(128, 16, 24)), (plan_of(128, 0, 22), plan_of(128, 64, 8))):
        for mlp, plan in zip(mlps, plans, strict=True):
            mlp.set_plan(plan)
        planned.zero_grad()
        reference.zero_grad()
        outs = learn(compiled, IDS), learn(reference, IDS)
        assert_same(planned, reference, outs)
        seen.append((counter.frame_count, kernel_runs.n))
    assert seen == [(1, 0), (1, 1), (1, 3)]


# -- two processes ----------------------------------------------------------------------------------------

D, F, M, STEPS = 16, 48, 6, 2


class Stack(nn.Module):
    """Two FFNs, one of them with hot neurons. forward returns the loss, which depends on both outputs of each FFN."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.ffns = nn.ModuleList([GatedSparseFFN(D, F, bias=True, backend="triton") for _ in range(2)])
        for ffn, n_hot in zip(self.ffns, (16, 0), strict=True):
            nn.init.constant_(ffn.gate_proj.bias, -0.5)
            ffn.set_plan(plan_of(F, n_hot, 8))

    def forward(self, x: Tensor) -> Tensor:
        l1 = torch.zeros(())
        for ffn in self.ffns:
            y, stats = ffn(x, return_stats=True)
            x, l1 = x + y, l1 + stats.l1_sum / stats.tokens
        return (x * x).mean() + 0.1 * l1


def batch() -> Tensor:
    return torch.randn(M, D, generator=torch.Generator().manual_seed(1))


def train(model: nn.Module, x: Tensor) -> dict[str, Gradients]:
    """The gradients of every step, and the weights at the end."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found: dict[str, Gradients] = {}
    for step in range(STEPS):
        model(x).backward()
        found[f"gradients {step}"] = {clean(name): whole(p.grad) for name, p in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    return found | {"weights": {clean(name): whole(p) for name, p in model.named_parameters()}}


def clean(name: str) -> str:
    return name.removeprefix("module.")


def whole(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def sharded(model: Stack) -> nn.Module:
    """FSDP2: every FFN's parameters are freed after its forward, and gathered again for its backward."""
    mesh = init_device_mesh("cpu", (2,))
    for ffn in model.ffns:
        fully_shard(ffn, mesh=mesh, reshard_after_forward=True)
    return fully_shard(model, mesh=mesh)


KINDS = {"ddp": DistributedDataParallel, "fsdp": sharded}


def main(rank: int, folder: Path) -> None:
    shorten_lists()
    speed_up_triton()
    gather_in_torch()
    runs = count_runs()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=2)
    for kind, wrapped in KINDS.items():
        found = train(wrapped(Stack()), batch().chunk(2)[rank])
        torch.save(found, folder / f"{kind}.{rank}.pt")
    assert runs.n == len(KINDS) * STEPS * 2
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of two processes, each with half of the batch."""
    folder = tmp_path_factory.mktemp("two")
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        )
        for rank in range(2)
    ]
    try:
        outputs = [p.communicate(timeout=120)[0] for p in processes]
    finally:
        for p in processes:
            p.kill()  # where it still runs
    assert [p.returncode for p in processes] == [0, 0], "\n".join(o[-3000:] for o in outputs)
    return folder


@pytest.fixture(scope="module")
def one() -> dict[str, Gradients]:
    """The result of one process with the whole batch."""
    with pytest.MonkeyPatch.context() as patch:
        shorten_lists(patch.setattr)
        return train(Stack(), batch())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_train_as_one(two: Path, one: dict[str, Gradients], kind: str, rank: int) -> None:
    found = torch.load(two / f"{kind}.{rank}.pt")
    assert found.keys() == one.keys()
    for name, expected in one.items():
        assert difference(found[name], expected) < TOLERANCE, name


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)  # on a busy machine torch's threads have been seen to abort the interpreter's shutdown
