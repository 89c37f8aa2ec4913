"""Low-bit attention against slow versions: logits row by row, keys, values and products token by token."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from diffbit.models import Decoder, KVCache, ModelConfig, causal_mask, rope_for
from diffbit.models.layers.state import LayerCache
from diffbit.ops.kv_cache import LEVELS, THRESHOLDS, quantized_tokens
from diffbit.quantize import AttentionScheme, Scheme, apply
from diffbit.quantize.attention import LowBitAttention, quantize_logits, set_attention

VARIANTS = ["softmax", "diff_v1", "diff_v2"]
SCHEMES = {
    "cache fp16": AttentionScheme(keys="fp16", values="fp16"),
    "cache int8": AttentionScheme(keys="int8", values="int8"),
    "products int8": AttentionScheme(qk="int8"),
    "q int4, keys int8 to int4": AttentionScheme(qk="int4", keys="int8"),
    "cache int4": AttentionScheme(keys="int4", values="int4", window=5),
    "cache int3": AttentionScheme(keys="int3", values="int3", window=5, first=16),
    "cache int2, no float16 tokens": AttentionScheme(keys="int2", values="int2", window=0, first=0),
    "q int8, keys int2, values int8": AttentionScheme(qk="int8", keys="int2", values="int8", window=0, first=1),
    "q int4, values int4": AttentionScheme(qk="int4", values="int4", window=16),
    "values int2 alone": AttentionScheme(values="int2", window=1),
    "probabilities of 4 bits": AttentionScheme(probabilities=4),
    "probabilities of 8 bits, cache int4": AttentionScheme(probabilities=8, keys="int4", values="int4", window=5),
}


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_each_query_row_has_its_own_scale(bits):
    logits = torch.randn(2, 3, 5, 7, generator=torch.Generator().manual_seed(0)) * 20
    valid = torch.ones(5, 7, dtype=torch.bool).tril(2)[None, None]
    logits[..., 6] = 1e4  # seen by the last query only: no other row may scale by it
    got = quantize_logits(logits, valid, bits)
    levels = 2 ** (bits - 1) - 1
    for index in torch.cartesian_prod(torch.arange(2), torch.arange(3), torch.arange(5)).tolist():
        seen = valid[0, 0, index[2]]
        row = logits[tuple(index)][seen].tolist()
        step = max(abs(value) for value in row) / levels
        expected = [round(value / step) * step for value in row]
        torch.testing.assert_close(got[tuple(index)][seen], torch.tensor(expected), rtol=1e-5, atol=1e-5)


def test_rows_of_zeros_and_rows_that_see_nothing():
    logits = torch.tensor([[0.0, 0.0], [3.0, -5.0]])[None, None]
    valid = torch.tensor([[True, True], [False, False]])[None, None]
    got = quantize_logits(logits, valid, 4)
    assert got.isfinite().all() and (got[0, 0, 0] == 0).all()


@pytest.mark.parametrize("attention", ["softmax", "diff_v1", "diff_v2"])
def test_a_scheme_sets_it_on_every_layer(attention):
    torch.manual_seed(0)
    config = ModelConfig.uniform(
        vocab_size=50, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=64,
        attention=attention,
    )  # fmt: skip
    decoder = Decoder(config).eval()
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(5 if parameter.dim() == 2 else 1)
    ids = torch.randint(50, (2, 24))
    exact = decoder(ids)
    errors = [
        (apply(decoder, Scheme(attention=AttentionScheme(bits)))(ids) - exact).norm() / exact.norm()
        for bits in (3, 5, 8, 16)
    ]
    assert errors[0] > 1.5 * errors[1] > 2 * errors[2] > 2 * errors[3]
    assert errors[3] < 1e-3
    assert all(layer.self_attn.logits_hook is None for layer in decoder.model.layers)


def one_layer(attention: str) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(
        ModelConfig.uniform(
            vocab_size=50, hidden_size=32, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=32,
            intermediate_size=32, attention=attention,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(20 if "q_proj" in name or "k_proj" in name else 5)
    return decoder.eval()


def slow_row(x: Tensor, bits: int) -> tuple[list[int], float]:
    """Codes and step of symmetric rounding."""
    top = 2 ** (bits - 1) - 1
    step = x.float().abs().max() / top
    return [round(value) for value in (x.float() / step).tolist()], float(step)


def slow_rotated(row: Tensor) -> Tensor:
    """A row of 32 numbers times the Hadamard matrix, in the order of sums of a fast transform."""
    numbers = row.float()
    for distance in (1, 2, 4, 8, 16):
        numbers = torch.stack([
            numbers[i] + numbers[i + distance] if not i & distance else numbers[i - distance] - numbers[i]
            for i in range(32)
        ])  # fmt: skip
    return numbers * (1 / math.sqrt(32))


@lru_cache
def slow_codes(rows: Tensor, place: int) -> tuple[list[int], float]:
    """Codes of 8 bits of a rotated row, and their step in float16."""
    rotated = slow_rotated(rows[place])
    step = float((rotated.abs().max() / 127).half())
    return [max(-127, min(127, round(value))) for value in (rotated / step).tolist()], step


@lru_cache
def slow_rows(rows: Tensor) -> list[Tensor]:
    """The rotated rows [d] in float16 of a cache; cached, because every query asks for them."""
    return [slow_rotated(row).half().float() for row in rows]


@lru_cache
def slow_offset(rows: Tensor) -> Tensor:
    """The mean of the rotated rows 16 to 31."""
    sums = slow_rows(rows)[16:32]
    while len(sums) > 1:
        half = len(sums) // 2
        sums = [a + b for a, b in zip(sums[:half], sums[half:], strict=True)]
    return (sums[0] / 16).half().float()


@lru_cache
def slow_levels(rows: Tensor, place: int, bits: int, has_offset: bool) -> tuple[list[int], float]:
    """Levels and scale of a row of the rotated cache, without the offset."""
    row = slow_rows(rows)[place]
    n, unit = slow_row(row - slow_offset(rows) if has_offset else row, 8)
    deviation = math.sqrt(sum(x * x for x in n) / len(n))
    levels = [LEVELS[bits][sum(x / deviation > threshold for threshold in THRESHOLDS[bits])] for x in n]
    scale = unit * sum(x * level for x, level in zip(n, levels, strict=True)) / sum(level**2 for level in levels)
    return levels, float(torch.tensor(scale).half())


def slow_logit(query: Tensor, key: Tensor, place: int, length: int, scheme: AttentionScheme) -> float:
    """Of one query [d], scaled, and key[place] [T, d], while the cache holds `held` tokens."""
    bits = {"float": 32, "fp16": 16, "int8": 8, "int4": 4, "int3": 3, "int2": 2}[scheme.key_format]
    if bits >= 16:
        return float(query.double() @ (key[place] if bits == 32 else key[place].half()).double())
    query = slow_rotated(query)
    if bits == 8:
        codes, step = slow_codes(key, place)
        if not scheme.query_bits:
            return sum(q * code * step for q, code in zip(query.tolist(), codes, strict=True))
        query_codes, query_step = slow_row(query, scheme.query_bits)
        return sum(a * b for a, b in zip(query_codes, codes, strict=True)) * query_step * step
    if not scheme.first <= place < quantized_tokens(length, scheme.window):
        return float(query.double() @ slow_rows(key)[place].double())
    levels, scale = slow_levels(key, place, bits, True)
    offset = float(query.double() @ slow_offset(key).double())
    if not scheme.query_bits:
        return offset + sum(q * level for q, level in zip(query.tolist(), levels, strict=True)) * scale
    query_codes, query_step = slow_row(query, scheme.query_bits)
    return offset + sum(a * b for a, b in zip(query_codes, levels, strict=True)) * query_step * scale


def slow_value(rows: Tensor, place: int, length: int, scheme: AttentionScheme) -> Tensor:
    """Row `place` [d] of the value cache [T, d]."""
    row = rows[place]
    if scheme.value_format == "float":
        return row.double()
    if scheme.value_format == "int8":
        codes, step = slow_codes(rows, place)
        return slow_rotated(torch.tensor(codes) * step).double()
    if scheme.value_format == "fp16":
        return row.half().double()
    rotated = slow_rows(rows)[place]
    if scheme.first <= place < quantized_tokens(length, scheme.window):
        levels, scale = slow_levels(rows, place, {"int4": 4, "int3": 3, "int2": 2}[scheme.value_format], False)
        rotated = torch.tensor(levels) * scale
    return slow_rotated(rotated).double()  # back: the transform is its own inverse


def slow_head(query: Tensor, key: Tensor, values: list[Tensor], seen: Tensor, scale: float, scheme: Any) -> Tensor:
    """query [S, d], key [T, d], rows of a value [T, d] each, seen bool [S, T] -> [S, e]."""
    total, outputs = len(key), []
    for step, row in enumerate(query):
        length = total - len(query) + step + 1
        places = [place for place in range(length) if seen[step, place]]
        out = torch.zeros(sum(value.shape[1] for value in values)).double()
        if places:
            logits = [slow_logit(row.float() * scale, key, place, length, scheme) for place in places]
            shares = torch.tensor(logits).double().softmax(0)
            if scheme.probabilities:
                step_size = float(shares.max()) / (2**scheme.probabilities - 1)
                shares = torch.tensor([round(share / step_size) * step_size for share in shares.tolist()])
            for share, place in zip(shares, places, strict=True):
                out += share * torch.cat([slow_value(value, place, length, scheme) for value in values])
        outputs.append(out)
    return torch.stack(outputs)


def test_each_layer_has_its_own_formats() -> None:
    """And a layer that reads the keys and values of another one, those of that one."""
    (layer,) = one_layer("softmax").config.layers
    reader = replace(layer, mixer=replace(layer.mixer, keys_of=1))
    decoder = Decoder(replace(one_layer("softmax").config, layers=(layer, layer, reader)))
    set_attention(decoder, AttentionScheme(values="int3", layers=((1, "int8", "int2"),)))
    found = [block.self_attn.arithmetic.scheme for block in decoder.model.layers]
    assert [(scheme.key_format, scheme.value_format) for scheme in found] == [
        ("float", "int3"),
        ("int8", "int2"),
        ("int8", "int2"),
    ]


@pytest.mark.parametrize("attention", VARIANTS)
@pytest.mark.parametrize("name", SCHEMES)
@torch.inference_mode()
def test_every_head_is_that_of_slow_loops(attention: str, name: str) -> None:
    """Grouped heads, padding in the past and a query that sees nothing, two new tokens onto 69 cached ones."""
    scheme, past, length = SCHEMES[name], 69, 2
    decoder = one_layer(attention)
    set_attention(decoder, scheme)
    layer: Any = decoder.model.layers[0].self_attn
    heads = decoder.config.layers[0].mixer.cache_heads
    keys, values, total = (
        torch.randn(2, heads, past + length, 32),
        torch.randn(2, heads, past + length, 32),
        past + length,
    )
    keys[:, :, :, 3] += 4  # a channel and a token that differ from the others
    keys[:, :, 40] *= 3
    cache = LayerCache(keys.clone(), values.clone())
    cache.length = past
    x = torch.randn(2, length, 32)
    padding = torch.ones(2, total, dtype=torch.long)
    padding[0, :5] = 0
    padding[1, : past + 1] = 0  # its first new token sees nothing
    rope, mask = rope_for(decoder.config, torch.arange(past, total)[None]), causal_mask(length, past, padding)
    if attention == "softmax":
        got = [layer.heads(x, rope, mask, cache, {}).unflatten(-1, (-1, 32)).transpose(1, 2)]
    else:
        got = layer.branches(*layer.projected(x, rope, cache, {}), mask)
    query = queries(layer, x, rope)
    groups = decoder.config.layers[0].mixer.num_kv_heads
    for row in range(2):
        for head in range(query.shape[1]):
            group = head * groups // query.shape[1]
            key, value = group, [group]
            if attention == "diff_v1":
                key, value = 2 * group + head % 2, [2 * group, 2 * group + 1]
            real = padding[row].bool()  # the cache is of these: padding is as if it were not there
            asked, expected = real[past:], torch.zeros(length, 32 * len(value)).double()
            rows, seen = [cache.value[row, index][real] for index in value], mask[row, 0][asked][:, real]
            expected[asked] = slow_head(
                query[row, head][asked], cache.key[row, key][real], rows, seen, layer.scale, scheme
            )
            actual = got[0][row, head] if attention == "softmax" else got[head % 2][row, head // 2]
            torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=2e-5)
    assert not got[0][1, :, 0].any()


def queries(layer: Any, x: Tensor, rope: Any) -> Tensor:
    """Rotated, [B, heads, S, d]."""
    cos, sin = (table.unsqueeze(2) for table in rope)
    low, high = layer.q_proj(x).unflatten(-1, (-1, layer.head_dim)).chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1).transpose(1, 2)


@pytest.mark.parametrize("attention", VARIANTS)
@pytest.mark.parametrize("name", SCHEMES)
@torch.inference_mode()
def test_a_prompt_in_pieces_gives_the_same_logits(attention: str, name: str) -> None:
    """What a query sees of the cache depends on its place alone: 97 tokens at once, in three calls, and by one."""
    decoder = one_layer(attention).double()  # the same codes in any order of summation
    set_attention(decoder, SCHEMES[name])
    ids = torch.randint(50, (2, 97), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(2, 97, dtype=torch.long)
    mask[1, :7] = 0
    once = decoder(ids, attention_mask=mask)
    for cuts in ([40, 23, 34], [64] + [1] * 33):
        cache = KVCache(decoder.config, 2, 97, dtype=torch.float64)
        begin, parts = 0, []
        for count in cuts:
            end = begin + count
            parts.append(decoder(ids[:, begin:end], cache=cache, attention_mask=mask[:, :end]))
            begin = end
        torch.testing.assert_close(torch.cat(parts, 1)[mask.bool()], once[mask.bool()], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", VARIANTS)
@pytest.mark.parametrize("name", ["cache int2, no float16 tokens", "q int4, values int4"])
@torch.inference_mode()
def test_a_padded_row_gives_the_same_logits_alone(attention: str, name: str) -> None:
    """A prompt of unequal rows, padded in front, behind and within, then steps of which a row may have none."""
    decoder, long, short, steps = one_layer(attention).double(), 75, 40, 3
    set_attention(decoder, SCHEMES[name])
    ids = torch.randint(50, (4, long + steps), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(4, long + steps, dtype=torch.long)
    mask[1, : long - short] = 0
    mask[2, short:long] = 0
    mask[3, 10 : 10 + long - short], mask[3, -1] = 0, 0
    cache = KVCache(decoder.config, 4, long + steps, dtype=torch.float64)
    got = [decoder(ids[:, :long], attention_mask=mask[:, :long], cache=cache)]
    for place in range(long, long + steps):
        got.append(decoder(ids[:, place : place + 1], attention_mask=mask[:, : place + 1], cache=cache))
    for row, (in_batch, counts) in enumerate(zip(torch.cat(got, 1), mask.bool(), strict=True)):
        alone = decoder(ids[row][counts][None])[0]
        torch.testing.assert_close(in_batch[counts], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", SCHEMES)
def test_half_precision_is_computed_in_float32(dtype: torch.dtype, name: str) -> None:
    arithmetic = LowBitAttention(SCHEMES[name])
    query, key = torch.randn(1, 4, 3, 32).to(dtype), torch.randn(1, 2, 70, 32).to(dtype)
    value, shares = torch.randn(1, 2, 70, 64).to(dtype), torch.randn(1, 4, 3, 70).softmax(-1)
    logits, mixed = arithmetic.logits(query, key, 0.2, 0), arithmetic.mix(shares, value, 32)
    assert logits.dtype == mixed.dtype == torch.float32
    assert torch.equal(logits, arithmetic.logits(query.float(), key.float(), 0.2, 0))
    assert torch.equal(mixed, arithmetic.mix(shares, value.float(), 32))


@pytest.mark.parametrize("attention", VARIANTS)
@torch.inference_mode()
def test_fewer_bits_err_more(attention: str) -> None:
    decoder = one_layer(attention)
    ids = torch.randint(50, (2, 97), generator=torch.Generator().manual_seed(1))
    exact = decoder(ids)

    def error(**scheme: Any) -> float:
        quantized = apply(decoder, Scheme(attention=AttentionScheme(**scheme)))
        return float((quantized(ids) - exact).norm() / exact.norm())

    eight, four, two = (error(keys=format, values=format) for format in ("int8", "int4", "int2"))
    assert 0 < eight < four / 3 < two / 6
    assert error(keys="int2", window=64) < error(keys="int2", window=0)
    assert error(keys="int2", window=97) < eight  # float16, all of it
    products = [error(qk="int8", keys=format) for format in ("int8", "int4", "int2")]
    assert products[0] < products[1] / 3 < products[2] / 6
    assert error(qk="int4") > error(keys="int4")
    shares = [error(probabilities=bits) for bits in (8, 4, 2)]
    assert 0 < shares[0] < shares[1] / 6 < shares[2] / 12
