"""Who computes the tokens: transformers' continuous batching, or ``model.generate`` for one request after the other."""

from __future__ import annotations

import abc
import contextlib
import copy
import logging
import queue
import threading
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig, LogitsProcessorList
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from twell.hf.text import context_of
from twell.nn import sparse_ffns
from twell.serve.requests import ApiError

_LOG = logging.getLogger("ContinuousBatchingLogger")  # transformers'
PAGE = 256  # tokens of a page of the cache, as transformers has it


class Sampler:
    """Draws the tokens of one request, from a generator of its own: a seed means the same in any batch.

    It turns logits into scores whose largest is the draw (p / e with e exponential), so that requests which sample
    and requests which do not share one argmax.
    """

    def __init__(
        self, temperature: float, top_p: float, top_k: int | None, seed: int | None, device: torch.device
    ) -> None:
        self.generator = torch.Generator(device)
        if seed is None:
            self.generator.seed()
        else:
            self.generator.manual_seed(seed)
        self.warpers: Any = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
        if top_k is not None:
            self.warpers.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            self.warpers.append(TopPLogitsWarper(top_p))

    def __call__(self, logits_V: Tensor) -> Tensor:
        p_V = self.warpers(None, logits_V.float()[None])[0].softmax(-1)
        e_V = torch.ones_like(p_V).exponential_(generator=self.generator)
        return p_V / e_V.clamp_min_(torch.finfo(p_V.dtype).tiny)


class Job:
    """One request on its way: ``deliver`` gets lists of tokens, then None, or an error. Called in other threads."""

    def __init__(
        self,
        ids: list[int],
        max_tokens: int,
        sampler: Sampler | None,
        deliver: Callable[[list[int] | Exception | None], object],
    ) -> None:
        self.name = uuid.uuid4().hex
        self.ids, self.max_tokens, self.sampler, self.deliver = ids, max_tokens, sampler, deliver
        self.delivered = 0
        self.cancelled = False


class Engine(abc.ABC):
    """Computes jobs. Every job that was taken gets its end, also when the engine dies."""

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.problem: str | None = None  # why no more are taken
        self._lock = threading.RLock()  # a signal's handler may come while its own thread holds it

    @abc.abstractmethod
    def start(self, job: Job) -> None: ...

    @abc.abstractmethod
    def cancel(self, job: Job) -> None:
        """Stop computing it, if it has not ended."""

    @abc.abstractmethod
    def stop(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _take(self, job: Job) -> None:
        with self._lock:
            if self.problem is not None:
                raise ApiError(503, self.problem)
            self.jobs[job.name] = job

    def _end(self, name: str, error: Exception | None = None) -> None:
        job = self.jobs.pop(name, None)
        if job is not None:
            job.deliver(error)

    def end_all(self, problem: str) -> None:
        with self._lock:
            self.problem = self.problem or problem
        for name in list(self.jobs):
            self._end(name, ApiError(503, self.problem))


class _RowSampler(ContinuousBatchingLogitsProcessor):
    """Each row of a batch by the sampler of its own request; rows of greedy requests stay as they are."""

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012 the base class has them so
    ignored_kwargs = ()

    def __init__(self, jobs: dict[str, Job]) -> None:
        self.jobs = jobs
        self.samplers: list[Sampler | None] = []

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        jobs = [self.jobs.get(request.state.request_id) for request in requests_with_new_token]
        self.samplers = [None if job is None else job.sampler for job in jobs]
        return torch.zeros(len(jobs), dtype=torch.int32)

    def __call__(self, scores: Any, tensor_arg: Tensor) -> Any:
        if len(self.samplers) != len(scores):  # transformers before 5.17 has a row for every token of a prompt
            raise RuntimeError(f"{len(scores)} rows of logits for {len(self.samplers)} requests: update transformers")
        for row, sampler in enumerate(self.samplers):
            if sampler is not None:
                scores[row] = sampler(scores[row])
        return scores


class Batched(Engine):
    """transformers' continuous batching, every request with a sampler of its own."""

    def __init__(self, model: Any, cache_tokens: int) -> None:
        super().__init__()
        eos = model.generation_config.eos_token_id
        self.manager = model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1 if eos is None else eos),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=-(-cache_tokens // PAGE),
                max_batch_tokens=2048 if model.device.type == "cuda" else 512,
                use_cuda_graph=False,  # a graph would replay the samplers of the requests it was captured with
                use_async_batching=False,
            ),
        )
        processors = self.manager.logit_processor
        processors.logits_processor.append(_RowSampler(self.jobs))
        processors.tensors_required += 1
        processors.do_processing = True
        self.manager.start()
        self._reader = threading.Thread(target=self._deliver, name="twell-deliver", daemon=True)
        self._reader.start()

    def start(self, job: Job) -> None:
        self._take(job)
        how: dict[str, Any] = {"request_id": job.name, "max_new_tokens": job.max_tokens, "streaming": True}
        if self.manager.add_request(job.ids, **how) is None:
            self._end(job.name, ApiError(503, "the model has stopped"))

    def cancel(self, job: Job) -> None:
        if self.jobs.pop(job.name, None) is not None:
            self.manager.cancel_request(job.name)

    def stop(self) -> None:
        self.end_all("the server is stopping")
        self.manager.stop(block=True, timeout=10, hard_stop=True)

    def _deliver(self) -> None:
        try:
            for output in self.manager:  # until its thread ends
                self._pass_on(output)
        finally:  # nobody waits for what will not come
            error = getattr(self.manager.background_thread_status, "fatal_error", None)
            self.end_all(f"the model has stopped: {error or 'no error was given'}")

    def _pass_on(self, output: Any) -> None:
        job = self.jobs.get(output.request_id)
        if job is None:
            if not output.is_finished():  # it was cancelled before the manager knew it
                self.manager.cancel_request(output.request_id)
            return
        if len(output.generated_tokens) > job.delivered:
            job.deliver(output.generated_tokens[job.delivered :])
            job.delivered = len(output.generated_tokens)
        if output.is_finished():
            self._end(job.name, None if output.error is None else ApiError(500, output.error))


class OneAtATime(Engine):
    """``model.generate``, request after request: for models that cannot be batched, and for exact repetition."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="twell-generate", daemon=True)
        self._thread.start()

    def start(self, job: Job) -> None:
        self._take(job)
        self._waiting.put(job)

    def cancel(self, job: Job) -> None:
        job.cancelled = True
        self.jobs.pop(job.name, None)

    def stop(self) -> None:
        for job in list(self.jobs.values()):
            job.cancelled = True
        self.end_all("the server is stopping")
        self._waiting.put(None)
        self._thread.join(timeout=10)

    def _work(self) -> None:
        while (job := self._waiting.get()) is not None:
            if job.cancelled:
                continue
            try:
                self._generate(job)
            except Exception as error:  # one request's, of whatever kind: the next one must not suffer
                logging.getLogger(__name__).exception("a request failed")
                self._end(job.name, ApiError(500, f"the model failed: {error}"))
            self._end(job.name)

    @torch.no_grad()
    def _generate(self, job: Job) -> None:
        ids = torch.tensor([job.ids], device=self.model.device)
        sampler = job.sampler
        processors = [] if sampler is None else [lambda _, scores: sampler(scores[0])[None]]
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=greedy_config(self.model, max_new_tokens=job.max_tokens),
            logits_processor=LogitsProcessorList(processors),
            stopping_criteria=[lambda ids, _: torch.full((len(ids),), job.cancelled, device=ids.device)],
            streamer=_TokensOf(job),
        )


class _TokensOf:
    """What ``generate`` calls a streamer: first it puts the prompt, then token by token."""

    def __init__(self, job: Job) -> None:
        self.job, self.is_prompt = job, True

    def put(self, ids: Tensor) -> None:
        if not self.is_prompt and not self.job.cancelled:
            self.job.deliver(ids.tolist())
        self.is_prompt = False

    def end(self) -> None:
        pass


def greedy_config(model: Any, **changes: Any) -> GenerationConfig:
    """The model's own, without what samples or searches."""
    config = copy.deepcopy(model.generation_config)
    plain = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "max_length": None}
    config.update(**plain, temperature=None, top_p=None, top_k=None, **changes)
    if config.pad_token_id is None:
        eos = config.eos_token_id
        config.pad_token_id = eos[0] if isinstance(eos, list) else eos
    return config


def cache_tokens_for(model: Any) -> int:
    """Tokens of a shared cache: 16 whole contexts, at most 65,536, at most a quarter of the memory that is free."""
    config = model.config.get_text_config()
    context = context_of(model) or 4096
    tokens = max(context, min(16 * context, 2**16))
    all_heads = getattr(config, "num_attention_heads", None)
    if all_heads is None:  # no attention: it will not be batched
        return tokens
    heads = getattr(config, "num_key_value_heads", None) or all_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // all_heads
    token_bytes = 2 * config.num_hidden_layers * heads * head_dim * model.dtype.itemsize
    if model.device.type == "cuda":
        free = torch.cuda.mem_get_info(model.device)[0]
    else:
        import psutil  # type: ignore[import-untyped]

        free = psutil.virtual_memory().available
    return max(PAGE, min(tokens, free // 4 // token_bytes))


def choose_engine(model: Any, cache_tokens: int) -> tuple[Engine, str | None]:
    """Batched, if that answers as ``model.generate`` does; else one at a time, and why."""
    with _not_planning(model):
        return _choose_engine(model, cache_tokens)


@contextlib.contextmanager
def _not_planning(model: Any) -> Iterator[None]:
    """What is tried here are random tokens: layers must not plan by them."""
    planning = [ffn for _, ffn in sparse_ffns(model) if ffn._plans_itself]
    for ffn in planning:
        ffn._plans_itself = False
    try:
        yield
    finally:
        for ffn in planning:
            ffn._plans_itself = True


def _choose_engine(model: Any, cache_tokens: int) -> tuple[Engine, str | None]:
    with warnings.catch_warnings(action="ignore"):  # about a prompt that is not there yet
        dropped = model._get_logits_processor(greedy_config(model))
    if dropped:
        names = ", ".join(type(processor).__name__ for processor in dropped)
        return OneAtATime(model), f"generation_config.json asks for {names}"
    generator = torch.Generator().manual_seed(0)
    lengths = [n for n in (2, 7, 31) if n + 8 <= (context_of(model) or cache_tokens)]
    probes = [torch.randint(vocabulary_of(model), (n,), generator=generator).tolist() for n in lengths]
    config = greedy_config(model, max_new_tokens=8, return_dict_in_generate=True, output_logits=True)
    prompts = [torch.tensor([ids], device=model.device) for ids in probes]
    expected = [model.generate(p, attention_mask=torch.ones_like(p), generation_config=config) for p in prompts]
    why, engine = "batched, it answers otherwise than model.generate", None
    _LOG.setLevel(logging.CRITICAL)  # what goes wrong here is said in a line
    try:
        engine = Batched(model, cache_tokens)
        answers = _answers(engine, probes, max_tokens=8)
        rounding = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
        wanted = [(e.sequences[0, len(ids) :].tolist(), e.logits) for e, ids in zip(expected, probes, strict=True)]
        if not any(_differs(got, *want, rounding) for got, want in zip(answers, wanted, strict=True)):
            chosen, engine = engine, None
            return chosen, None
    except Exception as error:  # whatever a model that was not made for it runs into
        why = str(error).partition("\n")[0]
    finally:
        _LOG.setLevel(logging.ERROR)
        if engine is not None:  # also on Ctrl-C: its thread would keep the process alive
            engine.stop()
    return OneAtATime(model), why


def _answers(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """The tokens that an engine gives to prompts which come together."""
    results: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in prompts]
    for ids, result in zip(prompts, results, strict=True):
        engine.start(Job(ids, max_tokens, None, result.put))
    answers: list[list[int]] = [[] for _ in prompts]
    for answer, result in zip(answers, results, strict=True):
        while isinstance(part := result.get(), list):
            answer += part
        if part is not None:
            raise part
    return answers


def _differs(got: list[int], wanted: list[int], logits: tuple[Tensor, ...], rounding: float) -> bool:
    """Whether tokens differ by more than rounding: at the first that does, the logits must be about equal."""
    for step, (a, b) in enumerate(zip(got, wanted, strict=False)):
        if a != b:
            row = logits[step][0].float()
            return bool(row[b] - row[a] > rounding * row.std())
    return len(got) != len(wanted)


def vocabulary_of(model: Any) -> int:
    return model.get_input_embeddings().num_embeddings
