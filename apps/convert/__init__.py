"""Turns a plain Transformer into a differential one that computes the same function.

diffbit.convert("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-diff")   # a checkpoint that quantize, export and train take
"""
