"""Schemas and grammars that a generator makes: 150 of them, 1,500 in the slow tests; `make fuzz` makes 20,000."""

from __future__ import annotations

import sys

import pytest

from .schemas import Place, problems

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of memory")


@pytest.mark.parametrize(("first", "count"), [(0, 150), pytest.param(150, 1350, marks=pytest.mark.slow)])
def test_what_is_held_fits(first: int, count: int) -> None:
    """A random text under each fits its schema, or one sentence refuses it."""
    place = Place()
    found = problems(count, first, place)
    assert not found, "\n".join(found)
    for outcome in ("schemas held", "schemas refused", "grammars held"):
        assert place.outcomes[outcome] > count // 20
