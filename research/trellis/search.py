"""Finds the trellises of formats/trellis.py: masks by a random search, levels by Lloyd's algorithm.

    python research/trellis/search.py --bits 2          a search of some minutes; prints an entry of TRELLISES
    python research/trellis/search.py --bits 2 --errors the errors of those that there are

Weights are normally distributed and each group of 32 has mean square 1, as scales make it.
"""

from __future__ import annotations

import argparse
import math
import random
from statistics import NormalDist

import torch
from torch import Tensor

from diffbit.formats.trellis import TRELLISES, Trellis, nearest
from diffbit.ops import trellis

GROUP, LARGEST = 32, 127


def weights_of(rows: int, seed: int) -> Tensor:
    """Return weights [rows, GROUP]."""
    weights = torch.randn(rows, GROUP, generator=torch.Generator().manual_seed(seed))
    return weights / weights.square().mean(1, keepdim=True).sqrt()


def error(weights: Tensor, bits: int, code: Trellis) -> tuple[float, Tensor]:
    """Return the mean squared error, and the mean magnitude of the weights at each of the levels `upper`."""
    indices = nearest(weights, torch.ones_like(weights), bits, code).long().flatten()
    levels = torch.tensor(trellis.levels_of(code.upper))
    half, targets = len(levels) // 2, weights.flatten()
    at = torch.where(indices >= half, indices - half, half - 1 - indices)
    sums = torch.zeros(half).index_add_(0, at, torch.where(indices >= half, targets, -targets))
    counts = torch.bincount(at, minlength=half)
    means = torch.where(counts > 0, sums / counts.clamp(min=1), levels[half:])
    return float((targets - levels[indices]).square().mean()), means.clamp(min=0)


def trained(weights: Tensor, bits: int, code: Trellis, turns: int) -> Trellis:
    for _ in range(turns):
        code = code._replace(upper=tuple(error(weights, bits, code)[1].tolist()))
    return code


def start(bits: int) -> tuple[float, ...]:
    """Levels whose density is that of the best scalar quantizer with as many."""
    half = 2 ** trellis.index_bits(bits) // 2
    wide = NormalDist(0, math.sqrt(3) * 0.92)
    return tuple(wide.inv_cdf((half + i + 0.5) / (2 * half)) for i in range(half))


def uniform(width: float) -> tuple[float, ...]:
    return tuple((i + 0.5) * width for i in range(128))


def search(bits: int, tries: int, rows: int, seed: int) -> Trellis:
    chance, size = random.Random(seed), trellis.SUBSET_BITS[bits]
    weights = weights_of(rows, seed)

    def masks() -> tuple[int, ...]:
        return tuple(chance.randrange(1, 256) for _ in range(size))

    def changed(old: tuple[int, ...]) -> tuple[int, ...]:
        at, bit = chance.randrange(size), 1 << chance.randrange(8)
        return tuple((m ^ bit or 1) if i == at else m for i, m in enumerate(old))

    def invertible(masks: tuple[int, ...]) -> bool:
        return any(m.bit_count() % 2 for m in masks)

    best, least = trained(weights, bits, Trellis(masks(), 0, start(bits)), 8), math.inf
    for turn in range(tries):
        tried = masks() if turn < tries // 3 else changed(best.masks)
        if not invertible(tried):
            continue
        code = trained(weights, bits, best._replace(masks=tried), 2)
        lost, _ = error(weights, bits, code)
        if lost < least:
            best, least = code, lost
            print(f"{turn}: {least:.6f} {best.masks}", flush=True)
    return trained(weights_of(16 * rows, seed + 1), bits, best, 20)


def rounded(code: Trellis) -> Trellis:
    unit = max(code.upper) / LARGEST
    return Trellis(code.masks, round(unit, 5), tuple(round(level / unit) for level in code.upper))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bits", type=int, choices=range(2, 6), required=True)
    parser.add_argument("--tries", type=int, default=600)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--errors", action="store_true", help="only measure the trellis that there is")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    bits, code = arguments.bits, TRELLISES[arguments.bits]
    if not arguments.errors:
        code = rounded(search(bits, arguments.tries, arguments.rows, arguments.seed))
        print(f"    {bits}: Trellis({code.masks}, {code.unit}, {code.upper}),")
    at_unit = code._replace(upper=tuple(level * code.unit for level in code.upper))
    lost, _ = error(weights_of(32768, arguments.seed + 99), bits, at_unit)
    print(f"squared error of {bits} bits: {lost:.5f}")


if __name__ == "__main__":
    main()
