"""What each part of the low-bit cache's format is worth: KL from the float cache, part by part, in a published model.

    python research/cache/format.py SmolLM2-135M-Instruct.Q4_1.gguf --text wiki.test.raw --windows 6 --markdown

Attention of a Transformers model is replaced by one that rounds keys and values as a row of the table says, so that
formats can be compared that no operator has; ops/kv_cache.py rounds the rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from diffbit.ops import kv_cache


@dataclass(frozen=True)
class Format:
    """keys, values: bits; 16: float. window, first: tokens that stay float. offset: what is subtracted from keys: the
    mean of tokens 16 to 31 ("start"), of the text from token 4 on ("text", which no device knows), or nothing ("")."""

    name: str
    keys: int = 4
    values: int = 4
    window: int = 32
    first: int = 4
    offset: str = "start"
    rotated: bool = True
    blocks: bool = False  # a scale and a zero point for a channel of 32 tokens (KIVI, arXiv 2402.02750), no levels


AS_IT_IS = Format("as it is")
ROWS = (
    AS_IT_IS,
    replace(AS_IT_IS, name="window 0", window=0),
    replace(AS_IT_IS, name="window 8", window=8),
    replace(AS_IT_IS, name="window 16", window=16),
    replace(AS_IT_IS, name="first 0", first=0),
    replace(AS_IT_IS, name="first 1", first=1),
    replace(AS_IT_IS, name="first 16", first=16),
    replace(AS_IT_IS, name="no offset", offset=""),
    replace(AS_IT_IS, name="offset of the whole text", offset="text"),
    replace(AS_IT_IS, name="not rotated", rotated=False),
    replace(AS_IT_IS, name="values in float", values=16),
    replace(AS_IT_IS, name="3 bits", keys=3, values=3),
    replace(AS_IT_IS, name="keys 3 bits, values 2", keys=3, values=2),
    replace(AS_IT_IS, name="2 bits", keys=2, values=2),
    Format("4 bits in blocks of a channel, a scale and a zero point", 4, 4, 32, 0, "", False, True),
    Format("2 bits in such blocks", 2, 2, 32, 0, "", False, True),
    Format("int8, a rotated row", 8, 8, 0, 0, ""),
    Format("int8, a row", 8, 8, 0, 0, "", rotated=False),
)


def rounded(rows: Tensor, bits: int, format: Format) -> Tensor:
    """Return rows [..., T, d], T a multiple of 32, as a cache of so many bits holds them."""
    if bits == 16:
        return rows
    if format.blocks:
        blocks = rows.unflatten(-2, (-1, 32))
        low, high = blocks.amin(-2, keepdim=True), blocks.amax(-2, keepdim=True)
        scale = ((high - low) / (2**bits - 1)).half().float()
        low = low.half().float()
        codes = ((blocks - low) / scale.clamp(min=1e-8)).round().clamp(0, 2**bits - 1)
        return (codes * scale + low).flatten(-3, -2)
    turned = kv_cache.rotate(rows) if format.rotated else rows
    if bits == 8:
        codes, scale = kv_cache.quantize_rows(turned)
        numbers = codes.float() * scale[..., None]
    else:
        codes, scale = kv_cache.encode_rows(turned, bits)
        numbers = kv_cache.levels_of(codes, bits) * scale.float()[..., None]
    return kv_cache.rotate(numbers) if format.rotated else numbers


def attention(format: Format | None) -> Callable[..., tuple[Tensor, None]]:
    """Return an attention function of Transformers over such a cache; None: a float one."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **others: Any
    ) -> tuple[Tensor, None]:
        shared, length = query.shape[1] // key.shape[1], query.shape[2]
        token = torch.arange(length)
        visible = token <= token[:, None]

        def scores(keys: Tensor) -> Tensor:
            return query @ keys.repeat_interleave(shared, 1).transpose(2, 3) * scaling

        if format is None:
            shares = scores(key).masked_fill(~visible, -torch.inf).softmax(-1)
            return (shares @ value.repeat_interleave(shared, 1)).transpose(1, 2).contiguous(), None
        ends = {"start": slice(16, 32), "text": slice(4, None)}.get(format.offset)
        offset = torch.zeros(()) if ends is None else key[:, :, ends].mean(2, keepdim=True)
        coded = visible
        if min(format.keys, format.values) < 8:  # blocks of 32 tokens leave the window together
            coded = (token < (token[:, None] + 1 - format.window).clamp(min=0) // 32 * 32) & (token >= format.first)
        rounded_keys = rounded(key - offset, format.keys, format) + offset
        logits = torch.where(coded, scores(rounded_keys), scores(key)).masked_fill(~visible, -torch.inf)
        shares = logits.softmax(-1)
        rounded_values = rounded(value, format.values, format)
        out = (shares * coded) @ rounded_values.repeat_interleave(shared, 1)
        out = out + (shares * ~coded) @ value.repeat_interleave(shared, 1)
        return out.transpose(1, 2).contiguous(), None

    return attend


def measure(
    model: Any, windows: list[Tensor], formats: Sequence[Any], attention: Callable[[Any], Any] = attention
) -> list[dict[str, Any]]:
    """Return a row for each format: KL in nats a token over the last three quarters of each window, and how often the
    top token is the float cache's. attention: of a format, or None, to its attention function."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def log_probabilities(format: Any) -> list[Tensor]:
        ALL_ATTENTION_FUNCTIONS.register("study", attention(format))
        model.config._attn_implementation = "study"
        with torch.no_grad():
            return [model(window[None]).logits[0, len(window) // 4 :].log_softmax(-1) for window in windows]

    exact, table = log_probabilities(None), []
    for format in formats:
        other = log_probabilities(format)
        kl = [float((a.exp() * (a - b)).sum(-1).mean()) for a, b in zip(exact, other, strict=True)]
        same = [float((a.argmax(-1) == b.argmax(-1)).float().mean()) for a, b in zip(exact, other, strict=True)]
        row = {**asdict(format), "kl": statistics.mean(kl), "kl_of_windows": kl, "top": statistics.mean(same)}
        table.append(row)
        print(f"{format.name}: KL {row['kl']:.5f}, top token {row['top']:.1%}", file=sys.stderr)
    return table


def interval(numbers: list[float], resamples: int = 10_000) -> tuple[float, float]:
    """Return a bootstrap interval of 95 % for the mean over windows."""
    picks = torch.randint(len(numbers), (resamples, len(numbers)), generator=torch.Generator().manual_seed(0))
    low, high = torch.tensor(numbers)[picks].mean(1).quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high


def markdown(table: list[dict[str, Any]]) -> str:
    """Return the table: KL, and its paired difference from the first row's, with intervals over windows."""
    lines = ["| format | KL | more than the first row | top token |", "|---|---:|---:|---:|"]
    for row in table:
        low, high = interval(row["kl_of_windows"])
        more = [a - b for a, b in zip(row["kl_of_windows"], table[0]["kl_of_windows"], strict=True)]
        least, most = interval(more)
        difference = f"{statistics.mean(more):+.4f} [{least:+.4f}, {most:+.4f}]" if row is not table[0] else ""
        lines.append(f"| {row['name']} | {row['kl']:.4f} [{low:.4f}, {high:.4f}] | {difference} | {row['top']:.1%} |")
    return "\n".join(lines)


def command_line(description: str | None) -> argparse.ArgumentParser:
    """Return the options of a study of caches."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file, or a folder of Hugging Face's")
    parser.add_argument("--text", type=Path, required=True, help="a text file")
    parser.add_argument("--windows", type=int, default=6, help="how many windows, evenly spread over the text")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--quick", action="store_true", help="the first two rows, one window of 96 tokens")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--markdown", action="store_true", help="print the table")
    return parser


def read(options: argparse.Namespace) -> tuple[Any, list[Tensor]]:
    """Return the model, and the windows of the text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, file = (options.model, None) if options.model.is_dir() else (options.model.parent, options.model.name)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    count, length = (1, 96) if options.quick else (options.windows, options.length)
    ids = tokenizer(options.text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    starts = torch.linspace(0, len(ids) - length, count).long().tolist()
    return model, [ids[start : start + length] for start in starts]


def show(table: list[dict[str, Any]], options: argparse.Namespace) -> None:
    if options.json:
        print(json.dumps(table, indent=1))
    if options.markdown or not options.json:
        print(markdown(table))


def main() -> None:
    options = command_line(__doc__).parse_args()
    show(measure(*read(options), ROWS[:2] if options.quick else ROWS), options)


if __name__ == "__main__":
    main()
