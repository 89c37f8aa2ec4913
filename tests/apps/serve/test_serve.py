"""Rows of a batch against sessions of their own, and the server through OpenAI's client."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import queue
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import openai
import pytest
import uvicorn
from starlette.testclient import TestClient
from transformers.convert_slow_tokenizer import bytes_to_unicode

from diffbit.apps.serve.batch import NoRoom, Rows
from diffbit.apps.serve.connection import Connection
from diffbit.apps.serve.engine import Counts, Engine, Piece, Request
from diffbit.apps.serve.openai_requests import Refused, Served
from diffbit.apps.serve.server import Server, _metrics, _refuse
from diffbit.cli.app import main
from diffbit.export import export_artifact
from diffbit.formats import parse_format
from diffbit.io.errors import DiffbitError
from diffbit.quantize import AttentionScheme, Scheme, quantize_checkpoint
from diffbit.runtime import Artifact, Sampler, Session, SessionOptions, Tokenizer, generate

STEP = 0.03  # seconds, where an answer must not end before the test does: other tests may hold the processors
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def artifacts(trained: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """DIFF version 1 in float with a chat template; all variants in int4, the Transformer also with caches of 8 and 4
    bits."""
    folder = tmp_path_factory.mktemp("serve")
    shutil.copytree(trained("diff_v1"), folder / "chat")
    (folder / "chat" / "chat_template.jinja").write_text(TEMPLATE)
    export_artifact(folder / "chat", folder / "diff")
    for kv in ("int8", "int4"):
        scheme = Scheme(weights=parse_format("int4_g32"), attention=AttentionScheme(keys=kv, values=kv))
        quantize_checkpoint(trained("softmax"), folder / kv, scheme)
        export_artifact(folder / kv, folder / f"plain-{kv}")
    for variant in ("diff_v1", "diff_v2", "softmax"):
        quantize_checkpoint(trained(variant), folder / variant, Scheme(weights=parse_format("int4_g32")))
        export_artifact(folder / variant, folder / f"{variant}-int4")
    names = ("diff", "diff_v1-int4", "diff_v2-int4", "softmax-int4", "plain-int8", "plain-int4")
    return {name: folder / name for name in names}


@pytest.mark.parametrize("name", ["diff_v1-int4", "diff_v2-int4", "softmax-int4", "plain-int8"])
def test_an_answer_does_not_depend_on_others(artifacts: dict[str, Path], name: str) -> None:
    """Each text begins while others are written, with holes where they go on; its logits are those of it alone."""
    random = np.random.default_rng(5)
    rows, alone = Rows.of(Session(artifacts[name]), 4), Session(artifacts[name])
    for first in range(3, 15, 4):  # all rows are taken, and free again
        texts: dict[int, tuple[list[int], list[Any]]] = {}
        for token in range(first, first + 4):
            prompt = [token, *random.integers(3, 1000, random.integers(1, 60)).tolist()]
            row, cached, logits = rows.begin(prompt, lambda: True)
            assert cached == 0
            texts[row] = prompt, [logits]
            for _ in range(random.integers(1, 20)):
                for row, logits in rows.step({row: int(got[-1].argmax()) for row, (_, got) in texts.items()}).items():
                    texts[row][1].append(logits)
        for row, (prompt, got) in texts.items():
            alone.reset()
            np.testing.assert_array_equal(got[0], alone.prefill([prompt])[0])
            for before, after in itertools.pairwise(got):
                np.testing.assert_array_equal(alone.step([[int(before.argmax())]])[0], after)
            rows.end(row)


@pytest.mark.parametrize("name", ["diff", "diff_v2-int4", "plain-int8", "plain-int4"])
def test_reproducible_logits_do_not_depend_on_the_cache(artifacts: dict[str, Path], name: str) -> None:
    """A conversation, each of whose prompts comes twice: with the option all logits are, to the bit, those after an
    empty cache; without it, not all (of int4 caches they may be: it depends on the processor's kernels)."""
    count = 1 if name == "diff" else 2  # several rows of float weights are summed in another order

    def different(reproducible: bool) -> tuple[int, int]:
        random = np.random.default_rng(7)
        session, alone = Session(artifacts[name], reproducible=reproducible), Session(artifacts[name])
        session.chunk = alone.chunk = 32
        rows, prompt = Rows.of(session, count), random.integers(3, 1000, 50).tolist()
        differences = cached = 0
        for turn in range(6):
            row, kept, got = rows.begin(prompt, lambda: True)
            alone.reset()
            wanted, answer = alone.prefill([prompt])[0], list[int]()
            for _ in range(15):
                assert got is not None
                differences += not np.array_equal(got, wanted)
                answer.append(int(wanted.argmax()))
                got, wanted = rows.step({row: answer[-1]})[row], alone.step([answer[-1:]])[0]
            rows.end(row)
            cached += kept
            if turn % 2:
                prompt += [*answer, *random.integers(3, 1000, 9).tolist()]
        return differences, cached

    differences, cached = different(True)
    assert differences == 0 and (cached > 0 or name == "plain-int4")  # which is cut in its residual window only
    assert name == "plain-int4" or different(False)[0] > 0


@pytest.mark.parametrize("name", ["diff", "plain-int8", "plain-int4"])
def test_rows_are_independent(artifacts: dict[str, Path], name: str) -> None:
    """Texts that come and go in any order get the logits that each gets alone; beginnings are taken over."""
    random = np.random.default_rng(3)
    session, alone = Session(artifacts[name]), Session(artifacts[name])
    rows = Rows.of(session, 3)
    assert rows.count == 3
    beginning = random.integers(3, 1000, 40).tolist()
    prompts = [beginning[: random.integers(1, 41)] + random.integers(3, 1000, random.integers(1, 120)).tolist()
               for _ in range(9)]  # fmt: skip
    texts: dict[int, tuple[list[int], list[Any], int]] = {}
    cached = steps = 0
    # sums end in other bits where others' tokens lie between; int8 activations may round to other codes then
    error: dict[str, Any] = {"rtol": 0, "atol": 2e-4 if name == "diff" else 5e-2}

    def check(row: int) -> None:
        prompt, got, _ = texts.pop(row)
        alone.reset()
        np.testing.assert_allclose(got[0][1], alone.prefill([prompt])[0], **error)
        for token, logits in got[1:]:
            np.testing.assert_allclose(logits, alone.step([[token]])[0], **error)
        rows.end(row)

    while prompts or texts:
        while prompts and rows.free and (not texts or random.random() < 0.3):
            prompt = prompts.pop()
            row, kept, logits = rows.begin(prompt, lambda: True)
            texts[row] = (prompt, [(0, logits)], int(random.integers(1, 150)))
            cached += kept
        for row in list(texts):
            if not texts[row][2] or not rows.room(row):
                check(row)
            else:
                texts[row] = (*texts[row][:2], texts[row][2] - 1)
        if texts:
            tokens = {row: int(random.integers(3, 1000)) for row in texts}
            steps += 1
            for row, logits in rows.step(tokens).items():
                texts[row][1].append((tokens[row], logits))
    # beginnings were taken over, and the cache was moved together on the way
    assert rows.count == 1 or (cached > 100 and steps > session.capacity)


def test_a_prompt_can_be_given_up(artifacts: dict[str, Path]) -> None:
    rows = Rows.of(Session(artifacts["diff"]), 2)
    assert rows.begin([5] * 100, lambda: False)[2] is None
    assert rows.free == 2
    _, cached, logits = rows.begin([5] * 100, lambda: True)
    assert cached == 0 and logits is not None and rows.free == 1


@pytest.mark.parametrize("tokens", [None, 80])
def test_engine_answers_as_generate_does(
    artifacts: dict[str, Path], tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled answers with stop strings and limits, ten at a time in three rows; with memory for so many tokens, texts
    wait, and lose their rows."""
    session, tokenizer = Session(artifacts["diff"]), Tokenizer(artifacts["diff"] / "tokenizer.json")
    memory = None if tokens is None else session.artifact.cache.nbytes(tokens)
    engine, most = Engine(Session(artifacts["diff"]), tokenizer, rows=3, queue=7, memory=memory), list[int]()
    step = engine.rows.step
    monkeypatch.setattr(engine.rows, "step", lambda tokens: [step(tokens), most.append(engine.cache_bytes)][0])
    prompts = [tokenizer.encode(f"def f{i}(self, {'x' * i}") for i in range(10)]
    pieces: list[list[Piece]] = [[] for _ in prompts]
    done = threading.Semaphore(0)

    def sampler(index: int) -> Sampler:
        return Sampler(0.7, top_k=20, seed=index)

    def take(index: int) -> Callable[[Piece], None]:
        def on_piece(piece: Piece) -> None:
            pieces[index].append(piece)
            if piece.finish_reason or piece.error:
                done.release()

        return on_piece

    for index, prompt in enumerate(prompts):
        request = Request(prompt, take(index), sampler(index), 5 * index + 1, stop=["return"], end_tokens=())
        assert engine.submit(request)
    for _ in prompts:
        assert done.acquire(timeout=60)
    engine.close()
    assert memory is None or (max(most) <= memory and engine.counts.preempted > 0)
    assert engine.counts.requests == 10 and engine.counts.prompt_tokens == sum(map(len, prompts))
    for index, prompt in enumerate(prompts):
        expected = generate(
            session, prompt, max_tokens=5 * index + 1, sampler=sampler(index), stop=["return"], end_tokens=()
        ).result()
        assert "".join(piece.text for piece in pieces[index]) == expected.text
        assert pieces[index][-1].finish_reason == expected.finish_reason
    assert not engine.submit(Request(prompts[0], take(0), sampler(0), 1))  # closed
    with pytest.raises(
        DiffbitError, match=f"{'context holds' if tokens is None else 'caches has room for'} {tokens or 256}"
    ):
        engine.submit(Request([5] * 256, take(0), sampler(0), 1))


def test_row_is_freed_if_its_text_cannot_be_computed_again(
    artifacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(
        Session(artifacts["diff"], reproducible=True), Tokenizer(artifacts["diff"] / "tokenizer.json"), rows=2
    )
    engine.close()
    request = Request([5] * 9, lambda piece: None, Sampler(), 4)
    answer: Any = SimpleNamespace(request=request, token_ids=[5] * 9 + [6, 7])
    again = engine._compute(answer)
    assert engine.rows.free == 1 and engine.rows.room(again[0]) == engine.rows.capacity - 11
    engine.rows.end(again[0])

    def fails(tokens: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(engine.rows, "step", fails)
    with pytest.raises(RuntimeError, match="no memory"):
        engine._compute(answer)
    assert engine.rows.free == 2


def test_a_limit_of_memory_that_cannot_be_kept(artifacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    session = Session(artifacts["diff"])
    with pytest.raises(DiffbitError, match="--cache-memory has room for 63 tokens, wanted at least 64; a token takes"):
        Rows.of(session, 2, memory=session.artifact.cache.nbytes(63))
    with pytest.raises(DiffbitError, match="--cache-memory needs a cache whose rows have lengths of their own"):
        Rows.of(Session(artifacts["diff"], native=False), 2, memory=1 << 30)
    rows = Rows.of(session, 2, memory=session.artifact.cache.nbytes(100))
    for prompt in ([5] * 99, [6] * 99, [5] * 60 + [6] * 39):  # each takes the room of the one before
        row, _, logits = rows.begin(prompt, lambda: True)
        assert logits is not None and rows.room(row) == 1
        with pytest.raises(NoRoom):
            rows.begin([7] * 30, lambda: True)
        rows.end(row)


def test_a_step_that_fails_leaves_no_token(artifacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys and values are not there, so the next text that begins so must compute it."""
    rows, alone = Rows.of(Session(artifacts["diff"]), 2), Session(artifacts["diff"])
    row, _, _ = rows.begin([5, 6, 7], lambda: True)
    with monkeypatch.context() as patched, pytest.raises(ZeroDivisionError):
        patched.setattr(rows._caches, "run", lambda *_: 1 / 0)
        rows.step({row: 9})
    rows.end(row)
    _, cached, logits = rows.begin([5, 6, 7, 9, 11], lambda: True)
    assert cached == 3
    np.testing.assert_allclose(logits, alone.prefill([[5, 6, 7, 9, 11]])[0], rtol=0, atol=2e-4)


def slowed(engine: Engine) -> Engine:
    """Its answers of 200 tokens take seconds."""
    step = engine.rows.step
    engine.rows.step = lambda tokens: (time.sleep(STEP), step(tokens))[1]  # type: ignore[method-assign]
    return engine


def test_answers_fail_and_are_cancelled_alone(artifacts: dict[str, Path]) -> None:
    engine = Engine(Session(artifacts["diff"]), Tokenizer(artifacts["diff"] / "tokenizer.json"), rows=2, queue=1)
    slowed(engine)
    pieces: dict[str, queue.SimpleQueue[Piece]] = {name: queue.SimpleQueue() for name in "abcd"}

    def request(name: str, prompt: list[int], sampler: Callable[..., int], count: int) -> Request:
        return Request(prompt, pieces[name].put, sampler, count, top_logprobs=0)

    def overflows(logits: object, token_ids: object) -> int:
        raise OverflowError("too large")

    long = request("a", [5], Sampler(), 200)
    with pytest.raises(DiffbitError, match="outside the vocabulary"):
        engine.submit(request("b", [5], Sampler(), 200), request("c", [10**6], Sampler(), 200))
    assert engine.submit(long) and pieces["a"].get(timeout=20).error is None
    assert engine.counts.requests == 1  # nothing of the one that was refused
    assert engine.submit(request("b", [6], overflows, 5))
    assert pieces["b"].get(timeout=20).error == "too large"
    other, waits = request("b", [7], Sampler(), 200), request("c", [8], Sampler(), 200)
    assert engine.submit(other) and pieces["b"].get(timeout=20).error is None
    assert engine.submit(waits) and not engine.submit(request("d", [9], Sampler(), 1))
    waits.cancel()  # it takes no place in the queue any more
    deadline = time.monotonic() + 20
    while engine.waiting and time.monotonic() < deadline:
        time.sleep(0.001)
    last = request("d", [9], Sampler(), 1)
    assert engine.submit(last)
    long.cancel()
    assert pieces["d"].get(timeout=20).finish_reason == "length"
    other.cancel()
    engine.close()
    assert pieces["c"].empty() and engine.counts.cancelled == 3


def test_a_prompt_that_is_being_computed_runs(artifacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """A long one takes seconds, in which it is counted, and its row is nobody else's."""
    engine = Engine(Session(artifacts["diff"]), Tokenizer(artifacts["diff"] / "tokenizer.json"), rows=1, queue=0)
    begin, begun, go_on = engine.rows.begin, threading.Event(), threading.Event()
    monkeypatch.setattr(engine.rows, "begin", lambda *arguments: (begun.set(), go_on.wait(60), begin(*arguments))[2])
    pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
    assert engine.submit(Request([5], pieces.put, Sampler(), 1)) and begun.wait(60)
    assert (engine.running, engine.waiting) == (1, 0)
    assert not engine.submit(Request([6], pieces.put, Sampler(), 1))
    go_on.set()
    assert pieces.get(timeout=60).finish_reason == "length"
    engine.close()
    assert engine.running == 0


def test_a_stream_whose_client_has_gone_is_cancelled(
    artifacts: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first event, which is no token yet, is being sent."""
    model = Served(Artifact.open(artifacts["diff"]), SessionOptions(threads=1), rows=1, queue=1)
    slowed(model.engine)
    asked: list[Request] = []
    submit = model.engine.submit
    monkeypatch.setattr(model.engine, "submit", lambda *requests: asked.extend(requests) or submit(*requests))
    body = {"messages": [{"role": "user", "content": "def "}], "max_tokens": 200, "stream": True}
    messages = iter([{"type": "http.request", "body": json.dumps(body).encode()}])

    async def receive() -> Any:
        return next(messages, {"type": "http.disconnect"})

    async def send(message: Any) -> None:
        await asyncio.sleep(0.01)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}
    asyncio.run(Server([model]).application()(scope, receive, send))
    assert [request.cancelled for request in asked] == [True]
    model.engine.close()
    assert asked[0].completion_tokens < 200


def test_numbers_and_odd_texts() -> None:
    """Counters have all their digits; half a surrogate pair, which a message may quote, does not end in status 500."""
    engine = SimpleNamespace(counts=Counts(prompt_tokens=12_345_678), running=0, waiting=0, cache_bytes=5)
    model: Any = SimpleNamespace(name="m", engine=engine)
    assert 'diffbit_prompt_tokens_total{model="m"} 12345678\n' in _metrics([model])
    assert 'diffbit_cache_bytes{model="m"} 5\n' in _metrics([model])
    refused: Any = asyncio.run(_refuse(None, Refused(400, "no role '\ud800'")))  # type: ignore[arg-type]
    assert json.loads(refused.body)["error"]["message"] == "no role '?'"


def refused(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as stopped:
        main(["serve", "nano", "--quiet", *arguments])
    assert stopped.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_an_empty_key_is_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """As an option, and in the environment, where a variable may be empty by mistake."""
    sentence = "error: the API key is empty, so that every request would be served; set one, or unset DIFFBIT_API_KEY"
    assert refused(["--api-key", ""], capsys) == sentence
    for empty in ("", "\n"):
        monkeypatch.setenv("DIFFBIT_API_KEY", empty)
        assert refused([], capsys) == sentence


def test_where_it_cannot_listen(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        message = refused(["--port", str(port)], capsys)
        assert f"cannot listen on 127.0.0.1:{port} (Address already in use)" in message and "another --port" in message
    assert "cannot listen on 203.0.113.1:8080 (" in refused(["--host", "203.0.113.1"], capsys)  # no machine's


@contextlib.contextmanager
def served(*paths: Path, **options: Any) -> Iterator[str]:
    """A server in a thread -> its address."""
    api_key, rows, slow = options.pop("api_key", None), options.pop("rows", 2), options.pop("slow", False)
    models = [
        Served(Artifact.open(path), SessionOptions(threads=1), rows=rows, queue=options.get("queue", 8))
        for path in paths
    ]
    for model in models if slow else ():
        slowed(model.engine)
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(Server(models, api_key, most_bytes=5000).application(), log_level="error", http=Connection)
    runner = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(runner.serve([listening])))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        runner.should_exit = True
        thread.join()
        for model in models:
            model.engine.close()


@pytest.fixture(scope="module")
def address(artifacts: dict[str, Path]) -> Iterator[str]:
    with served(artifacts["diff"], artifacts["plain-int8"]) as url:
        yield url


def client(address: str, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)


def post(address: str, path: str, body: bytes | None, **headers: str) -> tuple[int, dict[str, Any]]:
    headers = {"Content-Type": "application/json"} | {name.replace("_", "-"): text for name, text in headers.items()}
    try:
        with urllib.request.urlopen(urllib.request.Request(address + path, body, headers)) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def test_chat_answers_as_generate_does(address: str, artifacts: dict[str, Path]) -> None:
    """Whole and streamed answers are those of the Python API; the next turn computes its new tokens only."""
    api = client(address)
    assert [model.id for model in api.models.list()] == ["diff", "plain-int8"]
    assert api.models.retrieve("diff").owned_by == "diffbit"
    messages: list[Any] = [{"role": "system", "content": "import os"}, {"role": "user", "content": "def main("}]
    asked: dict[str, Any] = {"model": "diff", "messages": messages, "temperature": 0, "max_tokens": 30}
    whole = api.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    choice, usage = whole.choices[0], whole.usage
    session, tokenizer = Session(artifacts["diff"]), Tokenizer(artifacts["diff"] / "tokenizer.json")
    prompt = tokenizer.encode("system: import os\nuser: def main(\nassistant:", add_special_tokens=False)
    expected = generate(session, prompt, max_tokens=30, temperature=0).result()
    assert choice.message.content == expected.text and choice.finish_reason == "length"
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 30)
    assert choice.logprobs is not None and choice.logprobs.content is not None
    logprobs = choice.logprobs.content
    logits = Session(artifacts["diff"]).prefill([[*prompt, *expected.token_ids]], all_positions=True)[0].astype(float)
    values = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for place, (token, entry) in enumerate(zip(expected.token_ids, logprobs, strict=True), len(prompt) - 1):
        assert entry.logprob == pytest.approx(values[place, token], abs=1e-3)
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(np.sort(values[place])[:-3:-1], abs=1e-3)
    chunks = list(api.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected.text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 30
    messages += [{"role": "assistant", "content": expected.text}, {"role": "user", "content": [
        {"type": "text", "text": "class "}, {"type": "text", "text": "A"}]}]  # fmt: skip
    details = api.chat.completions.create(**asked).usage.prompt_tokens_details  # type: ignore[union-attr]
    assert details is not None and details.cached_tokens is not None and details.cached_tokens >= len(prompt) - 1


def test_logprobs_have_the_bytes_of_tokens(address: str, artifacts: dict[str, Path]) -> None:
    """A token may be a part of a character; no two are shown as the same text."""
    tokenizer = Tokenizer(artifacts["diff"] / "tokenizer.json")
    biases = {str(token): 30 for token in range(1024) if "\ufffd" in tokenizer.decode([token])}
    api, asked = client(address), {"model": "diff", "max_tokens": 8, "temperature": 2.0, "seed": 1}
    pairs = api.completions.create(**asked, prompt="é", logprobs=20).choices[0].logprobs  # type: ignore[call-overload]
    assert [len(top) for top in pairs.top_logprobs] == [20] * len(pairs.tokens)
    message: Any = {"messages": [{"role": "user", "content": "é"}], "logprobs": True, "top_logprobs": 20}
    entries = api.chat.completions.create(**asked, **message, logit_bias=biases)
    shown = [entry for place in entries.choices[0].logprobs.content for entry in (place, *place.top_logprobs)]
    parts = [entry for entry in shown if entry.token.startswith("bytes:")]
    assert parts and len(parts) < len(shown)
    of_bytes = {character: byte for byte, character in bytes_to_unicode().items()}
    vocabulary = [text for text in tokenizer._tokenizer.get_vocab() if set(text) <= set(of_bytes)]
    known = {bytes(of_bytes[character] for character in text) for text in vocabulary} | {b"<|endoftext|>"}
    for entry in shown:
        data = bytes(entry.bytes)
        assert data in known
        written = re.findall(r"x(..)", entry.token)
        assert entry.token == data.decode() if entry not in parts else bytes.fromhex("".join(written)) == data


def test_completions_answer_as_generate_does(address: str, artifacts: dict[str, Path]) -> None:
    """Several prompts, as text and as tokens; stop strings end an answer and are not in it; curl reads the stream."""
    api = client(address)
    session, tokenizer = Session(artifacts["plain-int8"]), Tokenizer(artifacts["diff"] / "tokenizer.json")
    texts = ["def add(", "class Stack:\n    def"]
    alone = [generate(session, text, max_tokens=40, stop=["self"], temperature=0).result() for text in texts]
    assert any(one.finish_reason == "stop" for one in alone)
    for prompt in (texts, [tokenizer.encode(text) for text in texts]):
        completion = api.completions.create(
            model="plain-int8", prompt=prompt, max_tokens=40, temperature=0, stop="self"
        )
        assert [choice.text for choice in completion.choices] == [one.text for one in alone]
        reasons = [{"eos": "stop"}.get(str(one.finish_reason), one.finish_reason) for one in alone]
        assert [choice.finish_reason for choice in completion.choices] == reasons
    sampled = [api.completions.create(model="diff", prompt="import ", seed=7, temperature=1.5).choices[0].text
               for _ in range(2)]  # fmt: skip
    assert sampled[0] == sampled[1]
    options: dict[str, Any] = {"frequency_penalty": 1.5, "presence_penalty": 0.5, "logit_bias": {5: 2.0}}
    sampler = Sampler(**options, min_p=0.1)
    expected = generate(Session(artifacts["diff"]), "import ", max_tokens=12, sampler=sampler).result().text
    others = {"logit_bias": {"5": 2.0}, "extra_body": {"min_p": 0.1}}
    completion = api.completions.create(
        model="diff", prompt="import ", max_tokens=12, temperature=0, **options | others
    )
    assert completion.choices[0].text == expected
    body = json.dumps({"model": "diff", "prompt": "def ", "stream": True, "max_tokens": 5, "temperature": 0})
    curl = ["curl", "-sN", f"{address}/v1/completions", "--json", body]
    lines = subprocess.run(curl, capture_output=True, text=True, check=True).stdout.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    text = "".join(json.loads(line.removeprefix("data: "))["choices"][0]["text"] for line in lines[:-2])
    assert text == generate(Session(artifacts["diff"]), "def ", max_tokens=5, temperature=0).result().text


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("chat/completions", b"{", 400, "not JSON"),
        ("chat/completions", b"[" * 4000, 400, "not JSON"),
        ("chat/completions", b"[]", 400, "not a JSON object"),
        ("chat/completions", b"{}", 400, "messages is missing"),
        ("chat/completions", b'{"messages": [{"role": "user", "content": 5}]}', 400, "messages[0].content is 5"),
        ("chat/completions", b'{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', 400, "is 'image'"),
        ("chat/completions", b'{"model": "gpt", "messages": [{"role": "user", "content": "a"}]}', 404, "no model"),
        ("chat/completions", b'{"model": "plain-int8", "messages": [{"role": "user", "content": "a"}]}', 400,
         "model plain-int8: it has no chat template; use /v1/completions"),
        ("chat/completions", b'{"messages": [{"role": "a", "content": "a"}]}', 400, "messages[0].role is 'a', wanted"),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}', 400, "tools[0].type"),
        ("completions", b'{"prompt": "a", "temperature": -1}', 400, "temperature is -1"),
        ("completions", b'{"prompt": "a", "temperature": NaN}', 400, "temperature is nan"),
        ("completions", b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}", 400, "temperature is 10"),
        ("completions", b'{"prompt": "a", "min_p": 2}', 400, "min_p is 2, wanted 0 (no limit) to 1"),
        ("completions", b'{"prompt": "a", "top_k": "x"}', 400, "top_k is 'x', wanted"),
        ("completions", b'{"prompt": "a", "logit_bias": {"x": 1}}', 400, "a key of logit_bias is 'x', wanted"),
        ("completions", b'{"prompt": "a", "logit_bias": [1]}', 400, "logit_bias is [1], wanted an object"),
        ("completions", b'{"prompt": [' + b'"a",' * 10 + b'"a"]}', 400, "prompt has 11 texts, wanted 1 to 10"),
        ("completions", b'{"prompt": "a", "max_tokens": true}', 400, "max_tokens is True, wanted a whole number"),
        ("completions", b'{"prompt": "a", "stop": ["", "b"]}', 400, "stop[0] is '', wanted text"),
        ("completions", b'{"prompt": "a", "logit_bias": {"' + b"9" * 4500 + b'": 1}}', 400, "wanted a token id"),
        ("completions", b'{"prompt": "a", "logit_bias": {"1024": 1}}', 400, "wanted a token id from 0 to 1023"),
        ("completions", b'{"prompt": [1, -5]}', 400, "outside the vocabulary"),
        ("completions", b'{"prompt": [[1], "", {}]}', 400, "prompt[2] is {}, wanted"),
        ("completions", b'{"prompt": "' + b"a " * 1500 + b'"}', 400, "context holds 256"),
        ("completions", b'{"prompt": "' + b"a" * 5000 + b'"}', 413, "longer than 5,000 bytes"),
    ],
)  # fmt: skip
def test_bad_requests_are_refused(address: str, path: str, body: bytes, status: int, says: str) -> None:
    code, answer = post(address, f"/v1/{path}", body)
    assert (code, answer["error"]["type"]) == (status, "invalid_request_error")
    assert says in answer["error"]["message"]


def test_an_error_names_its_parameter(address: str) -> None:
    for body, param in ((b'{"prompt": "a", "max_tokens": 0}', "max_tokens"), (b'{"prompt": [1, {}]}', "prompt[1]")):
        assert post(address, "/v1/completions", body)[1]["error"]["param"] == param


@pytest.mark.parametrize(
    ("headers", "status", "message"),
    [
        ({"Content_Type": "text/plain"}, 415, "wanted application/json"),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415, "wanted application/json"),
        ({"Host": "evil.example:80"}, 403, "--host-name"),  # a name that DNS moved to the loopback address
        ({"Host": ""}, 403, "--host-name"),
        ({"Host": "[::1"}, 403, "--host-name"),
        ({"Host": "localhost@evil.example"}, 403, "--host-name"),
        ({"Origin": "https://evil.example"}, 403, "--allow-origin"),
        ({"Origin": "null"}, 403, "--allow-origin"),
    ],
)
def test_web_pages_cannot_use_the_server(address: str, headers: dict[str, str], status: int, message: str) -> None:
    body = json.dumps({"model": "diff", "prompt": "a", "max_tokens": 1}).encode()
    found, answer = post(address, "/v1/completions", body, **headers)
    assert (found, message in answer["error"]["message"]) == (status, True)
    if "Content_Type" not in headers:
        assert post(address, "/v1/models", None, **headers)[0] == status


def test_a_body_that_does_not_arrive_is_given_up(artifacts: dict[str, Path]) -> None:
    model = Served(Artifact.open(artifacts["diff"]), SessionOptions(threads=1), rows=1, queue=1)
    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers, "query_string": b""}
    asyncio.run(Server([model], body_seconds=0.01).application()(scope, receive, send))
    model.engine.close()
    assert sent[0]["status"] == 408 and b"has not arrived" in sent[1]["body"]


def test_names_and_origins_can_be_allowed(artifacts: dict[str, Path]) -> None:
    model = Served(Artifact.open(artifacts["diff"]), SessionOptions(threads=1), rows=1, queue=1)
    with TestClient(Server([model], hosts=["Box.lan"], origins=["https://a.example"]).application()) as client:
        for host in ("box.lan", "box.lan:8080", "localhost", "127.0.0.1:1", "[::1]:1"):
            assert client.get("/v1/models", headers={"Host": host}).status_code == 200
        origin = {"Host": "box.lan", "Origin": "https://a.example"}
        assert client.get("/v1/models", headers=origin).headers["access-control-allow-origin"] == "https://a.example"
        asks = origin | {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
        assert client.options("/v1/completions", headers=asks).status_code == 200
        assert client.get("/v1/models", headers=origin | {"Origin": "https://b.example"}).status_code == 403
        lost = client.get("/v1/nothing", headers={"Host": "localhost"})
        assert (lost.status_code, lost.json()["error"]["message"]) == (404, "GET '/v1/nothing': Not Found")
        assert client.get("/v1/completions", headers={"Host": "localhost"}).json()["error"]["type"]
    model.engine.close()


def test_key_queue_and_clients_that_leave(artifacts: dict[str, Path]) -> None:
    """401 without the key, 429 where the queue is full, a stream that is closed frees its row; metrics count it."""
    with served(artifacts["diff"], api_key="secret", rows=1, queue=0, slow=True) as address:
        with pytest.raises(openai.AuthenticationError):
            client(address, "wrong").models.list()
        api = client(address, "secret")
        endless: dict[str, Any] = {"model": "diff", "prompt": "def ", "max_tokens": 250, "temperature": 0}
        stream = api.completions.create(**endless, stream=True)
        next(iter(stream))
        with pytest.raises(openai.RateLimitError, match="queue is full"):
            api.completions.create(**endless)
        stream.close()

        def metric(name: str) -> float:
            request = urllib.request.Request(f"{address}/metrics", headers={"Authorization": "Bearer secret"})
            with urllib.request.urlopen(request) as answer:
                lines = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
            return float(lines[f'diffbit_{name}{{model="diff"}}'])

        deadline = time.monotonic() + 20
        while metric("running") and time.monotonic() < deadline:
            pass
        assert (metric("running"), metric("cancelled_total"), metric("requests_total")) == (0, 1, 1)
        assert urllib.request.urlopen(f"{address}/health").status == 200
        assert api.completions.create(**{**endless, "max_tokens": 3}).usage is not None


def test_what_the_end_of_the_drain_cuts(artifacts: dict[str, Path], capfd: pytest.CaptureFixture[str]) -> None:
    """An error of OpenAI's form, and no traceback."""
    model = Served(Artifact.open(artifacts["diff"]), SessionOptions(threads=1), rows=2, queue=0)
    slowed(model.engine)
    listening = socket.create_server(("127.0.0.1", 0))
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    application = Server([model]).application()
    runner = uvicorn.Server(uvicorn.Config(application, http=Connection, timeout_graceful_shutdown=0.1))  # type: ignore[arg-type]

    def ask(stream: bool) -> object:
        body = {"prompt": "def ", "max_tokens": 200, "stream": stream}
        with contextlib.suppress(http.client.IncompleteRead):  # of the stream
            return post(url, "/v1/completions", json.dumps(body).encode())
        return "cut"

    with ThreadPoolExecutor() as threads:
        serving = threads.submit(asyncio.run, runner.serve([listening]))
        answers = [threads.submit(ask, stream) for stream in (False, True)]
        while model.engine.counts.requests < 2:
            time.sleep(STEP)
        runner.should_exit = True
        error = {"message": "the server is ending", "type": "server_error", "param": None, "code": None}
        assert [answer.result() for answer in answers] == [(503, {"error": error}), "cut"]
        serving.result()
    model.engine.close()
    assert "Traceback" not in capfd.readouterr().err


def test_sigterm_finishes_what_has_begun(artifacts: dict[str, Path]) -> None:
    """And tells which port it was given, once it listens there, and before that which option changes nothing."""
    command = [sys.executable, "-m", "diffbit", "serve", str(artifacts["diff"]), "--port", "0", "--threads", "1"]
    command += ["--no-native", "--bfloat16"]
    with (
        subprocess.Popen([*command, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process,
        contextlib.ExitStack() as at_the_end,
    ):
        at_the_end.callback(process.kill)
        assert process.stdout is not None and process.stderr is not None
        told = json.loads(process.stdout.readline())
        assert told["models"] == ["diff"]
        lines = [process.stderr.readline()]
        while "listening" not in (line := lines[-1]):
            assert line, "the server ended"
            lines.append(process.stderr.readline())
        assert any(one.startswith("diff: bfloat16 needs device cpu with AMX") for one in lines)
        assert told["url"] in line and ":0/" not in line
        asked: dict[str, Any] = {"model": "diff", "prompt": "def ", "max_tokens": 200, "temperature": 0}
        answer = iter(client(told["url"].removesuffix("/v1")).completions.create(**asked, stream=True))
        next(answer)
        process.send_signal(signal.SIGTERM)
        assert [chunk.choices[0].finish_reason for chunk in answer][-1] in ("length", "stop")
        assert process.wait(timeout=60) == 0
