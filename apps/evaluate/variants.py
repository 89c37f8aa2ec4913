"""What to compare with the 16-bit model: weights in a number format, rounded by a method, or a part of attention.

A number of bits stands for a format: 8 for int8 (one scale per row), 7 to 2 for int7_g64 ... int2_g64. A format may
also be named: int4_g32, nf4, ternary. Parts of attention (quantize/attention.py) take the widths that they have a
format for and leave out the others:

    logits          2 to 8, dynamic absmax per query row (arXiv 2410.05258, Figure 8). Only in torch, for comparison;
                    artifacts do not support it
    qk              8, 4: integer products; the keys then have as many bits
    kv              8, 4, 2, or int8, int4, int2: keys and values of the KV cache
    keys, values    the same, one without the other

A method is a recipe of quantize/methods, such as "gptq" or "rotate+gptq". An artifact, which runs on ONNX Runtime, is a
variant, too: of the checkpoint that it was made from.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ...formats import Format, parse_format
from ...io.errors import DiffbitError
from ...quantize import AttentionScheme, Scheme, parse_recipe, table_formats
from ...quantize.scheme import KV, LOGIT_BITS, QK
from ...runtime import Artifact

BITS = ("16", "8", "6", "4", "3", "2", "ternary")
ATTENTION = {"qk": QK, "kv": KV, "keys": KV, "values": KV}  # the formats that each part takes
WHAT = ("weights", "logits", *ATTENTION)
METHODS = ("rtn",)
FLOAT = "16"  # the unchanged checkpoint
NO_METHOD = "none"  # of a variant whose weights are not rounded
GROUP_SIZE = 64  # of a format that is given as a number of bits below 8


@dataclass(frozen=True)
class Variant:
    """A model to compare with the 16-bit model."""

    what: str  # one of WHAT, or "artifact"
    format: str  # int4_g64, nf4, ...; int8, int4, int2 for qk and the KV cache; "4-bit" for logits
    method: str  # rtn, gptq, rotate+gptq, ...; NO_METHOD unless weights are rounded
    bits: float  # of one number, without scales; ternary: log2(3)
    scheme: Scheme

    @property
    def key(self) -> tuple[str, str, str]:
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
        return f"{self.what} at {self.format}" + (f" by {self.method}" if self.what == "weights" else "")


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
    found: list[Variant] = []
    if "weights" in what:
        for format in dict.fromkeys(formats.values()):  # "8" and "int8" are one
            embedding, head = table_formats(True, None, None)  # as `diffbit quantize` has them by default
            scheme = Scheme(format, embedding, head)
            found += [Variant("weights", format.name, recipe, bits_of(format), scheme) for recipe in recipes]
    if "logits" in what:
        found += [_logits(int(entry)) for entry in formats if entry.isdigit() and int(entry) in LOGIT_BITS]
    for part in (part for part in ATTENTION if part in what):
        found += _attention(part, formats)
    if not found and formats:
        raise DiffbitError(
            f"--bits {','.join(widths)} with --what {','.join(what)} leaves nothing to compare with the 16-bit model; "
            f"give widths such as {','.join(BITS)}, or 16 alone for the models as they are"
        )
    return found


def on_a_device(artifact: Artifact) -> Variant:
    """Return the variant that describes an artifact."""
    scheme = Scheme() if artifact.scheme is None else Scheme.from_dict(artifact.scheme)
    weights = artifact.dtype if scheme.weights is None else scheme.weights.name
    cache = {part: format for part, format in scheme.attention.to_dict().items() if part != "window"}
    format = ", ".join([f"{weights}, mixed" if scheme.overrides else weights, *(f"{k} {v}" for k, v in cache.items())])
    bits = 16.0 if scheme.weights is None else bits_of(scheme.weights)
    return Variant("artifact", format, artifact.method or NO_METHOD, bits, scheme)


def bits_of(format: Format) -> float:
    """Bits of one number, without scales."""
    return round(math.log2(format.codes), 3)


def _logits(bits: int) -> Variant:
    return Variant("logits", f"{bits}-bit", NO_METHOD, bits, Scheme(attention=AttentionScheme(logits=bits)))


def _attention(part: str, entries: Iterable[str]) -> list[Variant]:
    """Variants of one part of attention, in those of the formats that it has."""
    names = dict.fromkeys(f"int{entry}" if entry.isdigit() else entry for entry in entries)
    rounded = ("keys", "values") if part == "kv" else (part,)
    return [
        Variant(
            part, name, NO_METHOD, int(name.removeprefix("int")),
            Scheme(attention=AttentionScheme.from_dict(dict.fromkeys(rounded, name))),
        )
        for name in names
        if name in ATTENTION[part]
    ]  # fmt: skip


def _format(entry: str) -> Format:
    if not entry.isdigit():
        return parse_format(entry)
    if not 2 <= int(entry) <= 8:
        raise DiffbitError(f"{entry} bits: wanted 16 (the model as it is), 8 to 2, or a format such as int4_g32 or nf4")
    return parse_format("int8" if entry == "8" else f"int{entry}_g{GROUP_SIZE}")
