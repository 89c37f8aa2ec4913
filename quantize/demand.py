"""Predicts the memory, disk space and time that quantizing a checkpoint needs, from shapes alone.

Memory is the peak resident size, in addition to what Python and its libraries take at the start. Only one layer is in
memory at a time, so the largest determines it: a table (embedding, head), or a decoder layer,

    rtn       its stored tensors, their codes (a byte per weight) and temporaries for TABLE_PART weights at a time
    gptq ...  the same in fp32, twice, while output errors are measured; matrices of K^2 numbers; a batch of tokens
    learned   32 bytes per weight (methods/learned.py), and activations of the tokens of a training step, twice

and, with calibration text, the tokens' hidden states, unless they are `spilled` to disk. docs/memory.md has
measurements. Time is extrapolated from a timed matrix product; other work on the machine makes it longer.
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

from ..formats import Format
from ..io.errors import DiffbitError
from ..models import Checkpoint, ModelConfig, num_parameters
from ..models.checkpoint.names import EMBEDDING, shapes
from .calibration.states import BATCH_TOKENS
from .calibration.tokens import LOSS_TOKENS, MEASURED_TOKENS
from .layer import TABLE_PART, table_rows
from .methods import Recipe, learned
from .methods.gptq import PRECISE, ROUNDS
from .scheme import Scheme, weight_shapes

SLACK = 32 << 20  # upper bound of what the allocator keeps of blocks that it does not map separately
TEXT = 40 << 20  # for reading calibration text, with the libraries for it
SHARD_FROM = 256 << 20  # bytes of the float model from which on the output has one file per layer
LEARNED = 32  # bytes per weight
ROUNDED = 8e7  # weights per second on one thread
GROUP = Path("/sys/fs/cgroup")  # this process's control group
MARGIN = 1.15  # of a limit on a demand: a run took up to 1.12 times the memory that was predicted (docs/memory.md)
SAFE = 0.85  # share of a demand that must be available for a run to start


@dataclass(frozen=True)
class Demand:
    """memory: peak bytes of the process, in addition to what it takes already; disk: peak bytes of disk space; output:
    bytes of the output."""

    memory: int
    disk: int
    output: int

    def check(self, place: str | Path, what: str, local: int = 1) -> None:
        """Raise DiffbitError if this does not fit. place: of the output; local: processes like this on this machine."""
        free = available_memory()
        if free is not None and SAFE * self.memory * local > free:
            what += f", {local} times on this machine," if local > 1 else ""
            raise DiffbitError(
                f"{what} takes about {local * self.memory / 1e9:.1f} GB of memory, but {free / 1e9:.1f} GB are free; "
                "use a machine with more memory, or a method that needs less (--method rtn; see `diffbit plan`)"
            )
        folder = Path(place).absolute()
        while not os.path.isdir(folder):  # unlike Path.is_dir(), it accepts names of any length
            folder = folder.parent
        space = shutil.disk_usage(folder).free
        if SAFE * self.disk > space:
            raise DiffbitError(
                f"{what} writes about {self.disk / 1e9:.1f} GB to {folder}, but {space / 1e9:.1f} GB are free there; "
                "choose another disk for the output"
            )


@dataclass(frozen=True)
class Text:
    """Calibration text: the number of windows, their length, and how many of them also pass through the float model."""

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
    """The demand of `quantize_checkpoint`. spilled: whether calibration tokens' hidden states are on disk."""
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
        rows = min(config.vocab_size, table_rows(config.hidden_size))
        part = 4 * min(TABLE_PART, table)
        most = max(most, width * table + part + 8 * min(LOSS_TOKENS, text.windows * text.length) * rows)
        aims = text.windows if recipe.exact else 0  # float outputs, for methods that fit them
        carried = sum(  # numbers per token that layers pass to later layers
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
    """Whether a checkpoint of the model is so large that it gets one file per layer."""
    return num_parameters(config) * dtype.itemsize > SHARD_FROM


def _layer(
    config: ModelConfig, index: int, width: int, recipe: Recipe, text: Text | None, formats: Mapping[str, Format]
) -> float:
    """Peak bytes of a decoder layer."""
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
    inner = 4 * (3 * spec.mlp.intermediate_size + 6 * config.hidden_size)  # bytes per token
    scores = 3 * 4 * tokens * text.length * spec.mixer.softmaxes
    rounding = count + (rounding if recipe.calibrated else 0)
    measuring = 9 * count + inner * tokens + scores
    learning = LEARNED * count + 2 * inner * max(learned.BATCH_TOKENS, text.length) if recipe.exact else 0
    return width * count + max(rounding, measuring, learning)


def _rounding(format: Format, rows: int, columns: int) -> int:
    """Bytes that GPTQ needs for a weight in addition to its layer: copies of the weight; its Gram matrix and a factor
    of it; and the larger of the factorization's workspace and the fp64 systems for the scales (scales.solve)."""
    systems = min(columns**2, rows * format.groups(columns) ** 2)
    factors = (12 if columns <= PRECISE else 8) * columns**2
    return 8 * rows * columns + 8 * columns**2 + max(factors, 28 * systems)


def quantize_seconds(config: ModelConfig, recipe: Recipe, text: Text | None) -> float:
    """Estimated time on this machine without other work on it."""
    threads = torch.get_num_threads()
    seconds = num_parameters(config) / ROUNDED / threads
    if text is None:
        return seconds
    flops = 0.0
    for name, (rows, columns) in weight_shapes(config).items():
        if not name.startswith("model.layers."):
            continue
        flops += 2 * rows * columns * text.length * (3 * text.windows + 2 * text.exact)
        flops += columns**2 * text.length * text.windows / 2  # Gram matrices, each shared by a few layers
        if recipe.calibrated:
            flops += 2 * rows * columns**2 * (1 + 3 * ROUNDS)
    if recipe.exact:
        flops *= 3
    return seconds + flops / speed()


def speed() -> float:
    """Measure the floating-point operations per second of a matrix product."""
    a = torch.ones(768, 768)
    torch.mm(a, a)
    begin = time.perf_counter()
    for _ in range(3):
        torch.mm(a, a)
    return 3 * 2 * 768**3 / (time.perf_counter() - begin)


def available_memory() -> int | None:
    """Bytes that this process can still allocate, from Linux's counts for machine and control group; else None."""
    found = []
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) << 10)
        taken = int((GROUP / "memory.current").read_text())
        for line in (GROUP / "memory.stat").read_text().splitlines():
            name, value = line.split()
            if name in ("active_file", "inactive_file"):  # page cache, which the system can drop
                taken -= int(value)
        found.append(int((GROUP / "memory.max").read_text()) - taken)
    except (OSError, ValueError):  # another system, or no limit ("max")
        pass
    return min(found, default=None)


def within(
    checkpoint: Checkpoint, scheme: Scheme, recipe: Recipe, text: Text | None, limit: int | None
) -> tuple[Demand, bool]:
    """The demand with at most `limit` bytes of memory for the process, and whether hidden states must go to disk.

    Raises DiffbitError if that does not suffice.
    """
    taken = resident()
    demand = quantize_demand(checkpoint, scheme, recipe, text)
    if limit is None or MARGIN * demand.memory + taken <= limit:
        return demand, False
    least = quantize_demand(checkpoint, scheme, recipe, text, spilled=True)
    if MARGIN * least.memory + taken > limit:
        raise DiffbitError(
            f"--max-memory is {limit / 1e9:.2f} GB, but {checkpoint.path} with method {recipe.name!r} takes about "
            f"{(MARGIN * least.memory + taken) / 1e9:.2f} GB for its largest layer; allow that much, or use another "
            "method"
        )
    return least, True


def resident() -> int:
    """Resident bytes of this process; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return 0
