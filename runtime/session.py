"""Runs a model on a device: token ids in, logits out. The session keeps the cache (caches.py) between calls.

Batches of unequal prompts need an `attention_mask` (1: token, 0: padding), with padding on either side. The session
moves each row's tokens to its start, so the first tokens and the blocks of a low-bit cache are those of the row alone.
In a model with rings or states, which count positions, it moves them to the end, so no padding separates a prompt from
the generated tokens. Positions count real tokens only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..devices import device_of
from ..io.errors import DiffbitError
from ..settings import SessionOptions
from .artifact import LOGITS_FROM, SHORTER_BY, Artifact
from .caches import Cache, Ids
from .external import check_external
from .memory import pages
from .native import best_instruction_set, library_for
from .providers import CPU, computes_on_cpu, lacks_16_bits, node_counts, onnxruntime, open_session, out_of_memory

Logits = NDArray[np.float32]
Signature = tuple[str, tuple[int | None, ...]]  # type and shape of a tensor; None: any size

# Prompt tokens per call of the graph. CHUNK limits the memory for attention weights, and for the logits of all
# positions (134 MB with a vocabulary of 128k); it is large enough that reading the weights once per call costs little.
# A GPU's kernels store no attention weights, and need more tokens: 256 of 16 pairs of heads are 32 to 64 thread blocks
# of attention, and an H100 has 132 multiprocessors. On a CPU with AMX, a call's own cost shows.
CHUNK, AMX_CHUNK, GPU_CHUNK = 256, 512, 2048
# WebGPU's GroupQueryAttention has other kernels for 32 tokens and more. They need 8 threads in a subgroup, of which
# SwiftShader, a driver that computes on the CPU, has 4: wrong numbers (docs/devices.md)
SHORT_CHUNK = 31
TOKEN_INPUTS = "input_ids", "attention_mask", "position_ids"
TENSORS = {"float32": "tensor(float)"}  # dtypes for which ONNX Runtime has another name


P = ParamSpec("P")
R = TypeVar("R")


def _exclusively(method: Callable[Concatenate[Session, P], R]) -> Callable[Concatenate[Session, P], R]:
    @wraps(method)
    def call(self: Session, *arguments: P.args, **options: P.kwargs) -> R:
        with self.exclusive():
            return method(self, *arguments, **options)

    return call


class Session:
    """One model, one sequence (or one batch of them) at a time, in one thread at a time.

        session = Session("out/model", device="cpu", threads=2)
        logits = session.prefill([prompt_ids])          # [1, V], after the prompt
        logits = session.step([[int(logits[0].argmax())]])
        session.reset()                                 # the next prompt starts from an empty cache

    diffbit's operators run as kernels of the native library (native.py) if it has them for the device. native=False,
    or an installation without the library, runs their portable bodies: the same results, but slower. `threads` is the
    size of ONNX Runtime's pool; None: one per physical core that the process may use. Opening checks the sizes of the
    files (`diffbit verify` checks their hashes) and compares the graph's inputs and outputs with the manifest. Raises
    DiffbitError if something does not match, or if the model cannot run on the device. `options`, or fields of
    SessionOptions by name.
    """

    def __init__(self, artifact: Artifact | str | Path, options: SessionOptions | None = None, **changes: Any) -> None:
        options = SessionOptions.of(options, changes)
        device = options.device
        self.artifact = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
        self.artifact.check_files(hashes=False)
        self.device = device
        check_external(self.artifact)
        self._model = self.artifact.file(self.artifact.graph)
        library = library_for(device) if options.native else None
        row = device_of(device)
        inputs = self.artifact.optional_inputs if row.overrides else ()
        self._session = open_session(self._model, device, options.threads, library, options.bfloat16, inputs)
        self.native = library is not None
        self.nodes = node_counts(self._session)
        if (wrong := row.wrong.get(self.artifact.dtype)) in self.nodes.get(CPU, {}):
            raise DiffbitError(
                f"{self._model}: device {device} computes wrong numbers in {self.artifact.dtype} beside {wrong} on the "
                "CPU; export the model with --dtype fp32, or run with device cpu"
            )
        self.chunk = SHORT_CHUNK if computes_on_cpu(device) else _chunk(device) if self.native else CHUNK
        from_start = (buffer.holds_tokens and not buffer.ring for buffer in self.artifact.cache.buffers.values())
        self._to_end = not all(from_start)  # whether a row's tokens are moved to its end
        try:
            self._check_signature()
        except UnicodeDecodeError:  # of an axis
            raise DiffbitError(f"{self._model}: holds a name that is not UTF-8; export the model again") from None
        optional = {node.name for node in self._session.get_overridable_initializers()} if row.overrides else set()
        self._logits_from = LOGITS_FROM in optional  # older exports, without this input, compute all logits
        self.takes_lengths = SHORTER_BY in optional
        self._width = self.artifact.width
        self._lock = threading.RLock()
        self._cache = self.empty_cache()
        self._mask: Ids = np.zeros((0, 0), np.int64)  # [B, C]
        self._length = self._texts = 0
        self.reproducible = options.reproducible

    @property
    def capacity(self) -> int:
        """Maximum number of tokens: the artifact's context length."""
        return self.artifact.context_length

    @property
    def length(self) -> int:
        """Cache positions in use; for a padded batch, its longest prompt plus the decode steps since."""
        return self._length

    @property
    def state(self) -> tuple[int, int]:
        """The number of texts begun so far, and `length`. It changes whenever anything uses the session."""
        return self._texts, self._length

    @property
    def block(self) -> int:
        """Cached tokens are reused in blocks of so many: with the option `reproducible`, the parts in which a prompt is
        computed without a cache, because kernels for other numbers of tokens may sum in another order."""
        return self.chunk if self.reproducible else 1

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Inside the `with` block, calls from other threads raise DiffbitError."""
        if not self._lock.acquire(blocking=False):
            raise DiffbitError("another thread is using this session; open a session for each thread")
        try:
            yield
        finally:
            self._lock.release()

    @_exclusively
    def reset(self) -> None:
        """Forget all tokens. In-place buffers stay allocated and are overwritten."""
        self._texts += 1
        self._length = 0

    @_exclusively
    def reuse(self, token_ids: Sequence[int]) -> int:
        """Keep the cached tokens that match the beginning of `token_ids`, forget the others, and return how many match.

        The caller then prefills the rest of `token_ids`, at least one token. A cache that is not written in place, or
        cannot be truncated there (`CacheSpec.holds`), is kept entirely or not at all.
        """
        self._texts += 1
        if self._cache.rows != 1 or not self._length:
            self._length = 0
        else:
            _, self._length = self._cache.reusable(0, np.asarray(token_ids[:-1], np.int64))
            self._cache.keep(0, 0, self._length)
        return self._length

    @_exclusively
    def prefill(
        self, token_ids: ArrayLike, attention_mask: ArrayLike | None = None, *, all_positions: bool = False
    ) -> Logits:
        """Append prompts `token_ids` [B, S] and return the logits after each row's last token, [B, V].

        `attention_mask` [B, S] marks padding with 0, on the left or on the right. `all_positions=True` returns
        [B, S, V] (zeros at padding). A single sequence can be prefilled repeatedly; a batch of several starts from an
        empty cache and continues with `step`. Raises DiffbitError for ids outside the vocabulary, a mask that does not
        fit, or more tokens than the context holds.
        """
        ids = _integers(token_ids, "token_ids")
        batch, width = ids.shape
        if not batch or not width:
            raise DiffbitError(f"token_ids has shape {list(ids.shape)}, wanted at least one row and one token")
        mask = _check_mask(attention_mask, ids.shape)
        # packed[b, j] = ids[b, order[b, j]]: each row's real tokens, then its padding, or the other way round
        lengths = mask.sum(axis=1)
        used = int(lengths.max())
        order = np.argsort(mask if self._to_end else mask == 0, axis=1, kind="stable")
        order = order[:, width - used :] if self._to_end else order[:, :used]
        mask = np.take_along_axis(mask, order, axis=1)
        packed = np.take_along_axis(ids, order, axis=1) * mask
        if batch > 1 and self._length:
            raise DiffbitError(
                f"a batch of {batch} cannot be prefilled onto {self._length} cached tokens; call reset() first"
            )
        self._begin(packed)

        chunk = min(self.chunk, CHUNK) if all_positions else self.chunk
        if batch > 1 and chunk > SHORT_CHUNK:
            chunk = used
        # GroupQueryAttention continues a batch by single tokens only
        starts = range(0, used, chunk) if batch == 1 else (0, *range(chunk, used))
        last = (batch == 1 or self._to_end) and not all_positions
        parts = [self._append(packed[:, a:b], mask[:, a:b], last) for a, b in pairwise((*starts, used))]
        if last or (self._to_end and not all_positions):
            return parts[-1][:, -1]
        logits = np.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]
        if not all_positions:
            return logits[np.arange(batch), lengths - 1]
        if used == width and mask.all():
            return logits
        whole = np.zeros((batch, width, logits.shape[-1]), np.float32)
        for row, real in enumerate(mask.astype(bool)):
            whole[row, order[row, real]] = logits[row, real]
        return whole

    @_exclusively
    def step(self, token_ids: ArrayLike) -> Logits:
        """Append one token per row, [B, 1], and return the logits after it, [B, V].

        Raises DiffbitError like `prefill`, and for rows of unequal length if the cache rounds tokens in blocks (int4,
        int3, int2), because a row would depend on the other rows.
        """
        ids = _integers(token_ids, "token_ids")
        if ids.shape[1] != 1 or not ids.shape[0]:
            raise DiffbitError(f"token_ids has shape {list(ids.shape)}, wanted [B, 1]: one token per row")
        unequal = self._length and len(np.unique(self._cache.lengths)) > 1
        if unequal and self.artifact.cache.multiple > 1:
            raise DiffbitError(
                f"{self.artifact.path}: rows of unequal length cannot continue together, because they share the "
                "cache's blocks and residual window: a short row's recent tokens would be rounded. Run rows of equal "
                "length, or one row at a time"
            )
        self._begin(ids)
        return self._append(ids, np.ones_like(ids))[:, -1]

    def _append(self, ids: Ids, mask: Ids, last: bool = False) -> Logits:
        """Run the graph on `ids` [B, S] and keep its cache; return the logits [B, S, V], or [B, 1, V] with `last`."""
        cache, start, stop = self._cache, self._length, self._length + ids.shape[1]
        self._mask[:, start:stop] = mask
        positions = cache.lengths[:, None] + np.cumsum(mask, axis=1) - 1
        try:
            logits = self.run(cache, ids, self._mask[:, :stop], np.maximum(positions, 0), last)
            cache.follow()
            if cache.rows == 1:
                cache.append(0, start, ids[0])
            else:  # nothing of a batch is reused
                cache.lengths += mask.sum(axis=1)
            self._length = stop
        except BaseException as error:  # also Ctrl-C, after which a state may be ahead of the tokens
            cache.forget()
            self.reset()
            if not isinstance(error, Exception):  # ONNX Runtime's exceptions have no base of their own
                raise
            if out_of_memory(error):
                raise DiffbitError(
                    f"{self._model}: device {self.device} has no memory left for a call with {ids.size} new tokens "
                    f"after {start} cached ones; export the model with a shorter context_length, or with fewer bits"
                ) from None
            if lacks_16_bits(error):
                raise DiffbitError(
                    f"{self._model}: device {self.device} computes no 16-bit floats, which the artifact has as weights "
                    "or scales; export it for this device, or run with device cpu"
                ) from None
            raise DiffbitError(f"{self._model}: ONNX Runtime failed while running it ({error})") from None
        return logits

    def empty_cache(self) -> Cache:
        """A cache for `run`, without rows."""
        binding = self._session.io_binding()
        binding.bind_output(self.artifact.output, "cpu")  # the first of the outputs
        return Cache(self.artifact.cache, self.capacity, binding, device_of(self.device).memory, self.native)

    def run(
        self, cache: Cache, ids: Ids, mask: Ids, positions: Ids, last: bool, shorter_by: Ids | None = None
    ) -> Logits:
        """Run the graph on `ids` [B, S] with the rows that the cache has bound -> logits [B, S, V], or [B, 1, V] with
        `last`. shorter_by [B]: how many tokens each row lacks of the mask's. The session's own tokens stay as they
        are."""
        binding = cache.binding
        # the binding does not own this memory: it must live until the run is over
        feeds = [np.ascontiguousarray(array) for array in (ids, mask, positions)]
        for name, array in zip(TOKEN_INPUTS, feeds, strict=True):
            binding.bind_cpu_input(name, array)
        first = ids.shape[1] - 1 if last and self._logits_from else 0
        optional = {LOGITS_FROM: np.array([first])} if self._logits_from else {}
        if shorter_by is not None:
            optional[SHORTER_BY] = shorter_by
        for name, array in optional.items():  # bind_cpu_input knows no optional inputs
            binding.bind_ortvalue_input(name, onnxruntime().OrtValue.ortvalue_from_numpy(array))
        # into this memory: an output of ONNX Runtime's own would have to be copied
        logits = pages((ids.shape[0], ids.shape[1] - first, self._width))
        binding.bind_output(self.artifact.output, "cpu", 0, np.float32, logits.shape, logits.ctypes.data)
        self._session.run_with_iobinding(binding)
        return logits

    def _begin(self, ids: Ids) -> None:
        """Check new tokens [B, S]. If the cache is empty, prepare it for B rows; else it must have B rows."""
        batch, count = ids.shape
        outside = (ids < 0) | (ids >= self.artifact.vocab_size)
        if outside.any():
            raise DiffbitError(
                f"token id {int(ids[outside][0])} is outside the vocabulary of {self.artifact.vocab_size} tokens; "
                "the tokenizer must be the model's own"
            )
        if self._length and batch != self._cache.rows:
            raise DiffbitError(
                f"token_ids has {batch} rows, the cache holds {self._cache.rows}; call reset() before another batch"
            )
        if self._length + count > self.capacity:
            raise DiffbitError(
                f"{self.artifact.path}: the context holds {self.capacity} tokens, but {self._length + count} are "
                f"wanted ({self._length} cached and {count} new); shorten the prompt or reset()"
            )
        if self._length:
            return
        try:
            self._mask = np.zeros((batch, self.capacity), np.int64)
            self._cache.begin(batch, self.block)
        except Exception as error:  # ONNX Runtime's exceptions have no base of their own
            # ValueError and OverflowError: more bytes than the address space has
            if not isinstance(error, (ValueError, OverflowError)) and not out_of_memory(error):
                raise
            raise DiffbitError(
                f"{self.artifact.path}: a cache of {self.capacity} tokens does not fit into memory; export the model "
                "with a shorter context_length"
            ) from None

    def _check_signature(self) -> None:
        """Compare the graph's inputs and outputs with the manifest. A dynamic dimension in the graph fits any size."""
        inputs: dict[str, Signature] = dict.fromkeys(TOKEN_INPUTS, ("tensor(int64)", (None, None)))
        outputs: dict[str, Signature] = {self.artifact.output: ("tensor(float)", (None, None, self.artifact.width))}
        for name, buffer in self.artifact.cache.buffers.items():
            type_ = TENSORS.get(buffer.dtype, f"tensor({buffer.dtype})")
            inputs[f"past_key_values.{name}"] = outputs[f"present.{name}"] = type_, (None, *buffer.fixed)
        sides = ("input", self._session.get_inputs(), inputs), ("output", self._session.get_outputs(), outputs)
        for side, actual, expected in sides:
            nodes = {node.name: node for node in actual}
            for name in sorted(nodes.keys() ^ expected.keys()):
                what = "an unknown" if name in nodes else "no"
                raise DiffbitError(f"{self._model}: has {what} {side} {name}; export the model again")
            for name, (type_, shape) in expected.items():
                node = nodes[name]
                fits = len(node.shape) == len(shape) and all(
                    a is None or not isinstance(b, int) or a == b for a, b in zip(shape, node.shape, strict=True)
                )
                if node.type != type_ or not fits:
                    raise DiffbitError(
                        f"{self._model}: {side} {name} is {node.type} {node.shape}, but the manifest describes "
                        f"{type_} {list(shape)}; export the model again"
                    )


def slowdowns(artifact: Artifact, options: SessionOptions) -> list[str]:
    """Reasons why the artifact runs slower than it could, one sentence each; none where it was asked to."""
    device = options.device
    if computes_on_cpu(device):
        return [f"device {device} is a driver that computes on the CPU, for tests: slower than device cpu"]
    if options.bfloat16 and (not options.native or device != "cpu" or best_instruction_set() != "amx"):
        return ["bfloat16 needs device cpu with AMX and the native library: prompts are computed without it"]
    if not options.native or device not in ("cpu", "cuda"):
        return []
    if library_for(device) is None:
        if device == "cpu":
            what = "no native library in this installation (it was made without a C++ compiler): slower"
            advice = "; an artifact of `diffbit export --target onnxruntime` is the fastest without it"
            return [what if artifact.target == "onnxruntime" else what + advice]
        return ["no kernels for GPUs in this installation (docs/gpu.md says how to build them): slower"]
    if device == "cuda" and artifact.dtype == "fp32":
        return [
            f"{artifact.path}: a GPU runs an fp32 artifact with attention's general kernel: slower; "
            "`diffbit export --target cuda` makes an fp16 one"
        ]
    return []


def _chunk(device: str) -> int:
    return GPU_CHUNK if device == "cuda" else AMX_CHUNK if best_instruction_set() == "amx" else CHUNK


def _integers(values: ArrayLike, what: str) -> Ids:
    """`values` as int64 [B, S]. Raises DiffbitError for a ragged list, or numbers that are not integers."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise DiffbitError(f"{what} has rows of different lengths; pad them and pass an attention_mask") from None
    if array.ndim != 2 or (array.size and array.dtype.kind not in "iu"):
        raise DiffbitError(f"{what} is {array.dtype} {list(array.shape)}, wanted integers [B, S]")
    return array.astype(np.int64)


def _check_mask(attention_mask: ArrayLike | None, shape: tuple[int, ...]) -> Ids:
    if attention_mask is None:
        return np.ones(shape, np.int64)
    mask = np.asarray(attention_mask).astype(np.int64)
    if mask.shape != shape or not np.isin(mask, (0, 1)).all() or not mask.any(axis=1).all():
        raise DiffbitError(
            f"attention_mask has shape {list(mask.shape)} and values {mask.min(initial=0)}..{mask.max(initial=0)}, "
            f"wanted {list(shape)} of 0 and 1 with a 1 in every row"
        )
    return mask
