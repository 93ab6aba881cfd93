"""Interface of inference backends: a model in memory, llama.cpp, or an OpenAI-compatible server."""

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ratchet.inference.prompts import Prompt
from ratchet.inference.spec import FinishReason, GenerationAnswer


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one answer to one prompt."""

    index: int
    """Number of the answer in the generation."""
    sample: int
    """Number of the answer to this prompt, from 0."""
    prompt: Prompt


class AnswerChunk(NamedTuple):
    """A piece of a streamed answer."""

    is_reasoning: bool
    text: str


class AnswerEnd(NamedTuple):
    """The end of a streamed answer."""

    finish: FinishReason
    prompt_tokens: int | None
    """None if the server does not report it."""
    tokens: int | None
    """Tokens of the answer, including reasoning and the end-of-turn token."""
    context_tokens: int | None
    """Context length: limit of the tokens of prompt and answer together."""


AnswerStream = Generator[AnswerChunk | AnswerEnd, None, None]
"""A streamed answer; closing the generator stops the answer."""


@dataclass(frozen=True)
class BackendCallbacks:
    """Callbacks from a backend to the run."""

    heartbeat: Callable[[], None]
    """Called for every unit of work."""
    on_event: Callable[[str, Mapping[str, Any]], None]
    """Called with the kind and data of an event: `batch` (rows, budget_tokens, ...), `budget` (action, tokens,
    failed_tokens), `notice` (text), and events of the decoder."""
    before_forward: Callable[[int], None]
    """Called before a forward pass with its number of padded tokens; may raise MemoryError to simulate a shortage."""
    answer_count: Callable[[], int] = lambda: 0
    """Returns the number of answers of the run."""


class GenerationBackend(Protocol):
    """Generates answers to prompts."""

    @property
    def device_info(self) -> Mapping[str, str]:
        """`device` and `compute_dtype`, for logs."""
        ...

    def generate(
        self, requests: Iterator[GenerationRequest], should_stop: Callable[[], bool]
    ) -> Iterator[GenerationAnswer]:
        """Yield an answer to each request, in any order. An answer depends only on its request.

        Args:
            requests: the requests, consumed as needed.
            should_stop: checked regularly; the backend ends early once it returns True.
        """
        ...

    def stream(self, request: GenerationRequest, reuse_cache: bool) -> AnswerStream:
        """Stream one answer; the last item is an `AnswerEnd`.

        Args:
            request: the request.
            reuse_cache: whether to reuse computed keys and values for the next request, as far as the prompts begin
                with the same tokens. If two tokens are almost equally likely, the reuse may change the answer.

        Raises:
            DataError: the prompt cannot be rendered.
            RatchetError: the backend does not answer, or stopped in the middle.
        """
        ...

    def close(self) -> None:
        """Release all resources."""
        ...
