"""Write the tables of README.md and docs/ from the rows in results/: ``make tables``.

    python tools/tables.py                         # all documents that have tables
    python tools/tables.py --check README.md       # changes nothing; fails where a table is not up to date

A document names a table by a pair of comments; the lines between them are replaced:

    <!-- table ffn -->
    ...
    <!-- end -->

Below each table stand the GPU or CPU, the versions, the commit and the command it was measured with.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import readme_tables as readme
import speed_tables as speed
import training_tables as training
from readme_tables import is_shape
from speed_tables import Row, is_traced_layer, workload
from twell.workbench.bench import rows as result_files

ROOT = Path(__file__).parents[1]
DOCUMENTS = ("docs/results.md", "docs/training.md", "docs/converting.md", "README.md")
_BLOCK = re.compile(r"(<!-- table ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


class Table(NamedTuple):
    stems: str  # of its files in results/, with spaces between them
    command: str  # that makes its rows
    make: Callable[[list[Row]], list[str]]  # its lines
    keeps: Callable[[Row], bool] = lambda row: True  # which rows it shows

    @property
    def files(self) -> list[str]:
        return [f"{stem}.jsonl" for stem in self.stems.split(" ")]


def updated(document: Path, folder: Path) -> str:
    """The text of ``document`` with every table in it made anew from the rows in ``folder``."""
    text = document.read_text()
    if text.count("<!-- table ") != len(_BLOCK.findall(text)):
        raise ValueError(f"{document}: a table's comment is not closed by <!-- end -->, or not on a line of its own")
    link = Path(os.path.relpath(folder, document.parent)).as_posix()
    return _BLOCK.sub(lambda block: block[1] + render(block[2], folder, link) + block[3], text)


def render(name: str, folder: Path, link: str) -> str:
    """The lines of one table; ``link`` leads from its document to ``folder``."""
    if name not in TABLES:
        raise ValueError(f"unknown table {name!r}: expected one of {', '.join(sorted(TABLES))}")
    table = TABLES[name]
    paths = [folder / file for file in table.files]
    for path in paths:
        if not path.exists():
            raise ValueError(f"the table {name!r} needs {path}")
    rows = [row for row in result_files.read(paths) if table.keeps(row)]
    if not rows:
        raise ValueError(f"{' and '.join(map(str, paths))} has no rows for the table {name!r}")
    links = " and ".join(f"[`{file}`]({link}/{file})" for file in table.files)
    return "\n".join([*table.make(rows), "", f"{_measured_with(rows)}; rows: {links}; `{table.command}`", ""])


def _measured_with(rows: list[Row]) -> str:
    """Machine, versions and commits of rows."""
    machine = " or ".join(dict.fromkeys(map(_machine, rows)))
    used = rows[0]["versions"]
    versions = [f"{name} {used[name]}" for name in ("torch", "triton", "transformers") if name in used]
    commits = sorted({str(row["commit"]) for row in map(result_files.measured, rows) if row.get("commit")})
    commit = [f"commit {' and '.join(commits)}"] if commits else []
    return ", ".join([machine[0].upper() + machine[1:], *versions, *commit])


def _machine(row: Row) -> str:
    if "gpu" in row:
        return f"one {row['gpu']}"
    if "cpu" in row:
        return f"{row['threads']} {'core' if row['threads'] == 1 else 'cores'} of an {row['cpu']}"
    return f"one {row['device']}"


# -- Which rows a table shows ----------------------------------------------------------------------


def _is_workload(row: Row) -> bool:
    return not is_traced_layer(row) and row.get("level", "ffn") == "ffn"


def _is_step(row: Row) -> bool:
    """A training step of both variants: one that does not fit the GPU has nothing to compare."""
    return row.get("level") == "model" and "speedup" in row


def _is_of_readme(row: Row) -> bool:
    """Training of one FFN; of the 1.5B model its forward, a token, and a step of the batch that fills a GPU."""
    if row["bench"] == "decode":
        return bool(row["preset"] == "1.5b" and row["batch"] == 1)
    if row["bench"] == "generate" or is_shape(row):
        return True
    if row["bench"] == "model" or _is_step(row):
        return row.get("preset") == "1.5b" and row["batch"] != 12
    return _is_workload(row)


def _is_skewed(row: Row) -> bool:
    """A gated FFN of the usual shape whose neurons fire unevenly."""
    return str(row["workload"]).startswith("skew") and workload(row) == row["workload"]


def _is_usual(row: Row) -> bool:
    return is_traced_layer(row) or (row["workload"] in {"skew29", "skew100", "skew1000"} and _is_skewed(row))


def _is_gated_fp32(row: Row) -> bool:
    return bool(row["kind"] == "gated" and row["dtype"] == "float32")


_FFN, _TRAIN, _WHOLE = "twell bench ffn --device cuda", "twell bench train", "twell bench train --model"
_TRACED = "python tools/trace_bench.py"
_SMALL = "twell train --preset small --compile --data train.u16.xz --validation val.u16 --tokenizer tokenizer.json"
_CONVERT = "twell train --from SILU/model --relufy --data TEXT --out RUN steps=... lr=... l1=..."
_COMMANDS = {
    "few": f"{_FFN} --graph -w WORKLOAD -m 1 -m 8 ... -m 1024 -m 2048 [-d 4096 -f 14336]",
    "half": f"{_FFN} --no-called [--graph] -w skew2816 -w skew1126 -w skew563 -w skew282 -m 1 ... -m 16384",
    "model": "twell bench model --preset 1.5b -w skew29 --shape 64x2048 [--compile]; "
    f"{_TRACED} model --trace TRACE.npz --preset 1.5b; "
    "twell bench model --depth 16 --shape 1x1 --shape 4x2048 --generate",
    "models": "twell bench model; twell bench decode --preset 1.5b --compile; twell bench train [--model]",
    "paper": f"twell bench model --shape 64x2048; {_WHOLE} --batch 12",
    "decode": "twell bench decode --preset 1.5b -w skew29 --batch 1 --batch 8 --compile",
    "cpu decode": "twell bench decode --preset 0.5b --context 128 --seconds 10 --device cpu",
    "text": "twell eval RUN/model --text wikitext2_raw_test.txt --last-words lambada_test.jsonl",
    "eval fp8": "twell eval RUN/model --fp8 --data tasks/ --text val.u16",
}
TABLES = {
    "ffn": Table("ffn-h200", f"{_FFN} -w skew29 -m 4096 -m 16384 -m 131072", speed.ffn, _is_workload),
    "ffn-layers": Table("ffn-h200", f"{_TRACED} ffn --trace TRACE.npz", speed.layers, is_traced_layer),
    "ffn-few": Table("ffn-few-h200", _COMMANDS["few"], speed.few_tokens, _is_workload),
    "ffn-between-layers": Table(
        "ffn-few-h200", f"{_TRACED} ffn --trace TRACE.npz -m 256 -m 1024", speed.layers_by_tokens, is_traced_layer
    ),
    "ffn-fp8": Table(
        "ffn-few-h200 ffn-h200",
        f"{_FFN} [--graph] -w skew29 -m 1 ... -m 16384",
        speed.sparse_in_fp8,
        lambda row: row["workload"] == "skew29" == workload(row) and "speedup_fp8" in row,
    ),
    "ffn-half": Table("ffn-half-h200", _COMMANDS["half"], speed.by_share),
    "model": Table("model-h200", _COMMANDS["model"], speed.model),
    "train-ffn": Table(
        "train-h200", f"{_TRAIN} -w skew29 -w skew100 -m 16384 [--plain]", speed.train_ffn, _is_workload
    ),
    "train-layers": Table("train-h200", f"{_TRACED} train --trace TRACE.npz -m 16384", speed.layers, is_traced_layer),
    "train-step": Table("train-h200", f"{_WHOLE} --batch 17 -w skew29", speed.train_step, _is_step),
    "paper": Table("model-h200 train-h200", _COMMANDS["paper"], speed.paper, lambda row: "preset" in row),
    "gpu-decode": Table("decode-h200", _COMMANDS["decode"], speed.decode_with_fp8),
    "cpu-decode": Table("cpu-decode", _COMMANDS["cpu decode"], speed.decode),
    "readme-gpu": Table("ffn-h200", f"{_FFN} -w skew29 -m 16384", readme.gpu, _is_usual),
    "readme-few": Table(
        "ffn-few-h200", f"{_FFN} --graph -w skew29 -m 1 -m 8 -m 16 -m 32 -m 64", readme.few, _is_skewed
    ),
    "readme-models": Table("model-h200 decode-h200 train-h200", _COMMANDS["models"], readme.models, _is_of_readme),
    "readme-cpu": Table("cpu-ffn", "make bench", readme.cpu, _is_gated_fp32),
    "small": Table("train-small", f"{_SMALL} steps=1225 l1=4e-4", training.runs),
    "small-layers": Table(
        "train-small",
        f"{_SMALL} steps=1225 l1=4e-4",
        training.active_by_layer,
        lambda row: bool(row.get("active")),
    ),
    "small-text": Table("train-small", _COMMANDS["text"], training.other_text),
    "target-tiny": Table("target-tiny", "twell train --preset tiny [l1=... | target_active=...]", training.targets),
    "target-small": Table("target-small", f"{_SMALL} steps=1225", training.targets),
    "convert-tiny": Table("convert-tiny", _CONVERT, training.conversions),
    "convert-small": Table("convert-small", _CONVERT, training.conversions),
    "eval-fp8": Table("eval-fp8-small", _COMMANDS["eval fp8"], training.evaluations),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("documents", nargs="*", type=Path, help=f"default: {', '.join(DOCUMENTS)}")
    parser.add_argument("--rows", type=Path, default=ROOT / "results", help="the folder of .jsonl files")
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a table is not up to date")
    given = parser.parse_args(arguments)
    stale = []
    for document in given.documents or [ROOT / name for name in DOCUMENTS]:
        old, new = document.read_text(), updated(document, given.rows)
        if "<!-- table " not in old:
            raise ValueError(f"{document} has no tables: see docs/results.md for how they begin and end")
        if new != old:
            stale.append(str(document))
            if not given.check:
                document.write_text(new)
    if given.check and stale:
        print(f"not up to date: {', '.join(stale)}; run make tables", file=sys.stderr)
        return 1
    print(f"changed: {', '.join(stale)}" if stale else "up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
