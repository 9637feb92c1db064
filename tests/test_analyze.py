"""Analyses: every number against plain Python, contexts within their sequences, JSON there and back, clear errors."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import LlamaConfig, NemotronConfig, OPTConfig, PreTrainedTokenizerFast

from small_models import CONTEXT, LAYERS, TEXT, TINY, VOCAB, D, F, named_trace_of, tiny_model
from twell.hf import LlamaSparseReluConfig
from twell.plan import choose_plan, costs_for
from twell.train.tokenizer import train_bpe
from twell.workbench import analyze as analyze_module
from twell.workbench.analysis import FORMAT, Analysis
from twell.workbench.analyze import CURVE_POINTS, analyze, analyze_trace
from twell.workbench.trace import record


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_bpe([TEXT], VOCAB)


class Letters:
    """A tokenizer whose token i is the i-th letter."""

    def decode(self, ids: list[int], **how: Any) -> str:
        assert how == {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return "".join(chr(ord("a") + i) for i in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(ord("a") + token)


def of_patterns(*patterns: np.ndarray, ids: Any = None, length: int | None = None, **constants: int) -> Analysis:
    """Of bool [tokens, F] patterns, one a layer; ``constants`` of the module, such as MIN_COUNT, can be others."""
    tokens = len(patterns[0])
    ids = torch.zeros(tokens, dtype=torch.int64) if ids is None else torch.as_tensor(ids)
    trace, input_ids = named_trace_of(*patterns), ids.reshape(-1, length or tokens)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in constants.items():
            patch.setattr(analyze_module, name, value)
        return analyze_trace(trace, input_ids, Letters(), width=D, gated=True)


def with_counts(counts: Any, width: int) -> np.ndarray:
    """bool [tokens, width]: for token t the first ``counts[t]`` neurons fire."""
    return np.arange(width) < np.asarray(counts)[:, None]


# -- numbers ------------------------------------------------------------------------------------------------


def percentile(values: list[int], p: float) -> float:
    """Linear between the two nearest."""
    ordered = sorted(values)
    at = p / 100 * (len(ordered) - 1)
    low, high = math.floor(at), math.ceil(at)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def jaccard(pairs: list[tuple[set[int], set[int]]]) -> float | None:
    each = [len(a & b) / len(a | b) for a, b in pairs if a | b]
    return sum(each) / len(each) if each else None


def check_layer(layer: Any, sets: list[list[set[int]]], width: int) -> None:
    """One layer against plain Python. ``sets``: for each token of each sequence, the neurons that fired."""
    flat = [s for sequence in sets for s in sequence]
    counts, length = [len(s) for s in flat], len(sets[0])
    assert layer.mean == pytest.approx(sum(counts) / len(counts))
    for p in (50, 90, 99):
        assert getattr(layer, f"p{p}") == pytest.approx(percentile(counts, p))
    assert layer.max == max(counts)
    fired = [sum(n in s for s in flat) for n in range(width)]
    assert layer.silent == pytest.approx(fired.count(0) / width)
    busiest = sorted(fired, reverse=True)
    assert layer.ranks == list(range(width))
    assert layer.frequencies == pytest.approx([n / len(flat) for n in busiest])
    n_top = max(1, round(width / 10))
    assert layer.top_tenth == pytest.approx(sum(busiest[:n_top]) / max(1, sum(fired)))
    buckets: dict[int, list[int]] = defaultdict(list)
    for sequence in sets:
        for position, s in enumerate(sequence):
            buckets[position.bit_length()].append(len(s))
    assert layer.by_position == pytest.approx([sum(b) / len(b) for _, b in sorted(buckets.items())])
    neighbours = [(sequence[t], sequence[t + 1]) for sequence in sets for t in range(length - 1)]
    assert layer.shared == pytest.approx(jaccard(neighbours))


@given(
    sequences=st.integers(1, 4),
    length=st.integers(2, 19),
    width=st.integers(1, 40),
    density=st.sampled_from([0.0, 0.02, 0.3, 0.9, 1.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_numbers_are_those_of_plain_python(sequences: int, length: int, width: int, density: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    patterns = [random.random((sequences * length, width)) < density for _ in range(2)]
    ids = random.integers(0, 4, sequences * length)
    min_count = int(random.integers(1, 5))
    analysis = of_patterns(*patterns, ids=ids, length=length, MIN_COUNT=min_count, TOP=3)
    for layer, pattern in zip(analysis.layers, patterns, strict=True):
        sets = [set(row.nonzero()[0].tolist()) for row in pattern]
        check_layer(layer, [sets[s * length : (s + 1) * length] for s in range(sequences)], width)

    by_type: dict[int, list[int]] = defaultdict(list)
    for i, token in enumerate(ids.tolist()):
        by_type[token].append(sum(int(pattern[i].sum()) for pattern in patterns))
    means = {t: sum(active) / len(active) for t, active in by_type.items() if len(active) >= min_count}
    for rows, sign in ((analysis.most_active, -1), (analysis.least_active, 1)):
        expected = sorted(means, key=lambda t: (sign * means[t], -len(by_type[t]), t))[:3]
        assert [row.id for row in rows] == expected
        for row in rows:
            assert (row.count, row.mean) == (len(by_type[row.id]), pytest.approx(means[row.id]))
            assert all(token == row.text for _, token, _ in row.examples)
    facts = analysis.facts
    assert (facts.tokens, facts.sequences, facts.length) == (sequences * length, sequences, length)
    assert (facts.hidden_sizes, facts.width) == ([width] * 2, D)
    assert facts.token_types == len(by_type)
    assert analysis.mean_active == pytest.approx(sum(int(p.sum()) for p in patterns) / len(ids))


def test_ties_go_to_the_more_frequent_then_to_the_lower_id() -> None:
    ids = [3, 1, 2, 2, 4, 5, 5, 1, 3, 2]
    active = {1: 4, 2: 4, 3: 4, 4: 9, 5: 1}  # 4 occurs once
    analysis = of_patterns(with_counts([active[i] for i in ids], 12), ids=ids, MIN_COUNT=2)
    assert [row.id for row in analysis.most_active] == [2, 1, 3, 5]
    assert [row.id for row in analysis.least_active] == [5, 2, 1, 3]


def test_a_curve_keeps_both_ends_and_few_points() -> None:
    for width in (1, 2, CURVE_POINTS - 1, CURVE_POINTS, CURVE_POINTS + 1, 5632, 65535):
        fired = torch.randint(0, 1001, (width,), generator=torch.Generator().manual_seed(width))
        ranks, shares = analyze_module._curve(fired, 1000)
        frequencies = sorted((n / 1000 for n in fired.tolist()), reverse=True)
        assert (ranks[0], ranks[-1]) == (0, width - 1)
        assert ranks == sorted(set(ranks))
        assert shares == [frequencies[rank] for rank in ranks]
        assert min(width, CURVE_POINTS // 2) <= len(ranks) <= CURVE_POINTS
        assert len(ranks) == width or width > CURVE_POINTS


def test_positions_double_and_end_with_the_sequence() -> None:
    expected = [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 31)]
    for length in (2, 3, 4, 5, 16, 17):
        ranges = [(first, min(last, length - 1)) for first, last in expected if first < length]
        counts = np.concatenate([np.arange(length), np.arange(length) + 2])  # of two sequences
        analysis = of_patterns(with_counts(counts, 30), length=length)
        assert analysis.positions == [first for first, _ in ranges]
        assert analysis.layers[0].by_position == [(first + last) / 2 + 1 for first, last in ranges]


# -- plans --------------------------------------------------------------------------------------------------


def skewed(tokens: int = 64, width: int = 4096) -> np.ndarray:
    """256 neurons fire for every token, one more for each."""
    pattern = np.zeros((tokens, width), dtype=bool)
    pattern[:, :256] = True
    pattern[np.arange(tokens), 256 + np.arange(tokens)] = True
    return pattern


def test_plans_are_those_of_the_cost_model() -> None:
    dense = np.ones((64, 512), dtype=bool)
    ids = torch.zeros(2, 32, dtype=torch.int64)
    predicted = []
    for gated in (True, False):
        found = analyze_trace(named_trace_of(skewed(), dense), ids, Letters(), width=2048, gated=gated)
        for layer, pattern in zip(found.layers, (skewed(), dense), strict=True):
            costs = costs_for(torch.device("cpu"))
            plan = choose_plan(torch.from_numpy(pattern).sum(0), 64, costs, width=2048, gated=gated)
            expected = (plan.is_dense, len(plan.hot), plan.cap, plan.min_tokens, plan.predicted)
            assert dataclasses.astuple(layer.plan) == expected
        sparse, full = (layer.plan for layer in found.layers)
        assert (sparse.dense, sparse.hot) == (False, 256)
        assert (full.dense, full.hot, full.predicted) == (True, 512, 1.0)
        assert found.mean_predicted == pytest.approx((sparse.predicted + 1) / 2)
        predicted.append(sparse.predicted)
    assert predicted[0] > predicted[1] > 1  # without an up projection less is saved


# Models whose projections have different names, and whether they have an up projection.
MODELS: dict[str, tuple[Any, bool]] = {
    "llama sparse": (lambda: LlamaSparseReluConfig(**TINY), True),
    "llama sparse, plain": (lambda: LlamaSparseReluConfig(**TINY, sparsity_gated_mlp=False), False),
    "llama": (lambda: LlamaConfig(**TINY, hidden_act="relu"), True),
    "nemotron": (lambda: NemotronConfig(**TINY), False),
    "opt": (lambda: OPTConfig(ffn_dim=F, word_embed_proj_dim=D, **TINY), False),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_shape_of_a_models_ffns(name: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make, gated = MODELS[name]
    seen: list[tuple[int, bool]] = []

    def spy(fired: Tensor, tokens: int, costs: Any, *, width: int, gated: bool) -> Any:
        seen.append((width, gated))
        return choose_plan(fired, tokens, costs, width=width, gated=gated)

    monkeypatch.setattr(analyze_module, "choose_plan", spy)
    config = make()
    facts = analyze(tiny_model(config), tokenizer, TEXT, tokens=64).facts
    assert seen == [(D, gated)] * LAYERS
    assert (facts.model_type, facts.width, facts.hidden_sizes) == (config.model_type, D, [F] * LAYERS)


# -- tokens -------------------------------------------------------------------------------------------------


def test_windows_end_with_the_sequence() -> None:
    ids = [0, 1, 2, 3, 4, 0, 5, 6, 7, 0]  # "abcde", "afgha"

    def examples(**constants: int) -> dict[str, list[list[str]]]:
        analysis = of_patterns(np.ones((10, 1), dtype=bool), ids=ids, length=5, **constants)
        return {row.text: row.examples for row in analysis.most_active}

    assert examples(MIN_COUNT=3, WINDOW=2) == {"a": [["", "a", "bc"], ["", "a", "fg"], ["gh", "a", ""]]}
    found = examples(MIN_COUNT=1, WINDOW=2)
    assert [found[c][0] for c in "cbe"] == [["ab", "c", "de"], ["a", "b", "cd"], ["cd", "e", ""]]
    assert examples(MIN_COUNT=1, WINDOW=0)["b"] == [["", "b", ""]]


def test_examples_are_spread_over_the_occurrences() -> None:
    for wanted, expected in ((1, [0]), (2, [0, 8]), (3, [0, 4, 8]), (99, list(range(9)))):
        (row,) = of_patterns(np.ones((9, 1), dtype=bool), EXAMPLES=wanted, WINDOW=9).most_active
        assert [len(before) for before, _, _ in row.examples] == expected


def test_a_part_of_a_character_is_shown_as_the_character(tokenizer: Any) -> None:
    ids, emoji = tokenizer.encode("fox 🦊 é dog"), tokenizer.encode("🦊")
    assert len(emoji) == 4  # one token a byte
    at = next(i for i in range(len(ids)) if ids[i : i + 4] == emoji)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(analyze_module, "WINDOW", 20)
        for position in range(at, at + 4):
            assert analyze_module._in_context(tokenizer, ids, position) == ["fox ", "🦊", " é dog"]


@settings(max_examples=30)
@given(st.text(max_size=20), st.integers(0, 12), st.integers(0, 99))
def test_a_token_is_found_in_any_text(tokenizer: Any, text: str, window: int, position: int) -> None:
    ids = tokenizer.encode(text)
    assume(ids)
    position %= len(ids)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(analyze_module, "WINDOW", window)
        before, shown, after = analyze_module._in_context(tokenizer, ids, position)
    around = ids[max(0, position - window) : position + window + 1]
    assert before + shown + after == analyze_module._decode(tokenizer, around)
    token = analyze_module._token_text(tokenizer, ids[position])
    assert shown and (shown == token or "\ufffd" in token)


def test_the_space_before_a_word_is_kept_where_decoding_drops_it() -> None:
    """As in Llama's first tokenizers: "▁" for a space, dropped where a text starts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {"<unk>": 0, "▁the": 1, "▁dog": 2, "s": 3}
    bare = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    bare.pre_tokenizer = pre_tokenizers.Metaspace()
    bare.decoder = decoders.Metaspace()
    pieces = PreTrainedTokenizerFast(tokenizer_object=bare, unk_token="<unk>")
    assert pieces.decode([1]) == "the"
    assert [analyze_module._token_text(pieces, i) for i in (1, 2, 3)] == [" the", " dog", "s"]
    assert analyze_module._in_context(pieces, [1, 2, 3, 1], 1) == ["the", " dog", "s the"]
    assert analyze_module._in_context(pieces, [1, 2, 3, 1], 0) == ["", "the", " dogs the"]


def test_a_token_that_the_tokenizer_lacks_has_no_text(tokenizer: Any) -> None:
    """Embeddings are often longer than the vocabulary."""
    beyond, fox = len(tokenizer) + 5, tokenizer.encode("fox")
    assert analyze_module._token_text(tokenizer, beyond) == ""
    assert analyze_module._in_context(tokenizer, [beyond], 0) == ["", "", ""]
    assert analyze_module._in_context(tokenizer, [*fox, beyond, *fox], len(fox)) == ["fox", "", "fox"]


def test_a_sample_stays_in_its_sequence() -> None:
    layers = with_counts(range(10), 30), with_counts(range(20, 30), 30)
    for shown, letters in ((128, "abcde"), (2, "ab")):
        analysis = of_patterns(*layers, ids=range(10), length=5, SAMPLE_TOKENS=shown)
        assert "".join(analysis.sample_tokens) == letters
        assert analysis.sample_active == [list(range(low, low + len(letters))) for low in (0, 20)]


# -- a model on a text --------------------------------------------------------------------------------------


def test_a_model_is_analysed_as_its_trace_is(tokenizer: Any) -> None:
    model, seen = tiny_model(), []
    ids = tokenizer.encode(TEXT)
    n_sequences = len(ids) // CONTEXT
    analysis = analyze(model, tokenizer, TEXT, progress=lambda done, total: seen.append((done, total)))
    input_ids = torch.tensor(ids[: n_sequences * CONTEXT]).view(n_sequences, CONTEXT)
    trace = record(model, input_ids)
    assert analysis == analyze_trace(trace, input_ids, tokenizer, width=D, gated=True, model_type="llama_sparse_relu")
    assert analysis.facts.length == CONTEXT and analysis.facts.sequences == n_sequences > 1
    assert [layer.name for layer in analysis.layers] == ["layers.0.mlp", "layers.1.mlp"]
    assert seen[-1] == (n_sequences, n_sequences)
    assert "".join(analysis.sample_tokens) == tokenizer.decode(ids[:CONTEXT])
    assert repr(analysis).startswith(f"Analysis(2 layers, {n_sequences * CONTEXT:,} tokens, ")


# -- JSON ---------------------------------------------------------------------------------------------------


def plain(value: Any) -> bool:
    """Whether there is nothing in it but what JSON has."""
    if type(value) is dict:
        return all(type(key) is str and plain(inside) for key, inside in value.items())
    return all(map(plain, value)) if type(value) is list else type(value) in (str, int, float, bool, type(None))


def test_json(tokenizer: Any) -> None:
    """With a layer that never fires, a text of emoji, and a plan that is not dense."""
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight.zero_()
    analysis = analyze(model, tokenizer, TEXT + "🦊" * 20)
    assert (analysis.layers[0].silent, analysis.layers[0].shared) == (1, None)
    for one in (analysis, of_patterns(skewed())):
        data = one.to_json()
        assert plain(data) and data["format"] == FORMAT
        text = json.dumps(data, allow_nan=False)
        assert json.loads(text) == data


# -- errors -------------------------------------------------------------------------------------------------


def test_errors_say_what_is_wrong(tokenizer: Any) -> None:
    def fail(done: int, total: int) -> None:
        raise AssertionError("the model ran")

    model = tiny_model()
    for of, text, how, message in (
        (model, TEXT, {"tokens": 1}, "tokens must be at least 2, got 1"),
        (model, TEXT, {"length": 1}, "length must be at least 2, got 1"),
        (model, TEXT, {"length": 65}, "exceed the model's context of 64"),
        (model, [1, 300], {}, "token 300 is not in the model's vocabulary"),
        (nn.Linear(2, 2), TEXT, {}, "expected a transformers model, got Linear"),
    ):
        with pytest.raises(ValueError, match=message):
            analyze(of, tokenizer, text, **{"tokens": 192, **how}, progress=fail)
