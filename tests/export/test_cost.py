"""The operations of a decode step grow linearly with the context: each token adds as many, counted from shapes."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import numpy as np
import pytest

from .conftest import Maker
from .helpers import VARIANTS, config_of, open_session, write_artifact


def step_shapes(artifact: Path, attention: str, total: int, profile: Path) -> list[list[list[int]]]:
    """For every node that ONNX Runtime ran in one step at a context of `total`: shapes of its inputs and outputs."""
    config = config_of(attention, max_position=256)
    session = open_session(artifact, profile)
    heads = config.layers[0].mixer.cache_heads
    feeds = {
        "input_ids": np.array([[5]]),
        "attention_mask": np.ones((1, total), np.int64),
        "position_ids": np.array([[total - 1]]),
    }
    for index in range(config.num_layers):
        for part in ("key", "value"):
            feeds[f"past_key_values.{index}.{part}"] = np.zeros((1, heads, total - 1, config.rope_width), np.float32)
    session.run(None, feeds)
    events = json.loads(Path(session.end_profiling()).read_text())
    nodes = [event["args"] for event in events if event.get("cat") == "Node" and "output_type_shape" in event["args"]]
    return [
        [
            shape
            for side in ("input_type_shape", "output_type_shape")
            for entry in node[side]
            for shape in entry.values()
        ]
        for node in nodes
    ]


@pytest.mark.parametrize("attention", VARIANTS)
def test_a_step_is_linear_in_the_context(checkpoint_of: Maker, tmp_path: Path, attention: str) -> None:
    artifact = write_artifact(checkpoint_of(attention, max_position=256))
    contexts = (67, 131, 195)
    shapes = [step_shapes(artifact, attention, total, tmp_path / f"p{total}") for total in contexts]
    assert len(shapes[0]) == len(shapes[1]) == len(shapes[2]) > 20
    numbers = [sum(prod(shape) for node in run for shape in node) for run in shapes]
    assert numbers[0] < numbers[1] and numbers[2] - numbers[1] == numbers[1] - numbers[0]
    for total, run in zip(contexts, shapes, strict=True):
        wide = [shape for node in run for shape in node if sum(dim >= total - 1 for dim in shape if dim != 256) > 1]
        assert not wide  # no [T, T]


def test_a_quadratic_graph_would_be_noticed(checkpoint_of: Maker, tmp_path: Path) -> None:
    """The same count on a prefill, which is quadratic by nature, is not linear."""
    artifact = write_artifact(checkpoint_of("diff_v1", max_position=256))
    numbers = []
    for total in (67, 131, 195):
        session = open_session(artifact, tmp_path / f"q{total}")
        feeds = {
            "input_ids": np.full((1, total), 5),
            "attention_mask": np.ones((1, total), np.int64),
            "position_ids": np.arange(total)[None],
        }
        for index in range(2):
            for part in ("key", "value"):
                feeds[f"past_key_values.{index}.{part}"] = np.zeros((1, 2, 0, 32), np.float32)
        session.run(None, feeds)
        events = json.loads(Path(session.end_profiling()).read_text())
        outputs = [e["args"]["output_type_shape"] for e in events if "output_type_shape" in e.get("args", {})]
        numbers.append(sum(prod(shape) for node in outputs for entry in node for shape in entry.values()))
    assert numbers[2] - numbers[1] > numbers[1] - numbers[0]
