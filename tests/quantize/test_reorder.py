"""Another order of the channels: the same model in float, another one rounded."""

from __future__ import annotations

import pytest
import torch

from diffbit.apps.train.presets import model_config
from diffbit.formats import parse_format
from diffbit.models import Decoder, variants
from diffbit.quantize import Scheme, apply

from ..apps.variants import checks
from ..export.helpers import relative_error
from .transforms import config_of, logits64, random_decoder, random_ids


def dense(decoder: Decoder, order: int) -> Decoder:
    return apply(decoder, Scheme(), "rtn", order=order)


@pytest.mark.parametrize("attention", ["softmax", "diff_v1", "diff_v2"])
@pytest.mark.parametrize("mlp", ["swiglu", "polynorm"])
def test_the_float_model_stays(attention: str, mlp: str) -> None:
    everything = {"sub_norms": True, "qkv_bias": True, "o_bias": True, "mlp_bias": True}
    config = (
        config_of(attention, mlp=mlp, tie_embeddings=True)
        if mlp == "swiglu"
        else config_of(attention, mlp=mlp, **everything)
    )
    decoder, ids = random_decoder(config, dtype=torch.float64), random_ids()
    expected = logits64(decoder, ids)
    for order in (1, 2):
        reordered = dense(decoder, order)
        torch.testing.assert_close(logits64(reordered, ids), expected, rtol=0, atol=1e-9)
        for module in ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj"):
            before, other = (one.model.layers[1].get_submodule(module).weight for one in (decoder, reordered))
            assert not torch.equal(before, other) and torch.equal(
                before.sum().round(decimals=8), other.sum().round(decimals=8)
            )


@pytest.mark.parametrize("attention", variants())
@torch.no_grad()
def test_every_attention_stays(attention: str) -> None:
    config = model_config("pico", attention, mlp="ista" if attention == "crate" else "swiglu")
    model, ids = checks.random_decoder(config), checks.ids_of(config, 2, 20)
    error = relative_error(dense(model, 1)(ids).numpy(), model(ids))
    assert float(error.max()) < 1e-3


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_its_rounding_is_another(method: str) -> None:
    decoder, ids = random_decoder(config_of("diff_v1")), random_ids(8, 32)
    scheme = Scheme(parse_format("int3_g16"))
    models = [apply(decoder, scheme, method, ids, order=order) for order in (0, 0, 1)]
    with torch.inference_mode():
        exact = decoder(ids)
        losses = [float((one(ids) - exact).square().mean()) for one in models]
    assert losses[0] == losses[1] != losses[2]
    assert 0.5 < losses[2] / losses[0] < 2
