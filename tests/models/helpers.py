"""Tiny models, ours and transformers', for the tests of this room."""

from __future__ import annotations

from copy import deepcopy  # transformers writes into the dictionaries it is given
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    BitNetConfig,
    BitNetForCausalLM,
    DiffLlamaConfig,
    DiffLlamaForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from diffbit.models import ModelConfig

VOCABULARY = 61
HF = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "diffllama": (DiffLlamaConfig, DiffLlamaForCausalLM),
    "bitnet": (BitNetConfig, BitNetForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "granite": (GraniteConfig, GraniteForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
    "lfm2": (Lfm2Config, Lfm2ForCausalLM),
}
LINEAR, DYNAMIC = ({"rope_type": kind, "factor": 3.0, "rope_theta": 500.0} for kind in ("linear", "dynamic"))
YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 300.0, "original_max_position_embeddings": 16}
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 300.0,
    "short_factor": [1.0, 1.3, 2.1, 3.7], "long_factor": [1.0, 4.0, 9.0, 16.0],
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def hf_model(model_type: str, *, seed: int = 0, **changes: Any) -> Any:
    """A random model of transformers'. Weights are larger than usual, so that every part of it shows in the logits."""
    torch.manual_seed(seed)
    config_class, model_class = HF[model_type]
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 4 if model_type == "bitnet" else 8,  # its sub-norm is as wide as the hidden states
        "max_position_embeddings": 64,
        "initializer_range": 0.15,
    }
    values |= (
        {"pad_token_id": None} if model_type in ("phi3", "smollm3") else {}
    )  # the default is outside of the vocabulary
    values |= {"layer_types": ["conv", "full_attention", "conv"]} if model_type == "lfm2" else {}
    model = model_class(config_class(**deepcopy(values | changes))).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif "lambda" in name or name.endswith("bias"):
                parameter.normal_(0, 0.4)
    return model


def saved(model: Any, folder: Path, **options: Any) -> Path:
    """The folder with the model of transformers' in it."""
    model.save_pretrained(folder, **options)
    return folder


def tokens(batch: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(0, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def small_config(attention: str = "softmax", **changes: Any) -> ModelConfig:
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "max_position": 64,
    }
    values |= {"num_kv_heads": 4} if attention == "crate" else {}  # each of its heads is its own key
    return ModelConfig.uniform(attention=attention, **(values | changes))
