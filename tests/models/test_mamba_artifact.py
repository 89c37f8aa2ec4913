"""A model of Mamba and attention layers: from a checkpoint to tokens, with the library and without it, and methods."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from diffbit.export import export_artifact, reference_model
from diffbit.formats import parse_format
from diffbit.models import Decoder, LayerSpec, ModelConfig, load, save
from diffbit.models.attention import diff_v1
from diffbit.models.mixers import mamba
from diffbit.models.mlp import swiglu
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint
from diffbit.quantize.layer import Layer
from diffbit.quantize.methods import awq, rotate
from diffbit.runtime import Session, verify

from ..export.helpers import relative_error, write_tokenizer
from ..quantize.transforms import layers, transformed

MIXERS = (mamba.Options(64, 8, 4, 32), diff_v1.Options(2, 1, 16), mamba.Options(96, 16, 3, 32))
CONFIG = ModelConfig(
    vocab_size=61,
    hidden_size=64,
    layers=tuple(LayerSpec(mixer, swiglu.Options(128), sub_norms=index == 2) for index, mixer in enumerate(MIXERS)),
    max_position=64,
)
IDS = torch.randint(0, 61, (2, 20), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    decoder = Decoder(CONFIG)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if name.endswith("dt_proj.bias"):
                parameter.uniform_(-4, 0)
            elif parameter.dim() > 1 and "A_log" not in name:
                parameter.mul_(6)
            elif "norm" in name:
                parameter.uniform_(0.5, 1.5)
    checkpoint = tmp_path_factory.mktemp("mamba") / "float"
    save(decoder, checkpoint)
    write_tokenizer(checkpoint, CONFIG.vocab_size)
    return checkpoint


CASES = {  # weights, keys and values, the artifact's dtype, the error allowed
    "float": (None, "float", "fp32", 1e-4),
    "int8": ("int8_g32", "int8", "fp32", 0.1),
    "half": (None, "float", "fp16", 0.05),
}


@pytest.mark.parametrize("case", CASES)
def test_session_computes_what_torch_does(folder: Path, tmp_path: Path, case: str) -> None:
    """A prompt in chunks, tokens, and a batch whose shorter row has padding in front, which the session moves behind
    its tokens: the steps that follow find a hole there."""
    weights, kv, dtype, bound = CASES[case]
    source = folder
    if weights:
        source = tmp_path / "quantized"
        scheme = Scheme(weights=parse_format(weights), attention=AttentionScheme(keys=kv, values=kv))
        quantize_checkpoint(folder, source, scheme)
    artifact = export_artifact(source, tmp_path / "onnx", dtype=dtype)
    assert verify(artifact).passed
    long, short = IDS[:1], IDS[1:, :17]
    with torch.inference_mode():
        model = reference_model(source)
        expected, expected_short = model(long)[0], model(short)[0]
    mask = np.ones((2, 18), np.int64)
    mask[1, :3] = 0
    padded = np.concatenate([long[:, :18], np.roll(IDS[1:, :18], 3, axis=1)])
    for native in (False, True):
        session = Session(artifact, threads=1, native=native)
        ids = long.numpy()
        logits = [session.prefill(ids[:, a:b], all_positions=True)[0] for a, b in ((0, 2), (2, 11), (11, 18))]
        logits += [session.step(ids[:, i : i + 1]) for i in (18, 19)]
        assert relative_error(np.concatenate(logits), expected).max() < bound, native
        session.reset()
        logits = [session.prefill(padded, mask)]
        logits += [session.step([[long[0, 18 + i]], [short[0, 15 + i]]]) for i in (0, 1)]
        both = torch.stack([expected[-3:], expected_short[-3:]], 1)
        assert relative_error(np.stack(logits), both).max() < bound, native


def layer_of(decoder: Decoder, scheme: Scheme) -> Layer:
    return next(layer for layer in layers(decoder, scheme) if layer.index == 0)


@pytest.mark.parametrize("method", [rotate, awq])
def test_methods_change_only_in_proj_and_o_proj(folder: Path, method: ModuleType) -> None:
    """Rotation and scales reach in_proj and o_proj alone, and the model computes the same."""
    decoder = load(folder)
    scaled = transformed(decoder, method, Scheme(weights=parse_format("int4_g32")), IDS)
    with torch.inference_mode():
        assert relative_error(scaled(IDS).numpy(), decoder(IDS)).max() < 1e-3
    before, after = (dict(model.model.layers[0].self_attn.named_parameters()) for model in (decoder, scaled))
    same = {name for name in before if torch.equal(before[name], after[name])}
    others = {"o_proj.weight"} if method is awq else set()
    assert same == {*before} - {"in_proj.weight", "o_proj.weight"} | others


def test_stages_are_what_each_linear_is_handed(folder: Path) -> None:
    layer = layer_of(load(folder), Scheme(weights=parse_format("int4_g32")))
    stages = [[name.rpartition(".")[2] for name in stage] for stage in layer.stages()]
    assert stages == [["in_proj"], ["x_proj"], ["dt_proj"], ["o_proj"], ["gate_proj", "up_proj"], ["down_proj"]]


def test_gptq_helps_every_linear(folder: Path) -> None:
    """On the inputs that inner linears are really given it errs less than rounding to nearest."""
    scheme, ids = (
        Scheme(weights=parse_format("int3_g32")),
        torch.randint(0, 61, (8, 32), generator=torch.Generator().manual_seed(2)),
    )
    errors = []
    for method in ("rtn", "gptq"):
        report = quantize_checkpoint(folder, folder.with_name(method), scheme, method=method, calibration=ids)
        errors.append({row.name: row.output_error for row in report.weights if ".layers." in row.name})
    assert len(errors[0]) == 21 and all(errors[1][name] < error for name, error in errors[0].items())
