"""Analyses: every number against plain Python, contexts within their sequences, JSON there and back, clear errors."""

from __future__ import annotations

import dataclasses
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig, NemotronConfig, OPTConfig, PreTrainedTokenizerFast

from twell.hf import LlamaSparseReluConfig
from twell.hf.counts import COUNTS_FILE, NeuronCounts
from twell.plan import choose_plan, costs_for
from twell.train.tokenizer import train_bpe
from twell.workbench import analyze as analyze_module
from twell.workbench import trace as trace_module
from twell.workbench.analyze import (
    CURVE_POINTS,
    FORMAT,
    Analysis,
    FFNShape,
    Options,
    analyze,
    analyze_trace,
    correlation,
)
from twell.workbench.trace import Trace, record, record_text

VOCAB, LAYERS, F, D, CONTEXT = 300, 2, 96, 32, 64
TINY: dict[str, Any] = {
    "hidden_size": D,
    "intermediate_size": F,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind: it is a lazy dog. " * 12
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return train_bpe([TEXT], VOCAB)


def tiny_model(config: Any = None) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config or LlamaSparseReluConfig(**TINY)).double()


def trace_of(*patterns: np.ndarray) -> Trace:
    """A trace of bool [tokens, F] patterns."""
    counts = [p.sum(1).astype(np.uint16) for p in patterns]
    neurons = [p.nonzero()[1].astype(np.uint16) for p in patterns]
    return Trace(
        counts, neurons, hidden_sizes=[p.shape[1] for p in patterns], names=[f"{i}" for i in range(len(counts))]
    )


class Letters:
    """A tokenizer whose token i is the i-th letter."""

    def decode(self, ids: list[int], **how: Any) -> str:
        assert how == {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return "".join(chr(ord("a") + i) for i in ids)

    def convert_ids_to_tokens(self, token: int) -> str:
        return chr(ord("a") + token)


def of_patterns(*patterns: np.ndarray, ids: Any = None, length: int | None = None, **options: Any) -> Analysis:
    tokens = len(patterns[0])
    ids = torch.zeros(tokens, dtype=torch.int64) if ids is None else torch.as_tensor(ids)
    return analyze_trace(
        trace_of(*patterns),
        ids.reshape(-1, length or tokens),
        Letters(),
        shapes=[FFNShape(D, True)] * len(patterns),
        options=Options(**options),
    )


def with_counts(counts: Any, width: int) -> np.ndarray:
    """bool [tokens, width]: token t wakes the first ``counts[t]`` neurons."""
    return np.arange(width) < np.asarray(counts)[:, None]


# ---------------------------------------------------------------------------------------------------------
# Numbers
# ---------------------------------------------------------------------------------------------------------


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
    """One layer against plain Python. ``sets``: per sequence, per token, the neurons that fired."""
    flat = [s for sequence in sets for s in sequence]
    counts, length = [len(s) for s in flat], len(sets[0])
    assert layer.mean == pytest.approx(sum(counts) / len(counts))
    for p in (50, 90, 99):
        assert getattr(layer, f"p{p}") == pytest.approx(percentile(counts, p))
    assert layer.max == max(counts)
    fired = [sum(n in s for s in flat) for n in range(width)]
    assert layer.silent == pytest.approx(fired.count(0) / width)
    busiest = sorted(fired, reverse=True)
    assert layer.curve.ranks == list(range(width))
    assert layer.curve.frequencies == pytest.approx([n / len(flat) for n in busiest])
    for percent in (1, 5, 10, 20):
        n_top = max(1, round(width * percent / 100))
        expected = sum(busiest[:n_top]) / sum(fired) if sum(fired) else 0
        assert layer.top_shares[str(percent)] == pytest.approx(expected)
    buckets: dict[int, list[int]] = defaultdict(list)
    for sequence in sets:
        for position, s in enumerate(sequence):
            buckets[position.bit_length()].append(len(s))
    assert layer.by_position == pytest.approx([sum(b) / len(b) for _, b in sorted(buckets.items())])
    neighbours = [(sequence[t], sequence[t + 1]) for sequence in sets for t in range(length - 1)]
    assert layer.overlap.neighbours == pytest.approx(jaccard(neighbours))
    left, right = (index.tolist() for index in analyze_module._random_pairs(len(flat), 0))
    assert layer.overlap.random == pytest.approx(
        jaccard([(flat[a], flat[b]) for a, b in zip(left, right, strict=True)])
    )


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
    analysis = of_patterns(*patterns, ids=ids, length=length, min_count=min_count, top=3)
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
            for shown in row.examples:
                at = shown.sequence * length + shown.position
                assert ids[at] == row.id
                assert shown.active == sum(int(pattern[at].sum()) for pattern in patterns)
    facts = analysis.facts
    assert (facts.tokens, facts.sequences, facts.length) == (sequences * length, sequences, length)
    assert (facts.layers, facts.hidden_sizes, facts.width) == (2, [width] * 2, D)
    assert facts.token_types == len(by_type)
    assert analysis.mean_active == pytest.approx(sum(int(p.sum()) for p in patterns) / len(ids))


def test_pairs_beyond_one_chunk_all_count() -> None:
    tokens = 2 * analyze_module._PAIRS_AT_ONCE + 3
    pattern = np.ones((tokens, 2), dtype=bool)
    pattern[-1, 1] = False  # the last pair shares one neuron of two, all others both
    assert of_patterns(pattern).layers[0].overlap.neighbours == pytest.approx(1 - 0.5 / (tokens - 1), abs=1e-12)


def test_top_shares_by_hand() -> None:
    pattern = np.zeros((100, 200), dtype=bool)
    pattern[:, :2] = True  # 1 % of the neurons: 200 firings
    pattern[:50, 2:10] = True  # up to 5 %: 400 more
    pattern[:10, 10:20] = True  # up to 10 %: 100 more
    pattern[0, 20:40] = True  # up to 20 %: 20 more
    pattern[0, 40:120] = True  # 80 outside
    shuffled = np.random.default_rng(0).permutation(200)
    (layer,) = of_patterns(pattern[:, shuffled]).layers
    assert layer.top_shares == {"1": 0.25, "5": 0.75, "10": 0.875, "20": 0.9}
    assert layer.silent == 0.4
    assert layer.top_shares["10"] == trace_of(pattern).summary()[0].top_tenth


@pytest.mark.parametrize("width", [1, 2, CURVE_POINTS - 1, CURVE_POINTS, CURVE_POINTS + 1, 5632, 65535])
def test_a_curve_keeps_both_ends_and_few_points(width: int) -> None:
    fired = torch.randint(0, 1001, (width,), generator=torch.Generator().manual_seed(width))
    curve = analyze_module._curve(fired, 1000)
    frequencies = sorted((n / 1000 for n in fired.tolist()), reverse=True)
    assert (curve.ranks[0], curve.ranks[-1]) == (0, width - 1)
    assert all(a < b for a, b in zip(curve.ranks, curve.ranks[1:], strict=False))
    assert curve.frequencies == [frequencies[rank] for rank in curve.ranks]
    assert len(curve.ranks) == width if width <= CURVE_POINTS else CURVE_POINTS // 2 <= len(curve.ranks) <= CURVE_POINTS


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (2, [(0, 0), (1, 1)]),
        (3, [(0, 0), (1, 1), (2, 2)]),
        (4, [(0, 0), (1, 1), (2, 3)]),
        (5, [(0, 0), (1, 1), (2, 3), (4, 4)]),
        (16, [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15)]),
        (17, [(0, 0), (1, 1), (2, 3), (4, 7), (8, 15), (16, 16)]),
    ],
)
def test_positions_double_and_end_with_the_sequence(length: int, expected: list[tuple[int, int]]) -> None:
    counts = np.concatenate([np.arange(length), np.arange(length) + 2])  # of two sequences
    analysis = of_patterns(with_counts(counts, 30), length=length)
    assert [(p.first, p.last) for p in analysis.positions] == expected
    assert analysis.layers[0].by_position == [(first + last) / 2 + 1 for first, last in expected]


def test_sequences_do_not_leak_into_each_other() -> None:
    pattern = np.repeat(np.eye(3, dtype=bool), 4, axis=0)  # each sequence of 4 has a neuron of its own
    overlap = of_patterns(pattern, length=4).layers[0].overlap
    assert overlap.neighbours == 1
    assert overlap.random is not None and overlap.random < 1
    assert of_patterns(pattern, length=12).layers[0].overlap.neighbours == pytest.approx(9 / 11)


def test_tokens_that_wake_nothing_do_not_count_as_alike() -> None:
    overlap = of_patterns(np.array([[1, 1], [1, 0], [0, 0], [0, 0]], dtype=bool)).layers[0].overlap
    assert overlap.neighbours == (1 / 2 + 0) / 2


@given(tokens=st.integers(2, 50), seed=st.integers(0, 2**31))
def test_random_pairs_are_of_two_tokens_and_seeded(tokens: int, seed: int) -> None:
    left, right = analyze_module._random_pairs(tokens, seed)
    assert len(left) == len(right) == tokens
    assert (left != right).all()
    assert int(torch.cat([left, right]).min()) >= 0 and int(torch.cat([left, right]).max()) < tokens
    again = analyze_module._random_pairs(tokens, seed)
    assert torch.equal(left, again[0]) and torch.equal(right, again[1])


def test_another_seed_draws_other_pairs_and_changes_nothing_else() -> None:
    pattern = np.random.default_rng(0).random((50, 20)) < 0.3
    one, same, other = (of_patterns(pattern, seed=seed) for seed in (1, 1, 2))
    assert one == same
    assert one.layers[0].overlap.random != other.layers[0].overlap.random
    assert one.layers[0].overlap.neighbours == other.layers[0].overlap.neighbours


# ---------------------------------------------------------------------------------------------------------
# Plans
# ---------------------------------------------------------------------------------------------------------


def skewed(tokens: int = 64, width: int = 4096) -> np.ndarray:
    """256 neurons fire for every token, one more for each."""
    pattern = np.zeros((tokens, width), dtype=bool)
    pattern[:, :256] = True
    pattern[np.arange(tokens), 256 + np.arange(tokens)] = True
    return pattern


def test_plans_are_those_of_the_cost_model() -> None:
    dense = np.ones((64, 512), dtype=bool)
    shapes = [FFNShape(2048, True), FFNShape(512, False), FFNShape(2048, True)]
    ids = torch.zeros(2, 32, dtype=torch.int64)
    analysis = analyze_trace(trace_of(skewed(), skewed(), dense), ids, Letters(), shapes=shapes)
    for layer, pattern, shape in zip(analysis.layers, (skewed(), skewed(), dense), shapes, strict=True):
        fired = torch.from_numpy(pattern).sum(0)
        plan = choose_plan(fired, 64, costs_for(CPU), width=shape.width, gated=shape.gated)
        expected = (plan.is_dense, len(plan.hot), plan.cap, plan.min_tokens, plan.predicted)
        assert dataclasses.astuple(layer.plan) == expected
    gated, plain, full = (layer.plan for layer in analysis.layers)
    assert (gated.dense, gated.hot) == (False, 256)
    assert gated.predicted > plain.predicted > 1  # without an up projection less is saved
    assert (full.dense, full.hot, full.predicted) == (True, 512, 1.0)
    assert analysis.mean_predicted == pytest.approx((gated.predicted + plain.predicted + 1) / 3)


# What stands for D and for whether there is an up projection, in models that name their projections otherwise.
MODELS: dict[str, tuple[Any, bool]] = {
    "llama sparse": (lambda: LlamaSparseReluConfig(**TINY), True),
    "llama sparse, plain": (lambda: LlamaSparseReluConfig(**TINY, sparsity_gated_mlp=False), False),
    "llama": (lambda: LlamaConfig(**TINY, hidden_act="relu"), True),
    "nemotron": (lambda: NemotronConfig(**TINY), False),
    "opt": (lambda: OPTConfig(ffn_dim=F, word_embed_proj_dim=D, **TINY), False),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_tell_their_shape(name: str, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make, gated = MODELS[name]
    seen: list[FFNShape] = []

    def spy(fired: Tensor, tokens: int, costs: Any, *, width: int, gated: bool) -> Any:
        seen.append(FFNShape(width, gated))
        return choose_plan(fired, tokens, costs, width=width, gated=gated)

    monkeypatch.setattr(analyze_module, "choose_plan", spy)
    config = make()
    facts = analyze(tiny_model(config), tokenizer, TEXT, tokens=64).facts
    assert seen == [FFNShape(D, gated)] * LAYERS
    assert (facts.model_type, facts.width, facts.hidden_sizes) == (config.model_type, D, [F] * LAYERS)


# ---------------------------------------------------------------------------------------------------------
# Tokens
# ---------------------------------------------------------------------------------------------------------


def test_ties_go_to_the_more_frequent_then_to_the_lower_id() -> None:
    ids = [3, 1, 2, 2, 4, 5, 5, 1, 3, 2]
    active = {1: 4, 2: 4, 3: 4, 4: 9, 5: 1}  # 4 is alone
    pattern = with_counts([active[i] for i in ids], 12)
    analysis = of_patterns(pattern, ids=ids, min_count=2)
    assert [row.id for row in analysis.most_active] == [2, 1, 3, 5]
    assert [row.id for row in analysis.least_active] == [5, 2, 1, 3]
    assert [row.id for row in of_patterns(pattern, ids=ids, min_count=1, top=2).most_active] == [4, 2]
    assert [row.id for row in of_patterns(pattern, ids=ids, min_count=3).most_active] == [2]
    none = of_patterns(pattern, ids=ids, min_count=4)
    assert none.most_active == none.least_active == []
    assert (none.min_count, none.facts.token_types) == (4, 5)


def test_means_are_over_all_layers_and_occurrences() -> None:
    layers = with_counts([1, 2, 3, 4], 5), with_counts([5, 0, 1, 2], 5)
    (b, a) = of_patterns(*layers, ids=[0, 1, 0, 1], min_count=2).least_active
    assert (b.text, b.count, b.mean) == ("b", 2, 4.0)
    assert (a.text, a.count, a.mean) == ("a", 2, 5.0)
    assert [shown.active for shown in a.examples] == [6, 4]


def test_windows_end_with_the_sequence() -> None:
    ids = [0, 1, 2, 3, 4, 0, 5, 6, 7, 0]  # "abcde", "afgha"
    analysis = of_patterns(np.ones((10, 1), dtype=bool), ids=ids, length=5, min_count=3, window=2)
    (a,) = analysis.most_active
    where = [(shown.sequence, shown.position, shown.text, shown.start, shown.end) for shown in a.examples]
    assert where == [(0, 0, "abc", 0, 1), (1, 0, "afg", 0, 1), (1, 4, "gha", 2, 3)]
    analysis = of_patterns(np.ones((10, 1), dtype=bool), ids=ids, length=5, min_count=1, window=2)
    texts = {row.text: [(x.text, x.start, x.end) for x in row.examples] for row in analysis.most_active}
    assert (texts["c"], texts["b"], texts["e"]) == ([("abcde", 2, 3)], [("abcd", 1, 2)], [("cde", 2, 3)])
    bare = of_patterns(np.ones((10, 1), dtype=bool), ids=ids, length=5, min_count=1, window=0)
    assert {(x.text, x.start, x.end) for row in bare.most_active for x in row.examples} == {
        (c, 0, 1) for c in "abcdefgh"
    }


@pytest.mark.parametrize(("wanted", "expected"), [(0, []), (1, [0]), (2, [0, 8]), (3, [0, 4, 8]), (99, list(range(9)))])
def test_examples_are_spread_over_the_occurrences(wanted: int, expected: list[int]) -> None:
    (row,) = of_patterns(np.ones((9, 1), dtype=bool), examples=wanted).most_active
    assert [shown.position for shown in row.examples] == expected


def test_a_part_of_a_character_is_shown_as_the_character(tokenizer: Any) -> None:
    ids = tokenizer.encode("fox 🦊 é dog")
    emoji = tokenizer.encode("🦊")
    assert len(emoji) == 4  # one token a byte
    at = next(i for i in range(len(ids)) if ids[i : i + 4] == emoji)
    for position in range(at, at + 4):
        text, start, end = analyze_module._in_context(tokenizer, ids, position, 20)
        assert text == "fox 🦊 é dog"
        assert text[start:end] == "🦊"


@given(st.text(max_size=30), st.integers(0, 12), st.data())
def test_a_token_is_found_in_any_text(tokenizer: Any, text: str, window: int, data: Any) -> None:
    ids = tokenizer.encode(text)
    assume(ids)
    position = data.draw(st.integers(0, len(ids) - 1))
    shown, start, end = analyze_module._in_context(tokenizer, ids, position, window)
    token = analyze_module._token_text(tokenizer, ids[position])
    assert 0 <= start < end <= len(shown)
    assert shown[start:end] == token or "\ufffd" in token


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
    assert analyze_module._in_context(pieces, [1, 2, 3, 1], 1, 5) == ("the dogs the", 3, 7)
    assert analyze_module._in_context(pieces, [1, 2, 3, 1], 0, 5) == ("the dogs the", 0, 3)


def test_a_token_that_the_tokenizer_lacks_has_no_text(tokenizer: Any) -> None:
    """Embeddings are often longer than the vocabulary."""
    assert analyze_module._token_text(tokenizer, len(tokenizer) + 5) == ""
    text, start, end = analyze_module._in_context(tokenizer, [len(tokenizer) + 5], 0, 2)
    assert (text, start, end) == ("", 0, 0)
    fox = tokenizer.encode("fox")
    text, start, end = analyze_module._in_context(tokenizer, [*fox, len(tokenizer) + 5, *fox], len(fox), 9)
    assert (text, start, end) == ("foxfox", 3, 3)


# ---------------------------------------------------------------------------------------------------------
# Sample
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "letters"),
    [
        ({}, "abcde"),
        ({"sample_tokens": 2}, "ab"),
        ({"sample_sequence": 1}, "fghij"),
        ({"sample_sequence": 1, "sample_start": 3, "sample_tokens": 9}, "ij"),
        ({"sample_start": 1, "sample_tokens": 3}, "bcd"),
    ],
)
def test_a_sample_stays_in_its_sequence(options: dict[str, int], letters: str) -> None:
    layers = with_counts(range(10), 30), with_counts(range(20, 30), 30)
    sample = of_patterns(*layers, ids=range(10), length=5, **options).sample
    assert "".join(sample.tokens) == letters
    first = "abcdefghij".index(letters)
    assert sample.active == [list(range(low, low + len(letters))) for low in (first, first + 20)]
    assert 5 * sample.sequence + sample.start == first


# ---------------------------------------------------------------------------------------------------------
# A model on a text
# ---------------------------------------------------------------------------------------------------------


def test_a_model_is_analysed_as_its_trace_is(tokenizer: Any) -> None:
    model, seen = tiny_model(), []
    ids = tokenizer.encode(TEXT)
    n_sequences = len(ids) // CONTEXT
    analysis = analyze(model, tokenizer, TEXT, progress=lambda done, total: seen.append((done, total)))
    input_ids = torch.tensor(ids[: n_sequences * CONTEXT]).view(n_sequences, CONTEXT)
    expected = analyze_trace(
        record(model, input_ids), input_ids, tokenizer, shapes=[FFNShape(D, True)] * 2, model_type="llama_sparse_relu"
    )
    assert analysis == expected
    assert analysis.facts.length == CONTEXT and analysis.facts.sequences == n_sequences > 1
    assert [layer.name for layer in analysis.layers] == ["layers.0.mlp", "layers.1.mlp"]
    assert seen[-1] == (n_sequences, n_sequences)
    assert "".join(analysis.sample.tokens) == tokenizer.decode(ids[:CONTEXT])
    for given_ids in (ids, tuple(ids), torch.tensor(ids).int(), np.array(ids, dtype=np.uint16)):
        assert analyze(model, tokenizer, given_ids) == analysis
    assert analyze(model, tokenizer, TEXT, batch_size=1) == analysis
    assert repr(analysis).startswith(f"Analysis(2 layers, {n_sequences * CONTEXT:,} tokens, ")


def test_a_text_is_cut_to_the_tokens_wanted(tokenizer: Any) -> None:
    model, ids = tiny_model(), tokenizer.encode(TEXT)
    for tokens, length, expected in ((100, None, (1, 64)), (20, None, (1, 20)), (100, 9, (11, 9)), (2, None, (1, 2))):
        facts = analyze(model, tokenizer, TEXT, tokens=tokens, length=length).facts
        assert (facts.sequences, facts.length) == expected
    short = analyze(model, tokenizer, ids[:37])
    assert (short.facts.sequences, short.facts.length) == (1, 37)  # all of it


@given(st.text(alphabet="ab \n🦊", max_size=200), st.integers(2, 10))
@example(" " * 1000, 2)
@example("the lazy dog " * 100, 2)
def test_the_beginning_of_a_long_text_gives_the_same_tokens(tokenizer: Any, text: str, tokens: int) -> None:
    ids = trace_module.encode_beginning(tokenizer, text, tokens)[:tokens]
    assert ids == tokenizer.encode(text)[:tokens]


def test_only_the_beginning_of_a_long_text_is_encoded(tokenizer: Any) -> None:
    assert len(trace_module.encode_beginning(tokenizer, TEXT * 100, 10)) < 1000


def test_very_long_tokens_are_encoded_in_full() -> None:
    """Where the beginning holds too few tokens."""

    class Lines:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            assert not add_special_tokens
            return [len(line) for line in text.splitlines()]

    text = "\n".join("x" * n for n in range(990, 1000))
    assert trace_module.encode_beginning(Lines(), text, 5) == list(range(990, 1000))


@pytest.mark.parametrize("kind", [".txt", ".jsonl"])
def test_a_file_is_read_as_for_a_trace(kind: str, tokenizer: Any, tmp_path: Path) -> None:
    path, documents = tmp_path / f"text{kind}", [TEXT[:200], "It was a lazy dog.", TEXT[90:400]]
    if kind == ".txt":
        path.write_text("\n<|endoftext|>\n".join(documents))
    else:
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    model = tiny_model()
    for tokens in (16384, 70, 20):
        trace = record_text(model, tokenizer, path, length=16, tokens=tokens)
        analysis = analyze(model, tokenizer, path, length=16, tokens=tokens)
        assert analysis.facts.tokens == trace.tokens
        assert [layer.mean for layer in analysis.layers] == [row.mean for row in trace.summary()]
        assert analysis.sample.active == [counts[:16].tolist() for counts in trace.counts]


def test_a_layer_that_never_fires(tokenizer: Any) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].mlp.gate_proj.weight.zero_()
    first, never = analyze(model, tokenizer, TEXT).layers
    assert first.mean > 0 and first.overlap.neighbours is not None
    assert (never.mean, never.p50, never.p99, never.max, never.silent) == (0, 0, 0, 0, 1)
    assert (never.overlap.neighbours, never.overlap.random) == (None, None)
    assert set(never.top_shares.values()) == set(never.by_position) == set(never.curve.frequencies) == {0}


def test_ffns_that_are_left_out_of_a_trace_are_left_out_here(tokenizer: Any) -> None:
    model = tiny_model(LlamaConfig(**TINY, hidden_act="relu"))
    model.model.layers[0].mlp.act_fn = nn.SiLU()
    analysis = analyze(model, tokenizer, TEXT)
    assert ([layer.name for layer in analysis.layers], analysis.facts.layers) == (["layers.1.mlp"], 1)
    model.model.layers[1].mlp.act_fn = nn.SiLU()
    with pytest.raises(ValueError, match="nothing to record"):
        analyze(model, tokenizer, TEXT)


def test_running_counts_of_a_model_are_shown_and_left_alone(tokenizer: Any) -> None:
    model = tiny_model()
    assert all(layer.counted is None for layer in analyze(model, tokenizer, TEXT).layers)
    ffn = model.model.layers[1].mlp
    ffn.track_counts = True
    model(torch.tensor([[5, 6, 7]]))
    before = ffn.neuron_counts.clone()
    first, second = analyze(model, tokenizer, TEXT).layers
    assert first.counted is None and second.counted is not None
    assert (second.counted.source, second.counted.tokens) == ("running counts", 3)
    assert second.counted.silent == int((before == 0).sum()) / F
    assert torch.equal(ffn.neuron_counts, before) and int(ffn.tokens_seen) == 3


def test_counts_beside_a_model_are_shown(tokenizer: Any, tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    fired = [torch.arange(F) // 24, torch.arange(F) // 48]  # a quarter never fired, and half
    NeuronCounts(fired=fired, tokens=1000).save(tmp_path / COUNTS_FILE)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    counted = [layer.counted for layer in analyze(model, tokenizer, TEXT).layers]
    assert [dataclasses.astuple(c) for c in counted if c] == [("calibration", 1000, 0.25), ("calibration", 1000, 0.5)]
    running = AutoModelForCausalLM.from_pretrained(tmp_path)
    running.model.layers[0].mlp.track_counts = True
    running(torch.tensor([[5, 6, 7]]))
    first, second = (layer.counted for layer in analyze(running, tokenizer, TEXT).layers)
    assert first is not None and (first.tokens, second) == (3, None)  # the two are not mixed
    NeuronCounts(fired=[*fired, fired[0]], tokens=1000).save(tmp_path / COUNTS_FILE)
    with pytest.raises(ValueError, match=r"the counts are of 3 FFNs \[96, 96, 96\], the model has 2 \[96, 96\]"):
        analyze(model, tokenizer, TEXT)


# ---------------------------------------------------------------------------------------------------------
# JSON
# ---------------------------------------------------------------------------------------------------------


def plain(value: Any) -> bool:
    """Whether there is nothing in it but what JSON has."""
    if type(value) is dict:
        return all(type(key) is str and plain(inside) for key, inside in value.items())
    return all(map(plain, value)) if type(value) is list else type(value) in (str, int, float, bool, type(None))


def test_json_there_and_back(tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[0].mlp.gate_proj.weight.zero_()
    model.model.layers[1].mlp.track_counts = True
    model(torch.tensor([[5, 6, 7]]))
    analysis = analyze(model, tokenizer, TEXT + "🦊" * 20, options=Options(min_count=1))
    data = analysis.to_json()
    assert plain(data) and data["format"] == FORMAT
    text = json.dumps(data, allow_nan=False)
    again = Analysis.from_json(json.loads(text))
    assert again == analysis
    assert json.dumps(again.to_json()) == text
    sparse = of_patterns(skewed())  # with a plan that is not dense
    assert Analysis.from_json(json.loads(json.dumps(sparse.to_json()))) == sparse
    assert plain(sparse.to_json())


def test_other_json_is_refused() -> None:
    good = of_patterns(with_counts([1, 2, 3, 2, 1], 4)).to_json()
    for bad, message in (
        ({}, "tells no format"),
        ([], "tells no format"),
        ({**good, "format": FORMAT + 1}, f"format {FORMAT + 1}: only {FORMAT}"),
        ({**good, "format": None}, "format None"),
        ({k: v for k, v in good.items() if k != "facts"}, "'facts' is missing"),
        ({k: v for k, v in good.items() if k != "min_count"}, "min_count"),
        ({**good, "more": 1}, "more"),
        ({**good, "layers": None}, "not a whole analysis"),
        ({**good, "layers": [{**good["layers"][0], "curve": {"ranks": [0]}}]}, "frequencies"),
        ({**good, "most_active": [{}]}, "'examples' is missing"),
    ):
        with pytest.raises(ValueError, match=message):
            Analysis.from_json(bad)  # type: ignore[arg-type]
    assert Analysis.from_json(good).to_json() == good


# ---------------------------------------------------------------------------------------------------------
# Errors
# ---------------------------------------------------------------------------------------------------------


def test_errors_say_what_is_wrong(tokenizer: Any, tmp_path: Path) -> None:
    model = tiny_model()
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    for text in ("", [], torch.tensor([], dtype=torch.int64), empty):
        with pytest.raises(ValueError, match=r"^the text is empty$"):
            analyze(model, tokenizer, text)
    for tokens in (1, 0, -5):
        with pytest.raises(ValueError, match=f"at least 2 tokens are needed.*tokens={tokens}"):
            analyze(model, tokenizer, TEXT, tokens=tokens)
    with pytest.raises(ValueError, match="the text holds 1 token: too few for one sequence of 2"):
        analyze(model, tokenizer, [7])
    with pytest.raises(ValueError, match="the text holds 9 tokens: too few for one sequence of 10"):
        analyze(model, tokenizer, [7] * 9, length=10)
    with pytest.raises(ValueError, match="20 tokens hold no sequence of 30"):
        analyze(model, tokenizer, TEXT, tokens=20, length=30)
    with pytest.raises(ValueError, match=r"sequences of at least 2 tokens are needed.*got 1"):
        analyze(model, tokenizer, TEXT, length=1)
    with pytest.raises(ValueError, match="exceed the model's context of 64"):
        analyze(model, tokenizer, TEXT, length=65)
    with pytest.raises(ValueError, match="token 300 is none of the model's"):
        analyze(model, tokenizer, [1, 300])
    for ids in ([1.0, 2.0], [[1, 2], [3, 4]], torch.ones(3, dtype=torch.bool)):
        with pytest.raises(ValueError, match=r"token ids must be integers \[tokens\]"):
            analyze(model, tokenizer, ids)
    with pytest.raises(ValueError, match="batch_size must be at least 1"):
        analyze(model, tokenizer, TEXT, batch_size=0)
    with pytest.raises(FileNotFoundError, match=r"none\.txt does not exist"):
        analyze(model, tokenizer, tmp_path / "none.txt")
    (tmp_path / "tokens.u16").write_bytes(b"\0\0")
    with pytest.raises(ValueError, match=r"tokens\.u16: expected text"):
        analyze(model, tokenizer, tmp_path / "tokens.u16")
    with pytest.raises(ValueError, match="expected a transformers model, got Linear"):
        analyze(nn.Linear(2, 2), tokenizer, TEXT)


def test_a_sample_that_is_not_there_is_refused_before_the_model_runs(tokenizer: Any) -> None:
    def fail(done: int, total: int) -> None:
        raise AssertionError("the model ran")

    for options, message in (
        ({"sample_sequence": 3}, "no sequence 3 to show: the text has 3"),
        ({"sample_sequence": -1}, "no sequence -1 to show"),
        ({"sample_start": 64}, "nothing to show from token 64 on: a sequence has 64"),
        ({"sample_start": -1}, "nothing to show from token -1 on"),
    ):
        with pytest.raises(ValueError, match=message):
            analyze(tiny_model(), tokenizer, TEXT, tokens=192, options=Options(**options), progress=fail)


@pytest.mark.parametrize("name", ["top", "min_count", "sample_tokens", "examples", "window"])
def test_options_have_a_least_value(name: str) -> None:
    least = 0 if name in ("examples", "window") else 1
    Options(**{name: least})
    with pytest.raises(ValueError, match=f"{name} must be at least {least}, got {least - 1}"):
        Options(**{name: least - 1})


def test_a_trace_of_something_else_is_refused() -> None:
    trace, ids, shapes = (
        trace_of(np.ones((6, 4), dtype=bool)),
        torch.zeros(2, 3, dtype=torch.int64),
        [FFNShape(D, True)],
    )
    assert analyze_trace(trace, ids, Letters(), shapes=shapes).facts.sequences == 2
    with pytest.raises(ValueError, match="of 6 tokens, not of the 9"):
        analyze_trace(trace, ids.new_zeros(3, 3), Letters(), shapes=shapes)
    with pytest.raises(ValueError, match="of 1 layers, not of the 2"):
        analyze_trace(trace, ids, Letters(), shapes=shapes * 2)
    with pytest.raises(ValueError, match="at least 2 tokens"):
        analyze_trace(trace, ids.reshape(6, 1), Letters(), shapes=shapes)
    with pytest.raises(ValueError, match="does not tell the width"):
        analyze_trace(dataclasses.replace(trace, hidden_sizes=None), ids, Letters(), shapes=shapes)


# ---------------------------------------------------------------------------------------------------------
# Correlation
# ---------------------------------------------------------------------------------------------------------

numbers = st.integers(-1000, 1000).map(lambda n: n / 8)


@given(st.lists(st.tuples(numbers, numbers), min_size=2, max_size=30))
def test_correlation_is_numpys(pairs: list[tuple[float, float]]) -> None:
    active, speedups = (list(column) for column in zip(*pairs, strict=True))
    assume(len(set(active)) > 1 and len(set(speedups)) > 1)
    expected = np.corrcoef(active, speedups)[0, 1]
    assert correlation(active, speedups) == pytest.approx(expected, abs=1e-9)
    assert correlation(speedups, active) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1.0, 1e160, 1e300])
def test_correlation_does_not_depend_on_the_scale(scale: float) -> None:
    assert correlation([scale, 2 * scale, 3 * scale], [3, 2, 1]) == pytest.approx(-1)
    assert correlation([1, 2, 4], [scale, 2 * scale, 4 * scale]) == pytest.approx(1)


def test_correlation_errors() -> None:
    for active, speedups, message in (
        ([], [], "at least 2 layers, got 0"),
        ([1], [2], "at least 2 layers, got 1"),
        ([1, 2], [1, 2, 3], "one speedup a layer is needed, got 2 layers and 3 speedups"),
        ([[1, 2]], [[1, 2]], "one speedup a layer"),
        ([5, 5, 5], [1, 2, 3], "all layers have the same active neurons, 5"),
        ([1, 2, 3], [0.1, 0.1, 0.1], "all layers have the same speedups, 0.1"),
        ([1, math.nan], [1, 2], "the active neurons must be finite"),
        ([1, 2], [1, math.inf], "the speedups must be finite"),
    ):
        with pytest.raises(ValueError, match=message):
            correlation(active, speedups)  # type: ignore[arg-type]
