"""What the README and the docs show is what happens."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from . import forks

ROOT = Path(__file__).parents[1]


@pytest.mark.slow
def test_the_python_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(code.strip().splitlines()) <= 24

    def as_a_script() -> None:
        os.chdir(tmp_path)
        exec(code, {"__name__": "__main__"})

    done = forks.run(as_a_script)
    assert done.code == 0, done.error
    first, text = done.output.split("\n", 1)
    assert re.fullmatch(r"\d+\.\d\d bits a weight; verified: True", first)
    assert text.strip()


@pytest.mark.slow
def test_the_extensions_work(tmp_path: Path) -> None:
    """docs/extending.md: each diff touches one file, applies, and its check passes."""
    page = (ROOT / "docs" / "extending.md").read_text()
    diffs = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    (check,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert [diff.count("diff --git") for diff in diffs] == [1] * 6
    tree = tmp_path / "tree"
    rooms = (
        "ops",
        "calib_data",
        "models",
        "quantize",
        "export",
        "runtime",
        "cli",
        "apps",
        "diffbit",
    )
    for room in rooms:
        shutil.copytree(ROOT / room, tree / room, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for diff in diffs:
        subprocess.run(["git", "apply", "-"], input=diff, text=True, cwd=tree, check=True)
    # an editable installation finds its modules before sys.path is asked, and would find this tree's instead
    begin = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]"
    script = f"{begin}; sys.path.insert(0, {str(tree)!r})\n{check}"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_command_reference_is_current() -> None:
    command = [sys.executable, "-m", "typer", "diffbit.cli.app", "utils", "docs", "--name", "diffbit"]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs" / "cli.md").read_text().strip() == made.strip(), (
        "out of date; run: python -m typer diffbit.cli.app utils docs --name diffbit --output docs/cli.md"
    )


def test_links_in_the_documents_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name} links to {target}"
