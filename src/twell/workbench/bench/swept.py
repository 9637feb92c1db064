"""What comes of ``twell sweep``: its rows as a table and as a figure. Both are functions of rows alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Row = dict[str, Any]

_WIDE = 1.1  # a spread that a table tells
_INCHES = (10, 4.5)
_FONT = 8
_PLACES = (  # of a label about its point: points of distance to the right and up
    *((0, 10), (0, -10), (22, 0), (-22, 0), (20, 8), (-20, 8), (20, -8), (-20, -8)),
    *((0, 22), (0, -22), (22, 20), (-22, 20), (22, -20), (-22, -20), (0, 34), (0, -34), (0, 46), (0, -46)),
)


class _Point(NamedTuple):
    x: float
    y: float
    least: float  # of y
    most: float
    label: str


def measured(row: Row) -> Row:
    """Of a sweep's run what was measured of its model; any other row, and a run without, as it is."""
    return row.get("speed") or row


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown: loss, sparsity and speed of each run, relative to l1 0 where there is one."""
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
    """Of the median times, and of the medians over the 80th and the 20th percentile of the sparse times."""

    p50: float
    least: float
    most: float


def ffn_speedup(row: Row) -> Speedup:
    """Of all FFNs of a row of ``twell bench model --layers`` together."""

    def ms(side: str, percentile: str) -> float:
        return float(sum(layer[f"{side}_ms"][percentile] for layer in row["ffns"]))

    return Speedup(*(ms("dense", "p50") / ms("sparse", percentile) for percentile in ("p50", "p80", "p20")))


def _ffns(row: Row) -> str:
    p50, least, most = ffn_speedup(row)
    return f"{p50:.2f}x" + (f" ({least:.2f} to {most:.2f})" if most > _WIDE * least else "")


def _loss(row: Row) -> tuple[float, float, float]:
    return (row["validation_loss"],) * 3


def draw(rows: Sequence[Row]) -> Figure:
    """Validation loss, and speed of the FFNs, against the mean active count; l1 beside the points.

    Bars: see ``Speedup``.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.ticker import ScalarFormatter
    except ImportError as error:
        raise RuntimeError(f"plots need another package ({error}): pip install 'twell[plot]'") from None

    figure = Figure(figsize=_INCHES, layout="constrained")
    losses, speeds = figure.subplots(1, 2)
    counted = [row for row in rows if "active_mean" in row]
    drawn: list[tuple[Axes, str, list[_Point]]] = []
    for axes, of, name in (
        (losses, _loss, "validation cross-entropy"),
        (speeds, lambda row: ffn_speedup(row["speed"]), "speed of the FFNs over dense"),
    ):
        for is_l1, line, colour in ((True, "o-", "tab:blue"), (False, "s", "tab:orange")):
            chosen = [row for row in counted if row["sweep"].startswith("l1-") == is_l1]
            points = sorted(_Point(row["active_mean"], *of(row), row["sweep"].removeprefix("l1-")) for row in chosen)
            axes.plot([p.x for p in points], [p.y for p in points], line, color=colour, markersize=5)
            axes.vlines([p.x for p in points], [p.least for p in points], [p.most for p in points], colour, linewidth=1)
            drawn.append((axes, colour, points))
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.margins(x=0.1, y=0.12)
        axes.set_xlabel("mean active neurons a token (l1 beside the points)")
        axes.set_ylabel(name)
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    for row in rows:
        if "active_mean" not in row:
            losses.axhline(row["validation_loss"], color="0.4", linewidth=1, linestyle="--")
            where: Any = ("axes fraction", "data")
            losses.annotate(row["sweep"], (0.01, row["validation_loss"]), xycoords=where, va="bottom", fontsize=_FONT)
    speeds.axhline(1, color="black", linewidth=1)
    figure.draw_without_rendering()  # now it is known where everything is
    for axes in (losses, speeds):
        _write(axes, [(point, colour) for of_axes, colour, points in drawn if of_axes is axes for point in points])
    return figure


def _write(axes: Axes, points: Sequence[tuple[_Point, str]]) -> None:
    """Each point's label in its colour, at the first place about it where nothing else is; if need be, over a line."""
    from matplotlib.patheffects import withStroke
    from matplotlib.transforms import Bbox

    lines = [
        line.get_transform().transform_path(line.get_path()) for line in axes.lines if line.get_linestyle() != "None"
    ]
    taken = [text.get_window_extent() for text in axes.texts]
    for point, _ in points:
        (x, least), (_, most) = axes.transData.transform([(point.x, point.least), (point.x, point.most)])
        taken.append(Bbox.from_extents(x - 4, least - 4, x + 4, most + 4))
    for point, colour in points:
        note = axes.annotate(
            point.label,
            (point.x, point.y),
            xytext=(0, 0),
            textcoords="offset points",
            ha="center",
            va="center",
            fontsize=_FONT,
            color=colour,
            path_effects=[withStroke(linewidth=2, foreground="white")],
        )
        boxes = {}
        for place in _PLACES:
            note.set_position(place)
            boxes[place] = note.get_window_extent()
        free = [place for place, box in boxes.items() if not any(box.overlaps(other) for other in taken)]
        clear = [place for place in free if not any(path.intersects_bbox(boxes[place], filled=False) for path in lines)]
        best = next(iter(clear or free or _PLACES))
        note.set_position(best)
        taken.append(boxes[best])
