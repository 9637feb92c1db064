"""Tokenizers: one of transformers', a ``tokenizer.json``, or a small BPE trained on the data."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from twell.hf.loading import model_path, reading
from twell.train.data import END_OF_TEXT


def load_tokenizer(name_or_path: str | Path) -> PreTrainedTokenizerBase:
    """A tokenizer by hub name, folder, or path of a ``tokenizer.json``. It must have an end-of-text token."""
    name = model_path(str(name_or_path))
    path = Path(name)
    if path.suffix == ".json":
        if not path.is_file():
            raise FileNotFoundError(f"{path} does not exist")
        try:
            tokenizer: PreTrainedTokenizerBase = PreTrainedTokenizerFast(tokenizer_file=str(path))
        except Exception as error:  # the library raises a bare Exception
            raise ValueError(f"{path} is not a tokenizer.json: {error}") from None
        if END_OF_TEXT in tokenizer.get_vocab():
            tokenizer.eos_token = tokenizer.bos_token = tokenizer.pad_token = END_OF_TEXT
    else:
        with reading(f"the tokenizer of {name_or_path}"):
            tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"{name_or_path}: the tokenizer has no end-of-text token")
    return tokenizer


def train_bpe(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE of at most ``vocab_size`` tokens, which can encode any text. Token 0 is end-of-text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if vocab_size < len(alphabet) + 1:
        raise ValueError(f"vocab_size must be at least {len(alphabet) + 1}, got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    special = {"eos_token": END_OF_TEXT, "bos_token": END_OF_TEXT, "pad_token": END_OF_TEXT}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)
