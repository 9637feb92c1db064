"""The Hugging Face Trainer, extended for sparse models. The training loop is the Trainer's own. What is added:

- the log and ``metrics.jsonl`` hold both parts of the loss and the active neurons of every layer;
- L1 is steered to a number of active neurons, or warmed up;
- dead neurons, counted over all processes, get fresh weights on a schedule;
- layers move between the dense path and the sparse kernels, by their counts;
- checkpoints also hold clocks, counts, plans and l1, and a manifest (files.py); a run whose loss or weights are no
  longer finite writes none.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    PrinterCallback,
    Trainer,
    TrainerState,
    TrainingArguments,
)

from twell import energy
from twell.hf import LlamaSparseReluConfig, LlamaSparseReluForCausalLM
from twell.hf.losses import IGNORED_LABEL
from twell.nn import SparseFFNBase
from twell.ops import Stats
from twell.sparsity import L1Steering, Planner, advance_clock, l1_warmup, restart_neurons_, sum_over_processes
from twell.train.attention import causal_without_a_mask
from twell.train.data import Blocks, Corpus, PaddedBlocks
from twell.train.files import checkpoint_folder, finish_folder, remove_older, step_of, write_whole, writing
from twell.train.metrics import METRICS_FILE, SparsityCallback, active_neurons, metrics_line
from twell.train.recipes import Recipe

FSDP2: dict[str, Any] = {"fsdp": True}  # for TrainingArguments; the model's class says which layers to shard
SPARSITY_FILE = "sparsity.pt"


def make_model(recipe: Recipe, vocab_size: int, end_of_text: int) -> PreTrainedModel:
    """A model with fresh weights; the same seed gives the same weights."""
    torch.manual_seed(recipe.seed)
    shape: dict[str, Any] = {
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_hidden_layers": recipe.layers,
        "num_attention_heads": recipe.heads,
        "num_key_value_heads": recipe.heads,
        "max_position_embeddings": recipe.context,
        "rope_parameters": {"rope_type": "default", "rope_theta": recipe.rope_theta},
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "vocab_size": vocab_size,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
    }
    if recipe.activation == "silu":
        return LlamaForCausalLM(LlamaConfig(**shape))
    return LlamaSparseReluForCausalLM(
        LlamaSparseReluConfig(
            **shape,
            sparsity_l1_coeff=recipe.l1 or 0.0,
            sparsity_gated_mlp=recipe.gated,
        )
    )


def make_trainer(recipe: Recipe, model: Any, corpus: Corpus, out: Path, **arguments: Any) -> SparseTrainer:
    """A trainer for the recipe. ``arguments`` go to ``TrainingArguments`` and override the recipe's."""
    on_gpu = torch.cuda.is_available()
    micro_batch, accumulation = split_step(recipe, int(os.environ.get("WORLD_SIZE", "1")))
    settings: dict[str, Any] = {
        "output_dir": str(out),
        "max_steps": recipe.steps,
        "per_device_train_batch_size": micro_batch,
        "per_device_eval_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "learning_rate": recipe.lr,
        "adam_beta1": 0.9,
        "adam_beta2": 0.95,
        "weight_decay": recipe.weight_decay,
        "max_grad_norm": recipe.clip,
        "lr_scheduler_type": "cosine",
        "warmup_steps": recipe.lr_warmup,
        "bf16": on_gpu,
        "use_cpu": not on_gpu,
        "seed": recipe.seed,
        "data_seed": recipe.seed,
        "logging_steps": recipe.log_every,
        "logging_nan_inf_filter": False,
        "eval_strategy": "steps",
        "eval_steps": recipe.eval_every,
        "save_steps": recipe.save_every,
        "save_total_limit": 2,
        "prediction_loss_only": True,
        "report_to": "none",
        "disable_tqdm": True,
        # Copying a batch does not wait for the step before: 392k -> 455k tokens/s of `small` on an H200.
        "accelerator_config": {"non_blocking": on_gpu},
        "ddp_find_unused_parameters": False,
        "ddp_broadcast_buffers": False,
    }
    args = TrainingArguments(**settings | arguments)
    if args.n_gpu > 1:  # transformers would use all of them in this process, for larger steps
        raise ValueError(
            f"{args.n_gpu} GPUs and one process: start a process for each (torchrun --nproc-per-node {args.n_gpu} ...) "
            "or show it one GPU (CUDA_VISIBLE_DEVICES=0)"
        )
    # Whole steps only: an epoch then ends alike however a step is split, and no odd batch is compiled.
    whole = len(corpus.train) // recipe.tokens_per_step * recipe.tokens_per_step
    return SparseTrainer(
        recipe,
        model=model,
        args=args,
        train_dataset=Blocks(corpus.train[:whole] if whole else corpus.train, recipe.context),
        eval_dataset=PaddedBlocks(Blocks(corpus.held_out, recipe.context), args.eval_batch_size * args.world_size),
    )


def split_step(recipe: Recipe, processes: int) -> tuple[int, int]:
    """(sequences of a micro-batch, micro-batches a step) of each process: together the recipe's sequences a step."""
    each, rest = divmod(recipe.sequences_per_step, processes)
    if rest or not each:
        raise ValueError(f"{recipe.sequences_per_step} sequences a step do not divide into {processes} processes")
    micro_batch = max(n for n in range(1, min(recipe.micro_batch, each) + 1) if each % n == 0)
    return micro_batch, each // micro_batch


class SparseTrainer(Trainer):
    """See the module. The log is of whole steps: over all micro-batches and processes."""

    def __init__(self, recipe: Recipe, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        if self.args.fsdp and not self.accelerator.is_fsdp2:
            raise ValueError("FSDP2 needs GPUs: on CPUs accelerate leaves it out; train without it")
        if self.accelerator.is_fsdp2 and self.accelerator.mixed_precision == "bf16":
            # accelerate's own policy would also round the loss and the sums of gradients to bf16.
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            self.accelerator.state.fsdp_plugin.mixed_precision_policy = policy
        if self.label_smoother is not None or self.compute_loss_func is not None:
            raise ValueError("label_smoothing_factor and compute_loss_func keep the labels from the model: no L1")
        self.recipe = recipe
        model: Any = self.model
        blocks = [layer.mlp for layer in model.model.layers]
        self.ffns: list[SparseFFNBase] = [b for b in blocks if isinstance(b, SparseFFNBase)]  # none in a SiLU model
        if any(ffn.share() is not None for ffn in self.ffns):
            raise ValueError("tensor parallel models need a loop of their own: this trainer knows DDP and FSDP2")
        self.clocks = [torch.zeros(len(ffn.neuron_counts), dtype=torch.int64) for ffn in self.ffns]
        self.planner = Planner(self.ffns, recipe.plan_every or 1)
        target = recipe.target_neurons
        self.steering: L1Steering | None = None
        if target is not None and self.ffns:
            self.steering = L1Steering(target, recipe.steps, model.config.sparsity_l1_coeff)
        # Statistics, one entry per layer:
        self.recent: list[Stats] = []  # since the last log, of all processes; the log commits them to the FFNs
        self.eval_stats: list[Stats] = []  # of the last evaluation
        self._step: list[Stats] = []  # of the current step's micro-batches so far, this process
        # Sums of this process:
        self._eval_sums = torch.zeros(2, dtype=torch.float64)  # cross-entropy and tokens of the evaluation
        self._losses = torch.zeros(2, dtype=torch.float64)  # cross-entropy and L1 since the last log
        self._steps_since_log = 0
        self._read_joules = energy.counter(self.args.device)
        self.restart_stopwatch()
        # We delete older checkpoints after the new one is finished; the Trainer would delete them before.
        self.kept_checkpoints, self.args.save_total_limit = self.args.save_total_limit, None
        self.remove_callback(PrinterCallback)
        self.add_callback(SparsityCallback(self))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | int | None = None
    ) -> Any:
        loss, out = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        # Both parts of the loss are sums over this process's tokens, divided by the tokens of all processes. The
        # Trainer multiplies the loss by the processes, since gradients are averaged over them; the log must not.
        ce_loss = out.ce_loss if hasattr(out, "ce_loss") else loss / self.accelerator.num_processes
        stats = getattr(out, "sparsity", None) or ()
        if model.training:
            l1_loss = out.l1_loss if stats else torch.zeros_like(ce_loss)
            own: Any = self.model.config  # type: ignore[union-attr]
            if stats and self.l1 != own.sparsity_l1_coeff:  # a coefficient that changes would recompile the model
                processes = self.accelerator.num_processes if self.args.average_tokens_across_devices else 1
                loss = loss + processes * (self.l1 - own.sparsity_l1_coeff) * l1_loss
            losses = torch.stack([ce_loss.detach(), l1_loss.detach()])
            self._losses = self._losses.to(losses.device) + losses
            self._step = _add(self._step, stats)
        else:
            counted = (inputs["labels"][..., 1:] != IGNORED_LABEL).sum()
            sums = torch.stack([ce_loss * num_items_in_batch, counted])
            self._eval_sums = self._eval_sums.to(sums.device) + sums
            self.eval_stats = _add(self.eval_stats, stats)
        return (loss, out) if return_outputs else loss

    def finish_step(self) -> None:
        """After an optimiser step: advance clocks, plan, steer L1, restart dead neurons. Never waits for the device."""
        self._steps_since_log += 1
        step = sum_over_processes(self._step) if self._step else []
        if step:
            self.clocks = [advance_clock(clock, stats) for clock, stats in zip(self.clocks, step, strict=True)]
        if step and self.recipe.plan_every:
            self.planner.advance(step)
        if self.steering is not None:
            self.steering.advance(step)
        self.recent, self._step = _add(self.recent, step), []
        every, until, now = self.recipe.restart_every, self.recipe.restart_until, self.state.global_step
        if every and now % every == 0 and now <= (until or now):
            self._restart_dead_neurons(now)

    @property
    def l1(self) -> float:
        """The coefficient of L1 in the next step."""
        recipe = self.recipe
        if self.steering is not None:
            return self.steering.l1
        return (recipe.l1 or 0.0) * l1_warmup(self.state.global_step, recipe.l1_warmup_start, recipe.l1_warmup_end)

    def _restart_dead_neurons(self, step: int) -> None:
        model: Any = self.model
        std = model.config.initializer_range
        for layer, ffn in enumerate(self.ffns):
            dead = self.clocks[layer] >= self.recipe.dead_after_tokens
            seed = hash((self.recipe.seed, step, layer)) & 0x7FFFFFFF  # a hash of integers is the same in every process
            restart_neurons_(ffn, dead, std=std, seed=seed, optimizer=self.optimizer)
            self.clocks[layer] = self.clocks[layer].masked_fill(dead, 0)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        with self._blocks():
            return super().train(*args, **kwargs)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        self.eval_stats, self._eval_sums = [], torch.zeros_like(self._eval_sums)
        with self._blocks():
            return super().evaluate(*args, **kwargs)

    def _blocks(self) -> contextlib.AbstractContextManager[None]:
        is_blocks = isinstance(self.train_dataset, Blocks) and isinstance(self.eval_dataset, PaddedBlocks)
        return causal_without_a_mask(self.model) if is_blocks else contextlib.nullcontext()

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self._steps_since_log:
            losses = self._losses / self._steps_since_log
            if _in_a_group():
                dist.all_reduce(losses)
            logs["ce_loss"], logs["l1_loss"] = losses.tolist()
            logs["tokens"] = self.state.global_step * self.recipe.tokens_per_step
            if self.recent:
                logs["l1"] = self.l1
                logs["dead_share"] = self.dead_share()
                logs |= active_neurons(self.recent, "")
                hot = {f"hot/{i}": n for i, n in enumerate(self.planner.hot_neurons()) if n is not None}
                logs |= {"sparse_layers": len(hot), **hot}  # those that train by the sparse kernels
                for ffn, stats in zip(self.ffns, self.recent, strict=True):
                    ffn.reset_counts()
                    ffn.commit(stats)
            start, first_step, joules = self._stopwatch
            if self.state.global_step > first_step:  # the losses were read above, so the device is done
                seconds = time.perf_counter() - start
                logs["tokens_per_second"] = (logs["tokens"] - first_step * self.recipe.tokens_per_step) / seconds
                if self._read_joules is not None:
                    logs["watts"] = (self._read_joules() - joules) / seconds
            self._steps_since_log, self._losses, self.recent = 0, torch.zeros_like(losses), []
        if "eval_loss" in logs:  # cross-entropy alone, and the mean over all tokens
            if _in_a_group():
                dist.all_reduce(self._eval_sums)
            logs["eval_loss"] = float(self._eval_sums[0] / self._eval_sums[1])
            if self.eval_stats:
                self.eval_stats = sum_over_processes(self.eval_stats)
                logs |= active_neurons(self.eval_stats, "eval_")
        super().log(logs, *args, **kwargs)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.accelerator.is_fsdp2 and not _internal_call:  # whole, even if checkpoints are sharded
            self.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
        config: Any = self.model.config  # type: ignore[union-attr]
        coefficient = getattr(config, "sparsity_l1_coeff", None)
        try:
            if self.steering is not None:  # the saved model gets the l1 that steering has reached
                config.sparsity_l1_coeff = self.l1
            super().save_model(output_dir, _internal_call)
        finally:
            if self.steering is not None:
                config.sparsity_l1_coeff = coefficient

    def dead_share(self) -> float:
        """Share of all neurons that have not fired for ``dead_after_tokens`` tokens."""
        return float((torch.cat(self.clocks) >= self.recipe.dead_after_tokens).float().mean())

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """Write the manifest last, and delete older checkpoints only after it."""
        self._check_finite()
        out, step = Path(self.args.output_dir or "."), self.state.global_step
        folder, is_first = checkpoint_folder(out, step), self.is_world_process_zero()
        with writing(folder):  # earlier checkpoints are untouched until this one is whole
            if is_first:
                shutil.rmtree(folder, ignore_errors=True)  # one that was not finished, or is damaged
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(*args, **kwargs)
            self.accelerator.wait_for_everyone()  # other processes may still be writing
            if is_first:
                saved = {
                    "clocks": [clock.cpu() for clock in self.clocks],
                    "counts": [(ffn.neuron_counts.cpu(), ffn.tokens_seen.cpu()) for ffn in self.ffns],
                    "plans": self.planner.state_dict(),
                    "steering": None if self.steering is None else self.steering.state_dict(),
                }
                torch.save(saved, folder / SPARSITY_FILE)
                finish_folder(folder, {"step": step})
                remove_older(folder, self.kept_checkpoints, self.state.best_model_checkpoint)

    def _check_finite(self) -> None:
        """The log of this step has checked the losses before its optimiser step, and not the weights after it."""
        model: Any = self.model
        local = [p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]
        finite = torch.stack([torch.isfinite(p).all() for p in local]).all().int()
        if _in_a_group():
            dist.all_reduce(finite, dist.ReduceOp.MIN)
        if not finite:
            raise RuntimeError(
                f"a weight is no longer finite at step {self.state.global_step}: try a lower lr or l1; "
                "stopped, and no checkpoint of this step written"
            )

    def restart_stopwatch(self) -> None:
        """Count tokens and joules from now on: the log, evaluation or save that just ended was no training."""
        joules = 0.0 if self._read_joules is None else self._read_joules()
        self._stopwatch = time.perf_counter(), self.state.global_step, joules


def _in_a_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _add(total: Sequence[Stats], more: Sequence[Stats]) -> list[Stats]:
    """Sums per layer. Counts become int64, which no number of tokens overflows."""
    if not total:
        return [Stats(s.l1_sum.detach(), s.counts.long(), s.tokens) for s in more]
    pairs = zip(total, more, strict=True)
    return [Stats(a.l1_sum + b.l1_sum.detach(), a.counts + b.counts, a.tokens + b.tokens) for a, b in pairs]


def resume(trainer: SparseTrainer, checkpoint: Path) -> None:
    """Continue from a checkpoint, at the exact place in the data, to the end of the recipe."""
    saved = torch.load(checkpoint / SPARSITY_FILE)
    trainer.clocks = saved["clocks"]
    for ffn, (counts, tokens) in zip(trainer.ffns, saved["counts"], strict=True):
        ffn.neuron_counts.copy_(counts)
        ffn.tokens_seen.copy_(tokens)
    trainer.planner.load_state_dict(saved["plans"])
    if trainer.steering is not None:
        trainer.steering.load_state_dict(saved["steering"])
    state = TrainerState.load_from_json(str(checkpoint / "trainer_state.json"))
    is_done = step_of(checkpoint) >= trainer.recipe.steps
    if is_done:  # a checkpoint does not hold the last validation's counts: validate again
        last = step_of(checkpoint)
        state.log_history = [row for row in state.log_history if "eval_loss" not in row or row["step"] < last]
    if trainer.is_world_process_zero():  # without the entries of later steps, which will be logged again
        rows = [metrics_line(row["step"], {k: v for k, v in row.items() if k != "step"}) for row in state.log_history]
        write_whole(Path(trainer.args.output_dir or ".") / METRICS_FILE, "".join(rows))
    if is_done:  # train() would take one more step
        trainer.state = state
        if trainer.accelerator.is_fsdp2:  # accelerate shards a model only together with its optimiser
            trainer.create_optimizer()
            trainer.model, trainer.optimizer = trainer.accelerator.prepare(trainer.model, trainer.optimizer)
            trainer.model_wrapped = trainer.model
        trainer._load_from_checkpoint(str(checkpoint))
        return
    trainer.train(resume_from_checkpoint=str(checkpoint))
