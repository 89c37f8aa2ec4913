"""lambda after rounding: against least squares over every number of every head, and what stays as it was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diffbit.errors import DiffbitError
from diffbit.models import Decoder, ModelConfig, save
from diffbit.models.attention import diff_v2
from diffbit.quantize import AttentionScheme, Scheme, apply, load, parse_format, quantize_checkpoint
from diffbit.quantize.methods import relambda, rtn
from diffbit.quantize.piece import Piece, Tokens
from diffbit.quantize.qtensor import QTensor

INT2 = parse_format("int2_g16")
VECTORS = ("lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


def model(attention: str, seed: int = 0, num_layers: int = 1) -> Decoder:
    torch.manual_seed(seed)
    decoder = Decoder(
        ModelConfig.uniform(
            vocab_size=64, hidden_size=32, num_layers=num_layers, num_heads=4, num_kv_heads=2, head_dim=4,
            intermediate_size=48, max_position=64, attention=attention,
        )
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(20 if "embed" in name or "q_proj" in name or "k_proj" in name else 5)
    return decoder


def rounded_layer(decoder: Decoder) -> tuple[Piece, dict[str, QTensor]]:
    """The first layer with all its weights at two bits, and tokens behind an embedding that errs as well."""
    config, scheme, prefix = decoder.config, Scheme(weights=INT2), "model.layers.0."
    ids = torch.randint(0, 64, (6, 12), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(6, 12, dtype=torch.bool)
    mask[0, 8:] = False
    tokens = Tokens(config, ids, mask)
    tokens.exact = decoder.embed(ids).detach()
    tokens.hidden = tokens.exact + 0.1 * torch.randn(tokens.exact.shape, generator=torch.Generator().manual_seed(2))
    tensors = {name: tensor for name, tensor in decoder.state_dict().items() if name.startswith(prefix)}
    formats = {name: format for name, format in scheme.formats(config).items() if name.startswith(prefix)}
    piece = Piece(config, 0, scheme, formats, tensors, tokens)
    return piece, {name: rtn.quantize(tensors[f"{name}.weight"], format) for name, format in formats.items()}


def heads(piece: Piece, quantized: dict[str, QTensor]) -> tuple[Tensor, ...]:
    """x [T, E] of the rounded layer, and its branches and the float layer's difference, [T, H, e]."""
    assert piece.tokens is not None
    (batch,) = piece.tokens.batches()
    true, rounded = piece.module(), piece.module(quantized)
    with torch.no_grad():
        x = true.input_layernorm(batch.exact)
        signal, noise = true.self_attn.branches(x, batch.rope, batch.mask, None)
        wanted = signal - true.self_attn.lambda_of(x) * noise
        x = rounded.input_layernorm(batch.hidden)
        signal, noise = rounded.self_attn.branches(x, batch.rope, batch.mask, None)
    return x[batch.counted], *(part.transpose(1, 2)[batch.counted] for part in (signal, noise, wanted))


def test_version_1_is_least_squares_under_the_head_norm():
    decoder = model("diff_v1")
    piece, quantized = rounded_layer(decoder)
    _, signal, noise, wanted = heads(piece, quantized)
    size = (wanted.square().mean(-1, keepdim=True) + decoder.config.norm_eps).sqrt()
    left, right = (noise / size).double().flatten()[:, None], ((signal - wanted) / size).double().flatten()[:, None]
    best = float(torch.linalg.lstsq(left, right).solution)
    before = {name: piece.tensors[f"model.layers.0.self_attn.{name}"].clone() for name in VECTORS}

    relambda.refit(piece, quantized)

    after = {name: piece.refitted[f"model.layers.0.self_attn.{name}"] for name in VECTORS}
    assert torch.equal(piece.tensors["model.layers.0.self_attn.lambda_q1"], before["lambda_q1"])
    attention = piece.module(quantized).self_attn
    assert abs(attention.lambda_value().item() - best) < 1e-5
    assert abs(best - decoder.model.layers[0].self_attn.lambda_value().item()) > 0.01  # something was to be done
    for name in VECTORS[1:]:
        assert torch.equal(after[name], before[name])
    moved = after["lambda_q1"] - before["lambda_q1"]
    assert F.cosine_similarity(moved, before["lambda_k1"], dim=0).abs() > 1 - 1e-5  # the shortest way there
    assert torch.equal(decoder.model.layers[0].self_attn.lambda_q1, before["lambda_q1"])  # the float model is whole


def test_version_2_is_a_ridge_step_on_the_linearised_sigmoid():
    decoder = model("diff_v2")
    piece, quantized = rounded_layer(decoder)
    x, signal, noise, wanted = (part.double() for part in heads(piece, quantized))
    name = "model.layers.0.self_attn.lambda_proj.weight"
    before = piece.tensors[name].double()

    relambda.refit(piece, quantized)

    for head in range(decoder.config.layers[0].mixer.num_heads):
        present = (x @ before[head]).sigmoid()[:, None]
        slope = present * (1 - present)
        # signal - (present + slope x.step) noise = wanted: an equation for each token and each of the head's numbers
        left = (slope[:, :, None] * x[:, None, :] * noise[:, head, :, None]).flatten(0, 1)
        right = (signal[:, head] - present * noise[:, head] - wanted[:, head]).flatten()
        ridge = (diff_v2.RIDGE * (left.T @ left).diagonal().mean()).sqrt() * torch.eye(len(before[0])).double()
        step = torch.linalg.lstsq(torch.cat((left, ridge)), F.pad(right, (0, len(ridge)))[:, None]).solution[:, 0]
        torch.testing.assert_close(piece.refitted[name][head].double(), before[head] + step, rtol=1e-3, atol=1e-3)
    assert torch.equal(decoder.model.layers[0].self_attn.lambda_proj.weight.double(), before)


@pytest.mark.parametrize("attention", ["diff_v1", "diff_v2"])
def test_the_difference_comes_closer(attention):
    decoder = model(attention)
    piece, quantized = rounded_layer(decoder)
    errors = []
    for refitted in (False, True):
        if refitted:
            relambda.refit(piece, quantized)
        x, signal, noise, wanted = heads(piece, quantized)
        with torch.no_grad():
            lambda_ = piece.module(quantized).self_attn.lambda_of(x[None])
        lambda_ = lambda_ if lambda_.dim() == 0 else lambda_[0].transpose(0, 1)
        size = (wanted.square().mean(-1, keepdim=True) + 1e-5).sqrt() if attention == "diff_v1" else 1
        errors.append(float(((signal - lambda_ * noise - wanted) / size).norm()))
    assert errors[1] < errors[0], errors


@pytest.mark.parametrize("attention", ["diff_v1", "diff_v2"])
def test_low_bit_attention_alone_is_reason_enough(attention):
    decoder = model(attention)
    ids = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(2))
    scheme = Scheme(attention=AttentionScheme(logits=2))
    plain, refitted = apply(decoder, scheme), apply(decoder, scheme, "rtn+relambda", ids)
    before, after = plain.state_dict(), refitted.state_dict()
    changed = [name for name in before if not torch.equal(before[name], after[name])]
    assert changed == ["model.layers.0.self_attn." + ("lambda_q1" if attention == "diff_v1" else "lambda_proj.weight")]


def test_it_goes_through_a_checkpoint(tmp_path):
    decoder = model("diff_v1", num_layers=2)
    save(decoder, tmp_path / "float")
    ids = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(2))
    scheme = Scheme(weights=INT2)
    quantize_checkpoint(tmp_path / "float", tmp_path / "int2", scheme, method="rtn+relambda", calibration=ids)
    refitted, plain = apply(decoder, scheme, "rtn+relambda", ids), apply(decoder, scheme)
    with torch.no_grad():
        assert torch.equal(load(tmp_path / "int2")(ids), refitted(ids))
        assert not torch.equal(plain(ids), refitted(ids))


def test_a_lambda_out_of_reach_is_refused():
    attention = model("diff_v1").model.layers[0].self_attn
    wanted = torch.full((5, 4), -10.0)
    with pytest.raises(DiffbitError, match=r"lambda would have to be -10, but these vectors reach only values above"):
        attention.refit_lambda(torch.zeros(5, 32), wanted, torch.ones(5, 4))


def test_plain_attention_has_nothing_to_refit():
    ids = torch.zeros(1, 4, dtype=torch.int64)
    with pytest.raises(DiffbitError, match="softmax attention subtracts nothing"):
        apply(model("softmax"), Scheme(weights=INT2), "rtn+relambda", ids)


def test_a_quantized_lambda_is_refused():
    scheme = Scheme(weights=INT2, overrides=(("*.lambda_proj", parse_format("int8")),))
    with pytest.raises(DiffbitError, match=r"relambda refits model.layers.0.self_attn.lambda_proj, which"):
        apply(model("diff_v2"), scheme, "rtn+relambda", torch.zeros(1, 4, dtype=torch.int64))
