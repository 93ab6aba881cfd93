"""All that the gate judges by, read from a project once: reports, per-sample scores, champion, look-ups and noise."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

from ratchet.config.evaluation import Form
from ratchet.config.gate import Gate, Reference
from ratchet.config.schema import Settings
from ratchet.errors import DamagedFileError, first_line
from ratchet.gate import test_set_reuse
from ratchet.gate.paired_test import MOST_NATS, PairedScores
from ratchet.storage import digests, files
from ratchet.storage.digests import SHORT
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records import base
from ratchet.storage.records.evaluation import (
    ROWS,
    EvaluatedRow,
    EvaluationNoise,
    EvaluationReport,
    MetricValue,
    SampleScore,
    Who,
)
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import Champion, ChampionFile, Decision, read_champion

T = TypeVar("T", bound=base.Record)
Samples = Mapping[str, SampleScore]
"""By id."""
CANDIDATE: Mapping[Form, Who] = {"adapter": "candidate", "merged": "merged"}
"""Under which name each form of the candidate was scored."""


@dataclass(frozen=True)
class GateEvidence:
    """What `judge` is given; nothing in it depends on a path or a time."""

    report: EvaluationReport
    bundle: ModelBundle
    champion: ChampionFile
    samples: Mapping[Who, Mapping[str, Samples]]
    """Per-sample scores by model and metric."""
    groups: Mapping[str, str | None]
    """Of the test rows, by id: those of one group are no independent samples."""
    lookups: int
    """Models looked at with this gate set, the candidate included."""
    noise: EvaluationNoise | None
    noise_samples: Mapping[str, Samples]
    """Of `noise`, by metric."""
    tasks_now: Mapping[str, str]
    """Fingerprint of each local harness task as its files are now."""
    forms: tuple[Form, ...] = ("adapter", "merged")
    """Of the candidate, the one first that is compared where both could be (evaluate.forms)."""
    judged_before: tuple[Decision, ...] = ()
    """What the gate said of the candidate on this gate set under other rules."""
    repeated: Mapping[Who, Mapping[str, str]] = field(default_factory=dict)
    """A sample that was scored twice, by model and metric; of a sound evaluation, none."""

    @property
    def is_champion(self) -> bool:
        """Whether the candidate is the champion already."""
        current = self.champion.champion
        return current is not None and current.model_digest == self.bundle.model_digest

    @property
    def scored_forms(self) -> list[Who]:
        """Names under which the candidate was scored, the preferred form first."""
        order = [CANDIDATE[form] for form in (*self.forms, *CANDIDATE)]
        return [who for who in dict.fromkeys(order) if who in self.report.scores]


def rules_digest(gate: Gate) -> str:
    """Fingerprint of the rules and all else that a verdict is made by."""
    return digests.hash_json(gate.model_dump(mode="json"))


def read_evidence(layout: ProjectLayout, settings: Settings, tasks_now: Mapping[str, str]) -> GateEvidence:
    """Read what the stages before left, every byte checked.

    Args:
        layout: the project.
        settings: its settings; only evaluate.forms is asked.
        tasks_now: fingerprints of the local harness tasks (services.harness.fingerprints).

    Raises:
        DataError: a stage before has not run.
        DamagedFileError: a file is not as it was written; names it, and its line.
    """
    report, bundle = EvaluationReport.load(layout.eval_report), ModelBundle.load(layout.bundle)
    files.verify_sealed(layout.evaluate, "evaluation")
    found: dict[Who, dict[str, Samples]] = {}
    repeated: dict[Who, dict[str, str]] = {}
    for who, scores in report.scores.items():
        for metric, name in scores.samples.items():
            by_id, twice = read_samples(layout.evaluate / name)
            found.setdefault(who, {})[metric] = by_id
            if twice is not None:
                repeated.setdefault(who, {})[metric] = twice
    noise, noise_samples = _read_noise(layout)
    rows = read_rows(layout)
    tasks = {name for terms in report.contracts.values() for name in terms.get("harness", {})}
    # A sweep may have begun to choose by these rows since they were evaluated.
    now = test_set_reuse.count_overlaps(layout, [row.id for row in rows], tasks)
    return GateEvidence(
        report=report.model_copy(update={"chosen_by": report.chosen_by | now}),
        bundle=bundle,
        champion=read_champion(layout.champion),
        samples=found,
        groups={row.id: row.group for row in rows},
        lookups=test_set_reuse.count_models(layout, report.gate_set, report.adapter_digest),
        noise=noise,
        noise_samples=noise_samples,
        tasks_now=tasks_now,
        forms=settings.evaluate.forms,
        judged_before=test_set_reuse.list_earlier_decisions(
            layout, report.gate_set, report.adapter_digest, rules_digest(settings.gate)
        ),
        repeated=repeated,
    )


def read_samples(path: Path) -> tuple[dict[str, SampleScore], str | None]:
    """Samples by id, and the first id that comes twice, if one does. Raises DamagedFileError naming file and line."""
    found: dict[str, SampleScore] = {}
    twice = None
    for number, row in enumerate(base.read_lines(path), start=1):
        sample = _parse_record(SampleScore, row, path, number)
        if sample.id in found and twice is None:
            twice = sample.id
        found[sample.id] = sample
    return found, twice


def read_rows(layout: ProjectLayout) -> list[EvaluatedRow]:
    """The test rows, as the evaluation wrote them. Raises DamagedFileError naming file and line."""
    path = layout.evaluate / ROWS
    return [_parse_record(EvaluatedRow, row, path, number) for number, row in enumerate(base.read_lines(path), start=1)]


def _parse_record(kind: type[T], row: dict[str, Any], path: Path, number: int) -> T:
    try:
        return kind.model_validate(row)
    except ValueError as error:
        raise DamagedFileError(f"{path}:{number}: not a {kind.__name__} ({first_line(error)}); make it again") from None


def _read_noise(layout: ProjectLayout) -> tuple[EvaluationNoise | None, dict[str, Samples]]:
    """What `ratchet gate --aa` measured last, if anybody asked it."""
    path = layout.noise / "noise.json"
    if not path.exists():
        return None, {}
    files.verify_sealed(layout.noise, "noise")
    noise = EvaluationNoise.load(path)
    return noise, {name: read_samples(layout.noise / file)[0] for name, file in noise.samples.items()}


# Finds what a rule speaks of: the candidate's and a reference's scores of one metric, sample by sample, or why not.

MOST_KEYS = 5
"""Differences of two contracts that are named; the rest are counted."""
MOST_CHARACTERS = 60


class IncomparableError(Exception):
    """What a rule asks for cannot be had; the text becomes the reason of an INVALID."""


@dataclass(frozen=True)
class MatchedScores:
    """The candidate and a reference on the same samples."""

    form: Who
    """Under which the candidate was scored."""
    metric: MetricValue
    """The candidate's."""
    pairs: PairedScores


def missing_reference_reason(evidence: GateEvidence, reference: Reference) -> str | None:
    """Why there is nothing to compare with, or None where there is."""
    if reference == "base":
        return None
    model: Champion | None = getattr(evidence.champion, reference)
    if model is None:
        return f"there is no {reference} yet"
    if model.model_digest == evidence.bundle.model_digest:
        return f"the candidate is the {reference}"
    return None


def match_scores(evidence: GateEvidence, name: str, reference: Reference) -> MatchedScores:
    """The preferred form of the candidate that was scored under the reference's contract, paired with the reference.

    Raises:
        IncomparableError: one of them was not scored, or not on the same samples, or under another contract.
    """
    return next(iterate_matches(evidence, name, reference))


def iterate_matches(evidence: GateEvidence, name: str, reference: Reference) -> Iterator[MatchedScores]:
    """The same for every form whose contract is the reference's; at least one. Raises as `match_scores`."""
    other = _resolve_reference(evidence, reference)
    forms = list_scored_forms(evidence)
    scores = evidence.report.scores
    same = [who for who in forms if scores[who].contract == scores[other].contract]
    if not same:
        raise IncomparableError(
            f"{forms[0]} and {reference} were not scored alike: "
            f"{_describe_contract_differences(evidence, forms[0], other)}; "
            "run `dvc repro -f evaluate`, with evaluate.forms such that one is the reference's"
        )
    for who in same:
        yield _match_pair(evidence, name, who, other)


def list_scored_forms(evidence: GateEvidence) -> list[Who]:
    """Names under which the candidate was scored. Raises IncomparableError when it was not."""
    if forms := evidence.scored_forms:
        return forms
    raise IncomparableError("the evaluation holds no scores of the candidate; run `dvc repro -f evaluate`")


def select_scores(evidence: GateEvidence, who: Who, name: str) -> tuple[MetricValue, Samples]:
    """A model's figure of this name and the samples that it is made of, both sound.

    Raises:
        IncomparableError: not measured, or of no single samples, or without direction, or not finite, or its samples
            are missing or repeated.
    """
    scores = evidence.report.scores[who]
    metric, samples = scores.metrics.get(name), evidence.samples.get(who, {}).get(name)
    if metric is not None and metric.kind == "figure":
        raise IncomparableError(
            f"{name} is a figure of all rows together, without scores of single ones, so no rule can be held against "
            f"it; take one of: {_list_scored_metrics(evidence, who)}"
        )
    if samples is None or (metric is None and not samples):
        raise IncomparableError(f"{name} was not measured for {who}; there is: {_list_scored_metrics(evidence, who)}")
    if twice := evidence.repeated.get(who, {}).get(name):
        raise IncomparableError(f"{name} of {who}: sample {twice} appears twice; run `dvc repro -f evaluate`")
    _check_samples(metric, samples, f"{name} of {who}")
    if metric is None:
        raise IncomparableError(f"{name} of {who}: the report has no figure, {len(samples)} samples lie beside it")
    return metric, samples


def _check_samples(metric: MetricValue | None, samples: Samples, what: str) -> None:
    """Raise IncomparableError unless the samples are sound, and the figure is theirs."""
    for sample in samples.values():
        if not (math.isfinite(sample.value) and math.isfinite(sample.weight)):
            raise IncomparableError(
                f"{what}: the score of sample {sample.id} is {sample.value}, not a finite number; "
                "the model or the metric is broken"
            )
    if metric is None:
        return
    if metric.n != len(samples):
        raise IncomparableError(f"{what}: the report has {metric.n} samples, {len(samples)} lie beside it")
    if not samples:
        raise IncomparableError(f"{what} has no samples")
    if not math.isfinite(metric.value):
        raise IncomparableError(f"{what} is {metric.value}, not a finite number")
    odd = [sample for sample in samples.values() if metric.unit == "proportion" and sample.value not in (0.0, 1.0)]
    if odd:
        raise IncomparableError(f"{what}: sample {odd[0].id} has {odd[0].value:g}, neither 0 nor 1")
    total, weight = (math.fsum(values) for values in zip(*((s.value, s.weight) for s in samples.values()), strict=True))
    made = total / len(samples)
    if metric.kind == "perplexity":
        made = math.exp(min(MOST_NATS, total / weight)) if weight else math.nan
    if not math.isclose(made, metric.value, rel_tol=1e-6, abs_tol=1e-9):
        raise IncomparableError(
            f"{what}: the report says {metric.value:g}, its samples give {made:g}; run `dvc repro -f evaluate`"
        )
    if metric.better == "unknown":
        raise IncomparableError(
            f"nobody said whether a higher or a lower {what.rpartition(' of ')[0]} is better; of a harness task, say "
            "it in its YAML file: higher_is_better in metric_list; other metrics without direction can be shown, not "
            "judged"
        )


def compute_difference(pairs: PairedScores) -> float:
    """The difference that `paired.compare` would find, without its bounds: positive is better."""
    sign = 1.0 if pairs.better == "higher" else -1.0
    new, old = math.fsum(pairs.new), math.fsum(pairs.old)
    if pairs.kind == "perplexity":
        return sign * math.expm1((new - old) / math.fsum(pairs.weights or ()))
    return sign * (new - old) / len(pairs.new)


def build_pairs(
    metric: MetricValue, new: Sequence[SampleScore], old: Sequence[SampleScore], groups: Mapping[str, str | None]
) -> PairedScores:
    """Samples in the same order, as statistics want them."""
    kind: Literal["mean", "perplexity"] = "perplexity" if metric.kind == "perplexity" else "mean"
    found = [groups.get(sample.id) for sample in new]
    return PairedScores(
        new=[sample.value for sample in new],
        old=[sample.value for sample in old],
        better="lower" if metric.better == "lower" else "higher",
        kind=kind,
        weights=[sample.weight for sample in new] if kind == "perplexity" else None,
        groups=found if any(group is not None for group in found) else None,
    )


def sort_samples(samples: Samples) -> list[SampleScore]:
    """Samples by id: the order in which they lie in a file says nothing."""
    return [samples[key] for key in sorted(samples)]


def _resolve_reference(evidence: GateEvidence, reference: Reference) -> Who:
    scores, champion = evidence.report.scores, evidence.champion
    if reference in scores:
        return reference
    same = champion.champion and champion.anchor and champion.champion.model_digest == champion.anchor.model_digest
    if reference == "anchor" and same and "champion" in scores:
        return "champion"
    notes = "; ".join(evidence.report.notes)
    raise IncomparableError(f"the evaluation holds no scores of the {reference}{f': {notes}' if notes else ''}")


def _match_pair(evidence: GateEvidence, name: str, who: Who, other: Who) -> MatchedScores:
    metric, new = select_scores(evidence, who, name)
    reference, old = select_scores(evidence, other, name)
    if differing := new.keys() ^ old.keys():
        raise IncomparableError(
            f"{name}: {len(differing)} samples were scored for one of {who} and {other} only, e.g. {min(differing)}"
        )
    for what in ("better", "kind", "unit"):
        a, b = getattr(metric, what), getattr(reference, what)
        # A model that scores 0 or 1 on every row has a proportion, where another has a mean of the same scale.
        if a != b and not (what == "unit" and "proportion" in (a, b)):
            raise IncomparableError(f"{name}: {what} is {a!r} of {who} and {b!r} of {other}")
    first, second = sort_samples(new), sort_samples(old)
    if metric.kind == "perplexity":
        for a, b in zip(first, second, strict=True):
            if a.weight != b.weight or a.weight <= 0:
                raise IncomparableError(
                    f"{name}: sample {a.id} has {a.weight:g} tokens for {who} and {b.weight:g} for {other}"
                )
    return MatchedScores(who, metric, build_pairs(metric, first, second, evidence.groups))


def _list_scored_metrics(evidence: GateEvidence, who: Who) -> str:
    return ", ".join(sorted(evidence.samples.get(who, {}))) or "nothing"


def _describe_contract_differences(evidence: GateEvidence, who: Who, other: Who) -> str:
    """The terms of two contracts that are not the same, with both values."""
    scores, contracts = evidence.report.scores, evidence.report.contracts
    sides = [contracts.get(scores[one].contract) for one in (who, other)]
    for one, terms in zip((who, other), sides, strict=True):
        if terms is None:
            return f"the report does not hold the contract of {one} ({scores[one].contract[:SHORT]})"
    first, second = (dict(_iterate_leaves(terms)) for terms in sides)
    keys = sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))
    named = [f"{key}: {_format_term(first, key)} and {_format_term(second, key)}" for key in keys[:MOST_KEYS]]
    more = [f"and {len(keys) - MOST_KEYS} more"] if len(keys) > MOST_KEYS else []
    return ", ".join([*named, *more]) or "their contracts have different names and the same terms"


def _iterate_leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from _iterate_leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


def _format_term(terms: Mapping[str, Any], key: str) -> str:
    if key not in terms:
        return "nothing"
    text = str(terms[key])
    is_digest = len(text) == 64 and set(text) <= set("0123456789abcdef")
    return text[:SHORT] if is_digest else text if len(text) <= MOST_CHARACTERS else f"{text[:MOST_CHARACTERS]}..."
