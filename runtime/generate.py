"""From a prompt to text: prefill, then one token at a time, with text given out as it becomes certain."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..errors import DiffbitError
from .sampler import Sampler
from .session import Session
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class Generation:
    """What came out of one prompt."""

    text: str  # without the prompt, special tokens, and a stop string and what followed it
    token_ids: tuple[int, ...]  # every sampled token; an eos that ended the text is the last
    finish_reason: Literal["stop", "eos", "length", "context"]  # stop string, eos token, max_tokens, context full
    prompt_tokens: int
    time_to_first_token_s: float  # from the call, encoding included, until the first token was chosen
    tokens_per_s: float | None  # of the tokens after the first; None if there are none
    total_s: float


def generate(
    session: Session,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    *,
    max_tokens: int,
    sampler: Callable[[NDArray[np.floating], Sequence[int]], int] | None = None,
    stop: str | Sequence[str] = (),
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Continue `prompt` (text, or token ids as they are) by at most `max_tokens` tokens.

    The session is reset first, so that one session serves prompt after prompt; its buffers are reused. `sampler` is
    greedy unless given. `on_text` receives the text in pieces that are final: never half a character, never the start
    of a `stop` string that then comes true. An exception from it (KeyboardInterrupt, say) ends the generation.

    Raises DiffbitError for a prompt that is empty and cannot start from a bos token, that holds an unknown token, or
    that does not fit the context. A context that fills up later ends the text with finish_reason "context".
    """
    started = time.perf_counter()
    if max_tokens < 1:
        raise DiffbitError(f"max_tokens is {max_tokens}, wanted at least 1")
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(stop):
        raise DiffbitError("a stop string is empty; leave it out")
    choose = Sampler() if sampler is None else sampler
    artifact = session.artifact
    prompt_ids = tokenizer.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
    if not prompt_ids:
        if artifact.bos_token_id is None:
            raise DiffbitError("the prompt is empty and the model has no bos token to start from; give it some text")
        prompt_ids = [artifact.bos_token_id]
    if len(prompt_ids) > session.capacity:
        raise DiffbitError(
            f"the prompt has {len(prompt_ids)} tokens, the model's context holds {session.capacity}; shorten the prompt"
        )

    token_ids = list(prompt_ids)
    stream = tokenizer.stream(prompt_ids)
    gate = _StopGate(stop)
    pieces: list[str] = []

    def give(text: str) -> None:
        if text:
            pieces.append(text)
            if on_text is not None:
                on_text(text)

    session.reset()
    logits = session.prefill([prompt_ids])
    first: float | None = None
    while True:
        token = choose(logits[0], token_ids)
        last = time.perf_counter()
        first = last if first is None else first
        token_ids.append(token)
        reason: Literal["stop", "eos", "length", "context"] | None = None
        if token in artifact.eos_token_ids:
            reason = "eos"
        else:
            give(gate.push(stream.push(token)))
            if gate.closed:
                reason = "stop"
            elif len(token_ids) - len(prompt_ids) == max_tokens:
                reason = "length"
            elif session.length == session.capacity:
                reason = "context"
        if reason is not None:
            break
        logits = session.step([[token]])
    # An unfinished character may still complete a stop string that holds U+FFFD; nothing else can.
    give(gate.push(stream.finish()))
    give(gate.finish())
    produced = len(token_ids) - len(prompt_ids)
    return Generation(
        text="".join(pieces),
        token_ids=tuple(token_ids[len(prompt_ids) :]),
        finish_reason="stop" if gate.closed else reason,
        prompt_tokens=len(prompt_ids),
        time_to_first_token_s=first - started,
        tokens_per_s=(produced - 1) / (last - first) if produced > 1 else None,
        total_s=time.perf_counter() - started,
    )


class _StopGate:
    """Lets text through up to the first stop string, holding back an end that may be the start of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""
        self.closed = False

    def push(self, text: str) -> str:
        if self.closed or not self._stop:
            return "" if self.closed else text
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self.closed = True
            through, self._held = self._held[: min(found)], ""
            return through
        keep = max(_overlap(self._held, stop) for stop in self._stop)
        cut = len(self._held) - keep
        through, self._held = self._held[:cut], self._held[cut:]
        return through

    def finish(self) -> str:
        """What was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without being all of it."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
