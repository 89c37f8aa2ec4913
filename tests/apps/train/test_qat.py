"""Quantization-aware training against what the runtime computes and against its papers' formulas written out."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from diffbit.apps.train import trainer as trainer_module
from diffbit.apps.train.folder import read_log
from diffbit.apps.train.initialize import initialize
from diffbit.apps.train.presets import train_config
from diffbit.apps.train.qat import QATLinear, prepare, refresh
from diffbit.apps.train.trainer import learning_rate, train, weight_decay
from diffbit.export import export_artifact
from diffbit.formats import QuantLinear, parse_format
from diffbit.formats.grid import LEVELS
from diffbit.formats.rounding import INT8, Rounding, rounded_input
from diffbit.io.errors import DiffbitError
from diffbit.models import Checkpoint, Decoder, load
from diffbit.quantize import Scheme, quantize_checkpoint
from diffbit.quantize import load as load_quantized
from diffbit.runtime import verify

from ...configs import BIASES, resized
from .toy import model, options, stop_at

INT4 = {"q_proj": Rounding(4), "down_proj": Rounding(4, 32)}


def layer(
    format: str, rounding: Rounding = INT8, columns: int = 96, rows: int = 24, trainable: str = "all"
) -> QATLinear:
    torch.manual_seed(1)
    linear = nn.Linear(columns, rows, bias=False)
    with torch.no_grad():
        linear.weight.normal_(0, 0.05)
    return QATLinear(linear, parse_format(format), parse_format(format).device_rounding(rounding), trainable)


def inputs(columns: int = 96) -> torch.Tensor:
    x = torch.randn(2, 20, columns, generator=torch.Generator().manual_seed(2))
    x[0, 3] = 0
    x[1, 4, 7] = 40
    return x.requires_grad_()


@pytest.mark.parametrize("rounding", [INT8, *INT4.values()])
@pytest.mark.parametrize("instructions", ["those there are", "no int8"])
def test_ternary_forward_is_the_operators(
    monkeypatch: pytest.MonkeyPatch, rounding: Rounding, instructions: str
) -> None:
    if instructions == "no int8":
        monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    ours, x = layer("ternary", rounding), inputs()
    expected = QuantLinear(ours.quantized(), rounding)(x.detach())
    assert torch.equal(ours(x), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(ours(x), expected.bfloat16())
        assert torch.equal(QuantLinear(ours.quantized(), rounding)(x), expected)
    assert parse_format("ternary").rounding("model.layers.0.mlp.down_proj", 96, "int4") == INT4["down_proj"]
    assert parse_format("ternary").rounding("model.layers.0.self_attn.q_proj", 96, "int4") == INT4["q_proj"]


def spread(block: int, columns: int) -> torch.Tensor:
    """H of size `block` on the diagonal, float64 [K, K]."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while len(matrix) < block:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return torch.block_diag(*[matrix / math.sqrt(block)] * (columns // block))


@pytest.mark.parametrize("rounding", [INT8, *INT4.values()])
def test_ternary_gradients_are_straight_through(rounding: Rounding) -> None:
    """Against float64 autograd over x + (x_q - x).detach() times W + (W_q - W).detach()."""
    ours, x = layer("ternary", rounding), inputs()
    upstream = torch.randn(2, 20, 24, generator=torch.Generator().manual_seed(3))
    got = torch.autograd.grad(ours(x), (x, ours.weight), upstream)

    slow_x, weight = x.detach().double().requires_grad_(), ours.weight.detach().double().requires_grad_()
    matrix = spread(rounding.hadamard, 96)
    spread_x, spread_weight = slow_x @ matrix, weight @ matrix
    q, a = rounded_input(x.detach(), rounding)
    rounded = spread_x + ((q * a).double() - spread_x).detach()
    s = spread_weight.detach().abs().mean().clamp(min=1e-5)
    ternary = spread_weight + (s * (spread_weight / s).round().clamp(-1, 1) - spread_weight).detach()
    expected = torch.autograd.grad(rounded @ ternary.T, (slow_x, weight), upstream.double())
    for ours_, theirs in zip(got, expected, strict=True):
        assert (ours_ - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize(
    "format", ["int2_g32", "int3", "int4_g64", "int8_g16", "bin_g32", "ternary_g64", "balanced2_g32"]
)
def test_learned_scales_against_the_papers_formulas(format: str) -> None:
    """LSQ, eq. 1-3 and section 2.2, element by element; 90 columns leave the last group short."""
    ours = layer(format, columns=90, rows=6)
    assert ours.factor is not None
    with torch.no_grad():
        ours.factor.copy_(torch.linspace(0.4, 1.3, ours.factor.numel()).view_as(ours.factor))
    ours.refresh()
    signed = format in ("int2_g32", "int3", "int4_g64")  # the others have as many levels on either side, or hardly more
    assert ((ours.scale < 0).any() and (ours.scale > 0).any()) or not signed
    x, upstream = torch.randn(1, 5, 90), torch.randn(1, 5, 6)
    out = ours(x)
    rounded = x if ours.rounding is None else ours.rounding(x)
    got = torch.autograd.grad(out, (ours.weight, ours.factor), upstream)

    levels = LEVELS.get(format.partition("_")[0]) or range(-(2 ** (int(format[3]) - 1)), 2 ** (int(format[3]) - 1))
    low, high = levels[0], levels[-1]
    group = int(format.partition("_g")[2] or 90)
    to_value = upstream[0].double().T @ rounded[0].double()  # [N, K]
    weight, scale = ours.weight.detach().double(), ours.scale.double()
    value, to_weight, to_scale = torch.zeros(6, 90), torch.zeros(6, 90), torch.zeros(ours.scale.shape)
    bounds = 0
    for row in range(6):
        for column in range(90):
            s = scale[row, column // group]
            v, g = weight[row, column] / s, to_value[row, column]
            nearest = min(levels, key=lambda level, v=float(v): abs(level - v))
            value[row, column] = nearest * s
            if low < v < high:
                to_weight[row, column] = g
                to_scale[row, column // group] += g * (nearest - v)
            else:
                bounds += 1
                to_scale[row, column // group] += g * (low if v <= low else high)
    assert bounds > 5
    for index in range(ours.scale.shape[1]):
        n = min(90, (index + 1) * group) - index * group
        to_scale[:, index] /= math.sqrt(n * high)
    assert torch.equal(ours.quantized().dequantize(), value)
    assert torch.equal(out, nn.functional.linear(rounded, value))
    assert (got[0] - to_weight).norm() <= 1e-5 * to_weight.norm()
    assert (got[1] - to_scale * ours.start).norm() <= 1e-4 * (to_scale * ours.start).norm()


def test_gradients_of_several_passes_are_gathered() -> None:
    """Passes that gather and one that does not give the sum of all passes' gradients."""
    ours = layer("int3_g32")
    passes = [(torch.randn(5, 96), torch.randn(5, 24)) for _ in range(3)]
    expected = [torch.zeros_like(ours.weight), torch.zeros_like(ours.factor)]
    for x, upstream in passes:
        for total, one in zip(
            expected, torch.autograd.grad(ours(x), (ours.weight, ours.factor), upstream), strict=True
        ):
            total += one
    for index, (x, upstream) in enumerate(passes):
        ours.gathers = index < 2
        ours(x).backward(upstream)
        assert (ours.weight.grad is None) == ours.gathers
    assert ours.factor is not None
    for got, exact in zip((ours.weight.grad, ours.factor.grad), expected, strict=True):
        assert got is not None and (got - exact).norm() <= 1e-5 * exact.norm()
    assert ours.gathered is None


@pytest.mark.parametrize("format", ["int3_g32", "int8"])
def test_scales_are_trained_with_fixed_codes(format: str) -> None:
    """The gradient is that of autograd through codes times scales; codes stay whatever the scales become."""
    ours, x = layer(format, trainable="scales"), torch.randn(7, 96)
    rounded = x if ours.rounding is None else ours.rounding(x)
    codes, factor = ours.codes.clone(), ours.factor
    assert factor is not None
    integers = (ours.quantized().dequantize().double() / ours.scale.double().repeat_interleave(
        96 // ours.scale.shape[1], 1
    )).round()  # fmt: skip
    scale = (ours.start * factor).double().repeat_interleave(96 // ours.scale.shape[1], 1)
    upstream = torch.randn(7, 24)
    count, high = 96 // ours.scale.shape[1], 2 ** (int(format[3]) - 1) - 1
    (exact,) = torch.autograd.grad((rounded.double() @ (integers * scale).T * upstream).sum(), factor)
    (got,) = torch.autograd.grad(ours(x), factor, upstream)
    assert (got * math.sqrt(count * high) - exact).norm() <= 1e-5 * exact.norm()
    with torch.no_grad():
        factor *= 1.5
    assert ours.refresh() == 0 and torch.equal(ours.codes, codes)
    assert torch.allclose(ours.scale, ours.start * 1.5, rtol=1e-3)


@pytest.mark.parametrize("format", ["ternary", "int4_g32", "nf4"])
def test_adapters_are_folded_in_before_rounding(format: str) -> None:
    """A layer with adapters computes and saves what one with the weight W + B A does; B A has the weight's gradient."""
    ours, x = layer(format, columns=128, trainable="lora"), torch.randn(7, 128)
    assert ours.down is not None and torch.equal(ours.master(), ours.weight)
    with torch.no_grad():
        ours.up.normal_(0, 0.02)
    ours.refresh()
    plain = layer(format, columns=128)
    with torch.no_grad():
        plain.weight.copy_(ours.weight + ours.up @ ours.down)
    plain.refresh()
    if plain.factor is not None:  # scales start from the weight before the adapters
        plain.start = ours.start
        plain.refresh()
    assert torch.equal(ours(x), plain(x)) and torch.equal(ours.codes, plain.codes)
    (to_weight,) = torch.autograd.grad(plain(x).square().sum(), plain.weight)
    to_down, to_up = torch.autograd.grad(ours(x).square().sum(), (ours.down, ours.up))
    assert torch.allclose(to_down, ours.up.T @ to_weight, rtol=1e-4, atol=1e-5)
    assert torch.allclose(to_up, to_weight @ ours.down.T, rtol=1e-4, atol=1e-5)
    ours.fold()
    assert torch.equal(ours.weight, plain.weight) and torch.equal(ours(x), plain(x))


@pytest.mark.parametrize("trainable", ["scales", "lora"])
def test_a_run_trains_what_it_says_and_resumes_bit_for_bit(text: str, tmp_path: Path, trainable: str) -> None:
    start = train(options(text, steps=2), tmp_path / "start").path
    config = options(
        text, init=str(start), tokenizer=str(start), qat="int3_g16", trainable=trainable, steps=7, accumulate=2,
        learning_rate=3e-2,
    )  # fmt: skip
    whole = train(config, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 6)
        train(config, tmp_path / "stopped")
    assert train(config, tmp_path / "stopped", resume=True).losses == whole.losses
    models = [load_quantized(tmp_path / name) for name in ("whole", "stopped")]
    before, after = load(start).state_dict(), load(whole.path / "master").state_dict()
    rounded = prepare(load(start), config.scheme)  # type: ignore[arg-type]
    quantized = [[module.weight for module in each.modules() if isinstance(module, QuantLinear)] for each in models]
    for first, second, old in zip(*quantized, rounded, strict=True):
        assert torch.equal(first.codes, second.codes) and torch.equal(first.scale, second.scale)
        assert torch.equal(first.codes, old.codes) == (trainable == "scales")
        assert not torch.equal(first.scale, old.scale)
    for name, weight in before.items():
        trained = weight.ndim < 2 or (trainable == "lora" and name.endswith("_proj.weight"))
        assert torch.equal(weight, after[name]) != trained, name
    assert {file.name for file in whole.path.iterdir()} >= {"config.json", "model.safetensors", "master"}


def test_scales_of_a_quantized_checkpoint_are_trained_further(text: str, tmp_path: Path) -> None:
    """Its codes stay, whatever method chose them, and so do its tables; other formats are refused."""
    start = train(options(text, steps=2), tmp_path / "start").path
    quantize_checkpoint(
        start,
        tmp_path / "rtn",
        Scheme(weights=parse_format("int3_g16"), embedding=parse_format("int8"), head=parse_format("int8")),
    )
    weights = dict(load_quantized(tmp_path / "rtn").named_modules())
    config = options(
        text, init=str(tmp_path / "rtn"), tokenizer=str(start), qat="int3_g16", trainable="scales",
        learning_rate=3e-2, steps=3,
    )  # fmt: skip
    out = train(config, tmp_path / "out").path
    for name, module in load_quantized(out).named_modules():
        if isinstance(module, QuantLinear):
            assert torch.equal(module.weight.codes, weights[name].weight.codes)
            assert not torch.equal(module.weight.scale, weights[name].weight.scale)
    table = weights["model.embed_tokens"].weight.dequantize()
    assert torch.equal(load(out / "master").get_parameter("model.embed_tokens.weight"), table)
    with pytest.raises(DiffbitError, match="is int3_g16 in the quantized checkpoint that training starts from"):
        train(replace(config, qat="int3_g32"), tmp_path / "other")
    from_it = train_config("tiny", init=config.init, qat="int3_g16", trainable="scales")
    assert from_it.init == config.init and from_it.learning_rate == 0.5 * train_config("tiny").learning_rate
    with pytest.raises(DiffbitError, match="is quantized, but training starts from float weights"):
        train_config("tiny", init=config.init, qat="int3_g16", trainable="lora")


def test_a_scale_never_reaches_zero_and_a_group_of_zeros_wakes() -> None:
    linear = nn.Linear(64, 4, bias=False)
    with torch.no_grad():
        linear.weight[1, :32] = 0
    ours = QATLinear(linear, parse_format("int4_g32"), None)
    assert (ours.codes[1, :32] == ours.zero).all() and (ours.scale != 0).all()
    with torch.no_grad():
        ours.factor.zero_()  # type: ignore[union-attr]
        ours.weight[1, :32] = 1.0
    ours.refresh()
    assert (ours.scale.abs() == 2.0**-24).all() and torch.isfinite(ours(torch.randn(3, 64))).all()


@pytest.mark.parametrize("format", ["ternary", "int3_g16", "nf4"])
def test_the_forward_is_the_quantized_layer_and_gradients_pass_straight_through(format: str) -> None:
    ours, x = layer(format, columns=128), inputs(128)
    quantized = ours.quantized()
    assert torch.equal(ours(x), QuantLinear(quantized, ours.rounding)(x.detach()))
    to_x, to_weight = torch.autograd.grad(ours(x).sum(), (x, ours.weight))
    assert torch.allclose(to_x, quantized.dequantize().sum(0).expand_as(to_x), atol=1e-4)
    if format == "ternary":  # int8, one scale a token
        scale = x.detach().abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
        rounded = (x.detach() / scale).round() * scale
    else:
        rounded = x.detach() if ours.rounding is None else ours.rounding(x.detach())
    if format != "int3_g16":  # LSQ passes nothing to a weight outside its range
        assert torch.allclose(to_weight, rounded.sum((0, 1)).expand_as(to_weight), atol=1e-3)


def test_flips_and_zeros_by_hand() -> None:
    linear = nn.Linear(4, 2, bias=False)
    linear.weight = nn.Parameter(torch.tensor([[1.0, -1.0, 0.1, 1.0], [1.0, 0.2, 1.0, -1.0]]))
    ours = QATLinear(linear, parse_format("ternary"), INT8)  # absmean 0.79: signs, and two zeros
    with torch.no_grad():
        ours.weight[0] *= -1  # three signs turn, a zero stays
        ours.weight[1, 1] = 1.0  # and one comes up
    assert refresh([ours]) == {"flips": 4 / 8, "zeros": 1 / 8}
    assert refresh([ours]) == {"flips": 0.0, "zeros": 1 / 8}


FORMATS = [
    ("ternary", "int8"), ("ternary", "int4"), ("int3", "int8"), ("int2_g16", "int8"), ("bin_g32", "int8"),
    ("balanced2_g32", "int8"),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("format", "activations"), FORMATS)
def test_what_is_saved_is_what_was_trained(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, format: str, activations: str
) -> None:
    """The folder's logits, its inputs rounded as an artifact's, are the trained model's; master trains on."""
    kept: list[Decoder] = []
    place = trainer_module.place_model
    monkeypatch.setattr(
        trainer_module, "place_model", lambda trained, *rest: (kept.append(trained), place(trained, *rest))
    )
    config = options(text, qat=format, activations=activations, steps=4, learning_rate=1e-2)
    changes = {"sub_norms": True} if format == "ternary" else {"qk_norm_eps": 1e-6, **BIASES}
    config = replace(config, model=resized(config.model, **changes))
    result = train(config, tmp_path / "out")
    saved = load_quantized(tmp_path / "out")
    for module in saved.modules():
        if isinstance(module, QuantLinear):
            module.rounding = module.weight.format.device_rounding(module.rounding)
    ids = torch.randint(288, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(saved(ids), kept[0].eval()(ids))
    log = read_log(tmp_path / "out")
    assert all(0 < row["zeros"] < 1 for row in log) and any(row["flips"] > 0 for row in log)
    assert Checkpoint(tmp_path / "out").quantization is not None

    with pytest.raises(
        DiffbitError, match=r"is quantized, but training starts from float weights; start from .*master"
    ):
        train_config("tiny", init=str(tmp_path / "out"))
    again = replace(config, init=str(tmp_path / "out" / "master"), tokenizer=str(tmp_path / "out"), steps=1, warmup=1)
    first = read_log(train(again, tmp_path / "again").path)[0]["loss"]
    assert first == pytest.approx(result.losses[-1], rel=0.2)
    state = load(tmp_path / "out" / "master").state_dict()
    assert all(torch.equal(weight, kept[0].state_dict()[name]) for name, weight in state.items())


@pytest.mark.parametrize("mlp", ["swiglu", "polynorm"])
def test_a_trained_folder_is_exported_as_it_is(text: str, tmp_path: Path, mlp: str) -> None:
    config = options(text, qat="ternary", steps=3, learning_rate=1e-2)
    config = replace(config, model=resized(config.model, sub_norms=True, mlp=mlp))
    train(config, tmp_path / "out")
    saved = load_quantized(tmp_path / "out")
    for layer in saved.model.layers if mlp == "polynorm" else ():  # whose parameters stay float, and learn
        assert isinstance(layer.mlp.down_proj, QuantLinear)
        assert (layer.mlp.act_fn["weight"] != 1 / 3).all() and layer.mlp.act_fn["bias"] != 0
    artifact = export_artifact(tmp_path / "out", tmp_path / "artifact")
    assert verify(artifact).passed


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_an_interrupted_run_repeats_the_losses_bit_for_bit(text: str, tmp_path: Path, optimizer: str) -> None:
    wide = resized(model("softmax", hidden_size=64, intermediate_size=128), num_heads=8, num_kv_heads=8)
    config = options(text, model=wide, qat="int3_g16", steps=7, learning_rate=1e-2, optimizer=optimizer)
    whole = train(config, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 6)
        train(config, tmp_path / "stopped")
    assert train(config, tmp_path / "stopped", resume=True).losses == whole.losses
    keys = ("loss", "grad_norm", "flips", "zeros", "eval_loss")
    logs = [[[row.get(key) for key in keys] for row in read_log(tmp_path / name)] for name in ("whole", "stopped")]
    assert logs[0] == logs[1]
    weights = [load_quantized(tmp_path / name) for name in ("whole", "stopped")]
    for first, second in zip(*(decoder.modules() for decoder in weights), strict=True):
        if isinstance(first, QuantLinear):
            assert torch.equal(first.weight.codes, second.weight.codes)
            assert torch.equal(first.weight.scale, second.weight.scale)


def test_scales_are_learned_as_factors() -> None:
    """AdamW at a rate of 1e-2 moves a scale by a hundredth, whatever its size."""
    decoder = Decoder(model())
    initialize(decoder, 0)
    config = options("stdlib", qat="int4_g16", learning_rate=1e-2, weight_decay=0.5)
    assert config.scheme is not None
    layers = prepare(decoder, config.scheme)
    before = [layer.scale.clone() for layer in layers]
    optimizer = trainer_module.adamw(decoder, config)
    decoder(torch.randint(288, (2, 16))).logsumexp(-1).sum().backward()
    optimizer.step()
    refresh(layers)
    for layer, scale in zip(layers, before, strict=True):
        assert torch.allclose((layer.scale / scale - 1).abs(), torch.tensor(1e-2), atol=2e-3)


def test_two_stages_by_the_formula() -> None:
    """Up to the peak, down a line; at half time on to the line from two thirds of it, without weight decay."""
    config = options("stdlib", steps=8, warmup=2, learning_rate=3.0, schedule="two_stage", weight_decay=0.4)
    rates = [learning_rate(config, step) for step in range(1, 9)]
    assert rates == pytest.approx([1.5, 3.0, 3 * 6 / 8, 3 * 5 / 8, 2 * 4 / 8, 2 * 3 / 8, 2 * 2 / 8, 2 * 1 / 8])
    assert [weight_decay(config, step) for step in range(1, 9)] == [0.4] * 4 + [0.0] * 4
    assert weight_decay(replace(config, schedule="cosine"), 8) == 0.4


def test_bad_input_is_refused(text: str) -> None:
    untied = replace(model(), tie_embeddings=False)
    for changes, sentence in (
        ({"qat": "int5_g7"}, "format 'int5_g7' has groups of 7"),
        ({"qat": "fp8"}, "'fp8' is not a number format"),
        ({"qat": "ternary", "activations": "int2"}, "activations is 'int2', wanted one of int8, int4"),
        ({"qat": "int4_g32", "activations": "int4"}, "activations is 'int4', wanted int8 unless qat is ternary"),
        ({"trainable": "scales"}, "trainable is 'scales', wanted all or lora without --qat: float weights"),
        ({"qat": "int4_g32", "trainable": "norms"}, "trainable is 'norms', wanted one of all, scales, lora"),
        ({"schedule": "linear"}, "schedule is 'linear', wanted one of cosine, two_stage"),
    ):
        with pytest.raises(DiffbitError, match=sentence):
            options(text, **changes)
    with pytest.raises(DiffbitError, match="cannot learn int4_g32_asym: it has zero points"):
        prepare(Decoder(model()), Scheme(weights=parse_format("int4_g32_asym")))
    with pytest.raises(DiffbitError, match="ternary has no learned scales to train"):
        prepare(Decoder(model()), Scheme(weights=parse_format("ternary")), "scales")
    with pytest.raises(DiffbitError, match="the scheme quantizes no weights"):
        prepare(Decoder(model()), Scheme())
    head = Scheme(weights=parse_format("int4_g32"), overrides=(("lm_head", parse_format("int8")),))
    with pytest.raises(DiffbitError, match="the head shares the embedding's weight"):
        prepare(Decoder(model()), head)
    assert len(prepare(Decoder(untied), head)) == 2 * 7 + 1
