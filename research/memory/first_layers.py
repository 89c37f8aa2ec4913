"""A model larger than memory, its first layers: what quantize and export hold while they stream.

    python research/memory/first_layers.py WORK               # Motif-2-12.7B: 4 of 40 layers and both tables, 5.8 GB
    python research/memory/first_layers.py WORK --layers 2 --weights int4_g128

Random weights, real sizes. Each command is a process of its own. `peak_mib` is its largest resident size (VmHWM), which
counts pages of mapped files that the kernel could drop at any time; `anonymous_mib` what it allocated itself (RssAnon,
looked at every 20 ms). A row for each command, and what the whole model would take: a layer's share times its layers.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

from report import Row, say
from synthetic import MOTIF_2, write_model, write_tokenizer


def run(*arguments: str) -> Row:
    """Seconds and memory of a `diffbit` command; it has to succeed."""
    process = subprocess.Popen([sys.executable, "-m", "diffbit", *arguments], stdout=subprocess.DEVNULL)
    begin, most = time.monotonic(), {"VmHWM": 0, "RssAnon": 0}
    while process.poll() is None:
        try:
            lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
        except OSError:
            break
        for name, value in (line.split(":", 1) for line in lines):
            if name in most:
                most[name] = max(most[name], int(value.split()[0]))
        time.sleep(0.02)
    if process.wait():
        raise SystemExit(f"diffbit {' '.join(arguments)} failed")
    seconds = round(time.monotonic() - begin, 1)
    return {"seconds": seconds, "peak_mib": most["VmHWM"] >> 10, "anonymous_mib": most["RssAnon"] >> 10}


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--weights", default="int4_g32")
    parser.add_argument("options", nargs="*", help="more options of quantize, behind --")
    chosen = parser.parse_args()
    chosen.work.mkdir(parents=True, exist_ok=True)
    model, quantized, artifact = (chosen.work / name for name in (f"motif-{chosen.layers}", "quantized", "artifact"))
    if not (model / "tokenizer.json").exists():
        parameters = write_model(model, replace(MOTIF_2, layers=chosen.layers), positions=16384)
        write_tokenizer(model)
        say(parameters=parameters, bytes=size(model))
    more = ("--weights", chosen.weights, *chosen.options, "--overwrite")
    say(command="quantize", **run("quantize", str(model), *more, "-o", str(quantized)), bytes=size(quantized))
    say(command="export", **run("export", str(quantized), "-o", str(artifact), "--overwrite"), bytes=size(artifact))


if __name__ == "__main__":
    main()
