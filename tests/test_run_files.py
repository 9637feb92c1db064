"""Files of a run: damaged, changed, in use by another process. It goes on as it would have, or says why not."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import Twell
from small_runs import BATCHES, MODEL, mortal_runs, result, write_text
from twell import cpu
from twell.train import files
from twell.train import run as run_module
from twell.train.data import read_texts
from twell.train.files import LOCK_FILE, MANIFEST_FILE, flaw_of_folder, hold, newest_sound
from twell.train.recipe_file import RECIPE_FILE, Saved
from twell.train.recipes import override, tiny
from twell.train.run import SUMMARY_FILE, read_summary, run
from twell.train.tokenizer import train_bpe

OVERRIDES = [*MODEL, *BATCHES, "steps=6", "eval_every=3", "save_every=2", "restart_every=3"]
MINI = override(tiny(), OVERRIDES)

DAMAGES: dict[str, Callable[[Path], Any]] = {
    "deleted": lambda path: path.unlink(),
    "emptied": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "flipped": lambda path: path.write_bytes(flipped(path.read_bytes(), path.stat().st_size // 2)),
    "replaced": lambda path: path.write_bytes(b"{}"),
}


def flipped(content: bytes, where: int) -> bytes:
    return content[:where] + bytes([content[where] ^ 1]) + content[where + 1 :]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text.txt")


@pytest.fixture(scope="module")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An undisturbed run. It keeps the checkpoints of its steps 4 and 6."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    with pytest.MonkeyPatch.context() as m:
        m.setattr(cpu.block, "MIN_WORK", 0)  # as in every test: runs are compared bit by bit
        run(MINI, [text], out, say=lambda line: None)
    return out


@pytest.fixture
def again(whole: Path, tmp_path: Path) -> Path:
    """The same run, killed after its last checkpoint."""
    out = tmp_path / "again"
    shutil.copytree(whole, out)
    (out / SUMMARY_FILE).unlink()
    shutil.rmtree(out / "model")
    return out


def resume(out: Path, data: list[Path] | None = None, **how: Any) -> list[str]:
    """What is said."""
    said: list[str] = []
    run(how.pop("recipe", None), data or [], out, go_on=True, say=said.append, **how)
    return said


# -- damage -----------------------------------------------------------------------------------------------


def test_every_damage_to_every_file_of_a_checkpoint_is_seen(again: Path, whole: Path) -> None:
    newest, before = again / "checkpoint-6", again / "checkpoint-4"
    assert newest_sound(again) == (newest, [])
    names = [path.name for path in newest.iterdir()]
    assert {MANIFEST_FILE, "optimizer.pt", "model.safetensors", "sparsity.pt", "trainer_state.json"} <= set(names)
    for name in names:
        for damage in DAMAGES.values():
            damage(newest / name)
            found, (flaw,) = newest_sound(again)
            unfinished = name == MANIFEST_FILE and not (newest / name).exists()
            says = "was not finished" if unfinished else f"is damaged ({name}"
            assert found == before and flaw.startswith(f"checkpoint-6 {says}")
            shutil.copy(whole / newest.name / name, newest / name)
    assert newest_sound(again)[0] == newest
    manifest = (newest / MANIFEST_FILE).read_bytes()
    for where in range(0, len(manifest), 7):
        (newest / MANIFEST_FILE).write_bytes(flipped(manifest, where))
        assert flaw_of_folder(newest, {"step": 6}), where
    shutil.rmtree(newest)
    shutil.copytree(before, newest)
    assert newest_sound(again)[1] == ["checkpoint-6 is something else (its step is 4)"]


@pytest.mark.parametrize(
    ("name", "how", "says"),
    [
        ("optimizer.pt", "flipped", "optimizer.pt has another checksum"),
        ("trainer_state.json", "replaced", "trainer_state.json has 2 bytes instead of"),
    ],
)
def test_a_damaged_checkpoint_is_skipped_and_written_again(
    name: str, how: str, says: str, again: Path, whole: Path
) -> None:
    DAMAGES[how](again / "checkpoint-6" / name)
    DAMAGES["truncated"](again / "metrics.jsonl")  # made again from the checkpoint
    (line,) = [line for line in resume(again) if "resuming" in line]
    assert line.startswith(f"checkpoint-6 is damaged ({says}")
    assert line.endswith(f"): resuming from {again / 'checkpoint-4'}")
    assert result(again) == result(whole)
    assert newest_sound(again) == (again / "checkpoint-6", [])


def test_the_log_goes_on_where_checkpoints_fall_between_its_entries(text: Path, tmp_path: Path) -> None:
    recipe = dataclasses.replace(MINI, log_every=3, save_every=4, steps=8)
    run(recipe, [text], tmp_path / "through", say=lambda line: None)
    shutil.copytree(tmp_path / "through", tmp_path / "killed")
    shutil.rmtree(tmp_path / "killed/checkpoint-8")
    resume(tmp_path / "killed")
    assert result(tmp_path / "killed") == result(tmp_path / "through")
    assert read_summary(tmp_path / "killed")["target"] == read_summary(tmp_path / "through")["target"]


def test_a_run_without_a_sound_checkpoint_says_so(again: Path) -> None:
    for name in ("checkpoint-4", "checkpoint-6"):
        (again / name / "optimizer.pt").unlink()
    message = r"no sound checkpoint .*: checkpoint-6 is damaged \(optimizer.pt is missing\), checkpoint-4 is damaged"
    with pytest.raises(ValueError, match=message):
        resume(again)


def test_a_run_cut_short_before_its_first_checkpoint_starts_again(again: Path, whole: Path) -> None:
    for name in ("checkpoint-4", "checkpoint-6"):
        (again / name / MANIFEST_FILE).unlink()
    assert any("no finished checkpoint; starting again at step 0" in line for line in resume(again))
    assert result(again) == result(whole)


def test_a_run_killed_as_it_begins_starts_again(
    text: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between its first file and recipe.json there is nothing to resume: the first command works again."""
    out = tmp_path / "run"

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as m:
        m.setattr(Saved, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            run(MINI, [text], out, say=lambda line: None)
    assert (out / "tokenizer").exists()
    with pytest.raises(ValueError, match=r"holds no run to resume: it has no recipe\.json"):
        resume(out)
    run(MINI, [text], out, say=lambda line: None)
    assert result(out) == result(whole)
    (out / RECIPE_FILE).unlink()
    with pytest.raises(ValueError, match="is not empty"):  # there is more in it than a run that never began
        run(MINI, [text], out, say=lambda line: None)


def test_damage_to_the_recipe_or_the_tokenizer_ends_in_one_line(again: Path, whole: Path) -> None:
    for name in (RECIPE_FILE, *(str(p.relative_to(again)) for p in (again / "tokenizer").iterdir())):
        for how, damage in DAMAGES.items():
            damage(again / name)
            expected = "holds no run|is damaged" if how == "deleted" else "is damaged"
            with pytest.raises(ValueError, match=expected):
                resume(again)
            shutil.copy(whole / name, again / name)
    content = (again / RECIPE_FILE).read_bytes()
    for where in range(0, len(content), 5):
        (again / RECIPE_FILE).write_bytes(flipped(content, where))
        with pytest.raises(ValueError, match="is damaged or was edited"):
            Saved.read(again)


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_model_that_cannot_be_written_ends_in_one_line(again: Path, whole: Path, file: str) -> None:
    shutil.copy(whole / SUMMARY_FILE, again / SUMMARY_FILE)  # a finished one, which is none without its model
    (again / "model" / file).mkdir(parents=True)
    with pytest.raises(RuntimeError, match=r"could not write .*model \(disk full\?\): .*directory"):
        resume(again)
    assert not (again / SUMMARY_FILE).exists()
    (again / "model" / file).rmdir()
    resume(again)
    assert result(again) == result(whole)


def test_a_damaged_summary_ends_in_one_line(again: Path) -> None:
    for content in ("", "{}", "[1]", '{"validation_loss": 1'):
        (again / SUMMARY_FILE).write_text(content)
        with pytest.raises(ValueError, match="is damaged: twell train --resume"):
            read_summary(again)


# -- other arguments --------------------------------------------------------------------------------------


def test_changed_data_is_refused_and_moved_data_taken(again: Path, text: Path, tmp_path: Path, whole: Path) -> None:
    moved, other = tmp_path / "moved.txt", tmp_path / "other.txt"
    shutil.copy(text, moved)
    other.write_text(text.read_text().replace("Holmes", "Watson"))
    files = {p: p.read_bytes() for p in again.rglob("*") if p.is_file()}
    with pytest.raises(ValueError, match="the training text is not what the run began with"):
        resume(again, [other])
    with pytest.raises(ValueError, match="the training and validation text is not what"):
        resume(again, validation=[other])
    assert {p: p.read_bytes() for p in again.rglob("*") if p.is_file()} == files
    resume(again, [moved])
    assert result(again) == result(whole)
    assert Saved.read(again).data == [str(moved)]


def test_a_resumed_run_keeps_its_recipe(again: Path, text: Path, tmp_path: Path, twell: Twell) -> None:
    train_bpe(read_texts(text), 280).save_pretrained(tmp_path / "other")
    for args, message in (
        (["lr=0.5"], "keeps its recipe, all but more steps; lr=0.5 instead of 0.003:"),
        (["--preset", "small"], "hidden_size=768 instead of 32, intermediate_size=2048 instead of 64"),
        (["steps=5"], "is one of 6 steps: resumed, it may train longer, not for 5"),
        (["--tokenizer", str(tmp_path / "other")], "keeps its tokenizer"),
        (["l1=nan"], "l1 must be a finite number"),
        (["--lora", "4"], "--lora is not for --resume: a resumed run keeps its adapters"),
    ):
        outcome = twell("train", "--resume", "--out", str(again), *args)
        assert outcome.returncode == 2 and message in outcome.stderr, outcome
    assert not (again / SUMMARY_FILE).exists()


def test_a_finished_run_trains_longer(text: Path, again: Path, whole: Path, twell: Twell) -> None:
    shutil.copy(whole / SUMMARY_FILE, again / SUMMARY_FILE)
    outcome = twell("train", "--resume", "--preset", "tiny", "--out", str(again), *OVERRIDES, "steps=8", "--json")
    assert outcome.returncode == 0, outcome
    assert json.loads(outcome.stdout)["recipe"]["steps"] == 8
    rows = [json.loads(line) for line in (again / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "ce_loss" in row] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [row["step"] for row in rows if "eval_loss" in row] == [3, 6, 8]
    assert Saved.read(again).recipe == dataclasses.replace(MINI, steps=8)


# -- one at a time, and interrupted -----------------------------------------------------------------------


def test_a_folder_serves_one_process_at_a_time(again: Path, tmp_path: Path) -> None:
    with hold(again):
        with pytest.raises(ValueError, match=rf"again is in use by process {os.getpid()} on .*: wait for its end"):
            resume(again)
        assert not (again / SUMMARY_FILE).exists()
    with hold(again):
        pass
    with hold(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()  # nothing was written there


def test_the_lock_of_a_dead_process_is_taken_over(tmp_path: Path) -> None:
    if (child := os.fork()) == 0:
        with hold(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert f"process {child} on" in (tmp_path / LOCK_FILE).read_text()
    with hold(tmp_path):
        assert f"process {os.getpid()} on" in (tmp_path / LOCK_FILE).read_text()


def test_without_locks_a_dead_process_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: Any) -> None:
        raise OSError(errno.ENOSYS, "function not implemented")  # as some network file systems say

    monkeypatch.setattr(files.fcntl, "flock", no_locks)
    if (child := os.fork()) == 0:
        with hold(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with hold(tmp_path):
        pass


def test_an_interrupted_run_says_how_to_go_on(
    text: Path, tmp_path: Path, whole: Path, twell: Twell, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "my run"
    with mortal_runs(monkeypatch):
        outcome = twell("train", "--data", str(text), "--out", str(out), *OVERRIDES)
    command = f"train --resume --out '{out}'"
    assert outcome.returncode == 130
    assert f"twell: to go on from checkpoint-4: twell {command}\n" in outcome.stderr
    assert twell("train", "--resume", "--out", str(out)).returncode == 0
    assert result(out) == result(whole)
    assert "nothing was written yet" in run_module.how_to_go_on(tmp_path / "none")
