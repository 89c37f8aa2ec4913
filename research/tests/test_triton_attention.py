"""Differential attention in Triton: outputs and gradients against float64, on a GPU or in Triton's interpreter.

The error may be twice that of the plain equations in the inputs' own precision, both against float64.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor

from diffbit import models
from diffbit.models.layers import arithmetic
from tests.models.helpers import small_config, tokens

from . import interpreter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton is made for Linux only")
GPU = torch.cuda.is_available()
GRADIENTS = ("query", "key", "value", "lambda")


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("cpu", id="interpreted", marks=pytest.mark.skipif(GPU, reason="here the kernels are compiled")),
        pytest.param(
            "cuda", id="gpu", marks=[pytest.mark.gpu, pytest.mark.skipif(not GPU, reason="there is no CUDA device")]
        ),
    ],
)
def kernels(request: pytest.FixtureRequest) -> Iterator[tuple[ModuleType, str]]:
    """The module, and where its tensors lie."""
    pytest.importorskip("triton")
    import triton_attention as attention

    # What torch.empty returns is NaN then, so a place that no kernel writes shows
    torch.use_deterministic_algorithms(True, warn_only=True)
    with nullcontext() if request.param == "cuda" else interpreter.bfloat16():
        yield attention, request.param
    torch.use_deterministic_algorithms(False)


@dataclass(frozen=True)
class Case:
    batch: int
    length: int
    pairs: int
    groups: int
    d: int
    wide: bool  # version 1: values of 2d, a key for each branch
    norm: bool
    dtype: torch.dtype = torch.float32
    gain: float = 1.0  # of the queries: large ones give sharp softmaxes

    def inputs(self, device: str) -> list[Tensor]:
        """query, key, value, lambda and the output's gradient."""
        generator = torch.Generator().manual_seed(self.length + 1000 * int(os.environ.get("DIFFBIT_TEST_DRAW", "0")))
        keys, e = (2, 2 * self.d) if self.wide else (1, self.d)
        shapes = ((2 * self.pairs, self.d), (keys * self.groups, self.d), (self.groups, e), (self.pairs, e))
        query, key, value, out_grad = (
            torch.randn(self.batch, self.length, *shape, generator=generator).to(device, self.dtype) for shape in shapes
        )
        lambda_ = torch.randn(self.batch, self.pairs, self.length, generator=generator).to(device)  # of either sign
        return [query * self.gain, key, value, lambda_, out_grad]

    @property
    def eps(self) -> float:
        return 1e-5 if self.norm else 0.0


def equations(query: Tensor, key: Tensor, value: Tensor, lambda_: Tensor, scale: float, norm_eps: float) -> Tensor:
    """The same with all [S, S] scores, in the inputs' precision."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))  # [B, heads, S, .]
    pairs, groups, length = query.shape[1] // 2, value.shape[1], query.shape[2]
    hidden = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    both = []
    for branch in (0, 1):
        keys = key if key.shape[1] == groups else key[:, branch::2]
        keys, values = (tensor.repeat_interleave(pairs // groups, dim=1) for tensor in (keys, value))
        logits = query[:, branch::2] @ keys.transpose(-1, -2) * scale
        both.append(logits.masked_fill(hidden, -torch.inf).softmax(-1) @ values)
    out = both[0] - lambda_[..., None].to(query.dtype) * both[1]
    if norm_eps:
        out = out * torch.rsqrt(out.square().mean(-1, keepdim=True) + norm_eps)
    return out.transpose(1, 2)


@torch.enable_grad()
def with_gradients(attention: object, case: Case, inputs: list[Tensor]) -> list[Tensor]:
    """Output and gradients."""
    *tensors, out_grad = inputs
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out = attention(*leaves, case.d**-0.5, case.eps)  # type: ignore[operator]
    assert out.dtype == leaves[0].dtype and out.shape == out_grad.shape
    out.backward(out_grad)
    return [out.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]


def error(actual: Tensor, exact: Tensor) -> float:
    """Root of the mean square; one token's softmaxes have gradients of exactly 0."""
    return float((actual.detach().double() - exact.detach()).square().mean().sqrt())


def check(attention: object, case: Case, device: str) -> None:
    inputs = case.inputs(device)
    exact = with_gradients(equations, case, [tensor.double() for tensor in inputs])
    same = with_gradients(equations, case, inputs)
    for name, actual, one, other in zip(
        ("output", *GRADIENTS), with_gradients(attention, case, inputs), exact, same, strict=True
    ):
        assert error(actual, one) <= 2 * error(other, one) + 1e-6 * (1 + float(one.abs().max())), name


FLOAT32 = [
    Case(1, 70, 2, 1, 16, wide=True, norm=True),
    Case(2, 33, 2, 2, 32, wide=True, norm=True, gain=8.0),
    Case(2, 1, 2, 1, 16, wide=True, norm=True),
    Case(1, 64, 3, 1, 16, wide=True, norm=False),
    Case(2, 45, 4, 2, 16, wide=False, norm=False),
    Case(1, 95, 2, 2, 32, wide=False, norm=True, gain=8.0),
]
HALVES = [
    Case(1, 50, 2, 1, 32, wide=wide, norm=wide, dtype=dtype)
    for wide in (True, False)
    for dtype in (torch.float16, torch.bfloat16)
]


@pytest.mark.parametrize("case", [*FLOAT32, *HALVES], ids=str)
def test_output_and_gradients(kernels: tuple[ModuleType, str], monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """In blocks so small that few tokens fill many of them, wide and narrow ones."""
    module, device = kernels
    small = module.tile(32, 16, 4, 2), module.tile(16, 32, 4, 2), module.tile(32, 32, 4, 2)
    monkeypatch.setattr(module, "tiles", lambda *_: small)
    check(module.diff_attention, case, device)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("wide", [True, False], ids=["v1", "v2"])
def test_blocks_as_they_are(kernels: tuple[ModuleType, str], d: int, wide: bool) -> None:
    module, device = kernels
    check(module.diff_attention, Case(1, 150, 1, 1, d, wide=wide, norm=wide, dtype=torch.bfloat16), device)


def decoder(attention: str, device: str) -> models.Decoder:
    torch.manual_seed(0)
    return models.Decoder(small_config(attention, hidden_size=64, head_dim=16, num_layers=1)).to(device)


@pytest.mark.parametrize("attention", ["diff_v1", "diff_v2"])
def test_a_model_takes_the_kernel_where_it_may(
    kernels: tuple[ModuleType, str], monkeypatch: pytest.MonkeyPatch, attention: str
) -> None:
    """Loss and all gradients are those of torch's attention; with a mask, a cache or a hook the kernel stands back."""
    module, device = kernels
    calls = []
    plain = module.diff_attention
    monkeypatch.setattr(module, "diff_attention", lambda *inputs: calls.append(inputs) or plain(*inputs))
    model, ids = decoder(attention, device), tokens(2, 20).to(device)

    def run() -> tuple[Tensor, dict[str, Tensor]]:
        model.zero_grad()
        with torch.enable_grad():
            loss = model(ids).logsumexp(-1).sum()
            loss.backward()
        return loss.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}

    expected, gradients = run()
    assert not calls
    module.use_kernels(model)
    model(ids)
    assert not calls  # float32 is left to torch
    monkeypatch.setattr(module, "TYPES", (torch.float32,))
    output, others = run()
    assert len(calls) == 1
    torch.testing.assert_close(output, expected)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-3, atol=1e-5, msg=name)

    mask = torch.ones(2, 20, dtype=torch.long, device=device)
    cache = models.KVCache(model.config, 2, 20, device=device)
    logits = [model(ids), model(ids, attention_mask=mask), model(ids, cache=cache)]
    assert len(calls) == 2
    for other in logits[1:]:
        torch.testing.assert_close(other, logits[0], rtol=1e-4, atol=1e-5)
    model.model.layers[0].self_attn.logits_hook = lambda logits, valid: logits
    torch.testing.assert_close(model(ids), logits[0], rtol=1e-4, atol=1e-5)
    assert len(calls) == 2


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["diff_v1", "diff_v2"])
def test_a_training_step_under_autocast_and_compiled(kernels: tuple[ModuleType, str], attention: str) -> None:
    """As apps/train/ takes it on a GPU: float32 weights, bfloat16 products, and the whole model one graph."""
    module, device = kernels
    model, ids = decoder(attention, device), tokens(2, 20).to(device)
    module.use_kernels(model)
    steps = []
    for forward in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        with torch.enable_grad():
            with torch.autocast(device, torch.bfloat16):
                logits = forward(ids)
            logits.float().logsumexp(-1).sum().backward()
        steps.append([logits.detach(), *(parameter.grad for parameter in model.parameters())])
    expected = model(ids)
    assert error(steps[0][0], expected) < 0.01 * float(expected.double().square().mean().sqrt())
    for one, other in zip(*steps, strict=True):
        assert one is not None and error(one, other.double()) <= 0.02 * float(other.double().square().mean().sqrt())


@pytest.mark.slow
def test_torch_may_compile_it(kernels: tuple[ModuleType, str]) -> None:
    """The op's schema, what it says of shapes and strides, and its gradient's registration hold."""
    module, device = kernels
    *tensors, out_grad = Case(1, 20, 2, 1, 16, wide=True, norm=True).inputs(device)
    for tensor in tensors:
        tensor.requires_grad_()
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(module._forward_op, (*tensors, 0.25, 1e-5), test_utils=tests)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(*inputs: Tensor) -> Tensor:
        return module.diff_attention(*inputs, 0.25, 1e-5).square()

    with torch.enable_grad():
        grads = torch.autograd.grad(compiled(*tensors), tensors, out_grad)
        same = torch.autograd.grad(module.diff_attention(*tensors, 0.25, 1e-5).square(), tensors, out_grad)
    for one, other in zip(grads, same, strict=True):
        torch.testing.assert_close(one, other)


def test_heads_without_groups_give_the_same() -> None:
    """What torch's memory-efficient attention is given on a GPU."""
    query, key, value = (torch.randn(2, heads, 9, width) for heads, width in ((6, 8), (2, 8), (2, 16)))
    expected = arithmetic.attend(query, key, value, None, 0.3)
    keys, values = arithmetic.ungrouped(query, key, value)
    assert keys.shape[1] == values.shape[1] == 6
    torch.testing.assert_close(arithmetic.attend(query, keys, values, None, 0.3), expected)
    assert arithmetic.ungrouped(query, keys, values)[0] is keys
