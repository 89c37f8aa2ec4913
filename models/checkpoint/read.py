"""Reads a checkpoint folder: checks everything when it is opened, and reads each tensor only on request.

Tensors have canonical names and canonical row order; the folder's family (models/families/) converts from the layout on
disk. A quantized folder, marked by "quantization_config" in config.json, has other tensors instead of some weights or
in addition to them: parts, whose names begin with that of a linear layer. They are listed and read here;
quantize/layouts/ interprets them and checks which of them belong there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...io import files
from ...io.errors import DiffbitError
from ...io.fields import located
from ...io.gguf import find_gguf
from ...io.safetensors import Entry
from ...io.sentencepiece import SENTENCEPIECE
from ...io.tokenizer_files import TOKENIZER, TOKENIZER_FILES, tokenizer_files
from ..config import ModelConfig
from ..decoder import Block, Decoder, check_derived
from ..families import family_of
from ..families._family import Stored
from ..families._gguf import ARCHITECTURE, ARCHITECTURES, GGUFFamily
from ..families._huggingface import special_tokens
from .adapter import Adapter, LowRank, merged
from .folder import (
    GENERATION,
    INDEX,
    check_folder,
    check_no_adapter,
    find_pooling,
    find_quantization,
    find_tensors,
    inside,
)
from .gguf_file import Ternary, open_gguf, open_pooling
from .names import EMBEDDING, FLOATS, HEAD, layer_of, linear_of, reorder, shapes, stays_float32

BODY = "model."  # of the names of all tensors but the head's


class Checkpoint:
    """A model folder, opened and checked.

    path, config (ModelConfig), dtype ("float32", "bfloat16" or "float16", of the float weights), names (canonical, in
    the model's order, parts of quantized weights included), quantization (the dictionary in config.json, or None).

    adapter: the folder of a LoRA adapter in PEFT's layout, which is merged into the float weights as they are read.
    """

    def __init__(self, path: str | Path, adapter: str | Path | None = None) -> None:
        self.path = Path(path)
        self.adapter = None if adapter is None else Adapter.open(adapter)
        gguf = find_gguf(self.path)
        if gguf is None:
            check_folder(self.path)
            if adapter is None:
                check_no_adapter(self.path)
            source = inside(self.path, "config.json", self.path)
            values = files.read_json(source)
        else:
            source = gguf
            values, stored = open_gguf(gguf)
        with located(source):
            family = family_of(values)
        if gguf is None:
            stored = find_tensors(self.path, family.weights)
        self._source = source
        self._described = source if gguf is None else "its metadata"  # by what
        with located(source):
            self.quantization: dict[str, Any] | None = find_quantization(self.path, values) if gguf is None else None
            family = family.opened(values, stored)
            self._family = family
            if gguf is not None:
                self._family = GGUFFamily(family.model_type, family, ARCHITECTURES[values[ARCHITECTURE]])
            self.config: ModelConfig = self._family.read(values)
            if self.config.pooling is None:
                pooled = find_pooling(self.path) if gguf is None else open_pooling(gguf)
                self.config = replace(self.config, pooling=pooled)
        self._names_in_transformers = family
        if self.quantization is not None and not self._family.quantized:
            raise DiffbitError(f"{source}: is quantized, and quantized folders of this layout are not read")
        if (self.path / GENERATION).exists():
            generation = inside(self.path, GENERATION, self.path)
            with located(generation):
                # its tokens take precedence, as in transformers
                self.config = replace(self.config, **special_tokens(files.read_json(generation)))
        stored = {_prefixed(name, stored): entry for name, entry in stored.items() if not self._family.ignores(name)}
        if self.adapter is not None:
            self._replace(self.adapter, stored)
        self._tied_head = stored.pop(HEAD, None) if self.config.tie_embeddings else None
        self._places = {name: self._family.stored(self.config, name) for name in shapes(self.config)}
        on_disk = {  # if none of the alternative names exists, the first
            name: next((candidate for candidate in place.names if candidate in stored), place.names[0])
            for name, place in self._places.items()
        }
        expected = {}  # without parts of quantized weights
        for name, shape in shapes(self.config).items():
            expected[on_disk[name]] = (self._places[name].of_rows or shape[0], *shape[1:])
        expected |= {place.folded: (place.folded_width,) for place in self._places.values() if place.folded is not None}
        self._check(stored, expected)
        self._added = {} if self.adapter is None else self._adapted(self.adapter)
        self._stored = stored
        self._entries = self._canonical(stored, on_disk)
        self.names = list(self._entries)
        self.dtype = _label(self._entries.get(EMBEDDING, self._entries["model.norm.weight"]).dtype)
        for name in (*TOKENIZER_FILES, SENTENCEPIECE):
            if (self.path / name).exists():
                inside(self.path, name, self.path)

    @cached_property
    def tokenizer_files(self) -> dict[str, bytes]:
        """Return tokenizer.json and the other tokenizer files that exist, by name. An adapter's own, such as those with
        the chat template that it was trained on, stand for the base model's."""
        contents, replacing = tokenizer_files(self.path), tokenizer_files(self.tokenizer_path)
        return {name: contents[name] for name in (GENERATION,) if name in contents} | replacing

    @property
    def tokenizer_path(self) -> Path:
        """The folder or GGUF file that the tokenizer is read from."""
        has_own = self.adapter is not None and TOKENIZER in tokenizer_files(self.adapter.path)
        return self.adapter.path if self.adapter is not None and has_own else self.path

    def _replace(self, adapter: Adapter, stored: dict[str, Entry]) -> None:
        """Put the tensors that the adapter replaces among those `stored`, in place; untie the head of a model whose
        embedding or head it changes, and let the vocabulary grow with them."""
        if self.quantization is not None:
            raise DiffbitError(
                f"{self.path}: is quantized, and an adapter is merged into float weights; pass the float model that it "
                "was made from"
            )
        untied = replace(self.config, tie_embeddings=False, hidden_scale=1.0)
        there, on_disk = (
            {name: family.stored(untied, name) for name in shapes(untied)}
            for family in (self._names_in_transformers, self._family)
        )
        tables = [there[name].names[0] for name in (EMBEDDING, HEAD)]
        tied = [adapter.replaced.get(name) for name in tables]
        if self.config.tie_embeddings and tied[0] and tied[1] and torch.equal(tied[0].read(), tied[1].read()):
            del adapter.replaced[tables[1]]  # both are saved, as one table
        elif self.config.tie_embeddings and any(name in adapter.added or name in adapter.replaced for name in tables):
            if adapter.ties:
                raise DiffbitError(
                    f"{adapter.path}: ensure_weight_tying is True, and the adapter changes the embedding that the head "
                    "shares; merge it with peft (model.merge_and_unload()) and pass the merged model"
                )
            self.config = untied
            for name in on_disk[EMBEDDING].names:
                if name in stored:
                    stored.setdefault(on_disk[HEAD].names[0], stored[name])
        if tied[0] is not None:
            self.config = replace(self.config, vocab_size=tied[0].shape[0])
        for name, place in there.items():
            for candidate in {*place.names} & adapter.replaced.keys():
                if (place.rows is None) != (on_disk[name].rows is None):
                    raise DiffbitError(
                        f"{adapter.path}: replaces {candidate}, whose rows have another order in {self.path}; pass the "
                        "model as a folder of safetensors"
                    )
                other = next((other for other in on_disk[name].names if other in stored), on_disk[name].names[0])
                stored[other] = adapter.replaced[candidate]

    def _adapted(self, adapter: Adapter) -> dict[str, tuple[LowRank, Stored]]:
        """Return {canonical name: (what the adapter adds, where that is)}. Raises DiffbitError for an adapter of
        another model."""
        places = {name: self.in_transformers(name) for name in self._places}
        added = {
            name: (adapter.added[candidate], place)
            for name, place in places.items()
            for candidate in place.names
            if candidate in adapter.added
        }
        folded = {place.folded for place in places.values()}
        known = {candidate for place in places.values() for candidate in place.names} | folded
        belongs = f"; it belongs to {adapter.base}" if adapter.base else ""
        for name in (*adapter.added, *adapter.replaced):
            if name not in known:
                raise DiffbitError(f"{adapter.path}: changes {name}, which {self.path} does not have{belongs}")
        for name, (low_rank, place) in added.items():
            rows, *columns = shapes(self.config)[name]
            if low_rank.shape != (place.of_rows or rows, *columns):
                raise DiffbitError(
                    f"{adapter.path}: its adapter of {name} is for a weight of shape {low_rank.shape}, but that of "
                    f"{self.path} has shape {(place.of_rows or rows, *columns)}{belongs}"
                )
        return added

    def _check(self, stored: dict[str, Entry], expected: dict[str, tuple[int, ...]]) -> None:
        """Raise DiffbitError for missing, unknown and misshapen tensors."""
        with_parts = {linear_of(name) for name in stored if name not in expected and not name.endswith(".bias")}
        for name, entry in stored.items():
            if name not in expected and not self._is_part(name, expected):
                raise DiffbitError(
                    f"{entry.file}: holds tensor {name}, which a {self.config.attention} model of {self._described} "
                    "does not have; config and weights do not belong together" + self._family.hint(name)
                )
        for name, shape in expected.items():
            if name not in stored:
                if self._is_part(name, expected) and linear_of(name) in with_parts:
                    continue
                hint = ""
                if name == HEAD:
                    hint = "; if the head shares the embedding, config.json must say tie_word_embeddings: true"
                raise DiffbitError(f"{self.path}: tensor {name} of shape {shape} is missing from the weights{hint}")
            entry = stored[name]
            if self._is_part(name, expected) and (entry.dtype not in FLOATS or f"{name}.absmax" in stored):
                continue  # bitsandbytes may store codes as floats
            if entry.shape != shape:
                raise DiffbitError(
                    f"{entry.file}: tensor {name} has shape {entry.shape}, wanted {shape} from {self._described}"
                )
            if entry.dtype not in FLOATS:
                raise DiffbitError(
                    f"{entry.file}: tensor {name} has dtype {_label(entry.dtype)}, wanted one of "
                    f"{', '.join(map(_label, FLOATS))}"
                )

    def _is_part(self, name: str, expected: Mapping[str, tuple[int, ...]]) -> bool:
        """Whether a tensor belongs to a linear layer of a quantized folder."""
        return self.quantization is not None and len(expected.get(f"{linear_of(name)}.weight", ())) == 2

    def _canonical(self, stored: Mapping[str, Entry], on_disk: Mapping[str, str]) -> dict[str, Entry]:
        """Return entries by canonical name, in the model's order, each weight followed by its parts."""
        if self.quantization is None:
            return {name: self._rows_of(name, stored[there]) for name, there in on_disk.items()}
        parts_of: dict[str, list[str]] = {}
        for name in sorted(stored):
            parts_of.setdefault(linear_of(name), []).append(name)
        entries: dict[str, Entry] = {}
        for name, there in on_disk.items():
            parts = {linear_of(name) + part.removeprefix(linear_of(there)): part for part in parts_of[linear_of(there)]}
            entries |= {name: stored[part] for name, part in parts.items()}
        return entries

    def _rows_of(self, name: str, entry: Entry) -> Entry:
        place = self._places[name]
        return entry.part(place.first, shapes(self.config)[name][0]) if place.of_rows else entry

    def block_names(self, index: int) -> list[str]:
        """Return the names of the tensors of decoder layer `index`."""
        return [name for name in self.names if layer_of(name) == index]

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, from its file's header."""
        return self._entries[name].shape

    def is_float(self, name: str) -> bool:
        """Are its numbers floats of 16 or 32 bits?"""
        return self._entries[name].dtype in FLOATS

    def in_transformers(self, name: str) -> Stored:
        """Return where transformers has this parameter, in a folder; a GGUF file has other names and row orders."""
        return self._names_in_transformers.stored(self.config, name)

    def norm_in(self, name: str) -> Tensor | None:
        """Return the norm's weight that is folded into this projection [E, K], float32 [K]; None: there is none."""
        place = self._places[name]
        if place.folded is None:
            return None
        return self._stored[place.folded].read().float().repeat(self.shape(name)[1] // place.folded_width)

    def is_ternary(self, name: str) -> bool:
        """Whether a parameter is stored as codes of -1, 0 and 1 and one scale."""
        return isinstance(self._entries[name], Ternary) and not self.is_adapted(name)

    def is_adapted(self, name: str) -> bool:
        """Whether the adapter adds something to this parameter, which is then read as float32."""
        return name in self._added

    def row_order(self, name: str) -> Tensor | None:
        """Return the row order of this parameter: canonical = on disk[order]; None: the same."""
        return self._places[name].rows

    def read(self, name: str) -> Tensor:
        """Read a float parameter in canonical row order and its stored dtype (float32 if something is folded or
        merged into it).

        Raises DiffbitError for NaN or infinity.
        """
        tensor = self.read_raw(name)
        if name == EMBEDDING and self._tied_head and not torch.equal(self._tied_head.read(), tensor):
            raise DiffbitError(
                f"{self._tied_head.file}: {HEAD} differs from {EMBEDDING}, but config.json says "
                "tie_word_embeddings: true; set it to false"
            )
        place = self._places[name]
        tensor = reorder(tensor, place.rows)
        if name in self._added:
            low_rank, of_adapter = self._added[name]
            tensor = merged(tensor, low_rank, of_adapter.rows, of_adapter.first)
        if place.plus or place.times != 1:
            tensor = (tensor.float() + place.plus) * place.times
        return tensor if place.folded is None else self._folded(name, tensor, place.folded)

    def _folded(self, name: str, weight: Tensor, norm_name: str) -> Tensor:
        """Multiply a projection [E, H * w] by the weight [w] of the norm before it; in float32, to avoid rounding."""
        entry = self._stored[norm_name]
        norm = entry.read()
        _check_finite(entry, norm_name, norm)
        folded = (weight.float().unflatten(1, (-1, len(norm))) * norm.float()).flatten(1)
        if not folded.isfinite().all():
            raise DiffbitError(
                f"{entry.file}: {name} times {norm_name}, which is folded into it, is infinite; the checkpoint is "
                "damaged"
            )
        return folded

    def read_raw(self, name: str) -> Tensor:
        """Read a tensor unchanged from disk; it is only checked for NaN and infinity."""
        entry = self._entries[name]
        tensor = entry.read()
        _check_finite(entry, name, tensor)
        return tensor

    def read_bytes(self, name: str) -> Tensor:
        """Read a tensor's bytes, uint8, whatever its dtype."""
        return self._entries[name].stored_bytes()

    def sha256(self) -> str:
        """Hash the model: the lines "<sha256> <name>" of config.json and the weight files, sorted by name."""
        sources = {entry.file for entry in self._stored.values()} | {self._source}
        if (self.path / INDEX).exists():
            sources.add(self.path / INDEX)
        if self.adapter is not None:
            sources |= self.adapter.sources
        lines = [f"{files.sha256_file(file)} {file.name}\n" for file in sorted(sources)]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


def load(
    path: str | Path | Checkpoint, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> Decoder:
    """Load the model of a float checkpoint; lambda vectors stay float32 for any `dtype`."""
    checkpoint = path if isinstance(path, Checkpoint) else Checkpoint(path)
    _refuse_quantized(checkpoint)
    with torch.device("meta"):
        decoder = Decoder(checkpoint.config)
    _fill(decoder, checkpoint, checkpoint.names, "", dtype)
    return decoder.to(device)


def load_block(checkpoint: Checkpoint, index: int, dtype: torch.dtype = torch.float32) -> Block:
    """Load only decoder layer `index`."""
    _refuse_quantized(checkpoint)
    with torch.device("meta"):
        block = Block(checkpoint.config, index)
    _fill(block, checkpoint, checkpoint.block_names(index), f"model.layers.{index}.", dtype)
    return block


def _fill(module: torch.nn.Module, checkpoint: Checkpoint, names: list[str], prefix: str, dtype: torch.dtype) -> None:
    state = {}
    for name in names:
        kept_dtype = torch.float32 if stays_float32(name) else dtype
        state[name.removeprefix(prefix)] = checkpoint.read(name).to(kept_dtype)
    module.load_state_dict(state, strict=True, assign=True)
    with located(checkpoint.path):
        check_derived(module)


def _refuse_quantized(checkpoint: Checkpoint) -> None:
    if checkpoint.quantization is not None:
        raise DiffbitError(f"{checkpoint.path}: is quantized; models.load reads float weights, diffbit.load reads both")


def _check_finite(entry: Entry, name: str, tensor: Tensor) -> None:
    if not tensor.is_floating_point() or not tensor.numel():
        return
    values = tensor if tensor.itemsize > 1 else tensor.float()  # torch has no aminmax of floats of 8 bits
    low, high = torch.aminmax(values)  # both NaN if any is; unlike isfinite() it allocates nothing
    if not (torch.isfinite(low) and torch.isfinite(high)):
        raise DiffbitError(f"{entry.file}: tensor {name} holds NaN or infinity; the checkpoint is damaged")


def _prefixed(name: str, stored: Mapping[str, Entry]) -> str:
    """Return the name that a tensor of transformers' AutoModel, such as an embedding model's, has in the model with a
    head."""
    is_bare = EMBEDDING.removeprefix(BODY) in stored and EMBEDDING not in stored
    return f"{BODY}{name}" if is_bare and name != HEAD else name


def _label(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
