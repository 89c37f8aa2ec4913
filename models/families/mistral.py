"""Hugging Face's mistral: a llama whose attention has a sliding window, unless that is null or as long as the context.

Without a window it is written as a llama, with one in diffbit's own family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ._huggingface import WINDOW, HuggingFace


def _windows(values: Mapping[str, Any]) -> Sequence[Any]:
    return [values.get("sliding_window", WINDOW)] * values["num_hidden_layers"]


FAMILIES = (HuggingFace("mistral", "softmax", norm_eps=1e-6, max_position=131072, biases=(), windows=_windows),)
