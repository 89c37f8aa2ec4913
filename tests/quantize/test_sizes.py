"""The table of sizes against the bytes of real checkpoints and artifacts, and against sums by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from safetensors.torch import load_file

from diffbit import models
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.models import Checkpoint, Decoder, ModelConfig
from diffbit.quantize import AttentionScheme, Scheme, linear_shapes, quantize_checkpoint, resolve, sizes
from diffbit.runtime import Artifact

INT4, INT8 = parse_format("int4_g32"), parse_format("int8")
CONFIG = ModelConfig.uniform(
    vocab_size=96, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=128,
    attention="diff_v2",
)  # fmt: skip
SCHEMES = {
    "int4, tables int8": Scheme(INT4, INT8, INT8, attention=AttentionScheme(keys="int8", values="int4")),
    "ternary, embedding float": Scheme(parse_format("ternary"), head=INT4),
    "int3, a layer float": Scheme(parse_format("int3_g64_asym"), INT8, INT4, overrides=(("model.layers.0.*", None),)),
    "nf4, tables float": Scheme(parse_format("nf4")),
}


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("name", ["diff_v1", "diff_v2"])
@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES)
def test_bytes_are_those_of_the_files(
    scheme: Scheme, name: str, tied: bool, trained: Callable[[str], Path], tmp_path: Path
) -> None:
    """Of a checkpoint's tensors, and of the initializers of an artifact at both precisions, each to the byte."""
    config = replace(Checkpoint(trained(name)).config, tie_embeddings=tied)
    models.save(Decoder(config), tmp_path / "float", dtype=torch.float16, tokenizer_from=trained(name))
    quantize_checkpoint(tmp_path / "float", tmp_path / "q", scheme)
    config = Checkpoint(tmp_path / "q").config
    stored = sum(tensor.nbytes for tensor in load_file(tmp_path / "q" / "model.safetensors").values())
    assert sizes(resolve(config, scheme), stored=torch.float16).checkpoint_bytes == stored
    for dtype in ("fp32", "fp16"):
        artifact = export_artifact(tmp_path / "q", tmp_path / dtype, dtype=dtype)
        initializers = ir.load(artifact / "model.onnx").graph.initializers
        tensors = {name: value.const_value for name, value in initializers.items() if name not in ("cos", "sin")}
        written = sum(tensor.nbytes for tensor in tensors.values() if isinstance(tensor, ir.ExternalTensor))
        table = sizes(resolve(config, scheme), dtype, torch.float16)
        assert table.nbytes == written
        assert table.cache == Artifact.open(artifact).cache


def test_every_tensor_is_in_one_layer() -> None:
    table = sizes(resolve(CONFIG))
    layers = list(table.layers())
    assert [tensor for layer in layers for tensor in layer] == list(table.tensors)
    names = [[tensor.name for tensor in layer] for layer in layers]
    assert names[0] == ["model.embed_tokens.weight"] and names[-2:] == [["model.norm.weight"], ["lm_head.weight"]]
    assert len(layers) == CONFIG.num_layers + 3
    assert all(name.startswith("model.layers.0.") for name in names[1]) and len(names[1]) > 8


def test_a_token_reads_a_row_of_the_embedding() -> None:
    """And all of it if it is the head as well."""
    scheme, row = Scheme(INT4, INT8, INT8), INT8.device_nbytes((96, 64), 4) // 96
    table = INT8.device_nbytes((96, 64), 4)
    untied = sizes(resolve(CONFIG, scheme))
    assert untied.token_bytes == untied.nbytes - table + row
    tied = sizes(resolve(replace(CONFIG, tie_embeddings=True), scheme))
    assert tied.token_bytes == tied.nbytes + row == untied.token_bytes


def test_sizes_count_every_tensor() -> None:
    linear = sum(rows * columns for rows, columns in linear_shapes(CONFIG).values())
    floats = sizes(resolve(CONFIG))
    assert floats.parameters == linear + 96 * 64 + 5 * 64
    assert floats.nbytes == 4 * floats.parameters and floats.bits_per_weight == 32
    assert sizes(resolve(CONFIG), dtype="fp16").bits_per_weight == 16
    quantized = sizes(resolve(CONFIG, Scheme(weights=INT4)))
    kept = 2 * 96 * 64 + 2 * 4 * 64 + 5 * 64
    assert quantized.nbytes == 4 * kept + (floats.parameters - kept) * 4.5 / 8
    # a tied head that is quantized is a weight of its own, beside the embedding
    tied = replace(CONFIG, tie_embeddings=True)
    head = sizes(resolve(tied, Scheme(overrides=(("lm_head", INT4),))))
    assert head.nbytes == sizes(resolve(tied)).nbytes + 96 * 64 * 4.5 / 8
    assert head.parameters == sizes(resolve(tied)).parameters + 96 * 64
