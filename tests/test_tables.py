"""The tables of documents: made from rows, and up to date."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from twell.workbench.bench import tables
from twell.workbench.cli import app

ROOT = Path(__file__).parents[1]
DOCUMENTS = [ROOT / "docs" / name for name in ("results.md", "training.md", "converting.md")] + [ROOT / "README.md"]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_documents_are_up_to_date(document: Path) -> None:
    assert tables.updated(document, ROOT / "results") == document.read_text(), "run twell results"


def test_every_table_is_in_a_document() -> None:
    text = "".join(document.read_text() for document in DOCUMENTS)
    assert {name for name in tables.TABLES if f"<!-- table {name} -->" in text} == set(tables.TABLES)


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "results", tmp_path / "results")
    return tmp_path / "results"


def change(path: Path, **fields: object) -> None:
    """Set fields in every row."""
    path.write_text("".join(json.dumps(json.loads(line) | fields) + "\n" for line in path.read_text().splitlines()))


@pytest.mark.parametrize(
    "name",
    ["ffn", "ffn-few", "ffn-layers", "gpu-decode", "model", "train-ffn", "train-layers", "train-step", "train-largest"],
)
def test_numbers_come_from_rows(name: str, rows: Path) -> None:
    (file,) = tables.TABLES[name].files
    assert "**98.77x**" not in tables.render(name, rows, "results")
    change(rows / file, speedup=98.765)
    text = tables.render(name, rows, "elsewhere/results")
    assert "**98.77x**" in text
    assert f"(elsewhere/results/{file})" in text and tables.TABLES[name].command in text


def test_a_table_names_machine_versions_and_commits_of_its_own_rows(rows: Path) -> None:
    lines = (rows / "train-h200.jsonl").read_text().splitlines()
    marked = [json.loads(line) for line in lines]
    for row in marked:
        row["commit"] = row["level"]
    (rows / "train-h200.jsonl").write_text("".join(json.dumps(row) + "\n" for row in marked))
    assert "NVIDIA H200, torch 2.11.0+cu130, triton 3.6.0, commit model;" in tables.render("train-step", rows, "r")
    assert "commit ffn;" in tables.render("train-layers", rows, "r")


def test_a_document_is_changed_between_the_comments_alone(rows: Path, tmp_path: Path) -> None:
    document = tmp_path / "docs" / "page.md"
    document.parent.mkdir()
    document.write_text("before\n<!-- table model -->\nold\n<!-- end -->\nafter\n")
    text = tables.updated(document, rows)
    assert text.startswith("before\n<!-- table model -->\n| model | activations |") and text.endswith(
        "<!-- end -->\nafter\n"
    )
    assert "old" not in text and "(../results/model-h200.jsonl)" in text
    document.write_text(text)
    assert tables.updated(document, rows) == text


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("<!-- table nothing -->\n<!-- end -->\n", "unknown table 'nothing'"),
        ("<!-- table ffn -->\n", "not closed"),
        ("<!-- table ffn --> here\n<!-- end -->\n", "not closed"),
        ("<!-- table model -->\n<!-- end -->\n", "needs"),
        ("<!-- table ffn -->\n<!-- end -->\n", "has no rows"),
    ],
)
def test_what_is_wrong_is_said(text: str, says: str, rows: Path, tmp_path: Path) -> None:
    (rows / "model-h200.jsonl").unlink()
    (rows / "ffn-h200.jsonl").write_text("")
    document = tmp_path / "page.md"
    document.write_text(text)
    with pytest.raises(ValueError, match=says):
        tables.updated(document, rows)


def test_command(rows: Path, tmp_path: Path) -> None:
    document = tmp_path / "page.md"
    document.write_text("<!-- table model -->\n<!-- end -->\n")
    command = ["results", str(document), "--rows", str(rows)]
    stale = CliRunner().invoke(app, [*command, "--check"])
    assert stale.exit_code != 0 and "not up to date" in stale.output + str(stale.exception)
    assert CliRunner().invoke(app, command).exit_code == 0
    assert "| 1.5b | skew29 | eager |" in document.read_text()
    fresh = CliRunner().invoke(app, [*command, "--check"])
    assert fresh.exit_code == 0 and "up to date" in fresh.output
    assert CliRunner().invoke(app, ["results", str(tmp_path / "none.md")]).exit_code != 0


def test_the_papers_numbers_stand_beside_the_last_of_ours(rows: Path) -> None:
    path = rows / "train-h200.jsonl"
    step = next(row for row in map(json.loads, path.read_text().splitlines()) if row["level"] == "model")
    with path.open("a") as f:
        f.write(json.dumps(step | {"preset": "2b", "speedup": 1.5, "peak_ratio": 0.5}) + "\n")
    line = next(line for line in tables.render("paper", rows, "r").splitlines() if line.startswith("| 2b |"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1] == "+20.5 %" and cells[5:7] == ["+21.9 %", "+50.0 %"] and cells[-1] == "-50.0 %"
    path.write_text("")  # then nothing of ours is known of training
    line = next(line for line in tables.render("paper", rows, "r").splitlines() if line.startswith("| 2b |"))
    assert line.endswith("| +21.9 % |  |  | larger micro-batch |  |")


def test_layers_tell_how_far_counts_explain_speed(rows: Path) -> None:
    path = rows / "ffn-h200.jsonl"
    assert "Correlation of active neurons and speedup: -0.9" in tables.render("ffn-layers", rows, "r")
    marked = [json.loads(line) for line in path.read_text().splitlines()]
    for row in marked:
        row["speedup"] = row["mean_active"]
    path.write_text("".join(json.dumps(row) + "\n" for row in marked))
    assert "Correlation of active neurons and speedup: 1.00" in tables.render("ffn-layers", rows, "r")
    change(path, speedup=1.5)
    assert "Correlation" not in tables.render("ffn-layers", rows, "r")


def test_the_tasks_of_several_models_with_paired_differences(rows: Path) -> None:
    lines = tables.render("eval", rows, "r").splitlines()
    assert lines[0].endswith("| l1 0 | l1 0.0002 | l1 0.0004 | l1 0.0002 less l1 0 | l1 0.0004 less l1 0 |")
    assert "| +0.00 ± 0.00 |" in next(line for line in lines if line.startswith("| commonsense_qa | acc | 1221 |"))
    assert not any(line.startswith("| winogrande | acc_norm") for line in lines)
    path = rows / "eval-small.jsonl"
    marked = [json.loads(line) for line in path.read_text().splitlines()]
    for row in marked:
        row |= {"acc": 0.5, "acc_error": 0.01}
        if "against" in row:
            row["against"] |= {"acc": -0.25 if "0.0002" in row["model"] else -1e-6, "acc_error": 0.1}
    path.write_text("".join(json.dumps(row) + "\n" for row in marked))
    lines = tables.render("eval", rows, "r").splitlines()
    score, bold, small = "50.00 ± 1.00", "**-25.00 ± 10.00**", "+0.00 ± 10.00"
    assert f"| piqa | acc | 1838 | {score} | {score} | {score} | {bold} | {small} |" in lines
    assert f"| mean | acc |  | {score} | {score} | {score} | {bold} | {small} |" in lines


def test_the_ways_to_run_a_model_with_fp8(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    (rows / "fp8.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    monkeypatch.setitem(tables.TABLES, "fp8", tables.TABLES["eval"]._replace(files=("fp8.jsonl",)))
    lines = tables.render("fp8", rows, "r").splitlines()
    assert lines[0].endswith("| dense | FP8 dense | FP8 sparse | FP8 dense less dense | FP8 sparse less FP8 dense |")
    losses = "4.0000 ± 0.0200 | 4.0400 ± 0.0200 | 4.0440 ± 0.0200"
    assert (
        f"| val.u16 | loss | 1000 | {losses} | **+0.0400 ± 0.0100 (+1.00 %)** | +0.0040 ± 0.0100 (+0.10 %) |" in lines
    )
    assert lines[3].endswith("| +0.00 ± 10.00 | **-25.00 ± 10.00** |")
    assert "in 9 of 10 layers" in lines[5] and "at 3 of 1,000 places, 1 of them beyond rounding" in lines[5]
    assert "moved by 0.25 in the median of these and 0.5 at most" in lines[5]


def test_plain_ffns_are_called_so_and_stand_with_the_others(rows: Path) -> None:
    assert "| skew29, plain | 16384 |" in tables.render("train-ffn", rows, "r")
    names = [line.split(" | ")[0] for line in tables.render("readme-models", rows, "r").splitlines()]
    place = names.index("| training, one FFN, skew29, plain, 16384 tokens")
    assert names[place - 1] == "| training, one FFN, skew100, 16384 tokens"


def test_no_row_names_a_place_on_a_machine() -> None:
    for path in (ROOT / "results").glob("*.jsonl"):
        assert '"/' not in path.read_text(), path.name


def test_rows_that_compare_nothing_are_left_out(rows: Path) -> None:
    path = rows / "train-h200.jsonl"
    before = tables.render("readme-models", rows, "r"), tables.render("train-step", rows, "r")
    step = next(row for row in map(json.loads, path.read_text().splitlines()) if row["level"] == "model")
    alone = {k: v for k, v in step.items() if k not in ("speedup", "peak_ratio")} | {"dense": "out of memory"}
    with path.open("a") as f:
        f.write(json.dumps(alone) + "\n" + json.dumps(alone | {"level": "largest", "speedup": 1.3}) + "\n")
    assert before == (tables.render("readme-models", rows, "r"), tables.render("train-step", rows, "r"))


# -- as called --------------------------------------------------------------------------------------------


def spread(ms: float) -> dict[str, float]:
    return {"p20": ms, "p50": ms, "p80": ms}


CALLED = {
    "called_ms": {"dense": spread(0.5), "compiled": spread(0.4), "sparse": spread(0.25), "frozen": spread(0.2)},
    "speedup_called": 1.6,
    "speedup_called_frozen": 2.0,
}


def append(path: Path, *rows_: dict[str, object]) -> None:
    with path.open("a") as f:
        f.write("".join(json.dumps(row) + "\n" for row in rows_))


def older(path: Path) -> Path:
    """The file, with rows as they were before calls were timed."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    found = [row for row in found if row["bench"] != "generate" and " layers of " not in str(row.get("preset"))]
    if path.stem == "ffn-h200":
        found = [{k: v for k, v in row.items() if k != "memory"} for row in found]
    kept = [{k: v for k, v in row.items() if "called" not in k and "frozen" not in k} for row in found]
    path.write_text("".join(json.dumps(row) + "\n" for row in kept))
    return path


def first_row(path: Path, **wanted: object) -> dict[str, Any]:
    found = map(json.loads, path.read_text().splitlines())
    return next(row for row in found if all(row.get(k) == v for k, v in wanted.items()))


@pytest.mark.parametrize(("name", "file", "unit"), [("ffn", "ffn-h200", "ms"), ("ffn-few", "ffn-few-h200", "us")])
def test_calls_stand_beside_the_devices_times(name: str, file: str, unit: str, rows: Path) -> None:
    path = older(rows / f"{file}.jsonl")
    n_old = len(tables.render(name, rows, "r").splitlines())
    new = first_row(path, workload="skew29") | CALLED | {"M": 777, "frozen_ms": spread(0.3), "speedup_frozen": 1.75}
    append(path, new)
    memory = {"dense": 999_000_000, "compiled": 123_400_000, "sparse": 45_600_000}  # of the faster dense one
    append(path, new | {"M": 778, "memory": memory, "dense_ms": spread(0.9), "compiled_ms": spread(0.8)})
    head, _, *lines = tables.render(name, rows, "r").splitlines()
    assert len(lines) + 2 == n_old + 2
    called_head = f"as called: dense {unit} | sparse {unit} | speedup | frozen"
    assert head.endswith(f"| frozen {unit} | speedup | {called_head} | memory besides y, MB |")
    (line,), (last,) = ([line for line in lines if f"| {M} |" in line] for M in (777, 778))
    called, sparse = ("0.400", "0.250") if unit == "ms" else ("400.0", "250.0")
    assert line.endswith(f"**1.75x** | {called} ±0 % | {sparse} ±0 % | **1.60x** | **2.00x** |  |")
    assert last.endswith("| **2.00x** | 123 -> 46 |")
    assert lines[0].endswith("|  |  |  |  |  |  |  |")  # older rows were measured without


def test_readme_says_what_calls_take(rows: Path) -> None:
    path = older(rows / "ffn-h200.jsonl")
    append(path, first_row(path, workload="skew29", M=4096) | CALLED | {"speedup": 1.8, "speedup_frozen": 1.9})
    other = first_row(path, workload="skew29", M=16384)["speedup"]
    assert f"| 29 of 5632 | 1.80x, called 1.60x | {other:.2f}x |" in tables.render("readme-gpu", rows, "r")
    path = older(rows / "ffn-few-h200.jsonl")
    append(path, first_row(path, workload="skew29", M=1) | CALLED | {"speedup": 3.0, "speedup_frozen": 3.25})
    other = first_row(path, workload="skew29", M=8)["speedup"]
    assert f"| 29 of 5632 | 3.25x, called 2.00x | {other:.2f}x |" in tables.render("readme-few", rows, "r")  # frozen


def test_shapes_of_a_model_and_its_generate(rows: Path) -> None:
    path = older(rows / "model-h200.jsonl")
    before = tables.render("paper", rows, "r")
    some = first_row(path, preset="1.5b", case="paper", compiled=False)
    some |= {"preset": "16 layers of 1.5b", "case": None, "memory_ratio": 1.01, **CALLED}
    del some["speedup_called_frozen"]
    shapes = [
        some | {"batch": 1, "length": 1, "speedup_called": 0.99, "tokens_per_ms": {"dense": 0.151, "sparse": 0.149}},
        some | {"batch": 4, "length": 2048, "speedup_called": 1.2},
    ]
    calls = {name: CALLED["called_ms"][name] for name in ("dense", "sparse", "frozen")}  # type: ignore[index]
    facts = {name: some[name] for name in ("preset", "workload", "compiled", "versions", "gpu", "device", "commit")}
    generated = {"bench": "generate", "batch": 1, "length": 32, "new_tokens": 64, **facts, **CALLED, "called_ms": calls}
    append(path, *shapes, generated)
    text = tables.render("model", rows, "r")
    assert "| as called: dense ms | sparse ms | speedup | frozen | memory of the model |" in text.splitlines()[0]
    assert "| 0.15 -> 0.15 |" in text and "| **0.99x** |  | 1.010x |" in text
    line = next(line for line in text.splitlines() if "model.generate" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[3:9] == ["1 x 32 + 64 new", "", "", "", "", ""]
    assert cells[9:] == ["0.500 ±0 %", "0.250 ±0 %", "**1.60x**", "**2.00x**", ""]
    lines = tables.render("readme-models", rows, "r").splitlines()
    assert lines[0] == "| 1.5B shape | speed | as called | memory | energy |"
    shape = "| forward, 16 layers of 1.5b, eager, 1 x 1 to 4 x 2048 tokens, skew29 |  | 0.99x to 1.20x | 1.01x |  |"
    place = lines.index(shape)
    assert lines[place - 1].startswith("| forward of a model, eager, trace | 1.20x |  |")
    assert lines[place + 1].startswith("| model.generate, 16 layers of 1.5b, skew29 |  | 1.60x, frozen 2.00x |")
    assert tables.render("paper", rows, "r") == before


def test_training_as_called(rows: Path) -> None:
    path = older(rows / "train-h200.jsonl")
    row = first_row(path, level="ffn", workload="skew29", kind="gated") | CALLED | {"M": 777}
    del row["speedup_called_frozen"]
    append(path, row | {"speedup_called_with_step": 1.5})
    head, _, *lines = tables.render("train-ffn", rows, "r").splitlines()
    assert head.endswith("| energy | as called: dense ms | sparse ms | speedup | with AdamW's step |")
    line = next(line for line in lines if "| 777 |" in line)
    assert line.endswith("| 0.400 ±0 % | 0.250 ±0 % | **1.60x** | **1.50x** |") and lines[0].endswith("|  |  |  |  |")
