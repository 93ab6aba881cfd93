"""Who answers: one seam for a model in memory, a file that llama.cpp runs, and a server somewhere."""

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ratchet.inference.prompts import Prompt
from ratchet.inference.spec import Finish, GenerationAnswer


class GenerationRequest(NamedTuple):
    """One prompt, to be answered once."""

    place: int
    sample: int
    """Number of the answer to this prompt, from 0."""
    prompt: Prompt


class AnswerChunk(NamedTuple):
    """A piece of an answer, as it is given."""

    reasoning: bool
    text: str


class AnswerEnd(NamedTuple):
    """What is known at the end of an answer."""

    finish: Finish
    prompt_tokens: int | None
    """None: whoever answers does not say."""
    tokens: int | None
    """Of the answer, its end and its reasoning included."""
    context_tokens: int | None
    """What prompt and answer may have together."""


Speech = Generator[AnswerChunk | AnswerEnd, None, None]
"""An answer as it is given; closing it ends the answer."""


@dataclass(frozen=True)
class BackendCallbacks:
    """What a speaker has of the run that it speaks for."""

    beat: Callable[[], None]
    """To be called for every unit of work."""
    told: Callable[[str, Mapping[str, Any]], None]
    """Of what is worth telling: `batch` (rows, budget_tokens, ...), `budget` (action, tokens, failed_tokens), `notice`
    (text), and whatever else a speaker's engine tells of itself."""
    before_pass: Callable[[int], None]
    """Called with the padded tokens of each pass of a model; may raise MemoryError, as if they did not fit."""
    answered: Callable[[], int] = lambda: 0
    """How many answers the run has."""


class GenerationBackend(Protocol):
    """Answers questions."""

    @property
    def about(self) -> Mapping[str, str]:
        """`device` and `compute_dtype`, for people."""
        ...

    def answers(self, questions: Iterator[GenerationRequest], stop: Callable[[], bool]) -> Iterator[GenerationAnswer]:
        """An answer to each, as they come, in any order; the answer to a question depends on nothing but the question.

        Ends early once `stop` says so. Questions are taken as they are needed.
        """
        ...

    def spoken(self, question: GenerationRequest, keep: bool) -> Speech:
        """One answer in pieces, as they are given, for somebody who watches; the last thing is how it ended.

        Args:
            question: to be answered.
            keep: what was computed serves the next question too, as far as it begins in the same way. On a near tie
                the answer may then be another one.

        Raises:
            DataError: the question cannot be asked.
            RatchetError: whoever answers does not, or broke off.
        """
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...
