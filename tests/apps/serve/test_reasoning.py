"""What a model thinks is no part of its content; requests and the command turn it on and off."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from diffbit.apps.serve.engine import Engine, Piece, Request
from diffbit.apps.serve.openai_requests import Served
from diffbit.apps.serve.server import Server
from diffbit.io.errors import DiffbitError
from diffbit.runtime import Artifact, SessionOptions
from diffbit.runtime.loops import PLAIN_TOKENS

from ...runtime.test_chat import SIMPLE, write_chat_model
from ...runtime.toy import byte_tokenizer, follows

ANSWER = "<think>\nThe user\ngreets.\n</think>\n\nHello!"
# qwen3's switch; gpt-oss's; a prompt that begins the thinking, as deepseek-r1's; and one of a model that does not think
SWITCHED = SIMPLE + "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>{% endif %}"
TEMPLATES = {
    "switched": SWITCHED,
    "graded": SIMPLE + "{{ reasoning_effort }}<think>",
    "opened": SIMPLE + "<think>\n",
    "plain": SIMPLE,
    "kept": "{% for m in messages %}({{ m.reasoning_content }}){{ m.content }}{% endfor %}<think>",
}
USER = [{"role": "user", "content": "Hi"}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("thinking")
    return {name: write_chat_model(folder / name, follows(":bc", end=257), text) for name, text in TEMPLATES.items()}


@pytest.fixture(scope="module")
def client(models: dict[str, Path]) -> Iterator[TestClient]:
    served = [Served(Artifact.open(path), SessionOptions(threads=1), rows=1, queue=1) for path in models.values()]
    with TestClient(Server(served).application(), base_url="http://localhost") as client:
        yield client
    for model in served:
        model.engine.close()


def answers(monkeypatch: pytest.MonkeyPatch, text: str, size: int = 3, reason: Any = "eos") -> list[Request]:
    """Let every model answer so, in pieces. Returns the requests that it gets."""
    requests: list[Request] = []

    def submit(self: Engine, *given: Request) -> bool:
        requests.extend(given)
        for request in given:
            for at in range(0, len(text), size):
                request.on_piece(Piece(text[at : at + size]))
            request.on_piece(Piece("", finish_reason=reason))
        return True

    monkeypatch.setattr(Engine, "submit", submit)
    return requests


def decoded(tokens: Sequence[int]) -> str:
    return str(byte_tokenizer().decode(list(tokens)))


def chat(client: TestClient, model: str, **fields: Any) -> dict[str, Any]:
    answer = client.post("/v1/chat/completions", json={"model": model, "messages": USER, **fields})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


@pytest.mark.parametrize("size", [1, 3, 100])
@pytest.mark.parametrize(
    ("model", "text"), [("switched", ANSWER), ("opened", ANSWER.removeprefix("<think>\n")), ("plain", "Hello!")]
)
def test_thinking_has_its_own_field(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, model: str, text: str, size: int
) -> None:
    answers(monkeypatch, text, size)
    thoughts = {} if model == "plain" else {"reasoning_content": "The user\ngreets."}
    whole = chat(client, model)
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": "Hello!", **thoughts}
    assert whole["usage"]["completion_tokens_details"] == {"reasoning_tokens": len("".join(thoughts.values()))}
    lines = client.post("/v1/chat/completions", json={"model": model, "messages": USER, "stream": True}).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines.splitlines() if line.startswith("data: {")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    streamed = {name: "".join(delta.get(name, "") for delta in deltas) for name in ("content", *thoughts)}
    assert streamed == {"content": "Hello!", **thoughts}
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


def test_think_tags_are_text_if_the_model_does_not_think(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, ANSWER)
    assert chat(client, "plain")["choices"][0]["message"]["content"] == ANSWER
    completion = client.post("/v1/completions", json={"model": "switched", "prompt": "x"}).json()
    assert completion["choices"][0]["text"] == ANSWER


def test_json_is_content_even_where_the_prompt_begins_thinking(client: TestClient) -> None:
    message = chat(client, "opened", json_schema={"const": 1}, max_tokens=9)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "1"}


def test_thinking_before_a_call(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "function": {"name": "f"}}]
    for before, content in (("<think>Call f.</think>\n\nYes: ", "Yes: "), ("<think>Call f.", None)):
        answers(monkeypatch, before + call)
        choice = chat(client, "switched", tools=tools)["choices"][0]
        message = choice["message"]
        assert (message["reasoning_content"], message["content"]) == ("Call f.", content)
        assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
        assert choice["finish_reason"] == "tool_calls"


def test_responses_have_an_item_of_reasoning(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(monkeypatch, ANSWER)
    body = {"model": "switched", "input": "Hi", "reasoning": {"effort": "high"}}
    whole = client.post("/v1/responses", json=body).json()
    reasoning, message = whole["output"]
    assert reasoning["type"] == "reasoning" and reasoning["summary"] == []
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "The user\ngreets."}]
    assert message["content"][0]["text"] == "Hello!"
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == len("The user\ngreets.")
    lines = client.post("/v1/responses", json=body | {"stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    thought = [event["delta"] for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(thought) == "The user\ngreets."
    kinds = [event["type"] for event in events]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    again = {"model": "kept", "input": [*whole["output"], {"role": "user", "content": "And?"}]}
    asked = answers(monkeypatch, "x</think>y")
    assert client.post("/v1/responses", json=again).status_code == 200
    assert decoded(asked[0].prompt).startswith("(The user\ngreets.)Hello!()And?")


@pytest.mark.parametrize(
    ("model", "fields", "end"),
    [
        ("switched", {}, "a:"),
        ("switched", {"chat_template_kwargs": {"enable_thinking": False}}, "</think>"),
        ("switched", {"chat_template_kwargs": {"enable_thinking": True}}, "a:"),
        ("switched", {"reasoning_effort": "none"}, "</think>"),
        ("switched", {"reasoning_effort": "minimal"}, "</think>"),
        ("switched", {"reasoning_effort": "high"}, "a:"),
        ("switched", {"reasoning_effort": "high", "chat_template_kwargs": {"enable_thinking": False}}, "</think>"),
        ("graded", {"reasoning_effort": "low"}, "a:low<think>"),
        ("plain", {"chat_template_kwargs": {"enable_thinking": False}}, "a:"),
        ("plain", {"reasoning_effort": "none"}, "a:"),
    ],
)
def test_requests_switch_it(client: TestClient, model: str, fields: dict[str, Any], end: str) -> None:
    tokens = client.post("/tokenize", json={"model": model, "messages": USER, **fields}).json()["tokens"]
    assert decoded(tokens).endswith(end)


@pytest.mark.parametrize(
    ("model", "fields", "says"),
    [
        ("plain", {"reasoning_effort": "high"}, "reasoning_effort is 'high', but plain does not think"),
        ("opened", {"reasoning_effort": "none"}, "opened always thinks"),
        ("opened", {"chat_template_kwargs": {"enable_thinking": False}}, "'enable_thinking', which the chat template"),
        ("plain", {"chat_template_kwargs": {"enable_thinking": True}}, "does not read"),
        ("switched", {"chat_template_kwargs": {"thinking": True}}, "it reads: enable_thinking"),
        ("switched", {"chat_template_kwargs": {"messages": []}}, "messages, which the server sets"),
        ("switched", {"chat_template_kwargs": "off"}, "chat_template_kwargs is 'off', wanted"),
        ("switched", {"reasoning_effort": "very"}, "reasoning_effort is 'very', wanted one of none, minimal"),
        ("switched", {"reasoning_effort": 3}, "reasoning_effort is 3"),
        ("switched", {"allow_loops": "yes"}, "allow_loops is 'yes', wanted true or false"),
    ],
)
def test_bad_values_are_refused(client: TestClient, model: str, fields: dict[str, Any], says: str) -> None:
    answer = client.post("/v1/chat/completions", json={"model": model, "messages": USER, **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and says in error["message"] and error["param"] == next(iter(fields))


def test_the_server_has_a_default(models: dict[str, Path]) -> None:
    def served(name: str, think: bool) -> Served:
        return Served(Artifact.open(models[name]), SessionOptions(threads=1), rows=1, queue=1, think=think)

    model = served("switched", False)
    client = TestClient(Server([model]).application(), base_url="http://localhost")
    for fields, end in (({}, "</think>"), ({"chat_template_kwargs": {"enable_thinking": True}}, "a:")):
        tokens = client.post("/tokenize", json={"messages": USER, **fields}).json()["tokens"]
        assert decoded(tokens).endswith(end)
    model.engine.close()
    with pytest.raises(DiffbitError, match="no switch for thinking"):
        served("opened", False)


def test_a_text_in_a_loop_is_not_complete(tmp_path: Path) -> None:
    """OpenAI's finish_reason has no word for a loop; `length` says that a text did not come to its end."""
    folder = write_chat_model(tmp_path / "loop", follows("bcdefgh", places=900), context=900)
    model = Served(Artifact.open(folder), SessionOptions(threads=1), rows=1, queue=1)
    client = TestClient(Server([model]).application(), base_url="http://localhost")
    for fields, tokens in (({}, PLAIN_TOKENS), ({"allow_loops": True}, 500)):
        body = {"prompt": "b", "max_tokens": 500, **fields}
        answer = client.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == tokens and answer["choices"][0]["finish_reason"] == "length"
    model.engine.close()
