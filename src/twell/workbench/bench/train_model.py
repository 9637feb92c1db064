"""``twell bench train --model``: training steps of a whole Hugging Face model, dense against sparse.

A step: forward with cross-entropy and L1, backward, AdamW. As in ``model.py`` every FFN has the weights of a workload
and its input, which overwrites the hidden states; gradients pass through.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from twell import energy
from twell.hf.sparsify import sparsify_
from twell.nn import SparseFFNBase
from twell.ops import backends
from twell.plan import Plan
from twell.workbench.bench import cases, ffn, timing, train_ffn
from twell.workbench.bench.checks import WrongResult
from twell.workbench.bench.train_ffn import ratio

_LEARNING_RATE = 1e-7  # every step writes the weights, and activations stay as sparse as they were
_MAX_LOSS_DIFFERENCE = 0.01
OUT_OF_MEMORY = "out of memory"
_PROBES = (4, 8)  # sequences
Result = TypeVar("Result")


class Setup(NamedTuple):
    config: Any  # of a Llama with ReLU
    workload: str
    length: int  # of a sequence
    l1: float
    dtype: torch.dtype
    device: torch.device
    backend: str = "auto"


BOTH = ("dense", "sparse")


def measure_steps(setup: Setup, batch: int, *, variants: Sequence[str] = BOTH, seconds: float = 3.0) -> dict[str, Any]:
    """A JSON-ready row. One variant after the other, each alone in memory.

    A variant is an object, or "out of memory". Its ``memory``, in bytes: ``peak`` of a step; ``activations``, the peak
    less weights, gradients and optimiser state; ``kept``, what a forward leaves for its backward (None on a CPU).
    """
    results = {name: _alone(name, setup, batch, seconds) or OUT_OF_MEMORY for name in variants}
    return {**_facts("model", setup), "batch": batch, **results, **_compared(results)}


def measure_largest(setup: Setup, *, variants: Sequence[str] = BOTH, seconds: float = 3.0) -> dict[str, Any]:
    """A JSON-ready row: each variant at its own largest batch that fits this GPU, and its speed there."""
    if setup.device.type != "cuda":
        raise ValueError("the largest batch that fits is a question to a GPU")
    room = torch.cuda.get_device_properties(setup.device).total_memory
    results: dict[str, Any] = {}
    for name in variants:
        batch = largest(functools.partial(_peak, name, setup), room)
        result = _alone(name, setup, batch, seconds)
        if result is None:
            raise RuntimeError(f"{batch} sequences fitted the GPU and then did not: is another program on it?")
        results[name] = {"batch": batch, **result}
    row = {**_facts("largest", setup), **results}
    if {*BOTH} <= {*results}:
        dense, sparse = results["dense"], results["sparse"]
        row["batch_ratio"] = round(sparse["batch"] / dense["batch"], 3)
        row["speedup"] = round(sparse["tokens_per_ms"] / dense["tokens_per_ms"], 3)
    return row


def largest(peak: Callable[[int], int | None], room: int) -> int:
    """The largest batch whose ``peak`` memory is not None; ``room``: bytes of the GPU.

    Each sequence takes the same memory, so two batches tell about how many fit (not the smallest, which run densely).
    From there down to a batch that fits, then up, one by one, to one that does not.
    """
    near, far = (peak(batch) for batch in _PROBES)
    if near is None or far is None:
        batch = (_PROBES[0] if near is None else _PROBES[1]) - 1
    else:
        each = max(1.0, (far - near) / (_PROBES[1] - _PROBES[0]))
        batch = max(_PROBES[1], _PROBES[0] + int((room - near) / each))
    while batch and peak(batch) is None:
        batch -= max(1, batch // 50)
    if not batch:
        raise RuntimeError("not even one sequence fits")
    while peak(batch + 1) is not None:
        batch += 1
    return batch


def _facts(level: str, setup: Setup) -> dict[str, Any]:
    return {
        "bench": "train",
        "level": level,
        "workload": setup.workload,
        "layers": setup.config.num_hidden_layers,
        "D": setup.config.hidden_size,
        "F": setup.config.intermediate_size,
        "length": setup.length,
        "dtype": timing.dtype_name(setup.dtype),
        "backend": backends.choose_backend(setup.backend, setup.device),
        **timing.environment(setup.device),
    }


def _alone(name: str, setup: Setup, batch: int, seconds: float) -> dict[str, Any] | None:
    """One variant, which leaves nothing in memory; None where it does not fit."""
    return _if_it_fits(functools.partial(_measure_variant, name, setup, batch, seconds), setup.device)


def _peak(name: str, setup: Setup, batch: int) -> int | None:
    """Bytes of a step's peak; None where it does not fit."""

    def measure() -> int:
        training, _ = _prepare(name, setup, batch)
        training.step()  # the first step begins without optimiser state
        peak = training.memory()["peak"]
        assert peak is not None
        return peak

    return _if_it_fits(measure, setup.device)


def _if_it_fits(measure: Callable[[], Result], device: torch.device) -> Result | None:
    try:
        return measure()
    except torch.OutOfMemoryError:
        return None
    finally:
        gc.collect()  # modules and their hooks form reference cycles
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _compared(results: dict[str, Any]) -> dict[str, Any]:
    """Ratios of both variants; raises WrongResult where they do not compute the same."""
    dense, sparse = results.get("dense"), results.get("sparse")
    if not isinstance(dense, dict) or not isinstance(sparse, dict):
        return {}
    for name in ("cross_entropy", "l1"):
        if not abs(sparse[name] - dense[name]) <= _MAX_LOSS_DIFFERENCE * abs(dense[name]):
            raise WrongResult(
                f"the sparse model's first {name} is {sparse[name]:.5g}, the dense model's {dense[name]:.5g}; "
                "no speedup is reported"
            )
    ratios = {"speedup": round(dense["step_ms"]["p50"] / sparse["step_ms"]["p50"], 3)}
    ratios |= {
        f"{name}_ratio": ratio(sparse["memory"][name], dense["memory"][name]) for name in ("peak", "activations")
    }
    if dense["memory"]["kept"] is not None:
        ratios["kept_ratio"] = ratio(sparse["memory"]["kept"], dense["memory"]["kept"])
    if dense["joules"] is not None:
        ratios["joules_ratio"] = ratio(sparse["joules"], dense["joules"])
    return ratios


def _prepare(name: str, setup: Setup, batch: int) -> tuple[_Training, Plan | None]:
    """A variant's model with its batch, and the plan of its layers, if they have one."""
    config, workload, length, l1, dtype, device, backend = setup
    torch.manual_seed(0)
    with device:
        model: Any = LlamaForCausalLM(config)
        ids = torch.randint(config.vocab_size, (batch, length))
    model.to(dtype).train()
    tokens = batch * length
    inputs = cases.make(
        workload, tokens + ffn.PLAN_TOKENS, config.hidden_size, config.intermediate_size, dtype=dtype, device=device
    )
    fired = (torch.relu(nnf.linear(inputs.x[tokens:], inputs.w_gate)) != 0).sum(0)
    x = inputs.x[:tokens].view(batch, length, -1).clone()
    cases.write_ffns_(model, inputs)
    del inputs
    plan = _make_sparse(model, fired, backend) if name == "sparse" else None
    for layer in model.model.layers:
        layer.mlp = _MeasuredFFN(layer.mlp, x)
    return _Training(model, ids, l1), plan


def _measure_variant(name: str, setup: Setup, batch: int, seconds: float) -> dict[str, Any]:
    training, plan = _prepare(name, setup, batch)
    tokens, device = batch * setup.length, setup.device
    first = training.first_losses()
    training.step()  # the second warm-up
    memory = training.memory()
    times = timing.compare({"step": training.step}, seconds=seconds, warmups=0, device=device)["step"]
    return {
        "step_ms": times._asdict(),
        "tokens_per_ms": round(tokens / times.p50, 2),
        **first,
        "memory": memory,
        "joules": energy.joules(training.step, device, min(seconds, 2 * train_ffn.ENERGY_SECONDS)),
        **({} if plan is None else {"plan": ffn.plan_facts(plan)}),
    }


def _make_sparse(model: Any, fired: Tensor, backend: str) -> Plan | None:
    """Convert the FFNs. All have the same counts, so the plan of one, if any, is that of all."""
    sparsify_(model)
    plan = None
    for layer in model.model.layers:
        layer.mlp.backend = backend
        if backends.choose_backend(backend, fired.device) == "triton":
            plan = layer.mlp.plan_from_counts(fired, ffn.PLAN_TOKENS, training=True)
    return plan


class _Overwrite(torch.autograd.Function):
    """Overwrites hidden states in place; gradients pass through. It takes no memory: as in a real model, an FFN keeps
    its layer's own tensor for the backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, values: Tensor) -> Tensor:
        ctx.mark_dirty(hidden)
        return hidden.copy_(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Tensor, None]:
        return gradients[0], None


class _MeasuredFFN(nn.Module):
    """A dense or sparse block that runs on x [batch, length, D] and keeps sum |h| for the loss."""

    def __init__(self, block: Any, x: Tensor) -> None:
        super().__init__()
        self.block, self.x = block, x
        self.l1_sum: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        x = _Overwrite.apply(hidden, self.x)
        if isinstance(self.block, SparseFFNBase):
            y, stats = self.block(x, return_stats=True)
            self.l1_sum = stats.l1_sum
        else:
            projections = (self.block.gate_proj, self.block.up_proj, self.block.down_proj)
            y, self.l1_sum = train_ffn.dense_forward(x, *(linear.weight for linear in projections))
        return y


class _Training:
    """A model, its optimiser, and one batch."""

    def __init__(self, model: Any, ids: Tensor, l1: float) -> None:
        self.model, self.ids, self.l1 = model, ids, l1
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=_LEARNING_RATE, fused=True if ids.device.type == "cuda" else None
        )

    def losses(self) -> tuple[Tensor, Tensor]:
        """Cross-entropy as the model computes it, and sum |h| of a token, in the mean over tokens and layers."""
        cross_entropy = self.model(self.ids, labels=self.ids, use_cache=False).loss
        ffns = [layer.mlp for layer in self.model.model.layers]
        l1_sum = torch.stack([ffn.l1_sum for ffn in ffns]).mean()
        for each in ffns:
            each.l1_sum = None
        return cross_entropy, l1_sum / self.ids.numel()

    def learn_from(self, cross_entropy: Tensor, l1: Tensor) -> None:
        (cross_entropy + self.l1 * l1).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def first_losses(self) -> dict[str, float]:
        """Take a step; its losses."""
        losses = self.losses()
        self.learn_from(*losses)
        return dict(zip(("cross_entropy", "l1"), (loss.item() for loss in losses), strict=True))

    def step(self) -> None:
        self.learn_from(*self.losses())

    def memory(self) -> dict[str, int | None]:
        """Take a step; its memory, see ``measure_steps``."""
        device = self.ids.device
        of_weights = sum(p.nbytes for p in self.model.parameters())
        of_optimizer = sum(
            t.nbytes for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)
        )
        kept = None
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            losses = self.losses()
            kept = torch.cuda.memory_allocated(device) - before
            self.learn_from(*losses)
            peak = torch.cuda.max_memory_allocated(device)
        else:
            peak = timing.peak_bytes(self.step) + of_weights + of_optimizer
        return {
            "peak": peak,
            "activations": peak - 2 * of_weights - of_optimizer,  # gradients are as large as the weights
            "kept": kept,
            "weights": of_weights,
            "optimizer": of_optimizer,
        }
