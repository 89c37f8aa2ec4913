"""Checkpoint families: one file each, found by listing this folder (models/family.py defines its contents)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from ...io.errors import DiffbitError
from ..config import ModelConfig
from ..family import Family
from ._huggingface import common_fields

__all__ = ["families", "family_for", "family_of"]

GENERIC = "diffbit"  # can represent every model


@cache
def families() -> tuple[Family, ...]:
    """Return all families; the generic one is last."""
    names = [module.name for module in iter_modules(__path__) if not module.name.startswith("_")]
    found = [family for name in names for family in import_module(f".{name}", __name__).FAMILIES]
    return tuple(sorted(found, key=lambda family: (family.model_type == GENERIC, family.model_type)))


def family_of(values: Mapping[str, Any]) -> Family:
    """Return the family of a parsed config.json."""
    for family in families():
        if family.knows(values):
            return family
    known = sorted({family.model_type for family in families()})
    raise DiffbitError(f"model_type is {values.get('model_type')!r}, wanted one of {', '.join(known)}")


def family_for(config: ModelConfig) -> Family:
    """Return the family for writing a model: one that writes and can represent it, else the generic one."""
    return next(family for family in families() if family.writes and family.write(config) is not None)


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
    own = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": max_position, "torch_dtype": dtype}
    return common_fields(config) | own
