"""The numbers of a low-bit KV cache, each rule against a loop over single numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from diffbit.ops import kv_cache


def random(*shape: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def grid(numbers: list[np.float32], bits: int) -> tuple[np.float16, np.float16, list[int]]:
    """step, point and codes of numbers that share a grid, one at a time in float32."""
    numbers = [np.float32(np.float16(x)) for x in numbers]
    point, top = min(numbers), np.float32(2**bits - 1)
    step = np.float16((max(numbers) - point) / top)
    codes = [int(np.rint((x - point) / np.float32(step))) if step else 0 for x in numbers]
    return step, np.float16(point), [min(max(code, 0), 2**bits - 1) for code in codes]


def test_settled_tokens_come_in_groups_and_leave_a_window() -> None:
    for window in (0, 1, 20, 31, 32, 33, 64):
        before = 0
        for total in range(300):
            count = kv_cache.quantized_tokens(total, window)
            assert count % 32 == 0 and count in (before, before + 32)
            assert total - count >= min(total, window) and total - count < window + 32
            before = count


@pytest.mark.parametrize("bits", [4, 2])
def test_packing_is_the_layout_bit_by_bit(bits: int) -> None:
    codes = torch.randint(2**bits, (2, 3, 96), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    packed = kv_cache.pack(codes, bits)
    assert packed.shape == (2, 3, 96 * bits // 8) and packed.dtype == torch.uint8
    for b, t, channel in np.ndindex(2, 3, 96):
        group, place = divmod(channel, 32)
        byte = int(packed[b, t, group * 4 * bits + place % (4 * bits)])
        shift = place // (4 * bits) * bits
        assert [byte >> shift + bit & 1 for bit in range(bits)] == [
            int(codes[b, t, channel]) >> bit & 1 for bit in range(bits)
        ]
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
    x = torch.zeros(32, 1)
    x[:6, 0] = torch.tensor([0.0, 15.0, 0.5, 1.5, 2.5, 13.5])
    codes, grids = kv_cache.quantize_blocks(x, 4)
    assert grids[0, :, 0].tolist() == [1.0, 0.0] and codes[:6, 0].tolist() == [0, 15, 0, 2, 2, 14]


@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_a_row_or_grid_without_a_finite_step_is_nan_and_no_other(odd: float) -> None:
    x = random(64, 64)
    x[40, 5] = odd
    codes, steps = kv_cache.quantize_rows(x)
    assert steps.isnan().nonzero().tolist() == [[40]] and not codes[40].any()
    codes, grids = kv_cache.quantize_blocks(x, 4)
    assert grids.isnan().nonzero().tolist() == [[1, 0, 5], [1, 1, 5]] and not codes[32:, 5].any()
    assert kv_cache.dequantize_blocks(codes, grids).isnan().nonzero().tolist() == [[t, 5] for t in range(32, 64)]


def test_what_float16_cannot_hold_has_no_grid() -> None:
    x = random(32, 32)
    x[3, 4], x[5, 6] = 65519.0, 65520.0  # the last rounds to infinity
    grids = kv_cache.quantize_blocks(x, 4)[1]
    assert grids.isnan().any(0).any(0).nonzero().tolist() == [[6]]


@pytest.mark.parametrize("bits", [4, 2])
def test_grids_of_32_tokens(bits: int) -> None:
    x = random(2, 64, 96, seed=bits)
    x[0, :32, 3] = 0.1  # equal numbers: no step, and the point is the number as float16 has it
    x[1, 32:64, 7] = 0
    x[1, 40:44, 7] = 6e-8  # their step is less than the smallest of float16
    codes, grids = kv_cache.quantize_blocks(x, bits)
    numbers = kv_cache.dequantize_blocks(codes, grids)
    assert codes.dtype == torch.uint8 and grids.dtype == torch.float16 and numbers.dtype == torch.float32
    assert grids.shape == (2, 2, 2, 96)
    for b, n, c in np.ndindex(2, 2, 96):
        place = (b, slice(32 * n, 32 * n + 32), c)
        step, point, expected = grid(list(x[place].numpy()), bits)
        assert grids[b, n, :, c].tolist() == [step, point]
        assert codes[place].tolist() == expected
        assert numbers[place].tolist() == [
            float(np.float32(code) * np.float32(step) + np.float32(point)) for code in expected
        ]
    # half a step from the float16 number, and what the step itself lost when it was rounded
    error = (numbers - x.half().float()).abs()
    spread = grids[:, :, 0].float().repeat_interleave(32, 1)
    assert (error <= spread * (0.5 + 2**bits * 2.0**-10) + 1e-6).all()
    assert (numbers[0, :32, 3] == torch.tensor(0.1).half()).all()


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


@pytest.mark.parametrize("key_bits", [4, 2])
@pytest.mark.parametrize("bits", [8, 4])
def test_scores_of_grids_are_integer_products(bits: int, key_bits: int) -> None:
    query, keys = random(3, 32, seed=1), random(64, 32, seed=2)
    codes, grids = kv_cache.quantize_blocks(keys, key_bits)
    got, wide = (kv_cache.block_scores(q, codes, grids, bits, key_bits) for q in (query, query.double()))
    assert got.dtype == torch.float32 and wide.dtype == torch.float64
    for s, t in np.ndindex(3, 64):
        step, point = grids[t // 32].float()
        rounded, unit = kv_cache.quantize_rows(query[s] * step, bits)
        dot = sum(int(a) * int(b) for a, b in zip(rounded, codes[t], strict=True))
        expected = dot * float(unit) + sum(float(a) * float(b) for a, b in zip(query[s], point, strict=True))
        expected += (
            (2**key_bits - 1)
            / 2
            * sum(float(a) - int(b) * float(unit) for a, b in zip(query[s] * step, rounded, strict=True))
        )
        assert abs(wide[s, t] - expected) < 1e-10 and abs(got[s, t] - expected) < 1e-4
    exact = query @ kv_cache.dequantize_blocks(codes, grids).T
    assert (got - exact).norm() < {8: 0.01, 4: 0.15}[bits] * exact.norm()  # twice that without the grids' middles
