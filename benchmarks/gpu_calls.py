"""diffbit's CUDA kernels on torch's tensors: calls to be timed, and weights whose products are checked."""

from __future__ import annotations

import math

import torch
from gpu_attention import BITS, Layer
from gpu_clock import Call
from torch import Tensor

from diffbit.ops import int4_matmul, ternary_matmul
from diffbit.runtime import cuda

TYPES = {torch.float32: cuda.FLOAT32, torch.float16: cuda.FLOAT16, torch.bfloat16: cuda.BFLOAT16}
GROUP = 32
TILE = int4_matmul.TILE
CHECKED = 4  # rows of activations, tiles at either end of a weight


def call(kernels: cuda.Kernels, op: cuda.Op, device: str, *kept: Tensor) -> Call:
    """Starts `op` on torch's stream; `kept` are tensors that it points to. The workspace is made once, full of NaN."""
    room = torch.full((kernels.workspace(op),), 0xFF, dtype=torch.uint8, device=device)

    def run(held: tuple[Tensor, ...] = (room, *kept)) -> None:
        kernels.run(op, room.data_ptr(), torch.cuda.current_stream().cuda_stream if device == "cuda" else 0)

    return run


def attention(kernels: cuda.Kernels, layer: Layer) -> Call:
    """One call of the layer; the cache's present is its past."""
    bits = BITS[layer.kind]
    pointers = {name: tensor.data_ptr() for name, tensor in layer.inputs.items()}
    pointers |= {
        name.replace("past", "present"): address for name, address in pointers.items() if name.startswith("past")
    }
    slots = {side: layer.inputs[f"past_{side}"].shape[2] for side in ("key", "value")}
    float_type = TYPES[layer.dtype]
    op = cuda.Attention(
        **pointers, out=layer.out.data_ptr(), batch=1, steps=layer.steps, past_length=layer.past, heads=layer.pairs,
        kv_heads=2 * layer.kv_pairs, d=layer.d, past_key_capacity=slots["key"], past_value_capacity=slots["value"],
        key_capacity=slots["key"], value_capacity=slots["value"], positions=layer.inputs["cos"].shape[0], branches=2,
        wide_value=1, lambda_per_token=0, key_bits=bits, value_bits=bits, query_bits=0,
        window=layer.attributes["window"], type=float_type, key_type=float_type, value_type=float_type,
        scale=layer.attributes["scale"], norm_eps=layer.eps,
    )  # fmt: skip
    return call(kernels, op, layer.device, layer.out, *layer.inputs.values())


class Weights:
    """`count` random weights [N, K] of one format, "ternary" or "int4_g32", and products with activations [M, K]."""

    def __init__(self, op: str, n: int, k: int, count: int, device: str) -> None:
        self.op, self.n, self.k, self.device = op, n, k, device
        self.weights = [self._ternary() if op == "ternary" else self._int4() for _ in range(count)]

    def _ternary(self) -> tuple[Tensor, ...]:
        codes = torch.randint(-1, 2, (self.n, self.k), dtype=torch.int8, device=self.device)
        return ternary_matmul.pack(codes), torch.tensor([0.037], device=self.device)

    def _int4(self) -> tuple[Tensor, ...]:
        codes = torch.randint(16, (self.n, self.k), dtype=torch.uint8, device=self.device)
        scales = torch.rand(self.n, self.k // GROUP, device=self.device).add(0.5).mul(0.02).half()
        packed = int4_matmul.pack(codes, scales, None, GROUP)
        return packed.codes, packed.scales, packed.zeros, torch.ones(1, device=self.device)

    @property
    def nbytes(self) -> int:
        """Of one weight."""
        return sum(tensor.nbytes for tensor in self.weights[0])

    def calls(self, kernels: cuda.Kernels, x: Tensor, y: Tensor | None = None) -> list[Call]:
        """x [M, K] times each of the weights."""
        y = torch.empty(x.shape[0], self.n, dtype=x.dtype, device=x.device) if y is None else y
        made = []
        for weight in self.weights:
            shape = {"m": x.shape[0], "n": self.n, "k": self.k, "type": TYPES[x.dtype]}
            pointers = [tensor.data_ptr() for tensor in weight]
            op: cuda.Op
            if self.op == "ternary":
                packed, scale = pointers
                op = cuda.TernaryMatMul(a=x.data_ptr(), packed=packed, scale=scale, y=y.data_ptr(), activation_bits=8,
                                        **shape)  # fmt: skip
            else:
                codes, scales, _, factor = pointers  # one zero point, 8, for all is no pointer at all
                op = cuda.Int4MatMul(a=x.data_ptr(), codes=codes, scales=scales, zeros=None, factor=factor,
                                     y=y.data_ptr(), group_size=GROUP, **shape)  # fmt: skip
            made.append(call(kernels, op, self.device, x, y, *weight))
        return made

    def error(self, kernels: cuda.Kernels, x: Tensor) -> tuple[float, float]:
        """The largest error of the first and of the last weight's product, and what is allowed: one rounding of the
        largest number in the activations' type. Held against the op's reference are some rows of the activations and
        the first and last tiles of the weight; NaN, wherever it is, is infinitely wrong."""
        tiles = torch.arange(-(-self.n // TILE))
        tiles = torch.cat((tiles[:CHECKED], tiles[-CHECKED:]))
        some = torch.randperm(x.shape[0])[:CHECKED]
        worst, largest = 0.0, 0.0
        for which in (0, -1):
            y = torch.full((x.shape[0], self.n), math.nan, dtype=x.dtype, device=x.device)
            self.calls(kernels, x, y)[which]()
            if y.isnan().any():
                return math.inf, 0.0
            got = y.cpu()[some].unflatten(1, (-1, TILE))[:, tiles].flatten(1)
            wanted = self._reference(x.cpu()[some], self.weights[which], tiles)
            worst = max(worst, float((got.double() - wanted.double()).abs().max()))
            largest = max(largest, float(wanted.abs().max()))
        return worst, torch.finfo(x.dtype).eps * largest

    def _reference(self, x: Tensor, weight: tuple[Tensor, ...], tiles: Tensor) -> Tensor:
        """x [M, K] times the rows of the weight in some tiles of 16: [M, 16 tiles]."""
        if self.op == "ternary":
            packed, scale = (tensor.cpu() for tensor in weight)
            return ternary_matmul.reference(x, packed.unflatten(0, (-1, TILE))[tiles].flatten(0, 1), scale)
        codes, scales, zeros, factor = (tensor.cpu() for tensor in weight)
        packed = int4_matmul.Packed(codes[tiles], scales[tiles], zeros)
        return int4_matmul.reference(x, packed, factor, len(tiles) * TILE, GROUP)
