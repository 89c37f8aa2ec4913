"""Nodes that are wrong in one thing, and the sentence that must come back. A new op joins in broken()."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from diffbit.ops import causal_conv, selective_scan

from ..ops.cases import AttentionCase, HadamardCase, Int4Case, LowBitCase, MambaCase, SiluGateCase, TernaryCase
from .nodes import Node, Output, attention, gated, gather, gather_rows, int4, lowbit, mamba, ternary, transform


@dataclass(frozen=True)
class Broken:
    """`sentence` is a pattern; None where ONNX Runtime itself refuses the model."""

    node: Node
    sentence: str | None


def changed(node: Node, name: str, **changes: Any) -> Node:
    """The node with other attributes (None: taken away) or inputs."""
    attributes = {k: v for k, v in (node.attributes | changes).items() if k in node.attributes and v is not None}
    inputs = {k: changes.get(k, v) for k, v in node.inputs.items()}
    assert not set(changes) - set(node.attributes) - set(node.inputs)
    return replace(node, name=f"{node.op}/{name}", attributes=attributes, inputs=inputs, constants=())


def of_any_op(node: Node, optional: tuple[str, ...] = ()) -> Iterator[Broken]:
    """What can be wrong with a node of any op."""
    for name, value in node.attributes.items():
        kind, other = ("integer", float(value)) if isinstance(value, int) else ("float", 1)
        yield Broken(changed(node, f"no_{name}", **{name: None}), f"{node.op} has no {kind} attribute {name}")
        yield Broken(changed(node, f"{name}_of_another_kind", **{name: other}), f"has no {kind} attribute {name}")
    version = node.attributes["spec_version"]
    newer = changed(node, "newer", spec_version=version + 1)
    yield Broken(newer, f"spec_version is {version + 1}, this library computes {version}")
    for name, array in node.inputs.items():
        if array is None:
            continue
        if name not in optional:
            sentence = {"key": "value is given, wanted exactly", "value": "value is missing, wanted exactly"}.get(name)
            yield Broken(changed(node, f"{name}_omitted", **{name: None}), sentence)
        yield Broken(changed(node, f"{name}_float64", **{name: array.astype(np.float64)}), None)
        deep = array.reshape(array.shape + (1,) * (9 - array.ndim))
        yield Broken(changed(node, f"{name}_of_rank_9", **{name: deep}), "has 9 dimensions, wanted at most 8")


def misshapen(node: Node) -> Iterator[Node]:
    """The node with one input a little too large or small, or empty. Some of these are legal."""
    for name, array in node.inputs.items():
        if array is None:
            continue
        for axis, size in enumerate(array.shape):
            for other in {0, size - 1, size + 1, 2 * size, 1} - {size}:
                new = np.zeros((*array.shape[:axis], other, *array.shape[axis + 1 :]), array.dtype)
                yield changed(node, f"{name}_{axis}_is_{other}", **{name: new})
        yield changed(node, f"{name}_is_a_number", **{name: np.zeros((), array.dtype)})
        yield changed(node, f"{name}_is_flat", **{name: array.reshape(-1)})
        yield changed(node, f"{name}_is_deeper", **{name: array[None]})


def broken_ternary() -> Iterator[Broken]:
    node = ternary(TernaryCase("base", lead=(2,), k=200, n=5))
    a, packed = node.inputs["A"], node.inputs["packed"]
    assert a is not None and packed is not None
    yield from of_any_op(node)
    for name, sentence, changes in (
        ("k_0", "attribute K is 0, wanted 1 to", {"K": 0}),
        ("k_negative", "attribute K is -200, wanted 1 to", {"K": -200}),
        ("k_huge", "attribute K is 4611686018427387904, wanted", {"K": 1 << 62}),
        ("n_0", "attribute N is 0, wanted 1 to", {"N": 0}),
        ("n_huge", r"packed is \[5, 64\], wanted \[2147483648, 64\]", {"N": 1 << 31}),
        ("n_6", r"packed is \[5, 64\], wanted \[6, 64\]", {"N": 6}),
        ("k_201", r"A is \[2, 200\], wanted \[..., 201\]", {"K": 201}),
        ("k_257", r"A is \[2, 200\], wanted \[..., 257\]", {"K": 257}),
        ("a_a_number", r"A is \[\], wanted \[..., 200\]", {"A": np.zeros((), np.float32)}),
        ("a_transposed", r"A is \[200, 2\], wanted", {"A": a.T}),
        ("packed_flat", r"packed is \[320\], wanted \[5, 64\]", {"packed": packed.reshape(-1)}),
        ("packed_short", r"packed is \[5, 63\], wanted \[5, 64\]", {"packed": packed[:, :63]}),
        ("packed_empty", r"packed is \[0, 64\], wanted \[5, 64\]", {"packed": packed[:0]}),
        ("bits_6", "activation_bits is 6, wanted 8 or 4", {"activation_bits": 6}),
        ("bits_2", "attribute activation_bits is 2, wanted 8 or 4", {"activation_bits": 2}),
        ("scale_of_too_few_rows", r"scale is \[4\], wanted \[1\] or \[5\]", {"scale": np.ones(4, np.float32)}),
        ("scale_of_rows_and_columns", r"scale is \[5, 1\], wanted \[1\] or", {"scale": np.ones((5, 1), np.float32)}),
        ("scale_empty", r"scale is \[0\], wanted \[1\] or \[5\]", {"scale": np.ones(0, np.float32)}),
    ):
        yield Broken(changed(node, name, **changes), sentence)


def broken_silu_gate() -> Iterator[Broken]:
    node = gated(SiluGateCase("base", lead=(2,), n=32))
    yield from of_any_op(node)
    for name, sentence, changes in (
        ("a_odd", r"A is \[2, 31\], wanted an even last dimension", {"A": np.zeros((2, 31), np.float32)}),
        ("a_a_number", r"A is \[\], wanted an even last dimension", {"A": np.zeros((), np.float32)}),
    ):
        yield Broken(changed(node, name, **changes), sentence)


def broken_hadamard() -> Iterator[Broken]:
    node = transform(HadamardCase("base", lead=(2,), k=192, block=64))
    yield from of_any_op(node)
    for name, sentence, changes in (
        ("block_0", "attribute block is 0, wanted 1 to", {"block": 0}),
        ("block_negative", "attribute block is -64, wanted 1 to", {"block": -64}),
        ("block_huge", "attribute block is 4611686018427387904, wanted", {"block": 1 << 62}),
        ("block_48", "attribute block is 48, wanted a power of two", {"block": 48}),
        ("block_128", r"A is \[2, 192\], wanted its last dimension a multiple of 128", {"block": 128}),
        ("a_a_number", r"A is \[\], wanted its last dimension a multiple of 64", {"A": np.zeros((), np.float32)}),
        ("a_transposed", r"A is \[192, 2\], wanted", {"A": np.zeros((192, 2), np.float32)}),
    ):
        yield Broken(changed(node, name, **changes), sentence)


def broken_mamba() -> Iterator[Broken]:
    case = MambaCase("base", batch=2, before=2)  # x [2, 5, 8], width 4, 4 states
    for op in (causal_conv, selective_scan):
        node = mamba(op, case)
        x = {name: array for name, array in node.inputs.items() if array is not None}
        yield from of_any_op(node)
        bias, rows = ("bias", "weight") if op is causal_conv else ("dt_bias", "A")
        few, many = (2, 64) if op is causal_conv else (1, 256)
        state = 3 if op is causal_conv else 4
        mask, past, three_hundred = x["attention_mask"], x["past_state"], np.zeros((300, 8), np.float32)
        for name, sentence, changes in (
            ("x_flat", r"x is \[10, 8\], wanted \[any, any, any\]", {"x": x["x"].reshape(10, 8)}),
            ("no_channels", r"x is \[2, 5, 0\], wanted channels", {"x": x["x"][..., :0]}),
            (
                "mask_short",
                r"attention_mask is \[2, 4\], wanted a column for each of 5",
                {"attention_mask": x["attention_mask"][:, :4]},
            ),
            (
                "mask_of_one",
                r"attention_mask is \[1, 7\], wanted \[2, any\]",
                {"attention_mask": mask[:1]},
            ),
            ("bias_short", rf"{bias} is \[7\], wanted \[8\]", {bias: x[bias][:7]}),
            ("no_rows", rf"{rows} is \[0, 8\], wanted {few} to {many} rows", {rows: x[rows][:0]}),
            (
                "many_rows",
                rf"{rows} is \[300, 8\], wanted {few} to {many} rows",
                {rows: three_hundred},
            ),
            ("rows_narrow", rf"{rows} is \[4, 7\], wanted \[any, 8\]", {rows: x[rows][:, :7]}),
            (
                "past_short",
                rf"past_state is \[2, {state - 1}, 8\], wanted \[2, {state}, 8\]",
                {"past_state": past[:, 1:]},
            ),
        ):
            yield Broken(changed(node, name, **changes), sentence)
    for name, sentence, changes in (
        ("dt_steps", r"dt is \[2, 4, 8\], wanted \[2, 5, 8\]", {"dt": x["dt"][:, 1:]}),
        ("z_narrow", r"z is \[2, 5, 7\], wanted \[2, 5, 8\]", {"z": x["z"][..., 1:]}),
        ("b_states", r"B is \[2, 5, 3\], wanted \[2, 5, 4\]", {"B": x["B"][..., 1:]}),
        ("c_batch", r"C is \[1, 5, 4\], wanted \[2, 5, 4\]", {"C": x["C"][1:]}),
        ("d_short", r"D is \[7\], wanted \[8\]", {"D": x["D"][1:]}),
        ("half_z", None, {"z": x["z"].astype(np.float16)}),
    ):
        yield Broken(changed(node, name, **changes), sentence)


def broken_int4() -> Iterator[Broken]:
    node = int4(Int4Case("base", lead=(2,), k=200, n=21, symmetric=False))  # 7 groups, 2 tiles
    x = {name: array for name, array in node.inputs.items() if array is not None}
    yield from of_any_op(node)
    nine = np.full((1, 1, 1), 9, np.uint8)
    for name, sentence, changes in (
        ("k_0", "attribute K is 0, wanted 1 to", {"K": 0}),
        ("k_huge", "attribute K is 4611686018427387904, wanted", {"K": 1 << 62}),
        ("n_negative", "attribute N is -21, wanted 1 to", {"N": -21}),
        ("n_huge", r"codes is \[2, 7, 4, 16, 4\], wanted \[134217728, 7,", {"N": 1 << 31}),
        ("n_33", r"codes is \[2, 7, 4, 16, 4\], wanted \[3, 7, 4, 16, 4\]", {"N": 33}),
        ("group_0", "group_size is 0, wanted 32, 64 or 128", {"group_size": 0}),
        ("group_48", "group_size is 48, wanted 32, 64 or 128", {"group_size": 48}),
        ("group_64", r"codes is \[2, 7, 4, 16, 4\], wanted \[2, 4, 8, 16, 4\]", {"group_size": 64}),
        ("k_201", r"A is \[2, 200\], wanted \[..., 201\]", {"K": 201}),
        ("a_a_number", r"A is \[\], wanted \[..., 200\]", {"A": np.zeros((), np.float32)}),
        ("codes_flat", r"codes is \[3584\], wanted \[2, 7, 4, 16, 4\]", {"codes": x["codes"].reshape(-1)}),
        ("codes_empty", r"codes is \[0, 7, 4, 16, 4\], wanted", {"codes": x["codes"][:0]}),
        ("scales_short", r"scales is \[2, 6, 16\], wanted \[2, 7, 16\]", {"scales": x["scales"][:, :6]}),
        ("zeros_short", r"zeros is \[1, 7, 16\], wanted \[2, 7, 16\]", {"zeros": x["zeros"][:1]}),
        ("zeros_empty", r"zeros is \[0, 7, 16\], wanted \[2, 7, 16\]", {"zeros": x["zeros"][:0]}),
        ("zeros_of_9", "zeros is one 9, wanted one 8 or one of each group", {"zeros": nine}),
        ("zeros_flat", r"zeros is \[1\], wanted \[1, 1, 1\]", {"zeros": nine.reshape(1)}),
        ("factors", r"factor is \[21\], wanted \[1\]", {"factor": np.ones(21, np.float32)}),
        ("factor_empty", r"factor is \[0\], wanted \[1\]", {"factor": np.ones(0, np.float32)}),
    ):
        yield Broken(changed(node, name, **changes), sentence)


def broken_gather() -> Iterator[Broken]:
    for bits, middle in ((4, 8), (8, 128)):
        node = gather(Int4Case(f"base_{bits}", k=200, n=21, symmetric=False, bits=bits))
        yield from of_any_op(node)
        nine, ids = np.full((1, 1, 1), 9, np.uint8), np.full((2, 3), 21)
        yield Broken(changed(node, f"{bits}_zeros_of_9", zeros=nine), f"zeros is one 9, wanted one {middle} or one of")
        yield Broken(changed(node, f"{bits}_ids_beyond", ids=ids), "ids holds 21, wanted 0 to 20")


def broken_lowbit() -> Iterator[Broken]:
    case = LowBitCase("base", lead=(2,), k=200, n=21, bits=3, table=True)  # 7 groups, 2 tiles
    half = np.full((1, 1), 0.5, np.float16)
    for node in (lowbit(case), gather_rows(case)):
        x = {name: array for name, array in node.inputs.items() if array is not None}
        yield from of_any_op(node)
        for name, sentence, changes in (
            ("bits_0", "attribute bits is 0, wanted 1 to 6", {"bits": 0}),
            ("bits_4", r"codes is \[2, 7, 1, 3, 16, 4\], wanted \[2, 7, 1, 4, 16, 4\]", {"bits": 4}),
            ("group_64", r"codes is \[2, 7, 1, 3, 16, 4\], wanted \[2, 4, 2, 3, 16, 4\]", {"group_size": 64}),
            ("n_33", r"codes is \[2, 7, 1, 3, 16, 4\], wanted \[3, 7, 1, 3, 16, 4\]", {"N": 33}),
            ("scales_short", r"scales is \[2, 6, 16\], wanted \[2, 7, 16\]", {"scales": x["scales"][:, :6]}),
            ("rows_short", r"row_scales is \[1, 16\], wanted \[2, 16\]", {"row_scales": x["row_scales"][:1]}),
            ("rows_flat", r"row_scales is \[1\], wanted \[1, 1\]", {"row_scales": half.reshape(1)}),
            ("rows_of_half", "row_scales is one 0.5, wanted one 1 or one of each row", {"row_scales": half}),
            ("levels_short", r"levels is \[7\], wanted \[8\]", {"levels": x["levels"][:7]}),
            ("levels_of_9", "levels is one 9, wanted one 4 for integers", {"levels": np.full(1, 9, np.uint8)}),
            ("factors", r"factor is \[21\], wanted \[1\]", {"factor": np.ones(21, np.float32)}),
        ):
            yield Broken(changed(node, name, **changes), sentence)
    six = lowbit(replace(case, bits=6, table=False))
    yield Broken(changed(six, "levels_of_6_bits", levels=np.zeros(64, np.uint8)), r"levels is \[64\], wanted \[1\]")
    one = lowbit(replace(case, bits=1))
    yield Broken(changed(one, "level_of_1_bit", levels=np.ones(1, np.uint8)), r"levels is \[1\], wanted \[2\]")
    ids = gather_rows(case)
    yield Broken(changed(ids, "ids_beyond", ids=np.full((2, 3), 21)), "ids holds 21, wanted 0 to 20")


def broken_attention() -> Iterator[Broken]:
    case = AttentionCase("base", batch=2, past=4, beyond=2)
    node = attention(case)
    x = {name: array for name, array in node.inputs.items() if array is not None}
    yield from of_any_op(node, optional=("lambda",))

    def length(value: int) -> np.ndarray:
        return np.array([value])

    ceiling = "wanted 0 to 11, the capacity of past_key"
    for name, sentence, changes in (
        ("no_pairs", "num_heads is 0, wanted 1 to", {"num_heads": 0}),
        ("negative_heads", "num_kv_heads is -2, wanted 1 to", {"num_kv_heads": -2}),
        ("huge_heads", "num_heads is 4611686018427387904, wanted", {"num_heads": 1 << 62}),
        ("odd_kv_heads", "must be even with wide_value", {"num_kv_heads": 3}),
        ("uneven_groups", "wanted a multiple of the 2 kv heads", {"num_heads": 3, "num_kv_heads": 4}),
        ("wider", "wide_value is 2, wanted 0 to 1", {"wide_value": 2}),
        ("narrow", "num_heads is 2, wanted a multiple of the 4 kv heads", {"wide_value": 0, "num_kv_heads": 4}),
        ("query_flat", r"query is \[2, 160\], wanted \[any, any, any\]", {"query": x["query"].reshape(2, -1)}),
        ("query_narrow", r"query is \[2, 5, 24\], wanted \[2, 5, 32\]", {"query": x["query"][:, :, :24]}),
        ("key_steps", r"key is \[2, 4, 16\], wanted \[2, 5, any\]", {"key": x["key"][:, :4]}),
        ("key_odd", r"key is \[2, 5, 6\], wanted 2 sub-heads of an even number", {"key": x["key"][:, :, :6]}),
        ("key_empty", r"key is \[2, 5, 0\], wanted 2 sub-heads", {"key": x["key"][:, :, :0]}),
        ("value_narrow", r"value is \[2, 5, 8\], wanted \[2, 5, 16\]", {"value": x["value"][:, :, :8]}),
        ("lambda_short", r"lambda is \[1\], wanted \[2\]", {"lambda": x["lambda"][:1]}),
        ("past_heads", r"past_key is \[2, 1, 11, 8\], wanted \[2, 2, any, 8\]", {"past_key": x["past_key"][:, :1]}),
        ("past_uneven", r"past_value is \[2, 2, 9, 8\], wanted", {"past_value": x["past_value"][:, :, 2:]}),
        ("past_negative", f"past_length is -1, {ceiling}", {"past_length": length(-1)}),
        ("past_beyond", f"past_length is 12, {ceiling}", {"past_length": length(12)}),
        ("past_huge", f"past_length is 9223372036854775807, {ceiling}", {"past_length": length((1 << 63) - 1)}),
        ("past_least", f"past_length is -9223372036854775808, {ceiling}", {"past_length": length(-1 << 63)}),
        (
            "past_two",
            "past_length has 2 numbers, wanted one where",
            {"past_length": np.array([3, 4])},
        ),
        ("past_empty", r"past_length is \[0\], wanted \[2\]", {"past_length": np.array([], np.int64)}),
        ("mask_short", r"attention_mask is \[2, 9\], wanted \[2, 10\]", {"past_length": length(5)}),
        (
            "positions_beyond",
            r"position_ids holds \d+, wanted 0 to 11",
            {"position_ids": x["position_ids"] + (1 << 40)},
        ),
        ("positions_negative", "position_ids holds -", {"position_ids": x["position_ids"] - (1 << 40)}),
        ("no_tables", "position_ids holds 4, wanted 0 to -1", {"cos": x["cos"][:0], "sin": x["sin"][:0]}),
        ("sin_short", r"sin is \[3, 4\], wanted \[12, 4\]", {"sin": x["sin"][:3]}),
        ("zero_branches", "branches is 0, wanted 1 to 2", {"branches": 0}),
        ("three_branches", "branches is 3, wanted 1 to 2", {"branches": 3}),
        ("noise_of_some", "noise_ratio is 3, wanted a divisor of 2", {"noise_ratio": 3}),
        ("noise_of_one_branch", "noise_ratio is 2, wanted 1 where", {"noise_ratio": 2, "branches": 1, "wide_value": 0}),
        ("one_branch_wide", "wide_value is 1, wanted 0 where branches is 1", {"branches": 1}),
        ("no_lambda", "lambda is missing, wanted exactly where branches is 2", {"lambda": None}),
        ("key_bits_5", "key_bits is 5, wanted 16, 8, 4, 3 or 2", {"key_bits": 5}),
        ("key_bits_32", "key_bits is 32, wanted 16, 8, 4, 3 or 2", {"key_bits": 32}),
        ("value_bits_5", "value_bits is 5, wanted 16, 8, 4, 3 or 2", {"value_bits": 5}),
        ("value_bits_0", "value_bits is 0, wanted 16, 8, 4, 3 or 2", {"value_bits": 0}),
        ("query_bits_2", "query_bits is 2, wanted 0, 8 or 4", {"query_bits": 2}),
        ("query_bits_16", "query_bits is 16, wanted 0, 8 or 4", {"query_bits": 16}),
        ("query_bits_of_floats", "query_bits is 8, wanted 0 where key_bits is 16", {"query_bits": 8}),
        ("window_negative", "window is -1, wanted 0 to 1048576", {"window": -1}),
        ("window_huge", "window is 4611686018427387904, wanted 0 to 1048576", {"window": 1 << 62}),
        ("floats_as_8", "past_key is not int8, wanted where key_bits is 8", {"key_bits": 8}),
        ("floats_as_4", "past_value is not uint8, wanted where value_bits is 4", {"value_bits": 4}),
    ):
        yield Broken(changed(node, name, **changes), f"{sentence}")
    scales = tuple(Output(name, np.dtype(np.float16), 3) for name in ("present_key_scale", "present_value_scale"))
    yield Broken(
        replace(changed(node, "float_scales"), outputs=node.outputs + scales),
        "present_key_scale is given, wanted exactly where the cache is of at most 8 bits",
    )
    # A bound buffer of the wrong capacity is the caller's output: ONNX Runtime, or its stand-in, refuses it
    full = attention(replace(case, beyond=None), in_place=True)
    yield Broken(changed(full, "capacity_exceeded"), "present_key|shape")
    int8 = attention(replace(case, key_bits=8, value_bits=8))
    scale = int8.inputs["past_key_scale"]
    assert scale is not None
    for name, sentence, changes in (
        ("int8_no_scale", "past_key_scale is missing, wanted exactly", {"past_key_scale": None}),
        ("int8_no_value_scale", "past_value_scale is missing, wanted exactly", {"past_value_scale": None}),
        ("int8_scale_short", r"past_key_scale is \[2, 2, 10\], wanted", {"past_key_scale": scale[:, :, 1:]}),
        ("int8_float_scale", None, {"past_key_scale": scale.astype(np.float32)}),  # that of version 6
        ("int8_as_16", "past_key is not float, wanted where key_bits is 16", {"key_bits": 16}),
    ):
        yield Broken(changed(int8, name, **changes), sentence)
    one = AttentionCase("one", kv_heads=1, wide_value=False, branches=1)
    yield Broken(
        changed(attention(one), "lambda_of_one_branch", **{"lambda": np.zeros(2, np.float32)}),
        "lambda is given, wanted exactly where branches is 2",
    )


def broken_low_bit_cache() -> Iterator[Broken]:
    """DiffAttention over a cache of 4 bits: 32 of 70 tokens are codes, there is room for 64."""
    case = AttentionCase("base", batch=2, past=70, beyond=32, d=32, key_bits=4, value_bits=4)
    node = attention(case)
    x = {name: array for name, array in node.inputs.items() if array is not None}
    narrow = {name: x[name][..., : x[name].shape[-1] // 2] for name in ("query", "key", "value", "cos", "sin")}
    uneven = {"past_value": x["past_value"][:, :, 32:], "past_value_scale": x["past_value_scale"][:, :, 32:]}
    ceiling = "wanted 0 to 127, the capacity of past_key and its recent tokens"
    for name, sentence, changes in (
        ("d_16", "past_key holds 16 numbers a token, wanted a multiple of 32 where key_bits is 4", narrow),
        ("codes_short", r"past_key is \[2, 2, 64, 8\], wanted \[2, 2, any, 16\]", {"past_key": x["past_key"][..., :8]}),
        ("as_2_bits", r"past_key is \[2, 2, 64, 16\], wanted \[2, 2, any, 8\]", {"key_bits": 2}),
        (
            "codes_odd",
            "past_key has room for 63 tokens, wanted a multiple of 32",
            {"past_key": x["past_key"][:, :, 1:]},
        ),
        ("values_uneven", r"past_value is \[2, 2, 32, 16\], wanted \[2, 2, 64, 16\]", uneven),
        ("past_negative", f"past_length is -1, {ceiling}", {"past_length": np.array([-1])}),
        ("past_beyond", f"past_length is 128, {ceiling}", {"past_length": np.array([128])}),
        ("past_huge", f"past_length is 9223372036854775807, {ceiling}", {"past_length": np.array([(1 << 63) - 1])}),
        ("no_scales", "past_key_scale is missing, wanted exactly where", {"past_key_scale": None}),
        ("no_value_scales", "past_value_scale is missing, wanted exactly where", {"past_value_scale": None}),
        ("no_recent", "past_key_recent is missing, wanted exactly where", {"past_key_recent": None}),
        ("no_value_recent", "past_value_recent is missing, wanted exactly where", {"past_value_recent": None}),
        (
            "scales_short",
            r"past_key_scale is \[2, 2, 63\], wanted \[2, 2, 64\]",
            {"past_key_scale": x["past_key_scale"][:, :, 1:]},
        ),
        (
            "scales_of_blocks",  # those of version 5
            r"past_value_scale is \[2, 2, 2, 2, 32\], wanted \[2, 2, 64\]",
            {"past_value_scale": np.zeros((2, 2, 2, 2, 32), np.float16)},
        ),
        (
            "recent_short",
            r"past_key_recent is \[2, 2, 68, 32\], wanted \[2, 2, 69, 32\]",
            {"past_key_recent": x["past_key_recent"][:, :, 1:]},
        ),
        ("other_window", r"past_key_recent is \[2, 2, 69, 32\], wanted \[2, 2, 37, 32\]", {"window": 0}),
        ("other_first", r"past_key_recent is \[2, 2, 69, 32\], wanted \[2, 2, 65, 32\]", {"first": 0}),
        ("float_recent", None, {"past_key_recent": x["past_key_recent"].astype(np.float32)}),
        ("float_scales_low", None, {"past_key_scale": x["past_key_scale"].astype(np.float32)}),
    ):
        yield Broken(changed(node, f"int4_{name}", **changes), sentence)

    def without(node: Node, index: int, output: Output | None) -> tuple[Output | None, ...]:
        return (*node.outputs[:index], output, *node.outputs[index + 1 :])

    for index, name in ((3, "present_key_scale"), (5, "present_key_recent")):
        yield Broken(
            replace(changed(node, f"int4_no_{name}"), outputs=without(node, index, None)),
            f"{name} is missing, wanted where the cache is of less than 8 bits",
        )
    shared = attention(case, in_place=True)
    grids = shared.outputs[3]
    assert grids is not None
    yield Broken(
        replace(changed(shared, "int4_half_shared"), outputs=without(shared, 3, replace(grids, shared=None))),
        "past_key and .*past_key_scale must share their memory with the outputs both or neither",
    )
    rows = attention(replace(case, key_bits=8, value_bits=8))
    recent = Output("present_key_recent", np.dtype(np.float16), 4)
    yield Broken(
        replace(changed(rows, "int8_recent"), outputs=(*rows.outputs, recent)),
        "present_key_recent is given, wanted exactly where the cache is of less than 8 bits",
    )


def broken() -> Iterator[Broken]:
    """Every op's."""
    yield from broken_ternary()
    yield from broken_int4()
    yield from broken_gather()
    yield from broken_lowbit()
    yield from broken_hadamard()
    yield from broken_silu_gate()
    yield from broken_mamba()
    yield from broken_attention()
    yield from broken_low_bit_cache()
