"""Learned rounding against slow rounding, finite differences, every code there is, and on a trained layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from diffbit.calib_data import eval_windows
from diffbit.formats import QTensor, base, parse_format
from diffbit.formats.codebook import NF4
from diffbit.io.errors import DiffbitError
from diffbit.models import Decoder, ModelConfig, load
from diffbit.quantize import AttentionScheme, Scheme, apply, resolve
from diffbit.quantize.calibration import Passes, Tokens
from diffbit.quantize.layer import Layer
from diffbit.quantize.layerwise import quantize_one
from diffbit.quantize.methods import Method, gptq, learned, parse_recipe, rtn
from diffbit.quantize.methods.learned import LearnedWeight

FORMATS = ["int2_g16_asym", "int3_g32_asym", "int4", "ternary", "nf4"]

NEAREST = Method("nearest", "", round=lambda weight, format, stats: rtn.quantize(weight, format))  # to start from


def rounding(name: str, columns: int = 40, seed: int = 0) -> LearnedWeight:
    """One that is under way: offsets, clip factors, a sign or two."""
    format, generator = parse_format(name), torch.Generator().manual_seed(seed)
    columns = 64 if name == "nf4" else columns  # 40: a short last group
    weight = torch.randn(6, columns, generator=generator) * 0.05
    weight[:, :16] += 0.1  # groups on one side of zero
    weight[2] = 0
    learned_weight = LearnedWeight(weight, format.nearest(weight, *format.fit(weight)))
    with torch.no_grad():
        learned_weight.offset.copy_((torch.rand(weight.shape, generator=generator) - 0.5) * learned_weight.unit)
        for factor in (learned_weight.upper, learned_weight.lower):
            if factor is not None:
                factor.copy_(0.6 + 0.6 * torch.rand(factor.shape, generator=generator))
    learned_weight.round()
    return learned_weight


def slowly(r: LearnedWeight) -> tuple[list[list[float]], list[list[int]]]:
    """The rounded weight and its codes, a number at a time."""
    format, half = r.format, torch.float16
    top, width = 2**format.bits - 1, r.weight.shape[1]
    weights, codes = [], []
    for n, row in enumerate(r.weight.tolist()):
        weights.append([0.0] * width)
        codes.append([0] * width)
        for k, w in enumerate(row):
            at = (0, 0) if format.name == "ternary" else (n, k // format.group_size if format.group_size else 0)
            scale, zero = r.start.scale[at].item(), top / 2 + 0.5 if format.name.startswith("int") else 0
            if r.lower is not None:
                point = int(r.start.zero[at])
                low, high = -scale * point * r.lower[at].item(), scale * (top - point) * r.upper[at].item()
                scale = torch.tensor((high - low) / top).to(half).item()
                zero = round(-low / scale) if scale else 0
            elif format.name.startswith("int"):
                scale = torch.tensor(scale * r.upper[at].item()).to(half).item()
            else:
                scale *= r.upper[at].item()
            place = w / scale + r.offset[n, k].item() if scale else 0.0
            if format.name == "nf4":
                codes[n][k] = min(range(16), key=lambda c: abs(NF4[c] - place))
                weights[n][k] = NF4[codes[n][k]] * scale
            elif format.name == "ternary":
                codes[n][k] = min(max(round(place), -1), 1) + 1
                weights[n][k] = (codes[n][k] - 1) * scale
            else:
                codes[n][k] = min(max(round(place) + int(zero), 0), top)
                weights[n][k] = (codes[n][k] - zero) * scale
    return weights, codes


@pytest.mark.parametrize("name", FORMATS)
def test_it_rounds_as_a_slow_version_does_and_to_what_a_file_holds(name):
    r = rounding(name)
    weights, codes = slowly(r)
    quantized = r.quantized()
    assert quantized.codes.tolist() == codes
    torch.testing.assert_close(r.rounded.detach(), torch.tensor(weights), rtol=1e-6, atol=0)
    assert torch.equal(r.rounded, quantized.dequantize())
    stored = quantized.scale.to(quantized.format.scale_dtype)
    again = QTensor.from_packed(quantized.format, quantized.shape, quantized.packed(), stored, quantized.packed_zero())
    assert torch.equal(again.dequantize(), r.rounded)


@pytest.mark.parametrize("name", FORMATS)
def test_gradients_are_those_of_the_relaxed_function(name, monkeypatch):
    """Relaxed: what rounding adds to a number, and to a scale and a zero point, stays what it is."""
    monkeypatch.setattr(base, "BLOCK", 200)  # numbers at a time: four rows of six
    r = rounding(name, seed=1)
    probe = torch.randn(r.weight.shape, generator=torch.Generator().manual_seed(2))
    scale, zero = r.scales()
    with torch.no_grad():
        rows, *parts = zip(*r.gradients(probe, scale, zero), strict=True)
        of_offset, *others = [torch.cat(part) for part in parts if part[0] is not None]
        assert len(rows) == 2  # more than one
    ends = [end for end in (r.upper, r.lower) if end is not None]
    values = [scale] if zero is None else [scale, zero]
    of_ends = torch.autograd.grad(values, ends, [g.sum_to_size(v.shape) for g, v in zip(others, values, strict=True)])
    with torch.no_grad():
        parameters = [p.detach().double() for p in (r.offset, r.upper, r.lower) if p is not None]
        start, weight, format, columns = r.start, r.weight.double(), r.format, r.weight.shape[1]
        top = 2**format.bits - 1

        def spread(values: Tensor) -> Tensor:
            width = format.group_size or columns
            return values.expand(len(weight), -1)[:, torch.arange(columns) // width]

        def ends(p: list[Tensor]) -> tuple[Tensor, Tensor | None]:
            s = start.scale.double()
            if start.zero is None:
                return s * p[1], None
            z = start.zero.double()
            s_new = (s * z * p[2] + s * (top - z) * p[1]) / top
            return s_new, s * z * p[2] / s_new.where(s_new != 0, torch.ones_like(s_new))

        s0, z0 = ends(parameters)
        step_rest = scale.double() - s0
        zero_rest = None if zero is None else zero.double() - z0
        place = weight / spread(scale).double().where(spread(scale) != 0, torch.tensor(torch.inf).double())
        point = (
            torch.full_like(place, 2 ** (format.bits - 1) if format.name.startswith("int") else 0)
            if zero is None
            else spread(zero.double())
        )
        low, high = (0 - point, top - point) if format.name.startswith("int") else (-1.0, 1.0)
        margin = 0.0 if format.name == "nf4" else 0.5
        moved = place + parameters[0]
        inside = (moved >= low - margin) & (moved <= high + margin)
        level = r.rounded.double() / spread(scale).double().where(spread(scale) != 0, torch.tensor(1.0).double())
        rest = level - moved

        def relaxed(p: list[Tensor]) -> Tensor:
            s, z = ends(p)
            s = spread(s + step_rest)
            place = weight / s.where(s != 0, torch.tensor(torch.inf).double())
            outside = level if z is None else level + point - spread(z + zero_rest)
            return (s * torch.where(inside, place + p[0] + rest, outside) * probe).sum()

        epsilon = 1e-6
        for index, parameter in enumerate(parameters):
            gradient = (of_offset, *of_ends)[index]
            expected = torch.zeros_like(parameter)
            for i in range(parameter.numel()):
                values = []
                for sign in (1, -1):
                    moved_parameters = [p.clone() for p in parameters]
                    moved_parameters[index].view(-1)[i] += sign * epsilon
                    values.append(relaxed(moved_parameters))
                expected.view(-1)[i] = (values[0] - values[1]) / (2 * epsilon)
            if zero is not None and index > 0:  # a zero point at the end of its range stays there
                free = (zero > 0) & (zero < top)
                gradient, expected = gradient[free], expected[free]
                assert free.sum() > 3
            torch.testing.assert_close(gradient.double(), expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "nf4"])
def test_it_starts_at_the_codes_it_is_given(name):
    format = parse_format(name)
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(6, 40, generator=generator)
    scale, zero = format.fit(weight)
    codes = torch.randint(0, 3 if name == "ternary" else 2**format.bits, (6, 40), generator=generator)
    start = QTensor(format, (6, 40), codes.to(torch.uint8), scale, zero)
    assert torch.equal(LearnedWeight(weight, start).quantized().dequantize(), start.dequantize())


def passes_of(
    model: Decoder, ids: Tensor, scheme: Scheme, index: int = 0, *, only: str = "", mask: Tensor | None = None
) -> Passes:
    """Passes of layer `index`, its tokens as the float layers before leave them; `only`: a part of the names."""
    config, state = model.config, {name: tensor.detach() for name, tensor in model.state_dict().items()}
    tokens = Tokens(config, ids, mask)
    exact = tokens.exact
    exact.embed(lambda ids: state["model.embed_tokens.weight"][ids])
    formats = {name: format for name, format in scheme.formats(config).items() if only in name}
    for at in range(index + 1):
        tokens.hidden = exact.hidden.clone()
        tensors = {name: tensor for name, tensor in state.items() if name.startswith(f"model.layers.{at}.")}
        of_layer = {name: format for name, format in formats.items() if f"{name}.weight" in tensors and at == index}
        passes = Passes(Layer(resolve(config, scheme), at, of_layer, tensors), tokens)
        if at < index:
            module = passes.layer.module()
            with torch.no_grad():
                exact.hidden = torch.cat([passes.run(module, batch) for batch in exact.batches()])
    return passes


@torch.no_grad()
def output_error(passes: Passes, quantized: dict[str, QTensor], tokens: Tokens | None = None) -> float:
    """Squared error of the layer's output, over the square of what the layer adds to its input."""
    true, rounded = passes.layer.module(), passes.layer.module(quantized)
    lost = added = 0.0
    tokens = tokens or passes.tokens
    assert tokens is not None
    for batch, exact in zip(tokens.batches(), tokens.exact.batches(), strict=True):
        expected = passes.run(true, exact)
        lost += float((passes.run(rounded, batch) - expected)[batch.counted].square().sum())
        added += float((expected - exact.hidden)[batch.counted].square().sum())
    return lost / added


def random_model(attention: str = "diff_v1", seed: int = 0, **changes: int) -> Decoder:
    sizes = {
        "vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8,
        "intermediate_size": 48, "max_position": 32,
    }  # fmt: skip
    torch.manual_seed(seed)
    model = Decoder(ModelConfig.uniform(attention=attention, **(sizes | changes)))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, parameter.shape[1] ** -0.5)
    return model


def some_ids(windows: int, length: int, seed: int = 0, vocabulary: int = 64) -> Tensor:
    return torch.randint(0, vocabulary, (windows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.slow
def test_all_codes_of_a_small_weight(monkeypatch):
    """The queries of a pair, 8 weights of 2 bits: 65,536 layers, of which it finds one of the best."""
    monkeypatch.setattr(learned, "FLOAT_RATE", 0.0)
    model = random_model(
        seed=4, hidden_size=2, num_layers=1, num_heads=1, head_dim=2, intermediate_size=4, max_position=8, vocab_size=16
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0, 1)
    passes = passes_of(model, some_ids(6, 8, vocabulary=16), Scheme(weights=parse_format("int2")), only="q_proj")
    layer = passes.layer
    (name,) = layer.formats
    weight, format = layer.tensors[f"{name}.weight"], layer.formats[name]
    start = gptq.quantize(weight, format, passes.stats()[name])
    rounded = learned.quantize_layer(layer, passes)[name]
    problem = learned.Problem(layer, passes, passes.tokens)

    def loss(weight: Tensor) -> Tensor:
        return problem.loss({name: weight}, {}, torch.arange(6))

    every = torch.cartesian_prod(*[torch.arange(-2.0, 2.0)] * 8).view(-1, 4, 2) * rounded.scale
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        losses = torch.func.vmap(loss, chunk_size=4096)(every)
        ours, before = loss(rounded.dequantize()), loss(start.dequantize())
    assert ours < 0.85 * before
    assert ours < 2.5 * losses.min()
    assert (losses < ours).sum() < len(losses) / 100


@pytest.mark.slow
def test_it_beats_rounding_and_gptq_on_a_trained_layer(trained, monkeypatch):
    """On text it has not seen; 48 steps."""
    path = trained("diff_v1")
    model = load(path)
    calib, held_out = (
        torch.as_tensor(eval_windows("stdlib", path, 256, 12, split=split).ids) for split in ("calib", "eval")
    )
    monkeypatch.setattr(learned, "STEP_TOKENS", 512)
    scheme = Scheme(weights=parse_format("int2_g64"))
    errors = {}
    other = passes_of(model, held_out, scheme).tokens
    for recipe in ("rtn", "gptq", "learned:48"):
        passes = passes_of(model, calib, scheme)
        errors[recipe] = output_error(passes, quantize_one(passes, parse_recipe(recipe)), other)
    assert errors["learned:48"] < 0.35 * errors["rtn"], errors  # 0.29
    assert errors["learned:48"] < 0.94 * errors["gptq"], errors  # 0.89


@pytest.mark.parametrize(
    ("attention", "format"),
    [
        *(("diff_v1", format) for format in ("int2_g16", "int3_g16_asym", "int4", "ternary")),
        ("diff_v2", "int3_g16_asym"),
        ("softmax", "int2_g16"),
    ],
)
def test_every_variant_and_format_gets_better(attention, format, monkeypatch):
    """From plain rounding on: GPTQ, the usual start, leaves little to gain in a layer as small as this."""
    monkeypatch.setattr(learned, "find", lambda _: NEAREST)
    errors = {}
    for recipe in ("rtn", "learned:30"):
        passes = passes_of(random_model(attention), some_ids(8, 32), Scheme(weights=parse_format(format)), 1)
        errors[recipe] = output_error(passes, quantize_one(passes, parse_recipe(recipe)))
    assert errors["learned:30"] < 0.9 * errors["rtn"], errors


def test_it_improves_codebooks_with_rounded_activations_and_logits(monkeypatch):
    monkeypatch.setattr(learned, "find", lambda _: NEAREST)
    model = random_model(hidden_size=64, head_dim=16, intermediate_size=64)
    scheme = Scheme(parse_format("nf4"), activations="int8", attention=AttentionScheme(logits=6))
    errors = {}
    for recipe in ("rtn", "learned:30"):
        passes = passes_of(model, some_ids(8, 32), scheme)
        errors[recipe] = output_error(passes, quantize_one(passes, parse_recipe(recipe)))
    assert errors["learned:30"] < 0.9 * errors["rtn"], errors


def test_it_mends_what_the_layers_before_lost():
    """Inputs that an earlier quantized layer gives, aims that the float model has."""
    scheme = Scheme(weights=parse_format("int2_g16"))
    errors = []
    for behind in (False, True):
        passes = passes_of(random_model(), some_ids(16, 32), scheme)
        noise = 0.2 * torch.randn(passes.tokens.hidden.shape, generator=torch.Generator().manual_seed(0))
        damaged = passes.tokens.exact.hidden * 0.7 + noise
        if behind:
            passes.tokens.hidden = damaged
        quantized = quantize_one(passes, parse_recipe("learned:30"))
        passes.tokens.hidden = damaged
        errors.append(output_error(passes, quantized))
    assert errors[1] < 0.9 * errors[0], errors


def test_norms_and_lambdas_stay_float_and_the_float_model_stays():
    model = random_model().to(torch.bfloat16)
    passes = passes_of(model, some_ids(8, 32), Scheme(weights=parse_format("int2_g16")))
    layer = passes.layer
    before = dict(layer.tensors)
    quantized = quantize_one(passes, parse_recipe("learned:10"))
    assert set(layer.refitted) == set(before) - {f"{name}.weight" for name in quantized}
    for name, tensor in layer.refitted.items():
        assert tensor.dtype == before[name].dtype and not torch.equal(tensor, before[name])
    assert all(layer.tensors[name] is tensor for name, tensor in before.items())


def test_the_head_keeps_its_predictions(monkeypatch):
    # to start from: GPTQ leaves little to learn in a single matrix
    monkeypatch.setattr(learned, "find", lambda _: NEAREST)
    scheme = Scheme(overrides=(("lm_head", parse_format("int2_g16")),))
    model, ids = random_model(), some_ids(16, 32)
    divergence = {}
    for recipe in ("rtn", "learned:40"):
        quantized = apply(model, scheme, recipe, None if recipe == "rtn" else ids)
        with torch.no_grad():
            p, q = model(ids).log_softmax(-1), quantized(ids).log_softmax(-1)
        divergence[recipe] = float((p.exp() * (p - q)).sum(-1).mean())
    assert divergence["learned:40"] < 0.88 * divergence["rtn"], divergence


@pytest.mark.parametrize("shape", [(1, 1), (3, 5)])
def test_few_tokens_give_finite_weights(shape):
    quantized = apply(random_model(), Scheme(weights=parse_format("int2_g16_asym")), "learned:4", some_ids(*shape))
    assert quantized(some_ids(2, 4)).isfinite().all()


def test_what_the_mask_hides_does_not_count():
    mask = torch.ones(4, 16, dtype=torch.bool)
    mask[1, 9:] = mask[2, :3] = mask[3] = False
    ids, scheme = some_ids(4, 16), Scheme(weights=parse_format("int3_g16"))
    changed = torch.where(mask, ids, 63 - ids)
    logits = [apply(random_model(), scheme, "learned:6", tokens, mask)(ids) for tokens in (ids, changed)]
    assert torch.equal(*logits)


def test_dead_channels_stay_zero():
    model = random_model()
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[16:] = 0
        model.model.layers[0].mlp.up_proj.weight[:, :16] = 0
    quantized = apply(model, Scheme(weights=parse_format("int2_g16")), "learned:6", some_ids(4, 16))
    assert quantized(some_ids(4, 16)).isfinite().all()
    assert not quantized.model.layers[0].mlp.up_proj.weight.dequantize()[:, :16].any()


def test_the_same_again_gives_the_same_bits():
    scheme, ids = Scheme(weights=parse_format("int2_g16")), some_ids(4, 16)
    first = apply(random_model(), scheme, "learned:6", ids)
    torch.manual_seed(99)  # of no account
    with torch.no_grad():
        again = apply(random_model(), scheme, "learned:6", ids)
        assert torch.equal(first(ids), again(ids))


def test_without_calibration_it_says_what_it_needs():
    with pytest.raises(DiffbitError, match="calibration"):
        apply(random_model(), Scheme(weights=parse_format("int2_g16")), "learned")


@pytest.mark.slow
def test_the_number_of_steps_is_in_the_recipe() -> None:
    passes = passes_of(random_model(), some_ids(8, 32), Scheme(weights=parse_format("int2_g16")))
    names = ("learned", f"learned:{learned.STEPS}", "learned:3")
    codes = {}
    for recipe in names:
        passes.layer.refitted.clear()
        codes[recipe] = torch.cat([w.codes.flatten() for w in quantize_one(passes, parse_recipe(recipe)).values()])
    assert torch.equal(codes["learned"], codes[names[1]])
    assert not torch.equal(codes["learned"], codes["learned:3"])
    assert parse_recipe("rotate+learned:3").name == "rotate+learned:3"


@pytest.mark.parametrize("wrong", ["gptq:3", "learned:", "learned:0", "learned:x", "learned:-1", "learned:3:4"])
def test_wrong_steps_are_refused(wrong: str) -> None:
    with pytest.raises(DiffbitError, match=r"steps.*; write"):
        parse_recipe(wrong)
