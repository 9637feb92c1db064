"""A run on one screen: progress, losses and the active neurons of every layer, redrawn a few times a second.

``LiveView`` gathers what the Trainer reports; ``render`` turns that into a picture and does nothing else.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text
from transformers import TrainerCallback

from twell.train.recipes import Recipe

REDRAWS_PER_SECOND = 4

_LABEL = 14  # columns of the names of numbers
_GAP = 3  # columns between cells side by side
_SHORTEST_BAR = 6
_SPARKS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▏▎▍▌▋▊▉"
# One character for one, so that nothing moves.
_ASCII = str.maketrans(_SPARKS + _EIGHTHS + "━─·…", "_.-:=+*#" + " #######" + "=-|.")


@dataclass(frozen=True, kw_only=True)
class LiveState:
    """What there is to show. Times are seconds since this process began to train."""

    recipe: Recipe
    steps: int
    start_step: int = 0  # where this process began: not 0 when it resumed
    step: int = 0
    elapsed: float = 0.0
    first_step_at: float = 0.0  # when this process finished its first step
    last_step_at: float = 0.0
    logs: Mapping[str, float] = field(default_factory=dict)  # the newest value of each
    losses: tuple[float, ...] = ()  # every cross-entropy logged
    validation: tuple[float, int] | None = None  # the last, and its step
    best: tuple[float, int] | None = None
    ended: bool = False

    @property
    def seconds_left(self) -> float | None:
        """By the pace of this process. The first step, which compiles and loads, counts only while it is alone."""
        done = self.step - self.start_step
        if done < 1:
            return None
        pace = self.last_step_at if done == 1 else (self.last_step_at - self.first_step_at) / (done - 1)
        return pace * max(0, self.steps - self.step)

    @property
    def active(self) -> list[float]:
        """Mean active neurons per token of each layer; empty where nothing counts them."""
        layers = sorted(int(key.removeprefix("active/")) for key in self.logs if key.startswith("active/"))
        return [self.logs[f"active/{layer}"] for layer in layers]

    def after_step(self, step: int, now: float) -> LiveState:
        first = now if self.step == self.start_step else self.first_step_at
        return replace(self, step=step, first_step_at=first, last_step_at=now)

    def after_log(self, step: int, logs: Mapping[str, Any]) -> LiveState:
        numbers = {key: float(value) for key, value in logs.items() if isinstance(value, int | float)}
        state = replace(self, logs={**self.logs, **numbers})
        if "ce_loss" in numbers:
            state = replace(state, losses=(*self.losses, numbers["ce_loss"]))
        if "eval_loss" in numbers:
            last = (numbers["eval_loss"], step)
            better = math.isfinite(last[0]) and (self.best is None or last[0] < self.best[0])
            state = replace(state, validation=last, best=last if better else self.best)
        return state


class LiveView(TrainerCallback):
    """Shows a run in the terminal, in the first process only.

    Use it as a context manager around ``trainer.train()``, so that the terminal is given back whatever happens; the
    last picture stays.
    """

    def __init__(
        self, recipe: Recipe, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.console = console or Console()
        self.clock = clock
        # Never changed, only replaced: another thread draws it.
        self.state = LiveState(recipe=recipe, steps=recipe.steps)
        self._began = 0.0
        self._live: Live | None = None

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Draw the last picture and give the terminal back; the second time does nothing."""
        live, self._live = self._live, None
        if live is not None:
            self.state = replace(self.state, ended=True)
            with contextlib.suppress(OSError):  # a terminal that has gone must not cost the run its model
                live.stop()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.close()
        self._began = self.clock()
        recipe, step = self.state.recipe, state.global_step
        self.state = LiveState(recipe=recipe, steps=state.max_steps or recipe.steps, start_step=step, step=step)
        for entry in state.log_history:  # of a resumed run; only its speed is no longer true
            self.state = self.state.after_log(
                entry["step"], {k: v for k, v in entry.items() if k != "tokens_per_second"}
            )
        self._live = Live(
            console=self.console, get_renderable=self._draw, refresh_per_second=REDRAWS_PER_SECOND, transient=False
        )
        self._live.start(refresh=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._live is not None:
            self.state = self.state.after_step(state.global_step, self.clock() - self._began)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self._live is not None and logs:
            self.state = self.state.after_log(state.global_step, logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def _draw(self) -> Text:
        width, height = self.console.size
        # A line less than there are: the cursor goes below the last picture, and would push its title out.
        picture = render(replace(self.state, elapsed=self.clock() - self._began), width, max(1, height - 1))
        if self.console.options.ascii_only:
            picture.plain = picture.plain.translate(_ASCII)
        return picture


# ---------------------------------------------------------------------------------------------------------
# the picture
# ---------------------------------------------------------------------------------------------------------


def render(state: LiveState, width: int, height: int) -> Text:
    """The picture, at most ``width`` x ``height`` characters."""
    lines = [_title(state.recipe, width), _progress(state, width), *_times(state, width)]
    if numbers := _numbers(state, width):
        lines += [Text(), *numbers]
    if layers := _layers(state.active, state.recipe.intermediate_size, width, height - len(lines) - 1):
        lines += [Text(), *layers]
    del lines[height:]
    for line in lines:
        line.rstrip()
        line.truncate(width, overflow="ellipsis")
    return Text("\n", no_wrap=True, end="").join(lines)


def _title(recipe: Recipe, width: int) -> Text:
    plural = "" if recipe.layers == 1 else "s"
    parts = [
        f"{recipe.layers} layer{plural} of {recipe.intermediate_size:,} neurons",
        f"L1 {recipe.l1:g}" if (target := recipe.target_neurons) is None else f"target {target:.3g}",
        f"model width {recipe.hidden_size:,}",
        "gated" if recipe.gated else "not gated",
    ]
    while len(parts) > 1 and len(" · ".join(parts)) > width:
        parts.pop()
    return Text(" · ".join(parts), style="bold")


def _progress(state: LiveState, width: int) -> Text:
    share = min(1.0, state.step / state.steps)
    steps = f"{state.steps:,}"
    text = f"  {state.step:>{len(steps)},}/{steps} steps {math.floor(share * 100):>3}%"
    room = max(0, width - len(text))
    full = math.floor(share * room)
    return Text.assemble(("━" * full, "green"), ("─" * (room - full), "dim"), text)


def _times(state: LiveState, width: int) -> list[Text]:
    if state.ended:
        parts = [f"{'Finished in' if state.step >= state.steps else 'Stopped after'} {_duration(state.elapsed)}"]
    else:
        parts = [f"Elapsed {_duration(state.elapsed)}"]
        if (left := state.seconds_left) is not None:
            parts.append(f"about {_duration(left)} left")
    if "tokens_per_second" in state.logs:
        parts.append(f"{state.logs['tokens_per_second']:,.0f} tokens/s")
    return _flow([Text(part) for part in parts], width)


def _numbers(state: LiveState, width: int) -> list[Text]:
    logs, recipe = state.logs, state.recipe
    rows = []
    if "ce_loss" in logs:
        row = _named("Cross-entropy", logs["ce_loss"], ".4f")
        row.append("  ").append(sparkline(state.losses, width - len(row)), "cyan")
        rows.append(row)
    if state.validation is not None:
        loss, step = state.validation
        parts = [_named("", loss, ".4f").append(f" at step {step:,}")[_LABEL:]]
        if state.best == state.validation:
            parts.append(Text("best so far"))
        elif state.best is not None:
            parts.append(Text(f"best {state.best[0]:.4f} at step {state.best[1]:,}"))
        lines = _flow(parts, width - _LABEL)
        names = ["Validation"] + [""] * (len(lines) - 1)
        rows += [Text(f"{name:<{_LABEL}}") + line for name, line in zip(names, lines, strict=True)]

    cells = []
    if "l1_loss" in logs and "l1" in logs:
        coefficient = logs["l1"]
        factors = f" = coefficient {coefficient:.3g} x L1 {logs['l1_loss']:.4g}"
        if _LABEL + len(factors) + 7 > width:
            factors = f" = {coefficient:.3g} x {logs['l1_loss']:.4g}"
        cells.append(_named("L1 term", coefficient * logs["l1_loss"], ".4g").append(factors))
    if "dead_share" in logs:
        cells.append(_named("Dead neurons", logs["dead_share"], ".1%"))
    if logs.get("sparse_layers"):
        cells.append(_named("Sparse path", logs["sparse_layers"], ".0f").append(f" of {recipe.layers} layers"))
    others = []
    if "learning_rate" in logs:
        others.append(_named("Learning rate", logs["learning_rate"], ".3g"))
    if "grad_norm" in logs:
        others.append(_named("Gradient norm", logs["grad_norm"], ".3g"))
    return rows + (_side_by_side(cells, others, width) or cells)


def _layers(active: Sequence[float], neurons: int, width: int, height: int) -> list[Text]:
    """A bar a layer, in as many columns as they need; where even those do not fit, a bar for several layers."""
    if not active:
        return []
    average = f"{_mean(active):,.1f} of {neurons:,} on average ({_mean(active) / neurons:.1%})"
    digits = 1 if max(active) < 1000 else 0
    for size in range(1, len(active) + 1):
        means = [_mean(active[i : i + size]) for i in range(0, len(active), size)]
        name = "Active neurons per token, by layer" if size == 1 else f"Active neurons, averages of {size} layers"
        heading = _flow([Text.assemble((name, "bold")), Text(average)], width)
        labels = [_span(i, min(i + size, len(active)) - 1) for i in range(0, len(active), size)]
        counts = [f"{mean:,.{digits}f}" for mean in means]
        shares = [f"{mean / neurons:.1%}" for mean in means]
        label, count, share = (max(map(len, texts)) for texts in (labels, counts, shares))
        fixed = label + count + share + 3
        rows = height - len(heading)
        columns = math.ceil(len(means) / rows) if rows > 0 else len(means)
        bar = (width - _GAP * (columns - 1)) // columns - fixed
        if rows > 0 and bar >= _SHORTEST_BAR:
            break
    else:
        return []
    largest = max((mean for mean in means if math.isfinite(mean)), default=0.0)
    cells = [
        Text.assemble(
            f"{labels[i]:>{label}} ",
            (f"{_bar(means[i], largest, bar):<{bar}}", "cyan"),
            f" {counts[i]:>{count}} {shares[i]:>{share}}",
        )
        for i in range(len(means))
    ]
    down = math.ceil(len(cells) / columns)
    return heading + [Text(" " * _GAP).join(cells[row::down]) for row in range(down)]


def _bar(value: float, largest: float, width: int) -> str:
    """To an eighth of a character; what is not zero shows."""
    if not (math.isfinite(value) and value > 0 and largest > 0):
        return ""
    eighths = max(1, round(value / largest * width * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()


def sparkline(values: Sequence[float], width: int) -> str:
    """``values`` from the lowest to the highest in at most ``width`` characters: means where there are more of them.

    >>> sparkline([9, 5, 3, 2, 2], 10), sparkline(range(80), 8)
    ('█▄▂▁▁', '▁▂▃▄▅▆▇█')
    """
    n = min(len(values), max(0, width))
    points = [_mean(values[len(values) * i // n : len(values) * (i + 1) // n]) for i in range(n)]
    finite = [point for point in points if math.isfinite(point)]
    if not finite:
        return ""
    low, high = min(finite), max(finite)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((p - low) * scale)] if math.isfinite(p) else "?" for p in points)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


def _named(name: str, value: float, form: str) -> Text:
    return Text.assemble(f"{name:<{_LABEL}}", (f"{value:{form}}", "bold" if math.isfinite(value) else "bold red"))


def _flow(parts: Sequence[Text], width: int) -> list[Text]:
    """Parts one after the other, those that no longer fit on the next line."""
    lines = [parts[0]]
    for part in parts[1:]:
        if len(lines[-1]) + 3 + len(part) <= width:
            lines[-1] = lines[-1] + " · " + part
        else:
            lines.append(part)
    return lines


def _side_by_side(left: Sequence[Text], right: Sequence[Text], width: int) -> list[Text]:
    """Two columns; nothing where they do not fit."""
    column = max(map(len, left), default=-_GAP) + _GAP
    if column + max(map(len, right), default=0) > width:
        return []
    rows = []
    for a, b in itertools.zip_longest(left, right, fillvalue=Text()):
        row = a.copy()
        row.pad_right(column - len(a))
        rows.append(row.append_text(b))
    return rows
