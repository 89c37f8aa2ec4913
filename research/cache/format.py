"""What each part of the low-bit cache's format is worth: KL from the float cache, part by part, in a published model.

    python research/cache/format.py SmolLM2-135M-Instruct.Q4_1.gguf --text wiki.test.raw --markdown

Attention of a Transformers model is replaced by one that rounds keys and values as a row of the table says, so that
formats can be compared that no operator has; ops/kv_cache.py rounds the rows. Intervals are over windows of text.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import torch
from machine import describe
from report import add_outputs, command_line, nats, table, write_outputs
from torch import Tensor

from diffbit.io.progress import track
from diffbit.ops import kv_cache

PAGE = "research/cache/README.md"
BLOCK = kv_cache.BLOCK
QUERIES = 256  # that are computed together
UNSCORED = 128  # tokens at the beginning of a window, or a quarter of it if that is less


@dataclass(frozen=True)
class Format:
    """keys, values: bits. window, first: tokens that stay float16. offset: what is subtracted from keys: the mean of
    tokens 16 to 31 ("start"), of all but the first tokens ("text", which no device knows), or nothing ("")."""

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
    replace(AS_IT_IS, name="values in float16", values=16),
    replace(AS_IT_IS, name="3 bits", keys=3, values=3),
    replace(AS_IT_IS, name="keys 3 bits, values 2", keys=3, values=2),
    replace(AS_IT_IS, name="2 bits", keys=2, values=2),
    Format("4 bits in blocks of a channel, a scale and a zero point", 4, 4, 32, 0, "", False, True),
    Format("2 bits in such blocks", 2, 2, 32, 0, "", False, True),
    Format("int8, a rotated row", 8, 8, 0, 0, ""),
    Format("int8, a row", 8, 8, 0, 0, "", rotated=False),
)


def turned(rows: Tensor, format: Format) -> Tensor:
    return kv_cache.rotate(rows) if format.rotated else rows


def rounded(rows: Tensor, bits: int, blocks: bool = False) -> Tensor:
    """Return rows [..., T, d] as a cache of so many bits holds them; in blocks, T is a multiple of 32."""
    if bits == 16:
        return rows
    if blocks:
        channels = rows.unflatten(-2, (-1, BLOCK))
        low, high = channels.amin(-2, keepdim=True), channels.amax(-2, keepdim=True)
        scale = ((high - low) / (2**bits - 1)).half().float()
        low = low.half().float()
        codes = ((channels - low) / scale.clamp(min=1e-8)).round().clamp(0, 2**bits - 1)
        return (codes * scale + low).flatten(-3, -2)
    codes, scale = kv_cache.encode_rows(rows, bits)
    return kv_cache.levels_of(codes, bits) * scale.float()[..., None]


def offset_of(keys: Tensor, format: Format) -> Tensor | float:
    """Return what is subtracted from float16 keys [B, G, T, d] before they are rounded, [B, G, 1, d]."""
    if format.offset == "start":
        return kv_cache.offset_of(keys).float().unsqueeze(2)
    return keys[:, :, format.first :].float().mean(2, keepdim=True) if format.offset == "text" else 0.0


def steps(length: int, format: Format | None) -> Iterator[tuple[int, int, int]]:
    """Yield parts begin, end of the queries, and before which token the cache that all of them see is rounded."""
    begin = 0
    while begin < length:
        end, coded = min(length, begin + QUERIES), 0
        if format is not None and min(format.keys, format.values) >= 8:
            coded = end  # at once
        elif format is not None:  # blocks of 32 tokens leave the window together
            coded = kv_cache.quantized_tokens(begin + 1, format.window)
            end = min(end, coded + BLOCK + format.window - 1)
        yield begin, end, coded
        begin = end


def attention(format: Format | None) -> Callable[..., tuple[Tensor, None]]:
    """Return an attention function of Transformers over such a cache; None: a float one."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **others: Any
    ) -> tuple[Tensor, None]:
        groups, length = key.shape[1], query.shape[2]
        keys, values, out, done = key, value, torch.empty_like(query), 0
        if format is not None:
            query, key, value = (turned(rows, format) for rows in (query, key, value))
            if min(format.keys, format.values) != 8:
                key, value = key.half().float(), value.half().float()
            offset, done = offset_of(key.half(), format), format.first
            low_keys = rounded(key - offset, format.keys, format.blocks) + offset
            low_values = rounded(value, format.values, format.blocks)
            keys, values = key.clone(), value.clone()
        for begin, end, coded in steps(length, format):
            if coded > done:
                keys[:, :, done:coded] = low_keys[:, :, done:coded]
                values[:, :, done:coded] = low_values[:, :, done:coded]
                done = coded
            queries = query[:, :, begin:end].unflatten(1, (groups, -1)) * scaling  # [B, G, r, S, d]
            logits = queries @ keys[:, :, None, :end].transpose(-1, -2)
            logits += torch.full((end - begin, end), -torch.inf).triu(begin + 1)
            out[:, :, begin:end] = (logits.softmax(-1) @ values[:, :, None, :end]).flatten(1, 2)
        out = out if format is None else turned(out, format)
        return out.transpose(1, 2).contiguous(), None

    return attend


@dataclass
class Scores:
    """Of one cache: KL from the float cache in nats a token, and how often the top token is the same, by window."""

    kl: list[float]
    top: list[float]


def divergence(exact: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the mean KL of logits [N, V] from exact ones, and the share of equal top tokens."""
    kl = same = 0.0
    for a, b in zip(exact.split(QUERIES), other.split(QUERIES), strict=True):
        same += float((a.argmax(-1) == b.argmax(-1)).sum())
        a, b = a.log_softmax(-1), b.log_softmax(-1)
        kl += float((a.exp() * (a - b)).sum(dtype=torch.float64))
    return kl / len(exact), same / len(exact)


@torch.inference_mode()
def measure(
    model: Any,
    windows: Sequence[Tensor],
    formats: Sequence[Any],
    title: str = "",
    attention: Callable[[Any], Any] = attention,
) -> list[Scores]:
    """Score each format on the tokens of the windows behind the UNSCORED ones. attention: of a format, or None, to its
    attention function."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def logits(window: Tensor, format: Any) -> Tensor:
        ALL_ATTENTION_FUNCTIONS.register("study", attention(format))
        model.config._attn_implementation = "study"
        return model(window[None], logits_to_keep=len(window) - min(UNSCORED, len(window) // 4)).logits[0]

    scores = [Scores([], []) for _ in formats]
    for window in track(windows, title):
        exact = logits(window, None)
        for format, row in zip(formats, scores, strict=True):
            kl, top = divergence(exact, logits(window, format))
            row.kl.append(kl)
            row.top.append(top)
    return scores


def interval(numbers: Sequence[float], resamples: int = 10_000) -> tuple[float, float]:
    """Return a bootstrap interval of 95 % for the mean over windows."""
    picks = torch.randint(len(numbers), (resamples, len(numbers)), generator=torch.Generator().manual_seed(0))
    low, high = torch.tensor(numbers)[picks].mean(1).quantile(torch.tensor([0.025, 0.975])).tolist()
    return low, high


def with_interval(numbers: Sequence[float], show: Callable[[float], str]) -> str:
    """Return the mean over windows and its interval, if there are several."""
    value = show(statistics.mean(numbers))
    return f"{value} [{', '.join(map(show, interval(numbers)))}]" if len(numbers) > 1 else value


def rows_table(formats: Sequence[Any], scores: Sequence[Scores]) -> str:
    """Return the table: KL, and its paired difference from the first row's, with intervals over windows."""
    lines = []
    for format, row in zip(formats, scores, strict=True):
        difference = [a - b for a, b in zip(row.kl, scores[0].kl, strict=True)]
        lines.append([
            format.name,
            with_interval(row.kl, lambda value: f"{value:.4f}"),
            with_interval(difference, nats) if row is not scores[0] else "",
            f"{statistics.mean(row.top):.1%}".replace("%", " %"),
        ])  # fmt: skip
    return table(["format", "KL", "difference from the first row", "top token"], lines)


@torch.inference_mode()
def first_token(model: Any, windows: Sequence[Tensor]) -> str:
    """Return a sentence that says how many heads attend to the first token most, in the mean over queries."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    layers: dict[Any, list[Tensor]] = {}
    exact = attention(None)

    def watch(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **others: Any) -> Any:
        length, shared = query.shape[2], query.shape[1] // key.shape[1]
        logits = query[0] @ key[0].repeat_interleave(shared, 0).transpose(-1, -2) * scaling
        logits += torch.full((length, length), -torch.inf).triu(1)
        late = logits[:, min(UNSCORED, length // 4) :].softmax(-1)
        layers.setdefault(module, []).append(late.mean(1))  # [H, T]
        return exact(module, query, key, value, mask, scaling)

    ALL_ATTENTION_FUNCTIONS.register("study", watch)
    model.config._attn_implementation = "study"
    for window in windows:
        model(window[None], logits_to_keep=1)
    weights = torch.cat([torch.stack(parts).mean(0) for parts in layers.values()])  # [heads, T]
    most = int((weights.argmax(-1) == 0).sum())
    return (
        f"Of {len(weights)} heads {most} attend to the first token more than to any other; its weight is "
        f"{weights[:, 0].median():.2f} in the median head."
    )


def load(path: Path) -> tuple[Any, Any]:
    """Return a Transformers model and its tokenizer, from a GGUF file or a folder."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, file = (path, None) if path.is_dir() else (path.parent, path.name)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval(), tokenizer


def windows_of(tokenizer: Any, text: Path, count: int, length: int) -> list[Tensor]:
    """Return `count` windows of so many tokens, evenly spread over the text. Raises ValueError if it has fewer."""
    ids = tokenizer(text.read_text(encoding="utf-8"), return_tensors="pt").input_ids[0]
    if len(ids) < length:
        raise ValueError(f"{text} has {len(ids)} tokens, wanted at least {length}, a window")
    starts = torch.linspace(0, len(ids) - length, count).long().tolist()
    return [ids[start : start + length] for start in starts]


def options(description: str | None) -> argparse.ArgumentParser:
    """Return the options of a study of caches."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file, or a folder of Hugging Face's")
    parser.add_argument("--text", type=Path, required=True, help="a text file")
    parser.add_argument("--windows", type=int, default=6, help="evenly spread over the text (default: %(default)s)")
    parser.add_argument("--length", type=int, default=512, help="tokens of a window (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="two rows, two windows of 96 tokens: does it run?")
    add_outputs(parser, PAGE)
    return parser


def read(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Any, list[Tensor]]:
    """Return the options, the model, and the windows of the text."""
    arguments = parser.parse_args()
    if arguments.windows < 1:
        parser.error(f"--windows is {arguments.windows}, wanted 1 or more")
    if arguments.length < 2 * BLOCK or arguments.length % BLOCK:
        parser.error(f"--length is {arguments.length}, wanted a multiple of {BLOCK}, {2 * BLOCK} or more")
    for path in (arguments.model, arguments.text):
        if not path.exists():
            parser.error(f"{path} does not exist")
    if arguments.quick:
        arguments.windows, arguments.length = 2, 96
    torch.set_num_threads(1)
    model, tokenizer = load(arguments.model)
    try:
        return arguments, model, windows_of(tokenizer, arguments.text, arguments.windows, arguments.length)
    except ValueError as error:
        parser.error(str(error))


def report(arguments: argparse.Namespace, name: str, formats: Sequence[Any], scores: list[Scores], *more: str) -> None:
    """Print the table and what `more` says, and write them to the page's place `name` if that is asked for."""
    about = f"{describe()}. {arguments.windows} windows of {arguments.length} tokens. "
    about += f"`{command_line(sys.argv[0], sys.argv[1:])}`"
    text = "\n\n".join((about, rows_table(formats, scores), *more))
    print(text)
    numbers = [asdict(format) | asdict(row) for format, row in zip(formats, scores, strict=True)]
    write_outputs(arguments, {"about": about, "rows": numbers}, {name: text})


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--heads", action="store_true", help="only say how many heads attend to the first token most")
    arguments, model, windows = read(parser)
    if arguments.heads:
        print(first_token(model, windows))
        return
    formats = ROWS[:2] if arguments.quick else ROWS
    report(arguments, "format", formats, measure(model, windows, formats, "windows"))


if __name__ == "__main__":
    main()
