"""What a llama.cpp server on this machine is asked, over HTTP; by `http.client`, which knows no proxies.

Greedy answers (GREEDY): of llama.cpp's chain of samplers only the temperature is left, and 0 means the likeliest token.
Else penalties, or defaults that a GGUF file may carry (`general.sampling.*`), would change what is said.
Log-probabilities are those of the model, before any sampler (`post_sampling_probs` is off).
The endpoints are described in llama.cpp's tools/server/README.md.
"""

import http.client
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Literal, Self

from ratchet.errors import BaseModelError, DamagedFileError, LockHeldError, RatchetError, SettingsError
from ratchet.models.runtimes import openai_requests

Message = dict[str, str]
"""`role` and `content`."""

ANSWER_S = 900.0
"""A long prompt on few threads takes minutes; a server that says nothing for so long hangs."""

WHOLE = ("a", "1", " ", "\n")
"""Texts, any of which a vocabulary has, that end where a character ends."""

GREEDY: dict[str, Any] = {
    "temperature": 0, "samplers": ["temperature"], "mirostat": 0, "repeat_penalty": 1.0, "seed": 0,
    "post_sampling_probs": False,
}  # fmt: skip


@dataclass(frozen=True)
class LlamaReply:
    """An answer of the chat."""

    text: str
    prompt_ids: tuple[int, ...]
    """What template and tokenizer made of the conversation."""
    ids: tuple[int, ...]
    """Of the answer, with the token that ended it."""
    finished: bool
    """It ended by itself, not at the limit."""


class LlamaClient:
    """Asks one server.

    Args:
        address: http://127.0.0.1:PORT.
        what: for messages: the file that is served.
    """

    def __init__(self, address: str, what: str) -> None:
        self.address = address
        self.what = what
        self._whole: list[int] | None = None

    def raw(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """What an endpoint answers: POST with a body, GET without.

        Raises:
            SettingsError: llama.cpp refuses the request, such as a prompt that is too long.
            RatchetError: it has died, hangs, or failed.
        """
        connection = self._connection()
        try:
            if body is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise RatchetError(f"{self.what}: {self.silence(error)} when asked for {path}; try again") from None
        finally:
            connection.close()
        if response.status == http.HTTPStatus.OK:
            return content
        raise self._refusal(path, response.status, content)

    def streamed(self, prompt: Sequence[int], max_new_tokens: int, **more: Any) -> Iterator[dict[str, Any]]:
        """As `completion`, token by token: objects with `content`, the last one with `stop_type` and
        `tokens_predicted`. Closing it ends the answer. Raises as `raw`; RatchetError also where it breaks off.
        """
        body = {"prompt": list(prompt), "n_predict": max_new_tokens, "stream": True}
        connection = self._connection()
        try:
            connection.request(
                "POST", "/completion", json.dumps({**GREEDY, **body, **more}), {"Content-Type": "application/json"}
            )
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise self._refusal("/completion", response.status, response.read())
            for data in openai_requests.iterate_event_data(response):
                if data is not None and data != openai_requests.DONE:
                    found: dict[str, Any] = json.loads(data)
                    if "error" in found:
                        raise RatchetError(f"{self.what}: llama.cpp broke off: {_read_error_message(data.encode())}")
                    yield found
                    if found.get("stop"):
                        return
            raise http.client.IncompleteRead(b"")
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise RatchetError(f"{self.what}: {self.silence(error)} while it answered; try again") from None
        finally:
            connection.close()

    def _connection(self) -> http.client.HTTPConnection:
        host, _, port = self.address.removeprefix("http://").partition(":")
        return http.client.HTTPConnection(host, int(port), timeout=ANSWER_S)

    def _refusal(self, path: str, status: int, content: bytes) -> RatchetError:
        kind = SettingsError if status == http.HTTPStatus.BAD_REQUEST else RatchetError
        return kind(f"{self.what}: llama.cpp refuses {path}: {_read_error_message(content)}")

    def silence(self, error: Exception) -> str:
        """Why there is no answer, for a message."""
        return f"llama.cpp's server at {self.address} does not answer ({error or type(error).__name__})"

    def ask(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """The same as `raw`, read as JSON."""
        found: dict[str, Any] = json.loads(self.raw(path, body))
        return found

    def model(self) -> dict[str, Any]:
        """`n_vocab` (tokens of the vocabulary), `n_ctx` (of the context), `n_params` and others."""
        meta: dict[str, Any] = self.ask("/v1/models")["data"][0]["meta"]
        return meta

    def tokenize(self, text: str, whole: bool = False) -> list[int]:
        """Token ids; special tokens in the text count as such.

        Args:
            text: anything.
            whole: it is a whole prompt, before which the tokenizer puts what it always does (such as `<s>`).
        """
        body = {"content": text, "add_special": whole, "parse_special": True}
        return [int(one) for one in self.ask("/tokenize", body)["tokens"]]

    def template(self, messages: Sequence[Message]) -> str:
        """The prompt that the file's chat template makes of a conversation, by llama.cpp's own Jinja."""
        return str(self.ask("/apply-template", {"messages": list(messages)})["prompt"])

    def completion(self, prompt: Sequence[int], max_new_tokens: int, **more: Any) -> dict[str, Any]:
        """Greedy continuation of token ids (nothing is put before them), with `tokens` and `stop_type`."""
        fields = ["tokens", "stop_type"]
        body = {"prompt": list(prompt), "n_predict": max_new_tokens, "return_tokens": True, "response_fields": fields}
        return self.ask("/completion", {**GREEDY, **body, **more})

    def chat(self, messages: Sequence[Message], max_tokens: int) -> LlamaReply:
        """Ask the OpenAI-compatible endpoint, greedily; nothing is reused from one call to the next.

        It answers with a text. Its log-probabilities do not name every token (see `top`), so the tokens are those that
        /completion gives on the same prompt; the numbers of tokens that the chat has read and written must be the same.

        Raises:
            RatchetError: they are not; or what `raw` raises.
        """
        prompt = self.tokenize(self.template(messages), whole=True)
        body = {"messages": list(messages), "max_tokens": max_tokens, "cache_prompt": False}
        # "none": the text is what was generated, not what is left when a chain of thought was cut out of it
        found = self.ask("/v1/chat/completions", {**GREEDY, **body, "reasoning_format": "none"})
        ids = [int(one) for one in self.completion(prompt, max_tokens, cache_prompt=False)["tokens"]]
        counted = (int(found["usage"]["prompt_tokens"]), int(found["usage"]["completion_tokens"]))
        if counted != (len(prompt), len(ids)):
            raise RatchetError(
                f"{self.what}: llama.cpp's chat read {counted[0]} tokens and wrote {counted[1]}; by its template, "
                f"tokenizer and completion it is {len(prompt)} and {len(ids)}; report it with the chat template"
            )
        choice = found["choices"][0]
        text = str(choice["message"]["content"] or "")
        return LlamaReply(text, tuple(prompt), tuple(ids), choice["finish_reason"] == "stop")

    def top(self, prompt: Sequence[int], count: int, cache_prompt: bool) -> bytes:
        """The likeliest next tokens and their log-probabilities, as JSON in which `top_logprobs` lists `count` of them.

        llama.cpp lists none where the token that it takes ends within a character (one of several bytes). So it is made
        to take an `a`; the list is of the model, before that.
        """
        if self._whole is None:
            self._whole = next((ids[-1:] for text in WHOLE if (ids := self.tokenize(text))), [])
        body = {"prompt": [int(one) for one in prompt], "n_predict": 1, "n_probs": count, "cache_prompt": cache_prompt}
        body |= {"logit_bias": [[one, 1e6] for one in self._whole], "response_fields": ["completion_probabilities"]}
        return self.raw("/completion", {**GREEDY, **body})

    def margins(self, prompt: Sequence[int], answer: Sequence[int]) -> tuple[float, ...]:
        """By how many nats the likeliest token is ahead of the second, at each token of a greedy answer.

        Raises:
            DamagedFileError: the model computes what is no number.
        """
        found = []
        for done in range(len(answer)):
            listed = json.loads(self.top([*prompt, *answer[:done]], 2, done > 0))["completion_probabilities"]
            first, second = (one["logprob"] for one in listed[0]["top_logprobs"])
            if first is None or second is None:
                raise DamagedFileError(f"{self.what}: llama.cpp's log-probabilities are no numbers; export it again")
            found.append(float(first) - float(second))
        return tuple(found)


def _read_error_message(content: bytes) -> str:
    """The message of an error of llama.cpp."""
    try:
        return str(json.loads(content)["error"]["message"]).strip()
    except (ValueError, KeyError, TypeError):
        return content[:200].decode("utf-8", "replace")


# A llama.cpp server as a child of ours.
#
# The child is `models/runtimes/llama_process.py`: llama.cpp itself, with nothing of ours between. It gets none of this
# process's
# secrets, ends when we do (its standard input is a pipe that only we hold), and a failure there, even a crash in C++,
# is an error here.

Cache = Literal["f32", "f16"]

MODULE = "ratchet.models.runtimes.llama_process"
KEPT = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
"""Environment that the child needs; tokens of hubs and trackers are not among it."""
READY_S = 900.0
"""Reading a large file from a slow disk takes minutes."""
END_S = 10.0
LOG_BYTES = 16384
ERROR = re.compile(r"[\d.]+ E (?:\w+ +)?[\w~]+: (.*)")
"""A line of llama.cpp's log: seconds, level, where, what."""
UNKNOWN = ("unknown model architecture", "unknown pre-tokenizer", "unknown tokenizer")


class LlamaServer(LlamaClient):
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
        return f"llama.cpp's server has ended ({_describe_exit(code)}: {said})"


def start_server(
    path: Path, threads: int, context_tokens: int, cache: Cache = "f16", port: int = 0, ready_s: float = READY_S
) -> LlamaServer:
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
        DamagedFileError: no GGUF file, or an incomplete one.
        BaseModelError: an architecture, pre-tokenizer or chat template that this llama.cpp does not understand.
        LockHeldError: the port is taken.
        RatchetError: it crashed, or was not ready in time.
    """
    if not path.is_file():
        raise DamagedFileError(f"{path}: not there; export it again")
    options = ["--threads", threads, "--context", context_tokens, "--cache", cache, "--port", port, "--with-parent"]
    server = _spawn_server(path, [sys.executable, "-P", "-m", MODULE, str(path.absolute()), *map(str, options)])
    try:
        line = _read_first_line(server.process, ready_s)
        if line is None:
            raise RatchetError(f"{path}: llama.cpp was not ready after {ready_s:g} s; is the disk slow, memory short?")
        if not line:
            raise _start_error(path, port, server.process.wait(), server.last_words())
        server.address = str(json.loads(line)["address"])
    except BaseException:
        server.close()
        raise
    return server


def get_version() -> str:
    """Which llama.cpp runs files: that of the installed wheel."""
    return f"llama.cpp (xllamacpp {metadata.version('xllamacpp')})"


def _spawn_server(path: Path, command: list[str]) -> LlamaServer:
    environment = {name: os.environ[name] for name in KEPT if name in os.environ}
    with ExitStack() as streams:
        log = streams.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(  # a group of its own: Ctrl-C in a terminal is for us, who may only stop an answer
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, process_group=0
        )  # fmt: skip
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                streams.enter_context(pipe)
        return LlamaServer(path, process, log, streams.pop_all())


def _read_first_line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
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


def _start_error(path: Path, port: int, code: int, log: Sequence[str]) -> RatchetError:
    reason = _first_logged_error(log)
    if "bind HTTP server socket" in reason:
        return LockHeldError(f"port {port} of 127.0.0.1 is taken; end what listens there, or name another")
    if code < 0:
        return RatchetError(
            f"{path}: llama.cpp ended while loading it ({_describe_exit(code)}: {reason}); is memory short?"
        )
    if any(words in reason for words in UNKNOWN):
        return BaseModelError(f"{path}: {get_version()} cannot run it ({reason}); a newer one may, or export hf alone")
    if any("chat template" in line for line in log):
        cause = next((line for line in log if line.startswith("Error:")), reason)
        return BaseModelError(
            f"{path}: llama.cpp's Jinja cannot read its chat template ({cause}); set a plainer base.chat_template"
        )
    if not any(ERROR.match(line) for line in log):  # not a word of llama.cpp: Python could not start it
        return RatchetError(f"{path}: llama.cpp could not be started ({reason}); is xllamacpp installed?")
    return DamagedFileError(f"{path}: llama.cpp cannot load it ({reason}); export it again")


def _first_logged_error(log: Sequence[str]) -> str:
    """The first error is the cause; what follows says only that loading failed."""
    errors = [match[1] for line in log if (match := ERROR.match(line))]
    text = errors[0] if errors else (log[-1] if log else "it said nothing")
    return re.sub(r"^((?:error loading model(?: vocabulary)?|error): )+", "", text).strip()


def _describe_exit(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
