"""What low-bit attention costs trained models, with weights in float: the tables of research/attention.

    python benchmarks/attention.py                                          # to the terminal
    python benchmarks/attention.py --json out/attention.json --markdown     # keep the numbers; renew research/attention
    python benchmarks/attention.py --quick --models CHECKPOINT CHECKPOINT   # does everything run?

Every variant of every model is made in memory and scored on windows of the eval split, token by token beside the model
as it is (apps/evaluate/compare.py). The models of examples/nano_1k, which have learned to find needles, are also asked
for needles. The variants of one table and one model are a process of one thread. PARTS says what is in the tables.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from accuracy import NAMES, TRIO, of
from machine import describe
from report import Row, add_outputs, increase, interval, nats, table, verdict, write_outputs

from diffbit.apps.evaluate.compare import conclude
from diffbit.apps.evaluate.measure import Measurement, Setup, measure
from diffbit.apps.evaluate.metrics import mean, paired
from diffbit.apps.evaluate.variants import NO_METHOD, UNCHANGED, Variant
from diffbit.calib_data import NeedleWindows, Windows, eval_windows, needle_windows
from diffbit.io.progress import set_quiet, track
from diffbit.models import Checkpoint, load
from diffbit.ops.kv_cache import BITS
from diffbit.quantize import AttentionScheme, Scheme

ROOT = Path(__file__).parents[1]
LONG = [ROOT / "examples" / "nano_1k" / name for name in ("softmax", "diff_v1")]
WINDOWS, LONG_WINDOWS, ROWS, QUICK = 64, 12, 24, 4
SPACING = 64  # tokens of a row for each needle; all needles are asked for
LOGITS = {f"{bits} bits": AttentionScheme(logits=bits) for bits in (8, 6, 5, 4, 3, 2)}
AGAINST = (6, 8), (6, 6), (4, 6), (4, 4), (3, 3)  # bits of another model's logits, and of the first one's


def _cache(keys: str | None, values: str | None, window: int = 32) -> AttentionScheme:
    return AttentionScheme(keys=keys, values=values, window=window)


def _products(queries: str, keys: str, window: int = 32) -> AttentionScheme:
    return AttentionScheme(qk=queries, keys=keys, window=window)


CACHE = {
    "fp16": _cache("fp16", "fp16"),
    "int8": _cache("int8", "int8"),
    "int4, window 0": _cache("int4", "int4", 0),
    "int4, window 32": _cache("int4", "int4"),
    "int4, window 128": _cache("int4", "int4", 128),
    "int2, window 0": _cache("int2", "int2", 0),
    "int2, window 32": _cache("int2", "int2"),
    "int2, window 128": _cache("int2", "int2", 128),
    "keys int4, values int2": _cache("int4", "int2"),
    "keys int2, values int4": _cache("int2", "int4"),
    "keys int4": _cache("int4", None),
    "keys int2": _cache("int2", None),
    "values int4": _cache(None, "int4"),
    "values int2": _cache(None, "int2"),
}
PRODUCTS = {
    "q int8, keys int8": _products("int8", "int8"),
    "q int8, keys int4": _products("int8", "int4"),
    "q int4, keys int4": _products("int4", "int4"),
    "q int4, keys int4, window 0": _products("int4", "int4", 0),
    "q int8, keys int2": _products("int8", "int2"),
    "q int4, keys int2": _products("int4", "int2"),
}
PARTS = {"logits": LOGITS, "cache": CACHE, "products": PRODUCTS}
# What is also measured at the longer context, where explicit attention weights take their time
AT_LENGTH = {
    "8 bits", "6 bits", "4 bits", "3 bits", "int8", "int4, window 32", "int2, window 32", "keys int4, values int2",
    "keys int2, values int4", "q int8, keys int8", "q int8, keys int4", "q int4, keys int4",
}  # fmt: skip


# ---- measuring ------------------------------------------------------------------------------------------------------


def chosen(part: str, long: bool, quick: bool) -> list[Variant]:
    schemes = [(name, scheme) for name, scheme in PARTS[part].items() if not long or name in AT_LENGTH]
    schemes = schemes[: 2 if quick else None]
    return [Variant(part, name, NO_METHOD, _bits(scheme), Scheme(attention=scheme)) for name, scheme in schemes]


def _bits(scheme: AttentionScheme) -> float:
    return scheme.logits or min(BITS[scheme.key_format], BITS[scheme.value_format])


def work(
    path: Path, name: str, part: str, windows: Windows, needles: Sequence[NeedleWindows], quick: bool
) -> tuple[list[Measurement], float]:
    """A model as it is and the variants of one part; and the processor's seconds."""
    torch.set_num_threads(1)
    set_quiet(True)
    begin = time.process_time()
    setup = Setup(windows, needles=needles)
    measurements, _ = measure(load(path), chosen(part, bool(needles), quick), setup, name=name)
    return measurements, time.process_time() - begin


def run(paths: Sequence[Path], count: int, rows: int, quick: bool, jobs: int) -> Row:
    """Measure models of one context length, on `count` windows and `rows` rows with needles (0: none)."""
    checkpoints = [Checkpoint(path) for path in paths]
    names = [NAMES[checkpoint.config.attention] for checkpoint in checkpoints]
    length = min(checkpoint.config.max_position for checkpoint in checkpoints)
    windows = eval_windows("stdlib", paths[0], length, count)
    needle_count = length // SPACING
    needles = [needle_windows("stdlib", paths[0], length, needle_count, needle_count, rows)] if rows else []
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        tasks = [
            (name, pool.submit(work, path, name, part, windows, needles, quick))
            for part in PARTS
            for path, name in zip(paths, names, strict=True)
        ]
        results = [(name, *task.result()) for name, task in track(tasks, f"measuring at {length} tokens")]
    measured: dict[str, list[Measurement]] = {}
    for name, part, _ in results:
        measured[name] = measured.get(name, part[:1]) + part[1:]
    comparison = conclude([[one] for one in checkpoints], measured, [], Setup(windows, needles=needles))
    minutes = sum(seconds for *_, seconds in results) / 60
    return comparison.to_dict() | {"losses": _losses(measured), "minutes": minutes}


def _losses(measured: Mapping[str, Sequence[Measurement]]) -> list[Row]:
    """By how many nats a token more logits cost a model than others cost the first one, paired."""
    by_bits = {
        name: {one.variant.scheme.attention.logits: one.scores for one in measurements if one.variant.what != UNCHANGED}
        for name, measurements in measured.items()
    }
    first, *others = measured
    losses = []
    for bits, first_bits in AGAINST:
        for other in others:
            low, first_low = by_bits[other].get(bits), by_bits[first].get(first_bits)
            if low is None or first_low is None:  # not measured
                continue
            lost = paired(low, measured[other][0].scores) - paired(first_low, measured[first][0].scores)
            difference = mean(lost, low.tokens, document=low.document).to_dict()
            losses.append({"model": other, "bits": bits, "against": first, "first_bits": first_bits,
                           "difference": difference})  # fmt: skip
    return losses


# ---- tables ---------------------------------------------------------------------------------------------------------


def cost_table(comparison: Row, part: str) -> str:
    """A line for each variant, with its loss of every model."""
    models = [model["name"] for model in comparison["models"]]
    lines = [["float", *(cell for model in models for cell in (_perplexity(comparison, model), ""))]]
    for variant in _variants(comparison, part):
        line = [variant]
        for model in models:
            (row,) = of(comparison, part, model=model, format=variant)
            line += [increase(row["ratio"]), interval(row["kl"], lambda value: f"{value:.5f}")]
        lines.append(line)
    return table(["", *(cell for model in models for cell in (f"{model}: perplexity up", "KL"))], lines)


def needles_table(comparison: Row) -> str:
    """Needles that each model finds, and the change in points."""
    models = [model["name"] for model in comparison["models"]]
    lines = [["float", *(f"{100 * _whole(comparison, m)['retrieval'][0]['accuracy']['value']:.1f} %" for m in models)]]
    for part in PARTS:
        for variant in _variants(comparison, part):
            rows = [of(comparison, part, model=model, format=variant)[0]["retrieval"][0] for model in models]
            cells = [f"{100 * row['accuracy']['value']:.1f} %, {_points(row['change'])}" for row in rows]
            lines.append([f"logits, {variant}" if part == "logits" else variant, *cells])
    return table(["", *models], lines)


def losses_table(comparison: Row) -> str:
    lines = [
        [f"{row['model']} at {row['bits']} bits − {row['against']} at {row['first_bits']}",
         interval(row["difference"], nats), verdict(row["model"], row["difference"])]
        for row in comparison["losses"]
    ]  # fmt: skip
    return table(["logits", "difference of loss, nats a token", ""], lines)


def _variants(comparison: Row, part: str) -> Iterable[str]:
    return dict.fromkeys(row["format"] for row in of(comparison, part))


def _whole(comparison: Row, model: str) -> Row:
    (row,) = of(comparison, "none", model=model)
    return row


def _perplexity(comparison: Row, model: str) -> str:
    return f"({_whole(comparison, model)['perplexity']['value']:.3f})"


def _points(change: Row) -> str:
    return interval(change, lambda value: f"{100 * value:+z.1f}".replace("-", "−"))


def about(comparison: Row, command: str) -> str:
    text, needles = comparison["text"], comparison["needles"]
    asked = f" {needles[0]['rows']} rows with {needles[0]['needles']} needles each." if needles else ""
    return (
        f"{describe()}; {comparison['minutes']:.0f} minutes of one core. {text['windows']} windows of {text['length']} "
        f"held-out tokens, {text['scored_tokens']:,} scored (SHA-256 {text['sha256'][:12]}).{asked} `{command}`"
    )


def tables(short: Row, long: Row | None, command: str) -> dict[str, str]:
    """By the name of their place in research/attention."""
    texts = {"about": about(short, command), "losses": losses_table(short)}
    texts |= {part: cost_table(short, part) for part in PARTS}
    if long is not None:
        texts |= {"about_1k": about(long, command), "needles_1k": needles_table(long)}
        texts |= {f"{part}_1k": cost_table(long, part) for part in PARTS}
    return texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", default=TRIO, metavar="CHECKPOINT",
                        help="of unequal attention; the first is the yardstick (default: examples/nano)")  # fmt: skip
    parser.add_argument("--long", type=Path, nargs="*", default=LONG, metavar="CHECKPOINT",
                        help="that have learned needles (default: examples/nano_1k)")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: %(default)s)")
    add_outputs(parser, "research/attention/README.md")
    parser.add_argument("--quick", action="store_true", help="two variants a table and a few windows: does it run?")
    options = parser.parse_args()

    quick = options.quick
    short = run(options.models, QUICK if quick else WINDOWS, 0, quick, options.jobs)
    long = None
    if options.long:
        rows, windows = (QUICK, QUICK) if quick else (ROWS, LONG_WINDOWS)
        long = run(options.long, windows, rows, quick, options.jobs)
    texts = tables(short, long, shlex.join(["python", "benchmarks/attention.py", *sys.argv[1:]]))
    for name, text in texts.items():
        print(f"\n## {name}\n\n{text}")
    write_outputs(options, {"short": short, "long": long, "machine": describe()}, texts)


if __name__ == "__main__":
    main()
