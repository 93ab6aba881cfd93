"""Reads logs of model servers: JSON lines with requests and answers, which a server may be writing.

Messages about a line name its fields and types, and never quote it, because prompts of users are private.
"""

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from ratchet.data.conversation import extract_text
from ratchet.data.readers import type_name
from ratchet.errors import DataError
from ratchet.storage import digests
from ratchet.storage.files import reject_constant
from ratchet.storage.records.monitor import LogFileProgress

ID_KEYS = ("id", "request_id", "custom_id")
TIME_KEYS = ("time", "timestamp", "created", "created_at")
ANSWER_KEYS = ("answer", "response", "completion", "output")
REFERENCE_KEYS = ("reference", "expected", "label")
COMPARED_BYTES = 1 << 16
"""Number of bytes at the beginning and at the end of what was read by which a file is recognised."""
MILLISECONDS_FROM = 1e11
"""Unix times from this number on are in milliseconds."""


@dataclass(frozen=True)
class LoggedRequest:
    """A request, its answer, or its score. Fields that the line does not have are None."""

    id: str | None = None
    time_s: float | None = None
    """Unix time in seconds."""
    version: int | None = None
    """Version of the model that answered."""
    prompt: str | None = None
    """Text of the message that was answered."""
    answer: str | None = None
    """Text of the answer; None for tool calls."""
    score: float | None = None
    reference: str | None = None
    """Right answer."""

    @property
    def is_unlabelled(self) -> bool:
        """Whether there is neither a score nor a right answer."""
        return self.score is None and self.reference is None


@dataclass(frozen=True)
class LogLine:
    """A complete line of a log file."""

    where: str
    """File and line number."""
    request: LoggedRequest | None
    problem: str
    """Reason why the line is no request."""
    progress: LogFileProgress
    """State of the file after this line, with the digests before it."""


def parse_request(record: Any) -> LoggedRequest:
    """Convert a record of a log. Raises ValueError, without texts of the record, if it is no request.

    These forms are recognised: `prompt` or `messages` with `answer` (or `response`, `completion`, `output`); `request`
    and `response` of an OpenAI-compatible server; `messages` that end with the answer; a later line with `id` and
    `score`.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"found {type_name(record)}; expected an object")
    request = record["request"] if isinstance(record.get("request"), Mapping) else record
    reply = next((record[key] for key in ANSWER_KEYS if record.get(key) is not None), None)
    prompt, answer = _read_prompt(request, has_answer=reply is not None)
    if reply is not None:
        answer = _read_answer(reply)
    score = record.get("score")
    if score is not None and not _is_finite(score):
        raise ValueError(f"score: found {type_name(score)}; expected a number, true or false")
    if prompt is None and reply is None and answer is None and score is None:
        raise ValueError("found none of the known fields; expected prompt or messages, answer, or id and score")
    reference = next((record[key] for key in REFERENCE_KEYS if isinstance(record.get(key), str)), None)
    version = record.get("version")
    if isinstance(version, str) and version.isdecimal():
        version = int(version)
    key = next((record[key] for key in ID_KEYS if isinstance(record.get(key), str | int)), None)
    if key is None and isinstance(reply, Mapping):
        key = reply.get("id")
    if key is not None and isinstance(record.get("sample"), int):  # several answers to a prompt of `ratchet generate`
        key = f"{key}/{record['sample']}"
    time = next((record[key] for key in TIME_KEYS if record.get(key) is not None), None)
    if time is None and isinstance(reply, Mapping):
        time = reply.get("created")
    return LoggedRequest(
        id=None if key is None else str(key), time_s=None if time is None else _read_time(time),
        version=version if type(version) is int else None, prompt=prompt, answer=answer,
        score=None if score is None else float(score), reference=reference,
    )  # fmt: skip


def _read_prompt(request: Mapping[str, Any], has_answer: bool) -> tuple[str | None, str | None]:
    """Return the prompt, and the answer if the messages end with it."""
    messages = request.get("messages")
    if messages is None:
        prompt = request.get("prompt")
        if prompt is not None and not isinstance(prompt, str):
            raise ValueError(f"prompt: found {type_name(prompt)}; expected text")
        return prompt, None
    if not isinstance(messages, list) or not messages or not all(isinstance(message, Mapping) for message in messages):
        raise ValueError("messages: expected a list of objects with role and content")
    answer = None
    if not has_answer and messages[-1].get("role") == "assistant":
        answer = _read_message("messages", messages[-1])
        messages = messages[:-1]
    return (_read_content("messages", messages[-1]) if messages else None), answer


def _read_answer(reply: Any) -> str | None:
    if isinstance(reply, Mapping) and isinstance(reply.get("body"), Mapping):  # output of OpenAI's batch interface
        reply = reply["body"]
    if isinstance(reply, Mapping):
        choices = reply.get("choices")
        if isinstance(choices, list) and choices and isinstance(choices[0], Mapping):
            reply = choices[0]
        message = reply.get("message")
        if isinstance(message, Mapping):
            return _read_message("answer", message)
        reply = reply.get("text", reply.get("content"))
        if not isinstance(reply, str):
            raise ValueError("answer: found an object without text; expected text, or a response with choices")
    if not isinstance(reply, str):
        raise ValueError(f"answer: found {type_name(reply)}; expected text, or a response with choices")
    return reply


def _read_message(field: str, message: Mapping[str, Any]) -> str | None:
    return None if message.get("tool_calls") else _read_content(field, message)


def _read_content(field: str, message: Mapping[str, Any]) -> str:
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"text": content or ""}]
    if not all(isinstance(part, Mapping) and isinstance(part.get("text", ""), str) for part in parts):
        raise ValueError(f"{field}: content is {type_name(content)}; expected text, or a list of text parts")
    return extract_text(dict(message))


def _read_time(time: Any) -> float:
    if not isinstance(time, bool) and _is_finite(time):
        return float(time) / (1000 if time >= MILLISECONDS_FROM else 1)
    try:
        parsed = datetime.fromisoformat(time)
    except (TypeError, ValueError):
        raise ValueError("time: expected Unix seconds or ISO 8601") from None
    return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()


def _is_finite(value: Any) -> bool:
    try:
        return isinstance(value, bool | int | float) and math.isfinite(value)
    except OverflowError:  # an integer of more than 308 digits
        return False


def list_log_files(paths: Sequence[Path]) -> list[Path]:
    """List log files, the oldest first within a folder. Raises DataError if one is missing or a folder has none."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            inside = [file for file in path.iterdir() if file.is_file() and not file.name.startswith(".")]
            logs = [
                file for file in inside if ".json" in file.name and file.suffix not in (".gz", ".zst", ".bz2", ".xz")
            ]
            if not logs:
                raise DataError(f"{path}: no log in this folder; expected names with .json, such as log.jsonl.1")
            found += sorted(logs, key=lambda file: (file.stat().st_mtime_ns, file.name))
        elif path.is_file():
            found.append(path)
        else:
            raise DataError(f"{path}: file not found; name a log file, a folder of log files, or mlflow:EXPERIMENT")
    return found


def begin_file(path: Path) -> LogFileProgress:
    """Return the state of a file of which nothing was read."""
    return LogFileProgress(name=str(path), offset=0, lines=0, first_line="", head="", tail="")


def find_progress(path: Path, known: Sequence[LogFileProgress], renamed: Collection[int] = ()) -> int | None:
    """Find the place of a file in the list of files that were read, also after it was renamed. None: it is new.

    Args:
        path: the file.
        known: the files that were read.
        renamed: places of `known` that have another name now, so this file may be a new one of the old name.

    Raises:
        DataError: the file had been read, and what was read has changed.
    """
    found, candidates = _match(path, known)
    if found is not None:
        return found
    for place in candidates:
        if known[place].name == str(path) and place not in renamed:
            raise DataError(
                f"{path}: its first {known[place].offset:,} bytes were read before, and differ now. A log may grow, be "
                "renamed or begin again; restore its lines, or name the new file differently"
            )
    return next((place for place, entry in enumerate(known) if not entry.offset and entry.name == str(path)), None)


def find_renamed(paths: Sequence[Path], known: Sequence[LogFileProgress]) -> set[int]:
    """Find the files that were read and have another name now."""
    found = [(path, _match(path, known)[0]) for path in paths]
    return {place for path, place in found if place is not None and known[place].name != str(path)}


def _match(path: Path, known: Sequence[LogFileProgress]) -> tuple[int | None, list[int]]:
    """Return the place of a file that begins with what was read, and the places of files with its first line."""
    size = path.stat().st_size
    with path.open("rb") as stream:
        first = digests.hash_bytes(stream.readline())
        candidates = [place for place, entry in enumerate(known) if entry.offset and entry.first_line == first]
        for place in candidates:
            if size >= known[place].offset and is_continued(stream, known[place]):
                return place, candidates
    return None, candidates


def is_continued(stream: BinaryIO, progress: LogFileProgress) -> bool:
    """Return whether a file begins with what was read."""
    return not progress.offset or _hash_ends(stream, progress.offset) == (progress.head, progress.tail)


def _hash_ends(stream: BinaryIO, offset: int) -> tuple[str, str]:
    count = min(offset, COMPARED_BYTES)
    stream.seek(0)
    head = digests.hash_bytes(stream.read(count))
    stream.seek(offset - count)
    return head, digests.hash_bytes(stream.read(count))


def complete_progress(stream: BinaryIO, path: Path, progress: LogFileProgress) -> LogFileProgress:
    """Return the state of a file with its name and the digests of what was read. The stream is after it then."""
    head, tail = _hash_ends(stream, progress.offset)
    stream.seek(0)
    first = digests.hash_bytes(stream.readline())
    stream.seek(progress.offset)
    return progress.model_copy(update={"name": str(path), "head": head, "tail": tail, "first_line": first})


def read_lines(stream: BinaryIO, path: Path, progress: LogFileProgress) -> Iterator[LogLine]:
    """Yield the complete lines after those that were read. A last line without a line break waits for its end."""
    offset, number = progress.offset, progress.lines
    stream.seek(offset)
    while (line := stream.readline()).endswith(b"\n"):
        offset, number = offset + len(line), number + 1
        after = progress.model_copy(update={"offset": offset, "lines": number})
        if not line.strip():
            continue
        request, problem = None, ""
        try:
            request = parse_request(json.loads(line, parse_constant=reject_constant))
        except ValueError as error:
            is_json_error = isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
            problem = "not JSON" if is_json_error else str(error)
        except RecursionError:
            problem = "not JSON"
        yield LogLine(f"{path}:{number}", request, problem, after)
