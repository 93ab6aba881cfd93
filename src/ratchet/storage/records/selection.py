"""What `ratchet select` made: which answers of which teachers a data source holds, and why."""

from ratchet.config.selection import Select
from ratchet.storage.output_card import OutputCard
from ratchet.storage.records.base import Record

PROVENANCE = "provenance"
"""Name of what a row says of where it comes from."""


class Teacher(Record):
    """One generation whose answers were chosen from."""

    generation: str
    """Its id."""
    kind: str
    """base, adapter, merged, gguf or endpoint."""
    model_digest: str
    held: str
    """How the teacher's weights were held, in words."""
    prompts_digest: str
    answers_digest: str
    """SHA-256 of the output of `ratchet generate`."""
    temperature: float
    samples: int


class SelectionSpec(Record):
    """Everything that decides which answers are taken."""

    recipe_version: int = 1
    """Raised when a change of code chooses others by the same settings."""
    select: Select
    teachers: tuple[Teacher, ...]
    reward_files: dict[str, str]
    """SHA-256 of those words of the reward's command that name a file of the project."""


class Filter(Record):
    """What one filter did, in answers."""

    name: str
    dropped: int
    left: int
    examples: tuple[str, ...] = ()
    """The first few that were left out: id of the prompt, number of the sample, and why."""


class SelectionCard(OutputCard):
    """Lies beside the data source that `ratchet select` wrote."""

    spec: SelectionSpec
    model_names: tuple[str, ...]
    """The teachers, as they were asked for on the command line; the spec has their identity."""
    prompts: int
    """Asked, each as often as it is in an output of its own."""
    answers: int
    filters: tuple[Filter, ...]
    """In their order; `left` of the last one is the rows."""
    without_reference: int = 0
    """Prompts without a reference, which select.reference: match takes as they are."""
    rows: int
    taught_prompts: int
    """Prompts with at least one row."""
