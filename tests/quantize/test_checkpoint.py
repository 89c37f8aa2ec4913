"""Quantized checkpoints: what is written reads back equal, reports tell the truth, bad folders are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from diffbit import models
from diffbit.formats import Format, QTensor, QuantLinear, Rounding, parse_format, quantize_per_token_int8
from diffbit.io.errors import DiffbitError
from diffbit.models import Checkpoint, Decoder, ModelConfig
from diffbit.quantize import (
    AttentionScheme,
    Scheme,
    apply,
    load,
    load_block,
    quantize_checkpoint,
    read_scheme,
    read_weight,
    resolve,
    sizes,
)
from diffbit.quantize.methods.rtn import quantize as rtn

from ..configs import BIASES, resized

CONFIG = ModelConfig.uniform(
    vocab_size=96, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=128,
    attention="diff_v1",
)  # fmt: skip
MIXED = Scheme(
    weights=parse_format("int4_g32_asym"),
    activations="int8",
    attention=AttentionScheme(8),
    overrides=(
        ("*.up_proj", parse_format("nf4")),
        ("*.down_proj", parse_format("ternary")),
        ("model.layers.1.self_attn.q_proj", parse_format("int3_g64")),
        ("*.o_proj", None),
        ("lm_head", parse_format("int8")),
    ),
)
IDS = torch.randint(96, (3, 20), generator=torch.Generator().manual_seed(0))


def make(folder: Path, config: ModelConfig = CONFIG, dtype: torch.dtype = torch.float32) -> Path:
    torch.manual_seed(0)
    decoder = Decoder(config)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() == 2:
                parameter.mul_(4)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.3)
    models.save(decoder, folder, dtype=dtype)
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("models") / "float")


@pytest.fixture(scope="module")
def quantized(model: Path) -> Path:
    quantize_checkpoint(model, model.with_name("mixed"), MIXED)
    return model.with_name("mixed")


def test_weights_read_back_equal(model: Path, quantized: Path):
    source, checkpoint = Checkpoint(model), Checkpoint(quantized)
    formats = MIXED.formats(CONFIG)
    assert {format.name for format in formats.values()} == {"int4_g32_asym", "nf4", "ternary", "int3_g64", "int8"}
    for name in source.names:
        exact, got = source.read(name), read_weight(checkpoint, name)
        format = formats.get(name.removesuffix(".weight"))
        if format is None:
            assert isinstance(got, torch.Tensor) and torch.equal(got, exact)
            continue
        expected = rtn(exact, format)
        assert isinstance(got, QTensor) and got.format == format
        assert torch.equal(got.codes, expected.codes) and torch.equal(got.scale, expected.scale)
        assert (got.zero is None and expected.zero is None) or torch.equal(got.zero, expected.zero)
    assert read_scheme(checkpoint) == MIXED


def test_rows_on_disk_have_the_order_of_the_float_checkpoint(model: Path, quantized: Path):
    """diffllama's row order, for codes, scales and zero points: quantizing the rows on disk gives the parts on disk."""
    floats, parts = load_file(model / "model.safetensors"), load_file(quantized / "model.safetensors")
    for name in ("q_proj", "k_proj", "v_proj"):
        stem = f"model.layers.0.self_attn.{name}"
        weight = rtn(floats[f"{stem}.weight"], parse_format("int4_g32_asym"))
        assert torch.equal(parts[f"{stem}.codes"], weight.packed())
        assert torch.equal(parts[f"{stem}.scale"], weight.scale.half())
        assert torch.equal(parts[f"{stem}.zero"], weight.packed_zero())
    canonical = read_weight(Checkpoint(quantized), f"{stem}.weight")
    assert isinstance(canonical, QTensor) and not torch.equal(canonical.packed(), parts[f"{stem}.codes"])


@pytest.mark.parametrize("attention", ["softmax", "diff_v1", "diff_v2"])
@pytest.mark.parametrize(
    "changes", [{}, {"tie_embeddings": True, "qk_norm_eps": 1e-6, **BIASES}, {"sub_norms": True, "mlp": "relu2"}]
)
def test_load_is_apply_is_dequantized_weights(attention: str, changes: dict[str, object], tmp_path: Path):
    config = resized(CONFIG, attention=attention, **changes)
    source = make(tmp_path / "float", config)
    scheme = Scheme(weights=parse_format("int4_g32"), overrides=(("lm_head", parse_format("int8")),))
    quantize_checkpoint(source, tmp_path / "q", scheme)
    loaded, exact = load(tmp_path / "q"), models.load(source)
    applied = apply(exact, scheme)
    assert not loaded.config.tie_embeddings and isinstance(loaded.lm_head, QuantLinear)
    by_hand = Decoder(replace(config, tie_embeddings=False))
    state = {name: tensor.clone() for name, tensor in exact.state_dict().items()}
    state.setdefault("lm_head.weight", state["model.embed_tokens.weight"].clone())
    for module, format in scheme.formats(config).items():
        state[f"{module}.weight"] = rtn(state[f"{module}.weight"], format).dequantize()
    by_hand.load_state_dict(state)
    torch.testing.assert_close(loaded(IDS), by_hand(IDS))
    assert torch.equal(loaded(IDS), applied(IDS))
    assert (loaded(IDS) - exact(IDS)).abs().max() > 0.01


METHODS = ["gptq", "guided", "learned", "awq+hqq", "clip", "rotate", "rotate_heads+gptq"]


SUB_NORMS: dict[str, Any] = {"sub_norms": True, "mlp": "relu2"}
QWEN2, QWEN3 = {"qkv_bias": True}, {"qk_norm_eps": 1e-6, "head_dim": 24}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "changes", "method"),
    [
        *(("diff_v1", SUB_NORMS, method) for method in METHODS),
        ("softmax", SUB_NORMS, "rotate+gptq"),
        ("diff_v2", SUB_NORMS, "awq+gptq"),
        *(("softmax", QWEN2, method) for method in METHODS),
        *(("softmax", QWEN3, method) for method in METHODS),
        ("diff_v1", {"qk_norm_eps": 1e-6, **BIASES}, "rotate+learned"),
    ],
)
def test_every_method_takes_sub_norms_biases_and_norms_of_queries(attention: str, changes: dict[str, Any], method: str):
    """At 8 bits all that is left is rounding: a method that folded something wrongly would be far off."""
    torch.manual_seed(0)
    decoder = Decoder(resized(CONFIG, num_layers=1, attention=attention, **changes))
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.5)
            else:
                parameter.mul_(4)
    scheme = Scheme(weights=parse_format("int8"), activations="int8")
    with torch.no_grad():
        exact, got = decoder(IDS), apply(decoder, scheme, method.replace("learned", "learned:4"), IDS)(IDS)
    assert (got - exact).norm() / exact.norm() < 0.05


def test_apply_shares_what_it_leaves_alone(model: Path):
    exact = models.load(model)
    copy = apply(exact, Scheme(weights=parse_format("int2_g16")))
    assert copy.model.embed_tokens.weight.data_ptr() == exact.model.embed_tokens.weight.data_ptr()
    assert type(exact.model.layers[0].self_attn.q_proj) is torch.nn.Linear
    with pytest.raises(DiffbitError, match="quantized already"):
        apply(copy, Scheme(weights=parse_format("int8")))


def test_scheme_is_in_force_after_loading(quantized: Path):
    decoder = load(quantized)
    layer = decoder.model.layers[0]
    assert layer.self_attn.k_proj.rounding == layer.mlp.down_proj.rounding == Rounding()
    assert layer.self_attn.logits_hook is not None
    block = load_block(Checkpoint(quantized), 0)
    rope = models.rope_for(CONFIG, torch.arange(20)[None])
    x = decoder.embed(IDS)
    assert torch.equal(block(x, rope), layer(x, rope))


def test_float_checkpoints_load_too(model: Path):
    assert torch.equal(load(model)(IDS), models.load(model)(IDS))
    assert read_scheme(Checkpoint(model)) is None


def slow_output_errors(model: Path, scheme: Scheme, mask: torch.Tensor) -> dict[str, float]:
    """The whole float model in memory, the input of every layer kept, float64."""
    decoder = models.load(model)
    inputs: dict[str, torch.Tensor] = {}
    formats = scheme.formats(decoder.config)
    for module in formats:
        decoder.get_submodule(module).register_forward_hook(
            lambda _, arguments, __, module=module: inputs.__setitem__(module, arguments[0])
        )
    decoder(IDS, attention_mask=mask)
    errors = {}
    for module, format in formats.items():
        x, weight = inputs[module][mask], decoder.get_submodule(module).weight
        rounded = quantize_per_token_int8(x) if scheme.activations or format.name == "ternary" else x
        exact = x.double() @ weight.double().T
        weighs = format.bits < 8 and module != "model.embed_tokens"
        quantized = rtn(weight, format, x.square().mean(0) if weighs else None)
        got = rounded.double() @ quantized.dequantize().double().T
        errors[module] = ((exact - got).norm() / exact.norm()).item()
    return errors


@pytest.mark.parametrize("batch_tokens", [2048, 20])
@pytest.mark.parametrize("attention", ["diff_v1", "diff_v2"])
def test_report_tells_the_truth(attention: str, batch_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from diffbit.quantize.calibration import states

    monkeypatch.setattr(states, "BATCH_TOKENS", batch_tokens)
    source = make(tmp_path / "float", resized(CONFIG, attention=attention))
    mask = torch.ones_like(IDS, dtype=torch.bool)
    mask[1, 15:] = False
    report = quantize_checkpoint(source, tmp_path / "q", MIXED, calibration=IDS.numpy(), calibration_mask=mask.numpy())
    checkpoint = Checkpoint(source)
    expected = slow_output_errors(source, MIXED, mask)
    assert [row.name for row in report.weights] == list(MIXED.formats(checkpoint.config))
    for row in report.weights:
        exact = checkpoint.read(f"{row.name}.weight").double()
        got = read_weight(Checkpoint(tmp_path / "q"), f"{row.name}.weight")
        assert isinstance(got, QTensor)
        error = (exact - got.dequantize().double()).norm() / exact.norm()
        assert row.weight_error == pytest.approx(error.item(), rel=1e-5)
        assert row.output_error == pytest.approx(expected[row.name], rel=1e-3)
        assert (row.format, row.shape) == (got.format.name, got.shape)
        assert row.nbytes == got.format.device_nbytes(got.shape, 4) == row.bits_per_weight * got.codes.numel() / 8
    assert report.calibration_tokens == 55
    assert report.after == sizes(resolve(checkpoint.config, MIXED)) and report.before == sizes(
        resolve(checkpoint.config)
    )
    assert 31.9 < report.before.bits_per_weight <= 32  # lambda vectors become numbers of the graph
    assert any("trained" in warning for warning in report.warnings)
    json.dumps(report.to_dict())
    what, size, last = repr(report).splitlines()
    assert (
        f"{len(report.weights)} weights rounded by rtn on 55 tokens" in what and "7 to int4_g32_asym, 2 to nf4" in what
    )
    assert f" -> {report.after.nbytes / 1e6:.2f} MB" in size and f"{report.after.bits_per_weight:.2f} bits" in size
    assert last == f"warnings: {report.warnings[0]}"
    worst = max(report.weights, key=lambda row: row.output_error or row.weight_error)
    last = repr(replace(report, warnings=())).splitlines()[2]
    assert last.startswith(f"largest output errors: {worst.name.removeprefix('model.')} {worst.output_error:.2%}, ")
    many = repr(replace(report, warnings=("a", "b", "c", "d", "e"))).splitlines()
    assert len(many) == 3 and many[2] == "warnings: a; b; c; and 2 more"


def test_the_report_of_a_cache_alone(model: Path, tmp_path: Path):
    report = quantize_checkpoint(model, tmp_path / "q", Scheme(attention=AttentionScheme(keys="int8")))
    what, _, cache = repr(report).splitlines()
    assert what == "no weights rounded; attention: keys int8"
    assert cache.endswith(f" -> {report.after.kv_bytes_per_1k_tokens:,} bytes of KV cache per 1000 tokens")


def test_int8_has_no_warning(model: Path, tmp_path: Path):
    report = quantize_checkpoint(model, tmp_path / "q", Scheme(weights=parse_format("int8")))
    assert report.warnings == ()
    assert {row.output_error for row in report.weights} == {None}


def test_a_function_may_be_the_method(model: Path, tmp_path: Path):
    def ones(weight: torch.Tensor, format: Format, stats: object) -> QTensor:
        return rtn(torch.ones_like(weight), format)

    scheme = Scheme(weights=parse_format("int8"))
    report = quantize_checkpoint(model, tmp_path / "q", scheme, method=ones)
    weight = read_weight(Checkpoint(tmp_path / "q"), "model.layers.1.mlp.up_proj.weight")
    assert isinstance(weight, QTensor) and (weight.dequantize() == 1).all()
    assert report.weights[0].weight_error > 0.5


def test_large_models_are_written_in_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = make(tmp_path / "float", dtype=torch.bfloat16)
    quantize_checkpoint(source, tmp_path / "one", MIXED)
    monkeypatch.setattr("diffbit.quantize.forecast.SHARD_FROM", 0)
    quantize_checkpoint(source, tmp_path / "many", MIXED)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) == CONFIG.num_layers + 2
    assert torch.equal(load(tmp_path / "one")(IDS), load(tmp_path / "many")(IDS))
    assert Checkpoint(tmp_path / "many").dtype == "bfloat16"


def test_bad_requests_are_refused(model: Path, quantized: Path, tmp_path: Path):
    int8 = Scheme(weights=parse_format("int8"))
    with pytest.raises(DiffbitError, match="quantized already"):
        quantize_checkpoint(quantized, tmp_path / "q", int8)
    with pytest.raises(DiffbitError, match="quantizes nothing"):
        quantize_checkpoint(model, tmp_path / "q", Scheme())
    with pytest.raises(DiffbitError, match="quantizes nothing"):  # rounded logits alone are a study of `compare`
        quantize_checkpoint(model, tmp_path / "q", Scheme(attention=AttentionScheme(4)))
    with pytest.raises(DiffbitError, match="'nowhere'"):
        quantize_checkpoint(model, tmp_path / "q", replace(int8, overrides=(("nowhere", None),)))
    with pytest.raises(DiffbitError, match="not empty"):
        quantize_checkpoint(model, quantized, int8)
    with pytest.raises(DiffbitError, match="96"):
        quantize_checkpoint(model, tmp_path / "q", int8, calibration=[[1, 96]])
    with pytest.raises(DiffbitError, match="mask has shape"):
        quantize_checkpoint(model, tmp_path / "q", int8, calibration=[[1, 2]], calibration_mask=[[True]])
    assert list(tmp_path.iterdir()) == []


def test_an_extreme_weight_is_named(tmp_path: Path):
    source = make(tmp_path / "float")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 3] = 1e38
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(DiffbitError, match=r"model\.layers\.1\.mlp\.up_proj\.weight.*65504"):
        quantize_checkpoint(source, tmp_path / "q", Scheme(weights=parse_format("int4_g32")))
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("scale", [1e34, 3e38])
def test_scales_that_make_products_infinite_are_refused(scale: float, quantized: Path, tmp_path: Path):
    shutil.copytree(quantized, tmp_path / "q")
    tensors = load_file(tmp_path / "q" / "model.safetensors")
    tensors["model.layers.1.mlp.down_proj.scale"].fill_(scale)  # ternary
    save_file(tensors, tmp_path / "q" / "model.safetensors")
    with pytest.raises(DiffbitError, match=r"q: model\.layers\.1\.mlp\.down_proj: its scale of .* infinite"):
        load(tmp_path / "q")


@pytest.mark.parametrize(
    "change, words",
    [
        (lambda entry: entry.update(version=2), ["version 2", "version 1"]),
        (lambda entry: entry.pop("scheme"), ["config.json: quantization_config.scheme is missing"]),
        (lambda entry: entry["scheme"].update(weights="int4_g33"), ["int4_g33"]),
        (lambda entry: entry["scheme"].update(bits=4), ["bits"]),
        (lambda entry: entry["scheme"].update(weights="int8"), ["q_proj", "codes"]),
        (lambda entry: entry["scheme"].update(weights=None), ["q_proj", "belong together"]),
        (lambda entry: entry["scheme"]["overrides"].update({"*.o_proj": "int8"}), ["o_proj", "belong together"]),
    ],
)
def test_an_edited_config_is_refused(change, words: list[str], model: Path, tmp_path: Path):
    quantize_checkpoint(model, tmp_path / "q", MIXED)
    path = tmp_path / "q" / "config.json"
    values = json.loads(path.read_text())
    change(values["quantization_config"])
    path.write_text(json.dumps(values))
    with pytest.raises(DiffbitError) as error:
        load(tmp_path / "q")
    assert all(word in str(error.value) for word in [str(tmp_path / "q"), *words])


@pytest.mark.parametrize("attention", ["softmax", "diff_v1"])
def test_transformers_refuses_what_it_cannot_read(tmp_path: Path, attention: str):
    """Not with a warning and random weights: our quantized folders have a config that it knows."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    models.save(Decoder(resized(CONFIG, attention=attention)), tmp_path / "float")
    quantize_checkpoint(tmp_path / "float", tmp_path / "int4", Scheme(weights=parse_format("int4_g32")))
    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float")
    model_class = {"softmax": transformers.LlamaForCausalLM, "diff_v1": transformers.DiffLlamaForCausalLM}[attention]
    for loader in (transformers.AutoModelForCausalLM, model_class):
        with pytest.raises(ValueError, match="quantization config"):
            loader.from_pretrained(tmp_path / "int4")


def test_a_folder_of_an_earlier_version_is_read(quantized: Path, tmp_path: Path):
    shutil.copytree(quantized, tmp_path / "old")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["quant_method"] = config["quantization_config"].pop("quantizer")
    (tmp_path / "old" / "config.json").write_text(json.dumps(config))
    assert torch.equal(load(tmp_path / "old")(IDS), load(quantized)(IDS))
