"""The planner: which step runs by which plan, what a checkpoint keeps of it, and what the trainer does with it."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from interpreted import shorten_lists
from twell import GatedSparseFFN, SparseFFN, Stats
from twell.gpu.training import split_training
from twell.nn import SparseFFNBase
from twell.ops import backends
from twell.plan import Plan, costs_for
from twell.sparsity import Planner
from twell.train.data import Corpus
from twell.train.recipes import Recipe, tiny
from twell.train.trainer import SPARSITY_FILE, SparseTrainer, make_model, make_trainer, resume

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")

TOKENS = 1000
SPARSE, DENSE = 0.002, 0.5  # how often a neuron fires: of 128 it pays up to 0.01 in training
Hot = list[int | None]  # of each layer; None: it runs densely


@pytest.fixture(autouse=True)
def small_layers_may_be_sparse(monkeypatch: pytest.MonkeyPatch) -> None:
    costs = costs_for(torch.device("cpu"), training=True)._replace(batch=0, token=0, hot=0)
    monkeypatch.setattr("twell.plan.costs._TRAINING_COSTS", {90: costs})
    for name in ("_MIN_TOKENS_TRAINING", "_MIN_TOKENS_TRAINING_CAPTURED"):
        monkeypatch.setattr(f"twell.plan.choose.{name}", 0)


def layers(n: int = 2, F: int = 128, backend: str = "triton") -> list[SparseFFNBase]:
    return [GatedSparseFFN(16, F, backend=backend) for _ in range(n)]


def seen(*frequencies: float | torch.Tensor, tokens: int = TOKENS) -> list[Stats]:
    """A step's statistics: how often the neurons of each layer fired, all alike or [F]."""
    counts = [(tokens * torch.as_tensor(f).expand(128 if isinstance(f, float) else len(f))).int() for f in frequencies]
    return [Stats(torch.tensor(0.0), c, torch.tensor(tokens)) for c in counts]


def advance(planner: Planner, *steps: list[Stats]) -> list[Hot]:
    """The hot neurons after each step."""
    found = []
    for step in steps:
        planner.advance(step)
        found.append(planner.hot_neurons())
    return found


# -- when, and which --------------------------------------------------------------------------------------


def test_layers_move_one_step_after_their_counts_are_complete() -> None:
    """One layer becomes sparse and dense again, the other the other way round."""
    planner = Planner(layers(), every=3)
    steps = [seen(SPARSE, DENSE)] * 3 + [seen(DENSE, SPARSE)] * 3 + [seen(SPARSE, SPARSE)] * 4
    neither, first, second, both = [None, None], [0, None], [None, 0], [0, 0]
    assert advance(planner, *steps) == [neither] * 3 + [first] * 3 + [second] * 3 + [both]


def test_every_step() -> None:
    steps = [seen(SPARSE), seen(DENSE), seen(SPARSE), seen(SPARSE)]
    assert advance(Planner(layers(1), every=1), *steps) == [[None], [0], [None], [0]]


def test_all_steps_of_an_interval_count() -> None:
    """Here neurons fire only in the first step."""
    F, hot = 384, torch.randperm(384)[:128]
    often = torch.full((F,), 0.001).index_fill(0, hot, 0.9)
    never = torch.zeros(F)
    (ffn,) = layers(1, F)
    planner = Planner([ffn], every=3)
    assert advance(planner, *map(seen, (often, never, never, never))) == [[None], [None], [None], [128]]
    assert ffn.plan is not None
    assert sorted(ffn.plan.hot.tolist()) == sorted(hot.tolist())
    assert advance(planner, *map(seen, (never, never, never))) == [[128], [128], [0]]


def test_between_plans_layers_that_have_changed_are_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[list[int]] = [[], []]
    ffns, right, step = layers(), GatedSparseFFN.plan_from_counts, 0

    def spy(ffn: SparseFFNBase, *args: Any, **options: Any) -> Plan:
        planned[ffns.index(ffn)].append(step)
        return right(ffn, *args, **options)

    monkeypatch.setattr(GatedSparseFFN, "plan_from_counts", spy)
    planner = Planner(ffns, every=10)
    for step in range(22):
        planner.advance(seen(DENSE if step < 5 else SPARSE, DENSE * (1 + 0.01 * (step % 5))))
    assert planned == [[2, 6, 8, 10, 20], [2, 10, 20]]  # at 6 by a dense and a sparse step
    assert planner.hot_neurons() == [0, None]


def test_plain_layers_too() -> None:
    planner = Planner([SparseFFN(16, 128, backend="triton")], every=1)
    assert advance(planner, seen(SPARSE), seen(SPARSE)) == [[None], [0]]


def test_layers_of_different_widths() -> None:
    planner = Planner([*layers(1), *layers(1, F=256)], every=1)
    step = seen(SPARSE, torch.full((256,), DENSE))
    assert advance(planner, step, step) == [[None, None], [0, None]]


def test_layers_start_densely() -> None:
    (ffn,) = layers(1)
    ffn.set_plan(Plan(n_neurons=128, hot=torch.arange(2), cap=16))
    assert Planner([ffn]).hot_neurons() == [None]
    assert ffn.plan is None


@pytest.mark.parametrize("tokens_before", [0, TOKENS])
def test_steps_without_tokens_change_no_plan(tokens_before: int) -> None:
    """For example if all labels are masked."""
    planner = Planner(layers(1), every=1)
    steps = [seen(SPARSE, tokens=tokens_before), seen(DENSE, tokens=0), seen(DENSE, tokens=0)]
    assert advance(planner, *steps)[1:] == [[0 if tokens_before else None]] * 2


@pytest.mark.parametrize("backends", [("auto", "auto"), ("reference", "triton"), ("cpu", "cpu")])
def test_nothing_happens_where_the_kernels_cannot_run(backends: tuple[str, str]) -> None:
    """On CPUs "auto" is the CPU path, even in the interpreter."""
    planner = Planner([layers(1, backend=b)[0] for b in backends], every=1)
    assert advance(planner, *[seen(SPARSE, SPARSE)] * 3) == [[None, None]] * 3


def test_nothing_happens_outside_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    monkeypatch.setattr(backends, "_chosen", {})
    planner = Planner(layers(backend="auto"), every=1)
    assert advance(planner, *[seen(SPARSE, SPARSE)] * 3) == [[None, None]] * 3
    assert advance(Planner([]), [], []) == [[], []]


def test_a_planning_interval_below_1_is_refused() -> None:
    with pytest.raises(ValueError, match="every must be at least 1, got 0"):
        Planner(layers(), every=0)


# -- saved and restored -----------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", range(10))
def test_a_restored_planner_sets_the_same_plans_at_the_same_steps(stop: int) -> None:
    """Stopped at any step: within an interval, at its end with counts sent and not yet used, and right after."""
    F = 384
    steps = []
    for busy in (128, 128, F):  # neurons; in their order within a plan every step's counts show
        order = torch.rand(2, F).argsort(1)
        steps += [seen(*torch.where(order < busy, 0.3 + 0.7 * torch.rand(2, F), 0.001)) for _ in range(3)]
    steps.append(steps[0])
    planner = Planner(layers(F=F), every=3)
    whole, states = [], []
    for step in steps:
        states.append(through_a_file(planner.state_dict()))
        planner.advance(step)
        whole.append([ffn.plan for ffn in planner.ffns])
    assert [None if plan is None else len(plan.hot) for plan, _ in whole] == [None] * 3 + [128] * 6 + [None]

    resumed = Planner(layers(F=F), every=3)
    resumed.load_state_dict(states[stop])
    for step, expected in zip(steps[stop:], whole[stop:], strict=True):
        resumed.advance(step)
        for plan, other in zip((ffn.plan for ffn in resumed.ffns), expected, strict=True):
            assert (plan is None and other is None) or is_same(plan, other)


def is_same(a: Plan, b: Plan) -> bool:
    ours, theirs = a.state_dict(), b.state_dict()
    return torch.equal(ours.pop("hot"), theirs.pop("hot")) and ours == theirs


def test_restored_plans_are_set_at_once() -> None:
    planner = Planner(layers(), every=2)
    advance(planner, *[seen(SPARSE, DENSE)] * 3)
    resumed = Planner(layers(), every=2)
    resumed.load_state_dict(through_a_file(planner.state_dict()))
    assert resumed.hot_neurons() == planner.hot_neurons() == [0, None]


def test_plans_of_a_gpu_run_densely_where_there_are_no_kernels() -> None:
    planner, resumed = Planner(layers(), every=2), Planner(layers(backend="cpu"), every=2)
    advance(planner, *[seen(SPARSE, DENSE)] * 3)
    resumed.load_state_dict(through_a_file(planner.state_dict()))
    assert resumed.hot_neurons() == [None, None] and resumed.state_dict()["plans"][0] is not None


def test_a_saved_state_does_not_go_on_with_its_planner() -> None:
    planner = Planner(layers(1), every=2)
    planner.advance(seen(SPARSE))
    state = planner.state_dict()
    advance(planner, *[seen(DENSE)] * 3)
    resumed = Planner(layers(1), every=2)
    resumed.load_state_dict(state)
    assert advance(resumed, seen(SPARSE), seen(SPARSE)) == [[None], [0]]


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)  # tensors and plain values only


# -- in training ------------------------------------------------------------------------------------------

RECIPE = dataclasses.replace(
    tiny(),
    hidden_size=32,
    intermediate_size=128,
    layers=2,
    heads=2,
    context=4,
    vocab_size=64,
    l1=0.1,
    steps=4,
    sequences_per_step=2,
    micro_batch=2,
    lr_warmup=0,
    log_every=1,
    eval_every=4,
    save_every=1,
    plan_every=2,
)


def trainer_of(recipe: Recipe, backend: str, out: Path) -> SparseTrainer:
    tokens = np.random.default_rng(0).integers(0, 64, 80, dtype=np.uint16)
    corpus = Corpus(train=tokens, held_out=tokens[:8])
    model = make_model(recipe, 64, 0)
    for layer in model.model.layers:
        layer.mlp.backend = backend
    return make_trainer(recipe, model, corpus, out, use_cpu=True, bf16=False, save_total_limit=None)


def logged(trainer: SparseTrainer, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def test_the_trainer_moves_layers_and_resumes_with_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans from the counts of steps 1 and 2 are set after step 3. A run stopped after step 2 has only these counts."""
    shorten_lists(monkeypatch.setattr)
    cheap = costs_for(torch.device("cpu"), training=True)._replace(dense=1e6)  # besides dense: all is sparse
    monkeypatch.setattr("twell.plan.costs._TRAINING_COSTS", {90: cheap})
    by_kernels = 0
    right = split_training.backward

    def spy(*args: Any, **options: Any) -> Any:
        nonlocal by_kernels
        by_kernels += 1
        return right(*args, **options)

    monkeypatch.setattr(split_training, "backward", spy)
    trainer = trainer_of(RECIPE, "triton", tmp_path / "planned")
    trainer.train()
    assert logged(trainer, "sparse_layers") == [0, 0, 2, 2]
    assert logged(trainer, "hot/1") == [0, 0]
    assert by_kernels == 2  # two layers in step 4
    densely = trainer_of(dataclasses.replace(RECIPE, plan_every=0), "reference", tmp_path / "dense")
    densely.train()
    assert logged(densely, "sparse_layers") == [0] * 4
    for name in ("ce_loss", "l1_loss", "active_mean", "eval_loss"):
        assert logged(trainer, name) == pytest.approx(logged(densely, name), rel=1e-4)

    checkpoint = tmp_path / "planned" / "checkpoint-2"
    saved = torch.load(checkpoint / SPARSITY_FILE)["plans"]
    assert saved["steps"] == 2 and saved["sent"] is not None and saved["plans"] == [None, None]
    resumed = trainer_of(RECIPE, "triton", tmp_path / "resumed")
    resume(resumed, checkpoint)
    for name in ("sparse_layers", "hot/0", "ce_loss", "l1_loss", "active_mean", "eval_loss"):
        assert logged(resumed, name) == pytest.approx(logged(trainer, name), rel=1e-6)
