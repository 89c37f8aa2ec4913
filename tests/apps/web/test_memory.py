"""The WebAssembly module's memory and hashes."""

from __future__ import annotations

import json

import pytest

from .modules import module, node


@pytest.mark.slow
def test_blocks_keep_their_bytes_and_hashes_are_those_of_node() -> None:
    got = json.loads(node("memory.mjs", module()))
    assert got["hashes"] and got["kept"] and got["aligned"]
    assert got["grown"] < 1.3, "freed memory is not used again"
