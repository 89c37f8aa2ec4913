"""Gives a model another attention: differential, computing the same function, or a mixture of its heads.

diffbit.convert("SmolLM2-135M-Instruct.Q4_1.gguf", "smollm2-diff")   # a checkpoint that quantize, export and train take
"""
