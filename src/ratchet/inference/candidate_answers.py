"""Outputs of `ratchet generate`, checked against their cards, each answer with the prompt that it answers."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ratchet.config.schema import Settings
from ratchet.errors import DamagedError, DataError
from ratchet.inference import output, prompts
from ratchet.inference.prompts import Prompt, Source
from ratchet.inference.spec import ASKED, Card, GenerationPaths
from ratchet.storage import digests, files
from ratchet.storage.layout import Layout
from ratchet.storage.records.selection import Teacher


class Answered(NamedTuple):
    """One answer to a prompt."""

    teacher: int
    """Index into the outputs."""
    sample: int
    answer: str
    reasoning: str | None
    finish: str
    nats: float | None
    """Mean log-probability of its tokens; None: not known."""
    probability: float | None
    """Of the answer among generate.labels, where that is known; else the geometric mean of its tokens'; else None."""


class Asked(NamedTuple):
    """A prompt and all that was answered to it."""

    prompt: Prompt
    answers: list[Answered]


@dataclass(frozen=True)
class Output:
    """One output of `ratchet generate`, as it was written."""

    path: Path
    card: Card
    prompts: Callable[[], Iterator[Prompt]]

    @property
    def teacher(self) -> Teacher:
        """Who answered, for the record."""
        spec = self.card.spec
        return Teacher(
            generation=self.card.id,
            kind=spec.model.kind,
            model_digest=spec.model.digest,
            held=spec.model.held,
            prompts_digest=spec.prompts_digest,
            answers_digest=self.card.output,
            temperature=spec.generate.temperature,
            samples=spec.generate.samples,
        )


def opened(path: Path, layout: Layout, settings: Settings, other: Path | None) -> Output:
    """An output with its prompts.

    Args:
        path: of the output.
        layout: of the project in which it was generated.
        settings: of the project: how a file of prompts is read.
        other: the file of prompts, where the generation's directory is gone.

    Raises:
        SettingsError: no such file, or no output of `ratchet generate`.
        DamagedError: it was changed since.
        DataError: its prompts are not there, or others.
    """
    card = output.card(path)
    if digests.of_file(path) != card.output:
        raise DamagedError(
            f"{path}: was changed since `ratchet generate` wrote it; remove it and generate it again (answers that are "
            "kept are not asked for again)"
        )
    return Output(path, card, _prompts(path, card, layout, settings, other))


def _prompts(
    path: Path, card: Card, layout: Layout, settings: Settings, other: Path | None
) -> Callable[[], Iterator[Prompt]]:
    folder = GenerationPaths(layout.generations / card.id).prompts
    try:
        files.verify(folder, ASKED)
    except DamagedError as error:
        if other is None:
            what = f"are not as they were kept ({error})" if folder.exists() else f"are not here any more (no {folder})"
            raise DataError(
                f"{path}: the prompts of its generation {card.id} {what}; name the file that they came from with "
                "--prompts"
            ) from None
    else:
        return lambda: prompts.kept(folder)
    how = {"column": settings.generate.column, "skip_faults": settings.generate.skip_faults}
    asked = settings.model_copy(update={"generate": card.spec.generate.model_copy(update=how)})
    source = Source(other.absolute(), asked)
    if source.measured()[1] != card.spec.prompts_digest:
        raise DataError(
            f"--prompts {other}: not the prompts of generation {card.id} ({path.name}); give the file as it was, and "
            "generate.column and prepare.system as they were"
        )
    return source.prompts


def asked(outputs: Sequence[Output]) -> Iterator[Asked]:
    """Every prompt with its answers; of outputs for the same prompts all answers together. One prompt in memory.

    Raises:
        DamagedError: an output does not hold the answers that its card speaks of.
    """
    together: dict[str, list[int]] = {}
    for number, one in enumerate(outputs):
        together.setdefault(one.card.spec.prompts_digest, []).append(number)
    for numbers in together.values():
        streams = {number: output.read(outputs[number].path, outputs[number].card) for number in numbers}
        for prompt in outputs[numbers[0]].prompts():
            answers = [one for number in numbers for one in _answers(outputs[number], number, prompt, streams[number])]
            yield Asked(prompt, answers)
        for number, records in streams.items():
            if next(records, None) is not None:
                raise DamagedError(f"{outputs[number].path}: more answers than prompts; generate it again")


def _answers(one: Output, number: int, prompt: Prompt, records: Iterator[dict[str, Any]]) -> Iterator[Answered]:
    for sample in range(one.card.spec.generate.samples):
        record: dict[str, Any] = next(records, {})
        told = (record.get("id"), record.get("prompt_digest"), record.get("sample"))
        if told != (prompt.id, prompt.digest, sample):
            raise DamagedError(
                f"{one.path}: sample {sample} of prompt {prompt.id!r} is not where it belongs; generate it again"
            )
        nats, answer = record["mean_log_probability"], record["answer"]
        probability = _probability(record.get(output.LABELS), answer, nats)
        yield Answered(number, sample, answer, record["reasoning"], record["finish"], nats, probability)


def _probability(labels: Mapping[str, float | None] | None, answer: str, nats: float | None) -> float | None:
    """Softmax of the labels' log-probabilities, where all are known and the answer is one of them."""
    known = [one for one in (labels or {}).values() if one is not None]
    if labels and len(known) == len(labels) and (own := labels.get(answer)) is not None:
        return math.exp(own - max(known)) / math.fsum(math.exp(one - max(known)) for one in known)
    return None if nats is None else math.exp(nats)
