"""The peers' side of quantizers.py: runs in their environment, knows nothing of diffbit.

    python quantizer_peers.py FOLDER    # reads layers.safetensors, tasks.json; writes peers.safetensors, peers.json

layers.safetensors has LAYER/weight [N, K], LAYER/inputs [T, K] and LAYER/gram [K, K] = X^T X / T. A task is {"method",
"layer", "format", "bits", "group_size", "symmetric"}. peers.safetensors has METHOD/FORMAT/LAYER/PEER: what each peer
would multiply with, as fp32 [N, K].
"""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

Task = dict[str, Any]
PACKAGES = ("torch", "llmcompressor", "compressed-tensors", "hqq", "autoawq")


def gptq(task: Task, weight: Tensor, inputs: Tensor, gram: Tensor) -> Iterator[tuple[str, Tensor]]:
    """llm-compressor's GPTQ with act-order (static groups), block 128, damping 0.01, its defaults else.

    Scales come from its observers: by the range, or by the least error |w - q|^2.4 of a grid of shorter ranges. They
    are rounded to fp16 here, as ours are. Its symmetric scales are positive, |w|max / ((2^b - 1) / 2).
    """
    from compressed_tensors.quantization import QuantizationArgs
    from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
    from llmcompressor.observers import Observer

    for observer in ("memoryless_minmax", "memoryless_mse"):
        arguments = QuantizationArgs(
            num_bits=task["bits"], type="int", symmetric=task["symmetric"], strategy="group",
            group_size=task["group_size"], actorder="weight", observer=observer,
        )  # fmt: skip
        watcher = Observer.load_from_registry(observer, base_name="weight", args=arguments)
        watcher(weight)
        found = watcher.get_qparams()
        scale, zero = found["scale"].half().float(), found["zero_point"]
        quantized, _, _ = quantize_weight(
            weight[None].clone(), gram[None].clone(), scale[None], zero[None], None, arguments, 128, 0.01
        )
        yield f"llm-compressor GPTQ, {observer.removeprefix('memoryless_')}", quantized[0]


def hqq(task: Task, weight: Tensor, inputs: Tensor, gram: Tensor) -> Iterator[tuple[str, Tensor]]:
    """hqq's own optimizer, groups along the inputs. Its zero points are floats: as they are, and rounded as ours."""
    from hqq.core.quantize import Quantizer

    codes, meta = Quantizer.quantize(
        weight, nbits=task["bits"], group_size=task["group_size"], axis=1, bitpack=False, device="cpu",
        compute_dtype=torch.float32,
    )  # fmt: skip
    scale, zero = meta["scale"].float(), meta["zero"].float()
    yield "hqq, float zero points", ((codes.float() - zero) * scale).reshape(weight.shape)
    top = 2 ** task["bits"] - 1
    scale, zero = scale.half().float(), zero.round().clamp(0, top)
    rounded = (weight.reshape(-1, task["group_size"]) / scale + zero).round().clamp(0, top)
    yield "hqq, whole zero points", ((rounded - zero) * scale).reshape(weight.shape)


def awq(task: Task, weight: Tensor, inputs: Tensor, gram: Tensor) -> Iterator[tuple[str, Tensor]]:
    """AutoAWQ's search for scales on one linear layer, without clipping; the division by them is put back into W."""
    quantizer = object.__new__(_awq_quantizer())
    quantizer.w_bit, quantizer.group_size, quantizer.zero_point = task["bits"], task["group_size"], True
    quantizer.duo_scaling, quantizer.max_chunk_memory, quantizer.n_parallel_calib_samples = True, 1 << 30, None
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight.clone()
    linear.weight.requires_grad_(False)
    relative = weight.view(-1, task["group_size"]).abs()
    relative = (relative / (relative.amax(1, keepdim=True) + 1e-6)).view(weight.shape)
    scale = quantizer._compute_best_scale(
        inputs, relative.mean(0), inputs.abs().mean(0), linear, [linear], linear(inputs), {}
    )
    yield "AutoAWQ", quantizer.pseudo_quantize_tensor(weight * scale)[0] / scale


@cache
def _awq_quantizer() -> Any:
    """The class in autoawq's quantizer.py; the package itself wants a transformers of 2025 and CUDA kernels."""
    spec = importlib.util.find_spec("awq")
    assert spec is not None and spec.submodule_search_locations
    root = Path(next(iter(spec.submodule_search_locations)))
    names = {
        "awq.utils.calib_data": ["get_calib_dataset"], "awq.quantize.scale": ["apply_scale", "apply_clip"],
        "awq.utils.utils": ["clear_memory", "get_best_device"],
        "awq.modules.linear": ["WQLinear_GEMM", "WQLinear_GEMV", "WQLinear_Marlin", "WQLinear_GEMVFast"],
        "awq.utils.module": ["append_str_prefix", "get_op_name", "get_named_linears", "set_op_by_name",
                             "exclude_layers_to_not_quantize"],
    }  # fmt: skip
    for package in ("awq", "awq.utils", "awq.quantize", "awq.modules"):
        sys.modules.setdefault(package, types.ModuleType(package))
    for name, members in names.items():
        module = types.ModuleType(name)
        for member in members:
            setattr(module, member, None)
        sys.modules.setdefault(name, module)
    file = importlib.util.spec_from_file_location("awq.quantize.quantizer", root / "quantize" / "quantizer.py")
    assert file is not None and file.loader is not None
    loaded = importlib.util.module_from_spec(file)
    file.loader.exec_module(loaded)
    return loaded.AwqQuantizer


PEERS = {"gptq": gptq, "hqq": hqq, "awq": awq}


def installed() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    folder = Path(sys.argv[1])
    layers, tasks = load_file(folder / "layers.safetensors"), json.loads((folder / "tasks.json").read_text())
    made: dict[str, Tensor] = {}
    missing: dict[str, str] = {}
    for task in tasks:
        if task["method"] in missing:
            continue
        parts = [layers[f"{task['layer']}/{part}"] for part in ("weight", "inputs", "gram")]
        try:
            with torch.no_grad():
                for name, weight in PEERS[task["method"]](task, *parts):
                    made[f"{task['method']}/{task['format']}/{task['layer']}/{name}"] = weight.float().contiguous()
        except (ImportError, AssertionError) as error:
            missing[task["method"]] = f"{type(error).__name__}: {error}"
    save_file(made, folder / "peers.safetensors")
    (folder / "peers.json").write_text(json.dumps({"versions": installed(), "missing": missing}))


if __name__ == "__main__":
    main()
