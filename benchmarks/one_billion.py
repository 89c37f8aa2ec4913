"""Peak memory and time of `diffbit quantize` and `diffbit export` on a synthetic model of 1.1 billion parameters.

    python benchmarks/one_billion.py --work /tmp/one_billion          # about 50 minutes of one core, 8 GB of disk
    python benchmarks/one_billion.py --work /tmp/two --layers 2       # a tenth of it, nearly the same peak

Writes a diffllama of TinyLlama's shape with random bf16 weights in one shard per layer, then runs the commands as a
user would: rounding to nearest, GPTQ over 16 windows of 512 tokens of the standard library's text, and the export of
what came out. Each one's peak resident memory is read from the operating system (the figure that /usr/bin/time -v
prints as "Maximum resident set size"). Prints a JSON row per step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from synthetic import ONE_BILLION, SMALL, write_model, write_tokenizer


def measured(*command: str) -> None:
    """Run a diffbit command and print its seconds and its peak resident memory in MiB."""
    start = time.monotonic()
    quietly = [sys.executable, "-m", "diffbit", *command, "--quiet", "--overwrite"]
    process = subprocess.Popen(quietly, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"diffbit {' '.join(command)} failed with {os.waitstatus_to_exitcode(status)}")
    row = {
        "command": f"diffbit {' '.join(command)}",
        "seconds": round(time.monotonic() - start, 1),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1),
        "peak_rss_mib": round(usage.ru_maxrss / 1024),
    }
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="an empty or new folder for the models")
    parser.add_argument("--weights", default="int4_g128", help="the weights' format (default: %(default)s)")
    parser.add_argument("--method", default="gptq", help="the calibrated method (default: %(default)s)")
    parser.add_argument("--windows", default="16", help="of 512 tokens to calibrate on (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=ONE_BILLION.layers, help="of the model (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that everything runs")
    work = (arguments := parser.parse_args()).work
    model, rounded, quantized, artifact = (work / name for name in ("model", "rounded", "quantized", "artifact"))
    if not model.exists():
        shape = SMALL if arguments.quick else replace(ONE_BILLION, layers=arguments.layers)
        print(json.dumps({"parameters": write_model(model, shape)}), flush=True)
        write_tokenizer(model)
    weights = ("--weights", arguments.weights)
    text = ("--calibrate", "stdlib", "--max-windows", arguments.windows, "--length", "512")
    measured("quantize", str(model), *weights, "-o", str(rounded))
    measured("quantize", str(model), *weights, "--method", arguments.method, *text, "-o", str(quantized))
    measured("export", str(quantized), "-o", str(artifact))
    size = sum(file.stat().st_size for file in artifact.iterdir())
    print(json.dumps({"artifact_mib": round(size / 2**20)}))


if __name__ == "__main__":
    main()
