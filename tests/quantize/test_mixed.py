"""Mixed precision: the knapsack against trying everything, sensitivities against running everything, the plan kept."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from diffbit import models
from diffbit.errors import DiffbitError
from diffbit.files import parse_size
from diffbit.models import Decoder, ModelConfig
from diffbit.quantize import Scheme, apply, load, parse_format, quantize_checkpoint, rtn, sizes
from diffbit.quantize.methods import Recipe, parse_recipe
from diffbit.quantize.mixed import plan
from diffbit.quantize.mixed.budget import Space, available_memory
from diffbit.quantize.mixed.knapsack import Knapsack
from diffbit.quantize.mixed.sensitivity import Reference, sensitivities
from diffbit.quantize.piece import Tokens

from ..configs import resized

CONFIG = ModelConfig.uniform(
    vocab_size=96, hidden_size=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=96,
    attention="diff_v1",
)  # fmt: skip
IDS = torch.randint(96, (5, 24), generator=torch.Generator().manual_seed(0))
MASK = torch.arange(24) < torch.tensor([24, 24, 17, 24, 9])[:, None]
FEW = ("int2_g64", "int3_g64", "int4_g32", "int8", "none")


def make(config: ModelConfig = CONFIG) -> Decoder:
    """A random model some of whose layers matter more than others."""
    torch.manual_seed(0)
    decoder = Decoder(config)
    with torch.no_grad():
        for place, (name, parameter) in enumerate(decoder.named_parameters()):
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif parameter.dim() == 2:
                parameter.mul_(2 + place % 4)
    return decoder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixed") / "float"
    models.save(make(), path)
    return path


def divergence(exact: Decoder, other: Decoder, ids: Tensor = IDS, mask: Tensor = MASK) -> float:
    """KL by its definition, both models run whole in float64's neighbourhood: the slow and obvious version."""
    with torch.no_grad():
        p, q = (F.log_softmax(model(ids, attention_mask=mask.long()).double(), dim=-1) for model in (exact, other))
    return float((p.exp() * (p - q)).sum(-1)[mask].mean())


# the knapsack


def everything(sizes: list[list[int]], losses: list[list[float]], budget: int) -> float:
    """The least loss within a budget, by trying all choices."""
    found = []
    for choice in itertools.product(*(range(len(row)) for row in sizes)):
        if sum(row[place] for row, place in zip(sizes, choice, strict=True)) <= budget:
            found.append(sum(row[place] for row, place in zip(losses, choice, strict=True)))
    return min(found)


@pytest.mark.parametrize("seed", range(40))
def test_the_choice_is_the_best_of_all(seed: int) -> None:
    """Losses of any sign, equal ones, sizes that share a factor and such that do not; every budget there is."""
    draw = random.Random(seed)
    factor = draw.choice((1, 6, 64))
    rows = [draw.randint(1, 4) for _ in range(draw.randint(1, 5))]
    sizes = [[draw.randint(1, 12) * factor for _ in range(count)] for count in rows]
    losses = [[draw.choice((1.0, draw.random(), -draw.random() / 4)) for _ in range(count)] for count in rows]
    knapsack = Knapsack(sizes, losses)
    curve = dict(knapsack.curve())
    for budget in range(knapsack.smallest, knapsack.largest + factor + 1, max(1, factor // 3)):
        choice = knapsack.choose(budget)
        assert sum(row[place] for row, place in zip(sizes, choice, strict=True)) <= budget
        loss = sum(row[place] for row, place in zip(losses, choice, strict=True))
        assert loss == pytest.approx(everything(sizes, losses, budget), abs=1e-12)
        assert knapsack.gap(budget) == 0
        assert min(value for size, value in curve.items() if size <= budget) == pytest.approx(loss, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_a_coarse_table_says_how_far_it_may_be_off(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [[draw.randint(1, 1000) for _ in range(4)] for _ in range(5)]
    losses = [[1000 / size * draw.uniform(0.5, 2) for size in row] for row in sizes]
    knapsack = Knapsack(sizes, losses, steps=16)
    assert knapsack.unit > 1
    gaps = []
    for budget in range(knapsack.smallest, knapsack.largest, 97):
        choice = knapsack.choose(budget)
        assert sum(row[place] for row, place in zip(sizes, choice, strict=True)) <= budget
        loss = sum(row[place] for row, place in zip(losses, choice, strict=True))
        assert loss - knapsack.gap(budget) <= everything(sizes, losses, budget) + 1e-9 <= loss + 2e-9
        gaps.append(knapsack.gap(budget))
    assert max(gaps) > 0


def test_of_equal_choices_the_smallest() -> None:
    assert Knapsack([[5, 3, 4], [2, 1]], [[1.0, 1.0, 1.0], [0.0, 0.5]]).choose(8) == (1, 0)


# sensitivities


def measured(
    decoder: Decoder, base: Decoder, formats: dict[str, list[Any]], rounding: Callable[..., Any], tokens: Tokens | None
) -> dict[tuple[str, int], float]:
    reference = Reference(decoder, Tokens(decoder.config, IDS, MASK))
    found = sensitivities(reference, decoder, base, Scheme(), formats, rounding, tokens)
    return {(module, place): value for module, place, value in found}


def test_a_sensitivity_is_the_divergence_of_the_model_with_that_weight_rounded() -> None:
    """Around the float model and one of int3, with padding: a copy of the model with one weight changed, run whole."""
    decoder = make()
    modules = [name for name in Space(CONFIG, Scheme(), FEW, torch.float32).shapes]
    assert len(modules) == 14
    formats = [parse_format("int2_g64"), None, parse_format("int4_g32_asym")]
    around = apply(decoder, Scheme(weights=parse_format("int3_g64")))
    for base in (decoder, around):
        found = measured(decoder, base, {module: formats for module in modules}, lambda _, w, f, __: rtn(w, f), None)
        assert len(found) == len(modules) * len(formats)
        for (module, place), value in found.items():
            changed = copy.deepcopy(base)
            weight = decoder.get_submodule(module).weight
            format = formats[place]
            linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
            linear.weight.data = weight.data if format is None else rtn(weight.data, format).dequantize()
            changed.set_submodule(module, linear)
            assert value == pytest.approx(divergence(decoder, changed), rel=1e-3, abs=2e-7), (module, format)


def test_statistics_are_those_that_the_layer_is_rounded_with() -> None:
    """Of gptq, one layer in a format: the divergence of the very model that `apply` makes of that scheme."""
    decoder = make()
    gptq = parse_recipe("gptq").rounding.quantize
    format = parse_format("int2_g64")
    modules = [name for name in Space(CONFIG, Scheme(), FEW, torch.float32).shapes]
    found = measured(
        decoder,
        decoder,
        {module: [format] for module in modules},
        lambda _, weight, format, stats: gptq(weight, format, stats),
        Tokens(CONFIG, IDS, MASK),
    )
    for module in modules:
        made = apply(decoder, Scheme(overrides=((module, format),)), "gptq", IDS, MASK)
        assert found[module, 0] == pytest.approx(divergence(decoder, made), rel=2e-3, abs=2e-7), module
    plain = measured(decoder, decoder, {m: [format] for m in modules}, lambda _, w, f, __: rtn(w, f), None)
    assert sum(found.values()) < sum(plain.values())


# plans


def test_the_plan_is_within_its_budget_and_what_it_says(folder: Path) -> None:
    decoder = models.load(folder)
    found = plan(folder, bits=3.6, candidates=FEW, calibration=IDS, calibration_mask=MASK)
    weights = sum(layer.shape[0] * layer.shape[1] for layer in found.layers)
    assert found.bits_per_weight == 8 * sum(layer.nbytes for layer in found.layers) / weights <= 3.6
    assert found.nbytes == sum(layer.nbytes for layer in found.layers)
    assert found.model_nbytes == sizes(CONFIG, found.scheme, torch.float32).nbytes
    formats = found.scheme.formats(CONFIG)
    assert {layer.name: layer.format for layer in found.layers} == {
        layer.name: formats[layer.name].name if layer.name in formats else "none" for layer in found.layers
    }
    assert len(set(formats.values())) > 1  # else nothing was mixed
    made = apply(decoder, found.scheme)
    assert found.measured == pytest.approx(divergence(decoder, made), rel=1e-3)
    assert found.measured == min(each.measured for each in found.rounds)
    assert found.gap == 0 and found.tokens == int(MASK.sum()) and found.stand_in is None
    assert Scheme.from_dict(found.to_dict()["scheme"]) == found.scheme
    bits, losses = zip(*found.curve, strict=True)
    assert list(bits) == sorted(bits) and list(losses) == sorted(losses, reverse=True)
    within = min(loss for size, loss in found.curve if size <= 3.6)
    assert within == pytest.approx(found.rounds[0].predicted, rel=1e-6)
    assert within < found.uniform["int3_g64"][1]  # 3.25 bits and 0.25 of scales


def test_a_small_problem_is_solved_as_by_trying_every_model(folder: Path) -> None:
    """With one layer free to choose, losses are exact: the best model of all that fit is found."""
    decoder = models.load(folder)
    free = "model.layers.1.mlp.down_proj"
    shapes = Space(CONFIG, Scheme(), FEW, torch.float32).shapes
    weights = sum(rows * columns for rows, columns in shapes.values())
    fixed = [name for name in shapes if name != free]
    scheme = Scheme(overrides=tuple((name, parse_format("int4_g32")) for name in fixed))
    found = plan(folder, bits=4.6, scheme=scheme, candidates=FEW, calibration=IDS, calibration_mask=MASK)
    (layer,) = found.layers
    fits = {}
    for name in FEW:
        own = Scheme(overrides=(*scheme.overrides, (free, None if name == "none" else parse_format(name))))
        bits = 8 * sum(format.nbytes(shapes[module]) for module, format in own.formats(CONFIG).items()) / weights
        if name != "none" and bits <= 4.6:
            fits[name] = divergence(decoder, apply(decoder, own))
    assert 1 < len(fits) < len(FEW)
    assert layer.format == min(fits, key=fits.__getitem__)
    assert found.measured == pytest.approx(min(fits.values()), rel=1e-3)
    assert found.predicted == pytest.approx(found.measured, rel=1e-3)


def test_bytes_of_the_model(folder: Path) -> None:
    target = int(0.3 * sizes(CONFIG, dtype=torch.float32).nbytes)
    found = plan(folder, nbytes=target, candidates=FEW, calibration=IDS)
    assert target * 0.98 < found.model_nbytes <= target
    quantize_checkpoint(folder, folder.with_name("smaller"), found.scheme)
    tensors = models.Checkpoint(folder.with_name("smaller"))
    stored = sum(tensors.read(name).numel() * tensors.read(name).element_size() for name in tensors.names)
    assert stored == found.model_nbytes


def test_overrides_are_fixed_and_counted(folder: Path) -> None:
    scheme = Scheme(overrides=(("*.down_proj", parse_format("int8")), ("lm_head", parse_format("int4_g32"))))
    found = plan(folder, bits=5, scheme=scheme, candidates=FEW, calibration=IDS)
    formats = found.scheme.formats(CONFIG)
    assert formats["model.layers.0.mlp.down_proj"].name == "int8" and formats["lm_head"].name == "int4_g32"
    assert not any(layer.name.endswith("down_proj") or layer.name == "lm_head" for layer in found.layers)
    shapes = {name: tuple(module.weight.shape) for name, module in make().named_modules() if name in formats}
    shapes["lm_head"] = (96, 64)
    everywhere = sum(format.nbytes(shapes[module]) for module, format in formats.items())
    assert found.nbytes == everywhere  # no layer was left in float
    assert found.bits_per_weight == 8 * everywhere / sum(rows * columns for rows, columns in shapes.values()) <= 5


def test_candidates_that_cannot_hold_a_layer_are_left_out_there(folder: Path) -> None:
    found = plan(folder, bits=4, candidates=("nf4", "int3_g32"), calibration=IDS)
    for layer in found.layers:  # in_features 96 is no multiple of nf4's 64
        assert list(layer.sizes) == (["int3_g32"] if layer.name.endswith("down_proj") else ["nf4", "int3_g32"])
    with pytest.raises(DiffbitError, match=r"model.layers.0.mlp.down_proj: none of the candidates .* multiple of 64"):
        plan(folder, bits=4, candidates=("nf4",), calibration=IDS)


@pytest.mark.parametrize("attention", ["softmax", "diff_v2"])
@pytest.mark.parametrize("method", ["rtn", "rotate+gptq"])
def test_other_variants_and_recipes(attention: str, method: str, tmp_path: Path) -> None:
    """A transform runs first; lambda_proj stays float. What was measured is what the recipe makes of the scheme."""
    config = resized(CONFIG, attention=attention, tie_embeddings=True, intermediate_size=128)
    decoder = make(config)
    models.save(decoder, tmp_path / "float")
    found = plan(tmp_path / "float", bits=3, method=method, candidates=("int2_g64", "int4_g64"), calibration=IDS)
    assert not any("lambda" in layer.name for layer in found.layers)
    made = apply(decoder, found.scheme, method, IDS)
    assert found.measured == pytest.approx(divergence(decoder, made, mask=torch.ones_like(MASK)), rel=2e-3)
    assert found.measured < divergence(decoder, apply(decoder, Scheme(weights=parse_format("int2_g64")), method, IDS))
    untied = replace(config, tie_embeddings=config.tie_embeddings and "rotate" not in method)
    assert found.model_nbytes == sizes(untied, found.scheme, torch.float32).nbytes


def test_a_method_that_rounds_layers_has_a_stand_in(folder: Path) -> None:
    runs = []

    def quantize_layer(piece: Any) -> dict[str, Any]:
        runs.append(len(piece.formats))
        return {name: rtn(piece.tensors[f"{name}.weight"], format) for name, format in piece.formats.items()}

    rounding: Any = SimpleNamespace(quantize_layer=quantize_layer, CALIBRATED=True)
    found = plan(
        folder, bits=3, method=Recipe("whole", (), rounding, ()), candidates=("int2_g64", "int4_g64"), calibration=IDS
    )
    assert found.stand_in == "gptq" and found.method == "whole"
    decoder = models.load(folder)
    made = apply(decoder, found.scheme)  # rtn: what the method does
    assert found.measured == pytest.approx(divergence(decoder, made, mask=torch.ones_like(MASK)), rel=1e-3)
    assert set(runs) == {7}  # whole layers only, when models are made


def test_a_mixed_model_exports_and_verifies(tmp_path: Path, checkpoint: Path) -> None:
    from diffbit.export import export_artifact
    from diffbit.runtime import verify

    fixed = Scheme(overrides=(("model.layers.0.self_attn.o_proj", parse_format("int8")),))
    found = plan(checkpoint, bits=4.2, scheme=fixed, candidates=("int3_g64", "int4_g32"), calibration=IDS)
    made = quantize_checkpoint(checkpoint, tmp_path / "mixed", found.scheme)
    assert {row.format for row in made.weights} == {"int3_g64", "int4_g32", "int8"}
    assert made.after.nbytes == found.model_nbytes
    exact, loaded = models.load(checkpoint), load(tmp_path / "mixed")
    assert divergence(exact, loaded, mask=torch.ones_like(MASK)) == pytest.approx(found.measured, rel=1e-3)
    assert verify(export_artifact(tmp_path / "mixed", tmp_path / "onnx")).passed


# budgets and refusals


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("40MB", 40_000_000), ("40 MiB", 40 << 20), ("1.2GB", 1_200_000_000), ("800kb", 800_000), (".5gib", 1 << 29)],
)
def test_sizes(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("text", ["40", "MB", "4O MB", "-1MB", "1e3MB", "40MB/s", "", "40TB", "1.2.3GB"])
def test_sizes_refused(text: str) -> None:
    with pytest.raises(DiffbitError, match="is not a size; wanted a number with its unit, such as 40MB"):
        parse_size(text)


@pytest.mark.parametrize(
    ("budget", "sentence"),
    [
        ({"bits": 2.0}, r"2 bits a weight cannot be had: these candidates and overrides give from 2.2\d to 32.00"),
        ({"bits": 33}, r"33 bits a weight cannot be had"),
        ({"bits": float("nan")}, "nan bits a weight cannot be had"),
        ({"bits": float("inf")}, "inf bits a weight cannot be had"),
        ({"nbytes": 1000}, r"0.00 MB cannot be had: .* from 0.0\d to 0.30 MB for the whole model"),
        ({"nbytes": 10**9}, "1,000.00 MB cannot be had"),
    ],
    ids=str,
)
def test_a_budget_that_cannot_be_had(budget: dict[str, Any], sentence: str, folder: Path) -> None:
    with pytest.raises(DiffbitError, match=sentence):
        plan(folder, **budget, candidates=("int2_g64", "int4_g32", "none"), calibration=IDS)


def test_refused(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(sentence: str, **options: Any) -> None:
        with pytest.raises(DiffbitError, match=sentence):
            plan(folder, bits=3, calibration=IDS, **options)

    refuse("the candidates are none: no format", candidates=("none",))
    refuse("'int9' ", candidates=("int9", "int4_g32"))
    refuse("the overrides fix every linear layer", scheme=Scheme(overrides=(("*", parse_format("int4_g32")),)))
    refuse("matches no linear layer", scheme=Scheme(overrides=(("*.qproj", None),)))
    monkeypatch.setattr("diffbit.quantize.mixed.search.available_memory", lambda: 10**5)
    refuse(r"float model in memory, about 0.0 GB, and 0.0 GB are free; choose the formats yourself")
    quantize_checkpoint(folder, tmp_path / "int4", Scheme(weights=parse_format("int4_g32")))
    with pytest.raises(DiffbitError, match="is quantized already"):
        plan(tmp_path / "int4", bits=3, calibration=IDS)


def test_memory_is_known_on_linux() -> None:
    free = available_memory()
    assert free is None or 1 << 20 < free < 1 << 60
    assert free is not None or not Path("/proc/meminfo").exists()


# a trained model


def test_a_trained_model_gains_by_mixing(trained: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """At the size of int3_g64: a good part of its divergence goes, on text that was not looked at for it."""
    from diffbit.calib_data import eval_windows

    monkeypatch.setattr("diffbit.quantize.mixed.search.SAMPLE", 1024)
    path = trained("softmax")  # of DIFF v1's layers none matters more than the others
    text = eval_windows("stdlib", path, 128, 8, split="calib")
    found = plan(path, bits=3.25, candidates=("int2_g64", "int3_g64", "int4_g128", "int5_g64"), calibration=text.ids)
    assert 3.2 < found.bits_per_weight <= 3.25
    held_out = torch.from_numpy(eval_windows("stdlib", path, 128, 8).ids)
    decoder, every = models.load(path), torch.ones_like(held_out, dtype=torch.bool)
    uniform = divergence(decoder, apply(decoder, Scheme(weights=parse_format("int3_g64"))), held_out, every)
    mixed = divergence(decoder, apply(decoder, found.scheme), held_out, every)
    assert mixed < 0.75 * uniform  # 0.63
    assert found.predicted == pytest.approx(found.measured, rel=0.1)  # equal within 1 %
