"""``twell bench train --model``: training steps of a whole Hugging Face model, dense against sparse.

A step: forward with cross-entropy and L1, backward, AdamW. As in ``model.py`` every FFN has the weights of a workload
and its input, which overwrites the hidden states; gradients pass through.
"""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn
from transformers import LlamaForCausalLM

from twell import energy
from twell.nn import SparseFFNBase
from twell.ops import backends
from twell.plan import Plan
from twell.workbench.bench import cases, ffn, timing, train_ffn
from twell.workbench.bench.checks import WrongResult
from twell.workbench.bench.model import make_sparse_
from twell.workbench.bench.train_ffn import ratio

_LEARNING_RATE = 1e-7  # every step writes the weights, and activations stay as sparse as they were
_MAX_LOSS_DIFFERENCE = 0.01


class Setup(NamedTuple):
    config: Any  # of a Llama with ReLU
    workload: str
    batch: int  # sequences of a step
    length: int  # of a sequence
    l1: float
    dtype: torch.dtype
    device: torch.device
    backend: str = "auto"


def measure(setup: Setup, *, seconds: float = 3.0) -> dict[str, Any]:
    """A JSON-ready row. Dense and sparse one after the other, each alone in memory.

    Each is an object, or "out of memory". Its ``memory``, in bytes: ``peak`` of a step; ``activations``, the peak
    less weights, gradients and optimiser state.
    """
    results = {name: _alone(name, setup, seconds) for name in ("dense", "sparse")}
    return {
        "bench": "train",
        "level": "model",
        "workload": setup.workload,
        "layers": setup.config.num_hidden_layers,
        "D": setup.config.hidden_size,
        "F": setup.config.intermediate_size,
        "batch": setup.batch,
        "length": setup.length,
        "dtype": timing.dtype_name(setup.dtype),
        "backend": backends.choose_backend(setup.backend, setup.device),
        **timing.environment(setup.device),
        **results,
        **_compared(**results),
    }


def _alone(name: str, setup: Setup, seconds: float) -> dict[str, Any] | str:
    """One variant, which leaves nothing in memory."""
    try:
        return _measure_variant(name, setup, seconds)
    except torch.OutOfMemoryError:
        return "out of memory"
    finally:
        gc.collect()  # modules and their hooks form reference cycles
        if setup.device.type == "cuda":
            torch.cuda.empty_cache()


def _compared(dense: dict[str, Any] | str, sparse: dict[str, Any] | str) -> dict[str, Any]:
    """Ratios of both variants; raises WrongResult where they do not compute the same."""
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
    if dense["joules"] is not None:
        ratios["joules_ratio"] = ratio(sparse["joules"], dense["joules"])
    return ratios


def _prepare(name: str, setup: Setup) -> tuple[_Training, Plan | None]:
    """A variant's model with its batch, and the plan of its layers, if they have one."""
    config, workload, batch, length, l1, dtype, device, backend = setup
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
    plan = None
    if name == "sparse":
        plans = make_sparse_(model, [fired] * len(model.model.layers), ffn.PLAN_TOKENS, backend=backend, training=True)
        plan = plans[0] if plans else None  # all layers have the same
    for layer in model.model.layers:
        layer.mlp = _MeasuredFFN(layer.mlp, x)
    return _Training(model, ids, l1), plan


def _measure_variant(name: str, setup: Setup, seconds: float) -> dict[str, Any]:
    training, plan = _prepare(name, setup)
    tokens, device = setup.batch * setup.length, setup.device
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

    def memory(self) -> dict[str, int]:
        """Take a step; its memory, see ``measure``."""
        device = self.ids.device
        of_weights = sum(p.nbytes for p in self.model.parameters())
        of_optimizer = sum(
            t.nbytes for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor)
        )
        before = torch.cuda.memory_allocated(device) if device.type == "cuda" else of_weights + of_optimizer
        peak = before + timing.peak_bytes(self.step, device)
        return {
            "peak": peak,
            "activations": peak - 2 * of_weights - of_optimizer,  # gradients are as large as the weights
            "weights": of_weights,
            "optimizer": of_optimizer,
        }
