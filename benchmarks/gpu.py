"""diffbit's kernels on an NVIDIA GPU: built, checked and timed beside their peers in one run.

    python benchmarks/gpu.py                                            # all of it, in under 8 minutes
    python benchmarks/gpu.py --json out/gpu.json --markdown             # keep the rows; renew docs/gpu.md
    python benchmarks/gpu.py --only decode products --library build/gpu/libdiffbit_ops.so
    python benchmarks/gpu.py --sanitize                                 # compute-sanitizer's memcheck and racecheck
    python benchmarks/gpu.py --quick                                    # small sizes: does everything run?

Needs a CUDA device, torch with CUDA, and CMake with nvcc to build the library for this card (not with --library).
Without a device the exit status is 2. Peers that are not installed are named in their rows, as is every part that
fails; the others go on. Each part is a process of its own, so that a kernel that breaks CUDA breaks no other part.

    check      every case of the tests' tables (tests/native/nodes.py) with fresh random numbers on the device
    rates      what the card can do: bytes copied and bf16 products a second
    decode     one token behind 32k and 128k others, 16 pairs, caches of bf16, int8 and int4 (gpu_attention.py)
    products   ternary and int4 weights times 1 to 16 rows of activations, and 128 and 1024
    prefill    causal prompts of 4k, 8k and 32k tokens in bf16
    training   differential attention, forward and backward: Triton and compositions (gpu_training.py)
    step       a training step of models with differential and with plain attention (gpu_step.py)
    model      tokens a second of a model of 1.1 billion parameters on ONNX Runtime's CUDA provider (gpu_model.py)

What is measured: medians of CUDA-event times, contenders in turn, from memory and not from L2 (gpu_clock.py). Before a
contender of ours is timed, what it computes is held against float64: its error may be twice that of torch in the same
precision, and NaN never passes. `bound` is the time that the fewest bytes take at the rate of a copy (read and written
bytes), or the fewest operations at that of a bf16 product, both timed in turn with the row's contenders. `ratio`: how
many times faster than a peer; `targets`: wanted and reached. The exit status is 1 where a check fails.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import gpu_calls
import gpu_model
import gpu_peers
import gpu_step
import gpu_training
import onnxruntime
import torch
from gpu_attention import Layer, flops
from gpu_calls import Weights
from gpu_clock import Clock, Contender, CudaClock, measure, sentence
from gpu_peers import FOUR, TWO
from report import command_line, gpu_tables, renew

from diffbit.runtime import cuda, native

Row = dict[str, Any]
ROOT = Path(__file__).resolve().parents[1]
BUILD, WORK = ROOT / "build" / "gpu", ROOT / "build" / "gpu_model"
PARTS = {  # the seconds that each may take
    "check": 150, "rates": 60, "decode": 150, "products": 150, "prefill": 120, "training": 180, "step": 120,
    "model": 400,
}  # fmt: skip
OURS, COPY, PRODUCT, LAYERS = "diffbit", "copy", "product", "layers"
TESTS = ("tests/ops", "tests/models", "tests/train", "tests/runtime")  # where some want a GPU
SANITIZERS = {"memcheck": r"ERROR SUMMARY: .*", "racecheck": r"RACECHECK SUMMARY: .*"}  # and what they end with
# pytest's -k, of the tests in tests/ops: each kernel at its edges
SANITIZED = (
    "decode or bf16 or gqa or ragged or further or many or rows_9 or rows_17 or long_prefill or int4_chunk or blocks"
)


@dataclass(frozen=True)
class Sizes:
    pairs: int = 16
    dims: tuple[int, ...] = (64, 128)
    contexts: tuple[int, ...] = (32768, 131072)
    prompts: tuple[int, ...] = (4096, 8192, 32768)
    shapes: tuple[tuple[int, int], ...] = ((14336, 4096), (4096, 4096), (4096, 14336))  # N x K
    rows: tuple[int, ...] = (1, 2, 4, 8, 16, 128, 1024)  # M
    training: tuple[int, ...] = (2048, 8192)
    copy_bytes: int = 1 << 30
    product: int = 8192
    cycle_bytes: int = 256 << 20  # that the weights of a contender take together
    seconds: float = 0.6  # for the rounds of a row


QUICK = Sizes(1, (64,), (256,), (96,), ((256, 256),), (1, 4, 20), (64,), 1 << 16, 64, 1 << 18, 0.05)


@dataclass(frozen=True)
class Bench:
    """Where and how large."""

    device: str  # "cuda", or "cpu" for the emulation
    clock: Clock
    kernels: cuda.Kernels
    sizes: Sizes
    work: Path  # for models

    @property
    def stream(self) -> int:
        return self.clock.stream.cuda_stream if isinstance(self.clock, CudaClock) else 0

    def turn(self, contenders: dict[str, Contender], row: Row) -> dict[str, float]:
        """Time `contenders` in turn: microseconds by name. Who fails is named in the row, with the reason."""
        times, failed = measure(self.clock, contenders, self.sizes.seconds)
        row["spread"] = times.spread
        if times.uncaptured:
            row["not_captured"] = list(times.uncaptured)
        row.setdefault("missing", {}).update(failed)
        return times.us

    def copy(self) -> tuple[Contender, int]:
        """A copy from memory to memory, and the bytes that it reads and writes."""
        source = torch.randint(-128, 127, (self.sizes.copy_bytes,), dtype=torch.int8, device=self.device)
        target = torch.empty_like(source)
        return Contender([partial(target.copy_, source)]), 2 * self.sizes.copy_bytes

    def product(self) -> tuple[Contender, float]:
        """A product of bf16 matrices, and its operations."""
        n = self.sizes.product
        a, b = (torch.randn(n, n, device=self.device).to(torch.bfloat16) for _ in range(2))
        out = torch.empty_like(a)
        return Contender([lambda: torch.mm(a, b, out=out)]), 2.0 * n**3


def judged(row: Row, us: float, others: dict[str, float], bound: float, wanted: dict[str, float]) -> Row:
    """`row` with our time, what share of it the bound is, the ratios to `others`, and which targets are reached."""
    row["us"], row["bound_us"], row["share_percent"] = round(us, 2), round(bound, 2), round(100 * bound / us, 1)
    row["peers_us"] = {name: round(other, 2) for name, other in others.items()}
    row["ratio"] = {name: round(other / us, 2) for name, other in others.items()}
    found = row["ratio"] | {"share": row["share_percent"]}
    row["targets"] = {
        name: {"wanted": least, "reached": found[name] >= least} for name, least in wanted.items() if name in found
    }
    return row


def checked(row: Row, error: float, allowed: float) -> bool:
    """Whether the error is allowed; it and the verdict go into the row."""
    row["error"], row["allowed"] = (error if math.isfinite(error) else str(error)), allowed
    if not error <= allowed:
        row["wrong"] = f"an error of {error:.3g}, and {allowed:.3g} is allowed"
    return error <= allowed


# ---- parts ----------------------------------------------------------------------------------------------------------


def rates(bench: Bench) -> Iterator[Row]:
    row: Row = {"part": "rates"}
    (copy, nbytes), (product, operations) = bench.copy(), bench.product()
    us = bench.turn({COPY: copy, PRODUCT: product}, row)
    yield row | {"copy_gb_per_s": round(nbytes / us[COPY] / 1e3), "tflops": round(operations / us[PRODUCT] / 1e6, 1)}


def decode(bench: Bench) -> Iterator[Row]:
    """One token behind many: our caches and all ways of the peers in turn."""
    sizes = bench.sizes
    for d in sizes.dims:
        for context in sizes.contexts:
            yield from decode_rows(bench, d, context)
            empty_memory(bench)


def decode_rows(bench: Bench, d: int, context: int) -> Iterator[Row]:
    sizes = bench.sizes
    kinds = ("bf16", "int8", "int4")
    made = {kind: {"part": "decode", "kv": kind, "pairs": sizes.pairs, "d": d, "context": context} for kind in kinds}
    contenders: dict[str, Contender] = {}
    for kind in kinds:
        copies = 2  # the data of one is not in L2 when its turn comes again
        layers = [Layer(kind, sizes.pairs, sizes.pairs, d, context, 1, bench.device, seed) for seed in range(copies)]
        calls = [gpu_calls.attention(bench.kernels, layer) for layer in layers]
        try:
            for call in calls:
                call()
            bench.clock.synchronize()
            if all([checked(made[kind], *layer.error()) for layer in layers]):
                contenders[kind] = Contender(calls)
        except Exception as error:
            made[kind]["wrong"] = sentence(error)
        made[kind]["bytes"] = layers[0].cache_bytes
        if kind == "bf16":
            contenders |= attention_peers(layers, causal=False)
    contenders[COPY], copied = bench.copy()
    shared: Row = {}
    us = bench.turn(contenders, shared)
    peers = {name: time for name, time in us.items() if name not in (*kinds, COPY)}
    made["bf16"]["missing"] = shared.pop("missing")
    for kind, row in made.items():
        row |= shared
        if kind not in us:
            yield row
            continue
        others = ways(peers) if kind == "bf16" else {"bf16": us["bf16"]} if "bf16" in us else {}
        wanted = {"bf16": {"share": 85.0, TWO: 1.4, FOUR: 1.9}, "int8": {"bf16": 1.8}}.get(kind, {})
        bound = row["bytes"] / (copied / us[COPY])
        row |= {"gb_per_s": round(row["bytes"] / us[kind] / 1e3)}
        if kind == "bf16":
            row["each_us"] = {name: round(time, 2) for name, time in peers.items()}
        yield judged(row, us[kind], others, bound, wanted)


def attention_peers(layers: list[Layer], causal: bool) -> dict[str, Contender]:
    """Every way with every kernel, one call set a layer. Nothing is computed yet, but what prepares inputs is."""
    found = {}
    forms = [layer.for_peers() for layer in layers]
    scale = layers[0].d ** -0.5
    for way, form in gpu_peers.WAYS.items():
        triples = [form(*inputs) for inputs in forms]
        for name, attend in gpu_peers.attends().items():
            calls = [partial(each, attend, some, scale, causal) for some in triples]
            found[f"{way}: {name}"] = Contender(calls)
    return found


def each(attend: gpu_peers.Attend, triples: list[gpu_peers.Triple], scale: float, causal: bool) -> list[torch.Tensor]:
    return [attend(*triple, scale, causal) for triple in triples]


def ways(us: dict[str, float]) -> dict[str, float]:
    """The best of two calls and the best of four."""
    found = {way: gpu_peers.best(us, way) for way in (TWO, FOUR)}
    return {way: pair[1] for way, pair in found.items() if pair}


def products(bench: Bench) -> Iterator[Row]:
    """Ternary and int4 weights of a shape, and the peers', times each number of rows in turn."""
    for n, k in bench.sizes.shapes:
        yield from product_rows(bench, n, k)
        empty_memory(bench)


def product_rows(bench: Bench, n: int, k: int) -> Iterator[Row]:
    sizes, device = bench.sizes, bench.device

    def copies(bits: int) -> int:
        return max(2, -(-sizes.cycle_bytes // (n * k * bits // 8)))

    ours = {op: Weights(op, n, k, copies(bits), device) for op, bits in (("ternary", 2), ("int4_g32", 4))}
    floats = [torch.randn(n, k, device=device).to(torch.bfloat16) for _ in range(copies(16))]
    many = [torch.randn(n, k, device=device).to(torch.bfloat16) for _ in range(copies(4))]
    missing: dict[str, str] = {}
    stock: dict[str, gpu_peers.NBits] = {}
    for bits in (2, 4):
        name = f"ORT {bits}-bit"
        try:
            stock[name] = gpu_peers.NBits(n, k, bits, copies(bits), bench.stream, device)
        except Exception as error:
            missing[name] = sentence(error)
    for m in sizes.rows:
        x = torch.randn(m, k, device=device).to(torch.float16)
        made: dict[str, Row] = {}
        contenders: dict[str, Contender] = {}
        for op, weights in ours.items():
            made[op] = row = {"part": "products", "op": op, "n": n, "k": k, "m": m, "missing": dict(missing)}
            try:
                if checked(row, *weights.error(bench.kernels, x)):
                    contenders[op] = Contender(weights.calls(bench.kernels, x))
            except Exception as error:
                row["wrong"] = sentence(error)
        wide = x.to(torch.bfloat16)
        contenders["torch bf16"] = gpu_peers.torch_products(wide, floats)
        try:
            contenders["bitsandbytes nf4"] = gpu_peers.bitsandbytes_products(wide, many)
        except Exception as error:
            missing["bitsandbytes nf4"] = sentence(error)
        for name, session in stock.items():
            contenders[name] = session.products(x)
        contenders[COPY], copied = bench.copy()
        contenders[PRODUCT], operations = bench.product()
        shared: Row = {}
        us = bench.turn(contenders, shared)
        peers = {name: time for name, time in us.items() if name not in (*ours, COPY, PRODUCT)}
        for op, row in made.items():
            row["missing"] |= missing | shared["missing"]
            row |= {key: value for key, value in shared.items() if key != "missing"}
            if op not in us:
                yield row
                continue
            row["bytes"] = ours[op].nbytes + x.nbytes + 2 * m * n
            row["gb_per_s"] = round(row["bytes"] / us[op] / 1e3)
            row["tflops"] = round(2e-6 * m * n * k / us[op], 2)
            bound = max(row["bytes"] / (copied / us[COPY]), 2.0 * m * n * k / (operations / us[PRODUCT]))
            wanted = {}
            if op == "ternary" and m == 1 and (n, k) == (14336, 4096):
                wanted = {"share": 60.0, "ORT 2-bit": 1.0, "bitsandbytes nf4": 1.0}
            yield judged(row, us[op], peers, bound, wanted)


def prefill(bench: Bench) -> Iterator[Row]:
    sizes = bench.sizes
    for d in sizes.dims:
        for steps in sizes.prompts:
            row: Row = {"part": "prefill", "pairs": sizes.pairs, "d": d, "prompt": steps, "missing": {}}
            layer = Layer("bf16", sizes.pairs, sizes.pairs, d, 0, steps, bench.device)
            contenders: dict[str, Contender] = {}
            try:
                call = gpu_calls.attention(bench.kernels, layer)
                call()
                bench.clock.synchronize()
                if checked(row, *layer.error()):
                    contenders[OURS] = Contender([call])
            except Exception as error:
                row["wrong"] = sentence(error)
            contenders |= {
                name: contender
                for name, contender in attention_peers([layer], causal=True).items()
                if "math" not in name or steps <= 512  # it holds all scores
            }
            contenders[PRODUCT], operations = bench.product()
            us = bench.turn(contenders, row)
            peers = {name: time for name, time in us.items() if name not in (OURS, PRODUCT)}
            if OURS in us:
                work = flops(sizes.pairs, d, steps)
                row["tflops"] = round(work / us[OURS] / 1e6, 1)
                row["each_us"] = {name: round(time, 1) for name, time in peers.items()}
                wanted = {TWO: 1.0, FOUR: 1.0} | ({"share": {64: 50.0, 128: 55.0}[d]} if d in (64, 128) else {})
                judged(row, us[OURS], ways(peers), work / (operations / us[PRODUCT]), wanted)
            yield row
            empty_memory(bench)


def empty_memory(bench: Bench) -> None:
    if bench.device == "cuda":
        torch.cuda.empty_cache()


def training(bench: Bench) -> Iterator[Row]:
    """Forward and backward: the kernels in Triton, what layers of models/ do without them, and each composition of
    torch's attention; and a plain Transformer's attention."""
    sizes, dtype = bench.sizes, torch.bfloat16
    candidates: dict[str, gpu_training.Differential] = {
        OURS: gpu_training.kernels, LAYERS: gpu_training.layers, **gpu_training.compositions(),
    }  # fmt: skip
    if bench.device == "cuda":
        candidates["flex_attention"] = gpu_training.flex
    for d in sizes.dims:
        for steps in sizes.training:
            row: Row = {"part": "training", "pairs": sizes.pairs, "d": d, "prompt": steps, "missing": {}}
            few = gpu_training.inputs(2, d, min(steps, 500), bench.device, dtype)
            try:
                found = max(gpu_training.errors(gpu_training.kernels, few))
                same = gpu_training.errors(partial(gpu_training.composed, TWO, gpu_peers.attends()["SDPA math"]), few)
                checked(row, found, 2 * max(same))
            except Exception as error:
                row["wrong"] = sentence(error)
            some = gpu_training.inputs(sizes.pairs, d, steps, bench.device, dtype)
            contenders = {name: Contender([gpu_training.call(function, some)]) for name, function in
                          candidates.items() if "math" not in name or steps <= 512}  # fmt: skip
            contenders |= {
                f"plain: {name}": Contender([gpu_training.call(function, some)])
                for name, function in gpu_training.plains().items()
            }
            contenders[PRODUCT], operations = bench.product()
            us = bench.turn(contenders, row)
            row["each_us"] = {name: round(time, 1) for name, time in us.items() if name not in (OURS, PRODUCT)}
            if OURS in us and "wrong" not in row:
                work = 10 / 3 * flops(sizes.pairs, d, steps)  # 3 products of d forward, 7 backward
                row["tflops"] = round(work / us[OURS] / 1e6, 1)
                others = {LAYERS: us[LAYERS]} if LAYERS in us else {}
                others |= ways(us) | ({"plain": best[1]} if (best := gpu_peers.best(us, "plain")) else {})
                judged(row, us[OURS], others, work / (operations / us[PRODUCT]), {TWO: 1.0, FOUR: 1.0})
            yield row
            empty_memory(bench)


def step(bench: Bench) -> Iterator[Row]:
    yield from gpu_step.rows(bench.device, gpu_step.QUICK if bench.sizes is QUICK else gpu_step.Plan())


def model(bench: Bench) -> Iterator[Row]:
    plan = gpu_model.QUICK if bench.sizes is QUICK else gpu_model.Plan()
    yield from gpu_model.rows(bench.work, bench.device, plan)


TIMED: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "rates": rates, "decode": decode, "products": products, "prefill": prefill, "training": training, "step": step,
    "model": model,
}  # fmt: skip


# ---- correctness ----------------------------------------------------------------------------------------------------


def check(library: Path, draw: int, limit: float) -> Row:
    """The tests that want a GPU, every random number of theirs drawn anew."""
    environment = environment_with(library) | {"DIFFBIT_TEST_DRAW": str(draw)}
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", *TESTS]
    if importlib.util.find_spec("xdist"):
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    row: Row = {"part": "check", "draw": draw}
    return row | verdict(command, environment, limit, r"(?:\d+ (?:passed|failed|errors?)\b.*)")


def sanitize(library: Path, limit: float) -> Iterator[Row]:
    """compute-sanitizer over some of the same tests; each tensor is an allocation of its own, so its ends are seen."""
    tool = shutil.which("compute-sanitizer")
    environment = environment_with(library) | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "-k", SANITIZED, TESTS[0]]
    for name, summary in SANITIZERS.items():
        row: Row = {"part": "sanitize", "tool": name}
        if tool is None:
            yield row | {"wrong": "compute-sanitizer is not on the path"}
            continue
        command = [tool, "--tool", name, "--error-exitcode", "9", *tests]
        yield row | verdict(command, environment, limit, summary)


def verdict(command: list[str], environment: dict[str, str], limit: float, summary: str) -> Row:
    """The line of the command's output that says how it went, and, where its exit status is not 0, its last lines."""
    start = time.monotonic()
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return {"wrong": f"was not done in {limit:.0f} seconds"}
    found = re.findall(summary, done.stdout + done.stderr)
    row: Row = {"seconds": round(time.monotonic() - start, 1), "verdict": found[-1].strip() if found else "nothing ran"}
    if done.returncode or not found:
        row["wrong"] = f"exit status {done.returncode}: {row['verdict']}"
        row["output"] = (done.stdout + done.stderr)[-6000:]
    return row


# ---- the whole ------------------------------------------------------------------------------------------------------


def environment_with(library: Path) -> dict[str, str]:
    """What a child process of ours is given: the library, and diffbit from this checkout. Not this folder: others look
    for a package that is named as a script here."""
    here = Path(__file__).resolve().parent
    paths = [str(ROOT), *(entry or os.getcwd() for entry in sys.path if Path(entry).resolve() != here)]
    return os.environ | {native.OVERRIDE: str(library), "PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


def build() -> Path:
    """The library with kernels for this card, brought up to date."""
    major, minor = torch.cuda.get_device_capability()
    architecture = f"{major}{minor}{'a' if major in (9, 12) else ''}"
    options = ["-DDIFFBIT_CUDA=ON", f"-DDIFFBIT_CUDA_ARCHITECTURES={architecture}"]
    for command in (["cmake", "-S", str(ROOT / "csrc"), "-B", str(BUILD), *options],
                    ["cmake", "--build", str(BUILD), "--parallel", str(os.cpu_count() or 1)]):  # fmt: skip
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr)[-4000:]}")
    return BUILD / "libdiffbit_ops.so"


def describe() -> Row:
    """The card and what is installed."""
    card = torch.cuda.get_device_properties(0)
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(asked, capture_output=True, text=True).stdout.strip() if shutil.which(asked[0]) else ""
    found = {}
    for package in ("bitsandbytes", "flash-attn", "triton"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    provided = "with" if "CUDAExecutionProvider" in onnxruntime.get_available_providers() else "without"
    found["onnxruntime"] = f"{onnxruntime.__version__} ({provided} CUDA)"
    return {
        "card": card.name, "multiprocessors": card.multi_processor_count, "gib": round(card.total_memory / 2**30),
        "l2_mib": card.L2_cache_size >> 20, "driver": driver or "unknown", "cuda": torch.version.cuda,
        "torch": torch.__version__, **found, "date": time.strftime("%Y-%m-%d"),
        "command": command_line("gpu.py", sys.argv[1:]),
    }  # fmt: skip


def child(part: str, library: Path, quick: bool, work: Path) -> None:
    """One part, in this process: a row a line."""
    torch.manual_seed(time.time_ns() % 2**31)
    bench = Bench("cuda", CudaClock(), cuda.Kernels(library), QUICK if quick else Sizes(), work)
    for row in TIMED[part](bench):
        print(json.dumps(row), flush=True)


def part_rows(part: str, library: Path, options: list[str], limit: float) -> Iterator[Row]:
    """The rows of a part in a process of its own; one more that says why, where it did not end well."""
    command = [sys.executable, __file__, "--part", part, "--library", str(library), *options]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment_with(library)
    )
    errors: list[str] = []
    reader = threading.Thread(target=lambda: errors.extend(process.stderr or []))
    reader.start()
    clock = threading.Timer(limit, process.kill)
    clock.start()
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)
    status = process.wait()
    timed_out = not clock.is_alive()
    clock.cancel()
    reader.join()
    if status:
        why = f"was not done in {limit:.0f} seconds" if timed_out else " ".join(errors[-1:]).strip()[:500]
        yield {"part": part, "wrong": why or f"exit status {status}", "output": "".join(errors)[-3000:]}


def prepare(library: Path, options: list[str]) -> subprocess.Popen[bytes]:
    """Makes the models meanwhile, on the CPU; what goes wrong with one shows when it is to be measured."""
    command = [sys.executable, str(Path(__file__).with_name("gpu_model.py")), *options]
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment_with(library)
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--library", type=Path, metavar="FILE", help="libdiffbit_ops.so (default: built for this card)")
    parser.add_argument("--sanitize", action="store_true", help="run compute-sanitizer, and nothing else")
    parser.add_argument("--minutes", type=float, default=8.0, help="no part starts after (default: %(default)g)")
    parser.add_argument("--work", type=Path, default=WORK, help="a folder for the models (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too, as one JSON document")
    parser.add_argument("--markdown", type=Path, nargs="?", const=Path("docs/gpu.md"), metavar="FILE",
                        help="renew the tables in this page (default: %(const)s)")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: does everything run?")
    parser.add_argument("--part", choices=TIMED, help=argparse.SUPPRESS)  # in a process of its own
    arguments = parser.parse_args()
    start = time.monotonic()

    if not torch.cuda.is_available():
        print("benchmarks/gpu.py needs a CUDA device, and torch finds none", file=sys.stderr)
        raise SystemExit(2)
    if arguments.part:
        child(arguments.part, arguments.library, arguments.quick, arguments.work)
        return
    about = describe()
    print(json.dumps(about), flush=True)
    library = (arguments.library or build()).absolute()
    about["build_s"] = round(time.monotonic() - start, 1)

    def left() -> float:
        return arguments.minutes * 60 - (time.monotonic() - start)

    def every() -> Iterator[Row]:
        if arguments.sanitize:
            yield from sanitize(library, max(60.0, left() / len(SANITIZERS)))
            return
        options = ["--work", str(arguments.work), *(["--quick"] if arguments.quick else [])]
        preparing = prepare(library, options) if "model" in arguments.only else None
        for part in arguments.only:
            if part == "model" and preparing is not None:
                try:
                    preparing.wait(max(0.0, left()))
                except subprocess.TimeoutExpired:
                    preparing.kill()
            if left() < 10:
                yield {"part": part, "wrong": f"not started: the {arguments.minutes:g} minutes were over"}
            elif part == "check":
                yield check(library, time.time_ns() % 2**20, min(left(), PARTS[part]))
            else:
                yield from part_rows(part, library, options, min(left(), PARTS[part]))

    found = []
    for row in every():
        print(json.dumps(row), flush=True)
        found.append(row)
    about["seconds"] = round(time.monotonic() - start, 1)
    tables = gpu_tables(about, found)
    print("\n" + tables)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"about": about, "rows": found}, indent=1))
    if arguments.markdown:
        renew(arguments.markdown, "gpu", tables)
    if any("wrong" in row for row in found):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
