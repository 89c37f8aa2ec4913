"""A command that runs artifacts also takes models: `as_artifacts` quantizes and exports them, and keeps the artifact in
the user's cache folder.

    ~/.cache/diffbit/KEY/NAME/        the artifact of a model; KEY hashes the model's files and name, the format, the
                                      device and diffbit's version
    ~/.cache/diffbit/KEY/made.json    what was done, in words, for the next start, and how close it is to the model
    ~/.cache/diffbit/hashes/          the hashes of large files, which take seconds to compute
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

from ..devices import device_of, dtype_for
from ..io.errors import DiffbitError, MissingDependency
from ..io.fields import get
from ..io.files import (
    Busy,
    folder_name,
    locked,
    make_folder,
    read_json,
    resolved,
    sha256_file,
    size_text,
    write_atomic,
    write_json,
)
from ..io.hub import is_read
from ..io.model_files import DEEPER
from ..version import __version__
from .options import of_formats
from .output import remark
from .scheme_options import AUTO, MethodOptions, SchemeOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from ..models import Checkpoint
    from ..quantize import Report, Scheme
    from .automatic import Quality

LARGE = 1 << 24  # bytes of a file whose hash is kept
NONE = "none"
PATIENCE = 600  # seconds: a model for which the best method takes longer is rounded quickly
QUICK = "int4_g32"  # the format that is quick to round to
MADE = "made.json"
HELD_OUT = (4, 256)  # windows of text to compare with the float model, and their length
WAIT = 0.5  # seconds between two looks whether another process has made the artifact

Quantize = Annotated[
    str,
    of_formats(
        "Format for the weights of a float model: auto (6 bits, which lose little), int4_g32, int8, ..., or none "
        "(float). The artifact is kept in the user's cache folder, from where the next start loads it."
    ),
]


@contextmanager
def as_artifacts(paths: Sequence[Path], device: str, quantize: str | None = None) -> Iterator[list[Path]]:
    """Yield the artifacts of models.

    quantize: the format for float models: auto, a format, or none. Their artifacts are kept in the cache folder; those
    of quantized checkpoints, too, in their own formats. None: all models stay as they are, and their artifacts go when
    the command ends.
    """
    from ..io.gguf import find_gguf
    from ..runtime.artifact import MANIFEST, artifact_folder

    target = target_of(device)
    with TemporaryDirectory(prefix="diffbit-") as folder:
        artifacts = []
        for index, path in enumerate(paths):
            is_artifact = (artifact_folder(path) / MANIFEST).is_file()
            if is_artifact and quantize not in (None, AUTO, NONE):
                raise DiffbitError(f"{path}: is an artifact, whose formats stay as they are; leave out --quantize")
            if not is_artifact and not (any(path.glob("*.safetensors")) or find_gguf(path)):
                what = "is no model" if path.exists() else "no such file or folder"
                raise DiffbitError(
                    f"{path}: {what}; wanted a GGUF file, a folder with *.safetensors, an artifact (diffbit.json), or "
                    "hf:ORG/NAME"
                )
            if is_artifact:
                artifacts.append(path)
                continue
            try:
                if quantize is not None:
                    artifacts.append(_kept(path, quantize, target))
                    continue
                artifact = Path(folder) / str(index) / folder_name(path)
                _export(path, artifact, target)
                command = f"diffbit export {path} -o FOLDER{'' if target == 'cpu' else f' --target {target}'}"
                remark(f"{path}: is a checkpoint, exported to a temporary folder; to keep the artifact: {command}")
                artifacts.append(artifact)
            except ImportError as error:
                if not error.name or error.name.startswith("diffbit"):
                    raise
                missing = MissingDependency(error.name, "lab", f"{path}: is a checkpoint, and exporting it", error)
                raise DiffbitError(
                    f"{missing}, or run `diffbit export {path} -o ARTIFACT` on another machine and pass ARTIFACT"
                ) from None
        yield artifacts


def target_of(device: str) -> str:
    """Return what a model is exported for when it is about to run on a device."""
    from ..runtime.native import library

    target = device_of(device).target
    return "onnxruntime" if target == "cpu" and library() is None else target


def recipe(checkpoint: Checkpoint, format: str, target: str) -> dict[str, Any]:
    """Return the arguments of `quantize_model` for a model that is about to be run: what to do unasked.

    format: auto, or that of the weights. auto is what `diffbit quantize --fast` does, because somebody waits: it keeps
    a model of one or two bits. With a format, a small model is rounded by the best method, one for which that would
    take longer than PATIENCE in one pass over a little text, and one for which even this would, without text.
    """
    from ..quantize.forecast import quantize_seconds
    from ..quantize.methods import parse_recipe
    from ..quantize.on_grid import grids
    from .automatic import FAST, text_shape

    if format == AUTO and target != "cpu":  # whose operators know some of a mix's formats only
        format = QUICK
    options = SchemeOptions() if format == AUTO else SchemeOptions(weights=format)
    best = MethodOptions()
    if not checkpoint.tokenizer_files:
        return {"options": options, "rounding": best, "fast": format == AUTO}
    seconds = quantize_seconds(checkpoint.config, parse_recipe("guided"), text_shape(checkpoint, best))
    if format != AUTO and seconds < PATIENCE:
        return {"options": options, "rounding": best}
    short = MethodOptions(max_windows=8, length=min(256, checkpoint.config.max_position), calibrate="mix")
    is_quick = quantize_seconds(checkpoint.config, parse_recipe("rtn"), text_shape(checkpoint, short)) < PATIENCE
    if is_quick:
        return {"options": options, "rounding": short, "fast": True}
    options = SchemeOptions(weights=FAST) if format == AUTO and not grids(checkpoint) else options
    return {"options": options, "rounding": MethodOptions(method="rtn"), "measure": False}


def _kept(path: Path, format: str, target: str) -> Path:
    """Return the artifact of a model in the cache folder, which is written if need be."""
    cache = _cache()
    sources = [[file.name, _sha256(file, cache)] for file in _sources(path)]
    name = re.sub(r"\.gguf$", "", folder_name(path), flags=re.IGNORECASE) + (f"-{format}" if format != AUTO else "")
    about = {"sources": sources, "name": name, "weights": format, "target": target, "diffbit": __version__}
    folder = cache / hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16] / name
    try:
        make_folder(folder.parent)
    except OSError as error:
        raise DiffbitError(
            f"{cache}: the artifact of {path} cannot be kept there ({error.strerror}); set XDG_CACHE_HOME to a folder "
            "that can be written"
        ) from None
    if not _is_whole(folder):
        with _locked(folder):
            if not _is_whole(folder):  # else another process has written it since
                write_json(folder.parent / MADE, _write(path, format, target, folder))
    if sentence := _made(folder):
        remark(f"{path}: {sentence}")
    remark(f"kept in {folder}")
    return folder


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder; wait while another process writes it."""
    with ExitStack() as stack:
        is_waiting = False
        while True:
            try:
                stack.enter_context(locked(folder))
                break
            except Busy as busy:
                if not is_waiting:
                    remark(f"waiting: {busy}")
                is_waiting = True
                time.sleep(WAIT)
        yield


def _made(folder: Path) -> str:
    """Return what was done to make an artifact; empty if it is not known."""
    try:
        return str(get(read_json(folder.parent / MADE), "made", str))
    except DiffbitError:
        return ""


def _write(path: Path, format: str, target: str, folder: Path) -> dict[str, Any]:
    """Write the artifact of a model. Returns what was done, in words as "made", and how close it is to the model."""
    from ..models import Checkpoint
    from .automatic import quantize_model

    checkpoint = Checkpoint(path)
    if checkpoint.quantization is not None or format == NONE:
        if format not in (AUTO, NONE):
            raise DiffbitError(f"{path}: is quantized already, so that --quantize {format} is too late; leave it out")
        _export(path, folder, target)
        return {"made": f"{'float' if checkpoint.quantization is None else 'in its own formats'}, {_size(folder)}"}
    chosen = recipe(checkpoint, format, target)
    with TemporaryDirectory(prefix="diffbit-") as temporary:
        quantized = Path(temporary) / folder.name
        done = quantize_model(path, quantized, **{**chosen, "measure": False})
        _export(quantized, folder, target)
    close = _compared(checkpoint, folder) if chosen.get("measure", True) and target == "cpu" else None
    if close is None:
        words = f"rounded by {done.report.method}, not compared with the float model"
    else:
        words = f"{close.same_tokens:.0%} of the tokens as in float"
    sentence = f"{_formats(done.report)}, {_size(folder)}, {words}"
    return {"made": sentence, "compared": None if close is None else vars(close)}


def _compared(checkpoint: Checkpoint, artifact: Path) -> Quality | None:
    """Return how close an artifact is to its float model, on held-out text."""
    from ..runtime import Session
    from .automatic import measure_quality

    session = Session(artifact)

    def logits(ids: NDArray[np.int64], mask: NDArray[np.bool_]) -> NDArray[np.float32]:
        session.reset()
        return session.prefill(ids, all_positions=True)

    return measure_quality(checkpoint, logits, HELD_OUT)


def _export(checkpoint: Path, folder: Path, target: str) -> None:
    export_fitting(checkpoint, folder, dtype=dtype_for(target), target=target, overwrite=True)


def export_fitting(
    checkpoint: Path, folder: Path, *, target: str, kv: str | None = None, layout: str = "plain", **options: Any
) -> None:
    """`export_artifact`, with the cache of `kv_for` if kv is None, or in float32 where that cannot hold the keys."""
    from ..export import HalfOverflow, export_artifact

    write = partial(export_artifact, checkpoint, folder, target=target, layout=layout, **options)
    usual = kv_for(checkpoint, target, layout)
    try:
        write(kv=kv or usual)
    except HalfOverflow as problem:
        if kv is not None or usual is None:
            raise
        remark(f"{str(problem).partition(';')[0]}: the cache is exported in float32")
        write(kv=None)


def _formats(report: Report) -> str:
    scheme: Scheme = report.scheme
    if scheme.overrides:
        return f"a mix of formats, {report.after.bits_per_weight:.1f} bits per weight"
    return str(scheme.weights)


def _size(artifact: Path) -> str:
    from ..runtime import Artifact

    return size_text(Artifact.open(artifact).nbytes)


def kv_for(checkpoint: Path, target: str, layout: str = "plain") -> str | None:
    """Return the precision of a cache that is not quantized: float16 in a quantized model for CPUs. None: that of the
    rest."""
    from ..models import Checkpoint

    return "fp16" if (target, layout) == ("cpu", "plain") and Checkpoint(checkpoint).quantization is not None else None


def _is_whole(folder: Path) -> bool:
    """Whether there is an artifact, and it has all its files."""
    from ..runtime import Artifact

    try:
        Artifact.open(folder).check_files(hashes=False)
    except DiffbitError:
        return False
    return True


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or (os.environ.get("LOCALAPPDATA") if os.name == "nt" else None)
    return Path(home or Path.home() / ".cache", "diffbit")


def _sources(checkpoint: Path) -> list[Path]:
    """Return the files that a checkpoint is read from."""
    from ..io.gguf import find_gguf

    gguf = find_gguf(checkpoint)
    if gguf is None:
        deeper = [file for name in DEEPER if (file := checkpoint / name).is_file()]
        return sorted([*deeper, *(file for file in checkpoint.iterdir() if file.is_file() and is_read(file.name))])
    parts = re.sub(r"-\d{5}-of-", "-?????-of-", re.sub(r"([\[*?])", r"[\1]", gguf.name))
    return sorted({gguf, *gguf.parent.glob(parts)})


def _sha256(file: Path, cache: Path) -> str:
    """SHA-256 of a file. It is computed again only if the file's place, size or time has changed."""
    place = resolved(file)
    state = place.stat()
    key = hashlib.sha256(f"{place} {state.st_size} {state.st_mtime_ns}".encode()).hexdigest()
    known = cache / "hashes" / key
    if known.is_file():
        return known.read_text()
    sha256 = sha256_file(file)
    if state.st_size > LARGE:
        make_folder(known.parent)
        with write_atomic(known) as temporary:
            temporary.write_text(sha256)
    return sha256
