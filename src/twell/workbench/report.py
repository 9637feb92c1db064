"""A report to look at: an ``Analysis``, a run's training log and measured times as one HTML file, or as figures.

The page is one file that asks nothing of any network, and says so to the browser (its Content-Security-Policy allows
its own script and style, by their hashes, and nothing else). The data is embedded as JSON, the whole analysis among
it; a script draws it. Text that came from a model or a file is data throughout: no token can become markup.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html as markup
import importlib.resources
import json
import math
import string
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from twell._version import __version__
from twell.workbench.analyze import Analysis, correlation
from twell.workbench.bench import plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMAT = 1  # of the embedded JSON
_SIDES = ("dense", "compiled", "sparse")
_CASES = 8  # drawn of each kind

Row = Mapping[str, Any]


class Missing(NamedTuple):
    """What is said in place of a figure without data, and the command that makes the data."""

    why: str
    command: str


_BENCH_MODEL = "twell bench model MODEL --layers --out rows.jsonl"
_NO_TRAINING = Missing(
    "No training log was given. A run writes one into its folder, metrics.jsonl:", "twell train --out run"
)
_NO_LAYER_TIMES = Missing("No layer of this model was timed by itself. To measure:", _BENCH_MODEL)
_NO_TIMES = Missing("Nothing was timed. To measure:", _BENCH_MODEL)
_NO_CURVE = Missing("No single FFN was timed. To measure:", "twell bench ffn --out rows.jsonl")


# ---------------------------------------------------------------------------------------------------------
# What is shown besides the analysis
# ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Training:
    """A run's log, by its logged steps; None where a row lacks a number, or has one that is not finite."""

    steps: list[int]
    loss: list[float | None]  # cross-entropy
    active: list[float | None]  # neurons a token, the mean of the layers
    layers: list[list[float | None]]  # [layers][steps], the same of each
    dead: list[float | None]  # share of neurons
    validation_steps: list[int]
    validation: list[float | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Side:
    """One way to compute, as timed. None: not available."""

    name: str  # dense, compiled or sparse
    ms: list[float]  # 20th, 50th and 80th percentile
    tokens_per_ms: float
    first_token_ms: float | None
    pass_bytes: int | None  # the most that a pass takes besides weights
    copied_bytes: int | None  # frozen beside the weights; older rows: copies of them
    joules_per_token: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A row of ``twell bench``: the same work done densely and sparsely."""

    label: str
    machine: str
    whole_model: bool  # else one FFN
    real: bool  # the weights of a model, not random ones
    tokens: int
    speedup: float
    sides: list[Side]


@dataclasses.dataclass(frozen=True, kw_only=True)
class BreakEven:
    """Speedup of one FFN against its mean active neurons; see ``twell.workbench.bench.plot``."""

    shape: str
    families: dict[str, list[plot.Point]]
    predicted: list[plot.Point]  # of uniform firing; empty without a cost model
    at: float | None
    measured: bool  # whether ``at`` is
    same_shape: bool  # as the layers analysed


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Content:
    """All that a report shows: what both the page and the figures are made of."""

    analysis: Analysis
    training: Training | None
    layer_speedups: list[float] | None  # measured, of each layer
    layer_machine: str | None  # where
    correlation: float | None  # between the layers' active neurons and measured speedups
    cases: list[Case]
    break_even: BreakEven | None


def _content(analysis: Analysis, metrics: Sequence[Row] | None, speed: Sequence[Row] | None) -> _Content:
    rows = list(speed or ())
    timed = _timed_layers(analysis, rows)
    speedups = [ffn["speedup"] for ffn in timed["ffns"]] if timed else None
    cases = [case for row in rows if (case := _case(row)) is not None]
    if speed is not None and not cases:
        raise ValueError("there is nothing to show in the rows of --speed: none is of twell bench ffn or bench model")
    return _Content(
        analysis=analysis,
        training=_training(metrics or ()),
        layer_speedups=speedups,
        layer_machine=_machine(timed) if timed else None,
        correlation=_correlation([ffn["mean_active"] for ffn in timed["ffns"]], speedups or []) if timed else None,
        cases=cases,
        break_even=_break_even(analysis, rows),
    )


def _training(metrics: Sequence[Row]) -> Training | None:
    logged = {int(row["step"]): row for row in metrics if "step" in row and "ce_loss" in row}
    if not logged:
        return None
    evaluated = {int(row["step"]): row for row in metrics if "step" in row and "eval_loss" in row}
    steps, validation_steps = sorted(logged), sorted(evaluated)
    n_layers = 0
    while any(f"active/{n_layers}" in row for row in logged.values()):
        n_layers += 1

    def values(name: str) -> list[float | None]:
        return [_finite(logged[step].get(name)) for step in steps]

    return Training(
        steps=steps,
        loss=values("ce_loss"),
        active=values("active_mean"),
        layers=[values(f"active/{i}") for i in range(n_layers)],
        dead=values("dead_share"),
        validation_steps=validation_steps,
        validation=[_finite(evaluated[step]["eval_loss"]) for step in validation_steps],
    )


def _finite(value: Any) -> float | None:
    """JSON has no other numbers.

    >>> _finite(3), _finite(float("nan")), _finite("3")
    (3.0, None, None)
    """
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if real and math.isfinite(value) else None


def _timed_layers(analysis: Analysis, rows: Sequence[Row]) -> Row | None:
    """The row with most tokens that tells times of the analysed layers one by one.

    Their names are longer there than in an analysis, which leaves out what the model's parts share.
    """
    names = [layer.name for layer in analysis.layers]
    fitting = [
        row
        for row in rows
        if len(ffns := row.get("ffns") or ()) == len(names)
        and all(str(ffn["name"]).endswith(name) for ffn, name in zip(ffns, names, strict=True))
    ]
    return max(fitting, key=lambda row: (row["ffns"][0]["tokens"], str(row.get("time", ""))), default=None)


def _correlation(active: Sequence[float], speedups: Sequence[float]) -> float | None:
    try:
        return correlation(active, speedups)
    except ValueError:  # of one layer, or of equal ones
        return None


def _case(row: Row) -> Case | None:
    """None for what is no row of ``twell bench ffn`` or ``twell bench model``, or has a time of 0."""
    kind = row.get("bench")
    sizes = {"ffn": {"M"}, "model": {"batch", "length"}}
    if kind not in sizes or not {"dense_ms", "sparse_ms", "speedup", *sizes[kind]} <= row.keys():
        return None
    if not all(row[f"{name}_ms"]["p50"] > 0 for name in _SIDES if f"{name}_ms" in row):
        return None
    whole, real = kind == "model", kind == "model" and row.get("model") is not None
    if whole:
        tokens = row["batch"] * row["length"]
        what = "/".join(Path(str(row["model"])).parts[-2:]) if real else f"random weights, {row.get('workload')}"
        label = f"{what}, {row['batch']:,} x {row['length']:,} tokens{', compiled' if row.get('compiled') else ''}"
    else:
        tokens = row["M"]
        label = (
            f"FFN, {row.get('workload')}, {tokens:,} token{'s'[: tokens != 1]}{', graph' if row.get('graph') else ''}"
        )
    sides = [_side(name, row, tokens) for name in _SIDES if f"{name}_ms" in row]
    return Case(
        label=label,
        machine=_machine(row),
        whole_model=whole,
        real=real,
        tokens=tokens,
        speedup=row["speedup"],
        sides=sides,
    )


def _machine(row: Row) -> str:
    threads = row.get("threads", "?")
    machine = row.get("gpu") or f"{row.get('cpu', 'CPU')}, {threads} thread{'s'[: threads != 1]}"
    return f"{machine}, {row.get('dtype', '?')}"


def _side(name: str, row: Row, tokens: int) -> Side:
    spread = row[f"{name}_ms"]
    ms = [float(spread[p]) for p in ("p20", "p50", "p80")]
    memory = _part(row.get("memory"), name) or {}
    return Side(
        name=name,
        ms=ms,
        tokens_per_ms=tokens / ms[1],
        first_token_ms=_finite((_part(row.get("first_token_ms"), name) or {}).get("p50")),
        pass_bytes=memory.get("pass"),
        copied_bytes=memory.get("frozen", memory.get("copies")),
        joules_per_token=_finite(_part(row.get("joules_per_token"), name)),
    )


def _part(of_sides: Any, name: str) -> Any:
    return of_sides.get(name) if isinstance(of_sides, Mapping) else None


def _break_even(analysis: Analysis, rows: Sequence[Row]) -> BreakEven | None:
    given = [dict(row) for row in rows]
    try:
        shape, families = plot.select(given)
    except ValueError:  # no row of it
        return None
    found = plot.break_even(given, shape, families)
    facts = analysis.facts
    return BreakEven(
        shape=str(shape),
        families={plot.STYLES[family].label: points for family, points in families.items()},
        predicted=[*found.predicted[:-2:4], *found.predicted[-2:]],  # every fourth point, and the end whole
        at=found.at,
        measured=found.is_measured,
        same_shape=facts.width == shape.D and set(facts.hidden_sizes) == {shape.F},
    )


# ---------------------------------------------------------------------------------------------------------
# The page
# ---------------------------------------------------------------------------------------------------------


def build(
    analysis: Analysis,
    *,
    title: str,
    model: str = "",
    text: str = "",
    metrics: Sequence[Row] | None = None,
    speed: Sequence[Row] | None = None,
) -> str:
    """The page. ``model`` and ``text``: what they are called there. ``metrics``: rows of a run's ``metrics.jsonl``;
    ``speed``: rows of ``twell bench ffn`` and ``twell bench model``. What is not given is left out, and a sentence in
    its place tells how to get it."""
    content = _content(analysis, metrics, speed)
    script, style = _page_file("report.js"), _page_file("report.css")
    missing = {
        "training": None if content.training else _NO_TRAINING,
        "speed": None if content.cases else _NO_TIMES,
        "break-even": None if content.break_even else _NO_CURVE,
    }
    names = ("layers", "positions", "text", "tokens", "frequencies", "overlap", "plan", *missing)
    slots = {name.replace("-", "_"): _slot(name, missing.get(name)) for name in names}
    return string.Template(_page_file("report.html")).substitute(
        slots,
        title=markup.escape(title),
        about=_about(analysis, model, text),
        numbers="\n".join(_number(*number) for number in _numbers(content)),
        verdict=markup.escape(verdict(analysis, content.cases)),
        policy=_policy(script, style),
        style=style,
        script=script,
        data=_embedded(content, title, model, text),
        version=markup.escape(__version__),
    )


def write(html: str, path: Path) -> None:
    """Into a file, which is replaced; folders above it are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(html.encode("utf-8", "replace"))  # a name of a file may hold what is no character


def _page_file(name: str) -> str:
    return importlib.resources.files("twell.workbench").joinpath("page", name).read_text(encoding="utf-8")


def _policy(script: str, style: str) -> str:
    """The page's own script and style, the empty icon, and nothing that is fetched."""
    own = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (script, style))
    scripts, styles = (f"'sha256-{digest}'" for digest in own)
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )


def _embedded(content: _Content, title: str, model: str, text: str) -> str:
    """JSON that no HTML parser takes for the end of its script element."""
    fields = dataclasses.fields(content)
    data = {
        "format": FORMAT,
        "title": title,
        "model": model,
        "text": text,
        "no_layer_times": _NO_LAYER_TIMES,
        "cases_drawn": _CASES,
        **{field.name: _plain(getattr(content, field.name)) for field in fields},
        "analysis": content.analysis.to_json(),
    }
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(part) for part in value]
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def _slot(name: str, missing: Missing | None) -> str:
    if missing is None:
        return f'<div class="figure" data-figure="{name}"></div>'
    why, command = map(markup.escape, missing)
    return f'<p class="missing" data-missing="{name}">{why} <code>{command}</code></p>'


def _about(analysis: Analysis, model: str, text: str) -> str:
    facts = analysis.facts
    what = f"<strong>{markup.escape(model)}</strong>" if model else "A model"
    kind = f" ({markup.escape(facts.model_type)})" if facts.model_type else ""
    on = f" on <strong>{markup.escape(text)}</strong>" if text else ""
    cut = f"{facts.sequences:,} sequence{'s'[: facts.sequences != 1]} of {facts.length:,} tokens"
    return f"{what}{kind}{on}: {cut}, {facts.token_types:,} of them different."


def _number(label: str, value: str, note: str) -> str:
    label, value, note = (markup.escape(part) for part in (label, value, note))
    return f"<div><dt>{label}</dt><dd><b>{value}</b> <span>{note}</span></dd></div>"


def _numbers(content: _Content) -> list[tuple[str, str, str]]:
    """Label, value and a note of each headline number."""
    analysis, facts = content.analysis, content.analysis.facts
    neurons = sum(facts.hidden_sizes)
    sizes = sorted(set(facts.hidden_sizes))
    width = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    silent = sum(layer.silent * F for layer, F in zip(analysis.layers, facts.hidden_sizes, strict=True)) / neurons
    numbers = [
        ("tokens", f"{facts.tokens:,}", f"of {facts.token_types:,} types"),
        ("layers", f"{facts.layers:,}", f"of {width} neurons"),
        (
            "active neurons",
            f"{analysis.mean_active / facts.layers:.1f}",
            f"a token and layer: {_percent(analysis.mean_active / neurons)}",
        ),
        ("silent neurons", _percent(silent), "never fired on this text"),
        ("predicted speedup", f"{analysis.mean_predicted:.2f}x", "FFNs alone, on a GPU, mean of the layers"),
    ]
    case = _of_model(content.cases)
    if case is not None:
        numbers.append(("measured speedup", f"{case.speedup:.2f}x", f"whole model, {case.machine}"))
    return numbers


def _percent(share: float) -> str:
    return f"{100 * share:.1f}\u00a0%"


def _of_model(cases: Sequence[Case]) -> Case | None:
    """The measurement of a real model with the most tokens, of several the last: random weights tell nothing of it."""
    real = [case for case in reversed(cases) if case.whole_model and case.real]
    return max(real, key=lambda case: case.tokens, default=None)


def verdict(analysis: Analysis, cases: Sequence[Case] = ()) -> str:
    """What the predicted and the measured speedup mean, and what they do not, in a sentence or two."""
    layers, facts = analysis.layers, analysis.facts
    dense = sum(layer.plan.dense for layer in layers)
    if dense == len(layers):
        F, wakes = max(facts.hidden_sizes), f"{analysis.mean_active / len(layers):.3g}"
        pays = plot.modelled_break_even(plot.Shape("", True, facts.width, F, "", 1 << 40))  # of a batch of any size
        if pays is None:
            said = f"This model is too small for the GPU kernels to gain: layers of {F:,} neurons always run densely."
        else:
            said = (
                "This model is too small, or not sparse enough, for the GPU kernels to gain: all its layers would run "
                f"densely. With {F:,} neurons that fire alike, a layer gains below about {pays:.2g} active a token; "
                f"here {wakes} are."
            )
    else:
        least = max(layer.plan.min_tokens for layer in layers if not layer.plan.dense)
        which = "All layers are" if not dense else f"{len(layers) - dense} of {len(layers)} layers are"
        said = f"{which} sparse enough for the GPU kernels to gain, in batches of at least {least:,} tokens"
        said += f"; the other {dense} would run densely." if dense else "."
        said += " The prediction is of the FFNs alone: a whole model gains less."
    case = _of_model(cases)
    if case is None:
        return said
    how = "as fast as" if 0.97 < case.speedup < 1.03 else "faster than" if case.speedup > 1 else "slower than"
    return f"{said} Measured ({case.machine}), the whole model runs {how} dense: {case.speedup:.2f}x."


# ---------------------------------------------------------------------------------------------------------
# Figures
# ---------------------------------------------------------------------------------------------------------

_ACCENT, _SOFT, _WARM, _GREY = "#00708f", "#b9dfe0", "#a4501c", "0.75"
_RAMP = ("#f0f7ef", "#9ce1cc", "#4ec2c1", "#1b9db2", "#227696", "#29415a")  # of the page's, every second colour


def figures(
    analysis: Analysis,
    folder: Path,
    *,
    metrics: Sequence[Row] | None = None,
    speed: Sequence[Row] | None = None,
    suffix: str = ".png",
) -> list[Path]:
    """The page's figures as files, for documents and slides: layers.png, positions.png, ... What has no data is left
    out. ``suffix``: .png or .svg."""
    plot.check_suffix(folder / f"figure{suffix}")
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise RuntimeError(f"plots need another package ({error}): pip install 'twell[plot]'") from None
    content = _content(analysis, metrics, speed)
    drawings: dict[str, Callable[[_Content], Figure]] = {
        "layers": _draw_layers,
        "positions": _draw_positions,
        "text": _draw_text,
        **({"tokens": _draw_tokens} if analysis.most_active else {}),
        "frequencies": _draw_frequencies,
        "overlap": _draw_overlap,
        "plan": _draw_plan,
        **({"training": _draw_training} if content.training else {}),
        **({"speed": _draw_speed} if content.cases else {}),
        **({"break-even": lambda _: plot.draw([dict(row) for row in speed or ()])} if content.break_even else {}),
    }
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # fonts know few of the characters of a text
        for name, draw in drawings.items():
            paths.append(folder / f"{name}{suffix}")
            plot.save(draw(content), paths[-1])
    return paths


def _axes(height: float, **options: Any) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, height), layout="constrained")
    axes = figure.add_subplot(**options)
    _calm(axes)
    return figure, axes


def _calm(axes: Axes) -> None:
    axes.grid(color="0.92", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _plain_log(axis: Any) -> None:
    """Ticks of a logarithmic axis as numbers, not as powers; some between where there are few."""
    from matplotlib.ticker import FuncFormatter, LogFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(LogFormatter(minor_thresholds=(1.5, 0.5)))


def _layer_rows(axes: Axes, n_layers: int) -> None:
    """Layers from top to bottom, the legend above them."""
    axes.set_ylim(n_layers - 0.4, -0.6)
    axes.set_yticks(range(n_layers))
    axes.set_ylabel("layer")
    axes.grid(False, axis="y")
    figure = axes.get_figure()
    assert figure is not None
    figure.legend(loc="outside upper left", ncols=3, edgecolor="none", fontsize=9)


def _height(n_layers: int) -> float:
    return 1.4 + 0.25 * n_layers


def _by_depth(n_layers: int) -> list[Any]:
    """A colour a layer, early ones paler."""
    return [_colours()(0.35 + 0.6 * i / max(1, n_layers - 1)) for i in range(n_layers)]


def _colours() -> Any:
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("twell", _RAMP)


def _draw_layers(content: _Content) -> Figure:
    layers = content.analysis.layers
    figure, axes = _axes(_height(len(layers)))
    rows = range(len(layers))
    axes.hlines(rows, [x.mean for x in layers], [x.p99 for x in layers], color=_ACCENT, linewidth=1)
    axes.barh(rows, [x.mean for x in layers], height=0.55, color=_ACCENT, label="mean")
    axes.plot([x.p50 for x in layers], rows, "|", color="black", markersize=10, label="median")
    axes.plot([x.p99 for x in layers], rows, "o", color=_ACCENT, markerfacecolor="white", label="99th percentile")
    _layer_rows(axes, len(layers))
    axes.set_xlim(left=0)
    axes.set_xlabel("active neurons a token")
    return figure


def _draw_positions(content: _Content) -> Figure:
    analysis = content.analysis
    values = [value for layer in analysis.layers for value in layer.by_position]
    is_wide = min(values) > 0 and max(values) > 8 * min(values)
    figure, axes = _axes(4.5, yscale="log" if is_wide else "linear")
    ends = range(len(analysis.positions))
    for i, (layer, colour) in enumerate(zip(analysis.layers, _by_depth(len(analysis.layers)), strict=True)):
        axes.plot(ends, layer.by_position, color=colour, marker=".", label=f"layer {i}")
    axes.set_xticks(ends, [f"{p.first:,}" for p in analysis.positions])
    axes.set_xlabel("position in the sequence, from")
    axes.set_ylabel("mean active neurons")
    if is_wide:
        _plain_log(axes.yaxis)
    else:
        axes.set_ylim(bottom=0)
    axes.legend(edgecolor="none", fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _draw_text(content: _Content) -> Figure:
    from matplotlib.colors import PowerNorm

    sample = content.analysis.sample
    count = min(64, len(sample.tokens))  # more could not be read
    active = [counts[:count] for counts in sample.active]
    figure, axes = _axes(1.6 + _height(len(active)))
    figure.set_figwidth(max(6.0, 1.5 + 0.16 * count))
    highest = max(1, *(max(counts) for counts in active))
    image = axes.imshow(active, cmap=_colours(), norm=PowerNorm(0.5, 0, highest), aspect="auto")
    axes.set_xticks(
        range(count), [_visible(token) for token in sample.tokens[:count]], rotation=90, fontsize=7, parse_math=False
    )
    axes.grid(False)
    axes.set_ylabel("layer")
    axes.set_yticks(range(len(active)))
    figure.colorbar(image, label="active neurons", pad=0.01)
    return figure


def _visible(token: str) -> str:
    """A token as the page's tables show it: whitespace as signs.

    >>> _visible(" the"), _visible("\\n\\t"), _visible("")
    ('␣the', '↵⇥', '∅')
    """
    leading = len(token) - len(token.lstrip(" "))
    signs = {"\n": "↵", "\t": "⇥", "\r": "␍"}
    rest = "".join(signs.get(c, c if c.isprintable() else f"\\u{ord(c):04x}") for c in token[leading:])
    return "␣" * leading + rest or "∅"


def _draw_tokens(content: _Content) -> Figure:
    from matplotlib.figure import Figure

    analysis = content.analysis
    rankings = {"most": analysis.most_active, "fewest": analysis.least_active}
    figure = Figure(figsize=(8, 1.2 + 0.25 * max(map(len, rankings.values()))), layout="constrained")
    for axes, (name, types) in zip(figure.subplots(1, 2), rankings.items(), strict=True):
        _calm(axes)
        axes.barh(range(len(types)), [t.mean for t in types], height=0.6, color=_ACCENT)
        axes.axvline(analysis.mean_active, color="0.4", linewidth=0.8, linestyle=":")
        axes.set_yticks(range(len(types)), [_visible(t.text) for t in types], parse_math=False)
        axes.set_ylim(len(types) - 0.4, -0.6)
        axes.grid(False, axis="y")
        axes.set_title(f"tokens that wake the {name} neurons", fontsize=10)
        axes.set_xlabel("active neurons, all layers; dotted: of all tokens", fontsize=9)
    return figure


def _draw_frequencies(content: _Content) -> Figure:
    layers = content.analysis.layers
    figure, axes = _axes(5, xscale="log")
    if any(layer.curve.frequencies[0] > 0 for layer in layers):
        axes.set_yscale("log")
        _plain_log(axes.yaxis)
    _plain_log(axes.xaxis)
    for i, (layer, colour) in enumerate(zip(layers, _by_depth(len(layers)), strict=True)):
        fired = [(rank + 1, f) for rank, f in zip(layer.curve.ranks, layer.curve.frequencies, strict=True) if f > 0]
        axes.plot([rank for rank, _ in fired], [f for _, f in fired], color=colour, label=f"layer {i}")
        hot = [point for point in fired if point[0] <= layer.plan.hot]
        if hot and not layer.plan.dense:
            axes.plot(*hot[-1], "o", color=colour, markerfacecolor="white")
    axes.set_xlabel("neurons, the busiest first (circles: the last hot one)")
    axes.set_ylabel("share of tokens for which it fires")
    axes.legend(edgecolor="none", fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def _draw_overlap(content: _Content) -> Figure:
    pairs = [layer.overlap for layer in content.analysis.layers]
    nan = float("nan")
    neighbours, random = (
        [nan if v is None else v for v in s] for s in zip(*map(dataclasses.astuple, pairs), strict=True)
    )
    figure, axes = _axes(_height(len(pairs)))
    rows = range(len(pairs))
    axes.hlines(rows, random, neighbours, color=_ACCENT, linewidth=1)
    axes.plot(random, rows, "o", color=_ACCENT, markerfacecolor="white", label="random pairs")
    axes.plot(neighbours, rows, "o", color=_ACCENT, label="neighbours")
    _layer_rows(axes, len(pairs))
    axes.set_xlim(left=0)
    axes.set_xlabel("share of active neurons that two tokens have in common")
    return figure


def _draw_plan(content: _Content) -> Figure:
    layers, measured = content.analysis.layers, content.layer_speedups
    figure, axes = _axes(_height(len(layers)))
    axes.axvline(1, color="0.4", linewidth=0.8)
    rows = range(len(layers))
    axes.plot(
        [x.plan.predicted for x in layers], rows, "o", color=_ACCENT, markerfacecolor="white", label="predicted, GPU"
    )
    if measured is not None:
        axes.plot(measured, rows, "D", color=_WARM, label=f"measured, {content.layer_machine}")
    for i, layer in enumerate(layers):
        note = "dense" if layer.plan.dense else f"{layer.plan.hot:,} hot, cap {layer.plan.cap:,}"
        axes.annotate(note, (1.01, i), xycoords=("axes fraction", "data"), va="center", fontsize=8, color="0.35")
    _layer_rows(axes, len(layers))
    axes.margins(x=0.1)
    axes.set_xlabel("speedup over dense")
    return figure


def _draw_training(content: _Content) -> Figure:
    from matplotlib.figure import Figure

    run = content.training
    assert run is not None
    figure = Figure(figsize=(8, 6), layout="constrained")
    loss, active, dead = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1.5))
    loss.plot(run.steps, _numeric(run.loss), color=_ACCENT, label="training")
    if run.validation_steps:
        loss.plot(run.validation_steps, _numeric(run.validation), "o", color=_WARM, label="validation")
    loss.set_ylabel("cross-entropy")
    loss.legend(edgecolor="none")
    for values in run.layers:
        active.plot(run.steps, _numeric(values), color=_GREY, linewidth=0.8)
    active.plot(run.steps, _numeric(run.active), color=_ACCENT)
    active.set_ylabel("active neurons")
    if any(value and value > 0 for value in run.active):
        active.set_yscale("log")
        _plain_log(active.yaxis)
    dead.plot(run.steps, [100 * value for value in _numeric(run.dead)], color=_ACCENT)
    dead.set_ylabel("% dead")
    dead.set_xlabel("step")
    for axes in (loss, active, dead):
        _calm(axes)
    return figure


def _numeric(values: Sequence[float | None]) -> list[float]:
    return [float("nan") if value is None else value for value in values]


def _draw_speed(content: _Content) -> Figure:
    """Times as shares of dense; of whole models and of FFNs the first few, as on the page."""
    whole, single = ([case for case in content.cases if case.whole_model == flag] for flag in (True, False))
    cases = whole[:_CASES] + single[:_CASES]
    bars = [(case, side, side.ms[1] / case.sides[0].ms[1]) for case in cases for side in case.sides]
    figure, axes = _axes(1 + 0.24 * len(bars) + 0.1 * len(cases))
    y, ticks, labels = 0.0, [], []
    for case, side, share in bars:
        y += 1.4 if side is case.sides[0] else 1
        low, middle, high = side.ms
        spread = [[share * (middle - low) / middle], [share * (high - middle) / middle]]
        axes.barh(y, share, xerr=spread, height=0.8, color=_ACCENT if side.name == "sparse" else _SOFT, ecolor="0.2")
        rate = side.tokens_per_ms
        note = f"{middle:.4g} ms, {f'{rate:,.0f}' if rate >= 100 else f'{rate:.3g}'} tokens/ms"
        note += f", {case.speedup:.2f}x" if side.name == "sparse" else ""
        axes.annotate(note, (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=8)
        ticks.append(y)
        labels.append(f"{case.label}: {side.name}" if side is case.sides[0] else side.name)
    axes.set_yticks(ticks, labels, fontsize=8, parse_math=False)
    axes.set_ylim(y + 0.8, 0.4)
    axes.grid(False, axis="y")
    axes.set_xlabel("time, as a share of dense (lines: 20th to 80th percentile)")
    return figure
