"""The parts of the split forward, each ready to be run alone: what ``twell bench ffn`` and ``twell tune`` time."""

from __future__ import annotations

import torch
from torch import Tensor

from twell import gpu
from twell.gpu.prefill import gate, heavy, lists, split, up_down
from twell.gpu.prefill.split import Layout, Split
from twell.gpu.shared.tiles import GateTile, RowTile
from twell.plan import Plan
from twell.reference import Weights
from twell.saved import GROUP, bitmap_words, n_long


class Parts:
    """relu, no biases. ``restore`` undoes what the parts leave in their buffers."""

    def __init__(self, x: Tensor, w: Weights, plan: Plan) -> None:
        self.x, self.split, self.order = split.aligned(x), Split.of(plan.on(x.device)), plan.on(x.device).order
        self.is_gated, self.has_hot = w.up is not None, len(plan.hot) > 0
        self.tiles, self.programs = gpu.launch_facts(x)
        self.tail_tile = split.tail_tile(self.tiles, x, plan.first)
        self.rows = split.by_rows(w)
        self.layout = self.lay_out()
        self.cold = self.order[self.split.n_hot :].long()  # [C]: rows of the weights
        self.y = torch.zeros_like(self.x)
        self.r, self.bitmap, self._marks = self._gate(self.tiles.gate, self.tiles.use_tma, zeros=True)
        self._listed()

    def _listed(self) -> None:
        self._clean_r = self.r.clone()
        self.restore()
        found = self.list_active()
        self.lists = found._replace(marks=found.marks.clone())  # which ``restore`` leaves alone
        self.restore()
        self.h = self.hot(self.tiles.gate, self.tiles.use_tma) if self.has_hot else self.x[:, :0]

    def replay(self, active: Tensor) -> None:
        """As if the neurons ``active`` [M, F] (bool) had fired: of them the cold ones, since hot ones run densely."""
        self.replace_gate(active[:, self.cold])

    def replace_gate(self, active: Tensor) -> None:
        """As if the cold gate were ``active`` [M, C] (bool), with random positive values there."""
        self.r.copy_((torch.rand_like(self.r) + 0.1) * active)
        self.bitmap.copy_(bitmap_of(active))
        self._listed()

    def restore(self) -> None:
        self.y.zero_()
        self.r.copy_(self._clean_r)
        self._marks[:4] = 0

    def pretend_heavy(self, n_tokens: int) -> None:
        """Make the first tokens the heavy ones, and no others."""
        marks = self.lists.marks
        marks[0], marks[1] = n_tokens, 0
        marks[4 + len(self.x) : 4 + 2 * len(self.x)] = torch.arange(len(self.x))

    def n_heavy(self) -> int:
        first, over = self.lists.marks[:2].tolist()
        return first + (over if over > n_long(len(self.x)) else 0)

    def lay_out(self) -> Layout:
        """What a frozen layer has, and every other makes in each call."""
        return split.lay_out(self.rows, self.order, self.split.n_hot)

    def _gate(self, tile: GateTile, use_tma: bool, zeros: bool) -> tuple[Tensor, Tensor, Tensor]:
        return gate.gate_and_bitmap(
            self.x, self.layout.cold, None, tile=tile, programs=self.programs, use_tma=use_tma, zeros=zeros
        )

    def cold_gate(self, tile: GateTile, use_tma: bool, zeros: bool = False) -> Tensor:
        """Without ``zeros`` r is there only where it is not 0, as in the forward."""
        return self._gate(tile, use_tma, zeros or not self.is_gated)[0]

    def gate_into_nothing(self) -> None:
        """The cold gate, but for its counters in vain: ``after_gate`` may follow, without ``restore``."""
        self._marks = self._gate(self.tiles.gate, self.tiles.use_tma, zeros=not self.is_gated)[2]

    def list_active(self) -> lists.Lists:
        """Needs ``restore`` before: its counters start at 0."""
        plan = self.split
        return lists.list_active(self.r, self.bitmap, self._marks, self.order, cap=plan.cap, first=plan.first)

    def hot(self, tile: GateTile, use_tma: bool) -> Tensor:
        return gate.hot_activations(
            self.x,
            self.layout.hot,
            None,
            gated=self.is_gated,
            squared=False,
            tile=tile,
            programs=self.programs,
            use_tma=use_tma,
        )

    def hot_down(self) -> Tensor:
        return self.y.addmm_(self.h, self.layout.hot_down)

    def tail(self, tile: RowTile) -> Tensor:
        up_down.write_tail(
            self.y, self.x, self.lists, self.rows, self.rows.down, squared=False, has_hot=self.has_hot, tile=tile
        )
        return self.y

    def heavy(self, tile: GateTile) -> Tensor:
        heavy.write_heavy_(
            self.y,
            self.x,
            self.r,
            self.bitmap,
            self.lists.marks,
            self.rows,
            self.rows.down,
            self.order,
            squared=False,
            tile=tile,
            programs=self.programs,
        )
        return self.y

    def after_gate(self) -> Tensor:
        """Everything but the cold gate. Needs ``restore`` before."""
        kept, self.lists = self.lists, self.list_active()
        self.tail(self.tail_tile)
        self.heavy(self.tiles.heavy)
        self.lists = kept
        if self.has_hot:
            self.h = self.hot(self.tiles.gate, self.tiles.use_tma)
            self.hot_down()
        return self.y


def bitmap_of(active: Tensor) -> Tensor:
    """int32 [M, words] of a bool [M, C], in plain torch: for recorded positions, where no gate was computed."""
    M, C = active.shape
    words = bitmap_words(C)
    padded = torch.nn.functional.pad(active, (0, 32 * words - C))
    parts = padded.view(M, -1, GROUP // 8, 4, 2).permute(0, 1, 3, 4, 2).reshape(M, words, 32)  # see gpu/shared/tiles.py
    weights = 1 << torch.arange(32, device=active.device)
    rows = 1 + (1 << 22) // max(1, words)  # a few at a time: the products are 64 times the bitmap
    return torch.cat([(part.long() * weights).sum(-1).int() for part in parts.split(rows)])
