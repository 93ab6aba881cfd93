"""Section `evaluate` of params.yaml: the measurements on the test rows, which are the same for every model."""

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from ratchet import http_client
from ratchet.config.extensions import make_name_validator
from ratchet.config.fields import (
    Count,
    Name,
    Names,
    NotNegative,
    Positive,
    PositiveCount,
    Section,
    convert_to_tuple,
    parse_number,
)

ModelFormat = Literal["adapter", "merged"]
Opponent = Literal["base", "champion", "anchor"]
Perturbation = Literal["typos", "case", "whitespace", "punctuation", "paraphrase"]
BUILTIN_METRICS = (
    "token_f1", "bleu", "rouge", "chrf", "length", "ifeval", "faithfulness", "semantic_similarity",
)  # fmt: skip
Price = Annotated[NotNegative | None, BeforeValidator(parse_number)]


def _require_distinct_opponents(value: Any) -> Any:
    value = convert_to_tuple(value)
    if isinstance(value, tuple) and (not value or len(set(value)) != len(value)):
        raise ValueError("expected at least one of base, champion and anchor, each once")
    return value


def _require_distinct_perturbations(kinds: tuple[Perturbation, ...]) -> tuple[Perturbation, ...]:
    if len(set(kinds)) != len(kinds):
        raise ValueError("expected each perturbation once")
    return kinds


def _require_valid_address(value: Any) -> Any:
    if isinstance(value, str) and (problem := http_client.find_endpoint_problem(value)):
        raise ValueError(problem)
    return value


class HarnessSettings(Section):
    """lm-evaluation-harness tasks."""

    tasks: Annotated[tuple[str, ...], BeforeValidator(convert_to_tuple)] = ()
    """YAML files in data/tasks, without suffix."""
    builtin_tasks: Annotated[tuple[str, ...], BeforeValidator(convert_to_tuple)] = ()
    """Tasks of the harness itself, e.g. hellaswag, arc_challenge, gsm8k. Their data is downloaded once."""
    limit: PositiveCount | None = None
    """Score only the first documents of each task, this many. null: all."""
    num_fewshot: Count | None = None
    """Few-shot examples before each document. null: as the task defines."""


class GeneralTextSettings(Section):
    """Perplexity of text outside the task, which shows forgetting."""

    file: Name | None = None
    """File below data/tasks that no model was trained on. null: the prose that comes with Ratchet."""
    block_tokens: ClassVar[int] = 64
    """Tokens in a block. Each block is scored without the others, and is one sample."""
    max_blocks: PositiveCount = 256
    """Maximum number of blocks, from the start of the text."""


class AdditionalJudgeSettings(Section):
    """Another judge, which gets the same questions."""

    base_url: Annotated[str, BeforeValidator(_require_valid_address)]
    """OpenAI-compatible server. Its key is in RATCHET_ENDPOINT_KEY_2 (the third judge's in RATCHET_ENDPOINT_KEY_3)."""
    model: Name | None = None
    """Model name on the server. null: the only one that it serves."""
    input_price: Price = None
    """Price of a million input tokens."""
    output_price: Price = None
    """Price of a million output tokens."""


class JudgeSettings(Section):
    """An LLM judge that compares the candidate's answers with another model's."""

    base_url: Annotated[str | None, BeforeValidator(_require_valid_address)] = None
    """OpenAI-compatible server that receives test rows and answers, e.g. http://127.0.0.1:8000/v1. null: no judge."""
    model: Name | None = None
    """Model name on the server. null: the only one that it serves."""
    additional_judges: Annotated[tuple[AdditionalJudgeSettings, ...], BeforeValidator(convert_to_tuple)] = ()
    """More judges of the same pairs; their agreement is reported as Krippendorff's alpha."""
    rubric: Name | None = None
    """Text file below data/tasks that defines a good answer. null: the rubric that comes with Ratchet."""
    against: Annotated[tuple[Opponent, ...], BeforeValidator(_require_distinct_opponents)] = ("base", "champion")
    """Models to compare with: base, champion, anchor. Missing ones are skipped."""
    rows: PositiveCount | None = None
    """Maximum number of test rows to judge (a fixed sample by content). null: all answered rows."""
    show_reference: bool = False
    """Show the judge the reference answer of the row."""
    max_tokens: ClassVar[int] = 1024
    """Maximum length of the judge's reply in tokens, reasoning included."""
    temperature: ClassVar[float] = 0.0
    """Sampling temperature of the judge."""
    seed: ClassVar[int] = 0
    """Seed of the judge's sampling and of the bootstrap intervals."""
    input_price: Price = None
    """Price of a million input tokens, in any currency. null: no cost is reported."""
    output_price: Price = None
    """Price of a million output tokens, in the same currency. null: no cost is reported."""

    @model_validator(mode="after")
    def _check_judges(self) -> "JudgeSettings":
        judges = [(self.base_url, self.model), *((judge.base_url, judge.model) for judge in self.additional_judges)]
        if self.additional_judges and self.base_url is None:
            raise ValueError("additional_judges: found judges without a first one; set base_url")
        if len(set(judges)) != len(judges):
            raise ValueError("additional_judges: found the same base_url and model twice; expected different judges")
        return self


class SafetySettings(Section):
    """Tests of the safety of answers. They use a model's answers to prompts that are not test rows."""

    prompts: Name | None = None
    """Prompts to refuse or to answer: a file below data/tasks, or `bundled`. null: refusals are not tested."""
    scorer: Name = "patterns"
    """Finds refusals and harm: `patterns` (English phrases, refusals only), `judge` (the server of evaluate.judge), or
    the directory of a text classifier, relative to the project."""
    paired_prompts: Name | None = None
    """Templates in which a name or group is exchanged: a file below data/tasks, or `bundled`. null: not tested."""
    injections: Name | None = None
    """Prompts with an instruction inside quoted text: a file below data/tasks, or `bundled`. null: not tested."""
    training_rows: Count = 0
    """Training rows to test for memorization (a fixed sample by content). 0: not tested."""
    max_new_tokens: ClassVar[int] = 128
    """Maximum length of an answer to these prompts, in tokens. Such answers are greedy."""
    continuation_tokens: ClassVar[int] = 50
    """Tokens of a training row that a model must continue exactly to count as memorized."""


class Evaluate(Section):
    """Evaluation on the test rows, the same for base, candidate, champion and anchor."""

    formats: Annotated[tuple[ModelFormat, ...], BeforeValidator(convert_to_tuple), Field(min_length=1)] = ("adapter",)
    """Formats of the candidate: `adapter` on the base as in training, `merged` as exported."""
    generation_rows: Count = 0
    """Test rows to generate answers for (a fixed sample by content). 0: all."""
    max_new_tokens: PositiveCount = 16
    """Maximum length of a generated answer, in tokens."""
    samples: PositiveCount = 1
    """Answers per row. 1: greedy decoding. More: sampled, and the score of the row is their mean."""
    temperature: Positive = 0.7
    """Sampling temperature. Used only if samples is above 1."""
    seed: Count = 0
    """Seed of sampling and of the bootstrap intervals of corpus metrics."""
    metrics: Annotated[
        tuple[Annotated[Name, make_name_validator("ratchet.metrics", BUILTIN_METRICS)], ...],
        BeforeValidator(convert_to_tuple),
    ] = ()
    """More metrics of generated answers: token_f1, bleu, rouge, chrf, length, ifeval, faithfulness,
    semantic_similarity, or a metric of an installed package."""
    embedding_model: Name | None = None
    """Directory of an encoder for semantic_similarity, relative to the project. null: hidden states of the base."""
    perturbations: Annotated[
        tuple[Perturbation, ...], BeforeValidator(convert_to_tuple), AfterValidator(_require_distinct_perturbations)
    ] = ()
    """Changed prompts that are answered too, as robustness/...: typos, case, whitespace, punctuation, paraphrase."""
    answer_format: Name | None = None
    """`json`, or a regular expression that answers must match; reported as format_validity. null: not measured."""
    label_scores: bool = True
    """For task labels: score every label as the answer to each row, for precision-recall curves."""
    slice_by: Names = ()
    """Fields of the records (listed in prepare.extra_fields) by whose values results are reported too."""
    length_bins: ClassVar[tuple[int, ...]] = (
        32,
        64,
        128,
        256,
        512,
        1024,
    )
    """Upper bounds of the length bins for perplexity, in tokens of a row."""
    general_text: GeneralTextSettings = GeneralTextSettings()
    """Perplexity of text outside the task, which shows forgetting."""
    harness: HarnessSettings = HarnessSettings()
    """lm-evaluation-harness tasks."""
    judge: JudgeSettings = JudgeSettings()
    """LLM judge of generated answers. It informs only: no gate rule uses it, unless it is evaluate.safety.scorer."""
    safety: SafetySettings = SafetySettings()
    """Tests of the safety of answers, for the rules must_refuse, must_answer and harmful_rate of the gate."""
    latency_rows: Count = 8
    """Test rows to answer one at a time, to measure latency and memory. 0: not measured."""
    use_champion_template: bool = False
    """If the champion has another base, prompt it with its own chat template; model and template are then compared."""
    quantization_rows: ClassVar[int] = 64
    """Validation rows on which `ratchet evaluate --quantization` compares full precision with 4 bits."""

    @model_validator(mode="after")
    def _check_scorer(self) -> "Evaluate":
        if self.safety.scorer == "judge" and self.judge.base_url is None:
            raise ValueError("safety.scorer: found judge, but judge.base_url is null; set it, or another scorer")
        return self

    @model_validator(mode="after")
    def _check_answer_format(self) -> "Evaluate":
        if self.answer_format not in (None, "json"):
            try:
                re.compile(str(self.answer_format))
            except re.error as error:
                raise ValueError(
                    f"answer_format: found {self.answer_format!r}; expected json or a regular expression ({error})"
                ) from None
        return self
