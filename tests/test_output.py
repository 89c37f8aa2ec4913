"""Tables on terminals of 80 columns and in files."""

from __future__ import annotations

import io
import mmap
import re
import sys
from typing import Any

import numpy as np
import pytest
import torch

from diffbit.cli import print_table
from diffbit.cli.output import out_of_memory, print_error, remark

ROWS: list[dict[str, Any]] = [
    {"model": f"SmolLM2-135M-Instruct.{i}", "what": "weights", **{f"figure {k}": 1000.5 * k + i for k in range(9)}}
    for i in range(3)
]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, columns: int) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(sys, "stdout", Terminal())
    print_table(rows, title="a title")
    text = sys.stdout.getvalue()  # type: ignore[attr-defined]
    return re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines()


def tables(rows: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, columns: int) -> list[list[str]]:
    """The headings of each table."""
    lines = printed(rows, monkeypatch, columns)
    assert max(map(len, lines)) <= columns
    return [re.split(r"\s*┃\s*", line.strip("┃ ")) for line in lines if line.startswith("┃")]


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_columns_that_do_not_fit_follow_below(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(ROWS, monkeypatch, columns)
    headings = tables(ROWS, monkeypatch, columns)
    assert len(headings) > 1 and all(heading[0] == "model" for heading in headings)
    assert headings[0][1:] + [name for heading in headings[1:] for name in heading[1:]] == list(ROWS[0])[1:]
    body = [line for line in lines if line.startswith("│")]
    assert len(body) == len(ROWS) * len(headings) and all("SmolLM2-135M-Instruct." in line for line in body)
    assert sum("a title" in line for line in lines) == 1


def test_each_table_names_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first columns that no two rows have in common, and without those that are the same in all rows."""
    figures = {f"figure {k}": 1000.5 * k for k in range(9)}
    layers = [{"model": model, "layer": layer, **figures} for model in ("a", "b") for layer in range(2)]
    first, *others = tables(layers, monkeypatch, 60)
    assert others and all(heading[:2] == ["model", "layer"] for heading in (first, *others))
    formats = [{"model": "x" * 30, "what": "weights", "format": name, **figures} for name in ("int8", "int4")]
    first, *others = tables(formats, monkeypatch, 60)
    assert first[:3] == ["model", "what", "format"]
    assert others and all(heading[0] == "format" and heading[1].startswith("figure") for heading in others)
    assert tables([{"model": "a", **figures}], monkeypatch, 60)[1][0] == "model"


def test_a_wide_terminal_gets_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(line.startswith("┃") for line in printed(ROWS, monkeypatch, 240)) == 1


def test_columns_limit_a_file_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    print_table(ROWS)
    assert 100 < max(map(len, capsys.readouterr().out.splitlines())) <= 160
    monkeypatch.setenv("COLUMNS", "80")
    print_table(ROWS)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 80


def test_one_column_that_is_too_wide_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed([{"text": "word " * 40, "number": 3}], monkeypatch, 80)
    assert max(map(len, lines)) <= 80 and "".join(lines).count("word") == 40


def test_too_little_memory_is_a_sentence() -> None:
    with pytest.raises(RuntimeError) as torchs:
        torch.empty(1 << 56)
    with pytest.raises(MemoryError) as numpys:
        np.empty(1 << 56)
    for raised in (torchs, numpys):
        assert re.match(r"the memory does not suffice \(.*\); use a shorter context", out_of_memory(raised.value) or "")
    assert (out_of_memory(MemoryError()) or "").startswith("the memory does not suffice; use a shorter context")
    with pytest.raises(OSError) as mappings:
        mmap.mmap(-1, 1 << 56)
    assert (out_of_memory(mappings.value) or "").startswith("the memory does not suffice (Cannot allocate memory); use")
    assert out_of_memory(RuntimeError("a defect")) is None
    assert out_of_memory(FileNotFoundError(2, "No such file or directory")) is None


@pytest.mark.parametrize("columns", [30, 80])
def test_remarks_at_a_terminal_break_between_words(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/home/me/.cache/diffbit/63ea6401263984ec/SmolLM2-135M-Instruct"
    sentence = f"a model of many words and of numbers, 85% of them; kept in {path} until the folder :key: is deleted"
    monkeypatch.setenv("COLUMNS", str(columns))
    for write, begin in ((remark, ""), (print_error, "error: ")):
        monkeypatch.setattr(sys, "stderr", Terminal())
        write(sentence)
        text = re.sub(r"\x1b\[[0-9;]*m", "", sys.stderr.getvalue())  # type: ignore[attr-defined]
        lines = text.splitlines()
        assert " ".join(line.strip() for line in lines) == begin + sentence and len(lines) > 1
        assert all(len(line) <= columns or line == path for line in lines)
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        write(sentence)
        assert sys.stderr.getvalue() == f"{begin}{sentence}\n"  # type: ignore[attr-defined]
