"""Turns a plain Transformer into a differential one that computes the same function (differential.py).

convert("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-diff")     # a checkpoint that quantize, export and train take
"""

from .differential import convert

__all__ = ["convert"]
