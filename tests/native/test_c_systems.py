"""diffbit-c on an emulated ARM processor: the tokens are those of a Session."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from .host import KINDS, skip
from .test_c import NANO, TOKENS, built, check_tokens, largest_difference

pytestmark = pytest.mark.slow
PROMPT = [315, 221, 7, 42, 16, 99]


@pytest.fixture(scope="module")
def program() -> list[str]:
    """The command that runs diffbit-c for ARM."""
    options, runner, tools = KINDS["aarch64"]
    if missing := [package for tool, package in tools.items() if not shutil.which(tool)]:
        skip(f"needs Debian's packages {' '.join(missing)}")
    compiler = "-DCMAKE_C_COMPILER=aarch64-linux-gnu-gcc"
    return [*runner, str(built("c-aarch64", *options, compiler) / "diffbit-c")]


def run(program: list[str], *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*program, *map(str, arguments)], capture_output=True, text=True)


@pytest.mark.parametrize("threads", ["1", "4"])
def test_tokens_are_those_of_a_session(program: list[str], tmp_path: Path, threads: str) -> None:
    prompt, limits = "@" + " ".join(map(str, PROMPT)), ("--temperature", "0", "--max-tokens", str(TOKENS))
    done = run(program, NANO, prompt, "--print", "ids", *limits, "--threads", threads)
    assert done.returncode == 0, done.stderr
    found = [int(word) for word in done.stdout.split()]
    check_tokens(NANO, PROMPT, found, TOKENS, largest_difference(NANO, PROMPT, tmp_path))


def test_text_and_refusals(program: list[str], tmp_path: Path) -> None:
    done = run(program, NANO, "def main(", "--temperature", "0", "--max-tokens", "4")
    assert done.returncode == 0 and done.stdout.startswith("string,")
    shutil.copytree(NANO, tmp_path / "artifact")
    (tmp_path / "artifact" / "model.onnx.data").unlink()
    done = run(program, tmp_path / "artifact", "a")
    assert done.returncode == 2 and "model.onnx.data" in done.stderr and done.stderr.count("\n") == 1
    (tmp_path / "artifact" / "model.onnx.data").symlink_to(NANO / "model.onnx.data")
    done = run(program, tmp_path / "artifact", "a")
    assert done.returncode == 2 and "is a link to a file outside of the folder" in done.stderr
