"""A command that runs artifacts also takes checkpoints: `as_artifacts` exports them, or quantizes them and keeps the
artifact in the user's cache folder.

    ~/.cache/diffbit/KEY/       an artifact; KEY hashes the checkpoint's files, the format and diffbit's version
    ~/.cache/diffbit/hashes/    the hashes of large files, which take seconds to compute
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from ..devices import device_of, dtype_for
from ..io.errors import DiffbitError, how_to_install
from ..io.files import folder_name, locked, make_folder, resolved, sha256_file, write_atomic
from ..io.hub import is_read
from ..version import __version__
from .options import of_formats
from .output import remark
from .scheme_options import SchemeOptions

LARGE = 1 << 24  # bytes of a file whose hash is kept

Quantize = Annotated[
    str | None,
    of_formats(
        "Quantize a checkpoint to this format, such as int4_g32, and keep the artifact in the user's cache folder; the "
        "next start loads it from there."
    ),
]


@contextmanager
def as_artifacts(paths: Sequence[Path], device: str, quantize: str | None = None) -> Iterator[list[Path]]:
    """Yield the artifacts. Checkpoints among `paths` are exported to a temporary folder while the command runs, or,
    with a format to `quantize` them to, to the cache folder."""
    from ..io.gguf import find_gguf
    from ..runtime.artifact import MANIFEST, artifact_folder

    target = device_of(device).target
    with TemporaryDirectory(prefix="diffbit-") as folder:
        artifacts = []
        for index, path in enumerate(paths):
            is_artifact = (artifact_folder(path) / MANIFEST).is_file()
            if is_artifact and quantize is not None:
                raise DiffbitError(f"{path}: is an artifact, whose formats stay as they are; leave out --quantize")
            if is_artifact or not (any(path.glob("*.safetensors")) or find_gguf(path)):
                artifacts.append(path)  # any other folder raises an error when it is opened
                continue
            try:
                if quantize is not None:
                    artifacts.append(_quantized(path, quantize, target))
                    continue
                from ..export import export_artifact
            except ModuleNotFoundError as error:
                raise DiffbitError(
                    f"{path}: is a checkpoint, and exporting it needs {error.name}, which is not installed: "
                    f"{how_to_install('lab')}, or run `diffbit export {path} -o ARTIFACT` on another machine and pass "
                    "ARTIFACT"
                ) from None
            artifact = Path(folder) / str(index) / folder_name(path)
            export_artifact(path, artifact, dtype=dtype_for(target), kv=kv_for(path, target), target=target)
            command = f"diffbit export {path} -o FOLDER{'' if target == 'cpu' else f' --target {target}'}"
            remark(
                f"{path}: is a checkpoint, exported to a temporary folder; to keep the artifact: {command}; for a "
                "smaller and faster one, kept for the next time: --quantize int4_g32"
            )
            artifacts.append(artifact)
        yield artifacts


def _quantized(checkpoint: Path, format: str, target: str) -> Path:
    """The artifact of a checkpoint with weights in a format, from the cache folder, where it is written if need be."""
    cache = _cache()
    sources = [[file.name, _sha256(file, cache)] for file in _sources(checkpoint)]
    about = {"sources": sources, "weights": format, "target": target, "diffbit": __version__}
    folder = cache / hashlib.sha256(json.dumps(about).encode()).hexdigest()[:32]
    if not _is_whole(folder):
        with locked(folder):
            if not _is_whole(folder):  # else another process has written it since
                _write(checkpoint, format, target, folder)
    return folder


def _write(checkpoint: Path, format: str, target: str, folder: Path) -> None:
    from ..export import export_artifact
    from ..quantize import quantize_checkpoint

    if format == "none":
        raise DiffbitError("--quantize is none, wanted a format, such as int4_g32; leave it out for float weights")
    scheme = SchemeOptions(weights=format).scheme()
    with TemporaryDirectory(prefix="diffbit-") as temporary:
        name = re.sub(r"\.gguf$", "", folder_name(checkpoint), flags=re.IGNORECASE)
        quantized = Path(temporary) / f"{name}-{format}"
        quantize_checkpoint(checkpoint, quantized, scheme)
        kv = kv_for(quantized, target)
        export_artifact(quantized, folder, dtype=dtype_for(target), kv=kv, target=target, overwrite=True)
    remark(f"{checkpoint}: quantized to {format}; the artifact is kept in {folder}")


def kv_for(checkpoint: Path, target: str, layout: str = "plain") -> str | None:
    """The precision of a cache that is not quantized: float16 in a quantized model for CPUs. None: that of the rest."""
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
    """The files that a checkpoint is read from."""
    from ..io.gguf import find_gguf

    gguf = find_gguf(checkpoint)
    if gguf is None:
        return sorted(file for file in checkpoint.iterdir() if file.is_file() and is_read(file.name))
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
