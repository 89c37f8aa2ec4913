"""Number formats as values: the numbers that a weight is rounded to, and how they are stored.

    name           codes             weight
    int4_g32       0 ... 2^b - 1     scale * (code - 2^(b-1))        one scale per 32 weights of a row
    int4_g32_asym  0 ... 2^b - 1     scale * (code - zero)           and one zero point
    int8           0 ... 255         scale * (code - 128)            one scale per row (output channel)
    int5_g32_s8    0 ... 2^b - 1     row scale * step / 128 * (code - 2^(b-1))    a step of 8 bits per 32 weights
    nl4_g32_s8     0 ... 15          row scale * step / 128 * LEVELS[code]        levels denser near zero
    nf4            0 ... 15          absmax * NF4[code]              blocks of 64 (QLoRA, arXiv 2305.14314)
    fp4            0 ... 15          absmax * FP4[code]              blocks of 64 (bitsandbytes)
    mxfp4          0 ... 15          2^(s - 127) * E2M1[code]        blocks of 32 (OCP MX v1.0)
    nvfp4          0 ... 15          scale * E4M3[s] * E2M1[code]    blocks of 16, one scale per tensor (NVIDIA)
    ternary        0, 1, 2           scale * (code - 1)              one scale per tensor (b1.58, arXiv 2402.17764)
    ternary_g128   0, 1, 2           scale * (code - 1)              one scale per 128 weights of a row
    bin_g128       0, 1              scale * (2 code - 1)            likewise: 1.125 bits
    balanced2_g128 0 ... 3           scale * (2 code - 3)            likewise (SEQ, arXiv 2502.02631)

Each kind of format is one file of this folder, or one that a package adds to it (io/plugins.py). It has a `Format`
(base.py), parse(name) -> Format or None, names(), and GRAMMAR, a description of its names.
"""

from __future__ import annotations

from types import ModuleType

from ..io import plugins
from ..io.errors import DiffbitError
from .base import BLOCK, Format, QTensor, divisor, finite, row_blocks
from .codebook import TABLES, CodebookFormat
from .integer import GROUP_SIZES, IntFormat
from .linear import QuantEmbedding, QuantLinear
from .mx import MXFormat
from .packing import pack_bits, row_bytes, unpack_bits
from .rounding import (
    Rounding,
    quantize_per_block_int8,
    quantize_per_token_int8,
    rounded_input,
    spread,
    straight_through,
)
from .ternary import TernaryFormat

KINDS: tuple[ModuleType, ...] = tuple(
    file for name in plugins.names(__name__) if hasattr(file := plugins.load(__name__, name), "parse")
)

__all__ = [
    "BLOCK", "GROUP_SIZES", "TABLES", "CodebookFormat", "Format", "IntFormat", "MXFormat", "QTensor", "QuantEmbedding",
    "QuantLinear", "Rounding", "TernaryFormat", "choose_format", "divisor", "finite", "names", "pack_bits",
    "parse_format", "quantize_per_block_int8", "quantize_per_token_int8", "rounded_input", "row_blocks", "row_bytes",
    "spread", "straight_through", "unpack_bits",
]  # fmt: skip


def parse_format(name: str) -> Format:
    """Return the format with a name such as "int4_g32", "int3_g64_asym", "int8", "nf4", "mxfp4" or "ternary"."""
    for kind in KINDS:
        format: Format | None = kind.parse(name)
        if format is not None:
            return format
    grammars = "; ".join(kind.GRAMMAR for kind in KINDS)
    raise DiffbitError(f"{name!r} is not a number format; wanted one of: {grammars}")


def choose_format(name: str) -> Format:
    """Return the format that a user names; refuse one that only other libraries' checkpoints need."""
    format = parse_format(name)
    format.check_offered()
    return format


def names() -> list[str]:
    """Return the names of the formats that a user can choose; `parse_format` accepts those of other libraries' too."""
    return [name for kind in KINDS for name in kind.names()]
