"""Damaged files, 1,500 of them; `make fuzz` reads 50,000."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .fuzz import Workplace
from .regressions import REGRESSIONS

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fork, /proc and memfd_create"),
]
CASES, PART = 1500, 750


@pytest.fixture(scope="module")
def place() -> Iterator[Workplace]:
    with Workplace() as workplace:
        yield workplace


@pytest.mark.parametrize("name", REGRESSIONS)
def test_what_fuzzing_found_stays_mended(name: str, place: Workplace) -> None:
    target, damage = REGRESSIONS[name]
    refused = place.outcomes[f"{target} refused"]
    problem = place.problem(target, damage)
    assert problem is None, problem
    assert place.outcomes[f"{target} refused"] == refused + 1, "it was read"


@pytest.mark.parametrize("first", range(0, CASES, PART))
def test_damaged_files(first: int) -> None:
    """Each ends in one sentence, or in the right result. In a process of its own: a small one is forked fast."""
    command = [sys.executable, "-m", "tests.fuzz.fuzz", str(PART), str(first)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    for result in ("right", "refused"):
        assert sum(map(int, re.findall(rf"{result} (\d+)", done.stdout))) > PART // 10, done.stdout
