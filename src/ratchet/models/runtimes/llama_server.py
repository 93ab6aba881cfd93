"""Serves a GGUF file by llama.cpp in a child process: the server, its client, and a runtime to verify files.

Greedy answers (GREEDY) use only llama.cpp's temperature sampler, because other samplers, penalties or the sampling
defaults of a GGUF file (`general.sampling.*`) would change answers. Log-probabilities are those of the model before any
sampler. The endpoints are described in llama.cpp's tools/server/README.md.

With keys and values in F32 and without flash attention, log-probabilities of an F32 file differ from transformers' by
about 1e-5 nats; with llama.cpp's defaults (F16), by 0.007 nats more, which would hide the effect of quantization. So a
file is verified with the cache type `f32`. Its smoke prompts are answered with `f16`, as users serve the file.
"""

import json
import os
import re
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any, Literal, Self

import httpx2
import numpy as np
from numpy.typing import NDArray

from ratchet.config.units import format_exit_code
from ratchet.errors import BaseModelError, DamagedFileError, LockHeldError, RatchetError, SettingsError
from ratchet.models.runtimes import openai_client
from ratchet.storage.records.export import ExportProbe

Message = Mapping[str, Any]
"""A chat message with the keys `role` and `content`, and `tool_calls` with their arguments as objects."""

Cache = Literal["f32", "f16"]
"""Type of cached keys and values."""

ANSWER_TIMEOUT_S = 900.0
"""Seconds without data after which the server counts as hanging; a long prompt on few threads takes minutes."""

BOUNDARY_TEXTS = ("a", "1", " ", "\n")
"""Texts that end at a character boundary; every vocabulary has at least one of them."""

GREEDY: dict[str, Any] = {
    "temperature": 0, "samplers": ["temperature"], "mirostat": 0, "repeat_penalty": 1.0, "seed": 0,
    "post_sampling_probs": False,
}  # fmt: skip

MODULE = "ratchet.models.runtimes.llama_process"
ENVIRONMENT_VARIABLES = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TMPDIR")
"""Environment variables that the child gets; tokens of hubs and trackers are not among them."""
READY_TIMEOUT_S = 900.0
"""Maximum time in seconds until the server is ready; reading a large file from a slow disk takes minutes."""
STOP_TIMEOUT_S = 10.0
LOG_BYTES = 16384
ERROR_LINE = re.compile(r"[\d.]+ E (?:\w+ +)?[\w~]+: (.*)")
"""Matches an error in llama.cpp's log: a line with the time in seconds, the level `E`, the function and the message."""
UNSUPPORTED_TEXTS = ("unknown model architecture", "unknown pre-tokenizer", "unknown tokenizer")
MAX_TOKENS_PER_REQUEST = 64
"""Maximum tokens per request. llama.cpp continues after an end token that it does not recognize; at most this many
tokens are then wasted."""
MIN_LOG_PROBABILITY = -104.0
"""Lowest log-probability that is returned, in nats. llama.cpp rounds probabilities below 1e-45 to 0 and reports their
log-probability as -3.4e38; e^-104 is slightly less than 1e-45."""
LOGPROB_ENTRY = re.compile(rb'\{"id":(\d+),"token":"(?:[^"\\]|\\.)*","bytes":\[[\d,]*\],"logprob":(-?\d[\d.eE+-]*)\}')


@dataclass(frozen=True)
class LlamaReply:
    """A chat reply."""

    text: str
    prompt_ids: tuple[int, ...]
    """Token ids of the prompt, rendered with the chat template."""
    ids: tuple[int, ...]
    """Token ids of the answer, including its end token."""
    is_finished: bool
    """True if the answer ended by itself, not at the limit."""


class LlamaClient:
    """Client of one llama.cpp server."""

    def __init__(self, address: str, source: str) -> None:
        self.address = address
        self.source = source
        self.adapter: int | None = None
        """Number of the adapter that completions use, among those that the server has; None: the base alone."""
        self._boundary_ids: list[int] | None = None
        self._http = httpx2.Client(
            headers={"Content-Type": "application/json"},
            timeout=ANSWER_TIMEOUT_S,
            limits=httpx2.Limits(max_keepalive_connections=0),
            trust_env=False,
        )

    def request_bytes(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Send a request, POST if `body` is set, else GET, and return the response body.

        Raises:
            SettingsError: llama.cpp rejects the request, for example because the prompt is too long.
            RatchetError: the server ended, hangs, or failed.
        """
        method, content = ("GET", None) if body is None else ("POST", json.dumps(body))
        try:
            response = self._http.request(method, f"{self.address}{path}", content=content)
        except httpx2.HTTPError as error:
            raise RatchetError(f"{self.source}: {path}: {self.describe_no_answer(error)}; try again") from None
        if response.status_code == httpx2.codes.OK:
            return response.content
        raise self._refusal(path, response.status_code, response.content)

    def stream(self, prompt: Sequence[int], max_new_tokens: int, **options: Any) -> Iterator[dict[str, Any]]:
        """Stream a completion token by token.

        Closing the iterator cancels the request. Raises like `request_bytes`; RatchetError also if the stream breaks.

        Yields:
            Objects with `content`; the last one has `stop_type` and `tokens_predicted`.
        """
        body = {"prompt": list(prompt), "n_predict": max_new_tokens, "stream": True}
        content = json.dumps({**GREEDY, **body, **options})
        try:
            with self._http.stream("POST", f"{self.address}/completion", content=content) as response:
                if response.status_code != httpx2.codes.OK:
                    raise self._refusal("/completion", response.status_code, response.read())
                for data in openai_client.iterate_event_data(_iterate_lines(response)):
                    if data != openai_client.STREAM_END:
                        event: dict[str, Any] = json.loads(data)
                        if "error" in event:
                            raise RatchetError(f"{self.source}: llama.cpp failed: {_read_error_message(data.encode())}")
                        yield event
                        if event.get("stop"):
                            return
            raise httpx2.RemoteProtocolError("the answer is incomplete")
        except (httpx2.HTTPError, ValueError) as error:
            raise RatchetError(f"{self.source}: {self.describe_no_answer(error)} during an answer; try again") from None

    def _refusal(self, path: str, status: int, content: bytes) -> RatchetError:
        kind = SettingsError if status == httpx2.codes.BAD_REQUEST else RatchetError
        return kind(f"{self.source}: llama.cpp rejected {path}: {_read_error_message(content)}")

    def describe_no_answer(self, error: Exception) -> str:
        """Describe, for a message, why the server does not answer."""
        return f"llama.cpp's server at {self.address} does not answer ({error or type(error).__name__})"

    def request(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Send a request like `request_bytes` and parse the response as JSON."""
        document: dict[str, Any] = json.loads(self.request_bytes(path, body))
        return document

    def model(self) -> dict[str, Any]:
        """Return `n_vocab` (vocabulary size), `n_ctx` (context length), `n_params` and others."""
        meta: dict[str, Any] = self.request("/v1/models")["data"][0]["meta"]
        return meta

    def tokenize(self, text: str, add_special: bool = False) -> list[int]:
        """Return token ids; the name of a special token in the text becomes this token.

        Args:
            add_special: prepend the tokenizer's initial tokens (such as `<s>`), as for a whole prompt.
        """
        body = {"content": text, "add_special": add_special, "parse_special": True}
        return [int(token) for token in self.request("/tokenize", body)["tokens"]]

    def template(self, messages: Sequence[Message], tools: Sequence[Any] | None = None) -> str:
        """Render a conversation with the file's chat template, by llama.cpp's Jinja."""
        body: dict[str, Any] = {"messages": list(map(_encode_arguments, messages))}
        return str(self.request("/apply-template", body | ({"tools": list(tools)} if tools else {}))["prompt"])

    def completion(self, prompt: Sequence[int], max_new_tokens: int, **options: Any) -> dict[str, Any]:
        """Complete token ids greedily, without prepending tokens; return `tokens` and `stop_type`."""
        fields = ["tokens", "stop_type"]
        body = {"prompt": list(prompt), "n_predict": max_new_tokens, "return_tokens": True, "response_fields": fields}
        return self.request("/completion", {**GREEDY, **self._adapter_choice, **body, **options})

    @property
    def _adapter_choice(self) -> dict[str, Any]:
        return {} if self.adapter is None else {"lora": [{"id": self.adapter, "scale": 1.0}]}

    def chat(self, messages: Sequence[Message], max_tokens: int) -> LlamaReply:
        """Send a greedy request to the OpenAI-compatible chat endpoint, without using cached prompts.

        The endpoint returns text only: its log-probabilities do not name every token (see `top_log_probabilities`).
        So the token ids come from /completion with the same prompt. The token counts of both replies must be equal.
        Raises RatchetError if the token counts differ, and like `request_bytes`.
        """
        prompt = self.tokenize(self.template(messages), add_special=True)
        body = {"messages": list(messages), "max_tokens": max_tokens, "cache_prompt": False}
        # "none": return the whole text, including a chain of thought
        reply = self.request("/v1/chat/completions", {**GREEDY, **body, "reasoning_format": "none"})
        ids = [int(token) for token in self.completion(prompt, max_tokens, cache_prompt=False)["tokens"]]
        usage = (int(reply["usage"]["prompt_tokens"]), int(reply["usage"]["completion_tokens"]))
        if usage != (len(prompt), len(ids)):
            raise RatchetError(
                f"{self.source}: llama.cpp's chat read {usage[0]} and wrote {usage[1]} tokens, but its template, "
                f"tokenizer and completion give {len(prompt)} and {len(ids)}; report this with the chat template"
            )
        choice = reply["choices"][0]
        text = str(choice["message"]["content"] or "")
        return LlamaReply(text, tuple(prompt), tuple(ids), choice["finish_reason"] == "stop")

    def top_log_probabilities(self, prompt: Sequence[int], count: int, cache_prompt: bool) -> bytes:
        """Return the `count` likeliest next tokens and their log-probabilities, as JSON with `top_logprobs`.

        llama.cpp lists no tokens if the token that it chooses ends within a multi-byte character. So the request forces
        llama.cpp to choose one of BOUNDARY_TEXTS; the listed values are those of the model before the choice.
        """
        if self._boundary_ids is None:
            self._boundary_ids = next((ids[-1:] for text in BOUNDARY_TEXTS if (ids := self.tokenize(text))), [])
        body = {
            "prompt": [int(token) for token in prompt], "n_predict": 1, "n_probs": count, "cache_prompt": cache_prompt,
            "logit_bias": [[token, 1e6] for token in self._boundary_ids],
            "response_fields": ["completion_probabilities"],
        }  # fmt: skip
        return self.request_bytes("/completion", {**GREEDY, **self._adapter_choice, **body})


def _read_error_message(content: bytes) -> str:
    """Return the message of an error response of llama.cpp."""
    try:
        return str(json.loads(content)["error"]["message"]).strip()
    except (ValueError, KeyError, TypeError):
        return content[:200].decode("utf-8", "replace")


# A llama.cpp server as a child process.
#
# The child runs `llama_process.py` and gets no secrets of this process. The child ends together with this process,
# because its standard input is a pipe that only this process holds. Any failure of the child, even a crash in C++,
# becomes an exception here.


class LlamaServer(LlamaClient):
    """A running server and its client. Use it in a `with` statement, or call `close`."""

    def __init__(self, path: Path, process: subprocess.Popen[bytes], log: IO[bytes], streams: ExitStack) -> None:
        super().__init__("", str(path))
        self.process = process
        self._log = log
        self._streams = streams

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop the process and wait for it. May be called twice."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:  # suspended, or waiting for a disk
                self.process.kill()
                self.process.wait()
        self._streams.close()

    def read_log_tail(self) -> list[str]:
        """Return the last lines of llama.cpp's log."""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), LOG_BYTES, max(0, size - LOG_BYTES))
        return tail.decode("utf-8", "replace").splitlines()

    def describe_no_answer(self, error: Exception) -> str:
        """Describe, for a message, why the server does not answer."""
        try:
            code = self.process.wait(1.0)  # a connection breaks shortly before its process ends
        except subprocess.TimeoutExpired:
            return super().describe_no_answer(error)
        log_text = "; ".join(self.read_log_tail()[-2:]) or "its log is empty"
        return f"llama.cpp's server has ended ({format_exit_code(code)}: {log_text})"


def start_server(  # noqa: PLR0913 (each is an option of the server)
    path: Path,
    threads: int,
    context_tokens: int,
    cache: Cache = "f16",
    port: int = 0,
    ready_s: float = READY_TIMEOUT_S,
    *,
    adapters: Sequence[Path] = (),
) -> LlamaServer:
    """Start llama.cpp's server on a GGUF file and wait until it is ready.

    Args:
        context_tokens: maximum tokens of a conversation, prompt and answer.
        cache: `f16` is llama.cpp's default; `f32` keeps keys and values in F32 and disables flash attention, which
            shows the accuracy of the file's weights.
        port: port on 127.0.0.1; 0: any free port.
        adapters: GGUF files of LoRA adapters, of which each request may use one (`LlamaClient.adapter`).

    Raises:
        DamagedFileError: the file is not a GGUF file, or incomplete.
        BaseModelError: the installed llama.cpp does not support the architecture, pre-tokenizer or chat template.
        LockHeldError: the port is in use.
        RatchetError: the server crashed, or was not ready in time.
    """
    if not path.is_file():
        raise DamagedFileError(f"{path}: the file is missing; export it again")
    options = ["--threads", threads, "--context", context_tokens, "--cache", cache, "--port", port, "--with-parent"]
    options += [option for adapter in adapters for option in ("--lora", adapter.absolute())]
    environment = {name: os.environ[name] for name in ENVIRONMENT_VARIABLES if name in os.environ}
    with ExitStack() as streams:
        log = streams.enter_context(tempfile.TemporaryFile())
        process = subprocess.Popen(  # in its own process group, so that Ctrl-C reaches only this process
            [sys.executable, "-P", "-m", MODULE, str(path.absolute()), *map(str, options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, process_group=0,
        )  # fmt: skip
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                streams.enter_context(pipe)
        server = LlamaServer(path, process, log, streams.pop_all())
    try:
        line = _read_first_line(process, ready_s)
        if line is None:
            raise RatchetError(f"{path}: llama.cpp was not ready after {ready_s:g} s; check disk speed and free memory")
        if not line:
            raise _start_error(path, port, process.wait(), server.read_log_tail())
        server.address = str(json.loads(line)["address"])
    except BaseException:
        server.close()
        raise
    return server


def get_version() -> str:
    """Return the version of llama.cpp, identified by the version of the installed wheel."""
    return f"llama.cpp (xllamacpp {metadata.version('xllamacpp')})"


def _read_first_line(process: subprocess.Popen[bytes], seconds: float) -> bytes | None:
    """Return the first line of standard output; empty if the process ended without a line, None after `seconds`."""
    line, deadline_s = b"", time.monotonic() + seconds
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)  # type: ignore[arg-type]  # stdout is a pipe
        while not line.endswith(b"\n"):
            left_s = deadline_s - time.monotonic()
            if left_s <= 0 or not (ready := selector.select(left_s)):
                return None
            block = os.read(ready[0][0].fd, 4096)
            if not block:
                return b""
            line += block
    return line


def _start_error(path: Path, port: int, code: int, log: Sequence[str]) -> RatchetError:
    # The first logged error is the cause; later errors only report that loading failed.
    errors = [match[1] for line in log if (match := ERROR_LINE.match(line))]
    text = (errors or log[-1:] or ["its log is empty"])[0]
    reason = re.sub(r"^((?:error loading model(?: vocabulary)?|error): )+", "", text).strip()
    if "bind HTTP server socket" in reason:
        return LockHeldError(f"port {port} of 127.0.0.1 is in use; stop the process that uses it, or set another port")
    if code < 0:
        return RatchetError(
            f"{path}: llama.cpp ended while loading it ({format_exit_code(code)}: {reason}); check free memory"
        )
    if any(text in reason for text in UNSUPPORTED_TEXTS):
        return BaseModelError(f"{path}: {get_version()} cannot run it ({reason}); update it, or export only hf")
    if any("chat template" in line for line in log):
        cause = next((line for line in log if line.startswith("Error:")), reason)
        return BaseModelError(
            f"{path}: llama.cpp's Jinja cannot read its chat template ({cause}); set a simpler base.chat_template"
        )
    if not errors:  # llama.cpp logged nothing: Python could not start it
        return RatchetError(f"{path}: llama.cpp could not be started ({reason}); check that xllamacpp is installed")
    return DamagedFileError(f"{path}: llama.cpp cannot load it ({reason}); export it again")


class LlamaRuntime:
    """A ModelRuntime (exporters/verification/parity.py) with its own llama.cpp server."""

    def __init__(self, server: LlamaServer) -> None:
        model = server.model()
        self._server = server
        self._context_tokens = int(model["n_ctx"])
        self._vocabulary = int(model["n_vocab"])

    @property
    def name(self) -> str:
        return get_version()

    def token_ids(self, text: str) -> list[int]:
        return self._server.tokenize(text)

    def log_probabilities(self, ids: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        """See ModelRuntime. Sends one request per position; the server computes only the new tokens.

        Each request asks for the whole vocabulary (`n_probs`). llama.cpp lists it before any sampler, so top-k does not
        shorten the list. A request takes 8 ms for a vocabulary of 2,000 tokens and 1 s for 152,000 (16 MB of JSON).
        llama.cpp sums probabilities in float32, with an error of 1e-5 for a large vocabulary. So the probabilities
        are normalized again here.
        """
        self._require_context(max(positions, default=-1) + 2)
        result = np.empty((len(positions), self._vocabulary), np.float32)
        for row, position in enumerate(positions):
            # The first position does not use the server's cache: otherwise its rounding would depend on earlier calls.
            answer = self._server.top_log_probabilities(ids[: position + 1], self._vocabulary, row > 0)
            entries = LOGPROB_ENTRY.findall(answer, answer.find(b'"top_logprobs":['))
            tokens = np.array([token for token, _ in entries], np.int64)
            values = np.array([value for _, value in entries], np.float64)
            if not np.array_equal(np.sort(tokens), np.arange(self._vocabulary)):
                raise DamagedFileError(
                    f"{self._server.source}: llama.cpp returned probabilities of {len(set(tokens.tolist()))} tokens, "
                    f"expected {self._vocabulary}; the weights may contain NaN: export it again"
                )
            result[row, tokens] = np.maximum(values - np.log(np.exp(values).sum()), MIN_LOG_PROBABILITY)
        return result

    def generate(self, prompt: Sequence[int], max_new_tokens: int, ends: Sequence[int]) -> list[int]:
        """See ModelRuntime.

        llama.cpp also stops at tokens with names like `<|endoftext|>`, even if the file does not define them as end
        tokens. If such a token is not one of `ends`, generation continues.
        """
        self._require_context(len(prompt) + max_new_tokens)
        answer_ids: list[int] = []
        while len(answer_ids) < max_new_tokens:
            count = min(MAX_TOKENS_PER_REQUEST, max_new_tokens - len(answer_ids))
            answer = self._server.completion([*prompt, *answer_ids], count, cache_prompt=bool(answer_ids))
            tokens = [int(token) for token in answer["tokens"]]
            if not tokens:
                raise RatchetError(f"{self._server.source}: llama.cpp generated nothing ({answer['stop_type']})")
            for token in tokens:
                answer_ids.append(token)
                if token in ends:
                    return answer_ids
        return answer_ids

    def prompt_ids(self, messages: Sequence[Message]) -> list[int]:
        """Return the prompt ids of a conversation by llama.cpp's Jinja and the file's template and tokenizer."""
        try:
            text = self._server.template(messages)
        except RatchetError as error:
            if self._server.process.poll() is not None:
                raise
            raise BaseModelError(f"{error}; set base.chat_template to a simpler template") from None
        return self._server.tokenize(text, add_special=True)

    def probes(self, questions: Sequence[str], max_new_tokens: int) -> tuple[ExportProbe, ...]:
        """Answer questions through the OpenAI-compatible chat, as users do, with the cache type of this server."""
        probes = []
        for question in questions:
            messages = [{"role": "user", "content": question}]
            self._require_context(len(self.prompt_ids(messages)) + max_new_tokens)
            reply = self._server.chat(messages, max_new_tokens)
            margins = []  # the lead in nats of the likeliest token over the second, at each token of the answer
            for position in range(len(reply.ids)):
                prefix = [*reply.prompt_ids, *reply.ids[:position]]
                completion = json.loads(self._server.top_log_probabilities(prefix, 2, position > 0))
                top = completion["completion_probabilities"][0]["top_logprobs"]
                first, second = (entry["logprob"] for entry in top)
                if first is None or second is None:
                    raise DamagedFileError(
                        f"{self._server.source}: llama.cpp's log-probabilities are NaN; export it again"
                    )
                margins.append(round(float(first) - float(second), 6))
            probes.append(
                ExportProbe(
                    question=question, prompt_ids=reply.prompt_ids, answer_ids=reply.ids, answer=reply.text,
                    margins=tuple(margins),
                )
            )  # fmt: skip
        return tuple(probes)

    def _require_context(self, tokens: int) -> None:
        if tokens > self._context_tokens:
            raise SettingsError(
                f"{self._server.source}: llama.cpp's context has {self._context_tokens} tokens, but {tokens} are "
                "needed; open the file with a longer context, if its context_length allows it"
            )


@contextmanager
def open_runtime(path: Path, threads: int, context_tokens: int, cache: Cache = "f32") -> Iterator[LlamaRuntime]:
    """Open a file in llama.cpp until the block ends; raises like `start_server`."""
    with start_server(path, threads, context_tokens, cache) as server:
        yield LlamaRuntime(server)


def _encode_arguments(message: Message) -> Message:
    """Return the message with the arguments of its tool calls as JSON texts, as in OpenAI's format."""
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        calls.append({**call, "function": {**function, "arguments": json.dumps(function["arguments"])}})
    return {**message, "tool_calls": calls}


def _iterate_lines(response: httpx2.Response) -> Iterator[str]:
    splitter = openai_client.LineSplitter()
    for data in response.iter_bytes():
        yield from splitter.feed(data)
    if rest := splitter.close():
        yield rest
