"""A server that answers, OpenAI-compatible, anywhere: many questions at once, as machine.endpoint says."""

from collections.abc import Callable, Iterator

from ratchet.config.generate import Generate
from ratchet.errors import DataError, SettingsError
from ratchet.inference.backend import AnswerChunk, AnswerEnd, BackendCallbacks, GenerationRequest, Speech
from ratchet.inference.reasoning import ReasoningSplitter
from ratchet.inference.spec import Finish, GenerationAnswer, GenerationStart, replace_surrogates
from ratchet.models.runtimes.openai_client import ChatRequest, OpenAiEndpoint, SamplingOptions
from ratchet.models.runtimes.openai_requests import ChatReply
from ratchet.storage import digests

_FINISH: dict[str, Finish] = {
    "length": "length", "context": "context", "content_filter": "filtered", "refused": "refused",
}  # fmt: skip
"""What servers call it; whatever else they say, the model ended by itself."""
MOST_WAITING = 16
"""So many refusals, and no answer: the server refuses all."""


class OpenAIBackend:
    """Answers through a server. That the same prompt gets the same answer again is the server's to keep."""

    def __init__(self, endpoint: OpenAiEndpoint, settings: Generate, ties: BackendCallbacks) -> None:
        self._endpoint, self._settings, self._ties = endpoint, settings, ties
        self.about = {"device": "server", "compute_dtype": "as served"}

    def answers(self, questions: Iterator[GenerationRequest], stop: Callable[[], bool]) -> Iterator[GenerationAnswer]:
        """See Speaker."""

        def look() -> bool:
            self._ties.beat()  # who waits for the server has deadlines of its own
            return stop()

        refusals = _RequestRefusals(self._ties)
        for place, reply in self._endpoint.answers(map(self._asked, refusals.named(questions)), look):
            for where, one in refusals.of(place, reply):
                yield _parse_answer(where, one)
        if not stop():
            refusals.close()
        self._tell_notes()

    def spoken(self, question: GenerationRequest, keep: bool) -> Speech:
        """See Speaker. What a server keeps between requests is its own matter."""
        asked = self._asked(question)
        splitter = ReasoningSplitter(self._settings.reasoning_marks)
        for found in self._endpoint.streamed(asked):
            if isinstance(found, ChatReply):
                if found.refusal is not None:
                    raise DataError(f"prompt {question.prompt.id}: the server refuses it: {found.refusal}")
                yield from (AnswerChunk(reasoning, piece) for reasoning, piece in splitter.close())
                ended = _parse_answer(asked.place, found)
                yield AnswerEnd(ended.finish, ended.prompt_tokens, ended.tokens, self._endpoint.served().context_tokens)
            elif found.reasoning:
                yield AnswerChunk(True, replace_surrogates(found.text))
            else:
                yield from (
                    AnswerChunk(reasoning, piece) for reasoning, piece in splitter.feed(replace_surrogates(found.text))
                )
        self._tell_notes()

    def _tell_notes(self) -> None:
        notes, self._endpoint.notes = self._endpoint.notes, []
        for note in notes:
            self._ties.told("notice", {"text": note})

    def _asked(self, question: GenerationRequest) -> ChatRequest:
        settings = self._settings
        number = int(digests.hash_json([settings.seed, question.prompt.digest, question.sample])[:8], 16) & 0x7FFFFFFF
        drawn = SamplingOptions(
            settings.max_new_tokens,
            settings.temperature,
            settings.top_p,
            number if settings.temperature else None,
            True,
        )
        return ChatRequest(question.place, question.prompt.question.messages, drawn)

    def close(self) -> None:
        """Nothing is held between requests."""


class _RequestRefusals:
    """What a server refuses of single prompts. Before it has answered any, that may be the fault of all: it is waited
    for an answer, and without one the words of the first refusal are an error."""

    def __init__(self, ties: BackendCallbacks) -> None:
        self._ties = ties
        self._answered = ties.answered() > 0
        self._waiting: list[tuple[int, ChatReply]] = []
        self._names: dict[int, str] = {}
        """Of prompts under way, for people."""
        self._count = 0

    def named(self, questions: Iterator[GenerationRequest]) -> Iterator[GenerationRequest]:
        """The same questions, remembered; no more are asked while there are only refusals, and many."""
        for question in questions:
            self._names[question.place] = question.prompt.id
            yield question
            if len(self._waiting) >= MOST_WAITING and not self._answered:
                return

    def of(self, place: int, reply: ChatReply) -> list[tuple[int, ChatReply]]:
        """What can be recorded now."""
        self._ties.told("batch", {"rows": len(self._names) - len(self._waiting)})
        if reply.refusal is None:
            self._answered = True
            self._names.pop(place, None)
        elif not self._answered:
            self._waiting.append((place, reply))
            return []
        ready = [*self._waiting, (place, reply)]
        self._waiting = []
        for where, one in ready:
            self._tell(where, one)
        return ready

    def _tell(self, place: int, reply: ChatReply) -> None:
        """The first, the tenth, the hundredth: however many there are, the journal stays small."""
        if reply.refusal is None:
            return
        self._count += 1
        name, text = self._names.pop(place, ""), str(self._count)
        if text == "1":
            said = f"prompt {name} is recorded as refused, and the rest goes on: the server said {reply.refusal}"
        else:
            said = f"{self._count:,} prompts were refused by the server, the last of them {name} ({reply.refusal})"
        if text.rstrip("0") == "1":
            self._ties.told("notice", {"text": said})

    def close(self) -> None:
        """No more come. Raises SettingsError where nothing was answered."""
        if self._waiting:
            count, (place, first) = len(self._waiting), self._waiting[0]
            raise SettingsError(
                f"the server has answered none of {count:,} prompts and refused all, prompt {self._names[place]} with: "
                f"{first.refusal}"
            )


def _parse_answer(place: int, reply: ChatReply) -> GenerationAnswer:
    finish = _FINISH.get(reply.finish, "stop")
    reasoning = None if reply.reasoning is None else replace_surrogates(reply.reasoning)
    mean = reply.mean_log_probability
    nats = None if mean is None else round(mean, 4)
    if finish == "refused":  # as other speakers say it of prompts that cannot be asked
        return GenerationAnswer(place, "", finish, None, 0, 0.0)
    return GenerationAnswer(
        place, replace_surrogates(reply.text), finish, reply.prompt_tokens, reply.tokens, nats, False, reasoning
    )


def load_backend(start: GenerationStart, ties: BackendCallbacks) -> OpenAIBackend:
    """The server that a generation asks. Raises SettingsError for an address that is none."""
    address, _, model = start.path.partition("#")
    endpoint = OpenAiEndpoint(address, start.machine.endpoint, model or None, refusals=True)
    return OpenAIBackend(endpoint, start.generate, ties)
