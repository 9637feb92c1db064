"""Benchmarks that take no time, for tests."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from twell.nn.quantize import quantize_
from twell.workbench.bench import fp8, model, timing


@pytest.fixture(autouse=True)
def timed_shortly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROUND_MS", 0.01)
    monkeypatch.setattr(timing, "ROUNDS", 2)
    monkeypatch.setattr(timing, "host_us", functools.partial(timing.host_us, repeats=2))


@pytest.fixture
def timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "compare", functools.partial(timing.compare, min_repeats=1, warmups=0))


@pytest.fixture
def not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks run, and every time is 1: the interpreter takes its time."""

    def ones(ways: Any, **_: Any) -> dict[str, timing.Spread]:
        return dict.fromkeys(ways, timing.Spread(1.0, 1.0, 1.0))

    monkeypatch.setattr(timing, "compare", ones)
    monkeypatch.setattr(timing, "as_called", ones)
    monkeypatch.setattr(timing, "host_us", lambda ways, **_: dict.fromkeys(ways, 1.0))


@pytest.fixture
def fp8_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU with kernels for FP8 weights: here layers of whole models call their projections, slowly."""
    monkeypatch.setattr(fp8, "applies_sparsely", lambda device, dtype: True)
    monkeypatch.setattr(model, "quantize_", functools.partial(quantize_, emulate=True))


def spread(ms: float) -> dict[str, float]:
    return {"p20": ms, "p50": ms, "p80": ms}
