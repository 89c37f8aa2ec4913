"""Time on a device: contenders called in turn, medians, no launch that waits for Python.

A contender is some calls, each over data of its own that together are larger than the L2 cache. On a GPU they
become one CUDA graph, so that what is measured is kernels and not the interpreter; before each replay a buffer larger
than L2 is read, which leaves no line of the contender's data there and nothing to be written back, and which takes
longer than it takes to enqueue the graph behind it. Where a contender can't be captured (it allocates or waits), its
calls are enqueued one by one, and the row says so. On the CPU, where only the benchmark's own logic is tested, the
clock is time.perf_counter.

Contenders fail by themselves: preparation and every timed run are guarded, and whoever measures is told which
contender is running, so that gpu.py can go on without one that hangs or breaks the device.
"""

from __future__ import annotations

import random
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Call = Callable[[], Any]
Run = Callable[[], float]  # one timed pass over all calls of a contender, in seconds
FLUSH_BYTES = 512 << 20
FEWEST_ROUNDS, MOST_ROUNDS = 5, 30


@dataclass(frozen=True)
class Contender:
    """Calls to be timed together, which do a thing `count` times in all (None: once each)."""

    calls: Sequence[Call]
    count: int | None = None
    capture: bool = True  # False: it makes CUDA graphs of its own, or none


Maker = Callable[[], Contender]


@dataclass(frozen=True)
class Times:
    us: dict[str, float]  # of one call, the median
    failed: dict[str, str]  # the other contenders, and why
    spread: float  # the worst contender's (third quartile - first) / median
    uncaptured: list[str]  # contenders that were not a CUDA graph


class BrokenDevice(BaseException):
    """The device answers no more: nothing else can be measured in this process."""


class HostClock:
    """Calls one after the other, timed from outside."""

    stream = 0

    def prepare(self, contender: Contender) -> tuple[Run, bool]:
        def run() -> float:
            start = time.perf_counter()
            for call in contender.calls:
                call()
            return time.perf_counter() - start

        run()
        return run, True

    def synchronize(self) -> None:
        pass


class CudaClock:
    """CUDA events around a replayed graph. All work is on one stream, not the default: that can't be captured."""

    def __init__(self) -> None:
        self._stream = torch.cuda.Stream()
        self.stream: int = self._stream.cuda_stream
        self._flush = torch.zeros(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")
        torch.cuda.synchronize()

    def prepare(self, contender: Contender) -> tuple[Run, bool]:
        """-> what times one pass over its calls, and whether they are a graph."""
        calls = contender.calls
        torch.cuda.synchronize()  # inputs were made on the default stream
        with torch.cuda.stream(self._stream):  # warm: modules loaded, handles made, the allocator's blocks there
            for call in [*calls, *calls]:
                call()
        self._stream.synchronize()
        if contender.capture:
            graph = torch.cuda.CUDAGraph()
            try:
                with torch.cuda.graph(graph, stream=self._stream):
                    for call in calls:
                        call()
                return self._timed(graph.replay), True
            except Exception:  # whatever a peer raises: it works, but not in a graph
                torch.cuda.synchronize()
        return self._timed(lambda: [call() for call in calls]), False

    def _timed(self, launch: Call) -> Run:
        def run() -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(self._stream):
                self._flush.amax()
                begin.record()
                launch()
                end.record()
            end.synchronize()
            return float(begin.elapsed_time(end)) / 1e3

        return run

    def synchronize(self) -> None:
        """Waits for the device; BrokenDevice where it reports an error."""
        try:
            torch.cuda.synchronize()
        except Exception as error:
            raise BrokenDevice(sentence(error)) from None


Clock = HostClock | CudaClock


def measure(
    clock: Clock,
    makers: Mapping[str, Maker],
    seconds: float,
    without: Mapping[str, str] = {},
    now: Callable[[str], None] = lambda name: None,
) -> Times:
    """Time all contenders, in turn, for about `seconds`, but those in `without`, which is name -> why. `now` is told
    each contender before it runs."""
    failed = {name: why for name, why in without.items() if name in makers}
    contenders: dict[str, Contender] = {}
    runs: dict[str, Run] = {}
    times: dict[str, list[float]] = {}
    uncaptured = []

    def guarded(name: str, action: Callable[[], Any]) -> None:
        with warnings.catch_warnings(record=True) as reasons:
            try:
                action()
            except Exception as error:
                failed[name] = sentence(error, reasons)
                for by_name in (contenders, runs, times):
                    by_name.pop(name, None)
        if name in failed:
            clock.synchronize()

    def prepare(name: str) -> None:
        contenders[name] = makers[name]()
        run, captured = clock.prepare(contenders[name])
        clock.synchronize()
        run()
        runs[name], times[name] = run, []
        if not captured:
            uncaptured.append(name)

    def once(name: str) -> None:
        contender = contenders[name]
        times[name].append(runs[name]() / (contender.count or len(contender.calls)) * 1e6)

    for name in makers:
        if name not in failed:
            now(name)
            guarded(name, lambda name=name: prepare(name))  # type: ignore[misc]
    start = time.monotonic()
    for rounds in range(MOST_ROUNDS):
        order = list(runs)
        random.shuffle(order)  # nobody always runs after the same other one
        for name in order:
            now(name)
            guarded(name, lambda name=name: once(name))  # type: ignore[misc]
        if rounds + 1 >= FEWEST_ROUNDS and time.monotonic() - start > seconds:
            break
    medians = {name: statistics.median(samples) for name, samples in times.items()}
    quartiles = {name: statistics.quantiles(samples, n=4) for name, samples in times.items()}
    spreads = [(last - first) / medians[name] for name, (first, _, last) in quartiles.items()]
    return Times(medians, failed, round(max(spreads, default=0.0), 3), uncaptured)


def sentence(error: BaseException, reasons: Sequence[warnings.WarningMessage] = ()) -> str:
    """What went wrong, in a line; torch says in warnings why it has no kernel."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return "out of GPU memory"
    texts = [str(error), *(str(reason.message).partition("(Triggered internally")[0] for reason in reasons)]
    text = "; ".join(filter(None, (" ".join(text.split()) for text in texts)))
    return f"{type(error).__name__}: {text[:400]}" if text else type(error).__name__
