"""Does it pay to quantize with the subtraction in mind? Trained models, held-out text, paired intervals.

The premise: q and k are rounded (GPTQ), and each layer's attention gets the float model's input. Relative errors, over
all tokens and heads, of the two branches A1 v and A2 v, of the difference A1 v - lambda A2 v, and of the layer's
output; and how the two branches' errors meet in the difference, ||dS - lambda dO||^2 / (||dS||^2 + ||lambda dO||^2):
1 if they are unrelated, below 1 if they cancel, above 1 if they add up.

The methods: nats a token lost against the float model (times 100), and the difference to GPTQ on the same windows.

    gptq             every projection by itself
    joint, heads     joint.py with a metric for each sub-head: attention in mind, not the subtraction
    joint            with the cross terms of a pair's two branches
    shared scales    joint, and a pair's rows share the scales of their groups (the search of scales.py, over both)
    ...+relambda     and lambda fitted again
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from report import command_line, renew, table
from torch import Tensor

from diffbit import models
from diffbit.calib_data import Windows, eval_windows
from diffbit.evaluate.metrics import Scores, log_probabilities, mean, paired, score
from diffbit.models import Checkpoint, Decoder, causal_mask, rope_for
from diffbit.quantize import Format, Scheme, apply, parse_format, scales
from diffbit.quantize.formats import IntFormat
from diffbit.quantize.methods import joint

FORMATS = ("int4_g128", "int3_g64", "int2_g64")
PREMISE = "int3_g64"
CALIBRATION_WINDOWS = 128
Row = dict[str, Any]


# ---- variants of the method that are measured here and nowhere else -------------------------------------------------


def heads_apart(head_dim: int) -> AbstractContextManager[Any]:
    """joint's metric without the cross terms between sub-heads."""
    whole = joint.row_metrics

    def metrics(piece: Any) -> dict[str, Tensor]:
        found = whole(piece)
        for name, metric in found.items():
            if not name.endswith("v_proj"):  # a value is one vector, however wide
                sub_head = torch.arange(metric.shape[1]) // head_dim
                found[name] = metric * (sub_head[:, None] == sub_head)
        return found

    return patch.object(joint, "row_metrics", metrics)


def shared_scales(head_dim: int) -> AbstractContextManager[Any]:
    """joint, with one scale for row j of both sub-heads of a pair: as if they were one group twice as long."""
    apart = joint.quantize_rows

    def quantize(weight: Tensor, format: Format, stats: Any, metric: Tensor) -> Any:
        if metric.shape[1] != 2 * head_dim or not isinstance(format, IntFormat) or weight.shape[1] % format.group_size:
            return apart(weight, format, stats, metric)
        size, longer = format.group_size, IntFormat.of(format.bits, 2 * format.group_size)

        def lengthen(weight: Tensor) -> Tensor:
            """[N, K] -> [N / 2, 2K]: each group followed by that of the other branch."""
            pairs = weight.unflatten(0, (-1, 2, head_dim)).unflatten(3, (-1, size))  # [P, 2, d, G, g]
            return pairs.permute(0, 2, 3, 1, 4).flatten(2).flatten(0, 1)

        def twice(scale: Tensor) -> Tensor:
            return scale.unflatten(0, (-1, 1, head_dim)).expand(-1, 2, -1, -1).flatten(0, 2).contiguous()

        def search(weight: Tensor, format: Format, importance: Tensor) -> tuple[Tensor, Tensor | None]:
            both = importance.unflatten(0, (-1, 1, size)).expand(-1, 2, -1).flatten()
            return twice(original[0](lengthen(weight), longer, both)[0]), None

        def solve(weight: Tensor, format: Format, codes: Tensor, scale: Tensor, zero: None, gram: Tensor,
                  ridge: float) -> Tensor:  # fmt: skip
            square = gram.unflatten(0, (-1, size)).unflatten(2, (-1, size))  # [G, g, G, g]
            both = torch.einsum("agbh,st->asgbth", square, torch.eye(2)).flatten(0, 2).flatten(1)
            once = scale.unflatten(0, (-1, 2, head_dim))[:, 0].flatten(0, 1)
            return twice(original[1](lengthen(weight), longer, lengthen(codes), once, None, both, ridge))

        original = scales.search, scales.solve
        with patch.object(scales, "search", search), patch.object(scales, "solve", solve):
            return apart(weight, format, stats, metric)

    return patch.object(joint, "quantize_rows", quantize)


VARIANTS: dict[str, tuple[str, Callable[[int], AbstractContextManager[Any]]]] = {
    "joint, heads": ("joint", heads_apart),
    "shared scales": ("joint", shared_scales),
}


# ---- measuring ------------------------------------------------------------------------------------------------------


def scores(decoder: Decoder, windows: Windows) -> Scores:
    found = Scores.zeros(len(windows.ids))
    ids, target = torch.from_numpy(windows.ids), torch.from_numpy(windows.target)
    mask = torch.from_numpy(windows.mask)
    with torch.inference_mode():
        for start in range(0, len(ids), 8):
            batch = slice(start, start + 8)
            seen = None if mask[batch].all() else mask[batch].long()
            for window, logits in enumerate(decoder(ids[batch], attention_mask=seen), start):
                score(found, window, ids[window], target[window], log_probabilities(logits, target[window]))
    return found


def scheme_of(what: str, format: str) -> Scheme:
    if what == "all":
        return Scheme(weights=parse_format(format))
    return Scheme(overrides=tuple((f"*.{name}_proj", parse_format(format)) for name in what))


def methods_of(what: str, differential: bool) -> list[str]:
    if not differential:
        return ["rtn", "gptq", "joint"] if what == "all" else ["gptq", "joint"]
    if what == "qk":
        return ["gptq", "joint, heads", "joint", "shared scales", "gptq+relambda", "joint+relambda"]
    return ["rtn", "gptq", "joint, heads", "joint", "gptq+relambda", "joint+relambda"]


@torch.inference_mode()
def premise(name: str, decoder: Decoder, calibration: Windows, windows: Windows, format: str) -> Iterator[Row]:
    """How the errors of the two branches meet, layer by layer."""
    rounded = apply(decoder, scheme_of("qk", format), "gptq", calibration.ids, calibration.mask)
    ids = torch.from_numpy(windows.ids[windows.mask.all(1)][:32])
    rope, mask = rope_for(decoder.config, torch.arange(ids.shape[1])[None]), causal_mask(ids.shape[1])
    hidden = decoder.embed(ids)
    for index, (layer, other) in enumerate(zip(decoder.model.layers, rounded.model.layers, strict=True)):
        x = layer.input_layernorm(hidden)
        row: Row = {"part": "premise", "model": name, "layer": index, "format": format}
        true, errs = layer.self_attn, other.self_attn
        out = true(x, rope, mask, None)
        row["output"] = ratio(errs(x, rope, mask, None) - out, out)
        if hasattr(true, "branches"):
            lambda_ = true.lambda_of(x)
            (signal, noise), (signal_q, noise_q) = (part.branches(x, rope, mask, None) for part in (true, errs))
            signal_error, noise_error = signal_q - signal, lambda_ * (noise_q - noise)
            row |= {
                "signal": ratio(signal_error, signal),
                "noise": ratio(noise_error, lambda_ * noise),
                "difference": ratio(signal_error - noise_error, signal - lambda_ * noise),
                "meet": float(
                    (signal_error - noise_error).square().sum()
                    / (signal_error.square().sum() + noise_error.square().sum())
                ),
            }
        yield row
        hidden = layer(hidden, rope, mask)


def ratio(error: Tensor, exact: Tensor) -> float:
    return float(error.norm() / exact.norm())


def comparisons(
    name: str, decoder: Decoder, calibration: Windows, windows: Windows, formats: list[str], whats: list[str]
) -> Iterator[Row]:
    reference = scores(decoder, windows)
    differential = hasattr(decoder.model.layers[0].self_attn, "branches")
    for what in whats:
        for format in formats:
            gptq: Scores | None = None
            for method in methods_of(what, differential):
                started = time.perf_counter()
                recipe, context = VARIANTS.get(method, (method, lambda _: nullcontext()))
                with context(decoder.config.head_dim):
                    made = apply(decoder, scheme_of(what, format), recipe, calibration.ids, calibration.mask)
                found = scores(made, windows)
                gptq = found if method == "gptq" else gptq
                loss = mean(paired(found, reference), found.tokens)
                row: Row = {
                    "part": "methods", "model": name, "what": what, "format": format, "method": method,
                    "perplexity": found.perplexity().value, "loss": loss.to_dict(),
                }  # fmt: skip
                if gptq is not None and method != "gptq":
                    row["against_gptq"] = mean(paired(found, gptq), found.tokens).to_dict()
                yield row | {"seconds": round(time.perf_counter() - started, 1)}


# ---- the page -------------------------------------------------------------------------------------------------------


def page(about: Row, rows: list[Row]) -> str:
    parts = [f"`{about['command']}`; {about['windows']} windows of {about['length']} held-out tokens each."]
    header = ("model, layer", "format", "A1 v", "A2 v", "difference", "output", "errors meet")
    lines = []
    for row in (row for row in rows if row["part"] == "premise"):
        percents = (f"{row[part]:.2%}" if part in row else "" for part in ("signal", "noise", "difference", "output"))
        meet = f"{row['meet']:.2f}" if "meet" in row else ""
        lines.append([f"{row['model']}, {row['layer']}", row["format"], *percents, meet])
    parts.append("Relative errors when q and k are rounded by GPTQ:\n\n" + table(header, lines))
    names = {"qk": "only q and k", "all": "all weights"}
    header = ("model, rounded", "format", "method", "perplexity", "lost", "95 %", "against gptq", "95 %")
    lines = []
    for row in (row for row in rows if row["part"] == "methods"):
        line = [f"{row['model']}, {names[row['what']]}", row["format"], row["method"], f"{row['perplexity']:.3f}"]
        for estimate in (row["loss"], row.get("against_gptq")):
            line += ["", ""] if estimate is None else [
                f"{100 * estimate['value']:+.2f}", f"{100 * estimate['low']:+.2f} to {100 * estimate['high']:+.2f}"
            ]  # fmt: skip
        lines.append(line)
    parts.append("Nats lost a token, times 100:\n\n" + table(header, lines))
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, default=[Path("examples/nano/diff_v1")],
                        help="checkpoints (default: %(default)s)")  # fmt: skip
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), help="(default: %(default)s)")
    parser.add_argument("--what", nargs="+", choices=("qk", "all"), default=["qk", "all"], help="what is rounded")
    parser.add_argument("--windows", type=int, help="of held-out text (default: all)")
    parser.add_argument("--calibration", type=int, default=CALIBRATION_WINDOWS, help="windows (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there too, as one JSON document")
    parser.add_argument("--markdown", type=Path, nargs="?", const=Path("docs/accuracy.md"), metavar="FILE",
                        help="renew the tables in this page (default: %(const)s)")  # fmt: skip
    arguments = parser.parse_args()

    rows, about = [], {"command": command_line("subtraction.py", sys.argv[1:])}
    for path in arguments.models:
        decoder = models.load(path).eval()
        length = min(Checkpoint(path).config.max_position, 512)
        windows = eval_windows("stdlib", path, length, arguments.windows)
        calibration = eval_windows("stdlib", path, length, arguments.calibration, split="calib")
        about |= {"windows": len(windows.ids), "length": length}
        measured = [
            premise(
                path.name, decoder, calibration, windows, arguments.formats[-2 if len(arguments.formats) > 1 else 0]
            ),
            comparisons(path.name, decoder, calibration, windows, arguments.formats, arguments.what),
        ]
        for part in measured:
            for row in part:
                print(json.dumps(row), flush=True)
                rows.append(row)
    print("\n" + page(about, rows))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"about": about, "rows": rows}, indent=1))
    if arguments.markdown:
        renew(arguments.markdown, "subtraction", page(about, rows))


if __name__ == "__main__":
    main()
