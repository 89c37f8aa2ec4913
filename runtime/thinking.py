"""Splits the answer of a model that thinks, as it comes, into what it thinks and what it says:

    <think>
    The user greets me.
    </think>

    Hello!

Some templates end the prompt with <think>, so that the answer begins inside. Lines around the tags belong to neither
part.
"""

from __future__ import annotations

from typing import Literal

BEGIN, END = "<think>", "</think>"
Kind = Literal["thinking", "text"]


def begins_thinking(prompt: str) -> bool:
    """Whether an answer to this rendered prompt begins with thinking."""
    return prompt.rstrip().endswith(BEGIN)


class ThinkingReader:
    """Reads an answer in pieces. inside: whether it begins with thinking."""

    def __init__(self, inside: bool = False) -> None:
        self._state: Literal["begin", "thinking", "text"] = "thinking" if inside else "begin"
        self._is_fresh = True  # whether nothing of the current part has been returned yet
        self._pending = ""

    def push(self, text: str, last: bool = False) -> list[tuple[Kind, str]]:
        """Add text -> what is final of it. last: there is no more."""
        self._pending += text
        parts: list[tuple[Kind, str]] = []
        if self._state == "begin":
            begun = self._pending.lstrip()
            if begun.startswith(BEGIN):
                self._pending, self._state = begun.removeprefix(BEGIN), "thinking"
            elif not BEGIN.startswith(begun) or last:
                self._state, self._is_fresh = "text", False
        if self._state == "thinking":
            thought, end, after = self._pending.partition(END)
            if end or last:
                final = thought.rstrip()
            else:  # what may belong to the end is held back: spaces, and the beginning of the tag
                unfinished = max((count for count in range(1, len(END)) if thought.endswith(END[:count])), default=0)
                final = thought[: len(thought) - unfinished].rstrip()
            parts += self._part("thinking", final)
            self._pending = after if end else thought[len(final) :]
            if end:
                self._state, self._is_fresh = "text", True
        if self._state == "text":
            parts += self._part("text", self._pending)
            self._pending = ""
        return parts

    def _part(self, kind: Kind, text: str) -> list[tuple[Kind, str]]:
        text = text.lstrip("\n") if self._is_fresh else text
        self._is_fresh = self._is_fresh and not text
        return [(kind, text)] if text else []
