"""Trellis codes: the encoder against every sequence of a small ring, the library against torch, and errors against
scalar levels'."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diffbit import load
from diffbit.formats import QuantLinear, parse_format, trellis
from diffbit.io.errors import DiffbitError
from diffbit.ops import trellis as codes
from diffbit.quantize import Scheme, quantize_checkpoint
from diffbit.quantize.calibration import CalibStats, scales
from diffbit.quantize.methods import find
from diffbit.runtime import native

NAMES = [f"tcq{bits}_g{size}_s8" for bits, size in ((2, 32), (3, 64), (4, 32), (5, 128), (6, 32))]


def weight(rows: int = 128, columns: int = 96, seed: int = 0) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def cost(indices: Tensor, targets: Tensor, weights: Tensor, code: trellis.Trellis) -> Tensor:
    levels = torch.tensor(codes.levels_of(code.upper), dtype=torch.float64)
    return ((levels[indices.long()] - targets).square() * weights).sum(0)


@pytest.mark.parametrize("bits", trellis.TRELLISES)
def test_codes_are_the_inverse_of_indices(bits: int) -> None:
    """For any codes, whatever an encoder finds."""
    masks = trellis.TRELLISES[bits].masks
    some = torch.randint(2**bits, (192, 5), generator=torch.Generator().manual_seed(bits), dtype=torch.uint8)
    table = torch.tensor(codes.map_of(masks), dtype=torch.uint8)
    found = codes.indices(some, table, bits)
    assert int(found.max()) < 2 ** codes.index_bits(bits)
    assert torch.equal(codes.codes_of(found, masks, bits), some)


@pytest.mark.parametrize("bits", trellis.TRELLISES)
def test_no_change_of_few_codes_comes_nearer(bits: int) -> None:
    """Any change of one or two codes in a ring makes the error no less, which is weighed by row."""
    code, generator = trellis.TRELLISES[bits], torch.Generator().manual_seed(bits)
    scale = 1 / code.unit if code.unit else 40.0
    targets = torch.randn(64, 1, generator=generator) * scale
    weights = torch.rand(64, 1, generator=generator) + 0.1
    found = trellis.nearest(targets, weights, bits, code)
    best = float(cost(found, targets, weights, code))
    start, table = codes.codes_of(found, code.masks, bits), torch.tensor(codes.map_of(code.masks), dtype=torch.uint8)
    one = [(row, c) for row in range(64) for c in range(2**bits) if bits < 5 or c % 5 == 0]
    two = torch.randint(len(one), (4000, 2), generator=generator).tolist()
    tried = start.repeat(1, len(one) + len(two))
    for column, (row, c) in enumerate(one):
        tried[row, column] = c
    for column, pair in enumerate(two, len(one)):
        for row, c in (one[pair[0]], one[pair[1]]):
            tried[row, column] = c
    changed = cost(codes.indices(tried, table, bits), targets, weights, code)
    assert float(changed.min()) >= best * (1 - 1e-6)


@pytest.mark.skipif(native.library() is None, reason="needs the native library")
@pytest.mark.parametrize("bits", trellis.TRELLISES)
def test_the_library_is_as_near_as_torch(bits: int) -> None:
    code, generator = trellis.TRELLISES[bits], torch.Generator().manual_seed(9)
    scale = 1 / code.unit if code.unit else 40.0
    targets = torch.randn(128, 40, generator=generator) * scale
    targets[5] *= 30  # an outlier row
    targets[:, 7] = 0
    weights = torch.rand(128, 40, generator=generator)
    ours, slow = (f(targets, weights, bits, code) for f in (trellis.nearest, trellis.viterbi))
    torch.testing.assert_close(
        cost(ours, targets, weights, code), cost(slow, targets, weights, code), rtol=1e-5, atol=0
    )
    assert (ours == slow).double().mean() > 0.98  # where they differ, both are as near


@pytest.mark.parametrize(("bits", "share"), [(2, 0.75), (3, 0.75), (4, 0.83), (5, 0.78), (6, 0.86)])
@pytest.mark.parametrize("outliers", [False, True])
def test_errors_are_less_than_those_of_scalar_levels(bits: int, share: float, outliers: bool) -> None:
    w = weight(192, 256, bits)
    if outliers:
        w[:, ::37] *= 6
        w[3] *= 20
    errors = {}
    for name in (f"tcq{bits}_g32_s8", f"{'nl' if bits < 5 else 'int'}{bits}_g32_s8"):
        format = parse_format(name)
        q = format.nearest(w, *scales.search(w, format))
        errors[name] = float(((q.dequantize() - w) / w.square().mean(1, keepdim=True).sqrt()).square().mean())
    ours, scalar = errors.values()
    assert ours < (share + 0.12 * outliers) * scalar


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("columns", [96, 201, 7])
def test_packing_and_special_weights(name: str, columns: int) -> None:
    format = parse_format(name)
    w = weight(128, columns, columns)
    w[1] = 0
    w[2] *= 1e-20
    w[3, 0] = 1e4
    q = format.nearest(w, *format.fit(w))
    again = format.unpack(format.pack(q.codes), columns)
    assert torch.equal(again, q.codes)
    back = q.dequantize()
    assert back.isfinite().all() and (back[1] == 0).all()


@pytest.mark.parametrize("name", ["tcq3_g32_s8", "tcq4_g32_s8"])
def test_gptq_lessens_the_error_of_outputs(name: str) -> None:
    format, w = parse_format(name), weight(128, 128, 3)
    x = weight(4096, 128, 4) @ (torch.eye(128) + 0.3 * weight(128, 128, 5))
    stats = CalibStats(x.T @ x / len(x), x.abs().amax(0), x.abs().mean(0), len(x))
    lost = {}
    for method, read in (("rtn", None), ("gptq", stats)):
        q = find(method).rounds(w, format, read)
        assert torch.equal(format.unpack(format.pack(q.codes), 128), q.codes)
        lost[method] = float(((q.dequantize() - w) @ x.T).square().mean())
    assert lost["gptq"] < 0.6 * lost["rtn"]


def test_threads_that_begin_at_once() -> None:
    w = weight(64, 512)
    for seed in range(20):
        trellis.tables.cache_clear()
        format = parse_format(NAMES[seed % len(NAMES)])
        indices = format.encode(w, *format.fit(w))
        assert int(indices.max()) < len(format.levels)


def test_sentences() -> None:
    for name, words in (
        ("tcq1_g32_s8", "has 1 bits, wanted 2 to 6"),
        ("tcq4_g16_s8", "has groups of 16, wanted one of 32, 64, 128"),
    ):
        with pytest.raises(DiffbitError, match=words):
            parse_format(name)
    format = parse_format("tcq4_g32_s8")
    with pytest.raises(DiffbitError, match="out_features must be a multiple of 64"):
        format.nearest(weight(96), *format.fit(weight(128)))


def test_a_checkpoint_whose_rows_are_in_another_order(trained: Callable[[str], Path], tmp_path: Path) -> None:
    """Folders of differential models store the rows of queries, keys and values in their family's order."""
    format = parse_format("tcq5_g32_s8")
    source, low = load(trained("diff_v1")).state_dict(), tmp_path / "low"
    quantize_checkpoint(trained("diff_v1"), low, Scheme(weights=format), method="rtn")
    linears = {name: layer.weight for name, layer in load(low).named_modules() if isinstance(layer, QuantLinear)}
    assert len(linears) >= 14
    for name, weight in linears.items():
        exact = source[f"{name}.weight"]
        assert float((weight.dequantize(torch.float32) - exact).norm() / exact.norm()) < 0.05
