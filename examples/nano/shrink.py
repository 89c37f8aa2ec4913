"""Trained models as they lie in this folder: weights in fp16, the loss in a table and a picture.

    python examples/nano/shrink.py out/nano out/nano/fp16

Each run of the folder RUNS becomes a checkpoint in OUTPUT with its training.json (to which the command is added) and
loss.csv: step, training loss (mean since the row before), held-out loss where it was measured.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

import torch

from diffbit.models import load, save
from diffbit.train import plot_losses, read_log

EVERY = 10  # steps in a row of loss.csv


def shrink(run: Path, output: Path) -> None:
    save(load(run), output, dtype=torch.float16, tokenizer_from=run)
    about = json.loads((run / "training.json").read_text())
    config = about["config"]
    command = f"diffbit train --preset nano --steps {config['steps']} --precision {config['precision']}"
    command += f" --eval-every {config['eval_every']} --attention {config['model']['attention']}"
    if config["tokenizer"] is not None:
        config["tokenizer"] = f"out/nano/{Path(config['tokenizer']).name}"  # wherever it was on that machine
        command += f" --tokenizer {config['tokenizer']}"
    about = {"command": f"{command} -o out/nano/{run.name}", **about}
    (output / "training.json").write_text(json.dumps(about, indent=2) + "\n")
    log = read_log(run)
    with open(output / "loss.csv", "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "loss", "eval_loss"])
        for end in range(EVERY, len(log) + 1, EVERY):
            rows = log[end - EVERY : end]
            held_out = f"{rows[-1]['eval_loss']:.4f}" if "eval_loss" in rows[-1] else ""
            writer.writerow([rows[-1]["step"], f"{sum(row['loss'] for row in rows) / EVERY:.4f}", held_out])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="holds folders made by `diffbit train`")
    parser.add_argument("output", type=Path, help="a new folder")
    arguments = parser.parse_args()
    runs = sorted(path.parent for path in arguments.runs.glob("*/training.json"))
    for run in runs:
        shrink(run, arguments.output / run.name)
    plot_losses({run.name: read_log(run) for run in runs}, arguments.output / "loss.png")


if __name__ == "__main__":
    main()
