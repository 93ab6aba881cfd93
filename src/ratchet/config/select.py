"""Section `select` of params.yaml: which generated answers `ratchet select` turns into training data."""

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from ratchet.config.extensions import make_name_validator
from ratchet.config.fields import (
    Count,
    Name,
    Names,
    NotNegative,
    Number,
    OptionalPositiveCount,
    Positive,
    PositiveCount,
    PositiveShare,
    Section,
    convert_to_tuple,
)
from ratchet.config.prepare import DeduplicationSettings

NAMED_FORMATS = ("json", "labels")
"""Values of select.answer_format that are not regular expressions."""


class RewardSettings(Section):
    """A program that scores answers: it reads JSON lines and writes one number per line, in the same order."""

    command: Names = ()
    """Program and arguments, run in the project directory. Empty: no reward."""
    function: Annotated[Name, make_name_validator("ratchet.rewards")] | None = None
    """Reward of an installed package (entry points ratchet.rewards), in place of command. null: none."""
    min_score: Number | None = None
    """Drop answers with a lower score. null: none."""
    select_best: bool = False
    """Take the answers to a prompt with the best scores. false: take the most likely ones."""
    timeout_s: Positive = 600.0
    """Timeout for scoring all answers, in seconds."""


class PairSettings(Section):
    """Pairs of a chosen and a rejected answer to the same prompt: `ratchet select --pairs`."""

    by: Literal["reference", "reward", "judge"] | None = None
    """What decides: the prompt's reference (right or wrong), select.reward, or the model of evaluate.judge. null: the
    reward if there is one, else the reference."""
    min_difference: NotNegative = 0.0
    """Minimum difference of the scores of a pair; equal scores never make a pair."""
    similar_length: bool = False
    """Among pairs with the same difference of scores, take the one whose answers have the most similar lengths."""
    seed: Count = 0
    """Seed of the choice among equal pairs."""


class Select(Section):
    """Selection of generated answers as training data: `ratchet select`. Filters apply in this order."""

    finish_reasons: Annotated[
        tuple[Literal["stop", "length", "context"], ...], BeforeValidator(convert_to_tuple), Field(min_length=1)
    ] = ("stop",)
    """Accepted ends of an answer: stop, length (cut at max_new_tokens) and context (the context was full)."""
    min_characters: PositiveCount = 1
    """Minimum length of an answer in characters, reasoning excluded."""
    max_characters: OptionalPositiveCount = None
    """Maximum length of an answer in characters, reasoning excluded. null: no limit."""
    answer_format: Name | None = None
    """`json`, `labels` (one of generate.labels), or a regular expression for the whole answer. null: any."""
    min_probability: PositiveShare | None = None
    """Minimum probability: among generate.labels, else the geometric mean over the answer's tokens. null: no limit."""
    final_answer_pattern: Name | None = None
    """Regular expression that finds the final answer: the first group of the last match. null: the whole answer."""
    reference: Literal["ignore", "match"] = "ignore"
    """`match`: drop answers whose final answer differs from the prompt's reference answer (rejection sampling)."""
    min_agreement: PositiveShare | None = None
    """Share of a prompt's samples that must agree on the final answer; the others are dropped. null: no vote."""
    reward: RewardSettings = RewardSettings()
    """A program that scores answers."""
    max_per_prompt: PositiveCount = 1
    """Maximum number of answers (with --pairs: of pairs) to take for each prompt."""
    reasoning: Literal["keep", "drop"] = "drop"
    """`keep`: train on the reasoning too, between generate.reasoning_tags."""
    deduplication: DeduplicationSettings = DeduplicationSettings()
    """Which rows (prompt and answer) count as duplicates; the first one is kept."""
    pairs: PairSettings = PairSettings()
    """Pairs of a chosen and a rejected answer, for preference tuning."""

    @model_validator(mode="after")
    def _check_combinations(self) -> "Select":
        for name in ("answer_format", "final_answer_pattern"):
            pattern = getattr(self, name)
            if pattern is not None and not (name == "answer_format" and pattern in NAMED_FORMATS):
                try:
                    re.compile(pattern)
                except re.error as error:
                    raise ValueError(f"{name}: found {pattern!r}; expected a regular expression ({error})") from None
        if self.max_characters is not None and self.max_characters < self.min_characters:
            raise ValueError(
                f"max_characters: found {self.max_characters}; expected at least min_characters ({self.min_characters})"
            )
        reward = self.reward
        if reward.command and reward.function is not None:
            raise ValueError("reward: found command and function; expected one of them")
        if not reward.command and reward.function is None and (reward.min_score is not None or reward.select_best):
            raise ValueError(
                "reward: found neither command nor function, but min_score and select_best need scores; set one of them"
            )
        return self
