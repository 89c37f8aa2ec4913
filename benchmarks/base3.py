"""What ternary weights at 1.6 bits in the file cost when they are loaded: seconds and memory, beside 2 bits.

    python benchmarks/base3.py --work /tmp/base3        # 132 million ternary weights: a few minutes, 1 GB of disk

Writes a diffllama of three of TinyLlama's layers with random weights, makes it ternary and exports it both ways. Each
artifact is then opened in a process of its own, with native kernels and with bodies. A JSON row per opening: bytes of
model.onnx.data, seconds of one core until the session stands, and resident MiB that the process has more than before:
at its peak while loading, and after a token.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from synthetic import ONE_BILLION, SMALL, write_model, write_tokenizer


def resident(field: str) -> int:
    """VmHWM, the peak so far, or VmRSS, now, of this process: MiB (Linux)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return round(next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024)


def opened(artifact: Path, bodies: bool) -> None:
    """Open an artifact and print its row."""
    from diffbit import runtime
    from diffbit.runtime.providers import onnxruntime

    onnxruntime()  # what it takes by itself is not counted
    before, start = resident("VmRSS"), time.process_time()
    session = runtime.Session(artifact, threads=1, native=not bodies)
    seconds, peak = time.process_time() - start, resident("VmHWM")
    session.prefill([[1]])
    row = {
        "storage": artifact.name,
        "kernels": "bodies" if bodies else "native",
        "bytes": (artifact / "model.onnx.data").stat().st_size,
        "load_cpu_s": round(seconds, 2),
        "peak_mib": peak - before,
        "after_mib": resident("VmRSS") - before,
    }
    print(json.dumps(row), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="an empty or new folder for the models")
    parser.add_argument("--quick", action="store_true", help="a tiny model, to see that everything runs")
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--bodies", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.open:
        return opened(arguments.open, arguments.bodies)
    model, quantized = arguments.work / "model", arguments.work / "quantized"
    diffbit = [sys.executable, "-m", "diffbit"]
    if not model.exists():
        write_model(model, SMALL if arguments.quick else replace(ONE_BILLION, layers=3, vocab=2048))
        write_tokenizer(model)
        subprocess.run(
            [*diffbit, "quantize", str(model), "--weights", "ternary", "-o", str(quantized), "--quiet"],
            check=True,
            stdout=subprocess.DEVNULL,
        )
    for storage in ("2bit", "base3"):
        artifact = arguments.work / storage
        if not artifact.exists():
            export = [*diffbit, "export", str(quantized), "-o", str(artifact), "--ternary-storage", storage, "--quiet"]
            subprocess.run(export, check=True, stdout=subprocess.DEVNULL)
        for bodies in ([], ["--bodies"]):
            again = [sys.executable, __file__, "--work", str(arguments.work), "--open", str(artifact), *bodies]
            subprocess.run(again, check=True)


if __name__ == "__main__":
    main()
