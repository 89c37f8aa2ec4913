"""The body of DiffAttention in ONNX's own syntax, put together for a kind; ops/diff_attention.py has the meaning.

The text comes in pieces, one for each thing that kinds differ in. Shapes stand beside the lines: n = branches, w = 1 +
wide_value, G = kv heads that hold a value, r = H/G heads that share one. `before` tokens of the past and `after` of the
present are on grids; the `strip` of tokens between them is at hand as codes and as floats.

There is one mask for all heads, and for S = 1 no tensor grows faster than T. Whatever runs ONNX has what is used here,
browsers included: no float16 arithmetic, and products of codes are float32's, exact up to 2^24.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .diff_attention import Kind

_HEAD = """
<domain: "diffbit", opset_import: ["" : 21]>
@NAME
  <num_heads, num_kv_heads, branches, wide_value, scale, norm_eps, key_bits, value_bits, query_bits, window,
   spec_version@LOGIT_BITS>
  (@INPUTS)
  => (@OUTPUTS)
{
  zero = Constant <value_ints = [0]> ()
  one = Constant <value_ints = [1]> ()
  two = Constant <value_ints = [2]> ()
  rest = Constant <value_ints = [-1]> ()
  end = Constant <value_ints = [9223372036854775807]> ()
  zero_0d = Constant <value_int = 0> ()
  one_0d = Constant <value_int = 1> ()
  zero_f = Constant <value_float = 0.0> ()
  one_f = Constant <value_float = 1.0> ()
  hidden = Constant <value_float = -1e30> ()
  heads_0d = Constant <value_int: int = @num_heads> ()
  kv_heads_0d = Constant <value_int: int = @num_kv_heads> ()
  wide_0d = Constant <value_int: int = @wide_value> ()
  scale_f = Constant <value_float: float = @scale> ()
  eps_f = Constant <value_float: float = @norm_eps> ()
  n = Constant <value_ints = [@BRANCHES]> ()
  H = Reshape (heads_0d, one)
  Hk = Reshape (kv_heads_0d, one)
  wide = Reshape (wide_0d, one)
  w = Add (wide, one)
  G = Div (Hk, w)
  r = Div (H, G)
  sub_heads = Mul (H, n)
  B = Shape <start = 0, end = 1> (query)
  S = Shape <start = 1, end = 2> (query)
  T = Add (past_length, S)
  rS = Mul (r, S)
  kd = Shape <start = 2, end = 3> (key)
  d = Div (kd, Hk)
  cos_rows = Gather <axis = 0> (cos, position_ids)
  sin_rows = Gather <axis = 0> (sin, position_ids)
  cos_t = Unsqueeze (cos_rows, two)
  sin_t = Unsqueeze (sin_rows, two)
  query_shape = Concat <axis = 0> (B, S, sub_heads, rest)
  key_shape = Concat <axis = 0> (B, S, Hk, rest)
"""

# The new rows: [B, Hk, S, d]. The queries, scaled: [B, G, n, r*S, d]
_ROWS = """
  key_rows = Transpose <perm = [0, 2, 1, 3]> (key_rotated)
  value_4d = Reshape (value, key_shape)
  value_rows = Transpose <perm = [0, 2, 1, 3]> (value_4d)
  query_6d_shape = Concat <axis = 0> (B, S, G, r, n, rest)
  query_6d = Reshape (query_rotated, query_6d_shape)
  query_t = Transpose <perm = [0, 2, 4, 3, 1, 5]> (query_6d)
  query_5d_shape = Concat <axis = 0> (B, G, n, rS, rest)
  query_5d = Reshape (query_t, query_5d_shape)
  query_scaled = Mul (query_5d, scale_f)
"""

# One mask for all heads: [B, 1, S, T], causal in the cache's order and without padding
_MASK = """
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
"""


def _rotate(x: str) -> str:
    """RoPE of query or key, in [B, S, heads, d]."""
    return f"""
  {x}_f = Cast <to = 1> ({x})
  {x}_4d = Reshape ({x}_f, {x}_shape)
  {x}_1, {x}_2 = Split <axis = -1, num_outputs = 2> ({x}_4d)
  {x}_1_cos = Mul ({x}_1, cos_t)
  {x}_2_sin = Mul ({x}_2, sin_t)
  {x}_2_cos = Mul ({x}_2, cos_t)
  {x}_1_sin = Mul ({x}_1, sin_t)
  {x}_first = Sub ({x}_1_cos, {x}_2_sin)
  {x}_second = Add ({x}_2_cos, {x}_1_sin)
  {x}_rotated = Concat <axis = -1> ({x}_first, {x}_second)
"""


def _round_rows(x: str, axis: int, bits: int) -> str:
    """Rows x [..., d] of float32 -> x_step [..., 1] and x_codes [..., d], integers in float32.

    `axis` is the last: where there are no rows, ONNX Runtime reduces no axis that is counted from behind (1.18, 1.31).
    """
    return f"""
  {x}_axis = Constant <value_ints = [{axis}]> ()
  {x}_top = Constant <value_float = {2 ** (bits - 1) - 1}.0> ()
  {x}_bottom = Neg ({x}_top)
  {x}_magnitude = Abs ({x})
  {x}_largest = ReduceMax <keepdims = 1> ({x}_magnitude, {x}_axis)
  {x}_step = Div ({x}_largest, {x}_top)
  {x}_no_step = Equal ({x}_step, zero_f)
  {x}_divisor = Where ({x}_no_step, one_f, {x}_step)
  {x}_divided = Div ({x}, {x}_divisor)
  {x}_rounded = Round ({x}_divided)
  {x}_codes = Clip ({x}_rounded, {x}_bottom, {x}_top)
"""


def _grow(x: str, old: str = "past_length", new: str = "T") -> str:
    """A buffer from `old` to `new` slots: what was, x_new, and what lies behind (nothing when it grows)."""
    return f"""
  {x}_past = Slice (past_{x}, zero, {old}, two)
  {x}_all = Concat <axis = 2> ({x}_past, {x}_new)
  {x}_behind = Slice (past_{x}, {new}, end, two)
  present_{x} = Concat <axis = 2> ({x}_all, {x}_behind)
"""


def _append_floats(x: str) -> str:
    """16 bits: x_floats [B, Hk, T, d]."""
    return f"""
  {x}_new = CastLike ({x}_rows, past_{x})
{_grow(x)}
  {x}_floats = Cast <to = 1> ({x}_all)
"""


def _append_rows(x: str) -> str:
    """8 bits: x_codes [B, Hk, T, d] and x_scale_all [B, Hk, T]."""
    return f"""
  {x}_new_f = Cast <to = 1> ({x}_rows)
{_round_rows(f"{x}_new_f", 3, 8)}
  {x}_new = Cast <to = 3> ({x}_new_f_codes)
{_grow(x)}
  {x}_scale_new = Squeeze ({x}_new_f_step, rest)
{_grow(f"{x}_scale")}
  {x}_codes = Cast <to = 1> ({x}_all)
"""


def _settled(x: str, count: str) -> str:
    """Of `count` tokens, x are on grids, in x_groups groups."""
    return f"""
  {x}_old = Sub ({count}, window_1d)
  {x}_old_or_none = Max ({x}_old, zero)
  {x}_groups = Div ({x}_old_or_none, group)
  {x} = Mul ({x}_groups, group)
"""


# What keys and values on grids share. coded [S, strip]: does the token of the call read the strip's token as a code?
_STRIP = f"""
  window_0d = Constant <value_int: int = @window> ()
  window_1d = Reshape (window_0d, one)
  group = Constant <value_ints = [32]> ()
  d_groups = Div (d, group)
{_settled("before", "past_length")}
{_settled("after", "T")}
  query_count = Add (query_index_t, one)
{_settled("end_of_query", "query_count")}
  strip = Sub (after, before)
  strip_groups = Div (strip, group)
  recent_past = Sub (past_length, before)
  recent_present = Sub (T, after)
  strip_index = Slice (key_index, before, after, zero)
  coded = Less (strip_index, end_of_query)
  low_parts = Concat <axis = 0> (before, strip)
  high_parts = Concat <axis = 0> (strip, recent_present)
  all_parts = Concat <axis = 0> (before, strip, recent_present)
"""


def _unpack(x: str, bits: int) -> str:
    """x_packed [groups, bytes] -> x_fields [groups, 8/bits * bytes]: place by place and in two dimensions, which takes
    half the time of one BitShift that broadcasts."""
    text, places = f"\n  {x}_mask = Constant <value = uint8[1] {{{2**bits - 1}}}> ()", range(8 // bits)
    for i in places:
        shifted = f"{x}_packed"
        if i:
            shifted = f"{x}_shifted_{i}" if i < places[-1] else f"{x}_field_{i}"  # in the last there is nothing to mask
            text += f"""
  {x}_shift_{i} = Constant <value = uint8[1] {{{i * bits}}}> ()
  {shifted} = BitShift <direction = "RIGHT"> ({x}_packed, {x}_shift_{i})"""
        if i < places[-1]:
            text += f"\n  {x}_field_{i} = BitwiseAnd ({shifted}, {x}_mask)"
    return f"{text}\n  {x}_fields = Concat <axis = 1> ({', '.join(f'{x}_field_{i}' for i in places)})"


def _append_grids(x: str, bits: int) -> str:
    """4 or 2 bits: x_floats [B, Hk, T - before, d], and codes of `after` tokens in blocks, for keys
    [B, Hk, after/32, 32, d], for values [B, Hk, after, d/32, 32], with x_steps and x_points that broadcast to them.

    The strip is rounded in such blocks, too. Packed, the channels that share a byte are those that lie one below the
    other in [B, Hk, tokens, d/32, 8/bits, 4*bits].
    """
    key = x == "key"
    shifts = range(0, 8, bits)
    strip_block = "strip_groups, group, d" if key else "strip, d_groups, group"
    block = "after_groups, group, d" if key else "after, d_groups, group"
    # grids lie as [..., 2, d] or [..., 2, d/32]; keys' blocks have them so, values' the other way round
    join = f"{x}_scale_new = Concat <axis = 3> ({x}_step_half, {x}_point_half)"
    split = f"{x}_steps, {x}_points = Split <axis = 3, num_outputs = 2> ({x}_scale_f)"
    if not key:
        join = f"""{x}_scale_t = Concat <axis = 4> ({x}_step_half, {x}_point_half)
  {x}_scale_new = Transpose <perm = [0, 1, 2, 4, 3]> ({x}_scale_t)"""
        split = f"""{x}_scale_all_t = Transpose <perm = [0, 1, 2, 4, 3]> ({x}_scale_f)
  {x}_steps, {x}_points = Split <axis = 4, num_outputs = 2> ({x}_scale_all_t)"""
    return f"""
  {x}_rows_half = Cast <to = 10> ({x}_rows)
  {x}_recent_past = Slice (past_{x}_recent, zero, recent_past, two)
  {x}_recent_all = Concat <axis = 2> ({x}_recent_past, {x}_rows_half)
  {x}_recent_kept = Slice ({x}_recent_all, strip, end, two)
  {x}_recent_behind = Slice (past_{x}_recent, recent_present, end, two)
  present_{x}_recent = Concat <axis = 2> ({x}_recent_kept, {x}_recent_behind)
  {x}_floats = Cast <to = 1> ({x}_recent_all)

  {x}_strip = Slice ({x}_floats, zero, strip, two)
  {x}_strip_shape = Concat <axis = 0> (B, Hk, {strip_block})
  {x}_blocks = Reshape <allowzero = 1> ({x}_strip, {x}_strip_shape)
  {x}_top = Constant <value_float = {2**bits - 1}.0> ()
  {x}_axis = Constant <value_ints = [{3 if key else 4}]> ()
  {x}_point = ReduceMin <keepdims = 1> ({x}_blocks, {x}_axis)
  {x}_largest = ReduceMax <keepdims = 1> ({x}_blocks, {x}_axis)
  {x}_range = Sub ({x}_largest, {x}_point)
  {x}_step_exact = Div ({x}_range, {x}_top)
  {x}_step_half = Cast <to = 10> ({x}_step_exact)
  {x}_point_half = Cast <to = 10> ({x}_point)
  {x}_step = Cast <to = 1> ({x}_step_half)
  {x}_no_step = Equal ({x}_step, zero_f)
  {x}_divisor = Where ({x}_no_step, one_f, {x}_step)
  {x}_above = Sub ({x}_blocks, {x}_point)
  {x}_divided = Div ({x}_above, {x}_divisor)
  {x}_rounded = Round ({x}_divided)
  {x}_clipped = Clip ({x}_rounded, zero_f, {x}_top)

  {x}_places = Constant <value_ints = [{len(shifts)}]> ()
  {x}_bytes = Constant <value_ints = [{4 * bits}]> ()
  {x}_weights = Constant <value = float[{len(shifts)}, 1] {{{", ".join(str(1 << shift) for shift in shifts)}}}> ()
  {x}_parts_shape = Concat <axis = 0> (B, Hk, strip, d_groups, {x}_places, {x}_bytes)
  {x}_parts = Reshape <allowzero = 1> ({x}_clipped, {x}_parts_shape)
  {x}_weighted = Mul ({x}_parts, {x}_weights)
  {x}_place_axis = Constant <value_ints = [4]> ()
  {x}_sums = ReduceSum <keepdims = 0> ({x}_weighted, {x}_place_axis)
  {x}_width = Mul (d_groups, {x}_bytes)
  {x}_new_shape = Concat <axis = 0> (B, Hk, strip, {x}_width)
  {x}_new_f = Reshape <allowzero = 1> ({x}_sums, {x}_new_shape)
  {x}_new = Cast <to = 2> ({x}_new_f)
{_grow(x, "before", "after")}
  {join}
{_grow(f"{x}_scale", *(("before_groups", "after_groups") if key else ("before", "after")))}
  {x}_packed_shape = Concat <axis = 0> (rest, {x}_bytes)
  {x}_packed = Reshape <allowzero = 1> ({x}_all, {x}_packed_shape)
{_unpack(x, bits)}
  {x}_fields_f = Cast <to = 1> ({x}_fields)
  {x}_codes_shape = Concat <axis = 0> (B, Hk, {block})
  {x}_codes = Reshape <allowzero = 1> ({x}_fields_f, {x}_codes_shape)
  {x}_scale_f = Cast <to = 1> ({x}_scale_all)
  {split}
"""


def _append(x: str, bits: int) -> str:
    return _append_floats(x) if bits == 16 else _append_rows(x) if bits == 8 else _append_grids(x, bits)


def _restore(x: str) -> str:
    """The numbers on grids: x_low [B, G, w, after, d]."""
    return f"""
  {x}_scaled = Mul ({x}_codes, {x}_steps)
  {x}_restored = Add ({x}_scaled, {x}_points)
  {x}_low_shape = Concat <axis = 0> (B, G, w, after, d)
  {x}_low = Reshape <allowzero = 1> ({x}_restored, {x}_low_shape)
"""


def _products(result: str, query: str, keys: str) -> str:
    """[B, G, n, r*S, d] x [B, G, w, d, keys]; with w = 1 the branches share the key."""
    return f"""
  key_5d_shape = Concat <axis = 0> (B, G, w, rest, d)
  key_5d = Reshape ({keys}, key_5d_shape)
  key_t = Transpose <perm = [0, 1, 2, 4, 3]> (key_5d)
  {result} = MatMul ({query}, key_t)
"""


def _scores(key_bits: int, query_bits: int) -> str:
    """scores_6d [B, G, n, r, S, T], before any mask."""
    if key_bits < 8:
        return _grid_scores(key_bits, query_bits)
    query = "query_scaled_codes" if query_bits else "query_scaled"
    if key_bits == 16:
        text = _products("scores", query, "key_floats")
    else:
        text = _products("dots", query, "key_codes")
        if query_bits:
            text = f"{_round_rows('query_scaled', 4, query_bits)}{text}\n  dots_scaled = Mul (dots, query_scaled_step)"
        text += f"""
  key_scale_shape = Concat <axis = 0> (B, G, w, one, rest)
  key_scale_5d = Reshape (key_scale_all, key_scale_shape)
  scores = Mul ({"dots_scaled" if query_bits else "dots"}, key_scale_5d)
"""
    return f"""
{text}
  scores_shape = Concat <axis = 0> (B, G, n, r, S, T)
  scores_6d = Reshape (scores, scores_shape)
"""


def _grid_scores(key_bits: int, query_bits: int) -> str:
    """Codes below `before`, floats from `after` on, and in the strip what the query's place says."""
    return f"""
{_integer_products(key_bits, query_bits) if query_bits else _FLOAT_PRODUCTS}
{_products("high", "query_scaled", "key_floats")}
  low_shape = Concat <axis = 0> (B, G, n, r, S, after)
  low_6d = Reshape <allowzero = 1> (low, low_shape)
  high_shape = Concat <axis = 0> (B, G, n, r, S, rest)
  high_6d = Reshape (high, high_shape)
  low_before, low_strip = Split <axis = -1> (low_6d, low_parts)
  high_strip, high_after = Split <axis = -1> (high_6d, high_parts)
  strip_6d = Where (coded, low_strip, high_strip)
  scores_6d = Concat <axis = -1> (low_before, strip_6d, high_after)
"""


_FLOAT_PRODUCTS = f"""
{_restore("key")}
  key_low_t = Transpose <perm = [0, 1, 2, 4, 3]> (key_low)
  low = MatMul (query_scaled, key_low_t)
"""


def _integer_products(key_bits: int, query_bits: int) -> str:
    """The steps of a block of 32 keys go to the query's side: [B, G, n, blocks, r*S, d] x [B, G, w, blocks, d, 32]. Its
    points meet the query as it is: [B, G, w, blocks, d] x [B, G, n, d, r*S]; and the middle of a key's codes meets what
    the query lost when it was rounded."""
    return f"""
  three = Constant <value_ints = [3]> ()
  key_codes_shape_6d = Concat <axis = 0> (B, G, w, after_groups, group, d)
  key_codes_6d = Reshape <allowzero = 1> (key_codes, key_codes_shape_6d)
  key_codes_t = Transpose <perm = [0, 1, 2, 3, 5, 4]> (key_codes_6d)
  key_steps_shape = Concat <axis = 0> (B, G, w, after_groups, one, d)
  key_steps_6d = Reshape <allowzero = 1> (key_steps, key_steps_shape)
  query_scaled_6d = Unsqueeze (query_scaled, three)
  stepped = Mul (query_scaled_6d, key_steps_6d)
{_round_rows("stepped", 5, query_bits)}
  dots = MatMul (stepped_codes, key_codes_t)
  dots_scaled = Mul (dots, stepped_step)
  key_points_shape = Concat <axis = 0> (B, G, w, after_groups, d)
  key_points_5d = Reshape <allowzero = 1> (key_points, key_points_shape)
  query_columns = Transpose <perm = [0, 1, 2, 4, 3]> (query_scaled)
  at_points = MatMul (key_points_5d, query_columns)
  at_points_6d = Unsqueeze (at_points, rest)
  stepped_back = Mul (stepped_codes, stepped_step)
  stepped_error = Sub (stepped, stepped_back)
  lost = ReduceSum <keepdims = 1> (stepped_error, stepped_axis)
  middle = Constant <value_float = {(2**key_bits - 1) / 2}> ()
  at_middle = Mul (lost, middle)
  offsets = Add (at_points_6d, at_middle)
  low_blocks = Add (dots_scaled, offsets)
  low = Transpose <perm = [0, 1, 2, 4, 3, 5]> (low_blocks)
"""


def _softmax(logit_bits: int) -> str:
    """shares [B, G, n, r, S, T]; a row that sees nothing has anything."""
    logits, text = "scores_6d", ""
    if logit_bits:
        logits = "logits"
        text = f"""
  seen_scores = Where (visible_6d, scores_6d, zero_f)
{_round_rows("seen_scores", 5, logit_bits)}
  logits = Mul (seen_scores_codes, seen_scores_step)
"""
    return f"""
{text}
  masked = Where (visible_6d, {logits}, hidden)
  shares = Softmax <axis = -1> (masked)
"""


# A1 - lambda A2: [B, G, r, S, T]
_PAIR = """
  a1, a2 = Split <axis = 2, num_outputs = 2> (shares)
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
  weights = Where (visible_5d, difference, zero_f)
"""
_SINGLE = """
  signal = Squeeze (shares, two)
  weights = Where (visible_5d, signal, zero_f)
"""


def _mix(result: str, weights: str, values: str, tokens: str) -> str:
    """[B, G, r, S, tokens] x [B, G, w, tokens, d] -> [B, G, w, r*S, d]: one product for both halves of a wide value."""
    return f"""
  {result}_weights_shape = Concat <axis = 0> (B, G, one, rS, {tokens})
  {result}_weights = Reshape <allowzero = 1> ({weights}, {result}_weights_shape)
  {result}_values_shape = Concat <axis = 0> (B, G, w, {tokens}, d)
  {result}_values = Reshape <allowzero = 1> ({values}, {result}_values_shape)
  {result} = MatMul ({result}_weights, {result}_values)
"""


def _mixed(value_bits: int) -> str:
    """mixed [B, G, w, r*S, d]."""
    if value_bits == 16:
        return _mix("mixed", "weights", "value_floats", "T")
    if value_bits == 8:
        return """
  value_scale_shape = Concat <axis = 0> (B, G, w, one, T)
  value_scale_5d = Reshape (value_scale_all, value_scale_shape)
  weights_shape = Concat <axis = 0> (B, G, one, rS, T)
  weights_5d = Reshape (weights, weights_shape)
  weights_stepped = Mul (weights_5d, value_scale_5d)
  value_codes_shape = Concat <axis = 0> (B, G, w, T, d)
  value_codes_5d = Reshape (value_codes, value_codes_shape)
  mixed = MatMul (weights_stepped, value_codes_5d)
"""
    return f"""
  weights_before, weights_strip, weights_after = Split <axis = -1> (weights, all_parts)
  weights_coded = Where (coded, weights_strip, zero_f)
  weights_not_coded = Where (coded, zero_f, weights_strip)
  weights_low = Concat <axis = -1> (weights_before, weights_coded)
  weights_high = Concat <axis = -1> (weights_not_coded, weights_after)
{_restore("value")}
  not_before = Sub (T, before)
{_mix("mixed_low", "weights_low", "value_low", "after")}
{_mix("mixed_high", "weights_high", "value_floats", "not_before")}
  mixed = Add (mixed_low, mixed_high)
"""


# The heads in their places, and the norm over the w*d of a head
_TAIL = """
  mixed_6d_shape = Concat <axis = 0> (B, G, w, r, S, rest)
  mixed_6d = Reshape (mixed, mixed_6d_shape)
  mixed_t = Transpose <perm = [0, 4, 1, 3, 2, 5]> (mixed_6d)
  head_shape = Concat <axis = 0> (B, S, H, rest)
  heads = Reshape (mixed_t, head_shape)
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


def body(kind: Kind, inputs: Sequence[str], outputs: Sequence[str]) -> str:
    """The text for a kind, as the function's `inputs` and `outputs`, of which kind has a use for some."""
    grids = min(kind.key_bits, kind.value_bits) < 8
    nothing = (name for name in outputs if name not in kind.outputs)  # a function has to make what it declares
    text = [
        _HEAD,
        _rotate("query"),
        _rotate("key"),
        _ROWS,
        _MASK,
        _STRIP if grids else "",
        _append("key", kind.key_bits),
        _append("value", kind.value_bits),
        *(f"  {name} = Constant <value_float = 0.0> ()\n" for name in nothing),
        _scores(kind.key_bits, kind.query_bits),
        _softmax(kind.logit_bits),
        _PAIR if kind.branches == 2 else _SINGLE,
        _mixed(kind.value_bits),
        _TAIL,
    ]
    marks = {
        "@NAME": kind.name,
        "@LOGIT_BITS": ", logit_bits" if kind.logit_bits else "",
        "@INPUTS": ", ".join(inputs),
        "@OUTPUTS": ", ".join(outputs),
        "@BRANCHES": str(kind.branches),
    }
    found = "".join(text)
    for mark, part in marks.items():
        found = found.replace(mark, part)
    return found
