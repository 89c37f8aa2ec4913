"""A trained tokenizer gives back every byte, is the same each time, and is what transformers reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from diffbit.apps.train.new_tokenizer import train_tokenizer
from diffbit.calib_data import END_OF_TEXT, load_text, load_tokenizer
from diffbit.io.errors import DiffbitError

TEXTS = [
    "def f(x):\n    return x + 1\n",
    "naïve ☃ \x00 text\t\r\n",
    "  leading",
    "<|endoftext|>-like",
    " a  b   c\n\n\n",
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    train_tokenizer(load_text("stdlib", "train", limit=300_000).documents, 512, folder)
    return folder


def test_trained_tokenizer_gives_back_every_byte_and_is_reproducible(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.vocab_size == 512
    assert tokenizer.eos_id == tokenizer.backend.token_to_id(END_OF_TEXT) == 0
    ids = list(tokenizer.encode(TEXTS))
    assert [tokenizer.backend.decode(document.tolist(), skip_special_tokens=False) for document in ids] == TEXTS
    assert len(ids[0]) < len(TEXTS[0]) / 1.5
    again = train_tokenizer(load_text("stdlib", "train", limit=300_000).documents, 512, tmp_path)
    assert again.sha256 == tokenizer.sha256


def test_transformers_reads_it(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    for text, ids in zip(TEXTS, ours.encode(TEXTS), strict=True):
        assert theirs(text)["input_ids"] == ids.tolist()
        assert theirs.decode(ids) == text
    assert theirs.bos_token_id == theirs.eos_token_id == ours.eos_id


def test_too_small_a_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DiffbitError, match="pass 257 or more"):
        train_tokenizer(["a"], 256, tmp_path)
    assert not list(tmp_path.iterdir())
