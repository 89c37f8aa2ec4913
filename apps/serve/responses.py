"""OpenAI's newer API, /v1/responses, for text and function calls. Responses are not stored: a request brings the whole
conversation, and previous_response_id is refused."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ...io.fields import FieldError, get, shown
from .engine import Piece
from .openai_api import REASONS, Answers
from .openai_requests import Refused, Served, Task, known_fields, read_request

SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls")  # fields that chat requests have, too
FIELDS = (*SAME, "input", "instructions", "max_output_tokens", "text", "tools", "tool_choice", "truncation", "include",
          "reasoning")  # fmt: skip
TEXTS = ("input_text", "output_text", "text")


def read_responses(values: object, models: Mapping[str, Served]) -> Task:
    """Raises Refused, or DiffbitError for a field's value."""
    body = known_fields(values, FIELDS)
    for name, idle in (("truncation", "disabled"), ("include", [])):
        if body.get(name, idle) != idle:
            raise Refused(400, f"{name} is {shown(body[name])}, which is not supported", param=name)
    chat = {name: body[name] for name in SAME if name in body}
    given = get(body, "input", str | tuple[Mapping[str, Any], ...])
    items = ({"role": "user", "content": given},) if isinstance(given, str) else given
    system = get(body, "instructions", str, "")
    if effort := get(body, "reasoning", Mapping[str, Any], {}).get("effort"):
        chat["reasoning_effort"] = effort
    chat["messages"] = [*([{"role": "system", "content": system}] if system else []), *_messages(items)]
    if "max_output_tokens" in body:
        chat["max_tokens"] = body["max_output_tokens"]
    form = get(get(body, "text", Mapping[str, Any], {}), "format", Mapping[str, Any], {"type": "text"}, "text")
    inner = {name: value for name, value in form.items() if name != "type"}
    chat["response_format"] = {"type": form.get("type"), **({"json_schema": inner} if inner else {})}
    if tools := get(body, "tools", tuple[Mapping[str, Any], ...], ()):
        chat["tools"] = [_nested(tool) for tool in tools]
    if choice := body.get("tool_choice"):
        chat["tool_choice"] = _nested(choice) if isinstance(choice, dict) else choice
    return read_request(chat, models, chat=True)


def _nested(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool, or a choice of one, as chat requests have it."""
    return {"type": tool.get("type"), "function": {name: value for name, value in tool.items() if name != "type"}}


def _messages(items: tuple[Mapping[str, Any], ...]) -> list[dict[str, Any]]:
    """Return the messages of chat requests; calls that follow one another are of one message, and so is the thinking
    before them."""
    messages: list[dict[str, Any]] = []
    thoughts: dict[str, str] = {}  # of the message that follows
    for index, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "function_call":
            call = {"id": item.get("call_id", ""), "type": "function",
                    "function": {"name": item.get("name"), "arguments": item.get("arguments")}}  # fmt: skip
            if not messages or "tool_calls" not in messages[-1]:
                messages.append({"role": "assistant", "content": None, "tool_calls": [], **thoughts})
                thoughts = {}
            messages[-1]["tool_calls"].append(call)
        elif kind == "function_call_output":
            messages.append(
                {"role": "tool", "content": _content(item.get("output")), "tool_call_id": item.get("call_id")}
            )
        elif kind == "message":
            messages.append({"role": item.get("role"), "content": _content(item.get("content")), **thoughts})
            thoughts = {}
        elif kind == "reasoning":
            parts = get(item, "content", tuple[ReasoningPart, ...], (), f"input[{index}]", extra=True)
            thoughts = {"reasoning_content": "".join(part.text for part in parts)} if parts else {}
        else:
            raise FieldError(f"input[{index}].type", f"input[{index}].type is {shown(kind)}, which is not supported")
    return messages


def _content(content: object) -> object:
    if not isinstance(content, list):
        return content
    return [
        part | {"type": "text"} if isinstance(part, dict) and part.get("type") in TEXTS else part for part in content
    ]


@dataclass(frozen=True)
class ReasoningPart:
    """A part of what an earlier answer thought."""

    text: str


class _Output:
    """The items of a response, and the events of what is added to them."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []

    def add(self, delta: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        """Add a delta of a chat's message."""
        if "reasoning_content" in delta:
            if not self.items or self.items[-1]["type"] != "reasoning":
                yield from self.end()
                reasoning = {"type": "reasoning", "id": _id("rs"), "status": "in_progress", "summary": []}
                yield from self._begin(reasoning | {"content": [{"type": "reasoning_text", "text": ""}]})
            self.items[-1]["content"][0]["text"] += delta["reasoning_content"]
            yield "reasoning_text.delta", {**self._part(), "delta": delta["reasoning_content"]}
            return
        if "content" in delta:
            if not self.items or self.items[-1]["type"] != "message":
                yield from self.end()
                message = {"type": "message", "id": _id("msg"), "status": "in_progress", "role": "assistant"}
                yield from self._begin(message | {"content": []})
                self.items[-1]["content"].append(_text(""))
                yield "content_part.added", {**self._part(), "part": _text("")}
            self.items[-1]["content"][0]["text"] += delta["content"]
            yield "output_text.delta", {**self._part(), "delta": delta["content"], "logprobs": []}
            return
        (call,) = delta["tool_calls"]
        if "id" in call:
            yield from self.end()
            item = {"type": "function_call", "id": _id("fc"), "status": "in_progress", "call_id": call["id"]}
            yield from self._begin(item | {"name": call["function"]["name"], "arguments": ""})
        else:
            self.items[-1]["arguments"] += call["function"]["arguments"]
            yield "function_call_arguments.delta", {**self._place(), "delta": call["function"]["arguments"]}

    def _begin(self, item: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        self.items.append(item)
        yield "output_item.added", {"output_index": len(self.items) - 1, "item": item}

    def end(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """The last item is complete."""
        if not self.items or self.items[-1]["status"] == "completed":
            return
        item = self.items[-1]
        item["status"] = "completed"
        if item["type"] == "message":
            (part,) = item["content"]
            yield "output_text.done", {**self._part(), "text": part["text"], "logprobs": []}
            yield "content_part.done", {**self._part(), "part": part}
        elif item["type"] == "reasoning":
            yield "reasoning_text.done", {**self._part(), "text": item["content"][0]["text"]}
        else:
            done = {"arguments": item["arguments"], "name": item["name"]}
            yield "function_call_arguments.done", {**self._place(), **done}
        yield "output_item.done", {"output_index": len(self.items) - 1, "item": item}

    def _place(self) -> dict[str, Any]:
        return {"output_index": len(self.items) - 1, "item_id": self.items[-1]["id"]}

    def _part(self) -> dict[str, Any]:
        return {**self._place(), "content_index": 0}


class Responses(Answers):
    """The answer to a request of /v1/responses."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._id, self._output = _id("resp"), _Output()

    async def whole(self) -> dict[str, Any]:
        parts, last = self.parts[0], Piece("")
        async for _, last in self.pieces():
            for delta in parts.push(last):
                list(self._output.add(delta))
        if last.error is not None:
            raise Refused(500, self.task.model.public(last.error), "server_error")
        list(self._output.end())
        return self._response(last)

    async def events(self) -> AsyncIterator[str]:
        """The response as server-sent events: each item, its parts, and what they hold when complete."""
        number = itertools.count()

        def event(kind: str, values: Mapping[str, Any]) -> str:
            data = {"type": kind, "sequence_number": next(number), **values}
            return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False)}\n\n"

        for kind in ("created", "in_progress"):
            yield event(f"response.{kind}", {"response": self._response(None)})
        parts, last = self.parts[0], Piece("")
        async for _, last in self.pieces():
            if last.error is not None:
                message = self.task.model.public(last.error)
                yield event("error", {"code": "server_error", "message": message, "param": None})
                return
            for delta in parts.push(last):
                for kind, values in self._output.add(delta):
                    yield event(f"response.{kind}", values)
        for kind, values in self._output.end():
            yield event(f"response.{kind}", values)
        response = self._response(last)
        yield event(f"response.{response['status']}", {"response": response})

    def _response(self, last: Piece | None) -> dict[str, Any]:
        """Return the response after its last piece; None: there are more."""
        usage = self.usage()
        reached_limit = last is not None and REASONS[last.finish_reason] == "length"
        status = "in_progress" if last is None else "incomplete" if reached_limit else "completed"
        tokens = {
            "input_tokens": usage["prompt_tokens"], "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"], "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }  # fmt: skip
        return {
            "id": self._id, "object": "response", "created_at": self.head["created"], "model": self.task.model.name,
            "status": status, "error": None, "output": self._output.items,
            "incomplete_details": {"reason": "max_output_tokens"} if reached_limit else None,
            "usage": None if last is None else tokens, "instructions": None, "metadata": {}, "tools": [],
            "tool_choice": "auto", "parallel_tool_calls": True, "temperature": None, "top_p": None,
        }  # fmt: skip


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"


def _text(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": []}
