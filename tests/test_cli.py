"""The command line: help everywhere, rows as JSON, one clear line on bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from command_line import Twell
from twell import __version__, cpu
from twell.hf.sparsify import sparsify_
from twell.train.data import SAMPLE, read_texts
from twell.workbench import doctor
from twell.workbench.analyze import Analysis
from twell.workbench.bench import timing
from twell.workbench.trace import Trace

SMALL = ["--width", "64", "--hidden", "256", "--seconds", "0"]


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "twell", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"twell {__version__}\n"


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["bench", "ffn"],
        ["bench", "model"],
        ["bench", "decode"],
        ["bench", "train"],
        ["train"],
        ["convert"],
        ["generate"],
        ["serve"],
        ["trace"],
        ["calibrate"],
        ["eval"],
        ["tune"],
        ["analyze"],
        ["sweep"],
        ["compare"],
        ["results"],
        ["doctor"],
        ["demo"],
    ],
)
def test_help(twell: Twell, command: list[str]) -> None:
    result = twell(*command, "--help")
    assert result.returncode == 0
    assert "Usage" in result.stdout
    assert not command or "Example" in result.stdout


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
    assert head.split() == ["workload", "tokens", "active", "ms", "speedup", "called", "ms", "called", "host", "us"]
    assert len(re.findall(r"\d\.\d\dx", result.stdout)) == 4  # sparse and frozen: the device's, and as called


def test_bench_train_prints_a_table(twell: Twell) -> None:
    result = twell("bench", "train", "-w", "skew10", "-m", "4", *SMALL, "--dtype", "float32", "--device", "cpu")
    assert result.returncode == 0, result.stderr
    head = next(line for line in result.stdout.splitlines() if "workload" in line)
    assert [word for word in head.split() if word in ("dense", "sparse", "speedup")] == ["dense", "sparse", "speedup"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["-w", "nonsense"], "unknown workload 'nonsense'"),
        (["--dtype", "int8"], "unknown dtype 'int8'"),
        (["--backend", "magic"], "unknown backend 'magic'"),
        (["--backend", "triton"], "backend 'triton' is not available"),
        (["--device", "tpu0"], "unknown device 'tpu0'"),
        (["-m", "0"], "must be at least 1"),
        (["-w", "skew300", "--hidden", "64"], "mean_nnz 300 does not fit 64 neurons"),
        (["--graph"], "--graph needs a GPU"),
        (["--trace", "none.npz"], "backend 'triton' is not available"),
        (["--trace", "none.npz", "--plain"], "--trace times gated FFNs as they were recorded"),
    ],
)
def test_bad_input_is_one_clear_line(
    twell: Twell, args: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = twell("bench", "ffn", *args)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--preset", "huge", "--device", "cpu"], "unknown preset 'huge'"),
        (["-w", "none", "--device", "cpu"], "unknown workload 'none'"),
        (["--batch", "0", "--device", "cpu"], "--batch, --length and --depth must be at least 1"),
        (["--preset", "tiny", "--device", "cpu"], "backend 'triton' is not available"),
    ],
)
def test_bench_model_says_what_is_wrong(
    twell: Twell, args: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = twell("bench", "model", *args)
    assert result.returncode == 2 and message in result.stderr and len(result.stderr.splitlines()) == 1


def test_bench_model_writes_a_row(twell: Twell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    out = tmp_path / "rows.jsonl"
    command = ("bench", "model", "--preset", "tiny", "-w", "skew10", "--batch", "1", "--length", "8", "--device", "cpu")
    result = twell(*command, "--seconds", "0", "--out", str(out))
    assert result.returncode == 0, result.stderr
    assert "tiny, skew10" in result.stdout and "1 x 8" in result.stdout
    assert json.loads(out.read_text())["layers"] == 4


def test_what_was_measured_before_an_interrupt_is_there(
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


def test_doctor_reports_and_passes_here(twell: Twell) -> None:
    result = twell("doctor", "--json")
    assert result.returncode == 0, result.stdout
    facts = json.loads(result.stdout)
    assert facts["healthy"] is True
    assert facts["backend on cpu"].startswith("cpu")
    assert facts["self-test"] == "sparse equals dense, forward and backward"
    assert "self-test" in twell("doctor").stdout


def test_doctor_finds_a_broken_fast_path(twell: Twell, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cpu._sampled_dots
    monkeypatch.setattr(cpu, "_MIN_WORK", 20e6)  # as users have it: the self-test must still reach the fast path
    monkeypatch.setattr(cpu, "_sampled_dots", lambda *args: right(*args) * 1.01)
    result = twell("doctor", "--json")
    assert result.returncode == 1
    assert "sparse y is wrong" in json.loads(result.stdout)["self-test"]


def test_unusable_amx_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    monkeypatch.setattr(doctor, "_advertises_amx", lambda: True)
    monkeypatch.setattr(doctor, "_BF16_PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    problem = doctor.bf16_problem()
    assert problem is not None
    assert "AMX" in problem
    assert doctor.AMX_REMEDY in problem
    monkeypatch.setattr(doctor, "_BF16_PROBE", "pass")
    assert doctor.bf16_problem() is None
    monkeypatch.setattr(doctor, "_advertises_amx", lambda: False)
    monkeypatch.setattr(doctor, "_BF16_PROBE", "raise SystemExit(1)")
    assert doctor.bf16_problem() is None


# -- train, trace, eval -----------------------------------------------------------------------------------

MINI_RUN = (
    "hidden_size=32 intermediate_size=64 layers=2 heads=2 context=32 vocab_size=300 steps=4 sequences_per_step=4 "
    "micro_batch=4 log_every=2 eval_every=4 save_every=4"
)


def test_train_trace_and_eval(twell: Twell, tmp_path: Path) -> None:
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

    out = tmp_path / "trace.npz"
    result = twell("trace", model, "--text", str(text), "--out", str(out), "--tokens", "64", "--json")
    assert result.returncode == 0, result.stderr
    trace = Trace.load(out)
    assert (trace.layers, trace.tokens) == (2, 64)
    assert [layer["mean"] for layer in json.loads(result.stdout)] == pytest.approx([c.mean() for c in trace.counts])
    result = twell("trace", model, "--text", str(text), "--out", str(out), "--tokens", "64")
    assert "busiest tenth" in result.stdout

    written = tmp_path / "analysis.json"
    page, figures = tmp_path / "report.html", tmp_path / "figures"
    pictures = ("--report", str(page), "--figures", str(figures), "--suffix", ".svg")
    result = twell("analyze", model, "--text", str(text), "--tokens", "256", "--out", str(written), *pictures)
    assert "<title>run" in page.read_text() and (figures / "training.svg").stat().st_size > 1000
    assert result.returncode == 0, result.stderr
    assert "layers.1.mlp" in result.stdout and "tokens that wake most neurons" in result.stdout
    narrow = twell("analyze", model, "--text", str(text), "--tokens", "256", columns=80).stdout
    assert "…" not in narrow and max(map(len, narrow.splitlines())) <= 80
    facts = json.loads(twell("analyze", model, "--text", str(text), "--tokens", "256", "--json").stdout)
    assert facts == json.loads(written.read_text()) and facts["model"] == model
    assert Analysis.from_json(facts["analysis"]).facts.tokens == 256

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
    assert on_text["bytes"] == len(text.read_bytes())
    assert on_words["items"] == 1
    assert f"{on_text['bits_per_byte']:.4f} bits per byte" in twell("eval", model, *options).stdout


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "--resume", "l1=1"], "run holds no run to resume"),
        (["train", "--preset", "huge"], "unknown preset 'huge'"),
        (["train", "nonsense=1"], "expected key=value"),
        (["eval", "nowhere"], "nothing to evaluate on"),
        (["analyze", "nowhere", "--text", "t.txt", "--report", "page.txt"], "ends in .html"),
        (["analyze", "nowhere", "--text", "t.txt", "--speed", "rows.jsonl"], "are for --report or --figures"),
        (["calibrate", "nowhere", "--text", "t.txt"], "nowhere is no folder"),
        (["eval", "nowhere", "--text", "missing.txt"], "missing.txt"),
    ],
)
def test_bad_commands_are_one_clear_line(twell: Twell, args: list[str], message: str) -> None:
    result = twell(*args)
    assert result.returncode == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
