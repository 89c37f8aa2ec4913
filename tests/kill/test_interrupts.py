"""Commands that get Ctrl-C before a step that changes the disk: exit code 130, and the output is whole or not there."""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

import pytest

from diffbit.cli.app import main

from .points import interrupted_at
from .test_commands import content, models

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fork")]
__all__ = ["models"]  # a fixture
COMMANDS = {
    "quantize": ["quantize", "float", "--weights", "int8", "--method", "rtn"],
    "convert": ["convert", "plain"],
    "export": ["export", "quantized"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_interrupted(name: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(models)
    out, (command, model, *options) = tmp_path / "out", COMMANDS[name]

    def run(to: Path = out) -> None:
        main([command, model, "-o", str(to), "--quiet", *options])

    with pytest.raises(SystemExit) as left:
        run(tmp_path / "whole" / "out")
    assert not left.value.code
    whole, random, step = content(tmp_path / "whole" / "out"), Random(name), 0
    while interrupted_at(step, run):
        assert content(out) in ({}, whole)
        left = {path.name for path in tmp_path.iterdir() if path.suffix != ".lock"}  # which the next run removes
        assert left <= {"whole", "out"}, "something is left"
        if out.exists():
            break  # it had its name, and the same command would refuse to overwrite it
        step += random.randint(1, 5)
    assert step > 2
