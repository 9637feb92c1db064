"""Failures of a run: killed at any moment, disk full, wrong input. Nothing is lost, and one line gives the reason."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from command_line import Twell
from small_runs import BATCHES, MODEL, write_text
from twell import cpu
from twell.train.data import read_texts
from twell.train.files import newest_sound
from twell.train.run import read_metrics
from twell.train.tokenizer import train_bpe
from twell.train.trainer import METRICS_FILE

MIN_WORK = cpu.block.MIN_WORK  # as users have it: tests set it to 0
OVERRIDES = [*MODEL, *BATCHES, "steps=12", "eval_every=4", "save_every=3", "restart_every=5"]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text.txt")


def start(*args: str | Path, **options: Any) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "twell", "train", *map(str, args)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        **options,
    )


def kill_when(process: subprocess.Popen, condition: Any) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def steps_so_far(out: Path) -> list[int]:
    """Of whole rows."""
    rows = (out / METRICS_FILE).read_text().splitlines()
    return [json.loads(row)["step"] for row in rows if row.startswith("{") and row.endswith("}")]


def losses(out: Path) -> dict[int, tuple[float, float]]:
    return {int(row["step"]): (row["ce_loss"], row["active_mean"]) for row in read_metrics(out) if "ce_loss" in row}


@pytest.fixture
def train(twell: Twell, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs in this process as ``start`` does in another."""
    monkeypatch.setattr(cpu.block, "MIN_WORK", MIN_WORK)

    def run(*args: str | Path) -> None:
        outcome = twell("train", *map(str, args))
        assert outcome.returncode == 0, outcome.stderr

    return run


def test_killed_runs_go_on_as_if_nothing_had_happened(text: Path, tmp_path: Path, train: Callable[..., None]) -> None:
    """Killed while a checkpoint is being written, and again, once resumed, between two. The first time the log has a
    row later than the checkpoint, and a torn last row."""
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run = start("--preset", "tiny", "--data", text, "--out", killed, *OVERRIDES)
    kill_when(run, lambda: (killed / "checkpoint-6").exists())
    with (killed / METRICS_FILE).open("a") as f:
        f.write('{"step": 11, "ce_loss": 99.0, "active_mean": 1.0}\n{"step": 12, "ce_lo')
    assert newest_sound(killed)[0] is not None
    kill_when(start("--out", killed, "--resume"), lambda: 10 in steps_so_far(killed))
    train("--out", killed, "--resume")
    train("--preset", "tiny", "--data", text, "--out", whole, *OVERRIDES)
    assert losses(killed).keys() == set(range(1, 13))
    for step, expected in losses(whole).items():
        assert losses(killed)[step] == pytest.approx(expected, rel=1e-6), step
    steps = [row["step"] for row in read_metrics(killed) if "ce_loss" in row]
    assert steps == sorted(set(steps))  # every step once
    summaries = [json.loads((out / "summary.json").read_text()) for out in (whole, killed)]
    assert summaries[0]["validation_loss"] == pytest.approx(summaries[1]["validation_loss"], rel=1e-6)


def test_full_disk_ends_in_one_line_and_costs_no_checkpoint(
    text: Path, tmp_path: Path, train: Callable[..., None]
) -> None:
    out = tmp_path / "run"
    train("--preset", "tiny", "--data", text, "--out", out, *OVERRIDES, "steps=3")
    before = {p: p.stat().st_mtime_ns for p in (out / "checkpoint-3").iterdir()}

    def limit_file_size() -> None:  # writing beyond it fails, as it does on a full disk
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))

    process = start("--out", out, "--resume", "steps=9", preexec_fn=limit_file_size)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "Traceback" not in errors
    (line,) = [line for line in errors.splitlines() if line.startswith("twell: error:")]
    assert f"could not write {out / 'checkpoint-6'} (disk full?)" in line
    assert newest_sound(out)[0] == out / "checkpoint-3"
    assert {p: p.stat().st_mtime_ns for p in (out / "checkpoint-3").iterdir()} == before
    train("--out", out, "--resume")  # with room again it goes on
    assert losses(out).keys() == set(range(1, 10))


def test_wrong_input_ends_in_one_line(text: Path, tmp_path: Path, twell: Twell) -> None:
    texts = list(read_texts(text))
    small, large = train_bpe(texts, 257), train_bpe(texts, 400)
    small.save_pretrained(tmp_path / "small")
    ids = [i for t in texts for i in (*large.encode(t), large.eos_token_id)]
    tokens = tmp_path / "tokens.u16"
    tokens.write_bytes(b"".join(i.to_bytes(2, "little") for i in ids))
    (tmp_path / "broken.json").write_text("{")
    cases = {
        "does not exist": ("--data", tmp_path / "none.txt", *OVERRIDES),
        "another tokenizer?": ("--data", tokens, "--tokenizer", tmp_path / "small", *OVERRIDES),
        "is not a tokenizer.json": ("--data", text, "--tokenizer", tmp_path / "broken.json", *OVERRIDES),
        "needs the tokenizer it was made with": ("--data", tokens, *OVERRIDES),
        "holds no run to resume": ("--resume",),
        "lr must be a finite number, got inf": ("--data", text, *OVERRIDES, "lr=inf"),
        "is nan at step 3: try a lower lr": ("--data", text, *OVERRIDES, "lr=1e30", "clip=1e30", "weight_decay=0"),
    }
    for number, (message, args) in enumerate(cases.items()):
        outcome = twell("train", "--out", str(tmp_path / f"run{number}"), *map(str, args))
        (line,) = [line for line in outcome.stderr.splitlines() if line.startswith("twell: error:")]
        assert outcome.returncode == 2 and message in line


def test_recipes_know_every_field_that_these_tests_set() -> None:
    from twell.train.recipes import Recipe

    assert {o.partition("=")[0] for o in OVERRIDES} <= {f.name for f in dataclasses.fields(Recipe)}
