"""Mamba and gated memory units against their equations, token by token; states, padding, chunks, gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from diffbit import DiffbitError, models
from diffbit.models import LayerSpec, ModelConfig
from diffbit.models.attention import diff_v1
from diffbit.models.mixers import Place, gmu, mamba
from diffbit.models.mlp import swiglu

from .helpers import VOCABULARY, tokens

MAMBA = mamba.Options(inner_size=12, state_size=5, conv_width=4, dt_rank=3)


def random_weights(module: torch.nn.Module) -> None:
    """Of a size at which every part shows, step sizes between 0.01 and 1."""
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("dt_proj.bias"):
                parameter.uniform_(-4, 0)
            elif name.endswith("A_log"):
                parameter.uniform_(-2, 3)
            elif "norm" not in name:
                parameter.normal_(0, 0.3)


def decoder() -> models.Decoder:
    mlp = swiglu.Options(40)
    attention = diff_v1.Options(num_heads=2, num_kv_heads=1, head_dim=8)
    layers = (LayerSpec(MAMBA, mlp), LayerSpec(attention, mlp), LayerSpec(MAMBA, mlp))
    model = models.Decoder(ModelConfig(vocab_size=VOCABULARY, hidden_size=32, layers=layers, max_position=64))
    random_weights(model)
    return model.eval()


def by_the_book(x: Tensor, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Heads [S, C] and memory of one sequence x [S, E], in float64, a token and a channel at a time."""
    channels, kept = MAMBA.inner_size, []
    h = torch.zeros(channels, MAMBA.state_size, dtype=torch.float64)
    heads, memory = [], []
    for token in x.double():
        u, z = (weights["in_proj.weight"] @ token).split(channels)
        kept.append(u)
        u = weights["conv1d.bias"].clone()
        for back, row in enumerate(reversed(kept[-MAMBA.conv_width :])):
            u += weights["conv1d.weight"][:, 0, MAMBA.conv_width - 1 - back] * row
        u = u * u.sigmoid()
        low = weights["x_proj.weight"] @ u
        d, b, c = low[:3], low[3:8], low[8:]
        size = (weights["dt_proj.weight"] @ d + weights["dt_proj.bias"]).exp().log1p()
        m = weights["D"] * u
        for channel in range(channels):
            for n in range(MAMBA.state_size):
                decay = math.exp(-size[channel] * math.exp(weights["A_log"][channel, n]))
                h[channel, n] = decay * h[channel, n] + size[channel] * b[n] * u[channel]
                m[channel] += c[n] * h[channel, n]
        memory.append(m)
        heads.append(m * z * z.sigmoid())
    return torch.stack(heads), torch.stack(memory)


def rope_of(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_zeros(1, x.shape[1], 0), x.new_zeros(1, x.shape[1], 0)


def test_mamba_is_its_equations() -> None:
    module = MAMBA.module(Place(3, 8, gives=True))
    random_weights(module)
    x = torch.randn(2, 20, 8)
    carried: dict[int, tuple[Tensor, ...]] = {}
    output = module.heads(x, rope_of(x), None, None, carried)
    weights = {name: parameter.double() for name, parameter in module.named_parameters()}
    for row in range(2):
        heads, memory = by_the_book(x[row], weights)
        torch.testing.assert_close(output[row].double(), heads, rtol=0, atol=3e-6)
        torch.testing.assert_close(carried[3][0][row].double(), memory, rtol=0, atol=3e-6)
    out = module(x, rope_of(x))
    torch.testing.assert_close(out, output @ module.o_proj.weight.T)


def test_gated_memory_is_its_equation() -> None:
    module = gmu.Options(inner_size=12, memory_of=3).module(Place(5, 8))
    random_weights(module)
    x, memory = torch.randn(2, 4, 8), torch.randn(2, 4, 12)
    gate = x.double() @ module.in_proj.weight.double().T
    expected = (memory.double() * gate / (1 + (-gate).exp())).float()
    torch.testing.assert_close(module.heads(x, rope_of(x), None, None, {3: (memory,)}), expected)


def test_chunks_and_tokens_equal_a_prompt() -> None:
    """In float64. In float32 they round differently, because torch multiplies other shapes in another order."""
    model, ids = decoder(), tokens(2, 30)
    for parameter in model.parameters():  # .double() keeps decays in float32
        parameter.data = parameter.data.double()
    whole = model(ids)
    for sizes in ((30,), (1,) * 30, (7, 1, 2, 20)):
        cache, chunks, at = models.KVCache(model.config, 2, 30, dtype=torch.float64), [], 0
        for size in sizes:
            chunks.append(model(ids[:, at : at + size], cache=cache))
            at += size
        torch.testing.assert_close(torch.cat(chunks, 1), whole, rtol=0, atol=1e-12)
    cache.reset()
    torch.testing.assert_close(model(ids, cache=cache), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("chunk", [9, 4])
def test_padding_anywhere_changes_nothing(chunk: int) -> None:
    model, ids = decoder(), tokens(1, 9)
    mask = torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 0]])
    cache = models.KVCache(model.config, 1, 9)
    parts = [slice(at, min(at + chunk, 9)) for at in range(0, 9, chunk)]
    logits = torch.cat([model(ids[:, part], cache=cache, attention_mask=mask[:, : part.stop]) for part in parts], 1)
    real = mask[0].bool()
    assert logits.isfinite().all()
    torch.testing.assert_close(logits[:, real], model(ids[:, real]), rtol=0, atol=1e-5)


def test_gradients_reach_every_parameter() -> None:
    model = decoder()
    with torch.enable_grad():
        model(tokens(2, 6)).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_a_model_in_half_precision_keeps_its_decays() -> None:
    model = decoder().to(torch.bfloat16)
    mixer = model.model.layers[0].self_attn
    assert mixer.A_log.dtype == mixer.D.dtype == torch.float32 and mixer.conv1d.weight.dtype == torch.bfloat16
    state = models.KVCache(model.config, 1, 8, dtype=torch.bfloat16).layers[0]
    assert all(tensor.dtype == torch.float32 for tensor in state.tensors)
    assert model(tokens(1, 8)).dtype == torch.bfloat16


def test_sizes_are_checked_and_come_back_from_a_config() -> None:
    config = decoder().config
    assert ModelConfig.from_dict(config.to_dict()) == config
    with pytest.raises(DiffbitError, match="conv_width is 1, wanted 2 or more"):
        mamba.Options(12, 5, 1, 3)
    with pytest.raises(DiffbitError, match="state_size is 0"):
        mamba.Options(12, 0, 4, 3)
