"""One form examined in its own runtime: distributions, answers, speed and tokens, against those of base + adapter."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ratchet.proof.closeness import closeness
from ratchet.proof.material import Material
from ratchet.proof.task import Answers, Score, Task, task_score
from ratchet.records_export import Closeness, Progress, TaskScore
from ratchet.runtimes.runtime import Runtime

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Reference:
    """What base + adapter says to all of it."""

    log_probabilities: list[NDArray[np.float32]]
    """Of each row, [positions, vocabulary]: the one large thing that is held while forms are examined."""
    answers: list[list[int]]
    texts: list[list[int]]
    """Token ids of the texts."""


@dataclass(frozen=True)
class Found:
    """What one form showed."""

    closeness: Closeness
    task: TaskScore | None
    texts_tokenised: int
    texts: int
    tokens_per_second: float
    """Median over answers, each asked alone, its prompt included; 0 where nothing was asked."""


def reference_of(runtime: Runtime, material: Material, progress: Progress) -> Reference:
    """Ask base + adapter."""
    return Reference(
        log_probabilities=list(_distributions(runtime, material, progress)),
        answers=_answers(runtime, material, progress)[0],
        texts=[runtime.token_ids(text) for text in material.texts],
    )


def examine(
    runtime: Runtime, reference: Reference, material: Material, decode: Decode, score: Score, progress: Progress
) -> Found:  # fmt: skip
    """Ask a form the same, and compare.

    Args:
        decode: tokens of an answer to text, special tokens left out.
        score: of expected and given answers, by `material.metric`: the evaluation's own.

    Raises:
        DamagedError: the form has another vocabulary, or gives no numbers.
    """
    given = _distributions(runtime, material, progress)
    close = closeness(reference.log_probabilities, given, material.targets)
    answers, speed = _answers(runtime, material, progress)
    task = Task(material.metric, material.expected, score, material.groups or None)
    both = (Answers(tokens, [decode(one).strip() for one in tokens]) for tokens in (answers, reference.answers))
    same = sum(runtime.token_ids(text) == ids for text, ids in zip(material.texts, reference.texts, strict=True))
    return Found(close, task_score(task, *both), same, len(material.texts), speed)


def _distributions(runtime: Runtime, material: Material, progress: Progress) -> Iterator[NDArray[np.float32]]:
    total = len(material.rows)
    for row, (ids, positions) in enumerate(zip(material.rows, material.positions, strict=True)):
        progress("distributions", row, total)
        yield runtime.log_probabilities(ids, positions)
    progress("distributions", total, total)


def _answers(runtime: Runtime, material: Material, progress: Progress) -> tuple[list[list[int]], float]:
    """Answers, and the median of their tokens per second."""
    answers, speeds, total = [], [], len(material.prompts)
    for row, prompt in enumerate(material.prompts):
        progress("answers", row, total)
        begun_s = time.perf_counter()
        answer = list(runtime.generate(prompt, material.max_new_tokens, material.ends))
        speeds.append(len(answer) / max(time.perf_counter() - begun_s, 1e-9))
        answers.append(answer)
    if total:
        progress("answers", total, total)
    return answers, statistics.median(speeds) if speeds else 0.0
