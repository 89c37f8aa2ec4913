"""Distillation against its formulas in float64 with autograd, and in runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from diffbit.apps.train import loss as loss_module
from diffbit.apps.train.config import TrainConfig
from diffbit.apps.train.distill import Teacher
from diffbit.apps.train.folder import read_log
from diffbit.apps.train.initialize import initialize
from diffbit.apps.train.loss import Objective
from diffbit.apps.train.trainer import train
from diffbit.calib_data import load_tokenizer
from diffbit.io.errors import DiffbitError
from diffbit.models import Checkpoint, Decoder, load, save

from ...configs import resized
from .toy import model, options, stop_at


def kl(student: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    probabilities = teacher.double().softmax(-1)
    return (probabilities * (probabilities.log() - student.double().softmax(-1).log())).sum(-1)


@pytest.fixture(scope="module")
def teachers(text: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Trained teachers: another variant of other sizes, and what a quantized run leaves."""
    folder = tmp_path_factory.mktemp("teachers")
    large = resized(model("diff_v2", num_layers=3, hidden_size=48, head_dim=12), num_kv_heads=1)
    base = options(text, model=large, steps=20, learning_rate=1e-2)
    train(base, folder / "float")
    tokenizer = str(folder / "float")
    train(
        options(text, "softmax", qat="ternary", tokenizer=tokenizer, steps=20, learning_rate=1e-2), folder / "ternary"
    )
    return {name: folder / name for name in ("float", "ternary")}


@pytest.mark.parametrize(("piece", "block"), [(1 << 24, 1 << 20), (1500, 700), (1, 1)])
@pytest.mark.parametrize("tied", [True, False])
def test_losses_and_gradients_against_whole_logits(
    text: str, teachers: dict[str, Path], monkeypatch: pytest.MonkeyPatch, piece: int, block: int, tied: bool
) -> None:
    """The loss of any pieces is that of all logits at once, in float64 from the logits on, and so are its gradients."""
    monkeypatch.setattr(loss_module, "PIECE", piece)
    monkeypatch.setattr(loss_module, "BLOCK", block)
    path = teachers["float"]
    config = options(text, distill=str(path), tokenizer=str(path))
    config = replace(config, model=replace(config.model, tie_embeddings=tied))
    student = Decoder(config.model)
    initialize(student, 3)
    teacher = Teacher(config, load_tokenizer(path), torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(288, (3, 10), generator=generator)
    weights = torch.rand(3, 9, generator=generator)
    loss, losses, divergence = Objective(student, teacher, 7.0)(ids, weights)

    logits, target = student(ids[:, :-1]), load(path)(ids[:, :-1])
    expected_losses = -logits.double().log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]
    expected_divergence = kl(logits / 5, target / 5).sum()
    expected = (weights * expected_losses).sum() + 7 * expected_divergence
    assert torch.allclose(losses.double(), expected_losses, rtol=1e-5) and not losses.requires_grad
    assert divergence.item() == pytest.approx(expected_divergence.item(), rel=1e-4) and not divergence.requires_grad
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert expected_divergence.item() > 1e-3
    parameters = list(student.parameters())
    fast = torch.autograd.grad(3 * loss, parameters, allow_unused=True)
    slow = torch.autograd.grad(3 * expected, parameters, allow_unused=True)
    for got, exact in zip(fast, slow, strict=True):
        assert (got is None) == (exact is None)
        if got is not None and exact is not None:
            assert (got - exact).norm() <= 2e-5 * exact.norm() + 1e-9
    assert not any(parameter.requires_grad for parameter in teacher.model.parameters())


def test_no_tensor_is_as_large_as_tokens_times_vocabulary() -> None:
    """At 40,000 ids the largest tensors that torch allocates are logits of a piece, or the table."""
    config = model("softmax", vocab_size=40_000, max_position=512)
    student = Decoder(config)
    ids = torch.randint(40_000, (2, 513))
    with torch.profiler.profile(profile_memory=True) as profile:
        Objective(student)(ids, torch.ones(2, 512))[0].backward()
    largest = max(event.cpu_memory_usage for event in profile.events())
    assert 40_000 * 32 * 4 <= largest <= 4 * max(loss_module.PIECE, 40_000 * 32) < 4 * ids.numel() * 40_000


@pytest.mark.slow
@pytest.mark.parametrize(("teacher", "qat"), [("float", "ternary"), ("ternary", None)])
def test_a_distilled_run_resumes_bit_for_bit(
    text: str, tmp_path: Path, teachers: dict[str, Path], teacher: str, qat: str | None
) -> None:
    path = str(teachers[teacher])
    config = options(text, tokenizer=path, distill=path, qat=qat, accumulate=2, steps=6, learning_rate=3e-3)
    whole = train(config, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 5)
        train(config, tmp_path / "stopped")
    assert train(config, tmp_path / "stopped", resume=True).losses == whole.losses
    keys = ("step", "loss", "distill_loss", "grad_norm", "eval_loss")
    logs = [[[row.get(key) for key in keys] for row in read_log(tmp_path / name)] for name in ("whole", "stopped")]
    assert logs[0] == logs[1]
    log = read_log(tmp_path / "whole")
    assert log[-1]["distill_loss"] < log[0]["distill_loss"]
    stored = json.loads((tmp_path / "whole" / "training.json").read_text())
    assert stored["distill_sha256"] == Checkpoint(path).sha256()
    parts = train(replace(config, accumulate=1, batch_size=8), tmp_path / "large")
    assert parts.losses == pytest.approx(whole.losses, rel=1e-4)
    assert [row["distill_loss"] for row in read_log(parts.path)] == pytest.approx(
        [row["distill_loss"] for row in log], rel=1e-3
    )


def test_distill_weight_does_not_change_the_text_loss(text: str, tmp_path: Path, teachers: dict[str, Path]) -> None:
    path = str(teachers["float"])
    config = options(text, tokenizer=path, distill=path, steps=1, warmup=1, clip=1e9)
    rows = {}
    for weight in (0.0, 2.0, 4.0):
        changed = replace(config, distill_weight=weight)
        rows[weight] = read_log(train(changed, tmp_path / f"{weight}").path)[0]
    assert len({row["loss"] for row in rows.values()}) == 1
    plain = read_log(train(replace(config, distill=None), tmp_path / "plain").path)[0]
    assert plain["grad_norm"] == rows[0.0]["grad_norm"] and "distill_loss" not in plain
    assert len({row["grad_norm"] for row in rows.values()}) == 3


def test_a_teacher_changed_in_between(text: str, tmp_path: Path, teachers: dict[str, Path]) -> None:
    path = tmp_path / "teacher"
    save(load(teachers["float"]), path, dtype=torch.float32, tokenizer_from=teachers["float"])
    config = options(text, tokenizer=str(path), distill=str(path))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 5)
        train(config, tmp_path / "out")
    other = load(path)
    with torch.no_grad():
        other.model.norm.weight[0] += 1
    save(other, path, dtype=torch.float32, tokenizer_from=teachers["float"], overwrite=True)
    with pytest.raises(DiffbitError, match="trained with distill_sha256"):
        train(config, tmp_path / "out", resume=True)
    with pytest.raises(DiffbitError, match="other values of distill_weight"):
        train(replace(config, distill_weight=1.0), tmp_path / "out", resume=True)


def test_evaluation_computes_no_gradient(monkeypatch: pytest.MonkeyPatch, teachers: dict[str, Path]) -> None:
    model, ids = load(teachers["float"]), torch.randint(288, (2, 9))
    loss, losses, _ = Objective(model)(ids, torch.ones(2, 8))
    monkeypatch.setattr(torch.autograd, "grad", None)
    with torch.no_grad():
        assert torch.equal(Objective(model)(ids, torch.ones(2, 8))[1], losses) and loss.requires_grad


def test_bf16_follows_fp32(text: str, tmp_path: Path, teachers: dict[str, Path]) -> None:
    path = str(teachers["float"])
    config = options(text, tokenizer=path, distill=path, steps=2, qat="ternary")
    exact, half = (read_log(train(replace(config, precision=p), tmp_path / p).path) for p in ("fp32", "bf16"))
    for key in ("loss", "distill_loss", "grad_norm"):
        assert half[0][key] == pytest.approx(exact[0][key], rel=0.05)


def test_bad_input_is_refused(text: str, tmp_path: Path, teachers: dict[str, Path], trained: Any) -> None:
    path = str(teachers["float"])
    for changes, sentence in (
        ({"distill_weight": -1.0}, r"distill_weight is -1\.0, wanted a number of at least 0"),
        ({"distill_weight": float("nan")}, "distill_weight is nan, wanted a number of at least 0"),
    ):
        with pytest.raises(DiffbitError, match=sentence):
            options(text, distill=path, **changes)
    with pytest.raises(DiffbitError, match=r"distill_weight is 5.0, wanted 100.0 without distill"):
        options(text, distill_weight=5.0)
    with pytest.raises(DiffbitError, match="its vocabulary has 1024 ids, the student's has 288"):
        train(options(text, distill=str(trained("softmax"))), tmp_path / "a")
    other = tmp_path / "other.txt"
    other.write_text(Path(text).read_text().replace("function", "nonsense"))
    with pytest.raises(DiffbitError, match="its tokenizer and the student's give different ids"):
        train(options(str(other), distill=path), tmp_path / "b")
    long: TrainConfig = options(text, distill=path, tokenizer=path, model=model(max_position=64), length=40)
    with pytest.raises(DiffbitError, match="its context is 32 tokens and the rows have 40"):
        train(long, tmp_path / "c")
    with pytest.raises(DiffbitError, match="no such"):
        train(options(text, distill=str(tmp_path / "absent")), tmp_path / "d")
