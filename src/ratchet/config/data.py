"""Settings of stage prepare: where rows come from, what is done with them, and how they are divided."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ratchet.config.fields import Count, Fraction, Limit, Name, PositiveCount, Section, convert_to_tuple, parse_number

Shape = Literal["auto", "columns", "alpaca", "messages", "sharegpt", "instances", "choices"]


def _wrap_single_value(value: Any) -> Any:
    """A list may be given as its only entry."""
    return (value,) if isinstance(value, str | dict) else convert_to_tuple(value)


def _parse_category_rows(value: Any) -> Any:
    """A number of rows, or `smallest`; one complaint for what is neither."""
    value = parse_number(value)
    if value != "smallest" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{value!r} is no number of rows; write one from 1, or smallest")
    return value


class ColumnSettings(Section):
    """Names of the source columns; null: found by the names that are usual, and shown."""

    prompt: Name | None = None
    """Column with what the user says."""
    response: Name | None = None
    """Column with what the assistant should answer."""
    system: Name | None = None
    """Column with a system message, if there is one."""
    messages: Name | None = None
    """Column with a whole conversation (OpenAI messages or ShareGPT turns)."""
    tools: Name | None = None
    """Column with the tools that the conversation may use, as JSON schemas."""

    @model_validator(mode="after")
    def _one_shape(self) -> "ColumnSettings":
        if self.messages and (self.prompt or self.response or self.system):
            raise ValueError("messages holds whole conversations: name it, or prompt and response, not both")
        if self.prompt is not None and self.prompt == self.response:
            raise ValueError(f"prompt and response are both {self.prompt!r}: name two different columns")
        if (self.prompt is None) != (self.response is None):
            missing = "response" if self.response is None else "prompt"
            raise ValueError(f"{missing} is missing: name prompt and response, or neither")
        return self


class SourceSettings(Section):
    """One place that rows come from: files of this project, or a dataset of the hub."""

    files: Name | None = None
    """File or glob below data/raw, or data/taught."""
    dataset: Name | None = None
    """Dataset id on the hub; needs a network the first time."""
    revision: Name | None = None
    """Commit of the dataset; must be given."""
    subset: Name | None = None
    """Configuration of the dataset, where it has several."""
    dataset_split: Name = "train"
    """Split of the dataset to read."""
    weight: Annotated[float, BeforeValidator(parse_number), Field(gt=0, le=1000)] = 1
    """How often a training row of this source comes in an epoch; the part behind the point by a draw on its content."""
    shape: Shape = "auto"
    """Shape of its records, where it is not prepare.shape."""
    columns: ColumnSettings | None = None
    """Its columns, where they are not prepare.columns."""
    split: Literal["train", "validation", "test"] | None = None
    """Split that all its rows belong to; the fraction of that split is then not taken from other sources."""

    @model_validator(mode="after")
    def _one_place(self) -> "SourceSettings":
        if (self.files is None) == (self.dataset is None):
            raise ValueError("name either files or dataset")
        if self.dataset and not self.revision:
            raise ValueError("revision is missing: pin the dataset to a commit, so that the same rows come again")
        if self.weight != 1 and self.split in ("validation", "test"):
            raise ValueError(f"weight is for training rows, and split is {self.split}: leave one out")
        return self

    @property
    def label(self) -> str:
        """What it is called in messages and on the card."""
        if self.files:
            return self.files
        subset = f"/{self.subset}" if self.subset else ""
        return f"{self.dataset}{subset}@{self.revision}[{self.dataset_split}]"


def _build_from_path(value: Any) -> Any:
    """A source may be given as just its path or glob."""
    return {"files": value} if isinstance(value, str) else value


class SplitSettings(Section):
    """How rows are divided. By default a row's split depends on its prompt and the seed alone, never on other rows."""

    validation: Fraction = 0.1
    """Fraction of the rows that measure progress during training."""
    test: Fraction = 0.15
    """Fraction of the rows that evaluation and gate see, and nobody else."""
    seed: Count = 0
    """Seed of the division."""
    group: Name | None = None
    """Field whose equal values stay together (conversation, document, user); the group is drawn, not the row."""
    stratify: Name | None = None
    """Field (or `length`) in whose every value the fractions hold; added rows may move rows at a border."""
    time: Name | None = None
    """Field with a date or number: the newest rows are test, the next validation; added rows move the borders."""

    @model_validator(mode="after")
    def _something_left(self) -> "SplitSettings":
        if self.validation + self.test >= 1:
            raise ValueError(f"validation + test is {self.validation + self.test:g}: nothing is left to train on")
        if len(chosen := [key for key in ("group", "stratify", "time") if getattr(self, key)]) > 1:
            raise ValueError(f"{' and '.join(chosen)} exclude each other; name one")
        return self


class DeduplicationSettings(Section):
    """Which rows count as the same. Rows whose text is another's but for case and white space always do."""

    near: Annotated[float, BeforeValidator(parse_number), Field(ge=0.3, le=1)] | None = 0.8
    """Drop rows whose word shingles have at least this Jaccard similarity with those of another; null: keep them."""
    shingle_words: PositiveCount = 3
    """Words of one shingle."""
    permutations: Annotated[int, BeforeValidator(parse_number), Field(ge=16, le=1024)] = 128
    """MinHash permutations: more find more of the pairs just above the threshold, and take longer."""


class BalanceSettings(Section):
    """As many training rows of each category (hard-balanced sampling); rows are chosen by their content and a seed."""

    by: Name | None = None
    """Field of the records that holds the category, or `label` where prepare.task is labels; null: off."""
    rows: Annotated[PositiveCount | Literal["smallest"], BeforeValidator(_parse_category_rows)] = "smallest"
    """Training rows of each category: a number, or `smallest`, as many as the smallest category has."""
    fewer: Literal["take", "repeat", "refuse"] = "take"
    """Categories with fewer rows: take those that there are, repeat them to fill up, or end the stage."""
    seed: Count = 0
    """Seed of the choice."""


class LeakageSettings(Section):
    """Evaluation sets that must not be learned from."""

    tasks: Annotated[tuple[str, ...], BeforeValidator(_wrap_single_value)] = ()
    """lm-evaluation-harness tasks in data/tasks, beside those of evaluate.harness.tasks, without the ending."""
    files: Annotated[tuple[str, ...], BeforeValidator(_wrap_single_value)] = ()
    """Further evaluation sets: files or globs below data/raw or data/tasks."""
    ngram_words: Annotated[int, BeforeValidator(parse_number), Field(ge=5, le=50)] = 13
    """Words of the n-grams that no row may share with an evaluation set (Brown et al. 2020, appendix C: 13)."""
    action: Literal["drop", "fail"] = "drop"
    """`drop` leaves rows that overlap out of the data; `fail` ends the stage and lists them."""


class DropLimitSettings(Section):
    """Largest share of the rows that may be lost for a reason; more fails the stage. null: any share."""

    malformed: Limit = 0.01
    """No record of the expected shape, or text that cannot be."""
    refused: Limit = 0.01
    """Conversations that the chat template refuses."""
    control_token: Limit = 0.01
    """Texts that hold a control token of the model."""
    empty_prompt: Limit = None
    """Nothing asked."""
    empty_answer: Limit = None
    """Nothing to learn."""
    fully_masked: Limit = 0.01
    """Nothing left to learn after masks and truncation."""
    too_short: Limit = None
    """Answers of fewer tokens than min_answer_tokens."""
    too_long: Limit = None
    """Conversations of more tokens than max_tokens, where too_long is drop."""
    truncated: Limit = 0.005
    """Conversations that were cut, where too_long is truncate."""
    duplicate: Limit = None
    """The same text again."""
    near_duplicate: Limit = 0.2
    """Almost the same text again; more than this are rather rows that share a long instruction."""
    leaked: Limit = None
    """Overlap with an evaluation set."""


class Prepare(Section):
    """From source files to token ids."""

    sources: Annotated[
        tuple[Annotated[SourceSettings, BeforeValidator(_build_from_path)], ...],
        BeforeValidator(_wrap_single_value),
        Field(min_length=1),
    ] = (SourceSettings(files="data/raw/data.jsonl"),)
    """Files or globs below data/raw (.json .jsonl .csv .tsv .parquet, also .gz ...), or {files: x, weight: 2, ...}."""
    shape: Shape = "auto"
    """Shape of the records: columns, alpaca, messages (OpenAI), sharegpt, instances, choices; `auto` looks and says."""
    columns: ColumnSettings = ColumnSettings()
    """Which columns hold what."""
    task: Literal["labels", "text"] = "text"
    """`labels`: responses come from a small set, so accuracy per class is measured; `text`: free answers."""
    turns: Literal["all", "last", "flagged"] = "all"
    """Answers to learn from: all or the last, unless flagged `train: false` or `weight: 0`; or those flagged."""
    system: Literal["keep", "merge"] = "keep"
    """System messages: left to the template, or merged into the first user turn (for templates that refuse them)."""
    keep: Annotated[tuple[Name, ...], BeforeValidator(convert_to_tuple)] = ()
    """Further fields of the records that stay with their row: categories by which results are given."""
    split: SplitSettings = SplitSettings()
    """Division into training, validation and test rows."""
    max_tokens: PositiveCount = 256
    """Longest conversation, template included, in tokens."""
    too_long: Literal["drop", "truncate", "raise"] = "drop"
    """Longer conversations are dropped, cut (an answer keeps its end-of-turn token), or end the stage."""
    min_answer_tokens: PositiveCount = 1
    """Fewest tokens that a row must have to learn from, end of turn not counted."""
    duplicates: DeduplicationSettings = DeduplicationSettings()
    """Which rows count as the same."""
    balance: BalanceSettings = BalanceSettings()
    """As many training rows of each category."""
    leakage: LeakageSettings = LeakageSettings()
    """Evaluation sets that must not be learned from."""
    limits: DropLimitSettings = DropLimitSettings()
    """Largest share of the rows that may be lost for a reason; more fails the stage."""

    @model_validator(mode="after")
    def _sampled_in_one_way(self) -> "Prepare":
        weighted = next((source.label for source in self.sources if source.weight != 1), None)
        if self.balance.by is not None and weighted is not None:
            raise ValueError(
                f"balance: by {self.balance.by}, and source {weighted} has a weight: both say how often rows come; "
                "leave out one"
            )
        return self
