"""Record which neurons of a trained model fire, and benchmark on the record.

    python tools/trace_bench.py record my-run/model --text book.txt --out book.npz
    python tools/trace_bench.py ffn --trace book.npz -m 16384 --out rows.jsonl        # on a GPU, as are all below
    python tools/trace_bench.py train --trace book.npz -m 16384
    python tools/trace_bench.py model --trace book.npz --preset 1.5b

Rows are those of ``twell bench``, one for each layer of the trace or for the model; they go to standard output, too.
For a model of your own, ``twell bench model MODEL --text FILE --layers`` says more: it times every FFN as it is.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import traces
from twell.workbench.bench import rows as result_files
from twell.workbench.bench.rows import Row
from twell.workbench.cli.common import load_model
from twell.workbench.trace import record_text


def measured(given: argparse.Namespace) -> Iterator[Row]:
    import trace_ffn  # these need triton
    import trace_model
    import trace_train

    trace, device = traces.load(given.trace, given.hidden), torch.device(given.device)
    patterns = [trace.pattern(i) for i in range(trace.layers)]
    how: dict[str, Any] = {"device": device, "seconds": given.seconds}
    if given.what == "model":
        yield trace_model.measure(patterns, given.preset, (given.batch, given.length), called=False, **how)
        return
    how["dtype"] = torch.bfloat16 if device.type == "cuda" else torch.float32
    for M in given.tokens or [16384]:
        for name, pattern in zip(trace.names, patterns, strict=True):
            if given.what == "ffn":
                yield trace_ffn.measure(name, pattern, M, given.width, **how)
            else:
                yield trace_train.measure(name, pattern, M, given.width, **how)


def record(given: argparse.Namespace) -> None:
    model, tokenizer = load_model(given.model)
    trace = record_text(model, tokenizer, given.text, length=given.length, tokens=given.tokens)
    traces.save(trace, given.out)
    for layer in trace.summary():
        print(json.dumps(layer._asdict()))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    recording = commands.add_parser("record")
    recording.add_argument("model", help="a folder or hub name")
    recording.add_argument("--text", type=Path, required=True)
    recording.add_argument("--tokens", type=int, default=8192)
    recording.add_argument("--length", type=int, help="of a sequence; default: 1024, or the model's context")
    recording.add_argument("--out", type=Path, required=True)
    for name in ("ffn", "train", "model"):
        command = commands.add_parser(name)
        command.add_argument("--trace", type=Path, required=True)
        command.add_argument("--device", default="cuda")
        command.add_argument("--seconds", type=float, default=3.0)
        command.add_argument("--out", type=Path, help="a .jsonl file to append the rows to")
        command.add_argument("-f", "--hidden", type=int, default=5632, help="F, where the trace does not hold it")
        if name == "model":
            command.add_argument("--preset", default="1.5b")
            command.add_argument("--batch", type=int, default=32)
            command.add_argument("--length", type=int, default=2048)
        else:
            command.add_argument("-m", "--tokens", type=int, action="append", help="repeatable; default: 16384")
            command.add_argument("-d", "--width", type=int, default=2048)
    given = parser.parse_args(arguments)
    if given.what == "record":
        record(given)
        return
    for row in measured(given):
        print(json.dumps(row), flush=True)
        if given.out is not None:
            result_files.append(row, given.out)


if __name__ == "__main__":
    main()
