"""Settings of `ratchet select`: which answers of a teacher become data."""

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from ratchet.config.data import DeduplicationSettings
from ratchet.config.fields import Name, Number, Positive, PositiveCount, Section, convert_to_tuple, parse_number

FORMATS = ("json", "labels")
"""Values of select.format that are no regular expression."""


class RewardSettings(Section):
    """A program of yours that scores answers: JSON lines in, a number a line out, in the same order."""

    command: Annotated[tuple[Name, ...], BeforeValidator(convert_to_tuple)] = ()
    """The program and its arguments, run in the project's directory; empty: there is none."""
    minimum: Number | None = None
    """Answers that score less are left out; null: none is."""
    choose: bool = False
    """Of the answers to a prompt take those with the best score; false: the likeliest."""
    limit_s: Positive = 600.0
    """Longest time for all answers together, in seconds."""


class Select(Section):
    """Which answers of a teacher become data: filters in this order, each counted."""

    finishes: Annotated[
        tuple[Literal["stop", "length", "context"], ...], BeforeValidator(convert_to_tuple), Field(min_length=1)
    ] = ("stop",)
    """How an answer may have ended: by itself (stop), or cut at max_new_tokens (length) or the context's end."""
    min_characters: PositiveCount = 1
    """Shortest answer, in characters, reasoning not counted."""
    max_characters: Annotated[PositiveCount | None, BeforeValidator(parse_number)] = None
    """Longest answer, in characters, reasoning not counted; null: any."""
    format: Name | None = None
    """`json`, `labels` (one of generate.labels), or a regular expression that a whole answer must match."""
    min_probability: Annotated[float, BeforeValidator(parse_number), Field(gt=0, le=1)] | None = None
    """Least probability of an answer: among generate.labels, else the geometric mean of its tokens'. null: any."""
    final: Name | None = None
    """Regular expression for the final answer in a longer one: the last match, of it the group; null: all of it."""
    reference: Literal["ignore", "match"] = "ignore"
    """`match`: where the prompt came with an answer, the final answer must be that one (rejection sampling)."""
    agreement: Annotated[float, BeforeValidator(parse_number), Field(gt=0, le=1)] | None = None
    """Share of a prompt's samples that must give the same final answer; the others are left out. null: no vote."""
    reward: RewardSettings = RewardSettings()
    """A program of yours that scores answers."""
    per_prompt: PositiveCount = 1
    """Answers taken of each prompt."""
    reasoning: Literal["keep", "drop"] = "drop"
    """`keep`: the reasoning is taught too, between the marks of generate.reasoning_marks."""
    duplicates: DeduplicationSettings = DeduplicationSettings()
    """Which rows (prompt and answer) count as the same; the first one is taken."""

    @model_validator(mode="after")
    def _fits_together(self) -> "Select":
        for name, pattern in (("format", self.format), ("final", self.final)):
            if pattern is not None and not (name == "format" and pattern in FORMATS):
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(f"{name}: {pattern!r} is no regular expression ({error})") from None
        if self.max_characters is not None and self.max_characters < self.min_characters:
            raise ValueError(f"max_characters: {self.max_characters} is less than min_characters")
        if not self.reward.command and (self.reward.minimum is not None or self.reward.choose):
            raise ValueError("reward.command is empty, so there are no scores for minimum and choose; name a program")
        return self
