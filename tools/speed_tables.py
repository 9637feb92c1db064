"""Tables of speed, memory and energy, as Markdown lines made from rows of ``twell bench``; for tables.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from statistics import correlation
from typing import Any

from twell.workbench.bench.ffn import DENSE_16_BITS
from twell.workbench.bench.fp8 import NAMES as FP8

Row = dict[str, Any]
Cell = Callable[[Row], str]
Column = tuple[str, Cell]  # head, cell

# -- Lines and cells ------------------------------------------------------------------------------------------


def lines_of(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *(f"| {' | '.join(row)} |" for row in rows)]


def table(rows: Iterable[Row], columns: Sequence[Column]) -> list[str]:
    return lines_of([head for head, _ in columns], ([cell(row) for _, cell in columns] for row in rows))


def bold(value: float | None) -> str:
    return "" if value is None else f"**{value:.2f}x**"


def ratio(field: str) -> Cell:
    return lambda row: bold(row.get(field))


def text(field: str) -> Cell:
    return lambda row: str(row[field])


def milliseconds(spread: dict[str, float] | None, unit: str = "ms") -> str:
    """Median, and half the distance between the 20th and 80th percentile in per cent."""
    if spread is None:
        return ""
    p50, half = spread["p50"], (spread["p80"] - spread["p20"]) / 2
    number = f"{1000 * p50:.1f}" if unit == "us" else f"{p50:.{1 if p50 >= 100 else 2 if p50 >= 10 else 3}f}"
    return f"{number} ±{100 * half / p50:.0f} %"


def time(field: str, unit: str = "ms") -> Cell:
    return lambda row: milliseconds(row.get(field), unit)


def fastest(spreads: Iterable[dict[str, float] | None]) -> dict[str, float] | None:
    return min((spread for spread in spreads if spread), key=lambda spread: spread["p50"], default=None)


def dense(row: Row) -> dict[str, float]:
    """The faster of eager and compiled."""
    found = fastest(row.get(f"{name}_ms") for name in DENSE_16_BITS)
    assert found is not None
    return found


def called(row: Row, ways: Sequence[str]) -> dict[str, float] | None:
    """The fastest of these ways, as called."""
    return fastest(row.get("called_ms", {}).get(way) for way in ways)


def active(row: Row) -> str:
    return f"{row['mean_active']:.0f}"


def called_columns(unit: str, *, frozen: bool = True) -> list[Column]:
    """Calls in a plain loop, the host's time included."""
    return [
        (f"as called: dense {unit}", lambda row: milliseconds(called(row, DENSE_16_BITS), unit)),
        (f"sparse {unit}", lambda row: milliseconds(called(row, ["sparse"]), unit)),
        ("speedup", ratio("speedup_called")),
        *([("frozen", ratio("speedup_called_frozen"))] if frozen else []),
    ]


def fp8_columns(unit: str) -> list[Column]:
    return [
        (f"dense FP8 {unit}", lambda row: milliseconds(fastest(row.get(f"{name}_ms") for name in FP8), unit)),
        ("over FP8", ratio("speedup_over_fp8")),
        (f"sparse FP8 {unit}", time("sparse_fp8_ms", unit)),
        ("over FP8", ratio("speedup_fp8")),
    ]


def workload(row: Row) -> str:
    """A row's workload, and what is unusual about its FFN."""
    notes = [str(row["workload"])]
    notes += ["plain"] if row["kind"] == "plain" else []
    notes += [f"D {row['D']}, F {row['F']}"] if (row["D"], row["F"]) != (2048, 5632) else []
    return ", ".join(notes)


def is_traced_layer(row: Row) -> bool:
    return str(row["workload"]).startswith("layer")


def layer(row: Row) -> str:
    return str(row["workload"]).removeprefix("layer ")


def mean_of(rows: list[Row], field: str) -> float:
    return float(sum(row[field] for row in rows) / len(rows))


# -- One FFN ------------------------------------------------------------------------------------------


def ffn_columns(unit: str) -> list[Column]:
    return [
        ("workload", workload),
        ("tokens", text("M")),
        ("active", active),
        (f"dense {unit}", lambda row: milliseconds(dense(row), unit)),
        (f"sparse {unit}", time("sparse_ms", unit)),
        ("speedup", ratio("speedup")),
        (f"frozen {unit}", time("frozen_ms", unit)),
        ("speedup", ratio("speedup_frozen")),
    ]


def ffn(rows: list[Row]) -> list[str]:
    def memory(row: Row) -> str:
        of = row.get("memory")
        if not of:
            return ""
        beside = of["compiled" if dense(row) == row.get("compiled_ms") else "dense"]
        return f"{beside / 1e6:.0f} -> {of['sparse'] / 1e6:.0f}"

    return table(rows, [*ffn_columns("ms"), *called_columns("ms"), ("memory besides y, MB", memory)])


def few_tokens(rows: list[Row]) -> list[str]:
    return table(rows, [*ffn_columns("us"), *called_columns("us")])


def by_share(rows: list[Row]) -> list[str]:
    """In order of the share of neurons that are silent."""
    in_order = sorted(rows, key=lambda r: (r["M"], -int(r["workload"].removeprefix("skew"))))
    named = [{**r, "workload": f"{100 - 100 * r['mean_active'] / r['F']:.0f} % silent"} for r in in_order]
    return table(named, [*ffn_columns("us"), *fp8_columns("us")])


def layers(rows: list[Row]) -> list[str]:
    """Layers of a trace, and their mean."""
    columns: list[Column] = [
        ("layer", layer),
        ("active", active),
        ("hot", lambda row: str(row["plan"]["hot"])),
        ("dense ms", lambda row: milliseconds(dense(row))),
        ("sparse ms", time("sparse_ms")),
        ("speedup", lambda row: f"{row['speedup']:.2f}x"),
        ("predicted", lambda row: f"{row['plan']['predicted']:.2f}x"),
    ]
    summed = sum(dense(r)["p50"] for r in rows) / sum(r["sparse_ms"]["p50"] for r in rows)
    counts, speedups = [r["mean_active"] for r in rows], [r["speedup"] for r in rows]
    mean = f"{bold(mean_of(rows, 'speedup'))} ({summed:.2f}x of the summed times)"
    lines = [*table(rows, columns), f"| mean | | | | | {mean} | |"]
    if len(set(counts)) > 1 < len(set(speedups)):
        lines += ["", f"Correlation of active neurons and speedup: {correlation(counts, speedups):.2f}"]
    return lines


def by_tokens(rows: list[Row], head: str, name: Cell, cell: Cell, sizes: Sequence[int] = ()) -> list[str]:
    """Names down, numbers of tokens across; of several rows for one place the last counts."""
    sizes = sizes or sorted({row["M"] for row in rows})
    found = {(name(row), row["M"]): cell(row) for row in rows if row["M"] in sizes}
    heads = (head, f"{sizes[0]} token{'s' if sizes[0] > 1 else ''}", *map(str, sizes[1:]))
    names = dict.fromkeys(name for name, _ in found)
    return lines_of(heads, ((name, *(found.get((name, M), "") for M in sizes)) for name in names))


def layers_by_tokens(rows: list[Row]) -> list[str]:
    sizes = sorted({row["M"] for row in rows})
    counts = {layer(row): active(row) for row in rows if row["M"] == sizes[-1]}
    lines = by_tokens(
        rows,
        "layer (active)",
        lambda row: f"{layer(row)} ({counts[layer(row)]})",
        lambda row: f"{row['speedup']:.2f}x",
    )
    means = [bold(mean_of([row for row in rows if row["M"] == M], "speedup")) for M in sizes]
    return [*lines, f"| mean | {' | '.join(means)} |"]


def fp8_by_tokens(rows: list[Row]) -> list[str]:
    """Sparse FP8 over the faster dense FP8."""
    return by_tokens(rows, "workload", text("workload"), lambda row: f"{row['speedup_fp8']:.2f}x")


_IN_FP8: list[Column] = [
    ("tokens", lambda row: f"{row['M']}{', in a CUDA graph' if row.get('graph') else ''}"),
    ("dense us", lambda row: milliseconds(dense(row), "us")),
    ("dense FP8 us", time("fp8_ms", "us")),
    ("FP8 weights us", time("fp8_weights_ms", "us")),
    ("sparse FP8 us", time("sparse_fp8_ms", "us")),
    ("over the faster in FP8", ratio("speedup_fp8")),
    ("over dense", lambda row: f"{dense(row)['p50'] / row['sparse_fp8_ms']['p50']:.2f}x"),
]


def sparse_in_fp8(rows: list[Row]) -> list[str]:
    """Sparse FP8 beside all that is dense."""
    as_called: list[Column] = [
        ("as called: dense FP8 us", lambda row: milliseconds(called(row, FP8), "us")),
        ("sparse FP8 us", lambda row: milliseconds(called(row, ["sparse_fp8"]), "us")),
        ("speedup", ratio("speedup_called_fp8")),
    ]
    return table(rows, [("workload", workload), *_IN_FP8, *as_called])


def layers_in_fp8(rows: list[Row]) -> list[str]:
    mean = f"| mean | | | | | | {bold(mean_of(rows, 'speedup_fp8'))} | |"
    return [*table(rows, [("workload", text("workload")), *_IN_FP8]), mean]


def train_ffn(rows: list[Row]) -> list[str]:
    def joules(row: Row) -> str:
        of = row.get("joules") or {}
        return f"{of['sparse'] / of['dense']:.2f}x" if of.get("sparse") else ""

    columns: list[Column] = [
        ("workload", workload),
        ("tokens", text("M")),
        ("eager ms", time("dense_ms")),
        ("compiled ms", time("compiled_ms")),
        ("sparse ms", time("sparse_ms")),
        ("over eager", ratio("speedup_eager")),
        ("over compiled", ratio("speedup")),
        ("memory", lambda row: f"{row['memory']['ratio']:.2f}x"),
        ("energy", joules),
        *called_columns("ms", frozen=False),
        ("with AdamW's step", ratio("speedup_called_with_step")),
    ]
    return table(rows, columns)


# -- Models ------------------------------------------------------------------------------------------


def how(row: Row) -> str:
    if row["bench"] == "generate":
        return "model.generate"
    return "compiled" if row["compiled"] else "eager"


def model(rows: list[Row]) -> list[str]:
    """Forward passes; ``model.generate`` has no time but that of its call."""

    def energy(row: Row) -> str:
        of = row.get("joules_per_token") or {}
        if of.get("sparse") is None:
            return ""
        return f"{1000 * of['dense']:.2f} -> {1000 * of['sparse']:.2f} ({row['joules_ratio']:.2f}x)"

    def rates(row: Row) -> str:
        if "tokens_per_ms" not in row:
            return ""
        both = [row["tokens_per_ms"][side] for side in ("dense", "sparse")]
        return " -> ".join(f"{rate:.0f}" if both[0] >= 10 else f"{rate:.2g}" for rate in both)

    def tokens(row: Row) -> str:
        return f"{row['batch']} x {row['length']}" + (f" + {row['new_tokens']} new" if "new_tokens" in row else "")

    def of_a_pass(cell: Cell) -> Cell:
        return lambda row: cell(row) if row["bench"] == "model" else ""

    columns: list[Column] = [
        ("model", text("preset")),
        ("activations", text("workload")),
        ("how", how),
        ("tokens", tokens),
        ("dense ms", of_a_pass(time("dense_ms"))),
        ("sparse ms", of_a_pass(time("sparse_ms"))),
        ("tokens/ms", of_a_pass(rates)),
        ("speedup", of_a_pass(ratio("speedup"))),
        ("mJ a token", of_a_pass(energy)),
        *called_columns("ms"),
        ("memory of the model", lambda row: f"{row['memory_ratio']:.3f}x" if row.get("memory_ratio") else ""),
    ]
    return table(rows, columns)


def train_step(rows: list[Row]) -> list[str]:
    def gigabytes(what: str) -> Cell:
        def cell(row: Row) -> str:
            dense, sparse = (row[side]["memory"][what] / 1e9 for side in ("dense", "sparse"))
            return f"{dense:.1f} -> {sparse:.1f} ({sparse / dense:.3f}x)"

        return cell

    columns: list[Column] = [
        ("model", lambda row: str(row.get("preset", f"{row['layers']} layers"))),
        ("workload", text("workload")),
        ("tokens", lambda row: f"{row['batch']} x {row['length']}"),
        ("dense ms", lambda row: milliseconds(row["dense"]["step_ms"])),
        ("sparse ms", lambda row: milliseconds(row["sparse"]["step_ms"])),
        ("speedup", ratio("speedup")),
        ("peak GB", gigabytes("peak")),
        ("of it activations", gigabytes("activations")),
        ("energy", lambda row: f"{row['joules_ratio']:.2f}x" if row.get("joules_ratio") else ""),
    ]
    return table(rows, columns)


_DECODE: list[Column] = [
    ("model", lambda row: f"{row['preset']}, {row['dtype']}"),
    ("workload", text("workload")),
    ("sequences", text("batch")),
    ("context", text("context")),
    ("dense ms", time("dense_ms")),
    ("sparse ms", time("sparse_ms")),
    ("tokens/s", lambda row: f"{row['tokens_per_second']['dense']} -> {row['tokens_per_second']['sparse']}"),
    ("speedup", ratio("speedup")),
]


def decode(rows: list[Row]) -> list[str]:
    """Steps of generation."""
    return table(rows, _DECODE)


def decode_with_fp8(rows: list[Row]) -> list[str]:
    def over(way: str) -> Cell:
        def cell(row: Row) -> str:
            dense, sparse = row.get(f"{way}_ms"), row.get("sparse_fp8_ms")
            # Rounded as a row's speedups are, so that a number is the same in all tables.
            return bold(round(dense["p50"] / sparse["p50"], 3)) if dense and sparse else ""

        return cell

    columns = [
        ("dense FP8 ms", time("fp8_ms")),
        ("FP8 weights ms", time("fp8_weights_ms")),
        ("sparse FP8 ms", time("sparse_fp8_ms")),
        ("over dense FP8", over("fp8")),
        ("over FP8 weights", over("fp8_weights")),
    ]
    return table(rows, [*_DECODE, *columns])


_PAPER = {  # forward, energy a token, training, peak memory: sparse against dense, in per cent
    "0.5b": (17.0, -11.8, -1.5, -19.2),
    "1b": (18.1, -14.6, 7.1, -25.5),
    "1.5b": (18.8, -15.0, 11.6, -28.1),
    "2b": (20.5, -17.0, 21.9, None),  # at a larger micro-batch
}


def paper(rows: list[Row]) -> list[str]:
    """The paper's numbers beside ours; of several rows of a kind the last counts."""

    def percent(value: float | None) -> str:
        return "" if value is None else f"{value:+.1f} %"

    def ours(field: str, preset: str, **wanted: Any) -> str:
        wanted |= {"preset": preset, "workload": "skew29"}
        found = [r for r in rows if all(r.get(k) == v for k, v in wanted.items())]
        return "" if not found or found[-1].get(field) is None else percent(100 * (found[-1][field] - 1))

    lines = []
    for preset, (forward, energy, training, memory) in _PAPER.items():
        as_paper: dict[str, Any] = {"batch": 64, "length": 2048, "compiled": False}
        cells = [preset, percent(forward), ours("speedup", preset, **as_paper)]
        cells += [percent(energy), ours("joules_ratio", preset, **as_paper)]
        cells += [percent(training), ours("speedup", preset, level="model")]
        cells += [percent(memory) or "larger micro-batch", ours("peak_ratio", preset, level="model")]
        lines.append(cells)
    head = ("model", "forward: theirs", "ours", "energy a token: theirs", "ours", "training: theirs", "ours")
    return lines_of((*head, "peak memory: theirs", "ours"), lines)


# -- README ------------------------------------------------------------------------------------------


def speedups(rows: list[Row], *sizes: int, frozen: bool = False) -> list[str]:
    """``frozen``: of a frozen layer, where measured."""

    def cell(row: Row) -> str:
        of = "_frozen" if frozen and "speedup_frozen" in row else ""
        called = row.get(f"speedup_called{of}")
        return f"{row[f'speedup{of}']:.2f}x" + ("" if called is None else f", called {called:.2f}x")

    def name(row: Row) -> str:
        return f"{re.sub(r'[a-z]+', '', row['workload'])} of {row['F']}"

    return by_tokens(rows, "active neurons a token", name, cell, sizes)


def readme_gpu(rows: list[Row]) -> list[str]:
    traced = [r for r in rows if is_traced_layer(r)]
    least, most = (f(r["mean_active"] for r in traced) for f in (min, max))
    name = f"{len(traced)} layers of a trained model ({least:.0f} to {most:.0f} active), mean"
    lines = speedups([r for r in rows if not is_traced_layer(r)], 4096, 16384, 131072)
    return [*lines, f"| {name} | | {mean_of(traced, 'speedup'):.2f}x | |"]


def readme_few(rows: list[Row]) -> list[str]:
    return speedups(rows, 1, 8, 16, 32, 64, frozen=True)


def readme_cpu(rows: list[Row]) -> list[str]:
    return speedups(rows, 1, 16, 256, 2048, frozen=True)


def is_shape(row: Row) -> bool:
    """A row of a model with some of a preset's layers, in one of several shapes."""
    return row["bench"] == "model" and " layers of " in str(row.get("preset"))


def readme_models(rows: list[Row]) -> list[str]:
    """A line for each row of a whole model, then of training; one line for all shapes of a model."""

    def line(row: Row) -> list[str]:
        """What was measured, speed, memory, energy."""
        bench, speed = row["bench"], f"{row.get('speedup', 0):.2f}x"
        if bench == "model":
            energy = f"{row['joules_ratio']:.2f}x" if row["joules_ratio"] else ""
            return [f"forward of a model, {how(row)}, {row['workload']}", speed, "", energy]
        if bench == "generate":
            return [f"model.generate, {row['preset']}, {row['workload']}", "", "", ""]
        if bench == "decode":
            of = row["joules_per_token"]
            speed += f", FP8 {row['speedup_fp8']:.2f}x" if "speedup_fp8" in row else ""
            energy = f"{of['sparse'] / of['dense']:.2f}x" if of["sparse"] else ""
            return [f"generation, a token of a model, {row['workload']}", speed, "", energy]
        if row["level"] == "ffn":
            what = f"training, one FFN, {workload(row)}, {row['M']} tokens"
            energy = f"{row['joules']['sparse'] / row['joules']['dense']:.2f}x"
            return [what, speed, f"{row['memory']['ratio']:.2f}x", energy]
        what = f"training, a step of a model, {row['workload']}"
        return [what, speed, f"{row['peak_ratio']:.2f}x", f"{row['joules_ratio']:.2f}x"]

    def as_called(row: Row) -> str:
        frozen = f", frozen {row['speedup_called_frozen']:.2f}x" if "speedup_called_frozen" in row else ""
        return f"{row['speedup_called']:.2f}x{frozen}" if "speedup_called" in row else ""

    in_order = sorted(
        (row for row in rows if not is_shape(row)),
        key=lambda row: (("model", "generate", "decode", "train").index(row["bench"]), row.get("level") != "ffn"),
    )
    lines = []
    for row in in_order:
        what, speed, memory, energy = line(row)
        lines.append([what, speed, as_called(row), memory, energy])
    if shapes := [row for row in rows if is_shape(row)]:
        first, calls = shapes[0], [row["speedup_called"] for row in shapes]
        sizes = [f"{r['batch']} x {r['length']}" for r in sorted(shapes, key=lambda r: r["batch"] * r["length"])]
        what = f"forward, {first['preset']}, {how(first)}, {sizes[0]} to {sizes[-1]} tokens, {first['workload']}"
        memory = f"{max(row['memory_ratio'] for row in shapes):.2f}x"
        place = sum(row["bench"] == "model" for row in in_order)
        lines.insert(place, [what, "", f"{min(calls):.2f}x to {max(calls):.2f}x", memory, ""])
    return lines_of(["1.5B shape", "speed", "as called", "memory", "energy"], lines)
