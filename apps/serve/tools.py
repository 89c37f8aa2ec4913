"""Function calls: how a model is told which functions there are, how it writes a call, and how calls are read.

A model whose chat template knows tools writes calls as its template does (`CALLS`). Any other model is told in a system
message (`in_words`). A grammar lets it write only calls of functions that exist, with arguments of their schemas:

    <tool_call>
    {"name": "weather", "arguments": {"city": "Oslo"}}
    </tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from ...io.fields import Rule, of_length, one_of
from ...runtime import ChatTemplate, Grammars, Message

MOST_TOOLS = 128
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
Name = Annotated[str, Rule("a name of 1 to 64 letters, digits, _ or -", re.compile(r"[\w-]{1,64}", re.A).fullmatch)]
Event = tuple[Literal["text", "name", "arguments"], str]


@dataclass(frozen=True)
class Function:
    name: Name
    parameters: Mapping[str, Any] | None = None
    description: str | None = None

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of its arguments; without one it has none."""
        return {"type": "object", "additionalProperties": False} if self.parameters is None else self.parameters


@dataclass(frozen=True)
class Tool:
    type: Annotated[str, one_of("function", words="function: other tools are not supported")]
    function: Function


Tools = Annotated[tuple[Tool, ...], of_length(0, MOST_TOOLS)]


@dataclass(frozen=True)
class Calls:
    """How calls are written: begin, calls with `between` between them, end. Without `between` there is only one."""

    begin: str
    between: str | None
    end: str
    arguments: str  # the key of the arguments

    def head(self, name: str) -> str:
        """Return what a call has before its arguments."""
        return f'{{"name": "{name}", "{self.arguments}": '


TAGS = Calls("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>", "arguments")  # Hermes, Qwen, SmolLM
BARE = Calls("", None, "", "parameters")  # Llama 3


def calls_of(template: ChatTemplate) -> Calls | None:
    """Return how a template's model writes calls; None if it knows no tools, or another way to write them."""
    source = template.source
    if not re.search(r"\btools\b", source):
        return None
    if "<tool_call>" in source and '"arguments"' in source and "<function=" not in source:
        return TAGS
    return BARE if '{"name": function name, "parameters":' in source else None


def in_words(tools: Sequence[Mapping[str, Any]], messages: Sequence[Message]) -> list[Message]:
    """Return the conversation for a template without tools: functions in a system message, calls and results as
    text."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    about = (
        f"You can call these functions:\n{listed}\n\nTo call one, write:\n{TAGS.begin}{TAGS.head('NAME')}"
        f'{{"ARGUMENT": VALUE}}}}{TAGS.end}\nYou will get its result as <tool_response>RESULT</tool_response>.'
    )
    texts: list[Message] = []
    for message in messages:
        content, calls = message["content"], message.get("tool_calls", [])
        if calls:
            functions = [call["function"] for call in calls]
            called = [
                f"{TAGS.head(one['name'])}{json.dumps(one['arguments'], ensure_ascii=False)}}}" for one in functions
            ]
            content += TAGS.begin + str(TAGS.between).join(called) + TAGS.end
        if message["role"] == "tool":
            content = f"<tool_response>{content}</tool_response>"
        role = "user" if message["role"] == "tool" else message["role"]
        if texts and role == "user" and texts[-1]["role"] == "user":  # several results; templates want turns
            texts[-1]["content"] += f"\n{content}"
        else:
            texts.append(Message(role=role, content=content))
    if texts and texts[0]["role"] == "system":
        texts[0]["content"] += f"\n\n{about}"
        return texts
    return [Message(role="system", content=about), *texts]


def grammar(
    calls: Calls,
    functions: Sequence[Function],
    *,
    free: bool,
    several: bool,
    schema: object = None,
    lenient: bool = False,
) -> str:
    """Return a Lark grammar of calls. free: a text without calls is allowed, too; schema: that of this text, if it is
    JSON; lenient: leave out the parts of the functions' schemas that cannot be enforced."""
    indices = range(len(functions))
    rules = [f"call: {' | '.join(f'call{i}' for i in indices)}"]
    rules += [f'call{i}: {_quoted(calls.head(functions[i].name))} args{i} "}}"' for i in indices]
    rules += [f"args{i}: {Grammars.rule(functions[i].schema, lenient)}" for i in indices]
    more = f"({_quoted(calls.between)} call)*" if several and calls.between is not None else ""
    called = f"call {more} {_quoted(calls.end)}"
    start = f"{_quoted(calls.begin)} {called}"
    if free and schema is not None:
        start += " | json"
        rules.append(f"json: {Grammars.rule(schema)}")
    elif free and calls.begin:  # text up to the first begin
        start = f"text | head {called}"
        rules += ["text: TEXT", f"head[lazy]: TEXT {_quoted(calls.begin)}", r"TEXT: /(.|\n)*/"]
    elif free:
        start += " | text"
        rules += ["text: TEXT", r"TEXT: /([^{](.|\n)*)?/"]
    return "\n".join(["%llguidance {}", f"start: {start}", *rules])


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""


class CallReader:
    """Reads an answer of such a grammar as it comes: text, and the name and the arguments of each call."""

    def __init__(self, calls: Calls) -> None:
        self._begin = calls.begin
        self._head = re.compile(re.escape(calls.head("NAME")).replace("NAME", r"([\w-]+)"))
        self._read = self._text  # what the pending characters are read as
        self._pending = ""
        self.depth, self._quoted, self._escaped = 0, False, False  # in the arguments

    def push(self, text: str, last: bool = False) -> list[Event]:
        """Add text -> what it completes. last: there is no more."""
        self._pending += text
        events: list[Event] = []
        while self._pending and (event := self._read(last)):
            events.append(event)
        return [event for event in events if event[1]]

    def _text(self, last: bool) -> Event | None:
        """Text up to a call. The beginning of `begin`, which has its first character only once, is held back."""
        pending, begin = self._pending, self._begin
        if not begin:  # a call or text, from the first character on
            self._read = self._to_head if pending[0] == "{" else self._rest
            return self._read(last)
        at = pending.find(begin)
        if at >= 0:
            self._read = self._to_head
            return self._take("text", at)
        at_begin = pending.rfind(begin[0])
        is_held = at_begin >= 0 and begin.startswith(pending[at_begin:]) and not last
        return self._take("text", at_begin if is_held else len(pending)) if at_begin or not is_held else None

    def _rest(self, last: bool) -> Event | None:
        return self._take("text", len(self._pending))

    def _to_head(self, last: bool) -> Event | None:
        head = self._head.search(self._pending)
        if head is None:
            return None
        self._read = self._arguments
        self._take("name", head.end())
        return "name", head[1]

    def _arguments(self, last: bool) -> Event | None:
        """Return the characters of the arguments' object, up to its end."""
        for index, character in enumerate(self._pending, 1):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            else:
                self._quoted = character == '"'
                self.depth += (character in "{[") - (character in "}]")
                if not self.depth and not self._quoted:
                    self._read = self._to_head
                    return self._take("arguments", index)
        return self._take("arguments", len(self._pending))

    def _take(self, kind: Literal["text", "name", "arguments"], count: int) -> Event:
        taken, self._pending = self._pending[:count], self._pending[count:]
        return kind, taken
