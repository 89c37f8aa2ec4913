"""Our rounding methods beside their peers: the same layers, the same calibration tokens, the same format.

    python -m venv ENV
    ENV/bin/pip install torch==2.13.0 llmcompressor==0.14.0.1 einops termcolor
    ENV/bin/pip install --no-deps --no-build-isolation hqq==0.2.8.post1 autoawq==0.2.9
    python benchmarks/quantizers.py --peers ENV
    python benchmarks/quantizers.py --peers ENV --json out/quantizers.json --markdown    # renew docs/accuracy.md

For some layers of each model the inputs of TOKENS tokens of the calib split of the standard library (float model) are
what every method calibrates on. What each makes of the weight is dequantized and judged here, by one number,

    tr((W - Wq) G (W - Wq)^T) / tr(W G W^T)         G: the Gram matrix of the inputs

on those inputs and on as many of the eval split. Each row gives the ratio ours / peer's, geometric mean and worst over
the layers; below 1 ours is better.

Where formats differ: ours round scales to fp16, and so are llm-compressor's, hqq's (with whole zero points) here;
AutoAWQ's stay fp32. Symmetric scales carry a sign in ours, which decides the end that has one code more, and are
positive in llm-compressor's. hqq has float zero points, 16 bits a group where ours have 2 to 4: it is shown with them
and with rounded ones. AutoAWQ and ours both search AWQ's scales without clipping; the scales are folded back.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from report import Row, command_line, renew, table
from safetensors.torch import load_file, save_file
from torch import Tensor

from diffbit.calib_data import eval_windows
from diffbit.models import load
from diffbit.quantize import parse_format
from diffbit.quantize.methods import awq, gptq, hqq, rtn
from diffbit.quantize.qtensor import QTensor
from diffbit.quantize.stats import CalibStats

MODELS = tuple(Path("examples/nano") / name for name in ("diff_v1", "softmax", "diff_v2"))
LAYERS = ("self_attn.q_proj", "self_attn.o_proj", "mlp.up_proj", "mlp.down_proj")  # of the layer in the middle
TOKENS = 8192
FORMATS = {
    "gptq": ("int4_g128", "int3_g64", "int2_g64", "int4_g128_asym", "int3_g64_asym", "int2_g64_asym"),
    "hqq": ("int4_g128_asym", "int3_g64_asym", "int2_g64_asym"),
    "awq": ("int4_g128_asym", "int3_g64_asym", "int2_g64_asym"),
}
WANTED = 1.02
OURS, NEAREST = "ours", "round to nearest"


def layers(path: Path) -> dict[str, dict[str, Tensor]]:
    """{layer: weight, inputs, gram (of those), held_out (gram of other text)} of a checkpoint."""
    decoder = load(path).eval()
    middle = decoder.config.num_layers // 2
    linears = {
        f"model.layers.{middle}.{name}": decoder.get_submodule(f"model.layers.{middle}.{name}") for name in LAYERS
    }
    kept: dict[str, list[Tensor]] = {}
    hooks = [
        linear.register_forward_pre_hook(lambda _, inputs, name=name: kept.setdefault(name, []).append(inputs[0]))
        for name, linear in linears.items()
    ]
    found: dict[str, dict[str, Tensor]] = {}
    for split in ("calib", "eval"):
        kept.clear()
        length = decoder.config.max_position
        windows = eval_windows("stdlib", path, length, TOKENS // length, split=split)
        with torch.inference_mode():
            for ids in torch.as_tensor(windows.ids).split(8):
                decoder(ids)
        for name, inputs in kept.items():
            x = torch.cat(inputs)[torch.as_tensor(windows.mask)].contiguous()
            layer = found.setdefault(f"{path.name}.{name}", {"weight": linears[name].weight.detach().float()})
            if split == "calib":
                layer["inputs"] = x
            layer["gram" if split == "calib" else "held_out"] = x.T @ x / len(x)
    for hook in hooks:
        hook.remove()
    return found


def ours(method: str, weight: Tensor, stats: CalibStats, name: str) -> Tensor:
    """What a method of ours multiplies with, fp32 [N, K]."""
    format = parse_format(name)
    if method == "awq":
        scale = awq.search([weight], [format], stats)
        return rtn.quantize(weight * scale, format).dequantize() / scale
    quantize = {"gptq": gptq.quantize, "hqq": hqq.quantize, "rtn": rtn.quantize}[method]
    made: QTensor = quantize(weight, format, stats)
    return made.dequantize()


def proxy(weight: Tensor, quantized: Tensor, gram: Tensor) -> float:
    weight, gram = weight.double(), gram.double()
    lost = weight - quantized.double()
    return float(((lost @ gram) * lost).sum() / ((weight @ gram) * weight).sum())


def peers(python: Path, found: dict[str, dict[str, Tensor]]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Their weights by METHOD/FORMAT/LAYER/PEER, and {"versions", "missing"}."""
    tasks = [
        {"method": method, "layer": layer, "format": format.name, "bits": format.bits, "symmetric": format.symmetric,
         "group_size": format.group_size}
        for method, names in FORMATS.items() for format in map(parse_format, names) for layer in found
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tensors = {f"{layer}/{part}": found[layer][part] for layer in found for part in ("weight", "inputs", "gram")}
        save_file(tensors, folder / "layers.safetensors")
        (folder / "tasks.json").write_text(json.dumps(tasks))
        script = Path(__file__).with_name("quantizer_peers.py")
        # isolated: kernels.py of this folder is not the package of that name that transformers looks for
        subprocess.run([str(python), "-I", str(script), str(folder)], check=True, stdout=sys.stderr)
        return load_file(folder / "peers.safetensors"), json.loads((folder / "peers.json").read_text())


def rows(found: dict[str, dict[str, Tensor]], made: dict[str, Tensor]) -> list[Row]:
    """A row per method, format and peer; rounding to nearest is a peer of all."""
    result: list[Row] = []
    for method, names in FORMATS.items():
        for name in names:
            losses: dict[str, list[tuple[float, float]]] = {}  # of a layer: on calibration text, held out
            for layer, parts in found.items():
                x, weight = parts["inputs"], parts["weight"]
                stats = CalibStats(parts["gram"], x.abs().amax(0), x.abs().mean(0), len(x))
                start = f"{method}/{name}/{layer}/"
                weights = {OURS: ours(method, weight, stats, name), NEAREST: ours("rtn", weight, stats, name)}
                weights |= {key.removeprefix(start): made[key] for key in made if key.startswith(start)}
                for who, quantized in weights.items():
                    pair = proxy(weight, quantized, parts["gram"]), proxy(weight, quantized, parts["held_out"])
                    losses.setdefault(who, []).append(pair)
            mine = losses.pop(OURS)
            for peer, theirs in losses.items():
                row: Row = {"method": method, "format": name, "peer": peer, "layers": len(found)}
                for part, text in enumerate(("calibration", "held_out")):
                    ratios = [a[part] / b[part] for a, b in zip(mine, theirs, strict=True)]
                    row[text] = {
                        "ours": _mean([a[part] for a in mine]), "peer": _mean([b[part] for b in theirs]),
                        "ratio": _mean(ratios), "worst": max(ratios),
                    }  # fmt: skip
                if peer != NEAREST:
                    row["wanted"], row["reached"] = WANTED, row["calibration"]["ratio"] <= WANTED
                result.append(row)
    return result


def _mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def tables(about: Row, measured: list[Row]) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in about["versions"].items())
    missing = "".join(f" Not measured: {name} ({why})." for name, why in about["missing"].items())
    lines = []
    for row in measured:
        calibration, held_out = row["calibration"], row["held_out"]
        lines.append(
            [row["method"], row["format"], row["peer"],
             f"{calibration['ours']:.3g}", f"{calibration['peer']:.3g}", f"{calibration['ratio']:.3f}",
             f"{calibration['worst']:.3f}", f"{held_out['ratio']:.3f}", f"{held_out['worst']:.3f}",
             {True: "yes", False: "no"}.get(row.get("reached"), "")]
        )  # fmt: skip
    header = ("ours", "format", "peer", "our loss", "peer's", "ratio", "worst", "held out", "worst", f"<= {WANTED:g}")
    return (
        f"{about['layers']} layers of {', '.join(about['models'])}, {TOKENS} tokens; {versions}.{missing} "
        f"`{about['command']}`\n\n" + table(header, lines) + "\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, required=True, metavar="ENV", help="the environment made as above")
    parser.add_argument(
        "--models", type=Path, nargs="+", default=list(MODELS), help="checkpoints (default: the nano trio)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too, as one JSON document")
    parser.add_argument("--markdown", type=Path, nargs="?", const=Path("docs/accuracy.md"), metavar="FILE",
                        help="renew the table in this page (default: %(const)s)")  # fmt: skip
    arguments = parser.parse_args()
    python = arguments.peers / "bin" / "python"
    if not python.exists():
        raise SystemExit(f"{arguments.peers}: no Python environment; this script's docstring says how to make it")
    found = {layer: parts for model in arguments.models for layer, parts in layers(model).items()}
    made, about = peers(python, found)
    about |= {"layers": len(found), "models": [model.name for model in arguments.models],
              "command": command_line("quantizers.py", sys.argv[1:])}  # fmt: skip
    measured = rows(found, made)
    for row in measured:
        print(json.dumps(row), flush=True)
    print("\n" + tables(about, measured))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"about": about, "rows": measured}, indent=1))
    if arguments.markdown:
        renew(arguments.markdown, "quantizers", tables(about, measured))


if __name__ == "__main__":
    main()
