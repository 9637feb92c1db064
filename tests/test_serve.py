"""``twell serve``: right answers through OpenAI's client, sampled and greedy, whole and streamed, as chats."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai", reason="needs pip install 'twell[serve]' openai")
pytest.importorskip("uvicorn", reason="needs pip install 'twell[serve]'")
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from serving import CONTEXT, PROMPTS, Server, generated, served, wait_until
from twell import cpu
from twell.hf.text import TextStream, decoder
from twell.train.tokenizer import train_bpe
from twell.workbench.serve.answers import UntilStop
from twell.workbench.serve.jobs import Sampler

# -- right answers ------------------------------------------------------------------------------------------


def test_greedy_is_what_generate_gives(either: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sparse_calls = []
    forward = cpu.forward
    monkeypatch.setattr(cpu, "forward", lambda *args, **kw: sparse_calls.append(1) or forward(*args, **kw))
    for prompt in PROMPTS[:8]:
        whole = either.complete(prompt)
        assert (whole.choices[0].text, whole.choices[0].finish_reason) == (either.expected(prompt), "length")
        assert whole.usage.completion_tokens == 12
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + 12
    assert sparse_calls, "the sparse path was not taken"


@pytest.mark.parametrize("max_tokens", [1, 2, 40])
def test_streamed_pieces_are_the_whole_text(either: Server, max_tokens: int) -> None:
    with either.complete(max_tokens=200, stream=True) as stream:
        next(iter(stream))
        assert either.running() == 1  # the first piece is here, the last is not computed yet
    wait_until(lambda: either.running() == 0)
    for prompt in PROMPTS[:4]:
        how = {"max_tokens": max_tokens, "stream": True, "stream_options": {"include_usage": True}}
        *parts, last, usage = either.complete(prompt, **how)
        assert "".join(part.choices[0].text for part in parts) == either.expected(prompt, max_tokens)
        assert {part.choices[0].finish_reason for part in parts} <= {None}
        assert (last.choices[0].text, last.choices[0].finish_reason) == ("", "length")
        assert usage.choices == [] and usage.usage.completion_tokens == max_tokens
        assert len({part.id for part in (*parts, last, usage)}) == 1


def test_an_end_of_text_token_ends_it(folder: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokens = generated(model, [[5, 6, 7]], 12)[0]
    with served(folder, batched=True, eos_token_id=[0, tokens[6]]) as one:
        n = tokens.index(tokens[6]) + 1
        text = one.app.tokenizer.decode(tokens[:n], skip_special_tokens=True)
        for max_tokens in (100, n):
            whole = one.complete([5, 6, 7], max_tokens=max_tokens)
            assert (whole.choices[0].text, whole.choices[0].finish_reason) == (text, "stop")
            assert whole.usage.completion_tokens == n
        *parts, last = one.complete([5, 6, 7], max_tokens=100, stream=True)
        assert "".join(part.choices[0].text for part in parts) == text and last.choices[0].finish_reason == "stop"


def test_token_ids_are_a_prompt(server: Server) -> None:
    ids = server.app.tokenizer("Once upon").input_ids
    for prompt in (ids, [ids], ["Once upon"]):
        assert server.complete(prompt).choices[0].text == server.expected("Once upon")


def test_a_long_list_with_one_wrong_token_is_refused_at_once() -> None:
    from twell.workbench.serve.requests import CompletionRequest

    with pytest.raises(ValueError) as refused:
        CompletionRequest(model="tiny", prompt=[*[1] * 100_000, "x"])
    assert refused.value.error_count() < 10  # not one for each token of each type


def test_a_completion_has_16_tokens_unless_told(server: Server) -> None:
    answer = server.client.completions.create(model="tiny", prompt="Once", temperature=0)
    assert answer.usage.completion_tokens == 16
    for max_tokens in (None, 3):  # near the end of the context
        assert server.complete([5] * (CONTEXT - 3), max_tokens=max_tokens).usage.completion_tokens == 3


def test_stop_strings(either: Server) -> None:
    text = either.expected("Once", 40)
    stop = text[10:13]
    for stops in (stop, [stop], ["never seen", stop, text[20:24]]):
        answer = either.complete("Once", max_tokens=40, stop=stops).choices[0]
        assert (answer.text, answer.finish_reason) == (text[: text.index(stop)], "stop")
        *parts, last = either.complete("Once", max_tokens=40, stop=stops, stream=True)
        assert "".join(part.choices[0].text for part in parts) == answer.text
        assert last.choices[0].finish_reason == "stop"
    wait_until(lambda: either.running() == 0)  # what comes after a stop string is not computed


def test_sixteen_clients_at_once(either: Server) -> None:
    expected = [either.expected(prompt, 10 + i) for i, prompt in enumerate(PROMPTS)]
    barrier = threading.Barrier(len(PROMPTS))

    def ask(i: int) -> str:
        barrier.wait()
        return either.complete_text(PROMPTS[i], max_tokens=10 + i, stream=i % 2 == 0)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(ask, range(len(PROMPTS)))) == expected
    assert either.running() == 0


def test_requests_are_computed_together(server: Server) -> None:
    """Sixteen answers take about as many steps of the model as one."""
    steps: list[int] = []
    hook = server.app.model.register_forward_hook(lambda *_: steps.append(1))
    try:
        with ThreadPoolExecutor(16) as pool:
            list(pool.map(lambda _: server.complete(max_tokens=100), range(16)))
    finally:
        hook.remove()
    assert len(steps) < 16 * 100 / 2


# -- sampling -----------------------------------------------------------------------------------------------


def test_every_request_is_sampled_in_its_own_way(server: Server) -> None:
    """A greedy client is not touched by hot ones beside it, and a seed gives the same alone and in company."""

    def seeded(seed: int) -> str:
        return str(server.complete_text("Once", temperature=1.5, seed=seed, max_tokens=30))

    alone = [seeded(seed) for seed in (1, 2)]
    assert alone[0] != alone[1]
    with ThreadPoolExecutor(12) as pool:
        hot = [pool.submit(seeded, seed) for seed in (1, 2) * 4]
        cold = [pool.submit(server.complete, "Once", max_tokens=30) for _ in range(4)]
        assert [future.result() for future in hot] == alone * 4
        assert {future.result().choices[0].text for future in cold} == {server.expected("Once", 30)}


def test_both_engines_draw_the_same(server: Server, sequential: Server) -> None:
    how = {"temperature": 0.9, "top_p": 0.8, "seed": 7, "max_tokens": 30, "extra_body": {"top_k": 40}}
    assert server.complete(**how).choices[0].text == sequential.complete(**how).choices[0].text


def test_without_a_temperature_it_samples_as_openai_does(server: Server) -> None:
    texts = {server.complete_text("Once", temperature=None, max_tokens=30) for _ in range(4)}
    assert len(texts) > 1
    assert server.complete_text("Once", temperature=1e-40) == server.expected("Once")
    assert server.complete_text("Once", temperature=2, extra_body={"top_k": 1}) == server.expected("Once")


def test_the_models_own_temperature_counts(folder: Path) -> None:
    with served(folder, batched=False, do_sample=True, temperature=1e-9) as one:
        assert one.complete_text("Once", temperature=None) == one.expected("Once")


def test_a_sampler_draws_by_the_probabilities() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, float("-inf")])
    for temperature, top_p, top_k in ((1.0, 1.0, None), (0.5, 1.0, None), (1.0, 1.0, 2), (1.0, 0.7, None)):
        sampler = Sampler(temperature, top_p, top_k, 0, torch.device("cpu"))
        n = 2000
        drawn = Counter(int(sampler(logits.clone()).argmax()) for _ in range(n))
        p = (logits / temperature).softmax(0)
        if top_k is not None:
            p[top_k:] = 0
        if top_p < 1:
            p[2:] = 0  # the first two are 0.88
        for token, probability in enumerate(p / p.sum()):
            error = 5 * float(probability * (1 - probability) / n) ** 0.5
            assert abs(drawn[token] / n - float(probability)) <= error, (temperature, top_p, top_k, token)


# -- chat ---------------------------------------------------------------------------------------------------


def test_chat_follows_the_template(server: Server) -> None:
    messages: list[Any] = [
        {"role": "user", "content": "Who?"},
        {"role": "assistant", "content": "I."},
        {"role": "user", "content": [{"type": "text", "text": "Why"}, {"type": "text", "text": "?"}]},
    ]
    expected = server.expected("<user>Who?\n<assistant>I.\n<user>Why?\n<assistant>", 20, special=False)
    how = {"model": "tiny", "messages": messages, "temperature": 0}
    whole = server.client.chat.completions.create(**how, max_completion_tokens=20)
    assert (whole.choices[0].message.role, whole.choices[0].message.content) == ("assistant", expected)
    *parts, last = server.client.chat.completions.create(**how, max_tokens=20, stream=True)
    assert "".join(part.choices[0].delta.content for part in parts) == expected
    assert [part.choices[0].delta.role for part in parts] == ["assistant"] + [None] * (len(parts) - 1)
    assert last.choices[0].finish_reason == "length"
    to_the_end = server.client.chat.completions.create(**how)
    assert to_the_end.usage.total_tokens == CONTEXT


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "messages: is missing"),
        ({"messages": []}, "messages: List should have at least 1 item"),
        ({"messages": "hello"}, "messages: "),
        ({"messages": [{"role": "user"}]}, "messages.0.content: is missing"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0.role: "),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content: "),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "only parts of type text"),
        ({"messages": [{"role": "system", "content": "x"}]}, "the chat template refuses them: no system here"),
        ({"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}, "tools: "),
        ({"messages": [{"role": "user", "content": "x " * 5000}]}, "context is 256 tokens"),
        ({"messages": [{"role": "user", "content": ""}] * 300}, "context is 256 tokens"),
    ],
)
def test_bad_chats(server: Server, body: dict[str, Any], message: str) -> None:
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 400 and message in answer["error"]["message"], answer


def test_a_model_without_a_chat_template_says_what_to_use(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.app.tokenizer, "chat_template", None)
    with pytest.raises(openai.BadRequestError, match=r"no chat template.*use /v1/completions"):
        server.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "Hello"}])


# -- text ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def byte_bpe() -> Any:
    return train_bpe(["ab é 🦊 " * 50], 300)


@given(st.lists(st.lists(st.integers(0, 290), max_size=4), max_size=12), st.text(max_size=12), st.text(max_size=4))
def test_pieces_of_any_tokens_are_the_whole(byte_bpe: Any, parts: list[list[int]], text: str, prompt: str) -> None:
    """Random bytes, too: halves of characters, and bytes that are none; after a prompt, or nothing."""
    parts = [*parts, *([token] for token in byte_bpe(text).input_ids)]
    before = byte_bpe(prompt).input_ids
    decode = decoder(byte_bpe)
    stream = TextStream(decode, before)
    pieces = [stream.add(part) for part in parts] + [stream.add([], last=True)]
    assert decode(before) + "".join(pieces) == decode(before + [token for part in parts for token in part])


def test_a_space_that_only_shows_inside() -> None:
    """As in Llama's first tokenizers: the first token of a text loses its space, the others keep it."""
    words = {1: " Once", 2: " upon", 3: " a"}
    stream = TextStream(lambda ids: "".join(words[token] for token in ids).removeprefix(" "))
    assert [stream.add([1]), stream.add([2, 3]), stream.add([], last=True)] == ["Once", " upon a", ""]


@given(st.text("ab", max_size=30), st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.data())
def test_text_up_to_a_stop_string(text: str, stops: list[str], data: Any) -> None:
    until = UntilStop(stops)
    given_out, at = "", 0
    while at < len(text) and not until.found:
        n = data.draw(st.integers(1, 5))
        given_out, at = given_out + until.add(text[at : at + n]), at + n
        assert not any(stop in given_out for stop in stops), "a stop string was given out"
    if not until.found:
        given_out += until.add("", last=True)
    assert text.startswith(given_out)
    assert until.found == any(stop in text for stop in stops)
    if until.found:
        assert any(text.startswith(stop, len(given_out)) for stop in stops)
    else:
        assert given_out == text
