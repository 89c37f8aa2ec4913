"""diffbit plan: predict the memory, disk and time that quantizing and exporting a checkpoint take."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Literal

import typer

from ..io.errors import DiffbitError
from ..io.files import parse_size
from .options import CALIBRATION_WINDOWS, Json, Length, Quiet, dtype_for, window_length
from .output import print_json, print_table, remark
from .quantize import (
    Activations,
    Calibrate,
    CalibrationWindows,
    Embedding,
    Head,
    KvCache,
    KvWindow,
    MaxMemory,
    MethodName,
    Model,
    Override,
    Qk,
    SchemeFile,
    Weights,
    read_scheme,
)

EXAMPLES = (
    "diffbit plan out/demo/diff_v1 --weights int4_g32 --method gptq",
    "diffbit plan out/demo/diff_v1 --weights int4_g32 --method gptq --max-memory 2GB --json",
    "diffbit plan out/demo/diff_v1-int4",
)
Dtype = Literal["fp32", "fp16"]


def plan(
    model: Model,
    weights: Weights = None,
    embedding: Embedding = None,
    head: Head = None,
    override: Override = None,
    activations: Activations = None,
    kv: KvCache = None,
    qk: Qk = None,
    kv_window: KvWindow = None,
    scheme_file: SchemeFile = None,
    method: MethodName = "rtn",
    calibrate: Calibrate = None,
    max_windows: CalibrationWindows = None,
    length: Length = None,
    max_memory: MaxMemory = None,
    device: Literal["cpu", "cuda"] = typer.Option("cpu", help="Device that the artifact is for."),
    dtype: Dtype | None = typer.Option(None, help="Precision of everything in the artifact that is not quantized."),
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predict the memory, disk and time that `quantize` and `export` need, and the artifact's size.

    Neither is run. Memory and sizes are computed from the model's shapes; the time is estimated from a matrix product
    timed on this machine. For a quantized checkpoint, only `export` is predicted.
    """
    from ..models import Checkpoint
    from ..quantize.demand import Text, available_memory, quantize_seconds, resident, within
    from ..quantize.methods import parse_recipe

    checkpoint = Checkpoint(model)
    options = (scheme_file, weights, embedding, head, override, activations, kv, qk, kv_window)
    steps: dict[str, Any] = {}
    chosen = None
    if any(option is not None for option in options):
        if checkpoint.quantization is not None:
            raise DiffbitError(
                f"{model}: is quantized already; leave out the options of a scheme, or pass the float model"
            )
        chosen = read_scheme(*options)
        recipe = parse_recipe(method)
        text = None
        if calibrate is not None or recipe.calibrated:
            count = (CALIBRATION_WINDOWS if recipe.calibrated else 16) if max_windows is None else max_windows
            text = Text.of(recipe, count, window_length(model, checkpoint.config.max_position, length))
        base = resident()
        demand, spilled = within(
            checkpoint, chosen, recipe, text, None if max_memory is None else parse_size(max_memory)
        )
        seconds = quantize_seconds(checkpoint.config, recipe, text)
        more = {"memory": base + demand.memory, "seconds": seconds, "hidden_states_on_disk": spilled}
        steps["quantize"] = asdict(demand) | more
    from ..export.demand import export_demand, export_seconds

    demand = export_demand(checkpoint, dtype or dtype_for(device), chosen)
    seconds = export_seconds(checkpoint.config, demand.output)
    steps["export"] = asdict(demand) | {"memory": resident() + demand.memory, "seconds": seconds}
    free = available_memory()
    if as_json:
        print_json({"model": str(model), "steps": steps, "available_memory": free})
        return
    print_table(
        {
            "step": name,
            "peak memory": f"{step['memory'] / 1e6:,.0f} MB",
            "disk": f"{step['disk'] / 1e6:,.1f} MB",
            "output": f"{step['output'] / 1e6:,.1f} MB",
            "time": f"about {step['seconds']:,.0f} s",
        }
        for name, step in steps.items()
    )
    if steps.get("quantize", {}).get("hidden_states_on_disk"):
        remark("the calibration tokens' hidden states are kept on disk, which takes longer")
    if free is not None:
        remark(f"{free / 1e6:,.0f} MB of memory are free")
