"""Quantization methods beyond those of the core (rtn, gptq), which finds them by an entry point in pyproject.toml.

They transform a layer before it is rounded, or round in other ways; the core neither imports nor names them.
"""
