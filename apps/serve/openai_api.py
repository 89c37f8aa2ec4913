"""OpenAI's API: reads a request's JSON, and writes the answers as JSON or server-sent events.

OpenAI's fields that are not supported here (tools, several answers, penalties) raise an error; they are never ignored.
`top_k` and `repetition_penalty` are additional fields. Sampling options that a request does not set come from the
model's generation_config.json. Chat requests need a model with a chat template.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import time
import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Annotated, Any

from ...io.errors import DiffbitError
from ...io.fields import Count, Rule, bounds, get, of_length, one_of, read, shown
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


Stop = Annotated[str, Rule("text that is not empty", len)]
Stops = Annotated[tuple[Stop, ...], of_length(0, MOST_STOPS)]
Prompt = Annotated[str | tuple[int, ...], Rule("text or token ids", lambda prompt: prompt != ())]
Logprobs = Annotated[int, bounds(0, MOST_LOGPROBS)]
TokenKey = Annotated[str, Rule("a token id", re.compile(r"[0-9]{1,10}").fullmatch)]


@dataclass(frozen=True)
class ContentPart:
    """A part of a message's content."""

    type: Annotated[str, one_of("text", words="text: other content is not supported")]
    text: str


@dataclass(frozen=True)
class ChatMessage:
    role: str
    content: str | tuple[ContentPart, ...]


Messages = Annotated[tuple[ChatMessage, ...], Rule("at least one message", len)]


@dataclass(frozen=True)
class Task:
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


def _body(values: object) -> dict[str, Any]:
    """Return a request's fields that are not null."""
    if not isinstance(values, dict):
        raise Refused(400, "the body is not a JSON object")
    body = {name: value for name, value in values.items() if value is not None}
    for name, idle in UNSUPPORTED.items():
        if name in body and body[name] not in idle:
            raise Refused(400, f"{name} is {shown(body[name])}, which is not supported", param=name)
    return body


def _messages(body: Mapping[str, Any]) -> list[Message]:
    messages = []
    for message in get(body, "messages", Messages, extra=True):
        text = message.content if isinstance(message.content, str) else "".join(part.text for part in message.content)
        messages.append(Message(role="system" if message.role == "developer" else message.role, content=text))
    return messages


def _prompts(body: Mapping[str, Any], model: Served) -> list[list[int]]:
    """The prompts as token ids; "prompt" is a text, a list of token ids, or a list of either."""
    prompt = get(body, "prompt", str | tuple[int | Prompt, ...], "")
    if isinstance(prompt, str) or (prompt and all(isinstance(item, int) for item in prompt)):
        prompt = (prompt,)
    if not 1 <= len(prompt) <= model.engine.most:
        raise Refused(400, f"prompt has {len(prompt)} prompts, wanted 1 to {model.engine.most}", param="prompt")
    bos = model.artifact.bos_token_id
    prompts = []
    for index, item in enumerate(prompt):
        item = read(Prompt, item, f"prompt[{index}]")
        ids = model.tokenizer.encode(item) if isinstance(item, str) else list(item)
        prompts.append(ids or ([] if bos is None else [bos]))
    return prompts


def _sampler(body: Mapping[str, Any], model: Served, index: int, prompt: Sequence[int]) -> Sampler:
    """The sampler of the index-th answer; each has its own seed."""
    options = {option.name: body.get(option.name) for option in fields(Sampling)}
    if options["seed"] is not None:
        options["seed"] = get(body, "seed", int) + index
    biases = get(body, "logit_bias", Mapping[TokenKey, Any], None)  # JSON's keys are strings
    options["logit_bias"] = None if biases is None else {int(token): bias for token, bias in biases.items()}
    sampler = Sampler.of(model.artifact, **options)
    sampler.start(len(prompt))
    return sampler


def read_request(values: object, models: Mapping[str, Served], chat: bool) -> Task:
    """Raises Refused, or DiffbitError for a field's value."""
    body = _body(values)
    name = get(body, "model", str, next(iter(models)))
    if name not in models:
        raise Refused(404, f"there is no model {shown(name)}; choose from {', '.join(models)}", param="model")
    model = models[name]
    logprobs: int | None
    if chat:
        logprobs = get(body, "top_logprobs", Logprobs, 0) if get(body, "logprobs", bool, False) else None
        limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        prompts = [model.prompt_of(_messages(body))]
    else:
        logprobs = get(body, "logprobs", Logprobs, None)
        limit = "max_tokens"
        prompts = _prompts(body, model)
    stop = get(body, "stop", Stop | Stops, ())
    samplers = [_sampler(body, model, index, prompt) for index, prompt in enumerate(prompts)]
    most = get(body, limit, Count, MAX_TOKENS if chat else TEXT_TOKENS)
    stream = get(body, "stream", bool, False)
    options = get(body, "stream_options", Mapping[str, Any], {})
    usage = stream and get(options, "include_usage", bool, False, "stream_options")
    stops = (stop,) if isinstance(stop, str) else stop
    return Task(model, chat, prompts, samplers, most, stops, logprobs, stream, usage)


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
                task.top_logprobs,
            )
            for index, (prompt, sampler) in enumerate(zip(task.prompts, task.samplers, strict=True))
        ]  # fmt: skip
        self._head = {
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
            self._choice(index, {"message": {"role": "assistant", "content": text}} if self.task.chat else
                         {"text": text}, logprobs[index], reasons[index])
            for index, text in enumerate(texts)
        ]  # fmt: skip
        kind = "chat.completion" if self.task.chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices, "usage": self.usage()}

    async def events(self) -> AsyncIterator[str]:
        """The answers as server-sent events."""
        kind = "chat.completion.chunk" if self.task.chat else "text_completion"
        usage = {"usage": None} if self.task.include_usage else {}

        def event(choices: list[dict[str, Any]], **more: Any) -> str:
            return _event({**self._head, "object": kind, "choices": choices, **usage, **more})

        if self.task.chat:
            yield event([self._choice(0, {"delta": {"role": "assistant", "content": ""}}, [], None)])
        async for index, piece in self.pieces():
            if piece.error is not None:
                yield _event({"error": {"message": piece.error, "type": "server_error"}})
                return
            text = {"delta": {"content": piece.text} if piece.text else {}} if self.task.chat else {
                "text": piece.text
            }  # fmt: skip
            yield event([self._choice(index, text, piece.logprobs, REASONS[piece.finish_reason])])
        if self.task.include_usage:
            yield event([], usage=self.usage())
        yield "data: [DONE]\n\n"

    def _choice(
        self, index: int, content: dict[str, Any], logprobs: Sequence[Logprob], reason: str | None
    ) -> dict[str, Any]:
        shown_logprobs = None if self.task.top_logprobs is None else self._logprobs(logprobs)
        return {"index": index, **content, "logprobs": shown_logprobs, "finish_reason": reason}

    def _logprobs(self, logprobs: Sequence[Logprob]) -> dict[str, Any]:
        def text(token: int) -> str:
            return self.task.model.tokenizer.decode([token])

        if not self.task.chat:
            return {
                "tokens": [text(entry.token) for entry in logprobs],
                "token_logprobs": [entry.value for entry in logprobs],
                "top_logprobs": [{text(token): value for token, value in entry.top} for entry in logprobs],
            }

        def entry(token: int, value: float) -> dict[str, Any]:
            return {"token": text(token), "logprob": value, "bytes": list(text(token).encode())}

        return {
            "content": [
                entry(item.token, item.value) | {"top_logprobs": [entry(*pair) for pair in item.top]}
                for item in logprobs
            ]
        }


def _event(value: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"
