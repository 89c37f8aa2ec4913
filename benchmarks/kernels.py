"""diffbit's kernels beside their peers: one table of time, bandwidth, rate and ratios.

    python benchmarks/kernels.py                                     # all of it, without peers beyond ONNX Runtime
    python benchmarks/kernels.py --llama ENV --bitnet CHECKOUT       # with llama.cpp's and bitnet.cpp's kernels
    python benchmarks/kernels.py --json out/kernels.json --markdown  # keep the rows; renew docs/performance.md
    python benchmarks/kernels.py --only ternary --threads 2
    python benchmarks/kernels.py --only caches                       # DiffAttention over each kind of KV cache

ENV is a Python environment with llama-cpp-python (pip install llama-cpp-python builds it for this CPU), CHECKOUT a
clone of github.com/microsoft/BitNet. Needs a C and a C++ compiler on the path.

What is measured. A contender is an ONNX Runtime session (or a peer's graph) of enough equal nodes with a weight or a
KV cache of their own that one run reads about 200 MB, so that they come from memory and not from a cache; `us` is the
time of a run over the number of nodes. From 128 tokens on arithmetic decides, and a contender has one node. The
contenders of a row are timed in turn, call by call, in one process; numbers are medians; threads that spin after their
run are stopped or waited for. Products are checked against numpy before they are timed. Percentages are of the best
read bandwidth (machine.c; the best of twelve ways, which then takes its turn among the contenders of each row), GOPS is
2*M*N*K over the time.

Rows, as JSON: read and peak (the machine), then one per op, shape N x K, tokens M and threads, with `ratio`: how many
times faster than each peer, and `targets`: wanted and reached. The rows "caches" are our own kinds of KV cache, all
timed in turn; `mb` is what one token reads, `ratio` how many times faster than our own float caches. The exit status
tells only whether everything ran.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from contenders import KINDS, Attention, OrtContender, nbits_graph, product_graph, repeat, ternary_as_two_bits
from machine import READ_BYTES, Machine, Reader, describe
from peers import Bitnet, BitnetProducts, Ggml, GgmlProducts, llama_environment
from report import command_line, kernel_tables, renew

from diffbit.quantize.formats import parse_format
from diffbit.quantize.methods.rtn import quantize as rtn
from diffbit.runtime import native

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (2048, 2048), (5632, 2048))  # N x K
TOKENS = (1, 128, 512)
CYCLE_BYTES = 200 << 20
CHECKED = 4  # tokens whose products are checked
FEWEST_ROUNDS, MOST_ROUNDS = 3, 40
PAIRS, HEAD_DIM = 16, 64
OURS, READ = "diffbit", "read"

# What to reach: key -> least value, by op, number of threads and whether one token is computed or many. "bandwidth" is
# a percentage, the others are ratios to a contender.
TARGETS: dict[tuple[str, str], Callable[[int], dict[str, float]]] = {
    ("ternary", "one"): lambda threads: {
        "bandwidth": 78 if threads == 1 else 90, "ORT 2-bit": 1.8, "ggml TQ2_0": 1.5, "bitnet.cpp I2_S": 1.3,
    },
    ("ternary", "many"): lambda threads: {"ORT 2-bit": 2.0, "ggml TQ2_0": 2.0},
    ("int4_g32", "one"): lambda threads: {"ORT 4-bit": 1.45 if threads == 1 else 1.3},
    ("int4_g32", "many"): lambda threads: {"ORT 4-bit": 1.3},
    ("attention fp32", "one"): lambda threads: {"bandwidth": 80, "body": 3.0, "two calls": 1.5},
    ("attention fp32", "many"): lambda threads: {"two calls": 1.5},
}  # fmt: skip
# Of a long context on two threads: how many times faster than our own float caches
CACHE_TARGETS = {"int8": {"fp32": 1.6, "fp16": 1.3}, "int4": {"fp32": 2.2, "fp16": 1.8}}
CACHE_ERRORS = {"int4": 0.3, "int4 + qk int8": 0.3, "int2": 0.9}  # of random numbers, which 2 bits hardly hold


@dataclass(frozen=True)
class Peers:
    """Who is here beside ONNX Runtime."""

    ggml: Ggml | None
    bitnet: Bitnet | None


@dataclass(frozen=True)
class Options:
    folder: Path
    seconds: float  # for the rounds of one row
    isas: list[str]
    spinning: bool
    cycle_bytes: int


@dataclass(frozen=True)
class Times:
    us: dict[str, float]  # median of a run, over its nodes
    noise: float  # the least quiet contender's median over its minimum: 1.0 on an idle machine

    def row(self, row: dict[str, Any], op: str, kind: str) -> dict[str, Any]:
        """`row` with our time, the ratios to all others, and the targets of `op`."""
        ours = self.us[OURS]
        others = {name: value for name, value in self.us.items() if name not in (OURS, READ)}
        if READ in self.us:
            row["read_gb_per_s"] = round(READ_BYTES / self.us[READ] / 1e3, 1)
            row["bandwidth_percent"] = round(100 * row["gb_per_s"] / row["read_gb_per_s"], 1)
        row["us"], row["peers_us"] = round(ours, 1), {name: round(value, 1) for name, value in others.items()}
        row["ratio"] = {name: round(value / ours, 2) for name, value in others.items()}
        row["noise"] = round(self.noise, 2)
        wanted = TARGETS.get((op, kind), lambda threads: {})(row["threads"])
        found = row["ratio"] | ({"bandwidth": row["bandwidth_percent"]} if "bandwidth_percent" in row else {})
        row["targets"] = {
            name: {"wanted": least, "reached": found[name] >= least} for name, least in wanted.items() if name in found
        }
        return row


def measure(contenders: dict[str, Any], counts: dict[str, int], seconds: float) -> Times:
    """Time all contenders, called in turn; counts: their numbers of nodes."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    slow = set()  # what would take the others' time gets the fewest rounds
    order = list(contenders)
    start = time.monotonic()
    for rounds in range(MOST_ROUNDS + 1):
        random.shuffle(order)  # nobody always runs after the same other one
        for name in order:
            contender = contenders[name]
            if rounds > FEWEST_ROUNDS and name in slow:
                continue
            begin = time.perf_counter()
            contender.run()
            took = time.perf_counter() - begin
            time.sleep(contender.settle)
            if rounds:
                times[name].append(took * 1e6)
            elif took > seconds / 10:  # the first round warms up
                slow.add(name)
        if rounds >= FEWEST_ROUNDS and time.monotonic() - start > seconds:
            break
    medians = {name: statistics.median(runs) for name, runs in times.items()}
    noise = max(medians[name] / min(times[name]) for name in contenders)
    return Times({name: medians[name] / counts[name] for name in contenders}, noise)


def close(contenders: dict[str, Any]) -> None:
    for contender in contenders.values():
        contender.close()
    contenders.clear()


# ---- products -------------------------------------------------------------------------------------------------------


def product_rows(
    op: str, shape: tuple[int, int], tokens: tuple[int, ...], threads: tuple[int, ...], peers: Peers, options: Options,
    readers: dict[int, Reader],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Rows of one format and shape."""
    n, k = shape
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(n, k, generator=generator) * 0.02
    weight = rtn(dense, parse_format(op))
    exact = weight.dequantize().numpy()
    packed = packed_for_peers(op, weight, exact, peers)
    generated = np.random.default_rng(0)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        for many in (False, True):
            wanted = [m for m in tokens if (m > 1) == many]
            if not wanted:
                continue
            models, weight_bytes = product_models(folder / str(many), op, weight, many, options)
            for count in threads:
                for m in wanted:
                    x = generated.standard_normal((m, k), np.float32)
                    group = product_contenders(weight, models, packed, x, count, peers, options)
                    check(op, group, x[:CHECKED] @ exact.T)
                    if not many:
                        group.contenders[READ], group.counts[READ] = readers[count], 1
                    times = measure(group.contenders, group.counts, options.seconds)
                    close(group.contenders)
                    row: dict[str, Any] = {
                        "op": op, "n": n, "k": k, "tokens": m, "threads": count, "isa": options.isas[0],
                    }  # fmt: skip
                    us = times.us[OURS]
                    if m == 1:
                        row["gb_per_s"] = round(weight_bytes / us / 1e3, 1)
                    row["gops"] = round(2 * m * n * k / us / 1e3, 1)
                    yield times.row(row, op, "many" if many else "one")


@dataclass
class Group:
    contenders: dict[str, Any]
    counts: dict[str, int]


def product_models(
    folder: Path, op: str, weight: Any, many: bool, options: Options
) -> tuple[dict[str, tuple[Path, int]], int]:
    """The ONNX models: name -> (path, nodes); and the bytes of our weight."""
    n, k = weight.shape
    models: dict[str, tuple[Path, int]] = {}

    def add(name: str, build: Callable[[Path], None], held_bytes: float | None = None) -> int:
        target = folder / name.replace(" ", "_")
        target.mkdir(parents=True)
        build(target)
        size = (target / "model.onnx.data").stat().st_size
        nodes = 1 if many else max(1, round(options.cycle_bytes / (held_bytes or size)))
        models[name] = (repeat(target, nodes, frozenset({"x"})), nodes)
        return size

    size = add(OURS, lambda target: product_graph(target, weight))
    if (n, k) == SHAPES[0] or n < 1024:  # it takes up to half a second a node to fold
        # The ternary body unpacks the weight to int8 when it is loaded, that of Int4MatMul rearranges it
        add("body", lambda target: product_graph(target, weight), held_bytes=n * k if op == "ternary" else None)
    if op == "ternary":
        codes, scale = ternary_as_two_bits(weight)
        add("ORT 2-bit", lambda target: nbits_graph(target, codes, scale, 2, 128))
    else:
        group = weight.format.group_size
        add("ORT 4-bit", lambda target: nbits_graph(target, weight.codes, weight.scale, 4, group))
    return models, size


def packed_for_peers(op: str, weight: Any, exact: Any, peers: Peers) -> dict[str, Any]:
    """The weight as other projects hold it: name -> bytes [N, row]."""
    packed = {}
    if peers.ggml:
        kind = "TQ2_0" if op == "ternary" else "Q4_0"
        packed[f"ggml {kind}"] = peers.ggml.quantize(kind, exact)
    if peers.bitnet and op == "ternary":
        packed["bitnet.cpp I2_S"] = peers.bitnet.pack(weight.codes.numpy())
    return packed


def product_contenders(
    weight: Any, models: dict[str, tuple[Path, int]], packed: dict[str, Any], x: Any, threads: int, peers: Peers,
    options: Options,
) -> Group:  # fmt: skip
    """All contenders of a row of products, made and not yet run."""
    (m, _), n = x.shape, weight.shape[0]
    found, counts = {}, {}
    for name, (path, nodes) in models.items():
        isas = options.isas if name == OURS else [None]
        for i, isa in enumerate(isas):
            label = name if not i else f"{name} {isa}"
            found[label] = OrtContender(
                path, nodes, threads, {"x": x}, {"y": ((m, n), np.float32)}, isa=isa, spinning=options.spinning
            )
            counts[label] = nodes
    for label, bytes_ in packed.items():
        nodes = counts[label] = 1 if m > 1 else max(1, round(options.cycle_bytes / bytes_.nbytes))
        if label.startswith("ggml"):
            kind = label.split()[1]
            found[label] = GgmlProducts(peers.ggml, kind, bytes_, x, nodes, threads, repack=kind == "Q4_0")
        else:
            kernel = 2 if m > 1 else 0  # the fastest of its three on each side
            found[label] = BitnetProducts(peers.bitnet, kernel, bytes_, x, nodes, threads, float(weight.scale))
    return Group(found, counts)


def check(op: str, group: Group, exact: Any) -> None:
    """Every contender computes the same product, up to its rounding of x (and of the weight, for Q4_0)."""
    for name, contender in group.contenders.items():
        contender.run()
        error = np.linalg.norm(contender.first()[:CHECKED] - exact) / np.linalg.norm(exact)
        allowed = 0.15 if name == "ggml Q4_0" else 0.03
        if not error < allowed:
            raise SystemExit(f"{name}, {op}: the product is {error:.3f} off, wanted less than {allowed}")


# ---- attention ------------------------------------------------------------------------------------------------------


def attention_rows(
    kv: str, kv_pairs: int, past: int, steps: int, threads: tuple[int, ...], options: Options,
    readers: dict[int, Reader],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """Rows of DiffAttention over a cache of type `kv`: one token after `past`, or a prompt of `steps` tokens."""
    layer = Attention(PAIRS, kv_pairs, HEAD_DIM, past, steps)
    total, one = past + steps, steps == 1
    past_cache = layer.past_cache(kv)
    kv_bytes = sum(array[:, :, :1].nbytes for array in past_cache.values()) * total
    nodes = max(1, round(options.cycle_bytes / kv_bytes)) if one else 1
    op = f"attention {kv}"
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        shared, two_call_shared = layer.feeds(), layer.two_call_feeds()
        paths = {}
        for what, build, names in (
            (OURS, lambda target: layer.graph(target, kv), frozenset(shared)),
            ("two calls", layer.two_call_graph, frozenset(two_call_shared)),
        ):
            (folder / what).mkdir()
            build(folder / what)
            paths[what] = repeat(folder / what, nodes, names)
        y = ((1, steps, 2 * PAIRS * HEAD_DIM), np.float32)
        presents, grown = {name: name.replace("past", "present") for name in past_cache}, layer.grown(kv, past_cache)
        for count in threads:
            contenders: dict[str, Any] = {}
            for i, isa in enumerate(options.isas):
                in_place = {name: (array, (presents[name],)) for name, array in grown.items()}
                label = OURS if not i else f"{OURS} {isa}"
                contenders[label] = OrtContender(paths[OURS], nodes, count, shared, {"y": y}, in_place, isa)
            if one or total <= 2048:  # a long prompt's scores fill the memory
                growing = {name: (array, ()) for name, array in past_cache.items()}
                outputs = {"y": y} | {presents[name]: (array.shape, array.dtype) for name, array in grown.items()}
                contenders["body"] = OrtContender(paths[OURS], nodes, count, shared, outputs, growing)
            if kv == "fp32":
                caches = {
                    "past_key": (grown["past_key"], ("present_key_0", "present_key_1")),
                    **{
                        f"past_half_{i}": (layer.half(grown["past_value"], i), (f"present_half_{i}",)) for i in range(2)
                    },
                }
                contenders["two calls"] = OrtContender(
                    paths["two calls"], nodes, count, two_call_shared, {"y": y}, caches
                )
            check_attention(contenders, kv)
            counts = dict.fromkeys(contenders, nodes)
            if one:
                contenders[READ], counts[READ] = readers[count], 1
            times = measure(contenders, counts, options.seconds)
            us = times.us[OURS]
            close(contenders)
            row: dict[str, Any] = {
                "op": op, "pairs": PAIRS, "kv_pairs": kv_pairs, "d": HEAD_DIM, "context": total, "tokens": steps,
                "threads": count, "isa": options.isas[0],
            }  # fmt: skip
            if one:
                row["gb_per_s"] = round(kv_bytes / us / 1e3, 1)
            else:  # two products per branch's scores and one with values twice as wide, over the causal half
                row["gops"] = round(4 * PAIRS * HEAD_DIM * steps * (steps + 1) / us / 1e3, 1)
            yield times.row(row, op if kv_pairs == PAIRS else "", "one" if one else "many")


def cache_rows(
    past: int, threads: tuple[int, ...], options: Options, readers: dict[int, Reader]
) -> Iterator[dict[str, Any]]:
    """A row for each kind of cache: one token after `past`, all kinds in turn."""
    layer = Attention(PAIRS, PAIRS, HEAD_DIM, past, 1)
    shared, y = layer.feeds(), ((1, 1, 2 * PAIRS * HEAD_DIM), np.float32)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        paths, buffers, bytes_read, counts = {}, {}, {}, {}
        for i, kv in enumerate(KINDS):
            buffers[kv] = layer.grown(kv, layer.past_cache(kv))
            bytes_read[kv] = sum(array.nbytes for array in buffers[kv].values())
            counts[kv] = max(1, round(options.cycle_bytes / bytes_read[kv]))
            folder = Path(name) / str(i)
            folder.mkdir()
            layer.graph(folder, kv)
            paths[kv] = repeat(folder, counts[kv], frozenset(shared))
        for count in threads:
            contenders: dict[str, Any] = {
                kv: OrtContender(
                    paths[kv], counts[kv], count, shared, {"y": y},
                    {name: (array, (name.replace("past", "present"),)) for name, array in buffers[kv].items()},
                    options.isas[0], options.spinning,
                )
                for kv in KINDS
            }  # fmt: skip
            check_caches(contenders)
            contenders[READ] = readers[count]
            times = measure(contenders, counts | {READ: 1}, options.seconds * len(KINDS))
            close(contenders)
            read = READ_BYTES / times.us[READ] / 1e3
            for kv in KINDS:
                us = times.us[kv]
                row: dict[str, Any] = {
                    "op": "caches", "kv": kv, "pairs": PAIRS, "d": HEAD_DIM, "context": past, "tokens": 1,
                    "threads": count, "isa": options.isas[0], "us": round(us, 1), "noise": round(times.noise, 2),
                    "mb": round(bytes_read[kv] / 1e6, 2), "gb_per_s": round(bytes_read[kv] / us / 1e3, 1),
                    "read_gb_per_s": round(read, 1), "ratio": {},
                }  # fmt: skip
                row["bandwidth_percent"] = round(100 * row["gb_per_s"] / read, 1)
                row["ratio"] = {other: round(times.us[other] / us, 2) for other in ("fp32", "fp16") if other != kv}
                wanted = CACHE_TARGETS.get(kv, {}) if count == 2 and past >= 8000 else {}
                row["targets"] = {
                    other: {"wanted": least, "reached": row["ratio"][other] >= least} for other, least in wanted.items()
                }
                yield row


def check_caches(contenders: dict[str, Any]) -> None:
    """Each kind gives what float32 gives, up to its rounding."""
    results = {}
    for name, contender in contenders.items():
        contender.run()
        results[name] = contender.first().copy()
    for name, result in results.items():
        error = np.linalg.norm(result - results["fp32"]) / np.linalg.norm(results["fp32"])
        if not error < CACHE_ERRORS.get(name, 0.02):
            raise SystemExit(f"attention over {name}: {error:.3f} off, wanted less than {CACHE_ERRORS.get(name, 0.02)}")


def check_attention(contenders: dict[str, Any], kv: str) -> None:
    """All agree with each other."""
    results = {}
    for name, contender in contenders.items():
        contender.run()
        results[name] = contender.first().copy()
    reference = results.get("body", results[OURS])
    for name, result in results.items():
        error = np.linalg.norm(result - reference) / np.linalg.norm(reference)
        if not error < 1e-2:
            raise SystemExit(f"{name}, attention {kv}: {error:.3f} off, wanted less than 0.01")


# ---- the whole ------------------------------------------------------------------------------------------------------


def rows(arguments: argparse.Namespace, peers: Peers, options: Options, machine: Machine) -> Iterator[dict[str, Any]]:
    threads = tuple(arguments.threads)
    quick, only = arguments.quick, arguments.only
    readers = {}
    for count in threads:
        row = machine.bandwidth(count, rounds=3 if quick else 9)
        readers[count] = machine.reader(row)
        yield row
        for isa in native.instruction_sets():
            if rate := machine.rates(isa, count):
                yield rate
    shapes = arguments.shapes or (((256, 256),) if quick else SHAPES)
    tokens = tuple(arguments.tokens or ((1, 4) if quick else TOKENS))
    every_isa = Options(**vars(options) | {"isas": [isa for isa in native.instruction_sets() if isa != "scalar"]})
    for op in ("ternary", "int4_g32"):
        if only in (None, op):
            for i, shape in enumerate(shapes):
                chosen = options if i or quick or arguments.isa else every_isa
                yield from product_rows(op, shape, tokens, threads, peers, chosen, readers)
    for op in ("int4_g64", "int4_g128"):
        if only == op or (only is None and not quick):
            yield from product_rows(op, shapes[0], tokens[:2], threads, peers, options, readers)
    if only in (None, "attention"):
        decode, prefill = ((63,), (64,)) if quick else ((2047, 8191), (1024, 4096))
        for kv, kv_pairs in (("fp32", PAIRS), ("fp16", PAIRS), ("int8", PAIRS), ("fp32", 4)):
            for past in decode:
                yield from attention_rows(kv, kv_pairs, past, 1, threads, options, readers)
    if only in (None, "attention", "caches"):
        for past in (64,) if quick else (1024, 8192):
            yield from cache_rows(past, threads, options, readers)
    if only in (None, "attention"):
        for steps in prefill:
            yield from attention_rows("fp32", PAIRS, 0, steps, threads, options, readers)


def shape_of(text: str) -> tuple[int, int]:
    """ "4096x14336" -> (4096, 14336)."""
    n, k = map(int, text.split("x"))
    return n, k


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("ternary", "int4_g32", "int4_g64", "int4_g128", "attention", "caches"))
    parser.add_argument("--shapes", type=shape_of, nargs="+", metavar="NxK", help="of the products (default: all five)")
    parser.add_argument("--tokens", type=int, nargs="+", metavar="M", help="of the products (default: 1 128 512)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="(default: 1 2)")
    parser.add_argument("--isa", help="the instruction set of our kernels (default: the best of this CPU)")
    parser.add_argument("--llama", type=Path, help="a Python environment with llama-cpp-python (default: this one)")
    parser.add_argument("--bitnet", type=Path, help="a checkout of github.com/microsoft/BitNet")
    parser.add_argument("--seconds", type=float, default=0.7, help="for the rounds of a row (default: %(default)s)")
    parser.add_argument("--no-spinning", action="store_true", help="ONNX Runtime's threads wait without spinning")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too, as one JSON document")
    parser.add_argument("--markdown", type=Path, nargs="?", const=Path("docs/performance.md"), metavar="FILE",
                        help="renew the tables in this page (default: %(const)s)")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small shapes and few rounds: does everything run?")
    arguments = parser.parse_args()

    sets = native.instruction_sets()
    if not sets:
        raise SystemExit("the native library is not installed; build it with `make build`")
    if arguments.isa and arguments.isa not in sets:
        raise SystemExit(f"--isa is {arguments.isa}, this CPU and this build have {', '.join(sets)}")
    about = {"machine": describe(), "instruction_sets": sets, "onnxruntime": onnxruntime.__version__,
             "command": command_line("kernels.py", sys.argv[1:])}  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = llama_environment(arguments.llama)
        if arguments.llama and not environment:
            raise SystemExit(f"{arguments.llama}: no Python environment with llama-cpp-python")
        ggml = Ggml(environment) if environment else None
        bitnet = Bitnet(arguments.bitnet, folder) if arguments.bitnet else None
        about["llama_cpp_python"] = ggml.version if ggml else "not measured (--llama)"
        about["bitnet_cpp"] = Bitnet.version(arguments.bitnet) if bitnet else "not measured (--bitnet)"
        print(json.dumps(about), flush=True)
        options = Options(folder, 0.05 if arguments.quick else arguments.seconds, [arguments.isa or sets[0]],
                          not arguments.no_spinning, (1 << 20) if arguments.quick else CYCLE_BYTES)  # fmt: skip
        measured = []
        for row in rows(arguments, Peers(ggml, bitnet), options, Machine(folder)):
            print(json.dumps(row), flush=True)
            measured.append(row)
    print("\n" + kernel_tables(about, measured))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"about": about, "rows": measured}, indent=1))
    if arguments.markdown:
        renew(arguments.markdown, "kernels", kernel_tables(about, measured))


if __name__ == "__main__":
    main()
