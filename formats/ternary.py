"""Ternary weights: scale * (code - 1), codes 0, 1 and 2, one scale per tensor (b1.58, arXiv 2402.17764).

    scale = max(mean|W|, 1e-5)          absmean, eq. 1-3

Weights that are ternary already, of a single magnitude beside 0, keep it as their scale.

Checkpoints and artifacts pack them in the layout of the op diffbit.TernaryMatMul (ops/ternary_matmul.py): 128 weights
in 32 bytes. That op rounds its input to int8, with one scale per token, and sums integers. If the scheme's activations
are int4, it rounds to 4 bits, after a Hadamard transform in the layers whose inputs have outliers, o_proj and down_proj
(v2, arXiv 2504.18415). A factor is applied after the op by a separate node, so that the op's results equal training's
bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..io.errors import DiffbitError
from ..models.graph import Builder, Value
from ..ops import hadamard, ternary_matmul
from .base import Blocks, Format, QTensor, finite, row_blocks, shared_block
from .rounding import INT8, Rounding, rounded_input

SPREAD = ("o_proj", "down_proj")
GRAMMAR = "ternary"


@dataclass(frozen=True)
class TernaryFormat(Format):
    """scale * {-1, 0, 1}."""

    scale_dtype = torch.float32
    activations = ("int8", "int4")
    per_tensor = trained = integer_product = in_blocks = True

    def warning(self) -> str:
        return (
            "rounding to ternary destroys a model that was not trained with ternary weights (BitNet reports that a "
            "perplexity of 14 became 3.8 million); train it first, or use int4_g128"
        )

    def fit(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        self.check(tuple(weight.shape))
        if (own := _magnitude(weight)) is not None:
            return own.view(1, 1), None
        total = sum(weight[rows].float().abs().sum(dtype=torch.float64) for rows in row_blocks(weight))
        mean = torch.as_tensor(total / weight.numel(), dtype=torch.float32, device=weight.device)
        return finite(mean.clamp(min=1e-5).view(1, 1)), None

    @property
    def stacked(self) -> Format:
        return _STACKED

    @property
    def codes(self) -> int:
        return 3

    def bounds(self, zero: Tensor | None) -> tuple[float, float]:
        return -1.5, 1.5

    def encode_each(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        return (weight / scale).round_().clamp_(-1, 1).add_(1)

    def decode_each(self, codes: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        return codes.float().sub(1).mul_(scale)

    def packed_shape(self, shape: tuple[int, int]) -> tuple[int, int]:
        return shape[0], -(-shape[1] // ternary_matmul.BLOCK) * ternary_matmul.BLOCK_BYTES

    def pack(self, codes: Tensor) -> Tensor:
        return ternary_matmul.pack(codes.to(torch.int8) - 1)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        codes = (ternary_matmul.unpack(packed, columns) + 1).to(torch.uint8)
        if codes.numel() and codes.max() > 2:
            raise DiffbitError(
                f"a ternary weight {tuple(codes.shape)} holds a code of 3, wanted 0, 1 or 2; the file is damaged"
            )
        return codes

    def rounding(self, module: str, columns: int, activations: str | None) -> Rounding:
        if activations != "int4":
            return INT8
        return Rounding(4, hadamard.block_size(columns) if module.rpartition(".")[2] in SPREAD else 1)

    def multiply(self, x: Tensor, weight: QTensor, rounding: Rounding | None) -> Tensor:
        """Compute bit for bit what the op computes: integer inputs, an exact integer sum, times a * scale.

        float32 represents every partial sum exactly: they are integers below 127 * K < 2^24 for K up to 132,000.
        """
        if rounding is None:
            return super().multiply(x, weight, None)
        q, a = rounded_input(x, rounding)
        with torch.autocast(x.device.type, enabled=False):  # autocast would round the sums
            sums = F.linear(q, weight.codes.float() - 1)
        return (sums * a * weight.scale.view(-1)).to(x.dtype)

    def device_rounding(self, rounding: Rounding | None) -> Rounding:
        return rounding or INT8

    def onnx(self, g: Builder, x: Value, weight: QTensor, factor: float, rounding: Rounding | None) -> Value:
        rounding = rounding or INT8
        if rounding.hadamard > 1:
            x = g.custom(hadamard, [x], block=rounding.hadamard)
        rows, columns = weight.shape
        inputs = [x, g.initializer("codes", weight.packed().numpy()), self._scale(g, weight)]
        y = g.custom(ternary_matmul, inputs, K=columns, N=rows, activation_bits=rounding.bits)
        return y if factor == 1 else g.op("Mul", [y, g.const(factor, g.dtype)])

    def blocks(self, weight: QTensor, rounds: bool = False) -> Blocks:
        """Return 2-bit blocks: code - 1 is (code + 1) - 2."""
        rows, columns = weight.shape
        block = shared_block(columns)
        return Blocks(2, block, weight.codes + 1, weight.scale.expand(rows, -(-columns // block)))

    def _scale(self, g: Builder, weight: QTensor) -> Value:
        return g.initializer("scale", weight.scale.view(1).numpy())


@dataclass(frozen=True)
class StackedTernaryFormat(TernaryFormat):
    """Several ternary weights, concatenated: a scale for each row."""

    per_tensor = False

    def _scale(self, g: Builder, weight: QTensor) -> Value:
        """Add one scale for each of the weights, which ONNX Runtime repeats for its rows once, at load."""
        values, counts = weight.scale.view(-1).unique_consecutive(return_counts=True)
        scales = zip(values.split(1), counts.tolist(), strict=True)
        parts = [
            g.op("Expand", [g.initializer(f"{i}.scale", value.numpy()), g.const([count])])
            for i, (value, count) in enumerate(scales)
        ]
        return g.op("Concat", parts, axis=0)


def _magnitude(weight: Tensor) -> Tensor | None:
    """Return the only magnitude, fp32, that weights have beside 0; None: there are several, or none."""
    magnitude = weight.new_zeros(())
    for rows in row_blocks(weight):
        sizes = weight[rows].detach().abs()
        magnitude = torch.where(magnitude == 0, sizes.amax(), magnitude)
        if not ((sizes == magnitude) | (sizes == 0)).all():
            return None
    return finite(magnitude.float()) if magnitude > 0 else None


FORMAT = TernaryFormat("ternary", 2, 0, True)
_STACKED = StackedTernaryFormat("ternary", 2, 0, True)


def parse(name: str) -> TernaryFormat | None:
    return FORMAT if name == FORMAT.name else None


def names() -> list[str]:
    return [FORMAT.name]
