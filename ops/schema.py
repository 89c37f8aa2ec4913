"""The signatures of all ops: names, order, types, attributes, versions, and the struct of the CUDA call.

All other uses of signatures derive from this file:

    csrc/ort/generated/schema.h    the list of ops, their tensors, attributes and types, for kernels and registration
    csrc/ort/generated/calls.h     the structs of the CUDA kernels' C interface
    csrc/ort/generated/levels.h    the levels of a low-bit cache, from kv_cache.py
    tests/native/cuda.py           the same structs for ctypes, made at import
    ops/X.py, export/onnx_graph.py the op's portable body as a function (`Op.function`), a node's attributes
    runtime/providers.py           which nodes must not fall back to the CPU (`OPS`)

    python -m diffbit.ops.schema

writes the three headers, which are committed; a test compares them with this file. Each op's own file defines what it
computes.
"""

from __future__ import annotations

from pathlib import Path

from . import kv_cache
from .signature import Call, Integer, Number, Op, Tensor, Type, Variable, listed

HALF = (Type.FLOAT32, Type.FLOAT16)
HALVES = (*HALF, Type.BFLOAT16)
CODES = (Type.INT8, Type.UINT8)
T = Variable("T", HALF, on_gpu=HALVES)
K, V = (Variable(name, (*HALF, *CODES), on_gpu=(*HALVES, *CODES)) for name in "KV")  # in the cache
S = Variable("S", (Type.FLOAT16, Type.INT8), on_gpu=(Type.FLOAT16, Type.INT8))  # scales of groups
SIZE, ROWS = 1 << 24, 1 << 31  # the most columns and rows of a weight
FLOATS = "FLOAT32, FLOAT16 or BFLOAT16"
# Fields of several calls
PRODUCT = ("m = tensors.rows", "node.n", "node.k")
TOKENS = ("tensors.batch", "tensors.steps", "tensors.total", "tensors.channels")

DIFF_ATTENTION = Op(
    "DiffAttention",
    version=7,
    names=6,
    inputs=(
        Tensor("query", T),
        Tensor("key", T, optional=True),
        Tensor("value", T, optional=True),
        Tensor("lambda", Type.FLOAT32, optional=True),
        Tensor("past_key", K),
        Tensor("past_value", V),
        Tensor("past_length", Type.INT64, on_host=True),
        Tensor("position_ids", Type.INT64),
        Tensor("cos", Type.FLOAT32),
        Tensor("sin", Type.FLOAT32),
        Tensor("attention_mask", Type.INT64),
        Tensor("past_key_scale", Type.FLOAT16, optional=True),
        Tensor("past_value_scale", Type.FLOAT16, optional=True),
        Tensor("past_key_recent", Type.FLOAT16, optional=True),
        Tensor("past_value_recent", Type.FLOAT16, optional=True),
        Tensor("gates", Type.FLOAT32, optional=True),
    ),
    outputs=(
        Tensor("out", T),
        Tensor("present_key", K, optional=True),
        Tensor("present_value", V, optional=True),
        Tensor("present_key_scale", Type.FLOAT16, optional=True),
        Tensor("present_value_scale", Type.FLOAT16, optional=True),
        Tensor("present_key_recent", Type.FLOAT16, optional=True),
        Tensor("present_value_recent", Type.FLOAT16, optional=True),
    ),
    attributes=(
        Integer("num_heads", 1, 1 << 16),
        Integer("num_kv_heads", 1, 1 << 16),
        Integer("branches", 1, 2, default=2),
        Integer("noise_ratio", 1, 1 << 16, default=1),
        Integer("wide_value", 0, 1, default=0),
        Number("scale"),
        Number("norm_eps", default=0.0),
        Integer("key_bits", choices=(16, 8, 4, 3, 2), default=16),
        Integer("value_bits", choices=(16, 8, 4, 3, 2), default=16),
        Integer("query_bits", choices=(0, 8, 4), default=0),
        Integer("window", 0, 1 << 20, default=0),
        Integer("first", 0, 16, default=0),
        Integer("sliding_window", 0, 1 << 24, default=0),
    ),
    opsets=(("", 21), ("com.microsoft", 1)),
    call=Call(
        "attention",
        integers=(
            *("tensors.batch", "tensors.steps", "tensors.past_length", "node.heads", "node.kv_heads", "tensors.d"),
            *("past_key_capacity = tensors.keys.past_capacity", "past_value_capacity = tensors.values.past_capacity"),
            *("key_capacity = tensors.keys.capacity", "value_capacity = tensors.values.capacity"),
            *("mask_row = tensors.attention_mask.shape[1]", "positions = tensors.cos.shape[0]"),
            *("node.branches", "node.noise_ratio", "wide_value = node.width - 1"),
            *("lambda_per_token = tensors.lambda.rank == 3", "node.key_bits", "node.value_bits", "node.query_bits"),
            *("node.window", "node.first", "node.sliding_window"),
            *("tensors.query.type", "key_type = tensors.keys.past.type", "value_type = tensors.values.past.type"),
        ),
        floats=("node.scale", "node.norm_eps"),
        tensors={"key": "keys.fresh", "value": "values.fresh"}
        | {
            f"{time}_{side}{part}": f"{side}s.{time}{part}"
            for time in ("past", "present")
            for side in ("key", "value")
            for part in ("", "_scale", "_recent")
        },
        notes={
            "past_key_capacity": "tokens that past and present have room for",
            "mask_row": "numbers of a row of attention_mask",
            "positions": "rows of cos and sin; a position beyond them makes its token NaN",
            "key_type": f"of a cache of 16 bits: {FLOATS}",
        },
    ),
)

HADAMARD = Op(
    "Hadamard",
    version=1,
    inputs=(Tensor("A", T),),
    outputs=(Tensor("Y", T),),
    attributes=(Integer("block", 1, SIZE),),
    call=Call(
        "hadamard", integers=("size = tensors.a.size()", "node.block", "tensors.a.type"), notes={"a": "`size` numbers"}
    ),
)

SILU_GATE = Op(
    "SiluGate",
    version=1,
    inputs=(Tensor("A", T),),
    outputs=(Tensor("Y", T),),
    call=Call("silu_gate", integers=("tensors.rows", "tensors.n", "tensors.a.type")),
)

TERNARY_MATMUL = Op(
    "TernaryMatMul",
    version=2,
    inputs=(Tensor("A", T), Tensor("packed", Type.UINT8), Tensor("scale", Type.FLOAT32)),
    outputs=(Tensor("Y", T),),
    attributes=(Integer("K", 1, SIZE), Integer("N", 1, ROWS), Integer("activation_bits", choices=(8, 4), default=8)),
    call=Call(
        "ternary_matmul",
        integers=(*PRODUCT, "node.activation_bits", "tensors.scale_per_row", "tensors.a.type"),
        notes={"a": "[m, k]", "packed": "at a multiple of 16", "scale": "[n] if per row, else [1]", "y": "[m, n]"},
    ),
)

INT4_MATMUL = Op(
    "Int4MatMul",
    version=1,
    inputs=(
        Tensor("A", T),
        Tensor("codes", Type.UINT8),
        Tensor("scales", Type.FLOAT16),
        Tensor("zeros", Type.UINT8),
        Tensor("factor", Type.FLOAT32),
    ),
    outputs=(Tensor("Y", T),),
    attributes=(Integer("K", 1, SIZE), Integer("N", 1, ROWS), Integer("group_size", choices=(32, 64, 128))),
    opsets=(("", 21), ("com.microsoft", 1)),
    call=Call(
        "int4_matmul",
        integers=(*PRODUCT, "node.group_size", "tensors.a.type"),
        notes={
            "a": "[m, k]",
            "codes": "at a multiple of 16, like scales and zeros",
            "zeros": "[tiles, groups, 16]; null: 8 everywhere",
            "y": "[m, n]",
        },
    ),
)

INT8_MATMUL = Op(
    "Int8MatMul",
    version=1,
    inputs=INT4_MATMUL.inputs,
    outputs=INT4_MATMUL.outputs,
    attributes=INT4_MATMUL.attributes,
    opsets=INT4_MATMUL.opsets,
    call=Call(
        "int8_matmul",
        integers=(*PRODUCT, "node.group_size", "tensors.scale_groups", "tensors.a.type"),
        notes={
            "a": "[m, k]",
            "codes": "at a multiple of 16",
            "scales": "[tiles, scale_groups, 16]",
            "zeros": "shaped as scales; null: 128 everywhere",
            "y": "[m, n]",
            "scale_groups": "of a row: as many as groups, or 1",
        },
    ),
)

GATHER = Op(
    "GatherQuantized",
    version=1,
    inputs=(
        Tensor("ids", Type.INT64),
        Tensor("codes", Type.UINT8),
        Tensor("scales", Type.FLOAT16),
        Tensor("zeros", Type.UINT8),
        Tensor("factor", T),
    ),
    outputs=(Tensor("Y", T),),
    attributes=(*INT4_MATMUL.attributes, Integer("bits", choices=(4, 8))),
    call=Call(
        "gather_quantized",
        integers=(*PRODUCT, "node.group_size", "tensors.scale_groups", "node.bits", "tensors.factor.type"),
        notes={
            "ids": "[m]; one outside the table makes its row NaN",
            "scales": "[tiles, scale_groups, 16]",
            "zeros": "shaped as scales; null: 2^(bits - 1) everywhere",
            "y": "[m, k]",
        },
    ),
)

LOWBIT_MATMUL = Op(
    "LowBitMatMul",
    version=1,
    names=14,
    inputs=(
        Tensor("A", T),
        Tensor("codes", Type.UINT8),
        Tensor("scales", S),
        Tensor("row_scales", Type.FLOAT16),
        Tensor("levels", Type.UINT8),
        Tensor("factor", Type.FLOAT32),
    ),
    outputs=(Tensor("Y", T),),
    attributes=(*INT4_MATMUL.attributes, Integer("bits", 1, 6)),
    opsets=INT4_MATMUL.opsets,
    call=Call(
        "lowbit_matmul",
        integers=(
            *PRODUCT,
            "node.group_size",
            "node.bits",
            "scale_type = tensors.scales.type",
            "tensors.is_trellis",
            "tensors.a.type",
        ),
        notes={
            "a": "[m, k]",
            "codes": "at a multiple of 16",
            "scales": "[tiles, groups, 16]",
            "row_scales": "[tiles, 16]; null: 1 everywhere",
            "levels": "[2^bits], or what ops/trellis.py says; null: none",
            "y": "[m, n]",
            "scale_type": "FLOAT16 or INT8",
            "is_trellis": "1 for trellis codes, else 0",
        },
    ),
)

GATHER_LOWBIT = Op(
    "GatherLowBit",
    version=1,
    inputs=(Tensor("ids", Type.INT64), *LOWBIT_MATMUL.inputs[1:5], Tensor("factor", T)),
    outputs=(Tensor("Y", T),),
    attributes=LOWBIT_MATMUL.attributes,
    call=Call(
        "gather_lowbit",
        integers=(*LOWBIT_MATMUL.call.integers[:-1], "tensors.factor.type"),
        notes={**LOWBIT_MATMUL.call.notes, "ids": GATHER.call.notes["ids"], "y": "[m, k]"},
    ),
)

FLOAT_MATMUL = Op(
    "FloatMatMul",
    version=1,
    inputs=(Tensor("A", T), Tensor("W", T)),
    outputs=(Tensor("Y", T),),
    call=Call(
        "float_matmul",
        integers=("m = tensors.rows", "n = tensors.w.shape[0]", "k = tensors.w.shape[1]", "tensors.a.type"),
        notes={"a": "[m, k]", "w": "[n, k]", "y": "[m, n]"},
    ),
)

CAUSAL_CONV = Op(
    "CausalConv",
    version=1,
    inputs=(
        Tensor("x", T),
        Tensor("weight", Type.FLOAT32),
        Tensor("bias", Type.FLOAT32),
        Tensor("attention_mask", Type.INT64),
        Tensor("past_state", Type.FLOAT32),
    ),
    outputs=(Tensor("y", T), Tensor("present_state", Type.FLOAT32)),
    call=Call(
        "causal_conv",
        integers=(*TOKENS, "tensors.width", "tensors.x.type"),
        notes={"total": "columns of attention_mask", "width": "rows of weight"},
    ),
)

SELECTIVE_SCAN = Op(
    "SelectiveScan",
    version=1,
    inputs=(
        Tensor("x", T),
        Tensor("dt", T),
        Tensor("z", T),
        Tensor("B", T),
        Tensor("C", T),
        Tensor("A", Type.FLOAT32),
        Tensor("D", Type.FLOAT32),
        Tensor("dt_bias", Type.FLOAT32),
        *CAUSAL_CONV.inputs[3:],
    ),
    outputs=(Tensor("y", T), Tensor("memory", T, optional=True), CAUSAL_CONV.outputs[1]),
    call=Call(
        "selective_scan",
        integers=(*TOKENS, "tensors.states", "tensors.x.type"),
        notes={"memory": "null: not requested", "total": "columns of attention_mask", "states": "rows of a"},
    ),
)

OPS = (
    CAUSAL_CONV,
    DIFF_ATTENTION,
    FLOAT_MATMUL,
    GATHER,
    GATHER_LOWBIT,
    HADAMARD,
    INT4_MATMUL,
    INT8_MATMUL,
    LOWBIT_MATMUL,
    SELECTIVE_SCAN,
    SILU_GATE,
    TERNARY_MATMUL,
)

# ---- the headers ----

LISTED = """/// X(Op, function) for every op; the functions are create_`function` and diffbit_cuda_`function`.
#define DIFFBIT_OPS(X)"""
EXPORT = '#define DIFFBIT_CUDA_API extern "C" __attribute__((visibility("default")))\n'
WRITTEN = "// Written by python -m diffbit.ops.schema, from ops/schema.py: change that.\n#pragma once\n"


def headers() -> dict[Path, str]:
    """Return the contents of the files in csrc/ort/generated/."""
    ops = "\n\n".join(map(_op, OPS))
    calls = "\n\n".join(map(_call, OPS))
    space = "namespace diffbit::schema"
    names = "".join(f" \\\n  X({op.name}, {op.call.function})" for op in OPS)
    begin = f'{WRITTEN}\n#include "../schema.h"\n\n{LISTED}{names}'
    folder = Path(__file__).resolve().parents[1] / "csrc" / "ort" / "generated"
    return {
        folder / "schema.h": f"{begin}\n\n{space} {{\n\n{ops}\n\n}}  // {space}\n",
        folder / "calls.h": f"{WRITTEN}\n#include <cstddef>\n#include <cstdint>\n\n{EXPORT}\n{calls}\n",
        folder / "levels.h": f"{WRITTEN}\n// Lists for codes of 2, 3 and 4 bits (ops/kv_cache.py)\n{_levels()}",
    }


def _levels() -> str:
    """Return the tables of kv_cache.py as macros, which constants in a GPU's memory can be made of, too."""
    lines = []
    for name, table in (("LEVELS", kv_cache.LEVELS), ("THRESHOLDS", kv_cache.THRESHOLDS)):
        for bits, row in sorted(table.items()):
            numbers = ", ".join(f"{x}f" if isinstance(x, float) else str(x) for x in row)
            lines.append(f"#define DIFFBIT_CACHE_{name}_{bits} {numbers}\n")
    return "".join(lines)


def _op(op: Op) -> str:
    lines = [f'const char* NAME = "{op.name}"', f"int64_t VERSION = {op.version}"]
    for tensors, kind in ((op.inputs, "Input"), (op.outputs, "Output")):
        for index, tensor in enumerate(tensors):
            lines.append(f'{kind} {tensor.name.upper()}{{{index}, "{op.name}: {tensor.name}"}}')
    for attribute in op.attributes:
        values = ""
        if isinstance(attribute, Integer):
            bounds = attribute.choices or (attribute.low, attribute.high)
            values = f", {len(attribute.choices)}, {{{', '.join(map(str, bounds))}}}"
        lines.append(f'{type(attribute).__name__} {attribute.name.upper()}{{"{attribute.name}"{values}}}')
    for name, rows in (("TYPES", op.types()), ("GPU_TYPES", op.types(gpu=True))):
        text = "".join(f"      {{{', '.join(str(int(type)) for type in row)}}},\n" for row in rows)
        lines.append(f"int {name}[{len(rows)}][{len(rows[0])}] = {{\n{text}  }}")
    masks = (
        sum(1 << i for i, tensor in enumerate(tensors) if getattr(tensor, flag))
        for tensors, flag in ((op.inputs, "optional"), (op.outputs, "optional"), (op.inputs, "on_host"))
    )
    names = ", ".join(f'"{op.named(index)}"' for index in range(op.names))
    lines.append(f"const char* NAMES[{op.names}] = {{{names}}}")
    lines.append(f"Signature SIGNATURE{{{len(op.inputs)}, {len(op.outputs)}, {', '.join(map(hex, masks))}}}")
    members = "".join(f"  static constexpr {line};\n" for line in lines)
    return f"struct {op.name} {{\n{members}}};"


def _call(op: Op) -> str:
    name, function = f"Diffbit{op.name}", f"diffbit_cuda_{op.call.function}"
    lines, checks, offset = [f"struct {name} {{"], [], 0
    typed = listed([tensor.name.lower() for tensor in op.inputs + op.outputs if tensor.type == T], "and")
    notes = {"type": f"of {typed}: {FLOATS}", **op.call.notes}
    for kind, field, _ in op.fields():
        note = f"  // {notes[field]}" if field in notes else ""
        lines.append(f"  {kind} {field};{note}")
        checks.append(f'static_assert(offsetof({name}, {field}) == {offset}, "{field}");')
        offset += 4 if kind == "float" else 8
    size = -(-offset // 8) * 8
    sources = "".join(f"        {source},\n" for _, _, source in op.fields())
    lines += [
        "",
        "  template <class Node, class Tensors>",
        f"  static {name} from([[maybe_unused]] const Node& node, const Tensors& tensors) {{",
        f"    return {{\n{sources}    }};",
        "  }",
        "};",
    ]
    functions = [
        f"DIFFBIT_CUDA_API size_t {function}_workspace(const {name}*);",
        f"DIFFBIT_CUDA_API const char* {function}(const {name}*, void* workspace, void* stream);",
    ]
    return "\n".join([*lines, *checks, f'static_assert(sizeof({name}) == {size}, "{name}");', *functions])


if __name__ == "__main__":
    for path, text in headers().items():
        path.write_text(text)
