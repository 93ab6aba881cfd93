"""Settings of `ratchet generate`: how prompts are answered."""

from collections import Counter
from typing import Annotated

from pydantic import BeforeValidator, Field, field_validator, model_validator

from ratchet.config.fields import Count, Name, NotNegative, PositiveCount, Section, convert_to_tuple, parse_number


class Generate(Section):
    """How prompts are answered, by whichever model is asked."""

    max_new_tokens: PositiveCount = 512
    """Longest answer, in tokens, its end and its reasoning included."""
    temperature: NotNegative = 0.0
    """0: the likeliest token, always. Else answers are drawn, from logits that are divided by this."""
    top_p: Annotated[float, BeforeValidator(parse_number), Field(gt=0, le=1, allow_inf_nan=False)] = 1.0
    """Tokens are drawn from the fewest likeliest ones that have this probability together; 1: from all."""
    samples: PositiveCount = 1
    """Answers to each prompt, each drawn by itself; more than one need a temperature above 0."""
    seed: Count = 0
    """Of drawn answers: each depends on this, its prompt and its number alone."""
    system: Name | None = None
    """System message of prompts that have none of their own; null: they get none."""
    column: Name | None = None
    """Column with the prompt, a text or a list of messages; null: that of prepare.columns, else looked for."""
    keep: Annotated[tuple[Name, ...], BeforeValidator(convert_to_tuple)] = ()
    """Fields of the source records that answers carry along, for whoever selects or reports by them."""
    labels: Annotated[tuple[Name, ...], BeforeValidator(convert_to_tuple)] = ()
    """Answers that are possible: each record has the log-probability of each of them as the whole answer."""
    skip_faults: bool = False
    """Leave out records that are no prompts, and count them; false: refuse the file, naming the first of them."""
    reasoning_marks: Annotated[tuple[Name, Name], BeforeValidator(convert_to_tuple)] = ("<think>", "</think>")
    """Between these a model thinks: the record has reasoning and answer apart."""
    exact: bool = True
    """Answers do not depend on which prompts were computed together; false: on near ties they may, and it is faster."""
    window_rows: PositiveCount = 1024
    """Answers under way at once, sorted by length; more need less padding and more memory. Changes no answer."""
    shard_rows: PositiveCount = 1000
    """Answers that are sealed together, in the order of the prompts. Changes no answer."""

    @model_validator(mode="after")
    def _samples_differ(self) -> "Generate":
        if self.samples > 1 and self.temperature == 0:
            raise ValueError(
                f"samples: {self.samples} would be the same; set generate.temperature above 0, such as 0.7"
            )
        if self.reasoning_marks[0] == self.reasoning_marks[1]:
            raise ValueError(f"reasoning_marks: both are {self.reasoning_marks[0]!r}; name where it begins and ends")
        return self

    @field_validator("labels")
    @classmethod
    def _each_once(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        twice = [name for name, count in Counter(value).items() if count > 1]
        if twice:
            raise ValueError(f"{twice[0]!r} stands there {value.count(twice[0])} times; name each once")
        return value

    @field_validator("labels")
    @classmethod
    def _bare(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if spaced := next((label for label in value if label != label.strip()), None):
            raise ValueError(
                f"{spaced!r} begins or ends with white space, and answers are compared without it; write "
                f"{spaced.strip()!r}"
            )
        return value

    def decisive(self) -> "Generate":
        """Only what decides answers; the rest as by default. Prompts have taken in column and skip_faults."""
        usual = Generate()
        how = ("column", "skip_faults", "window_rows", "shard_rows")
        return self.model_copy(update={name: getattr(usual, name) for name in how})
