"""The parts of the split forward, each ready to be run alone: what ``twell bench ffn`` and ``twell tune`` time."""

from __future__ import annotations

import torch
from torch import Tensor

from twell import gpu
from twell.kernels import gate, split, up_down
from twell.kernels.tiles import GateTile, RowTile
from twell.plan import Plan
from twell.reference import Weights


class Parts:
    """relu, no biases. ``restore`` undoes what ``tail`` and ``heavy`` leave in their buffers."""

    def __init__(self, x: Tensor, w: Weights, plan: Plan) -> None:
        self.x, self.is_gated, self.cap = x, w.up is not None, plan.cap
        self.tiles, self.programs = gpu.launch_facts(x)
        self.layout = split.lay_out(w, plan.hot.to(x.device), w.down.t().contiguous())
        self.y, self.r, self.bitmap = split.project(x, w, self.layout, "relu", tiles=self.tiles, programs=self.programs)
        self.y.nan_to_num_()  # where no neuron is hot it holds nothing yet
        self._clean_y, self._clean_r = self.y.clone(), self.r.clone()
        self.heavy_tokens, self.n_heavy = self._add_tail(self.tiles.tail)

    def restore(self) -> None:
        self.y.copy_(self._clean_y)
        self.r.copy_(self._clean_r)

    def pretend_heavy(self, n_tokens: int) -> None:
        """Make the first tokens the heavy ones."""
        self.heavy_tokens = torch.arange(len(self.x), dtype=torch.int32, device=self.x.device)
        self.n_heavy.fill_(n_tokens)

    def cold_gate(self, tile: GateTile, use_tma: bool) -> Tensor:
        r, _ = gate.gate_and_bitmap(self.x, self.layout.cold, None, tile=tile, programs=self.programs, use_tma=use_tma)
        return r

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

    def tail(self, tile: RowTile) -> Tensor:
        self._add_tail(tile)
        return self.y

    def _add_tail(self, tile: RowTile) -> tuple[Tensor, Tensor]:
        return up_down.add_tail_(
            self.y,
            self.x,
            self.r,
            self.bitmap,
            self.layout.up,
            None,
            self.layout.down,
            None,
            self.layout.cold_neurons,
            cap=self.cap,
            squared=False,
            is_new=False,
            tile=tile,
        )

    def heavy(self, tile: GateTile) -> Tensor:
        up_down.add_heavy_(
            self.y,
            self.x,
            self.r,
            self.heavy_tokens,
            self.n_heavy,
            self.layout.up,
            None,
            self.layout.down,
            self.layout.cold_neurons,
            squared=False,
            tile=tile,
            programs=self.programs,
        )
        return self.y
