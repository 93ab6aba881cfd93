"""Inputs of the safety tests: prompts to refuse or to answer, paired prompts, injections, training rows, canaries.

The bundled files were written for Ratchet and have its licence. They are harmless to read: unsafe prompts contain no
operational detail. The pairs of a safe and an unsafe sense of the same words follow the idea of XSTest (P. Roettger et
al., NAACL 2024, arXiv 2308.01263); none of its prompts is used.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from ratchet.config.evaluate import SafetySettings
from ratchet.config.settings import Settings
from ratchet.data import token_files
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.errors import SettingsError
from ratchet.evaluation.rows import read_task_text
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import Canary, DatasetCard

BUNDLED = "bundled"
"""Value of a setting that names the file of Ratchet."""
GROUP = "{group}"
Text = Annotated[str, StringConstraints(min_length=1, strip_whitespace=True)]


class _Line(BaseModel):
    """A line of a file with prompts."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    form: ClassVar[str]
    """The keys of a line with their values, for messages."""
    category: str = ""

    @property
    def id(self) -> str:
        """Digest of the text."""
        text: str = getattr(self, "prompt", "") or getattr(self, "template", "")
        return digests.hash_bytes(text.encode())[: token_files.ID_DIGITS]


class SafetyPrompt(_Line):
    """A prompt that a model must refuse or answer."""

    form = '{"prompt": TEXT, "expected": "refuse" or "answer"}'
    prompt: Text
    expected: Literal["refuse", "answer"]
    pair: str = ""
    """Id that a safe and an unsafe prompt share; for the reader only."""


class InjectionPrompt(_Line):
    """A prompt whose quoted text contains an instruction to write the marker."""

    form = '{"prompt": TEXT, "marker": TEXT}'
    prompt: Text
    marker: Text

    @model_validator(mode="after")
    def _check_marker(self) -> "InjectionPrompt":
        if self.marker not in self.prompt:
            raise ValueError(f"the prompt does not contain the marker {self.marker!r}")
        return self


class PromptTemplate(_Line):
    """A prompt with `{group}` where the names or groups are exchanged."""

    form = '{"template": TEXT, "groups": [TEXT, TEXT, ...]}'
    template: Text
    groups: Annotated[tuple[Text, ...], Field(min_length=2)]

    def fill(self, group: str) -> str:
        """Return the prompt for a group."""
        return self.template.replace(GROUP, group)

    @model_validator(mode="after")
    def _check_groups(self) -> "PromptTemplate":
        if GROUP not in self.template:
            raise ValueError(f"the template does not contain {GROUP}")
        if len(set(self.groups)) != len(self.groups):
            raise ValueError("groups: expected each group once")
        return self


@dataclass(frozen=True)
class TrainingRowStart:
    """Tokens of a training row up to an answer, and the next tokens of the answer."""

    id: str
    prompt: list[int]
    continuation: list[int]


@dataclass(frozen=True)
class SafetySuite:
    """All inputs; empty for tests that the settings leave out."""

    prompts: tuple[SafetyPrompt, ...] = ()
    templates: tuple[PromptTemplate, ...] = ()
    injections: tuple[InjectionPrompt, ...] = ()
    rows: tuple[TrainingRowStart, ...] = ()
    untestable_rows: int = 0
    """Number of training rows before the last of `rows` whose answers are too short."""
    canaries: tuple[Canary, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.prompts or self.templates or self.injections or self.rows or self.canaries)

    def describe(self, scorer: str) -> dict[str, Any]:
        """Return the terms of the contract."""
        lines = {"prompts": self.prompts, "paired_prompts": self.templates, "injections": self.injections}
        return {
            "scorer": scorer,
            "max_new_tokens": SafetySettings.max_new_tokens,
            **{name: digests.hash_json([line.model_dump() for line in part]) for name, part in lines.items()},
            "training_rows": digests.hash_json([row.id for row in self.rows]),
            "canaries": digests.hash_json([canary.model_dump() for canary in self.canaries]),
        }


def read_suite(layout: ProjectLayout, settings: Settings, card: DatasetCard) -> SafetySuite:
    """Read the inputs of the tests in the settings, and the canaries of the data.

    Raises:
        DataError: a file is not below data/tasks.
        SettingsError: a file is missing, empty or not as expected.
    """
    safety = settings.evaluate.safety
    rows, untestable = _sample_training_rows(layout.data, safety.training_rows, safety.continuation_tokens)
    return SafetySuite(
        prompts=_read_lines(layout, safety.prompts, "prompts", "safety_prompts.jsonl", SafetyPrompt),
        templates=_read_lines(layout, safety.paired_prompts, "paired_prompts", "paired_prompts.jsonl", PromptTemplate),
        injections=_read_lines(layout, safety.injections, "injections", "injection_prompts.jsonl", InjectionPrompt),
        rows=tuple(rows),
        untestable_rows=untestable,
        canaries=card.canaries,
    )


Line = TypeVar("Line", SafetyPrompt, InjectionPrompt, PromptTemplate)


def _read_lines(
    layout: ProjectLayout, name: str | None, setting: str, bundled: str, kind: type[Line]
) -> tuple[Line, ...]:
    if name is None:
        return ()
    setting = f"evaluate.safety.{setting}"
    if name == BUNDLED:
        path = Path(__file__).with_name(bundled)
        text = path.read_text(encoding="utf-8")
    else:
        path = layout.tasks / name
        text = read_task_text(layout, name, setting)
    lines = []
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            lines.append(kind.model_validate(json.loads(line)))
        except ValidationError as error:
            problem = _describe_problem(error.errors()[0])
            raise SettingsError(
                f"{setting}: {path}:{number}: {problem}; expected a JSON object such as {kind.form}"
            ) from None
        except ValueError as error:
            raise SettingsError(f"{setting}: {path}:{number}: not JSON ({error}); expected {kind.form}") from None
    if not lines:
        raise SettingsError(f"{setting}: {path} is empty; write one JSON object per line, or set null")
    repeated = next((key for key, count in Counter(line.id for line in lines).items() if count > 1), None)
    if repeated is not None:
        line_numbers = [number for number, line in enumerate(lines, start=1) if line.id == repeated]
        raise SettingsError(f"{setting}: {path}: prompts {line_numbers[0]} and {line_numbers[1]} are equal; remove one")
    return tuple(lines)


def _describe_problem(problem: Mapping[str, Any]) -> str:
    """Describe one of pydantic's errors about a line."""
    key = ".".join(map(str, problem["loc"]))
    match problem["type"]:
        case "missing":
            return f"found no key {key!r}"
        case "extra_forbidden":
            return f"found the unknown key {key!r}"
        case "value_error":
            return str(problem["ctx"]["error"])
    found = json.dumps(problem["input"], ensure_ascii=False)
    return f"{key + ': ' if key else ''}found {found:.60}"


def _sample_training_rows(data: Path, count: int, tokens: int) -> tuple[list[TrainingRowStart], int]:
    """Return the first `count` different rows with an answer of more than `tokens` tokens, and the number of others.

    Training rows are sorted by a digest of their content, so the first ones are a random sample.
    """
    found: list[TrainingRowStart] = []
    seen: set[str] = set()
    short = 0
    if not count:
        return found, short
    for row in token_files.open_split(data, "train").select_columns(["id", "input_ids", "labels"]):
        if row["id"] in seen:
            continue
        seen.add(row["id"])
        start = find_long_answer(row["labels"], tokens)
        if start is None:
            short += 1
            continue
        ids = row["input_ids"]
        found.append(TrainingRowStart(row["id"], ids[:start], ids[start : start + tokens]))
        if len(found) == count:
            break
    return found, short


def find_long_answer(labels: Sequence[int], tokens: int) -> int | None:
    """Return the start of the first run of more than `tokens` trained positions; None if there is none.

    The last token of an answer ends the turn, so a run of this length has `tokens` tokens of text.
    """
    start = 0
    for position, label in enumerate([*labels, IGNORE_INDEX]):
        if label == IGNORE_INDEX:
            if position - start > tokens and start > 0:
                return start
            start = position + 1
    return None


def list_texts(suite: SafetySuite) -> Mapping[str, str]:
    """Return all prompts that are answered with generated text, by a key that is unique in the suite."""
    texts = {one.id: one.prompt for one in suite.prompts} | {one.id: one.prompt for one in suite.injections}
    return texts | {key_of(one, group): one.fill(group) for one in suite.templates for group in one.groups}


def key_of(template: PromptTemplate, group: str) -> str:
    """Return the key of a filled template."""
    return f"{template.id} {group}"
