"""What the README and the docs show is what happens."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import diffbit

from . import forks

ROOT = Path(__file__).parents[1]


ROW = re.compile(r"^\|(.+)\|$", re.MULTILINE)


def rows(page: str) -> list[list[str]]:
    """The cells of each row of a page's tables."""
    return [[cell.strip() for cell in row.split("|")] for row in ROW.findall(page)]


def test_the_readme_shows_its_picture_everywhere() -> None:
    """A place without the repository's files, such as a package index, shows neither its images nor mermaid."""
    page = (ROOT / "README.md").read_text()
    assert "mermaid" not in page and not re.findall(r"!\[[^]]*\]\((?!https://)", page)


def test_the_readmes_numbers_are_those_of_the_page_it_links() -> None:
    """Each row of a table, but for its label, has its cells in one row of the first page linked below the table."""
    _, *parts = re.split(r"((?:^\|.*\n)+)", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert len(parts) == 6
    for table, below in zip(parts[::2], parts[1::2], strict=True):
        (name, *_) = re.findall(r"\]\(((?:docs|research)/[\w/]+\.md)", below)
        known = [set(row) for row in rows((ROOT / name).read_text())]
        shown = rows(table)[2:]
        assert len(shown) >= 4
        for cells in shown:
            assert any(set(cells) <= row for row in known), f"{name} has no row with {cells}"


def test_no_measured_row_stands_on_two_pages() -> None:
    """Two rows of different pages and studies share less than two intervals."""
    intervals = re.compile(r"[\d.]+(?: %)? \[[^]]+\]")
    seen: dict[frozenset[str], str] = {}
    for page in sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("research/*/README.md")]):
        name = str(page.relative_to(ROOT))
        for row in rows(page.read_text()):
            measured = frozenset(re.findall(intervals, "|".join(row)))
            if len(measured) > 1:
                assert seen.setdefault(measured, name) == name, f"{name} repeats {row} of {seen[measured]}"


CORE = ["calib_data", "cli", "csrc", "diffbit/io", "export", "formats", "models", "ops", "quantize", "runtime"]
APPS = sorted(str(page.parent.relative_to(ROOT)) for page in ROOT.glob("apps/*/README.md"))
FILE = re.compile(r"(?<![\w/.-])(?:(?:\w+/)*\w+\.py|(?:\w+/)+)(?![\w*])")
PLACES = ROOT, ROOT / "diffbit", ROOT / "csrc"


@pytest.mark.parametrize("room", CORE)
def test_each_room_has_a_page(room: str) -> None:
    """What it does, its files bottom-up, contracts, how to add a thing, tests."""
    page = (ROOT / room / "README.md").read_text()
    assert page.count("\n## ") >= 4 and ("\n## Adding " in page or room == "diffbit/io")


SHELVES = {"formats", "ops"}


@pytest.mark.parametrize("room", [*CORE, *APPS])
def test_a_rooms_page_names_its_files(room: str) -> None:
    """Each file and folder of the room, in the list once, but for a shelf, to which anybody may add a file; and all
    files that the page names are there."""
    page, folder = (ROOT / room / "README.md").read_text(), ROOT / room
    named = [name for name in FILE.findall(page) if not re.search(r"\b(X|NAME)\b", name)]
    for name in named:
        places = (*PLACES, ROOT / "tests" / room)
        assert any((place / name).exists() for place in places) or any(folder.rglob(name)), f"{room} has no {name}"
    files = set() if room in SHELVES else {path.name for path in folder.glob("*.py")} - {"__init__.py"}
    folders = {f"{path.name}/" for path in folder.iterdir() if any(path.glob("*.*")) and path.name != "__pycache__"}
    missing = (files | folders) - {*named, *(f"{name.split('/')[0]}/" for name in named)}
    assert not missing, f"{room}/README.md does not name {sorted(missing)}"
    block = re.search(r"```\n(.*?)```", page, re.DOTALL) or re.search(r"((?:^    .*\n)+)", page, re.MULTILINE)
    listed = FILE.findall(block[1]) if block else []
    twice = {name for name in listed if name in files | folders and listed.count(name) > 1}
    assert not twice, f"{room}/README.md lists {sorted(twice)} twice"


def test_the_python_page_runs_and_names_everything(tmp_path: Path) -> None:
    """docs/api.md: its blocks, one after the other; the fields that it lists; every public name, twice; the example of
    plain onnxruntime, which tests/test_examples.py runs."""
    page = (ROOT / "docs" / "api.md").read_text()
    assert f"```py\n{(ROOT / 'examples' / 'plain_onnxruntime.py').read_text()}```\n" in page
    for name in diffbit.__all__:
        assert f"::: diffbit.{name}\n" in page and re.search(rf"diffbit\.{name}\(|`(diffbit\.)?{name}`", page), name
    for row in rows(page)[2:]:
        room, _, name = re.findall(r"`([\w.]+)`", row[0])[0].rpartition(".")
        fields = fields_of(getattr(import_module(room), name))
        for field in re.findall(r"`(\w+)`", re.sub(r"\(.*?\)|`Generation`", "", row[1])):
            assert field in fields, f"{name} has no {field}"

    def as_a_script() -> None:
        os.chdir(tmp_path)
        os.symlink(ROOT / "examples", "examples")
        exec("".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), {"__name__": "__main__"})

    done = forks.run(as_a_script)
    assert done.code == 0, done.error
    assert "is a checkpoint" in done.output.splitlines()[-1]


def test_the_page_of_the_artifact_shows_the_example_that_is_tested() -> None:
    (shown,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "artifact.md").read_text(), re.DOTALL)
    assert shown and (ROOT / "examples" / "plain_onnxruntime.py").read_text().endswith(shown)


def fields_of(type_: type) -> set[str]:
    """The fields and properties of a class and of its bases."""
    return {name for base in type_.__mro__ for name in (*vars(base), *vars(base).get("__annotations__", ()))}


@pytest.mark.slow
def test_the_extensions_work(tmp_path: Path) -> None:
    """examples/extending, copied over a copy of the tree: each is a new file, on the page, and the check passes."""
    examples = ROOT / "examples" / "extending"
    page = (ROOT / "docs" / "extending.md").read_text()
    added = [file.relative_to(examples) for file in examples.glob("*/**/*.py")]
    assert len(added) == 5
    for file in (*added, Path("check.py")):
        assert f"\n[{file}](../examples/extending/{file})\n" in page
    tree = tmp_path / "tree"
    rooms = (
        "ops",
        "calib_data",
        "models",
        "formats",
        "quantize",
        "export",
        "runtime",
        "cli",
        "apps",
        "diffbit",
    )
    for room in rooms:
        shutil.copytree(ROOT / room, tree / room, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for file in added:
        shutil.copy(examples / file, tree / file)
    # an editable installation finds its modules before sys.path is asked, and would find this tree's instead
    begin = "import sys; sys.meta_path[:] = [f for f in sys.meta_path if 'ScikitBuild' not in type(f).__name__]"
    check = (examples / "check.py").read_text()
    script = f"{begin}; sys.path.insert(0, {str(tree)!r})\n{check}"
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_command_reference_is_current() -> None:
    command = [sys.executable, "-m", "typer", "diffbit.cli.app", "utils", "docs", "--name", "diffbit"]
    reference = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert (ROOT / "docs" / "cli.md").read_text().strip() == reference.strip(), (
        "out of date; run: python -m typer diffbit.cli.app utils docs --name diffbit --output docs/cli.md"
    )


def anchors(page: Path) -> set[str]:
    """Of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = [re.sub(r"\]\([^)]*\)", "", title) for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_links_in_the_documents_lead_somewhere() -> None:
    folders = "", "docs/", "*/", "apps/*/", "research/*/"
    for page in [page for folder in folders for page in ROOT.glob(f"{folder}*.md")]:
        if page.is_relative_to(ROOT / "out"):
            continue
        for target, anchor in re.findall(r"\]\(([^)#]*)(?:#([^)]*))?\)", page.read_text()):
            if "://" in target:
                continue
            to = page.parent / target if target else page
            assert to.exists(), f"{page} links to {target}"
            if (
                anchor and "research" in (*to.resolve().parts, *page.parts) and to.suffix == ".md"
            ):  # mkdocs checks docs/
                assert anchor in anchors(to), f"{page} links to {target}#{anchor}"
