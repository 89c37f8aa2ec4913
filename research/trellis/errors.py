"""Compares trellis codes with scalar levels: squared errors of normally distributed weights, or of a model's.

python research/trellis/errors.py                a table of 2 to 6 bits
python research/trellis/errors.py --model MODEL  the same of a float model's linear layers, 256 rows of each
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor

from diffbit.formats import parse_format
from diffbit.models import Checkpoint
from diffbit.quantize.calibration import search
from diffbit.quantize.scheme import Scheme, weight_shapes

ROWS = 256
SCALAR = {2: "nl2_g32_s8", 3: "nl3_g32_s8", 4: "nl4_g32_s8", 5: "int5_g32_s8", 6: "int6_g32_s8"}


def weights(model: str | None) -> Iterator[Tensor]:
    if model is None:
        for seed in range(3):
            yield torch.randn(ROWS, 1024, generator=torch.Generator().manual_seed(seed))
        return
    checkpoint = Checkpoint(model)
    formats = Scheme(weights=parse_format("int8")).formats(checkpoint.config)
    for module in (module for module in weight_shapes(checkpoint.config) if module in formats):
        weight = checkpoint.read(f"{module}.weight").float()
        yield weight[: min(ROWS, len(weight) - len(weight) % 64)]


def error(weight: Tensor, name: str) -> float:
    """Return the squared error, relative to the weight's mean square."""
    format = parse_format(name)
    lost = format.nearest(weight, *search(weight, format)).dequantize() - weight
    return float(lost.square().mean() / weight.square().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    arguments = parser.parse_args()
    matrices = list(weights(arguments.model))
    for bits, scalar in SCALAR.items():
        ours, other = (
            sum(error(weight, name) for weight in matrices) / len(matrices) for name in (f"tcq{bits}_g32_s8", scalar)
        )
        print(f"| {bits} | {ours:.5f} | {other:.5f} (`{scalar}`) | {ours / other:.2f} |")


if __name__ == "__main__":
    main()
