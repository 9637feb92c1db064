"""Log probabilities of a prompt's own tokens, by a plain forward of the model."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from twell.nn import sparse_ffns
from twell.workbench.serve.jobs import Job, scored

CHUNK = 1024  # tokens whose logits are held at once: 0.5 GB in float32 for a vocabulary of 128,000


def twin_of(model: Any) -> Any:
    """A copy of the model that shares its weights and feed-forward layers.

    Batching changes the model's attention; the twin keeps the attention that was loaded.
    """
    shared: list[Any] = [*model.parameters(), *model.buffers(), *(ffn for _, ffn in sparse_ffns(model))]
    return copy.deepcopy(model, {id(thing): thing for thing in shared})


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
        token = int(job.draw(logits_MV[-1].float()).argmax())
        job.deliver([token])


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
