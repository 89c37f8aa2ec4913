"""DiffAttention: the reference against a loop written from the equations, the body and every kernel against it.

A cache's numbers are equal bit for bit everywhere. An output may have twice the error of the float32 reference, both
against float64.
"""

from __future__ import annotations

import functools
import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import onnxruntime
import pytest
import torch
from onnx import helper

from diffbit.io.errors import DiffbitError
from diffbit.ops import diff_attention, diff_attention_body, diff_attention_reference, kv_cache
from diffbit.ops.signature import DOMAIN
from diffbit.runtime import native

from .cases import ATTENTION_CASES, AttentionCase
from .onnx_run import body_of, node_of, on_each_isa, on_isas_in_turn, run_node

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}
ROUNDING = {torch.float32: 5e-7, torch.float16: 1e-3, torch.bfloat16: 2e-3}  # of an output of size 1
LONG = ("long", "prompt", "prefill_behind")  # names of cases that loops in Python take long for
cases = pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=case.name, marks=[pytest.mark.slow] * any(word in case.name for word in LONG))
        for case in ATTENTION_CASES
    ],
)


class Tokens:
    """Keys or values of one sub-head, token by token, from the rules of ops/kv_cache.py: levels and floats, of rotated
    rows below 8 bits."""

    def __init__(self, case: AttentionCase, x: dict[str, np.ndarray], name: str, b: int, head: int) -> None:
        self.case, self.name, self.bits = case, name, case.bits_of(name)
        self.floats: dict[int, np.ndarray] = {}  # token -> [d]
        self.levels: dict[int, tuple[np.ndarray, np.floating[Any]]] = {}  # token -> levels [d], scale
        past, d = x[f"past_{name}"][b, head], case.d
        self.offset = np.zeros(d, np.float16)
        stored = case.total if case.query_only else case.past
        if ring := case.ring(self.bits):  # what the ring has dropped is not read
            past = np.resize(past, (max(stored, ring), *past.shape[1:]))
        for s in range(0 if case.query_only else case.steps):
            row = x[name][b, s, head * d : (head + 1) * d]
            row = row if self.bits == 16 else row.astype(np.float32)
            row = rotated(x, row, int(x["position_ids"][b, s])) if name == "key" else row
            self.floats[case.past + s] = row
        if self.bits == 16:
            self.floats |= {t: past[t] for t in range(stored)}
            return
        scale = x[f"past_{name}_scale"][b, head]
        if ring:
            scale = np.resize(scale, max(stored, ring))
        if self.bits == 8:
            self.levels = {t: (past[t], scale[t]) for t in range(stored)}
            self.levels |= {t: of_8_bits(hadamard(row)) for t, row in self.floats.items()}
            return
        recent, before, after = x[f"past_{name}_recent"][b, head], case.quantized(stored), case.quantized(case.total)
        self.floats = {t: hadamard(row).astype(np.float16) for t, row in self.floats.items()}
        residual = case.first + (name == "key")  # the slot of the first token of the residual window
        self.floats |= {t: recent[residual + t - before] for t in range(before, stored)}
        self.floats |= {t: recent[t] for t in range(min(case.first, stored))}
        if name == "key" and after:
            self.offset = recent[case.first] if before else mean([self.floats[t] for t in range(16, 32)])
        for t in range(before):
            self.levels[t] = LEVELS[self.bits][self.unpacked(past[t])], scale[t]
        for t in range(before, after):
            code, row_scale = encoded(self.floats[t].astype(np.float32) - self.offset.astype(np.float32), self.bits)
            self.levels[t] = LEVELS[self.bits][code], row_scale

    def unpacked(self, row: np.ndarray) -> np.ndarray:
        """Codes of a row of bytes: groups of 32 channels, in each the planes of 4, of 2 and 1, or of 2 bits."""
        codes = []
        for channel in range(self.case.d):
            group, place = divmod(channel, 32)
            code, shift, byte = 0, 0, group * 4 * self.bits
            for width in {4: (4,), 3: (2, 1), 2: (2,)}[self.bits]:
                field = int(row[byte + place % (4 * width)]) >> place // (4 * width) * width
                code |= (field & (1 << width) - 1) << shift
                shift, byte = shift + width, byte + 4 * width
            codes.append(code)
        return np.array(codes)

    def is_coded(self, t: int, s: int) -> bool:
        """Does the call's token s read the code of token t?"""
        seen = self.case.total if self.case.query_only else self.case.past + s + 1
        return self.bits == 8 or (self.bits < 8 and self.case.first <= t < self.case.quantized(seen))

    @functools.cache  # noqa: B019 - a case's tokens are few
    def number(self, t: int, coded: bool) -> np.ndarray:
        """A row in float64, rotated if the stored one is."""
        if not coded:
            return self.floats[t].astype(np.float64)
        levels, scale = self.levels[t]
        return levels.astype(np.float64) * np.float64(scale) + self.offset

    @functools.cache  # noqa: B019
    def value(self, t: int, coded: bool) -> np.ndarray:
        """A row in float64, rotated back."""
        return hadamard(self.number(t, coded)) if self.bits < 16 else self.number(t, coded)

    def score(self, query: np.ndarray, t: int, s: int) -> float:
        """query [d], rotated if the keys are, . key"""
        bits = self.case.query_bits
        if not bits or not self.is_coded(t, s):
            return float(query.astype(np.float64) @ self.number(t, self.is_coded(t, s)))
        (codes, unit), (levels, scale) = rounded(query, bits), self.levels[t]
        dot = int(codes.astype(np.int64) @ levels.astype(np.int64))
        return dot * float(unit) * float(scale) + float(query.astype(np.float64) @ self.offset.astype(np.float64))


LEVELS = {bits: np.array(levels) for bits, levels in kv_cache.LEVELS.items()}


def rounded(row: np.ndarray, bits: int) -> tuple[np.ndarray, np.float32]:
    """Codes of a float32 row on either side of zero, and their scale."""
    scale = np.abs(row).max() / np.float32(2 ** (bits - 1) - 1)
    return np.round(row / (scale or np.float32(1))), scale


def of_8_bits(row: np.ndarray) -> tuple[np.ndarray, np.float16]:
    """Codes of a float32 row, and their scale in float16."""
    scale = np.float16(np.abs(row).max() / np.float32(127))
    return np.clip(np.round(row / (np.float32(scale) or np.float32(1))), -127, 127), scale


def encoded(row: np.ndarray, bits: int) -> tuple[np.ndarray, np.float16]:
    """Codes of a float32 row by the thresholds, and the scale of their levels."""
    numbers, unit = rounded(row, 8)
    energy = max(1, sum(int(n) ** 2 for n in numbers))
    by = np.sqrt(np.float32(len(row)) / np.float32(energy))
    thresholds = [np.float32(x) for x in kv_cache.THRESHOLDS[bits]]
    codes = [sum(np.float32(n) * by > threshold for threshold in thresholds) for n in numbers]
    levels = [int(LEVELS[bits][code]) for code in codes]
    dot = sum(int(n) * level for n, level in zip(numbers, levels, strict=True))
    share = np.float32(dot) / np.float32(sum(level**2 for level in levels))
    return np.array(codes), np.float16(unit * share)


def hadamard(row: np.ndarray) -> np.ndarray:
    """Rotate a row, pairs at distance 1, 2, 4, ... one after another, in its precision."""
    row, block = row.copy(), math.gcd(len(row), 1 << 20)
    for distance in (1 << stage for stage in range(block.bit_length() - 1)):
        for i in range(len(row)):
            if i // distance % 2 == 0:
                row[i], row[i + distance] = row[i] + row[i + distance], row[i] - row[i + distance]
    return row * row.dtype.type(1 / math.sqrt(block))


def mean(rows: list[np.ndarray]) -> np.ndarray:
    """The mean of float16 rows, halves added to halves in float32."""
    total = [row.astype(np.float32) for row in rows]
    while len(total) > 1:
        half = len(total) // 2
        total = [a + b for a, b in zip(total[:half], total[half:], strict=True)]
    return (total[0] / np.float32(len(rows))).astype(np.float16)


def rotated(x: dict[str, np.ndarray], vector: np.ndarray, position: int) -> np.ndarray:
    out, half = np.empty_like(vector), len(vector) // 2
    for j in range(half):
        c, s = (x[table][position, j].astype(vector.dtype) for table in ("cos", "sin"))
        out[j] = vector[j] * c - vector[j + half] * s
        out[j + half] = vector[j + half] * c + vector[j] * s
    return out


def by_the_book(case: AttentionCase) -> np.ndarray:
    """One number at a time, in float64, from arXiv 2410.05258 eq. 1 and the version 2 post: out [B, S, H, width]."""
    x = arrays(case.inputs())
    for name, array in x.items():
        if array is not None and array.dtype.kind == "f" and not name.endswith(("scale", "recent")):
            x[name] = array.astype(np.float64)
    d, width = case.d, case.d * (2 if case.wide_value else 1)
    groups = case.kv_heads // (2 if case.wide_value else 1)
    out = np.zeros((case.batch, case.steps, case.heads, width))
    keys, values = (
        {(b, head): Tokens(case, x, name, b, head) for b, head in np.ndindex(case.batch, case.kv_heads)}
        for name in ("key", "value")
    )
    for b, s, pair in np.ndindex(case.batch, case.steps, case.heads):
        group = pair // (case.heads // groups)
        first = max(0, case.past + s + 1 - case.sliding_window) if case.sliding_window else 0
        seen = [t for t in range(first, case.past + s + 1) if x["attention_mask"][b, t]]
        for branch in range(case.branches):
            of_group = case.noise_ratio if branch else pair % case.noise_ratio
            head = pair // case.noise_ratio * (case.noise_ratio + case.branches - 1) + of_group
            q = x["query"][b, s, head * d : (head + 1) * d].astype(np.float32 if case.query_bits else np.float64)
            q = rotated(x, q, int(x["position_ids"][b, s])) * q.dtype.type(1 / math.sqrt(d))
            key = keys[b, 2 * group + branch if case.wide_value else group]
            q = hadamard(q) if case.key_bits < 16 else q
            scores = np.array([key.score(q, t, s) for t in seen])
            weights = np.exp(scores)
            sign = 1.0 if branch == 0 else -(x["lambda"][b, s, pair] if case.token_lambda else x["lambda"][pair])
            for weight, t in zip(weights, seen, strict=True):
                heads = (2 * group, 2 * group + 1) if case.wide_value else (group,)
                v = np.concatenate([values[b, h].value(t, values[b, h].is_coded(t, s)) for h in heads])
                out[b, s, pair] += sign * weight / weights.sum() * v
    if case.norm_eps:
        out /= np.sqrt((out**2).mean(-1, keepdims=True) + case.norm_eps)
    if case.gates is not None:
        out *= x["gates"][..., None]
    return out.reshape(case.batch, case.steps, -1)


def call_reference(case: AttentionCase, x: dict[str, torch.Tensor | None]) -> tuple[torch.Tensor, ...]:
    """The outputs that the node has."""
    x = {"lam" if name == "lambda" else name: tensor for name, tensor in x.items()}
    attributes = case.attributes()
    del attributes["spec_version"]
    outputs = diff_attention_reference.reference(**{**x, "past_length": case.past}, **attributes)
    expected = dict(zip(diff_attention.OUTPUTS, outputs, strict=True))
    assert [name for name in expected if expected[name] is not None] == list(filter(None, case.signature().outputs))
    return tuple(output for output in outputs if output is not None)


@functools.cache
def reference(case: AttentionCase) -> tuple[torch.Tensor, ...]:
    return call_reference(case, case.inputs())


def widened(case: AttentionCase, cache_too: bool = False) -> dict[str, torch.Tensor | None]:
    """The inputs in float64; `cache_too`: a float cache as well."""

    def wide(name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        kept = name.endswith(("scale", "recent")) or (name.startswith("past") and not cache_too)
        return tensor if tensor is None or kept or not tensor.is_floating_point() else tensor.double()

    return {name: wide(name, tensor) for name, tensor in case.inputs().items()}


@functools.cache
def exact(case: AttentionCase, cache_too: bool = False) -> tuple[torch.Tensor, ...]:
    """The reference in float64; `cache_too`: with a float cache in float64 as well."""
    return call_reference(case, widened(case, cache_too))


@functools.cache
def enlarged(case: AttentionCase) -> torch.Tensor:
    """By how much, at least 1, the norm enlarges a rounding of the signal, for each number of the output: by much where
    the signal and lambda times the noise nearly cancel."""
    if not case.norm_eps:
        return torch.ones(())
    bare = replace(case, norm_eps=0.0)
    inputs = widened(case)
    lam = inputs["lambda"]
    assert lam is not None
    both = call_reference(bare, inputs)[0], call_reference(bare, inputs | {"lambda": torch.zeros_like(lam)})[0]
    rms = [out.unflatten(-1, (case.heads, -1)).square().mean(-1, keepdim=True).sqrt() for out in both]
    gain = rms[1] / (rms[0].square() + case.norm_eps).sqrt()
    return gain.clamp(min=1).expand(*gain.shape[:-1], both[0].shape[-1] // case.heads).flatten(-2)


def assert_near(case: AttentionCase, got: torch.Tensor, roundings: int = 1) -> None:
    """At most twice the reference's error, and some roundings of the largest number, which the norm may enlarge. Both
    against float64."""
    oracle = exact(case)[0]
    size = max(1.0, float(oracle.abs().max()))
    error, allowed = ((out.double() - oracle).abs() for out in (got, reference(case)[0]))
    room = 2 * allowed.max() + roundings * ROUNDING[case.dtype] * size * enlarged(case)
    over = error / room
    assert bool((over <= 1).all()), f"{float(error.max()):.3g}, the reference's {float(allowed.max()):.3g}"


def outputs_of(case: AttentionCase) -> tuple[dict[str, int | None], dict[str, int]]:
    """The node's outputs (name -> rank, None: left out), and the element types of those that hold the cache."""
    names, types = case.signature().outputs, {}
    for part, bits in (("key", case.key_bits), ("value", case.value_bits)):
        floating = {torch.float32: 1, torch.float16: 10}[case.cache or case.dtype]
        types[f"present_{part}"] = {16: floating, 8: 3}.get(bits, 2)
        types[f"present_{part}_scale"] = 10
        types[f"present_{part}_recent"] = 10
    ranks = dict(zip(diff_attention.OUTPUTS, (3, 4, 4, 3, 3, 4, 4), strict=True))
    outputs = {name: ranks[name] if used else None for name, used in zip(ranks, names, strict=False)}
    return outputs, {name: kind for name, kind in types.items() if outputs.get(name)}


def arrays(x: dict[str, torch.Tensor | None]) -> dict[str, np.ndarray]:
    return {name: None if tensor is None else tensor.numpy() for name, tensor in x.items()}


def fed(x: dict[str, np.ndarray | None]) -> dict[str, np.ndarray]:
    """What a session is given."""
    return {name: array for name, array in x.items() if array is not None}


def run(
    case: AttentionCase, x: dict[str, np.ndarray | None], isa: str | None = None, threads: int = 1
) -> list[np.ndarray]:
    outputs, kinds = outputs_of(case)
    body = body_of(diff_attention_body.function, case.signature())
    return run_node(body, x, case.attributes(), outputs, isa=isa, threads=threads, kinds=kinds)


def assert_same_cache(case: AttentionCase, got: Iterable[np.ndarray], expected: Iterable[np.ndarray]) -> None:
    """The outputs behind the first, bit for bit, where they are defined."""
    names = [name for name in case.signature().outputs[1:] if name]
    for name, a, b in zip(names, got, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, name
        np.testing.assert_array_equal(a[:, :, case.defined(name)], b[:, :, case.defined(name)], err_msg=name)


@cases
def test_reference_is_the_equation(case: AttentionCase) -> None:
    out, *presents = exact(case, cache_too=True)
    np.testing.assert_allclose(out.numpy(), by_the_book(case), atol=1e-10)
    for name, present in zip(("present_key", "present_value"), presents, strict=False):
        bits = case.key_bits if name == "present_key" else case.value_bits
        room = 0 if case.beyond is None else -(-case.beyond // 32) * 32 if bits < 8 else case.beyond
        assert present.shape[2] == (case.ring(bits) or case.filled(name) + room)
        assert not present[:, :, : case.filled(name)].isnan().any()
    for name, present in zip(filter(None, case.signature().outputs[1:]), presents, strict=True):
        assert not present[:, :, case.defined(name)].isnan().any() or not name.endswith("recent")
    np.testing.assert_allclose(reference(case)[0].double().numpy(), exact(case)[0].numpy(), atol=TOLERANCE[case.dtype])


@cases
def test_body_is_the_reference(case: AttentionCase) -> None:
    got, expected = run(case, arrays(case.inputs())), [tensor.numpy() for tensor in reference(case)]
    assert got[0].dtype == expected[0].dtype
    np.testing.assert_allclose(got[0].astype(np.float64), expected[0], atol=TOLERANCE[case.dtype])
    assert_same_cache(case, got[1:], expected[1:])


@on_isas_in_turn(ATTENTION_CASES)
def test_kernel_is_the_reference(case: AttentionCase, isa: str) -> None:
    got, expected = run(case, arrays(case.inputs()), isa), [tensor.numpy() for tensor in reference(case)]
    assert_same_cache(case, got[1:], expected[1:])
    assert_near(case, torch.from_numpy(got[0]))


@pytest.mark.parametrize("isa", [None, *native.instruction_sets()])
@pytest.mark.parametrize("steps", [1, 5, 20])
def test_a_token_that_sees_nothing_gives_zeros(isa: str | None, steps: int) -> None:
    case = AttentionCase("hidden", batch=2, steps=steps, past=2)
    x = case.inputs()
    x["attention_mask"][0] = 0
    out = run(case, arrays(x), isa)[0]
    assert (out[0] == 0).all() and (out[1] != 0).any()
    np.testing.assert_array_equal(call_reference(case, x)[0][0], 0)


@on_each_isa
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_an_int8_row_with_no_finite_step_is_nan(odd: float, isa: str) -> None:
    case = AttentionCase("odd", steps=5, past=3, beyond=1, d=20, key_bits=8, value_bits=8)
    x = case.inputs()
    x["key"][0, 3, 2] = x["value"][0, 4, 19] = odd
    got, expected = run(case, arrays(x), isa), call_reference(case, x)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_array_equal(np.isnan(a), b.isnan().numpy())
    for a, b in zip(got[1:], expected[1:], strict=True):
        np.testing.assert_array_equal(a, b.numpy())
    rows = slice(case.past, case.past + case.steps)
    assert [int(np.isnan(scales[:, :, rows]).sum()) for scales in got[3:]] == [1, 1]


@on_each_isa
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_a_low_bit_row_that_is_not_finite_is_nan(odd: float, isa: str) -> None:
    case = AttentionCase("odd", steps=40, past=60, beyond=0, d=64, key_bits=4, value_bits=2)
    x = case.inputs()
    x["key"][0, 2, 5] = x["value"][0, 2, 64 + 40] = odd  # token 62, of the second block
    got, expected = run(case, arrays(x), isa), [tensor.numpy() for tensor in call_reference(case, x)]
    assert_same_cache(case, got[1:], expected[1:])
    for scales, head in zip(got[3:5], (0, 1), strict=True):
        assert np.argwhere(np.isnan(scales[:, :, : case.filled("present_key")])).tolist() == [[0, head, 62]]


def in_chunks(
    case: AttentionCase,
    sizes: list[int],
    call: Callable[[AttentionCase, dict[str, torch.Tensor | None]], Iterable[torch.Tensor]],
) -> list[torch.Tensor]:
    """A prompt's outputs when it comes in chunks of `sizes` tokens: those of all chunks, and the last cache."""
    outs, done, cache = [], 0, {}
    for steps in sizes:
        x = case.inputs()
        for name in ("query", "key", "value", "position_ids"):
            x[name] = x[name][:, done : done + steps]
        x |= {"attention_mask": x["attention_mask"][:, : done + steps], "past_length": torch.tensor([done])} | cache
        part = replace(case, past=done, steps=steps)
        out, *presents = call(part, x)
        names = [name for name in case.signature().outputs[1:] if name]
        cache = {name.replace("present", "past"): present for name, present in zip(names, presents, strict=True)}
        outs.append(out)
        done += steps
    assert done == case.steps
    return [torch.cat(outs, 1), *cache.values()]


PROMPT = AttentionCase("prompt", steps=110, d=32)
CUTS = [7, 31, 2, 33, 1, 36]
prompts = pytest.mark.parametrize(
    "case",
    [
        replace(PROMPT, name="int8", key_bits=8, value_bits=8, query_bits=8),
        replace(PROMPT, name="int4", key_bits=4, value_bits=4, window=20),
        replace(PROMPT, name="int4_query4", d=64, key_bits=4, value_bits=2, query_bits=4, padding="left", batch=2),
        replace(PROMPT, name="int2_window0", key_bits=2, value_bits=2, query_bits=8, window=0),
        replace(PROMPT, name="int3_first9", key_bits=3, value_bits=3, window=0, first=9),
        replace(PROMPT, name="ring", sliding_window=27, padding="left", batch=2),
        replace(PROMPT, name="ring_int4", sliding_window=27, first=0, key_bits=4, value_bits=8, query_bits=8, window=3),
    ],
    ids=lambda case: case.name,
)


def assert_same(case: AttentionCase, got: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    actual, exact_ = ([tensor.numpy() for tensor in side] for side in (got, expected))
    np.testing.assert_allclose(actual[0], exact_[0], atol=TOLERANCE[case.dtype])
    assert_same_cache(case, actual[1:], exact_[1:])


@prompts
@pytest.mark.parametrize("sizes", [[1] * 110, CUTS], ids=["tokens", "chunks"])
def test_a_prompt_may_be_cut_anywhere(case: AttentionCase, sizes: list[int]) -> None:
    assert_same(case, in_chunks(case, sizes, call_reference), in_chunks(case, [110], call_reference))


@prompts
@pytest.mark.parametrize("isa", [None, *native.instruction_sets()])
def test_bodies_and_kernels_take_a_prompt_in_chunks(case: AttentionCase, isa: str | None) -> None:
    def session(case: AttentionCase, x: dict[str, torch.Tensor | None]) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in run(case, arrays(x), isa)]

    assert_same(case, in_chunks(case, CUTS, session), in_chunks(case, [110], call_reference))


BITS = [(16, 16, 0), (8, 8, 8), (4, 4, 0), (2, 3, 4), (8, 4, 0), (4, 16, 8)]  # of keys, values and queries
# The sets share what this is about
SETS = native.instruction_sets()[:1]
by_body_and_kernel = pytest.mark.parametrize(
    ("isa", "bits"), [*((isa, bits) for isa in SETS for bits in BITS), (None, (4, 16, 8))], ids=str
)


@by_body_and_kernel
@pytest.mark.parametrize("sizes", [[1, 2, 40, 1, 10], [54]], ids=["chunks", "prompt"])
def test_a_window_that_nothing_exceeds_is_none(isa: str | None, bits: tuple[int, int, int], sizes: list[int]) -> None:
    """Bit for bit."""
    keys, values, query = bits
    case = AttentionCase(
        "wide", steps=54, beyond=0, d=32, heads=4, kv_heads=4, batch=2, padding="left", key_bits=keys, value_bits=values
    )
    case = replace(case, query_bits=query, window=5, first=0)

    def session(case: AttentionCase, x: dict[str, torch.Tensor | None]) -> list[torch.Tensor]:
        return [torch.from_numpy(array) for array in run(case, arrays(x), isa)]

    without, *linears = in_chunks(case, sizes, session)
    out, *rings = in_chunks(replace(case, sliding_window=54), sizes, session)
    np.testing.assert_array_equal(out, without)
    names = [name for name in case.signature().outputs[1:] if name]
    for name, ring, linear in zip(names, rings, linears, strict=True):
        slots = case.defined(name) if name.endswith("recent") else slice(case.filled(name))
        np.testing.assert_array_equal(ring[:, :, slots], linear[:, :, slots], name)


@by_body_and_kernel
@pytest.mark.parametrize("steps", [1, 3, 30])
def test_queries_alone_read_what_a_whole_node_reads(isa: str | None, bits: tuple[int, int, int], steps: int) -> None:
    """The last queries against the presents of a node that has appended their keys and values."""
    keys, values, query = bits
    whole = AttentionCase("whole", steps=30, past=71, beyond=3, d=32, heads=4, kv_heads=4, batch=2, padding="left")
    whole = replace(whole, key_bits=keys, value_bits=values, query_bits=query, window=40)
    x = arrays(whole.inputs())
    out, *presents = run(whole, x, isa)
    names = [name.replace("present", "past") for name in whole.signature().outputs[1:] if name]
    of_queries = {name: x[name][:, -steps:] for name in ("query", "position_ids")}
    past = np.array([whole.total - steps])
    x = x | dict(zip(names, presents, strict=True)) | of_queries | {"key": None, "value": None, "past_length": past}
    (alone,) = run(replace(whole, steps=steps, past=int(past[0]), query_only=True), x, isa)
    # of a low-bit cache only the last query sees the same tokens as codes
    same = slice(None) if min(keys, values) >= 8 else slice(-1, None)
    np.testing.assert_allclose(alone[:, same], out[:, -steps:][:, same], atol=2e-5)


GATED = AttentionCase("gated", heads=8, kv_heads=4, d=32, wide_value=False, norm_eps=0.0, branches=1, gates=0.5)
GATED_CALLS = [  # steps, past, branches, bits of keys and values, the window
    (1, 300, 1, 16, 0),
    (1, 300, 2, 8, 0),
    (1, 130, 1, 4, 0),
    (2, 130, 1, 3, 0),
    (1, 99, 2, 2, 40),
    (50, 30, 1, 16, 0),
    (50, 30, 2, 8, 0),
    (70, 30, 1, 4, 0),
]


def gated(steps: int, past: int, branches: int, bits: int, window: int, seed: int = 0) -> AttentionCase:
    return replace(
        GATED, steps=steps, past=past, branches=branches, key_bits=bits, value_bits=bits, sliding_window=window,
        beyond=0 if window else 3, first=0 if window else 4, seed=seed,
    )  # fmt: skip


@on_each_isa
@pytest.mark.parametrize("call", GATED_CALLS, ids=str)
def test_gates_of_one_change_no_bit(call: tuple[int, int, int, int, int], isa: str) -> None:
    case = replace(gated(*call), gates=1.0)
    x = arrays(case.inputs())
    plain = run(replace(case, gates=None), {name: array for name, array in x.items() if name != "gates"}, isa)
    x["gates"] = np.ones_like(x["gates"])
    for got, expected in zip(run(case, x, isa), plain, strict=True):
        np.testing.assert_array_equal(got, expected)


@on_each_isa
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("call", GATED_CALLS, ids=str)
def test_what_heads_that_are_off_would_read_may_be_nan(
    call: tuple[int, int, int, int, int], seed: int, isa: str
) -> None:
    """Queries, old keys and values: a product with them, or with their scales, would be NaN."""
    case = gated(*call, seed=seed)
    x = arrays(case.inputs())
    gates = x["gates"].reshape(case.batch, case.steps, case.kv_heads, -1)
    gates[:, :, seed] = 0  # a whole kv head is off
    expected = run(case, x, isa)
    odd = {name: None if array is None else array.copy() for name, array in x.items()}
    odd["query"].reshape(case.batch, case.steps, case.heads, -1)[gates.reshape(case.batch, case.steps, -1) == 0] = (
        math.nan
    )
    for name in ("past_key", "past_value"):
        for end in ("", "_scale", "_recent"):
            if (array := odd.get(name + end)) is not None and array.dtype.kind == "f":
                array[:, seed] = math.nan
    got = run(case, odd, isa)[0]
    np.testing.assert_array_equal(got, expected[0])
    off = got.reshape(*x["gates"].shape, -1)[x["gates"] == 0]
    assert off.size and not off.any()


@pytest.mark.parametrize("isa", [None, *native.instruction_sets()])
@pytest.mark.parametrize("steps", [1, 4, 40])
def test_negative_gates_and_whole_tokens_that_are_off(isa: str | None, steps: int) -> None:
    case = replace(GATED, steps=steps, past=70, beyond=2, batch=2, padding="left")
    x = case.inputs()
    x["gates"][:, :, ::3] *= -1
    x["gates"][0, steps // 2] = 0
    expected = call_reference(case, x)[0]
    np.testing.assert_allclose(run(case, arrays(x), isa)[0], expected, atol=2e-5)
    assert not expected[0, steps // 2].any() and (expected < 0).any()


@on_each_isa
@pytest.mark.parametrize("bits", [16, 8, 4])
def test_rows_of_their_own_length_have_their_own_gates(bits: int, isa: str) -> None:
    """Each row computes the bits that it computes alone; the second is left alone."""
    case = replace(GATED, steps=1, past=90, batch=3, beyond=0, key_bits=bits, value_bits=bits)
    x, pasts = fed(arrays(case.inputs())), (90, -1, 70)
    session = node_session(case, isa=isa)
    names = [name for name in case.signature().outputs if name]

    def call(feeds: dict[str, np.ndarray]) -> np.ndarray:
        binding = session.io_binding()
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array.copy()) for name, array in feeds.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_output("out")
        for name in names[1:]:
            binding.bind_ortvalue_output(name, values[name.replace("present", "past")])
        session.run_with_iobinding(binding)
        out: np.ndarray = binding.get_outputs()[0].numpy()
        return out

    got = call(x | {"past_length": np.array(pasts)})
    assert not got[1].any()
    for row in (0, 2):
        alone = {name: array if name in ("cos", "sin") else array[row : row + 1] for name, array in x.items()}
        alone["attention_mask"] = alone["attention_mask"][:, : pasts[row] + 1]
        expected = call(alone | {"past_length": np.array(pasts[row : row + 1])})
        np.testing.assert_array_equal(got[row], expected[0])
        np.testing.assert_array_equal(got[row].reshape(case.heads, -1).any(-1), x["gates"][row, 0] != 0)


def node_session(
    case: AttentionCase, threads: int = 1, isa: str | None = None, without: str = "", **changed: Any
) -> onnxruntime.InferenceSession:
    """A session on a node whose inputs and outputs have open shapes.

    `without` leaves an input out; `changed` replaces attributes (None: left out).
    """
    outputs, kinds = outputs_of(case)
    x = arrays(case.inputs())
    if without:
        x[without] = None
    attributes = {k: v for k, v in {**case.attributes(), **changed}.items() if v is not None}
    node = node_of(diff_attention.OP.name, DOMAIN, x, attributes, outputs)
    element = {n: helper.np_dtype_to_tensor_dtype(array.dtype) for n, array in x.items() if array is not None}
    graph = helper.make_graph(
        [node],
        "one_node",
        [helper.make_tensor_value_info(name, kind, None) for name, kind in element.items()],
        [helper.make_tensor_value_info(n, kinds.get(n, element["query"]), None) for n, rank in outputs.items() if rank],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("diffbit", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    options.register_custom_ops_library(str(native.library()))
    with mock.patch.dict(os.environ, {native.ISA: isa or ""}):
        return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


IN_PLACE = [case for case in ATTENTION_CASES if case.beyond is not None]


@on_isas_in_turn(IN_PLACE, sets=1)
def test_a_shared_buffer_gains_the_new_rows_and_nothing_else(case: AttentionCase, isa: str) -> None:
    expected = run(case, arrays(case.inputs()), isa)
    session, x = node_session(case, isa=isa), fed(arrays(case.inputs()))
    outputs = [name for name in case.signature().outputs if name]
    binding = session.io_binding()
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array.copy()) for name, array in x.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_output("out")
    for name in outputs[1:]:
        binding.bind_ortvalue_output(name, values[name.replace("present", "past")])
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(binding.get_outputs()[0].numpy(), expected[0])
    for name, copied in zip(outputs[1:], expected[1:], strict=True):
        shared, before = values[name.replace("present", "past")].numpy(), x[name.replace("present", "past")]
        np.testing.assert_array_equal(shared[:, :, case.defined(name)], copied[:, :, case.defined(name)])
        if not name.endswith("recent"):
            np.testing.assert_array_equal(shared[:, :, case.filled(name) :], before[:, :, case.filled(name) :])


# Kernels share what divides the work between threads: each case with one of them
@pytest.mark.parametrize(
    ("case", "isa"),
    [
        pytest.param(case, isa, id=f"{case.name}-{isa}")
        for case, isa in zip(ATTENTION_CASES[::3], itertools.cycle(native.instruction_sets()), strict=False)
    ],
)
def test_threads_and_neighbours_change_no_bit(case: AttentionCase, isa: str) -> None:
    x = arrays(case.inputs())
    expected = run(case, x, isa)
    sessions = [node_session(case, threads, isa) for threads in (2, 4)]
    results: list[list[np.ndarray]] = []

    def several(session: onnxruntime.InferenceSession) -> None:
        results.extend(session.run(None, fed(x)) for _ in range(5))

    workers = [threading.Thread(target=several, args=(session,)) for session in sessions for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert len(results) == 20
    for got in results:
        np.testing.assert_array_equal(got[0], expected[0])
        assert_same_cache(case, got[1:], expected[1:])


def test_bad_attributes_are_sentences() -> None:
    case = AttentionCase("bad")
    for changed, sentence in [
        ({"num_heads": None}, "DiffAttention has no integer attribute num_heads"),
        ({"num_heads": 0}, "attribute num_heads is 0, wanted 1 to"),
        (
            {"num_kv_heads": 3},
            "num_heads is 2, wanted a multiple of the 1 kv heads of num_kv_heads 3, which must be even",
        ),
        ({"num_heads": 3, "num_kv_heads": 4}, "num_heads is 3, wanted a multiple of the 2 kv heads of num_kv_heads 4"),
        ({"wide_value": 2}, "attribute wide_value is 2, wanted 0 to 1"),
        ({"scale": None}, "has no float attribute scale"),
        ({"norm_eps": None}, "has no float attribute norm_eps"),
        ({"spec_version": 2}, "spec_version is 2, this library computes 7"),
        ({"spec_version": 6, "first": None}, "spec_version is 6, this library computes 7; .* export again"),
    ]:
        with pytest.raises(Exception, match=sentence):
            node_session(case, **changed)


def test_bad_inputs_are_sentences() -> None:
    case = AttentionCase("bad", past=4, beyond=2, batch=2)
    int8 = replace(case, key_bits=8, value_bits=8)
    x = arrays(case.inputs())
    positions = x["position_ids"]
    for changed, sentence in [
        ({"query": x["query"][0]}, r"query is \[5, 32\], wanted \[any, any, any\]"),
        ({"query": x["query"][:, :, :-8]}, r"query is \[2, 5, 24\], wanted \[2, 5, 32\]"),
        ({"key": x["key"][:, :4]}, r"key is \[2, 4, 16\], wanted \[2, 5, any\]"),
        ({"key": x["key"][:, :, :6]}, r"key is \[2, 5, 6\], wanted 2 sub-heads of an even number"),
        ({"value": x["value"][:, :, :8]}, r"value is \[2, 5, 8\], wanted \[2, 5, 16\]"),
        ({"lambda": x["lambda"][:1]}, r"lambda is \[1\], wanted \[2\]"),
        ({"lambda": np.zeros((2, 5, 1), np.float32)}, r"lambda is \[2, 5, 1\], wanted \[2, 5, 2\]"),
        ({"past_key": x["past_key"][:, :1]}, r"past_key is \[2, 1, 11, 8\], wanted \[2, 2, any, 8\]"),
        ({"past_value": x["past_value"][:, :, 1:]}, r"past_value is \[2, 2, 10, 8\], wanted \[2, 2, 11, 8\]"),
        ({"past_length": np.array([-1])}, "past_length is -1, wanted 0 to 11, the capacity of past_key"),
        ({"past_length": np.array([12])}, "past_length is 12, wanted 0 to 11, the capacity of past_key"),
        ({"past_length": np.array([3, 4, 4])}, r"past_length is \[3\], wanted \[2\]"),
        ({"past_length": np.array([3, 6])}, r"attention_mask is \[2, 9\], wanted at least 11 columns"),
        (
            {"past_length": np.array([3, 4])},
            "past_length has 2 numbers, wanted one where past and present",
        ),
        ({"past_length": np.array([5])}, r"attention_mask is \[2, 9\], wanted \[2, 10\]"),
        ({"position_ids": positions + 100}, r"position_ids holds 10\d, wanted 0 to 11: cos has 12 rows"),
        ({"position_ids": positions - 100}, r"position_ids holds -9\d, wanted 0 to 11: cos has 12 rows"),
        ({"position_ids": positions[:, :4]}, r"position_ids is \[2, 4\], wanted \[2, 5\]"),
        ({"cos": x["cos"][:, :3]}, r"cos is \[12, 3\], wanted \[any, 4\]"),
        ({"sin": x["sin"][:3]}, r"sin is \[3, 4\], wanted \[12, 4\]"),
        ({"attention_mask": x["attention_mask"][:1]}, r"attention_mask is \[1, 9\], wanted \[2, 9\]"),
    ]:
        with pytest.raises(Exception, match=sentence):
            node_session(case).run(None, {**x, **changed})
    ring = arrays(replace(case, sliding_window=6, beyond=0).inputs())
    with pytest.raises(Exception, match=r"past_key is \[2, 2, 5, 8\], wanted \[2, 2, 6, 8\]"):
        session = node_session(replace(case, sliding_window=6, beyond=0))
        session.run(None, {**ring, "past_key": ring["past_key"][:, :, 1:]})
    gates = arrays(replace(case, gates=0.5).inputs())
    with pytest.raises(Exception, match=r"gates is \[2, 5, 1\], wanted \[2, 5, 2\]"):
        node_session(replace(case, gates=0.5)).run(None, {**fed(gates), "gates": gates["gates"][:, :, :1]})
    read = replace(case, query_only=True)
    for changed, sentence in [
        ({"past_length": np.array([7])}, "past_length is 7, wanted 0 to 6, the capacity of past_key"),
        ({"query": x["query"][:, :, :-2]}, r"query is \[2, 5, 30\], wanted 4 sub-heads of an even number"),
    ]:
        with pytest.raises(Exception, match=sentence):
            node_session(read).run(None, {**fed(arrays(read.inputs())), **changed})
    with pytest.raises(Exception, match="value is missing, wanted exactly where key is"):
        node_session(case, without="value").run(None, {name: x[name] for name in x if name != "value"})
    quantized = arrays(int8.inputs())
    with pytest.raises(Exception, match=r"past_key_scale is \[2, 2, 10\], wanted \[2, 2, 11\]"):
        node_session(int8).run(None, {**quantized, "past_key_scale": quantized["past_key_scale"][:, :, 1:]})


def test_an_output_buffer_too_small_is_an_error() -> None:
    case = AttentionCase("small", past=4)
    session, x = node_session(case), arrays(case.inputs())
    binding = session.io_binding()
    for name, array in x.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("out")
    binding.bind_output("present_value")
    small = onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros((1, 2, 6, 8), np.float32))
    binding.bind_ortvalue_output("present_key", small)
    with pytest.raises(Exception, match=r"present_key|shape"):
        session.run_with_iobinding(binding)


@pytest.mark.parametrize("dropped", ["past_key_scale", "past_value_scale"])
def test_an_int8_cache_without_scales_is_an_error(dropped: str) -> None:
    case = AttentionCase("scales", key_bits=8, value_bits=8, past=2)
    x = arrays(case.inputs())
    del x[dropped]
    with pytest.raises(Exception, match=f"{dropped} is missing, wanted exactly where the cache"):
        node_session(case, without=dropped).run(None, x)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"key_bits": 5}, "key_bits is 5, wanted 16, 8, 4, 3 or 2"),
        ({"value_bits": 0}, "value_bits is 0, wanted 16, 8, 4, 3 or 2"),
        ({"query_bits": 2, "key_bits": 2}, "query_bits is 2, wanted 0, 8 or 4"),
        ({"branches": 3}, "branches is 3, wanted 1 to 2"),
        ({"noise_ratio": 2, "branches": 1}, "noise_ratio is 2 and branches 1"),
        ({"query_bits": 8}, "query_bits is 8 and key_bits 16, wanted keys of fewer bits"),
        ({"sliding_window": -1}, "sliding_window is -1, wanted 0 to 16777216"),
    ],
)
def test_attributes_that_do_not_exist_are_refused(changed: dict[str, int], sentence: str) -> None:
    with pytest.raises(DiffbitError, match=sentence):
        diff_attention.Signature(**changed)
    case = AttentionCase("refused")
    with pytest.raises(DiffbitError, match=sentence):
        call_reference(replace(case, **changed), case.inputs())


@pytest.mark.parametrize("changed", [{"key_bits": 4}, {"value_bits": 2}])
def test_blocks_want_multiples_of_32_channels(changed: dict[str, int]) -> None:
    case = AttentionCase("narrow", d=40, **changed)
    with pytest.raises(DiffbitError, match=r"heads are 40 wide, wanted a multiple of 32 .*; use 8 bits"):
        call_reference(case, case.inputs())


def test_a_node_names_what_its_bits_use() -> None:
    signature = diff_attention.Signature(value_bits=4, branches=1)
    assert signature.inputs[3] == "" and signature.inputs[11:] == ("", "past_value_scale", "", "past_value_recent")
    assert signature.outputs == (
        "out",
        "present_key",
        "present_value",
        "",
        "present_value_scale",
        "",
        "present_value_recent",
    )
    assert diff_attention.Signature().inputs == diff_attention.INPUTS[:11]
    assert diff_attention.Signature(gates=True).inputs == (*diff_attention.INPUTS[:11], "", "", "", "", "gates")
    assert diff_attention.Signature(gates=True).attributes == diff_attention.Signature().attributes
    assert len(diff_attention.Signature(8, 8).outputs) == 5
