"""The finished part of an interrupted run: a folder `NAME.unfinished` beside the output `NAME`.

    run.json                 the run's source, options and text; a resumed run must have the same
    layer-00000.safetensors  a finished layer as the checkpoint will store it: the embedding, then each layer, ...
    states-00003.safetensors the calibration tokens' hidden states after the last finished layer, exact and quantized,
                             and the tensors that earlier layers pass to later ones
    layer-00000.json         the layer's rows of the report, and the SHA-256 of its files

Each file is written under a temporary name and renamed; a layer counts once its JSON exists. So a killed run loses only
the layer it was working on, and a resumed run computes the same bits as an uninterrupted one. A file that was changed
in between raises an error: the JSON files hold hashes of the others and of themselves.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from torch import Tensor

from ..io import files
from ..io.errors import DiffbitError
from ..io.safetensors import Parts, read_header, write_parts, write_tensors
from ..version import __version__
from .calibration.spill import DiskTensor
from .calibration.states import States
from .calibration.tokens import Tokens
from .report import WeightReport

VERSION = 5
RUN = "run.json"
ANEW = "start again with --overwrite and without --resume"
StoredLayer = tuple[dict[str, Tensor], tuple[WeightReport, ...]]  # a layer's tensors as stored, and its report rows


class Unfinished:
    """`with Unfinished(output, about, tokens) as done: done.add(layer) ...; done.layers()`.

    about: returns the content of run.json; called only if needed. tokens: calibration tokens, set to their state after
    the `count` finished layers. resume: continue with the finished layers, if there are any. The folder is deleted when
    the run is complete, or fails before a decoder layer is finished. Raises DiffbitError if the folder belongs to
    another run, or exists without resume and overwrite.
    """

    def __init__(
        self,
        output: str | Path,
        about: Callable[[], dict[str, Any]],
        tokens: Tokens | None,
        *,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        place = files.resolved(output)
        self.path = place.with_name(f"{place.name}.unfinished")
        with files.locked(self.path):  # removes leftovers of a run that was killed while starting
            pass
        self.about = about
        self.tokens = tokens
        self.count = 0
        if not self.path.is_dir() or not any(self.path.iterdir()):
            return
        if not (self.path / RUN).is_file():
            raise DiffbitError(f"{self.path}: has no {RUN}, so it is not a diffbit run; remove it or choose another -o")
        if resume:
            before, now = files.read_sealed(self.path / RUN, ANEW), about()
            for key in now:
                if before.get(key) != now[key]:
                    raise DiffbitError(
                        f"{self.path}: was started with {key} {_short(before.get(key))}, now it is {_short(now[key])}; "
                        f"resume with the same model, text and options, or {ANEW}"
                    )
            self._restore()
        elif overwrite:
            files.remove_folder(self.path)
        else:
            raise DiffbitError(
                f"{self.path}: holds an interrupted run; pass --resume to continue it, or --overwrite to start again"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None or self.count < 2:
            files.remove_folder(self.path)
        elif error is not None and not isinstance(error, Exception):  # interrupted or terminated
            error.add_note(f"{self.count} layers are kept in {self.path}: the same command with --resume continues")

    def _restore(self) -> None:
        while self._about(self.count).is_file():
            files.check_sha256(self._layer(self.count), self._record(self.count)["layer"], ANEW)
            self.count += 1
        if self.tokens is not None and self.count:
            file = self._states(self.count - 1)
            files.check_sha256(file, self._record(self.count - 1)["states"], ANEW)
            entries = read_header(file)
            for name, states in self._travelling().items():
                states.fill(lambda rows, entry=entries[name]: entry.rows(rows.start, rows.stop))  # type: ignore[misc]
                for key in sorted(key for key in entries if key.startswith(f"{name}.")):  # "hidden.16.0"
                    giver, values = int(key.split(".")[1]), states.space(*entries[key].shape[1:])
                    for rows in states.slices:
                        values[rows] = entries[key].rows(rows.start, rows.stop)
                    states.carried[giver] = (*states.carried.get(giver, ()), values)

    def add(self, layer: StoredLayer) -> None:
        """Store the next layer, and the tokens' states after it."""
        if not self.path.is_dir():
            with files.new_folder(self.path) as folder:
                files.write_sealed(folder / RUN, self.about())
        tensors, rows = layer
        record: dict[str, Any] = {"weights": [asdict(row) for row in rows]}
        record["layer"] = _write(self._layer(self.count), tensors)
        if self.tokens is not None:
            with files.write_atomic(self._states(self.count)) as temporary:
                parts = {}
                for name, states in self._travelling().items():
                    parts[name] = _parts(states.hidden, states)
                    for giver, values in states.carried.items():
                        parts |= {f"{name}.{giver}.{i}": _parts(value, states) for i, value in enumerate(values)}
                write_parts(temporary, parts)
                record["states"] = files.sha256_file(temporary)
        files.write_sealed(self._about(self.count), record)
        if self.count:
            self._states(self.count - 1).unlink(missing_ok=True)
        self.count += 1

    def layers(self) -> Iterator[StoredLayer]:
        """Read all layers back, one at a time."""
        for index in range(self.count):
            record = self._record(index)
            file = self._layer(index)
            files.check_sha256(file, record["layer"], ANEW)
            rows = (WeightReport(**{**row, "shape": tuple(row["shape"])}) for row in record["weights"])
            yield {name: entry.read() for name, entry in read_header(file).items()}, tuple(rows)

    def _travelling(self) -> dict[str, States]:
        """Return the states to store, by their names in the file."""
        return {} if self.tokens is None else {"exact": self.tokens.exact, "hidden": self.tokens}

    def _layer(self, index: int) -> Path:
        return self.path / f"layer-{index:05}.safetensors"

    def _states(self, index: int) -> Path:
        return self.path / f"states-{index:05}.safetensors"

    def _about(self, index: int) -> Path:
        return self._layer(index).with_suffix(".json")

    def _record(self, index: int) -> dict[str, Any]:
        return files.read_sealed(self._about(index), ANEW)


def _parts(values: Tensor | DiskTensor, states: States) -> Parts:
    """Return the shape and the rows of a tensor, some windows at a time."""
    return tuple(values.shape), (values[rows].cpu() for rows in states.slices)


def _write(file: Path, tensors: dict[str, Tensor]) -> str:
    """Write a file and return its SHA-256."""
    with files.write_atomic(file) as temporary:
        write_tensors(temporary, {name: tensor.contiguous() for name, tensor in tensors.items()})
        return files.sha256_file(temporary)


def run(
    source: str, scheme: dict[str, Any], method: str, tokens: Tokens | None, calibration: dict[str, Any] | None
) -> dict[str, Any]:
    """Return the description of a run for run.json. source: the checkpoint's sha256."""
    ids = None
    if tokens is not None:
        digest = hashlib.sha256(repr((tokens.ids.shape, tokens.slices)).encode())
        for tensor in (tokens.ids, tokens.mask):
            digest.update(tensor.cpu().numpy().tobytes())
        ids = digest.hexdigest()
    return {
        "version": VERSION,
        "diffbit": __version__,
        "model": source,
        "scheme": scheme,
        "method": method,
        "calibration": ids,
        "text": calibration,
    }


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
