"""What low-bit caches lose at longer contexts and on other texts, beside llama.cpp's.

    python research/cache/contexts.py SmolLM2-135M-Instruct.Q4_1.gguf --work DIR --texts NAME=FILE... --llama FOLDER

    FOLDER    (cd FOLDER/.. && npm pack @node-llama-cpp/linux-x64@3.22.1 && tar xf *.tgz)    the folder `package`

Our caches are those of format.py, against the model's float cache in torch; llama.cpp's against its own cache of f16,
with the same weights as F32, flash attention, and its default of rotating keys and values by a Hadamard transform. The
windows are the same. --differential: what `diffbit convert` made of the model, in diffbit, whose KL should be the plain
model's. Each part is kept in DIR, so that an interrupted run goes on; the tables show whatever has been measured.
Intervals are over windows.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import numpy as np
import torch
from commands import once
from format import BLOCK, UNSCORED, Format, Scores, divergence, load, measure, windows_of, with_interval
from machine import describe
from report import add_outputs, command_line, table, write_json, write_outputs
from torch import Tensor

import diffbit
from diffbit.io.progress import track
from diffbit.quantize import AttentionScheme, Scheme, apply

PAGE = "research/cache/README.md"
OURS = {
    "int8": (8, 8),
    "int4": (4, 4),
    "int3": (3, 3),
    "int3, int2": (3, 2),
    "int2": (2, 2),
}  # bits of keys and values
LLAMA = {"q8_0": 8.5, "q5_0": 5.5, "q4_0": 4.5}  # bits of a number
CONVERTED = 2  # windows of the conversion, at most
WIDTH = 64  # of SmolLM2's heads
QUICK = {"int8": (8, 8), "int4": (4, 4)}


def format_of(keys: int, values: int) -> Format:
    if min(keys, values) < 8:
        return Format("", keys, values)
    return Format("", keys, values, 0, 0, "")


def stored_bits(keys: int, values: int) -> float:
    """Return bits of a number with its share of a row's float16 scale."""
    return statistics.mean(bits if bits == 16 else bits + 16 / WIDTH for bits in (keys, values))


@torch.inference_mode()
def converted(model: Any, windows: Sequence[Tensor], caches: dict[str, tuple[int, int]], title: str) -> list[Scores]:
    """Score a model of diffbit's with each cache."""
    scores = [Scores([], []) for _ in caches]
    names = {bits: "fp16" if bits == 16 else f"int{bits}" for bits in (16, 8, 4, 3, 2)}
    schemes = [AttentionScheme(keys=names[keys], values=names[values]) for keys, values in caches.values()]
    models = [apply(model, Scheme(attention=scheme)) for scheme in schemes]
    for window in track(windows, title):
        skip = min(UNSCORED, len(window) // 4)
        exact = model(window[None])[0, skip:]
        for other, row in zip(models, scores, strict=True):
            kl, top = divergence(exact, other(window[None])[0, skip:])
            row.kl.append(kl)
            row.top.append(top)
    return scores


def llama_scores(
    library: Path, model: Path, work: Path, windows: Sequence[Tensor], types: Iterable[str]
) -> dict[str, Any]:
    peer = [sys.executable, str(Path(__file__).with_name("contexts_peer.py")), str(library)]
    floats = once(work / "F32.gguf", lambda out: subprocess.run([*peer, "floats", str(model), str(out)], check=True))
    ids = work / f"ids-{len(windows[0])}.npy"
    np.save(ids, torch.stack(list(windows)).numpy().astype(np.int32))
    skip = min(UNSCORED, len(windows[0]) // 4)
    call = [*peer, "measure", str(floats), str(ids), str(skip), *types]
    done = subprocess.run(call, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    return dict(json.loads(done.stdout))


def parts(arguments: argparse.Namespace, texts: dict[str, Path], caches: dict[str, tuple[int, int]]) -> None:
    """Measure what the work folder lacks, a file for each text, context and tool."""

    @functools.cache
    def plain() -> tuple[Any, Any]:
        return load(arguments.model)

    @functools.cache
    def differential() -> Any:
        return diffbit.load(arguments.differential).eval()

    @functools.cache
    def windows(name: str, length: int, count: int) -> list[Tensor]:
        return windows_of(plain()[1], texts[name], count, length)

    def named(scores: Sequence[Scores]) -> dict[str, Any]:
        return {name: asdict(row) for name, row in zip(caches, scores, strict=True)}

    def ours(place: tuple[str, int, int]) -> dict[str, Any]:
        formats = [format_of(*bits) for bits in caches.values()]
        return named(measure(plain()[0], windows(*place), formats, f"{place[0]}, {place[1]}"))

    def llama(place: tuple[str, int, int]) -> dict[str, Any]:
        return llama_scores(arguments.llama, arguments.model, arguments.work, windows(*place), LLAMA)

    def conversion(place: tuple[str, int, int]) -> dict[str, Any]:
        few = windows(*place)[:CONVERTED]
        return named(converted(differential(), few, caches, f"{place[0]}, {place[1]}, converted"))

    tools = {"diffbit": ours} | ({"llama": llama} if arguments.llama else {})
    for length, count in zip(arguments.contexts, arguments.windows, strict=True):
        if arguments.differential and length <= arguments.most_converted:
            tools["converted"] = conversion
        else:
            tools.pop("converted", None)
        for name in texts:
            for tool, make in tools.items():
                file = arguments.work / f"{name}-{length}-{tool}.json"
                once(file, lambda out, make=make, place=(name, length, count): write_json(out, make(place)))


def read(work: Path, name: str, length: int, tool: str) -> dict[str, Any]:
    file = work / f"{name}-{length}-{tool}.json"
    return dict(json.loads(file.read_text())) if file.exists() else {}


def tables(work: Path, names: Sequence[str], contexts: Sequence[int]) -> dict[str, str]:
    """Return the table of KL by context and cache, and that of the conversion's KL over the plain model's."""

    def shown(value: float) -> str:
        return f"{value:.4f}"

    rows = [("diffbit", name, stored_bits(*bits)) for name, bits in OURS.items()]
    rows += [("llama", name, bits) for name, bits in LLAMA.items()]
    lines, ratios = [], []
    for length in contexts:
        for tool, name, bits in rows:
            cells = [read(work, text, length, tool).get(name) for text in names]
            shown_cells = ["" if cell is None else with_interval(cell["kl"], shown) for cell in cells]
            if any(shown_cells):
                lines.append([length, f"llama.cpp {name}" if tool == "llama" else name, f"{bits:g}", *shown_cells])
        for name in OURS:
            pairs = [[read(work, text, length, tool).get(name) for tool in ("converted", "diffbit")] for text in names]
            shown_cells = [
                f"{statistics.mean(copy['kl']) / statistics.mean(plain['kl'][: len(copy['kl'])]):.4f}" if copy else ""
                for copy, plain in pairs
            ]
            if any(shown_cells):
                ratios.append([length, name, *shown_cells])
    return {
        "contexts": table(["tokens", "cache", "bits a number", *names], lines),
        "conversion": table(["tokens", "cache", *names], ratios),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--work", type=Path, required=True, help="a folder for the parts")
    parser.add_argument("--texts", nargs="+", required=True, metavar="NAME=FILE", help="text files")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 2048], help="(default: 512 2048)")
    parser.add_argument("--windows", type=int, nargs="+", default=[4, 2], help="of each context (default: 4 2)")
    parser.add_argument("--llama", type=Path, metavar="FOLDER", help="llama.cpp's library (see above)")
    parser.add_argument("--differential", type=Path, help="the model's conversion")
    parser.add_argument("--most-converted", type=int, default=2048, help="longest context of it (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="two caches and windows of 96 tokens: does it run?")
    add_outputs(parser, PAGE)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.contexts, arguments.windows = [96], [2]
    if len(arguments.contexts) != len(arguments.windows) or min(arguments.windows) < 1:
        parser.error("wanted a number of --windows, 1 or more, for each of --contexts")
    if any(length < 2 * BLOCK for length in arguments.contexts):
        parser.error(f"--contexts are {arguments.contexts}, wanted {2 * BLOCK} or more")
    texts = {name: Path(file) for name, _, file in (text.partition("=") for text in arguments.texts)}
    for path in (arguments.model, *texts.values(), *filter(None, (arguments.llama, arguments.differential))):
        if not path.exists():
            parser.error(f"{path} does not exist" if path.name else "--texts: wanted NAME=FILE")
    torch.set_num_threads(1)
    arguments.work.mkdir(parents=True, exist_ok=True)
    try:
        parts(arguments, texts, QUICK if arguments.quick else OURS)
    except ValueError as error:
        parser.error(str(error))
    known = sorted({int(file.name.split("-")[1]) for file in arguments.work.glob("*-*-diffbit.json")})
    texts_by_name = tables(arguments.work, list(texts), known)
    about = f"{describe()}. `{command_line(__file__, sys.argv[1:])}`\n\n"
    texts_by_name["contexts"] = about + texts_by_name["contexts"]
    for name, text in texts_by_name.items():
        print(f"\n## {name}\n\n{text}")
    numbers = {file.stem: json.loads(file.read_text()) for file in sorted(arguments.work.glob("*-*-*.json"))}
    write_outputs(arguments, numbers, texts_by_name)


if __name__ == "__main__":
    main()
