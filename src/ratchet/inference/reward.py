"""Scores answers with the user's reward: a program that reads JSON lines, or a function of an installed package.

The program reads from a file, so that it and Ratchet never wait for each other. It is not trusted: it gets an
environment without secrets, a time limit, and a limit on its output. It is killed with all its children, except those
that start a session of their own (setsid(2), a daemon), which cannot be found any more.
"""

import contextlib
import json
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ratchet import redaction
from ratchet.config.extensions import describe_extension, load_extension
from ratchet.config.select import RewardSettings
from ratchet.errors import SettingsError
from ratchet.storage import digests

KEY = "select.reward.command"
STDERR_LINES = 5
STDERR_BYTES = 2**16
"""Size of the end of standard error that is kept for the error message."""
STDERR_LINE_CHARACTERS = 400
"""Length limit of a line in the error message."""

BYTES_PER_ANSWER, EXTRA_BYTES = 128, 2**16
"""Limit of the program's output: bytes per answer, and a fixed number of bytes."""

FUNCTION_BATCH = 256
"""Answers per call of a reward function."""

READ_BYTES = 2**20
"""Bytes per read: no pipe holds more (pipe(7)), so one read empties it."""
POLL_INTERVAL_S = 0.1
"""Interval of the check whether the program has ended while one of its children still holds its pipes."""


class RewardOutput(NamedTuple):
    """The output of a reward."""

    scores: Path
    """File with its output, one number per line."""
    stderr_tail: bytes
    """The end of its standard error."""


def fingerprint_command(settings: RewardSettings, root: Path) -> dict[str, str]:
    """Return the SHA-256 of each file that the command names, except a program outside the project."""
    project_dir = root.resolve()
    return {
        word: digests.hash_file(root / word)
        for number, word in enumerate(settings.command)
        if (root / word).is_file() and (number or (root / word).resolve().is_relative_to(project_dir))
    }


def fingerprint(settings: RewardSettings, root: Path) -> dict[str, str]:
    """Identify the reward: the files of its command, or the package and version of its function."""
    if settings.function is None:
        return fingerprint_command(settings, root)
    load_extension("ratchet.rewards", settings.function, "select.reward.function")
    return {"function": describe_extension("ratchet.rewards", settings.function)}


def run_program(settings: RewardSettings, root: Path, requests: Path, folder: Path, count: int) -> RewardOutput:
    """Score answers with a program.

    Args:
        settings: select.reward.
        root: the project's directory, which is the working directory of the program.
        requests: file with a JSON line for each answer.
        folder: directory for the output.
        count: number of answers.

    Raises:
        SettingsError: the program cannot be started, fails, takes too long, or writes too much.
    """
    scores = folder / "scores"
    with requests.open("rb") as stdin, scores.open("wb") as out:
        try:
            child = subprocess.Popen(
                settings.command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root,
                env=redaction.build_secret_free_environment(), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise SettingsError(f"{KEY}: {settings.command[0]}: cannot be started ({error.strerror})") from None
        with child:
            try:
                stderr_tail = _read_output(child, settings.timeout_s, out, count)
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)  # the program and its children
        code = child.returncode
    if code:
        reason = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        raise SettingsError(f"{KEY}: the program {reason}{_format_stderr(stderr_tail)}")
    return RewardOutput(scores, stderr_tail)


def _read_output(child: "subprocess.Popen[bytes]", timeout_s: float, out: BinaryIO, count: int) -> bytes:
    """Copy the program's output to `out` until it ends; return the end of its standard error."""
    deadline_s, remaining_bytes, stderr_tail = time.monotonic() + timeout_s, EXTRA_BYTES + count * BYTES_PER_ANSWER, b""
    with selectors.DefaultSelector() as streams:
        for stream in filter(None, (child.stdout, child.stderr)):
            streams.register(stream, selectors.EVENT_READ)
        while True:
            has_ended = child.poll() is not None  # checked before the last read, which then gets the remaining output
            remaining_s = deadline_s - time.monotonic()
            for key, _ in streams.select(0 if has_ended else max(0.0, min(POLL_INTERVAL_S, remaining_s))):
                data = os.read(key.fd, READ_BYTES)
                if not data:
                    streams.unregister(key.fileobj)
                elif key.fileobj is child.stderr:
                    stderr_tail = (stderr_tail + data)[-STDERR_BYTES:]
                elif len(data) > remaining_bytes:
                    raise SettingsError(
                        f"{KEY}: the program wrote more than the numbers for {count:,} answers can need; expected one "
                        f"number per line, in the order of the answers{_format_stderr(stderr_tail)}"
                    )
                else:
                    remaining_bytes -= out.write(data)
            if has_ended:
                return stderr_tail
            if remaining_s <= 0:
                raise SettingsError(
                    f"{KEY}: the program took more than {timeout_s:g} s (select.reward.timeout_s)"
                    f"{_format_stderr(stderr_tail)}"
                )


def run_function(name: str, requests: Path, folder: Path) -> RewardOutput:
    """Score answers with a reward of an installed package, in this process.

    Args:
        name: select.reward.function.
        requests: a JSON line for each answer.
        folder: directory for the scores.

    Raises:
        SettingsError: the package is not installed, the function fails, or does not return a number for each answer.
    """
    key = "select.reward.function"
    function = load_extension("ratchet.rewards", name, key)
    path = folder / "scores"
    with requests.open(encoding="utf-8") as stream, path.open("w", encoding="utf-8") as out:
        while lines := list(islice(stream, FUNCTION_BATCH)):
            rows = [json.loads(line) for line in lines]
            prompts = [row["messages"][-1]["content"] for row in rows]
            try:
                scores = function(prompts, [row["answer"] for row in rows], [row["reference"] for row in rows])
                numbers = [float(score) for score in scores]
            except Exception as error:
                raise SettingsError(f"{key}: {name} failed: {type(error).__name__}: {error}") from error
            if len(numbers) != len(rows):
                raise SettingsError(f"{key}: {name} returned {len(numbers)} numbers for {len(rows)} answers")
            out.writelines(f"{number!r}\n" for number in numbers)
    return RewardOutput(path, b"")


def read_scores(output: RewardOutput, count: int) -> Iterator[float]:
    """Yield the scores of all answers.

    Raises:
        SettingsError: the number of lines is not `count`, or a line is not a finite number.
    """
    number = 0
    with output.scores.open(encoding="utf-8", errors="replace") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                score = float(line)
            except ValueError:
                score = math.nan
            if not math.isfinite(score):
                raise SettingsError(
                    f"{KEY}: line {number} of the output: found {_format_line(line)}, expected a number"
                )
            if number <= count:
                yield score
    if number != count:
        raise SettingsError(
            f"{KEY}: the program wrote {number:,} numbers for {count:,} answers; expected one number per line, in the "
            f"order of the answers{_format_stderr(output.stderr_tail)}"
        )


def _format_line(line: str) -> str:
    return repr(redaction.redact(line.strip())[:80])


def _format_stderr(stderr_tail: bytes) -> str:
    """Format standard error for an error message; secrets are removed before cutting, which could hide half of one."""
    lines = [line.rstrip() for line in redaction.redact(stderr_tail.decode(errors="replace")).splitlines()]
    if len(stderr_tail) == STDERR_BYTES and len(lines) > 1:
        del lines[0]  # incomplete
    last = [line[-STDERR_LINE_CHARACTERS:] for line in lines if line][-STDERR_LINES:]
    return "; its standard error:\n" + "\n".join(f"  {line}" for line in last) if last else "; no standard error"
