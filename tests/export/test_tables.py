"""Embedding and head at low bits: one table where they are tied, the same numbers in torch, bodies and kernels."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from diffbit.export import export_artifact, reference_model
from diffbit.formats import QTensor, QuantEmbedding, QuantLinear, parse_format
from diffbit.models import Decoder, ModelConfig
from diffbit.quantize import Scheme, load, quantize_checkpoint
from diffbit.runtime import Session, native
from diffbit.runtime.verify import verify

from .helpers import config_of, graph_of, relative_error, write_model

INT8, INT4, NF4 = parse_format("int8"), parse_format("int4_g32"), parse_format("nf4")
# Independent sequences: a last-bit difference moves an activation to the next int8 step in one of them, hardly in half
IDS = torch.randint(0, 61, (8, 5), generator=torch.Generator().manual_seed(1))


def quantized(folder: Path, config: ModelConfig, scheme: Scheme) -> Path:
    quantize_checkpoint(write_model(folder / "float", config), folder / "q", scheme)
    return folder / "q"


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("embedding", "head", "dtype"),
    [("int8", "int8", "fp32"), ("int4_g32", "int4_g32", "fp16"), ("int5_g64_asym", "int5_g64_asym", "fp32"),
     ("int6_g32_s8", "int6_g32_s8", "fp32"), ("nl4_g32_s8", "nl4_g32_s8", "fp16"), ("int5_g64", "int5_g64", "fp32"),
     ("tcq4_g32_s8", "tcq4_g32_s8", "fp16"), ("tcq5_g32_s8", "tcq6_g32_s8", "fp32"),
     ("int4_g32", "int8", "fp32"), ("int8", "none", "fp32"), ("none", "int8", "fp16")],
)  # fmt: skip
def test_tables(tmp_path: Path, tied: bool, embedding: str, head: str, dtype: str) -> None:
    formats = [None if name == "none" else parse_format(name) for name in (embedding, head)]
    config = config_of("diff_v1", tie_embeddings=tied, vocab_size=61 if "tcq" not in embedding else 128)
    checkpoint = quantized(tmp_path, config, Scheme(INT4, *formats))
    model = load(checkpoint)
    once = tied and embedding == head
    assert model.config.tie_embeddings == once
    assert isinstance(model.model.embed_tokens, QuantEmbedding) == (embedding != "none")
    assert isinstance(model.lm_head, QuantLinear) == (head != "none")
    if once:
        assert model.lm_head.weight.codes is model.model.embed_tokens.weight.codes

    artifact = export_artifact(checkpoint, tmp_path / "a", dtype=dtype)
    graph = graph_of(artifact).graph
    codes = {
        tensor.name for tensor in graph.initializer if tensor.name.endswith("codes") and "layers" not in tensor.name
    }
    assert ("lm_head.codes" in codes) == (head != "none" and not once)
    assert ("embed_tokens.codes" in codes) == (embedding != "none")
    readers = [node.op_type for node in graph.node if "embed_tokens.codes" in node.input]
    assert len(readers) == (2 if once else embedding != "none"), "a tied table is read by both and stored once"
    with torch.inference_mode():
        expected = reference_model(checkpoint)(IDS)
    bound = 1e-4 if dtype == "fp32" else 0.15
    for with_library in (True, False):
        logits = Session(artifact, native=with_library).prefill(IDS.numpy(), all_positions=True)
        assert np.median(relative_error(logits, expected).max(-1)) < bound
    assert verify(artifact).passed


def test_a_dequantized_checkpoint_computes_the_same(tmp_path: Path) -> None:
    config = config_of("softmax", tie_embeddings=True)
    model = load(quantized(tmp_path, config, Scheme(INT4, INT8, INT8)))
    plain = Decoder(config)
    state = {}
    for name in plain.state_dict():
        parent = model.get_submodule(name.rpartition(".")[0])
        weight = parent.weight
        state[name] = weight.dequantize() if isinstance(weight, QTensor) else weight
    plain.load_state_dict(state)
    with torch.inference_mode():
        torch.testing.assert_close(model(IDS), plain(IDS), rtol=0, atol=1e-5)


def test_other_formats_are_a_head_but_no_embedding(tmp_path: Path) -> None:
    tied = config_of("diff_v2", tie_embeddings=True)
    checkpoint = quantized(tmp_path, tied, Scheme(INT4, INT8, NF4))
    assert load(checkpoint).lm_head.weight.format == NF4
    assert verify(export_artifact(checkpoint, tmp_path / "a")).passed


MEASURE = """
import sys
from diffbit.runtime import Session

def resident():
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith("VmRSS"))

small = Session(sys.argv[1], threads=1)
small.prefill([[1]])
before = resident()
large = Session(sys.argv[2], threads=1)
large.prefill([[1]])
print(resident() - before)
"""


linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")


def grown(small: Path, large: Path) -> int:
    """Bytes that a session of the one artifact takes more than one of the other."""
    assert native.library() is not None
    command = [sys.executable, "-c", MEASURE, str(small), str(large)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.slow
@linux
@pytest.mark.parametrize("format", ["int8", "int4_g32", "none"])
def test_a_tied_table_is_resident_once(tmp_path: Path, format: str) -> None:
    """Its bytes are mapped from the file, read by both, and neither unpacked nor packed anew."""
    sizes = {}
    for vocab in (64, 80000):
        folder = tmp_path / str(vocab)
        folder.mkdir()
        config = config_of("softmax", tie_embeddings=True, hidden_size=256, num_layers=1, vocab_size=vocab)
        checkpoint = quantized(folder, config, Scheme(INT4, *[None if format == "none" else parse_format(format)] * 2))
        sizes[vocab] = export_artifact(checkpoint, folder / "a", dtype="fp16")
    table = 2 * 80000 * 256 if format == "none" else parse_format(format).device_nbytes((80000, 256), 2)
    assert grown(*sizes.values()) < 1.4 * table


@linux
def test_float16_weights_are_resident_once(tmp_path: Path) -> None:
    """Those of the layers, too, in an artifact for CPUs; one for GPUs has ONNX Runtime's own product."""
    artifacts = {}
    for width in (64, 20000):
        folder = tmp_path / str(width)
        folder.mkdir()
        write_model(folder / "float", config_of("diff_v2", hidden_size=256, num_layers=1, intermediate_size=width))
        artifacts[width] = export_artifact(folder / "float", folder / "a", dtype="fp16")
    assert grown(*artifacts.values()) < 1.4 * 2 * 3 * 20000 * 256
    on_gpu = export_artifact(tmp_path / "64" / "float", tmp_path / "gpu", dtype="fp16", target="cuda")
    with torch.inference_mode():
        expected = reference_model(tmp_path / "64" / "float")(IDS)
    for artifact, with_library in ((artifacts[64], True), (artifacts[64], False), (on_gpu, True)):
        logits = Session(artifact, native=with_library).prefill(IDS.numpy(), all_positions=True)
        assert np.median(relative_error(logits, expected).max(-1)) < 0.01
    assert "MatMul" not in {node.op_type for node in graph_of(artifacts[64]).graph.node}
    assert "FloatMatMul" not in {node.op_type for node in graph_of(on_gpu).graph.node}
