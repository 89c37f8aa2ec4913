"""What low bits cost trained models, and what each method gives back: the tables of docs/accuracy.md.

    python benchmarks/accuracy.py                                        # the trio in examples/nano, to the terminal
    python benchmarks/accuracy.py --json out/accuracy.json --markdown    # keep the numbers; renew docs/accuracy.md
    python benchmarks/accuracy.py --quick --models CHECKPOINT CHECKPOINT # does everything run?

Every variant of every model is made in memory and scored on all windows of the eval split, token by token beside the
model as it is (evaluate/compare.py), in the artifact's arithmetic; each is rounded 5 times, in other orders of the
channels, by methods that calibrate on samples of 256 windows of the calib split. A model is a process of one thread.
The JSON file is a comparison as `diffbit compare --json` prints it, and the time it took.

RECIPES says what is in the tables.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import torch
from machine import describe
from report import Row, increase, interval, nats, percent, renew, table, verdict, write_json

from diffbit.calib_data import Windows, eval_windows, samples
from diffbit.evaluate.compare import Comparison, conclude
from diffbit.evaluate.measure import Measured, Refusal, measure
from diffbit.evaluate.variants import Variant, variants
from diffbit.models import Checkpoint, load
from diffbit.progress import set_quiet, track
from diffbit.quantize import Scheme, parse_format
from diffbit.quantize.allocate import plan

ROOT = Path(__file__).parents[1]
TRIO = [ROOT / "examples" / "nano" / name for name in ("softmax", "diff_v1", "diff_v2")]  # the first is held against
NAMES = {"softmax": "Transformer", "diff_v1": "DIFF v1", "diff_v2": "DIFF v2"}
FORMATS = ("int8", "int4_g128", "int3_g64", "int2_g64", "int2_g64_asym")
LOW = FORMATS[1:4]  # at 8 bits there is next to nothing to recover
RECIPES = {
    "rtn": FORMATS,
    "hqq": LOW,
    "awq": LOW,
    "gptq": FORMATS,
    "rotate+gptq": LOW,
    "learned": LOW[1:],  # slow, and made for the lowest bits
}
ROUNDED_INPUTS = (("int8", "rtn"), ("int4_g128", "gptq"))  # weights, and the recipe that rounds them
CALIBRATION_WINDOWS = 256
QUICK_FORMATS, QUICK_RECIPES, QUICK_WINDOWS = ("int4_g128", "int2_g64"), ("rtn", "gptq"), (6, 8)
MIXED_BITS = (3.0, 3.5)  # of a float32 artifact, in which int2_g64 has 2.5 and int4_g128 4.125
UNIFORM = ("int2_g64", "int4_g128")

Found, Refused = list[Measured], list[Refusal]


# ---- measuring ------------------------------------------------------------------------------------------------------


def work(
    path: Path, name: str, windows: Windows, calibration: Sequence[Windows], quick: bool
) -> tuple[Found, Refused, float]:
    """In a process of its own: a model as it is and all its variants; and the processor's seconds."""
    torch.set_num_threads(1)
    set_quiet(True)
    begin = time.process_time()
    chosen: list[Variant] = []
    for format in QUICK_FORMATS if quick else FORMATS:
        recipes = QUICK_RECIPES if quick else [recipe for recipe, formats in RECIPES.items() if format in formats]
        chosen += variants([format], ["weights"], recipes)
    chosen += [*with_inputs("artifact"), *mixed(path, calibration[0], quick)]
    decoder, repeats = load(path), len(calibration)
    measured, refused = measure(decoder, chosen, windows, calibration, name=name, repeats=repeats)
    floats, _ = measure(
        decoder, list(with_inputs("float")), windows, calibration, name=name, repeats=repeats, arithmetic="float"
    )
    measured += floats[1:]  # after the model as it is
    return measured, refused, time.process_time() - begin


def with_inputs(arithmetic: str) -> Iterator[Variant]:
    """Linear layers whose inputs are to be taken as the artifact's operators round them, or as they are."""
    for name, rounding in ROUNDED_INPUTS:
        format = parse_format(name)
        inputs = "int8" if arithmetic == "artifact" else "float"
        yield Variant("inputs", f"{name} weights, {inputs} inputs", rounding, format.bits, Scheme(weights=format))


def mixed(path: Path, calibration: Windows, quick: bool) -> Iterator[Variant]:
    """A format for each layer within a number of bits a weight, beside uniform ones of such sizes."""
    method, budgets = ("rtn", MIXED_BITS[:1]) if quick else ("gptq", MIXED_BITS)
    for name in UNIFORM:
        format = parse_format(name)
        yield Variant("mixed", name, method, format.bits, Scheme(weights=format))
    for bits in budgets:
        found = plan(path, bits=bits, method=method, calibration=calibration.ids, calibration_mask=calibration.mask)
        yield Variant("mixed", f"mixed, {bits:g} bits", method, bits, found.scheme)


def run(paths: Sequence[Path], quick: bool, jobs: int, repeats: int) -> tuple[Comparison, float]:
    """Measure everything, a process a model; and the processor's seconds."""
    checkpoints = [Checkpoint(path) for path in paths]
    names = [NAMES[checkpoint.config.attention] for checkpoint in checkpoints]
    length = min(512, *(checkpoint.config.max_position for checkpoint in checkpoints))
    windows = eval_windows("stdlib", paths[0], length, QUICK_WINDOWS[0] if quick else None)
    whole = eval_windows("stdlib", paths[0], length, split="calib")
    calibration = samples(whole, QUICK_WINDOWS[1] if quick else CALIBRATION_WINDOWS, repeats)
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        tasks = [
            pool.submit(work, path, name, windows, calibration, quick) for path, name in zip(paths, names, strict=True)
        ]
        found = [task.result() for task in track(tasks, "measuring")]
    measured = {name: own for name, (own, _, _) in zip(names, found, strict=True)}
    refused = [refusal for _, own, _ in found for refusal in own]
    return conclude(checkpoints, measured, refused, windows, calibration), sum(seconds for *_, seconds in found)


# ---- tables ---------------------------------------------------------------------------------------------------------


def recovered(row: Row) -> str:
    return interval(row["recovered"], lambda share: percent(share, 0))


def divergence(row: Row) -> str:
    return interval(row["kl"], lambda value: f"{value:.4f}")


def of(comparison: Row, what: str, **fields: str) -> list[Row]:
    rows: list[Row] = comparison["results"]
    return [row for row in rows if row["what"] == what and all(row[key] == value for key, value in fields.items())]


def weights_tables(comparison: Row) -> str:
    """A table for each model: all formats by all methods."""
    parts = []
    for model in comparison["models"]:
        (whole,) = of(comparison, "none", model=model["name"])
        lines = []
        for row in of(comparison, "weights", model=model["name"]):
            least = min(
                r["perplexity"]["value"] for r in of(comparison, "weights", model=model["name"], format=row["format"])
            )
            best = "**" if row["perplexity"]["value"] == least else ""
            size = f"{row['nbytes'] / 1e6:.2f}"
            perplexity = f"{best}{row['perplexity']['value']:.3f}{best}"
            cells = [perplexity, increase(row["ratio"]), recovered(row), divergence(row), size]
            lines.append([row["format"], row["method"], *cells])
        header = ["weights", "method", "perplexity", "increase", "of rtn's loss recovered", "KL, nats a token", "MB"]
        title = (
            f"### {model['name']}\n\n{model['parameters']:,} parameters. At 16 bits: perplexity "
            f"{interval(whole['perplexity'], lambda value: f'{value:.3f}')}, {whole['nbytes'] / 1e6:.2f} MB."
        )
        parts.append(f"{title}\n\n{table(header, lines)}")
    return "\n\n".join(parts)


def contrasts_table(comparison: Row) -> str:
    """Who loses more: every other model against the first, in each format by each method."""
    others = [model["name"] for model in comparison["models"][1:]]
    if not others:
        return "One model: nothing to hold it against."
    found = {(c["format"], c["method"], c["model"]): c for c in comparison["contrasts"] if c["what"] == "weights"}
    lines = []
    for format, method in dict.fromkeys((c[0], c[1]) for c in found):
        line = [format, method]
        for other in others:
            contrast = found.get((format, method, other))
            if contrast is None:
                line += ["", ""]
            else:
                line += [interval(contrast["difference"], nats), verdict(other, contrast["difference"])]
        lines.append(line)
    first = comparison["models"][0]["name"]
    return table(["weights", "method", *(cell for other in others for cell in (f"{other} − {first}", ""))], lines)


def mixed_table(comparison: Row) -> str:
    lines = []
    for row in of(comparison, "mixed"):
        size = f"{row['bits_per_weight']:.3f}", f"{row['nbytes'] / 1e6:.2f}"
        lines.append([row["model"], row["format"], row["method"], *size, increase(row["ratio"]), divergence(row)])
    return table(["model", "weights", "method", "bits", "MB", "increase", "KL, nats a token"], lines)


def inputs_table(comparison: Row) -> str:
    lines, order = [], [model["name"] for model in comparison["models"]]
    for row in sorted(of(comparison, "inputs"), key=lambda row: (order.index(row["model"]), row["format"])):
        perplexity = f"{row['perplexity']['value']:.3f}"
        lines.append([row["model"], row["format"], row["method"], perplexity, increase(row["ratio"]), divergence(row)])
    return table(["model", "linear layers", "method", "perplexity", "increase", "KL, nats a token"], lines)


def tables(comparison: Row) -> dict[str, str]:
    """By the name of their place in docs/accuracy.md."""
    text, calibration = comparison["text"], comparison["calibration"]
    about = (
        f"{comparison['machine']}; {comparison['minutes']:.0f} minutes of one core in all. "
        f"{text['windows']} windows of {text['length']} held-out tokens, {text['scored_tokens']:,} scored "
        f"(SHA-256 {text['sha256'][:12]}); each rounded {calibration['samples']} times, calibrated on as many "
        f"samples of {calibration['tokens']:,} other tokens (SHA-256 of the first {calibration['sha256'][:12]}). "
        f"`{comparison['command']}`"
    )
    refused = [f"Left out: {r['model']}, {r['format']} by {r['method']}: {r['reason']}." for r in comparison["refused"]]
    return {
        "about": about,
        "weights": "\n\n".join([weights_tables(comparison), *refused]),
        "contrasts": contrasts_table(comparison),
        "inputs": inputs_table(comparison),
        "mixed": mixed_table(comparison),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", default=TRIO, metavar="CHECKPOINT",
                        help="of unequal attention; the first is the yardstick (default: examples/nano)")  # fmt: skip
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="roundings of each variant (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--markdown", type=Path, nargs="?", const=ROOT / "docs" / "accuracy.md", metavar="FILE",
                        help="renew this page (default: docs/accuracy.md)")  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="two formats and a few windows: does everything run?")
    arguments = parser.parse_args()

    result, seconds = run(
        arguments.models, arguments.quick, arguments.jobs, 2 if arguments.quick else arguments.repeats
    )
    command = shlex.join(["python", "benchmarks/accuracy.py", *sys.argv[1:]])
    comparison = result.to_dict() | {"machine": describe(), "minutes": seconds / 60, "command": command}
    found = tables(comparison)
    for name, text in found.items():
        print(f"\n## {name}\n\n{text}")
    if arguments.json:
        write_json(arguments.json, comparison)
    if arguments.markdown:
        for name, text in found.items():
            renew(arguments.markdown, name, text)


if __name__ == "__main__":
    main()
