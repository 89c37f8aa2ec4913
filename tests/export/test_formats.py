"""Each format's node against the format's formula and the operator's rounding of its input, written out in numpy."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from diffbit.export import export_artifact
from diffbit.export.onnx_graph import OnnxGraph
from diffbit.formats import QuantLinear, names, parse_format
from diffbit.formats.integer import all_formats
from diffbit.quantize import Scheme, linear_shapes, quantize_checkpoint
from diffbit.quantize.methods.rtn import quantize as rtn
from diffbit.runtime import native, verify
from diffbit.runtime.providers import open_session as session_of

from .helpers import config_of, graph_of, open_session, write_model

# format -> (operator, bits, block of the activations' rounding; None: they stay float, 0: one step per row)
NODES = {
    "int8": ("Int8MatMul", None, 32),
    "int8_g32": ("Int8MatMul", None, 32),
    "int7_g64": ("Int8MatMul", None, 64),
    "int5_g16_asym": ("MatMulNBits", 8, 16),
    "int4": ("MatMulNBits", 4, 128),
    "int4_g32": ("Int4MatMul", None, 32),
    "int4_g128": ("Int4MatMul", None, 128),
    "int4_g256": ("MatMulNBits", 4, 256),
    "int4_g64_asym": ("Int4MatMul", None, 64),
    "int4_asym": ("MatMulNBits", 4, 128),
    "int6_g32": ("LowBitMatMul", None, 32),
    "int5_g128": ("LowBitMatMul", None, 128),
    "int3_g64": ("LowBitMatMul", None, 64),
    "int3_g32_s8": ("LowBitMatMul", None, 32),
    "int4_g64_s8": ("LowBitMatMul", None, 64),
    "nl2_g32_s8": ("LowBitMatMul", None, 32),
    "nl3_g128_s8": ("LowBitMatMul", None, 128),
    "nl4_g32_s8": ("LowBitMatMul", None, 32),
    "tcq2_g32_s8": ("LowBitMatMul", None, 32),
    "tcq3_g128_s8": ("LowBitMatMul", None, 128),
    "tcq4_g32_s8": ("LowBitMatMul", None, 32),
    "tcq5_g64_s8": ("LowBitMatMul", None, 64),
    "tcq6_g32_s8": ("LowBitMatMul", None, 32),
    "int3_g32_asym": ("Int4MatMul", None, 32),
    "int2_g16": ("MatMulNBits", 4, 16),
    "int2_g32_asym": ("MatMulNBits", 2, 32),
    "int2_g64": ("LowBitMatMul", None, 64),
    "int2_g64_asym": ("MatMulNBits", 2, 64),
    "int2_g256": ("MatMulNBits", 2, 128),
    "int2_g256_asym": ("MatMulNBits", 2, 128),
    "int2": ("MatMulNBits", 2, 128),
    "nf4": ("MatMulBnb4", None, None),
    "mxfp4": ("MatMulNBits", 8, 32),
    "nvfp4": ("MatMulNBits", 8, 16),
    "ternary": ("TernaryMatMul", None, 0),
}


def rounded(x: np.ndarray, block: int | None) -> np.ndarray:
    """x [M, K] as the operator sees it: int8 steps of max|x| / 127 per block of K, or per row (block 0)."""
    if block is None:
        return x
    out = x.copy()
    block = block or x.shape[1]
    for row in out:
        for start in range(0, len(row), block):
            part = row[start : start + block]
            step = np.abs(part).max() / np.float32(127)
            part[:] = np.round(part / step) * step if step else 0
    return out


def build(folder: Path, weight: torch.Tensor, format: str, scale: float, dtype: str) -> tuple[onnx.ModelProto, object]:
    folder.mkdir()
    g = OnnxGraph(folder, dtype)
    x = g.input("x", g.dtype, ["rows", weight.shape[1]])
    module = QuantLinear(rtn(weight, parse_format(format)))
    g.output("y", g.linear(x, module, "proj", scale), g.dtype, ["rows", weight.shape[0]])
    g.save()
    return onnx.load(folder / "model.onnx", load_external_data=False), module.weight


CASES = [
    (format, columns)
    for format in NODES
    for columns in (64, 192, 320, 1000)
    if not parse_format(format).whole_groups or columns % 64 == 0
]


@pytest.mark.parametrize(("format", "columns"), CASES)
def test_node_computes_the_format(tmp_path: Path, format: str, columns: int) -> None:
    operator, bits, block = NODES[format]
    generator = torch.Generator().manual_seed(columns)
    weight = torch.randn(64, columns, generator=generator)
    model, quantized = build(tmp_path / "m", weight, format, 0.37, "fp32")
    (node,) = (node for node in model.graph.node if node.op_type == operator)
    assert len(model.graph.node) == {"ternary": 2, "mxfp4": 6, "nvfp4": 8}.get(format, 1)
    if operator == "MatMulNBits":
        attributes = {a.name: a.i for a in node.attribute}
        assert (attributes["bits"], attributes["block_size"], attributes["accuracy_level"]) == (bits, block, 4)
    # steps of the activations that no last bit can move: a ramp, and one row of zeros
    x = (torch.randint(-126, 127, (5, columns), generator=generator).float() * 0.01).numpy()
    x[:, :: block or columns] = 1.27
    x[3] = 0
    (actual,) = open_session(tmp_path / "m").run(None, {"x": x})
    expected = rounded(x, block).astype(np.float64) @ quantized.dequantize().double().numpy().T * 0.37
    np.testing.assert_allclose(actual, expected, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize(
    "format",
    [
        "int4_g32",
        "int8",
        "int2_g64",
        "int2_g64_asym",
        "int6_g32_s8",
        "nl4_g32_s8",
        "tcq4_g32_s8",
        "nf4",
        "mxfp4",
        "nvfp4",
        "ternary",
    ],
)
def test_fp16(tmp_path: Path, format: str) -> None:
    weight = torch.randn(64, 192, generator=torch.Generator().manual_seed(0)) * 0.1
    model, quantized = build(tmp_path / "m", weight, format, 1.0, "fp16")
    types = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    if "proj.scale" in types and format not in ("ternary", "mxfp4", "nvfp4") and not format.endswith("_s8"):
        assert types["proj.scale"] == onnx.TensorProto.FLOAT16
    x = torch.randn(7, 192, generator=torch.Generator().manual_seed(1)).half()
    (actual,) = open_session(tmp_path / "m").run(None, {"x": x.numpy()})
    module = QuantLinear(quantized, quantized.format.device_rounding(None))
    expected = module(x.float())
    assert actual.dtype == np.float16
    assert np.median(np.abs(actual - expected.numpy())) < 1e-3
    assert np.abs(actual - expected.numpy()).max() < 2e-2


@pytest.mark.parametrize("isa", [None, *native.instruction_sets()])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_int4_activations_are_the_layers_own_bits(tmp_path: Path, dtype: str, isa: str | None) -> None:
    """Two layers with and one without a Hadamard, all in one graph and of one function each."""
    generator = torch.Generator().manual_seed(5)
    widths = {"o_proj": 192, "gate_proj": 192, "down_proj": 320}
    g = OnnxGraph(tmp_path, dtype)
    x = torch.randn(5, 320, generator=generator)
    x[:, 7] *= 40
    expected, inputs = [], {}
    for name, columns in widths.items():
        weight = rtn(torch.randn(24, columns, generator=generator), parse_format("ternary"))
        module = QuantLinear(weight, weight.format.rounding(name, columns, "int4"))
        g.output(f"{name}.y", g.linear(g.input(name, g.dtype, ["rows", columns]), module, name), g.dtype, ["rows", 24])
        part = x[:, :columns].half() if dtype == "fp16" else x[:, :columns]
        inputs[name] = part.numpy()
        expected.append(module(part).numpy())
    g.save()
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    assert [node.op_type for node in model.graph.node].count("Hadamard") == 2
    with mock.patch.dict(os.environ, {native.ISA: isa or ""}):
        session = session_of(tmp_path / "model.onnx", "cpu", 1, native.library() if isa else None)
    for actual, exact in zip(session.run(None, inputs), expected, strict=True):
        assert np.array_equal(actual, exact)


@pytest.mark.parametrize("isa", [None, *native.instruction_sets()])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_ternary_layers_with_one_input_are_one_product(tmp_path: Path, dtype: str, isa: str | None) -> None:
    """Each with its own scale, which ONNX Runtime repeats for the layer's rows when it loads the model."""
    generator = torch.Generator().manual_seed(6)
    layers = {"q_proj": (40, 1.0), "k_proj": (24, 0.02), "v_proj": (24, 3.0)}
    modules = {
        name: QuantLinear(rtn(torch.randn(rows, 200, generator=generator) * std, parse_format("ternary")))
        for name, (rows, std) in layers.items()
    }
    g = OnnxGraph(tmp_path, dtype)
    values = g.linears(g.input("x", g.dtype, ["rows", 200]), modules)
    for value, (name, (rows, _)) in zip(values, layers.items(), strict=True):
        g.output(name, value, g.dtype, ["rows", rows])
    g.save()
    model = onnx.load(tmp_path / "model.onnx", load_external_data=False)
    assert [node.op_type for node in model.graph.node].count("TernaryMatMul") == 1
    assert [list(tensor.dims) for tensor in model.graph.initializer if tensor.name.endswith("scale")] == [[1]] * 3
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    if isa:
        options.register_custom_ops_library(str(native.library()))
    with mock.patch.dict(os.environ, {native.ISA: isa or ""}):
        session = onnxruntime.InferenceSession(tmp_path / "model.onnx", options, providers=["CPUExecutionProvider"])
    for rows in (1, 7):
        x = torch.randn(rows, 200, generator=generator).to(torch.float16 if dtype == "fp16" else torch.float32)
        for actual, module in zip(session.run(None, {"x": x.numpy()}), modules.values(), strict=True):
            assert np.array_equal(actual, module(x).numpy())
    loaded = onnx.load(tmp_path / "loaded.onnx").graph
    product = next(node for node in loaded.node if node.op_type == ("TernaryMatMul" if isa else "MatMulInteger"))
    weights = {tensor.name: tensor for tensor in loaded.initializer}
    assert product.input[1] in weights and not {"Expand", "Concat", "BitShift"} & {node.op_type for node in loaded.node}
    if isa:
        assert list(weights[product.input[2]].dims) == [88]
    else:
        assert weights[product.input[1]].data_type == onnx.TensorProto.INT8


FOLDED = [
    ("int4_g32", 192),
    ("int8", 200),
    ("int8_g64_asym", 200),
    ("int3_g64_asym", 200),
    ("int4_g128_asym", 1000),
    ("int2_g64", 192),
    ("int3_g64_s8", 200),
    ("int5_g128", 1000),
    ("nl4_g32_s8", 200),
    ("mxfp4", 192),
    ("nvfp4", 192),
]


@pytest.mark.parametrize(("format", "columns"), FOLDED)
def test_nodes_before_the_product_are_folded_at_load(tmp_path: Path, format: str, columns: int) -> None:
    """ONNX Runtime folds all of the body but its MatMulNBits; where it is told to fold nothing, the body works too."""
    weight = torch.randn(40, columns, generator=torch.Generator().manual_seed(3))
    build(tmp_path / "m", weight, format, 0.5, "fp32")
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "loaded.onnx")
    folded = onnxruntime.InferenceSession(tmp_path / "m" / "model.onnx", options, providers=["CPUExecutionProvider"])
    graph = onnx.load(tmp_path / "loaded.onnx").graph
    assert [node.op_type for node in graph.node] == ["MatMulNBits"]
    assert set(graph.node[0].input) == {"x", *(tensor.name for tensor in graph.initializer)}
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    plain = onnxruntime.InferenceSession(tmp_path / "m" / "model.onnx", options, providers=["CPUExecutionProvider"])
    x = np.random.default_rng(0).standard_normal((3, columns), np.float32)
    (expected,), (actual,) = folded.run(None, {"x": x}), plain.run(None, {"x": x})
    # unfolded weights are multiplied without rounding x, so only int8's error is left between the two
    np.testing.assert_allclose(actual, expected, atol=0.02 * np.abs(expected).max())


@pytest.mark.slow
def test_every_format_goes_all_the_way(tmp_path: Path) -> None:
    """A model with each format that there is in a layer of its own: quantized, read back, exported, verified, and its
    bytes are those that the format says."""
    formats = [*map(parse_format, names()), *(format for format in all_formats() if format.better is not None)]
    sizes = {"num_heads": 2, "num_kv_heads": 2}  # a width of 64, which trellis codes need
    config = config_of("diff_v1", num_layers=-(-len(formats) // 7), max_position=24, **sizes)
    modules = [module for module in linear_shapes(config) if module != "lm_head"]
    scheme = Scheme(overrides=tuple(zip(modules, formats, strict=False)))
    source = write_model(tmp_path / "float", config)
    report = quantize_checkpoint(source, tmp_path / "all", scheme)
    assert {row.format for row in report.weights} == {format.name for format in formats}
    for dtype, width in (("fp32", 4), ("fp16", 2)):
        artifact = export_artifact(tmp_path / "all", tmp_path / dtype, dtype=dtype)
        assert verify(artifact).passed
        stored: dict[str, int] = {}
        for tensor in graph_of(artifact).graph.initializer:
            length = sum(int(entry.value) for entry in tensor.external_data if entry.key == "length")
            module = f"model.{tensor.name.rpartition('.')[0]}"
            stored[module] = stored.get(module, 0) + length
        for module, format in scheme.overrides:
            assert format is not None
            assert stored[module] == format.device_nbytes(linear_shapes(config)[module], width), (format, dtype)
