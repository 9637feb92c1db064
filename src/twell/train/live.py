"""A run on one screen: progress, losses and the active neurons of every layer, redrawn a few times a second."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text
from transformers import TrainerCallback

from twell.train.recipes import Recipe

REDRAWS_PER_SECOND = 4
_GAP = 3  # characters between columns
_SPARKS = "▁▂▃▄▅▆▇█"


class LiveView(TrainerCallback):
    """Shows a run in the terminal, in the first process only.

    Use it as a context manager around ``trainer.train()``: it then gives the terminal back whatever happens. The last
    picture stays. Another thread draws, so attributes are replaced and never changed in place.
    """

    def __init__(
        self, recipe: Recipe, console: Console | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.recipe, self.console, self.clock = recipe, console or Console(), clock
        self._live: Live | None = None
        self._begin(0, recipe.steps)

    def _begin(self, step: int, steps: int) -> None:
        self.start_step = self.step = step  # not 0 in a resumed run
        self.steps, self.start = steps, self.clock()
        self.first_done = self.last_done = self.start  # when this process finished its first and its last step
        self.logs: Mapping[str, float] = {}  # the newest value of each
        self.losses: tuple[float, ...] = ()
        self.validation: tuple[float, int] | None = None  # the last loss, and its step
        self.best: tuple[float, int] | None = None

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Draw the last picture and give the terminal back; a second call does nothing."""
        live, self._live = self._live, None
        if live is not None:
            with contextlib.suppress(OSError):  # a closed terminal must not cost the run its model
                live.stop()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if not state.is_world_process_zero:
            return
        self.close()
        self._begin(state.global_step, state.max_steps or self.recipe.steps)
        for entry in state.log_history:  # of a resumed run, whose earlier speed no longer counts
            self._take(entry["step"], {k: v for k, v in entry.items() if k != "tokens_per_second"})
        self._live = Live(console=self.console, get_renderable=self.draw, refresh_per_second=REDRAWS_PER_SECOND)
        self._live.start(refresh=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._live is not None:
            self.last_done = self.clock()
            if self.step == self.start_step:
                self.first_done = self.last_done
            self.step = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if self._live is not None and logs:
            self._take(state.global_step, logs)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.close()

    def _take(self, step: int, logs: Mapping[str, Any]) -> None:
        numbers = {key: float(value) for key, value in logs.items() if isinstance(value, int | float)}
        self.logs = {**self.logs, **numbers}
        if "ce_loss" in numbers:
            self.losses = (*self.losses, numbers["ce_loss"])
        if "eval_loss" in numbers:
            self.validation = loss, _ = numbers["eval_loss"], step
            if math.isfinite(loss) and (self.best is None or loss < self.best[0]):
                self.best = self.validation

    @property
    def seconds_left(self) -> float | None:
        """By the pace of this process, without its first step, which compiles and loads."""
        done = self.step - self.start_step - 1
        return (self.last_done - self.first_done) / done * max(0, self.steps - self.step) if done > 0 else None

    # -- the picture ----------------------------------------------------------------------------------------

    def draw(self) -> RenderableType:
        width, height = self.console.size
        ascii_only = self.console.options.ascii_only
        head: list[RenderableType] = [_line(self._title(), "bold")]
        head += [_bar(self.steps, self.step, width), *_flow(self._facts(), width)]
        if not ascii_only:
            head.append(_line(sparkline(self.losses, width), "cyan"))
        used = len(self.console.render_lines(Group(*head), pad=False))
        # One line stays free: the cursor moves below the last picture, and would push its title out.
        return Group(*head, *self._layers(width, height - used - 2))

    def _title(self) -> str:
        recipe, target = self.recipe, self.recipe.target_neurons
        return ", ".join(
            [
                f"{recipe.layers} layer{'' if recipe.layers == 1 else 's'} of {recipe.intermediate_size:,} neurons",
                f"L1 {recipe.l1:g}" if target is None else f"target {target:.3g}",
                f"model width {recipe.hidden_size:,}",
                "gated" if recipe.gated else "not gated",
            ]
        )

    def _facts(self) -> list[Text]:
        logs = self.logs
        facts = [Text(f"Step {self.step:,}/{self.steps:,} ({self.step / self.steps:.0%})")]
        facts.append(Text(f"Elapsed {_duration(self.clock() - self.start)}"))
        if self.seconds_left is not None and self._live is not None:
            facts.append(Text(f"About {_duration(self.seconds_left)} left"))
        if "tokens_per_second" in logs:
            facts.append(Text(f"{logs['tokens_per_second']:,.0f} tokens/s"))
        if "ce_loss" in logs:
            facts.append(_named("Cross-entropy", logs["ce_loss"], ".4f"))
        if self.validation is not None:
            fact = _named("Validation", self.validation[0], ".4f").append(f" at step {self.validation[1]:,}")
            if self.best is not None and self.best != self.validation:
                fact.append(f", best {self.best[0]:.4f} at {self.best[1]:,}")
            facts.append(fact)
        if "l1_loss" in logs and "l1" in logs:
            l1, total = logs["l1"], logs["l1_loss"]
            facts.append(_named("L1 term", l1 * total, ".4g").append(f" = {l1:.3g} x {total:.4g}"))
        if logs.get("sparse_layers"):
            facts.append(_named("Sparse path", logs["sparse_layers"], ".0f").append(f" of {self.recipe.layers} layers"))
        forms = {"dead_share": ".1%", "learning_rate": ".3g", "grad_norm": ".3g"}
        names = {"dead_share": "Dead neurons", "learning_rate": "Learning rate", "grad_norm": "Gradient norm"}
        return facts + [_named(names[key], logs[key], form) for key, form in forms.items() if key in logs]

    def _layers(self, width: int, rows: int) -> list[RenderableType]:
        """A bar for the active neurons of each layer, in as many columns as fit into ``rows`` lines."""
        active = [n for key, n in self.logs.items() if key.startswith("active/")]
        if not active or rows < 1:
            return []
        neurons, mean = self.recipe.intermediate_size, sum(active) / len(active)
        largest = max((n for n in active if math.isfinite(n)), default=0.0)
        columns = -(-len(active) // rows)
        cells = [(f"{i}", f"{n:,.1f}", f"{n / neurons:.1%}") for i, n in enumerate(active)]
        texts = sum(max(len(cell[i]) for cell in cells) + 1 for i in range(3))
        bar = (width - _GAP * (columns - 1)) // columns - texts
        if bar < 1:
            return [_line(f"Active neurons per token: {mean:,.1f} of {neurons:,} ({mean / neurons:.1%})")]
        table, down = Table.grid(padding=(0, 1, 0, 0)), -(-len(active) // columns)
        for row in range(down):
            line: list[RenderableType] = []
            for i in range(row, len(active), down):
                label, count, share = (Text(text, justify="right", no_wrap=True) for text in cells[i])
                n = active[i] if math.isfinite(active[i]) else 0.0
                line += [label, ProgressBar(largest or 1.0, n, bar), count, share, Text(" " * (_GAP - 2))]
            table.add_row(*line[:-1])
        heading = f"Active neurons per token, by layer: {mean:,.1f} of {neurons:,} on average ({mean / neurons:.1%})"
        return [_line(heading, "bold"), table]


def sparkline(values: Sequence[float], width: int) -> str:
    """``values`` from the lowest to the highest in at most ``width`` characters: means if there are more values.

    >>> sparkline([9, 5, 3, 2, 2], 10), sparkline(range(80), 8)
    ('█▄▂▁▁', '▁▂▃▄▅▆▇█')
    """
    n = min(len(values), max(0, width))
    parts = [values[len(values) * i // n : len(values) * (i + 1) // n] for i in range(n)]
    points = [sum(part) / len(part) for part in parts]
    finite = [point for point in points if math.isfinite(point)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
    return "".join(_SPARKS[round((p - low) * scale)] if math.isfinite(p) else "?" for p in points)


def _line(text: str, style: str = "") -> Text:
    return Text(text, style=style, no_wrap=True, overflow="ellipsis")


def _bar(total: float, completed: float, width: int) -> Table:
    """A line of its own: rich's bar ends without a new line."""
    line = Table.grid()
    line.add_row(ProgressBar(total, completed, width))
    return line


def _flow(parts: Sequence[Text], width: int) -> list[Text]:
    """Parts one after the other; one that no longer fits begins the next line."""
    lines = [Text(no_wrap=True, overflow="ellipsis")]
    for part in parts:
        if lines[-1] and len(lines[-1]) + _GAP + len(part) > width:
            lines.append(Text(no_wrap=True, overflow="ellipsis"))
        lines[-1].append(" " * _GAP if lines[-1] else "").append_text(part)
    return lines


def _named(name: str, value: float, form: str) -> Text:
    return Text.assemble(f"{name} ", (f"{value:{form}}", "bold" if math.isfinite(value) else "bold red"))


def _duration(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))
