"""The int8 cache of ONNX Runtime's own GroupQueryAttention, in artifacts of `export --target onnxruntime`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from typer.testing import CliRunner

from diffbit import runtime
from diffbit.cli.app import app
from diffbit.export import export_artifact, reference_model
from diffbit.export.fixed_scales import Channels, FixedScales, turning
from diffbit.export.grouped import has_fixed_scales
from diffbit.io.errors import DiffbitError
from diffbit.models import Checkpoint
from diffbit.models.layers import explicit_softmax
from diffbit.ops.cache import Buffer
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint

from .helpers import VARIANTS, graph_of

INT8 = AttentionScheme(keys="int8", values="int8")
PROMPT = [5, 17, 42, 99, 301, 8, 77, 150, 33, 260]
Trained = Callable[[str], Path]
Export = Callable[..., Path]

variants = pytest.mark.parametrize("variant", VARIANTS)


@pytest.fixture(scope="module")
def exported(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Export:
    """exported("diff_v1"): the artifact of a trained model with an int8 cache, made once."""
    folder = tmp_path_factory.mktemp("fixed")

    def make(variant: str, scheme: AttentionScheme = INT8, target: str = "onnxruntime") -> Path:
        low = folder / f"{variant}-{scheme.keys}"
        if not scheme.is_low_bit:
            low = trained(variant)
        elif not low.exists():
            quantize_checkpoint(trained(variant), low, Scheme(attention=scheme))
        artifact = folder / f"{variant}-{scheme.keys}-{target}"
        return artifact if artifact.exists() else export_artifact(low, artifact, target=target)

    return make


@pytest.mark.parametrize("branches", [1, 2])
def test_the_operator_rounds_as_torch_does(branches: int) -> None:
    """One layer of 2 kv heads: codes of the cache, to the bit, and outputs. With two branches a head has a pair of keys
    and values side by side; this is the signal's."""
    generator = torch.Generator().manual_seed(branches)
    heads, kv_heads, length, width = 4, 2, 40, 32
    query = torch.randn(1, heads, length, width, generator=generator)
    stored = torch.randn(2, 1, kv_heads * branches, length, width, generator=generator) * 3 + 1
    channels = [Channels.of(part[:, :, ::2]) for part in stored]  # so that some other tokens are clipped
    key, value = stored
    wide = torch.cat([value[:, i::branches] for i in range(branches)], -1)
    arithmetic = FixedScales(*channels)
    shares = explicit_softmax(arithmetic.logits(query, key[:, ::branches], width**-0.5, 0), None, None)
    expected = arithmetic.mix(shares, wide, width).transpose(1, 2).flatten(2)

    def by_token(x: torch.Tensor) -> np.ndarray:
        return x.transpose(1, 2).flatten(2).numpy()

    turned = [part @ turning(width) - of.offset[:, None] for part, of in zip(stored, channels, strict=True)]
    queries = query @ turning(width)
    queries = torch.cat([queries, *([torch.zeros_like(queries)] * (branches - 1))], -1)
    scales = [of.scale.view(1, kv_heads, 1, -1).numpy() for of in channels]
    out, present, _ = grouped_query(by_token(queries), *map(by_token, turned), *scales, heads, kv_heads, width**-0.5)
    codes = (turned[0] / channels[0].scale[:, None]).round().clamp(-128, 127)
    codes = codes.unflatten(1, (kv_heads, -1)).transpose(2, 3).flatten(3)
    assert (present == codes.numpy()).all() and (np.abs(present) > 120).any()
    out = torch.from_numpy(out).unflatten(-1, (heads, branches, width))
    offset = channels[1].offset.view(kv_heads, 1, branches, width).expand(-1, heads // kv_heads, -1, -1).flatten(0, 1)
    assert torch.allclose(((out + offset) @ turning(width)).flatten(2), expected, atol=1e-4)


def grouped_query(
    query: np.ndarray, key: np.ndarray, value: np.ndarray, key_scale: np.ndarray, value_scale: np.ndarray,
    heads: int, kv_heads: int, scale: float, bits: int = 8,
) -> list[np.ndarray]:  # fmt: skip
    """GroupQueryAttention of a prompt over an empty cache of 8 or 4 bits, with a scale [1, kv_heads, 1, width], or
    [1] of a tensor: output, and keys and values as stored."""
    length, width = query.shape[1], query.shape[2] // heads
    past = np.zeros((1, kv_heads, 0, width * bits // 8), np.int8 if bits == 8 else np.uint8)
    kind = "PER_TENSOR" if key_scale.size == 1 else "PER_CHANNEL"
    feeds = {"q": query, "k": key, "v": value, "past_k": past, "past_v": past}
    feeds |= {"last": np.array([length - 1], np.int32), "total": np.array(length, np.int32)}
    feeds |= {"k_scale": key_scale, "v_scale": value_scale}
    node = onnx.helper.make_node(
        "GroupQueryAttention",
        ["q", "k", "v", "past_k", "past_v", "last", "total", "", "", "", "", "", "k_scale", "v_scale"],
        ["out", "new_k", "new_v"], domain="com.microsoft", num_heads=heads, kv_num_heads=kv_heads, scale=scale,
        k_quant_type=kind, v_quant_type=kind, kv_cache_bit_width=bits,
    )  # fmt: skip
    value_info = onnx.helper.make_tensor_value_info
    kinds = {name: onnx.helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
    inputs = [value_info(name, kinds[name], array.shape) for name, array in feeds.items()]
    outputs = [
        value_info("out", kinds["q"], None),
        *(value_info(name, kinds["past_k"], None) for name in ("new_k", "new_v")),
    ]
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("com.microsoft", 1)]
    graph = onnx.helper.make_graph([node], "one", inputs, outputs)
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


@variants
def test_the_graph_is_onnx_runtimes(exported: Export, variant: str) -> None:
    """Each layer is one GroupQueryAttention, and the cache has a quarter of float32's bytes and nothing else."""
    artifact = runtime.Artifact.open(exported(variant))
    heads, width = {"softmax": (4, 32), "diff_v1": (2, 64), "diff_v2": (2, 32)}[variant]
    buffers = tuple(Buffer(name, "int8", (heads, "tokens", width), "always") for name in ("key", "value"))
    assert artifact.target == "onnxruntime" and set(artifact.cache.layers) == {buffers}
    floats = runtime.Artifact.open(exported(variant, AttentionScheme(), "onnxruntime"))
    assert 4 * artifact.cache.nbytes(100) == floats.cache.nbytes(100)
    operators = [node.op_type for node in graph_of(artifact.path).graph.node]
    assert operators.count("GroupQueryAttention") == len(artifact.cache.layers) and "DiffAttention" not in operators
    (scales,) = [part for part in artifact.parts if part.name == "scales"]
    assert scales.weights and sum(part.bytes for part in artifact.parts) == artifact.nbytes


@variants
def test_it_computes_what_torch_does(exported: Export, variant: str) -> None:
    artifact = exported(variant)
    for native in (True, False):
        result = runtime.verify(artifact, native=native)
        assert result.passed, result.failures
    model = reference_model(artifact.with_name(f"{variant}-int8"), "onnxruntime")
    with torch.inference_mode():
        expected = model(torch.tensor([PROMPT]))[0].numpy()
    spread = expected.std()
    session = runtime.Session(artifact, threads=1, native=False)
    logits = session.prefill([PROMPT], all_positions=True)[0]
    assert np.abs(logits - expected).max() < 0.02 * spread  # a code may be the neighbour
    floats = runtime.Session(exported(variant, AttentionScheme()), threads=1)
    error = np.abs(logits - floats.prefill([PROMPT], all_positions=True)[0])
    assert 1e-4 * spread < error.max() and np.median(error.max(-1)) < 0.2 * spread


@variants
def test_tokens_and_batches(exported: Export, variant: str) -> None:
    """Token by token is the whole prompt, and a row of a padded batch is the row alone, prompt and steps."""
    session = runtime.Session(exported(variant), threads=1, native=False)
    whole = session.prefill([PROMPT], all_positions=True)[0]
    session.reset()
    steps = [session.prefill([PROMPT[:1]])[0], *(session.step([[token]])[0] for token in PROMPT[1:])]
    assert np.allclose(np.stack(steps), whole, atol=1e-4 * whole.std())
    session.reset()
    rows = np.array([PROMPT, [0, 0, 0, *PROMPT[:7]]])
    mask = np.array([[1] * 10, [0] * 3 + [1] * 7], bool)
    batch = session.prefill(rows, mask)
    assert np.allclose(batch, [whole[9], whole[6]], atol=1e-3 * whole.std())
    session.step([[PROMPT[0]], [PROMPT[7]]])
    assert np.allclose(session.step([[PROMPT[1]], [PROMPT[8]]])[1], whole[8], atol=1e-3 * whole.std())


@variants
def test_onnxruntime_genai_runs_it(exported: Export, variant: str) -> None:
    og = pytest.importorskip("onnxruntime_genai")
    artifact = exported(variant)
    model = og.Model(str(artifact))
    params = og.GeneratorParams(model)
    params.set_search_options(max_length=len(PROMPT) + 20, min_length=len(PROMPT) + 20, do_sample=False, batch_size=2)
    generator = og.Generator(model, params)
    generator.append_tokens(np.array([PROMPT] * 2, np.int32))
    while not generator.is_done():
        generator.generate_next_token()
    session = runtime.Session(artifact, threads=1, native=False)
    expected = list(PROMPT)
    logits = session.prefill([PROMPT])[0]
    for _ in range(20):
        logits[list(session.artifact.eos_token_ids)] = -np.inf
        expected.append(int(logits.argmax()))
        logits = session.step([[expected[-1]]])[0]
    assert generator.get_sequence(1).tolist() == expected


def test_other_caches_keep_diffbits_operator(exported: Export, tmp_path: Path) -> None:
    """Of 4 bits, or for WebGPU: `export` says what that means."""
    int4 = AttentionScheme(keys="int4", values="int4")
    assert not (exported("diff_v2", int4) / "genai_config.json").exists()
    for scheme, target, words in (
        (INT8, "onnxruntime", ""),
        (int4, "onnxruntime", "ONNX Runtime has no operator for a KV cache of int4"),
        (INT8, "webgpu", "WebGPU has no kernels for a KV cache of int8"),
    ):
        low = exported("diff_v2", scheme).with_name(f"diff_v2-{scheme.keys}")
        command = ["export", str(low), "-o", str(tmp_path / "a"), "--overwrite", "--target", target]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0 and words in done.stderr and ("KV cache" in done.stderr) is bool(words)


def test_rounded_queries_keep_diffbits_operator(trained: Trained) -> None:
    config = Checkpoint(trained("diff_v2")).config
    assert has_fixed_scales(config, INT8, "onnxruntime")
    for other in (replace(INT8, qk="int8"), AttentionScheme(keys="int8", values="int4"), AttentionScheme(qk="int8")):
        assert not has_fixed_scales(config, other, "onnxruntime")


def test_transformers_js_is_refused(exported: Export, tmp_path: Path) -> None:
    low = exported("diff_v2").with_name("diff_v2-int8")
    with pytest.raises(DiffbitError, match=r"transformers\.js cannot run this model"):
        export_artifact(low, tmp_path / "a", target="onnxruntime", layout="transformers.js")


def test_a_tokenizer_of_another_model(exported: Export, trained: Trained, tmp_path: Path) -> None:
    from .helpers import config_of, write_model

    quantize_checkpoint(write_model(tmp_path / "a", config_of("softmax")), tmp_path / "low", Scheme(attention=INT8))
    with pytest.raises(DiffbitError, match="has a vocabulary of 61 tokens; the tokenizer belongs to another model"):
        export_artifact(tmp_path / "low", tmp_path / "b", target="onnxruntime", tokenizer=trained("softmax"))
    assert not (tmp_path / "b").exists()
