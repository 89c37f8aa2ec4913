"""Connections of the server: uvicorn's HTTP/1.1 with limits of time and number, and without ambiguous requests.

A proxy and a server that see another end of the same request can be made to answer one client with what is another's
(RFC 9112, section 11.2). So a request with two lengths, or with a header that goes on in a second line, is refused.
"""

from __future__ import annotations

import asyncio
import json
import re

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

MOST_CONNECTIONS, HEADER_SECONDS, UNREAD_SECONDS = 512, 20.0, 60.0


class _StrictConnection(h11.Connection):
    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        if self.their_state is h11.IDLE:
            head = re.split(rb"\n\r?\n", self.trailing_data[0], maxsplit=1)[0]
            if re.search(rb"\n[ \t]", head):
                raise h11.RemoteProtocolError("a header has a second line")
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if {b"content-length", b"transfer-encoding"} <= names:
                raise h11.RemoteProtocolError("Content-Length and Transfer-Encoding are both given")
        return event


class Connection(H11Protocol):
    """A connection. It is closed if the head of a request has not arrived after `header_seconds`, and if the client
    takes nothing of what it was sent for `unread_seconds`."""

    most_connections, header_seconds, unread_seconds = MOST_CONNECTIONS, HEADER_SECONDS, UNREAD_SECONDS

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn = _StrictConnection(h11.SERVER, self.conn._max_incomplete_event_size)
        self._deadline: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
        transport.set_write_buffer_limits(high=0)  # so that `pause_writing` is called whenever the client lags behind
        if len(self.connections) > self.most_connections:
            self._refuse(503, f"the server has {self.most_connections} connections; try again later", "server_error")
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_watch()
        self._end_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_unread()

    def resume_writing(self) -> None:
        self._end_unread()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, f"{msg.removesuffix('.')}: it breaks HTTP/1.1, or is ambiguous", "invalid_request_error")

    def _watch(self) -> None:
        """Wait for the head of a request; bytes that trickle in do not move the deadline."""
        if self.conn.their_state is not h11.IDLE:
            self._end_watch()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self.header_seconds, self._late)

    def _end_watch(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._deadline = None

    def _watch_unread(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._unread = self.loop.call_later(self.unread_seconds, self._still_unread, waiting)

    def _end_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
        self._unread = None

    def _still_unread(self, before: int) -> None:
        """What waits only becomes less while writing is paused, by what the client takes."""
        if self.transport.get_write_buffer_size() < before:
            self._watch_unread()
        else:
            self.transport.abort()

    def _late(self) -> None:
        if not self.transport.is_closing():
            self._refuse(408, f"no request has arrived within {self.header_seconds:g} seconds", "invalid_request_error")

    def _refuse(self, status: int, message: str, kind: str) -> None:
        """Answer in OpenAI's form, unless another answer has begun, and close the connection."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
            self.transport.close()
            return
        error = {"error": {"message": message, "type": kind, "param": None, "code": None}}
        body = json.dumps(error).encode()
        head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
        self.transport.close()
