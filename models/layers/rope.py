"""Rotary position embedding (RoFormer, arXiv 2104.09864, eq. 34) with Llama-3 frequency scaling.

Pair j of a head's d numbers is turned by the angle position * theta^(-2j/d). The pair is (x_j, x_{j+d/2}), the
"rotate half" order of Hugging Face; the interleaved order (x_2j, x_2j+1) of Meta's and unilm's code is the same
rotation after a permutation of the rows of q_proj and k_proj (families/unilm.py). Angles, cos and sin are float32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import DiffbitError
from ..checks import check_count, check_positive

Rope = tuple[Tensor, Tensor]  # cos and sin, fp32 [B, S, d/2] (or [S, d/2] where stated)


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 frequency scaling (rope_type "llama3"): long wavelengths are slowed down by `factor`."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            check_positive(name, getattr(self, name))
        check_count("original_max_position", self.original_max_position)
        if self.high_freq_factor <= self.low_freq_factor:
            raise DiffbitError(
                f"rope scaling: high_freq_factor is {self.high_freq_factor}, wanted more than low_freq_factor, "
                f"which is {self.low_freq_factor}"
            )


def inverse_frequencies(
    width: int, theta: float, scaling: RopeScaling | None = None, device: torch.device | str | None = None
) -> Tensor:
    """Radians per position of each pair of a head `width` = d wide: fp32 [d/2]."""
    exponent = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
    frequencies = 1.0 / theta**exponent
    return frequencies if scaling is None else _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths divided by `factor`, short ones untouched, a linear blend between the two."""
    wavelength = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelength  # full turns within the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate heads x [B, S, heads, d] by cos, sin [B, S, d/2]; in float32, returned in x's dtype."""
    cos, sin = (table.unsqueeze(-2) for table in rope)  # [B, S, 1, d/2]
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
