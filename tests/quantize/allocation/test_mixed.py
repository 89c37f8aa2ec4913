"""Mixed precision: the greedy choice against trying everything, losses against running everything, the plan kept."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from diffbit import models
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.io.files import parse_size
from diffbit.models import Decoder
from diffbit.quantize import Scheme, apply, linear_shapes, quantize_checkpoint
from diffbit.quantize.allocation import mixed
from diffbit.quantize.allocation.mixed import allocate, choose
from diffbit.quantize.methods import Method, Recipe
from diffbit.quantize.methods.rtn import quantize as rtn
from diffbit.quantize.scheme import weight_shapes
from diffbit.quantize.sizes import LARGEST_GRAPH
from diffbit.runtime import Artifact, verify

from ...configs import resized
from .small import CONFIG, IDS, MASK, divergence, make

FEW = ("int2_g64", "int4_g64", "int4_g32", "int8", "none")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixed") / "float"
    models.save(make(), path)
    return path


# the choice


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_fits_and_is_nearly_the_best_of_all(seed: int) -> None:
    """Losses that fall less and less with bytes, as formats' do: greedy is off by no more than one layer's gain."""
    draw = random.Random(seed)
    sizes, losses = {}, {}
    for layer in "abcd":
        width, weight = draw.choice((1, 2, 3)), draw.uniform(0.1, 1)
        names = ("2", "4", "8")
        sizes[layer] = {name: int(name) * width for name in names}
        losses[layer] = {name: weight * draw.uniform(0.8, 1) / 4 ** int(name) for name in names}
    smallest, largest = (sum(pick(row.values()) for row in sizes.values()) for pick in (min, max))
    gain = max(row["2"] for row in losses.values())
    for room in range(smallest, largest + 3):
        choice, path = choose(sizes, losses, room)
        taken = sum(sizes[layer][name] for layer, name in choice.items())
        loss = sum(losses[layer][name] for layer, name in choice.items())
        assert taken <= room and path[-1] == (taken, pytest.approx(loss))
        assert [loss for _, loss in path] == sorted((loss for _, loss in path), reverse=True)
        best = min(
            sum(losses[layer][name] for layer, name in zip("abcd", names, strict=True))
            for names in itertools.product(("2", "4", "8"), repeat=4)
            if sum(sizes[layer][name] for layer, name in zip("abcd", names, strict=True)) <= room
        )
        assert best <= loss + 1e-12 and loss <= best + gain
    assert choose(sizes, losses, largest)[0] == dict.fromkeys("abcd", "8")


def test_useless_formats_are_never_chosen() -> None:
    choice, path = choose({"a": {"x": 4, "y": 4, "z": 9}}, {"a": {"x": 2.0, "y": 1.0, "z": 1.0}}, 100)
    assert choice == {"a": "y"} and path == [(4, 1.0)]


# plans


def test_an_allocation_keeps_its_budget_and_tells_its_size(folder: Path) -> None:
    decoder = models.load(folder)
    allocation = allocate(folder, bits=3.6, candidates=FEW, calibration=IDS, calibration_mask=MASK)
    weights = sum(layer.shape[0] * layer.shape[1] for layer in allocation.layers)
    assert allocation.bits_per_weight == 8 * sum(layer.nbytes for layer in allocation.layers) / weights <= 3.6
    assert allocation.nbytes == sum(layer.nbytes for layer in allocation.layers)
    formats = allocation.scheme.formats(CONFIG)
    assert {layer.name: layer.format for layer in allocation.layers} == {
        layer.name: formats[layer.name].name if layer.name in formats else "none" for layer in allocation.layers
    }
    assert len(set(formats.values())) > 1  # else nothing was mixed
    assert allocation.measured == pytest.approx(divergence(decoder, apply(decoder, allocation.scheme)), rel=1e-3)
    assert allocation.tokens == int(MASK.sum()) and allocation.stand_in is None
    assert Scheme.from_dict(allocation.to_dict()["scheme"]) == allocation.scheme
    bits, losses = zip(*allocation.curve, strict=True)
    assert list(bits) == sorted(bits) and list(losses) == sorted(losses, reverse=True)
    assert allocation.predicted < allocation.uniform["int2_g64"][1]


@pytest.mark.parametrize(("attention", "tied"), [("diff_v1", False), ("softmax", True)])
def test_the_artifact_is_no_larger_than_the_target(
    checkpoint: Path, tmp_path: Path, attention: str, tied: bool
) -> None:
    """All of its files together; the plan knows them to within the bytes that it keeps for the graph."""
    config = resized(models.Checkpoint(checkpoint).config, attention=attention, tie_embeddings=tied)
    torch.manual_seed(0)
    models.save(Decoder(config), tmp_path / "float", tokenizer_from=checkpoint)
    low, high = (allocation_of(tmp_path / "float", bits).model_nbytes for bits in (2.6, 8.1))
    with_tables = allocation_of(tmp_path / "float", 5, tables=True).model_nbytes
    for target, tables in ((low, False), ((low + high) // 2, False), (with_tables, True)):
        allocation = allocation_of(tmp_path / "float", None, target, tables)
        assert allocation.model_nbytes <= target
        quantize_checkpoint(tmp_path / "float", tmp_path / "mixed", allocation.scheme, overwrite=True)
        artifact = export_artifact(tmp_path / "mixed", tmp_path / "onnx", overwrite=True)
        nbytes = Artifact.open(artifact).nbytes + (artifact / "diffbit.json").stat().st_size
        reserve = LARGEST_GRAPH[0] + LARGEST_GRAPH[1] * config.num_layers + 4096 * 8
        assert allocation.model_nbytes - reserve <= nbytes <= allocation.model_nbytes
    assert verify(artifact).passed


def allocation_of(
    folder: Path, bits: float | None, nbytes: int | None = None, tables: bool = False
) -> mixed.Allocation:
    return allocate(folder, bits=bits, nbytes=nbytes, candidates=FEW[:-1], tables=tables, calibration=IDS[:2])


@pytest.mark.parametrize("tied", [False, True])
def test_tables_get_a_format_of_their_own(tied: bool, tmp_path: Path) -> None:
    """Counted in the bits; a tied table stays one. An embedding has fewer formats than a head."""
    config = resized(CONFIG, tie_embeddings=tied)
    models.save(make(config), tmp_path)
    candidates = (*FEW, "nf4")
    allocation = allocate(tmp_path, bits=4.4, candidates=candidates, tables=True, calibration=IDS)
    tables = {layer.name: layer for layer in allocation.layers if not layer.name.startswith("model.layers.")}
    assert list(tables) == ["model.embed_tokens"] + ([] if tied else ["lm_head"])
    assert list(tables["model.embed_tokens"].sizes) == list(FEW)
    assert tied or set(tables["lm_head"].sizes) == set(candidates)
    formats = {name: parse_format(layer.format) for name, layer in tables.items()}
    assert allocation.scheme.embedding == formats["model.embed_tokens"]
    assert allocation.scheme.head == formats["model.embed_tokens" if tied else "lm_head"]
    assert allocation.scheme.keeps_tied(config) == tied
    weights = sum(rows * columns for rows, columns in (layer.shape for layer in allocation.layers))
    assert allocation.bits_per_weight == 8 * allocation.nbytes / weights <= 4.4
    assert allocation.measured == pytest.approx(allocation.predicted, rel=0.7)
    assert set(allocation.uniform) == set(FEW)
    named = Scheme(overrides=(("lm_head", parse_format("int8")),))
    layers = allocate(tmp_path, bits=6, scheme=named, candidates=FEW, tables=True, calibration=IDS).layers
    assert "lm_head" not in [layer.name for layer in layers]


def test_default_candidates_take_the_bits_they_have(folder: Path) -> None:
    allocation = allocate(folder, bits=4, calibration=IDS)
    formats = [parse_format(name) for name in allocation.layers[0].sizes if name != "none"]
    assert {2, 4, 8} <= {format.bits for format in formats}
    assert all(format.device_bits == format.bits for format in formats)


def test_a_calibrated_method_is_not_run_to_check_estimates(folder: Path) -> None:
    ids = torch.randint(96, (20, 48), generator=torch.Generator().manual_seed(1))
    allocation = allocate(folder, bits=4, method="gptq", candidates=FEW, calibration=ids)
    assert allocation.measured is None
    rounded = apply(models.load(folder), allocation.scheme, "gptq", ids)
    loss = divergence(models.load(folder), rounded, ids, torch.ones_like(ids, dtype=torch.bool))
    assert 0.6 < allocation.predicted / loss < 1.6


def test_overrides_are_fixed_and_counted(folder: Path) -> None:
    scheme = Scheme(overrides=(("*.down_proj", parse_format("int8")), ("lm_head", parse_format("int4_g32"))))
    allocation = allocate(folder, bits=5.5, scheme=scheme, candidates=FEW, calibration=IDS)
    formats = allocation.scheme.formats(CONFIG)
    assert formats["model.layers.0.mlp.down_proj"].name == "int8" and formats["lm_head"].name == "int4_g32"
    assert not any(layer.name.endswith("down_proj") or layer.name == "lm_head" for layer in allocation.layers)
    shapes = linear_shapes(CONFIG)
    everywhere = sum(format.device_nbytes(shapes[module], 4) for module, format in formats.items())
    assert allocation.nbytes == everywhere  # no layer was left in float
    assert (
        allocation.bits_per_weight == 8 * everywhere / sum(rows * columns for rows, columns in shapes.values()) <= 5.5
    )


def test_an_embedding_that_an_override_names_counts(folder: Path) -> None:
    scheme = Scheme(embedding=parse_format("int8"), overrides=(("model.embed_tokens", parse_format("int4_g32")),))
    allocation = allocate(folder, bits=5.5, scheme=scheme, candidates=FEW, calibration=IDS, tables=False)
    shapes = weight_shapes(CONFIG)
    chosen = {layer.name: layer.nbytes for layer in allocation.layers}
    named = parse_format("int4_g32").device_nbytes(shapes["model.embed_tokens"], 4)
    weights = sum(rows * columns for name, (rows, columns) in shapes.items() if name in {*chosen, "model.embed_tokens"})
    assert allocation.nbytes == named + sum(chosen.values())
    assert allocation.bits_per_weight == 8 * allocation.nbytes / weights


def test_candidates_that_cannot_hold_a_layer_are_left_out(folder: Path) -> None:
    allocation = allocate(folder, bits=4.5, candidates=("nf4", "int4_g32"), calibration=IDS)
    for layer in allocation.layers:  # in_features 96 is no multiple of nf4's 64
        assert list(layer.sizes) == (["int4_g32"] if layer.name.endswith("down_proj") else ["nf4", "int4_g32"])
    with pytest.raises(DiffbitError, match=r"model.layers.0.mlp.down_proj: none of the candidates can hold"):
        allocate(folder, bits=4, candidates=("nf4",), calibration=IDS)


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "method"), [("softmax", "rtn"), ("diff_v2", "rotate+gptq")])
def test_other_variants_and_recipes(attention: str, method: str, tmp_path: Path) -> None:
    """A transform runs first; lambda_proj stays float. What was measured is what the recipe makes of the scheme."""
    config = resized(CONFIG, attention=attention, tie_embeddings=True, intermediate_size=128)
    decoder = make(config)
    models.save(decoder, tmp_path / "float")
    allocation = allocate(
        tmp_path / "float",
        bits=3.4,
        method=method,
        candidates=("int2_g64", "int4_g64"),
        calibration=IDS,
        measuring=True,
    )
    assert not any("lambda" in layer.name for layer in allocation.layers)
    text = None if method == "rtn" else IDS  # with text rtn would search scales
    rounded = apply(decoder, allocation.scheme, method, text)
    assert allocation.measured == pytest.approx(divergence(decoder, rounded, mask=torch.ones_like(MASK)), rel=2e-3)
    assert allocation.measured < divergence(
        decoder, apply(decoder, Scheme(weights=parse_format("int2_g64")), method, IDS)
    )


def test_a_method_that_rounds_layers_has_a_stand_in(folder: Path) -> None:
    runs = []

    def quantize_layer(layer: Any, passes: Any) -> dict[str, Any]:
        runs.append(len(layer.formats))
        return {name: rtn(layer.tensors[f"{name}.weight"], format) for name, format in layer.formats.items()}

    rounding = Method("whole", "", round_layer=quantize_layer, calibrated=True)
    allocation = allocate(
        folder, bits=3.4, method=Recipe("whole", (), rounding), candidates=("int2_g64", "int4_g64"), calibration=IDS,
        measuring=True,
    )  # fmt: skip
    assert allocation.stand_in == "gptq" and allocation.method == "whole"
    decoder = models.load(folder)
    rounded = apply(decoder, allocation.scheme)  # rtn: what the method does
    assert allocation.measured == pytest.approx(divergence(decoder, rounded, mask=torch.ones_like(MASK)), rel=1e-3)
    assert set(runs) == {7}  # whole layers only, when models are made


# budgets and refusals


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("40MB", 40_000_000), ("40 MiB", 40 << 20), ("1.2GB", 1_200_000_000), ("800kb", 800_000), (".5gib", 1 << 29)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["40", "MB", "4O MB", "-1MB", "1e3MB", "40MB/s", "", "40TB", "1.2.3GB"])
def test_sizes_refused(text: str) -> None:
    with pytest.raises(DiffbitError, match="is not a size; wanted a number with a unit, such as 40MB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("budget", "sentence"),
    [
        ({"bits": 2.0}, r"2 bits per weight cannot be reached: these candidates and overrides give 2.\d\d to 32.00"),
        ({"bits": 33}, r"33 bits per weight cannot be reached"),
        ({"bits": float("nan")}, "nan bits per weight cannot be reached"),
        ({"bits": float("inf")}, "inf bits per weight cannot be reached"),
        ({"nbytes": 1000}, r"0.00 MB cannot be reached: .* give 0.\d\d to 0.\d\d MB for the whole artifact"),
        ({"nbytes": 10**9}, "1,000.00 MB cannot be reached"),
    ],
    ids=str,
)
def test_a_budget_that_cannot_be_had(budget: dict[str, Any], sentence: str, folder: Path) -> None:
    with pytest.raises(DiffbitError, match=sentence):
        allocate(folder, **budget, candidates=("int2_g64", "int4_g32", "none"), calibration=IDS)


def test_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(sentence: str, **options: Any) -> None:
        with pytest.raises(DiffbitError, match=sentence):
            allocate(folder, bits=3, calibration=IDS, **options)

    refuse("the candidates none contain no format", candidates=("none",))
    refuse("'int9' ", candidates=("int9", "int4_g32"))
    refuse("int3_g64_asym is only .* 4 bits; use int3_g64", candidates=("int3_g64_asym", "int4_g32"))
    refuse("the overrides fix every linear layer", scheme=Scheme(overrides=(("*", parse_format("int4_g32")),)))
    refuse("matches no linear layer", scheme=Scheme(overrides=(("*.qproj", None),)))
    monkeypatch.setattr("diffbit.quantize.allocation.mixed.available_memory", lambda: 10**5)
    refuse(r"float model in memory, about .* kB, and 100\.0 kB are free; choose the formats yourself")
    quantize_checkpoint(folder, tmp_path / "int4", Scheme(weights=parse_format("int4_g32")))
    with pytest.raises(DiffbitError, match="is quantized already"):
        allocate(tmp_path / "int4", bits=3, calibration=IDS)


def test_memory_is_known_on_linux() -> None:
    free = mixed.available_memory()
    assert free is None or 1 << 20 < free < 1 << 60
    assert free is not None or not Path("/proc/meminfo").exists()


# a trained model


def test_a_trained_model_gains_by_mixing(trained: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Between int2 and int4: less than the line between them, on text that was not looked at for it."""
    from diffbit.calib_data import eval_windows

    monkeypatch.setattr("diffbit.quantize.allocation.mixed.SAMPLE", 1024)
    path = trained("softmax")  # of DIFF v1's layers none matters more than the others
    text = eval_windows("stdlib", path, 128, 8, split="calib")
    allocation = allocate(path, bits=3.3, candidates=("int2_g64", "int4_g64"), calibration=text.ids)
    assert 3.2 < allocation.bits_per_weight <= 3.3
    held_out = torch.from_numpy(eval_windows("stdlib", path, 128, 8).ids)
    decoder, every = models.load(path), torch.ones_like(held_out, dtype=torch.bool)
    ends = [
        divergence(decoder, apply(decoder, Scheme(weights=parse_format(name))), held_out, every)
        for name in ("int2_g64", "int4_g64")
    ]
    share = (allocation.bits_per_weight - 2.5) / (4.25 - 2.5)
    mixed = divergence(decoder, apply(decoder, allocation.scheme), held_out, every)
    assert mixed < 0.8 * ((1 - share) * ends[0] + share * ends[1])
