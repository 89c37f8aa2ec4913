"""A quantized checkpoint in transformers' own model against diffbit's torch model of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM
from transformers.exporters import AutoExportConfig, AutoHfExporter
from transformers.quantizers.auto import AutoHfQuantizer

import diffbit
import diffbit.apps.hub.transformers as integration
from diffbit.export import export_artifact
from diffbit.formats import QuantEmbedding, QuantLinear, parse_format
from diffbit.io.errors import DiffbitError
from diffbit.models import Decoder, ModelConfig, save
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint
from diffbit.runtime import verify

from ...models.helpers import hf_model, saved, tokens

IDS = tokens(2, 9)
AutoHfQuantizer.supports_quant_method = staticmethod(integration._supports)  # as other tests want it


@pytest.fixture(autouse=True)
def imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(AutoHfQuantizer, "supports_quant_method", staticmethod(integration._supports_quant_method))


def quantized(folder: Path, kind: str, weights: str, activations: str | None = None, **changes: Any) -> Path:
    model = hf_model(kind, **{"hidden_size": 64, "intermediate_size": 64, "head_dim": 8, **changes})
    tables = parse_format("int4_g32" if weights == "int4_g32" else "int8")
    scheme = Scheme(weights=parse_format(weights), embedding=tables, head=tables, activations=activations)
    quantize_checkpoint(saved(model, folder / "float"), folder / "low", scheme)
    return folder / "low"


CASES = [(kind, "int4_g32", tied) for kind in ("llama", "diffllama") for tied in (False, True)]
CASES += [("llama", "int8", True), ("diffllama", "int8", False)]
CASES += [("llama", "ternary", False), ("diffllama", "ternary", True)]
CASES += [("qwen2", "int3_g32_asym", True), ("llama", "nf4", False), ("llama", "mxfp4", True), ("llama", "nvfp4", True)]


@pytest.mark.parametrize(("kind", "weights", "tied"), CASES)
def test_logits(kind: str, weights: str, tied: bool, tmp_path: Path) -> None:
    """In float32 the same; in 16 bits no farther from float32 than diffbit's own model, twice over."""
    folder = quantized(tmp_path, kind, weights, tie_word_embeddings=tied)
    exact = diffbit.load(folder)(IDS)
    assert exact.std() > 0.3
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert isinstance(theirs.lm_head, QuantLinear) and isinstance(theirs.model.embed_tokens, QuantEmbedding)
    assert (theirs.lm_head.weight is theirs.model.embed_tokens.weight) == tied
    torch.testing.assert_close(theirs(IDS).logits, exact, rtol=0, atol=5e-5)
    for dtype in (torch.float16, torch.bfloat16):
        ours = (diffbit.load(folder, dtype=dtype)(IDS) - exact).abs().mean()
        logits = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(IDS).logits
        assert logits.dtype == dtype
        assert (logits - exact).abs().mean() <= 2 * ours + 1e-4


@pytest.mark.parametrize("activations", ["int8", "int4"])
def test_activations_are_rounded(activations: str, tmp_path: Path) -> None:
    folder = quantized(tmp_path, "llama", "ternary" if activations == "int4" else "int8", activations)
    theirs, exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), diffbit.load(folder)(IDS)
    torch.testing.assert_close(theirs(IDS).logits, exact, rtol=0, atol=5e-5)
    for part in theirs.modules():
        if isinstance(part, QuantLinear):
            part.rounding = None
    assert (theirs(IDS).logits - exact).abs().max() > 1e-2


def test_generation_and_the_body_alone(tmp_path: Path) -> None:
    folder = quantized(tmp_path, "diffllama", "int4_g32", tie_word_embeddings=True)
    theirs, ours = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), diffbit.load(folder)
    generated = theirs.generate(IDS[:1], max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0)
    ids = IDS[:1]
    for _ in range(6):
        ids = torch.cat([ids, ours(ids)[:, -1:].argmax(-1)], dim=1)
    assert generated.tolist() == ids.tolist()
    body = AutoModel.from_pretrained(folder, dtype=torch.float32)
    torch.testing.assert_close(theirs.lm_head(body(IDS).last_hidden_state), ours(IDS), rtol=0, atol=5e-5)


def test_what_transformers_cannot_compute_is_refused(tmp_path: Path) -> None:
    model = saved(hf_model("llama"), tmp_path / "float")
    quantize_checkpoint(model, tmp_path / "kv", Scheme(attention=AttentionScheme(keys="int8", values="int8")))
    with pytest.raises(DiffbitError, match=r"attention is quantized \(keys int8, values int8\)"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "kv")
    config = ModelConfig.uniform(
        vocab_size=61, hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16, intermediate_size=32,
        max_position=32, attention="diff_v2",
    )  # fmt: skip
    save(Decoder(config), tmp_path / "v2")
    with pytest.raises(DiffbitError, match="transformers has no model of model_type"):
        AutoModelForCausalLM.from_pretrained(tmp_path / "v2")


def test_weights_of_another_scheme_are_refused(tmp_path: Path) -> None:
    folder = quantized(tmp_path, "llama", "int4_g32")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.scale"]
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(DiffbitError, match=r"needs model\.layers\.1\.mlp\.up_proj\.scale"):
        AutoModelForCausalLM.from_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["version"] = 9
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(DiffbitError, match="version 9"):
        AutoModelForCausalLM.from_pretrained(folder)


def test_an_exporter_of_transformers_writes_artifacts(checkpoint: Path, tmp_path: Path) -> None:
    """The same weights and tokenizer as those of `diffbit quantize` and `diffbit export`."""
    config = {"export_format": "diffbit", "weights": "int4_g32"}
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    exported = AutoHfExporter.from_config(config).export(model, {}, AutoExportConfig.from_dict(config))
    exported.save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out" / "export.json").read_text())["components"]["model"]["file"] == "model"
    assert verify(tmp_path / "out" / "model").passed
    low, high = parse_format("int4_g32"), parse_format("int8")
    quantize_checkpoint(checkpoint, tmp_path / "low", Scheme(weights=low, embedding=high, head=high))
    export_artifact(tmp_path / "low", tmp_path / "wanted")
    for name in ("model.onnx.data", "tokenizer.json"):
        assert (tmp_path / "out" / "model" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes()
    config |= {"tokenizer": str(tmp_path / "nowhere")}
    with pytest.raises(DiffbitError, match="nowhere: no such"):
        AutoHfExporter.from_config(config).export(model, {}, AutoExportConfig.from_dict(config))
