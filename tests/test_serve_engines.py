"""The engines of ``twell serve``: prompts of any length in any mix, steps that fail, and the choice of an engine."""

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

from serving import SHAPE, VOCABULARY, generated
from twell.hf import LlamaSparseReluConfig, LlamaSparseReluForCausalLM
from twell.nn import SparseFFNBase
from twell.workbench.serve import jobs
from twell.workbench.serve.batched import Batched, _why_not_batched, cache_tokens_for, choose_engine
from twell.workbench.serve.engine import Engine
from twell.workbench.serve.jobs import Job, Sampler
from twell.workbench.serve.requests import ApiError

CONTEXT = 600
Asked = tuple[list[int], int, int | None]  # prompt, new tokens, seed


def tiny() -> Any:
    torch.manual_seed(0)
    shape = {**SHAPE, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "eos_token_id": None}
    return LlamaSparseReluForCausalLM(LlamaSparseReluConfig(**shape)).eval()


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


def start(engine: Engine, ids: list[int], n: int, sampler: Sampler | None = None, **how: Any) -> tuple[Job, Any]:
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()
    job = Job(ids, n, sampler, results.put, **how)
    engine.start(job)
    return job, results


def answer(results: queue.SimpleQueue[Any]) -> list[int] | Exception:
    tokens: list[int] = []
    while isinstance(part := results.get(timeout=60), list):
        tokens += part
    return tokens if part is None else part


def drawn(engine: Engine, asked: list[Asked]) -> list[list[int] | Exception]:
    """The tokens, or the error, of jobs that come together."""
    samplers = [None if seed is None else Sampler(1.0, 1.0, None, seed, torch.device("cpu")) for *_, seed in asked]
    started = [start(engine, ids, n, sampler) for (ids, n, _), sampler in zip(asked, samplers, strict=True)]
    return [answer(results) for _, results in started]


def tokens_of(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[list[int] | Exception]:
    return drawn(engine, [(ids, max_tokens, None) for ids in prompts])


def prompt(chance: random.Random, n: int) -> list[int]:
    return [chance.randrange(VOCABULARY) for _ in range(n)]


# -- prompts of any length, in any mix ----------------------------------------------------------------------

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
    asked = [(prompt(chance, n), min(4, CONTEXT - n), i if i % 3 == 2 else None) for i, n in enumerate(lengths)]
    with Engine(model) as engine:
        expected = [drawn(engine, [one])[0] for one in asked]
    with Batched(model, cache_tokens, batch_tokens) as engine:
        assert drawn(engine, asked) == expected


def test_more_requests_than_the_cache_holds(model: Any, untouched: Any) -> None:
    """Two pages of 256 tokens for ten requests of up to 220: they take turns, and lose nothing."""
    chance = random.Random(0)
    prompts = [prompt(chance, chance.choice([3, 60, 180])) for _ in range(10)]
    with Batched(model, 512) as engine:
        assert tokens_of(engine, prompts, 40) == generated(untouched, prompts, 40)


def test_the_cache_holds_16_contexts_where_there_is_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny().config
    model: Any = SimpleNamespace(config=config, device=torch.device("cpu"), dtype=torch.float32)
    free = SimpleNamespace(available=2**40)
    monkeypatch.setattr("psutil.virtual_memory", lambda: free)
    assert cache_tokens_for(model) == 16 * config.max_position_embeddings
    token_bytes = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 4
    free.available = 4 * 1000 * token_bytes
    assert cache_tokens_for(model) == 1000
    free.available, config.max_position_embeddings = 2**40, 2**14
    assert cache_tokens_for(model) == 2**16


# -- steps that fail ----------------------------------------------------------------------------------------


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


@pytest.fixture(scope="module", params=["Batched", "Engine"])
def engine(request: pytest.FixtureRequest, model: Any, untouched: Any) -> Iterator[Engine]:
    with Batched(model, 1024) if request.param == "Batched" else Engine(model) as one:
        yield one


@pytest.fixture
def failing(engine: Any) -> Iterator[Failing]:
    one = Failing(engine.model)
    yield one
    one.waits.set()
    one.hook.remove()


def test_a_failed_step_fails_only_its_requests(engine: Any, failing: Failing) -> None:
    asked: Asked = ([5, 6, 7], 5, None)
    expected = drawn(engine, [asked])[0]
    assert isinstance(expected, list)
    for n_jobs in (1, 4):
        failing.now = True
        for error in drawn(engine, [asked] * n_jobs):
            assert isinstance(error, ApiError) and error.status == 500
            assert str(error) == "the model failed while it computed this request; the server's log says why"
        failing.now = False
        assert drawn(engine, [asked] * 3) == [expected] * 3
    assert engine.failures >= 2 and not engine.died and not engine.jobs


def test_requests_that_come_during_a_restart_are_computed(failing: Failing, engine: Any) -> None:
    expected = drawn(engine, [([5, 6, 7], 5, None)])[0]
    failing.now = True
    assert isinstance(answer(start(engine, [5, 6, 7], 5)[1]), ApiError)
    failing.waits.clear()  # the token that is tried waits here
    later: queue.SimpleQueue[Any] = queue.SimpleQueue()
    starting = threading.Thread(target=lambda: engine.start(Job([5, 6, 7], 5, None, later.put)))
    starting.start()
    failing.now = False
    failing.waits.set()
    assert answer(later) == expected
    starting.join(30)


@pytest.mark.parametrize("kind", ["Batched", "Engine"])
def test_an_engine_that_cannot_start_again_dies(model: Any, untouched: Any, kind: str) -> None:
    """Those that wait get their error, those that come later a 503, and the process is told."""
    told = threading.Event()
    with Batched(model, 1024) if kind == "Batched" else Engine(model) as engine:
        engine.on_death = told.set
        failing = Failing(model)
        failing.now = failing.single = True
        for error in drawn(engine, [([5, 6, 7], 5, None)] * 3):
            assert isinstance(error, ApiError) and "/home" not in str(error)
        assert told.wait(30)
        failing.hook.remove()
        with pytest.raises(ApiError, match="cannot start again"):
            start(engine, [5], 1)


# -- log probabilities --------------------------------------------------------------------------------------


@pytest.mark.parametrize("max_tokens", [0, 1, 4])
def test_scores_of_a_prompt_and_of_its_answer(
    untouched: Any, engine: Any, max_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "CHUNK", 64)
    ids = prompt(random.Random(0), 150)
    job, results = start(engine, ids, max_tokens, n_top=2, scores_prompt=True)
    new = answer(results)
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

    plain = jobs._logits
    monkeypatch.setattr(jobs, "_logits", fail)
    assert isinstance(answer(start(engine, [5, 6], 1, n_top=0, scores_prompt=True)[1]), ApiError)
    assert isinstance(drawn(engine, [([5, 6], 2, None)])[0], list) and not engine.died


# -- which engine a model gets ------------------------------------------------------------------------------


def test_versions_of_transformers_that_were_not_tested_are_not_batched(model: Any) -> None:
    assert _why_not_batched(model) is None
    for version in ("5.16.3", "6.0.0.dev0"):
        assert f"from 5.17 and below 6.0, this is {version}" in str(_why_not_batched(model, version))


def test_models_that_batching_would_get_wrong_are_served_one_at_a_time() -> None:
    """ALiBi's positions are lost in a batch, and so is a repetition penalty: nothing else would say so."""
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=64, hidden_size=64, n_layer=2, n_head=4, initializer_range=0.3, eos_token_id=None)
    alibi: Any = AutoModelForCausalLM.from_config(config).eval()
    penalised = tiny()
    plain = generated(penalised, [[5, 6, 7]], 20)
    penalised.generation_config.repetition_penalty = 5.0
    assert generated(penalised, [[5, 6, 7]], 20) != plain
    for model, reason in (
        (alibi, "batched, it answers otherwise than model.generate"),
        (penalised, "generation_config.json asks for RepetitionPenaltyLogitsProcessor"),
    ):
        prompts = [[5, 6, 7], [9] * 20]
        expected = generated(model, prompts, 20)
        engine, why_not = choose_engine(model, 1024)
        with engine:
            assert type(engine) is Engine and why_not == reason
            assert tokens_of(engine, prompts, 20) == expected


def test_layers_do_not_plan_by_the_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny()
    looks: list[int] = []
    monkeypatch.setattr(SparseFFNBase, "_look_at", lambda self, x: looks.append(x.shape[-2]))
    model.model.layers[0].mlp.set_plan(None)
    engine, _ = choose_engine(model, 1024)
    with engine:
        assert not looks
        tokens_of(engine, [[5, 6, 7]], 2)
        assert looks  # real tokens
    assert [layer.mlp._plans_itself for layer in model.model.layers] == [False, True]


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    model: Any = tiny().cuda()
    prompts = [[5, 6, 7], [9] * 100, [1, 2]]
    tensors = [torch.tensor([ids], device="cuda") for ids in prompts]
    how = {"max_new_tokens": 20, "do_sample": False}
    expected = [model.generate(t, attention_mask=torch.ones_like(t), **how)[0, t.shape[1] :].tolist() for t in tensors]
    engine, why_not = choose_engine(model, cache_tokens_for(model))
    with engine:
        assert why_not is None
        assert tokens_of(engine, prompts, 20) == expected
        two = [start(engine, [5, 6, 7], 20, Sampler(1.5, 0.9, 40, 3, model.device)) for _ in range(2)]
        first, second = (answer(results) for _, results in two)
        assert first == second and isinstance(first, list)
