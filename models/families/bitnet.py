"""Hugging Face's bitnet: the plain Transformer with sub-norms, such as microsoft/bitnet-b1.58-2B-4T."""

from __future__ import annotations

from ._huggingface import HuggingFace

FAMILIES = (
    HuggingFace(
        "bitnet",
        "softmax",
        architecture="BitNetForCausalLM",
        sub_norms=True,
        defaults={"hidden_act": "relu2", "rope_theta": 500000.0},
        writes=1,
    ),
)
