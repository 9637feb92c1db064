"""Rows of results: whole whoever writes at once, and no line is lost without a word."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twell.workbench.bench import rows

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
ROWS = st.dictionaries(st.text(), VALUES, max_size=5)


# A process that appends many rows, as soon as a file called "go" is there. It imports the module alone, and no torch.
WRITER = """
import importlib.util, pathlib, sys, time
spec = importlib.util.spec_from_file_location("rows", sys.argv[1])
rows = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rows)
path, writer, n = pathlib.Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
print("ready", flush=True)
while not path.with_name("go").exists():
    time.sleep(0.001)
for i in range(n):
    rows.append({"writer": writer, "i": i, "filler": "x" * (i * 977 % 20_000)}, path)
"""


# ---------------------------------------------------------------------------------------------------------
# Appending
# ---------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.lists(ROWS, max_size=5))
def test_what_is_appended_is_read(written: list[dict[str, Any]]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        for row in written:
            rows.append(row, path)
        assert (rows.read([path]) if written else []) == written


def test_not_a_number_comes_back(tmp_path: Path) -> None:
    rows.append({"ms": math.nan}, tmp_path / "rows.jsonl")
    (row,) = rows.read([tmp_path / "rows.jsonl"])
    assert math.isnan(row["ms"])


@pytest.mark.parametrize("ending", ["", '\n{"bench": "ff'])
def test_processes_append_at_once(tmp_path: Path, ending: str) -> None:
    """Each row is whole and each process's rows are in order, after whatever the file ends with."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"writer": "before"}' + ending)
    n_writers, n_rows = 3, 40
    command = [sys.executable, "-c", WRITER, rows.__file__, str(path)]
    writers = [
        subprocess.Popen([*command, str(w), str(n_rows)], stdout=subprocess.PIPE, text=True) for w in range(n_writers)
    ]
    for writer in writers:
        assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    (tmp_path / "go").touch()
    assert [writer.wait(120) for writer in writers] == [0] * n_writers
    first, *written = map(json.loads, path.read_text().splitlines())  # what the file ended with is gone
    assert first == {"writer": "before"}
    assert Counter(row["writer"] for row in written) == dict.fromkeys(range(n_writers), n_rows)
    for w in range(n_writers):
        assert [row["i"] for row in written if row["writer"] == w] == list(range(n_rows))


def test_without_locks_what_another_process_may_be_writing_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError("no locks here")

    path = tmp_path / "rows.jsonl"
    path.write_text('{"a"')
    monkeypatch.setattr(rows.fcntl, "flock", no_locks)
    rows.append({"a": 1}, path)
    assert path.read_text() == '{"a"\n{"a": 1}\n'


def test_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "some" / "folders" / "rows.jsonl"
    rows.append({"a": 1}, path)
    assert rows.read([path]) == [{"a": 1}]


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is a folder: expected a \.jsonl file"):
        rows.append({}, tmp_path)


def test_a_row_that_is_no_json_leaves_the_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    with pytest.raises(TypeError, match="not JSON serializable"):
        rows.append({"a": object()}, path)
    assert not path.exists()


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_a_pipe_takes_rows(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    got: list[str] = []
    reader = threading.Thread(target=lambda: got.append(path.read_text()))
    reader.start()
    rows.append({"a": 1}, path)
    reader.join(30)
    assert got == ['{"a": 1}\n']


# ---------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------


def test_files_are_read_in_order_and_blank_lines_are_nothing(tmp_path: Path) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    a.write_text('\n{"n": 1}\r\n  \n{"n": 2}')
    b.write_text('{"n": 3}\n\n')
    assert rows.read([b, a]) == [{"n": 3}, {"n": 1}, {"n": 2}]


def test_line_separators_inside_strings_end_no_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"note": "a\u2028b\x85c"}, ensure_ascii=False), encoding="utf-8")
    assert rows.read([path]) == [{"note": "a\u2028b\x85c"}]


@given(ROWS.filter(bool), st.data())
def test_a_cut_last_line_is_left_out_with_a_warning(row: dict[str, Any], data: st.DataObject) -> None:
    """Cut anywhere, also inside a character."""
    line = json.dumps(row, ensure_ascii=False).encode()
    cut = data.draw(st.integers(1, len(line) - 1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_bytes(b'{"n": 1}\n' + line[:cut])
        with pytest.warns(UserWarning, match=r"rows\.jsonl, line 2 is incomplete and left out"):
            assert rows.read([path]) == [{"n": 1}]


@pytest.mark.parametrize("line", [b'{"n": ', b"\xff", b'{"n": 1} {"n": 2}', b"word"])
def test_a_broken_line_before_others_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"n": 1}\n\n' + line + b'\n{"n": 2}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 3 is no JSON: "):
        rows.read([path])


@pytest.mark.parametrize("line", ["[1]", "3", "null", '"text"'])
def test_a_line_that_is_no_object_is_named_even_at_the_end(tmp_path: Path, line: str) -> None:
    """Cut short, an object is never JSON: nobody was interrupted here."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"n": 1}\n' + line)
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2 is no JSON object"):
        rows.read([path])


def test_the_end_of_each_file_may_be_cut(tmp_path: Path) -> None:
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    for path in (a, b):
        path.write_text('{"n": 1}\n{"n"')
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert rows.read([a, b]) == [{"n": 1}, {"n": 1}]
    assert [str(w.message).partition(" is ")[0] for w in caught] == [f"{a}, line 2", f"{b}, line 2"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ('{"n": 1}\n{"n', '{"n": 1}\n{"n": 2}\n'),  # what a killed writer left
        ('{"n": 1}\n' + '{"long": "' + "x" * 70_000, '{"n": 1}\n{"n": 2}\n'),
        ('{"n', '{"n": 2}\n'),
        ('{"n": 1}', '{"n": 1}\n{"n": 2}\n'),  # whole, but for its end
    ],
)
def test_what_a_killed_writer_left_is_dropped_by_the_next(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(before)
    rows.append({"n": 2}, path)
    assert path.read_text() == after


def test_an_empty_file_has_no_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.touch()
    assert rows.read([path]) == []
    rows.append({"n": 1}, path)
    assert rows.read([path]) == [{"n": 1}]


def test_results_of_this_repository_are_readable() -> None:
    for path in (Path(__file__).parent.parent / "results").glob("*.jsonl"):
        assert len(rows.read([path])) == len(path.read_text().splitlines())
