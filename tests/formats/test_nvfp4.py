"""NVFP4 against compressed-tensors and the formula of E4M3, a number at a time."""

from __future__ import annotations

import pytest
import torch

from diffbit.formats import Format, QTensor, parse_format
from diffbit.formats.mx import VALUES
from diffbit.io.errors import DiffbitError

NV = parse_format("nvfp4")


def by_range(weight: torch.Tensor, format: Format = NV) -> QTensor:
    """Round to nearest with the scales of the range."""
    return format.nearest(weight, *format.fit(weight))


def weight(rows: int = 8, columns: int = 64, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.03


def e4m3(byte: int) -> float:
    """The number of a byte without a sign: four bits of exponent, three behind the point."""
    exponent, behind = byte >> 3, byte & 7
    return behind * 2.0**-9 if exponent == 0 else (8 + behind) * 2.0 ** (exponent - 10)


def test_every_number_is_that_of_its_bytes() -> None:
    rounded = by_range(weight())
    parts = rounded.parts()
    whole = parts["tensor_scale"].item()
    assert 224 < rounded.scale.max().item() / whole <= 448 and torch.frexp(parts["tensor_scale"])[0] == 0.5
    back = rounded.dequantize()
    for row in range(8):
        for column in range(64):
            byte = int(parts["codes"][row, column // 2])
            code = byte >> 4 if column % 2 else byte & 15
            scale = e4m3(int(parts["scale"][row, column // 16])) * whole
            assert back[row, column].item() == VALUES[code & 7] * scale * (-1 if code > 7 else 1)


def test_a_scale_is_the_nearest_of_e4m3() -> None:
    w = weight()
    rounded = by_range(w)
    whole = rounded.parts()["tensor_scale"].item()
    known = [e4m3(byte) * whole for byte in range(1, 127)]
    exact = w.view(8, 4, 16).abs().amax(-1) / 6
    for scale, wanted in zip(rounded.scale.flatten().tolist(), exact.flatten().tolist(), strict=True):
        assert scale == min(known, key=lambda one: abs(one - wanted))


def test_rows_are_rounded_as_the_whole_weight_is() -> None:
    """Although they have another largest scale: methods round some rows at a time."""
    w = weight(16)
    w[8:] *= 0.01
    whole, below = by_range(w), by_range(w[8:])
    assert torch.equal(whole.rows(slice(8, 16)).codes, below.codes)
    assert torch.equal(whole.scale[8:], below.scale)


def test_compressed_tensors_reads_it_as_the_same_numbers() -> None:
    helpers = pytest.importorskip("compressed_tensors.compressors.nvfp4.helpers")
    rounded = by_range(weight())
    parts = rounded.parts()
    codes = helpers.unpack_fp4_from_uint8(parts["codes"], 8, 64, dtype=torch.float32)
    scale = parts["scale"].view(torch.float8_e4m3fn).float() / (1 / parts["tensor_scale"])
    assert torch.equal(codes * scale.repeat_interleave(16, 1), rounded.dequantize())


@pytest.mark.parametrize("whole", [0.00031, 1.0, 17.3])
def test_another_tensor_scale_is_kept(whole: float) -> None:
    """Of a weight, of some of its rows, and of several that are stacked."""
    generator = torch.Generator().manual_seed(4)
    parts = {
        "codes": torch.randint(0, 256, (8, 32), dtype=torch.uint8, generator=generator),
        "scale": torch.randint(0, 127, (8, 4), dtype=torch.uint8, generator=generator),
        "tensor_scale": torch.tensor([[whole]]),
    }
    read = QTensor.from_packed(NV, (8, 64), **parts)
    for name, part in read.parts().items():
        assert torch.equal(part, parts[name])
    assert torch.equal(read.rows(slice(2, 5)).parts()["scale"], parts["scale"][2:5])
    both = QTensor.stack([read, by_range(weight())])
    assert torch.equal(NV.write_scale(both.relative_scale())[:8], parts["scale"])
    assert torch.equal(NV.write_scale(both.rows(slice(8, 16)).relative_scale()), by_range(weight()).parts()["scale"])


def test_refused() -> None:
    with pytest.raises(DiffbitError, match="multiple of 16"):
        by_range(weight(2, 40))
    parts = by_range(weight(2, 64)).parts()
    for byte in (127, 200):
        with pytest.raises(DiffbitError, match=f"byte is {byte}"):
            QTensor.from_packed(NV, (2, 64), **parts | {"scale": torch.full((2, 4), byte, dtype=torch.uint8)})
    for whole in (torch.zeros(1, 1), torch.ones(2, 1), torch.full((1, 1), torch.nan)):
        with pytest.raises(DiffbitError, match="tensor_scale"):
            QTensor.from_packed(NV, (2, 64), **parts | {"tensor_scale": whole})
