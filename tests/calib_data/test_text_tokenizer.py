from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from diffbit.calib_data import END_OF_TEXT, load_tokenizer
from diffbit.io.errors import DiffbitError


@pytest.fixture
def folder(trained: Callable[[str], Path]) -> Path:
    return trained("softmax")


def test_eos_is_found_where_models_keep_it(folder: Path, tmp_path: Path) -> None:
    renamed = (folder / "tokenizer.json").read_text().replace(END_OF_TEXT, "</s>")
    (tmp_path / "tokenizer.json").write_text(renamed)
    with pytest.raises(DiffbitError, match="the end-of-text token is unknown"):
        load_tokenizer(tmp_path)
    for ids in (-1, 1 << 40):
        (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": ids}))
        with pytest.raises(DiffbitError, match="the end-of-text token is unknown"):
            load_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert load_tokenizer(tmp_path / "tokenizer.json").eos_id == 7
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "</s>"}}))
    assert load_tokenizer(tmp_path).eos_id == 0


def test_truncation_in_the_file_does_not_cut_a_corpus(folder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.backend.enable_truncation(4)
    tokenizer.backend.enable_padding(length=64)
    tokenizer.backend.save(str(tmp_path / "tokenizer.json"))
    (ids,) = load_tokenizer(tmp_path).encode(["def f(x):\n    return x + 1\n"])
    assert ids.tolist() == next(load_tokenizer(folder).encode(["def f(x):\n    return x + 1\n"])).tolist()


def test_bad_tokenizers(tmp_path: Path) -> None:
    with pytest.raises(DiffbitError, match=r"holds no tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(DiffbitError, match="is not a tokenizer"):
        load_tokenizer(tmp_path)
