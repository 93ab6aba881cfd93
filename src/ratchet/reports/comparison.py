"""What is compared, by name: a run, a trial of a sweep, a promoted version, or several as one group of seeds."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from itertools import combinations
from typing import Any, TypeVar

from ratchet.config.gate import Gate
from ratchet.errors import DamagedFileError, DataError, SettingsError
from ratchet.gate import evidence, finalists, paired_test, statistics, test_set_reuse
from ratchet.gate.evidence import Samples, read_rows, read_samples
from ratchet.gate.finalists import FinalistComparator, FinalistScores
from ratchet.gate.paired_test import PairedTestPlan
from ratchet.registry import ledger
from ratchet.reports import run_history
from ratchet.reports.run_history import STEP_VALUES, VALIDATION_VALUES, HistoryCurve, RunSummary
from ratchet.runs import directory
from ratchet.runs.directory import RunPaths
from ratchet.storage import files
from ratchet.storage.digests import SHORT
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import (
    LOSS,
    EvaluationReport,
    HeldOutScores,
    InferenceCost,
    MetricValue,
    ModelScores,
    Who,
)
from ratchet.storage.records.gate import Champion, ChampionFile, read_champion
from ratchet.storage.records.sweep import SweepObjective, SweepReport, Trial

JOINED = "+"
"""Between members of a group of seeds."""
LABELLED = "="
"""After what a subject is to be called."""
MOST = 12
"""Subjects that a page can tell apart."""
NAMED = 12
"""Names that a message lists, at most."""

HOW = (
    "name a run by its id or its beginning, a trial as SWEEP/NUMBER, a promoted version as v3, champion or anchor, "
    "and runs that differ in their seed only as A+B+C; LABEL= before any of these is what it is called"
)


@dataclass(frozen=True)
class ComparisonRun:
    """One training."""

    run_id: str
    about: str
    """What the name stood for, where it was not the run's: `version 3`, `trial 7 of lora`."""
    model_digest: str | None = None
    """Of the version that was named."""


@dataclass(frozen=True)
class ComparisonSubject:
    """One of those that are compared: a training, or several that differ in their seed."""

    name: str
    """As it was given; what it is called on the page."""
    members: tuple[ComparisonRun, ...]

    @property
    def run_ids(self) -> tuple[str, ...]:
        """Of its trainings."""
        return tuple(member.run_id for member in self.members)


class ComparisonIndex:
    """Everything in a project that can be compared, by name."""

    def __init__(self, layout: ProjectLayout) -> None:
        self._layout = layout
        self.runs = [run.root.name for run in directory.list_runs(layout.runs)]
        self._file = read_champion(layout.champion)
        self.versions = _promoted_versions(layout, self._file)
        self._reports: dict[str, SweepReport] = {}

    def subjects(self, names: Sequence[str]) -> list[ComparisonSubject]:
        """Those of these names, in their order.

        Raises:
            DataError: a name that nothing has, or several have; it tells near ones.
            SettingsError: one name twice, an empty one, or too many.
        """
        if len(names) > MOST:
            raise SettingsError(f"{len(names)} to compare: more than {MOST} cannot be told apart; name fewer")
        found: dict[tuple[str, ...], ComparisonSubject] = {}
        for name in names:
            subject = self.subject(name)
            if earlier := found.get(tuple(sorted(subject.run_ids))):
                same = "the same run" if len(subject.run_ids) == 1 else "the same runs"
                raise SettingsError(
                    f"{name}: is {same} as {earlier.name} ({', '.join(subject.run_ids)}); name different ones"
                )
            if any(subject.name == one.name for one in found.values()):
                raise SettingsError(f"{subject.name}: two of them are called so; give each a label of its own")
            found[tuple(sorted(subject.run_ids))] = subject
        return list(found.values())

    def subject(self, name: str) -> ComparisonSubject:
        """The one of this name, or of LABEL=NAME: then the label is what it is called. Raises as `subjects`."""
        label, named, meant = name.rpartition(LABELLED)
        members = tuple(self._member(part.strip()) for part in meant.split(JOINED))
        if len({member.run_id for member in members}) < len(members):
            raise SettingsError(f"{name}: names a run twice; a group has each of its runs once")
        if named and not label.strip():
            raise SettingsError(
                f"{name}: nothing stands before {LABELLED}; write LABEL{LABELLED}NAME, or the name alone"
            )
        return ComparisonSubject(label.strip() or meant, members)

    def _member(self, name: str) -> ComparisonRun:
        if not name:
            raise SettingsError(f"an empty name; {HOW}")
        if name in ("champion", "anchor") or (name[:1] == "v" and name[1:].isdecimal()):
            return self._version(name)
        if "/" in name:
            return self._trial(name)
        matching = [run_id for run_id in self.runs if run_id.startswith(name)]
        if len(matching) == 1:
            return ComparisonRun(matching[0], "")
        if matching:
            raise DataError(f"{name}: {len(matching)} runs begin so: {_join_names(matching)}; write more of it")
        raise DataError(f"{name}: nothing of that name in {self._layout.experiments}; {self._near(name)}{HOW}")

    def _version(self, name: str) -> ComparisonRun:
        if name in ("champion", "anchor"):
            one: Champion | None = getattr(self._file, name)
            if one is None:
                raise DataError(f"{name}: there is none yet; `ratchet promote` makes one")
            number = one.version
        else:
            number = int(name[1:])
        if number not in self.versions:
            known = _join_names([f"v{one}" for one in self.versions]) or "none"
            raise DataError(f"{name}: no such version was promoted here; there are: {known}")
        run_id, model_digest = self.versions[number]
        return ComparisonRun(run_id, f"version {number:,}", model_digest)

    def _trial(self, name: str) -> ComparisonRun:
        study, _, number = name.rpartition("/")
        trials = {str(trial.number): trial for trial in self.trials(study)}
        if number not in trials:
            raise DataError(
                f"{name}: sweep {study} has no trial {number!r}; "
                f"there are {_format_trial_range([int(one) for one in trials])}"
            )
        run_id = trials[number].run_id
        if run_id is None:
            raise DataError(f"{name}: its values were refused, so nothing was trained ({trials[number].reason})")
        return ComparisonRun(run_id, f"trial {number} of {study}")

    def trials(self, study: str) -> tuple[Trial, ...]:
        """Of a sweep, as its report tells. Raises DataError where there is no such report."""
        path = self._layout.sweep(study) / "report.json"
        if study not in self.studies():
            known = _join_names(self.studies()) or "none"
            near = _suggest_names(get_close_matches(study, self.studies(), n=3, cutoff=0.5))
            raise DataError(
                f"{study}: no sweep of that name has a report ({path}); {near}there are: {known}; "
                "`ratchet sweep --report` writes one"
            )
        if study not in self._reports:
            self._reports[study] = SweepReport.load(path)
        return self._reports[study].trials

    def studies(self) -> list[str]:
        """Sweeps that have a report, by name."""
        return sorted(path.parent.name for path in self._layout.sweeps.glob("*/report.json"))

    def trials_of(self, run_id: str) -> list[str]:
        """Trials that were this run, as SWEEP/NUMBER; of reports that can be read."""
        found = []
        for study in self.studies():
            try:
                found += [f"{study}/{trial.number}" for trial in self.trials(study) if trial.run_id == run_id]
            except DamagedFileError:
                continue
        return found

    def versions_of(self, run_id: str) -> list[int]:
        """Promoted versions that came of this run."""
        return [number for number, (run, _) in self.versions.items() if run == run_id]

    def _near(self, name: str) -> str:
        everything = [*self.runs, *self.studies(), *(f"v{number}" for number in self.versions), "champion", "anchor"]
        by_beginning = {one[: max(len(name), 4)]: one for one in everything}
        near = get_close_matches(name, by_beginning, n=3, cutoff=0.5)
        runs = f"runs: {_join_names(self.runs) or 'none'}; "
        return f"{_suggest_names([by_beginning[one] for one in near])}{runs}"


def _promoted_versions(layout: ProjectLayout, file: ChampionFile) -> dict[int, tuple[str, str]]:
    """Run and model of each version that was ever promoted; what the ledger lacks is in the champion file."""
    held = [one for one in (*file.previous, file.anchor, file.champion) if one is not None]
    found = {one.version: (one.run_id, one.model_digest) for one in held}
    found |= {one.version: (one.run_id, one.model_digest) for one in ledger.read_entries(layout.promotions)}
    return dict(sorted(found.items()))


def _suggest_names(near: Sequence[str]) -> str:
    return f"did you mean {' or '.join(near)}? " if near else ""


def _join_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _format_trial_range(numbers: Sequence[int]) -> str:
    return f"trials {min(numbers)} to {max(numbers)}" if numbers else "none"


# Figures that were measured of a training: on test rows by stage evaluate, on validation rows for finalists.

CURRENT = "experiments/evaluate"
OWN: tuple[Who, ...] = ("candidate", "merged")
"""Names under which the model that an evaluation is about was scored."""


@dataclass(frozen=True)
class ModelEvaluation:
    """One model's scores in one evaluation."""

    run_id: str
    who: Who
    """Under which it was scored."""
    place: str
    """Which evaluation."""
    report: EvaluationReport
    samples: Mapping[str, Samples] = field(default_factory=dict)
    """Per-sample scores by metric; none where only the figures were kept."""
    groups: Mapping[str, str | None] = field(default_factory=dict)
    """Of the test rows: those of one group are no independent samples."""

    @property
    def scores(self) -> ModelScores:
        """Its figures."""
        return self.report.scores[self.who]

    @property
    def cost(self) -> InferenceCost | None:
        """What answering costs, if that was measured."""
        return self.report.costs.get(self.who)

    @property
    def contract(self) -> Mapping[str, Any]:
        """What made the scores comparable."""
        return self.report.contracts.get(self.scores.contract, {})


class EvaluationIndex:
    """What a project keeps of evaluations."""

    def __init__(self, layout: ProjectLayout, names: ComparisonIndex) -> None:
        """Raises DamagedFileError when a file of the evaluation is not as it was written."""
        self._layout, self._names = layout, names
        self.current: EvaluationReport | None = None
        self.groups: Mapping[str, str | None] = {}
        if layout.eval_report.exists():
            files.verify_sealed(layout.evaluate, "evaluation")
            self.current = EvaluationReport.load(layout.eval_report)
            self.groups = {row.id: row.group for row in read_rows(layout)}

    def of(self, run_id: str) -> list[ModelEvaluation]:
        """Of one training: of the evaluation as it is now, else of those kept with its promoted versions."""
        digests = [self._names.versions[number][1] for number in self._names.versions_of(run_id)]
        found = self._current(run_id, digests)
        for model_digest in digests if not found else ():
            path = self._layout.promoted_model(model_digest) / "eval.json"
            if path.exists():
                report = EvaluationReport.load(path)
                place = f"kept with model {model_digest[:12]}"
                found += [ModelEvaluation(run_id, who, place, report) for who in OWN if who in report.scores]
        return found

    def _current(self, run_id: str, digests: list[str]) -> list[ModelEvaluation]:
        report = self.current
        if report is None:
            return []
        names: list[Who] = list(OWN) if report.run_id == run_id else []
        if not names and report.champion_digest in digests:
            names.append("champion")
        if not names and report.anchor_digest in digests:
            names.append("anchor")
        return [self.scored(who, run_id) for who in names if who in report.scores]

    def scored(self, who: Who, run_id: str = "") -> ModelEvaluation:
        """One model of the evaluation as it is now, which must have been scored; the base is of no training."""
        report = self.current
        if report is None:
            raise ValueError("there is no evaluation")
        return ModelEvaluation(run_id, who, CURRENT, report, self._samples(report.scores[who]), self.groups)

    def _samples(self, scores: ModelScores) -> dict[str, Samples]:
        found: dict[str, Samples] = {}
        for metric, name in scores.samples.items():
            by_id, twice = read_samples(self._layout.evaluate / name)
            if twice is None:
                found[metric] = by_id
        return found


def read_validation_scores(account: RunSummary) -> dict[str, HeldOutScores]:
    """Row by row scores of a run's adapter on validation rows, by question; what cannot be trusted is left out."""
    found: dict[str, HeldOutScores] = {}
    for path in sorted(account.paths.root.glob("held_out-*.json")):
        try:
            one = HeldOutScores.load(path)
        except (DataError, DamagedFileError):
            continue
        if account.report is not None and one.adapter_digest == account.report.adapter_digest:
            found[one.question] = one
    return found


# Which differences are more than chance: only where the same rows were scored under one contract.
#
# The statistics are the gate's (gate/paired_test) on test rows, and those of a sweep's finals (gate/finalists) on
# validation
# rows, where seeds count too. Of each pair the leader is picked by these very scores, so p-values are doubled; then
# Holm's correction over everything that one page compares.

T = TypeVar("T")

METRICS = 24
"""Of one pair that are compared, at most: with each claim the others must be surer."""

TEST, VALIDATION = "test rows", "validation rows"


@dataclass(frozen=True)
class SubjectScores:
    """One subject's scores."""

    name: str
    examined: Sequence[ModelEvaluation]
    held_out: Sequence[Mapping[str, HeldOutScores]]
    """Of each of its trainings, by question."""


@dataclass(frozen=True)
class PairwiseTestResult:
    """Two subjects on the same rows."""

    metric: str
    rows: str
    leader: str
    """Whose figure is better."""
    other: str
    values: tuple[float, float]
    """The leader's and the other's."""
    measured: MetricValue | None
    """For its unit; None of validation rows."""
    difference: float
    """Positive: the leader is better; of perplexities the fraction by which it is lower."""
    low: float
    """Bound that it exceeds, with half the chance of error that a page has for one claim."""
    n: int
    p: float
    """Two-sided."""
    method: str
    p_adjusted: float = 1.0
    """After Holm's correction."""
    is_real: bool = False
    """Whether the leader is better beyond doubt."""


@dataclass(frozen=True)
class IncomparablePair:
    """Two subjects of which nothing can be said, and why."""

    pair: tuple[str, str]
    why: str


def compare_pairs(
    scored: Sequence[SubjectScores], gate: Gate, only: str | None = None
) -> tuple[list[PairwiseTestResult], list[IncomparablePair]]:
    """Every comparison that can be made, and the pairs that allow none.

    Args:
        scored: the subjects.
        gate: confidence, resamples and seed of the bootstrap.
        only: name of the one that each of the others is compared with; None: everybody is, with everybody.
    """
    found: list[PairwiseTestResult] = []
    silent: list[IncomparablePair] = []
    pairs = (pair for pair in combinations(scored, 2) if only is None or only in (pair[0].name, pair[1].name))
    for first, second in pairs:
        made = [*_compare_on_test_rows(first, second, gate), *_compare_on_validation_rows(first, second, scored, gate)]
        found += made
        if not made:
            silent.append(IncomparablePair((first.name, second.name), _explain_incomparable(first, second)))
    level = 1 - gate.confidence
    adjusted = statistics.adjust_p_values([one.p for one in found])
    return [
        replace(one, p_adjusted=p, is_real=p < level and one.low > 0) for one, p in zip(found, adjusted, strict=True)
    ], silent


def _compare_on_test_rows(first: SubjectScores, second: SubjectScores, gate: Gate) -> Iterator[PairwiseTestResult]:
    pair = _comparable_evaluations(first, second)
    if pair is None:
        return
    names = [name for name in sorted(pair[0].samples) if name in pair[1].samples]
    for name in names[:METRICS]:
        metrics = [one.scores.metrics.get(name) for one in pair]
        if metrics[0] is None or metrics[1] is None or metrics[0].better == "unknown" or metrics[0].kind == "figure":
            continue
        if pair[0].samples[name].keys() != pair[1].samples[name].keys():
            continue
        samples = [evidence.sort_samples(one.samples[name]) for one in pair]
        pairs = evidence.build_pairs(metrics[0], samples[0], samples[1], pair[0].groups)
        order = (0, 1) if evidence.compute_difference(pairs) >= 0 else (1, 0)
        if order == (1, 0):
            pairs = replace(pairs, new=pairs.old, old=pairs.new)
        try:
            one = paired_test.compare(pairs, 0.0, _test_plan(gate))
        except ValueError:  # a score that is no number, or rows of no tokens: nothing to be said
            continue
        figures = (metrics[0].value, metrics[1].value)
        yield PairwiseTestResult(
            name, TEST, *_order_pair(order, (first.name, second.name)), _order_pair(order, figures), metrics[0],
            one.difference, one.low, one.n, min(1.0, 2 * one.p), one.method,
        )  # fmt: skip


def _comparable_evaluations(
    first: SubjectScores, second: SubjectScores
) -> tuple[ModelEvaluation, ModelEvaluation] | None:
    """Scores of both in one evaluation under one contract, with all samples."""
    return next(
        (
            (one, other)
            for one in first.examined
            for other in second.examined
            if one.samples and other.samples and one.scores.contract == other.scores.contract
        ),
        None,
    )


def _compare_on_validation_rows(
    first: SubjectScores, second: SubjectScores, everyone: Sequence[SubjectScores], gate: Gate
) -> Iterator[PairwiseTestResult]:
    questions = _shared_questions(first, second)
    if not questions:
        return
    question = max(questions, key=lambda one: (len(first.held_out[0][one].ids), one))
    known = first.held_out[0][question]
    among = [one for one in everyone if one.held_out and all(question in run for run in one.held_out)]
    for metric in known.values:
        if not all(metric in run[question].values for one in among for run in one.held_out):
            continue
        contest = FinalistComparator(
            measure=SweepObjective(metric=metric, direction="minimize" if metric == LOSS else "maximize"),
            confidence=gate.confidence,
            weights=known.tokens if metric == LOSS else None,
            groups=known.groups if any(group is not None for group in known.groups) else None,
            resamples=gate.resamples,
            seed=gate.seed,
        )
        contenders = {
            one.name: FinalistScores(
                number, {}, tuple(run[question].run_id for run in one.held_out),
                [run[question].values[metric] for run in one.held_out],
            )
            for number, one in enumerate(among)
        }  # fmt: skip
        leader, other = sorted((first.name, second.name), key=lambda name: contest.order(contenders[name]))
        pair = contenders[leader], contenders[other]
        one = finalists.compare_pair(contest, pair, list(contenders.values()), (1 - gate.confidence) / 2)
        values = contest.mean(pair[0].rows), contest.mean(pair[1].rows)
        yield PairwiseTestResult(
            metric, VALIDATION, leader, other, values, None, one.value, one.low, len(known.ids),
            min(1.0, 2 * one.p), one.method,
        )  # fmt: skip


def _shared_questions(first: SubjectScores, second: SubjectScores) -> set[str]:
    """Questions that every training of both has answered, computed alike."""
    runs = [*first.held_out, *second.held_out]
    if not first.held_out or not second.held_out:
        return set()
    shared = set.intersection(*(set(run) for run in runs))
    return {one for one in shared if all(run[one].arithmetic == runs[0][one].arithmetic for run in runs)}


def _test_plan(gate: Gate) -> PairedTestPlan:
    return PairedTestPlan((1 + gate.confidence) / 2, gate.power, gate.discordance, gate.resamples, gate.seed)


def _order_pair(order: tuple[int, int], pair: tuple[T, T]) -> tuple[T, T]:
    return pair[order[0]], pair[order[1]]


def _explain_incomparable(first: SubjectScores, second: SubjectScores) -> str:
    """Why two subjects cannot be compared row by row."""
    for one in (first, second):
        if not one.examined and not any(one.held_out):
            return f"{one.name} was not evaluated"
    contracts = [{found.scores.contract for found in one.examined} for one in (first, second)]
    if all(contracts) and not contracts[0] & contracts[1]:
        data = [{found.report.data_digest for found in one.examined} for one in (first, second)]
        what = "on different data" if not data[0] & data[1] else "under different contracts"
        shown = " and ".join(", ".join(sorted(name[:SHORT] for name in names)) for names in contracts)
        return f"they were scored {what} ({shown}): their figures say nothing about each other"
    if _comparable_evaluations(first, second) is not None:
        return "no figure was measured of both on the same single rows"
    if all(contracts):
        return "only the figures of one of them were kept, not its scores of single rows"
    return "they were not scored on the same rows"


# Several trainings side by side: in what they differ, what came of each, and which differences are real.

POINTS, LEAST_POINTS = 3600, 150
"""Of all curves of one kind on a page together; of one of them."""
MOST_POINTS = 600
SEED = "train.seed"
NOTHING = "\u2013"


@dataclass(frozen=True)
class ComparisonSide:
    """One of those that are compared."""

    subject: ComparisonSubject
    accounts: tuple[RunSummary, ...]
    """Of its trainings."""
    steps: HistoryCurve
    """Curves by step; of several trainings their mean, and a standard deviation on either side."""
    validations: HistoryCurve
    members: tuple[HistoryCurve, ...]
    """Steps of each training by itself: what a mean over several does not show."""
    examined: tuple[ModelEvaluation, ...]
    trials: tuple[str, ...]
    """Trials of sweeps that were these trainings."""
    standing: tuple[str, ...]
    """What became of it: versions, verdicts; nothing where nobody promoted or judged it."""

    @property
    def name(self) -> str:
        """As it was given."""
        return self.subject.name

    @property
    def is_group(self) -> bool:
        """Whether it is several trainings."""
        return len(self.accounts) > 1


@dataclass(frozen=True)
class ComparisonRow:
    """One thing that may differ: its name, and what each side has."""

    name: str
    values: tuple[str, ...]

    @property
    def differs(self) -> bool:
        """Whether the sides have not all the same."""
        return len(set(self.values)) > 1


@dataclass(frozen=True)
class RunComparison:
    """Everything that a comparison shows."""

    sides: tuple[ComparisonSide, ...]
    settings: tuple[ComparisonRow, ...]
    """What decides what is learned."""
    manner: tuple[ComparisonRow, ...]
    """How it was carried out."""
    findings: tuple[PairwiseTestResult, ...]
    silences: tuple[IncomparablePair, ...]
    notes: tuple[str, ...]
    """What a reader should know before the figures."""


def compare_subjects(
    layout: ProjectLayout, gate: Gate, subjects: Sequence[ComparisonSubject], names: ComparisonIndex
) -> RunComparison:
    """Read everything about these subjects.

    Raises:
        DamagedFileError: a file of a run or of the evaluation is not as it was written.
    """
    examinations = EvaluationIndex(layout, names)
    points = max(LEAST_POINTS, min(MOST_POINTS, POINTS // max(1, len(subjects))))
    sides = tuple(read_side(layout, one, names, examinations, points) for one in subjects)
    scored = [
        SubjectScores(one.name, one.examined, [read_validation_scores(account) for account in one.accounts])
        for one in sides
    ]
    findings, silences = compare_pairs(scored, gate)
    return RunComparison(
        sides,
        comparison_rows([[account.settings for account in one.accounts] for one in sides]),
        comparison_rows([[account.manner for account in one.accounts] for one in sides]),
        tuple(findings),
        tuple(silences),
        tuple(_collect_notes(sides)),
    )


def read_side(
    layout: ProjectLayout,
    subject: ComparisonSubject,
    names: ComparisonIndex,
    examinations: EvaluationIndex,
    points: int,
) -> ComparisonSide:
    """Everything about one subject. Raises as `compare_subjects`."""
    found = tuple(run_history.read_run_summary(RunPaths(layout.runs / run_id)) for run_id in subject.run_ids)
    steps = [one.course.steps.line(points) for one in found]
    return ComparisonSide(
        subject,
        found,
        _mean_curve(steps, STEP_VALUES, points),
        _mean_curve([one.course.validations.line(points) for one in found], VALIDATION_VALUES, points),
        tuple(steps),
        tuple(one for run_id in subject.run_ids for one in examinations.of(run_id)),
        tuple(trial for run_id in subject.run_ids for trial in names.trials_of(run_id)),
        tuple(standing for run_id in subject.run_ids for standing in _describe_standing(layout, run_id, names)),
    )


def _mean_curve(lines: Sequence[HistoryCurve], names: Sequence[str], points: int) -> HistoryCurve:
    there = [line for line in lines if len(line)]
    if not there:
        return run_history.empty_curve(names)
    return there[0] if len(there) == 1 else run_history.average_curves(there, min(points, max(map(len, there))))


def comparison_rows(found: Sequence[Sequence[Mapping[str, Any]]]) -> tuple[ComparisonRow, ...]:
    """A row for each key: for each side what its trainings have, several values where these differ."""
    keys = dict.fromkeys(key for group in found for one in group for key in one)
    return tuple(
        ComparisonRow(key, tuple(_format_values(one.get(key) for one in group) for group in found)) for key in keys
    )


def _format_values(values: Iterable[Any]) -> str:
    return ", ".join(dict.fromkeys(map(format_setting, values)))


def format_setting(value: Any) -> str:
    """A setting for people."""
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, list | tuple):
        return " ".join(map(format_setting, value)) or "none"
    return str(value)


def _describe_standing(layout: ProjectLayout, run_id: str, names: ComparisonIndex) -> list[str]:
    """Champion, versions, and what the gate said of a run."""
    file = read_champion(layout.champion)
    found = []
    for number in names.versions_of(run_id):
        is_champion = file.champion is not None and file.champion.version == number
        is_anchor = file.anchor is not None and file.anchor.version == number
        titles = [title for title, holds in (("champion", is_champion), ("anchor", is_anchor)) if holds]
        found.append(f"version {number:,}" + (f" ({', '.join(titles)})" if titles else ", promoted before"))
    decisions = [
        one.decision for one in test_set_reuse.read_looks(layout.lookups) if one.run_id == run_id and one.decision
    ]
    return found + [f"gate: {decision}" for decision in dict.fromkeys(decisions)]


def _collect_notes(sides: Sequence[ComparisonSide]) -> Iterable[str]:
    known = [account for one in sides for account in one.accounts if account.spec is not None]
    for what, digests in (
        ("data", {account.settings["data"] for account in known}),
        ("base models", {account.settings["base"] for account in known}),
    ):
        if len(digests) > 1:
            yield (
                f"These are trainings on different {what} ({', '.join(sorted(digests))}): losses and scores of one "
                "say nothing about the other, and no difference between them is tested."
            )
    for one in sides:
        others = sorted(
            {row.name for row in comparison_rows([[account.settings] for account in one.accounts]) if row.differs}
            - {SEED}
        )
        if others:
            yield f"{one.name}: its trainings differ in more than their seed: {', '.join(others)}."
        for account in one.accounts:
            if not account.is_here:
                yield f"{one.name}: the directory of run {account.run_id} is not on this machine: no curves of it."
            elif account.report is None:
                yield f"{one.name}: run {account.run_id} is {account.state}, at step {account.course.step:,}."
            if account.course.damaged:
                yield f"{one.name}: {account.course.damaged:,} damaged lines of its journal are left out."
