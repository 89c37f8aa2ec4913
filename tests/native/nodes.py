"""The tables of cases as nodes: what each takes, and what its outputs must be. A new op joins in nodes()."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import ModuleType

import ml_dtypes
import numpy as np
import torch

from diffbit.ops import (
    causal_conv,
    diff_attention,
    float_matmul,
    gather_lowbit,
    gather_quantized,
    hadamard,
    int4_matmul,
    lowbit_matmul,
    selective_scan,
    silu_gate,
    ternary_matmul,
)

from ..ops.cases import (
    ATTENTION_CASES,
    CUDA_ATTENTION_CASES,
    HADAMARD_CASES,
    INT4_CASES,
    INT8_CASES,
    LOWBIT_CASES,
    LOWBIT_TABLE_CASES,
    MAMBA_CASES,
    SILU_GATE_CASES,
    TABLE_CASES,
    TERNARY_CASES,
    AttentionCase,
    HadamardCase,
    Int4Case,
    LowBitCase,
    MambaCase,
    SiluGateCase,
    TernaryCase,
    generator,
)
from ..ops.test_diff_attention import ROUNDING, exact, reference
from ..ops.test_mamba import check as check_mamba


@dataclass(frozen=True)
class Output:
    """An output of a node; `shared` is the input whose memory it takes, as present takes past's."""

    name: str
    dtype: np.dtype
    rank: int
    shared: str | None = None


@dataclass(frozen=True, repr=False)
class Node:
    """One run of one op. `check` raises where the outputs are not what they must be."""

    name: str
    op: str
    attributes: dict[str, int | float]
    inputs: dict[str, np.ndarray | None]  # in the op's order; None: omitted
    outputs: tuple[Output | None, ...]  # None: left out
    check: Callable[[list[np.ndarray]], None]
    constants: tuple[str, ...] = ()  # inputs that are weights

    def __repr__(self) -> str:
        return f"Node({self.name})"


def array(tensor: torch.Tensor) -> np.ndarray:
    """The same numbers for numpy, which has no bfloat16 of its own."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def bits(array: np.ndarray) -> bytes:
    """An array's bits, one NaN like the other: which of them comes out is the processor's affair."""
    if array.dtype.kind == "f" or array.dtype == ml_dtypes.bfloat16:
        array = np.where(np.isnan(array), np.nan, array).astype(array.dtype)
    return array.tobytes()


@dataclass(frozen=True)
class Equal:
    """A check for the same bits."""

    expected: tuple[np.ndarray, ...]

    def __call__(self, got: list[np.ndarray]) -> None:
        for a, b in zip(got, self.expected, strict=True):
            assert a.shape == b.shape, f"shape {a.shape}, wanted {b.shape}"
            assert a.dtype == b.dtype, f"{a.dtype}, wanted {b.dtype}"
            assert bits(a) == bits(b), f"other bits: {a.ravel()[:4]}..., wanted {b.ravel()[:4]}..."


def equal(*expected: np.ndarray) -> Equal:
    return Equal(expected)


def ternary(case: TernaryCase) -> Node:
    a, weight, scale = case.inputs()
    packed = ternary_matmul.pack(weight)
    return Node(
        f"ternary/{case.name}",
        ternary_matmul.OP.name,
        {"K": case.k, "N": case.n, "activation_bits": case.bits, "spec_version": ternary_matmul.OP.version},
        {"A": array(a), "packed": packed.numpy(), "scale": scale.numpy()},
        (Output("Y", array(a).dtype, a.dim()),),
        equal(array(ternary_matmul.reference(a, packed, scale, case.bits))),
        constants=("packed", "scale"),
    )


def transform(case: HadamardCase) -> Node:
    a = case.inputs()
    return Node(
        f"hadamard/{case.name}",
        hadamard.OP.name,
        {"block": case.block, "spec_version": hadamard.OP.version},
        {"A": array(a)},
        (Output("Y", array(a).dtype, a.dim()),),
        equal(array(hadamard.reference(a, case.block))),
    )


def gated(case: SiluGateCase) -> Node:
    a = case.inputs()
    expected = array(silu_gate.reference(a))

    def check(got: list[np.ndarray]) -> None:
        (y,) = got
        assert y.dtype == expected.dtype and y.shape == expected.shape
        # two units of the last place: those of the exponential and of the rounding
        few = 3 * {2: 2.0**-8 if a.dtype == torch.bfloat16 else 2.0**-11, 4: 2.0**-23}[a.element_size()]
        np.testing.assert_allclose(y.astype(np.float32), expected.astype(np.float32), rtol=few, atol=1e-7)

    attributes: dict[str, int | float] = {"spec_version": silu_gate.OP.version}
    outputs = (Output("Y", expected.dtype, a.dim()),)
    return Node(f"silu_gate/{case.name}", silu_gate.OP.name, attributes, {"A": array(a)}, outputs, check)


def int4(case: Int4Case) -> Node:
    """Int4MatMul, or Int8MatMul for a case of 8 bits."""
    a, *_, factor = case.inputs()
    packed = case.packed()
    inputs = {name: tensor.numpy() for name, tensor in packed._asdict().items()}
    return Node(
        f"int{case.bits}/{case.name}",
        case.op.OP.name,
        case.attributes(),
        {"A": array(a), **inputs, "factor": factor.numpy()},
        (Output("Y", array(a).dtype, a.dim()),),
        equal(array(int4_matmul.reference(a, packed, factor, case.n, case.group))),
        constants=(*inputs, "factor"),
    )


def gather(case: Int4Case) -> Node:
    """Rows of the table that a product reads."""
    packed, ids = case.packed(), torch.arange(2 * case.n).flip(0).view(2, -1) % case.n
    inputs = {name: tensor.numpy() for name, tensor in packed._asdict().items()}
    factor = torch.tensor([case.factor], dtype=case.dtype)
    return Node(
        f"gather/{case.name}",
        gather_quantized.OP.name,
        case.attributes() | {"bits": case.bits, "spec_version": gather_quantized.OP.version},
        {"ids": ids.numpy(), **inputs, "factor": array(factor)},
        (Output("Y", array(factor).dtype, 3),),
        equal(array(gather_quantized.reference(ids, packed, factor, case.n, case.k))),
        constants=(*inputs, "factor"),
    )


def lowbit(case: LowBitCase) -> Node:
    a, *_, factor = case.inputs()
    packed = case.packed()
    inputs = {name: tensor.numpy() for name, tensor in packed._asdict().items()}
    return Node(
        f"lowbit/{case.name}",
        lowbit_matmul.OP.name,
        case.attributes(),
        {"A": array(a), **inputs, "factor": factor.numpy()},
        (Output("Y", array(a).dtype, a.dim()),),
        equal(array(lowbit_matmul.reference(a, packed, factor, case.n, case.group))),
        constants=(*inputs, "factor"),
    )


def gather_rows(case: LowBitCase) -> Node:
    """Rows of the table that LowBitMatMul reads."""
    packed, ids = case.packed(), torch.arange(2 * case.n).flip(0).view(2, -1) % case.n
    inputs = {name: tensor.numpy() for name, tensor in packed._asdict().items()}
    factor = torch.tensor([case.factor], dtype=case.dtype)
    return Node(
        f"gather_lowbit/{case.name}",
        gather_lowbit.OP.name,
        case.attributes(),
        {"ids": ids.numpy(), **inputs, "factor": array(factor)},
        (Output("Y", array(factor).dtype, 3),),
        equal(array(gather_lowbit.reference(ids, packed, factor, case.n, case.k))),
        constants=(*inputs, "factor"),
    )


def product(name: str, rows: int, k: int, n: int, dtype: torch.dtype) -> Node:
    """FloatMatMul; tests/ops holds its order of sums."""
    g = generator(rows)
    a, weight = torch.randn(2, rows, k, generator=g).to(dtype), torch.randn(n, k, generator=g).to(dtype)
    expected = float_matmul.reference(a, weight).float().numpy()

    def check(got: list[np.ndarray]) -> None:
        assert got[0].shape == expected.shape
        np.testing.assert_allclose(
            got[0].astype(np.float32), expected, rtol=0, atol=0.01 * np.abs(expected).max(initial=1)
        )

    return Node(
        f"float/{name}",
        float_matmul.OP.name,
        {"spec_version": float_matmul.OP.version},
        {"A": array(a), "W": array(weight)},
        (Output("Y", array(a).dtype, 3),),
        check,
        constants=("W",),
    )


def mamba(op: ModuleType, case: MambaCase, in_place: bool = False, memory: bool = True) -> Node:
    """CausalConv or SelectiveScan. in_place: present_state lies where past_state does."""
    inputs = case.conv() if op is causal_conv else case.scan()
    names = [tensor.name for tensor in op.OP.outputs if memory or tensor.name != "memory"]

    def check(got: list[np.ndarray]) -> None:
        check_mamba(dict(zip(names, got, strict=True)), case, op)

    def output(name: str) -> Output | None:
        if name not in names:
            return None
        if name == "present_state":
            return Output(name, np.dtype(np.float32), 3, "past_state" if in_place else None)
        return Output(name, array(inputs["x"]).dtype, 3)

    parts = f"{'' if memory else '_no_memory'}{'_in_place' if in_place else ''}"
    return Node(
        f"{op.OP.name}/{case.name}{parts}",
        op.OP.name,
        {"spec_version": op.OP.version},
        {name: array(tensor) for name, tensor in inputs.items()},
        tuple(output(tensor.name) for tensor in op.OP.outputs),
        check,
        constants=tuple(name for name in ("weight", "bias", "A", "D", "dt_bias") if name in inputs),
    )


def attention(case: AttentionCase, in_place: bool = False, roundings: int = 1) -> Node:
    """`in_place`: present lies where past does, as in a session whose buffers have the whole context's capacity.

    `roundings` of an output's size are allowed beside twice the reference's error.
    """
    expected = [array(tensor) for tensor in reference(case)]
    names = [name for name in case.signature().outputs if name]
    oracle = exact(case)[0].numpy()

    def check(got: list[np.ndarray]) -> None:
        for name, a, b in zip(names[1:], got[1:], expected[1:], strict=True):
            slots = case.defined(name)  # others may hold anything
            assert a.shape == b.shape, f"{name}: shape {a.shape}, wanted {b.shape}"
            equal(b[:, :, slots])([a[:, :, slots]])
        assert got[0].shape == oracle.shape and got[0].dtype == expected[0].dtype
        if not oracle.size:
            return
        error, allowed = (np.abs(out.astype(np.float64) - oracle).max() for out in (got[0], expected[0]))
        rounding = roundings * ROUNDING[case.dtype] * max(1.0, np.abs(oracle).max())
        assert error <= 2 * allowed + rounding, f"error {error:.3g}, the reference's {allowed:.3g}"

    def output(name: str) -> Output:
        result, shared = expected[names.index(name)], in_place and name != "out"
        return Output(name, result.dtype, result.ndim, name.replace("present", "past") if shared else None)

    return Node(
        f"attention/{case.name}{'_in_place' if in_place else ''}",
        diff_attention.OP.name,
        case.attributes(),
        {name: None if tensor is None else array(tensor) for name, tensor in case.inputs().items()},
        tuple(output(name) if name else None for name in case.signature().outputs),
        check,
    )


def nodes(roundings: int = 1) -> Iterator[Node]:
    """Every case of every op that the library holds; roundings: of `attention`."""
    yield from map(ternary, TERNARY_CASES)
    yield from map(int4, INT4_CASES + INT8_CASES)
    for rows in (7, 49):  # zero points that no code has
        yield int4(Int4Case(f"far_{rows}", lead=(rows,), k=160, n=80, symmetric=False, fill="far"))
    yield from map(gather, TABLE_CASES)
    yield from map(lowbit, LOWBIT_CASES)
    yield from map(gather_rows, LOWBIT_TABLE_CASES)
    for dtype in (torch.float32, torch.float16):
        for rows, k, n in ((1, 64, 40), (3, 201, 33), (17, 77, 30)):
            yield product(f"{rows}x{k}x{n}_{str(dtype)[6:]}", rows, k, n, dtype)
    yield from map(transform, HADAMARD_CASES)
    yield from map(gated, SILU_GATE_CASES)
    for lead in ((0,), (2, 0)):
        yield ternary(TernaryCase(f"empty_{len(lead)}", lead=lead))
        yield int4(Int4Case(f"empty_{len(lead)}", lead=lead))
        yield lowbit(LowBitCase(f"empty_{len(lead)}", lead=lead))
        yield transform(HadamardCase(f"empty_{len(lead)}", lead=lead))
        yield gated(SiluGateCase(f"empty_{len(lead)}", lead=lead))
    for case in MAMBA_CASES:
        for in_place in (False, True):
            yield mamba(causal_conv, case, in_place)
            yield mamba(selective_scan, case, in_place, memory=in_place)
    for name, batch, steps in (("no_steps", 2, 0), ("no_batch", 0, 3)):
        for op in (causal_conv, selective_scan):
            yield mamba(op, MambaCase(name, batch=batch, steps=steps, before=2))
    for case in ATTENTION_CASES:
        yield attention(case, roundings=roundings)
    yield from (attention(case, True, roundings) for case in ATTENTION_CASES if case.beyond is not None)
    nothing = AttentionCase("no_steps", steps=0, past=3, beyond=2)
    yield from map(attention, (nothing, replace(nothing, name="no_batch", batch=0, steps=2)))
    reads = attention(AttentionCase("no_rows", batch=0, query_only=True))
    yield replace(reads, inputs=reads.inputs | {"past_length": np.zeros(0, np.int64)})


def bfloat16_nodes() -> Iterator[Node]:
    """What only a GPU has entries for: every op in bfloat16, and caches of it."""
    bf16 = torch.bfloat16
    yield ternary(TernaryCase("bf16", lead=(3,), k=200, n=5, dtype=bf16))
    for bits in (4, 8):
        yield int4(Int4Case(f"bf16_{bits}", lead=(3,), k=200, n=21, symmetric=False, dtype=bf16, bits=bits))
        yield gather(Int4Case(f"bf16_{bits}", k=200, n=21, symmetric=False, dtype=bf16, bits=bits))
    yield lowbit(LowBitCase("bf16", lead=(3,), k=200, n=21, dtype=bf16))
    yield gather_rows(LowBitCase("bf16", k=200, n=21, dtype=bf16))
    yield product("bf16", 3, 200, 21, bf16)
    for op in (causal_conv, selective_scan):
        yield mamba(op, MambaCase("bf16", batch=2, steps=11, before=1, channels=70, padding=(2,), dtype=bf16))
    yield gated(SiluGateCase("bf16", n=70, dtype=bf16))
    for block in (64, 8192):  # in one kernel, in several
        yield transform(HadamardCase(f"bf16_{block}", lead=(2,), k=3 * block, block=block, dtype=bf16))
    yield from (attention(case) for case in CUDA_ATTENTION_CASES if bf16 in (case.dtype, case.cache))


def one_of_each() -> list[Node]:
    """A small node of every op, with room for mistakes."""
    cache = AttentionCase("small", batch=2, steps=3, past=4, beyond=2, heads=4, kv_heads=4)
    return [
        ternary(TernaryCase("small", lead=(2,), k=200, n=5)),
        ternary(TernaryCase("small_int4", lead=(2,), k=200, n=5, bits=4)),
        transform(HadamardCase("small", lead=(2,), k=192, block=64)),
        gated(SiluGateCase("small", lead=(2,), n=33)),
        int4(Int4Case("small", lead=(2,), k=200, n=21, symmetric=False)),
        int4(Int4Case("small_int8", lead=(2,), k=200, n=21, symmetric=False, bits=8)),
        gather(Int4Case("small", k=200, n=21, symmetric=False)),
        lowbit(LowBitCase("small", lead=(2,), k=200, n=21, bits=3, table=True)),
        gather_rows(LowBitCase("small", k=200, n=21, bits=5)),
        product("small", 2, 200, 21, torch.float16),
        mamba(causal_conv, MambaCase("small", batch=2, before=2, channels=20)),
        mamba(selective_scan, MambaCase("small", batch=2, before=2, channels=20)),
        attention(cache),
        attention(replace(cache, name="small_int8", key_bits=8, value_bits=8)),
        attention(replace(cache, name="small_int4", past=35, d=32, key_bits=4, value_bits=2, query_bits=8, window=0)),
    ]


def large() -> Iterator[Node]:
    """Nodes large enough that threads meet: too slow for an emulator."""
    yield ternary(TernaryCase("large", lead=(64,), k=1024, n=1000))
    yield ternary(TernaryCase("large_int4", lead=(64,), k=1024, n=1000, bits=4))
    yield transform(HadamardCase("large", lead=(64,), k=3072, block=1024))
    yield transform(HadamardCase("large_fp16", lead=(64,), k=3072, block=1024, dtype=torch.float16))
    yield gated(SiluGateCase("large", lead=(64,), n=3000))
    yield int4(Int4Case("large", lead=(64,), k=1024, n=1000))
    yield int4(Int4Case("large_int8", lead=(64,), k=1024, n=1000, bits=8, row_scale=True))
    yield gather(Int4Case("large", k=1024, n=1000, bits=8))
    yield lowbit(LowBitCase("large", lead=(64,), k=1024, n=1000, bits=3))
    yield lowbit(LowBitCase("large_row", lead=(1,), k=1024, n=1000, bits=4, table=True))
    yield gather_rows(LowBitCase("large", k=1024, n=1000, bits=6))
    yield product("large", 64, 1024, 1000, torch.float16)
    for op in (causal_conv, selective_scan):
        for steps in (1, 70):
            yield mamba(op, MambaCase(f"large_{steps}", batch=2, steps=steps, before=3, channels=3000, states=16), True)
    yield attention(AttentionCase("large", steps=70, past=400, beyond=9, heads=8, kv_heads=4, d=32))
    yield attention(
        AttentionCase("large_decode", steps=1, past=1500, beyond=9, heads=8, kv_heads=4, d=32), in_place=True
    )
    grids = AttentionCase(
        "large_int4", steps=70, past=400, beyond=9, heads=8, kv_heads=4, d=32, key_bits=4, value_bits=4
    )
    yield attention(grids, in_place=True)
    yield attention(replace(grids, name="large_int4_decode", steps=1, past=1503, query_bits=8), in_place=True)
