"""diff-mlx's folders, differential and plain, against the equations in float64. The differential one has the tensors of
the official layout (test_unilm.py) by other names."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffbit import DiffbitError, models
from diffbit.models.attention import diff_v1, softmax

from .helpers import tokens
from .test_unilm import LAYERS, THETA, D, E, F, H, V, attention_v1, official_folder, rotate_pairs, slow_logits

RENAMED = [
    (r"^model\.embed_tokens\.weight", "tok_embed.weight"),
    (r"^model\.norm\.weight", "final_norm.scale"),
    (r"^model\.layers\.", "blocks."),
    (r"\.input_layernorm\.weight", ".norm_attn.scale"),
    (r"\.post_attention_layernorm\.weight", ".norm_mlp.scale"),
    (r"\.self_attn\.", ".attn."),
    (r"\.out_proj\.", ".o_proj."),
    (r"subln\.weight", "subln.scale"),
    (r"mlp\.(gate|up|down)_proj\.", r"mlp.\1."),
]


def attention_plain(x: Tensor, w: dict[str, Tensor], layer: int, kv: int) -> Tensor:
    rows = []
    for n in range(len(x)):
        heads = []
        for i in range(2 * H):
            q = rotate_pairs((w["q_proj.weight"] @ x[n]).view(2 * H, D)[i], n)
            keys = [rotate_pairs((w["k_proj.weight"] @ x[m]).view(2 * H, D)[i], m) for m in range(n + 1)]
            values = torch.stack([(w["v_proj.weight"] @ x[m]).view(2 * H, D)[i] for m in range(n + 1)])
            heads.append(torch.stack([q @ k / math.sqrt(D) for k in keys]).softmax(0) @ values)
        rows.append(w["out_proj.weight"] @ torch.cat(heads))
    return torch.stack(rows)


def folder(path: Path, differential: bool, **changes: Any) -> dict[str, Tensor]:
    """Write a folder as diff-mlx does; return its tensors by the names of the official layout."""
    weights = official_folder(path, 1, H)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    disk = {"opt.blocks.0.attn.q_proj.weight.m": torch.ones(3), "opt.step": torch.ones(1, dtype=torch.int64)}
    for name, tensor in weights.items():
        if name == "lm_head.weight" or (not differential and ("lambda" in name or "subln" in name)):
            continue
        for old, new in RENAMED:
            name = re.sub(old, new, name)
        disk[f"model.{name}"] = tensor.contiguous()
    (path / "model.safetensors").unlink()
    save_file(disk, path / "latest.safetensors", metadata={"step": "30000", "has_opt": "1"})
    model = {
        "dim": E, "n_layers": LAYERS, "n_heads_vanilla": 2 * H, "qk_head_dim": D, "vocab_size": V,
        "mlp_intermediate": F, "block_size": 64, "rope_base": THETA, "rms_eps": 1e-5, "tie_embeddings": True,
        "amp_dtype": "bfloat16",
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps({"model": model | changes, "train": {"peak_lr": 0.0004}}))
    return weights


@pytest.mark.parametrize("differential", [True, False])
def test_logits_are_the_equations(differential: bool, tmp_path: Path) -> None:
    weights = folder(tmp_path / "m", differential)
    ids = tokens(1, 7)
    ours = models.load(tmp_path / "m")
    kind = diff_v1.Options if differential else softmax.Options
    assert all(isinstance(layer.mixer, kind) for layer in ours.config.layers) and ours.config.tie_embeddings
    assert ours.config.max_position == 64
    expected = slow_logits(ids[0], weights, attention_v1 if differential else attention_plain, H)
    torch.testing.assert_close(ours(ids)[0].double(), expected, rtol=0, atol=2e-5)
    models.save(ours, tmp_path / "copy")
    assert torch.equal(models.load(tmp_path / "copy")(ids), ours(ids))


def test_the_end_of_a_text_is_that_of_cl100k(tmp_path: Path) -> None:
    folder(tmp_path / "m", True)
    path = tmp_path / "m" / "latest.safetensors"
    disk = load_file(path)
    disk["model.tok_embed.weight"] = torch.zeros(100_277, E)
    save_file(disk, path)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["model"]["vocab_size"] = 100_277
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    assert models.Checkpoint(tmp_path / "m").config.eos_token_ids == (100_257,)


def test_bad_folders_are_refused(tmp_path: Path) -> None:
    folder(tmp_path / "zero", True, n_layers=0)
    with pytest.raises(DiffbitError, match=r"config\.json: model: n_layers is 0"):
        models.Checkpoint(tmp_path / "zero")
    folder(tmp_path / "wide", True, dim=2 * E)
    with pytest.raises(DiffbitError, match=r"tensor model\.tok_embed\.weight has shape \(61, 32\), wanted \(61, 64\)"):
        models.Checkpoint(tmp_path / "wide")
    folder(tmp_path / "none", True)
    (tmp_path / "none" / "latest.safetensors").rename(tmp_path / "none" / "model.safetensors")
    with pytest.raises(DiffbitError, match=r"holds model\.safetensors but neither latest\.safetensors nor"):
        models.Checkpoint(tmp_path / "none")
    folder(tmp_path / "gap", True)
    path = tmp_path / "gap" / "latest.safetensors"
    disk = load_file(path)
    del disk["model.blocks.1.attn.subln.scale"]
    save_file(disk, path)
    with pytest.raises(DiffbitError, match=r"tensor model\.blocks\.1\.attn\.subln\.scale of shape \(8,\) is missing"):
        models.Checkpoint(tmp_path / "gap")
