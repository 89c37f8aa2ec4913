"""What a terminal shows of an answer: lines broken between words, thinking folded."""

from __future__ import annotations

import random
import textwrap

import pytest

from diffbit.apps.chat.terminal import Folded, Wrapped


def wrapped(text: str, columns: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown: list[str] = []
    lines = Wrapped(shown.append)
    for at in range(0, len(text), piece):
        lines.push(text[at : at + piece])
    lines.finish()
    return "".join(shown)


@pytest.mark.parametrize("columns", [8, 17, 40, 80])
def test_lines_are_those_of_textwrap(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(columns)
    for _ in range(20):
        words = ["x" * draw.randint(1, 9) for _ in range(draw.randint(1, 60))]
        text = " ".join(words)
        plain = textwrap.fill(text, columns, break_long_words=False, break_on_hyphens=False)
        assert wrapped(text, columns, draw.randint(1, 7), monkeypatch) == plain + "\n"


@pytest.mark.parametrize("piece", [1, 4, 1000])
def test_markdown_stays_readable(piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """\
1. The first of the items is long.
   - One below it is long, too.
> A quotation of many words

```python
def function(argument_one, argument_two):
    return "a long line of code stays"
```
| a table | stays, too, however wide |
日本語の文章は空白がない。ですね。
https://example.org/a/long/address and on
"""
    shown = """\
1. The first of the
   items is long.
   - One below it is
     long, too.
> A quotation of
  many words

```python
def function(argument_one, argument_two):
    return "a long line of code stays"
```
| a table | stays, too, however wide |
日本語の文章は空白が
ない。ですね。
https://example.org/a/long/address and
on
"""
    assert wrapped(text, 20, piece, monkeypatch) == shown


def folded(text: str, tags: tuple[str, ...], inside: str | None, piece: int) -> str:
    shown: list[str] = []
    answer = Folded(shown.append, lambda note: shown.append(f"<{note.strip()}>"), tags, inside)
    for at in range(0, len(text), piece):
        answer.push(text[at : at + piece])
    answer.finish()
    return "".join(shown)


TAGS = ("<think>", "<tool_call>")
THOUGHT, CALL = "<(thinking ...><0 s; /unfold shows it)>", "<(calling a tool ...><0 s; /unfold shows it)>"


@pytest.mark.parametrize("piece", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(
    ("text", "tags", "inside", "shown"),
    [
        ("<think>\na < b </thin\n</think>\n\nSo <b", TAGS, None, f"{THOUGHT}So <b"),
        ("hm</think>\n\nyes <thin", TAGS, "<think>", f"{THOUGHT}yes <thin"),
        ("<think>cut off", TAGS, None, THOUGHT),
        ("", TAGS, "<think>", THOUGHT),
        ("I call <tool_call>{}</tool_call>\n<tool_call>{}</tool_call>", TAGS, None, f"I call {CALL}{CALL}"),
        ("<think>a template that knows no tags</think>", (), None, "<think>a template that knows no tags</think>"),
    ],
)
def test_thinking_and_calls_are_folded(
    text: str, tags: tuple[str, ...], inside: str | None, shown: str, piece: int
) -> None:
    assert folded(text, tags, inside, piece) == shown
