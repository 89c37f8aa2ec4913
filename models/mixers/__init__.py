"""What a mixer is (_mixer.py), and mixers other than attention, such as recurrences with a state of fixed size.

One file each, found by listing this folder (and those of installed packages, io/plugins.py); docs/extending.md shows
another, and apps/variants/ has those of papers without a published model. A file needs nothing but the names below and
operators.
"""

from ...ops.cache import TOKENS, Buffer
from ..graph import Cache, Change, Graph, Heads, Value
from ..layers import Carried, FixedState, Rope, State, apply_rope, real_tokens
from ._mixer import KVBuffers, Mixer, MixerOptions, Operations, Place, Replay, Symmetries

__all__ = [
    "TOKENS", "Buffer", "Cache", "Carried", "Change", "FixedState", "Graph", "Heads", "KVBuffers", "Mixer",
    "MixerOptions", "Operations", "Place", "Replay", "Rope", "State", "Symmetries", "Value", "apply_rope",
    "real_tokens",
]  # fmt: skip
