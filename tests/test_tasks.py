"""The tasks' files, layouts and prompts; the prompts are held against lm-eval's, kept in tests/data/eval."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from twell.workbench.evaluate import tasks
from twell.workbench.evaluate.tasks import TASKS, Item, TaskData, read_folder

ITEMS = Path(__file__).parent / "data" / "eval"


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read_task(path: Path, name: str) -> TaskData:
    """Of one file, wherever it is."""
    return tasks._read_task(path, TASKS[name], None)


def item_of(name: str, fields: dict[str, Any], tmp_path: Path) -> Item:
    [item] = read_task(write(tmp_path / "one.jsonl", fields), name).items
    return item


@pytest.mark.parametrize("name", TASKS)
def test_prompts_are_lm_evals(name: str) -> None:
    """If this fails after a change of ours, our numbers no longer compare with lm-eval's."""
    kept = [json.loads(line) for line in (ITEMS / "lm_eval_prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    expected = [item for item in kept if item["task"] == name]
    [data] = read_folder(ITEMS, [name])
    assert len(data.items) == len(expected) == 3
    for item, theirs in zip(data.items, expected, strict=True):
        assert [list(pair) for pair in zip(item.contexts, item.continuations, strict=True)] == theirs["prompts"]
        assert item.gold == theirs["gold"]


PLAIN = {"query": "What is red?", "choices": ["a rose", "the sea"], "gold": 1}
HUB = {"choices": {"text": ["a rose", "the sea"], "label": ["1", "2"]}, "answerKey": "2"}
AUTHORS = [{"text": "a rose", "label": "A"}, {"text": "the sea", "label": "B"}]


@pytest.mark.parametrize("name", ["arc_easy", "arc_challenge", "openbookqa"])
def test_questions_in_all_layouts_are_the_same(name: str, tmp_path: Path) -> None:
    stem = "question_stem" if name == "openbookqa" else "question"
    layouts: list[dict[str, Any]] = [
        PLAIN,
        {**HUB, stem: "What is red?", "id": "7"},
        {"question": {"stem": "What is red?", "choices": AUTHORS}, "answerKey": "B"},
    ]
    if name != "openbookqa":
        layouts.append({**PLAIN, "query": "Question: What is red?"})
    assert len({item_of(name, fields, tmp_path) for fields in layouts}) == 1
    assert item_of(name, PLAIN, tmp_path).continuations == (" a rose", " the sea")
    assert item_of(name, PLAIN, tmp_path).gold == 1


def test_commonsense_qa_in_all_layouts_is_the_same(tmp_path: Path) -> None:
    texts, letters = ["p", "q", "r", "s", "t"], list("ABCDE")
    authors = [{"text": text, "label": letter} for text, letter in zip(texts, letters, strict=True)]
    layouts: list[dict[str, Any]] = [
        {"query": "Which?", "choices": texts, "gold": 3},
        {"question": "Which?", "choices": {"text": texts, "label": letters}, "answerKey": "D"},
        {"question": {"stem": "Which?", "choices": authors}, "answerKey": "D"},
    ]
    [item] = {item_of("commonsense_qa", fields, tmp_path) for fields in layouts}
    assert item.contexts[0] == "Question: Which?\nA. p\nB. q\nC. r\nD. s\nE. t\nAnswer:"
    assert item.continuations == (" A", " B", " C", " D", " E")


def test_hellaswag_in_both_layouts_is_the_same(tmp_path: Path) -> None:
    """The plain layout has lost which part of the context was the begun sentence; it is found again."""
    rest = {"endings": ["one.", "two."], "label": 1}
    hub = {"activity_label": "Rowing", "ctx_a": "A man is in a boat.", "ctx_b": "the TV man", "ctx": "unused"}
    plain = {"ctx": "Rowing: A man is in a boat. the TV man"}
    item = item_of("hellaswag", {**plain, **rest}, tmp_path)
    assert item == item_of("hellaswag", {**hub, **rest, "label": "1"}, tmp_path)
    assert item.contexts[0] == "Rowing: A man is in a boat. The tv man"  # capitalised as lm-eval does it
    whole = item_of("hellaswag", {"ctx": "Cleaning: Wipe the desk: slowly. Use soap.", **rest}, tmp_path)
    assert whole.contexts[0] == "Cleaning: Wipe the desk: slowly. Use soap."


def test_winogrande_in_both_layouts_is_the_same(tmp_path: Path) -> None:
    hub = {"sentence": "The cat saw the dog and the _ ran.", "option1": "cat", "option2": "dog", "answer": "2"}
    contexts = ["The cat saw the dog and the cat", "The cat saw the dog and the dog"]
    plain = {"context_options": contexts, "continuation": "ran.", "gold": 1}
    assert item_of("winogrande", hub, tmp_path) == item_of("winogrande", plain, tmp_path)
    assert item_of("winogrande", hub, tmp_path) == Item(tuple(contexts), (" ran.", " ran."), 1)


PIQA = {"goal": "g", "sol1": "a", "sol2": "b", "label": 0}


@pytest.mark.parametrize(
    ("name", "fields", "message"),
    [
        ("piqa", {**PIQA, "sol2": None}, "no field 'sol2'"),
        ("piqa", {**PIQA, "goal": 3}, "field 'goal' is not text: 3"),
        ("piqa", {**PIQA, "label": 2}, "field 'label' is 2: expected an index from 0 to 1"),
        ("piqa", {**PIQA, "label": True}, "field 'label' is True"),
        (
            "arc_easy",
            {**PLAIN, "choices": ["one"], "gold": 0},
            "expected at least 2 choices, none of them empty, got ['one']",
        ),
        ("arc_easy", {**PLAIN, "choices": ["one", " "]}, "none of them empty, got ["),
        ("arc_easy", {**PLAIN, "choices": "one"}, "field 'choices' is not a list of texts"),
        ("arc_easy", {**PLAIN, "gold": None}, "no field 'gold'"),
        ("arc_easy", {"question": "q", "answerKey": "A"}, "no field 'choices'"),
        ("arc_easy", {**HUB, "question": "q", "answerKey": "C"}, "2 choices with the labels 1, 2, and the answer 'C'"),
        (
            "arc_easy",
            {"question": "q", "choices": {"text": ["a"], "label": []}, "answerKey": "A"},
            "1 choices with the labels , and",
        ),
        ("openbookqa", {**HUB, "question": "q"}, "no field 'question_stem'"),
        ("commonsense_qa", PLAIN, "expected the five choices A to E, got A, B"),
        ("hellaswag", {"ctx": "nothing in front", "endings": ["a", "b"], "label": 0}, "begins with no 'activity: '"),
        ("winogrande", {"context_options": ["a"], "continuation": "b", "gold": 0}, "expected 2 choices"),
        ("winogrande", {"sentence": "no blank", "option1": "a", "option2": "b", "answer": "1"}, "has no blank _"),
        ("winogrande", {"sentence": "a _", "option1": "a", "option2": "b", "answer": ""}, "field 'answer' is empty"),
        ("winogrande", {"sentence": "a _", "option1": "a", "option2": "b", "answer": "3"}, "neither '1' nor '2'"),
    ],
)
def test_bad_fields_are_named_with_their_line(name: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    [good] = read_folder(ITEMS, [name], limit=1)
    path = write(tmp_path / "bad.jsonl", good.docs[0], fields)
    with pytest.raises(ValueError, match=r"bad\.jsonl, line 2, as ") as caught:
        read_task(path, name)
    assert message in str(caught.value)


def test_lines_that_are_no_objects_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "bad.jsonl", PIQA, [1])
    with pytest.raises(ValueError, match="line 2 is not a JSON object"):
        read_task(path, "piqa")
    path.write_text(json.dumps(PIQA) + "\n\n{")
    with pytest.raises(ValueError, match="line 3 is not JSON: "):
        read_task(path, "piqa")
    path.write_text(json.dumps({**PIQA, "goal": "a\u2028b"}, ensure_ascii=False), encoding="utf-8")
    assert read_task(path, "piqa").items[0].contexts[0] == "Question: a\u2028b\nAnswer:"  # no line ends there


def test_folders(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="unknown task 'boolq': expected one of arc_easy, arc_challenge, hellaswag"):
        read_folder(tmp_path, ["boolq"])
    with pytest.raises(ValueError, match="is not a folder"):
        read_folder(tmp_path / "nowhere", ["piqa"])
    with pytest.raises(ValueError, match=r"must have one file piqa\*\.jsonl: there is none"):
        read_folder(tmp_path, ["piqa"])
    path = write(tmp_path / "piqa.jsonl", PIQA, PIQA, PIQA)
    [data] = read_folder(tmp_path, ["piqa"], limit=2)
    assert (data.path, len(data.items), len(data.docs)) == (path, 2, 2)
    write(tmp_path / "piqa_train.jsonl", PIQA)
    with pytest.raises(ValueError, match=r"one file piqa\*\.jsonl: there is piqa\.jsonl, piqa_train\.jsonl"):
        read_folder(tmp_path, ["piqa"])
    with pytest.raises(ValueError, match="has no items"):
        read_task(write(tmp_path / "empty.jsonl"), "piqa")
