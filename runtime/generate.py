"""Text generation: prefills the prompt, then decodes token by token. Text is streamed once it is final."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..io.errors import DiffbitError
from .sampler import Sampler
from .session import Session
from .tokenizer import Tokenizer

# a stop string, an end token, max_tokens reached, context full, ended by `interrupted`
FinishReason = Literal["stop", "eos", "length", "context", "interrupted"]
Choose = Callable[[NDArray[np.floating], Sequence[int]], int]  # (logits [V], token ids so far) -> token id
OnText = Callable[[str], None]


@dataclass(frozen=True)
class Generation:
    """The continuation of a prompt."""

    text: str  # without prompt and special tokens; it ends before a stop string
    token_ids: tuple[int, ...]  # every sampled token; an eos that ended the text is the last
    finish_reason: FinishReason
    prompt_tokens: int
    cached_tokens: int  # tokens of the prompt that were already in the session's cache
    time_to_first_token_s: float | None  # from the call, encoding included; None if no token was chosen
    tokens_per_s: float | None  # of the tokens after the first; None if there are none
    total_s: float

    def summary(self) -> str:
        """The tokens, latency and speed in words."""
        cached = f", {self.cached_tokens} of them cached" if self.cached_tokens else ""
        first = self.time_to_first_token_s
        after = f", first token after {1000 * first:.0f} ms" if first is not None else ""
        rate = f", {self.tokens_per_s:.1f} tokens/s" if self.tokens_per_s else ""
        return (
            f"{self.prompt_tokens} prompt tokens{cached}{after}; {len(self.token_ids)} tokens{rate}; stopped by "
            f"{self.finish_reason}"
        )


def generate(
    session: Session,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    *,
    max_tokens: int,
    sampler: Choose | None = None,
    stop: str | Sequence[str] = (),
    on_text: OnText | None = None,
    end_tokens: Collection[int] | None = None,
    reuse: bool = False,
    interrupted: Callable[[], bool] = lambda: False,
) -> Generation:
    """Continue `prompt` (text, or token ids as they are) by at most `max_tokens` tokens.

    The session is reset first; with `reuse` it keeps the cached tokens that the prompt begins with. `sampler` (logits
    [V], token ids so far -> token id) is greedy by default. `on_text` receives text that is final: never half a
    character, and never the beginning of a `stop` string that then follows. An exception from it, such as
    KeyboardInterrupt, ends the generation. `end_tokens` end the text; they default to the model's. `interrupted` is
    called before each run of the model; if it returns True, the text ends there.

    Raises DiffbitError for a prompt that is empty when the model has no bos token, holds an unknown token, or does
    not fit the context. A context that fills up later ends the text with finish_reason "context".
    """
    started = time.perf_counter()
    session.artifact.check_output()
    if max_tokens < 1:
        raise DiffbitError(f"max_tokens is {max_tokens}, wanted at least 1")
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(stop):
        raise DiffbitError("a stop string is empty; leave it out")
    choose = Sampler() if sampler is None else sampler
    end_tokens = session.artifact.eos_token_ids if end_tokens is None else end_tokens
    prompt_ids = _prompt_ids(session, tokenizer, prompt)
    token_ids = list(prompt_ids)
    if isinstance(choose, Sampler):
        choose.start(len(prompt_ids), min(max_tokens, session.capacity - len(prompt_ids) + 1))
    stream, output = tokenizer.stream(prompt_ids), TextOutput(stop, on_text)
    times: list[float] = []  # when each token was chosen
    reason: FinishReason | None = None

    with session.exclusive():
        if not reuse:
            session.reset()
        cached = session.reuse(prompt_ids)
        for begin in range(cached, len(prompt_ids), session.chunk):  # as prefill itself does, but it can be interrupted
            if interrupted():
                reason = "interrupted"
                break
            logits = session.prefill([prompt_ids[begin : begin + session.chunk]])
        while reason is None:
            token = choose(logits[0], token_ids)
            times.append(time.perf_counter())
            token_ids.append(token)
            if token in end_tokens:
                reason = "eos"
            elif output.push(stream.push(token)):
                reason = "stop"
            elif len(times) == max_tokens:
                reason = "length"
            elif session.length == session.capacity:
                reason = "context"
            elif interrupted():
                reason = "interrupted"
            else:
                logits = session.step([[token]])
    output.push(stream.finish(), last=True)  # an unfinished character may complete a stop string that holds U+FFFD
    return Generation(
        text=output.text,
        token_ids=tuple(token_ids[len(prompt_ids) :]),
        finish_reason="stop" if output.stopped else reason,
        prompt_tokens=len(prompt_ids),
        cached_tokens=cached,
        time_to_first_token_s=times[0] - started if times else None,
        tokens_per_s=(len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None,
        total_s=time.perf_counter() - started,
    )


def _prompt_ids(session: Session, tokenizer: Tokenizer, prompt: str | Sequence[int]) -> list[int]:
    """The prompt's token ids; bos for an empty prompt. Raises DiffbitError if the prompt does not fit the context."""
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
    if not ids:
        if session.artifact.bos_token_id is None:
            raise DiffbitError("the prompt is empty and the model has no bos token to start from; give it some text")
        ids = [session.artifact.bos_token_id]
    if len(ids) > session.capacity:
        raise DiffbitError(
            f"the prompt has {len(ids)} tokens, the model's context holds {session.capacity}; shorten the prompt"
        )
    return ids


class TextOutput:
    """Passes text up to the first stop string to `on_text`. It holds back an end that may begin a stop string."""

    def __init__(self, stop: Sequence[str], on_text: Callable[[str], None] | None) -> None:
        self._stop, self._on_text = stop, on_text
        self.text = ""
        self.stopped = False  # whether a stop string was found
        self._given = 0  # number of characters that are final

    def push(self, text: str, last: bool = False) -> bool:
        """Add text; return whether a stop string was found."""
        if self.stopped:
            return True
        self.text += text
        stops = [at for stop in self._stop if (at := self.text.find(stop, self._given)) >= 0]
        end = len(self.text)
        if stops:
            self.text, self.stopped = self.text[: min(stops)], True
            end = len(self.text)
        elif not last:
            pending = self.text[self._given :]  # what was given begins none
            end -= max((_overlap(pending, stop) for stop in self._stop), default=0)
        new, self._given = self.text[self._given : end], end
        if new and self._on_text is not None:
            self._on_text(new)
        return self.stopped


def _overlap(text: str, stop: str) -> int:
    """Length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
