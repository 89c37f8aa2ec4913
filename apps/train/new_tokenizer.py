"""Trains a tokenizer: a byte-level BPE like GPT-2's, with an alphabet of bytes, GPT-2's regular expression for words,
and no unknown token, so decoding restores every byte."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ...calib_data import END_OF_TEXT, TextTokenizer, load_tokenizer
from ...io.errors import DiffbitError
from ...io.files import write_atomic

MIN_SIZE = 257  # 256 bytes and END_OF_TEXT


def train_tokenizer(documents: Iterable[str], vocab_size: int, folder: str | Path) -> TextTokenizer:
    """Train a tokenizer as `trained` does, write its files into `folder`, and return it."""
    for name, data in trained(documents, vocab_size).items():
        with write_atomic(Path(folder, name)) as temporary:
            temporary.write_bytes(data)
    return load_tokenizer(folder)


def trained(documents: Iterable[str], vocab_size: int) -> dict[str, bytes]:
    """Train a tokenizer with `vocab_size` ids, and return its files by name.

    They are tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer and onnxruntime-genai read;
    END_OF_TEXT (id 0) is both bos and eos. The same documents give the same files. A corpus that is too small gives
    fewer ids. Raises DiffbitError for a vocabulary below MIN_SIZE.
    """
    if vocab_size < MIN_SIZE:
        raise DiffbitError(f"a byte-level vocabulary of {vocab_size} ids is too small; pass {MIN_SIZE} or more")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(documents, trainer)
    return files_of(backend, 0)


def files_of(backend: tokenizers.Tokenizer, eos_id: int) -> dict[str, bytes]:
    """Return a tokenizer's files by name, with the eos token also as bos."""
    options: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    options |= dict.fromkeys(("bos_token", "eos_token"), backend.id_to_token(eos_id))
    options |= dict.fromkeys(("add_bos_token", "add_eos_token", "clean_up_tokenization_spaces"), False)
    texts = {"tokenizer.json": backend.to_str(), "tokenizer_config.json": json.dumps(options, indent=2) + "\n"}
    return {name: text.encode() for name, text in texts.items()}
