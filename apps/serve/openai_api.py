"""OpenAI's API: answers as JSON or server-sent events (openai_requests.py reads the requests)."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

from ...runtime import ThinkingReader
from .engine import Logprob, Piece, Request
from .openai_requests import Refused, Task
from .tools import CallReader

# diffbit's -> OpenAI's; a text in a loop did not come to its end
REASONS = {None: None, "eos": "stop", "stop": "stop", "length": "length", "context": "length", "loop": "length"}


class Parts:
    """An answer so far: what the model thought, its text and its calls."""

    def __init__(self, task: Task) -> None:
        self._reader = None if task.calls is None else CallReader(task.calls)
        self._thinking = ThinkingReader(task.inside) if task.thinks else None
        self.thoughts = self.text = ""
        self.calls: list[dict[str, Any]] = []

    def push(self, piece: Piece) -> list[dict[str, Any]]:
        """Add a piece -> what it adds, as deltas of a message."""
        is_last = piece.finish_reason is not None
        if self._reader is None:
            return self._texts(piece.text, is_last)
        deltas: list[dict[str, Any]] = []
        for kind, text in self._reader.push(piece.text, last=is_last):
            if kind == "text":
                deltas += self._texts(text)
                continue
            if kind == "name":
                deltas += self._texts("", last=True)
            index = len(self.calls) if kind == "name" else len(self.calls) - 1
            if kind == "name":
                function = {"name": text, "arguments": ""}
                self.calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
                delta: dict[str, Any] = {**self.calls[-1], "function": dict(function)}
            else:
                self.calls[-1]["function"]["arguments"] += text
                delta = {"function": {"arguments": text}}
            deltas.append({"tool_calls": [{"index": index, **delta}]})
        return deltas + self._texts("", is_last)

    def _texts(self, text: str, last: bool = False) -> list[dict[str, Any]]:
        """Add text outside of calls. last: there is no more, so what is held back is text, too."""
        deltas = []
        for kind, part in [("text", text)] if self._thinking is None else self._thinking.push(text, last):
            if kind == "thinking":
                self.thoughts += part
                deltas.append({"reasoning_content": part})
            elif part:
                self.text += part
                deltas.append({"content": part})
        return deltas

    def reason(self, piece: Piece) -> str | None:
        """OpenAI's finish_reason after a piece."""
        reason = REASONS[piece.finish_reason]
        # a text that stops may be in a call
        called = self.calls and self.calls[-1]["function"]["arguments"] and self._reader and not self._reader.depth
        return "tool_calls" if reason == "stop" and called else reason

    def message(self) -> dict[str, Any]:
        thoughts = {"reasoning_content": self.thoughts} if self.thoughts else {}
        if not self.calls:
            return {"role": "assistant", "content": self.text, **thoughts}
        return {"role": "assistant", "content": self.text or None, **thoughts, "tool_calls": self.calls}


class Answers:
    """The answers to one HTTP request, in OpenAI's JSON. Call `cancel` when nobody waits for them any more."""

    def __init__(self, task: Task) -> None:
        self.task = task
        loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Piece]]()

        def put(index: int, piece: Piece) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits for the answer
                loop.call_soon_threadsafe(self._queue.put_nowait, (index, piece))

        self.requests = [
            Request(
                prompt, partial(put, index), sampler, task.max_tokens, task.stop, task.model.end_tokens,
                task.top_logprobs, task.allow_loops, sampler.is_ready,
            )
            for index, (prompt, sampler) in enumerate(zip(task.prompts, task.samplers, strict=True))
        ]  # fmt: skip
        self.parts = [Parts(task) for _ in self.requests]
        self.head = {
            "id": f"{'chatcmpl' if task.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": task.model.name,
        }
        if not task.model.engine.submit(*self.requests):
            raise Refused(429, "the server is busy: its queue is full; try again later", "rate_limit_error")

    def cancel(self) -> None:
        for request in self.requests:
            request.cancel()

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(index, piece) as they arrive."""
        open_ = len(self.requests)
        while open_:
            index, piece = await self._queue.get()
            open_ -= piece.finish_reason is not None or piece.error is not None
            yield index, piece

    def usage(self) -> dict[str, Any]:
        once = self.requests[:: self.task.n]  # a prompt is counted once, whatever the number of its answers
        prompt = sum(len(request.prompt) for request in once)
        completion = sum(request.completion_tokens for request in self.requests)
        encode = self.task.model.tokenizer.encode
        thoughts = sum(len(encode(part.thoughts, add_special_tokens=False)) for part in self.parts)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens for request in once)},
            "completion_tokens_details": {"reasoning_tokens": thoughts},
        }

    async def whole(self) -> dict[str, Any]:
        parts = self.parts
        reasons: list[str | None] = [None] * len(parts)
        logprobs: list[tuple[Logprob, ...]] = [()] * len(parts)
        async for index, piece in self.pieces():
            if piece.error is not None:
                raise Refused(500, self.task.model.public(piece.error), "server_error")
            parts[index].push(piece)
            logprobs[index] += piece.logprobs
            reasons[index] = parts[index].reason(piece)
        choices = []
        for index, part in enumerate(parts):
            content = {"message": part.message()} if self.task.chat else {"text": self._echo(index) + part.text}
            choices.append(self._choice(index, content, logprobs[index], reasons[index]))
        kind = "chat.completion" if self.task.chat else "text_completion"
        return {**self.head, "object": kind, "choices": choices, "usage": self.usage()}

    async def events(self) -> AsyncIterator[str]:
        """The answers as server-sent events."""
        kind = "chat.completion.chunk" if self.task.chat else "text_completion"
        usage = {"usage": None} if self.task.include_usage else {}
        parts = self.parts

        def event(choices: list[dict[str, Any]], **more: Any) -> str:
            return _event({**self.head, "object": kind, "choices": choices, **usage, **more})

        for index in range(len(parts)):
            if self.task.chat:
                yield event([self._choice(index, {"delta": {"role": "assistant", "content": ""}}, [], None)])
            elif self.task.echoes:
                yield event([self._choice(index, {"text": self._echo(index)}, [], None)])
        async for index, piece in self.pieces():
            if piece.error is not None:
                message = self.task.model.public(piece.error)
                yield _event({"error": {"message": message, "type": "server_error"}})
                return
            deltas, reason = parts[index].push(piece), parts[index].reason(piece)
            if not self.task.chat:
                yield event([self._choice(index, {"text": piece.text}, piece.logprobs, reason)])
                continue
            if piece.logprobs and not deltas:
                deltas = [{}]
            for delta in deltas:
                logprobs = piece.logprobs if delta is deltas[-1] else []
                yield event([self._choice(index, {"delta": delta}, logprobs, None)])
            if reason:  # in a chunk that says nothing else, as OpenAI's
                yield event([self._choice(index, {"delta": {}}, [], reason)])
        if self.task.include_usage:
            yield event([], usage=self.usage())
        yield "data: [DONE]\n\n"

    def _echo(self, index: int) -> str:
        return self.task.echoes[index] if self.task.echoes else ""

    def _choice(
        self, index: int, content: dict[str, Any], logprobs: Sequence[Logprob], reason: str | None
    ) -> dict[str, Any]:
        shown_logprobs = None if self.task.top_logprobs is None else self._logprobs(logprobs)
        return {"index": index, **content, "logprobs": shown_logprobs, "finish_reason": reason}

    def _logprobs(self, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        def text(token: int) -> str:
            data = self.task.model.bytes_of(token)
            try:
                return data.decode()
            except UnicodeDecodeError:  # part of a character, as OpenAI writes it
                return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

        if not self.task.chat:
            return {
                "tokens": [text(entry.token) for entry in logprobs],
                "token_logprobs": [entry.value for entry in logprobs],
                "top_logprobs": [{text(token): value for token, value in entry.top} for entry in logprobs],
            }

        def entry(token: int, value: float) -> dict[str, Any]:
            return {"token": text(token), "logprob": value, "bytes": list(self.task.model.bytes_of(token))}

        return {
            "content": [
                entry(item.token, item.value) | {"top_logprobs": [entry(*pair) for pair in item.top]}
                for item in logprobs
            ]
        }


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
