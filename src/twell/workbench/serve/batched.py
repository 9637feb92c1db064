"""transformers' continuous batching as an engine, with a sampler for each request; and which models can be batched."""

from __future__ import annotations

import copy
import gc
import logging
import threading
import warnings
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

from twell.hf.text import context_of, greedy_config
from twell.nn import sparse_ffns
from twell.workbench.serve.engine import FAILED, LOG, Engine
from twell.workbench.serve.jobs import Job
from twell.workbench.serve.requests import ApiError

TRANSFORMERS_LOG = logging.getLogger("ContinuousBatchingLogger")  # logs the errors of steps
PAGE = 256  # tokens in a page of transformers' cache
TESTED = ((5, 17), (6, 0))  # transformers from, and below: a manager's logits processors are no public API
TRIED = 8  # tokens of each trial answer


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


def _new_manager(model: Any, jobs: dict[str, Job], cache_tokens: int, batch_tokens: int) -> Any:
    """A started manager of transformers, which draws the tokens of ``jobs``."""
    eos = model.generation_config.eos_token_id
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1 if eos is None else eos),
        continuous_batching_config=ContinuousBatchingConfig(
            num_blocks=-(-cache_tokens // PAGE),
            max_batch_tokens=batch_tokens,
            use_cuda_graph=False,  # a replay would use the samplers of the captured requests
            use_async_batching=False,
        ),
    )
    processors = manager.logit_processor
    processors.logits_processor.append(_RowSampler(jobs))
    processors.tensors_required += 1
    processors.do_processing = True
    manager.start()
    return manager


def _stop(manager: Any) -> None:
    manager.stop(block=True, timeout=10, hard_stop=True)


def _answers(manager: Any, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Greedy answers of a manager that has no other requests; a manager that fails is stopped."""
    answers: dict[str, list[int]] = {}
    for number, ids in enumerate(prompts):
        manager.add_request(ids, request_id=str(number), max_new_tokens=max_tokens)
    try:
        while len(answers) < len(prompts):
            output = manager.get_result(timeout=0.1)
            if output is None and not manager.is_running():
                raise RuntimeError("batched, the model fails")
            if output is not None and output.error is not None:
                raise RuntimeError(output.error)
            if output is not None and output.is_finished():
                answers[output.request_id] = output.generated_tokens
    except BaseException:  # Ctrl-C too: its thread would keep the process alive
        _stop(manager)
        raise
    return [answers[str(number)] for number in range(len(prompts))]


class Batched(Engine):
    """transformers' continuous batching. When a step fails, its manager ends and a new one starts.

    Prompts are scored beside the batch, one after the other.
    """

    def __init__(self, model: Any, cache_tokens: int, batch_tokens: int | None = None) -> None:
        # Batching changes the model's attention; the twin keeps the attention that was loaded, and shares the weights.
        shared: list[Any] = [*model.parameters(), *model.buffers(), *(ffn for _, ffn in sparse_ffns(model))]
        super().__init__(model, twin=copy.deepcopy(model, {id(thing): thing for thing in shared}))
        self._sizes = cache_tokens, batch_tokens or batch_tokens_for(model)
        self._stopping = False
        self.manager: Any = _new_manager(model, self.jobs, *self._sizes)  # None between one's end and the next's start
        self._deliverer = threading.Thread(target=self._deliver, name="twell-deliver", daemon=True)
        self._deliverer.start()

    def cancel(self, job: Job) -> None:
        job.cancelled = True
        with self._lock:
            if self.jobs.pop(job.name, None) is not None and job.accepted and self.manager is not None:
                self.manager.cancel_request(job.name)

    def stop(self) -> None:
        self._stopping = True
        super().stop()
        with self._lock:
            if self.manager is not None:  # else one is starting, and will stop at once
                _stop(self.manager)
        self._deliverer.join(timeout=10)

    def _begin(self, job: Job) -> None:
        """Give a job to the manager. A failed manager does not accept it; the next one will."""
        if job.is_alone:
            super()._begin(job)
            return
        how: dict[str, Any] = {"request_id": job.name, "max_new_tokens": job.max_tokens, "streaming": True}
        with self._lock:
            if not job.accepted:  # by a manager that has just started
                job.accepted = self.manager is not None and self.manager.add_request(job.ids, **how) is not None

    def _deliver(self) -> None:
        while True:
            for output in self.manager:  # until the manager's thread ends
                self._pass_on(output)
            while (output := self.manager.get_result(timeout=0)) is not None:
                self._pass_on(output)
            if self._stopping:
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
        _stop(old)
        del old  # frees its cache before the next manager allocates as much
        gc.collect()
        new = _new_manager(self.model, self.jobs, *self._sizes)
        _answers(new, [[0]], 1)
        LOG.error("the model has started again")
        with self._lock:
            self.manager = new
            if self._stopping:
                _stop(new)
            for job in list(self.jobs.values()):
                if not job.is_alone:
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
            self._end(job.name, None if output.error is None else ApiError(500, FAILED))


# -- which models can be batched ----------------------------------------------------------------------------


def cache_tokens_for(model: Any) -> int:
    """Tokens in the shared cache: 16 contexts, at most 65,536 tokens and a quarter of the free memory."""
    config = model.config.get_text_config()
    context = context_of(model) or 4096
    tokens = max(context, min(16 * context, 2**16))
    all_heads = getattr(config, "num_attention_heads", 1)  # no attention: the model will not be batched
    heads = getattr(config, "num_key_value_heads", None) or all_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // all_heads
    token_bytes = 2 * config.num_hidden_layers * heads * head_dim * model.dtype.itemsize
    if model.device.type == "cuda":
        free = torch.cuda.mem_get_info(model.device)[0]
    else:
        import psutil  # type: ignore[import-untyped]

        free = psutil.virtual_memory().available
    return max(PAGE, min(tokens, free // 4 // token_bytes))


def batch_tokens_for(model: Any) -> int:
    """Tokens of one step; longer prompts are split."""
    return 2048 if model.device.type == "cuda" else 512


def choose_engine(model: Any, cache_tokens: int) -> tuple[Engine, str | None]:
    """Batched if its answers are those of ``model.generate``; else one request at a time, and why."""
    why = _why_not_batched(model)
    if why is None:
        planning = [ffn for _, ffn in sparse_ffns(model) if ffn._plans_itself]
        for ffn in planning:  # layers must not plan by the random tokens of the trial
            ffn._plans_itself = False
        try:
            why = _why_batched_differs(model, cache_tokens)
        finally:
            for ffn in planning:
                ffn._plans_itself = True
    return (Batched(model, cache_tokens) if why is None else Engine(model)), why


def _why_not_batched(model: Any, version: str = transformers.__version__) -> str | None:
    """Why the model cannot be batched, as far as can be known without trying; else None."""
    major, minor = (int(part) for part in version.split(".")[:2])
    if not TESTED[0] <= (major, minor) < TESTED[1]:
        lowest, above = (".".join(map(str, bound)) for bound in TESTED)
        return f"batching needs transformers from {lowest} and below {above}, this is {version}"
    with warnings.catch_warnings(action="ignore"):  # about a missing prompt
        dropped = model._get_logits_processor(greedy_config(model))  # private, so only for known versions
    return "generation_config.json asks for " + ", ".join(type(p).__name__ for p in dropped) if dropped else None


def _why_batched_differs(model: Any, cache_tokens: int) -> str | None:
    """Compare answers to a few prompts; None if they are equal within rounding."""
    prompts = _probes(model, min(context_of(model) or cache_tokens, cache_tokens) - TRIED)
    config = greedy_config(model, max_new_tokens=TRIED, return_dict_in_generate=True, output_logits=True)
    tensors = [torch.tensor([ids], device=model.device) for ids in prompts]
    expected = [model.generate(t, attention_mask=torch.ones_like(t), generation_config=config) for t in tensors]
    TRANSFORMERS_LOG.setLevel(logging.CRITICAL)  # a failure is reported as the reason
    try:
        manager = _new_manager(model, {}, cache_tokens, batch_tokens_for(model))
        answers = _answers(manager, prompts, TRIED)
        _stop(manager)
    except Exception as error:  # a model not made for batching can raise anything
        return str(error).partition("\n")[0]
    finally:
        TRANSFORMERS_LOG.setLevel(logging.ERROR)
    rounding = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
    for prompt, got, wanted in zip(prompts, answers, expected, strict=True):
        if _differs(got, wanted.sequences[0, len(prompt) :].tolist(), wanted.logits, rounding):
            return "batched, it answers otherwise than model.generate"
    return None


def _probes(model: Any, longest: int) -> list[list[int]]:
    """Prompts of random tokens: short ones, and together more than one step takes, so that some are split."""
    lengths = [n for n in (2, 7, 31) if n <= longest]
    step = batch_tokens_for(model)
    while longest > 0 and sum(lengths) <= step:
        lengths.append(min(longest, step))
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocabulary_of(model), (n,), generator=generator).tolist() for n in lengths]


def _differs(got: list[int], wanted: list[int], logits: tuple[Tensor, ...], rounding: float) -> bool:
    """Whether tokens differ by more than rounding: at the first difference the logits must be about equal."""
    for step, (a, b) in enumerate(zip(got, wanted, strict=False)):
        if a != b:
            row = logits[step][0].float()
            return bool(row[b] - row[a] > rounding * row.std())
    return len(got) != len(wanted)


def vocabulary_of(model: Any) -> int:
    return model.get_input_embeddings().num_embeddings
