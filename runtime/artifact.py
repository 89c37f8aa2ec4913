"""An artifact: the folder that `diffbit export` writes and a device runs, and its manifest `diffbit.json`.

The manifest names every file of the model with size and SHA-256, describes the KV cache and carries a golden prompt
with the logits that the exporting machine computed. Its last field is its own SHA-256, over the canonical JSON
(keys sorted, separators "," and ":", ASCII) of all other fields, which reveals an edited number. docs/artifact.md
describes every field.

Only files that the manifest lists are opened, and only inside the folder. A name with a directory part, or a symbolic
link that leads out of the folder, is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar

from ..io.errors import DiffbitError
from ..io.files import is_within, read_json, sha256_file
from ..io.files import json_sha256 as manifest_sha256
from ..ops.cache import IN_PLACE, TOKENS, WIDTHS, Buffer, CacheSpec

VERSION = 4  # of the manifest; raised when an older reader would misread it
MANIFEST = "diffbit.json"
MODEL = "model.onnx"
ONNX = "onnx/"  # the folder of the graph and its data in the layout of transformers.js
TOKENIZER = "tokenizer.json"
TARGETS = ("cpu", "cuda", "webgpu")  # that a graph's operators are chosen for
FILE_BYTES = 2_000_000_000  # of a file, at most: a browser's ArrayBuffer holds slightly more
NANO = "nano"  # the artifact that comes with the package (examples/nano/artifact.sh)
_HEX64 = re.compile(r"[0-9a-f]{64}")
_BUFFER = re.compile(r"[a-z][a-z0-9_]{0,39}")
_DIMENSION = re.compile(TOKENS + r"(/(?P<block>[0-9]{1,9}))?(%(?P<ring>[0-9]{1,9}))?")
LOOKED_UP = ("embedding", "rotary tables")  # parts from which each token reads a single row
MAX_LAYERS, MAX_BUFFERS, MAX_DIMENSIONS, MAX_BLOCK = 1024, 16, 5, 1024

T = TypeVar("T")
_WORDS = {str: "a string", int: "an integer", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class FileEntry:
    """A file as it was exported."""

    bytes: int
    sha256: str  # hexadecimal


class Part(TypedDict):
    """What some of the bytes in the files hold, such as "embedding" (export/parts.py)."""

    name: str
    bytes: int
    weights: int | None  # number of weights stored there; None where the bytes are not weights


@dataclass(frozen=True)
class Golden:
    """The self-test: after the prompt `input_ids`, the logit of `token_ids[i]` at the last position is `logits[i]`."""

    input_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logits: tuple[float, ...]
    spread: float  # standard deviation of the whole row of logits
    tolerance: float  # largest difference allowed, relative to the spread


@dataclass(frozen=True)
class Artifact:
    """A validated manifest. `Artifact.open` reads no other file; `check_files` checks the files it lists."""

    path: Path
    name: str
    diffbit_version: str
    dtype: str  # "fp32" or "fp16": the graph's floating-point weights and activations
    model: Mapping[str, Any]  # the model's configuration as exported
    scheme: Mapping[str, Any] | None  # how it was quantized; None for a float model
    source: Mapping[str, Any]  # name and sha256 of the checkpoint
    method: str | None  # how its weights were quantized, such as "rotate+gptq"; None also in older artifacts
    calibration: Mapping[str, Any] | None  # the calibration text of the method
    cache: CacheSpec
    context_length: int
    eos_token_ids: tuple[int, ...]
    files: Mapping[str, FileEntry]
    golden: Golden
    sha256: str  # of the manifest
    target: str = "cpu"  # the device that the graph's operators were chosen for; it runs on others, too
    parts: tuple[Part, ...] = ()  # what the files hold, largest first; empty in older artifacts

    @classmethod
    def open(cls, path: str | Path) -> Artifact:
        """Read and validate `path`/diffbit.json. Raises DiffbitError if anything in it is wrong."""
        folder = artifact_folder(path)
        if not folder.is_dir():
            raise DiffbitError(f"{folder}: no such artifact folder; diffbit export makes one")
        where = folder / MANIFEST
        if not where.is_file():
            raise DiffbitError(f"{folder}: holds no {MANIFEST}, so it is not an artifact; diffbit export makes one")
        _confined(folder, MANIFEST)
        manifest = read_json(where)
        fields = _Fields(manifest, str(where))
        version = fields.integer("artifact_version", at_least=1)
        if version != VERSION:
            raise DiffbitError(
                f"{where}: artifact_version is {version}, this diffbit reads {VERSION}; "
                + ("upgrade diffbit" if version > VERSION else "export the model again")
            )
        found = manifest_sha256(manifest)
        sha256 = fields.sha256("sha256")
        if found != sha256:
            raise DiffbitError(
                f"{where}: was changed after export (its sha256 says {sha256[:12]}…, its content has {found[:12]}…); "
                "restore the file or export the model again"
            )
        artifact = cls(
            path=folder,
            name=fields.get("name", str),
            diffbit_version=fields.get("diffbit_version", str),
            dtype=fields.choice("dtype", "fp32", "fp16"),
            model=fields.object("model").values,
            scheme=fields.optional_object("scheme"),
            source=fields.object("source").values,
            method=None if manifest.get("method") is None else fields.get("method", str),
            calibration=fields.optional_object("calibration"),
            cache=_cache(fields.object("cache")),
            context_length=fields.integer("context_length", at_least=1),
            eos_token_ids=fields.integers("eos_token_ids"),
            files=dict(_files(fields.object("files"))),
            golden=_golden(fields.object("golden")),
            sha256=sha256,
            target=fields.choice("target", *TARGETS) if "target" in manifest else TARGETS[0],
            parts=tuple(_part(entry) for entry in fields.objects("parts")) if "parts" in manifest else (),
        )
        artifact._check_tokens(str(where))
        return artifact

    @property
    def vocab_size(self) -> int:
        return int(self.model["vocab_size"])

    @property
    def bos_token_id(self) -> int | None:
        return self.model.get("bos_token_id")

    @property
    def nbytes(self) -> int:
        """Bytes of all files on disk, as the manifest lists them."""
        return sum(entry.bytes for entry in self.files.values())

    def bytes_per_token(self, context: int) -> int | None:
        """Bytes of weights and cache read to decode one token after `context` tokens; None without `parts`."""
        if not self.parts:
            return None
        weights = 0
        for part in self.parts:
            if part["weights"] and part["name"] not in LOOKED_UP:
                weights += part["bytes"]
        return weights + self.cache.nbytes(context)

    @property
    def graph(self) -> str:
        """The name of the ONNX graph, which names its data relative to itself."""
        return MODEL if MODEL in self.files else ONNX + MODEL

    def file(self, name: str) -> Path:
        """The path of a listed file. Raises DiffbitError unless it exists and lies inside the folder."""
        if name not in self.files:
            raise DiffbitError(f"{self.path / MANIFEST}: lists no {name}; export the model again")
        path = _confined(self.path, name)
        if not path.is_file():
            raise DiffbitError(f"{path}: is listed in {MANIFEST} but missing; restore it or export the model again")
        return path

    def file_problems(self, *, hashes: bool = True) -> dict[str, str]:
        """{file name: what is wrong with it} of the listed files that are missing or changed.

        `hashes=False` compares sizes only: it finds a truncated download without reading gigabytes.
        """
        problems = {}
        for name, entry in self.files.items():
            try:
                path = self.file(name)
                if (size := path.stat().st_size) != entry.bytes:
                    problems[name] = f"{path}: has {size} bytes, the manifest says {entry.bytes}; restore the file"
                elif hashes and (found := sha256_file(path)) != entry.sha256:
                    problems[name] = (
                        f"{path}: was changed after export (sha256 {found[:12]}…, the manifest says "
                        f"{entry.sha256[:12]}…); restore the file or export the model again"
                    )
            except DiffbitError as error:
                problems[name] = str(error)
            except OSError as error:
                problems[name] = f"{self.path / name}: cannot be read ({error})"
        return problems

    def check_files(self, *, hashes: bool = True) -> None:
        """Raise a DiffbitError that names every listed file that is missing or changed."""
        if problems := self.file_problems(hashes=hashes):
            raise DiffbitError("\n".join(problems.values()))

    def _check_tokens(self, where: str) -> None:
        model = _Fields(self.model, f"{where}: model")
        vocab_size = model.integer("vocab_size", at_least=1)
        groups = {
            "eos_token_ids": self.eos_token_ids,
            "golden.input_ids": self.golden.input_ids,
            "golden.token_ids": self.golden.token_ids,
            "model.bos_token_id": () if self.bos_token_id is None else (model.get("bos_token_id", int),),
        }
        for key, ids in groups.items():
            if outside := [token for token in ids if not 0 <= token < vocab_size]:
                raise DiffbitError(f"{where}: {key} holds {outside[0]}, outside the vocabulary of {vocab_size} tokens")
        if len(self.golden.input_ids) > self.context_length:
            raise DiffbitError(
                f"{where}: golden.input_ids holds {len(self.golden.input_ids)} tokens, more than the context_length "
                f"{self.context_length}"
            )


def artifact_folder(path: str | Path) -> Path:
    """The folder that `path` names: "nano" is the artifact in the package, unless a folder of this name is one."""
    own = Path(path) == Path(NANO) and not (Path(path) / MANIFEST).exists()
    return Path(__file__).parent / NANO if own else Path(path)


def _cache(fields: _Fields) -> CacheSpec:
    layers = fields.objects("layers")
    if not 1 <= len(layers) <= MAX_LAYERS:
        raise DiffbitError(f"{fields.where}: layers has {len(layers)} entries, wanted 1 to {MAX_LAYERS}")
    cache = CacheSpec(tuple(_layer(layer) for layer in layers))
    if not cache.buffers:
        raise DiffbitError(f"{fields.where}: no layer has a buffer, so the model would keep nothing of the past")
    return cache


def _layer(fields: _Fields) -> tuple[Buffer, ...]:
    buffers = tuple(_buffer(entry) for entry in fields.objects("buffers"))
    names = [buffer.name for buffer in buffers]
    if len(buffers) > MAX_BUFFERS or len(set(names)) < len(names):
        raise DiffbitError(
            f"{fields.where}: buffers are named {', '.join(names)}, wanted at most {MAX_BUFFERS}, each once"
        )
    return buffers


def _buffer(fields: _Fields) -> Buffer:
    named = "lower-case letters, digits and _"
    name = fields.get("name", str, lambda name: bool(_BUFFER.fullmatch(name)), named)
    shape = tuple(_dimension(dim, fields.where) for dim in fields.get("shape", list))
    if not 1 <= len(shape) <= MAX_DIMENSIONS:
        raise DiffbitError(f"{fields.where}: shape has {len(shape)} dimensions, wanted 1 to {MAX_DIMENSIONS}")
    return Buffer(name, fields.choice("dtype", *WIDTHS), shape, fields.choice("in_place", *IN_PLACE))


def _dimension(dim: object, where: str) -> int | str:
    if isinstance(dim, int) and dim is not True and 1 <= dim < 1 << 31:
        return dim
    found = _DIMENSION.fullmatch(dim) if isinstance(dim, str) else None
    if found and 1 <= int(found["block"] or 1) <= MAX_BLOCK and int(found["ring"] or 1) >= 1:
        return str(dim)
    raise DiffbitError(
        f"{where}: shape holds {_shown(dim)}, wanted a number above 0, {TOKENS!r}, {TOKENS + '/32'!r} or, of a ring, "
        f"{TOKENS + '%512'!r}"
    )


def _files(fields: _Fields) -> Iterator[tuple[str, FileEntry]]:
    for name in fields.values:
        plain = name.removeprefix(ONNX)
        if plain in ("", ".", "..", MANIFEST) or "/" in plain or "\\" in name or not name.isprintable():
            raise DiffbitError(f"{fields.where}: {name!r} is not the name of a file in the folder")
        entry = fields.object(name)
        yield name, FileEntry(entry.integer("bytes", at_least=0), entry.sha256("sha256"))
    if MODEL not in fields.values and ONNX + MODEL not in fields.values:
        raise DiffbitError(f"{fields.where}: lists no {MODEL}")


def _part(fields: _Fields) -> Part:
    weights = None if fields.values.get("weights") is None else fields.integer("weights", at_least=1)
    return {"name": fields.get("name", str), "bytes": fields.integer("bytes", at_least=0), "weights": weights}


def _golden(fields: _Fields) -> Golden:
    logits = fields.get("logits", list, lambda values: all(map(_finite, values)), "a list of finite numbers")
    for key in ("spread", "tolerance"):
        fields.get(key, object, lambda value: _finite(value, above=0), "a finite number above 0")
    spread, tolerance = float(fields.values["spread"]), float(fields.values["tolerance"])
    ids, tokens = fields.integers("input_ids"), fields.integers("token_ids")
    if not ids or not tokens or len(tokens) != len(logits):
        raise DiffbitError(
            f"{fields.where}: wanted a prompt and one logit for each of token_ids, found {len(ids)} prompt tokens, "
            f"{len(tokens)} token_ids and {len(logits)} logits"
        )
    return Golden(ids, tokens, tuple(map(float, logits)), spread, tolerance)


def _confined(folder: Path, name: str) -> Path:
    """`folder`/`name`. Raises DiffbitError where symbolic links lead out of the folder."""
    path = folder / name
    try:
        inside = is_within(folder, path)
    except (OSError, RuntimeError) as error:  # a loop of links
        raise DiffbitError(f"{path}: cannot be resolved ({error})") from None
    if not inside:
        raise DiffbitError(f"{path}: is a link that leads out of the artifact folder; put the file itself there")
    return path


@dataclass(frozen=True)
class _Fields:
    """Typed access to a JSON object. A missing field, or one of another type, raises a DiffbitError that names it."""

    values: Mapping[str, Any]
    where: str  # file and path inside it, for messages

    def get(self, key: str, type_: type[T], fits: Callable[[T], bool] = lambda _: True, wanted: str = "") -> T:
        """A field's value, for which `fits` holds: it is `wanted`."""
        if key not in self.values:
            raise DiffbitError(f"{self.where}: has no field {key!r}; export the model again")
        value = self.values[key]
        of_type = isinstance(value, type_) and not isinstance(value, bool)  # bool is an int to Python alone
        if not of_type or not fits(value):
            wanted = wanted if of_type or type_ not in _WORDS else _WORDS[type_]
            raise DiffbitError(f"{self.where}: {key} is {_shown(value)}, wanted {wanted}")
        return value

    def choice(self, key: str, *choices: str) -> str:
        return self.get(key, str, lambda value: value in choices, f"one of {', '.join(choices)}")

    def integer(self, key: str, at_least: int) -> int:
        return self.get(key, int, lambda value: value >= at_least, f"at least {at_least}")

    def sha256(self, key: str) -> str:
        return self.get(key, str, lambda value: bool(_HEX64.fullmatch(value)), "64 hexadecimal digits")

    def integers(self, key: str) -> tuple[int, ...]:
        return tuple(
            self.get(key, list, lambda values: all(type(value) is int for value in values), "a list of integers")
        )

    def object(self, key: str) -> _Fields:
        return _Fields(self.get(key, dict), f"{self.where}: {key}")

    def optional_object(self, key: str) -> Mapping[str, Any] | None:
        return None if self.values.get(key, ...) is None else self.object(key).values

    def objects(self, key: str) -> list[_Fields]:
        values = self.get(key, list)
        if other := [value for value in values if not isinstance(value, dict)]:
            raise DiffbitError(f"{self.where}: {key} holds {_shown(other[0])}, wanted objects")
        return [_Fields(value, f"{self.where}: {key}[{index}]") for index, value in enumerate(values)]


def _finite(value: object, above: float = -math.inf) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and above < value < math.inf


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
