"""DiffAttention over many tokens on CUDA (attention_prefill.cu): emulated in two orders of threads, and on a card.

Queries, probabilities and the numbers of a low-bit cache are rounded to T there for the tensor cores, as in every
attention of that precision, so the error may be twice that of attention put together from torch's products in T, both
against float64.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn.functional import pad

from diffbit.ops import kv_cache
from diffbit.ops.diff_attention_reference import Cached, append, in_pairs, rotated

from .cases import PREFILL_CASES, AttentionCase
from .cuda_attention import Tensors, run_cuda, same_bits
from .cuda_run import Device, on_devices_in_turn, on_each_device
from .test_diff_attention import call_reference


def in_doubles(x: Tensors) -> Tensors:
    """The call with its numbers widened; the cache stays what it is."""
    wide = ("query", "key", "value", "lambda")
    return {name: a.double() if a is not None and name in wide else a for name, a in x.items()}


def caches(case: AttentionCase, x: Tensors) -> tuple[Cached, Cached]:
    """Keys and values with the new tokens, as each query sees them."""

    def cache(name: str, bits: int) -> Cached:
        past, new, steps = x[f"past_{name}"], x[name], 0 if case.query_only else case.steps
        assert past is not None
        rows = torch.zeros(case.batch, case.kv_heads, 0, case.d)
        if new is not None:
            rows = new.float().view(case.batch, case.steps, case.kv_heads, case.d)
            if name == "key":
                rows = rotated(rows, *(x[input_name] for input_name in ("position_ids", "cos", "sin")))  # type: ignore[arg-type]
            rows = rows.transpose(1, 2)
        scale, recent = (x.get(f"past_{name}_{part}") for part in ("scale", "recent"))
        ring = case.sliding_window > 0
        layout = case.window, case.first, name == "key"
        stored = append(rows, past, scale, recent, case.total - steps, bits, *layout, ring)
        return stored.as_stored(case.steps) if case.query_only else stored

    return cache("key", case.key_bits), cache("value", case.value_bits)


def forms(cache: Cached, case: AttentionCase) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Which queries see a token [S, T] in a form of the cache, and the tokens in it [B, G, w, T, d], rotated back and
    rounded to T."""
    width = 2 if case.wide_value else 1
    grouped = cache.grouped(case.kv_heads // width, width)
    coded, floats = grouped.dequantized(torch.float32), grouped.floats.float()
    coded = pad(coded, (0, 0, 0, case.total - coded.shape[-2]))
    floats = pad(floats, (0, 0, case.total - floats.shape[-2], 0))
    if cache.is_rotated:
        coded, floats = kv_cache.rotate(coded), kv_cache.rotate(floats)
    return [(cache.coded, coded.to(case.dtype).float()), (~cache.coded, floats.to(case.dtype).float())]


def composed(case: AttentionCase, x: Tensors) -> torch.Tensor:
    """One attention per branch in T (products summed in float32), then the difference in T, then the norm."""
    width, n = 2 if case.wide_value else 1, case.branches
    groups, total, dtype = case.kv_heads // width, case.total, case.dtype
    shared = case.heads // groups
    query, mask, positions = x["query"], x["attention_mask"], x["position_ids"]
    assert query is not None and mask is not None and positions is not None
    q = query.float().view(case.batch, case.steps, -1, case.d)
    q = q if n == 1 else in_pairs(q, case.noise_ratio)
    q = rotated(q, positions, x["cos"], x["sin"]).to(dtype)  # type: ignore[arg-type]
    q = q.view(case.batch, case.steps, groups, shared, n, case.d)
    places = torch.arange(case.past, total)[:, None]
    causal = (torch.arange(total) <= places) & (torch.arange(total) > places - (case.sliding_window or total))
    visible = (causal & mask.bool()[:, None, :])[:, None, None]  # [B, 1, 1, S, T]
    keys, values = (forms(cache, case) for cache in caches(case, x))
    outs = []
    for branch in range(n):
        logits = torch.zeros(())
        for seen, k in keys:
            dots = torch.einsum("bsgrd,bgtd->bgrst", q[..., branch, :].float(), k[:, :, branch if width == 2 else 0])
            logits = logits + torch.where(seen, dots, 0.0)
        scores = logits.to(dtype).float() * case.attributes()["scale"]
        shares = torch.softmax(scores.masked_fill(~visible, -math.inf), -1)
        shares = torch.where(visible, shares, 0.0).to(dtype).float()
        out = sum(torch.einsum("bgrst,bgwtd->bsgrwd", torch.where(seen, shares, 0.0), v) for seen, v in values)
        assert isinstance(out, torch.Tensor)
        outs.append(out.to(dtype).reshape(case.batch, case.steps, case.heads, width * case.d))
    out = outs[0]
    if n == 2:
        lam = x["lambda"]
        assert lam is not None
        out = out - lam.to(dtype).expand(case.batch, case.steps, case.heads)[..., None] * outs[1]
    if case.norm_eps > 0:
        wide = out.float()
        out = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + case.norm_eps)).to(dtype)
    if (gates := x.get("gates")) is not None:
        out = (out.float() * gates[..., None]).to(dtype)
    return out.reshape(case.batch, case.steps, -1)


def check(case: AttentionCase, x: Tensors, got: dict[str, torch.Tensor]) -> None:
    names = [name for name in case.signature().outputs if name]
    expected = dict(zip(names, call_reference(case, x), strict=True))
    for name in names[1:]:
        slots = case.defined(name)
        assert same_bits(got[name][:, :, slots], expected[name][:, :, slots]), f"{name} has other bits"
    oracle = call_reference(case, in_doubles(x))[0]
    peer = composed(case, x)

    def errors(out: torch.Tensor) -> tuple[float, float]:
        wrong = out.double() - oracle
        return float(wrong.norm() / oracle.norm().clamp(min=1e-9)), float(wrong.abs().max())

    for error, allowed in zip(errors(got["out"]), errors(peer), strict=True):
        assert error <= 2 * allowed, f"{error:.3g}, the composition's {allowed:.3g}"


@on_devices_in_turn(PREFILL_CASES)
def test_prefill(case: AttentionCase, device: Device) -> None:
    x = case.inputs()
    check(case, x, run_cuda(device, case, x, in_place=case.beyond is not None and device.seed == 1))


@on_each_device
@pytest.mark.parametrize("hidden", [(0, 70), (33, 64), (30, 99), (64, 65)])
def test_steps_that_padding_hides(hidden: tuple[int, int], device: Device) -> None:
    """Whole steps of 32 keys, at the front, in the middle, and more."""
    case = AttentionCase("hidden", past=63, steps=39, d=64, batch=2, dtype=torch.bfloat16, seed=300)
    x = case.inputs()
    assert x["attention_mask"] is not None
    x["attention_mask"][1, slice(*hidden)] = 0
    check(case, x, run_cuda(device, case, x))


@on_each_device
@pytest.mark.parametrize("d", [64, 128])
def test_growing_scores_rescale_what_was_summed(d: int, device: Device) -> None:
    """Later keys that outdo earlier ones by far, by a little, and not at all."""
    case = AttentionCase("growing", steps=100, d=d, dtype=torch.float16, seed=301)
    x = case.inputs()
    key = x["key"]
    assert key is not None
    key *= torch.linspace(0.05, 2, 100)[None, :, None]
    check(case, x, run_cuda(device, case, x))


@on_each_device
@pytest.mark.parametrize("bits", [8, 4])
def test_outlier_channels_of_a_low_bit_cache(bits: int, device: Device) -> None:
    """A channel of keys that is 40 times larger, and one of values that is 300 times."""
    case = AttentionCase(
        "outliers", steps=70, past=45, d=64, dtype=torch.bfloat16, key_bits=bits, value_bits=bits, seed=302
    )
    x = case.inputs()
    key, value = x["key"], x["value"]
    assert key is not None and value is not None
    key[..., 7::64] *= 40
    value[..., 9::64] *= 300
    check(case, x, run_cuda(device, case, x))
