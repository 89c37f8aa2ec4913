"""Hugging Face's qwen3: a llama with an RMSNorm of each query and key head; the default head_dim is 128."""

from __future__ import annotations

from .qwen2 import READS, WithWindows

FAMILIES = (
    WithWindows(
        "qwen3",
        "softmax",
        architecture="Qwen3ForCausalLM",
        defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "head_dim": 128},
        qk_norm=True,
        writes=1,
        reads=READS,
    ),
)
