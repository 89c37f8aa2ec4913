"""Operators: a file each, with its definition, a reference in torch and a body for any ONNX Runtime."""

__all__ = ["causal_conv", "diff_attention", "selective_scan"]  # for mixers of apps
