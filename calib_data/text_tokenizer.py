"""Tokenizers that encode documents: a byte-level BPE trained on a corpus, or one read from a tokenizer.json.

A trained tokenizer is like GPT-2's: an alphabet of bytes, GPT-2's regular expression for words, and no unknown token,
so decoding restores every byte. `<|endoftext|>` (id 0) is both bos and eos. It is saved as tokenizer.json and
tokenizer_config.json, which transformers' AutoTokenizer and onnxruntime-genai read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ..io.errors import DiffbitError
from ..io.files import parse_json, read_json, write_atomic, write_json
from ..io.tokenizer_files import TOKENIZER, open_tokenizer, tokenizer_errors, tokenizer_files

CONFIG = "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"
MIN_SIZE = 257  # 256 bytes and END_OF_TEXT


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer and the id that separates documents."""

    backend: tokenizers.Tokenizer
    eos_id: int
    sha256: str  # of tokenizer.json
    path: Path  # where it came from

    @property
    def vocab_size(self) -> int:
        """Number of ids, including added tokens: the number of rows that an embedding needs."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    def encode(self, documents: Iterable[str]) -> Iterator[np.ndarray]:
        """The token ids of each document, int64 [T], without special tokens around them."""
        iterator = iter(documents)
        while batch := list(islice(iterator, 64)):  # tokenizers spreads a batch over the cores
            with tokenizer_errors(self.path, "fails to encode a text"):
                encodings = self.backend.encode_batch(batch, add_special_tokens=False)
            for encoding in encodings:
                yield np.asarray(encoding.ids, dtype=np.int64)

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, with the eos token also as bos."""
        folder = Path(folder)
        with write_atomic(folder / "tokenizer.json") as temporary:
            temporary.write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        options: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        options |= dict.fromkeys(("bos_token", "eos_token"), self.backend.id_to_token(self.eos_id))
        options |= dict.fromkeys(("add_bos_token", "add_eos_token", "clean_up_tokenization_spaces"), False)
        write_json(folder / "tokenizer_config.json", options)


def train_tokenizer(documents: Iterable[str], vocab_size: int, folder: str | Path) -> TextTokenizer:
    """Train a byte-level BPE with `vocab_size` ids, save it in `folder` and return it.

    The same documents give the same file. A corpus that is too small gives fewer ids (`.vocab_size`). Raises
    DiffbitError for a vocabulary below MIN_SIZE.
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
    TextTokenizer(backend, eos_id=0, sha256="", path=Path(folder)).save(folder)
    return load_tokenizer(folder)


def load_tokenizer(path: str | Path) -> TextTokenizer:
    """Read a tokenizer.json. `path` is that file, or a model's folder or GGUF file that contains one.

    The eos token is the `eos_token` of tokenizer_config.json, else the `eos_token_id` of config.json, else END_OF_TEXT
    if the vocabulary has it. Raises DiffbitError for a file that is not a tokenizer, or has no eos token.
    """
    path = Path(path)
    files = tokenizer_files(path)
    if TOKENIZER not in files:
        raise DiffbitError(f"{path}: holds no {TOKENIZER}; wanted that file or a model that contains one")
    backend = open_tokenizer(files[TOKENIZER], path)
    eos_id = _eos_id(path if path.is_dir() else path.parent, files, backend)
    if eos_id is None:
        raise DiffbitError(f"{path}: the end-of-text token is unknown; set eos_token in tokenizer_config.json")
    return TextTokenizer(backend, eos_id, hashlib.sha256(files[TOKENIZER]).hexdigest(), path)


def _eos_id(folder: Path, files: Mapping[str, bytes], backend: tokenizers.Tokenizer) -> int | None:
    if CONFIG in files:
        token = parse_json(files[CONFIG], folder / CONFIG).get("eos_token")
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str) and (token_id := backend.token_to_id(token)) is not None:
            return int(token_id)
    if (folder / "config.json").is_file():
        ids = read_json(folder / "config.json").get("eos_token_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(first, int) and backend.id_to_token(first) is not None:
            return first
    token_id = backend.token_to_id(END_OF_TEXT)
    return None if token_id is None else int(token_id)
