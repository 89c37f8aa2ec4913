"""Damaged files, 2,000 of them; `make fuzz` reads 50,000."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from .found import FOUND
from .fuzz import Workplace, cases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="fork, /proc and memfd_create"),
]
CASES, PART = 2000, 500


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
def test_damaged_files(first: int, place: Workplace) -> None:
    """Each ends in one sentence, or in the right result."""
    before = place.outcomes.copy()
    problems = {case: problem for case in cases(PART, first) if (problem := place.problem(case.target, case.damage))}
    assert not problems, "\n\n".join(f"{case.target} {case.number}: {problem}" for case, problem in problems.items())
    done = place.outcomes - before
    for result in ("right", "refused"):
        assert sum(count for name, count in done.items() if name.endswith(result)) > PART // 10, done
