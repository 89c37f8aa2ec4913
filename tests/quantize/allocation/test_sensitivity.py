"""Estimated losses: the Fisher matrix against divergences of perturbed models, and losses against measured ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from diffbit import models
from diffbit.apps.train.presets import model_config
from diffbit.formats import QTensor, parse_format
from diffbit.io.errors import DiffbitError
from diffbit.models import Decoder
from diffbit.models.config import variants
from diffbit.quantize import EMBEDDING_MODULE, HEAD_MODULE, Scheme, linear_shapes
from diffbit.quantize.allocation.losses import measure
from diffbit.quantize.allocation.sensitivity import estimate, fisher, remaining
from diffbit.quantize.calibration import Tokens
from diffbit.quantize.methods import Method, find
from diffbit.quantize.methods.rtn import quantize as rtn
from diffbit.quantize.plan import resolve

from ...configs import resized
from .small import CONFIG, IDS, MASK, divergence, make

LINEARS = [name for name in linear_shapes(CONFIG) if name != HEAD_MODULE]


def text(windows: int, decoder: Decoder, length: int = 16) -> Tokens:
    ids = torch.randint(decoder.config.vocab_size, (windows, length), generator=torch.Generator().manual_seed(1))
    return Tokens(decoder.config, ids)


def perturbed(decoder: Decoder, module: str, noise: Tensor) -> Decoder:
    """A copy in which a weight has noise. The head of a tied model gets a table of its own."""
    other = copy.deepcopy(decoder)
    if module == HEAD_MODULE and other.lm_head is None:
        other.lm_head = nn.Linear(noise.shape[1], len(noise), bias=False)
        other.lm_head.weight.data = decoder.model.embed_tokens.weight.data.clone()
    if module == EMBEDDING_MODULE and other.lm_head is None:
        other.lm_head = nn.Linear(noise.shape[1], len(noise), bias=False)
        other.lm_head.weight = decoder.model.embed_tokens.weight
    other.get_submodule(module).weight.data += noise
    return other


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "tied"), [("softmax", True), ("diff_v1", False), ("diff_v2", True)])
def test_the_fisher_matrix_gives_the_divergence_of_noise(attention: str, tied: bool) -> None:
    """Noise with random signs: what it costs is half the sum of its squares times the matrix's diagonal."""
    decoder = make(resized(CONFIG, attention=attention, tie_embeddings=tied))
    tokens = text(48, decoder)
    modules = [EMBEDDING_MODULE, HEAD_MODULE, *(name for name in linear_shapes(decoder.config) if name != HEAD_MODULE)]
    matrices = fisher(decoder, tokens, modules)
    generator = torch.Generator().manual_seed(2)
    for module in modules:
        matrix, losses = matrices[module], []
        shape = len(matrix.rows), len(matrix.columns)
        scale = 0.02 * torch.rand(shape, generator=generator)  # some weights get more noise than others
        for _ in range(4):
            noise = scale * (torch.randint(2, shape, generator=generator) * 2 - 1)
            losses.append(divergence(decoder, perturbed(decoder, module, noise), tokens.ids, tokens.mask))
        predicted = float(matrix.rows @ scale.square() @ matrix.columns / matrix.rows.sum()) / 2
        assert 0.6 < predicted / (sum(losses) / len(losses)) < 1.6, module


@pytest.mark.parametrize(
    ("preset", "attention", "mlp"),
    [*(("pico", attention, None) for attention in variants()), ("yoco", "diff_v2", None), ("pico", "softmax", "kan")],
)
def test_every_kind_of_layer_has_gradients(preset: str, attention: str, mlp: str | None) -> None:
    config = model_config(preset, attention, vocab_size=64, **({} if mlp is None else {"mlp": mlp}))
    decoder = make(config)
    matrices = fisher(decoder, text(2, decoder), linear_shapes(config))
    assert set(linear_shapes(config)) < set(matrices)
    for module, matrix in matrices.items():
        assert matrix.rows.isfinite().all() and matrix.columns.isfinite().all(), module
        assert float(matrix.rows.sum()) == pytest.approx(float(matrix.columns.sum()), rel=1e-3) != 0, module


def test_padding_does_not_count() -> None:
    decoder = make()
    short = fisher(decoder, Tokens(CONFIG, IDS[:, :9], MASK[:, :9]), LINEARS)
    padded = fisher(decoder, Tokens(CONFIG, IDS, torch.arange(24).expand(5, 24) < 9), LINEARS)
    for module, matrix in short.items():
        torch.testing.assert_close(padded[module].rows, matrix.rows, rtol=2e-3, atol=1e-7)
        torch.testing.assert_close(padded[module].columns, matrix.columns, rtol=2e-3, atol=1e-7)


def test_labels_come_from_the_seed() -> None:
    decoder = make()
    first, again, other = (fisher(decoder, Tokens(CONFIG, IDS, MASK), LINEARS, seed)[LINEARS[0]] for seed in (0, 0, 1))
    assert torch.equal(first.rows, again.rows) and not torch.equal(first.rows, other.rows)
    assert all(parameter.grad is None for parameter in decoder.parameters())


def test_the_loss_of_a_tied_table_counts_embedding_and_head() -> None:
    tied = make(resized(CONFIG, tie_embeddings=True))
    untied = make(CONFIG)
    untied.load_state_dict(tied.state_dict() | {"lm_head.weight": tied.model.embed_tokens.weight.detach()})
    row = {"int4_g32": parse_format("int4_g32"), "none": None}
    tokens = Tokens(CONFIG, IDS, MASK)
    (together,) = estimate(tied, tokens, {EMBEDDING_MODULE: row}, find("rtn")).values()
    apart = estimate(untied, tokens, {EMBEDDING_MODULE: row, HEAD_MODULE: row}, find("rtn"))
    assert together["none"] == 0 < min(losses["int4_g32"] for losses in apart.values())
    assert together["int4_g32"] == pytest.approx(sum(losses["int4_g32"] for losses in apart.values()), rel=1e-3)


@pytest.mark.parametrize("name", ["softmax", "diff_v1"])
def test_estimates_follow_what_is_measured(name: str, trained: Callable[[str], Path]) -> None:
    """Of a trained model, on the same text: every layer in int4 and int8 within a factor, their logarithms together."""
    decoder = models.load(trained(name))
    ids = torch.randint(decoder.config.vocab_size, (16, 64), generator=torch.Generator().manual_seed(0))
    modules = [module for module in linear_shapes(decoder.config) if not module.endswith(("lm_head", "lambda_proj"))]
    estimated, measured = [], []
    for format in ("int4_g64", "int8"):
        formats = {module: {format: parse_format(format)} for module in modules}
        tokens, sample = (Tokens(decoder.config, ids) for _ in range(2))
        losses = measure(decoder, decoder, sample, resolve(decoder.config, Scheme()), formats, find("rtn"), None)
        guesses = estimate(decoder, tokens, formats, find("rtn"))
        estimated += [guesses[module][format] for module in modules]
        measured += [losses[module][format] for module in modules]
    both = torch.tensor([estimated, measured]).log()
    assert torch.corrcoef(both)[0, 1] > 0.95
    assert ((both[0] - both[1]).abs() < 1.2).all()


def test_gptq_leaves_a_share_of_the_error_of_plain_rounding() -> None:
    """GPTQ leaves less of an error than plain rounding, which leaves all, on ten times as many tokens as inputs."""
    decoder = make()
    tokens = text(20, decoder, 48)
    formats = {module: {"none": None, "int4_g32": parse_format("int4_g32")} for module in LINEARS}
    matrices = fisher(decoder, tokens, LINEARS)

    def plain(weight: Tensor, format: object, stats: object) -> QTensor:
        return rtn(weight, parse_format("int4_g32"))

    by_gptq = remaining(decoder, tokens, matrices, formats, find("gptq"))
    by_rtn = remaining(decoder, tokens, matrices, formats, Method("plain", "", round=plain, calibrated=True))
    assert by_gptq.keys() == by_rtn.keys() == set(LINEARS)
    assert all(by_gptq[module] < 0.8 * by_rtn[module] for module in LINEARS)
    assert all(0.8 < share < 2 for share in by_rtn.values())
    losses = (estimate(decoder, tokens, formats, find(name)) for name in ("gptq", "rtn"))
    assert all(less[m]["int4_g32"] < more[m]["int4_g32"] for less, more in [tuple(losses)] for m in LINEARS)


def test_predictions_that_are_no_numbers_are_refused() -> None:
    decoder = make(CONFIG)
    with torch.no_grad():
        decoder.model.norm.weight.fill_(float("inf"))
    with pytest.raises(DiffbitError, match="the model predicts NaN in window 0 of the calibration text"):
        fisher(decoder, text(2, decoder), LINEARS)
