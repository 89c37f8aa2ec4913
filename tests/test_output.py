"""Tables on terminals of 80 columns and in files."""

from __future__ import annotations

import io
import re
import sys
from typing import Any

import pytest

from diffbit.cli import print_table

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


@pytest.mark.parametrize("columns", [60, 80, 100])
def test_columns_that_do_not_fit_follow_below(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed(ROWS, monkeypatch, columns)
    assert max(map(len, lines)) <= columns
    headings = [re.split(r"\s*┃\s*", line.strip("┃ ")) for line in lines if line.startswith("┃")]
    assert len(headings) > 1 and sum(heading[0] == "model" for heading in headings) == len(headings)
    shown = [name for heading in headings for name in heading[2:]]
    assert shown == list(ROWS[0])[2:]  # each once, in order
    body = [line for line in lines if line.startswith("│")]
    assert len(body) == len(ROWS) * len(headings) and all("SmolLM2-135M-Instruct." in line for line in body)
    assert sum("a title" in line for line in lines) == 1


def test_a_wide_terminal_gets_one_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert sum(line.startswith("┃") for line in printed(ROWS, monkeypatch, 240)) == 1


def test_one_column_that_is_too_wide_folds(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = printed([{"text": "word " * 40, "number": 3}], monkeypatch, 80)
    assert max(map(len, lines)) <= 80 and "".join(lines).count("word") == 40
