"""Does subtracting survive low bits on real weights? SmolLM2-135M-Instruct beside its differential twins.

    python research/twins/twins.py --work DIR --wikitext FILE [--tokens 300000] [--seeds 1] [--twins copy subtracting]
    python research/twins/twins.py --work DIR --wikitext FILE --quick   # short runs, few windows: does everything run?

DIR needs 4 GB for each seed. It keeps models and measurements for the next time (remove DIR/measured-* to measure
again), and runs that were stopped go on from their last checkpoint: give the same command again.

Twins    plain: the published model; copy and rotated: what `diffbit convert --start copy` and `rotated` make of it;
         subtracting: rotated with --lambda 0.2, so that it has to learn to use its second map.
Text     articles of Wikipedia (smollm2.py) and files of Python's standard library in turn, half of the bytes each.
Tuning   all weights of each twin on --tokens tokens, the same in the same order; a seed gives them another order.
Losses   on WikiText-2's raw test text, English news and other files of the standard library.
Low bits `diffbit compare` on WikiText-2: weights (rtn and GPTQ), the KV cache with and without recent tokens in
         float16, logits.
Maps     lambda; the cosine of both maps; how much of the used map is negative; what the first token gets; and, where
         the model is asked for one of 4 needles (calib_data/needles.py), what the answer gets and what other text gets
         (arXiv 2410.05258, Table 3). Low-bit weights and caches are asked for needles, too.
Examples in context (in_context.py): how many questions are answered after 8 orders of the same examples.
Mixed    what UNIFORM in every layer adds to the loss, rounded to nearest, and what as many bits add where `diffbit
         allocate` puts them.
Trained  with --qat: what TRAINED formats add to the loss after so many steps of BATCH rows, by training each twin on
         its own predictions (`diffbit train --qat --distill`).
Heads    importance: |sum of x dL/dx| of each head's output x (arXiv 1905.10650, equation 2).
Outliers as `diffbit outliers`.
Intervals are over windows of text, and over seeds where there are several.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, zip_longest
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import numpy as np
import torch
from commands import BATCH, ROW, once, run_diffbit, trained
from in_context import orders
from machine import describe
from report import Row, add_outputs, command_line, increase, interval, nats, table, verdict, write_outputs
from smollm2 import fetch

from diffbit.apps.evaluate.compare import compare
from diffbit.apps.evaluate.metrics import mean
from diffbit.apps.outliers.activations import measure
from diffbit.apps.show.maps import Maps, run
from diffbit.calib_data import (
    VALUE,
    Needles,
    NeedleWindows,
    Windows,
    eval_windows,
    load_text,
    load_tokenizer,
    needle_windows,
)
from diffbit.export import reference_model
from diffbit.formats import parse_format
from diffbit.models import Decoder, load
from diffbit.quantize import Scheme, apply
from diffbit.quantize.allocation import allocate

# options of `diffbit convert`
STARTS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "copy": ("--start", "copy"),
    "rotated": ("--start", "rotated"),
    "subtracting": ("--start", "rotated", "--lambda", "0.2"),
}
PLAIN, *BESIDE = STARTS
PASSES, RATE = 2, 1e-4  # in a step; learning rate
TRAINED, TRAINED_RATE = ("int3_g64", "int2_g64", "ternary"), 1e-3  # the rate that qat.py chose for each
BYTES = 4_000_000  # of the training text
WINDOWS, CALIBRATION, MAPPED = 12, 12, 6  # windows of ROW tokens: scored, calibrated on, whose maps are measured
BITS = {"weights": ("8", "4", "3", "2"), "kv": ("8", "4", "2"), "kv:0": ("4", "2"), "logits": ("8", "4", "3", "2")}
UNIFORM, UNIFORM_BITS = "nl3_g32_s8", 3.273  # a weight: 3, 8 / 32 and 16 for each row of 576 or 1536
ORDERS = 8
HEAD = 64  # numbers of a head of SmolLM2; `convert` keeps them
METHODS = ("rtn", "gptq")
MAPS = "lambda", "cosine", "negative", "first token", "answer", "other text"
OUTLIERS = {"kurtosis": "hidden states: kurtosis", "hidden": "hidden states: largest", "logits": "logits: largest"}
STEP = ROW * BATCH * PASSES  # tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for models and runs")
    parser.add_argument("--wikitext", type=Path, required=True, help="wiki.test.raw of WikiText-2")
    parser.add_argument("--tokens", type=int, default=300_000, help="of each run (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=1, help="(default: %(default)s)")
    parser.add_argument("--twins", nargs="+", choices=BESIDE, default=BESIDE, help="beside plain (default: all)")
    parser.add_argument("--methods", nargs="+", default=METHODS, help="that round weights (default: rtn gptq)")
    parser.add_argument("--qat", type=int, default=0, metavar="STEPS", help="that low bits are trained (see above)")
    parser.add_argument("--no-questions", action="store_true", help="leave needles and examples in context out")
    parser.add_argument("--train-only", action="store_true", help="tune the twins, and measure later")
    parser.add_argument("--quick", action="store_true", help="short runs, few windows: does everything run?")
    add_outputs(parser, "research/twins/README.md")
    arguments = parser.parse_args()
    work, tokens, windows, bits = arguments.work, arguments.tokens, WINDOWS, BITS
    if arguments.quick:
        tokens, windows, bits = 2 * STEP, 2, {"weights": ("4",), "logits": ("4",)}
    model, news, wiki = fetch(work)
    text = once(work / "text.jsonl", lambda out: write_text(wiki, out))
    names, seeds = [PLAIN, *arguments.twins], range(arguments.seeds)
    twins = {name: [tuned(work, name, model, text, tokens, seed) for seed in seeds] for name in names}
    if arguments.train_only:
        return
    files = {"WikiText-2": arguments.wikitext, "news": news}  # no model has been trained on any split of them
    named = {name: once(work / f"{name}.txt", partial(shutil.copyfile, file)) for name, file in files.items()}
    texts = {name: eval_windows(str(file), model, ROW, windows, split="train") for name, file in named.items()}
    texts["code"] = eval_windows("stdlib", model, ROW, windows)
    needles = needle_windows(str(named["WikiText-2"]), model, ROW, 4, 1, windows, split="train")
    calibration = eval_windows("mix", model, ROW, CALIBRATION, split="calib")
    asked, wikitext = [] if arguments.no_questions else [needles, *orders(model, ORDERS)], texts["WikiText-2"]
    parts: dict[str, Callable[[], Row]] = {
        "losses": lambda: losses(model, twins, texts),
        "maps": lambda: {name: maps_of(paths, wikitext, needles) for name, paths in twins.items()},
        "outliers": lambda: {name: outliers_of(paths[0], wikitext) for name, paths in twins.items()},
        "mixed": lambda: {name: mixed_of(paths, wikitext, calibration) for name, paths in twins.items()},
        "heads": lambda: {name: importance_of(paths, wikitext) for name, paths in twins.items()},
    }
    for what, widths in bits.items():
        methods = arguments.methods if what == "weights" else ("rtn",)
        parts[f"bits of {what}"] = partial(low_bits, twins, wikitext, asked, calibration, what, widths, methods)
    if arguments.qat:
        parts["trained"] = lambda: low_bits_trained(work, twins, text, wikitext, arguments.qat)
    settings = tokens, arguments.seeds, windows, len(asked), arguments.qat, *arguments.methods, *arguments.twins
    folder = work / "-".join(map(str, ("measured", *settings)))
    folder.mkdir(exist_ok=True)
    row = {name: kept(folder / f"{name}.json", part) for name, part in parts.items()}
    about = {"command": command_line(__file__, sys.argv[1:]), "machine": describe(), "tokens": tokens}
    write_outputs(arguments, about | row, {"twins": page(about | {"seeds": arguments.seeds}, row)})


# ---- models ---------------------------------------------------------------------------------------------------------


def write_text(wiki: Path, out: Path) -> None:
    """Articles and files in turn, half of BYTES each."""
    articles = [json.loads(line)["text"] for line in wiki.read_text().splitlines()]
    sources = articles, load_text("stdlib", "train", limit=BYTES // 2).documents
    kept = [within(documents, BYTES // 2) for documents in sources]
    rows = chain.from_iterable(zip_longest(*kept))
    out.write_text("".join(json.dumps({"text": text}) + "\n" for text in rows if text))


def within(documents: Sequence[str], most: int) -> list[str]:
    sizes = np.cumsum([len(text.encode()) for text in documents])
    return list(documents[: int((sizes <= most).sum())])


def tuned(work: Path, name: str, model: Path, text: Path, tokens: int, seed: int) -> Path:
    """The folder of a twin."""
    out, start = work / f"{name}-{tokens}-{seed}", model
    if options := STARTS[name]:
        start = once(work / name, lambda folder: run_diffbit("convert", model, *options, "-o", folder, "--quiet"))
    return trained(out, start, text, round(tokens / STEP), RATE, "--accumulate", PASSES, "--seed", seed)


# ---- measurements ---------------------------------------------------------------------------------------------------


def kept(path: Path, measure: Callable[[], Row]) -> Row:
    """What was measured, as `path` has it, or measured now."""
    once(path, lambda out: out.write_text(json.dumps(measure())))
    return dict(json.loads(path.read_text()))


def nll(model: Decoder, windows: Windows) -> np.ndarray:
    """Nats of each window."""
    sums = []
    for ids, target in zip(torch.from_numpy(windows.ids), torch.from_numpy(windows.target), strict=True):
        with torch.inference_mode():
            log_p = model(ids[None])[0, :-1].float().log_softmax(-1)
        each = -log_p.gather(-1, ids[1:, None])[:, 0]
        sums.append(float(each[target[1:]].sum()))
    return np.array(sums)


def losses(model: Path, twins: dict[str, list[Path]], texts: dict[str, Windows]) -> Row:
    """{text: {model: nats a token}}, and what each twin's is above plain's."""
    found: Row = {}
    for text, windows in texts.items():
        sums = {"published": np.stack([nll(load(model).eval(), windows)])}
        sums |= {name: np.stack([nll(load(path).eval(), windows) for path in paths]) for name, paths in twins.items()}
        of = {name: mean(one, windows.target.sum(1)).to_dict() for name, one in sums.items()}
        above = {name: mean(sums[name] - sums["plain"], windows.target.sum(1)).to_dict() for name in twins}
        found[text] = {"loss": of, "above plain": above}
    return found


def low_bits(
    twins: dict[str, list[Path]], windows: Windows, asked: list[NeedleWindows], calibration: Windows,
    what: str, widths: Sequence[str], methods: Sequence[str],
) -> Row:  # fmt: skip
    """What rounding adds, and to whom more."""
    compared = compare(
        list(chain.from_iterable(twins.values())), windows, widths, [what], methods, calibration=calibration,
        names=list(twins), runs=len(twins["plain"]), batch_size=8, needles=asked if what != "logits" else [],
    ).to_dict()  # fmt: skip
    results = [row for row in compared["results"] if row["what"] != "none" or row["retrieval"]]
    return {"results": results, "contrasts": compared["contrasts"]}


def maps_of(paths: Sequence[Path], windows: Windows, needles: NeedleWindows) -> Row:
    """Means over layers, heads and MAPPED windows, and the 10th and 90th percentile of heads."""
    by_head: dict[str, list[torch.Tensor]] = {}
    words = Needles.of(load_tokenizer(paths[0]))
    lead = words.size - VALUE - len(words.after)  # tokens of a needle before its value
    for path in paths:
        model = load(path).eval()
        asked = [(ids, int(start)) for ids, (start,) in zip(needles.windows.ids, needles.starts, strict=True)]
        for (ids, start), text in zip(asked[:MAPPED], windows.ids, strict=False):
            needle = ids[start - lead : start + VALUE]
            (place, *_) = (at for at in range(start) if np.array_equal(ids[at : at + len(needle)], needle))
            found = run(model, ids[:start]).maps.values()
            plain = run(model, text).maps.values()
            numbers = [of_maps(one) | of_answer(two, place + lead) for one, two in zip(plain, found, strict=True)]
            for key in numbers[0]:
                by_head.setdefault(key, []).append(torch.stack([one[key] for one in numbers]))
    table: Row = {}
    for key, values in by_head.items():
        heads = torch.stack(values).mean(0).flatten().numpy()  # [layers * heads]
        table[key] = [float(heads.mean()), *map(float, np.quantile(heads, (0.1, 0.9)))]
    return table


def of_answer(maps: Maps, place: int) -> dict[str, torch.Tensor]:
    """What the last query of each head [H] gives to the VALUE tokens from `place` on, and to other text than them, the
    first token and its own; of the sum of sizes."""
    sizes = maps.used[:, -1].abs()
    sizes = sizes / sizes.sum(-1, keepdim=True)
    answer = sizes[:, place : place + VALUE].sum(-1)
    return {"answer": answer, "other text": 1 - answer - sizes[:, 0] - sizes[:, -1]}


def of_maps(maps: Maps) -> dict[str, torch.Tensor]:
    """Numbers of each head [H], means over queries. Rows of the used map need not add up to 1: the first token's part
    is of the sum of the sizes."""
    used = maps.used
    sizes = used.abs().sum(-1)
    numbers = {"first token": (used[..., 0].abs() / sizes)[:, 1:].mean(-1)}
    if maps.lambdas is not None:
        signal, noise = maps.weights[:, 0], maps.weights[:, 1]
        numbers |= {
            "lambda": maps.lambdas.mean(-1),
            "cosine": torch.cosine_similarity(signal, noise, dim=-1)[:, 1:].mean(-1),
            "negative": (used.clamp(max=0).abs().sum(-1) / sizes).mean(-1),
        }
    return numbers


def outliers_of(path: Path, windows: Windows) -> Row:
    report = measure(load(path).eval(), windows, batch_size=2)
    hidden, logits = report.hidden_states, report.attention_logits
    return {"kurtosis": hidden.kurtosis, "hidden": hidden.max, "logits": None if logits is None else logits.max}


def low_bits_trained(work: Path, twins: dict[str, list[Path]], text: Path, windows: Windows, steps: int) -> Row:
    """{format: {twin: nats a token that are added, and what that is above plain's}}."""
    found: Row = {}
    for format in TRAINED:
        added = {}
        for name, paths in twins.items():
            options = "--qat", format, "--accumulate", 1
            runs = [
                trained(work / f"{path.name}-{format}-{steps}", path, text, steps, TRAINED_RATE,
                        "--distill", path, "--seed", seed, *options)
                for seed, path in enumerate(paths)
            ]  # fmt: skip
            pairs = zip(runs, paths, strict=True)
            added[name] = np.stack(
                [nll(reference_model(run), windows) - nll(load(path).eval(), windows) for run, path in pairs]
            )
        tokens = windows.target.sum(1)
        found[format] = {
            name: {"added": mean(one, tokens).to_dict(), "above plain": mean(one - added["plain"], tokens).to_dict()}
            for name, one in added.items()
        }
    return found


def mixed_of(paths: Sequence[Path], windows: Windows, calibration: Windows) -> Row:
    """Nats a token that are added with one format, and with a mix; [what is left, low, high], by resampling windows."""
    added, tokens = [], windows.target.sum(1)
    for path in paths:
        model = load(path).eval()
        mix = allocate(path, bits=UNIFORM_BITS, calibration=torch.from_numpy(calibration.ids)).scheme
        schemes = Scheme(weights=parse_format(UNIFORM)), mix
        added.append(np.stack([nll(apply(model, scheme), windows) for scheme in schemes]) - nll(model, windows))
    one, many = np.stack(added, 1)  # [runs, windows]
    draw = np.random.default_rng(0)
    samples = draw.integers(0, len(tokens), (1000, len(tokens)))
    left = many[:, samples].sum((0, 2)) / one[:, samples].sum((0, 2))
    return {
        "one": mean(one, tokens).to_dict(), "mix": mean(many, tokens).to_dict(),
        "left": [float(many.sum() / one.sum()), *map(float, np.quantile(left, (0.025, 0.975)))],
    }  # fmt: skip


def importance_of(paths: Sequence[Path], windows: Windows) -> list[float]:
    """[share, low, high]: what the most important tenth of heads has of all importance, 95 % by resampling windows."""
    texts = list(zip(torch.from_numpy(windows.ids), torch.from_numpy(windows.target), strict=True))
    models = (load(path).eval() for path in paths)
    heads = np.stack([head_importance(model, *text) for model in models for text in texts])  # [windows, layers * heads]
    draw = np.random.default_rng(0)
    samples = [top_share(heads[draw.integers(0, len(heads), len(heads))].sum(0)) for _ in range(1000)]
    return [top_share(heads.sum(0)), *map(float, np.quantile(samples, (0.025, 0.975)))]


def head_importance(model: Decoder, ids: torch.Tensor, target: torch.Tensor) -> np.ndarray:
    """|sum of x dL/dx| of each head's output x on one window: [layers * heads]."""
    outputs: list[torch.Tensor] = []
    layers = [module for name, module in model.named_modules() if name.endswith("o_proj")]
    hooks = [layer.register_forward_pre_hook(lambda _, given: outputs.append(given[0])) for layer in layers]
    log_p = model(ids[None])[0, :-1].float().log_softmax(-1)
    loss = -log_p.gather(-1, ids[1:, None])[target[1:], 0].mean()
    gradients = torch.autograd.grad(loss, outputs)
    for hook in hooks:
        hook.remove()
    products = torch.stack([(x * dx).sum((0, 1)) for x, dx in zip(outputs, gradients, strict=True)])
    return products.unflatten(-1, (-1, HEAD)).sum(-1).abs().flatten().numpy(force=True)


def top_share(importance: np.ndarray) -> float:
    return float(np.sort(importance)[-(len(importance) // 10) :].sum() / importance.sum())


# ---- the page -------------------------------------------------------------------------------------------------------


def page(about: Row, row: Row) -> str:
    names = list(row["maps"])
    parts = [row[f"bits of {what}"] for what in BITS if f"bits of {what}" in row]
    bits = {key: list(chain.from_iterable(part[key] for part in parts)) for key in ("results", "contrasts")}
    shown = [
        f"{about['machine']}. {about['tokens']:,} tokens, {about['seeds']} seed(s). `{about['command']}`",
        "Held-out loss, nats a token:",
        table(["text", "published", *names, *(f"{name} − plain" for name in names[1:])], [
            [text, *(interval(of["loss"][name], "{:.3f}".format) for name in ("published", *names)),
             *(interval(of["above plain"][name], nats) for name in names[1:])]
            for text, of in row["losses"].items()
        ]),
        "What rounding adds to perplexity:",
        bits_table(bits, names),
        *questions_table(bits, names),
        "Maps: mean [10th, 90th percentile of heads]:",
        table(["", *names], [
            [key, *(spread(row["maps"][name].get(key)) for name in names)]
            for key in MAPS
        ]),
        "Outliers, first seed:",
        table(["", *names], [
            [title, *(f"{row['outliers'][name][key]:.1f}" for name in names)]
            for key, title in OUTLIERS.items()
        ]),
        *trained_table(row.get("trained"), names),
        f"What rounding to {UNIFORM} adds to the loss, nats a token; a mix of as many bits; what is left of it:",
        table(["", *names], [
            [UNIFORM, *(interval(row["mixed"][name]["one"], "{:.3f}".format) for name in names)],
            ["mix", *(interval(row["mixed"][name]["mix"], "{:.3f}".format) for name in names)],
            ["left", *(spread(row["mixed"][name]["left"]) for name in names)],
        ]),
        "Share of heads' importance that the most important tenth has:",
        table(names, [[spread(row["heads"][name]) for name in names]]),
    ]  # fmt: skip
    return "\n\n".join(shown) + "\n"


def bits_table(bits: Row, names: Sequence[str]) -> str:
    low = [row for row in bits["results"] if row["what"] != "none"]
    ratios = {(r["what"], r["format"], r["method"], r["model"]): r["ratio"] for r in low}
    contrasts = {(c["what"], c["format"], c["method"], c["model"]): c["difference"] for c in bits["contrasts"]}
    lines = []
    for key in keys(ratios):
        told = [contrasts.get((*key, name)) for name in names[1:]]
        lines.append([
            title(key),
            *(increase(ratios[*key, name]) for name in names),
            *("" if one is None else verdict(name, one) for name, one in zip(names[1:], told, strict=True)),
        ])  # fmt: skip
    return table(["", *names, *(f"{name} beside plain" for name in names[1:])], lines)


def trained_table(trained: Row | None, names: Sequence[str]) -> list[str]:
    if trained is None:
        return []
    lines = [
        [format, *(interval(of[name]["added"], "{:.3f}".format) for name in names),
         *(interval(of[name]["above plain"], nats) for name in names[1:])]
        for format, of in trained.items()
    ]  # fmt: skip
    return [
        "What low bits add to the loss once they are trained, nats a token:",
        table(["", *names, *(f"{name} − plain" for name in names[1:])], lines),
    ]


def questions_table(bits: Row, names: Sequence[str]) -> list[str]:
    found = {}
    for r in bits["results"]:
        if r["retrieval"]:
            needles, *orders = (one["accuracy"] for one in r["retrieval"])
            of = 100 * np.array([one["value"] for one in orders])
            examples = f"{of.mean():.0f}, {of.std(ddof=1):.0f} [{of.min():.0f}, {of.max():.0f}]"
            key = r["what"], r["format"], r["method"], r["model"]
            found[key] = f"{interval(needles, lambda value: f'{100 * value:.0f}')}; {examples}"
    if not found:
        return []
    return [
        f"Needles found, %; answers after {ORDERS} orders of examples, %: mean, standard deviation [least, most]:",
        table(["", *names], [[title(key), *(found[*key, name] for name in names)] for key in keys(found)]),
    ]


def keys(found: Row) -> list[tuple[str, ...]]:
    """(what, format, method) of results, which have the model as well."""
    return list(dict.fromkeys(key[:-1] for key in found))


def title(key: tuple[str, ...]) -> str:
    return " ".join(part for part in key if part not in ("none", "weights"))


def spread(values: Sequence[float] | None) -> str:
    return "" if values is None else "{:.3f} [{:.3f}, {:.3f}]".format(*values)


if __name__ == "__main__":
    main()
