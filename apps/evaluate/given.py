"""What is given to compare: float models, and quantized checkpoints, artifacts and GGUF files that were made of them.

The float model of a quantized one is found by its SHA-256, which `diffbit quantize` and `diffbit export` record. Where
none is recorded, or that of another model, it is the one with the same tensors; the comparison says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

from ...io import files
from ...io.errors import DiffbitError
from ...io.gguf import find_gguf, read_gguf
from ...models import Checkpoint, ModelConfig
from ...models.checkpoint import HEAD, shapes
from ...quantize import Scheme, read_scheme
from ...runtime import MANIFEST, Artifact
from .variants import NO_METHOD, STORED, Variant, on_a_device, stored

Model = Checkpoint | Artifact
HASH, SHAPE, OTHER = "hash", "shape", "other"  # how a float model was found; OTHER: by shape, another is recorded
MOST_PARENTS = 3  # of a folder in the name of its row
GGUF_FLOATS = (0, 1, 30)  # ggml's numbers of F32, F16 and BF16


@dataclass(frozen=True)
class Quantized:
    """A quantized checkpoint, artifact or GGUF file that is measured as it is, against its float model."""

    model: Model
    variant: Variant
    reference: int  # index of the float checkpoint
    found_by: str  # HASH, SHAPE or OTHER
    nbytes: int | None = None  # of a GGUF file
    bits_per_weight: float | None = None  # of a GGUF file

    @property
    def path(self) -> Path:
        return self.model.path

    @property
    def config(self) -> ModelConfig:
        return _config(self.model)


def open_models(paths: Sequence[str | Path]) -> tuple[list[Checkpoint], list[Model]]:
    """Open all models; return the float ones, and the quantized ones.

    A GGUF file with quantized weights is a quantized one if a float model of its shape is there, too, and else a float
    model itself.
    """
    models = [_open(path) for path in paths]
    floats = [model for model in models if isinstance(model, Checkpoint) and model.quantization is None]
    low = [model for model in floats if _gguf_type(model) is not None]
    better = [_shape(model.config) for model in floats if model not in low] if low else []
    floats = [model for model in floats if model not in low or _shape(model.config) not in better]
    return floats, [model for model in models if model not in floats]


def row_names(paths: Sequence[Path]) -> list[str]:
    """Return one name per folder, all different: its own; where some are equal, with those of the folders around it;
    numbered where the same folder is given twice."""
    places = [files.resolved(path) for path in paths]
    names = {place: files.folder_name(path) for place, path in zip(places, paths, strict=True)}
    around = {place: place.parent for place in names}
    for _ in range(MOST_PARENTS):
        counts = Counter(names.values())
        for place in [place for place, name in names.items() if counts[name] > 1 and around[place].name]:
            names[place] = f"{around[place].name}/{names[place]}"
            around[place] = around[place].parent
    shown = [names[place] for place in places]
    return [
        name if shown.count(name) == 1 else f"{name} ({shown[: index + 1].count(name)})"
        for index, name in enumerate(shown)
    ]


def check_floats(floats: Sequence[Checkpoint], quantized: Sequence[Model], alone: bool = False) -> None:
    """Raise DiffbitError, a sentence that says what is missing, if there are only quantized models. alone: whether
    checkpoints are measured without a float model."""
    if floats or not quantized or (alone and all(isinstance(model, Checkpoint) for model in quantized)):
        return
    paths = " and ".join(str(model.path) for model in quantized)
    names = dict.fromkeys(filter(None, map(_made_of, quantized)))
    known = f" ({' and '.join(names)})" if names else ""
    verb = "is" if len(quantized) == 1 else "are"
    raise DiffbitError(
        f"{paths}: {verb} quantized, and the float model{known} that KL and agreement are measured against is missing; "
        "name it first, as in `diffbit compare FLOAT QUANTIZED`, or pass --bits 16 to measure perplexity alone"
    )


def with_references(quantized: Sequence[Model], names: Sequence[str], floats: Sequence[Checkpoint]) -> list[Quantized]:
    """Find the float model of each quantized one; names: of their rows.

    Raises DiffbitError, one sentence that says what is missing, if there is none, or if several have its shape.
    """
    check_floats(floats, quantized)
    if not quantized:
        return []
    known = {checkpoint.sha256(): index for index, checkpoint in reversed(list(enumerate(floats)))}
    rows: list[Quantized | None] = [None] * len(quantized)
    # an artifact's float model may be known only from the checkpoint that it was exported from, so checkpoints first
    for place in sorted(range(len(quantized)), key=lambda place: isinstance(quantized[place], Artifact)):
        model = quantized[place]
        recorded = _recorded(model)
        by_hash = next((known[sha256] for sha256 in recorded if sha256 in known), None)
        reference = _by_shape(model, floats) if by_hash is None else by_hash
        found_by = HASH if by_hash is not None else OTHER if _names_float(model) else SHAPE
        rows[place] = _row(model, names[place], reference, found_by)
        if isinstance(model, Checkpoint):
            known.setdefault(model.sha256(), reference)
    return [row for row in rows if row is not None]


def tokenizer_of(model: Model) -> tuple[Path, bytes] | None:
    """Return the place and the bytes of a model's tokenizer.json; None if it has none."""
    name = "tokenizer.json"
    if isinstance(model, Artifact):
        return (model.path / name, model.file(name).read_bytes()) if name in model.files else None
    contents = model.tokenizer_files.get(name)
    return None if contents is None else (model.path / name, contents)


def _open(path: str | Path) -> Model:
    path = Path(path)
    is_artifact = (path / MANIFEST).is_file() or (not path.exists() and path == Path("nano"))
    return Artifact.open(path) if is_artifact else Checkpoint(path)


def _config(model: Model) -> ModelConfig:
    return model.config if isinstance(model, Checkpoint) else ModelConfig.from_dict(dict(model.model))


def _shape(config: ModelConfig) -> tuple[Any, ...]:
    """Return what a model has in common with those that were made of it: attention, and the tensors but for the head's,
    which may be tied or not."""
    names = tuple(layer.mixer.name for layer in config.layers)
    return names, tuple(item for item in shapes(config).items() if item[0] != HEAD)


def _row(model: Model, name: str, reference: int, found_by: str) -> Quantized:
    if isinstance(model, Artifact):
        model.check_output()
        return Quantized(model, on_a_device(model, name), reference, found_by)
    scheme = read_scheme(model)
    if scheme is not None:
        return Quantized(model, stored(model, scheme, name), reference, found_by)
    type, nbytes, bits = _gguf_type(model) or ("16", 0, 16.0)
    variant = Variant(STORED, type, NO_METHOD, round(bits, 3), Scheme(), name)
    return Quantized(model, variant, reference, found_by, nbytes, bits)


def _recorded(model: Model) -> list[str]:
    """Return the hashes that name what a model was made of: its float model's, then the checkpoint's it came from."""
    if isinstance(model, Artifact):
        return [source["sha256"] for source in (model.source.get("float"), model.source) if _is_source(source)]
    source = (model.quantization or {}).get("source")
    return [source["sha256"]] if _is_source(source) else []


def _names_float(model: Model) -> bool:
    """Whether a model records the hash of its float model."""
    if isinstance(model, Artifact):
        return model.scheme is None or _is_source(model.source.get("float"))
    return bool(_recorded(model))


def _is_source(source: Any) -> TypeGuard[Mapping[str, Any]]:
    return isinstance(source, Mapping) and isinstance(source.get("sha256"), str)


def _made_of(model: Model) -> str:
    """Return the name of the float model that a model records; "" if there is none."""
    sources = [model.source.get("float")] if isinstance(model, Artifact) else [(model.quantization or {}).get("source")]
    if isinstance(model, Artifact) and model.scheme is None:
        sources.append(model.source)
    return next((str(source["name"]) for source in sources if _is_source(source) and "name" in source), "")


def _by_shape(model: Model, floats: Sequence[Checkpoint]) -> int:
    """Return the index of the one float model that has the shape of a quantized one."""
    shape = _shape(_config(model))
    fitting = [index for index, other in enumerate(floats) if _shape(other.config) == shape]
    name = _made_of(model)
    float_model = f"the float model that it was made of{f' ({name})' if name else ''}"
    if not fitting:
        given = " and ".join(str(other.path) for other in floats)
        raise DiffbitError(f"{model.path}: does not have the shape of {given}; add {float_model}, or leave it out")
    if len({floats[index].path for index in fitting}) > 1:
        paths = " and ".join(str(floats[index].path) for index in fitting)
        raise DiffbitError(f"{model.path}: fits {paths}, and records neither; give only {float_model}")
    return fitting[0]


def _gguf_type(checkpoint: Checkpoint) -> tuple[str, int, float] | None:
    """Return the type of a GGUF file, such as "Q4_K_M", its bytes and the average bits of a weight; None for other
    files, and for one whose matrices are mostly float."""
    file = find_gguf(checkpoint.path)
    if file is None:
        return None
    headers = read_gguf(file).parts()
    weights: Counter[int] = Counter()
    for info in (info for header in headers for info in header.tensors.values()):
        weights[info.type if len(info.shape) > 1 else GGUF_FLOATS[0]] += prod(info.shape)
    ((type, _),) = weights.most_common(1)
    if type in GGUF_FLOATS:
        return None
    nbytes = sum(header.status.st_size for header in headers)
    begins = (
        min((info.begin for info in header.tensors.values()), default=header.status.st_size) for header in headers
    )
    bits = 8 * (nbytes - sum(begins)) / weights.total()
    from gguf.constants import GGMLQuantizationType, LlamaFileType

    number = headers[0].get("general.file_type", int)
    named = {member.value: member.name.removeprefix("MOSTLY_") for member in LlamaFileType}
    types = {member.value: member.name for member in GGMLQuantizationType}
    return named.get(number, types.get(type, "low-bit GGUF")), nbytes, bits
