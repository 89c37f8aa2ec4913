"""Lets transformers read diffbit's quantized checkpoints:

    import diffbit.apps.hub.transformers
    model = AutoModelForCausalLM.from_pretrained("out/diff-int4")

Quantized linear layers and embeddings become QuantLinear and QuantEmbedding (formats/linear.py), which multiply by
dequantized weights and round activations according to the scheme; the rest is transformers' own model. On disk the rows
of codes and scales are in Hugging Face's order, like the rows of the weights, so they are used as they are.

config.json has "quantizer": "diffbit" and no "quant_method", so without this module transformers raises an error for
such a folder. With a quant_method that it does not know, it would load random weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.quantizers.auto import AutoHfQuantizer, register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ...formats import Format, QTensor, QuantEmbedding
from ...io.errors import DiffbitError
from ...io.safetensors import read_header
from ...models.checkpoint import is_linear
from ...models.families import model_types
from ...quantize import EMBEDDING_MODULE, HEAD_MODULE, Scheme, quant_linear

NAME = "diffbit"


@register_quantization_config(NAME)
class DiffbitConfig(QuantizationConfigMixin):
    """The quantization_config of a config.json, unchanged."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values, quant_method=NAME)


class Packed(nn.Module):
    """Placeholder into which transformers reads the parts of a quantized weight (QTensor.parts)."""

    bias: nn.Parameter | None

    def __init__(self, format: Format, shape: tuple[int, int], bias: nn.Parameter | None, device: torch.device) -> None:
        super().__init__()
        self.format, self.shape = format, shape
        scales = format.scale_shape(shape)
        parts = {
            "codes": torch.empty(format.packed_shape(shape), dtype=torch.uint8, device=device),
            "scale": torch.empty(scales, dtype=format.write_scale(torch.ones(1, 1)).dtype, device=device),
        }
        if format.tensor_scaled:
            parts["tensor_scale"] = torch.empty(1, 1, device=device)
        if not format.symmetric:
            zeros = (shape[0], (scales[1] * format.bits + 7) // 8)
            parts["zero"] = torch.empty(zeros, dtype=torch.uint8, device=device)
        self.names = tuple(parts)
        for name, tensor in parts.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))
        self.register_parameter("bias", bias)

    def weight(self) -> QTensor:
        parts = {name: self.get_parameter(name).detach() for name in self.names}
        return QTensor.from_packed(self.format, self.shape, **parts)


@register_quantizer(NAME)
class DiffbitQuantizer(HfQuantizer):
    """Loads a checkpoint that diffbit quantized. It does not quantize; use `diffbit quantize` for that."""

    requires_calibration = True  # so transformers raises an error for a float model
    is_trainable = False

    def __init__(self, quantization_config: QuantizationConfigMixin, **options: Any) -> None:
        super().__init__(quantization_config, **options)
        self.scheme = Scheme.from_entry(quantization_config.to_dict(), "config.json: quantization_config")
        if parts := self.scheme.attention.describe():
            raise DiffbitError(
                f"the checkpoint's attention is quantized ({parts}), which transformers cannot compute; use "
                "diffbit.load, or `diffbit export` and `diffbit run`"
            )

    def is_serializable(self) -> bool:
        return False

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        self.dtype = dtype  # of the weights that are not quantized
        return dtype

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **options: Any) -> None:
        below = "" if model.base_model is not model else f"{model.base_model_prefix}."  # AutoModel's names lack it
        expected = []
        for name, module in list(model.named_modules()):
            known = below + name
            if not isinstance(module, nn.Linear | nn.Embedding) or not (
                is_linear(f"{known}.weight") or known == EMBEDDING_MODULE
            ):
                continue
            format = self.scheme.format_for(known)
            if format is None or (known == HEAD_MODULE and model.config.tie_word_embeddings):
                continue
            shape = (module.weight.shape[0], module.weight.shape[1])
            packed = Packed(format, shape, getattr(module, "bias", None), module.weight.device)
            model.set_submodule(name, packed)
            expected += [f"{known}.{part}" for part in packed.names]
            if known == EMBEDDING_MODULE and model.config.tie_word_embeddings:  # the head gets the same QTensor later
                model._tied_weights_keys, model.all_tied_weights_keys = {}, {}
                if model.get_output_embeddings() is not None:
                    model.set_output_embeddings(nn.Identity())
        _check_files(options.get("checkpoint_files") or (), expected)

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **options: Any) -> None:
        for name, module in list(model.named_modules()):
            if not isinstance(module, Packed):
                continue
            weight = module.weight()
            if name.rpartition(".")[2] != EMBEDDING_MODULE.rpartition(".")[2]:
                model.set_submodule(name, quant_linear(name, weight, self.scheme, module.bias))
                continue
            model.set_submodule(name, QuantEmbedding(weight, self.dtype))
            if isinstance(model.get_output_embeddings(), nn.Identity):
                model.set_output_embeddings(quant_linear(HEAD_MODULE, weight, self.scheme))


def _check_files(files: Sequence[str], expected: Sequence[str]) -> None:
    """Raise DiffbitError for a missing tensor, which transformers would fill with random numbers."""
    stored = {name for file in files for name in read_header(Path(file))}
    if missing := [name for name in expected if name not in stored]:
        raise DiffbitError(
            f"{Path(files[0]).parent if files else 'the checkpoint'}: the scheme in config.json needs {missing[0]}, "
            "which is not among the weights; config.json and the weights do not belong together"
        )


_supports = AutoHfQuantizer.supports_quant_method


def _supports_quant_method(entry: dict[str, Any]) -> bool:
    """Set the quant_method of diffbit's entries; transformers calls this before it reads the rest of an entry."""
    if entry.get("quantizer") == NAME:
        entry["quant_method"] = NAME
    return bool(_supports(entry))


setattr(AutoHfQuantizer, "supports_quant_method", staticmethod(_supports_quant_method))  # noqa: B010


class _Unknown(PretrainedConfig):
    """The config of a family that transformers does not support."""

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **options: Any) -> NoReturn:
        raise DiffbitError(
            f"transformers has no model of model_type {cls.model_type!r}; use diffbit.load, or `diffbit export` and "
            "`diffbit run`"
        )


for _type in sorted(model_types() - set(CONFIG_MAPPING)):
    AutoConfig.register(_type, type("_Unknown", (_Unknown,), {"model_type": _type}))

with suppress(ModuleNotFoundError):  # transformers before 5.23 has no exporters
    from . import exporter as exporter
