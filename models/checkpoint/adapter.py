"""Reads a LoRA adapter in the layout of PEFT (github.com/huggingface/peft), to merge it into its base model.

    adapter_config.json          r, lora_alpha, ...
    adapter_model.safetensors    A: base_model.model.MODULE.lora_A.weight [r, K]
                                 B: base_model.model.MODULE.lora_B.weight [N, r]

    W' = W + scale B A,    scale = lora_alpha / r, or lora_alpha / sqrt(r) with use_rslora         (arXiv 2106.09685)

MODULE is a name of the base model in transformers, such as model.layers.0.self_attn.q_proj. An embedding's adapters are
lora_embedding_A [r, V] and lora_embedding_B [E, r], of its transposed weight. Other tensors replace the model's
(modules_to_save). `Checkpoint(path, adapter=...)` applies both, one tensor at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from torch import Tensor

from ...io import files
from ...io.errors import DiffbitError
from ...io.fields import Count, Positive, get, located, one_of, shown
from ...io.safetensors import Entry, read_header
from .folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS, inside
from .names import FLOATS

PREFIX = "base_model.model."
A, B = "lora_A.weight", "lora_B.weight"
EMBEDDING_A, EMBEDDING_B = "lora_embedding_A", "lora_embedding_B"
# Fields that do not change what a merged adapter computes, and those that are read here. Any other that is set is
# refused, also one of a PEFT that is newer than this file.
HARMLESS = frozenset((
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "ensure_weight_tying",
    "eva_config", "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_alpha", "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_type",
    "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules",
    "task_type", "use_rslora", "velora_config",
))  # fmt: skip
# Initial values of adapters that leave the base model as it is; pissa, olora, corda, loftq and lora_ga subtract them
# from it
STARTS = (True, False, "gaussian", "eva", "orthogonal", "mica")
MERGE = "merge it with peft (model.merge_and_unload()) and pass the merged model"


@dataclass(frozen=True)
class LowRank:
    """What is added to a weight [N, K]: scale * up @ down. transposed: of an embedding, whose adapters are of W^T."""

    down: Entry
    up: Entry
    scale: float
    transposed: bool

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.up.shape[0], self.down.shape[1]
        return (columns, rows) if self.transposed else (rows, columns)

    def read(self) -> tuple[Tensor, Tensor]:
        """Return up [N, r] and down [r, K], float32; their product times `scale` is added to the weight."""
        up, down = (_finite(entry).float() for entry in (self.up, self.down))
        return (down.T, up.T) if self.transposed else (up, down)


@dataclass(frozen=True)
class Adapter:
    """An adapter's folder, opened and checked. added, replaced: by the name of the tensor in transformers."""

    path: Path
    base: str  # the model that it was trained on, as its config names it
    ties: bool  # ensure_weight_tying
    added: dict[str, LowRank]
    replaced: dict[str, Entry]

    @classmethod
    def open(cls, path: str | Path) -> Self:
        """Raises DiffbitError for a folder without an adapter, and for what is not computed here (DoRA, ...)."""
        folder = Path(path)
        if not folder.is_dir():
            what = "is a file, wanted a folder" if folder.exists() else "no such folder; wanted one"
            raise DiffbitError(f"{folder}: {what} with {ADAPTER_CONFIG} and {ADAPTER_WEIGHTS}")
        if not (folder / ADAPTER_CONFIG).is_file():
            raise DiffbitError(f"{folder}: holds no {ADAPTER_CONFIG}, so it is no LoRA adapter in PEFT's layout")
        config = inside(folder, ADAPTER_CONFIG, folder)
        values = files.read_json(config)
        with located(config):
            _check(values)
        if not (folder / ADAPTER_WEIGHTS).exists():
            pickle = folder / f"{Path(ADAPTER_WEIGHTS).stem}.bin"
            if pickle.exists():
                raise DiffbitError(
                    f"{pickle}: is a pickle, which can run code when it is opened, so it is not read; save the adapter "
                    "as safetensors (in peft: model.save_pretrained(FOLDER))"
                )
            raise DiffbitError(f"{folder}: holds no {ADAPTER_WEIGHTS}; copy the missing file")
        weights = inside(folder, ADAPTER_WEIGHTS, folder)
        low_rank, replaced = _sorted(weights)
        added = {}
        for module, ((down, up), transposed) in low_rank.items():
            where = f"{weights}: the adapter of {module}"
            with located(where):
                if len(down.shape) != 2 or len(up.shape) != 2 or down.shape[0] != up.shape[1] or 0 in down.shape:
                    raise DiffbitError(f"has shapes {down.shape} and {up.shape}, wanted [r, K] and [N, r]")
            with located(config):
                scale = _scale(values, module, down.shape[0])
            added[f"{module}.weight"] = LowRank(down, up, scale, transposed)
        return cls(folder, base_of(values), bool(values.get("ensure_weight_tying")), added, replaced)

    @property
    def sources(self) -> set[Path]:
        """The files that it is read from."""
        return {self.path / ADAPTER_CONFIG, self.path / ADAPTER_WEIGHTS}


def base_of(values: Mapping[str, Any]) -> str:
    """Return the name of the base model in an adapter_config.json; "" if it names none."""
    return get(values, "base_model_name_or_path", str, "")


def merged(weight: Tensor, low_rank: LowRank, rows: Tensor | None, first: int) -> Tensor:
    """Return weight + scale * B A in float32, for a weight [n, K] that is rows first ... first + n of the adapter's,
    put into the order `rows` (None: as they are)."""
    up, down = low_rank.read()
    up = up[first : first + len(weight)]
    return torch.addmm(weight.float(), up if rows is None else up[rows], down, alpha=low_rank.scale)


def _check(values: Mapping[str, Any]) -> None:
    if "peft_type" not in values and "lora_parameters" in values:
        raise DiffbitError("is of mlx-lm's adapter, wanted PEFT's; fuse it (mlx_lm.fuse) and pass the fused model")
    kind = get(values, "peft_type", str)
    if kind != "LORA":
        raise DiffbitError(f"peft_type is {shown(kind)}, wanted LORA; {MERGE}")
    for name, value in values.items():
        if value and name not in HARMLESS:
            raise DiffbitError(f"{name} is {shown(value)}, which diffbit does not read; {MERGE}")
    get(values, "bias", Annotated[str, one_of("none", words=f"none; {MERGE}")], "none")
    start = values.get("init_lora_weights")
    if start is not None and start not in STARTS:
        raise DiffbitError(
            f"init_lora_weights is {shown(start)}, which also changes the base model; save the adapter for the "
            "unchanged base (in peft: save_pretrained(FOLDER, path_initial_model_for_weight_conversion=...)), or "
            + MERGE
        )


def _scale(values: Mapping[str, Any], module: str, rank: int) -> float:
    """Return the factor of an adapter. The patterns are regular expressions that match a module's name from any dot on,
    the first counts."""
    alpha = get(values, "lora_alpha", Positive, 8.0)
    expected = get(values, "r", Count, 8)
    for name in ("alpha_pattern", "rank_pattern"):
        for pattern, value in get(values, name, Mapping[str, Positive], {}).items():
            try:
                matches = re.match(rf"(.*\.)?({pattern})$", module)
            except re.error as error:
                raise DiffbitError(f"{name} has {shown(pattern)}, which is no regular expression ({error})") from None
            if matches:
                alpha, expected = (value, expected) if name == "alpha_pattern" else (alpha, int(value))
                break
    if expected != rank:
        raise DiffbitError(f"says that the adapter of {module} has rank {expected}, but its tensors have rank {rank}")
    return alpha / (math.sqrt(rank) if get(values, "use_rslora", bool, False) else rank)


def _sorted(weights: Path) -> tuple[dict[str, tuple[tuple[Entry, Entry], bool]], dict[str, Entry]]:
    """Return ({module: ((A, B), of an embedding)}, {name of a tensor: what replaces it}) of the adapter's file."""
    halves: dict[tuple[str, str], Entry] = {}
    replaced: dict[str, Entry] = {}
    for name, entry in read_header(weights).items():
        if not name.startswith(PREFIX) or entry.dtype not in FLOATS:
            raise DiffbitError(
                f"{weights}: holds tensor {name} of type {str(entry.dtype).removeprefix('torch.')}, wanted floats of "
                f"names that begin with {PREFIX}"
            )
        plain = name.removeprefix(PREFIX)
        part = next((part for part in (A, B, EMBEDDING_A, EMBEDDING_B) if plain.endswith(f".{part}")), None)
        if part is not None:
            halves[plain.removesuffix(f".{part}"), part] = entry
            continue
        for wrapper in (".base_layer.", ".modules_to_save."):  # an embedding saved with its adapter; of older versions
            plain = plain.replace(wrapper, ".")
        replaced[plain] = entry
    added: dict[str, tuple[tuple[Entry, Entry], bool]] = {}
    for module, part in halves:
        first, second = (A, B) if part in (A, B) else (EMBEDDING_A, EMBEDDING_B)
        for half in (first, second):
            if (module, half) not in halves:
                raise DiffbitError(f"{weights}: holds no {PREFIX}{module}.{half}; copy the file again")
        added[module] = (halves[module, first], halves[module, second]), part in (EMBEDDING_A, EMBEDDING_B)
    if not added and not replaced:
        raise DiffbitError(f"{weights}: holds no tensors")
    return added, replaced


def _finite(entry: Entry) -> Tensor:
    tensor = entry.read()
    if not tensor.isfinite().all():
        raise DiffbitError(f"{entry.file}: holds NaN or infinity; the adapter is damaged")
    return tensor
