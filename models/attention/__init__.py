"""Attention variants: one file each, found by listing this folder (and those of installed packages, io/plugins.py).

_attention.py has their shared code, models/mixers/ says what a mixer is; a file needs nothing but the names below.

Canonical row order: sub-heads in adjacent pairs (2i signal, 2i+1 noise); a 2d-wide value of diff_v1 is two neighbouring
sub-heads. Files on disk may have another order, which families/ converts.
"""

from ..graph import Heads
from ._attention import Attention, AttentionOptions, Differential, Projected

__all__ = ["Attention", "AttentionOptions", "Differential", "Heads", "Projected", "diff_v1", "diff_v2", "softmax"]
