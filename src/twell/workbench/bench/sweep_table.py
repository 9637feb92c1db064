"""The rows of ``twell sweep`` as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from twell.workbench.bench.rows import Row

_WIDE = 1.1  # a spread wider than this is shown


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown: loss, sparsity and speed of each run; losses also relative to the run with l1 0, where there is one."""
    base = next((row for row in rows if row["sweep"] == "l1-0"), None)
    lines = [
        "| run | validation loss | to l1 0 | active | dead | FFNs | model | tokens/s training |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        loss, of = row["validation_loss"], row["speed"]
        cells = [
            row["sweep"],
            f"{loss:.3f}",
            f"{100 * (loss / base['validation_loss'] - 1):+.1f} %" if base else "",
            f"{row['active_mean']:.1f} ({100 * row['active_share']:.1f} %)" if "active_mean" in row else "all",
            f"{100 * row['dead_share']:.1f} %" if "dead_share" in row else "",
            "" if of is None else _ffns(of),
            "" if of is None else f"{of['speedup']:.2f}x",
            f"{row['tokens_per_second']:,.0f}" if row.get("tokens_per_second") else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


class Speedup(NamedTuple):
    """By the median times; by the dense medians over the 80th and the 20th percentile of the sparse times."""

    p50: float
    least: float
    most: float


def ffn_speedup(row: Row) -> Speedup:
    """Of all FFNs together of a row of ``twell bench model --layers``."""

    def ms(side: str, percentile: str) -> float:
        return float(sum(layer[f"{side}_ms"][percentile] for layer in row["ffns"]))

    return Speedup(*(ms("dense", "p50") / ms("sparse", percentile) for percentile in ("p50", "p80", "p20")))


def _ffns(row: Row) -> str:
    p50, least, most = ffn_speedup(row)
    return f"{p50:.2f}x" + (f" ({least:.2f} to {most:.2f})" if most > _WIDE * least else "")
