"""Writes a checkpoint folder: config.json, safetensors (one file, or one per layer) and tokenizer.

The folder appears under its name only when it is complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from ...io import files
from ...io.errors import DiffbitError
from ...io.safetensors import write_tensors
from ...io.tokenizer_files import tokenizer_files
from ..config import ModelConfig
from ..decoder import Decoder, num_parameters
from ..families import family_for, write_config
from .adapter import PREFIX, A, B
from .folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, INDEX, SINGLE
from .names import is_linear, layer_of, linear_of, reorder, shapes, stays_float32
from .read import Checkpoint

DTYPES = ("float32", "bfloat16", "float16")
SINGLE_FILE_LIMIT = 2 << 30  # bytes; `save` writes larger models one file per layer


class CheckpointWriter:
    """`with CheckpointWriter(folder, config) as writer: writer.add(name, tensor)` for every tensor, in any order.

    dtype: the float tensors' type in config.json ("float32", "bfloat16", "float16"); tensors are stored in the dtype
    they have. shard_layers: write one file per layer as soon as it is complete, so that only one layer is in memory.
    quantization: the "quantization_config" of config.json. tokenizer_from: a folder, a tokenizer.json, a GGUF file, or
    the contents of the tokenizer's files by name.
    Other files may be added to `folder`, which has another name until it is complete.
    """

    def __init__(
        self,
        folder: str | Path,
        config: ModelConfig,
        *,
        quantization: dict[str, Any] | None = None,
        dtype: str = "float32",
        shard_layers: bool = False,
        tokenizer_from: str | Path | Mapping[str, bytes] | None = None,
        overwrite: bool = False,
    ) -> None:
        if dtype not in DTYPES:
            raise DiffbitError(f"dtype is {dtype!r}, wanted one of {', '.join(DTYPES)}")
        self.config = config
        self._family = family_for(config)
        self.quantization = quantization
        self.dtype = dtype
        self.shard_layers = shard_layers
        self.tokenizer_from = Path(tokenizer_from) if isinstance(tokenizer_from, str) else tokenizer_from
        self._target = files.new_folder(folder, overwrite=overwrite)
        self._pending: dict[str, Tensor] = {}
        self._shards: list[dict[str, int]] = []  # per file: {tensor: bytes}
        self.folder = Path()

    def __enter__(self) -> Self:
        self.folder = self._target.__enter__()
        return self

    def add(self, name: str, tensor: Tensor) -> None:
        """Store a tensor, given in canonical row order, under its canonical name."""
        weight = f"{linear_of(name)}.weight"
        self.add_raw(name, reorder(tensor.detach(), self.row_order(weight if weight in shapes(self.config) else name)))

    def row_order(self, name: str) -> Tensor | None:
        """Return the row order of this parameter: on disk = canonical[order]; None: the same."""
        order = self._family.stored(self.config, name).rows
        return None if order is None else torch.argsort(order)

    def add_raw(self, name: str, tensor: Tensor) -> None:
        """Store a tensor as it is."""
        if self.shard_layers and self._pending and layer_of(name) != layer_of(next(iter(self._pending))):
            self._flush()
        self._pending[name] = tensor.detach().cpu().contiguous()

    def add_layer(self, tensors: Mapping[str, Tensor]) -> None:
        """Store all tensors of a layer, and write them if layers are sharded."""
        for name, tensor in tensors.items():
            self.add(name, tensor)
        if self.shard_layers and self._pending:
            self._flush()

    def _flush(self) -> None:
        file = self.folder / f"shard-{len(self._shards)}"
        write_tensors(file, self._pending, {"format": "pt"})
        self._shards.append({name: tensor.nbytes for name, tensor in self._pending.items()})
        self._pending = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self._finish()
            except BaseException as problem:
                self._target.__exit__(type(problem), problem, problem.__traceback__)
                raise
        self._target.__exit__(kind, error, trace)

    def _finish(self) -> None:
        if self._pending:
            self._flush()
        if len(self._shards) == 1:
            (self.folder / "shard-0").rename(self.folder / SINGLE)
        else:
            weight_map: dict[str, str] = {}
            for index, names in enumerate(self._shards):
                shard = f"model-{index + 1:05d}-of-{len(self._shards):05d}.safetensors"
                (self.folder / f"shard-{index}").rename(self.folder / shard)
                weight_map |= dict.fromkeys(names, shard)
            total = sum(size for names in self._shards for size in names.values())
            files.write_json(self.folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        files.write_json(self.folder / "config.json", write_config(self.config, self.dtype, self.quantization))
        self._copy_tokenizer()
        Checkpoint(self.folder)  # checks now that every tensor exists in the right shape

    def _copy_tokenizer(self) -> None:
        source = self.tokenizer_from
        if source is None:
            return
        if isinstance(source, Path) and not source.exists():
            raise DiffbitError(f"{source}: no such tokenizer file or folder")
        for name, data in (tokenizer_files(source) if isinstance(source, Path) else source).items():
            (self.folder / name).write_bytes(data)


def save(
    decoder: Decoder,
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    tokenizer_from: str | Path | Mapping[str, bytes] | None = None,
    overwrite: bool = False,
) -> None:
    """Write a float model with weights as `dtype`; diff_v1's lambda vectors are always float32."""
    total = num_parameters(decoder.config) * dtype.itemsize
    with CheckpointWriter(
        path,
        decoder.config,
        dtype=str(dtype).removeprefix("torch."),
        shard_layers=total > SINGLE_FILE_LIMIT,
        tokenizer_from=tokenizer_from,
        overwrite=overwrite,
    ) as writer:
        for name in shapes(decoder.config):  # during training a model may have other parameters, too
            parameter = decoder.get_parameter(name)
            writer.add(name, parameter.to(torch.float32 if stays_float32(name) else dtype))


def save_adapter(folder: str | Path, base: Checkpoint, adapters: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Write a LoRA adapter in PEFT's layout (adapter.py): what to add to the weights of `base`.

    adapters: {module: (A [r, K], B [N, r])}, of canonical names and row order; the weight becomes W + B A. Modules that
    transformers has as one, such as queries, keys and values of some families, get one adapter of their ranks' sum.
    """
    halves: dict[str, list[tuple[Tensor, Tensor, int, int]]] = {}
    for module, (down, up) in adapters.items():
        place, norm = base.in_transformers(f"{module}.weight"), base.norm_in(f"{module}.weight")
        up = reorder(up, None if place.rows is None else torch.argsort(place.rows)) / place.times
        down = down if norm is None else down / norm
        rows = place.of_rows or len(up)
        halves.setdefault(place.names[0].removesuffix(".weight"), []).append((down, up, place.first, rows))
    tensors: dict[str, Tensor] = {}
    ranks: dict[str, int] = {}
    for there, parts in halves.items():
        ranks[there] = sum(len(down) for down, *_ in parts)
        whole, column = parts[0][1].new_zeros(parts[0][3], ranks[there]), 0
        for down, up, first, _ in parts:
            whole[first : first + len(up), column : column + len(down)] = up
            column += len(down)
        tensors[f"{PREFIX}{there}.{A}"] = torch.cat([down for down, *_ in parts]).contiguous()
        tensors[f"{PREFIX}{there}.{B}"] = whole
    rank = min(ranks.values())
    others = {module: count for module, count in ranks.items() if count != rank}
    linears = {
        base.in_transformers(name).names[0].removesuffix(".weight") for name in shapes(base.config) if is_linear(name)
    }
    ends = {module.rpartition(".")[2] for module in ranks}
    are_all = all(module in ranks for module in linears if module.rpartition(".")[2] in ends)
    values = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": str(base.path),
        "inference_mode": True, "r": rank, "lora_alpha": rank, "lora_dropout": 0.0, "bias": "none",
        "use_rslora": False, "use_dora": False, "fan_in_fan_out": False, "init_lora_weights": True,
        "target_modules": sorted(ends if are_all else ranks), "rank_pattern": others, "alpha_pattern": others,
        "modules_to_save": None,
    }  # fmt: skip
    with files.new_folder(folder) as temporary:
        write_tensors(temporary / ADAPTER_WEIGHTS, tensors, {"format": "pt"})
        files.write_json(temporary / ADAPTER_CONFIG, values)
