"""A verdict with complete evidence and any number of rows, for tests of the gate's page."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.quality_gate.evidence import GateEvidence
from ratchet.reports import verdict_page
from ratchet.storage.records.evaluation import (
    EvaluatedRow,
    EvaluationNoise,
    EvaluationReport,
    InferenceCost,
    MetricValue,
    ModelRole,
    ModelScores,
    SampleScore,
)
from ratchet.storage.records.export import MergeParity, ModelBundle
from ratchet.storage.records.gate import Champion, ChampionFile, ForcedPromotion, ModelComparison, RuleResult, Verdict

HOSTILE = '<script>alert("1")</script><img src=x onerror=alert(1)> & \' \x00\x1b[31m \u202e\ud800 </style></body>'
MODELS: tuple[ModelRole, ...] = ("base", "candidate", "champion", "anchor")
SKILL = {"base": 0.42, "candidate": 0.83, "champion": 0.86, "anchor": 0.79}
TOPICS = ("billing", "cards", "transfers", "identity")
WORDS = ("why", "is", "my", "new", "card", "payment", "not", "there", "yet", "please", "help")
LABELS = tuple(f"{topic}_{what}" for topic in TOPICS for what in ("declined", "late", "missing", "wrong", "fee"))
PARTS = ("tokens <= 64", "tokens <= 1024", "tokens <= 128", *(f"topic = {topic}" for topic in TOPICS))
DIGESTS = {who: (hex(number + 10)[2:] * 64) for number, who in enumerate(MODELS)}


@dataclass(frozen=True)
class Case:
    """The arguments of `gate_page.write`."""

    verdict: Verdict
    evidence: GateEvidence
    rows: Sequence[EvaluatedRow]
    answers: Mapping[ModelRole, Mapping[str, Sequence[str]]]
    documents: Mapping[ModelRole, Mapping[str, Sequence[Mapping[str, Any]]]]

    def write(self, target: Path) -> str:
        """Write the page and return its text."""
        verdict_page.write(self.verdict, self.evidence, self.rows, self.answers, self.documents, target)
        return target.read_text(encoding="utf-8")


def case(count: int = 40, words: int = 14, seed: int = 7) -> Case:
    """Create rows of a label task and a harness task, four models, and a verdict with each element that a page can
    show."""
    random_ = random.Random(seed)
    rows = [_row(number, words, random_) for number in range(count)]
    answers: dict[ModelRole, dict[str, list[str]]] = {who: {} for who in MODELS}
    samples: dict[ModelRole, dict[str, dict[str, SampleScore]]] = {who: {} for who in MODELS}
    for who in MODELS:
        right, losses = {}, {}
        for row in rows:
            hit = random_.random() < SKILL[who]
            wrong = random_.choice([label for label in LABELS if label != row.expected])
            answers[who][row.id] = [row.expected if hit else wrong]
            right[row.id] = SampleScore(id=row.id, value=float(hit))
            losses[row.id] = SampleScore(id=row.id, value=round(random_.uniform(0.01, 0.6 if hit else 3.0), 4))
        general = {
            f"block {n}": SampleScore(id=f"block {n}", value=random_.uniform(150, 250), weight=64.0) for n in range(8)
        }
        samples[who] = {"accuracy": right, "answer_loss": losses, "general_perplexity": general}
        samples[who]["harness/poems/acc,none"] = {
            f"doc{n}": SampleScore(id=f"doc{n}", value=float(random_.random() < 0.5)) for n in range(12)
        }
    documents = {who: {"poems": [_document(n, samples[who]) for n in range(12)]} for who in MODELS}
    report = _report(samples)
    return Case(_verdict(samples, count), _evidence(report, samples), rows, answers, documents)


def _row(number: int, words: int, random_: random.Random) -> EvaluatedRow:
    label = random_.choice(LABELS)
    text = " ".join(random_.choice(WORDS) for _ in range(words))
    return EvaluatedRow(
        id=f"{random_.getrandbits(64):016x}",
        prompt=f"Customer {number} asks: {text}?",
        expected=label,
        group=None,
        fields={"topic": label.split("_")[0], "channel": random_.choice(("app", "web"))},
        prompt_tokens=words,
        answer_tokens=3,
    )


def _document(number: int, samples: Mapping[str, Mapping[str, SampleScore]]) -> dict[str, Any]:
    right = samples["harness/poems/acc,none"][f"doc{number}"].value
    answer = "A rose by any other name" if right else "A rise by another name"
    return {"id": f"doc{number}", "prompt": f"Poem {number}: go on", "target": "A rose by any other name",
            "answers": [answer], "scores": {"acc,none": right}}  # fmt: skip


def metric(values: Sequence[SampleScore], better: str, unit: str, kind: str = "mean", **more: Any) -> MetricValue:
    """Return a metric value of samples. Its interval is a placeholder and need not be correct."""
    mean = sum(one.value for one in values) / sum(one.weight for one in values)
    value = math.exp(mean) if kind == "perplexity" else mean
    half = 0.08 * abs(value) + 0.001
    return MetricValue.model_validate(
        {"value": value, "n": len(values), "low": value - half, "high": value + half, "better": better, "unit": unit,
         "kind": kind, **more}
    )  # fmt: skip


def _report(samples: Mapping[ModelRole, Mapping[str, Mapping[str, SampleScore]]]) -> EvaluationReport:
    scores: dict[ModelRole, ModelScores] = {}
    for number, (who, by_metric) in enumerate(samples.items()):
        found = {name: list(by_id.values()) for name, by_id in by_metric.items()}
        metrics = {
            "accuracy": metric(found["accuracy"], "higher", "proportion", chance=0.05),
            "answer_loss": metric(found["answer_loss"], "lower", "nats per token, mean of rows"),
            "general_perplexity": metric(found["general_perplexity"], "lower", "1", "perplexity"),
            "harness/poems/acc,none": metric(found["harness/poems/acc,none"], "higher", "proportion", chance=0.25),
        }
        part = {"accuracy": metrics["accuracy"]}
        scores[who] = ModelScores(
            model_digest=DIGESTS[who],
            model_format="adapter",
            contract="7" * 64,
            metrics=metrics,
            samples={},
            per_class={
                label: {"precision": 0.5 + n / 50, "recall": 0.9 - n / 60, "f1": (n * 7 % 20 + number) / 24,
                        "support": 2.0, "average_precision": 0.61}
                for n, label in enumerate(LABELS)
            },
            slices=dict.fromkeys(PARTS, part),
        )  # fmt: skip
    cost = InferenceCost(
        rows=8, latency_s=0.1234, latency_p95_s=0.2, tokens_per_s=61.5, memory_bytes=3 * 2**30, device="cpu"
    )
    return EvaluationReport(
        adapter_digest="d" * 64,
        base_digest="b" * 64,
        data_digest="e" * 64,
        run_id="r-2f81",
        model_digest=DIGESTS["candidate"],
        champion_digest=DIGESTS["champion"],
        anchor_digest=DIGESTS["anchor"],
        test_set_digest="9" * 64,
        contracts={
            "7" * 64: {"batch_rows": 16, "tasks": {"poems": "5" * 64}, "dtype": "float32", "settings": {"seed": 0}}
        },
        scores=scores,
        costs={"candidate": cost, "champion": cost},
        notes=("the batch was halved once: 32 rows did not fit",),
    )


def _evidence(
    report: EvaluationReport, samples: Mapping[ModelRole, Mapping[str, Mapping[str, SampleScore]]]
) -> GateEvidence:
    parity = MergeParity(
        rows=32, tokens=912, max_logit_difference=3.1e-6, mean_logit_difference=4e-7, greedy_agreement=1.0
    )
    bundle = ModelBundle(
        model_digest=DIGESTS["candidate"],
        adapter_digest="d" * 64,
        base_digest="b" * 64,
        data_digest="e" * 64,
        run_id="r-2f81",
        merge_base="dequantized",
        dtype="float32",
        size_bytes=5_000_000,
        parity=parity,
        base_weight_format="nf4+dq uint8",
    )
    forced = ForcedPromotion(actor="mira", reason="demo on Friday", decision="HOLD")
    best = Champion(version=4, model_digest=DIGESTS["champion"], adapter_digest="c" * 64, run_id="r-1", forced=forced)
    champion = ChampionFile(
        champion=best,
        anchor=Champion(version=1, model_digest=DIGESTS["anchor"], adapter_digest="f" * 64, run_id="r-0"),
        ledger="3" * 64,
    )  # fmt: skip
    noise = EvaluationNoise(
        model_digest=DIGESTS["candidate"],
        model_format="adapter",
        contract="7" * 64,
        batch_rows=(16, 8),
        metrics={"accuracy": report.scores["candidate"].metrics["accuracy"]},
        samples={},
    )
    return GateEvidence(
        report=report,
        bundle=bundle,
        champion=champion,
        samples=samples,
        groups={},
        test_set_uses=3,
        noise=noise,
        noise_samples={"accuracy": samples["candidate"]["accuracy"]},
        current_task_digests={},
    )


def compared(metric: str, against: str, figures: tuple[float, ...], n: int, **more: Any) -> ModelComparison:
    """Return a comparison. `figures` are difference, low, high, bound and detectable."""
    difference, low, high, bound, detectable = figures
    plain = {"metric": metric, "against": against, "role": "candidate", "difference": difference, "low": low,
             "high": high, "confidence": 0.95, "n": n, "bound": bound, "p": 0.0123, "detectable": detectable,
             "method": "Tango score interval"}  # fmt: skip
    return ModelComparison.model_validate({**plain, **more})


def _verdict(samples: Mapping[ModelRole, Mapping[str, Mapping[str, SampleScore]]], count: int) -> Verdict:
    new, old = samples["candidate"]["accuracy"], samples["champion"]["accuracy"]
    better = sum(new[one].value > old[one].value for one in new)
    worse = sum(new[one].value < old[one].value for one in new)
    difference = (better - worse) / count
    figures = (difference, difference - 0.06, difference + 0.06, -0.02, 0.072)
    reasons = (
        RuleResult(
            rule="must_improve",
            metric="accuracy",
            outcome="pass",
            text="accuracy is 41 points better than the base's",
            comparisons=(compared("accuracy", "base", (0.41, 0.35, 0.46, 0.0, 0.05), count, better=18, worse=2,
                                  p=1e-7, p_adjusted=2e-7, method="McNemar mid-p"),),
        ),
        RuleResult(
            rule="must_not_regress",
            metric="accuracy",
            outcome="undecided",
            text="so few rows cannot show a loss of 2 points: 2,310 would be needed",
            comparisons=(
                compared("accuracy", "champion", figures, count, better=better, worse=worse, required_samples=2310),
            ),
        ),
        RuleResult(
            rule="must_not_regress",
            metric="answer_loss",
            outcome="fail",
            text="answer_loss is 0.091 worse than the anchor's; 0.05 are allowed",
            comparisons=(compared("answer_loss", "anchor", (-0.091, -0.12, -0.061, -0.05, 0.03), count, groups=31,
                                  method="paired BCa bootstrap"),),
        ),
        RuleResult(
            rule="forgetting",
            metric="general_perplexity",
            outcome="pass",
            text="perplexity of general text rose by 1.1 %; 5 % are allowed",
            comparisons=(compared("general_perplexity", "base", (-0.011, -math.inf, 0.002, -0.05, 0.02), 8),),
        ),
        RuleResult(rule="export_parity", metric="-", outcome="pass", text="the export answers as the adapter does"),
        RuleResult(rule="budget", metric="latency", outcome="pass", text="an answer takes 0.12 s; 1 s is allowed"),
    )  # fmt: skip
    return Verdict(
        decision="REJECT",
        model_digest=DIGESTS["candidate"],
        adapter_digest="d" * 64,
        run_id="r-2f81",
        is_champion=False,
        champion_digest=DIGESTS["champion"],
        anchor_digest=DIGESTS["anchor"],
        reasons=reasons,
        test_set_digest="9" * 64,
        test_set_uses=3,
    )
