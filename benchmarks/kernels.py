"""diffbit's kernels on the CPU beside their peers: one table of time, bandwidth, rate and ratios.

    python benchmarks/kernels.py                                     # all of it, to the terminal
    python benchmarks/kernels.py --json out/kernels.json --markdown  # keep the rows; renew research/cpu
    python benchmarks/kernels.py --only caches --threads 2           # DiffAttention over each kind of KV cache

Needs a C compiler on the path. llama.cpp stands beside whole models: generate.py.

What is measured (clock.py). A contender is an ONNX Runtime session of enough equal nodes with a
weight or a KV cache of their own that one run reads about 200 MB, so that they come from memory and not from a cache;
`us` is the time of a run over the number of nodes. From 128 tokens on arithmetic decides, and a contender has one node.
The contenders of a row are timed in turn, call by call, in one process; threads that spin after their run are stopped
or waited for. What a contender computes is checked before it is timed. "of read" is the share of the bandwidth with
which memory can be read (machine.c), which takes its turn among the contenders; GOPS is 2*M*N*K over the time.

Rows, as JSON: one per op, shape N x K, tokens M and threads, with `ratio`: how many times faster than each peer, and
`targets`: wanted and reached. Rows "caches" are our own kinds of KV cache, all timed in turn, rows "grouped" heads that
share a noise head beside the same heads with it repeated, rows "gates" a mixture of heads, of which so many percent are
on, beside the node without gates, which computes all heads; `mb` is what one token reads. The exit status tells only
whether everything ran.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from clock import Contender, HostClock, Maker, measure
from contenders import KINDS, Attention, OrtContender, nbits_graph, product_graph, repeat
from machine import READ_BYTES, Reader, describe
from report import Row, add_outputs, command_line, judged, left_out, row_table, say, write_outputs

from diffbit.formats import parse_format
from diffbit.quantize.methods.rtn import quantize as rtn
from diffbit.runtime import native

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (2048, 2048), (5632, 2048))  # N x K
LOWBIT = (
    "int2_g32_s8",
    "int3_g32_s8",
    "int4_g32_s8",
    "int5_g32_s8",
    "int6_g32_s8",
    "nl4_g32_s8",
    "tcq2_g32_s8",
    "tcq3_g32_s8",
    "tcq4_g32_s8",
    "tcq5_g32_s8",
    "tcq6_g32_s8",
)  # beside int4_g32
GRIDS = ("bin_g128", "ternary_g128", "balanced2_g128")
FORMATS = ("ternary", "int4_g32", "int4_g64", "int4_g128", *GRIDS, *LOWBIT)
CYCLE_BYTES = 200 << 20
CHECKED = 4  # tokens whose products are checked
PAIRS, HEAD_DIM = 16, 64
GROUPED = (32, 8, 128)  # Motif-2-12.7B: pairs, pairs of keys and values, head_dim;
NOISE_RATIO = 4  # signal heads to a noise head
OURS, READ = "diffbit", "read"
Models = dict[str, tuple[Path, int, Any]]  # name -> path, nodes, the weight [N, K] as floats

# What to reach, by op, and whether one token is computed or many, on one and on more threads. "share" is a percentage
# of the read bandwidth, the others are ratios to a contender.
TARGETS: dict[tuple[str, str], tuple[dict[str, float], dict[str, float]]] = {
    ("ternary", "one"): ({"share": 78, "ORT 2-bit": 1.8},
                         {"share": 90, "ORT 2-bit": 1.8}),
    ("ternary", "many"): ({"ORT 2-bit": 2.0},) * 2,
    ("int4_g32", "one"): ({"ORT 4-bit": 1.45}, {"ORT 4-bit": 1.3}),
    ("int4_g32", "many"): ({"ORT 4-bit": 1.3},) * 2,
    **{(op, "one"): ({"int4_g32": round(0.9 * 4.5 / (int(op[3]) + 0.25), 2)},) * 2 for op in LOWBIT if op[0] == "i"},
    ("nl4_g32_s8", "one"): ({"int4_g32": 0.95},) * 2,
    **{(op, "many"): ({"int4_g32": 1.0},) * 2 for op in LOWBIT},
    ("attention", "one"): ({"share": 80, "body": 3.0, "two calls": 1.5},) * 2,
    ("attention", "many"): ({"two calls": 1.5},) * 2,
}  # fmt: skip
# A mixture of heads with keys and values of their own, on a long context: how many times faster than all heads
GATE_TARGETS = {1.0: 0.97, 0.75: 1.2, 0.5: 1.6}
# Of a long context on two threads: how many times faster than our own float caches
CACHE_TARGETS = {"int8": {"fp32": 1.6, "fp16": 1.3}, "int4": {"fp32": 2.2, "fp16": 1.8}}
# Of random numbers; others 0.02
CACHE_ERRORS = {"fp32": 1e-2, "int4": 0.2, "int4 + qk int8": 0.2, "int3": 0.35, "int2": 0.6}


@dataclass(frozen=True)
class Bench:
    folder: Path
    reader: Reader
    pool: ThreadPoolExecutor
    isa: str
    threads: Sequence[int]
    seconds: float  # for the rounds of a row
    cycle_bytes: int
    shapes: Sequence[tuple[int, int]]
    tokens: Sequence[int]
    pasts: Sequence[int]  # tokens before the one that is decoded
    prompts: Sequence[int]

    def turn(self, row: Row, makers: Mapping[str, Maker]) -> dict[str, float]:
        """Microseconds of each contender and of a read; a contender that fails is named in the row."""
        read = Contender([lambda: self.reader.run(self.pool, row["threads"])])
        times = measure(HostClock(), {**makers, READ: lambda: read}, self.seconds)
        row |= {"spread": times.spread, "missing": times.failed}
        if OURS in times.failed:
            raise SystemExit(f"{row}: {times.failed[OURS]}")
        return times.us

    def judge(self, row: Row, us: dict[str, float], nbytes: float | None, goals: Mapping[str, float]) -> Row:
        """`nbytes`: that must be read, where memory is what bounds."""
        if nbytes is not None:
            row["gb_per_s"] = round(nbytes / us[OURS] / 1e3, 1)
        bound = math.nan if nbytes is None else nbytes * us[READ] / READ_BYTES
        return judged(row, us[OURS], {name: us[name] for name in us if name not in (OURS, READ)}, bound, goals)


def timed(session: OrtContender, nodes: int) -> Contender:
    return Contender([session.run], nodes)


def close_to(actual: Any, exact: Any, most: float) -> None:
    error = np.linalg.norm(actual - exact) / np.linalg.norm(exact)
    if not error < most:
        raise ValueError(f"{error:.3f} off, wanted less than {most}")


# ---- products -------------------------------------------------------------------------------------------------------


def product_rows(bench: Bench, op: str, shape: tuple[int, int], tokens: Sequence[int]) -> Iterator[Row]:
    """Rows of one format and shape."""
    n, k = shape
    weight = rtn(torch.randn(n, k, generator=torch.Generator().manual_seed(0)) * 0.02, parse_format(op))
    for many in (False, True):
        with tempfile.TemporaryDirectory(dir=bench.folder) as name:
            models, weight_bytes = product_models(Path(name), bench, op, weight, many)
            for threads in bench.threads:
                for m in (m for m in tokens if (m > 1) == many):
                    yield product_row(bench, op, models, None if many else weight_bytes, m, threads)


def product_row(bench: Bench, op: str, models: Models, nbytes: int | None, m: int, threads: int) -> Row:
    n, k = models[OURS][2].shape
    x = np.random.default_rng(0).standard_normal((m, k), np.float32)

    def ort(name: str) -> Contender:
        path, nodes, exact = models[name]
        isa = bench.isa if name in (OURS, "int4_g32") else None
        session = OrtContender(path, nodes, threads, {"x": x}, {"y": ((m, n), np.float32)}, isa=isa)
        session.run()
        close_to(session.first()[:CHECKED], x[:CHECKED] @ exact.T, 0.03)
        return timed(session, nodes)

    makers: dict[str, Maker] = {name: partial(ort, name) for name in models}
    row: Row = {"op": op, "n": n, "k": k, "tokens": m, "threads": threads, "isa": bench.isa}
    us = bench.turn(row, makers)
    row["gops"] = round(2 * m * n * k / us[OURS] / 1e3, 1)
    goals = TARGETS.get((op, "one" if m == 1 else "many"), ({}, {}))[threads > 1]
    return bench.judge(row, us, nbytes, goals)


def product_models(folder: Path, bench: Bench, op: str, weight: Any, many: bool) -> tuple[Models, int]:
    """The ONNX models, and the bytes of our weight."""
    n, k = weight.shape
    models: Models = {}
    exact = weight.dequantize()

    def add(name: str, build: Callable[[Path], None], held_bytes: float | None = None, of: Any = exact) -> int:
        target = folder / name.replace(" ", "_")
        target.mkdir()
        build(target)
        size = (target / "model.onnx.data").stat().st_size
        nodes = 1 if many else max(1, round(bench.cycle_bytes / (held_bytes or size)))
        models[name] = (repeat(target, nodes, frozenset({"x"})), nodes, of.numpy())
        return size

    size = add(OURS, lambda target: product_graph(target, weight))
    if op in LOWBIT:
        four = rtn(exact, parse_format("int4_g32"))
        add("int4_g32", lambda target: product_graph(target, four), of=four.dequantize())
        return models, size
    if (n, k) == bench.shapes[0]:  # it takes up to half a second a node to fold
        # Bodies unpack weights of one and two bits to int8 when they are loaded; that of Int4MatMul rearranges them
        held = n * k if op in ("ternary", *GRIDS) else None
        add("body", lambda target: product_graph(target, weight), held_bytes=held)
    blocks = weight.format.blocks(weight)  # the same numbers
    scale = blocks.scale.contiguous()
    add(f"ORT {blocks.bits}-bit", lambda target: nbits_graph(target, blocks.codes, scale, blocks.bits, blocks.size))
    return models, size


# ---- attention ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreeing:
    """Makes contenders whose results differ from the first one's by at most `most`."""

    nodes: int
    threads: int
    most: float
    results: list[Any] = field(default_factory=list)

    def __call__(self, model: Path, feeds: Any, outputs: Any, caches: Any, isa: str | None = None) -> Contender:
        session = OrtContender(model, self.nodes, self.threads, feeds, outputs, caches, isa)
        session.run()
        self.results.append(session.first().copy())
        close_to(self.results[-1], self.results[0], self.most)
        return timed(session, self.nodes)


def attention_rows(bench: Bench, kv_pairs: int, past: int, steps: int) -> Iterator[Row]:
    """DiffAttention over a float cache: one token after `past`, or a prompt of `steps` tokens."""
    layer = Attention(PAIRS, kv_pairs, HEAD_DIM, past, steps)
    total, one = past + steps, steps == 1
    past_cache = layer.past_cache("fp32")
    grown = layer.grown("fp32", past_cache)
    presents = {name: name.replace("past", "present") for name in past_cache}
    kv_bytes = sum(array.nbytes for array in grown.values())
    nodes = max(1, round(bench.cycle_bytes / kv_bytes)) if one else 1
    shared, halves = layer.feeds(), layer.two_call_feeds()
    y = {"y": ((1, steps, 2 * PAIRS * HEAD_DIM), np.float32)}
    with tempfile.TemporaryDirectory(dir=bench.folder) as name:
        folders = Path(name) / "one", Path(name) / "two"
        for folder, build in zip(folders, (lambda at: layer.graph(at, "fp32"), layer.two_call_graph), strict=True):
            folder.mkdir()
            build(folder)
        ours, two = (repeat(at, nodes, frozenset(feeds)) for at, feeds in zip(folders, (shared, halves), strict=True))
        in_place = {name: (array, (presents[name],)) for name, array in grown.items()}
        growing = {name: (array, ()) for name, array in past_cache.items()}
        growing_outputs = y | {presents[name]: (array.shape, array.dtype) for name, array in grown.items()}
        caches = {"past_key": (grown["past_key"], ("present_key_0", "present_key_1"))} | {
            f"past_half_{i}": (layer.half(grown["past_value"], i), (f"present_half_{i}",)) for i in range(2)
        }
        for threads in bench.threads:
            agreeing = Agreeing(nodes, threads, 1e-2)
            makers: dict[str, Maker] = {OURS: partial(agreeing, ours, shared, y, in_place, bench.isa)}
            if one or total <= 2048:  # a long prompt's scores fill the memory
                makers["body"] = partial(agreeing, ours, shared, growing_outputs, growing)
            makers["two calls"] = partial(agreeing, two, halves, y, caches)
            row: Row = {"op": "attention", "kv": "fp32", "kv_pairs": kv_pairs, "context": total, "tokens": steps,
                        "threads": threads, "isa": bench.isa}  # fmt: skip
            us = bench.turn(row, makers)
            if not one:  # two products per branch's scores and one with values twice as wide, over the causal half
                row["gops"] = round(4 * PAIRS * HEAD_DIM * steps * (steps + 1) / us[OURS] / 1e3, 1)
            goals = TARGETS["attention", "one" if one else "many"][0] if kv_pairs == PAIRS else {}
            yield bench.judge(row, us, kv_bytes if one else None, goals)


def cache_rows(bench: Bench, past: int) -> Iterator[Row]:
    """A row for each kind of cache: one token after `past`, all kinds in turn."""
    layer = Attention(PAIRS, PAIRS, HEAD_DIM, past, 1)
    shared, y = layer.feeds(), {"y": ((1, 1, 2 * PAIRS * HEAD_DIM), np.float32)}
    buffers = {kv: layer.grown(kv, layer.past_cache(kv)) for kv in KINDS}
    nbytes = {kv: sum(array.nbytes for array in arrays.values()) for kv, arrays in buffers.items()}
    with tempfile.TemporaryDirectory(dir=bench.folder) as name:
        models = {}
        for i, kv in enumerate(KINDS):
            folder, nodes = Path(name) / str(i), max(1, round(bench.cycle_bytes / nbytes[kv]))
            folder.mkdir()
            layer.graph(folder, kv)
            models[kv] = repeat(folder, nodes, frozenset(shared)), nodes
        for threads in bench.threads:
            makers = {}
            agreeing = Agreeing(0, threads, 0.02)
            for kv, (path, nodes) in models.items():
                arrays = {name: (array, (name.replace("past", "present"),)) for name, array in buffers[kv].items()}
                contender = replace(agreeing, nodes=nodes, most=CACHE_ERRORS.get(kv, 0.02))
                makers[OURS if kv == "fp32" else kv] = partial(contender, path, shared, y, arrays, bench.isa)
            common: Row = {"op": "caches", "context": past, "threads": threads, "isa": bench.isa}
            us = bench.turn(common, makers)
            us["fp32"] = us[OURS]
            for kv in (kv for kv in KINDS if kv in us):
                times = {OURS: us[kv], READ: us[READ]} | {name: us[name] for name in ("fp32", "fp16") if name != kv}
                goals = CACHE_TARGETS.get(kv, {}) if threads == 2 and past >= 8000 else {}
                yield bench.judge(common | {"kv": kv, "mb": round(nbytes[kv] / 1e6, 2)}, times, nbytes[kv], goals)


def grouped_rows(bench: Bench, past: int) -> Iterator[Row]:
    """Signal heads that share a noise head beside the same heads with it repeated, one token after `past`."""
    pairs, kv_pairs, d = GROUPED
    layer = Attention(*GROUPED, past, 1, NOISE_RATIO)
    shared, y = layer.feeds(), {"y": ((1, 1, 2 * pairs * d), np.float32)}
    for kv in ("fp32", "fp16", "int8", "int4", "int8 + qk int8"):
        grown = layer.grown(kv, layer.past_cache(kv))
        nbytes = sum(array.nbytes for array in grown.values())
        nodes = max(1, round(bench.cycle_bytes / nbytes))
        arrays = {name: (array, (name.replace("past", "present"),)) for name, array in grown.items()}
        with tempfile.TemporaryDirectory(dir=bench.folder) as name:
            models = {}
            for contender in (OURS, "repeated"):
                (folder := Path(name) / contender).mkdir()
                layer.graph(folder, kv, repeated=contender != OURS)
                models[contender] = repeat(folder, nodes, frozenset(shared))
            for threads in bench.threads:
                agreeing = Agreeing(nodes, threads, 1e-3)
                makers = {who: partial(agreeing, at, shared, y, arrays, bench.isa) for who, at in models.items()}
                row: Row = {"op": "grouped", "kv": kv, "kv_pairs": kv_pairs, "context": past + 1, "threads": threads,
                            "isa": bench.isa, "mb": round(nbytes / 1e6, 2)}  # fmt: skip
                yield bench.judge(row, bench.turn(row, makers), nbytes, {"repeated": 1.3})


def gate_rows(bench: Bench, kind: str, kv_pairs: int, past: int) -> Iterator[Row]:
    """A row for each share of heads that are on, one token after `past`; kind: plain or differential."""
    layer, plain = Attention(PAIRS, kv_pairs, HEAD_DIM, past, 1), kind == "plain"
    heads, shared = PAIRS * (1 + plain), layer.feeds()
    y = {"y": ((1, 1, 2 * PAIRS * HEAD_DIM), np.float32)}
    order = np.random.default_rng(0).permutation(heads)
    gates = {share: (order < round(share * heads)).astype(np.float32).reshape(1, 1, heads) for share in GATE_TARGETS}
    for kv in ("fp16", "int8", "int4"):
        grown = layer.grown(kv, layer.past_cache(kv))
        nbytes = sum(array.nbytes for array in grown.values())
        nodes = max(1, round(bench.cycle_bytes / nbytes))
        arrays = {name: (array, (name.replace("past", "present"),)) for name, array in grown.items()}
        with tempfile.TemporaryDirectory(dir=bench.folder) as name:
            models = {}
            for gated in (False, True):
                (folder := Path(name) / str(gated)).mkdir()
                layer.graph(folder, kv, gates=gated, plain=plain)
                models[gated] = repeat(folder, nodes, frozenset(shared) | {"gates"})
            for threads in bench.threads:
                whole = Agreeing(nodes, threads, 1e-3)

                def mixture(
                    share: float, whole: Agreeing = whole, arrays: Any = arrays, models: Any = models
                ) -> Contender:
                    feeds = shared | {"gates": gates[share]}
                    session = OrtContender(models[True], whole.nodes, whole.threads, feeds, y, arrays, bench.isa)
                    session.run()
                    by_head = whole.results[0].reshape(heads, -1) * gates[share].reshape(heads, 1)
                    close_to(session.first().reshape(heads, -1), by_head, whole.most)
                    return timed(session, whole.nodes)

                makers: dict[str, Maker] = {"all heads": partial(whole, models[False], shared, y, arrays, bench.isa)}
                makers |= {OURS if share == 1 else f"{share}": partial(mixture, share) for share in GATE_TARGETS}
                common: Row = {"op": "gates", "kind": kind, "kv": kv, "kv_pairs": kv_pairs, "context": past + 1,
                               "threads": threads, "isa": bench.isa}  # fmt: skip
                us = bench.turn(common, makers)
                for share, goal in GATE_TARGETS.items():
                    times = {OURS: us[OURS if share == 1 else f"{share}"], READ: us[READ], "all heads": us["all heads"]}
                    goals = {"all heads": goal} if kv_pairs == PAIRS and past >= 8000 else {}
                    read = nbytes * share if kv_pairs == PAIRS else nbytes
                    row = common | {"on": round(100 * share), "mb": round(read / 1e6, 2)}
                    yield bench.judge(row, times, read, goals)


# ---- the whole ------------------------------------------------------------------------------------------------------


def rows(bench: Bench, only: str | None) -> Iterator[Row]:
    for op in FORMATS:
        if only in (None, op):
            whole = op in ("ternary", "int4_g32")
            for shape in bench.shapes if whole else bench.shapes[:1]:
                yield from product_rows(bench, op, shape, bench.tokens if whole else bench.tokens[:2])
    if only in (None, "attention"):
        for kv_pairs in (PAIRS, 4):
            for past in bench.pasts:
                yield from attention_rows(bench, kv_pairs, past - 1, 1)
        for steps in bench.prompts:
            yield from attention_rows(bench, PAIRS, 0, steps)
    if only in (None, "caches"):
        for past in bench.pasts:
            yield from cache_rows(bench, past)
    if only in (None, "grouped"):
        for past in bench.pasts:
            yield from grouped_rows(bench, past - 1)
    if only in (None, "gates"):
        for kind in ("plain", "differential"):
            for kv_pairs in (PAIRS, 4):
                yield from gate_rows(bench, kind, kv_pairs, bench.pasts[-1] - 1)


COLUMNS = {
    "kind": "attention", "kv": "cache", "on": "heads on", "n": "N", "k": "K",
    "kv_pairs": "kv pairs", "context": "context", "tokens": "M",
    "threads": "threads", "us": "us", "mb": "MB", "gb_per_s": "GB/s", "gops": "GOPS", "share_percent": "of read",
}  # fmt: skip


def tables(about: Row, rows: Sequence[Row]) -> str:
    parts = [
        f"{about['machine']}; ONNX Runtime {about['onnxruntime']}, {about['instruction_set']}. `{about['command']}`"
    ]
    for op in (*FORMATS, "attention", "caches", "grouped", "gates"):
        for title, many in (("one token", False), ("many tokens", True)):
            if chosen := [row for row in rows if row["op"] == op and (row.get("tokens", 1) > 1) == many]:
                parts.append(f"{op}, {title}\n\n{row_table(chosen, COLUMNS)}")
    return "\n\n".join([*parts, left_out(rows, COLUMNS)]).strip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=(*FORMATS, "attention", "caches", "grouped", "gates"))
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="(default: 1 2)")
    parser.add_argument("--isa", help="the instruction set of our kernels (default: the best of this CPU)")
    add_outputs(parser, "research/cpu/README.md")
    parser.add_argument("--quick", action="store_true", help="small shapes and few rounds: does everything run?")
    arguments = parser.parse_args()
    sets = native.instruction_sets()
    if not sets:
        raise SystemExit("the native library is not installed; build it with `make build`")
    if arguments.isa and arguments.isa not in sets:
        raise SystemExit(f"--isa is {arguments.isa}, this CPU and this build have {', '.join(sets)}")
    about = {
        "machine": describe(), "instruction_set": arguments.isa or sets[0], "onnxruntime": onnxruntime.__version__,
        "command": command_line(__file__, sys.argv[1:]),
    }  # fmt: skip
    say(**about)
    sizes: tuple[Any, ...] = (0.7, CYCLE_BYTES, SHAPES, (1, 128, 512), (2048, 8192), (1024, 4096))
    if arguments.quick:
        sizes = (0.02, 1 << 20, ((256, 256),), (1, 4), (64,), (64,))
    measured = []
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(max(arguments.threads)) as pool:
        folder = Path(name)
        isa = str(about["instruction_set"])
        for row in rows(Bench(folder, Reader(folder), pool, isa, arguments.threads, *sizes), arguments.only):
            say(**row)
            measured.append(row)
    text = tables(about, measured)
    print("\n" + text)
    write_outputs(arguments, {"about": about, "rows": measured}, {"kernels": text})


if __name__ == "__main__":
    main()
