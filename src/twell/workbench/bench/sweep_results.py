"""The rows of ``twell sweep`` as a table and as a figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from twell.workbench.bench import plot
from twell.workbench.bench.rows import Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDE = 1.1  # a table shows a spread wider than this
_INCHES = (10, 4.5)
_FONT = 8


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


def ffn_speedup(row: Row) -> list[float]:
    """Of all FFNs together of a row of ``twell bench model --layers``: by the median times, then by the dense medians
    over the 80th and the 20th percentile of the sparse times."""

    def ms(side: str, percentile: str) -> float:
        return float(sum(layer[f"{side}_ms"][percentile] for layer in row["ffns"]))

    return [ms("dense", "p50") / ms("sparse", percentile) for percentile in ("p50", "p80", "p20")]


def _ffns(row: Row) -> str:
    p50, least, most = ffn_speedup(row)
    return f"{p50:.2f}x" + (f" ({least:.2f} to {most:.2f})" if most > _WIDE * least else "")


def draw(rows: Sequence[Row]) -> Figure:
    """Validation loss, and speed of the FFNs, against the mean active count; l1 beside the points.

    Bars: see ``ffn_speedup``.
    """
    figure = plot.new_figure(*_INCHES)
    from matplotlib.patheffects import withStroke
    from matplotlib.ticker import ScalarFormatter

    losses, speeds = figure.subplots(1, 2)
    counted = sorted((row for row in rows if "active_mean" in row), key=lambda row: row["active_mean"])
    for axes, of, name in (
        (losses, lambda row: [row["validation_loss"]] * 3, "validation cross-entropy"),
        (speeds, lambda row: ffn_speedup(row["speed"]), "speed of the FFNs over dense"),
    ):
        # Labels are slanted: of runs with l1 to the right above their points, of others to the left below.
        for is_l1, line, colour, away in ((True, "o-", "tab:blue", (2, 3)), (False, "s", "tab:orange", (-2, -3))):
            points = [row for row in counted if row["sweep"].startswith("l1-") == is_l1]
            x, y = [row["active_mean"] for row in points], [of(row) for row in points]
            axes.plot(x, [value for value, _, _ in y], line, color=colour, markersize=5)
            axes.vlines(x, [least for _, least, _ in y], [most for _, _, most in y], colour, linewidth=1)
            how: Any = {"ha": "left", "va": "bottom"} if is_l1 else {"ha": "right", "va": "top"}
            how |= {"textcoords": "offset points", "color": colour, "fontsize": _FONT, "rotation": 45}
            how |= {"rotation_mode": "anchor", "path_effects": [withStroke(linewidth=2, foreground="white")]}
            for row, at, (value, _, _) in zip(points, x, y, strict=True):
                axes.annotate(row["sweep"].removeprefix("l1-"), (at, value), xytext=away, **how)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.margins(x=0.1, y=0.12)
        axes.set_xlabel("mean active neurons a token (l1 beside the points)")
        axes.set_ylabel(name)
        plot.tidy(axes)
    for row in rows:
        if "active_mean" not in row:
            losses.axhline(row["validation_loss"], color="0.4", linewidth=1, linestyle="--")
            where: Any = ("axes fraction", "data")
            losses.annotate(row["sweep"], (0.01, row["validation_loss"]), xycoords=where, va="bottom", fontsize=_FONT)
    speeds.axhline(1, color="black", linewidth=1)
    return figure
