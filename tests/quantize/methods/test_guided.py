"""Weights of tokens against divergences of perturbed models, and what GPTQ makes of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diffbit.apps.train.presets import model_config
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.models import Decoder
from diffbit.models.config import variants
from diffbit.quantize import HEAD_MODULE, Scheme, apply, linear_shapes
from diffbit.quantize.calibration import Tokens
from diffbit.quantize.methods import guided

from ...configs import resized
from ..allocation.small import CONFIG, IDS, MASK, make

SEEDS = 300
LINEARS = [name for name in linear_shapes(CONFIG) if name != HEAD_MODULE]


def weights(decoder: Decoder, ids: Tensor = IDS, mask: Tensor | None = None) -> dict[str, Tensor]:
    return guided.token_weights(decoder.config, decoder.state_dict().__getitem__, Tokens(decoder.config, ids, mask))


@torch.no_grad()
def divergences(decoder: Decoder, module: str, ids: Tensor, size: float) -> Tensor:
    """The sum, over the outputs of a linear layer, of the divergence that an error of that size costs at each token."""
    exact = F.log_softmax(decoder(ids).double(), -1)
    linear, found = decoder.get_submodule(module), torch.zeros(ids.shape[1], dtype=torch.float64)
    count = linear.weight.shape[0]
    for token in range(ids.shape[1]):

        def add(_: object, __: object, output: Tensor, token: int = token) -> Tensor:
            output = output.expand(count, -1, -1).clone()
            output[:, token] += size * torch.eye(count, dtype=output.dtype)
            return output

        handle = linear.register_forward_hook(add)
        other = F.log_softmax(decoder(ids.expand(count, -1)).double(), -1)
        handle.remove()
        found[token] = (exact.exp() * (exact - other)).sum()
    return found


@pytest.mark.parametrize("attention", ["softmax", pytest.param("diff_v1", marks=pytest.mark.slow)])
def test_a_token_weighs_what_errors_at_it_cost(attention: str, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = make(resized(CONFIG, attention=attention)).double()
    ids = IDS[:1, :10]
    sums: dict[str, Tensor] = {}
    for seed in range(SEEDS):
        monkeypatch.setattr(guided, "SEED", seed)
        for name, one in weights(decoder, ids).items():
            sums[name] = sums.get(name, 0) + one[0]
    for names in (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj"), ("down_proj",)):
        modules = [name for name in LINEARS if name.startswith("model.layers.0.") and name.endswith(names)]
        expected = torch.zeros(ids.shape[1], dtype=torch.float64)
        for module in modules:
            found = divergences(decoder, module, ids, 0.01)
            expected += found / found.sum() / len(modules)
        for module in modules:
            ours = sums[module].double()
            torch.testing.assert_close(ours / ours.sum(), expected, rtol=0.3, atol=0.02)


def test_padding_weighs_nothing_and_changes_nothing() -> None:
    decoder = make(CONFIG)
    padded = torch.arange(IDS.shape[1]).expand(IDS.shape) < 9
    ours, short = weights(decoder, IDS, padded), weights(decoder, IDS[:, :9])
    for name in LINEARS:
        assert not ours[name][:, 9:].any() and ours[name].sum() == pytest.approx(padded.sum().item(), rel=1e-4)
        torch.testing.assert_close(ours[name][:, :9], short[name], rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("attention", variants())
def test_every_attention_has_weights(attention: str) -> None:
    config = model_config("pico", attention, vocab_size=64)
    found = weights(make(config), IDS % 64, MASK)
    assert set(found) == {name for name in linear_shapes(config) if name != HEAD_MODULE}
    assert all(one.isfinite().all() and (one >= 0).all() and one[MASK].any() for one in found.values())


def test_gradients_that_are_not_finite_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    watching = guided.watching
    monkeypatch.setattr(
        guided,
        "watching",
        lambda decoder, names, see: watching(decoder, names, lambda name, x, g: see(name, x, g * torch.inf)),
    )
    with pytest.raises(DiffbitError, match=r"at the outputs of model\.layers\..* are not finite"):
        weights(make(CONFIG))


def test_heavy_tokens_get_smaller_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token that nearly all weight is on leaves nearly no error, unlike with gptq."""
    decoder = make(CONFIG).requires_grad_(False)
    ids, heavy, module = IDS.clone(), torch.ones(IDS.shape), LINEARS[0]
    ids[:, 3], heavy[:, 3] = 7, 1000
    method = replace(guided.METHOD, token_weights=lambda *_: dict.fromkeys(LINEARS, heavy))
    monkeypatch.setattr(guided, "METHOD", method)
    inputs: list[Tensor] = []
    decoder.get_submodule(module).register_forward_pre_hook(lambda _, x: inputs.append(x[0][0, 3]))
    decoder(ids)

    def error(name: str) -> float:
        rounded = apply(decoder, Scheme(weights=parse_format("int3_g32")), name, ids).get_submodule(module)
        weight = decoder.get_submodule(module).weight
        return float((inputs[0] @ (rounded.weight.dequantize() - weight).T).norm() / (inputs[0] @ weight.T).norm())

    assert error("guided") < 0.5 * error("gptq")
