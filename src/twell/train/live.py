"""A run on one screen: progress, losses and the active neurons of every layer, redrawn a few times a second."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from transformers import TrainerCallback

from twell.train.recipes import Recipe

_GAP = 3  # characters between columns
_OTHER_LINES = 9  # those that do not show layers, on a usual screen
_SPARKS = "▁▂▃▄▅▆▇█"
_FACTS = {  # name on the screen: field of the log, and its form
    "Tokens/s": ("tokens_per_second", ",.0f"),
    "Cross-entropy": ("ce_loss", ".4f"),
    "Validation": ("eval_loss", ".4f"),
    "L1": ("l1", ".3g"),
    "L1 loss": ("l1_loss", ".4g"),
    "Active neurons": ("active_mean", ",.1f"),
    "Dead neurons": ("dead_share", ".1%"),
    "Sparse layers": ("sparse_layers", ".0f"),
    "Learning rate": ("learning_rate", ".3g"),
    "Gradient norm": ("grad_norm", ".3g"),
}


class LiveView(TrainerCallback):
    """Shows a run in the terminal, in the first process only.

    Use it as a context manager around ``trainer.train()``: it then gives the terminal back whatever happens. The last
    picture stays. Another thread draws, so attributes are replaced and never changed in place.
    """

    def __init__(self, recipe: Recipe, console: Console | None = None) -> None:
        self.recipe, self.console = recipe, console or Console()
        times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        columns = (TextColumn("Step"), MofNCompleteColumn(), BarColumn(None), *times)
        self.bar = Progress(*columns, console=self.console, expand=True, speed_estimate_period=600)
        self.task = self.bar.add_task("", total=recipe.steps)
        self.logs: Mapping[str, float] = {}  # the newest value of each
        self.losses: tuple[float, ...] = ()
        self.live = Live(console=self.console, get_renderable=self.draw, refresh_per_second=4)

    def __enter__(self) -> LiveView:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(OSError):  # a closed terminal must not cost the run its model
            self.live.stop()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            self.bar.reset(self.task, total=state.max_steps, completed=state.global_step)
            for entry in state.log_history:  # of a resumed run
                self._take(entry)
            self.live.start(refresh=True)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.bar.update(self.task, completed=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._take(logs or {})

    def _take(self, logs: Mapping[str, Any]) -> None:
        self.logs = {**self.logs, **{key: float(n) for key, n in logs.items() if isinstance(n, int | float)}}
        if "ce_loss" in logs:
            self.losses = (*self.losses, self.logs["ce_loss"])

    def draw(self) -> RenderableType:
        recipe, logs = self.recipe, self.logs
        target = f"L1 {recipe.l1 or 0:g}" if recipe.target_neurons is None else f"target {recipe.target_neurons:.3g}"
        title = (
            f"{recipe.layers} layers of {recipe.intermediate_size:,} neurons, {target}, width {recipe.hidden_size:,}"
        )
        facts = [_fact(name, logs[key], form) for name, (key, form) in _FACTS.items() if key in logs]
        lines: list[RenderableType] = [Text(title, "bold", no_wrap=True), self.bar, Columns(facts, padding=(0, _GAP))]
        if not self.console.options.ascii_only:
            lines.append(Text(sparkline(self.losses, self.console.width), "cyan", no_wrap=True))
        return Group(*lines, self._layers())

    def _layers(self) -> RenderableType:
        """A bar for the active neurons of each layer, in as many columns as the screen needs."""
        logs = self.logs  # of a resumed run in alphabetical order
        active = [logs[f"active/{i}"] for i in range(self.recipe.layers) if f"active/{i}" in logs]
        neurons, largest = self.recipe.intermediate_size, max(filter(math.isfinite, active), default=0.0) or 1.0
        columns = -(-len(active) // max(1, self.console.height - _OTHER_LINES)) or 1
        values = [f"{n:,.1f} {n / neurons:6.1%}" for n in active]
        longest = max(map(len, values), default=0)
        width = max(1, self.console.width // columns - _GAP)
        bar, dash = max(1, width - longest - 4), "-" if self.console.options.ascii_only else "━"
        cells = []
        for i, (n, value) in enumerate(zip(active, values, strict=True)):
            length = round(bar * n / largest) if math.isfinite(n) else 0
            cells.append(Text(f"{i:>2} {dash * length:<{bar}} {value:>{longest}}", no_wrap=True))
        return Columns(cells, padding=(0, _GAP), column_first=True, width=width)


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


def _fact(name: str, value: float, form: str) -> Text:
    return Text.assemble(f"{name} ", (f"{value:{form}}", "bold" if math.isfinite(value) else "bold red"), no_wrap=True)
