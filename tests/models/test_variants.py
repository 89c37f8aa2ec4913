"""The attention variants: fused against explicit, version 2 against its equations, masks, cache, gradients."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from diffbit import DiffbitError, models
from diffbit.models.families import family_for
from diffbit.models.layers.rope import inverse_frequencies
from diffbit.models.mixers import Place

from .helpers import small_config, tokens

VARIANTS = ("diff_v1", "diff_v2", "softmax")  # of the core; tests/apps/variants has the others


@torch.no_grad()
def decoder(attention: str, **changes: object) -> models.Decoder:
    torch.manual_seed(0)
    model = models.Decoder(small_config(attention, **changes))
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0, 0.15)
        elif "lambda" in name:
            parameter.normal_(0, 0.4)
    return model.eval()


def set_hook(model: models.Decoder, hook: object) -> None:
    for layer in model.model.layers:
        layer.self_attn.logits_hook = hook


def test_variants_are_the_files_of_the_folder_and_what_packages_add() -> None:
    files = (Path(models.__file__).parent / "attention").glob("[!_]*.py")
    assert {file.stem for file in files} == {*VARIANTS, "mla", "gdla"}
    assert {*VARIANTS, "retention"} <= set(models.variants()) and "mamba" not in models.variants()
    configs = [[small_config(name, sub_norms=norms) for name in VARIANTS] for norms in (False, True)]
    assert [[family_for(config).model_type for config in row] for row in configs] == [
        ["diffllama", "diff_llama_v2", "llama"],
        ["diffllama_bitnet", "diff_llama_v2_bitnet", "bitnet"],
    ]


@pytest.mark.parametrize("attention", VARIANTS)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_explicit_path_equals_fused(attention: str, kv_heads: int) -> None:
    """Prefill, a chunk after a cache and a single step, with padding: the hooked path gives the same logits."""
    model = decoder(attention, num_kv_heads=kv_heads, sub_norms=kv_heads == 2)
    ids = tokens(2, 10)
    mask = torch.ones(2, 10, dtype=torch.long)
    mask[0, :3] = 0
    outputs = []
    for hook in (None, lambda logits, valid: logits):
        set_hook(model, hook)
        plain = model(ids)
        cache = models.KVCache(model.config, 2, 10)
        pieces = [model(ids[:, a:b], cache=cache, attention_mask=mask[:, :b]) for a, b in ((0, 6), (6, 9), (9, 10))]
        outputs.append(torch.cat([plain, *pieces], dim=1))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", VARIANTS)
def test_hook_sees_scaled_logits_and_replaces_them(attention: str) -> None:
    model = decoder(attention)
    ids = tokens(2, 5)
    seen: list[Tensor] = []

    def hook(logits: Tensor, valid: Tensor) -> Tensor:
        assert logits.dtype == torch.float32 and valid.dtype == torch.bool
        assert torch.equal(valid.expand(2, 1, 5, 5)[0, 0], torch.ones(5, 5).tril().bool())
        seen.append(logits)
        return torch.zeros_like(logits)

    set_hook(model, hook)
    x = model.model.layers[0].input_layernorm(model.embed(ids))
    rope = models.rope_for(model.config, torch.arange(5)[None])
    attention_module = model.model.layers[0].self_attn
    out = attention_module(x, rope, None, None)
    heads = {"softmax": 4, "diff_v1": 8, "diff_v2": 8}[attention]
    assert seen[0].shape == (2, heads, 5, 5)
    # The first token sees only itself, so its own logit is q.k / sqrt d whatever the position.
    query, key = (p(x)[:, 0].unflatten(-1, (-1, 8)) for p in (attention_module.q_proj, attention_module.k_proj))
    sub_head = {"softmax": lambda h: h // 2, "diff_v1": lambda h: 2 * (h // 4) + h % 2, "diff_v2": lambda h: h // 4}
    for head in range(heads):
        expected = (query[:, head] * key[:, sub_head[attention](head)]).sum(-1) / math.sqrt(8)
        torch.testing.assert_close(seen[0][:, head, 0, 0], expected)
    # All logits zero: every softmax is the mean over what is visible, so the output is that of averaged values.
    set_hook(model, None)
    attention_module.q_proj.weight.zero_()
    torch.testing.assert_close(out, attention_module(x, rope, None, None), rtol=0, atol=1e-5)


def slow_diff_v2(x: Tensor, attention: torch.nn.Module, config: models.ModelConfig) -> Tensor:
    """Version 2 from its equations, one token and one head at a time, in float64; x [S, E]."""
    weights = {name: p.double() for name, p in attention.named_parameters()}
    mixer = config.layers[0].mixer
    d, half, heads_of_kv = mixer.head_dim, mixer.head_dim // 2, mixer.num_heads // mixer.num_kv_heads
    ratio = mixer.noise_ratio
    frequencies = inverse_frequencies(config.rope_width, config.rope_theta).double()

    def rotate(head: Tensor, position: int) -> Tensor:
        cos, sin = (position * frequencies).cos(), (position * frequencies).sin()
        return torch.cat((head[:half] * cos - head[half:] * sin, head[half:] * cos + head[:half] * sin))

    def heads(name: str, token: Tensor) -> list[Tensor]:
        return list((weights[f"{name}.weight"] @ token).split(d))

    rows = []
    for position, token in enumerate(x.double()):
        queries = [rotate(head, position) for head in heads("q_proj", token)]
        gate = weights["lambda_proj.weight"] @ token + weights.get("lambda_proj.bias", torch.zeros(1).double())
        attended = []
        for index, query in enumerate(queries):
            group = index // (ratio + 1) * ratio // heads_of_kv
            keys = [rotate(heads("k_proj", other)[group], place) for place, other in enumerate(x.double())]
            scores = torch.stack([query @ key / math.sqrt(d) for key in keys[: position + 1]]).softmax(0)
            values = torch.stack([heads("v_proj", other)[group] for other in x.double()[: position + 1]])
            attended.append(scores @ values)
        pairs = []
        for head in range(mixer.num_heads):
            first = head // ratio * (ratio + 1)  # of the group: R signal heads, then their noise head
            pairs.append(attended[first + head % ratio] - gate[head].sigmoid() * attended[first + ratio])
        rows.append(weights["o_proj.weight"] @ torch.cat(pairs))
    return torch.stack(rows)


@pytest.mark.parametrize(("kv_heads", "ratio", "bias"), [(1, 1, False), (2, 2, True), (4, 1, True), (1, 4, True)])
def test_diff_v2_is_its_equations(kv_heads: int, ratio: int, bias: bool) -> None:
    config = small_config("diff_v2", num_kv_heads=kv_heads, noise_ratio=ratio, lambda_bias=bias)
    torch.manual_seed(kv_heads)
    attention = config.layers[0].mixer.module(Place(0, 32))
    for parameter in attention.parameters():
        parameter.normal_(0, 0.3)
    x = torch.randn(1, 7, 32)
    out = attention(x, models.rope_for(config, torch.arange(7)[None]), None, None)
    torch.testing.assert_close(out[0].double(), slow_diff_v2(x[0], attention, config), rtol=0, atol=1e-5)


def test_noise_heads_are_shared_within_a_kv_head() -> None:
    with pytest.raises(DiffbitError, match="noise_ratio is 4, wanted a divisor of 2, the number of heads per kv head"):
        small_config("diff_v2", noise_ratio=4)
    with pytest.raises(DiffbitError, match="noise_ratio is 2, but softmax has no such option"):
        small_config("softmax", noise_ratio=2)
    shared, paired = (small_config("diff_v2", noise_ratio=ratio) for ratio in (2, 1))
    assert family_for(shared).model_type == "diffbit"
    assert "noise_ratio" not in paired.to_dict()["layers"][0]["mixer"]  # as in files of earlier versions
    assert models.ModelConfig.from_dict(shared.to_dict()) == shared


@pytest.mark.parametrize("attention", VARIANTS)
def test_padding_anywhere(attention: str) -> None:
    """Holes in the mask are as if the tokens were not there, and queries that see nothing stay finite."""
    model = decoder(attention)
    ids = tokens(1, 9)
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 0]])
    logits = model(ids, attention_mask=mask)
    assert logits.isfinite().all()
    real = mask[0].bool()
    torch.testing.assert_close(logits[:, real], model(ids[:, real]), rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", VARIANTS)
def test_gradients_of_both_paths_agree(attention: str) -> None:
    with torch.enable_grad():
        gradients = []
        for hook in (None, lambda logits, valid: logits):
            model = decoder(attention)
            set_hook(model, hook)
            model(tokens(2, 6)).logsumexp(-1).sum().backward()
            gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        assert gradient is not None and gradient.abs().max() > 0, name
        torch.testing.assert_close(gradient, gradients[1][name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("attention", VARIANTS)
def test_cache_of_lower_precision_and_its_end(attention: str) -> None:
    model = decoder(attention)
    ids = tokens(2, 6)
    cache = models.KVCache(model.config, 2, 6, dtype=torch.float16)
    heads = {"softmax": 2, "diff_v1": 4, "diff_v2": 2}[attention]
    assert cache.layers[0].key.shape == cache.layers[0].value.shape == (2, heads, 6, 8)
    address = cache.layers[0].key.data_ptr()
    steps = torch.cat([model(ids[:, i : i + 1], cache=cache) for i in range(6)], dim=1)
    assert cache.layers[0].key.data_ptr() == address
    torch.testing.assert_close(steps, model(ids), rtol=0, atol=3e-2)
    with pytest.raises(DiffbitError, match="holds 6 tokens and 7 are needed"):
        model(ids[:, :1], cache=cache)
    cache.reset()
    torch.testing.assert_close(model(ids[:, :1], cache=cache), steps[:, :1])


def test_lambda_stays_float32() -> None:
    """Rounding the exp() terms to bfloat16 moves lambda by thousandths; casting the model must not."""
    model = decoder("diff_v1")
    before = [layer.self_attn.lambda_value().item() for layer in model.model.layers]
    model.to(torch.bfloat16)
    attention = model.model.layers[1].self_attn
    assert attention.q_proj.weight.dtype == torch.bfloat16 and attention.lambda_q1.dtype == torch.float32
    assert [layer.self_attn.lambda_value().item() for layer in model.model.layers] == before
    exact = math.exp(attention.lambda_q1.double() @ attention.lambda_k1.double())
    exact -= math.exp(attention.lambda_q2.double() @ attention.lambda_k2.double())
    assert before[1] == pytest.approx(exact + 0.8 - 0.6 * math.exp(-0.3), abs=1e-6)
    assert attention.out_scale == pytest.approx(0.2 + 0.6 * math.exp(-0.3))
    assert decoder("softmax").model.layers[1].self_attn.out_scale == 1.0


@pytest.mark.parametrize("attention", VARIANTS)
def test_sub_norms_stand_before_both_output_projections(attention: str) -> None:
    """What o_proj and down_proj read has the size of the norms' weights, over all heads and channels together."""
    model = decoder(attention, sub_norms=True, mlp="relu2")
    layer = model.model.layers[1]
    norms = {layer.self_attn.o_proj: layer.self_attn.attn_sub_norm, layer.mlp.down_proj: layer.mlp.ffn_sub_norm}
    read: dict[torch.nn.Module, Tensor] = {}
    for linear, norm in norms.items():
        norm.weight.uniform_(0.5, 1.5)
        linear.register_forward_hook(lambda linear, arguments, _: read.__setitem__(linear, arguments[0]))
    ids = tokens(2, 7)
    before = model(ids)
    for linear, norm in norms.items():
        assert norm.weight.shape == (linear.in_features,)
        size = (read[linear] / norm.weight).square().mean(-1)
        torch.testing.assert_close(size, torch.ones_like(size), rtol=0, atol=0.05)
    gate, up = (
        p(layer.post_attention_layernorm(tokens(2, 32).float())) for p in (layer.mlp.gate_proj, layer.mlp.up_proj)
    )
    torch.testing.assert_close(layer.mlp.act(gate) * up, gate.clamp(min=0) ** 2 * up)
    for factor in (layer.self_attn.v_proj, layer.mlp.up_proj):
        factor.weight.mul_(8)
    torch.testing.assert_close(model(ids), before, rtol=0, atol=0.05)  # up to the norms' epsilon


@pytest.mark.parametrize("attention", VARIANTS)
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("sub_norms", [False, True])
def test_num_parameters(attention: str, tied: bool, sub_norms: bool) -> None:
    config = small_config(attention, tie_embeddings=tied, sub_norms=sub_norms)
    d, e, h, kv = 8, 32, 4, 2
    rows = {"softmax": (h + 2 * kv + h) * d, "diff_v1": (2 * h + 4 * kv + 2 * h) * d, "diff_v2": (3 * h + 2 * kv) * d}
    extra = {"softmax": 0, "diff_v1": 4 * d, "diff_v2": h * e}[attention]
    norms = 2 * e + (48 + (2 if attention == "diff_v1" else 1) * h * d if sub_norms else 0)
    per_layer = rows[attention] * e + extra + 3 * 48 * e + norms
    assert models.num_parameters(config) == 2 * per_layer + 61 * e * (1 if tied else 2) + e


@pytest.mark.parametrize("attention", VARIANTS)
@pytest.mark.parametrize("sub_norms", [False, True])
def test_piecewise_equals_whole(attention: str, sub_norms: bool) -> None:
    model = decoder(attention, sub_norms=sub_norms)
    ids = tokens(2, 7)
    x, rope = model.embed(ids), models.rope_for(model.config, torch.arange(7).expand(2, 7))
    for layer in model.model.layers:
        x = layer(x, rope, models.causal_mask(7))
    torch.testing.assert_close(model.head(x), model(ids), rtol=0, atol=0)
    cos, sin = models.rope_tables(model.config, 7)
    assert torch.equal(cos, rope[0][0]) and torch.equal(sin, rope[1][0]) and cos.dtype == torch.float32


@pytest.mark.parametrize("attention", ["diff_v1", "diff_v2"])
def test_a_fused_function_replaces_both_branches(attention: str) -> None:
    """It gets what its type says; with a mask or a cache, or if it returns None, layers compute as without it."""
    model, ids = decoder(attention), tokens(2, 6)
    plain, calls = model(ids), []

    def fused(query: Tensor, key: Tensor, value: Tensor, lam: Tensor, scale: float, eps: float) -> Tensor | None:
        calls.append([tuple(tensor.shape) for tensor in (query, key, value, lam)])
        return None if answer is None else torch.full((2, 6, 4, value.shape[-1]), answer)

    for layer in model.model.layers:
        layer.self_attn.fused = fused
    answer = None
    assert torch.equal(model(ids), plain) and len(calls) == 2
    keys, width = (4, 16) if attention == "diff_v1" else (2, 8)
    assert calls[0] == [(2, 6, 8, 8), (2, 6, keys, 8), (2, 6, 2, width), (2, 4, 6)]
    answer = 0.5
    assert (model(ids) - plain).abs().max() > 0.01 and len(calls) == 4
    model(ids, attention_mask=torch.ones(2, 6))
    model(ids, cache=models.KVCache(model.config, 2, 6))
    assert len(calls) == 4


def test_wrong_mask_length_is_refused() -> None:
    with pytest.raises(ValueError, match=r"wanted \[batch, 5\]"):
        decoder("softmax")(tokens(1, 5), attention_mask=torch.ones(1, 4))
