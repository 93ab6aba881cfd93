"""Runs the probe inputs in a format's runtime, and compares distributions, answers and tokens with base + adapter."""

import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from ratchet.errors import DamagedFileError
from ratchet.exporters.verification.probe_inputs import ProbeInputs
from ratchet.models import scoring
from ratchet.models.chunked_loss import ForwardPass
from ratchet.models.device import Model
from ratchet.quality_gate import paired_test
from ratchet.storage.records.export import DistributionDistance, Progress, TaskScore

LIKELY_SHARE = 1000.0
"""A token counts as likely if base + adapter gives it a probability above 1 / (vocabulary size * LIKELY_SHARE)."""
MIN_LOG_PROBABILITY = -149 * math.log(2)
"""Logarithm of 2^-149, the smallest positive float32 number. It replaces the logarithm of zero. So if a format excludes
a token that the reference considers possible, the divergence is some hundred nats instead of infinity, which JSON
cannot store."""
_TEST_PLAN = paired_test.PairedTestPlan(confidence=0.975, power=0.8, discordance=0.1, resamples=9999, seed=0)
"""Plan of the paired test of answers. Two one-sided bounds of 97.5 % form a two-sided interval of 95 %; the other
values are the gate's defaults."""
LogProbabilities = NDArray[np.float32]
"""[positions, vocabulary], in nats."""
Score = Callable[[Sequence[str], Sequence[str]], Sequence[float]]
"""Function that scores answers, given the expected answers and a model's answers; higher scores are better. The caller
passes the evaluation's own metric, so that correctness is defined in one place."""
Decode = Callable[[Sequence[int]], str]


class ModelRuntime(Protocol):
    """An exported model opened in its runtime. Use it in one thread, inside the `with` block that opened it."""

    @property
    def name(self) -> str:
        """Name and version, such as `onnxruntime 1.31.1`."""
        ...

    def token_ids(self, text: str) -> list[int]:
        """Tokenize a text with the model's own tokenizer, which recognizes special tokens in it and adds none."""
        ...

    def log_probabilities(self, ids: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        """Return log-probabilities of the next token in nats, [positions, vocabulary].

        Row i is for the token that follows ids[: positions[i] + 1].

        Args:
            ids: all tokens of one row.
            positions: ascending indices into `ids`.
        """
        ...

    def generate(self, prompt: Sequence[int], max_new_tokens: int, ends: Sequence[int]) -> list[int]:
        """Return the greedy continuation, up to and including a token of `ends`, or up to the limit."""
        ...


@dataclass(frozen=True)
class ReferenceOutputs:
    """base + adapter's outputs for all probe inputs."""

    log_probabilities: list[NDArray[np.float32]]
    """[positions, vocabulary] for each row. Only this value is large in memory while formats are verified."""
    answers: list[list[int]]
    """Token ids of each answer."""
    texts: list[list[int]]
    """Token ids of the probe texts."""


@dataclass(frozen=True)
class ParityResult:
    """Differences between one format and base + adapter."""

    distance: DistributionDistance
    task: TaskScore | None
    texts_tokenised: int
    texts: int
    tokens_per_second: float
    """Median over the answers; the time of an answer includes its prompt. 0 without prompts."""


def collect_reference(runtime: ModelRuntime, inputs: ProbeInputs, progress: Progress) -> ReferenceOutputs:
    """Run base + adapter on all probe inputs."""
    return ReferenceOutputs(
        log_probabilities=list(_compute_distributions(runtime, inputs, progress)),
        answers=_generate_answers(runtime, inputs, progress)[0],
        texts=[runtime.token_ids(text) for text in inputs.texts],
    )


def compare_format(
    runtime: ModelRuntime, reference: ReferenceOutputs, inputs: ProbeInputs, decode: Decode, score: Score,
    progress: Progress,
) -> ParityResult:  # fmt: skip
    """Run a format on all probe inputs, and compare its outputs with the reference.

    Args:
        runtime: the format, opened in its runtime.
        reference: outputs of base + adapter.
        inputs: the probe inputs.
        decode: converts the tokens of an answer to text without special tokens.
        score: the evaluation's scoring function for `inputs.metric`.
        progress: called with activity, finished rows and their total.

    Raises:
        DamagedFileError: the format has another vocabulary, or returns NaN.
    """
    log_probabilities = _compute_distributions(runtime, inputs, progress)
    distance = measure_distance(reference.log_probabilities, log_probabilities, inputs.targets)
    answers, speed = _generate_answers(runtime, inputs, progress)
    task_score = score_task(inputs, answers, reference.answers, decode, score)
    same_texts = sum(runtime.token_ids(text) == ids for text, ids in zip(inputs.texts, reference.texts, strict=True))
    return ParityResult(distance, task_score, same_texts, len(inputs.texts), speed)


def _compute_distributions(
    runtime: ModelRuntime, inputs: ProbeInputs, progress: Progress
) -> Iterator[NDArray[np.float32]]:
    total = len(inputs.rows)
    for row, (ids, positions) in enumerate(zip(inputs.rows, inputs.positions, strict=True)):
        progress("distributions", row, total)
        yield runtime.log_probabilities(ids, positions)
    progress("distributions", total, total)


def _generate_answers(runtime: ModelRuntime, inputs: ProbeInputs, progress: Progress) -> tuple[list[list[int]], float]:
    """Return the answers, and the median of their tokens per second."""
    answers, speeds, total = [], [], len(inputs.prompts)
    for row, prompt in enumerate(inputs.prompts):
        progress("answers", row, total)
        start_s = time.perf_counter()
        answer = list(runtime.generate(prompt, inputs.max_new_tokens, inputs.end_ids))
        speeds.append(len(answer) / max(time.perf_counter() - start_s, 1e-9))
        answers.append(answer)
    if total:
        progress("answers", total, total)
    return answers, statistics.median(speeds) if speeds else 0.0


# Distributions.


def measure_distance(
    reference: Iterable[LogProbabilities], compared: Iterable[LogProbabilities], targets: Iterable[Sequence[int]]
) -> DistributionDistance:  # fmt: skip
    """Compare the log-probabilities of two models row by row. Generators are consumed one row at a time.

    `mean_difference` and `max_difference` are the mean and maximum of |difference| over the likely tokens
    (LIKELY_SHARE). The divergence is the sum of p (log p - log q) over the vocabulary (Kullback and Leibler 1951). Each
    term is computed with an additional - p + q. For exact probabilities, these additions sum to zero; for float32
    values, they remove the effect of rounding. Sums are float64.

    Args:
        reference: log-probabilities of base + adapter for each row.
        compared: log-probabilities of the compared model at the same positions.
        targets: for each row, the tokens that follow its positions.

    Raises:
        DamagedFileError: the compared model returns NaN, or values for another vocabulary.
        ValueError: the rows have no position, or the numbers of rows differ.
    """
    rows = 0
    differences: list[NDArray[np.float64]] = []
    kl: list[float] = []
    agreements: list[bool] = []
    nats: list[tuple[float, float]] = []
    for row, (expected, values, tokens) in enumerate(zip(reference, compared, targets, strict=True)):
        if expected.shape != values.shape:
            raise DamagedFileError(
                f"row {row}: log-probabilities: found shape {values.shape}; expected {expected.shape} (positions, "
                "vocabulary) as in base + adapter; export again"
            )
        if np.isnan(values).any() or np.isposinf(values).any():
            raise DamagedFileError(
                f"row {row}: log-probabilities: found NaN or infinity; the exported format or its runtime is faulty"
            )
        rows += 1
        # Position by position, so that float64 copies are only as large as the vocabulary.
        for expected_position, position, token in zip(expected, values, tokens, strict=True):
            p = np.maximum(expected_position.astype(np.float64), MIN_LOG_PROBABILITY)
            q = np.maximum(position.astype(np.float64), MIN_LOG_PROBABILITY)
            is_likely = p > -math.log(LIKELY_SHARE * len(p))
            difference = np.abs(q[is_likely] - p[is_likely])
            differences.append(np.array([len(difference), difference.sum(), difference.max()]))
            # The exact probabilities of both models sum to 1, so the terms -p + q only cancel float32 rounding.
            kl.append(max(0.0, float((np.exp(p) * (p - q) - np.exp(p) + np.exp(q)).sum())))
            agreements.append(bool(p.argmax() == q.argmax()))
            nats.append((-float(q[token]), -float(p[token])))
    if not kl:
        raise ValueError("no position to compare")
    likely, sums, maxima = np.stack(differences, axis=1)
    perplexity, reference_perplexity = np.exp(np.mean(nats, axis=0))
    return DistributionDistance(
        rows=rows,
        positions=len(kl),
        max_difference=float(maxima.max()),
        mean_difference=float(sums.sum() / likely.sum()),
        kl=float(np.mean(kl)),
        max_kl=max(kl),
        greedy_agreement=float(np.mean(agreements)),
        perplexity=float(perplexity),
        reference_perplexity=float(reference_perplexity),
    )


# Answers.


def score_task(
    inputs: ProbeInputs, answers: Sequence[list[int]], reference: Sequence[list[int]], decode: Decode, score: Score
) -> TaskScore | None:
    """Score a format's answers and base + adapter's answers, token ids of each, to the same prompts.

    Without prompts, return None. Each row is its own group if the inputs name no groups. The interval of the difference
    is the quality gate's: Tango's score interval for binary scores, otherwise the BCa
    bootstrap over complete groups (quality_gate/paired_test.py).

    Raises:
        ValueError: the number of answers differs from the number of expected answers.
    """
    if not inputs.expected:
        return None
    scores, reference_scores = (
        list(map(float, score(inputs.expected, [decode(tokens).strip() for tokens in rows])))
        for rows in (answers, reference)
    )
    pairs = paired_test.PairedScores(scores, reference_scores, "higher", groups=inputs.groups or None)
    result = paired_test.compare(pairs, 0.0, _TEST_PLAN)
    same = sum(a == b for a, b in zip(answers, reference, strict=True))
    return TaskScore(
        metric=inputs.metric,
        rows=len(scores),
        value=sum(scores) / len(scores),
        reference=sum(reference_scores) / len(reference_scores),
        difference=result.difference,
        low=result.low,
        high=result.high,
        same_answers=same / len(scores),
    )


# The reference model.


class TorchRuntime:
    """Runs a transformers or peft model in memory through the interface `ModelRuntime`, on any device."""

    name = f"transformers {transformers.__version__}"

    def __init__(self, model: Model, tokenizer: Any) -> None:
        """Wrap a causal model in evaluation mode, with or without adapters; nothing is loaded or changed."""
        self._model, self._tokenizer = model, tokenizer

    def token_ids(self, text: str) -> list[int]:
        """Tokenize a text; special tokens in the text are recognized, and no special tokens are added."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def log_probabilities(self, ids: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
        """Return log-probabilities of the next token at each position in nats: [positions, vocabulary]."""
        return log_softmax(logits_at(self._model, ids, positions))

    def generate(self, prompt: Sequence[int], max_new_tokens: int, ends: Sequence[int]) -> list[int]:
        """Return the greedy continuation, including the token that ended it."""
        config = self._model.config
        use_cache, config.use_cache = config.use_cache, True  # training turned it off, and some models' code reads it
        try:
            pad = self._tokenizer.pad_token_id  # a single row needs no padding
            return scoring.generate(self._model, [prompt], ends, max_new_tokens, 0 if pad is None else pad)[0]
        finally:
            config.use_cache = use_cache


def logits_at(model: Model, ids: Sequence[int], positions: Sequence[int]) -> NDArray[np.float32]:
    """Compute the logits of a row at some positions: [positions, vocabulary] in float32.

    The head runs on the range from the first to the last position in chunks. So memory never contains all logits of a
    long row with a large vocabulary.

    Args:
        model: a causal model.
        ids: token ids of the row.
        positions: ascending indices into `ids`, at least one.
    """
    first, end = positions[0], positions[-1] + 1
    chunks: list[Tensor] = []
    with torch.no_grad():
        row = torch.tensor([list(ids)], device=model.device)
        for start, logits in ForwardPass(model, row, (first, end)).pieces():
            selected = [position - start for position in positions if start <= position < start + logits.shape[1]]
            chunks.append(logits[0, selected].float().cpu())
    gathered: NDArray[np.float32] = torch.cat(chunks).numpy()
    return gathered


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Convert logits [positions, vocabulary] to log-probabilities in nats."""
    log_probabilities: NDArray[np.float32] = torch.log_softmax(torch.from_numpy(logits), dim=-1).numpy()
    return log_probabilities
