"""Statistics of calibration tokens: sums over batches, losses, shared inputs, passes that end early."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from diffbit.formats import parse_format
from diffbit.quantize.calibration import proxy_loss, stats
from diffbit.quantize.calibration.stats import Gatherer, gather
from diffbit.quantize.methods.rtn import quantize as rtn


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_batches_add_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "BLOCK", 5)
    x = normal(50, 12)
    gatherer = Gatherer()
    parts = (x[:7], x[7:7], x[7:40], x[40:].to(torch.float64))
    for rows in parts:
        gatherer.add(rows)
    whole = gatherer.stats()
    halves = [torch.cat(half).double() for half in zip(*(rows.tensor_split(2) for rows in parts), strict=True)]
    torch.testing.assert_close(whole.gram.double(), x.double().T @ x.double() / 50)
    torch.testing.assert_close(whole.shrunk().double(), slow(*halves), rtol=1e-4, atol=1e-6)
    assert torch.equal(whole.gram, whole.gram.T)
    torch.testing.assert_close(whole.mean_abs, x.abs().mean(0))
    assert torch.equal(whole.absmax, x.abs().amax(0)) and whole.tokens == 50


def slow(first: Tensor, second: Tensor) -> Tensor:
    """The shrunk Gram matrix of two halves [T, K] of the tokens, a number at a time."""
    a, b = (half.T @ half / len(half) for half in (first, second))
    whole = torch.cat((first, second))
    gram, columns = whole.T @ whole / len(whole), range(whole.shape[1])
    kept = []
    for i in columns:
        size = [float(gram[i, i] * gram[j, j]) for j in columns]
        noise = sum(float((a[i, j] - b[i, j]) / 2) ** 2 / size[j] for j in columns if j != i)
        kept.append(max(0.0, 1 - noise / sum(float(gram[i, j]) ** 2 / size[j] for j in columns if j != i)) ** 0.5)
    return torch.tensor([[gram[i, j] * (1 if i == j else kept[i] * kept[j]) for j in columns] for i in columns])


def test_only_independent_channels_lose_their_correlations() -> None:
    noise, common = normal(1000, 40), normal(1000, 1)
    correlated = noise + 2 * common * (torch.arange(40) < 6)
    for x, pairs in ((noise, 0), (correlated, 6)):
        gatherer = Gatherer()
        gatherer.add(x)
        gram = gatherer.stats().shrunk()
        assert torch.linalg.eigvalsh(gram.double()).min() > 0
        sizes = (gram / (x.T @ x / 1000)).abs()
        assert pairs == 0 or sizes[:pairs, :pairs].min() > 0.9
        assert sizes[pairs:, pairs:].fill_diagonal_(0).mean() < 0.3


def test_weights_of_tokens_and_who_shares_them() -> None:
    model, x, counted = Layers(), normal(1, 5, 6), torch.tensor([[True, True, False, True, True]])
    one, other = torch.rand(1, 5, generator=torch.Generator().manual_seed(0)), torch.tensor([[0.0, 2, 9, 0, 1]])

    def stats_of(**weights: Tensor) -> dict[str, stats.CalibStats]:
        linears = {name: model.get_submodule(name) for name in "ab"}
        with torch.no_grad():
            return gather(linears, [lambda: (partial(model, x), counted, weights)])

    shared = stats_of(a=one, b=one)
    assert shared["a"] is shared["b"]
    for found, weight in ((shared["a"], one), (stats_of(a=one, b=other)["b"], other), (stats_of(a=one)["b"], None)):
        kept, scale = (x + 1)[counted].double(), torch.ones(4) if weight is None else weight[counted]
        torch.testing.assert_close(found.gram.double(), kept.T @ (kept * scale[:, None].double()) / 4)


def test_nothing_gathered_is_zero() -> None:
    gatherer = Gatherer()
    gatherer.add(normal(0, 12))
    stats = gatherer.stats()
    assert stats.tokens == 0 and stats.gram.shape == (12, 12)
    assert not stats.gram.any() and not stats.absmax.any() and not stats.mean_abs.any()


@pytest.mark.parametrize("rows", [4, 512])
def test_the_proxy_loss_is_that_of_the_outputs(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "ROWS", rows)
    x, weight = normal(90, 32) * normal(32), normal(10, 32)
    quantized = rtn(weight, parse_format("int3_g16"))
    exact, rounded = x.double() @ weight.double().T, x.double() @ quantized.dequantize().double().T
    expected = ((exact - rounded).square().sum() / exact.square().sum()).item()
    assert proxy_loss(weight, quantized, x.T @ x / 90) == pytest.approx(expected, rel=1e-5)
    zeros = torch.zeros(4, 32)
    assert proxy_loss(zeros, rtn(zeros, parse_format("int3_g16")), x.T @ x) == 0


class Layers(nn.Module):
    """a and b are handed the same tensor, c its copy; d comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(6, 6, bias=False) for _ in range(4))
        self.passed: list[str] = []
        for name, module in self.named_children():
            module.register_forward_hook(lambda *_, name=name: self.passed.append(name))

    def forward(self, x: Tensor) -> Tensor:
        hidden = x + 1
        return self.d(self.a(hidden) + self.b(hidden) + self.c(hidden.clone()))


def test_shared_inputs_share_statistics_and_a_pass_stops_early() -> None:
    model, x = Layers(), normal(2, 5, 6)
    counted = torch.tensor([[True] * 5, [True, False, True, False, False]])

    passes = [lambda i=i: (partial(model, x[i : i + 1]), counted[i : i + 1], {}) for i in range(2)]
    with torch.no_grad():
        stats = gather({name: model.get_submodule(name) for name in "cab"}, passes)
    assert set(stats) == set("abc")
    assert stats["a"] is stats["b"] and stats["a"] is not stats["c"]
    kept = (x + 1)[counted].double()
    assert stats["a"].tokens == 7
    torch.testing.assert_close(stats["a"].gram.double(), kept.T @ kept / 7)
    torch.testing.assert_close(stats["c"].gram, stats["a"].gram)
    assert model.passed == ["a", "b"] * 2, "c's own output is not needed, and d not at all"
    model.passed.clear()
    with torch.no_grad():
        model(x)
    assert model.passed == list("abcd"), "the hooks are gone"
