"""Are the inputs of down_proj easier to round after PolyNorm (Motif) than after SwiGLU?

    python research/polynorm/polynorm.py --work DIR [--seeds 3] [--json FILE] [--markdown]
    python research/polynorm/polynorm.py --work DIR --quick      # 2 seeds of 6 steps: does everything run?

Models of preset tiny, with plain and with differential attention, trained from each seed with either MLP on the same
batches. Held-out loss; and, of the inputs of down_proj on 16 windows of held-out files, each layer's divided by its
root mean square (RMS): kurtosis, the largest, and the squared error of rounding them with one scale a token, relative
to their squares. Intervals are over seeds. DIR keeps finished runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import numpy as np
import torch
from machine import describe
from report import add_outputs, command_line, interval, table, write_outputs
from runs import losses, over_runs, train_tiny

from diffbit.calib_data import eval_windows
from diffbit.io.progress import track
from diffbit.models import load

ATTENTIONS, MLPS = ("softmax", "diff_v1"), ("swiglu", "polynorm")
MEASURES = {  # name: how it is shown
    "held-out loss": "{:.3f}".format,
    "kurtosis": "{:.1f}".format,
    "largest / RMS": "{:.1f}".format,
    "error at 8 bits": "{:.2e}".format,
    "error at 4 bits": "{:.4f}".format,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="a folder for the runs")
    parser.add_argument("--seeds", type=int, default=3, help="at least 2 (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="short runs: does everything run?")
    add_outputs(parser, "research/polynorm/README.md")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    seeds = range(2 if arguments.quick else arguments.seeds)
    names = {f"{attention}, {mlp}": (attention, mlp) for attention in ATTENTIONS for mlp in MLPS}
    paths: dict[str, list[Path]] = {name: [] for name in names}
    for seed, name in track([(seed, name) for seed in seeds for name in names], "training"):
        attention, mlp = names[name]
        out = arguments.work / f"{attention}-{mlp}-{seed}"
        paths[name].append(train_tiny(out, attention, seed, arguments.quick, mlp=mlp))
    found = {name: np.array([of_inputs(path) for path in runs]).T for name, runs in paths.items()}
    values = {name: dict(zip(MEASURES, [losses(paths[name]), *found[name]], strict=True)) for name in names}
    lines = [
        [name, *(interval(over_runs(values[name][key]), show) for key, show in MEASURES.items())] for name in names
    ]
    command = command_line(__file__, sys.argv[1:])
    text = f"{describe()}. {len(seeds)} seeds. `{command}`\n\n" + table(["", *MEASURES], lines)
    print(text)
    numbers = {name: {key: list(map(float, of)) for key, of in row.items()} for name, row in values.items()}
    write_outputs(arguments, {"command": command, "values": numbers}, {"polynorm": text + "\n"})


def of_inputs(path: Path) -> list[float]:
    """Kurtosis, the largest, and errors at 8 and 4 bits of a model's inputs of down_proj."""
    model = load(path).eval()
    seen: list[torch.Tensor] = []
    for name, module in model.named_modules():
        if name.endswith("down_proj"):
            module.register_forward_pre_hook(lambda _, given: seen.append(given[0].flatten(0, 1).double()))
    windows = eval_windows("stdlib", path, model.config.max_position, 16)
    with torch.inference_mode():
        model(torch.from_numpy(windows.ids))
    x = torch.cat([one / one.square().mean().sqrt() for one in seen])  # [layers * tokens, width]
    kurtosis = (x - x.mean()).pow(4).mean() / x.var(correction=0).square()
    return [float(kurtosis), float(x.abs().max()), *(relative_error(x, bits) for bits in (8, 4))]


def relative_error(x: torch.Tensor, bits: int) -> float:
    """Of rounding rows to integers from -(2^(bits-1) - 1) on, with a scale by their largest number."""
    scale = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    return float((torch.round(x / scale) * scale - x).square().sum() / x.square().sum())


if __name__ == "__main__":
    main()
