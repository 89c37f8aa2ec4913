"""SmolLM2-135M-Instruct by our methods and by other projects', at equal formats: a table of research/weights.

    python -m venv ENV1 && ENV1/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1
    python -m venv ENV2 && ENV2/bin/pip install torch==2.13.0 hqq==0.2.8.post1
    python -m venv ENV3 && ENV3/bin/pip install gptqmodel==7.7.0        # wants torch 2.14; measured with 2.13.0
    python -m venv ENV4 && ENV4/bin/pip install torch==2.13.0 auto-round==0.16.1        # for frontier.py
    python benchmarks/peers.py --work DIR --copy --peer llm-compressor=ENV1 --peer hqq=ENV2 --peer gptqmodel=ENV3

DIR is as for smollm2.py. The linear layers of the first LAYERS decoder layers are rounded, the rest stays float. All
sides calibrate on the same windows of `mix`, diffbit's default text, and have one scale for each group; llm-compressor
chooses it by its observer "mse", as it loses less than its "minmax". Inputs are not rounded on any side. Scores are of
windows of English news, which no side has seen, against the float model; differences are paired, window by window.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from commands import once
from machine import describe
from report import ROOT, command_line, interval, renew, table
from safetensors.torch import load_file
from smollm2 import fetch, predictions, scores, text_windows, trained_copy

import diffbit
from diffbit.apps.evaluate.metrics import Scores, mean, perplexity_ratio
from diffbit.cli.options import read_windows
from diffbit.formats import parse_format
from diffbit.io.progress import track
from diffbit.models import Decoder, save
from diffbit.quantize import Scheme, apply

ROWS = {  # bits, group size, the others' methods, ours
    "int4_g64": (4, 64, ("llm-compressor", "gptqmodel"), ("rtn", "gptq")),
    "int3_g64": (3, 64, ("llm-compressor", "gptqmodel"), ("rtn", "gptq", "learned:40")),
    "int2_g64": (2, 64, ("llm-compressor", "gptqmodel"), ("rtn", "gptq", "learned:40")),
    "int4_g64_asym": (4, 64, ("hqq",), ("rtn", "hqq")),
    "int3_g64_asym": (3, 64, ("hqq",), ("rtn", "hqq")),
    "int2_g64_asym": (2, 64, ("hqq",), ("rtn", "hqq")),
}
WINDOWS, LENGTH = 24, 256  # to calibrate on
START = """
import sys
import numpy as np, torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

source, rows, out, bits, group = sys.argv[1:]
bits, group, ids = int(bits), int(group), np.load(rows)
"""
PEERS = {  # name -> what it is called in the table, and a program that rounds `source` and fills `parts`
    "llm-compressor": (
        "llm-compressor GPTQ",
        """
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier

model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
text = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": np.ones_like(ids).tolist()})
scales = dict(num_bits=bits, type="int", strategy="group", group_size=group, symmetric=True, observer="mse")
recipe = GPTQModifier(config_groups={"all": {"targets": ["Linear"], "weights": scales}}, ignore=["lm_head"])
oneshot(model=model, dataset=text, recipe=recipe, max_seq_length=ids.shape[1], num_calibration_samples=len(ids))
parts = {name: part.detach().float() for name, part in model.named_parameters() if name.endswith("proj.weight")}
""",
    ),
    "gptqmodel": (
        "GPTQModel",
        """
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

config = QuantizeConfig(bits=bits, group_size=group, sym=True, desc_act=False, device="cpu")
model = GPTQModel.load(source, config)
text = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in torch.tensor(ids)]
model.quantize(text, batch_size=1)
model.save(out + ".folder")
model = GPTQModel.load(out + ".folder", device="cpu", backend=BACKEND.TORCH).model
parts = {name + ".weight": part.dequantize_weight().T.float() for name, part in model.named_modules()
         if hasattr(part, "dequantize_weight")}
""",
    ),
    "auto-round": (
        "AutoRound",
        """
from auto_round import AutoRound
from transformers import AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
text = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in torch.tensor(ids)]
options = dict(bits=bits, group_size=group, sym=True, seqlen=ids.shape[1], nsamples=len(ids), device_map="cpu")
rounding = AutoRound(model, AutoTokenizer.from_pretrained(source), dataset=text, low_gpu_mem_usage=False, **options)
model, _ = rounding.quantize()
parts = {name: part.detach().float() for name, part in model.named_parameters() if name.endswith("proj.weight")}
""",
    ),
    "hqq": (
        "HQQ, float zero points",
        """
from hqq.core.quantize import Quantizer

model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
floats = {name: part.detach() for name, part in model.named_parameters() if name.endswith("proj.weight")}
options = dict(nbits=bits, group_size=group, axis=1, round_zero=False, optimize=True, compute_dtype=torch.float32)
codes = {name: Quantizer.quantize(part, device="cpu", **options) for name, part in floats.items()}
parts = {name: Quantizer.dequantize(*found) for name, found in codes.items()}
""",
    ),
}
END = """
save_file({name: part.contiguous() for name, part in parts.items()}, out)
"""


def first_layers(model: Decoder, count: int) -> Decoder:
    """A model of the first layers, with the same weights."""
    part = Decoder(replace(model.config, layers=model.config.layers[:count])).eval()
    part.load_state_dict({name: value for name, value in model.state_dict().items() if name in part.state_dict()})
    return part


def by_peer(name: str, python: Path, part: Decoder, tokenizer: Path, ids: np.ndarray, bits: int, group: int) -> Decoder:
    """The layers as another project rounds them, in an environment of its own."""
    with TemporaryDirectory() as folder:
        source, rows, out = (Path(folder) / name for name in ("model", "ids.npy", "rounded.safetensors"))
        save(part, source, tokenizer_from=tokenizer)
        np.save(rows, ids)
        arguments = [str(x) for x in (source, rows, out, bits, group)]
        program = START + PEERS[name][1] + END
        environment = os.environ | {"GPTQMODEL_CPU_WORKERS": "2"}  # it wants two
        command = [python, "-c", program, *arguments]
        subprocess.run(command, check=True, cwd=folder, stdout=subprocess.DEVNULL, env=environment)
        weights = load_file(out)
    decoder = first_layers(part, part.config.num_layers)
    assert len(weights) == 7 * decoder.config.num_layers, sorted(weights)
    for weight, value in weights.items():
        levels = max(len(row.unique()) for row in value.view(-1, group)[:256])
        assert levels <= 2**bits, f"{weight}: {levels} values in a group"
    decoder.load_state_dict(part.state_dict() | weights)
    return decoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the models")
    parser.add_argument("--peer", action="append", required=True, metavar="NAME=ENV", help=f"NAME: {', '.join(PEERS)}")
    parser.add_argument("--copy", action="store_true", help="the trained copy of smollm2.py, off Q4_1's grid")
    parser.add_argument("--layers", type=int, default=10, help="decoder layers that are rounded (default: %(default)s)")
    parser.add_argument("--markdown", action="store_true", help="renew the table in research/weights")
    options = parser.parse_args()

    source, news, wiki = fetch(options.work)
    if options.copy:
        source = once(options.work / "copy", lambda out: trained_copy(source, wiki, out))
    model = diffbit.load(source).eval()
    ids = text_windows(source, news)
    text = ids, (torch.arange(ids.shape[1]) > 0).expand_as(ids)
    calibration = read_windows(source, "mix", "text", WINDOWS, LENGTH, split="calib")
    rows = calibration.ids[calibration.mask.all(1)]
    exact = predictions(model, text)
    reference = scores(text, exact, exact)
    part, layers = first_layers(model, options.layers), list(model.model.layers)

    def scored(rounded: Decoder) -> Scores:
        for index, layer in enumerate(rounded.model.layers):
            model.model.layers[index] = layer
        result = scores(text, exact, predictions(model, text))
        for index, layer in enumerate(layers):
            model.model.layers[index] = layer
        return result

    environments = dict(peer.split("=", 1) for peer in options.peer)
    lines = []
    for format, (bits, group, others, methods) in track(list(ROWS.items()), "rounding"):
        best = None
        for name in others:
            if name in environments:
                python = Path(environments[name]) / "bin" / "python"
                peer = scored(by_peer(name, python, part, source, rows, bits, group))
                lines.append([format, PEERS[name][0], *cells(peer, reference, None)])
                best = peer if best is None or peer.divergence().value < best.divergence().value else best
        for method in methods if best is not None else ():
            rounded = apply(part, Scheme(weights=parse_format(format)), method, rows)
            lines.append([format, f"diffbit {method}", *cells(scored(rounded), reference, best)])
            print(lines[-1], file=sys.stderr)
    head = ["weights", "method", "perplexity", "KL, nats a token", "less than the best of the others"]
    sizes = f"{len(ids)} windows of {ids.shape[1]} tokens, the first {options.layers} of {len(layers)} layers"
    command = command_line(__file__, [re.sub("=.*", "=ENV", part) for part in sys.argv[1:]])
    report = f"{describe()}. {sizes}. `{command}`\n\n{table(head, lines)}\n"
    print(report)
    if options.markdown:
        renew(ROOT / "research" / "weights" / "README.md", "peers", report)


def cells(ours: Scores, reference: Scores, peer: Scores | None) -> list[str]:
    show: Callable[[float], str] = "{:.4f}".format
    less = ""
    if peer is not None:
        difference = mean(peer.kl - ours.kl, ours.tokens, document=ours.document).to_dict()
        less = interval(difference, show)
    ratio = perplexity_ratio(ours, reference).to_dict()
    up = interval(ratio, lambda value: f"{100 * (value - 1):+.1f} %")
    return [up, interval(ours.divergence().to_dict(), show), less]


if __name__ == "__main__":
    main()
