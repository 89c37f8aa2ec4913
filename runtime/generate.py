"""Text generation: prefills the prompt, then decodes token by token. Text is streamed once it is final."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from ..io.errors import DiffbitError
from ..settings import Sampling
from .artifact import TOKENIZER, Artifact
from .loops import LoopGuard
from .sampler import Sampler
from .session import Session
from .template import ChatTemplate, Message
from .tokenizer import Tokenizer

MAX_TOKENS = 512  # of a text, unless more are asked for

# a stop string, an end token, max_tokens reached, context full, the same again and again (loops.py), `interrupted`
FinishReason = Literal["stop", "eos", "length", "context", "loop", "interrupted"]
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
        """Return the tokens, latency and speed in words."""
        cached = f", {self.cached_tokens} of them cached" if self.cached_tokens else ""
        first = self.time_to_first_token_s
        after = f", first token after {1000 * first:.0f} ms" if first is not None else ""
        rate = f", {self.tokens_per_s:.1f} tokens/s" if self.tokens_per_s else ""
        return (
            f"{self.prompt_tokens} prompt tokens{cached}{after}; {len(self.token_ids)} tokens{rate}; stopped by "
            f"{self.finish_reason}"
        )


class Pieces(Iterator[str]):
    """The text that a model is generating: an iterator of its pieces. A piece is final text, at least a character."""

    def __init__(self, pieces: Generator[str, None, Generation]) -> None:
        self._pieces = pieces
        self._result: Generation | None = None

    def __next__(self) -> str:
        try:
            return next(self._pieces)
        except StopIteration as end:
            self._result = self._result or end.value
            raise StopIteration from None

    def result(self) -> Generation:
        """Generate the rest of the text, and return all of it with its tokens, times and the reason for its end."""
        for _ in self:
            pass
        if self._result is None:
            raise DiffbitError("this text ended in an error, so it has no result; call generate again")
        return self._result


def generate(
    model: Session | Artifact | str | Path,
    prompt: str | Sequence[int] | Sequence[Message],
    *,
    max_tokens: int = MAX_TOKENS,
    stop: str | Sequence[str] = (),
    sampler: Choose | None = None,
    tokenizer: Tokenizer | None = None,
    template: ChatTemplate | None = None,
    think: bool | None = None,
    end_tokens: Collection[int] | None = None,
    allow_loops: bool = False,
    reuse: bool = False,
    interrupted: Callable[[], bool] = lambda: False,
    **sampling: Any,
) -> Pieces:
    """Return an iterator over the text with which a model continues a prompt, or answers a conversation.

        for piece in generate("out/onnx", "def main(", temperature=0.7):
            print(piece, end="", flush=True)
        generate(session, [{"role": "user", "content": "Hello"}]).result().text

    model: an artifact's folder, or a `Session`, which saves opening the model again for the next text.
    prompt: a text to continue; messages to answer, which the model's chat template turns into text; or token ids.
    max_tokens, stop: the text ends after so many tokens, before a stop string, or at one of the model's end tokens.
    sampling: fields of `Sampling`, such as temperature, top_p and seed; those left out are the model's own, of its
        generation_config.json (`Sampling.of_model`). temperature=0 always takes the most likely token.
    sampler: a function (logits [V], token ids so far) -> token id, in place of these fields.
    tokenizer, template, end_tokens: default to the model's own.
    think: whether a model that can do both thinks before it answers messages; default: as its template has it.
    allow_loops: go on with a text that repeats the same tokens again and again; else it ends with finish_reason "loop"
        (loops.py), unless a constraint says what may follow.
    reuse: keep the tokens in the session's cache that the prompt begins with; else the session is reset.
    interrupted: is called before each run of the model; if it returns True, the text ends there.

    The model runs when the next piece is asked for; `Pieces.result()` has the whole text with tokens and times. A piece
    is never half a character, nor the beginning of a stop string that then follows. Raises DiffbitError for a prompt
    that is empty when the model has no bos token, holds an unknown token, or does not fit the context. A context that
    fills up later ends the text with finish_reason "context".
    """
    session = model if isinstance(model, Session) else Session(model)
    started = time.perf_counter()
    artifact = session.artifact
    artifact.check_output()
    if max_tokens < 1:
        raise DiffbitError(f"max_tokens is {max_tokens}, wanted at least 1")
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(stops):
        raise DiffbitError("a stop string is empty; leave it out")
    if unknown := sorted(sampling.keys() - {field.name for field in fields(Sampling)}):
        names = ", ".join(field.name for field in fields(Sampling))
        raise DiffbitError(f"generate has no option {unknown[0]!r}; its options of sampling are {names}")
    if sampler is not None and sampling:
        raise DiffbitError(f"generate has a sampler and the options {', '.join(sampling)}; set these in the sampler")
    tokenizer = Tokenizer(artifact.file(TOKENIZER)) if tokenizer is None else tokenizer
    if not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
        template = ChatTemplate.read(artifact) if template is None else template
        text = template.render(cast(Sequence[Message], prompt), variables=template.thinking(think))
        prompt = tokenizer.encode(text, add_special_tokens=False)  # the template writes the special tokens itself
        end_tokens = template.end_tokens(artifact, tokenizer) if end_tokens is None else end_tokens
    prompt_ids = _prompt_ids(session, tokenizer, cast(str | Sequence[int], prompt))
    chosen = Sampler.of(artifact, **sampling) if sampler is None else sampler
    ends = artifact.eos_token_ids if end_tokens is None else end_tokens
    is_free = not (isinstance(chosen, Sampler) and chosen.constraint is not None)
    guard = LoopGuard(tokenizer.decode) if is_free and not allow_loops else None
    took = time.perf_counter() - started
    return Pieces(
        _generated(session, tokenizer, prompt_ids, max_tokens, stops, chosen, ends, guard, reuse, interrupted, took)
    )


def _generated(
    session: Session,
    tokenizer: Tokenizer,
    prompt_ids: list[int],
    max_tokens: int,
    stops: Sequence[str],
    choose: Choose,
    end_tokens: Collection[int],
    guard: LoopGuard | None,
    reuse: bool,
    interrupted: Callable[[], bool],
    took: float,
) -> Generator[str, None, Generation]:
    """Yield the text of `generate` and return the Generation. took: seconds that the call itself took."""
    started = time.perf_counter() - took
    token_ids = list(prompt_ids)
    if isinstance(choose, Sampler):
        choose.start(len(prompt_ids), min(max_tokens, session.capacity - len(prompt_ids) + 1))
    final: list[str] = []  # text to be yielded
    stream, output = tokenizer.stream(prompt_ids), TextOutput(stops, final.append)
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
        state = session.state
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
        elif len(token_ids) > session.capacity:
            reason = "context"
        elif guard is not None and guard.push(token):
            reason = "loop"
        yield from final
        final.clear()
        if reason is None and interrupted():
            reason = "interrupted"
        if reason is None:
            with session.exclusive():
                if session.state != state:
                    raise DiffbitError(
                        "the session has computed something else since the last piece of this text; finish a text "
                        "before the next one, or open a session for each"
                    )
                logits = session.step([[token]])
                state = session.state
    output.push(stream.finish(), last=True)  # an unfinished character may complete a stop string that holds U+FFFD
    yield from final
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
    """Return the prompt's token ids; bos for an empty prompt. Raises DiffbitError if the prompt does not fit the
    context."""
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
        self._passed = 0  # number of characters that are final

    def push(self, text: str, last: bool = False) -> bool:
        """Add text; return whether a stop string was found."""
        if self.stopped:
            return True
        self.text += text
        stops = [position for stop in self._stop if (position := self.text.find(stop, self._passed)) >= 0]
        end = len(self.text)
        if stops:
            self.text, self.stopped = self.text[: min(stops)], True
            end = len(self.text)
        elif not last:
            pending = self.text[self._passed :]  # what is passed begins no stop string
            end -= max((_overlap(pending, stop) for stop in self._stop), default=0)
        new, self._passed = self.text[self._passed : end], end
        if new and self._on_text is not None:
            self._on_text(new)
        return self.stopped


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest suffix of `text` that is a proper prefix of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
