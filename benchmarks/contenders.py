"""ONNX Runtime sessions as contenders of kernels.py: our kernels, their bodies, and stock operators.

A contender is one graph with `count` independent copies of a node, each with a weight (or a KV cache) of its own, so
that one run reads more bytes than the caches hold. The weights lie in one file, as in an artifact, which ONNX Runtime
maps. Inputs and outputs are bound once, to memory that stays: a run is `count` nodes and nothing else.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import onnxruntime
import torch
from caches import FIRST, WINDOW, low_bit_cache
from numpy.typing import NDArray

from diffbit.export.onnx_graph import DATA, MICROSOFT, MODEL, PAGE, OnnxGraph
from diffbit.formats import QTensor, QuantLinear
from diffbit.formats.packing import pack_bits
from diffbit.ops import diff_attention, diff_attention_body, kv_cache
from diffbit.runtime import native

Array = NDArray[Any]
# The kinds of cache that are measured; "+ qk" with the query in integers
KINDS = {
    "fp32": diff_attention.Signature(),
    "fp16": diff_attention.Signature(),
    "int8": diff_attention.Signature(8, 8),
    "int4": diff_attention.Signature(4, 4),
    "int3": diff_attention.Signature(3, 3),
    "int2": diff_attention.Signature(2, 2),
    "int8 + qk int8": diff_attention.Signature(8, 8, 8),
    "int4 + qk int8": diff_attention.Signature(4, 4, 8),
}


def product_graph(folder: Path, weight: QTensor) -> None:
    """x [M, K] times a weight as diffbit exports it."""
    rows, columns = weight.shape
    g = OnnxGraph(folder, "fp32")
    x = g.input("x", np.float32, ["M", columns])
    g.output("y", QuantLinear(weight).onnx(g, x, 1.0), np.float32, ["M", rows])
    g.save()


def nbits_graph(
    folder: Path, codes: torch.Tensor, scale: torch.Tensor, bits: int, block: int, dtype: str = "fp32"
) -> None:
    """The same with ONNX Runtime's own MatMulNBits at accuracy level 4: codes [N, K], scale [N, K/block]."""
    rows, columns = codes.shape
    g = OnnxGraph(folder, dtype)
    x = g.input("x", g.dtype, ["M", columns])
    packed = pack_bits(codes, bits).view(rows, columns // block, block * bits // 8)
    inputs = [x, g.initializer("codes", packed.numpy()), g.weight("scale", scale.numpy())]
    y = g.op("MatMulNBits", inputs, domain=MICROSOFT, K=columns, N=rows, bits=bits, block_size=block, accuracy_level=4)
    g.output("y", y, g.dtype, ["M", rows])
    g.save()


class Attention:
    """The numbers of an attention layer of `pairs` differential heads over `kv_pairs` of keys and values, d wide;
    `ratio` signal heads share a noise head."""

    def __init__(self, pairs: int, kv_pairs: int, d: int, past: int, steps: int, ratio: int = 1) -> None:
        self.pairs, self.kv_pairs, self.d, self.past, self.steps, self.ratio = pairs, kv_pairs, d, past, steps, ratio
        self.total = past + steps
        self.scale, self.norm_eps = d**-0.5, 1e-5
        random = np.random.default_rng(0)
        angles = np.arange(self.total)[:, None] * 10000.0 ** (-np.arange(d // 2) / (d // 2))
        self.cos, self.sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self.query, self.key, self.value = (
            random.standard_normal((1, steps, heads * d), np.float32)
            for heads in (pairs + pairs // ratio, 2 * kv_pairs, 2 * kv_pairs)
        )
        self.lam = random.random(pairs, np.float32)
        self.past_key, self.past_value = (
            random.standard_normal((1, 2 * kv_pairs, past, d), np.float32) for _ in range(2)
        )

    def past_cache(self, kv: str) -> dict[str, Array]:
        """The cache before the new tokens, of the kind `kv`, without room for more: input name -> buffer."""
        kind, cache = KINDS[kv], {}
        for name, exact, bits in (("key", self.past_key, kind.key_bits), ("value", self.past_value, kind.value_bits)):
            if bits == 16:
                cache[f"past_{name}"] = exact.astype(np.float16 if kv == "fp16" else np.float32)
            elif bits == 8:
                codes, steps = kv_cache.encode_rows(kv_cache.rotate(torch.from_numpy(exact)), bits)
                cache |= {f"past_{name}": codes.numpy(), f"past_{name}_scale": steps.numpy()}
            else:
                parts = low_bit_cache(torch.from_numpy(exact), bits, name)
                for suffix, part in zip(("", "_scale", "_recent"), parts, strict=True):
                    cache[f"past_{name}{suffix}"] = part.numpy()
        return cache

    def grown(self, kv: str, past: dict[str, Array]) -> dict[str, Array]:
        """The buffers of `past_cache` with room for the new tokens, as the present has them."""
        kind, buffers = KINDS[kv], {}
        for name, array in past.items():
            bits = kind.key_bits if "key" in name else kind.value_bits
            tokens = kv_cache.quantized_tokens(self.total, WINDOW) if bits < 8 else self.total
            slots = array.shape[2] if name.endswith("recent") else tokens
            buffers[name] = np.zeros((*array.shape[:2], slots, *array.shape[3:]), array.dtype)
            buffers[name][:, :, : array.shape[2]] = array
        return buffers

    def graph(self, folder: Path, kv: str, repeated: bool = False, gates: bool = False, plain: bool = False) -> None:
        """One DiffAttention node over a cache of the kind `kv`; `repeated`: a noise head is gathered for each
        signal head instead of shared; `gates`: with an input of gates; `plain`: the heads of pairs are heads of one
        softmax."""
        heads, kv_heads, d = 2 * self.pairs, 2 * self.kv_pairs, self.d
        kind = replace(KINDS[kv], gates=gates, branches=1 if plain else 2)
        g = OnnxGraph(folder, "fp32")
        f, i = np.float32, np.int64
        inputs = {
            "query": g.input("query", f, [1, "S", self.query.shape[2]]),
            "key": g.input("key", f, [1, "S", kv_heads * d]),
            "value": g.input("value", f, [1, "S", kv_heads * d]), "lambda": g.input("lambda", f, [self.pairs]),
            "past_length": g.input("past_length", i, [1]), "position_ids": g.input("position_ids", i, [1, "S"]),
            "cos": g.input("cos", f, ["P", d // 2]), "sin": g.input("sin", f, ["P", d // 2]),
            "attention_mask": g.input("attention_mask", i, [1, "T"]),
        }  # fmt: skip
        if gates:
            inputs["gates"] = g.input("gates", f, [1, "S", heads if plain else self.pairs])
        cache = {
            name: (array.dtype, [1, kv_heads, f"{name}_slots", *array.shape[3:]])
            for name, array in self.past_cache(kv).items()
        }
        inputs |= {name: g.input(name, dtype, shape) for name, (dtype, shape) in cache.items()}
        if repeated:
            group = self.ratio + 1
            starts = [pair // self.ratio * group for pair in range(self.pairs)]
            order = [i for p, at in enumerate(starts) for i in (at + p % self.ratio, at + self.ratio)]
            query = g.op("Reshape", [inputs["query"], g.const([0, 0, -1, d])])
            query = g.op("Gather", [query, g.const(order)], axis=2)
            inputs["query"] = g.op("Reshape", [query, g.const([0, 0, heads * d])])
        outputs = g.customs(
            diff_attention, [inputs.get(name) for name in kind.inputs], len(kind.outputs),
            lambda name: diff_attention_body.function(kind, name=name), kind,
            num_heads=heads if plain else self.pairs, num_kv_heads=kv_heads, branches=kind.branches,
            noise_ratio=1 if repeated else self.ratio, wide_value=int(not plain), scale=self.scale,
            norm_eps=0.0 if plain else self.norm_eps, key_bits=kind.key_bits,
            value_bits=kind.value_bits, query_bits=kind.query_bits, window=WINDOW, first=FIRST,
        )  # fmt: skip
        for name, value in zip(kind.outputs, outputs, strict=True):
            if name == "out":
                g.output("y", value, f, [1, "S", heads * d])
            elif name:
                dtype, shape = cache[name.replace("present", "past")]
                g.output(name, value, dtype, [*shape[:2], f"{name}_slots", *shape[3:]])
            else:
                value.name = ""
        g.save()

    def feeds(self) -> dict[str, Array]:
        """What all copies of the node share."""
        return {
            "query": self.query, "key": self.key, "value": self.value, "lambda": self.lam,
            "past_length": np.array([self.past]), "position_ids": np.arange(self.past, self.total)[None],
            "cos": self.cos, "sin": self.sin, "attention_mask": np.ones((1, self.total), np.int64),
        }  # fmt: skip

    # The way of FlashDiff (github.com/microsoft/unilm, Diff-Transformer): a kernel for equal widths of keys and values
    # runs once over the first halves of the values and once over the second. Here: ONNX Runtime's GroupQueryAttention.

    def two_call_graph(self, folder: Path) -> None:
        heads, kv_heads, d, group = 2 * self.pairs, 2 * self.kv_pairs, self.d, self.pairs // self.kv_pairs
        g = OnnxGraph(folder, "fp32")
        f, cache = np.float32, [1, kv_heads, "C", d]
        query, key = g.input("query", f, [1, "S", heads * d]), g.input("key", f, [1, "S", kv_heads * d])
        halves = [g.input(f"half_{i}", f, [1, "S", kv_heads * d]) for i in range(2)]
        past_key = g.input("past_key", f, cache)
        past_halves = [g.input(f"past_half_{i}", f, cache) for i in range(2)]
        lengths, total = g.input("lengths", np.int32, [1]), g.input("total", np.int32, [])
        cos, sin = g.input("cos", f, ["P", d // 2]), g.input("sin", f, ["P", d // 2])
        lam = g.input("lambda", f, [self.kv_pairs, 1, group, 1])
        outs = []
        for i, (half, past_half) in enumerate(zip(halves, past_halves, strict=True)):
            attention, present_key, present_half = g.ops(
                "GroupQueryAttention", [query, key, half, past_key, past_half, lengths, total, cos, sin],
                3, domain=MICROSOFT, num_heads=heads, kv_num_heads=kv_heads, do_rotary=1, scale=self.scale,
            )  # fmt: skip
            g.output(f"present_key_{i}", present_key, f, cache)
            g.output(f"present_half_{i}", present_half, f, cache)
            by_branch = g.op("Reshape", [attention, g.const([1, -1, self.kv_pairs, 2, group, d])])
            signal, noise = g.ops("Split", [by_branch], 2, axis=3, num_outputs=2)
            outs.append(g.op("Sub", [signal, g.op("Mul", [noise, lam])]))  # [1, S, kv_pairs, 1, group, d]
        wide = g.op("Concat", outs, axis=-1)
        ones = g.const(np.ones(2 * d), np.float32)
        normed = g.op("SimplifiedLayerNormalization", [wide, ones], axis=-1, epsilon=self.norm_eps, stash_type=1)
        g.output("y", g.op("Reshape", [normed, g.const([1, -1, heads * d])]), f, [1, "S", heads * d])
        g.save()

    def two_call_feeds(self) -> dict[str, Array]:
        group = self.pairs // self.kv_pairs
        by_pair = self.query.reshape(1, self.steps, self.kv_pairs, group, 2, self.d)
        halves = self.value.reshape(1, self.steps, self.kv_pairs, 2, self.d)
        return {
            # GroupQueryAttention gives a key head neighbouring query heads: all signal heads of a kv pair, then noise
            "query": by_pair.swapaxes(3, 4).reshape(1, self.steps, -1), "key": self.key,
            "half_0": halves[:, :, :, :1].repeat(2, 3).reshape(1, self.steps, -1),
            "half_1": halves[:, :, :, 1:].repeat(2, 3).reshape(1, self.steps, -1),
            "lengths": np.array([self.total - 1], np.int32), "total": np.array(self.total, np.int32),
            "cos": self.cos, "sin": self.sin, "lambda": self.lam.reshape(self.kv_pairs, 1, group, 1),
        }  # fmt: skip

    def half(self, values: Array, half: int) -> Array:
        """One half of the values [1, 2 kv_pairs, slots, d] for both sub-heads of each pair."""
        return values[:, half::2].repeat(2, 1)


def repeat(folder: Path, count: int, shared: frozenset[str]) -> Path:
    """Turn the model in `folder` into `count` copies of itself side by side; inputs in `shared` stay one.

    The rows of copy i's weights are those of the model, rotated by i: ONNX Runtime keeps one packed copy of equal ones.
    """
    model = onnx.load(str(folder / MODEL), load_external_data=False)
    graph, data = model.graph, folder / DATA
    external = [tensor for tensor in graph.initializer if tensor.data_location == onnx.TensorProto.EXTERNAL]
    kept = {tensor.name for tensor in graph.initializer} - {tensor.name for tensor in external} | shared | {""}
    places = [{entry.key: entry.value for entry in tensor.external_data} for tensor in external]
    content = np.fromfile(data, np.uint8)
    stride = -(-len(content) // PAGE) * PAGE
    first = [(list(field), field) for field in (graph.node, graph.input, graph.output)]
    with data.open("r+b") as file:
        for i in range(1, count):

            def renamed(name: str, i: int = i) -> str:
                return name if name in kept else f"{name}_{i}"

            for originals, field in first:
                for original in originals:
                    if field is not graph.node and original.name in kept:
                        continue
                    copy = field.add()
                    copy.CopyFrom(original)
                    copy.name = renamed(copy.name)
                    if field is graph.node:
                        copy.input[:] = map(renamed, original.input)
                        copy.output[:] = map(renamed, original.output)
            for original, place in zip(external, places, strict=True):
                begin = int(place["offset"])
                weight = content[begin : begin + int(place["length"])].reshape(original.dims[0], -1)
                file.seek(i * stride + begin)
                file.write(np.roll(weight, i, axis=0).data)
                copy = graph.initializer.add()
                copy.CopyFrom(original)
                copy.name = renamed(original.name)
                next(e for e in copy.external_data if e.key == "offset").value = str(i * stride + begin)
    onnx.save(model, str(folder / MODEL))
    return folder / MODEL


class OrtContender:
    """A session of a repeated model with everything bound.

    feeds: the shared inputs. caches: of copy i, input name -> (array, names of the outputs that are bound to the same
    memory); outputs: name of an output -> shape and type, memory of its own.
    """

    def __init__(
        self, model: Path, count: int, threads: int, feeds: dict[str, Array],
        outputs: dict[str, tuple[tuple[int, ...], Any]], caches: dict[str, tuple[Array, tuple[str, ...]]] | None = None,
        isa: str | None = None,
    ) -> None:  # fmt: skip
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        options.log_severity_level = 3
        # A pool that spins on after its run would take a core from the next contender
        options.add_session_config_entry("session.force_spinning_stop", "1")
        if isa:
            options.register_custom_ops_library(str(native.library()))
        with mock.patch.dict(os.environ, {native.ISA: isa or ""}):
            self.session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self.binding = self.session.io_binding()
        make, empty = onnxruntime.OrtValue.ortvalue_from_numpy, onnxruntime.OrtValue.ortvalue_from_shape_and_type
        self.feeds = {name: np.ascontiguousarray(array) for name, array in feeds.items()}
        for name, array in self.feeds.items():
            self.binding.bind_ortvalue_input(name, make(array))
        self.result: Any = None
        for i in range(count):
            suffix = f"_{i}" if i else ""
            for name, (array, outs) in (caches or {}).items():
                value = make(array.copy())
                self.binding.bind_ortvalue_input(name + suffix, value)
                for out in outs:
                    self.binding.bind_ortvalue_output(out + suffix, value)
            for name, (shape, dtype) in outputs.items():
                value = empty(shape, dtype)
                self.result = value if self.result is None else self.result
                self.binding.bind_ortvalue_output(name + suffix, value)

    def run(self) -> None:
        self.session.run_with_iobinding(self.binding)

    def first(self) -> Array:
        return self.result.numpy()
