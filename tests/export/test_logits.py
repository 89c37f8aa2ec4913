"""An artifact's logits are torch's: all variants, formats and dtypes, in every way of feeding the cache."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from safetensors.torch import load_file, save_file

from diffbit.export import reference_model
from diffbit.models import ModelConfig
from diffbit.models.layers.rope import Llama3, Yarn

from ..configs import BIASES
from .conftest import Maker
from .helpers import (
    VARIANTS,
    Runner,
    config_of,
    graph_of,
    modes,
    relative_error,
    write_artifact,
    write_model,
    write_quantized,
)

FORMATS = ("int8", "int4_g32", "int4_g64_asym", "int3_g64", "int2_g64_asym", "nl3_g32_s8", "nf4", "ternary")
FLOAT = 1e-4
QUANTIZED = 1e-3  # of the median sequence: a last-bit difference may move an activation to the next int8 step
# fp16 rounds every activation to 11 bits; where they then become int8, many land on the neighbouring step
FP16, FP16_QUANTIZED = 0.02, 0.15
variants = pytest.mark.parametrize("attention", VARIANTS)


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(0, 61, shape, generator=torch.Generator().manual_seed(1))


def prefill_error(checkpoint: Path, config: ModelConfig, dtype: str) -> np.ndarray:
    """Of each of eight independent sequences, the largest error at any place."""
    ids = tokens(8, 5)
    logits = Runner(write_artifact(checkpoint, dtype), config)(ids.numpy(), np.ones((8, 5), np.int64))
    with torch.inference_mode():
        expected = reference_model(checkpoint)(ids)
    return relative_error(logits, expected).max(-1)


@variants
@pytest.mark.parametrize(("dtype", "bound"), [("fp32", FLOAT), ("fp16", FP16)])
def test_float(checkpoint_of: Maker, attention: str, dtype: str, bound: float) -> None:
    assert prefill_error(checkpoint_of(attention), config_of(attention), dtype).max() < bound


@variants
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("dtype", "bound"), [("fp32", QUANTIZED), pytest.param("fp16", FP16_QUANTIZED, marks=pytest.mark.slow)]
)
def test_quantized(checkpoint_of: Maker, attention: str, format: str, dtype: str, bound: float) -> None:
    error = prefill_error(checkpoint_of(attention, format), config_of(attention), dtype)
    assert np.median(error) < bound
    assert error.max() < 0.3


def test_diff_v1_without_its_head_norm(tmp_path: Path) -> None:
    config = config_of("diff_v1", head_norm=False)
    checkpoint = write_model(tmp_path / "model", config)
    assert prefill_error(checkpoint, config, "fp32").max() < FLOAT
    assert np.median(prefill_error(write_quantized(checkpoint, "int4_g32"), config, "fp32")) < QUANTIZED


def test_fp16_without_int8_activations_is_as_close_as_float(checkpoint_of: Maker) -> None:
    error = prefill_error(checkpoint_of("diff_v1", "nf4"), config_of("diff_v1"), "fp16")
    assert error.max() < FP16


@pytest.mark.parametrize("attention", VARIANTS)
@pytest.mark.parametrize(
    "changes",
    [
        {"num_heads": 4, "num_kv_heads": 1, "head_dim": 8},
        {"num_heads": 3, "num_kv_heads": 3, "head_dim": 24, "hidden_size": 48, "intermediate_size": 72},
        {"tie_embeddings": True, "rope_scaling": Llama3(8.0, 1.0, 4.0, 16), "rope_theta": 500000.0},
        {"sub_norms": True, "mlp": "relu2"},
        {"qk_norm_eps": 1e-6, "head_dim": 24, "rope_scaling": Yarn(4.0, 16, 1.3), **BIASES},
    ],
    ids=["gqa4", "odd", "llama3-tied", "bitnet", "biases-norms-yarn"],
)
def test_shapes(checkpoint_of: Maker, attention: str, changes: dict[str, object]) -> None:
    config = config_of(attention, **changes)
    assert prefill_error(checkpoint_of(attention, **changes), config, "fp32").max() < FLOAT
    quantized = checkpoint_of(attention, "int4_g32", **changes)
    assert np.median(prefill_error(quantized, config, "fp32")) < QUANTIZED


@variants
@pytest.mark.parametrize(
    ("dtype", "bound"), [("fp32", QUANTIZED), pytest.param("fp16", FP16_QUANTIZED, marks=pytest.mark.slow)]
)
def test_ternary_behind_sub_norms(checkpoint_of: Maker, attention: str, dtype: str, bound: float) -> None:
    changes = {"sub_norms": True, "mlp": "relu2"}
    error = prefill_error(checkpoint_of(attention, "ternary", **changes), config_of(attention, **changes), dtype)
    assert np.median(error) < bound


def test_squared_relu_may_pass_what_float16_holds(tmp_path: Path) -> None:
    """Before the sub-norm: gates of some 100 give products of up to a million, which the graph leaves float32.

    On a CPU ONNX Runtime computes in float32 whatever the graph says, so that the graph is looked at, too.
    """
    config = config_of("softmax", sub_norms=True, mlp="relu2")
    folder = write_model(tmp_path / "m", config)
    stored = load_file(folder / "model.safetensors")
    for name in stored:
        if "gate_proj" in name or "up_proj" in name:
            stored[name] *= 60
    save_file(stored, folder / "model.safetensors")
    assert prefill_error(folder, config, "fp16").max() < FP16
    graph = graph_of(write_artifact(folder, "fp16")).graph
    makers = {name: node for node in graph.node for name in node.output}
    types = {weight.name: weight.data_type for weight in graph.initializer}
    float32 = onnx.TensorProto.FLOAT
    squares = [node for node in graph.node if node.op_type == "Relu"]
    norms = [node for node in graph.node if any("ffn_sub_norm" in name for name in node.input)]
    assert len(squares) == len(norms) == config.num_layers
    for relu, norm in zip(squares, norms, strict=True):
        product = makers[norm.input[0]]
        assert product.op_type == "Mul" and types[norm.input[1]] == float32
        for value in (relu.input[0], product.input[1]):  # gate and up
            assert makers[value].op_type == "Cast" and makers[value].attribute[0].i == float32


@variants
@pytest.mark.parametrize("padding", ["none", "left", "right", "both"])
@pytest.mark.parametrize(("dtype", "bound"), [("fp32", FLOAT), ("fp16", FP16)])
def test_cached_steps_with_padding(
    checkpoint_of: Maker, attention: str, padding: str, dtype: str, bound: float
) -> None:
    """A batch of two, one row padded: prefill of 7, then 4 single tokens; in every way of holding the cache."""
    config, checkpoint = config_of(attention), checkpoint_of(attention)
    mask = np.ones((2, 11), np.int64)
    if padding in ("left", "both"):
        mask[0, :3] = 0
    if padding in ("right", "both"):
        mask[-1, 5:7] = 0  # in the prompt's end: generated tokens follow it
    ids = tokens(2, 11)
    with torch.inference_mode():
        expected = reference_model(checkpoint)(ids, attention_mask=torch.from_numpy(mask))
    for mode in modes(config):
        run = Runner(write_artifact(checkpoint, dtype), config, **mode)
        parts = [run(ids[:, :7].numpy(), mask[:, :7])]
        parts += [run(ids[:, t : t + 1].numpy(), mask[:, : t + 1]) for t in range(7, 11)]
        error = relative_error(np.concatenate(parts, 1), expected)
        assert error[mask == 1].max() < bound, mode


@variants
@pytest.mark.parametrize(("dtype", "bound"), [("fp32", FLOAT), ("fp16", FP16)])
def test_chunks_and_steps(checkpoint_of: Maker, attention: str, dtype: str, bound: float) -> None:
    """One sequence in pieces of 1, 6, 3 and 1 tokens: a first call of one token, and prefill onto a past."""
    config, checkpoint = config_of(attention), checkpoint_of(attention)
    ids = tokens(1, 11)
    with torch.inference_mode():
        expected = reference_model(checkpoint)(ids)
    for mode in modes(config):
        run = Runner(write_artifact(checkpoint, dtype), config, **mode)
        edges = [0, 1, 7, 10, 11]
        parts = [run(ids[:, start:stop].numpy(), np.ones((1, stop), np.int64)) for start, stop in pairwise(edges)]
        assert relative_error(np.concatenate(parts, 1), expected).max() < bound, mode


@variants
def test_greedy_tokens_are_torchs(checkpoint_of: Maker, attention: str) -> None:
    config, checkpoint = config_of(attention), checkpoint_of(attention)
    model, expected = reference_model(checkpoint), [5, 17, 42]
    run, tokens = Runner(write_artifact(checkpoint), config), [5, 17, 42]
    logits = run(np.array([tokens]), np.ones((1, 3), np.int64))
    for _ in range(20):
        with torch.inference_mode():
            expected.append(int(model(torch.tensor([expected]))[0, -1].argmax()))
        tokens.append(int(logits[0, -1].argmax()))
        logits = run(np.array([tokens[-1:]]), np.ones((1, len(tokens)), np.int64))
    assert tokens == expected
