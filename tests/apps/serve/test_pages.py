"""Rows in pages of the system, against arrays of their own."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from diffbit.apps.serve.pages import PAGE, Pages
from diffbit.runtime.memory import zeros

ROWS, TOKENS = 4, 1500
linux = pytest.mark.skipif(sys.platform != "linux", reason="prefixes are copied there")


def places(tokens: int) -> dict[str, tuple[slice, ...]]:
    return {
        "keys": (slice(None), slice(tokens), slice(None)),
        "scales": (slice(None), slice(-(-tokens // 32)), slice(None)),
        "turned": (slice(None), slice(tokens)),
        "small": (slice(tokens),),
        "odd": (slice(None), slice(tokens), slice(None)),
    }


def arrays() -> dict[str, NDArray[Any]]:
    """Rows of whole pages, entries of 32 tokens, tokens last, less than a page in all, rows of no whole pages."""
    return {
        "keys": zeros((ROWS, 3, 2048, 64), "float32"),
        "scales": zeros((ROWS, 2, 64, 1024), "float16"),
        "turned": zeros((ROWS, 96, 4096), "uint8"),
        "small": zeros((ROWS, 1536), "int8"),
        "odd": zeros((ROWS, 3, 1501, 63), "float32"),
    }


def test_rows_that_share_pages_are_independent() -> None:
    """Rows are filled, shared from, written anywhere and given back in random order, as copies would be."""
    random = np.random.default_rng(0)
    real, wanted = arrays(), arrays()
    pages = Pages(real)
    for _ in range(60):
        row, source, tokens = random.integers(ROWS), random.integers(ROWS), int(random.integers(1, TOKENS))
        what = random.random()
        if what < 0.5:  # any tokens, also in the middle of what is shared
            for name, place in places(tokens).items():
                values = random.integers(0, 99, real[name][row][place].shape)
                real[name][row][place] = wanted[name][row][place] = values
        elif what < 0.9:
            prefix = pages.keep(source, tokens, places(tokens))
            assert (prefix is None) == (sys.platform != "linux")
            if prefix:
                fewer = places(int(random.integers(1, tokens + 1)))
                pages.share(row, source, fewer, prefix)
                for name, place in fewer.items():
                    wanted[name][row][place] = wanted[name][source][place]
        else:
            pages.free(row)
            for name in real:  # what is read there has no meaning: the others must be as they were
                wanted[name][row] = real[name][row]
        for name in real:
            np.testing.assert_array_equal(real[name], wanted[name])


def used() -> int:
    """Bytes of this process, shared pages once."""
    (kib,) = re.findall(r"^Pss:\s+(\d+) kB", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE)
    return int(kib) * 1024


@linux
def test_a_prefix_takes_its_memory_once() -> None:
    real = {"keys": zeros((8, 4, 16384, 64), "float32")}
    whole = real["keys"].nbytes // 8
    before, place = used(), (slice(None), slice(16384))
    real["keys"][0] = np.random.default_rng(0).standard_normal((4, 16384, 64), np.float32)
    pages = Pages(real)
    prefix = pages.keep(0, 16384, {"keys": place})
    assert prefix is not None
    for row in range(1, 8):
        pages.share(row, 0, {"keys": place}, prefix)
        assert (real["keys"][row] == real["keys"][0]).all()
    assert 0.8 * whole < used() - before < 1.5 * whole
    real["keys"][3] = 1
    assert (real["keys"][2] == real["keys"][0]).all() and used() - before > 1.8 * whole
    del prefix
    for row in range(8):
        pages.free(row)
    assert used() - before < 0.5 * whole


@linux
def test_too_many_pieces_are_copied() -> None:
    """Linux limits the mappings of a process."""
    real = {"keys": zeros((2, 1 << 14, PAGE), "uint8")}
    assert Pages(real).keep(0, 1, {"keys": (slice(None), slice(PAGE))}) is not None  # one piece
    real = {"keys": zeros((2, 1 << 14, 2 * PAGE), "uint8")}
    assert Pages(real).keep(0, 1, {"keys": (slice(None), slice(PAGE))}) is None
