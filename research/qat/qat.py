"""SmolLM2-135M-Instruct trained for low bits on its own predictions, beside rounding and GPTQ.

    python research/qat/qat.py --work DIR [--wikitext FILE] [--only NAME ...] [--json FILE] [--markdown]

DIR needs 12 GB. It keeps what was made for the next time, and runs that were stopped go on from their last checkpoint:
give the same command again.

Model    that of smollm2.py, published weights; teacher and start of every run.
Text     training on the 100 articles of smollm2.py's Wikipedia (0.5 million tokens: runs of 1 million see each twice),
         rows of ROW tokens, BATCH rows a step. Scores on windows of ROW tokens of news, and of WikiText-2's raw test if
         FILE is given: half of WINDOWS from each.
Runs     a learning rate is chosen for each format from RATES, by the divergence from the teacher in the last 5 of
         PROBE steps; the runs of SIZES tokens then have that rate. Runs that train scales or adapters alone have a
         search of their own. Rounding to nearest ("rtn") is where training starts.
Scores   KL to the float model and the ratio of perplexities, in the arithmetic of the artifacts (smollm2.py). In all
         models the embedding, which is the head, too, is float, as training leaves it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import numpy as np
import torch
from commands import BATCH, ROW, once, run_diffbit, trained
from machine import describe
from report import add_outputs, command_line, interval, table, write_json, write_outputs
from smollm2 import exact_logits, fetch, logits_of, scores, text_windows

import diffbit
from diffbit.apps.evaluate.metrics import Scores, perplexity_ratio
from diffbit.export import reference_model
from diffbit.io.files import parse_json, read_json
from diffbit.models import Checkpoint, load

WINDOWS = 24
PROBE = 24  # steps
RATES = {"all": (3e-4, 1e-3), "scales": (3e-4, 1e-3), "lora": (3e-4, 1e-3)}
SIZES = (100_000, 300_000, 1_000_000)  # tokens
SHORT = ("--max-windows", "24", "--length", "256")  # of calibration text, a tenth of the default, to save time
FLOAT_TABLE = ("--embedding", "none", "--head", "none")
# name: format, what is trained, tokens; or a method of `diffbit quantize`
ROWS: dict[str, tuple[str, str, int]] = {
    f"{format} {name}": (format, kind, tokens)
    for format in ("int3_g64", "int2_g64", "ternary")
    for name, kind, tokens in (
        ("rtn", "rtn", 0),
        ("gptq", "gptq", 0),
        *((f"{tokens / 1e6:.1f} M", "all", tokens) for tokens in SIZES),
        ("scales 0.1 M", "scales", SIZES[0]),
        ("lora 0.1 M", "lora", SIZES[0]),
    )
    if format != "ternary" or kind in ("rtn", "all")
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for models and runs")
    parser.add_argument("--wikitext", type=Path, help="wiki.test.raw of WikiText-2")
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=ROWS, help="these rows")
    add_outputs(parser, "research/qat/README.md")
    arguments = parser.parse_args()
    work = arguments.work
    model, news, wiki = fetch(work)
    files = [news] if arguments.wikitext is None else [news, arguments.wikitext]
    windows = torch.cat([text_windows(model, file, WINDOWS // len(files), ROW) for file in files])
    sample = "news" if arguments.wikitext is None else "both"
    shape = (*windows.shape, Checkpoint(model).config.vocab_size)
    exact = exact_logits(work / f"{sample}.npy", shape, lambda: logits_of(load(model).eval(), windows))
    text = windows, torch.ones_like(windows, dtype=torch.bool)
    reference = scores(text, exact, exact)
    rows = {}
    for name in arguments.only or ROWS:
        folder = made(work, name, model, wiki)

        def measure(out: Path, folder: Path = folder) -> None:
            measured = scores(text, exact, logits_of(reference_model(folder), windows))
            write_json(out, {name: values.tolist() for name, values in asdict(measured).items() if values is not None})

        row = read_json(once(work / f"{folder.name}.{sample}.json", measure))
        rows[name] = Scores(**{name: np.array(values) for name, values in row.items()})
        page, numbers = report(rows, reference, work, command_line(__file__, sys.argv[1:]))
        print(page, flush=True)
    write_outputs(arguments, numbers, {"qat": page})


def made(work: Path, name: str, model: Path, wiki: Path) -> Path:
    """The quantized checkpoint of a row."""
    format, kind, tokens = ROWS[name]
    folder = work / name.replace(" ", "-")
    if not tokens:
        options = () if kind == "rtn" else SHORT
        return once(folder, lambda out: run_diffbit(
            "quantize", model, "--weights", format, "--method", kind, *FLOAT_TABLE, *options, "-o", out, "--quiet"
        ))  # fmt: skip
    start = made(work, f"{format} gptq", model, wiki) if kind == "scales" else model
    rates = {rate: probed(work, format, kind, rate, start, model, wiki) for rate in RATES[kind]}
    rate = min(rates, key=lambda rate: rates[rate])
    return distilled(folder, format, kind, rate, round(tokens / (ROW * BATCH)), start, model, wiki)


def probed(work: Path, format: str, kind: str, rate: float, start: Path, model: Path, wiki: Path) -> float:
    """The divergence of a short run's last steps."""

    def measure(out: Path) -> None:
        run = distilled(work / f"probe-{format}-{kind}-{rate}", format, kind, rate, PROBE, start, model, wiki)
        rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
        out.write_text(json.dumps(statistics.fmean(row["distill_loss"] for row in rows[-5:])))
        shutil.rmtree(run)

    return float(json.loads(once(work / f"probe-{format}-{kind}-{rate}.json", measure).read_text()))


def distilled(out: Path, format: str, kind: str, rate: float, steps: int, start: Path, model: Path, wiki: Path) -> Path:
    """The folder of a finished run."""
    options = "--distill", model, "--qat", format, "--trainable", kind, "--accumulate", 1
    return trained(out, start, wiki, steps, rate, *options)


def report(rows: dict[str, Scores], reference: Scores, work: Path, command: str) -> tuple[str, dict[str, Any]]:
    """The table, and its numbers."""
    lines, numbers = [], {}
    for name, row in rows.items():
        kl, ratio = row.divergence().to_dict(), perplexity_ratio(row, reference).to_dict()
        tokens, file = ROWS[name][2], work / name.replace(" ", "-") / "training.json"
        options = parse_json(file.read_bytes(), str(file))["config"] if tokens else {}
        numbers[name] = {"kl": kl, "perplexity_ratio": ratio, "learning_rate": options.get("learning_rate")}
        lines.append([
            name, f"{options['learning_rate']:.0e}" if options else "", interval(kl, "{:.3f}".format),
            interval(ratio, lambda value: f"{100 * (value - 1):+.1f} %"),
        ])  # fmt: skip
    base = interval(reference.perplexity().to_dict(), "{:.1f}".format)
    text = table(["", "learning rate", "KL, nats per token", "perplexity"], lines)
    return (
        f"{describe()}. {len(reference.tokens)} windows of {ROW} tokens; the float model's perplexity is {base}. "
        f"`{command}`\n\n{text}\n",
        {"diffbit": diffbit.__version__, "command": command, "rows": numbers},
    )


if __name__ == "__main__":
    main()
