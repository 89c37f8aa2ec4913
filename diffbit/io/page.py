"""Renders a page: one HTML file with its style, script and data, which loads nothing.

A page is a jinja template in an app's folder that extends page.html.j2. NAME.css and NAME.js beside it are its style,
behind page.css that all pages share, and its script. The content security policy allows these by their hashes, in a
page without a script also images that it holds, and nothing else. Values are escaped; data are in JSON alone, where no
character can end the element that holds them.
"""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..version import __version__
from .files import write_atomic

SHELL = Path(__file__).with_name("page.html.j2")


def render(
    template: Path, title: str, data: Any = None, filters: tuple[Callable[..., Any], ...] = (), **values: Any
) -> str:
    """Return a page as text. template: a NAME.html.j2; filters: functions that it uses by their names; values: its
    variables; data: what the script reads, as JSON."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader([template.parent, SHELL.parent]), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters |= {function.__name__: function for function in filters}
    name = template.name.partition(".")[0]
    style, script = (
        "".join(file.read_text("utf-8") for file in files if file.is_file())
        for files in (
            (SHELL.with_name("page.css"), template.with_name(f"{name}.css")),
            (template.with_name(f"{name}.js"),),
        )
    )
    policy = f"default-src 'none'; style-src {_hash(style)}; base-uri 'none'; form-action 'none'; "
    policy += f"script-src {_hash(script)}" if script else "img-src data:"
    text = json.dumps(data, separators=(",", ":"))
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    parts = {"policy": policy, "title": title, "version": __version__}
    parts |= {"style": Markup(style), "script": Markup(script), "json": Markup(text)}
    return environment.get_template(template.name).render(parts | values)


def write(path: str | Path, text: str) -> None:
    """Write a page; a file that is there is replaced once all of it is written."""
    with write_atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _hash(text: str) -> str:
    """Return a source of a content security policy."""
    return f"'sha256-{b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
