"""What every variant must do: pieces with a cache and padding change nothing, gradients reach every parameter, another
order of channels is the same model; and the artifacts of mixers and MLPs that differ most give torch's logits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from diffbit.apps.variants.mixers import retention
from diffbit.models import Decoder
from diffbit.quantize.reorder import reordered

from . import (
    checks,
    test_alibi,
    test_crate,
    test_dcmha,
    test_infini,
    test_kan,
    test_moh,
    test_sparse,
    test_ttt,
    test_yoco,
)
from .artifacts import model_of

PLACES = torch.arange(checks.LENGTH)
AROUND = ((PLACES >= 7) & (PLACES < checks.LENGTH - 3)).long()[None]  # a window counts padding between tokens
WINDOWS = {"": 0, ", window": 7}
MODELS: dict[str, Callable[[], Decoder]] = {
    **{
        f"{name}{window}": partial(model_of, replace(options, sliding_window=size))
        for name, options in test_alibi.OPTIONS.items() for window, size in WINDOWS.items()
    },
    **{
        f"dcmha{window}": partial(test_dcmha.composable, replace(test_dcmha.OPTIONS, sliding_window=size))
        for window, size in WINDOWS.items()
    },
    **{f"sparse, {name}": partial(model_of, options) for name, options in test_sparse.OPTIONS.items()},
    **{
        name: partial(model_of, options, test_moh.changed(name, keys_of=0), factor=4)
        for name, options in test_moh.OPTIONS.items()
    },
    "retention": partial(model_of, retention.Options(4, 16), retention.Options(4, 16)),
    "crate": partial(checks.random_decoder, test_crate.CONFIG),
    "infini": partial(checks.random_decoder, test_infini.CONFIG),
    "kan": partial(checks.random_decoder, test_kan.CONFIG),
    "ttt": partial(checks.random_decoder, test_ttt.CONFIG),
    **{f"yoco of {name}, window": partial(checks.random_decoder, config) for name, config in test_yoco.CONFIGS.items()},
}  # fmt: skip
EXACT = {
    **{"crate": 2e-5, "infini": 2e-5, "kan": 2e-5, "ttt": 1e-4, "dcmha": 5e-4, "dcmha, window": 5e-4},
    **dict.fromkeys(test_moh.OPTIONS, 1e-4),
    **{f"yoco of {name}, window": 1e-4 for name in test_yoco.CONFIGS},
}


@pytest.mark.parametrize("name", MODELS)
def test_pieces_padding_and_gradients(name: str) -> None:
    model, atol = MODELS[name](), EXACT.get(name, 2e-4)
    checks.check_pieces_equal_the_whole(model, atol)
    checks.check_padding_changes_nothing(model, atol, AROUND if name.endswith("window") else checks.MASK)
    checks.check_gradients_reach_every_parameter(model)


@pytest.mark.parametrize("name", ["infini", "kan", "ttt"])
@pytest.mark.parametrize(
    ("weights", "dtype", "bound"), [(None, "fp32", 1e-4), ("int8_g32", "fp32", 0.1), (None, "fp16", 0.05)]
)
def test_artifact_computes_what_torch_does(
    tmp_path: Path, name: str, weights: str | None, dtype: str, bound: float
) -> None:
    checks.check_artifact(MODELS[name](), tmp_path, weights, dtype, bound)


@pytest.mark.parametrize("name", ["crate", "kan"])
def test_another_order_of_channels_is_the_same_model(name: str) -> None:
    model = MODELS[name]()
    config, state, ids = model.config, model.state_dict(), checks.ids_of(model.config, 2, 9)
    other, read = Decoder(config), reordered(config, state.__getitem__, 1)
    other.load_state_dict({name: read(name) for name in state})
    assert not torch.equal(state["model.layers.0.mlp.up_proj.weight"], other.model.layers[0].mlp.up_proj.weight)
    torch.testing.assert_close(other(ids), model(ids), rtol=0, atol=2e-5)
