"""Training runs of one model compared as one, against each run compared alone."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from diffbit.apps.evaluate import measure
from diffbit.apps.evaluate.compare import Comparison, compare
from diffbit.apps.evaluate.cost import token_cost
from diffbit.apps.evaluate.measure import Measurement, combine
from diffbit.apps.evaluate.metrics import Scores, t_quantile
from diffbit.apps.evaluate.variants import unchanged
from diffbit.calib_data import Windows, windows
from diffbit.cli.app import app
from diffbit.io.errors import DiffbitError
from diffbit.models import Checkpoint, Decoder, ModelConfig, load, save
from diffbit.quantize import Scheme, apply

VOCABULARY, RUNS = 97, 3
PICO = Path(__file__).parents[3] / "examples" / "pico" / "diff_v1"


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three runs of two models, run by run."""
    folder = tmp_path_factory.mktemp("runs")
    for attention, heads in (("diff_v1", 2), ("softmax", 4)):
        config = ModelConfig.uniform(
            vocab_size=VOCABULARY, hidden_size=64, num_layers=1, num_heads=heads, num_kv_heads=heads // 2, head_dim=16,
            intermediate_size=96, max_position=32, attention=attention, tie_embeddings=True,
        )  # fmt: skip
        for run in range(RUNS):
            torch.manual_seed(run)
            decoder = Decoder(config)
            with torch.no_grad():
                for parameter in decoder.parameters():
                    if parameter.dim() == 2:
                        parameter.mul_(3 + run)
            save(decoder, folder / f"seed{run}" / attention)
    return [folder / f"seed{run}" / name for name in ("diff_v1", "softmax") for run in range(RUNS)]


@pytest.fixture(scope="module")
def text() -> Windows:
    rng = np.random.default_rng(0)
    return windows([rng.integers(1, VOCABULARY, 150)], 16, eos_id=0, overlap=3, source="made up")


@pytest.fixture(scope="module")
def alone(paths: list[Path], text: Windows) -> Comparison:
    """Each run as a model of its own."""
    return compare(paths, text, ["2"], ["weights"], repeats=2)


def logarithms(comparison: Comparison) -> tuple[np.ndarray, np.ndarray]:
    """Of each model the loss of the float model, and what the format adds."""
    results = comparison.results
    return np.log([r.perplexity.value for r in results[::2]]), np.log([r.ratio.value for r in results[1::2]])


def test_the_mean_of_the_runs(paths: list[Path], text: Windows, alone: Comparison) -> None:
    """The spread of the runs is in the interval: it exceeds that of one run's text and roundings."""
    comparison = compare(paths, text, ["2"], ["weights"], runs=RUNS, repeats=2)
    assert [model.name for model in comparison.models] == ["diff_v1", "softmax"]
    assert [list(model.other_runs) for model in comparison.models] == [
        list(map(str, paths[1:3])),
        list(map(str, paths[4:])),
    ]
    assert {result.repeats for result in comparison.results[1::2]} == {2}
    for got, of_runs in zip(logarithms(comparison), logarithms(alone), strict=True):
        assert got == pytest.approx(of_runs.reshape(2, RUNS).mean(1), rel=1e-4)
    (contrast,) = comparison.contrasts
    assert (contrast.runs, contrast.repeats) == (RUNS, 2)
    added = logarithms(alone)[1].reshape(2, RUNS)
    differences = added[1] - added[0]
    assert contrast.difference.value == pytest.approx(differences.mean(), rel=1e-3)
    half = (contrast.difference.high - contrast.difference.low) / 2
    between = t_quantile(0.975, RUNS - 1) * differences.std(ddof=1) / math.sqrt(RUNS)
    assert half > 0.6 * between > 0  # with the text's variance the degrees of freedom rise, so it may be a little less
    single = next(c.difference for c in alone.contrasts if c.model == alone.models[RUNS].name)
    assert half > (single.high - single.low) / 2


def test_needles_are_means_of_the_runs() -> None:
    """Each run's answers [K roundings, rows, queries] count as one."""
    rng = np.random.default_rng(2)
    tokens = np.full(4, 10)

    def run(roundings: int) -> Measurement:
        nll = rng.random((roundings, 4))
        return Measurement(
            variant=unchanged(None), scores=Scores(tokens, nll, nll, nll), nbytes=1, bits_per_weight=4.0,
            cache_bytes=1.0, cost=token_cost(Checkpoint(PICO).config, None, 8), repeats=roundings,
            answers=(rng.random((roundings, 5, 2)) < 0.5,),
        )  # fmt: skip

    runs = [run(2), run(2), run(2)]
    (combined,) = combine([[one] for one in runs])
    assert combined.repeats == 2
    for index, one in enumerate(runs):
        assert np.allclose(combined.scores.nll[index], (one.scores.nll[0] + one.scores.nll[1]) / 2)
        assert np.allclose(combined.answers[0][index], one.answers[0].sum(0) / 2)
    assert combine([[runs[0]]]) == [runs[0]]


def test_what_one_run_lacks_is_left_out(paths: list[Path], text: Windows, monkeypatch: pytest.MonkeyPatch) -> None:
    """A method may refuse a variant of one run, as for a weight that is not finite."""
    schemes = []

    def refuses_the_second(decoder: Decoder, scheme: Scheme, method: str, *, order: int) -> Decoder:
        schemes.append(scheme)
        if len(schemes) == 3:
            raise DiffbitError("no")
        return apply(decoder, scheme, method, order=order)

    monkeypatch.setattr(measure, "apply", refuses_the_second)
    comparison = compare(paths[:2], text, ["3", "2"], ["weights"], runs=2)
    assert [r.format for r in comparison.results] == ["16", "int2_g64"]
    assert [(r.model, r.format) for r in comparison.skipped] == [("diff_v1", "int3_g64")]


@pytest.mark.parametrize(
    ("order", "runs", "message"),
    [
        ((0, 1, 3), 2, r"3 checkpoints are not 2 training runs of each model"),
        ((0, 3), 2, r"seed0/softmax: is no training run of the same model as .*seed0/diff_v1"),
        ((0, 0), 2, r"seed0/diff_v1: has the same weights as .*seed0/diff_v1"),
        ((0, 1), 0, r"runs is 0, wanted 1 or more"),
    ],
)
def test_what_are_no_runs_of_one_model(
    paths: list[Path], text: Windows, order: tuple[int, ...], runs: int, message: str
) -> None:
    with pytest.raises(DiffbitError, match=message):
        compare([paths[place] for place in order], text, ["3"], ["weights"], runs=runs)


@pytest.mark.slow
def test_the_command_says_how_many_runs(tmp_path: Path) -> None:
    """Two runs of pico: the second is the first, changed a little."""
    runs = []
    for name in ("diff_v1", "softmax"):
        decoder = load(PICO.parent / name)
        with torch.no_grad():
            decoder.model.norm.weight.mul_(1.05)
        save(decoder, tmp_path / "other" / name, tokenizer_from=PICO.parent / name)
        runs += [str(PICO.parent / name), str(tmp_path / "other" / name)]
    arguments = ["--runs", "2", "--bits", "4", "--what", "weights", "--max-windows", "4", "--length", "64"]
    result = CliRunner().invoke(app, ["compare", *runs, *arguments, "-o", str(tmp_path / "report")])
    assert result.exit_code == 0, result.output
    assert ", 2 training runs of each, one rounding of each (" in result.output
    assert "another rounding may reverse them" not in result.output
    page = (tmp_path / "report" / "report.html").read_text()
    assert "what another training run of each model would: 2 were measured" in page
    assert json.loads((tmp_path / "report" / "comparison.json").read_text())["contrasts"][0]["runs"] == 2
