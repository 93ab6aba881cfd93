"""Inference backend for GGUF files: a llama.cpp server as a child process, one request at a time."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ratchet.config.generate import Generate
from ratchet.errors import DataError, SettingsError
from ratchet.inference.backend import AnswerChunk, AnswerEnd, AnswerStream, BackendCallbacks, GenerationRequest
from ratchet.inference.reasoning import ReasoningSplitter
from ratchet.inference.spec import FinishReason, GenerationAnswer, GenerationStart, replace_surrogates
from ratchet.models.runtimes import llama_server
from ratchet.models.runtimes.llama_server import LlamaClient
from ratchet.storage import digests

DEFAULT_CONTEXT_TOKENS = 4096
PROMPT_TOKENS = 3072
"""Context length reserved for the prompt."""


class LlamaBackend:
    """Generates answers with a llama.cpp server.

    Sampling is done by llama.cpp: the same build gives the same answers, but not those of `TorchBackend`.
    """

    def __init__(
        self, client: LlamaClient, settings: Generate, context_tokens: int, callbacks: BackendCallbacks
    ) -> None:
        self._client, self._settings, self._context, self._callbacks = client, settings, context_tokens, callbacks
        self.device_info = {"device": "llama.cpp", "compute_dtype": "as in the file"}

    def generate(
        self, requests: Iterator[GenerationRequest], should_stop: Callable[[], bool]
    ) -> Iterator[GenerationAnswer]:
        """See `GenerationBackend`."""
        for request in requests:
            if should_stop():
                return
            self._callbacks.heartbeat()
            yield self._answer(request)

    def _answer(self, request: GenerationRequest) -> GenerationAnswer:
        settings = self._settings
        try:
            ids, starts_in_reasoning = self._prompt(request)
        except SettingsError as error:  # the chat template in llama.cpp raises for these messages
            self._callbacks.on_event("notice", {"text": f"skipped: prompt {request.prompt.id}: {error}"})
            return GenerationAnswer(request.index, "", "refused", None, 0, 0.0)
        if len(ids) + settings.max_new_tokens > self._context:
            return GenerationAnswer(request.index, "", "context", len(ids), 0, 0.0, starts_in_reasoning)
        body = {
            "cache_prompt": False, "n_probs": 1, "return_tokens": True, **self._sampling_parameters(request),
            "response_fields": ["content", "tokens", "stop_type", "completion_probabilities"],
        }  # fmt: skip
        response = self._client.completion(ids, settings.max_new_tokens, **body)
        log_probabilities = [float(token["logprob"]) for token in response.get("completion_probabilities") or []]
        mean = round(sum(log_probabilities) / len(log_probabilities), 4) if log_probabilities else None
        finish: Any = "length" if response["stop_type"] == "limit" else "stop"
        text, tokens = replace_surrogates(response["content"]), len(response["tokens"])
        return GenerationAnswer(request.index, text, finish, len(ids), tokens, mean, starts_in_reasoning)

    def stream(self, request: GenerationRequest, reuse_cache: bool) -> AnswerStream:
        """See `GenerationBackend`. The answer is cut where the context is full."""
        try:
            ids, starts_in_reasoning = self._prompt(request)
        except SettingsError as error:
            raise DataError(f"prompt {request.prompt.id}: {error}") from None
        available_tokens = self._context - len(ids)
        if available_tokens < 1:
            yield AnswerEnd("context", len(ids), 0, self._context)
            return
        splitter, last = ReasoningSplitter(self._settings.reasoning_tags, starts_in_reasoning), dict[str, Any]()
        limit = min(available_tokens, self._settings.max_new_tokens)
        for last in self._client.stream(ids, limit, cache_prompt=reuse_cache, **self._sampling_parameters(request)):
            for reasoning, piece in splitter.feed(replace_surrogates(str(last.get("content", "")))):
                yield AnswerChunk(reasoning, piece)
        for reasoning, piece in splitter.close():
            yield AnswerChunk(reasoning, piece)
        limit_reason: FinishReason = "length" if self._settings.max_new_tokens <= available_tokens else "context"
        finish = limit_reason if last.get("stop_type") == "limit" else "stop"
        yield AnswerEnd(finish, len(ids), last.get("tokens_predicted"), self._context)

    def _prompt(self, request: GenerationRequest) -> tuple[list[int], bool]:
        """Return token ids, and whether they end inside the reasoning. Raises SettingsError if the template raises."""
        text = self._client.template([dict(message) for message in request.prompt.conversation.messages])
        return self._client.tokenize(text, add_special=True), text.rstrip().endswith(self._settings.reasoning_tags[0])

    def _sampling_parameters(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the sampling parameters; {} for greedy decoding."""
        settings = self._settings
        if not settings.temperature:
            return {}
        seed = int(digests.hash_json([settings.seed, request.prompt.digest, request.sample])[:8], 16) & 0x7FFFFFFF
        return {
            "temperature": settings.temperature, "top_p": settings.top_p, "seed": seed,
            "samplers": ["top_p", "temperature"],
        }  # fmt: skip

    def close(self) -> None:
        """Stop the server."""
        if isinstance(self._client, llama_server.LlamaServer):
            self._client.close()


def load_backend(start: GenerationStart, callbacks: BackendCallbacks) -> LlamaBackend:
    """Start a server for the GGUF file of a generation.

    Raises:
        DamagedFileError, BaseModelError, RatchetError: see `llama_server.start_server`.
    """
    settings = start.generate
    context = max(DEFAULT_CONTEXT_TOKENS, settings.max_new_tokens + PROMPT_TOKENS)
    server = llama_server.start_server(Path(start.path), start.machine.threads or 1, context)
    training_context = server.model().get("n_ctx_train")
    if isinstance(training_context, int) and 0 < training_context < context:
        context = training_context
    return LlamaBackend(server, settings, context, callbacks)
