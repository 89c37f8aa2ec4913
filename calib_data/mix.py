"""The text source `mix`: a sample of typical uses of a chat model, for calibration.

    prose        English: speeches, a novel                             text/SPLIT/prose.jsonl
    languages    one declaration in twelve languages                    text/SPLIT/languages.jsonl
    dialogues    in the model's own chat template, if it has one        text/SPLIT/dialogues.jsonl
    code         beginnings of files of the standard library            the same split of `stdlib`

Its splits are calib (0.2 MB) and eval (0.04 MB), from different works or different parts of them; there is no train
split. text/README.md lists the texts' sources and licences. The four parts are interleaved evenly, so a few windows
contain all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

TEXT = Path(__file__).parent / "text"
CODE_DOCUMENTS = {"calib": 20, "eval": 5}
CODE_CHARACTERS = 3000  # of each

Messages = list[dict[str, str]]  # each with "role" (user or assistant, in turns) and "content"
Render = Callable[[Any], str]  # a conversation (Messages) -> its text


def mix(split: str, code: Iterable[str], render: Render | None = None) -> Iterator[str]:
    """Return the documents of a split. code: the documents of the same split of `stdlib`; render: a chat template."""
    render = render or plain
    parts = []
    for file in sorted((TEXT / split).glob("*.jsonl")):
        rows = map(json.loads, file.read_text("utf-8").splitlines())
        parts.append([row["text"] if "text" in row else render(row["messages"]) for row in rows])
    parts.append([text[:CODE_CHARACTERS] for text in islice(code, CODE_DOCUMENTS[split])])
    places = [((at + 0.5) / len(part), text) for part in parts for at, text in enumerate(part)]
    return (text for _, text in sorted(places, key=lambda place: place[0]))


def plain(messages: Messages) -> str:
    """Return a conversation as the text of a model without a chat template."""
    return "\n\n".join(f"{message['role'].capitalize()}: {message['content']}" for message in messages)
