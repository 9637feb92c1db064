"""transformers' continuous batching as an engine, with a sampler for each request."""

from __future__ import annotations

import gc
import logging
import queue
import threading
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

from twell.workbench.serve.engine import FAILED, LOG, Engine, greedy_config, use_device_of, works
from twell.workbench.serve.jobs import Job
from twell.workbench.serve.requests import ApiError
from twell.workbench.serve.scoring import score_prompt, twin_of

TRANSFORMERS_LOG = logging.getLogger("ContinuousBatchingLogger")  # logs the errors of steps
PAGE = 256  # tokens in a page of transformers' cache
TESTED = ((5, 17), (6, 0))  # transformers from, and below: a manager's logits processors are no public API


class _RowSampler(ContinuousBatchingLogitsProcessor):
    """Samples each row of a batch with the sampler of the row's request.

    The first rows belong to the requests that get a token, in order. Meaningless rows follow, one for each prompt that
    this step does not finish.
    """

    supported_kwargs: dict[str, type] = {}  # noqa: RUF012 as in the base class
    ignored_kwargs = ()

    def __init__(self, jobs: dict[str, Job]) -> None:
        self.jobs = jobs
        self.in_rows: list[Job | None] = []

    def fill_defaults(self, int32_tensor: Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> Tensor:
        self.in_rows = [self.jobs.get(request.state.request_id) for request in requests_with_new_token]
        return torch.zeros(len(self.in_rows), dtype=torch.int32)

    def __call__(self, scores: Any, tensor_arg: Tensor) -> Any:
        if len(scores) < len(self.in_rows):
            raise RuntimeError(f"{len(scores)} rows of logits for {len(self.in_rows)} requests")
        for row, job in enumerate(self.in_rows):
            if job is not None and (job.sampler is not None or job.n_top is not None):
                scores[row] = job.draw(scores[row])
        return scores


class Batched(Engine):
    """transformers' continuous batching. When a step fails, its manager ends and a new one starts."""

    def __init__(
        self, model: Any, cache_tokens: int, batch_tokens: int | None = None, *, on_trial: bool = False
    ) -> None:
        super().__init__()
        self.model, self.cache_tokens = model, cache_tokens
        self.batch_tokens = batch_tokens or batch_tokens_for(model)
        self.on_trial = on_trial  # then a failure is final, and reported unchanged
        self._scored_by = twin_of(model)
        self._to_score: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._stopping = False
        self.manager: Any = self._new_manager()  # None between the end of one and the start of the next
        self._threads = [
            threading.Thread(target=work, name=f"twell-{name}", daemon=True)
            for name, work in (("deliver", self._deliver), ("score", self._score))
        ]
        for thread in self._threads:
            thread.start()

    def start(self, job: Job) -> None:
        self._take(job)
        if job.scores_prompt:
            self._to_score.put(job)
        else:
            self._begin(job)

    def cancel(self, job: Job) -> None:
        job.cancelled = True
        with self._lock:
            if self.jobs.pop(job.name, None) is not None and job.accepted and self.manager is not None:
                self.manager.cancel_request(job.name)

    def stop(self) -> None:
        self._stopping = True
        for job in list(self.jobs.values()):
            job.cancelled = True
        self.end_all("the server is stopping")
        self._to_score.put(None)
        with self._lock:
            if self.manager is not None:  # else one is starting, and will stop at once
                self.manager.stop(block=True, timeout=10, hard_stop=True)
        for thread in self._threads:
            thread.join(timeout=10)

    def _new_manager(self) -> Any:
        eos = self.model.generation_config.eos_token_id
        manager = self.model.init_continuous_batching(
            generation_config=GenerationConfig(do_sample=False, eos_token_id=-1 if eos is None else eos),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=-(-self.cache_tokens // PAGE),
                max_batch_tokens=self.batch_tokens,
                use_cuda_graph=False,  # a replay would use the samplers of the captured requests
                use_async_batching=False,
            ),
        )
        processors = manager.logit_processor
        processors.logits_processor.append(_RowSampler(self.jobs))
        processors.tensors_required += 1
        processors.do_processing = True
        manager.start()
        return manager

    def _begin(self, job: Job) -> None:
        """Give a job to the manager. A failed manager does not accept it; the next one will."""
        if job.max_tokens == 0:
            self._end(job.name)
            return
        how: dict[str, Any] = {"request_id": job.name, "max_new_tokens": job.max_tokens, "streaming": True}
        with self._lock:
            if job.accepted:  # by a manager that has just started
                return
            job.accepted = self.manager is not None and self.manager.add_request(job.ids, **how) is not None

    def _deliver(self) -> None:
        while True:
            for output in self.manager:  # until the manager's thread ends
                self._pass_on(output)
            while (output := self.manager.get_result(timeout=0)) is not None:
                self._pass_on(output)
            if self._stopping:
                return
            if self.on_trial:
                self.end_all("batched, the model fails")
                return
            self.failures += 1
            try:
                self._restart()
            except Exception:  # of any kind: no client must wait forever
                LOG.exception("the model could not start again")
                self._die()
                return

    def _restart(self) -> None:
        """Fail the old manager's jobs, test a new manager with one token, and give it the jobs that came since."""
        with self._lock:
            old, self.manager = self.manager, None
            for job in list(self.jobs.values()):
                if job.accepted:
                    self._end(job.name, ApiError(500, FAILED))
        old.stop(block=True, timeout=10, hard_stop=True)
        del old  # frees its cache before the next manager allocates as much
        gc.collect()
        new = self._new_manager()
        new.add_request([0], request_id="try", max_new_tokens=1)
        if not any(output.is_finished() and output.error is None for output in new):
            new.stop(block=True, timeout=10, hard_stop=True)
            raise RuntimeError("computing one token failed")
        LOG.error("the model has started again")
        with self._lock:
            self.manager = new
            if self._stopping:
                new.stop(block=True, timeout=10, hard_stop=True)
            for job in list(self.jobs.values()):
                if not job.scores_prompt:
                    self._begin(job)

    def _pass_on(self, output: Any) -> None:
        job = self.jobs.get(output.request_id)
        if job is None:
            if not output.is_finished():  # cancelled before the manager knew it
                self.manager.cancel_request(output.request_id)
            return
        if len(output.generated_tokens) > job.delivered:
            job.deliver(output.generated_tokens[job.delivered :])
            job.delivered = len(output.generated_tokens)
        if output.is_finished():
            message = output.error if self.on_trial else FAILED
            self._end(job.name, None if output.error is None else ApiError(500, message))

    def _score(self) -> None:
        use_device_of(self.model)
        while (job := self._to_score.get()) is not None and not self.died:
            if job.cancelled:
                continue
            if not works(lambda job: score_prompt(self._scored_by, job), job):
                self.failures += 1
                self._end(job.name, ApiError(500, FAILED))
                one_token = Job([0], 0, None, lambda _: None, n_top=0, scores_prompt=True)
                if not works(lambda job: score_prompt(self._scored_by, job), one_token):
                    self._die()
            elif job.max_tokens > 1:
                job.scores_prompt = False  # from here on a job like others
                self._begin(job)
            else:
                self._end(job.name)


def batch_tokens_for(model: Any) -> int:
    """Tokens of one step; longer prompts are split."""
    return 2048 if model.device.type == "cuda" else 512


def why_not_batched(model: Any, version: str = transformers.__version__) -> str | None:
    """Why the model cannot be batched, as far as can be known without trying; else None."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if not TESTED[0] <= (major, minor) < TESTED[1]:
        lowest, above = (".".join(map(str, bound)) for bound in TESTED)
        return f"batching needs transformers from {lowest} and below {above}, this is {version}"
    dropped = model._get_logits_processor(greedy_config(model))  # private, so only for known versions
    return "generation_config.json asks for " + ", ".join(type(p).__name__ for p in dropped) if dropped else None
