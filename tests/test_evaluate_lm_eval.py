"""Our own scorer against lm-eval on the same items: prompts, log-likelihoods, choices, accuracies, standard errors.

Runs where lm-eval is installed. ``python tests/test_evaluate_lm_eval.py`` writes lm-eval's prompts of the items in
tests/data/eval anew; everywhere else, test_tasks.py holds ours against them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from small_models import TINY, tiny_model
from twell.hf import LlamaSparseReluConfig
from twell.train.data import SAMPLE, read_texts
from twell.train.tokenizer import train_bpe
from twell.workbench.evaluate import TASKS, TaskData, harness, read_folder, score_task

if __name__ != "__main__" and not harness.is_installed():
    pytest.skip("needs lm-eval: pip install 'twell[eval]'", allow_module_level=True)

ITEMS = Path(__file__).parent / "data" / "eval"
PROMPTS = ITEMS / "lm_eval_prompts.jsonl"


def prompts_of(name: str, task: Any) -> list[dict[str, Any]]:
    """Each item: context and continuation of each choice, and which is right, as lm-eval makes them."""
    task.build_all_requests()
    items: dict[int, dict[str, Any]] = {}
    for request in task.instances:
        gold = task.doc_to_text(request.doc) if task.multiple_input else task.doc_to_target(request.doc)
        gold = gold if isinstance(gold, int) else task.doc_to_choice(request.doc).index(gold)
        item = items.setdefault(request.doc_id, {"task": name, "gold": gold, "prompts": []})
        item["prompts"].append(list(request.args))
    return [items[i] for i in sorted(items)]


@pytest.fixture(scope="module")
def local() -> dict[str, TaskData]:
    return {data.task.name: data for data in read_folder(ITEMS, list(TASKS))}


@pytest.fixture(scope="module")
def loaded(local: dict[str, TaskData]) -> dict[str, Any]:
    return harness.load_tasks(list(TASKS), local)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_bpe([next(iter(read_texts(SAMPLE)))[:5000]], 400)


@pytest.fixture(scope="module", params=[256, 48], ids=["all fits", "cut on the left"])
def model(request: pytest.FixtureRequest, tokenizer: Any) -> Any:
    shape = TINY | {"max_position_embeddings": request.param, "vocab_size": len(tokenizer), "initializer_range": 0.5}
    return tiny_model(LlamaSparseReluConfig(**shape)).float().eval()


@pytest.mark.parametrize("name", TASKS)
def test_the_kept_prompts_are_lm_evals(name: str, loaded: dict[str, Any]) -> None:
    kept = [json.loads(line) for line in PROMPTS.read_text(encoding="utf-8").splitlines()]
    assert [item for item in kept if item["task"] == name] == prompts_of(name, loaded[name])


@pytest.mark.parametrize("name", TASKS)
def test_both_scorers_agree(
    name: str, model: Any, tokenizer: Any, local: dict[str, TaskData], loaded: dict[str, Any]
) -> None:
    ours = score_task(model, tokenizer, local[name], batch_size=4)
    theirs = harness.score_task(model, tokenizer, name, loaded[name], batch_size=3)
    for a, b in zip(ours.log_likelihoods, theirs.log_likelihoods, strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    assert ours.choices == theirs.choices
    assert ours.right == theirs.right


def test_both_agree_where_the_tokenizer_begins_with_a_special_token(
    model: Any, local: dict[str, TaskData], loaded: dict[str, Any]
) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = train_bpe([next(iter(read_texts(SAMPLE)))[:5000]], 400)
    bos = tokenizer.bos_token
    template = TemplateProcessing(single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)])
    tokenizer.backend_tokenizer.post_processor = template
    assert tokenizer.encode("a")[0] == tokenizer.bos_token_id
    ours = score_task(model, tokenizer, local["winogrande"], batch_size=4)
    theirs = harness.score_task(model, tokenizer, "winogrande", loaded["winogrande"])
    for a, b in zip(ours.log_likelihoods, theirs.log_likelihoods, strict=True):
        assert a == pytest.approx(b, rel=1e-5)


def test_standard_errors_are_lm_evals(
    model: Any, tokenizer: Any, local: dict[str, TaskData], loaded: dict[str, Any]
) -> None:
    import lm_eval
    from lm_eval.models.huggingface import HFLM

    wrapped = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=4, max_length=model.config.max_position_embeddings)
    theirs = lm_eval.evaluate(lm=wrapped, task_dict=loaded)["results"]
    for name, data in local.items():
        metrics = score_task(model, tokenizer, data).metrics
        for metric in metrics.samples:
            mean = metrics.mean(metric)
            assert mean.value == pytest.approx(theirs[name][f"{metric},none"])
            assert mean.error == pytest.approx(theirs[name][f"{metric}_stderr,none"])
        assert set(metrics.samples) == {
            key.split(",")[0] for key in theirs[name] if key in ("acc,none", "acc_norm,none")
        }


def test_a_choice_that_lm_eval_cannot_score_is_said(
    tokenizer: Any, local: dict[str, TaskData], loaded: dict[str, Any]
) -> None:
    short = tiny_model(LlamaSparseReluConfig(**TINY | {"max_position_embeddings": 4, "vocab_size": len(tokenizer)}))
    with pytest.raises(ValueError, match=r"cannot score piqa: a choice has more tokens than .* of 4; use --scorer own"):
        harness.score_task(short, tokenizer, "piqa", loaded["piqa"])
    assert len(score_task(short, tokenizer, local["piqa"]).choices) == 3


if __name__ == "__main__":
    tasks = harness.load_tasks(list(TASKS), {data.task.name: data for data in read_folder(ITEMS, list(TASKS))})
    written = [item for name, task in tasks.items() for item in prompts_of(name, task)]
    PROMPTS.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in written), encoding="utf-8")
