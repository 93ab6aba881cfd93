"""Evidence for the gate that is written by hand. `decide_verdict` is a pure function, so it needs no files."""

import dataclasses
import math
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ratchet.config.gate import Gate, Rule
from ratchet.quality_gate.decision import decide_verdict
from ratchet.quality_gate.evidence import GateEvidence
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records import base
from ratchet.storage.records.evaluation import (
    ROWS,
    SHARE,
    EvaluationNoise,
    EvaluationReport,
    InferenceCost,
    MetricValue,
    ModelRole,
    ModelScores,
    SampleScore,
    answers_file,
    sample_file,
)
from ratchet.storage.records.export import MergeParity, ModelBundle
from ratchet.storage.records.gate import Champion, ChampionFile, RuleResult, Verdict

MODEL, OLD, FIRST = "c" * 64, "a" * 64, "f" * 64
ADAPTER, BASE, DATA, TASK = "d" * 64, "b" * 64, "e" * 64, "7" * 64
NOBODY = ChampionFile()
CHAMPION = Champion(version=3, model_digest=OLD, adapter_digest="x" * 64, run_id="r0")
ANCHOR = Champion(version=1, model_digest=FIRST, adapter_digest="y" * 64, run_id="r00")
ITSELF = Champion(version=4, model_digest=MODEL, adapter_digest=ADAPTER, run_id="r1")
CURRENT = ChampionFile(champion=CHAMPION, anchor=CHAMPION)

TOKENS = 10.0
"""Number of tokens of each sample of a perplexity."""
CONTRACTS: dict[str, dict[str, Any]] = {
    "k1": {
        "model_format": "adapter",
        "dtype": "float32",
        "settings": {"max_new_tokens": 16},
        "tasks": {"answers": TASK},
    },
    "k2": {
        "model_format": "merged",
        "dtype": "bfloat16",
        "settings": {"max_new_tokens": 16},
        "tasks": {"answers": TASK},
    },
}

Values = Mapping[str, float]
Models = Mapping[ModelRole, Mapping[str, Values]]
"""Scores by model, metric and sample id."""


def right(count: int, n: int = 200) -> dict[str, float]:
    """Return scores by sample: 1 for the first `count` samples and 0 for the others."""
    return {f"s{k:05d}": float(k < count) for k in range(n)}


def flipped(scores: Values, better: int = 0, worse: int = 0) -> dict[str, float]:
    """Return the scores after `better` wrong samples became right and `worse` right samples became wrong."""
    wrong, good = ([key for key, value in scores.items() if value == kind] for kind in (0.0, 1.0))
    return {**scores, **dict.fromkeys(wrong[:better], 1.0), **dict.fromkeys(good[:worse], 0.0)}


def spread(mean: float, n: int = 200, width: float = 0.3, noise: float = 0.1) -> dict[str, float]:
    """Return losses by sample with the given mean. The losses vary by sample, and each mean has its own noise."""
    draw = random.Random(mean)
    own = [draw.gauss(0, noise) for _ in range(n)]
    shift = sum(own) / n  # keeps the mean exact
    return {f"s{k:05d}": mean + width * math.sin(k) + own[k] - shift for k in range(n)}


def nats(perplexity: float, n: int = 100, noise: float = 0.08) -> dict[str, float]:
    """Return the nats of each sample for a model with this perplexity."""
    return {key: TOKENS * value for key, value in spread(math.log(perplexity), n, noise=noise).items()}


def metric(name: str, scores: Values) -> MetricValue:
    """Return the metric value that evaluation would compute from these scores. The name determines the unit and the
    kind."""
    finite = [value for value in scores.values() if math.isfinite(value)]
    mean = sum(finite) / max(1, len(finite))
    better, unit, kind = "higher", "proportion", "mean"
    if name.endswith("loss"):
        better, unit = "lower", "nats per token, mean of rows"
    elif name.endswith("perplexity"):
        better, unit, kind, mean = "lower", "1", "perplexity", math.exp(mean / TOKENS)
    elif name.endswith("f1"):
        unit = "mean of samples"
    elif name.endswith("rate"):
        better = "lower"
    elif name.endswith("overlap"):
        unit = SHARE
    return MetricValue.model_validate(
        {"value": mean, "n": len(scores), "low": mean - 0.05, "high": mean + 0.05, "better": better, "unit": unit,
         "kind": kind, "chance": 0.25 if name == "accuracy" else None}
    )  # fmt: skip


def samples(name: str, scores: Values) -> dict[str, SampleScore]:
    """Return the scores as per-sample records by id."""
    weight = TOKENS if name.endswith("perplexity") else 1.0
    return {key: SampleScore(id=key, value=value, weight=weight) for key, value in scores.items()}


def bundle(difference: float = 0.001, agreement: float = 1.0, **changes: Any) -> ModelBundle:
    parity = MergeParity(
        rows=32, tokens=900, max_logit_difference=difference, mean_logit_difference=difference / 2,
        greedy_agreement=agreement,
    )  # fmt: skip
    plain = {"model_digest": MODEL, "adapter_digest": ADAPTER, "base_digest": BASE, "data_digest": DATA,
             "run_id": "r1", "merge_base": "dequantized", "dtype": "float32", "size_bytes": 3 * 2**20,
             "parity": parity}  # fmt: skip
    return ModelBundle.model_validate({**plain, **changes})


def report(models: Models, champion: ChampionFile = NOBODY, **changes: Any) -> EvaluationReport:
    """Return the report that evaluation would write for these scores."""
    digests = {"merged": MODEL, "candidate": ADAPTER, "champion": OLD, "anchor": FIRST, "base": BASE}
    scores = {
        who: ModelScores(
            model_digest=digests[who],
            model_format="merged" if who == "merged" else "adapter",
            contract="k2" if who == "merged" else "k1",
            metrics={name: metric(name, found) for name, found in by_metric.items()},
            samples={name: sample_file(who, name) for name in by_metric},
        )
        for who, by_metric in models.items()
    }
    plain = {
        "adapter_digest": ADAPTER, "base_digest": BASE, "data_digest": DATA, "run_id": "r1", "model_digest": MODEL,
        "champion_digest": champion.champion.model_digest if champion.champion else None,
        "anchor_digest": champion.anchor.model_digest if champion.anchor else None,
        "test_set_digest": "9" * 64, "contracts": CONTRACTS, "scores": scores,
    }  # fmt: skip
    return EvaluationReport.model_validate({**plain, **changes})


def evidence(models: Models, champion: ChampionFile = NOBODY, **changes: Any) -> GateEvidence:
    """Return the complete evidence for the gate. `changes` replaces fields of the evidence."""
    found = GateEvidence(
        report=report(models, champion),
        bundle=bundle(),
        champion=champion,
        samples={
            who: {name: samples(name, scores) for name, scores in by_metric.items()}
            for who, by_metric in models.items()
        },
        groups={},
        test_set_uses=1,
        noise=None,
        noise_samples={},
        current_task_digests={"answers": TASK},
    )
    return dataclasses.replace(found, **changes)


def with_report(found: GateEvidence, **changes: Any) -> GateEvidence:
    """Return the same evidence with changes in its report."""
    return dataclasses.replace(found, report=found.report.model_copy(update=changes))


def with_metric(
    found: GateEvidence, name: str, who: tuple[ModelRole, ...] = ("base", "candidate"), **changes: Any
) -> GateEvidence:
    """Return the same evidence with changes in one metric of these models."""
    scores = dict(found.report.scores)
    for one in who:
        metrics = {**scores[one].metrics, name: scores[one].metrics[name].model_copy(update=changes)}
        scores[one] = scores[one].model_copy(update={"metrics": metrics})
    return with_report(found, scores=scores)


def with_noise(found: GateEvidence, name: str, again: Values, **changes: Any) -> GateEvidence:
    """Return the same evidence with a second scoring of the candidate."""
    scores = found.report.scores["candidate"]
    plain = {
        "model_digest": scores.model_digest, "model_format": "adapter", "contract": scores.contract,
        "batch_rows": (8, 4), "metrics": {name: metric(name, again)}, "samples": {name: sample_file("candidate", name)},
    }  # fmt: skip
    noise = EvaluationNoise.model_validate({**plain, **changes})
    return dataclasses.replace(found, noise=noise, noise_samples={name: samples(name, again)})


def write(layout: ProjectLayout, found: GateEvidence) -> None:
    """Write the evidence to a project as the stages evaluate and export do."""
    write_evaluation(layout, found)
    with files.sealed_directory(layout.export, "export") as scratch:
        found.bundle.save(scratch / layout.bundle.name)
    found.champion.save(layout.champion)


def write_evaluation(layout: ProjectLayout, found: GateEvidence) -> None:
    """Write the part of the evidence that stage evaluate writes."""
    files.make_directory(layout.experiments)
    with files.sealed_directory(layout.evaluate, "evaluation") as scratch:
        found.report.save(scratch / "eval.json")
        ids = sorted({key for metrics in found.samples.values() for of in metrics.values() for key in of})
        rows = [{"id": key, "prompt": f"Question {key}?", "expected": "yes", "group": found.groups.get(key),
                 "fields": {}, "prompt_tokens": 3, "answer_tokens": 1} for key in ids]  # fmt: skip
        base.write_lines(scratch / ROWS, rows)
        for who, scores in found.report.scores.items():
            write_samples(scratch, found.samples[who], scores.samples)
            answers = [{"id": key, "answers": [f"{who} says yes"]} for key in ids]
            base.write_lines(scratch / answers_file(who), answers)
    if found.noise is not None:
        with files.sealed_directory(layout.noise, "noise") as scratch:
            found.noise.save(scratch / "noise.json")
            write_samples(scratch, found.noise_samples, found.noise.samples)


def beside_champion(project: ProjectLayout, champion_run: str, candidate_run: str, **changes: Any) -> None:
    """Write an evaluation of one run to a project in which another run is the champion."""
    file = ChampionFile(champion=Champion(version=3, model_digest=OLD, adapter_digest="x" * 64, run_id=champion_run))
    models: Models = {
        "base": {"accuracy": right(20)},
        "candidate": {"accuracy": right(170), "answer_loss": spread(1.0)},
        "champion": {"accuracy": right(120), "answer_loss": spread(2.0)},
    }
    found = with_report(evidence(models, file), run_id=candidate_run, **changes)
    write(project, found)


def write_samples(folder: Path, by_metric: Mapping[str, Mapping[str, SampleScore]], names: Mapping[str, str]) -> None:
    for metric, name in names.items():
        rows = [sample.model_dump(mode="json", exclude={"format"}) for sample in by_metric[metric].values()]
        base.write_lines(folder / name, rows)


def cost(latency_s: float = 0.2, memory_bytes: int = 2**30) -> InferenceCost:
    return InferenceCost(
        rows=8, latency_s=latency_s, latency_p95_s=2 * latency_s, tokens_per_s=9.0, memory_bytes=memory_bytes,
        device="cpu",
    )  # fmt: skip


def gate(*rules: Rule, **changes: Any) -> Gate:
    return Gate.model_validate({"rules": rules, "resamples": 1000, **changes})


EXPECTED = {"pass": "PROMOTE", "fail": "REJECT", "undecided": "HOLD", "invalid": "INVALID"}


def reason(rule: Rule, found: GateEvidence, **changes: Any) -> RuleResult:
    """Return the result of one rule. Check that the decision follows from the result."""
    verdict: Verdict = decide_verdict(found, gate(rule, **changes))
    [one] = verdict.reasons
    assert verdict.decision == EXPECTED[one.outcome]
    return one
