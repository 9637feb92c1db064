"""The parts of the split forward, each ready to run alone; ``twell bench ffn`` and ``twell tune`` time them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from twell import gpu, saved
from twell.formats import SLOTS, TwELL
from twell.gpu.prefill import split
from twell.gpu.shared import gate, heavy, layout, lists, tail
from twell.gpu.shared.layout import Layout, SplitSizes
from twell.gpu.shared.replay import Space
from twell.gpu.shared.tiles import GateTile, RowTile
from twell.plan import Plan
from twell.reference import Weights


class Parts:
    """relu, no biases. ``restore`` resets the buffers that the parts write."""

    def __init__(self, x: Tensor, w: Weights, plan: Plan) -> None:
        self.order, self.places, *_ = tensors = plan.on(x.device)
        self.x, self.split = layout.aligned(x), SplitSizes.of(tensors)
        self.is_gated, self.has_hot = w.up is not None, len(plan.hot) > 0
        self.tiles, self.programs = gpu.launch_facts(x)
        self.tail_tile = layout.tail_tile(self.tiles, x, plan.first)
        self.weights, self.rows = w, layout.by_rows(w)
        self.layout = self.lay_out()
        self.cold = self.order[self.split.n_hot :].long()  # [C]: rows of the weights
        self.y = torch.zeros_like(self.x)
        self.in_twell = self.cold_gate(self.tiles.gate, self.tiles.use_tma)
        self._turns = layout.room_for_turns(len(self.x), Space(self.x))
        self.h = self.x.new_empty(len(self.x), self.split.n_hot)
        self._list()

    def _list(self) -> None:
        self.restore()
        found = self.list_active()
        self.lists = found._replace(turns=saved.Turns(*(t.clone() for t in found.turns)))  # parts change the originals
        self.restore()
        if self.has_hot:
            self.hot(self.tiles.gate, self.tiles.use_tma)

    def replace_gate(self, active: Tensor) -> Tensor:
        """As if the cold gate had random positive values at ``active`` [M, C] (bool); returns the gate [M, C].

        The gate of heavy tokens is computed from x.
        """
        r = (torch.rand(active.shape, dtype=self.x.dtype, device=self.x.device) + 0.1) * active
        self.in_twell = TwELL.pack(r, slots=SLOTS, compact=True, overflow="mark")
        self._list()
        is_heavy = torch.zeros(len(self.x), dtype=torch.bool, device=self.x.device)
        is_heavy[self.heavy_tokens()] = True
        of_x = torch.relu(self.x[is_heavy] @ self.layout.cold.t())
        r[is_heavy] = of_x
        return r

    def restore(self) -> None:
        self.y.zero_()
        self._turns.counters.zero_()

    def pretend_heavy(self, n_tokens: int) -> None:
        """Make the first tokens the heavy ones, and no others."""
        turns = self.lists.turns
        turns.counters[0], turns.counters[1] = n_tokens, 0
        turns.heavy.copy_(torch.arange(len(self.x)))

    def n_heavy(self) -> int:
        return len(self.heavy_tokens())

    def heavy_tokens(self) -> Tensor:
        turns = self.lists.turns
        n_heavy, n_over = turns.counters[:2].tolist()
        n_over = n_over if n_over > saved.n_long(len(self.x)) else 0
        return torch.cat([turns.heavy[:n_heavy], turns.heavy[len(turns.heavy) - n_over :]]).long()

    def lay_out(self) -> Layout:
        """The layout that a frozen layer keeps and any other layer makes in each call."""
        return layout.lay_out(self.rows, self.order, self.split.n_hot)

    def cold_gate(self, tile: GateTile, use_tma: bool) -> TwELL:
        return gate.gate_in_twell(self.x, self.layout.cold, None, tile=tile, programs=self.programs, use_tma=use_tma)

    def list_active(self) -> lists.Lists:
        """Needs ``restore`` before: its counters start at 0."""
        cap, first = self.split.cap, self.split.first
        return lists.list_active(self.in_twell, self._turns, self.order, cap=cap, first=first)

    def hot(self, tile: GateTile, use_tma: bool) -> Tensor:
        common: dict[str, Any] = {"tile": tile, "programs": self.programs, "use_tma": use_tma}
        gate.hot_activations(self.x, self.layout.hot, None, self.h, gated=self.is_gated, squared=False, **common)
        return self.h

    def hot_down(self) -> Tensor:
        return self.y.addmm_(self.h, self.layout.hot_down)

    def tail(self, tile: RowTile) -> Tensor:
        tail.write_tail(self.y, self.x, self.lists, self.rows, squared=False, has_hot=self.has_hot, tile=tile)
        return self.y

    def heavy(self, tile: GateTile) -> Tensor:
        common: dict[str, Any] = {"tile": tile, "programs": self.programs, "use_tma": self.tiles.heavy_tma}
        heavy.write_heavy_(self.y, self.x, self.lists.turns, self.rows, self.places, squared=False, **common)
        return self.y

    def after_gate(self) -> Tensor:
        """Everything but the cold gate, as a frozen layer runs it."""
        given = self.order, self.places, self.split, "relu", self.tiles, self.programs, self.rows.down, self.layout
        return split.forward(self.x, self.weights, *given, cold_gate=self.in_twell)
