"""The live view: it fits the screen, shows what was logged, and gives the terminal back."""

from __future__ import annotations

import dataclasses
import io
import math
import sys
from typing import Any

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState

from twell.train.live import LiveView, sparkline
from twell.train.recipes import Recipe, override, preset, tiny

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


class Run:
    """A view on a screen of a given size, called as the Trainer calls it."""

    def __init__(self, recipe: Recipe | None = None, width: int = 80, height: int = 24, file: Any = None) -> None:
        self.file = io.StringIO() if file is None else file
        console = Console(width=width, height=height, force_terminal=True, file=self.file, _environ={"TERM": "xterm"})
        self.view = LiveView(recipe or tiny(), console)

    def begin(self, at: int = 0, steps: int = 100, rank: int = 0, history: Any = ()) -> None:
        self.state = TrainerState(
            global_step=at, max_steps=steps, log_history=list(history), is_world_process_zero=rank == 0
        )
        self.view.on_train_begin(None, self.state, TrainerControl())

    def step(self, logs: dict[str, Any] | None = None) -> None:
        self.state.global_step += 1
        self.view.on_step_end(None, self.state, TrainerControl())
        self.log(logs or {})

    def log(self, logs: dict[str, Any]) -> None:
        self.view.on_log(None, self.state, TrainerControl(), logs=logs)

    def picture(self) -> list[str]:
        """What the screen shows, line by line."""
        width, height = self.view.console.size
        console = Console(record=True, width=width, height=height, force_terminal=True, file=io.StringIO())
        console.print(self.view.draw())
        return [line.rstrip() for line in console.export_text().splitlines()]


def logged(recipe: Recipe, **changes: Any) -> dict[str, float]:
    active = {f"active/{i}": recipe.intermediate_size / (2 + i) for i in range(recipe.layers)}
    numbers = {"loss": 3.5, "ce_loss": 3.25, "l1": 2e-5, "l1_loss": 617.2, "active_mean": 1.0, "dead_share": 0.0123}
    numbers |= {"tokens_per_second": 1_312_345.6, "learning_rate": 9.95e-4, "grad_norm": 0.531, "sparse_layers": 1}
    return numbers | active | changes


@pytest.mark.parametrize("layers", [1, 10, 38])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (40, 24), (20, 5)])
def test_the_picture_fits_and_usual_screens_lose_nothing(width: int, height: int, layers: int) -> None:
    recipe = dataclasses.replace(preset("2b"), layers=layers)
    run = Run(recipe, width, height)
    with run.view:
        run.begin(steps=recipe.steps)
        for step in range(1, 200):
            run.step(logged(recipe, ce_loss=3 + 7 / step))
        run.log({"eval_loss": 3.5})
    lines = run.picture()
    assert max(map(len, lines)) <= width
    if width > 40:
        text = "\n".join(lines)
        assert "…" not in text and len(lines) < height  # a line is left for the cursor
        for words in (
            f"{layers} layers of 5,632 neurons, target 56.3, width 2,048",
            "199/40000",
            "Tokens/s 1,312,346",
            "Cross-entropy 3.0352",
            "Validation 3.5000",
            "Sparse layers 1",
            "Dead neurons 1.2%",
            "Learning rate 0.000995",
            "▁",
        ):
            assert words in text
        assert [str(i) in text.split() for i in range(layers)] == [True] * layers


def test_bars_are_in_proportion_and_values_beside_them() -> None:
    run = Run()
    run.begin()
    run.log({"active/0": 200.0, "active/1": 100.0, "active/2": 1e-3, "active/3": math.nan})
    layers = run.picture()[-4:]
    run.view.__exit__()
    shares = [["200.0", "39.1%"], ["100.0", "19.5%"], ["0.0", "0.0%"], ["nan", "nan%"]]
    assert [line.split()[-2:] for line in layers] == shares
    full, half, *none = (line.count("━") for line in layers)
    assert abs(full - 2 * half) <= 1 < half and none == [0, 0] and len({len(line) for line in layers}) == 1


def test_what_is_missing_is_left_out_and_what_is_not_finite_shows() -> None:
    run = Run(dataclasses.replace(tiny(), l1=0.004))
    assert "L1 0.004" in run.picture()[0] and not any("Active" in line for line in run.picture())
    full = logged(tiny())
    with run.view:
        run.begin()
        for bad in (math.nan, math.inf, -math.inf):
            run.log(dict.fromkeys(full, bad) | {"eval_loss": bad})
            assert f"Cross-entropy {bad:.4f}" in "\n".join(run.picture())


def test_a_run_without_l1_is_drawn() -> None:
    assert "L1 0, " in Run(override(tiny(), ["activation=silu"])).picture()[0]


def test_sparkline() -> None:
    assert sparkline([], 10) == "" and sparkline([1.0], 0) == "" and sparkline([1.0], -3) == ""
    assert sparkline([2.0, 2.0], 10) == "▁▁" and "?" in sparkline([1.0, math.nan, 2.0], 10)
    assert sparkline([8.0, 8.0, 1.0, 1.0, 4.5, 4.5], 3) == "█▁▅"  # means of pairs
    assert len(sparkline(range(1000), 37)) == 37


def test_a_resumed_run_remembers_its_log() -> None:
    active = {key: float(key[7:]) for key in sorted(f"active/{i}" for i in range(12))}  # as a checkpoint sorts them
    history = [{"step": 80, "ce_loss": 5.0}, {"step": 90, "ce_loss": 4.5, **active}]
    run = Run(dataclasses.replace(tiny(), layers=12), height=40)
    with run.view:
        run.begin(at=90, history=history)
        run.step()
        assert run.view.losses == (5.0, 4.5) and "91/100" in "\n".join(run.picture())
        assert [line.split()[-2] for line in run.picture()[-12:]] == [f"{i:.1f}" for i in range(12)]


def test_the_last_picture_stays() -> None:
    run = Run()
    with run.view:
        run.begin(steps=2)
        run.step()
        run.step(logged(tiny(), ce_loss=1.75))
    last = run.file.getvalue().split("\x1b[2K")[-1]
    assert "1.7500" in last and "2/2" in last and last.endswith(SHOW_CURSOR)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_gives_the_terminal_back(error: type[BaseException]) -> None:
    run, stdout, stderr = Run(), sys.stdout, sys.stderr
    with pytest.raises(error), run.view:
        run.begin()
        assert HIDE_CURSOR in run.file.getvalue() and sys.stdout is not stdout
        raise error
    assert sys.stdout is stdout and sys.stderr is stderr and run.file.getvalue().endswith(SHOW_CURSOR)


def test_other_processes_print_nothing() -> None:
    run = Run()
    with run.view:
        run.begin(rank=1)
        run.step(logged(tiny()))
    assert run.file.getvalue() == ""


def test_a_closed_terminal_does_not_stop_the_run() -> None:
    class Gone(io.StringIO):
        gone = False

        def write(self, text: str) -> int:
            if self.gone:
                raise OSError(5, "Input/output error")
            return super().write(text)

    run = Run(file=Gone())
    with run.view:
        run.begin()
        run.file.gone = True


def test_a_terminal_without_unicode_gets_ascii() -> None:
    raw = io.BytesIO()
    run = Run(file=io.TextIOWrapper(raw, encoding="latin-1", write_through=True))
    with run.view:
        run.begin()
        run.log(logged(tiny()))
    text = raw.getvalue().decode("ascii")
    assert "4 layers of 512 neurons, target 5.12" in text and "----" in text
