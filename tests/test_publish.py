"""Measuring all rows anew at one commit: what runs, what is skipped, and when results/ is replaced."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

import publish
import serve_bench
import tables
from publish_steps import STEPS, Step, logs

# Stands in for ``twell``: "row NAME" gives a row, "train" a run, "fail" fails.
TWELL = """
import json, pathlib, sys, time
words = sys.argv[1:]
log = pathlib.Path(__file__).with_name("log")
log.write_text((log.read_text() if log.exists() else "") + words[0] + " " + words[1] + "\\n")
out = pathlib.Path(words[words.index("--out") + 1])
if words[0] == "fail":
    out.write_text(json.dumps({"bench": "half a row"}))
    sys.exit(3)
if words[0] == "row":
    out.write_text(json.dumps({"bench": words[1], "commit": "old-dirty", "model": words[2]}) + "\\n")
elif words[0] == "eval":
    rows = [{"eval": "text", "loss": 1.5, "file": words[1]}, {"eval": "last words", "accuracy": 0.5}]
    out.write_text("".join(json.dumps(row) + "\\n" for row in rows))
else:
    out.mkdir(parents=True, exist_ok=True)
    (out / "summary.json").write_text(json.dumps({"validation_loss": 2.0, "device": "cpu"}) + "\\n")
    (out / "metrics.jsonl").write_text('{"step": 1}\\n{"step": 2}\\n')
"""
ROWS = [
    Step("a", "one", 1, "row first {data}/val.u16"),
    Step("b", "one", 1, "row second {work}/b/model"),
    Step("run", "two", 1, "train tiny --out {work}/run", "run", "eval {work}/run/model", curves="logs"),
]
BROKEN = Step("broken", "four", 1, "fail now")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "twell.py").write_text(TWELL)
    (tmp_path / "data").mkdir()
    (tmp_path / "results").mkdir()
    for name in ("one", "two"):
        (tmp_path / "results" / f"{name}.jsonl").write_text('{"commit": "old"}\n')
    return tmp_path


def run(place: Path, steps: list[Step], *arguments: str, commit: str = "abc") -> int:
    where = ["--rows", str(place / "rows"), "--results", str(place / "results"), "--commit", commit]
    given = [*where, "--data", str(place / "data"), *arguments]
    return publish.main(given, steps, [sys.executable, str(place / "twell.py")])


def log(place: Path) -> list[str]:
    return (place / "log").read_text().splitlines() if (place / "log").exists() else []


def rows(place: Path, name: str) -> list[dict[str, Any]]:
    return publish.read(place / "results" / f"{name}.jsonl")


def test_all_rows_are_measured_and_replaced_at_once(place: Path) -> None:
    assert run(place, ROWS) == 0
    assert log(place) == ["row first", "row second", "train tiny", f"eval {place}/rows/abc/work/run/model"]
    assert rows(place, "one") == [
        {"bench": "first", "commit": "abc", "model": "val.u16"},  # and no folder of this machine
        {"bench": "second", "commit": "abc", "model": "b/model"},
    ]
    (of_run,) = rows(place, "two")
    assert (of_run["name"], of_run["command"]) == ("run", "twell train tiny --out run")
    assert rows(place, "logs") == [{"run": "run", "step": 1}, {"run": "run", "step": 2}]
    assert of_run["wikitext2"] == {"loss": 1.5} and of_run["lambada"] == {"accuracy": 0.5} and of_run["threads"] > 0


def test_a_failed_step_is_reported_and_the_rest_runs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.read_text() for path in (place / "results").iterdir()}
    assert run(place, [BROKEN, *ROWS]) == 1
    assert "broken failed: exit code 3" in capsys.readouterr().err and len(log(place)) == 5
    assert {path: path.read_text() for path in (place / "results").iterdir()} == before
    assert run(place, [BROKEN._replace(command="row now x"), *ROWS]) == 0
    assert len(log(place)) == 6 and rows(place, "four")  # the finished ones were skipped
    assert run(place, ROWS, commit="def") == 2 and len(log(place)) == 10  # another commit: all of them again
    assert "rows of another commit would remain in four.jsonl" in capsys.readouterr().err
    assert run(place, ROWS, "--keep", "four", commit="def") == 0
    assert rows(place, "one")[0]["commit"] == "def" and rows(place, "four")[0]["commit"] == "abc"


def test_a_model_that_is_gone_is_made_again_for_a_step_that_needs_it(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Step("run", "two", 1, "train tiny --out {work}/run", "run")
    score = Step("score", "one", 1, "row score {work}/run/summary.json")
    assert run(place, [score]) == 1
    assert "score failed: it needs run/summary.json, which another step makes" in capsys.readouterr().err
    assert run(place, [model], "--keep", "one") == 0
    shutil.rmtree(place / "rows" / "abc" / "work" / "run")  # rows were carried to another machine, models were not
    assert run(place, [model, score]) == 0
    assert log(place) == ["train tiny", "train tiny", "row score"]


def test_steps_that_do_not_fit_are_left(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = Step("long", "one", 500, "row long x")
    assert run(place, [long, *ROWS[:2]], "--time-limit", "50") == 2
    assert log(place) == ["row first", "row second"] and "long: no time" in capsys.readouterr().err
    traced = Step("traced", "one", 1, "row traced {trace}")
    assert run(place, [traced]) == 2 and "traced needs --trace" in capsys.readouterr().err


def test_some_steps_alone_and_the_list(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(place, ROWS, "--only", "b", "--only", "two") == 2  # results/ has rows of another commit
    assert [line.split()[0] for line in log(place)] == ["row", "train", "eval"]
    assert run(place, ROWS, "--list") == 0
    said = capsys.readouterr().out
    assert "b (one.jsonl, finished): row second" in said and "a (one.jsonl, about 1 s)" in said
    with pytest.raises(SystemExit):
        run(place, ROWS, "--only", "nothing")


def test_a_tree_with_changes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Said:
        stdout = " M README.md\n"

    monkeypatch.setattr(publish.subprocess, "run", lambda *a, **k: Said)
    with pytest.raises(SystemExit, match="the tree has changes"):
        publish.main([], ROWS)


def test_commands_are_those_of_twell_and_make_every_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every command is one that ``twell`` takes, and every file that a table is made of is measured."""
    import shlex

    import typer

    from twell.workbench import cli

    group: Any = typer.main.get_command(cli.app)
    for step in STEPS:
        for line in filter(None, (step.command, step.scores)):
            name, *words = shlex.split(line)
            if name == "python":
                assert words[0] in ("tools/trace_bench.py", "tools/serve_bench.py")
                continue
            command = group.commands[name]
            if name == "bench":
                name, *words = words
                command = command.commands[name]
            out = ["--out", "x"] if "--out" not in words and name != "train" else []
            command.make_context(name, [*words, *out], resilient_parsing=False)
    assert not any("--no-fp8" in step.command for step in STEPS)  # dense FP8 stands beside dense everywhere
    files = {step.file for step in STEPS}
    measured = {path.stem for path in (Path(__file__).parents[1] / "results").glob("*.jsonl")}
    assert measured <= files | logs(STEPS)  # else results/ could never be replaced as a whole
    names = {step.name for step in STEPS}
    assert all(folder.split("/")[0] in names for step in STEPS for folder in step.needs)
    assert {stem for table in tables.TABLES.values() for stem in table.stems.split()} <= files
    assert len({step.name for step in STEPS}) == len(STEPS)


def test_a_server_that_failed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "echo")
    with pytest.raises(SystemExit, match="twell serve --dense: failed\n-m twell serve no-model"):
        serve_bench.served("no-model", ["--dense"], [], 8)


@pytest.mark.slow
def test_a_real_step(place: Path) -> None:
    tiny = Step("tiny", "one", 1, "bench ffn --device cpu -w skew10 -m 1 -d 32 -f 64 --seconds 0")
    given = ["--rows", str(place / "rows"), "--results", str(place / "results"), "--commit", "abc"]
    assert publish.main([*given, "--keep", "two", "--keep", "three"], [tiny]) == 0
    (row,) = rows(place, "one")
    assert row["commit"] == "abc" and row["speedup"] > 0 and json.dumps(row)
