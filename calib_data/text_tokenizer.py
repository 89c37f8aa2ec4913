"""Tokenizers that encode documents, read from a tokenizer.json."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import tokenizers

from ..io.errors import DiffbitError
from ..io.files import parse_json, read_json
from ..io.tokenizer_files import TOKENIZER, open_tokenizer, tokenizer_errors, tokenizer_files

CONFIG = "tokenizer_config.json"
END_OF_TEXT = "<|endoftext|>"


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
        """Return the token ids of each document, int64 [T], without special tokens around them."""
        iterator = iter(documents)
        while batch := list(islice(iterator, 64)):  # tokenizers spreads a batch over the cores
            with tokenizer_errors(self.path, "fails to encode a text"):
                encodings = self.backend.encode_batch(batch, add_special_tokens=False)
            for encoding in encodings:
                yield np.asarray(encoding.ids, dtype=np.int64)


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
        if isinstance(first, int) and 0 <= first < 1 << 32 and backend.id_to_token(first) is not None:
            return first
    token_id = backend.token_to_id(END_OF_TEXT)
    return None if token_id is None else int(token_id)
