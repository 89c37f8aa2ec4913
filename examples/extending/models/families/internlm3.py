"""InternLM 3: a llama whose default context is 32,768 tokens."""

from __future__ import annotations

from . import HuggingFace

FAMILIES = (HuggingFace("internlm3", "softmax", defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 32768}),)
