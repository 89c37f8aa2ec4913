"""What the README and the docs show is what happens."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

ROOT = Path(__file__).parents[1]


def test_the_python_example_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert len(code.strip().splitlines()) <= 24
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, text = done.stdout.split("\n", 1)
    assert re.fullmatch(r"\d+\.\d\d bits a weight; verified: True", first)
    assert text.strip()


def test_the_command_reference_is_current() -> None:
    """docs/cli.md is made by `typer diffbit.cli utils docs --name diffbit --output docs/cli.md`."""
    from typer.cli import app

    made = CliRunner().invoke(app, ["diffbit.cli", "utils", "docs", "--name", "diffbit"])
    assert made.exit_code == 0, made.output
    assert (ROOT / "docs" / "cli.md").read_text().strip() == made.stdout.strip(), (
        "run: typer diffbit.cli utils docs --name diffbit --output docs/cli.md"
    )


def test_links_in_the_documents_lead_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), f"{page.name} links to {target}"
