"""``summary.json``: what a finished run reached, measured on the validation text, and where it ran."""

from __future__ import annotations

import dataclasses
import math
import platform
import statistics
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import transformers

from twell import __version__
from twell.train.recipes import Recipe

if TYPE_CHECKING:
    from twell.train.trainer import SparseTrainer


def summarise(
    trainer: SparseTrainer, metrics: list[dict[str, float]], seconds: float, bytes_a_token: float
) -> dict[str, Any]:
    """``metrics``: the run's log; ``seconds``: the time this process has trained."""
    recipe, stats = trainer.recipe, trainer.eval_stats
    model: Any = trainer.model
    validation_loss = last_evaluation(trainer)["eval_loss"]
    on_gpu = torch.cuda.is_available()
    speeds = [row["tokens_per_second"] for row in metrics if "tokens_per_second" in row]
    summary: dict[str, Any] = {
        "validation_loss": validation_loss,
        "bits_per_byte": validation_loss / math.log(2) / bytes_a_token,
        "tokens": recipe.steps * recipe.tokens_per_step,
        "tokens_per_second": statistics.median(speeds) if speeds else None,
        "seconds": seconds,
        "peak_gpu_gb": torch.cuda.max_memory_allocated() / 1e9 if on_gpu else None,
    }
    if stats:
        active = [int(s.counts.sum()) / int(s.tokens) for s in stats]
        mean = sum(active) / len(active)
        summary |= {
            "active": active,
            "active_mean": mean,
            "active_share": mean / recipe.intermediate_size,
            "dead_share": trainer.dead_share(),
            "silent_share": float(torch.cat([s.counts == 0 for s in stats]).float().mean()),  # on the validation text
        }
    if recipe.target_neurons is not None:
        summary["target"] = {"neurons": recipe.target_neurons, "l1": trainer.l1, **_held(recipe, metrics)}
    return summary | {
        "parameters": model.num_parameters(),
        "processes": trainer.args.world_size,
        "compiled": bool(trainer.args.torch_compile),
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "versions": {"twell": __version__, "torch": torch.__version__, "transformers": transformers.__version__},
        "recipe": dataclasses.asdict(recipe),
    }


def last_evaluation(trainer: SparseTrainer) -> dict[str, Any]:
    return next((row for row in reversed(trainer.state.log_history) if "eval_loss" in row), {})


def _held(recipe: Recipe, metrics: list[dict[str, float]]) -> dict[str, float]:
    """Least and most active neurons after the first third of the steps: of means over a twentieth of the log."""
    rows = [row for row in metrics if "active_mean" in row]
    logged, n = [row for row in rows if 3 * row["step"] >= recipe.steps], max(1, len(rows) // 20)
    means = [statistics.fmean(row["active_mean"] for row in logged[i : i + n]) for i in range(len(logged) - n + 1)]
    return {"least": min(means), "most": max(means)} if means else {}


def describe(summary: dict[str, Any]) -> str:
    """A summary in one line."""
    text = f"validation cross-entropy {summary['validation_loss']:.4f} ({summary['bits_per_byte']:.4f} bits per byte)"
    if "active_mean" in summary:
        text += (
            f"; {_short(summary['active_mean'])} active neurons a token ({summary['active_share']:.1%}), "
            f"{summary['dead_share']:.1%} dead"
        )
        if "least" in (target := summary.get("target", {})):
            wanted, least, most = target["neurons"], target["least"], target["most"]
            if least <= 1.1 * wanted and most >= 0.9 * wanted:
                text += f"; trained to {_short(wanted)}, held within {_short(least)} and {_short(most)}"
            else:
                text += f"; asked for {_short(wanted)}, not reached: {_short(least)} to {_short(most)}"
                text += f" (L1 ended at {target['l1']:.3g})"
    if conversion := summary.get("conversion"):
        text += f"; it was {conversion['loss_before']:.4f} before"
        if conversion["loss_after"] != conversion["loss_before"]:
            text += f" conversion, {conversion['loss_after']:.4f} right after"
    return text


def _short(n: float) -> str:
    """A number of neurons.

    >>> _short(5632), _short(25.61), _short(0.0123)
    ('5632', '25.6', '0.0123')
    """
    return f"{n:.0f}" if n >= 100 else f"{n:.3g}"


def bytes_a_token(tokens: np.ndarray, tokenizer: Any) -> float:
    """Bytes of text a token stands for; end-of-text tokens count as tokens of no bytes."""
    text = tokenizer.decode(tokens[tokens != tokenizer.eos_token_id].tolist(), clean_up_tokenization_spaces=False)
    return max(1, len(text.encode())) / len(tokens)
