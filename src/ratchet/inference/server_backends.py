"""Inference backends that use a server: llama.cpp as a child process for GGUF files, and OpenAI-compatible servers."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ratchet.config.generate import Generate
from ratchet.data.conversation import replace_surrogates
from ratchet.errors import DataError, SettingsError
from ratchet.inference.backend import AnswerChunk, AnswerEnd, AnswerStream, BackendCallbacks, GenerationRequest
from ratchet.inference.spec import (
    FinishReason,
    GenerationAnswer,
    GenerationStart,
    ReasoningSplitter,
)
from ratchet.models.runtimes import llama_server
from ratchet.models.runtimes.llama_server import LlamaClient
from ratchet.models.runtimes.openai_client import ChatReply, ChatRequest, OpenAiEndpoint, SamplingOptions
from ratchet.storage import digests

DEFAULT_CONTEXT_TOKENS = 4096
PROMPT_TOKENS = 3072
"""Number of tokens of the context that are reserved for the prompt."""

_FINISH_REASONS: dict[str, FinishReason] = {
    "length": "length", "context": "context", "content_filter": "filtered", "refused": "refused",
}  # fmt: skip
"""Finish reasons by the name that servers use; any other name means `stop`."""
MAX_PENDING_REFUSALS = 16
"""Number of refusals before the first answer after which no more requests are sent."""


def _sampling_seed(settings: Generate, request: GenerationRequest) -> int:
    """Return a seed of 31 bits that depends only on generate.seed, the prompt, and the sample."""
    return int(digests.hash_json([settings.seed, request.prompt.digest, request.sample])[:8], 16) & 0x7FFFFFFF


class LlamaBackend:
    """Generates answers with a llama.cpp server.

    llama.cpp samples the tokens: the same build gives the same answers, but these differ from those of `TorchBackend`.
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
        splitter, event = ReasoningSplitter(self._settings.reasoning_tags, starts_in_reasoning), dict[str, Any]()
        limit = min(available_tokens, self._settings.max_new_tokens)
        for event in self._client.stream(ids, limit, cache_prompt=reuse_cache, **self._sampling_parameters(request)):
            for reasoning, piece in splitter.feed(replace_surrogates(str(event.get("content", "")))):
                yield AnswerChunk(reasoning, piece)
        for reasoning, piece in splitter.close():
            yield AnswerChunk(reasoning, piece)
        limit_reason: FinishReason = "length" if self._settings.max_new_tokens <= available_tokens else "context"
        finish = limit_reason if event.get("stop_type") == "limit" else "stop"
        yield AnswerEnd(finish, len(ids), event.get("tokens_predicted"), self._context)

    def _prompt(self, request: GenerationRequest) -> tuple[list[int], bool]:
        """Return token ids, and whether these end inside the reasoning. Raises SettingsError if the template raises."""
        conversation = request.prompt.conversation
        text = self._client.template([dict(message) for message in conversation.messages], conversation.tools)
        return self._client.tokenize(text, add_special=True), text.rstrip().endswith(self._settings.reasoning_tags[0])

    def _sampling_parameters(self, request: GenerationRequest) -> dict[str, Any]:
        """Return the sampling parameters; {} for greedy decoding."""
        settings = self._settings
        if not settings.temperature:
            return {}
        return {
            "temperature": settings.temperature, "top_p": settings.top_p,
            "seed": _sampling_seed(settings, request), "samplers": ["temperature", "top_p"],
        }  # fmt: skip

    def close(self) -> None:
        """Stop the server."""
        if isinstance(self._client, llama_server.LlamaServer):
            self._client.close()


def load_llama_backend(start: GenerationStart, callbacks: BackendCallbacks) -> LlamaBackend:
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


class OpenAIBackend:
    """Generates answers with a server. Whether answers are reproducible depends on the server."""

    def __init__(self, endpoint: OpenAiEndpoint, settings: Generate, callbacks: BackendCallbacks) -> None:
        self._endpoint, self._settings, self._callbacks = endpoint, settings, callbacks
        self.device_info = {"device": "server", "compute_dtype": "as served"}

    def generate(
        self, requests: Iterator[GenerationRequest], should_stop: Callable[[], bool]
    ) -> Iterator[GenerationAnswer]:
        """See `GenerationBackend`."""

        def check_stop() -> bool:
            self._callbacks.heartbeat()  # requests have timeouts of their own
            return should_stop()

        refusals = _RequestRefusals(self._callbacks)
        chats = map(self._to_chat_request, _TrackedRequests(requests, refusals))
        for index, reply in self._endpoint.answers(chats, check_stop):
            for ready_index, ready_reply in refusals.handle(index, reply):
                yield _parse_answer(ready_index, ready_reply)
        if not should_stop():
            refusals.close()
        self._report_notes()

    def stream(self, request: GenerationRequest, reuse_cache: bool) -> AnswerStream:
        """See `GenerationBackend`. `reuse_cache` has no effect, since the server decides."""
        chat_request = self._to_chat_request(request)
        splitter = ReasoningSplitter(self._settings.reasoning_tags)
        for item in self._endpoint.stream(chat_request):
            if isinstance(item, ChatReply):
                if item.refusal is not None:
                    raise DataError(f"prompt {request.prompt.id}: the server refuses it: {item.refusal}")
                yield from (AnswerChunk(reasoning, piece) for reasoning, piece in splitter.close())
                answer = _parse_answer(chat_request.index, item)
                yield AnswerEnd(
                    answer.finish, answer.prompt_tokens, answer.tokens, self._endpoint.get_model().context_tokens
                )
            elif item.is_reasoning:
                yield AnswerChunk(True, replace_surrogates(item.text))
            else:
                yield from (
                    AnswerChunk(reasoning, piece) for reasoning, piece in splitter.feed(replace_surrogates(item.text))
                )
        self._report_notes()

    def _report_notes(self) -> None:
        notes, self._endpoint.notes = self._endpoint.notes, []
        for note in notes:
            self._callbacks.on_event("notice", {"text": note})

    def _to_chat_request(self, request: GenerationRequest) -> ChatRequest:
        settings = self._settings
        sampling = SamplingOptions(
            settings.max_new_tokens,
            settings.temperature,
            settings.top_p,
            _sampling_seed(settings, request) if settings.temperature else None,
            True,
        )
        return ChatRequest(request.index, request.prompt.conversation.messages, sampling)

    def close(self) -> None:
        """Do nothing: no connection stays open between requests."""


class _TrackedRequests(Iterator[GenerationRequest]):
    """Iterates over requests, and remembers their prompts. While there are too many refusals, `next` raises
    StopIteration; after an answer, it continues."""

    def __init__(self, requests: Iterator[GenerationRequest], refusals: "_RequestRefusals") -> None:
        self._requests, self._refusals = requests, refusals

    def __next__(self) -> GenerationRequest:
        if self._refusals.has_too_many:
            raise StopIteration
        request = next(self._requests)
        self._refusals.remember(request)
        return request


class _RequestRefusals:
    """Handles prompts that the server refuses.

    Until the server has answered a prompt, refusals may be caused by the settings, so refusals are held back. If all
    prompts are refused, the first refusal becomes an error.
    """

    def __init__(self, callbacks: BackendCallbacks) -> None:
        self._callbacks = callbacks
        self._has_answer = callbacks.answer_count() > 0
        self._pending: list[tuple[int, ChatReply]] = []
        self._prompt_ids: dict[int, str] = {}
        """Ids of pending prompts by index, for messages."""
        self._count = 0

    @property
    def has_too_many(self) -> bool:
        """Whether so many refusals are pending, without any answer, that no further request is sent for now."""
        return len(self._pending) >= MAX_PENDING_REFUSALS and not self._has_answer

    def remember(self, request: GenerationRequest) -> None:
        """Remember the id of the request's prompt."""
        self._prompt_ids[request.index] = request.prompt.id

    def handle(self, index: int, reply: ChatReply) -> list[tuple[int, ChatReply]]:
        """Return the replies that can be recorded now."""
        self._callbacks.on_event("batch", {"rows": len(self._prompt_ids) - len(self._pending)})
        if reply.refusal is None:
            self._has_answer = True
            self._prompt_ids.pop(index, None)
        elif not self._has_answer:
            self._pending.append((index, reply))
            return []
        ready = [*self._pending, (index, reply)]
        self._pending = []
        for ready_index, ready_reply in ready:
            self._report(ready_index, ready_reply)
        return ready

    def _report(self, index: int, reply: ChatReply) -> None:
        """Report the first, tenth, hundredth (and so on) refusal, so that the journal stays small."""
        if reply.refusal is None:
            return
        self._count += 1
        prompt_id, text = self._prompt_ids.pop(index, ""), str(self._count)
        if text == "1":
            notice = (
                f"prompt {prompt_id} is recorded as refused; the others continue. The server reported: {reply.refusal}"
            )
        else:
            notice = f"the server refused {self._count:,} prompts, most recently {prompt_id} ({reply.refusal})"
        if text.rstrip("0") == "1":
            self._callbacks.on_event("notice", {"text": notice})

    def close(self) -> None:
        """Raise SettingsError if the server refused all prompts."""
        if self._pending:
            count, (index, first) = len(self._pending), self._pending[0]
            raise SettingsError(
                f"the server refused all {count:,} prompts that were sent, prompt {self._prompt_ids[index]} with: "
                f"{first.refusal}"
            )


def _parse_answer(index: int, reply: ChatReply) -> GenerationAnswer:
    finish = _FINISH_REASONS.get(reply.finish, "stop")
    reasoning = None if reply.reasoning is None else replace_surrogates(reply.reasoning)
    mean = reply.mean_log_probability
    nats = None if mean is None else round(mean, 4)
    if finish == "refused":  # recorded like prompts that other backends skip
        return GenerationAnswer(index, "", finish, None, 0, 0.0)
    return GenerationAnswer(
        index, replace_surrogates(reply.text), finish, reply.prompt_tokens, reply.tokens, nats, False, reasoning
    )


def load_openai_backend(start: GenerationStart, callbacks: BackendCallbacks) -> OpenAIBackend:
    """Create the backend for a server. Raises SettingsError for an invalid address."""
    address, _, model = start.path.partition("#")
    endpoint = OpenAiEndpoint(address, start.machine.endpoint, model or None, returns_refusals=True)
    return OpenAIBackend(endpoint, start.generate, callbacks)
