"""An artifact: the folder that `diffbit export` writes and a device runs, and its manifest `diffbit.json`.

The manifest names every file of the model with size and SHA-256, describes the KV cache and carries a golden prompt
with the logits that the exporting machine computed. Its last field is its own SHA-256, over the canonical JSON
(keys sorted, separators "," and ":", ASCII) of all other fields, which reveals an edited number. docs/artifact.md
describes every field.

Only files that the manifest lists are opened, and only inside the folder. A name with a directory part, or a symbolic
link that leads out of the folder, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from ..io.errors import DiffbitError
from ..io.fields import Count, Positive, Rule, bounds, get, located, of_length, one_of, read
from ..io.files import check_within, read_json, sha256_file
from ..io.files import json_sha256 as manifest_sha256
from ..io.model_files import is_of_a_model
from ..ops.cache import Buffer, CacheSpec

VERSION = 4  # of the manifest; raised when an older reader would misread it
MANIFEST = "diffbit.json"
MODEL = "model.onnx"
ONNX = "onnx/"  # the folder of the graph and its data in the layout of transformers.js
TOKENIZER = "tokenizer.json"
TARGETS = ("cpu", "cuda", "webgpu", "onnxruntime")  # that a graph's operators are chosen for
LOGITS, HIDDEN = "logits", "hidden_states"  # outputs of a graph
POOLINGS = "mean", "last"  # how one vector is made of the hidden states of all tokens; the first is the default
# Optional inputs: the first new token whose logits are computed; how many tokens each row lacks of the mask's
LOGITS_FROM, SHORTER_BY = "logits_from", "shorter_by"
FILE_BYTES = 2_000_000_000  # of a file, at most: a browser's ArrayBuffer holds slightly more
NANO = "nano"  # the artifact that comes with the package (examples/nano/artifact.sh)
LOOKED_UP = ("embedding", "rotary tables")  # parts from which each token reads a single row
MAX_LAYERS, MAX_BUFFERS = 1024, 16
MAX_FILES, MAX_PARTS, MAX_GOLDEN = 4096, 4096, 1 << 16  # entries of these lists of a manifest
MOST_BYTES = 16 << 20  # of a manifest; that of a model of 80 layers has 100 kB

Bytes = Annotated[int, bounds(0)]
Sha256 = Annotated[str, Rule("64 hexadecimal digits", re.compile(r"[0-9a-f]{64}").fullmatch)]


def _is_file_name(name: str) -> bool:
    plain = name.removeprefix(ONNX)
    return not (plain in ("", ".", "..", MANIFEST) or "/" in plain or "\\" in name) and name.isprintable()


FileName = Annotated[str, Rule("the name of a file in the folder", _is_file_name)]


@dataclass(frozen=True)
class FileEntry:
    """A file as it was exported."""

    bytes: Bytes
    sha256: Sha256


@dataclass(frozen=True)
class Part:
    """What some of the bytes in the files hold, such as "embedding" (export/parts.py)."""

    name: str
    bytes: Bytes
    weights: Annotated[int, bounds(1)] | None = None  # number stored there; None where the bytes are not weights


@dataclass(frozen=True)
class Golden:
    """The self-test: after the prompt `input_ids`, the logit of `token_ids[i]` at the last position is `logits[i]`."""

    input_ids: Annotated[tuple[int, ...], of_length(0, MAX_GOLDEN)]
    token_ids: Annotated[tuple[int, ...], of_length(0, MAX_GOLDEN)]
    logits: Annotated[tuple[float, ...], of_length(0, MAX_GOLDEN)]
    spread: Positive  # standard deviation of the whole row of logits
    tolerance: Positive  # largest difference allowed, relative to the spread

    def __post_init__(self) -> None:
        if not self.input_ids or not self.token_ids or len(self.token_ids) != len(self.logits):
            raise DiffbitError(
                f"has {len(self.input_ids)} input_ids, {len(self.token_ids)} token_ids and {len(self.logits)} logits, "
                "wanted a prompt and one logit for each of token_ids"
            )


def _are_few_and_different(buffers: tuple[Buffer, ...]) -> bool:
    return len({buffer.name for buffer in buffers}) == len(buffers) <= MAX_BUFFERS


@dataclass(frozen=True)
class CachedLayer:
    """The buffers of a layer, as the manifest lists them."""

    buffers: Annotated[
        tuple[Buffer, ...], Rule(f"at most {MAX_BUFFERS} buffers of different names", _are_few_and_different)
    ]


def _cache(value: object, place: str) -> CacheSpec:
    of_layers = Annotated[tuple[CachedLayer, ...], of_length(1, MAX_LAYERS)]
    layers = get(read(Mapping[str, Any], value, place), "layers", of_layers, place=place, extra=True)
    cache = CacheSpec(tuple(layer.buffers for layer in layers))
    if not cache.buffers:
        raise DiffbitError(f"{place}: no layer has a buffer, so the model would keep nothing of the past")
    return cache


@dataclass(frozen=True)
class Artifact:
    """A validated manifest. `Artifact.open` reads no other file; `check_files` checks the files it lists."""

    path: Path
    name: str
    diffbit_version: str
    dtype: Annotated[str, one_of("fp32", "fp16")]  # of the graph's floating-point weights and activations
    model: Mapping[str, Any]  # the model's configuration as exported
    scheme: Mapping[str, Any] | None  # how it was quantized; None for a float model
    source: Mapping[str, Any]  # name and sha256 of the checkpoint
    calibration: Mapping[str, Any] | None  # the calibration text of the method
    cache: Annotated[CacheSpec, _cache]
    context_length: Annotated[int, bounds(1)]
    eos_token_ids: Annotated[tuple[int, ...], of_length(0, MAX_GOLDEN)]
    files: Annotated[Mapping[FileName, FileEntry], of_length(0, MAX_FILES)]
    golden: Golden
    sha256: Sha256  # of the manifest
    target: Annotated[str, one_of(*TARGETS)] = "cpu"  # that the graph's operators were chosen for; it runs on others
    method: str | None = None  # how its weights were quantized, such as "rotate+gptq"; None also in older artifacts
    output: Annotated[str, one_of(LOGITS, HIDDEN)] = LOGITS  # of the graph: HIDDEN in `diffbit export --embeddings`
    # initializers that `with_inputs` (external.py) turns into inputs; in older artifacts, they are inputs in the file
    optional_inputs: Annotated[tuple[Annotated[str, one_of(LOGITS_FROM, SHORTER_BY)], ...], of_length(0, 2)] = ()
    parts: Annotated[
        tuple[Part, ...], of_length(0, MAX_PARTS)
    ] = ()  # what the files hold, largest first; empty in older artifacts

    @classmethod
    def open(cls, path: str | Path) -> Artifact:
        """Read and validate `path`/diffbit.json. Raises DiffbitError if anything in it is wrong."""
        folder = artifact_folder(path)
        if _is_checkpoint(folder):
            raise DiffbitError(
                f"{folder}: is a checkpoint, not an artifact; export it first, with `diffbit export {folder} -o OUT`, "
                f'or in Python with diffbit.export_artifact("{folder}", "OUT")'
            )
        if not folder.is_dir():
            raise DiffbitError(f"{folder}: no such artifact folder; diffbit export makes one")
        where = folder / MANIFEST
        if not where.is_file():
            raise DiffbitError(f"{folder}: holds no {MANIFEST}, so it is not an artifact; diffbit export makes one")
        _confined(folder, MANIFEST)
        manifest = read_json(where, MOST_BYTES)
        with located(where):
            version = get(manifest, "artifact_version", Count)
            if version != VERSION:
                advice = "upgrade diffbit" if version > VERSION else "export the model again"
                raise DiffbitError(f"artifact_version is {version}, this diffbit reads {VERSION}; {advice}")
        with located(where, "; restore the file or export the model again"):
            sha256, content = get(manifest, "sha256", Sha256), manifest_sha256(manifest)
            if content != sha256:
                raise DiffbitError(
                    f"was changed after export (its sha256 says {sha256[:12]}…, its content has {content[:12]}…)"
                )
            artifact: Artifact = read(cls, {**manifest, "path": folder}, "", extra=True)
            artifact._check()
        return artifact

    @property
    def vocab_size(self) -> int:
        return int(self.model["vocab_size"])

    @property
    def width(self) -> int:
        """Return how many numbers the graph returns for a token."""
        return self.vocab_size if self.output == LOGITS else get(self.model, "hidden_size", Count, place="model")

    @property
    def pooling(self) -> str:
        """Return how HIDDEN becomes one vector, one of POOLINGS: as the model's authors say, if they do."""
        return str(get(self.model, "pooling", Annotated[str, one_of(*POOLINGS)], POOLINGS[0], "model"))

    def check_output(self, output: str = LOGITS) -> None:
        """Raise DiffbitError if the graph does not return `output`."""
        if output != self.output:
            option = "with --embeddings" if output == HIDDEN else "without --embeddings"
            raise DiffbitError(f"{self.path}: returns {self.output}, wanted {output}; export the model again {option}")

    @property
    def bos_token_id(self) -> int | None:
        return self.model.get("bos_token_id")

    @property
    def nbytes(self) -> int:
        """The bytes of all files on disk, as the manifest lists them."""
        return sum(entry.bytes for entry in self.files.values())

    def bytes_per_token(self, context: int) -> int | None:
        """Return the bytes of weights and cache that a token after `context` tokens reads; None without `parts`."""
        if not self.parts:
            return None
        weights = 0
        for part in self.parts:
            if part.weights and part.name not in LOOKED_UP:
                weights += part.bytes
        return weights + self.cache.nbytes(context)

    @property
    def strangers(self) -> list[str]:
        """Return the listed files that no model has, and that may be code; diffbit opens none of them."""
        return [name for name in self.files if not is_of_a_model(name)]

    @property
    def graph(self) -> str:
        """Return the name of the ONNX graph, which names its data relative to itself."""
        return MODEL if MODEL in self.files else ONNX + MODEL

    def file(self, name: str) -> Path:
        """Return the path of a listed file. Raises DiffbitError unless it exists and lies inside the folder."""
        if name not in self.files:
            raise DiffbitError(f"{self.path / MANIFEST}: lists no {name}; export the model again")
        path = _confined(self.path, name)
        if not path.is_file():
            raise DiffbitError(f"{path}: is listed in {MANIFEST} but missing; restore it or export the model again")
        return path

    def file_problems(self, *, hashes: bool = True) -> dict[str, str]:
        """Return {file name: what is wrong with it} for the listed files that are missing or changed.

        `hashes=False` compares sizes only: it finds a truncated download without reading gigabytes.
        """
        problems = {}
        for name, entry in self.files.items():
            try:
                path = self.file(name)
                if (size := path.stat().st_size) != entry.bytes:
                    problems[name] = f"{path}: has {size} bytes, the manifest says {entry.bytes}; restore the file"
                elif hashes and (sha256 := sha256_file(path)) != entry.sha256:
                    problems[name] = (
                        f"{path}: was changed after export (sha256 {sha256[:12]}…, the manifest says "
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

    def _check(self) -> None:
        """Raise DiffbitError for fields that do not go together."""
        vocab_size = get(self.model, "vocab_size", Count, place="model")
        token_id = Annotated[int, bounds(0, vocab_size - 1, f"a token id from 0 to {vocab_size - 1}")]
        output = Annotated[int, bounds(0, self.width - 1)]
        get(self.model, "bos_token_id", token_id, None, "model")
        read(tuple[token_id, ...], self.eos_token_ids, "eos_token_ids")
        read(tuple[token_id, ...], self.golden.input_ids, "golden.input_ids")
        read(tuple[output, ...], self.golden.token_ids, "golden.token_ids")
        if len(self.golden.input_ids) > self.context_length:
            raise DiffbitError(
                f"golden.input_ids holds {len(self.golden.input_ids)} tokens, more than the context_length "
                f"{self.context_length}"
            )
        if MODEL not in self.files and ONNX + MODEL not in self.files:
            raise DiffbitError(f"files lists no {MODEL}")


def artifact_folder(path: str | Path) -> Path:
    """Return the folder that `path` names: "nano" is the artifact in the package, unless a folder of this name is
    one."""
    is_nano = Path(path) == Path(NANO) and not (Path(path) / MANIFEST).exists()
    return Path(__file__).parent / NANO if is_nano else Path(path)


def _is_checkpoint(path: Path) -> bool:
    """Whether weights are here in a format that only torch runs: a folder of safetensors or GGUF files, or a file."""
    if (path / MANIFEST).exists():
        return False
    files = path.iterdir() if path.is_dir() else [path]
    return any(file.suffix.lower() in (".safetensors", ".gguf") and file.is_file() for file in files)


def _confined(folder: Path, name: str) -> Path:
    """Return `folder`/`name`. Raises DiffbitError where symbolic links lead out of the folder."""
    check_within(folder, path := folder / name)
    return path
