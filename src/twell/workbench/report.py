"""The page of ``twell analyze --report``: an ``Analysis``, a training log and measured times as one HTML file.

The file fetches nothing, and its Content-Security-Policy tells the browser to allow only its own script and style, by
their hashes. The data is embedded as JSON and drawn by the script, page/report.js. Text from a model or a file is
always data: no token can become markup.
"""

from __future__ import annotations

import base64
import hashlib
import html as markup
import importlib.resources
import json
import math
import statistics
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from twell._version import __version__
from twell.workbench.analysis import Analysis

Row = Mapping[str, Any]

_WAYS = ("dense", "compiled", "sparse")
_BENCH_MODEL = "twell bench model MODEL --layers --out rows.jsonl"
# In place of a figure without data: a sentence, and the command that makes the data.
_NO_TRAINING = (
    "No training log was given. A training run writes metrics.jsonl into its folder:",
    "twell train --out run",
)
_NO_LAYER_TIMES = "The layers of this model were not timed one by one. To time them:", _BENCH_MODEL
_NO_TIMES = "Nothing was timed. To measure:", _BENCH_MODEL


# -- the data -----------------------------------------------------------------------------------------------


def _training(metrics: Sequence[Row]) -> Row | None:
    """A training log. None stands for a number that is missing or not finite."""
    logged = {int(row["step"]): row for row in metrics if "step" in row and "ce_loss" in row}
    if not logged:
        return None
    evaluated = {int(row["step"]): _finite(row["eval_loss"]) for row in metrics if "step" in row and "eval_loss" in row}
    steps = sorted(logged)
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
        "validation": sorted((step, loss) for step, loss in evaluated.items() if loss is not None),
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
    try:
        return statistics.correlation([ffn["mean_active"] for ffn in ffns], [ffn["speedup"] for ffn in ffns])
    except statistics.StatisticsError:
        return None


def _measurement(row: Row) -> Row | None:
    """What the page shows of a row of ``twell bench ffn`` or ``twell bench model``; None for other rows."""
    kind = row.get("bench")
    sizes = {"ffn": {"M"}, "model": {"batch", "length"}}
    if kind not in sizes or not {"dense_ms", "sparse_ms", "speedup", *sizes[kind]} <= row.keys():
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
    return {
        "label": label,
        "machine": _machine(row),
        "real": real,  # a model's weights, not random ones
        "tokens": tokens,
        "ms": {name: [row[f"{name}_ms"][p] for p in ("p20", "p50", "p80")] for name in _WAYS if f"{name}_ms" in row},
        "speedup": row["speedup"],
    }


def _machine(row: Row) -> str:
    threads = row.get("threads", "?")
    machine = row.get("gpu") or f"{row.get('cpu', 'CPU')}, {threads} thread{'s'[: threads != 1]}"
    return f"{machine}, {row.get('dtype', '?')}"


# -- the page -----------------------------------------------------------------------------------------------


def build(
    analysis: Analysis,
    *,
    title: str,
    model: str = "",
    text: str = "",
    metrics: Sequence[Row] = (),
    speed: Sequence[Row] | None = None,
) -> str:
    """The page as HTML. ``model`` and ``text`` are names to show. ``metrics``: rows of a run's ``metrics.jsonl``;
    ``speed``: rows of ``twell bench ffn`` and ``twell bench model``. A figure without data is replaced by the command
    that makes the data."""
    measurements = [found for row in speed or () if (found := _measurement(row)) is not None]
    if speed is not None and not measurements:
        raise ValueError("--speed has no rows of twell bench ffn or twell bench model")
    training, timed = _training(metrics), _timed_layers(analysis, speed or ())
    data: dict[str, Any] = {"analysis": analysis.to_json(), "training": training, "measurements": measurements}
    if timed is not None:
        data["timed"] = {
            "speedups": [ffn["speedup"] for ffn in timed["ffns"]],
            "machine": _machine(timed),
            "correlation": _correlation(timed["ffns"]),
        }
    script, style = _page_file("report.js"), _page_file("report.css")
    return string.Template(_page_file("report.html")).substitute(
        title=markup.escape(title),
        about=_about(analysis, model, text),
        numbers="\n".join(_number(*number) for number in _numbers(analysis, measurements)),
        verdict=markup.escape(verdict(analysis, measurements)),
        no_layer_times="" if timed else _missing("layer-times", *_NO_LAYER_TIMES),
        no_training="" if training else _missing("training", *_NO_TRAINING),
        no_times="" if measurements else _missing("speed", *_NO_TIMES),
        policy=_policy(script, style),
        style=style,
        script=script,
        # Without "<", so that no HTML parser finds the end of the script element in it.
        data=json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
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


def _missing(name: str, why: str, command: str) -> str:
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


def _numbers(analysis: Analysis, measurements: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Label, value and note of each number at the top of the page."""
    sizes, n_layers = analysis.facts.hidden_sizes, len(analysis.layers)
    width = f"{min(sizes):,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
    silent = sum(layer.silent * F for layer, F in zip(analysis.layers, sizes, strict=True)) / sum(sizes)
    share = _percent(analysis.mean_active / sum(sizes))
    numbers = [
        ("tokens", f"{analysis.facts.tokens:,}", f"of {analysis.facts.token_types:,} types"),
        ("layers", f"{n_layers:,}", f"of {width} neurons"),
        ("active neurons", f"{analysis.mean_active / n_layers:.1f}", f"a token and layer: {share}"),
        ("silent neurons", _percent(silent), "never fired on this text"),
        ("predicted speedup", f"{analysis.mean_predicted:.2f}x", "FFNs alone, on a GPU, mean of the layers"),
    ]
    measured = _of_model(measurements)
    if measured is not None:
        numbers.append(("measured speedup", f"{measured['speedup']:.2f}x", f"whole model, {measured['machine']}"))
    return numbers


def _percent(share: float) -> str:
    return f"{100 * share:.1f}\u00a0%"


def _of_model(measurements: Sequence[Row]) -> Row | None:
    """The latest measured with the most tokens of a real model; random weights say nothing about this model."""
    real = [measured for measured in reversed(measurements) if measured["real"]]
    return max(real, key=lambda measured: int(measured["tokens"]), default=None)


def verdict(analysis: Analysis, measurements: Sequence[Row] = ()) -> str:
    """What the predicted and the measured speedup mean, in a few sentences."""
    layers, facts = analysis.layers, analysis.facts
    dense = sum(layer.plan.dense for layer in layers)
    if dense == len(layers):
        F, active = max(facts.hidden_sizes), f"{analysis.mean_active / len(layers):.3g}"
        said = (
            "This model is too small, or not sparse enough, for the GPU kernels to gain: all its layers would run "
            f"densely. {active} of {F:,} neurons are active a token."
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
    speedup = measured["speedup"]
    how = "as fast as" if 0.97 < speedup < 1.03 else "faster than" if speedup > 1 else "slower than"
    return f"{said} Measured ({measured['machine']}), the whole model runs {how} dense: {speedup:.2f}x."
