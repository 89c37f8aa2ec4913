"""The loop against slow, obvious versions: batches, loss, AdamW, schedule, resuming, several processes."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from diffbit.apps.train import checkpoint as checkpoint_module
from diffbit.apps.train import trainer as trainer_module
from diffbit.apps.train.data import TrainingRows
from diffbit.apps.train.disk import SMALL, present
from diffbit.apps.train.folder import read_log
from diffbit.apps.train.initialize import initialize
from diffbit.apps.train.presets import train_config
from diffbit.apps.train.trainer import evaluation_loss, learning_rate, train
from diffbit.calib_data import END_OF_TEXT, Needles, load_text, load_tokenizer, windows
from diffbit.cli.app import main
from diffbit.io import durable, resources
from diffbit.io.errors import DiffbitError
from diffbit.io.files import read_sealed, write_sealed
from diffbit.models import Checkpoint, Decoder, load

from ... import forks
from .toy import model, options, stop_at


def test_a_run_learns_and_leaves_a_model(text: str, tmp_path: Path) -> None:
    config = options(text, steps=60, learning_rate=1e-2, eval_every=25)
    result = train(config, tmp_path / "out")
    assert result.losses[0] == pytest.approx(math.log(288), abs=0.5)
    assert result.losses[-1] < 0.75 * result.losses[0]
    assert result.eval_loss < 0.75 * result.losses[0]
    assert result.tokens == 60 * 4 * 16
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json", "log.jsonl", "loss.png", "training.json"} < names
    assert not {name for name in names if name.startswith((".", "checkpoints", "tokenizer"))} - {
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")

    log = read_log(tmp_path / "out")
    assert [row["step"] for row in log] == list(range(1, 61))
    assert [row["loss"] for row in log] == result.losses
    assert [row["step"] for row in log if "eval_loss" in row] == [25, 50, 60]
    assert all(len(row["lambda"]) == 2 and row["grad_norm"] > 0 and row["tokens_per_second"] > 0 for row in log)
    assert log[0]["lambda"] != log[-1]["lambda"]

    # What was saved is what was scored.
    trained = load(tmp_path / "out")
    tokenizer = load_tokenizer(tmp_path / "out")
    assert trained.config.eos_token_ids == (tokenizer.eos_id,)
    assert tokenizer.backend.id_to_token(tokenizer.eos_id) == END_OF_TEXT
    ids = tokenizer.encode(load_text(text, "eval").documents)
    held_out = windows(ids, 16, eos_id=tokenizer.eos_id, max_windows=8)
    assert evaluation_loss(trained, held_out, 3) == pytest.approx(result.eval_loss, abs=1e-6)


@pytest.mark.parametrize(
    "changes",
    [{}, {"checkpoint_every": 0}, {"steps": 4}, {"qat": "ternary"}, {"qat": "int4_g32"}, {"head_gain": 1.0}],
    ids=["float", "no checkpoints", "one checkpoint", "ternary", "int4", "a head norm's weight"],
)
def test_disk_is_forecast(changes: dict[str, Any], text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The most that the folder has at any time, which is when a checkpoint or the model is complete."""
    config = replace(options(text), model=model(hidden_size=128, head_norm="head_gain" in changes), **changes)
    most = []

    def measured(module: Any, name: str) -> None:
        function = getattr(module, name)

        def measure(*arguments: Any, **keywords: Any) -> Any:
            most.append(present(tmp_path / "out"))
            return function(*arguments, **keywords)

        monkeypatch.setattr(module, name, measure)

    measured(checkpoint_module.shutil, "rmtree")  # of what the new checkpoint, or the model, has taken the place of
    measured(durable, "sync")
    told: list[int] = []
    monkeypatch.setattr(trainer_module, "require", lambda what, memory, disk, out: told.append(disk))
    train(config, tmp_path / "out")
    assert max(most) <= told[0] < 1.1 * max(most) + 3 * SMALL


def test_a_run_for_which_the_disk_is_too_small_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it writes or deletes anything; what it will delete counts as free."""
    config = options(text, steps=2)
    train(config, tmp_path / "out")
    before = {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()}
    usage = SimpleNamespace(free=100_000)
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda folder: usage)
    config = replace(config, steps=8)  # with two checkpoints
    refused = pytest.raises(DiffbitError, match=r"training into .* writes about .* to .*, but 100\.0 kB are free there")
    with refused:
        train(config, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    with refused:
        train(config, tmp_path / "out", overwrite=True)
    assert {file.name: file.read_bytes() for file in (tmp_path / "out").iterdir()} == before
    usage.free = 600_000
    train(config, tmp_path / "out", overwrite=True)


def test_evaluation_loss_against_one_token_at_a_time() -> None:
    torch.manual_seed(0)
    decoder = Decoder(model())
    documents = [np.random.default_rng(n).integers(0, 288, 14 + n) for n in range(3)]
    held_out = windows(documents, 10, eos_id=0, overlap=3)
    assert not held_out.mask[-1].all()
    losses = []
    for ids, target in zip(held_out.ids, held_out.target, strict=True):
        for position in np.flatnonzero(target):
            with torch.no_grad():
                logits = decoder(torch.from_numpy(ids[None, :position]))[0, -1].double()
            losses.append(float(torch.logsumexp(logits, 0) - logits[ids[position]]))
    assert len(losses) == held_out.scored
    assert evaluation_loss(decoder, held_out, 2) == pytest.approx(np.mean(losses), abs=1e-5)


@pytest.mark.parametrize("attention", ["softmax", "diff_v1", "diff_v2"])
def test_steps_against_adamw_written_out(text: str, tmp_path: Path, attention: str) -> None:
    """Losses of a run equal those of the equations in a plain loop over the same rows."""
    config = options(text, attention, learning_rate=2e-2, weight_decay=0.5, clip=0.3)
    losses = train(config, tmp_path / "out").losses

    tokenizer = load_tokenizer(tmp_path / "out")
    eos = tokenizer.eos_id
    pieces = [[eos], *([*ids, eos] for ids in tokenizer.encode(load_text(text, "train").documents))]
    rows = TrainingRows(np.concatenate(pieces), 16, seed=1)
    decoder = Decoder(config.model)
    initialize(decoder, 1)
    parameters = list(decoder.parameters())
    first = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    second = [torch.zeros_like(p, dtype=torch.float64) for p in parameters]
    clipped = 0
    for step, expected in enumerate(losses, 1):
        ids = torch.from_numpy(rows.take(4 * (step - 1), 4)[0])
        logits = decoder(ids[:, :-1])
        loss = -torch.log_softmax(logits.double(), -1).gather(-1, ids[:, 1:, None]).mean()
        assert float(loss.detach()) == pytest.approx(expected, rel=2e-5)
        gradients = [g.double() for g in torch.autograd.grad(loss, parameters)]
        norm = math.sqrt(sum(float((g**2).sum()) for g in gradients))
        clipped += norm > 0.3
        peak = 2e-2
        rate = peak * step / 2 if step <= 2 else peak * (0.1 + 0.45 * (1 + math.cos(math.pi * (step - 2) / 6)))
        with torch.no_grad():
            for p, g, m, v in zip(parameters, gradients, first, second, strict=True):
                g *= min(1.0, 0.3 / norm)
                m += 0.1 * (g - m)
                v += 0.05 * (g**2 - v)
                update = (m / (1 - 0.9**step)) / ((v / (1 - 0.95**step)).sqrt() + 1e-8)
                decayed = p.double() * (1 - rate * 0.5) if p.ndim == 2 else p.double()
                p.copy_(decayed - rate * update)
    assert clipped > 0


@pytest.mark.slow
def test_from_a_checkpoint_on_needles(text: str, tmp_path: Path, trained: Any) -> None:
    """The first step's loss and gradient are those of the weights started from; answers weigh ten times as much."""
    tokenizer = str(trained("softmax"))
    plain = options(text, "softmax", tokenizer=tokenizer, model=model("softmax", vocab_size=1024))
    first = train(plain, tmp_path / "a")
    config = train_config(
        "tiny", init=str(first.path), context=64, needles=0.6, steps=4, batch_size=6, source=text, checkpoint_every=2
    )
    assert (config.model.attention, config.model.max_position, config.length) == ("softmax", 64, 64)
    whole = train(config, tmp_path / "b")
    log = read_log(whole.path)
    stored = json.loads((whole.path / "training.json").read_text())
    assert stored["init_sha256"] == Checkpoint(first.path).sha256() and load(whole.path).config.max_position == 64

    loaded = load_tokenizer(tokenizer)
    eos = loaded.eos_id
    pieces = [[eos], *([*ids, eos] for ids in loaded.encode(load_text(text, "train").documents))]
    rows, answers = TrainingRows(np.concatenate(pieces), 64, 0, Needles.of(loaded), 0.6).take(0, 6)
    decoder = load(first.path)
    ids, answer = torch.from_numpy(rows), torch.from_numpy(answers)[:, 1:]
    losses = -torch.log_softmax(decoder(ids[:, :-1]).double(), -1).gather(-1, ids[:, 1:, None])[..., 0]
    assert log[0]["loss"] == pytest.approx(losses.detach().mean().item(), rel=1e-5)
    assert log[0]["answer_loss"] == pytest.approx(losses.detach()[answer].mean().item(), rel=1e-5)
    weighted = torch.where(answer, 10 * losses, losses).mean()
    gradients = torch.autograd.grad(weighted, list(decoder.parameters()))
    norm = math.sqrt(sum(float((g.double() ** 2).sum()) for g in gradients))
    assert log[0]["grad_norm"] == pytest.approx(norm, rel=1e-4)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 4)
        train(config, tmp_path / "c")
    assert train(config, tmp_path / "c", resume=True).losses == whole.losses
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 4)
        train(config, tmp_path / "d")
    with pytest.raises(DiffbitError, match="other values of needles"):
        train(replace(config, needles=0.5), tmp_path / "d", resume=True)
    train(replace(plain, steps=3, seed=2), first.path, overwrite=True)
    with pytest.raises(DiffbitError, match="trained with init_sha256"):
        train(config, tmp_path / "d", resume=True)


def test_options_of_earlier_versions_are_the_defaults() -> None:
    config = options("stdlib")
    before = {name: value for name, value in config.to_dict().items() if name not in ("init", "needles")}
    assert config.differences(before) == []
    assert replace(config, needles=0.5).differences(before) == ["needles"]


def test_learning_rate_ends_at_a_tenth() -> None:
    config = options("stdlib", steps=10, warmup=4, learning_rate=1.0)
    rates = [learning_rate(config, step) for step in range(1, 11)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[6] == pytest.approx(0.55) and rates[9] == pytest.approx(0.1)
    assert learning_rate(options("stdlib", steps=4, warmup=4, learning_rate=1.0), 4) == 1.0


def test_a_matched_pair_starts_alike_and_sees_the_same_batches(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, list[torch.Tensor]] = {}
    hidden = Decoder.hidden

    def spy(self: Decoder, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if torch.is_grad_enabled():
            seen.setdefault(self.config.attention, []).append(input_ids.clone())
        return hidden(self, input_ids, **kwargs)

    monkeypatch.setattr(Decoder, "hidden", spy)
    train(options(text, "diff_v1", steps=5), tmp_path / "diff_v1")
    train(options(text, "softmax", steps=5, tokenizer=str(tmp_path / "diff_v1")), tmp_path / "softmax")
    train(options(text, "diff_v2", steps=5, batch_size=2, accumulate=2), tmp_path / "diff_v2")
    assert len(seen["softmax"]) == 5 and len(seen["diff_v2"]) == 10
    batches = {name: torch.cat(ids) for name, ids in seen.items()}
    assert torch.equal(batches["diff_v1"], batches["softmax"]) and torch.equal(batches["diff_v1"], batches["diff_v2"])
    assert len(batches["softmax"].unique(dim=0)) == 20

    pair = [Decoder(model(attention)) for attention in ("softmax", "diff_v1")]
    for decoder in pair:
        initialize(decoder, seed=4)
    weights = [{n: p for n, p in decoder.named_parameters() if "lambda_" not in n} for decoder in pair]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit"])
def test_a_resumed_run_repeats_the_losses_bit_for_bit(text: str, tmp_path: Path, optimizer: str) -> None:
    config = options(text, steps=9, accumulate=2, eval_every=4, optimizer=optimizer)
    config = replace(config, model=model(intermediate_size=128))  # several tensors have 4096 elements, most have fewer
    whole = train(config, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 6)
        train(config, tmp_path / "stopped")
    assert not (tmp_path / "stopped" / "config.json").exists()
    saved = tmp_path / "stopped" / "checkpoints" / "step-00000003"
    assert list(saved.parent.iterdir()) == [saved]
    assert {path.suffix for path in saved.iterdir()} == {".json", ".safetensors"}
    load(saved)  # a model folder like any other
    resumed = train(config, tmp_path / "stopped", resume=True)
    assert resumed.losses == whole.losses and resumed.eval_loss == whole.eval_loss
    weights = [load(tmp_path / name).state_dict() for name in ("whole", "stopped")]
    assert all(torch.equal(weight, weights[1][name]) for name, weight in weights[0].items())
    keys = ("step", "loss", "lr", "grad_norm", "lambda", "eval_loss")
    logs = [[[row.get(key) for key in keys] for row in read_log(tmp_path / name)] for name in ("whole", "stopped")]
    assert logs[0] == logs[1]


def test_only_some_tensors_are_trained(text: str, tmp_path: Path) -> None:
    """The others stay to the bit, with weight decay too; the gradient is that of all tensors, where it is used."""
    first = train(options(text, steps=2), tmp_path / "first").path
    everything = replace(options(text, steps=6), init=str(first), tokenizer=str(first), clip=1e9)
    config = replace(everything, only="*.q_proj.*, *lambda_q1")
    whole = train(config, tmp_path / "whole")
    before, after = (load(path).state_dict() for path in (first, whole.path))
    changed = {name for name, weight in before.items() if not torch.equal(weight, after[name])}
    assert (
        changed == {name for name in before if ".q_proj." in name or name.endswith("lambda_q1")} and len(changed) == 4
    )
    step = replace(config, steps=1, warmup=1), replace(everything, steps=1, warmup=1)
    some, all_ = (load(train(one, tmp_path / f"step{n}").path).state_dict() for n, one in enumerate(step))
    assert all(torch.equal(some[name], all_[name]) for name in changed)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 5)
        train(config, tmp_path / "stopped")
    assert train(config, tmp_path / "stopped", resume=True).losses == whole.losses
    with pytest.raises(
        DiffbitError, match=r"only has '\*.query.*', which no tensor is called; a layer has model.layers.0"
    ):
        replace(config, only="*.q_proj.*, *.query.*")


def test_resume_with_head_gain_and_frozen_o_proj(text: str, tmp_path: Path) -> None:
    """A checkpoint stores o_proj folded with the gain, which is then not applied twice."""
    config = options(text, head_gain=0.1, only="*.q_proj.*,*.k_proj.*")
    whole = train(config, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        stop_at(patch, 5)
        train(config, tmp_path / "stopped")
    resumed = train(config, tmp_path / "stopped", resume=True)
    assert resumed.losses == whole.losses and Checkpoint(resumed.path).sha256() == Checkpoint(whole.path).sha256()


def test_conversations_in_the_models_template(trained: Any, tmp_path: Path) -> None:
    """`--field messages` of a chat model; without a template, in plain text."""
    model, chats = tmp_path / "model", tmp_path / "chats.jsonl"
    shutil.copytree(trained("softmax"), model)
    talk = [{"role": "user", "content": "Why? " * 20}, {"role": "assistant", "content": "Because. " * 20}]
    rows = [{"messages": [*talk, {"role": "user", "content": str(number)}]} for number in range(9)]
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def sha256(out: str) -> str:
        text = ["--data", str(chats), "--field", "messages", "--context", "16"]
        with pytest.raises(SystemExit) as stopped:
            main(["train", "--init", str(model), *text, "--steps", "1", "--quiet", "-o", str(tmp_path / out)])
        assert stopped.value.code == 0
        return str(json.loads((tmp_path / out / "training.json").read_text())["text_sha256"])

    assert sha256("plain") == load_text(str(chats), "train", field="messages").sha256
    (model / "chat_template.jinja").write_text("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}")

    def render(messages: Any) -> str:
        return "".join(f"<{message['role']}>{message['content']}" for message in messages)

    assert sha256("chat") == load_text(str(chats), "train", field="messages", render=render).sha256


def test_resuming_refuses_another_run(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config, out = options(text, batch_size=2), tmp_path / "out"
    with pytest.raises(DiffbitError, match="holds no run to resume"):
        train(config, out, resume=True)
    stop_at(monkeypatch, 2)
    with pytest.raises(KeyboardInterrupt):
        train(config, out)
    with pytest.raises(DiffbitError, match="holds no checkpoint to resume from"):
        train(config, out, resume=True)
    monkeypatch.undo()
    stop_at(monkeypatch, 5)
    with pytest.raises(KeyboardInterrupt) as stopped:
        train(config, out, overwrite=True)
    assert stopped.value.__notes__ == [
        f"{out / 'checkpoints' / 'step-00000003'} is complete: the same command with --resume continues from it"
    ]
    monkeypatch.undo()
    with pytest.raises(DiffbitError, match="other values of learning_rate and optimizer and seed"):
        train(replace(config, learning_rate=1.0, optimizer="adamw8bit", seed=9), out, resume=True)
    other = tmp_path / "text.txt"
    other.write_text(Path(text).read_text() + "more")
    training = out / "checkpoints" / "step-00000003" / "training.json"
    before = read_sealed(training, "")
    write_sealed(training, {**before, "text_sha256": "0" * 64})
    with pytest.raises(DiffbitError, match="trained with text_sha256 000"):
        train(config, out, resume=True)
    write_sealed(training, before)

    for file in (out / "log.jsonl", *sorted(training.parent.iterdir())):
        data = file.read_bytes()
        for place in (0, 9, len(data) // 3, len(data) // 2, len(data) - 3) if file.suffix != ".jsonl" else (0, 99):
            file.write_bytes(data[:place] + bytes([data[place] ^ 1 << place % 7]) + data[place + 1 :])
            with pytest.raises(DiffbitError, match=rf"{re.escape(file.name)}: .*overwrite") as caught:
                if file.suffix != ".jsonl":  # without all that comes before
                    checkpoint_module.read_training(training.parent)
                train(config, out, resume=True)
            assert "\n" not in str(caught.value)
        file.write_bytes(data)
    (training.parent / "optimizer.safetensors").unlink()
    with pytest.raises(DiffbitError, match=r"optimizer\.safetensors: cannot be read .*overwrite"):
        train(config, out, resume=True)
    train(config, out, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "text.txt"]
    with pytest.raises(DiffbitError, match="the run has finished"):
        train(config, out, resume=True)


def test_accumulated_batches_equal_one_large_batch(text: str, tmp_path: Path) -> None:
    large = train(options(text, batch_size=8), tmp_path / "large")
    parts = train(options(text, batch_size=2, accumulate=4), tmp_path / "parts")
    assert parts.losses == pytest.approx(large.losses, rel=1e-5)
    assert parts.eval_loss == pytest.approx(large.eval_loss, rel=1e-5)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_two_processes_equal_one_with_the_doubled_batch(text: str, tmp_path: Path) -> None:
    plain = options(text, batch_size=8, accumulate=2, steps=4)
    taught = replace(plain, qat="int4_g16", steps=2, tokenizer=str(tmp_path / "one"), distill=str(tmp_path / "one"))
    one = [train(plain, tmp_path / "one"), train(taught, tmp_path / "one_taught")]

    def halves() -> None:
        for config, name in ((plain, "two"), (taught, "two_taught")):
            train(replace(config, batch_size=4), tmp_path / name)

    assert forks.together(2, halves) == [0, 0]
    for result, name, rel in zip(one, ("two", "two_taught"), (1e-5, 1e-4), strict=True):  # a code may flip
        log, before = read_log(tmp_path / name), read_log(result.path)
        assert [row["loss"] for row in log] == pytest.approx(result.losses, rel=rel)
        for key in ("grad_norm", "distill_loss"):
            assert [row.get(key, 0) for row in log] == pytest.approx([row.get(key, 0) for row in before], rel=10 * rel)
        assert log[-1]["eval_loss"] == pytest.approx(result.eval_loss, rel=rel)
        assert json.loads((tmp_path / name / "training.json").read_text())["processes"] == 2
    assert "distill_loss" in log[0]


def test_compiled_training_gives_the_same_losses(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def compile_(module: Any) -> Any:  # the compiler itself takes half a minute and is torch's to test
        compiled.append(module)
        return module

    monkeypatch.setattr(torch, "compile", compile_)
    plain = train(options(text, steps=2), tmp_path / "plain")
    assert train(options(text, steps=2, compile=True), tmp_path / "compiled").losses == plain.losses
    assert len(compiled) == 1


def test_vectors_are_not_decayed() -> None:
    decoder = Decoder(model())
    matrices, vectors = trainer_module.adamw(decoder, options("stdlib")).param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    names = {parameter: name for name, parameter in decoder.named_parameters()}
    assert len(matrices["params"]) + len(vectors["params"]) == len(names)
    assert {names[p].split(".")[-1] for p in vectors["params"]} == {
        "weight",
        "lambda_q1",
        "lambda_k1",
        "lambda_q2",
        "lambda_k2",
    }
    assert all("norm" in names[p] or "lambda_" in names[p] for p in vectors["params"])


def test_moments_of_eight_bits(text: str, tmp_path: Path) -> None:
    """The losses stay close to AdamW's; 2 bytes a parameter and 8 a block, and 8 a parameter of small tensors."""
    configs = [options(text, optimizer=name, steps=20, learning_rate=1e-2) for name in ("adamw", "adamw8bit")]
    plain, eight = (train(config, tmp_path / config.optimizer) for config in configs)
    assert eight.losses[1:] != plain.losses[1:] and eight.losses[-1] < 0.8 * eight.losses[0]
    assert eight.losses == pytest.approx(plain.losses, rel=0.03)
    assert json.loads((eight.path / "training.json").read_text())["config"]["optimizer"] == "adamw8bit"

    decoder = Decoder(model())
    optimizer = trainer_module.adamw(decoder, configs[1])
    decoder(torch.randint(288, (2, 16))).logsumexp(-1).sum().backward()
    optimizer.step()
    for parameter in decoder.parameters():
        state, count = optimizer.state[parameter], parameter.numel()
        nbytes = sum(value.nbytes for key, value in state.items() if key.startswith(("state", "absmax")))
        assert nbytes == (2 * count + 8 * -(-count // 256) if count >= 4096 else 8 * count)


@pytest.mark.gpu
def test_on_a_gpu(text: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    cpu = train(options(text), tmp_path / "cpu")
    gpu = train(options(text, device="cuda"), tmp_path / "gpu")
    assert gpu.losses == pytest.approx(cpu.losses, rel=2e-2)  # bf16


def test_bad_input_is_refused(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for changes, sentence in (
        ({"steps": 0}, "steps is 0, wanted a whole number from 1"),
        ({"length": 33}, "length is 33, wanted 2 to 32"),
        ({"warmup": 9}, "warmup is 9, wanted at most the 8 steps"),
        ({"learning_rate": float("nan")}, "learning_rate is nan, wanted a number above 0"),
        ({"weight_decay": -1.0}, "weight_decay is -1.0, wanted a number of at least 0"),
        ({"needles": 1.5}, r"needles is 1\.5, wanted a share"),
        ({"only": "*", "qat": "ternary"}, "only is '\\*', wanted none with qat"),
        ({"optimizer": "sgd"}, "optimizer is 'sgd', wanted one of adamw, adamw8bit"),
        ({"device": "tpu"}, "device is 'tpu', wanted one of auto, cpu, cuda"),
    ):
        with pytest.raises(DiffbitError, match=sentence):
            options(text, **changes)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DiffbitError, match="torch sees no CUDA GPU"):
        train(options(text, device="cuda"), tmp_path / "out")
    with pytest.raises(DiffbitError, match="too little text for a vocabulary of 50000 ids"):
        train(options(text, model=model(vocab_size=50000)), tmp_path / "large")
    with pytest.raises(DiffbitError, match="no such file or folder"):
        train(options(str(tmp_path / "absent.txt")), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    trained = train(options(text, steps=2), tmp_path / "out")
    with pytest.raises(DiffbitError, match="288 ids, more than the model's vocabulary of 280"):
        train(options(text, model=model(vocab_size=280), tokenizer=str(trained.path)), tmp_path / "small")
    with pytest.raises(DiffbitError, match="already exists and is not empty"):
        train(options(text), tmp_path / "out")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "bitsandbytes.optim", None)
        with pytest.raises(DiffbitError, match=r"optimizer adamw8bit needs bitsandbytes"):
            train(options(text, optimizer="adamw8bit"), tmp_path / "out", overwrite=True)
    assert load(tmp_path / "out").config.vocab_size == 288  # the earlier run is whole
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(DiffbitError, match=r"holds no log\.jsonl"):
        train(options(text), tmp_path / "mine", overwrite=True)
    assert (tmp_path / "mine" / "letter.txt").exists()
    monkeypatch.setattr(Decoder, "hidden", lambda self, ids: torch.full((*ids.shape, 32), math.nan).requires_grad_())
    with pytest.raises(DiffbitError, match="step 1: the loss is nan"):
        train(options(text), tmp_path / "nan")
