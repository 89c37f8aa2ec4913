"""Folders of DeepSeek-V2 and V3 with dense layers give transformers' logits; others are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV2Config, DeepseekV2ForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from diffbit.export import export_artifact
from diffbit.io.errors import DiffbitError
from diffbit.models import load
from diffbit.models.families import read_config
from diffbit.runtime import verify

from ...export.helpers import write_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "kv_lora_rank": 24, "q_lora_rank": 20, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12,
    "v_head_dim": 10, "max_position_embeddings": 64, "first_k_dense_replace": 2, "initializer_range": 0.15,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "factor": 4.0, "rope_theta": 300.0, "original_max_position_embeddings": 16, "mscale": 0.7,
    "mscale_all_dim": 1.0,
}  # fmt: skip
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "v3": (DeepseekV3Config, DeepseekV3ForCausalLM, {}),
    "v3, halves": (DeepseekV3Config, DeepseekV3ForCausalLM, {"rope_interleave": False}),
    "v3, yarn, biases": (DeepseekV3Config, DeepseekV3ForCausalLM, {"rope_parameters": YARN, "attention_bias": True}),
    "v2": (DeepseekV2Config, DeepseekV2ForCausalLM, {}),
    "v2 lite": (DeepseekV2Config, DeepseekV2ForCausalLM, {"q_lora_rank": None}),
    "v2 lite, biases": (DeepseekV2Config, DeepseekV2ForCausalLM, {"q_lora_rank": None, "attention_bias": True}),
    "v3, what is left of yarn": (
        DeepseekV3Config,
        DeepseekV3ForCausalLM,
        {"rope_parameters": YARN | {"rope_type": "default"}},
    ),
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_logits(case: str, tmp_path: Path) -> None:
    config_class, model_class, changes = CASES[case]
    torch.manual_seed(0)
    theirs = model_class(config_class(**SIZES | changes)).eval()
    for name, parameter in theirs.named_parameters():
        if "norm" in name:
            parameter.uniform_(0.5, 1.5)
        elif name.endswith("bias"):
            parameter.normal_(0, 0.4)
    theirs.save_pretrained(tmp_path / "m")
    ids = torch.arange(24)[None] * 7 % 61
    wanted = theirs(ids).logits
    torch.testing.assert_close(load(tmp_path / "m")(ids), wanted, rtol=0, atol=1e-4 * wanted.std().item())
    write_tokenizer(tmp_path / "m", 61)
    assert verify(export_artifact(tmp_path / "m", tmp_path / "onnx")).passed


def test_experts_are_refused() -> None:
    values = DeepseekV3Config(**SIZES | {"first_k_dense_replace": 1}).to_dict()
    with pytest.raises(DiffbitError, match="have experts, wanted dense layers only"):
        read_config(values)
