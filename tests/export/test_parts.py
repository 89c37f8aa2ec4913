"""An artifact's parts add up to its files, and hold the bytes that arithmetic gives them."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import pytest

from diffbit.apps.train.presets import model_config
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.models.checkpoint.names import shapes
from diffbit.quantize import Scheme, linear_shapes
from diffbit.runtime import Artifact, Session, verify
from diffbit.runtime.artifact import Part

from .conftest import Maker
from .helpers import VARIANTS, config_of, graph_of, write_artifact, write_model, write_quantized


def parts_of(artifact: Path) -> dict[str, Part]:
    manifest = Artifact.open(artifact)
    parts = {part.name: part for part in manifest.parts}
    assert sum(part.bytes for part in parts.values()) == manifest.nbytes
    assert all(part.bytes >= 0 for part in parts.values()) and len(parts) == len(manifest.parts)
    return parts


@pytest.mark.parametrize("attention", VARIANTS)
@pytest.mark.parametrize(
    "format", [None, "ternary", "int8", "int4_g32", "int3_g64_asym", "int2_g64", "nl4_g32_s8", "nf4", "mxfp4", "nvfp4"]
)
def test_parts_add_up(checkpoint_of: Maker, attention: str, format: str | None) -> None:
    artifact, config = write_artifact(checkpoint_of(attention, format)), config_of(attention)
    parts = parts_of(artifact)
    numbers = sum(prod(shape) for name, shape in shapes(config).items() if not name.endswith(("q1", "q2", "k1", "k2")))
    del parts["rotary tables"]
    counted = sum(part.weights or 0 for name, part in parts.items() if name != "scales")
    assert counted == numbers  # every parameter is in one part, once
    codes = [name for name in parts if name.endswith("codes")]
    assert codes == ([] if format is None else [f"{format} codes"])
    assert parts["embedding"].bytes == parts["head"].bytes == 4 * 61 * 64
    assert parts["graph"].bytes == (artifact / "model.onnx").stat().st_size
    assert parts["tokenizer"].bytes > (artifact / "tokenizer.json").stat().st_size


@pytest.mark.parametrize(
    ("format", "bits"),
    [
        ("ternary", 2),
        ("int3_g64", 3),
        ("int5_g64", 5),
        ("int5_g64_asym", 8),
        ("nl4_g32_s8", 4),
        ("nf4", 4),
        ("mxfp4", 4),
        ("nvfp4", 4),
    ],
)
def test_bits_a_weight_of_codes(checkpoint_of: Maker, format: str, bits: int) -> None:
    parts = parts_of(write_artifact(checkpoint_of("diff_v2", format)))
    layers = linear_shapes(config_of("diff_v2"))
    weights = sum(prod(layers[module]) for module in Scheme(weights=parse_format(format)).formats(config_of("diff_v2")))
    (codes,) = (part for name, part in parts.items() if name.endswith("codes"))
    assert codes.weights == weights and codes.bytes == weights * bits / 8
    assert parts["lambda"].weights == 2 * 2 * 64


def test_padding_is_what_no_weight_needs(checkpoint_of: Maker) -> None:
    """Rows of 64 ternary weights fill blocks of 128; gaps between weights are counted from their offsets."""
    artifact, config = write_artifact(checkpoint_of("softmax", "ternary")), config_of("softmax")
    formats = Scheme(weights=parse_format("ternary")).formats(config)
    rows = [linear_shapes(config)[module] for module in formats]
    short = sum(n * (-k % 128) // 4 for n, k in rows)
    places = []
    for tensor in graph_of(artifact).graph.initializer:
        fields = {entry.key: int(entry.value) for entry in tensor.external_data if entry.key != "location"}
        if fields:
            places.append((fields["offset"], fields["offset"] + fields["length"]))
    places.sort()
    gaps = sum(begin - end for (begin, _), (_, end) in zip(places[1:], places[:-1], strict=True))
    assert parts_of(artifact)["padding"].bytes == short + gaps
    assert short == 2 * 64 * (64 + 32 + 32 + 64 + 128 + 128) // 4


def test_weights_continue_in_another_file(
    checkpoint_of: Maker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No file is larger than a browser can load, unless one weight is; the model computes the same."""
    source, split = checkpoint_of("diff_v1", "int4_g32"), tmp_path / "split"
    single = write_artifact(source)
    monkeypatch.setattr("diffbit.export.onnx_graph.FILE_BYTES", 20_000)
    export_artifact(source, split)
    sizes = {name: entry.bytes for name, entry in Artifact.open(split).files.items() if "onnx.data" in name}
    tensors = [value.external_data for value in graph_of(split).graph.initializer if value.external_data]
    places = [{entry.key: entry.value for entry in tensor} for tensor in tensors]
    assert {place["location"] for place in places} == set(sizes) and len(sizes) > 3
    for name, size in sizes.items():
        in_file = [place for place in places if place["location"] == name]
        assert size <= 20_000 or len(in_file) == 1
        assert size == max(int(place["offset"]) + int(place["length"]) for place in in_file)
    assert verify(split).passed
    ids = [[5, 6, 7, 8]]
    np.testing.assert_array_equal(Session(split).prefill(ids), Session(single).prefill(ids))
    parts_of(split)  # they add up


@pytest.mark.parametrize("attention", VARIANTS)
def test_a_ternary_model_takes_two_bits_a_weight(attention: str, tmp_path: Path) -> None:
    config = model_config("nano", attention)
    artifact = write_artifact(write_quantized(write_model(tmp_path / "nano", config), "ternary"))
    parts = parts_of(artifact)
    ternary = parts["ternary codes"]
    expected = 2 * ternary.weights / 8 + sum(
        part.bytes for part in parts.values() if part.name not in ("ternary codes", "padding")
    )
    assert Artifact.open(artifact).nbytes == pytest.approx(expected, rel=0.05)
    assert ternary.weights > 2_000_000
