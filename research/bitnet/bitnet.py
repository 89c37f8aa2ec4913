"""What training in low bits costs and buys: the tables of research/bitnet, from folders that were trained before.

    python research/bitnet/bitnet.py out/bitnet --floats examples/nano                       # to the terminal
    python research/bitnet/bitnet.py out/bitnet --floats examples/nano --json out/bitnet.json --markdown --name nano

RUNS holds a folder for each model: VARIANT, the float one, and VARIANT_KIND for others, such as diff_v1_ternary,
diff_v1_distilled or softmax_int4 (what `diffbit train --qat` leaves). Float models may lie elsewhere, in the folder
that --floats names. Any may be missing; a model is held against the float one of its own variant, window by window of
the same held-out text, and its loss against the first variant's at the same kind.

Every model is exported twice: at fp16, for its size on disk, and at fp32, which is what CPUs compute in, for its speed.
Speed needs a quiet machine: contenders take turns, numbers are medians over the rounds. Bytes and operations of
a token are counted from shapes (apps/evaluate/cost.py), float numbers at 16 bits.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import torch
from machine import describe
from report import Row, add_outputs, command_line, increase, interval, nats, share, table, verdict, write_outputs

from diffbit.apps.evaluate.cost import token_cost
from diffbit.apps.evaluate.measure import Setup, measure
from diffbit.apps.evaluate.metrics import Scores, mean, paired, perplexity_ratio, recovered
from diffbit.calib_data import Windows, eval_windows
from diffbit.export import export_artifact
from diffbit.io.errors import DiffbitError
from diffbit.io.files import read_json
from diffbit.io.progress import set_quiet, track
from diffbit.models import Checkpoint
from diffbit.quantize import load, read_scheme
from diffbit.runtime import Artifact, bench

VARIANTS = {"softmax": "Transformer", "diff_v1": "DIFF v1", "diff_v2": "DIFF v2"}
FLOAT, TERNARY = "float", "ternary"
KINDS = (FLOAT, TERNARY, "distilled", "int4")  # first in the tables, in this order; others follow
QUICK_WINDOWS = 6
MILLIONS = ("million ternary additions", "million integer products", "million float products")  # of a token
ROUNDS, PROMPT_TOKENS, NEW_TOKENS = 5, 64, 64


@dataclass(frozen=True)
class Model:
    """A folder to measure."""

    attention: str
    kind: str
    path: Path


def find(runs: Path, floats: Path | None) -> list[Model]:
    """All models of RUNS and --floats, variant by variant."""
    models = []
    for attention in VARIANTS:
        folders = {
            path.name.removeprefix(attention).removeprefix("_") or FLOAT: path for path in runs.glob(f"{attention}*")
        }
        if floats is not None:
            folders.setdefault(FLOAT, floats / attention)
        ranked = sorted(folders, key=lambda kind: (KINDS.index(kind) if kind in KINDS else len(KINDS), kind))
        models += [
            Model(attention, kind, folders[kind]) for kind in ranked if (folders[kind] / "config.json").is_file()
        ]
    if not models:
        raise DiffbitError(f"{runs}: holds no model named like diff_v1 or softmax_ternary; train some first")
    tokenizers = {(model.path / "tokenizer.json").read_bytes(): model.path for model in models}
    if len(tokenizers) > 1:
        paths = " and ".join(map(str, tokenizers.values()))
        raise DiffbitError(f"{paths}: other tokenizers, so perplexities cannot be compared; train with --tokenizer")
    return models


# ---- measuring ------------------------------------------------------------------------------------------------------


def score(path: Path, windows: Windows) -> Scores:
    """In a process of its own."""
    torch.set_num_threads(1)
    set_quiet(True)
    (measured,), _ = measure(load(path), [], Setup(windows))
    return measured.scores


def facts(model: Model, context: int, scores: dict[tuple[str, str], Scores], folder: Path) -> Row:
    """A row: what shapes, files and scores say of a model."""
    checkpoint = Checkpoint(model.path)
    cost = token_cost(checkpoint.config, read_scheme(checkpoint), context)
    artifact = Artifact.open(export_artifact(model.path, folder / f"{model.path.name}_fp16", dtype="fp16"))
    of_model, exact, ternary = (scores.get((model.attention, kind)) for kind in (model.kind, FLOAT, TERNARY))
    assert of_model is not None
    row: Row = {
        "model": VARIANTS[model.attention], "kind": model.kind, "sha256": checkpoint.sha256(),
        "nbytes": artifact.nbytes, "moved": cost.nbytes, "operations": cost.operations,
        "perplexity": of_model.perplexity().to_dict(), "ratio": None, "closed": None,
    }  # fmt: skip
    if exact is not None and model.kind != FLOAT:
        row["ratio"] = perplexity_ratio(of_model, exact).to_dict()
        if ternary is not None and model.kind != TERNARY and (closed := recovered(of_model, ternary, exact)):
            row["closed"] = closed.to_dict()
    if (model.path / "training.json").is_file():
        run = read_json(model.path / "training.json")
        options = run["config"]
        rows = options["steps"] * options["batch_size"] * options["accumulate"] * run["processes"]
        row["tokens"] = rows * options["length"]
    return row


def run(models: Sequence[Model], quick: bool, jobs: int | None, folder: Path) -> Row:
    """Measure everything."""
    length = min(512, *(Checkpoint(model.path).config.max_position for model in models))
    windows = eval_windows("stdlib", models[0].path, length, QUICK_WINDOWS if quick else None)
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        tasks = [pool.submit(score, model.path, windows) for model in models]
        results = [task.result() for task in track(tasks, "scoring")]
    scores = {(model.attention, model.kind): result for model, result in zip(models, results, strict=True)}
    rows = [facts(model, length, scores, folder) for model in track(models, "exporting")]
    artifacts = [export_artifact(model.path, folder / f"{model.path.name}_fp32", dtype="fp32") for model in models]
    rates: list[list[float]] = [[] for _ in models]
    for _ in range(1 if quick else ROUNDS):
        for artifact, own_rates in zip(artifacts, rates, strict=True):
            took = bench(artifact, PROMPT_TOKENS, NEW_TOKENS, repeats=3, threads=1)
            own_rates.append(took["decode_tokens_per_s"])
    for row, own_rates in zip(rows, rates, strict=True):
        row["decode_tokens_per_s"] = statistics.median(own_rates)
    text = {"sha256": windows.sha256, "windows": len(windows.ids), "length": length, "scored_tokens": windows.scored}
    return {"rows": rows, "contrasts": contrasts(models, scores), "machine": describe(), "text": text,
            "command": command_line(__file__, sys.argv[1:])}  # fmt: skip


def contrasts(models: Sequence[Model], scores: dict[tuple[str, str], Scores]) -> list[Row]:
    """What each kind costs a variant more than the first one, paired: nats a token of log(ratio) - log(ratio)."""
    first = models[0].attention
    rows = []
    for model in models:
        places = [(a, k) for a in (model.attention, first) for k in (model.kind, FLOAT)]
        if model.kind == FLOAT or model.attention == first or not all(place in scores for place in places):
            continue
        low, exact, other, other_exact = (scores[place] for place in places)
        estimate = mean(
            paired(low, exact) - paired(other, other_exact), exact.tokens, document=exact.document
        ).to_dict()
        rows.append({"model": VARIANTS[model.attention], "against": VARIANTS[first], "kind": model.kind,
                      "difference": estimate})  # fmt: skip
    return rows


# ---- tables ---------------------------------------------------------------------------------------------------------


def tables(result: Row) -> str:
    """All of them, for one place in research/bitnet."""
    text = result["text"]
    about = (
        f"{result['machine']}, one thread. {text['windows']} windows of {text['length']} held-out tokens, "
        f"{text['scored_tokens']:,} scored (SHA-256 {text['sha256'][:12]}). `{result['command']}`"
    )
    quality, costs = [], []
    for row in result["rows"]:
        named = [row["model"], row["kind"].replace("_", " ")]
        tokens = f"{row['tokens'] / 1e6:.1f}" if "tokens" in row else ""
        perplexity = interval(row["perplexity"], lambda value: f"{value:.3f}")
        quality.append([*named, tokens, perplexity, increase(row["ratio"]), share(row["closed"])])
        operations = [f"{count / 1e6:.2f}" for count in row["operations"].values()]
        sizes = f"{row['nbytes'] / 1e6:.2f}", f"{row['decode_tokens_per_s']:,.0f}", f"{row['moved'] / 1e6:.2f}"
        costs.append([*named, *sizes, *operations])
    lines = [
        [c["kind"].replace("_", " "), f"{c['model']} − {c['against']}", interval(c["difference"], nats),
         verdict(c["model"], c["difference"])] for c in result["contrasts"]
    ]  # fmt: skip
    header = ["model", "weights"]
    parts = [
        about,
        table([*header, "million tokens", "perplexity", "over float", "of ternary's gap closed"], quality),
        table([*header, "MB on disk", "tokens/s", "MB read a token", *MILLIONS], costs),
        table(["weights", "models", "difference of loss, nats a token", ""], lines) if lines else "",
    ]
    return "\n\n".join(filter(None, parts))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, metavar="RUNS", help="folder of VARIANT and VARIANT_KIND models")
    parser.add_argument("--floats", type=Path, metavar="FOLDER", help="where float models lie that RUNS does not hold")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that score (default: %(default)s)")
    add_outputs(parser, "research/bitnet/README.md")
    parser.add_argument("--name", default="nano", help="of the tables' place in the page (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few windows, one round: does everything run?")
    options = parser.parse_args()
    try:
        with TemporaryDirectory() as temporary:
            result = run(find(options.runs, options.floats), options.quick, options.jobs, Path(temporary))
    except DiffbitError as error:
        raise SystemExit(f"error: {error}") from None
    text = tables(result)
    print(text)
    write_outputs(options, result, {options.name: text})


if __name__ == "__main__":
    main()
