"""Structured output and tools: answers of a model of 2 bits in batches, and through the HTTP interface."""

from __future__ import annotations

import json
import queue
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from starlette.testclient import TestClient

from diffbit.apps.serve.engine import Engine, Piece, Request
from diffbit.apps.serve.openai_requests import Served
from diffbit.apps.serve.server import Server
from diffbit.apps.serve.tools import BARE, TAGS, CallReader, Calls, calls_of
from diffbit.cli.app import main
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.quantize import Scheme, quantize_checkpoint
from diffbit.runtime import Artifact, ChatTemplate, Grammars, Sampler, Session, SessionOptions, Tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
LLAMA = (
    '{% if tools %}Respond in the format {"name": function name, "parameters": dictionary}'
    "{% endif %}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)
KNOWS_TOOLS = """{% for t in tools or [] %}tool {{ t.function.name }}
{% endfor %}{% for m in messages %}{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}
<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>{% endfor %}
{% endfor %}assistant:"""
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}, "days": {"enum": [1, 2, 3]}},
        "required": ["city", "days"], "additionalProperties": False}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": CITY}},
    {"type": "function", "function": {"name": "clock"}},
]


@pytest.fixture(scope="module")
def models(trained: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A model of 2 bits, with a template that knows tools and with one that does not."""
    folder = tmp_path_factory.mktemp("structured")
    quantize_checkpoint(trained("diff_v1"), folder / "checkpoint", Scheme(weights=parse_format("int2_g64")))
    for name, template in (("tags", KNOWS_TOOLS), ("words", TEMPLATE), ("bare", LLAMA)):
        (folder / "checkpoint" / "chat_template.jinja").write_text(template)
        export_artifact(folder / "checkpoint", folder / name)
    return {name: folder / name for name in ("tags", "words", "bare")}


@pytest.fixture(scope="module")
def client(models: dict[str, Path]) -> Iterator[TestClient]:
    served = [Served(Artifact.open(path), SessionOptions(threads=1), rows=8, queue=8) for path in models.values()]
    with TestClient(Server(served).application(), base_url="http://localhost") as http:
        yield http
    for model in served:
        model.engine.close()


def any_schema(source: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema of nested objects, arrays, unions and scalars with bounds."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "pattern", "format"]
    kind = source.choice(kinds + ["object", "object", "array", "anyOf"] * (depth < 2))
    if kind == "object":
        names = source.sample(["id", "name", "größe", "a b", 'q"', "tags", "x_1"], source.randint(0, 3))
        required = [name for name in names if source.random() < 0.7]
        return {"type": "object", "properties": {name: any_schema(source, depth + 1) for name in names},
                "required": required, "additionalProperties": source.choice([False, {"type": "boolean"}])}  # fmt: skip
    if kind == "array":
        least = source.randint(0, 2)
        return {"type": "array", "items": any_schema(source, depth + 1), "minItems": least, "maxItems": least + 2}
    if kind == "anyOf":
        return {"anyOf": [any_schema(source, depth + 1) for _ in range(source.randint(1, 3))]}
    low = source.randint(-50, 50)
    return {
        "string": {"type": "string", "minLength": source.randint(0, 3), "maxLength": source.randint(3, 30)},
        "integer": {"type": "integer", "minimum": low, "maximum": low + source.randint(0, 200)},
        "number": {"type": "number", "exclusiveMinimum": low, "maximum": low + 5},
        "enum": {"enum": source.sample([1, "one", None, True, 2.5, [1], {"k": "v"}], 3)},
        "pattern": {"type": "string", "pattern": source.choice(["^[A-Z]{2}-[0-9]+$", "^(ab|cd)+e$", "^#[0-9a-f]{6}$"])},
        "format": {"type": "string", "format": source.choice(["date", "uuid", "ipv4", "time"])},
    }.get(kind, {"type": kind})


def test_200_schemas_give_valid_json(models: dict[str, Path]) -> None:
    """In rows of a batch, each with its schema, whatever the limit of tokens and the temperature."""
    source = random.Random(7)
    tokenizer = Tokenizer(models["words"] / "tokenizer.json")
    session = Session(models["words"], SessionOptions(threads=1))
    grammars = Grammars(tokenizer, session.artifact.eos_token_ids)
    engine = Engine(session, tokenizer, rows=16, queue=200)
    schemas = [any_schema(source) for _ in range(200)]
    pieces: list[queue.SimpleQueue[Piece]] = [queue.SimpleQueue() for _ in schemas]
    for index, schema in enumerate(schemas):
        constraint = grammars.json_schema(schema)
        assert constraint.shortest is not None
        sampler = Sampler(source.choice([0.0, 0.8, 1.5]), seed=index, constraint=constraint)
        prompt = tokenizer.encode(f"value_{index} = ")
        most = constraint.shortest + 1 + source.randint(0, 30)
        sampler.start(len(prompt), most)
        assert engine.submit(
            Request(prompt, pieces[index].put, sampler, most, end_tokens=grammars.vocabulary.eos_tokens)
        )
    texts = set()
    for schema, answer in zip(schemas, pieces, strict=True):
        text, last = "", Piece("")
        while last.finish_reason is None:
            last = answer.get(timeout=120)
            assert last.error is None
            text += last.text
        assert last.finish_reason == "eos"
        jsonschema.validate(json.loads(text), schema)
        texts.add(text)
    engine.close()
    assert len(texts) > 100


def test_run_takes_a_schema(models: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "city.json"
    for schema in (CITY, {"type": "foo"}):
        file.write_text(json.dumps(schema))
        command = ["run", str(models["tags"]), "x = ", "--json-schema", str(file), "-n", "30", "--quiet"]
        for arguments in (command, [*command, "--chat"]):
            with pytest.raises(SystemExit) as stopped:
                main(arguments)
            printed = capsys.readouterr()
            if schema is CITY:
                assert stopped.value.code == 0
                jsonschema.validate(json.loads(printed.out), CITY)
            else:
                assert stopped.value.code == 2
                assert printed.err == f"error: {file}: the JSON schema cannot be used at #: Invalid type: foo\n"


def chat(client: TestClient, **body: Any) -> Any:
    question = [{"role": "user", "content": "def "}]
    answer = client.post("/v1/chat/completions", json={"messages": question, "temperature": 0, **body})
    return answer.json() | {"status": answer.status_code}


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "c", "schema": CITY, "strict": True}}},
        {"response_format": {"type": "json_object", "schema": CITY}},
        {"json_schema": CITY},
        {"grammar": 'root ::= "{\\"city\\": \\"" [a-z]{2,5} "\\", \\"days\\": 3}"'},
    ],
)
def test_each_field_of_structured_output(client: TestClient, body: dict[str, Any]) -> None:
    answer = chat(client, **body, n=2, temperature=1.5, seed=1)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["stop", "stop"]
    for choice in answer["choices"]:
        jsonschema.validate(json.loads(choice["message"]["content"]), CITY)
    text = client.post("/v1/completions", json={"prompt": "x = ", "max_tokens": 60, **body}).json()["choices"][0][
        "text"
    ]
    jsonschema.validate(json.loads(text), CITY)


def test_a_json_object_is_closed_at_the_limit(client: TestClient) -> None:
    for most in (4, 9, 30):
        answer = chat(client, response_format={"type": "json_object"}, max_tokens=most)
        assert isinstance(json.loads(answer["choices"][0]["message"]["content"]), dict)
        assert answer["usage"]["completion_tokens"] <= most


def called(answer: Any) -> list[tuple[str, Any]]:
    calls = answer["choices"][0]["message"].get("tool_calls", [])
    assert len({call["id"] for call in calls}) == len(calls) and all(call["type"] == "function" for call in calls)
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


def test_tool_choice(client: TestClient) -> None:
    answer = chat(client, tools=TOOLS, tool_choice="required", parallel_tool_calls=False)
    assert len(called(answer)) == 1 and answer["choices"][0]["finish_reason"] == "tool_calls"
    assert answer["choices"][0]["message"]["content"] is None
    for name in ("weather", "clock"):
        choice = {"type": "function", "function": {"name": name}}
        ((found, arguments),) = called(chat(client, tools=TOOLS, tool_choice=choice))
        assert found == name
        jsonschema.validate(arguments, CITY if name == "weather" else {"maxProperties": 0})
    answer = chat(client, tools=TOOLS, tool_choice="auto", max_tokens=20)  # it says something else
    assert not called(answer) and answer["choices"][0]["message"]["content"]
    texts = [chat(client, **body, max_tokens=9) for body in ({"tools": TOOLS, "tool_choice": "none"}, {})]
    assert texts[0]["choices"] == texts[1]["choices"]


def test_a_stop_text_within_a_call(client: TestClient) -> None:
    """The call's arguments are no JSON, so that a client must not read them; after a call it may stop."""
    for stop, reason, arguments in (("{}", "stop", ""), ("</tool_call>", "tool_calls", "{}")):
        answer = chat(client, tools=TOOLS[1:], tool_choice="required", stop=stop)["choices"][0]
        assert answer["finish_reason"] == reason
        assert [call["function"]["arguments"] for call in answer["message"]["tool_calls"]] == [arguments]
    answer = chat(client, model="bare", tools=TOOLS[1:], tool_choice="required")
    assert called(answer) == [("clock", {})] and answer["choices"][0]["finish_reason"] == "tool_calls"


def test_tools_in_words(client: TestClient) -> None:
    """A template without tools; the context of 256 tokens has room for one function."""
    answer = chat(client, model="words", tools=TOOLS[1:], tool_choice="required", parallel_tool_calls=False)
    assert called(answer) == [("clock", {})]


def test_streamed_calls_are_the_whole_ones(client: TestClient) -> None:
    """Several calls, whose deltas openai's client adds up by their index."""
    body = {"tools": TOOLS, "tool_choice": "required", "temperature": 1.2, "seed": 5, "max_tokens": 150}
    expected = called(chat(client, **body))
    question = {"messages": [{"role": "user", "content": "def "}], "stream": True}
    lines = client.post("/v1/chat/completions", json=question | body).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines[:-2]]
    calls: list[list[str]] = []
    for chunk in chunks:
        for delta in chunk["delta"].get("tool_calls", []):
            if "id" in delta:
                assert delta["index"] == len(calls) and delta["type"] == "function"
                calls.append([delta["function"]["name"], ""])
            calls[delta["index"]][1] += delta["function"]["arguments"]
    assert [(name, json.loads(arguments)) for name, arguments in calls] == expected
    assert chunks[-1]["finish_reason"] == "tool_calls"
    assert sum("tool_calls" in chunk["delta"] for chunk in chunks) > 2 * len(calls)  # arguments come in parts


@pytest.mark.parametrize("calls", [TAGS, BARE])
def test_calls_are_read_from_any_pieces(calls: Calls) -> None:
    """Against the calls that the text was written of."""
    source = random.Random(3)
    for _ in range(300):
        made = [(source.choice(["a", "b_2", "c-d"]), {"x": source.choice(['}"]\\', "<tool_call>\n", [1, {"y": {}}]])})
                for _ in range(source.randint(0, 3) if calls.between else source.randint(0, 1))]  # fmt: skip
        free = source.choice(["", "Let me see <", "a <tool", "so\n"]) if calls.begin or not made else ""
        text = free
        if made:
            written = [f"{calls.head(name)}{json.dumps(arguments)}}}" for name, arguments in made]
            text += calls.begin + str(calls.between).join(written) + calls.end
        reader, events = CallReader(calls), []
        cuts = sorted(source.randint(0, len(text)) for _ in range(source.randint(0, 12)))
        for begin, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            events += reader.push(text[begin:end], last=end == len(text))
        assert "".join(part for kind, part in events if kind == "text") == free
        assert [part for kind, part in events if kind == "name"] == [name for name, _ in made]
        joined = "".join("\n" if kind == "name" else part for kind, part in events if kind != "text")
        assert [json.loads(part) for part in joined.split("\n")[1:]] == [arguments for _, arguments in made]


def test_templates_say_how_calls_are_written() -> None:
    xml = '{% if tools %}<tool_call><function=x>"arguments"</function></tool_call>{% endif %}'
    formats = [calls_of(ChatTemplate(source, "t")) for source in (KNOWS_TOOLS, LLAMA, xml, TEMPLATE)]
    assert formats == [TAGS, BARE, None, None]


def test_results_of_tools_are_part_of_the_conversation(models: dict[str, Path]) -> None:
    """As the model's template writes them, or in words."""
    call = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"city": "Oslo", "days": 1}}}
    messages: Any = [
        {"role": "system", "content": "Short."}, {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "no", "tool_call_id": "c1"}, {"role": "tool", "content": "yes"},
    ]  # fmt: skip
    texts = {}
    for name, path in models.items():
        model = Served(Artifact.open(path), SessionOptions(threads=1), rows=1, queue=1)
        texts[name] = model.tokenizer.decode(model.prompt_of(model.rendered(messages, TOOLS)))
        model.engine.close()
    written = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo", "days": 1}}\n</tool_call>'
    assert texts["tags"].startswith("tool weather\ntool clock\nsystem: Short.user: Rain?assistant: " + written)
    assert texts["tags"].endswith("tool: notool: yesassistant:")
    assert texts["words"].startswith("system: Short.\n\nYou can call these functions:\n")
    assert '{"name": "weather", "description": "of a city", "parameters": ' in texts["words"]
    end = (
        f"assistant: {written}\nuser: <tool_response>no</tool_response>\n<tool_response>yes</tool_response>\nassistant:"
    )
    assert texts["words"].endswith(end)


def test_a_conversation_with_calls_is_answered(client: TestClient) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12:00", "tool_call_id": "c1"},
    ]
    for model in ("words", "tags"):
        answer = chat(client, model=model, messages=messages, max_tokens=8)
        assert answer["status"] == 200, answer
    messages[1]["tool_calls"] = [call | {"function": {"name": "clock", "arguments": "{"}}]
    error = chat(client, messages=messages)["error"]
    assert (
        error["param"] == "messages[1].tool_calls[0].function.arguments" and "wanted a JSON object" in error["message"]
    )


def format_of(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (format_of({"type": "foo"}), "response_format: the JSON schema cannot be used at #: Invalid type: foo"),
        (format_of({"properties": {"a": {"not": {}}}}), "at #/properties/a: Unimplemented"),
        (format_of({"type": "string", "minLength": 10**8}), "bound its lengths"),
        ({"response_format": {"type": "xml"}}, "response_format.type is 'xml', wanted one of text"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema is missing"),
        ({"json_schema": 5}, "json_schema: the JSON schema is 5, wanted an object"),
        ({"grammar": "start: ("}, "grammar: the grammar"),
        ({"grammar": 'start: "a"', "json_schema": {}}, "leave one out"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0].type is 'retrieval', wanted function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "function.name is 'a b', wanted a name"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "two tools have the same name"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice is 'any', wanted one of none, auto, required"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "has no such function"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": TOOLS, "grammar": 'start: "a"'}, "does not go together with tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "foo"}}}]},
         "the parameters of f: the JSON schema cannot be used at #: Invalid type: foo"),
        ({"model": "bare", "tools": TOOLS, **format_of(CITY)}, "bare writes calls as JSON, so no other JSON"),
        ({"top_logprobs": 2}, "top_logprobs is 2, but logprobs is not true"),
        ({"functions": [{}]}, "'functions' is [{}], which is not supported"),
        ({"repeat_penalty": 1.3}, "'repeat_penalty' is 1.3, which is not supported"),
        ({"temprature": 1}, "'temprature' is 1, which is not supported"),
        ({"prompt": "a"}, "'prompt' is 'a', which is not supported"),
        ({"n": 17}, "n is 17, wanted at most 16"),
        ({"n": 0}, "n is 0, wanted a whole number"),
        ({"max_tokens": -2}, "max_tokens is -2, wanted"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "messages[0].role is 'robot', wanted one of system"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages[0].content is missing"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused(client: TestClient, body: dict[str, Any], says: str) -> None:
    answer = chat(client, **body)
    assert (answer["status"], answer["error"]["type"]) == (400, "invalid_request_error")
    assert says in answer["error"]["message"]


@pytest.mark.parametrize(
    "body", [{"x" * 300_000: 1}, {"n": ["x" * 300_000]}, {"response_format": {"type": "x" * 300_000}}]
)
def test_no_answer_repeats_a_long_request(client: TestClient, body: dict[str, Any]) -> None:
    answer = chat(client, **body)
    assert answer["status"] == 400 and len(json.dumps(answer)) < 5000


def test_fields_that_change_nothing_are_taken(client: TestClient) -> None:
    body = {"seed": -1, "top_k": -1, "user": "me", "metadata": {"a": "b"}, "repeat_penalty": 1.0, "max_tokens": 3}
    assert chat(client, **body)["status"] == 200
    whole = chat(client, max_tokens=-1)  # up to the end of the context
    assert whole["choices"][0]["finish_reason"] == "stop" or whole["usage"]["total_tokens"] == 257


def responses(client: TestClient, **body: Any) -> Any:
    answer = client.post("/v1/responses", json={"temperature": 0, **body})
    return answer.json() | {"status_code": answer.status_code}


def test_responses_are_those_of_chats(client: TestClient) -> None:
    text = {"input": [{"role": "user", "content": [{"type": "input_text", "text": "def "}]}], "max_output_tokens": 12}
    answer = responses(client, **text, store=False)
    (item,) = answer["output"]
    expected = chat(client, max_tokens=12)
    assert item["content"][0]["text"] == expected["choices"][0]["message"]["content"] and item["role"] == "assistant"
    assert answer["usage"]["output_tokens"] == expected["usage"]["completion_tokens"]
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    form = {"type": "json_schema", "name": "c", "schema": CITY, "strict": True}
    answer = responses(client, input="def ", instructions="Short.", text={"format": form}, max_output_tokens=40)
    jsonschema.validate(json.loads(answer["output"][0]["content"][0]["text"]), CITY)
    assert answer["status"] == "completed"
    refused = responses(client, input="a", previous_response_id="resp_1")
    assert refused["status_code"] == 400 and refused["error"]["param"] == "previous_response_id"


def test_streamed_responses(client: TestClient) -> None:
    """Deltas add up to what the last event has, which is what the answer without a stream has."""
    tool = {"type": "function", "name": "weather", "parameters": CITY}
    body = {"input": [
        {"role": "user", "content": "a"},
        {"type": "function_call", "call_id": "c", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "rain"},
    ], "tools": [tool], "temperature": 0, "parallel_tool_calls": False}  # fmt: skip
    for more in (
        {"tool_choice": {"type": "function", "name": "weather"}},
        {"tool_choice": "none", "max_output_tokens": 9},
    ):
        whole = responses(client, **body, **more)
        lines = client.post("/v1/responses", json={**body, **more, "stream": True}).text.strip().split("\n\n")
        events = [json.loads(line.split("\ndata: ")[1]) for line in lines]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert [line.split("\n")[0] for line in lines] == [f"event: {event['type']}" for event in events]
        (item,) = events[-1]["response"]["output"]
        deltas = "".join(event["delta"] for event in events if event["type"].endswith(".delta"))
        if "max_output_tokens" in more:
            assert deltas == item["content"][0]["text"] == whole["output"][0]["content"][0]["text"]
        else:
            assert deltas == item["arguments"] == whole["output"][0]["arguments"]
            jsonschema.validate(json.loads(deltas), CITY)
        assert events[-1]["type"] == f"response.{whole['status']}"


def test_tokens(client: TestClient) -> None:
    answer = client.post("/tokenize", json={"content": "def main("}).json()
    assert answer["count"] == len(answer["tokens"]) > 1
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"content": "def main("}
    messages = [{"role": "user", "content": "def "}]
    of_chat = client.post("/tokenize", json={"messages": messages, "tools": TOOLS}).json()
    assert of_chat["count"] == chat(client, tools=TOOLS, max_tokens=1)["usage"]["prompt_tokens"]
    for path, body, param in (("tokenize", {}, "content"), ("detokenize", {"tokens": [10**6]}, "tokens[0]")):
        assert client.post(f"/{path}", json=body).json()["error"]["param"] == param


def test_n_and_echo(client: TestClient) -> None:
    """Answers in the order of their prompts; greedy ones are equal, others have seeds of their own."""
    body = {"prompt": ["def a(", "class B"], "n": 3, "max_tokens": 8, "temperature": 0, "echo": True}
    choices = client.post("/v1/completions", json=body).json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    texts = [choice["text"] for choice in choices]
    assert len(set(texts[:3])) == len(set(texts[3:])) == 1 and texts[0].startswith("def a(")
    assert texts[3].startswith("class B")
    lines = client.post("/v1/completions", json=body | {"stream": True}).text.split("\n\n")[:-2]
    streamed = [""] * 6
    for line in lines:
        (choice,) = json.loads(line.removeprefix("data: "))["choices"]
        streamed[choice["index"]] += choice["text"]
    assert streamed == texts
    sampled = chat(client, n=4, temperature=2, seed=1, max_tokens=12)["choices"]
    assert len({choice["message"]["content"] for choice in sampled}) > 1
    refused = client.post("/v1/completions", json=body | {"logprobs": 1}).json()["error"]
    assert refused["param"] == "echo"
