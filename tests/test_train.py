"""Training: recipes, the trainer's log, clocks, warm-up and fresh starts, resuming, and the command."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainingArguments

from small_runs import mortal_runs, write_text
from twell import cpu
from twell.nn.parallel import Share
from twell.train.attention import causal_without_a_mask
from twell.train.files import MANIFEST_FILE, checkpoint_folder, finish_folder, newest_sound
from twell.train.recipes import PRESETS, Recipe, override, preset, tiny
from twell.train.run import read_summary, run
from twell.train.summary import describe
from twell.train.tokenizer import train_bpe
from twell.train.trainer import (
    METRICS_FILE,
    SPARSITY_FILE,
    SparseTrainer,
    make_model,
    split_step,
)

MINI = dataclasses.replace(
    tiny(),
    hidden_size=32,
    intermediate_size=64,
    layers=2,
    heads=2,
    context=32,
    vocab_size=300,
    steps=6,
    sequences_per_step=4,
    micro_batch=4,
    lr_warmup=2,
    log_every=1,
    eval_every=3,
    save_every=3,
    dead_after_tokens=200,
)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_text(tmp_path_factory.mktemp("data") / "text.txt")


@pytest.fixture(scope="module")
def plain(text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    """An undisturbed run of MINI: its trainer and its folder."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr(cpu.block, "MIN_WORK", 0)  # as in every test
        out = tmp_path_factory.mktemp("runs") / "plain"
        return train(MINI, text, out), out


def train(recipe: Recipe, text: Path, out: Path, **options: Any):
    return run(recipe, [text], out, say=lambda line: None, **options)


def metrics(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / METRICS_FILE).read_text().splitlines()]


def losses(out: Path) -> dict[int, float]:
    return {int(row["step"]): row["ce_loss"] for row in metrics(out) if "ce_loss" in row}


# -- recipes ----------------------------------------------------------------------------------------------


def test_presets_have_the_sizes_they_say() -> None:
    for name, billions in (("small", 0.109), ("0.5b", 0.51), ("1b", 1.03), ("1.5b", 1.54), ("2b", 2.06)):
        recipe = preset(name)
        with torch.device("meta"):
            model = make_model(recipe, recipe.vocab_size, 0)
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.06)


def test_overrides_and_their_errors() -> None:
    changed = override(tiny(), ["l1=1e-4", "steps=7", "gated=False"])
    assert (changed.l1, changed.steps, changed.gated, changed.target_neurons) == (1e-4, 7, False, None)
    assert [override(tiny(), [f"target_active={n}"]).target_neurons for n in (0.25, 1, 30)] == [128, 1, 30]
    assert override(tiny(), ["activation=silu"]).target_neurons is None
    for bad, message in (
        ("nonsense=1", "expected key=value with a key of"),
        ("steps", "expected key=value"),
        ("steps=many", "steps must be of type int, got 'many'"),
        ("gated=7", "gated must be of type bool, got '7'"),
        ("steps=0", "steps must be at least 1"),
        ("heads=7", "no even multiple of heads"),
        ("micro_batch=0", "micro_batch must be at least 1"),
        ("activation=gelu", "activation must be relu or silu"),
        ("activation=silu l1=1", "takes no l1"),
        ("l1=1 target_active=2", "target_active does nothing with a fixed l1"),
        ("activation=silu target_active=2", "target_active does nothing with a fixed l1 or activation=silu"),
        ("target_active=0", "target_active must be above 0"),
        ("target_active=nan", "target_active must be a finite number"),
        ("target_active=513", "more than all 512 neurons"),
        ("target_active=x", "target_active must be of type float"),
        ("l1_warmup_end=9", "l1_warmup_end is for a fixed l1"),
        ("l1=-1", "l1 must be at least 0, got -1"),
        ("l1=nan", "l1 must be a finite number, got nan"),
        ("lr=inf", "lr must be a finite number, got inf"),
        ("lr=0", "lr must be above 0"),
        ("lr=-1", "lr must be above 0, got -1"),
        ("weight_decay=-inf", "weight_decay must be a finite number"),
        ("clip=-1", "clip must be at least 0"),
        ("rope_theta=0", "rope_theta must be at least 1"),
        ("save_every=-1", "save_every must be at least 1"),
        ("log_every=0", "log_every must be at least 1"),
        ("eval_every=0", "eval_every must be at least 1"),
        ("lr_warmup=-1", "lr_warmup must be at least 0"),
        ("restart_every=-1", "restart_every must be at least 0"),
        ("context=1", "context must be at least 2"),
        ("seed=-1", "seed must be at least 0"),
        ("seed=4294967296", "seed must be at most 4294967295"),
        ("steps=1" + "0" * 400, "steps must be at most"),
        ("vocab_size=99999999999", "vocab_size must be at most 4194304"),  # the trainer of BPEs would abort
        ("heads=128", "no even multiple of heads"),
        ("l1_warmup_start=9", "l1_warmup_start does nothing without l1_warmup_end"),
        ("l1=1 l1_warmup_start=9 l1_warmup_end=8", "l1_warmup_start 9 is after l1_warmup_end 8"),
        ("restart_until=9", "restart_until does nothing without restart_every"),
    ):
        with pytest.raises(ValueError, match=message):
            override(tiny(), bad.split())
    with pytest.raises(ValueError, match="target_active does nothing with a fixed l1"):  # of a run with a fixed one
        override(dataclasses.replace(tiny(), l1=1e-3), ["target_active=0.01"])
    with pytest.raises(ValueError, match=r"steps must be of type int, got 1\.5"):
        Recipe(steps=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown preset 'huge': expected one of tiny"):
        preset("huge")
    assert list(PRESETS) == ["tiny", "small", "0.5b", "1b", "1.5b", "2b"]


@pytest.mark.parametrize(("processes", "split"), [(1, (2, 8)), (2, (2, 4)), (8, (2, 1)), (16, (1, 1))])
def test_more_processes_accumulate_less(processes: int, split: tuple[int, int]) -> None:
    recipe = dataclasses.replace(MINI, sequences_per_step=16, micro_batch=3)  # 3 is the most, 2 divides
    assert split_step(recipe, processes) == split
    for processes in (3, 32):
        with pytest.raises(ValueError, match=f"16 sequences a step do not divide into {processes} processes"):
            split_step(recipe, processes)


# -- runs -------------------------------------------------------------------------------------------------


def test_a_run_learns_logs_and_leaves_a_model(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(dataclasses.replace(MINI, steps=40, lr=1e-2, eval_every=20, save_every=20), text, out)
    rows = [row for row in metrics(out) if "ce_loss" in row]
    assert rows[-1]["ce_loss"] < rows[0]["ce_loss"] - 0.5
    before = 0.0
    for row in rows:
        assert row["loss"] == pytest.approx(row["ce_loss"] + before * row["l1_loss"], rel=2e-3)
        before = row["l1"]  # of the next step
        assert row["active_mean"] == pytest.approx((row["active/0"] + row["active/1"]) / 2)
        assert 0 <= row["dead_share"] <= 1
    assert sum("eval_loss" in row for row in metrics(out)) == 2
    target = read_summary(out)["target"]
    late = [row["active_mean"] for row in rows if row["step"] >= 14]
    pairs = [(a + b) / 2 for a, b in itertools.pairwise(late)]
    assert target == pytest.approx({"neurons": 0.64, "l1": rows[-1]["l1"], "least": min(pairs), "most": max(pairs)})
    model = AutoModelForCausalLM.from_pretrained(out / "model")
    assert model.config.sparsity_l1_coeff == rows[-1]["l1"] > 0
    tokenizer = AutoTokenizer.from_pretrained(out / "model")
    ids = tokenizer("The ", return_tensors="pt").input_ids
    assert model.generate(ids, max_new_tokens=4, do_sample=False).shape[1] > ids.shape[1]


def test_micro_batches_do_not_change_a_run(text: Path, plain: tuple[Any, Path], tmp_path: Path) -> None:
    train(dataclasses.replace(MINI, micro_batch=1), text, tmp_path)
    assert losses(tmp_path) == pytest.approx(losses(plain[1]), rel=1e-4)
    for a, b in zip(metrics(plain[1]), metrics(tmp_path), strict=True):
        if "l1_loss" in a:
            assert b["l1_loss"] == pytest.approx(a["l1_loss"], rel=1e-3)
            assert b["active_mean"] == pytest.approx(a["active_mean"], rel=1e-2)


def test_saving_memory_does_not_change_a_run(text: Path, plain: tuple[Any, Path], tmp_path: Path) -> None:
    train(MINI, text, tmp_path / "saving", save_memory=True)
    assert losses(tmp_path / "saving") == pytest.approx(losses(plain[1]), rel=1e-5)
    silu = dataclasses.replace(MINI, activation="silu")
    for recipe, options in ((silu, {}), (MINI, {"gradient_checkpointing": True})):
        with pytest.raises(ValueError, match="save_memory is for"):
            train(recipe, text, tmp_path / "refused", save_memory=True, **options)


def test_a_resumed_run_is_the_uninterrupted_one(text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = dataclasses.replace(MINI, restart_every=2)
    through = train(recipe, text, tmp_path / "through")
    with mortal_runs(monkeypatch), pytest.raises(KeyboardInterrupt):
        train(recipe, text, tmp_path / "killed")
    shutil.copytree(tmp_path / "killed/checkpoint-3", tmp_path / "killed/checkpoint-5")
    (tmp_path / "killed/checkpoint-5" / MANIFEST_FILE).unlink()  # a checkpoint that was never finished
    resumed = run(None, [text], tmp_path / "killed", go_on=True, say=lambda line: None)
    assert losses(tmp_path / "killed") == pytest.approx(losses(tmp_path / "through"), rel=1e-6)
    assert 0 < resumed.l1 == pytest.approx(through.l1, rel=1e-6)
    for a, b in zip(through.clocks, resumed.clocks, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(through.model.parameters(), resumed.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_a_summary_says_if_the_target_was_missed(plain: tuple[Any, Path]) -> None:
    summary = read_summary(plain[1])
    for target, says in (
        ({"neurons": 5.12, "least": 4.41, "most": 5.6}, "; trained to 5.12, held within 4.41 and 5.6"),
        ({"neurons": 256, "least": 109.1, "most": 117.3}, "; asked for 256, not reached: 109 to 117 (L1 ended at"),
        ({"neurons": 1e-9, "least": 0.0123, "most": 0.2}, "; asked for 1e-09, not reached: 0.0123 to 0.2 (L1 ended"),
    ):
        assert says in describe({**summary, "target": {**target, "l1": 1e-6}})


def test_clocks_and_counts_stay_out_of_the_state_dict(plain: tuple[Any, Path]) -> None:
    trainer, folder = plain
    assert not [key for key in trainer.model.state_dict() if "clock" in key or "count" in key or "seen" in key]
    saved = torch.load(folder / "checkpoint-6" / SPARSITY_FILE)
    assert [len(clock) for clock in saved["clocks"]] == [64, 64]
    for ffn, (counts, tokens) in zip(trainer.ffns, saved["counts"], strict=True):  # of the last log's steps
        assert int(tokens) == 4 * 31 and torch.equal(counts, ffn.neuron_counts) and counts.any()


def test_dead_neurons_get_fresh_gates_on_schedule(text: Path, tmp_path: Path) -> None:
    recipe = dataclasses.replace(MINI, l1=10.0, lr=0.05, steps=8, dead_after_tokens=100)
    dead = train(recipe, text, tmp_path / "dead")
    assert max(row.get("dead_share", 0) for row in metrics(tmp_path / "dead")) > 0.2
    care = train(dataclasses.replace(recipe, restart_every=8), text, tmp_path / "care")
    assert losses(tmp_path / "care") == losses(tmp_path / "dead")  # the restart comes after the last step
    changed = 0
    for a, b, clock in zip(dead.ffns, care.ffns, dead.clocks, strict=True):
        was_dead = clock >= 100
        assert torch.equal(a.gate_proj.weight[~was_dead], b.gate_proj.weight[~was_dead])
        assert torch.equal(a.up_proj.weight, b.up_proj.weight)
        assert (a.gate_proj.weight[was_dead] != b.gate_proj.weight[was_dead]).any(1).all()
        changed += int(was_dead.sum())
    assert changed > 10
    assert not any((clock >= 100).any() for clock in care.clocks)


def test_l1_warms_up(text: Path, tmp_path: Path) -> None:
    train(dataclasses.replace(MINI, l1=0.1, l1_warmup_start=2, l1_warmup_end=4), text, tmp_path)
    shares = [(row["loss"] - row["ce_loss"]) / (0.1 * row["l1_loss"]) for row in metrics(tmp_path) if "ce_loss" in row]
    assert shares == pytest.approx([0, 0, 0, 0.5, 1, 1], abs=0.01)


def test_a_checkpoint_with_a_weight_that_is_not_finite_is_not_written(
    text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SparseTrainer, "finish_step", lambda self: self.model.lm_head.weight.data.fill_(torch.nan))
    with pytest.raises(RuntimeError, match=r"no longer finite at step 1: .* no checkpoint of this step written"):
        train(dataclasses.replace(MINI, save_every=1), text, tmp_path)
    assert newest_sound(tmp_path)[0] is None


def test_faults_end_in_one_clear_error(text: Path, tmp_path: Path) -> None:
    diverging = dataclasses.replace(MINI, lr=1e30, clip=1e30, lr_warmup=0)
    with pytest.raises(RuntimeError, match="grad_norm is nan at step 2: try a lower lr"):
        train(diverging, text, tmp_path / "nan")
    strict = [json.loads(line, parse_constant=pytest.fail) for line in (tmp_path / "nan/metrics.jsonl").open()]
    assert strict[-1]["not_finite"] == ["grad_norm"] and "grad_norm" not in strict[-1]
    with pytest.raises(ValueError, match="is not empty"):
        train(MINI, text, tmp_path / "nan")
    with pytest.raises(ValueError, match="label_smoothing_factor and compute_loss_func keep the labels"):
        train(MINI, text, tmp_path / "smooth", label_smoothing_factor=0.1)
    with pytest.raises(ValueError, match="holds no run to resume"):
        run(None, [text], tmp_path / "none", go_on=True)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        train(MINI, tmp_path / "missing.txt", tmp_path / "x")
    tokens = tmp_path / "x.u16"
    tokens.write_bytes(b"\1\0\0\0" * 8)
    with pytest.raises(ValueError, match="give --tokenizer"):
        train(MINI, tokens, tmp_path / "x")
    train_bpe(["small"], 260).save_pretrained(tmp_path / "tok")
    tokens.write_bytes(b"\xff\1\0\0" * 8)
    with pytest.raises(ValueError, match="another tokenizer"):
        train(MINI, tokens, tmp_path / "x", tokenizer=str(tmp_path / "tok"))


def test_resuming_a_finished_run_trains_no_further(plain: tuple[Any, Path], tmp_path: Path) -> None:
    """Killed after the last checkpoint and before the model was written."""
    expected = {name: p.clone() for name, p in plain[0].model.named_parameters()}
    shutil.copytree(plain[1], tmp_path, dirs_exist_ok=True)
    summary = json.loads((tmp_path / "summary.json").read_text())
    shutil.rmtree(tmp_path / "model")
    (tmp_path / "summary.json").unlink()
    checkpoint = checkpoint_folder(tmp_path, 6)
    saved = torch.load(checkpoint / SPARSITY_FILE)
    for clock in saved["clocks"]:
        clock.fill_(7)  # here all neurons fired in the last step: zeros would prove nothing
    torch.save(saved, checkpoint / SPARSITY_FILE)
    finish_folder(checkpoint, {"step": 6})
    again = run(None, [], tmp_path, go_on=True, say=lambda line: None)
    assert again.state.global_step == 6
    for name, p in again.model.named_parameters():
        assert torch.equal(p, expected[name]), name
    assert all((clock == 7).all() for clock in again.clocks)
    assert (tmp_path / "model" / "config.json").is_file()
    once_more = json.loads((tmp_path / "summary.json").read_text())
    for key in ("validation_loss", "active", "dead_share"):
        assert once_more[key] == pytest.approx(summary[key])


def test_a_silu_model_trains_to_compare_with(text: Path, tmp_path: Path) -> None:
    train(dataclasses.replace(MINI, activation="silu"), text, tmp_path)
    rows = metrics(tmp_path)
    assert all(row["l1_loss"] == 0 for row in rows if "ce_loss" in row)
    assert not any("active_mean" in row or "eval_active_mean" in row for row in rows)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert not list(tmp_path.glob("*.part"))
    assert "active" not in summary and summary["validation_loss"] > 0
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "model").config.hidden_act == "silu"


def test_restarts_end_where_they_should(text: Path, tmp_path: Path) -> None:
    recipe = dataclasses.replace(MINI, l1=10.0, lr=0.05, steps=8, dead_after_tokens=100, restart_every=2)
    early = train(dataclasses.replace(recipe, restart_until=3), text, tmp_path / "early")
    late = train(recipe, text, tmp_path / "late")
    assert early.dead_share() > late.dead_share() == 0  # the last restart comes after the last step


def test_a_refused_run_leaves_no_folder_in_the_way(text: Path, tmp_path: Path) -> None:
    with pytest.raises(Exception, match="nonsense is not supported"):
        train(MINI, text, tmp_path / "run", report_to="nonsense")
    train(dataclasses.replace(MINI, steps=1), text, tmp_path / "run")


def test_tensor_parallel_models_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(MINI, 300, 0)
    ffn = model.model.layers[1].mlp
    monkeypatch.setattr(ffn, "share", lambda: Share(None, slice(0, 8), 16))
    with pytest.raises(ValueError, match="tensor parallel models need a loop of their own"):
        SparseTrainer(MINI, model=model, args=TrainingArguments(str(tmp_path), use_cpu=True, report_to="none"))


def masks(model: Any, ids: torch.Tensor) -> list[Any]:
    """What each attention of the compiled model gets as its mask, and whether it is told that it is causal."""
    found: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        nodes = [n for n in graph.graph.nodes if "scaled_dot_product_attention" in str(n.target)]
        found.extend((n.kwargs["attn_mask"], n.kwargs["is_causal"]) for n in nodes)
        return graph

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(ids, use_cache=False)
    return found


def test_full_blocks_are_attended_to_without_a_mask() -> None:
    """Compiled, transformers makes one, and attention takes twice as long."""
    model = make_model(MINI, 300, 0).eval()
    ids = torch.randint(300, (2, 16))
    with torch.no_grad():
        expected = model(ids).logits
        assert all(mask is not None for mask, _ in masks(model, ids))
        with causal_without_a_mask(model):
            assert masks(model, ids) == [(None, True)] * MINI.layers
            torch.testing.assert_close(model(ids).logits, expected)
        assert model.config._attn_implementation == "sdpa"
        model.config.layer_types = ["full_attention", "sliding_attention"]
        with causal_without_a_mask(model):
            assert model.config._attn_implementation == "sdpa"
