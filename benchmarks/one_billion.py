"""Peak memory and time of `diffbit quantize` and `diffbit export` on a synthetic model of 1.1 billion parameters.

    python benchmarks/one_billion.py --work /tmp/one_billion          # about 8 minutes and 6 GB of disk

Writes a diffllama of TinyLlama's shape with random bf16 weights in one shard per layer, then runs both commands as
a user would and reads each one's peak resident memory from the operating system (the figure that /usr/bin/time -v
prints as "Maximum resident set size"). Prints a JSON row per step.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from synthetic import ONE_BILLION, write_model, write_tokenizer


def measured(*command: str) -> dict[str, float | str]:
    """Run a diffbit command; its seconds and its peak resident memory in MiB."""
    start = time.monotonic()
    process = subprocess.Popen([sys.executable, "-m", "diffbit", *command], stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"diffbit {' '.join(command)} failed with {os.waitstatus_to_exitcode(status)}")
    seconds = round(time.monotonic() - start, 1)
    return {"command": command[0], "seconds": seconds, "peak_rss_mib": round(usage.ru_maxrss / 1024)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="an empty or new folder for the models")
    parser.add_argument("--weights", default="int4_g128", help="the weights' format (default: %(default)s)")
    work = (arguments := parser.parse_args()).work
    model, quantized, artifact = work / "model", work / "quantized", work / "artifact"
    if not model.exists():
        print(json.dumps({"parameters": write_model(model, ONE_BILLION)}), flush=True)
        write_tokenizer(model)
    weights = ("--weights", arguments.weights)
    quantize = measured("quantize", str(model), *weights, "-o", str(quantized), "--quiet", "--overwrite")
    print(json.dumps(quantize), flush=True)
    print(json.dumps(measured("export", str(quantized), "-o", str(artifact), "--quiet", "--overwrite")), flush=True)
    size = sum(file.stat().st_size for file in artifact.iterdir())
    print(json.dumps({"artifact_mib": round(size / 2**20)}))


if __name__ == "__main__":
    main()
