"""Damaged files, 2,000 of them; `make fuzz` reads 50,000."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from .found import FOUND
from .fuzz import Workplace

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fork, /proc and memfd_create"),
]
CASES, PART = 2000, 1000
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def place() -> Iterator[Workplace]:
    with Workplace() as made:
        yield made


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found(name: str, place: Workplace) -> None:
    target, damage = FOUND[name]
    refused = place.outcomes[f"{target} refused"]
    problem = place.problem(target, damage)
    assert problem is None, problem
    assert place.outcomes[f"{target} refused"] == refused + 1, "it was read"


@pytest.mark.parametrize("first", range(0, CASES, PART))
def test_damaged_files(first: int) -> None:
    """Each ends in one sentence, or in the right result. A small process of its own forks in a third of the time."""
    environment = os.environ | {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]),
    }
    command = [sys.executable, "-m", "tests.fuzz.fuzz", str(PART), str(first)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.search(rf"{PART} cases, (\d+) read, (\d+) refused, 0 failed", done.stdout)
    assert found and min(map(int, found.groups())) > PART // 10, done.stdout
