"""GGUF files of each architecture, written with the names and keys of the package gguf from random models of
transformers: the same logits in floats, the same numbers in every quantized type, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from diffbit import models
from diffbit.io.errors import DiffbitError
from diffbit.io.gguf import read_gguf
from diffbit.models import Checkpoint
from diffbit.models.attention import AttentionOptions
from diffbit.models.families import read_config
from diffbit.models.families._gguf import fields

from .gguf_files import CASES, CASES_OF_FORK, HEADS, TYPES, case, convert
from .helpers import saved, tokens
from .test_gguf import blocks

ARCHITECTURES = sorted({architecture for architecture, _, _ in CASES.values()})
BLOCKS = (TYPES.Q4_K, TYPES.Q5_K, TYPES.Q6_K, TYPES.IQ4_XS, TYPES.IQ4_NL, TYPES.Q8_0)


@pytest.mark.parametrize("name", [*CASES, *CASES_OF_FORK])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """Of several tokens, and of a batch padded on the left."""
    architecture, model = case(name)
    ours, ids = models.load(convert(model, tmp_path / "m.gguf", architecture)), tokens(2, 40)
    mask = torch.ones_like(ids)
    mask[1, :15] = 0
    with torch.no_grad():
        logits = model(ids).logits
        assert logits.std() > 0.3
        close = {"rtol": 0.0, "atol": 1e-5 * max(1.0, float(logits.std()))}
        torch.testing.assert_close(ours(ids), logits, **close)
        theirs = model(ids, attention_mask=mask, position_ids=(mask.cumsum(-1) - 1).clamp(min=0)).logits
        torch.testing.assert_close(ours(ids, attention_mask=mask)[mask == 1], theirs[mask == 1], **close)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_blocks_are_read_as_the_package_reads_them(architecture: str, tmp_path: Path) -> None:
    """Where rows are reordered or fused, as elsewhere: a file with matrices of these types in turn is the file of the
    floats that the package makes of them."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4}
    sizes |= {"num_hidden_layers": 7, "head_dim": 32, "block_auto_adjust_ff_dim": False}
    sizes |= {"layer_types": ["conv", "full_attention"] * 3 + ["conv"]} if architecture == "lfm2" else {}
    _, model = case(architecture, **sizes)
    floats, used = dict[str, np.ndarray](), set[TYPES]()

    def as_blocks(name: str, weight: np.ndarray) -> tuple[np.ndarray, TYPES]:
        type = BLOCKS[len(floats) % len(BLOCKS)]
        data = blocks(weight.shape, type)
        floats[name], used_type = gguf.quants.dequantize(data, type), type
        used.add(used_type)
        return data, type

    changes = {"feed_forward_length": 512}
    stored = Checkpoint(convert(model, tmp_path / "q.gguf", architecture, as_blocks, **changes))
    expected = convert(
        model, tmp_path / "f.gguf", architecture, lambda name, _: (floats[name], TYPES.F32), **changes
    )  # fmt: skip
    assert used == set(BLOCKS)
    for name in (wanted := Checkpoint(expected)).names:
        assert torch.equal(stored.read(name), wanted.read(name)), name
    assert len({float(stored.read(name).abs().max()) for name in wanted.names if "_proj" in name}) > 1


def gemma(tmp_path: Path, **changes: Any) -> Checkpoint:
    return Checkpoint(convert(case("gemma3")[1], tmp_path / "m.gguf", "gemma3", **changes))


def windows(checkpoint: Checkpoint) -> list[int]:
    """The sliding window of each layer; 0: none."""
    mixers = [layer.mixer for layer in checkpoint.config.layers]
    return [mixer.sliding_window for mixer in mixers if isinstance(mixer, AttentionOptions)]


def test_windows_of_gemma3(tmp_path: Path) -> None:
    """Of five in six layers, or as sliding_window_pattern says; none if there is no window."""
    assert windows(gemma(tmp_path)) == [5] * 5 + [0, 5]
    assert windows(gemma(tmp_path, **{"attention.sliding_window_pattern": 2})) == [5, 0] * 3 + [5]
    slides = [True, True, False, False, True, True, True]
    found = windows(gemma(tmp_path, **{"attention.sliding_window_pattern": slides}))
    assert found == [5 if slide else 0 for slide in slides]
    full = gemma(tmp_path, without="attention.sliding_window")
    assert windows(full) == [0] * 7 and not any(layer.mixer.local_rope for layer in full.config.layers)
    with pytest.raises(DiffbitError, match=r"m\.gguf: layer_types is .*, wanted 7 of"):
        gemma(tmp_path, **{"attention.sliding_window_pattern": [True, False]})


def test_the_scale_of_gemma3_27b_is_that_of_its_width(tmp_path: Path) -> None:
    """llama.cpp knows it by its 62 layers."""
    _, model = case("gemma3", num_hidden_layers=62, query_pre_attn_scalar=12, hidden_size=48, **HEADS)
    file, folder = convert(model, tmp_path / "m.gguf", "gemma3"), saved(model, tmp_path / "m")
    found, wanted = Checkpoint(file), Checkpoint(folder)
    assert len(found.names) == len(wanted.names)
    for name in found.names:
        torch.testing.assert_close(found.read(name), wanted.read(name), rtol=1e-6, atol=1e-7)
    norm = "self_attn.q_norm.weight"
    stored = 1 + model.model.layers[0].get_parameter(norm)
    torch.testing.assert_close(found.read(f"model.layers.0.{norm}"), stored.detach() * (8 / 12) ** 0.5)


def test_biases_of_an_architecture_with_other_rows(tmp_path: Path) -> None:
    """The reordered rows of queries and keys are also those of their biases."""
    _, model = case("smollm3", attention_bias=True, mlp_bias=True)
    file, ids = convert(model, tmp_path / "m.gguf", "smollm3"), tokens(1, 20)
    with torch.no_grad():
        torch.testing.assert_close(models.load(file)(ids), model(ids).logits, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("layers", "width", "mlp"), [(30, 2560, "relu2"), (26, 3200, "swiglu"), (24, 1536, "swiglu")])
def test_bitnet_2b4t_squares_a_relu(layers: int, width: int, mlp: str, tmp_path: Path) -> None:
    """The only published `bitnet` of 30 layers of width 2560."""
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "bitnet")
    sizes = {"block_count": layers, "embedding_length": width, "feed_forward_length": 8, "attention.head_count": 20}
    for key, value in {**sizes, "context_length": 64}.items():
        writer.add_key_value(f"bitnet.{key}", value, gguf.GGUFValueType.UINT32)
    writer.add_tensor("token_embd.weight", np.ones((4, width), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert read_config(fields(read_gguf(tmp_path / "m.gguf"), {})).layers[0].mlp.name == mlp


# ---- files that are refused -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_each_missing_tensor_is_one_sentence(architecture: str, tmp_path: Path) -> None:
    _, model = case(architecture)
    file = convert(model, tmp_path / "m.gguf", architecture)
    for name in (tensor.name for tensor in gguf.GGUFReader(file).tensors):
        if name.startswith("output.") or (name.startswith("blk.") and not name.startswith("blk.1.")):
            continue
        with pytest.raises(DiffbitError) as error:
            Checkpoint(convert(model, tmp_path / "x.gguf", architecture, without=name))
        assert str(error.value).startswith(str(tmp_path / "x.gguf")) and name in str(error.value)
        assert "missing from the weights" in str(error.value) or "holds no tensor" in str(error.value)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("feed_forward_length", 88),
        ("attention.head_count", 6),
        ("attention.causal", False),
        ("final_logit_softcapping", 30.0),
        ("attention.clamp_kqv", 8.0),
        ("rope.scaling.type", "other"),
        ("block_count", "three"),
    ],
)
def test_a_wrong_key_is_one_sentence(architecture: str, key: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(DiffbitError) as error:
        Checkpoint(convert(case(architecture)[1], tmp_path / "m.gguf", architecture, **{key: value}))
    assert str(error.value).startswith(str(tmp_path / "m.gguf")) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("granite", {"rope.scaling.finetuned": False}, "granite.rope.scaling.finetuned is False, which changes"),
        ("granite", {"logit_scale": 0.0}, "logits_scaling is 0.0, wanted a number above 0"),
        ("olmo2", {"attention.sliding_window": 32}, "has a sliding window of 32 tokens, wanted none"),
        ("smollm3", {"rope.dimension_count": 4}, "rotates 4 of the 8 channels"),
        ("gemma3", {"block_count": 62, "embedding_length": None}, "tensor token_embd.weight has shape"),
        ("gemma3", {"attention.sliding_window_pattern": "odd"}, "sliding_window_pattern is 'odd', wanted"),
        ("llama", {"attention.scale": 0.5}, "llama.attention.scale is 0.5, which changes"),
        ("qwen3", {"rope.freq_base_swa": 5.0}, "qwen3.rope.freq_base_swa is 5.0, which changes"),
        ("lfm2", {"attention.head_count_kv": [0, 2, 4]}, r"head_count_kv is \[0, 2, 4\], wanted 0 for convolutions"),
        ("lfm2", {"attention.head_count_kv": [0, 2]}, "layer_types is .*, wanted 3 of full_attention and conv"),
        ("lfm2", {"attention.sliding_window": 5}, "has a sliding window of 5 tokens, wanted none"),
        ("lfm2", {"without": "shortconv.l_cache", "shortconv.l_cache": None}, "conv.weight has shape"),
        ("phi3", {"rope.dimension_count": 3}, "3 of the 8 numbers of a head would rotate, wanted an even number"),
        ("phi3-longrope", {"without": "rope_factors_long.weight"}, "holds rope_factors_short.weight, wanted rope_fac"),
        ("phi3-longrope", {"rope.scaling.factor": 4.0}, "scales RoPE by 4.0 or yarn and by the tensor"),
        (
            "phi3-longrope",
            {"rope.scale_linear": 4.0},
            "scales RoPE by 4.0 or yarn and by the tensor",
        ),
        (
            "phi3-longrope",
            {"rope.scaling.type": "yarn"},
            "scales RoPE by 1 or yarn and by the tensor",
        ),
        ("phi3", {"rope.scaling.attn_factor": 1.5}, "attn_factor is 1.5 with rope.scaling.type linear"),
        ("bitnet", {"attention.value_length": 16}, "values of another width"),
    ],
)
def test_what_is_refused(name: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    architecture, model = case(name)
    with pytest.raises(DiffbitError, match=message) as error:
        Checkpoint(convert(model, tmp_path / "m.gguf", architecture, **changes))
    assert str(error.value).startswith(str(tmp_path / "m.gguf"))


@pytest.mark.parametrize("architecture", sorted({*ARCHITECTURES} - {"phi3"}))
def test_long_factors_of_rotary_embedding_are_phi3s(architecture: str, tmp_path: Path) -> None:
    further = {"rope_factors_long.weight": np.ones(4, np.float32)}
    with pytest.raises(
        DiffbitError, match=rf"rope_factors_long\.weight, which a model of architecture {architecture} does"
    ):
        Checkpoint(convert(case(architecture)[1], tmp_path / "m.gguf", architecture, further=further))
