"""The form of most chat templates: fixed texts around the messages of a conversation.

A template is a program, but most write "[system] user (assistant user)*" as fixed texts between the messages, and no
more. `chat_form` finds these texts: it renders two conversations whose messages can be recognized, and then compares
what the texts make of others with the template. `diffbit export` writes them into the manifest, so that a device
without Jinja can talk with the model (csrc/runtime/chat.cpp). docs/artifact.md describes the field.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from typing import Annotated

from ..io.errors import DiffbitError
from ..io.fields import one_of
from .template import ChatTemplate, Message

STRIPS = "", "left", "right", "both"


@dataclass(frozen=True)
class Slot:
    """What is written of a message: `text`, then its content, without blanks at the ends that `strip` names."""

    text: str
    strip: Annotated[str, one_of(*STRIPS)] = ""

    def of(self, content: str) -> str:
        content = content.lstrip() if self.strip in ("left", "both") else content
        return self.text + (content.rstrip() if self.strip in ("right", "both") else content)


@dataclass(frozen=True)
class ChatForm:
    """How a conversation whose questions are not blank is written, up to where the model's answer begins."""

    first: Slot  # the first message of the user, without a system prompt
    assistant: Slot
    user: Slot  # a later message of the user
    prompt: str  # after the last message
    system: Slot | None = None  # None: the template has no place for a system prompt before the first message
    after_system: Slot | None = None  # the first message of the user
    end: str = ""  # a token that ends an answer, beside the model's; empty: none

    def text(self, messages: Sequence[Message]) -> str:
        """Return the text of a conversation, [system] user (assistant user)*."""
        text, before = "", ""
        for message in messages:
            role = message["role"]
            slots = {"system": self.system, "assistant": self.assistant, "user": self.user}
            if role == "user" and before in ("", "system"):
                slots["user"] = self.first if before == "" else self.after_system
            slot = slots[role]
            assert slot is not None
            text += slot.of(message["content"])
            before = role
        return text + self.prompt


def chat_form(template: ChatTemplate) -> ChatForm | None:
    """Return the form of a template; None if it is not of this form, or cannot be rendered."""
    if "strftime_now" in template.source:  # it writes the day on which it is rendered
        return None
    try:
        form = _found(template)
        if form is not None and all(
            form.text(messages) == template.render(messages) for messages in _others(form, template)
        ):
            return form
    except DiffbitError:
        pass
    return None


def conversation(*contents: str, system: str | None = None) -> list[Message]:
    """Return the messages of a conversation; contents: the user's, the assistant's, and so on."""
    messages = [Message(role=role, content=content) for role, content in zip(cycle(("user", "assistant")), contents)]
    return ([] if system is None else [Message(role="system", content=system)]) + messages


SYSTEM, *TURNS = "qS0q", "qU1q", "qA2q", "qU3q"
LEFT, RIGHT = "\t\f", "\f\t"  # blanks around a content


def _found(template: ChatTemplate) -> ChatForm | None:
    """Return the texts around the messages of two conversations, one of them with a system prompt."""
    without = _slots(template, conversation(*TURNS))
    if without is None:
        return None
    (first, assistant, user), prompt = without
    form = ChatForm(first, assistant, user, prompt, end=template.special_tokens.get("eos_token", ""))
    try:
        with_system = _slots(template, conversation(*TURNS, system=SYSTEM))
    except DiffbitError:  # it refuses system prompts
        return form
    if with_system is None or (with_system[0][2:], with_system[1]) != ([assistant, user], prompt):
        return form
    return replace(form, system=with_system[0][0], after_system=with_system[0][1])


def _slots(template: ChatTemplate, messages: list[Message]) -> tuple[list[Slot], str] | None:
    """Return what is written of each message, and the text after the last."""
    contents = [message["content"] for message in messages]
    padded = [Message(role=one["role"], content=LEFT + one["content"] + RIGHT) for one in messages]
    texts, wide = (_between(template.render(one), contents) for one in (messages, padded))
    if texts is None or wide is None:
        return None
    # blanks that are kept around the text between two contents: of the one before it, and of the one behind it
    kept = [
        [(right, left) for right in (RIGHT, "") for left in (LEFT, "") if right + text + left == wider]
        for text, wider in zip(texts, wide, strict=True)
    ]
    if not all(kept):
        return None
    ends = [(before[0][1], behind[0][0]) for before, behind in pairwise(kept)]
    strips = {(LEFT, RIGHT): "", ("", RIGHT): "left", (LEFT, ""): "right", ("", ""): "both"}
    return [Slot(text, strips[end]) for text, end in zip(texts, ends, strict=False)], texts[-1]


def _between(text: str, contents: list[str]) -> list[str] | None:
    """Return the texts before, between and behind contents; None unless each is there once, in this order."""
    texts = []
    for content in contents:
        before, _, text = text.partition(content)
        texts.append(before)
    texts.append(text)
    return texts if not any(content in part for part in texts for content in contents) else None


def _others(form: ChatForm, template: ChatTemplate) -> Iterator[list[Message]]:
    """Return conversations of each length, with contents that templates may treat otherwise than words. Only an answer
    is blank: some templates strip more than the content, then, and nobody asks nothing."""
    odd = [" a ", "\n\nb\n", "\u00a0c\u2003", "0", "é漢🙂", "{{ x }}", "<think>d</think>e", "</think>"]
    slots = form.first, form.assistant, form.user, form.system, form.after_system
    odd += [slot.text.strip() or "a" for slot in slots if slot is not None]
    odd += [*template.special_tokens.values(), "[INST]", "<<SYS>>", "system", "user", "\r\nf\x1c"]
    for length in (1, 3, 5, 7):
        yield conversation(*map(str, range(length)))
    for content in ("", "  ", *odd):
        yield conversation("Hello", content, "And then?")
    for number, content in enumerate(odd):
        yield conversation(content)
        yield conversation(*[*odd[number:], *odd[:number]][:5])
    for system in odd if form.system is not None else ():
        yield conversation("Hello", system=system)
        yield conversation(" x ", " y ", " z ", system=system)
