"""What a generation is: everything that decides its answers, how and where its worker runs, and its directory's names.

spec.json  launch.json  journal.jsonl  prompts/prompts.jsonl  ledger.jsonl  shards/shard-000000000/  result/
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from ratchet.config.generate import Generate
from ratchet.config.train import Train
from ratchet.inference.answer_records import answered
from ratchet.runs.spec import Spec, Start
from ratchet.storage.output_card import OutputCard
from ratchet.storage.records.base import BaseCard, Record

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


class Model(Record):
    """Which model answers, by content: where it lies is no part of it."""

    kind: Kind
    digest: str
    """Of the files of a base or a merged model; of a base and its adapter together; of a GGUF file; of what a server
    says of its model."""
    held: str
    """How its weights are held and computed with, in words."""


class GenerationSpec(Spec):
    """Everything that decides the answers; its digest is the generation's id."""

    folders: ClassVar[tuple[str, ...]] = ("shards",)

    recipe_version: int = 1
    """Raised when a change of code changes what the same settings answer."""
    generate: Generate
    """Only what decides answers (Generate.decisive)."""
    prompts_digest: str
    """Of ids and prompts with their references and kept fields, in their order."""
    model: Model
    template_digest: str
    """Of the project's own chat template; empty: the model's own, which its digest covers."""


class GenerationStart(Start):
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
        return max(told, answered(paths.shards.glob(f"*/{ANSWERS}"), paths.ledger))

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


class Card(OutputCard):
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
