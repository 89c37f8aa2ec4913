"""The same bits on 1, 2 and 4 threads of ONNX Runtime, and in two sessions that run at once; threads without memory.

The whole table runs on several threads in the host (test_host.py); here some of it, and nodes large enough to be cut.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import onnxruntime
import pytest

from diffbit.runtime import native

from .. import forks
from ..ops.cases import LowBitCase
from ..ops.onnx_run import on_each_isa
from . import sessions
from .broken import changed
from .host import ROOT
from .nodes import Node, large, lowbit, nodes

pytestmark = pytest.mark.slow
PART = 20


@functools.cache
def table(first: int = 0) -> tuple[Node, ...]:
    return (*list(nodes())[first::PART], *large())


def bits(outputs: list[np.ndarray]) -> list[bytes]:
    return [array.tobytes() for array in outputs]


@on_each_isa
def test_threads_change_nothing(isa: str) -> None:
    for node in table(first=native.instruction_sets().index(isa)):
        one, two, four = (bits(sessions.run(sessions.session(node, isa, threads), node)) for threads in (1, 2, 4))
        assert one == two, f"{node.name}: other bits on 2 threads"
        assert one == four, f"{node.name}: other bits on 4 threads"


@pytest.mark.skipif(not native.instruction_sets(), reason="there is no library")
def test_two_sessions_at_once() -> None:
    isa, *_ = native.instruction_sets()
    prepared = [(node, *(sessions.session(node, isa, 2) for _ in range(2))) for node in table()]
    alone = {node.name: bits(sessions.run(first, node)) for node, first, _ in prepared}

    def repeat(opened: list[tuple[Node, onnxruntime.InferenceSession]]) -> list[str]:
        return [
            node.name for _ in range(2) for node, one in opened if bits(sessions.run(one, node)) != alone[node.name]
        ]

    with ThreadPoolExecutor(2) as pool:
        both = [[(node, pair[which]) for node, *pair in prepared] for which in (0, 1)]
        changed = [name for names in pool.map(repeat, both) for name in names]
        # and one session called from two threads
        changed += [name for names in pool.map(repeat, [both[0], both[0]]) for name in names]
    assert not changed


def without_memory() -> None:
    """Each of 3 tasks unpacks a tile of 16 MB; what the calling thread itself needs is less."""
    case, k, tiles = LowBitCase("memory", lead=(5,), k=128, n=16, group=128, bits=2, int8_scales=False), 1 << 20, 24
    x = {name: array for name, array in lowbit(case).inputs.items() if array is not None}
    zeros = {name: np.zeros((tiles, k // 128, *x[name].shape[2:]), x[name].dtype) for name in ("codes", "scales")}
    x |= {"A": np.ones((5, k), np.float32), **zeros}
    node = changed(lowbit(case), "no_memory", K=k, N=16 * tiles, **x)
    session = sessions.session(node, native.instruction_sets()[0], threads=2)
    forks.limit_memory(16 << 20)
    session.run(None, x)


@pytest.mark.skipif(not native.instruction_sets() or sys.platform != "linux", reason="needs the library and Linux")
def test_a_task_without_memory_ends_in_a_sentence() -> None:
    """In a process of its own: a heap that was used has room."""
    program = "from tests.native.test_threads import without_memory; without_memory()"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert "LowBitMatMul: out of memory" in done.stderr, f"{done.returncode}: {done.stderr}"
