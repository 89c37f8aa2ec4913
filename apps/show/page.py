"""Writes the page: one HTML file with its style, its script and its data, which loads nothing.

Its content security policy allows the script and the style by their hashes and nothing else. Texts from models and
prompts are in the JSON alone, where no character can end the element that holds it; the script shows them as text.
"""

from __future__ import annotations

import hashlib
import json
import re
from base64 import b64encode
from html import escape
from pathlib import Path
from typing import Any

from ...io.files import write_atomic
from ...version import __version__

PARTS = Path(__file__).parent / "page"


def write_page(document: dict[str, Any], path: str | Path) -> None:
    """Write the page of a `document`; a file that is there is replaced."""
    with write_atomic(path) as temporary:
        temporary.write_text(render(document), encoding="utf-8")


def render(document: dict[str, Any]) -> str:
    """Return the page as text."""
    style, script = ((PARTS / name).read_text("utf-8") for name in ("page.css", "page.js"))
    data = json.dumps(document, separators=(",", ":"))
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    policy = (
        f"default-src 'none'; script-src {_hash(script)}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    title = "Attention of " + ", ".join(model["name"] for model in document["models"])
    parts = {"policy": policy, "title": escape(title), "version": __version__}
    parts |= {"style": style, "script": script, "data": data}
    template = (PARTS / "page.html").read_text("utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], template)


def _hash(text: str) -> str:
    """A source of a content security policy."""
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
