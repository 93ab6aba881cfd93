"""`ratchet monitor`: compares the answers that a server logs with the evaluation of the deployed version. No torch.

The state is replaced atomically, with the position in each log and the state of each test. The tests depend only on the
order of the requests, so a killed command continues as if it had not been interrupted.
"""

import base64
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path

import numpy as np

from ratchet.config.monitor import Monitor
from ratchet.config.units import utc_timestamp
from ratchet.data import request_log
from ratchet.data.prompt_profile import NgramCounts, PromptProfile, count_ngrams
from ratchet.data.request_log import LoggedRequest
from ratchet.errors import ChampionError, DataError, RatchetError, SettingsError, first_line
from ratchet.evaluation.refusals import is_refusal
from ratchet.quality_gate import evidence
from ratchet.quality_gate.change_detection import ChangeDetector, Direction
from ratchet.registry import ledger
from ratchet.registry.deployment import release as releases
from ratchet.registry.deployment.release import DeploymentDirectory, Release
from ratchet.stages.project import Project
from ratchet.storage import actors, digests, files
from ratchet.storage.files import FileLock
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import EvaluatedRow, EvaluationReport, ModelRole
from ratchet.storage.records.gate import read_champion
from ratchet.storage.records.monitor import (
    MonitorAlarm,
    MonitorReference,
    MonitorReport,
    MonitorReset,
    MonitorState,
    MonitorTestName,
    MonitorTestReport,
    MonitorTestState,
    ReferenceSample,
)

TRACES = "mlflow:"
"""Beginning of the name of a log that is an experiment of MLflow."""
ACTOR_MARK = "ratchet monitor: "
"""Beginning of the reason of an automatic rollback in the ledger."""
TESTS: Mapping[MonitorTestName, Direction] = {
    "inputs": "both", "prompt length": "both", "answer length": "both", "refusals": "higher", "scores": "lower",
}  # fmt: skip
"""Every test, and which change it looks for."""
ANSWER_TESTS: frozenset[MonitorTestName] = frozenset({"answer length", "refusals", "scores"})
"""Tests of what the model does. Only these roll back: another version would get the same inputs."""
LAST_PLACES: Mapping[MonitorTestName, int] = {
    "inputs": 500, "prompt length": 400, "answer length": 400, "refusals": 1, "scores": 1000,
}  # fmt: skip
"""Largest place of each test. Inputs and scores are shares of it."""
LENGTH_STEP = 1.05
"""Lengths are rounded to powers of this: 400 places reach 300 million characters."""
PROFILE_ROWS = 256
"""Maximum number of test prompts with which inputs are compared; at most half of them. The other rows show how similar
prompts of the same kind are."""
MIN_REFERENCE_ROWS = 20
START_SHARE = 0.01
"""Probability of a false alarm that all tests together may spend on changes since the first request. The case that a
deployment differs from its evaluation from the start on is the most likely one."""
LEARNED_REQUESTS = 500
"""Number of values that become the reference after `--accept`."""
SAVE_EVERY = 5000
"""Number of lines after which the state is saved."""
MAX_LISTED_PROBLEMS = 5
EXACT_METRICS = ("accuracy", "exact_match")
"""Metrics that a logged reference answer suffices for."""


@dataclass(frozen=True)
class MonitorOptions:
    """The version to monitor: at most one of both; the champion if none is set."""

    version: int | None = None
    release: Path | None = None
    """A deployment directory."""


@dataclass(frozen=True)
class MonitorTarget:
    """The monitored version."""

    version: int
    model_digest: str
    since_s: float | None
    """Unix time of its last promotion, or of its deployment with `release`; None: unknown."""


def monitor(
    project: Project, logs: Sequence[str | Path], options: MonitorOptions = MonitorOptions(),
    smoke_test: Callable[[Path], None] | None = None,
) -> MonitorReport:  # fmt: skip
    """Read the new lines of logs, update the tests, and act on alarms. Repeating the call counts no line twice.

    Args:
        project: the project; section monitor of its settings is read.
        logs: files, folders, or `mlflow:EXPERIMENT`, in the order in which they are read.
        options: the version.
        smoke_test: see `promote.rollback`.

    Raises:
        ChampionError: the version was never promoted, or there is no champion yet.
        DataError: a log is missing, has no request, or was changed; or the evaluation of the version is not here.
        SettingsError: monitor.score_metric is no metric of the evaluation, or has changed.
        DamagedFileError: evaluation or state were changed.
        LockHeldError: another process monitors this version.
        TrackingError: MLflow cannot be read.
    """
    with _open_session(project, options) as session:
        for log in logs:
            if str(log).startswith(TRACES):
                session.read_traces(str(log).removeprefix(TRACES))
        paths = [Path(log) for log in logs if not str(log).startswith(TRACES)]
        session.read_files(request_log.list_log_files(session.skip_renamed(paths)))
        session.act(smoke_test)
        return session.build_report()


def reset_alarms(
    project: Project, reason: str, options: MonitorOptions = MonitorOptions(), is_accepted: bool = False
) -> MonitorReport:
    """Acknowledge all alarms.

    Args:
        project: the project.
        reason: the reason, which the state keeps.
        options: the version.
        is_accepted: what the requests have become is normal: the next LEARNED_REQUESTS values of these tests are their
            new reference. Otherwise the tests compare with the evaluation again.

    Raises:
        SettingsError: the reason is empty, or there is no alarm.
        ChampionError, DataError, DamagedFileError, LockHeldError: see `monitor`.
    """
    cleaned = ledger.normalize_reason(reason) or ""
    with _open_session(project, options) as session:
        session.reset(cleaned, is_accepted)
        return session.build_report()


def _find_target(layout: ProjectLayout, options: MonitorOptions) -> MonitorTarget:
    if options.version is not None and options.release is not None:
        raise SettingsError("--version and --release both name a version; leave out one of them")
    entries, file = ledger.read_entries(layout.promotions), read_champion(layout.champion)
    known = {c.version: c.model_digest for c in (*file.previous, *([file.champion] if file.champion else []))}
    known |= {entry.version: entry.model_digest for entry in entries}
    if options.release is not None:
        folder = options.release / "current"
        if not (folder / releases.RECORD).is_file():
            raise SettingsError(
                f"--release {options.release}: no release here; expected a directory of `ratchet deploy`"
            )
        release = Release.load(folder / releases.RECORD)
        version, digest = release.version, release.model_digest
        history = DeploymentDirectory(options.release).read_history()
        times = [entry.time for entry in history if entry.release == release.name]
        return MonitorTarget(version, digest, _parse_last(times))
    if options.version is not None:
        if options.version not in known:
            listed = ", ".join(map(str, sorted(known))) or "none"
            raise ChampionError(f"version {options.version} was never promoted; known: {listed}")
        version, digest = options.version, known[options.version]
    elif file.champion is None:
        raise ChampionError(f"{layout.champion}: there is no champion yet; `ratchet promote` makes one")
    else:
        version, digest = file.champion.version, file.champion.model_digest
    times = [entry.time for entry in entries if entry.version == version and entry.model_digest == digest]
    return MonitorTarget(version, digest, _parse_last(times))


def _parse_last(times: Sequence[str]) -> float | None:
    return datetime.fromisoformat(times[-1]).timestamp() if times else None


def _open_session(project: Project, options: MonitorOptions) -> "MonitorSession":
    target = _find_target(project.layout, options)
    folder = project.layout.monitor / str(target.version)
    lock = FileLock(folder / ".lock", f"monitoring of version {target.version}").acquire()
    try:
        files.remove_partials(folder)
        reference = _load_reference(project, target, folder / "reference.json")
        path = folder / "state.json"
        state = MonitorState.load(path) if path.exists() else None
        if state is None:
            state = MonitorState(version=target.version, model_digest=target.model_digest)
        return MonitorSession(project, target, reference, state, path, lock)
    except BaseException:
        lock.release()
        raise


# The reference: figures of the evaluation.


def _load_reference(project: Project, target: MonitorTarget, path: Path) -> MonitorReference:
    """Load the reference of a version; at the first call, create it from the evaluation."""
    wanted = project.settings.monitor.score_metric
    if path.exists():
        reference = MonitorReference.load(path)
        if reference.model_digest != target.model_digest:
            raise DataError(
                f"{path}: is about model {reference.model_digest[: digests.SHORT]}, but version {target.version} is "
                f"{target.model_digest[: digests.SHORT]}; remove {path.parent} to begin again"
            )
        if wanted is not None and wanted != reference.score_metric:
            raise SettingsError(
                f"monitor.score_metric: found {wanted!r}, but the monitoring of version {target.version} began with "
                f"{reference.score_metric or 'no metric'}; change it back, or remove {path.parent} to begin again"
            )
        return reference
    reference = _build_reference(project.layout, target, wanted).sealed()
    reference.save(path)
    return reference


def _build_reference(layout: ProjectLayout, target: MonitorTarget, wanted: str | None) -> MonitorReference:
    if not layout.eval_report.exists():
        raise DataError(
            f"{layout.eval_report}: not found; the evaluation of version {target.version} must be on this machine: "
            "copy experiments/evaluate from where it was made, or run `dvc repro evaluate`"
        )
    report = EvaluationReport.load(layout.eval_report)
    manifest = files.verify_sealed(layout.evaluate, "evaluation")
    role = _find_role(layout, report, target)
    # Rows of one group are not independent, so the first one represents its group.
    groups = {row.group or f"\0{row.id}": row for row in reversed(evidence.read_rows(layout))}
    # Rows in the order of the sources may be sorted by topic; inputs are compared with a random part of them.
    rows = sorted(groups.values(), key=lambda row: _hash_id(row.id))
    if len(rows) < MIN_REFERENCE_ROWS:
        raise DataError(
            f"{layout.evaluate}: has {len(rows)} independent test rows; expected at least {MIN_REFERENCE_ROWS} to "
            "compare with"
        )
    profile = [count_ngrams(row.prompt) for row in rows[: min(PROFILE_ROWS, len(rows) // 2)]]
    similarity = PromptProfile(profile).measure_similarity
    compared = [similarity(row.prompt) for row in rows[len(profile) :]]
    samples = {"inputs": compared, "prompt length": [float(len(row.prompt)) for row in rows]}
    answers = {key: text.strip() for key, text in evidence.read_answers(layout, role).items()}
    answered = [row for row in rows if row.id in answers]
    if len(answered) >= MIN_REFERENCE_ROWS:
        samples["answer length"] = [float(len(answers[row.id])) for row in answered]
        samples["refusals"] = [float(is_refusal(answers[row.id])) for row in answered]
    metric, largest, is_lower_better = _choose_metric(report, role, wanted)
    if metric is not None:
        scores = _read_scores(layout, report, role, metric, rows, answers)
        if len(scores) >= MIN_REFERENCE_ROWS:
            samples["scores"] = scores
    return MonitorReference(
        version=target.version, model_digest=target.model_digest, role=role, evaluation=manifest.digest,
        score_metric=metric if "scores" in samples else None, largest_score=largest, is_lower_better=is_lower_better,
        profile=tuple(map(_encode_counts, profile)),
        samples={name: _summarize(name, values, largest) for name, values in samples.items()},  # type: ignore[arg-type]
    )  # fmt: skip


def _find_role(layout: ProjectLayout, report: EvaluationReport, target: MonitorTarget) -> ModelRole:
    """Return the role of the version in the evaluation. Raises DataError if the evaluation is about other models."""
    roles: dict[ModelRole, str | None] = {
        "merged": report.model_digest, "candidate": report.model_digest, "champion": report.champion_digest,
        "anchor": report.anchor_digest,
    }  # fmt: skip
    for role, digest in roles.items():
        if digest == target.model_digest and role in report.scores:
            return role
    raise DataError(
        f"{layout.eval_report}: is about model {(report.model_digest or 'none')[: digests.SHORT]}, not about version "
        f"{target.version} (model {target.model_digest[: digests.SHORT]}); copy the evaluation of that version here, "
        "or evaluate with it as champion: `dvc repro evaluate`"
    )


def _choose_metric(report: EvaluationReport, role: ModelRole, wanted: str | None) -> tuple[str | None, float, bool]:
    """Return the metric of the scores, its largest value, and whether lower is better."""
    metrics = report.scores[role].metrics
    usable = {
        name: evidence.LARGEST_SCORES[metric.unit]
        for name, metric in metrics.items()
        if metric.kind == "mean" and metric.better != "unknown" and metric.unit in evidence.LARGEST_SCORES
    }
    if wanted is None:
        found = next((name for name in EXACT_METRICS if name in usable), None)
        return found, 1.0, False
    if wanted not in usable:
        raise SettingsError(
            f"monitor.score_metric: found {wanted!r}; expected a metric of the evaluation with scores from 0 to 1 or 0 "
            f"to 100: {', '.join(sorted(usable)) or 'there is none'}"
        )
    return wanted, usable[wanted], metrics[wanted].better == "lower"


def _read_scores(
    layout: ProjectLayout, report: EvaluationReport, role: ModelRole, metric: str, rows: Sequence[EvaluatedRow],
    answers: Mapping[str, str],
) -> list[float]:  # fmt: skip
    """Return a score for each row that has one, of its first answer if possible."""
    if metric in EXACT_METRICS:
        return [float(answers[row.id] == row.expected.strip()) for row in rows if row.id in answers]
    if (file := report.scores[role].samples.get(metric)) is None:
        return []
    found, _ = evidence.read_samples(layout.evaluate / file)
    return [found[row.id].value for row in rows if row.id in found]


def _encode_counts(counts: NgramCounts) -> str:
    return base64.b64encode(counts.astype("<u2").tobytes()).decode()


def _decode_counts(text: str) -> NgramCounts:
    return np.frombuffer(base64.b64decode(text), "<u2").astype(np.uint16).reshape(-1, 2)


def find_place(test: MonitorTestName, value: float, largest_score: float = 1.0) -> int:
    """Round a value of a test to an integer from 0 to its entry in LAST_PLACES."""
    last = LAST_PLACES[test]
    if test in ("prompt length", "answer length"):
        return min(last, int(math.log1p(value) / math.log(LENGTH_STEP)))
    return round(min(1.0, max(0.0, value / (largest_score if test == "scores" else 1.0))) * last)


def _summarize(test: MonitorTestName, values: Sequence[float], largest_score: float) -> ReferenceSample:
    places = [find_place(test, value, largest_score) for value in values]
    counts = {place: places.count(place) for place in sorted(set(places))}
    return ReferenceSample(places=counts, mean=math.fsum(values) / len(values), rows=len(values))


# The session: reads logs and updates the tests.


@dataclass
class _Test:
    """A test with its detector."""

    detector: ChangeDetector
    threshold: float
    total: float = 0.0
    learning: int = 0
    resets: int = 0
    alarm: MonitorAlarm | None = None
    accepted: int = 0
    accepted_total: float = 0.0


@dataclass
class MonitorSession:
    """The monitoring of a version by this process, which holds its lock."""

    project: Project
    target: MonitorTarget
    reference: MonitorReference
    state: MonitorState
    path: Path
    lock: FileLock
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """First lines of this call that are no request."""

    def __post_init__(self) -> None:
        self._tests = {name: self._restore(name) for name in TESTS if name in self.reference.samples}
        self._request_ids, self._scored_ids = map(_unpack_ids, (self.state.request_ids, self.state.scored_ids))
        self._counts = {
            name: getattr(self.state, name) for name in ("requests", "duplicates", "earlier", "unusable")
        }  # fmt: skip
        self._files, self._traces_until_ms = list(self.state.files), dict(self.state.traces_until_ms)
        self._requests_before, self._resets = self.state.requests, self.state.resets
        self._unsaved = self._recognised = 0

    def __enter__(self) -> "MonitorSession":
        return self

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    @property
    def _settings(self) -> Monitor:
        return self.project.settings.monitor

    @cached_property
    def _profile(self) -> PromptProfile:
        return PromptProfile([_decode_counts(text) for text in self.reference.profile])

    def _direction(self, name: MonitorTestName) -> Direction:
        return "higher" if name == "scores" and self.reference.is_lower_better else TESTS[name]

    def _start(self, name: MonitorTestName, learning: int = 0, resets: int = 0) -> _Test:
        """Begin a test. Each test has an equal share of the rate of false alarms."""
        threshold = float(len(TESTS) * self._settings.requests_per_false_alarm)
        places = {} if learning else self.reference.samples[name].places
        values = [place for place, count in places.items() for _ in range(count)]
        detector = ChangeDetector.start(
            self._direction(name), values, LAST_PLACES[name] + 1, START_SHARE * threshold / len(TESTS)
        )
        return _Test(detector, threshold, learning=learning, resets=resets)

    def _restore(self, name: MonitorTestName) -> _Test:
        test, stored = self._start(name), self.state.tests.get(name)
        if stored is None:
            return test
        detector = test.detector
        detector.counts[:] = 0
        detector.counts[list(stored.places)] = list(stored.places.values())
        detector.evidence, detector.growth = np.array(stored.evidence), np.array(stored.growth)
        detector.starts, detector.start_times = np.array(stored.starts, np.int64), np.array(stored.start_times)
        detector.sums, detector.observed = np.array(stored.sums), stored.observed
        return _Test(
            detector, stored.threshold, stored.total, stored.learning, stored.resets, stored.alarm, stored.accepted,
            stored.accepted_total,
        )  # fmt: skip

    def _reference_mean(self, name: MonitorTestName) -> float:
        test = self._tests[name]
        return test.accepted_total / test.accepted if test.accepted else self.reference.samples[name].mean

    # Reading.

    def skip_renamed(self, paths: Sequence[Path]) -> list[Path]:
        """Leave out logs that were read and are missing now: a server renames its log before it begins the next."""
        found = []
        for path in paths:
            names = (str(path), f"{path}.")
            is_known = any(entry.name == names[0] or entry.name.startswith(names[1]) for entry in self._files)
            if is_known and not path.exists():
                self.notes.append(f"{path}: not found now; it was read before")
            else:
                found.append(path)
        return found

    def read_files(self, paths: Sequence[Path]) -> None:
        """Count the new lines of log files. Raises DataError if a file was changed, or no line is a request."""
        # Files that were renamed are recognised before any is read, whatever their order.
        renamed = request_log.find_renamed(paths, self._files)
        places = [request_log.find_progress(path, self._files, renamed) for path in paths]
        done: set[int] = set()
        for path, known_place in zip(paths, places, strict=True):
            place = known_place
            if place is None:
                # A copy of a log that this call has read.
                place = request_log.find_progress(path, self._files, renamed)
            if place in done:
                self.notes.append(f"{path}: begins as another log, which was read; skipped")
                continue
            if place is None:
                lines = max((entry.lines for entry in self._files if entry.name == str(path)), default=0)
                if lines:
                    self.notes.append(
                        f"{path}: begins again; {lines:,} lines of the file before were read. If that file was renamed "
                        "and got more lines, name both files, or their folder"
                    )
                place = len(self._files)
                self._files.append(request_log.begin_file(path))
            done.add(place)
            self._read_file(path, place)
        if self.problems and not self._recognised and not self.state.requests:
            raise DataError(f"no request in {self._counts['unusable']:,} lines; {self.problems[0]}")
        self.save()

    def _read_file(self, path: Path, place: int) -> None:
        progress = self._files[place]
        with path.open("rb") as stream:
            if not request_log.is_continued(stream, progress):
                self.notes.append(f"{path}: was renamed during this call; the next call reads it")
                return
            for line in request_log.read_lines(stream, path, progress):
                progress = line.progress
                if line.request is None:
                    self._add_problem(line.where, line.problem)
                else:
                    self.count(line.request, line.where)
                self._unsaved += 1
                if self._unsaved >= SAVE_EVERY and self._recognised:
                    self._files[place] = request_log.complete_progress(stream, path, progress)
                    self.save()
            self._files[place] = request_log.complete_progress(stream, path, progress)

    def _add_problem(self, where: str, problem: str) -> None:
        self._counts["unusable"] += 1
        if len(self.problems) < MAX_LISTED_PROBLEMS:
            self.problems.append(f"{where}: {problem}")

    def read_traces(self, experiment: str) -> None:
        """Count the new traces of an experiment of MLflow."""
        from ratchet.config.mlflow_environment import resolve_addresses
        from ratchet.tracking.mlflow.experiments import MlflowStore
        from ratchet.tracking.mlflow.traces import read_requests

        layout = self.project.layout
        addresses = resolve_addresses(self.project.settings, layout.mlflow_database)
        store = MlflowStore(layout, addresses.tracking)
        metric, now_ms = self.reference.score_metric, time.time_ns() // 10**6
        for trace in read_requests(store, experiment, metric, self._traces_until_ms.get(experiment, 0)):
            # A trace from a computer whose clock is ahead must not hide those that follow.
            until_ms = max(self._traces_until_ms.get(experiment, 0), min(trace.time_ms, now_ms))
            self._traces_until_ms[experiment] = until_ms
            request, key = trace.request, _hash_id(trace.id)
            is_labelled = request is not None and not request.is_unlabelled
            state = _hash_id(f"{trace.id} {request.score} {request.reference}") if request and is_labelled else key
            if state in self._request_ids:
                continue
            if request is None:
                self._add_problem(f"trace {trace.id}", trace.problem)
            else:
                self.count(request, f"trace {trace.id}")
            self._request_ids |= {key, state}
        self.save()

    # Counting.

    def count(self, request: LoggedRequest, where: str) -> None:
        """Add a request, or the score of an earlier request, to the tests. `where` is its place in the logs."""
        metric, largest = self.reference.score_metric, self.reference.largest_score
        if metric is not None and request.score is not None and not 0 <= request.score <= largest:
            self._add_problem(where, f"score: outside 0 to {largest:g}, the unit of {metric}")
            return
        self._recognised += 1
        key = None if request.id is None else _hash_id(request.id)
        # Later lines with a score have neither time nor version, so the ids of requests that are left out are kept.
        left_out = None if request.id is None else _hash_id(f"left out {request.id}")
        is_earlier = request.time_s is not None and request.time_s < (self.target.since_s or 0.0)
        if is_earlier or (request.version is not None and request.version != self.target.version):
            self._counts["earlier"] += key not in self._request_ids
            if left_out is not None:
                self._request_ids.add(left_out)
            return
        time_s = request.time_s or 0.0
        has_text = request.prompt is not None or request.answer is not None
        if not has_text and key not in self._request_ids and left_out in self._request_ids:
            return
        if has_text and (key is None or key not in self._request_ids):
            self._counts["requests"] += 1
            if key is not None:
                self._request_ids.add(key)
            if request.prompt is not None:
                if "inputs" in self._tests:
                    self._observe("inputs", self._profile.measure_similarity(request.prompt), time_s)
                self._observe("prompt length", float(len(request.prompt)), time_s)
            if request.answer is not None:
                answer = request.answer.strip()
                self._observe("answer length", float(len(answer)), time_s)
                self._observe("refusals", float(is_refusal(answer)), time_s)
        elif has_text and request.is_unlabelled:
            self._counts["duplicates"] += 1
        score = self._score(request)
        if score is not None and (key is None or key not in self._scored_ids):
            if key is not None:
                self._scored_ids.add(key)
            self._observe("scores", score, time_s)

    def _score(self, request: LoggedRequest) -> float | None:
        """Return the logged score, or compare the answer with the logged reference."""
        if request.score is not None or request.reference is None or request.answer is None:
            return request.score
        if self.reference.score_metric not in EXACT_METRICS:
            return None
        return float(request.answer.strip() == request.reference.strip())

    def _observe(self, name: MonitorTestName, value: float, time_s: float) -> None:
        test = self._tests.get(name)
        if test is None:
            return
        detector, place = test.detector, find_place(name, value, self.reference.largest_score)
        if test.learning:
            test.learning -= 1
            test.accepted += 1
            test.accepted_total += value
            detector.counts[place] += 1
            return
        key = f"{self.target.model_digest}/{name}/{test.resets}/{detector.observed}"
        tie_break = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest()) / 2**64
        detector.observe(place, value, tie_break, time_s)
        test.total += value
        if test.alarm is None and detector.total_evidence >= test.threshold and self._is_large(name, detector):
            best = int(detector.evidence.argmax())
            test.alarm = MonitorAlarm(
                test=name, number=detector.observed, time=_format_time(time_s), start=detector.change_start,
                start_time=_format_time(float(detector.start_times[best])), value=detector.mean_since_change,
                reference=self._reference_mean(name), evidence=detector.total_evidence,
                is_accepted=test.accepted > 0,
            )  # fmt: skip

    def _is_large(self, name: MonitorTestName, detector: ChangeDetector) -> bool:
        """Return whether a change of the scores is larger than `score_margin`; other tests have no margin."""
        if name != "scores":
            return True
        loss = self._reference_mean(name) - detector.mean_since_change
        loss = -loss if self.reference.is_lower_better else loss
        return loss / self.reference.largest_score >= self._settings.score_margin

    # Saving.

    def save(self) -> None:
        """Replace the state."""
        tests = {
            name: MonitorTestState(
                places={int(place): int(test.detector.counts[place]) for place in np.flatnonzero(test.detector.counts)},
                evidence=tuple(test.detector.evidence.tolist()), growth=tuple(test.detector.growth.tolist()),
                starts=tuple(test.detector.starts.tolist()), start_times=tuple(test.detector.start_times.tolist()),
                sums=tuple(test.detector.sums.tolist()), observed=test.detector.observed,
                threshold=test.threshold, total=test.total, learning=test.learning, resets=test.resets,
                alarm=test.alarm, accepted=test.accepted, accepted_total=test.accepted_total,
            )
            for name, test in self._tests.items()
        }  # fmt: skip
        state = self.state.model_copy(
            update={
                **self._counts, "tests": tests, "files": tuple(self._files), "resets": self._resets,
                "traces_until_ms": dict(self._traces_until_ms), "request_ids": _pack_ids(self._request_ids),
                "scored_ids": _pack_ids(self._scored_ids), "seal": "",
            }
        ).sealed()  # fmt: skip
        self._unsaved = 0
        if state != self.state:
            state.save(self.path)
            self.state = state

    # Alarms.

    def act(self, smoke_test: Callable[[Path], None] | None) -> None:
        """Send new alarms to the webhook, and roll back if the settings say so. What fails is tried again by the next
        call."""
        from ratchet.tracking.webhook import Webhook

        webhook = Webhook.from_environment(self.project.settings.machine, self.project.layout.name)
        for name, test in self._tests.items():
            if test.alarm is None:
                continue
            if self._settings.on_alarm == "rollback" and name in ANSWER_TESTS and test.alarm.action is None:
                action = self._roll_back(test.alarm, smoke_test)
                test.alarm = test.alarm.model_copy(update={"action": action})
                self.save()
            if webhook is not None and not test.alarm.is_notified:
                alarm, model = test.alarm, self.project.settings.promote.model_name
                suffix = f"; {alarm.action}" if alarm.action else ""
                text = f"version {self.target.version} of {model}: {alarm.describe()}{suffix}"
                is_notified = webhook.send(
                    "alarm", text, test=name, version=self.target.version, value=alarm.value,
                    reference=alarm.reference, start=alarm.start, action=alarm.action,
                )  # fmt: skip
                test.alarm = alarm.model_copy(update={"is_notified": is_notified})
                self.save()

    def _roll_back(self, alarm: MonitorAlarm, smoke_test: Callable[[Path], None] | None) -> str | None:
        """Roll back the champion because of an alarm; return what was done, or None to try again later."""
        layout, version = self.project.layout, self.target.version
        reason = f"{ACTOR_MARK}{alarm.describe()}"
        entries, file = ledger.read_entries(layout.promotions), read_champion(layout.champion)
        if file.champion is None or file.champion.version != version:
            done = next((e for e in reversed(entries) if e.previous_version == version and e.reason == reason), None)
            if done is not None:
                return f"rolled back to version {done.version}"
            return f"not rolled back: version {version} is not champion now"
        origin = next((entry for entry in reversed(entries) if entry.version == version), None)
        if origin is not None and origin.action == "rollback" and (origin.reason or "").startswith(ACTOR_MARK):
            return (
                f"not rolled back: version {version} became champion by an automatic rollback; choose a version "
                "yourself: `ratchet rollback VERSION`"
            )
        if not file.previous:
            return "not rolled back: there is no earlier champion"
        from ratchet.stages.promote import PromoteOptions, rollback

        # The version is named, so a rollback that was interrupted is finished and not followed by another one.
        target = file.previous[0].version
        try:
            rollback(self.project, target, PromoteOptions(reason=reason), smoke_test)
        except RatchetError as error:
            self.notes.append(
                f"the rollback because of {alarm.test} failed: {first_line(error)}; the next look tries again"
            )
            return None
        return f"rolled back to version {target}"

    def reset(self, reason: str, is_accepted: bool) -> None:
        """Acknowledge all alarms; see `reset_alarms`."""
        names = tuple(name for name, test in self._tests.items() if test.alarm is not None)
        if not names:
            raise SettingsError(f"--reset: version {self.target.version} has no alarm")
        for name in names:
            learning = LEARNED_REQUESTS if is_accepted else 0
            self._tests[name] = self._start(name, learning, self._tests[name].resets + 1)
        actor = actors.current_actor(self.project.layout.root)
        entry = MonitorReset(time=utc_timestamp(), actor=actor, reason=reason, tests=names, is_accepted=is_accepted)
        self._resets = (*self._resets, entry)
        self.save()

    def build_report(self) -> MonitorReport:
        """Return the state of all tests."""
        notes = [*self.notes, *self.problems]
        if self._counts["unusable"] > len(self.problems) and self.problems:
            notes.append(f"{self._counts['unusable']:,} lines in total are no request")
        rate = self._settings.requests_per_false_alarm
        if any(test.threshold != len(TESTS) * rate for test in self._tests.values()):
            notes.append(
                f"monitor.requests_per_false_alarm is {rate:,} now, but some tests began with another value and keep "
                "it until --reset or --accept after an alarm"
            )
        missing = [name for name in TESTS if name not in self._tests]
        if missing:
            notes.append(f"not tested, because the evaluation has no such values: {', '.join(missing)}")
        return MonitorReport(
            version=self.target.version, model_digest=self.target.model_digest, role=self.reference.role,
            score_metric=self.reference.score_metric, **self._counts,
            new_requests=self._counts["requests"] - self._requests_before,
            requests_per_false_alarm=self._settings.requests_per_false_alarm,
            tests=tuple(self._describe(name, test) for name, test in self._tests.items()), notes=tuple(notes),
        )  # fmt: skip

    def _describe(self, name: MonitorTestName, test: _Test) -> MonitorTestReport:
        observed = test.detector.observed
        value = test.alarm.value if test.alarm else test.total / observed if observed else None
        return MonitorTestReport(
            test=name, observed=observed, value=value, reference=self._reference_mean(name),
            reference_rows=test.accepted or self.reference.samples[name].rows, is_accepted=test.accepted > 0,
            evidence=test.detector.total_evidence, threshold=test.threshold, learning=test.learning, alarm=test.alarm,
        )  # fmt: skip


def _format_time(time_s: float) -> str | None:
    if not time_s:
        return None
    with suppress(OverflowError, OSError, ValueError):  # a time that no calendar has
        return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds")
    return None


def _hash_id(key: str) -> bytes:
    return hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()


def _pack_ids(ids: set[bytes]) -> str:
    return base64.b64encode(b"".join(sorted(ids))).decode()


def _unpack_ids(text: str) -> set[bytes]:
    packed = base64.b64decode(text)
    return {packed[start : start + 8] for start in range(0, len(packed), 8)}
