"""Reads the evidence for the gate, and pairs the scores that a rule compares.

The evidence is read from a project once: reports, per-sample scores, champion, test set uses and noise. If two scores
cannot be compared, IncomparableError explains why.

A test set must not share rows or tasks with a set by which models are selected (sweeps, validation), because the model
that was chosen by a row looks better on this row than it is.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from ratchet.config.evaluate import ModelFormat
from ratchet.config.gate import Gate, MustImproveRule, MustNotRegressRule, Reference
from ratchet.config.settings import Settings
from ratchet.errors import DamagedFileError, first_line
from ratchet.quality_gate import test_sets
from ratchet.quality_gate.judgements import HUMAN_PREFERENCE, HumanPreference, measure_preference, read_judgements
from ratchet.quality_gate.paired_test import MAX_NATS, PairedScores
from ratchet.quality_gate.test_sets import TestSet
from ratchet.storage import digests, files
from ratchet.storage.digests import SHORT
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records import base
from ratchet.storage.records.evaluation import (
    POINTS,
    ROWS,
    SHARE,
    EvaluatedRow,
    EvaluationNoise,
    EvaluationReport,
    MetricValue,
    ModelRole,
    ObjectiveSet,
    SampleScore,
    answers_file,
)
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import (
    Champion,
    ChampionFile,
    Decision,
    Outcome,
    read_champion,
)

MAX_TERMS = 5
"""Number of differences between two contracts that a message lists; the message counts the rest."""

MAX_TERM_CHARACTERS = 60
ROLE_OF_FORMAT: Mapping[ModelFormat, ModelRole] = {"adapter": "candidate", "merged": "merged"}
"""Role under which each format of the candidate is scored."""

LARGEST_SCORES = {"proportion": 1.0, SHARE: 1.0, POINTS: 100.0}
"""Largest score by unit; other units have none."""

T = TypeVar("T", bound=base.Record)
Samples = Mapping[str, SampleScore]
"""Per-sample scores by sample id."""


class IncomparableError(Exception):
    """Two scores cannot be compared. The message becomes the reason in an INVALID verdict."""

    outcome: ClassVar[Outcome] = "invalid"
    """Outcome of the rule."""


class NotJudgedError(IncomparableError):
    """People have not judged the answers yet. The message becomes the reason in a HOLD verdict."""

    outcome = "undecided"


@dataclass(frozen=True)
class GateEvidence:
    """Input of `decide_verdict`, without paths and times."""

    report: EvaluationReport
    bundle: ModelBundle
    champion: ChampionFile
    samples: Mapping[ModelRole, Mapping[str, Samples]]
    """Per-sample scores by model and metric."""
    groups: Mapping[str, str | None]
    """Group of each test row by id. Rows of one group are not independent."""
    test_set_uses: int
    """Number of models evaluated on this test set, including the candidate."""
    noise: EvaluationNoise | None
    noise_samples: Mapping[str, Samples]
    """Per-sample scores of the second scoring in `noise`, by metric."""
    current_task_digests: Mapping[str, str]
    """Current digest of each local harness task."""
    model_formats: tuple[ModelFormat, ...] = ("adapter", "merged")
    """Forms of the candidate in order of preference (evaluate.formats)."""
    earlier_decisions: tuple[Decision, ...] = ()
    """Decisions about the candidate on this test set under different rules."""
    duplicate_samples: Mapping[ModelRole, Mapping[str, str]] = field(default_factory=dict)
    """Id of the first sample that occurs twice in the scores, by model and metric. Empty for a sound evaluation."""
    human_preferences: Mapping[ModelRole, HumanPreference] = field(default_factory=dict)
    """Preference of people between the candidate and each reference; empty unless a rule uses it."""
    test_set: TestSet | None = None
    """Rows and documents in the order of sequential tests; None if they are not recorded, or for fixed tests."""
    model_number: int | None = None
    """Number of the candidate among the models evaluated on the test set, from 1; None for fixed tests."""
    missing_uses_problem: str | None = None
    """Description of missing lines of experiments/test_set_uses.jsonl, and what to do; None if nothing is missing."""
    damaged_judgements: int = 0
    """Number of lines of experiments/judgements.jsonl that cannot be read; 0 unless a rule uses them."""

    @property
    def is_champion(self) -> bool:
        """Whether the candidate already is the champion."""
        champion = self.champion.champion
        return champion is not None and champion.model_digest == self.bundle.model_digest

    @property
    def scored_roles(self) -> list[ModelRole]:
        """Roles under which the candidate was scored, the preferred format first."""
        return list_candidate_roles(self.report, self.model_formats)


def list_candidate_roles(report: EvaluationReport, model_formats: Sequence[ModelFormat]) -> list[ModelRole]:
    """List the roles under which the candidate was scored, in order of the formats (evaluate.formats)."""
    order = [ROLE_OF_FORMAT[form] for form in (*model_formats, *ROLE_OF_FORMAT)]
    return [role for role in dict.fromkeys(order) if role in report.scores]


def rules_digest(gate: Gate) -> str:
    """Return the digest of section gate of params.yaml. Settings that came later are left out at their default."""
    return digests.hash_json(gate.model_dump(mode="json", exclude={"test"} if gate.test == "fixed" else None))


def read_evidence(layout: ProjectLayout, settings: Settings, current_task_digests: Mapping[str, str]) -> GateEvidence:
    """Read and verify the outputs of the earlier stages.

    Args:
        layout: The project.
        settings: Settings of the project; evaluate.formats and gate are read.
        current_task_digests: Digests of the local harness tasks (data.harness_tasks.fingerprint_tasks).

    Raises:
        DataError: An earlier stage has not run.
        DamagedFileError: A file was changed after it was written. The message has the file and line.
    """
    report, bundle = EvaluationReport.load(layout.eval_report), ModelBundle.load(layout.bundle)
    files.verify_sealed(layout.evaluate, "evaluation")
    samples: dict[ModelRole, dict[str, Samples]] = {}
    duplicate_samples: dict[ModelRole, dict[str, str]] = {}
    for role, scores in report.scores.items():
        for metric, name in scores.samples.items():
            by_id, duplicate = read_samples(layout.evaluate / name)
            samples.setdefault(role, {})[metric] = by_id
            if duplicate is not None:
                duplicate_samples.setdefault(role, {})[metric] = duplicate
    noise, noise_samples = None, {}
    if (path := layout.noise / "noise.json").exists():  # the last result of `ratchet gate --aa`
        files.verify_sealed(layout.noise, "noise")
        noise = EvaluationNoise.load(path)
        noise_samples = {name: read_samples(layout.noise / file)[0] for name, file in noise.samples.items()}
    rules, is_sequential = rules_digest(settings.gate), settings.gate.test == "sequential"
    rows = read_rows(layout)
    tasks = {name for terms in report.contracts.values() for name in terms.get("harness", {})}
    # A sweep may have used these rows for model selection since the evaluation counted the overlaps.
    overlaps = count_overlaps(layout, [row.id for row in rows], tasks)
    uses = test_sets.compare_uses(layout, report.test_set_digest, report.adapter_digest)
    human_preferences, damaged_judgements = _read_preferences(layout, settings, report)
    return GateEvidence(
        report=report.model_copy(update={"selection_overlaps": report.selection_overlaps | overlaps}),
        bundle=bundle,
        champion=read_champion(layout.champion),
        samples=samples,
        groups={row.id: row.group for row in rows},
        test_set_uses=uses.proven,
        missing_uses_problem=uses.describe_missing_lines(layout),
        noise=noise,
        noise_samples=noise_samples,
        current_task_digests=current_task_digests,
        model_formats=settings.evaluate.formats,
        earlier_decisions=tuple(
            use.decision
            for use in test_sets.read_test_set_uses(layout)
            if (use.test_set_digest, use.model) == (report.test_set_digest, report.adapter_digest)
            and use.decision
            and use.rules != rules
        ),
        test_set=test_sets.read_test_set(layout, report.test_set_digest) if is_sequential else None,
        model_number=test_sets.read_model_number(layout, report.test_set_digest, report.adapter_digest)
        if is_sequential
        else None,
        duplicate_samples=duplicate_samples,
        human_preferences=human_preferences,
        damaged_judgements=damaged_judgements,
    )


def _read_preferences(
    layout: ProjectLayout, settings: Settings, report: EvaluationReport
) -> tuple[dict[ModelRole, HumanPreference], int]:
    """Read the preference of people against each reference, and count damaged lines, if a rule uses them."""
    rules = [rule for rule in settings.gate.rules if isinstance(rule, MustImproveRule | MustNotRegressRule)]
    if not any(
        HUMAN_PREFERENCE in (rule.metric if isinstance(rule.metric, tuple) else [rule.metric]) for rule in rules
    ):
        return {}, 0
    candidates = list_candidate_roles(report, settings.evaluate.formats)
    answers = {role: read_answers(layout, role) for role in report.scores}
    log = read_judgements(layout.judgements)
    preferences = {
        role: measure_preference(
            log,
            candidates[0],
            (report.scores[candidates[0]].model_digest, report.scores[role].model_digest),
            (answers[candidates[0]], answers[role]),
        )
        for role in report.scores
        if candidates and role not in candidates and answers[candidates[0]] and answers[role]
    }
    return preferences, log.damaged_lines


def read_answers(layout: ProjectLayout, role: ModelRole) -> dict[str, str]:
    """Read the first generated answer of a model to each row, by row id; empty if it generated none."""
    path = layout.evaluate / answers_file(role)
    return {row["id"]: row["answers"][0] for row in base.read_lines(path)} if path.exists() else {}


def read_samples(path: Path) -> tuple[dict[str, SampleScore], str | None]:
    """Read per-sample scores.

    Returns:
        The samples by id, and the first id that occurs twice, or None.

    Raises:
        DamagedFileError: A line is invalid. The message has the file and line.
    """
    samples: dict[str, SampleScore] = {}
    duplicate = None
    for number, row in enumerate(base.read_lines(path), start=1):
        sample = _parse_record(SampleScore, row, path, number)
        if sample.id in samples and duplicate is None:
            duplicate = sample.id
        samples[sample.id] = sample
    return samples, duplicate


def read_rows(layout: ProjectLayout) -> list[EvaluatedRow]:
    """Read the evaluated test rows. Raises DamagedFileError with file and line."""
    path = layout.evaluate / ROWS
    return [_parse_record(EvaluatedRow, row, path, number) for number, row in enumerate(base.read_lines(path), start=1)]


def _parse_record(kind: type[T], row: dict[str, Any], path: Path, number: int) -> T:
    try:
        return kind.model_validate(row)
    except ValueError as error:
        raise DamagedFileError(
            f"{path}:{number}: not a valid {kind.__name__} ({first_line(error)}); create the file again"
        ) from None


# Selecting and pairing the scores that a rule compares.


@dataclass(frozen=True)
class MatchedScores:
    """Scores of the candidate and a reference model on the same samples."""

    role: ModelRole
    """Role under which the candidate was scored."""
    metric: MetricValue
    """Metric of the candidate."""
    pairs: PairedScores


def missing_reference_reason(evidence: GateEvidence, reference: Reference) -> str | None:
    """Return why there is no other model to compare with; None if there is one."""
    if reference == "base":
        return None
    model: Champion | None = getattr(evidence.champion, reference)
    if model is None:
        return f"there is no {reference} yet"
    if model.model_digest == evidence.bundle.model_digest:
        return f"the candidate is the {reference}"
    return None


def match_scores(evidence: GateEvidence, name: str, reference: Reference) -> MatchedScores:
    """Pair the reference with the preferred format of the candidate that was scored under the same contract.

    Raises:
        IncomparableError: One of the two models was not scored, or their samples or contracts differ.
        NotJudgedError: People have judged none of their answers.
    """
    if name == HUMAN_PREFERENCE:
        return _match_preference(evidence, reference)
    return next(iterate_matches(evidence, name, reference))


def iterate_matches(evidence: GateEvidence, name: str, reference: Reference) -> Iterator[MatchedScores]:
    """Pair the reference with every format of the candidate that was scored under the same contract.

    Yields at least one match, or raises the same errors as `match_scores`.
    """
    reference_role = _resolve_reference(evidence, reference)
    roles = list_scored_roles(evidence)
    scores = evidence.report.scores
    comparable = [role for role in roles if scores[role].contract == scores[reference_role].contract]
    if not comparable:
        raise IncomparableError(
            f"{roles[0]} and {reference} were scored under different contracts: "
            f"{_describe_contract_differences(evidence, roles[0], reference_role)}; "
            "add the format of the reference to evaluate.formats, and run `dvc repro -f evaluate`"
        )
    for role in comparable:
        yield _match_pair(evidence, name, role, reference_role)


def _match_preference(evidence: GateEvidence, reference: Reference) -> MatchedScores:
    """Pair the judgements for the candidate with those for the reference: 1 and 0 if people prefer the candidate.

    If each row is a win, a loss or a tie, a tie is 0 for both models, so that the tests of right and wrong apply.
    """
    preference = evidence.human_preferences.get(_resolve_reference(evidence, reference))
    if preference is None:
        raise IncomparableError(
            f"{HUMAN_PREFERENCE}: the evaluation has no generated answers of candidate and {reference}; run `dvc repro "
            "-f evaluate`"
        )
    if not preference.scores:
        raise NotJudgedError(
            f"{HUMAN_PREFERENCE}: no answers of candidate and {reference} are judged yet; run `ratchet label "
            f"candidate {reference}` ({preference.unjudged:,} rows have different answers)"
        )
    rows = sorted(preference.scores)
    shares = [preference.scores[row] for row in rows]
    is_plain = set(shares) <= {0.0, 0.5, 1.0}
    groups = [evidence.groups.get(row) for row in rows]
    pairs = PairedScores(
        new=[float(share == 1) if is_plain else share for share in shares],
        old=[float(share == 0) if is_plain else 1 - share for share in shares],
        better="higher",
        groups=groups if any(group is not None for group in groups) else None,
    )
    return MatchedScores(preference.role, preference.metric, pairs)


def list_scored_roles(evidence: GateEvidence) -> list[ModelRole]:
    """List the roles under which the candidate was scored. Raises IncomparableError if there are none."""
    if roles := evidence.scored_roles:
        return roles
    raise IncomparableError("the evaluation has no scores of the candidate; run `dvc repro -f evaluate`")


def select_scores(evidence: GateEvidence, role: ModelRole, name: str) -> tuple[MetricValue, Samples]:
    """Return a model's metric and its per-sample scores after checking that they are consistent.

    Raises:
        IncomparableError: The metric was not measured, has no per-sample scores, has no direction or is not finite, or
            its samples are missing or occur twice.
    """
    if name == HUMAN_PREFERENCE:
        raise IncomparableError(f"{name} compares two models; use it in must_improve or must_not_regress")
    scores = evidence.report.scores[role]
    metric, samples = scores.metrics.get(name), evidence.samples.get(role, {}).get(name)
    if metric is not None and metric.kind == "aggregate":
        raise IncomparableError(
            f"{name} is computed from all rows together and has no per-sample scores, so rules cannot use it; "
            f"use one of: {_list_scored_metrics(evidence, role)}"
        )
    if samples is None or (metric is None and not samples):
        raise IncomparableError(
            f"{name} was not measured for {role}; available: {_list_scored_metrics(evidence, role)}"
        )
    if duplicate := evidence.duplicate_samples.get(role, {}).get(name):
        raise IncomparableError(f"{name} of {role}: sample {duplicate} occurs twice; run `dvc repro -f evaluate`")
    _check_samples(metric, samples, name, role)
    if metric is None:
        raise IncomparableError(f"{name} of {role}: the report has no value, but there are {len(samples)} samples")
    return metric, samples


def _check_samples(metric: MetricValue | None, samples: Samples, name: str, role: ModelRole) -> None:
    """Raise IncomparableError unless the samples are valid and yield the value of the metric."""
    label = f"{name} of {role}"
    for sample in samples.values():
        if not (math.isfinite(sample.value) and math.isfinite(sample.weight)):
            raise IncomparableError(
                f"{label}: the score of sample {sample.id} is {sample.value}, not a finite number; "
                "the model or the metric is broken"
            )
    if metric is None:
        return
    if metric.n != len(samples):
        raise IncomparableError(f"{label}: the report has {metric.n} samples, the file has {len(samples)}")
    if not samples:
        raise IncomparableError(f"{label} has no samples")
    if not math.isfinite(metric.value):
        raise IncomparableError(f"{label} is {metric.value}, not a finite number")
    for sample in samples.values():
        if metric.unit == "proportion" and sample.value not in (0.0, 1.0):
            raise IncomparableError(f"{label}: the score of sample {sample.id} is {sample.value:g}; expected 0 or 1")
    total, weight = (math.fsum(values) for values in zip(*((s.value, s.weight) for s in samples.values()), strict=True))
    recomputed = total / len(samples)
    if metric.kind == "perplexity":
        recomputed = math.exp(min(MAX_NATS, total / weight)) if weight else math.nan
    if not math.isclose(recomputed, metric.value, rel_tol=1e-6, abs_tol=1e-9):
        raise IncomparableError(
            f"{label}: the report has {metric.value:g}, the samples give {recomputed:g}; run `dvc repro -f evaluate`"
        )
    if metric.better == "unknown":
        raise IncomparableError(
            f"{name} has no direction: it is unknown whether higher or lower is better. For a harness task, set "
            "higher_is_better in metric_list of its YAML file; rules cannot use other metrics without a direction"
        )


def compute_difference(pairs: PairedScores) -> float:
    """Compute the difference as in `paired_test.compare`, but without bounds; positive is better."""
    sign = 1.0 if pairs.better == "higher" else -1.0
    new, old = math.fsum(pairs.new), math.fsum(pairs.old)
    if pairs.kind == "perplexity":
        return sign * math.expm1((new - old) / math.fsum(pairs.weights or ()))
    return sign * (new - old) / len(pairs.new)


Places = Mapping[str, tuple[int, int]]
"""Place in the test set of each sample, by id (`TestSet.places`). Empty for a fixed test."""


def build_pairs(
    metric: MetricValue, new: Samples, old: Samples, groups: Mapping[str, str | None], places: Places | None = None
) -> PairedScores:
    """Build the input of a paired test from two models' scores of the same samples.

    The pairs are in the order of `places`, for a sequential test. Otherwise they are sorted by id: the order of samples
    in a file has no meaning.
    """
    ids = sorted(new, key=lambda id: places[id][1]) if places else sorted(new)
    is_perplexity = metric.kind == "perplexity"
    sample_groups = [groups.get(id) for id in ids]
    return PairedScores(
        new=[new[id].value for id in ids],
        old=[old[id].value for id in ids],
        better="lower" if metric.better == "lower" else "higher",
        kind="perplexity" if is_perplexity else "mean",
        weights=[new[id].weight for id in ids] if is_perplexity else None,
        groups=sample_groups if any(group is not None for group in sample_groups) else None,
        planned=[places[id][0] for id in ids] if places else None,
        limit=LARGEST_SCORES.get(metric.unit),
    )


def find_places(evidence: GateEvidence, name: str, samples: Samples) -> Places:
    """Return the places of a metric's samples in the test set.

    Empty if the test is fixed, or if they are neither test rows nor documents of the metric's task. Raises
    IncomparableError if only some of them are.
    """
    if evidence.test_set is None:
        return {}
    parts = name.split("/")
    task = parts[1] if parts[0] == "harness" and len(parts) > 2 else test_sets.TEST_ROWS
    places = {id: evidence.test_set.places.get((task, id)) for id in samples}
    found = {id: place for id, place in places.items() if place is not None}
    if found and len(found) < len(samples):
        raise IncomparableError(
            f"{name}: {len(samples) - len(found)} of {len(samples)} samples are not in the recorded test set; run "
            "`dvc repro -f evaluate`"
        )
    return found


def _resolve_reference(evidence: GateEvidence, reference: Reference) -> ModelRole:
    scores, champion = evidence.report.scores, evidence.champion
    if reference in scores:
        return reference
    is_same = champion.champion and champion.anchor and champion.champion.model_digest == champion.anchor.model_digest
    if reference == "anchor" and is_same and "champion" in scores:
        return "champion"
    notes = "; ".join(evidence.report.notes)
    raise IncomparableError(f"the evaluation has no scores of the {reference}{f': {notes}' if notes else ''}")


def _match_pair(evidence: GateEvidence, name: str, role: ModelRole, reference: ModelRole) -> MatchedScores:
    metric, new = select_scores(evidence, role, name)
    reference_metric, old = select_scores(evidence, reference, name)
    if unpaired := new.keys() ^ old.keys():
        raise IncomparableError(
            f"{name}: {len(unpaired)} samples were scored only for one of {role} and {reference}, e.g. {min(unpaired)}"
        )
    for attribute in ("better", "kind", "unit"):
        a, b = getattr(metric, attribute), getattr(reference_metric, attribute)
        # If all scores of one model are 0 or 1, its unit is proportion; the other model may have a mean of this scale.
        if a != b and not (attribute == "unit" and "proportion" in (a, b)):
            raise IncomparableError(f"{name}: {attribute} is {a!r} for {role} and {b!r} for {reference}")
    for id in sorted(new) if metric.kind == "perplexity" else ():
        tokens, reference_tokens = new[id].weight, old[id].weight
        if tokens != reference_tokens or tokens <= 0:
            raise IncomparableError(
                f"{name}: sample {id} has {tokens:g} tokens for {role} and {reference_tokens:g} for {reference}"
            )
    return MatchedScores(role, metric, build_pairs(metric, new, old, evidence.groups, find_places(evidence, name, new)))


def _list_scored_metrics(evidence: GateEvidence, role: ModelRole) -> str:
    return ", ".join(sorted(evidence.samples.get(role, {}))) or "none"


def _describe_contract_differences(evidence: GateEvidence, role: ModelRole, reference: ModelRole) -> str:
    """List the terms in which two contracts differ, with both values."""
    scores, contracts = evidence.report.scores, evidence.report.contracts
    sides = [contracts.get(scores[side].contract) for side in (role, reference)]
    for side, terms in zip((role, reference), sides, strict=True):
        if terms is None:
            return f"the report does not contain the contract of {side} ({scores[side].contract[:SHORT]})"
    first, second = (base.flatten(terms or {}) for terms in sides)
    keys = sorted(key for key in first.keys() | second.keys() if first.get(key) != second.get(key))
    listed = [f"{key}: {_format_term(first, key)} and {_format_term(second, key)}" for key in keys[:MAX_TERMS]]
    more = [f"and {len(keys) - MAX_TERMS} more"] if len(keys) > MAX_TERMS else []
    return ", ".join([*listed, *more]) or "the contracts have different digests and the same terms"


def _format_term(terms: Mapping[str, Any], key: str) -> str:
    if key not in terms:
        return "nothing"
    text = str(terms[key])
    is_digest = len(text) == 64 and set(text) <= set("0123456789abcdef")
    if is_digest:
        return text[:SHORT]
    return text if len(text) <= MAX_TERM_CHARACTERS else f"{text[:MAX_TERM_CHARACTERS]}..."


# Overlaps of a test set with sets for model selection.


def count_overlaps(
    layout: ProjectLayout, ids: Iterable[str], tasks: Iterable[str], further: Sequence[ObjectiveSet] = ()
) -> dict[str, int]:
    """Count the test rows and tasks that belong to a set for model selection, by the name of that set.

    Args:
        layout: The project; its folder experiments/objectives is read.
        ids: Test rows.
        tasks: Names of harness tasks.
        further: Further sets for model selection, which are not in that folder.

    Raises:
        DamagedFileError: A file in that folder is not an ObjectiveSet.
    """
    sets = [*further, *(ObjectiveSet.load(path) for path in sorted(layout.objectives.glob("*.json")))]
    rows, names = set(ids), set(tasks)
    counts = {s.name: len(rows & set(s.sample_ids)) + len(names & set(s.tasks)) for s in sets}
    return {name: count for name, count in counts.items() if count}
