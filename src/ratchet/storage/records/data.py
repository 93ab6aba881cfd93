"""The dataset card: what prepare made of the sources, every row accounted for."""

from typing import Literal

from pydantic import Field

from ratchet.config.selection import Select
from ratchet.storage.output_card import OutputCard
from ratchet.storage.records.base import Record


class LengthDistribution(Record):
    """Distribution of conversation lengths, in tokens; training rows as often as they come in an epoch."""

    least: int
    median: int
    p95: int
    greatest: int
    total: int
    trained: int
    """Tokens that are learned from: the assistant's, end of turn included."""
    histogram: dict[int, int] = Field(default_factory=dict)
    """Rows by length, in bins named by their lower edge; the widths are those of the edges' steps."""


class DroppedRows(Record):
    """Rows left out for one reason."""

    count: int
    examples: tuple[str, ...]
    """Where the first few stand (file:line), with what was found there."""


class TeacherProvenance(Record):
    """That a source is answers of a teacher, which `ratchet select` chose."""

    teachers: tuple[str, ...]
    """How each was asked for, with the beginning of its digest."""
    generations: tuple[str, ...]
    """Ids of the generations that the answers come from."""
    answers: int
    """Chosen from."""
    rows: int
    """Chosen."""
    filters: tuple[tuple[str, int], ...]
    """What left answers out, in the order of the filters, and how many."""
    training_rows: int
    """Rows of it that are training rows here."""


class SourceCard(Record):
    """One source and what it gave."""

    files: dict[str, str]
    """SHA-256 of each file; for a dataset of the hub, its revision."""
    shape: str
    """What its records were taken for, e.g. `columns question, answer`."""
    weight: float = 1
    split: str | None = None
    rows: int = 0
    """Rows read, faults included."""
    taught: TeacherProvenance | None = None


class BalanceReport(Record):
    """What prepare.balance did to the training rows."""

    by: str
    rows: int
    """Of each category."""
    fewer: str
    before: dict[str, int]
    """Training rows by category."""
    after: dict[str, int]
    """The same, as often as they come in an epoch."""


class NearDuplicateCluster(Record):
    """Rows that are almost the same, of which one is kept."""

    kept: str
    """Where the row that stays stands."""
    dropped: tuple[str, ...]
    """Where the others stand; at most a few are named."""
    size: int
    texts: tuple[str, ...]
    """The beginning of the kept row's text and of one that was dropped."""


class NearDuplicateReport(Record):
    """What the search for near-duplicates found."""

    threshold: float
    """Jaccard similarity of word shingles from which rows count as the same."""
    shingle_words: int
    clusters: int
    across_splits: int
    """Dropped rows whose kept row is in another split: they would have leaked."""
    contradicting: int = 0
    """Dropped rows with another label than the row kept for them."""
    largest: tuple[NearDuplicateCluster, ...]


class LeakageReport(Record):
    """Overlap with one evaluation set."""

    documents: int
    unchecked: int
    """Documents too short for an n-gram; they are compared as a whole."""
    rows: int
    """Rows of the data that share an n-gram with it."""
    examples: tuple[str, ...]
    """Where the first few stand, with the words that are shared."""


class TruncationReport(Record):
    """Conversations that were cut."""

    rows: int = 0
    tokens: int = 0
    """Tokens cut off."""


class SplitStratum(Record):
    """One value of the field that the split is stratified by, or one label."""

    rows: int
    splits: dict[str, int]


class DatasetCard(Record):
    """What prepare made: rows_in = rows_out + the drops."""

    digest: str
    """Fingerprint of ids, token ids and masks of all splits, in order."""
    fields_digest: str = ""
    """Fingerprint of the rows' groups and kept fields; no part of `digest`, for nobody learns from them."""
    sources: dict[str, str]
    """SHA-256 of each source file."""
    base_digest: str
    """Base model whose tokenizer and template were used."""
    task: Literal["labels", "text"]
    rows_in: int
    rows_out: int
    dropped: dict[str, DroppedRows]
    splits: dict[str, int]
    lengths: dict[str, LengthDistribution]
    """By split."""
    labels: dict[str, int]
    """Training rows of each label; empty for a text task."""
    source_cards: dict[str, SourceCard] = Field(default_factory=dict)
    """By the source's name in params.yaml."""
    repeated: int = 0
    """Training rows written again because of their source's weight or prepare.balance, beside rows_out."""
    balanced: BalanceReport | None = None
    taught_rows: int = 0
    """Training rows that are answers of a teacher."""
    template: str = ""
    """SHA-256 of the chat template."""
    end_of_turn: str = ""
    """Token that ends an answer."""
    wanted: dict[str, float] = Field(default_factory=dict)
    """Fraction of each split as set."""
    strata: dict[str, SplitStratum] = Field(default_factory=dict)
    """Rows by stratum (or label) and split; empty where neither is set."""
    near_duplicates: NearDuplicateReport | None = None
    leaks: dict[str, LeakageReport] = Field(default_factory=dict)
    """By evaluation set."""
    truncated: dict[str, TruncationReport] = Field(default_factory=dict)
    """By split."""
    packing: dict[str, float] = Field(default_factory=dict)
    """Fill rate of packs, by their capacity in tokens, as stage train would pack the training rows."""
    missing_fields: dict[str, int] = Field(default_factory=dict)
    """Rows (of those that could be encoded) without a value, by field of prepare.keep."""
    notes: tuple[str, ...] = ()
    """What a reader should know, a sentence each."""


# What `ratchet select` made: which answers of which teachers a data source holds, and why.

PROVENANCE = "provenance"
"""Name of what a row says of where it comes from."""


class TeacherGeneration(Record):
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
    teachers: tuple[TeacherGeneration, ...]
    reward_files: dict[str, str]
    """SHA-256 of those words of the reward's command that name a file of the project."""


class FilterReport(Record):
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
    filters: tuple[FilterReport, ...]
    """In their order; `left` of the last one is the rows."""
    without_reference: int = 0
    """Prompts without a reference, which select.reference: match takes as they are."""
    rows: int
    taught_prompts: int
    """Prompts with at least one row."""


# What a teacher has said about the training rows, as `ratchet distill` seals it.

CARD = "distill.json"
AGAIN = "run `ratchet distill`"


class DistillationCard(Record):
    """The card of experiments/distill. Beside it lie the probabilities: shard-NNNNN.safetensors."""

    digest: str
    """Of the shards: what a student learns from."""
    teacher: str
    """Its directory, as written in params.yaml."""
    teacher_digest: str
    """Fingerprint of its files."""
    data_digest: str
    """Of the rows that it was asked about."""
    quantization: str
    compute_dtype: str
    temperature: float
    top_k: int
    rows: int
    positions: int
    """Answer tokens of all training rows."""
    tokens: int
    """That both tokenizers know, with the same ids."""
    teacher_rows: int
    """Of its embedding: it may be filled up beyond the tokens."""
    base_rows: int
    """The same of the base."""
    teacher_parameters: int
    base_parameters: int
    teacher_loss: float
    """Of the given answers, in nats a token: how well it knows the task itself."""
    left_out: float
    """Mean probability, at the temperature, of all tokens beyond the top_k: what is known of them is their sum."""
