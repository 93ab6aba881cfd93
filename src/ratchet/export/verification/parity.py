"""What a form answers to the gate's samples, scored as the evaluation scores, beside the answers of base + adapter."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from ratchet.export.verification.divergence import measure_closeness
from ratchet.export.verification.probe_inputs import ProbeInputs
from ratchet.gate import paired_test
from ratchet.models import scoring
from ratchet.models.chunked_loss import ForwardPass
from ratchet.models.device import Model
from ratchet.models.runtimes.runtime import ModelRuntime
from ratchet.storage.records.export import DistributionDistance, Progress, TaskScore

Score = Callable[[Sequence[str], Sequence[str]], Sequence[float]]
"""Expected and given answers, pair by pair, to a score each, higher is better. The evaluation's own measure is passed
in by whoever calls: what counts as right is defined in one place."""

_PLAN = paired_test.PairedTestPlan(confidence=0.975, power=0.8, discordance=0.1, resamples=9999, seed=0)
"""Two one-sided bounds of 97.5 % are a two-sided interval of 95 %; the rest as section gate has it by default."""


@dataclass(frozen=True)
class FormatAnswers:
    """What one form answered, row by row."""

    tokens: Sequence[Sequence[int]]
    texts: Sequence[str]
    """The same as text, stripped, without special tokens."""


@dataclass(frozen=True)
class ParityTask:
    """What was asked, and how answers to it are scored."""

    metric: str
    expected: Sequence[str]
    score: Score
    groups: Sequence[str | None] | None = None
    """Rows of one group are no independent samples; None: a group of its own."""


def score_task(task: ParityTask, answers: FormatAnswers, reference: FormatAnswers) -> TaskScore | None:
    """Score answers beside those of base + adapter to the same prompts; None when nothing was asked.

    The interval of the difference is the gate's: Tango's score interval for right and wrong, else the BCa bootstrap,
    groups whole (gate/paired_test.py).

    Raises:
        ValueError: not as many answers as were expected.
    """
    if not task.expected:
        return None
    new, old = ([float(one) for one in task.score(task.expected, who.texts)] for who in (answers, reference))
    found = paired_test.compare(paired_test.PairedScores(new, old, "higher", groups=task.groups), 0.0, _PLAN)
    same = sum(list(a) == list(b) for a, b in zip(answers.tokens, reference.tokens, strict=True))
    return TaskScore(
        metric=task.metric,
        rows=len(new),
        value=sum(new) / len(new),
        reference=sum(old) / len(old),
        difference=found.difference,
        low=found.low,
        high=found.high,
        same_answers=same / len(new),
    )


# One form examined in its own runtime: distributions, answers, speed and tokens, against those of base + adapter.

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class ReferenceOutputs:
    """What base + adapter says to all of it."""

    log_probabilities: list[NDArray[np.float32]]
    """Of each row, [positions, vocabulary]: the one large thing that is held while forms are examined."""
    answers: list[list[int]]
    texts: list[list[int]]
    """Token ids of the texts."""


@dataclass(frozen=True)
class ParityResult:
    """What one form showed."""

    closeness: DistributionDistance
    task: TaskScore | None
    texts_tokenised: int
    texts: int
    tokens_per_second: float
    """Median over answers, each asked alone, its prompt included; 0 where nothing was asked."""


def collect_reference(runtime: ModelRuntime, material: ProbeInputs, progress: Progress) -> ReferenceOutputs:
    """Ask base + adapter."""
    return ReferenceOutputs(
        log_probabilities=list(_compute_distributions(runtime, material, progress)),
        answers=_generate_answers(runtime, material, progress)[0],
        texts=[runtime.token_ids(text) for text in material.texts],
    )


def examine_format(
    runtime: ModelRuntime, reference: ReferenceOutputs, material: ProbeInputs, decode: Decode, score: Score,
    progress: Progress,
) -> ParityResult:  # fmt: skip
    """Ask a form the same, and compare.

    Args:
        decode: tokens of an answer to text, special tokens left out.
        score: of expected and given answers, by `material.metric`: the evaluation's own.

    Raises:
        DamagedFileError: the form has another vocabulary, or gives no numbers.
    """
    given = _compute_distributions(runtime, material, progress)
    close = measure_closeness(reference.log_probabilities, given, material.targets)
    answers, speed = _generate_answers(runtime, material, progress)
    task = ParityTask(material.metric, material.expected, score, material.groups or None)
    both = (FormatAnswers(tokens, [decode(one).strip() for one in tokens]) for tokens in (answers, reference.answers))
    same = sum(runtime.token_ids(text) == ids for text, ids in zip(material.texts, reference.texts, strict=True))
    return ParityResult(close, score_task(task, *both), same, len(material.texts), speed)


def _compute_distributions(
    runtime: ModelRuntime, material: ProbeInputs, progress: Progress
) -> Iterator[NDArray[np.float32]]:
    total = len(material.rows)
    for row, (ids, positions) in enumerate(zip(material.rows, material.positions, strict=True)):
        progress("distributions", row, total)
        yield runtime.log_probabilities(ids, positions)
    progress("distributions", total, total)


def _generate_answers(
    runtime: ModelRuntime, material: ProbeInputs, progress: Progress
) -> tuple[list[list[int]], float]:
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


# A transformers or peft model in memory, asked as every other runtime is: what the exported forms are held against.


class TorchRuntime:
    """Implements `runtimes.runtime.Runtime` over a model in evaluation mode, on any device, in its own arithmetic."""

    def __init__(self, model: Model, tokenizer: Any) -> None:
        """Nothing is loaded or changed.

        Args:
            model: causal; with adapters or not.
            tokenizer: its own.
        """
        self._model, self._tokenizer = model, tokenizer

    @property
    def name(self) -> str:
        """Name and version of the library that computes."""
        return f"transformers {transformers.__version__}"

    def token_ids(self, text: str) -> list[int]:
        """The text's tokens; special tokens in it count as such, and none is put before it."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def log_probabilities(self, ids: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        """Of the next token, in nats: [positions, vocabulary]; row i is what follows ids[: positions[i] + 1]."""
        return log_softmax(logits_at(self._model, ids, positions))

    def generate(self, prompt: Sequence[int], max_new_tokens: int, ends: Sequence[int]) -> list[int]:
        """The likeliest continuation, with a cache of keys and values; holds the token that ended it."""
        config = self._model.config
        before, config.use_cache = config.use_cache, True  # off since training, and read by some models' own code
        try:
            pad = self._tokenizer.pad_token_id  # nothing is filled with it: there is one row
            return scoring.generate(self._model, [prompt], ends, max_new_tokens, 0 if pad is None else pad)[0]
        finally:
            config.use_cache = before


def logits_at(model: Model, ids: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
    """Logits of a row at some positions: [positions, vocabulary] in float32.

    The head runs on pieces of the columns between the first and the last position, so a long row of a large
    vocabulary is never in memory as a whole.

    Args:
        positions: ascending indices into `ids`, at least one.
    """
    first, last = positions[0], positions[-1] + 1
    found: list[Tensor] = []
    with torch.no_grad():
        row = torch.tensor([list(ids)], device=model.device)
        for start, logits in ForwardPass(model, row, (first, last)).pieces():
            inside = [one - start for one in positions if start <= one < start + logits.shape[1]]
            found.append(logits[0, inside].float().cpu())
    gathered: NDArray[np.float32] = torch.cat(found).numpy()
    return gathered


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Logits [positions, vocabulary] as log-probabilities in nats."""
    found: NDArray[np.float32] = torch.log_softmax(torch.from_numpy(logits), dim=-1).numpy()
    return found
