"""Section `prepare` of params.yaml: where the rows come from, how they are filtered, and how they are split."""

from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from ratchet.config.extensions import make_name_validator
from ratchet.config.fields import (
    Count,
    Fraction,
    Name,
    Names,
    Number,
    PositiveCount,
    Section,
    convert_to_tuple,
    parse_count,
    parse_number,
    wrap_single_value,
)

RecordSchema = Literal["auto", "columns", "alpaca", "messages", "sharegpt", "instances", "choices", "preferences"]
DropLimit = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(parse_number)] | None


class ColumnSettings(Section):
    """Names of the source columns. null: found by their usual names, and reported."""

    prompt: Name | None = None
    """Column with the user's message."""
    response: Name | None = None
    """Column with the assistant's answer; of two answers, the chosen one."""
    rejected: Name | None = None
    """Column with the rejected answer, for prepare.task: preferences."""
    label: Name | None = None
    """Column that says whether the answer is desirable (true or false), for prepare.task: preferences."""
    system: Name | None = None
    """Column with a system message, if any."""
    messages: Name | None = None
    """Column with whole conversations (OpenAI messages or ShareGPT turns)."""
    tools: Name | None = None
    """Column with the tools of the conversation, as JSON schemas."""

    @model_validator(mode="after")
    def _check_combinations(self) -> "ColumnSettings":
        if self.messages and (self.prompt or self.response or self.system):
            raise ValueError("messages: whole conversations exclude prompt, response and system; remove them")
        if self.prompt is not None and self.prompt == self.response:
            raise ValueError(f"response: found {self.response!r}, the same column as prompt; expected another column")
        if (self.prompt is None) != (self.response is None):
            missing, present = ("response", "prompt") if self.response is None else ("prompt", "response")
            raise ValueError(f"{missing}: missing; set it, or remove {present}")
        return self


class SourceSettings(Section):
    """One source of rows: files of this project, or a dataset of the Hugging Face Hub."""

    files: Name | None = None
    """File or glob below data/raw or data/distilled."""
    dataset: Name | None = None
    """Dataset id on the Hub; downloaded once."""
    revision: Name | None = None
    """Commit of the dataset; required with dataset."""
    subset: Name | None = None
    """Configuration of the dataset, if it has several."""
    dataset_split: Name = "train"
    """Split of the dataset to read."""
    streaming: bool = False
    """Read the dataset over the network in each preparation instead of keeping a copy on disk."""
    weight: Annotated[float, Field(gt=0, le=1000), BeforeValidator(parse_number)] = 1
    """How often each training row occurs in an epoch. A fractional part is drawn for each row by its content."""
    record_schema: RecordSchema = "auto"
    """Schema of its records, if it differs from prepare.record_schema."""
    columns: ColumnSettings | None = None
    """Its columns, if they differ from prepare.columns."""
    split: Literal["train", "validation", "test"] | None = None
    """Put all rows into this split. The other sources then contribute none of that split's fraction."""

    @model_validator(mode="after")
    def _check_combinations(self) -> "SourceSettings":
        if (self.files is None) == (self.dataset is None):
            raise ValueError("expected either files or dataset")
        if self.dataset and not self.revision:
            raise ValueError("revision: missing; set a commit of the dataset, so that later runs read the same rows")
        if self.streaming and not self.dataset:
            raise ValueError("streaming: applies to a dataset of the hub only; files are always streamed; remove it")
        if self.weight != 1 and self.split in ("validation", "test"):
            raise ValueError(f"weight: applies to training rows only, but split is {self.split}; remove one of them")
        return self

    @property
    def label(self) -> str:
        """Name of the source in messages and on the dataset card."""
        if self.files:
            return self.files
        subset = f"/{self.subset}" if self.subset else ""
        return f"{self.dataset}{subset}@{self.revision}[{self.dataset_split}]"


def _build_from_path(value: Any) -> Any:
    return {"files": value} if isinstance(value, str) else value


class SplitSettings(Section):
    """How rows are split. By default the split of a row depends only on its prompt and the seed, not on other rows."""

    validation: Fraction = 0.1
    """Fraction of the rows that measure progress during training."""
    test: Fraction = 0.15
    """Fraction of the rows for evaluation and gate only."""
    seed: Count = 0
    """Seed of the split."""
    group: Name | None = None
    """Field whose equal values stay in one split (conversation, document, user). null: rows are split one by one."""
    stratify: Annotated[tuple[Name, ...] | None, BeforeValidator(wrap_single_value)] = None
    """Fields (or `length`) in each combination of whose values the fractions hold. New rows may move a few others."""
    time: Name | None = None
    """Field with a date or number: the newest rows become test, the next validation. New rows move the borders."""

    @model_validator(mode="after")
    def _check_combinations(self) -> "SplitSettings":
        if self.validation + self.test >= 1:
            raise ValueError(
                f"validation and test: found a sum of {self.validation + self.test:g}; expected less than 1, so that "
                "training rows remain"
            )
        if len(keys := [key for key in ("group", "stratify", "time") if getattr(self, key)]) > 1:
            raise ValueError(f"{' and '.join(keys)}: exclude each other; set one of them")
        return self


class DeduplicationSettings(Section):
    """Near-duplicates. Rows that differ only in case and white space always count as duplicates."""

    jaccard_threshold: Annotated[float, Field(ge=0.3, le=1), BeforeValidator(parse_number)] | None = 0.8
    """Drop a row if the Jaccard similarity of its word shingles with another row's is at least this. null: keep all."""
    shingle_words: ClassVar[int] = 3
    """Words in a shingle."""
    permutations: ClassVar[int] = 128
    """MinHash permutations. More find more pairs just above the threshold, and take longer."""


class SemanticDuplicateSettings(Section):
    """Rows of the same meaning in other words, by embeddings."""

    model: Name | None = None
    """Folder below data/raw with a sentence-transformers or model2vec model. null: no search."""
    threshold: Annotated[float, Field(ge=0.7, le=1), BeforeValidator(parse_number)] = 0.95
    """Drop a row if the cosine of its embedding with another row's is at least this."""

    @model_validator(mode="after")
    def _check_model(self) -> "SemanticDuplicateSettings":
        if self.model is None and self.threshold != type(self).model_fields["threshold"].default:
            raise ValueError(
                f"threshold: found {self.threshold}, but without a model nothing is compared; set "
                "prepare.semantic_duplicates.model, or remove the threshold"
            )
        return self


def _parse_category_rows(value: Any) -> Any:
    return parse_count(value, "smallest")


class BalanceSettings(Section):
    """The same number of training rows for each category. The rows are chosen by their content and a seed."""

    by: Name | None = None
    """Field with the category, or `label` if prepare.task is labels. null: no balancing."""
    rows: Annotated[PositiveCount | Literal["smallest"], BeforeValidator(_parse_category_rows)] = "smallest"
    """Training rows per category: a number, or `smallest`: as many as the smallest category has."""
    on_shortage: Literal["take", "repeat", "refuse"] = "take"
    """If a category has fewer rows: take all it has, repeat rows to fill up, or refuse with an error."""
    seed: ClassVar[int] = 0
    """Seed of the choice."""


class LeakageSettings(Section):
    """Evaluation sets that must not occur in the training data."""

    tasks: Annotated[tuple[str, ...], BeforeValidator(wrap_single_value)] = ()
    """lm-evaluation-harness tasks in data/tasks (file name without suffix) to check besides evaluate.harness.tasks."""
    files: Annotated[tuple[str, ...], BeforeValidator(wrap_single_value)] = ()
    """More evaluation sets: files or globs below data/raw or data/tasks."""
    ngram_words: ClassVar[int] = 13
    """Length in words of the n-grams that no row may share with an evaluation set (Brown et al. 2020, appendix C)."""
    action: Literal["drop", "fail"] = "drop"
    """Rows that overlap: `drop` them, or `fail` with a list of them."""


QualityCheck = Literal["language", "spam", "garbled", "cut_off", "low_score"]


class QualitySettings(Section):
    """Checks of the text of each row. A row that fails one is reported on the dataset card."""

    drop: Annotated[tuple[QualityCheck, ...], BeforeValidator(wrap_single_value)] = ()
    """Checks whose rows are dropped: language, spam, garbled, cut_off, low_score. The others only report rows."""
    field: Name | None = None
    """Field with a number that says how good a row is, for the check low_score. null: no such check."""
    minimum: Number | None = None
    """Smallest number of `field` that passes."""

    @model_validator(mode="after")
    def _check_combinations(self) -> "QualitySettings":
        if (self.field is None) != (self.minimum is None):
            missing, present = ("minimum", "field") if self.minimum is None else ("field", "minimum")
            raise ValueError(f"{missing}: missing; set it, or remove {present}")
        if "low_score" in self.drop and self.field is None:
            raise ValueError("drop: found low_score without a field; set field and minimum, or remove low_score")
        return self


DropReason = Literal[
    "malformed", "refused", "control_token", "empty_prompt", "empty_answer", "equal_answers", "fully_masked",
    "too_short", "too_long", "truncated", "filtered", "language", "spam", "garbled", "cut_off", "low_score",
    "duplicate", "near_duplicate", "semantic_duplicate", "leaked",
]  # fmt: skip
"""Reasons for which a row is dropped. Rows that were `truncated` are not dropped, but have a limit too."""


class DropReasonRule(NamedTuple):
    """Why rows are dropped, and how many may be."""

    default_limit: float | None
    """Largest share of the rows; None: no limit."""
    meaning: str


DROP_REASONS: dict[DropReason, DropReasonRule] = {
    "malformed": DropReasonRule(0.01, "Records that do not fit the schema, or hold invalid text."),
    "refused": DropReasonRule(0.01, "Conversations that the chat template refuses."),
    "control_token": DropReasonRule(0.01, "Texts that contain a control token of the model."),
    "empty_prompt": DropReasonRule(None, "Rows with an empty prompt."),
    "empty_answer": DropReasonRule(None, "Rows with an empty answer."),
    "equal_answers": DropReasonRule(None, "Pairs whose chosen and rejected answers are equal."),
    "fully_masked": DropReasonRule(0.01, "Rows without a trained token after masking and truncation."),
    "too_short": DropReasonRule(None, "Answers with fewer tokens than min_answer_tokens."),
    "too_long": DropReasonRule(None, "Conversations with more tokens than max_tokens, if too_long is drop."),
    "truncated": DropReasonRule(0.005, "Conversations that were truncated, if too_long is one of truncate."),
    "filtered": DropReasonRule(None, "Rows that a filter of prepare.filters drops."),
    "language": DropReasonRule(None, "Rows in a language that prepare.languages does not name."),
    "spam": DropReasonRule(None, "Answers that consist of repetitions or symbols, or hold placeholder text."),
    "garbled": DropReasonRule(None, "Texts with characters that a wrong encoding destroyed."),
    "cut_off": DropReasonRule(None, "Answers that end inside a sentence or a code block."),
    "low_score": DropReasonRule(None, "Rows with less than prepare.quality.minimum in the field of their quality."),
    "duplicate": DropReasonRule(None, "Exact duplicates."),
    "near_duplicate": DropReasonRule(
        0.2, "Near-duplicates. A larger share often means that rows share a long instruction."
    ),
    "semantic_duplicate": DropReasonRule(0.2, "Rows with the meaning of another row (prepare.semantic_duplicates)."),
    "leaked": DropReasonRule(None, "Rows that overlap with an evaluation set."),
}


class Prepare(Section):
    """Data preparation: from source files to token ids."""

    sources: Annotated[
        tuple[Annotated[SourceSettings, BeforeValidator(_build_from_path)], ...],
        BeforeValidator(wrap_single_value),
        Field(min_length=1),
    ] = (SourceSettings(files="data/raw/data.jsonl"),)
    """Files or globs below data/raw (.json .jsonl .csv .tsv .parquet, also .gz ...), or {files: x, weight: 2, ...}."""
    record_schema: RecordSchema = "auto"
    """columns, alpaca, messages (OpenAI), sharegpt, instances, choices, preferences, or `auto`: detected."""
    columns: ColumnSettings = ColumnSettings()
    """Names of the source columns. null: found by their usual names, and reported."""
    task: Literal["labels", "text", "preferences"] = "text"
    """`labels`: answers from a small set (accuracy per class). `text`: free text. `preferences`: pairs of answers, or
    answers that are labelled true or false."""
    turns: Literal["all", "last", "flagged"] = "all"
    """Answers to train on: all or the last, unless flagged `train: false` or `weight: 0`; or only flagged ones.
    Of `preferences`, always the last."""
    system: Literal["keep", "merge"] = "keep"
    """System messages: kept, or merged into the first user turn (for templates that refuse them)."""
    filters: Annotated[
        tuple[Annotated[Name, make_name_validator("ratchet.filters")], ...], BeforeValidator(convert_to_tuple)
    ] = ()
    """Filters of installed packages (entry points ratchet.filters): a row that one gives a reason for is dropped."""
    languages: Annotated[
        tuple[Annotated[str, Field(pattern="^[a-z]{2,3}$")], ...], BeforeValidator(wrap_single_value)
    ] = ()
    """Languages of the rows (ISO 639 codes such as en), for the check language. Empty: languages are not detected."""
    quality: QualitySettings = QualitySettings()
    """Checks of the text of each row, which report or drop."""
    extra_fields: Names = ()
    """Fields of the records to keep with their row, such as categories for evaluate.slice_by. Never trained on."""
    split: SplitSettings = SplitSettings()
    """Split into training, validation and test rows."""
    max_tokens: PositiveCount = 256
    """Maximum length of a conversation in tokens, template included."""
    too_long: Literal["drop", "truncate", "truncate_prompt", "truncate_both", "raise"] = "drop"
    """Longer conversations: dropped, an error, or cut: the answers, the prompts, or both by the same share."""
    min_answer_tokens: PositiveCount = 1
    """Minimum number of answer tokens in a row, end-of-turn token excluded."""
    deduplication: DeduplicationSettings = DeduplicationSettings()
    """Removal of near-duplicates."""
    semantic_duplicates: SemanticDuplicateSettings = SemanticDuplicateSettings()
    """Removal of rows of the same meaning."""
    balance: BalanceSettings = BalanceSettings()
    """The same number of training rows for each category."""
    leakage: LeakageSettings = LeakageSettings()
    """Evaluation sets that must not occur in the training data."""
    canaries: Annotated[int, Field(ge=0, le=100), BeforeValidator(parse_number)] = 0
    """Training rows with a random secret to add, by which evaluate measures memorization. The data then contains them.
    0: none."""
    limits: dict[DropReason, DropLimit] = Field(default_factory=dict)
    """Maximum share of rows dropped, by reason; above it the stage fails. null: no limit. Others have a default."""

    @property
    def drop_limits(self) -> dict[DropReason, float | None]:
        """Maximum share of the rows by reason; None: no limit."""
        return {reason: self.limits.get(reason, rule.default_limit) for reason, rule in DROP_REASONS.items()}

    @model_validator(mode="after")
    def _check_combinations(self) -> "Prepare":
        columns = [self.columns, *(source.columns for source in self.sources)]
        named = next((one.label for one in columns if one is not None and one.label), None)
        if named is not None and self.task != "preferences":
            raise ValueError(
                f"columns.label: found {named} with task {self.task}, which reads no label of answers; set task: "
                "preferences, or remove it"
            )
        if self.task == "preferences" and self.too_long in ("truncate_prompt", "truncate_both"):
            raise ValueError(
                f"too_long: found {self.too_long} with task preferences; both answers of a pair need the same prompt; "
                "set drop or truncate"
            )
        if self.canaries and self.task != "text":
            raise ValueError(f"canaries: found {self.canaries} with task {self.task}; they need task text, or set 0")
        if "language" in self.quality.drop and not self.languages:
            raise ValueError("quality.drop: found language, but languages is empty; set it, or remove language")
        weighted = next((source.label for source in self.sources if source.weight != 1), None)
        if self.balance.by is not None and weighted is not None:
            raise ValueError(
                f"balance: by {self.balance.by} and the weight of source {weighted} both set how often rows occur; "
                "remove one of them"
            )
        return self
