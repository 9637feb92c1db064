"""Traces: which neurons of a model fire on a text, token by token."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from twell.nn import SparseFFNBase, sparse_ffns
from twell.progress import Progress, silent
from twell.workbench.sequences import sequences_of

MAX_WIDTH = int(np.iinfo(np.uint16).max)  # a count can be as large as F
_ROWS_AT_ONCE = 1024  # tokens whose active neurons are listed in one step


class LayerSummary(NamedTuple):
    """Numbers of one layer."""

    layer: str
    mean: float  # active neurons a token
    p99: float
    max: int
    dead: float  # share of neurons that never fired
    top_tenth: float  # share of all firings that the busiest tenth of the neurons carries


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """Which neurons fired, layer by layer, tokens in order. All lists have an entry a layer.

    >>> def u16(*values):
    ...     return np.array(values, dtype=np.uint16)
    >>> Trace([u16(2, 0, 1)], [u16(0, 3, 3)], hidden_sizes=[4], names=["ffn"]).pattern(0).int().tolist()
    [[1, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 1]]
    """

    counts: list[np.ndarray]  # uint16 [tokens]: active neurons of each token
    neurons: list[np.ndarray]  # uint16 [sum of counts]: their indices, token after token, ascending
    hidden_sizes: list[int]
    names: list[str]

    @property
    def layers(self) -> int:
        return len(self.counts)

    @property
    def tokens(self) -> int:
        return len(self.counts[0])

    def neuron_counts(self, layer: int) -> Tensor:
        """int64 [F]: for how many tokens each neuron of a layer fired."""
        return torch.from_numpy(np.bincount(self.neurons[layer], minlength=self.hidden_sizes[layer]))

    def pattern(self, layer: int) -> Tensor:
        """bool [tokens, F]: which neurons of a layer fired."""
        pattern = np.zeros((self.tokens, self.hidden_sizes[layer]), dtype=np.bool_)
        pattern[np.repeat(np.arange(self.tokens), self.counts[layer]), self.neurons[layer]] = True
        return torch.from_numpy(pattern)

    def summary(self) -> list[LayerSummary]:
        """A row for each layer."""
        rows = []
        for layer, (name, counts, width) in enumerate(zip(self.names, self.counts, self.hidden_sizes, strict=True)):
            firings = self.neuron_counts(layer).sort().values  # [F], the busiest last
            rows.append(
                LayerSummary(
                    layer=name,
                    mean=float(counts.mean()),
                    p99=float(np.percentile(counts, 99)),
                    max=int(counts.max()),
                    dead=float((firings == 0).double().mean()),
                    top_tenth=float(firings[-max(1, round(width / 10)) :].sum()) / max(1, int(firings.sum())),
                )
            )
        return rows


# -- recording ----------------------------------------------------------------------------------------------


def record(model: nn.Module, input_ids: Tensor, *, batch_size: int = 8, progress: Progress = silent) -> Trace:
    """Run ``model`` over ``input_ids`` [sequences, length] and record which neurons of each FFN fire.

    The model may be sparse, or dense with FFNs that ``sparsify_`` would replace. FFNs that it would skip are left out;
    ``Trace.names`` lists the recorded ones. The output of the gate projection is recorded, adapters and hooks
    included, so sparse FFNs call their projections one by one during the recording. The model's state is restored even
    if an error is raised. ``progress`` gets the number of sequences.
    """
    base: Any = getattr(model, "base_model", model)  # without the head: its logits are not needed
    _check_input(model, input_ids, batch_size)
    n_sequences, length = input_ids.shape
    with torch.no_grad(), _evaluating(model), contextlib.ExitStack() as hooks:
        layers = _find_layers(base)
        for layer in layers:
            hooks.enter_context(layer.gate.register_forward_hook(layer))
        for start in range(0, n_sequences, batch_size):
            done = min(start + batch_size, n_sequences)
            base(input_ids=input_ids[start:done].to(base.device), use_cache=False)
            for layer in layers:
                layer.check_tokens(done * length)
            progress(done, n_sequences)
    return Trace(
        counts=[np.concatenate(layer.counts) for layer in layers],
        neurons=[np.concatenate(layer.neurons) for layer in layers],
        hidden_sizes=[layer.width for layer in layers],
        names=[layer.name for layer in layers],
    )


def record_text(
    model: nn.Module,
    tokenizer: Any,
    text: Path,
    *,
    length: int | None = None,
    tokens: int = 8192,
    progress: Progress = silent,
) -> Trace:
    """``record`` the first ``tokens`` tokens of a file or folder; see ``sequences_of``."""
    from twell.hf.text import context_of

    input_ids = sequences_of(tokenizer, text, tokens, length, context_of(model))
    return record(model, input_ids, batch_size=1, progress=progress)


def _check_input(model: Any, input_ids: Tensor, batch_size: int) -> None:
    from twell.hf.text import context_of

    if not hasattr(model, "get_input_embeddings"):
        raise ValueError(f"expected a transformers model, got {type(model).__name__}")
    if input_ids.dim() != 2 or input_ids.numel() == 0 or input_ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"input_ids must be integers [sequences, length], got {input_ids.dtype} {list(input_ids.shape)}"
        )
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    vocab_size = model.get_input_embeddings().weight.shape[0]
    low, high = int(input_ids.min()), int(input_ids.max())
    if low < 0 or high >= vocab_size:
        raise ValueError(
            f"token {low if low < 0 else high:,} is not in the model's vocabulary, which ends at {vocab_size - 1:,}: "
            f"was the text encoded by another tokenizer?"
        )
    context = context_of(model)
    if context is not None and input_ids.shape[1] > context:
        raise ValueError(f"sequences of {input_ids.shape[1]:,} tokens exceed the model's context of {context:,}")


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without running counts; afterwards each module is in its own mode again."""
    ffns = [ffn for _, ffn in sparse_ffns(model)]  # model.modules() lacks FFNs whose block runs the projections
    training = [(module, module.training) for module in (*model.modules(), *ffns)]
    counting = [ffn for ffn in ffns if ffn.track_counts]
    model.eval()
    for ffn in counting:
        ffn.track_counts = False
    try:
        yield
    finally:
        for module, was_training in training:
            module.training = was_training
        for ffn in counting:
            ffn.track_counts = True


class _Recorder:
    """Forward hook on the projection that the activation follows; it records the active neurons of one FFN."""

    def __init__(self, name: str, gate: Any) -> None:
        self.name, self.gate, self.width = name, gate, int(gate.out_features)
        if self.width > MAX_WIDTH:
            raise ValueError(f"{name} has {self.width:,} neurons; a trace holds at most {MAX_WIDTH:,} a layer")
        self.counts: list[np.ndarray] = []
        self.neurons: list[np.ndarray] = []

    def __call__(self, gate: nn.Module, args: tuple[Any, ...], z: Tensor) -> None:
        if z.shape[-1] != self.width:  # tensor parallel: each process computes a part of the neurons
            raise ValueError(f"{self.name} computed {z.shape[-1]:,} of {self.width:,} neurons: a trace needs all")
        active_MF = (torch.relu(z) != 0).flatten(0, -2)
        self.counts.append(active_MF.sum(1).cpu().numpy().astype(np.uint16))
        for rows in active_MF.split(_ROWS_AT_ONCE):
            self.neurons.append(rows.nonzero()[:, 1].cpu().numpy().astype(np.uint16))

    def check_tokens(self, expected: int) -> None:
        tokens = sum(map(len, self.counts))
        if tokens != expected:
            raise ValueError(
                f"{self.name} computed {tokens:,} tokens, the model {expected:,}: "
                f"only an FFN that computes every token once can be recorded"
            )


def _find_layers(model: nn.Module) -> list[_Recorder]:
    """Every FFN that is sparse or that ``sparsify_`` would replace, in the model's order."""
    from twell.hf.classify import find_ffns, projection_names
    from twell.hf.inline import InlineFFN
    from twell.hf.sparsify import NONE_FOUND

    sparse = dict(sparse_ffns(model))
    for name, ffn in sparse.items():
        why = ffn.why_activation_called() if isinstance(ffn, InlineFFN) else None
        if why is not None:
            raise ValueError(f"{name} cannot be recorded: {why}")
    dense = {name for name, *_ in find_ffns(model)} - sparse.keys()
    layers, skipped = [], []
    for name, block in list(model.named_modules()):
        why = _why_left_out(block) if name in dense else None
        if why is not None:
            skipped.append(f"{name} ({why})")
        elif name in dense or name in sparse:
            names = block.projections if isinstance(block, SparseFFNBase) else projection_names(block)
            layers.append(_Recorder(name, getattr(block, names[0])))
    if not layers:
        more = f" and {len(skipped) - 1} more" if len(skipped) > 1 else ""
        raise ValueError(f"nothing to record: {skipped[0] + more if skipped else NONE_FOUND}")
    return layers


def _why_left_out(block: nn.Module) -> str | None:
    """Why ``sparsify_`` would skip a dense block, or None. Found by replacing the block and undoing that."""
    from twell.hf.sparsify import desparsify_, sparsify_

    stand_in = nn.ModuleList([block])  # stands in for the model
    row = sparsify_(stand_in).rows[0]
    if row.became is None:
        return row.why
    desparsify_(stand_in, restore_layout=False)
    return None
