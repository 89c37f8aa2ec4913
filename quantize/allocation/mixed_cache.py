"""A mixed KV cache: chooses the formats of keys and values in each layer, so that a model loses least within a number
of bytes a token.

The loss of a format in a layer is the KL divergence (nats per token) from the model with a float cache. For small
errors e of the cached rows it is a quadratic form of the Fisher matrix, as in sensitivity.py. The errors of different
rows are taken to be independent, so

    KL ~ 1/2 sum (g . e)^2 / T        over the heads of a layer and the rows of T tokens

g is the gradient with respect to a row of the log-likelihood of labels that are sampled from the model's predictions. e
is the row as the cache holds it (ops/kv_cache.py) minus the row. Below 8 bits only the reads in low bits count for g:
queries read recent and first tokens in float16. Values at 2 bits lose up to twice as much as this says: their errors
have a part in common, because a quantizer of least squares shrinks what it rounds. To keep that part makes the estimate
worse, because it is a single number for a window and a head, and noisy.

So one forward and one backward pass of each window give the losses of all formats in all layers. The choice is that of
mixed.py: by loss per byte, until the budget is spent. Layers whose cache does not grow, because they have a sliding
window or read the cache of another layer, are not chosen for.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...io.errors import DiffbitError
from ...io.progress import track
from ...models import Checkpoint, Decoder, ModelConfig, load
from ...models.attention import Attention
from ...models.layers.arithmetic import Arithmetic
from ...ops.cache import Buffer
from ...ops.diff_attention_reference import cached
from ...ops.kv_cache import BITS, BLOCK, quantized_tokens, rotate
from ..attention import set_attention
from ..calibration import Tokens
from ..calibration.gradients import backward
from ..calibration.predictions import divergence, predictions
from ..device_cache import cache_bits, cache_spec
from ..scheme import CACHED, AttentionScheme
from .losses import Losses
from .mixed import Bytes, Choice, LayerChoice, check_memory, choose, sample_of

PARTS = {"keys": "key", "values": "value"}  # of a scheme: their buffers
See = Callable[[str, str, float], None]  # (part, format, sum of (g . e)^2)


@dataclass(frozen=True)
class CacheAllocation:
    """The result of `allocate_cache`.

    attention            the scheme of attention, with the formats that were chosen
    layers               the formats that were chosen: "model.layers.0.self_attn keys", [heads, width]; sizes are in
                         bytes a token
    nbytes, bits         bytes a token of the whole cache, and bits a number of keys and values, scales included
    predicted, measured  nats per token: the sum of losses, and the divergence of the model with this cache
    tokens               number of tokens on which losses were estimated
    """

    attention: AttentionScheme
    layers: tuple[LayerChoice, ...]
    nbytes: float
    bits: float
    predicted: float
    measured: float
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        """Return the allocation as plain JSON."""
        return asdict(replace(self, attention=AttentionScheme())) | {"attention": self.attention.to_dict()}


def allocate_cache(
    source: str | Path | Checkpoint,
    nbytes: float,
    *,
    attention: AttentionScheme = AttentionScheme(),  # noqa: B008 (frozen)
    calibration: Any,
    calibration_mask: Any = None,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> CacheAllocation:
    """Choose a format for the keys and one for the values of each layer, within `nbytes` a token of the whole cache.

    attention    all but keys and values is kept, such as the window; keys, values and layers must be None
    calibration  token ids [n, S], for losses; calibration_mask: bool [n, S], tokens that count
    seed         of the labels that losses are estimated from
    """
    checkpoint = source if isinstance(source, Checkpoint) else Checkpoint(source)
    config = checkpoint.config
    sizes, rest = cache_sizes(config, attention)
    low, high = (rest + sum(pick(row.values()) for row in sizes.values()) for pick in (min, max))
    if not low <= nbytes <= high:
        raise DiffbitError(
            f"a KV cache of {nbytes:,.0f} bytes a token cannot be reached: the formats give {low:,.0f} to {high:,.0f} "
            "bytes a token"
        )
    text = Tokens(config, calibration, calibration_mask, device)
    check_memory(checkpoint, text, copies=1)
    decoder = load(checkpoint, device=device)
    losses = estimate_cache(decoder, text, attention, sizes, seed)
    choice, _ = choose(sizes, losses, nbytes - rest)
    chosen = to_attention(attention, choice)
    sample = sample_of(text)
    exact = list(predictions(decoder, sample))
    set_attention(decoder, chosen)
    shapes = {module: _shape(config, module) for module in sizes}
    return CacheAllocation(
        attention=chosen,
        layers=tuple(
            LayerChoice(module, shapes[module], choice[module], losses[module], row) for module, row in sizes.items()
        ),
        nbytes=rest + sum(sizes[module][name] for module, name in choice.items()),
        bits=cache_bits(config, chosen),
        predicted=sum(losses[module][name] for module, name in choice.items()),
        measured=divergence(exact, predictions(decoder, sample), sample),
        tokens=text.count,
    )


def cache_sizes(config: ModelConfig, attention: AttentionScheme) -> tuple[Bytes, int]:
    """Return {"model.layers.0.self_attn keys": {format: bytes a token}} of the caches to choose for, and the bytes a
    token of everything else that grows."""

    def growth(buffer: Buffer) -> int:
        return (buffer.nbytes(BLOCK) - buffer.nbytes(0)) // BLOCK

    sizes: Bytes = {}
    total = 0
    for format in CACHED:
        scheme = replace(attention, keys=format, values=format)
        try:
            scheme.check(config)
        except DiffbitError:  # heads of a width that the format cannot hold
            continue
        spec = cache_spec(config, scheme, "float16")
        if not sizes:  # the first is float16
            total = sum(growth(buffer) for buffer in spec.buffers.values())
        for index, layer in enumerate(spec.layers):
            for part, name in PARTS.items():
                size = sum(growth(buffer) for buffer in layer if buffer.name in (name, f"{name}_scale"))
                if size:
                    sizes.setdefault(_module(index, part), {})[format] = size
    if not sizes:
        raise DiffbitError("the model has no KV cache that grows with the text, so there is nothing to choose")
    return sizes, total - sum(row["fp16"] for row in sizes.values())


def to_attention(attention: AttentionScheme, choice: Choice) -> AttentionScheme:
    """Return the scheme with the formats of a choice: the most frequent pair, and `layers` for the others."""
    layers = sorted({int(module.split(".")[2]) for module in choice})
    pairs = {index: (choice[_module(index, "keys")], choice[_module(index, "values")]) for index in layers}
    ((keys, values), _), *_ = Counter(pairs.values()).most_common()
    others = tuple((index, *pair) for index, pair in pairs.items() if pair != (keys, values))
    return replace(attention, keys=keys, values=values, layers=others)


def estimate_cache(decoder: Decoder, text: Tokens, attention: AttentionScheme, sizes: Bytes, seed: int = 0) -> Losses:
    """Return what the model loses with one layer's keys or values in a format, nats per token: {module: {format: loss}}
    for the modules and formats of `sizes`."""
    sums: dict[str, dict[str, float]] = {module: defaultdict(float) for module in sizes}

    def see(index: int, part: str, format: str, squares: float) -> None:
        sums[_module(index, part)][format] += squares

    modules = [module for module in decoder.modules() if isinstance(module, Attention)]
    generator = torch.Generator(text.ids.device).manual_seed(seed)
    for module in modules:
        index = module.layer_index if module.keys_of is None else module.keys_of
        if row := sizes.get(_module(index, "keys")):
            module.arithmetic = WatchedRows(attention, list(row), partial(see, index))
    try:
        text.embed(decoder.embed)
        for window in track(range(len(text.ids)), "measuring sensitivity of the KV cache"):
            backward(decoder, text.batch(slice(window, window + 1)), generator)
    finally:
        for module in modules:
            module.arithmetic = None
    return {module: {format: sums[module][format] / 2 / text.count for format in row} for module, row in sizes.items()}


class WatchedRows(Arithmetic):
    """Attention over a float cache. In a backward pass it calls see(part, format, sum of (g . e)^2) for the keys and
    for the values."""

    def __init__(self, scheme: AttentionScheme, formats: Sequence[str], see: See) -> None:
        self.window, self.first, self.formats, self.see = scheme.window, scheme.first, formats, see

    def logits(self, query: Tensor, key: Tensor, scale: float, branch: int, of_values: bool = False) -> Tensor:
        low, high, coded = self._reads(key, query.shape[2], "values" if of_values else "keys")
        of_low, of_high = (super(WatchedRows, self).logits(query, rows, scale, branch) for rows in (low, high))
        return torch.where(coded, of_low, of_high)

    def mix(self, probabilities: Tensor, value: Tensor, head_dim: int) -> Tensor:
        rows = value.unflatten(-1, (-1, head_dim)).transpose(2, 3)  # [B, G, w, T, d]
        low, high, coded = self._reads(rows.flatten(1, 2), probabilities.shape[2], "values")
        low, high = (read.view(rows.shape).transpose(2, 3).flatten(3) for read in (low, high))
        mix = super().mix
        return mix(probabilities * coded, low, head_dim) + mix(probabilities * ~coded, high, head_dim)

    def _reads(self, rows: Tensor, length: int, part: str) -> tuple[Tensor, Tensor, Tensor]:
        """Return rows [B, H, T, d] for reads in low bits and, the same numbers, for other reads; and bool [S, T]: which
        of the last S = length tokens read which row in low bits."""
        reads = torch.stack((rows, rows)).float()
        total = rows.shape[2]
        ends = [quantized_tokens(place, self.window) for place in range(total - length + 1, total + 1)]
        token = torch.arange(total, device=rows.device)
        coded = (token >= self.first) & (token < torch.tensor(ends, device=rows.device)[:, None])
        exact = rows.detach().float()

        def watch(gradients: Tensor) -> None:
            for format in self.formats:
                error = rounded(exact, format, self.window, part == "keys") - exact
                g = gradients[0] if BITS[format] < 8 else gradients.sum(0)
                self.see(part, format, float((g * error).sum(-1).square().sum()))

        reads.register_hook(watch)
        return reads[0], reads[1], coded


def rounded(rows: Tensor, format: str, window: int, has_offset: bool) -> Tensor:
    """Return keys (has_offset) or values fp32 [B, H, T, d] as reads in the format's bits get them."""
    if format == "fp16":
        return rows.half().float()
    rounded = cached(rows, 1, format, window, 0, has_offset)
    coded = rounded.dequantized(torch.float32)
    if rounded.is_rotated:
        coded = rotate(coded)
    return torch.cat((coded, rows[:, :, coded.shape[2] :]), 2)


def _module(index: int, part: str) -> str:
    return f"model.layers.{index}.self_attn {part}"


def _shape(config: ModelConfig, module: str) -> tuple[int, int]:
    """Return the number of heads in the cache, and their width."""
    index, part = int(module.split(".")[2]), PARTS[module.split()[1]]
    spec = cache_spec(config, AttentionScheme(), "float16")
    (buffer,) = (buffer for buffer in spec.layers[index] if buffer.name == part)
    heads, _, width = buffer.sizes(0)
    return heads, width
