"""What differential attention costs a training step on a GPU: models of one size, forward and backward.

    python benchmarks/gpu_step.py                       # some blocks of the 3B models of arXiv 2410.05258
    python benchmarks/gpu_step.py --compile             # through torch.compile, as `diffbit train --compile` runs them
    python benchmarks/gpu_step.py --layers 2 --lengths 4096 --json out/steps.json

The models have as many parameters: a plain Transformer of 2H heads, and DIFF versions 1 and 2 of H pairs. A step is
what train/ takes for one: float32 weights, bfloat16 autocast, cross entropy of the next tokens, gradients; without the
optimizer, which is the same for all. Versions 1 and 2 are run through torch's own attention and through the kernels of
models/triton_attention.py (on a CPU, which is there to try the script, through the former only). The steps of a length
are timed in turn; numbers are medians.

Rows, as gpu.py's, of which this is a part: the ratio to `plain` is the share of the plain Transformer's tokens a second
at that length, and its target is the paper's: not slower by more than 9 %. `peak_mib` is what a step takes above the
weights, where a tensor [S, S] would show.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from gpu_clock import sentence
from report import table

from diffbit.models import Decoder, ModelConfig, softmax, variant

TORCH, KERNEL = "torch", "kernel"
MODELS = (("softmax", TORCH), ("diff_v1", TORCH), ("diff_v1", KERNEL), ("diff_v2", TORCH), ("diff_v2", KERNEL))
PLAIN = MODELS[0]
LEAST = 0.91  # of the plain Transformer's tokens a second
VOCABULARY = 1024  # small: the head is the same for all
WARM, ROUNDS = 3, 9
Row = dict[str, Any]


@dataclass(frozen=True)
class Plan:
    """Sizes; `tokens` are those of a step."""

    hidden: int = 3072
    pairs: int = 12
    layers: int = 4
    lengths: tuple[int, ...] = (2048, 4096, 8192)
    tokens: int = 16384
    compile: bool = False

    @property
    def d(self) -> int:
        return self.hidden // self.pairs // 2

    def config(self, attention: str, length: int) -> ModelConfig:
        heads, kv_heads = variant(attention).Attention.equal_heads(self.pairs)
        return ModelConfig(
            vocab_size=VOCABULARY, hidden_size=self.hidden, num_layers=self.layers, num_heads=heads,
            num_kv_heads=kv_heads, head_dim=self.d, intermediate_size=self.hidden * 8 // 3,
            max_position=length, attention=attention, tie_embeddings=True,
        )  # fmt: skip


QUICK = Plan(128, 2, 1, (96,), 192)


def stepper(plan: Plan, attention: str, way: str, length: int, device: str) -> Callable[[], None]:
    """A call is a step."""
    torch.manual_seed(0)
    model = Decoder(plan.config(attention, length)).to(device)
    forward = torch.compile(model) if plan.compile else model
    ids = torch.randint(VOCABULARY, (max(1, plan.tokens // length), length + 1), device=device)

    def step() -> None:
        with patch.object(softmax, "KERNEL_DEVICES", (device,) if way == KERNEL else ()):
            with torch.autocast(device, torch.bfloat16):
                logits = forward(ids[:, :-1])  # [B, S, V]
            F.cross_entropy(logits.float().transpose(1, 2), ids[:, 1:]).backward()
            model.zero_grad()

    return step


def peak(step: Callable[[], None], device: str) -> int | None:
    """MiB that a step allocates above what is there before."""
    if device != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) >> 20


def milliseconds(step: Callable[[], None], device: str) -> float:
    if device != "cuda":
        start = time.perf_counter()
        step()
        return (time.perf_counter() - start) * 1e3
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    step()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def rows(device: str, plan: Plan) -> Iterator[Row]:
    for length in plan.lengths:
        batch = max(1, plan.tokens // length)
        steps: dict[tuple[str, str], Callable[[], None]] = {}
        found: dict[tuple[str, str], Row] = {}
        for attention, way in MODELS:
            if device != "cuda" and way == KERNEL:
                continue
            row: Row = {"part": "step", "model": attention, "how": way, "d": plan.d, "prompt": length, "batch": batch}
            found[attention, way] = row | {"missing": {}}
            try:
                step = stepper(plan, attention, way, length, device)
                for _ in range(WARM):
                    step()
                found[attention, way]["peak_mib"] = peak(step, device)
                steps[attention, way] = step
            except Exception as error:  # whatever torch or Triton cannot do here; the others are timed
                found[attention, way]["missing"] = {f"{attention}, {way}": sentence(error)}
        times: dict[tuple[str, str], list[float]] = {name: [] for name in steps}
        order = list(steps)
        for _ in range(ROUNDS):
            random.shuffle(order)
            for name in order:
                times[name].append(milliseconds(steps[name], device))
        for name, row in found.items():
            if name in steps:
                us = 1e3 * statistics.median(times[name])
                row |= {"us": round(us, 1), "train_tokens_per_s": round(batch * length / us * 1e6)}
                if name != PLAIN and PLAIN in steps:
                    ratio = round(1e3 * statistics.median(times[PLAIN]) / us, 3)
                    row["ratio"] = {"plain": ratio}
                    row["targets"] = {"plain": {"wanted": LEAST, "reached": ratio >= LEAST}}
            yield row
        steps.clear()
        step = None
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()


def page(found: Sequence[Row]) -> str:
    header = ("model", "how", "prompt", "us", "train_tokens_per_s", "peak_mib")
    lines = [[*(row.get(key) for key in header), row.get("ratio", {}).get("plain")] for row in found]
    return table([*header, "vs plain"], lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Plan()
    for name in ("hidden", "pairs", "layers", "tokens"):
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name))
    parser.add_argument("--lengths", type=int, nargs="+", default=default.lengths)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json", type=Path)
    options = vars(parser.parse_args())
    device, file = options.pop("device"), options.pop("json")
    if device == "cuda" and not torch.cuda.is_available():
        print("there is no CUDA device", file=sys.stderr)
        return 2
    found = []
    for row in rows(device, Plan(**options | {"lengths": tuple(options["lengths"])})):
        print(json.dumps(row), file=sys.stderr, flush=True)
        found.append(row)
    print(page(found))
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
