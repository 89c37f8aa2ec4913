"""States of a fixed size in int8: the artifact against torch, with the same calls, and what it stores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from diffbit.apps.variants.mixers import infini, retention, ttt
from diffbit.io.errors import DiffbitError
from diffbit.models import KVCache
from diffbit.models.attention import diff_v1, softmax
from diffbit.models.mixers import MixerOptions, mamba
from diffbit.quantize import AttentionScheme, Scheme, apply
from diffbit.runtime import Artifact, Session

from ...export.helpers import relative_error
from .artifacts import artifact_of, model_of, tokens

MIXERS: dict[str, MixerOptions] = {
    "retention": retention.Options(4, 16),
    "infini": infini.Options(4, 16, segment=6),
    "ttt": ttt.Options(4, 16, mini_batch=5),
    "mamba": mamba.Options(96, 16, 3, 32),
}
CALLS = (11, 1, 1, 6, *(1,) * 9)


@pytest.mark.slow
@pytest.mark.parametrize("kv", ["float", "int8"])
@pytest.mark.parametrize("name", MIXERS)
def test_session_rounds_states_as_torch_does(tmp_path: Path, name: str, kv: str) -> None:
    model = model_of(MIXERS[name], diff_v1.Options(2, 1, 16), MIXERS[name], factor=3)
    artifact, reference = artifact_of(model, tmp_path, kv=kv, states="int8")
    ids, exact = tokens(1, sum(CALLS)), apply(model, Scheme(attention=AttentionScheme()))
    cache, other = KVCache(model.config, 1, 64), KVCache(model.config, 1, 64)
    right, floats = (
        torch.cat([one(part, cache=kept)[0, -1:] for part in ids.split(CALLS, 1)])
        for one, kept in ((reference, cache), (exact, other))
    )
    rounding = relative_error(right.numpy(), floats).max()
    assert rounding > 3e-4  # int8 is not float
    for native in (False, True):
        session = Session(artifact, threads=1, native=native)
        rows = [part.numpy() for part in ids.split(CALLS, 1)]
        logits = [session.prefill(row)[0] if row.shape[1] > 1 else session.step(row)[0] for row in rows]
        apart = relative_error(np.stack(logits), right)
        # another order of sums may round a number up instead of down, now and then
        assert np.median(apart) < rounding / 10 and apart.max() < 2 * rounding, (native, apart.max(), rounding)


@pytest.mark.parametrize("name", MIXERS)
def test_int8_states_take_a_quarter_and_their_scales(tmp_path: Path, name: str) -> None:
    model = model_of(MIXERS[name])
    whole = Artifact.open(artifact_of(model, tmp_path / "float")[0]).cache
    small = Artifact.open(artifact_of(model, tmp_path / "int8", states="int8")[0]).cache
    floats, codes = whole.buffers, small.buffers
    assert set(codes) == {part for buffer in floats for part in (buffer, f"{buffer}_scale")}
    for buffer, old in floats.items():
        assert codes[buffer].dtype == "int8" and codes[buffer].shape == old.shape
        assert 4 * codes[buffer].nbytes(0) == old.nbytes(0)
        assert codes[f"{buffer}_scale"].nbytes(0) * old.shape[-1] == old.nbytes(0)


def test_a_row_of_zeros_stays_zero(tmp_path: Path) -> None:
    """Infini's memory is empty in the first segment, so its scales are 0."""
    artifact, reference = artifact_of(model_of(infini.Options(4, 16, segment=30)), tmp_path, states="int8")
    ids, cache = tokens(1, 12), KVCache(reference.config, 1, 64)
    right = torch.cat([reference(part, cache=cache)[0] for part in ids.split(4, 1)])
    session = Session(artifact, threads=1)
    logits = [session.prefill(part.numpy(), all_positions=True)[0] for part in ids.split(4, 1)]
    assert relative_error(np.concatenate(logits), right).max() < 0.01


def test_a_model_without_states_is_refused() -> None:
    model = model_of(softmax.Options(2, 1, 16))
    with pytest.raises(DiffbitError, match="states cannot be int8: the model has none"):
        Scheme(attention=AttentionScheme(states="int8")).formats(model.config)
    with pytest.raises(DiffbitError, match=r"states is 'int4', wanted"):
        AttentionScheme.from_dict({"states": "int4"})
