"""Rotary position embedding (RoFormer, arXiv 2104.09864, eq. 34) with Llama-3 frequency scaling.

Pair j of a head's d numbers is turned by the angle position * theta^(-2j/d). The pair is (x_j, x_{j+d/2}), the
"rotate half" order of Hugging Face; the interleaved order (x_2j, x_2j+1) of Meta's and unilm's code is the same
rotation after a permutation of the rows of q_proj and k_proj (unilm.py). Angles, cos and sin are float32.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..config import ModelConfig, RopeScaling

Rope = tuple[Tensor, Tensor]  # cos and sin, fp32 [B, S, d/2] (or [S, d/2] where stated)


def inverse_frequencies(config: ModelConfig, device: torch.device | str | None = None) -> Tensor:
    """Radians per position of each pair: fp32 [d/2]."""
    exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponent
    return frequencies if config.rope_scaling is None else _llama3(frequencies, config.rope_scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Long wavelengths divided by `factor`, short ones untouched, a linear blend between the two."""
    wavelength = 2 * math.pi / frequencies
    turns = scaling.original_max_position / wavelength  # full turns within the original context
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = blend.clamp(0.0, 1.0)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def rope_for(config: ModelConfig, position_ids: Tensor) -> Rope:
    """cos and sin at `position_ids` (any shape): fp32 [*position_ids.shape, d/2]."""
    angles = position_ids[..., None].float() * inverse_frequencies(config, position_ids.device)
    return angles.cos(), angles.sin()


def rope_tables(config: ModelConfig, length: int) -> Rope:
    """cos and sin of positions 0..length-1: fp32 [length, d/2]."""
    return rope_for(config, torch.arange(length))


def apply_rope(x: Tensor, rope: Rope) -> Tensor:
    """Rotate heads x [B, S, heads, d] by cos, sin [B, S, d/2]; in float32, returned in x's dtype."""
    cos, sin = (table.unsqueeze(-2) for table in rope)  # [B, S, 1, d/2]
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
