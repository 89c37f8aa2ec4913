"""What low bits cost trained models, and what each method gives back: the tables of research/weights.

    python benchmarks/accuracy.py                                        # the trio in examples/nano, to the terminal
    python benchmarks/accuracy.py --json out/accuracy.json --markdown    # keep the numbers; renew research/weights
    python benchmarks/accuracy.py --quick --models CHECKPOINT CHECKPOINT # does everything run?

Every variant of every model is made in memory and scored on windows of the eval split, token by token beside the model
as it is (apps/evaluate/compare.py), in the artifact's arithmetic; each is rounded 5 times, in other orders of the
channels, by methods that calibrate on samples of the calib split. A model's variants by one recipe are a process
of one thread.
The JSON file is a comparison as `diffbit compare --json` prints it, and the time it took.

RECIPES says what is in the tables.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import torch
from machine import describe
from report import Row, add_outputs, increase, interval, nats, share, table, verdict, write_outputs

from diffbit.apps.evaluate.compare import Comparison, conclude
from diffbit.apps.evaluate.measure import Measurement, Setup, Skipped, measure
from diffbit.apps.evaluate.variants import Variant, variants
from diffbit.calib_data import Windows, eval_windows, samples
from diffbit.io.progress import set_quiet, track
from diffbit.models import Checkpoint, load
from diffbit.quantize import Scheme, table_formats
from diffbit.quantize.allocation import allocate

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
FLOAT_INPUTS = (("int8", "rtn"), ("int4_g128", "gptq"))  # what rounding the inputs of linear layers adds to these
WINDOWS, CALIBRATION_WINDOWS = 64, 64  # evenly spaced; in nano 16,384 tokens for Gram matrices of 640 columns at most
QUICK_FORMATS, QUICK_RECIPES, QUICK_WINDOWS = ("int4_g128", "int2_g64"), ("rtn", "gptq"), (6, 8)
MIXED_BITS = 3.5  # of a float32 artifact, in which int2_g64 has 2.5 and int4_g128 4.125
UNIFORM = ("int2_g64", "int4_g128")
INPUTS, MIXED = "inputs", "mixed"  # besides recipes, the parts of the work


# ---- measuring ------------------------------------------------------------------------------------------------------


def work(
    path: Path, name: str, part: str, windows: Windows, calibration: Sequence[Windows], quick: bool
) -> tuple[list[Measurement], list[Skipped], float]:
    """A model as it is and the variants of one part; and the processor's seconds."""
    torch.set_num_threads(1)
    set_quiet(True)
    begin = time.process_time()
    arithmetic = "artifact"
    if part == INPUTS:
        inputs = FLOAT_INPUTS[1:] if quick else FLOAT_INPUTS
        rounded = [variants([format], ["weights"], [recipe])[0] for format, recipe in inputs]
        chosen, arithmetic = [replace(variant, what=INPUTS) for variant in rounded], "float"
    elif part == MIXED:
        chosen = [mixed(path, calibration[0], "rtn" if quick else "gptq")]
    else:
        formats = QUICK_FORMATS if quick else RECIPES[part]
        chosen = variants(formats, ["weights"], [part])
    setup = Setup(windows, calibration, repeats=len(calibration), arithmetic=arithmetic)
    measurements, skipped = measure(load(path), chosen, setup, name=name)
    return measurements, skipped, time.process_time() - begin


def mixed(path: Path, calibration: Windows, method: str) -> Variant:
    """A format for each layer within a number of bits a weight; embedding and head as beside uniform ones."""
    embedding, head = table_formats(True, None, None)
    allocation = allocate(
        path, bits=MIXED_BITS, scheme=Scheme(None, embedding, head), method=method,
        calibration=calibration.ids, calibration_mask=calibration.mask,
    )  # fmt: skip
    return Variant(MIXED, f"mixed, {MIXED_BITS:g} bits", method, MIXED_BITS, allocation.scheme)


def run(paths: Sequence[Path], quick: bool, jobs: int, repeats: int) -> tuple[Comparison, float]:
    """Measure everything; and the processor's seconds."""
    checkpoints = [Checkpoint(path) for path in paths]
    names = [NAMES[checkpoint.config.attention] for checkpoint in checkpoints]
    windows, calibration = texts(checkpoints, quick, repeats)
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        tasks = [
            (name, pool.submit(work, path, name, part, windows, calibration, quick))
            for part in (*(QUICK_RECIPES if quick else RECIPES), INPUTS, MIXED)
            for path, name in zip(paths, names, strict=True)
        ]
        results = [(name, *task.result()) for name, task in track(tasks, "measuring")]
    measured: dict[str, list[Measurement]] = {}
    for name, measurements, *_ in results:  # as it is once, then its variants
        measured[name] = measured.get(name, measurements[:1]) + measurements[1:]
    measured = {name: [whole, *sorted(rest, key=_place)] for name, (whole, *rest) in measured.items()}
    skipped = [one for *_, left_out, _ in results for one in left_out]
    setup = Setup(windows, calibration, repeats=len(calibration))
    comparison = conclude([[one] for one in checkpoints], measured, skipped, setup)
    return comparison, sum(seconds for *_, seconds in results)


def texts(checkpoints: Sequence[Checkpoint], quick: bool, repeats: int) -> tuple[Windows, list[Windows]]:
    """What is scored, and samples to calibrate on."""
    length = min(512, *(checkpoint.config.max_position for checkpoint in checkpoints))
    scored, calibrating = QUICK_WINDOWS if quick else (WINDOWS, CALIBRATION_WINDOWS)
    windows = eval_windows("stdlib", checkpoints[0].path, length, scored)
    whole = eval_windows("stdlib", checkpoints[0].path, length, split="calib")
    return windows, samples(whole, calibrating, repeats)


def _place(one: Measurement) -> int:
    """Formats in their order; parts came in theirs."""
    return FORMATS.index(one.variant.format) if one.variant.format in FORMATS else len(FORMATS)


# ---- tables ---------------------------------------------------------------------------------------------------------


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
            cells = [perplexity, increase(row["ratio"]), share(row["recovered"]), divergence(row), size]
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
    contrasts = {(c["format"], c["method"], c["model"]): c for c in comparison["contrasts"] if c["what"] == "weights"}
    lines = []
    for format, method in dict.fromkeys((c[0], c[1]) for c in contrasts):
        line = [format, method]
        for other in others:
            contrast = contrasts.get((format, method, other))
            if contrast is None:
                line += ["", ""]
            else:
                line += [interval(contrast["difference"], nats), verdict(other, contrast["difference"])]
        lines.append(line)
    first = comparison["models"][0]["name"]
    return table(["weights", "method", *(cell for other in others for cell in (f"{other} − {first}", ""))], lines)


def mixed_table(comparison: Row) -> str:
    lines = []
    for model in (model["name"] for model in comparison["models"]):
        mix = of(comparison, MIXED, model=model)
        for row in [*of(comparison, "weights", model=model, method=mix[0]["method"]), *mix] if mix else []:
            if row["what"] == MIXED or row["format"] in UNIFORM:
                size = f"{row['bits_per_weight']:.3f}", f"{row['nbytes'] / 1e6:.2f}"
                lines.append([model, row["format"], row["method"], *size, increase(row["ratio"]), divergence(row)])
    return table(["model", "weights", "method", "bits", "MB", "increase", "KL, nats a token"], lines)


def inputs_table(comparison: Row) -> str:
    lines = []
    for model in (model["name"] for model in comparison["models"]):
        for row in of(comparison, INPUTS, model=model):
            (rounded,) = of(comparison, "weights", model=model, format=row["format"], method=row["method"])
            for one, inputs in ((row, "float"), (rounded, "int8")):
                perplexity, name = f"{one['perplexity']['value']:.3f}", f"{row['format']} weights, {inputs} inputs"
                lines.append([model, name, row["method"], perplexity, increase(one["ratio"]), divergence(one)])
    return table(["model", "linear layers", "method", "perplexity", "increase", "KL, nats a token"], lines)


def tables(comparison: Row) -> dict[str, str]:
    """By the name of their place in research/weights."""
    text, calibration = comparison["text"], comparison["calibration"]
    about = (
        f"{comparison['machine']}; {comparison['minutes']:.0f} minutes of one core in all. "
        f"{text['windows']} windows of {text['length']} held-out tokens, {text['scored_tokens']:,} scored "
        f"(SHA-256 {text['sha256'][:12]}); each rounded {calibration['samples']} times, calibrated on as many "
        f"samples of {calibration['tokens']:,} other tokens (SHA-256 of the first {calibration['sha256'][:12]}). "
        f"`{comparison['command']}`"
    )
    skipped = [f"Left out: {r['model']}, {r['format']} by {r['method']}: {r['reason']}." for r in comparison["skipped"]]
    return {
        "about": about,
        "weights": "\n\n".join([weights_tables(comparison), *skipped]),
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
    add_outputs(parser, "research/weights/README.md")
    parser.add_argument("--quick", action="store_true", help="two formats and a few windows: does everything run?")
    arguments = parser.parse_args()

    result, seconds = run(
        arguments.models, arguments.quick, arguments.jobs, 2 if arguments.quick else arguments.repeats
    )
    command = shlex.join(["python", "benchmarks/accuracy.py", *sys.argv[1:]])
    comparison = result.to_dict() | {"machine": describe(), "minutes": seconds / 60, "command": command}
    texts_by_name = tables(comparison)
    for name, text in texts_by_name.items():
        print(f"\n## {name}\n\n{text}")
    write_outputs(arguments, comparison, texts_by_name)


if __name__ == "__main__":
    main()
