"""Choosing a model's engine, and the size of its cache."""

from __future__ import annotations

import logging
import queue
import warnings
from typing import Any

import torch
from torch import Tensor

from twell.hf.text import context_of
from twell.nn import sparse_ffns
from twell.workbench.serve.batched import PAGE, TRANSFORMERS_LOG, Batched, batch_tokens_for, why_not_batched
from twell.workbench.serve.engine import Engine, OneAtATime, greedy_config
from twell.workbench.serve.jobs import Job

TRIED = 8  # tokens of each trial answer


def cache_tokens_for(model: Any) -> int:
    """Tokens in the shared cache: 16 contexts, at most 65,536 tokens and a quarter of the free memory."""
    config = model.config.get_text_config()
    context = context_of(model) or 4096
    tokens = max(context, min(16 * context, 2**16))
    all_heads = getattr(config, "num_attention_heads", None)
    if all_heads is None:  # no attention: the model will not be batched
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
    """Batched if its answers are those of ``model.generate``; else one request at a time, and why."""
    planning = [ffn for _, ffn in sparse_ffns(model) if ffn._plans_itself]
    for ffn in planning:  # layers must not plan by the random tokens of the trial
        ffn._plans_itself = False
    try:
        return _try_batching(model, cache_tokens)
    finally:
        for ffn in planning:
            ffn._plans_itself = True


def _try_batching(model: Any, cache_tokens: int) -> tuple[Engine, str | None]:
    with warnings.catch_warnings(action="ignore"):  # about a missing prompt
        why = why_not_batched(model)
    if why is not None:
        return OneAtATime(model), why
    why, engine = "batched, it answers otherwise than model.generate", None
    TRANSFORMERS_LOG.setLevel(logging.CRITICAL)  # a failure is reported as the reason
    probes = _probes(model, min(context_of(model) or cache_tokens, cache_tokens) - TRIED)
    config = greedy_config(model, max_new_tokens=TRIED, return_dict_in_generate=True, output_logits=True)
    prompts = [torch.tensor([ids], device=model.device) for ids in probes]
    expected = [model.generate(p, attention_mask=torch.ones_like(p), generation_config=config) for p in prompts]
    try:
        engine = Batched(model, cache_tokens, on_trial=True)
        answers = _answers(engine, probes, max_tokens=TRIED)
        rounding = 1e-3 if model.dtype in (torch.float32, torch.float64) else 0.1
        wanted = [(e.sequences[0, len(ids) :].tolist(), e.logits) for e, ids in zip(expected, probes, strict=True)]
        if not any(_differs(got, *want, rounding) for got, want in zip(answers, wanted, strict=True)):
            engine.on_trial = False
            chosen, engine = engine, None
            return chosen, None
    except Exception as error:  # a model not made for batching can raise anything
        why = str(error).partition("\n")[0]
    finally:
        TRANSFORMERS_LOG.setLevel(logging.ERROR)
        if engine is not None:  # on Ctrl-C too: its thread would keep the process alive
            engine.stop()
    return OneAtATime(model), why


def _probes(model: Any, longest: int) -> list[list[int]]:
    """Prompts of random tokens: short ones, and together more than one step takes, so that some are split."""
    lengths = [n for n in (2, 7, 31) if n <= longest]
    step = batch_tokens_for(model)
    while longest > 0 and sum(lengths) <= step:
        lengths.append(min(longest, step))
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocabulary_of(model), (n,), generator=generator).tolist() for n in lengths]


def _answers(engine: Engine, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """The tokens that an engine gives to prompts started together."""
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
    """Whether tokens differ by more than rounding: at the first difference the logits must be about equal."""
    for step, (a, b) in enumerate(zip(got, wanted, strict=False)):
        if a != b:
            row = logits[step][0].float()
            return bool(row[b] - row[a] > rounding * row.std())
    return len(got) != len(wanted)


def vocabulary_of(model: Any) -> int:
    return model.get_input_embeddings().num_embeddings
