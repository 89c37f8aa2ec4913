"""Renews the lists of Python packages that CI installs by hash, on Linux on x86-64 with the Python that runs this.

    .venv/bin/python deploy/lock.py

locks/pip.txt        pip, and what builds packages that have no wheel
locks/python.txt     what `make develop` installs, but torch, whose file depends on the index
locks/arm64.txt      for the emulated ARM Python of tests/native/arm64.sh
locks/windows.txt    for tests/native/windows.sh
locks/ortmodel.txt   for tests/apps/hub/test_ortmodel.py
locks/openvino.txt   for tests/runtime/test_devices.py: another ONNX Runtime, which lies in a folder of its own
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNLISTED = ("diffbit", "torch", "nvidia-", "cuda-")
ARM64 = [part for system in ("28", "27", "17") for part in ("--platform", f"manylinux_2_{system}_aarch64")]
LISTS: dict[str, list[str]] = {
    "pip": ["pip", "setuptools", "wheel"],
    "python": [".[cpu,lab,serve,structured,hub,web,dev,docs]"],
    "arm64": [*ARM64, "--python-version=3.11", "--implementation=cp", "--only-binary=:all:", "--target=unused",
              "numpy", "onnxruntime", "tokenizers", "typer", "rich"],
    "windows": ["--platform=win_amd64", "--python-version=3.11", "--implementation=cp", "--only-binary=:all:",
                "--target=unused", "--no-deps", "onnxruntime"],
}  # fmt: skip
# optimum-onnx wants an older transformers; the rest comes from the environment
ORTMODEL = ["--no-deps", "optimum-onnx==0.1.0", "optimum==2.1.0", "transformers==4.57.6", "tokenizers<0.23",
            "huggingface-hub<1"]  # fmt: skip


def lock(name: str, *arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-"]
    done = subprocess.run([*command, *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    lines = []
    for package in json.loads(done.stdout)["install"]:
        what = package["metadata"]["name"].lower().replace("_", "-"), package["metadata"]["version"]
        if not what[0].startswith(UNLISTED):
            sha256 = package["download_info"]["archive_info"]["hashes"]["sha256"]
            lines.append(f"{'=='.join(what)} --hash=sha256:{sha256}\n")
    Path(ROOT, "deploy", "locks", f"{name}.txt").write_text("# made by deploy/lock.py\n" + "".join(sorted(lines)))


if __name__ == "__main__":
    for name, arguments in LISTS.items():
        lock(name, "--constraint", "constraints.txt", *arguments)
    lock("ortmodel", *ORTMODEL)
    lock("openvino", "--no-deps", "onnxruntime-openvino==1.24.1")
