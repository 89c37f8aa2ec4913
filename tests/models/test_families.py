"""Which family writes a model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from diffbit.models import ModelConfig, families, variants
from diffbit.models.families import family_for
from diffbit.models.families._huggingface import HuggingFace

from .helpers import small_config

VARIANTS = variants()

NEW = HuggingFace("aaa", "softmax", norm_eps=1e-6)  # the first by the alphabet


def windowed(config: ModelConfig) -> ModelConfig:
    layers = tuple(replace(layer, mixer=replace(layer.mixer, sliding_window=5)) for layer in config.layers)
    return replace(config, layers=layers)


CONFIGS = {
    **{name: small_config(name) for name in VARIANTS},
    **{f"{name}, sub-norms": small_config(name, sub_norms=True) for name in VARIANTS},
    "all biases": small_config("softmax", qkv_bias=True, o_bias=True, mlp_bias=True),
    "biases of queries, keys and values": small_config("softmax", qkv_bias=True),
    "norms of queries and keys": small_config("softmax", qk_norm=True),
    "windows": windowed(small_config("softmax")),
    "relu2": small_config("softmax", mlp="relu2"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_at_most_one_family_claims_a_model(name: str) -> None:
    claims = [each.model_type for each in families.families() if each.writes and each.write(CONFIGS[name]) is not None]
    assert claims[-1] == families.GENERIC and len(claims) <= 2, claims


def test_a_new_family_does_not_take_over_what_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: family_for(config).model_type for name, config in CONFIGS.items()}
    assert before["softmax"] == "llama" and NEW.write(CONFIGS["softmax"]) is not None
    known = families.families()
    monkeypatch.setattr(families, "families", lambda: (NEW, *known))
    assert {name: family_for(config).model_type for name, config in CONFIGS.items()} == before
