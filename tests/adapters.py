"""LoRA adapters as PEFT writes them (checked with peft 0.21), made by hand, and what they add to each weight."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

# As peft writes it for LoraConfig(r=4, lora_alpha=8, target_modules="all-linear")
CONFIG: dict[str, Any] = {
    "alora_invocation_tokens": None, "alpha_pattern": {}, "arrow_config": None, "auto_mapping": None,
    "base_model_name_or_path": "ORG/BASE", "bias": "none", "corda_config": None, "ensure_weight_tying": False,
    "eva_config": None, "exclude_modules": None, "fan_in_fan_out": False, "inference_mode": True,
    "init_lora_weights": True, "layer_replication": None, "layers_pattern": None, "layers_to_transform": None,
    "loftq_config": {}, "lora_alpha": 8, "lora_bias": False, "lora_dropout": 0.05, "megatron_config": None,
    "megatron_core": "megatron.core", "modules_to_save": None, "peft_type": "LORA", "peft_version": "0.21.2",
    "qalora_group_size": 16, "r": 4, "rank_pattern": {}, "revision": None, "target_modules": ["q_proj", "up_proj"],
    "target_parameters": None, "task_type": "CAUSAL_LM", "trainable_token_indices": None, "use_dora": False,
    "use_qalora": False, "use_rslora": False,
}  # fmt: skip


def write_adapter(
    folder: Path,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    ranks: Mapping[str, int] | None = None,
    alphas: Mapping[str, float] | None = None,
    replaced: Mapping[str, Tensor] | None = None,
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> dict[str, Tensor]:
    """An adapter of the modules in `shapes` [N, K]; returns {name of the weight: scale * B A}, float64. ranks, alphas:
    of the modules that have others than the config's. An embedding's shape [V, E] has a third entry."""
    config = CONFIG | changes
    generator = torch.Generator().manual_seed(5)
    tensors, added = {}, {}
    for module, (rows, columns, *embedding) in shapes.items():
        rank = (ranks or {}).get(module, config["r"])
        alpha = (alphas or {}).get(module, config["lora_alpha"])
        if embedding:
            rows, columns = columns, rows
        down, up = (
            (0.2 * torch.randn(shape, generator=generator)).to(dtype) for shape in ((rank, columns), (rows, rank))
        )
        names = ("lora_embedding_A", "lora_embedding_B") if embedding else ("lora_A.weight", "lora_B.weight")
        tensors |= {f"base_model.model.{module}.{name}": half for name, half in zip(names, (down, up), strict=True)}
        product = alpha / (math.sqrt(rank) if config["use_rslora"] else rank) * up.double() @ down.double()
        added[f"{module}.weight"] = product.T if embedding else product
    tensors |= {f"base_model.model.{name}": tensor for name, tensor in (replaced or {}).items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return added
