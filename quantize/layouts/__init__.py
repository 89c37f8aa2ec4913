"""Layouts of quantized weights in a checkpoint folder: one file for each `quant_method` of config.json.

    diffbit              codes, scales and zero points by name                 diffbit's own
    gptq                 <linear>.qweight, .qzeros, .scales        GPTQModel, AutoGPTQ: 2, 3, 4 and 8 bits
    awq                  the same, packed along out_features       AutoAWQ: 4 bits, "gemm" and "gemv"
    auto_round           either of these                           AutoRound
    compressed_tensors   <linear>.weight_packed, .weight_scale     llm-compressor, vLLM: integers of 2 to 8 bits
    bitsandbytes         <linear>.weight, .weight.absmax, ...      nf4 and fp4
    bitnet               <linear>.weight, .weight_scale            ternary

Packages can add more (io/plugins.py). Each file makes LAYOUT, a `Layout`. Codes, zero points and scales of other
libraries become one of diffbit's formats (formats/) without rounding again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...formats import Format, QTensor
from ...io import plugins
from ...io.errors import DiffbitError
from ...io.fields import get, shown
from ...models import Checkpoint, ModelConfig
from ...models.checkpoint.names import EMBEDDING, is_linear, linear_of, shapes
from ..scheme import Scheme

__all__ = ["Layout", "Weights", "layouts", "read_scheme", "read_weight"]

FOREIGN = {  # what a quant_method is that diffbit does not read
    "fp8": " (8-bit floats, as DeepSeek-V3's)",
    "fbgemm_fp8": " (8-bit floats, by FBGEMM)",
    "mlx": " (mlx-lm's layout)",
    "modelopt": " (NVIDIA ModelOpt's layout)",
    "mxfp4": " (4-bit floats, as gpt-oss's)",
}


@dataclass(frozen=True)
class Layout:
    """How a folder stores quantized weights. Tensors have the row order on disk.

    parts     suffixes of the names of a linear layer's tensors; one that ends with a dot is a prefix of several
    scheme    (checkpoint) -> Scheme: the format of each weight
    read      (checkpoint, linear layer, format) -> QTensor
    settings  (config, scheme) -> the quantization_config of such a folder; raises DiffbitError if it cannot hold the
              scheme. None: diffbit only reads this layout
    pack      (weight, settings) -> {suffix: tensor}
    """

    name: str
    parts: tuple[str, ...]
    scheme: Callable[[Checkpoint], Scheme]
    read: Callable[[Checkpoint, str, Format], QTensor]
    settings: Callable[[ModelConfig, Scheme], dict[str, Any]] | None = None
    pack: Callable[[QTensor, Mapping[str, Any]], dict[str, Tensor]] | None = None

    def has_part(self, name: str) -> bool:
        """Whether a folder of this layout may have a tensor of this name, which no float folder has."""
        part = name.removeprefix(f"{linear_of(name)}.")
        return part == "bias" or any(part.startswith(p) if p.endswith(".") else part == p for p in self.parts)


def layouts() -> dict[str, Layout]:
    """Return {quant_method: layout} of all layouts."""
    files = [plugins.load(__name__, name).LAYOUT for name in plugins.names(__name__)]
    return {layout.name: layout for layout in files}


def _layout_of(checkpoint: Checkpoint) -> Layout | None:
    """Return the layout of a quantized folder; None for a float one."""
    entry = checkpoint.quantization
    if entry is None:
        return None
    known = layouts()
    name = "quantizer" if "quantizer" in entry and "quant_method" not in entry else "quant_method"
    where = f"{checkpoint.path / 'config.json'}: quantization_config"
    method = get(entry, name, str, place=where)
    if method not in known:
        raise DiffbitError(
            f"{where}.{name} is {shown(method)}{FOREIGN.get(method, '')}, wanted one of {', '.join(sorted(known))}; "
            "start from the float checkpoint"
        )
    return known[method]


class Weights:
    """The parameters of a float or quantized checkpoint, in canonical row order.

    scheme: None for a float checkpoint. formats: {linear layer or embedding: Format} of those that are quantized.
    Raises DiffbitError for an unknown layout, and for tensors that do not belong to it.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.formats: dict[str, Format] = {}
        self.scheme: Scheme | None = None
        self._layout = _layout_of(checkpoint)
        if self._layout is None:
            return
        self.scheme = self._layout.scheme(checkpoint)
        known = shapes(checkpoint.config)
        for name in checkpoint.names:
            if name not in known and not self._layout.has_part(name):
                raise DiffbitError(
                    f"{checkpoint.path}: holds tensor {name}, which a folder of quant_method {self._layout.name} does "
                    "not have; config and weights do not belong together"
                )
        self.formats = self.scheme.chosen(checkpoint.config)

    def read(self, name: str) -> Tensor | QTensor:
        """Read a parameter by its float name: a Tensor in its stored dtype, or a QTensor if it is quantized."""
        checkpoint, module = self.checkpoint, name.removesuffix(".weight")
        format = self.formats.get(module) if is_linear(name) or name == EMBEDDING else None
        if format is None:
            shape = shapes(checkpoint.config).get(name)
            if name not in checkpoint.names or not checkpoint.is_float(name) or checkpoint.shape(name) != shape:
                raise DiffbitError(
                    f"{checkpoint.path}: config.json says that {name} is float, but the weights do not have it so; "
                    "config and weights do not belong together"
                )
            return checkpoint.read(name)
        assert self._layout is not None
        self._check_no_bias(f"{module}.bias")
        try:
            weight = self._layout.read(checkpoint, module, format)
        except DiffbitError as error:
            if str(error).startswith(str(checkpoint.path)):
                raise
            raise DiffbitError(f"{checkpoint.path}: {module}: {error}") from None
        # rounded inputs of 8 bits and codes are summed as integers before they are scaled
        if not (weight.scale.float().abs().amax() * 127 * weight.shape[1] * format.codes).isfinite():
            raise DiffbitError(
                f"{checkpoint.path}: {module}: its scale of {weight.scale.abs().amax():.1e} makes its products "
                "infinite; the checkpoint is damaged"
            )
        # codes that depend on other rows' are put in order before they are unpacked (diffbit.py)
        order = None if format.by_columns else checkpoint.row_order(name)
        return weight if order is None else weight.rows(order)

    def _check_no_bias(self, name: str) -> None:
        """Raise DiffbitError for a bias that the model does not have, except zeros, which AutoGPTQ writes."""
        checkpoint = self.checkpoint
        if name in checkpoint.names and name not in shapes(checkpoint.config) and checkpoint.read_raw(name).any():
            raise DiffbitError(
                f"{checkpoint.path}: tensor {name} is a bias, which a {checkpoint.config.attention} model of its "
                "config.json does not have; config and weights do not belong together"
            )


def read_scheme(checkpoint: Checkpoint) -> Scheme | None:
    """Return the scheme of a quantized checkpoint; None for a float one. Raises DiffbitError as `Weights` does."""
    return Weights(checkpoint).scheme


def read_weight(checkpoint: Checkpoint, name: str) -> Tensor | QTensor:
    """Read one parameter, as `Weights.read` does; for several, make one `Weights`."""
    return Weights(checkpoint).read(name)
