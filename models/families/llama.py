"""Hugging Face's llama: the plain Transformer, with biases if `attention_bias` and `mlp_bias` are set."""

from __future__ import annotations

from ._huggingface import HuggingFace

FAMILIES = (
    HuggingFace(
        "llama",
        "softmax",
        architecture="LlamaForCausalLM",
        defaults={"rms_norm_eps": 1e-6},
        biases=("attention_bias", "mlp_bias"),
        writes=1,
    ),
)
