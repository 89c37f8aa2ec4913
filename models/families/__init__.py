"""Families of checkpoints: a file each, found by listing this folder (models/family.py says what it has)."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

from ...errors import DiffbitError
from ..config import ModelConfig
from ..family import Family
from ._huggingface import common_fields

GENERIC = "diffbit"  # holds every model


@cache
def families() -> tuple[Family, ...]:
    """All of them; the generic one is the last."""
    names = [module.name for module in iter_modules(__path__) if not module.name.startswith("_")]
    found = [family for name in names for family in import_module(f".{name}", __name__).FAMILIES]
    return tuple(sorted(found, key=lambda family: (family.model_type == GENERIC, family.model_type)))


def family_of(values: Mapping[str, Any]) -> Family:
    """The family of a parsed config.json."""
    for family in families():
        if family.knows(values):
            return family
    known = sorted({family.model_type for family in families()})
    raise DiffbitError(f"model_type is {values.get('model_type')!r}, wanted one of {', '.join(known)}")


def family_for(config: ModelConfig) -> Family:
    """The family that a model is written in: one that others read, where there is one."""
    return next(family for family in families() if family.write(config) is not None)


def read_config(values: Mapping[str, Any]) -> ModelConfig:
    """The config in a parsed config.json; a DiffbitError (that names no file) where diffbit cannot read it."""
    return family_of(values).read(values)


def write_config(config: ModelConfig, dtype: str, quantization: dict[str, Any] | None = None) -> dict[str, Any]:
    """The config.json of a checkpoint whose float tensors are `dtype` ("float32", "bfloat16" or "float16")."""
    values = family_for(config).write(config)
    assert values is not None
    values["torch_dtype"] = dtype
    return values if quantization is None else values | {"quantization_config": quantization}


def loader_config(config: ModelConfig, dtype: str, max_position: int) -> dict[str, Any]:
    """The config.json of an artifact. To loaders that feed a graph its cache, every model is a llama with so many heads
    in the cache."""
    own = {"architectures": ["LlamaForCausalLM"], "max_position_embeddings": max_position, "torch_dtype": dtype}
    return common_fields(config) | own
