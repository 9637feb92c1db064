"""One prompt in an engine: what to compute, how to draw tokens, their log probabilities, where the results go."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

CHUNK = 1024  # tokens whose logits are held at once: 0.5 GB in float32 for a vocabulary of 128,000


class Sampler:
    """Draws the tokens of one request with its own random generator, so that a seed gives the same tokens in any batch.

    It turns logits into scores p / e, e exponentially distributed, whose argmax is the drawn token: one argmax serves
    sampled and greedy requests.
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


class Scored(NamedTuple):
    """The log probability of a token, and those of the likeliest tokens at its place, likeliest first."""

    logprob: float
    top: list[tuple[int, float]]


@dataclasses.dataclass(eq=False)
class Job:
    """``deliver`` is called in other threads, with lists of tokens, and at the end with None or an error."""

    ids: list[int]
    max_tokens: int
    sampler: Sampler | None
    deliver: Callable[[list[int] | Exception | None], object]
    n_top: int | None = None  # likeliest tokens wanted at each place; None: no log probabilities
    scores_prompt: bool = False
    name: str = dataclasses.field(default_factory=lambda: uuid.uuid4().hex)
    prompt_scores: list[Scored | None] = dataclasses.field(default_factory=list)  # the first token has none
    scores: list[Scored] = dataclasses.field(default_factory=list)  # of the tokens delivered, perhaps of the next one
    delivered: int = 0  # tokens
    accepted: bool = False  # by the batch manager
    cancelled: bool = False

    @property
    def is_alone(self) -> bool:
        """Whether it is computed beside a batch: continuous batching neither scores prompts nor ends before a token."""
        return self.scores_prompt or self.max_tokens == 0

    def draw(self, logits_V: Tensor) -> Tensor:
        """Scores whose argmax is the next token. Keeps the token's log probability if it is wanted."""
        scores_V = logits_V if self.sampler is None else self.sampler(logits_V)
        if self.n_top is not None:
            self.scores += scored(logits_V[None], scores_V.argmax()[None], self.n_top)
        return scores_V


# -- log probabilities --------------------------------------------------------------------------------------


def scored(logits_MV: Tensor, tokens_M: Tensor, n_top: int) -> list[Scored]:
    """Log probabilities by the model's own logits, whatever the temperature."""
    logprobs_MV = logits_MV.float().log_softmax(-1)
    chosen = logprobs_MV.gather(1, tokens_M[:, None])[:, 0].tolist()
    top = logprobs_MV.topk(min(n_top, logprobs_MV.shape[1]), dim=-1)
    tops = [list(zip(t, v, strict=True)) for t, v in zip(top.indices.tolist(), top.values.tolist(), strict=True)]
    return [Scored(one, best) for one, best in zip(chosen, tops, strict=True)]


@torch.no_grad()
def score_prompt(model: Any, job: Job) -> None:
    """Fill ``job.prompt_scores``. If the job wants one new token, deliver it too: its logits are here already."""
    assert job.n_top is not None
    ids = torch.tensor([job.ids], device=model.device)
    job.prompt_scores, at = [None], 0
    for logits_MV in _logits(model, ids):
        at += len(logits_MV)
        following = ids[0, at - len(logits_MV) + 1 : at + 1]  # one fewer than logits at the prompt's end
        job.prompt_scores += scored(logits_MV[: len(following)], following, job.n_top)
        if job.cancelled:
            return
    if job.max_tokens == 1:
        job.deliver([int(job.draw(logits_MV[-1].float()).argmax())])


def _logits(model: Any, ids: Tensor) -> Iterator[Tensor]:
    """The logits of all tokens, at most CHUNK at a time if the model has a cache of keys and values."""
    n, past = ids.shape[1], None
    for start in range(0, n, CHUNK):
        output = model(ids[:, start : start + CHUNK], past_key_values=past, use_cache=n > CHUNK)
        past = getattr(output, "past_key_values", None)
        if n > CHUNK and past is None:
            yield model(ids).logits[0]
            return
        yield output.logits[0]
