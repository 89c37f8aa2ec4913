"""A scheme resolved for a model, once, where a command begins: what every later step reads in place of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..formats import Format
from ..io.errors import DiffbitError
from ..models import Checkpoint, ModelConfig
from .scheme import Scheme


@dataclass(frozen=True)
class Plan:
    """What is quantized in a model, and how.

    config   of the model as it is stored, which ties embedding and head only if both have one format
    scheme   that `formats` follow from; it says how activations and attention are rounded
    formats  {module: Format} of all quantized weights, in the model's order, without a tied head
    """

    config: ModelConfig
    scheme: Scheme
    formats: Mapping[str, Format]


def resolve(config: ModelConfig, scheme: Scheme | None = None) -> Plan:
    """Return the plan of a model under a scheme (None: float). Raises DiffbitError if the scheme does not fit."""
    scheme = scheme or Scheme()
    config = replace(config, tie_embeddings=scheme.keeps_tied(config))
    return Plan(config, scheme, scheme.formats(config))


def check_float(checkpoint: Checkpoint) -> None:
    """Refuse a checkpoint that is quantized already."""
    if checkpoint.quantization is not None:
        raise DiffbitError(
            f"{checkpoint.path}: is quantized already, and `diffbit export` takes it as it is; for other formats, "
            "start from the float checkpoint it was made from"
        )
