"""The user's program that scores answers: a child process that reads JSON lines and writes a number for each.

It reads from a file, so that neither waits for the other. It is not ours: it gets an environment without secrets, a
time limit, room for the numbers that it is to write and no more, and is ended with all that it has started, but for
what has put itself into a session of its own (setsid(2), a daemon): that is not known to be its child any more.
"""

import contextlib
import math
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from ratchet import redaction
from ratchet.config.selection import RewardSettings
from ratchet.errors import SettingsError
from ratchet.storage import digests

KEY = "select.reward.command"
LAST_LINES = 5
LAST_BYTES = 2**16
"""Of what it says on standard error, kept for the message; the rest is let go."""
LAST_CHARACTERS = 400
"""Of each line in the message."""

LINE_BYTES, SPARE_BYTES = 128, 2**16
"""What it may write: so much for each answer, and so much besides."""

READ_BYTES = 2**20
"""At once: no pipe holds more (pipe(7)), so that one reading empties it."""
LOOK_S = 0.1
"""How often it is looked whether the program has ended while a child of it still has its pipes."""


class RewardOutput(NamedTuple):
    """What the program has said."""

    scores: Path
    """A file with what it wrote."""
    complaints: bytes
    """The end of what it said on standard error."""


def fingerprint_command(settings: RewardSettings, root: Path) -> dict[str, str]:
    """SHA-256 of those words of the command that name a file, but for a program that is not the project's own."""
    here = root.resolve()
    return {
        word: digests.hash_file(root / word)
        for number, word in enumerate(settings.command)
        if (root / word).is_file() and (number or (root / word).resolve().is_relative_to(here))
    }


def run_program(settings: RewardSettings, root: Path, requests: Path, folder: Path, count: int) -> RewardOutput:
    """Have answers scored.

    Args:
        settings: select.reward.
        root: the project's directory, in which the program runs.
        requests: a JSON line an answer.
        folder: room for what it says.
        count: of the answers.

    Raises:
        SettingsError: it cannot be started, fails, takes too long, or writes more than so many numbers can need.
    """
    said = folder / "scores"
    with requests.open("rb") as given, said.open("wb") as out:
        try:
            child = subprocess.Popen(
                settings.command, stdin=given, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root,
                env=redaction.build_secret_free_environment(), start_new_session=True,
            )  # fmt: skip
        except OSError as error:
            raise SettingsError(f"{KEY}: {settings.command[0]}: cannot be started ({error.strerror})") from None
        with child:
            try:
                complaints = _read_output(child, settings.limit_s, out, count)
            finally:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(child.pid, signal.SIGKILL)  # all that it has started, too
        code = child.returncode
    if code:
        ended = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        raise SettingsError(f"{KEY}: {ended}{_error_tail(complaints)}")
    return RewardOutput(said, complaints)


def _read_output(child: "subprocess.Popen[bytes]", limit_s: float, out: BinaryIO, count: int) -> bytes:
    """Take down what it writes until it ends; returns the end of what it says on standard error."""
    until, room, complaints = time.monotonic() + limit_s, SPARE_BYTES + count * LINE_BYTES, b""
    with selectors.DefaultSelector() as streams:
        for stream in filter(None, (child.stdout, child.stderr)):
            streams.register(stream, selectors.EVENT_READ)
        while True:
            ended = child.poll() is not None  # before the last reading, which has all that it wrote then
            left_s = until - time.monotonic()
            for key, _ in streams.select(0 if ended else max(0.0, min(LOOK_S, left_s))):
                data = os.read(key.fd, READ_BYTES)
                if not data:
                    streams.unregister(key.fileobj)
                elif key.fileobj is child.stderr:
                    complaints = (complaints + data)[-LAST_BYTES:]
                elif len(data) > room:
                    raise SettingsError(
                        f"{KEY}: it wrote more than the numbers for {count:,} answers can need; it must write one a "
                        f"line, in their order, and nothing else{_error_tail(complaints)}"
                    )
                else:
                    room -= out.write(data)
            if ended:
                return complaints
            if left_s <= 0:
                raise SettingsError(
                    f"{KEY}: not done after {limit_s:g} s (select.reward.limit_s){_error_tail(complaints)}"
                )


def read_scores(said: RewardOutput, count: int) -> Iterator[float]:
    """The numbers that it wrote.

    Raises:
        SettingsError: they are not as many as there are answers, or a line is no number.
    """
    number = 0
    with said.scores.open(encoding="utf-8", errors="replace") as stream:
        for number, line in enumerate(stream, start=1):
            try:
                score = float(line)
            except ValueError:
                score = math.nan
            if not math.isfinite(score):
                raise SettingsError(f"{KEY}: line {number} of its output is no number: {_format_line(line)}")
            if number <= count:
                yield score
    if number != count:
        raise SettingsError(
            f"{KEY}: it wrote {number:,} numbers for {count:,} answers; it must write one a line, in their order, and "
            f"nothing else{_error_tail(said.complaints)}"
        )


def _format_line(line: str) -> str:
    return repr(redaction.redact(line.strip())[:80])


def _error_tail(complaints: bytes) -> str:
    """For the end of a message; cut only after secrets were taken out, for half of one is not known any more."""
    lines = [line.rstrip() for line in redaction.redact(complaints.decode(errors="replace")).splitlines()]
    if len(complaints) == LAST_BYTES and len(lines) > 1:
        del lines[0]  # its beginning is lost
    last = [line[-LAST_CHARACTERS:] for line in lines if line][-LAST_LINES:]
    return "; its last words:\n" + "\n".join(f"  {line}" for line in last) if last else "; it said nothing"
