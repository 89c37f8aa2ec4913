"""Decoding at a long context: one model with its KV cache in float32, float16, int8, int4 and int2.

    python benchmarks/long_context.py --work DIR                       # DIR needs 1 GB; see the end for the time
    python benchmarks/long_context.py --work DIR --attention softmax   # the float cache is then GroupQueryAttention's
    python benchmarks/long_context.py --work DIR --json out/long_context.json --markdown

Writes a checkpoint of random weights (4 layers, hidden size 1024, 16 query sub-heads of 64 that share no keys, as in
the paper's models; 59 million parameters), quantizes it to int4_g32 with each cache, and exports it. At a context of
8192 the float32 cache is 8 times as large as everything else that a token reads (256 MiB, 31 MiB of weights), so this
measures what the cache costs: a model whose weights are larger beside its cache gains less.

All contenders are open in one process, each behind a prompt of --context tokens (prefill is timed once, in passing).
Then they take turns: a step to warm up and --steps timed ones, --rounds times; a pause in between, for threads that
spin after their run. Numbers are medians over the steps.

Rows, as JSON: one per number of threads and cache; `ratio` is against the float32 and the float16 cache, above 1 is
faster.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from machine import describe
from report import command_line, renew, table
from synthetic import write_tokenizer

from diffbit.export import export_artifact
from diffbit.models import Decoder, ModelConfig, save, variant
from diffbit.quantize import AttentionScheme, Scheme, parse_format, quantize_checkpoint
from diffbit.runtime import Session, native

CACHES = {
    "fp32": AttentionScheme(),
    "fp16": AttentionScheme(keys="fp16", values="fp16"),
    "int8": AttentionScheme(keys="int8", values="int8"),
    "int8, qk int8": AttentionScheme(keys="int8", values="int8", qk="int8"),
    "int4": AttentionScheme(keys="int4", values="int4"),
    "int4, qk int8": AttentionScheme(keys="int4", values="int4", qk="int8"),
    "int2": AttentionScheme(keys="int2", values="int2"),
}
BESIDE = ("fp32", "fp16")
TARGETS = {"int8": (1.6, 1.3), "int4": (2.2, 1.8)}  # against BESIDE, at least
PAUSE = 0.05  # seconds
PAIRS = 8


def prepare(work: Path, attention: str, caches: list[str], context: int, quick: bool) -> dict[str, Path]:
    """Artifacts by their cache; what is missing in `work` is made."""
    source = work / f"{attention}-{context}"
    if not (source / "tokenizer.json").exists():
        pairs, hidden = (2, 128) if quick else (PAIRS, 1024)
        heads, kv_heads = variant(attention).Attention.equal_heads(pairs)
        config = ModelConfig(
            vocab_size=512 if quick else 4096, hidden_size=hidden, num_layers=4, num_heads=heads,
            num_kv_heads=kv_heads, head_dim=hidden // pairs // 2, intermediate_size=hidden * 11 // 4,
            max_position=context, attention=attention,
        )  # fmt: skip
        torch.manual_seed(0)
        save(Decoder(config), source, dtype=torch.bfloat16)
        write_tokenizer(source)
    found = {}
    for cache in caches:
        found[cache] = artifact = source.with_name(f"{source.name}-{cache.replace(', ', '-').replace(' ', '')}")
        if not (artifact / "diffbit.json").exists():
            int4 = parse_format("int4_g32")
            scheme = Scheme(int4, attention=CACHES[cache], overrides=(("lm_head", int4),))
            quantize_checkpoint(source, work / "quantized", scheme, overwrite=True)
            export_artifact(work / "quantized", artifact)
    return found


def measure(artifacts: dict[str, Path], prompt: int, threads: int, rounds: int, steps: int) -> list[dict[str, Any]]:
    sessions, times, prefill = {}, {}, {}
    for cache, artifact in artifacts.items():
        sessions[cache] = session = Session(artifact, threads=threads)
        times[cache] = list[float]()
        ids = np.random.default_rng(0).integers(0, session.artifact.vocab_size, (1, prompt))
        started = time.perf_counter()
        session.prefill(ids)
        prefill[cache] = prompt / (time.perf_counter() - started)
    for _ in range(rounds):
        for cache, session in sessions.items():
            time.sleep(PAUSE)
            session.step([[1]])
            for _ in range(steps):
                started = time.perf_counter()
                session.step([[1]])
                times[cache].append(time.perf_counter() - started)
    medians = {cache: statistics.median(some) for cache, some in times.items()}
    rows = []
    for cache, session in sessions.items():
        row: dict[str, Any] = {
            "cache": cache,
            "threads": threads,
            "ms_per_token": round(1000 * medians[cache], 2),
            "decode_tokens_per_s": round(1 / medians[cache], 1),
            "prefill_tokens_per_s": round(prefill[cache]),
            "cache_mib": round(session.artifact.cache.nbytes(prompt) / 2**20, 1),
            "kv_bytes_per_1k_tokens": session.artifact.cache.bytes_per_1k_tokens,
            "ratio": {name: round(medians[name] / medians[cache], 2) for name in BESIDE if name in medians},
        }
        if cache in TARGETS:
            wanted = dict(zip(BESIDE, TARGETS[cache], strict=True))
            row["targets"] = {
                name: {"wanted": wanted[name], "reached": ratio >= wanted[name]} for name, ratio in row["ratio"].items()
            }
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def as_table(about: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    lines = []
    for row in rows:
        ratios = [f"{row['ratio'][name]:.2f}" if name in row["ratio"] else "-" for name in BESIDE]
        lines.append([row["cache"], row["threads"], f"{row['ms_per_token']:.2f}", f"{row['decode_tokens_per_s']:.1f}",
                      f"{row['cache_mib']:.1f}", *ratios, row["prefill_tokens_per_s"]])  # fmt: skip
    header = ("KV cache", "threads", "ms a token", "tokens/s", "cache MiB", "x fp32", "x fp16", "prefill tok/s")
    return (
        f"{about['machine']}; {about['instruction_set']}, ONNX Runtime {about['onnxruntime']}; {about['attention']}, "
        f"{about['model']}, a context of {about['context']}. `{about['command']}`\n\n" + table(header, lines) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the models")
    parser.add_argument("--attention", default="diff_v1", help="(default: %(default)s)")
    parser.add_argument("--caches", nargs="+", choices=tuple(CACHES), default=list(CACHES), help="(default: all)")
    parser.add_argument("--context", type=int, default=8192, help="tokens before the first step (default: %(default)s)")
    parser.add_argument("--threads", type=int, nargs="+", default=[2], help="(default: 2)")
    parser.add_argument("--rounds", type=int, default=9, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="timed in a round (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too, as one JSON document")
    parser.add_argument("--markdown", type=Path, nargs="?", const=Path("docs/attention.md"), metavar="FILE",
                        help="renew the table in this page (default: %(const)s)")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="a tiny model: does everything run?")
    arguments = parser.parse_args()

    if not native.instruction_sets():
        raise SystemExit("the native library is not installed; build it with `make build`")
    context, rounds, steps = (96, 1, 2) if arguments.quick else (arguments.context, arguments.rounds, arguments.steps)
    arguments.work.mkdir(parents=True, exist_ok=True)
    room = -(-(context + rounds * (steps + 1)) // 256) * 256
    artifacts = prepare(arguments.work, arguments.attention, arguments.caches, room, arguments.quick)
    about = {"machine": describe(), "instruction_set": native.instruction_sets()[0],
             "onnxruntime": onnxruntime.__version__, "attention": arguments.attention, "context": context,
             "model": "4 layers, hidden size 1024, int4_g32 weights" if not arguments.quick else "a tiny model",
             "command": command_line("long_context.py", sys.argv[1:])}  # fmt: skip
    print(json.dumps(about), flush=True)
    rows = [row for threads in arguments.threads for row in measure(artifacts, context, threads, rounds, steps)]
    text = as_table(about, rows)
    print("\n" + text)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1))
    if arguments.markdown:
        renew(arguments.markdown, f"long_context_{arguments.attention}", text)


if __name__ == "__main__":
    main()
