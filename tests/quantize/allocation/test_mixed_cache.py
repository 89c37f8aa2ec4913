"""The mixed KV cache: its bytes beside a device's buffers, its losses beside those of models that are run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import pytest
import torch

from diffbit.calib_data import Windows, eval_windows
from diffbit.io.errors import DiffbitError
from diffbit.models import Checkpoint, Decoder, ModelConfig, load
from diffbit.ops.kv_cache import rotate
from diffbit.quantize import AttentionScheme, Scheme, apply
from diffbit.quantize.allocation import allocate_cache
from diffbit.quantize.allocation.mixed_cache import cache_sizes, estimate_cache, rounded, to_attention
from diffbit.quantize.calibration import Tokens
from diffbit.quantize.device_cache import cache_bits, cache_spec

from .small import divergence

CONFIG = ModelConfig.uniform(
    vocab_size=96, hidden_size=64, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32, intermediate_size=96,
    max_position=256, attention="softmax",
)  # fmt: skip


@pytest.fixture(scope="module")
def text(trained: Callable[[str], Path]) -> Windows:
    return eval_windows("stdlib", trained("softmax"), 128, 8, split="calib")


def bytes_a_token(config: ModelConfig, scheme: AttentionScheme) -> float:
    """What 32 more tokens take on a device: codes and scales, counted by hand."""
    bits = {"fp16": 16, "int8": 8, "int4": 4, "int3": 3, "int2": 2}
    scales = {"fp16": 0, "int8": 2, "int4": 2, "int3": 2, "int2": 2}
    formats = {layer: (keys, values) for layer, keys, values in scheme.layers}
    total = 0.0
    for index, layer in enumerate(config.layers):
        for format in formats.get(index, (scheme.keys, scheme.values)):
            assert format is not None
            total += layer.mixer.num_kv_heads * (layer.mixer.head_dim * bits[format] / 8 + scales[format])
    return total


def test_sizes_are_those_of_a_device() -> None:
    sizes, rest = cache_sizes(CONFIG, AttentionScheme())
    assert rest == 0 and len(sizes) == 6
    for keys, values in product(("fp16", "int8", "int4", "int3", "int2"), repeat=2):
        choice = {module: keys if module.endswith("keys") else values for module in sizes}
        choice["model.layers.1.self_attn values"] = "int8"
        scheme = to_attention(AttentionScheme(window=64), choice)
        nbytes = sum(sizes[module][format] for module, format in choice.items())
        assert nbytes == bytes_a_token(CONFIG, scheme)
        assert cache_spec(CONFIG, scheme, "float16").bytes_per_1k_tokens == nbytes * 1000
        assert cache_bits(CONFIG, scheme) == 8 * nbytes / (3 * 2 * 2 * 32)
        assert scheme.window == 64 and len(scheme.layers) == (values != "int8")


def test_layers_without_a_growing_cache_are_not_chosen_for() -> None:
    first, *others = CONFIG.layers
    ring = replace(first, mixer=replace(first.mixer, sliding_window=64))
    reader = replace(first, mixer=replace(first.mixer, keys_of=1))
    sizes, _ = cache_sizes(replace(CONFIG, layers=(ring, others[0], reader)), AttentionScheme())
    assert [*sizes] == ["model.layers.1.self_attn keys", "model.layers.1.self_attn values"]
    narrow = ModelConfig.uniform(**{**small(), "head_dim": 24})
    assert all([*row] == ["fp16", "int8"] for row in cache_sizes(narrow, AttentionScheme())[0].values())
    with pytest.raises(DiffbitError, match="no KV cache that grows"):
        cache_sizes(replace(CONFIG, layers=(ring,) * 3), AttentionScheme())


def small() -> dict[str, object]:
    return dict(vocab_size=96, hidden_size=64, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=64)


@pytest.mark.parametrize("format", ["int8", "int4", "int2"])
def test_errors_are_those_of_the_cache(format: str) -> None:
    """By hand: the codes of one block of keys, less their offset, in a cache without float16 tokens."""
    from diffbit.ops.kv_cache import encode_rows, levels_of, offset_of

    rows = torch.randn(1, 1, 64, 32) + 3
    found = rounded(rows, format, 0, True)
    if format == "int8":
        codes, scale = encode_rows(rotate(rows), 8)
        expected = rotate(codes * scale.float()[..., None])
    else:
        turned = rotate(rows).half()
        offset = offset_of(turned).float()[..., None, :]
        codes, scale = encode_rows(turned.float() - offset, int(format[3:]))
        expected = rotate(levels_of(codes, int(format[3:])) * scale.float()[..., None] + offset)
    torch.testing.assert_close(found, expected)
    assert torch.equal(rounded(rows, format, 20, False)[:, :, 32:], rows[:, :, 32:]) is (format != "int8")


@pytest.mark.parametrize("attention", ["softmax", "diff_v1", "diff_v2"])
def test_estimates_are_near_losses(attention: str, trained: Callable[[str], Path], text: Windows) -> None:
    """The sum over all layers, and each large loss of one layer, are within 3 times what running the model shows."""
    decoder, scheme = load(trained(attention)), AttentionScheme(window=8)
    sizes, _ = cache_sizes(decoder.config, scheme)
    tokens = Tokens(decoder.config, text.ids, text.mask)
    ids, mask = torch.from_numpy(text.ids), torch.from_numpy(text.mask)
    losses = estimate_cache(decoder, tokens, scheme, sizes)
    assert losses.keys() == sizes.keys() and all(module.arithmetic is None for module in attentions(decoder))
    for row in losses.values():
        assert 0 <= row["fp16"] < row["int8"] < row["int4"] < row["int3"] < row["int2"]

    def measured(scheme: AttentionScheme) -> float:
        return divergence(decoder, apply(decoder, Scheme(attention=scheme)), ids, mask)

    for format in ("int4", "int2"):
        uniform = measured(replace(scheme, keys=format, values=format))
        assert 1 / 3 < sum(row[format] for row in losses.values()) / uniform < 3
    largest = max(losses, key=lambda module: losses[module]["int3"])
    choice = {module: "int3" if module == largest else "fp16" for module in sizes}
    assert 1 / 3 < losses[largest]["int3"] / measured(to_attention(scheme, choice)) < 3


def attentions(decoder: Decoder) -> list[torch.nn.Module]:
    return [module for module in decoder.modules() if hasattr(module, "arithmetic")]


def test_the_budget_is_kept_and_spent_where_it_helps(trained: Callable[[str], Path], text: Windows) -> None:
    path = trained("softmax")
    config = Checkpoint(path).config
    scheme = AttentionScheme(window=8, first=2)
    uniform = replace(scheme, keys="int3", values="int3")
    budget = bytes_a_token(config, uniform)
    found = allocate_cache(path, budget, attention=scheme, calibration=text.ids, calibration_mask=text.mask)
    assert found.nbytes == bytes_a_token(config, found.attention) <= budget
    assert (found.attention.window, found.attention.first) == (8, 2)
    assert found.bits == pytest.approx(8 * found.nbytes / (budget * 8 / cache_bits(config, uniform)))
    decoder, ids, mask = load(path), torch.from_numpy(text.ids), torch.from_numpy(text.mask)

    def measured(choice: dict[str, str]) -> float:
        attention = to_attention(scheme, choice)
        assert bytes_a_token(config, attention) == found.nbytes
        return divergence(decoder, apply(decoder, Scheme(attention=attention)), ids, mask)

    modules, formats = [layer.name for layer in found.layers], [layer.format for layer in found.layers]
    others = [measured(dict(zip(modules, order, strict=True))) for order in {*permutations(formats)}]
    loss = measured(dict(zip(modules, formats, strict=True)))
    assert found.measured == pytest.approx(loss, rel=0.02)
    assert len(others) > 10 and loss <= sorted(others)[1]  # the same formats in other places
    values = found.to_dict()
    assert AttentionScheme.from_dict(values["attention"]) == found.attention
    assert sum(row["sizes"][row["format"]] for row in values["layers"]) == values["nbytes"]


@pytest.mark.parametrize("nbytes", [1, 10**9])
def test_budgets_out_of_reach_are_refused(nbytes: int, trained: Callable[[str], Path], text: Windows) -> None:
    with pytest.raises(DiffbitError, match=r"bytes a token cannot be reached: the formats give [\d,]+ to [\d,]+ bytes"):
        allocate_cache(trained("softmax"), nbytes, calibration=text.ids)
