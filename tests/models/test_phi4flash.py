"""Phi-4-mini-flash folders against the plain-torch model: loaded, quantized, interrupted, exported, run."""

from __future__ import annotations

import io
import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor

from diffbit import DiffbitError, models
from diffbit.apps.evaluate.cost import token_cost
from diffbit.cli.app import main
from diffbit.export import export_artifact, reference_model
from diffbit.formats import parse_format
from diffbit.models import Checkpoint, KVCache, ModelConfig
from diffbit.models.families import read_config
from diffbit.quantize import AttentionScheme, Scheme, load, quantize_checkpoint
from diffbit.quantize.calibration import Passes, Tokens
from diffbit.quantize.layerwise import apply
from diffbit.quantize.methods import awq, gptq, rotate, rotate_heads
from diffbit.runtime import Artifact, Session, verify

from ..export.helpers import write_tokenizer
from ..quantize.transforms import layers, logits64, transformed
from . import phi4flash as phi

VOCABULARY, LENGTH = phi.PHI["vocab_size"], 45  # more than four windows
IDS = torch.randint(0, VOCABULARY, (LENGTH,), generator=torch.Generator().manual_seed(1))
TEXT = torch.randint(0, VOCABULARY, (6, 32), generator=torch.Generator().manual_seed(2))
INT4, INT8 = parse_format("int4_g32"), parse_format("int8")
KV8 = AttentionScheme(keys="int8", values="int8")
WIDE = phi.PHI | {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 4}  # heads 32 wide, for int4


def write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in phi.weights(config).items()}, folder / "model.safetensors")
    write_tokenizer(folder, config["vocab_size"])
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("phi") / "float", phi.PHI)


@pytest.fixture(scope="module")
def expected_logits() -> Tensor:
    return phi.logits(phi.PHI, phi.weights(phi.PHI), IDS)


def off(logits: Any, expected: Tensor) -> float:
    """The largest error, in standard deviations of what is expected."""
    return float((torch.as_tensor(logits) - expected).abs().max() / expected.std())


def padded(short: int, long: int) -> tuple[Tensor, Tensor]:
    """IDS[:short] with padding in front, IDS[:long]; and the mask."""
    ids, mask = torch.zeros(2, long, dtype=torch.long), torch.ones(2, long, dtype=torch.long)
    ids[0, long - short :], ids[1], mask[0, : long - short] = IDS[:short], IDS[:long], 0
    return ids, mask


def test_torch_computes_it(folder: Path, expected_logits: Tensor) -> None:
    """All at once, a prompt and then tokens one by one, a batch with padding."""
    model = models.load(folder).eval()
    with torch.inference_mode():
        assert off(model(IDS[None])[0], expected_logits) < 1e-4
        cache = KVCache(model.config, 1, LENGTH)
        parts = [model(part[None], cache=cache)[0] for part in (IDS[:7], *IDS[7:].split(1))]
        assert off(torch.cat(parts), expected_logits) < 1e-4
        ids, mask = padded(40, LENGTH)
        logits = model(ids, attention_mask=mask)
        assert off(logits[0, LENGTH - 40 :], expected_logits[:40]) < 1e-4 and off(logits[1], expected_logits) < 1e-4
    assert model.config.attention == "mamba, diff_v1, gmu"
    assert read_config(phi.PHI) == ModelConfig.from_dict(model.config.to_dict()) == model.config


def test_a_part_of_a_fused_tensor_is_read_alone(folder: Path) -> None:
    checkpoint, stored = Checkpoint(folder), phi.weights(phi.PHI)
    fused = stored["model.layers.1.attn.Wqkv.weight"]
    for name, rows in (("q", fused[:64]), ("k", fused[64:96]), ("v", fused[96:])):
        entry = checkpoint._entries[f"model.layers.1.self_attn.{name}_proj.weight"]
        assert entry.end - entry.begin == rows.nbytes and torch.equal(entry.read(), rows)
    up = checkpoint.read("model.layers.6.mlp.up_proj.weight")
    assert torch.equal(up, stored["model.layers.6.mlp.fc1.weight"][96:])


REFUSED = {
    "hidden_act": ("gelu", "hidden_act is 'gelu', wanted 'silu'"),
    "mb_per_layer": (1, "mb_per_layer is 1, wanted 2"),
    "rope_scaling": ({"type": "yarn"}, "rope_scaling is {'type': 'yarn'}, wanted None"),
    "mamba_proj_bias": (True, "mamba_proj_bias is True, wanted False"),
    "num_hidden_layers": (6, "num_hidden_layers is 6, wanted a multiple of 4"),
    "num_key_value_heads": (3, "num_key_value_heads is 3, wanted an even number"),
    "sliding_window": ([None, 10] * 4, "sliding_window is set for other layers than the odd ones of the first half"),
    "head_dim": (16, "hidden_size is 64, num_attention_heads 8 and head_dim 16, wanted head_dim"),
    "mamba_expand": (1, r"tensor model.layers.0.attn.A_log has shape \(128, 16\), wanted \(64, 16\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_config_may_not_say(folder: Path, tmp_path: Path, name: str) -> None:
    value, message = REFUSED[name]
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(phi.PHI | {name: value}))
    with pytest.raises(DiffbitError, match=message.replace("{", r"\{").replace("}", r"\}")):
        Checkpoint(tmp_path)


def test_the_window_as_transformers_writes_it() -> None:
    windows = [None, 10, None, 10, None, None, None, None]
    assert read_config(phi.PHI | {"sliding_window": windows}) == read_config(phi.PHI)
    assert models.num_parameters(read_config(PUBLISHED)) + 16 * 128 == 3_852_562_944  # with the head norms
    assert [type(layer.mixer).__module__.rpartition(".")[2] for layer in read_config(PUBLISHED).layers[14:20]] == [
        "mamba", "diff_v1", "mamba", "diff_v1", "gmu", "diff_v1",
    ]  # fmt: skip


PUBLISHED = phi.PHI | {
    "hidden_size": 2560, "num_hidden_layers": 32, "num_attention_heads": 40, "num_key_value_heads": 20,
    "intermediate_size": 10240, "vocab_size": 200064, "sliding_window": 512, "max_position_embeddings": 262144,
}  # fmt: skip


def both_ways(artifact: Path, expected: Tensor, both: Tensor | None, most: float) -> None:
    """With the library and without it: a prompt and tokens, a prompt in parts, a batch with padding and its tokens.

    expected [LENGTH, V]; both [2, LENGTH, V], of padded(40, LENGTH), or None: no batch (rows of unequal length share no
    blocks of a low-bit cache).
    """
    for native in (False, True):
        session = Session(artifact, native=native)
        parts = [session.prefill(IDS[None, :7].numpy(), all_positions=True)[0]]
        parts += [session.step(IDS[None, i : i + 1].numpy()) for i in range(7, LENGTH)]
        assert off(np.concatenate(parts), expected) < most, native
        session.reset()
        for start, stop in ((0, 20), (20, LENGTH)):
            assert off(session.prefill(IDS[None, start:stop].numpy())[0], expected[stop - 1]) < most, native
        if both is None:
            continue
        session.reset()
        ids, mask = padded(35, 40)
        last = session.prefill(ids.numpy(), mask.numpy())
        for i in range(5):
            assert off(last, both[:, 39 + i]) < most, (native, i)
            last = session.step([[IDS[35 + i]], [IDS[40 + i]]])


def test_an_artifact_computes_it(folder: Path, tmp_path: Path, expected_logits: Tensor) -> None:
    artifact = export_artifact(folder, tmp_path / "onnx")
    both_ways(
        artifact,
        expected_logits,
        torch.stack([torch.cat([expected_logits[:5], expected_logits[:40]]), expected_logits]),
        1e-4,
    )
    assert verify(artifact).passed
    graph = onnx.load(artifact / "model.onnx", load_external_data=False).graph
    slices = {node.output[0] for node in graph.node if "logits_from" in node.input}
    first = next(node for node in graph.node if node.name.startswith("layers.6."))  # behind the last cache
    assert len(slices) == 4 and slices.issuperset(first.input[:2])  # beside them positions and the memory
    spec = Artifact.open(artifact).cache
    assert [tuple(buffer.name for buffer in layer) for layer in spec.layers] == [
        *(("conv", "scan"), ("key", "value")) * 3, (), (),
    ]  # fmt: skip
    assert spec.nbytes(0) < spec.nbytes(64) - 64 * 2 * 4 * 8 * 4 + 1 and not spec.layers[1][0].grows


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "kv", "most"), [("rtn", "int8", 0.15), ("gptq", "int8", 0.15), ("rtn", "int4", 0.3)]
)
def test_quantized(tmp_path: Path, folder: Path, method: str, kv: str, most: float) -> None:
    """Layer by layer as in memory, to the bit; the artifact as torch, but for codes that fall on the other side."""
    source = folder if kv == "int8" else write(tmp_path / "wide", WIDE)
    scheme = Scheme(INT4, INT8, INT8, attention=AttentionScheme(keys=kv, values=kv, window=0))
    text = None if method == "rtn" else TEXT
    quantize_checkpoint(source, tmp_path / "quantized", scheme, method=method, calibration=text)
    with torch.inference_mode():
        streamed, whole = load(tmp_path / "quantized"), apply(models.load(source), scheme, method, text)
        assert torch.equal(streamed(IDS[None]), whole(IDS[None]))
        model, (ids, mask) = reference_model(tmp_path / "quantized"), padded(40, LENGTH)
        expected, both = model(IDS[None])[0], None if kv == "int4" else model(ids, attention_mask=mask)
    artifact = export_artifact(tmp_path / "quantized", tmp_path / "onnx")
    both_ways(artifact, expected, both, most)
    assert verify(artifact).passed


@pytest.mark.slow
def test_every_command(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """From the published layout to a conversation, as research/phi4flash says."""
    model, low, artifact = (tmp_path / name for name in ("model", "int4", "onnx"))
    shutil.copytree(folder, model)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    monkeypatch.setattr(sys, "stdin", io.StringIO("w1 w2\nw3\n"))
    tokenizer = tokenizers.Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(model / "tokenizer.json"))
    (tmp_path / "text.txt").write_text("w1 w2 w3 w4 w5 w6 w7 w8 " * 600)
    text = ("--data", tmp_path / "text.txt", "--max-windows", 3, "--length", 40)

    def run(*arguments: object) -> Any:
        with pytest.raises(SystemExit) as stopped:
            main([*map(str, arguments), "--json", "-q"])
        printed = capfd.readouterr()
        assert stopped.value.code == 0, printed.err
        return json.loads(printed.out if arguments[0] != "chat" else f"[{','.join(printed.out.splitlines())}]")

    assert run("plan", model, "--weights", "int4_g32", "--kv", "int8")["steps"].keys() == {"quantize", "export"}
    run("quantize", model, "--weights", "int4_g32", "--kv", "int8", "-o", low)
    run("export", low, "-o", artifact)
    assert run("verify", artifact, "--checkpoint", low, *text)["passed"]
    assert run("run", artifact, "w1 w2", "--max-tokens", 5)["prompt_tokens"] > 0
    assert len(run("chat", artifact, "-n", 4)) == 2
    assert run("bench", artifact, "--prompt-tokens", 8, "--new-tokens", 4, "--repeats", 1)[0]["decode_tokens_per_s"] > 0
    comparison = run("compare", model, "--bits", "16,4", *text, "--artifact", artifact)
    assert {"none", "weights", "artifact"} <= {row["what"] for row in comparison["results"]}
    assert run("outliers", model, low, *text)


def test_carried_values_are_freed_after_their_last_reader(folder: Path) -> None:
    tokens = Tokens(read_config(phi.PHI), TEXT, compared_windows=2)
    decoder, seen = models.load(folder), []
    for layer in layers(decoder):
        Passes(layer, tokens).advance({})
        seen.append((sorted(tokens.carried), sorted(tokens.exact.carried)))
    carried = [[]] * 5 + [[4], [4, 5], [5], [], []]  # behind the embedding, behind layer 0, ...
    assert seen == [(indexes, indexes) for indexes in carried]
    with torch.inference_mode():
        torch.testing.assert_close(decoder.head(tokens.hidden), decoder(TEXT))


@pytest.mark.slow
def test_an_interrupted_run_goes_on(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between the layers that give and those that read."""
    scheme, exact = Scheme(INT4, attention=KV8), gptq.quantize
    whole = quantize_checkpoint(folder, tmp_path / "whole", scheme, method="gptq", calibration=TEXT)
    stop = next(i for i, row in enumerate(whole.weights) if ".layers.6." in row.name)
    calls = iter(range(1000))

    def failing(*arguments: Any) -> Any:
        if next(calls) == stop:
            raise KeyboardInterrupt
        return exact(*arguments)

    method = gptq.METHOD
    monkeypatch.setattr(gptq, "METHOD", replace(method, round=failing))
    with pytest.raises(KeyboardInterrupt):
        quantize_checkpoint(folder, tmp_path / "half", scheme, method="gptq", calibration=TEXT)
    monkeypatch.setattr(gptq, "METHOD", method)
    report = quantize_checkpoint(folder, tmp_path / "half", scheme, method="gptq", calibration=TEXT, resume=True)
    assert report.to_dict() == whole.to_dict()
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "half" / file.name).read_bytes(), file.name


@pytest.mark.parametrize("method", [rotate, rotate_heads, awq])
def test_methods_that_run_before_rounding_change_nothing(folder: Path, method: ModuleType) -> None:
    """LayerNorms and their biases included; layers that share keys and values keep them."""
    decoder = models.load(folder, dtype=torch.float64)
    model = transformed(decoder, method, Scheme(INT4), TEXT)
    assert off(logits64(model, IDS[None]), logits64(decoder, IDS[None])) < (1e-6 if method is awq else 1e-5)
    moved = {name for name, weight in decoder.state_dict().items() if not torch.equal(weight, model.state_dict()[name])}
    assert moved
    if method is rotate_heads:
        assert {name.split(".")[2] for name in moved} == {"1", "3"}


def test_methods_say_what_they_leave(folder: Path, tmp_path: Path) -> None:
    report = quantize_checkpoint(folder, tmp_path / "made", Scheme(INT4), method="rotate_heads+rtn")
    assert any("layers 0, 2, 4, 5, 6, 7 are not rotated" in warning for warning in report.warnings)


def test_awq_with_a_quantized_embedding(folder: Path, tmp_path: Path) -> None:
    report = quantize_checkpoint(folder, tmp_path / "made", Scheme(INT4, INT8, INT8), method="awq", calibration=TEXT)
    assert report.weights[0].name == "model.embed_tokens"


def test_a_step_reads_the_shared_cache_with_every_reader() -> None:
    """At 32k tokens: one layer's keys and values, which eight layers read, eight windows, nine states."""
    config = read_config(PUBLISHED)
    token, ring, states = 2 * 1280 * 4, 512, 9 * 5120 * (16 + 3) * 4 * 2
    cache_bytes = token_cost(config, None, 32768, "float32").cache_bytes
    assert cache_bytes == pytest.approx(token * (8 * 32768 + 1 + 8 * (ring + 1)) + states, rel=1e-6)


def test_layers_that_do_not_fit_together() -> None:
    config = read_config(phi.PHI)
    reader, giver = config.layers[7], config.layers[0]
    for layers_, message in (
        ((reader,) * 6, "layer 0 reads from layer 5, wanted an earlier layer"),
        ((giver,) * 7 + (reader,), r"layer 7 \(diff_v1\) reads .* from layer 5 \(mamba\), which provides"),
        ((*config.layers[:5], config.layers[1], reader), r"which provides \(\)"),  # a window has not all keys
    ):
        with pytest.raises(DiffbitError, match=message):
            ModelConfig(vocab_size=9, hidden_size=64, layers=layers_)
