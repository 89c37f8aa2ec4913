"""Differential attention and its gradients on a GPU, in Triton: both branches in one kernel, and no [S, S] tensor.

    S_b = scale q_b k_b^T,   P_b = softmax(S_b) over the tokens up to one's own,   O_b = P_b v,   b = 1, 2
    o = O_1 - lambda O_2,   y = o / sqrt(mean(o^2) + norm_eps) per token and head   (y = o where norm_eps is 0)

for each pair of heads; v is 2d wide in version 1 (arXiv 2410.05258, eq. 1-3), d wide in version 2, where both branches
read one key. The forward kernel keeps a running softmax of each branch (2205.14135) and reads v once for both. The
backward computes P_b again from the log-sum-exps (2307.08691), and shares what two plain attentions would do twice:

    dP = do v^T,   D_b = do . O_b per token
    dS_1 = P_1 (dP - D_1),   dS_2 = -lambda P_2 (dP - D_2),   dv = (P_1 - lambda P_2)^T do,   dlambda = -D_2

One kernel accumulates dk and dv for a block of keys, another dq for a block of queries, so no two blocks add to the
same memory, and results are the same from run to run. In return, both kernels compute S_b and dP.

Import it only for tensors on a GPU: only torch's CUDA builds include Triton.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from diffbit.models.attention import Differential

WIDTHS = (16, 32, 64, 128)  # supported head widths
ROWS = 32  # of a block of _through_norm
LOG2E = 1.4426950408889634  # the kernels' exponentials are powers of two
TYPES = (torch.float16, torch.bfloat16)  # and, for tests only, float32: without tensor cores, in tiles beyond registers
Tile = dict[str, int]  # M queries and N keys of a block, warps, stages of the pipeline
Four = tuple[Tensor, Tensor, Tensor, Tensor]


@triton.jit
def _load(at, cols, S, MASKED: tl.constexpr):
    """Load rows [N, .] of keys or values; zeros for tokens from S on, if there may be any."""
    return tl.load(at, mask=(cols < S)[:, None], other=0.0) if MASKED else tl.load(at)


@triton.jit
def _mixed(total, top, mix, q, k, v, rows, cols, factor, MASKED: tl.constexpr):
    """Add a block of keys to a branch's running softmax: its sum [M], highest logit (base 2) [M] and mixture [M, E]."""
    logits = tl.dot(q, tl.trans(k), input_precision="ieee") * factor  # [M, N]
    if MASKED:
        logits = tl.where(rows[:, None] >= cols[None, :], logits, float("-inf"))
    highest = tl.maximum(top, tl.max(logits, 1))
    part = tl.exp2(logits - highest[:, None])
    shrink = tl.exp2(top - highest)
    mix = tl.dot(part.to(v.dtype), v, mix * shrink[:, None], input_precision="ieee")
    return total * shrink + tl.sum(part, 1), highest, mix


@triton.jit
def _forward(q, k, v, lam, out, noise, lse, root, S, H, G, factor, eps,
             D: tl.constexpr, E: tl.constexpr, SHARED: tl.constexpr, NORM: tl.constexpr,
             M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Program (block of M queries, pair, batch); M is a multiple of N."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # queries that see most keys come first
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    keys: tl.constexpr = 1 if SHARED else 2
    group = head // (H // G)
    lanes, inner, wide = tl.arange(0, M), tl.arange(0, D), tl.arange(0, E)
    rows = block * M + lanes
    inside = rows < S
    token = batch * S + block * M  # int64, like all products with S; offsets within a block are int32
    q += (token * (2 * H) + 2 * head) * D + lanes[:, None] * (2 * H * D) + inner[None, :]
    q1 = tl.load(q, mask=inside[:, None], other=0.0)  # [M, D]
    q2 = tl.load(q + D, mask=inside[:, None], other=0.0)
    total1, total2 = tl.zeros((M,), tl.float32), tl.zeros((M,), tl.float32)
    top1, top2 = tl.full((M,), float("-inf"), tl.float32), tl.full((M,), float("-inf"), tl.float32)
    mix1, mix2 = tl.zeros((M, E), tl.float32), tl.zeros((M, E), tl.float32)

    others = tl.arange(0, N)[:, None]
    k += (batch * S * G + group) * (keys * D) + others * (G * keys * D) + inner[None, :]
    v += (batch * S * G + group) * E + others * (G * E) + wide[None, :]
    for masked in tl.static_range(2):  # keys that come before all queries of the block; then those of the block
        for start in range(masked * block * M, (block + masked) * M, N):
            cols = start + tl.arange(0, N)
            k1, value = _load(k, cols, S, masked), _load(v, cols, S, masked)  # [N, D], [N, E]
            total1, top1, mix1 = _mixed(total1, top1, mix1, q1, k1, value, rows, cols, factor, masked)
            k2 = k1 if SHARED else _load(k + D, cols, S, masked)
            total2, top2, mix2 = _mixed(total2, top2, mix2, q2, k2, value, rows, cols, factor, masked)
            k += N * keys * G * D
            v += N * G * E

    line = (batch * H + head) * S + rows
    weight = tl.load(lam + line, mask=inside, other=0.0)
    mix2 = mix2 / total2[:, None]
    result = mix1 / total1[:, None] - weight[:, None] * mix2  # [M, E]
    if NORM:
        scale = tl.rsqrt(tl.sum(result * result, 1) / E + eps)
        tl.store(root + line, scale, mask=inside)
        result = result * scale[:, None]
    to = (token * H + head) * E + lanes[:, None] * (H * E) + wide[None, :]
    tl.store(out + to, result.to(out.dtype.element_ty), mask=inside[:, None])
    tl.store(noise + to, mix2.to(noise.dtype.element_ty), mask=inside[:, None])
    branch = (batch * (2 * H) + 2 * head) * S + rows
    tl.store(lse + branch, top1 + tl.log2(total1), mask=inside)
    tl.store(lse + branch + S, top2 + tl.log2(total2), mask=inside)


@triton.jit
def _through_norm(dy, y, noise, lam, root, do, delta, S, H, E: tl.constexpr, NORM: tl.constexpr, M: tl.constexpr):
    """Compute do and D_b from dy; program (block of M queries, pair, batch). y is o times 1 / rms, stored in root."""
    block, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    lanes, wide = tl.arange(0, M), tl.arange(0, E)
    rows = block * M + lanes
    inside = rows < S
    at = ((batch * S + block * M) * H + head) * E + lanes[:, None] * (H * E) + wide[None, :]
    grad = tl.load(dy + at, mask=inside[:, None], other=0.0).to(tl.float32)  # [M, E]
    normed = tl.load(y + at, mask=inside[:, None], other=0.0).to(tl.float32)
    second = tl.load(noise + at, mask=inside[:, None], other=0.0).to(tl.float32)
    line = (batch * H + head) * S + rows
    weight = tl.load(lam + line, mask=inside, other=0.0)
    if NORM:
        scale = tl.load(root + line, mask=inside, other=1.0)
        grad = (grad - normed * (tl.sum(grad * normed, 1) / E)[:, None]) * scale[:, None]
        normed = normed / scale[:, None]  # o
    tl.store(do + at, grad.to(do.dtype.element_ty), mask=inside[:, None])
    of_noise = tl.sum(grad * second, 1)
    branch = (batch * (2 * H) + 2 * head) * S + rows
    tl.store(delta + branch, tl.sum(grad * normed, 1) + weight * of_noise, mask=inside)  # O_1 is o + lambda O_2
    tl.store(delta + branch + S, of_noise, mask=inside)


@triton.jit
def _keys_and_values(q, k, v, lam, do, lse, delta, dk, dv, S, H, G, scale, factor,
                     D: tl.constexpr, E: tl.constexpr, SHARED: tl.constexpr,
                     M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Compute dk and dv in program (block of N keys, kv head, batch), over the queries of all pairs that read them."""
    block, group, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    keys: tl.constexpr = 1 if SHARED else 2
    lanes, inner, wide = tl.arange(0, N)[:, None], tl.arange(0, D)[None, :], tl.arange(0, E)[None, :]
    cols = block * N + lanes
    seen = cols < S
    place = (batch * S + block * N) * G + group
    k_at = place * (keys * D) + lanes * (G * keys * D) + inner
    v_at = place * E + lanes * (G * E) + wide
    k1, value = tl.load(k + k_at, mask=seen, other=0.0), tl.load(v + v_at, mask=seen, other=0.0)
    k2 = k1 if SHARED else tl.load(k + k_at + D, mask=seen, other=0.0)
    dk1, dk2, dvalue = tl.zeros((N, D), tl.float32), tl.zeros((N, D), tl.float32), tl.zeros((N, E), tl.float32)
    others = tl.arange(0, M)
    shared = H // G
    begin = (block * N) // M * M
    for index in range(0, shared * tl.cdiv(S - begin, M)):
        head = group * shared + index % shared  # the group's pairs one after the other, on the same rows
        start = begin + index // shared * M
        rows = start + others
        inside = rows < S
        place = (batch * S + start) * H + head
        q_at = q + place * (2 * D) + others[:, None] * (2 * H * D) + inner
        do_at = do + place * E + others[:, None] * (H * E) + wide
        line = (batch * H + head) * S
        branch = 2 * line + rows
        q1 = tl.load(q_at, mask=inside[:, None], other=0.0)  # [M, D]
        lse1 = tl.load(lse + branch, mask=inside, other=float("inf"))
        p1 = tl.exp2(tl.dot(k1, tl.trans(q1), input_precision="ieee") * factor - lse1[None, :])  # [N, M]
        q2 = tl.load(q_at + D, mask=inside[:, None], other=0.0)
        lse2 = tl.load(lse + branch + S, mask=inside, other=float("inf"))
        p2 = tl.exp2(tl.dot(k2, tl.trans(q2), input_precision="ieee") * factor - lse2[None, :])
        p2 *= tl.load(lam + line + rows, mask=inside, other=0.0)[None, :]
        visible = rows[None, :] >= cols
        p1, p2 = tl.where(visible, p1, 0.0), tl.where(visible, p2, 0.0)
        grad = tl.load(do_at, mask=inside[:, None], other=0.0)  # [M, E]
        dvalue = tl.dot((p1 - p2).to(grad.dtype), grad, dvalue, input_precision="ieee")
        dp = tl.dot(value, tl.trans(grad), input_precision="ieee")
        p1 = p1 * (dp - tl.load(delta + branch, mask=inside, other=0.0)[None, :])
        dk1 = tl.dot(p1.to(q1.dtype), q1, dk1, input_precision="ieee")
        p2 = p2 * (tl.load(delta + branch + S, mask=inside, other=0.0)[None, :] - dp)
        if SHARED:
            dk1 = tl.dot(p2.to(q2.dtype), q2, dk1, input_precision="ieee")
        else:
            dk2 = tl.dot(p2.to(q2.dtype), q2, dk2, input_precision="ieee")
    tl.store(dk + k_at, (dk1 * scale).to(dk.dtype.element_ty), mask=seen)
    if not SHARED:
        tl.store(dk + k_at + D, (dk2 * scale).to(dk.dtype.element_ty), mask=seen)
    tl.store(dv + v_at, dvalue.to(dv.dtype.element_ty), mask=seen)


@triton.jit
def _descended(dq1, dq2, q1, q2, grad, k1, k2, value, lse1, lse2, delta1, delta2, weight, rows, cols, factor,
               MASKED: tl.constexpr):  # fmt: skip
    """Add a block of keys to dq of both branches; numbers per query are columns [M, 1]."""
    p1 = tl.exp2(tl.dot(q1, tl.trans(k1), input_precision="ieee") * factor - lse1)  # [M, N]
    p2 = tl.exp2(tl.dot(q2, tl.trans(k2), input_precision="ieee") * factor - lse2) * weight
    if MASKED:
        visible = rows[:, None] >= cols[None, :]
        p1, p2 = tl.where(visible, p1, 0.0), tl.where(visible, p2, 0.0)
    dp = tl.dot(grad, tl.trans(value), input_precision="ieee")
    dq1 = tl.dot((p1 * (dp - delta1)).to(k1.dtype), k1, dq1, input_precision="ieee")
    dq2 = tl.dot((p2 * (delta2 - dp)).to(k2.dtype), k2, dq2, input_precision="ieee")
    return dq1, dq2


@triton.jit
def _queries(q, k, v, lam, do, lse, delta, dq, S, H, G, scale, factor,
             D: tl.constexpr, E: tl.constexpr, SHARED: tl.constexpr, M: tl.constexpr, N: tl.constexpr):  # fmt: skip
    """Compute dq in program (block of M queries, pair, batch); M is a multiple of N."""
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    head, batch = tl.program_id(1), tl.program_id(2).to(tl.int64)
    keys: tl.constexpr = 1 if SHARED else 2
    group = head // (H // G)
    lanes, inner, wide = tl.arange(0, M), tl.arange(0, D), tl.arange(0, E)
    rows = block * M + lanes
    inside = rows < S
    place = (batch * S + block * M) * H + head
    q_at = place * (2 * D) + lanes[:, None] * (2 * H * D) + inner[None, :]
    q1 = tl.load(q + q_at, mask=inside[:, None], other=0.0)
    q2 = tl.load(q + q_at + D, mask=inside[:, None], other=0.0)
    do += place * E + lanes[:, None] * (H * E) + wide[None, :]
    grad = tl.load(do, mask=inside[:, None], other=0.0)
    branch = (batch * (2 * H) + 2 * head) * S + rows
    weight = tl.load(lam + (batch * H + head) * S + rows, mask=inside, other=0.0)[:, None]
    lse1 = tl.load(lse + branch, mask=inside, other=float("inf"))[:, None]
    lse2 = tl.load(lse + branch + S, mask=inside, other=float("inf"))[:, None]
    delta1 = tl.load(delta + branch, mask=inside, other=0.0)[:, None]
    delta2 = tl.load(delta + branch + S, mask=inside, other=0.0)[:, None]
    dq1, dq2 = tl.zeros((M, D), tl.float32), tl.zeros((M, D), tl.float32)

    others = tl.arange(0, N)[:, None]
    k += (batch * S * G + group) * (keys * D) + others * (G * keys * D) + inner[None, :]
    v += (batch * S * G + group) * E + others * (G * E) + wide[None, :]
    for masked in tl.static_range(2):
        for start in range(masked * block * M, (block + masked) * M, N):
            cols = start + tl.arange(0, N)
            k1, value = _load(k, cols, S, masked), _load(v, cols, S, masked)
            k2 = k1 if SHARED else _load(k + D, cols, S, masked)
            dq1, dq2 = _descended(dq1, dq2, q1, q2, grad, k1, k2, value, lse1, lse2, delta1, delta2, weight, rows, cols,
                                  factor, masked)  # fmt: skip
            k += N * keys * G * D
            v += N * G * E
    tl.store(dq + q_at, (dq1 * scale).to(dq.dtype.element_ty), mask=inside[:, None])
    tl.store(dq + q_at + D, (dq2 * scale).to(dq.dtype.element_ty), mask=inside[:, None])


def tile(queries: int, keys: int, warps: int, stages: int) -> Tile:
    """Return the options that a kernel is launched with."""
    return {"M": queries, "N": keys, "num_warps": warps, "num_stages": stages}


def tiles(query: Tensor, value: Tensor) -> tuple[Tile, Tile, Tile]:
    """Choose tiles of _forward, _keys_and_values and _queries for the memory that a block shares on query's device: 227
    KiB on an H100 or H200, and in Triton's interpreter, 163 KiB on an A100, 99 KiB on most others. Those for 227 KiB
    are the fastest of 44 to 50 that were timed on an H100, at 4096 tokens of 16 pairs; the others were never timed."""
    card: Any = torch.cuda.get_device_properties(query.device) if query.is_cuda else None
    memory = card.shared_memory_per_block_optin if card else 227 << 10
    d, e = query.shape[-1], value.shape[-1]
    if query.dtype == torch.float32:
        return tile(32, 16, 4, 1), tile(16, 32, 4, 1), tile(32, 16, 4, 1)
    if memory >= 227 << 10:
        if e <= 64:
            return tile(128, 64, 8, 3), tile(64, 64, 4, 2), tile(128, 64, 8, 3)
        if d <= 64:
            return tile(128, 32, 8, 3), tile(32, 64, 4, 3), tile(128, 32, 8, 3)
        if e <= 128:
            return tile(64, 32, 4, 3), tile(32, 64, 4, 2), tile(64, 32, 4, 3)
        return tile(64, 16, 8, 2), tile(128, 32, 8, 2), tile(64, 32, 4, 1)
    much, narrow = memory >= 163 << 10, d <= 64
    if narrow and much:
        return tile(128, 32, 8, 3), tile(32, 128, 8, 2), tile(128, 32, 8, 2)
    if narrow:
        return tile(128, 32, 8, 2), tile(32, 64, 8, 2), tile(64, 32, 8, 2)
    if much:
        return tile(64, 16, 8, 2), tile(32, 64, 8, 2), tile(64, 16, 8, 2)
    return tile(64, 32, 8, 1), tile(32, 32, 8, 1), tile(32, 32, 4, 1)


@torch.library.custom_op("diffbit::diff_attention_train", mutates_args=())
def _forward_op(
    query: Tensor, key: Tensor, value: Tensor, lambda_: Tensor, scale: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # torch 2.6 reads no other name for it
    """Return y and O_2 [B, S, H, e], log-sum-exps (base 2) [B, 2H, S], 1 / rms of o [B, H, S] (empty: no norm)."""
    query, key, value, lambda_ = (tensor.contiguous() for tensor in (query, key, value, lambda_))
    batch, length, heads, groups, d, e = _sizes(query, value)
    out, noise, lse, root = _outputs(query, value, norm_eps)
    options, _, _ = tiles(query, value)
    _forward[triton.cdiv(length, options["M"]), heads, batch](
        query, key, value, lambda_, out, noise, lse, root, length, heads, groups, scale * LOG2E, norm_eps,
        D=d, E=e, SHARED=key.shape[2] == groups, NORM=norm_eps > 0, **options,
    )  # fmt: skip
    return out, noise, lse, root


@torch.library.custom_op("diffbit::diff_attention_train_backward", mutates_args=())
def _backward_op(
    dy: Tensor, query: Tensor, key: Tensor, value: Tensor, lambda_: Tensor, out: Tensor, noise: Tensor, lse: Tensor,
    root: Tensor, scale: float, norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of query, key, value and lambda_."""
    dy, query, key, value, lambda_ = (tensor.contiguous() for tensor in (dy, query, key, value, lambda_))
    batch, length, heads, groups, d, e = _sizes(query, value)
    _, of_keys, of_queries = tiles(query, value)
    do, delta = torch.empty_like(out), torch.empty_like(lse)
    _through_norm[triton.cdiv(length, ROWS), heads, batch](
        dy, out, noise, lambda_, root, do, delta, length, heads, E=e, NORM=norm_eps > 0, M=ROWS
    )
    dq, dk, dv = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    inputs = query, key, value, lambda_, do, lse, delta
    sizes = length, heads, groups, scale, scale * LOG2E
    heads_of = {"D": d, "E": e, "SHARED": key.shape[2] == groups}
    grid = triton.cdiv(length, of_keys["N"]), groups, batch
    _keys_and_values[grid](*inputs, dk, dv, *sizes, **heads_of, **of_keys)
    _queries[triton.cdiv(length, of_queries["M"]), heads, batch](*inputs, dq, *sizes, **heads_of, **of_queries)
    return dq, dk, dv, -delta[:, 1::2]


def _sizes(query: Tensor, value: Tensor) -> tuple[int, int, int, int, int, int]:
    batch, length, sub_heads, d = query.shape
    return batch, length, sub_heads // 2, value.shape[2], d, value.shape[3]


def _outputs(query: Tensor, value: Tensor, norm_eps: float) -> Four:
    """Allocate the outputs of _forward_op."""
    batch, length, heads, _, _, e = _sizes(query, value)
    out, noise = (query.new_empty(batch, length, heads, e) for _ in range(2))
    lse = query.new_empty(batch, 2 * heads, length, dtype=torch.float32)
    return out, noise, lse, query.new_empty(batch, heads if norm_eps > 0 else 0, length, dtype=torch.float32)


@_forward_op.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, lambda_: Tensor, scale: float, norm_eps: float) -> Four:
    return _outputs(query, value, norm_eps)


@_backward_op.register_fake
def _(dy: Tensor, *inputs: Any) -> Any:
    return tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs[:4])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    *tensors, ctx.scale, ctx.norm_eps = inputs
    ctx.save_for_backward(*tensors, *output)


_forward_op.register_autograd(
    lambda ctx, dy, *_: (*_backward_op(dy, *ctx.saved_tensors, ctx.scale, ctx.norm_eps), None, None),
    setup_context=_save,
)


def diff_attention(
    query: Tensor, key: Tensor, value: Tensor, lambda_: Tensor, scale: float, norm_eps: float = 0.0
) -> Tensor:
    """query [B, S, 2H, d] in adjacent pairs, key [B, S, 2G, d] (or [B, S, G, d], of both branches), value
    [B, S, G, e], all of one type; lambda_ float32 [B, H, S] -> y [B, S, H, e]. Pair h reads kv head h // (H/G)."""
    return _forward_op(query, key, value, lambda_, scale, norm_eps)[0]


def fused(query: Tensor, key: Tensor, value: Tensor, lambda_: Tensor, scale: float, norm_eps: float) -> Tensor | None:
    """`diff_attention`, or None for a width or type that the kernels do not support."""
    takes = query.shape[-1] in WIDTHS and query.dtype in TYPES
    return diff_attention(query, key, value, lambda_, scale, norm_eps) if takes else None


def use_kernels(model: nn.Module) -> None:
    """Let a model's differential layers compute both branches in one call, where they can."""
    for part in model.modules():
        if isinstance(part, Differential):
            part.fused = fused
