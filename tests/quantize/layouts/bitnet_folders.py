"""Folders as BitNet models are published, with random weights, and transformers' own models of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import BitNetConfig, BitNetForCausalLM, BitNetQuantConfig, LlamaConfig, LlamaForCausalLM
from transformers.integrations import replace_with_bitnet_linear
from transformers.integrations.bitnet import BitNetDeserialize, pack_weights

PACKED = {"linear_class": "autobitlinear", "quantization_mode": "offline"}  # microsoft/bitnet-b1.58-2B-4T
DIVIDING = {"linear_class": "bitlinear", "quantization_mode": "offline"}
MASTER = {"linear_class": "autobitlinear", "quantization_mode": "online"}  # microsoft/bitnet-b1.58-2B-4T-bf16
OLD: dict[str, Any] = {"modules_to_not_convert": None}  # HF1BitLLM/Llama3-8B-1.58-100B-tokens
CLASSES = {"bitnet": (BitNetConfig, BitNetForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}
VOCABULARY = 96


def write_folder(
    folder: Path, settings: dict[str, Any], kind: str = "bitnet", dtype: torch.dtype = torch.float32, **changes: Any
) -> Path:
    """A random model whose linear layers, the head excepted, lie as the settings of its quantization_config say."""
    torch.manual_seed(0)
    config_class, model_class = CLASSES[kind]
    values: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 128, "initializer_range": 0.15,
        "bos_token_id": 1, "eos_token_id": 2, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    model = model_class(config_class(**(values | changes))).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    stored = load_file(folder / "model.safetensors")
    skipped = settings.get("modules_to_not_convert") or []
    for name, weight in list(stored.items()):
        module = name.removesuffix(".weight")
        if module.endswith("_proj") and settings.get("quantization_mode") != "online" and module not in skipped:
            scale = weight.abs().mean()
            stored[name] = pack_weights((weight / scale).round().clamp(-1, 1))
            stored[f"{name}_scale"] = (scale if settings == PACKED else 1 / scale).view(1)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    edit_settings(folder, quant_method="bitnet", **settings)
    return folder


def edit_settings(folder: Path, **changes: Any) -> None:
    """Change the quantization_config."""
    file = folder / "config.json"
    values = json.loads(file.read_text())
    values["quantization_config"] = values.get("quantization_config", {}) | changes
    file.write_text(json.dumps(values))


def theirs(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The folder's model in transformers, made as from_pretrained makes it (which would want accelerate)."""
    values = json.loads((folder / "config.json").read_text())
    config_class, model_class = CLASSES[values["model_type"]]
    config = config_class.from_pretrained(folder)
    settings = BitNetQuantConfig(**values["quantization_config"])
    torch.manual_seed(1)
    model = model_class(config).to(dtype)
    replace_with_bitnet_linear(model, settings.modules_to_not_convert or ["lm_head"], settings)
    state: dict[str, Tensor] = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        if tensor.dtype == torch.uint8 and settings.linear_class == "autobitlinear":
            tensor = BitNetDeserialize(None).convert({"weight": [tensor]}, model, name)["weight"]
        state[name] = tensor.to(dtype) if tensor.is_floating_point() else tensor
    if config.tie_word_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model.load_state_dict(state, assign=True)
    return model.eval()
