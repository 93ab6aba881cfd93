"""Settings of stage evaluate: what is measured on the test rows, for every model alike."""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ratchet import http_client
from ratchet.config.fields import (
    Count,
    Name,
    NotNegative,
    Positive,
    PositiveCount,
    Section,
    convert_to_tuple,
    parse_number,
)

Form = Literal["adapter", "merged"]
Opponent = Literal["base", "champion", "anchor"]
Measure = Literal["token_f1", "bleu", "rouge", "chrf", "length"]


def _require_increasing(value: Any) -> Any:
    value = convert_to_tuple(value)
    if isinstance(value, tuple) and list(value) != sorted(set(value)):
        raise ValueError("bounds must rise from one to the next")
    return value


def _require_distinct_opponents(value: Any) -> Any:
    value = convert_to_tuple(value)
    if isinstance(value, tuple) and (not value or len(set(value)) != len(value)):
        raise ValueError("names each opponent once, and at least one: base, champion, anchor")
    return value


class HarnessSettings(Section):
    """lm-evaluation-harness tasks."""

    tasks: Annotated[tuple[str, ...], BeforeValidator(convert_to_tuple)] = ()
    """Names of YAML files in data/tasks, without the ending."""
    library: Annotated[tuple[str, ...], BeforeValidator(convert_to_tuple)] = ()
    """Tasks that come with the harness, e.g. hellaswag, arc_challenge, gsm8k; their data needs a network once."""
    limit: PositiveCount | None = None
    """Score only the first so many documents of each task; null scores all."""
    fewshot: Count | None = None
    """Examples shown before each document; null: as each task says."""


class GeneralTextSettings(Section):
    """Text that has nothing to do with the task: what the model forgets shows there."""

    text: Name | None = None
    """File below data/tasks that no model was trained on; null: prose that comes with Ratchet."""
    block_tokens: PositiveCount = 64
    """The text is scored in blocks of so many tokens, each without the others; they are the samples."""
    blocks: PositiveCount = 256
    """At most so many blocks, from the beginning of the text on."""


def _require_valid_address(value: Any) -> Any:
    if isinstance(value, str) and (fault := http_client.find_endpoint_problem(value)):
        raise ValueError(fault)
    return value


Price = Annotated[NotNegative | None, BeforeValidator(parse_number)]


class JudgeSettings(Section):
    """Another model says which of two generated answers is better: candidate and base, candidate and champion."""

    address: Annotated[str | None, BeforeValidator(_require_valid_address)] = None
    """OpenAI-compatible server that is sent test rows and answers, such as http://127.0.0.1:8000/v1; null: none is."""
    model: Name | None = None
    """Its name there; null: the only one that is served."""
    rubric: Name | None = None
    """Text file below data/tasks: what makes an answer good; null: the rubric that comes with Ratchet."""
    against: Annotated[tuple[Opponent, ...], BeforeValidator(_require_distinct_opponents)] = ("base", "champion")
    """Whom the candidate's answers are held against: base, champion, anchor; those that are not there are left out."""
    rows: PositiveCount | None = None
    """At most so many of the answered test rows (a fixed sample by content); null: all of them."""
    reference: bool = False
    """Show the judge the row's own answer, too."""
    max_tokens: PositiveCount = 1024
    """Longest reply of the judge, its reasoning included, in tokens."""
    temperature: NotNegative = 0.0
    """Of the judge's replies."""
    seed: Count = 0
    """Of replies that are drawn, and of the intervals."""
    price_in: Price = None
    """Price of a million tokens that are sent, in whatever currency; null: not known."""
    price_out: Price = None
    """The same of tokens that the judge writes."""


class Evaluate(Section):
    """What is measured on the test rows, for base, candidate, champion and anchor alike."""

    forms: Annotated[tuple[Form, ...], BeforeValidator(convert_to_tuple), Field(min_length=1)] = ("adapter",)
    """Of the candidate: `adapter` on the base as it was trained against, `merged` as it was exported."""
    generate_rows: Count = 0
    """Test rows to answer with generated text (a fixed sample by content); 0 answers all."""
    max_new_tokens: PositiveCount = 16
    """Longest generated answer, in tokens."""
    samples: PositiveCount = 1
    """Answers to each row: one is greedy; more are drawn, and a row's score is their mean."""
    temperature: Positive = 0.7
    """Of drawn answers; read only when samples is above 1."""
    seed: Count = 0
    """Of drawn answers, and of the intervals of corpus figures."""
    measures: Annotated[tuple[Measure, ...], BeforeValidator(convert_to_tuple)] = ()
    """Further measures of generated answers: token_f1, bleu, rouge, chrf, length."""
    answer_format: Name | None = None
    """`json`, or a regular expression that a whole answer must match; measured as format_validity."""
    label_scores: bool = True
    """For labels: how likely each label is as the answer to each row; gives precision-recall curves."""
    categories: Annotated[tuple[Name, ...], BeforeValidator(convert_to_tuple)] = ()
    """Fields of the source records (listed in prepare.keep) by whose values results are given, too."""
    length_bins: Annotated[tuple[PositiveCount, ...], BeforeValidator(_require_increasing)] = (
        32,
        64,
        128,
        256,
        512,
        1024,
    )
    """Upper bounds, in tokens of a row, of the bins by which perplexity is given."""
    general: GeneralTextSettings = GeneralTextSettings()
    """Perplexity of text outside the task."""
    harness: HarnessSettings = HarnessSettings()
    """lm-evaluation-harness tasks to run."""
    judge: JudgeSettings = JudgeSettings()
    """Pairs of generated answers, judged by another model; informs, and never gates."""
    latency_rows: Count = 8
    """Test rows answered one at a time, to measure seconds per answer and memory; 0 measures neither."""
    own_templates: bool = False
    """Ask a champion that has another base in its own chat template: model and template are then compared as one."""
    quantization_rows: PositiveCount = 64
    """Validation rows on which `ratchet evaluate --quantization` compares full precision with 4 bits."""

    @model_validator(mode="after")
    def _compiles(self) -> "Evaluate":
        if self.answer_format not in (None, "json"):
            try:
                re.compile(str(self.answer_format))
            except re.error as error:
                raise ValueError(f"answer_format: {self.answer_format!r} is no regular expression ({error})") from None
        return self
