"""Reading a checkpoint folder: everything checked when it is opened, every tensor read only when asked for.

Tensors are handed out under canonical names in canonical row order (attention/__init__.py), whatever lies on disk:
Hugging Face's llama and diffllama, diffbit's own diff_llama_v2, or the official module layout (unilm.py). A quantized
folder, marked by "quantization_config" in config.json, holds parts in place of some weights:

    quantizer "diffbit"            <linear>.codes, .scale, .zero in place of <linear>.weight
    quant_method "bitsandbytes"    <linear>.weight packed, beside <linear>.weight.absmax and others
    quant_method "bitnet"          <linear>.weight packed (or float), beside <linear>.weight_scale

The parts are listed and read here; what they mean is the business of quantize/. Ours has no quant_method, and
transformers therefore refuses it: with one that it does not know it warns, and loads random weights. Folders of earlier
versions, with quant_method "diffbit", are read all the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import files
from ..errors import DiffbitError
from . import layout, unilm
from .config import ModelConfig
from .decoder import Block, Decoder
from .folder import GENERATION, INDEX, TOKENIZER_FILES, check_folder, find_tensors, inside
from .hf_config import from_hf, with_tokens
from .safetensors_file import Entry, read_tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
PARTS = ("codes", "scale", "zero")  # of a weight that diffbit quantized; zero only in asymmetric formats
QUANT_METHODS = ("diffbit", "bitsandbytes", "bitnet")
HARMLESS = ".rotary_emb.inv_freq"  # a buffer that older transformers saved; it follows from the config


class Checkpoint:
    """A model folder, opened and checked.

    path, config (ModelConfig), dtype ("float32", "bfloat16" or "float16": of the weights that are not quantized),
    names (canonical, in the model's order, parts of quantized weights included), quantization (the dictionary in
    config.json, or None), tokenizer_files (paths of those that are there).
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        check_folder(self.path)
        source = inside(self.path, "config.json", self.path)
        values = files.read_json(source)
        self.quantization = _quantization(source, values)
        with _about(source):
            self.config: ModelConfig = from_hf(values)
        if (self.path / GENERATION).exists():
            generation = inside(self.path, GENERATION, self.path)
            with _about(generation):
                self.config = with_tokens(self.config, files.read_json(generation))
        stored = find_tensors(self.path)
        stored = {name: entry for name, entry in stored.items() if not name.endswith(HARMLESS)}
        self._tied_head = stored.pop(layout.HEAD, None) if self.config.tie_embeddings else None
        self._official = unilm.is_official(self.config, values, set(stored))
        wanted = layout.shapes(self.config)
        if self._official:
            if self.quantization is not None:
                raise DiffbitError(f"{source}: a quantized model in the official module layout is not read")
            with _about(source):
                unilm.check_config(self.config)
            wanted = unilm.stored_shapes(self.config, wanted, set(stored))
        self._check(stored, wanted)
        self._files = {entry.file for entry in stored.values()}
        self._entries = self._canonical(stored)
        self._norms = {
            name: stored[norm]
            for name in self._entries
            if self._official and (norm := unilm.norm_of(self.config, name))
        }
        self.names = list(self._entries)
        kept = stored.get(layout.EMBEDDING, stored["model.norm.weight"])  # an override can quantize the embedding
        self.dtype = _label(kept.dtype)
        self.tokenizer_files = [
            inside(self.path, name, self.path) for name in TOKENIZER_FILES if (self.path / name).exists()
        ]

    def _check(self, stored: dict[str, Entry], wanted: dict[str, tuple[int, ...]]) -> None:
        """Refuse missing, unknown and misshapen tensors."""
        for name, entry in stored.items():
            if name not in wanted and not self._is_part(name, stored, wanted):
                raise DiffbitError(
                    f"{entry.file}: holds tensor {name}, which a {self.config.attention} model of {self.path}/"
                    "config.json does not have; config and weights do not belong together"
                )
        for name, shape in wanted.items():
            if name not in stored:
                if self._has_parts(name, stored):
                    continue
                hint = ""
                if name == layout.HEAD:
                    hint = "; if the head shares the embedding, config.json must say tie_word_embeddings: true"
                raise DiffbitError(f"{self.path}: tensor {name} of shape {shape} is missing from the weights{hint}")
            entry = stored[name]
            if self._is_packed(entry) and len(shape) == 2 and entry.shape != shape:
                continue
            if entry.shape != shape:
                raise DiffbitError(
                    f"{entry.file}: tensor {name} has shape {entry.shape}, wanted {shape} from config.json"
                )
            if entry.dtype not in FLOATS:
                raise DiffbitError(
                    f"{entry.file}: tensor {name} has dtype {_label(entry.dtype)}, wanted one of "
                    f"{', '.join(map(_label, FLOATS))}"
                )

    def _method(self) -> str | None:
        return None if self.quantization is None else self.quantization["quant_method"]

    def _is_packed(self, entry: Entry) -> bool:
        return self._method() in ("bitsandbytes", "bitnet") and entry.dtype not in FLOATS

    def _is_part(self, name: str, stored: dict[str, Entry], wanted: dict[str, tuple[int, ...]]) -> bool:
        weight = f"{layout.linear_of(name)}.weight"
        if len(wanted.get(weight, ())) != 2:
            return False
        if self._method() == "diffbit":
            return name in _parts(weight) and weight not in stored
        if self._method() == "bitnet":  # the norm is refused where its quantization_config is read
            return name in (f"{weight}_scale", f"{layout.linear_of(name)}.rms_norm.weight")
        return self._method() == "bitsandbytes" and name.startswith(f"{weight}.")

    def _has_parts(self, name: str, stored: dict[str, Entry]) -> bool:
        return self._method() == "diffbit" and all(part in stored for part in _parts(name)[:2])

    def _canonical(self, stored: dict[str, Entry]) -> dict[str, Entry]:
        """Entries under their canonical names, in the model's order, each weight followed by its parts."""
        if self._official:
            return {name: stored[unilm.stored_name(name, set(stored))] for name in layout.shapes(self.config)}
        beside: dict[str, list[str]] = {}
        for name in sorted(stored):
            beside.setdefault(layout.linear_of(name), []).append(name)
        ordered = [name for weight in layout.shapes(self.config) for name in beside[layout.linear_of(weight)]]
        return {name: stored[name] for name in ordered}

    def block_names(self, index: int) -> list[str]:
        """Names of the tensors of decoder layer `index`."""
        return [name for name in self.names if layout.layer_of(name) == index]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from its file's header."""
        return self._entries[name].shape

    def row_order(self, name: str) -> Tensor | None:
        """Rows of this tensor: canonical = on disk[order]; None where they are the same."""
        module = unilm if self._official else layout
        return module.row_order(self.config, name)

    def read(self, name: str) -> Tensor:
        """A tensor in canonical row order and its stored dtype (o_proj of an official v1 model: float32, see unilm.py).

        NaN or infinity in it is a DiffbitError. Row order applies to codes and scales alike; what has a single row for
        all (and bitsandbytes' packed tensors, which `read_raw` is for) has none.
        """
        entry = self._entries[name]
        tensor = self.read_raw(name)
        if name in self._norms:
            norm = read_tensor(self._norms[name])
            _check_finite(self._norms[name], f"{layout.linear_of(name).rpartition('.')[0]}.subln.weight", norm)
            tensor = unilm.fold_norm(tensor, norm)
        if name == layout.EMBEDDING and self._tied_head and not torch.equal(read_tensor(self._tied_head), tensor):
            raise DiffbitError(
                f"{self._tied_head.file}: {layout.HEAD} differs from {layout.EMBEDDING}, but config.json says "
                "tie_word_embeddings: true; set it to false"
            )
        if self._method() == "bitsandbytes" and (self._is_packed(entry) or not name.endswith(".weight")):
            return tensor
        return layout.reorder(tensor, self.row_order(name))

    def read_raw(self, name: str) -> Tensor:
        """A tensor as it lies on disk, checked for NaN and infinity only."""
        entry = self._entries[name]
        tensor = read_tensor(entry)
        _check_finite(entry, name, tensor)
        return tensor

    def sha256(self) -> str:
        """Hash of the model: of the lines "<sha256> <name>" of config.json and the weight files, sorted by name."""
        sources = self._files | {self.path / "config.json"}
        if (self.path / INDEX).exists():
            sources.add(self.path / INDEX)
        lines = [f"{files.sha256_file(file)} {file.name}\n" for file in sorted(sources)]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def load(
    path: str | Path | Checkpoint, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    """The model in a checkpoint of float weights; lambda vectors stay float32 whatever `dtype`."""
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    _refuse_quantized(checkpoint)
    with torch.device("meta"):
        decoder = Decoder(checkpoint.config)
    _fill(decoder, checkpoint, checkpoint.names, "", dtype)
    return decoder.to(device)


def load_block(checkpoint: Checkpoint, index: int, dtype: torch.dtype = torch.float32) -> Block:
    """Decoder layer `index` alone."""
    _refuse_quantized(checkpoint)
    with torch.device("meta"):
        block = Block(checkpoint.config, index)
    _fill(block, checkpoint, checkpoint.block_names(index), f"model.layers.{index}.", dtype)
    return block


def _fill(module: torch.nn.Module, checkpoint: Checkpoint, names: list[str], prefix: str, dtype: torch.dtype) -> None:
    state = {}
    for name in names:
        wanted = torch.float32 if layout.stays_float32(name) else dtype
        state[name.removeprefix(prefix)] = checkpoint.read(name).to(wanted)
    module.load_state_dict(state, strict=True, assign=True)


def _refuse_quantized(checkpoint: Checkpoint) -> None:
    if checkpoint.quantization is not None:
        raise DiffbitError(f"{checkpoint.path}: is quantized; models.load reads float weights, diffbit.load reads both")


@contextmanager
def _about(file: Path) -> Iterator[None]:
    """Name the file in what is wrong with its content."""
    try:
        yield
    except DiffbitError as error:
        raise DiffbitError(f"{file}: {error}") from None


def _quantization(source: Path, values: dict[str, Any]) -> dict[str, Any] | None:
    entry = values.get("quantization_config")
    if entry is None:
        return None
    method = entry.get("quant_method", entry.get("quantizer")) if isinstance(entry, dict) else entry
    if method not in QUANT_METHODS:
        raise DiffbitError(
            f"{source}: quantization_config has quant_method {method!r}, wanted one of {', '.join(QUANT_METHODS)}"
        )
    assert isinstance(entry, dict)
    if method == "bitsandbytes" and entry.get("load_in_8bit"):
        raise DiffbitError(
            f"{source}: the weights are bitsandbytes' int8, of which diffbit reads only nf4; pass the float checkpoint "
            "(`diffbit quantize --weights int8` makes int8 weights of it)"
        )
    return {**entry, "quant_method": method}


def _parts(weight: str) -> list[str]:
    return [f"{weight.removesuffix('.weight')}.{part}" for part in PARTS]


def _check_finite(entry: Entry, name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point() or not tensor.numel():
        return
    low, high = torch.aminmax(tensor)  # both NaN if any is; unlike isfinite() it allocates nothing
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise DiffbitError(f"{entry.file}: tensor {name} holds NaN or infinity; the checkpoint is damaged")


def _label(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
