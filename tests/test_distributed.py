"""Two processes compute the same as one: losses, gradients, weights, clocks, restarts, checkpoints; DDP and FSDP2.

This file is also the program that torchrun and accelerate launch. It trains the given cases one after another, since
starting processes takes longer than training, and saves its observations for the tests to compare.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from accelerate import PartialState
from accelerate.utils import DistributedType
from safetensors import safe_open
from torch.utils.data import Dataset
from transformers import AutoModelForCausalLM, TrainerCallback, TrainingArguments
from transformers.training_args import ParallelMode

from twell.hf import LlamaSparseReluForCausalLM
from twell.train import trainer as trainer_module
from twell.train.data import Corpus
from twell.train.files import MANIFEST_FILE, flaw_of_folder, step_of
from twell.train.recipes import tiny
from twell.train.run import read_metrics
from twell.train.trainer import FSDP2, SparseTrainer, make_model, make_trainer, resume

CONTEXT, VOCABULARY = 16, 64
# L1 is at first a seventh of the loss, and silences neurons fast enough for restarts.
RECIPE = dataclasses.replace(
    tiny(),
    hidden_size=32,
    intermediate_size=64,
    layers=2,
    heads=2,
    context=CONTEXT,
    vocab_size=VOCABULARY,
    l1=3.0,
    dead_after_tokens=100,  # more than a step's tokens: a resumed run needs its clocks
    restart_every=6,
    steps=7,
    sequences_per_step=8,
    micro_batch=8,
    lr=8e-3,
    lr_warmup=0,
    log_every=1,
    eval_every=7,
    save_every=5,
    seed=11,  # one of the seeds with which each layer has both dead and live neurons
)
STEERED = {"l1": None, "target_active": 8.0}
SILU = {"activation": "silu", "l1": 0.0, "restart_every": 0}
SHARDED = {"fsdp_config": {"state_dict_type": "SHARDED_STATE_DICT"}}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    like: str = "one"  # the case of one process with the same results
    recipe: dict[str, Any] = dataclasses.field(default_factory=dict)
    arguments: dict[str, Any] = dataclasses.field(default_factory=dict)
    resumes: str | None = None  # another case, whose checkpoint it resumes
    at: int = RECIPE.save_every  # the step of that checkpoint
    counts_all_labels: bool = False  # for num_items_in_batch: transformers 5.17 does, 5.22 leaves out the first


ONE_PROCESS = {
    "one": Case(),
    "one-accumulated": Case(recipe={"micro_batch": 2}),
    "one-silu": Case(recipe=SILU),
    "one-steered": Case(recipe=STEERED),
    "one-all-labels": Case(counts_all_labels=True),
}
TWO_PROCESSES = {
    "ddp": Case(),
    "ddp-accumulated-checkpointed": Case(recipe={"micro_batch": 2}, arguments={"gradient_checkpointing": True}),
    "ddp-finished": Case(resumes="ddp", at=RECIPE.steps),
    "ddp-silu": Case(recipe=SILU, like="one-silu"),
    "ddp-steered": Case(recipe=STEERED | {"micro_batch": 2}, like="one-steered"),
    "ddp-steered-resumed": Case(recipe=STEERED, resumes="ddp-steered", like="one-steered"),
    "ddp-all-labels": Case(counts_all_labels=True, like="one-all-labels"),
    "fsdp": Case(arguments=FSDP2),
    "fsdp-accumulated-checkpointed": Case(
        recipe={"micro_batch": 2}, arguments=FSDP2 | {"fsdp_config": {"activation_checkpointing": True}}
    ),
    "fsdp-resumed": Case(arguments=FSDP2, resumes="fsdp"),
    "fsdp-finished": Case(arguments=FSDP2, resumes="fsdp", at=RECIPE.steps),
    "fsdp-sharded-steered": Case(recipe=STEERED, arguments=FSDP2 | SHARDED, like="one-steered"),
    "fsdp-sharded-resumed": Case(
        recipe=STEERED, arguments=FSDP2 | SHARDED, resumes="fsdp-sharded-steered", like="one-steered"
    ),
}
OTHERS = {
    "ddp-a-mean-of-each-process": Case(arguments={"average_tokens_across_devices": False}),
    "fsdp-bf16": Case(arguments=FSDP2 | {"bf16": True}),
}
GOES_ON = {"one-resumed": Case(resumes="ddp")}
CASES = ONE_PROCESS | TWO_PROCESSES | OTHERS | GOES_ON


# -- the program ------------------------------------------------------------------------------------------


class MaskedBlocks(Dataset):
    """Random tokens. A quarter of the sequences has nearly all labels masked, another quarter none."""

    def __init__(self, n: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(VOCABULARY, (n, CONTEXT), generator=generator)
        share = torch.tensor([0.05, 1.0, 0.3, 0.7])[torch.arange(n) % 4]
        kept = torch.rand(n, CONTEXT, generator=generator) < share[:, None]
        self.labels = self.ids.masked_fill(~kept, -100)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class _Observer(TrainerCallback):
    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step == 0:
            self.gradients = {name: whole(p.grad) for name, p in named_parameters(model)}


def named_parameters(model: torch.nn.Module) -> list[tuple[str, torch.nn.Parameter]]:
    return [(name.replace("_checkpoint_wrapped_module.", ""), p) for name, p in model.named_parameters()]


def whole(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


@contextlib.contextmanager
def fsdp_on_cpu() -> Iterator[None]:
    """accelerate 1.15 ignores ``fsdp`` on CPUs, though it works there: pretend another device."""
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
    try:
        with mock.patch.object(PartialState, "_prepare_backend", return_value=("gloo", DistributedType.MULTI_XPU)):
            yield
    finally:
        del os.environ["ACCELERATE_TORCH_DEVICE"]
        os.environ.pop("ACCELERATE_USE_FSDP", None)  # set for good by accelerate


def make_case(name: str, folder: Path) -> SparseTrainer:
    case = CASES[name]
    recipe = dataclasses.replace(RECIPE, **case.recipe)
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, 8 * CONTEXT, dtype=np.uint16)
    corpus = Corpus(train=tokens, held_out=tokens[: 7 * CONTEXT])
    with fsdp_on_cpu() if "fsdp" in case.arguments else contextlib.nullcontext():
        model = make_model(recipe, VOCABULARY, 0)
        arguments = {"use_cpu": True, "bf16": False} | case.arguments
        trainer = make_trainer(recipe, model, corpus, folder / name, **arguments)
    assert trainer.accelerator.is_fsdp2 == ("fsdp" in case.arguments)
    trainer.train_dataset = MaskedBlocks(48)  # 6 steps: the run goes on into another epoch
    if case.counts_all_labels:
        trainer._loss_shifts_labels = False
    if name == "ddp" and trainer.args.process_index == 1:
        trainer._save_rng_state = slow(trainer._save_rng_state)
    return trainer


def slow(function: Any) -> Any:
    def slower(*args: Any) -> None:
        time.sleep(0.3)
        function(*args)

    return slower


def train_case(name: str, folder: Path) -> dict[str, Any]:
    """A process's observations of a case, comparable for any number of processes."""
    trainer = make_case(name, folder)
    observer = _Observer()
    trainer.add_callback(observer)
    restarted: list[int] = []
    dtypes = set()

    def spy_restarts(ffn: Any, neurons: torch.Tensor, **kwargs: Any) -> None:
        restarted.append(int(neurons.sum()))
        restart(ffn, neurons, **kwargs)

    def spy_loss(*args: Any, **kwargs: Any) -> Any:
        result = compute_loss(*args, **kwargs)
        dtypes.add(result[0].dtype if isinstance(result, tuple) else result.dtype)
        return result

    restart, compute_loss = trainer_module.restart_neurons_, trainer.compute_loss
    trainer.compute_loss = spy_loss
    with mock.patch.object(trainer_module, "restart_neurons_", spy_restarts):
        if CASES[name].resumes:
            resume(trainer, folder / CASES[name].resumes / f"checkpoint-{CASES[name].at}")
        else:
            trainer.train()
    trainer.save_model(str(folder / name / "model"))
    model: Any = trainer.model
    model.state_dict()  # FSDP2: shards the parameters that the evaluation has gathered
    if CASES[name].at == RECIPE.steps:  # nothing is trained, so there is no optimiser
        trainer.evaluate()
    state = getattr(trainer.optimizer, "state", {})
    parameters = named_parameters(model)
    return {
        "log": trainer.state.log_history,
        "gradients": observer.gradients,
        "weights": {name: whole(p) for name, p in parameters},
        "first moments": {name: whole(state[p]["exp_avg"]) for name, p in parameters if p in state},
        "second moments": {name: whole(state[p]["exp_avg_sq"]) for name, p in parameters if p in state},
        "clocks": list(trainer.clocks),
        "restarted": None if CASES[name].at == RECIPE.steps else restarted,
        "dtypes": dtypes,
    }


def main(folder: Path, names: list[str]) -> None:
    for name in names:
        result = train_case(name, folder)
        torch.save(result, folder / f"{name}.{dist.get_rank()}.pt")
    dist.destroy_process_group()


# -- the tests --------------------------------------------------------------------------------------------


def launch(launcher: list[str], folder: Path, names: list[str]) -> None:
    command = [sys.executable, "-m", *launcher, __file__, str(folder), *names]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    try:
        output, _ = process.communicate(timeout=300)
    finally:
        process.terminate()  # if it still runs: it then ends its child processes
    assert process.returncode == 0, output[-5000:]


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("one")
    return {name: train_case(name, folder) for name in ONE_PROCESS}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    names = [*TWO_PROCESSES, *OTHERS]
    # DDP cases first: with them accelerate starts the process group as it does on CPUs.
    names.sort(key=lambda name: name.startswith("fsdp"))
    launch(["torch.distributed.run", "--standalone", "--nproc-per-node", "2"], folder, names)
    return folder


def load(folder: Path, name: str, rank: int) -> dict[str, Any]:
    return torch.load(folder / f"{name}.{rank}.pt", weights_only=False)


def difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest relative difference of a tensor."""
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).norm() / b[name].norm()) for name in a)


def compared(log: list[dict[str, float]]) -> list[dict[str, float]]:
    """Steps and evaluations, without times."""
    rows = [row for row in log if "ce_loss" in row or "eval_loss" in row]
    return [{k: v for k, v in row.items() if not k.endswith(("time", "per_second"))} for row in rows]


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for a, b in zip(compared(found["log"]), compared(expected["log"]), strict=True):
        assert a == pytest.approx(b, rel=1e-5)
    if found["gradients"]:  # a resumed run does no first step
        assert difference(found["gradients"], expected["gradients"]) < 1e-5
    for kind in ("weights", "first moments", "second moments"):  # after steps that made differences larger
        assert not found[kind] or difference(found[kind], expected[kind]) < 1e-4, kind
    assert found["weights"] and bool(found["first moments"]) == (found["restarted"] is not None)
    for a, b in zip(found["clocks"], expected["clocks"], strict=True):
        assert torch.equal(a, b)
    assert found["restarted"] in (expected["restarted"], None)


def test_the_run_to_compare_with_has_what_can_go_wrong(one: dict[str, dict[str, Any]]) -> None:
    rows = [row for row in one["one"]["log"] if "ce_loss" in row]
    assert len(rows) == 7 and RECIPE.l1 * rows[0]["l1_loss"] > 0.1 * rows[0]["ce_loss"]
    assert max(row["dead_share"] for row in rows) > 0.05
    assert all(5 < restarted < 59 for restarted in one["one"]["restarted"])
    assert one["one"]["gradients"].keys() == dict(make_model(RECIPE, VOCABULARY, 0).named_parameters()).keys()


def test_accumulation_does_not_change_a_run(one: dict[str, dict[str, Any]]) -> None:
    assert_same(one["one-accumulated"], one["one"])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("name", TWO_PROCESSES)
def test_two_processes_compute_what_one_does(two: Path, one: dict[str, dict[str, Any]], name: str, rank: int) -> None:
    assert_same(load(two, name, rank), one[TWO_PROCESSES[name].like])


def test_one_process_goes_on_with_a_run_of_two(two: Path, one: dict[str, dict[str, Any]]) -> None:
    assert_same(train_case("one-resumed", two), one["one"])


def test_another_normalisation_would_be_seen(two: Path, one: dict[str, dict[str, Any]]) -> None:
    found = load(two, "ddp-a-mean-of-each-process", 0)
    assert difference(found["gradients"], one["one"]["gradients"]) > 1e-2


@pytest.mark.slow
def test_accelerate_launches_it_too(tmp_path: Path, one: dict[str, dict[str, Any]]) -> None:
    # --multi_gpu starts the processes, which choose the CPU; with --cpu accelerate starts several through MPI alone.
    options = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    launch(["accelerate.commands.launch", *options.split(), "--main_process_port", "0"], tmp_path, ["ddp"])
    for rank in (0, 1):
        assert_same(load(tmp_path, "ddp", rank), one["one"])


def test_the_first_process_alone_writes_metrics(two: Path) -> None:
    for name in ("ddp", "fsdp"):
        rows = read_metrics(two / name)
        assert [row["step"] for row in rows if "ce_loss" in row] == [1, 2, 3, 4, 5, 6, 7]
        assert sum("eval_loss" in row for row in rows) == 1


def test_a_checkpoint_is_finished_by_the_last_process(two: Path) -> None:
    for step in (5, 7):
        folder = two / "ddp" / f"checkpoint-{step}"
        last = (folder / MANIFEST_FILE).stat().st_mtime_ns
        assert (folder / "rng_state_1.pth").exists()  # the slow process's
        assert all(path.stat().st_mtime_ns <= last for path in folder.iterdir())
        assert flaw_of_folder(folder, {"step": step_of(folder)}) is None


@pytest.mark.parametrize("name", ["ddp", "fsdp-finished", "fsdp-accumulated-checkpointed", "fsdp-sharded-steered"])
def test_the_saved_model_is_whole(two: Path, name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(two / name / "model")
    assert type(model) is LlamaSparseReluForCausalLM
    assert model.lm_head.weight is model.model.embed_tokens.weight
    weights = load(two, name, 0)["weights"]
    assert difference({name: p.detach() for name, p in model.named_parameters()}, weights) == 0
    with safe_open(two / name / "model" / "model.safetensors", "pt") as file:
        assert set(file.keys()) - {"lm_head.weight"} == set(weights)  # the names of Llama


def test_fsdp_rounds_no_loss_to_bf16(two: Path) -> None:
    assert load(two, "fsdp-bf16", 0)["dtypes"] == {torch.float32}


def test_one_process_with_several_gpus_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match="2 GPUs and one process: start a process for each"):
        make_case("one", tmp_path)


def test_fsdp_is_not_left_out_silently(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")  # accelerate sets it; this takes it back
    monkeypatch.setattr(TrainingArguments, "parallel_mode", ParallelMode.DISTRIBUTED)
    monkeypatch.setattr(sys.modules[__name__], "fsdp_on_cpu", contextlib.nullcontext)
    with pytest.raises(ValueError, match="FSDP2 needs GPUs"):
        make_case("fsdp", tmp_path)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
    sys.stdout.flush()
    os._exit(0)  # on a busy machine torch's threads have been seen to abort the interpreter's shutdown
