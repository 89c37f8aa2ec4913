"""Tokens and templates that other files than tokenizer.json hold: transformers' ids and texts, or a refusal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer

from diffbit.io.errors import DiffbitError
from diffbit.io.tokenizer_files import tokenizer_files
from diffbit.runtime import ChatTemplate

CLASS = {"tokenizer_class": "PreTrainedTokenizerFast"}
TOOL = {"content": "<tool>", "special": True, "normalized": False}
TEXT = "a <tool> b<end>a"


def folder(path: Path, **files: Any) -> Path:
    backend = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "b": 2}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(path / "tokenizer.json"))
    (path / "config.json").write_text('{"model_type": "llama"}')
    for name, content in ({"tokenizer_config": CLASS} | files).items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


@pytest.mark.parametrize(
    "files",
    [
        {
            "tokenizer_config": CLASS
            | {"added_tokens_decoder": {"3": TOOL, "4": {"content": "<end>", "special": False}}}
        },
        {"added_tokens": {"<end>": 4, "<tool>": 3}},
        {"special_tokens_map": {"additional_special_tokens": ["<tool>", "<end>"]}},
        {"tokenizer_config": CLASS | {"additional_special_tokens": ["<tool>", "<end>"]}},
        {},
    ],
    ids=["added_tokens_decoder", "added_tokens.json", "special_tokens_map.json", "tokenizer_config.json", "none"],
)
def test_added_tokens_of_every_place(files: dict[str, Any], tmp_path: Path) -> None:
    path = folder(tmp_path, **files)
    ours = Tokenizer.from_str(tokenizer_files(path)["tokenizer.json"].decode())
    theirs = AutoTokenizer.from_pretrained(path)
    assert ours.encode(TEXT).ids == theirs(TEXT)["input_ids"]
    assert bool(files) == ("<tool>" in ours.get_vocab())
    ids = ours.encode(TEXT).ids
    assert ours.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True)


def test_a_tokenizer_that_adds_all_of_them_stays_as_it_is(tmp_path: Path) -> None:
    path = folder(tmp_path, tokenizer_config=CLASS | {"added_tokens_decoder": {"3": TOOL}})
    whole = tokenizer_files(path)["tokenizer.json"]
    (path / "tokenizer.json").write_bytes(whole)
    assert tokenizer_files(path)["tokenizer.json"] == whole


def test_an_added_token_of_another_id_is_refused(tmp_path: Path) -> None:
    path = folder(tmp_path, tokenizer_config=CLASS | {"added_tokens_decoder": {"7": TOOL}})
    with pytest.raises(DiffbitError, match="the added token '<tool>' has id 7 in the files beside it, but 3 after"):
        tokenizer_files(path)


@pytest.mark.parametrize("apart", [False, True])
def test_named_templates(apart: bool, tmp_path: Path) -> None:
    """With tools, "tool_use" renders a conversation: of a folder, and of the files that an artifact holds."""
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
    loop = "{% for m in messages %}{{ m.content }}{% endfor %}"
    texts = {"default": "D" + loop, "tool_use": "T{{ tools | length }}" + loop}
    named = [{"name": name, "template": text} for name, text in texts.items()]
    path = folder(tmp_path, **({} if apart else {"tokenizer_config": CLASS | {"chat_template": named}}))
    if apart:  # as transformers 5 saves them
        (path / "chat_template.jinja").write_text(texts["default"])
        (path / "additional_chat_templates").mkdir()
        (path / "additional_chat_templates" / "tool_use.jinja").write_text(texts["tool_use"])
    copied = tmp_path / "copied"
    copied.mkdir()
    for name, data in tokenizer_files(path).items():
        (copied / name).write_bytes(data)
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    theirs = AutoTokenizer.from_pretrained(path)
    for source in (path, copied):
        template = ChatTemplate.read(source)
        for given in (None, tools):
            text = theirs.apply_chat_template(messages, tools=given, tokenize=False, add_generation_prompt=True)
            assert template.render(messages, tools=given) == text
        assert "tools" in template.names


@pytest.mark.parametrize("id", ["three", None, -1, 1.5, [3], "9" * 5000])
def test_ids_of_added_tokens_that_are_none(id: Any, tmp_path: Path) -> None:
    path = folder(tmp_path, added_tokens={"<tool>": id})
    with pytest.raises(DiffbitError, match=r"the added token '<tool>' has the id .*, wanted a number"):
        tokenizer_files(path)
