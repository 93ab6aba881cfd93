"""The dataset card, cards of selected answers, and cards of a teacher's outputs."""

from typing import Literal

from pydantic import Field

from ratchet.config.select import Select
from ratchet.storage.output_card import OutputCard
from ratchet.storage.records.base import Record


class LengthDistribution(Record):
    """Distribution of conversation lengths in tokens. Training rows count as often as they occur in an epoch."""

    least: int
    median: int
    p95: int
    greatest: int
    total: int
    trained: int
    """Trained tokens: the assistant's, end of turn included."""
    histogram: dict[int, int] = Field(default_factory=dict)
    """Rows by length, in bins of equal width that are named by their lower edge."""


class DroppedRows(Record):
    """Rows dropped for one reason."""

    count: int
    examples: tuple[str, ...]
    """The first few as `file:line`, with the value found."""


class TeacherProvenance(Record):
    """Provenance of a source that `ratchet select` wrote: answers of teachers."""

    teachers: tuple[str, ...]
    """Each teacher as named on the command line, with the start of its digest."""
    generations: tuple[str, ...]
    """Ids of the generations with the answers."""
    answers: int
    """Number of answers before selection."""
    rows: int
    """Number of selected answers."""
    filters: tuple[tuple[str, int], ...]
    """Filters in order, each with the number of answers it dropped."""
    training_rows: int
    """Rows of the source that are training rows of this dataset."""


class SourceCard(Record):
    """A source and its rows."""

    files: dict[str, str]
    """SHA-256 of each file; for a dataset of the Hub, its revision."""
    record_schema: str
    """Schema of its records, e.g. `columns question, answer`."""
    weight: float = 1
    split: str | None = None
    rows: int = 0
    """Rows read, malformed ones included."""
    teacher_provenance: TeacherProvenance | None = None


class BalanceReport(Record):
    """Effect of prepare.balance on the training rows."""

    by: str
    rows: int
    """Rows per category."""
    on_shortage: str
    before: dict[str, int]
    """Training rows by category, before balancing."""
    after: dict[str, int]
    """Training rows by category, as often as they occur in an epoch."""


class NearDuplicateCluster(Record):
    """Near-duplicate rows, of which one is kept."""

    kept: str
    """Place of the row that is kept."""
    dropped: tuple[str, ...]
    """Places of a few of the dropped rows."""
    size: int
    texts: tuple[str, ...]
    """Start of the text of the kept row, and of a dropped one."""


class NearDuplicateReport(Record):
    """Result of the search for near-duplicates."""

    threshold: float
    """Jaccard similarity of word shingles from which rows are near-duplicates."""
    shingle_words: int
    clusters: int
    across_splits: int
    """Dropped rows whose kept row is in another split, which would have been leakage."""
    contradicting: int = 0
    """Dropped rows whose label differs from that of the kept row."""
    largest: tuple[NearDuplicateCluster, ...]


class LeakageReport(Record):
    """Overlap with one evaluation set."""

    documents: int
    unchecked: int
    """Documents shorter than an n-gram; they are compared as a whole."""
    rows: int
    """Rows that share an n-gram with the evaluation set."""
    examples: tuple[str, ...]
    """Places of the first few, with the shared words."""


class TruncationReport(Record):
    """Truncated conversations."""

    rows: int = 0
    tokens: int = 0
    """Number of tokens removed."""


class SplitStratum(Record):
    """Rows with one value of the stratification field, or with one label."""

    rows: int
    splits: dict[str, int]


class DatasetCard(Record):
    """The prepared dataset: rows_in = rows_out + dropped rows."""

    digest: str
    """Digest of ids, token ids and masks of all splits, in order."""
    fields_digest: str = ""
    """Digest of the rows' groups and extra fields. Not part of `digest`, because training does not use them."""
    sources: dict[str, str]
    """SHA-256 of each source file."""
    base_digest: str
    """Digest of the base model whose tokenizer and template were used."""
    task: Literal["labels", "text"]
    rows_in: int
    rows_out: int
    dropped: dict[str, DroppedRows]
    splits: dict[str, int]
    lengths: dict[str, LengthDistribution]
    """By split."""
    labels: dict[str, int]
    """Training rows per label; empty if prepare.task is text."""
    source_cards: dict[str, SourceCard] = Field(default_factory=dict)
    """Sources by their name in params.yaml."""
    repeated: int = 0
    """Repetitions of training rows due to source weights or prepare.balance, in addition to rows_out."""
    balanced: BalanceReport | None = None
    teacher_rows: int = 0
    """Training rows that are a teacher's answers."""
    template: str = ""
    """SHA-256 of the chat template."""
    end_of_turn: str = ""
    """Token at the end of an answer."""
    wanted: dict[str, float] = Field(default_factory=dict)
    """Configured fraction of each split."""
    strata: dict[str, SplitStratum] = Field(default_factory=dict)
    """Rows by stratum (or label) and split; empty without either."""
    near_duplicates: NearDuplicateReport | None = None
    leaks: dict[str, LeakageReport] = Field(default_factory=dict)
    """By evaluation set."""
    truncated: dict[str, TruncationReport] = Field(default_factory=dict)
    """By split."""
    packing: dict[str, float] = Field(default_factory=dict)
    """Fill rate of packs by their capacity in tokens, if stage train packs the training rows."""
    missing_fields: dict[str, int] = Field(default_factory=dict)
    """Rows without a value, by field of prepare.extra_fields."""
    notes: tuple[str, ...] = ()
    """Notes for the reader, one sentence each."""


# Answers that `ratchet select` chose.

PROVENANCE = "provenance"
"""Key of a row's provenance."""


class TeacherGeneration(Record):
    """A generation with answers to select from."""

    generation: str
    """Id of the generation."""
    kind: str
    """base, adapter, merged, gguf or endpoint."""
    model_digest: str
    weight_format: str
    """Storage of the teacher's weights, in words."""
    prompts_digest: str
    answers_digest: str
    """SHA-256 of the output of `ratchet generate`."""
    temperature: float
    samples: int


class SelectionSpec(Record):
    """Everything that determines which answers are selected."""

    recipe_version: int = 1
    """Incremented when new code selects other answers with the same settings."""
    select: Select
    teachers: tuple[TeacherGeneration, ...]
    reward_files: dict[str, str]
    """SHA-256 of the project files in the reward's command."""


class FilterReport(Record):
    """Effect of one filter, in answers."""

    name: str
    dropped: int
    left: int
    examples: tuple[str, ...] = ()
    """The first few dropped ones: prompt id, sample number and reason."""


class SelectionCard(OutputCard):
    """Card of a data source that `ratchet select` wrote."""

    spec: SelectionSpec
    model_names: tuple[str, ...]
    """The teachers as named on the command line; the spec identifies them."""
    prompts: int
    """Number of prompts, counted in each generation."""
    answers: int
    filters: tuple[FilterReport, ...]
    """Filters in order."""
    without_reference: int = 0
    """Prompts without a reference answer, to which select.reference: match does not apply."""
    rows: int
    prompts_with_rows: int
    """Prompts with at least one selected row."""


# A teacher's probabilities for the training rows, from `ratchet distill`.

DISTILLATION_CARD = "distill.json"
RERUN_HINT = "run `ratchet distill`"


class DistillationCard(Record):
    """Card of experiments/distill. The probabilities are next to it, in shard-NNNNN.safetensors."""

    digest: str
    """Digest of the shards."""
    teacher: str
    """Directory of the teacher, as in params.yaml."""
    teacher_digest: str
    """Digest of the teacher's files."""
    data_digest: str
    """Digest of the dataset."""
    quantization: str
    compute_dtype: str
    temperature: float
    top_k: int
    rows: int
    positions: int
    """Answer positions in all training rows."""
    tokens: int
    """Tokens that both tokenizers have under the same ids."""
    teacher_rows: int
    """Rows of the teacher's embedding, padding included."""
    base_rows: int
    """Rows of the base's embedding, padding included."""
    teacher_parameters: int
    base_parameters: int
    teacher_loss: float
    """The teacher's loss on the answers of the data, in nats per token."""
    left_out: float
    """Mean total probability of the tokens outside the top_k, at the temperature; only the sum is saved."""
