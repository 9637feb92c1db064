"""Text from prompts by the model's own ``generate``, and a comparison of dense with sparse generation.

Prompts of different lengths run together, padded on the left and masked: in float32 each prompt gets the tokens that it
gets alone. Dense and sparse models compute the same function with different rounding, so greedy tokens can part where
two logits are about equal. ``compare`` judges the first token that differs, up to which both models have read the same
tokens: see ``evaluate/agreement.py``.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig

from twell.fp8 import Fp8Linear
from twell.hf.sparsify import sparsify_
from twell.hf.text import Streamer, TextStream, context_of, decoder, greedy_config
from twell.nn import FIRST_LOOK, LOOK_AT_LEAST, LOOK_TOKENS, sparse_ffns
from twell.progress import Progress, silent
from twell.workbench.bench import timing
from twell.workbench.bench.model import memory_of, without_twell
from twell.workbench.evaluate.agreement import Parting, rounding_bound
from twell.workbench.trace import record

DEFAULT_NEW_TOKENS = 128
_ALMOST_ZERO = 1e-4  # temperatures below are greedy: dividing logits by less overflows

Ids = list[list[int]]


class Generated(NamedTuple):
    """What followed one prompt."""

    prompt_ids: list[int]
    ids: list[int]  # with the end-of-text token, if the model produced one
    text: str
    finish: str  # "stop" (end of text), "length" or "interrupted"
    first_token_s: float | None  # seconds from the call to the first token; None: interrupted before it
    seconds: float  # from the call to the last token

    @property
    def tokens_per_s(self) -> float | None:
        """The rate after the first token."""
        if len(self.ids) < 2 or self.first_token_s is None:
            return None
        return (len(self.ids) - 1) / max(self.seconds - self.first_token_s, 1e-9)


def encode(tokenizer: Any, prompts: Sequence[str], *, chat: bool = False) -> Ids:
    """Token ids of each prompt; with ``chat`` the prompt is a user's message in the model's chat template."""
    for number, prompt in enumerate(prompts, 1):
        if not prompt.strip():
            raise ValueError("the prompt is empty" if len(prompts) == 1 else f"prompt {number} is empty")
    if chat and not tokenizer.chat_template:
        raise ValueError("the model has no chat template: it continues texts, without --chat")
    encoded = [_chat_ids(tokenizer, prompt) if chat else tokenizer(prompt)["input_ids"] for prompt in prompts]
    if [] in encoded:
        raise ValueError(f"the tokenizer makes no tokens of {prompts[encoded.index([])]!r}")
    return encoded


def _chat_ids(tokenizer: Any, prompt: str) -> list[int]:
    from jinja2 import TemplateError

    messages = [{"role": "user", "content": prompt}]
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    except TemplateError as error:
        raise ValueError(f"the model's chat template does not take the prompt: {error}") from None


def config_for(
    model: Any,
    prompts: Ids,
    *,
    max_new_tokens: int | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    static_cache: bool = False,
) -> GenerationConfig:
    """The model's own configuration, greedy unless a temperature, top_p or top_k is given.

    Defaults of top_p and top_k: those of the model's generation_config.json, else all tokens. Of max_new_tokens: 128,
    or what fits into the model's context after the longest prompt.
    """
    own, narrows = model.generation_config, top_p is not None or top_k is not None
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top-p must be above 0 and at most 1, got {top_p:g}")
    config = greedy_config(
        model,
        max_new_tokens=_new_tokens(model, prompts, max_new_tokens),
        cache_implementation="static" if static_cache else None,
    )
    if temperature is None and narrows:
        temperature = 1.0
    if temperature is not None and not temperature < _ALMOST_ZERO:
        config.update(  # None would become transformers' own default, for top_k 50
            do_sample=True, temperature=temperature, top_p=top_p or own.top_p or 1.0, top_k=top_k or own.top_k or 0
        )
    elif narrows:
        raise ValueError("top-p and top-k have no effect on greedy generation: give a temperature above 0")
    return config


def _new_tokens(model: Any, prompts: Ids, wanted: int | None) -> int:
    context, longest = context_of(model), max(map(len, prompts))
    if context is None:
        return wanted or DEFAULT_NEW_TOKENS
    room = max(context - longest, 0)
    if room < (wanted or 1):
        tokens = f"a prompt of {longest:,} tokens leaves room for {room:,} new ones"
        raise ValueError(f"{tokens}: the model's context is {context:,} tokens")
    return wanted or min(DEFAULT_NEW_TOKENS, room)


def dense_twin(model: Any) -> Any:
    """A copy that runs densely and shares all weights with ``model``, which runs sparsely from here on."""
    report = sparsify_(model)
    if not report.n_sparse and not any(isinstance(module, Fp8Linear) for module in model.modules()):
        raise ValueError(f"there is nothing to compare: {report.summary()}")
    return without_twell(model, shares_weights=True)


@torch.no_grad()
def active_neurons(model: Any, ids: Sequence[int]) -> dict[str, float]:
    """For each layer the mean number of neurons that fire for a token of ``ids``. Runs the model once more."""
    try:
        layers = record(model, torch.tensor([list(ids)])).summary()
    except ValueError:  # no layer with ReLU
        return {}
    return {layer.layer: round(layer.mean, 2) for layer in layers}


# -- generating ---------------------------------------------------------------------------------------------


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Ids,
    config: GenerationConfig,
    *,
    seed: int | None = None,
    on_text: Callable[[str], None] | None = None,
) -> list[Generated]:
    """Continue all prompts at once. ``on_text`` gets the text of a single prompt, piece by piece.

    Ctrl-C ends it: returns what was generated so far, and nothing for prompts that were not begun. Sets the seed
    globally.
    """
    if on_text is not None and len(prompts) != 1:
        raise ValueError("on_text needs a single prompt")
    if seed is not None and not config.do_sample:
        raise ValueError("seed has no effect on greedy generation: give a temperature above 0")
    stream = TextStream(decoder(tokenizer), prompts[0])

    def pass_on(ids: list[int], last: bool = False) -> None:
        if on_text is not None and (piece := stream.add(ids, last=last)):
            on_text(piece)

    start, done = time.perf_counter(), list[Generated]()
    for batch in [prompts] if _fit_together(prompts, config) else [[ids] for ids in prompts]:
        if config.cache_implementation == "static":
            _let_layers_plan(model, batch, FIRST_LOOK)  # compiled layers cannot plan
        if seed is not None:
            torch.manual_seed(seed)
        streamer, is_interrupted = Streamer(lambda tokens: pass_on(tokens[:1])), False
        try:
            _run(model, batch, config, streamer)
        except KeyboardInterrupt:
            is_interrupted = True
        pass_on([], last=True)
        for row, prompt_ids in enumerate(batch):
            ids, has_ended = _row(streamer, row, config)
            text = TextStream(decoder(tokenizer), prompt_ids).add(ids, last=True)
            finish = "stop" if has_ended else "interrupted" if is_interrupted else "length"
            seconds: list[Any] = [at - start for at, _ in streamer.steps[: len(ids)]] or [None, 0.0]
            done.append(Generated(prompt_ids, ids, text, finish, seconds[0], seconds[-1]))
        if is_interrupted:
            break
    return done


def _fit_together(prompts: Ids, config: GenerationConfig) -> bool:
    """False if a logits processor would read padding as text."""
    reads = (config.repetition_penalty or 1.0) != 1.0 or config.no_repeat_ngram_size or config.sequence_bias
    return not reads or len({len(ids) for ids in prompts}) == 1


def _run(model: Any, prompts: Ids, config: GenerationConfig, streamer: Streamer, **more: Any) -> Any:
    ids_BL, mask_BL = _left_padded(prompts, model.device)
    return model.generate(ids_BL, attention_mask=mask_BL, generation_config=config, streamer=streamer, **more)


def _row(streamer: Streamer, row: int, config: GenerationConfig) -> tuple[list[int], bool]:
    """A row's tokens, up to and with the first end-of-text token, and whether there was one."""
    eos, ids = config.eos_token_id, [tokens[row] for _, tokens in streamer.steps]
    ends = {eos} if isinstance(eos, int) else set(eos or [])
    end = next((i for i, token in enumerate(ids) if token in ends), None)
    return (ids, False) if end is None else (ids[: end + 1], True)


def _left_padded(prompts: Ids, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask, int64 [B, longest]: the next token follows each prompt directly."""
    longest = max(map(len, prompts))
    ids = [[0] * (longest - len(row)) + row for row in prompts]  # any token will do for padding
    mask = [[0] * (longest - len(row)) + [1] * len(row) for row in prompts]
    return torch.tensor(ids, device=device), torch.tensor(mask, device=device)


@torch.no_grad()
def _let_layers_plan(model: Any, prompts: Ids, tokens: int) -> None:
    """Run the prompts until the layers have seen ``tokens`` and have made their plans, which only GPUs need."""
    if model.device.type != "cuda" or all(ffn.plan is not None for _, ffn in sparse_ffns(model)):
        return
    ids_BL, mask_BL = _left_padded(prompts, model.device)
    for _ in range(-(-tokens // ids_BL.numel())):
        model.base_model(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False)


# -- dense against sparse -----------------------------------------------------------------------------------


class Comparison(NamedTuple):
    """Tokens, times and memory by model, "dense" and "sparse", and how far the two agree."""

    ids: dict[str, Ids]
    prefill_ms: dict[str, timing.Spread]
    step_ms: dict[str, timing.Spread]  # of a step after prefill; empty: there was one new token
    memory: dict[str, dict[str, int]]  # bytes: see memory_of
    partings: list[Parting]  # one for each prompt whose tokens differ
    logits_difference: float  # the largest, up to the first token that differs
    largest_logit: float

    @property
    def agrees(self) -> bool:
        """Whether all tokens are the same, apart from ties."""
        return all(parting.is_tie for parting in self.partings)

    @property
    def tokens_per_s(self) -> dict[str, float]:
        """Of decoding all prompts; rows that have ended are still computed, but no longer count."""
        counts = {name: [len(row) - 1 for row in self.ids[name]] for name in self.step_ms}
        return {name: 1e3 * sum(n) / max(n) / self.step_ms[name].p50 for name, n in counts.items()}


def compare(
    dense: Any, sparse: Any, prompts: Ids, config: GenerationConfig, *, repeats: int = 5, progress: Progress = silent
) -> Comparison:
    """Generate greedily with two models of the same function, in turn: compare their tokens, then time them."""
    if config.do_sample:
        raise ValueError("dense and sparse are compared greedily: leave temperature, top-p and top-k out")
    if not _fit_together(prompts, config):
        raise ValueError("the model penalises tokens that it has read, padding too: compare prompts one by one")
    models, done = {"dense": dense, "sparse": sparse}, 0
    n_tokens = len(prompts) * max(map(len, prompts))
    _let_layers_plan(sparse, prompts, LOOK_TOKENS if n_tokens >= LOOK_AT_LEAST else FIRST_LOOK)

    def run(name: str, **more: Any) -> tuple[Streamer, list[float], Any]:
        """The tokens, milliseconds until each of them, and what ``generate`` returns."""
        nonlocal done
        streamer, start = Streamer(), time.perf_counter()
        out = _run(models[name], prompts, config, streamer, **more)
        progress(done := done + 1, 2 * (3 + repeats))
        return streamer, [(at - start) * 1e3 for at, _ in streamer.steps], out

    ids: dict[str, Ids] = {}
    scores: dict[str, tuple[Tensor, ...]] = {}
    for name in models:  # this first run also compiles
        streamer, _, out = run(name, return_dict_in_generate=True, output_scores=True)
        ids[name] = [_row(streamer, row, config)[0] for row in range(len(prompts))]
        scores[name] = out.scores
        del out  # frees its cache
    judged = _judge(ids, scores, dense.dtype)
    del scores
    memory = {name: memory_of(each, functools.partial(run, name)) for name, each in models.items()}
    prefill: dict[str, list[float]] = {name: [] for name in models}
    later: dict[str, list[float]] = {name: [] for name in models}
    for repeat in range(repeats + 1):
        for name in models:
            _, ms, _ = run(name)
            if repeat:  # the first warms up
                prefill[name].append(ms[0])
                later[name] += [(ms[-1] - ms[0]) / (len(ms) - 1)] if len(ms) > 1 else []
    prefill_ms = {name: timing.spread(ms) for name, ms in prefill.items()}
    step_ms = {name: timing.spread(ms) for name, ms in later.items()} if all(later.values()) else {}
    return Comparison(ids, prefill_ms, step_ms, memory, *judged)


def _judge(
    ids: dict[str, list[list[int]]], scores: dict[str, tuple[Tensor, ...]], dtype: torch.dtype
) -> tuple[list[Parting], float, float]:
    """The partings; and up to each parting, its step included, the largest difference of logits and the largest logit.

    ``scores``: [step] of [B, V], the logits that the tokens were chosen by.
    """
    partings: list[Parting] = []
    difference = largest = 0.0
    for row, (a_ids, b_ids) in enumerate(zip(ids["dense"], ids["sparse"], strict=True)):
        for i, (a, b) in enumerate(zip(a_ids, b_ids, strict=False)):
            dense, sparse = scores["dense"][i][row].double(), scores["sparse"][i][row].double()
            allowed = dense > -math.inf  # tokens that generation_config.json forbids are -inf in both
            largest_here = float(dense[allowed].abs().max())
            here = float((dense - sparse)[allowed].abs().max())
            difference = here if math.isnan(here) else max(difference, here)
            largest = max(largest, largest_here)
            if a != b:
                margins = float(dense[a] - dense[b]), float(sparse[b] - sparse[a])
                partings.append(Parting(row, i, a, b, *margins, rounding_bound(largest_here, dtype)))
                break
    return partings, difference, largest
