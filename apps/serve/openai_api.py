"""OpenAI's API: reads a request's JSON, and writes the answers as JSON or server-sent events.

OpenAI's fields that are not supported here (tools, several answers, penalties) raise an error; they are never ignored.
`top_k` and `repetition_penalty` are additional fields. Sampling options that a request does not set come from the
model's generation_config.json. Chat requests need a model with a chat template.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from ...io.errors import DiffbitError
from ...io.files import folder_name
from ...io.tokenizer_files import TOKENIZER
from ...runtime import (
    MAX_TOKENS,
    Artifact,
    ChatTemplate,
    Message,
    Sampler,
    Sampling,
    Session,
    SessionOptions,
    Tokenizer,
)
from .engine import Engine, Logprob, Piece, Request

TEXT_TOKENS = 16  # OpenAI's default limit of a text completion; that of a chat's answer is MAX_TOKENS
MOST_STOPS, MOST_LOGPROBS = 4, 20
REASONS = {None: None, "eos": "stop", "stop": "stop", "length": "length", "context": "length"}  # diffbit's -> OpenAI's
UNSUPPORTED = {  # field -> the values that request nothing
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "response_format": ({"type": "text"},),
}


class Refused(Exception):
    """An error response: HTTP status, OpenAI's error type, and a message."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", param: str | None = None):
        super().__init__(message)
        self.status, self.kind, self.param = status, kind, param


class Served:
    """A model, named after its folder, and the engine that runs it."""

    def __init__(self, artifact: Artifact, options: SessionOptions, *, rows: int, queue: int) -> None:
        self.name, self.artifact, self.created = folder_name(artifact.path), artifact, int(time.time())
        self.template: ChatTemplate | None
        try:
            self.template = ChatTemplate.read(artifact)
        except DiffbitError as error:
            self.template, self.no_template = None, str(error)
        self.tokenizer = Tokenizer(artifact.file(TOKENIZER))
        special = {} if self.template is None else self.template.special_tokens
        eos = self.tokenizer.token_id(special.get("eos_token", ""))
        self.end_tokens = {*artifact.eos_token_ids, *(() if eos is None else (eos,))}
        self.engine = Engine(Session(artifact, options), self.tokenizer, rows=rows, queue=queue)

    def prompt_of(self, messages: list[Message]) -> list[int]:
        if self.template is None:
            raise Refused(400, f"model {self.name}: {self.no_template}", param="messages")
        return self.tokenizer.encode(self.template.render(messages), add_special_tokens=False)


@dataclass(frozen=True)
class Wanted:
    """A validated request. It has one prompt and one sampler per answer."""

    model: Served
    chat: bool
    prompts: Sequence[Sequence[int]]
    samplers: Sequence[Sampler]
    max_tokens: int
    stop: Sequence[str]
    top_logprobs: int | None
    stream: bool
    include_usage: bool


class _Body:
    """Fields of a JSON request, with their types checked."""

    def __init__(self, values: object) -> None:
        if not isinstance(values, dict):
            raise Refused(400, "the body is not a JSON object")
        self.values = {name: value for name, value in values.items() if value is not None}
        for name, idle in UNSUPPORTED.items():
            if name in self.values and self.values[name] not in idle:
                raise Refused(400, f"{name} is {short(self.values[name])}, which is not supported", param=name)

    def get(self, name: str, kinds: tuple[type, ...], what: str, default: object) -> Any:
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise Refused(400, f"{name} is {short(value)}, wanted {what}", param=name)
        return value

    def integer(self, name: str, low: int, high: int, default: int | None) -> int | None:
        value: int | None = self.get(name, (int,), "an integer", default)
        if value is not None and not low <= value <= high:
            raise Refused(400, f"{name} is {value}, wanted {low} to {high}", param=name)
        return value

    def texts(self, name: str) -> list[str]:
        value = self.get(name, (str, list), "a string or a list of strings", [])
        values = [value] if isinstance(value, str) else value
        if not all(isinstance(text, str) and text for text in values):
            raise Refused(400, f"{name} is {short(value)}, wanted a string or a list of strings", param=name)
        return list(values)


def short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:60]}…"


def _messages(body: _Body) -> list[Message]:
    found: list[Message] = []
    for index, message in enumerate(body.get("messages", (list,), "a list of messages", [])):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Refused(400, f"{where} is {short(message)}, wanted an object with role and content", param=where)
        content = message.get("content")
        if isinstance(content, list):  # parts
            parts = [part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)]
            if len(parts) < len(content):
                raise Refused(400, f"{where}.content has a part that is not text, which is not supported", param=where)
            content = "".join(parts)
        if not isinstance(content, str):
            raise Refused(400, f"{where}.content is {short(content)}, wanted text", param=where)
        role = "system" if message["role"] == "developer" else message["role"]
        found.append(Message(role=role, content=content))
    if not found:
        raise Refused(400, "messages is empty, wanted at least one message", param="messages")
    return found


def _prompts(body: _Body, model: Served) -> list[list[int]]:
    """The prompts as token ids; "prompt" is a text, a list of token ids, or a list of either."""
    prompt = body.get("prompt", (str, list), "text, token ids, or a list of either", "")
    if isinstance(prompt, str) or (prompt and all(type(item) is int for item in prompt)):
        prompt = [prompt]
    if len(prompt) > model.engine.most:
        raise Refused(400, f"prompt has {len(prompt)} prompts, wanted at most {model.engine.most}", param="prompt")
    bos = model.artifact.bos_token_id
    found = []
    for item in prompt:
        if isinstance(item, str):
            found.append(model.tokenizer.encode(item) or ([] if bos is None else [bos]))
        elif isinstance(item, list) and item and all(type(token) is int for token in item):
            found.append(item)
        else:
            raise Refused(400, f"prompt holds {short(item)}, wanted text or token ids", param="prompt")
    if not found:
        raise Refused(400, "prompt is an empty list, wanted at least one prompt", param="prompt")
    return found


def _sampler(body: _Body, model: Served, index: int, prompt: Sequence[int]) -> Sampler:
    """The sampler of the index-th answer; each has its own seed."""
    given = {option.name: body.values.get(option.name) for option in fields(Sampling)}
    if given["seed"] is not None:
        given["seed"] = body.get("seed", (int,), "a number", 0) + index
    if given["logit_bias"] is not None:  # JSON's keys are strings
        biases = body.get("logit_bias", (dict,), "an object of token ids and numbers", {})
        given["logit_bias"] = {int(token) if token.isdecimal() else token: bias for token, bias in biases.items()}
    sampler = Sampler.of(model.artifact, **given)
    sampler.start(len(prompt))
    return sampler


def read_request(values: object, models: Mapping[str, Served], chat: bool) -> Wanted:
    body = _Body(values)
    name = body.get("model", (str,), "the name of a model", next(iter(models)))
    if name not in models:
        raise Refused(404, f"there is no model {short(name)}; choose from {', '.join(models)}", param="model")
    model = models[name]
    logprobs: int | None
    if chat:
        wanted = body.get("logprobs", (bool,), "true or false", False)
        logprobs = body.integer("top_logprobs", 0, MOST_LOGPROBS, 0) if wanted else None
        limit = "max_completion_tokens" if "max_completion_tokens" in body.values else "max_tokens"
        prompts = [model.prompt_of(_messages(body))]
    else:
        logprobs = body.integer("logprobs", 0, MOST_LOGPROBS, None)
        limit = "max_tokens"
        prompts = _prompts(body, model)
    stop = body.texts("stop")
    if len(stop) > MOST_STOPS:
        raise Refused(400, f"stop has {len(stop)} strings, wanted at most {MOST_STOPS}", param="stop")
    samplers = [_sampler(body, model, index, prompt) for index, prompt in enumerate(prompts)]
    most = body.integer(limit, 1, 1 << 31, MAX_TOKENS if chat else TEXT_TOKENS)
    options = body.get("stream_options", (dict,), "an object", {})
    stream = body.get("stream", (bool,), "true or false", False)
    usage = stream and bool(options.get("include_usage"))
    return Wanted(model, chat, prompts, samplers, most or 1, stop, logprobs, stream, usage)


class Answers:
    """The answers to one HTTP request, in OpenAI's JSON. Call `cancel` when nobody waits for them any more."""

    def __init__(self, wanted: Wanted) -> None:
        self.wanted = wanted
        loop, self._queue = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Piece]]()

        def put(index: int, piece: Piece) -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits for the answer
                loop.call_soon_threadsafe(self._queue.put_nowait, (index, piece))

        self.requests = [
            Request(
                prompt, partial(put, index), sampler, wanted.max_tokens, wanted.stop, wanted.model.end_tokens,
                wanted.top_logprobs,
            )
            for index, (prompt, sampler) in enumerate(zip(wanted.prompts, wanted.samplers, strict=True))
        ]  # fmt: skip
        self._head = {
            "id": f"{'chatcmpl' if wanted.chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": wanted.model.name,
        }
        if not wanted.model.engine.submit(*self.requests):
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
        prompt = sum(len(request.prompt) for request in self.requests)
        completion = sum(request.completion_tokens for request in self.requests)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens for request in self.requests)},
        }

    async def whole(self) -> dict[str, Any]:
        texts = [""] * len(self.requests)
        reasons: list[str | None] = [None] * len(self.requests)
        logprobs: list[tuple[Logprob, ...]] = [()] * len(self.requests)
        async for index, piece in self.pieces():
            if piece.error is not None:
                raise Refused(500, piece.error, "server_error")
            texts[index] += piece.text
            logprobs[index] += piece.logprobs
            reasons[index] = REASONS[piece.finish_reason]
        choices = [
            self._choice(index, {"message": {"role": "assistant", "content": text}} if self.wanted.chat else
                         {"text": text}, logprobs[index], reasons[index])
            for index, text in enumerate(texts)
        ]  # fmt: skip
        kind = "chat.completion" if self.wanted.chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self.usage()}

    async def events(self) -> AsyncIterator[str]:
        """The answers as server-sent events."""
        kind = "chat.completion.chunk" if self.wanted.chat else "text_completion"
        usage = {"usage": None} if self.wanted.include_usage else {}

        def event(choices: list[dict[str, Any]], **more: Any) -> str:
            return _event({**self._head, "object": kind, "choices": choices, **usage, **more})

        if self.wanted.chat:
            yield event([self._choice(0, {"delta": {"role": "assistant", "content": ""}}, [], None)])
        async for index, piece in self.pieces():
            if piece.error is not None:
                yield _event({"error": {"message": piece.error, "type": "server_error"}})
                return
            text = {"delta": {"content": piece.text} if piece.text else {}} if self.wanted.chat else {
                "text": piece.text
            }  # fmt: skip
            yield event([self._choice(index, text, piece.logprobs, REASONS[piece.finish_reason])])
        if self.wanted.include_usage:
            yield event([], usage=self.usage())
        yield "data: [DONE]\n\n"

    def _choice(
        self, index: int, content: dict[str, Any], logprobs: Sequence[Logprob], reason: str | None
    ) -> dict[str, Any]:
        found = None if self.wanted.top_logprobs is None else self._logprobs(logprobs)
        return {"index": index, **content, "logprobs": found, "finish_reason": reason}

    def _logprobs(self, found: Sequence[Logprob]) -> dict[str, Any]:
        def text(token: int) -> str:
            return self.wanted.model.tokenizer.decode([token])

        if not self.wanted.chat:
            return {
                "tokens": [text(entry.token) for entry in found],
                "token_logprobs": [entry.value for entry in found],
                "top_logprobs": [{text(token): value for token, value in entry.top} for entry in found],
            }

        def entry(token: int, value: float) -> dict[str, Any]:
            return {"token": text(token), "logprob": value, "bytes": list(text(token).encode())}

        return {
            "content": [
                entry(item.token, item.value) | {"top_logprobs": [entry(*pair) for pair in item.top]} for item in found
            ]
        }


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
