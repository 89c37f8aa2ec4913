"""Building blocks of layers: attention's products, masks, norms, RoPE, and states between calls."""

from .arithmetic import Arithmetic, LogitsHook, explicit_softmax
from .masks import real_tokens, within
from .norm import LayerNorm, RMSNorm
from .rope import Rope, apply_rope
from .state import Carried, FixedState, State

__all__ = [
    "Arithmetic", "Carried", "FixedState", "LayerNorm", "LogitsHook", "RMSNorm", "Rope", "State", "apply_rope",
    "explicit_softmax", "real_tokens", "within",
]  # fmt: skip
