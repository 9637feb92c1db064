"""``twell results``: the tables of a document, made from the rows in results/.

A document names a table by a pair of comments; what is between them is replaced:

    <!-- table ffn -->
    ...
    <!-- end -->

Each table says on which GPU or CPU, with which versions and by which command it was measured. Tables are functions of
rows alone, so that a test can tell whether a document is up to date.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import correlation
from typing import Any, NamedTuple

from twell.workbench.bench import rows as files
from twell.workbench.bench import swept

Row = dict[str, Any]
_BLOCK = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


class Table(NamedTuple):
    files: tuple[str, ...]  # in results/
    command: str  # that makes its rows
    keeps: Callable[[Row], bool]  # the rows it is about
    make: Callable[[list[Row]], list[str]]  # its lines


def updated(document: Path, folder: Path) -> str:
    """The text of ``document`` with every table in it made anew from the rows in ``folder``."""
    text = document.read_text()
    if text.count("<!-- table ") != len(_BLOCK.findall(text)):
        raise ValueError(f"{document}: a table's comment is not closed by <!-- end -->, or not on a line of its own")
    link = Path(os.path.relpath(folder, document.parent)).as_posix()
    return _BLOCK.sub(lambda block: block[1] + render(block[2], folder, link) + block[3], text)


def render(name: str, folder: Path, link: str) -> str:
    """The lines of one table; ``link`` is the way from its document to ``folder``."""
    if name not in TABLES:
        raise ValueError(f"unknown table {name!r}: expected one of {', '.join(sorted(TABLES))}")
    table = TABLES[name]
    paths = [folder / file for file in table.files]
    for path in paths:
        if not path.exists():
            raise ValueError(f"the table {name!r} needs {path}")
    rows = [row for row in files.read(paths) if table.keeps(row)]
    if not rows:
        raise ValueError(f"{' and '.join(map(str, paths))} has no rows for the table {name!r}")
    links = " and ".join(f"[`{file}`]({link}/{file})" for file in table.files)
    return "\n".join([*table.make(rows), "", _source(rows, links, table.command), ""])


def _source(rows: list[Row], links: str, command: str) -> str:
    """Machine, versions, commit, files and command."""
    machine = " or ".join(dict.fromkeys(_machine(row) for row in rows))
    used = rows[0]["versions"]
    versions = [f"{name} {used[name]}" for name in ("torch", "triton", "transformers") if name in used]
    commits = sorted({str(row["commit"]) for row in map(swept.measured, rows) if row.get("commit")})
    measured = [f"commit {' and '.join(commits)}"] if commits else []
    facts = ", ".join([machine[0].upper() + machine[1:], *versions, *measured])
    return f"{facts}; rows: {links}; `{command}`"


def _machine(row: Row) -> str:
    if "gpu" in row:
        return f"one {row['gpu']}"
    if "cpu" in row:
        return f"{row['threads']} {'core' if row['threads'] == 1 else 'cores'} of an {row['cpu']}"
    return f"one {row['device']}"


def _lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]


def _ms(spread: dict[str, float], unit: str = "ms") -> str:
    """Median, and half the distance of the 20th and 80th percentile in per cent."""
    p50, half = spread["p50"], (spread["p80"] - spread["p20"]) / 2
    text = f"{1000 * p50:.1f}" if unit == "us" else f"{p50:.{1 if p50 >= 100 else 2 if p50 >= 10 else 3}f}"
    return f"{text} ±{100 * half / p50:.0f} %"


def _dense(row: Row) -> dict[str, float]:
    """The faster of eager and compiled."""
    spreads: list[dict[str, float]] = [row[name] for name in ("dense_ms", "compiled_ms") if row.get(name)]
    return min(spreads, key=lambda spread: spread["p50"])


def _called_dense(row: Row) -> dict[str, float]:
    """The faster of eager and compiled, as called."""
    spreads = [spread for name, spread in row["called_ms"].items() if name in ("dense", "compiled")]
    return min(spreads, key=lambda spread: float(spread["p50"]))


def _any_has(rows: list[Row], field: str) -> bool:
    """Whether a table has columns for it: older rows were measured without."""
    return any(field in row for row in rows)


def _speedup(value: float | None) -> str:
    return "" if value is None else f"**{value:.2f}x**"


def _fp8(row: Row, unit: str = "ms") -> tuple[str, str]:
    """Cells: the faster dense FFN in FP8, and the faster of sparse and frozen over it."""
    spreads: list[dict[str, float]] = [row[name] for name in ("fp8_ms", "fp8_weights_ms") if name in row]
    if not spreads:
        return "", ""
    return _ms(min(spreads, key=lambda spread: spread["p50"]), unit), _speedup(row["speedup_over_fp8"])


def _sparse_fp8(row: Row, unit: str = "ms") -> tuple[str, str]:
    """Cells: a sparse FFN in FP8, and its speedup over the faster dense one in FP8."""
    spread = row.get("sparse_fp8_ms")
    return ("", "") if spread is None else (_ms(spread, unit), _speedup(row["speedup_fp8"]))


def _over_fp8(row: Row) -> str:
    """Behind a speedup."""
    return f", over FP8 {row['speedup_over_fp8']:.2f}x" if "speedup_over_fp8" in row else ""


def _called_head(unit: str = "ms", *, frozen: bool = True) -> tuple[str, ...]:
    return f"as called: dense {unit}", f"sparse {unit}", "speedup", *(("frozen",) if frozen else ())


def _called(row: Row, unit: str = "ms", *, frozen: bool = True) -> tuple[str, ...]:
    """Cells: calls in a plain loop, the host's time included."""
    more = (_speedup(row.get("speedup_called_frozen")),) if frozen else ()
    if "called_ms" not in row:
        return ("", "", "", *more)
    return _ms(_called_dense(row), unit), _ms(row["called_ms"]["sparse"], unit), _speedup(row["speedup_called"]), *more


def _mean_speedup(rows: list[Row]) -> float:
    return float(sum(r["speedup"] for r in rows) / len(rows))


def _is_layer(row: Row) -> bool:
    """Of a trace."""
    return str(row["workload"]).startswith("layer")


def _is_workload(row: Row) -> bool:
    return not _is_layer(row) and row.get("level", "ffn") == "ffn"


def _is_step(row: Row) -> bool:
    """Of both variants: one that does not fit has nothing to compare."""
    return row.get("level") == "model" and "speedup" in row


def _is_largest(row: Row) -> bool:
    return row.get("level") == "largest" and "speedup" in row


def _is_of_readme(row: Row) -> bool:
    """Training of one FFN, and the 1.5B model: its forward, a token, and a step of the batch that fills a GPU."""
    if row["bench"] == "decode":
        return bool(row["preset"] == "1.5b" and row["batch"] == 1)
    if row["bench"] == "generate" or _is_shape(row):
        return True
    if row["bench"] == "model" or _is_step(row):
        return row.get("preset") == "1.5b" and row["batch"] != 12
    return _is_workload(row)


def _is_shape(row: Row) -> bool:
    """Of a model with some of a preset's layers, in one of several shapes."""
    return row["bench"] == "model" and " layers of " in str(row.get("preset"))


def _is_any(row: Row) -> bool:
    return True


def _counts_neurons(row: Row) -> bool:
    return bool(row.get("active"))


def _is_usual(row: Row) -> bool:
    """A layer, or the usual workloads in the usual shape."""
    return _is_layer(row) or (row["workload"] in {"skew29", "skew100", "skew1000"} and _what(row) == row["workload"])


def _is_skewed(row: Row) -> bool:
    """A layer of the usual shape whose neurons fire unevenly."""
    return str(row["workload"]).startswith("skew") and _what(row) == row["workload"]


def _is_gated_fp32(row: Row) -> bool:
    return bool(row["kind"] == "gated" and row["dtype"] == "float32")


def _what(row: Row) -> str:
    """A row's workload, and what is unusual about it."""
    notes = [str(row["workload"])]
    notes += ["plain"] if row["kind"] == "plain" else []
    notes += [f"D {row['D']}, F {row['F']}"] if (row["D"], row["F"]) != (2048, 5632) else []
    return ", ".join(notes)


def _ffn(rows: list[Row], unit: str = "ms") -> list[str]:
    has_frozen, has_calls = _any_has(rows, "frozen_ms"), _any_has(rows, "called_ms")

    def frozen(row: Row) -> tuple[str, str]:
        return (_ms(row["frozen_ms"], unit), _speedup(row["speedup_frozen"])) if "frozen_ms" in row else ("", "")

    def memory(row: Row) -> str:
        of = row.get("memory")
        if not of:
            return ""
        dense = of["compiled" if _dense(row) == row.get("compiled_ms") else "dense"]
        return f"{dense / 1e6:.0f} -> {of['sparse'] / 1e6:.0f}"

    has_memory, has_fp8, has_both = (_any_has(rows, name) for name in ("memory", "fp8_ms", "sparse_fp8_ms"))
    head: tuple[str, ...] = ("workload", "tokens", "active", f"dense {unit}", f"sparse {unit}", "speedup")
    head += (f"frozen {unit}", "speedup") if has_frozen else ()
    head += (f"dense FP8 {unit}", "over FP8") if has_fp8 else ()
    head += (f"sparse FP8 {unit}", "over FP8") if has_both else ()
    return _lines(
        (*head, *(_called_head(unit) if has_calls else ()), *(("memory besides y, MB",) if has_memory else ())),
        (
            (
                _what(r),
                str(r["M"]),
                f"{r['mean_active']:.0f}",
                _ms(_dense(r), unit),
                _ms(r["sparse_ms"], unit),
                _speedup(r["speedup"]),
                *(frozen(r) if has_frozen else ()),
                *(_fp8(r, unit) if has_fp8 else ()),
                *(_sparse_fp8(r, unit) if has_both else ()),
                *(_called(r, unit) if has_calls else ()),
                *((memory(r),) if has_memory else ()),
            )
            for r in rows
        ),
    )


def _ffn_few(rows: list[Row]) -> list[str]:
    return _ffn(rows, "us")


def _layers(rows: list[Row]) -> list[str]:
    """Layers of a trace, and their mean."""
    has_fp8 = _any_has(rows, "fp8_ms")
    head = ("layer", "active", "hot", "dense ms", "sparse ms", "speedup", "predicted")
    lines = _lines(
        (*head, *(("dense FP8 ms", "over FP8") if has_fp8 else ())),
        (
            (
                str(r["workload"]).removeprefix("layer "),
                f"{r['mean_active']:.0f}",
                str(r["plan"]["hot"]),
                _ms(_dense(r)),
                _ms(r["sparse_ms"]),
                f"{r['speedup']:.2f}x",
                f"{r['plan']['predicted']:.2f}x",
                *(_fp8(r) if has_fp8 else ()),
            )
            for r in rows
        ),
    )
    summed = sum(_dense(r)["p50"] for r in rows) / sum(r["sparse_ms"]["p50"] for r in rows)
    active, speedups = [r["mean_active"] for r in rows], [r["speedup"] for r in rows]
    varies = len(set(active)) > 1 < len(set(speedups))
    return [
        *lines,
        f"| mean | | | | | {_speedup(_mean_speedup(rows))} ({summed:.2f}x of the summed times) | |" + " | |" * has_fp8,
        *(["", f"Correlation of active neurons and speedup: {correlation(active, speedups):.2f}"] if varies else []),
    ]


def _in_fp8(rows: list[Row]) -> list[str]:
    """Sparse in FP8 beside what is dense, and of layers of a trace the mean."""
    has_called = _any_has(rows, "called_ms")

    def called(row: Row) -> tuple[str, ...]:
        if "called_ms" not in row:
            return ("",) * 3
        ms: dict[str, dict[str, float]] = row["called_ms"]
        dense = min((ms[name] for name in ("fp8", "fp8_weights") if name in ms), key=lambda spread: spread["p50"])
        return _ms(dense, "us"), _ms(ms["sparse_fp8"], "us"), _speedup(row["speedup_called_fp8"])

    def cells(row: Row) -> tuple[str, ...]:
        weights, sparse = row.get("fp8_weights_ms"), row["sparse_fp8_ms"]
        over_16_bits = _dense(row)["p50"] / sparse["p50"]
        return (
            _what(row) if _is_workload(row) else str(row["workload"]),
            f"{row['M']}{', in a CUDA graph' if row.get('graph') else ''}",
            _ms(_dense(row), "us"),
            _ms(row["fp8_ms"], "us"),
            "" if weights is None else _ms(weights, "us"),
            _ms(sparse, "us"),
            _speedup(row["speedup_fp8"]),
            f"{over_16_bits:.2f}x",
            *(called(row) if has_called else ()),
        )

    head: tuple[str, ...] = "dense us", "dense FP8 us", "FP8 weights us", "sparse FP8 us"
    head += "over the faster in FP8", "over dense"
    head += ("as called: dense FP8 us", "sparse FP8 us", "speedup") if has_called else ()
    lines = _lines(("workload", "tokens", *head), map(cells, rows))
    mean = _speedup(sum(row["speedup_fp8"] for row in rows) / len(rows))
    return lines if _is_workload(rows[0]) else [*lines, f"| mean | | | | | | {mean} | |"]


def _fp8_grid(rows: list[Row]) -> list[str]:
    """Sparse in FP8 over the faster dense FFN in FP8: workloads down, tokens across."""
    sizes, found = sorted({r["M"] for r in rows}), {(r["workload"], r["M"]): r["speedup_fp8"] for r in rows}
    head = ("workload", *(f"{M} token{'s' if M > 1 else ''}" for M in sizes))
    names = dict.fromkeys(r["workload"] for r in rows)
    cells = {key: f"{speedup:.2f}x" for key, speedup in found.items()}
    return _lines(head, ((name, *(cells.get((name, M), "") for M in sizes)) for name in names))


def _by_share(rows: list[Row]) -> list[str]:
    """As few tokens, by the share of neurons that are silent."""
    in_order = sorted(rows, key=lambda r: (r["M"], -int(r["workload"].removeprefix("skew"))))
    named = [{**r, "workload": f"{100 - 100 * r['mean_active'] / r['F']:.0f} % silent"} for r in in_order]
    return _ffn_few([{k: v for k, v in r.items() if k != "memory"} for r in named])


def _between_layers(rows: list[Row]) -> list[str]:
    """Layers of a trace by numbers of tokens, and their means."""
    layers, sizes = list(dict.fromkeys(r["workload"] for r in rows)), sorted({r["M"] for r in rows})
    found = {(r["workload"], r["M"]): r for r in rows}
    lines = [
        (
            str(layer).removeprefix("layer "),
            f"{found[layer, sizes[-1]]['mean_active']:.0f}",
            *(f"{found[layer, M]['speedup']:.2f}x{_over_fp8(found[layer, M])}" for M in sizes),
        )
        for layer in layers
    ]
    means = (_speedup(_mean_speedup([r for r in rows if r["M"] == M])) for M in sizes)
    return _lines(("layer", "active", *(f"{M} tokens" for M in sizes)), [*lines, ("mean", "", *means)])


def _model(rows: list[Row]) -> list[str]:
    """Forward passes; ``model.generate`` has no time but that of its call."""
    has_calls, has_memory = _any_has(rows, "called_ms"), _any_has(rows, "memory_ratio")

    def millijoules(row: Row) -> str:
        of = row["joules_per_token"]
        if of["sparse"] is None:
            return ""
        return f"{1000 * of['dense']:.2f} -> {1000 * of['sparse']:.2f} ({row['joules_ratio']:.2f}x)"

    def of_a_pass(row: Row) -> tuple[str, ...]:
        if row["bench"] != "model":
            return ("",) * 5
        dense, sparse = (row["tokens_per_ms"][side] for side in ("dense", "sparse"))
        rates = f"{dense:.0f} -> {sparse:.0f}" if dense >= 10 else f"{dense:.2g} -> {sparse:.2g}"
        return _ms(row["dense_ms"]), _ms(row["sparse_ms"]), rates, _speedup(row["speedup"]), millijoules(row)

    def tokens(row: Row) -> str:
        return f"{row['batch']} x {row['length']}" + (f" + {row['new_tokens']} new" if "new_tokens" in row else "")

    def memory(row: Row) -> str:
        return f"{row['memory_ratio']:.3f}x" if row.get("memory_ratio") else ""

    head: tuple[str, ...] = (
        "model",
        "activations",
        "how",
        "tokens",
        "dense ms",
        "sparse ms",
        "tokens/ms",
        "speedup",
        "mJ a token",
    )
    head += _called_head() if has_calls else ()
    return _lines(
        (*head, *(("memory of the model",) if has_memory else ())),
        (
            (
                str(r["preset"]),
                str(r["workload"]),
                _how(r),
                tokens(r),
                *of_a_pass(r),
                *(_called(r) if has_calls else ()),
                *((memory(r),) if has_memory else ()),
            )
            for r in rows
        ),
    )


def _how(row: Row) -> str:
    if row["bench"] == "generate":
        return "model.generate"
    return "compiled" if row["compiled"] else "eager"


def _train_ffn(rows: list[Row]) -> list[str]:
    def joules(row: Row) -> str:
        measured = row.get("joules") or {}
        return f"{measured['sparse'] / measured['dense']:.2f}x" if measured.get("sparse") else ""

    has_calls = _any_has(rows, "called_ms")
    head: tuple[str, ...] = (
        "workload",
        "tokens",
        "eager ms",
        "compiled ms",
        "sparse ms",
        "over eager",
        "over compiled",
        "memory",
        "energy",
    )
    head += (*_called_head(frozen=False), "with AdamW's step") if has_calls else ()
    return _lines(
        head,
        (
            (
                _what(r),
                str(r["M"]),
                _ms(r["dense_ms"]),
                _ms(r["compiled_ms"]),
                _ms(r["sparse_ms"]),
                _speedup(r["speedup_eager"]),
                _speedup(r["speedup"]),
                f"{r['memory']['ratio']:.2f}x",
                joules(r),
                *((*_called(r, frozen=False), _speedup(r.get("speedup_called_with_step"))) if has_calls else ()),
            )
            for r in rows
        ),
    )


def _train_step(rows: list[Row]) -> list[str]:
    def gigabytes(row: Row, what: str) -> str:
        dense, sparse = (row[side]["memory"][what] / 1e9 for side in ("dense", "sparse"))
        return f"{dense:.1f} -> {sparse:.1f} ({sparse / dense:.3f}x)"

    return _lines(
        ("model", "workload", "tokens", "dense ms", "sparse ms", "speedup", "peak GB", "of it activations", "energy"),
        (
            (
                str(r.get("preset", f"{r['layers']} layers")),
                str(r["workload"]),
                f"{r['batch']} x {r['length']}",
                _ms(r["dense"]["step_ms"]),
                _ms(r["sparse"]["step_ms"]),
                _speedup(r["speedup"]),
                gigabytes(r, "peak"),
                gigabytes(r, "activations"),
                f"{r['joules_ratio']:.2f}x" if r.get("joules_ratio") else "",
            )
            for r in rows
        ),
    )


def _largest(rows: list[Row]) -> list[str]:
    def sequences(of: Row) -> str:
        return f"{of['batch']} ({of['memory']['peak'] / 1e9:.0f} GB)"

    return _lines(
        ("model", "workload", "dense: sequences", "tokens/ms", "sparse: sequences", "tokens/ms", "speedup"),
        (
            (
                str(r["preset"]),
                str(r["workload"]),
                sequences(r["dense"]),
                f"{r['dense']['tokens_per_ms']:.1f}",
                sequences(r["sparse"]),
                f"{r['sparse']['tokens_per_ms']:.1f}",
                _speedup(r["speedup"]),
            )
            for r in rows
        ),
    )


_PAPERS = {  # forward, energy a token, training, peak memory: sparse against dense, in per cent
    "0.5b": (17.0, -11.8, -1.5, -19.2),
    "1b": (18.1, -14.6, 7.1, -25.5),
    "1.5b": (18.8, -15.0, 11.6, -28.1),
    "2b": (20.5, -17.0, 21.9, None),  # at a larger micro-batch
}


def _paper(rows: list[Row]) -> list[str]:
    """The paper's numbers and those of the rows; of several rows of a kind the last."""

    def found(preset: str, **wanted: Any) -> Row | None:
        of = [r for r in rows if r.get("preset") == preset and all(r.get(k) == v for k, v in wanted.items())]
        return of[-1] if of else None

    def percent(value: float | None) -> str:
        return "" if value is None else f"{value:+.1f} %"

    def change(row: Row | None, name: str) -> str:
        return "" if row is None or row.get(name) is None else percent(100 * (row[name] - 1))

    lines = []
    for preset, (forward, energy, training, memory) in _PAPERS.items():
        ours = found(preset, case="paper", compiled=False, workload="skew29")
        step, largest = (found(preset, level=level, workload="skew29") for level in ("model", "largest"))
        lines.append(
            (
                preset,
                percent(forward),
                change(ours, "speedup"),
                percent(energy),
                change(ours, "joules_ratio"),
                percent(training),
                change(step, "speedup"),
                change(largest, "speedup"),
                percent(memory) or "larger micro-batch",
                change(step, "peak_ratio"),
            )
        )
    head = ("model", "forward: theirs", "ours", "energy a token: theirs", "ours", "training: theirs", "ours")
    return _lines((*head, "ours, largest batches", "peak memory: theirs", "ours"), lines)


def _grid(rows: list[Row], sizes: Sequence[int], *, frozen: bool = False) -> list[str]:
    """Workloads down, tokens across; the last row of several counts. ``frozen``: where a row has that."""

    def cell(row: Row) -> str:
        of = "_frozen" if frozen and "speedup_frozen" in row else ""
        called = row.get(f"speedup_called{of}")
        return f"{row[f'speedup{of}']:.2f}x" + ("" if called is None else f", called {called:.2f}x") + _over_fp8(row)

    found = {(r["workload"], r["M"]): cell(r) for r in rows}
    names = {r["workload"]: f"{re.sub(r'[a-z]+', '', r['workload'])} of {r['F']}" for r in rows if r["M"] in sizes}
    head = ("active neurons a token", f"{sizes[0]} token{'s' if sizes[0] > 1 else ''}", *map(str, sizes[1:]))
    return _lines(head, ((names[w], *(found.get((w, M), "") for M in sizes)) for w in names))


def _readme_gpu(rows: list[Row]) -> list[str]:
    layers = [r for r in rows if _is_layer(r)]
    least, most = (f(r["mean_active"] for r in layers) for f in (min, max))
    name = f"{len(layers)} layers of a trained model ({least:.0f} to {most:.0f} active), mean"
    lines = _grid([r for r in rows if not _is_layer(r)], (4096, 16384, 131072))
    return [*lines, f"| {name} | | {_mean_speedup(layers):.2f}x | |"]


def _readme_models(rows: list[Row]) -> list[str]:
    """Whole models, then training of one FFN and of a model: one line each; of shapes of a model one line for all."""
    has_calls = _any_has(rows, "speedup_called")

    def line(row: Row) -> tuple[str, str, str, str]:
        if row["bench"] == "model":
            energy = f"{row['joules_ratio']:.2f}x" if row["joules_ratio"] else ""
            return f"forward of a model, {_how(row)}, {row['workload']}", f"{row['speedup']:.2f}x", "", energy
        if row["bench"] == "generate":
            return f"model.generate, {row['preset']}, {row['workload']}", "", "", ""
        if row["bench"] == "decode":
            of = row["joules_per_token"]
            energy = f"{of['sparse'] / of['dense']:.2f}x" if of["sparse"] else ""
            in_fp8 = f", FP8 {row['speedup_fp8']:.2f}x" if "speedup_fp8" in row else ""
            return f"generation, a token of a model, {row['workload']}", f"{row['speedup']:.2f}x{in_fp8}", "", energy
        if row["level"] == "ffn":
            energy = f"{row['joules']['sparse'] / row['joules']['dense']:.2f}x"
            return (
                f"training, one FFN, {_what(row)}, {row['M']} tokens",
                f"{row['speedup']:.2f}x",
                f"{row['memory']['ratio']:.2f}x",
                energy,
            )
        what = f"training, a step of a model, {row['workload']}"
        return what, f"{row['speedup']:.2f}x", f"{row['peak_ratio']:.2f}x", f"{row['joules_ratio']:.2f}x"

    def called(row: Row) -> str:
        frozen = f", frozen {row['speedup_called_frozen']:.2f}x" if "speedup_called_frozen" in row else ""
        return f"{row['speedup_called']:.2f}x{frozen}" if "speedup_called" in row else ""

    def with_calls(cells: tuple[str, ...], as_called: str) -> tuple[str, ...]:
        return (*cells[:2], as_called, *cells[2:]) if has_calls else cells

    in_order = sorted(
        (row for row in rows if not _is_shape(row)),
        key=lambda row: (("model", "generate", "decode", "train").index(row["bench"]), row.get("level") != "ffn"),
    )
    lines = [with_calls(line(row), called(row)) for row in in_order]
    if shapes := [row for row in rows if _is_shape(row)]:
        lines.insert(sum(row["bench"] == "model" for row in in_order), with_calls(_of_shapes(shapes), _range(shapes)))
    return _lines(with_calls(("1.5B shape", "speed", "memory", "energy"), "as called"), lines)


def _of_shapes(rows: list[Row]) -> tuple[str, str, str, str]:
    sizes = sorted({(r["batch"] * r["length"], f"{r['batch']} x {r['length']}") for r in rows})
    first = rows[0]
    what = f"forward, {first['preset']}, {_how(first)}, {sizes[0][1]} to {sizes[-1][1]} tokens, {first['workload']}"
    return what, "", f"{max(r['memory_ratio'] for r in rows):.2f}x", ""


def _range(rows: list[Row]) -> str:
    """Of speedups as called."""
    found = [r["speedup_called"] for r in rows]
    return f"{min(found):.2f}x to {max(found):.2f}x"


def _decode(rows: list[Row]) -> list[str]:
    """Steps of generation."""
    has_fp8, has_both = _any_has(rows, "fp8_ms"), _any_has(rows, "sparse_fp8_ms")
    in_fp8: tuple[str, ...] = ("dense FP8 ms", "FP8 weights ms") if has_fp8 else ()
    in_fp8 += ("sparse FP8 ms", "over dense FP8", "over FP8 weights") if has_both else ()

    def fp8(row: Row) -> tuple[str, ...]:
        ways = [row.get(f"{name}_ms") for name in ("fp8", "fp8_weights")]
        sparse = row.get("sparse_fp8_ms")
        cells = ["" if way is None else _ms(way) for way in (*ways, sparse)]
        # Rounded as a row's speedups are, so that a number is the same in all tables.
        over = ["" if way is None or sparse is None else _speedup(round(way["p50"] / sparse["p50"], 3)) for way in ways]
        return tuple([*cells, *over] if has_both else cells[:2] if has_fp8 else [])

    return _lines(
        ("model", "workload", "sequences", "context", "dense ms", "sparse ms", "tokens/s", "speedup", *in_fp8),
        (
            (
                f"{row['preset']}, {row['dtype']}",
                row["workload"],
                str(row["batch"]),
                str(row["context"]),
                _ms(row["dense_ms"]),
                _ms(row["sparse_ms"]),
                f"{row['tokens_per_second']['dense']} -> {row['tokens_per_second']['sparse']}",
                _speedup(row["speedup"]),
                *fp8(row),
            )
            for row in rows
        ),
    )


def _readme_few(rows: list[Row]) -> list[str]:
    return _grid(rows, (1, 8, 16, 32, 64), frozen=True)


def _readme_cpu(rows: list[Row]) -> list[str]:
    return _grid(rows, (1, 16, 256, 2048), frozen=True)


_RUNS = {
    "silu": "SiLU, no L1",
    "relu-0": "ReLU, l1 0",
    "relu-1e-4": "ReLU, l1 1e-4",
    "relu-4e-4": "**ReLU, l1 4e-4**",
    "relu-1e-3": "ReLU, l1 1e-3",
    "restart": "l1 4e-4, dead neurons restarted",
    "warmup": "l1 4e-4, warmed up",
    "plain": "l1 4e-4, plain FFN (F 3072, same parameters)",
}


def _run(row: Row) -> str:
    name = str(row["name"])
    return _RUNS.get(name, name)


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _active(row: Row) -> str:
    """Active neurons a token of a run."""
    if row.get("active_mean") is None:
        return "all"
    return f"{row['active_mean']:.1f} ({_percent(row['active_share'])})"


def _small(rows: list[Row]) -> list[str]:
    return _lines(
        ("run", "validation loss", "bits per byte", "active", "dead", "silent", "tokens/s"),
        (
            (
                _run(r),
                f"{r['validation_loss']:.3f}",
                f"{r['bits_per_byte']:.4f}",
                _active(r),
                _percent(r.get("dead_share")),
                _percent(r.get("silent_share")),
                f"{r['tokens_per_second'] / 1000:.0f}k",
            )
            for r in rows
        ),
    )


def _convert(rows: list[Row]) -> list[str]:
    """The first row is the model that the others were converted from, or trained beside."""

    def line(row: Row) -> tuple[str, ...]:
        conversion, steps = row.get("conversion"), row["recipe"]["steps"]
        losses = [f"{conversion[name]:.3f}" for name in ("loss_before", "loss_after")] if conversion else ["", ""]
        all_steps = steps + rows[0]["recipe"]["steps"] if conversion else steps
        return str(row["name"]), str(all_steps), *losses, f"{row['validation_loss']:.3f}", _active(row)

    head = ("run", "steps in all", "loss before", "right after", "at the end", "active neurons a token")
    return _lines(head, map(line, rows))


def _targets(rows: list[Row]) -> list[str]:
    def line(row: Row) -> tuple[str, ...]:
        recipe, target = row["recipe"], row.get("target")
        neurons = recipe["intermediate_size"]
        asked, held = "", ""
        if target is None:
            asked = f"constant l1 {recipe['l1']:g}"
        else:
            asked = f"{100 * target['neurons'] / neurons:g} %"
            held = f"{100 * target['least'] / neurons:.2f} to {100 * target['most'] / neurons:.2f} %"
        loss, dead = f"{row['validation_loss']:.3f}", f"{100 * row['dead_share']:.1f} %"
        return asked, str(recipe["steps"]), str(recipe["seed"]), held, f"{100 * row['active_share']:.2f} %", dead, loss

    head = ("asked for", "steps", "seed", "least to most", "active at the end", "dead", "validation loss")
    return _lines(head, map(line, rows))


def _small_layers(rows: list[Row]) -> list[str]:
    head = ("run", *(str(i) for i in range(len(rows[0]["active"]))))
    return _lines(head, ((_run(r), *(f"{n:.0f}" for n in r["active"])) for r in rows))


def _small_text(rows: list[Row]) -> list[str]:
    def last_words(row: Row) -> str:
        of = row["lambada"]
        return f"{100 * of['accuracy']:.2f} ± {100 * of['accuracy_error']:.2f} %"

    return _lines(
        ("run", "WikiText-2 bits per byte", "word perplexity", "LAMBADA last word", "its perplexity"),
        (
            (
                _run(r),
                f"{r['wikitext2']['bits_per_byte']:.3f}",
                f"{r['wikitext2']['word_perplexity']:.0f}",
                last_words(r),
                f"{r['lambada']['perplexity']:.0f}",
            )
            for r in rows
        ),
    )


def _eval(rows: list[Row]) -> list[str]:
    """Accuracies in per cent, losses of texts; differences are paired and bold where they are more than twice their
    error. With FP8 a column for each way to run the model, and how far predictions of the last two agree."""
    Subject = tuple[str, str | None]  # a model, and a way to run it
    found: dict[str, dict[Subject, Row]] = {}  # by task or text

    def subject(of: Row) -> Subject:
        return of["model"], of.get("mode")

    for row in rows:
        found.setdefault(row.get("task") or Path(row.get("file", "mean")).name, {})[subject(row)] = row
    subjects = list(dict.fromkeys(map(subject, rows)))
    against = {subject(row): subject(row["against"]) for row in rows if "against" in row}
    n_models = len({model for model, _ in subjects})

    def cell(of: Row, metric: str, sign: str = "") -> str:
        scale, digits = (1, 4) if metric == "loss" else (100, 2)
        value = round(scale * of[metric], digits) + 0.0  # no -0.00
        return f"{value:{sign}.{digits}f} ± {scale * of[f'{metric}_error']:.{digits}f}"

    def difference(of: Row, metric: str) -> str:
        less, text = of["against"], cell(of["against"], metric, "+")
        text += f" ({100 * less[metric] / (of[metric] - less[metric]):+.2f} %)" if metric == "loss" else ""
        return f"**{text}**" if abs(less[metric]) > 2 * less[f"{metric}_error"] else text

    def name(of: Subject) -> str:
        folder, mode = Path(of[0]), of[1]
        label = (folder.parent if folder.name == "model" else folder).name.replace("l1-", "l1 ")
        return label if mode is None else mode if n_models == 1 else f"{label}, {mode}"

    lines = []
    for task, by_subject in found.items():
        first = by_subject[subjects[0]]
        for metric in ("loss", "acc", "acc_norm"):
            if metric in first:
                scores = (cell(by_subject[each], metric) for each in subjects)
                differences = (difference(by_subject[each], metric) for each in against)
                items = str(first.get("items") or first.get("tokens") or "")
                lines.append((task, metric, items, *scores, *differences))
    compared = (f"{name(each)} less {name(to)}" for each, to in against.items())
    table = _lines(("task", "metric", "items", *map(name, subjects), *compared), lines)
    compared_tokens = [_predictions(row, name(subject(row))) for row in rows if "predictions" in row]
    return [*table, *(line for text in compared_tokens for line in ("", text))]


def _predictions(row: Row, name: str) -> str:
    """How many of the most likely tokens differ, and by how much."""
    of, layers = row["predictions"], f"{row['sparse_layers']} of {row['fp8_layers']}"
    moved = of["moved"] or [0.0]
    return (
        f"{Path(row['file']).name}: {name}, by its kernels in {layers} layers, finds another token most likely than "
        f"{row['against']['mode']} at {of['other']:,} of {of['tokens']:,} places, {of['beyond_rounding']:,} of them "
        f"beyond rounding. Both logits together moved by {moved[len(moved) // 2]:.2g} in the median of these and "
        f"{moved[0]:.2g} at most; the largest logit is {of['largest_logit']:.3g}."
    )


_FFN = "twell bench ffn --device cuda"
_TRAIN = "twell bench train"
_SMALL = "twell train --preset small --compile --data train.u16.xz --validation val.u16 --tokenizer tokenizer.json"
_SWEEP = (
    "twell sweep --preset small --compile --data train.u16 --validation val.u16 --tokenizer tokenizer.json "
    "--out sweep-small --seconds 1.5 --l1 0 --l1 5e-5 --l1 1e-4 --l1 2e-4 --l1 4e-4 --l1 8e-4 --l1 1.5e-3 --l1 3e-3 "
    "--ablation silu --ablation plain --ablation restart "
    "steps=400 sequences_per_step=32 micro_batch=32 eval_every=200 dead_after_tokens=2000000"
)
_EVAL = "twell eval sweep-small/l1-0/model sweep-small/l1-0.0002/model sweep-small/l1-0.0004/model --data tasks/"
_CONVERT = "twell convert SILU/model --relufy --train --data TEXT --out RUN steps=... lr=... l1=..."
_TEXT = "twell eval RUN/model --text wikitext2_raw_test.txt --last-words lambada_test.jsonl"
TABLES = {
    "ffn": Table(("ffn-h200.jsonl",), f"{_FFN} -w skew29 -m 4096 -m 16384 -m 131072", _is_workload, _ffn),
    "ffn-few": Table(
        ("ffn-few-h200.jsonl",),
        f"{_FFN} --graph -w WORKLOAD -m 1 -m 8 ... -m 1024 -m 2048 [-d 4096 -f 14336]",
        _is_workload,
        _ffn_few,
    ),
    "ffn-between-layers": Table(
        ("ffn-few-h200.jsonl",), f"{_FFN} --trace TRACE.npz -m 256 -m 1024", _is_layer, _between_layers
    ),
    "ffn-fp8": Table(("ffn-fp8-h200.jsonl",), f"{_FFN} [--graph] -w skew29 -m 1 ... -m 16384", _is_workload, _in_fp8),
    "ffn-fp8-layers": Table(("ffn-fp8-h200.jsonl",), f"{_FFN} --trace TRACE.npz -m 16384", _is_layer, _in_fp8),
    "ffn-fp8-sweep": Table(
        ("ffn-fp8-sweep-h200.jsonl",),
        f"{_FFN} --no-called [--graph] -w skew100 -w iid29 -w skew300 -w skew2800 -m 1 ... -m 16384",
        _is_any,
        _fp8_grid,
    ),
    "ffn-half": Table(
        ("ffn-half-h200.jsonl",),
        f"{_FFN} --no-called [--graph] -w skew2816 -w skew1126 -w skew563 -w skew282 -m 1 ... -m 16384",
        _is_any,
        _by_share,
    ),
    "ffn-layers": Table(("ffn-h200.jsonl",), f"{_FFN} --trace TRACE.npz", _is_layer, _layers),
    "model": Table(
        ("model-h200.jsonl",),
        "twell bench model --preset 1.5b -w skew29 --paper [--compile]; --batch 32 --trace TRACE.npz; "
        "--depth 16 --shape 1x1 --shape 4x2048 --generate",
        _is_any,
        _model,
    ),
    "train-ffn": Table(
        ("train-h200.jsonl",), f"{_TRAIN} -w skew29 -w skew100 -m 16384 [--plain]", _is_workload, _train_ffn
    ),
    "train-layers": Table(("train-h200.jsonl",), f"{_TRAIN} --trace TRACE.npz -m 16384", _is_layer, _layers),
    "train-step": Table(("train-h200.jsonl",), f"{_TRAIN} --model --batch 17 -w skew29", _is_step, _train_step),
    "train-largest": Table(("train-h200.jsonl",), f"{_TRAIN} --model --largest -w skew29", _is_largest, _largest),
    "paper": Table(
        ("model-h200.jsonl", "train-h200.jsonl"),
        f"twell bench model --paper; {_TRAIN} --model --batch 12; {_TRAIN} --model --largest",
        lambda row: "preset" in row,
        _paper,
    ),
    "small": Table(("train-small.jsonl",), f"{_SMALL} steps=1225 l1=4e-4", _is_any, _small),
    "small-layers": Table(("train-small.jsonl",), f"{_SMALL} steps=1225 l1=4e-4", _counts_neurons, _small_layers),
    "small-text": Table(("train-small.jsonl",), _TEXT, _is_any, _small_text),
    "target-tiny": Table(
        ("target-tiny.jsonl",), "twell train --preset tiny [l1=... | target_active=...]", _is_any, _targets
    ),
    "target-small": Table(("target-small.jsonl",), f"{_SMALL} steps=1225", _is_any, _targets),
    "convert-tiny": Table(("convert-tiny.jsonl",), _CONVERT, _is_any, _convert),
    "convert-small": Table(("convert-small.jsonl",), _CONVERT, _is_any, _convert),
    "sweep": Table(("sweep-small.jsonl",), _SWEEP, _is_any, swept.table),
    "eval": Table(("eval-small.jsonl",), _EVAL, _is_any, _eval),
    "eval-fp8": Table(
        ("eval-fp8-small.jsonl",), "twell eval RUN/model --fp8 --data tasks/ --validation val.u16", _is_any, _eval
    ),
    "readme-gpu": Table(("ffn-h200.jsonl",), f"{_FFN} -w skew29 -m 16384", _is_usual, _readme_gpu),
    "readme-few": Table(
        ("ffn-few-h200.jsonl",), f"{_FFN} --graph -w skew29 -m 1 -m 8 -m 16 -m 32 -m 64", _is_skewed, _readme_few
    ),
    "readme-models": Table(
        ("model-h200.jsonl", "decode-h200.jsonl", "train-h200.jsonl"),
        "twell bench model; twell bench decode --preset 1.5b --compile; twell bench train [--model]",
        _is_of_readme,
        _readme_models,
    ),
    "gpu-decode": Table(
        ("decode-h200.jsonl",),
        "twell bench decode --preset 1.5b -w skew29 --batch 1 --batch 8 --compile",
        _is_any,
        _decode,
    ),
    "cpu-decode": Table(
        ("cpu-decode.jsonl",),
        "twell bench decode --preset 0.5b --context 128 --seconds 10 --device cpu",
        _is_any,
        _decode,
    ),
    "readme-cpu": Table(("cpu-ffn.jsonl",), "make bench", _is_gated_fp32, _readme_cpu),
}
