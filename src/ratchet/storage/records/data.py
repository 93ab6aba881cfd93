"""Cards of data: the prepared dataset, answers that `ratchet select` chose, and outputs of a teacher."""

from typing import Literal

from pydantic import Field

from ratchet.config.select import Select
from ratchet.storage.output_card import OutputCard
from ratchet.storage.records.base import Record

PROVENANCE = "provenance"
"""Key of a row's provenance, in a source that `ratchet select` wrote."""

DISTILLATION_CARD = "distill.json"
RERUN_HINT = "run `ratchet distill`"


class LengthDistribution(Record):
    """Distribution of conversation lengths in tokens. A training row counts as often as it occurs in an epoch."""

    least: int
    median: int
    p95: int
    greatest: int
    total: int
    trained: int
    """Number of trained tokens: tokens of the assistant, end of turn included."""
    histogram: dict[int, int] = Field(default_factory=dict)
    """Number of rows by length, in bins of equal width. A key is the lower edge of a bin."""


class DroppedRows(Record):
    """Rows dropped for one reason."""

    count: int
    examples: tuple[str, ...]
    """First few rows as `file:line`, with the value that was found."""


class FlawedRows(Record):
    """Rows that fail one check of their text (prepare.quality)."""

    count: int
    is_dropped: bool
    """Whether prepare.quality.drop names the check, so that the rows are dropped."""
    examples: tuple[str, ...]
    """First few rows as `file:line`, with the flaw that was found."""


class TeacherProvenance(Record):
    """Provenance of a source that `ratchet select` wrote, which contains answers of teachers."""

    teachers: tuple[str, ...]
    """Teachers as named on the command line, with the start of their digests."""
    generations: tuple[str, ...]
    """Ids of the generations with the answers."""
    answers: int
    """Number of answers before selection."""
    rows: int
    """Number of selected answers."""
    filters: tuple[tuple[str, int], ...]
    """Filters in order, each with the number of answers that the filter dropped."""
    training_rows: int
    """Number of rows of the source that are training rows of this dataset."""


class SourceCard(Record):
    """A source and its rows."""

    files: dict[str, str]
    """SHA-256 of each file, or the revision of a dataset of the Hub."""
    record_schema: str
    """Schema of its records, e.g. `columns question, answer`."""
    weight: float = 1
    split: str | None = None
    rows: int = 0
    """Number of rows read, malformed rows included."""
    teacher_provenance: TeacherProvenance | None = None


class BalanceReport(Record):
    """Effect of prepare.balance on the training rows."""

    by: str
    rows: int
    """Number of rows per category."""
    on_shortage: str
    before: dict[str, int]
    """Number of training rows by category, before balancing."""
    after: dict[str, int]
    """Number of training rows in an epoch by category, repetitions included."""


class NearDuplicateCluster(Record):
    """Group of near-duplicate rows, of which one row is kept."""

    kept: str
    """Location of the row that is kept."""
    dropped: tuple[str, ...]
    """Locations of a few of the dropped rows."""
    size: int
    texts: tuple[str, ...]
    """Start of the text of the kept row, and of a dropped row."""


class NearDuplicateReport(Record):
    """Result of the search for near-duplicates."""

    threshold: float
    """Minimum Jaccard similarity of the word shingles of near-duplicates, or cosine of embeddings."""
    shingle_words: int
    """Words in a shingle; 0 for embeddings."""
    clusters: int
    across_splits: int
    """Number of dropped rows whose kept row is in another split. Without the removal, these rows would be leakage."""
    contradicting: int = 0
    """Number of dropped rows whose label differs from that of the kept row."""
    largest: tuple[NearDuplicateCluster, ...]
    model: str = ""
    """Folder and digest of the model of the embeddings."""


class LeakageReport(Record):
    """Overlap with one evaluation set."""

    documents: int
    unchecked: int
    """Number of documents that are shorter than an n-gram; they are compared in full."""
    rows: int
    """Number of rows that share an n-gram with the evaluation set."""
    examples: tuple[str, ...]
    """Locations of the first few rows, with the shared words."""


class TruncationReport(Record):
    """Truncated conversations."""

    rows: int = 0
    tokens: int = 0
    """Number of tokens removed."""


class PairReport(Record):
    """Lengths of the chosen and rejected answers of the training rows. A model may learn to prefer length."""

    chosen_tokens: float
    """Mean number of trained tokens of a chosen answer."""
    rejected_tokens: float
    longer_chosen: float
    """Share of the pairs whose chosen answer has more tokens than the rejected one; equal lengths count half."""


class SplitStratum(Record):
    """Rows with the same value of the stratification field, or with the same label."""

    rows: int
    splits: dict[str, int]


class Canary(Record):
    """A random secret that was planted in the training rows (prepare.canaries)."""

    prompt: str
    secret: str
    """Text that only this training row contains."""


class DatasetCard(Record):
    """Card of the prepared dataset. rows_in = rows_out + dropped rows."""

    digest: str
    """Digest of ids, token ids and masks of all splits, in order."""
    fields_digest: str = ""
    """Digest of the rows' groups and extra fields. Not part of `digest`, because training does not use them."""
    sources: dict[str, str]
    """SHA-256 of each source file."""
    base_digest: str
    """Digest of the base model whose tokenizer and template were used."""
    task: Literal["labels", "text", "preferences"]
    rows_in: int
    rows_out: int
    dropped: dict[str, DroppedRows]
    flaws: dict[str, FlawedRows] = Field(default_factory=dict)
    """Rows that fail a check of their text, by check. A row may fail several."""
    splits: dict[str, int]
    lengths: dict[str, LengthDistribution]
    """Distribution by split."""
    labels: dict[str, int]
    """Number of training rows per label; empty if prepare.task is text."""
    source_cards: dict[str, SourceCard] = Field(default_factory=dict)
    """Sources by their name in params.yaml."""
    repeated: int = 0
    """Number of repetitions of training rows due to source weights or prepare.balance, not included in rows_out."""
    balanced: BalanceReport | None = None
    teacher_rows: int = 0
    """Number of training rows that are answers of teachers."""
    template: str = ""
    """SHA-256 of the chat template."""
    end_of_turn: str = ""
    """Token at the end of an answer."""
    wanted: dict[str, float] = Field(default_factory=dict)
    """Configured fraction by split."""
    strata: dict[str, SplitStratum] = Field(default_factory=dict)
    """Rows by stratum or label; empty if there are neither strata nor labels."""
    near_duplicates: NearDuplicateReport | None = None
    semantic_duplicates: NearDuplicateReport | None = None
    pairs: PairReport | None = None
    """None unless the rows have a chosen and a rejected answer."""
    desirable_rows: int | None = None
    """Number of training rows whose answer is labelled true; None for rows without a label."""
    leaks: dict[str, LeakageReport] = Field(default_factory=dict)
    """Overlap by evaluation set."""
    truncated: dict[str, TruncationReport] = Field(default_factory=dict)
    """Truncation by split."""
    packing: dict[str, float] = Field(default_factory=dict)
    """Fill rate that packs of the training rows would have if stage train packed them, by the capacity of a pack in
    tokens."""
    canaries: tuple[Canary, ...] = ()
    """Secrets planted in the training rows: one more row each, counted in `splits` but not in `rows_out`."""
    missing_fields: dict[str, int] = Field(default_factory=dict)
    """Number of rows without a value, by field of prepare.extra_fields."""
    notes: tuple[str, ...] = ()
    """Notes for the reader, one sentence each."""


class TeacherGeneration(Record):
    """A generation whose answers `ratchet select` selects from."""

    generation: str
    """Id of the generation."""
    kind: str
    """Kind of the teacher: base, adapter, merged, gguf or endpoint."""
    model_digest: str
    weight_format: str
    """Description of the storage of the teacher's weights."""
    prompts_digest: str
    answers_digest: str
    """SHA-256 of the output of `ratchet generate`."""
    temperature: float
    samples: int


PairScore = Literal["reference", "reward", "judge"]
"""What decides which of two answers is better."""


class SelectionSpec(Record):
    """Everything that determines which answers are selected."""

    recipe_version: int = 1
    """Incremented when a code change selects other answers with the same settings."""
    select: Select
    teachers: tuple[TeacherGeneration, ...]
    reward_files: dict[str, str]
    """SHA-256 of the project files in the command of the reward, or of the judge's model and rubric."""
    pairs_by: PairScore | None = None
    """What decides about pairs (`ratchet select --pairs`). None: the rows are single answers."""


class FilterReport(Record):
    """Effect of one filter, in answers."""

    name: str
    dropped: int
    left: int
    examples: tuple[str, ...] = ()
    """First few dropped answers: prompt id, sample number and reason."""


class PairSelection(Record):
    """Pairs that `ratchet select --pairs` wrote, and prompts without a pair.

    The other prompts have no reference, although that decides, or only pairs that are like earlier ones.
    """

    by: PairScore
    single_prompts: int
    """Number of prompts with fewer than two different answers that have a score."""
    equal_prompts: int
    """Number of prompts whose answers all have the same score."""
    close_prompts: int
    """Number of prompts whose scores differ, but by less than select.pairs.min_difference."""
    duplicates: int
    """Number of pairs that are like an earlier pair."""
    chosen_characters: float
    """Mean length of a chosen answer in characters."""
    rejected_characters: float
    longer_chosen: float
    """Share of the pairs whose chosen answer is the longer one; equal lengths count half."""


class SelectionCard(OutputCard):
    """Card of a data source that `ratchet select` wrote."""

    spec: SelectionSpec
    model_names: tuple[str, ...]
    """Teachers as named on the command line; the spec identifies them."""
    prompts: int
    """Number of prompts, counted in each generation."""
    answers: int
    filters: tuple[FilterReport, ...]
    """Filters in order."""
    without_reference: int = 0
    """Number of prompts without a reference answer: `select.reference: match` does not apply to them, and they have no
    pairs by reference."""
    rows: int
    prompts_with_rows: int
    """Number of prompts with at least one selected row."""
    pairs: PairSelection | None = None
    """None if the rows are single answers."""


class DistillationCard(Record):
    """Card of experiments/distill: a teacher's probabilities for the training rows, in shard-NNNNN.safetensors."""

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
    """Number of answer positions in all training rows."""
    tokens: int
    """Number of tokens that have the same ids in both tokenizers."""
    teacher_rows: int
    """Number of rows of the teacher's embedding, padding included."""
    base_rows: int
    """Number of rows of the base's embedding, padding included."""
    teacher_parameters: int
    base_parameters: int
    teacher_loss: float
    """Loss of the teacher on the answers of the data, in nats per token."""
    left_out: float
    """Mean total probability of the tokens outside the top_k, at `temperature`. For these tokens, only the sum of the
    probabilities is saved."""
