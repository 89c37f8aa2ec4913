"""DiffAttention over many tokens on CUDA (attention_prefill.cu): emulated in two orders of threads, and on a card.

Queries and probabilities are rounded to T there for the tensor cores, as in every attention of that precision, so the
error may be twice that of attention put together from torch's products in T, both against float64.
"""

from __future__ import annotations

import math

import pytest
import torch

from diffbit.ops.diff_attention_reference import in_pairs

from .cases import PREFILL_CASES, AttentionCase
from .cuda_attention import Tensors, run_cuda, same_bits
from .cuda_run import Device, on_devices_in_turn, on_each_device
from .test_diff_attention import call_reference


def in_doubles(x: Tensors) -> Tensors:
    """The call with its numbers widened; the cache stays what it is."""
    wide = ("query", "key", "value", "lambda")
    return {name: a.double() if a is not None and name in wide else a for name, a in x.items()}


def composed(case: AttentionCase, x: Tensors, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One attention per branch in T (products summed in float32), then the difference in T, then the norm."""
    width, n = 2 if case.wide_value else 1, case.branches
    groups, total, dtype = case.kv_heads // width, case.total, case.dtype
    shared = case.heads // groups
    query, mask, positions = x["query"], x["attention_mask"], x["position_ids"]
    assert query is not None and mask is not None and positions is not None
    q = query.float().view(case.batch, case.steps, -1, case.d)
    q = q if n == 1 else in_pairs(q, case.noise_ratio)
    low, high = q.chunk(2, -1)
    cos, sin = (x[name][positions].unsqueeze(2) for name in ("cos", "sin"))  # type: ignore[index]
    q = torch.cat((low * cos - high * sin, high * cos + low * sin), -1).to(dtype)
    q = q.view(case.batch, case.steps, groups, shared, n, case.d)
    causal = torch.arange(total) <= torch.arange(case.past, total)[:, None]
    visible = (causal & mask.bool()[:, None, :])[:, None, None]  # [B, 1, 1, S, T]
    v = values[:, :, :total].unflatten(1, (groups, width))
    outs = []
    for branch in range(n):
        k = keys[:, :, :total].unflatten(1, (groups, width))[:, :, branch if width == 2 else 0]
        scores = torch.einsum("bsgrd,bgtd->bgrst", q[..., branch, :].float(), k.float()).to(dtype).float()
        scores = (scores * case.attributes()["scale"]).masked_fill(~visible, -math.inf)
        shares = torch.where(visible, torch.softmax(scores, -1), 0.0).to(dtype)
        out = torch.einsum("bgrst,bgwtd->bsgrwd", shares.float(), v.float()).to(dtype)
        outs.append(out.reshape(case.batch, case.steps, case.heads, width * case.d))
    out = outs[0]
    if n == 2:
        lam = x["lambda"]
        assert lam is not None
        out = out - lam.to(dtype).expand(case.batch, case.steps, case.heads)[..., None] * outs[1]
    if case.norm_eps > 0:
        wide = out.float()
        out = (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + case.norm_eps)).to(dtype)
    return out.reshape(case.batch, case.steps, -1)


def check(case: AttentionCase, x: Tensors, got: dict[str, torch.Tensor]) -> None:
    _, keys, values, *_ = call_reference(case, x)
    assert same_bits(got["present_key"], keys) and same_bits(got["present_value"], values)
    oracle = call_reference(case, in_doubles(x))[0]
    peer = composed(case, x, keys, values)

    def errors(out: torch.Tensor) -> tuple[float, float]:
        wrong = out.double() - oracle
        return float(wrong.norm() / oracle.norm()), float(wrong.abs().max())

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
