"""Phi-4-mini-flash-reasoning in plain torch, written from its description: a token, a head and a state at a time.

    arXiv 2507.06607 (SambaY), 2312.00752 (Mamba-1), 2410.05258 (differential attention)

Nothing here is diffbit's: weights come by their names on disk, sizes from config.json.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

# the published fields, with an 8-layer model's sizes: Mamba, window, Mamba, window, memory, full, GMU, cross
PHI = {
    "architectures": ["Phi4FlashForCausalLM"], "model_type": "phi4flash", "hidden_size": 64, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "intermediate_size": 96, "hidden_act": "silu",
    "layer_norm_eps": 1e-5, "max_position_embeddings": 128, "mb_per_layer": 2, "sliding_window": 10,
    "vocab_size": 101, "tie_word_embeddings": True, "mlp_bias": False, "lm_head_bias": False, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 1, "torch_dtype": "bfloat16", "attention_dropout": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
STATES, TAPS = 16, 4
HEAD_NORM_EPS = 1e-5


def weights(config: dict[str, Any], seed: int = 0) -> dict[str, Tensor]:
    """Random ones, large enough that every part of the model shows in the logits."""
    g = torch.Generator().manual_seed(seed)
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    inner, rank, layers = 2 * hidden, math.ceil(hidden / 16), config["num_hidden_layers"]
    d = hidden // config["num_attention_heads"]
    keys = config["num_key_value_heads"] * d

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g) / math.sqrt(shape[-1])

    def some(*shape: int, size: float = 0.3) -> Tensor:
        return torch.randn(shape, generator=g) * size

    def norm(name: str) -> dict[str, Tensor]:
        return {f"{name}.weight": torch.rand(hidden, generator=g) + 0.5, f"{name}.bias": some(hidden)}

    def attention(rows: int) -> dict[str, Tensor]:
        names = ("q1", "k1", "q2", "k2")
        return {
            "attn.Wqkv.weight": matrix(rows, hidden) * 1.5,
            "attn.Wqkv.bias": some(rows),
            "attn.out_proj.weight": matrix(hidden, hidden),
            "attn.out_proj.bias": some(hidden),
            "attn.inner_cross_attn.subln.weight": torch.rand(2 * d, generator=g) + 0.5,
            **{f"attn.inner_cross_attn.lambda_{name}": some(d, size=0.2) for name in names},
        }

    def mamba() -> dict[str, Tensor]:
        return {
            "attn.in_proj.weight": matrix(2 * inner, hidden),
            "attn.conv1d.weight": some(inner, 1, TAPS, size=0.5),
            "attn.conv1d.bias": some(inner),
            "attn.x_proj.weight": matrix(rank + 2 * STATES, inner),
            "attn.dt_proj.weight": matrix(inner, rank),
            "attn.dt_proj.bias": torch.rand(inner, generator=g) * 4 - 4,
            "attn.A_log": torch.rand(inner, STATES, generator=g) * 3,
            "attn.D": torch.rand(inner, generator=g) + 0.5,
            "attn.out_proj.weight": matrix(hidden, inner),
        }

    tensors = {"model.embed_tokens.weight": torch.randn(vocab, hidden, generator=g)} | norm("model.final_layernorm")
    for i in range(layers):
        layer = norm("input_layernorm") | norm("post_attention_layernorm")
        if i % 2:
            layer |= attention(hidden + 2 * keys if i <= layers // 2 + 1 else hidden)
        elif i <= layers // 2:
            layer |= mamba()
        else:
            layer |= {"attn.in_proj.weight": matrix(inner, hidden), "attn.out_proj.weight": matrix(hidden, inner)}
        layer |= {"mlp.fc1.weight": matrix(2 * ffn, hidden), "mlp.fc2.weight": matrix(hidden, ffn)}
        tensors |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer.items()}
    return tensors


def logits(config: dict[str, Any], w: dict[str, Tensor], ids: Tensor) -> Tensor:
    """One sequence [T] -> [T, V], computed in float64."""
    w = {name: tensor.double() for name, tensor in w.items()}
    half, eps = config["num_hidden_layers"] // 2, config["layer_norm_eps"]
    x = w["model.embed_tokens.weight"][ids]
    memory = shared = None
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        layer = {name.removeprefix(prefix): tensor for name, tensor in w.items() if name.startswith(prefix)}
        normed = _norm(layer, "input_layernorm", x, eps)
        if i % 2 == 0 and i <= half:
            out, memory = _mamba(layer, normed)  # the last of them is layer half's
        elif i % 2 == 0:
            assert memory is not None
            out = (memory * _silu(normed @ layer["attn.in_proj.weight"].T)) @ layer["attn.out_proj.weight"].T
        else:
            window = config["sliding_window"] if i < half else len(ids)
            out, shared = _attention(config, layer, i, normed, window, shared if i > half + 1 else None)
        x = x + out
        normed = _norm(layer, "post_attention_layernorm", x, eps)
        gate, up = (normed @ layer["mlp.fc1.weight"].T).chunk(2, -1)
        x = x + (_silu(gate) * up) @ layer["mlp.fc2.weight"].T
    return _norm(w, "model.final_layernorm", x, eps) @ w["model.embed_tokens.weight"].T


def _norm(w: dict[str, Tensor], name: str, x: Tensor, eps: float) -> Tensor:
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]


def _silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def _mamba(w: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, E] -> what the layer adds [T, E], and the memory [T, C]."""
    inner, rank = len(w["attn.D"]), w["attn.dt_proj.weight"].shape[1]
    u, z = (x @ w["attn.in_proj.weight"].T).split(inner, -1)
    before = torch.cat((u.new_zeros(TAPS - 1, inner), u))
    taps = w["attn.conv1d.weight"][:, 0]
    u = torch.stack([(before[t : t + TAPS].T * taps).sum(-1) for t in range(len(x))])
    u = _silu(u + w["attn.conv1d.bias"])
    low, b, c = (u @ w["attn.x_proj.weight"].T).split((rank, STATES, STATES), -1)
    steps = (low @ w["attn.dt_proj.weight"].T + w["attn.dt_proj.bias"]).exp().log1p()  # softplus
    rates = -w["attn.A_log"].exp()
    h, rows = u.new_zeros(inner, STATES), []
    for t in range(len(x)):
        h = (steps[t, :, None] * rates).exp() * h + (steps[t] * u[t])[:, None] * b[t]
        rows.append(h @ c[t] + w["attn.D"] * u[t])
    memory = torch.stack(rows)
    return (memory * _silu(z)) @ w["attn.out_proj.weight"].T, memory


def _attention(
    config: dict[str, Any], w: dict[str, Tensor], layer: int, x: Tensor, window: int, shared: Any
) -> tuple[Tensor, Any]:
    """What the layer adds [T, E], and its keys and values, or the `shared` ones that it read. window: keys, the token's
    own included."""
    heads, total = config["num_attention_heads"], len(x)
    d = config["hidden_size"] // heads
    projected = x @ w["attn.Wqkv.weight"].T + w["attn.Wqkv.bias"]
    query = projected[:, : heads * d].view(total, heads, d)
    if shared is None:
        shared = tuple(part.view(total, -1, d) for part in projected[:, heads * d :].chunk(2, -1))
    key, value = shared
    ratio = heads // key.shape[1]  # pairs that read a pair of keys

    def dot(a: str, b: str) -> Tensor:
        name = "attn.inner_cross_attn.lambda_"
        return (w[name + a] * w[name + b]).sum().exp()

    init = 0.8 - 0.6 * math.exp(-0.3 * layer)
    lam = dot("q1", "k1") - dot("q2", "k2") + init
    place = torch.arange(total)
    seen = (place[None] <= place[:, None]) & (place[None] > place[:, None] - window)
    out = []
    for pair in range(heads // 2):
        group = pair // ratio
        wide = value[:, 2 * group : 2 * group + 2].flatten(1)  # [T, 2d]
        scores = [query[:, 2 * pair + b] @ key[:, 2 * group + b].T / math.sqrt(d) for b in (0, 1)]
        signal, noise = (score.masked_fill(~seen, -math.inf).softmax(-1) @ wide for score in scores)
        o = signal - lam * noise
        o = o / (o.square().mean(-1, keepdim=True) + HEAD_NORM_EPS).sqrt()
        out.append(o * w["attn.inner_cross_attn.subln.weight"] * (1 - init))
    return torch.cat(out, -1) @ w["attn.out_proj.weight"].T + w["attn.out_proj.bias"], shared
