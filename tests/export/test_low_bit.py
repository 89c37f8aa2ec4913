"""Low-bit attention in an artifact: torch's numbers under the same scheme, for all variants, by kernel and by body."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import cycle, product
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from diffbit import DiffbitError, runtime
from diffbit.cli.app import app
from diffbit.export import export_artifact, reference_model
from diffbit.formats import parse_format
from diffbit.ops.cache import Buffer
from diffbit.ops.kv_cache import quantized_tokens
from diffbit.quantize import AttentionScheme, Scheme, load, quantize_checkpoint, read_scheme

from .conftest import Maker
from .helpers import VARIANTS, config_of, graph_of, relative_error, write_model

LENGTH = 128
CONFIG = {"max_position": LENGTH, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
KV8 = AttentionScheme(keys="int8", values="int8")
KV4 = AttentionScheme(keys="int4", values="int4")
SCHEMES = {
    "fp16": AttentionScheme(keys="fp16", values="fp16"),
    "int8": KV8,
    "int4": KV4,
    "int3": AttentionScheme(keys="int3", values="int3", first=0),
    "int2": AttentionScheme(keys="int2", values="int2", window=7, first=16),
    "int8-qk8": replace(KV8, qk="int8"),
    "int4-qk8": replace(KV4, qk="int8"),
    "qk4": AttentionScheme(qk="int4"),
    "keys8-values4": AttentionScheme(keys="int8", values="int4"),
    "everything": replace(KV4, qk="int4", window=0),
    "mixed": AttentionScheme(keys="int3", values="int2", window=7, layers=((1, "int8", "fp16"),)),
    "one-layer": AttentionScheme(qk="int8", window=7, layers=((1, "int4", "int3"),)),
}
# A last-bit difference moves a code to its neighbour now and then, and the tokens that see it with it. The head norm of
# diff_v1 enlarges it: below 8 bits, torch in float64 differs from torch in float32 by 1.3e-3
USUAL, USUAL_OF_V1, WORST = 2e-4, 2e-3, 0.3  # of the median place, of any
variants = pytest.mark.parametrize("attention", VARIANTS)


@pytest.fixture(scope="module")
def quantized_of(checkpoint_of: Maker, tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """quantized_of("diff_v1", scheme): a checkpoint whose weights are float and whose attention is not."""
    folder = tmp_path_factory.mktemp("low")
    folders: dict[tuple[str, AttentionScheme], Path] = {}

    def make(attention: str, scheme: AttentionScheme) -> Path:
        key = attention, scheme
        if key not in folders and scheme == AttentionScheme():
            folders[key] = checkpoint_of(attention, **CONFIG)
        elif key not in folders:
            folders[key] = folder / f"q{len(folders)}"
            quantize_checkpoint(checkpoint_of(attention, **CONFIG), folders[key], Scheme(attention=scheme))
        return folders[key]

    return make


@pytest.fixture(scope="module")
def artifact_of(quantized_of: Maker) -> Maker:
    def make(attention: str, scheme: AttentionScheme, dtype: str = "fp32") -> Path:
        checkpoint = quantized_of(attention, scheme)
        folder = checkpoint.with_name(f"{checkpoint.name}-artifact-{dtype}")
        return folder if folder.exists() else export_artifact(checkpoint, folder, dtype=dtype)

    return make


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 61, shape, generator=torch.Generator().manual_seed(1))


def close(actual: np.ndarray, expected: torch.Tensor, attention: str, scheme: AttentionScheme) -> None:
    error = relative_error(actual, expected)
    usual = USUAL_OF_V1 if attention == "diff_v1" and scheme.has_window else USUAL
    assert np.median(error) < usual and error.max() < WORST, error


PAIRS = list(zip(cycle(VARIANTS), SCHEMES, strict=False))


@pytest.mark.parametrize(
    ("attention", "name", "native"),
    [
        *(
            pytest.param(*pair, True, marks=[] if pair in PAIRS else pytest.mark.slow)
            for pair in product(VARIANTS, SCHEMES)
        ),
        *((*pair, False) for pair in PAIRS),
        *(("diff_v1", name, False) for name in ("int4", "everything")),
    ],
)
def test_logits(quantized_of: Maker, artifact_of: Maker, attention: str, name: str, native: bool) -> None:
    """A prompt in pieces, then token by token; again after a reset; and a batch with padding. Its rows go on where each
    has a cache of its own, and are refused where they share blocks, unless they are equally long."""
    scheme = SCHEMES[name]
    model = reference_model(quantized_of(attention, scheme))
    session = runtime.Session(artifact_of(attention, scheme), threads=1, native=native)
    assert session.native is native
    ids = tokens(1, 110)
    with torch.inference_mode():
        expected = model(ids)[0]
    parts = [session.prefill(ids[:, start:stop].numpy(), all_positions=True)[0] for start, stop in ((0, 37), (37, 96))]
    parts += [session.step(ids[:, place : place + 1].numpy()) for place in range(96, 110)]
    close(np.concatenate(parts), expected, attention, scheme)
    session.reset()
    close(session.prefill(ids.numpy(), all_positions=True)[0], expected, attention, scheme)

    session.reset()
    rows, mask = tokens(2, 75), torch.ones(2, 75, dtype=torch.int64)
    mask[0, 40:70] = 0
    rows[0, 40:70] = 0  # the session's padding: it shares blocks with its neighbours
    with torch.inference_mode():
        expected = model(rows, attention_mask=mask)
    parts_of_rows = [session.prefill(rows[:, :70].numpy(), mask[:, :70].numpy(), all_positions=True)]
    if any(buffer.multiple > 1 for buffer in session.artifact.cache.buffers.values()):
        with pytest.raises(DiffbitError, match="rows of unequal length cannot continue together"):
            session.step(rows[:, 70:71].numpy())
    else:
        parts_of_rows += [session.step(rows[:, place : place + 1].numpy())[:, None] for place in range(70, 75)]
    logits = np.concatenate(parts_of_rows, 1)
    real = mask.bool()[:, : logits.shape[1]]
    close(logits[real.numpy()], expected[:, : logits.shape[1]][real], attention, scheme)


@pytest.mark.slow
@variants
@pytest.mark.parametrize("scheme", [KV8, KV4], ids=["int8", "int4"])
def test_greedy_tokens_are_torchs(
    quantized_of: Maker, artifact_of: Maker, attention: str, scheme: AttentionScheme
) -> None:
    model, expected = load(quantized_of(attention, scheme)), tokens(1, 100)
    for _ in range(16):
        with torch.inference_mode():
            expected = torch.cat((expected, model(expected)[:, -1:].argmax(-1)), 1)
    for native in (True, False):
        session = runtime.Session(artifact_of(attention, scheme), threads=1, native=native)
        generated = [int(session.prefill(expected[:, :100].numpy()).argmax())]
        while len(generated) < 16:
            generated.append(int(session.step([generated[-1:]]).argmax()))
        assert generated == expected[0, 100:].tolist(), native


@variants
@pytest.mark.parametrize("scheme", [KV4, replace(KV8, qk="int8")], ids=["int4", "int8-qk8"])
def test_fp16(quantized_of: Maker, artifact_of: Maker, attention: str, scheme: AttentionScheme) -> None:
    model, ids = reference_model(quantized_of(attention, scheme)), tokens(1, 100)
    with torch.inference_mode():
        expected = model(ids)[0]
    for native in (True, False):
        session = runtime.Session(artifact_of(attention, scheme, "fp16"), threads=1, native=native)
        error = relative_error(session.prefill(ids.numpy(), all_positions=True)[0], expected)
        assert np.median(error) < 0.05 and error.max() < WORST


@pytest.mark.slow
@pytest.mark.parametrize(
    ("attention", "name"),
    [
        *(("diff_v1", name) for name in SCHEMES),
        *((a, name) for a in ("softmax", "diff_v2") for name in ("int8", "everything")),
    ],
)
def test_manifest_golden_and_verify(quantized_of: Maker, artifact_of: Maker, attention: str, name: str) -> None:
    scheme = SCHEMES[name]
    artifact = runtime.Artifact.open(artifact_of(attention, scheme))
    assert Scheme.from_dict(dict(artifact.scheme or {})).attention == scheme
    assert {buffer.in_place for buffer in artifact.cache.buffers.values()} == {"native"}
    with torch.inference_mode():
        logits = reference_model(quantized_of(attention, scheme))(torch.tensor([artifact.golden.input_ids]))[0, -1]
    off = np.abs(np.array(artifact.golden.logits) - logits[list(artifact.golden.token_ids)].numpy()).max()
    assert off < 0.02 * artifact.golden.spread  # that one came in a batch with its copies: a code may be the neighbour
    assert artifact.golden.tolerance < 0.5
    assert not scheme.has_window or quantized_tokens(len(artifact.golden.input_ids), scheme.window) >= 64
    for native in (True, False):
        result = runtime.verify(artifact.path, native=native)
        assert result.passed, result.failures


@variants
def test_the_graph_and_its_buffers(artifact_of: Maker, attention: str) -> None:
    artifact = artifact_of(attention, AttentionScheme(keys="int8", values="int4"))
    heads = 4 if attention == "diff_v1" else 2
    assert runtime.Artifact.open(artifact).cache.layers == 2 * (
        (
            Buffer("key", "int8", (heads, "tokens", 32), "native"),
            Buffer("value", "uint8", (heads, "tokens", 16), "native", 32),
            Buffer("key_scale", "float16", (heads, "tokens"), "native"),
            Buffer("value_scale", "float16", (heads, "tokens"), "native", 32),
            Buffer("value_recent", "float16", (heads, 68, 32), "native", 32),
        ),
    )
    graph = graph_of(artifact).graph
    nodes = [node for node in graph.node if node.op_type == "DiffAttention"]
    assert len(nodes) == 2 and not any(node.op_type == "GroupQueryAttention" for node in graph.node)
    attributes = {a.name: a.i for a in nodes[0].attribute if a.name not in ("scale", "norm_eps")}
    expected = {"branches": 1 if attention == "softmax" else 2, "wide_value": int(attention == "diff_v1")}
    expected |= {
        "key_bits": 8,
        "value_bits": 4,
        "query_bits": 0,
        "window": 32,
        "first": 4,
        "num_heads": 4,
        "num_kv_heads": heads,
    }
    assert expected.items() <= attributes.items()
    assert (nodes[0].input[3] == "") == (attention == "softmax")  # lambda
    assert nodes[0].input[13] == nodes[0].output[5] == ""  # keys of 8 bits have none that are recent
    assert nodes[0].input[14] == "past_key_values.0.value_recent" and nodes[0].output[6] == "present.0.value_recent"


@pytest.mark.parametrize("part", ["logits", "probabilities"])
def test_rounded_logits_and_probabilities_are_refused(part: str, quantized_of: Maker, tmp_path: Path) -> None:
    old = quantized_of("diff_v2", replace(KV8, **{part: 6}))
    with pytest.raises(DiffbitError, match=f"its scheme rounds attention {part} to 6 bits, which no artifact does"):
        export_artifact(old, tmp_path / "artifact")


def test_export_says_which_loaders_cannot_read_a_low_bit_cache(
    artifact_of: Maker, quantized_of: Maker, tmp_path: Path
) -> None:
    """onnxruntime-genai feeds keys and values: it finds its file where these are all, and only there."""
    for scheme, readable in ((AttentionScheme(), True), (KV8, False), (KV4, False)):
        assert (artifact_of("diff_v2", scheme) / "genai_config.json").exists() is readable
        command = ["export", str(quantized_of("diff_v2", scheme)), "-o", str(tmp_path / "a"), "--overwrite"]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0 and ("onnxruntime-genai and optimum cannot" in done.stderr) is not readable


def test_the_cache_of_a_quantized_model_is_float16(checkpoint_of: Maker, tmp_path: Path) -> None:
    for format, options, precision in (
        ("int4_g32", [], "float16"),
        (None, [], "float32"),
        (None, ["--kv", "fp16"], "float16"),
        ("int4_g32", ["--kv", "fp32"], "float32"),
        ("int4_g32", ["--layout", "transformers.js"], "float32"),
    ):
        command = ["export", str(checkpoint_of("diff_v2", format)), "-o", str(tmp_path / "a"), "--overwrite", *options]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
        buffers = runtime.Artifact.open(tmp_path / "a").cache.buffers
        assert {buffer.dtype for buffer in buffers.values()} == {precision}, (format, options)
    done = CliRunner().invoke(app, [*command[:5], "--dtype", "fp16", "--kv", "fp32"])
    assert str(done.exception) == "kv is 'fp32', wanted one of fp16"


def test_a_float16_cache_computes_what_float32_does(checkpoint_of: Maker, tmp_path: Path) -> None:
    """To the roundings of keys and values, through prompt and steps; with half of the memory."""
    results, prompt = {}, [5, 9, 14, 3, 50, 37]
    for kv in ("fp32", "fp16"):
        folder = export_artifact(checkpoint_of("diff_v1", "int4_g32"), tmp_path / kv, kv=kv)
        session = runtime.Session(folder, threads=1)
        logits = [session.prefill([prompt]), *(session.step([[token]]) for token in prompt)]
        results[kv] = np.stack([np.asarray(row).reshape(-1) for row in logits])
        assert {buffer.dtype for buffer in session.artifact.cache.buffers.values()} == {f"float{kv[2:]}"}
    difference = np.abs(results["fp16"] - results["fp32"]).max()
    assert 0 < difference < 0.1 * results["fp32"].std()


def test_buffers_in_place_and_growing(artifact_of: Maker) -> None:
    artifact = artifact_of("diff_v1", KV4)
    session = runtime.Session(artifact, threads=1)
    session.prefill(tokens(1, 70).numpy())
    pointers = [value.data_ptr() for value in session._cache.past.values()]
    shapes = [value.shape() for value in session._cache.past.values()]
    assert shapes[0] == [1, 4, LENGTH, 16] and shapes[2] == [1, 4, LENGTH]
    session.step([[3]])
    assert [value.data_ptr() for value in session._cache.binding.get_outputs()[1:]] == pointers
    growing = runtime.Session(artifact, threads=1, native=False)
    growing.prefill(tokens(1, 70).numpy())
    assert [value.shape()[2] for value in list(growing._cache.past.values())[:6]] == [32, 32, 32, 32, 69, 68]
    for _ in range(26):
        growing.step([[3]])
    assert [value.shape()[2] for value in list(growing._cache.past.values())[:6]] == [64, 64, 64, 64, 69, 68]


@pytest.mark.slow
@pytest.mark.parametrize("formats", [("int4", "int4"), ("int8", "int4"), (None, "int2")])
def test_a_context_that_is_no_multiple_of_32(
    formats: tuple[str | None, str], checkpoint_of: Maker, tmp_path: Path
) -> None:
    attention = replace(KV4, window=0, keys=formats[0], values=formats[1])
    quantize_checkpoint(checkpoint_of("diff_v2", **CONFIG), tmp_path / "q", Scheme(attention=attention))
    artifact = export_artifact(tmp_path / "q", tmp_path / "a", context_length=75)
    ids = tokens(1, 75)
    with torch.inference_mode():
        expected = load(tmp_path / "q")(ids)[0]
    for native in (True, False):
        session = runtime.Session(artifact, threads=1, native=native)
        assert session.capacity == 75
        close(session.prefill(ids.numpy(), all_positions=True)[0], expected, "diff_v2", attention)
        with pytest.raises(DiffbitError, match="holds 75 tokens, but 76 are wanted"):
            session.step([[1]])


def test_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = write_model(tmp_path / "m", config_of("diff_v1", head_dim=8))
    done = CliRunner().invoke(app, ["quantize", str(model), "--kv", "int4", "-o", str(tmp_path / "q")])
    assert isinstance(done.exception, DiffbitError) and not (tmp_path / "q").exists()
    assert str(done.exception) == "keys cannot be int4: heads are 8 wide, wanted a multiple of 32; use int8"
    done = CliRunner().invoke(app, ["quantize", str(model), "--kv", "int8", "-o", str(tmp_path / "q"), "--quiet"])
    assert done.exit_code == 0
    assert runtime.verify(export_artifact(tmp_path / "q", tmp_path / "a")).passed


@pytest.mark.slow
def test_from_the_command_line(checkpoint_of: Maker, tmp_path: Path) -> None:
    source, folder = checkpoint_of("diff_v1", **CONFIG), tmp_path / "q"
    command = [
        "quantize",
        str(source),
        "--weights",
        "int4_g32",
        "--kv",
        "int8,int4",
        "--qk",
        "int8",
        "--kv-window",
        "9",
        "--kv-first",
        "2",
    ]
    done = CliRunner().invoke(app, [*command, "-o", str(folder), "--json"])
    assert done.exit_code == 0, done.output
    int8 = parse_format("int8")
    scheme = Scheme(parse_format("int4_g32"), int8, int8, attention=AttentionScheme(None, "int8", "int8", "int4", 9, 2))
    from diffbit.models import Checkpoint

    assert read_scheme(Checkpoint(folder)) == scheme
    report = json.loads(done.stdout)
    # a token of a layer: 4 heads of keys in bytes with a float32 scale, of values in half bytes with a float16 one
    assert report["after"]["kv_bytes_per_1k_tokens"] == 1000 * 2 * 4 * (32 + 4 + 16 + 2)
    assert report["after"]["kv_fixed_bytes"] == 2 * 4 * (2 + 9 + 32) * 32 * 2
    assert report["before"]["kv_bytes_per_1k_tokens"] == 1000 * 2 * 2 * 4 * 32 * 4
    options = ["--repeats", "1", "--prompt-tokens", "60", "--new-tokens", "3", "--memory", "1GB", "--json"]
    for flag in ([], ["--no-native"]):  # of a checkpoint
        done = CliRunner().invoke(app, ["bench", str(folder), *options, *flag])
        assert done.exit_code == 0, done.output
        (row,) = json.loads(done.stdout)
        assert row["kv_bytes_per_1k_tokens"] == report["after"]["kv_bytes_per_1k_tokens"]
        assert row["kv_fixed_bytes"] == report["after"]["kv_fixed_bytes"]
        room = 10**9 - row["model_bytes"] - row["kv_fixed_bytes"]
        assert row["longest_context_tokens"] == pytest.approx(1000 * room / row["kv_bytes_per_1k_tokens"], rel=1e-4)
    done = CliRunner().invoke(app, ["run", str(folder), "w1 w2", "--max-tokens", "2"])
    assert done.exit_code == 0, done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kv", "int5"], "attention.keys is 'int5', wanted one of fp16, int8, int4, int3, int2 or none"),
        (["--kv", "int8,int4,int2"], "a KV cache of 'int8,int4,int2': wanted one format, or two for keys and values"),
        (["--kv", "int4", "--kv-window", "-1"], "attention.window is -1, wanted a whole number from 0"),
        (["--kv", "int8", "--kv-window", "9"], "--kv-window is for an int4, int3 or int2 cache"),
        (["--kv", "int4", "--kv-first", "17"], "attention.first is 17, wanted a whole number from 0 to 16"),
        (["--kv", "int8", "--kv-first", "4"], "--kv-first is for an int4, int3 or int2 cache"),
        (["--weights", "none", "--kv", "none"], "nothing to quantize"),
        (
            ["--kv", "int4", "--scheme", "s.toml"],
            "leave out --weights, --embedding, --head, --override, --activations, --kv",
        ),
    ],
)
def test_attention_options_that_exclude_each_other_are_refused(
    checkpoint_of: Maker, tmp_path: Path, options: list[str], message: str
) -> None:
    source = checkpoint_of("diff_v1", **CONFIG)
    done = CliRunner().invoke(app, ["quantize", str(source), *options, "-o", str(tmp_path / "q")])
    assert isinstance(done.exception, DiffbitError) and message in str(done.exception)
