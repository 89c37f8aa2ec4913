"""Models of one and two bits that are stored as floats: found, kept to the last weight, and what else is said."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from diffbit import models
from diffbit.cli.automatic import quantize_model
from diffbit.cli.scheme_options import MethodOptions, SchemeOptions
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.models import Checkpoint
from diffbit.quantize import as_exported, load
from diffbit.quantize.methods import rtn
from diffbit.quantize.on_grid import grid_of, grids
from diffbit.runtime import Session

LEVELS = {"bin": (-1, 1), "ternary": (-1, 0, 1), "balanced2": (-1.5, -0.5, 0.5, 1.5), "int2": (-1, 0, 1, 2)}
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def on_grid(shape: tuple[int, ...], kind: str, group: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """A weight whose groups have a scale, negative in every third row, of the dtype's precision or fp16's."""
    g = torch.Generator().manual_seed(seed)
    rows, columns = shape
    group = group or columns
    scale = (torch.rand(rows, -(-columns // group), generator=g) * 0.02 + 0.001).half().to(dtype).float()
    scale[::3] *= -1
    levels = torch.tensor(LEVELS[kind])[torch.randint(len(LEVELS[kind]), shape, generator=g)]
    return (levels * scale.repeat_interleave(group, 1)[:, :columns]).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [32, 64, 128, 256, 0])
@pytest.mark.parametrize("kind", LEVELS)
def test_a_grid_is_found_and_kept(kind: str, group: int, dtype: torch.dtype) -> None:
    weight = on_grid((24, 520), kind, group, dtype)
    format = grid_of(weight)
    assert str(format) == f"{kind}_g{min(group or 128, 128)}"
    assert format is not None
    assert torch.equal(rtn.quantize(weight, format).dequantize().to(dtype), weight)


@pytest.mark.parametrize("name", ["normal", "one weight off", "five values", "int4", "zeros", "constant groups"])
def test_what_lies_on_no_grid_is_left_alone(name: str) -> None:
    g = torch.Generator().manual_seed(1)
    weight = {
        "normal": lambda: torch.randn(20, 256, generator=g),
        "one weight off": lambda: on_grid((20, 256), "ternary", 128, torch.float32),
        "five values": lambda: torch.randint(-2, 3, (20, 256), generator=g) * 0.1,
        "int4": lambda: torch.randint(-8, 8, (20, 256), generator=g) * 0.1,
        "zeros": lambda: torch.zeros(20, 256),
        "constant groups": lambda: torch.full((20, 256), 0.3),
    }[name]()
    if name == "one weight off":
        weight[19, 255] = weight.abs().max() * 0.7
    assert str(grid_of(weight)) == ("bin_g128" if name == "constant groups" else "None")


def with_weights(source: Path, folder: Path, change: Callable[[str, Tensor], Tensor]) -> Path:
    """A copy of a model of examples/pico with other weights."""
    shutil.copytree(source, folder)
    tensors = load_file(source / "model.safetensors")
    save_file(
        {name: change(name, value).contiguous() for name, value in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    return folder


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight") and "lambda" not in name


@pytest.fixture(scope="module", params=["bin", "ternary", "balanced2", "int2"])
def model(
    request: pytest.FixtureRequest, trained: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A version 1 model whose linear layers lie on a grid."""

    def change(name: str, value: Tensor) -> Tensor:
        shape = tuple(value.shape)
        return on_grid(shape, request.param, 128, torch.float16, len(name)).float() if is_linear(name) else value

    return with_weights(trained("diff_v1"), tmp_path_factory.mktemp("grid") / request.param, change)


def test_quantize_keeps_every_weight_and_the_artifact_computes_the_same(model: Path, tmp_path: Path) -> None:
    done = quantize_model(model, tmp_path / "low", measure=False)
    assert done.report.method == "rtn" and not any("destroys" in warning for warning in done.report.warnings)
    layers = {row.name: row for row in done.report.weights if row.name.endswith("_proj")}
    assert len(layers) == sum(map(is_linear, Checkpoint(model).names))
    assert {row.format for row in layers.values()} == {f"{model.name}_g128"}
    float_model, low = models.load(model), load(tmp_path / "low")
    for name in layers:
        kept, weight = low.get_submodule(name).weight.dequantize(), float_model.get_parameter(f"{name}.weight")
        assert torch.equal(kept.half(), weight.half())  # the file holds the products of scale and level in float16
    artifact = export_artifact(tmp_path / "low", tmp_path / "artifact")
    as_exported(low.eval())
    ids = np.random.default_rng(0).integers(1, 1000, (2, 70))
    with torch.inference_mode():
        wanted = low(torch.from_numpy(ids)).numpy()[:, -1]
    for native in (True, False):
        found = Session(artifact, native=native).prefill(ids.tolist())
        assert np.abs(found - wanted).max() < 2e-2 * wanted.std()


@pytest.mark.parametrize(
    ("kind", "group"), [("balanced2", 32), ("balanced2", 128), ("balanced2", 0), ("ternary", 0), ("bin", 128)]
)
def test_a_folder_of_bfloat16_is_kept(kind: str, group: int, tmp_path: Path) -> None:
    """As ParetoQ's training saves it: the levels, 0.5 and 1.5 at 2 bits, times a scale, each product in bfloat16."""
    sizes = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=90, **sizes)).bfloat16()
    for index, (name, weight) in enumerate(model.state_dict().items()):
        if is_linear(name):
            weight.copy_(on_grid(tuple(weight.shape), kind, group, torch.bfloat16, index))
    model.save_pretrained(tmp_path / "m")
    report = quantize_model(tmp_path / "m", tmp_path / "low", measure=False).report
    formats = {row.format for row in report.weights if is_linear(f"{row.name}.weight")}
    assert formats == {f"{kind}_g{group or 128}"} and report.method == "rtn" and not report.warnings
    low = load(tmp_path / "low")
    for name, weight in model.state_dict().items():
        if is_linear(name):
            kept = low.get_submodule(name.removesuffix(".weight")).weight.dequantize(torch.bfloat16)
            assert torch.equal(kept, weight)


def test_another_format_says_first_what_it_loses(
    trained: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(name: str, value: Tensor) -> Tensor:
        return on_grid(tuple(value.shape), "balanced2", 64, torch.float32) if is_linear(name) else value

    folder = with_weights(trained("softmax"), tmp_path / "grid", change)
    assert len(grids(Checkpoint(folder))) == sum(map(is_linear, Checkpoint(folder).names))
    for options, bits, told in (
        (SchemeOptions(weights="int2_g64"), None, "which rounding to nearest keeps; int2_g64 changes them by "),
        (SchemeOptions(), 5.0, "keeps; a mix of formats changes them: leave out --bits, --size and --method"),
        (SchemeOptions(weights="balanced2_g64"), None, "values of balanced2_g64, which rounding to nearest keeps\n"),
    ):
        quantize_model(
            folder, tmp_path / "low", options, MethodOptions(method="rtn"), bits=bits, measure=False, overwrite=True
        )
        assert told in capsys.readouterr().err
    rotated = quantize_model(
        folder, tmp_path / "low", SchemeOptions(weights="balanced2_g64"), MethodOptions(method="rotate"), measure=False,
        overwrite=True,
    )  # fmt: skip
    assert "keeps; method rotate may change them: leave out --method" in capsys.readouterr().err
    assert any("destroys" in warning for warning in rotated.report.warnings)
    report = quantize_model(
        folder, tmp_path / "low", SchemeOptions(weights="balanced2_g64"), measure=False, overwrite=True
    ).report
    assert report.method == "rtn"


def test_weights_on_no_grid_are_warned_about(trained: Callable[[str], Path], tmp_path: Path) -> None:
    options, rounding = SchemeOptions(weights="bin_g128"), MethodOptions(method="rtn")
    (warning,) = quantize_model(trained("softmax"), tmp_path / "low", options, rounding, measure=False).report.warnings
    assert warning.startswith("rounding to bin_g128 destroys a model that was not trained with such weights")


def test_a_mixed_model_has_int8_where_it_lies_on_no_grid(trained: Callable[[str], Path], tmp_path: Path) -> None:
    def change(name: str, value: Tensor) -> Tensor:
        kind = "bin" if "mlp" in name else "ternary"
        return (
            on_grid(tuple(value.shape), kind, 128, torch.float32) if is_linear(name) and "o_proj" not in name else value
        )

    folder = with_weights(trained("softmax"), tmp_path / "grid", change)
    report = quantize_model(folder, tmp_path / "low", measure=False).report
    found = {row.name.rpartition(".")[2]: row.format for row in report.weights}
    assert found["o_proj"] == found["embed_tokens"] == "int8"
    assert (found["q_proj"], found["up_proj"]) == ("ternary_g128", "bin_g128")
    scheme = json.loads((tmp_path / "low" / "config.json").read_text())["quantization_config"]["scheme"]
    assert scheme["weights"] in ("ternary_g128", "bin_g128")


@pytest.mark.parametrize("name", ["bin", "bin_g16", "ternary_g256", "balanced2_g33"])
def test_wrong_names_are_one_sentence(name: str) -> None:
    with pytest.raises(DiffbitError, match="wanted one of"):
        parse_format(name)
