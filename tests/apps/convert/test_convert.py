"""A converted model against transformers' original, against the formulas in float64, and what cannot be converted."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import BitNetForCausalLM

import diffbit
from diffbit import models
from diffbit.cli.app import main
from diffbit.export import export_artifact, reference_model
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.models import Checkpoint, Decoder, ModelConfig, num_parameters
from diffbit.models.mixers import mamba
from diffbit.quantize import Scheme, quantize_checkpoint
from diffbit.runtime import Session, verify

from ...adapters import write_adapter
from ...configs import resized
from ...export.helpers import by_range
from ...models.helpers import hf_model, saved, tokens
from ...models.test_gguf import TYPES, write
from ...models.test_transformers import CASES

PLAIN = [case for case in CASES if case[0] not in ("diffllama", "lfm2", "olmo2")]  # the last two are refused
CONFIG = ModelConfig.uniform(
    vocab_size=61, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48,
    max_position=64,
)  # fmt: skip


def write_plain(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A plain model whose norms and biases are random, too."""
    torch.manual_seed(1)
    decoder = Decoder(resized(CONFIG, **changes))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(8) if parameter.dim() == 2 else parameter.add_(0.3 * torch.randn_like(parameter))
    models.save(decoder, folder, dtype=dtype)
    return folder


def padded() -> dict[str, Tensor]:
    mask = torch.ones(2, 13, dtype=torch.int64)
    mask[1, :5] = 0
    return {"input_ids": tokens(2, 13), "attention_mask": mask}


@pytest.mark.parametrize(
    ("kind", "changes"), [pytest.param(kind, changes, id=f"{kind}-{name}") for kind, name, changes in PLAIN]
)
def test_same_function_as_transformers_original(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    original = hf_model(kind, **changes)
    plain = models.load(saved(original, tmp_path / "plain"))
    converted = models.load(diffbit.convert(tmp_path / "plain", tmp_path / "diff"))
    assert converted.config.attention == "diff_v2"
    ids = padded()
    real = ids["attention_mask"] == 1
    logits = converted(**ids)
    assert torch.equal(logits[real], plain(**ids)[real])
    positions = (ids["attention_mask"].cumsum(-1) - 1).clamp(min=0)
    theirs = original(**ids, position_ids=positions).logits
    torch.testing.assert_close(logits[real], theirs[real], rtol=0, atol=1e-5)
    assert isinstance(original, BitNetForCausalLM) == converted.config.sub_norms  # where another projection is doubled


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["float16", "bfloat16"])
def test_exact_in_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    plain = write_plain(tmp_path / "plain", dtype, qkv_bias=True, o_bias=True)
    path = diffbit.convert(plain, tmp_path / "diff")
    assert Checkpoint(path).dtype == str(dtype).removeprefix("torch.")
    both = [models.load(folder, dtype=dtype)(tokens(2, 13)) for folder in (plain, path)]
    assert torch.equal(*both)
    wide = diffbit.convert(plain, tmp_path / "wide", dtype=torch.float32)
    assert Checkpoint(wide).dtype == "float32"
    assert torch.equal(models.load(wide)(tokens(2, 13)), models.load(plain)(tokens(2, 13)))


@pytest.mark.parametrize("type", [TYPES.F16, TYPES.Q4_0], ids=lambda type: type.name)
def test_gguf_file(type: TYPES, tmp_path: Path) -> None:
    file = write(tmp_path / "plain.gguf", type)
    path = diffbit.convert(file, tmp_path / "diff")
    ids = tokens(2, 13)
    assert torch.equal(models.load(path)(ids), models.load(file)(ids))


def test_shared_keys_and_values(tmp_path: Path) -> None:
    """Layers that read an earlier one's keys and values have no v_proj."""
    torch.manual_seed(2)
    layer = CONFIG.layers[0]
    reader = models.LayerSpec(type(layer.mixer)(4, 2, 8, keys_of=0), layer.mlp)
    plain = Decoder(ModelConfig(vocab_size=61, hidden_size=32, layers=(layer, reader)))
    models.save(plain, tmp_path / "plain")
    converted = models.load(diffbit.convert(tmp_path / "plain", tmp_path / "diff"))
    assert torch.equal(converted(tokens(1, 13)), plain(tokens(1, 13)))


def test_sizes_and_gradients(tmp_path: Path) -> None:
    """q_proj doubles, lambda's projection is added, the cache stays; training moves both branches and lambda."""
    plain = write_plain(tmp_path / "plain")
    converted = models.load(diffbit.convert(plain, tmp_path / "diff"))
    added = CONFIG.num_layers * (4 * 8 * 32 + 4 * 32)
    assert num_parameters(converted.config) - num_parameters(CONFIG) == added
    before, after = (config.layers[0].mixer for config in (CONFIG, converted.config))
    assert (after.cache_heads, after.head_dim) == (before.cache_heads, before.head_dim)
    converted(tokens(2, 13)).logsumexp(-1).sum().backward()
    attention = converted.model.layers[0].self_attn
    signal, noise = attention.q_proj.weight.grad.unflatten(0, (4, 2, 8)).unbind(1)
    assert signal.norm() > 0 and noise.norm() > 0 and not torch.equal(signal, noise)
    assert attention.lambda_proj.weight.grad.norm() > 0


def attention_in_float64(decoder: Decoder, x: Tensor, angle: float, bias: float) -> Tensor:
    """Layer 0's attention, written with complex numbers from a plain model's weights: the noise query is the signal
    query
    times exp(i angle), after RoPE."""
    mixer, layer = decoder.config.layers[0].mixer, decoder.model.layers[0].self_attn
    width, count = mixer.head_dim, x.shape[0]
    x = x.double()

    def heads(module: torch.nn.Linear) -> Tensor:
        rows = x @ module.weight.double().T + (0 if module.bias is None else module.bias.double())
        return rows.unflatten(-1, (-1, width)).transpose(0, 1)  # [heads, S, d]

    def rotated(rows: Tensor) -> Tensor:
        plane = torch.complex(*rows.chunk(2, -1))
        frequency = decoder.config.rope_theta ** (-torch.arange(width // 2, dtype=torch.float64) * 2 / width)
        return plane * torch.exp(1j * torch.outer(torch.arange(count, dtype=torch.float64), frequency))

    key, value = rotated(heads(layer.k_proj)), heads(layer.v_proj)
    key, value = (tensor.repeat_interleave(mixer.num_heads // mixer.num_kv_heads, 0) for tensor in (key, value))
    query, hidden = rotated(heads(layer.q_proj)), torch.ones(count, count).triu(1).bool()

    def attend(query: Tensor) -> Tensor:
        logits = (query @ key.conj().transpose(1, 2)).real / math.sqrt(width)
        return logits.masked_fill(hidden, -math.inf).softmax(-1) @ value

    share = 1 / (1 + math.exp(-bias))
    out = attend(query) - share * attend(query * complex(math.cos(angle), math.sin(angle)))
    return out.transpose(0, 1).flatten(1) @ layer.o_proj.weight.double().T


@pytest.mark.parametrize("angle", [90.0, 37.5, -180.0])
@pytest.mark.parametrize("biased", [False, True], ids=["no-bias", "bias"])
@pytest.mark.parametrize("share", [None, 0.2, 0.9])
def test_rotated_start_matches_its_formula(angle: float, biased: bool, share: float | None, tmp_path: Path) -> None:
    plain = models.load(write_plain(tmp_path / "plain", qkv_bias=biased))
    converted = models.load(
        diffbit.convert(tmp_path / "plain", tmp_path / "diff", start="rotated", angle=angle, lambda_start=share)
    )
    x = torch.randn(11, 32)
    rope = models.rope_for(converted.config, torch.arange(11)[None])
    with torch.no_grad():
        out = converted.model.layers[0].self_attn(x[None], rope)[0]
        bias = -6.0 if share is None else math.log(share / (1 - share))
        expected = attention_in_float64(plain, x, math.radians(angle), bias) / (1 - (share or 0))
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=2e-5 * float(expected.std()))
    queries = converted.model.layers[0].self_attn.queries(x[None]).unflatten(2, (4, 2))
    cosine = torch.cosine_similarity(queries[..., 0, :], queries[..., 1, :], -1)
    assert (cosine - math.cos(math.radians(angle))).abs().max() < 1e-5


def test_rotated_start_is_near_the_plain_model(tmp_path: Path) -> None:
    plain = models.load(write_plain(tmp_path / "plain"))
    near = models.load(diffbit.convert(tmp_path / "plain", tmp_path / "diff", start="rotated"))
    ids = tokens(2, 13)
    error = (near(ids) - plain(ids)).std() / plain(ids).std()
    assert 0 < error < 0.05
    with torch.no_grad():
        for layer in near.model.layers:
            layer.self_attn.lambda_proj.bias.fill_(-200)  # sigmoid is 0 in float32
    assert torch.equal(near(ids), plain(ids))


@pytest.mark.parametrize("share", [0.01, 0.5, 0.8])
@pytest.mark.parametrize("sub_norms", [False, True], ids=["o_proj", "v_proj"])
def test_a_copy_is_the_same_function_with_any_lambda(share: float, sub_norms: bool, tmp_path: Path) -> None:
    plain = models.load(write_plain(tmp_path / "plain", sub_norms=sub_norms))
    copy = models.load(diffbit.convert(tmp_path / "plain", tmp_path / "diff", lambda_start=share))
    bias = copy.model.layers[1].self_attn.lambda_proj.bias
    torch.testing.assert_close(bias.sigmoid(), torch.full_like(bias, share))
    ids = tokens(2, 13)
    with torch.no_grad():
        torch.testing.assert_close(copy(ids), plain(ids), rtol=0, atol=1e-5 * float(plain(ids).std()))


def test_norm_of_queries_and_the_angle(tmp_path: Path) -> None:
    """180 degrees pass through any norm, others through one with equal weights in each plane."""
    write_plain(tmp_path / "plain", qk_norm_eps=1e-5)
    with pytest.raises(DiffbitError, match=r"norm of queries in layer 0 .*90 degrees.*--angle 180 or --start copy"):
        diffbit.convert(tmp_path / "plain", tmp_path / "diff", start="rotated")
    assert not (tmp_path / "diff").exists()
    plain = models.load(tmp_path / "plain")
    x = torch.randn(1, 5, 32)

    def queries(angle: float) -> tuple[Tensor, Tensor]:
        path = diffbit.convert(tmp_path / "plain", tmp_path / "diff", start="rotated", angle=angle, overwrite=True)
        return models.load(path).model.layers[0].self_attn.queries(x).unflatten(2, (4, 2)).unbind(3)

    signal, noise = queries(180)
    torch.testing.assert_close(noise, -signal)
    with torch.no_grad():
        for layer in plain.model.layers:
            layer.self_attn.q_norm.weight[4:] = layer.self_attn.q_norm.weight[:4]
    models.save(plain, tmp_path / "plain", overwrite=True)
    signal, noise = queries(90)
    torch.testing.assert_close(noise, torch.cat((-signal[..., 4:], signal[..., :4]), -1))


@pytest.mark.parametrize("start", ["copy", "rotated"])
def test_the_whole_way_to_the_device(start: str, trained: Callable[[str], Path], tmp_path: Path) -> None:
    path = diffbit.convert(trained("softmax"), tmp_path / "diff", start=start)
    quantize_checkpoint(path, tmp_path / "int4", Scheme(weights=parse_format("int4_g32")), method=by_range)
    artifact = export_artifact(tmp_path / "int4", tmp_path / "onnx")
    assert verify(artifact).passed
    ids = tokens(1, 20) % 900 + 3
    with torch.inference_mode():
        expected = reference_model(tmp_path / "int4")(ids)[0, -1].numpy()
    logits = Session(artifact).prefill(ids.numpy())[0]
    assert abs(logits - expected).max() < 1e-4 * expected.std()
    for name in ("tokenizer.json", "generation_config.json"):
        assert (path / name).exists() == (trained("softmax") / name).exists()


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(map(str, arguments)))
    return int(stopped.value.code or 0)


def test_command(trained: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", trained("softmax"), "-o", tmp_path / "diff", "--json") == 0
    output = json.loads(capsys.readouterr().out)
    assert output["before"]["attention"] == "softmax" and output["after"]["attention"] == "diff_v2"
    assert output["after"]["parameters"] > output["before"]["parameters"]
    assert run("convert", trained("softmax"), "-o", tmp_path / "diff") == 2
    assert "--overwrite" in capsys.readouterr().err
    assert run("convert", trained("softmax"), "-o", tmp_path / "diff", "--overwrite") == 0


def too_large(folder: Path) -> Path:
    """A float16 model with a weight of o_proj that cannot be doubled."""
    plain = models.load(write_plain(folder / "source", torch.float16))
    with torch.no_grad():
        plain.model.layers[1].self_attn.o_proj.weight[3, 4] = -40000
    models.save(plain, folder / "plain", dtype=torch.float16)
    return folder / "plain"


def quantized(folder: Path) -> Path:
    quantize_checkpoint(write_plain(folder / "plain"), folder / "int8", Scheme(weights=parse_format("int8")))
    return folder / "int8"


BAD: dict[str, tuple[Callable[[Path], Path], tuple[str, ...], str]] = {
    "differential": (
        lambda p: write_plain(p / "m", attention="diff_v1"),
        (),
        "layer 0 is differential already (diff_v1)",
    ),
    "quantized": (quantized, (), "is quantized; convert the float model"),
    "too large": (
        too_large,
        (),
        "model.layers.1.self_attn.o_proj.weight has numbers beyond 65504, the largest of float16",
    ),
    "narrower": (lambda p: wide(p / "m"), ("--dtype", "float16"), "has numbers beyond 65504"),
    "nothing there": (lambda p: p / "absent", (), "no such folder"),
    "not a number": (lambda p: write_plain(p / "m"), ("--start", "rotated", "--angle", "nan"), "angle is nan"),
    "nothing left": (
        lambda p: write_plain(p / "m"),
        ("--lambda", "1"),
        "lambda starts at 1.0, wanted a number between 0 and 1",
    ),
}


def wide(folder: Path) -> Path:
    plain = models.load(write_plain(folder.with_name("source")))
    with torch.no_grad():
        plain.model.norm.weight[0] = 1e6
    models.save(plain, folder)
    return folder


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_converted(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, options, says = BAD[name]
    before = make(tmp_path)
    assert run("convert", before, "-o", tmp_path / "out", *options) == 2
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1, error
    assert not (tmp_path / "out").exists()


def test_the_remedy_for_a_large_weight_works(tmp_path: Path) -> None:
    plain = too_large(tmp_path)
    path = diffbit.convert(plain, tmp_path / "out", dtype=torch.float32)
    assert torch.equal(models.load(path)(tokens(1, 9)), models.load(plain)(tokens(1, 9)))


def test_layers_that_are_no_attention(tmp_path: Path) -> None:
    attention = CONFIG.layers[0]
    hybrid = replace(CONFIG, layers=(attention, replace(attention, mixer=mamba.Options(32, 4, 3, 2))))
    models.save(Decoder(hybrid), tmp_path / "hybrid")
    with pytest.raises(DiffbitError, match=r"layer 1 is mamba, which is no attention"):
        diffbit.convert(tmp_path / "hybrid", tmp_path / "out")


def test_output_that_contains_the_model(tmp_path: Path) -> None:
    write_plain(tmp_path / "plain")
    shutil.copy(tmp_path / "plain" / "config.json", tmp_path / "config.json")
    with pytest.raises(DiffbitError, match="is or contains"):
        diffbit.convert(tmp_path / "plain", tmp_path, overwrite=True)
    assert (tmp_path / "plain" / "model.safetensors").exists()


def test_a_large_model_gets_a_file_per_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffbit.apps.convert.write.ONE_FILE", 1000)
    plain = write_plain(tmp_path / "plain", tie_embeddings=False)
    path = diffbit.convert(plain, tmp_path / "diff")
    assert len(list(path.glob("model-*.safetensors"))) == 2 + CONFIG.num_layers
    assert torch.equal(models.load(path)(tokens(1, 9)), models.load(plain)(tokens(1, 9)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_an_adapter_is_merged(dtype: torch.dtype, tmp_path: Path) -> None:
    """In the model's type, rounded once; with a start, the merged model becomes differential."""
    plain, adapter = write_plain(tmp_path / "plain", dtype), tmp_path / "adapter"
    added = write_adapter(
        adapter, {"model.layers.0.self_attn.q_proj": (32, 32), "model.layers.1.mlp.up_proj": (48, 32)}
    )
    with pytest.raises(SystemExit) as end:
        main(["convert", str(plain), "--adapter", str(adapter), "-o", str(tmp_path / "merged"), "--quiet"])
    assert end.value.code == 0
    before, after = Checkpoint(plain), Checkpoint(tmp_path / "merged")
    assert after.config == before.config
    assert after.dtype == str(dtype).removeprefix("torch.")
    for name in before.names:
        wanted = (before.read(name).double() + added.get(name, 0)).float().to(dtype)
        torch.testing.assert_close(after.read(name), wanted, rtol=1e-2 if dtype == torch.bfloat16 else 0, atol=1e-5)
    differential = models.load(diffbit.convert(plain, tmp_path / "diff", start="copy", adapter=adapter))
    ids = tokens(2, 13)
    assert torch.equal(differential(ids), models.load(after)(ids))
    with pytest.raises(DiffbitError, match="angle describe another attention; also say which"):
        diffbit.convert(plain, tmp_path / "other", adapter=adapter, angle=90)
