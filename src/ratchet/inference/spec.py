"""An answer as ledger, shards and result hold it."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args

from ratchet.config.generate import Generate
from ratchet.config.train import Train
from ratchet.runs.directory import BaseRunSpec, LaunchSpec
from ratchet.runs.journal import JournalReader
from ratchet.storage.output_card import OutputCard
from ratchet.storage.records.base import BaseCard, Record

Finish = Literal["stop", "length", "context", "memory", "invalid", "refused", "filtered"]
"""How an answer ended.

stop      by itself
length    at generate.max_new_tokens
context   the model's context does not hold prompt and answer: nothing was computed, or it was cut there
memory    it does not fit into memory even alone
invalid   the model gave numbers that are none (NaN)
refused   the chat template cannot write the prompt, or a text in it would end or begin a turn
filtered  the server that was asked keeps the answer back
"""
FINISHES: tuple[Finish, ...] = get_args(Finish)


@dataclass(frozen=True)
class GenerationAnswer:
    """What was said to one prompt, or why nothing was."""

    place: int
    """Number of the prompt times generate.samples, plus number of the sample."""
    said: str
    """The whole text, reasoning and its marks included, without control tokens."""
    finish: Finish
    prompt_tokens: int | None
    """None: whoever answered does not say."""
    tokens: int | None
    """Of the answer, its end and its reasoning included."""
    nats: float | None
    """Mean log-probability of the answer's tokens under the model, before any temperature; None: not known. The record
    of an answer without tokens has null."""
    opened: bool = False
    """The prompt ends within reasoning, so the text begins there."""
    reasoning: str | None = None
    """Set apart by the server that answered; then it is not in `said`."""
    labels: list[float | None] | None = None
    """Log-probability (nats) of each of generate.labels as the whole answer, in their order, to 4 decimals; None: not
    known, of one or of all."""

    def line(self) -> str:
        """As JSON, with the line's end; the same answer gives the same bytes."""
        return json.dumps(asdict(self), sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"

    @classmethod
    def of(cls, data: dict[str, Any]) -> "GenerationAnswer":
        """What `line` or the ledger says. Raises TypeError or ValueError when it is none."""
        found = cls(**data)
        if not isinstance(found.place, int) or not isinstance(found.said, str) or found.finish not in FINISHES:
            raise ValueError(f"no answer: {data}")
        return found


def replace_surrogates(text: str) -> str:
    """A text that a file can hold: halves of surrogate pairs, which some servers send, become the replacement sign."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if not text.isascii() else text


# How many answers a generation has, as its files say; read, not checked, by whoever does not hold its ledger.


def count_answered(shards: Iterable[Path], ledger: Path) -> int:
    """Places that have an answer.

    Args:
        shards: files with the answers of sealed shards, a line each; the folder of each is named by its first place.
        ledger: lines of answers, some of which may stand in shards, too.
    """
    places = set[int]()
    for path in shards:
        first = path.parent.name.removeprefix("shard-")
        if first.isdecimal():  # not one that is being written
            with path.open("rb") as stream:
                places.update(range(int(first), int(first) + sum(1 for _ in stream)))
    for event in JournalReader(ledger).read():
        try:
            places.add(GenerationAnswer.of(event.data).place)
        except (TypeError, ValueError):
            continue
    return len(places)


# What a generation is: everything that decides its answers, how and where its worker runs, and its directory's names.
#
# spec.json  launch.json  journal.jsonl  prompts/prompts.jsonl  ledger.jsonl  shards/shard-000000000/  result/

Kind = Literal["base", "adapter", "merged", "gguf", "endpoint"]
"""`base`: the base as it is trained against; `adapter`: the same with the trained adapter; `merged`: plain weights of a
Hugging Face directory, ours or another; `gguf`: a file that llama.cpp runs; `endpoint`: a server somewhere."""

PROMPTS = "prompts.jsonl"
ANSWERS = "answers.jsonl"
"""Of a shard and of the result."""
SHARD = "shard"
"""Kind of a sealed shard."""
ASKED = "prompts"
"""Kind of the sealed prompts."""
CARD = "card.json"


class ModelIdentity(Record):
    """Which model answers, by content: where it lies is no part of it."""

    kind: Kind
    digest: str
    """Of the files of a base or a merged model; of a base and its adapter together; of a GGUF file; of what a server
    says of its model."""
    held: str
    """How its weights are held and computed with, in words."""


class GenerationSpec(BaseRunSpec):
    """Everything that decides the answers; its digest is the generation's id."""

    folders: ClassVar[tuple[str, ...]] = ("shards",)

    recipe_version: int = 1
    """Raised when a change of code changes what the same settings answer."""
    generate: Generate
    """Only what decides answers (Generate.decisive)."""
    prompts_digest: str
    """Of ids and prompts with their references and kept fields, in their order."""
    model: ModelIdentity
    template_digest: str
    """Of the project's own chat template; empty: the model's own, which its digest covers."""


class GenerationStart(LaunchSpec):
    """How and where an attempt of a generation runs."""

    worker: ClassVar[str | None] = "ratchet.inference.worker_main"
    counted_in: ClassVar[Mapping[str, str]] = {"unit": "answers"}

    generate: Generate
    """As params.yaml has it: how answers are computed is read from here."""
    train: Train
    """How a base is held that answers with an adapter, or as it is."""
    path: str
    """Directory, file or address of the model."""
    adapter: str | None = None
    template: str | None = None
    """File of the project's own chat template."""
    base: BaseCard | None = None
    """Of the base, or of the one that a merged model was made of."""
    dtype: str = "auto"
    """Of plain weights."""

    def kept_step(self, root: Path, told: int) -> int:
        """Answers that are kept: a death may have come between the last of them and the journal's next line."""
        paths = GenerationPaths(root)
        return max(told, count_answered(paths.shards.glob(f"*/{ANSWERS}"), paths.ledger))

    def kept(self, step: int) -> str:
        """What of the run's work is safe after so many answers, in words."""
        return f"{step:,} answer{' is' if step == 1 else 's are'} kept"


@dataclass(frozen=True)
class GenerationPaths:
    """The names inside a generation's directory that other runs have not."""

    root: Path

    @property
    def prompts(self) -> Path:
        """Sealed before any worker starts: what is asked, a JSON line a prompt."""
        return self.root / "prompts"

    @property
    def ledger(self) -> Path:
        """Answers that are in no sealed shard yet, in the order in which they came."""
        return self.root / "ledger.jsonl"

    @property
    def shards(self) -> Path:
        """Sealed answers, a folder for so many consecutive places."""
        return self.root / "shards"

    @property
    def result(self) -> Path:
        """Sealed at the end: answers.jsonl and card.json."""
        return self.root / "result"

    def shard(self, first: int) -> Path:
        """Where the shard lies that begins with this place."""
        return self.shards / f"shard-{first:09d}"


class GenerationCard(OutputCard):
    """What a generation gave; lies beside its output."""

    spec: GenerationSpec
    id: str
    """Of the generation."""
    model_name: str
    """As it was asked for on the command line; the spec has its identity."""
    prompts: int
    faults: int
    """Records of the source that are no prompts and were left out (generate.skip_faults)."""
    answers: int
    finish: dict[str, int]
    """Answers by how they ended."""
    prompt_tokens: int
    tokens: int
    """Of all answers, their ends and reasoning included."""
