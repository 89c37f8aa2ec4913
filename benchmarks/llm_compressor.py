"""SmolLM2-135M-Instruct by our methods and by llm-compressor's GPTQ, at equal formats: a table of docs/accuracy.md.

    python -m venv ENV && ENV/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1
    python benchmarks/llm_compressor.py --work DIR --peer ENV [--layers N] [--markdown]     # DIR as for smollm2.py

The linear layers of the first LAYERS decoder layers are rounded, the rest stays float. Both sides calibrate on the same
windows of `mix`, diffbit's default text, and have a symmetric scale for each group; llm-compressor chooses it by its
observer "mse", as it loses less than its "minmax". Inputs are not rounded on either side. Scores are of windows of
English news, which neither side has seen, against the float model; differences are paired, window by window.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from calibration import predictions, scores
from machine import describe
from report import command_line, interval, renew, table
from safetensors.torch import load_file
from smollm2 import fetch, news_windows

import diffbit
from diffbit.cli.options import read_windows
from diffbit.evaluate.metrics import Scores, mean, perplexity_ratio
from diffbit.models import Decoder, save
from diffbit.progress import track
from diffbit.quantize import Scheme, apply, parse_format

ROWS = {  # llm-compressor's GPTQ has bits and a group size
    "int4_g64": (4, 64, ("rtn", "gptq")),
    "int3_g64": (3, 64, ("rtn", "gptq", "learned:40")),
    "int2_g64": (2, 64, ("rtn", "gptq", "learned:40")),
}
PEER = "llm-compressor GPTQ"
WINDOWS, LENGTH = 24, 256  # to calibrate on
CHILD = """
import sys
import numpy as np, torch
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

source, rows, out, bits, group = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
ids = np.load(rows)
text = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": np.ones_like(ids).tolist()})
scales = dict(num_bits=int(bits), type="int", strategy="group", group_size=int(group), symmetric=True, observer="mse")
recipe = GPTQModifier(config_groups={"all": {"targets": ["Linear"], "weights": scales}}, ignore=["lm_head"])
oneshot(model=model, dataset=text, recipe=recipe, max_seq_length=ids.shape[1], num_calibration_samples=len(ids))
parts = {name: part.detach().float() for name, part in model.named_parameters() if name.endswith("proj.weight")}
save_file(parts, out)
"""


def first_layers(model: Decoder, count: int) -> Decoder:
    """A model of the first layers, with the same weights."""
    part = Decoder(replace(model.config, layers=model.config.layers[:count])).eval()
    part.load_state_dict({name: value for name, value in model.state_dict().items() if name in part.state_dict()})
    return part


def by_peer(python: Path, part: Decoder, tokenizer: Path, ids: np.ndarray, bits: int, group: int) -> Decoder:
    """The layers as llm-compressor rounds them, in an environment of its own."""
    with TemporaryDirectory() as folder:
        source, rows, out = (Path(folder) / name for name in ("model", "ids.npy", "rounded.safetensors"))
        save(part, source, tokenizer_from=tokenizer)
        np.save(rows, ids)
        arguments = [str(x) for x in (source, rows, out, bits, group)]
        subprocess.run([python, "-c", CHILD, *arguments], check=True, cwd=folder, stdout=subprocess.DEVNULL)
        weights = load_file(out)
    found = first_layers(part, part.config.num_layers)
    for name, value in weights.items():
        levels = max(len(row.unique()) for row in value.view(-1, group)[:256])
        assert levels <= 2**bits, f"{name}: {levels} values in a group"
    found.load_state_dict(part.state_dict() | weights)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the models")
    parser.add_argument("--peer", type=Path, required=True, metavar="ENV", help="an environment with llm-compressor")
    parser.add_argument("--layers", type=int, default=10, help="decoder layers that are rounded (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="renew the table in docs/accuracy.md")
    options = parser.parse_args()

    source, news, _ = fetch(options.work)
    model = diffbit.load(source).eval()
    ids = news_windows(source, news)
    text = ids, (torch.arange(ids.shape[1]) > 0).expand_as(ids)
    calibration = read_windows(source, "mix", "text", WINDOWS, LENGTH, split="calib")
    rows = calibration.ids[calibration.mask.all(1)]
    exact = predictions(model, text)
    reference = scores(text, exact, exact)
    part, layers = first_layers(model, options.layers), list(model.model.layers)

    def scored(rounded: Decoder) -> Scores:
        for index, layer in enumerate(rounded.model.layers):
            model.model.layers[index] = layer
        found = scores(text, exact, predictions(model, text))
        for index, layer in enumerate(layers):
            model.model.layers[index] = layer
        return found

    lines = []
    for format, (bits, group, methods) in track(list(ROWS.items()), "rounding"):
        peer = scored(by_peer(options.peer / "bin" / "python", part, source, rows, bits, group))
        lines.append([format, PEER, *cells(peer, reference, None)])
        for method in methods:
            scheme = Scheme(weights=parse_format(format))
            rounded = apply(part, scheme, method, rows)
            lines.append([format, f"diffbit {method}", *cells(scored(rounded), reference, peer)])
            print(lines[-2:], file=sys.stderr)
    head = ["weights", "method", "perplexity", "KL, nats a token", f"less than {PEER}'s"]
    sizes = f"{len(ids)} windows of {ids.shape[1]} tokens, the first {options.layers} of {len(layers)} layers"
    command = command_line("llm_compressor.py", sys.argv[1:])
    found = f"{describe()}. {sizes}. `{command}`\n\n{table(head, lines)}\n"
    print(found)
    if options.markdown:
        renew(Path(__file__).parents[1] / "docs" / "accuracy.md", "llm_compressor", found)


def cells(found: Scores, reference: Scores, peer: Scores | None) -> list[str]:
    show: Callable[[float], str] = "{:.4f}".format
    less = ""
    if peer is not None:
        difference = mean(peer.kl - found.kl, found.tokens, document=found.document).to_dict()
        less = interval(difference, show)
    ratio = perplexity_ratio(found, reference).to_dict()
    up = interval(ratio, lambda value: f"{100 * (value - 1):+.1f} %")
    return [up, interval(found.divergence().to_dict(), show), less]


if __name__ == "__main__":
    main()
