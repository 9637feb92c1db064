"""What a layer keeps besides its weights: running counts, its plan, and frozen state.

A plan made from counts lasts until the text no longer suits it (plan/drift.py). A layer whose plan was never set looks
at its first tokens and plans by itself. Training has a planner of its own: ``twell.sparsity.Planner``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from twell.nn.frozen import FrozenState
from twell.nn.parallel import bind_forwards_
from twell.nn.projections import Projections
from twell.ops import backends, registered
from twell.ops import functional as ops
from twell.plan import MAX_FEW_TOKENS, Plan, as_size, choose_plan, costs_for, dense_plan
from twell.plan.drift import Drift

LOOK_TOKENS = 4096  # tokens a layer sees before it plans for large batches
LOOK_AT_LEAST = 256  # tokens of a batch: a look costs another gate GEMM, which decoding should not pay
FIRST_LOOK = MAX_FEW_TOKENS  # tokens it sees before it plans for few tokens


class KeptOfFp8(NamedTuple):
    """What a layer with FP8 weights keeps for the kernels, and what it was made from."""

    states: list[Any]  # address and version of every weight and scale; empty: make it anew
    order: Tensor  # the plan's, which tells plans apart
    kept: Any  # ``gpu.fp8.Kept``; None: kernels cannot read the weights


class Planned(Projections):
    """Projections with running counts, a plan and frozen state."""

    tokens_seen: Tensor
    plan: Plan | None
    frozen: FrozenState | None
    backend: str
    _fp8: KeptOfFp8 | None
    _number: Tensor | None  # FP8 kernels can run: identifies the layer in compiled code, as a size (registered.py)

    def _start(self, n_neurons: int, device: torch.device) -> None:
        """No counts, no plan, nothing frozen."""
        self.plan = None
        self.frozen = None
        self._first_batches: tuple[Tensor, int] | None = None  # counts and tokens, until there are enough to plan by
        self._plans_itself = True
        self._replans = 0
        self._graph_plans: list[Any] = []
        self._fp8 = None
        self._own_number: int | None = None
        counts = torch.zeros(n_neurons, dtype=torch.int64, device=device)
        self.register_buffer("neuron_counts", counts, persistent=False)
        self.register_buffer("tokens_seen", counts.new_zeros(()), persistent=False)
        self._place_plan()

    # -- running counts --------------------------------------------------------------------------------

    @torch.no_grad()
    def commit(self, stats: ops.Stats) -> None:
        """Add one call's statistics to the running counts.

        Call it once per forward and outside checkpointed blocks, which run twice; or set ``track_counts`` and
        the forward does it.
        """
        self.neuron_counts += stats.counts
        self.tokens_seen += stats.tokens

    @torch.no_grad()
    def reset_counts(self) -> None:
        self.neuron_counts.zero_()
        self.tokens_seen.zero_()

    @property
    def mean_active(self) -> float | None:
        """Mean active neurons per counted token; None before any token was counted."""
        tokens = int(self.tokens_seen)
        return int(self.neuron_counts.sum()) / tokens if tokens else None

    # -- plan ------------------------------------------------------------------------------------------

    def set_plan(self, plan: Plan | None) -> None:
        """Set how the GPU kernels split this layer's work from now on; None: run densely. Changes time, never a result.

        A plan made from counts, here or by ``twell calibrate``, is replaced once the text no longer suits it;
        ``dataclasses.replace(plan, tail=None)`` is never replaced. A layer whose plan was never set plans by itself:
        for few tokens, as in generation, after its first 64 tokens; for many after 4096 tokens in batches of at
        least 256.
        """
        if not isinstance(plan, Plan | None):
            raise ValueError(f"plan must be a twell.Plan or None, got {type(plan).__name__}")
        self._plans_itself, self._first_batches = False, None
        self._set_plan(plan)

    def _set_plan(self, plan: Plan | None) -> None:
        n_own, n_neurons = self._n_own(), len(self.neuron_counts)
        if plan is not None and plan.n_neurons != n_own:
            here = f", {n_own} of them in this process" if n_own != n_neurons else ""
            raise ValueError(f"the plan is for {plan.n_neurons} neurons, the layer has {n_neurons}{here}")
        before, self.plan = self.plan, plan
        try:
            self.refresh()
        except RuntimeError:  # a CUDA graph reads the frozen tensors
            self.plan = before
            raise
        self._place_plan()

    def _n_own(self) -> int:
        share = self.share()
        return len(self.neuron_counts) if share is None else share.n_own

    def _place_plan(self, device: torch.device | None = None) -> None:
        """Put the plan's tensors on the layer's device. On a GPU a layer without a plan takes the tensors of a dense
        plan, so that compiled code is the same for every plan."""
        device = self.neuron_counts.device if device is None else device
        self._plan_device, self._plan_neurons = device, self._n_own()
        if self.plan is not None and self.plan.n_neurons != self._plan_neurons:
            self.plan = None  # made before the neurons were divided over processes
        self._plan_eager: Sequence[Tensor | None] = ops.NO_PLAN
        self._plan_captured: Sequence[Tensor | None] = ops.NO_PLAN
        self._kernels_on: int | None = None  # index of the layer's GPU, if kernels take the layer's sizes
        self._plan_tokens: list[tuple[int, int, int]] = []  # of eager and of captured calls there: Plan.tokens
        self._drift: Drift | None = None
        self._fp8 = None
        self._number = None
        if device.type != "meta" and backends.why_unavailable("triton", device) is None:
            plan = self.plan or dense_plan(self._plan_neurons)
            self._plan_eager, self._plan_captured = plan.on(device), plan.on(device, captured=True)
            down: Any = getattr(self, self.projections[-1])
            if device.type == "cuda" and backends.fits_kernels(down.weight.shape[0], self._plan_neurons):
                self._kernels_on, self._plan_tokens = device.index, [plan.tokens(captured=c) for c in (False, True)]
                if self._has_fp8() and backends.kernels().fp8.why_not(device) is None:
                    if self._own_number is None:
                        self._own_number = registered.number_of(self)
                    with torch.inference_mode(False):
                        self._number = as_size(self._own_number, device)
                if not plan.is_dense and plan.tail is not None:
                    costs = costs_for(device, fp8=self._has_fp8())
                    self._drift = Drift(plan, costs, gated=len(self.projections) == 3, replans=self._replans)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self._place_plan()
        if self.frozen is not None:
            self.frozen.forget()
        return self

    def __getstate__(self) -> dict[str, Any]:
        bind_forwards_([getattr(self, name) for name in self.projections])
        # Drift may hold a copy that is still on its way to the host; CUDA graphs belong to this layer alone.
        return {**self.__dict__, "_drift": None, "_graph_plans": [], "_fp8": None, "_own_number": None, "_number": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._place_plan()

    def plan_from_counts(
        self, counts: Tensor | None = None, tokens: int | None = None, *, training: bool = False
    ) -> Plan:
        """Set the best plan for neurons that fired ``counts`` times in ``tokens`` tokens, and return it.

        By default the running counts are read, which waits for the device. ``training``: plan for forward and
        backward together. In a tensor parallel layer the plan is for the neurons of this process.
        """
        counts, share = self.neuron_counts if counts is None else counts, self.share()
        if not isinstance(counts, Tensor) or counts.dim() != 1 or counts.is_floating_point():
            raise ValueError("counts must be a tensor of whole numbers [F]: how often each neuron fired")
        counts = counts if share is None else share.counts_of_own(counts)
        plan = self._plan_for(counts, int(self.tokens_seen) if tokens is None else tokens, training=training)
        self.set_plan(plan)
        return plan

    def _plan_for(self, counts: Tensor, tokens: int, *, training: bool = False) -> Plan:
        return choose_plan(
            counts,
            tokens,
            costs_for(self.neuron_counts.device, training=training, fp8=self._has_fp8()),
            width=getattr(self, self.projections[0]).in_features,
            gated=len(self.projections) == 3,
        )

    def _look_at(self, x: Tensor) -> None:
        """Count the neurons that fire in one of the first batches. After enough tokens: plan, which waits for the
        device."""
        x_MD = x.reshape(-1, x.shape[-1])
        counts, tokens = (0, 0) if self._first_batches is None else self._first_batches
        is_small = len(x_MD) < LOOK_AT_LEAST and tokens >= FIRST_LOOK
        if is_small or len(x_MD) == 0 or backends.choose_backend(self.backend, x.device) != "triton":
            return
        if x.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return
        if self.frozen is not None and self.frozen.is_captured:  # its plan stays
            self._plans_itself = False
            return
        x_MD = x_MD[:LOOK_TOKENS]
        if self._has_fp8():
            z = getattr(self, self.projections[0])(x_MD)
        else:
            w = self._weights()
            z = nn.functional.linear(x_MD, w.gate, w.gate_bias)
        fired = (torch.relu(z) != 0).sum(0)
        seen_before, counts, tokens = tokens, counts + fired, tokens + len(x_MD)
        if tokens >= LOOK_TOKENS:
            self.plan_from_counts(counts, tokens)
            return
        if seen_before < FIRST_LOOK <= tokens:
            plan = self._plan_for(counts, tokens)
            self._set_plan(dense_plan(len(fired), plan.few_tokens, plan.mean_active, plan.union_tokens))
        self._first_batches = counts, tokens

    def _plan_anew(self) -> None:
        """Look at the next tokens and plan by them, unless a CUDA graph reads tensors frozen for this plan."""
        if self.frozen is None or not self.frozen.is_captured:
            self._plans_itself, self._first_batches, self._drift = True, None, None
            self._replans += 1

    def _keep_for_graphs(self, plan: Any) -> None:
        """Hold the plan's tensors: a captured CUDA graph reads them as long as it lives, and its end is not known."""
        if not any(plan is kept for kept in self._graph_plans):
            self._graph_plans.append(plan)

    def forget_counted_plan(self) -> None:
        """Plan anew after the weights' type has changed, and with it all costs. A plan made by hand stays."""
        if self.plan is not None and self.plan.mean_active is not None:
            self._plans_itself, self._first_batches = True, None
            self._set_plan(None)

    # -- frozen state: see frozen.py -------------------------------------------------------------------

    @torch.no_grad()  # shards of distributed weights are then the same tensors every time
    def freeze(self) -> None:
        """Declare that the weights stay as they are: see ``twell.freeze_``."""
        if self.frozen is None and self.why_called() is None:
            self.frozen = FrozenState(self._weights(), self.plan, self.backend)

    @torch.no_grad()
    def refresh(self) -> None:
        """Rewrite frozen state from the present weights: see ``twell.refresh_``."""
        if self.frozen is not None:
            self.frozen.rewrite(self._weights(), self.plan)

    def frozen_bytes(self) -> int:
        """Bytes that frozen state, or the kernels' copies of FP8 weights, take."""
        if self._fp8 is not None and self._fp8.kept is not None:
            return sum(t.nbytes for t in self._fp8.kept.derived())
        return 0 if self.frozen is None else self.frozen.nbytes

    def train(self, mode: bool = True) -> Self:
        if mode:
            self.frozen = None
        return super().train(mode)
