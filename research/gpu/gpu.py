#!/usr/bin/env python3
"""diffbit's kernels on an NVIDIA GPU: built, checked and timed beside their peers, some parts at a time.

    python research/gpu/gpu.py check rates decode --out out/gpu      # each of these four takes 9 minutes at most
    python research/gpu/gpu.py products prefill --out out/gpu
    python research/gpu/gpu.py training step --out out/gpu
    python research/gpu/gpu.py model --out out/gpu
    python research/gpu/gpu.py --tables out/gpu                      # renew research/gpu with all that was measured
    python research/gpu/gpu.py check rates decode --quick            # small sizes; on the CPU where there is no card

Needs a CUDA device, torch with CUDA, and CMake with nvcc to build the library for this card (not with --library).
Without a device the exit status is 2; but with --quick the kernels' source runs on the CPU (csrc/cuda/emulate.h), to
see that every part works. Rows are written to OUT/PART.jsonl as they come. Peers that are not installed are named in
their rows, as is what fails or hangs: a part is a process of its own, which is started again behind a case that broke
it, or without the one contender. The exit status is 1 where a check fails or a row is missing.

    check      one case under compute-sanitizer, then every case of the tests with fresh random numbers on the device
    rates      what the card can do: bytes copied and bf16 products a second
    decode     one token behind 32k and 128k others, 16 pairs, caches of bf16, int8 and int4
    products   ternary and int4 weights times 1 to 16 rows of activations, and 128 and 1024
    prefill    causal prompts of 4k, 8k and 32k tokens in bf16, into each cache
    training   differential attention, forward and backward: Triton and compositions
    step       a training step of models with differential and with plain attention
    model      a small model held against the CPU, and tokens a second of one of 1.1 billion parameters, on ONNX Runtime

How it is measured: clock.py; what is compared, and with which targets: gpu_parts.py, gpu_model.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import onnxruntime
import torch
from gpu_model import with_ratios
from report import Row, command_line, left_out, renew, row_table

from diffbit.runtime import native

HERE, ROOT = Path(__file__).resolve().parent, Path(__file__).resolve().parents[2]
SCRIPTS = (HERE, ROOT / "benchmarks")
BUILD = ROOT / "build" / "gpu"
BUILDING = 150  # seconds
PARTS = {  # the seconds that each may take; what is not done by then is said in its rows
    "check": 210, "rates": 30, "decode": 150, "products": 250, "prefill": 140, "training": 220, "step": 160,
    "model": 390,
}  # fmt: skip
PATIENCE = 60  # seconds without a word, of a contender or of a whole model, that does not say how long it takes
TESTS = ("tests/ops", "tests/models", "tests/apps/train", "research/tests")  # where some want a GPU
SESSIONS, SESSIONS_SECONDS = "tests/runtime/test_gpu.py", 60  # that want ONNX Runtime on a GPU
ONE = "tests/ops/test_cuda_attention.py::test_cuda_kernels[bf16_decode-{}]"  # a case, on the device
ONE_SECONDS = 80
MEMCHECK = r"ERROR SUMMARY: .*"  # what it ends with


# ---- processes ------------------------------------------------------------------------------------------------------


class Process:
    """A process and its children, with its output in a file; killed together."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], piped: bool = False) -> None:
        self._file = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.popen = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdout=subprocess.PIPE if piped else self._file, stderr=self._file,
            text=True, start_new_session=True,
        )  # fmt: skip

    def wait(self, seconds: float) -> int | None:
        """The exit status; None where it was not done, and is killed."""
        try:
            return self.popen.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self.kill()
            return None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()

    def output(self) -> str:
        self._file.seek(0)
        return self._file.read()


def timed(part: str, command: Sequence[str], environment: dict[str, str], seconds: float) -> Iterator[Row]:
    """The rows of a part, whose process says what it does: {"case": its number, "of": its sizes}, {"now": contender}.

    Where it dies or is silent for too long, it starts again: without the contender that was running (in this case
    where it died, in all further ones where it hung, which costs a minute), or, where there was none, behind the case.
    """
    end = time.monotonic() + seconds
    first, without, hung = 0, dict[str, str](), dict[str, str]()
    while True:
        options = ["--first", str(first), "--without", json.dumps(without), "--hung", json.dumps(hung)]
        process = Process([*command, *options], environment, piped=True)
        lines: queue.Queue[str] = queue.Queue()
        reader = threading.Thread(
            target=lambda lines=lines, out=process.popen.stdout: [*map(lines.put, out), lines.put("")]
        )
        reader.start()
        at: Row = {"case": first, "of": []}
        now, patience, why = "", float(PATIENCE), ""
        while not why:
            try:
                line = lines.get(timeout=max(0.0, min(patience, end - time.monotonic())))
            except queue.Empty:
                late = time.monotonic() >= end
                why = f"was not done in the {seconds:.0f} seconds of {part}" if late else f"silent for {patience:g} s"
                process.kill()
                break
            message = json.loads(line) if line.startswith("{") and line.endswith("}\n") else {}
            if "part" in message:
                yield message
            elif "case" in message:
                at, now, patience = message, "", PATIENCE
            elif "now" in message:
                now, patience = message["now"], message.get("seconds", PATIENCE)
            elif not line:
                if process.wait(PATIENCE) == 0:
                    return
                last = process.output().strip().splitlines()[-1:]
                why = " ".join(last)[:500] or f"exit status {process.popen.returncode}"
        if now and now not in without | hung and time.monotonic() < end:
            without = without if at["case"] == first else {}
            (hung if why.startswith("silent") else without)[now] = why
            first = at["case"]
            continue
        wrong = f"{now}: {why}" if now else why
        yield {"part": part, "case": at["of"], "wrong": wrong, "output": process.output()[-3000:]}
        if time.monotonic() >= end:
            return
        first, without = at["case"] + 1, {}


def environment_with(library: Path | None) -> dict[str, str]:
    """What a process of ours is given: the library, and diffbit from this checkout. Not the folders of
    scripts: others look for a package that is named as a script there."""
    paths = [str(ROOT), *(entry or os.getcwd() for entry in sys.path if Path(entry).resolve() not in SCRIPTS)]
    chosen = {native.OVERRIDE: str(library)} if library else {}
    return os.environ | chosen | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}


# ---- correctness ----------------------------------------------------------------------------------------------------


def check(environment: dict[str, str], emulated: bool, seconds: float) -> Iterator[Row]:
    """compute-sanitizer over one case; then the tests that want a GPU, every random number of theirs drawn anew."""
    end = time.monotonic() + seconds
    if emulated:
        one = pytest(ONE.format("emulated"))
        yield {"part": "check", "what": "one case, emulated"} | verdict(one, environment, seconds)
        return
    yield memcheck(environment)
    draw = time.time_ns() % 2**20
    workers = ["-n", str(min(8, os.cpu_count() or 1))] if importlib.util.find_spec("xdist") else []
    row = {"part": "check", "what": "the tests", "draw": draw}
    tests = pytest("-m", "gpu", *workers, *TESTS)
    yield row | verdict(tests, environment | {"DIFFBIT_TEST_DRAW": str(draw)}, end - time.monotonic())


def pytest(*arguments: str) -> list[str]:
    options = ["-v", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    return [sys.executable, "-m", "pytest", *options, *arguments]


def memcheck(environment: dict[str, str]) -> Row:
    """One case under compute-sanitizer; each tensor is an allocation of its own, so its ends are seen."""
    row: Row = {"part": "check", "what": "compute-sanitizer's memcheck, one case"}
    program = shutil.which("compute-sanitizer")
    if program is None:
        return row | {"wrong": "compute-sanitizer is not on the path"}
    command = [program, "--tool", "memcheck", "--error-exitcode", "9", *pytest(ONE.format("gpu"))]
    environment = environment | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return row | verdict(command, environment, ONE_SECONDS, MEMCHECK)


def verdict(
    command: list[str], environment: dict[str, str], seconds: float, summary: str = r"\d+ (?:passed|failed|errors?)\b.*"
) -> Row:
    """The line of the command's output that says how it went; and, where its exit status is not 0, what failed so far
    and its last lines."""
    start = time.monotonic()
    process = Process(command, environment)
    status = process.wait(seconds)
    text = process.output()
    summaries = re.findall(summary, text)
    outcomes = {
        what: re.findall(rf"\b{what}\b.*? (tests/\S+)|(tests/\S+) {what}\b", text) for what in ("PASSED", "FAILED")
    }
    failed = list(dict.fromkeys(a or b for a, b in outcomes["FAILED"]))
    row: Row = {
        "seconds": round(time.monotonic() - start, 1),
        "verdict": summaries[-1].strip(" =") if summaries else "nothing ran",
    }
    if status is None:
        row["verdict"] = f"{len(outcomes['PASSED'])} passed, {len(failed)} failed, then {seconds:.0f} seconds were over"
    if status != 0 or not summaries:
        wrong = "was not done" if status is None else f"exit status {status}"
        row |= {"wrong": f"{wrong}: {row['verdict']}", "failed": failed, "output": text[-6000:]}
    return row


# ---- the whole ------------------------------------------------------------------------------------------------------


def built(emulated: bool) -> Path:
    """The library with kernels for this card, brought up to date; or the kernels' source as a library for the CPU."""
    if emulated:
        sys.path.insert(0, str(ROOT))
        from tests.native import host

        return host.emulated()
    major, minor = torch.cuda.get_device_capability()
    architecture = f"{major}{minor}{'a' if major in (9, 12) else ''}"
    options = ["-DDIFFBIT_CUDA=ON", f"-DDIFFBIT_CUDA_ARCHITECTURES={architecture}"]
    end = time.monotonic() + BUILDING
    for command in (["cmake", "-S", str(ROOT / "csrc"), "-B", str(BUILD), *options],
                    ["cmake", "--build", str(BUILD), "--parallel", str(os.cpu_count() or 1)]):  # fmt: skip
        process = Process(command, dict(os.environ))
        if process.wait(end - time.monotonic()) != 0:
            raise SystemExit(f"{' '.join(command)} failed, or took over {BUILDING} s:\n{process.output()[-4000:]}")
    return BUILD / "libdiffbit_ops.so"


def describe(emulated: bool) -> Row:
    """The card and what is installed."""
    about: Row = {"date": time.strftime("%Y-%m-%d"), "command": command_line(__file__, sys.argv[1:])}
    for package in ("torch", "triton", "bitsandbytes", "flash-attn"):
        try:
            about[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            about[package] = "not installed"
    provided = "with" if "CUDAExecutionProvider" in onnxruntime.get_available_providers() else "without"
    about["onnxruntime"] = f"{onnxruntime.__version__} ({provided} CUDA)"
    if emulated:
        return about | {"card": "no card (the kernels' source on the CPU)"}
    card = torch.cuda.get_device_properties(0)
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(asked, capture_output=True, text=True).stdout.strip() if shutil.which(asked[0]) else ""
    return about | {
        "card": f"{card.name} ({card.multi_processor_count} multiprocessors, {card.total_memory / 2**30:.0f} GiB, L2 "
        f"{card.L2_cache_size >> 20} MiB), driver {driver or 'unknown'}, CUDA {torch.version.cuda}"
    }


def rows(part: str, library: Path, emulated: bool, arguments: argparse.Namespace, seconds: float) -> Iterator[Row]:
    environment = environment_with(None if emulated else library)
    options = ["--quick"] if arguments.quick else []
    if part == "check":
        return check(environment, emulated, seconds)
    if part != "model":
        command = [sys.executable, str(HERE / "gpu_parts.py"), part, str(library), *options]
        return timed(part, command, environment, seconds)
    device = "cpu" if emulated else "cuda"
    command = [sys.executable, str(HERE / "gpu_model.py"), str(arguments.work), "--device", device, *options]
    return models(command, environment, emulated, seconds)


def models(command: list[str], environment: dict[str, str], emulated: bool, seconds: float) -> Iterator[Row]:
    """What is right first: the small model, and the tests that want ONNX Runtime on a GPU; then what is timed."""
    end = time.monotonic() + seconds
    yield from timed("model", [*command, "--small"], environment, seconds if emulated else PATIENCE)
    if not emulated:
        row = {"part": "model", "what": "the tests of sessions"}
        yield row | verdict(pytest("-m", "gpu", SESSIONS), environment, SESSIONS_SECONDS)
    yield from timed("model", command, environment, end - time.monotonic())


TITLES = {
    "rates": "What the card can do",
    "decode": "DiffAttention, one token",
    "products": "Low-bit weights",
    "prefill": "DiffAttention, a causal prompt in bf16",
    "training": "Differential attention in torch, forward and backward, bf16",
    "step": "A training step of four blocks, bf16, without the optimizer",
    "model": "1.1 billion parameters on ONNX Runtime",
}
COLUMNS = {
    "op": "op", "model": "model", "weights": "weights", "how": "how", "kv": "cache", "n": "N", "k": "K", "m": "M",
    "pairs": "pairs", "d": "d", "context": "context", "prompt": "prompt", "copy_gb_per_s": "copy GB/s", "us": "us",
    "gb_per_s": "GB/s", "tflops": "TFLOP/s", "share_percent": "of the bound",
    "decode_tokens_per_s": "decode tok/s", "prefill_tokens_per_s": "prefill tok/s", "model_mib": "MiB",
    "train_tokens_per_s": "tokens/s", "peak_mib": "MiB a step",
}  # fmt: skip


def tables(abouts: Sequence[Row], rows: Sequence[Row]) -> str:
    """All that some commands measured, and what they could not."""
    lines = []
    for about in {row["command"]: row for row in abouts}.values():
        software = [f"{name} {about[name]}" for name in about if name not in ("date", "card", "command")]
        lines.append(f"- `{about['command']}`, {about['date']}: {about['card']}; {', '.join(software)}")
    checks = [row for row in rows if "verdict" in row or row["part"] == "check"]
    lines += [f"- {row.get('what', row.get('model'))}: {row.get('verdict') or row['wrong']}" for row in checks]
    parts = ["\n".join(lines)]
    timed_rows = with_ratios([row for row in rows if row not in checks])
    for part, title in TITLES.items():
        if chosen := [row for row in timed_rows if row["part"] == part and "wrong" not in row]:
            parts.append(f"{title}\n\n{row_table(chosen, COLUMNS)}")
    return "\n\n".join([*parts, left_out(timed_rows, COLUMNS)]).strip() + "\n"


def renew_page(folder: Path, page: Path) -> None:
    """Put every row of the folder into the page."""
    abouts, rows = [], []
    for file in sorted(folder.rglob("*.jsonl")):
        about, *rest = map(json.loads, file.read_text().splitlines())
        abouts.append(about)
        rows += rest
    if not rows:
        raise SystemExit(f"{folder}: holds no rows (PART.jsonl) of research/gpu/gpu.py --out")
    renew(page, "gpu", tables(abouts, rows))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "gpu", help="a folder for the rows")
    parser.add_argument("--library", type=Path, metavar="FILE", help="libdiffbit_ops.so (default: built for this card)")
    parser.add_argument("--minutes", type=float, default=9.0, help="that the parts may take (default: %(default)g)")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "gpu_model", help="a folder for the models")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds: does everything run?")
    parser.add_argument("--tables", type=Path, metavar="OUT", help="renew the page with the rows in OUT, no more")
    parser.add_argument("--page", type=Path, default=HERE / "README.md")
    arguments = parser.parse_args()
    start = time.monotonic()
    if arguments.tables:
        renew_page(arguments.tables, arguments.page)
        return 0
    if not arguments.parts or not set(arguments.parts) <= PARTS.keys():
        parser.error(f"wanted some of the parts {', '.join(PARTS)}, found {' '.join(arguments.parts) or 'none'}")
    limit = BUILDING + sum(PARTS[part] for part in arguments.parts)
    if limit > 60 * arguments.minutes:
        parser.error(f"{' '.join(arguments.parts)} may take {limit / 60:.1f} minutes; give --minutes, or fewer parts")
    emulated = not torch.cuda.is_available()
    if emulated and not arguments.quick:
        print("research/gpu/gpu.py needs a CUDA device, and torch finds none", file=sys.stderr)
        return 2
    about = describe(emulated)
    print(json.dumps(about), flush=True)
    library = (arguments.library or built(emulated)).absolute()
    print(json.dumps({"built_s": round(time.monotonic() - start, 1)}), flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    wrong = False
    for part in arguments.parts:
        with (arguments.out / f"{part}.jsonl").open("w", buffering=1) as file:
            file.write(json.dumps(about) + "\n")
            seconds = PARTS[part] * (10 if arguments.quick else 1)  # what is no measurement need not be quick
            for row in rows(part, library, emulated, arguments, seconds):
                line = json.dumps(row)
                file.write(line + "\n")
                print(line, flush=True)
                wrong |= "wrong" in row
    print(f"{time.monotonic() - start:.0f} seconds; rows are in {arguments.out}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
