"""What quantizing a checkpoint will take: memory, disk and time, from shapes alone, before anything is read.

Memory is the largest resident size, beside what Python and its libraries take before they begin. Of all layers only
one is there at a time, so it is that of the largest: a table (embedding, head), or a decoder layer,

    rtn       its stored tensors, their codes (a byte a weight) and what is computed on TABLE_PART weights at a time
    gptq ...  the same in fp32, twice, while output errors are measured; matrices of K^2 numbers; a batch of tokens
    learned   40 bytes a weight (methods/learned.py)

and, with calibration text, the tokens' hidden states, or with `spilled` nothing of them. Measured beside the formulas:
docs/cli.md. Time is the machine's own, from a product that is timed; others at work on it make it longer.
"""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import DiffbitError
from ..models import Checkpoint, ModelConfig, num_parameters
from ..models.checkpoint.names import EMBEDDING, shapes
from .formats import Format
from .layer import LOSS_TOKENS, MEASURED_TOKENS, TABLE_PART
from .methods.gptq import PRECISE, ROUNDS
from .recipe import Recipe
from .scheme import Scheme, weight_shapes
from .states import BATCH_TOKENS

SLACK = 32 << 20  # at most, what the allocator holds of blocks that it does not map one by one
TEXT = 40 << 20  # of reading calibration text, and of libraries that do
SHARD_FROM = 256 << 20  # bytes of the float model: from here on the output is a file per layer, one in memory
LEARNED = 40  # bytes a weight
ROUNDED = 8e7  # weights a second, one thread
GROUP = Path("/sys/fs/cgroup")  # this process's control group
SAFE = 0.85  # of a demand: a run is refused where that much is not there


@dataclass(frozen=True)
class Demand:
    """memory: bytes of the process at most, beside what it takes already; disk: bytes beside the checkpoint, at most;
    output: bytes of what is written."""

    memory: int
    disk: int
    output: int

    def check(self, place: str | Path, what: str, local: int = 1) -> None:
        """Refuse what cannot fit. place: of the output; local: processes on this machine that take as much."""
        free = available_memory()
        if free is not None and SAFE * self.memory * local > free:
            what += f", {local} times on this machine," if local > 1 else ""
            raise DiffbitError(
                f"{what} takes about {local * self.memory / 1e9:.1f} GB of memory, and {free / 1e9:.1f} GB are free; "
                "take a machine with more memory, or a method that takes less (--method rtn; see `diffbit plan`)"
            )
        folder = Path(place).absolute()
        while not os.path.isdir(folder):  # unlike Path.is_dir() it takes names of any length
            folder = folder.parent
        space = shutil.disk_usage(folder).free
        if SAFE * self.disk > space:
            raise DiffbitError(
                f"{what} writes about {self.disk / 1e9:.1f} GB to {folder}, and {space / 1e9:.1f} GB are free there; "
                "choose another disk for the output"
            )


@dataclass(frozen=True)
class Text:
    """Calibration text: its windows, their length, and how many of them travel through the float model."""

    windows: int
    length: int
    exact: int

    @classmethod
    def of(cls, recipe: Recipe, windows: int, length: int) -> Text:
        if windows < 1 or length < 2:
            raise DiffbitError(f"the text has {windows} windows of {length} tokens, wanted 1 or more of 2 or more")
        return cls(windows, length, windows if recipe.exact else min(windows, max(1, MEASURED_TOKENS // length)))


def quantize_demand(
    checkpoint: Checkpoint, scheme: Scheme, recipe: Recipe, text: Text | None, *, spilled: bool = False
) -> Demand:
    """Of `quantize_checkpoint`. spilled: hidden states of calibration tokens lie on the disk."""
    config = checkpoint.config
    width = getattr(torch, checkpoint.dtype).itemsize
    formats = scheme.formats(config)
    weights = weight_shapes(config)
    output = sum(
        formats[name].nbytes(shape) if name in formats else width * math.prod(shape)
        for name, shape in weights.items()
        if not (name == "lm_head" and scheme.keeps_tied(config))
    )
    output += width * sum(math.prod(shape) for shape in shapes(config).values() if len(shape) == 1)
    output += sum(map(len, checkpoint.tokenizer_files.values())) + (1 << 14)
    table = math.prod(shapes(config)[EMBEDDING])
    most = (width + 1) * table + (2 if width == 4 else 6) * min(table, TABLE_PART)
    layers = [_layer(config, index, width, recipe, text, formats) for index in range(config.num_layers)]
    states = 0
    if text is not None:
        rows = table_rows(config)
        part = 4 * min(TABLE_PART, table)
        most = max(most, width * table + part + 8 * min(LOSS_TOKENS, text.windows * text.length) * rows)
        aims = text.windows if recipe.exact else 0  # what a method that aims at the float model keeps of it
        carried = sum(  # numbers a token that layers hand to later ones
            math.prod(dim for dim in shape if isinstance(dim, int))
            for giver in config.last_readers
            for shape in config.layers[giver].mixer.carried
        )
        states = 4 * (config.hidden_size + carried) * text.length * (text.windows + text.exact + aims)
    kept = text is not None or recipe.name != "rtn"
    memory = max(most, *layers)
    if not in_shards(config, getattr(torch, checkpoint.dtype)):
        memory = max(memory + output, 2 * output)
    memory += min(SLACK, memory) + (0 if text is None else TEXT)
    heads = 4 * config.hidden_size * text.length * text.windows if text is not None else 0
    return Demand(
        memory=int(memory if spilled else memory + states + heads),
        disk=int(output * (2 if kept else 1) + states * (3 if spilled else 2)),
        output=int(output),
    )


def in_shards(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Is a model that large that a checkpoint of it is written a file per layer?"""
    return num_parameters(config) * dtype.itemsize > SHARD_FROM


def table_rows(config: ModelConfig) -> int:
    """Of the head, that are multiplied by at a time."""
    return min(config.vocab_size, max(1, TABLE_PART // config.hidden_size))


def _layer(
    config: ModelConfig, index: int, width: int, recipe: Recipe, text: Text | None, formats: Mapping[str, Format]
) -> float:
    """Bytes that a decoder layer takes at most."""
    prefix = f"model.layers.{index}."
    own = [shape for name, shape in shapes(config).items() if name.startswith(prefix)]
    count = sum(map(math.prod, own))
    rounded = (width + 2) * count
    if text is None:
        return rounded
    matrices = {name: shape for name, shape in weight_shapes(config).items() if name.startswith(prefix)}
    rounding = max((_rounding(formats[name], *shape) for name, shape in matrices.items() if name in formats), default=0)
    tokens = min(BATCH_TOKENS, text.windows * text.length)
    spec = config.layers[index]
    inner = 4 * tokens * (3 * spec.mlp.intermediate_size + 6 * config.hidden_size)
    scores = 3 * 4 * tokens * text.length * spec.mixer.softmaxes
    rounding = count + (rounding if recipe.calibrated else 0)
    measuring = 9 * count + inner + scores
    if recipe.exact:
        return width * count + max(rounding, LEARNED * count + 2 * (inner + scores))
    return width * count + max(rounding, measuring)


def _rounding(format: Format, rows: int, columns: int) -> int:
    """Bytes that GPTQ takes of a weight beside its layer: copies of it; its Gram matrix and a factor of it; and either
    what the factor is made from, or the systems that give the scales, in fp64 (scales.solve)."""
    systems = min(columns**2, rows * format.groups(columns) ** 2)
    factors = (12 if columns <= PRECISE else 8) * columns**2
    return 8 * rows * columns + 8 * columns**2 + max(factors, 28 * systems)


def quantize_seconds(config: ModelConfig, recipe: Recipe, text: Text | None) -> float:
    """About how long it takes on this machine, when nobody else works on it."""
    threads = torch.get_num_threads()
    seconds = num_parameters(config) / ROUNDED / threads
    if text is None:
        return seconds
    flops = 0.0
    for name, (rows, columns) in weight_shapes(config).items():
        if not name.startswith("model.layers."):
            continue
        flops += 2 * rows * columns * text.length * (3 * text.windows + 2 * text.exact)
        flops += columns**2 * text.length * text.windows / 2  # Gram matrices, of a few layers one
        if recipe.calibrated:
            flops += 2 * rows * columns**2 * (1 + 3 * ROUNDS)
    if recipe.exact:
        flops *= 3
    return seconds + flops / speed()


def speed() -> float:
    """Floating-point operations a second of a product, as it is now."""
    a = torch.ones(768, 768)
    torch.mm(a, a)
    begin = time.perf_counter()
    for _ in range(3):
        torch.mm(a, a)
    return 3 * 2 * 768**3 / (time.perf_counter() - begin)


def available_memory() -> int | None:
    """Bytes that this process may still take, by Linux' account of the machine and of its control group; else None."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) << 10)
        taken = int((GROUP / "memory.current").read_text())
        for line in (GROUP / "memory.stat").read_text().splitlines():
            name, value = line.split()
            if name in ("active_file", "inactive_file"):  # read files, which the system drops when it must
                taken -= int(value)
        found.append(int((GROUP / "memory.max").read_text()) - taken)
    except (OSError, ValueError):  # another system, no limit ("max")
        pass
    return min(found, default=None)


def within(
    checkpoint: Checkpoint, scheme: Scheme, recipe: Recipe, text: Text | None, limit: int | None
) -> tuple[Demand, bool]:
    """The demand under a limit of the process's memory in bytes, and whether hidden states go to the disk for it.

    Raises DiffbitError where that does not suffice.
    """
    taken = resident()
    demand = quantize_demand(checkpoint, scheme, recipe, text)
    if limit is None or demand.memory + taken <= limit:
        return demand, False
    least = quantize_demand(checkpoint, scheme, recipe, text, spilled=True)
    if least.memory + taken > limit:
        raise DiffbitError(
            f"--max-memory is {limit / 1e9:.2f} GB, but {checkpoint.path} with method {recipe.name!r} takes about "
            f"{(least.memory + taken) / 1e9:.2f} GB for its largest layer; allow that much, or take another method"
        )
    return least, True


def check_fits(
    checkpoint: Checkpoint,
    scheme: Scheme,
    recipe: Recipe,
    text: Text | None,
    limit: int | None,
    output: str | Path,
    local: int = 1,
) -> bool:
    """Refuse a run that cannot fit, under the limit, into memory or onto the disk; do hidden states go to the disk?

    local: processes of this run on this machine.
    """
    demand, spills = within(checkpoint, scheme, recipe, text, limit)
    demand.check(output, f"quantizing {checkpoint.path} with method {recipe.name!r}", local)
    return spills


def resident() -> int:
    """Bytes of this process in memory; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
