"""Motif-2.6B and Motif-2-12.7B in plain torch, written from their description: one matrix of logits for each head.

    arXiv 2508.09148 (2.6B), 2511.07464 (12.7B), 2510.06949 (grouped differential attention), 2411.03884 (PolyNorm)

Nothing here is diffbit's: weights come by their names on disk, sizes from config.json.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

MOTIF_2_6B = {
    "architectures": ["MotifForCausalLM"], "model_type": "Motif", "hidden_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "intermediate_size": 96, "hidden_act": "poly_norm",
    "max_position_embeddings": 64, "rope_theta": 10000.0, "rms_norm_eps": 1e-3, "attn_rms_norm_eps": 2e-2,
    "vocab_size": 61, "tie_word_embeddings": True, "use_bias": False, "bos_token_id": 1, "eos_token_id": [3, 5],
    "torch_dtype": "bfloat16",
}  # fmt: skip
# 8 signal and 2 noise heads, 2 pairs of keys, heads wider than hidden_size / heads
MOTIF_2_12_7B = MOTIF_2_6B | {
    "num_attention_heads": 10, "num_noise_heads": 2, "num_key_value_heads": 4, "head_dim": 32, "k_ratio": 1,
    "rope_theta": 1e6, "tie_word_embeddings": False,
}  # fmt: skip


def weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random ones, large enough that every part of the model shows in the logits."""
    g = torch.Generator().manual_seed(seed)
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv, d = config["num_attention_heads"], config["num_key_value_heads"], _head_dim(config)
    signals = heads - config.get("num_noise_heads", heads // 2)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g) / math.sqrt(shape[-1])

    def near_one(size: int) -> Tensor:
        return torch.rand(size, generator=g) + 0.5

    tensors = {
        "model.embed_tokens.weight": torch.randn(vocab, hidden, generator=g),
        "model.norm.weight": near_one(hidden),
    }
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = matrix(vocab, hidden)
    for i in range(config["num_hidden_layers"]):
        layer = {
            "self_attn.q_proj.weight": matrix(heads * d, hidden) * 1.5,
            "self_attn.k_proj.weight": matrix(kv * d, hidden) * 1.5,
            "self_attn.v_proj.weight": matrix(kv * d, hidden),
            "self_attn.o_proj.weight": matrix(hidden, signals * 2 * d),
            "self_attn.subln.weight": near_one(2 * d),
            **{f"self_attn.lambda_{name}": torch.randn(d, generator=g) * 0.2 for name in ("q1", "k1", "q2", "k2")},
            "mlp.gate_proj.weight": matrix(ffn, hidden),
            "mlp.up_proj.weight": matrix(ffn, hidden),
            "mlp.down_proj.weight": matrix(hidden, ffn),
            "mlp.act_fn.weight": torch.randn(3, generator=g),
            "mlp.act_fn.bias": torch.randn(1, generator=g) * 0.3,
            "input_layernorm.weight": near_one(hidden),
            "post_attention_layernorm.weight": near_one(hidden),
        }
        tensors |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return tensors


def logits(config: dict[str, Any], w: dict[str, Tensor], ids: Tensor) -> Tensor:
    """One sequence [T] -> [T, V]."""
    x = w["model.embed_tokens.weight"][ids]
    for i in range(config["num_hidden_layers"]):
        layer = {name.removeprefix(f"model.layers.{i}."): tensor for name, tensor in w.items() if f".{i}." in name}
        x = x + _attention(config, layer, i, _norm(x, config["rms_norm_eps"]) * layer["input_layernorm.weight"])
        x = x + _mlp(layer, _norm(x, config["rms_norm_eps"]) * layer["post_attention_layernorm.weight"])
    x = _norm(x, config["rms_norm_eps"]) * w["model.norm.weight"]
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def _head_dim(config: dict[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _norm(x: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt()


def _rotate(head: Tensor, theta: float) -> Tensor:
    """RoPE of [T, d]: channels j and j + d/2 turn by position * theta^(-2j/d)."""
    half = head.shape[1] // 2
    angle = torch.arange(len(head))[:, None] * theta ** (-torch.arange(half) / half)
    a, b = head[:, :half], head[:, half:]
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), 1)


def _attention(config: dict[str, Any], w: dict[str, Tensor], layer: int, x: Tensor) -> Tensor:
    d, theta = _head_dim(config), config["rope_theta"]
    heads, keys = config["num_attention_heads"], config["num_key_value_heads"]
    noises = config.get("num_noise_heads") or heads // 2
    ratio = heads // noises - 1  # signal heads to a noise head
    pairs = keys // 2
    q, k, v = ((x @ w[f"self_attn.{name}_proj.weight"].T).split(d, 1) for name in "qkv")
    q, k = ([_rotate(head, theta) for head in heads_of] for heads_of in (q, k))
    hidden = torch.ones(len(x), len(x)).triu(1).bool()

    def shares(query: Tensor, key: Tensor) -> Tensor:
        return (query @ key.T / math.sqrt(d)).masked_fill(hidden, -math.inf).softmax(-1)

    def dot(name: str) -> Tensor:
        return (w[f"self_attn.lambda_q{name}"] * w[f"self_attn.lambda_k{name}"]).sum()

    init = 0.8 - 0.6 * math.exp(-0.3 * (layer - 1))
    lam = dot("1").exp() - dot("2").exp() + init
    outs = []
    for i in range(ratio * noises):
        noise = i // ratio  # its group: `ratio` signal heads, then the noise head
        g = noise // (noises // pairs)  # which reads this pair of keys, and two values side by side
        signal = noise * (ratio + 1) + i % ratio
        of_signal, of_noise = shares(q[signal], k[2 * g]), shares(q[noise * (ratio + 1) + ratio], k[2 * g + 1])
        out = (of_signal - lam * of_noise) @ torch.cat((v[2 * g], v[2 * g + 1]), 1)
        outs.append(_norm(out, config["attn_rms_norm_eps"]) * w["self_attn.subln.weight"] * (1 - init))
    return torch.cat(outs, 1) @ w["self_attn.o_proj.weight"].T


def _mlp(w: dict[str, Tensor], x: Tensor) -> Tensor:
    z, (w3, w2, w1) = x @ w["mlp.gate_proj.weight"].T, w["mlp.act_fn.weight"]
    poly = w3 * _norm(z**3, 1e-6) + w2 * _norm(z**2, 1e-6) + w1 * _norm(z, 1e-6) + w["mlp.act_fn.bias"]
    return (poly * (x @ w["mlp.up_proj.weight"].T)) @ w["mlp.down_proj.weight"].T
