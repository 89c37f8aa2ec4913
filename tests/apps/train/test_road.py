"""The road of a fine-tuned chat model: conversations, training, quantize, export, chat and serve.

Each step is the command that one types; what the model answers at the end is what it was taught.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from starlette.testclient import TestClient

from diffbit.apps.serve.openai_requests import Served
from diffbit.apps.serve.server import Server
from diffbit.apps.train.answers import learned_tokens
from diffbit.apps.train.data import TrainingRows
from diffbit.calib_data import load_text, load_tokenizer, stream
from diffbit.cli.app import main
from diffbit.cli.options import chat_template
from diffbit.models import Checkpoint, load
from diffbit.runtime import Artifact, SessionOptions

ANSWER = "The answer is a list."
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def start(trained: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with a chat template, whose answers end with another token than a text begins with."""
    folder = tmp_path_factory.mktemp("road") / "start"
    shutil.copytree(trained("softmax"), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    for name, changes in {
        "config.json": {"bos_token_id": 5},
        "tokenizer_config.json": {"bos_token": "$"},
        "generation_config.json": {"bos_token_id": 5, "eos_token_id": [0, 7], "do_sample": False},
    }.items():
        file = folder / name
        values = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(values | changes))
    return folder


@pytest.fixture(scope="module")
def conversations(start: Path) -> Path:
    file = start.parent / "chats.jsonl"
    rows = [
        [{"role": "user", "content": f"What is number {number}?"}, {"role": "assistant", "content": ANSWER}]
        for number in range(120)
    ]
    file.write_text("".join(json.dumps({"conversations": row}) + "\n" for row in rows))
    return file


def diffbit(*arguments: object) -> None:
    with pytest.raises(SystemExit) as end:
        main([*map(str, arguments), "--quiet"])
    assert end.value.code == 0


def tune(start: Path, conversations: Path, out: Path, *options: object) -> None:
    data = ("--data", conversations, "--field", "conversations", "--context", 48, "--batch-size", 8)
    diffbit("train", "--init", start, *data, "--steps", 40, "--learning-rate", 5e-3, *options, "-o", out)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("--lora", 8), id="lora"),
        pytest.param((), id="float", marks=pytest.mark.slow),
        pytest.param(("--lora", 8, "--qat", "int4_g32"), id="qat-lora", marks=pytest.mark.slow),
    ],
)
def test_from_conversations_to_an_answer(
    options: tuple[object, ...],
    start: Path,
    conversations: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    tuned, artifact = tmp_path / "tuned", tmp_path / "artifact"
    tune(start, conversations, tuned, *options)
    for name in ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tuned / name).read_bytes() == (start / name).read_bytes()
    model = Checkpoint(tuned).config
    assert (model.bos_token_id, model.eos_token_ids, model.max_position) == (5, (0, 7), 256)
    if "--qat" not in options:
        diffbit("quantize", tuned, "--weights", "int8", "-o", tmp_path / "quantized")
        tuned = tmp_path / "quantized"
    diffbit("export", tuned, "-o", artifact)

    monkeypatch.setattr(sys, "stdin", io.StringIO("What is number 500?\n"))
    capfd.readouterr()
    diffbit("chat", artifact)
    assert capfd.readouterr().out.strip() == ANSWER

    served = Served(Artifact.open(artifact), SessionOptions(threads=1), rows=1, queue=1)
    with TestClient(Server([served], hosts=["testserver"]).application()) as client:
        messages = [{"role": "user", "content": "What is number 7?"}]
        reply = client.post("/v1/chat/completions", json={"model": "artifact", "messages": messages}).json()
    assert reply["choices"][0]["message"]["content"] == ANSWER
    assert reply["choices"][0]["finish_reason"] == "stop"


def test_the_adapter_makes_the_same_model_of_its_base(start: Path, conversations: Path, tmp_path: Path) -> None:
    tune(start, conversations, tmp_path / "tuned", "--lora", 4, "--steps", 2)
    diffbit(
        "convert", start, "--adapter", tmp_path / "tuned" / "adapter", "--dtype", "float32", "-o", tmp_path / "merged"
    )
    one, other = (Checkpoint(tmp_path / name) for name in ("tuned", "merged"))
    assert one.config == other.config and one.tokenizer_files == other.tokenizer_files
    for name in one.names:
        assert (one.read(name) - other.read(name)).abs().max() < 1e-6


def test_the_logged_loss_is_that_of_the_answers(start: Path, conversations: Path, tmp_path: Path) -> None:
    """The first step's loss and the norm of its gradient, before the update, and the loss on held-out text, beside
    torch's cross entropy over the tokens of answers."""
    options = ("--field", "conversations", "--context", 48, "--batch-size", 4, "--steps", 1, "--seed", 2)
    options += ("--precision", "fp32")
    diffbit("train", "--init", start, "--data", conversations, *options, "-o", tmp_path / "out")
    row = json.loads((tmp_path / "out" / "log.jsonl").read_text().splitlines()[0])

    render, tokenizer = chat_template(start), load_tokenizer(start)
    documents = load_text(str(conversations), "train", field="conversations", render=render).documents
    tokens, _ = stream(tokenizer.encode(documents), tokenizer.eos_id)
    learned = learned_tokens(documents, tokenizer, render)
    assert 0.05 < learned.mean() < 0.8
    rows = TrainingRows(tokens, 48, seed=2, learned=learned)
    ids, counted = torch.from_numpy(rows.take(0, 4)[0]), torch.from_numpy(rows.counted(0, 4))[:, 1:]
    model = load(start).float()
    losses = F.cross_entropy(model(ids[:, :-1]).transpose(1, 2), ids[:, 1:], reduction="none")
    losses[counted].mean().backward()
    norm = float(torch.cat([part.grad.flatten() for part in model.parameters() if part.grad is not None]).norm())
    assert row["loss"] == pytest.approx(losses[counted].mean().item(), rel=1e-5)
    assert row["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert abs(losses.mean().item() - row["loss"]) > 0.01

    held_out = load_text(str(conversations), "eval", field="conversations", render=render).documents
    tokens, _ = stream(tokenizer.encode(held_out), tokenizer.eos_id)
    learned = learned_tokens(held_out, tokenizer, render)
    model, total, count = load(tmp_path / "out"), 0.0, 0
    for begin in range(0, len(tokens), 48):  # windows, whose first token is not predicted
        ids, flags = torch.from_numpy(tokens[None, begin : begin + 48]), learned[begin + 1 : begin + 48]
        with torch.no_grad():
            losses = F.cross_entropy(model(ids[:, :-1])[0], ids[0, 1:], reduction="none")
        total, count = total + float(losses[torch.from_numpy(flags)].sum()), count + int(flags.sum())
    assert row["eval_loss"] == pytest.approx(total / count, rel=1e-5)
