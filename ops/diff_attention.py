"""`diffbit.DiffAttention`: RoPE, cache append, differential attention and head norm in one op.

For every pair (i) of query sub-heads, with d the width of one softmax and T = past_length + S:

    A1 = softmax(scale * q_{2i}   k_s^T)        A2 = softmax(scale * q_{2i+1} k_n^T)
    o  = (A1 - lambda_i * A2) v                 out = o / sqrt(mean(o^2) + norm_eps)   (norm_eps 0: no norm)

Version 1 (arXiv 2410.05258, eq. 1-3; wide_value=1): the cache holds Hk = 2*KV sub-heads; pair i belongs to kv head
g = i // (H/KV), k_s and k_n are the key sub-heads 2g and 2g+1, and v is the value sub-heads 2g and 2g+1 side by
side, 2d wide. Version 2 (hf.co/blog/microsoft/diff-attn-v2; wide_value=0): Hk = KV, both branches of a pair share
the key and the d-wide value of kv head g = i // (H/Hk), lambda is a number per token and head, and there is no norm.

Not in the op: (1 - lambda_init), folded into the output projection, and the computation of lambda itself.

Inputs
    query           T  [B, S, 2H*d]    sub-heads in adjacent pairs: 2i signal, 2i+1 noise; not yet rotated
    key, value      T  [B, S, Hk*d]
    lambda          float [H], or [B, S, H] (after the sigmoid)
    past_key/value  K  [B, Hk, C, d]   C >= past_length; what lies beyond past_length is never read as a number
    past_length     int64 [1]
    position_ids    int64 [B, S]       rows of cos and sin
    cos, sin        float [P, d/2]     rotate-half RoPE: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)
    attention_mask  int64 [B, T]       0 hides a key (padding); token s sees keys 0..past_length+s that are not hidden
    past_key/value_scale  float [B, Hk, C]   with an int8 cache only
Outputs
    out             T  [B, S, H*(1+wide_value)*d]; zero where a token sees no key at all
    present_key/value  K  [B, Hk, max(C, T), d]   rotated keys; grows when C == past_length, else the same capacity
    present_key/value_scale  float [B, Hk, max(C, T)]   with an int8 cache only
T is float32 or float16, and so is K, whatever T is. K may be int8 as well: then every row of a sub-head is rounded for
itself, keys after RoPE, and the row's numbers are code * step:

    step = max|x| / 127        code = round-half-to-even(x / step); 0 in a row of zeros, whose step is 0

A row with an infinity or a NaN has the step NaN and codes 0; the body promises nothing for it. Each other code is the
same on every implementation: RoPE rounds both products and their difference to float32.
Attributes: num_heads (H), num_kv_heads (Hk), wide_value, scale, norm_eps, spec_version.

All arithmetic is in float32 whatever T is. The body never forms a mask per head and, for S = 1, no tensor grows
faster than T: the cost of a decode step is linear in the context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import onnx_ir
    import torch

DOMAIN = "diffbit"
NAME = "DiffAttention"
Cache = Literal["float", "int8"]
VERSION = 1  # of the meaning; a kernel checks it against the attribute spec_version

# Shapes beside the lines: G = kv heads that hold a value, r = H/G pairs per kv head, w = 1 + wide_value.
_BODY = """
<domain: "diffbit", opset_import: ["" : 21]>
DiffAttention
  <num_heads, num_kv_heads, wide_value, scale, norm_eps, spec_version>
  (query, key, value, lambda, past_key, past_value, past_length, position_ids, cos, sin, attention_mask@INPUTS)
  => (out, present_key, present_value@OUTPUTS)
{
  zero = Constant <value_ints = [0]> ()
  one = Constant <value_ints = [1]> ()
  two = Constant <value_ints = [2]> ()
  rest = Constant <value_ints = [-1]> ()
  end = Constant <value_ints = [9223372036854775807]> ()
  zero_0d = Constant <value_int = 0> ()
  one_0d = Constant <value_int = 1> ()
  zero_f = Constant <value_float = 0.0> ()
  hidden = Constant <value_float = -1e30> ()
  heads_0d = Constant <value_int: int = @num_heads> ()
  kv_heads_0d = Constant <value_int: int = @num_kv_heads> ()
  wide_0d = Constant <value_int: int = @wide_value> ()
  scale_f = Constant <value_float: float = @scale> ()
  eps_f = Constant <value_float: float = @norm_eps> ()
  H = Reshape (heads_0d, one)
  Hk = Reshape (kv_heads_0d, one)
  wide = Reshape (wide_0d, one)
  w = Add (wide, one)
  G = Div (Hk, w)
  r = Div (H, G)
  sub_heads = Mul (H, two)
  B = Shape <start = 0, end = 1> (query)
  S = Shape <start = 1, end = 2> (query)
  T = Add (past_length, S)
  rS = Mul (r, S)

  # RoPE, in [B, S, heads, d]
  cos_rows = Gather <axis = 0> (cos, position_ids)
  sin_rows = Gather <axis = 0> (sin, position_ids)
  cos_t = Unsqueeze (cos_rows, two)
  sin_t = Unsqueeze (sin_rows, two)
  query_f = Cast <to = 1> (query)
  query_shape = Concat <axis = 0> (B, S, sub_heads, rest)
  query_4d = Reshape (query_f, query_shape)
  q1, q2 = Split <axis = -1, num_outputs = 2> (query_4d)
  q1_cos = Mul (q1, cos_t)
  q2_sin = Mul (q2, sin_t)
  q2_cos = Mul (q2, cos_t)
  q1_sin = Mul (q1, sin_t)
  q_low = Sub (q1_cos, q2_sin)
  q_high = Add (q2_cos, q1_sin)
  query_rotated = Concat <axis = -1> (q_low, q_high)
  kv_shape = Concat <axis = 0> (B, S, Hk, rest)
  key_f = Cast <to = 1> (key)
  key_4d = Reshape (key_f, kv_shape)
  k1, k2 = Split <axis = -1, num_outputs = 2> (key_4d)
  k1_cos = Mul (k1, cos_t)
  k2_sin = Mul (k2, sin_t)
  k2_cos = Mul (k2, cos_t)
  k1_sin = Mul (k1, sin_t)
  k_low = Sub (k1_cos, k2_sin)
  k_high = Add (k2_cos, k1_sin)
  key_rotated = Concat <axis = -1> (k_low, k_high)

  # The cache: what was, what is new, and what the buffer holds beyond (nothing when it grows)
  key_rows = Transpose <perm = [0, 2, 1, 3]> (key_rotated)
  value_4d = Reshape (value, kv_shape)
  value_rows = Transpose <perm = [0, 2, 1, 3]> (value_4d)
@APPEND
  # Both branches' scores: [B, G, 2, r*S, d] x [B, G, w, d, T]; with w = 1 the branches share the key
  query_6d_shape = Concat <axis = 0> (B, S, G, r, two, rest)
  query_6d = Reshape (query_rotated, query_6d_shape)
  query_t = Transpose <perm = [0, 2, 4, 3, 1, 5]> (query_6d)
  query_5d_shape = Concat <axis = 0> (B, G, two, rS, rest)
  query_5d = Reshape (query_t, query_5d_shape)
  query_scaled = Mul (query_5d, scale_f)
  cache_5d_shape = Concat <axis = 0> (B, G, w, T, rest)
  key_5d = Reshape (key_all_f, cache_5d_shape)
  key_t = Transpose <perm = [0, 1, 2, 4, 3]> (key_5d)
  scores = MatMul (query_scaled, key_t)
  scores_6d_shape = Concat <axis = 0> (B, G, two, r, S, T)
  scores_6d = Reshape (scores, scores_6d_shape)

  # One mask for all heads: [B, 1, S, T], causal in the cache's order and without padding
  T_0d = Squeeze (T, zero)
  S_0d = Squeeze (S, zero)
  key_index = Range (zero_0d, T_0d, one_0d)
  step_index = Range (zero_0d, S_0d, one_0d)
  query_index = Add (step_index, past_length)
  query_index_t = Unsqueeze (query_index, one)
  causal = LessOrEqual (key_index, query_index_t)
  mask_bool = Cast <to = 9> (attention_mask)
  mask_axes = Constant <value_ints = [1, 2]> ()
  mask_4d = Unsqueeze (mask_bool, mask_axes)
  visible = And (causal, mask_4d)
  visible_5d = Unsqueeze (visible, one)
  visible_6d = Unsqueeze (visible_5d, one)
  masked = Where (visible_6d, scores_6d, hidden)
  both = Softmax <axis = -1> (masked)

  # A1 - lambda A2: [B, G, r, S, T]
  a1, a2 = Split <axis = 2, num_outputs = 2> (both)
  signal = Squeeze (a1, two)
  noise = Squeeze (a2, two)
  lambda_f = Cast <to = 1> (lambda)
  ones_3d = Constant <value_ints = [1, 1, 1]> ()
  lambda_3d = Expand (lambda_f, ones_3d)
  lambda_shape_tail = Concat <axis = 0> (zero, zero, G, r)
  lambda_4d = Reshape (lambda_3d, lambda_shape_tail)
  lambda_t = Transpose <perm = [0, 2, 3, 1]> (lambda_4d)
  lambda_5d = Unsqueeze (lambda_t, rest)
  noise_scaled = Mul (noise, lambda_5d)
  difference = Sub (signal, noise_scaled)
  seen = Where (visible_5d, difference, zero_f)

  # One product with V for both halves of a wide value: [B, G, 1, r*S, T] x [B, G, w, T, d]
  seen_5d_shape = Concat <axis = 0> (B, G, one, rS, T)
  seen_5d = Reshape (seen, seen_5d_shape)
  value_5d = Reshape (value_all_f, cache_5d_shape)
  mixed = MatMul (seen_5d, value_5d)
  mixed_6d_shape = Concat <axis = 0> (B, G, w, r, S, rest)
  mixed_6d = Reshape (mixed, mixed_6d_shape)
  mixed_t = Transpose <perm = [0, 4, 1, 3, 2, 5]> (mixed_6d)
  head_shape = Concat <axis = 0> (B, S, H, rest)
  heads = Reshape (mixed_t, head_shape)

  # Head norm over the w*d of a head
  squared = Mul (heads, heads)
  mean = ReduceMean <keepdims = 1> (squared, rest)
  mean_eps = Add (mean, eps_f)
  root = Sqrt (mean_eps)
  normed = Div (heads, root)
  has_norm = Greater (eps_f, zero_f)
  result = Where (has_norm, normed, heads)
  out_shape = Concat <axis = 0> (B, S, rest)
  out_f = Reshape (result, out_shape)
  out = CastLike (out_f, query)
}
"""


# How the cache grows: for the keys, and again for the values with their name in place of "key"
_GROW = """
  key_past = Slice (past_key, zero, past_length, two)
  key_all = Concat <axis = 2> (key_past, key_new)
  key_beyond = Slice (past_key, T, end, two)
  present_key = Concat <axis = 2> (key_all, key_beyond)
"""
_APPEND_FLOAT = f"""
  key_new = CastLike (key_rows, past_key)
{_GROW}
  key_all_f = Cast <to = 1> (key_all)
"""
_APPEND_INT8 = f"""
  key_rows_f = Cast <to = 1> (key_rows)
  key_magnitude = Abs (key_rows_f)
  key_largest = ReduceMax <keepdims = 1> (key_magnitude, rest)
  key_step = Div (key_largest, levels)
  key_no_step = Equal (key_step, zero_f)
  key_divisor = Where (key_no_step, one_f, key_step)
  key_divided = Div (key_rows_f, key_divisor)
  key_rounded = Round (key_divided)
  key_clipped = Clip (key_rounded, least, levels)
  key_new = Cast <to = 3> (key_clipped)
{_GROW}
  key_scale_new = Squeeze (key_step, rest)
  key_scale_past = Slice (past_key_scale, zero, past_length, two)
  key_scale_all = Concat <axis = 2> (key_scale_past, key_scale_new)
  key_scale_beyond = Slice (past_key_scale, T, end, two)
  present_key_scale = Concat <axis = 2> (key_scale_all, key_scale_beyond)
  key_codes_f = Cast <to = 1> (key_all)
  key_scale_4d = Unsqueeze (key_scale_all, rest)
  key_all_f = Mul (key_codes_f, key_scale_4d)
"""
_INT8_CONSTANTS = """
  one_f = Constant <value_float = 1.0> ()
  levels = Constant <value_float = 127.0> ()
  least = Constant <value_float = -127.0> ()
"""


def body(cache: Cache = "float") -> str:
    """The op's body in ONNX's own syntax."""
    int8 = cache == "int8"
    append = _APPEND_INT8 if int8 else _APPEND_FLOAT
    parts = {
        "@INPUTS": ", past_key_scale, past_value_scale" if int8 else "",
        "@OUTPUTS": ", present_key_scale, present_value_scale" if int8 else "",
        "@APPEND": (_INT8_CONSTANTS if int8 else "") + append + append.replace("key", "value"),
    }
    text = _BODY
    for mark, part in parts.items():
        text = text.replace(mark, part)
    return text


def function(cache: Cache = "float") -> onnx_ir.Function:
    """The op's body as an ONNX model-local function: what runs wherever no native library is registered.

    A model's caches are all of one kind: the body for an int8 cache has two more inputs and outputs.
    """
    import onnx.parser
    from onnx_ir import serde

    return serde.deserialize_function(onnx.parser.parse_function(body(cache)))


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lam: torch.Tensor,
    past_key: torch.Tensor,
    past_value: torch.Tensor,
    past_length: int,
    position_ids: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    attention_mask: torch.Tensor,
    past_key_scale: torch.Tensor | None = None,
    past_value_scale: torch.Tensor | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    wide_value: bool,
    scale: float,
    norm_eps: float,
) -> tuple[torch.Tensor, ...]:
    """The op in torch: inputs and outputs as in the module's docstring, past_length as a plain int.

    Computes in float32, or in float64 when `query` is float64 (then it is its own oracle's precision). What goes into
    a cache of another type than float64 is computed in float32 in either case: the cache's numbers are the same.
    """
    import torch

    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    batch, steps, _ = query.shape
    d = key.shape[-1] // num_kv_heads
    width = 2 if wide_value else 1
    groups = num_kv_heads // width
    pairs = num_heads // groups
    total = past_length + steps

    def rotate(x: torch.Tensor) -> torch.Tensor:  # [B, S, heads, d]
        c, s = (table[position_ids].to(x.dtype).unsqueeze(2) for table in (cos, sin))
        low, high = x.chunk(2, -1)
        return torch.cat((low * c - high * s, high * c + low * s), -1)

    def append(past: torch.Tensor, new: torch.Tensor) -> torch.Tensor:  # [B, Hk, C, ...], [B, Hk, S, ...]
        return torch.cat((past[:, :, :past_length], new.to(past.dtype), past[:, :, total:]), 2)

    def grow(
        past: torch.Tensor, scale: torch.Tensor | None, rows: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:  # rows [B, S, Hk, d] -> both buffers, [B, Hk, T, d]
        rows = rows.transpose(1, 2)
        if scale is None:
            present = append(past, rows)
            return present, None, present[:, :, :total].to(dtype)
        step = rows.float().abs().amax(-1, keepdim=True) / 127
        step = torch.where(step.isfinite(), step, torch.nan)
        codes = torch.round(rows.float() / torch.where(step == 0, 1, step)).clamp(-127, 127).nan_to_num()
        present, scale = append(past, codes), append(scale, step.squeeze(-1))
        return present, scale, present[:, :, :total].to(dtype) * scale[:, :, :total, None].to(dtype)

    cached = torch.float64 if past_key.dtype == torch.float64 else torch.float32
    q = rotate(query.to(dtype).view(batch, steps, 2 * num_heads, d)).view(batch, steps, groups, pairs, 2, d)
    key_rows = rotate(key.to(cached).view(batch, steps, num_kv_heads, d))
    present_key, key_scale, k = grow(past_key, past_key_scale, key_rows)
    present_value, value_scale, v = grow(past_value, past_value_scale, value.view(batch, steps, num_kv_heads, d))
    k = k.reshape(batch, groups, width, total, d).expand(-1, -1, 2, -1, -1)
    v = v.reshape(batch, groups, width, total, d)

    causal = torch.arange(total, device=query.device) <= torch.arange(past_length, total, device=query.device)[:, None]
    visible = (causal & attention_mask.bool()[:, None, :])[:, None, None]  # [B, 1, 1, S, T]
    probabilities = []
    for branch in range(2):
        scores = torch.einsum("bsgrd,bgtd->bgrst", q[:, :, :, :, branch], k[:, :, branch]) * scale
        shares = torch.softmax(scores.masked_fill(~visible, float("-inf")), -1)
        probabilities.append(torch.where(visible, shares, 0.0))  # a row that sees nothing is NaN until here
    lam = lam.to(dtype).expand(batch, steps, num_heads) if lam.dim() == 1 else lam.to(dtype)
    lam = lam.view(batch, steps, groups, pairs).permute(0, 2, 3, 1).unsqueeze(-1)  # [B, G, r, S, 1]
    out = torch.einsum("bgrst,bgwtd->bsgrwd", probabilities[0] - lam * probabilities[1], v)
    out = out.reshape(batch, steps, num_heads, width * d)
    if norm_eps > 0:
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + norm_eps)
    scales = () if key_scale is None or value_scale is None else (key_scale, value_scale)
    return out.reshape(batch, steps, num_heads * width * d).to(query.dtype), present_key, present_value, *scales
