"""Tables of speed, memory and energy, as Markdown lines made from rows of ``twell bench``; for tables.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import correlation
from typing import Any

from twell.workbench.bench.compare import SPEEDUPS
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


def plain(*values: float | None) -> str:
    """Those that are known."""
    return ", ".join(f"{value:.2f}x" for value in values if value is not None)


def speedup(row: Row, field: str = "speedup") -> float | None:
    """A row's speedup, from the times that it was computed from: the row's own is rounded."""
    if row.get(field) is None:
        return None
    dense, sparse = (fastest(_spread(row, name) for name in names) for names in SPEEDUPS[field])
    return row[field] if dense is None or sparse is None else dense["p50"] / sparse["p50"]


def _spread(row: Row, name: str) -> Any:
    """Of a dotted name; None where the row has none."""
    found: Any = row
    for part in name.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found


def ratio(field: str) -> Cell:
    return lambda row: bold(speedup(row, field))


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


OVER_FP8 = "sparse, sparse FP8"
OF_FP8 = ("speedup_over_fp8", "speedup_fp8"), ("speedup_called_over_fp8", "speedup_called_fp8")


def over_fp8(row: Row) -> str:
    """Over the faster dense FP8: sparse in 16 bits, and sparse FP8; where only calls were timed, as called."""
    of_device, of_calls = (plain(*(speedup(row, name) for name in names)) for names in OF_FP8)
    return of_device or of_calls


def fp8_columns(rows: Iterable[Row], unit: str) -> list[Column]:
    """None where no row has FP8."""

    def dense_fp8(row: Row) -> str:
        return milliseconds(fastest(row.get(f"{name}_ms") for name in FP8) or called(row, FP8), unit)

    return [(f"dense FP8 {unit}", dense_fp8), (f"over it: {OVER_FP8}", over_fp8)] if any(map(over_fp8, rows)) else []


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


def mean_of(rows: list[Row], field: str = "speedup") -> float | None:
    """None where a row lacks it."""
    found = [value for value in (speedup(row, field) for row in rows) if value is not None]
    return sum(found) / len(rows) if len(found) == len(rows) else None


def over_fp8_in_mean(rows: list[Row]) -> str:
    return plain(*(mean_of(rows, name) for name in OF_FP8[0]))


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

    columns = [*ffn_columns("ms"), *fp8_columns(rows, "ms"), *called_columns("ms")]
    return table(rows, [*columns, ("memory besides y, MB", memory)])


def few_tokens(rows: list[Row]) -> list[str]:
    return table(rows, [*ffn_columns("us"), *fp8_columns(rows, "us"), *called_columns("us")])


def by_share(rows: list[Row]) -> list[str]:
    """In order of the share of neurons that are silent."""
    in_order = sorted(rows, key=lambda r: (r["M"], -int(r["workload"].removeprefix("skew"))))
    named = [{**r, "workload": f"{100 - 100 * r['mean_active'] / r['F']:.0f} % silent"} for r in in_order]
    return table(named, [*ffn_columns("us"), *fp8_columns(rows, "us")])


def layers(rows: list[Row]) -> list[str]:
    """Layers of a trace, and their mean."""
    in_fp8 = fp8_columns(rows, "ms")
    columns: list[Column] = [
        ("layer", layer),
        ("active", active),
        ("hot", lambda row: str(row["plan"]["hot"])),
        ("dense ms", lambda row: milliseconds(dense(row))),
        ("sparse ms", time("sparse_ms")),
        ("speedup", lambda row: plain(speedup(row))),
        ("predicted", lambda row: f"{row['plan']['predicted']:.2f}x"),
        *in_fp8,
    ]
    summed = sum(dense(r)["p50"] for r in rows) / sum(r["sparse_ms"]["p50"] for r in rows)
    counts, speedups = [r["mean_active"] for r in rows], [r["speedup"] for r in rows]
    mean = f"{bold(mean_of(rows))} ({summed:.2f}x of the summed times) | |"
    mean += f" | {over_fp8_in_mean(rows)} |" if in_fp8 else ""
    lines = [*table(rows, columns), f"| mean | | | | | {mean}"]
    if len(set(counts)) > 1 < len(set(speedups)):
        lines += ["", f"Correlation of active neurons and speedup: {correlation(counts, speedups):.2f}"]
    return lines


def by_tokens(
    rows: list[Row], head: str, name: Cell, cell: Cell, sizes: Sequence[int], fp8: Sequence[int]
) -> list[str]:
    """Names down, numbers of tokens across; of several rows for one place the last counts. ``fp8``: numbers of tokens
    with a column for FP8, where rows have it."""
    columns = [(M, cell, f"{M} token{'s' if M > 1 else ''}" if sizes[0] == M else str(M)) for M in sizes]
    columns += [(M, over_fp8, f"{M}, over dense FP8: {OVER_FP8}") for M in fp8 if any(map(over_fp8, rows))]
    found = {(name(row), title): shown(row) for row in rows for M, shown, title in columns if row["M"] == M}
    titles = [title for *_, title in columns]
    names = dict.fromkeys(name for name, _ in found)
    return lines_of((head, *titles), ((name, *(found.get((name, title), "") for title in titles)) for name in names))


def layers_by_tokens(rows: list[Row]) -> list[str]:
    sizes = sorted({row["M"] for row in rows})
    counts = {layer(row): active(row) for row in rows if row["M"] == sizes[-1]}

    def name(row: Row) -> str:
        return f"{layer(row)} ({counts[layer(row)]})"

    lines = by_tokens(rows, "layer (active)", name, lambda row: plain(speedup(row)), sizes, sizes)
    by_size = [[row for row in rows if row["M"] == M] for M in sizes]
    means = [bold(mean_of(some)) for some in by_size]
    means += [over_fp8_in_mean(some) for some in by_size if any(map(over_fp8, rows))]
    return [*lines, f"| mean | {' | '.join(means)} |"]


def sparse_in_fp8(rows: list[Row]) -> list[str]:
    """Sparse FP8 beside all that is dense."""

    def errors(row: Row) -> str:
        return ", ".join(f"{row['error'][name]:.2g}" for name in ("fp8", "sparse_fp8"))

    columns: list[Column] = [
        ("workload", workload),
        ("tokens", lambda row: f"{row['M']}{', in a CUDA graph' if row.get('graph') else ''}"),
        ("dense us", lambda row: milliseconds(dense(row), "us")),
        ("dense FP8 us", time("fp8_ms", "us")),
        ("FP8 weights us", time("fp8_weights_ms", "us")),
        ("sparse FP8 us", time("sparse_fp8_ms", "us")),
        ("over the faster in FP8", ratio("speedup_fp8")),
        ("over dense", lambda row: f"{dense(row)['p50'] / row['sparse_fp8_ms']['p50']:.2f}x"),
        ("error: dense FP8, sparse FP8", errors),
        ("as called: dense FP8 us", lambda row: milliseconds(called(row, FP8), "us")),
        ("sparse FP8 us", lambda row: milliseconds(called(row, ["sparse_fp8"]), "us")),
        ("speedup", ratio("speedup_called_fp8")),
    ]
    return table(sorted(rows, key=lambda row: row["M"]), columns)


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


def run_of(model: str) -> str:
    """The name of a model's folder; where that is "model", of the run that it is in.

    >>> run_of("runs/my-run/model"), run_of("runs/my-model")
    ('my-run', 'my-model')
    """
    folder = Path(model)
    return (folder.parent if folder.name == "model" else folder).name


def model_name(row: Row) -> str:
    """A preset, or the run that a trained model comes from."""
    return str(row.get("preset") or run_of(row["model"]))


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
        ("model", model_name),
        ("activations", text("workload")),
        ("how", how),
        ("tokens", tokens),
        ("dense ms", of_a_pass(time("dense_ms"))),
        ("sparse ms", of_a_pass(time("sparse_ms"))),
        ("tokens/ms", of_a_pass(rates)),
        ("speedup", of_a_pass(ratio("speedup"))),
        ("mJ a token", of_a_pass(energy)),
        *fp8_columns(rows, "ms"),
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
    ("model", lambda row: f"{model_name(row)}, {row['dtype']}"),
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
            return bold(dense["p50"] / sparse["p50"]) if dense and sparse else ""

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


def served(rows: list[Row]) -> list[str]:
    """``twell serve``: tokens a second, dense and sparse."""
    rates = {(row["model"], row["clients"], row["dense"]): row["tokens_per_second"] for row in rows}
    lines = [
        [
            run_of(name),
            str(clients),
            f"{rates[name, clients, True]} -> {rate}",
            bold(rate / rates[name, clients, True]),
        ]
        for (name, clients, is_dense), rate in rates.items()
        if not is_dense
    ]
    return lines_of(["model", "clients", "tokens/s", "speedup"], lines)
