"""Hugging Face's diffllama, differential attention version 1; diffllama_bitnet is diffbit's own, with sub-norms.

On disk all signal heads come before all noise heads, and all first halves of the values before all second halves.
num_attention_heads and num_key_value_heads count sub-heads, two per pair. The head norm's eps is rms_norm_eps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..config import ModelConfig
from ._family import Stored, parts
from ._huggingface import HuggingFace, attention_of


class DiffLlama(HuggingFace):
    def stored(self, config: ModelConfig, name: str) -> Stored:
        _, module, _ = parts(name)
        if module not in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
            return Stored((name,))
        mixer = attention_of(config, name)
        pairs = mixer.num_heads if module == "self_attn.q_proj" else mixer.num_kv_heads
        return Stored((name,), _pairs_from_halves(pairs, mixer.head_dim))


def _pairs_from_halves(pairs: int, width: int) -> Tensor:
    """Return row indices that turn [all first heads, all second heads] into [first, second, first, second, ...]."""
    return torch.arange(2 * pairs * width).view(2, pairs, width).transpose(0, 1).flatten()


FAMILIES = tuple(
    DiffLlama(model_type, "diff_v1", queries=2, keys=2, architecture=architecture, sub_norms=sub_norms, writes=1)
    for model_type, architecture, sub_norms in (
        ("diffllama", "DiffLlamaForCausalLM", False),
        ("diffllama_bitnet", None, True),
    )
)
