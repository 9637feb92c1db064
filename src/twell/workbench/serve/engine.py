"""The engine computes the tokens: by ``model.generate``, one request after the other."""

from __future__ import annotations

import contextlib
import gc
import logging
import queue
import threading
from collections.abc import Callable
from typing import Any, Self

import torch
from transformers import LogitsProcessorList

from twell.hf.text import Streamer, greedy_config
from twell.workbench.serve.jobs import Job, score_prompt
from twell.workbench.serve.requests import ApiError

LOG = logging.getLogger("twell.workbench.serve")
MAX_JOBS = 1024  # under way and waiting
FAILED = "the model failed while it computed this request; the server's log says why"
DEAD = "the model has failed and cannot start again; the server's log says why"


class Engine:
    """Computes one job after the other, for models that cannot be batched, and for exact repetition.

    Every accepted job gets a result or an error, even if the engine dies. A failed step fails its jobs. The engine then
    computes one token as a test: if that fails too, the engine is dead.
    """

    def __init__(self, model: Any, twin: Any = None) -> None:
        self.model, self._twin = model, model if twin is None else twin  # which computes one job after the other
        self.jobs: dict[str, Job] = {}
        self.problem: str | None = None  # why the engine accepts no more jobs
        self.failures = 0  # steps that failed
        self.died = False
        self.on_death: Callable[[], object] = lambda: None
        self._lock = threading.RLock()  # a signal handler can run while its own thread holds it
        self._waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="twell-generate", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self, job: Job) -> None:
        with self._lock:
            self.check_room(1)
            self.jobs[job.name] = job
        self._begin(job)

    def cancel(self, job: Job) -> None:
        """Stop computing the job, if it has not ended."""
        job.cancelled = True
        self.jobs.pop(job.name, None)

    def stop(self) -> None:
        for job in list(self.jobs.values()):
            job.cancelled = True
        self.end_all("the server is stopping")
        self._waiting.put(None)
        self._thread.join(timeout=10)

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

    def _begin(self, job: Job) -> None:
        self._waiting.put(job)

    def _end(self, name: str, error: Exception | None = None) -> None:
        job = self.jobs.pop(name, None)
        if job is not None:
            job.deliver(error)

    def _die(self) -> None:
        LOG.critical(DEAD)
        self.died = True
        self.end_all(DEAD)
        self.on_death()

    def _work(self) -> None:
        if self.model.device.type == "cuda":
            torch.cuda.set_device(self.model.device)  # of this thread: kernels are launched on it
        while (job := self._waiting.get()) is not None and not self.died:
            if job.cancelled:
                continue
            if self._computes(job):
                self._end(job.name)
                continue
            self.failures += 1
            self._end(job.name, ApiError(500, FAILED))
            if not self._computes(Job([0], 1, None, lambda _: None)):
                self._die()

    def _computes(self, job: Job) -> bool:
        """Compute a job; False if it fails, after its memory, GPU memory included, was freed."""
        try:
            if job.scores_prompt:
                score_prompt(self._twin, job)
            if job.max_tokens > int(job.scores_prompt) and not job.cancelled:
                self._generate(job)
            return True
        except Exception:  # of any kind: the next job must not suffer
            LOG.exception("a request failed")
        gc.collect()
        with contextlib.suppress(Exception):  # a lost GPU raises here, too
            torch.cuda.empty_cache()
        return False

    @torch.no_grad()
    def _generate(self, job: Job) -> None:
        ids = torch.tensor([job.ids], device=self._twin.device)
        self._twin.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=greedy_config(self._twin, max_new_tokens=job.max_tokens),
            logits_processor=LogitsProcessorList([lambda _, scores: job.draw(scores[0])[None]]),
            stopping_criteria=[lambda ids, _: torch.full((len(ids),), job.cancelled, device=ids.device)],
            streamer=Streamer(lambda tokens: None if job.cancelled else job.deliver(tokens)),
        )
