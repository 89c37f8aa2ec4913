"""Linear biases against the paper's formula, and artifacts with every cache against torch."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from diffbit import DiffbitError
from diffbit.apps.variants.attention import alibi, alibi_diff_v1, alibi_diff_v2
from diffbit.models.mixers import Place

from .artifacts import artifact_of, check_session, model_of

OPTIONS = {
    "alibi": alibi.Options(4, 2, 32),
    "alibi_diff_v1": alibi_diff_v1.Options(4, 2, 32, noise_ratio=2),
    "alibi_diff_v2": alibi_diff_v2.Options(4, 2, 32),
}


def slow(x: Tensor, module: Any, options: Any) -> Tensor:
    """softmax(q k^T / sqrt d - m (t - s)) of every head and token in float64, and the variants' differences."""
    weights = {name: parameter.double() for name, parameter in module.named_parameters()}
    queries, keys, values = (x.double() @ weights[f"{name}_proj.weight"].T for name in "qkv")
    d, count = options.head_dim, options.num_heads

    def branch(query: Tensor, key: Tensor, value: Tensor, head: int) -> Tensor:
        rows = []
        for t in range(len(x)):
            scores = [query[t] @ key[s] / d**0.5 - 2.0 ** (-8 * (head + 1) / count) * (t - s) for s in range(t + 1)]
            rows.append(torch.stack(scores).softmax(0) @ value[: t + 1])
        return torch.stack(rows)

    q, k, v = queries.split(d, 1), keys.split(d, 1), values.split(d, 1)
    outs = []
    for i in range(count):
        g = i // (count // options.num_kv_heads)
        if options.name == "alibi":
            outs.append(branch(q[i], k[g], v[g], i))
        elif options.name == "alibi_diff_v2":
            lambda_ = (x.double() @ weights["lambda_proj.weight"][i]).sigmoid()[:, None]
            outs.append(branch(q[2 * i], k[g], v[g], i) - lambda_ * branch(q[2 * i + 1], k[g], v[g], i))
        else:  # rows of q_proj: two signal heads, then the noise head that they share
            value = torch.cat((v[2 * g], v[2 * g + 1]), 1)
            group, signal = divmod(i, 2)
            noise = branch(q[3 * group + 2], k[2 * g + 1], value, i)
            out = branch(q[3 * group + signal], k[2 * g], value, i) - module.lambda_value().double() * noise
            out = out / (out.square().mean(1, keepdim=True) + options.norm_eps).sqrt()
            outs.append(out * module.out_scale)
    return torch.cat(outs, 1) @ weights["o_proj.weight"].T


@pytest.mark.parametrize("name", OPTIONS)
def test_heads_are_the_formula(name: str) -> None:
    torch.manual_seed(0)
    module = OPTIONS[name].module(Place(0, 64))
    for parameter in module.parameters():
        parameter.normal_(0, 0.2)
    x = torch.randn(1, 21, 64)
    torch.testing.assert_close(module(x, ())[0].double(), slow(x[0], module, OPTIONS[name]), rtol=0, atol=1e-4)


def test_rope_is_refused() -> None:
    with pytest.raises(DiffbitError, match="rope is True, wanted false"):
        alibi.Options(4, 2, 32, rope=True)


CASES = {  # weights, keys and values, the artifact's dtype, the sliding window, the error allowed
    "float": (None, "float", "fp32", 0, 1e-3),
    "window": (None, "float", "fp32", 9, 1e-3),
    "half": (None, "float", "fp16", 0, 0.05),
    "int8": ("int8_g32", "int8", "fp32", 0, 0.1),
    "int8, window": ("int4_g32", "int8", "fp32", 9, 0.1),
    "int4": (None, "int4", "fp32", 0, 0.1),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_session_computes_what_torch_does(tmp_path: Path, case: str) -> None:
    """A layer of each variant, the last of which reads the first's keys and values."""
    weights, kv, dtype, window, bound = CASES[case]
    mixers = [type(options)(**asdict(options) | {"sliding_window": window}) for options in OPTIONS.values()]
    if not window:
        mixers.append(alibi.Options(4, 2, 32, keys_of=0))
    artifact, model = artifact_of(model_of(*mixers, factor=4), tmp_path, weights=weights, kv=kv, dtype=dtype)
    check_session(artifact, model, bound, batch=kv != "int4")  # rows of unequal length do not share blocks
