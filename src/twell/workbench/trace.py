"""Traces: which neurons of a model fire on a text, recorded, saved and read back.

A trace file is an ``.npz`` with two arrays per FFN layer L = 0, 1, ...

    counts_L    uint16 [tokens]          active neurons of each token
    neurons_L   uint16 [sum of counts]   their indices, token after token, ascending

``record`` adds ``hidden_L`` (the layer's width F), ``name_L`` and ``sequence_length``. A file holds neither
activations nor weights.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import zipfile
import zlib
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


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """Which neurons fired, layer by layer, tokens in order.

    ``hidden_sizes``, ``names`` (one a layer) and ``sequence_length`` are None where the file lacks them.

    >>> def u16(*values):
    ...     return np.array(values, dtype=np.uint16)
    >>> trace = Trace([u16(2, 0, 1)], [u16(0, 3, 3)], hidden_sizes=[4])
    >>> trace
    Trace(1 layer, 3 tokens, 1.0 neurons active)
    >>> trace.pattern(0).int().tolist()
    [[1, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 1]]
    """

    counts: list[np.ndarray]  # uint16 [tokens] each
    neurons: list[np.ndarray]  # uint16 [sum of counts] each
    hidden_sizes: list[int] | None = None
    names: list[str] | None = None
    sequence_length: int | None = None

    def __post_init__(self) -> None:
        if not self.counts:
            raise ValueError("a trace needs at least one layer")
        for what in (self.neurons, self.hidden_sizes, self.names):
            if what is not None and len(what) != len(self.counts):
                raise ValueError(f"{len(self.counts)} layers of counts, but {len(what)} of neurons, sizes or names")
        for layer in range(len(self.counts)):
            _check_layer(layer, self.counts[layer], self.neurons[layer], self.tokens)
            if self.hidden_sizes is not None:
                _check_width(layer, self.neurons[layer], self.hidden_sizes[layer])
        if self.sequence_length is not None and (self.sequence_length < 1 or self.tokens % self.sequence_length):
            raise ValueError(f"{self.tokens:,} tokens are not whole sequences of {self.sequence_length:,}")

    @property
    def layers(self) -> int:
        return len(self.counts)

    @property
    def tokens(self) -> int:
        return len(self.counts[0])

    def neuron_counts(self, layer: int, F: int | None = None) -> Tensor:
        """int64 [F]: for how many tokens each neuron of a layer fired."""
        return torch.from_numpy(np.bincount(self.neurons[layer], minlength=self._width(layer, F)))

    def pattern(self, layer: int, F: int | None = None) -> Tensor:
        """bool [tokens, F]: which neurons of a layer fired. Pass ``F`` if the trace does not hold it."""
        pattern = np.zeros((self.tokens, self._width(layer, F)), dtype=np.bool_)
        pattern[_token_of(self.counts[layer]), self.neurons[layer]] = True
        return torch.from_numpy(pattern)

    def summary(self, F: int | None = None) -> list[LayerSummary]:
        """A row for each layer. Pass ``F`` if the trace does not hold it."""
        rows = []
        for layer, counts in enumerate(self.counts):
            width = self._width(layer, F)
            firings = np.sort(np.bincount(self.neurons[layer], minlength=width))  # [F], the busiest last
            rows.append(
                LayerSummary(
                    layer=str(layer) if self.names is None else self.names[layer],
                    mean=float(counts.mean()),
                    p99=float(np.percentile(counts, 99)),
                    max=int(counts.max()),
                    dead=float((firings == 0).mean()),
                    top_tenth=float(firings[-max(1, round(width / 10)) :].sum() / max(1, firings.sum())),
                )
            )
        return rows

    def _width(self, layer: int, F: int | None) -> int:
        known = None if self.hidden_sizes is None else self.hidden_sizes[layer]
        width = known if F is None else F
        if width is None:
            raise ValueError("the trace does not hold the width of its layers: pass F")
        if known not in (None, width):
            raise ValueError(f"layer {layer} has {known:,} neurons, not {width:,}")
        _check_width(layer, self.neurons[layer], width)
        return width

    def save(self, path: Path | str) -> None:
        """Write the trace to a file, which is replaced only once the new one is complete."""
        path = Path(path).resolve()  # write the file that a link points to, not the link
        if path.exists() and not path.is_file():  # do not replace a device by a file
            raise ValueError(f"{path} is not a file: choose another name")
        arrays: dict[str, Any] = {}
        for layer in range(self.layers):
            arrays[f"counts_{layer}"] = self.counts[layer]
            arrays[f"neurons_{layer}"] = self.neurons[layer]
            if self.hidden_sizes is not None:
                arrays[f"hidden_{layer}"] = np.array(self.hidden_sizes[layer])
            if self.names is not None:
                arrays[f"name_{layer}"] = np.array(self.names[layer])
        if self.sequence_length is not None:
            arrays["sequence_length"] = np.array(self.sequence_length)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                np.savez_compressed(file, **arrays)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: Path | str) -> Trace:
        """Read a trace file, with or without the arrays that ``record`` adds."""
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        if not zipfile.is_zipfile(path):
            raise ValueError(f"{path} is not a complete .npz file")
        try:
            with np.load(path, allow_pickle=False) as file:
                n_layers = sum(name.startswith("counts_") for name in file.files)

                def each(what: str) -> list[np.ndarray]:
                    return [file[f"{what}_{layer}"] for layer in range(n_layers)]

                def has(what: str) -> bool:
                    return all(f"{what}_{layer}" in file.files for layer in range(n_layers))

                return cls(
                    counts=each("counts"),
                    neurons=each("neurons"),
                    hidden_sizes=[int(size) for size in each("hidden")] if has("hidden") else None,
                    names=[str(name) for name in each("name")] if has("name") else None,
                    sequence_length=int(file["sequence_length"]) if "sequence_length" in file.files else None,
                )
        except KeyError as error:
            raise ValueError(f"{path} is not a trace: {error.args[0]}") from None
        except (ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise ValueError(f"{path}: {error}") from None

    def __repr__(self) -> str:
        means = [float(counts.mean()) for counts in self.counts]
        low, high = f"{min(means):.1f}", f"{max(means):.1f}"
        active = low if low == high else f"{low} to {high}"
        return f"Trace({self.layers} layer{'s'[: self.layers > 1]}, {self.tokens:,} tokens, {active} neurons active)"


def _check_layer(layer: int, counts: np.ndarray, neurons: np.ndarray, tokens: int) -> None:
    for name, array in (("counts", counts), ("neurons", neurons)):
        if array.dtype != np.uint16 or array.ndim != 1:
            raise ValueError(f"{name}_{layer} must be uint16 and flat, got {array.dtype} {list(array.shape)}")
    if len(counts) == 0 or len(counts) != tokens:
        raise ValueError(f"counts_{layer} holds {len(counts):,} tokens, counts_0 {tokens:,}")
    total = int(counts.sum(dtype=np.int64))
    if total != len(neurons):
        raise ValueError(f"neurons_{layer} holds {len(neurons):,} indices, but counts_{layer} sums to {total:,}")
    token = _token_of(counts)
    falls = (neurons[1:] <= neurons[:-1]) & (token[1:] == token[:-1])
    if falls.any():
        raise ValueError(f"neurons_{layer} does not ascend within token {token[int(falls.argmax())]:,}")


def _check_width(layer: int, neurons: np.ndarray, F: int) -> None:
    if not 0 < F <= MAX_WIDTH:
        raise ValueError(f"layer {layer}: a trace holds 1 to {MAX_WIDTH:,} neurons a layer, not {F:,}")
    if len(neurons) and int(neurons.max()) >= F:
        raise ValueError(f"neurons_{layer} names neuron {int(neurons.max()):,} of a layer of {F:,}")


def _token_of(counts: np.ndarray) -> np.ndarray:
    """int32 [sum of counts]: the token each entry belongs to."""
    return np.repeat(np.arange(len(counts), dtype=np.int32), counts)


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
        sequence_length=length,
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
