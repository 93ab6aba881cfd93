"""Records and files of a generation: its specification, answers and output card. Splits reasoning from answers.

Files in the run directory of a generation:
spec.json  launch.json  journal.jsonl  prompts/prompts.jsonl  ledger.jsonl  shards/shard-000000000/  result/
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple, get_args

from ratchet.config.generate import Generate
from ratchet.config.train import Train
from ratchet.runs.directory import BaseRunSpec, LaunchSpec
from ratchet.runs.journal import JournalReader
from ratchet.storage.output_card import OutputCard
from ratchet.storage.records.base import BaseCard, Record

Kind = Literal["base", "adapter", "merged", "gguf", "endpoint"]
"""`base`: the base model as loaded for training; `adapter`: the base with the trained adapter; `merged`: the weights of
a Hugging Face directory; `gguf`: a file for llama.cpp; `endpoint`: an OpenAI-compatible server."""
FinishReason = Literal["stop", "length", "context", "memory", "invalid", "refused", "filtered"]
"""Why an answer ended.

stop      the model ended the answer
length    the answer reached generate.max_new_tokens
context   prompt and answer do not fit in the model's context: nothing was computed, or the answer was cut
memory    prompt and answer do not fit in memory, even without other prompts
invalid   the model returned NaN
refused   the chat template cannot write the prompt, or a text in it contains a control token
filtered  the server withheld the answer
"""
FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
PROMPTS = "prompts.jsonl"
ANSWERS = "answers.jsonl"
"""File with answers in a shard and in the result."""
SHARD_KIND = "shard"
"""Kind of the sealed directory of a shard."""
PROMPTS_KIND = "prompts"
"""Kind of the sealed directory of the prompts."""
CARD = "card.json"


@dataclass(frozen=True)
class GenerationAnswer:
    """One answer to a prompt, in the ledger and in shards."""

    index: int
    """Number of the prompt times generate.samples, plus the number of the sample."""
    text: str
    """The generated text with reasoning and its tags, without control tokens."""
    finish: FinishReason
    prompt_tokens: int | None
    """None if the server does not report it."""
    tokens: int | None
    """Tokens of the answer, including reasoning and the end-of-turn token."""
    mean_log_probability: float | None
    """Mean log-probability, in nats, of the answer's tokens under the model at temperature 1; None if unknown. The
    output record of an answer without tokens has null."""
    starts_in_reasoning: bool = False
    """Whether the prompt ends inside the reasoning, so that the text begins with reasoning."""
    reasoning: str | None = None
    """Reasoning that the server returned separately; it is not in `text`."""
    label_log_probabilities: list[float | None] | None = None
    """Log-probability, in nats to 4 decimals, of each of generate.labels as the whole answer, in order. An
    entry is None if it is unknown; the value is None if no likelihoods were computed."""

    def to_line(self) -> str:
        """Return a line of JSON; equal answers give equal bytes."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def from_event(cls, data: dict[str, Any]) -> "GenerationAnswer":
        """Create an answer from a JSON object. Raises TypeError or ValueError if it is not an answer."""
        answer = cls(**data)
        if not isinstance(answer.index, int) or not isinstance(answer.text, str) or answer.finish not in FINISH_REASONS:
            raise ValueError(f"not an answer: {data}")
        return answer


def count_answered(shards: Iterable[Path], ledger: Path) -> int:
    """Count the answers of a generation from its files, without verifying them.

    Args:
        shards: answer files of sealed shards, with one line per answer; the folder's name contains the first index.
        ledger: the ledger; its answers may also be in shards.
    """
    indices = set[int]()
    for path in shards:
        first = path.parent.name.removeprefix("shard-")
        if first.isdecimal():  # false for a shard that is being written
            with path.open("rb") as stream:
                indices.update(range(int(first), int(first) + sum(1 for _ in stream)))
    for event in JournalReader(ledger).read():
        try:
            indices.add(GenerationAnswer.from_event(event.data).index)
        except (TypeError, ValueError):
            continue
    return len(indices)


class ModelIdentity(Record):
    """The model of a generation, identified by content and not by path."""

    kind: Kind
    digest: str
    """Digest of the files of a base or merged model, of a base with its adapter, of a GGUF file, or of the information
    that a server returns about its model."""
    weight_format: str
    """Format of the weights and precision of the computation, in words."""


class GenerationSpec(BaseRunSpec):
    """Everything that determines the answers; its digest is the id of the generation."""

    subdirectories: ClassVar[tuple[str, ...]] = ("shards",)

    recipe_version: int = 1
    """Incremented when a code change makes the same settings give other answers."""
    generate: Generate
    """Only the settings that determine answers (Generate.decisive)."""
    prompts_digest: str
    """Digest of ids, prompts, references and extra fields, in order."""
    model: ModelIdentity
    template_digest: str
    """Digest of the project's own chat template; empty for the model's template, which the model's digest covers."""


class GenerationStart(LaunchSpec):
    """How an attempt of a generation runs; it does not change the answers."""

    worker: ClassVar[str | None] = "ratchet.inference.worker_main"
    work_unit: ClassVar[Mapping[str, str]] = {"unit": "answers"}

    generate: Generate
    """Section `generate` of params.yaml, including the settings that do not change answers."""
    train: Train
    """Section `train`, which determines how the base is loaded."""
    path: str
    """Directory or file of the model, or address of the server."""
    adapter: str | None = None
    template: str | None = None
    """File with the project's own chat template."""
    base: BaseCard | None = None
    """Card of the base model; for a merged model, of the base that it was merged from."""
    dtype: str = "auto"
    """Data type of a merged model."""

    def saved_step(self, root: Path, reported: int) -> int:
        """Count the saved answers; a worker may have crashed after saving answers and before logging them."""
        paths = GenerationPaths(root)
        return max(reported, count_answered(paths.shards.glob(f"*/{ANSWERS}"), paths.ledger))

    def describe_saved(self, step: int) -> str:
        """Describe the saved work after `step` answers."""
        return f"{step:,} answer{' is' if step == 1 else 's are'} kept"


@dataclass(frozen=True)
class GenerationPaths:
    """Paths in the run directory of a generation, in addition to those of every run."""

    root: Path

    @property
    def prompts(self) -> Path:
        """Sealed directory with the prompts, written before a worker starts."""
        return self.root / "prompts"

    @property
    def ledger(self) -> Path:
        """Answers that are not in a sealed shard yet, in order of arrival."""
        return self.root / "ledger.jsonl"

    @property
    def shards(self) -> Path:
        """Folder with sealed shards of consecutive answers."""
        return self.root / "shards"

    @property
    def result(self) -> Path:
        """Sealed directory with the final answers.jsonl and card.json."""
        return self.root / "result"

    def shard(self, first: int) -> Path:
        """Return the path of the shard whose first answer has this index."""
        return self.shards / f"shard-{first:09d}"


class GenerationCard(OutputCard):
    """Summary of a generation, stored next to its output."""

    spec: GenerationSpec
    id: str
    """Id of the generation."""
    model_name: str
    """The value of --model; the spec has the identity of the model."""
    prompts: int
    faults: int
    """Number of records that are not valid prompts and were left out (generate.skip_invalid)."""
    answers: int
    finish: dict[str, int]
    """Number of answers for each reason to end."""
    prompt_tokens: int
    tokens: int
    """Tokens of all answers, including reasoning and end-of-turn tokens."""


# Text of answers.


class ReasoningParts(NamedTuple):
    """Reasoning and answer of a text, both stripped of outer white space."""

    reasoning: str | None
    """None if the text has no reasoning."""
    answer: str


class ReasoningSplitter:
    """Splits a stream of text into reasoning and answer; a tag may be divided between pieces.

    Args:
        tags: the tags that begin and end the reasoning.
        starts_in_reasoning: whether the prompt ends with the begin tag, so that the text begins with reasoning.
    """

    def __init__(self, tags: Sequence[str], starts_in_reasoning: bool = False) -> None:
        self._tags = tuple(tags)
        self.inside = starts_in_reasoning
        """Whether the next character belongs to the reasoning."""
        self._buffer = ""
        """Text that may be the beginning of a tag."""

    def feed(self, text: str) -> Iterator[tuple[bool, str]]:
        """Yield (is reasoning, text) without tags; hold back text that may be the beginning of a tag."""
        self._buffer += text
        while self._buffer:
            tag = self._tags[self.inside]
            start = self._buffer.find(tag)
            if start >= 0:
                piece, self._buffer = self._buffer[:start], self._buffer[start + len(tag) :]
                if piece:
                    yield self.inside, piece
                self.inside = not self.inside
                continue
            longest = min(len(tag) - 1, len(self._buffer))
            kept = next(n for n in range(longest, -1, -1) if n == 0 or self._buffer.endswith(tag[:n]))
            piece, self._buffer = self._buffer[: len(self._buffer) - kept], self._buffer[len(self._buffer) - kept :]
            if piece:
                yield self.inside, piece
            return

    def close(self) -> Iterator[tuple[bool, str]]:
        """Yield the text that is still held back."""
        if self._buffer:
            yield self.inside, self._buffer
        self._buffer = ""


def split_reasoning(text: str, tags: Sequence[str], starts_in_reasoning: bool = False) -> ReasoningParts:
    """Split a complete text.

    If the reasoning never ends, the answer is empty. If the first end tag has no begin tag before it, the text begins
    with reasoning even if `starts_in_reasoning` is false, because some servers omit the begin tag.
    """
    begin, end = tags
    if not starts_in_reasoning and end in text and text.find(end) < (text.find(begin) if begin in text else len(text)):
        starts_in_reasoning = True
    splitter = ReasoningSplitter(tags, starts_in_reasoning)
    pieces = [*splitter.feed(text), *splitter.close()]
    has_reasoning = starts_in_reasoning or begin in text
    reasoning = "".join(piece for is_reasoning, piece in pieces if is_reasoning).strip()
    answer = "".join(piece for is_reasoning, piece in pieces if not is_reasoning).strip()
    return ReasoningParts(reasoning if has_reasoning else None, answer)
