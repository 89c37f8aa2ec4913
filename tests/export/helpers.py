"""Tiny models, their artifacts, and ONNX Runtime sessions that hold a cache in both of the ways that loaders do."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor

from diffbit.export import export_artifact
from diffbit.formats import Format, QTensor, parse_format
from diffbit.models import Decoder, ModelConfig, save
from diffbit.quantize import Scheme, quantize_checkpoint

from ..configs import resized

VARIANTS = ("softmax", "diff_v1", "diff_v2")
CONFIG = ModelConfig.uniform(
    vocab_size=61, hidden_size=64, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=32, intermediate_size=128,
    max_position=48, eos_token_ids=(3,), bos_token_id=1,
)  # fmt: skip


def config_of(attention: str, **changes: object) -> ModelConfig:
    return resized(CONFIG, attention=attention, **changes)


def write_model(folder: Path, config: ModelConfig, dtype: torch.dtype = torch.float32) -> Path:
    """A random checkpoint whose logits differ between tokens, with a tokenizer."""
    torch.manual_seed(0)
    decoder = Decoder(config)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if parameter.dim() == 2:
                parameter.mul_(6)
            elif "norm" in name or name.endswith("bias"):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    save(decoder, folder, dtype=dtype)
    write_tokenizer(folder, config.vocab_size)
    return folder


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """The smallest of tokenizers."""
    from tokenizers import Tokenizer, models

    words = {f"w{i}": i for i in range(vocab_size)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))


def write_quantized(source: Path, format: str) -> Path:
    folder = source.with_name(f"{source.name}-{format}")
    quantize_checkpoint(source, folder, Scheme(weights=parse_format(format)), method=by_range)
    return folder


def by_range(weight: Tensor, format: Format, stats: Any) -> QTensor:
    """Round with the scales of the range: no method's search moves these models to where activations, between two
    integers, are rounded to another one in torch than in ONNX Runtime."""
    return format.nearest(weight, *format.fit(weight))


def write_artifact(checkpoint: Path, dtype: str = "fp32", kv: str | None = None) -> Path:
    folder = checkpoint.with_name(f"{checkpoint.name}-{dtype}-{kv}-onnx")
    return folder if folder.exists() else export_artifact(checkpoint, folder, dtype=dtype, kv=kv)


def graph_of(artifact: Path) -> onnx.ModelProto:
    return onnx.load(artifact / "model.onnx", load_external_data=False)


def open_session(artifact: Path, profile: Path | None = None) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    if profile is not None:
        options.enable_profiling = True
        options.profile_file_prefix = str(profile)
    return onnxruntime.InferenceSession(artifact / "model.onnx", options, providers=["CPUExecutionProvider"])


class Runner:
    """Calls of one graph. capacity None: the cache grows; else it is a buffer of so many tokens, bound as past and as
    present where `in_place`, handed over and taken back where not."""

    def __init__(
        self, artifact: Path, config: ModelConfig, *, capacity: int | None = None, in_place: bool = False
    ) -> None:
        self.session = open_session(artifact)
        self.config, self.capacity, self.in_place = config, capacity, in_place
        self.heads = config.layers[0].mixer.cache_heads
        self.dtype = np.float16 if "float16" in self.session.get_inputs()[-1].type else np.float32
        self.names = [f"{i}.{part}" for i in range(config.num_layers) for part in ("key", "value")]
        self.cache: list[onnxruntime.OrtValue] = []

    def __call__(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """ids [B, S], mask [B, T] -> logits [B, S, V]; positions count real tokens."""
        batch, steps = ids.shape
        past = mask.shape[1] - steps
        if not past:
            # what lies beyond the past must never be read as a number that counts
            shape = (batch, self.heads, self.capacity or 0, self.config.rope_width)
            self.cache = [onnxruntime.OrtValue.ortvalue_from_numpy(np.full(shape, 777, self.dtype)) for _ in self.names]
        binding = self.session.io_binding()
        feeds = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": np.maximum(mask.cumsum(1) - 1, 0)[:, past:],
        }
        values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(x)) for name, x in feeds.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        binding.bind_output("logits")
        for name, value in zip(self.names, self.cache, strict=True):
            binding.bind_ortvalue_input(f"past_key_values.{name}", value)
            if self.in_place:
                binding.bind_ortvalue_output(f"present.{name}", value)
            else:
                binding.bind_output(f"present.{name}")
        self.session.run_with_iobinding(binding)
        logits, *present = binding.get_outputs()
        for value in present:
            assert value.shape() == [batch, self.heads, self.capacity or mask.shape[1], self.config.rope_width]
        if not self.in_place:  # the OrtValues made here own the buffers
            self.cache = present
        return logits.numpy()


def modes(config: ModelConfig) -> Iterator[dict[str, object]]:
    """The ways to hold a cache that the variant's graph offers."""
    yield {}
    yield {"capacity": config.max_position}
    if config.layers[0].mixer.in_place:
        yield {"capacity": config.max_position, "in_place": True}


def relative_error(actual: np.ndarray, expected: torch.Tensor) -> np.ndarray:
    """[..., V] -> [...]: the largest difference, relative to the standard deviation of the wanted logits."""
    right = expected.double().numpy()
    return np.abs(actual.astype(np.float64) - right).max(-1) / right.std(-1)
