"""The tables of documents: made from rows, and up to date."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import speed_tables
import tables
import training_tables

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / name for name in tables.DOCUMENTS]
Row = dict[str, Any]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_are_up_to_date(document: Path) -> None:
    assert tables.updated(document, ROOT / "results") == document.read_text(), "run make tables"


def test_every_table_is_in_a_document_and_no_row_names_a_place_on_a_machine() -> None:
    text = "".join(document.read_text() for document in DOCUMENTS)
    assert {name for name in tables.TABLES if f"<!-- table {name} -->" in text} == set(tables.TABLES)
    for path in (ROOT / "results").glob("*.jsonl"):
        assert '"/' not in path.read_text(), path.name


class Results:
    """A copy of results/, whose rows can be changed, and the tables made from them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, file: str) -> list[Row]:
        return [json.loads(line) for line in (self.folder / f"{file}.jsonl").read_text().splitlines()]

    def write(self, file: str, rows: list[Row]) -> None:
        (self.folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def change(self, file: str, fields: Row | Callable[[Row], Row], **wanted: object) -> None:
        """Set fields in the rows that have what is wanted."""
        rows = self.read(file)
        of = fields if callable(fields) else lambda row: fields
        self.write(file, [r | of(r) if all(r.get(k) == v for k, v in wanted.items()) else r for r in rows])

    def append(self, file: str, *rows: Row) -> None:
        self.write(file, [*self.read(file), *rows])

    def first(self, file: str, **wanted: object) -> Row:
        return next(row for row in self.read(file) if all(row.get(k) == v for k, v in wanted.items()))

    def lines(self, name: str) -> list[str]:
        return tables.render(name, self.folder, "r").splitlines()

    def line(self, name: str, start: str) -> list[str]:
        """The cells of the first line that starts so."""
        found = next(line for line in self.lines(name) if line.startswith(f"| {start}"))
        return [cell.strip() for cell in found.strip("|").split("|")]


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(Path(shutil.copytree(ROOT / "results", tmp_path / "results")))


@pytest.mark.parametrize(
    "name",
    ["ffn", "ffn-few", "ffn-layers", "gpu-decode", "model", "train-ffn", "train-layers", "train-step"],
)
def test_numbers_come_from_rows(name: str, results: Results) -> None:
    (file,) = tables.TABLES[name].files
    assert "**98.77x**" not in "".join(results.lines(name))

    def faster(row: Row) -> Row:
        new = {"dense": spread(98.7651), "compiled": spread(99.0), "sparse": spread(1.0)}
        if row.get("level") == "model":
            times = {way: row[way] | {"step_ms": new[way]} for way in ("dense", "sparse")}
        else:
            times = {f"{way}_ms": ms for way, ms in new.items()}
        return {"speedup": 98.764, **times}  # the row's own is rounded: the table's comes from the times

    results.change(Path(file).stem, lambda row: faster(row) if "speedup" in row else {})
    text = tables.render(name, results.folder, "elsewhere/results")
    assert "**98.77x**" in text and f"(elsewhere/results/{file})" in text and tables.TABLES[name].command in text


def test_a_table_names_machine_versions_and_commits_of_its_own_rows(results: Results) -> None:
    results.change("train-h200", lambda row: {"commit": row["level"]})
    assert "NVIDIA H200, torch 2.11.0+cu130, triton 3.6.0, commit model;" in results.lines("train-step")[-1]
    assert "commit ffn;" in results.lines("train-layers")[-1]


def test_a_document_is_changed_between_the_comments_alone(results: Results, tmp_path: Path) -> None:
    document = tmp_path / "docs" / "page.md"
    document.parent.mkdir()
    document.write_text("before\n<!-- table model -->\nold\n<!-- end -->\nafter\n")
    text = tables.updated(document, results.folder)
    assert text.startswith("before\n<!-- table model -->\n| model | activations |") and "old" not in text
    assert text.endswith("<!-- end -->\nafter\n") and "(../results/model-h200.jsonl)" in text
    document.write_text(text)
    assert tables.updated(document, results.folder) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!-- table nothing -->\n<!-- end -->\n", "unknown table 'nothing'"),
        ("<!-- table ffn -->\n", "not closed"),
        ("<!-- table ffn --> here\n<!-- end -->\n", "not closed"),
        ("<!-- table model -->\n<!-- end -->\n", "needs"),
        ("<!-- table ffn -->\n<!-- end -->\n", "has no rows"),
        ("no table", "has no tables"),
    ],
)
def test_what_is_wrong_is_said(text: str, says: str, results: Results, tmp_path: Path) -> None:
    (results.folder / "model-h200.jsonl").unlink()
    results.write("ffn-h200", [])
    (tmp_path / "page.md").write_text(text)
    with pytest.raises(ValueError, match=says):
        tables.main([str(tmp_path / "page.md"), "--rows", str(results.folder)])


def test_the_command(results: Results, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "page.md"
    document.write_text("<!-- table model -->\n<!-- end -->\n")
    command = [str(document), "--rows", str(results.folder)]
    assert tables.main([*command, "--check"]) == 1 and "not up to date" in capsys.readouterr().err
    assert tables.main(command) == 0 and "| 1.5b | skew29 | eager |" in document.read_text()
    assert tables.main([*command, "--check"]) == 0 and "up to date" in capsys.readouterr().out


def test_the_papers_numbers_stand_beside_the_last_of_ours(results: Results) -> None:
    step = results.first("train-h200", level="model")
    results.append("train-h200", step | {"preset": "2b", "speedup": 1.5, "peak_ratio": 0.5})
    cells = results.line("paper", "2b")
    assert cells[1] == "+20.5 %" and cells[5:7] == ["+21.9 %", "+50.0 %"] and cells[-1] == "-50.0 %"
    results.write("train-h200", [])
    assert results.line("paper", "2b")[5:] == ["+21.9 %", "", "larger micro-batch", ""]


def test_layers_tell_how_far_counts_explain_speed(results: Results) -> None:
    def said() -> str:
        return "".join(results.lines("ffn-layers"))

    assert "Correlation of active neurons and speedup: -0.9" in said()
    results.change("ffn-h200", lambda row: {"speedup": row["mean_active"]})
    assert "Correlation of active neurons and speedup: 1.00" in said()
    results.change("ffn-h200", {"speedup": 1.5})
    assert "Correlation" not in said()


def test_plain_ffns_and_rows_that_compare_nothing(results: Results) -> None:
    assert results.line("train-ffn", "skew29, plain | 16384")
    before = results.lines("readme-models"), results.lines("train-step")
    names = [line.split(" | ")[0] for line in before[0]]
    place = names.index("| training, one FFN, skew29, plain, 16384 tokens")
    assert names[place - 1] == "| training, one FFN, skew100, 16384 tokens"
    alone = results.first("train-h200", level="model") | {"dense": "out of memory"}
    del alone["speedup"], alone["peak_ratio"]
    results.append("train-h200", alone)
    assert (results.lines("readme-models"), results.lines("train-step")) == before


# -- evaluations ------------------------------------------------------------------------------------------


def test_the_ways_to_run_a_model_with_fp8(results: Results) -> None:
    measured = {"device": "cuda", "gpu": "a GPU", "versions": {"torch": "2"}, "fp8_layers": 10, "sparse_layers": 9}
    found = {"tokens": 1000, "other": 3, "beyond_rounding": 1, "moved": [0.5, 0.25, 0.125], "largest_logit": 20.0}
    made = []
    for mode, loss, acc, to in (
        ("dense", 4.0, 0.5, None),
        ("FP8 dense", 4.04, 0.5, "dense"),
        ("FP8 sparse", 4.044, 0.25, "FP8 dense"),
    ):
        of = {"model": "run/l1-0.0004/model", "mode": mode, **measured}
        text = {"eval": "text", "file": "data/val.u16", "tokens": 1000, "loss": loss, "loss_error": 0.02, **of}
        task = {"eval": "task", "task": "piqa", "items": 8, "acc": acc, "acc_error": 0.1, **of}
        if to is not None:
            against = {"model": of["model"], "mode": to}
            text["against"] = {**against, "loss": round(loss - (4.0 if to == "dense" else 4.04), 4), "loss_error": 0.01}
            task["against"] = {**against, "acc": acc - 0.5, "acc_error": 0.1}
        made += [text | ({"predictions": found} if mode == "FP8 sparse" else {}), task]
    results.write("eval-fp8-small", made)
    lines = results.lines("eval-fp8")
    assert lines[0].endswith("| dense | FP8 dense | FP8 sparse | FP8 dense less dense | FP8 sparse less FP8 dense |")
    losses = ["4.0000 ± 0.0200", "4.0400 ± 0.0200", "4.0440 ± 0.0200"]
    differences = ["**+0.0400 ± 0.0100 (+1.00 %)**", "+0.0040 ± 0.0100 (+0.10 %)"]
    assert results.line("eval-fp8", "val.u16") == ["val.u16", "loss", "1000", *losses, *differences]
    assert lines[3].endswith("| +0.00 ± 10.00 | **-25.00 ± 10.00** |")
    assert "in 9 of 10 layers" in lines[5] and "at 3 of 1,000 places, 1 of them beyond rounding" in lines[5]
    assert "moved by 0.25 in the median of these and 0.5 at most" in lines[5]


# -- training runs and their logs -------------------------------------------------------------------------


def test_a_run_is_compared_with_the_first_ones_loss_at_its_end() -> None:
    def log(name: str, losses: list[float], rate: float) -> list[Row]:
        entries = [{"run": name, "step": 10 * i, "ce_loss": loss} for i, loss in enumerate(losses, 1)]
        on_the_way = {"tokens_per_second": rate, "watts": 500.0}
        return [e | on_the_way | {"tokens": 6e5 * i, "active_mean": 200 / i} for i, e in enumerate(entries, 1)]

    summary = {"validation_loss": 2.0, "bits_per_byte": 1.0, "peak_gpu_gb": 50.04}
    slow, fast = [6.0, 5, 4, 3, 2, 2, 2, 2, 2, 2], [5.0, 4, 3, 2, 2, 2, 2, 2, 1.9, 1.8]
    rows: list[Row] = [summary | {"name": "dense"}, summary | {"name": "sparse", "target": {"neurons": 50}}]
    lines = training_tables.real_runs([*rows, *log("dense", slow, 1e5), *log("sparse", fast, 2e5)])
    assert "minutes to a training loss of 2.000" in lines[0]
    # tokens/s, at the target, minutes, minutes to that loss, MJ, GB
    assert lines[2].endswith("| 100.0k | 100.0k | 1.00 | 0.90 | 0.030 | 50.0 |")
    assert lines[3].endswith("| 200.0k | 200.0k | 0.50 | 0.40 | 0.015 | 50.0 |")


def test_seeds_stand_side_by_side() -> None:
    def run(name: str, seed: int, loss: float, **more: Any) -> Row:
        return {"name": name, "recipe": {"seed": seed}, "validation_loss": loss, **more}

    held = {"target": {"least": 50.0, "most": 60.0}}
    lines = training_tables.seeds([run("a", 1, 4.0), run("a", 2, 4.2), run("b", 1, 3.0, **held)])
    assert lines[2:] == ["| a | 4.000 | 4.200 | 4.100 ± 0.141 |  |", "| b | 3.000 |  | 3.000 | 50.0 to 60.0 |"]


def test_a_served_models_rates() -> None:
    rows: list[Row] = [
        {"model": "run/model", "clients": 8, "dense": is_dense, "tokens_per_second": rate}
        for is_dense, rate in ((False, 30.0), (True, 20.0))
    ]
    assert speed_tables.served(rows)[2:] == ["| run | 8 | 20.0 -> 30.0 | **1.50x** |"]


# -- cells that some rows have ----------------------------------------------------------------------------


def spread(ms: float) -> dict[str, float]:
    return {"p20": ms, "p50": ms, "p80": ms}


CALLED = {
    "called_ms": {"dense": spread(0.5), "compiled": spread(0.4), "sparse": spread(0.25), "frozen": spread(0.2)},
    "speedup_called": 1.6,
    "speedup_called_frozen": 2.0,
}


@pytest.mark.parametrize(("name", "file", "unit"), [("ffn", "ffn-h200", "ms"), ("ffn-few", "ffn-few-h200", "us")])
def test_calls_stand_beside_the_devices_times(name: str, file: str, unit: str, results: Results) -> None:
    memory = {"dense": 999_000_000, "compiled": 123_400_000, "sparse": 45_600_000}  # of the faster dense one
    new = {"frozen_ms": spread(0.4), "speedup_frozen": 2.0, "dense_ms": spread(0.9), "compiled_ms": spread(0.8)}
    new = results.first(file, workload="skew29", M=16384 if unit == "ms" else 1) | CALLED | new | {"memory": memory}
    new |= {
        "fp8_ms": spread(0.6),
        "fp8_weights_ms": spread(0.7),
        "sparse_ms": spread(0.45),
        "sparse_fp8_ms": spread(0.3),
    }
    without = {k: v for k, v in new.items() if "called" not in k and "fp8" not in k}
    results.append(file, new | {"M": 777}, without | {"M": 778})
    head, _, *lines = results.lines(name)
    in_fp8 = f"dense FP8 {unit} | over it: sparse, sparse FP8"
    assert f"| speedup | {in_fp8} | as called: dense {unit} | sparse {unit} | speedup | frozen |" in head
    dense_fp8, called = ("0.600", "0.400 ±0 % | 0.250") if unit == "ms" else ("600.0", "400.0 ±0 % | 250.0")
    with_calls, without = (next(line for line in lines if f"| {M} |" in line) for M in (777, 778))
    assert f"| **2.00x** | {dense_fp8} ±0 % | 1.50x, 2.00x | {called} ±0 % | **1.60x** | **2.00x** |" in with_calls
    assert "| **2.00x** |  |  |  |  |  |  |" in without and (unit == "us" or without.endswith("| 123 -> 46 |"))
    assert all(line.count("|") == head.count("|") for line in lines if line.startswith("|"))


def test_readme_says_what_calls_take(results: Results) -> None:
    for file, name, M, said in (
        ("ffn-h200", "readme-gpu", 4096, "1.80x, called 1.60x"),
        ("ffn-few-h200", "readme-few", 1, "3.25x, called 2.00x"),  # frozen
    ):
        ms = {"dense_ms": 5.0, "compiled_ms": 3.6, "sparse_ms": 2.0, "frozen_ms": 3.6 / 3.25}
        row = results.first(file, workload="skew29", M=M)
        results.append(file, row | CALLED | {way: spread(of) for way, of in ms.items()})
        assert results.line(name, "29 of 5632")[1] == said
    assert results.lines("readme-gpu")[0].endswith("| 131072 | 16384, over dense FP8: sparse, sparse FP8 |")
    assert results.line("readme-gpu", "8 layers")[-1] == "1.10x, 1.52x"


def test_shapes_of_a_model_and_its_generate(results: Results) -> None:
    assert results.line("model", "16 layers of 1.5b | skew29 | eager | 1 x 1 ")[-1].endswith("x")
    generated = results.line("model", "16 layers of 1.5b | skew29 | model.generate")
    assert generated[3:9] == ["1 x 32 + 64 new", "", "", "", "", ""] and generated[-2:] == ["**1.03x**", ""]
    lines = results.lines("readme-models")
    place = next(i for i, line in enumerate(lines) if "16 layers of 1.5b, eager, 1 x 1 to 4 x 2048 tokens" in line)
    assert lines[place].endswith("| 0.98x to 1.19x |  | 1.00x |  |")
    assert lines[place - 1].startswith("| forward of a model, eager, trace | 1.20x |  |")
    assert lines[place + 1].startswith("| model.generate, 16 layers of 1.5b, skew29 |  | 1.08x, frozen 1.03x |")


def test_generation_with_fp8(results: Results) -> None:
    fp8 = {
        "fp8_ms": spread(0.5),
        "fp8_weights_ms": spread(0.4),
        "sparse_fp8_ms": spread(0.16),
        "sparse_ms": spread(0.2),
    }
    results.change("decode-h200", fp8, batch=1)
    cells = ["0.500 ±0 %", "0.400 ±0 %", "0.160 ±0 %", "**3.12x**", "**2.50x**"]
    assert results.line("gpu-decode", "1.5b, bfloat16 | skew29 | 1 |")[-5:] == cells
    assert results.line("gpu-decode", "1.5b, bfloat16 | skew29 | 8 |")[-5:] == [""] * 5
    assert results.line("readme-models", "generation, a token")[3] == "2.00x, 2.50x"
    assert "FP8" not in "".join(results.lines("cpu-decode"))


def test_models_with_fp8(results: Results) -> None:
    assert "FP8" not in results.lines("model")[0]  # where no row has it
    assert results.line("readme-models", "forward, 16 layers")[3] == ""
    ratios = {"speedup_over_fp8": 1.2, "speedup_fp8": 1.5}
    of_calls = {f"speedup_called{name.removeprefix('speedup')}": ratio for name, ratio in ratios.items()}
    ms = {"dense": 60.0, "sparse": 50.0, "fp8": 45.0, "sparse_fp8": 30.0}
    for bench in ("model", "generate"):
        new = {"called_ms": {way: spread(of) for way, of in ms.items()}, **of_calls}
        new |= {} if bench == "generate" else {**ratios, **{f"{way}_ms": spread(of) for way, of in ms.items()}}
        results.change("model-h200", new, bench=bench)
    for kind in ("eager | 1 x 1 |", "model.generate"):
        assert results.line("model", f"16 layers of 1.5b | skew29 | {kind}")[9:11] == ["45.00 ±0 %", "0.90x, 1.50x"]
    assert results.line("readme-models", "forward of a model, eager, skew29")[3] == "0.90x, 1.50x"
    assert results.line("readme-models", "forward, 16 layers")[3] == "0.90x to 0.90x, 1.50x to 1.50x"


def test_layers_with_fp8(results: Results) -> None:
    assert "FP8" not in results.lines("ffn-between-layers")[0]
    new = {"speedup_over_fp8": 2.0, "speedup_fp8": 4.0, "fp8_ms": spread(4.0), "sparse_fp8_ms": spread(1.0)}
    new |= {"sparse_ms": spread(2.0), "frozen_ms": spread(2.0)}
    results.change("ffn-few-h200", lambda row: new if row["workload"].startswith("layer") else {})
    assert results.lines("ffn-between-layers")[0].endswith("| 1024, over dense FP8: sparse, sparse FP8 |")
    assert results.line("ffn-between-layers", "mean")[-2:] == ["2.00x, 4.00x"] * 2
    assert results.line("ffn-fp8", "skew29 | 16384 |")[8] == "0.022, 0.0037"  # errors
