"""Trains a tokenizer: a byte-level BPE like GPT-2's, with an alphabet of bytes, GPT-2's regular expression for words,
and no unknown token, so decoding restores every byte."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ...calib_data import END_OF_TEXT, TextTokenizer, load_tokenizer
from ...io.errors import DiffbitError
from ...io.files import write_atomic, write_json

MIN_SIZE = 257  # 256 bytes and END_OF_TEXT


def train_tokenizer(documents: Iterable[str], vocab_size: int, folder: str | Path) -> TextTokenizer:
    """Train a tokenizer with `vocab_size` ids and return it.

    `folder` gets tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer and onnxruntime-genai
    read; END_OF_TEXT (id 0) is both bos and eos. The same documents give the same file. A corpus that is too small
    gives fewer ids (`.vocab_size`). Raises DiffbitError for a vocabulary below MIN_SIZE.
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
    save_tokenizer(TextTokenizer(backend, eos_id=0, sha256="", path=Path(folder)), folder)
    return load_tokenizer(folder)


def save_tokenizer(tokenizer: TextTokenizer, folder: str | Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, with the eos token also as bos."""
    with write_atomic(Path(folder, "tokenizer.json")) as temporary:
        temporary.write_text(tokenizer.backend.to_str(), encoding="utf-8")
    options: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    options |= dict.fromkeys(("bos_token", "eos_token"), tokenizer.backend.id_to_token(tokenizer.eos_id))
    options |= dict.fromkeys(("add_bos_token", "add_eos_token", "clean_up_tokenization_spaces"), False)
    write_json(Path(folder, "tokenizer_config.json"), options)
