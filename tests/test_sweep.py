"""A sweep: variants, going on where it was, the table and the figure."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from twell.train import run as training
from twell.train.data import SAMPLE, read_texts
from twell.train.recipes import Recipe, override, tiny
from twell.workbench import sweep as sweeping
from twell.workbench.bench import timing

MINI = "hidden_size=32 intermediate_size=64 layers=2 heads=2 context=32 vocab_size=300 steps=4 sequences_per_step=4"
HOUSEKEEPING = "micro_batch=4 log_every=2 eval_every=4 save_every=2 dead_after_tokens=64"


VARIANTS = {"l1": [0], "ablations": ["silu", "plain", "restart"], "targets": [0.02]}


@pytest.fixture(scope="module")
def recipe() -> Recipe:
    return override(tiny(), [*MINI.split(" "), *HOUSEKEEPING.split(" ")])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("\n<|endoftext|>\n".join(t[:3000] for t in list(read_texts(SAMPLE))[:8]))
    return path


def run(recipe: Recipe, text: Path, out: Path, todo: dict[str, list[str]]) -> list[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timing, "compare", functools.partial(timing.compare, min_repeats=1, warmups=0))
        quiet: dict[str, Any] = {"say": lambda line: None, "seconds": 0}
        return list(sweeping.sweep(recipe, todo, [text], out, **quiet))


@pytest.fixture(scope="module")
def finished(recipe: Recipe, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sweep of the one run with l1 0."""
    out = tmp_path_factory.mktemp("finished") / "sweep"
    run(recipe, text, out, sweeping.variants(recipe, [0]))
    return out


@pytest.fixture
def out(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "sweep"))


def test_variants(recipe: Recipe) -> None:
    recipes = {
        name: override(recipe, changes)
        for name, changes in sweeping.variants(recipe, **VARIANTS).items()  # type: ignore[arg-type]
    }
    assert list(recipes) == ["target-0.02", "l1-0", "silu", "plain", "restart"]
    assert [of.l1 for of in recipes.values()] == [None, 0, 0, None, None]
    assert recipes["target-0.02"].target_active == 0.02 and recipes["silu"].activation == "silu"
    assert recipes["plain"].intermediate_size == 96 and not recipes["plain"].gated
    assert recipes["restart"].restart_until > 0 == recipes["silu"].restart_every


def test_rows_table_and_figure(recipe: Recipe, text: Path, out: Path) -> None:
    todo = sweeping.variants(recipe, [0], ["silu", "plain"])
    rows = run(recipe, text, out, todo)
    assert [row["sweep"] for row in rows] == ["l1-0", "silu", "plain"]
    assert [row.get("target", {}).get("neurons") for row in rows] == [None, None, 0.96]
    assert rows[1]["speed"] is None and rows[1]["recipe"]["activation"] == "silu"
    for row in (rows[0], rows[2]):
        assert row["speed"]["difference"] < 1e-3 and len(row["speed"]["ffns"]) == 2
    assert [json.loads(line) for line in (out / sweeping.ROWS_FILE).read_text().splitlines()] == rows
    lines = (out / sweeping.TABLE_FILE).read_text().splitlines()
    assert len(lines) == 2 + 3 and f"| l1-0 | {rows[0]['validation_loss']:.3f} | +0.0 % |" in lines[2]
    assert "| silu |" in lines[3] and "| all |" in lines[3]


def test_another_call_keeps_the_rows(recipe: Recipe, text: Path, out: Path) -> None:
    (row,) = run(recipe, text, out, sweeping.variants(recipe, [], ["silu"]))
    rows = [json.loads(line) for line in (out / sweeping.ROWS_FILE).read_text().splitlines()]
    assert [each["sweep"] for each in rows] == ["l1-0", "silu"] and rows[1] == row
    assert len((out / sweeping.TABLE_FILE).read_text().splitlines()) == 2 + 2


def test_a_finished_run_stays_and_a_cut_one_resumes(
    recipe: Recipe, text: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    todo = sweeping.variants(recipe, [0, 1e-2])
    first = json.loads((out / sweeping.ROWS_FILE).read_text())
    started: list[tuple[Path, bool]] = []

    def cut_short(*args: Any, **options: Any) -> Any:
        started.append((args[2], options.get("go_on", False)))
        if len(started) == 1:  # dies after its checkpoint, before its model is saved
            trainer = training.run(*args, **options)
            (args[2] / training.SUMMARY_FILE).unlink()
            assert trainer.state.global_step == 4
            raise KeyboardInterrupt
        return training.run(*args, **options)

    monkeypatch.setattr(sweeping, "run", cut_short)
    with pytest.raises(KeyboardInterrupt):
        run(recipe, text, out, todo)
    assert started == [(out / "l1-0.01", False)]  # the first one was finished
    assert json.loads((out / sweeping.ROWS_FILE).read_text()) == first  # what was done is there
    rows = run(recipe, text, out, todo)
    assert started[1:] == [(out / "l1-0.01", True)]
    assert [row["sweep"] for row in rows] == ["l1-0", "l1-0.01"] and rows[0] == first


def test_a_run_without_a_checkpoint_starts_anew(recipe: Recipe, text: Path, out: Path) -> None:
    whole = json.loads((out / sweeping.ROWS_FILE).read_text())
    folder = out / "l1-0"
    (folder / training.SUMMARY_FILE).unlink()
    (folder / sweeping.SPEED_FILE).unlink()
    for manifest in folder.glob("checkpoint-*/manifest.json"):
        manifest.unlink()
    (folder / training.DATA_FOLDER).mkdir()
    downloaded = folder / training.DATA_FOLDER / "downloaded"
    downloaded.touch()
    (again,) = run(recipe, text, out, sweeping.variants(recipe, [0]))
    assert again["validation_loss"] == pytest.approx(whole["validation_loss"])
    assert downloaded.exists()


def test_other_data_and_another_recipe_in_the_folder_are_refused(recipe: Recipe, text: Path, out: Path) -> None:
    other = out / "other.txt"
    other.write_text(text.read_text())
    with pytest.raises(ValueError, match=r"other data: data .*other.txt.* instead of"):
        run(recipe, other, out, sweeping.variants(recipe, [0]))
    with pytest.raises(ValueError, match=r"another .*recipe .* steps=8 instead of 4"):
        run(override(recipe, ["steps=8"]), text, out, sweeping.variants(recipe, [0]))


@pytest.mark.parametrize(
    ("l1", "ablations", "says"),
    [([], [], "at least one"), ([1e-3, 1e-3], [], "the same l1 twice"), ([0], ["gelu"], "unknown ablation 'gelu'")],
)
def test_what_makes_no_sweep_is_said(l1: list[float], ablations: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        sweeping.variants(tiny(), l1, ablations)
    with pytest.raises(ValueError, match="the same target twice"):
        sweeping.variants(tiny(), [], [], [0.01, 0.01])


def test_every_recipe_is_checked_before_the_first_run(recipe: Recipe, text: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="l1 must be at least 0"):
        run(recipe, text, tmp_path / "sweep", sweeping.variants(recipe, [0, -1.0]))
    assert not (tmp_path / "sweep").exists()
