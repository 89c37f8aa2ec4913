"""BitNet's GGUF files: I2_S tensors, packed here weight by weight, are ternary codes and a scale, never rounded."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from diffbit import models, quantize
from diffbit.apps.train.new_tokenizer import train_tokenizer
from diffbit.cli.automatic import quantize_model
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.models import Checkpoint
from diffbit.quantize.methods import rtn
from diffbit.runtime import verify

from .gguf_files import TYPES, convert, described
from .gguf_files import tensors as converted
from .helpers import hf_model, tokens
from .test_gguf import TEXT

I2_S, U32, F32, STRING = 36, 4, 6, 8
SIZES = {
    "hidden_size": 128, "intermediate_size": 256, "head_dim": 16, "tie_word_embeddings": True, "num_hidden_layers": 2,
}  # fmt: skip


def ternary_model(kind: str, scale: float | None = None, **changes: Any) -> Any:
    """A random model of transformers whose linear layers are ternary. scale: of each; None: others, in no float16."""
    model = hf_model(kind, **SIZES | changes)
    for index, (name, weight) in enumerate(model.state_dict().items()):
        if name.endswith("_proj.weight"):
            mean = weight.abs().mean()
            own = mean * (1 + 1e-5 * index) if scale is None else scale
            weight.copy_((weight / mean).round().clamp(-1, 1) * own)
        elif "embed" in name:
            weight.copy_(weight.half())
    return model


def packed(codes: np.ndarray, scale: np.float32) -> bytes:
    """As bitnet.cpp's quantizer for x86-64 writes it: 128 weights in 32 bytes, then the scale, then padding."""
    data = bytearray(codes.size // 4)
    for index, code in enumerate(codes.flatten().tolist()):
        block, place = divmod(index, 128)
        data[32 * block + place % 32] |= code << 6 - 2 * (place // 32)
    return bytes(data) + struct.pack("<f", scale) + bytes(28)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def write(file: Path, metadata: Mapping[str, Any], tensors: Mapping[str, tuple[int, tuple[int, ...], bytes]]) -> Path:
    """Write a GGUF file; tensors: {name: (ggml's type, shape, data)}."""
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind = next(kind for of, kind in ((str, STRING), (int, U32), (float, F32)) if isinstance(value, of))
        number = text(value) if isinstance(value, str) else struct.pack("<I" if kind == U32 else "<f", value)
        header += text(key) + struct.pack("<I", kind) + number
    body = b""
    for name, (type, shape, data) in tensors.items():
        dimensions = struct.pack(f"<{len(shape)}Q", *reversed(shape))
        header += text(name) + struct.pack("<I", len(shape)) + dimensions + struct.pack("<IQ", type, len(body))
        body += data + bytes(-len(data) % 32)
    file.write_bytes(header + bytes(-len(header) % 32) + body)
    return file


def bitnet(model: Any, file: Path, architecture: str = "bitnet-b1.58", **changes: bytes) -> Path:
    """Write a ternary model as bitnet.cpp does; changes: the data of tensors."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.BITNET, SIZES["num_hidden_layers"])
    tensors = {}
    for name, weight in converted(model, architecture).items():
        old = name.replace("attn_sub_norm", "inner_attn_ln").replace("mlp.ffn_sub_norm", "mlp.ffn_layernorm")
        there = f"{names.get_name(old.removesuffix('.weight'))}.weight"
        type, data = int(TYPES.F32), weight.tobytes()
        if name.endswith("_proj.weight"):
            type, data = I2_S, packed(np.sign(weight).astype(int) + 1, np.abs(weight).max())
        elif "embed" in name:
            type, data = int(TYPES.F16), weight.astype(np.float16).tobytes()
        tensors[there] = type, weight.shape, changes.get(there, data)
    about = {"general.architecture": architecture, "tokenizer.ggml.model": "none"}
    values = described(model.config, architecture)
    about |= {f"{architecture}.{key}": value for key, value in values.items() if value is not None}
    return write(file, about, tensors)


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


@pytest.mark.parametrize(("kind", "architecture"), [("bitnet", "bitnet-b1.58"), ("llama", "llama")])
def test_codes_and_scales_are_kept(kind: str, architecture: str, tmp_path: Path) -> None:
    """From the file to the quantized folder, also where the rows of queries and keys are in another order."""
    model, ids = ternary_model(kind), tokens(2, 30)
    file = bitnet(model, tmp_path / "m.gguf", architecture)
    with torch.no_grad():
        logits = model(ids).logits
        torch.testing.assert_close(models.load(file)(ids), logits, rtol=0, atol=1e-5 * max(1, float(logits.std())))
    report = quantize_model(file, tmp_path / "low", measure=False).report
    formats = {row.name.rpartition(".")[2]: row.format for row in report.weights}
    assert report.method == "rtn" and not report.warnings
    assert formats.pop("embed_tokens") == "int8" and set(formats.values()) == {"ternary"}
    low, scales = quantize.load(tmp_path / "low"), set[float]()
    for name, weight in model.state_dict().items():
        if is_linear(name):
            stored = low.get_submodule(name.removesuffix(".weight")).weight
            assert torch.equal(stored.dequantize(), weight)  # to the last bit
            assert torch.equal(stored.codes.int() - 1, weight.sign().int())
            scales.add(float(stored.scale))
            assert float(stored.scale) == float(weight.abs().max())
    assert len(scales) == 14 and any(float(np.float16(scale)) != scale for scale in scales)


def test_the_artifact_computes_with_these_codes(tmp_path: Path) -> None:
    train_tokenizer([TEXT], 300, tmp_path / "t")
    file = bitnet(ternary_model("bitnet", vocab_size=300), tmp_path / "m.gguf")
    quantize_model(file, tmp_path / "low", measure=False)
    artifact = export_artifact(tmp_path / "low", tmp_path / "artifact", tokenizer=tmp_path / "t" / "tokenizer.json")
    assert verify(artifact).passed


def test_they_are_the_weights_of_tq2_0(tmp_path: Path) -> None:
    """llama.cpp's type of the same codes, with a float16 for 256 weights, is `ternary_g128`, and the same numbers."""
    model = ternary_model("bitnet", 0.0625, hidden_size=256, head_dim=32, hidden_act="silu")

    def blocks(name: str, weight: np.ndarray) -> tuple[np.ndarray, TYPES]:
        is_layer = name.startswith("blk.")
        return (gguf.quants.quantize(weight, TYPES.TQ2_0), TYPES.TQ2_0) if is_layer else (weight, TYPES.F32)

    files = bitnet(model, tmp_path / "i2.gguf", "bitnet"), convert(model, tmp_path / "tq2.gguf", "bitnet", blocks)
    of_bitnet, of_llama_cpp = map(Checkpoint, files)
    assert of_bitnet.names == of_llama_cpp.names
    for name in of_bitnet.names:
        assert torch.equal(of_bitnet.read(name).float(), of_llama_cpp.read(name))
        assert of_bitnet.is_ternary(name) == is_linear(name) and not of_llama_cpp.is_ternary(name)
    for file, format in zip(files, ("ternary", "ternary_g128"), strict=True):
        report = quantize_model(file, tmp_path / format, measure=False).report
        assert {row.format for row in report.weights if row.name.endswith("_proj")} == {format}
        low = quantize.load(tmp_path / format)
        for name in filter(is_linear, of_bitnet.names):
            found = low.get_submodule(name.removesuffix(".weight")).weight.dequantize()
            assert torch.equal(found, model.state_dict()[name])


def test_weights_that_are_ternary_keep_their_scale() -> None:
    """Also where a file has them as floats, and one is asked to round them; others get the mean of their sizes."""
    format, generator = parse_format("ternary"), torch.Generator().manual_seed(0)
    weight = torch.randint(-1, 2, (300, 256), generator=generator) * 0.0371
    weight[:200] = 0  # more rows than are looked at together
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.equal(rtn.quantize(weight.to(dtype), format).dequantize(dtype), weight.to(dtype))
    weight[299, 255] = 0.02
    assert rtn.quantize(weight, format).scale.item() == pytest.approx(weight.abs().mean().item())
    assert rtn.quantize(torch.zeros(4, 8), format).scale.item() == pytest.approx(1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:5] + b"\xff" + data[6:], "an I2_S tensor holds a code of 3"),
        (lambda data: data[:-32] + bytes(32), "has the scale 0, wanted a positive number; convert the model again"),
        (lambda data: data[:-32] + struct.pack("<f", -1) + bytes(28), "has the scale -1, wanted a positive number"),
        (lambda data: data[:-32] + struct.pack("<f", np.nan) + bytes(28), "has the scale nan, wanted a positive"),
        (lambda data: data[:-32], "the bytes of tensor .* are also those of blk.1.attn_q.weight"),
    ],
)
def test_damaged_tensors_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    model, name = ternary_model("bitnet"), "blk.1.attn_q.weight"
    weight = model.get_parameter("model.layers.1.self_attn.q_proj.weight").detach().numpy()
    data = packed(np.sign(weight).astype(int) + 1, np.abs(weight).max())
    bitnet(model, tmp_path / "m.gguf", **{name: change(data)})
    with pytest.raises(DiffbitError, match=message) as error:
        quantize_model(tmp_path / "m.gguf", tmp_path / "low", measure=False)
    assert str(error.value).startswith(str(tmp_path / "m.gguf")) and not (tmp_path / "low").exists()


def test_what_is_not_read(tmp_path: Path) -> None:
    """The other types of BitNet's fork, rows of another length, and a file that ends before the last scale."""
    values = {"general.architecture": "bitnet-b1.58"}
    for type, message in ((38, "BitNet's type TL1"), (39, "BitNet's type TL2"), (37, "the unknown type 37")):
        file = write(tmp_path / "m.gguf", values, {"blk.0.attn_q.weight": (type, (4, 128), bytes(160))})
        with pytest.raises(DiffbitError, match=message):
            Checkpoint(file)
    file = write(tmp_path / "m.gguf", values, {"blk.0.attn_q.weight": (I2_S, (4, 64), bytes(96))})
    with pytest.raises(DiffbitError, match="rows that are not a multiple of its blocks of 128"):
        Checkpoint(file)
    file = write(tmp_path / "m.gguf", values, {"blk.0.attn_q.weight": (I2_S, (4, 128), bytes(160))})
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DiffbitError, match=r"is cut short: tensor blk\.0\.attn_q\.weight ends at"):
        Checkpoint(file)
