"""The web server of `ratchet label`: one page, and three requests that return the next sample of a rater.

The page has no data. Each request is a POST with JSON; on another interface than loopback it needs the token, which is
in the fragment of the page's address and so in no log. On loopback, the Host header must name this machine, because a
page of the internet may resolve its own name to 127.0.0.1 (DNS rebinding).
"""

import hashlib
import hmac
import json
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from ratchet.data.conversation import extract_text
from ratchet.errors import DataError, SettingsError, StorageError
from ratchet.evaluation.human_labels import LabelTask
from ratchet.http_client import is_loopback
from ratchet.quality_gate.judgements import append_record, read_judgements
from ratchet.reports import pages
from ratchet.runs.log import print_message
from ratchet.storage import digests
from ratchet.storage.digests import SHORT
from ratchet.storage.html import escape_invisible
from ratchet.storage.records.label import Choice, Judgement, JudgementUndo

MAX_BODY_BYTES = 65_536
MAX_RATER_CHARACTERS, MAX_NOTE_CHARACTERS = 60, 4000
REQUEST_TIMEOUT_S = 30.0
"""Timeout of a client that sends nothing."""
CHOICES: Mapping[str, Choice] = {name: name for name in get_args(Choice)}


class RefusedRequestError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: HTTPStatus, text: str) -> None:
        super().__init__(text)
        self.status = status


class LabelSession:
    """The state of all raters. Every change is on the disk before the request is answered.

    Args:
        task: the samples.
        path: the file of judgements.
        seed: determines the order of the samples, which is the same for all raters, and for each rater and sample the
            side that is shown first.
    """

    def __init__(self, task: LabelTask, path: Path, seed: int) -> None:
        self._task, self._path, self._seed = task, path, seed
        self._mutex = threading.Lock()
        self._log = read_judgements(path)
        self._version: tuple[int, ...] | None = None
        self._order = sorted(task.samples, key=lambda sample: self._draw("order", sample))

    def _draw(self, *parts: str) -> bytes:
        return hashlib.sha256("\0".join((str(self._seed), *parts)).encode()).digest()

    def _is_swapped(self, rater: str, sample: str) -> bool:
        """Return whether the second side is shown first."""
        return self._draw("side", rater, sample)[0] % 2 == 1

    def judge(self, rater: str, sample: str, shown: str, choice: Choice, note: str) -> None:
        """Store a judgement. A repetition of the same judgement changes nothing.

        Args:
            rater: name of the rater.
            sample: digest of the sample.
            shown: `shown` of the state that the rater saw. It decides which side was first, because a page may be older
                than this process.
            choice: the choice.
            note: note of the rater.

        Raises:
            RefusedRequestError: the sample or the shown answers are unknown.
            DataError: the file of judgements cannot be read.
            StorageError: the judgement cannot be written.
        """
        answers = self._task.samples[sample].answers if sample in self._task.samples else ()
        sides = self._task.side_digests
        if answers and shown == _digest_shown(answers[::-1]):
            sides = sides[::-1]
        elif not answers or shown != _digest_shown(answers):
            raise RefusedRequestError(HTTPStatus.CONFLICT, "these answers are no longer compared; load the page again")
        entry = Judgement(
            sample=sample, prompt=self._task.samples[sample].prompt, shown=sides, choice=choice, rater=rater, note=note
        )
        with self._mutex:
            self._read()
            if self._log.judgements.get((sample, rater)) != entry:
                self._append(entry)

    def undo(self, rater: str, sample: str) -> None:
        """Withdraw a judgement; does nothing if there is none. Raises the errors of `judge` about the file."""
        with self._mutex:
            self._read()
            if (sample, rater) in self._log.judgements:
                self._append(JudgementUndo(sample=sample, rater=rater))

    def _read(self) -> None:
        """Read the judgements again if the file was changed, by git or by another process of `ratchet label`."""
        try:
            found = self._path.stat()
        except FileNotFoundError:
            version: tuple[int, ...] = ()
        else:
            version = found.st_ino, found.st_size, found.st_mtime_ns
        if version != self._version:
            self._log, self._version = read_judgements(self._path), version

    def _append(self, entry: Judgement | JudgementUndo) -> None:
        try:
            append_record(self._path, entry)
        except OSError as error:
            raise StorageError(f"{self._path}: cannot be written ({error.strerror})") from error
        self._log.add(entry)

    def describe(self, rater: str) -> dict[str, Any]:
        """Return the next sample of a rater and the progress, as JSON. The names of the sides are not in it."""
        with self._mutex:
            self._read()
            done = [
                judgement
                for (sample, name), judgement in self._log.judgements.items()
                if name == rater and sample in self._task.samples
            ]
        judged = {judgement.sample for judgement in done}
        digest = next((sample for sample in self._order if sample not in judged), None)
        state: dict[str, Any] = {
            "done": len(done),
            "total": len(self._order),
            "last": {"sample": done[-1].sample, "note": done[-1].note} if done else None,
            "sample": digest,
        }
        if digest is not None:
            sample = self._task.samples[digest]
            answers = sample.answers[::-1] if self._is_swapped(rater, digest) else sample.answers
            state["shown"] = _digest_shown(answers)
            state["answers"] = [escape_invisible(answer.strip()) for answer in answers]
            state["prompt"] = [
                {
                    "role": message["role"],
                    "text": escape_invisible(extract_text(message) or json.dumps(message.get("tool_calls", ""))),
                }
                for message in sample.conversation.messages
            ]
        return state


def _digest_shown(answers: Sequence[str]) -> str:
    """Return the digest of the two answers to a prompt in the order in which a page shows them."""
    return digests.hash_json(list(answers))[:SHORT]


class LabelServer(ThreadingHTTPServer):
    """Serves the page and the requests of raters.

    Args:
        session: the state.
        host: address to listen on.
        port: port to listen on; 0: any free one.
        token: the token that requests need; None: none, on loopback.
        rater: name that the page proposes; None: it asks for one.

    Raises:
        SettingsError: the address cannot be used.
    """

    daemon_threads = True

    def __init__(self, session: LabelSession, host: str, port: int, token: str | None, rater: str | None) -> None:
        self.session, self.token = session, token
        self.is_local = is_loopback(host)
        self.page = pages.render("label", title="Which answer is better?", scripts=("label.js",), rater=rater).encode()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), LabelRequest)
        except OSError as error:
            raise SettingsError(f"--host {host} --port {port}: {error.strerror}; choose another one") from None

    @property
    def address(self) -> str:
        """Address of the page, with the token."""
        host = str(self.server_address[0])
        if host in ("0.0.0.0", "::"):  # noqa: S104 (a comparison)
            host = socket.gethostname()
        elif ":" in host:
            host = f"[{host}]"
        return f"http://{host}:{self.server_port}/{f'#{self.token}' if self.token else ''}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a connection that broke; print other errors in one line."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            print_message(f"label: a request failed: {error!r}")


class LabelRequest(BaseHTTPRequestHandler):
    """One request."""

    server: LabelServer
    timeout = REQUEST_TIMEOUT_S
    server_version, sys_version = "ratchet", ""

    def do_GET(self) -> None:
        """Send the page."""
        self._reply(self._find_page)

    def do_POST(self) -> None:
        """Answer a request of the page."""
        self._reply(self._answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _reply(self, respond: Callable[[], tuple[str, bytes]]) -> None:
        status = HTTPStatus.OK
        try:
            self._check_host()
            kind, body = respond()
        except RefusedRequestError as error:
            status, kind, body = error.status, "application/json", json.dumps({"error": str(error)}).encode()
        except (DataError, StorageError) as error:
            print_message(f"label: {error}")
            status, kind = HTTPStatus.INSUFFICIENT_STORAGE, "application/json"
            body = json.dumps({"error": f"not saved: {error}"}).encode()
        self.send_response(status)
        for name, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
            ("Referrer-Policy", "no-referrer"),
            ("Content-Security-Policy", "frame-ancestors 'none'"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _check_host(self) -> None:
        """Refuse a name that is not this machine's, and requests that another page sends."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        try:
            host_name = urlsplit(f"//{host}").hostname or ""
            is_foreign = origin is not None and urlsplit(origin).netloc != host
        except ValueError as error:
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, f"Host or Origin: {error}") from None
        if self.server.is_local and not is_loopback(host_name):
            raise RefusedRequestError(HTTPStatus.FORBIDDEN, "found another host name; use 127.0.0.1 or localhost")
        if is_foreign:
            raise RefusedRequestError(HTTPStatus.FORBIDDEN, "the request comes from another page")

    def _find_page(self) -> tuple[str, bytes]:
        if urlsplit(self.path).path != "/":
            raise RefusedRequestError(HTTPStatus.NOT_FOUND, "not found")
        return "text/html", self.server.page

    def _answer(self) -> tuple[str, bytes]:
        expected = self.server.token
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if expected is not None and not hmac.compare_digest(given.encode(), expected.encode()):
            raise RefusedRequestError(HTTPStatus.UNAUTHORIZED, "open the address with its token (the part after #)")
        fields = self._read_fields()
        session, rater = self.server.session, _read_text(fields, "rater", MAX_RATER_CHARACTERS).strip()
        if not rater:
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, "rater: expected a name")
        match self.path:
            case "/next":
                pass
            case "/judge":
                if (choice := CHOICES.get(str(fields.get("choice")))) is None:
                    raise RefusedRequestError(HTTPStatus.BAD_REQUEST, "choice: expected first, second, tie or skip")
                note = _read_text(fields, "note", MAX_NOTE_CHARACTERS)
                sample, shown = (_read_text(fields, name, MAX_NOTE_CHARACTERS) for name in ("sample", "shown"))
                session.judge(rater, sample, shown, choice, note)
            case "/undo":
                session.undo(rater, _read_text(fields, "sample", MAX_NOTE_CHARACTERS))
            case _:
                raise RefusedRequestError(HTTPStatus.NOT_FOUND, "not found")
        return "application/json", json.dumps(session.describe(rater)).encode()

    def _read_fields(self) -> Mapping[str, Any]:
        """Read the body. Its type makes a browser ask before another page may send it."""
        if self.headers.get_content_type() != "application/json":
            raise RefusedRequestError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "expected application/json")
        length = self.headers.get("Content-Length", "")
        # int() refuses very long numbers.
        if not length.isdecimal() or len(length) > len(str(MAX_BODY_BYTES)) or int(length) > MAX_BODY_BYTES:
            raise RefusedRequestError(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"expected at most {MAX_BODY_BYTES} bytes")
        try:
            fields = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError):
            fields = None
        if not isinstance(fields, dict):
            raise RefusedRequestError(HTTPStatus.BAD_REQUEST, "expected a JSON object")
        return fields


def _read_text(fields: Mapping[str, Any], name: str, most: int) -> str:
    """Return a text of a request. Raises RefusedRequestError if it is too long or cannot be encoded."""
    text = fields.get(name)
    if isinstance(text, str) and len(text) <= most and not any("\ud800" <= sign <= "\udfff" for sign in text):
        return text
    raise RefusedRequestError(HTTPStatus.BAD_REQUEST, f"{name}: expected text of at most {most} characters")
