"""The paper's seven tasks: their files, their fields, and lm-eval's zero-shot prompts.

A file has one JSON object a line, in one of three layouts: that of the hub's dataset, that of the authors' own files
(different for ARC, OpenBookQA and CommonsenseQA), or a plain one: ``query``, ``choices``, ``gold`` for questions,
``context_options``, ``continuation``, ``gold`` for WinoGrande, ``ctx`` with the activity in front for HellaSwag. Each
line becomes a *doc* with the hub's fields, which lm-eval reads, and an ``Item``, which our own scorer reads.
"""

from __future__ import annotations

import itertools
import json
import re
import string
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Fields = dict[str, Any]


class Item(NamedTuple):
    """A question; the choices are the continuations."""

    contexts: tuple[str, ...]  # one a choice; they differ only in WinoGrande
    continuations: tuple[str, ...]  # each begins with a space
    gold: int


class Task(NamedTuple):
    name: str  # as in lm-eval
    to_doc: Callable[[Fields], Fields]  # a line in any layout -> the hub's fields
    to_item: Callable[[Fields], Item]  # the hub's fields -> the prompt
    is_normed: bool = True  # acc_norm is usual


class TaskData(NamedTuple):
    """The items of a task, in the order of the file."""

    task: Task
    path: Path
    docs: list[Fields]
    items: list[Item]


# -- Files ------------------------------------------------------------------------------------------------


def find_task(name: str) -> Task:
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: expected one of {', '.join(TASKS)}")
    return TASKS[name]


def read_folder(folder: Path, names: Sequence[str], limit: int | None = None) -> list[TaskData]:
    """Read each task from the folder's .jsonl file whose name begins with the task's name, underscores ignored."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder with the tasks' files")
    return [_read_task(_find_file(folder, task.name), task, limit) for task in map(find_task, names)]


def _find_file(folder: Path, name: str) -> Path:
    wanted = name.replace("_", "")
    found = sorted(path for path in folder.glob("*.jsonl") if path.name.replace("_", "").startswith(wanted))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise ValueError(f"{folder} must have one file {name}*.jsonl: there is {names}")
    return found[0]


def _read_task(path: Path, task: Task, limit: int | None) -> TaskData:
    docs: list[Fields] = []
    items: list[Item] = []
    for number, fields in itertools.islice(_lines_of(path), limit):
        try:
            docs.append(task.to_doc(fields))
            items.append(task.to_item(docs[-1]))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}, as {task.name}: {error}") from None
    if not items:
        raise ValueError(f"{path} has no items")
    return TaskData(task, path, docs, items)


def _lines_of(path: Path) -> Iterator[tuple[int, Fields]]:
    """(line number, JSON object) of a .jsonl file."""
    # str.splitlines would also split at characters that a JSON string may hold.
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line.decode())
        except (ValueError, RecursionError) as error:  # bad JSON or UTF-8
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from None
        if not isinstance(fields, dict):
            raise ValueError(f"{path}, line {number} is not a JSON object")
        yield number, fields


# -- Questions: ARC, OpenBookQA, CommonsenseQA ------------------------------------------------------------


def _question_doc(fields: Fields, stem: str = "question") -> Fields:
    """{``stem``, choices: {text, label}, answerKey}"""
    if "query" in fields:
        texts = _texts(fields, "choices")
        labels = list(string.ascii_uppercase[: len(texts)])
        question, answer = _text(fields, "query").removeprefix("Question: "), labels[_index(fields, "gold", len(texts))]
    else:
        authors = isinstance(fields.get("question"), dict)  # the authors' own files
        asked = fields["question"] if authors else fields
        question, given = _text(asked, "stem" if authors else stem), _field(asked, "choices", (list, dict), "choices")
        if isinstance(given, list):
            texts, labels = ([_text(choice, name) for choice in given] for name in ("text", "label"))
        else:
            texts, labels = _texts(given, "text"), _texts(given, "label")
        answer = _text(fields, "answerKey").strip()
        if len(texts) != len(labels) or answer not in labels:
            raise ValueError(f"{len(texts)} choices with the labels {', '.join(labels)}, and the answer {answer!r}")
    return {stem: question, "choices": {"text": texts, "label": labels}, "answerKey": answer}


def _gold(doc: Fields) -> int:
    return int(doc["choices"]["label"].index(doc["answerKey"]))


def _arc_item(doc: Fields) -> Item:
    return _item(f"Question: {doc['question']}\nAnswer:", doc["choices"]["text"], _gold(doc))


def _openbookqa_doc(fields: Fields) -> Fields:
    return _question_doc(fields, "question_stem")


def _openbookqa_item(doc: Fields) -> Item:
    return _item(doc["question_stem"], doc["choices"]["text"], _gold(doc))


def _commonsense_qa_item(doc: Fields) -> Item:
    """The prompt lists the choices; their letters are scored."""
    texts, labels = doc["choices"]["text"], doc["choices"]["label"]
    if labels != list("ABCDE"):
        raise ValueError(f"expected the five choices A to E, got {', '.join(labels)}")
    lines = [f"{label}. {text}" for label, text in zip(labels, texts, strict=True)]
    return _item("\n".join([f"Question: {doc['question'].strip()}", *lines, "Answer:"]), labels, _gold(doc))


# -- HellaSwag, PIQA, WinoGrande --------------------------------------------------------------------------

# The unfinished sentence at the end of a context: all items from ActivityNet have one, none from wikiHow.
_BEGUN_SENTENCE = re.compile(r"(?<=[.!?\"')]) [a-z][^.!?]*$")


def _hellaswag_doc(fields: Fields) -> Fields:
    endings = _texts(fields, "endings")
    label = _index(fields, "label", len(endings))
    if "ctx_a" in fields:
        whole = {name: _field(fields, name, str, "text") for name in ("activity_label", "ctx_a", "ctx_b")}
    else:
        activity, colon, context = _text(fields, "ctx").partition(": ")
        if not colon:
            raise ValueError("field 'ctx' begins with no 'activity: ', and there is no field 'ctx_a'")
        begun = _BEGUN_SENTENCE.search(context)
        end = len(context) if begun is None else begun.start()
        whole = {"activity_label": activity, "ctx_a": context[:end], "ctx_b": context[end + 1 :]}
    return {**whole, "endings": endings, "label": str(label)}


def _hellaswag_item(doc: Fields) -> Item:
    context = f"{doc['activity_label']}: {doc['ctx_a']} {doc['ctx_b'].capitalize()}"
    return _item(_without_marks(context), [_without_marks(ending) for ending in doc["endings"]], int(doc["label"]))


def _without_marks(text: str) -> str:
    """Remove wikiHow's [title], [step] and so on."""
    return re.sub(r"\[.*?\]", "", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def _piqa_doc(fields: Fields) -> Fields:
    return {**{name: _text(fields, name) for name in ("goal", "sol1", "sol2")}, "label": _index(fields, "label", 2)}


def _piqa_item(doc: Fields) -> Item:
    return _item(f"Question: {doc['goal']}\nAnswer:", [doc["sol1"], doc["sol2"]], doc["label"])


def _winogrande_doc(fields: Fields) -> Fields:
    if "context_options" in fields:
        options, after = _texts(fields, "context_options"), _text(fields, "continuation")
        if len(options) != 2:
            raise ValueError(f"expected 2 choices in 'context_options', got {len(options)}")
        answer = str(1 + _index(fields, "gold", 2))
        # The blank comes first, because the options also hold the text before it.
        return {"sentence": f"_ {after}", "option1": options[0], "option2": options[1], "answer": answer}
    doc = {name: _text(fields, name) for name in ("sentence", "option1", "option2", "answer")}
    if doc["answer"] not in ("1", "2"):
        raise ValueError(f"the answer {doc['answer']!r} is neither '1' nor '2'")
    if "_" not in doc["sentence"]:
        raise ValueError("field 'sentence' has no blank _")
    return doc


def _winogrande_item(doc: Fields) -> Item:
    """The context is the sentence up to the blank with either option in it; the rest is the continuation."""
    before, _, after = doc["sentence"].partition("_")
    contexts = (before + doc["option1"], before + doc["option2"])
    return Item(contexts, (f" {after.strip()}",) * 2, int(doc["answer"]) - 1)


# -- Fields -----------------------------------------------------------------------------------------------


def _item(context: str, choices: Sequence[str], gold: int) -> Item:
    if len(choices) < 2 or not all(choice.strip() for choice in choices):
        raise ValueError(f"expected at least 2 choices, none of them empty, got {choices!r}")
    return Item((context,) * len(choices), tuple(f" {choice}" for choice in choices), gold)


def _field(fields: Any, name: str, of: type | tuple[type, ...], what: str) -> Any:
    value = fields.get(name) if isinstance(fields, dict) else None
    if value is None:
        raise ValueError(f"no field {name!r}")
    if not isinstance(value, of):
        raise ValueError(f"field {name!r} is not {what}: {value!r}")
    return value


def _text(fields: Any, name: str) -> str:
    value: str = _field(fields, name, str, "text")
    if not value.strip():
        raise ValueError(f"field {name!r} is empty")
    return value


def _texts(fields: Fields, name: str) -> list[str]:
    value: list[str] = _field(fields, name, list, "a list of texts")
    if not all(isinstance(text, str) for text in value):
        raise ValueError(f"field {name!r} is not a list of texts: {value!r}")
    return value


def _index(fields: Fields, name: str, choices: int) -> int:
    """The index of the right choice, from 0; some files have it as text."""
    value = _field(fields, name, (int, str), "an index")
    if str(value) not in map(str, range(choices)):
        raise ValueError(f"field {name!r} is {value!r}: expected an index from 0 to {choices - 1}")
    return int(value)


TASKS = {
    task.name: task
    for task in (
        Task("arc_easy", _question_doc, _arc_item),
        Task("arc_challenge", _question_doc, _arc_item),
        Task("hellaswag", _hellaswag_doc, _hellaswag_item),
        Task("openbookqa", _openbookqa_doc, _openbookqa_item),
        Task("piqa", _piqa_doc, _piqa_item),
        Task("winogrande", _winogrande_doc, _winogrande_item, is_normed=False),
        Task("commonsense_qa", _question_doc, _commonsense_qa_item, is_normed=False),
    )
}
