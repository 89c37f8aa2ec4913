"""Trellis codes: a weight's value depends on its own code and on one bit of each of the seven weights before it.

    tcq4_g32_s8    row_scale * step / 128 * level        2 to 6 bits; scales as those of lowbit.py

Trellis coded quantization (Marcellin & Fischer, 1990; QTIP, arXiv 2406.11235) chooses among more levels than a code of
its bits could name. The codes before say which of them a code means. ops/trellis.py defines the codes. They run down a
column, so methods that round columns in turn work as with any other format.

`QTensor.codes` holds the indices of levels; only packing knows of the trellis. A weight has a multiple of 64 rows.

research/trellis/search.py found the masks by a random search, and the levels by Lloyd's algorithm.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..io.errors import DiffbitError
from ..ops import int4_matmul, trellis
from ..runtime import native
from .base import QTensor, by_group
from .levels import Levels
from .lowbit import STEPS, LowBitFormat
from .packing import pack_bits, unpack_bits

START = 0.9  # of the scale that suits a group of any weights, from which a search of scales finds the least error
AHEAD = 32  # steps before a ring's first weight, after which the best path hardly depends on its start
GRAMMAR = "tcq2 ... tcq6, each with _g32_s8, _g64_s8 or _g128_s8"


class Trellis(NamedTuple):
    """masks: of the window, for each bit of x; unit: the scale of weights of variance 1; upper: m of ops/trellis.py."""

    masks: tuple[int, ...]
    unit: float
    upper: tuple[float, ...]


TRELLISES = {
    2: Trellis((215, 62, 98, 253), 0.01785, (
        7, 8, 11, 13, 28, 25, 33, 31, 51, 51, 56, 58, 77, 91, 87, 127,
    )),
    3: Trellis((162, 86, 153), 0.02004, (
        5, 4, 13, 14, 23, 24, 34, 34, 44, 46, 57, 60, 72, 81, 99, 127,
    )),
    4: Trellis((32, 73, 250), 0.0248, (
        1, 2, 5, 6, 8, 9, 12, 13, 15, 16, 20, 20, 23, 24, 28, 28, 32, 32, 36, 38, 41, 43, 47, 49, 54, 58, 63, 70, 78,
        89, 104, 127,
    )),
    5: Trellis((188, 70), 0.0264, (
        1, 3, 6, 8, 10, 13, 15, 17, 20, 22, 25, 27, 30, 33, 35, 38, 41, 44, 47, 50, 54, 58, 61, 66, 70, 75,
        80, 86, 93, 101, 112, 127,
    )),
    6: Trellis((126, 85, 173), 0.0, ()),
}  # fmt: skip


@dataclass(frozen=True)
class TrellisFormat(Levels, LowBitFormat):
    """Levels that are chosen by a trellis across rows, with a scale of 8 bits a group."""

    rows_together = trellis.ROWS

    @property
    def trellis(self) -> Trellis:
        return TRELLISES[self.bits]

    @property
    def levels(self) -> tuple[int, ...]:
        return tuple(map(int, trellis.levels_of(self.trellis.upper)))

    @property
    def has_table(self) -> bool:
        return True

    def check(self, shape: tuple[int, ...]) -> None:
        super().check(shape)
        if shape[0] % trellis.ROWS:
            raise DiffbitError(
                f"a weight of shape {tuple(shape)} cannot be {self}: out_features must be a multiple of "
                f"{trellis.ROWS}; use nl4_g32_s8, which takes any number"
            )

    def fit(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        self.check(tuple(weight.shape))
        counts = by_group(self, torch.ones_like(weight[:1]), lambda group: group.sum(-1))
        squares = by_group(self, weight, lambda group: group.square().sum(-1, dtype=torch.float64))
        largest = by_group(self, weight, lambda group: group.abs().amax(-1))
        spread = (squares / counts).sqrt().float() * (START * self.trellis.unit)
        return self.stored(torch.maximum(spread, largest / STEPS)), None

    def candidates(self, weight: Tensor) -> Iterator[tuple[Tensor, Tensor | None]]:
        return iter(())

    few_candidates = candidates  # the error of a scale is known only when its codes are

    def encode(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        """Return the indices uint8 [N, K] of the best sequence of each ring, for given scales."""
        self.check(tuple(weight.shape))
        columns = weight.shape[1]
        indices = torch.empty(weight.shape, dtype=torch.uint8)
        width = self.group_size

        def group(g: int) -> None:
            part = slice(g * width, min((g + 1) * width, columns))
            indices[:, part] = self.encode_columns(weight[:, part].float(), scale[:, g : g + 1])

        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            list(pool.map(group, range(self.groups(columns))))
        return indices

    def encode_column(self, weight: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        return self.encode_columns(weight[:, None], scale[:, None])[:, 0]

    def encode_columns(self, weight: Tensor, scale: Tensor) -> Tensor:
        """Return indices uint8 [N, n] of columns fp32 [N, n] for scales [N, 1] of the rows.

        Where a scale is 0, all levels are as good.
        """
        safe = scale.masked_fill(scale == 0, 1)
        targets = (weight / safe).masked_fill(scale == 0, 0).nan_to_num_(0)
        # errors in units of the largest scale, so that sums stay in fp32's range
        weights = (scale / scale.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)).square().expand_as(weight)
        return nearest(targets, weights, self.bits, self.trellis)

    def device_codes(self, weight: QTensor) -> tuple[Tensor, Tensor | None]:
        masks, _, upper = self.trellis
        levels = torch.tensor(trellis.input_levels(masks, upper), dtype=torch.uint8)
        return trellis.codes_of(weight.codes, masks, self.bits), levels

    def pack(self, codes: Tensor) -> Tensor:
        return pack_bits(trellis.codes_of(codes, self.trellis.masks, self.bits), self.bits)

    def unpack(self, packed: Tensor, columns: int) -> Tensor:
        table = torch.tensor(trellis.map_of(self.trellis.masks), dtype=torch.uint8)
        return trellis.indices(unpack_bits(packed, self.bits, columns), table, self.bits)


def nearest(targets: Tensor, weights: Tensor, bits: int, code: Trellis) -> Tensor:
    """Return the indices uint8 [N, n] of the nearest sequences to targets fp32 [N, n], at scale 1; squared errors count
    `weights` [N, n] times."""
    return (_encoder() or viterbi)(targets.contiguous(), weights.contiguous(), bits, code)


@lru_cache(1024)  # `code` of a search changes all the time
def tables(code: Trellis) -> tuple[Tensor, Tensor]:
    """Return x uint8 [256] of each window, and the levels fp32 of all indices."""
    subsets = trellis.subsets(torch.tensor(trellis.map_of(code.masks), dtype=torch.uint8))
    return subsets, torch.tensor(trellis.levels_of(code.upper), dtype=torch.float32)


def viterbi(targets: Tensor, weights: Tensor, bits: int, code: Trellis) -> Tensor:
    """Do in torch what `nearest` does, and what the library does a hundred times faster."""
    s = trellis.SUBSET_BITS[bits]
    subsets, values = tables(code)
    levels = values.view(-1, 2**s)
    rings, weighting = trellis.ring(targets), trellis.ring(weights)  # [R, 64, n]
    errors, places = [], []
    for p in range(trellis.ROWS):
        lost = (rings[:, p, :, None, None] - levels).square() * weighting[
            :, p, :, None, None
        ]  # [R, n, choices, subsets]
        least = lost.min(-2)
        errors.append(least.values)
        places.append(least.indices)
    x = subsets.int().view(trellis.STATES, 2)
    after = torch.arange(trellis.STATES)
    u, low = after & 1, after >> 1
    before = torch.stack((low, low + trellis.STATES // 2))  # [2, states]
    subset = x[before, u]

    def step(costs: Tensor, p: int) -> tuple[Tensor, Tensor]:
        paths = costs[..., before] + errors[p][..., subset]  # [R, n, 2, states]
        best = paths[..., 1, :] < paths[..., 0, :]
        return torch.where(best, paths[..., 1, :], paths[..., 0, :]), best

    def run(costs: Tensor) -> tuple[Tensor, list[Tensor]]:
        choices = []
        for p in range(trellis.ROWS):
            costs, best = step(costs, p)
            choices.append(best)
        return costs, choices

    def trace(state: Tensor, choices: list[Tensor]) -> tuple[Tensor, Tensor]:
        found = []
        for p in reversed(range(trellis.ROWS)):
            choice = choices[p].gather(-1, state[..., None])[..., 0].long()
            q = subset[choice, state].long()
            found.append(places[p].gather(-1, q[..., None])[..., 0] * 2**s + q)
            state = before[choice, state]
        return state, torch.stack(found[::-1], 1)

    costs = torch.zeros(*errors[0].shape[:-1], trellis.STATES)
    for p in range(trellis.ROWS - AHEAD, trellis.ROWS):
        costs, _ = step(costs, p)
    costs, choices = run(costs)
    first, _ = trace(costs.argmin(-1), choices)
    start = torch.full_like(costs, 1e30).scatter_(-1, first[..., None], 0)  # the best path that begins and ends there
    _, choices = run(start)
    return trellis.unring(trace(first, choices)[1].to(torch.uint8))


@cache
def _encoder() -> Callable[[Tensor, Tensor, int, Trellis], Tensor] | None:
    """Return the library's encoder, or None without the library."""
    library = native.library()
    if library is None:
        return None
    encode = ctypes.CDLL(str(library)).diffbit_trellis_encode

    def call(targets: Tensor, weights: Tensor, bits: int, code: Trellis) -> Tensor:
        (rows, columns), result = targets.shape, torch.empty(targets.shape, dtype=torch.uint8)
        inputs = *tables(code), targets, weights  # held, because two threads may have made the tables at once
        pointers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in inputs]
        sizes = [ctypes.c_int64(size) for size in (rows, columns, columns)]
        kind = [ctypes.c_int64(bits), ctypes.c_int64(trellis.SUBSET_BITS[bits])]
        if encode(*kind, *pointers, *sizes, ctypes.c_void_p(result.data_ptr())):
            raise DiffbitError("the library cannot encode: no memory, or DIFFBIT_ISA names what this CPU does not have")
        return result

    return call


def parse(name: str) -> TrellisFormat | None:
    match = re.fullmatch(r"tcq(\d{1,9})_g(\d{1,9})_s8", name)
    if match is None:
        return None
    bits, group_size = int(match[1]), int(match[2])
    if bits not in TRELLISES:
        raise DiffbitError(f"format {name!r} has {bits} bits, wanted {min(TRELLISES)} to {max(TRELLISES)}")
    if group_size not in int4_matmul.GROUP_SIZES:
        sizes = ", ".join(map(str, int4_matmul.GROUP_SIZES))
        raise DiffbitError(f"format {name!r} has groups of {group_size}, wanted one of {sizes}")
    return TrellisFormat(name, bits, group_size, True)


def names() -> list[str]:
    return [f"tcq{bits}_g{size}_s8" for bits in TRELLISES for size in int4_matmul.GROUP_SIZES]
