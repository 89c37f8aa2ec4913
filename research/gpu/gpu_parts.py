"""The timed parts of gpu.py but `model`: a process that measures a part's cases one after the other.

    PYTHONPATH=. python research/gpu/gpu_parts.py PART LIBRARY --first 3 --without '{"two calls: SDPA cudnn": "hung"}'

gpu.py starts it, reads its lines, and starts it again behind a case, or without a contender, that broke it. What a
kernel of ours computes is held against float64 before it is timed, and what is wrong is not timed. `bound`: the time
that the fewest bytes take at the rate of a copy (read and written bytes), or the fewest operations at that of a bf16
product, both timed in turn with the contenders of the row. `ratio`: how many times faster ours is than a peer;
`targets`: wanted and reached.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import gpu_peers
import gpu_training
import torch
from clock import Clock, Contender, CudaClock, HostClock, Maker, Times, measure, sentence
from gpu_ops import Layer, Weights, flops
from gpu_peers import FOUR, TWO
from report import Row, judged, say, targets

from tests.native import cuda

Case = tuple[int, ...]
OURS, COPY, PRODUCT, LAYERS, FLEX = "diffbit", "copy", "product", "layers", "flex_attention"
CACHES = ("bf16", "int8", "int4")
OPS = {"ternary": 2, "int4_g32": 4}  # bits of their codes
# What copies (bytes read and written) and 8192^3 bf16 products reach on a good card. If a card stays far below, it is
# faulty or shared
CARDS = {"H200": (4300, 788), "H100 80GB HBM3": (3000, 798)}  # GB/s, TFLOP/s
HEALTHY = 0.95


@dataclass(frozen=True)
class Sizes:
    pairs: int = 16
    dims: tuple[int, ...] = (64, 128)
    contexts: tuple[int, ...] = (32768, 131072)
    prompts: tuple[int, ...] = (4096, 8192, 32768)
    shapes: tuple[tuple[int, int], ...] = ((14336, 4096), (4096, 4096), (4096, 14336))  # N x K
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 128, 1024)  # M
    training: tuple[int, ...] = (2048, 8192)
    lengths: tuple[int, ...] = (2048, 4096, 8192)
    plan: gpu_training.Plan = field(default_factory=gpu_training.Plan)
    copy_bytes: int = 1 << 30
    product: int = 8192
    cycle_bytes: int = 256 << 20  # that the weights of a contender take together
    seconds: float = 0.6  # for the rounds of a row


QUICK = Sizes(1, (64,), (96,), (100,), ((64, 128),), (1, 20), (40,), (32,), gpu_training.Plan(64, 2, 1, 64), 1 << 14,
              32, 1 << 14, 0.01)  # fmt: skip


@dataclass
class Bench:
    """Where and how large."""

    device: str  # "cuda", or "cpu" for the emulation
    clock: Clock
    kernels: cuda.Kernels
    sizes: Sizes
    without: Mapping[str, str] = field(default_factory=dict)  # contenders that broke the process before, and why

    def turn(self, row: Row, makers: Mapping[str, Maker]) -> Times:
        """Time the contenders in turn; who fails is in `missing` of the row, with the reason."""
        times = measure(self.clock, makers, self.sizes.seconds, self.without, lambda name: say(now=name))
        row |= {"spread": times.spread, "missing": dict(times.failed)}
        if times.uncaptured:
            row["not_captured"] = times.uncaptured
        return times

    def copy(self) -> Contender:
        """A copy from memory to memory; it reads and writes `copied` bytes."""
        source = torch.randint(-128, 127, (self.sizes.copy_bytes,), dtype=torch.int8, device=self.device)
        return Contender([partial(torch.empty_like(source).copy_, source)])

    @property
    def copied(self) -> int:
        return 2 * self.sizes.copy_bytes

    def product(self) -> Contender:
        """A product of bf16 matrices of `operations`."""
        n = self.sizes.product
        a, b = (torch.randn(n, n, device=self.device).to(torch.bfloat16) for _ in range(2))
        return Contender([partial(torch.mm, a, b, out=torch.empty_like(a))])

    @property
    def operations(self) -> float:
        return 2.0 * self.sizes.product**3

    def bound(self, us: Mapping[str, float], nbytes: float = 0, operations: float = 0) -> float:
        """Microseconds that so much takes at least, at the rates just measured."""
        copied = nbytes / self.copied * us.get(COPY, math.nan) if nbytes else 0.0
        multiplied = operations / self.operations * us.get(PRODUCT, math.nan) if operations else 0.0
        return max(copied, multiplied)


class Wrong(Exception):
    """What a kernel computes."""


def checked(row: Row, error: float, allowed: float) -> None:
    """Wrong, unless the error is allowed; it goes into the row."""
    row["error"], row["allowed"] = (error if math.isfinite(error) else str(error)), allowed
    if not error <= allowed:
        raise Wrong(f"an error of {error:.3g}, and {allowed:.3g} is allowed")


# ---- what the card can do -------------------------------------------------------------------------------------------


def rates(bench: Bench) -> Iterator[Row]:
    row: Row = {"part": "rates"}
    us = bench.turn(row, {COPY: bench.copy, PRODUCT: bench.product}).us
    row["copy_gb_per_s"] = round(bench.copied / us[COPY] / 1e3)
    row["tflops"] = round(bench.operations / us[PRODUCT] / 1e6, 1)
    name = torch.cuda.get_device_name() if bench.device == "cuda" else ""
    known = next((known for card, known in CARDS.items() if card in name), (math.nan, math.nan))
    ratios = {"copies seen": row["copy_gb_per_s"] / known[0], "products seen": row["tflops"] / known[1]}
    row["ratio"] = {name: round(ratio, 2) for name, ratio in ratios.items() if math.isfinite(ratio)}
    yield row | {"targets": targets(row["ratio"], dict.fromkeys(row["ratio"], HEALTHY))}


# ---- attention ------------------------------------------------------------------------------------------------------


def attention_of(bench: Bench, layers: Callable[[], list[Layer]], row: Row) -> Contender:
    """Our kernel, checked."""
    calls = [layer.call(bench.kernels) for layer in layers()]
    for call in calls:
        call()
    bench.clock.synchronize()
    for layer in layers():
        checked(row, *layer.error())
    return Contender(calls)


def attention_peers(layers: Callable[[], list[Layer]], causal: bool, tokens: int) -> dict[str, Maker]:
    """Every way with every kernel, one call set a layer. What prepares their inputs is made once, when it is wanted."""

    @cache
    def triples(way: str) -> list[list[gpu_peers.Triple]]:
        return [gpu_peers.WAYS[way](*layer.for_peers()) for layer in layers()]

    def attend_all(attend: gpu_peers.Attend, triples: list[gpu_peers.Triple], scale: float) -> list[torch.Tensor]:
        return [attend(*triple, scale, causal) for triple in triples]

    def make(way: str, attend: gpu_peers.Attend) -> Contender:
        scale = layers()[0].d ** -0.5
        return Contender([partial(attend_all, attend, some, scale) for some in triples(way)])

    kernels = gpu_peers.attends(tokens).items()
    return {f"{way}: {name}": partial(make, way, attend) for way in gpu_peers.WAYS for name, attend in kernels}


def each_cache(
    bench: Bench,
    same: Row,
    layers: Callable[[str], list[Layer]],
    causal: bool,
    tokens: int,
    more: dict[str, Maker],
    judge: Callable[[str, Row, Mapping[str, float]], tuple[float, dict[str, float]]],
) -> Iterator[Row]:
    """Our kernel over each kind of cache, and all ways of the peers over `tokens`, in turn. `same` is in every row;
    `judge` completes a row and returns its shortest time and its targets."""
    rows: dict[str, Row] = {kind: {"part": same["part"], "kv": kind} | same for kind in CACHES}
    makers: dict[str, Maker] = {
        kind: partial(attention_of, bench, partial(layers, kind), row) for kind, row in rows.items()
    }
    makers |= attention_peers(partial(layers, "bf16"), causal, tokens) | more
    shared: Row = {}
    us = bench.turn(shared, makers).us
    peers = {name: time for name, time in us.items() if name not in (*CACHES, *more)}
    failed = shared.pop("missing")
    for kind, row in rows.items():
        row |= shared
        if kind == "bf16":
            row["each_us"] = {name: round(time, 2) for name, time in peers.items()}
            row["missing"] = {name: why for name, why in failed.items() if name not in CACHES}
        if kind in failed:
            yield row | {"wrong": failed[kind]}
            continue
        others = gpu_peers.best(peers, TWO, FOUR) if kind == "bf16" else {"bf16": us["bf16"]} if "bf16" in us else {}
        bound, goals = judge(kind, row, us)
        yield judged(row, us[kind], others, bound, goals)


def decode(bench: Bench, d: int, context: int) -> Iterator[Row]:
    """One token behind many."""
    pairs = bench.sizes.pairs

    @cache
    def layers(kind: str) -> list[Layer]:  # two: the data of one is not in L2 when its turn comes again
        return [Layer(kind, pairs, d, context, 1, bench.device, seed) for seed in range(2)]

    def judge(kind: str, row: Row, us: Mapping[str, float]) -> tuple[float, dict[str, float]]:
        row["bytes"] = layers(kind)[0].cache_bytes
        row["gb_per_s"] = round(row["bytes"] / us[kind] / 1e3)
        targets = {"bf16": {"share": 85.0, TWO: 1.4, FOUR: 1.9}, "int8": {"bf16": 1.8}}
        return bench.bound(us, row["bytes"]), targets.get(kind, {})

    row: Row = {"part": "decode", "pairs": pairs, "d": d, "context": context}
    yield from each_cache(bench, row, layers, False, context, {COPY: bench.copy}, judge)


def prefill(bench: Bench, d: int, steps: int) -> Iterator[Row]:
    """A causal prompt in bf16."""
    pairs = bench.sizes.pairs
    work = flops(pairs, d, steps)
    layers = cache(lambda kind: [Layer(kind, pairs, d, 0, steps, bench.device)])

    def judge(kind: str, row: Row, us: Mapping[str, float]) -> tuple[float, dict[str, float]]:
        row["tflops"] = round(work / us[kind] / 1e6, 1)
        floats = {TWO: 1.0, FOUR: 1.0, "share": {64: 50.0, 128: 55.0}.get(d, 0.0)}
        return bench.bound(us, operations=work), floats if kind == "bf16" else {"bf16": 0.9}

    row: Row = {"part": "prefill", "pairs": pairs, "d": d, "prompt": steps}
    yield from each_cache(bench, row, layers, True, steps, {PRODUCT: bench.product}, judge)


# ---- products -------------------------------------------------------------------------------------------------------


class Shape:
    """Weights N x K of ours and of the peers, with which the rows of a shape are measured. Each is made when it is
    first asked for; what could not be made is not tried again."""

    def __init__(self, bench: Bench, n: int, k: int) -> None:
        def copies(bits: int) -> int:
            return max(2, -(-bench.sizes.cycle_bytes // (n * k * bits // 8)))

        def floats(bits: int) -> list[torch.Tensor]:
            weights = (torch.randn(n, k, device=bench.device) for _ in range(copies(bits)))
            return [weight.to(torch.bfloat16) for weight in weights]

        def stock(bits: int) -> gpu_peers.NBits:
            return gpu_peers.NBits(n, k, bits, copies(bits), bench.clock.stream, bench.device)

        self.sizes = n, k
        self._made: dict[str, Any] = {}
        self._makers: dict[str, Callable[[], Any]] = {
            **{op: partial(Weights, op, n, k, copies(bits), bench.device) for op, bits in OPS.items()},
            "torch bf16": lambda: floats(16),
            "bitsandbytes nf4": lambda: gpu_peers.BitsAndBytes(floats(4)),
            **{f"ORT {bits}-bit": partial(stock, bits) for bits in (2, 4)},
        }

    def __getitem__(self, name: str) -> Any:
        if name not in self._made:
            try:
                self._made[name] = self._makers[name]()
            except Exception as error:
                self._made[name] = RuntimeError(sentence(error))
        if isinstance(self._made[name], RuntimeError):
            raise self._made[name]
        return self._made[name]


_shape: list[Shape] = []  # the last one: a shape's rows come one after the other


def products(bench: Bench, n: int, k: int, m: int) -> Iterator[Row]:
    """Ternary and int4 weights of a shape, and the peers', times m rows of activations."""
    if not _shape or _shape[0].sizes != (n, k):
        _shape[:] = [Shape(bench, n, k)]
    (weights,) = _shape
    x = torch.randn(m, k, device=bench.device).to(torch.float16)
    rows: dict[str, Row] = {op: {"part": "products", "op": op, "n": n, "k": k, "m": m} for op in OPS}

    def ours(op: str) -> Contender:
        checked(rows[op], *weights[op].error(bench.kernels, x))
        return Contender(weights[op].calls(bench.kernels, x))

    makers: dict[str, Maker] = {
        **{op: partial(ours, op) for op in OPS},
        "torch bf16": lambda: gpu_peers.torch_products(x.to(torch.bfloat16), weights["torch bf16"]),
        "bitsandbytes nf4": lambda: weights["bitsandbytes nf4"].products(x.to(torch.bfloat16)),
        "ORT 2-bit": lambda: weights["ORT 2-bit"].products(x),
        "ORT 4-bit": lambda: weights["ORT 4-bit"].products(x),
        COPY: bench.copy, PRODUCT: bench.product,
    }  # fmt: skip
    shared: Row = {}
    us = bench.turn(shared, makers).us
    peers = {name: time for name, time in us.items() if name not in (*OPS, COPY, PRODUCT)}
    failed = shared.pop("missing")
    for op, row in rows.items():
        row |= shared | {"missing": {name: why for name, why in failed.items() if name not in OPS}}
        if op in failed:
            yield row | {"wrong": failed[op]}
            continue
        row["bytes"] = weights[op].nbytes + x.nbytes + 2 * m * n
        row["gb_per_s"] = round(row["bytes"] / us[op] / 1e3)
        row["tflops"] = round(2e-6 * m * n * k / us[op], 2)
        first = op == "ternary" and (n, k, m) == (14336, 4096, 1)
        goals = {"share": 60.0, "ORT 2-bit": 1.0, "bitsandbytes nf4": 1.0} if first else {}
        yield judged(row, us[op], peers, bench.bound(us, row["bytes"], 2.0 * m * n * k), goals)


# ---- training -------------------------------------------------------------------------------------------------------


def training(bench: Bench, d: int, steps: int) -> Iterator[Row]:
    """Forward and backward: the kernels in Triton, what layers of models/ do without them, and each composition of
    torch's attention; and a plain Transformer's attention."""
    pairs, dtype = bench.sizes.pairs, torch.bfloat16
    row: Row = {"part": "training", "pairs": pairs, "d": d, "prompt": steps}
    some = gpu_training.inputs(pairs, d, steps, bench.device, dtype)

    def ours() -> Contender:
        few = gpu_training.inputs(2, d, min(steps, gpu_peers.MOST_SCORES), bench.device, dtype)
        math_kernel = gpu_peers.attends(gpu_peers.MOST_SCORES)["SDPA math"]
        same = gpu_training.errors(partial(gpu_training.composed, TWO, math_kernel), few)
        checked(row, max(gpu_training.errors(gpu_training.kernels, few)), 2 * max(same))
        return contender(gpu_training.kernels)

    def contender(function: gpu_training.Differential) -> Contender:
        return Contender([gpu_training.call(function, some)])

    others = {LAYERS: gpu_training.layers, **gpu_training.compositions(steps), **gpu_training.plains(steps)}
    others |= {FLEX: gpu_training.flex} if bench.device == "cuda" else {}
    makers: dict[str, Maker] = {name: partial(contender, function) for name, function in others.items()}
    us = bench.turn(row, {OURS: ours, PRODUCT: bench.product} | makers).us
    row["each_us"] = {name: round(time, 1) for name, time in us.items() if name not in (OURS, PRODUCT)}
    if OURS not in us:
        yield row | {"wrong": row["missing"].pop(OURS)}
        return
    work = 10 / 3 * flops(pairs, d, steps)  # 3 products of d forward, 7 backward
    row["tflops"] = round(work / us[OURS] / 1e6, 1)
    peers = gpu_peers.best(us, LAYERS, TWO, FOUR, "plain")
    yield judged(row, us[OURS], peers, bench.bound(us, operations=work), {TWO: 1.0, FOUR: 1.0})


def step(bench: Bench, length: int) -> Iterator[Row]:
    """A training step of models with differential and with plain attention (gpu_training.py)."""
    plan, plain = bench.sizes.plan, gpu_training.MODELS[0]
    models = [model for model in gpu_training.MODELS if bench.device == "cuda" or model[1] != gpu_training.KERNEL]
    rows: dict[str, Row] = {
        f"{attention}, {way}": {"part": "step", "model": attention, "how": way, "d": plan.d, "prompt": length,
                                "batch": plan.batch(length)} for attention, way in models
    }  # fmt: skip

    def make(name: str, attention: str, way: str) -> Contender:
        call = plan.step(attention, way, length, bench.device)
        if bench.device == "cuda":
            rows[name]["peak_mib"] = gpu_training.peak_mib(call)
        return Contender([call], capture=False)

    shared: Row = {}
    makers: dict[str, Maker] = {name: partial(make, name, *model) for name, model in zip(rows, models, strict=True)}
    us = bench.turn(shared, makers).us
    for name, row in rows.items():
        if name not in us:
            yield row | {"wrong": shared["missing"][name]}
            continue
        row |= {"us": round(us[name], 1), "spread": shared["spread"]}
        row["train_tokens_per_s"] = round(plan.batch(length) * length / us[name] * 1e6)
        first = ", ".join(plain)
        row["ratio"] = {"plain": round(us[first] / us[name], 3)} if first in us and name != first else {}
        yield row | {"targets": targets(row["ratio"], {"plain": 0.91})}  # the paper's: not slower by more than 9 %


# ---- the process ----------------------------------------------------------------------------------------------------

TIMED: dict[str, Callable[..., Iterator[Row]]] = {
    "rates": rates, "decode": decode, "products": products, "prefill": prefill, "training": training, "step": step,
}  # fmt: skip


def cases(part: str, sizes: Sizes) -> list[Case]:
    """What a part's function is called with, in turn."""
    cases_of: dict[str, list[Case]] = {
        "rates": [()],
        "decode": [(d, context) for d in sizes.dims for context in sizes.contexts],
        "products": [(*shape, m) for shape in sizes.shapes for m in sizes.rows],
        "prefill": [(d, steps) for d in sizes.dims for steps in sizes.prompts],
        "training": [(d, steps) for d in sizes.dims for steps in sizes.training],
        "step": [(length,) for length in sizes.lengths],
    }
    return cases_of[part]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=TIMED)
    parser.add_argument("library", type=Path)
    parser.add_argument("--first", type=int, default=0, help="the case to begin with")
    parser.add_argument(
        "--without", type=json.loads, default={}, help="contenders that this case goes without, and why"
    )
    parser.add_argument("--hung", type=json.loads, default={}, help="contenders that all cases go without, and why")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    # A card is checked with new numbers each time; --quick has so few that others may pass or not.
    torch.manual_seed(0 if arguments.quick else time.time_ns() % 2**31)
    on_card = torch.cuda.is_available()
    kernels, sizes = cuda.Kernels(arguments.library), QUICK if arguments.quick else Sizes()
    bench = Bench("cuda" if on_card else "cpu", CudaClock() if on_card else HostClock(), kernels, sizes)
    with nullcontext() if on_card else interpreted():
        for index, case in enumerate(cases(arguments.part, sizes)):
            if index < arguments.first:
                continue
            say(case=index, of=case)
            bench.without = arguments.hung | (arguments.without if index == arguments.first else {})
            for row in TIMED[arguments.part](bench, *case):
                say(**row)
            if on_card:
                torch.cuda.empty_cache()


@contextmanager
def interpreted() -> Iterator[None]:
    """Triton's kernels run on the CPU."""
    os.environ["TRITON_INTERPRET"] = "1"
    from research.tests import interpreter

    with interpreter.bfloat16():
        yield


if __name__ == "__main__":
    main()
