"""A llama.cpp server as a child of ours.

The child is `runtimes/llama_process.py`: llama.cpp itself, with nothing of ours between. It gets none of this process's
secrets, ends when we do (its standard input is a pipe that only we hold), and a failure there, even a crash in C++,
is an error here.
"""

import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import IO, Literal, Self

from ratchet.errors import BaseModelError, BusyError, DamagedError, RatchetError
from ratchet.runtimes.llama_client import Client

Cache = Literal["f32", "f16"]

MODULE = "ratchet.runtimes.llama_process"
KEPT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
"""Environment that the child needs; tokens of hubs and trackers are not among it."""
READY_S = 900.0
"""Reading a large file from a slow disk takes minutes."""
END_S = 10.0
LOG_BYTES = 16384
ERROR = re.compile(r"[\d.]+ E (?:\w+ +)?[\w~]+: (.*)")
"""A line of llama.cpp's log: seconds, level, where, what."""
UNKNOWN = ("unknown model architecture", "unknown pre-tokenizer", "unknown tokenizer")


class Server(Client):
    """A running server. `with start(...) as server:`, or call `close`."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes], log: IO[bytes], streams: ExitStack) -> None:
        super().__init__("", str(path))
        self.process = process
        self._log = log
        self._streams = streams

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *about: object) -> None:
        self.close()

    def close(self) -> None:
        """End the process and wait for it. May be called twice."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(END_S)
            except subprocess.TimeoutExpired:  # it was stopped, or waits for a disk
                self.process.kill()
                self.process.wait()
        self._streams.close()

    def last_words(self) -> list[str]:
        """The last of what llama.cpp wrote to its log."""
        size = os.fstat(self._log.fileno()).st_size
        found = os.pread(self._log.fileno(), LOG_BYTES, max(0, size - LOG_BYTES))
        return found.decode("utf-8", "replace").splitlines()

    def silence(self, error: Exception) -> str:
        """Why there is no answer, for a message."""
        try:
            code = self.process.wait(1.0)  # a connection breaks a moment before its process is gone
        except subprocess.TimeoutExpired:
            return super().silence(error)
        said = "; ".join(self.last_words()[-2:]) or "it said nothing"
        return f"llama.cpp's server has ended ({_end(code)}: {said})"


def start(
    path: Path, threads: int, context_tokens: int, cache: Cache = "f16", port: int = 0, ready_s: float = READY_S
) -> Server:
    """Start llama.cpp's server on a GGUF file and wait until it is ready.

    Args:
        path: the file.
        threads: CPU threads.
        context_tokens: longest conversation, prompt and answer.
        cache: `f16` is how llama.cpp serves by default; `f32` keeps keys and values in F32 and computes attention so,
            which tells the truth about the file's weights.
        port: of 127.0.0.1; 0 takes any that is free.
        ready_s: how long it may take.

    Raises:
        DamagedError: no GGUF file, or an incomplete one.
        BaseModelError: an architecture, pre-tokenizer or chat template that this llama.cpp does not understand.
        BusyError: the port is taken.
        RatchetError: it crashed, or was not ready in time.
    """
    if not path.is_file():
        raise DamagedError(f"{path}: not there; export it again")
    options = ["--threads", threads, "--context", context_tokens, "--cache", cache, "--port", port, "--with-parent"]
    server = _spawned(path, [sys.executable, "-P", "-m", MODULE, str(path.absolute()), *map(str, options)])
    try:
        line = _first_line(server.process, ready_s)
        if line is None:
            raise RatchetError(f"{path}: llama.cpp was not ready after {ready_s:g} s; is the disk slow, memory short?")
        if not line:
            raise _not_started(path, port, server.process.wait(), server.last_words())
        server.address = str(json.loads(line)["address"])
    except BaseException:
        server.close()
        raise
    return server


def version() -> str:
    """Which llama.cpp runs files: that of the installed wheel."""
    return f"llama.cpp (xllamacpp {metadata.version('xllamacpp')})"


def _spawned(path: Path, command: list[str]) -> Server:
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    with ExitStack() as streams:
        log = streams.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(  # a group of its own: Ctrl-C in a terminal is for us, who may only stop an answer
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, process_group=0
        )  # fmt: skip
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                streams.enter_context(pipe)
        return Server(path, process, log, streams.pop_all())


def _first_line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """Of its standard output; empty when it ended without one, None when there was none in time."""
    found, deadline_s = b"", time.monotonic() + seconds
    with selectors.DefaultSelector() as waiting:
        waiting.register(process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]  # a pipe was asked for
        while not found.endswith(b"\n"):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not (ready := waiting.select(left_s)):
                return None
            block = os.read(ready[0][0].fd, 4096)
            if not block:
                return b""
            found += block
    return found


def _not_started(path: Path, port: int, code: int, log: Sequence[str]) -> RatchetError:
    reason = _reason(log)
    if "bind HTTP server socket" in reason:
        return BusyError(f"port {port} of 127.0.0.1 is taken; end what listens there, or name another")
    if code < 0:
        return RatchetError(f"{path}: llama.cpp ended while loading it ({_end(code)}: {reason}); is memory short?")
    if any(words in reason for words in UNKNOWN):
        return BaseModelError(f"{path}: {version()} cannot run it ({reason}); a newer one may, or export hf alone")
    if any("chat template" in line for line in log):
        cause = next((line for line in log if line.startswith("Error:")), reason)
        return BaseModelError(
            f"{path}: llama.cpp's Jinja cannot read its chat template ({cause}); set a plainer base.chat_template"
        )
    if not any(ERROR.match(line) for line in log):  # not a word of llama.cpp: Python could not start it
        return RatchetError(f"{path}: llama.cpp could not be started ({reason}); is xllamacpp installed?")
    return DamagedError(f"{path}: llama.cpp cannot load it ({reason}); export it again")


def _reason(log: Sequence[str]) -> str:
    """The first error is the cause; what follows says only that loading failed."""
    errors = [match[1] for line in log if (match := ERROR.match(line))]
    text = errors[0] if errors else (log[-1] if log else "it said nothing")
    return re.sub(r"^((?:error loading model(?: vocabulary)?|error): )+", "", text).strip()


def _end(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
