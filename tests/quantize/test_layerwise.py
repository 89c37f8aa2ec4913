"""Layer by layer: the same bits from a folder and in memory; tied heads and transforms; what is refused."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from diffbit import models
from diffbit.calib_data import eval_windows
from diffbit.formats import Format, QTensor, parse_format
from diffbit.io import plugins
from diffbit.io.errors import DiffbitError
from diffbit.models import Checkpoint, Decoder, ModelConfig
from diffbit.quantize import Scheme, apply, layerwise, load, quantize_checkpoint, read_weight, resolve
from diffbit.quantize import layer as layer_module
from diffbit.quantize.calibration import CalibStats, Passes, Tokens
from diffbit.quantize.layer import FINAL_NORM, Layer
from diffbit.quantize.layerwise import quantize_layers
from diffbit.quantize.methods import Method, parse_recipe
from diffbit.quantize.methods.rtn import quantize as rtn

from ..configs import resized

CONFIG = ModelConfig.uniform(
    vocab_size=96, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=128,
    attention="diff_v1",
)  # fmt: skip
ATTENTIONS = ["softmax", "diff_v1", "diff_v2"]
IDS = torch.randint(96, (5, 20), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(20) < torch.tensor([20, 20, 7, 20, 13])[:, None]
INT4 = Scheme(weights=parse_format("int4_g32"))
TABLES = replace(INT4, embedding=INT4.weights, head=INT4.weights)
WITH_HEAD = replace(INT4, overrides=(("lm_head", parse_format("int4_g32")),))


def make(config: ModelConfig) -> Decoder:
    torch.manual_seed(0)
    decoder = Decoder(config)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() == 2:
                parameter.mul_(4)
    return decoder


def by_activations(weight: torch.Tensor, format: Format, stats: CalibStats) -> QTensor:
    """A rounding that shows in its result what statistics it was given."""
    return rtn(weight * (1 + stats.gram.diagonal().sqrt() / 8 + stats.mean_abs / 8 + stats.absmax / 64), format)


def untie(layer: Layer, passes: Passes) -> None:
    """The final norm's weight into the head."""
    if FINAL_NORM in layer.tensors:
        norm = layer.tensors[FINAL_NORM].float()
        layer.tensors["lm_head.weight"] = layer.tensors["lm_head.weight"].float() * norm
        layer.tensors[FINAL_NORM] = torch.ones_like(norm)


def overflow(layer: Layer, passes: Passes) -> None:
    for name, tensor in layer.tensors.items():
        if name.endswith("input_layernorm.weight"):
            layer.tensors[name] = tensor.float() * 1e6


class Looker:
    """A transform that changes nothing and keeps what it sees of each layer; behind it comes "nearest", which is rtn
    without statistics."""

    def __init__(self) -> None:
        self.rounding: Any = lambda weight, format, stats: rtn(weight, format)
        self.hidden: dict[int, torch.Tensor] = {}
        self.exact: dict[int, torch.Tensor] = {}
        self.stages: dict[int, list[list[str]]] = {}
        self.grams: dict[str, CalibStats] = {}  # with the stages before quantized
        self.at_once: dict[str, CalibStats] = {}  # with the layer itself all float

    def transform(self, layer: Layer, passes: Passes) -> None:
        assert passes.tokens is not None
        self.hidden[layer.index] = passes.tokens.hidden.clone()
        self.exact[layer.index] = passes.tokens.exact.hidden.clone()
        if not layer.formats:
            return
        self.stages[layer.index] = layer.stages()
        self.at_once |= passes.stats()
        quantized: dict[str, QTensor] = {}
        for stage in layer.stages():
            self.grams |= passes.stats(quantized, stage)
            for name in stage:
                weight, format = layer.tensors[f"{name}.weight"], layer.formats[name]
                quantized[name] = self.rounding(weight, format, self.grams[name])


LOOKER = Looker()


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Methods that are not in the folder."""
    methods: dict[str, Any] = {
        "untie": {"transform": untie, "config": lambda config: replace(config, tie_embeddings=False)},
        "forgets": {"transform": untie},
        "needs": {"round": by_activations, "calibrated": True},
        "look": {"transform": LOOKER.transform, "calibrated": True, "steps": 1},
        "overflow": {"transform": overflow},
        "nearest": {"round": lambda weight, format, stats: rtn(weight, format)},
    }
    names = {name: f"diffbit.quantize.methods.{name}" for name in ("rtn", *methods)}
    folder, others = "diffbit.quantize.methods", plugins.names
    monkeypatch.setattr(plugins, "names", lambda which: names if which == folder else others(which))
    for name, fields in methods.items():
        module: Any = SimpleNamespace(METHOD=Method(name, "made up", **fields))
        monkeypatch.setitem(sys.modules, f"diffbit.quantize.methods.{name}", module)


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize(
    ("attention", "method", "scheme", "tie", "dtype"),
    [
        ("diff_v1", "rtn", INT4, False, torch.float32),
        ("diff_v1", "needs", WITH_HEAD, True, torch.float32),
        ("diff_v1", "needs", TABLES, True, torch.bfloat16),
        ("diff_v1", "untie+needs", INT4, True, torch.bfloat16),
        ("diff_v1", "untie+needs", WITH_HEAD, True, torch.float32),
        ("diff_v2", "needs", INT4, True, torch.bfloat16),
        ("diff_v2", "untie+needs", WITH_HEAD, False, torch.bfloat16),
        ("softmax", "rtn", WITH_HEAD, True, torch.bfloat16),
        ("softmax", "needs", INT4, False, torch.float32),
    ],
)
def test_a_folder_and_memory_give_the_same_bits(
    attention: str, method: str, scheme: Scheme, tie: bool, dtype: torch.dtype, tmp_path: Path
) -> None:
    models.save(make(resized(CONFIG, attention=attention, tie_embeddings=tie)), tmp_path / "float", dtype=dtype)
    source = models.load(tmp_path / "float", dtype=dtype)
    options = {} if method == "rtn" else {"calibration": IDS, "calibration_mask": MASK}
    quantize_checkpoint(tmp_path / "float", tmp_path / "q", scheme, method=method, **options)
    stored = Checkpoint(tmp_path / "q")
    before = {name: tensor.clone() for name, tensor in source.state_dict().items()}
    applied = apply(source, scheme, method, *options.values())
    assert all(torch.equal(source.state_dict()[name], tensor) for name, tensor in before.items())
    untied = not tie or scheme is WITH_HEAD or method == "untie+needs"
    assert applied.config.tie_embeddings == stored.config.tie_embeddings == (not untied)
    for name in models.checkpoint.names.shapes(applied.config):
        weight = read_weight(stored, name)
        if isinstance(weight, QTensor):
            expected = applied.get_submodule(name.removesuffix(".weight")).weight
            assert torch.equal(weight.codes, expected.codes) and torch.equal(weight.scale, expected.scale)
        else:
            assert weight.dtype == applied.get_parameter(name).dtype
            assert torch.equal(weight, applied.get_parameter(name))
    assert torch.equal(load(tmp_path / "q", dtype=dtype)(IDS), applied(IDS))


class Largest(TorchDispatchMode):
    """The most numbers in a float32 tensor that anything computes."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.dtype == torch.float32 and tensor.device.type != "meta":
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // 4)
        return out


@pytest.mark.slow
@pytest.mark.parametrize(("method", "tie"), [("rtn", False), ("gptq", False), ("learned", True)])
def test_tables_are_rounded_in_parts(method: str, tie: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No float32 copy of a table is made; a tied one of 4 bits is rounded for what it does as a head."""
    monkeypatch.setattr(layer_module, "TABLE_PART", 1 << 14)
    monkeypatch.setattr(layer_module, "MEASURED_ROWS", 256)
    tables = replace(TABLES, weights=None)
    config = resized(CONFIG, vocab_size=1024, tie_embeddings=tie)
    models.save(make(config), tmp_path / "float", dtype=torch.bfloat16)
    with Largest() as largest:
        report = quantize_checkpoint(tmp_path / "float", tmp_path / "q", tables, method=method, calibration=IDS)
    assert largest.numbers < config.vocab_size * config.hidden_size
    rows = {row.name: row for row in report.weights}
    table = rows["model.embed_tokens" if tie else "lm_head"]
    assert table.output_error is not None
    assert (table.proxy_loss is None) == (method == "rtn")
    if tie:
        plain = quantize_checkpoint(tmp_path / "float", tmp_path / "rtn", tables)
        assert table.weight_error > plain.weights[0].weight_error  # what it does matters, not what it is
        assert len(report.weights) == len(plain.weights)
        assert plain.weights[0].output_error is None


@torch.no_grad()
def test_a_large_table_is_not_refined(monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps nearly all that GPTQ gains; layers are rounded as before."""
    exact, layer = make(CONFIG), "model.layers.1.mlp.up_proj"
    others = apply(exact, INT4, "gptq", IDS, MASK)
    inputs: list[torch.Tensor] = []
    others.lm_head.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0][MASK]))
    others(IDS, attention_mask=MASK.long())

    def loss(head: QTensor) -> float:
        return float((inputs[0] @ (exact.lm_head.weight - head.dequantize()).T).square().sum())

    def head(large: int) -> QTensor:
        monkeypatch.setattr(layerwise, "LARGE", large)
        quantized = apply(exact, WITH_HEAD, "gptq", IDS, MASK)
        assert torch.equal(quantized.get_submodule(layer).weight.codes, others.get_submodule(layer).weight.codes)
        return quantized.lm_head.weight

    plain = rtn(exact.lm_head.weight, parse_format("int4_g32"))
    refined, quick = head(CONFIG.vocab_size), head(CONFIG.vocab_size - 1)
    assert loss(refined) < loss(quick) < 0.8 * loss(plain)


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("tie", [False, True])
def test_a_transform_is_exact_and_may_untie(tie: bool) -> None:
    exact = make(resized(CONFIG, tie_embeddings=tie))
    changed = apply(exact, replace(INT4, weights=None, overrides=(("lm_head", parse_format("int8")),)), "untie")
    assert (changed.model.norm.weight == 1).all()
    folded = exact.head(exact.embed(IDS)), changed.head(changed.embed(IDS))
    assert (folded[0] - folded[1]).abs().max() < 0.02 * folded[0].abs().max()


@pytest.mark.usefixtures("made_up")
def test_a_transform_that_overflows_the_dtype_is_refused() -> None:
    with pytest.raises(
        DiffbitError, match=r"layers.0.input_layernorm.weight: method 'overflow' makes it NaN or infini"
    ):
        apply(make(CONFIG).half(), INT4, "overflow")


def linears(kinds: str) -> list[str]:
    return [{"g": "mlp.gate", "u": "mlp.up", "d": "mlp.down"}.get(x, f"self_attn.{x}") + "_proj" for x in kinds]


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_layerwise_statistics_equal_those_of_the_whole_model(attention: str, dtype: torch.dtype) -> None:
    """Hidden states and Gram matrices against forward passes of whole models, which are quantized so far; in float64
    the products."""
    exact = make(resized(CONFIG, attention=attention)).to(dtype)
    quantized = apply(exact, WITH_HEAD, "look+nearest", IDS, MASK)
    exact, quantized = exact.float(), quantized.float()
    whole = make(exact.config)
    whole.load_state_dict(exact.state_dict())

    def inputs(decoder: Decoder, names: list[str]) -> dict[str, torch.Tensor]:
        by_name: dict[str, torch.Tensor] = {}
        handles = [
            decoder.get_submodule(name).register_forward_pre_hook(
                lambda _, arguments, name=name: by_name.__setitem__(name, arguments[0][MASK])
            )
            for name in names
        ]
        with torch.no_grad():
            decoder(IDS, attention_mask=MASK)
        for handle in handles:
            handle.remove()
        return by_name

    for states, decoder in ((LOOKER.exact, exact), (LOOKER.hidden, quantized)):
        inputs_of = inputs(decoder, ["model.layers.0", "model.layers.1", "model.norm"])
        for index, x in enumerate(inputs_of.values()):
            torch.testing.assert_close(states[index][MASK], x, rtol=1e-4, atol=1e-5)
    assert (LOOKER.hidden[2] - LOOKER.exact[2]).abs().max() > 0.01

    for index, stages in LOOKER.stages.items():
        prefix = f"model.layers.{index}." if index < 2 else ""
        expected = [[f"{prefix}{name}" for name in linears(kinds)] for kinds in ("qkv", "o", "gu", "d")]
        assert stages == (expected if index < 2 else [["lm_head"]])
        before = inputs(whole, [name for stage in stages for name in stage])
        for stage in stages:
            inputs_of = inputs(whole, stage)
            for name in stage:
                for stats, x in ((LOOKER.grams[name], inputs_of[name]), (LOOKER.at_once[name], before[name])):
                    gram = x.double().T @ x.double() / len(x)
                    torch.testing.assert_close(stats.gram.double(), gram, rtol=1e-3, atol=1e-5)
                    torch.testing.assert_close(stats.absmax, x.abs().amax(0), rtol=1e-4, atol=1e-5)
                    assert stats.tokens == MASK.sum() == len(x)
            with torch.no_grad():
                for name in stage:
                    weight = whole.get_submodule(name).weight
                    weight.copy_(rtn(weight, WITH_HEAD.format_for(name)).dequantize())


@pytest.mark.usefixtures("made_up")
def test_stages_come_from_what_layers_are_handed() -> None:
    scheme = replace(INT4, overrides=(("*.k_proj", None), ("*.lambda_proj", parse_format("int8"))))
    apply(make(resized(CONFIG, attention="diff_v2")), scheme, "look+nearest", IDS)
    stages = [[name.rpartition(".")[2].removesuffix("_proj") for name in stage] for stage in LOOKER.stages[1]]
    assert [sorted(stage) for stage in stages] == [["lambda", "q", "v"], ["o"], ["gate", "up"], ["down"]]


@pytest.mark.usefixtures("made_up")
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_padding_does_not_count(attention: str) -> None:
    exact = make(resized(CONFIG, attention=attention))
    filled = torch.where(MASK, IDS, 95 - IDS)
    one, other = (apply(exact, WITH_HEAD, "needs", ids, MASK) for ids in (IDS, filled))
    everything = apply(exact, WITH_HEAD, "needs", filled)
    assert torch.equal(one(IDS), other(IDS))
    assert not torch.equal(one(IDS), everything(IDS))


@pytest.mark.usefixtures("made_up")
def test_each_stage_reads_the_output_of_the_quantized_stage_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe itself goes stage by stage: its result is that of rounding by hand with such statistics."""
    exact = make(CONFIG)
    monkeypatch.setattr(LOOKER, "rounding", by_activations)
    apply(exact, INT4, "look+nearest", IDS, MASK)
    quantized = apply(exact, INT4, "needs", IDS, MASK)
    for kind in linears("qkvogud"):
        name = f"model.layers.0.{kind}"
        weight, rounded = exact.get_submodule(name).weight.detach(), quantized.get_submodule(name).weight
        expected, other = (by_activations(weight, rounded.format, of[name]) for of in (LOOKER.grams, LOOKER.at_once))
        assert torch.equal(rounded.codes, expected.codes) and torch.equal(rounded.scale, expected.scale)
        assert torch.equal(rounded.scale, other.scale) == (kind in linears("qkv"))


@pytest.mark.usefixtures("made_up")
def test_the_report_has_the_loss_that_the_method_minimised(tmp_path: Path) -> None:
    models.save(make(CONFIG), tmp_path / "float")
    options: dict[str, Any] = {"calibration": IDS, "calibration_mask": MASK}
    report = quantize_checkpoint(tmp_path / "float", tmp_path / "q", WITH_HEAD, method="needs", **options)
    assert report.method == "needs" and len(report.weights) == 15
    first = next(row for row in report.weights if row.name == "model.layers.0.self_attn.q_proj")
    assert first.proxy_loss == pytest.approx(first.output_error**2, rel=1e-3), "both on the float model's embedding"
    assert all(row.proxy_loss > 0 for row in report.weights)
    report = quantize_checkpoint(tmp_path / "float", tmp_path / "r", WITH_HEAD, **options)
    assert {row.proxy_loss for row in report.weights} == {None}


@pytest.mark.usefixtures("made_up")
def test_bad_requests_are_refused(tmp_path: Path) -> None:
    tied = make(resized(CONFIG, tie_embeddings=True))
    models.save(tied, tmp_path / "float")
    with pytest.raises(DiffbitError, match="'forgets' changes the embedding that the head shares"):
        apply(tied, INT4, "forgets")
    with pytest.raises(DiffbitError, match=r"'untie\+needs' needs calibration text: pass --calibrate"):
        quantize_checkpoint(tmp_path / "float", tmp_path / "q", INT4, method="untie+needs")
    with pytest.raises(DiffbitError, match="'needs' needs calibration text"):
        apply(tied, INT4, "needs")
    assert [path.name for path in tmp_path.iterdir()] == ["float"]


def test_text_unlike_that_of_the_training_is_told(trained: Any) -> None:
    """A model of code calibrated on code, on its words in random order, and on few tokens of those."""
    path = trained("diff_v1")
    decoder, plain = models.load(path), parse_recipe("rtn")
    code = torch.from_numpy(eval_windows("stdlib", path, 128, 16, split="calib").ids)
    shuffled = code.flatten()[torch.randperm(code.numel(), generator=torch.Generator().manual_seed(0))].view_as(code)
    warnings = []
    for ids in (code, shuffled, shuffled[:4]):
        tokens = Tokens(decoder.config, ids, compared_windows=8)
        for _ in quantize_layers(
            decoder.config, decoder.state_dict().__getitem__, resolve(decoder.config), plain, tokens
        ):
            pass
        with torch.no_grad():
            logits = decoder(tokens.exact.ids)[:, :-1].flatten(0, 1)
        assert tokens.loss == pytest.approx(float(F.cross_entropy(logits, tokens.exact.ids[:, 1:].flatten())), rel=1e-4)
        warnings.append(tokens.unlike())
    assert warnings[0] is None and warnings[2] is None
    assert warnings[1] is not None and "far from what the model was trained on" in warnings[1]
    tokens = Tokens(decoder.config, shuffled)
    tokens.loss = 1000.0  # exp of it overflows
    assert "1000.00 nats per token (perplexity 1" in str(tokens.unlike())
