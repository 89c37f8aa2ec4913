"""Ternary checkpoints as Hugging Face's bitnet folders: read back by transformers' layers, and by ours to the bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import BitNetQuantConfig
from typer.testing import CliRunner

from diffbit import DiffbitError
from diffbit.cli.app import app
from diffbit.export import export_artifact, export_checkpoint
from diffbit.formats import QTensor, parse_format
from diffbit.models import Checkpoint
from diffbit.models.checkpoint.names import shapes
from diffbit.quantize import AttentionScheme, Scheme, load, quantize_checkpoint, read_weight
from diffbit.runtime import verify

from ..quantize.layouts.bitnet_folders import DIVIDING, MASTER, PACKED, theirs, write_folder
from .conftest import Maker
from .helpers import Runner, relative_error, write_tokenizer

TERNARY = parse_format("ternary")
BITNET = {"sub_norms": True, "mlp": "relu2", "num_heads": 4, "head_dim": 16}
PLAIN = {"num_heads": 4, "head_dim": 16}
PART = Scheme(weights=TERNARY, overrides=(("model.layers.1.mlp.*", None), ("*.k_proj", None)))


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    torch.compiler.set_stance("force_eager")
    with torch.no_grad():
        yield
    torch.compiler.set_stance("default")


def assert_same_weights(folder: Path, original: Path) -> None:
    ours, source = Checkpoint(folder), Checkpoint(original)
    assert ours.config == source.config
    for name in shapes(source.config):
        weight, exact = read_weight(ours, name), read_weight(source, name)
        if isinstance(exact, QTensor):
            assert isinstance(weight, QTensor)
            assert torch.equal(weight.codes, exact.codes) and torch.equal(weight.scale, exact.scale), name
        else:
            assert isinstance(weight, torch.Tensor) and weight.dtype == exact.dtype and torch.equal(weight, exact), name


@pytest.mark.parametrize(
    ("changes", "scheme"),
    [
        (BITNET, Scheme(weights=TERNARY)),
        (BITNET | {"tie_embeddings": True}, Scheme(weights=TERNARY)),
        (PLAIN, Scheme(weights=TERNARY)),
        (BITNET, PART),
    ],
    ids=["bitnet", "tied", "llama", "part"],
)
def test_a_ternary_checkpoint(
    checkpoint_of: Maker, changes: dict[str, object], scheme: Scheme, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = checkpoint_of("softmax", **changes)
    quantize_checkpoint(source, tmp_path / "q", scheme)
    monkeypatch.setattr(
        "diffbit.quantize.forecast.SHARD_FROM", 1 << 30 if scheme is PART else 0
    )  # theirs() reads a single file
    out = export_checkpoint(tmp_path / "q", tmp_path / "sharded", "bitnet")
    assert len(list(out.glob("*.safetensors"))) == (1 if scheme is PART else 4)
    monkeypatch.undo()
    out = export_checkpoint(tmp_path / "q", tmp_path / "hf", "bitnet")
    assert_same_weights(tmp_path / "sharded", tmp_path / "q")
    assert_same_weights(out, tmp_path / "q")
    settings = BitNetQuantConfig(**json.loads((out / "config.json").read_text())["quantization_config"])
    assert (settings.linear_class, settings.quantization_mode) == ("autobitlinear", "offline")
    assert (settings.modules_to_not_convert is None) == (scheme is not PART)
    stored = load_file(out / "model.safetensors")
    assert stored["model.layers.0.mlp.up_proj.weight"].shape == (32, 64)
    assert (out / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    ids = torch.randint(61, (4, 9), generator=torch.Generator().manual_seed(2))
    expected = theirs(out)(ids).logits
    error = (load(tmp_path / "q")(ids) - expected).abs().amax(-1) / expected.std(-1)
    assert error.median() < 1e-5 and error.max() < 0.1  # tests/quantize/test_bitnet_layout.py says why not less


@pytest.mark.parametrize("settings", [PACKED, DIVIDING, MASTER], ids=["packed", "dividing", "master"])
def test_a_bitnet_folder(settings: dict[str, str], tmp_path: Path) -> None:
    source = write_folder(tmp_path / "m", settings, dtype=torch.bfloat16)
    out = export_checkpoint(source, tmp_path / "hf", "bitnet")
    assert_same_weights(out, source)
    if settings == PACKED:
        stored, expected = load_file(out / "model.safetensors"), load_file(source / "model.safetensors")
        assert all(torch.equal(stored[name], tensor) for name, tensor in expected.items()) and len(stored) == len(
            expected
        )


@pytest.mark.parametrize("settings", [PACKED, DIVIDING, MASTER], ids=["packed", "dividing", "master"])
def test_an_artifact_computes_what_transformers_does(settings: dict[str, str], tmp_path: Path) -> None:
    """From the folder of theirs to ONNX Runtime: logits of prompts, and greedy tokens through the cache."""
    source = write_folder(tmp_path / "m", settings, tie_word_embeddings=True, vocab_size=61)
    write_tokenizer(source, 61)
    artifact = export_artifact(source, tmp_path / "onnx")
    assert verify(artifact).passed
    model, ids = theirs(source), torch.randint(61, (4, 9), generator=torch.Generator().manual_seed(2))
    logits_of_transformers = model(ids).logits
    run = Runner(artifact, Checkpoint(source).config)
    error = relative_error(run(ids.numpy(), np.ones((4, 9), np.int64)), logits_of_transformers)
    assert np.median(error) < 1e-5 and error.max() < 0.1
    expected, generated = ids[:1, :4].tolist()[0], ids[:1, :4].tolist()[0]
    logits = run(np.array([generated]), np.ones((1, 4), np.int64))
    for _ in range(24):
        expected.append(int(model(torch.tensor([expected])).logits[0, -1].argmax()))
        generated.append(int(logits[0, -1].argmax()))
        logits = run(np.array([generated[-1:]]), np.ones((1, len(generated)), np.int64))
    assert generated == expected


@pytest.mark.parametrize(
    ("attention", "changes", "scheme", "words"),
    [
        ("diff_v1", {}, Scheme(weights=TERNARY), "attention is diff_v1"),
        ("softmax", BITNET, None, "its weights are float"),
        ("softmax", BITNET, Scheme(attention=AttentionScheme(keys="int8")), "its weights are float"),
        ("softmax", BITNET, Scheme(weights=parse_format("int4_g32")), "q_proj is int4_g32"),
        ("softmax", BITNET, Scheme(weights=TERNARY, activations="int4"), "activations are int4"),
        (
            "softmax",
            BITNET,
            Scheme(weights=TERNARY, attention=AttentionScheme(keys="int8")),
            "attention is quantized",
        ),
        (
            "softmax",
            BITNET,
            Scheme(weights=TERNARY, overrides=(("lm_head", TERNARY),)),
            "its head or embedding is quantized",
        ),
        ("softmax", BITNET | {"intermediate_size": 126}, Scheme(weights=TERNARY), "gate_proj has 126 rows"),
        (
            "softmax",
            BITNET | {"head_dim": 32},
            Scheme(weights=TERNARY),
            "heads together is 128, and that of its hidden states 64",
        ),
    ],
)
def test_refused_with_a_sentence(
    checkpoint_of: Maker, attention: str, changes: dict[str, object], scheme: Scheme | None, words: str, tmp_path: Path
) -> None:
    source = checkpoint_of(attention, **changes)
    if scheme is not None:
        quantize_checkpoint(source, tmp_path / "q", scheme)
        source = tmp_path / "q"
    with pytest.raises(DiffbitError) as caught:
        export_checkpoint(source, tmp_path / "hf", "bitnet")
    message = str(caught.value)
    assert words in message and str(source) in message and "\n" not in message
    assert not (tmp_path / "hf").exists()


def test_from_the_command_line(checkpoint_of: Maker, tmp_path: Path) -> None:
    source = checkpoint_of("softmax", "ternary", **BITNET)
    arguments = ["export", str(source), "-o", str(tmp_path / "hf"), "--format"]
    done = CliRunner().invoke(app, [*arguments, "bitnet", "--json"])
    assert done.exit_code == 0, done.output
    sizes = json.loads(done.stdout)["files"]
    assert sizes["model.safetensors"]["bytes"] == (tmp_path / "hf" / "model.safetensors").stat().st_size
    for format, more, words in (
        ("bitnet", ["--dtype", "fp16"], "apply to --format bitnet"),
        ("bitnet", ["--context-length", "8"], "apply to --format bitnet"),
        ("bitnet", [], "already exists"),
    ):
        failed = CliRunner().invoke(app, [*arguments, format, *more])
        assert isinstance(failed.exception, DiffbitError) and words in str(failed.exception)
