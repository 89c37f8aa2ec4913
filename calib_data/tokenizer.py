"""Tokenizers: train a byte-level BPE on a corpus, or read a tokenizer.json, and encode documents.

A trained tokenizer is GPT-2's: bytes as the alphabet, GPT-2's pre-splitting expression, no unknown token, decoding
gives back every byte. `<|endoftext|>` (id 0) is beginning and end of a document at once. Saved as tokenizer.json and
tokenizer_config.json, which transformers' AutoTokenizer and onnxruntime-genai read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ..errors import DiffbitError
from ..files import read_json, sha256_file, write_atomic, write_json

END_OF_TEXT = "<|endoftext|>"
SMALLEST = 257  # every byte, and END_OF_TEXT


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer and the id that separates documents."""

    backend: tokenizers.Tokenizer
    eos_id: int
    sha256: str  # of tokenizer.json

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included: the rows that an embedding needs."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, documents: Iterable[str]) -> Iterator[np.ndarray]:
        """The token ids of each document, int64, with no special token put around them."""
        iterator = iter(documents)
        while batch := list(islice(iterator, 64)):  # a batch is spread over the cores
            for encoding in self.backend.encode_batch(batch, add_special_tokens=False):
                yield np.asarray(encoding.ids, dtype=np.int64)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, with the separator as bos and eos."""
        folder = Path(folder)
        with write_atomic(folder / "tokenizer.json") as temporary:
            temporary.write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        token = self.backend.id_to_token(self.eos_id)
        write_json(
            folder / "tokenizer_config.json",
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": token,
                "eos_token": token,
                "add_bos_token": False,
                "add_eos_token": False,
                "clean_up_tokenization_spaces": False,
            },
        )


def train_tokenizer(documents: Iterable[str], vocab_size: int, folder: str | Path) -> TextTokenizer:
    """Train a byte-level BPE of `vocab_size` ids, save it into `folder` and return it.

    The same documents give the same file. A corpus too small for that many merges gives fewer ids: see `.vocab_size`.
    """
    if vocab_size < SMALLEST:
        raise DiffbitError(f"a byte-level vocabulary of {vocab_size} ids is too small; pass {SMALLEST} or more")
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
    TextTokenizer(backend, eos_id=0, sha256="").save(folder)
    return load_tokenizer(folder)


def load_tokenizer(path: str | Path) -> TextTokenizer:
    """Read a tokenizer.json, given as itself or as the model folder that holds it.

    The end of a document is the `eos_token` of tokenizer_config.json, or else the `eos_token_id` of config.json, or
    else END_OF_TEXT if the vocabulary has it.
    """
    path = Path(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise DiffbitError(f"{file}: no such file; a tokenizer is a tokenizer.json or a model folder that holds one")
    try:
        backend = tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises bare Exception
        raise DiffbitError(f"{file}: is not a tokenizer ({error}); restore the file") from None
    backend.no_padding()
    backend.no_truncation()  # a file may carry both; neither may touch a corpus
    eos_id = _eos_id(file.parent, backend)
    if eos_id is None:
        raise DiffbitError(
            f"{file}: no end-of-text token is known; name an eos_token of its vocabulary in tokenizer_config.json"
        )
    return TextTokenizer(backend, eos_id, sha256_file(file))


def _eos_id(folder: Path, backend: tokenizers.Tokenizer) -> int | None:
    if (folder / "tokenizer_config.json").is_file():
        token: Any = read_json(folder / "tokenizer_config.json").get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str) and (found := backend.token_to_id(token)) is not None:
            return int(found)
    if (folder / "config.json").is_file():
        ids: Any = read_json(folder / "config.json").get("eos_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(first, int) and backend.id_to_token(first) is not None:
            return first
    found = backend.token_to_id(END_OF_TEXT)
    return None if found is None else int(found)
