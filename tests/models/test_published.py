"""Published differential models: from what their config.json says to the parameters that they have."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from diffbit.models import Decoder
from diffbit.models.families import read_config

DIFFLLAMA = {
    "model_type": "diffllama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
    "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 8192, "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "max_position_embeddings": 8192, "vocab_size": 102400, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
MOTIF = {
    "model_type": "Motif", "hidden_act": "poly_norm", "use_bias": False, "vocab_size": 219520, "rms_norm_eps": 1e-6,
    "eos_token_id": [219395, 219405],
}  # fmt: skip
MOTIF_2_6B = MOTIF | {
    "hidden_size": 2048, "num_hidden_layers": 32, "num_attention_heads": 16, "num_key_value_heads": 16,
    "intermediate_size": 8192, "max_position_embeddings": 4096, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
PUBLISHED = {
    "kajuma/DiffLlama-1B": (DIFFLLAMA, 1.39e9),
    "kajuma/DiffLlama-0.3B-handcut": (
        DIFFLLAMA
        | {"vocab_size": 128256, "tie_word_embeddings": True, "max_position_embeddings": 131072, "rope_theta": 500000.0}
        | {"rope_scaling": LLAMA3},
        1.236e9,
    ),
    "Motif-2.6B": (MOTIF_2_6B, 2.60e9),
    "Motif-2.6b-v1.1-LC": (MOTIF_2_6B | {"max_position_embeddings": 16384, "rope_theta": 500000.0}, 2.60e9),
    "Motif-2-12.7B": (
        MOTIF
        | {"hidden_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 40, "num_noise_heads": 8}
        | {"num_key_value_heads": 16, "head_dim": 128, "intermediate_size": 16384, "rope_theta": 1e6}
        | {"max_position_embeddings": 16384, "tie_word_embeddings": False, "k_ratio": 1},
        12.70e9,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_are_reached(name: str) -> None:
    values, parameters = PUBLISHED[name]
    config = read_config(_with_tokens(values))
    with torch.device("meta"):
        model = Decoder(config)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert abs(count / parameters - 1) < 0.003
    q_proj = model.model.layers[0].self_attn.q_proj.weight
    assert tuple(q_proj.shape) == (values["num_attention_heads"] * config.rope_width, values["hidden_size"])


def _with_tokens(values: dict[str, Any]) -> dict[str, Any]:
    return {"bos_token_id": 1, "eos_token_id": 2} | values
