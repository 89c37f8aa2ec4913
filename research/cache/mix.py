"""Does a mixed KV cache lose less than one format for all layers, in the same bytes?

    python research/cache/mix.py SmolLM2-135M-Instruct.Q4_1.gguf --text wiki.test.raw [--markdown]

The mix is that of `diffbit allocate --kv-size`, by losses that are estimated on its calibration text. Both are then
compared with the float cache on windows of another text. Intervals are over windows. --quick shows whether it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import torch
from machine import describe
from report import Row, add_outputs, command_line, interval, table, write_outputs

from diffbit.apps.evaluate.metrics import Scores, log_probabilities, score
from diffbit.calib_data import Windows, eval_windows
from diffbit.io.progress import track
from diffbit.models import Checkpoint, Decoder, load
from diffbit.models.attention import Attention
from diffbit.quantize import AttentionScheme
from diffbit.quantize.allocation.mixed import choose
from diffbit.quantize.allocation.mixed_cache import cache_sizes, estimate_cache, to_attention
from diffbit.quantize.attention import set_attention
from diffbit.quantize.calibration import Tokens
from diffbit.quantize.device_cache import cache_bits

PAGE = "research/cache/README.md"
UNIFORM = {"int4": ("int4", "int4"), "int3": ("int3", "int3"), "int3,int2": ("int3", "int2"), "int2": ("int2", "int2")}
MIXED_BITS = (3.75, 2.5)  # where no pair of formats is as large


def mixes(decoder: Decoder, text: Windows, seed: int) -> dict[str, AttentionScheme]:
    """Return a mix as large as each uniform cache but the smallest, and those of MIXED_BITS."""
    config, scheme = decoder.config, AttentionScheme()
    sizes, _ = cache_sizes(config, scheme)
    losses = estimate_cache(decoder, Tokens(config, text.ids, text.mask), scheme, sizes, seed)
    float16 = sum(row["fp16"] for row in sizes.values())
    widths = [cache_bits(config, AttentionScheme(keys=k, values=v)) for k, v in UNIFORM.values()]
    result = {}
    for bits in sorted((*widths[:-1], *MIXED_BITS), reverse=True):
        choice, _ = choose(sizes, losses, round(float16 * bits / 16))
        result[f"mix of {bits:.2f} bits"] = to_attention(scheme, choice)
    return result


@torch.inference_mode()
def measured(decoder: Decoder, windows: Windows, schemes: Mapping[str, AttentionScheme]) -> dict[str, Scores]:
    """Score the model with each cache against the float cache."""
    results = {name: Scores.zeros(len(windows.ids), windows.document) for name in schemes}
    ids, target = torch.from_numpy(windows.ids), torch.from_numpy(windows.target)
    attentions = [module for module in decoder.modules() if isinstance(module, Attention)]
    for window in track(range(len(ids)), "measuring"):
        exact = log_probabilities(decoder(ids[window : window + 1])[0], target[window])
        for name, scheme in schemes.items():
            set_attention(decoder, scheme)
            low = log_probabilities(decoder(ids[window : window + 1])[0], target[window])
            score(results[name], window, ids[window], target[window], low, exact)
        for module in attentions:
            module.arithmetic = None
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a model whose KV cache grows")
    parser.add_argument("--text", required=True, help="the text to compare on: a file, or stdlib")
    parser.add_argument("--windows", type=int, default=6, help="of --text (default: %(default)s)")
    parser.add_argument("--calibration", type=int, default=8, help="windows of mix (default: %(default)s)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the estimate's labels (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="windows of 128 tokens: does it run?")
    add_outputs(parser, PAGE)
    options = parser.parse_args()
    torch.set_num_threads(1)
    length, counts = (128, (1, 2)) if options.quick else (options.length, (options.calibration, options.windows))
    calibration = eval_windows("mix", options.model, length, counts[0], split="calib")
    windows = eval_windows(options.text, options.model, length, counts[1], split="train")
    checkpoint = Checkpoint(options.model)
    decoder = load(checkpoint).eval()
    schemes = {name: AttentionScheme(keys=keys, values=values) for name, (keys, values) in UNIFORM.items()}
    schemes |= mixes(decoder, calibration, options.seed)
    results = measured(decoder, windows, schemes)
    rows: list[Row] = []
    for name, scheme in schemes.items():
        bits, scores = cache_bits(checkpoint.config, scheme), results[name]
        same = [other for other in UNIFORM if abs(cache_bits(checkpoint.config, schemes[other]) - bits) < 0.01]
        other = results[same[0]] if same and name not in UNIFORM else None
        difference = None if other is None else scores.mean(scores.kl - other.kl).to_dict()
        rows.append({"cache": name, "bits": bits, "kl": scores.divergence().to_dict(), "difference": difference,
                     "same": scores.agreement().to_dict()["value"], "scheme": scheme.to_dict()})  # fmt: skip
    rows.sort(key=lambda row: -row["bits"])
    heading = ["cache", "bits a number", "KL", "more than one format of these bits", "same top token"]
    lines = [
        [
            row["cache"],
            f"{row['bits']:.2f}",
            interval(row["kl"], lambda value: f"{value:.4f}"),
            interval(row["difference"], lambda value: f"{value:+.4f}".replace("-", "−")),
            f"{row['same']:.1%}",
        ]
        for row in rows
    ]
    about = f"{describe()}. {counts[1]} windows of {length} tokens. `{command_line(__file__, sys.argv[1:])}`\n\n"
    text = about + table(heading, lines)
    print(text)
    write_outputs(options, {"rows": rows}, {"mix": text})


if __name__ == "__main__":
    main()
