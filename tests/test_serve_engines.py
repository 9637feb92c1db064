"""The engines of ``twell serve``: prompts of any length in any mix, and steps that fail."""

from __future__ import annotations

import copy
import queue
import random
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="needs pip install 'twell[serve]'")
import torch
from transformers import AutoModelForCausalLM, BloomConfig

from serving import generated
from twell.hf import LlamaSparseReluConfig, LlamaSparseReluForCausalLM
from twell.nn import SparseFFNBase
from twell.workbench import serve
from twell.workbench.serve import scoring
from twell.workbench.serve.batched import why_not_batched
from twell.workbench.serve.jobs import Job, Sampler
from twell.workbench.serve.requests import ApiError

VOCABULARY, CONTEXT = 320, 600


def tiny(**changes: Any) -> Any:
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "initializer_range": 0.3,
        "eos_token_id": None,
        "bos_token_id": 0,
        "pad_token_id": 0,
    }
    return LlamaSparseReluForCausalLM(LlamaSparseReluConfig(**{**shape, **changes})).eval()


@pytest.fixture(scope="module")
def model() -> Iterator[Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small do not gain from more
    yield tiny()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def untouched(model: Any) -> Any:
    """The model before batching may change how it attends. (Drawn anew beside an engine's threads, which share torch's
    random numbers, it could come out as another one.)"""
    return copy.deepcopy(model)


def drawn(engine: serve.Engine, jobs: list[tuple[list[int], int, int | None]]) -> list[list[int] | Exception]:
    """The tokens, or the error, that jobs of (prompt, tokens, seed) get which come together."""
    results: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in jobs]
    for (ids, n, seed), result in zip(jobs, results, strict=True):
        sampler = None if seed is None else Sampler(1.0, 1.0, None, seed, torch.device("cpu"))
        engine.start(Job(ids, n, sampler, result.put))
    return [answer(result) for result in results]


def tokens_of(engine: serve.Engine, prompts: list[list[int]], max_tokens: int) -> list[list[int] | Exception]:
    return drawn(engine, [(ids, max_tokens, None) for ids in prompts])


def answer(result: queue.SimpleQueue[Any]) -> list[int] | Exception:
    tokens: list[int] = []
    while isinstance(part := result.get(timeout=60), list):
        tokens += part
    return tokens if part is None else part


def prompt(chance: random.Random, n: int) -> list[int]:
    return [chance.randrange(VOCABULARY) for _ in range(n)]


# ---------------------------------------------------------------------------------------------------------
# Prompts of any length, in any mix
# ---------------------------------------------------------------------------------------------------------

ALL_KINDS = [1, 595, 2, 300, 17, 1, 255, 256, 257, 599]


@pytest.mark.parametrize(
    ("lengths", "batch_tokens", "cache_tokens"),
    [
        pytest.param([100] * 8, None, 2048, id="eight of 100"),
        pytest.param([590, 513, 512, 511], None, 4096, id="longer than a step"),
        pytest.param(ALL_KINDS, 100, 2048, id="all kinds in small steps"),
        pytest.param(ALL_KINDS[:5], None, CONTEXT, id="a cache of one context"),
    ],
)
def test_prompts_of_any_length_in_any_mix(
    model: Any, lengths: list[int], batch_tokens: int | None, cache_tokens: int
) -> None:
    """Split over steps, among others, greedy or drawn: each gets what it gets alone."""
    chance = random.Random(len(lengths))
    jobs = [(prompt(chance, n), min(4, CONTEXT - n), i if i % 3 == 2 else None) for i, n in enumerate(lengths)]
    with serve.OneAtATime(model) as engine:
        expected = [drawn(engine, [job])[0] for job in jobs]
    with serve.Batched(model, cache_tokens, batch_tokens) as engine:
        assert drawn(engine, jobs) == expected


def test_more_requests_than_the_cache_holds() -> None:
    """Two pages of 256 tokens for ten requests of up to 220: they take turns, and lose nothing."""
    model: Any = tiny()
    chance = random.Random(0)
    prompts = [[chance.randrange(VOCABULARY) for _ in range(chance.choice([3, 60, 180]))] for _ in range(10)]
    expected = generated(model, prompts, 40)
    with serve.Batched(model, 512) as engine:
        assert tokens_of(engine, prompts, 40) == expected


def test_the_cache_holds_16_contexts_where_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny().config
    model: Any = SimpleNamespace(config=config, device=torch.device("cpu"), dtype=torch.float32)
    free = SimpleNamespace(available=2**40)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    assert serve.cache_tokens_for(model) == 16 * config.max_position_embeddings
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    free.available = 4 * 1000 * token_bytes
    assert serve.cache_tokens_for(model) == 1000
    free.available, config.max_position_embeddings = 2**40, 2**14
    assert serve.cache_tokens_for(model) == 2**16


# ---------------------------------------------------------------------------------------------------------
# Steps that fail
# ---------------------------------------------------------------------------------------------------------


class Failing:
    """Fails the model's forwards while ``now``: all of them, or those of more than one token."""

    def __init__(self, model: Any) -> None:
        self.now, self.single, self.waits = False, False, threading.Event()
        self.waits.set()
        self.hook = model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: Any, args: Any, kwargs: Any) -> None:
        self.waits.wait(30)
        ids = kwargs["input_ids"] if "input_ids" in kwargs else args[0]
        if self.now and (self.single or ids.shape[1] > 1):
            raise RuntimeError("cannot read /home/me/secret")


@pytest.fixture(params=["Batched", "OneAtATime"])
def engine(request: pytest.FixtureRequest, model: Any, untouched: Any) -> Iterator[serve.Engine]:
    with serve.Batched(model, 1024) if request.param == "Batched" else serve.OneAtATime(model) as one:
        yield one


@pytest.fixture
def failing(engine: Any) -> Iterator[Failing]:
    one = Failing(engine.model)
    yield one
    one.waits.set()
    one.hook.remove()


def test_a_step_that_fails_fails_its_requests_and_no_more(engine: Any, failing: Failing) -> None:
    job: tuple[list[int], int, int | None] = ([5, 6, 7], 5, None)
    expected = drawn(engine, [job])[0]
    assert isinstance(expected, list)
    for n_jobs in (1, 4):
        failing.now = True
        for error in drawn(engine, [job] * n_jobs):
            assert isinstance(error, ApiError) and error.status == 500
            assert str(error) == "the model failed while it computed this request; the server's log says why"
        failing.now = False
        assert drawn(engine, [job] * 3) == [expected] * 3
    assert engine.failures >= 2 and not engine.died and not engine.jobs


def test_what_comes_while_the_engine_starts_again_is_computed(model: Any, failing: Failing, engine: Any) -> None:
    expected = drawn(engine, [([5, 6, 7], 5, None)])[0]
    failing.now = True
    first: queue.SimpleQueue[Any] = queue.SimpleQueue()
    engine.start(Job([5, 6, 7], 5, None, first.put))
    assert isinstance(answer(first), ApiError)
    failing.waits.clear()  # the token that is tried waits here
    later: queue.SimpleQueue[Any] = queue.SimpleQueue()
    starting = threading.Thread(target=lambda: engine.start(Job([5, 6, 7], 5, None, later.put)))
    starting.start()
    failing.now = False
    failing.waits.set()
    assert answer(later) == expected
    starting.join(30)


def test_an_engine_that_cannot_start_again_dies(engine: Any, failing: Failing) -> None:
    """Those that wait get their error, those that come later a 503, and the process is told."""
    told = threading.Event()
    engine.on_death = told.set
    failing.now = failing.single = True
    for error in drawn(engine, [([5, 6, 7], 5, None)] * 3):
        assert isinstance(error, ApiError) and "/home" not in str(error)
    assert told.wait(30)
    with pytest.raises(ApiError, match="cannot start again"):
        engine.start(Job([5], 1, None, print))


def test_versions_of_transformers_that_were_not_tried_are_not_batched(model: Any) -> None:
    assert why_not_batched(model) is None
    for version in ("5.16.3", "6.0.0.dev0"):
        assert f"from 5.17 and below 6.0, this is {version}" in str(why_not_batched(model, version))


# ---------------------------------------------------------------------------------------------------------
# Log probabilities
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_scores_of_a_prompt_and_of_its_answer(
    untouched: Any, engine: Any, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "CHUNK", 64)
    ids = prompt(random.Random(0), 150)
    result: queue.SimpleQueue[Any] = queue.SimpleQueue()
    job = Job(ids, max_tokens, None, result.put, n_top=2, scores_prompt=True)
    engine.start(job)
    new = answer(result)
    assert isinstance(new, list) and len(new) == max_tokens
    with torch.no_grad():
        expected = untouched(torch.tensor([ids + new])).logits[0].log_softmax(-1)
    assert job.prompt_scores[0] is None and len(job.prompt_scores) == len(ids) and len(job.scores) == max_tokens
    for at, (token, score) in enumerate(zip((ids + new)[1:], job.prompt_scores[1:] + job.scores, strict=True)):
        assert score is not None
        best = expected[at].topk(2)
        assert score.logprob == pytest.approx(expected[at, token].item(), abs=1e-3)
        assert [t for t, _ in score.top] == best.indices.tolist()
        assert [value for _, value in score.top] == pytest.approx(best.values.tolist(), abs=1e-3)


def test_a_prompt_that_cannot_be_scored_fails_alone(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(model: Any, ids: Any) -> Any:
        if ids.shape[1] > 1:
            raise RuntimeError("out of memory, say")
        return plain(model, ids)

    plain = scoring._logits
    monkeypatch.setattr(scoring, "_logits", fail)
    result: queue.SimpleQueue[Any] = queue.SimpleQueue()
    engine.start(Job([5, 6], 1, None, result.put, n_top=0, scores_prompt=True))
    assert isinstance(answer(result), ApiError)
    assert isinstance(drawn(engine, [([5, 6], 2, None)])[0], list) and not engine.died


# ---------------------------------------------------------------------------------------------------------
# Which engine a model gets
# ---------------------------------------------------------------------------------------------------------


def test_a_model_that_batching_gets_wrong_is_served_one_at_a_time() -> None:
    """ALiBi's positions are lost in a batch. The answers would be wrong, and nothing would say so."""
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=64, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.3, eos_token_id=None)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    prompts = [[5, 6, 7], [9] * 20]
    expected = generated(model, prompts, 10)
    engine, why_not = serve.choose_engine(model, 1024)
    with engine:
        assert isinstance(engine, serve.OneAtATime)
        assert why_not is not None and "otherwise than model.generate" in why_not
        assert tokens_of(engine, prompts, 10) == expected


def test_layers_do_not_plan_by_what_is_tried_first(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny()
    looks: list[int] = []
    monkeypatch.setattr(SparseFFNBase, "_look_at", lambda self, x: looks.append(x.shape[-2]))
    model.model.layers[0].mlp.set_plan(None)
    engine, _ = serve.choose_engine(model, 1024)
    with engine:
        assert not looks
        tokens_of(engine, [[5, 6, 7]], 2)
        assert looks  # real tokens
    assert [layer.mlp._plans_itself for layer in model.model.layers] == [False, True]


def test_a_generation_config_that_batching_would_leave_out() -> None:
    model: Any = tiny()
    plain = generated(model, [[5, 6, 7]], 30)
    model.generation_config.repetition_penalty = 5.0
    expected = generated(model, [[5, 6, 7]], 30)
    assert expected != plain
    engine, why_not = serve.choose_engine(model, 1024)
    with engine:
        assert why_not == "generation_config.json asks for RepetitionPenaltyLogitsProcessor"
        assert tokens_of(engine, [[5, 6, 7]], 30) == expected


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    model: Any = tiny().cuda()
    prompts = [[5, 6, 7], [9] * 100, [1, 2]]
    tensors = [torch.tensor([ids], device="cuda") for ids in prompts]
    how = {"max_new_tokens": 20, "do_sample": False}
    expected = [model.generate(t, attention_mask=torch.ones_like(t), **how)[0, t.shape[1] :].tolist() for t in tensors]
    engine, why_not = serve.choose_engine(model, serve.cache_tokens_for(model))
    with engine:
        assert why_not is None
        assert tokens_of(engine, prompts, 20) == expected
        drawn = [queue.SimpleQueue[Any]() for _ in range(2)]
        for result in drawn:
            engine.start(Job([5, 6, 7], 20, Sampler(1.5, 0.9, 40, 3, model.device), result.put))
        first, second = ([t for part in iter(lambda one=one: one.get(timeout=60), None) for t in part] for one in drawn)
        assert first == second
