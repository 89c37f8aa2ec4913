"""How many bits does each part of attention need? Trained models, held-out text, paired intervals: docs/attention.md.

    python benchmarks/attention.py                                             # examples/nano, to the terminal
    python benchmarks/attention.py --what kv,qk --json out/attention.json --markdown
    python benchmarks/attention.py CHECKPOINT CHECKPOINT --needles 32          # models trained to find needles

    logits       at b bits (arXiv 2410.05258, Figure 8), and DIFF at few bits against the Transformer at more
    kv           the cache: formats, keys and values apart, the window, and granularities that the product does not have
    qk           q k^T in integers: K smoothing, Q smoothing, scales per token, block and tensor
    branches     fewer bits for one of the two branches
    pv           probabilities and values in 8 bits, and the difference A1 - lambda A2 as one signed row
    hadamard     keys and values turned by a Hadamard matrix before they are rounded
    relambda     lambda fitted again, in closed form, to low-bit attention
    subtraction  relative errors of A1 v, A2 v and A1 v - lambda A2 v in each layer, on exact inputs

A variant puts an `Arithmetic` into every attention layer of a float model. What the product has is its own
LowBitAttention; what it has not is a `Trial` here, rounded and multiplied in float32: the same numbers as with integers
but for float32's last bits. Every variant is scored token by token beside the float model (evaluate/metrics.py), in
calls of CHUNK tokens onto a KV cache. Tasks are spread over processes of one thread each.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import renew, table
from torch import Tensor

from diffbit.calib_data import NeedleWindows, Windows, eval_windows, needle_windows
from diffbit.evaluate.metrics import Scores, log_probabilities, mean, paired, score
from diffbit.evaluate.retrieval import answered, lost
from diffbit.models import Checkpoint, Decoder, KVCache, causal_mask, load, rope_for
from diffbit.models.softmax import Arithmetic
from diffbit.ops import kv_cache
from diffbit.progress import set_quiet, track
from diffbit.quantize import AttentionScheme, Scheme, apply, quantize_logits
from diffbit.quantize.attention import LowBitAttention
from diffbit.quantize.hadamard import Rotation

ROOT = Path(__file__).parents[1]
TRIO = [ROOT / "examples" / "nano" / name for name in ("softmax", "diff_v1", "diff_v2")]  # the first is held against
NAMES = {"softmax": "Transformer", "diff_v1": "DIFF v1", "diff_v2": "DIFF v2"}
WHAT = ("logits", "kv", "qk", "branches", "pv", "hadamard", "relambda", "subtraction")
SUBTRACTING = ("branches", "relambda")  # nothing in them for a plain Transformer
PAGE = ROOT / "docs" / "attention.md"
TOKENS = 12288  # of held-out text that each variant is scored on
CALIBRATION_TOKENS = 16384
NEEDLES = 16, 16  # in a row, and how many of them are asked for
CHUNK = 256  # tokens a call
BATCH_TOKENS = 2048  # a call's over all its windows, about
BLOCK = kv_cache.GROUP
LOGIT_BITS = (8, 6, 5, 4, 3, 2)

Row = dict[str, Any]
Make = Callable[["Means"], Arithmetic]  # of one layer


# ---- arithmetic that is measured here and nowhere else --------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """How [..., T, d] numbers are rounded: which of them share a step, and what that step is."""

    bits: int
    tokens: int = 1  # that share a step; 0: all there are
    channels: int = 0  # that share a step; 0: the whole row
    symmetric: bool = True  # codes -top .. top; or 0 .. top above a point of the group's own
    centred: bool = False  # symmetric around the group's mean
    window: int | None = None  # the last tokens that stay float16, as kv_cache.settled has it; None: none

    def settled(self, total: int) -> int:
        group = max(self.tokens, BLOCK)
        return total if self.window is None else max(0, total - self.window) // group * group


def rounded(x: Tensor, kind: Kind) -> Tensor:
    """[..., T, d] -> the numbers that their codes stand for."""
    x = x.float()
    tokens, channels = kind.tokens or x.shape[-2], kind.channels or x.shape[-1]
    groups = x.unflatten(-1, (-1, channels)).unflatten(-3, (-1, tokens))  # [..., n, tokens, m, channels]
    dims = (-3, -1)
    if not kind.symmetric:
        top = 2**kind.bits - 1
        groups = groups.half().float()
        point = groups.amin(dims, keepdim=True)
        step = ((groups.amax(dims, keepdim=True) - point) / top).half().float()
        codes = ((groups - point) / step.masked_fill(step == 0, 1)).round().clamp(0, top)
    else:
        top = 2 ** (kind.bits - 1) - 1
        point = groups.mean(dims, keepdim=True).half().float() if kind.centred else torch.zeros(())
        step = (groups - point).abs().amax(dims, keepdim=True) / top
        codes = ((groups - point) / step.masked_fill(step == 0, 1)).round().clamp(-top, top)
    return (codes * step + point).flatten(-4, -3).flatten(-2)


def repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


@dataclass(frozen=True)
class Means:
    """Of one layer's rotated keys over calibration text, by branch: [G, d]."""

    keys: tuple[Tensor, Tensor]


class Trial(Arithmetic):
    """Keys, values and queries rounded as their Kinds say; None: float."""

    def __init__(
        self,
        key: Kind | None = None,
        value: Kind | None = None,
        query: Kind | None = None,
        *,
        query_block: int = 0,  # queries whose mean is taken off before they are rounded, and whose product is added
        exact_correction: bool = True,  # that product with keys as they are, or with rounded ones
    ) -> None:
        self.key, self.value, self.query = key, value, query
        self.query_block, self.exact_correction = query_block, exact_correction

    def logits(self, query: Tensor, key: Tensor, scale: float, branch: int) -> Tensor:
        heads, length, total = query.shape[1], query.shape[2], key.shape[2]
        query, exact = query.float() * scale, repeated(key.float(), query.shape[1])
        count = self.key.settled(total) if self.key else total
        low = repeated(rounded(key[:, :, :count], self.key), heads) if self.key else exact
        centre: Tensor | None = None
        left = query
        if self.query_block:
            blocks = query.unflatten(2, (-1, self.query_block))
            centre = blocks.mean(3, keepdim=True).expand_as(blocks).flatten(2, 3)
            left = query - centre
        if self.query:
            left = rounded(left, self.query)
        found = left @ low.transpose(-1, -2)
        if centre is not None:
            found = found + centre @ (exact[:, :, :count] if self.exact_correction else low).transpose(-1, -2)
        if self.key is None or self.key.window is None:
            return found
        recent = query @ exact.half().float().transpose(-1, -2)
        old = torch.arange(count) < self._ends(self.key, length, total)
        return torch.cat((torch.where(old, found, recent[..., :count]), recent[..., count:]), -1)

    def mix(self, probabilities: Tensor, value: Tensor, head_dim: int) -> Tensor:
        heads, kind = probabilities.shape[1], self.value
        if kind is None:
            return super().mix(probabilities, value, head_dim)
        rows = value.unflatten(-1, (-1, head_dim)).transpose(2, 3)  # [B, G, w, T, d]
        count = kind.settled(value.shape[2])
        low = repeated(rounded(rows[..., :count, :], kind).transpose(2, 3).flatten(-2), heads)
        if kind.window is None:
            return probabilities @ low
        old = torch.arange(value.shape[2]) < self._ends(kind, probabilities.shape[2], value.shape[2])
        recent = probabilities.masked_fill(old, 0) @ repeated(value.half().float(), heads)
        return recent + (probabilities[..., :count] * old[:, :count]) @ low

    @staticmethod
    def _ends(kind: Kind, length: int, total: int) -> Tensor:
        """How many tokens were low-bit when each of the last `length` came: [S, 1]."""
        return torch.tensor([kind.settled(end) for end in range(total - length + 1, total + 1)])[:, None]


class Smoothed(Arithmetic):
    """`inner` on keys without their mean: what the cache holds, or a calibrated one. No softmax is changed by it."""

    def __init__(self, inner: Arithmetic, means: Means | None = None) -> None:
        self.inner, self.means = inner, means

    def logits(self, query: Tensor, key: Tensor, scale: float, branch: int) -> Tensor:
        centre = key.mean(2, keepdim=True) if self.means is None else self.means.keys[branch][:, None]
        return self.inner.logits(query, key - centre, scale, branch)

    def mix(self, probabilities: Tensor, value: Tensor, head_dim: int) -> Tensor:
        return self.inner.mix(probabilities, value, head_dim)


class Turned(Arithmetic):
    """`inner` on queries and keys that were turned by one Hadamard matrix, behind RoPE."""

    def __init__(self, inner: Arithmetic) -> None:
        self.inner = inner

    def logits(self, query: Tensor, key: Tensor, scale: float, branch: int) -> Tensor:
        turn = Rotation(key.shape[-1], 0).matrix().to(key.dtype)
        return self.inner.logits(query @ turn, key @ turn, scale, branch)

    def mix(self, probabilities: Tensor, value: Tensor, head_dim: int) -> Tensor:
        return self.inner.mix(probabilities, value, head_dim)


class ByBranch(Arithmetic):
    """Logits of the signal by one arithmetic, of the noise by another."""

    def __init__(self, signal: Arithmetic, noise: Arithmetic) -> None:
        self.branches = signal, noise

    def logits(self, query: Tensor, key: Tensor, scale: float, branch: int) -> Tensor:
        return self.branches[branch].logits(query, key, scale, branch)


class LowBitMix(Arithmetic):
    """P V with both rounded. P: unsigned, a step for each row of each branch; V: `value`, or where that is None int8
    rows whose steps go to P's side before P is rounded, as integer products need them there."""

    def __init__(self, bits: int, value: Kind | None = None, folded: bool = False) -> None:
        self.bits, self.value, self.folded = bits, value, folded

    def mix(self, probabilities: Tensor, value: Tensor, head_dim: int) -> Tensor:
        heads = probabilities.shape[1]
        rows = value.unflatten(-1, (-1, head_dim)).transpose(2, 3)  # [B, G, w, T, d]
        if not self.folded:
            low = value.float() if self.value is None else rounded(rows, self.value).transpose(2, 3).flatten(-2)
            return self.round(probabilities) @ repeated(low, heads)
        codes, steps = kv_cache.round_rows(rows)  # [B, G, w, T]
        parts = [
            self.round(probabilities * repeated(steps[:, :, part], heads)[:, :, None])
            @ repeated(codes[:, :, part].float(), heads)
            for part in range(rows.shape[2])
        ]
        return torch.cat(parts, -1)

    def round(self, x: Tensor) -> Tensor:
        step = x.amax(-1, keepdim=True) / (2**self.bits - 1)
        return (x / step.masked_fill(step == 0, 1)).round() * step


class LowBitDifference(LowBitMix):
    """The same, but what is rounded is one signed row, A1 - lambda A2. `layer` subtracts outside of this: the noise
    that it is given is the one that makes its difference come out as that."""

    def __init__(self, layer: Any, bits: int, value: Kind | None = None, folded: bool = False) -> None:
        super().__init__(bits, value, folded)
        self.signal: Tensor | None = None
        layer.register_forward_pre_hook(self.watch)

    def watch(self, layer: Any, inputs: tuple[Any, ...]) -> None:
        self.lambda_, self.signal = layer.lambda_of(inputs[0]), None

    def mix(self, probabilities: Tensor, value: Tensor, head_dim: int) -> Tensor:
        if self.signal is None:  # the signal's turn
            self.signal = probabilities
            return Arithmetic().mix(probabilities, value, head_dim)
        exact = Arithmetic().mix(self.signal, value, head_dim)
        found = super().mix(self.signal - self.lambda_ * probabilities, value, head_dim)
        return (exact - found) / self.lambda_

    def round(self, x: Tensor) -> Tensor:
        return rounded(x, Kind(self.bits))


# ---- variants -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Variant:
    what: str
    label: str
    install: Callable[[Decoder, list[Means], Windows], Decoder]  # a float model -> the one to score
    needles: bool = False  # also measured on needles


def product(what: str, label: str, method: str = "rtn", needles: bool = False, **scheme: Any) -> Variant:
    """What `diffbit quantize` makes."""

    def install(decoder: Decoder, means: list[Means], calibration: Windows) -> Decoder:
        made = Scheme(attention=AttentionScheme(**scheme))
        if method == "rtn":
            return apply(decoder, made)
        return apply(decoder, made, method, calibration.ids, calibration.mask)

    return Variant(what, label, install, needles)


def trial(what: str, label: str, make: Callable[[Any, Means], Arithmetic]) -> Variant:
    """make(layer, its means) -> the arithmetic of that layer."""

    def install(decoder: Decoder, means: list[Means], calibration: Windows) -> Decoder:
        made = apply(decoder, Scheme())
        for layer, own in zip(made.model.layers, means, strict=True):
            layer.self_attn.arithmetic = make(layer.self_attn, own)
        return made

    return Variant(what, label, install)


def logit_bits(what: str, label: str, signal: int, noise: int) -> Variant:
    """Logits of unequal bits in the two branches."""

    def hook(logits: Tensor, valid: Tensor) -> Tensor:
        found = logits.clone()
        for branch, bits in enumerate((signal, noise)):
            found[:, branch::2] = quantize_logits(logits[:, branch::2], valid, bits)
        return found

    def install(decoder: Decoder, means: list[Means], calibration: Windows) -> Decoder:
        made = apply(decoder, Scheme())
        for layer in made.model.layers:
            layer.self_attn.logits_hook = hook
        return made

    return Variant(what, label, install)


def variants(what: str, attention: str, head_dim: int) -> Iterator[Variant]:
    yield from {
        "logits": logits_variants,
        "kv": kv_variants,
        "qk": qk_variants,
        "branches": branch_variants,
        "pv": pv_variants,
        "hadamard": hadamard_variants,
        "relambda": relambda_variants,
    }[what](attention, head_dim)


def logits_variants(attention: str, head_dim: int) -> Iterator[Variant]:
    for bits in LOGIT_BITS:
        yield product("logits", f"{bits} bits", logits=bits, needles=True)


def kv_variants(attention: str, head_dim: int) -> Iterator[Variant]:
    yield product("kv", "fp16", keys="fp16", values="fp16")
    yield product("kv", "int8", keys="int8", values="int8", needles=True)
    for format in ("int4", "int2"):
        for window in (0, 32, 64, 128):
            yield product(
                "kv", f"{format}, window {window}", keys=format, values=format, window=window, needles=window == 32
            )
    yield product("kv", "keys int4, values int2", keys="int4", values="int2", needles=True)
    yield product("kv", "keys int2, values int4", keys="int2", values="int4", needles=True)
    for part in ("keys", "values"):
        for format in ("int8", "int4", "int2"):
            yield product("kv", f"{part} {format}", **{part: format})
    for bits in (4, 2):
        groups = {
            "a token's row, symmetric": Kind(bits, window=32),
            "a token's row": Kind(bits, symmetric=False, window=32),
            "a channel of 32 tokens, symmetric": Kind(bits, BLOCK, 1, window=32),
            # as many tokens stay float16 as with 32, on average
            "a channel of 64 tokens, window 16": Kind(bits, 64, 1, symmetric=False, window=16),
            "a channel of 128 tokens, window 0": Kind(bits, 128, 1, symmetric=False, window=0),
        }
        for label, kind in groups.items():
            yield trial("kv", f"keys int{bits}, {label}", lambda layer, means, kind=kind: Trial(kind))
        groups = {
            "a channel of 32 tokens": Kind(bits, BLOCK, 1, symmetric=False, window=32),
            "a token's 32 channels, symmetric": Kind(bits, 1, BLOCK, window=32),
        }
        if head_dim > BLOCK:
            groups["a token's row"] = Kind(bits, symmetric=False, window=32)
        for label, kind in groups.items():
            yield trial("kv", f"values int{bits}, {label}", lambda layer, means, kind=kind: Trial(value=kind))
    yield trial("kv", "keys int8, a channel of 32 tokens", lambda *_: Trial(Kind(8, BLOCK, 1, False, window=32)))


def qk_variants(attention: str, head_dim: int) -> Iterator[Variant]:
    yield product("qk", "q int8, keys int8", qk="int8", needles=True)
    yield product("qk", "q int8, keys int4", qk="int8", keys="int4", needles=True)
    yield product("qk", "q int4, keys int4", qk="int4", needles=True)
    yield product("qk", "q int4, keys int4, window 0", qk="int4", window=0)
    yield product("qk", "q int8, keys int2", qk="int8", keys="int2")
    yield product("qk", "q int4, keys int2", qk="int4", keys="int2")
    yield trial("qk", "K smoothing, nothing rounded", lambda *_: Smoothed(Trial()))
    for bits in (8, 4):
        for label, tokens in (("token", 1), ("32 tokens", BLOCK), ("tensor", 0)):
            kind = Kind(bits, tokens)
            yield trial("qk", f"int{bits} rows, a step per {label}", lambda *_, kind=kind: Trial(kind, query=kind))
            yield trial(
                "qk",
                f"int{bits} rows, a step per {label}, K smoothing",
                lambda *_, kind=kind: Smoothed(Trial(kind, query=kind)),
            )
    rows = Kind(4)
    yield trial(
        "qk", "int4 rows, a step per token, K smoothing with a calibrated mean",
        lambda layer, means: Smoothed(Trial(rows, query=rows), means),
    )  # fmt: skip
    for label, exact in (("exact keys", True), ("rounded keys", False)):
        yield trial(
            "qk", f"int4 rows, a step per token, K and Q smoothing, correction with {label}",
            lambda *_, exact=exact: Smoothed(Trial(rows, query=rows, query_block=BLOCK, exact_correction=exact)),
        )  # fmt: skip
    yield trial(
        "qk", "int4 rows, a step per token, Q smoothing alone", lambda *_: Trial(rows, query=rows, query_block=BLOCK)
    )
    grid = LowBitAttention(AttentionScheme(qk="int4"))
    yield trial("qk", "q int4, keys int4, K smoothing", lambda *_: Smoothed(grid))
    symmetric = Kind(4, BLOCK, 1, window=32)
    for label, kind in (("", symmetric), (" around its mean", replace(symmetric, centred=True))):
        yield trial("qk", f"q float, keys int4 symmetric in 32 tokens{label}", lambda *_, kind=kind: Trial(kind))
    yield trial("qk", "q float, keys int4 symmetric in 32 tokens, K smoothing", lambda *_: Smoothed(Trial(symmetric)))


def branch_variants(attention: str, head_dim: int) -> Iterator[Variant]:
    names = ("signal", "noise")

    def pair(signal: AttentionScheme, noise: AttentionScheme) -> Callable[..., Arithmetic]:
        return lambda *_: ByBranch(LowBitAttention(signal), LowBitAttention(noise))

    for few in (4, 3, 2):
        for branch in (0, 1):
            bits = (few, 8) if branch == 0 else (8, few)
            yield logit_bits("branches", f"logits: {names[branch]} {few} bits, {names[1 - branch]} 8", *bits)
        yield logit_bits("branches", f"logits: both {few} bits", few, few)
    if attention == "diff_v1":  # version 2's branches share their keys
        four, two = AttentionScheme(keys="int4"), AttentionScheme(keys="int2")
        yield trial("branches", "keys: signal int2, noise int4", pair(two, four))
        yield trial("branches", "keys: signal int4, noise int2", pair(four, two))
        yield trial("branches", "keys: both int2", pair(two, two))
        yield trial("branches", "keys: both int4", pair(four, four))
    for few in (4, 3):
        low, more = Kind(few), Kind(8)
        for branch in (0, 1):
            bits = (low, more) if branch == 0 else (more, low)
            yield trial(
                "branches", f"q: {names[branch]} int{few}, {names[1 - branch]} int8",
                lambda *_, bits=bits: ByBranch(Trial(query=bits[0]), Trial(query=bits[1])),
            )  # fmt: skip
        yield trial("branches", f"q: both int{few}", lambda *_, low=low: Trial(query=low))


def pv_variants(attention: str, head_dim: int) -> Iterator[Variant]:
    channel = Kind(8, BLOCK, 1)
    whole = Kind(8, 0, 1)
    choices: list[tuple[str, dict[str, Any]]] = [
        ("float", {}),
        ("int8, a channel of 32 tokens", {"value": channel}),
        ("int8, a channel", {"value": whole}),
        ("int8, a token's row, its step in P", {"folded": True}),
    ]
    for label, options in choices:
        yield trial("pv", f"P uint8, V {label}", lambda *_, options=options: LowBitMix(8, **options))
    if attention != "softmax":
        for label, options in choices:
            yield trial(
                "pv", f"A1 - lambda A2 int8, V {label}",
                lambda layer, means, options=options: LowBitDifference(layer, 8, **options),
            )  # fmt: skip
    for bits in (6, 4):
        yield trial("pv", f"P uint{bits}, V float", lambda *_, bits=bits: LowBitMix(bits))
        if attention != "softmax":
            yield trial(
                "pv",
                f"A1 - lambda A2 int{bits}, V float",
                lambda layer, means, bits=bits: LowBitDifference(layer, bits),
            )


def hadamard_variants(attention: str, head_dim: int) -> Iterator[Variant]:
    for bits in (4, 2):
        row = Kind(bits, symmetric=False, window=32)
        grid = AttentionScheme(keys=f"int{bits}")
        yield trial("hadamard", f"keys int{bits}, a token's row", lambda *_, kind=row: Trial(kind))
        yield trial("hadamard", f"keys int{bits}, a token's row, turned", lambda *_, kind=row: Turned(Trial(kind)))
        yield product("hadamard", f"keys int{bits}, a channel of 32 tokens", keys=f"int{bits}")
        yield trial(
            "hadamard", f"keys int{bits}, a channel of 32 tokens, turned",
            lambda *_, grid=grid: Turned(LowBitAttention(grid)),
        )  # fmt: skip
    for bits in (4, 2):
        for method, label in (("rtn", ""), ("rotate_heads+rtn", ", turned (folded)")):
            yield product("hadamard", f"values int{bits}{label}", method, values=f"int{bits}")


def relambda_variants(attention: str, head_dim: int) -> Iterator[Variant]:
    schemes: list[tuple[str, dict[str, Any]]] = [
        ("cache int4", {"keys": "int4", "values": "int4"}),
        ("cache int2", {"keys": "int2", "values": "int2"}),
        ("q int4, keys int4", {"qk": "int4"}),
        ("logits 4 bits", {"logits": 4}),
        ("logits 3 bits", {"logits": 3}),
    ]
    for label, scheme in schemes:
        yield product("relambda", label, **scheme)
        yield product("relambda", f"{label}, lambda fitted again", "rtn+relambda", **scheme)


# ---- measuring ------------------------------------------------------------------------------------------------------


def forward(decoder: Decoder, ids: Tensor) -> Tensor:
    """ids [n, T] -> logits [n, T, V], CHUNK tokens a call: half of the scores of one long call are never computed, and
    the others stay in the processor's cache."""
    cache = KVCache(decoder.config, len(ids), ids.shape[1])
    return torch.cat([decoder(part, cache=cache) for part in ids.split(CHUNK, dim=1)], dim=1)


class InCalls(torch.nn.Module):
    """A decoder that `forward` is used with."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder

    def forward(self, ids: Tensor) -> Tensor:
        return forward(self.decoder, ids)


def batches(count: int, length: int) -> list[slice]:
    step = max(1, BATCH_TOKENS // length)
    return [slice(start, start + step) for start in range(0, count, step)]


@torch.inference_mode()
def scores(decoder: Decoder, windows: Windows, reference: list[Tensor], first: bool = False) -> Scores:
    """reference: log-probabilities of the float model by window; filled by it, which comes `first`."""
    found = Scores.zeros(len(windows.ids))
    ids, target = torch.from_numpy(windows.ids), torch.from_numpy(windows.target)
    for batch in batches(*windows.ids.shape):
        for window, logits in enumerate(forward(decoder, ids[batch]), batch.start):
            log_q = log_probabilities(logits, target[window])
            if first:
                reference.append(log_q)
            score(found, window, ids[window], target[window], log_q, None if first else reference[window])
    return found


@torch.inference_mode()
def key_means(decoder: Decoder, windows: Windows) -> list[Means]:
    """Of every layer's rotated keys."""

    class Sum(Arithmetic):
        def __init__(self) -> None:
            self.sums = [torch.zeros(()), torch.zeros(())]
            self.count = 0

        def logits(self, query: Tensor, key: Tensor, scale: float, branch: int) -> Tensor:
            self.sums[branch] = self.sums[branch] + key.sum((0, 2))
            self.count += key.shape[0] * key.shape[2] * (branch == 0)
            return super().logits(query, key, scale, branch)

    watched = apply(decoder, Scheme())
    sums = [Sum() for _ in watched.model.layers]
    for layer, own in zip(watched.model.layers, sums, strict=True):
        layer.self_attn.arithmetic = own
    ids = torch.from_numpy(windows.ids)
    for batch in batches(*windows.ids.shape):
        watched(ids[batch])
    return [Means((own.sums[0] / own.count, own.sums[1] / own.count)) for own in sums]


@torch.inference_mode()
def subtraction(decoder: Decoder, windows: Windows) -> Iterator[Row]:
    """Relative errors of each layer's attention under rounding, on the float model's inputs."""
    schemes: dict[str, dict[str, Any]] = {
        "cache int8": {"keys": "int8", "values": "int8"},
        "cache int4": {"keys": "int4", "values": "int4"},
        "cache int2": {"keys": "int2", "values": "int2"},
        "keys int4": {"keys": "int4"},
        "values int4": {"values": "int4"},
        "q int4, keys int4": {"qk": "int4"},
        "logits 6 bits": {"logits": 6},
        "logits 4 bits": {"logits": 4},
    }
    ids = torch.from_numpy(windows.ids[: max(2, 4096 // windows.ids.shape[1])])
    rope, mask = rope_for(decoder.config, torch.arange(ids.shape[1])[None]), causal_mask(ids.shape[1])
    low = {label: apply(decoder, Scheme(attention=AttentionScheme(**scheme))) for label, scheme in schemes.items()}
    hidden = decoder.embed(ids)
    for index, layer in enumerate(decoder.model.layers):
        x = layer.input_layernorm(hidden)
        exact = parts(layer.self_attn, x, rope, mask)
        for label, other in low.items():
            errors = {
                name: got - exact[name]
                for name, got in parts(other.model.layers[index].self_attn, x, rope, mask).items()
            }
            row: Row = {"label": label, "layer": index}
            row |= {name: float(error.norm() / exact[name].norm()) for name, error in errors.items()}
            if "noise" in errors:
                both = errors["signal"].square().sum() + errors["noise"].square().sum()
                row["meet"] = float(errors["difference"].square().sum() / both)
            yield row
        hidden = layer(hidden, rope, mask)


def parts(layer: Any, x: Tensor, rope: Any, mask: Tensor | None) -> dict[str, Tensor]:
    """What a layer's heads find before the norm: the branches, the noise times lambda, and their difference."""
    if not hasattr(layer, "branches"):
        return {"difference": layer.heads(x, rope, mask, None)}
    signal, noise = layer.branches(x, rope, mask, None)
    noise = layer.lambda_of(x) * noise
    return {"signal": signal, "noise": noise, "difference": signal - noise}


@dataclass(frozen=True, eq=False)
class Text:
    """What every task reads, cut once."""

    windows: Windows
    calibration: Windows
    needles: NeedleWindows | None

    @classmethod
    def cut(cls, tokenizer: Path, length: int, count: int, rows: int) -> Text:
        windows = eval_windows("stdlib", tokenizer, length, count)
        calibrating = max(2, CALIBRATION_TOKENS // length)
        calibration = eval_windows("stdlib", tokenizer, length, min(count, calibrating), split="calib")
        needles = needle_windows("stdlib", tokenizer, length, *NEEDLES, rows) if rows else None
        return cls(windows, calibration, needles)


@dataclass(frozen=True)
class Task:
    """One part, for one model."""

    path: Path
    name: str
    what: str
    text: Text

    def run(self) -> tuple[list[tuple[Row, Scores | None]], float]:
        """Rows, each with what was scored, the float model first; and the processor's seconds."""
        torch.set_num_threads(1)
        set_quiet(True)
        begin = time.process_time()
        windows, calibration, laid = self.text.windows, self.text.calibration, self.text.needles
        decoder = load(self.path).float().eval()
        found: list[tuple[Row, Scores | None]] = []
        if self.what == "subtraction":
            found += [({"what": self.what, "model": self.name} | row, None) for row in subtraction(decoder, windows)]
            return found, time.process_time() - begin
        means = key_means(decoder, calibration) if self.what == "qk" else [None] * len(decoder.model.layers)
        reference: list[Tensor] = []
        config = decoder.config
        whole = Variant(self.what, "float", lambda decoder, *_: decoder, needles=True)
        for variant in [whole, *variants(self.what, config.attention, config.head_dim)]:
            made = variant.install(decoder, means, calibration)
            got = scores(made, windows, reference, first=variant is whole)
            row: Row = {"what": self.what, "model": self.name, "label": variant.label}
            if laid is not None and variant.needles:
                row["answered"] = answered(InCalls(made), laid, batches(*laid.windows.ids.shape)[0].stop).tolist()
            found.append((row, got))
        return found, time.process_time() - begin


def run(tasks: Sequence[Task], jobs: int) -> tuple[list[Row], list[Row], float]:
    """Rows, contrasts of DIFF with the first model at fewer logit bits, and the processor's seconds."""
    found: dict[Task, list[tuple[Row, Scores | None]]] = {}
    seconds = 0.0
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        pending = {pool.submit(task.run): task for task in tasks}
        for done in track(as_completed(pending), "measuring", len(pending)):
            found[pending[done]], took = done.result()
            seconds += took
    rows = [row for task in tasks for row in concluded(found[task])]
    logits = [(task, found[task]) for task in tasks if task.what == "logits"]
    return rows, list(contrasts(logits)), seconds


def concluded(found: list[tuple[Row, Scores | None]]) -> Iterator[Row]:
    """Estimates against the float model, which comes first."""
    first, reference = found[0]
    for row, got in found:
        row = dict(row)
        if got is None or reference is None:
            yield row
            continue
        loss = mean(paired(got, reference), got.tokens)
        row |= {"perplexity": got.perplexity().value, "loss": loss.to_dict(), "kl": got.divergence().to_dict()}
        if "answered" in row:
            own, whole = np.array(row.pop("answered")), np.array(first["answered"])
            asked = np.full(len(own), own.shape[1])
            row["found"] = mean(own.sum(1), asked).to_dict()
            row["change"] = mean(lost(own, whole), asked).to_dict()
        yield row


def contrasts(logits: list[tuple[Task, list[tuple[Row, Scores | None]]]]) -> Iterator[Row]:
    """What other models lose at b bits less what the first one loses at b, b + 1, b + 2: nats a token."""

    def losses(found: list[tuple[Row, Scores | None]]) -> dict[str, tuple[Any, Any]]:
        whole = found[0][1]
        assert whole is not None
        return {row["label"]: (paired(got, whole), got.tokens) for row, got in found if got is not None}

    if not logits:
        return
    first, *others = [(task.name, losses(found)) for task, found in logits]
    for name, own in others:
        for bits in LOGIT_BITS:
            for more in LOGIT_BITS:
                if 0 <= more - bits <= 2:
                    (lost, tokens), (least, _) = own[f"{bits} bits"], first[1][f"{more} bits"]
                    yield {"model": name, "bits": bits, "against": more, "more": mean(lost - least, tokens).to_dict()}


# ---- the page -------------------------------------------------------------------------------------------------------


def percent(loss: Row) -> str:
    """Of a difference of log perplexities and its interval."""
    ends = [100 * (torch.tensor(loss[end]).double().exp().item() - 1) for end in ("value", "low", "high")]
    digits = 2 if abs(ends[0]) < 10 else 1
    value, low, high = (f"{end:z.{digits}f}" for end in ends)
    return f"{value} % [{low}, {high}]".replace("-", "−")


def share(row: Row) -> str:
    found, change = f"{100 * row['found']['value']:.1f} %", row["change"]
    if row["label"] == "float":
        return found
    value, low, high = (f"{100 * change[end]:+z.1f}" for end in ("value", "low", "high"))
    return f"{found}, {value} [{low}, {high}]".replace("-", "−")


def variants_table(rows: list[Row]) -> str:
    """A line for each variant, and for each model its perplexity and KL."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    by = {(row["label"], row["model"]): row for row in rows}
    needles = any("found" in row for row in rows)
    header = ["", *(f"{model}: {cell}" for model in models for cell in ("perplexity up", "KL"))]
    lines, seen = [], []
    for label in dict.fromkeys(row["label"] for row in rows):
        line: list[str] = [label]
        for model in models:
            row = by.get((label, model))
            if row is None:
                line += ["", ""]
            elif label == "float":
                line += [f"({row['perplexity']:.3f})", ""]
            else:
                line += [percent(row["loss"]), f"{row['kl']['value']:.5f}"]
        lines.append(line)
        if any("found" in by.get((label, model), {}) for model in models):
            seen.append([label, *(share(by[label, model]) if (label, model) in by else "" for model in models)])
    text = table(header, lines)
    if needles:
        text += "\n\nNeedles found, and the change in points:\n\n" + table(["", *models], seen)
    return text


def contrasts_table(found: list[Row]) -> str:
    models = list(dict.fromkeys(row["model"] for row in found))
    by = {(row["bits"], row["against"], row["model"]): row["more"] for row in found}
    lines = []
    for bits, against in dict.fromkeys((row["bits"], row["against"]) for row in found):
        line = [f"{bits} bits, Transformer {against}"]
        for model in models:
            more = by[bits, against, model]
            told = "" if more["low"] <= 0 <= more["high"] else "more" if more["value"] > 0 else "less"
            value, low, high = (f"{100 * more[end]:+z.2f}" for end in ("value", "low", "high"))
            line += [f"{value} [{low}, {high}]".replace("-", "−"), told]
        lines.append(line)
    return table(["logits", *(cell for model in models for cell in (model, "loses"))], lines)


def subtraction_table(rows: list[Row]) -> str:
    """Means over layers."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["label"], row["model"]), []).append(row)
    plain: dict[str, float] = {}
    lines = []
    for (label, model), layers in groups.items():

        def over(name: str, layers: list[Row] = layers) -> float:
            return sum(row[name] for row in layers) / len(layers)

        difference = over("difference")
        if "signal" in layers[0]:
            cells = [f"{over('signal'):.2%}", f"{over('noise'):.2%}", f"{difference:.2%}", f"{over('meet'):.2f}"]
            cells.append(f"{difference / over('signal'):.2f}")
        else:
            plain.setdefault(label, difference)
            cells = ["", "", f"{difference:.2%}", "", ""]
        cells.append(f"{difference / plain[label]:.2f}" if label in plain else "")
        lines.append([f"{label}, {model}", *cells])
    lines.sort(key=lambda line: list(groups).index(tuple(line[0].rsplit(", ", 1))))  # type: ignore[arg-type]
    header = ["", "A1 v", "lambda A2 v", "difference (plain: A v)", "errors meet", "to A1 v", "to the Transformer"]
    return table(header, lines)


def pages(about: Row, rows: list[Row], against: list[Row]) -> dict[str, str]:
    """By the name of their place in docs/attention.md."""
    found = {}
    for what in dict.fromkeys(row["what"] for row in rows):
        chosen = [row for row in rows if row["what"] == what]
        text = subtraction_table(chosen) if what == "subtraction" else variants_table(chosen)
        if what == "logits" and against:
            text += "\n\nHundredths of a nat a token that DIFF loses more than the Transformer:\n\n"
            text += contrasts_table(against)
        needles = (
            f"; {about['needles']} rows of {NEEDLES[0]} needles, {NEEDLES[1]} asked for" if about["needles"] else ""
        )
        found[what] = (
            f"`{about['command']}`; {about['windows']} windows of {about['length']} held-out tokens{needles}; "
            f"{about['minutes']:.1f} minutes of one core in all.\n\n{text}\n"
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="*", default=TRIO, metavar="CHECKPOINT",
                        help="of unequal attention; the first is the yardstick (default: examples/nano)")  # fmt: skip
    parser.add_argument("--what", default=",".join(WHAT), help="parts (default: %(default)s)")
    parser.add_argument("--length", type=int, help="tokens of a window (default: the models' context, at most 1024)")
    parser.add_argument("--windows", type=int, help=f"of held-out text (default: {TOKENS} tokens)")
    parser.add_argument("--needles", type=int, default=0, metavar="ROWS", help="of needles (default: none)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--markdown", type=Path, nargs="?", const=PAGE, metavar="FILE",
                        help="renew the tables in this page (default: docs/attention.md)")  # fmt: skip
    parser.add_argument("--suffix", default="", help="of the marks around these tables there, such as _1k")
    arguments = parser.parse_args()
    parts_wanted = arguments.what.split(",")
    if unknown := [what for what in parts_wanted if what not in WHAT]:
        parser.error(f"--what {unknown[0]}: wanted some of {','.join(WHAT)}")

    configs = [Checkpoint(path).config for path in arguments.models]
    length = arguments.length or min(1024, *(config.max_position for config in configs))
    windows = arguments.windows or max(2, TOKENS // length)
    text = Text.cut(arguments.models[0], length, windows, arguments.needles)
    tasks = [
        Task(path, NAMES[config.attention], what, text)
        for what in parts_wanted
        for path, config in zip(arguments.models, configs, strict=True)
        if config.attention != "softmax" or what not in SUBTRACTING
    ]
    rows, against, seconds = run(tasks, arguments.jobs)
    about = {
        "command": shlex.join(["python", "benchmarks/attention.py", *sys.argv[1:]]),
        "windows": len(text.windows.ids), "length": length, "needles": arguments.needles,
        "minutes": seconds / 60,
    }  # fmt: skip
    found = pages(about, rows, against)
    for what, text in found.items():
        print(f"\n## {what}\n\n{text}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"about": about, "rows": rows, "contrasts": against}, indent=1))
    if arguments.markdown:
        for what, text in found.items():
            renew(arguments.markdown, what + arguments.suffix, text)


if __name__ == "__main__":
    main()
