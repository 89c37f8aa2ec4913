"""Operators: a file each, with its definition, a reference in torch and a body for any ONNX Runtime."""

__all__ = [
    "body",
    "cache_body",
    "causal_conv",
    "diff_attention",
    "diff_attention_body",
    "selective_scan",
    "signature",
]  # for mixers of apps
