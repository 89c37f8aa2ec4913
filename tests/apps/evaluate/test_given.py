"""Which float model each quantized checkpoint, artifact and GGUF file was made of."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from diffbit.apps.evaluate.given import OTHER, SHAPE, check_floats, open_models, row_names, with_references
from diffbit.cli.app import main
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.models import load, save
from diffbit.quantize import Scheme, format_name, quantize_checkpoint

PICO = Path(__file__).parents[3] / "examples" / "pico"
SCHEME = Scheme(parse_format("int4_g32"), parse_format("int8"), parse_format("int8"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float model, another of its shape, two quantized checkpoints of the first, and an artifact of one of them."""
    folder = tmp_path_factory.mktemp("given")
    shutil.copytree(PICO / "diff_v1", folder / "whole")
    decoder = load(folder / "whole")
    with torch.no_grad():
        decoder.model.norm.weight.mul_(1.05)
    save(decoder, folder / "twin", tokenizer_from=folder / "whole")
    for name in ("a", "b"):
        quantize_checkpoint(folder / "whole", folder / name / "int4", SCHEME)
    export_artifact(folder / "a" / "int4", folder / "onnx")
    return folder


def references(*paths: Path) -> dict[str, tuple[str, str]]:
    """{row: (the float model, how it was found)}."""
    floats, given = open_models(paths)
    names = row_names([model.path for model in given])
    rows = with_references(given, names, floats)
    return {row.variant.name: (floats[row.reference].path.name, row.found_by) for row in rows}


def without_source(config: Path, field: str = "quantization_config") -> None:
    values = json.loads(config.read_text())
    del values[field]["source"]
    config.write_text(json.dumps(values))


def test_names_are_those_of_folders(tmp_path: Path) -> None:
    places = [tmp_path / place for place in ("a/int4", "b/int4", "x/y/low", "z/y/low", "whole")]
    assert row_names(places) == ["a/int4", "b/int4", "x/y/low", "z/y/low", "whole"]
    assert row_names([places[0], places[4], places[0]]) == ["int4 (1)", "whole", "int4 (2)"]


def test_the_recorded_hash_finds_the_float_model(folder: Path) -> None:
    """Among models of one shape, in any order."""
    found = references(folder / "onnx", folder / "twin", folder / "b" / "int4", folder / "whole", folder / "a" / "int4")
    assert found == {name: ("whole", "hash") for name in ("onnx", "b/int4", "a/int4")}
    export_artifact(folder / "twin", folder / "twin-onnx")
    assert references(folder / "whole", folder / "twin", folder / "twin-onnx") == {"twin-onnx": ("twin", "hash")}


def test_without_a_record_the_shape_finds_it(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "a" / "int4", tmp_path / "old")
    without_source(tmp_path / "old" / "config.json")
    export_artifact(tmp_path / "old", tmp_path / "old-onnx")
    assert references(folder / "whole", tmp_path / "old") == {"old": ("whole", SHAPE)}
    assert references(tmp_path / "old-onnx", folder / "whole") == {"old-onnx": ("whole", SHAPE)}
    with pytest.raises(DiffbitError, match=r"old: fits .*whole and .*twin"):
        references(folder / "whole", folder / "twin", tmp_path / "old")
    # an artifact that names its checkpoint only, beside that checkpoint
    assert references(folder / "whole", tmp_path / "old-onnx", tmp_path / "old")["old-onnx"] == ("whole", "hash")


def test_float_model_with_another_hash_gets_a_remark(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert references(folder / "twin", folder / "a" / "int4") == {"int4": ("twin", OTHER)}
    arguments = ["compare", folder / "twin", folder / "a" / "int4", "--max-windows", "2", "--length", "32"]
    with pytest.raises(SystemExit) as stopped:
        main(list(map(str, arguments)))
    assert stopped.value.code == 0
    assert "records another float model than twin" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("paths", "options", "words"),
    [
        (["a/int4"], [], ["a/int4: is quantized", "(whole)", "is missing", "--bits 16"]),
        (["a/int4", "onnx"], [], ["a/int4 and", "onnx: are quantized", "(whole)", "is missing"]),
        (["onnx"], ["--bits", "16"], ["onnx: is quantized", "(whole)"]),
        (["softmax", "b/int4"], [], ["b/int4: does not have the shape of", "softmax", "(whole)"]),
        (["whole", "twin", "a/int4"], ["--runs", "2"], ["a/int4: is quantized", "--runs"]),
        (["whole", "nothing"], [], ["nothing"]),
        (["whole", "onnx"], ["--length", "100000"], ["--length is 100000", "context"]),
    ],
)
def test_wrong_mixtures_are_refused_in_a_sentence(
    folder: Path, paths: list[str], options: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    if not (folder / "softmax").exists():
        shutil.copytree(PICO / "softmax", folder / "softmax")
    with pytest.raises(SystemExit) as stopped:
        main(["compare", *(str(folder / path) for path in paths), *options, "--max-windows", "2", "--quiet"])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1, error
    for word in words:
        assert word in error


def test_the_command(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows by folder, on `mix`, without a sweep over formats; a page with the errors of layers and parts."""
    models = [str(folder / name) for name in ("a/int4", "onnx", "whole", "b/int4")]
    arguments = ["compare", *models, "--max-windows", "3", "--length", "64"]
    with pytest.raises(SystemExit) as stopped:
        main([*arguments, "--json", "--quiet", "-o", str(tmp_path / "report")])
    comparison = json.loads(capsys.readouterr().out)
    assert stopped.value.code == 0
    assert comparison["text"]["source"] == "mix" and comparison["text"]["windows"] == 3
    results = {result["name"]: result for result in comparison["results"]}
    assert list(results) == ["whole", "a/int4", "onnx", "b/int4"]
    assert results["a/int4"]["kl"] == results["b/int4"]["kl"]  # of one method
    assert results["onnx"]["kl"]["value"] == pytest.approx(results["a/int4"]["kl"]["value"], rel=1e-2)
    assert [(pair["name"], pair["against"]) for pair in comparison["pairs"]] == [
        ("onnx", "a/int4"), ("b/int4", "a/int4"), ("b/int4", "onnx"),
    ]  # fmt: skip
    page = (tmp_path / "report" / "report.html").read_text()
    assert "b/int4: every layer, worst first" in page and "What onnx is made of" in page
    assert (tmp_path / "report" / "comparison.svg").stat().st_size
    with pytest.raises(SystemExit):
        main(arguments)
    lines = capsys.readouterr().out.splitlines()
    assert "b/int4 loses as much as a/int4, window by window" in lines


def test_formats_are_named() -> None:
    floats, _ = open_models([PICO / "diff_v1"])
    config, low = floats[0].config, parse_format("int3_g64")
    assert format_name(config, SCHEME) == "int4_g32"
    assert format_name(config, Scheme()) == "float" and format_name(config, Scheme(), unquantized="fp16") == "fp16"
    # all layers have one format, which an override names
    assert format_name(config, Scheme(overrides=(("model.layers.*", low),))) == "int3_g64"
    attention = replace(SCHEME.attention, keys="int8", values="int8")
    assert format_name(config, replace(SCHEME, attention=attention)) == "int4_g32, kv int8"
    attention = replace(SCHEME.attention, keys="int4", values="int8", qk="int8")
    assert format_name(config, replace(SCHEME, attention=attention)) == "int4_g32, qk int8, keys int4, values int8"
    mixed = replace(SCHEME, overrides=(("model.layers.0.*", parse_format("int8")),))
    assert format_name(config, mixed).startswith("mix, 6.")  # half of 4.5 bits, half of 8 and a scale a row


def test_a_gguf_file_beside_its_float_model(tmp_path: Path) -> None:
    """A file of Q8_0 is quantized if the float model is there, too; alone it is a float model itself."""
    gguf = pytest.importorskip("gguf")
    names = {"f32": gguf.GGMLQuantizationType.F32, "q8_0": gguf.GGMLQuantizationType.Q8_0}
    for name, type in names.items():
        write_llama(tmp_path / f"{name}.gguf", gguf, type)
    floats, given = open_models([tmp_path / "q8_0.gguf", tmp_path / "f32.gguf"])
    assert [model.path.name for model in floats] == ["f32.gguf"]
    (row,) = with_references(given, ["q8_0.gguf"], floats)
    assert (row.variant.format, row.variant.what, row.found_by) == ("Q8_0", "checkpoint", SHAPE)
    assert row.nbytes == (tmp_path / "q8_0.gguf").stat().st_size
    assert row.bits_per_weight == pytest.approx(8.5, rel=0.1)  # norms and alignment are in it, too
    floats, given = open_models([tmp_path / "q8_0.gguf"])
    assert len(floats) == 1 and not given
    check_floats(floats, given)


def write_llama(path: Path, gguf, type) -> None:  # type: ignore[no-untyped-def]
    """A llama model of one layer with random weights, its matrices in a type."""
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(32)
    shapes = {"token_embd": (32, 64), "output_norm": (64,), "blk.0.attn_norm": (64,), "blk.0.ffn_norm": (64,)}
    shapes |= {"blk.0.attn_q": (64, 64), "blk.0.attn_k": (32, 64), "blk.0.attn_v": (32, 64)}
    shapes |= {"blk.0.attn_output": (64, 64), "blk.0.ffn_gate": (96, 64), "blk.0.ffn_up": (96, 64)}
    shapes |= {"blk.0.ffn_down": (64, 96)}
    for name, shape in shapes.items():
        weight = rng.standard_normal(shape).astype(np.float32)
        if len(shape) == 1:
            writer.add_tensor(f"{name}.weight", weight)
        else:
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(weight, type), raw_dtype=type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
