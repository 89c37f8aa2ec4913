"""One client cannot take the server from the others: what it may send, hold and ask for."""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from diffbit.apps.serve import server as server_module
from diffbit.apps.serve.command import _is_loopback
from diffbit.apps.serve.engine import Engine, Piece, Request
from diffbit.apps.serve.openai_requests import Refused, Served
from diffbit.apps.serve.server import Server, _json, _Whole, _with_comments
from diffbit.export import export_artifact
from diffbit.runtime import Artifact, Sampler, Session, SessionOptions, Tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
MULTIPLE = {"type": "integer", "multipleOf": 1000003}  # takes seconds to compile
LONG = "the cat sat on the mat. " * 160_000


@pytest.fixture(scope="module")
def artifact(trained: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("limits")
    (folder / "checkpoint").mkdir()
    for file in trained("softmax").iterdir():
        (folder / "checkpoint" / file.name).write_bytes(file.read_bytes())
    (folder / "checkpoint" / "chat_template.jinja").write_text(TEMPLATE)
    export_artifact(folder / "checkpoint", folder / "model")
    return folder / "model"


@pytest.fixture(scope="module")
def model(artifact: Path) -> Iterator[Served]:
    served = Served(Artifact.open(artifact), SessionOptions(threads=1), rows=4, queue=8)
    yield served
    served.engine.close()


@pytest.fixture
def client(model: Served) -> Iterator[TestClient]:
    with TestClient(Server([model]).application(), base_url="http://localhost") as http:
        yield http


def chat(client: TestClient, **body: Any) -> Any:
    question = [{"role": "user", "content": "def "}]
    answer = client.post("/v1/chat/completions", json={"messages": question, "temperature": 0, **body})
    return answer.json() | {"status": answer.status_code}


def test_a_prompt_is_counted_once(client: TestClient) -> None:
    one, three = (chat(client, n=n, max_tokens=2)["usage"] for n in (1, 3))
    assert three["prompt_tokens"] == one["prompt_tokens"] >= three["prompt_tokens_details"]["cached_tokens"]
    assert three["completion_tokens"] == 3 * one["completion_tokens"]
    body = {"prompt": ["def a(", "class"], "n": 2, "max_tokens": 1}
    texts = [{"content": text, "add_special": True} for text in ("def a(", "class")]
    alone = [client.post("/tokenize", json=text).json()["count"] for text in texts]
    assert client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens"] == sum(alone)


@pytest.mark.parametrize("logprobs", [False, True])
def test_the_last_chunk_says_nothing_else(client: TestClient, logprobs: bool) -> None:
    body = {"messages": [{"role": "user", "content": "def "}], "max_tokens": 5, "temperature": 0, "logprobs": logprobs}
    lines = client.post("/v1/chat/completions", json=body | {"stream": True}).text.split("\n\n")[:-2]
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    assert [chunk["finish_reason"] for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert chunks[-1]["delta"] == {}
    whole = client.post("/v1/chat/completions", json=body).json()["choices"][0]
    assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == whole["message"]["content"]
    if logprobs:
        streamed = [entry for chunk in chunks for entry in (chunk["logprobs"] or {}).get("content", [])]
        assert streamed == whole["logprobs"]["content"]


def test_a_silent_stream_has_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "COMMENT_SECONDS", 0.001)

    async def run() -> list[str]:
        heard, go_on = list[str](), asyncio.Event()

        async def events() -> AsyncIterator[str]:
            yield "data: 1\n\n"
            await go_on.wait()
            yield "data: 2\n\n"

        async for event in _with_comments(events()):
            heard.append(event)
            if heard.count(heard[-1]) == 3:
                go_on.set()
        return heard

    heard = asyncio.run(run())
    comments = [event for event in heard if event.startswith(":")]
    assert [event for event in heard if event not in comments] == ["data: 1\n\n", "data: 2\n\n"]
    assert len(comments) >= 3 and all(event.endswith("\n\n") for event in comments)


def test_a_text_that_is_too_long_is_not_encoded(
    client: TestClient, model: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model.tokenizer, "encode", lambda *_, **__: pytest.fail("it is encoded"))
    for path, body in (
        ("completions", {"prompt": LONG}),
        ("chat/completions", {"messages": [{"role": "user", "content": LONG}]}),
    ):
        answer = client.post(f"/v1/{path}", json=body)
        assert answer.status_code == 400 and "tokens, and there is room for 256" in answer.json()["error"]["message"]


def test_what_answers_hold_is_bounded() -> None:
    """An answer is handed over in parts, and counts until the last; a single one may be larger than the limit."""
    server = Server([], most_leaving=100_000)
    sent: list[bytes] = []

    async def run() -> None:
        taken = asyncio.Event()

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))
            await taken.wait()

        async def receive() -> Any:
            raise AssertionError

        answer = await _Whole.of(server, {"tokens": list(range(50_000)), "count": 50_000})
        first = asyncio.ensure_future(answer({"type": "http"}, receive, send))
        await asyncio.sleep(0)
        with pytest.raises(Refused) as error:
            await _Whole(server, b"[]")({"type": "http"}, receive, send)
        assert error.value.status == 503
        taken.set()
        await first
        assert json.loads(b"".join(sent)) == {"tokens": list(range(50_000)), "count": 50_000}
        assert max(map(len, sent)) <= server_module.PART and server._leaving == 0
        server._trimming = None

    asyncio.run(run())


def test_json_in_pieces_is_json() -> None:
    for content in ({}, {"a": []}, {"a": list(range(40_000)), "b": [{"c": ["é", None]}] * 3, "d": "x" * 20_000}):
        assert json.loads(_json(content)) == content  # type: ignore[arg-type]


TOOL = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"not": {"type": "null"}}}, "required": ["a"],
        "additionalProperties": False}  # fmt: skip


def tool(schema: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}]}


@pytest.mark.parametrize(
    "schema",
    [TOOL, {"type": "object", "properties": {"a": {"const": 2**53 + 1}}}, {"$ref": "https://a.example/b"}],
)
def test_tools_that_cannot_be_held(client: TestClient, schema: Any) -> None:
    """They fail a request only where a call is required."""
    assert chat(client, **tool(schema), tool_choice="auto", max_tokens=5)["status"] == 200
    refused = chat(client, **tool(schema), tool_choice="required")
    assert refused["status"] == 400 and "the parameters of f: the JSON schema cannot" in refused["error"]["message"]


def test_what_can_be_held_of_a_tool_is(model: Served) -> None:
    """With `auto`, the keywords beside the one that is left out."""
    from diffbit.apps.serve.tools import TAGS, Function, grammar

    rules = grammar(TAGS, [Function("f", TOOL)], free=True, several=False, lenient=True)
    constraint = model.grammars.grammar(rules, json_after=TAGS.begin)

    def fits(text: str) -> bool:
        one = constraint.copy()
        for token in model.grammars.vocabulary.greedy_tokenize(f"{TAGS.begin}{TAGS.head('f')}{text}"):
            if token not in one.allowed(model.artifact.vocab_size):
                return False
            one.accept(token)
        return True

    assert fits('{"a": 1}}') and fits('{"a": 1, "b": null}')
    assert not fits('{"a": "x"') and not fits('{"c": 1') and not fits('{"a": 1, "a"')


def test_schemas_that_wait_are_bounded(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "MOST_FORMS", 0)
    refused = client.post("/v1/completions", json={"prompt": "a", "json_schema": {}})
    assert (refused.status_code, refused.json()["error"]["type"]) == (429, "rate_limit_error")
    assert client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}).status_code == 200


def test_a_slow_grammar_rests_alone(artifact: Path) -> None:
    """Its row waits for what may come next, and others go on; then it goes on with the same tokens."""
    engine = Engine(Session(artifact, SessionOptions(threads=1)), Tokenizer(artifact / "tokenizer.json"), rows=2)
    pieces = {name: queue.SimpleQueue[Piece]() for name in "ab"}
    go_on, asked = threading.Event(), threading.Event()

    def is_ready() -> bool:
        asked.set()
        return go_on.is_set()

    def finish(name: str) -> str:
        text, last = "", Piece("")
        while last.finish_reason is None:
            last = pieces[name].get(timeout=60)
            assert last.error is None
            text += last.text
        return text

    assert engine.submit(Request([5, 6], pieces["a"].put, Sampler(), 20, is_ready=is_ready)) and asked.wait(60)
    assert engine.submit(Request([5, 6], pieces["b"].put, Sampler(), 20))
    other = finish("b")
    assert pieces["a"].empty() and engine.running == 1
    go_on.set()
    assert finish("a") == other
    engine.close()


def test_hosts_that_others_reach() -> None:
    assert [_is_loopback(host) for host in ("127.0.0.1", "::1", "localhost")] == [True] * 3
    assert not any(map(_is_loopback, ("0.0.0.0", "::", "192.168.1.5", "box.lan")))


@contextlib.contextmanager
def served(artifact: Path, *options: str) -> Iterator[tuple[str, subprocess.Popen[str], str]]:
    """The address of a server in a process of its own, and what it remarked before it listened."""
    command = [sys.executable, "-m", "diffbit", "serve", str(artifact), "--port", "0", "--threads", "1", "--json"]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        url = json.loads(process.stdout.readline())["url"]
        lines = []
        while "listening" not in "".join(lines[-1:]):
            lines.append(process.stderr.readline())
        try:
            yield url, process, "".join(lines)
        finally:
            process.terminate()
            process.wait(timeout=60)


def ask(url: str, path: str, body: Any = None, timeout: float = 120) -> tuple[int, float]:
    """Status and seconds; 0 if the client left."""
    data = None if body is None else json.dumps(body).encode()
    request, begin = urllib.request.Request(f"{url}{path}", data, {"Content-Type": "application/json"}), time.time()
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            answer.read()
            return answer.status, time.time() - begin
    except urllib.error.HTTPError as error:
        return error.code, time.time() - begin
    except TimeoutError:
        return 0, time.time() - begin


def resident(process: subprocess.Popen[str]) -> int:
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1])


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc")
def test_hostile_requests_take_nothing_from_others(artifact: Path) -> None:
    """Several at once: slow schemas, one that takes memory, long texts. Another client's completion takes at most a
    second more than alone, and /health half a second; afterwards the memory is there again."""
    completion = {"prompt": "def ", "max_tokens": 4, "temperature": 0}
    text = LONG[: len(LONG) // 4]
    memory = {"allOf": [{"type": "number", "multipleOf": 1e-07}, {"type": "number", "multipleOf": 0.0003}]}
    with served(artifact, "--host", "0.0.0.0") as (url, process, remarks), ThreadPoolExecutor(12) as threads:
        url = url.replace("0.0.0.0", "127.0.0.1")
        assert "there is no key, so anybody who reaches 0.0.0.0:" in remarks
        health = url.removesuffix("/v1")
        assert ask(health, "/tokenize", {"content": text})[0] == 200  # what all requests use is loaded
        assert ask(url, "/completions", completion)[0] == 200
        usual = max(ask(url, "/completions", completion)[1] for _ in range(5))
        time.sleep(2 * server_module.TRIM_SECONDS)  # until the memory is given back
        before = resident(process)
        for kind in ("schemas", "texts", "clients that leave"):
            if kind == "texts":
                hostile = [threads.submit(ask, health, "/tokenize", {"content": text}, 300) for _ in range(4)]
            else:
                left = 300 if kind == "schemas" else 0.5
                schemas = [MULTIPLE | {"multipleOf": 1000003 + index + (left < 1)} for index in range(3)] + [memory]
                hostile = [
                    threads.submit(ask, url, "/completions", completion | {"json_schema": schema}, left)
                    for schema in schemas
                ]
            worst = healthy = 0.0
            while not all(one.done() for one in hostile):
                status, seconds = ask(url, "/completions", completion)
                worst, healthy = max(worst, seconds), max(healthy, ask(health, "/health")[1])
                assert status == 200
            statuses = {one.result()[0] for one in hostile}
            assert statuses <= {"texts": {200}, "schemas": {400}, "clients that leave": {0, 400}}[kind], statuses
            assert worst < usual + 1 and healthy < 0.5, (kind, usual, worst, healthy)
        time.sleep(3 * server_module.TRIM_SECONDS)
        assert resident(process) < 1.5 * before
