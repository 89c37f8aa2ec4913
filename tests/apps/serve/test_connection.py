"""What a connection may send, and how long it may take."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import uvicorn
from starlette.testclient import TestClient
from uvicorn.server import ServerState

from diffbit.apps.serve.command import _bound
from diffbit.apps.serve.connection import Connection
from diffbit.apps.serve.server import Server


class Few(Connection):
    most_connections = 3


class Model(SimpleNamespace):
    """Stands in for a served model, which no request here reaches."""

    def public(self, message: str) -> str:
        return message


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    server: Any = Server([Model(name="m")])  # type: ignore[list-item]
    runner = uvicorn.Server(uvicorn.Config(server.application(), log_level="critical", http=Few))
    listening = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=lambda: asyncio.run(runner.serve([listening])))
    thread.start()
    yield listening.getsockname()[1]
    runner.should_exit = True
    thread.join()


def answer(connection: socket.socket) -> tuple[int, str]:
    """All that comes until the server closes -> status and message."""
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    assert b"application/json" in head
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    return int(head.split()[1]), error["message"]


def sent(port: int, data: bytes) -> tuple[int, str]:
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall(data)
        return answer(connection)


CLOSE = b"Host: localhost\r\nConnection: close\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nContent-Type: application/json\r\n" + CLOSE


@pytest.mark.parametrize(
    ("data", "status", "says"),
    [
        (POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400, "ambiguous"),
        (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400, "ambiguous"),
        (POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n", 400, "ambiguous"),
        (POST + b"X-One: a\n\tb\r\nContent-Length: 2\r\n\r\n{}", 400, "ambiguous"),
        (POST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", 400, "ambiguous"),
        (POST + b"Content-Length: +2\r\n\r\n{}", 400, "ambiguous"),
        (b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n", 400, "breaks HTTP/1.1"),  # TLS
        (POST + b"Content-Length: 3\r\n\r\n[]\n", 400, "not a JSON object"),
        (POST + b"Content-Length: 7\r\n\r\n[\n\n a]\n", 400, "body is not JSON"),  # a body's lines are no headers
        (POST + b"Transfer-Encoding: chunked\r\n\r\n2\r\n[]\r\n0\r\n\r\n", 400, "not a JSON object"),
        (b"GET /v1/none HTTP/1.1\r\n" + CLOSE + b"\r\n", 404, "Not Found"),
        (b"PUT /v1/completions HTTP/1.1\r\n" + CLOSE + b"\r\n", 405, "Method Not Allowed"),
    ],
)  # fmt: skip
def test_requests(port: int, data: bytes, status: int, says: str) -> None:
    found, message = sent(port, data)
    assert (found, says in message) == (status, True), message


def test_the_number_of_connections_is_bounded(port: int) -> None:
    idle = [socket.create_connection(("127.0.0.1", port), timeout=60) for _ in range(3)]
    assert sent(port, b"") == (503, "the server has 3 connections; try again later")
    for connection in idle:  # they are still served
        connection.sendall(b"GET /v1/none HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert answer(connection)[0] == 404
        connection.close()
    assert sent(port, b"GET /v1/none HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")[0] == 404


class Written(asyncio.Transport):
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        super().__init__()
        self.data, self.closed, self.waiting = b"", False, 0

    def write(self, data: Any) -> None:
        self.data += data

    def is_closing(self) -> bool:
        return self.closed

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        assert high == 0

    def get_write_buffer_size(self) -> int:
        return self.waiting

    def abort(self) -> None:
        self.closed = True

    def close(self) -> None:
        self.closed = True


def test_the_head_of_each_request_has_a_deadline() -> None:
    """Bytes that trickle in do not move it; a request that is complete ends it, and the next one has its own."""

    async def run() -> None:
        application = Server([Model(name="m")]).application()  # type: ignore[list-item]
        config = uvicorn.Config(application, http=Connection)
        config.load()
        transport = Written()
        connection = Connection(config, ServerState(), {}, asyncio.get_running_loop())
        connection.connection_made(transport)
        request = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
        deadlines = []
        for _ in range(2):
            deadlines.append(connection._deadline)
            for byte in request[:-1]:
                connection.data_received(bytes([byte]))
                deadlines[-1] = deadlines[-1] or connection._deadline  # of the second: from its first byte on
                assert deadlines[-1] is connection._deadline is not None and not connection._deadline.cancelled()
            connection.data_received(request[-1:])
            assert deadlines[-1] is not None and deadlines[-1].cancelled()
            await asyncio.gather(*connection.tasks)
        assert transport.data.count(b'{"status":"ok"}') == 2 and not transport.closed
        connection.data_received(request[:9])
        assert connection._deadline is not None
        connection._deadline._run()  # it is over
        assert transport.closed and b"408" in transport.data
        assert b"no request has arrived within 20 seconds" in transport.data
        connection.connection_lost(None)
        assert connection._deadline is None

    asyncio.run(run())


def test_bodies_that_arrive_are_bounded() -> None:
    """Together; those that have arrived, or failed, do not count."""
    server: Any = Server([Model(name="m")], most_bytes=100, most_arriving=50)  # type: ignore[list-item]
    with TestClient(server.application(), base_url="http://localhost") as client:
        kind = {"Content-Type": "application/json"}
        for _ in range(3):
            assert client.post("/v1/completions", content=b" " * 40, headers=kind).status_code == 400
        refused = client.post("/v1/completions", content=b" " * 60, headers=kind)
        assert (refused.status_code, refused.json()["error"]["type"]) == (503, "server_error")
        assert client.post("/v1/completions", content=b" " * 101, headers=kind).status_code == 413
        assert client.post("/v1/completions", content=b"[]", headers=kind).status_code == 400
    assert server._arriving == 0


def test_small_answers_leave_at_once() -> None:
    """Without TCP_NODELAY each answer on a connection that is kept waits 40 ms for the client's acknowledgement."""

    async def accepted() -> int:
        options: asyncio.Queue[int] = asyncio.Queue()

        def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            connection = writer.get_extra_info("socket")
            options.put_nowait(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
            writer.close()

        bound = _bound("127.0.0.1", 0)
        async with await asyncio.start_server(connected, sock=bound):
            _, writer = await asyncio.open_connection(*bound.getsockname())
            writer.close()
            return await options.get()

    assert asyncio.run(accepted()) != 0


def test_a_client_that_takes_nothing_is_left() -> None:
    """What it takes moves the deadline; what it does not take ends the connection."""

    async def run() -> None:
        config = uvicorn.Config(Server([Model(name="m")]).application(), http=Connection)  # type: ignore[list-item]
        config.load()
        transport = Written()
        connection = Connection(config, ServerState(), {}, asyncio.get_running_loop())
        connection.connection_made(transport)
        transport.waiting = 1000
        connection.pause_writing()
        for waiting, is_left in ((900, False), (900, True)):
            transport.waiting = waiting
            assert connection._unread is not None
            assert connection._unread.when() - asyncio.get_running_loop().time() > 59
            connection._unread._run()  # it is over
            assert transport.closed == is_left
        connection.resume_writing()
        assert connection._unread is None
        connection.connection_lost(None)

    asyncio.run(run())
