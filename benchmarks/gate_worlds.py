"""Draws evaluations from known truths for benchmarks/gate_power.py, and lets the gate decide about them."""

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from ratchet.config.gate import Gate, MustImproveRule, MustNotRegressRule
from ratchet.quality_gate.decision import decide_verdict
from ratchet.quality_gate.evidence import GateEvidence
from ratchet.quality_gate.paired_test import PairedScores
from ratchet.storage.records.evaluation import SHARE, EvaluationReport, MetricValue, ModelRole, ModelScores, SampleScore
from ratchet.storage.records.export import MergeParity, ModelBundle
from ratchet.storage.records.gate import Champion, ChampionFile, Decision

Rng = np.random.Generator
Draw = Callable[[Rng, int, float], PairedScores]
"""Draws an evaluation of n samples; the candidate's true advantage is the last argument (negative: worse)."""

MODEL, CHAMPION, ADAPTER = "c" * 64, "a" * 64, "d" * 64
CURRENT = ChampionFile(champion=Champion(version=1, model_digest=CHAMPION, adapter_digest="x" * 64, run_id="r0"))
RESAMPLES = 1000
"""Resamples of each comparison in the benchmark; the gate's default is ten times as many."""


def answers(rng: Rng, n: int, better: float, accuracy: float, discordance: float) -> PairedScores:
    """Draw right and wrong answers: `accuracy` is the champion's; the models differ on at least the share `discordance`
    of samples."""
    discordance = max(discordance, abs(better))
    won, lost = (discordance + better) / 2, (discordance - better) / 2
    right = accuracy - lost
    counts = rng.multinomial(n, [right, won, lost, 1 - right - won - lost])
    new, old = ((1.0, 1.0, 0.0, 0.0), (1.0, 0.0, 1.0, 0.0))
    return PairedScores(np.repeat(new, counts).tolist(), np.repeat(old, counts).tolist(), "higher")


def of_answers(accuracy: float, discordance: float) -> Draw:
    """Return `answers` with these parameters as a `Draw`."""
    return lambda rng, n, better: answers(rng, n, better, accuracy, discordance)


def sampled(rng: Rng, n: int, better: float) -> PairedScores:
    """Draw means of four sampled answers to questions of different difficulty."""
    hard = 0.1 + 0.8 * rng.beta(3, 2, n)
    new = rng.binomial(4, hard + better) / 4
    return PairedScores(new.tolist(), (rng.binomial(4, hard) / 4).tolist(), "higher")


def skewed(rng: Rng, n: int, better: float) -> PairedScores:
    """Draw lognormal losses. Their changes are exponential: most samples get slightly better, some much worse."""
    old = rng.lognormal(0, 1, n)
    return PairedScores((old + rng.exponential(0.2, n) - 0.2 - better).tolist(), old.tolist(), "lower")


def rarely(rng: Rng, n: int, better: float) -> PairedScores:
    """Draw losses of which one in twenty rises by one (on average), while all others hardly change: the hardest case to
    detect."""
    old = rng.lognormal(0, 1, n)
    rise = (rng.random(n) < 0.05) * rng.exponential(1.0, n) - 0.05
    return PairedScores((old + rise + rng.normal(0, 0.05, n) - better).tolist(), old.tolist(), "lower")


def conversations(rng: Rng, n: int, better: float) -> PairedScores:
    """Draw right and wrong answers in conversations of one to six turns. Errors occur in several turns of a
    conversation at once."""
    sizes = rng.integers(1, 7, n)
    places = np.repeat(np.arange(n), sizes)[:n]
    old = rng.random(n) < 0.8
    gains, losses = 0.2, (0.2 * 0.2 * 0.7 - better) / (0.8 * 0.7)
    fate = rng.random(n)  # one draw per conversation
    turned = rng.random(n) < 0.7
    improves, worsens = fate[places] < gains, fate[places] > 1 - losses
    new = np.where(old, ~(worsens & turned), improves & turned)
    return PairedScores(
        new.astype(float).tolist(), old.astype(float).tolist(), "higher", groups=[f"c{k}" for k in places]
    )


def nats(rng: Rng, n: int, better: float) -> PairedScores:
    """Draw perplexities that fell by the fraction `better`: texts of 20 to 199 tokens, changes with heavy tails (t with
    5 degrees of freedom)."""
    tokens = rng.integers(20, 200, n).astype(float)
    old = rng.normal(2.5, 0.4, n)
    new = old + np.log1p(-better) + 0.2 * rng.standard_t(5, n)
    return PairedScores((new * tokens).tolist(), (old * tokens).tolist(), "lower", "perplexity", tokens.tolist())


def decide(pairs: Sequence[PairedScores], *rules: MustImproveRule | MustNotRegressRule) -> Decision:
    """Return the gate's decision on an evaluation with metrics m0, m1, ..., all of the same samples."""
    found = decide_verdict(evidence(pairs), Gate(rules=rules, resamples=RESAMPLES))
    if found.decision == "INVALID":  # it would count as an error rate of zero
        raise RuntimeError(f"an evaluation that the gate takes for broken: {found.reasons[0].text}")
    return found.decision


def keep(margin: float) -> MustNotRegressRule:
    """Return a rule: the first metric must not be worse than the champion's by the margin."""
    return MustNotRegressRule(rule="must_not_regress", metric="m0", margin=margin)


def improve(*metrics: str) -> MustImproveRule:
    """Return a rule that requires an improvement over the champion."""
    return MustImproveRule(rule="must_improve", metric=metrics, over="champion")


def evidence(pairs: Sequence[PairedScores]) -> GateEvidence:
    """Return all evidence that the gate uses. Only the scores can give it a reason to reject."""
    names = ids(len(pairs[0].new))
    samples: dict[ModelRole, dict[str, dict[str, SampleScore]]] = {"candidate": {}, "champion": {}}
    for place, one in enumerate(pairs):
        weights = one.weights or [1.0] * len(names)
        for who, values in (("candidate", one.new), ("champion", one.old)):
            samples[who][f"m{place}"] = {
                name: _sample(name, value, weight) for name, value, weight in zip(names, values, weights, strict=True)
            }
    groups = pairs[0].groups
    scores = {who: _scores(pairs, who) for who in samples}
    return GateEvidence(
        report=EvaluationReport(
            adapter_digest=ADAPTER, base_digest="b" * 64, data_digest="e" * 64, run_id="r1", model_digest=MODEL,
            champion_digest=CHAMPION, test_set_digest="9" * 64, contracts={"k": {}}, scores=scores,
        ),
        bundle=_bundle(),
        champion=CURRENT,
        samples=samples,
        groups=dict(zip(names, groups, strict=True)) if groups else {},
        test_set_uses=1, noise=None, noise_samples={}, current_task_digests={},
    )  # fmt: skip


@lru_cache
def ids(n: int) -> tuple[str, ...]:
    """Return names of samples."""
    return tuple(f"s{k:06d}" for k in range(n))


@lru_cache(maxsize=100_000)
def _sample(name: str, value: float, weight: float) -> SampleScore:
    """Return a record without validation, from a cache: creating records takes most of the time."""
    return SampleScore.model_construct(id=name, value=value, weight=weight)


@lru_cache
def _bundle() -> ModelBundle:
    parity = MergeParity(rows=1, tokens=1, max_logit_difference=0.0, mean_logit_difference=0.0, greedy_agreement=1.0)
    return ModelBundle(
        model_digest=MODEL, adapter_digest=ADAPTER, base_digest="b" * 64, data_digest="e" * 64, run_id="r1",
        merge_base="dequantized", dtype="float32", size_bytes=1, parity=parity,
    )  # fmt: skip


def _unit(pairs: PairedScores) -> str:
    """Return the unit that an evaluation would report."""
    if pairs.better == "higher":
        return "proportion" if {*pairs.new, *pairs.old} <= {0.0, 1.0} else SHARE
    return "1" if pairs.weights else "nats per token, mean of rows"


def _scores(pairs: Sequence[PairedScores], who: ModelRole) -> ModelScores:
    metrics = {}
    for place, one in enumerate(pairs):
        values: NDArray[np.float64] = np.asarray(one.new if who == "candidate" else one.old)
        mean = float(np.exp(values.sum() / sum(one.weights))) if one.weights else float(values.mean())
        metrics[f"m{place}"] = MetricValue(
            value=mean, n=len(values), low=mean, high=mean, better=one.better, kind=one.kind,
            unit=_unit(one),
        )  # fmt: skip
    digest = ADAPTER if who == "candidate" else CHAMPION
    files = {name: name for name in metrics}
    return ModelScores(model_digest=digest, model_format="adapter", contract="k", metrics=metrics, samples=files)
