"""Checkpoint families: one file each, found by listing this folder (and those of installed packages, io/plugins.py).

_family.py defines the contents of a file, _huggingface.py has what most have in common; a file needs nothing but the
names below.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from ...io import plugins
from ...io.errors import DiffbitError
from ..config import ModelConfig
from ..layers.rope import interleaved
from ._changing import check_fields
from ._family import ROPE, Family, Stored, parts
from ._huggingface import (
    FULL,
    SLIDING,
    HuggingFace,
    attention_of,
    changed,
    common_fields,
    layer_types,
    rope_settings,
    rope_theta,
    special_tokens,
    windowed,
)

__all__ = [
    "FULL", "ROPE", "SLIDING", "Family", "HuggingFace", "Stored", "attention_of", "changed", "diff_llama_v2",
    "diffllama", "families", "family_for", "family_of", "interleaved", "layer_types", "model_types", "parts",
    "rope_settings", "rope_theta", "special_tokens", "windowed",
]  # fmt: skip

GENERIC = "diffbit"  # can represent every model


@cache
def families() -> tuple[Family, ...]:
    """Return all families; the generic one is last."""
    known = [family for name in plugins.names(__name__) for family in plugins.load(__name__, name).FAMILIES]
    return tuple(sorted(known, key=lambda family: (family.model_type == GENERIC, family.model_type)))


def model_types() -> set[str]:
    """Return the model_types that a config.json may have."""
    return {family.model_type for family in families() if family.model_type}


def family_of(values: Mapping[str, Any]) -> Family:
    """Return the family of a parsed config.json. Raises DiffbitError for a field that changes what the model
    computes, and that the family does not read."""
    for family in families():
        if family.knows(values):
            if family.model_type != GENERIC:  # which refuses every unknown field itself
                check_fields(values, family.reads)
            return family
    known = sorted(model_types())
    raise DiffbitError(f"model_type is {values.get('model_type')!r}, wanted one of {', '.join(known)}")


def family_for(config: ModelConfig) -> Family:
    """Return the family that writes a model: the one with the lowest `writes` of those that can represent it.

    Raises DiffbitError if several have that number, for the alphabet must not decide.
    """
    able = [(family.writes, family) for family in families() if family.writes is not None and family.write(config)]
    first = min(turn for turn, _ in able)
    writers = [family for turn, family in able if turn == first]
    if len(writers) > 1:
        names = " and ".join(family.model_type for family in writers)
        raise DiffbitError(
            f"the families {names} would both write this model; uninstall the package that adds one of them, or give "
            "that family a higher `writes`"
        )
    return writers[0]


def read_config(values: Mapping[str, Any]) -> ModelConfig:
    """Return the config in a parsed config.json; raises DiffbitError (without a file name) if it is unsupported."""
    return family_of(values).read(values)


def write_config(config: ModelConfig, dtype: str, quantization: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the config.json of a checkpoint whose float tensors are `dtype` ("float32", "bfloat16" or "float16")."""
    values = family_for(config).write(config)
    assert values is not None
    values["torch_dtype"] = dtype
    return values if quantization is None else values | {"quantization_config": quantization}


def loader_config(config: ModelConfig, dtype: str, max_position: int) -> dict[str, Any]:
    """Return the config.json of an artifact. It describes every model as a llama with the right number of cache heads,
    which is all that loaders need to pass the cache to the graph."""
    fields = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": max_position, "torch_dtype": dtype}
    return common_fields(config) | fields
