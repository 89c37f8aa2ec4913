"""Folders in bitsandbytes' 4-bit layout, written with its own functions, against transformers on its own numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffbit.formats import QTensor
from diffbit.io.errors import DiffbitError
from diffbit.models import Checkpoint
from diffbit.quantize import load, read_scheme, read_weight

IDS = torch.arange(20)[None] * 7 % 96
functional = pytest.importorskip("bitsandbytes.functional")
transformers = pytest.importorskip("transformers")


def make(folder: Path, double: bool, head: bool = False, hidden: int = 64) -> torch.nn.Module:
    """A diffllama folder with nf4 weights; returns transformers' model with the same weights dequantized."""
    torch.manual_seed(0)
    config = transformers.DiffLlamaConfig(
        vocab_size=96, hidden_size=hidden, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=128, tie_word_embeddings=False,
    )  # fmt: skip
    model = transformers.DiffLlamaForCausalLM(config).eval()
    model.save_pretrained(folder)
    stored = {}
    for name, weight in model.state_dict().items():
        if not name.endswith("_proj.weight") and not (head and name == "lm_head.weight"):
            stored[name] = weight.contiguous()
            continue
        packed, state = functional.quantize_4bit(weight, quant_type="nf4", compress_statistics=double)
        stored[name] = packed
        stored |= {f"{name}.{part}": tensor.clone() for part, tensor in state.as_dict(packed=True).items()}
        weight.copy_(functional.dequantize_4bit(packed, state))
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    values = json.loads((folder / "config.json").read_text())
    values["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
    (folder / "config.json").write_text(json.dumps(values))
    return model


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_logits_are_those_of_its_own_weights(double: bool, head: bool, tmp_path: Path):
    theirs = make(tmp_path / "nf4", double, head)
    ids = torch.randint(96, (2, 11), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(load(tmp_path / "nf4")(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)
    scheme = read_scheme(Checkpoint(tmp_path / "nf4"))
    assert scheme is not None and scheme.weights is not None and scheme.weights.name == "nf4"
    assert [glob for glob, _ in scheme.overrides] == (["lm_head"] if head else [])


def test_an_unsupported_int8_folder_is_named_in_the_error(tmp_path: Path):
    make(tmp_path / "int8", double=False)
    config = json.loads((tmp_path / "int8" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}
    (tmp_path / "int8" / "config.json").write_text(json.dumps(config))
    with pytest.raises(DiffbitError, match=r"config\.json: the weights are bitsandbytes' int8, .* reads only its nf4"):
        load(tmp_path / "int8")


def test_a_weight_is_a_qtensor(tmp_path: Path):
    theirs = make(tmp_path / "nf4", double=True)
    checkpoint = Checkpoint(tmp_path / "nf4")
    name = "model.layers.1.mlp.down_proj.weight"
    weight = read_weight(checkpoint, name)
    assert isinstance(weight, QTensor) and weight.format.name == "nf4"
    assert torch.equal(weight.dequantize(), theirs.state_dict()[name])


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float16, torch.float32])
def test_codes_stored_as_another_dtype(storage: torch.dtype, tmp_path: Path):
    """bnb_4bit_quant_storage: the same bytes, of which some are no finite floats."""
    make(tmp_path / "nf4", double=False)
    file = tmp_path / "nf4" / "model.safetensors"
    wanted, tensors = load(tmp_path / "nf4")(IDS), load_file(file)
    packed = [name for name in tensors if f"{name}.absmax" in tensors]
    tensors |= {name: tensors[name].flatten().view(storage).view(-1, 1) for name in packed}
    save_file(tensors, file)
    torch.testing.assert_close(load(tmp_path / "nf4")(IDS), wanted)


@pytest.mark.parametrize(
    "part, change, words",
    [
        ("quant_state.bitsandbytes__nf4", lambda tensor: tensor[:-5], "cannot read"),
        ("quant_map", lambda tensor: tensor.flip(0), "wanted nf4 in blocks of 64"),
        ("absmax", lambda tensor: tensor[:-1], "do not fit"),
        ("absmax", lambda tensor: None, "up_proj"),
        ("nested_absmax", lambda tensor: tensor[:0], "cannot read"),
        ("nested_quant_map", lambda tensor: tensor[:3], "cannot read"),  # bitsandbytes reads past its end
    ],
)
def test_damaged_folders_are_refused(part: str, change, words: str, tmp_path: Path):
    make(tmp_path / "nf4", double=part.startswith("nested"))
    file = tmp_path / "nf4" / "model.safetensors"
    tensors = load_file(file)
    name = f"model.layers.1.mlp.up_proj.weight.{part}"
    changed = change(tensors.pop(name))
    if changed is not None:
        tensors[name] = changed.contiguous()
    save_file(tensors, file)
    with pytest.raises(DiffbitError, match=words):
        load(tmp_path / "nf4")


def test_blocks_that_cross_rows_are_refused(tmp_path: Path):
    make(tmp_path / "nf4", double=False, hidden=96)
    with pytest.raises(DiffbitError, match=r"q_proj\.weight: .* in_features must be a multiple of 64"):
        load(tmp_path / "nf4")
