"""config.json in the forms that transformers 4 and 5 write, and ModelConfig as plain JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import BitNetConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from diffbit import DiffbitError, models
from diffbit.io import plugins
from diffbit.models.families import read_config, write_config
from diffbit.models.layers.rope import Llama3, NoPositions, inverse_frequencies

from .helpers import LLAMA3, small_config

MINIMAL: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
SCALING = Llama3(8.0, 1.0, 4.0, 16)
OLD_LLAMA3 = {"type": "llama3"} | {name: value for name, value in LLAMA3.items() if name != "rope_type"}


@pytest.mark.parametrize(
    ("values", "theta", "scaling"),
    [
        ({}, 10000.0, None),
        ({"rope_theta": 500000}, 500000.0, None),
        ({"rope_theta": 500.0, "rope_scaling": None}, 500.0, None),
        ({"rope_theta": 500.0, "rope_scaling": LLAMA3}, 500.0, SCALING),
        ({"rope_theta": 500.0, "rope_scaling": OLD_LLAMA3}, 500.0, SCALING),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}, 500.0, None),
        ({"rope_parameters": LLAMA3 | {"rope_theta": 500.0}}, 500.0, SCALING),
        ({"rope_parameters": LLAMA3, "rope_theta": 500.0}, 500.0, SCALING),
    ],
)
def test_rope_in_every_form(values: dict[str, Any], theta: float, scaling: models.RopeScaling | None) -> None:
    config = read_config(MINIMAL | values)
    assert (config.rope_theta, config.rope_scaling) == (theta, scaling)


@pytest.mark.parametrize(("kind", "config_class"), [("llama", LlamaConfig), ("bitnet", BitNetConfig)])
def test_defaults_of_optional_fields_are_transformers(kind: str, config_class: Any) -> None:
    values = MINIMAL | {"num_key_value_heads": 2}
    ours, theirs = read_config(values | {"model_type": kind}), config_class(**values)
    assert ours.rope_width == 8 and getattr(theirs, "head_dim", 8) == 8
    assert ours.norm_eps == theirs.rms_norm_eps and ours.max_position == theirs.max_position_embeddings
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert {"swiglu": "silu"}.get(ours.mlp, ours.mlp) == theirs.hidden_act
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.sub_norms == (kind == "bitnet")
    assert read_config(MINIMAL).layers[0].mixer.num_kv_heads == LlamaConfig(**MINIMAL).num_key_value_heads == 4


@pytest.mark.parametrize("eos", [None, 2, [2, 5]])
def test_eos(eos: Any) -> None:
    config = read_config(MINIMAL | {"eos_token_id": eos})
    assert config.eos_token_ids == {"None": (), "2": (2,), "[2, 5]": (2, 5)}[str(eos)]
    assert write_config(config, "float32")["eos_token_id"] == eos


@pytest.mark.parametrize("attention", models.variants())
@pytest.mark.parametrize("sub_norms", [False, True])
@pytest.mark.parametrize("mlp", ["swiglu", "relu2"])
def test_round_trips(attention: str, sub_norms: bool, mlp: str) -> None:
    values = {"rope_scaling": SCALING, "eos_token_ids": (1, 2), "pad_token_id": 0, "norm_eps": 1e-6}
    config = small_config(attention, sub_norms=sub_norms, mlp=mlp, **values)
    assert models.ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert read_config(json.loads(json.dumps(write_config(config, "bfloat16")))) == config


@pytest.mark.parametrize("kind", ["linear", "dynamic", "llama3", "yarn"])
@pytest.mark.parametrize("width", [8, 128])
@pytest.mark.parametrize("old", [False, True], ids=["rope_parameters", "rope_scaling"])
def test_frequencies_are_transformers(kind: str, width: int, old: bool) -> None:
    """At real sizes (those of Qwen 2.5 and Llama 3.1), from the fields of transformers 5 and of 4."""
    rope = {"rope_type": kind, "factor": 4.0}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if kind == "llama3" else {}
    rope |= {"original_max_position_embeddings": 8192} if kind in ("llama3", "yarn") else {}
    values = MINIMAL | {"num_attention_heads": 1, "head_dim": width, "max_position_embeddings": 32768}
    fields: dict[str, Any] = {"rope_scaling": rope} if old else {"rope_parameters": rope}
    ours = read_config(values | fields | {"rope_theta": 1e6})
    theirs = LlamaConfig(**values, rope_parameters=rope | {"rope_theta": 1e6})
    expected, amplitude = ROPE_INIT_FUNCTIONS[kind](theirs, torch.device("cpu"))
    frequencies = inverse_frequencies(ours.rope_width, ours.rope_theta, ours.rope_scaling)
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)
    assert ours.rope_scaling is not None and ours.rope_scaling.amplitude == amplitude
    assert (amplitude != 1) == (kind == "yarn")
    assert models.ModelConfig.from_dict(json.loads(json.dumps(ours.to_dict()))) == ours
    assert read_config(json.loads(json.dumps(write_config(ours, "float32")))) == ours


def test_a_model_without_positions() -> None:
    """The tables turn nothing; no other family has such a model."""
    config = small_config(rope_scaling=NoPositions())
    cos, sin = models.rope_tables(config, 9)
    assert (cos == 1).all() and (sin == 0).all()
    assert write_config(config, "float32")["model_type"] == "diffbit"
    assert models.ModelConfig.from_dict(config.to_dict()) == config


def test_from_dict_refuses_what_it_does_not_know() -> None:
    good = small_config().to_dict()
    with pytest.raises(DiffbitError, match="unknown field 'window'"):
        models.ModelConfig.from_dict(good | {"window": 4})
    del good["vocab_size"]
    with pytest.raises(DiffbitError, match="vocab_size"):
        models.ModelConfig.from_dict(good)


def test_llama3_tables_against_transformers() -> None:
    """All three regimes (untouched, blended, slowed down) occur among the frequencies of a 32-wide head."""
    rope = LLAMA3 | {"rope_theta": 500.0, "original_max_position_embeddings": 64}
    scaling = Llama3(8.0, 1.0, 4.0, 64)
    theirs = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=128, rope_parameters=rope)
    config = small_config(head_dim=32, rope_theta=500.0, rope_scaling=scaling)
    plain = models.rope_tables(small_config(head_dim=32, rope_theta=500.0), 128)[0]
    cos, sin = models.rope_tables(config, 128)
    expected = LlamaRotaryEmbedding(theirs)(torch.zeros(1), torch.arange(128)[None])
    torch.testing.assert_close(cos, expected[0][0, :, :16], rtol=0, atol=1e-5)
    torch.testing.assert_close(sin, expected[1][0, :, :16], rtol=0, atol=1e-5)
    untouched = (cos == plain).all(0)
    slowed = torch.isclose(cos[8], plain[1]) & ~untouched  # position 8 at an eighth of the frequency
    assert untouched.any() and slowed.any() and not (untouched | slowed).all()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_layers": 0}, "num_layers is 0"),
        ({"hidden_size": -4}, "hidden_size is -4"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"head_dim": 7}, "head_dim is 7, wanted an even number"),
        ({"num_kv_heads": 3}, "num_heads is 4, wanted a multiple of num_kv_heads, which is 3"),
        ({"attention": "linear"}, f"attention is 'linear', wanted one of {', '.join(models.variants())}"),
        ({"mlp": "gelu"}, f"mlp is 'gelu', wanted one of {', '.join(plugins.names('diffbit.models.mlp'))}"),
        ({"sub_norms": 1}, "sub_norms is 1, wanted true or false"),
        ({"rope_theta": 0.0}, "rope_theta is 0.0"),
        ({"norm_eps": float("nan")}, "norm_eps is nan"),
    ],
)
def test_bad_configs(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DiffbitError) as caught:
        small_config(**changes)
    assert sentence in str(caught.value)
