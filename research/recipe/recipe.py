"""Does another recipe make DIFF version 2 better? Learning rate, warm-up, and where lambda starts, over seeds.

    python research/recipe/recipe.py --work DIR [--seeds 3] [--json FILE] [--markdown]
    python research/recipe/recipe.py --work DIR --quick      # 2 seeds of 6 steps: does everything run?

Every recipe is trained from each seed in preset tiny, one thread a run; runs of one seed see the same batches in the
same order. The Transformer and version 1 have their own recipes (apps/train/presets.py). Losses are held-out, at the
end of training; intervals are over seeds, and differences are paired by seed. DIR keeps finished runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import numpy as np
import torch
from machine import describe
from report import add_outputs, command_line, interval, nats, table, write_outputs
from runs import losses, over_runs, train_tiny

from diffbit.io.progress import track

PLAIN, AS_IT_IS = "Transformer", "DIFF v2"
RECIPES: dict[str, dict[str, Any]] = {
    PLAIN: {"attention": "softmax"},
    "DIFF v1": {"attention": "diff_v1"},
    AS_IT_IS: {},
    "learning rate halved": {"learning_rate": 2.5e-3},
    "learning rate doubled": {"learning_rate": 1e-2},
    "warm-up of 10 steps": {"warmup": 10},
    "warm-up of 160 steps": {"warmup": 160},
    "lambda from 0.0025": {"lambda_bias": -6.0},
    "lambda from 0.12": {"lambda_bias": -2.0},
    "noise heads shared by two": {"noise_ratio": 2},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the runs")
    parser.add_argument("--seeds", type=int, default=3, help="at least 2 (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=RECIPES, help="these, and what they are held to")
    parser.add_argument("--quick", action="store_true", help="short runs: does everything run?")
    add_outputs(parser, "research/recipe/README.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(2 if arguments.quick else arguments.seeds)
    chosen = [name for name in RECIPES if not arguments.only or name in (PLAIN, AS_IT_IS, *arguments.only)]
    paths: dict[str, list[Path]] = {name: [] for name in chosen}
    for seed, name in track([(seed, name) for seed in seeds for name in chosen], "training"):
        options = {"attention": "diff_v2"} | RECIPES[name]
        out = arguments.work / f"{name.replace(' ', '-')}-{seed}"
        paths[name].append(train_tiny(out, seed=seed, quick=arguments.quick, **options))
    found = {name: losses(runs) for name, runs in paths.items()}
    rows = {name: over_runs(values) for name, values in found.items()}
    beside = {
        other: {name: over_runs(values - found[other]) for name, values in found.items() if name != other}
        for other in (PLAIN, AS_IT_IS)
    }
    command = command_line(__file__, sys.argv[1:])
    text = f"{describe()}. {len(seeds)} seeds. `{command}`\n\n" + table(
        ["", "held-out loss, nats", f"− {PLAIN}", f"− {AS_IT_IS}"],
        [
            [name, interval(rows[name], "{:.3f}".format), *(shown(beside[other].get(name)) for other in beside)]
            for name in chosen
        ],
    )
    print(text)
    numbers = {"command": command, "losses": {name: list(map(float, values)) for name, values in found.items()}}
    write_outputs(arguments, numbers | {"beside": beside}, {"recipe": text + "\n"})


def shown(difference: dict[str, float] | None) -> str:
    return "" if difference is None or np.isnan(difference["low"]) else interval(difference, nats)


if __name__ == "__main__":
    main()
