"""End to end: a differential model of 1.1 billion parameters beside llama.cpp with a plain llama of the same shape.

    python benchmarks/generate.py --work DIR --llama ENV                 # DIR needs 7 GB; about 5 minutes, then 4
    python benchmarks/generate.py --work DIR --llama ENV --json out/generate.json --markdown
    python benchmarks/generate.py --work DIR --llama ENV --shape motif-2.6b --only int4_g32    # of another shape
    python benchmarks/generate.py --work DIR --llama ENV --model CHECKPOINT --gguf FILE    # another model, as it is

Writes a diffllama of TinyLlama's shape with random weights, quantizes and exports it as a user would (ternary weights
with int4_g32 tables; int4_g32 throughout), and GGUF files with TQ2_0 and Q4_0 weights, both with Q4_0 embedding and
head. DIR keeps them for the next time. ENV is a Python environment with llama-cpp-python and gguf. With --model: that
checkpoint in int4_g32, int8 and float16, each with the default embedding and head, beside Q4_0, Q8_0 and F16 that
llama.cpp makes of FILE, the same model.

Every measurement is a process of its own: a prompt of 128 random tokens and 64 greedy tokens, once to warm up and once
for the clock; tokens per second of each half, and the process's peak resident memory (VmHWM, Python included on both
sides). Contenders take turns; numbers are medians over three rounds. The bodies (`diffbit run --no-native`) show what
the library is worth; they run once.

Rows, as JSON: one per model and number of threads, `ratio` being against llama.cpp with the matching format.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import onnxruntime
from commands import last_row, llama_command, once, quietly, run_diffbit
from machine import describe
from report import Row, add_outputs, command_line, row_table, say, targets, write_outputs
from synthetic import SHAPES, SMALL, Shape, write_model, write_tokenizer

from diffbit.runtime import bench, native

TABLES = ("--embedding", "int4_g32", "--head", "int4_g32")
FORMATS = ("ternary", "int4_g32")
GIVEN = ("int4_g32", "int8", "fp16")  # the formats of --model
PEER = {"ternary": "TQ2_0", "int4_g32": "Q4_0", "int8": "Q8_0", "fp16": "F16"}
SPEEDS, MEMORY, LOAD = ("decode_tokens_per_s", "prefill_tokens_per_s"), "peak_host_memory_bytes", "load_s"
# Least ratios to llama.cpp; its memory over ours, at least as much
TARGETS = {
    "ternary": {"its decode": 1.4, "its prefill": 1.5, "its memory": 1.0},
    "int4_g32": {"its decode": 1.3, "its prefill": 1.5, "its memory": 1.0},
}
GIVEN_TARGETS = {"its decode": 1.2, "its prefill": 1.0, "its memory": 1.0, "its load": 1.0}
ROUNDS = 3
COLUMNS = {
    "model": "model", "threads": "threads", "decode_tokens_per_s": "decode tok/s",
    "prefill_tokens_per_s": "prefill tok/s", "load_ms": "load ms", "peak_memory_mib": "peak MiB",
    "model_mib": "on disk MiB",
}  # fmt: skip


def prepare(work: Path, shape: Shape, formats: list[str], interpreter: Path | None) -> None:
    """Make what is missing in `work`."""
    model = work / "model"
    if not (model / "tokenizer.json").exists():
        write_model(model, shape)
        write_tokenizer(model)
    for format in formats:
        artifact(work, model, format, *TABLES)
        if interpreter:
            write = llama_command(interpreter, "write", PEER[format], json.dumps(asdict(shape)))
            once(work / f"{PEER[format]}.gguf", lambda out, write=write: quietly([*write, str(out)]))


def prepare_given(work: Path, model: Path, gguf: Path | None, formats: list[str], interpreter: Path | None) -> None:
    """The same of a checkpoint and a GGUF file that are there."""
    for format in formats:
        artifact(work, model, format)
        if interpreter:
            kind, quantize = PEER[format], llama_command(interpreter, "quantize", gguf)
            once(work / f"{kind}.gguf", lambda out, kind=kind, quantize=quantize: quietly([*quantize, str(out), kind]))


def artifact(work: Path, model: Path, format: str, *tables: str) -> None:
    """Quantize and export a model to work/FORMAT, unless it is there."""
    if (out := work / format).exists():
        return
    source, dtype = model, "fp16"
    if format != "fp16":
        source, dtype = work / f"{format}.quantized", "fp32"
        run_diffbit("quantize", model, "--weights", format, *tables, "-o", source, "--quiet", "--overwrite")
    run_diffbit("export", source, "-o", out, "--dtype", dtype, "--quiet")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the models")
    parser.add_argument("--llama", type=Path, help="a Python environment with llama-cpp-python and gguf")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="tinyllama-1.1b", help="(default: %(default)s)")
    parser.add_argument("--model", type=Path, help="a checkpoint to measure in the place of random weights")
    parser.add_argument("--gguf", type=Path, help="the same model for llama.cpp, in any of its formats")
    parser.add_argument("--only", choices=tuple(PEER))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="(default: 1 2)")
    add_outputs(parser, "research/cpu/README.md")
    parser.add_argument("--quick", action="store_true", help="a tiny model: does everything run?")
    arguments = parser.parse_args()

    if not native.instruction_sets():
        raise SystemExit("the native library is not installed; build it with `make build`")
    versions = (
        list(arguments.llama.glob("lib/python3*/site-packages/llama_cpp_python-*.dist-info")) if arguments.llama else []
    )
    if arguments.llama and not versions:
        raise SystemExit(f"{arguments.llama}: no Python environment with llama-cpp-python")
    interpreter = arguments.llama / "bin" / "python" if arguments.llama else None
    prompt, new = (8, 4) if arguments.quick else (128, 64)
    arguments.work.mkdir(parents=True, exist_ok=True)
    formats = [arguments.only] if arguments.only else list(GIVEN if arguments.model else FORMATS)
    if arguments.model:
        if interpreter and not arguments.gguf:
            raise SystemExit("--model beside llama.cpp: pass the same model as --gguf, or leave out --llama")
        prepare_given(arguments.work, arguments.model, arguments.gguf, formats, interpreter)
        TARGETS.update(dict.fromkeys(formats, GIVEN_TARGETS))
    else:
        prepare(arguments.work, SMALL if arguments.quick else SHAPES[arguments.shape], formats, interpreter)
    version = versions[0].stem.split("-")[1] if versions else None
    about = {"machine": describe(), "instruction_set": native.instruction_sets()[0],
             "onnxruntime": onnxruntime.__version__, "llama_cpp_python": version or "not measured (--llama)",
             "prompt_tokens": prompt, "new_tokens": new,
             "command": command_line(__file__, sys.argv[1:])}  # fmt: skip
    say(**about)

    measured = []
    for threads in arguments.threads:
        runs: dict[str, list[Row]] = {}
        for turn in range(1 if arguments.quick else ROUNDS):
            for format in formats:
                artifact = arguments.work / format
                runs.setdefault(format, []).append(bench(artifact, prompt, new, 1, threads=threads))
                if interpreter:
                    file = arguments.work / f"{PEER[format]}.gguf"
                    measure = llama_command(interpreter, "measure", file, prompt, new, 1, threads)
                    runs.setdefault(f"llama.cpp {PEER[format]}", []).append(last_row(measure))
                if not turn:  # fewer tokens: it may take seconds for each
                    body = bench(artifact, prompt, min(new, 8), 1, threads=threads, native=False)
                    runs.setdefault(f"{format} bodies", []).append(body)
        for row in rows(runs, threads):
            say(**row)
            measured.append(row)
    text = (
        f"{about['machine']}; {about['instruction_set']}, ONNX Runtime {about['onnxruntime']}, llama-cpp-python "
        f"{about['llama_cpp_python']}; {new} tokens after {prompt}. `{about['command']}`\n\n"
        f"{row_table(measured, COLUMNS)}\n"
    )
    print("\n" + text)
    write_outputs(arguments, {"about": about, "rows": measured}, {"generate": text})


def rows(runs: dict[str, list[Row]], threads: int) -> Iterator[Row]:
    """A row of medians for each model."""
    medians = {
        name: {key: statistics.median(run[key] for run in some) for key in (*SPEEDS, MEMORY, LOAD)}
        for name, some in runs.items()
    }
    for name, median in medians.items():
        row: Row = {"model": name, "threads": threads, **{key: round(median[key], 1) for key in SPEEDS}}
        row |= {"load_ms": round(median[LOAD] * 1000), "peak_memory_mib": round(median[MEMORY] / 2**20),
                "model_mib": round(runs[name][0]["model_bytes"] / 2**20)}  # fmt: skip
        if peer := medians.get(f"llama.cpp {PEER.get(name.split()[0])}"):
            decode, prefill = (round(median[key] / peer[key], 2) for key in SPEEDS)
            row["ratio"] = {"its decode": decode, "its prefill": prefill,
                            "its memory": round(peer[MEMORY] / median[MEMORY], 2),
                            "its load": round(peer[LOAD] / median[LOAD], 2)}  # fmt: skip
            row["targets"] = targets(row["ratio"], TARGETS.get(name, {}))
        yield row


if __name__ == "__main__":
    main()
