"""Mixtures of heads against their formulas in float64, token by token, and artifacts with every cache against torch."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from diffbit import DiffbitError
from diffbit.apps.variants.attention import moh, moh_diff_v1, moh_diff_v2
from diffbit.formats import parse_format
from diffbit.models.mixers import Place
from diffbit.quantize import AttentionScheme, Scheme
from diffbit.quantize.methods import awq, rotate, rotate_heads

from ...quantize.transforms import logits64, random_decoder, random_ids, transformed
from ..variants.artifacts import artifact_of, check_session, model_of

OPTIONS: dict[str, Any] = {
    "moh": moh.Options(8, 4, 32, shared_heads=2, top_k=3),
    "moh_diff_v1": moh_diff_v1.Options(4, 2, 32, noise_ratio=2, shared_heads=1, top_k=2),
    "moh_diff_v2": moh_diff_v2.Options(8, 4, 32, shared_heads=3, top_k=2),
}

NORMS: dict[str, Any] = {  # the same with the router that has no weights
    "moh": moh.Options(8, 4, 32, shared_heads=2, top_k=3, router="norm", shared=(1, 4), qk_norm_eps=1e-5),
    "moh_diff_v1": moh_diff_v1.Options(4, 2, 32, noise_ratio=2, shared_heads=1, top_k=2, router="norm", shared=(2,)),
    "moh_diff_v2": moh_diff_v2.Options(8, 4, 32, shared_heads=3, top_k=2, router="norm", qkv_bias=True),
}


def changed(name: str, **changes: Any) -> Any:
    return type(OPTIONS[name])(**asdict(OPTIONS[name]) | changes)


def random_module(options: Any) -> Any:
    torch.manual_seed(0)
    module = options.module(Place(0, 64))
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.2)
    return module


def gates_of(x: Tensor, router: Tensor, options: Any) -> tuple[list[float], list[int]]:
    """Of one token: the gate of each head, and the routed heads that are on."""
    count, top = options.shared_heads, options.top_k
    logits = [float(row @ x) for row in router]
    first, second = (torch.tensor(logits[-2:], dtype=torch.float64).softmax(0) * 2).tolist()
    order = sorted(range(count, options.num_heads), key=lambda head: -logits[head])
    total = sum(torch.tensor(logits[:count], dtype=torch.float64).exp().tolist())
    gates = [first * count * float(torch.tensor(logits[i], dtype=torch.float64).exp()) / total for i in range(count)]
    gates += [0.0] * (options.num_heads - count)
    chosen = torch.tensor([logits[head] for head in order[:top]], dtype=torch.float64).softmax(0).tolist()
    for head, share in zip(order[:top], chosen, strict=True):
        gates[head] = second * top * share
    return gates, sorted(order[:top])


def longest(query: Tensor, options: Any) -> list[float]:
    """Of one token, by the lengths of its queries [sub-heads, d]: the gate of each head. A group is `noise_ratio`
    signal heads and, in differential attention, the noise head that they share."""
    in_group = options.noise_ratio + (options.name != "moh")
    lengths = [
        sum(float(value) ** 2 for value in query[i // options.noise_ratio * in_group + i % options.noise_ratio])
        for i in range(options.num_heads)
    ]
    shared = options.shared or tuple(range(options.shared_heads))
    others = sorted((i for i in range(options.num_heads) if i not in shared), key=lambda i: -lengths[i])
    on = {*shared, *others[: options.top_k]}
    return [float(i in on) for i in range(options.num_heads)]


def slow(x: Tensor, module: Any, options: Any) -> Tensor:
    """All heads of each token in float64, without RoPE and norms of queries, multiplied by their gates; x [S, E]."""
    weights = {name: parameter.detach().double() for name, parameter in module.named_parameters()}
    x = x.double()
    queries, keys, values = (
        x @ weights[f"{name}_proj.weight"].T + weights.get(f"{name}_proj.bias", 0) for name in "qkv"
    )
    d, group = options.head_dim, options.num_heads // options.num_kv_heads
    q, k, v = queries.split(d, 1), keys.split(d, 1), values.split(d, 1)
    rows = []
    for t, token in enumerate(x):
        if options.router == "norm":
            gates = longest(queries[t].view(-1, d), options)
        else:
            gates, _ = gates_of(token, weights["router_proj.weight"], options)

        def branch(query: Tensor, key: Tensor, value: Tensor, t: int = t) -> Tensor:
            return (key[: t + 1] @ query[t] / d**0.5).softmax(0) @ value[: t + 1]

        outs = []
        for i, gate in enumerate(gates):
            g = i // group
            if options.name == "moh":
                out = branch(q[i], k[g], v[g])
            elif options.name == "moh_diff_v2":
                lambda_ = (weights["lambda_proj.weight"][i] @ token).sigmoid()
                out = branch(q[2 * i], k[g], v[g]) - lambda_ * branch(q[2 * i + 1], k[g], v[g])
            else:  # rows of q_proj: two signal heads, then the noise head that they share
                value, pair = torch.cat((v[2 * g], v[2 * g + 1]), 1), i // 2
                noise = branch(q[3 * pair + 2], k[2 * g + 1], value)
                out = branch(q[3 * pair + i % 2], k[2 * g], value) - module.lambda_value().double().detach() * noise
                out = out / (out.square().mean() + options.norm_eps).sqrt() * module.out_scale
            outs.append(gate * out)
        rows.append(weights["o_proj.weight"] @ torch.cat(outs))
    return torch.stack(rows)


@torch.no_grad()
@pytest.mark.parametrize("router", ["linear", "norm"])
@pytest.mark.parametrize("name", OPTIONS)
def test_heads_are_the_formula(name: str, router: str) -> None:
    options = replace((OPTIONS if router == "linear" else NORMS)[name], rope=False, qk_norm_eps=0.0)
    module = random_module(options)
    x = torch.randn(1, 15, 64)
    torch.testing.assert_close(module(x, ())[0].double(), slow(x[0], module, options), rtol=0, atol=1e-4)
    assert ((module.gates(x) > 0).sum(-1) == options.shared_heads + options.top_k).all()


def test_equal_logits_leave_all_heads_as_they_are() -> None:
    module = random_module(OPTIONS["moh"])
    module.router_proj.weight.data.zero_()
    shared, routed = module.gates(torch.ones(1, 1, 64)).detach().split([2, 6], -1)
    torch.testing.assert_close(shared, torch.ones(1, 1, 2))
    torch.testing.assert_close(routed, torch.full((1, 1, 6), 3 / 6))  # all of them are on


@torch.enable_grad()
def test_balance_loss_is_the_formula() -> None:
    """And a gradient step on it makes the heads' loads more alike."""
    options = OPTIONS["moh"]
    module = random_module(options)
    x = torch.randn(3, 50, 64) + 0.3
    rope = (torch.ones(3, 50, 16), torch.zeros(3, 50, 16))
    module(x, rope)
    router = module.router_proj.weight.detach().double()
    routed, tokens = options.num_heads - options.shared_heads, x.flatten(0, 1).double()
    loads, means = [0.0] * routed, [0.0] * routed
    for token in tokens:
        for head in gates_of(token, router, options)[1]:
            loads[head - 2] += 1 / len(tokens)
        shares = (router[2:8] @ token).softmax(0)
        means = [mean + float(share) / len(tokens) for mean, share in zip(means, shares, strict=True)]
    expected = routed * sum(mean * load for mean, load in zip(means, loads, strict=True))
    loss = module.auxiliary_loss
    assert abs(loss.item() - expected) < 1e-4 and expected > options.top_k
    loss.backward()
    module.router_proj.weight.data -= 0.3 * module.router_proj.weight.grad
    module(x, rope)
    assert module.auxiliary_loss.item() < expected - 0.01
    module.auxiliary_loss = None
    module.eval()(x, rope)
    assert module.auxiliary_loss is None


@torch.enable_grad()
@pytest.mark.parametrize("name", NORMS)
def test_the_gradient_of_hard_gates_goes_straight_through(name: str) -> None:
    """To softmax(length / deviation) of the routed heads, computed here head by head, and so does the balance loss."""
    options = NORMS[name]
    module, width = random_module(options), options.width // options.num_heads
    module.o_proj = torch.nn.Linear(options.width, 64, bias=False)
    x, weight = torch.randn(2, 9, 64), torch.randn(2, 9, 64)
    rope = (torch.ones(2, 9, 16), torch.zeros(2, 9, 16))
    (module(x, rope) * weight).sum().backward()
    found, loss = module.q_proj.weight.grad.clone(), module.auxiliary_loss.detach()

    plain_type = next(kind for kind in type(module).__mro__ if kind.__name__ in ("Softmax", "DiffV1", "DiffV2"))
    heads = plain_type.heads(module, x, rope, None, None, {}).unflatten(-1, (options.num_heads, width))
    in_group, ratio = options.noise_ratio + (name != "moh"), options.noise_ratio
    rows = module.q_proj(x).unflatten(-1, (-1, options.head_dim))
    lengths = [rows[..., i // ratio * in_group + i % ratio, :].norm(dim=-1) for i in range(options.num_heads)]
    shared = options.shared or tuple(range(options.shared_heads))
    routed = [i for i in range(options.num_heads) if i not in shared]
    lengths_of_routed = torch.stack([lengths[i] for i in routed], -1)
    deviation = lengths_of_routed.detach().var(-1, keepdim=True).sqrt()
    shares = (lengths_of_routed / deviation).softmax(-1)
    hard = torch.zeros(2, 9, options.num_heads)
    for b in range(2):
        for t in range(9):
            hard[b, t] = torch.tensor(longest(rows[b, t].detach(), options))
    by_head = []
    for i in range(options.num_heads):
        soft = shares[..., routed.index(i)] if i in routed else torch.zeros(2, 9)
        by_head.append(heads[..., i, :] * (hard[..., i] + soft - soft.detach())[..., None])
    out = module.o_proj(torch.cat(by_head, -1)) * module.out_scale
    (expected,) = torch.autograd.grad((out * weight).sum(), module.q_proj.weight)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    flat = shares.flatten(0, 1).mean(0), hard[..., routed].flatten(0, 1).mean(0)
    torch.testing.assert_close(loss, (len(routed) * flat[0] * flat[1]).sum().detach())


@torch.enable_grad()
def test_one_routed_head_has_no_deviation() -> None:
    module = random_module(moh.Options(4, 4, 32, shared_heads=3, top_k=1, router="norm"))
    (module.gates(torch.randn(1, 5, 64)).sum() + module.auxiliary_loss).backward()
    assert module.auxiliary_loss == 1 and module.q_proj.weight.grad.isfinite().all()


CASES = {  # weights, keys and values, the artifact's dtype, the sliding window, the error allowed
    "float": (None, "float", "fp32", 0, 1e-3),
    "int8, window": ("int8_g32", "int8", "fp32", 9, 0.1),
    "int4": ("int4_g32", "int4", "fp32", 0, 0.1),
}


@pytest.mark.parametrize("router", ["linear", "norm"])
@pytest.mark.parametrize("case", CASES)
def test_session_computes_what_torch_does(tmp_path: Path, case: str, router: str) -> None:
    weights, kv, dtype, window, bound = CASES[case]
    options = OPTIONS if router == "linear" else NORMS
    mixers = [replace(mixer, sliding_window=window) for mixer in options.values()]
    artifact, model = artifact_of(model_of(*mixers, factor=4), tmp_path, weights=weights, kv=kv, dtype=dtype)
    check_session(artifact, model, bound, batch=kv != "int4")  # rows of unequal length do not share blocks


@pytest.mark.parametrize("method", [rotate, awq], ids=lambda method: method.__name__.rpartition(".")[2])
def test_methods_change_weights_and_keep_logits(method: ModuleType) -> None:
    decoder = random_decoder(model_of(*OPTIONS.values()).config, dtype=torch.float64)
    ids, scheme = random_ids(), Scheme(weights=parse_format("int3_g16"))
    changed = transformed(decoder, method, scheme, ids)
    torch.testing.assert_close(logits64(changed, ids), logits64(decoder, ids), rtol=0, atol=1e-9)
    before = decoder.state_dict()
    for module in ("v_proj", "o_proj", "router_proj"):
        name = f"model.layers.0.self_attn.{module}.weight"
        assert not torch.equal(changed.state_dict()[name], before[name]), name


@pytest.mark.parametrize("method", [rotate, rotate_heads, awq], ids=lambda method: method.__name__.rpartition(".")[2])
def test_methods_keep_the_lengths_of_queries(method: ModuleType) -> None:
    decoder = random_decoder(model_of(*NORMS.values()).config, dtype=torch.float64)
    ids, scheme = random_ids(), Scheme(weights=parse_format("int3_g16"), attention=AttentionScheme(keys="int4"))
    changed = transformed(decoder, method, scheme, ids)
    torch.testing.assert_close(logits64(changed, ids), logits64(decoder, ids), rtol=0, atol=1e-9)


def test_the_router_stays_float() -> None:
    config = model_of(*OPTIONS.values()).config
    rounded = {name.rpartition(".")[2] for name in Scheme(weights=parse_format("int4_g32")).formats(config)}
    assert "router_proj" not in rounded and {"q_proj", "o_proj"} <= rounded


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(DiffbitError, match="shared_heads is 2 and top_k 3, together more than the 4 heads"):
        moh.Options(4, 4, 16, shared_heads=2, top_k=3)
    with pytest.raises(DiffbitError, match="top_k is 0, wanted a whole number from 1"):
        moh.Options(4, 4, 16, shared_heads=2, top_k=0)
    with pytest.raises(DiffbitError, match="router is linear, whose shared heads are always the first"):
        moh.Options(4, 4, 16, shared_heads=2, top_k=1, shared=(1, 2))
    for shared in ((1,), (1, 4), (1, 1)):
        with pytest.raises(DiffbitError, match=r"shared is \[1.*wanted 2 different heads below 4"):
            moh.Options(4, 4, 16, shared_heads=2, top_k=1, router="norm", shared=shared)
    with pytest.raises(DiffbitError, match="in rising order"):
        moh.Options(4, 4, 16, shared_heads=2, top_k=1, router="norm", shared=(2, 1))
    with pytest.raises(DiffbitError, match="router is 'words'"):
        moh.Options(4, 4, 16, shared_heads=2, top_k=1, router="words")
