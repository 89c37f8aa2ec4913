"""Finds the weight files of a checkpoint folder, and checks that all of them are inside it.

A folder is untrusted: an index can name "../../etc/passwd", and a link inside it can lead anywhere. Only safetensors is
read; a pickle can run code when it is opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...io import files
from ...io.errors import DiffbitError
from ...io.fields import get, located, shown
from ...io.model_files import POOLING
from ...io.safetensors import Entry, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
GENERATION = "generation_config.json"
# Files that say how the weights are quantized where config.json does not: {name: quant_method}
QUANTIZATION = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
MODULES = "modules.json"  # of sentence-transformers
POOLINGS = {"lasttoken": "last", "pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}
PLAIN_MODULES = ("Transformer", "Pooling", "Normalize")  # what an embedding model consists of; vectors have length 1
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"  # of PEFT (adapter.py)


def check_folder(path: Path) -> None:
    """Raise an error that says what `path` is, unless it is a checkpoint folder."""
    if not path.exists():
        raise DiffbitError(f"{path}: no such folder")
    if not path.is_dir():
        raise DiffbitError(f"{path}: is a file, wanted a folder with config.json and safetensors weights")
    if (path / "diffbit.json").is_file():
        raise DiffbitError(f"{path}: is an exported artifact, wanted the checkpoint that it was made from")
    if not (path / "config.json").exists():
        if (path / ADAPTER_CONFIG).exists():
            base = files.read_json(inside(path, ADAPTER_CONFIG, path)).get("base_model_name_or_path") or "MODEL"
            raise DiffbitError(
                f"{path}: is an adapter of {shown(base)}, not a model; pass that model, and the adapter as --adapter: "
                f"diffbit quantize MODEL --adapter {path} (or diffbit convert, for a float model)"
            )
        raise DiffbitError(f"{path}: holds no config.json, wanted a folder with config.json and safetensors weights")


def check_no_adapter(path: Path) -> None:
    """Raise DiffbitError for a model's folder with an adapter: whether it is merged already, nothing says."""
    if (path / ADAPTER_CONFIG).exists() and any(path.glob("adapter_model.*")):
        raise DiffbitError(
            f"{path}: holds a model and an adapter ({ADAPTER_CONFIG}). If the adapter is to be merged into the model: "
            f"diffbit convert {path} --adapter {path} -o MERGED, and go on with MERGED; if it is merged already, move "
            f"the files adapter_* out of the folder"
        )


def inside(folder: Path, name: str, named_by: Path) -> Path:
    """Return the path of file `name`; raises DiffbitError if it is missing or outside the folder."""
    file = folder / name
    if name in ("", ".", "..") or Path(name).name != name or "\\" in name or "\0" in name:
        raise DiffbitError(f"{named_by}: names the file {name!r}, wanted the plain name of a file in the folder")
    if not file.exists():
        raise DiffbitError(f"{named_by}: names the file {name}, which does not exist; copy the missing file")
    files.check_within(folder, file)
    if not file.is_file():
        raise DiffbitError(f"{file}: is not a regular file")
    return file


def find_tensors(folder: Path, single: str) -> dict[str, Entry]:
    """Return every tensor of the folder, from the file `single` or from the files in the index."""
    index = folder / INDEX
    if (folder / single).exists():
        return read_header(inside(folder, single, folder))
    if index.exists():
        return _indexed(folder, inside(folder, INDEX, folder))
    others = sorted(file.name for file in folder.iterdir() if file.suffix == ".safetensors")
    if others:
        raise DiffbitError(f"{folder}: holds {others[0]} but neither {single} nor {INDEX}, wanted one of them")
    pickles = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLES)
    if pickles:
        raise DiffbitError(
            f"{folder / pickles[0]}: is a pickle, which can run code when it is opened, so it is not read; save the "
            "model as safetensors (in transformers: save_pretrained(..., safe_serialization=True))"
        )
    raise DiffbitError(f"{folder}: holds no weights, wanted {single} or {INDEX}")


def find_pooling(folder: Path) -> str | None:
    """Return how an embedding model's authors pool its hidden states, from the files of sentence-transformers: "mean",
    "last", or the words of a way that diffbit does not have; None: the folder does not say."""
    more = ""
    if (folder / MODULES).is_file():
        data = inside(folder, MODULES, folder).read_bytes()
        modules = get(files.parse_json(b'{"list": %s}' % data, folder / MODULES), "list", tuple[Any, ...])
        kinds = [str(module.get("type")).rpartition(".")[2] for module in modules if isinstance(module, dict)]
        more = "".join(f", then {kind}" for kind in kinds if kind not in PLAIN_MODULES)
    file = folder / POOLING
    if not file.is_file():
        return more.removeprefix(", ") or None
    files.check_within(folder, file)
    values = files.read_json(file)
    modes = [name for name, value in values.items() if name.startswith("pooling_mode_") and value is True]
    if (named := values.get("pooling_mode")) is not None:
        modes = [str(mode) for mode in (named if isinstance(named, list) else [named])]
    return (", ".join(POOLINGS.get(mode, mode) for mode in modes) + more) or None


def find_quantization(folder: Path, values: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return how the weights are quantized, from config.json or the files that some tools write in place of its field,
    with the quant_method that it stands for; None: they are float."""
    entry: dict[str, Any] | None = get(values, "quantization_config", Mapping[str, Any], None)
    if entry is not None:
        if "quant_method" in entry or "quantizer" in entry:
            return entry
        if entry.get("load_in_4bit") or entry.get("load_in_8bit"):
            return entry | {"quant_method": "bitsandbytes"}
        return entry | ({"quant_method": "mlx"} if "quantization" in values else {})
    if isinstance(values.get("quantization"), Mapping):
        return {"quant_method": "mlx", **values["quantization"]}
    for name, method in QUANTIZATION.items():
        if (folder / name).is_file():
            return {"quant_method": method} | files.read_json(inside(folder, name, folder))
    return None


def _indexed(folder: Path, index: Path) -> dict[str, Entry]:
    values = files.read_json(index)
    with located(index):
        weight_map = get(values, "weight_map", Mapping[str, str])
    headers = {name: read_header(inside(folder, name, index)) for name in sorted(set(weight_map.values()))}
    for tensor, name in weight_map.items():
        if tensor not in headers[name]:
            raise DiffbitError(f"{index}: says that {name} holds tensor {tensor}, but it does not; copy {name} again")
    entries: dict[str, Entry] = {}
    for name, header in headers.items():
        for tensor, entry in header.items():
            if weight_map.get(tensor) != name:
                raise DiffbitError(f"{folder / name}: holds tensor {tensor}, which {INDEX} does not place there")
            entries[tensor] = entry
    return entries
