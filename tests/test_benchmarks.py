"""The scripts of benchmarks/ and research/ start. What they compute is tested in research/tests."""

from __future__ import annotations

import os
import re
import runpy
import sys
from argparse import Namespace
from pathlib import Path

import pytest
import torch  # noqa: F401 (the scripts' processes then have it already)

from . import forks

ROOT = Path(__file__).parents[1]
STUDIES = sorted(folder for folder in ROOT.glob("research/*/") if folder.name != "tests")
FILES = sorted(file for folder in (ROOT / "benchmarks", *STUDIES) for file in folder.glob("*.py"))
SCRIPTS = [str(file.relative_to(ROOT)) for file in FILES if "ArgumentParser(" in file.read_text()]


@pytest.mark.parametrize("script", SCRIPTS)
def test_says_what_it_does(script: str) -> None:
    def help() -> None:
        sys.argv = [str(ROOT / script), "--help"]
        sys.path = [str((ROOT / script).parent), *(entry or os.getcwd() for entry in sys.path)]
        runpy.run_path(sys.argv[0], run_name="__main__")

    done = forks.run(help)
    assert done.code == 0 and done.output.startswith(f"usage: {Path(script).name}"), done.error


def test_each_study_is_listed_with_its_question_and_answer() -> None:
    listed = (ROOT / "research" / "README.md").read_text()
    assert len(STUDIES) >= 19
    for study in STUDIES:
        page = (study / "README.md").read_text()
        assert f"[{study.name}]({study.name}/README.md)" in listed
        assert "\n**Question" in page and "\n**Answer" in page, study.name
        scripts = [script for script in SCRIPTS if script.startswith(f"research/{study.name}/")]
        assert not scripts or any(f"python {script}" in page or f"python3 {script}" in page for script in scripts)


def test_the_page_of_a_scripts_tables_is_there() -> None:
    text = "".join((ROOT / script).read_text() for script in SCRIPTS)
    pages = re.findall(r'add_outputs\(parser, "([^"]+)"\)', text)
    assert len(pages) >= 10
    for page in pages:
        assert "\n<!-- /" in (ROOT / page).read_text(), page


def test_a_command_line_has_no_folder_of_a_machine() -> None:
    arguments = ["--work", "/a/b", "--wikitext", "/c/wiki.raw", "--ik", "/d", "--peer", "gptqmodel=/e", "--only", "x y"]
    report = runpy.run_path(str(ROOT / "benchmarks" / "report.py"))
    line = report["command_line"](str(ROOT / "research" / "x" / "y.py"), arguments)
    assert line == "python research/x/y.py --work DIR --wikitext FILE --ik ENV --peer gptqmodel=ENV --only 'x y'"


def test_a_page_without_a_tables_place_is_left_alone(tmp_path: Path) -> None:
    report = runpy.run_path(str(ROOT / "benchmarks" / "report.py"))
    page, numbers = tmp_path / "page.md", tmp_path / "numbers.json"
    options = Namespace(markdown=page, json=numbers)
    page.write_text(before := "<!-- first -->\nold\n<!-- /first -->\n")
    with pytest.raises(SystemExit, match="wanted one <!-- second --> and one <!-- /second -->"):
        report["write_outputs"](options, {}, {"first": "new", "second": "new"})
    assert page.read_text() == before and not numbers.exists()
    page.write_text(before + "<!-- second -->\n<!-- /second -->\n")
    report["write_outputs"](options, {"a": 1}, {"first": "new", "second": "| x    | -------: |"})
    places = "<!-- first -->\n\nnew\n<!-- /first -->\n<!-- second -->\n\n| x | ---: |\n<!-- /second -->\n"
    assert page.read_text() == places and numbers.read_text() == '{\n "a": 1\n}\n'
