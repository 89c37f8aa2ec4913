"""Pretrained models as mixtures of heads: against the original with heads set to 0 one by one, and the whole way."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from torch import Tensor

import diffbit
from diffbit import models
from diffbit.apps.convert.mixture import importance
from diffbit.calib_data import windows
from diffbit.cli.app import main
from diffbit.export import export_artifact, reference_model
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.models import Checkpoint, Decoder, ModelConfig
from diffbit.models.mixers import mamba
from diffbit.quantize import Scheme, quantize_checkpoint
from diffbit.runtime import Session, verify

from ...configs import resized
from ...export.helpers import by_range
from ...models.helpers import tokens

CONFIG = ModelConfig.uniform(
    vocab_size=61, hidden_size=32, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=8, intermediate_size=48,
    max_position=64,
)  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"attention": "softmax", "qkv_bias": True},
    "plain, norms of queries": {"attention": "softmax", "qk_norm_eps": 1e-5},
    "version 1": {"attention": "diff_v1", "noise_ratio": 2},
    "version 2": {"attention": "diff_v2", "lambda_bias": True},
    "version 2, shared noise": {"attention": "diff_v2", "noise_ratio": 2, "sliding_window": 5},
}


def write(folder: Path, **changes: Any) -> Path:
    """A random model whose norms and biases are random, too."""
    torch.manual_seed(1)
    decoder = Decoder(resized(CONFIG, **changes))
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.mul_(8) if parameter.dim() == 2 else parameter.add_(0.3 * torch.randn_like(parameter))
    models.save(decoder, folder)
    return folder


def head_by_head(decoder: Decoder, shared: set[int], routed: int) -> None:
    """Set the heads of a model without gates to 0 that are neither shared nor among the `routed` others with the
    longest signal queries, token by token."""
    for layer in decoder.model.layers:
        attention: Any = layer.self_attn
        ratio = getattr(attention, "noise_ratio", 0)
        rows: list[Tensor] = []
        attention.q_proj.register_forward_hook(lambda module, x, out, rows=rows: rows.append(out))

        def off(module: Any, inputs: Any, attention: Any = attention, ratio: int = ratio, rows: Any = rows) -> Any:
            queries, heads = rows.pop(), inputs[0].clone()
            queries = queries.unflatten(-1, (-1, attention.head_dim))
            count = attention.num_heads
            width = heads.shape[-1] // count
            for b in range(heads.shape[0]):
                for s in range(heads.shape[1]):
                    length = {
                        head: float(queries[b, s, head // ratio * (ratio + 1) + head % ratio if ratio else head].norm())
                        for head in set(range(count)) - shared
                    }
                    for head in sorted(length, key=lambda head: length[head])[: len(length) - routed]:
                        heads[b, s, head * width : (head + 1) * width] = 0
            return (heads,)

        attention.attn_sub_norm.register_forward_pre_hook(off)


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
def test_a_mixture_is_the_model_with_heads_set_to_0(kind: str, tmp_path: Path) -> None:
    source = write(tmp_path / "source", **KINDS[kind])
    original, ids = models.load(source), tokens(2, 13)
    path = diffbit.convert(source, tmp_path / "mixture", to="moh", heads=0.75)
    mixture = models.load(path)
    mixer: Any = mixture.config.layers[1].mixer
    assert (mixer.name, mixer.shared_heads, mixer.top_k) == (
        {"softmax": "moh"}.get(KINDS[kind]["attention"], f"moh_{KINDS[kind]['attention']}"), 4, 2,
    )  # fmt: skip
    before, after = Checkpoint(source), Checkpoint(path)
    assert before.names == after.names
    assert all(torch.equal(before.read(name), after.read(name)) for name in before.names)
    everything = models.load(diffbit.convert(source, tmp_path / "all", to="moh", heads=1))
    assert torch.equal(everything(ids), original(ids))
    logits = mixture(ids)
    assert (logits - original(ids)).abs().max() > 0.1
    head_by_head(original, set(range(4)), 2)
    torch.testing.assert_close(logits, original(ids), rtol=0, atol=1e-5)


@torch.no_grad()
def test_shared_heads_are_the_most_important_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Importance against differences of the loss when the gate of one head and token moves a little, in float64."""
    source = write(tmp_path / "source", attention="diff_v2")
    text = windows([np.array(tokens(1, 11)[0])], 6, eos_id=0)
    assert text.ids.shape == (3, 6) and not text.mask.all()  # the last window is padded
    found = importance(Checkpoint(source), text)
    decoder, moved = models.load(source).double(), dict[str, Any]()
    for index, layer in enumerate(decoder.model.layers):

        def move(module: Any, inputs: Any, index: int = index) -> Any:
            heads = inputs[0].clone()
            if moved.get("layer") == index:
                heads.unflatten(-1, (8, -1))[0, moved["token"], moved["head"]] *= moved["by"]
            return (heads,)

        module: Any = layer
        module.self_attn.attn_sub_norm.register_forward_pre_hook(move)

    def loss(row: Tensor) -> float:
        logits = decoder(row[None])[0, :-1].log_softmax(-1)
        return -float(logits[torch.arange(len(row) - 1), row[1:]].sum())

    expected = {index: torch.zeros(8, dtype=torch.float64) for index in found}
    for row, mask in zip(torch.from_numpy(text.ids), torch.from_numpy(text.mask), strict=True):
        for index in found:
            for head in range(8):
                for token in range(int(mask.sum())):
                    place = {"layer": index, "head": head, "token": token}
                    moved.update(place, by=1 + 1e-4)
                    more = loss(row[mask])
                    moved.update(place, by=1 - 1e-4)
                    expected[index][head] += abs(more - loss(row[mask])) / 2e-4 / int(text.mask.sum())
    for index, scores in found.items():
        torch.testing.assert_close(scores, expected[index], rtol=5e-3, atol=1e-3)

    monkeypatch.setattr("diffbit.apps.convert.mixture._text", lambda *_: text)
    mixture = Checkpoint(diffbit.convert(source, tmp_path / "moh", to="moh", heads=0.5, choose="importance")).config
    for index, layer in enumerate(mixture.layers):
        mixer: Any = layer.mixer
        best = sorted(range(8), key=lambda head: -float(expected[index][head]))[:3]
        assert mixer.shared == tuple(sorted(best)) and (mixer.shared_heads, mixer.top_k) == (3, 1)


@pytest.mark.parametrize("name", ["softmax", "diff_v2"])
def test_the_whole_way_to_the_device(name: str, trained: Callable[[str], Path], tmp_path: Path) -> None:
    path = tmp_path / "mixture"
    options = ("--to", "moh", "--heads", "0.5", "--shared", "0.25", "--choose", "importance", "--quiet")
    assert run("convert", trained(name), "-o", path, *options) == 0
    quantize_checkpoint(path, tmp_path / "int4", Scheme(weights=parse_format("int4_g32")), method=by_range)
    assert verify(export_artifact(tmp_path / "int4", tmp_path / "int4-onnx")).passed
    artifact = export_artifact(path, tmp_path / "onnx")
    assert verify(artifact).passed
    nodes = [node for node in onnx.load(artifact / "model.onnx", load_external_data=False).graph.node]
    attentions = [node for node in nodes if node.op_type.startswith("DiffAttention")]
    assert len(attentions) == 2 and all(len(node.input) == 16 and node.input[15] for node in attentions)  # gates
    ids = tokens(1, 20) % 900 + 3
    with torch.inference_mode():
        expected = reference_model(path)(ids)[0].numpy()
    for native in (True, False):
        logits = Session(artifact, native=native).prefill(ids.numpy(), all_positions=True)[0]
        assert abs(logits - expected).max() < 1e-4 * expected.std()


def test_training_goes_on_from_a_mixture(trained: Callable[[str], Path], tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("def add(a, b):\n    return a + b\n\n\nprint(add(1, 2))\n" * 200)
    path = diffbit.convert(trained("softmax"), tmp_path / "mixture", to="moh")
    options = ("--data", text, "--steps", "8", "--context", "32", "--batch-size", "4", "--device", "cpu", "--quiet")
    assert run("train", "--init", path, *options, "-o", tmp_path / "tuned") == 0
    rows = [json.loads(line) for line in (tmp_path / "tuned" / "log.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "auxiliary_loss" in row]
    assert len(steps) == 8 and steps[-1]["loss"] < steps[0]["loss"]
    assert Checkpoint(tmp_path / "tuned").config.layers == Checkpoint(path).config.layers


def run(*arguments: str | Path) -> int:
    with pytest.raises(SystemExit) as stopped:
        main(list(map(str, arguments)))
    return int(stopped.value.code or 0)


def test_command(trained: Callable[[str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("convert", trained("diff_v1"), "--to", "moh", "-o", tmp_path / "moh", "--json", "--quiet") == 0
    output = json.loads(capsys.readouterr().out)
    assert output["before"]["attention"] == "diff_v1" and output["after"]["attention"] == "moh_diff_v1"
    assert output["after"]["parameters"] == output["before"]["parameters"]
    for options, says in {
        ("--to", "moh", "--start", "copy"): "start is an option of diff_v2, not of moh",
        ("--heads", "0.5"): "heads is an option of moh, not of diff_v2",
        ("--to", "moh", "--heads", "1.5"): "heads is 1.5, wanted a share of the heads, above 0 and at most 1",
        ("--to", "moh", "--heads", "nan"): "heads is nan, wanted a share",
        ("--to", "moh", "--heads", "0.5", "--shared", "0.5"): "has 2 heads, of which 1 would be on and 1 shared",
        ("--to", "moh", "--heads", "0.1"): "has 2 heads, of which 0 would be on and 0 shared",
        ("--to", "moh", "--calibrate", "mix"): "calibrate is a text to choose heads by importance",
    }.items():
        assert run("convert", trained("diff_v1"), *options, "-o", tmp_path / "bad") == 2, options
        error = capsys.readouterr().err
        assert says in error and error.count("\n") == 1, error
        assert not (tmp_path / "bad").exists()


def test_what_has_no_heads_to_mix(tmp_path: Path) -> None:
    mixture = diffbit.convert(write(tmp_path / "plain"), tmp_path / "moh", to="moh")
    with pytest.raises(DiffbitError, match=r"layer 0 is a mixture of heads already \(moh\)"):
        diffbit.convert(mixture, tmp_path / "out", to="moh")
    with pytest.raises(DiffbitError, match="to is 'moe', wanted one of diff_v2, moh"):
        diffbit.convert(mixture, tmp_path / "out", to="moe")
    attention = CONFIG.layers[0]
    other = replace(attention, mixer=mamba.Options(32, 4, 3, 2))
    models.save(Decoder(replace(CONFIG, layers=(other,))), tmp_path / "mamba")
    with pytest.raises(DiffbitError, match="no layer is attention"):
        diffbit.convert(tmp_path / "mamba", tmp_path / "out", to="moh")
    models.save(Decoder(replace(CONFIG, layers=(attention, other))), tmp_path / "hybrid")
    config = Checkpoint(diffbit.convert(tmp_path / "hybrid", tmp_path / "out", to="moh")).config
    assert [layer.mixer.name for layer in config.layers] == ["moh", "mamba"]
    write(tmp_path / "alibi", attention="alibi")
    with pytest.raises(DiffbitError, match="layer 0 has the attention alibi, of which there is no mixture of heads"):
        diffbit.convert(tmp_path / "alibi", tmp_path / "out2", to="moh")
