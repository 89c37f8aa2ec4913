"""Makes the models in pico and the other folders from training runs: float weights in fp16, the loss as table and plot.

    python examples/shrink.py out/pico out/pico/fp16
    python examples/shrink.py out/nano out/nano/fp16 --preset nano

Each finished run in the folder RUNS becomes a checkpoint in OUTPUT with its training.json (with the command added) and
loss.csv: step, training loss (mean since the previous row), held-out loss if it was measured, the loss of needles'
answers if there were needles, and with --qat the shares of weights that flip in a step and that are zero. If a run
started from the end of another run, that run is included too: as "before" in training.json, and in loss_before.csv.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path
from typing import Any

import torch

from diffbit.apps.train.folder import plot_losses, read_log
from diffbit.apps.train.presets import train_config
from diffbit.models import Checkpoint, ModelConfig, load, save
from diffbit.models.checkpoint.names import shapes
from diffbit.quantize import read_scheme, read_weight
from diffbit.quantize import save as save_quantized

EVERY = 10  # steps per row of loss.csv


def shrink(run: Path, output: Path, root: Path, preset: str) -> None:
    checkpoint = Checkpoint(run)
    scheme = read_scheme(checkpoint)
    if scheme is None:
        save(load(checkpoint), output, dtype=torch.float16, tokenizer_from=run)
    else:
        weights = {name: read_weight(checkpoint, name) for name in shapes(checkpoint.config)}
        save_quantized(
            weights, output, checkpoint.config, scheme, method="qat", dtype=torch.float16, tokenizer_from=run
        )
    (output / "training.json").write_text(json.dumps(described(run, root, preset), indent=2) + "\n")
    write_losses(run, output / "loss.csv")
    init = json.loads((run / "training.json").read_text())["config"].get("init")
    if init is not None and (Path(init) / "log.jsonl").is_file():
        write_losses(Path(init), output / "loss_before.csv")


def described(run: Path, root: Path, preset: str) -> dict[str, Any]:
    """A run's training.json with its command. Paths below `root`, the folder of runs, are written as in train.sh."""
    about = json.loads((run / "training.json").read_text())
    config = about["config"]
    model = ModelConfig.from_dict(config["model"])
    usual = train_config(preset, model.attention, init=config.get("init"), qat=config.get("qat"))
    before = Path(config["init"]) if config.get("init") else None
    for name in ("tokenizer", "init", "distill"):
        if config.get(name) is not None:
            config[name] = place(Path(config[name]), root)
    command = f"diffbit train --preset {preset}"
    if before is None:
        command += f" --attention {model.attention}"
        command += f" --tokenizer {config['tokenizer']}" if config["tokenizer"] is not None else ""
    else:
        command += f" --init {config['init']}"
        command += f" --context {config['length']} --needles {config['needles']}" if config["needles"] else ""
    if (config.get("head_gain"), model.head_norm) != (usual.head_gain, usual.model.head_norm):
        command += f" --head-norm {'learned' if config.get('head_gain') else 'fixed' if model.head_norm else 'none'}"
    if config.get("qat"):
        command += f" --qat {config['qat']}"
    if config.get("distill"):
        command += f" --distill {config['distill']}"
    for name in ("steps", "batch_size", "learning_rate", "precision"):
        if config[name] != getattr(usual, name):
            command += f" --{name.replace('_', '-')} {config[name]}"
    command += f" --eval-every {config['eval_every']}" if config["eval_every"] else ""
    told = {"command": f"{command} -o {place(run, root)}", **about}
    if before is not None and (before / "log.jsonl").is_file():
        told["before"] = described(before, root, preset)
    return told


def place(path: Path, root: Path) -> str:
    """out/<folder of runs>/... for a run below the root, examples/... for a path in examples."""
    if path.resolve().is_relative_to(root.resolve()):
        return f"out/{root.resolve().name}/{path.resolve().relative_to(root.resolve())}"
    return "examples/" + path.resolve().as_posix().rpartition("/examples/")[2]


def write_losses(run: Path, path: Path) -> None:
    log = read_log(run)
    answers = any("answer_loss" in row for row in log)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        shares = [name for name in ("flips", "zeros") if name in log[0]]
        writer.writerow(["step", "loss", "eval_loss", *(["answer_loss"] if answers else []), *shares])
        for end in range(EVERY, len(log) + 1, EVERY):
            rows = log[end - EVERY : end]
            held_out = f"{rows[-1]['eval_loss']:.4f}" if "eval_loss" in rows[-1] else ""
            line = [rows[-1]["step"], f"{sum(row['loss'] for row in rows) / EVERY:.4f}", held_out]
            if answers:
                losses = [row["answer_loss"] for row in rows if "answer_loss" in row]
                line.append(f"{sum(losses) / len(losses):.4f}" if losses else "")
            line += [f"{sum(row[name] for row in rows) / EVERY:.6f}" for name in shares]
            writer.writerow(line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="holds folders made by `diffbit train`")
    parser.add_argument("output", type=Path, help="a new folder")
    parser.add_argument("--preset", default="pico", help="of the runs (default: pico)")
    arguments = parser.parse_args()
    runs = sorted(path.parent for path in arguments.runs.glob("*/training.json"))
    for run in runs:
        shrink(run, arguments.output / run.name, arguments.runs, arguments.preset)
    plot_losses({run.name: read_log(run) for run in runs}, arguments.output / "loss.png")


if __name__ == "__main__":
    main()
