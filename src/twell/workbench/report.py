"""The page of ``twell analyze --report``: an ``Analysis``, a training log and measured times as one HTML file.

The file fetches nothing, and its Content-Security-Policy tells the browser to allow only its own script and style, by
their hashes. The data is embedded as JSON and drawn by the script, page/report.js. Text from a model or a file is
always data: no token can become markup.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import html as markup
import importlib.resources
import json
import math
import statistics
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from twell._version import __version__
from twell.workbench.analysis import Analysis
from twell.workbench.bench import break_even

FORMAT = 1  # of the embedded JSON
_WAYS = ("dense", "compiled", "sparse")
_DRAWN = 8  # of whole models, and of single FFNs

Row = Mapping[str, Any]


class Missing(NamedTuple):
    """The sentence in place of a figure without data, and the command that makes the data."""

    why: str
    command: str


_BENCH_MODEL = "twell bench model MODEL --layers --out rows.jsonl"
_NO_TRAINING = Missing(
    "No training log was given. A training run writes metrics.jsonl into its folder:", "twell train --out run"
)
_NO_LAYER_TIMES = Missing("The layers of this model were not timed one by one. To time them:", _BENCH_MODEL)
_NO_TIMES = Missing("Nothing was timed. To measure:", _BENCH_MODEL)
_NO_CURVE = Missing("No single FFN was timed. To measure:", "twell bench ffn --out rows.jsonl")


# -- the data -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """A row of ``twell bench``: the same work computed in two or three ways."""

    label: str
    machine: str
    whole_model: bool  # else one FFN
    real: bool  # a model's weights, not random ones
    tokens: int
    speedup: float
    ways: list[Row]  # see _way


def _training(metrics: Sequence[Row]) -> Row | None:
    """A training log. None stands for a number that is missing or not finite."""
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

    return {
        "steps": steps,
        "loss": values("ce_loss"),
        "active": values("active_mean"),  # active neurons a token, mean of the layers
        "layers": [values(f"active/{i}") for i in range(n_layers)],  # [layers][steps]
        "dead": values("dead_share"),
        "validation_steps": validation_steps,
        "validation": [_finite(evaluated[step]["eval_loss"]) for step in validation_steps],
    }


def _finite(value: Any) -> float | None:
    """A number that JSON can hold, or None.

    >>> _finite(3), _finite(float("nan")), _finite("3")
    (3.0, None, None)
    """
    real = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if real and math.isfinite(value) else None


def _timed_layers(analysis: Analysis, rows: Sequence[Row]) -> Row | None:
    """The row with most tokens that has times of the analysed layers one by one.

    A layer's name in a row ends with its name in the analysis, which omits what the names of all layers begin with.
    """
    names = [layer.name for layer in analysis.layers]
    fitting = [
        row
        for row in rows
        if len(ffns := row.get("ffns") or ()) == len(names)
        and all(str(ffn["name"]).endswith(name) for ffn, name in zip(ffns, names, strict=True))
    ]
    return max(fitting, key=lambda row: (row["ffns"][0]["tokens"], str(row.get("time", ""))), default=None)


def _correlation(ffns: Sequence[Row]) -> float | None:
    """Pearson's correlation of active neurons and speedup; None for a single layer or equal ones."""
    active, speedups = [ffn["mean_active"] for ffn in ffns], [ffn["speedup"] for ffn in ffns]
    return statistics.correlation(active, speedups) if len(set(active)) > 1 < len(set(speedups)) else None


def _measurement(row: Row) -> Measurement | None:
    """None if the row is not of ``twell bench ffn`` or ``twell bench model``, or has a time of 0."""
    kind = row.get("bench")
    sizes = {"ffn": {"M"}, "model": {"batch", "length"}}
    if kind not in sizes or not {"dense_ms", "sparse_ms", "speedup", *sizes[kind]} <= row.keys():
        return None
    names = [name for name in _WAYS if f"{name}_ms" in row]
    if not all(row[f"{name}_ms"]["p50"] > 0 for name in names):
        return None
    real = kind == "model" and row.get("model") is not None
    if kind == "model":
        tokens = row["batch"] * row["length"]
        what = "/".join(Path(str(row["model"])).parts[-2:]) if real else f"random weights, {row.get('workload')}"
        label = f"{what}, {row['batch']:,} x {row['length']:,} tokens{', compiled' if row.get('compiled') else ''}"
    else:
        tokens = row["M"]
        plural, graph = "s"[: tokens != 1], ", graph" if row.get("graph") else ""
        label = f"FFN, {row.get('workload')}, {tokens:,} token{plural}{graph}"
    return Measurement(
        label=label,
        machine=_machine(row),
        whole_model=kind == "model",
        real=real,
        tokens=tokens,
        speedup=row["speedup"],
        ways=[_way(name, row, tokens) for name in names],
    )


def _machine(row: Row) -> str:
    threads = row.get("threads", "?")
    machine = row.get("gpu") or f"{row.get('cpu', 'CPU')}, {threads} thread{'s'[: threads != 1]}"
    return f"{machine}, {row.get('dtype', '?')}"


def _way(name: str, row: Row, tokens: int) -> Row:
    """One of the ways of computing: dense, compiled or sparse. None stands for a number that the row lacks."""

    def field(of: str) -> Any:
        return row[of].get(name) if isinstance(row.get(of), Mapping) else None

    ms = [float(row[f"{name}_ms"][p]) for p in ("p20", "p50", "p80")]
    memory = field("memory") or {}
    return {
        "name": name,
        "ms": ms,
        "tokens_per_ms": tokens / ms[1],
        "first_token_ms": _finite((field("first_token_ms") or {}).get("p50")),
        "pass_bytes": memory.get("pass"),  # the most memory that a forward pass takes besides weights
        "copied_bytes": memory.get("frozen", memory.get("copies")),  # beside the weights; "copies" in older rows
        "joules_per_token": _finite(field("joules_per_token")),
    }


def _break_even(analysis: Analysis, rows: Sequence[Row]) -> Row | None:
    """Speedup of one FFN against its mean active neurons; see ``twell.workbench.bench.break_even``."""
    given = [dict(row) for row in rows]
    try:
        shape, families = break_even.select(given)
    except ValueError:  # no row has a point of the curve
        return None
    found = break_even.break_even(given, shape, families)
    facts = analysis.facts
    return {
        "shape": str(shape),
        "families": {break_even.FAMILIES[family]: points for family, points in families.items()},
        "predicted": [*found.predicted[:-2:4], *found.predicted[-2:]],  # every fourth point, and the end
        "at": found.at,  # active neurons at which the speedup is 1
        "measured": found.is_measured,
        "same_shape": facts.width == shape.D and set(facts.hidden_sizes) == {shape.F},
    }


# -- the page -----------------------------------------------------------------------------------------------


def build(
    analysis: Analysis,
    *,
    title: str,
    model: str = "",
    text: str = "",
    metrics: Sequence[Row] | None = None,
    speed: Sequence[Row] | None = None,
) -> str:
    """The page as HTML. ``model`` and ``text`` are names to show. ``metrics``: rows of a run's ``metrics.jsonl``;
    ``speed``: rows of ``twell bench ffn`` and ``twell bench model``. A figure without data is replaced by the command
    that makes the data."""
    rows = list(speed or ())
    measurements = [found for row in rows if (found := _measurement(row)) is not None]
    if speed is not None and not measurements:
        raise ValueError("--speed has no rows of twell bench ffn or twell bench model")
    training, curve = _training(metrics or ()), _break_even(analysis, rows)
    timed = _timed_layers(analysis, rows)
    data = {
        "format": FORMAT,
        "title": title,
        "model": model,
        "text": text,
        "analysis": analysis.to_json(),
        "training": training,
        "layer_speedups": [ffn["speedup"] for ffn in timed["ffns"]] if timed else None,
        "layer_machine": _machine(timed) if timed else None,
        "correlation": _correlation(timed["ffns"]) if timed else None,
        "no_layer_times": _NO_LAYER_TIMES,
        "measurements": measurements,
        "measurements_drawn": _DRAWN,
        "break_even": curve,
    }
    missing = {
        "training": None if training else _NO_TRAINING,
        "speed": None if measurements else _NO_TIMES,
        "break-even": None if curve else _NO_CURVE,
    }
    names = ("layers", "positions", "text", "tokens", "frequencies", "overlap", "plan", *missing)
    script, style = _page_file("report.js"), _page_file("report.css")
    return string.Template(_page_file("report.html")).substitute(
        {name.replace("-", "_"): _slot(name, missing.get(name)) for name in names},
        title=markup.escape(title),
        about=_about(analysis, model, text),
        numbers="\n".join(_number(*number) for number in _numbers(analysis, measurements)),
        verdict=markup.escape(verdict(analysis, measurements)),
        policy=_policy(script, style),
        style=style,
        script=script,
        data=_embedded(data),
        version=markup.escape(__version__),
    )


def write(html: str, path: Path) -> None:
    """Write the page, over an older one if there is one; folders are made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(html.encode("utf-8", "replace"))  # file names may hold bytes that are no characters


def _page_file(name: str) -> str:
    return importlib.resources.files("twell.workbench").joinpath("page", name).read_text(encoding="utf-8")


def _policy(script: str, style: str) -> str:
    """Allows the page's own script and style and the empty icon; nothing may be fetched."""
    own = (base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() for part in (script, style))
    scripts, styles = (f"'sha256-{digest}'" for digest in own)
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; img-src data:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )


def _embedded(data: dict[str, Any]) -> str:
    """JSON without "<", so that no HTML parser finds the end of the script element in it."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, default=dataclasses.asdict)
    return text.replace("<", "\\u003c")


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


def _numbers(analysis: Analysis, measurements: Sequence[Measurement]) -> list[tuple[str, str, str]]:
    """Label, value and note of each number at the top of the page."""
    facts = analysis.facts
    neurons = sum(facts.hidden_sizes)
    sizes = sorted(set(facts.hidden_sizes))
    width = f"{sizes[0]:,}" if len(sizes) == 1 else f"{sizes[0]:,} to {sizes[-1]:,}"
    silent = sum(layer.silent * F for layer, F in zip(analysis.layers, facts.hidden_sizes, strict=True)) / neurons
    active_share = _percent(analysis.mean_active / neurons)
    numbers = [
        ("tokens", f"{facts.tokens:,}", f"of {facts.token_types:,} types"),
        ("layers", f"{facts.layers:,}", f"of {width} neurons"),
        ("active neurons", f"{analysis.mean_active / facts.layers:.1f}", f"a token and layer: {active_share}"),
        ("silent neurons", _percent(silent), "never fired on this text"),
        ("predicted speedup", f"{analysis.mean_predicted:.2f}x", "FFNs alone, on a GPU, mean of the layers"),
    ]
    measured = _of_model(measurements)
    if measured is not None:
        numbers.append(("measured speedup", f"{measured.speedup:.2f}x", f"whole model, {measured.machine}"))
    return numbers


def _percent(share: float) -> str:
    return f"{100 * share:.1f}\u00a0%"


def _of_model(measurements: Sequence[Measurement]) -> Measurement | None:
    """The latest measured with the most tokens of a real model; random weights say nothing about this model."""
    real = [measured for measured in reversed(measurements) if measured.whole_model and measured.real]
    return max(real, key=lambda measured: measured.tokens, default=None)


def verdict(analysis: Analysis, measurements: Sequence[Measurement] = ()) -> str:
    """What the predicted and the measured speedup mean, in a few sentences."""
    layers, facts = analysis.layers, analysis.facts
    dense = sum(layer.plan.dense for layer in layers)
    if dense == len(layers):
        F, active = max(facts.hidden_sizes), f"{analysis.mean_active / len(layers):.3g}"
        pays = break_even.modelled_break_even(
            break_even.Shape("", True, facts.width, F, "", 1 << 40)
        )  # for a batch of any size
        if pays is None:
            said = f"This model is too small for the GPU kernels to gain: layers of {F:,} neurons always run densely."
        else:
            said = (
                "This model is too small, or not sparse enough, for the GPU kernels to gain: all its layers would run "
                f"densely. If its {F:,} neurons fired equally often, a layer would gain below about {pays:.2g} active "
                f"neurons a token; here {active} are active."
            )
    else:
        least = max(layer.plan.min_tokens for layer in layers if not layer.plan.dense)
        which = "All layers are" if not dense else f"{len(layers) - dense} of {len(layers)} layers are"
        said = f"{which} sparse enough for the GPU kernels to gain, in batches of at least {least:,} tokens"
        said += f"; the other {dense} would run densely." if dense else "."
        said += " The prediction covers the FFNs alone: a whole model gains less."
    measured = _of_model(measurements)
    if measured is None:
        return said
    how = "as fast as" if 0.97 < measured.speedup < 1.03 else "faster than" if measured.speedup > 1 else "slower than"
    return f"{said} Measured ({measured.machine}), the whole model runs {how} dense: {measured.speedup:.2f}x."
