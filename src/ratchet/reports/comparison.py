"""Finds runs, sweep trials and promoted versions by name, and compares them: settings, scores, significance."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import combinations
from typing import Any

from ratchet.config.gate import Gate
from ratchet.errors import DamagedFileError, DataError, SettingsError
from ratchet.inference.model_reference import find_promoted_versions
from ratchet.quality_gate import evidence, finalists, paired_test, statistics, test_sets
from ratchet.quality_gate.evidence import Samples, read_rows, read_samples
from ratchet.quality_gate.finalists import FinalistComparator, FinalistScores
from ratchet.quality_gate.paired_test import PairedTestPlan
from ratchet.reports import run_history
from ratchet.reports.run_history import STEP_VALUES, VALIDATION_VALUES, BucketedSeries, HistoryCurve, RunSummary
from ratchet.runs import directory
from ratchet.runs.directory import RunPaths
from ratchet.storage import files
from ratchet.storage.digests import SHORT
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import (
    VALIDATION_LOSS,
    EvaluationReport,
    InferenceCost,
    MetricValue,
    ModelRole,
    ModelScores,
    ValidationScores,
)
from ratchet.storage.records.gate import Champion, read_champion
from ratchet.storage.records.sweep import SweepObjective, SweepReport, Trial

JOINED = "+"
"""Separates the members of a group of seeds."""
LABELLED = "="
"""Separates a label from the name that it labels."""
MAX_SUBJECTS = 12
"""Maximum number of subjects on a page. More subjects cannot be distinguished."""
NAMES_SHOWN = 12
"""Maximum number of names listed in a message."""

NAME_SYNTAX = (
    "use a run id or its beginning, a trial as SWEEP/NUMBER, a promoted version as v3, champion or anchor, "
    "or several runs that differ only in their seed as A+B+C; prefix any of these with LABEL= to set its label"
)

CURRENT = "experiments/evaluate"
"""Description of the current evaluation."""
OWN_ROLES: tuple[ModelRole, ...] = ("candidate", "merged")
"""Roles under which the evaluated model itself may be scored."""
MAX_METRICS = 24
"""Maximum number of metrics compared per pair. With more metrics, Holm's correction requires stronger evidence for each
metric."""
TEST, VALIDATION = "test rows", "validation rows"
"""Names of the rows on which two subjects are compared."""
POINTS, LEAST_POINTS = 3600, 150
"""Maximum number of points of all curves of one kind on a page, and minimum number of points of a curve."""
MOST_POINTS = 600
"""Maximum number of points of a curve."""
MAX_VERSION_DIGITS = 18
"""Maximum number of digits of a version that is looked up; a longer one is unknown."""
SEED = "train.seed"
ONE_RUN_NOTE = (
    "Each side is one run, so a significant difference is between these models. Other seeds of the same settings may "
    "give another result. To compare settings, compare groups of seeds (A+B+C)."
)
NO_VALUE = "\u2013"
"""Text of a setting without a value."""


@dataclass(frozen=True)
class ComparisonRun:
    """A training run in a comparison."""

    run_id: str
    about: str
    """Meaning of the name that the user gave: `version 3`, `trial 7 of lora`. Empty if the name is a run id."""


@dataclass(frozen=True)
class ComparisonSubject:
    """One side of a comparison: a run, or several runs that differ only in their seed."""

    name: str
    """The label that the user gave, or else the name. The page shows this text."""
    members: tuple[ComparisonRun, ...]

    @property
    def run_ids(self) -> tuple[str, ...]:
        """Ids of the subject's runs."""
        return tuple(member.run_id for member in self.members)


class ComparisonIndex:
    """Index of everything in a project that can be compared, by name."""

    def __init__(self, layout: ProjectLayout) -> None:
        self._layout = layout
        self.runs = [run.root.name for run in directory.list_runs(layout.runs)]
        self._file = read_champion(layout.champion)
        self.versions = find_promoted_versions(layout)
        self._reports: dict[str, SweepReport] = {}

    def subjects(self, names: Sequence[str]) -> list[ComparisonSubject]:
        """Return the subjects with these names, in the given order.

        Raises:
            DataError: A name matches nothing, or several runs. The message lists similar names.
            SettingsError: A name is empty or occurs twice, or there are too many names.
        """
        if len(names) > MAX_SUBJECTS:
            raise SettingsError(
                f"found {len(names)} names to compare; a page can show at most {MAX_SUBJECTS}; give fewer names"
            )
        by_name: dict[tuple[str, ...], ComparisonSubject] = {}
        for name in names:
            subject = self.subject(name)
            if earlier := by_name.get(tuple(sorted(subject.run_ids))):
                same = "the same run" if len(subject.run_ids) == 1 else "the same runs"
                raise SettingsError(
                    f"{name}: is {same} as {earlier.name} ({', '.join(subject.run_ids)}); give different names"
                )
            if any(subject.name == earlier_subject.name for earlier_subject in by_name.values()):
                raise SettingsError(f"{subject.name}: two subjects have this name; give each its own label")
            by_name[tuple(sorted(subject.run_ids))] = subject
        return list(by_name.values())

    def subject(self, name: str) -> ComparisonSubject:
        """Return the subject with this name. `LABEL=NAME` sets its label. Raises the exceptions of `subjects`."""
        label, separator, members_text = name.rpartition(LABELLED)
        members = tuple(self._member(part.strip()) for part in members_text.split(JOINED))
        if len({member.run_id for member in members}) < len(members):
            raise SettingsError(f"{name}: the group names a run twice; name each run once")
        if separator and not label.strip():
            raise SettingsError(
                f"{name}: the label before {LABELLED} is empty; write LABEL{LABELLED}NAME, or only the name"
            )
        return ComparisonSubject(label.strip() or members_text, members)

    def _member(self, name: str) -> ComparisonRun:
        if not name:
            raise SettingsError(f"found an empty name; {NAME_SYNTAX}")
        if name in ("champion", "anchor") or (name[:1] == "v" and name[1:].isdecimal()):
            return self._version(name)
        if "/" in name:
            return self._trial(name)
        matching = [run_id for run_id in self.runs if run_id.startswith(name)]
        if len(matching) == 1:
            return ComparisonRun(matching[0], "")
        if matching:
            raise DataError(
                f"{name}: {len(matching)} run ids begin with this name: {_join_names(matching)}; give more characters"
            )
        raise DataError(
            f"{name}: found nothing with this name in {self._layout.experiments}; {self._suggest(name)}{NAME_SYNTAX}"
        )

    def _version(self, name: str) -> ComparisonRun:
        if name in ("champion", "anchor"):
            champion: Champion | None = getattr(self._file, name)
            if champion is None:
                raise DataError(f"{name}: does not exist yet; run `ratchet promote` to create it")
            number = champion.version
        else:
            number = int(name[1:]) if len(name[1:]) <= MAX_VERSION_DIGITS else 0
        if number not in self.versions:
            known = _join_names([f"v{version}" for version in self.versions]) or "none"
            raise DataError(f"{name}: this project has no such promoted version; versions: {known}")
        return ComparisonRun(self.versions[number].run_id, f"version {number:,}")

    def _trial(self, name: str) -> ComparisonRun:
        study, _, number = name.rpartition("/")
        trials = {str(trial.number): trial for trial in self.trials(study)}
        if number not in trials:
            numbers = [trial.number for trial in trials.values()]
            known = f"trials {min(numbers)} to {max(numbers)}" if numbers else "none"
            raise DataError(f"{name}: sweep {study} has no trial {number!r}; it has {known}")
        run_id = trials[number].run_id
        if run_id is None:
            raise DataError(f"{name}: this trial was rejected before training ({trials[number].reason})")
        return ComparisonRun(run_id, f"trial {number} of {study}")

    def trials(self, study: str) -> tuple[Trial, ...]:
        """Return the trials in a sweep's report. Raises DataError if the sweep has no report."""
        path = self._layout.sweep(study) / "report.json"
        if study not in self.studies():
            known = _join_names(self.studies()) or "none"
            near = _suggest_names(get_close_matches(study, self.studies(), n=3, cutoff=0.5))
            raise DataError(
                f"{study}: no sweep with this name has a report ({path}); {near}known sweeps: {known}; "
                "run `ratchet sweep --report` to write one"
            )
        if study not in self._reports:
            self._reports[study] = SweepReport.load(path)
        return self._reports[study].trials

    def studies(self) -> list[str]:
        """Return the names of sweeps that have a report."""
        return sorted(path.parent.name for path in self._layout.sweeps.glob("*/report.json"))

    def trials_of(self, run_id: str) -> list[str]:
        """Return the trials that used this run, as SWEEP/NUMBER. Unreadable reports are ignored."""
        trials = []
        for study in self.studies():
            try:
                trials += [f"{study}/{trial.number}" for trial in self.trials(study) if trial.run_id == run_id]
            except DamagedFileError:
                continue
        return trials

    def versions_of(self, run_id: str) -> list[int]:
        """Return the promoted versions of this run."""
        return [number for number, version in self.versions.items() if version.run_id == run_id]

    def _suggest(self, name: str) -> str:
        """Return similar names and the known runs as text for an error message."""
        candidates = [*self.runs, *self.studies(), *(f"v{number}" for number in self.versions), "champion", "anchor"]
        by_beginning = {candidate[: max(len(name), 4)]: candidate for candidate in candidates}
        near = get_close_matches(name, by_beginning, n=3, cutoff=0.5)
        runs = f"runs: {_join_names(self.runs) or 'none'}; "
        return f"{_suggest_names([by_beginning[beginning] for beginning in near])}{runs}"


def _suggest_names(near: Sequence[str]) -> str:
    return f"did you mean {' or '.join(near)}? " if near else ""


def _join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return ", ".join(names[:NAMES_SHOWN]) + more


# Measured scores of runs: stage evaluate scores test rows, the final round of a sweep scores validation rows.


@dataclass(frozen=True)
class ModelEvaluation:
    """Scores of one model in one evaluation."""

    run_id: str
    role: ModelRole
    """Role under which the model was scored."""
    place: str
    """Description of the evaluation."""
    report: EvaluationReport
    samples: Mapping[str, Samples] = field(default_factory=dict)
    """Per-sample scores by metric. Empty if only the aggregate metrics were kept."""
    groups: Mapping[str, str | None] = field(default_factory=dict)
    """Group of each test row. Rows of one group are not independent samples."""

    @property
    def scores(self) -> ModelScores:
        """Aggregate scores of the model."""
        return self.report.scores[self.role]

    @property
    def cost(self) -> InferenceCost | None:
        """Inference cost, if it was measured."""
        return self.report.costs.get(self.role)

    @property
    def contract(self) -> Mapping[str, Any]:
        """Conditions under which the scores are comparable."""
        return self.report.contracts.get(self.scores.contract, {})


class EvaluationIndex:
    """Reader of all evaluations of a project."""

    def __init__(self, layout: ProjectLayout, names: ComparisonIndex) -> None:
        """Read the current evaluation, if it exists. Raises DamagedFileError if one of its files is damaged."""
        self._layout, self._names = layout, names
        self.current: EvaluationReport | None = None
        self.groups: Mapping[str, str | None] = {}
        if layout.eval_report.exists():
            files.verify_sealed(layout.evaluate, "evaluation")
            self.current = EvaluationReport.load(layout.eval_report)
            self.groups = {row.id: row.group for row in read_rows(layout)}

    def for_run(self, run_id: str) -> list[ModelEvaluation]:
        """Return a run's scores from the current evaluation, else from evaluations kept with its promoted versions."""
        digests = [self._names.versions[number].model_digest for number in self._names.versions_of(run_id)]
        roles: tuple[ModelRole, ...] = ()
        if self.current is not None:
            if self.current.run_id == run_id:
                roles = OWN_ROLES
            elif self.current.champion_digest in digests:
                roles = ("champion",)
            elif self.current.anchor_digest in digests:
                roles = ("anchor",)
            roles = tuple(role for role in roles if role in self.current.scores)
        evaluations = [self.role_scores(role, run_id) for role in roles]
        for model_digest in digests if not evaluations else ():
            path = self._layout.promoted_model(model_digest) / "eval.json"
            if path.exists():
                report = EvaluationReport.load(path)
                place = f"kept with model {model_digest[:12]}"
                evaluations += [
                    ModelEvaluation(run_id, role, place, report) for role in OWN_ROLES if role in report.scores
                ]
        return evaluations

    def role_scores(self, role: ModelRole, run_id: str = "") -> ModelEvaluation:
        """Return one model's scores from the current evaluation, which must exist. `run_id` is empty for the base."""
        report = self.current
        if report is None:
            raise ValueError("no evaluation found")
        samples: dict[str, Samples] = {}
        for metric, name in report.scores[role].samples.items():
            by_id, duplicate = read_samples(self._layout.evaluate / name)
            if duplicate is None:
                samples[metric] = by_id
        return ModelEvaluation(run_id, role, CURRENT, report, samples, self.groups)


def read_validation_scores(summary: RunSummary) -> dict[str, ValidationScores]:
    """Read a run's scores of single validation rows, by request digest (`ValidationScores.request_digest`).

    Files that cannot be read, and scores of another adapter, are omitted.
    """
    scores: dict[str, ValidationScores] = {}
    for path in sorted(summary.paths.root.glob("validation_scores-*.json")):
        try:
            run_scores = ValidationScores.load(path)
        except (DataError, DamagedFileError):
            continue
        if summary.report is not None and run_scores.adapter_digest == summary.report.adapter_digest:
            scores[run_scores.request_digest] = run_scores
    return scores


# Significance of differences, tested only where the same rows were scored under one contract. Test rows use the gate's
# statistics (quality_gate/paired_test). Validation rows use those of a sweep's final round (quality_gate/finalists),
# which include the variance of seeds. The leader of each pair is chosen by the scores that are then tested, so the
# one-sided p-values are doubled. Holm's correction then covers all differences that one page tests.


@dataclass(frozen=True)
class SubjectScores:
    """Scores of one subject."""

    name: str
    evaluations: Sequence[ModelEvaluation]
    held_out: Sequence[Mapping[str, ValidationScores]]
    """Validation scores of each run, by request digest (`read_validation_scores`)."""


@dataclass(frozen=True)
class PairwiseTestResult:
    """Result of a paired test of two subjects on the same rows."""

    metric: str
    rows: str
    leader: str
    """Name of the subject with the better score."""
    other: str
    values: tuple[float, float]
    """Scores of the leader and of the other subject."""
    measured: MetricValue | None
    """Metric on test rows, which determines the unit. None for validation rows."""
    difference: float
    """Positive if the leader is better. For perplexities, the fraction by which the leader's perplexity is lower."""
    low: float
    """Lower confidence bound of the difference, at half the error rate that the page allows for each difference."""
    n: int
    p: float
    """Two-sided p-value."""
    method: str
    p_adjusted: float = 1.0
    """p-value after Holm's correction."""
    is_significant: bool = False
    """Whether the leader is significantly better: `p_adjusted` is below 1 - gate.confidence, and `low` is above 0."""


def compare_pairs(
    scored: Sequence[SubjectScores], gate: Gate, only: str | None = None
) -> tuple[list[PairwiseTestResult], dict[str, str]]:
    """Compare all pairs that can be compared, and list the pairs that cannot, by reason.

    Args:
        scored: Scores of the subjects.
        gate: Confidence, resamples and seed of the bootstrap.
        only: Name of the subject with which all other subjects are compared. None compares all pairs.
    """
    results: list[PairwiseTestResult] = []
    incomparable: dict[str, list[str]] = {}
    pairs = (pair for pair in combinations(scored, 2) if only is None or only in (pair[0].name, pair[1].name))
    for first, second in pairs:
        pair_results = [
            *_compare_on_test_rows(first, second, gate),
            *_compare_on_validation_rows(first, second, scored, gate),
        ]
        results += pair_results
        if not pair_results:
            reason = _explain_incomparable(first, second)
            incomparable.setdefault(reason, []).append(f"{first.name} and {second.name}")
    level = 1 - gate.confidence
    adjusted = statistics.adjust_p_values([result.p for result in results])
    return [
        replace(result, p_adjusted=p, is_significant=p < level and result.low > 0)
        for result, p in zip(results, adjusted, strict=True)
    ], {reason: "; ".join(names) for reason, names in incomparable.items()}


def _compare_on_test_rows(first: SubjectScores, second: SubjectScores, gate: Gate) -> Iterator[PairwiseTestResult]:
    pair = _comparable_evaluations(first, second)
    if pair is None:
        return
    plan = PairedTestPlan((1 + gate.confidence) / 2, gate.power, gate.expected_discordance, gate.resamples, gate.seed)
    names = [name for name in sorted(pair[0].samples) if name in pair[1].samples]
    for name in names[:MAX_METRICS]:
        metrics = [evaluation.scores.metrics.get(name) for evaluation in pair]
        if metrics[0] is None or metrics[1] is None or metrics[0].better == "unknown" or metrics[0].kind == "aggregate":
            continue
        if pair[0].samples[name].keys() != pair[1].samples[name].keys():
            continue
        pairs = evidence.build_pairs(metrics[0], pair[0].samples[name], pair[1].samples[name], pair[0].groups)
        leader, other = first.name, second.name
        values = metrics[0].value, metrics[1].value
        if evidence.compute_difference(pairs) < 0:
            pairs = replace(pairs, new=pairs.old, old=pairs.new)
            leader, other, values = other, leader, (values[1], values[0])
        try:
            test = paired_test.compare(pairs, 0.0, plan)
        except ValueError:  # a score that is not a number, or rows without tokens: no test is possible
            continue
        yield PairwiseTestResult(
            name, TEST, leader, other, values, metrics[0], test.difference, test.low, test.n, min(1.0, 2 * test.p),
            test.method,
        )  # fmt: skip


def _comparable_evaluations(
    first: SubjectScores, second: SubjectScores
) -> tuple[ModelEvaluation, ModelEvaluation] | None:
    """Return an evaluation of each subject, both with per-sample scores under the same contract; None without them."""
    return next(
        (
            (first_evaluation, second_evaluation)
            for first_evaluation in first.evaluations
            for second_evaluation in second.evaluations
            if first_evaluation.samples
            and second_evaluation.samples
            and first_evaluation.scores.contract == second_evaluation.scores.contract
        ),
        None,
    )


def _compare_on_validation_rows(
    first: SubjectScores, second: SubjectScores, subjects: Sequence[SubjectScores], gate: Gate
) -> Iterator[PairwiseTestResult]:
    questions = _shared_questions(first, second)
    if not questions:
        return
    question = max(questions, key=lambda digest: (len(first.held_out[0][digest].ids), digest))
    known = first.held_out[0][question]
    scored = [subject for subject in subjects if subject.held_out and all(question in run for run in subject.held_out)]
    for metric in known.values:
        if not all(metric in run[question].values for subject in scored for run in subject.held_out):
            continue
        comparator = FinalistComparator(
            objective=SweepObjective(metric=metric, direction="minimize" if metric == VALIDATION_LOSS else "maximize"),
            confidence=gate.confidence,
            weights=known.tokens if metric == VALIDATION_LOSS else None,
            groups=known.groups if any(group is not None for group in known.groups) else None,
            resamples=gate.resamples,
            seed=gate.seed,
        )
        contenders = {
            subject.name: FinalistScores(
                number, {}, tuple(run[question].run_id for run in subject.held_out),
                [run[question].values[metric] for run in subject.held_out],
            )
            for number, subject in enumerate(scored)
        }  # fmt: skip
        leader, other = sorted((first.name, second.name), key=lambda name: comparator.sort_key(contenders[name]))
        pair = contenders[leader], contenders[other]
        test = finalists.compare_pair(comparator, pair, list(contenders.values()), (1 - gate.confidence) / 2)
        values = comparator.mean(pair[0].row_means), comparator.mean(pair[1].row_means)
        yield PairwiseTestResult(
            metric, VALIDATION, leader, other, values, None, test.value, test.low, len(known.ids),
            min(1.0, 2 * test.p), test.method,
        )  # fmt: skip


def _shared_questions(first: SubjectScores, second: SubjectScores) -> set[str]:
    """Return the request digests for which every run of both subjects was scored with the same numerics."""
    runs = [*first.held_out, *second.held_out]
    if not first.held_out or not second.held_out:
        return set()
    shared = set.intersection(*(set(run) for run in runs))
    return {
        question for question in shared if all(run[question].numerics == runs[0][question].numerics for run in runs)
    }


def _explain_incomparable(first: SubjectScores, second: SubjectScores) -> str:
    """Explain why two subjects cannot be compared row by row."""
    for subject in (first, second):
        if not subject.evaluations and not any(subject.held_out):
            return f"{subject.name} was not evaluated"
    contracts = [{evaluation.scores.contract for evaluation in subject.evaluations} for subject in (first, second)]
    if all(contracts) and not contracts[0] & contracts[1]:
        data = [{evaluation.report.data_digest for evaluation in subject.evaluations} for subject in (first, second)]
        condition = "on different data" if not data[0] & data[1] else "under different contracts"
        digests = " and ".join(", ".join(sorted(name[:SHORT] for name in names)) for names in contracts)
        return f"they were scored {condition} ({digests}): their scores are not comparable"
    if _comparable_evaluations(first, second) is not None:
        return "no metric has scores of single rows for both"
    if all(contracts):
        return "one of them has only aggregate scores, no scores of single rows"
    return "they were not scored on the same rows"


# Comparison of several runs: differing settings, results, and significant differences.


@dataclass(frozen=True)
class ComparisonSide:
    """One side of a comparison with everything that was read about it."""

    subject: ComparisonSubject
    runs: tuple[RunSummary, ...]
    """Summaries of the side's runs."""
    steps: HistoryCurve
    """Curves by step. For several runs: the mean of the runs, with plus and minus one standard deviation."""
    validations: HistoryCurve
    members: tuple[HistoryCurve, ...]
    """Steps of each run separately, for details that a mean hides."""
    evaluations: tuple[ModelEvaluation, ...]
    trials: tuple[str, ...]
    """Sweep trials that used these runs."""
    promotions: tuple[str, ...]
    """Promoted versions and verdicts. Empty if the runs were neither promoted nor judged."""

    @property
    def name(self) -> str:
        """Name of the subject."""
        return self.subject.name

    @property
    def is_group(self) -> bool:
        """Whether the side consists of several runs."""
        return len(self.runs) > 1


@dataclass(frozen=True)
class ComparisonRow:
    """A property and its value on each side."""

    name: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether the sides have different values."""
        return len(set(self.values)) > 1


@dataclass(frozen=True)
class RunComparison:
    """Everything that a comparison shows."""

    sides: tuple[ComparisonSide, ...]
    settings: tuple[ComparisonRow, ...]
    """Settings that affect learning."""
    execution: tuple[ComparisonRow, ...]
    """Settings of execution, which do not affect learning."""
    test_results: tuple[PairwiseTestResult, ...]
    not_tested: Mapping[str, str]
    """Pairs that cannot be compared, by reason."""
    notes: tuple[str, ...]
    """Warnings shown before the metrics."""


def compare_subjects(
    layout: ProjectLayout, gate: Gate, subjects: Sequence[ComparisonSubject], names: ComparisonIndex
) -> RunComparison:
    """Read everything about these subjects and compare them.

    Raises:
        DamagedFileError: A file of a run or of the evaluation is damaged.
    """
    evaluations = EvaluationIndex(layout, names)
    points = max(LEAST_POINTS, min(MOST_POINTS, POINTS // max(1, len(subjects))))
    sides = tuple(read_side(layout, subject, names, evaluations, points) for subject in subjects)
    scored = [
        SubjectScores(side.name, side.evaluations, [read_validation_scores(run) for run in side.runs]) for side in sides
    ]
    test_results, incomparable = compare_pairs(scored, gate)
    return RunComparison(
        sides,
        comparison_rows([[run.settings for run in side.runs] for side in sides]),
        comparison_rows([[run.execution for run in side.runs] for side in sides]),
        tuple(test_results),
        incomparable,
        (*_collect_notes(sides), *_describe_tested_runs(sides, scored, test_results)),
    )


def read_side(
    layout: ProjectLayout,
    subject: ComparisonSubject,
    names: ComparisonIndex,
    evaluations: EvaluationIndex,
    points: int,
) -> ComparisonSide:
    """Read everything about one subject. Raises the exceptions of `compare_subjects`."""
    summaries = tuple(run_history.read_run_summary(RunPaths(layout.runs / run_id)) for run_id in subject.run_ids)
    steps = [summary.history.steps.line(points) for summary in summaries]
    return ComparisonSide(
        subject,
        summaries,
        _mean_curve(steps, STEP_VALUES, points),
        _mean_curve([summary.history.validations.line(points) for summary in summaries], VALIDATION_VALUES, points),
        tuple(steps),
        tuple(evaluation for run_id in subject.run_ids for evaluation in evaluations.for_run(run_id)),
        tuple(trial for run_id in subject.run_ids for trial in names.trials_of(run_id)),
        tuple(text for run_id in subject.run_ids for text in _describe_promotions(layout, run_id, names)),
    )


def _mean_curve(lines: Sequence[HistoryCurve], names: Sequence[str], points: int) -> HistoryCurve:
    nonempty = [line for line in lines if len(line)]
    if not nonempty:
        return BucketedSeries(names).line()
    if len(nonempty) == 1:
        return nonempty[0]
    return run_history.average_curves(nonempty, min(points, max(map(len, nonempty))))


def comparison_rows(values_by_side: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[ComparisonRow, ...]:
    """Return a row for each setting. A side whose runs differ has several values in one cell."""
    keys = dict.fromkeys(key for group in values_by_side for settings in group for key in settings)
    return tuple(
        ComparisonRow(key, tuple(_format_values(settings.get(key) for settings in group) for group in values_by_side))
        for key in keys
    )


def _format_values(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(map(format_setting, values)))


def format_setting(value: Any) -> str:
    """Format a setting as text."""
    if value is None:
        return NO_VALUE
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return " ".join(map(format_setting, value)) or "none"
    return str(value)


def _describe_promotions(layout: ProjectLayout, run_id: str, names: ComparisonIndex) -> list[str]:
    """Return champion status, promoted versions and gate decisions of a run."""
    file = read_champion(layout.champion)
    descriptions = []
    for number in names.versions_of(run_id):
        is_champion = file.champion is not None and file.champion.version == number
        is_anchor = file.anchor is not None and file.anchor.version == number
        titles = [title for title, applies in (("champion", is_champion), ("anchor", is_anchor)) if applies]
        descriptions.append(f"version {number:,}" + (f" ({', '.join(titles)})" if titles else ", promoted earlier"))
    decisions = [use.decision for use in test_sets.read_test_set_uses(layout) if use.run_id == run_id and use.decision]
    return descriptions + [f"gate: {decision}" for decision in dict.fromkeys(decisions)]


def _describe_tested_runs(
    sides: Sequence[ComparisonSide], scored: Sequence[SubjectScores], results: Sequence[PairwiseTestResult]
) -> Iterable[str]:
    """Yield notes about tests of single runs. Other seeds may give other results."""
    if results and all(len(side.runs) == 1 for side in sides):
        yield ONE_RUN_NOTE
    by_name, tested = {subject.name: subject for subject in scored}, defaultdict[str, dict[str, None]](dict)
    for result in results:
        pair = _comparable_evaluations(by_name[result.leader], by_name[result.other])
        if result.rows == TEST and pair is not None:
            for name, evaluation in zip((result.leader, result.other), pair, strict=True):
                tested[name][evaluation.run_id] = None
    for side in sides:
        if len(side.runs) > 1 and side.name in tested:
            yield (
                f"{side.name}: the scores on test rows are those of run {' and run '.join(tested[side.name])} alone, "
                "because an evaluation scores one run. Its other seeds may give another result."
            )


def _collect_notes(sides: Sequence[ComparisonSide]) -> Iterable[str]:
    known = [run for side in sides for run in side.runs if run.spec is not None]
    for kind, digests in (
        ("data", {run.settings["data"] for run in known}),
        ("base models", {run.settings["base"] for run in known}),
    ):
        if len(digests) > 1:
            yield (
                f"These runs were trained on different {kind} ({', '.join(sorted(digests))}): their losses and scores "
                "are not comparable, and differences between them are not tested."
            )
    for side in sides:
        others = sorted(
            {row.name for row in comparison_rows([[run.settings] for run in side.runs]) if row.differs} - {SEED}
        )
        if others:
            yield f"{side.name}: its runs differ in more than the seed: {', '.join(others)}."
        for run in side.runs:
            if not run.exists:
                yield (
                    f"{side.name}: the directory of run {run.run_id} is not on this machine; its curves are missing."
                )
            elif run.report is None:
                yield f"{side.name}: run {run.run_id} is {run.state}, at step {run.history.step:,}."
            if run.history.damaged:
                yield f"{side.name}: ignored {run.history.damaged:,} damaged lines of its journal."
