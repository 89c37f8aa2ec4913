"""Scales that are multiplied onto columns and divided out of what makes them: exact, everywhere they are folded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.models import attention_options
from diffbit.models.checkpoint.names import HEAD
from diffbit.models.mixers import Symmetries
from diffbit.quantize import Scheme, apply
from diffbit.quantize.layer import FINAL_NORM
from diffbit.quantize.methods._folding import fold, groups, per_channel, unchanged

from ...configs import BIASES
from ..transforms import config_of, layers, logits64, random_decoder, random_ids, transformed

VARIANTS = ("softmax", "diff_v1", "diff_v2")
SHAPES = {
    "grouped": {},
    "four": {"num_kv_heads": 1, "tie_embeddings": True},
    "odd": {"hidden_size": 37, "num_heads": 6, "num_kv_heads": 3, "head_dim": 6, "intermediate_size": 29}
    | {"head_norm": False},  # diff_v1: values and o_proj, too
    "sub_norms": {"sub_norms": True, "mlp": "relu2"},
    "biases": {"num_kv_heads": 1, "qk_norm_eps": 1e-6, **BIASES},
}


def random_scale(maker, seed=0):
    return torch.rand(len(maker), generator=torch.Generator().manual_seed(seed)) * 3 + 0.2


def scaled(layer, passes):
    """A transform that scales every group at random."""
    with unchanged(layer):
        for index, group in enumerate(groups(layer)):
            fold(layer, group, random_scale(layer.tensors[group.maker], 10 * layer.index + index))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("attention", VARIANTS)
def test_logits_stay(attention, shape):
    decoder = random_decoder(config_of(attention, **SHAPES[shape]), dtype=torch.float64)
    folded, ids = transformed(decoder, SimpleNamespace(transform=scaled)), random_ids()
    torch.testing.assert_close(logits64(folded, ids), logits64(decoder, ids), rtol=0, atol=1e-9)


@pytest.mark.parametrize("sub_norms", [False, True])
@pytest.mark.parametrize("attention", VARIANTS)
def test_every_linear_layer_is_reached(attention, sub_norms):
    """All but what a norm of the heads without weight keeps scales from: o_proj of diff_v1."""
    for layer in layers(random_decoder(config_of(attention, sub_norms=sub_norms))):
        before = dict(layer.tensors)
        scaled(layer, None)
        changed = {name for name, tensor in layer.tensors.items() if not torch.equal(tensor, before[name])}
        kept = {name.removeprefix(layer.prefix) for name in set(before) - changed}
        vectors = {name for name in kept if "lambda_q" in name or "lambda_k" in name}
        kept_out = attention == "diff_v1" and not sub_norms and layer.is_layer
        o_proj = {"self_attn.o_proj.weight"} if kept_out else set()
        assert kept - vectors - o_proj == ({"model.embed_tokens.weight"} if layer.index < 0 else set())
        if layer.index == layer.config.num_layers:
            assert [(group.maker, group.readers) for group in groups(layer)] == [(FINAL_NORM, (HEAD,))]


def test_a_tied_head_is_left_alone():
    *_, last = layers(random_decoder(config_of("softmax", tie_embeddings=True)))
    assert groups(last) == []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_folding_into_a_low_precision_norm_loses_nothing(dtype):
    """The columns follow the quotient that the norm could hold."""
    layer = next(p for p in layers(random_decoder(config_of("softmax"), dtype=dtype)) if p.is_layer)
    with torch.no_grad():
        layer.tensors["model.layers.0.input_layernorm.weight"][3] = 0
    before, group = dict(layer.tensors), groups(layer)[0]
    fold(layer, group, random_scale(before[group.maker]))
    assert layer.tensors[group.maker].dtype == dtype
    for name in group.readers:
        expected = before[name].double() * before[group.maker].double()
        torch.testing.assert_close(
            layer.tensors[name].double() * layer.tensors[group.maker], expected, rtol=1e-14, atol=0
        )
    assert not torch.equal(layer.tensors[group.maker], before[group.maker])


@pytest.mark.parametrize(
    ("attention", "wrong"),
    [
        ("diff_v1", Symmetries(value_width=16, value_scales=True)),  # a norm of the heads stands between
        ("softmax", Symmetries(value_width=4, value_scales=True)),  # other heads' values
    ],
)
def test_what_does_not_cancel_is_refused(attention, wrong, monkeypatch):
    monkeypatch.setattr(attention_options(attention), "symmetries", lambda self: wrong)
    with pytest.raises(DiffbitError, match=rf"^model.layers.0: .* changes the output of '{attention}' by \d"):
        transformed(random_decoder(config_of(attention)), SimpleNamespace(transform=scaled))


@pytest.mark.parametrize("method", ["rotate", "awq"])
def test_a_damaged_weight_is_named(method):
    decoder = random_decoder(config_of("diff_v1"))
    with torch.no_grad():
        decoder.model.layers[0].mlp.up_proj.weight[3, 5] = torch.nan
    with pytest.raises(DiffbitError, match=r"up_proj.weight: the weight holds NaN or infinity"):
        apply(decoder, Scheme(overrides=(("*.up_proj", parse_format("int4_g32")),)), method, random_ids())


def test_columns_that_share_a_channel():
    channels = torch.tensor([0, 1, 0, 1, 2])
    values = torch.tensor([1.0, 2.0, 3.0, 6.0, 5.0])
    assert per_channel(values, channels).tolist() == [2, 4, 5]
