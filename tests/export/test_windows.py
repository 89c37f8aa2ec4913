"""A model of windowed, full and plain layers: torch's numbers from an artifact, by kernel and by body."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from diffbit import runtime
from diffbit.export import export_artifact, reference_model
from diffbit.models import ModelConfig
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint

from .helpers import config_of, graph_of, relative_error, write_model

LENGTH, WINDOW = 192, 40
SCHEMES = {
    "float": AttentionScheme(),
    "int8": AttentionScheme(keys="int8", values="int8", qk="int8"),
    "int4": AttentionScheme(keys="int4", values="int4", window=7),
    "int2": AttentionScheme(keys="int2", values="int3", window=0, first=16),
}


def mixed() -> ModelConfig:
    """Windows in a layer of each variant, among layers that have none."""
    sizes = {"num_heads": 4, "num_kv_heads": 2, "max_position": LENGTH, "num_layers": 1}
    kinds = {name: config_of(name, **sizes).layers[0] for name in ("diff_v1", "softmax", "diff_v2")}
    layers = []
    for layer in kinds.values():
        layers += [replace(layer, mixer=replace(layer.mixer, sliding_window=WINDOW)), layer]
    return replace(config_of("diff_v1", **sizes), layers=tuple(layers))


@pytest.fixture(scope="module", params=SCHEMES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("windows")
    source = write_model(folder / "float", mixed())
    scheme = SCHEMES[request.param]
    if scheme == AttentionScheme():
        return source
    quantize_checkpoint(source, folder / "quantized", Scheme(attention=scheme))
    return folder / "quantized"


@pytest.fixture
def artifact(checkpoint: Path) -> Path:
    folder = checkpoint.with_name(f"{checkpoint.name}-artifact")
    return folder if folder.exists() else export_artifact(checkpoint, folder)


@pytest.mark.parametrize("native", [True, False])
def test_an_artifact_computes_what_torch_computes(checkpoint: Path, artifact: Path, native: bool) -> None:
    """A context of four windows, in odd chunks and token by token."""
    names = {node.op_type for node in graph_of(artifact).graph.node if node.op_type.startswith("DiffAttention")}
    assert len(names) in (4, 5)  # with floats a plain layer's body is a signature of its own
    ids = torch.randint(0, 61, (1, 4 * WINDOW), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = reference_model(checkpoint)(ids)[0]
    session, got, done = runtime.Session(artifact, threads=1, native=native), [], 0
    for count in (33, 1, 1, 50, 3, 2, 41, 1, 1, 27):
        chunk = ids[:, done : done + count].numpy()
        got += list(session.step(chunk) if count == 1 else session.prefill(chunk, all_positions=True)[0])
        done += count
    assert done == 4 * WINDOW
    error = relative_error(np.stack(got), expected)
    usual = 1e-5 if "quantized" not in checkpoint.name else 5e-3  # a code that moves to its neighbour moves its readers
    assert np.median(error) < usual and error.max() < 30 * usual, error


def test_a_session_keeps_only_what_its_rings_still_hold(artifact: Path) -> None:
    """A text that is cut and goes on otherwise, and a batch padded on the left: what fresh sessions compute."""
    ids = np.random.default_rng(0).integers(0, 61, 100)
    session, fresh = (runtime.Session(artifact, threads=1) for _ in range(2))
    for length, common in ((100, 99), (100, 60), (38, 30)):
        session.reset()
        session.prefill([ids[:length]])
        changed = [*ids[:common], 7, 8, 9]
        reused = session.reuse(changed)
        assert reused in (0, common) and reused == (common if session.artifact.cache.holds(common, length) else 0)
        fresh.reset()
        np.testing.assert_allclose(session.prefill([changed[reused:]]), fresh.prefill([changed]), atol=2e-2)
    if "recent" in " ".join(session.artifact.cache.buffers):
        return  # blocks are the batch's: a session refuses rows of unequal length
    rows = np.stack([ids[:90], np.concatenate([np.zeros(25, np.int64), ids[:65]])])
    mask = np.stack([np.ones(90, np.int64), np.arange(90) >= 25])
    session.reset()
    got = [session.prefill(rows, mask), session.step([[5], [6]]), session.step([[1], [2]])]
    for row, (tokens, steps) in enumerate(((ids[:90], (5, 1)), (ids[:65], (6, 2)))):
        fresh.reset()
        expected = [fresh.prefill([tokens]), *(fresh.step([[step]]) for step in steps)]
        for a, b in zip(got, expected, strict=True):
            np.testing.assert_allclose(a[row], b[0], atol=2e-2)
