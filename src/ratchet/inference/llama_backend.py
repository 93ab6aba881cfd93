"""A GGUF file that answers, by llama.cpp's server as a child of ours: one question at a time, nothing reused."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ratchet.config.generate import Generate
from ratchet.errors import DataError, SettingsError
from ratchet.inference.backend import AnswerChunk, AnswerEnd, BackendCallbacks, GenerationRequest, Speech
from ratchet.inference.reasoning import ReasoningSplitter
from ratchet.inference.spec import Finish, GenerationAnswer, GenerationStart, replace_surrogates
from ratchet.models.runtimes import llama_server
from ratchet.models.runtimes.llama_server import LlamaClient
from ratchet.storage import digests

DEFAULT_CONTEXT_TOKENS = 4096
ROOM_TOKENS = 3072
"""Context beside the answer: for the prompt."""


class LlamaBackend:
    """Answers through a server.

    Draws are llama.cpp's own: the same build gives the same answers, and other answers than a model in memory.
    """

    def __init__(self, client: LlamaClient, settings: Generate, context_tokens: int, ties: BackendCallbacks) -> None:
        self._client, self._settings, self._context, self._ties = client, settings, context_tokens, ties
        self.about = {"device": "llama.cpp", "compute_dtype": "as in the file"}

    def answers(self, questions: Iterator[GenerationRequest], stop: Callable[[], bool]) -> Iterator[GenerationAnswer]:
        """See Speaker."""
        for question in questions:
            if stop():
                return
            self._ties.beat()
            yield self._answer(question)

    def _answer(self, question: GenerationRequest) -> GenerationAnswer:
        settings = self._settings
        try:
            ids, opened = self._prompt(question)
        except SettingsError as error:  # llama.cpp's template refuses these messages
            self._ties.told("notice", {"text": f"not asked: prompt {question.prompt.id}: {error}"})
            return GenerationAnswer(question.place, "", "refused", None, 0, 0.0)
        if len(ids) + settings.max_new_tokens > self._context:
            return GenerationAnswer(question.place, "", "context", len(ids), 0, 0.0, opened)
        body = {
            "cache_prompt": False, "n_probs": 1, "return_tokens": True, **self._drawn(question),
            "response_fields": ["content", "tokens", "stop_type", "completion_probabilities"],
        }  # fmt: skip
        found = self._client.completion(ids, settings.max_new_tokens, **body)
        said = [float(one["logprob"]) for one in found.get("completion_probabilities") or []]
        nats = round(sum(said) / len(said), 4) if said else None
        finish: Any = "length" if found["stop_type"] == "limit" else "stop"
        return GenerationAnswer(
            question.place, replace_surrogates(found["content"]), finish, len(ids), len(found["tokens"]), nats, opened
        )

    def spoken(self, question: GenerationRequest, keep: bool) -> Speech:
        """See Speaker. An answer has the room that the prompt leaves, and ends with it."""
        try:
            ids, opened = self._prompt(question)
        except SettingsError as error:
            raise DataError(f"prompt {question.prompt.id}: {error}") from None
        room = self._context - len(ids)
        if room < 1:
            yield AnswerEnd("context", len(ids), 0, self._context)
            return
        splitter, last = ReasoningSplitter(self._settings.reasoning_marks, opened), dict[str, Any]()
        most = min(room, self._settings.max_new_tokens)
        for last in self._client.streamed(ids, most, cache_prompt=keep, **self._drawn(question)):
            for reasoning, piece in splitter.feed(replace_surrogates(str(last.get("content", "")))):
                yield AnswerChunk(reasoning, piece)
        for reasoning, piece in splitter.close():
            yield AnswerChunk(reasoning, piece)
        limit: Finish = "length" if self._settings.max_new_tokens <= room else "context"
        finish = limit if last.get("stop_type") == "limit" else "stop"
        yield AnswerEnd(finish, len(ids), last.get("tokens_predicted"), self._context)

    def _prompt(self, question: GenerationRequest) -> tuple[list[int], bool]:
        """Token ids, and whether they end within reasoning. Raises SettingsError where the template refuses it."""
        text = self._client.template([dict(one) for one in question.prompt.question.messages])
        return self._client.tokenize(text, whole=True), text.rstrip().endswith(self._settings.reasoning_marks[0])

    def _drawn(self, question: GenerationRequest) -> dict[str, Any]:
        """How tokens are drawn; nothing: greedily."""
        settings = self._settings
        if not settings.temperature:
            return {}
        number = int(digests.hash_json([settings.seed, question.prompt.digest, question.sample])[:8], 16) & 0x7FFFFFFF
        found = {"temperature": settings.temperature, "top_p": settings.top_p, "seed": number}
        return {**found, "samplers": ["top_p", "temperature"]}

    def close(self) -> None:
        """End the server."""
        if isinstance(self._client, llama_server.LlamaServer):
            self._client.close()


def load_backend(start: GenerationStart, ties: BackendCallbacks) -> LlamaBackend:
    """Start the server on the file that a generation asks.

    Raises:
        DamagedFileError, BaseModelError, RatchetError: see `llama_server.start_server`.
    """
    settings = start.generate
    context = max(DEFAULT_CONTEXT_TOKENS, settings.max_new_tokens + ROOM_TOKENS)
    server = llama_server.start_server(Path(start.path), start.machine.threads or 1, context)
    trained = server.model().get("n_ctx_train")
    if isinstance(trained, int) and 0 < trained < context:
        context = trained
    return LlamaBackend(server, settings, context, ties)
