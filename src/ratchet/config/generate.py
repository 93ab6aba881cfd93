"""Section `generate` of params.yaml: how `ratchet generate` answers prompts."""

from collections import Counter
from typing import Annotated

from pydantic import BeforeValidator, field_validator, model_validator

from ratchet.config.fields import (
    Count,
    Name,
    Names,
    NotNegative,
    PositiveCount,
    PositiveShare,
    Section,
    convert_to_tuple,
)


class Generate(Section):
    """Batch generation: `ratchet generate`."""

    max_new_tokens: PositiveCount = 512
    """Maximum length of an answer in tokens, reasoning and end-of-turn token included."""
    temperature: NotNegative = 0.0
    """Sampling temperature. 0: greedy decoding."""
    top_p: PositiveShare = 1.0
    """Nucleus sampling: sample from the smallest set of tokens with this total probability. 1: from all tokens."""
    samples: PositiveCount = 1
    """Independent answers to each prompt. More than one requires a temperature above 0."""
    seed: Count = 0
    """Sampling seed. Each answer depends only on this seed, its prompt and its sample number."""
    system_prompt: Name | None = None
    """System message for prompts that have none. null: none is added."""
    prompt_column: Name | None = None
    """Column with the prompt (a text or a list of messages). null: that of prepare.columns, else detected."""
    extra_fields: Names = ()
    """Fields of the input records to copy to the answers, for selection and reports."""
    labels: Names = ()
    """Possible answers. Each record gets the log-probability of each of them as the whole answer."""
    skip_invalid: bool = False
    """Skip and count records without a valid prompt. false: stop with an error that names the first of them."""
    reasoning_tags: Annotated[tuple[Name, Name], BeforeValidator(convert_to_tuple)] = ("<think>", "</think>")
    """Tags around the model's reasoning. The record holds reasoning and answer separately."""
    batch_invariant: bool = True
    """Answers do not depend on the batch. false: faster, but near ties may resolve differently in another batch."""
    window_rows: PositiveCount = 1024
    """Answers in progress at once, sorted by length. More need less padding and more memory; answers do not change."""
    shard_rows: PositiveCount = 1000
    """Answers that are saved together, in the order of the prompts. Does not change the answers."""

    @model_validator(mode="after")
    def _check_combinations(self) -> "Generate":
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples: found {self.samples}, but greedy answers are all the same; set generate.temperature above "
                "0, such as 0.7"
            )
        if self.reasoning_tags[0] == self.reasoning_tags[1]:
            raise ValueError(f"reasoning_tags: both are {self.reasoning_tags[0]!r}; expected two different tags")
        return self

    @field_validator("labels")
    @classmethod
    def _check_labels(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        duplicated = [name for name, count in Counter(value).items() if count > 1]
        if duplicated:
            count = value.count(duplicated[0])
            raise ValueError(f"expected each label once, but {duplicated[0]!r} occurs {count} times")
        if spaced := next((label for label in value if label != label.strip()), None):
            raise ValueError(
                f"expected labels without surrounding white space, because answers are compared without it; write "
                f"{spaced.strip()!r} for {spaced!r}"
            )
        return value

    def answer_settings(self) -> "Generate":
        """Return a copy with default values for the settings that do not affect answers.

        Of these, `prompt_column` and `skip_invalid` decide which prompts there are, which the prompts' digest records.
        """
        defaults = Generate()
        ignored = ("prompt_column", "skip_invalid", "window_rows", "shard_rows")
        return self.model_copy(update={name: getattr(defaults, name) for name in ignored})
