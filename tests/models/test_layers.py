"""Layers that differ, options beyond those of Hugging Face's families, and numbers that follow from weights."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffbit import DiffbitError, models
from diffbit.formats import parse_format
from diffbit.io import plugins
from diffbit.models import LayerSpec, ModelConfig
from diffbit.models.attention import diff_v1, diff_v2, softmax
from diffbit.models.families import family_for, read_config, write_config
from diffbit.models.mlp import relu2, swiglu
from diffbit.quantize import Scheme, load_block, quantize_checkpoint

from .helpers import small_config, tokens

MLPS = ", ".join(plugins.names("diffbit.models.mlp"))
LAYERS = (
    LayerSpec(softmax.Options(4, 2, 8), swiglu.Options(48)),
    LayerSpec(diff_v1.Options(2, 1, 8, norm_eps=1e-6, lambda_init=-0.0099), relu2.Options(40), sub_norms=True),
    LayerSpec(diff_v2.Options(2, 2, 8), swiglu.Options(32)),
)


def mixed() -> ModelConfig:
    return ModelConfig(vocab_size=61, hidden_size=32, layers=LAYERS, max_position=64, rope_theta=100.0)


def test_a_model_of_different_layers(tmp_path: Path) -> None:
    """It is saved, read, run whole, in steps and with padding; each layer is the one of a uniform model."""
    torch.manual_seed(0)
    decoder = models.Decoder(mixed()).eval()
    models.save(decoder, tmp_path / "m")
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == "diffbit"
    again = models.load(tmp_path / "m")
    assert again.config == decoder.config
    assert (again.config.attention, again.config.mlp) == ("softmax, diff_v1, diff_v2", "swiglu, relu2")
    ids = tokens(2, 9)
    whole = again(ids)
    assert torch.equal(whole, decoder(ids))
    cache = models.KVCache(again.config, 2, 9)
    steps = torch.cat([again(part, cache=cache) for part in ids.split((4, 3, 1, 1), 1)], 1)
    torch.testing.assert_close(steps, whole, rtol=0, atol=1e-5)
    assert cache.length == 9
    for index, layer in enumerate(LAYERS):
        uniform = replace(mixed(), layers=(layer,) * 3)
        block = models.Block(uniform, index)
        block.load_state_dict(again.model.layers[index].state_dict())
        rope = models.rope_for(uniform, torch.arange(9)[None])
        x = torch.randn(2, 9, 32)
        assert torch.equal(block(x, rope), again.model.layers[index](x, rope))


def test_family_writes_only_models_it_can_represent() -> None:
    uniform = small_config("diff_v1")
    layer = uniform.layers[0]
    others = [
        replace(uniform, layers=(replace(layer, mixer=replace(layer.mixer, lambda_init=0.5)),) * 2),
        replace(uniform, layers=(replace(layer, mixer=replace(layer.mixer, norm_eps=1e-6)),) * 2),
        replace(uniform, layers=(layer, replace(layer, mlp=swiglu.Options(32)))),
        replace(uniform, layers=(layer, replace(layer, sub_norms=True))),
    ]
    assert family_for(uniform).model_type == "diffllama"
    for config in others:
        assert family_for(config).model_type == "diffbit"
        assert read_config(json.loads(json.dumps(write_config(config, "float32")))) == config


def test_lambda_init_is_the_layers_own_or_that_of_its_index() -> None:
    config = small_config("diff_v1")
    with_lambda_init = replace(config.layers[0], mixer=replace(config.layers[0].mixer, lambda_init=0.25))
    blocks = [models.Block(replace(config, layers=(layer,) * 2), 1) for layer in (config.layers[0], with_lambda_init)]
    assert [block.self_attn.lambda_init for block in blocks] == [diff_v1.lambda_init(1), 0.25]


def test_layers_share_one_table_of_angles() -> None:
    other = LayerSpec(softmax.Options(4, 2, 16), swiglu.Options(48))
    with pytest.raises(DiffbitError, match="heads of widths 8, 16 with rotary embedding, wanted one width"):
        replace(mixed(), layers=(*LAYERS, other))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"mixer": None}, r"layers\[1\]\.mixer is None, wanted an object"),
        (
            {"mixer": {"name": "linear"}},
            r"layers\[1\]\.mixer\.name is 'linear', wanted one of .*diff_v1, diff_v2,",
        ),
        (
            {"mixer": {"name": "softmax", "num_heads": 2}},
            r"layers\[1\]\.mixer\.num_kv_heads is missing, wanted a whole number",
        ),
        ({"mixer": {"name": "softmax", "window": 4}}, "mixer: unknown field 'window'"),
        (
            {"mlp": {"name": "gelu"}},
            rf"mlp\.name is 'gelu', wanted one of {MLPS}",
        ),
        ({"mlp": {"name": "swiglu", "intermediate_size": 0}}, "intermediate_size is 0"),
        ({"sub_norms": 1}, "sub_norms is 1, wanted true or false"),
        ({"bias": True}, r"layers\[1\]: unknown field 'bias', wanted one of mixer, mlp, sub_norms, norms"),
    ],
)
def test_layers_that_are_refused(change: dict[str, Any], sentence: str) -> None:
    values = mixed().to_dict()
    values["layers"][1] |= change
    with pytest.raises(DiffbitError, match=sentence):
        ModelConfig.from_dict(values)
    for layers in (None, 3, [], ["softmax"]):
        with pytest.raises(DiffbitError, match=r"^layers( is None,| is 3,| is \[\],|\[0\] is 'softmax',) wanted"):
            ModelConfig.from_dict(values | {"layers": layers})


def test_an_infinite_lambda_is_refused(tmp_path: Path) -> None:
    """Every weight is finite; lambda, which is computed from them, is not."""
    models.save(models.Decoder(small_config("diff_v1", hidden_size=64)), tmp_path / "m")
    weights = load_file(tmp_path / "m" / "model.safetensors")
    name = "model.layers.1.self_attn.lambda_{}"
    for vector, value in (("q1", 1e30), ("k1", 1.0)):
        weights[name.format(vector)] = torch.full((8,), value)
    save_file(weights, tmp_path / "m" / "model.safetensors")
    checkpoint = models.Checkpoint(tmp_path / "m")
    scheme = Scheme(weights=parse_format("int4_g32"))
    for use in (
        lambda: models.load(checkpoint),
        lambda: models.load_block(checkpoint, 1),
        lambda: load_block(checkpoint, 1),
        lambda: quantize_checkpoint(checkpoint.path, tmp_path / "q", scheme),
    ):
        with pytest.raises(DiffbitError, match=r"model\.layers\.1\.self_attn: lambda, computed from .*, is inf"):
            use()
    models.load_block(checkpoint, 0)
    assert not (tmp_path / "q").exists()
