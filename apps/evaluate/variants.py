"""What is measured of a model: the model as it is, its weights in a number format, or a part of its attention; and the
quantized checkpoints and artifacts that were made of it.

A number of bits stands for a format: 8 for int8 (one scale per row), 6 to 2 for int6_g64 ... int2_g64. Parts of
attention (quantize/attention.py) take the widths that they have a format for and leave out the others:

    logits          2 to 8, dynamic absmax per query row (arXiv 2410.05258, Figure 8); in torch, not in artifacts
    probabilities   2 to 8, each softmax map by itself, a scale per query row; in torch, not in artifacts
    qk              8, 4: integer products; the keys then have as many bits
    kv, kv:0        8, 4, 3, 2, or int8, int4, int3, int2: keys and values of the KV cache; kv:0 keeps no tokens in
                    float16
    keys, values    the same, one without the other

A method is a recipe of quantize/methods, such as "gptq" or "rotate+gptq".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...formats import Format, choose_format
from ...io.errors import DiffbitError
from ...models import Checkpoint, ModelConfig
from ...quantize import (
    EMBEDDING_MODULE,
    HEAD_MODULE,
    KV,
    LOGIT_BITS,
    QK,
    AttentionScheme,
    Scheme,
    average_bits,
    format_name,
    table_formats,
)
from ...quantize.methods import parse_recipe
from ...runtime import Artifact

BITS = ("16", "8", "6", "4", "3", "2", "ternary")
TABLES = (EMBEDDING_MODULE, HEAD_MODULE)
CACHED = {"qk": QK, "kv": KV, "kv:0": KV, "keys": KV, "values": KV}  # parts of attention, and the formats of each
IN_TORCH = ("logits", "probabilities")  # parts of attention that no artifact rounds
WHAT = ("weights", *IN_TORCH, *CACHED)
RTN = "rtn"  # rounding to nearest, which other methods are compared with
METHODS = (RTN,)
UNCHANGED, FLOAT = "none", "16"  # the checkpoint as it is, and its format if it is not quantized
STORED, ON_DEVICE = "checkpoint", "artifact"  # quantized ones that are measured as they are
FOLDERS = (STORED, ON_DEVICE)
NO_METHOD = "none"  # of a variant whose weights are not rounded
GROUP_SIZE = 64  # of a format that is given as a number of bits below 8
Key = tuple[str, str, str]


@dataclass(frozen=True)
class Variant:
    """What is measured of a model."""

    what: str  # one of WHAT, UNCHANGED or FOLDERS
    format: str  # int4_g64, nf4, ...; int8, int4, int3, int2 for qk and the KV cache; "4-bit" for those IN_TORCH
    method: str  # rtn, gptq, rotate+gptq, ...; NO_METHOD unless weights are rounded
    bits: float  # of one number, without scales; ternary: log2(3); of a mix of formats, the average with scales
    scheme: Scheme
    name: str = ""  # of the folder, if it is one of FOLDERS

    @property
    def key(self) -> Key:
        return self.what, self.format, self.method

    @property
    def rounds(self) -> bool:
        """Whether weights are rounded, so that another rounding would give another model."""
        return self.method != NO_METHOD

    @property
    def calibrates(self) -> bool:
        """Whether its method needs calibration text."""
        return self.rounds and parse_recipe(self.method).calibrated

    def __str__(self) -> str:
        if self.what == UNCHANGED:
            return "16 bits" if self.format == FLOAT else self.format
        if self.name:
            return self.name
        return f"{self.what} at {self.format}" + (f" by {self.method}" if self.what == "weights" else "")


def unchanged(scheme: Scheme | None, config: ModelConfig | None = None) -> Variant:
    """Return the variant that is the checkpoint as it is; scheme and config: of one that is quantized already."""
    if scheme is None or config is None:
        return Variant(UNCHANGED, FLOAT, NO_METHOD, 16.0, scheme or Scheme())
    return Variant(UNCHANGED, format_name(config, scheme), NO_METHOD, _bits(config, scheme), scheme)


def variants(bits: Sequence[str] = BITS, what: Sequence[str] = WHAT, methods: Sequence[str] = METHODS) -> list[Variant]:
    """Return the variants for `bits`, `what` and `methods`, weights first, without the 16-bit model.

    The list is empty for "16" alone: then only the unchanged models are measured. Raises DiffbitError for a width,
    format, part or method that does not exist, and if no width is valid for any part.
    """
    for name in what:
        if name not in WHAT:
            raise DiffbitError(f"{name!r} cannot be compared; wanted one or more of {', '.join(WHAT)}")
    recipes = list(dict.fromkeys(parse_recipe(method).name for method in methods))
    widths = list(dict.fromkeys(str(entry).strip() for entry in bits))
    formats = {entry: _format(entry) for entry in widths if entry != FLOAT}
    chosen: list[Variant] = []
    if "weights" in what:
        for format in dict.fromkeys(formats.values()):  # "8" and "int8" are one
            embedding, head = table_formats(True, None, None)  # as `diffbit quantize` has them by default
            scheme = Scheme(format, embedding, head)
            chosen += [Variant("weights", format.name, recipe, bits_of(format), scheme) for recipe in recipes]
    for part in (part for part in WHAT[1:] if part in what):
        chosen += _attention(part, formats)
    if not chosen and formats:
        raise DiffbitError(
            f"--bits {','.join(widths)} with --what {','.join(what)} leaves nothing to compare with the 16-bit model; "
            f"give widths such as {','.join(BITS)}, or 16 alone for the models as they are"
        )
    return chosen


def stored(checkpoint: Checkpoint, scheme: Scheme, name: str) -> Variant:
    """Return the variant that describes a quantized checkpoint."""
    config, entry = checkpoint.config, checkpoint.quantization or {}
    method = next((entry[key] for key in ("method", "quant_method") if isinstance(entry.get(key), str)), NO_METHOD)
    return Variant(STORED, format_name(config, scheme), method, _bits(config, scheme), scheme, name)


def on_a_device(artifact: Artifact, name: str = "") -> Variant:
    """Return the variant that describes an artifact."""
    scheme = Scheme() if artifact.scheme is None else Scheme.from_dict(artifact.scheme)
    config = ModelConfig.from_dict(dict(artifact.model))
    format = format_name(config, scheme, unquantized=artifact.dtype)
    return Variant(ON_DEVICE, format, artifact.method or NO_METHOD, _bits(config, scheme), scheme, name)


def _bits(config: ModelConfig, scheme: Scheme) -> float:
    """Bits of one number, without scales; of a mix of formats, the average with scales."""
    formats = {format for module, format in scheme.chosen(config).items() if module not in TABLES}
    return bits_of(formats.pop()) if len(formats) == 1 else round(average_bits(config, scheme), 3)


def bits_of(format: Format) -> float:
    """Bits of one number, without scales."""
    return round(math.log2(format.codes), 3)


def _attention(part: str, entries: Iterable[str]) -> list[Variant]:
    """Variants of one part of attention, at those of the widths that it has."""
    if part in IN_TORCH:
        bits = {f"{entry}-bit": int(entry) for entry in entries if entry.isdigit() and int(entry) in LOGIT_BITS}
        schemes = {name: AttentionScheme.from_dict({part: width}) for name, width in bits.items()}
    else:
        names = dict.fromkeys(f"int{entry}" if entry.isdigit() else entry for entry in entries)
        bits = {name: int(name.removeprefix("int")) for name in names if name in CACHED[part]}
        rounded = ("keys", "values") if part.startswith("kv") else (part,)
        more = {"window": 0, "first": 0} if part == "kv:0" else {}
        schemes = {name: AttentionScheme.from_dict(dict.fromkeys(rounded, name) | more) for name in bits}
    return [Variant(part, name, NO_METHOD, bits[name], Scheme(attention=schemes[name])) for name in bits]


def _format(entry: str) -> Format:
    if not entry.isdigit():
        return choose_format(entry)
    if not 2 <= int(entry) <= 8:
        raise DiffbitError(f"{entry} bits: wanted 16 (the model as it is), 8, 6 to 2, or a format such as int4_g32")
    return choose_format("int8" if entry == "8" else f"int{entry}_g{GROUP_SIZE}")
