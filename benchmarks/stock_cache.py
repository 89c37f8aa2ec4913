"""Why a low-bit cache is not GroupQueryAttention's: ONNX Runtime's own int8 and int4 caches beside DiffAttention's.

    python benchmarks/stock_cache.py                       # examples/nano's Transformer and DIFF version 2; ~5 minutes
    python benchmarks/stock_cache.py --json out/stock_cache.json

GroupQueryAttention (1.31: k_quant_type, kv_cache_bit_width, k_scale) holds symmetric integers whose scales are inputs
of the graph, one for all keys or one a channel: they are found once, on a text, and later tokens are clipped to them.

Accuracy: perplexity of each model on held-out text with float keys and values, with GroupQueryAttention's (a scale a
channel and one a tensor, largest magnitude on other text of the same kind) in torch, once checked against the operator,
and with the scheme's of `diffbit quantize --kv`.

Speed: one decode step of one layer, 16 heads of 64 (plain attention, RoPE included), in turn in one process, over as
many copies of the layer as make the caches 256 MB. Rows as JSON; `ratio` above 1: DiffAttention is faster.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from contenders import OrtContender, repeat
from kernels import close, measure
from machine import describe
from torch import Tensor

from diffbit.calib_data import eval_windows
from diffbit.export.graph import MICROSOFT, Graph
from diffbit.models import Decoder
from diffbit.models.softmax import Arithmetic
from diffbit.ops import diff_attention
from diffbit.quantize import AttentionScheme, Scheme, apply, load
from diffbit.quantize.cache import attributes, buffers, operator
from diffbit.runtime import native

MODELS = ("examples/nano/softmax", "examples/nano/diff_v2")
HEADS, WIDTH, SLACK = 16, 64, 64
CYCLE = 256 << 20  # bytes of caches that a round reads


class Largest(Arithmetic):
    """Remembers the largest magnitude of each channel of keys and of values: [G, d]."""

    def __init__(self) -> None:
        self.key = self.value = torch.zeros(1)

    def logits(self, query: Tensor, key: Tensor, scale: float, branch: int) -> Tensor:
        self.key = torch.maximum(self.key, key.abs().amax((0, 2)))
        return super().logits(query, key, scale, branch)

    def mix(self, probabilities: Tensor, value: Tensor, head_dim: int) -> Tensor:
        self.value = torch.maximum(self.value, value.abs().amax((0, 2)))
        return super().mix(probabilities, value, head_dim)


class Stock(Arithmetic):
    """GroupQueryAttention's numbers; a scale for each channel, or the largest of them for all."""

    def __init__(self, seen: Largest, bits: int, channels: bool) -> None:
        top = 2 ** (bits - 1)
        self.low, self.high = -top, top - 1
        self.key, self.value = (
            (x if channels else x.max().expand_as(x))[:, None] / self.high for x in (seen.key, seen.value)
        )

    def rounded(self, x: Tensor, step: Tensor) -> Tensor:
        return (x / step).round().clamp(self.low, self.high) * step

    def logits(self, query: Tensor, key: Tensor, scale: float, branch: int) -> Tensor:
        return super().logits(query, self.rounded(key, self.key), scale, branch)

    def mix(self, probabilities: Tensor, value: Tensor, head_dim: int) -> Tensor:
        return super().mix(probabilities, self.rounded(value, self.value), head_dim)


@torch.inference_mode()
def loss(decoder: Decoder, windows: Any) -> float:
    """Mean over the predicted tokens, in nats."""
    total = count = 0.0
    for ids, target in zip(torch.from_numpy(windows.ids), torch.from_numpy(windows.target), strict=True):
        found = decoder(ids[None])[0, :-1].log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
        total, count = total - float(found[target[1:]].sum()), count + int(target[1:].sum())
    return total / count


def accuracy(path: str, windows: int) -> Iterator[dict[str, Any]]:
    decoder = load(path).eval()
    length = decoder.config.max_position
    held_out, other = (eval_windows("stdlib", path, length, windows, split=split) for split in ("eval", "calib"))
    layers = [block.self_attn for block in decoder.model.layers]
    exact = loss(decoder, held_out)
    seen = [Largest() for _ in layers]
    for layer, recorder in zip(layers, seen, strict=True):
        layer.arithmetic = recorder
    loss(decoder, other)
    row = {"model": path, "tokens": int(held_out.target[:, 1:].sum()), "perplexity": float(np.exp(exact))}
    for bits in (8, 4):
        for scales in ("channel", "tensor"):
            for layer, recorder in zip(layers, seen, strict=True):
                layer.arithmetic = Stock(recorder, bits, scales == "channel")
            change = float(np.expm1(loss(decoder, held_out) - exact))
            yield row | {"cache": f"GroupQueryAttention int{bits}, a scale a {scales}", "change": change}
        for layer in layers:
            layer.arithmetic = None
        low = apply(decoder, Scheme(attention=AttentionScheme(keys=f"int{bits}", values=f"int{bits}")))
        yield row | {"cache": f"DiffAttention int{bits}", "change": float(np.expm1(loss(low, held_out) - exact))}


def stock_graph(folder: Path, kv_heads: int, bits: int, values: dict[str, Any]) -> None:
    g = Graph(folder, "fp32")
    fed = {name: g.input(name, array.dtype, array.shape) for name, array in values.items()}
    kind = {16: np.float32, 8: np.int8, 4: np.uint8}[bits]
    cache = [1, kv_heads, "slots", WIDTH // 2 if bits == 4 else WIDTH]
    past = [g.input(f"past_{part}", kind, cache) for part in ("key", "value")]
    turned = [
        g.op("RotaryEmbedding", [fed[name], fed["position_ids"], fed["cos"], fed["sin"]], domain=MICROSOFT)
        for name in ("query", "key")
    ]
    inputs = [*turned, fed["value"], *past, fed["last"], fed["total"]]
    low = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": bits}
    made = g.op(
        "GroupQueryAttention", inputs + ([None] * 5 + [fed["k_scale"], fed["v_scale"]] if bits < 16 else []),
        domain=MICROSOFT, outputs=3, num_heads=HEADS, kv_num_heads=kv_heads, **(low if bits < 16 else {}),
    )  # fmt: skip
    g.output("y", made[0], np.float32, [1, 1, HEADS * WIDTH])
    for part, value in zip(("key", "value"), made[1:], strict=True):
        g.output(f"present_{part}", value, kind, cache)
    g.save()


def own_graph(folder: Path, kv_heads: int, scheme: AttentionScheme, values: dict[str, Any]) -> None:
    g, kind = Graph(folder, "fp32"), operator(scheme, branches=1)
    fed: dict[str, Any] = {name: g.input(name, array.dtype, array.shape) for name, array in values.items()}
    layer = buffers(scheme, kv_heads, WIDTH, "float32")
    shapes = {b.name: [1, *(dim if isinstance(dim, int) else f"{b.name}_slots" for dim in b.shape)] for b in layer}
    fed |= {f"past_{b.name}": g.input(f"past_{b.name}", b.dtype, shapes[b.name]) for b in layer}
    made = g.custom(
        diff_attention, [fed.get(name) for name in kind.inputs], outputs=len(kind.outputs), kind=kind, num_heads=HEADS,
        num_kv_heads=kv_heads, wide_value=0, scale=WIDTH**-0.5, norm_eps=0.0, window=scheme.window, **attributes(kind),
    )  # fmt: skip
    named = dict(zip(kind.outputs, made, strict=True))
    g.output("y", named["out"], np.float32, [1, 1, HEADS * WIDTH])
    for buffer in layer:
        g.output(f"present_{buffer.name}", named[f"present_{buffer.name}"], buffer.dtype, shapes[buffer.name])
    g.save()


def speed(past: int, kv_heads: int, threads: int, seconds: float, cycle: int) -> Iterator[dict[str, Any]]:
    random, total, capacity = np.random.default_rng(0), past + 1, -(-(past + SLACK) // 32) * 32
    angles = np.arange(capacity)[:, None] * 10000.0 ** (-np.arange(WIDTH // 2) / (WIDTH // 2))
    values: dict[str, Any] = {
        name: random.standard_normal((1, 1, heads * WIDTH), np.float32)
        for name, heads in (("query", HEADS), ("key", kv_heads), ("value", kv_heads))
    }
    values |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    values |= {"position_ids": np.array([[past]])}
    stock = {"last": np.array([past], np.int32), "total": np.array(total, np.int32)}
    scale = {name: np.full((1, kv_heads, 1, WIDTH), 0.03, np.float32) for name in ("k_scale", "v_scale")}
    own = {"past_length": np.array([past]), "attention_mask": np.ones((1, total), np.int64)}
    y = {"y": ((1, 1, HEADS * WIDTH), np.float32)}

    def noise(shape: tuple[int, ...], dtype: str) -> Any:
        if dtype.startswith("float"):  # of any size that gives numbers
            return (random.random(shape, np.float32) * 0.1).astype(dtype)
        return random.integers(0, 255, shape, np.uint8).view(dtype)

    contenders, counts = {}, {}
    with tempfile.TemporaryDirectory() as name:
        for index, bits in enumerate((16, 8, 4)):
            kind = {16: "float32", 8: "int8", 4: "uint8"}[bits]
            given = values | stock | (scale if bits < 16 else {})
            slots = (1, kv_heads, capacity, WIDTH // 2 if bits == 4 else WIDTH)
            caches = {f"past_{part}": (noise(slots, kind), (f"present_{part}",)) for part in ("key", "value")}
            format = {16: None, 8: "int8", 4: "int4"}[bits]
            scheme = AttentionScheme(keys=format, values=format)
            mine = {
                f"past_{b.name}": (noise((1, *sized(b.shape, capacity)), b.dtype), (f"present_{b.name}",))
                for b in buffers(scheme, kv_heads, WIDTH, "float32")
            }
            for label, fed, held in (
                (f"GroupQueryAttention {bits}", given, caches),
                (f"DiffAttention {bits}", values | own, mine),
            ):
                folder = Path(name) / f"{index}{label[0]}"
                folder.mkdir()
                if label.startswith("Group"):
                    stock_graph(folder, kv_heads, bits, fed)
                else:
                    own_graph(folder, kv_heads, scheme, fed)
                counts[label] = max(1, round(cycle / sum(array.nbytes for array, _ in held.values())))
                isa = native.instruction_sets()[0] if label.startswith("Diff") else None
                path = repeat(folder, counts[label], frozenset(fed))
                contenders[label] = OrtContender(path, counts[label], threads, fed, y, held, isa)
        times = measure(contenders, counts, seconds)
        close(contenders)
    for bits in (16, 8, 4):
        ours, theirs = times.us[f"DiffAttention {bits}"], times.us[f"GroupQueryAttention {bits}"]
        yield {
            "cache": "float32" if bits == 16 else f"int{bits}", "kv_heads": kv_heads, "context": past,
            "threads": threads, "group_query_us": round(theirs, 1), "diff_attention_us": round(ours, 1),
            "ratio": round(theirs / ours, 2), "noise": round(times.noise, 2),
        }  # fmt: skip


def sized(shape: tuple[int | str, ...], tokens: int) -> Iterator[int]:
    return (dim if isinstance(dim, int) else tokens if dim == "tokens" else tokens // 32 for dim in shape)


def check_stock(bits: int) -> float:
    """How far `Stock` is off what the operator computes, relative; on one prompt."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 4, 40, WIDTH) for _ in range(3))
    seen = Largest()
    scores = seen.logits(query, key, WIDTH**-0.5, 0).masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
    seen.mix(scores.softmax(-1), value, WIDTH)
    low = Stock(seen, bits, channels=True)
    scores = low.logits(query, key, WIDTH**-0.5, 0).masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf)
    wanted = low.mix(scores.softmax(-1), value, WIDTH).transpose(1, 2).flatten(2).numpy()
    with tempfile.TemporaryDirectory() as name:
        g, kind = Graph(Path(name), "fp32"), {8: np.int8, 4: np.uint8}[bits]
        fed = {n: x.transpose(1, 2).flatten(2).numpy() for n, x in (("q", query), ("k", key), ("v", value))}
        fed |= {f"past_{part}": np.zeros((1, 4, 0, WIDTH * bits // 8), kind) for part in ("k", "v")}
        fed |= {"last": np.array([39], np.int32), "total": np.array(40, np.int32)}
        fed |= {"ks": low.key[None].numpy(), "vs": low.value[None].numpy()}
        made = [g.input(n, x.dtype, x.shape) for n, x in fed.items()]
        out = g.op(
            "GroupQueryAttention", [*made[:7], *[None] * 5, *made[7:]], domain=MICROSOFT, outputs=3, num_heads=4,
            kv_num_heads=4, k_quant_type="PER_CHANNEL", v_quant_type="PER_CHANNEL", kv_cache_bit_width=bits,
        )  # fmt: skip
        g.output("y", out[0], np.float32, [1, 40, 4 * WIDTH])
        g.save()
        session = onnxruntime.InferenceSession(Path(name) / "model.onnx", providers=["CPUExecutionProvider"])
        found = session.run(["y"], fed)[0]
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help="checkpoints without DIFF version 1")
    parser.add_argument("--windows", type=int, default=64, help="of text, for each of both (default: %(default)s)")
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--kv-heads", type=int, nargs="+", default=[16, 4])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=30, help="for each table of times (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--quick", action="store_true", help="small: does everything run?")
    arguments = parser.parse_args()
    if not native.instruction_sets():
        raise SystemExit("the native library is not installed; build it with `make build`")
    windows, context, seconds, cycle = arguments.windows, arguments.context, arguments.seconds, CYCLE
    if arguments.quick:
        windows, context, seconds, cycle = 1, 100, 0.1, 1
    about = {
        "machine": describe(),
        "onnxruntime": onnxruntime.__version__,
        "instruction_set": native.instruction_sets()[0],
    }
    rows: list[dict[str, Any]] = [about | {f"check_int{bits}": check_stock(bits) for bits in (8, 4)}]
    print(json.dumps(rows[0]), flush=True)
    if max(rows[0]["check_int8"], rows[0]["check_int4"]) > 1e-2:
        raise SystemExit("GroupQueryAttention computes something else than what is measured here in torch")
    for path in arguments.models:
        for row in accuracy(path, windows):
            print(json.dumps(row), flush=True)
            rows.append(row)
    for kv_heads in arguments.kv_heads:
        for row in speed(context, kv_heads, arguments.threads, seconds, cycle):
            print(json.dumps(row), flush=True)
            rows.append(row)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
