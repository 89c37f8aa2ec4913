"""An HTTP server with OpenAI's API: /v1/models, /v1/chat/completions, /v1/completions, /v1/responses and
/v1/embeddings; and /tokenize, /detokenize, /health and /metrics."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import fields
from functools import partial
from typing import Any, TypeVar
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ...io.errors import DiffbitError
from ...io.fields import shown
from ...io.resources import give_back
from .embeddings import Embeddings
from .engine import Counts
from .openai_api import Answers
from .openai_requests import Refused, Served, Task, detokenize, read_request, tokenize
from .responses import Responses, read_responses

MOST_BYTES, BODY_SECONDS = 4 << 20, 60.0  # of a request
MOST_ARRIVING = 64 << 20  # bytes of all bodies that have not arrived whole
MOST_LEAVING = 64 << 20  # bytes of all answers that their clients have not taken whole
PIECE = 1 << 14  # entries of a list that are written as JSON at once
PART = 1 << 16  # bytes of an answer that are handed to the connection at once
LONG = 1 << 18  # bytes of a request that is read in a thread with others of its kind, so that short ones do not wait
MOST_FORMS = 64  # requests whose schemas or grammars are compiled, or wait for that
COMMENT_SECONDS = 10.0  # of silence in a stream
TRIM_SECONDS, WORTH_TRIMMING = 1.0, 1 << 20  # after a request or an answer of so many bytes
GONE = 499, "the client disconnected"
Answer = Callable[[Request], Awaitable[Response]]
Result = TypeVar("Result")
Reader = Callable[[object, Mapping[str, Served]], Result]  # (JSON of a request, models) -> what it asks for


ANSWERS: Mapping[str, tuple[Reader[Task], type[Answers]]] = {
    "/v1/chat/completions": (partial(read_request, chat=True), Answers),
    "/v1/completions": (partial(read_request, chat=False), Answers),
    "/v1/responses": (read_responses, Responses),
}


class _Events(StreamingResponse):
    """Answers as server-sent events. A client that goes away cancels them, also before the first."""

    def __init__(self, answers: Answers) -> None:
        super().__init__(
            _with_comments(answers.events()), media_type="text/event-stream", headers={"Cache-Control": "no-cache"}
        )
        self._answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(asyncio.CancelledError):  # uvicorn's drain is over: it closes the connection
                await super().__call__(scope, receive, send)
        finally:
            self._answers.cancel()


async def _with_comments(events: AsyncIterator[str]) -> AsyncIterator[str]:
    """The events, with a comment where there is none for a while: proxies and clients give up a connection that is
    silent, and the prompt may take long."""
    waiting = asyncio.ensure_future(anext(events, None))
    try:
        while True:
            done, _ = await asyncio.wait({waiting}, timeout=COMMENT_SECONDS)
            if not done:
                yield ": the answer is being computed\n\n"
                continue
            event = waiting.result()
            if event is None:
                return
            yield event
            waiting = asyncio.ensure_future(anext(events, None))
    finally:
        waiting.cancel()


class _Whole(Response):
    """JSON that is handed to the connection in parts, as the client takes them, so that no other copy waits."""

    media_type = "application/json"

    def __init__(self, server: Server, body: bytes) -> None:
        super().__init__(body)
        self._server = server

    @classmethod
    async def of(cls, server: Server, content: Mapping[str, Any]) -> _Whole:
        long = any(isinstance(value, list | str) and len(value) > PIECE for value in content.values())
        return cls(server, await asyncio.to_thread(_json, content) if long else _json(content))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._server.leaving(len(self.body)):
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            parts = [self.body[begin : begin + PART] for begin in range(0, len(self.body), PART)]
            for part in parts:
                await send({"type": "http.response.body", "body": part, "more_body": True})
            await send({"type": "http.response.body", "body": b""})


class Server:
    """Serves models by name. With `api_key`, every request except /health must send it as a bearer token.

    A web page may not use the server, unless its origin is one of `origins` ("*": any). The Host header must have an
    address, localhost or one of `hosts`: a page whose name an attacker's DNS moves to this machine has another.
    """

    def __init__(
        self,
        models: Sequence[Served],
        api_key: str | None = None,
        most_bytes: int = MOST_BYTES,
        *,
        body_seconds: float = BODY_SECONDS,
        most_arriving: int = MOST_ARRIVING,
        most_leaving: int = MOST_LEAVING,
        hosts: Sequence[str] = (),
        origins: Sequence[str] = (),
    ) -> None:
        self.models = {model.name: model for model in models}
        if len(self.models) < len(models):
            names = ", ".join(model.name for model in models)
            raise DiffbitError(f"two artifacts have the same name ({names}); rename a folder")
        self._api_key, self._most_bytes, self._body_seconds = api_key, most_bytes, body_seconds
        self._most_arriving, self._arriving = most_arriving, 0
        self._most_leaving, self._leaving = most_leaving, 0
        self._forms = ThreadPoolExecutor(MOST_FORMS, "diffbit form")
        self._long = ThreadPoolExecutor(1, "diffbit long")
        self._forming = 0
        self._trimming: asyncio.TimerHandle | None = None
        self._embedding = asyncio.Lock()
        self._hosts, self._origins = {"localhost", *(host.lower() for host in hosts)}, tuple(origins)

    def application(self) -> Starlette:
        """Return an ASGI application."""
        pages = Middleware(CORSMiddleware, allow_origins=self._origins, allow_methods=["*"], allow_headers=["*"])
        return Starlette(
            routes=[
                Route("/v1/models", self._checked(self._list)),
                Route("/v1/models/{name:path}", self._checked(self._one)),
                *(
                    Route(path, self._checked(partial(self._answer, read=read, kind=kind)), methods=["POST"])
                    for path, (read, kind) in ANSWERS.items()
                ),
                Route("/v1/embeddings", self._checked(self._embeddings), methods=["POST"]),
                Route("/tokenize", self._checked(self._tokenize), methods=["POST"]),
                Route("/detokenize", self._checked(self._detokenize), methods=["POST"]),
                Route("/health", _health),
                Route("/metrics", self._checked(self._metrics)),
            ],
            middleware=[pages] if self._origins else [],
            exception_handlers={Refused: _refuse, HTTPException: _no_route},
        )

    def _checked(self, answer: Answer) -> Answer:
        """Return the answer to requests that come from where they may, with the key."""

        async def check(http: Request) -> Response:
            self._check_host(http)
            self._check_key(http)
            return await answer(http)

        return check

    def _check_host(self, http: Request) -> None:
        host = ""
        with suppress(ValueError):  # half of the brackets of an IPv6 address
            host = (urlsplit(f"//{http.headers.get('host', '')}").hostname or "").lower()
        if host not in self._hosts and not _is_address(host):
            raise Refused(
                403, f"the Host header is {shown(host)}, wanted an address or a name that the server was given with "
                "--host-name", "permission_error",
            )  # fmt: skip
        origin = http.headers.get("origin")
        if origin is not None and not {origin, "*"} & set(self._origins):
            raise Refused(
                403, f"pages of {shown(origin)} may not use this server; start it with --allow-origin for them",
                "permission_error",
            )  # fmt: skip

    async def _answer(self, http: Request, read: Reader[Task], kind: type[Answers] = Answers) -> Response:
        task = await self._read(http, read)
        await self._constrain(http, task)
        with self._public():
            answers = kind(task)
        if task.stream:
            return _Events(answers)
        try:
            return await _Whole.of(self, await _unless_gone(http, answers.whole()))
        finally:
            answers.cancel()

    async def _constrain(self, http: Request, task: Task) -> None:
        """Compile what constrains the answers, in a thread of its own kind, until the client disconnects."""
        if task.form is None:
            return
        if self._forming >= MOST_FORMS:
            raise Refused(429, "too many schemas and grammars are waiting; try again later", "rate_limit_error")
        gone = threading.Event()
        self._forming += 1
        try:
            with self._public():
                future = asyncio.get_running_loop().run_in_executor(
                    self._forms, task.constrain, lambda: not gone.is_set()
                )
                await _unless_gone(http, future)
        finally:
            gone.set()
            self._forming -= 1

    @contextmanager
    def leaving(self, size: int) -> Iterator[None]:
        """Count an answer of `size` bytes while it waits for its client. Raises Refused if too many wait."""
        if self._leaving + size > max(self._most_leaving, size):
            raise Refused(503, "too many answers are waiting for their clients; try again later", "server_error")
        self._leaving += size
        try:
            yield
        finally:
            self._leaving -= size
            self._trim_later(size)

    def _trim_later(self, size: int) -> None:
        """Give the memory of large requests and answers back to the system, once after a burst of them."""
        if size < WORTH_TRIMMING:
            return
        if self._trimming is not None:
            self._trimming.cancel()
        loop = asyncio.get_running_loop()
        self._trimming = loop.call_later(TRIM_SECONDS, loop.run_in_executor, None, give_back)

    async def _tokenize(self, http: Request) -> Response:
        tokens = await self._read(http, tokenize)
        return await _Whole.of(self, {"tokens": tokens, "count": len(tokens)})

    async def _embeddings(self, http: Request) -> Response:
        asked, vectors = await self._read(http, Embeddings.read), []
        for ids in asked.texts:
            async with self._embedding:  # one at a time, and no thread waits
                if await http.is_disconnected():
                    raise Refused(*GONE)
                with self._public():
                    vectors.append(await asyncio.to_thread(asked.embed, ids))
        return await _Whole.of(self, asked.answer(vectors))

    async def _detokenize(self, http: Request) -> Response:
        return await _Whole.of(self, {"content": await self._read(http, detokenize)})

    async def _read(self, http: Request, read: Reader[Result]) -> Result:
        """What `read` makes of the JSON of a request, in a thread: rendering a template waits for a process, and
        tokenizing a long text or compiling a schema takes time."""
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # any page may send a form or plain text, without asking the server first
            raise Refused(415, f"the Content-Type is {shown(kind)}, wanted application/json")
        data = await self._body(http)
        threads = self._long if len(data) > LONG else None
        try:
            with self._public():
                return await asyncio.get_running_loop().run_in_executor(threads, _parsed, read, data, self.models)
        finally:
            self._trim_later(len(data))

    @contextmanager
    def _public(self) -> Iterator[None]:
        """Refuse what raises a DiffbitError, with a message that names no place on this machine."""
        try:
            yield
        except DiffbitError as error:
            message = str(error)
            for model in self.models.values():
                message = model.public(message)
            raise Refused(400, message, param=getattr(error, "place", None)) from None

    def _check_key(self, http: Request) -> None:
        key = http.headers.get("authorization", "").removeprefix("Bearer ").encode("latin-1")  # bytes as they came
        if self._api_key is not None and not hmac.compare_digest(key, self._api_key.encode()):
            raise Refused(401, "the API key is missing or wrong", "authentication_error")

    async def _body(self, http: Request) -> bytearray:
        data = bytearray()
        try:
            async with asyncio.timeout(self._body_seconds):
                async for part in http.stream():
                    data += part
                    self._arriving += len(part)
                    if len(data) > self._most_bytes:
                        raise Refused(413, f"the request is longer than {self._most_bytes:,} bytes")
                    if self._arriving > self._most_arriving:
                        raise Refused(503, "too many requests are arriving; try again later", "server_error")
            return data
        except TimeoutError:
            raise Refused(408, f"the body has not arrived within {self._body_seconds:g} seconds") from None
        except ClientDisconnect:
            raise Refused(*GONE) from None
        finally:
            self._arriving -= len(data)

    async def _list(self, http: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_about(model) for model in self.models.values()]})

    async def _one(self, http: Request) -> Response:
        name = http.path_params["name"]
        if name not in self.models:
            raise Refused(404, f"there is no model {shown(name)}; choose from {', '.join(self.models)}", param="model")
        return JSONResponse(_about(self.models[name]))

    async def _metrics(self, http: Request) -> Response:
        return PlainTextResponse(_metrics(list(self.models.values())), media_type="text/plain; version=0.0.4")


def _parsed(read: Reader[Result], data: bytearray, models: Mapping[str, Served]) -> Result:
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Refused(400, f"the body is not JSON ({error})") from None
    return read(values, models)


def _json(content: Mapping[str, Any]) -> bytes:
    """Return JSON of an answer. Long lists are written piece by piece, as json holds the interpreter's lock for each
    call."""

    def text(value: object) -> str:
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))

    parts = []
    for key, value in content.items():
        if isinstance(value, list):
            pieces = [text(value[begin : begin + PIECE])[1:-1] for begin in range(0, len(value), PIECE)]
            parts.append(f"{text(key)}:[{','.join(pieces)}]")
        else:
            parts.append(f"{text(key)}:{text(value)}")
    return f"{{{','.join(parts)}}}".encode()


async def _health(http: Request) -> Response:
    return JSONResponse({"status": "ok"})


async def _refuse(http: Request, error: Exception) -> Response:
    assert isinstance(error, Refused)
    headers = {"Retry-After": "1"} if error.status == 429 else {}
    message = str(error).encode(errors="replace").decode()  # it may quote half a surrogate pair of the request
    about = {"message": message, "type": error.kind, "param": error.param, "code": None}
    return JSONResponse({"error": about}, error.status, headers)


async def _no_route(http: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    about = Refused(error.status_code, f"{http.method} {shown(http.url.path)}: {error.detail}")
    return await _refuse(http, about)


def _is_address(host: str) -> bool:
    with suppress(ValueError):
        return bool(ipaddress.ip_address(host))
    return False


async def _unless_gone(http: Request, result: Awaitable[Result]) -> Result:
    """The result; it is cancelled if the client disconnects."""
    future = asyncio.ensure_future(result)

    async def gone() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass

    watch = asyncio.ensure_future(gone())
    try:
        await asyncio.wait({future, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not future.done():
            raise Refused(*GONE)
        return future.result()
    except asyncio.CancelledError:  # uvicorn's drain is over
        raise Refused(503, "the server is ending", "server_error") from None
    finally:
        for task in (future, watch):
            task.cancel()


def _about(model: Served) -> dict[str, Any]:
    return {
        "id": model.name, "object": "model", "created": model.created, "owned_by": "diffbit",
        "context_length": model.artifact.context_length,
    }  # fmt: skip


def _metrics(models: Sequence[Served]) -> str:
    """Return the metrics in Prometheus's text format."""
    lines = []
    for name in (field.name for field in fields(Counts)):
        lines.append(f"# TYPE diffbit_{name}_total counter")
        lines += [
            f'diffbit_{name}_total{{model="{_label(model.name)}"}} {getattr(model.engine.counts, name)}'
            for model in models
        ]
    for name in ("running", "waiting", "cache_bytes"):
        lines.append(f"# TYPE diffbit_{name} gauge")
        lines += [f'diffbit_{name}{{model="{_label(model.name)}"}} {getattr(model.engine, name)}' for model in models]
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
