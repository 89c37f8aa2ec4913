"""The cost of a token: operations against torch's own count, bytes against the weights of a real artifact."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from diffbit.apps.evaluate.cost import token_cost
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.models import Decoder, ModelConfig, save
from diffbit.models.layers.arithmetic import Arithmetic
from diffbit.models.torch_cache import KVCache
from diffbit.ops.diff_attention_reference import cached
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint, step_bytes
from diffbit.quantize.device_cache import cache_spec
from diffbit.runtime import Artifact

from ...configs import resized

CONFIG = ModelConfig.uniform(
    vocab_size=160, hidden_size=128, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, intermediate_size=256,
    max_position=256,
)  # fmt: skip
TERNARY = Scheme(weights=parse_format("ternary"))


@pytest.mark.parametrize(("attention", "tied"), [("softmax", False), ("diff_v1", True), ("diff_v2", False)])
def test_float_operations_are_those_that_torch_counts(attention: str, tied: bool) -> None:
    """One step at a context of 41; torch multiplies both branches of diff_v1 by the values, the operator their
    difference."""
    config, context = resized(CONFIG, attention=attention, tie_embeddings=tied), 41
    torch.manual_seed(0)
    decoder, cache = Decoder(config), KVCache(config, 1, context)
    for layer in decoder.model.layers:
        layer.self_attn.arithmetic = Arithmetic()  # step by step: matrix products that are counted
    with torch.inference_mode():
        decoder(torch.randint(160, (1, context - 1)), cache=cache)
        with FlopCounterMode(display=False) as counter:
            decoder(torch.randint(160, (1, 1)), cache=cache)
    counted = counter.get_total_flops() // 2
    twice = 2 * 2 * 64 * context if attention == "diff_v1" else 0  # layers * pairs * 2d * T
    assert token_cost(config, None, context).floating == counted - twice


def test_by_hand() -> None:
    """diff_v2, ternary but for the head: every number of the sum written out."""
    config = resized(CONFIG, attention="diff_v2", sub_norms=True, mlp="relu2")
    cost = token_cost(config, TERNARY, context=100, dtype="float32")
    qkvo, mlp, layers = (128 + 32 + 32) * 128 + 128 * 64, 3 * 128 * 256, 2
    assert cost.ternary == layers * (qkvo + mlp) and cost.integer == 0
    attention = 2 * 4 * 32 * 100  # 4 sub-heads, q k^T and the values
    assert cost.floating == layers * (attention + 2 * 128) + 160 * 128  # lambda_proj and the head
    norms = layers * (128 + 128 + 64 + 256) + 128
    rounded = layers * 2 * (128 * 3 + 64 + 128 * 2 + 256 + (128 + 32 + 32 + 128) + (256 + 256 + 128))
    rope, softmax, difference, gate, sums = 2 * (128 + 32), 2 * 4 * 100, 64, 2 * 256, 2 * 128
    assert cost.other == 2 * norms + rounded + layers * (rope + softmax + difference + gate + sums)
    codes = layers * (qkvo + mlp + 128 * 64) // 4 + layers * 7 * 4  # o_proj's rows of 64 fill blocks of 128
    assert cost.weight_bytes == codes + 4 * (layers * 2 * 128 + 160 * 128 + norms + 128)
    assert cost.cache_bytes == layers * 2 * 32 * 4 * (100 + 1)


def write(folder: Path, config: ModelConfig, scheme: Scheme, dtype: str) -> Path:
    from tokenizers import Tokenizer, models

    torch.manual_seed(0)
    save(Decoder(config), folder / "model")
    words = {f"w{i}": i for i in range(config.vocab_size)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "model" / "tokenizer.json"))
    quantize_checkpoint(folder / "model", folder / "quantized", scheme)
    return export_artifact(folder / "quantized", folder / "artifact", dtype=dtype)


@pytest.mark.parametrize(
    ("attention", "format", "dtype", "tied"),
    [
        ("softmax", "ternary", "fp32", False),
        ("diff_v1", "int4_g32", "fp16", True),
        ("diff_v2", "ternary", "fp32", False),
    ],
)
def test_bytes_are_those_of_a_real_artifact(
    attention: str, format: str, dtype: str, tied: bool, tmp_path: Path
) -> None:
    """All weights in model.onnx.data but the embedding, of which a row is read, and the tables of RoPE."""
    heads = 4 if attention == "softmax" else 2  # rows of 128 everywhere but in diff_v2's o_proj
    config = resized(CONFIG, attention=attention, num_heads=heads, num_kv_heads=heads // 2, tie_embeddings=tied)
    scheme = Scheme(weights=parse_format(format), attention=AttentionScheme(keys="int8", values="int8"))
    artifact = Artifact.open(write(tmp_path, config, scheme, dtype))
    part_bytes = {part.name: part.bytes for part in artifact.parts}
    read = sum(part_bytes.get(name, 0) for name in (f"{format} codes", "scales", "head", "lambda", "norms"))
    width = 4 if dtype == "fp32" else 2
    read += part_bytes["embedding, head"] if tied else 0
    short = 2 * 128 * 64 // 4 if format == "ternary" and attention == "diff_v2" else 0
    cost = token_cost(config, scheme, 64, f"float{8 * width}")
    assert cost.weight_bytes == read + 128 * width + short
    assert cost.weight_bytes <= artifact.files["model.onnx.data"].bytes
    # and a cache of 64 tokens, to which one is written
    assert cost.cache_bytes * 64 / 65 == artifact.cache.nbytes(64)
    assert artifact.bytes_per_token(64) == read + artifact.cache.nbytes(64)


@pytest.mark.parametrize("window", [0, 32])
def test_a_low_bit_cache_is_read_as_it_lies(window: int) -> None:
    scheme = AttentionScheme(keys="int4", values="int2", window=window)
    context = 128 + window
    per_token = cache_spec(CONFIG, scheme, "float16").bytes_per_1k_tokens / 1000
    row = 2 * 32 * 2  # of both layers in float16: keys or values
    first = 4 * 2 * row + row  # with the offset of the keys; the codes of first tokens are not read
    assert step_bytes(CONFIG, scheme, "float16", context) == per_token * (128 - 4 + 1) + 2 * row * (window + 1) + first


@pytest.mark.parametrize("sliding_window", [0, 64])
@pytest.mark.parametrize("first", [0, 4])
def test_a_token_is_read_once_from_a_low_bit_cache(first: int, sliding_window: int) -> None:
    """What step_bytes counts, beside the tokens that the reference reads as codes and those that it reads as floats."""
    mixer = replace(CONFIG.layers[0].mixer, sliding_window=sliding_window)
    config = replace(CONFIG, layers=tuple(replace(layer, mixer=mixer) for layer in CONFIG.layers))
    scheme, context, width = AttentionScheme(keys="int4", values="int3", window=8, first=first), 150, 32
    if sliding_window:
        first = 0
    rows = cached(torch.randn(1, 1, context, width), 1, "int4", 8, first, True)
    seen = torch.arange(context) >= (context - sliding_window if sliding_window else 0)
    codes, floats = int((rows.coded[0] & seen).sum()), int((~rows.coded[0] & seen).sum())
    offset = 2 * width  # bytes
    code = width * 4 // 8 + 2 + width * 3 // 8 + 2  # with their scales, keys and values
    expected = len(config.layers) * ((codes + 1) * code + (floats + 1) * 2 * 2 * width + offset)
    assert step_bytes(config, scheme, "float16", context) == expected


def test_integers_where_the_operator_rounds() -> None:
    """int4 weights meet int8 activations, nf4 ones floats; with qk int8, q k^T is integers: half of attention."""
    weights = token_cost(CONFIG, TERNARY, 10).ternary
    for format, kind in (("int4_g32", "integer"), ("nf4", "floating")):
        cost = token_cost(CONFIG, Scheme(weights=parse_format(format)), 10)
        assert getattr(cost, kind) >= weights and cost.ternary == 0
    exact = token_cost(CONFIG, None, 10)
    low = token_cost(CONFIG, Scheme(attention=AttentionScheme(qk="int8")), 10)
    assert low.integer == exact.floating - low.floating == 2 * 2 * 32 * 10


def test_a_hadamard_transform_is_counted() -> None:
    v2 = Scheme(weights=parse_format("ternary"), activations="int4")
    more = token_cost(CONFIG, v2, 10).other - token_cost(CONFIG, TERNARY, 10).other
    assert more == 2 * (64 * 6 + 64 + 256 * 8 + 256)  # o_proj and down_proj of two layers
    assert token_cost(CONFIG, v2, 10).ternary == token_cost(CONFIG, TERNARY, 10).ternary
