"""What benchmarks run and keep: commands of diffbit, llama_peer.py, files that are made once, runs of training."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from report import Row

ROW, BATCH = 256, 4  # tokens of a row, and rows of a pass, of the runs on a real model


def diffbit_command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "diffbit", *map(str, arguments)]


def run_diffbit(*arguments: object) -> None:
    print("diffbit", *arguments, file=sys.stderr)
    quietly(diffbit_command(*arguments))


def quietly(command: Sequence[str]) -> None:
    """Run a command, which has to succeed, without its results."""
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def llama_command(interpreter: Path, *arguments: object) -> list[str]:
    """llama_peer.py under an interpreter that has llama-cpp-python and gguf."""
    return [str(interpreter), str(Path(__file__).with_name("llama_peer.py")), *map(str, arguments)]


def last_row(command: Sequence[str]) -> Row:
    """The row of JSON that a program prints last."""
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def once(path: Path, make: Callable[[Path], object]) -> Path:
    """`path`, made under another name first if it is not there."""
    if not path.exists():
        print(f"making {path}", file=sys.stderr)
        unfinished = path.with_name(f"part-{path.name}")
        make(unfinished)
        unfinished.rename(path)
    return path


def trained(out: Path, start: Path, text: Path, steps: int, rate: float, *options: object) -> Path:
    """The folder of a finished run of `diffbit train` from `start`; one that was stopped goes on."""
    if not (out / "config.json").exists():
        goes_on = any((out / "checkpoints").glob("step-*"))
        run_diffbit(
            "train", "--preset", "base", "--init", start, "--context", ROW, "--batch-size", BATCH, "--steps", steps,
            "--learning-rate", rate, "--data", text, "--precision", "bf16", "--checkpoint-every", 25, "--quiet",
            *options, *(["--resume"] if goes_on else ["--overwrite"] if out.exists() else []), "-o", out,
        )  # fmt: skip
        for rest in ("checkpoints", "master"):
            shutil.rmtree(out / rest, ignore_errors=True)
    return out
