"""Checkpoints that other libraries quantized, against their own packing or a slow one, and their own loaders."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from diffbit.export import export_artifact, export_checkpoint
from diffbit.formats import QTensor, parse_format
from diffbit.io.errors import DiffbitError
from diffbit.models import Checkpoint
from diffbit.quantize import Scheme, load, quantize_checkpoint, read_scheme, read_weight
from diffbit.quantize.layouts import layouts
from diffbit.runtime import verify

from ...export.helpers import write_tokenizer
from . import foreign

functional = pytest.importorskip("bitsandbytes.functional")

UP = "model.layers.1.mlp.up_proj"
IDS = torch.randint(96, (2, 11), generator=torch.Generator().manual_seed(0))


def assert_same_model(path: Path, theirs: Any) -> None:
    with torch.inference_mode():
        torch.testing.assert_close(load(path)(IDS), theirs(IDS).logits, rtol=1e-5, atol=1e-5)


def settings(method: str, **values: Any) -> dict[str, Any]:
    return {"quant_method": method, **values}


@pytest.mark.parametrize(
    "bits, group, symmetric, version, kind",
    [
        (4, 32, True, 1, "llama"),
        (4, 32, False, 1, "qwen2"),
        (4, 64, False, 2, "diffllama"),
        (8, -1, True, 2, "llama"),
        (8, 16, False, 1, "llama"),
        (2, 128, True, 1, "llama"),
        (3, 32, False, 1, "llama"),
    ],
)
def test_gptq(bits: int, group: int, symmetric: bool, version: int, kind: str, tmp_path: Path):
    """Groups of 64 and 128 are longer than a row of 96, or end within one."""
    name = ("gptq", "gptq_v2")[version - 1]
    entry = settings("gptq", bits=bits, group_size=group, sym=symmetric, desc_act=False, checkpoint_format=name)
    theirs = foreign.folder(tmp_path, entry, foreign.gptq(bits, group, symmetric, version), kind)
    assert_same_model(tmp_path, theirs)
    weight = read_weight(Checkpoint(tmp_path), f"{UP}.weight")
    assert isinstance(weight, QTensor) and torch.equal(weight.dequantize(), theirs.get_parameter(f"{UP}.weight"))


@pytest.mark.parametrize("kind", ["quantize_config.json", "auto-round"])
def test_gptq_by_other_names(kind: str, tmp_path: Path):
    """AutoGPTQ's first folders have their settings in a file of their own; AutoRound packs as GPTQ does."""
    entry: dict[str, Any] = {"bits": 4, "group_size": 32, "sym": True, "desc_act": False}
    named = {"quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "data_type": "int"}
    theirs = foreign.folder(tmp_path, entry | named, foreign.gptq(4, 32, True, 1))
    if kind != "auto-round":
        config = json.loads((tmp_path / "config.json").read_text())
        del config["quantization_config"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / kind).write_text(json.dumps(entry))
    assert_same_model(tmp_path, theirs)


def test_awq_is_read_under_its_older_names(tmp_path: Path):
    entry = settings("auto-round", bits=4, group_size=32, sym=False, packing_format="auto_round:auto_awq")
    theirs = foreign.folder(tmp_path, entry, foreign.awq(32, "gemm"), "llama", inner=128)
    assert_same_model(tmp_path, theirs)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    old = {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}
    (tmp_path / "quant_config.json").write_text(json.dumps(old))
    assert_same_model(tmp_path, theirs)


FLOAT8 = {"weight": (torch.float8_e4m3fn, 1), "weight_scale_inv": (torch.float32, 0)}
FOREIGN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    # {what: (fields of config.json, {part: (dtype, how many weights one holds, 0: scales)}, words)}
    "mlx": (
        {"quantization": {"group_size": 32, "bits": 4}, "quantization_config": {"group_size": 32, "bits": 4}},
        {"weight": (torch.uint32, 8), "scales": (torch.float16, 0), "biases": (torch.float16, 0)},
        r"quant_method is 'mlx' \(mlx-lm's layout\), wanted one of .*gptq; start from the float checkpoint",
    ),
    "fp8": (
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}},
        FLOAT8,
        r"quant_method is 'fp8' \(8-bit floats, .*\), wanted one of",
    ),
    "modelopt": ({}, FLOAT8, r"quant_method is 'modelopt' \(NVIDIA ModelOpt's layout\), wanted one of"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_unsupported_folders_are_named_in_the_error(name: str, tmp_path: Path):
    fields, parts, words = FOREIGN[name]

    def make(weight: torch.Tensor) -> foreign.Made:
        rows, columns = weight.shape
        return {
            part: torch.zeros(rows, columns // many if many else 1).to(dtype) for part, (dtype, many) in parts.items()
        }, weight

    foreign.folder(tmp_path, {}, make)
    config = json.loads((tmp_path / "config.json").read_text())
    config.pop("quantization_config", None)
    (tmp_path / "config.json").write_text(json.dumps(config | fields))
    if name == "modelopt":
        (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "FP8"}}))
    with pytest.raises(DiffbitError, match=words) as error:
        load(tmp_path)
    assert "again" not in str(error.value)


@pytest.mark.parametrize("group, version", [(32, "gemm"), (32, "gemv"), (64, "gemv"), (-1, "gemm")])
def test_awq(group: int, version: str, tmp_path: Path):
    entry = settings("awq", bits=4, group_size=group, zero_point=True, version=version)
    theirs = foreign.folder(tmp_path, entry, foreign.awq(group, version), "llama", head=True, inner=128)
    assert_same_model(tmp_path, theirs)
    scheme = read_scheme(Checkpoint(tmp_path))
    assert scheme is not None and scheme.format_for("lm_head") == scheme.weights


def compressed(tmp_path: Path, kind: str = "llama", **weights: Any) -> Any:
    """A folder that compressed-tensors writes, and their model of it as transformers loads it."""
    ct = pytest.importorskip("compressed_tensors")
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    ignore = weights.pop("ignore", ["lm_head"])
    inputs = weights.pop("inputs", None)
    float_model = foreign.model(kind)
    group = {
        "targets": ["Linear"],
        "weights": {"type": "int", "dynamic": False, **weights},
        "input_activations": inputs,
    }
    groups = {"group_0": group}
    if inputs is None and weights["num_bits"] == 4:  # and 8 bits for some, by an expression
        other = {"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": True}
        groups["group_1"] = {"targets": ["re:.*layers\\.1\\.mlp\\.down_proj$"], "weights": other}
    apply_quantization_config(float_model, QuantizationConfig(config_groups=groups, ignore=ignore))
    for module in float_model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is None or not hasattr(module, "weight_scale"):
            continue
        bits, group_size = scheme.weights.num_bits, scheme.weights.group_size or -1
        _, scale, zero = foreign.rounded(module.weight, bits, group_size, scheme.weights.symmetric)
        size = module.weight_scale.numel()  # 1 where it is the whole weight's
        module.weight_scale.data.copy_(scale.flatten()[:size].reshape(module.weight_scale.shape))
        if hasattr(module, "weight_zero_point"):
            signed = (zero - 2 ** (bits - 1)).flatten()[:size]
            module.weight_zero_point.data.copy_(signed.reshape(module.weight_zero_point.shape))
    compressor = ct.compressors.ModelCompressor.from_pretrained_model(float_model)
    compressor.compress_model(float_model)
    float_model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    if weights["symmetric"]:
        return AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    theirs = foreign.model(kind)  # transformers 5.23 loads no packed zero points: their own decompression then
    compressor.decompress_model(float_model)
    theirs.load_state_dict({name: float_model.get_parameter(name) for name in theirs.state_dict()})
    return theirs


@pytest.mark.parametrize(
    "weights",
    [
        {"num_bits": 4, "strategy": "group", "group_size": 32, "symmetric": True},
        {"num_bits": 4, "strategy": "group", "group_size": 16, "symmetric": False, "ignore": ["re:.*lm_head"]},
        {"num_bits": 4, "strategy": "channel", "symmetric": False},
        {"num_bits": 3, "strategy": "group", "group_size": 32, "symmetric": False},
        {"num_bits": 2, "strategy": "group", "group_size": 32, "symmetric": True},
        {"num_bits": 2, "strategy": "group", "group_size": 32, "symmetric": False},
        {"num_bits": 2, "strategy": "channel", "symmetric": True},
        {"num_bits": 8, "strategy": "channel", "symmetric": True},
        {"num_bits": 8, "strategy": "tensor", "symmetric": True, "ignore": []},
    ],
)
def test_compressed_tensors(weights: dict[str, Any], tmp_path: Path):
    theirs = compressed(tmp_path, **weights)
    assert_same_model(tmp_path, theirs)


@pytest.mark.parametrize("symmetric", [True, False])
def test_two_bits_of_compressed_tensors_are_kept(symmetric: bool, tmp_path: Path) -> None:
    """Every number is the one on disk, as a slow unpacking has it (with zero points: compressed-tensors' own), and the
    artifact computes with it."""
    theirs = compressed(tmp_path / "ct", num_bits=2, strategy="group", group_size=32, symmetric=symmetric)
    checkpoint, stored = Checkpoint(tmp_path / "ct"), load_file(tmp_path / "ct" / "model.safetensors")
    scheme = read_scheme(checkpoint)
    assert scheme is not None and str(scheme.weights) == ("int2_g32" if symmetric else "int2_g32_asym")
    for module in scheme.formats(checkpoint.config):
        weight = read_weight(checkpoint, f"{module}.weight")
        assert isinstance(weight, QTensor) and set(weight.codes.unique().tolist()) == {0, 1, 2, 3}
        if symmetric:
            words, scale = stored[f"{module}.weight_packed"].tolist(), stored[f"{module}.weight_scale"].float()
            columns = range(weight.shape[1])
            numbers = torch.tensor([[(row[k // 16] >> 2 * (k % 16) & 3) - 2 for k in columns] for row in words])
            expected = numbers * scale.repeat_interleave(32, 1)
        else:
            expected = theirs.get_parameter(f"{module}.weight").detach().float()
        assert torch.equal(weight.dequantize(), expected)
    with pytest.raises(DiffbitError, match="is quantized already, and `diffbit export` takes it as it is"):
        quantize_checkpoint(tmp_path / "ct", tmp_path / "q", Scheme(weights=parse_format("int4_g32")))
    write_tokenizer(tmp_path / "ct", 96)
    assert verify(export_artifact(tmp_path / "ct", tmp_path / "a")).passed


def test_nvfp4_of_compressed_tensors(tmp_path: Path):
    """With the tensor scales that llm-compressor chooses; queries, keys and values share one."""
    ct = pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    model = foreign.model("llama")
    apply_quantization_config(model, QuantizationConfig(config_groups={"NVFP4A16": ["Linear"]}, ignore=["lm_head"]))
    for name, module in model.named_modules():
        if hasattr(module, "weight_scale"):
            largest = 0.9 if "self_attn" in name else module.weight.abs().max()
            whole = torch.as_tensor(448 * 6 / largest)
            blocks = module.weight.unflatten(1, (-1, 16)).abs().amax(-1)
            module.weight_global_scale.data.copy_(whole)
            module.weight_scale.data.copy_((blocks / 6 * whole).to(torch.float8_e4m3fn).float())
    compressor = ct.compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    theirs = foreign.model("llama")  # their own decompression is in bfloat16
    for name, module in theirs.named_modules():
        if f"{name}.weight_packed" in stored:
            codes = unpack_fp4_from_uint8(stored[f"{name}.weight_packed"], *module.weight.shape, dtype=torch.float32)
            scale = stored[f"{name}.weight_scale"].float() / stored[f"{name}.weight_global_scale"]
            module.weight.data = codes * scale.repeat_interleave(16, 1)
    checkpoint = Checkpoint(tmp_path)
    scheme = read_scheme(checkpoint)
    assert scheme is not None and scheme.weights == parse_format("nvfp4")
    for module in scheme.formats(checkpoint.config):
        weight, expected = read_weight(checkpoint, f"{module}.weight"), theirs.get_parameter(f"{module}.weight")
        assert isinstance(weight, QTensor) and weight.tensor_scale is not None
        near = {"rtol": 1e-6, "atol": 0.0}  # they divide, where diffbit multiplies
        torch.testing.assert_close(weight.dequantize(), expected.detach(), **near)
    assert_same_model(tmp_path, theirs)
    write_tokenizer(tmp_path, 96)
    written = export_artifact(tmp_path, tmp_path / "a")  # with tensor scales that are no powers of two
    assert verify(written).passed


@pytest.mark.parametrize(
    "layout, weights, kind",
    [
        ("gptq", "int4_g32", "diffllama"),
        ("gptq", "int8_g64_asym", "llama"),
        ("compressed-tensors", "int4_g32", "llama"),
        ("compressed-tensors", "int3_asym", "diffllama"),
        ("bitsandbytes", "nf4", "llama"),
        ("bitsandbytes", "fp4", "diffllama"),
    ],
)
def test_written_and_read_back(layout: str, weights: str, kind: str, tmp_path: Path):
    """Bit for bit what was written; bitsandbytes' and symmetric compressed-tensors also by transformers itself."""
    foreign.model(kind, inner=128).save_pretrained(tmp_path / "float")
    quantize_checkpoint(tmp_path / "float", tmp_path / "q", Scheme(weights=parse_format(weights)))
    out = export_checkpoint(tmp_path / "q", tmp_path / "out", layout)
    ours, theirs = Checkpoint(tmp_path / "q"), Checkpoint(out)
    for name in ours.names:
        if name.endswith("_proj.codes"):
            pair = [read_weight(one, name.replace(".codes", ".weight")) for one in (ours, theirs)]
            first, second = (one.parts() for one in pair if isinstance(one, QTensor))
            assert first.keys() == second.keys() and all(torch.equal(first[part], second[part]) for part in first)
    if layout == "compressed-tensors" and weights == "int4_g32":
        assert_same_model(tmp_path / "q", AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32))
    if layout == "bitsandbytes":  # whose product on a CPU rounds more than its weights do
        weight = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).get_parameter(f"{UP}.weight")
        ours_too = read_weight(ours, f"{UP}.weight")
        assert isinstance(ours_too, QTensor)
        assert torch.equal(functional.dequantize_4bit(weight.data, weight.quant_state), ours_too.dequantize())


@pytest.mark.parametrize("layout", [name for name, layout in layouts().items() if layout.settings and name != "bitnet"])
def test_what_a_layout_cannot_hold_is_refused(layout: str, tmp_path: Path):
    foreign.model().save_pretrained(tmp_path / "float")
    with pytest.raises(DiffbitError, match="its weights are float; quantize it first"):
        export_checkpoint(tmp_path / "float", tmp_path / "out", layout)
    quantize_checkpoint(tmp_path / "float", tmp_path / "q", Scheme(weights=parse_format("mxfp4")))
    with pytest.raises(DiffbitError, match=r"mxfp4, wanted .* for a"):
        export_checkpoint(tmp_path / "q", tmp_path / "out", layout)
    assert not (tmp_path / "out").exists()


GPTQ = settings("gptq", bits=4, group_size=32, sym=True)


@pytest.mark.parametrize(
    "change, words",
    [
        ({"quant_method": "hqq"}, r"config\.json: quantization_config\.quant_method is 'hqq', wanted one of .*gptq"),
        ({"bits": 5}, r"quantization_config\.bits is 5, wanted one of 2, 3, 4, 8"),
        ({"bits": 8}, r"qweight is int32 \(8, \d+\), wanted int32"),
        ({"group_size": 48}, r"group_size is 48, wanted one of 16, .* or -1 \(one scale per row\)"),
        ({"group_size": 64}, "qzeros is int32"),
        ({"checkpoint_format": "gptq_v2"}, "sym: true, but .* zero points other than 8"),
        ({"dynamic": {"+:.*down_proj": {"bits": 8}}}, "different bits or groups for some layers"),
        (lambda stored: stored.pop(f"{UP}.scales"), "up_proj.scales is missing"),
        (lambda stored: stored[f"{UP}.g_idx"].copy_(stored[f"{UP}.g_idx"].flip(0)), "do not lie side by side"),
        (lambda stored: stored[f"{UP}.bias"].add_(1), "is a bias, which"),
        (lambda stored: stored.update({f"{UP}.codes": torch.ones(1)}), "up_proj.codes, which a folder of quant_method"),
        (lambda stored: stored.update({f"{UP}.scales": torch.full((2, 96), 1 / 3)}), "float16 cannot represent"),
    ],
)
def test_damaged_folders_are_refused(change: Any, words: str, tmp_path: Path):
    foreign.folder(tmp_path, GPTQ, foreign.gptq())
    if isinstance(change, dict):
        foreign.edit_config(tmp_path, change)
    else:
        foreign.edit_tensors(tmp_path, change)
    with pytest.raises(DiffbitError, match=words):
        load(tmp_path)


@pytest.mark.parametrize(
    "entry, words",
    [
        (
            {"format": "pack-quantized", "config_groups": {"a": {"weights": {"type": "float", "num_bits": 8}}}},
            r"weights are 8-bit float of strategy None .* wanted integers, or nvfp4",
        ),
        (
            {"format": "marlin-24", "config_groups": {"a": {"weights": {"num_bits": 4}}}},
            "format is 'marlin-24', wanted",
        ),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}, "config_groups": {}}, "a sparsity_config"),
        ({"format": "float-quantized"}, "format is 'float-quantized', wanted one of pack-quantized"),
        ({"format": "pack-quantized"}, "config_groups is missing, wanted an object"),
    ],
)
def test_compressed_tensors_that_are_not_read(entry: dict[str, Any], words: str, tmp_path: Path):
    foreign.model().save_pretrained(tmp_path)
    foreign.edit_config(tmp_path, settings("compressed-tensors", **entry))
    with pytest.raises(DiffbitError, match=words):
        read_scheme(Checkpoint(tmp_path))


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path to each value of a JSON object."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*at, key)
        if isinstance(inner, dict | list):
            yield from places(inner, (*at, key))


@pytest.mark.parametrize(
    "layout, weights", [("gptq", "int4_g32"), ("compressed-tensors", "int4_g32"), ("bitsandbytes", "nf4")]
)
def test_odd_values_of_a_config_are_a_sentence(layout: str, weights: str, tmp_path: Path):
    foreign.model().save_pretrained(tmp_path / "float")
    narrow = (("*.down_proj", None),) if weights == "nf4" else ()  # 96 columns are no multiple of its 64
    quantize_checkpoint(tmp_path / "float", tmp_path / "q", Scheme(weights=parse_format(weights), overrides=narrow))
    folder = export_checkpoint(tmp_path / "q", tmp_path / "out", layout)
    good = (folder / "config.json").read_text()
    refused = 0
    for *path, last in (*places(json.loads(good)["quantization_config"]), ("dynamic",), ("sparsity_config",)):
        for odd in (5, "x", [], {"a": 5}, [[]]):
            config = json.loads(good)
            inner = config["quantization_config"]
            for key in path:
                inner = inner[key]
            inner[last] = odd
            (folder / "config.json").write_text(json.dumps(config))
            try:
                read_scheme(Checkpoint(folder))
            except DiffbitError:
                refused += 1
    assert refused >= 9  # what is not read at all may say anything
