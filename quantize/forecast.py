"""The memory and disk space that quantizing a checkpoint takes at most, from the table of sizes (sizes.py), and about
how long it takes.

Memory is in addition to what Python and its libraries take at the start. Only one layer is in memory at a time, so the
largest determines it: a table (embedding, head), or a decoder layer,

    rtn         its stored tensors, their codes (a byte per weight) and temporaries
    with text   the same and 9 bytes per weight, while output errors are measured; activations of a batch of tokens
                (searching scales takes no more)
    gptq ...    matrices of K^2 numbers
    guided      the whole float model and the activations of a window, if these are more
    learned     32 bytes per weight (methods/learned.py), and activations of the tokens of a training step, twice

and, with calibration text, the tokens' hidden states, unless they are on disk. docs/memory.md compares this with
measurements: a run took up to 1.12 times as much.

Time is extrapolated from a timed matrix product; other work on the machine makes it longer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..io.errors import DiffbitError
from ..io.resources import resident_memory
from ..models import Checkpoint, ModelConfig, num_parameters
from ..models.checkpoint.names import layer_of
from .calibration.states import BATCH_TOKENS
from .calibration.tokens import LOSS_TOKENS, MEASURED_TOKENS
from .layer import TABLE_PART
from .methods import STEP_TOKENS, Recipe
from .methods.gptq import PRECISE
from .plan import Plan
from .scheme import HEAD_MODULE, linear_shapes
from .sizes import TensorSize, sizes

SLACK = 32 << 20  # upper bound of what the allocator keeps of blocks that it does not map separately
TEXT = 40 << 20  # for reading calibration text, with the libraries for it
SHARD_FROM = 256 << 20  # bytes of the float model from which on the output has one file per layer
MARGIN = 1.15  # of --max-memory over the estimate
ROUNDED = 8e7  # weights per second on one thread
SEARCHED = 5e6  # the same, whose scales rounding to nearest searches
PASSES = 0.5  # of the speed of a matrix product, which what lies between the products leaves
GPTQ_PRODUCTS = 100  # of a weight with a [K, K] matrix: GPTQ makes 10, column by column, at the speed of memory


class Demand(NamedTuple):
    """Bytes at the peak."""

    memory: int
    disk: int


def in_shards(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether a checkpoint of the model is so large that it gets one file per layer."""
    return num_parameters(config) * dtype.itemsize > SHARD_FROM


def quantize_demand(
    checkpoint: Checkpoint, plan: Plan, recipe: Recipe, text: tuple[int, int] | None, spilled: bool = False
) -> Demand:
    """Return what `quantize_checkpoint` takes at most.

    text: windows of calibration text, and their length. spilled: whether the tokens' hidden states are on disk.
    """
    config, dtype = checkpoint.config, getattr(torch, checkpoint.dtype)
    table = sizes(plan, stored=dtype)
    memory = max(_layer(config, tensors, dtype.itemsize, recipe, text) for tensors in table.layers())
    output = table.checkpoint_bytes
    if not in_shards(config, dtype):  # all of it is in memory before it is written
        memory = max(memory + output, 2 * output)
    memory += min(SLACK, memory)
    if text is None:
        return Demand(memory, output if recipe.name == "rtn" else 2 * output)
    windows, length = text
    weighs = recipe.rounding.weighs
    measured = windows if recipe.exact else min(windows, max(1, (LOSS_TOKENS if weighs else MEASURED_TOKENS) // length))
    passed_on = sum(  # numbers per token that layers pass to later layers
        math.prod(dim for dim in shape if isinstance(dim, int))
        for giver in config.last_readers
        for shape in config.layers[giver].mixer.carried
    )
    # of the quantized and of the float model, and the float outputs for methods that fit them
    states = 4 * (config.hidden_size + passed_on) * length * (windows * (1 + recipe.exact) + measured)
    mixed = 0 if weighs else 4 * config.hidden_size * length * windows  # outputs of the mixers, for later passes
    memory += TEXT + (0 if spilled else states + mixed)
    if recipe.rounding.token_weights is not None:
        memory = max(memory, _backward(config, text))
    return Demand(memory, 2 * output + states * (3 if spilled else 2))  # layers and states are kept for --resume


def _layer(
    config: ModelConfig, tensors: Sequence[TensorSize], width: int, recipe: Recipe, text: tuple[int, int] | None
) -> int:
    """Return the peak bytes of a decoder layer, or of a tensor outside; width: bytes of a stored float."""
    count, index = sum(tensor.weights for tensor in tensors), layer_of(tensors[0].name)
    if index is None:
        return (width + 1) * count + 6 * min(count, TABLE_PART)
    if text is None:
        return (width + 2) * count
    windows, length = text
    spec, tokens = config.layers[index], min(BATCH_TOKENS, windows * length)
    activations = 4 * (3 * spec.mlp.intermediate_size + 6 * config.hidden_size)  # of a token
    attention = 3 * 4 * tokens * length * spec.mixer.softmaxes
    peaks = [9 * count + activations * tokens + attention]
    if recipe.calibrated:
        peaks.append(count + max(map(_rounding, tensors)))
    if recipe.exact:
        peaks.append(32 * count + 2 * activations * max(STEP_TOKENS, length))
    return width * count + max(peaks)


def _backward(config: ModelConfig, text: tuple[int, int]) -> int:
    """Return the peak bytes of a window's pass through the whole float model and back."""
    windows, length = text
    layers = [5 * spec.mlp.intermediate_size + 2 * spec.mixer.softmaxes * length for spec in config.layers]
    numbers = sum(layers) + (10 * len(layers) + windows) * config.hidden_size + 6 * config.vocab_size  # of each token
    return 4 * (num_parameters(config) + numbers * length) + TEXT


def _rounding(tensor: TensorSize) -> int:
    """Return the bytes that GPTQ takes for a weight beside its layer: copies of the weight, its Gram matrix as it is
    and shrunk, a factor of it, and the larger of the factorization's workspace and the fp64 systems for the scales
    (scales.solve)."""
    if tensor.format is None:
        return 0
    rows, columns = tensor.shape
    systems = 28 * min(columns**2, rows * tensor.format.groups(columns) ** 2)
    return 8 * rows * columns + 12 * columns**2 + max((12 if columns <= PRECISE else 8) * columns**2, systems)


def must_spill(
    checkpoint: Checkpoint, plan: Plan, recipe: Recipe, text: tuple[int, int] | None, limit: int | None
) -> bool:
    """Return whether hidden states must be on disk for this process to keep within `limit` bytes of memory.

    Raises DiffbitError if that does not suffice.
    """
    in_memory, on_disk = (
        MARGIN * quantize_demand(checkpoint, plan, recipe, text, spilled).memory + resident_memory()
        for spilled in (False, True)
    )
    if limit is not None and on_disk > limit:
        raise DiffbitError(
            f"--max-memory is {limit / 1e9:.2f} GB, but {checkpoint.path} with method {recipe.name!r} takes about "
            f"{on_disk / 1e9:.2f} GB at its peak; allow that much, or use another method"
        )
    return limit is not None and in_memory > limit


def quantize_seconds(config: ModelConfig, recipe: Recipe, text: tuple[int, int] | None) -> float:
    """Return about how many seconds `quantize_checkpoint` takes on this machine's CPU, without other work on it.

    text: windows of calibration text and their length, or None. The text passes through each layer about three times,
    and five times if the float model's outputs on all of it are needed; if tokens are weighed, it passes through the
    whole model and back.
    """
    speed = ROUNDED if recipe.calibrated or text is None else SEARCHED
    seconds = num_parameters(config) / speed / torch.get_num_threads()
    if text is None:
        return seconds
    operations, back = 0.0, recipe.rounding.token_weights is not None
    windows, length = text
    for module, (rows, columns) in linear_shapes(config).items():
        operations += 2 * rows * columns * length * windows * 2 * back
        if module == HEAD_MODULE:
            continue
        operations += 2 * rows * columns * length * windows * (5 if recipe.exact else 3)
        operations += columns**2 * length * windows / 2  # Gram matrices, each shared by a few layers
        operations += 2 * rows * columns**2 * GPTQ_PRODUCTS * recipe.calibrated
    return seconds + operations * (3 if recipe.exact else 1) / operations_per_second()


def operations_per_second() -> float:
    """Return the floating-point operations per second that a model's passes reach on this CPU, from a timed matrix
    product."""
    a = torch.ones(768, 768)
    torch.mm(a, a)
    begin = time.perf_counter()
    for _ in range(3):
        torch.mm(a, a)
    return PASSES * 3 * 2 * 768**3 / (time.perf_counter() - begin)
