"""onnxruntime-genai and diffbit's own runtime read the artifacts and generate torch's greedy tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from diffbit import runtime
from diffbit.export import export_artifact, reference_model
from diffbit.runtime import Artifact

from .conftest import Maker
from .helpers import VARIANTS, write_artifact

PROMPT, COUNT = [5, 17, 42], 24


def torch_tokens(checkpoint: Path) -> list[int]:
    model, tokens = reference_model(checkpoint), list(PROMPT)
    with torch.inference_mode():
        for _ in range(COUNT):
            logits = model(torch.tensor([tokens]))[0, -1]
            logits[3] = -torch.inf  # the end token, which the loaders are told not to take
            tokens.append(int(logits.argmax()))
    return tokens


@pytest.mark.parametrize(
    "format", ["int4_g32", *(pytest.param(name, marks=pytest.mark.slow) for name in (None, "ternary"))]
)
@pytest.mark.parametrize("attention", VARIANTS)
def test_genai(checkpoint_of: Maker, attention: str, format: str | None) -> None:
    og = pytest.importorskip("onnxruntime_genai")
    checkpoint = checkpoint_of(attention, format)
    check_genai(og, write_artifact(checkpoint), checkpoint)
    if format != "ternary":  # whose rounded activations turn the smallest difference into another token
        check_genai(og, write_artifact(checkpoint, kv="fp16"), checkpoint)


@pytest.mark.parametrize("format", [None, "ternary"])
def test_genai_with_the_native_library(
    checkpoint_of: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str | None
) -> None:
    """The library in the folder is what runs, whatever the current folder is, and the cache is written in place."""
    og = pytest.importorskip("onnxruntime_genai")
    checkpoint = checkpoint_of("diff_v1", format)
    artifact = export_artifact(checkpoint, tmp_path / "artifact", library=True, kv=None if format is None else "fp16")
    config = json.loads((artifact / "genai_config.json").read_text())
    assert config["search"]["past_present_share_buffer"] is True
    name = config["model"]["decoder"]["session_options"]["custom_ops_library"]
    assert name in Artifact.open(artifact).files
    monkeypatch.chdir(tmp_path)
    check_genai(og, artifact, checkpoint)
    (artifact / name).unlink()
    with pytest.raises(Exception, match=name):  # it has no bodies to fall back on
        og.Model(str(artifact))


def check_genai(og: Any, artifact: Path, checkpoint: Path) -> None:
    """It generates torch's greedy tokens, alone and in a batch."""
    model = og.Model(str(artifact))
    length = len(PROMPT) + COUNT
    for batch in (1, 2):
        params = og.GeneratorParams(model)
        params.set_search_options(max_length=length, min_length=length, do_sample=False, batch_size=batch)
        generator = og.Generator(model, params)
        generator.append_tokens(np.array([PROMPT] * batch, np.int32))
        while not generator.is_done():
            generator.generate_next_token()
        assert generator.get_sequence(batch - 1).tolist() == torch_tokens(checkpoint)


@pytest.mark.parametrize("attention", VARIANTS)
def test_runtime_session(checkpoint_of: Maker, attention: str) -> None:
    checkpoint = checkpoint_of(attention)
    session = runtime.Session(write_artifact(checkpoint), threads=1)
    tokens = list(PROMPT)
    logits = session.prefill([PROMPT])
    for _ in range(COUNT):
        logits[0, 3] = -np.inf
        tokens.append(int(logits[0].argmax()))
        logits = session.step([tokens[-1:]])
    assert tokens == torch_tokens(checkpoint)
    # a padded batch, either side
    ids, mask = np.array([[0, 0, *PROMPT], [9, 8, 7, 6, 5]]), np.array([[0, 0, 1, 1, 1], [1] * 5])
    session.reset()
    logits = session.prefill(ids, mask)
    model = reference_model(checkpoint)
    with torch.inference_mode():
        expected = [model(torch.tensor([row]))[0, -1] for row in (PROMPT, [9, 8, 7, 6, 5])]
    np.testing.assert_allclose(logits, torch.stack(expected).numpy(), atol=1e-4 * float(expected[0].std()))
