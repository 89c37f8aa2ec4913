"""A hook of mkdocs (mkdocs.yml): links that lead out of docs/ become plain text, because the site has no such files.

`[ops/kv_cache.py](../ops/kv_cache.py)` becomes `ops/kv_cache.py` in code type, and `[examples](../examples)` the text
"examples" likewise. A link to a study, `[measured](../research/web/README.md)`, becomes its text and its folder. A line
that is a link to a Python file becomes the file. A target that does not exist stays a link, which `mkdocs build
--strict` then refuses.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((\.\./[^)]+)\)")
FILE = re.compile(r"^\[([^\]]+)\]\((\.\./[^)]+\.py)\)$", re.MULTILINE)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """The page's text, which mkdocs passes before it is rendered."""

    def plain(link: re.Match[str]) -> str:
        text, target = link.groups()
        file = target.partition("#")[0]
        if not Path(config.docs_dir, file).exists():
            return link[0]
        if file.startswith("../research/"):
            study = file.removeprefix("../").removesuffix("/README.md")
            return f"`{study}`" if text == study else f"{text} (`{study}`)"
        return f"`{text.strip('`')}`"

    def shown(link: re.Match[str]) -> str:
        text, target = link.groups()
        path = Path(config.docs_dir, target)
        return f"`{text}`\n\n```python\n{path.read_text()}```" if path.exists() else link[0]

    markdown = FILE.sub(shown, markdown)
    # in the command reference's NAME[:SPLIT][:FIELD], mkdocstrings would take [:SPLIT] for the name of an object
    return LINK.sub(plain, markdown).replace("][:", "]\\[:")
