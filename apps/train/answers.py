"""Which tokens of conversations a run learns: those of the assistant's messages, with what the chat template puts
around them, such as the token that ends a message. What users and systems write is read, but not learned: a model that
learns it, too, answers a message by repeating it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from ...calib_data import Conversation, TextTokenizer
from ...io.tokenizer_files import tokenizer_errors


def learned_tokens(documents: Iterable[str], tokenizer: TextTokenizer, render: Callable[[Any], str]) -> np.ndarray:
    """Return whether each token of the stream `eos d1 eos d2 ... eos` is learned, bool [T]. All are but those of
    conversations that are not the assistant's, and the eos behind a conversation."""
    parts: list[np.ndarray] = [np.ones(1, dtype=bool)]
    for learned in learned_of_each(documents, tokenizer, render):
        parts += [learned, np.full(1, learned.all())]
    return np.concatenate(parts)


def learned_of_each(
    documents: Iterable[str], tokenizer: TextTokenizer, render: Callable[[Any], str]
) -> Iterator[np.ndarray]:
    """Return whether each token of each document is learned, bool [T]."""
    for document in documents:
        spans = answer_spans(document, render) if isinstance(document, Conversation) else None
        with tokenizer_errors(tokenizer.path, "fails to encode a text"):
            encoding = tokenizer.backend.encode(document, add_special_tokens=False)
        first = np.asarray([begin for begin, _ in encoding.offsets], dtype=np.int64)
        learned = np.full(len(first), spans is None)
        for begin, end in spans or ():
            learned |= (begin <= first) & (first < end)
        yield learned


def answer_spans(conversation: Conversation, render: Callable[[Any], str]) -> list[tuple[int, int]] | None:
    """Return the characters (begin, end) of the assistant's messages in the text: what each adds to the text of the
    messages before it. None if the template changes earlier messages, or if the assistant says nothing."""
    spans, messages = [], conversation.messages
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(messages[:index]) if index else ""
        text = render(messages[: index + 1])
        if not (text.startswith(before) and conversation.startswith(text)):
            return None
        spans.append((len(before), len(text)))
    return spans or None
