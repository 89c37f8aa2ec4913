"""The website of docs/ is complete, has no dead links, and needs no other host."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import diffbit

ROOT = Path(__file__).parents[1]


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(config), "-d", str(site)]
    environment = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


@pytest.mark.slow
def test_the_site_builds(tmp_path: Path) -> None:
    done = build(ROOT / "mkdocs.yml", tmp_path)
    assert done.returncode == 0, done.stderr
    pages = {page.name: page.read_text() for page in tmp_path.glob("*.html")}
    assert pages.keys() >= {page.with_suffix(".html").name for page in (ROOT / "docs").glob("*.md")}
    for name in diffbit.__all__:
        assert f'id="diffbit.{name}"' in pages["api.html"], f"docs/api.md lacks {name}"
    for name, page in pages.items():
        loaded = re.findall(r"<(?:script|link|img|iframe)\b[^>]*(?:src|href)=\"([^\"]+)\"", page)
        assert loaded and not [target for target in loaded if "//" in target], name
        assert "../" not in re.sub(r"<pre>.*?</pre>", "", page, flags=re.DOTALL), f"{name} leads out of the site"


@pytest.mark.slow
def test_the_build_refuses_what_leads_nowhere(tmp_path: Path) -> None:
    """On a copy whose pages are empty but for what is wrong."""
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("mkdocs.yml", "deploy/site.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for page in (ROOT / "docs").glob("*.md"):
        (docs / page.name).write_text(f"# {page.stem}\n")
    assert build(tmp_path / "mkdocs.yml", tmp_path / "site").returncode == 0
    (docs / "extra.md").write_text("# Not in the navigation\n")
    (docs / "index.md").write_text(
        "# i\n\n[a](../deploy/site.py) [b](gone.md) [c](cli.md#gone) [d](../deploy/gone.py)\n"
    )
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    for wrong in ("extra.md", "gone.md", "#gone", "../deploy/gone.py"):
        assert wrong in done.stderr, done.stderr
    assert "../deploy/site.py" not in done.stderr
