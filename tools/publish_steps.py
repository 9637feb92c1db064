"""The commands that measure the rows in results/; publish.py runs them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal, NamedTuple


class Step(NamedTuple):
    """A command of ``twell``, or of tools/ (``python tools/...``), and the file in results/ that its rows go to.

    ``command`` may name {trace}, a trace of a trained model; {data}, a folder with train.u16.xz, val.u16,
    tokenizer.json and, in eval/, WikiText-2, LAMBADA and the seven tasks; {work}, where models are kept.
    """

    name: str
    file: str  # in results/, without .jsonl
    seconds: float  # about how long it takes on an H200; on two cores for the steps of the CPU
    command: str
    gives: Literal["rows", "run"] = "rows"  # by --out; summary.json of {work}/NAME
    scores: str = ""  # a second command, whose scores of other texts are added to the row of a run
    machine: Literal["gpu", "cpu"] = "gpu"
    label: str = ""  # of a run in its table; default: the step's name
    curves: str = ""  # the file in results/ that the log of a run goes to

    @property
    def needs(self) -> set[str]:
        """Folders in {work} that other steps make.

        >>> Step("b", "x", 1, "eval {work}/a/model --out {work}/b/rows").needs
        {'a/model'}
        """
        found = re.findall(r"\{work\}/(\S+)", f"{self.command} {self.scores}")
        return {folder for folder in found if folder.split("/")[0] != self.name}


def _each(option: str, values: str) -> str:
    """
    >>> _each("-m", "1 8")
    '-m 1 -m 8'
    """
    return " ".join(f"{option} {value}" for value in values.split())


_TRACED = "python tools/trace_bench.py"
_FFN = "bench ffn --device cuda --seconds 1.5"
_NO_CALLS = f"{_FFN} --no-called"
_WIDE = "-d 4096 -f 14336"
_SILENT = _each("-w", "skew2816 skew1126 skew563 skew282")
_SWEEP = _each("-w", "skew29 skew2800 iid100")

FFN = [
    Step("ffn-skew29", "ffn-h200", 90, f"{_FFN} -w skew29 {_each('-m', '4096 16384 131072')}"),
    Step(
        "ffn-workloads",
        "ffn-h200",
        100,
        f"{_NO_CALLS} -m 16384 " + _each("-w", "iid29 skew10 skew100 skew300 skew1000 skew2800 iid10 iid60 iid100"),
    ),
    Step("ffn-plain", "ffn-h200", 40, f"{_NO_CALLS} -w skew29 -m 16384 --plain"),
    Step("ffn-wide", "ffn-h200", 50, f"{_NO_CALLS} -w skew72 -m 8192 {_WIDE}"),
    Step("ffn-layers", "ffn-h200", 80, f"{_TRACED} ffn --trace {{trace}} -m 16384"),
    Step(
        "few-skew29",
        "ffn-few-h200",
        240,
        f"{_FFN} --graph -w skew29 {_each('-m', '1 8 16 32 64 128 256 512 1024 2048 4096')}",
    ),
    Step(
        "few-workloads",
        "ffn-few-h200",
        200,
        f"{_NO_CALLS} --graph {_each('-w', 'skew10 skew100 skew300 skew2800 iid29')} {_each('-m', '1 8 64 512 2048')}",
    ),
    Step("few-wide", "ffn-few-h200", 100, f"{_NO_CALLS} --graph -w skew72 {_WIDE} {_each('-m', '1 8 32 64 256')}"),
    Step("few-layers", "ffn-few-h200", 120, f"{_TRACED} ffn --trace {{trace}} -m 256 -m 1024"),
    # 50, 80, 90 and 95 % of 5632 neurons are silent.
    Step("half", "ffn-half-h200", 160, f"{_NO_CALLS} --graph {_SILENT} {_each('-m', '1 8 64 4096')}"),
    Step("half-large", "ffn-half-h200", 60, f"{_NO_CALLS} {_SILENT} -m 16384"),
    # What the steps above leave out.
    Step("sweep", "ffn-sweep-h200", 100, f"{_NO_CALLS} --graph {_SWEEP} {_each('-m', '65 3071 3072')}"),
    Step("sweep-iid100", "ffn-sweep-h200", 80, f"{_NO_CALLS} --graph -w iid100 {_each('-m', '1 8 64 128 512 2048')}"),
    Step("sweep-large", "ffn-sweep-h200", 80, f"{_NO_CALLS} {_SWEEP} -m 4096 -m 32768"),
]

_TRAIN, _STEPS = "bench train --device cuda", "bench train --device cuda --model -w skew29"
MODELS = [
    *(
        Step(f"model-{p}", "model-h200", seconds, f"bench model --preset {p} -w skew29 --shape 64x2048 --no-called")
        for p, seconds in (("0.5b", 70), ("1b", 90), ("1.5b", 110), ("2b", 130))
    ),
    Step(
        "model-compiled",
        "model-h200",
        150,
        "bench model --preset 1.5b -w skew29 --shape 64x2048 --no-called --compile",
    ),
    *(
        Step(
            f"model-{p}-trace",
            "model-h200",
            seconds,
            f"{_TRACED} model --trace {{trace}} --preset {p}",
        )
        for p, seconds in (("0.5b", 60), ("1b", 70), ("1.5b", 80), ("2b", 90))
    ),
    Step(
        "model-shapes",
        "model-h200",
        300,
        "bench model --preset 1.5b --depth 16 -w skew29 --generate "
        + _each("--shape", "1x1 1x64 1x1024 1x2048 2x2048 4x2048"),
    ),
    *(  # five models to compile each time
        Step(f"decode-{n}", "decode-h200", 300, f"bench decode --preset 1.5b -w skew29 --batch {n} --compile")
        for n in (1, 8)
    ),
    Step("train-ffn", "train-h200", 60, f"{_TRAIN} -w skew29 -w skew100 -m 16384"),
    Step("train-ffn-tokens", "train-h200", 60, f"{_TRAIN} -w skew29 -m 4096 -m 65536"),
    Step("train-ffn-plain", "train-h200", 30, f"{_TRAIN} -w skew29 -m 16384 --plain --no-called"),
    Step("train-layers", "train-h200", 120, f"{_TRACED} train --trace {{trace}} -m 16384"),
    Step("train-17", "train-h200", 80, f"{_STEPS} --preset 1.5b --batch 17"),
    *(Step(f"train-{p}", "train-h200", 60, f"{_STEPS} --preset {p} --batch 12") for p in ("0.5b", "1b", "1.5b", "2b")),
]

_DATA = "--data {data}/train.u16.xz --validation {data}/val.u16"
_TOKENIZED = f"{_DATA} --tokenizer {{data}}/tokenizer.json"
_SMALL = f"train --preset small --compile {_TOKENIZED} --out {{work}}"
_TEXTS = "--text {data}/eval/wikitext2_raw_test.txt --last-words {data}/eval/lambada_test.jsonl --dtype bfloat16"
_SHORT = "activation=silu l1=0 sequences_per_step=32 micro_batch=32 save_every=5000 eval_every=400"


def _small(name: str, changes: str) -> Step:
    scores = f"eval {{work}}/{name}/model {_TEXTS}"
    command = f"{_SMALL}/{name} steps=1225 {changes}"
    return Step(name, "train-small", 260, command, "run", scores, curves="train-small-curves")


def _converted(name: str, label: str, changes: str) -> Step:
    how = f"--relufy --compile {_DATA} --out {{work}}/{name} micro_batch=32 steps=400 {changes} save_every=5000"
    return Step(name, "convert-small", 90, f"train --from {{work}}/silu-800/model {how}", "run", label=label)


def _silu(steps: int, label: str) -> Step:
    command = f"{_SMALL}/silu-{steps} {_SHORT} steps={steps}"
    return Step(f"silu-{steps}", "convert-small", 160, command, "run", label=label)


TRAINING = [
    _small("silu", "activation=silu l1=0"),
    _small("relu-0", "l1=0"),
    _small("relu-1e-4", "l1=1e-4"),
    _small("relu-4e-4", "l1=4e-4"),
    _small("relu-1e-3", "l1=1e-3"),
    _small("restart", "l1=4e-4 restart_every=100 restart_until=800"),
    _small("warmup", "l1=4e-4 l1_warmup_start=100 l1_warmup_end=500"),
    _small("plain", "l1=4e-4 gated=false intermediate_size=3072"),
    Step("target-small", "target-small", 200, f"{_SMALL}/target-small steps=1225", "run"),
    _silu(800, "SiLU, 800 steps: the original"),
    _converted("l1-4e-4-lr-1e-3", "converted, l1 4e-4", "l1=4e-4 lr=1e-3 seed=1"),
    _converted("l1-1e-3-lr-1e-3", "converted, l1 1e-3", "l1=1e-3 lr=1e-3 seed=1"),
    _converted("l1-4e-4-lr-3e-4", "converted, l1 4e-4, lr 3e-4", "l1=4e-4 seed=1"),
    _silu(1200, "SiLU from scratch"),
    Step(
        "eval-fp8",
        "eval-fp8-small",
        240,
        "eval {work}/relu-4e-4/model --fp8 --data {data}/eval --text {data}/val.u16",
    ),
]

_EPOCH = 915  # steps of 24 x 2048 tokens
_REAL = (
    f"train --preset 0.5b --compile {_TOKENIZED} sequences_per_step=24 micro_batch=24 lr_warmup=100 "
    f"dead_after_tokens=5000000 log_every=15 save_every=100000 eval_every={_EPOCH}"
)
_KINDS = {
    "silu": ("SiLU", "activation=silu"),
    "relu": ("ReLU", "l1=0 plan_every=0"),
    "sparse": ("ReLU, 1 % asked for", "target_active=0.01"),
}


def _real(kind: str, seconds: float) -> Step:
    label, changes = _KINDS[kind]
    command = f"{_REAL} --out {{work}}/real-{kind} steps={2 * _EPOCH} {changes}"
    return Step(f"real-{kind}", "real-runs", seconds, command, "run", label=label, curves="real-curves")


def _half(kind: str, seed: int, seconds: float) -> Step:
    """For the spread of the loss."""
    label, changes = _KINDS[kind]
    command = f"{_REAL} --out {{work}}/half-{kind}-{seed} steps={_EPOCH} seed={seed} {changes}"
    return Step(f"half-{kind}-{seed}", "half-runs", seconds, command, "run", label=label)


def _scored(kind: str) -> Step:
    command = f"eval {{work}}/real-{kind}/model --data {{data}}/eval {_TEXTS}"
    return Step(f"real-{kind}-scores", "real-scores", 100, command)


_PASSES = f"--layers --seconds 2 {_each('--shape', '1x256 1x2048 8x2048 32x2048')}"
_BATCHES = f"--seconds 2 {_each('--batch', '1 8 32 64')}"

REAL = [
    _real("relu", 620),
    _scored("relu"),
    _real("sparse", 540),
    _scored("sparse"),
    Step("real-passes", "real-speed", 90, f"bench model {{work}}/real-sparse/model --text {{data}}/val.txt {_PASSES}"),
    Step(
        "real-decode", "real-speed", 120, f"bench decode {{work}}/real-sparse/model --text {{data}}/val.txt {_BATCHES}"
    ),
    Step("real-serve", "real-speed", 90, "python tools/serve_bench.py {work}/real-sparse/model --text {data}/val.txt"),
    Step("real-fp8", "real-fp8", 40, "eval {work}/real-sparse/model --fp8 --text {data}/val.u16"),
    _real("silu", 700),
    _scored("silu"),
    *(_half(kind, seed, seconds) for seed in (1, 2, 3) for kind, seconds in (("relu", 330), ("sparse", 260))),
]

_CPU_FFN, _TINY_TOKENIZER = "bench ffn --device cpu", "--tokenizer {work}/tiny-silu/tokenizer"


def _tiny(name: str, changes: str, seconds: float = 120) -> Step:
    return Step(
        name, "target-tiny", seconds, f"train --preset tiny --out {{work}}/{name} {changes}", "run", machine="cpu"
    )


def _tiny_converted(name: str, label: str, changes: str) -> Step:
    how = f"--relufy --out {{work}}/{name} steps=300 sequences_per_step=16 micro_batch=16"
    command = f"train --from {{work}}/tiny-silu/model {how} {changes}"
    return Step(name, "convert-tiny", 120, command, "run", machine="cpu", label=f"converted, {label}")


def _tiny_beside(name: str, label: str, changes: str) -> Step:
    command = f"train --preset tiny --out {{work}}/{name} {changes}"
    return Step(name, "convert-tiny", 240, command, "run", machine="cpu", label=label)


CPU = [
    Step("cpu-ffn", "cpu-ffn", 200, f"{_CPU_FFN} {_each('-w', 'skew29 skew300 skew1000 skew2800')}", machine="cpu"),
    Step("cpu-plain", "cpu-ffn", 100, f"{_CPU_FFN} -w skew29 -w skew2800 --plain", machine="cpu"),
    Step("cpu-bf16", "cpu-ffn", 100, f"{_CPU_FFN} -w skew29 -w skew2800 --dtype bfloat16", machine="cpu"),
    Step(
        "cpu-decode",
        "cpu-decode",
        120,
        "bench decode --preset 0.5b --context 128 --seconds 10 --device cpu",
        machine="cpu",
    ),
    _tiny("tiny", "", 200),
    _tiny("tiny-seed-1", "seed=1", 200),
    _tiny("tiny-300", "steps=300"),
    _tiny("tiny-300-seed-1", "steps=300 seed=1"),
    _tiny("tiny-300-l1-8e-3", "steps=300 l1=8e-3"),
    _tiny("tiny-300-l1-1e-2", "steps=300 l1=1e-2"),
    _tiny("tiny-300-5-percent", "steps=300 target_active=0.05"),
    _tiny("tiny-800", "steps=800", 320),
    _tiny("tiny-800-l1-6e-3", "steps=800 l1=6e-3", 320),
    _tiny("tiny-800-l1-8e-3", "steps=800 l1=8e-3", 320),
    _tiny_beside("tiny-silu", "SiLU, 600 steps: the original", "activation=silu l1=0 steps=600"),
    _tiny_converted("tiny-converted-l1-0", "l1 0", "lr=3e-3 l1=0"),
    _tiny_converted("tiny-converted-l1-3e-3", "l1 3e-3", "lr=3e-3 l1=3e-3"),
    _tiny_converted("tiny-converted-l1-1e-2", "l1 1e-2", "lr=3e-3 l1=1e-2"),
    _tiny_converted("tiny-converted-l1-3e-3-at-once", "l1 3e-3, no warm-up", "lr=3e-3 l1=3e-3 l1_warmup_end=0"),
    _tiny_converted("tiny-converted-l1-1e-2-at-once", "l1 1e-2, no warm-up", "lr=3e-3 l1=1e-2 l1_warmup_end=0"),
    _tiny_converted("tiny-converted-lr-1e-3", "l1 3e-3, lr 1e-3", "lr=1e-3 l1=3e-3"),
    _tiny_converted("tiny-converted-lr-3e-4", "l1 3e-3, lr 3e-4", "lr=3e-4 l1=3e-3"),
    _tiny_beside("tiny-relu-900", "ReLU from scratch, l1 3e-3", f"{_TINY_TOKENIZER} l1=3e-3 steps=900"),
    _tiny_beside("tiny-silu-900", "SiLU from scratch", f"{_TINY_TOKENIZER} activation=silu l1=0 steps=900"),
]

STEPS = [*FFN, *MODELS, *TRAINING, *REAL, *CPU]


def logs(steps: Iterable[Step]) -> set[str]:
    """Files in results/ that hold logs of training: rows without a commit. No step makes train-paths."""
    return {"train-paths", *(step.curves for step in steps if step.curves)}
