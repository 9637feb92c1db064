"""``Plan``, and ``PlanTensors``, the form that operations take. A plan changes time, never a result."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import torch
from torch import Tensor

MIN_TOKENS = 3072  # see choose.py
MAX_FEW_TOKENS = 64  # what gpu/decode/few.py takes at once


class PlanTensors(NamedTuple):
    """A plan as operations take it: on the layer's device, so that no call copies from the host.

    ``sizes`` and ``tokens`` hold a number as their shape, [0, number], and no memory. A compiler treats sizes as
    symbols, so a new plan compiles nothing anew. In compiled code every symbol costs a call of Python, so a size packs
    several numbers. A compiler gives equal sizes one symbol, so large offsets make these differ from all others."""

    order: Tensor  # int32 [F]: the neurons, hot ones first
    places: Tensor  # int32 [F]: position of a cold neuron among the cold ones; -1 for hot ones
    sizes: Tensor  # H, cap, first: 18 bits each
    tokens: Tensor  # ``Plan.tokens``: 7, 14 and 22 bits


_SIZE, _TOKENS, _UNION = 1 << 18, 1 << 22, 1 << 14  # limits of these numbers; a larger min_tokens is clamped
_OFFSET_SIZES, _OFFSET_TOKENS = 1 << 60, 1 << 61


def as_size(number: int, device: torch.device) -> Tensor:
    """A number of at least 2 as the size of an empty tensor: a symbol for compiled code."""
    t = torch.empty(0, 1, dtype=torch.int8, device=device).expand(0, number)  # no elements, so copies cost nothing
    if not torch.compiler.is_compiling():  # a symbol from the first call on: else each layer would recompile
        torch._dynamo.maybe_mark_dynamic(t, 1)
    return t


def sizes_of(plan: PlanTensors) -> tuple[int, int, int]:
    """H, cap, first."""
    packed = plan.sizes.shape[1] - _OFFSET_SIZES
    return packed // (_SIZE * _SIZE), packed // _SIZE % _SIZE, packed % _SIZE


def tokens_of(plan: PlanTensors) -> tuple[int, int, int]:
    """See ``Plan.tokens``."""
    packed = plan.tokens.shape[1] - _OFFSET_TOKENS
    return packed // (_UNION * _TOKENS), packed // _TOKENS % _UNION, packed % _TOKENS


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """How one layer runs on a GPU. Changes time, never a result.

    Calls captured in a CUDA graph have thresholds of their own: a graph replays without the host, and an eager call of
    a small batch takes longer on the host than on the GPU.
    """

    n_neurons: int
    hot: Tensor  # int64 [H], most frequent first; all F neurons if large batches run densely
    cap: int  # places of a token's list; with more active cold neurons it is long or heavy: gpu/shared/lists.py
    first: int = 32  # tokens with more tail entries than this run first
    min_tokens: int = MIN_TOKENS  # batches of at least this many tokens run by the split
    few_tokens: int = 0  # batches of at most this many run by the kernels for few tokens
    union_tokens: int = 0  # above those, up to this many run by the neurons that fire for any of a tile of tokens
    min_tokens_captured: int | None = None  # in a CUDA graph; None: the same
    few_tokens_captured: int | None = None
    predicted: float | None = None  # speedup over dense
    mean_active: float | None = None  # active neurons per token, if counted
    tail: float | None = None  # active cold neurons per token; None: inference never replaces the plan (drift.py)

    def __post_init__(self) -> None:
        """Check: a hot neuron that is listed twice or does not exist would silently change results."""
        object.__setattr__(self, "_on", {})
        hot = self.hot.unique()
        inside = len(hot) == 0 or (int(hot[0]) >= 0 and int(hot[-1]) < self.n_neurons)
        numbers = (self.cap, self.first, *self.tokens(captured=False), *self.tokens(captured=True))
        if len(hot) != len(self.hot) or not inside or min(numbers) < 0:
            raise ValueError(
                f"a plan needs different hot neurons of 0 to {self.n_neurons - 1} and numbers of at least 0, got "
                f"{len(self.hot)} hot neurons, {len(hot)} of them different, cap {self.cap}, first {self.first}, "
                f"min_tokens {self.min_tokens}, few_tokens {self.few_tokens}"
            )
        if max(self.few_tokens, self.few_tokens_captured or 0) > MAX_FEW_TOKENS:
            raise ValueError(f"few_tokens must be at most {MAX_FEW_TOKENS}, got {self.few_tokens}")
        if not 0 <= self.union_tokens < _UNION:
            raise ValueError(f"union_tokens must be 0 to {_UNION - 1}, got {self.union_tokens}")
        if self.n_neurons % 2 == 0 and len(hot) % 2:
            raise ValueError(f"a plan needs an even number of hot neurons, since kernels write pairs; got {len(hot)}")
        if max(self.n_neurons, self.cap, self.first) >= 1 << 18:
            raise ValueError(f"a plan is for less than {1 << 18:,} neurons, got {self.n_neurons:,}")

    @property
    def is_dense(self) -> bool:
        """Whether large batches run densely."""
        return len(self.hot) == self.n_neurons

    def tokens(self, *, captured: bool) -> tuple[int, int, int]:
        """(few, most, least): up to ``few`` tokens by the kernels for few tokens, up to ``most`` by tiles of tokens,
        from ``least`` on by the split; densely otherwise."""
        few, least = self.few_tokens, self.min_tokens
        if captured:
            few = few if self.few_tokens_captured is None else self.few_tokens_captured
            least = least if self.min_tokens_captured is None else self.min_tokens_captured
        return few, max(few, self.union_tokens), least

    def runs_split(self, tokens: int, *, captured: bool) -> bool:
        """Whether a batch of so many tokens runs by the split: hot neurons, heavy tokens, tail."""
        return not self.is_dense and tokens >= self.tokens(captured=captured)[2]

    def __repr__(self) -> str:
        few, most, least = self.tokens(captured=False)
        few_captured, _, least_captured = self.tokens(captured=True)
        of_few = f", sparse up to {few} tokens" if few else ""
        of_few += f" ({few_captured} in graphs)" if few_captured != few else ""
        of_few += f", by tiles up to {most}" if most > few else ""
        if self.is_dense:
            return f"Plan(dense, {self.n_neurons} neurons{of_few})"
        predicted = "" if self.predicted is None else f", predicted {self.predicted:.2f}x"
        in_graphs = f" ({least_captured} in graphs)" if least_captured != least else ""
        return (
            f"Plan({len(self.hot)} of {self.n_neurons} neurons hot, tokens long or heavy above {self.cap}, "
            f"from {least} tokens on{in_graphs}{predicted}{of_few})"
        )

    def order(self) -> Tensor:
        """int64 [F] on the CPU: the hot neurons, then the cold ones."""
        cold = torch.ones(self.n_neurons, dtype=torch.bool, device="cpu")  # whatever the default device is
        cold[self.hot.cpu()] = False
        return torch.cat([self.hot.cpu(), cold.nonzero()[:, 0]])

    def on(self, device: torch.device, *, captured: bool = False) -> PlanTensors:
        """The plan's tensors, made once. Not to be made under capture: the CUDA graph would own them."""
        kept: dict[tuple[torch.device, bool], PlanTensors] = self.__dict__["_on"]
        tensors = kept.get((device, captured))
        if tensors is None:
            tensors = self._make(device, captured)
            kept[device, captured] = tensors
        return tensors

    def _make(self, device: torch.device, captured: bool) -> PlanTensors:
        other = self.__dict__["_on"].get((device, not captured))
        few, most, least = self.tokens(captured=captured)
        with torch.inference_mode(False), torch.no_grad():  # autograd cannot save tensors of inference mode
            packed = (len(self.hot) * _SIZE + self.cap) * _SIZE + self.first
            sizes = as_size(packed + _OFFSET_SIZES, device)
            tokens = as_size((few * _UNION + most) * _TOKENS + min(least, _TOKENS - 1) + _OFFSET_TOKENS, device)
            if other is not None:
                return PlanTensors(other.order, other.places, sizes, tokens)
            order = self.order()
            places = torch.full_like(order, -1)
            places[order[len(self.hot) :]] = torch.arange(self.n_neurons - len(self.hot), device="cpu")
            return PlanTensors(order.int().to(device), places.int().to(device), sizes, tokens)

    def __reduce__(self) -> Any:
        """Copies and pickles make tensors of their own, since they may be for another device."""
        return Plan.from_state_dict, (self.state_dict(),)

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers and one tensor, for a checkpoint."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> Plan:
        return cls(**state)


def dense_plan(n_neurons: int, few_tokens: int = 0, mean_active: float | None = None, union_tokens: int = 0) -> Plan:
    """Dense except for few tokens and tiles of tokens."""
    hot, given = torch.arange(n_neurons, device="cpu"), {"few_tokens": few_tokens, "union_tokens": union_tokens}
    return Plan(n_neurons=n_neurons, hot=hot, cap=0, predicted=1.0, mean_active=mean_active, **given)
