"""A stand-in for the Hugging Face Hub: what huggingface_hub asks for when it downloads, and when it uploads by git LFS.

Repositories are dictionaries in memory, a new one per commit. Files that are not text go through LFS, as on the hub.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import unquote

Files = dict[str, bytes]
TEXT = (".json", ".md", ".jinja")


class Hub:
    """The repositories by name; of each its commits by hash, the newest last. `private` and `gated` need the token."""

    TOKEN = "hf_stand_in"

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, Files]] = {}
        self.private: set[str] = set()
        self.gated: set[str] = set()
        self.large: dict[str, bytes] = {}  # uploaded by LFS, by sha256
        self.downloads: list[str] = []
        self.url = ""

    def add(self, repo: str, files: Files) -> str:
        """A commit on the main branch; its hash."""
        commits = self.commits.setdefault(repo, {})
        commit = hashlib.sha1(f"{repo} {len(commits)}".encode()).hexdigest()
        commits[commit] = files
        return commit

    def find(self, repo: str, revision: str) -> tuple[str, Files]:
        commits = self.commits[repo]
        commit = list(commits)[-1] if revision == "main" else revision
        return commit, commits[commit]


class Problem(Exception):
    def __init__(self, status: int, code: str) -> None:
        self.status, self.code = status, code


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def answer(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        self.body = self.rfile.read(size)
        path = unquote(self.path.partition("?")[0])
        for method, pattern, action in ROUTES:
            if self.command in method.split() and (match := re.fullmatch(pattern, path)):
                try:
                    action(self, *match.groups())
                except Problem as problem:
                    self.send({}, problem.status, {"X-Error-Code": problem.code})
                return
        self.send({"error": f"the stand-in does not know {self.command} {path}"}, 501)

    do_GET = do_HEAD = do_POST = do_PUT = answer

    def send(self, value: object, status: int = 200, headers: dict[str, str] | None = None) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, text in ({"Content-Length": str(len(data))} | (headers or {})).items():
            self.send_header(name, text)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def authorized(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {Hub.TOKEN}"

    def opened(self, repo: str, revision: str) -> tuple[str, Files]:
        if repo not in self.hub.commits or (repo in self.hub.private and not self.authorized()):
            raise Problem(404, "RepoNotFound")
        if repo in self.hub.gated and not self.authorized():
            raise Problem(403, "GatedRepo")
        try:
            return self.hub.find(repo, revision)
        except KeyError:
            raise Problem(404, "RevisionNotFound") from None

    # downloads

    def info(self, repo: str, revision: str | None) -> None:
        commit, files = self.opened(repo, revision or "main")
        siblings = [{"rfilename": name} for name in files]
        self.send(
            {"id": repo, "modelId": repo, "sha": commit, "siblings": siblings, "private": repo in self.hub.private}
        )

    def tree(self, repo: str, revision: str) -> None:
        _, files = self.opened(repo, revision)
        self.send([entry(name, data) for name, data in files.items()])

    def resolve(self, repo: str, revision: str, name: str) -> None:
        commit, files = self.opened(repo, revision)
        if name not in files:
            raise Problem(404, "EntryNotFound")
        if self.command == "GET":
            self.hub.downloads.append(name)
        self.send(
            files[name], headers={"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(files[name]).hexdigest()}"'}
        )

    # uploads

    def create(self) -> None:
        if not self.authorized():
            raise Problem(401, "")
        asked = json.loads(self.body)
        repo = f"{asked['organization']}/{asked['name']}"
        url = {"url": f"{self.hub.url}/{repo}"}
        if repo in self.hub.commits:
            self.send(url, 409)
            return
        self.hub.add(repo, {})
        if asked.get("private") or asked.get("visibility") == "private":  # by huggingface_hub's version
            self.hub.private.add(repo)
        self.send(url)

    def preupload(self, repo: str, revision: str) -> None:
        self.opened(repo, revision)
        modes = [
            {
                "path": file["path"],
                "uploadMode": "regular" if file["path"].endswith(TEXT) else "lfs",
                "shouldIgnore": False,
            }
            for file in json.loads(self.body)["files"]
        ]
        self.send({"files": modes})

    def batch(self, repo: str) -> None:
        objects = [
            {**file, "actions": {"upload": {"href": f"{self.hub.url}/lfs/{file['oid']}"}}}
            for file in json.loads(self.body)["objects"]
        ]
        self.send({"transfer": "basic", "objects": objects})

    def put(self, oid: str) -> None:
        assert hashlib.sha256(self.body).hexdigest() == oid
        self.hub.large[oid] = self.body
        self.send({})

    def commit(self, repo: str, revision: str) -> None:
        if not self.authorized():
            raise Problem(401, "")
        _, files = self.opened(repo, revision)
        new = dict(files)
        for line in self.body.splitlines():
            operation = json.loads(line)
            value = operation["value"]
            if operation["key"] == "file":
                assert value["encoding"] == "base64"
                new[value["path"]] = base64.b64decode(value["content"])
            elif operation["key"] == "lfsFile":
                new[value["path"]] = self.hub.large[value["oid"]]
            elif operation["key"] == "deletedFile":
                del new[value["path"]]
        commit = self.hub.add(repo, new)
        self.send({"commitUrl": f"{self.hub.url}/{repo}/commit/{commit}", "commitOid": commit, "success": True})

    def valid(self) -> None:
        self.send({"errors": [], "warnings": []})


def entry(name: str, data: bytes) -> dict[str, Any]:
    row: dict[str, Any] = {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
    if not name.endswith(TEXT):
        row["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 130}
    return row


REPO = r"([\w.-]+/[\w.-]+)"
ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    ("GET", f"/api/models/{REPO}(?:/revision/(.+))?", Handler.info),
    ("GET", f"/api/models/{REPO}/tree/([^/]+)", Handler.tree),
    ("GET HEAD", f"/{REPO}/resolve/([^/]+)/(.+)", Handler.resolve),
    ("POST", "/api/repos/create", Handler.create),
    ("POST", "/api/validate-yaml", Handler.valid),
    ("POST", f"/api/models/{REPO}/preupload/(.+)", Handler.preupload),
    ("POST", f"/{REPO}\\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", "/lfs/([0-9a-f]+)", Handler.put),
    ("POST", f"/api/models/{REPO}/commit/(.+)", Handler.commit),
]


@contextmanager
def running() -> Iterator[Hub]:
    """A stand-in that listens on this machine."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
