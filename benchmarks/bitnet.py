"""What training in low bits costs and buys: the tables of docs/bitnet.md, from folders that were trained before.

    python benchmarks/bitnet.py out/bitnet --floats examples/nano                       # to the terminal
    python benchmarks/bitnet.py out/bitnet --floats examples/nano --json out/bitnet.json --markdown --name nano
    python benchmarks/bitnet.py out/bitnet --skip-speed --quick                         # does everything run?

RUNS holds a folder for each model: VARIANT, the float one, and VARIANT_KIND for others, such as diff_v1_ternary,
diff_v1_distilled or softmax_int4 (what `diffbit train --qat` leaves). Float models may lie elsewhere, in the
folder that --floats names. Any may be missing; a model is held against the float one of its own variant, window by
window of the same held-out text, and its loss against the first variant's at the same kind.

Every model is exported twice: at fp16, for its size on disk, and at fp32, which is what CPUs compute in, for its speed.
Speed needs a quiet machine: contenders take turns, numbers are medians over the rounds. Bytes and operations of
a token are counted from shapes (evaluate/cost.py), float numbers at 16 bits.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from machine import describe
from report import renew, table

from diffbit.calib_data import Windows, eval_windows
from diffbit.errors import DiffbitError
from diffbit.evaluate.cost import token_cost
from diffbit.evaluate.measure import measure
from diffbit.evaluate.metrics import Estimate, Scores, mean, paired, perplexity_ratio, recovered
from diffbit.export import export_artifact
from diffbit.files import read_json
from diffbit.models import Checkpoint, num_parameters
from diffbit.progress import set_quiet, track
from diffbit.quantize import load, read_scheme
from diffbit.runtime import Artifact, bench

ROOT = Path(__file__).parents[1]
VARIANTS = {"softmax": "Transformer", "diff_v1": "DIFF v1", "diff_v2": "DIFF v2"}
FLOAT, TERNARY, DISTILLED, INT4 = "float", "ternary", "distilled", "int4"
KINDS = (FLOAT, TERNARY, DISTILLED, INT4)  # first in the tables, in this order; others follow
TERNARY_WITHIN, INT4_WITHIN, CLOSED = 0.10, 0.01, 0.5  # what is wanted: of perplexity, of it, of ternary's gap
QUICK_WINDOWS = 6
PROMPT_TOKENS, NEW_TOKENS = 64, 64

Row = dict[str, Any]


@dataclass(frozen=True)
class Model:
    """A folder to measure."""

    attention: str
    kind: str
    path: Path

    def __str__(self) -> str:
        return f"{VARIANTS[self.attention]}, {self.kind.replace('_', ' ')}"


def find(runs: Path, floats: Path | None) -> list[Model]:
    """All models of RUNS and --floats, variant by variant."""
    found = []
    for attention in VARIANTS:
        own = {FLOAT: runs / attention}
        if floats is not None and not _whole(own[FLOAT]):
            own[FLOAT] = floats / attention
        others = sorted(runs.glob(f"{attention}_*"))
        own |= {path.name.removeprefix(f"{attention}_"): path for path in others}
        ranked = sorted(own, key=lambda kind: (KINDS.index(kind) if kind in KINDS else len(KINDS), kind))
        found += [Model(attention, kind, own[kind]) for kind in ranked if _whole(own[kind])]
    if not found:
        raise DiffbitError(f"{runs}: holds no model named like diff_v1 or softmax_ternary; train some first")
    vocabularies = [read_json(model.path / "tokenizer.json").get("model", {}).get("vocab") for model in found]
    for model, vocabulary in zip(found, vocabularies, strict=True):
        if vocabulary != vocabularies[0]:
            raise DiffbitError(
                f"{model.path}: another vocabulary than {found[0].path}, so perplexities cannot be compared; train "
                f"with --tokenizer {found[0].path}"
            )
    return found


def _whole(path: Path) -> bool:
    return (path / "config.json").is_file()


# ---- measuring ------------------------------------------------------------------------------------------------------


def score(path: Path, windows: Windows) -> Scores:
    """In a process of its own."""
    torch.set_num_threads(1)
    set_quiet(True)
    (measured,), _ = measure(load(path), [], windows)
    return measured.scores


def facts(model: Model, context: int) -> Row:
    """What shapes and files say of a model."""
    checkpoint = Checkpoint(model.path)
    config, scheme = checkpoint.config, read_scheme(checkpoint)
    cost = token_cost(config, scheme, context)
    row: Row = {
        "model": VARIANTS[model.attention],
        "kind": model.kind,
        "path": str(model.path),
        "sha256": checkpoint.sha256(),
        "scheme": None if scheme is None else scheme.to_dict(),
        "parameters": num_parameters(config),
        "cost": vars(cost) | {"nbytes": cost.nbytes, "operations": cost.operations},
    }
    if (model.path / "training.json").is_file():
        run = read_json(model.path / "training.json")
        options = run["config"]
        rows = options["steps"] * options["batch_size"] * options["accumulate"] * run["processes"]
        row |= {"tokens": rows * options["length"], "hours": run["result"]["seconds"] / 3600}
    return row


def speeds(models: Sequence[Model], folder: Path, threads: int, rounds: int) -> dict[Model, float]:
    """Decoded tokens a second of each, the median of rounds in which all take turns."""
    found: dict[Model, list[float]] = {model: [] for model in models}
    turns = [model for _ in range(rounds) for model in models]
    for model in track(turns, "decoding"):
        row = bench(_exported(model, folder, "fp32"), PROMPT_TOKENS, NEW_TOKENS, repeats=3, threads=threads)
        found[model].append(row["decode_tokens_per_s"])
    return {model: statistics.median(rates) for model, rates in found.items()}


def _exported(model: Model, folder: Path, dtype: str) -> Path:
    place = folder / f"{model.attention}_{model.kind}_{dtype}"
    return place if place.exists() else export_artifact(model.path, place, dtype=dtype)


def run(models: Sequence[Model], options: argparse.Namespace, folder: Path) -> Row:
    """Measure everything."""
    length = min(512, *(Checkpoint(model.path).config.max_position for model in models))
    windows = eval_windows("stdlib", models[0].path, length, QUICK_WINDOWS if options.quick else None)
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        tasks = [pool.submit(score, model.path, windows) for model in models]
        scores = {model: task.result() for model, task in zip(models, track(tasks, "scoring"), strict=True)}
    by_place = {(model.attention, model.kind): found for model, found in scores.items()}
    rows = []
    for model in track(models, "exporting"):
        own, exact = scores[model], by_place.get((model.attention, FLOAT))
        artifact = Artifact.open(_exported(model, folder, "fp16"))
        row = facts(model, length) | {"nbytes": artifact.nbytes, "parts": [dict(part) for part in artifact.parts]}
        row["perplexity"] = own.perplexity().to_dict()
        row["ratio"] = _plain(None if exact is None or model.kind == FLOAT else perplexity_ratio(own, exact))
        ternary = by_place.get((model.attention, TERNARY))
        compared = exact is not None and ternary is not None and model.kind not in (FLOAT, TERNARY)
        row["closed"] = _plain(recovered(own, ternary, exact) if compared else None)
        rows.append(row)
    if not options.skip_speed:
        rates = speeds(models, folder, options.threads, 1 if options.quick else options.rounds)
        for model, row in zip(models, rows, strict=True):
            row["decode_tokens_per_s"] = rates[model]
    return {
        "rows": rows,
        "contrasts": contrasts(models, by_place),
        "machine": describe(),
        "threads": options.threads,
        "command": shlex.join(["python", "benchmarks/bitnet.py", *sys.argv[1:]]),
        "text": {"source": windows.source, "sha256": windows.sha256, "windows": len(windows.ids), "length": length,
                 "scored_tokens": windows.scored},
    }  # fmt: skip


def contrasts(models: Sequence[Model], scores: dict[tuple[str, str], Scores]) -> list[Row]:
    """What each kind costs a variant more than the first one, paired: nats a token of log(ratio) - log(ratio)."""
    first = models[0].attention
    found = []
    for model in models:
        places = [(a, k) for a in (model.attention, first) for k in (model.kind, FLOAT)]
        if model.kind == FLOAT or model.attention == first or not all(place in scores for place in places):
            continue
        low, exact, other, other_exact = (scores[place] for place in places)
        lost = paired(low, exact) - paired(other, other_exact)
        estimate = mean(lost, exact.tokens).to_dict()
        found.append({"model": VARIANTS[model.attention], "against": VARIANTS[first], "kind": model.kind,
                      "difference": estimate})  # fmt: skip
    return found


def _plain(estimate: Estimate | None) -> dict[str, float] | None:
    return None if estimate is None else estimate.to_dict()


# ---- tables ---------------------------------------------------------------------------------------------------------


def percent(value: float, digits: int = 1) -> str:
    return f"{100 * value:z.{digits}f} %".replace("-", "−")


def interval(estimate: Row | None, show: Any) -> str:
    if estimate is None:
        return ""
    value, low, high = (show(estimate[end]) for end in ("value", "low", "high"))
    return f"{value} [{low.removesuffix(' %')}, {high.removesuffix(' %')}]"


def increase(row: Row) -> str:
    return interval(row["ratio"], lambda ratio: percent(ratio - 1))


def named(row: Row) -> list[str]:
    return [row["model"], row["kind"].replace("_", " ")]


def quality_table(rows: Sequence[Row]) -> str:
    lines = []
    for row in rows:
        tokens = f"{row['tokens'] / 1e6:.1f}" if "tokens" in row else ""
        perplexity = interval(row["perplexity"], lambda value: f"{value:.3f}")
        closed = interval(row["closed"], lambda share: percent(share, 0))
        lines.append([*named(row), tokens, perplexity, increase(row), closed])
    header = ["model", "weights", "M tokens", "perplexity", "over float", "of ternary's gap closed"]
    return table(header, lines)


def cost_table(rows: Sequence[Row]) -> str:
    """Size, speed and what a token takes."""
    speed = any("decode_tokens_per_s" in row for row in rows)
    lines = []
    for row in rows:
        cost = row["cost"]
        operations = [f"{count / 1e6:.2f}" for count in cost["operations"].values()]
        rate = f"{row['decode_tokens_per_s']:,.0f}" if "decode_tokens_per_s" in row else ""
        lines.append(
            [
                *named(row),
                f"{row['nbytes'] / 1e6:.2f}",
                *([rate] if speed else []),
                f"{cost['nbytes'] / 1e6:.2f}",
                *operations,
            ]
        )
    header = ["model", "weights", "MB on disk", *(["tokens/s"] if speed else []), "MB moved", "M ternary", "M integer"]
    header.append("M float")
    return table(header, lines)


def parts_table(rows: Sequence[Row]) -> str:
    """What the first ternary model's file is made of, and whether it is two bits a weight."""
    row = next((row for row in rows if any(part["name"] == "ternary codes" for part in row["parts"])), None)
    if row is None:
        return "No ternary model: nothing to itemise."
    lines, counted = [], 0.0
    for part in row["parts"]:
        weights = part["weights"]
        bits = f"{8 * part['bytes'] / weights:.2f}" if weights else ""
        lines.append([part["name"], f"{part['bytes']:,}", f"{weights:,}" if weights else "", bits])
        counted += 2 * weights / 8 if part["name"] == "ternary codes" else part["bytes"] * (part["name"] != "padding")
    words = (
        f"{', '.join(named(row))}: 2 bits times its ternary weights and its other parts are {counted:,.0f} bytes; on "
        f"disk it has {row['nbytes']:,}, {percent(row['nbytes'] / counted - 1, 2)} more (padding)."
    )
    return f"{words}\n\n{table(['part', 'bytes', 'numbers', 'bits each'], lines)}"


def goals_table(rows: Sequence[Row]) -> str:
    """What was wanted, and what came out."""
    lines = []
    for row in rows:
        if row["kind"] == TERNARY and row["ratio"]:
            met = row["ratio"]["value"] <= 1 + TERNARY_WITHIN
            lines.append([f"ternary: perplexity at most {TERNARY_WITHIN:.0%} up", row["model"], increase(row), met])
        if row["kind"] == INT4 and row["ratio"]:
            met = row["ratio"]["value"] <= 1 + INT4_WITHIN
            lines.append([f"int4: perplexity at most {INT4_WITHIN:.0%} up", row["model"], increase(row), met])
        if row["kind"] == DISTILLED and row["closed"]:
            closed = interval(row["closed"], lambda share: percent(share, 0))
            met = row["closed"]["value"] >= CLOSED
            lines.append([f"distilled: {CLOSED:.0%} of ternary's gap closed", row["model"], closed, met])
    lines = [[*line, "yes" if met else "**no**"] for *line, met in lines]
    return table(["wanted", "model", "found", "reached"], sorted(lines, key=lambda line: line[0]))


def contrasts_table(found: Sequence[Row]) -> str:
    lines = []
    for c in found:
        nats = interval(c["difference"], lambda value: f"{value:+.4f}".replace("-", "−"))
        low, high = c["difference"]["low"], c["difference"]["high"]
        verdict = "not told apart" if low <= 0 <= high else f"{c['model']} loses {'less' if high < 0 else 'more'}"
        lines.append([c["kind"].replace("_", " "), f"{c['model']} − {c['against']}", nats, verdict])
    return table(["weights", "models", "difference of loss, nats a token", ""], lines)


def tables(found: Row) -> str:
    """All of them, for one place in docs/bitnet.md."""
    text, rows = found["text"], found["rows"]
    about = (
        f"{found['machine']}, {found['threads']} thread(s). {text['windows']} windows of {text['length']} held-out "
        f"tokens, {text['scored_tokens']:,} scored (SHA-256 {text['sha256'][:12]}). `{found['command']}`"
    )
    parts = [about, quality_table(rows), cost_table(rows), parts_table(rows)]
    if goals := [row for row in rows if row["kind"] in (TERNARY, INT4, DISTILLED) and row["ratio"]]:
        parts.append(goals_table(goals))
    if found["contrasts"]:
        parts.append(contrasts_table(found["contrasts"]))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, metavar="RUNS", help="folder of VARIANT and VARIANT_KIND models")
    parser.add_argument("--floats", type=Path, metavar="FOLDER", help="where float models lie that RUNS does not hold")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that score (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=1, help="of decoding (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of decoding (default: %(default)s)")
    parser.add_argument("--skip-speed", action="store_true", help="do not time decoding")
    parser.add_argument("--work", type=Path, metavar="DIR", help="keep the artifacts there (default: a temporary one)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--markdown", type=Path, nargs="?", const=ROOT / "docs" / "bitnet.md", metavar="FILE",
                        help="renew this page (default: docs/bitnet.md)")  # fmt: skip
    parser.add_argument("--name", default="nano", help="of the tables' place in the page (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="a few windows, one round: does everything run?")
    options = parser.parse_args()
    try:
        with TemporaryDirectory() as temporary:
            found = run(find(options.runs, options.floats), options, options.work or Path(temporary))
    except DiffbitError as error:
        raise SystemExit(f"error: {error}") from None
    text = tables(found)
    print(text)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(found, indent=1))
    if options.markdown:
        renew(options.markdown, options.name, text)


if __name__ == "__main__":
    main()
