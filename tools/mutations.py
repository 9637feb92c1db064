"""Would the fast tests notice? Each fault below is one wrong line of src/; at least 38 of the 40 must fail a test.

    python tools/mutations.py                  # all faults, two at a time: half an hour on two cores
    python tools/mutations.py --only plan      # the faults whose name contains the word

Each fault goes into a copy of src/ of its own. The test files named beside it run there, without slow tests, up to the
first failure. tests/test_mutations.py checks that every fault still fits the code.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
FOUND_AT_LEAST = 38


class Fault(NamedTuple):
    name: str
    path: str  # below src/twell
    right: str  # occurs once in the file
    wrong: str
    tests: str  # test files, without test_ and .py


FAULTS = [
    Fault(
        "plan: hot neurons are counted as gathered, too",
        "plan/choose.py",
        "cost = cost + costs.gate * (F - n_hot) + gather * tail[n_hot] + costs.token",
        "cost = cost + costs.gate * (F - n_hot) + gather * tail[0] + costs.token",
        "plan",
    ),
    Fault(
        "plan: the last of the best hot sets",
        "plan/choose.py",
        "best = int(near.nonzero()[0])",
        "best = int(near.nonzero()[-1])",
        "plan",
    ),
    Fault(
        "plan: the union of tokens counts neurons several times",
        "plan/choose.py",
        "return float((1 - (1 - frequency.clamp(max=1)) ** tokens).sum())",
        "return float(frequency.clamp(max=1).sum())",
        "plan",
    ),
    Fault(
        "plan: the split at any predicted gain",
        "plan/choose.py",
        "if predicted < (_MIN_GAIN_TRAINING if training else _MIN_GAIN):",
        "if predicted < (_MIN_GAIN_TRAINING if training else 0):",
        "plan",
    ),
    Fault(
        "plan: drift forgets heavy tokens",
        "plan/choose.py",
        "projections * costs.heavy * (plan.n_neurons - len(plan.hot)) * heavy",
        "projections * costs.heavy * (plan.n_neurons - len(plan.hot)) * 0",
        "plan drift",
    ),
    Fault(
        "plan: cold neurons keep the hot ones",
        "plan/plan.py",
        "cold[self.hot.cpu()] = False",
        "cold[self.hot.cpu()[1:]] = False",
        "plan kernels",
    ),
    Fault(
        "plan: a hot neuron may be listed twice",
        "plan/plan.py",
        "if len(hot) != len(self.hot) or not inside or min(numbers) < 0:",
        "if not inside or min(numbers) < 0:",
        "plan",
    ),
    Fault(
        "plan: sizes are packed too narrowly",
        "plan/plan.py",
        "_SIZE, _TOKENS, _UNION = 1 << 18, 1 << 22, 1 << 14",
        "_SIZE, _TOKENS, _UNION = 1 << 12, 1 << 22, 1 << 14",
        "plan",
    ),
    Fault(
        "ops: autocast casts float64, too",
        "ops/registered.py",
        "arg.is_floating_point() and arg.dtype != torch.float64",
        "arg.is_floating_point()",
        "ops",
    ),
    Fault(
        "ops: double backward goes unnoticed",
        "ops/registered.py",
        "return _OnlyBackward.apply(*args)",
        "pass",
        "ops",
    ),
    Fault(
        "ops: the token mask is lost in the backward",
        "ops/registered.py",
        "call.token_mask, kept)",
        "None, kept)",
        "ops cpu",
    ),
    Fault(
        "ops: compiled code takes stale frozen tensors",
        "ops/registered.py",
        "!= w.states():",
        "is None:",
        "written_weights nn ops",
    ),
    Fault(
        "ops: the fake backward forgets strides",
        "ops/registered.py",
        "out[3] = x.new_empty(F, D).t()",
        "out[3] = x.new_empty(D, F)",
        "ops planned_training training_kernels",
    ),
    Fault(
        "ops: forward-mode AD gets zero tangents",
        "ops/registered.py",
        "forward_ad.unpack_dual(t).tangent is not None",
        "False",
        "ops",
    ),
    Fault(
        "layer: a hook on a projection is passed over",
        "nn/projections.py",
        'if a or b or c or d or "forward" in own',
        'if b or c or d or "forward" in own',
        "projections",
    ),
    Fault(
        "layer: frozen tensors outlive a written weight",
        "nn/frozen.py",
        "if not self._is_of(w, plan):",
        "if self._seen is None:",
        "written_weights nn",
    ),
    Fault(
        "layer: statistics count masked tokens",
        "nn/projections.py",
        "tokens = counts.new_full((), r[..., 0].numel(), dtype=torch.int64) if mask is None else mask.sum()",
        "tokens = counts.new_full((), r[..., 0].numel(), dtype=torch.int64)",
        "projections nn",
    ),
    Fault(
        "cpu: a token with inf is taken for finite",
        "cpu/one_token.py",
        "return (len(active) > 0 and math.isfinite(active[0].item())) or is_finite(x)",
        "return True",
        "cpu cpu_int8",
    ),
    Fault(
        "cpu: a long sum loses its last piece",
        "cpu/rows.py",
        "y = y if n_pieces == 1 else y.sum(0, keepdim=True)",
        "y = y if n_pieces == 1 else y[:-1].sum(0, keepdim=True)",
        "cpu cpu_int8",
    ),
    Fault(
        "cpu: hot neurons stay in the tail",
        "cpu/block.py",
        "flat = tail.flat[~is_hot.take(tail.col)]",
        "flat = tail.flat",
        "cpu",
    ),
    Fault(
        "kernels: a tile with too many entries is listed",
        "gpu/shared/lists.py",
        "n = tl.where(tl.max(count, axis=1) > SLOTS, OVERFULL, tl.sum(count, axis=1))",
        "n = tl.sum(count, axis=1)",
        "kernels training_kernels",
    ),
    Fault(
        "kernels: heavy by one neuron too late",
        "gpu/shared/lists.py",
        "count = tl.where(((n <= cap) |",
        "count = tl.where(((n <= cap + 1) |",
        "kernels training_kernels",
    ),
    Fault(
        "kernels: early tokens beyond their places have no turn",
        "gpu/shared/lists.py",
        "has_own_turn = (n <= first) | (is_early & (place >= n_early))",
        "has_own_turn = n <= first",
        "kernels training_kernels",
    ),
    Fault(
        "kernels: the tail reads a neighbour's row",
        "gpu/shared/tail.py",
        "row = tl.load(i_rows + start + e, mask=there, other=0)",
        "row = tl.load(i_rows + start + e, mask=there, other=0) ^ 1",
        "kernels",
    ),
    Fault(
        "kernels: a NaN token in the tail is not spoiled",
        "gpu/shared/tail.py",
        "tl.store(y, (acc + tl.sum(x * x_scale * 0.0, axis=0))",
        "tl.store(y, (acc + tl.sum(x_scale * 0.0, axis=0))",
        "kernels nonfinite fp8_kernels",
    ),
    Fault(
        "kernels: few tokens pass over -inf",
        "gpu/decode/steps.py",
        'fires = ((a != 0) | (z == float("-inf"))) & (m[None, :] < M) & there[:, None]',
        "fires = (a != 0) & (m[None, :] < M) & there[:, None]",
        "decode nonfinite",
    ),
    Fault(
        "kernels: unused bits of the last mask word are read",
        "gpu/decode/steps.py",
        "if last_bits < 64:",
        "if last_bits < 0:",
        "decode",
    ),
    Fault(
        "training: L1 also of masked tokens",
        "gpu/training/tail_backward.py",
        "l1 = tl.where(tl.load(i_counted + token) != 0, l1, 0.0)",
        "l1 = l1 * 1.0",
        "training_kernels planned_training",
    ),
    Fault(
        "training: L1 pulls negative values down",
        "gpu/training/tail_backward.py",
        "tl.where(h < 0, -l1, 0.0)",
        "tl.where(h < 0, l1, 0.0)",
        "training_kernels",
    ),
    Fault(
        "training: relu2 has the slope of relu",
        "gpu/training/tail_backward.py",
        "slope = 2.0 * a",
        "slope = 1.0 * slope",
        "training_kernels",
    ),
    Fault(
        "training: a share's sum is left out",
        "gpu/training/weight_gradients.py",
        "for share in range(tl.cdiv(begin, SPLIT), tl.cdiv(end, SPLIT)):",
        "for share in range(tl.cdiv(begin, SPLIT) + 1, tl.cdiv(end, SPLIT)):",
        "training_kernels",
    ),
    Fault(
        "training: pairs of a block count the token itself",
        "gpu/training/columns.py",
        "<< (token % 32).to(tl.uint32)) - 1",
        "<< (token % 32).to(tl.uint32))",
        "training_kernels",
    ),
    Fault(
        "l1: steering acts the wrong way",
        "sparsity.py",
        "math.exp(min(change, 50.0))",
        "math.exp(-min(change, 50.0))",
        "sparsity train",
    ),
    Fault(
        "l1: steering's error is not checkpointed",
        "sparsity.py",
        '"first": self._first, "error": self._error, "sent": sent}',
        '"first": self._first, "error": 0.0, "sent": sent}',
        "sparsity train",
    ),
    Fault(
        "l1: a neuron that fires once counts as silent",
        "sparsity.py",
        "torch.where(stats.counts > 0, 0, clock.to",
        "torch.where(stats.counts > 1, 0, clock.to",
        "sparsity train",
    ),
    Fault(
        "l1: a planner's counts are lost in a checkpoint",
        "sparsity.py",
        '"sums": None if self._sums is None else self._sums.cpu(),',
        '"sums": None,',
        "planner sparsity",
    ),
    Fault(
        "resume: a damaged file is taken for sound",
        "train/files.py",
        'if _checksum(folder / name) != facts["sha256"]:',
        'if _checksum(folder / name) == "":',
        "run_files faults",
    ),
    Fault(
        "resume: a copied checkpoint is taken for another step",
        "train/files.py",
        "if manifest != what:",
        "if False:",
        "run_files",
    ),
    Fault(
        "resume: clocks start anew",
        "train/trainer.py",
        'trainer.clocks = saved["clocks"]',
        "pass",
        "train run_files",
    ),
    Fault(
        "resume: the last validation is not logged again",
        "train/trainer.py",
        'if "eval_loss" not in row or row["step"] < last]',
        'if "eval_loss" not in row or row["step"] <= last]',
        "train run_files faults",
    ),
]


def apply(fault: Fault, source: Path) -> None:
    path = source / "twell" / fault.path
    text = path.read_text(encoding="utf-8")
    if text.count(fault.right) != 1:
        raise ValueError(f"{fault.name}: {fault.path} holds {text.count(fault.right)} times {fault.right!r}, not once")
    path.write_text(text.replace(fault.right, fault.wrong), encoding="utf-8")


def first_failure(fault: Fault, seconds: int) -> str | None:
    """The first test that fails, None if all pass. A crash or a test that takes too long counts as a failure."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "src"
        shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
        apply(fault, source)
        tests = [str(ROOT / "tests" / f"test_{name}.py") for name in fault.tests.split()]
        options = ["-x", "-q", "-rf", "-m", "not slow and not gpu", "-p", "no:cacheprovider", "--tb=no"]
        environment = {**os.environ, "PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
        command = [sys.executable, "-m", "pytest", *options, *tests]
        try:
            run = subprocess.run(
                command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=seconds, check=False
            )
        except subprocess.TimeoutExpired:
            return f"no end after {seconds} s"
    if run.returncode == 0:
        return None
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else f"pytest ended with {run.returncode}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="WORD", help="faults whose name contains it")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--seconds", type=int, default=600, help="limit for one fault")
    given = parser.parse_args()
    faults = [fault for fault in FAULTS if given.only in fault.name]
    start, missed = time.monotonic(), []
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        running = {pool.submit(first_failure, fault, given.seconds): fault for fault in faults}
        for done in concurrent.futures.as_completed(running):
            fault, failure = running[done], done.result()
            if failure is None:
                missed.append(fault)
            print(f"{'found ' if failure else 'MISSED'} {fault.name}: {failure or fault.tests}", flush=True)
    found = len(faults) - len(missed)
    print(f"{found} of {len(faults)} found in {(time.monotonic() - start) / 60:.0f} minutes")
    if len(missed) > len(FAULTS) - FOUND_AT_LEAST:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
