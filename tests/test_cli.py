"""The command line: help everywhere, rows as JSON, what it needs; bad input is in test_bad_input.py."""

from __future__ import annotations

import json
import pkgutil
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from command_line import Twell
from test_public_surface import LISTED
from twell import __version__
from twell.__main__ import main
from twell.hf.sparsify import sparsify_
from twell.train.data import SAMPLE, read_texts
from twell.workbench.bench import timing

ROOT = Path(__file__).parent.parent
SMALL = ["--width", "64", "--hidden", "256", "--seconds", "0"]


def test_version_and_help(twell: Twell) -> None:
    assert twell("--version").stdout == f"twell {__version__}\n"
    assert "Usage" in twell("--help").stdout
    commands = [line.split()[1:] for line in LISTED.read_text().splitlines() if line.startswith("twell ")]
    for command in commands:
        names = [word for word in command if word.islower() and not word.startswith("-")]
        result = twell(*names, "--help")
        assert result.returncode == 0 and "Usage" in result.stdout and "Example" in result.stdout, names


WITHOUT_TYPER = """
import runpy, sys
sys.modules["typer"] = sys.modules["rich"] = None
import twell
runpy.run_module("twell", run_name="__main__")
"""


def test_the_library_needs_neither_typer_nor_rich_and_the_command_line_says_so() -> None:
    for path in (ROOT / "src" / "twell").rglob("*.py"):
        if "workbench" not in path.parts and path.name != "live.py":  # which train/run.py imports for a live view alone
            assert not re.search(r"^(from|import) (rich|typer)\b", path.read_text(), re.M), path
    facts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [re.split("[<>=]", needed)[0] for needed in facts["dependencies"]] == ["torch", "numpy"]
    assert pkgutil.resolve_name(facts["scripts"]["twell"]) is main
    ran = subprocess.run([sys.executable, "-c", WITHOUT_TYPER], capture_output=True, text=True)
    assert ran.returncode == 2 and ran.stdout == ""
    assert ran.stderr == "twell: error: the command line needs typer and rich: pip install 'twell[cli]'\n"


def test_bench_prints_and_appends_json_rows(twell: Twell, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    for _ in range(2):
        result = twell("bench", "ffn", "-w", "skew10", "-m", "1", "-m", "70", *SMALL, "--json", "--out", str(out))
        assert result.returncode == 0, result.stderr
    printed = [json.loads(line) for line in result.stdout.splitlines()]
    assert [(row["workload"], row["M"]) for row in printed] == [("skew10", 1), ("skew10", 70)]
    assert len(out.read_text().splitlines()) == 4


def test_bench_prints_a_table(twell: Twell, monkeypatch: pytest.MonkeyPatch) -> None:
    result = twell("bench", "ffn", "-w", "skew10", "-m", "4", *SMALL, "--plain", "--dtype", "bfloat16")
    assert result.returncode == 0, result.stderr
    assert "plain FFN, D 64, F 256, bfloat16" in result.stdout
    for word in ("skew10", "dense", "sparse", "frozen", "speedup", "error"):
        assert word in result.stdout
    assert "called" not in result.stdout
    command = ("bench", "ffn", "-w", "skew10", "-m", "4", *SMALL, "--called")
    monkeypatch.setattr(timing, "ROUND_MS", 0.01)
    result = twell(*command)
    assert result.returncode == 0, result.stderr
    head = next(line for line in result.stdout.splitlines() if "workload" in line)
    assert head.split() == ["workload", "tokens", "active", "ms", "speedup", "ms", "called", "us", "MB", "error"]
    assert len(re.findall(r"\d\.\d\dx", result.stdout)) == 4  # sparse and frozen: the device's, and as called


def test_rows_measured_before_an_interrupt_are_kept(
    twell: Twell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from twell.workbench.bench import ffn

    measure = ffn.run

    def stops_after_one(*args: object, **options: object) -> Iterator[dict[str, object]]:
        yield next(measure(*args, **options))  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(ffn, "run", stops_after_one)
    out = tmp_path / "rows.jsonl"
    result = twell("bench", "ffn", "-w", "skew10", "-m", "1", "-m", "2", *SMALL, "--out", str(out))
    assert result.returncode == 130
    assert f"1 of 2 rows are done, in {out}" in result.stderr
    assert json.loads(out.read_text())["M"] == 1


def test_compare_says_noise_and_worse(twell: Twell, tmp_path: Path) -> None:
    def spread(ms: float) -> dict[str, float]:
        return {"p20": 0.99 * ms, "p50": ms, "p80": 1.01 * ms}

    def write(name: str, sparse_ms: float) -> str:
        row = {"bench": "ffn", "workload": "skew29", "M": 8, "gpu": "G", "time": "2026-01-01"}
        times = {"dense_ms": spread(2.0), "sparse_ms": spread(sparse_ms), "speedup": round(2.0 / sparse_ms, 3)}
        (tmp_path / name).write_text(json.dumps(row | times) + "\n")
        return str(tmp_path / name)

    old, same, slow = write("old.jsonl", 1.0), write("same.jsonl", 1.01), write("slow.jsonl", 1.2)
    equal = twell("compare", old, same)
    assert equal.returncode == 0 and "noise" in equal.stdout and "worse" not in equal.stdout
    worse = twell("compare", old, slow, "--json")
    assert worse.returncode == 1 and any(d["verdict"] == "worse" for d in json.loads(worse.stdout) if "verdict" in d)
    assert twell("compare", old, slow, "--threshold", "0.5").returncode == 0
    alone = twell("compare", old)
    assert alone.returncode == 2 and len(alone.stderr.splitlines()) == 1


# -- train, analyze, eval ---------------------------------------------------------------------------------

MINI_RUN = (
    "hidden_size=32 intermediate_size=64 layers=2 heads=2 context=32 vocab_size=300 steps=4 sequences_per_step=4 "
    "micro_batch=4 log_every=2 eval_every=4 save_every=4"
)


def test_train_analyze_and_eval(twell: Twell, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\n<|endoftext|>\n".join(t[:3000] for t in list(read_texts(SAMPLE))[:8]))
    result = twell("train", "--data", str(text), "--out", str(tmp_path / "run"), "--json", *MINI_RUN.split(" "))
    assert result.returncode == 0, result.stderr
    summary = json.loads(result.stdout)  # and nothing else
    assert summary["recipe"]["steps"] == 4
    assert summary["tokens"] == 4 * 4 * 32
    assert 0 < summary["active_share"] < 1
    assert len(summary["active"]) == 2
    assert "step 4/4" in result.stderr
    model = str(tmp_path / "run" / "model")

    written = tmp_path / "analysis.json"
    page = tmp_path / "report.html"
    files = ("--out", str(written), "--report", str(page))
    result = twell("analyze", model, "--text", str(text), "--tokens", "256", *files)
    assert "<title>run" in page.read_text() and 'data-figure="training"' in page.read_text()
    assert result.returncode == 0, result.stderr
    assert "layers.1.mlp" in result.stdout and "tokens that wake the most neurons" in result.stdout
    narrow = twell("analyze", model, "--text", str(text), "--tokens", "256", columns=80).stdout
    assert "…" not in narrow and max(map(len, narrow.splitlines())) <= 80
    facts = json.loads(twell("analyze", model, "--text", str(text), "--tokens", "256", "--json").stdout)
    assert facts == json.loads(written.read_text()) and facts["model"] == model
    assert facts["analysis"]["facts"]["tokens"] == 256

    result = twell("calibrate", model, "--text", str(text), "--tokens", "256", "--json")
    assert result.returncode == 0, result.stderr
    assert [row["layer"] for row in json.loads(result.stdout)] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    assert all("Plan(" in row["plan"] for row in json.loads(result.stdout))
    loaded = AutoModelForCausalLM.from_pretrained(model)
    assert "Plan(" in str(sparsify_(loaded))
    assert loaded.model.layers[1].mlp.plan is not None
    assert "counts of 256 tokens" in twell("calibrate", model, "--text", str(text), "--tokens", "256").stdout

    passages = tmp_path / "passages.jsonl"
    passages.write_text(json.dumps({"text": "three little words"}) + "\n")
    options = ("--text", str(text), "--last-words", str(passages))
    result = twell("eval", model, *options, "--json")
    assert result.returncode == 0, result.stderr
    on_text, on_words = map(json.loads, result.stdout.splitlines())
    assert on_text["bytes"] == sum(len(document.encode()) for document in read_texts(text))
    assert on_words["items"] == 1
    shown = twell("eval", model, *options).stdout
    assert "bits/byte" in shown and f"{on_text['bits_per_byte']:.4f} ±" in shown
