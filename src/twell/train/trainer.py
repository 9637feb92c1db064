"""The HF Trainer with eyes for sparsity: no training loop of our own, only what it should see, log and save.

- both parts of the loss and the active neurons of every layer in the log, and in ``metrics.jsonl``;
- the L1 warm-up, firing clocks reduced over processes, fresh starts for dead neurons on a schedule;
- clocks saved in the checkpoint folder, beside the state dict, and taken up again on resume.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from twell.hf import LlamaSparseReluConfig, LlamaSparseReluForCausalLM
from twell.ops import Stats
from twell.sparsity import FiringClock, l1_warmup, restart_neurons_
from twell.train.data import Blocks, Corpus
from twell.train.recipes import Recipe

CLOCKS_FILE = "sparsity.pt"
METRICS_FILE = "metrics.jsonl"


def make_model(recipe: Recipe, vocab_size: int, end_of_text: int) -> LlamaSparseReluForCausalLM:
    """A model with fresh weights, the same for the same seed."""
    torch.manual_seed(recipe.seed)
    return LlamaSparseReluForCausalLM(
        LlamaSparseReluConfig(
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.layers,
            num_attention_heads=recipe.heads,
            num_key_value_heads=recipe.heads,
            max_position_embeddings=recipe.context,
            rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            vocab_size=vocab_size,
            bos_token_id=end_of_text,
            eos_token_id=end_of_text,
            sparsity_l1_coeff=recipe.l1,
            sparsity_gated_mlp=recipe.gated,
            sparsity_start_warmup_step=recipe.l1_warmup_start,
            sparsity_end_warmup_step=recipe.l1_warmup_end,
            sparsity_tokens_until_dead=recipe.dead_after_tokens,
        )
    )


def make_trainer(recipe: Recipe, model: Any, corpus: Corpus, out: Path, **arguments: Any) -> SparseTrainer:
    """A trainer for the recipe; ``arguments`` go to ``TrainingArguments`` over the recipe's."""
    on_gpu = torch.cuda.is_available()
    settings: dict[str, Any] = {
        "output_dir": str(out),
        "max_steps": recipe.steps,
        "per_device_train_batch_size": recipe.micro_batch,
        "per_device_eval_batch_size": recipe.micro_batch,
        "gradient_accumulation_steps": accumulation_steps(recipe, int(os.environ.get("WORLD_SIZE", "1"))),
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
    }
    return SparseTrainer(
        recipe,
        model=model,
        args=TrainingArguments(**settings | arguments),
        train_dataset=Blocks(corpus.train, recipe.context),
        eval_dataset=Blocks(corpus.held_out, recipe.context),
    )


def accumulation_steps(recipe: Recipe, processes: int) -> int:
    """Micro-batches each process computes a step. (Launchers tell WORLD_SIZE before any process group exists.)"""
    per_pass = recipe.micro_batch * processes
    if recipe.sequences_per_step % per_pass:
        raise ValueError(
            f"{recipe.sequences_per_step} sequences a step do not divide into {processes} processes x "
            f"{recipe.micro_batch}"
        )
    return recipe.sequences_per_step // per_pass


class SparseTrainer(Trainer):
    """See the module. The losses it logs are of whole steps: over all micro-batches and processes."""

    def __init__(self, recipe: Recipe, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.recipe = recipe
        model: Any = self.model
        self.ffns = [layer.mlp for layer in model.model.layers]
        self.clocks = [FiringClock(len(ffn.neuron_counts)) for ffn in self.ffns]
        self._step: list[Stats] | None = None  # per layer, summed over the micro-batches of a step
        self._losses: Tensor | None = None  # [2]: cross-entropy and L1 of a step
        self._last: list[Stats] = []  # of the last whole step
        self._logged_steps, self._logged_losses = 0, torch.zeros(2, dtype=torch.float64)
        self.remove_callback(PrinterCallback)
        self.add_callback(_SparsityCallback(self))

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Tensor | int | None = None
    ) -> Any:
        loss, out = super().compute_loss(model, inputs, return_outputs=True, num_items_in_batch=num_items_in_batch)
        if not model.training:
            loss = out.ce_loss  # validation is cross-entropy
        else:
            self._take_in(out)
        return (loss, out) if return_outputs else loss

    @torch.no_grad()
    def _take_in(self, out: Any) -> None:
        losses = torch.stack([out.ce_loss.detach().float(), out.l1_loss.detach().float()])
        self._losses = losses if self._losses is None else self._losses + losses
        seen = [Stats(s.l1_sum.detach(), s.counts, s.tokens) for s in out.sparsity]
        if self._step is not None:
            seen = [Stats(*(a + b for a, b in zip(x, y, strict=True))) for x, y in zip(self._step, seen, strict=True)]
        self._step = seen

    def finish_step(self) -> None:
        """After an optimiser step: advance the clocks, keep what the log will say, restart dead neurons.

        Nothing here waits for the device; numbers are read when they are logged.
        """
        assert self._step is not None and self._losses is not None
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(self._losses)
        self._logged_steps += 1
        self._logged_losses = self._logged_losses.to(self._losses.device) + self._losses
        for clock, stats in zip(self.clocks, self._step, strict=True):
            clock.advance(stats)
        self._last, self._step, self._losses = self._step, None, None
        step = self.state.global_step
        if self.recipe.restart_every and step % self.recipe.restart_every == 0:
            self._restart_dead_neurons(step)

    def _restart_dead_neurons(self, step: int) -> None:
        model: Any = self.model
        std = model.config.initializer_range
        for layer, (ffn, clock) in enumerate(zip(self.ffns, self.clocks, strict=True)):
            dead = clock.dead(self.recipe.dead_after_tokens)
            seed = hash((self.recipe.seed, step, layer)) & 0x7FFFFFFF  # of integers: the same in every process
            restart_neurons_(ffn, dead, std=std, seed=seed, optimizer=self.optimizer)
            clock.restart(dead)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs and self._logged_steps:
            active = [float(s.counts.sum()) / max(1, int(s.tokens)) for s in self._last]
            dead = [float(c.dead(self.recipe.dead_after_tokens).float().mean()) for c in self.clocks]
            logs["ce_loss"], logs["l1_loss"] = (self._logged_losses / self._logged_steps).tolist()
            logs["active_mean"] = sum(active) / len(active)
            logs["dead_share"] = sum(dead) / len(dead)
            logs |= {f"active/{i}": a for i, a in enumerate(active)}
            self._logged_steps, self._logged_losses = 0, torch.zeros_like(self._logged_losses)
        super().log(logs, *args, **kwargs)


class _SparsityCallback(TrainerCallback):
    def __init__(self, trainer: SparseTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._set_l1(state.global_step)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer.finish_step()
        self._set_l1(state.global_step)

    def _set_l1(self, step: int) -> None:
        recipe = self.trainer.recipe
        model: Any = self.trainer.model
        model.l1_scale = l1_warmup(step, recipe.l1_warmup_start, recipe.l1_warmup_end or None)

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if state.is_world_process_zero and logs:
            with (Path(args.output_dir) / METRICS_FILE).open("a", encoding="utf-8") as f:
                f.write(json.dumps({"step": state.global_step, **logs}) + "\n")
        if logs and not math.isfinite(logs.get("ce_loss", 0.0)):
            raise RuntimeError(f"the loss is {logs['ce_loss']} at step {state.global_step}: try a lower lr; stopped")

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last file of a checkpoint, moved into place whole: a folder without it was not finished."""
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            torch.save([clock.state_dict() for clock in self.trainer.clocks], folder / f"{CLOCKS_FILE}.part")
            (folder / f"{CLOCKS_FILE}.part").replace(folder / CLOCKS_FILE)


def latest_checkpoint(out: Path) -> Path | None:
    """The newest finished checkpoint of a run, or None."""
    finished = [p.parent for p in out.glob(f"checkpoint-*/{CLOCKS_FILE}")]
    return max(finished, key=lambda p: int(p.name.removeprefix("checkpoint-")), default=None)


def resume(trainer: SparseTrainer, checkpoint: Path) -> None:
    """Go on from a checkpoint, at the exact place in the data, to the end of the recipe."""
    for clock, state in zip(trainer.clocks, torch.load(checkpoint / CLOCKS_FILE), strict=True):
        clock.load_state_dict(state)
    trainer.train(resume_from_checkpoint=str(checkpoint))
