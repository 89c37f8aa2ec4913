"""How well methods that calibrate on few tokens do on others: errors of one layer's output, beside rounding to nearest.

    python research/weights/held_out.py [--formats int4_g32,int3_g64,int2_g64] [--tokens 2048,300] [--seeds 3]

A random weight [256, 512] reads made-up inputs: independent ones, ones of various sizes, five outlier channels, the
same rising and falling together, ones of rank 64 with little noise and with much, heavy tails. Each number is
||X W^T - X Wq^T||^2 relative to that of rounding to nearest: on the calibration tokens / on 8,192 others.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import torch
from report import table
from torch import Tensor

from diffbit.formats import QTensor, parse_format
from diffbit.quantize.calibration import search, stats
from diffbit.quantize.methods import gptq, rtn

ROWS, COLUMNS, OTHERS, BATCH = 256, 512, 8192, 256
KINDS = ("independent", "sizes", "outliers", "outliers together", "rank 64", "rank 64 + noise", "heavy tails")


def inputs(kind: str, seed: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """A weight, calibration tokens and others."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    weight, mix, size = 0.05 * normal(ROWS, COLUMNS), normal(64, COLUMNS) / 8, normal(COLUMNS).mul(0.8).exp()
    large, sign = torch.randperm(COLUMNS, generator=generator)[:5], normal(5).sign()

    def draw(count: int) -> Tensor:
        x = normal(count, COLUMNS)
        if kind == "outliers":
            x[:, large] *= 30
        if kind == "outliers together":
            x[:, large] += 30 * (1 + normal(count, 1)) * sign
        if kind.startswith("rank"):
            x = x.mul_(1 if "noise" in kind else 0.1) + normal(count, 64) @ mix
        if kind == "heavy tails":
            x /= sum(normal(count, COLUMNS).square() for _ in range(5)).div(5).sqrt()
        return x * size if kind in ("sizes", "rank 64 + noise") else x

    return weight, draw(tokens), draw(OTHERS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default="int4_g32,int3_g64,int2_g64")
    parser.add_argument("--tokens", default="2048,300")
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    rows = []
    for tokens in map(int, arguments.tokens.split(",")):
        for format in map(parse_format, arguments.formats.split(",")):
            for kind in KINDS:
                errors = torch.zeros(2, 2)
                for seed in range(arguments.seeds):
                    weight, some, others = inputs(kind, seed, tokens)
                    gatherer = stats.Gatherer()
                    for batch in some.split(BATCH):
                        gatherer.add(batch)
                    statistics = gatherer.stats()
                    scales = search(weight, format, statistics.gram.diagonal())
                    rounded = format.nearest(weight, *scales), gptq.quantize(weight, format, statistics)
                    nearest = rtn.quantize(weight, format)

                    def error(q: QTensor, x: Tensor, weight: Tensor = weight) -> float:
                        return float(((q.dequantize() - weight) @ x.T).square().sum())

                    errors += torch.tensor([[error(q, x) / error(nearest, x) for x in (some, others)] for q in rounded])
                pairs = (errors / arguments.seeds).tolist()
                rows.append([f"{tokens}", format.name, kind, *("{:.3f} / {:.3f}".format(*pair) for pair in pairs)])
    print(table(["tokens", "format", "inputs", "search by mean x²", "gptq"], rows))


if __name__ == "__main__":
    main()
