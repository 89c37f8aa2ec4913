"""What the calibration text is worth: SmolLM2-135M-Instruct by GPTQ on each text, scored on four kinds of others.

    python research/weights/calibration.py --work DIR [--weights FORMAT] [--layers N] [--markdown]  # DIR: smollm2.py
    python research/weights/calibration.py --work DIR --windows 6 24 96 [--weights FORMAT] [--methods gptq guided]
                                                                                        # what more of `mix` is worth

Rows     rounding to nearest; gptq calibrated on the Python standard library, on Wikipedia, and on `mix`, the default,
         each on WINDOWS windows of LENGTH tokens. The last rows pair `mix` with the others.
Text     English news (the Lee corpus, which no side has seen), files of the standard library, dialogues in the model's
         chat template, one declaration in twelve languages. The last three are the eval splits of what `stdlib` and
         `mix` calibrate on: other files, other parts of the same works.
Scores   in the artifact's arithmetic, against the float model (apps/evaluate/metrics.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import torch
from commands import once, run_diffbit
from machine import describe
from report import command_line, interval, renew, table
from smollm2 import Text, fetch, predictions, scores, text_windows

import diffbit
from diffbit.apps.evaluate.metrics import Scores, mean, perplexity_ratio
from diffbit.calib_data import eval_windows, load_tokenizer
from diffbit.calib_data.mix import TEXT
from diffbit.calib_data.window import windows
from diffbit.cli.options import chat_template
from diffbit.export import reference_model

WINDOWS, LENGTH = 24, 512
EVALUATED = 256  # tokens of a window that is scored
HOW = {
    "rounding": [],
    "gptq on stdlib": ["--method", "gptq", "--calibrate", "stdlib"],
    "gptq on Wikipedia": ["--method", "gptq", "--calibrate", "wikipedia.jsonl"],  # in the folder of the models
    "gptq on mix": ["--method", "gptq", "--calibrate", "mix"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the models")
    parser.add_argument("--weights", default="int4_g128", help="their format (default: %(default)s)")
    parser.add_argument("--layers", type=int, help="only the first N decoder layers, the others float (default: all)")
    parser.add_argument("--windows", type=int, nargs="+", help="of `mix` for --methods, in place of other texts")
    parser.add_argument("--methods", nargs="+", default=["gptq"], help="with --windows (default: gptq)")
    parser.add_argument("--markdown", action="store_true", help="renew the table in research/weights")
    arguments = parser.parse_args()
    source, news, wiki = fetch(arguments.work)
    texts = dict(held_out(source, news))
    exact_model = diffbit.load(source).eval()
    reference = [predictions(exact_model, text) for text in texts.values()]
    exact = [scores(text, p, p) for text, p in zip(texts.values(), reference, strict=True)]
    rows = [["float", *(f"perplexity {interval(one.perplexity().to_dict(), '{:.1f}'.format)}" for one in exact)]]
    kept: dict[str, list[Scores]] = {}
    on_mix = {
        f"{method} on {n} windows": ["--method", method, "--calibrate", "mix", "--max-windows", str(n)]
        for method in arguments.methods
        for n in arguments.windows or ()
    }
    for name, options in ({"rounding": [], **on_mix} if on_mix else HOW).items():
        label = f"calibration-{arguments.weights}-{name.replace(' ', '-')}"
        sizes = ["--length", str(LENGTH)] if options else []
        sizes += [] if on_mix or not options else ["--max-windows", str(WINDOWS)]
        options = [str(wiki) if option == wiki.name else option for option in options]
        command = ["quantize", source, "--weights", arguments.weights, "--quiet", *options, *sizes]
        folder = once(arguments.work / label, lambda out, command=command: run_diffbit(*command, "-o", out))
        row, model = [name], reference_model(folder)
        for index in range(model.config.num_layers)[arguments.layers :] if arguments.layers else ():
            model.model.layers[index] = exact_model.model.layers[index]
        for text, p, float_scores in zip(texts.values(), reference, exact, strict=True):
            model_scores = scores(text, p, predictions(model, text))
            kept.setdefault(name, []).append(model_scores)
            ratio = interval(
                perplexity_ratio(model_scores, float_scores).to_dict(), lambda r: f"{100 * (r - 1):+.1f} %"
            )
            row.append(f"{ratio}, KL {interval(model_scores.divergence().to_dict(), '{:.3f}'.format)}")
        rows.append(row)
        print(row, file=sys.stderr)
    *others, mix = list(kept)[1:]
    for other in others:
        less = (mean(b.kl - a.kl, a.tokens) for a, b in zip(kept[other], kept[mix], strict=True))
        text_of = other.removeprefix("gptq ")
        rows.append(
            [
                f"KL {mix.removeprefix('gptq ')} − {text_of}",
                *(interval(one.to_dict(), "{:+.3f}".format) for one in less),
            ]
        )
    head = [arguments.weights, *(f"{name}, {len(ids)} windows" for name, (ids, _) in texts.items())]
    shown = command_line(__file__, sys.argv[1:])
    print(text := f"{describe()}. `{shown}`\n\n{table(head, rows)}\n")
    if arguments.markdown:
        renew(Path(__file__).with_name("README.md"), "calibration", text)


def held_out(model: Path, news: Path) -> Iterator[tuple[str, Text]]:
    ids = text_windows(model, news)[::2]
    yield "news", (ids, (torch.arange(EVALUATED) > 0).expand_as(ids))
    tokenizer, render = load_tokenizer(model), chat_template(model)
    assert render is not None
    lines = {name: (TEXT / "eval" / f"{name}.jsonl").read_text("utf-8") for name in ("dialogues", "languages")}
    rows = {name: [json.loads(line) for line in text.splitlines()] for name, text in lines.items()}
    documents = [render(row["messages"]) for row in rows["dialogues"]], [row["text"] for row in rows["languages"]]
    for name, cut in (
        ("code", eval_windows("stdlib", model, EVALUATED, 8)),
        ("dialogue", windows(tokenizer.encode(documents[0]), EVALUATED, eos_id=tokenizer.eos_id, max_windows=8)),
        ("languages", windows(tokenizer.encode(documents[1]), EVALUATED, eos_id=tokenizer.eos_id, max_windows=8)),
    ):
        yield name, (torch.from_numpy(cut.ids), torch.from_numpy(cut.target))


if __name__ == "__main__":
    main()
