"""Formats with scales of 8 bits against a slow version in plain Python, and their errors against the integers'."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diffbit.formats import Format, QTensor, parse_format
from diffbit.formats.lowbit import LEVELS
from diffbit.io.errors import DiffbitError
from diffbit.quantize.calibration import scales

NAMES = [
    "int2_g32_s8", "int3_g64_s8", "int4_g32_s8", "int5_g128_s8", "int6_g32_s8",
    "nl2_g32_s8", "nl3_g64_s8", "nl4_g32_s8",
]  # fmt: skip


def by_range(weight: torch.Tensor, format: Format) -> QTensor:
    """Round to nearest with the scales of the range."""
    return format.nearest(weight, *format.fit(weight))


def weight(rows: int = 12, columns: int = 192, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def slow(row: list[float], name: str) -> tuple[list[int], list[float], list[float]]:
    """Codes, group scales and weights of one row, as the docstring of lowbit.py says it."""
    bits, size = int(name[name.index("_") - 1]), int(name.split("_")[1][1:])
    values = LEVELS[bits] if name.startswith("nl") else range(-(2 ** (bits - 1)), 2 ** (bits - 1))
    groups = [row[start : start + size] for start in range(0, len(row), size)]
    fitted = [np.float32(max(group, key=lambda w: (abs(w), -w))) / np.float32(values[0]) for group in groups]
    largest = max(map(abs, fitted))
    row_scale = float(np.float16(largest / np.float32(127) * np.float32(128))) / 128
    codes, scales, weights = [], [], []
    for group, scale in zip(groups, fitted, strict=True):
        step = 127 if abs(scale) == largest else min(max(round(abs(float(scale)) / row_scale), 1), 127)
        scales.append(float(np.float32(step * row_scale * np.sign(scale))))
        for w in group:
            place = float(np.float32(w) / np.float32(scales[-1]))
            codes.append(min(range(len(values)), key=lambda code, place=place: abs(values[code] - place)))
            weights.append(values[codes[-1]] * scales[-1])
    return codes, scales, weights


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [192, 200, 7])
@pytest.mark.parametrize("seed", [0, 1])
def test_rounding_is_the_slow_version(name, columns, seed):
    w = weight(5, columns, seed)
    w[1, :5] *= 40
    w[2] *= 1e-3
    quantized = by_range(w, parse_format(name))
    for index, row in enumerate(w.tolist()):
        codes, scales, weights = slow(row, name)
        assert quantized.codes[index].tolist() == codes
        assert quantized.scale[index].tolist() == scales
        torch.testing.assert_close(quantized.dequantize()[index], torch.tensor(weights), rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NAMES)
def test_stored_scales_stay_as_they_are(name):
    """Also of rows that are all zeros, have fp16's smallest scales, or one group that is far larger."""
    format = parse_format(name)
    w = weight()
    w[0], w[1, 32:] = 0, 0
    w[2], w[3], w[4] = w[2] * 1e-7, w[3] * 3e-6, w[4] * 1e-12
    w[5, :9] *= 1e4
    quantized = by_range(w, format)
    assert torch.equal(format.stored(quantized.scale), quantized.scale)
    parts = quantized.parts()
    assert parts["scale"].dtype == torch.int8
    assert torch.equal(format.read_scale(parts["scale"]), quantized.scale)
    assert quantized.dequantize().isfinite().all() and (quantized.dequantize()[0] == 0).all()


def test_mixed_candidates_change_a_row_by_less_than_a_step():
    format = parse_format("int4_g32_s8")
    scale, _ = format.fit(weight())
    mixed = torch.where(torch.rand(scale.shape, generator=torch.Generator().manual_seed(0)) < 0.5, scale, -0.7 * scale)
    stored = format.stored(mixed)
    assert ((stored - mixed).abs() <= mixed.abs().amax(1, keepdim=True) / 127 * 0.51).all()


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("nl")])
def test_every_number_gets_its_nearest_level(name):
    format = parse_format(name)
    levels = torch.tensor(LEVELS[format.bits]).double()
    numbers = torch.arange(-140, 140, 0.125)[None]
    codes = format.encode_each(numbers, torch.ones(1, 1), None)
    distance = (levels[codes.long()] - numbers.double()).abs()
    assert torch.equal(distance, (levels[:, None] - numbers.double()).abs().amin(0, keepdim=True))


@pytest.mark.parametrize("bits, less", [(2, 0.94), (3, 0.92), (4, 0.86)])
@pytest.mark.parametrize("tails", [torch.distributions.Normal(0.0, 1.0), torch.distributions.StudentT(6.0)])
def test_levels_have_a_smaller_error_than_integers_of_the_same_size(bits, less, tails):
    torch.manual_seed(0)
    w = tails.sample((128, 256))
    errors = []
    for kind in ("int", "nl"):
        format = parse_format(f"{kind}{bits}_g32_s8")
        scale, zero = scales.search(w, format)
        errors.append((format.nearest(w, format.stored(scale), zero).dequantize() - w).square().mean())
    assert errors[1] < less * errors[0]


@pytest.mark.parametrize("name", NAMES)
def test_small_weights_lose_no_more_than_large_ones(name):
    """Those of a model with wide layers are about 0.01: fp16 has less precision below 6e-5."""
    w, format = weight(64, 256), parse_format(name)
    large, small = (
        float((by_range(w * size, format).dequantize() / size - w).square().mean()) for size in (1.0, 0.004)
    )
    assert small == pytest.approx(large, rel=0.01)


@pytest.mark.parametrize("name, bits", [("nl4_g32_s8", 4.25), ("int5_g64_s8", 5.125), ("int2_g128_s8", 2.0625)])
def test_bytes_are_what_the_name_says(name, bits):
    shape, format = (64, 1024), parse_format(name)
    expected = 64 * 1024 * bits / 8 + 2 * 64
    assert format.nbytes(shape) == format.device_nbytes(shape, 4) == expected
    assert sum(part.nbytes for part in by_range(weight(*shape), format).parts().values()) == expected


@pytest.mark.parametrize(
    "name, words",
    [
        ("nl5_g32_s8", "5 bits, wanted 2 to 4"),
        ("int7_g32_s8", "7 bits, wanted 2 to 6"),
        ("int4_g16_s8", "groups of 16"),
    ],
)
def test_formats_that_no_operator_has_are_refused(name, words):
    with pytest.raises(DiffbitError, match=words):
        parse_format(name)


def test_damaged_scales_are_refused():
    format = parse_format("nl4_g32_s8")
    parts = by_range(weight(4, 64), format).parts()
    with pytest.raises(DiffbitError, match="float32 scales, wanted int8"):
        QTensor.from_packed(format, (4, 64), parts["codes"], parts["scale"].float())
    parts["scale"][1, :2] = torch.tensor([0, 0x7C], dtype=torch.int8)  # infinity
    with pytest.raises(DiffbitError, match="not finite"):
        QTensor.from_packed(format, (4, 64), **parts)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_beyond_the_levels_get_the_outermost_code(name):
    format = parse_format(name)
    scale = torch.ones(1, 1)
    levels = format.decode_each(torch.arange(format.codes)[None], scale, None)[0]
    far = torch.tensor([[-1e30, 1e30, -torch.inf, torch.inf, torch.nan]])
    codes = format.encode_each(far, scale, None)[0]
    assert codes.to(torch.uint8).max() < format.codes
    assert levels[codes[:4].long()].tolist() == [levels.min(), levels.max()] * 2


def test_a_weight_of_nan_is_refused():
    w = weight()
    w[3, 7] = torch.nan
    for name in NAMES:
        with pytest.raises(DiffbitError, match="holds NaN or infinity"):
            by_range(w, parse_format(name))
