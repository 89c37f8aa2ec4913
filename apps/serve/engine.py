"""Answers many requests with one model. A thread gives each a row of a batch (batch.py) and runs the decode steps.

Requests do not influence each other: an answer equals what `generate` returns with the same sampler, up to rounding in
sums, whose order depends on the batch size.

A sampler whose grammar still computes what may come next is not waited for: its row rests, and the others go on.

If the memory for caches is full, the youngest answer loses its row. When another answer ends, it gets a row again,
and its text so far is computed once more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...io.errors import DiffbitError
from ...runtime import FinishReason, Logits, LoopGuard, Session, TextOutput, Tokenizer
from .batch import NoRoom, Rows
from .prefixes import PrefixFiles

RESTING_SECONDS = 0.0005  # between two questions whether a sampler is ready, where there is nothing else to do


@dataclass(frozen=True)
class Logprob:
    """ln p, before temperature and filters, of the chosen token and of the most likely tokens at its position."""

    token: int
    value: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Piece:
    """What one step added to an answer. `text` is final; it may lag behind the tokens (`generate`)."""

    text: str
    logprobs: tuple[Logprob, ...] = ()
    finish_reason: FinishReason | None = None  # set in the last piece
    error: str | None = None  # in the last piece: why the answer failed


@dataclass(eq=False)
class Request:
    """A prompt to continue. `on_piece` is called by the engine's thread; `cancel` may be called by any."""

    prompt: Sequence[int]
    on_piece: Callable[[Piece], None]
    sampler: Callable[[Logits, Sequence[int]], int]  # (logits [V], token ids so far) -> token id
    max_tokens: int
    stop: Sequence[str] = ()
    end_tokens: Collection[int] = ()
    top_logprobs: int | None = None  # how many of the most likely tokens to report per token; None: no logprobs
    allow_loops: bool = False  # go on with a text that repeats the same tokens again and again
    is_ready: Callable[[], bool] = lambda: True  # whether the sampler would choose at once
    cached_tokens: int = field(init=False, default=0)
    completion_tokens: int = field(init=False, default=0)
    cancelled: bool = field(init=False, default=False)

    def cancel(self) -> None:
        """End the request at the next step."""
        self.cancelled = True

    def is_wanted(self) -> bool:
        return not self.cancelled


@dataclass(frozen=True)
class Counts:
    """Totals since the engine started, for /metrics."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    cancelled: int = 0
    preempted: int = 0
    prompt_seconds: float = 0.0
    step_seconds: float = 0.0
    steps: int = 0


class _Answer:
    """An answer that is being written in a row of the batch."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request, self.stream = request, tokenizer.stream(request.prompt)
        self.guard = None if request.allow_loops else LoopGuard(tokenizer.decode)
        self.token_ids = list(request.prompt)
        self._new: list[str] = []
        self.output = TextOutput(request.stop, self._new.append)

    def push(self, logits: Logits, room: int) -> tuple[Piece, int | None]:
        """Choose a token -> (what it adds, the token to continue with or None). room: free slots in the cache."""
        request = self.request
        token = request.sampler(logits, self.token_ids)
        self.token_ids.append(token)
        request.completion_tokens += 1
        reason: FinishReason | None = None
        if token in request.end_tokens:
            reason = "eos"
        elif self.output.push(self.stream.push(token)):
            reason = "stop"
        elif request.completion_tokens == request.max_tokens:
            reason = "length"
        elif not room:
            reason = "context"
        elif self.guard is not None and self.guard.push(token):
            reason = "loop"
        if reason not in (None, "stop") and self.output.push(self.stream.finish(), last=True):
            reason = "stop"
        logprobs = () if request.top_logprobs is None else (_logprob(logits, token, request.top_logprobs),)
        piece = Piece("".join(self._new), logprobs, reason)
        self._new.clear()
        return piece, token if reason is None else None


def _logprob(logits: Logits, token: int, count: int) -> Logprob:
    values = logits.astype(np.float64)
    values -= values.max()
    values -= np.log(np.exp(values).sum())
    top = np.argsort(-values, kind="stable")[:count]
    return Logprob(token, float(values[token]), tuple((int(i), float(values[i])) for i in top))


class Engine:
    """A model that answers `rows` requests at a time; at most `queue` more wait.

    memory: most bytes of the rows' caches. `submit` returns at once; the answer arrives in pieces through `on_piece`.
    `close` waits for every answer.
    """

    def __init__(
        self,
        session: Session,
        tokenizer: Tokenizer,
        *,
        rows: int = 8,
        queue: int = 64,
        prefixes: PrefixFiles | None = None,
        memory: int | None = None,
    ) -> None:
        self.session, self.tokenizer, self._queue = session, tokenizer, queue
        self.rows = Rows.of(session, rows, prefixes, memory)
        self.counts = Counts()
        self._waiting: deque[Request] = deque()
        self._answers: dict[int, _Answer] = {}  # the youngest last
        self._resting: dict[int, Logits] = {}  # of rows whose samplers are not ready
        self._preempted: list[_Answer] = []  # the youngest first
        self._full = False  # nothing begins until an answer ends
        self._beginning = 0  # requests whose prompt is being computed: 0 or 1
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=f"diffbit {session.artifact.name}", daemon=True)
        self._thread.start()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> int:
        return len(self._answers) + len(self._preempted) + self._beginning

    @property
    def cache_bytes(self) -> int:
        return self.rows.nbytes

    @property
    def max_answers(self) -> int:
        """Maximum number of requests that run and wait together."""
        return self._queue + self.rows.count

    def submit(self, *requests: Request) -> bool:
        """Queue all requests or none; return False if the queue is full.

        Raises DiffbitError for a prompt that does not fit.
        """
        for request in requests:
            self._check(request.prompt)
        with self._changed:
            if self._closing or len(self._waiting) + len(requests) > self._queue + self.rows.count - self.running:
                return False
            self._waiting.extend(requests)
            self._changed.notify()
        return True

    def _check(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise DiffbitError("the prompt is empty, wanted at least one token")
        if len(prompt) >= self.rows.capacity:
            is_longest = self.rows.capacity == self.session.capacity
            holds = "the model's context holds" if is_longest else "the server's memory for caches has room for"
            raise DiffbitError(
                f"the prompt has {len(prompt)} tokens, and {holds} {self.rows.capacity}, the answer included; shorten "
                "the prompt"
            )
        if max(prompt) >= self.session.artifact.vocab_size or min(prompt) < 0:
            raise DiffbitError(f"the prompt has a token outside the vocabulary of {self.session.artifact.vocab_size}")

    def close(self) -> None:
        """Wait until all submitted requests are answered, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _work(self) -> None:
        if self.session.artifact.output != "logits":  # embeddings.py uses the session
            return
        with self.session.exclusive():
            while True:
                with self._changed:
                    while not self._waiting and not self.running and not self._closing:
                        self._changed.wait()
                    if self._closing and not self._waiting and not self.running:
                        return
                try:
                    self._admit()
                    self._step()
                except Exception as error:  # report it to every waiting request
                    for row in list(self._answers):
                        self._finish(row, Piece("", error=str(error)))

    def _admit(self) -> None:
        """Give free rows to waiting requests, one prompt at a time; drop those that were cancelled."""
        with self._changed:
            waiting = [request for request in self._waiting if not request.cancelled]
            gone = len(self._waiting) - len(waiting)
            self._waiting = deque(waiting)
        self._count(requests=gone, cancelled=gone)
        while (self._waiting or self._preempted) and self.rows.free and not (self._full and self._answers):
            self._begin()

    def _begin(self) -> None:
        """Give a row to the text that has waited longest."""
        with self._changed:
            again = self._preempted.pop() if self._preempted else None
            request, self._beginning = again.request if again else self._waiting.popleft(), 1
        started = time.perf_counter()
        try:
            answer = again or _Answer(request, self.tokenizer)
            row, cached, logits = self._compute(answer)
        except NoRoom:
            with self._changed:
                self._beginning, self._full = 0, True
                if again:
                    self._preempted.append(again)
                else:
                    self._waiting.appendleft(request)
            return
        except Exception as error:
            self._beginning = 0
            request.on_piece(Piece("", error=str(error)))
            return
        self._count(prompt_seconds=time.perf_counter() - started)
        if not again:
            request.cached_tokens = cached
            self._count(requests=1, prompt_tokens=len(request.prompt), cached_tokens=cached)
        with self._changed:
            self._beginning = 0
            if logits is not None:
                self._answers[row] = answer
        if logits is None:
            self._count(cancelled=1)
        else:
            self._push({row: logits})

    def _compute(self, answer: _Answer) -> tuple[int, int, Logits | None]:
        """Give a row to an answer, and return what `Rows.begin` returns.

        Tokens that were written before become a part of the prompt. In a reproducible session they are computed one by
        one instead, so that the logits are the same to the bit.
        """
        prompt = answer.request.prompt if self.session.reproducible else answer.token_ids
        written = answer.token_ids[len(prompt) :]
        row, cached, logits = self.rows.begin(prompt, answer.request.is_wanted, len(written))
        try:
            for token in written if logits is not None else ():
                logits = self.rows.step({row: token})[row]
        except Exception:
            self.rows.end(row)
            raise
        return row, cached, logits

    def _step(self) -> None:
        for row, answer in list(self._answers.items()):
            if answer.request.cancelled:
                self._count(cancelled=1)
                self._free(row)
        while not self.rows.fits() and len(self._answers) > 1:
            row, answer = self._answers.popitem()
            self._resting.pop(row, None)
            self._preempted.append(answer)
            self._full = True
            self.rows.end(row)
            self._count(preempted=1)
        resting, self._resting = self._resting, {}
        self._push(resting)
        tokens = {row: answer.token_ids[-1] for row, answer in self._answers.items() if row not in self._resting}
        if not tokens and self._resting:
            time.sleep(RESTING_SECONDS)
        if tokens:
            started = time.perf_counter()
            logits = self.rows.step(tokens)
            self._count(steps=1, step_seconds=time.perf_counter() - started)
            self._push(logits)

    def _push(self, logits: dict[int, Logits]) -> None:
        """Choose the next token of each row, and end the rows that are complete."""
        for row, values in logits.items():
            answer = self._answers[row]
            try:
                if not answer.request.is_ready():
                    self._resting[row] = values.copy()  # the session's memory is for the next step
                    continue
                piece, token = answer.push(values, self.rows.room(row))
            except Exception as error:  # logits that are not finite, a number that overflows: of this answer alone
                piece, token = Piece("", error=str(error)), None
            self._count(completion_tokens=1)
            if token is None:
                self._finish(row, piece)
            elif piece.text or piece.logprobs:
                answer.request.on_piece(piece)

    def _finish(self, row: int, piece: Piece) -> None:
        request = self._answers[row].request
        self._free(row)
        request.on_piece(piece)

    def _free(self, row: int) -> None:
        del self._answers[row]
        self._resting.pop(row, None)
        self._full = False
        self.rows.end(row)

    def _count(self, **more: float) -> None:
        self.counts = replace(self.counts, **{name: getattr(self.counts, name) + value for name, value in more.items()})
