"""Text from prompts by the model's own ``generate``, and a comparison of dense with sparse generation.

Prompts of different lengths run together, padded on the left and masked: in float32 each prompt gets the tokens that it
gets alone. Dense and sparse models compute the same function with different rounding, so greedy tokens can part where
two logits are about equal. ``compare`` judges the first token that differs, up to which both models have read the same
tokens: see ``evaluate/agreement.py``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig

from twell.fp8 import Fp8Linear
from twell.hf.sparsify import desparsify_, sparsify_
from twell.hf.text import TextStream, context_of, decoder
from twell.nn import FIRST_LOOK, LOOK_AT_LEAST, LOOK_TOKENS, sparse_ffns
from twell.progress import Progress, silent
from twell.workbench.bench import timing
from twell.workbench.bench.model import memory_of
from twell.workbench.evaluate.agreement import Parting, rounding_bound
from twell.workbench.trace import record

DEFAULT_NEW_TOKENS = 128
_LOWEST_TEMPERATURE = 1e-4  # dividing logits by less overflows

OnText = Callable[[str], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How to choose tokens: greedily, unless a temperature, top_p or top_k is given.

    Defaults of top_p and top_k: those of the model's generation_config.json, else all tokens.
    """

    max_new_tokens: int = DEFAULT_NEW_TOKENS
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    static_cache: bool = False

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max-new-tokens must be at least 1, got {self.max_new_tokens}")
        t = self.temperature
        if t is not None and t != 0 and not _LOWEST_TEMPERATURE <= t < math.inf:
            raise ValueError(f"temperature must be 0 (greedy) or at least {_LOWEST_TEMPERATURE:g}, got {t:g}")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top-p must be above 0 and at most 1, got {self.top_p:g}")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top-k must be at least 1, got {self.top_k}")
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must be at least 0 and less than 2^63, got {self.seed}")
        for name, given in (("top-p", self.top_p), ("top-k", self.top_k), ("seed", self.seed)):
            if given is not None and not self.samples:
                raise ValueError(f"{name} has no effect on greedy generation: give a temperature above 0")

    @property
    def samples(self) -> bool:
        if self.temperature is None:
            return self.top_p is not None or self.top_k is not None
        return self.temperature > 0


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


# -- prompts ------------------------------------------------------------------------------------------------


def check_prompts(prompts: Sequence[str]) -> None:
    for number, prompt in enumerate(prompts, 1):
        if not prompt.strip():
            raise ValueError("the prompt is empty" if len(prompts) == 1 else f"prompt {number} is empty")


def encode(tokenizer: Any, prompts: Sequence[str], *, chat: bool = False) -> list[list[int]]:
    """Token ids of each prompt; with ``chat`` the prompt is a user's message in the model's chat template."""
    check_prompts(prompts)
    if chat and not tokenizer.chat_template:
        raise ValueError("the model has no chat template: it continues texts, without --chat")
    encoded = [list(_chat_ids(tokenizer, p) if chat else tokenizer(p)["input_ids"]) for p in prompts]
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


def new_tokens_that_fit(model: Any, prompts: Sequence[Sequence[int]], wanted: int | None = None) -> int:
    """``wanted``, if that many fit into the context after the longest prompt; by default 128, or as many as fit."""
    context, longest = context_of(model), max(len(ids) for ids in prompts)
    if context is None:
        return wanted or DEFAULT_NEW_TOKENS
    if longest >= context:
        raise ValueError(
            f"a prompt has {longest:,} tokens: the model's context of {context:,} leaves no room for new ones"
        )
    room = context - longest
    if wanted is not None and wanted > room:
        raise ValueError(
            f"{longest:,} prompt tokens and {wanted:,} new ones are more than the model's context of {context:,}: "
            f"at most {room:,} new ones fit"
        )
    return wanted or min(DEFAULT_NEW_TOKENS, room)


# -- models -------------------------------------------------------------------------------------------------


def dense_twin(model: Any) -> Any:
    """A copy that runs densely and shares all weights with ``model``, which runs sparsely from here on."""
    report = sparsify_(model)
    if not report.n_sparse and not any(isinstance(module, Fp8Linear) for module in model.modules()):
        raise ValueError(f"there is nothing to compare: {report.summary()}")
    shared: dict[int, Any] = {id(t): t for t in (*model.parameters(), *model.buffers())}
    dense = copy.deepcopy(model, shared)
    desparsify_(dense, restore_layout=False)  # both models share the weights and their layout
    return dense


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
    prompts: Sequence[list[int]],
    settings: Settings,
    *,
    on_text: OnText | None = None,
) -> list[Generated]:
    """Continue all prompts at once. ``on_text`` gets the text of a single prompt, piece by piece.

    Ctrl-C ends it: returns what was generated so far, and nothing for prompts that were not begun. Sets the seed
    globally.
    """
    if on_text is not None and len(prompts) != 1:
        raise ValueError("on_text needs a single prompt")
    config = _config(model, settings)
    start = time.perf_counter()
    fit_together = len({len(ids) for ids in prompts}) == 1 or not _reads_padding(config)
    done: list[Generated] = []
    for batch in [prompts] if fit_together else [[ids] for ids in prompts]:
        done += _generate(model, tokenizer, batch, config, settings, on_text, start)
        if done[-1].finish == "interrupted":
            break
    return done


def _generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[list[int]],
    config: GenerationConfig,
    settings: Settings,
    on_text: OnText | None,
    start: float,
) -> list[Generated]:
    if settings.static_cache:
        _let_layers_plan(model, prompts, FIRST_LOOK)  # compiled layers cannot plan
    if settings.seed is not None:
        torch.manual_seed(settings.seed)
    stream, interrupted = TextStream(decoder(tokenizer), prompts[0]), False

    def pass_on(ids: list[int], last: bool = False) -> None:
        if on_text is not None and (piece := stream.add(ids, last=last)):
            on_text(piece)

    watch = _Watch(pass_on)
    try:
        _run(model, prompts, config, watch)
    except KeyboardInterrupt:
        interrupted = True
    pass_on([], last=True)
    done = []
    for row, prompt_ids in enumerate(prompts):
        ids, has_ended = watch.row(row, config)
        text = TextStream(decoder(tokenizer), prompt_ids).add(ids, last=True)
        finish = "stop" if has_ended else "interrupted" if interrupted else "length"
        seconds = [at - start for at in watch.times[: len(ids)]]
        done.append(Generated(prompt_ids, ids, text, finish, *((seconds[0], seconds[-1]) if seconds else (None, 0.0))))
    return done


def _run(model: Any, prompts: Sequence[list[int]], config: GenerationConfig, watch: _Watch, **more: Any) -> Any:
    ids_BL, mask_BL = _left_padded(prompts, model.device)
    return model.generate(ids_BL, attention_mask=mask_BL, generation_config=config, streamer=watch, **more)


def _config(model: Any, settings: Settings) -> GenerationConfig:
    """The model's own configuration, for one answer a prompt, changed by ``settings``."""
    config = copy.deepcopy(model.generation_config)
    eos = config.eos_token_id
    config.update(
        do_sample=settings.samples,
        temperature=None,
        num_beams=1,
        num_return_sequences=1,
        max_length=None,
        max_new_tokens=settings.max_new_tokens,
        cache_implementation="static" if settings.static_cache else None,
        # Rows that have ended continue with it, and it is dropped again: any token of the vocabulary will do.
        pad_token_id=(eos[0] if isinstance(eos, list) else eos) or 0,
    )
    if settings.samples:
        config.update(  # None would become transformers' own default, for top_k 50
            temperature=settings.temperature or 1.0,
            top_p=settings.top_p or config.top_p or 1.0,
            top_k=settings.top_k or config.top_k or 0,
        )
    else:
        config.update(top_p=None, top_k=None)
    return config


def _reads_padding(config: GenerationConfig) -> bool:
    """Whether a logits processor reads the tokens so far, padding included."""
    return (config.repetition_penalty or 1.0) != 1.0 or bool(config.no_repeat_ngram_size) or bool(config.sequence_bias)


def _left_padded(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Ids and mask, int64 [B, longest]: the next token follows each prompt directly."""
    longest = max(len(ids) for ids in prompts)
    ids_BL = torch.zeros((len(prompts), longest), dtype=torch.int64)  # any token will do for padding
    mask_BL = torch.zeros_like(ids_BL)
    for row, ids in enumerate(prompts):
        ids_BL[row, longest - len(ids) :] = torch.tensor(ids)
        mask_BL[row, longest - len(ids) :] = 1
    return ids_BL.to(device), mask_BL.to(device)


@torch.no_grad()
def _let_layers_plan(model: Any, prompts: Sequence[list[int]], tokens: int) -> None:
    """Run the prompts until the layers have seen ``tokens`` and have made their plans, which only GPUs need."""
    if model.device.type != "cuda" or all(ffn.plan is not None for _, ffn in sparse_ffns(model)):
        return
    ids_BL, mask_BL = _left_padded(prompts, model.device)
    for _ in range(-(-tokens // ids_BL.numel())):
        model.base_model(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False)


class _Watch:
    """A streamer for ``generate``: keeps all tokens with their times, and passes the first row's tokens on.

    It gets the prompts first, then one token of each row at every step, as soon as the tokens are on the host.
    """

    def __init__(self, on_token: Callable[[list[int]], None] = lambda ids: None) -> None:
        self.start, self.on_token = time.perf_counter(), on_token
        self.steps: list[list[int]] = []  # [step][row]
        self.times: list[float] = []
        self._is_prompt = True

    def put(self, tokens: Tensor) -> None:
        if self._is_prompt:
            self._is_prompt = False
            return
        self.steps.append(tokens.tolist())
        self.times.append(time.perf_counter())
        self.on_token(self.steps[-1][:1])

    def end(self) -> None:
        pass

    def row(self, row: int, config: GenerationConfig) -> tuple[list[int], bool]:
        """A row's tokens, up to and with the first end-of-text token, and whether there was one."""
        eos, ids = config.eos_token_id, [step[row] for step in self.steps]
        ends = {eos} if isinstance(eos, int) else set(eos or [])
        end = next((i for i, token in enumerate(ids) if token in ends), None)
        return (ids, False) if end is None else (ids[: end + 1], True)


# -- dense against sparse -----------------------------------------------------------------------------------


class MeasuredModel(NamedTuple):
    """The tokens, times and memory of one of the two models."""

    ids: list[list[int]]
    prefill_ms: timing.Spread
    step_ms: timing.Spread | None  # of a step after prefill; None: only one new token
    prefill_tokens_per_s: float
    decode_tokens_per_s: float | None  # of all prompts together
    memory: dict[str, int]  # bytes: see memory_of


class Comparison(NamedTuple):
    dense: MeasuredModel
    sparse: MeasuredModel
    partings: list[Parting]  # one for each prompt whose tokens differ
    logits_difference: float  # the largest, up to the first token that differs
    largest_logit: float

    @property
    def agrees(self) -> bool:
        """Whether all tokens are the same, apart from ties."""
        return all(parting.is_tie for parting in self.partings)

    @property
    def speedups(self) -> dict[str, float | None]:
        before, after = self.dense.step_ms, self.sparse.step_ms
        decode = None if before is None or after is None else before.p50 / after.p50
        return {"prefill": self.dense.prefill_ms.p50 / self.sparse.prefill_ms.p50, "decode": decode}


def compare(
    dense: Any,
    sparse: Any,
    prompts: Sequence[list[int]],
    settings: Settings,
    *,
    repeats: int = 5,
    progress: Progress = silent,
) -> Comparison:
    """Generate greedily with two models of the same function, in turn: compare their tokens, then time them."""
    if settings.samples:
        raise ValueError("dense and sparse are compared greedily: leave temperature, top-p and top-k out")
    if repeats < 1:
        raise ValueError(f"repeats must be at least 1, got {repeats}")
    config = _config(sparse, settings)
    if len({len(ids) for ids in prompts}) > 1 and _reads_padding(config):
        raise ValueError("the model penalises tokens that it has read, padding too: compare prompts one by one")
    models = {"dense": dense, "sparse": sparse}
    total, done = 2 * (3 + repeats), 0
    n_tokens = len(prompts) * max(len(ids) for ids in prompts)
    _let_layers_plan(sparse, prompts, LOOK_TOKENS if n_tokens >= LOOK_AT_LEAST else FIRST_LOOK)

    def run(name: str, **more: Any) -> tuple[_Watch, Any]:
        nonlocal done
        watch = _Watch()
        out = _run(models[name], prompts, config, watch, **more)
        progress(done := done + 1, total)
        return watch, out

    ids: dict[str, list[list[int]]] = {}
    scores: dict[str, tuple[Tensor, ...]] = {}
    for name in models:  # this first run also compiles
        watch, out = run(name, return_dict_in_generate=True, output_scores=True)
        ids[name] = [watch.row(row, config)[0] for row in range(len(prompts))]
        scores[name] = out.scores
        del out  # frees its cache
    partings, difference, largest = _judge(ids, scores, dense.dtype)
    del scores
    memory = {name: memory_of(each, functools.partial(run, name)) for name, each in models.items()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in models}  # ms of prefill, of a later step
    for repeat in range(repeats + 1):
        for name in models:
            watch, _ = run(name)
            steps = len(watch.times) - 1
            later = (watch.times[-1] - watch.times[0]) / steps if steps else math.nan
            if repeat:  # the first warms up
                times[name].append(((watch.times[0] - watch.start) * 1e3, later * 1e3))
    n_prompt = sum(len(p) for p in prompts)
    sides = {name: _measured(ids[name], times[name], n_prompt, memory[name]) for name in models}
    return Comparison(sides["dense"], sides["sparse"], partings, difference, largest)


def _measured(
    ids: list[list[int]], times: list[tuple[float, float]], n_prompt: int, memory: dict[str, int]
) -> MeasuredModel:
    prefill, later = (timing.spread([t[i] for t in times]) for i in range(2))
    steps = max(map(len, ids)) - 1
    n_later = sum(len(row) - 1 for row in ids)  # rows that have ended are still computed, but no longer count
    return MeasuredModel(
        ids,
        prefill,
        later if steps else None,
        round(n_prompt / prefill.p50 * 1e3, 1),
        round(n_later / steps / later.p50 * 1e3, 1) if steps else None,
        memory,
    )


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
