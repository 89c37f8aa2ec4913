"""AI2's olmo2 (OLMo 2, arXiv 2501.00656): a llama with norms after attention and MLP in place of those before them, and
norms of all queries and all keys of a token; read only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..config import LayerSpec
from ._huggingface import HuggingFace, changed


class Olmo2(HuggingFace):
    def layer(self, values: Mapping[str, Any], index: int) -> LayerSpec:
        return replace(changed(super().layer(values, index), qk_norm_whole=True), norms="after")


FAMILIES = (
    Olmo2(
        "olmo2",
        "softmax",
        architecture="Olmo2ForCausalLM",
        qk_norm=True,
        names={"mixer_output_norm": "post_attention_layernorm", "mlp_output_norm": "post_feedforward_layernorm"},
    ),
)
