"""The live view: it fits the screen, says what was logged, keeps time, and gives the terminal back."""

from __future__ import annotations

import dataclasses
import io
import math
import sys
from typing import Any

import pytest
from rich.console import Console
from transformers import TrainerControl, TrainerState

from twell.train.live import LiveState, LiveView, render, sparkline
from twell.train.recipes import Recipe, tiny, two_b

SCREENS = [(80, 24), (120, 40), (40, 24), (80, 12), (20, 5)]


class Clock:
    now = 1000.0  # not 0: elapsed times are differences

    def __call__(self) -> float:
        return self.now


def logged(recipe: Recipe, **changes: Any) -> dict[str, float]:
    active = {f"active/{i}": recipe.intermediate_size / (2 + i) for i in range(recipe.layers)}
    return {
        "loss": 3.5,
        "ce_loss": 3.25,
        "l1": 2e-5,
        "l1_loss": 617.2,
        "active_mean": 1.0,
        "dead_share": 0.0123,
        "tokens_per_second": 1_312_345.6,
        "learning_rate": 9.95e-4,
        "grad_norm": 0.531,
        **active,
        **changes,
    }


def example(recipe: Recipe, **changes: Any) -> LiveState:
    state = LiveState(recipe=recipe, steps=recipe.steps)
    for step in range(1, 200):
        state = state.after_step(step, 2.0 * step)
        state = state.after_log(step, logged(recipe, ce_loss=3 + 7 / step))
    state = state.after_log(100, {"eval_loss": 3.125}).after_log(199, {"eval_loss": 3.5})
    return dataclasses.replace(state, elapsed=3725.0, **changes)


def picture(state: LiveState, width: int = 80, height: int = 24) -> list[str]:
    """What a terminal of that size would show, line by line."""
    console = Console(record=True, width=width, height=height, force_terminal=True, file=io.StringIO())
    console.print(render(state, width, height))
    return console.export_text().splitlines()


# -- the picture ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("layers", [1, 4, 10, 38])
@pytest.mark.parametrize(("width", "height"), SCREENS)
def test_the_picture_fits_the_screen(width: int, height: int, layers: int, ended: bool) -> None:
    state = example(dataclasses.replace(two_b(), layers=layers), ended=ended)
    lines = picture(state, width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width
    # Nothing was wrapped or cut on the way to the screen: its lines are the picture's own.
    assert lines == render(state, width, height).plain.split("\n")


@pytest.mark.parametrize("layers", [1, 4, 10, 38])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40), (40, 24)])
def test_usual_screens_lose_nothing(width: int, height: int, layers: int) -> None:
    text = "\n".join(picture(example(dataclasses.replace(two_b(), layers=layers)), width, height))
    assert "…" not in text
    for words in (
        f"{layers} layer",
        "target 56.3",
        "199/40,000 steps",
        "Elapsed 1:02:05",
        "1,312,346 tokens/s",
        "Cross-entropy 3.0352",
        "Validation    3.5000 at step 199",
        "best 3.1250 at step 100",
        "L1 term       0.01234 = ",
        "Dead neurons  1.2%",
        "of 5,632 on average",
    ):
        assert words in text


def test_values_of_each_layer_and_bars_in_proportion() -> None:
    recipe = tiny()
    state = example(recipe).after_log(200, {"active/0": 200.0, "active/1": 100.0, "active/2": 1e-3, "active/3": 0.0})
    layers = picture(state)[-4:]
    assert [line.split()[-2:] for line in layers] == [
        ["200.0", "39.1%"],
        ["100.0", "19.5%"],
        ["0.0", "0.0%"],
        ["0.0", "0.0%"],
    ]
    assert layers[0].count("█") == 2 * layers[1].count("█") > 60
    assert "▏" in layers[2] and layers[3].split() == ["3", "0.0", "0.0%"]
    assert len({len(line) for line in layers}) == 1


def test_38_layers_stand_in_columns_or_in_named_groups() -> None:
    state = example(two_b())
    wide = picture(state, 80, 23)
    assert [line.split()[0] for line in wide[-13:]] == [str(i) for i in range(13)]
    assert wide[-1].split()[0] == "12" and " 25 " in wide[-1] and " 37 " in wide[-2]
    narrow = picture(state, 40, 23)
    at = next(i for i, line in enumerate(narrow) if line.startswith("Active neurons, averages of 4 layers"))
    first = sum(5632 / (2 + i) for i in range(4)) / 4
    assert narrow[at + 2].split()[0] == "0-3" and narrow[at + 2].split()[-2] == f"{first:,.0f}"
    assert narrow[-1].split()[0] == "36-37"


def test_the_l1_term_is_that_of_the_log() -> None:
    state = LiveState(recipe=tiny(), steps=300).after_log(50, {"ce_loss": 3.0, "l1_loss": 10.0, "l1": 0.002})
    assert "L1 term       0.02 = coefficient 0.002 x L1 10" in picture(state)
    assert "target 5.12" in picture(state)[0]
    fixed = dataclasses.replace(state, recipe=dataclasses.replace(tiny(), l1=0.004))
    assert "L1 0.004" in picture(fixed)[0]


def test_what_is_missing_is_left_out() -> None:
    bare = LiveState(recipe=tiny(), steps=300)
    assert len(picture(bare)) == 3
    dense = "\n".join(picture(bare.after_log(1, {"ce_loss": 3.0, "grad_norm": 0.5})))
    assert "Cross-entropy 3.0000" in dense and "Gradient norm 0.5" in dense
    for absent in ("Active", "Dead", "L1 term", "Validation", "tokens/s", "left", "Learning"):
        assert absent not in dense
    full = logged(tiny())
    for key in full:
        picture(bare.after_log(1, {k: v for k, v in full.items() if k != key}))
        picture(bare.after_log(1, {key: full[key]}))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite(bad: float) -> None:
    state = example(tiny()).after_log(200, dict.fromkeys(logged(tiny()), bad) | {"eval_loss": bad})
    text = "\n".join(picture(state))
    assert f"Cross-entropy {bad:.4f}" in text
    assert "best 3.1250 at step 100" in text
    assert "?" in sparkline([1.0, bad, 2.0], 10)


def test_zero_active_everywhere() -> None:
    zeros = {f"active/{i}": 0.0 for i in range(4)}
    lines = picture(LiveState(recipe=tiny(), steps=300).after_log(1, zeros))
    assert [line.split() for line in lines[-4:]] == [[str(i), "0.0", "0.0%"] for i in range(4)]


def test_sparkline() -> None:
    assert sparkline([], 10) == "" and sparkline([1.0], 0) == "" and sparkline([1.0], -3) == ""
    assert sparkline([2.0, 2.0], 10) == "▁▁"
    assert sparkline([8.0, 8.0, 1.0, 1.0, 4.5, 4.5], 3) == "█▁▅"  # means of pairs
    assert len(sparkline(range(1000), 37)) == 37


# -- time -------------------------------------------------------------------------------------------------


class Run:
    """Calls a view as the Trainer does."""

    def __init__(self, view: LiveView, *, at: int = 0, steps: int = 100, rank: int = 0, history: Any = ()) -> None:
        self.view, self.control = view, TrainerControl()
        self.state = TrainerState(
            global_step=at, max_steps=steps, log_history=list(history), is_world_process_zero=rank == 0
        )

    def __getattr__(self, event: str) -> Any:
        return lambda **kwargs: getattr(self.view, event)(None, self.state, self.control, **kwargs)

    def step(self, clock: Clock, seconds: float, logs: dict[str, Any] | None = None) -> None:
        clock.now += seconds
        self.state.global_step += 1
        self.on_step_end()
        if logs is not None:
            self.on_log(logs=logs)


def make_view(recipe: Recipe | None = None, width: int = 80, height: int = 24) -> tuple[LiveView, Clock, io.StringIO]:
    clock, file = Clock(), io.StringIO()
    console = Console(width=width, height=height, force_terminal=True, file=file, _environ={"TERM": "xterm"})
    return LiveView(recipe or tiny(), console, clock=clock), clock, file


def times(view: LiveView) -> str:
    return view._draw().plain.split("\n")[2]


def test_time_left_is_of_the_steps_after_the_first() -> None:
    view, clock, _ = make_view()
    with view:
        run = Run(view)
        run.on_train_begin()
        assert times(view) == "Elapsed 0:00:00"
        run.step(clock, 60)  # compiles
        assert times(view) == "Elapsed 0:01:00 · about 1:39:00 left"
        for _ in range(9):
            run.step(clock, 2)
        assert view.state.seconds_left == 90 * 2
        clock.now += 5  # within a step only the first moves
        assert times(view) == "Elapsed 0:01:23 · about 0:03:00 left"
        run.state.global_step = 100
        run.on_step_end()
        assert view.state.seconds_left == 0


def test_a_resumed_run_keeps_time_from_where_it_resumed_and_remembers_its_log() -> None:
    history = [
        {"step": 80, "ce_loss": 5.0, "tokens_per_second": 7.0},
        {"step": 80, "eval_loss": 4.0},
        {"step": 90, "ce_loss": 4.5, "active/0": 12.0},
    ]
    view, clock, _ = make_view()
    with view:
        run = Run(view, at=90, history=history)
        run.on_train_begin()
        assert view.state.seconds_left is None and " 90/100 steps  90%" in view._draw().plain
        for _ in range(3):
            run.step(clock, 10)
        assert times(view) == "Elapsed 0:00:30 · about 0:01:10 left"
        run.on_log(logs={"eval_loss": 4.25})
        assert view.state.losses == (5.0, 4.5)
        assert "4.2500 at step 93 · best 4.0000 at step 80" in view._draw().plain


# -- the terminal -----------------------------------------------------------------------------------------

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


def test_the_last_picture_stays() -> None:
    view, clock, file = make_view()
    run = Run(view, steps=2)
    run.on_train_begin()
    run.step(clock, 1)
    run.step(clock, 1, logged(tiny(), ce_loss=1.75))
    run.on_train_end()
    last = file.getvalue().split("\x1b[2K")[-1]
    assert "1.7500" in last and "Finished in 0:00:02" in last and "2/2 steps 100%" in last
    assert last.endswith(SHOW_CURSOR)
    assert last.count("\n") == len(render(view.state, 80, 23).plain.split("\n"))


def test_close_twice_draws_once() -> None:
    view, _, file = make_view()
    view.close()
    assert file.getvalue() == ""
    Run(view).on_train_begin()
    view.close()
    once = file.getvalue()
    view.close()
    Run(view).on_step_end()
    Run(view).on_log(logs={"ce_loss": 1.0})
    Run(view).on_train_end()
    assert file.getvalue() == once and view.state.losses == ()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_gives_the_terminal_back(error: type[BaseException]) -> None:
    view, clock, file = make_view()
    stdout, stderr = sys.stdout, sys.stderr
    with pytest.raises(error), view:
        run = Run(view)
        run.on_train_begin()
        assert HIDE_CURSOR in file.getvalue() and sys.stdout is not stdout
        run.step(clock, 3)
        raise error
    assert sys.stdout is stdout and sys.stderr is stderr
    assert file.getvalue().endswith(SHOW_CURSOR)
    assert "Stopped after 0:00:03" in file.getvalue()


def test_a_second_run_starts_afresh() -> None:
    view, clock, _ = make_view()
    with view:
        for _ in range(2):
            run = Run(view)
            run.on_train_begin()
            run.step(clock, 5, {"ce_loss": 1.0})
            assert view.state.losses == (1.0,) and times(view).startswith("Elapsed 0:00:05 ")
            run.on_train_end()


def test_a_run_after_one_that_broke_off() -> None:
    view, _, file = make_view()
    stdout = sys.stdout
    with view:
        Run(view).on_train_begin()
        Run(view).on_train_begin()
    assert sys.stdout is stdout and file.getvalue().endswith(SHOW_CURSOR)


def test_other_processes_print_nothing() -> None:
    view, clock, file = make_view()
    with view:
        run = Run(view, rank=1)
        run.on_train_begin()
        run.step(clock, 1, logged(tiny()))
        run.on_train_end()
    assert file.getvalue() == ""


def test_the_view_leaves_a_line_for_the_cursor() -> None:
    view, _, _ = make_view(two_b(), 80, 23)
    with view:
        run = Run(view)
        run.on_train_begin()
        run.on_log(logs=logged(two_b()) | {"eval_loss": 3.0})
        assert len(render(view.state, 80, 23).plain.split("\n")) == 23
        assert len(view._draw().plain.split("\n")) <= 22


def test_a_terminal_that_has_gone_does_not_stop_the_run() -> None:
    class Gone(io.StringIO):
        gone = False

        def write(self, text: str) -> int:
            if self.gone:
                raise OSError(5, "Input/output error")
            return super().write(text)

    file = Gone()
    view = LiveView(tiny(), Console(force_terminal=True, file=file, width=80, height=24))
    Run(view).on_train_begin()
    file.gone = True
    Run(view).on_train_end()


def test_a_terminal_without_unicode_gets_ascii() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="latin-1", write_through=True)
    view = LiveView(tiny(), Console(force_terminal=True, file=file, width=80, height=24))
    with view:
        run = Run(view)
        run.on_train_begin()
        run.on_log(logs=logged(tiny()))
    text = raw.getvalue().decode("ascii")
    assert "0 \x1b[36m####" in text and "4 layers of 512 neurons | target 5.12" in text
