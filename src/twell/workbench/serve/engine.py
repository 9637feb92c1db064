"""Engines compute the tokens: their base class, and ``model.generate`` for one request after the other."""

from __future__ import annotations

import abc
import contextlib
import copy
import gc
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList

from twell.workbench.serve.jobs import Job
from twell.workbench.serve.requests import ApiError
from twell.workbench.serve.scoring import score_prompt

LOG = logging.getLogger("twell.workbench.serve")
MAX_JOBS = 1024  # under way and waiting
FAILED = "the model failed while it computed this request; the server's log says why"
DEAD = "the model has failed and cannot start again; the server's log says why"


class Engine(abc.ABC):
    """Computes jobs. Every accepted job gets a result or an error, even if the engine dies.

    A failed step fails its jobs. The engine then computes one token as a test: if that fails too, the engine is dead.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Job] = {}
        self.problem: str | None = None  # why the engine accepts no more jobs
        self.failures = 0  # steps that failed
        self.died = False
        self.on_death: Callable[[], object] = lambda: None
        self._lock = threading.RLock()  # a signal handler can run while its own thread holds it

    @abc.abstractmethod
    def start(self, job: Job) -> None: ...

    @abc.abstractmethod
    def cancel(self, job: Job) -> None:
        """Stop computing the job, if it has not ended."""

    @abc.abstractmethod
    def stop(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def check_room(self, n_jobs: int) -> None:
        """Raise an ApiError if this many more jobs would not be accepted."""
        if self.problem is not None:
            raise ApiError(503, self.problem)
        if len(self.jobs) + n_jobs > MAX_JOBS:
            raise ApiError(503, f"too many requests are waiting (at most {MAX_JOBS:,}): try again later")

    def refuse(self, problem: str) -> None:
        """Accept no more jobs. Those under way go on."""
        with self._lock:
            self.problem = self.problem or problem

    def end_all(self, problem: str) -> None:
        self.refuse(problem)
        for name in list(self.jobs):
            self._end(name, ApiError(503, problem))

    def _take(self, job: Job) -> None:
        with self._lock:
            self.check_room(1)
            self.jobs[job.name] = job

    def _end(self, name: str, error: Exception | None = None) -> None:
        job = self.jobs.pop(name, None)
        if job is not None:
            job.deliver(error)

    def _die(self) -> None:
        LOG.critical(DEAD)
        self.died = True
        self.end_all(DEAD)
        self.on_death()


class OneAtATime(Engine):
    """``model.generate``, one request after the other: for models that cannot be batched, and for exact repetition."""

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
        use_device_of(self.model)
        while (job := self._waiting.get()) is not None and not self.died:
            if job.cancelled:
                continue
            if works(self._compute, job):
                self._end(job.name)
                continue
            self.failures += 1
            self._end(job.name, ApiError(500, FAILED))
            if not works(self._compute, Job([0], 1, None, lambda _: None)):
                self._die()

    def _compute(self, job: Job) -> None:
        if job.scores_prompt:
            score_prompt(self.model, job)
        if job.max_tokens > int(job.scores_prompt) and not job.cancelled:
            self._generate(job)

    @torch.no_grad()
    def _generate(self, job: Job) -> None:
        ids = torch.tensor([job.ids], device=self.model.device)
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=greedy_config(self.model, max_new_tokens=job.max_tokens),
            logits_processor=LogitsProcessorList([lambda _, scores: job.draw(scores[0])[None]]),
            stopping_criteria=[lambda ids, _: torch.full((len(ids),), job.cancelled, device=ids.device)],
            streamer=_TokensOf(job),
        )


def works(compute: Callable[[Job], object], job: Job) -> bool:
    """Compute a job; False if it fails, after its memory, GPU memory included, was freed."""
    try:
        compute(job)
        return True
    except Exception:  # of any kind: the next job must not suffer
        LOG.exception("a request failed")
    gc.collect()
    with contextlib.suppress(Exception):  # a lost GPU raises here, too
        torch.cuda.empty_cache()
    return False


def use_device_of(model: Any) -> None:
    """Make the model's GPU the current device of this thread, on which kernels are launched."""
    if model.device.type == "cuda":
        torch.cuda.set_device(model.device)


class _TokensOf:
    """A streamer for ``generate``, which puts the prompt first and then token by token."""

    def __init__(self, job: Job) -> None:
        self.job, self.is_prompt = job, True

    def put(self, ids: Tensor) -> None:
        if not self.is_prompt and not self.job.cancelled:
            self.job.deliver(ids.tolist())
        self.is_prompt = False

    def end(self) -> None:
        pass


def greedy_config(model: Any, **changes: Any) -> GenerationConfig:
    """The model's own generation configuration, without sampling and beam search."""
    config = copy.deepcopy(model.generation_config)
    plain = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "max_length": None}
    config.update(**plain, temperature=None, top_p=None, top_k=None, **changes)
    if config.pad_token_id is None:
        eos = config.eos_token_id
        config.pad_token_id = eos[0] if isinstance(eos, list) else eos
    return config
