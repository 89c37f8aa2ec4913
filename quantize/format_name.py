"""What a scheme is called in a table or a sentence, and how many bits its weights take."""

from __future__ import annotations

from math import prod

from ..models import ModelConfig
from .device_cache import cache_bits
from .scheme import HEAD_MODULE, Scheme, float_linears, linear_shapes


def average_bits(config: ModelConfig, scheme: Scheme) -> float:
    """Return the bits of a weight, scales included: an average over the linear layers of the decoder that the scheme
    quantizes or an override names, where one that stays float has 16. 16 if there are none."""
    formats = scheme.chosen(config)
    counted = {*formats, *scheme.overridden(config)}
    shapes = {name: shape for name, shape in linear_shapes(config).items() if name in counted and name != HEAD_MODULE}
    nbytes = sum(
        formats[name].device_nbytes(shape, 2) if name in formats else 2 * prod(shape) for name, shape in shapes.items()
    )
    return 8 * nbytes / sum(map(prod, shapes.values())) if shapes else 16.0


def format_name(config: ModelConfig, scheme: Scheme, unquantized: str = "float") -> str:
    """Name the formats of a model: "int4_g32", or "mix, 4.3 bits" if linear layers of the decoder have several; with
    those of a low-bit cache, "int4_g32, kv int8", or "int4_g32, kv mix of 3.2 bits". unquantized: the name of float
    weights."""
    floats = float_linears(config) - set(scheme.overridden(config))
    layers = [name for name in linear_shapes(config) if name != HEAD_MODULE and name not in floats]
    formats = {scheme.format_for(name, floats) for name in layers}
    if len(formats) > 1:
        name = f"mix, {average_bits(config, scheme):.1f} bits"
    else:
        (format,) = formats
        name = unquantized if format is None else format.name
    attention = {part: value for part, value in scheme.attention.to_dict().items() if part not in ("window", "first")}
    if "layers" in attention:
        others = {part: value for part, value in attention.items() if part not in ("keys", "values", "layers")}
        attention = {"kv": f"mix of {cache_bits(config, scheme.attention):.1f} bits"} | others
    if "keys" in attention and attention["keys"] == attention.get("values"):
        attention = {"kv": attention.pop("keys")} | {p: value for p, value in attention.items() if p != "values"}
    return ", ".join([name, *(f"{part} {value}" for part, value in attention.items())])
