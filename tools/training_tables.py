"""Tables of training runs, conversions and evaluations, as Markdown lines made from rows; for tables.py."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

from speed_tables import Column, Row, lines_of, run_of, table

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


def run(row: Row) -> str:
    name = str(row["name"])
    return _RUNS.get(name, name)


def percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def loss(row: Row) -> str:
    return f"{row['validation_loss']:.3f}"


def active(row: Row) -> str:
    """Active neurons a token."""
    if row.get("active_mean") is None:
        return "all"
    return f"{row['active_mean']:.1f} ({percent(row['active_share'])})"


_REACHED: list[Column] = [
    ("run", run),
    ("validation loss", loss),
    ("bits per byte", lambda row: f"{row['bits_per_byte']:.4f}"),
    ("active", active),
    ("dead", lambda row: percent(row.get("dead_share"))),
]


def runs(rows: list[Row]) -> list[str]:
    columns: list[Column] = [
        *_REACHED,
        ("silent", lambda row: percent(row.get("silent_share"))),
        ("tokens/s", lambda row: f"{row['tokens_per_second'] / 1000:.0f}k"),
    ]
    return table(rows, columns)


def active_by_layer(rows: list[Row]) -> list[str]:
    head = ("run", *(str(i) for i in range(len(rows[0]["active"]))))
    return lines_of(head, ((run(row), *(f"{n:.0f}" for n in row["active"])) for row in rows))


def other_text(rows: list[Row]) -> list[str]:
    def last_words(row: Row) -> str:
        of = row["lambada"]
        return f"{100 * of['accuracy']:.2f} ± {100 * of['accuracy_error']:.2f} %"

    columns: list[Column] = [
        ("run", run),
        ("WikiText-2 bits per byte", lambda row: f"{row['wikitext2']['bits_per_byte']:.3f}"),
        ("word perplexity", lambda row: f"{row['wikitext2']['word_perplexity']:.0f}"),
        ("LAMBADA last word", last_words),
        ("its perplexity", lambda row: f"{row['lambada']['perplexity']:.0f}"),
    ]
    return table(rows, columns)


def conversions(rows: list[Row]) -> list[str]:
    """The first row is the model that the others were converted from, or trained beside."""

    def steps(row: Row) -> str:
        before = rows[0]["recipe"]["steps"] if row.get("conversion") else 0
        return str(before + row["recipe"]["steps"])

    columns: list[Column] = [
        ("run", lambda row: str(row["name"])),
        ("steps in all", steps),
        ("loss before", lambda row: f"{row['conversion']['loss_before']:.3f}" if row.get("conversion") else ""),
        ("right after", lambda row: f"{row['conversion']['loss_after']:.3f}" if row.get("conversion") else ""),
        ("at the end", loss),
        ("active neurons a token", active),
    ]
    return table(rows, columns)


def targets(rows: list[Row]) -> list[str]:
    def share(row: Row, field: str) -> float:
        return float(100 * row["target"][field] / row["recipe"]["intermediate_size"])

    def asked(row: Row) -> str:
        return f"{share(row, 'neurons'):g} %" if row.get("target") else f"constant l1 {row['recipe']['l1']:g}"

    def held(row: Row) -> str:
        return f"{share(row, 'least'):.2f} to {share(row, 'most'):.2f} %" if row.get("target") else ""

    columns: list[Column] = [
        ("asked for", asked),
        ("steps", lambda row: str(row["recipe"]["steps"])),
        ("seed", lambda row: str(row["recipe"]["seed"])),
        ("least to most", held),
        ("active at the end", lambda row: f"{100 * row['active_share']:.2f} %"),
        ("dead", lambda row: percent(row["dead_share"])),
        ("validation loss", loss),
    ]
    return table(rows, columns)


_SMOOTHED = 5  # entries of a log


def durations(log: Sequence[Row]) -> list[float]:
    """Seconds of training, from one entry of a log to the next."""
    tokens = itertools.pairwise([0, *(row["tokens"] for row in log)])
    return [(n - m) / row["tokens_per_second"] for row, (m, n) in zip(log, tokens, strict=True)]


def curves(logs: list[Row]) -> dict[str, list[Row]]:
    """Each run's log; ``took``: an entry's seconds of training, ``seconds``: all up to it.

    >>> entry = {"run": "a", "step": 5, "tokens": 100, "ce_loss": 4.0, "tokens_per_second": 10.0}
    >>> log = [entry, {**entry, "step": 10, "tokens": 300, "tokens_per_second": 20.0}, {"run": "a", "eval_loss": 4.1}]
    >>> [row["seconds"] for row in curves(log)["a"]]
    [10.0, 20.0]
    """
    found: dict[str, list[Row]] = {}
    for row in logs:
        if "ce_loss" in row:
            found.setdefault(row["run"], []).append(row)
    for log in found.values():
        total = 0.0
        for i, took in enumerate(durations(log)):
            total += took
            log[i] = {**log[i], "took": took, "seconds": total}
    return found


def smoothed(log: list[Row]) -> list[float]:
    """Cross-entropy, as a mean over this entry of the log and the four before."""
    return [statistics.fmean(row["ce_loss"] for row in log[max(0, i + 1 - _SMOOTHED) : i + 1]) for i in range(len(log))]


def real_runs(rows: list[Row]) -> list[str]:
    """Runs, and their logs. Losses on the way are compared with those of the first run at its end."""
    summaries, logs = [row for row in rows if "validation_loss" in row], curves(rows)
    goal = smoothed(logs[summaries[0]["name"]])[-1]

    def rate(log: list[Row], first: int = 1) -> str:
        """From entry ``first`` on; the start of a run is not in it."""
        before, last = log[max(first, 1) - 1], log[-1]
        return f"{(last['tokens'] - before['tokens']) / (last['seconds'] - before['seconds']) / 1e3:.1f}k"

    def rate_at_the_target(row: Row) -> str:
        log = logs[row["name"]]
        if (target := row.get("target")) is None:
            return rate(log)
        first = next((i for i, at in enumerate(log) if at["active_mean"] <= 1.1 * target["neurons"]), None)
        return "" if first is None else rate(log, first)

    def minutes_to_goal(row: Row) -> str:
        log = logs[row["name"]]
        there = [at["seconds"] for at, loss_ in zip(log, smoothed(log), strict=True) if loss_ <= goal]
        return f"{there[0] / 60:.2f}" if there else ""

    def energy(row: Row) -> str:
        log = logs[row["name"]]
        return f"{sum(at['watts'] * at['took'] for at in log) / 1e6:.3f}" if all("watts" in at for at in log) else ""

    columns: list[Column] = [
        *_REACHED,
        ("tokens/s", lambda row: rate(logs[row["name"]])),
        ("at the target", rate_at_the_target),
        ("minutes", lambda row: f"{logs[row['name']][-1]['seconds'] / 60:.2f}"),
        (f"minutes to a training loss of {goal:.3f}", minutes_to_goal),
        ("energy, MJ", energy),
        ("peak memory, GB", lambda row: f"{row['peak_gpu_gb']:.1f}"),
    ]
    return table(summaries, columns)


def seeds(rows: list[Row]) -> list[str]:
    """Runs that differ by their seed alone, side by side."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["name"], []).append(row)
    each = list(dict.fromkeys(row["recipe"]["seed"] for row in rows))

    def line(name: str, of: list[Row]) -> list[str]:
        by_seed = {row["recipe"]["seed"]: loss(row) for row in of}
        losses = [row["validation_loss"] for row in of]
        spread = f" ± {statistics.stdev(losses):.3f}" if len(losses) > 1 else ""
        held = [row["target"] for row in of if row.get("target")]
        least_most = f"{min(t['least'] for t in held):.1f} to {max(t['most'] for t in held):.1f}" if held else ""
        return [name, *(by_seed.get(seed, "") for seed in each), f"{statistics.fmean(losses):.3f}{spread}", least_most]

    head = ["run", *(f"seed {seed}" for seed in each), "mean, standard deviation", "active from a third on"]
    return lines_of(head, [line(*item) for item in found.items()])


Subject = tuple[str, str | None]  # a model, and a way to run it


def evaluations(rows: list[Row]) -> list[str]:
    """Accuracies in per cent, losses of texts, and paired differences, bold where they exceed twice their error.

    With FP8 a column for each way to run the model, and how far the predictions of the last two agree.
    """
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
        less = of["against"]
        shown = cell(less, metric, "+")
        shown += f" ({100 * less[metric] / (of[metric] - less[metric]):+.2f} %)" if metric == "loss" else ""
        return f"**{shown}**" if abs(less[metric]) > 2 * less[f"{metric}_error"] else shown

    def name(of: Subject) -> str:
        label, mode = run_of(of[0]).replace("l1-", "l1 "), of[1]
        return label if mode is None else mode if n_models == 1 else f"{label}, {mode}"

    lines = []
    for task, by_subject in found.items():
        first = by_subject[subjects[0]]
        items = str(first.get("items") or first.get("tokens") or "")
        for metric in ("loss", "acc", "acc_norm", "accuracy"):
            if metric in first:
                scores = [cell(by_subject[each], metric) for each in subjects]
                lines.append(
                    [task, metric, items, *scores, *(difference(by_subject[each], metric) for each in against)]
                )
    compared = [f"{name(each)} less {name(to)}" for each, to in against.items()]
    made = lines_of(["task", "metric", "items", *map(name, subjects), *compared], lines)
    agreements = [_agreement(row, name(subject(row))) for row in rows if "predictions" in row]
    return [*made, *(line for agreement in agreements for line in ("", agreement))]


def _agreement(row: Row, name: str) -> str:
    """How many of the most likely tokens differ, and by how much."""
    of, layers = row["predictions"], f"{row['sparse_layers']} of {row['fp8_layers']}"
    moved = of["moved"] or [0.0]
    return (
        f"{Path(row['file']).name}: {name}, by its kernels in {layers} layers, finds another token most likely than "
        f"{row['against']['mode']} at {of['other']:,} of {of['tokens']:,} places, {of['beyond_rounding']:,} of them "
        f"beyond rounding. Both logits together moved by {moved[len(moved) // 2]:.2g} in the median of these and "
        f"{moved[0]:.2g} at most; the largest logit is {of['largest_logit']:.3g}."
    )
