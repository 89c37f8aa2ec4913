"""End to end on ONNX Runtime's CUDA provider: a differential model of 1.1 billion parameters, random weights.

Decoding behind a context of 4096 tokens, and the prompt before it, by the library's kernels and by the operators'
bodies; beside it a plain Transformer of the same shape on ONNX Runtime's own GroupQueryAttention. Everything is as a
user has it (`diffbit quantize`, `diffbit export --dtype fp16`, `diffbit bench --device cuda`), but for the
Transformer's attention_bias, which is taken out: it says where padding is, there is none, and with one
GroupQueryAttention on CUDA leaves flash attention for a slower way, or refuses (ONNX Runtime before 1.28).

Each measurement is a process of its own; artifacts are made by as many processes as there are processors for.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from gpu_clock import sentence
from synthetic import ONE_BILLION, SMALL, Shape, write_model, write_tokenizer

from diffbit.runtime import bench
from diffbit.runtime.artifact import MANIFEST, MODEL, manifest_sha256

Row = dict[str, Any]
DIFF, PLAIN = "DIFF", "Transformer"
LIBRARY, BODIES = "library", "bodies"
KINDS = {DIFF: "diffllama", PLAIN: "llama"}
WEIGHTS: dict[str, tuple[str, ...]] = {  # what `diffbit quantize` is told; fp16: it is not asked
    "fp16": (),
    "int4": ("--weights", "int4_g32"),
    "ternary": ("--weights", "ternary", "--override", "lm_head=int4_g32"),
}


@dataclass(frozen=True)
class Plan:
    shape: Shape = ONE_BILLION
    context: int = 4096
    new: int = 64
    repeats: int = 1  # behind one that warms up


QUICK = Plan(SMALL, 64, 4, 1)


def diffbit(*command: str) -> None:
    done = subprocess.run([sys.executable, "-m", "diffbit", *command, "--quiet"], capture_output=True, text=True)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise RuntimeError(f"diffbit {command[0]}: {last[0]}")


def make(work: Path, model: str, weights: str, plan: Plan) -> Path:
    """The artifact, made if it is not there; the checkpoint is."""
    artifact, source = work / f"{model}_{weights}", work / model
    if not artifact.exists():
        if WEIGHTS[weights]:
            quantized = work / f"{model}_{weights}.quantized"
            diffbit("quantize", str(source), *WEIGHTS[weights], "-o", str(quantized), "--overwrite")
            source = quantized
        diffbit("export", str(source), "-o", str(artifact), "--dtype", "fp16", "--overwrite")
    if model == PLAIN:
        without_bias(artifact)
    return artifact


def without_bias(artifact: Path) -> None:
    """Take attention_bias, GroupQueryAttention's last input, out of an artifact, and sign its manifest again."""
    path = artifact / MODEL
    model = onnx.load(str(path), load_external_data=False)
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            del node.input[7:]  # behind the lengths: tables that it does not have, positions, the bias
    onnx.save(model, str(path))
    manifest = json.loads((artifact / MANIFEST).read_text())
    content = path.read_bytes()
    manifest["files"][MODEL] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["sha256"] = manifest_sha256(manifest)
    (artifact / MANIFEST).write_text(json.dumps(manifest))


def prepared(work: Path, plan: Plan) -> dict[tuple[str, str], Path | str]:
    """(model, weights) -> its artifact, or why there is none."""
    work.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 1) // 3)) as pool:
        checkpoints = [pool.submit(checkpoint, work / model, kind, plan) for model, kind in KINDS.items()]
        for future in checkpoints:
            future.result()
        made = {
            (model, weights): pool.submit(make, work, model, weights, plan) for weights in WEIGHTS for model in KINDS
        }
        return {which: outcome(future) for which, future in made.items()}


def rows(work: Path, device: str, plan: Plan) -> Iterator[Row]:
    """A row for each model, format of weights, and way to run it."""
    artifacts = prepared(work, plan)
    for weights in WEIGHTS:
        found: dict[tuple[str, str], Row] = {}
        missing: dict[str, str] = {}
        for model, how in ((DIFF, LIBRARY), (DIFF, BODIES), (PLAIN, LIBRARY)):
            row: Row = {"part": "model", "model": model, "weights": weights, "how": how, "context": plan.context}
            artifact = artifacts[model, weights]
            why = artifact if isinstance(artifact, str) else speeds(artifact, device, plan, how == LIBRARY, row)
            if why is None:
                found[model, how] = row
            elif (model, how) == (DIFF, LIBRARY):
                yield row | {"wrong": why}
            else:
                missing[f"{model}, {weights}, {how}"] = why
        for (model, how), row in found.items():
            row["ratio"] = {
                name: round(row["decode_tokens_per_s"] / found[other]["decode_tokens_per_s"], 2)
                for name, other in ((BODIES, (DIFF, BODIES)), (PLAIN, (PLAIN, LIBRARY)))
                if (model, how) == (DIFF, LIBRARY) and other in found
            }
            yield row | {"missing": missing}


def speeds(artifact: Path, device: str, plan: Plan, native: bool, row: Row) -> str | None:
    """Measures the artifact into `row`; or says why it can't be."""
    try:
        took = bench(artifact, plan.context - plan.new, plan.new, plan.repeats, None, device, native)
    except Exception as error:
        return sentence(error)
    if native and not took["native"]:
        return "the library has no kernels for this device"
    row |= {key: round(took[key], 1) for key in ("decode_tokens_per_s", "prefill_tokens_per_s")}
    row |= {"bytes_per_token": took["bytes_per_token"], "model_mib": round(took["model_bytes"] / 2**20)}
    return None


def checkpoint(folder: Path, kind: str, plan: Plan) -> None:
    if not (folder / "tokenizer.json").exists():
        write_model(folder, plan.shape, kind, plan.context)
        write_tokenizer(folder)


def outcome(future: Future[Path]) -> Path | str:
    """What it made, or why it did not."""
    try:
        return future.result()
    except Exception as error:
        return sentence(error)


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the models of gpu.py's part `model`.")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    prepared(arguments.work, QUICK if arguments.quick else Plan())


if __name__ == "__main__":
    main()
