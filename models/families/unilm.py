"""Checkpoints whose attention modules are those of microsoft/unilm, Diff-Transformer (the official code).

The tensors around attention keep Hugging Face's names; inside `self_attn` the official modules differ thus:

- rotary embedding is interleaved: it turns the pairs (x_2j, x_2j+1) of a head. Taking the even rows of each head's
  q_proj and k_proj first, then the odd ones, turns that into rotate-half;
- version 1: sub-heads lie in adjacent pairs already and a value is 2d wide in one piece, which is diffbit's canonical
  order; the output projection is `out_proj`; the head norm has a weight `subln.weight` [2d], shared by the heads. The
  weight stands between norm and projection, so it is folded into the projection: o_proj[:, h, c] = out_proj * subln[c];
- version 2: `lambda_proj`, and `o_proj` (`out_proj` is read too). Its names are those of diffbit's own diff_llama_v2
  folders, whose rotary embedding is rotate-half, so "rope_interleaved": true in config.json tells the two apart.

The official head norm has eps = 1e-5: rms_norm_eps in config.json is used for it and must say so.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...errors import DiffbitError
from ..config import ModelConfig

NORM_EPS = 1e-5


def is_official(config: ModelConfig, values: dict[str, Any], names: set[str]) -> bool:
    """Whether tensors of these names, beside this config.json, are in the official layout."""
    if config.attention == "softmax":
        return False
    if any(".self_attn.out_proj." in name or ".self_attn.subln." in name for name in names):
        return True
    return config.attention == "diff_v2" and bool(values.get("rope_interleaved", False))


def check_config(config: ModelConfig) -> None:
    """Refuse what the official modules do not mean."""
    if config.attention == "diff_v1" and config.norm_eps != NORM_EPS:
        raise DiffbitError(
            f"rms_norm_eps is {config.norm_eps}, wanted {NORM_EPS}: the official head norm (subln) has that eps, and "
            "diffbit has one eps for all norms"
        )


Shapes = dict[str, tuple[int, ...]]


def stored_shapes(config: ModelConfig, canonical: Shapes, names: set[str]) -> Shapes:
    """{name on disk: shape} of a folder in the official layout, from the canonical shapes."""
    shapes = {stored_name(name, names): shape for name, shape in canonical.items()}
    if config.attention == "diff_v1":
        for index in range(config.num_layers):
            shapes[f"model.layers.{index}.self_attn.subln.weight"] = (2 * config.head_dim,)
    return shapes


def stored_name(name: str, names: set[str]) -> str:
    """The name on disk of a canonical one."""
    other = name.replace(".self_attn.o_proj.", ".self_attn.out_proj.")
    return other if other in names or name not in names else name


def norm_of(config: ModelConfig, name: str) -> str | None:
    """The head-norm weight to fold into the tensor of this canonical name, if any."""
    if config.attention != "diff_v1" or not name.endswith(".self_attn.o_proj.weight"):
        return None
    return name.replace(".o_proj.", ".subln.")


def fold_norm(weight: Tensor, norm: Tensor) -> Tensor:
    """o_proj [E, H*2d] times the norm's weight [2d] of each head; float32, so that folding rounds nothing away."""
    return (weight.float().unflatten(1, (-1, len(norm))) * norm.float()).flatten(1)


def row_order(config: ModelConfig, name: str) -> Tensor | None:
    """Rows of q_proj and k_proj, even ones of each head first; None for other tensors."""
    if not name.endswith((".self_attn.q_proj.weight", ".self_attn.k_proj.weight")):
        return None
    query_heads = 2 * config.num_heads
    key_heads = 2 * config.num_kv_heads if config.attention == "diff_v1" else config.num_kv_heads
    heads = query_heads if ".q_proj." in name else key_heads
    rows = torch.arange(heads * config.head_dim).view(heads, config.head_dim // 2, 2)
    return rows.transpose(1, 2).flatten()
