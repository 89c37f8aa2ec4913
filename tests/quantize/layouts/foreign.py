"""Folders as other libraries write them, with random weights: each layout packed here slowly, a number at a time, or by
the library itself; and the float model that the folder stands for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, DiffLlamaConfig, LlamaConfig, Qwen2Config

CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "diffllama": DiffLlamaConfig}
Made = tuple[dict[str, Tensor], Tensor]  # what lies on disk after "<linear>.", and the weight that it stands for


def model(kind: str = "llama", hidden: int = 64, inner: int = 96, **changes: Any) -> Any:
    torch.manual_seed(0)
    config = CONFIGS[kind](
        vocab_size=96, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=inner, max_position_embeddings=64, initializer_range=0.2, **changes,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def folder(
    path: Path, settings: dict[str, Any], make: Callable[[Tensor], Made], kind: str = "llama", head: bool = False,
    **changes: Any,
) -> Any:  # fmt: skip
    """Write it, with the linear layers of the decoder (and the head) made so; return the float model that is equal."""
    foreign_model = model(kind, **changes)
    foreign_model.save_pretrained(path, max_shard_size="40KB")  # several files
    for file in path.glob("*.safetensors*"):
        file.unlink()
    stored = {}
    for name, weight in foreign_model.state_dict().items():
        if name == "lm_head.weight" and foreign_model.config.tie_word_embeddings:
            continue
        if not name.endswith("_proj.weight") and not (head and name == "lm_head.weight"):
            stored[name] = weight.clone()
            continue
        parts, value = make(weight)
        weight.copy_(value)
        stored |= {f"{name.removesuffix('.weight')}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    names = sorted(stored)
    halves = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file_name, some in halves.items():
        save_file({name: stored[name] for name in some}, path / file_name, metadata={"format": "pt"})
    weight_map = {name: file_name for file_name, some in halves.items() for name in some}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    edit_config(path, settings)
    return foreign_model


def edit_config(path: Path, settings: dict[str, Any]) -> None:
    values = json.loads((path / "config.json").read_text())
    values["quantization_config"] = values.get("quantization_config", {}) | settings
    (path / "config.json").write_text(json.dumps(values))


def edit_tensors(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Change the tensors of all files at once; they then lie in one."""
    stored: dict[str, Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        stored |= load_file(file)
        file.unlink()
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    change(stored)
    save_file(stored, path / "model.safetensors", metadata={"format": "pt"})


def rounded(
    weight: Tensor, bits: int, group: int, symmetric: bool, half: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor, Tensor]:
    """Random codes int64 [N, K], scales [N, G] and zero points [N, G] of a weight, all codes and zero points used."""
    rows, columns = weight.shape
    groups = 1 if group == -1 else -(-columns // group)
    generator = torch.Generator().manual_seed(rows * columns)
    codes = torch.randint(2**bits, (rows, columns), generator=generator)
    scale = (0.1 / 2**bits * (0.5 + torch.rand(rows, groups, generator=generator))).to(half)
    zero = torch.full((rows, groups), 2 ** (bits - 1))
    if not symmetric:
        zero = torch.randint(2**bits, (rows, groups), generator=generator)
        zero[0, 0], zero[-1, -1] = 0, 2**bits - 1
    return codes, scale, zero


def value(codes: Tensor, scale: Tensor, zero: Tensor, group: int) -> Tensor:
    """The weight that they stand for, a column at a time."""
    columns = codes.shape[1]
    at = [0 if group == -1 else column // group for column in range(columns)]
    return torch.stack([scale[:, g].float() * (codes[:, k] - zero[:, g]) for k, g in enumerate(at)], 1)


def bits_of(values: list[int], bits: int) -> list[int]:
    """int32 words of a stream of fields, the first one lowest, by Python's integers."""
    stream = sum(field << (bits * index) for index, field in enumerate(values))
    count = -(-len(values) * bits // 32)
    return [int(np.array(stream >> 32 * index & 0xFFFFFFFF, np.uint32).view(np.int32)) for index in range(count)]


def packed(rows: Tensor, bits: int) -> Tensor:
    """[n, m] -> int32 [n, words]"""
    return torch.tensor([bits_of(row, bits) for row in rows.tolist()], dtype=torch.int32)


def gptq(bits: int = 4, group: int = 32, symmetric: bool = True, version: int = 1) -> Any:
    def make(weight: Tensor) -> Made:
        codes, scale, zero = rounded(weight, bits, group, symmetric)
        qzeros = packed(zero.T, bits)
        if version == 1:  # GPTQModel: 1 off each field of a word at once, which may borrow
            qzeros = minus_ones(qzeros, bits) if bits != 3 else packed((zero.T - 1) % 8, bits)
        index = torch.tensor([0 if group == -1 else k // group for k in range(weight.shape[1])], dtype=torch.int32)
        parts = {"qweight": packed_down(codes, bits), "qzeros": qzeros}
        parts |= {"scales": scale.T, "g_idx": index, "bias": torch.zeros(len(weight))}  # AutoGPTQ adds a bias
        return parts, value(codes, scale, zero, group)

    return make


def packed_down(codes: Tensor, bits: int) -> Tensor:
    """[N, K] -> int32 [K*bits/32, N]"""
    return torch.stack([torch.tensor(bits_of(row, bits), dtype=torch.int32) for row in codes.tolist()], 1)


def minus_ones(stored: Tensor, bits: int) -> Tensor:
    ones = sum(1 << place for place in range(0, 32, bits))
    words = [[(word % 2**32 - ones) % 2**32 for word in row] for row in stored.tolist()]
    return torch.from_numpy(np.array(words, np.uint32).view(np.int32))


def awq(group: int = 32, version: str = "gemm") -> Any:
    def make(weight: Tensor) -> Made:
        codes, scale, zero = rounded(weight, 4, group, False)
        if version == "gemv":
            groups, multiple = scale.shape[1], {32: 32, 64: 16}.get(group, 8)
            pad = -groups % multiple
            wide = torch.nn.functional.pad(zero, (0, pad))
            parts = {"qweight": packed(codes, 4), "qzeros": packed(wide, 4)}
            return parts | {"scales": torch.nn.functional.pad(scale, (0, pad))}, value(codes, scale, zero, group)
        order = [8 * (n // 8) + (0, 2, 4, 6, 1, 3, 5, 7)[n % 8] for n in range(len(weight))]
        parts = {"qweight": packed(codes.T[:, order], 4), "qzeros": packed(zero.T[:, order], 4), "scales": scale.T}
        return parts, value(codes, scale, zero, group)

    return make
