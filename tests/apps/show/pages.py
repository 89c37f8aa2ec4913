"""What the tests read a page with: a parser that knows nothing of how the page was made."""

from __future__ import annotations

import json
from base64 import b64decode
from html.parser import HTMLParser
from typing import Any

import numpy as np

PROMPT = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n\nstack.items"


class Elements(HTMLParser):
    """The tags of a page in order, and the texts of its scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[dict[str, str | None]] = []
        self.texts: list[str] = []
        self.inside = False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes.append(dict(attrs))
        self.texts.append("")
        self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.texts[-1] += data

    def all(self, tag: str) -> list[tuple[dict[str, str | None], str]]:
        rows = zip(self.tags, self.attributes, self.texts, strict=True)
        return [(attributes, text) for name, attributes, text in rows if name == tag]


def data_of(page: str) -> dict[str, Any]:
    """The JSON that a page holds."""
    (text,) = [text for attributes, text in Elements(page).all("script") if attributes.get("id") == "data"]
    data: dict[str, Any] = json.loads(text)
    return data


def maps_of(model: dict[str, Any], setting: dict[str, Any]) -> list[tuple[np.ndarray, np.ndarray | None]]:
    """Of each layer: weights float64 [H, branches, T, T] and lambdas [H, T], decoded number by number."""
    codes, length = b64decode(setting["maps"]), len(model["tokens"])
    lambdas = np.frombuffer(b64decode(setting["lambdas"]), "<f4").tolist()
    place, layers = 0, []
    for layer in model["layers"]:
        weights = np.zeros((layer["heads"], layer["branches"], length, length))
        for head in range(layer["heads"]):
            for branch in range(layer["branches"]):
                for query in range(length):
                    for key in range(query + 1):
                        weights[head, branch, query, key] = (codes[place] / 255) ** 2
                        place += 1
        count = layer["heads"] * length if layer["branches"] == 2 else 0
        mine, lambdas = lambdas[:count], lambdas[count:]
        layers.append((weights, np.array(mine).reshape(-1, length) if count else None))
    assert place == len(codes) and not lambdas
    return layers
