"""Writes a ternary checkpoint as a Hugging Face `bitnet` folder, which transformers reads: two bits per weight.

The layout is that of microsoft/bitnet-b1.58-2B-4T: linear_class "autobitlinear", quantization_mode "offline"
(quantize/bitnet_hf.py explains them). Codes and scales read back bit for bit. "bitlinear" is not written: it stores the
reciprocal of the scale, whose reciprocal in float32 is not always the scale.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from .. import files
from ..errors import DiffbitError
from ..models import Checkpoint, CheckpointWriter
from ..models.attention import softmax
from ..models.checkpoint.names import HEAD, shapes
from ..progress import track
from ..quantize import linear_shapes, read_scheme, read_weight
from ..quantize.bitnet_hf import PER_BYTE, pack
from ..quantize.cache import is_low_bit
from ..quantize.demand import in_shards
from ..quantize.formats.ternary import FORMAT
from ..quantize.scheme import EMBEDDING_MODULE

SETTINGS = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}


def export_bitnet(
    checkpoint: str | Path, out: str | Path, *, tokenizer: str | Path | None = None, overwrite: bool = False
) -> Path:
    """Write a ternary checkpoint to the folder `out`, one tensor in memory at a time, and return the folder.

    tokenizer: a tokenizer.json, or a folder with one, to use instead of the checkpoint's own.
    """
    source = Checkpoint(checkpoint)
    files.check_apart(out, source.path, *([] if tokenizer is None else [tokenizer]))
    kept = _float_layers(source)
    names = shapes(source.config)
    with CheckpointWriter(
        out,
        source.config,
        quantization=SETTINGS | ({"modules_to_not_convert": kept} if len(kept) > 1 else {}),
        dtype=source.dtype,
        shard_layers=in_shards(source.config, getattr(torch, source.dtype)),
        tokenizer_from=source.path if tokenizer is None else tokenizer,
        overwrite=overwrite,
    ) as writer:
        for name in track(names, "exporting", total=len(names)):
            weight = read_weight(source, name)
            if isinstance(weight, Tensor):
                writer.add(name, weight)
            else:
                writer.add(name, pack(weight.codes))
                writer.add(f"{name}_scale", weight.scale.view(1))
    return Path(out)


def _float_layers(source: Checkpoint) -> list[str]:
    """Return the head and the other float linear layers; raises DiffbitError if something cannot be written."""
    config, head = source.config, HEAD.removesuffix(".weight")
    scheme = read_scheme(source)
    formats = {} if scheme is None else scheme.formats(config)

    def refuse(found: str, wanted: str) -> DiffbitError:
        return DiffbitError(f"{source.path}: {found}, which a Hugging Face bitnet folder cannot hold; {wanted}")

    mixers = [layer.mixer for layer in config.layers]
    if not all(isinstance(mixer, softmax.Options) for mixer in mixers):
        raise refuse(f"its attention is {config.attention}", "transformers' BitNet model has softmax attention")
    if scheme is None or not formats:
        raise refuse("its weights are float", "wanted ternary ones, as diffbit train --qat ternary makes them")
    if scheme.activations == "int4":
        raise refuse("its activations are int4", "wanted a model trained with --activations int8")
    if is_low_bit(scheme.attention):
        raise refuse("its attention is in low bits", "wanted a checkpoint with ternary weights and no more")
    if head in formats or EMBEDDING_MODULE in formats:
        raise refuse("its head or embedding is quantized", "quantize with --embedding none --head none")
    for module, format in formats.items():
        if format != FORMAT:
            raise refuse(f"{module} is {format}", "wanted ternary or float layers")
        if linear_shapes(config)[module][0] % PER_BYTE:
            raise refuse(f"{module} has {linear_shapes(config)[module][0]} rows", f"wanted a multiple of {PER_BYTE}")
    width = next(mixer.num_heads * mixer.head_dim for mixer in mixers if isinstance(mixer, softmax.Options))
    if config.sub_norms and width != config.hidden_size:
        raise refuse(
            f"its heads are {width} wide together and its hidden states {config.hidden_size}",
            "transformers' BitNet model has both of one width",
        )
    return [head, *(module for module in linear_shapes(config) if module not in formats and module != head)]
