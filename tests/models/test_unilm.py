"""The official module layout, against the equations written out one token and one head at a time in float64.

Everything differs from our in-memory layout at once: rotary embedding turns adjacent pairs, the head norm has a weight,
the output projection is called out_proj.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from diffbit import DiffbitError, models

from .helpers import tokens

E, H, D, LAYERS, V, F = 32, 4, 4, 3, 61, 48  # hidden, heads, width of a softmax, layers, vocabulary, MLP
THETA = 100.0


def rotate_pairs(head: Tensor, position: int) -> Tensor:
    """Interleaved RoPE: numbers 2j and 2j+1 turn by position * theta^(-2j/d)."""
    out = head.clone()
    for j in range(len(head) // 2):
        angle = position * THETA ** (-2 * j / len(head))
        a, b = head[2 * j], head[2 * j + 1]
        out[2 * j] = a * math.cos(angle) - b * math.sin(angle)
        out[2 * j + 1] = a * math.sin(angle) + b * math.cos(angle)
    return out


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def attention_v1(x: Tensor, w: dict[str, Tensor], layer: int, kv: int) -> Tensor:
    """arXiv 2410.05258, eq. 1-3, with key and value heads shared by H/kv heads; x [S, E]."""
    init = 0.8 - 0.6 * math.exp(-0.3 * layer)
    lam = (w["lambda_q1"] @ w["lambda_k1"]).exp() - (w["lambda_q2"] @ w["lambda_k2"]).exp() + init
    rows = []
    for n in range(len(x)):
        heads = []
        for i in range(H):
            g = i // (H // kv)
            branches = []
            for b in (0, 1):
                q = rotate_pairs((w["q_proj.weight"] @ x[n]).view(H, 2, D)[i, b], n)
                keys = [rotate_pairs((w["k_proj.weight"] @ x[m]).view(kv, 2, D)[g, b], m) for m in range(n + 1)]
                branches.append(torch.stack([q @ k / math.sqrt(D) for k in keys]).softmax(0))
            values = torch.stack([(w["v_proj.weight"] @ x[m]).view(kv, 2 * D)[g] for m in range(n + 1)])
            heads.append(norm((branches[0] - lam * branches[1]) @ values, w["subln.weight"]) * (1 - init))
        rows.append(w["out_proj.weight"] @ torch.cat(heads))
    return torch.stack(rows)


def attention_v2(x: Tensor, w: dict[str, Tensor], layer: int, kv: int) -> Tensor:
    """Differential attention version 2: a pair shares key and value; the weight of the noise depends on the token."""
    rows = []
    for n in range(len(x)):
        gates = (w["lambda_proj.weight"] @ x[n]).sigmoid()
        heads = []
        for i in range(H):
            g = i // (H // kv)
            keys = [rotate_pairs((w["k_proj.weight"] @ x[m]).view(kv, D)[g], m) for m in range(n + 1)]
            values = torch.stack([(w["v_proj.weight"] @ x[m]).view(kv, D)[g] for m in range(n + 1)])
            out = []
            for b in (0, 1):
                q = rotate_pairs((w["q_proj.weight"] @ x[n]).view(2 * H, D)[2 * i + b], n)
                out.append(torch.stack([q @ k / math.sqrt(D) for k in keys]).softmax(0) @ values)
            heads.append(out[0] - gates[i] * out[1])
        rows.append(w["o_proj.weight" if "o_proj.weight" in w else "out_proj.weight"] @ torch.cat(heads))
    return torch.stack(rows)


def slow_logits(ids: Tensor, weights: dict[str, Tensor], attention: Any, kv: int) -> Tensor:
    w = {name: tensor.double() for name, tensor in weights.items()}
    x = w["model.embed_tokens.weight"][ids]
    for layer in range(LAYERS):
        p = f"model.layers.{layer}."
        inner = {n.removeprefix(f"{p}self_attn."): t for n, t in w.items() if n.startswith(f"{p}self_attn.")}
        x = x + attention(norm(x, w[f"{p}input_layernorm.weight"]), inner, layer, kv)
        y = norm(x, w[f"{p}post_attention_layernorm.weight"])
        gate = y @ w[f"{p}mlp.gate_proj.weight"].T
        y = gate * gate.sigmoid() * (y @ w[f"{p}mlp.up_proj.weight"].T)
        x = x + y @ w[f"{p}mlp.down_proj.weight"].T
    return norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T


def official_folder(folder: Path, version: int, kv: int, out: str = "out_proj", **changes: Any) -> dict[str, Tensor]:
    """Write a random model in the official layout; return its tensors."""
    generator = torch.Generator().manual_seed(version * 10 + kv)
    shapes = {"model.embed_tokens.weight": (V, E), "lm_head.weight": (V, E), "model.norm.weight": (E,)}
    for layer in range(LAYERS):
        p, a = f"model.layers.{layer}.", f"model.layers.{layer}.self_attn."
        shapes |= {f"{p}mlp.{n}_proj.weight": (F, E) for n in ("gate", "up")} | {f"{p}mlp.down_proj.weight": (E, F)}
        shapes |= {f"{p}{n}_layernorm.weight": (E,) for n in ("input", "post_attention")}
        shapes[f"{a}q_proj.weight"] = (2 * H * D, E)
        shapes |= {f"{a}{n}_proj.weight": ((2 if version == 1 else 1) * kv * D, E) for n in "kv"}
        shapes[f"{a}{out}.weight"] = (E, (2 if version == 1 else 1) * H * D)
        if version == 1:
            shapes |= {f"{a}lambda_{n}": (D,) for n in ("q1", "k1", "q2", "k2")} | {f"{a}subln.weight": (2 * D,)}
        else:
            shapes[f"{a}lambda_proj.weight"] = (H, E)
    weights = {}
    for name, shape in shapes.items():
        weights[name] = torch.randn(shape, generator=generator) * (0.25 if len(shape) == 2 else 0.4)
        if "norm" in name or "subln" in name:
            weights[name] += 1.0
    config = {
        "model_type": "diffllama" if version == 1 else "diff_llama_v2",
        "vocab_size": V,
        "hidden_size": E,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 2 * H,
        "num_key_value_heads": 2 * kv if version == 1 else kv,
        "head_dim": D,
        "intermediate_size": F,
        "rope_theta": THETA,
        "rms_norm_eps": 1e-5,
        "rope_interleaved": True,
    }
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | changes))
    return weights


@pytest.mark.parametrize("kv", [1, 2, 4])
def test_version_1_is_its_equations(kv: int, tmp_path: Path) -> None:
    weights = official_folder(tmp_path / "m", 1, kv)
    ids = tokens(1, 6)
    ours = models.load(tmp_path / "m")
    torch.testing.assert_close(ours(ids)[0].double(), slow_logits(ids[0], weights, attention_v1, kv), rtol=0, atol=2e-5)
    models.save(ours, tmp_path / "hf")  # and on to diffllama, through transformers
    from transformers import DiffLlamaForCausalLM

    theirs = DiffLlamaForCausalLM.from_pretrained(tmp_path / "hf")
    torch.testing.assert_close(theirs(ids).logits, ours(ids), rtol=0, atol=1e-5)


@pytest.mark.parametrize("kv", [1, 2, 4])
@pytest.mark.parametrize("out", ["out_proj", "o_proj"])
def test_version_2_is_its_equations(kv: int, out: str, tmp_path: Path) -> None:
    weights = official_folder(tmp_path / "m", 2, kv, out)
    ids = tokens(1, 6)
    ours = models.load(tmp_path / "m")
    torch.testing.assert_close(ours(ids)[0].double(), slow_logits(ids[0], weights, attention_v2, kv), rtol=0, atol=2e-5)
    models.save(ours, tmp_path / "copy")
    assert torch.equal(models.load(tmp_path / "copy")(ids), ours(ids))


def test_folding_keeps_what_bfloat16_would_round(tmp_path: Path) -> None:
    """subln folded into a bfloat16 projection is handed out in float32, not rounded a second time."""
    weights = official_folder(tmp_path / "m", 1, 2)
    low = {name: tensor.to(torch.bfloat16) for name, tensor in weights.items()}
    save_file(low, tmp_path / "m" / "model.safetensors")
    checkpoint = models.Checkpoint(tmp_path / "m")
    folded = checkpoint.read("model.layers.1.self_attn.o_proj.weight")
    subln = low["model.layers.1.self_attn.subln.weight"].double()
    expected = low["model.layers.1.self_attn.out_proj.weight"].double() * subln.repeat(H)
    assert folded.dtype == torch.float32
    torch.testing.assert_close(folded.double(), expected, rtol=1e-6, atol=0)
    assert "model.layers.1.self_attn.subln.weight" not in checkpoint.names


def test_bad_input_is_refused(tmp_path: Path) -> None:
    official_folder(tmp_path / "silent", 1, 2, rope_interleaved=False)
    with pytest.raises(DiffbitError, match=r"out_proj.*official modules, add .rope_interleaved.: true to config.json"):
        models.Checkpoint(tmp_path / "silent")
    official_folder(tmp_path / "quantized", 1, 2, quantization_config={"quant_method": "diffbit"})
    with pytest.raises(DiffbitError, match="is quantized, and quantized folders of this layout are not read"):
        models.Checkpoint(tmp_path / "quantized")
    weights = official_folder(tmp_path / "gap", 1, 2)
    del weights["model.layers.2.self_attn.subln.weight"]
    save_file(weights, tmp_path / "gap" / "model.safetensors")
    with pytest.raises(DiffbitError, match=r"tensor model\.layers\.2\.self_attn\.subln\.weight .* is missing"):
        models.Checkpoint(tmp_path / "gap")
    weights["model.layers.2.self_attn.subln.weight"] = torch.full((2 * D,), math.nan)
    save_file(weights, tmp_path / "gap" / "model.safetensors")
    with pytest.raises(DiffbitError, match=r"tensor model\.layers\.2\.self_attn\.subln\.weight holds NaN"):
        models.load(tmp_path / "gap")
