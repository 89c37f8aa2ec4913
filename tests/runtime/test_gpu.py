"""Whole artifacts on an NVIDIA GPU through ONNX Runtime: their tokens beside the CPU's.

Without a GPU the same comparison runs between the native library and the operators' bodies.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnxruntime
import pytest

from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint
from diffbit.runtime import Session, native
from diffbit.runtime.driver import Driver

from ..export.helpers import config_of, write_model

STEPS = 48
PROMPT = [int(i) for i in np.random.default_rng(0).integers(4, 61, 70)]
# 64 channels a head, which the kernels for tensor cores take
SIZES = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 64, "max_position": 128}


def card_here() -> bool:
    try:
        Driver()
    except (OSError, DiffbitError):
        return False
    return "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def weights(format: str) -> Scheme:
    return Scheme(weights=parse_format(format))


def cache(format: str) -> Scheme:
    return Scheme(attention=AttentionScheme(keys=format, values=format))


MODELS = {
    "softmax": ("softmax", None),
    "diff_v1": ("diff_v1", None),
    "diff_v2": ("diff_v2", None),
    "int8": ("diff_v1", weights("int8")),
    "int4_g32": ("diff_v1", weights("int4_g32")),
    "nf4": ("diff_v1", weights("nf4")),
    "ternary": ("diff_v1", weights("ternary")),
    "kv_int8": ("diff_v1", cache("int8")),
    "kv_int4": ("diff_v1", cache("int4")),
}
every_model = pytest.mark.parametrize("name", MODELS)
Maker = Callable[[str], Path]


@pytest.fixture(scope="module")
def artifact_of(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """artifact_of("nf4"): a random model's fp16 artifact."""
    folder = tmp_path_factory.mktemp("gpu")

    def make(name: str) -> Path:
        attention, scheme = MODELS[name]
        artifact, source = folder / f"{name}-onnx", folder / attention
        if artifact.exists():
            return artifact
        if not source.exists():
            write_model(source, config_of(attention, **SIZES))
        if scheme is not None:
            quantize_checkpoint(source, folder / name, scheme)
            source = folder / name
        return export_artifact(source, artifact, dtype="fp16")

    return make


def compare(reference: Session, other: Session) -> None:
    """Greedy tokens of `wanted`, which `found` is given as well: its logits are as near as the artifact promises, and
    its token is the same wherever that leaves no doubt."""
    golden = reference.artifact.golden
    rows = [(reference.prefill([PROMPT])[0], other.prefill([PROMPT])[0])]
    for _ in range(STEPS):
        token = [[int(rows[-1][0].argmax())]]
        rows.append((reference.step(token)[0], other.step(token)[0]))
    sure = 0
    for position, (a, b) in enumerate(rows):
        most = golden.tolerance * golden.spread
        assert np.abs(a - b).max() <= most, f"token {position}: {np.abs(a - b).max() / golden.spread:.3g} of the spread"
        second, first = np.sort(a)[-2:]
        if first - second > 2 * most:
            sure += 1
            assert a.argmax() == b.argmax(), f"token {position}: {b.argmax()}, wanted {a.argmax()}"
    assert sure >= 7  # else the tokens are hardly compared


@pytest.mark.slow
@every_model
def test_the_library_and_the_bodies(name: str, artifact_of: Maker) -> None:
    compare(Session(artifact_of(name), threads=1, native=False), Session(artifact_of(name), threads=1))


def test_another_models_tokens_are_not_the_same(artifact_of: Maker) -> None:
    with pytest.raises(AssertionError, match="of the spread"):
        compare(Session(artifact_of("diff_v1"), threads=1), Session(artifact_of("diff_v2"), threads=1))


@pytest.mark.gpu
@pytest.mark.skipif(not card_here(), reason="there is no CUDA device, or onnxruntime-gpu is not installed")
@pytest.mark.parametrize("with_library", [True, False], ids=["kernels", "bodies"])
@every_model
def test_tokens_on_a_gpu(name: str, with_library: bool, artifact_of: Maker) -> None:
    if with_library:
        assert native.cuda_architectures(), "the native library was built without CUDA"
    if name == "ternary" and not with_library:  # ONNX Runtime has no MatMulInteger for CUDA
        with pytest.raises(DiffbitError, match="would run these of its operators on the CPU: MatMulInteger"):
            Session(artifact_of(name), device="cuda", native=False)
        return
    gpu = Session(artifact_of(name), device="cuda", native=with_library)
    assert gpu.native == with_library
    compare(Session(artifact_of(name)), gpu)
