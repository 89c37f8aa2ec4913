"""Does differential attention lose less by low bits, over several training runs? A table of research/weights.

    python benchmarks/runs.py --work DIR --markdown     # trains what DIR lacks, and renews the table
    python benchmarks/runs.py --work DIR --quick        # pico, two runs of 8 steps: does everything run?

Trains each variant of a preset from several seeds, each by its own recipe (apps/train/presets.py), one thread a run.
Runs of one seed see the same batches in the same order. Then compares the models as `diffbit compare --runs` does: the
unit is the training run, and differences are paired by seed.
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from accuracy import NAMES, texts
from machine import describe
from report import Row, add_outputs, command_line, increase, interval, nats, table, verdict, write_outputs

from diffbit.apps.evaluate.compare import compare
from diffbit.apps.evaluate.metrics import CONFIDENCE, Estimate, t_quantile
from diffbit.apps.train import trainer
from diffbit.apps.train.presets import train_config
from diffbit.io.files import read_json
from diffbit.io.progress import track
from diffbit.models import Checkpoint

RUNS = 6
BITS = ("8", "4", "3", "2")
WHAT = ("weights", "logits")
METHODS = ("rtn", "gptq")
REPEATS = 3  # roundings of each run, each with another calibration sample
QUICK = ["--steps", "8", "--batch-size", "2", "--context", "64"]  # of a quick run


def train(work: Path, preset: str, attention: str, seed: int, options: Sequence[str], name: str | None = None) -> Path:
    """Train a model unless it is there; goes on with an interrupted run. name: of its folder, if not the attention."""
    out = work / f"{preset}-{seed}" / (name or attention)
    if not (out / "config.json").is_file():
        command = [sys.executable, "-m", "diffbit", "train", "--preset", preset, "--attention", attention]
        resume = ["--resume"] if (out / "log.jsonl").is_file() else []
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        arguments = ["--seed", str(seed), "--quiet", "-o", str(out), *options, *resume]
        subprocess.run([*command, *arguments], check=True, env=environment, stdout=subprocess.DEVNULL)
    return out


def train_tiny(out: Path, attention: str, seed: int, quick: bool, **options: Any) -> Path:
    """Train a model of preset tiny in this process unless it is there. quick: a few steps."""
    if not (out / "config.json").is_file():
        short = {"steps": 6, "warmup": 1, "batch_size": 2, "limit": 1 << 18} if quick else {}
        config = train_config("tiny", attention, seed=seed, checkpoint_every=0, **options | short)
        trainer.train(config, out, overwrite=out.exists())
    return out


def losses(paths: Sequence[Path]) -> np.ndarray:
    """Held-out losses at the end of training, nats per token, one for each run."""
    return np.array([read_json(path / "training.json")["result"]["eval_loss"] for path in paths])


def over_runs(values: np.ndarray) -> Row:
    """The mean of independent values with Student's interval."""
    half = t_quantile((1 + CONFIDENCE) / 2, len(values) - 1) * values.std(ddof=1) / math.sqrt(len(values))
    return Estimate(values.mean(), values.mean() - half, values.mean() + half).to_dict()


def run(work: Path, preset: str, runs: int, jobs: int, quick: bool) -> Row:
    with ThreadPoolExecutor(jobs) as pool:
        pairs = [(attention, seed) for seed in range(runs) for attention in NAMES]
        tasks = {pair: pool.submit(train, work, preset, *pair, QUICK if quick else []) for pair in pairs}
        paths = {pair: task.result() for pair, task in track(list(tasks.items()), "training")}
    ordered = [paths[attention, seed] for attention in NAMES for seed in range(runs)]
    windows, calibration = texts([Checkpoint(path) for path in ordered], quick, REPEATS)
    bits, what = (("2",), ("weights", "logits")) if quick else (BITS, WHAT)
    comparison = compare(
        ordered, windows, bits, what, METHODS,
        calibration=calibration, repeats=REPEATS, names=list(NAMES.values()), runs=runs,
    )  # fmt: skip
    of = {attention: [paths[attention, seed] for seed in range(runs)] for attention in NAMES}
    whole, *others = map(losses, of.values())
    return comparison.to_dict() | {
        "losses": [over_runs(whole), *(over_runs(other - whole) for other in others)],
    }


def contrasts(comparison: Row) -> str:
    """A line for each variant: what it costs the first model, and what it costs the others more."""
    first, *others = (model["name"] for model in comparison["models"])
    results = {(r["model"], r["what"], r["format"], r["method"]): r for r in comparison["results"]}
    differences = {(c["model"], c["what"], c["format"], c["method"]): c["difference"] for c in comparison["contrasts"]}
    whole, *apart = comparison["losses"]
    cells = [interval(whole, "{:.3f}".format)]
    for other, difference in zip(others, apart, strict=True):
        sure = difference["low"] * difference["high"] > 0
        better = f"{other} is {'better' if difference['value'] < 0 else 'worse'}"
        cells += [interval(difference, nats), better if sure else "no difference established"]
    lines = [["loss after training", "", *cells]]
    for model, *key in results:
        if model == first and key[0] != "none":
            line = [" ".join(key[:2]), "" if key[2] == "none" else key[2], increase(results[first, *key]["ratio"])]
            for other in others:
                line += [interval(differences[other, *key], nats), verdict(other, differences[other, *key])]
            lines.append(line)
    return table(["", "method", first, *(cell for other in others for cell in (f"{other} − {first}", ""))], lines)


def tables(comparison: Row) -> dict[str, str]:
    """By the name of their place in research/weights."""
    text, runs = comparison["text"], 1 + len(comparison["models"][0]["other_runs"])
    about = (
        f"{comparison['machine']}. {runs} runs of each, {REPEATS} roundings of each run; {text['windows']} windows of "
        f"{text['length']} held-out tokens (SHA-256 {text['sha256'][:12]}). `{comparison['command']}`"
    )
    return {"runs": f"{about}\n\n{contrasts(comparison)}"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder of the trained models")
    parser.add_argument("--preset", default="tiny", help="model size and recipe (default: %(default)s)")
    parser.add_argument("--runs", type=int, default=RUNS, help="training runs of each (default: %(default)s)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs trained at once (default: %(default)s)")
    add_outputs(parser, "research/weights/README.md")
    parser.add_argument("--quick", action="store_true", help="pico, two runs of 8 steps: does everything run?")
    arguments = parser.parse_args()

    preset, runs = ("pico", 2) if arguments.quick else (arguments.preset, arguments.runs)
    comparison = run(arguments.work, preset, runs, arguments.jobs, arguments.quick)
    comparison |= {"machine": describe(), "command": command_line(__file__, sys.argv[1:])}
    texts_by_name = tables(comparison)
    print("\n\n".join(texts_by_name.values()))
    write_outputs(arguments, comparison, texts_by_name)


if __name__ == "__main__":
    main()
