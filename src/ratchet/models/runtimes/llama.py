"""Runs a GGUF file in llama.cpp, the runtime of Ollama, LM Studio and llama.cpp users.

With keys and values in F32 and without flash attention, log-probabilities of an F32 file differ from transformers' by
some 1e-5 nats; llama.cpp's defaults (F16 both) add 0.007 on the same file, which would hide the effect of quantization.
So a file is verified with `f32`, and its smoke prompts are answered with the defaults (`f16`), as it is served.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ratchet.errors import BaseModelError, DamagedFileError, RatchetError, SettingsError
from ratchet.models.runtimes import llama_server
from ratchet.models.runtimes.llama_server import Cache, LlamaServer, Message
from ratchet.storage.records.export import ExportProbe

MAX_TOKENS_PER_REQUEST = 64
"""Tokens per request: an end that llama.cpp does not recognize costs at most this many."""
MIN_LOG_PROBABILITY = -104.0
"""llama.cpp rounds probabilities below 1e-45 to 0 and reports -3.4e38; e^-104 is the next smaller number."""

LOGPROB_ENTRY = re.compile(rb'\{"id":(\d+),"token":"(?:[^"\\]|\\.)*","bytes":\[[\d,]*\],"logprob":(-?\d[\d.eE+-]*)\}')


class LlamaRuntime:
    """A ModelRuntime (runtime.py) with its own llama.cpp server."""

    def __init__(self, server: LlamaServer) -> None:
        model = server.model()
        self._server = server
        self._context_tokens = int(model["n_ctx"])
        self._vocabulary = int(model["n_vocab"])

    @property
    def name(self) -> str:
        return llama_server.get_version()

    def token_ids(self, text: str) -> list[int]:
        return self._server.tokenize(text)

    def log_probabilities(self, ids: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        """See ModelRuntime. One request per position, of which the server computes only new tokens.

        The request asks for the whole vocabulary (`n_probs`), which is listed before any sampler, so top-k does not
        shorten it. It takes 8 ms for 2,000 tokens and 1 s for 152,000 (16 MB of JSON). llama.cpp sums probabilities in
        float32, with an error of 1e-5 for a large vocabulary, so they are normalized again.
        """
        self._require_context(max(positions, default=-1) + 2)
        result = np.empty((len(positions), self._vocabulary), np.float32)
        for row, position in enumerate(positions):
            # The first position does not use the server's cache: otherwise rounding would depend on the previous row.
            result[row] = self._distribution(
                self._server.top_log_probabilities(ids[: position + 1], self._vocabulary, row > 0)
            )
        return result

    def _distribution(self, answer: bytes) -> NDArray[np.float32]:
        entries = LOGPROB_ENTRY.findall(answer, answer.find(b'"top_logprobs":['))
        ids = np.array([token for token, _ in entries], np.int64)
        values = np.array([value for _, value in entries], np.float64)
        if not np.array_equal(np.sort(ids), np.arange(self._vocabulary)):
            raise DamagedFileError(
                f"{self._server.source}: llama.cpp returned probabilities of {len(set(ids.tolist()))} tokens, expected "
                f"{self._vocabulary}; the weights may contain NaN: export it again"
            )
        result = np.empty(self._vocabulary, np.float64)
        result[ids] = values - np.log(np.exp(values).sum())
        return np.maximum(result, MIN_LOG_PROBABILITY).astype(np.float32)

    def generate(self, prompt: Sequence[int], max_new_tokens: int, ends: Sequence[int]) -> list[int]:
        """See ModelRuntime.

        llama.cpp also stops at tokens whose names look like ends (`<|endoftext|>`), whatever the file says; if such a
        token is not one of `ends`, generation continues.
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
        """Answer questions as for users: with the OpenAI-compatible chat, and the file's current cache type."""
        probes = []
        for question in questions:
            messages = [{"role": "user", "content": question}]
            self._require_context(len(self.prompt_ids(messages)) + max_new_tokens)
            reply = self._server.chat(messages, max_new_tokens)
            margins = self._server.compute_margins(reply.prompt_ids, reply.ids)
            probes.append(
                ExportProbe(
                    question=question, prompt_ids=reply.prompt_ids, answer_ids=reply.ids, answer=reply.text,
                    margins=tuple(round(margin, 6) for margin in margins),
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
    """Open the file in llama.cpp until the block ends; raises like `llama_server.start_server`."""
    with llama_server.start_server(path, threads, context_tokens, cache) as server:
        yield LlamaRuntime(server)
