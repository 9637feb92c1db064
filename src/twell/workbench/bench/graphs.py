"""CUDA graphs of calls to be timed: the host's work is done once, when they are captured."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from twell.nn import sparse_ffns


@contextlib.contextmanager
def as_if_captured(*modules: nn.Module) -> Iterator[None]:
    """Sparse FFNs use the thresholds they have in CUDA graphs, so that their kernels compile before a capture."""
    ffns = [ffn for module in modules for _, ffn in sparse_ffns(module)]
    eager = [(ffn._plan_eager, ffn._plan_tokens) for ffn in ffns]
    for ffn in ffns:
        ffn._plan_eager, ffn._plan_tokens = ffn._plan_captured, ffn._plan_tokens[1:] * 2
    try:
        yield
    finally:
        for ffn, given in zip(ffns, eager, strict=True):
            ffn._plan_eager, ffn._plan_tokens = given


def in_turn(runs: Sequence[Callable[[], Tensor]]) -> Callable[[], Tensor]:
    """A call that runs the first one, then the second, and after the last the first again."""
    cycle = itertools.cycle(runs)
    return lambda: next(cycle)()


def replayed(runs: Sequence[Callable[[], Tensor]], before: Callable[[], Any] = lambda: None) -> Callable[[], Tensor]:
    """``runs``, one after the other, as one CUDA graph, whose replay returns what the last of them does.

    Each is run before the capture, after ``before``, so that its kernels are compiled. What the runs hold lives as long
    as the graph: a graph goes on reading weights after they are freed.
    """
    for run in (*runs, *runs, *runs):
        before()
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        *_, out = (run() for run in runs)
    return functools.partial(_replay, graph, out, runs)


def _replay(graph: torch.cuda.CUDAGraph, out: Tensor, _held: Sequence[Callable[[], Tensor]]) -> Tensor:
    graph.replay()
    return out
