"""The numbers of a low-bit KV cache, each rule against a loop over single numbers."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch

from diffbit.ops import diff_attention_reference, hadamard, kv_cache


def random(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def test_tokens_leave_the_window_in_blocks() -> None:
    for window in (0, 1, 20, 31, 32, 33, 64):
        before = 0
        for total in range(300):
            count = kv_cache.quantized_tokens(total, window)
            assert count % 32 == 0 and count in (before, before + 32)
            assert total - count >= min(total, window) and total - count < window + 32
            before = count


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_packing_is_the_layout_bit_by_bit(bits: int) -> None:
    codes = torch.randint(2**bits, (2, 3, 96), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    packed = kv_cache.pack(codes, bits)
    assert packed.shape == (2, 3, 96 * bits // 8) and packed.dtype == torch.uint8
    planes = {4: [(0, 4)], 3: [(0, 2), (2, 1)], 2: [(0, 2)]}[bits]  # lowest bit, width
    for b, t, channel in np.ndindex(2, 3, 96):
        group, place = divmod(channel, 32)
        for low, width in planes:
            byte = int(packed[b, t, group * 4 * bits + 4 * low + place % (4 * width)])
            shift = place // (4 * width) * width
            assert byte >> shift & (1 << width) - 1 == int(codes[b, t, channel]) >> low & (1 << width) - 1
    assert torch.equal(kv_cache.unpack(packed, bits), codes)


@pytest.mark.parametrize("bits", [8, 4])
def test_rows_are_rounded_one_number_at_a_time(bits: int) -> None:
    x, top = random(5, 20), np.float32(2 ** (bits - 1) - 1)
    x[1] = 0
    codes, steps = kv_cache.quantize_rows(x, bits)
    assert codes.dtype == torch.int8 and steps.dtype == torch.float32
    for i, row in enumerate(x.numpy()):
        step = max(abs(value) for value in row) / top
        assert steps[i] == step
        assert codes[i].tolist() == [int(np.rint(value / step)) if step else 0 for value in row]
    assert codes.abs().max() == top and not codes[1].any() and steps[1] == 0


def test_ties_go_to_the_even_code() -> None:
    codes, steps = kv_cache.quantize_rows(torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5]]))
    assert steps.tolist() == [1.0] and codes.tolist() == [[127, 0, 2, 2, 0, -2, -2]]


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_has_scale_nan_and_no_other(odd: float) -> None:
    x = random(64, 64)
    x[40, 5] = odd
    codes, steps = kv_cache.quantize_rows(x)
    assert steps.isnan().nonzero().tolist() == [[40]] and not codes[40].any()
    for bits in (8, *kv_cache.LEVELS):
        assert kv_cache.encode_rows(x, bits)[1].isnan().nonzero().tolist() == [[40]]


def test_rows_of_8_bits_one_number_at_a_time() -> None:
    """Codes follow the scale in float16; one that float16 cannot hold is NaN."""
    x = random(50, 20)
    x[1], x[2], x[3], x[4] = 0, x[2] * 1e-5, x[3] * 1e-7, x[4] * 1e8
    codes, scales = kv_cache.encode_rows(x, 8)
    assert codes.dtype == torch.int8 and scales.dtype == torch.float16
    assert scales[4].isnan() and not codes[4].any() and not scales[:4].isnan().any()
    for i, row in enumerate(x.numpy()):
        step = np.float32(np.float16(np.abs(row).max() / np.float32(127)))
        if i != 4:
            assert scales[i] == step
            wanted = [max(-127, min(127, int(np.rint(value / step)))) if step else 0 for value in row]
            assert codes[i].tolist() == wanted
    errors = (codes.float() * scales.float()[:, None] - x)[5:].abs().amax(-1)
    assert (errors <= scales[5:].float() * (0.5 + 127 * 2**-11)).all()


def share(a: float, b: float) -> float:
    """How much of a normal distribution lies between two points."""
    return (math.erf(b / math.sqrt(2)) - math.erf(a / math.sqrt(2))) / 2


def centre(a: float, b: float) -> float:
    """The mean of what lies there."""
    return (math.exp(-a * a / 2) - math.exp(-b * b / 2)) / math.sqrt(2 * math.pi) / share(a, b)


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_levels_and_thresholds_are_those_of_least_error(bits: int) -> None:
    """Lloyd's algorithm: a level is the mean of what is rounded to it, a threshold lies halfway between two levels."""
    thresholds = [*np.linspace(-2, 2, 2**bits - 1)]
    for _ in range(3000):
        ends = [-40.0, *thresholds, 40.0]
        levels = [centre(a, b) for a, b in itertools.pairwise(ends)]
        thresholds = [(a + b) / 2 for a, b in itertools.pairwise(levels)]
    np.testing.assert_allclose(kv_cache.THRESHOLDS[bits], thresholds, atol=1e-3)
    np.testing.assert_allclose(kv_cache.LEVELS[bits], np.array(levels) / levels[-1] * 127, atol=0.55)
    assert kv_cache.LEVELS[bits][-1] == 127


@pytest.mark.parametrize("d", [32, 96, 128])
def test_rotation_is_the_matrix_and_its_own_inverse(d: int) -> None:
    block = d & -d
    signs = [[(-1) ** (i & j & block - 1).bit_count() * (i // block == j // block) for j in range(d)] for i in range(d)]
    x = random(7, d)
    expected = x.double() @ torch.tensor(signs, dtype=torch.float64) / math.sqrt(block)
    torch.testing.assert_close(kv_cache.rotate(x).double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(kv_cache.rotate(kv_cache.rotate(x)), x, rtol=0, atol=1e-5)
    assert torch.equal(kv_cache.rotate(x), hadamard.reference(x, block))


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_rows_of_levels_one_number_at_a_time(bits: int) -> None:
    """Codes against thresholds in exact arithmetic, where it decides; scales against least squares in float64."""
    x = random(50, 96, seed=bits)
    x[1] = 0
    x[2, 4:] = 0
    x[3] *= 1e-4
    codes, scales = kv_cache.encode_rows(x, bits)
    assert codes.dtype == torch.uint8 and scales.dtype == torch.float16 and scales[1] == 0
    numbers, units = kv_cache.quantize_rows(x)
    for row in range(len(x)):
        energy = max(1, sum(int(n) ** 2 for n in numbers[row]))
        for n, code in zip(numbers[row].tolist(), codes[row].tolist(), strict=True):
            z = n * math.sqrt(96 / energy)
            assert all(abs(z - t) < 1e-5 or (z > t) == (i < code) for i, t in enumerate(kv_cache.THRESHOLDS[bits]))
        levels = [kv_cache.LEVELS[bits][code] for code in codes[row]]
        dot = sum(int(n) * level for n, level in zip(numbers[row], levels, strict=True))
        expected = float(units[row]) * dot / sum(level**2 for level in levels)
        assert abs(float(scales[row]) - expected) <= expected * 2**-11 + 2**-25


def error(x: torch.Tensor, bits: int, offset: torch.Tensor | float = 0.0) -> float:
    """The relative mean square error of rows, rotated and rounded to float16 as a cache has them."""
    rows = kv_cache.rotate(x).half().float()
    codes, scales = kv_cache.encode_rows(rows - offset, bits)
    read = kv_cache.levels_of(codes, bits) * scales.float()[:, None] + offset
    return float((read - rows).square().sum() / rows.square().sum())


@pytest.mark.parametrize(("bits", "least"), [(4, 0.0095), (3, 0.0345), (2, 0.1175)])
def test_normal_rows_have_the_error_of_the_best_quantizer(bits: int, least: float) -> None:
    """Its error: J. Max, Quantizing for minimum distortion, 1960, table I. A scale of its own makes a row's smaller."""
    assert 0.96 * least < error(random(4000, 128), bits) < least
    outlier = random(4000, 128)
    outlier[:, 7] *= 20
    assert error(outlier, bits) < least


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_the_offset_takes_what_all_keys_share(bits: int) -> None:
    keys = random(400, 64, scale=1.0)
    plain = error(keys, bits)
    keys[:, 9] += 30
    offset = kv_cache.offset_of(kv_cache.rotate(keys).half()).float()
    moved = keys.square().sum() / random(400, 64, scale=1.0).square().sum()
    assert error(keys, bits, offset) * float(moved) < 1.25 * plain < 0.2 * error(keys, bits) * float(moved)


def test_the_offset_is_the_mean_of_tokens_16_to_31() -> None:
    rows = random(2, 40, 32).half()
    expected = rows[:, 16:32].double().mean(1)
    offset = kv_cache.offset_of(rows)
    assert offset.shape == (2, 32) and offset.dtype == torch.float16
    torch.testing.assert_close(offset.double(), expected, rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize("bits", [8, 4])
def test_scores_of_rows_are_integer_products(bits: int) -> None:
    query, keys = random(5, 40, seed=1), random(7, 40, seed=2)
    codes, steps = kv_cache.quantize_rows(keys)
    got = kv_cache.row_scores(query, codes, steps, bits)
    rounded, unit = kv_cache.quantize_rows(query, bits)
    for s, t in np.ndindex(5, 7):
        dot = sum(int(a) * int(b) for a, b in zip(rounded[s], codes[t], strict=True))
        assert got[s, t] == np.float32(dot) * unit[s].numpy() * steps[t].numpy()
    exact = query @ keys.T
    assert (got - exact).norm() < {8: 0.02, 4: 0.2}[bits] * exact.norm()


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_a_cache_does_not_depend_on_how_a_prompt_is_split(bits: int) -> None:
    """Bit for bit, from the first block to the last; the offset is that of the first block for ever."""
    rows, window, first = random(1, 2, 150, 32, seed=bits) + 2, 20, 9
    buffers = (torch.zeros(1, 2, 160, 4 * bits, dtype=torch.uint8), torch.zeros(1, 2, 160, dtype=torch.float16))

    def stored(sizes: list[int]) -> tuple[torch.Tensor, ...]:
        presents, done = (*buffers, torch.zeros(1, 2, first + 1 + window + 32, 32, dtype=torch.float16)), 0
        for size in sizes:
            part = rows[:, :, done : done + size]
            presents = diff_attention_reference.append(part, *presents, done, bits, window, first, True).presents
            done += size
        codes, scales, recent = presents
        quantized = kv_cache.quantized_tokens(done, window)
        return codes[:, :, :quantized], scales[:, :, :quantized], recent[:, :, : first + 1 + done - quantized]

    whole = stored([150])
    for sizes in ([1] * 150, [5, 3, 40, 1, 90, 11], [51, 99], [52, 98], [149, 1]):
        for got, expected in zip(stored(sizes), whole, strict=True):
            assert torch.equal(got, expected)
    rotated = kv_cache.rotate(rows).half()
    assert torch.equal(whole[2][:, :, :first], rotated[:, :, :first])
    assert torch.equal(whole[2][:, :, first], kv_cache.offset_of(rotated))
    assert torch.equal(whole[2][:, :, first + 1 :], rotated[:, :, 128:])
