"""Which attention survives low bits? The table and the plot of research/variants.

    python research/variants/variants.py --work DIR --markdown  # trains and measures what DIR lacks; renews the page
    python research/variants/variants.py --work DIR --quick     # pico, two variants, short runs: does everything run?

Every attention that `diffbit train` knows, in models of one preset with equal numbers of parameters, from several
seeds; runs of one seed see the same batches in the same order. Each model is then rounded: weights by rtn and GPTQ,
keys and values, attention logits. Intervals are over training runs, each rounded REPEATS times. `--part` takes one of

models    these numbers, the cache's size and outliers: DIR/PRESET-NAME.json has them as soon as a variant has been
          measured, and an interrupted run goes on from there. Several machines can share the work: `--only mla,gdla
          --json FILE` on one, `--known FILE` on the other
states    what rounding states of fixed size costs, after every token, as an artifact's decoding rounds int8 ones
speeds    decoding by models of the same sizes with random weights and a long context, on ONNX Runtime, with one thread,
          the variants by turns, medians of ROUNDS; trains nothing
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import numpy as np
import torch
import torch.nn.functional as F
from accuracy import texts
from machine import describe
from report import Row, add_outputs, command_line, increase, interval, say, table, write_outputs
from runs import QUICK, losses, over_runs, train

from diffbit.apps.evaluate.compare import compare
from diffbit.apps.outliers.activations import measure
from diffbit.apps.train.new_tokenizer import train_tokenizer
from diffbit.apps.train.presets import model_config
from diffbit.calib_data import Windows
from diffbit.export import export_artifact
from diffbit.io.drawing import drawn
from diffbit.io.errors import DiffbitError
from diffbit.io.files import read_json, write_json
from diffbit.io.progress import set_quiet, track
from diffbit.models import Checkpoint, Decoder, KVCache, ModelConfig, load, num_parameters, save, variants
from diffbit.models.attention import AttentionOptions
from diffbit.models.layers import FixedState
from diffbit.quantize import AttentionScheme, Scheme, resolve, sizes
from diffbit.quantize.attention import rounded_state
from diffbit.runtime import bench

MLP = {"crate": "ista"}  # CRATE's layer is its attention and a step of ISTA
KAN = "softmax-kan"
REPEATS = 2
ROUNDED = {"weights": ("4", "3", "2"), "kv": ("8", "4", "2"), "logits": ("4",)}
METHODS = ("rtn", "gptq")
CONTEXTS = 128, 4096
NEW_TOKENS, ROUNDS = 32, 3
STATE_BITS = 8, 4, 2
STATE_WINDOWS = 64
PARTS = "models", "states", "speeds"


def attention(name: str) -> str:
    return name.partition("-")[0]


def mlp(name: str) -> str:
    return "kan" if name == KAN else MLP.get(name, "swiglu")


def low_bits(paths: Sequence[Path], name: str, quick: bool) -> list[Row]:
    """Results of `diffbit compare`, over runs; a variant without keys and values, or logits, has none for these."""
    windows, calibration = texts([Checkpoint(path) for path in paths], quick, REPEATS)
    config = Checkpoint(paths[0]).config
    tokens = {format: pair and pair[0] for format, pair in cache(config).items()}
    there = {"weights": True, "kv": tokens["int8"] != tokens["float"], "logits": has_attention(config)}
    rows: list[Row] = []
    for what, bits in ROUNDED.items():
        if not there[what]:
            continue
        try:
            comparison = compare(
                paths, windows, bits[-1:] if quick else bits, [what], METHODS, calibration=calibration,
                repeats=REPEATS, names=[name], runs=len(paths),
            )  # fmt: skip
        except DiffbitError as error:
            say(variant=name, skipped=what, reason=str(error))
            continue
        rows += [row for row in comparison.to_dict()["results"] if row["what"] != "none"]
    return rows


def has_attention(config: ModelConfig) -> bool:
    return any(isinstance(layer.mixer, AttentionOptions) for layer in config.layers)


def cache(config: ModelConfig) -> Row:
    """{format: [bytes that a token adds to the cache, bytes of states of fixed size]}; None: not for this variant.

    States are int8 in all but "float"."""
    by_format: Row = {}
    states = any(not buffer.holds_tokens for buffer in sizes(resolve(config)).cache.buffers.values())
    for format in ("float", "int8", "int4"):
        low = {} if format == "float" else {"keys": format, "values": format, "states": "int8" if states else None}
        try:
            scheme = Scheme(attention=AttentionScheme(**low))
            scheme.attention.check(config)
            total = sizes(resolve(config, scheme))
            by_format[format] = [total.kv_bytes_per_1k_tokens / 1000, total.kv_fixed_bytes]
        except DiffbitError:
            by_format[format] = None
    return by_format


@torch.inference_mode()
def state_loss(path: Path, windows: Windows, bits: int | None) -> float:
    """Nats per token, with states of so many bits, token by token."""
    model = load(path)
    ids, target = (torch.from_numpy(part[:STATE_WINDOWS]) for part in (windows.ids, windows.target))
    cache = KVCache(model.config, *ids.shape)
    if not any(isinstance(state, FixedState) and state.tensors for state in cache.layers):
        raise ValueError(f"{path} has no state of fixed size")
    for layer in model.model.layers:
        layer.self_attn.rounded_state = None if bits is None else functools.partial(rounded_state, bits=bits)
    logits = [model(token, cache=cache)[:, 0] for token in ids.T[:-1, :, None]]
    nll = F.cross_entropy(torch.stack(logits, -1), ids[:, 1:], reduction="none")
    return nll[target[:, 1:]].mean().item()


def low_bit_states(name: str, paths: Sequence[Path], quick: bool) -> Row:
    """{bits: what they add to the loss, over runs}."""
    windows, _ = texts([Checkpoint(path) for path in paths], quick, 1)
    whole = np.array([state_loss(path, windows, None) for path in paths])
    added = {bits: np.array([state_loss(path, windows, bits) for path in paths]) - whole for bits in STATE_BITS}
    return {"name": name, "added": {str(bits): over_runs(values) for bits, values in added.items()}}


def speeds(names: Sequence[str], preset: str, contexts: Sequence[int]) -> list[Row]:
    """{context: tokens per second of decoding after so many tokens} of each."""
    times: dict[tuple[str, int], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        train_tokenizer([__doc__ or ""], model_config(preset, "softmax").vocab_size, folder)
        for name in names:
            config = model_config(preset, attention(name), mlp=mlp(name))
            torch.manual_seed(0)
            model = Decoder(replace(config, max_position=max(contexts) + NEW_TOKENS))
            save(model, Path(folder, f"{name}-model"), tokenizer_from=folder)
            export_artifact(Path(folder, f"{name}-model"), Path(folder, name))
        for _ in track(range(ROUNDS), "rounds"):
            for name in names:
                for context in contexts:
                    row = bench(Path(folder, name), context, NEW_TOKENS, 1, threads=1)
                    times.setdefault((name, context), []).append(row["decode_tokens_per_s"])
    return [
        {"name": name, "speed": {str(context): statistics.median(times[name, context]) for context in contexts}}
        for name in names
    ]


def measured(work: Path, preset: str, name: str, paths: Sequence[Path], quick: bool) -> Row:
    """A variant's numbers, from its file if it has been measured."""
    file = work / f"{preset}-{name}.json"
    about = {"seeds": len(paths), "log": [read_json(path / "training.json")["result"] for path in paths]}
    if file.is_file() and (known := read_json(file))["about"] == about:
        return known
    checkpoint = Checkpoint(paths[0])
    windows, _ = texts([checkpoint], quick, 1)
    reports = [measure(load(path), windows, name=name) for path in paths]
    row = {
        "name": name,
        "about": about,
        "parameters": num_parameters(checkpoint.config),
        "losses": list(losses(paths)),
        "low_bits": low_bits(paths, name, quick),
        "cache": cache(checkpoint.config),
        "hidden": {
            "kurtosis": [report.hidden_states.kurtosis for report in reports],
            "max": [report.hidden_states.max for report in reports],
        },
        "logits": [report.attention_logits.max for report in reports if report.attention_logits is not None],
    }
    write_json(file, row)
    return row


# ---- tables ---------------------------------------------------------------------------------------------------------


def losses_table(rows: Sequence[Row]) -> str:
    """Held-out loss, and what rounding adds to perplexity."""
    keys = list(dict.fromkeys((r["what"], r["format"], r["method"]) for row in rows for r in row["low_bits"]))
    lines = []
    for row in rows:
        ratios = {(r["what"], r["format"], r["method"]): r["ratio"] for r in row["low_bits"]}
        loss = interval(over_runs(np.array(row["losses"])), "{:.3f}".format)
        lines.append([row["name"], f"{row['parameters']:,}", loss, *(increase(ratios.get(key)) or "–" for key in keys)])
    header = [" ".join(part for part in key if part not in ("none", "weights")) for key in keys]
    return table(["attention", "parameters", "loss, nats", *header], lines)


def device_table(rows: Sequence[Row]) -> str:
    """Cache and outliers."""

    def cached(pair: list[float] | None) -> str:
        if pair is None:
            return "–"
        tokens, fixed = pair
        parts = [f"{tokens:,.0f}"] * bool(tokens) + [f"{fixed / 1024:,.0f} KiB in all"] * bool(fixed)
        return " + ".join(parts) or "0"

    lines = []
    for row in rows:
        largest = [max(values) if values else None for values in (row["hidden"]["kurtosis"], row["hidden"]["max"])]
        outliers = [*(f"{value:.1f}" for value in largest), f"{max(row['logits']):.1f}" if row["logits"] else "–"]
        lines.append([row["name"], *(cached(pair) for pair in row["cache"].values()), *outliers])
    formats = [f"bytes a token, {format}" for format in rows[0]["cache"]]
    numbers = "hidden states: kurtosis", "largest", "logits: largest"
    return table(["attention", *formats, *numbers], lines)


def states_table(rows: Sequence[Row]) -> str:
    header = [f"state, {bits} bits" for bits in STATE_BITS]
    lines = [[row["name"], *(interval(one, "{:+.4f}".format) for one in row["added"].values())] for row in rows]
    return table(["attention", *header], lines)


def speeds_table(rows: Sequence[Row]) -> str:
    header = [f"tokens/s after {context}" for context in rows[0]["speed"]]
    lines = [[row["name"], *(f"{value:,.0f}" for value in row["speed"].values())] for row in rows]
    return table(["attention", *header], lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    """What the lowest bits add to perplexity, by variant, GPTQ; whiskers: 95 % over training runs."""
    with drawn(path) as (axes,):
        for index, format in enumerate(dict.fromkeys(r["format"] for row in rows for r in row["low_bits"])):
            pairs = [
                (place, r["ratio"])
                for place, row in enumerate(rows)
                for r in row["low_bits"]
                if (r["what"], r["format"], r["method"]) == ("weights", format, "gptq")
            ]
            if not pairs:
                continue
            places, ratios = zip(*pairs, strict=True)
            values = [100 * (ratio["value"] - 1) for ratio in ratios]
            ends = [[100 * abs(ratio[end] - ratio["value"]) for ratio in ratios] for end in ("low", "high")]
            shifted = [place + 0.15 * (index - 1) for place in places]
            axes.errorbar(shifted, values, yerr=ends, fmt="o", capsize=3, label=f"{format}, GPTQ")
        axes.figure.set_size_inches(max(4.0, 0.55 * len(rows)), 4)
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.03)
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xticks(range(len(rows)), [row["name"] for row in rows], rotation=40, ha="right")
        axes.set_ylabel("increase of perplexity, %")
        axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, metavar="DIR", help="folder of the trained models")
    parser.add_argument("--preset", default="tiny", help="model size and recipe (default: %(default)s)")
    parser.add_argument("--part", choices=PARTS, help="what to measure (default: all)")
    parser.add_argument("--only", help="names of variants, separated by commas (default: all)")
    parser.add_argument("--seeds", type=int, default=3, help="training runs of each (default: %(default)s)")
    parser.add_argument("--steps", type=int, help="of training; default: the preset's")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="runs trained at once (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="pico, two variants, two runs of 8 steps")
    add_outputs(parser, "research/variants/README.md")
    parser.add_argument("--known", type=Path, metavar="FILE", help="rows of models that another run wrote, to add")
    arguments = parser.parse_args()
    set_quiet(arguments.quick)
    if arguments.markdown and not arguments.markdown.is_file():
        parser.error(f"{arguments.markdown}: no such page")

    parts = PARTS if arguments.part is None else (arguments.part,)
    quick, preset, seeds = arguments.quick, arguments.preset, arguments.seeds
    names = [*variants(), KAN] if arguments.only is None else arguments.only.split(",")
    if quick:
        preset, seeds, names = "pico", 2, ["softmax", "retention"]
    names = sorted(names, key=lambda name: name != "softmax")
    with_state = [name for name in names if cache(model_config(preset, attention(name), mlp=mlp(name)))["float"][1]]
    trained = names if "models" in parts else with_state if "states" in parts else []
    steps = QUICK if quick else ["--steps", str(arguments.steps)] if arguments.steps else []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        tasks = {
            (name, seed): pool.submit(
                train, arguments.work, preset, attention(name), seed, ["--mlp", mlp(name), *steps], name
            )
            for seed in range(seeds)
            for name in trained
        }
        paths = {key: task.result() for key, task in track(list(tasks.items()), "training")}
    of = {name: [paths[name, seed] for seed in range(seeds)] for name in trained}
    torch.set_num_threads(1)
    length = f"{arguments.steps} steps" if arguments.steps else "its own number of steps"
    about = f"{describe()}. Preset {preset}, {length}; {seeds} runs of each"
    command = f"`{command_line(__file__, sys.argv[1:])}`"
    numbers: dict[str, list[Row]] = {}
    tables: dict[str, str] = {}
    if "models" in parts:
        rows = [measured(arguments.work, preset, name, of[name], quick) for name in track(names, "measuring")]
        if arguments.known:
            every = [*variants(), KAN]
            rows += [row for row in read_json(arguments.known)["models"] if row["name"] not in names]
            rows.sort(key=lambda row: (row["name"] != "softmax", every.index(row["name"])))
        if arguments.markdown:
            plot(rows, arguments.markdown.with_suffix(".svg"))
        numbers["models"] = rows
        tables["losses"] = f"{about}, {REPEATS} roundings of each run. {command}\n\n{losses_table(rows)}"
        tables["device"] = f"{about}. {command}\n\n{device_table(rows)}"
    if "states" in parts:
        numbers["states"] = [low_bit_states(name, of[name], quick) for name in track(with_state, "rounding states")]
        tables["states"] = f"{about}. {command}\n\n{states_table(numbers['states'])}"
    if "speeds" in parts:
        numbers["speeds"] = speeds(names, preset, CONTEXTS[:1] if quick else CONTEXTS)
        tables["speeds"] = f"{describe()}. Preset {preset}. {command}\n\n{speeds_table(numbers['speeds'])}"
    print("\n\n".join(tables.values()))
    write_outputs(arguments, numbers, tables)


if __name__ == "__main__":
    main()
