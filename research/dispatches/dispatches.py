"""What a step of decoding costs a GPU on ONNX Runtime's WebGPU provider: programs dispatched, and bytes read.

    python research/dispatches/dispatches.py --work DIR --markdown  # random layers of TinyLlama's sizes: the table
    python research/dispatches/dispatches.py ARTIFACT ... --json FILE   # these artifacts, and how far from the CPU

It counts, and times nothing, so a driver that computes on the CPU will do. With Debian's chromium:

    export LD_LIBRARY_PATH=/usr/lib/chromium VK_ICD_FILENAMES=/usr/lib/chromium/vk_swiftshader_icd.json
    export ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER=1

The provider logs each program that it starts. Models of one and of two layers are compared, so their difference is a
layer's share, and the rest is what a step takes once. The cache is bound in place, on the device. Bytes are those of
the weights and of the cache of CONTEXT tokens, read once: at B bytes a second no step takes less than bytes / B.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import numpy as np
import onnxruntime
import onnxruntime_ep_webgpu
from report import Row, add_outputs, say, table, write_outputs
from synthetic import ONE_BILLION, SMALL, Shape, write_tokenizer

from diffbit.runtime import Artifact

PROVIDER = "WebGpuExecutionProvider"
PROGRAM = re.compile(r'Starting program "([A-Za-z0-9]+)')
PROMPT, STEPS, CHUNK = 40, 64, 31  # CHUNK: prompt tokens at once; README.md says why
CONTEXT = 1024
BANDWIDTHS = 50, 100  # GB/s, of integrated GPUs
VARIANTS = {"diff_v1": "DIFF v1", "diff_v2": "DIFF v2", "softmax": "Transformer"}
QUICK = replace(SMALL, sub_heads=8)
WEIGHTS = ("float", "int8", "int4_g32", "ternary")


class Run:
    """An artifact on the GPU or the CPU, with a cache of full capacity on the device for `batch` rows."""

    def __init__(self, path: Path, gpu: bool, batch: int = 1) -> None:
        self.artifact = Artifact.open(path)
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 1  # the provider says at this level which programs it starts
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        if gpu:
            device = next(one for one in onnxruntime.get_ep_devices() if one.ep_name == PROVIDER)
            options.add_provider_for_devices([device], {})
        with logged() as self.log:
            self._session = onnxruntime.InferenceSession(path / self.artifact.graph, options)
        self._binding = self._session.io_binding()
        self._where = "webgpu" if gpu else "cpu"
        self._buffers: dict[str, Any] = {}
        for name, buffer in self.artifact.cache.buffers.items():
            capacity = self.artifact.context_length if buffer.in_place == "always" else 0
            empty = np.zeros((batch, *buffer.sizes(capacity)), buffer.dtype)
            self._buffers[name] = onnxruntime.OrtValue.ortvalue_from_numpy(empty, self._where, 0)
        self._mask = np.zeros((batch, 0), np.int64)

    def __call__(self, ids: np.ndarray, mask: np.ndarray | None = None) -> np.ndarray:
        """Append tokens [B, S], of which `mask` hides padding; returns the logits after the last, [B, V]."""
        binding = self._binding
        self._mask = np.concatenate((self._mask, np.ones_like(ids) if mask is None else mask), axis=1)
        positions = np.maximum(self._mask.cumsum(axis=1) - 1, 0)[:, -ids.shape[1] :]
        tokens = {"input_ids": ids, "attention_mask": self._mask, "position_ids": np.ascontiguousarray(positions)}
        binding.clear_binding_outputs()
        for name, array in tokens.items():
            binding.bind_cpu_input(name, array)
        binding.bind_output("logits", "cpu")
        in_place = {name: buffer.in_place == "always" for name, buffer in self.artifact.cache.buffers.items()}
        for name, value in self._buffers.items():
            binding.bind_ortvalue_input(f"past_key_values.{name}", value)
            if in_place[name]:
                binding.bind_ortvalue_output(f"present.{name}", value)
            else:
                binding.bind_output(f"present.{name}", self._where)
        with logged() as self.log:
            self._session.run_with_iobinding(binding)
        logits, *presents = binding.get_outputs()
        for (name, past), present in zip(self._buffers.items(), presents, strict=True):
            self._buffers[name] = past if in_place[name] else present
        return logits.numpy()[:, -1]

    def prompt(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        for start in range(0, ids.shape[1], CHUNK):
            part = slice(start, start + CHUNK)
            logits = self(ids[:, part].copy(), mask[:, part].copy())
        return logits

    @property
    def programs(self) -> Counter[str]:
        """Programs of the last call."""
        return Counter(PROGRAM.findall(self.log[0]))

    @property
    def on_cpu(self) -> Counter[str]:
        """Operators that ONNX Runtime gave to the CPU."""
        parts = self._session.get_provider_graph_assignment_info()
        return Counter(node.op_type for part in parts if part.ep_name != PROVIDER for node in part.get_nodes())


@contextmanager
def logged() -> Iterator[list[str]]:
    """Collect what the process writes to its outputs, below Python too."""
    text: list[str] = []
    with tempfile.TemporaryFile() as file:
        sys.stdout.flush()
        kept = {number: os.dup(number) for number in (1, 2)}
        for number in kept:
            os.dup2(file.fileno(), number)
        try:
            yield text
        finally:
            for number, before in kept.items():
                os.dup2(before, number)
                os.close(before)
            file.seek(0)
            text.append(file.read().decode(errors="replace"))


def compare(path: Path, batch: int) -> Row:
    """A prompt and STEPS greedy steps on the GPU and on the CPU: the largest difference of a logit relative to their
    spread, and how many tokens are the same. Rows after the first have padding in front, more from row to row."""
    gpu, cpu = Run(path, True, batch), Run(path, False, batch)
    length = PROMPT if batch == 1 else CHUNK  # GroupQueryAttention takes a batch's prompts in one call
    ids = np.random.default_rng(0).integers(0, gpu.artifact.vocab_size, (batch, length))
    mask = (np.arange(length) >= 7 * np.arange(batch)[:, None]).astype(np.int64)
    a, b = (run.prompt(ids, mask) for run in (gpu, cpu))
    error, same = float(np.abs(a - b).max()), 0
    for _ in range(STEPS):
        same += int((a.argmax(-1) == b.argmax(-1)).sum())
        a, b = (run(b.argmax(-1)[:, None]) for run in (gpu, cpu))
        error = max(error, float(np.abs(a - b).max()))
    return {
        "artifact": str(path),
        "programs": dict(gpu.programs),
        "on_cpu": dict(gpu.on_cpu),
        "error": error / gpu.artifact.golden.spread,
        "same": same / (batch * STEPS),
    }


def count(path: Path) -> tuple[int, int]:
    """Programs of a step, and bytes of weights and cache that it reads."""
    run = Run(path, gpu=True)
    for length in (3, 1):
        run(np.ones((1, length), np.int64))
    nbytes = run.artifact.bytes_per_token(CONTEXT)
    assert nbytes is not None
    return run.programs.total(), nbytes


def write_artifact(folder: Path, variant: str, weights: str, target: str, shape: Shape) -> Path:
    """A random model's artifact."""
    import torch

    from diffbit.export import export_artifact
    from diffbit.formats import parse_format
    from diffbit.models import Decoder, ModelConfig, save
    from diffbit.quantize import Scheme, quantize_checkpoint

    heads = (shape.sub_heads, shape.kv_sub_heads)  # so that all have as many softmaxes, and caches of one size
    if variant != "softmax":
        heads = shape.sub_heads // 2, shape.kv_sub_heads // 2 if variant == "diff_v1" else shape.kv_sub_heads
    config = ModelConfig.uniform(
        attention=variant, vocab_size=shape.vocab, hidden_size=shape.hidden, num_layers=shape.layers,
        num_heads=heads[0], num_kv_heads=heads[1], head_dim=shape.head_dim, intermediate_size=shape.intermediate,
        max_position=2048,
    )  # fmt: skip
    torch.manual_seed(0)
    source = folder / "model"
    save(Decoder(config), source)
    write_tokenizer(source)
    if weights != "float":
        table_format = parse_format("int8")
        scheme = Scheme(weights=parse_format(weights), embedding=table_format, head=table_format)
        quantize_checkpoint(source, folder / "quantized", scheme)
        source = folder / "quantized"
    return export_artifact(source, folder / "artifact", target=target)


def rows(work: Path, quick: bool) -> Iterator[Row]:
    cases = [("diff_v1", "float", "cpu")]
    cases += [(variant, weights, "webgpu") for variant in VARIANTS for weights in WEIGHTS]
    for variant, weights, target in cases:
        counts = []
        for layers in (1, 2):
            with tempfile.TemporaryDirectory(dir=work) as folder:
                layers_of = replace(QUICK if quick else ONE_BILLION, layers=layers)
                counts.append(count(write_artifact(Path(folder), variant, weights, target, layers_of)))
        (first, first_bytes), (second, second_bytes) = counts
        layer, layer_bytes = second - first, second_bytes - first_bytes
        once, once_bytes = first - layer, first_bytes - layer_bytes
        nbytes = once_bytes + ONE_BILLION.layers * layer_bytes
        yield {
            "variant": variant,
            "weights": weights,
            "target": target,
            "a_layer": layer,
            "once": once,
            "programs": once + ONE_BILLION.layers * layer,
            "megabytes": round(nbytes / 1e6, 1),
            **{f"at_{bandwidth}": round(bandwidth * 1e9 / nbytes, 1) for bandwidth in BANDWIDTHS},
        }


def markdown(rows: Sequence[Row]) -> str:
    header = ["", "weights", "exported for", "dispatches a layer", "and once a step", f"{ONE_BILLION.layers} layers"]
    header += ["MB a token", *(f"tokens/s at {bandwidth} GB/s" for bandwidth in BANDWIDTHS)]
    names = ("weights", "target", "a_layer", "once", "programs", "megabytes", *(f"at_{one}" for one in BANDWIDTHS))
    return table(header, [[VARIANTS[row["variant"]], *(row[name] for name in names)] for row in rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="*", type=Path)
    parser.add_argument("--batch", type=int, default=1, help="rows that artifacts are compared with, with padding")
    parser.add_argument("--work", type=Path, default=Path("out"), help="where models are made, 3 GB at a time")
    parser.add_argument("--quick", action="store_true", help="small layers, to see that everything runs")
    add_outputs(parser, "research/dispatches/README.md")
    chosen = parser.parse_args()
    onnxruntime.register_execution_provider_library("webgpu", onnxruntime_ep_webgpu.get_library_path())
    if chosen.artifacts:
        results = [compare(path, chosen.batch) for path in chosen.artifacts]
        for row in results:
            say(**row)
    else:
        chosen.work.mkdir(parents=True, exist_ok=True)
        results = []
        for row in rows(chosen.work, chosen.quick):
            results.append(row)
            say(**row)
    write_outputs(chosen, results, {} if chosen.artifacts else {"dispatches": markdown(results)})


if __name__ == "__main__":
    main()
