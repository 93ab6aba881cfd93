"""A server on loopback with the parts of the Hugging Face hub's interface that pushes and downloads of models use.

It keeps repositories, commits and large files in memory, checks tokens and permissions as the hub does, and can inject
faults. Clients use it with HF_ENDPOINT, without the Xet protocol.
"""

import base64
import hashlib
import json
import socket
import threading
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Literal

TOKEN, OWNER = "hf_GoodTokenOfAda123456", "ada"
"""The only valid token, and its user, who may only write repositories of this name."""
LARGE = (".safetensors", ".gguf", ".bin")
"""Files that are uploaded before the commit. All others are part of the request for a commit."""


@dataclass
class Commit:
    """A commit of a repository."""

    parent: str | None
    message: str
    files: dict[str, bytes]

    @property
    def oid(self) -> str:
        listed = sorted((name, hashlib.sha256(data).hexdigest()) for name, data in self.files.items())
        return hashlib.sha1(repr((self.parent, self.message, listed)).encode()).hexdigest()  # noqa: S324


@dataclass
class Repository:
    """A repository with its commits, oldest first. The first commit is that of the hub."""

    is_private: bool = False
    commits: list[Commit] = field(default_factory=lambda: [Commit(None, "initial commit", {".gitattributes": b"*\n"})])
    branches: dict[str, str] = field(default_factory=dict)
    """Commit by name, besides main."""

    @property
    def files(self) -> dict[str, bytes]:
        """Files of the newest commit, without those of the hub."""
        return {name: data for name, data in self.commits[-1].files.items() if name != ".gitattributes"}

    def find(self, revision: str) -> Commit | None:
        wanted = self.commits[-1].oid if revision == "main" else self.branches.get(revision, revision)
        return next((commit for commit in self.commits if commit.oid == wanted), None)


@dataclass
class Fault:
    """A fault for requests with this method whose path contains this text.

    Kinds:
        status: the server answers with this status, and does nothing.
        cut: the server closes the connection after half of the body, in both directions.
        reset: the server closes the connection without an answer.
        lost: the server executes the request, and closes the connection before the answer.
        hold: the server reads half of the body, sets `held`, and waits until the client is gone.
    """

    method: str
    path: str
    kind: Literal["status", "cut", "reset", "lost", "hold"]
    status: int = 503
    times: int = 1_000_000
    held: threading.Event = field(default_factory=threading.Event)


@dataclass
class Hub:
    """State of the server."""

    endpoint: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    stored: dict[str, bytes] = field(default_factory=dict)
    """Large files by SHA-256, including those without a commit."""
    uploads: list[str] = field(default_factory=list)
    """SHA-256 of each completed upload of a large file."""
    requests: list[str] = field(default_factory=list)
    """Method and path of each request."""
    faults: list[Fault] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, repository: str, files: dict[str, bytes], message: str = "upload", is_private: bool = False) -> str:
        """Commit files as another user would. Return the commit."""
        found = self.repositories.setdefault(repository, Repository(is_private))
        head = found.commits[-1]
        found.commits.append(Commit(head.oid, message, head.files | files))
        return found.commits[-1].oid

    def inject(self, fault: Fault) -> Fault:
        self.faults.append(fault)
        return fault

    def take_fault(self, method: str, path: str) -> Fault | None:
        with self.lock:
            for fault in self.faults:
                if fault.method == method and fault.path in path and fault.times:
                    fault.times -= 1
                    return fault
        return None

    def environment(self, home: Path, token: str | None = TOKEN) -> dict[str, str]:
        """Return the environment variables of a client with its own cache."""
        given = {"HF_TOKEN": token} if token is not None else {}
        return given | {
            "HF_ENDPOINT": self.endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }  # fmt: skip


class Handler(BaseHTTPRequestHandler):
    """Answers one request."""

    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        """Suppress the log."""

    def do_GET(self) -> None:
        self._handle()

    def do_HEAD(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_PUT(self) -> None:
        self._handle()

    def _handle(self) -> None:
        url = urllib.parse.urlparse(self.path)
        path = urllib.parse.unquote(url.path)
        self.hub.requests.append(f"{self.command} {path}")
        self.fault = self.hub.take_fault(self.command, path)
        length = int(self.headers.get("Content-Length") or 0)
        if self.fault is not None and self.fault.kind in ("cut", "hold") and length:
            self.rfile.read(length // 2)
            self.fault.held.set()
            if self.fault.kind == "hold":
                self.connection.recv(1, socket.MSG_PEEK)
                while self.connection.recv(65536):
                    pass
            self._close()
            return
        body = self.rfile.read(length)
        if self.fault is not None and self.fault.kind == "reset":
            self._close()
            return
        if self.fault is not None and self.fault.kind == "status":
            self._send(self.fault.status, {"error": "as injected"})
            return
        self._answer(path.strip("/").split("/"), body)

    def _answer(self, parts: list[str], body: bytes) -> None:  # noqa: PLR0911
        match parts:
            case ["lfs", sha]:
                self._store(sha, body)
                return
            case _ if self._token not in (None, TOKEN):
                error = "Invalid credentials in Authorization header"
                self._send(401, {"error": error}, {"X-Error-Message": error})
                return
            case ["api", "validate-yaml"]:
                self._validate(json.loads(body)["content"])
                return
            case ["api", "repos", "create"]:
                self._create(json.loads(body))
                return
            case ["api", "models", owner, name, *rest]:
                repository = f"{owner}/{name}"
            case [owner, name, *rest]:
                repository = f"{owner}/{name.removesuffix('.git')}"
            case _:
                self._send(404, {"error": "no such route"})
                return
        found = self.hub.repositories.get(repository)
        if found is None or (found.is_private and (self._token is None or owner != OWNER)):
            self._send(404 if self._token else 401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return
        if (
            rest
            and (rest[0] in ("preupload", "commit", "info") or rest[-1] == "write")
            and (self._token is None or owner != OWNER)
        ):
            self._send(403, {"error": f"You don't have the rights to write to {repository}"})
            return
        self._answer_repository(repository, found, rest, body)

    @property
    def _token(self) -> str | None:
        header = self.headers.get("Authorization")
        return header.removeprefix("Bearer ") if header else None

    def _validate(self, content: str) -> None:
        if "license: nonsense" in content:
            self._send(400, {"errors": [{"message": '"license" must be one of [apache-2.0, mit]'}], "warnings": []})
        else:
            self._send(200, {"errors": [], "warnings": []})

    def _create(self, wanted: dict[str, Any]) -> None:
        owner = wanted["organization"] or OWNER
        repository = f"{owner}/{wanted['name']}"
        answer = {"url": f"{self.hub.endpoint}/{repository}", "name": repository}
        if self._token is None:
            self._send(401, {"error": "Invalid username or password."})
        elif owner != OWNER:
            self._send(403, {"error": f"You don't have the rights to create a model under the namespace {owner}"})
        elif repository in self.hub.repositories:
            self._send(409, answer | {"error": "You already created this model repo"})
        else:
            self.hub.repositories[repository] = Repository(wanted.get("visibility") == "private")
            self._send(200, answer)

    def _answer_repository(self, name: str, repository: Repository, rest: list[str], body: bytes) -> None:
        match rest:
            case [] | ["revision", _]:
                commit = repository.find(rest[1] if rest else "main")
                if commit is None:
                    self._send(404, {"error": "Invalid rev"}, {"X-Error-Code": "RevisionNotFound"})
                    return
                siblings = [{"rfilename": file} for file in commit.files]
                self._send(
                    200,
                    {
                        "id": name, "modelId": name, "sha": commit.oid, "private": repository.is_private,
                        "siblings": siblings, "tags": [], "downloads": 0, "likes": 0,
                    },
                )  # fmt: skip
            case ["auth-check", *_]:
                self._send(200, {})
            case ["tree", revision, *_]:
                commit = repository.find(revision)
                assert commit is not None
                self._send(200, [self._describe(file, data) for file, data in commit.files.items()])
            case ["preupload", _]:
                head = repository.commits[-1].files
                answers = []
                for entry in json.loads(body)["files"]:
                    file, is_large = entry["path"], entry["path"].endswith(LARGE)
                    oid = _oid(file, head[file]) if file in head else None
                    mode = "lfs" if is_large else "regular"
                    answers.append({"path": file, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
                self._send(200, {"files": answers})
            case ["info", "lfs", "objects", "batch"]:
                objects = []
                for entry in json.loads(body)["objects"]:
                    actions = {"upload": {"href": f"{self.hub.endpoint}/lfs/{entry['oid']}", "header": {}}}
                    objects.append(entry | ({} if entry["oid"] in self.hub.stored else {"actions": actions}))
                self._send(200, {"transfer": "basic", "objects": objects})
            case ["commit", "main"]:
                self._commit(name, repository, [json.loads(line) for line in body.splitlines()])
            case ["resolve", revision, *path]:
                self._resolve(repository, revision, "/".join(path))
            case _:
                self._send(404, {"error": f"no such route: {rest}"})

    def _describe(self, file: str, data: bytes) -> dict[str, Any]:
        entry: dict[str, Any] = {"type": "file", "path": file, "size": len(data), "oid": _git_oid(data)}
        if file.endswith(LARGE):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
        return entry

    def _store(self, sha: str, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != sha:
            self._send(400, {"error": "the content does not match its SHA-256"})
            return
        with self.hub.lock:
            self.hub.stored[sha] = body
            self.hub.uploads.append(sha)
        self._send(200, {})

    def _commit(self, name: str, repository: Repository, lines: list[dict[str, Any]]) -> None:
        with self.hub.lock:
            header, head = lines[0]["value"], repository.commits[-1]
            if header.get("parentCommit", head.oid) != head.oid:
                self._send(412, {"error": "A commit has happened since. Please refresh and try again."})
                return
            files = dict(head.files)
            for line in lines[1:]:
                value = line["value"]
                match line["key"]:
                    case "file":
                        files[value["path"]] = base64.b64decode(value["content"])
                    case "lfsFile":
                        files[value["path"]] = self.hub.stored[value["oid"]]
                    case "deletedFile":
                        del files[value["path"]]
            repository.commits.append(Commit(head.oid, header["summary"], files))
            oid = repository.commits[-1].oid
        self._send(200, {"commitOid": oid, "commitUrl": f"{self.hub.endpoint}/{name}/commit/{oid}", "success": True})

    def _resolve(self, repository: Repository, revision: str, file: str) -> None:
        commit = repository.find(revision)
        if commit is None:
            self._send(404, {}, {"X-Error-Code": "RevisionNotFound"})
            return
        if file not in commit.files:
            self._send(404, {}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit.oid})
            return
        data, status = commit.files[file], 200
        headers = {"ETag": f'"{_oid(file, data)}"', "X-Repo-Commit": commit.oid}
        if (asked := self.headers.get("Range")) is not None:
            begin = int(asked.removeprefix("bytes=").partition("-")[0])
            headers["Content-Range"] = f"bytes {begin}-{len(data) - 1}/{len(data)}"
            data, status = data[begin:], 206
        self._send(status, data, headers)

    def _send(self, status: int, content: Any, headers: dict[str, str] | None = None) -> None:
        if self.fault is not None and self.fault.kind == "lost":
            self._close()
            return
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        kind = "application/octet-stream" if isinstance(content, bytes) else "application/json"
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            is_cut = self.fault is not None and self.fault.kind == "cut"
            self.wfile.write(body[: len(body) // 2] if is_cut else body)
            if is_cut:
                self._close()

    def _close(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


def _git_oid(data: bytes) -> str:
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data).hexdigest()  # noqa: S324


def _oid(file: str, data: bytes) -> str:
    return hashlib.sha256(data).hexdigest() if file.endswith(LARGE) else _git_oid(data)


@contextmanager
def serve() -> Iterator[Hub]:
    """Serve an empty hub."""
    hub = Hub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("BoundHandler", (Handler,), {"hub": hub}))
    server.daemon_threads = True
    hub.endpoint = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
