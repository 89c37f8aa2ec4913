"""gpu.py's part `model`: whole models on ONNX Runtime's CUDA provider, a row each.

First a small trained model (examples/pico) in fp16, its logits and tokens held against the CPU's. Then a differential
model of 1.1 billion parameters, random weights: decoding behind a context of 4096 tokens, and the prompt before it, by
the library's kernels and by the operators' bodies; beside it a plain Transformer of the same shape on ONNX Runtime's
own GroupQueryAttention. Everything is as a user has it (`diffbit quantize`, `diffbit export --target cuda`, `diffbit
bench --device cuda`), but for the Transformer's attention_bias, which is taken out: it says where padding is, there is
none, and with one GroupQueryAttention on CUDA leaves flash attention for a slower way, or refuses (ONNX Runtime before
1.28).

Artifacts are made by as many processes as there are processors for; each measurement is a process of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import numpy as np
import onnx
from clock import sentence
from report import Row, say
from synthetic import ONE_BILLION, SMALL, Shape, write_model, write_tokenizer

from diffbit.runtime import Session, bench
from diffbit.runtime.artifact import MANIFEST, MODEL, manifest_sha256

TRAINED = Path(__file__).resolve().parents[2] / "examples" / "pico" / "diff_v1"
DIFF, PLAIN = "DIFF", "Transformer"
LIBRARY, BODIES = "library", "bodies"
KINDS = {DIFF: "diffllama", PLAIN: "llama"}
WEIGHTS: dict[str, tuple[str, ...]] = {  # what `diffbit quantize` is told; fp16: it is not asked
    "fp16": (),
    "int4": ("--weights", "int4_g32"),
    "ternary": ("--weights", "ternary", "--override", "lm_head=int4_g32"),
}
ALL = "the models"
PREPARING = 150  # seconds
CLOSE = 0.05  # logits: nearer ones are the same token to fp16


@dataclass(frozen=True)
class Plan:
    shape: Shape = ONE_BILLION
    context: int = 4096
    new: int = 64
    weights: Sequence[str] = tuple(WEIGHTS)

    @property
    def cases(self) -> list[tuple[str, str, str]]:
        """Bodies last: they are slow."""
        runs = ((DIFF, LIBRARY), (PLAIN, LIBRARY), (DIFF, BODIES))
        return [(model, weights, how) for model, how in runs for weights in self.weights]


QUICK = Plan(SMALL, 64, 4, ("fp16",))


# ---- artifacts ------------------------------------------------------------------------------------------------------


def jobs() -> int:
    return max(1, (os.cpu_count() or 1) // 3)


def diffbit(*command: str) -> None:
    """Run a command on its share of the processors: with a thread for each of those, four took over five minutes."""
    environment = os.environ | {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs()))}
    line = [sys.executable, "-m", "diffbit", *command, "--quiet"]
    done = subprocess.run(line, capture_output=True, text=True, env=environment)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"exit status {done.returncode}"]
        raise RuntimeError(f"diffbit {command[0]}: {last[0]}")


def prepare(work: Path, plan: Plan) -> None:
    """Makes each artifact that is not there; where it cannot, WORK/MODEL_WEIGHTS.failed says why."""
    work.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(jobs()) as pool:
        list(pool.map(lambda model: checkpoint(work / model, KINDS[model], plan), KINDS))
        list(
            pool.map(
                lambda which: make(work, *which), [(model, weights) for weights in plan.weights for model in KINDS]
            )
        )


def checkpoint(folder: Path, kind: str, plan: Plan) -> None:
    if not (folder / "tokenizer.json").exists():
        write_model(folder, replace(plan.shape, kind=kind), plan.context)
        write_tokenizer(folder)


def make(work: Path, model: str, weights: str) -> None:
    artifact, source = work / f"{model}_{weights}", work / model
    unfinished = artifact.with_suffix(".unfinished")
    if artifact.exists():
        return
    try:
        if WEIGHTS[weights]:
            source = artifact.with_suffix(".quantized")
            diffbit("quantize", str(work / model), *WEIGHTS[weights], "-o", str(source), "--overwrite")
        diffbit("export", str(source), "-o", str(unfinished), "--target", "cuda", "--overwrite")
        if model == PLAIN:
            without_bias(unfinished)
        unfinished.rename(artifact)
    except Exception as error:
        artifact.with_suffix(".failed").write_text(sentence(error))


def without_bias(artifact: Path) -> None:
    """Take attention_bias, the last input of GroupQueryAttention in DiffAttention's body, out of an artifact, rename
    the op, so that its body runs beside the library's other kernels, and sign the manifest again."""
    path = artifact / MODEL
    model = onnx.load(str(path), load_external_data=False)
    (body,) = (function for function in model.functions if function.name == "DiffAttention")
    for node in model.graph.node:
        if node.op_type == body.name:
            node.op_type = "GroupedAttention"
    body.name = "GroupedAttention"
    for node in body.node:
        if node.op_type == "GroupQueryAttention":
            del node.input[7:]  # behind the lengths: tables that it does not have, positions, the bias
    onnx.save(model, str(path))
    manifest = json.loads((artifact / MANIFEST).read_text())
    content = path.read_bytes()
    manifest["files"][MODEL] = {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    manifest["sha256"] = manifest_sha256(manifest)
    (artifact / MANIFEST).write_text(json.dumps(manifest))


# ---- rows -----------------------------------------------------------------------------------------------------------


def small(work: Path, device: str, new: int = 32) -> Row:
    """The trained model's logits and greedy tokens on the device, held against the CPU's, which go into both."""
    row: Row = {"part": "model", "model": "pico", "weights": "fp16", "how": LIBRARY}
    artifact = work / "pico"
    work.mkdir(parents=True, exist_ok=True)
    diffbit("export", str(TRAINED), "-o", str(artifact), "--target", "cuda", "--overwrite")
    here, there = Session(artifact), Session(artifact, device=device)
    prompt = [[int(token) for token in np.random.default_rng(0).integers(0, 256, 40)]]
    pairs = [(here.prefill(prompt), there.prefill(prompt))]
    while len(pairs) < new:
        token = int(pairs[-1][0].argmax())
        pairs.append((here.step([[token]]), there.step([[token]])))
    expected, got = (np.array([pair[i].reshape(-1) for pair in pairs], np.float32) for i in range(2))  # [new, V]
    tokens = expected.argmax(-1), got.argmax(-1)
    rows = np.arange(new)
    # how much less likely the CPU finds the device's token
    lost = expected[rows, tokens[0]] - expected[rows, tokens[1]]
    error = float(np.abs(got - expected).max())
    row |= {"verdict": f"{(tokens[0] == tokens[1]).sum()} of {new} tokens are the CPU's", "error": error}
    if not there.native:
        row["wrong"] = "the library's kernels were not used"
    elif not float(lost.max()) <= CLOSE:
        row["wrong"] = f"{row['verdict']}; logits differ by up to {error:.3g}"
    return row


def speeds(artifact: Path, device: str, plan: Plan, model: str, weights: str, how: str) -> Row:
    row: Row = {"part": "model", "model": model, "weights": weights, "how": how, "context": plan.context}
    failed = artifact.with_suffix(".failed")
    if not artifact.exists():
        return row | {"wrong": failed.read_text() if failed.exists() else f"was not made in {PREPARING} seconds"}
    try:
        took = bench(artifact, plan.context - plan.new, plan.new, 1, device=device, native=how == LIBRARY)
    except Exception as error:
        return row | {"wrong": sentence(error)}
    if how == LIBRARY and not took["native"]:
        return row | {"wrong": "the library has no kernels for this device"}
    row |= {key: round(took[key], 1) for key in ("decode_tokens_per_s", "prefill_tokens_per_s")}
    return row | {"bytes_per_token": took["bytes_per_token"], "model_mib": round(took["model_bytes"] / 2**20)}


def with_ratios(rows: Sequence[Row]) -> list[Row]:
    """The rows, those of DIFF on the library with their tokens a second over the bodies' and the Transformer's."""
    speed = "decode_tokens_per_s"
    speeds = {(row["model"], row["weights"], row["how"]): row[speed] for row in rows if speed in row}

    def ratio(row: Row) -> dict[str, float]:
        others = {BODIES: (DIFF, row["weights"], BODIES), PLAIN: (PLAIN, row["weights"], LIBRARY)}
        return {name: round(row[speed] / speeds[other], 2) for name, other in others.items() if other in speeds}

    ours = DIFF, LIBRARY
    return [row | {"ratio": ratio(row)} if speed in row and (row["model"], row["how"]) == ours else row for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="a folder for the models")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="only the small model")
    parser.add_argument("--first", type=int, default=0, help="the case to begin with")
    parser.add_argument("--without", type=json.loads, default={}, help=f"'{ALL}': do not make them")
    parser.add_argument("--hung", type=json.loads, default={}, help="the same")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    plan = QUICK if arguments.quick else Plan()
    if arguments.small:
        say(case=0, of=["pico"])
        say(**small(arguments.work, arguments.device))
        return
    if arguments.first == 0 and ALL not in arguments.without | arguments.hung:
        say(case=0, of=[ALL])
        say(now=ALL, seconds=PREPARING)
        prepare(arguments.work, plan)
    for index, (model, weights, how) in enumerate(plan.cases):
        if index >= arguments.first:
            say(case=index, of=[model, weights, how])
            say(**speeds(arguments.work / f"{model}_{weights}", arguments.device, plan, model, weights, how))


if __name__ == "__main__":
    main()
