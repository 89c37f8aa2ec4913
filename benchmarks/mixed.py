"""Mixed precision against one format for all layers, at the same size, on held-out text.

    python benchmarks/mixed.py                                          # the models in examples/nano
    python benchmarks/mixed.py examples/nano/diff_v1 --methods gptq --bits 3.25,3.5 --json out/mixed.json
    python benchmarks/mixed.py --markdown                               # renew the table in docs/accuracy.md

Formats are chosen on the calib split (quantize/mixed); every model is scored on all windows of the eval split beside
the float model. Differences are paired: log of the ratio of perplexities, mixed over uniform, nats a token, with 95 %
intervals; below 0 the mixed model loses less. Each choice is held against the uniform schemes of UNIFORM.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from report import Row, command_line, increase, interval, nats, renew, table, write_json

from diffbit.calib_data import eval_windows
from diffbit.evaluate.measure import measure
from diffbit.evaluate.metrics import mean, paired, perplexity_ratio
from diffbit.evaluate.variants import Variant
from diffbit.models import Checkpoint, load
from diffbit.progress import set_quiet
from diffbit.quantize import Scheme, parse_format
from diffbit.quantize.mixed import plan

ROOT = Path(__file__).parents[1]
NANO = ROOT / "examples" / "nano"
UNIFORM = ("int2_g64", "int3_g64", "int3_g32", "int4_g128")
BITS = (2.5, 3.25, 3.5)  # 3.25: the size of int3_g64; 3.5: that of int3_g32
CALIBRATION_WINDOWS = 128


def run(path: Path, method: str, bits: list[float], limit: int | None) -> list[Row]:
    """A row per scheme: its size, what it loses, and the differences to the uniform ones."""
    torch.set_num_threads(1)
    set_quiet(True)
    length = min(512, Checkpoint(path).config.max_position)
    calibration = eval_windows("stdlib", path, length, CALIBRATION_WINDOWS, split="calib")
    chosen = [Variant("weights", name, method, 0, Scheme(weights=parse_format(name))) for name in UNIFORM]
    for target in bits:
        found = plan(path, bits=target, method=method, calibration=calibration.ids, calibration_mask=calibration.mask)
        chosen.append(Variant("weights", f"mixed, {target:g} bits", method, target, found.scheme))
    windows = eval_windows("stdlib", path, length, limit)
    (whole, *rest), _ = measure(load(path), chosen, windows, calibration)
    scores = {one.variant.format: one.scores for one in rest if one.variant}
    rows: list[Row] = []
    for one in rest:
        assert one.variant is not None
        name = one.variant.format
        others = () if name in UNIFORM else UNIFORM
        differences = {other: mean(paired(one.scores, scores[other]), one.scores.tokens).to_dict() for other in others}
        rows.append(
            {"model": path.name, "method": method, "weights": name, "bits_per_weight": one.bits_per_weight,
             "nbytes": one.nbytes, "ratio": perplexity_ratio(one.scores, whole.scores).to_dict(),
             "kl": one.scores.divergence().to_dict(), "differences": differences}
        )  # fmt: skip
    return rows


def tables(rows: list[Row]) -> str:
    lines = []
    for row in rows:
        size = f"{row['bits_per_weight']:.3f}", f"{row['nbytes'] / 1e6:.3f}"
        quality = increase(row["ratio"]), interval(row["kl"], lambda value: f"{value:.4f}")
        differences = [interval(row["differences"].get(name), nats) for name in UNIFORM]
        lines.append([row["model"], row["method"], row["weights"], *size, *quality, *differences])
    against = [f"less {name}" for name in UNIFORM]
    return table(["model", "method", "weights", "bits", "MB", "perplexity up", "KL", *against], lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "models", type=Path, nargs="*", default=sorted(path.parent for path in NANO.glob("*/config.json"))
    )
    parser.add_argument("--methods", default="rtn,gptq", help="recipes (default: %(default)s)")
    parser.add_argument("--bits", default=",".join(map(str, BITS)), help="targets (default: %(default)s)")
    parser.add_argument("--windows", type=int, help="of held-out text (default: all)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--markdown", type=Path, nargs="?", const=ROOT / "docs" / "accuracy.md", metavar="FILE",
                        help="renew the table in this page (default: docs/accuracy.md)")  # fmt: skip
    arguments = parser.parse_args()
    bits = [float(text) for text in arguments.bits.split(",")]
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        jobs = [
            pool.submit(run, path, method, bits, arguments.windows)
            for path in arguments.models
            for method in arguments.methods.split(",")
        ]
        rows = [row for job in jobs for row in job.result()]
    text = f"`{command_line('mixed.py', sys.argv[1:])}`\n\n{tables(rows)}"
    print(text)
    if arguments.json:
        write_json(arguments.json, rows)
    if arguments.markdown:
        renew(arguments.markdown, "mixed", text)


if __name__ == "__main__":
    main()
