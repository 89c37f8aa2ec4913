"""OpenAI's API: reads the JSON of a request as a `Task`.

A field that would change the answer and is not supported raises an error; none is ignored but those in IGNORED, which
change no answer. `top_k`, `min_p`, `repetition_penalty`, `grammar`, `json_schema`, `chat_template_kwargs` and
`allow_loops` are additional fields (the three before the last are llama.cpp's). Sampling options that a request does
not set come from the model's generation_config.json. Chat requests need a model with a chat template.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Annotated, Any

from ...io.errors import DiffbitError, shortened
from ...io.fields import Count, FieldError, Rule, bounds, get, located, of_length, one_of, read, shown
from ...io.files import folder_name
from ...io.tokenizer_files import TOKENIZER
from ...runtime import (
    MAX_TOKENS,
    RESERVED_VARIABLES,
    THINKING_SWITCHES,
    Abandoned,
    Artifact,
    ChatTemplate,
    Constraint,
    Grammars,
    Message,
    NoTemplate,
    Sampler,
    Session,
    SessionOptions,
    Tokenizer,
    begins_thinking,
)
from ...settings import Sampling
from .engine import Engine
from .prefixes import PrefixFiles
from .tools import ANY_OBJECT, TAGS, Calls, Function, Tools, calls_of, grammar, in_words

TEXT_TOKENS = 16  # OpenAI's default limit of a text completion; that of a chat's answer is MAX_TOKENS
MOST_STOPS, MOST_LOGPROBS = 4, 20
LONG_TEXT = 1 << 15  # characters of a prompt that takes a while to encode
NO_LIMIT = -1  # as clients send it in max_tokens, seed and top_k
SAMPLING = tuple(option.name for option in fields(Sampling))
FIELDS = (
    *SAMPLING, "model", "stop", "stream", "stream_options", "max_tokens", "n", "logprobs", "response_format",
    "json_schema", "grammar", "allow_loops",
)  # fmt: skip
CHAT_FIELDS = (
    "messages", "max_completion_tokens", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls",
    "chat_template_kwargs", "reasoning_effort",
)  # fmt: skip
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")
QUICK = ("none", "minimal")  # efforts for which a model does not think that can only do so or not
TEXT_FIELDS = ("prompt", "echo")
IGNORED = (  # about accounts, caches, logs and what a response shows
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "cache_prompt", "id_slot", "timings_per_token", "return_tokens", "return_progress",
)  # fmt: skip
IDLE = {  # field -> the values that request nothing
    "best_of": (1,), "suffix": ("",), "functions": ([],), "function_call": ("none", "auto"), "modalities": (["text"],),
    "n_predict": (NO_LIMIT,), "ignore_eos": (False,), "typical_p": (1,), "mirostat": (0,), "repeat_penalty": (1,),
    "dry_multiplier": (0,), "xtc_probability": (0,), "dynatemp_range": (0,), "add_generation_prompt": (True,),
}  # fmt: skip


class Refused(Exception):
    """An error response: HTTP status, OpenAI's error type, and a message."""

    def __init__(self, status: int, message: str, kind: str = "invalid_request_error", param: str | None = None):
        super().__init__(shortened(message))
        self.status, self.kind, self.param = status, kind, None if param is None else shortened(param)


class Served:
    """A model, named after its folder, and the engine that runs it."""

    def __init__(
        self,
        artifact: Artifact,
        options: SessionOptions,
        *,
        rows: int,
        queue: int,
        prefixes: PrefixFiles | None = None,
        memory: int | None = None,
        think: bool | None = None,
    ) -> None:
        """think: whether a model that can do both thinks before it answers, unless a request says so; None: as its
        template has it. Raises DiffbitError if the template has no switch for it."""
        self.name, self.artifact, self.created = folder_name(artifact.path), artifact, int(time.time())
        self.variables: Mapping[str, Any] = {}  # of the chat template
        self.tokenizer = Tokenizer(artifact.file(TOKENIZER))
        self.template: ChatTemplate | None
        self.calls: Calls | None = None
        try:
            self.template = ChatTemplate.read(artifact)
            self.end_tokens = self.template.end_tokens(artifact, self.tokenizer)
            self.calls = calls_of(self.template)
        except NoTemplate:
            self.template, self.no_template = None, "it has no chat template; use /v1/completions"
        except DiffbitError as error:
            self.template, self.no_template = None, self.public(str(error))
        if self.template is None:
            self.end_tokens = set(artifact.eos_token_ids)
        else:
            self.variables = self.template.thinking(think)
        session = Session(artifact, options)
        self.engine = Engine(session, self.tokenizer, rows=rows, queue=queue, prefixes=prefixes, memory=memory)

    @cached_property
    def grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.end_tokens)

    @cached_property
    def vocabulary(self) -> Any:
        """llguidance's, which knows the bytes of tokens; None if the model has no end token, or another tokenizer."""
        with suppress(DiffbitError):
            return self.grammars.vocabulary

    def bytes_of(self, token: int) -> bytes:
        """Return what a token stands for: often a part of a character, or a word after a space."""
        known = self.vocabulary
        return self.tokenizer.decode([token]).encode() if known is None else bytes(known.decode_bytes([token]))

    def public(self, message: str) -> str:
        """Return a message without the place of the model on the server."""
        return message.replace(str(self.artifact.path), self.name)

    @property
    def chat_template(self) -> ChatTemplate:
        if self.template is None:
            raise Refused(400, f"model {self.name}: {self.no_template}", param="messages")
        return self.template

    def rendered(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a conversation in the chat template, with these of its variables besides the server's."""
        if tools and self.calls is None:
            messages, tools = in_words(tools, messages), ()
        return self.chat_template.render(
            messages, tools=tools or None, variables={**self.variables, **(variables or {})}
        )

    def prompt_of(self, text: str) -> list[int]:
        """Return the tokens of a rendered conversation."""
        return self.encode(text, add_special_tokens=False)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the tokens of a prompt. Raises DiffbitError for one that is too long for the context, where its length
        shows that, before it is encoded."""
        capacity = self.engine.rows.capacity
        if len(text) > LONG_TEXT and (least := self.tokenizer.least_tokens(text)) > capacity:
            raise DiffbitError(f"the prompt has at least {least} tokens, and there is room for {capacity}; shorten it")
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)


Stop = Annotated[str, Rule("text that is not empty", len)]
Stops = Annotated[tuple[Stop, ...], of_length(0, MOST_STOPS)]
Prompt = Annotated[str | tuple[int, ...], Rule("text or token ids", lambda prompt: prompt != ())]
Prompts = str | tuple[int | Prompt, ...]
Logprobs = Annotated[int, bounds(0, MOST_LOGPROBS)]
ROLES = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class ContentPart:
    """A part of a message's content."""

    type: Annotated[str, one_of("text", words="text: other content is not supported")]
    text: str


@dataclass(frozen=True)
class CalledFunction:
    """The function of a call in an earlier answer; its arguments are JSON in a text."""

    name: str
    arguments: str


@dataclass(frozen=True)
class MessageCall:
    function: CalledFunction
    id: str = ""


@dataclass(frozen=True)
class ChatMessage:
    role: Annotated[str, one_of(*ROLES)]
    content: str | tuple[ContentPart, ...] | None = None
    tool_calls: tuple[MessageCall, ...] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None  # what an assistant thought


Messages = Annotated[tuple[ChatMessage, ...], Rule("at least one message", len)]


Form = Callable[[Callable[[], bool]], Constraint]  # whether it is still wanted -> what constrains the answers


@dataclass(frozen=True)
class Task:
    """A request, validated but for its form. It has one prompt and one sampler per answer."""

    model: Served
    chat: bool
    prompts: Sequence[Sequence[int]]
    samplers: Sequence[Sampler]
    max_tokens: int
    stop: Sequence[str]
    top_logprobs: int | None
    stream: bool
    include_usage: bool
    calls: Calls | None = None  # how the answers write calls, if they may
    thinks: bool = False  # whether the answers may have thinking, which is not of their content
    inside: bool = False  # whether they begin with it
    allow_loops: bool = False
    echoes: Sequence[str] = ()  # what each text answer begins with
    n: int = 1  # answers to each prompt
    form: Form | None = None

    def constrain(self, is_wanted: Callable[[], bool] = lambda: True) -> None:
        """Compile the form of the answers, for as long as the answers are wanted. Call it once, and before they begin.

        Raises DiffbitError for a form that cannot be enforced.
        """
        if self.form is not None:
            constraint = self.form(is_wanted)
            room = self.model.engine.rows.capacity
            for sampler, prompt in zip(self.samplers, self.prompts, strict=True):
                sampler.constraint = constraint.copy()
                sampler.start(len(prompt), min(self.max_tokens, room - len(prompt) + 1))


def read_request(values: object, models: Mapping[str, Served], chat: bool) -> Task:
    """Raises Refused, or DiffbitError for a field's value."""
    body = known_fields(values, (*FIELDS, *(CHAT_FIELDS if chat else TEXT_FIELDS)))
    model = choose_model(body, models)
    model.artifact.check_output()
    calls: Calls | None = None
    form: Form | None = None
    logprobs: int | None
    if chat:
        has_logprobs = get(body, "logprobs", bool, False)
        logprobs = get(body, "top_logprobs", Logprobs, 0 if has_logprobs else None)
        if logprobs is not None and not has_logprobs:
            raise Refused(400, f"top_logprobs is {logprobs}, but logprobs is not true", param="top_logprobs")
        limit = "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens"
        tools, choice = _tools(body)
        text = model.rendered(_messages(body), tools, _variables(body, model))
        prompts = [model.prompt_of(text)]
        if tools:
            calls = model.calls or TAGS
            form = _calls(body, model, calls, choice)
    else:
        logprobs = get(body, "logprobs", Logprobs, None)
        limit = "max_tokens"
        prompts = token_ids(get(body, "prompt", Prompts, ""), model, "prompt", model.engine.max_answers)
    form = form or _form(body, model)
    is_free = form is None
    n, answers = get(body, "n", Count, 1), model.engine.max_answers
    if n * len(prompts) > answers:
        raise Refused(400, f"n is {n}, wanted at most {answers // len(prompts)} answers to each prompt", param="n")
    prompts = [prompt for prompt in prompts for _ in range(n)]
    max_tokens = get(body, limit, Count | Annotated[int, one_of(NO_LIMIT)], MAX_TOKENS if chat else TEXT_TOKENS)
    max_tokens = model.engine.rows.capacity if max_tokens == NO_LIMIT else max_tokens
    samplers = _samplers(body, model, len(prompts))
    for sampler, prompt in zip(samplers, prompts, strict=True):
        sampler.start(len(prompt), min(max_tokens, model.engine.rows.capacity - len(prompt) + 1))
    stop = get(body, "stop", Stop | Stops, ())
    stream = get(body, "stream", bool, False)
    options = get(body, "stream_options", Mapping[str, Any], {})
    usage = stream and get(options, "include_usage", bool, False, "stream_options")
    stops = (stop,) if isinstance(stop, str) else stop
    allow_loops = get(body, "allow_loops", bool, False) or not is_free
    # JSON of a schema is all of the answer: a model whose prompt ends in <think> writes it there
    thinks = chat and model.chat_template.thinks and (is_free or calls is not None)
    inside = thinks and begins_thinking(text)
    task = Task(
        model, chat, prompts, samplers, max_tokens, stops, logprobs, stream, usage, calls, thinks, inside, allow_loops,
        n=n, form=form,
    )  # fmt: skip
    if not get(body, "echo", bool, False):
        return task
    if logprobs is not None:
        raise Refused(400, "echo is true, which does not go together with logprobs", param="echo")
    return replace(task, echoes=[model.tokenizer.decode(prompt) for prompt in prompts])


def tokenize(values: object, models: Mapping[str, Served]) -> list[int]:
    """Return the token ids of {"content": text}, or of {"messages": [...]} and {"tools": [...]} in the model's
    template."""
    body = known_fields(
        values,
        ("model", "content", "messages", "tools", "add_special", "chat_template_kwargs", "reasoning_effort"),
    )
    model = choose_model(body, models)
    if "messages" in body:
        text = model.rendered(_messages(body), _tools(body)[0], _variables(body, model))
        return model.tokenizer.encode(text, add_special_tokens=False)
    return model.tokenizer.encode(get(body, "content", str), add_special_tokens=get(body, "add_special", bool, False))


def detokenize(values: object, models: Mapping[str, Served]) -> str:
    """Return the text of {"tokens": [...]}, without special tokens."""
    body = known_fields(values, ("model", "tokens"))
    model = choose_model(body, models)
    token = Annotated[int, bounds(0, model.artifact.vocab_size - 1)]
    return model.tokenizer.decode(get(body, "tokens", tuple[token, ...]))


def choose_model(body: Mapping[str, Any], models: Mapping[str, Served]) -> Served:
    name = get(body, "model", str, next(iter(models)))
    if name not in models:
        raise Refused(404, f"there is no model {shown(name)}; choose from {', '.join(models)}", param="model")
    return models[name]


def known_fields(values: object, known: Collection[str]) -> dict[str, Any]:
    """Return a request's fields that are not null and matter. Raises Refused for one that is not known."""
    if not isinstance(values, dict):
        raise Refused(400, "the body is not a JSON object")
    body = {name: value for name, value in values.items() if value is not None and name not in IGNORED}
    for name in body.keys() - set(known):
        value = body.pop(name)
        if not any(value == idle and isinstance(value, bool) == isinstance(idle, bool) for idle in IDLE.get(name, ())):
            raise Refused(400, f"{shown(name)} is {shown(value)}, which is not supported", param=name)
    return body


def _messages(body: Mapping[str, Any]) -> list[Message]:
    messages = []
    for index, given in enumerate(get(body, "messages", Messages, extra=True)):
        place, parts = f"messages[{index}]", given.content
        if parts is None and not given.tool_calls:
            raise FieldError(f"{place}.content", f"{place}.content is missing, wanted text or a list of texts")
        text = parts if isinstance(parts, str) else "".join(part.text for part in parts or ())
        message = Message(role="system" if given.role == "developer" else given.role, content=text)
        if given.tool_calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function",
                 "function": {"name": call.function.name, "arguments": _arguments(call, f"{place}.tool_calls[{i}]")}}
                for i, call in enumerate(given.tool_calls)
            ]  # fmt: skip
        if given.tool_call_id is not None:
            message["tool_call_id"] = given.tool_call_id
        if given.name is not None:
            message["name"] = given.name
        if given.reasoning_content is not None:
            message["reasoning_content"] = given.reasoning_content
        messages.append(message)
    return messages


def _variables(body: Mapping[str, Any], model: Served) -> dict[str, Any]:
    """Return the variables of the chat template that a request sets: chat_template_kwargs, and reasoning_effort as this
    template knows it. One that the template does not read is refused, unless it turns off what the model never does."""
    template = model.chat_template
    given = get(body, "chat_template_kwargs", Mapping[str, Any], {})
    for name, value in given.items():
        if name not in template.names and not (name in THINKING_SWITCHES and value is False and not template.thinks):
            known = ", ".join(sorted(template.names - RESERVED_VARIABLES)) or "none"
            raise Refused(
                400, f"chat_template_kwargs has {shown(name)}, which the chat template of {model.name} does not read; "
                f"it reads: {known}", param="chat_template_kwargs",
            )  # fmt: skip
        if name in RESERVED_VARIABLES:
            raise Refused(400, f"chat_template_kwargs has {name}, which the server sets", param="chat_template_kwargs")
    effort = get(body, "reasoning_effort", Annotated[str, one_of(*EFFORTS)], None)
    if effort is None:
        return dict(given)
    variables: dict[str, Any] = {"reasoning_effort": effort} if "reasoning_effort" in template.names else {}
    try:
        return {**variables, **template.thinking(effort not in QUICK), **given}
    except DiffbitError:
        if variables:
            return {**variables, **given}
        what = "always thinks" if template.thinks else "does not think"
        raise Refused(
            400, f"reasoning_effort is {shown(effort)}, but {model.name} {what}: its chat template has no switch",
            param="reasoning_effort",
        ) from None  # fmt: skip


def _arguments(call: MessageCall, place: str) -> dict[str, Any]:
    """Return the arguments of an earlier call, as templates take them."""
    place = f"{place}.function.arguments"
    try:
        arguments = json.loads(call.function.arguments or "{}")
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise FieldError(place, f"{place} is {shown(call.function.arguments)}, wanted a JSON object in a text")
    return arguments


def _tools(body: Mapping[str, Any]) -> tuple[Sequence[Mapping[str, Any]], str]:
    """Return the tools that the model may call and the choice: auto, required, or a function's name."""
    tools = get(body, "tools", Tools, (), extra=True)
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise Refused(400, "two tools have the same name", param="tools")
    choice = body.get("tool_choice", "auto" if tools else "none")
    if isinstance(choice, dict):
        read(Annotated[str, one_of("function")], choice.get("type"), "tool_choice.type")
        choice = get(get(choice, "function", Mapping[str, Any], place="tool_choice"), "name", str,
                     place="tool_choice.function")  # fmt: skip
        if choice not in names:
            raise Refused(400, f"tool_choice is {shown(choice)}, but tools has no such function", param="tool_choice")
    elif read(Annotated[str, one_of("none", "auto", "required")], choice, "tool_choice") == "none":
        return (), choice
    elif not tools and choice == "required":
        raise Refused(400, "tool_choice is 'required', but there are no tools", param="tool_choice")
    return [] if not tools else list(body["tools"]), choice


def _calls(body: Mapping[str, Any], model: Served, calls: Calls, choice: str) -> Form:
    """Return the form of answers that may have calls."""
    functions = [tool.function for tool in get(body, "tools", Tools, extra=True)]
    if choice not in ("auto", "required"):
        functions = [function for function in functions if function.name == choice]
    several = get(body, "parallel_tool_calls", bool, True) and choice in ("auto", "required")
    text, free = _schema(body), choice == "auto"
    if "grammar" in body:
        raise Refused(400, "grammar does not go together with tools", param="grammar")
    if text is not None and free and not calls.begin:  # both begin with {
        why = f"{model.name} writes calls as JSON, so no other JSON goes together with tool_choice 'auto'"
        raise Refused(400, why, param="json_schema" if "json_schema" in body else "response_format")
    json_after = calls.begin if free and text is None else ""

    def compiled(is_wanted: Callable[[], bool], functions: Sequence[Function] = functions) -> Constraint:
        """With `auto`, leave out the parts of a function's schema that cannot be enforced: the answer may need no
        call."""
        rules = grammar(calls, functions, free=free, several=several, schema=text, lenient=free)
        return model.grammars.grammar(rules, is_wanted, json_after=json_after)

    def form(is_wanted: Callable[[], bool]) -> Constraint:
        try:
            return compiled(is_wanted)
        except Abandoned:
            raise
        except DiffbitError:
            if not free:
                _find_wrong(model, functions, text, is_wanted)
                raise
            for function in functions:
                with located(f"the parameters of {function.name}"):
                    Grammars.rule(function.schema, lenient=True)
            _find_wrong(model, (), text, is_wanted)
        return compiled(is_wanted, [replace(function, parameters=ANY_OBJECT) for function in functions])

    return form


def _find_wrong(model: Served, functions: Sequence[Function], text: object, is_wanted: Callable[[], bool]) -> None:
    """Raise an error that names the schema which cannot be used."""
    for function in functions:
        with located(f"the parameters of {function.name}"):
            model.grammars.json_schema(function.schema, is_wanted)
    if text is not None:
        model.grammars.json_schema(text, is_wanted)


def _schema(body: Mapping[str, Any]) -> object:
    """Return the JSON schema of the answer; None: there is none."""
    format = get(body, "response_format", Mapping[str, Any], {"type": "text"})
    place = "response_format"
    kind = get(format, "type", Annotated[str, one_of("text", "json_object", "json_schema")], place=place)
    schema: object = None
    if kind == "json_object":
        schema = format.get("schema") or {"type": "object"}
    elif kind == "json_schema":
        inner = get(format, "json_schema", Mapping[str, Any], place=place)
        schema = get(inner, "schema", Mapping[str, Any], place=f"{place}.json_schema")
    if "json_schema" in body:
        if schema is not None:
            raise Refused(400, "response_format and json_schema are both given; leave one out", param="json_schema")
        schema = body["json_schema"]
    return schema


def _form(body: Mapping[str, Any], model: Served) -> Form | None:
    schema, rules = _schema(body), get(body, "grammar", str, "")
    if rules and schema is not None:
        raise Refused(400, "a grammar and a JSON schema are both given; leave one out", param="grammar")
    if not rules and schema is None:
        return None
    param = "grammar" if rules else "json_schema" if "json_schema" in body else "response_format"

    def form(is_wanted: Callable[[], bool]) -> Constraint:
        try:
            return model.grammars.grammar(rules, is_wanted) if rules else model.grammars.json_schema(schema, is_wanted)
        except Abandoned:
            raise
        except DiffbitError as error:
            raise FieldError(param, f"{param}: {error}") from None

    return form


def token_ids(prompt: Any, model: Served, field: str, limit: int) -> list[list[int]]:
    """Return the token ids of a text, a list of token ids, or a list of at most `limit` of either: the value of a
    field."""
    if isinstance(prompt, str) or (prompt and all(isinstance(item, int) for item in prompt)):
        prompt = (prompt,)
    if not 1 <= len(prompt) <= limit:
        raise Refused(400, f"{field} has {len(prompt)} texts, wanted 1 to {limit}", param=field)
    bos = model.artifact.bos_token_id
    prompts = []
    for index, item in enumerate(prompt):
        item = read(Prompt, item, f"{field}[{index}]")
        ids = model.encode(item) if isinstance(item, str) else list(item)
        prompts.append(ids or ([] if bos is None else [bos]))
    return prompts


def _samplers(body: Mapping[str, Any], model: Served, count: int) -> list[Sampler]:
    """Return `count` samplers; each has its own seed."""
    options = {name: body.get(name) for name in SAMPLING}
    if options["seed"] is not None:
        seed = get(body, "seed", int)
        options["seed"] = None if seed == NO_LIMIT else seed
    if options["top_k"] == NO_LIMIT:
        options["top_k"] = 0
    size = model.artifact.vocab_size
    is_id = Rule(f"a token id from 0 to {size - 1}", lambda key: re.fullmatch("[0-9]{1,10}", key) and int(key) < size)
    biases = get(body, "logit_bias", Mapping[Annotated[str, is_id], Any], None)  # JSON's keys are strings
    options["logit_bias"] = None if biases is None else {int(token): bias for token, bias in biases.items()}
    first = Sampler.of(model.artifact, **options)
    return [first, *(first.another(index) for index in range(1, count))]
