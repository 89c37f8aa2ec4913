"""The text that methods calibrate on by default: its parts, hashes and order, dialogues in a model's template."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest

from diffbit.apps.train.new_tokenizer import train_tokenizer
from diffbit.calib_data import eval_windows, load_text
from diffbit.calib_data.mix import TEXT
from diffbit.cli.options import chat_template
from diffbit.io.errors import DiffbitError

TEMPLATE = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"


def rows(split: str, part: str) -> list[str]:
    return [json.loads(line).get("text", "") for line in (TEXT / split / f"{part}.jsonl").read_text().splitlines()]


def test_the_table_of_sources_has_the_hash_of_each_file() -> None:
    table = (TEXT / "README.md").read_text()
    for file in TEXT.glob("*/*.jsonl"):
        data = file.read_bytes()
        row = re.search(rf"\| {file.parent.name}/{file.name} \| (\d+) \| ([\d,]+) \| (\w+) \|", table)
        assert row is not None, file
        assert int(row[1]) == data.count(b"\n") and int(row[2].replace(",", "")) == len(data)
        assert row[3] == hashlib.sha256(data).hexdigest()


def test_calibration_text_has_nothing_of_the_evaluation_text() -> None:
    """Not a run of 60 characters of it."""
    calib, held_out = (load_text("mix", split).documents for split in ("calib", "eval"))
    whole = "\n".join(calib)
    assert not [
        text[i : i + 60] for text in held_out for i in range(0, len(text) - 60, 30) if text[i : i + 60] in whole
    ]


def test_a_few_windows_see_every_part() -> None:
    documents = load_text("mix", "calib").documents
    parts = {part: set(rows("calib", part)) for part in ("prose", "languages")}
    kinds = [
        next((part for part, texts in parts.items() if text in texts), "dialogue" if "User: " in text else "code")
        for text in documents
    ]
    size = len(kinds) // 4
    for start in range(0, len(kinds) - size, size):
        assert set(kinds[start : start + size]) == {"prose", "languages", "dialogue", "code"}
    shares = {kind: sum(len(t) for t, k in zip(documents, kinds, strict=True) if k == kind) for kind in set(kinds)}
    assert max(shares.values()) < 4 * min(shares.values()), shares


def test_dialogues_are_in_the_chat_template_of_the_model(tmp_path: Path) -> None:
    train_tokenizer(load_text("mix", "calib").documents, 300, tmp_path)
    without = load_text("mix", "eval", render=chat_template(tmp_path)).documents
    assert without == load_text("mix", "eval").documents
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    render = chat_template(tmp_path)
    documents = load_text("mix", "eval", render=render).documents
    assert sum(text.startswith("<|user|>") and text.endswith("</s>") for text in documents) == 10
    plain, chat = (eval_windows("mix", tmp_path, 64, 8, render=by).sha256 for by in (None, render))
    assert plain != chat


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (b"\xff\xfe{{", "cannot be read"),
        (b"{{ unclosed", "cannot render"),
        (b"{{ raise_exception('a system message must come first') }}", "a system message must come first"),
    ],
)
def test_an_unusable_template_is_reported_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], template: bytes, reason: str
) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(template)
    documents = load_text("mix", "eval", render=chat_template(tmp_path)).documents
    assert documents == load_text("mix", "eval").documents
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"{tmp_path}: conversations") and reason in line and line.count(str(tmp_path)) == 1


def test_nobody_trains_on_it() -> None:
    with pytest.raises(DiffbitError, match="train on another"):
        load_text("mix", "train")
