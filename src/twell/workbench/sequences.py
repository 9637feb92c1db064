"""A text as sequences of token ids, for commands that run a model over the first tokens of a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

DEFAULT_LENGTH = 1024
_CHARACTERS = 32  # of a text for each token wanted: several times what a token takes

Text = str | Path | Sequence[int] | np.ndarray | Tensor


def sequences_of(
    tokenizer: Any, text: Text, tokens: int, length: int | None, context: int | None, *, shortest: int = 1
) -> Tensor:
    """int64 [sequences, length]: the first ``tokens`` tokens of a text, cut into sequences.

    ``text`` is the text itself, the ``Path`` of a file or folder (.txt, .jsonl, .parquet; an end-of-text token follows
    each document), or token ids. ``length`` defaults to 1024, or to the context or the text where that is shorter.
    Tokens at the end that fill no sequence are left out. A sequence has at least ``shortest`` tokens.
    """
    if tokens < shortest:
        raise ValueError(f"tokens must be at least {shortest}, got {tokens}")
    name = str(text) if isinstance(text, Path) else "the text"
    if isinstance(text, Path):
        text = _read_ids(tokenizer, text, tokens)
    elif isinstance(text, str):
        text = encode_beginning(tokenizer, text, tokens)
    if len(text) == 0:
        raise ValueError(f"{name} is empty")
    ids = torch.as_tensor(text)
    if ids.dim() != 1 or ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise ValueError(f"token ids must be integers [tokens], got {ids.dtype} {list(ids.shape)}")
    n_tokens = min(len(ids), tokens)
    if length is None:
        length = min(DEFAULT_LENGTH, context or DEFAULT_LENGTH, max(shortest, n_tokens))
    if length < shortest:
        raise ValueError(f"length must be at least {shortest}, got {length}")
    if length > tokens:
        raise ValueError(f"{tokens:,} tokens hold no sequence of {length:,}")
    if length > n_tokens:
        plural = "s"[: n_tokens != 1]
        raise ValueError(f"{name} holds {n_tokens:,} token{plural}: too few for one sequence of {length:,}")
    n_sequences = n_tokens // length
    return ids[: n_sequences * length].long().view(n_sequences, length)


def _read_ids(tokenizer: Any, path: Path, tokens: int) -> list[int]:
    """Token ids of the documents of a file or folder, up to the document that brings them to ``tokens``."""
    from twell.train.data import find_files, read_texts

    if tokenizer.eos_token_id is None:
        raise ValueError("the tokenizer has no end-of-text token")
    files = find_files([path])
    found: list[int] = []
    for text in (text for file in files for text in read_texts(file)):
        ids = encode_beginning(tokenizer, text, tokens)
        found += [*ids, tokenizer.eos_token_id] if ids else []
        if len(found) >= tokens:
            break
    return found


def encode_beginning(tokenizer: Any, text: str, tokens: int) -> list[int]:
    """Token ids of a text; of a long text, only those of its beginning, at least twice ``tokens``."""
    beginning = text[: _CHARACTERS * tokens]
    ids: list[int] = tokenizer.encode(beginning, add_special_tokens=False)
    if len(beginning) < len(text) and len(ids) < 2 * tokens:  # the last ids may belong to half a word
        ids = tokenizer.encode(text, add_special_tokens=False)
    return ids
