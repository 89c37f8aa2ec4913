"""Hugging Face's llama: the plain Transformer."""

from __future__ import annotations

from ._huggingface import HuggingFace

FAMILIES = (HuggingFace("llama", "softmax", architecture="LlamaForCausalLM", norm_eps=1e-6),)
