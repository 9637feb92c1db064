"""Comparing rows of results: what is noise, what is better or worse, and what must not pass a check."""

from __future__ import annotations

import copy
import io
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from twell.workbench.bench import compare as cmp
from twell.workbench.bench import rows as result_rows

RESULTS = Path(__file__).parent.parent / "results"
BENCHMARKS = [
    path for path in sorted(RESULTS.glob("*.jsonl")) if any("bench" in row for row in result_rows.read([path]))
]
Row = dict[str, Any]


def spread(p50: float, width: float = 0.01) -> dict[str, float]:
    return {"p20": p50 * (1 - width), "p50": p50, "p80": p50 * (1 + width)}


def ffn(dense: float = 2.0, sparse: float = 1.0, *, width: float = 0.01, **other: Any) -> Row:
    shape = {
        "bench": "ffn",
        "workload": "skew29",
        "kind": "gated",
        "M": 4096,
        "D": 2048,
        "F": 5632,
        "dtype": "bfloat16",
    }
    times = {"dense_ms": spread(dense, width), "sparse_ms": spread(sparse, width)}
    machine = {"device": "cuda", "gpu": "some GPU", "commit": "aaa", "versions": {"torch": "2.11"}}
    speedup = dense / sparse if sparse else 0
    return {
        **shape,
        "graph": False,
        **times,
        "speedup": speedup,
        "time": "2026-01-02T03:04:05+00:00",
        **machine,
        **other,
    }


def model_step(dense: float = 900.0, sparse: float = 700.0, **other: Any) -> Row:
    def side(ms: float, peak: int, joules: float) -> Row:
        return {"step_ms": spread(ms), "memory": {"peak": peak}, "joules": joules}

    shape = {"bench": "train", "level": "model", "workload": "skew29", "preset": "1.5b", "batch": 8, "length": 2048}
    sides = {"dense": side(dense, 100, 600.0), "sparse": side(sparse, 70, 400.0), "speedup": dense / sparse}
    ratios = {"peak_ratio": 0.7, "activations_ratio": 0.6, "joules_ratio": 0.66}
    return {**shape, **sides, **ratios, "device": "cuda", "gpu": "some GPU", **other}


def slower(row: Row, factor: float) -> Row:
    """A copy of a row in which the sparse path takes ``factor`` times as long."""
    row = copy.deepcopy(row)
    for times in (row.get("sparse_ms"), row["sparse"].get("step_ms") if isinstance(row.get("sparse"), dict) else None):
        if times:
            times.update({name: ms * factor for name, ms in times.items()})
    if "speedup" in row:
        row["speedup"] /= factor
    return row


def two(before: Row, after: Row, **how: Any) -> cmp.RowComparison:
    return cmp.compare({"old": [before], "new": [after]}, **how)


def verdicts(comparison: cmp.RowComparison) -> dict[str, str]:
    return {d.quantity: d.verdict for d in comparison.differences}


def write(path: Path, rows: list[Row]) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def text(comparison: cmp.RowComparison) -> str:
    console = Console(width=160, file=io.StringIO())
    with console.capture() as captured:
        console.print(cmp.table(comparison))
    return captured.get()


def point(value: float) -> cmp.Measured:
    return cmp.Measured(value, value, value)


# -- verdicts ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("quantity", "before", "after", "expected"),
    [
        ("sparse_ms", cmp.Measured(1, 0.9, 1.1), cmp.Measured(1.15, 1.1, 1.2), "noise"),  # they touch
        ("sparse_ms", cmp.Measured(1, 0.9, 1.1), cmp.Measured(1.15, 1.11, 1.2), "worse"),
        ("sparse_ms", point(1), point(1.019), "noise"),  # below the floor
        ("sparse_ms", point(1), point(1.021), "worse"),
        ("sparse_ms", point(1), cmp.Measured(1.5, 0.9, 1.6), "noise"),  # one interval is known
        ("speedup", point(2), point(2.1), "better"),
        ("speedup_eager", point(2), point(1.9), "worse"),
        ("speedup_over_fp8", point(2), point(1.9), "worse"),
        ("peak_ratio", point(0.5), point(0.6), "worse"),
        ("joules_ratio", point(0.6), point(0.5), "better"),
        ("memory.ratio", point(0.6), point(0.5), "better"),
        ("sparse_ms", None, point(1), "unknown"),
        ("sparse_ms", point(1), None, "unknown"),
    ],
)
def test_judgement(quantity: str, before: Any, after: Any, expected: str) -> None:
    assert cmp.judge(quantity, before, after, floor=0.02) == expected


MEASURED = st.tuples(*[st.floats(1e-6, 1e6)] * 3).map(lambda t: cmp.Measured(sorted(t)[1], min(t), max(t)))


@given(MEASURED, MEASURED, st.floats(0, 1), st.sampled_from(["sparse_ms", "speedup"]))
def test_the_other_way_round_is_the_opposite(a: cmp.Measured, b: cmp.Measured, floor: float, name: str) -> None:
    opposite = {"noise": "noise", "better": "worse", "worse": "better"}
    assert cmp.judge(name, b, a, floor) == opposite[cmp.judge(name, a, b, floor)]
    assert cmp.judge(name, a, a, floor) == "noise"


def test_floor_is_the_callers() -> None:
    before, after = ffn(sparse=1.0, width=0), ffn(sparse=1.1, width=0)
    for floor, expected in ((0.02, "worse"), (0.2, "noise")):
        assert verdicts(two(before, after, floor=floor))["sparse_ms"] == expected
    for wrong in (-0.1, math.nan):
        with pytest.raises(ValueError, match="floor of 0 or more"):
            two(before, after, floor=wrong)


def test_a_speedup_has_the_spread_of_its_times() -> None:
    row = ffn(2.0, 1.0, width=0.03) | {"sparse_ms": spread(1.0, 0.04)}
    assert cmp.quantities(row)["speedup"] == cmp.Measured(2.0, pytest.approx(2 * 0.95), pytest.approx(2 * 1.05))
    noisy = two(ffn(2.0, 1.0, width=0.03), ffn(2.0, 1.07, width=0.03))
    assert verdicts(noisy) == {"dense_ms": "noise", "sparse_ms": "worse", "speedup": "noise"}
    row = ffn(2.0, 1.0, width=0) | {"compiled_ms": spread(1.8, 0.1), "speedup": 1.8, "speedup_eager": 2.0}
    found = cmp.quantities(row)  # over the faster dense one
    assert found["speedup"] == cmp.Measured(1.8, pytest.approx(1.62), pytest.approx(1.98))
    assert found["speedup_eager"] == point(2.0)
    no_sparse = {"bench": "ffn", "dense_ms": spread(1, 0.5), "speedup": 2.0}
    assert cmp.quantities(no_sparse)["speedup"] == point(2.0)
    bare = {"bench": "ffn", "speedup": 2.0}  # without times the floor alone decides
    assert verdicts(two(bare, bare | {"speedup": 1.97})) == {"speedup": "noise"}
    assert verdicts(two(bare, bare | {"speedup": 1.9})) == {"speedup": "worse"}


def test_calls_are_quantities_of_their_own() -> None:
    def row(sparse: float, host: float) -> Row:
        calls = {"dense": spread(3.0), "compiled": spread(2.0), "sparse": spread(sparse), "frozen": spread(0.5, 0.2)}
        steps = {name: spread(1 + time["p50"], 0.1) for name, time in calls.items()}
        speedups = {"speedup_called": 2 / sparse, "speedup_called_frozen": 4.0}
        speedups["speedup_called_with_step"] = 3 / (1 + sparse)
        return ffn(called_ms=calls, called_with_step_ms=steps, host_us={"sparse": host}, memory_ratio=1.01, **speedups)

    found = cmp.quantities(row(1.0, 100.0))
    widths = {name: round(m.half_width, 3) for name, m in found.items() if m and name.startswith("speedup_")}
    assert widths == {"speedup_called": 0.014, "speedup_called_frozen": 0.2, "speedup_called_with_step": 0.141}
    judged = verdicts(two(row(1.0, 100.0), row(1.2, 130.0)))
    assert judged["called_ms.sparse"] == judged["speedup_called"] == judged["host_us.sparse"] == "worse"
    assert judged["speedup"] == judged["speedup_called_frozen"] == judged["memory_ratio"] == "noise"


def test_nested_quantities_of_a_model() -> None:
    comparison = two(model_step(sparse=700), model_step(sparse=630, peak_ratio=0.8))
    better = ("sparse.step_ms", "speedup")
    noise = ("dense.step_ms", "activations_ratio", "joules_ratio")
    assert verdicts(comparison) == {
        **dict.fromkeys(better, "better"),
        **dict.fromkeys(noise, "noise"),
        "peak_ratio": "worse",
    }
    ratios = {d.quantity: d.ratio for d in comparison.differences}
    assert ratios["sparse.step_ms"] == pytest.approx(0.9) and ratios["peak_ratio"] == pytest.approx(0.8 / 0.7)


def test_what_is_no_measurement_is_not_compared() -> None:
    row = ffn(plan={"predicted": 1.9, "hot": 512}, parts_ms={"gate": 0.1}, error={"dense": 1e-3}, mean_active=29.0)
    assert set(cmp.quantities(row)) == {"dense_ms", "sparse_ms", "speedup"}
    assert "joules_ratio" not in verdicts(two(ffn(joules_ratio=None), ffn(joules_ratio=None)))
    assert verdicts(two(ffn(), ffn(joules_ratio=0.5)))["joules_ratio"] == "unknown"


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0, 0.0, "fast", True, [1.0]])
def test_what_is_no_number_is_unknown(bad: Any) -> None:
    after = ffn(speedup=bad, dense_ms={"p20": 1.0, "p50": bad, "p80": 3.0})
    found = two(ffn(), after)
    assert verdicts(found) == {"dense_ms": "unknown", "sparse_ms": "noise", "speedup": "unknown"}
    assert all((d.ratio, d.after) == (None, None) for d in found.differences[::2])
    json.dumps(found.to_json(), allow_nan=False)
    assert verdicts(two(after, after))["speedup"] == "unknown"


# -- machines ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({}, {"gpu": "other GPU"}),
        ({}, {"device": "cpu", "gpu": None, "cpu": "some CPU", "threads": 2}),
    ],
)
def test_times_of_other_machines_are_not_judged_but_ratios_are(here: Row, there: Row) -> None:
    comparison = two(ffn(2.0, 1.0, **here), ffn(4.0, 4.0, **there))
    assert verdicts(comparison) == {"dense_ms": "other machine", "sparse_ms": "other machine", "speedup": "worse"}
    assert [d.ratio for d in comparison.differences] == [2.0, 4.0, 0.5]
    assert [d.quantity for d in cmp.failures(comparison)] == ["speedup"]
    step = verdicts(two(model_step(**here), model_step(sparse=350.0, **there)))
    assert (step["sparse.step_ms"], step["peak_ratio"]) == ("other machine", "noise")


def test_another_number_of_threads_is_another_machine() -> None:
    cpu = {"device": "cpu", "cpu": "some CPU", "threads": 2}
    for threads, expected in ((2, "worse"), (4, "other machine")):
        assert verdicts(two(ffn(**cpu), ffn(sparse=2.0, **cpu | {"threads": threads})))["sparse_ms"] == expected


# -- which rows -------------------------------------------------------------------------------------------


def test_rows_that_differ_in_what_was_measured_do_not_match() -> None:
    for field in cmp.KEY:
        comparison = two(ffn(), ffn(**{field: "another"}))
        assert comparison.matched == 0
        assert [(u["only_in"], u["not_in"]) for u in comparison.unmatched] == [("old", "new"), ("new", "old")]
        assert comparison.unmatched[1]["key"][field] == "another"
    before = ffn()
    del before["graph"]  # a flag that is off is as good as none
    assert two(before, ffn(graph=False, compiled=False)).matched == 1 and two(before, ffn(graph=True)).matched == 0


@pytest.mark.parametrize(
    ("times", "newest"),
    [
        (("2026-01-01T00:00:00+00:00", "2026-01-02T00:00:00+00:00", "2025-12-31T00:00:00+00:00"), 1),
        (("2026-01-02T00:00:00+00:00", "2026-01-02T00:00:00+00:00", "2026-01-01T00:00:00+00:00"), 1),  # the last of two
    ],
)
def test_of_one_measurement_the_newest_counts(times: tuple[str, ...], newest: int) -> None:
    rows = [ffn(speedup=float(i), time=time) for i, time in enumerate(times)]
    comparison = cmp.compare({"old": [*rows, {"step": 1, "ce_loss": 2.0}], "new": [ffn()]})
    (speedup,) = (d for d in comparison.differences if d.quantity == "speedup")
    assert speedup.before is not None and speedup.before.value == newest
    assert comparison.left_out == ["old: 3 rows of older measurements, or of none, left out"]


def test_unmatched_rows_are_reported() -> None:
    comparison = cmp.compare({"a": [ffn(M=1), ffn(M=2)], "b": [ffn(M=1), ffn(M=3)], "c": [ffn(M=2)]})
    found = [(u["key"]["M"], u["only_in"], u["not_in"]) for u in comparison.unmatched]
    assert comparison.matched == 2 and found == [(2, "a", "b"), (3, "b", "a"), (1, "a", "c")]
    said = comparison.to_json()[-2]
    assert (said["verdict"], said["only_in"], said["not_in"], said["key"]["M"]) == ("unmatched", "b", "a", 3)
    assert sum(note.startswith("only in") for note in cmp.notes(comparison)) == 3


def test_first_can_be_chosen() -> None:
    sides = {"a": [ffn(sparse=1)], "b": [ffn(sparse=2)], "c": [ffn(sparse=3)]}
    comparison = cmp.compare(sides, first="b")
    assert comparison.sides == ["b", "a", "c"]
    judged = [(d.side, d.verdict) for d in comparison.differences if d.quantity == "sparse_ms"]
    assert judged == [("a", "better"), ("c", "worse")]
    with pytest.raises(ValueError, match="there is no side 'd': expected one of a, b, c"):
        cmp.compare(sides, first="d")
    with pytest.raises(ValueError, match="two sides or more"):
        cmp.compare({"a": []})


def test_models_and_texts_are_not_mixed_up() -> None:
    row = {"bench": "model", "workload": "model", "sparse_ms": spread(1.0), "time": "2026-01-01"}
    a = [row | {"model": "m1", "case": "text"}, row | {"model": "m2", "case": "random", "sparse_ms": spread(9.0)}]
    found = cmp.compare({"a": a, "b": a[:1]})
    assert [d.verdict for d in found.differences] == ["noise"] and len(found.unmatched) == 1


# -- files ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", BENCHMARKS, ids=lambda path: path.stem)
def test_real_results_against_themselves_and_a_slower_path(tmp_path: Path, path: Path) -> None:
    comparison = cmp.compare_files([path, write(tmp_path / path.name, result_rows.read([path]))])
    assert comparison.matched > 0 and not comparison.unmatched
    assert {(d.verdict, d.ratio) for d in comparison.differences} == {("noise", 1.0)}
    assert cmp.verdict(comparison) == 0 and comparison.sides == [str(path), str(tmp_path / path.name)]
    slow = write(tmp_path / "slow.jsonl", [slower(row, 1.5) for row in result_rows.read([path])])
    comparison = cmp.compare_files([path, slow])
    for d in comparison.differences:
        of_sparse = d.quantity in ("sparse_ms", "sparse.step_ms", "speedup")
        # Some rows spread so far that half as much again is noise.
        is_wide = of_sparse and d.before is not None and d.before.half_width > 0.15
        assert d.verdict == ("worse" if of_sparse else "noise") or is_wide, d
    assert cmp.verdict(comparison) == 1 and cmp.verdict(comparison, ["dense*_ms"]) == 0
    assert cmp.verdict(cmp.compare_files([slow, path])) == 0  # better


def test_runs_of_a_sweep_are_compared_by_their_speed(tmp_path: Path) -> None:
    runs = [{"name": "l1-0", "speed": ffn()}, {"name": "silu", "speed": None}]  # SiLU has no sparse path
    slow = [{**runs[0], "speed": slower(ffn(), 1.5)}, runs[1]]
    comparison = cmp.compare_files([write(tmp_path / "sweep.jsonl", runs), write(tmp_path / "slow.jsonl", slow)])
    assert comparison.matched == 1 and "sweep.jsonl: 1 rows of" in comparison.left_out[0]
    assert cmp.verdict(comparison) == 1


def test_files_are_named_apart(tmp_path: Path) -> None:
    one, other, third = (write(tmp_path / name, [ffn()]) for name in ("1/rows.jsonl", "2/rows.jsonl", "third.jsonl"))
    assert cmp.compare_files([one, other]).sides == [str(one), str(other)]
    assert cmp.compare_files([one, third]).sides == ["rows.jsonl", "third.jsonl"]


def test_one_file_by_a_field(tmp_path: Path) -> None:
    later: Row = {"commit": "bbb", "versions": {"torch": "2.12"}}
    rows = [ffn(), ffn(sparse=1.2, **later), ffn(M=1), ffn(sparse=0.5, M=1, **later), ffn(sparse=0.5, M=2, commit=None)]
    path = write(tmp_path / "rows.jsonl", rows)
    comparison = cmp.compare_files([path], by="commit")
    assert comparison.sides == ["aaa", "bbb", "no commit"]
    judged = [(d.key["M"], d.side, d.verdict) for d in comparison.differences if d.quantity == "sparse_ms"]
    assert judged == [(4096, "bbb", "worse"), (1, "bbb", "better")] and cmp.verdict(comparison) == 1
    assert cmp.verdict(cmp.compare_files([path], by="commit", first="bbb")) == 1  # M 1 was better there
    by_torch = cmp.compare_files([path, path], by="versions.torch")
    assert by_torch.sides == ["2.11", "2.12"] and by_torch.left_out[0].startswith("2.11: 3 rows of")
    of_key = cmp.compare(cmp.split([ffn(), ffn(dtype="float16", sparse=2.0)], "dtype"), without="dtype")
    assert of_key.matched == 1 and verdicts(of_key)["sparse_ms"] == "worse"


def test_what_cannot_be_compared_is_said(tmp_path: Path) -> None:
    path, empty = write(tmp_path / "rows.jsonl", [ffn()]), write(tmp_path / "empty.jsonl", [])
    for files, by, says in (
        ([path], None, "two files or more to compare, or a field"),
        ([path], "commit", "several values of commit, got aaa"),
        ([empty], "commit", "several values of commit, got no rows"),
    ):
        with pytest.raises(ValueError, match=says):
            cmp.compare_files(files, by=by)
    with pytest.raises(ValueError, match=r"^nothing to compare: no row of rows\.jsonl is also in empty\.jsonl$"):
        cmp.verdict(cmp.compare_files([path, empty]))


# -- the check --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("after", "code"),
    [
        (ffn(2.0, 1.0), 0),
        (ffn(2.0, 1.04), 0),  # worse, by less than the threshold
        (ffn(2.0, 1.06), 1),
        (ffn(2.0, 0.5), 0),
        (ffn(1.0, 1.0), 1),  # dense is twice as fast now: so the speedup is worse
        (ffn(4.0, 2.0, width=0.6), 0),  # nothing but noise
    ],
)
def test_exit_code(after: Row, code: int) -> None:
    assert cmp.verdict(two(ffn(), after)) == code


def test_names_and_threshold_of_a_check_are_the_callers() -> None:
    comparison = two(ffn(), ffn(2.0, 1.06))
    assert cmp.verdict(comparison, ["dense_ms"]) == 0 and cmp.verdict(comparison, ["*_ms"]) == 1
    assert cmp.verdict(comparison, threshold=0.1) == 0 and cmp.verdict(two(ffn(), ffn(2.0, 1.04)), threshold=0) == 1
    with pytest.raises(ValueError, match="no compared row has a quantity spedup"):
        cmp.verdict(comparison, ["sparse_ms", "spedup"])
    with pytest.raises(ValueError, match="threshold of 0 or more, got -1"):
        cmp.verdict(comparison, threshold=-1)


def test_what_no_longer_runs_fails() -> None:
    before, after = model_step(), model_step() | {"sparse": "out of memory"}
    for name in ("speedup", "peak_ratio", "activations_ratio", "joules_ratio"):
        del after[name]
    comparison = two(before, after)
    assert {d.quantity for d in cmp.failures(comparison)} == {"speedup", "sparse.step_ms"}
    assert cmp.verdict(comparison) == 1 and cmp.verdict(comparison, ["dense.step_ms"]) == 0
    with pytest.raises(ValueError, match="cannot be judged"):  # the other way round there is nothing to lose
        cmp.verdict(two(after, before))


def test_a_check_of_nothing_does_not_pass() -> None:
    far = two(ffn(), ffn(sparse=9.0, speedup=2.0, gpu="other GPU"))
    assert cmp.verdict(far) == 0  # by its speedup
    with pytest.raises(ValueError, match="nothing to check: sparse_ms of old cannot be judged against new"):
        cmp.verdict(far, ["sparse_ms"])
    with pytest.raises(ValueError, match="cannot be judged"):
        cmp.verdict(two({"bench": "ffn"}, {"bench": "ffn"}))


# -- output -----------------------------------------------------------------------------------------------


def test_json() -> None:
    (dense, sparse, speedup) = two(ffn(width=0), ffn(2.0, 1.25, width=0)).to_json()
    assert sparse == {
        "key": {n: ffn()[n] for n in ("bench", "workload", "kind", "M", "D", "F", "dtype")},
        "quantity": "sparse_ms",
        "side": "new",
        "before": {"value": 1.0, "low": 1.0, "high": 1.0},
        "after": {"value": 1.25, "low": 1.25, "high": 1.25},
        "verdict": "worse",
        "ratio": 1.25,
    }
    assert (dense["ratio"], speedup["ratio"]) == (1.0, 0.8)


def test_table() -> None:
    sides = {"old [1]": [ffn(M=1), ffn(M=16)], "new": [ffn(2.0, 1.25, M=1), ffn(20_000.0, M=16)], "far": [ffn(M=16)]}
    sides["far"][0]["gpu"] = "other GPU"
    comparison = cmp.compare(sides)
    lines = [" ".join(line.split()) for line in text(comparison).splitlines()]
    assert lines[0] == "ffn, skew29, gated, D 2048, F 5632, bfloat16"
    assert lines[2] == "row quantity old [1] other ratio verdict other is"
    assert lines[4:-1] == [
        "M 1 dense_ms 2.000 ±1% 2.000 ±1% 1.000 noise new",
        "sparse_ms 1.000 ±1% 1.250 ±1% 1.250 worse new",
        "speedup 2.000 ±1% 1.600 ±1% 0.800 worse new",
        "M 16 dense_ms 2.000 ±1% 20,000 ±1% 10000.000 worse new",
        "sparse_ms 1.000 ±1% 1.000 ±1% 1.000 noise new",
        "speedup 2.000 ±1% 20,000 ±1% 10000.000 better new",
        "dense_ms 2.000 ±1% 2.000 ±1% 1.000 other machine far",
        "sparse_ms 1.000 ±1% 1.000 ±1% 1.000 other machine far",
        "speedup 2.000 ±1% 2.000 ±1% 1.000 noise far",
    ]
    (note,) = cmp.notes(comparison)[1:]
    assert note == "only in old [1], not in far: ffn, skew29, gated, M 1, D 2048, F 5632, bfloat16"
    assert "quantity" in text(cmp.compare({"a": [], "b": []}))
    said = text(two(ffn(), ffn(speedup=math.nan)))
    assert "- " in said and "unknown" in said
