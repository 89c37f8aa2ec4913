"""Wrong nodes end in a sentence, never in a crash: in ONNX Runtime, and in the host under sanitizers."""

from __future__ import annotations

import functools
import re

import numpy as np
import pytest

from diffbit.runtime import native

from . import sessions
from .broken import Broken, broken, misshapen
from .host import build
from .nodes import Node, one_of_each


@functools.cache
def table() -> tuple[Broken, ...]:
    return tuple(broken())


@pytest.mark.slow
def test_onnx_runtime_reports_the_sentence() -> None:
    isa, *_ = native.instruction_sets()
    for case in table():
        with pytest.raises(Exception) as caught:
            sessions.run(sessions.session(case.node, isa), case.node)
        if case.sentence:
            assert re.search(case.sentence, str(caught.value)), f"{case.node.name}: {caught.value}"
            assert case.node.op in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("threads", [1, 2])
def test_sanitizers_find_nothing(threads: int) -> None:
    host = build("sanitized")
    results = host.run([case.node for case in table()], host.instruction_sets[0], threads)
    for case in table():
        text = results[case.node.name]
        assert isinstance(text, str), f"{case.node.name} computed something"
        assert re.search(case.sentence or "no entry of the op", text), f"{case.node.name}: {text}"


def refused_or_computed(result: list[np.ndarray] | str, node: Node) -> bool:
    """Whether a misshapen node got a sentence that names the op, or all of its first output's numbers."""
    if isinstance(result, str):
        return result.startswith(node.op) or "no entry" in result
    return not np.isnan(result[0]).any()


@pytest.mark.slow
@pytest.mark.parametrize("base", one_of_each(), ids=lambda node: node.name)
def test_misshapen_inputs(base: Node) -> None:
    host = build("sanitized")
    nodes = list(misshapen(base))
    for isa in {host.instruction_sets[0], "scalar"}:
        results = host.run(nodes, isa, threads=1)
        wrong = [
            f"{node.name}: {results[node.name]}" for node in nodes if not refused_or_computed(results[node.name], node)
        ]
        assert not wrong, "\n".join(wrong)
    isa, *_ = native.instruction_sets()
    for node in nodes:  # ONNX Runtime gives the same answer
        try:
            outputs: list[np.ndarray] | str = sessions.run(sessions.session(node, isa), node)
        except Exception as error:
            outputs = str(error)
        assert isinstance(outputs, str) == isinstance(results[node.name], str), f"{node.name}: {outputs}"
