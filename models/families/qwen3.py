"""Hugging Face's qwen3: a llama with an RMSNorm of each query and key head; the default head_dim is 128."""

from __future__ import annotations

from ._huggingface import HuggingFace
from .qwen2 import READS, windows

FAMILIES = (
    HuggingFace(
        "qwen3",
        "softmax",
        architecture="Qwen3ForCausalLM",
        norm_eps=1e-6,
        max_position=32768,
        head_dim=128,
        qk_norm=True,
        writes=1,
        windows=windows,
        reads=READS,
    ),
)
