"""Hugging Face's mistral: a llama whose attention has a sliding window, unless that is null or as long as the context.

What diffbit computes of it is a llama, and is written as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._huggingface import WINDOW, HuggingFace


def _window(values: Mapping[str, Any]) -> Any:
    return values.get("sliding_window", WINDOW)


FAMILIES = (HuggingFace("mistral", "softmax", norm_eps=1e-6, max_position=131072, biases=(), window=_window),)
