"""Joint rounding against optimal brain quantization of the whole pair, and its metric against Jacobians by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from diffbit import models
from diffbit.calib_data import eval_windows
from diffbit.errors import DiffbitError
from diffbit.models import Decoder, ModelConfig
from diffbit.quantize import Scheme, apply, parse_format, scales
from diffbit.quantize.formats import Format, QTensor
from diffbit.quantize.layer import Layer, Tokens
from diffbit.quantize.methods import gptq, joint
from diffbit.quantize.stats import CalibStats

PROJECTIONS = ("q_proj", "k_proj", "v_proj")


def model(attention: str, seed: int = 0, **changes: int) -> Decoder:
    """One layer with grouped queries, whose heads look at some tokens more than at others."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4} | changes
    decoder = Decoder(
        ModelConfig.uniform(
            vocab_size=64, num_layers=1, intermediate_size=48, max_position=64, norm_eps=1e-5, attention=attention,
            **shape,
        )  # type: ignore[arg-type]
    )  # fmt: skip
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(20 if "embed" in name or "q_proj" in name or "k_proj" in name else 5)
            elif "layernorm" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
    return decoder


@torch.no_grad()
def layer(decoder: Decoder, ids: Tensor, mask: Tensor | None = None, format: str = "int3_g16", index: int = 0) -> Layer:
    """One of its layers as a layer, with tokens that have come as far as that in the float model."""
    config, scheme = decoder.config, Scheme(weights=parse_format(format))
    tokens = Tokens(config, ids, mask)
    tokens.embed(decoder.embed)
    for block in decoder.model.layers[:index]:
        tokens.hidden = torch.cat([block(batch.hidden, batch.rope, batch.mask) for batch in tokens.batches()])
    prefix = f"model.layers.{index}."
    tensors = {name: tensor for name, tensor in decoder.state_dict().items() if name.startswith(prefix)}
    formats = {name: format for name, format in scheme.formats(config).items() if name.startswith(prefix)}
    return Layer(config, index, scheme, formats, tensors, tokens)


def random_ids(windows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 64, (windows, length), generator=torch.Generator().manual_seed(seed))


# ---- rounding -------------------------------------------------------------------------------------------------------


def brain(weight: Tensor, format: Format, scale: Tensor, zero: Tensor | None, gram: Tensor, metric: Tensor) -> Tensor:
    """Optimal brain quantization (arXiv 2208.11580) of each block as ONE vector with the Hessian G (x) M: round a
    number, spread its error over all numbers of the block that are left, forget it."""

    def damped(matrix: Tensor, damping: float) -> Tensor:
        matrix = matrix.double()
        return matrix + damping * matrix.diagonal().mean() * torch.eye(len(matrix), dtype=torch.double)

    rows, columns = weight.shape
    size = metric.shape[1]
    codes = torch.zeros(weight.shape, dtype=torch.uint8)
    by_column = sorted(range(columns), key=lambda k: -gram[k, k])
    for block in range(rows // size):
        by_row = sorted(range(size), key=lambda i: -metric[block, i, i])
        left = damped(gram, gptq.DAMPING)[by_column][:, by_column].contiguous()
        right = damped(metric[block], gptq.DAMPING)[by_row][:, by_row].contiguous()
        hessian = torch.kron(left, right)
        w = weight[block * size : (block + 1) * size].double()[by_row][:, by_column].T.reshape(-1).clone()
        places = [(block * size + i, k) for k in by_column for i in by_row]
        for index, (i, k) in enumerate(places):
            inverse = torch.linalg.inv(hessian[index:, index:])
            group = k // (format.group_size or columns)
            step = scale.expand(rows, -1)[i, group]
            point = None if zero is None else zero[i, group]
            codes[i, k] = format.encode_each(w[index].float(), step, point).to(torch.uint8)
            error = w[index] - format.decode_each(codes[i, k], step, point)
            w[index:] -= error * inverse[0] / inverse[0, 0]
    return codes


def covariance(size: int, generator: torch.Generator, blocks: int = 1) -> Tensor:
    factor = torch.randn(blocks, size, size, generator=generator) * torch.rand(blocks, 1, size, generator=generator)
    return factor @ factor.transpose(1, 2) / size


@pytest.mark.parametrize("name", ["int4_g16", "int3_g16_asym", "int2", "ternary"])
@pytest.mark.parametrize("outliers", [False, True])
def test_it_is_optimal_brain_quantization_of_whole_pairs(name, outliers):
    generator = torch.Generator().manual_seed(3)
    format, columns = parse_format(name), 40  # a short last group
    weight = torch.randn(8, columns, generator=generator)
    gram, metric = covariance(columns, generator)[0], covariance(4, generator, blocks=2)
    if outliers:
        large = torch.where(torch.arange(columns) == 7, 30.0, 1.0)
        gram = gram * large * large[:, None]
    scale, zero = scales.search(weight, format, gram.diagonal())
    codes = gptq.round_columns(weight, format, scale, zero, gptq.Feedback.of(gram), joint.row_by_row(format, metric))
    assert torch.equal(codes, brain(weight, format, scale, zero, gram, metric))


@pytest.mark.parametrize("name", ["int3_g32", "int2_g16_asym", "ternary"])
def test_the_loss_is_less_than_after_one_pass(name):
    generator = torch.Generator().manual_seed(6)
    format, weight = parse_format(name), torch.randn(24, 64, generator=generator)
    gram, metric = covariance(64, generator)[0], covariance(8, generator, blocks=3)
    stats = CalibStats(gram, gram.diagonal().sqrt(), gram.diagonal().sqrt(), 100)
    scale, zero = scales.search(weight, format, gram.diagonal())
    codes = gptq.round_columns(weight, format, scale, zero, gptq.Feedback.of(gram), joint.row_by_row(format, metric))

    def loss(rounded: Tensor) -> float:
        lost = (weight - rounded).unflatten(0, (3, 8))
        return float(torch.einsum("bik,bij,bjl,kl->", lost, metric, lost, gram))

    once, found = format.decode(codes, scale, zero), joint.quantize_rows(weight, format, stats, metric).dequantize()
    assert loss(found) < 0.97 * loss(once)
    assert loss(found) < 0.9 * loss(gptq.quantize(weight, format, stats).dequantize())


def test_a_metric_without_cross_terms_is_gptq():
    generator = torch.Generator().manual_seed(4)
    weight, gram = torch.randn(12, 64, generator=generator), covariance(64, generator)[0]
    stats = CalibStats(gram, gram.diagonal().sqrt(), gram.diagonal().sqrt(), 100)
    metric = torch.diag_embed(torch.rand(3, 4, generator=generator) + 0.1)
    for name in ("int3_g32", "int4_g16_asym", "nf4"):
        found, wanted = (
            joint.quantize_rows(weight, parse_format(name), stats, metric),
            gptq.quantize(weight, parse_format(name), stats),
        )
        assert (found.codes != wanted.codes).float().mean() < 0.01  # ties of the loss may fall either way


def test_a_head_that_nobody_reads_is_rounded_by_gptq():
    generator = torch.Generator().manual_seed(5)
    weight, gram = torch.randn(8, 32, generator=generator).bfloat16(), covariance(32, generator)[0]
    stats = CalibStats(gram, gram.diagonal().sqrt(), gram.diagonal().sqrt(), 100)
    found = joint.quantize_rows(weight, parse_format("int3_g16"), stats, torch.zeros(2, 4, 4))
    assert torch.equal(found.dequantize(), gptq.quantize(weight, parse_format("int3_g16"), stats).dequantize())


# ---- the metric -----------------------------------------------------------------------------------------------------


def gradients_by_hand(decoder: Decoder, x: Tensor, signs: Tensor) -> dict[str, Tensor]:
    """J^T r at every token and row of the three projections of a diff_v1 layer, written out: {projection: [S, N]}.

    The formulas are those of joint.py's docstring, in float64, one token and head at a time. x, signs: [S, E].
    """
    config, attention = decoder.config, decoder.model.layers[0].self_attn
    d, e, length = config.layers[0].mixer.head_dim, 2 * config.layers[0].mixer.head_dim, len(x)
    lambda_ = attention.lambda_value().item()
    angles = torch.arange(length)[:, None] / config.rope_theta ** (torch.arange(0, d, 2) / d)
    cos, sin = torch.diag_embed(angles.double().cos()), torch.diag_embed(angles.double().sin())
    turn = torch.cat((torch.cat((cos, -sin), 2), torch.cat((sin, cos), 2)), 1)  # [S, d, d]
    x = x.double()
    query, key, value = (x @ getattr(attention, name).weight.detach().double().T for name in PROJECTIONS)
    query, key = (torch.einsum("sij,shj->shi", turn, t.unflatten(1, (-1, d))) for t in (query, key))
    value = value.unflatten(1, (-1, e))
    output = attention.out_scale * attention.o_proj.weight.detach().double()
    found = {name: torch.zeros(length, getattr(attention, name).out_features).double() for name in PROJECTIONS}
    for t in range(length):
        for head in range(config.layers[0].mixer.num_heads):
            pair = head // (config.layers[0].mixer.num_heads // config.layers[0].mixer.num_kv_heads)
            v = value[: t + 1, pair]
            seen = [((key[: t + 1, 2 * pair + b] @ query[t, 2 * head + b]) / math.sqrt(d)).softmax(0) for b in (0, 1)]
            difference = seen[0] @ v - lambda_ * (seen[1] @ v)
            size = (difference.square().mean() + config.norm_eps).sqrt()
            y = difference / size
            norm = (torch.eye(e).double() - torch.outer(y, y) / e) / size
            pulled = norm @ output[:, head * e : (head + 1) * e].T @ signs[t].double()  # at A1 v - lambda A2 v
            for b, factor in ((0, 1.0), (1, -lambda_)):
                k = key[: t + 1, 2 * pair + b]
                along = factor * seen[b] * ((v - seen[b] @ v) @ pulled) / math.sqrt(d)  # at each logit
                rows = slice((2 * head + b) * d, (2 * head + b + 1) * d)
                found["q_proj"][t, rows] += turn[t].T @ (along @ k)
                rows = slice((2 * pair + b) * d, (2 * pair + b + 1) * d)
                for s in range(t + 1):
                    found["k_proj"][s, rows] += along[s] * turn[s].T @ query[t, 2 * head + b]
                    found["v_proj"][s, pair * e : (pair + 1) * e] += factor * seen[b][s] * pulled
    return found


def test_the_metric_of_differential_attention_is_the_one_derived_by_hand():
    decoder = model("diff_v1")
    ids = random_ids(3, 10)
    one = layer(decoder, ids)
    x = decoder.model.layers[0].input_layernorm(decoder.embed(ids)).detach()
    signs = torch.randint(0, 2, x.shape, generator=torch.Generator().manual_seed(joint.SEED)) * 2 - 1
    gradients = [gradients_by_hand(decoder, x[window], signs[window]) for window in range(len(x))]
    for name, metric in joint.row_metrics(one).items():
        rows = torch.cat([gradient[name.rpartition(".")[2]] for gradient in gradients]).unflatten(1, (-1, 8))
        wanted = torch.einsum("tbi,tbj->bij", rows, rows) / ids.numel()
        assert metric.shape == wanted.shape
        assert (metric - wanted).norm() < 1e-4 * wanted.norm(), name


@pytest.mark.parametrize("attention", ["softmax", "diff_v1", "diff_v2"])
def test_over_many_signs_the_metric_is_the_mean_of_squared_jacobians(attention):
    decoder, window = model(attention), random_ids(1, 6)
    block = decoder.model.layers[0].requires_grad_(False)
    (batch,) = layer(decoder, window).tokens.batches()
    x = block.input_layernorm(batch.hidden)
    for name, metric in joint.row_metrics(layer(decoder, window.repeat(2000, 1))).items():
        projection = block.self_attn.get_submodule(name.rpartition(".")[2])

        def output(rows: Tensor, projection: torch.nn.Module = projection) -> Tensor:
            handle = projection.register_forward_hook(lambda *_: rows)
            try:
                return block.self_attn(x, batch.rope, batch.mask, None)
            finally:
                handle.remove()

        jacobian = torch.autograd.functional.jacobian(output, projection(x))[0, :, :, 0]  # [S, E, S, N]
        jacobian = jacobian.flatten(0, 1).unflatten(2, (-1, metric.shape[1]))  # [S * E, S, B, R]
        wanted = torch.einsum("zsbi,zsbj->bij", jacobian, jacobian) / x.shape[1]
        assert (metric - wanted).norm() < 0.1 * wanted.norm(), name


def test_tokens_that_do_not_count_do_not_count():
    decoder, ids = model("diff_v1"), random_ids(4, 10)
    mask = torch.ones(4, 10, dtype=torch.bool)
    mask[:, 7:] = False
    changed = torch.where(mask, ids, (ids + 1) % 64)
    first, second = (joint.row_metrics(layer(decoder, some, mask)) for some in (ids, changed))
    for name in first:
        torch.testing.assert_close(first[name], second[name])


# ---- what it is for -------------------------------------------------------------------------------------------------


def attention_error(layer: Layer, quantized: dict[str, QTensor]) -> float:
    """||out - out_q|| / ||out|| of the attention with these projections, on inputs of the float model."""
    assert layer.tokens is not None
    (batch,) = layer.tokens.batches()
    outputs = []
    with torch.no_grad():
        for weights in ({}, quantized):
            block = layer.module(weights)
            outputs.append(block.self_attn(block.input_layernorm(batch.hidden), batch.rope, batch.mask, None))
    return float((outputs[1] - outputs[0]).norm() / outputs[0].norm())


@pytest.mark.slow
def test_it_keeps_a_trained_attention_better_than_gptq(trained):
    path = trained("diff_v1")
    decoder = models.load(path)
    ids = torch.from_numpy(eval_windows("stdlib", path, 256, 24, split="calib").ids)
    one = layer(decoder, ids, format="int3_g64", index=1)
    stats = one.stats(names=[f"{one.prefix}self_attn.q_proj"])[f"{one.prefix}self_attn.q_proj"]
    metrics = joint.row_metrics(one)
    held_out = layer(decoder, torch.from_numpy(eval_windows("stdlib", path, 256, 8).ids), index=1)
    for name, metric in metrics.items():
        weight = one.tensors[f"{name}.weight"]
        ours = joint.quantize_rows(weight, one.formats[name], stats, metric)
        theirs = gptq.quantize(weight, one.formats[name], stats)
        errors = [attention_error(held_out, {name: rounded}) for rounded in (ours, theirs)]
        assert errors[0] < 0.85 * errors[1], (name, errors)  # 0.64 to 0.75


def test_everything_else_is_rounded_by_gptq():
    decoder, ids = model("diff_v1"), random_ids(8, 20)
    scheme = Scheme(overrides=(("*.mlp.*", parse_format("int3_g16")), ("*.o_proj", parse_format("int4_g16")),
                               ("lm_head", parse_format("int8"))))  # fmt: skip
    ours, theirs = (apply(decoder, scheme, method, ids)(ids) for method in ("joint", "gptq"))
    assert torch.equal(ours, theirs)


def test_one_token_is_enough():
    decoder = model("diff_v1")
    logits = apply(decoder, Scheme(weights=parse_format("int4_g16")), "joint", random_ids(1, 1))(random_ids(1, 8))
    assert logits.isfinite().all()


def test_it_needs_tokens():
    decoder = model("diff_v1")
    one = layer(decoder, random_ids(1, 4))
    one.tokens = None
    with pytest.raises(DiffbitError, match="joint needs calibration tokens"):
        joint.quantize_layer(one)
