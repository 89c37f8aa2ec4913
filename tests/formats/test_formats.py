"""Formats and rounding by the range against a slow version in plain Python, bitsandbytes and transformers."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from diffbit.formats import Format, IntFormat, QTensor, base, choose_format, names, parse_format
from diffbit.formats.codebook import NF4
from diffbit.formats.integer import all_formats
from diffbit.io.errors import DiffbitError

INTS = [
    "int8", "int8_g64_asym", "int6_g32", "int5_g16_asym", "int4_g32", "int4_g128_asym", "int4", "int3_g64", "int2_g16",
]  # fmt: skip
NOT_OFFERED = [format.name for format in all_formats() if format.better is not None]
ALL = [*INTS, "nf4", "mxfp4", "nvfp4", "ternary"]


def by_range(weight: torch.Tensor, format: Format) -> QTensor:
    """Round to nearest with the scales of the range."""
    return format.nearest(weight, *format.fit(weight))


def weight(rows: int = 12, columns: int = 192, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def half(x: float) -> float:
    return float(np.float16(np.float32(x)))


def slow_int(row: list[float], bits: int, group: int, symmetric: bool) -> tuple[list[int], list[float], list[int]]:
    """One row, one group after the other, as the docstring of formats.py says it."""
    codes, scales, zeros = [], [], []
    for start in range(0, len(row), group or len(row)):
        values = row[start : start + (group or len(row))]
        top = 2**bits - 1
        if symmetric:
            largest = max(values, key=lambda w: (abs(w), -w))
            scale, zero = half(largest / -(2 ** (bits - 1))), 2 ** (bits - 1)
        else:
            low, high = min(*values, 0.0), max(*values, 0.0)
            scale = half((high - low) / top)
            zero = min(max(round(-low / scale), 0), top)
        scales.append(scale)
        zeros.append(zero)
        codes += [min(max(round(float(np.float32(w) / np.float32(scale))) + zero, 0), top) for w in values]
    return codes, scales, zeros


@pytest.mark.parametrize("name", INTS)
@pytest.mark.parametrize("columns", [192, 200, 7])
def test_rounding_by_the_range_matches_a_slow_version(name, columns):
    format = parse_format(name)
    w = weight(5, columns)
    quantized = by_range(w, format)
    for index, row in enumerate(w.tolist()):
        codes, scales, zeros = slow_int(row, format.bits, format.group_size, format.symmetric)
        assert quantized.codes[index].tolist() == codes
        assert quantized.scale[index].tolist() == scales
        if not format.symmetric:
            assert quantized.zero is not None and quantized.zero[index].tolist() == zeros
        group = format.group_size or columns
        values = [scales[k // group] * (code - zeros[k // group]) for k, code in enumerate(codes)]
        torch.testing.assert_close(quantized.dequantize()[index], torch.tensor(values), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", INTS)
@pytest.mark.parametrize("factor", [1.0, 1e-3, 1e3])
def test_error_is_at_most_half_a_step(name, factor):
    """Inside the range; the end that the range does not reach may lose one step more (fp16 rounding of it included)."""
    format = parse_format(name)
    w = weight() * factor
    quantized = by_range(w, format)
    group = format.group_size or w.shape[1]
    zeros = torch.full_like(quantized.scale, 2 ** (format.bits - 1)) if quantized.zero is None else quantized.zero
    scale, zero = (part.repeat_interleave(group, 1)[:, : w.shape[1]] for part in (quantized.scale, zeros))
    step = scale.abs()
    place = w / scale + zero
    inside = (place >= 0) & (place <= 2**format.bits - 1)
    error = (w - quantized.dequantize()).abs()
    assert inside.float().mean() > 0.75
    assert (error[inside] <= step[inside] * 0.50001).all()
    assert (error <= step * (1 + 2**format.bits / 2**11)).all()


@pytest.mark.parametrize("name", [name for name in INTS if "asym" not in name])
def test_the_largest_weight_of_a_group_survives(name):
    format = parse_format(name)
    w = weight().half().float()
    quantized = by_range(w, format)
    largest = format.grouped(w).abs().amax(-1)
    kept = format.grouped(quantized.dequantize()).abs().amax(-1)
    torch.testing.assert_close(kept, largest, rtol=2**-11, atol=0)


def test_more_bits_err_less():
    w = weight(64, 256)
    for group in ("", "_g128", "_g32", "_g32_asym"):
        errors = [(w - by_range(w, parse_format(f"int{bits}{group}")).dequantize()).norm() for bits in range(2, 9)]
        assert all(later < 0.65 * earlier for earlier, later in pairwise(errors))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_blocks_of_rows_make_no_difference(name, dtype, monkeypatch):
    """Every dtype is rounded as its fp32 values are, whatever the number of rows handled at a time."""
    w = weight(9).to(dtype)
    whole = by_range(w.float(), parse_format(name))
    monkeypatch.setattr(base, "BLOCK", 2 * 192)
    pieces = by_range(w, parse_format(name))
    assert torch.equal(whole.codes, pieces.codes)
    assert torch.equal(whole.scale, pieces.scale)
    assert torch.equal(whole.dequantize(), pieces.dequantize())


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.sampled_from([*names(), *NOT_OFFERED]), st.integers(1, 5), st.integers(1, 5), st.integers(0, 63))
def test_packed_comes_back(name, rows, blocks, rest):
    format = parse_format(name)
    columns, rows = 64 * blocks + (0 if format.whole_groups else rest), rows * format.rows_together
    quantized = by_range(weight(rows, columns, seed=rest), format)
    parts = quantized.parts()
    again = QTensor.from_packed(format, (rows, columns), **parts)
    assert torch.equal(again.codes, quantized.codes) and torch.equal(again.scale, quantized.scale)
    assert torch.equal(again.dequantize(), quantized.dequantize())
    assert quantized.nbytes == sum(part.nbytes for part in parts.values())


@pytest.mark.parametrize("name", [*ALL, "fp4", "nl2_g32_s8", "nl4_g32_s8", "int3_g32_s8"])
def test_values_are_those_of_the_nearest_codes(name):
    """A search may take the other one of two values that are about as near."""
    format = parse_format(name)
    place = torch.randn(40, 3, 64, generator=torch.Generator().manual_seed(0)) * format.codes * format.spacing / 4
    zero = None if format.symmetric else (torch.arange(120).view(40, 3, 1) % format.codes).to(torch.uint8)
    one = torch.ones(40, 3, 1)
    value, expected = (
        format.values_each(place, zero),
        format.decode_each(format.encode_each(place, one, zero), one, zero),
    )
    torch.testing.assert_close((value - place).abs(), (expected - place).abs(), rtol=0, atol=1e-3)
    assert set(value.flatten().tolist()) <= set(expected.flatten().tolist())


def test_bits_per_weight():
    expected = {
        "int4_g32": 4.5,
        "int4_g128": 4.125,
        "int4_g32_asym": 4.625,
        "nf4": 4.5,
        "mxfp4": 4.25,
        "nvfp4": 4.5 + 32 / (8 * 1024),
        "int3_g64": 3.25,
    }
    for name, bits in expected.items():
        assert by_range(weight(8, 1024), parse_format(name)).bits_per_weight == pytest.approx(bits)
    assert by_range(weight(64, 1024), parse_format("ternary")).bits_per_weight == pytest.approx(2, abs=1e-3)


@pytest.mark.parametrize("name", ALL)
def test_zeros_and_extremes(name):
    format = parse_format(name)
    w = weight(4, 192)
    w[0] = 0
    w[1, :64] = 0
    w[2] = 1e-12 * w[2]  # scales far below fp16's smallest number
    w[3, 5] = 3e4  # one huge value
    quantized = by_range(w, format)
    back = quantized.dequantize()
    assert back.isfinite().all()
    assert (back[0] == 0).all() or name == "ternary"
    assert (back[1, :64] == 0).all() or name == "ternary" or not format.group_size or format.group_size > 64
    if name != "ternary":
        assert back[2].abs().max() <= 2**-24
        assert back[3, 5] == pytest.approx(3e4, rel=0.15 if name in ("mxfp4", "nvfp4") else 1e-3)


@pytest.mark.parametrize("name", INTS)
def test_scales_below_fp16_keep_what_they_can(name):
    """The smallest fp16 is 6e-8: a group whose scale would be smaller is rounded to multiples of that."""
    w = weight(2, 128).sign() * 1e-7
    format = parse_format(name)
    quantized = by_range(w, format)
    assert ((quantized.scale.abs() >= 2**-24) & (quantized.scale.half().float() == quantized.scale)).all()
    assert (w - quantized.dequantize()).abs().max() <= 2**-24


@pytest.mark.parametrize("name", INTS)
def test_a_scale_too_large_for_fp16_is_refused(name):
    w = weight(2, 128)
    w[0, 0] = 3e38
    with pytest.raises(DiffbitError, match="65504"):
        by_range(w, parse_format(name))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_and_infinity_are_refused(name, bad):
    w = weight(2, 128)
    w[1, 77] = bad
    with pytest.raises(DiffbitError, match="NaN or infinity"):
        by_range(w, parse_format(name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["normal", "uniform", "ties", "tiny", "zeros"])
def test_nf4_is_bitsandbytes(dtype, kind):
    functional = pytest.importorskip("bitsandbytes.functional")
    w = weight(48, 256, seed=3)
    if kind == "uniform":
        w = torch.rand(48, 256, generator=torch.Generator().manual_seed(1)) * 2 - 1
    elif kind == "ties":  # on the borders between codes
        table = torch.tensor(NF4)
        w = ((table[:-1] + table[1:]) / 2).repeat(48, 18)[:, :256].contiguous()
        w[:, ::64] = 1
    elif kind == "tiny":
        w = w * 1e-38
    elif kind == "zeros":
        w[:, :128] = 0
    w = w.to(dtype)
    packed, state = functional.quantize_4bit(w, quant_type="nf4", blocksize=64)
    quantized = by_range(w, parse_format("nf4"))
    assert torch.equal(quantized.packed().flatten(), packed.flatten())
    assert torch.equal(quantized.scale.flatten(), state.absmax)
    if dtype == torch.float32:
        assert torch.equal(quantized.dequantize(), functional.dequantize_4bit(packed, state))


def test_nf4_refuses_other_widths():
    with pytest.raises(DiffbitError, match=r"multiple of 64; use int4_g32"):
        by_range(weight(2, 100), parse_format("nf4"))


def test_ternary_is_absmean():
    """transformers' own fake quantization of BitNet, and the packing of its checkpoints."""
    bitnet = pytest.importorskip("transformers.integrations.bitnet")
    w = weight(32, 200, seed=5) * 0.02
    quantized = by_range(w, parse_format("ternary"))
    with torch.compiler.set_stance("force_eager"):  # compiled for AVX2 it was seen to compute something else
        expected = bitnet.WeightQuant.apply(w)
        theirs = bitnet.unpack_weights(bitnet.pack_weights(quantized.codes.float() - 1), dtype=torch.float32)
    torch.testing.assert_close(quantized.dequantize(), expected, rtol=1e-6, atol=1e-9)
    assert quantized.scale.item() == pytest.approx(w.abs().mean().item(), rel=1e-6)
    assert torch.equal(theirs, quantized.codes.float() - 1)
    assert by_range(torch.zeros(2, 8), parse_format("ternary")).scale.item() == pytest.approx(1e-5)


def test_ternary_file_with_a_fourth_code_is_refused():
    packed = torch.full((1, 32), 0xFF, dtype=torch.uint8)
    with pytest.raises(DiffbitError, match="code of 3"):
        QTensor.from_packed(parse_format("ternary"), (1, 128), packed, torch.ones(1, 1))


@pytest.mark.parametrize("name", [*ALL, "int2", "int8_g256_asym", "int7_g16"])
def test_names_come_back(name):
    assert parse_format(name).name == name == str(parse_format(name))
    assert parse_format(name) == parse_format(name)


@pytest.mark.parametrize(
    "name, words",
    [
        ("int9", "9 bits"),
        ("int1_g32", "1 bits"),
        ("int4_g33", "groups of 33"),
        ("int4_g0", "groups of 0"),
        ("int4_g512", "groups of 512"),
        ("int" + 5000 * "4", "not a number format"),
        ("nl4_g" + 5000 * "3" + "_s8", "not a number format"),
        ("int4_32", "not a number format"),
        ("INT4", "not a number format"),
        ("int4_asym_g32", "not a number format"),
        ("fp6", "not a number format"),
        ("", "not a number format"),
    ],
)
def test_unknown_formats_are_refused(name, words):
    with pytest.raises(DiffbitError, match=words):
        parse_format(name)


@pytest.mark.parametrize("name", [name for name in names() if isinstance(parse_format(name), IntFormat)])
def test_offered_integers_are_stored_in_their_bits(name):
    format = choose_format(name)
    assert format == parse_format(name) and format.device_bits == format.bits


@pytest.mark.parametrize("name", NOT_OFFERED)
def test_refused_format_names_its_replacement(name):
    better, bits = parse_format(name).better, parse_format(name).bits
    assert better is not None and better.name in names() and better.bits == {7: 8}.get(bits, bits)
    with pytest.raises(DiffbitError, match=f"^{name} is only read .*; use {better}$"):
        choose_format(name)


@pytest.mark.parametrize(("name", "bits"), [("int7", 8), ("int3", 4), ("int5_g16", 8), ("int4_g32", 4), ("int8", 8)])
def test_a_wider_format_warns(name, bits):
    warning = parse_format(name).warning()
    if bits == parse_format(name).bits:
        assert warning is None
    else:
        assert warning is not None and f"{name} has codes" in warning and f"{bits} bits a code on a device" in warning


def test_wrong_parts_are_refused():
    format = parse_format("int4_g32")
    good = by_range(weight(4, 64), format)
    with pytest.raises(DiffbitError, match="scale"):
        QTensor(format, (4, 64), good.codes, good.scale[:, :1])
    with pytest.raises(DiffbitError, match="zero points"):
        QTensor(format, (4, 64), good.codes, good.scale, good.codes[:, :2])
    with pytest.raises(DiffbitError, match="nothing as zero"):
        QTensor(parse_format("int4_g32_asym"), (4, 64), good.codes, good.scale)
    with pytest.raises(DiffbitError, match="packed codes"):
        QTensor.from_packed(format, (4, 64), good.packed()[:, :-1], good.scale)
    with pytest.raises(DiffbitError, match="shape"):
        by_range(torch.ones(3), format)


def test_a_stack_holds_the_rows_of_its_parts():
    for name in ALL:
        parts = [by_range(weight() * scale, parse_format(name)) for scale in (1, 0.1, 7)]
        stack = QTensor.stack(parts)
        assert torch.equal(stack.dequantize(), torch.cat([part.dequantize() for part in parts]))
        assert torch.equal(stack.rows(slice(3, 30)).dequantize(), stack.dequantize()[3:30])


def test_rows_are_a_view_of_the_whole():
    for name in ALL:
        quantized = by_range(weight(), parse_format(name))
        assert torch.equal(quantized.rows(slice(3, 8)).dequantize(), quantized.dequantize()[3:8])
