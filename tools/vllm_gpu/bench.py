"""vLLM's engine on a GPU, without its compiled kernels: sparse by twell's plugin against dense.

``python tools/vllm_gpu/bench.py --out FOLDER`` makes a model, measures each engine in a process of its own, in turn,
checks their tokens and prints a table. FOLDER gets log.txt, rows.jsonl and, with --timeline, traces. A single step:
``bench.py prep``, ``engine --name sparse-compiled``, ``verify`` or ``table``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import prelude

TIMELINES = ((1, 256), (1, 2048))
LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx", "cudaGraphLaunch"}
Row = dict[str, Any]


def emit(args: argparse.Namespace, row: Row) -> None:
    print("ROW", json.dumps(row), flush=True)
    with (Path(args.out) / "rows.jsonl").open("a") as f:
        f.write(json.dumps(row) + "\n")


def emit_all(args: argparse.Namespace, rows: Iterable[Row]) -> None:
    for row in rows:
        emit(args, row)


# One engine


def start(args: argparse.Namespace) -> Any:
    """An engine, compiled or not; dense is vLLM's transformers backend, llama vLLM's own class with SiLU."""
    from vllm import LLM

    kind, mode = args.name.split("-")
    compilation: Row = {"custom_ops": ["none"]}
    if mode == "compiled" and args.capture == "short":
        compilation["cudagraph_capture_sizes"] = sorted(args.batches)
    elif mode == "compiled":  # vLLM's list, which by default ends earlier with few sequences
        compilation["max_cudagraph_capture_size"] = 512
    longest, most = max(n for _, n in args.prompts), max(b * n for b, n in args.prompts)
    return LLM(
        str(Path(args.folder) / kind),
        model_impl="transformers" if kind == "dense" else "auto",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=longest + 64,
        max_num_seqs=max(args.batches),
        max_num_batched_tokens=most,
        enable_prefix_caching=False,
        enforce_eager=mode == "eager",
        attention_config={"backend": "TRITON_ATTN"},
        compilation_config=compilation,
        disable_log_stats=True,
        kv_cache_memory_bytes=args.memory or None,
    )


class Engine:
    """A started engine and its measurements, each of which gives a row."""

    def __init__(self, args: argparse.Namespace) -> None:
        began = time.perf_counter()
        self.args, self.llm = args, start(args)
        self.seconds_to_start = round(time.perf_counter() - began, 1)

    def run(self, batch: int, length: int, new: int) -> tuple[float, list[list[int]]]:
        """(milliseconds, tokens)."""
        import model
        from vllm import SamplingParams

        how = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        asked: Any = [{"prompt_token_ids": [*ids]} for ids in model.prompts(batch, length, self.args.vocab)]
        began = time.perf_counter()
        out = self.llm.generate(asked, how, use_tqdm=False)
        return (time.perf_counter() - began) * 1e3, [list(o.outputs[0].token_ids) for o in out]

    def times(self, batch: int, length: int, new: int) -> list[float]:
        for _ in range(2):  # compiles kernels and captures graphs
            self.run(batch, length, new)
        return [self.run(batch, length, new)[0] for _ in range(self.args.rounds)]

    def started(self) -> Row:
        from twell.nn import sparse_ffns

        def inside(model: Any) -> Row:
            ffns = [ffn for _, ffn in sparse_ffns(model)]
            plan = str(getattr(ffns[0], "plan", None))[:400] if ffns else None
            return {"class": type(model).__name__, "ffns": len(ffns), "plan": plan}

        return {"what": "start", "seconds": self.seconds_to_start, **self.llm.apply_model(inside)[0]}

    def prompt(self, batch: int, length: int) -> Row:
        """Prefill of prompts, up to the first token of each."""
        return {"what": "prompt", "size": f"{batch} x {length}", **spread(self.times(batch, length, 1))}

    def decode(self, batch: int) -> Row:
        """A decode step: the time of many tokens less that of one."""
        import model

        first = statistics.median(self.times(batch, model.PROMPT, 1))
        steps = [(t - first) / (self.args.new - 1) for t in self.times(batch, model.PROMPT, self.args.new)]
        return {"what": "decode", "size": str(batch), **spread(steps)}

    def tokens(self) -> Row:
        import model

        tokens = self.run(model.CHECKED, model.PROMPT, model.NEW)[1]
        path = Path(self.args.folder) / f"tokens-{self.args.name}.json"
        same = path.exists() and json.loads(path.read_text()) == tokens
        path.write_text(json.dumps(tokens))
        return {"what": "generated", "as_in_the_turn_before": same}

    def timeline(self, batch: int, length: int) -> Row:
        """The work of GPU and host in a prefill. The profiler slows the host down."""
        from torch.profiler import ProfilerActivity, profile

        self.times(batch, length, 1)
        for _ in range(2):  # the first one sets the profiler up
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
                ms = self.run(batch, length, 1)[0]
        seen.export_chrome_trace(
            str(Path(self.args.out) / f"{self.args.name}-{self.args.turn}-{batch}x{length}.json.gz")
        )
        events = [e for e in seen.events() if not e.is_user_annotation]
        return {"what": "timeline", "size": f"{batch} x {length}", "ms_profiled": round(ms, 2), **summary(events)}


def spread(ms: list[float]) -> Row:
    return {"min": round(min(ms), 3), "median": round(statistics.median(ms), 3), "ms": [round(t, 3) for t in ms]}


def summary(events: list[Any]) -> Row:
    """Summary of a profile's events; times in microseconds."""
    from torch.autograd import DeviceType

    gpu = [e for e in events if e.device_type == DeviceType.CUDA]
    cpu = [e for e in events if e.device_type == DeviceType.CPU]
    span = max((e.time_range.end for e in gpu), default=0) - min((e.time_range.start for e in gpu), default=0)
    ours = [e.cpu_time_total for e in cpu if e.name.startswith("twell::")]
    return {
        "gpu_us": round(sum(e.time_range.elapsed_us() for e in gpu)),
        "gpu_first_to_last_us": round(span),
        "gpu_idle_us": round(span - busy(gpu)),
        "kernels": sum(not e.name.startswith(("Memcpy", "Memset")) for e in gpu),
        "launches": Counter(e.name for e in cpu if e.name in LAUNCHES),
        "twell_ops": len(ours),
        "twell_ops_cpu_us": round(sum(ours)),
        "largest_gpu": largest(gpu, lambda e: e.time_range.elapsed_us()),
        "largest_cpu": largest(cpu, lambda e: e.self_cpu_time_total),
    }


def busy(events: list[Any]) -> float:
    """The time in which at least one event runs."""
    total, until = 0.0, float("-inf")
    for e in sorted(events, key=lambda e: e.time_range.start):
        total += max(0.0, e.time_range.end - max(e.time_range.start, until))
        until = max(until, e.time_range.end)
    return total


def largest(events: list[Any], us: Callable[[Any], float]) -> list[Any]:
    """[microseconds, count, name] of the 15 names that take the most time."""
    time_of: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for e in events:
        time_of[e.name] += us(e)
        count[e.name] += 1
    return [[round(t), count[name], name[:80]] for name, t in time_of.most_common(15)]


def engine(args: argparse.Namespace) -> None:
    prelude.patch()
    it = Engine(args)
    measures: list[Callable[[], Row]] = [it.started, it.tokens]
    measures += [partial(it.decode, batch) for batch in args.batches]
    measures += [partial(it.prompt, *size) for size in args.prompts]
    if args.timeline:
        measures += [partial(it.timeline, *size) for size in TIMELINES]
    for measure in measures:
        try:
            row = measure()
        except Exception:
            row = {"what": "failed", "measure": str(measure)[:200], "error": traceback.format_exc()[-600:]}
        emit(args, {"name": args.name, "turn": args.turn, **row})
    sys.stdout.flush()
    os._exit(0)  # the engine's threads could block a normal exit


# All steps


def in_process(args: argparse.Namespace, step: str, limit: float, *more: str) -> bool:
    """Run one step in its own process, killed after ``limit`` seconds; returns whether it finished."""
    began = time.monotonic()
    log = Path(args.out) / "log.txt"
    options = sys.argv[2:] if sys.argv[1:2] == ["all"] else sys.argv[1:]
    command = [sys.executable, "-u", __file__, step, *options, *more]
    with log.open("ab") as f:
        at = f.tell()
        process = subprocess.Popen(command, stdout=f, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            how = f"exit {process.wait(limit)}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            how = "time limit"
    text = log.read_bytes()[at:].decode(errors="replace")
    rows = [line[:500] for line in text.splitlines() if line.startswith("ROW")]
    print(*rows, f"--- {step} {' '.join(more)}: {how}, {time.monotonic() - began:.0f} s", sep="\n", flush=True)
    if how != "exit 0":
        print(text[-2500:], flush=True)
    return how == "exit 0"


def everything(args: argparse.Namespace) -> None:
    """Run the engines in turn (sparse, dense, sparse, dense) until the time is over, so that a busy host shows."""
    end = time.monotonic() + args.seconds
    steps: list[tuple[str, ...]] = [("prep",)]
    for turn in range(args.repeats):
        steps += [("engine", "--name", name, "--turn", str(turn)) for name in args.names]
    for old in (*Path(args.out).glob("rows.jsonl"), *Path(args.folder).glob("tokens-*.json")):
        old.unlink()
    done = []
    for step, *more in [*steps, ("verify",)]:
        left = end - time.monotonic()
        if left < 20:
            print("OUT OF TIME before", step, *more, flush=True)
            break
        done.append(in_process(args, step, min(left, args.limit), *more))
        if not done[0]:  # no model
            break
    table(args)
    sys.exit(done.count(True) <= len(steps))


def table(args: argparse.Namespace) -> None:
    """Times of all turns together, the median of each turn, and the ratio of medians to the first engine's."""
    path = Path(args.out) / "rows.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    timed = [row for row in rows if "ms" in row]
    print(f"{'ms':27}{'median':>9}{'min':>9}{'max':>9}{'ratio':>7}   median of each turn")
    for what, size in dict.fromkeys((row["what"], row["size"]) for row in timed):
        base = None
        for name in args.names:
            turns = [r["ms"] for r in timed if (r["what"], r["size"], r["name"]) == (what, size, name)]
            if not turns:
                continue
            ms = [t for turn in turns for t in turn]
            median = statistics.median(ms)
            base = base or median
            each = " ".join(f"{statistics.median(turn):.3f}" for turn in turns)
            label = f"{what} {size}"
            print(f"{label:16} {name:18}{median:9.3f}{min(ms):9.3f}{max(ms):9.3f}{median / base:7.2f}   {each}")


def size(text: str) -> tuple[int, int]:
    batch, length = text.split("x")
    return int(batch), int(length)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("step", nargs="?", default="all", choices=("all", "prep", "engine", "verify", "table"))
    p.add_argument("--out", default="scratch/vllm_gpu")
    p.add_argument("--folder", default=os.path.join(tempfile.gettempdir(), "twell-vllm-gpu"), help="of the model")
    p.add_argument("--names", nargs="+", default=["sparse-compiled", "dense-compiled"], help="engines")
    p.add_argument("--repeats", type=int, default=2, help="turns of all engines")
    p.add_argument("--seconds", type=float, default=540, help="limit of all steps together")
    p.add_argument("--limit", type=float, default=180, help="limit of one step, in seconds")
    p.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64], help="sequences generated at once")
    p.add_argument("--new", type=int, default=128, help="tokens generated")
    p.add_argument("--prompts", type=size, nargs="+", help="sequences x tokens of prompt passes, such as 8x2048")
    p.add_argument("--rounds", type=int, default=7, help="timed runs of each")
    p.add_argument("--capture", choices=("short", "default"), default="short", help="graphs: --batches, or 1..512")
    p.add_argument("--timeline", action="store_true", help="profile prompt passes of 256 and 2048 tokens, too")
    p.add_argument("--layers", type=int, default=16)
    p.add_argument("--width", type=int, default=2048)
    p.add_argument("--hidden", type=int, default=5632)
    p.add_argument("--heads", type=int, default=16)
    p.add_argument("--vocab", type=int, default=32000)
    p.add_argument("--workload", default="skew29")
    p.add_argument("--calibrate", type=int, default=1024, help="tokens of each of 8 sequences that thresholds fit")
    p.add_argument("--memory", type=int, default=8 << 30, help="bytes for keys and values; 0: as vLLM measures")
    p.add_argument("--device", default="cuda", help="where the model is made")
    p.add_argument("--name", default="sparse-compiled", help="of one engine, for the step engine")
    p.add_argument("--turn", type=int, default=0, help="its turn")
    p.set_defaults(prompts=[(8, 32), (64, 32), (1, 256), (1, 512), (1, 1024), (1, 2048), (8, 2048)])
    return p


def main() -> None:
    args = parser().parse_args()
    Path(args.out).mkdir(parents=True, exist_ok=True)
    if args.step in ("prep", "engine", "verify"):
        prelude.setup()
    if args.step in ("prep", "verify"):
        import model

        emit_all(args, model.make(args) if args.step == "prep" else model.verify(args))
    else:
        {"all": everything, "engine": engine, "table": table}[args.step](args)


if __name__ == "__main__":
    main()
