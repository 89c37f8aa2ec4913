"""MXFP4 against the standard, a number at a time, and the layout of transformers' gpt-oss checkpoints."""

from __future__ import annotations

import math

import pytest
import torch

from diffbit.formats import Format, QTensor, parse_format
from diffbit.formats.mx import VALUES
from diffbit.io.errors import DiffbitError

MX = parse_format("mxfp4")


def by_range(weight: torch.Tensor, format: Format) -> QTensor:
    """Round to nearest with the scales of the range."""
    return format.nearest(weight, *format.fit(weight))


def weight(rows: int = 8, columns: int = 256, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def nearest(value: float) -> int:
    """The E2M1 code of a number, halfway to the even one (OCP MX v1.0, section 5.3.3)."""
    code = min(range(8), key=lambda i: (abs(abs(value) - VALUES[i]), i % 2))
    return code + 8 if value < 0 and code else code


def standard(block: list[float]) -> tuple[float, list[int]]:
    """The standard's scale (section 6.3) and the codes under it."""
    scale = 2.0 ** (math.floor(math.log2(max(map(abs, block)))) - 2)
    return scale, [nearest(value / scale) for value in block]


def value(code: int) -> float:
    return -VALUES[code - 8] if code > 7 else VALUES[code]


def test_a_block_has_the_better_of_two_scales() -> None:
    w = weight()
    rounded = by_range(w, MX)
    doubled = 0
    for row, codes, scales in zip(w, rounded.codes, rounded.scale, strict=True):
        for g, block in enumerate(row.split(32)):
            values = block.tolist()
            scale, _ = standard(values)
            errors = {}
            for candidate in (scale, 2 * scale):
                errors[candidate] = sum((value(nearest(x / candidate)) * candidate - x) ** 2 for x in values)
            best = min(errors, key=errors.__getitem__)
            assert scales[g].item() == best
            assert codes[32 * g : 32 * g + 32].tolist() == [nearest(x / best) for x in values]
            doubled += best != scale
    assert 0 < doubled < rounded.scale.numel()


def test_every_scale_comes_back_from_its_byte() -> None:
    stored = torch.arange(255, dtype=torch.uint8)
    scale = MX.read_scale(stored)
    assert scale.tolist() == [2.0 ** (s - 127) for s in range(255)]
    assert torch.equal(MX.write_scale(scale), stored) and torch.equal(MX.stored(scale), scale)
    between = torch.tensor([1.49, 1.51, 0.76, 0.74, 2.9, 3e38, 1e-45])
    assert MX.stored(between).tolist() == [1, 2, 1, 0.5, 2, 2**127, 2**-127]


@pytest.mark.parametrize("scale", [2.0**-120, 2.0**-3, 1.0, 2.0**120])
def test_what_is_mxfp4_already_comes_back_exactly(scale: float) -> None:
    codes = torch.randint(0, 16, (16, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    codes[:, 32:64] %= 4  # blocks whose largest number is small
    codes[0, :32] = 0
    exact = MX.decode(codes, torch.full((16, 4), scale), None)
    rounded = by_range(exact, MX)
    assert torch.equal(rounded.dequantize(), exact)
    assert torch.equal(QTensor.from_packed(MX, (16, 128), **rounded.parts()).dequantize(), exact)


def test_the_layout_is_that_of_gpt_oss() -> None:
    """transformers' convert_moe_packed_tensors reads our codes and scales as the same numbers."""
    mxfp4 = pytest.importorskip("transformers.integrations.mxfp4")
    rounded = by_range(weight(), MX)
    parts = rounded.parts()
    blocks, scales = parts["codes"].view(1, 8, 8, 16), parts["scale"].view(1, 8, 8)
    theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(theirs[0].T, rounded.dequantize())


def test_refused() -> None:
    with pytest.raises(DiffbitError, match="multiple of 32"):
        by_range(weight(2, 40), MX)
    parts = by_range(weight(2, 64), MX).parts()
    with pytest.raises(DiffbitError, match="scale of 255"):
        QTensor.from_packed(MX, (2, 64), parts["codes"], torch.full((2, 2), 255, dtype=torch.uint8))
    with pytest.raises(DiffbitError, match="wanted uint8"):
        QTensor.from_packed(MX, (2, 64), parts["codes"], torch.ones(2, 2))
