"""The numbers behind the page, as plain JSON: `diffbit show --json` prints them, and the page holds the same.

    {"prompt", "answer", "models": [{
        "name", "attention", "stored",          stored: None, or the format of a checkpoint that is quantized already,
                                                such as "int4_g32" or "mix, 4.3 bits"
        "tokens": [text, ...], "answer": [index, ...],
        "layers": [{"layer", "heads", "branches"}, ...],        those that the page shows
        "settings": [{
            "what", "bits",                     what is rounded; the first is the model as it is, what = "nothing"
            "next": [{"token", "probability", "before"}, ...],  the most likely ones; before: without rounding
            "kl",                               nats, of these probabilities from those without rounding
            "heads": [[{"lambda", "first", "answer", "negative"}, ...], ...],   [layer][head], of the last query
            "maps", "lambdas"}, ...],           base64
        "outliers": [{"layer", "hidden", "logits"}, ...]}]}     of all layers, without rounding

"maps" are bytes, for each layer and head the signal and the noise, or the one map: the rows of the lower triangle one
after the other, query s with its keys 0..s. A byte c is the weight (c / 255)^2, so that small weights keep their
digits: the error is at most sqrt(weight) / 255. "lambdas" are little-endian float32, for each layer and head one per
query; a plain layer has none.

"first" and "answer" are shares of the last query's weights, of the signal, the noise and their difference: on the first
token, and on the tokens of the answer. Weights of a difference may be negative, so its shares are of their magnitude,
and "negative" is the share of those below zero.
"""

from __future__ import annotations

import itertools
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...calib_data import TextTokenizer, load_tokenizer
from ...cli import remark
from ...formats import parse_format
from ...io.errors import DiffbitError
from ...io.files import folder_name
from ...io.progress import track
from ...models import Checkpoint, Decoder
from ...quantize import AttentionScheme, Scheme, apply, format_name, load, read_scheme, table_formats
from .maps import Maps, Run, run

MOST_TOKENS = 64
MOST_BYTES = 6 << 20  # of maps, over all models; base64 adds a third
MOST_LIKELY = 5
WEIGHTS = {8: "int8", 4: "int4_g32", 2: "int2_g32"}
SETTINGS = (("nothing", 0), *itertools.product(("weights", "kv", "logits"), WEIGHTS))  # (what is rounded, its bits)

Json = dict[str, Any]


def document(
    models: Sequence[Path], prompt: str, answer: str | None, device: str, layers: Sequence[int] | None = None
) -> Json:
    """Return the numbers of the page (see the module's docstring). layers: those to show; None: evenly spread ones, as
    many as fit.

    Raises DiffbitError for a prompt that has no token, or more than MOST_TOKENS or than the model's context, for an
    answer that is not in the prompt, and for layers that a model does not have.
    """
    if answer is not None and (not answer or answer not in prompt):
        raise DiffbitError(f"--answer is {answer!r}, wanted a part of the prompt")
    if not prompt.isascii() and any("\ud800" <= character <= "\udfff" for character in prompt):
        raise DiffbitError("the prompt is not UTF-8")
    room = MOST_BYTES // len(models)
    shown = [_model(path, prompt, answer, device, layers, room) for path in models]
    return {"prompt": prompt, "answer": answer, "models": shown}


def _model(path: Path, prompt: str, answer: str | None, device: str, layers: Sequence[int] | None, room: int) -> Json:
    checkpoint, tokenizer, name = Checkpoint(path), load_tokenizer(path), folder_name(path)
    encoding = tokenizer.backend.encode(prompt)
    limit = min(MOST_TOKENS, checkpoint.config.max_position)
    if not 0 < len(encoding.ids) <= limit:
        raise DiffbitError(f"{name}: the prompt has {len(encoding.ids)} tokens, wanted 1 to {limit}")
    decoder, stored = load(checkpoint, device=device), read_scheme(checkpoint)
    float_run = run(decoder, encoding.ids)
    if not float_run.maps:
        raise DiffbitError(f"{name}: no layer has attention, so there are no maps to show")
    texts = [_text(tokenizer, prompt, *place) for place in zip(encoding.ids, encoding.offsets, strict=True)]
    marked = _answer_tokens(prompt, answer, encoding.offsets)
    heads = _chosen(name, float_run, layers, room // len(SETTINGS))
    before = float_run.next_logits.double().log_softmax(-1)
    settings = []
    for what, bits in track(SETTINGS if stored is None else SETTINGS[:1], f"roundings of {name}"):
        try:
            rounded = float_run if what == "nothing" else run(_rounded(decoder, what, bits), encoding.ids)
        except DiffbitError as error:
            remark(f"{name}: {what} at {bits} bits are left out: {error}")
            continue
        after = _next(tokenizer, encoding.ids, rounded, before, name)
        settings.append({"what": what, "bits": bits} | after | _maps(rounded, heads, marked))
    return {
        "name": name,
        "attention": checkpoint.config.attention,
        "stored": None if stored is None else format_name(checkpoint.config, stored),
        "tokens": texts,
        "answer": marked,
        "num_layers": checkpoint.config.num_layers,
        "layers": [
            {"layer": layer, "heads": count, "branches": float_run.maps[layer].weights.shape[1]}
            for layer, count in heads.items()
        ],
        "settings": settings,
        "outliers": [_outliers(float_run, layer) for layer in range(len(float_run.hidden))],
    }


def _rounded(decoder: Decoder, what: str, bits: int) -> Decoder:
    """Return a copy of a float model with one thing rounded.

    The cache keeps no first or recent tokens in float16: most prompts have hardly more. Raises DiffbitError if the
    model's widths do not allow it.
    """
    if what == "weights":
        embedding, head = table_formats(True, None, None)
        return apply(decoder, Scheme(weights=parse_format(WEIGHTS[bits]), embedding=embedding, head=head))
    cache = AttentionScheme(keys=f"int{bits}", values=f"int{bits}", window=0, first=0)
    return apply(decoder, Scheme(attention=cache if what == "kv" else AttentionScheme(logits=bits)))


def _text(tokenizer: TextTokenizer, prompt: str, token_id: int, place: tuple[int, int]) -> str:
    """Return the token's part of the prompt, or the name of a token that stands for no text."""
    return prompt[slice(*place)] or str(tokenizer.backend.id_to_token(token_id))


def _answer_tokens(prompt: str, answer: str | None, places: Sequence[tuple[int, int]]) -> list[int]:
    """Return tokens that overlap an occurrence of the answer."""
    if answer is None:
        return []
    begins = [index for index in range(len(prompt)) if prompt.startswith(answer, index)]
    ends = [(begin, begin + len(answer)) for begin in begins]
    return [i for i, (start, stop) in enumerate(places) if any(start < end and begin < stop for begin, end in ends)]


def _chosen(name: str, float_run: Run, layers: Sequence[int] | None, room: int) -> dict[int, int]:
    """Return {layer: heads} of the maps to show, of at most `room` bytes, at least one."""
    known = list(float_run.maps)
    if layers is not None:
        if missing := [layer for layer in layers if layer not in known]:
            raise DiffbitError(f"{name}: layer {missing[0]} has no attention; layers with attention: {_ranges(known)}")
        known = sorted(set(layers))
    length = len(float_run.maps[known[0]].valid)
    sizes = {layer: float_run.maps[layer].weights[0, :, 0, 0].numel() * length * (length + 1) // 2 for layer in known}
    heads = {layer: float_run.maps[layer].weights.shape[0] for layer in known}
    count = min(len(known), max(1, room // max(sizes[layer] * heads[layer] for layer in known)))
    spread = known if layers is not None else [known[round(i)] for i in np.linspace(0, len(known) - 1, count)]
    limit = max(1, room // len(spread) // max(sizes.values()))
    return {layer: min(heads[layer], limit) for layer in spread}


def _ranges(numbers: Sequence[int]) -> str:
    """0-3, 6, 8-9"""
    runs = itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    parts = [[number for _, number in group] for _, group in runs]
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _next(tokenizer: TextTokenizer, ids: Sequence[int], rounded: Run, before: Tensor, name: str) -> Json:
    """Return the most likely next tokens, and the divergence KL(before | rounded) in nats."""
    after = rounded.next_logits.double().log_softmax(-1)
    if not after.isfinite().all():
        raise DiffbitError(f"{name}: the next token's logits are infinite or NaN; the checkpoint is damaged")
    top = after.topk(min(MOST_LIKELY, len(after))).indices.tolist()
    rows = [
        {
            "token": _continuation(tokenizer, ids, token),
            "probability": _short(after[token].exp()),
            "before": _short(before[token].exp()),
        }
        for token in top
    ]
    return {"next": rows, "kl": _short((before.exp() * (before - after)).sum().clamp(min=0))}


def _continuation(tokenizer: TextTokenizer, ids: Sequence[int], token: int) -> str:
    """Return the text that a token adds to the prompt; its name if it adds none, as a special token."""
    if token >= tokenizer.vocab_size:
        return f"#{token}"
    backend = tokenizer.backend
    start, text = backend.decode(list(ids)), backend.decode([*ids, token])
    added = text[len(start) :] if text.startswith(start) else backend.decode([token])
    return added or str(backend.id_to_token(token))


def _maps(rounded: Run, heads: dict[int, int], marked: Sequence[int]) -> Json:
    """Return the bytes of the maps, the lambdas, and each head's numbers."""
    codes, lambdas, rows = [], [], []
    for layer, count in heads.items():
        maps = rounded.maps[layer]
        lower = np.tril_indices(len(maps.valid))
        codes.append(np.rint(255 * maps.weights[:count].sqrt().numpy()[..., *lower]).astype(np.uint8))
        if maps.lambdas is not None:
            lambdas.append(maps.lambdas[:count].numpy().astype("<f4"))
        rows.append([_head(maps, head, marked) for head in range(count)])
    return {"heads": rows, "maps": _base64(codes), "lambdas": _base64(lambdas)}


def _base64(arrays: Sequence[np.ndarray]) -> str:
    return b64encode(b"".join(array.tobytes() for array in arrays)).decode()


def _head(maps: Maps, head: int, marked: Sequence[int]) -> Json:
    """Return the shares of the last query's weights."""
    rows = maps.weights[head, :, -1].double()
    if maps.lambdas is not None:
        rows = torch.cat((rows, maps.used[head, None, -1].double()))
    total = rows.abs().sum(-1)
    return {
        "lambda": None if maps.lambdas is None else _short(maps.lambdas[head, -1]),
        "first": [_short(share) for share in rows[:, 0].abs() / total],
        "answer": [_short(share) for share in rows[:, list(marked)].abs().sum(-1) / total] if marked else None,
        "negative": _short(rows[-1].clamp(max=0).sum().abs() / total[-1]),
    }


def _outliers(float_run: Run, layer: int) -> Json:
    """Return the largest magnitudes of a layer and where they are, as `diffbit outliers` measures them (Table 5 of
    arXiv 2410.05258): hidden states behind the layer, and attention logits of queries and keys that they may see."""
    hidden = float_run.hidden[layer].double()
    token, channel = divmod(int(hidden.abs().argmax()), hidden.shape[1])
    deviation = hidden - hidden.mean()
    variance = deviation.square().mean()
    numbers: Json = {
        "largest": _short(hidden.abs().max()),
        "median": _short(hidden.abs().quantile(0.5)),
        "kurtosis": _short(deviation.pow(4).mean() / variance.square()) if variance else None,
        "token": token,
        "channel": channel,
    }
    if layer not in float_run.maps:
        return {"layer": layer, "hidden": numbers, "logits": None}
    maps = float_run.maps[layer]
    logits = maps.logits.abs().masked_fill(~maps.valid, -1)
    softmax, query, key = np.unravel_index(int(logits.argmax()), logits.shape)
    head, branch = divmod(int(softmax), maps.weights.shape[1])
    place = {"head": head, "branch": branch, "query": int(query), "key": int(key)}
    return {"layer": layer, "hidden": numbers, "logits": {"largest": _short(logits.max())} | place}


def _short(value: Tensor) -> float:
    """Return six significant digits."""
    return float(f"{value.item():.6g}")
