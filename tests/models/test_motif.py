"""Motif folders against the plain-torch model: loaded, quantized, exported, in both runtimes, with a low-bit cache."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from diffbit import DiffbitError, models
from diffbit.export import export_artifact, reference_model
from diffbit.formats import parse_format
from diffbit.models.families import read_config
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint
from diffbit.runtime import Session, verify

from ..export.helpers import write_tokenizer
from . import motif

CONFIGS = {"2.6b": motif.MOTIF_2_6B, "12.7b": motif.MOTIF_2_12_7B}
IDS = torch.randint(0, 61, (12,), generator=torch.Generator().manual_seed(1))
KV8 = AttentionScheme(keys="int8", values="int8")
every_config = pytest.mark.parametrize("name", CONFIGS)
Folder = Callable[[str], Path]


def write(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    write_tokenizer(folder, config["vocab_size"])
    return folder


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    """name -> its folder, float32 as v1.1-LC's."""
    root = tmp_path_factory.mktemp("motif")
    for name, config in CONFIGS.items():
        write(root / name, config, motif.weights(config))
    return lambda name: root / name


def expected_logits(name: str, ids: Tensor = IDS) -> Tensor:
    return motif.logits(CONFIGS[name], motif.weights(CONFIGS[name]), ids)


def off(logits: Any, expected: Tensor) -> float:
    """The largest error, in standard deviations of what is expected."""
    return float((torch.as_tensor(logits) - expected).abs().max() / expected.std())


def both_ways(artifact: Path, expected: Tensor, most: float, native: bool = True) -> None:
    """A prompt, the rest token by token, and a batch with padding on the left."""
    session = Session(artifact, native=native)
    parts = [session.prefill(IDS[None, :7].numpy(), all_positions=True)[0]]
    parts += [session.step(IDS[None, i : i + 1].numpy()) for i in range(7, len(IDS))]
    assert off(torch.cat([torch.as_tensor(part) for part in parts]), expected) < most
    session.reset()
    ids, mask = torch.zeros(2, len(IDS), dtype=torch.long), torch.ones(2, len(IDS), dtype=torch.long)
    ids[0, 5:], ids[1], mask[0, :5] = IDS[:7], IDS, 0
    last = session.prefill(ids.numpy(), mask.numpy())
    assert off(last[0], expected[6]) < most and off(last[1], expected[-1]) < most


@every_config
def test_torch_computes_it(folder_of: Folder, name: str) -> None:
    model = models.load(folder_of(name))
    assert off(model(IDS[None])[0].detach(), expected_logits(name)) < 1e-4
    config = model.config
    assert config.eos_token_ids == (3, 5) and config.tie_embeddings == (name == "2.6b")
    assert [layer.mixer.norm_eps for layer in config.layers] == [2e-2] * 3 and config.norm_eps == 1e-3
    assert read_config(CONFIGS[name]) == models.ModelConfig.from_dict(config.to_dict()) == config


@every_config
@pytest.mark.parametrize(
    ("dtype", "native", "most"), [("fp32", True, 1e-4), ("fp32", False, 1e-4), ("fp16", True, 0.05)]
)
def test_the_artifact_computes_it(
    folder_of: Folder, tmp_path: Path, name: str, dtype: str, native: bool, most: float
) -> None:
    both_ways(export_artifact(folder_of(name), tmp_path / "onnx", dtype=dtype), expected_logits(name), most, native)


@every_config
def test_quantized(folder_of: Folder, tmp_path: Path, name: str) -> None:
    """int8 weights and an int8 cache: near the oracle, and the artifact at what the checkpoint says."""
    scheme = Scheme(weights=parse_format("int8"), attention=KV8)
    quantize_checkpoint(folder_of(name), tmp_path / "q", scheme)
    expected = reference_model(tmp_path / "q")(IDS[None])[0].detach()
    assert off(expected, expected_logits(name)) < 0.5
    artifact = export_artifact(tmp_path / "q", tmp_path / "onnx")
    assert verify(artifact).passed
    both_ways(artifact, expected_logits(name), 0.5)
    # The cache alone: rows of 8 bits
    quantize_checkpoint(folder_of(name), tmp_path / "kv", Scheme(attention=KV8))
    both_ways(export_artifact(tmp_path / "kv", tmp_path / "kv-onnx"), expected_logits(name), 0.1)


@pytest.mark.slow
@every_config
def test_awq_and_rotate_keep_the_function(folder_of: Folder, tmp_path: Path, name: str) -> None:
    """awq folds scales into norms and up_proj, rotate turns the residual stream, values and keys; neither goes through
    PolyNorm's gate. In 8 bits little else differs."""
    scheme = Scheme(weights=parse_format("int8"))
    for method, text in (("awq", IDS[None]), ("rotate", None)):
        quantize_checkpoint(folder_of(name), tmp_path / method, scheme, method=method, calibration=text)
        assert off(reference_model(tmp_path / method)(IDS[None])[0].detach(), expected_logits(name)) < 0.3


def test_cubes_beyond_float16(tmp_path: Path) -> None:
    """|z| far above 40: z^3 is infinite in float16."""
    tensors = motif.weights(motif.MOTIF_2_6B)
    for name, tensor in tensors.items():
        if "gate_proj" in name:
            tensor *= 300
    expected = motif.logits(motif.MOTIF_2_6B, tensors, IDS)
    folder = write(tmp_path / "large", motif.MOTIF_2_6B, tensors)
    both_ways(export_artifact(folder, tmp_path / "onnx", dtype="fp16"), expected, 0.05)


def test_the_layout_follows_from_model_type(folder_of: Folder, tmp_path: Path) -> None:
    """The official modules have `subln.` tensors, too, and rows in another order: none is reordered in a Motif folder,
    and one that calls itself a diffllama is refused, not read as something else."""
    folder = folder_of("2.6b")
    q_proj = models.load(folder).state_dict()["model.layers.1.self_attn.q_proj.weight"]
    assert torch.equal(q_proj, motif.weights(motif.MOTIF_2_6B)["model.layers.1.self_attn.q_proj.weight"])
    renamed = write(
        tmp_path / "renamed", motif.MOTIF_2_6B | {"model_type": "diffllama"}, motif.weights(motif.MOTIF_2_6B)
    )
    with pytest.raises(DiffbitError, match=r"subln|act_fn"):
        models.load(renamed)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"use_bias": True}, "use_bias is True, wanted none"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"kv_lora_rank": 512}, "kv_lora_rank is 512, wanted none, as in Motif-2.6B and Motif-2-12.7B"),
        ({"k_ratio": 2}, "k_ratio is 2, wanted 1"),
        ({"num_noise_heads": 3}, "num_noise_heads is 3 and num_attention_heads is 10, wanted a multiple"),
        ({"num_noise_heads": 8}, "num_noise_heads is 8 and num_attention_heads is 10"),
        ({"head_dim": None}, "head_dim is missing"),
        ({"attn_rms_norm_eps": 0}, "attn_rms_norm_eps is 0, wanted a number above 0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', wanted one of"),
    ],
)
def test_what_cannot_be_computed_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(DiffbitError, match=sentence):
        read_config(motif.MOTIF_2_12_7B | changes)
