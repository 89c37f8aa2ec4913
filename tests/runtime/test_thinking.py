"""Answers of models that think are split as they come, wherever the pieces are cut."""

from __future__ import annotations

import pytest

from diffbit.runtime.thinking import ThinkingReader, begins_thinking

CASES = [  # answer, whether the prompt has opened it, thinking, text
    ("<think>\nHm, a < b.\n</think>\n\nHello <think> you", False, "Hm, a < b.", "Hello <think> you"),
    ("Hm.\n</think>\n\n  Hello\n", True, "Hm.", "  Hello\n"),
    (" \n<think>\n\n</think>\n\nHello", False, "", "Hello"),
    ("<think>it never ends </thi", False, "it never ends </thi", ""),
    ("Hello, <think>no</think>", False, "", "Hello, <think>no</think>"),
    ("  <thinking is hard", False, "", "  <thinking is hard"),
    ("a </think", True, "a </think", ""),
    ("  ", False, "", "  "),
    ("a\n\n b", True, "a\n\n b", ""),
    ("", True, "", ""),
]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize(("answer", "inside", "thinking", "text"), CASES)
def test_answers_are_split(answer: str, inside: bool, thinking: str, text: str, size: int) -> None:
    reader = ThinkingReader(inside)
    parts = [part for at in range(0, len(answer), size) for part in reader.push(answer[at : at + size])]
    parts += reader.push("", last=True)
    joined = {kind: "".join(part for of, part in parts if of == kind) for kind in ("thinking", "text")}
    assert joined == {"thinking": thinking, "text": text} and all(part for _, part in parts)


def test_text_comes_at_once() -> None:
    reader = ThinkingReader()
    assert reader.push("<think>a") == [("thinking", "a")]
    assert reader.push(" b<") == [("thinking", " b")] and reader.push("c") == [("thinking", "<c")]
    assert reader.push("</think>\n") == [] and reader.push("d") == [("text", "d")]


def test_prompts_may_open_thinking() -> None:
    assert begins_thinking("assistant\n<think>\n") and not begins_thinking("<think>\n\n</think>\n\n")
