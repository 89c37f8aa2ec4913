"""Options that several commands share, and what they are turned into: windows of text, a device, artifacts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from ..errors import DiffbitError
from .output import remark

if TYPE_CHECKING:
    from ..calib_data import Windows

CALIBRATION_WINDOWS = 128  # of the model's context (at most 512 tokens), for methods that calibrate

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no remarks; results only.")]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing output folder, once the new one is whole.")
]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything random.")]
NoNative = Annotated[
    bool, typer.Option("--no-native", help="Run the operators' portable bodies, not the native library's kernels.")
]
Threads = Annotated[int | None, typer.Option("--threads", help="CPU threads; the default is one per physical core.")]
Device = Annotated[str, typer.Option("--device", help="cpu or cuda; cuda that cannot be had is an error.")]
TorchDevice = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")]
Data = Annotated[
    str, typer.Option("--data", help="Text: 'stdlib', a file, a folder, or hf:NAME[:config][:split][:field].")
]
Field = Annotated[str, typer.Option("--field", help="Field of .jsonl rows, column of .parquet files.")]
MaxWindows = Annotated[int, typer.Option("--max-windows", help="Windows of text to read at most.")]
Length = Annotated[int | None, typer.Option("--length", help="Tokens in a window; default: the context, at most 512.")]


def read_windows(
    model: Path, data: str, field: str, max_windows: int, length: int | None, split: Literal["eval", "calib"] = "eval"
) -> Windows:
    """Windows of held-out text under a model's own tokenizer, no longer than its context."""
    from ..calib_data import eval_windows
    from ..models import Checkpoint

    context = Checkpoint(model).config.max_position
    if length is None:
        length = min(context, 512)
    elif length > context:
        raise DiffbitError(f"a length of {length} tokens exceeds the context of {context} that {model} has")
    return eval_windows(data, model, length, max_windows, split=split, field=field)


def torch_device(name: str) -> str:
    """cpu or cuda, as torch knows them."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise DiffbitError(f"device {name!r} is unknown; choose auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise DiffbitError("device cuda was asked for, but torch finds no CUDA device; use --device cpu")
    return name if name != "auto" else "cuda" if torch.cuda.is_available() else "cpu"


def dtype_for(device: str) -> str:
    """The floats of an artifact that a device runs fast: fp16 on a GPU, whose tensor cores take 16 bits."""
    return "fp16" if device == "cuda" else "fp32"


@contextmanager
def as_artifacts(paths: Sequence[Path], quiet: bool, device: str) -> Iterator[list[Path]]:
    """Artifacts as they are; a checkpoint among them is exported into a folder that lives as long as the command."""
    from ..runtime.artifact import MANIFEST

    with TemporaryDirectory(prefix="diffbit-") as folder:
        found = []
        for index, path in enumerate(paths):
            if (path / MANIFEST).is_file() or not any(path.glob("*.safetensors")):
                found.append(path)  # what is neither is told when it is opened
                continue
            try:
                from ..export import export_artifact
            except ModuleNotFoundError as error:
                raise DiffbitError(
                    f"{path}: is a checkpoint, and exporting it needs {error.name}, which is not installed: run "
                    f"`diffbit export {path} -o ARTIFACT` where it is (pip install 'diffbit[lab]') and take ARTIFACT"
                ) from None
            target = Path(folder) / str(index) / path.resolve().name
            export_artifact(path, target, dtype=dtype_for(device))
            command = f"diffbit export {path} -o FOLDER{' --device cuda' if device == 'cuda' else ''}"
            remark(f"{path}: a checkpoint, exported for now; once and for all: {command}", quiet)
            found.append(target)
        yield found
