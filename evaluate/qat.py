"""What training for a format made of a model, for pictures: a run of `diffbit train --qat`.

Its folder holds the quantized model (codes and scales), in master/ the float weights behind it, in log.jsonl a line a
step with "flips", the share of codes that moved, and "zeros", the share that is 0. What lies near a threshold between
two codes can still flip; a model that has settled has its weights away from them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DiffbitError
from ..models import Checkpoint
from ..quantize import QTensor, linear_shapes, read_scheme, read_weight, rounding_for, spread
from ..quantize.report import weight_error

MASTER, LOG = "master", "log.jsonl"
BINS = 120
POINTS = 400  # of a curve over steps; each the mean of as many neighbours


def is_run(folder: Path) -> bool:
    """Does a folder hold a model trained for a format, with its float weights?"""
    return (folder / MASTER / "config.json").is_file() and (folder / LOG).is_file()


def read_run(folder: str | Path) -> dict[str, Any]:
    """A run as plain JSON:

    format      of its linear layers
    values      numbers that the codes stand for, in steps: -1, 0, 1
    thresholds  between them
    edges       of the histograms' bins, of float weights in steps; what lies beyond is left out
    kinds       {"q_proj": {"counts": by bin, "shares": by value}, ...}
    weights     a row a layer, as a report of `diffbit quantize` has it: name, format, weight_error, ...
    steps, flips, zeros
    """
    folder = Path(folder)
    if not is_run(folder):
        raise DiffbitError(f"{folder}: holds no {LOG} and {MASTER}/, wanted the folder of a run of diffbit train --qat")
    quantized, master = Checkpoint(folder), Checkpoint(folder / MASTER)
    scheme = read_scheme(quantized)
    formats = {} if scheme is None else scheme.formats(quantized.config)
    if scheme is None or not formats or master.config != quantized.config:
        raise DiffbitError(f"{folder}: is not the quantized model of its {MASTER}/; restore the run's files")
    format = next(iter(formats.values()))
    codes = torch.arange(3 if format.kind == "ternary" else 2**format.bits)
    values = format.decode_each(codes, torch.ones(()), None).tolist()
    limit = 1.0 if format.kind == "codebook" else max(4.0, 1 - min(values))
    edges = np.linspace(-limit, limit, BINS + 1)
    kinds: dict[str, dict[str, Any]] = {}
    rows = []
    for module, (_, columns) in linear_shapes(quantized.config).items():
        if formats.get(module) != format:  # an override's
            continue
        weight = read_weight(quantized, f"{module}.weight")
        assert isinstance(weight, QTensor)
        exact = spread(master.read(f"{module}.weight").float(), rounding_for(module, columns, scheme.activations))
        kind = kinds.setdefault(
            module.rpartition(".")[2], {"counts": np.zeros(BINS, int), "shares": np.zeros(len(values), int)}
        )
        kind["counts"] += np.histogram(_in_steps(exact, weight).numpy(), edges)[0]
        kind["shares"] += np.bincount(weight.codes.flatten().numpy(), minlength=len(values))
        rows.append(
            {
                "name": f"{module}.weight", "format": format.name, "shape": list(weight.shape),
                "weight_error": weight_error(exact, weight), "output_error": None,
                "bits_per_weight": weight.bits_per_weight, "nbytes": weight.nbytes,
            }
        )  # fmt: skip
    steps = _curves(folder / LOG)
    return {
        "format": format.name,
        "values": values,
        "thresholds": [(a + b) / 2 for a, b in zip(values[1:], values[:-1], strict=True)],
        "edges": edges.tolist(),
        "kinds": {
            name: {"counts": kind["counts"].tolist(), "shares": (kind["shares"] / kind["shares"].sum()).tolist()}
            for name, kind in kinds.items()
        },
        "weights": rows,
        **steps,
    }


def _in_steps(weight: Tensor, quantized: QTensor) -> Tensor:
    """A weight [N, K] over its scales."""
    columns = weight.shape[1]
    steps = quantized.scale.repeat_interleave(quantized.format.group_size or columns, 1)[:, :columns]
    return weight / steps.masked_fill(steps == 0, torch.inf)


def _curves(log: Path) -> dict[str, list[float]]:
    """Steps, flips and zeros of a run's log; a last line that is half written is not one."""
    rows = []
    try:
        for line in log.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n") and "flips" in (row := json.loads(line)):
                rows.append([float(row[name]) for name in ("step", "flips", "zeros")])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DiffbitError(f"{log}: is no log of a run of diffbit train --qat ({error}); restore the file") from None
    if not rows:
        raise DiffbitError(f"{log}: holds no step of a run of diffbit train --qat; restore the file")
    parts = np.array_split(np.array(rows), min(POINTS, len(rows)))
    steps, flips, zeros = np.array([part.mean(0) for part in parts]).T.tolist()
    return {"steps": steps, "flips": flips, "zeros": zeros}
