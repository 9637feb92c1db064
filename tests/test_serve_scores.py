"""``twell serve``: log probabilities, echoed prompts, lists of prompts, and what lm-eval makes of them; metrics."""

from __future__ import annotations

import re
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="needs pip install 'twell[serve]' openai")
pytest.importorskip("uvicorn", reason="needs pip install 'twell[serve]'")
import torch
from transformers import AutoModelForCausalLM

from serving import CONTEXT, PROMPTS, Server, generated, served


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def logprobs_of(model: Any, ids: list[int]) -> torch.Tensor:
    """Row i: what the model expects after token i."""
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0].log_softmax(-1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n_top", [0, 3])
def test_log_probabilities_of_an_answer(either: Server, model: Any, n_top: int, stream: bool) -> None:
    prompt = either.app.tokenizer("Once upon").input_ids
    answer = either.complete("Once upon", max_tokens=8, logprobs=n_top, stream=stream)
    choices = [part.choices[0] for part in answer] if stream else [answer.choices[0]]
    text = "".join(choice.text for choice in choices)
    assert text == either.expected("Once upon", 8)

    def all_of(field: str) -> list[Any]:
        return [one for choice in choices for one in getattr(choice.logprobs, field)]

    expected = logprobs_of(model, prompt + generated(model, [prompt], 8)[0])[len(prompt) - 1 : -1]
    assert all_of("token_logprobs") == pytest.approx(expected.max(-1).values.tolist(), abs=1e-3)  # greedy
    for top, row in zip(all_of("top_logprobs"), expected, strict=True):
        assert sorted(top.values(), reverse=True) == pytest.approx(row.topk(max(n_top, 1)).values.tolist(), abs=1e-3)
    offsets = all_of("text_offset")
    assert len(all_of("tokens")) == 8 and offsets[0] == 0 and offsets == sorted(offsets) and offsets[-1] <= len(text)


def test_log_probabilities_do_not_depend_on_the_temperature(either: Server, model: Any) -> None:
    ids = either.app.tokenizer("Once").input_ids
    answer = either.complete(ids, max_tokens=1, logprobs=20, temperature=2, seed=3).choices[0].logprobs
    values = logprobs_of(model, ids)[-1].topk(20).values.tolist()
    assert list(answer.top_logprobs[0].values())[:20] == pytest.approx(values, abs=1e-3)
    assert answer.token_logprobs[0] in answer.top_logprobs[0].values()


def test_a_chat_with_log_probabilities(either: Server) -> None:
    how = {"model": "tiny", "messages": [{"role": "user", "content": "Who?"}], "temperature": 0, "max_tokens": 5}
    create = either.client.chat.completions.create
    whole = create(**how, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    assert [len(place.top_logprobs) for place in whole] == [2] * 5
    assert all(place.top_logprobs[0].token == place.token and place.logprob <= 0 for place in whole)
    parts = [part.choices[0].logprobs for part in create(**how, logprobs=True, top_logprobs=2, stream=True)]
    assert [place.token for part in parts for place in part.content] == [place.token for place in whole]
    assert create(**how).choices[0].logprobs is None
    with pytest.raises(openai.BadRequestError, match="top_logprobs: needs logprobs: true"):
        create(**how, top_logprobs=2)


def test_echo(either: Server) -> None:
    for max_tokens in (0, 1, 5):
        answer = either.complete("Once upon", echo=True, max_tokens=max_tokens)
        completion = either.expected("Once upon", max_tokens) if max_tokens else ""
        assert answer.choices[0].text == "Once upon" + completion
        assert answer.usage.completion_tokens == max_tokens and answer.choices[0].finish_reason == "length"
    parts = list(either.complete("Once upon", echo=True, max_tokens=5, stream=True))
    assert "".join(part.choices[0].text for part in parts) == "Once upon" + either.expected("Once upon", 5)
    whole_context = [5] * CONTEXT
    answer = either.complete(whole_context, echo=True, max_tokens=0, logprobs=0)
    assert len(answer.choices[0].logprobs.token_logprobs) == CONTEXT


@pytest.mark.parametrize("stream", [False, True])
def test_lists_of_prompts(either: Server, stream: bool) -> None:
    texts_of = PROMPTS[:6]
    ids = [either.app.tokenizer(prompt).input_ids for prompt in texts_of]
    expected = [either.expected(prompt, 6) for prompt in texts_of]
    for prompts in (texts_of, ids):
        answer = either.complete(prompts, max_tokens=6, stream=stream)
        texts = [""] * len(texts_of)
        for part in answer if stream else [answer]:
            for choice in part.choices:
                texts[choice.index] += choice.text
        assert texts == expected
        if not stream:
            assert answer.usage.prompt_tokens == sum(map(len, ids))
            assert answer.usage.completion_tokens == 6 * len(texts_of)


def test_requests_of_lm_eval_get_the_scores_of_the_model(either: Server, model: Any) -> None:
    """Requests and reading as in lm-eval's local-completions: contexts with continuations, from several clients."""
    encode = either.app.tokenizer
    items = [(encode(f"The king {i}").input_ids, encode(f" of {'France ' * i}").input_ids) for i in range(1, 9)]
    items += [(ids, generated(model, [ids], 4)[0]) for ids, _ in items[:4]]  # greedy continuations
    items.append(([7], [9] * (CONTEXT - 2)))  # to the end of the context

    def asked(batch: list[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        body = {"model": "tiny", "prompt": [a + b for a, b in batch], "temperature": 0, "max_tokens": 1, "logprobs": 1}
        _, answer = either.post("/v1/completions", {**body, "seed": 1234, "echo": True})
        scores = []
        for choice, (context, _) in zip(answer["choices"], batch, strict=True):
            tokens = choice["logprobs"]["token_logprobs"][len(context) : -1]
            tops = choice["logprobs"]["top_logprobs"][len(context) : -1]
            greedy = all(t == max(top.values()) for t, top in zip(tokens, tops, strict=True))
            scores.append((sum(tokens), greedy))
        return scores

    with ThreadPoolExecutor(3) as pool:
        got = [score for part in pool.map(asked, (items[:5], items[5:8], items[8:])) for score in part]
    for (context, continuation), (score, greedy) in zip(items, got, strict=True):
        rows = logprobs_of(model, context + continuation)[len(context) - 1 : -1]
        tokens = torch.tensor(continuation)
        assert score == pytest.approx(rows.gather(1, tokens[:, None]).sum().item(), abs=1e-2, rel=1e-5)
        assert greedy == bool((rows.argmax(-1) == tokens).all())
    assert [greedy for _, greedy in got[8:12]] == [True] * 4


def test_metrics(folder: Path) -> None:
    with served(folder, batched=False) as one:
        usages = [one.complete(max_tokens=n).usage for n in (3, 4)]
        assert one.post("/v1/completions", {"prompt": ""})[0] == 400
        assert one.post("/made-up", {})[0] == 404
        with urllib.request.urlopen(f"{one.url}/metrics") as response:
            assert response.headers["Content-Type"].startswith("text/plain; version=")
            said = response.read().decode()
    values = {name: float(value) for name, value in re.findall(r"^(\w[^ ]*) (\S+)$", said, re.M)}
    assert values['twell_requests_total{path="/v1/completions",status="200"}'] == 2
    assert values['twell_requests_total{path="/v1/completions",status="400"}'] == 1
    assert values['twell_requests_total{path="other",status="404"}'] == 1
    assert values["twell_completion_tokens_total"] == 7
    assert values["twell_prompt_tokens_total"] == sum(usage.prompt_tokens for usage in usages)
    assert values["twell_first_token_seconds_count"] == values["twell_answer_seconds_count"] == 2
    assert values["twell_running"] == values["twell_engine_failures"] == 0
