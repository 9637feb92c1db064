"""The table of a sweep, from its rows."""

from __future__ import annotations

from typing import Any

from twell.workbench.bench import sweep_table


def layer(dense: float, *sparse: float) -> dict[str, Any]:
    spread = dict(zip(("p20", "p50", "p80"), sparse or (1.0, 1.0, 1.0), strict=True))
    return {"dense_ms": dict.fromkeys(("p20", "p50", "p80"), dense), "sparse_ms": spread}


def row(
    name: str, loss: float, active: float | None = None, ffns: list[dict[str, Any]] | None = None
) -> dict[str, Any]:
    counted = {} if active is None else {"active_mean": active, "active_share": active / 1000, "dead_share": 0.015}
    speed = None if active is None else {"speedup": 1.1, "ffns": ffns or [layer(2.0), layer(1.0)]}
    return {"sweep": name, "validation_loss": loss, "tokens_per_second": 12345.6, **counted, "speed": speed}


def test_table() -> None:
    noisy = [layer(2.0, 0.5, 1.0, 1.5), layer(1.0)]
    lines = sweep_table.table([row("l1-0", 4.0, 200), row("l1-0.001", 4.1, 20, noisy), row("silu", 3.9)])
    assert lines[2:] == [
        "| l1-0 | 4.000 | +0.0 % | 200.0 (20.0 %) | 1.5 % | 1.50x | 1.10x | 12,346 |",
        "| l1-0.001 | 4.100 | +2.5 % | 20.0 (2.0 %) | 1.5 % | 1.50x (1.20 to 2.00) | 1.10x | 12,346 |",
        "| silu | 3.900 | -2.5 % | all |  |  |  | 12,346 |",
    ]
    assert "| l1-0.001 | 4.100 |  | 20.0" in sweep_table.table([row("l1-0.001", 4.1, 20)])[2]  # nothing to relate it to
