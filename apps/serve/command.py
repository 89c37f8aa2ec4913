"""diffbit serve: answer requests over HTTP."""

from __future__ import annotations

import ipaddress
import json
import logging
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ...cli import AUTO, ArtifactPaths, Quantize, Quiet, Think, as_artifacts, remark, think_of, with_settings
from ...io.errors import DiffbitError, needs
from ...io.files import parse_size
from ...settings import SessionOptions

if TYPE_CHECKING:
    from ...runtime import Artifact
    from .openai_requests import Served
    from .prefixes import PrefixFiles
    from .server import Server

EXAMPLES = {
    "serve": (
        "diffbit serve out/smollm2-int4 --port 8080",
        """curl localhost:8080/v1/chat/completions --json '{"messages": [{"role": "user", "content": "Hello"}]}'""",
    )
}
DRAIN_SECONDS = 60
KEY = "DIFFBIT_API_KEY"


@with_settings(SessionOptions, "settings")
def serve(
    artifacts: ArtifactPaths,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0: all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: a free one.", min=0, max=65535)] = 8080,
    rows: Annotated[
        int, typer.Option(help="Requests answered at the same time; each has a KV cache of its own.")
    ] = 8,
    queue: Annotated[int, typer.Option(help="Requests that may wait; the next one is refused with status 429.")] = 64,
    api_key: Annotated[
        str | None,
        typer.Option(help="Key that clients must send; the environment variable is safer, as `ps` does not show it.",
                     envvar=KEY, show_envvar=True),
    ] = None,
    host_name: Annotated[
        list[str] | None,
        typer.Option(help="Name by which clients reach the server, besides addresses and localhost; repeatable."),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin whose web pages may use the server, such as https://example.org, or *; repeatable."),
    ] = None,
    cache_dir: Annotated[
        Path | None,
        typer.Option(help="Folder that keeps the beginnings that prompts share, such as a system prompt: after a "
                     "restart they are read from it, and not computed again."),
    ] = None,
    cache_memory: Annotated[
        str | None,
        typer.Option(help="Maximum memory for the KV caches of each model, such as 2GB. When it is full, requests "
                     "wait, or are computed again later."),
    ] = None,
    cache_size: Annotated[str, typer.Option(help="Maximum size of that folder for each model, such as 500MB.")] = "2GB",
    think: Think = None,
    quantize: Quantize = AUTO,
    settings: SessionOptions = SessionOptions(),  # noqa: B008 (frozen)
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the address as a line of JSON, once the server listens there.")
    ] = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Serve models with OpenAI's HTTP interface: chat and text completions, streamed or whole.

    Requests that arrive at the same time are decoded together. A conversation's next turn computes only its new tokens,
    and a prefix that requests share, such as a system prompt, is computed once. On SIGTERM and Ctrl-C, the server
    finishes the requests it has started.
    """
    from ...runtime import Artifact, slowdowns

    with needs("serve", "serve", "diffbit serve"):
        import llguidance  # noqa: F401 (a request may need it)
        import uvicorn  # noqa: F401

        from .openai_requests import Served
        from .server import Server
    if rows < 1 or queue < 0:
        raise DiffbitError(f"--rows is {rows} and --queue is {queue}, wanted at least 1 and at least 0")
    key = os.environ.get(KEY) if api_key is None else api_key  # typer takes an empty variable for none
    if key is not None and not key.strip():
        raise DiffbitError(f"the API key is empty, so that every request would be served; set one, or unset {KEY}")
    with _bound(host, port) as listening, as_artifacts(artifacts, settings.device, quantize) as opened:
        memory, size = None if cache_memory is None else parse_size(cache_memory), parse_size(cache_size)
        models = [
            Served(
                artifact, settings, rows=rows, queue=queue, prefixes=_prefixes(artifact, cache_dir, size),
                memory=memory, think=think_of(think),
            )
            for artifact in map(Artifact.open, opened)
        ]  # fmt: skip
        server = Server(models, key, hosts=host_name or (), origins=allow_origin or ())
        for model in models:
            _announce(model, rows)
            for sentence in slowdowns(model.artifact, settings):
                remark(f"{model.name}: {sentence}")
        listening.listen()  # clients that connect from now on wait for the loop
        url = f"http://{f'[{host}]' if ':' in host else host}:{listening.getsockname()[1]}/v1"
        if as_json:
            print(json.dumps({"url": url, "models": list(server.models)}), flush=True)
        if key is None and not _is_loopback(host):
            remark(
                f"there is no key, so anybody who reaches {host}:{listening.getsockname()[1]} can use the models and "
                f"the machine's time; set {KEY}, or leave out --host"
            )
        remark(f"listening on {url}; Ctrl-C ends")
        _run(server, listening)
        for model in models:
            model.engine.close()


def _run(server: Server, listening: socket.socket) -> None:
    import uvicorn

    from .connection import Connection

    config = uvicorn.Config(
        server.application(), log_level="warning", http=Connection, timeout_graceful_shutdown=DRAIN_SECONDS
    )
    logging.getLogger("asyncio").setLevel(logging.ERROR)  # it warns of each client that leaves
    with suppress(KeyboardInterrupt, SystemExit):  # uvicorn has finished the answers and raises the signal again
        uvicorn.Server(config).run([listening])


def _announce(model: Served, rows: int) -> None:
    at_once, tokens = model.engine.rows.count, model.engine.rows.capacity
    why = "" if at_once == rows else " (requests cannot share its cache)"
    remark(f"{model.name}: {at_once} requests at a time{why}, context {tokens}")


def _prefixes(artifact: Artifact, folder: Path | None, size: int) -> PrefixFiles | None:
    from .prefixes import PrefixFiles

    return None if folder is None else PrefixFiles(folder, artifact, size)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _bound(host: str, port: int) -> socket.socket:
    """Take the port before the models are loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, proto=socket.IPPROTO_TCP)  # else asyncio leaves TCP_NODELAY out: 40 ms an answer
    try:
        if os.name == "posix":  # a server that has just ended may hold it for a minute; elsewhere this means sharing
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        reason = error.strerror or error
        raise DiffbitError(f"the server cannot listen on {host}:{port} ({reason}); choose another --port") from None
    return bound
