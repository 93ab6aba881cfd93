"""`ratchet chaos`: proves on this project that faults change nothing: trains a reference, injects faults, compares.

A campaign starts each training, injects faults when they are due, and restarts it as a user would.
"""

import os
import platform
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ratchet.config import params_file
from ratchet.config.machine import Machine
from ratchet.config.settings import Settings
from ratchet.config.train import EarlyStoppingSettings
from ratchet.data import token_files
from ratchet.data.batches import BatchPlan
from ratchet.errors import EXIT_INTERRUPTED, EXIT_OK, DataError, RunFailedError, SettingsError
from ratchet.reports import plots
from ratchet.reports.plots import TimelineLane
from ratchet.runs.directory import RunPaths
from ratchet.runs.fault_injection import injectors, plan
from ratchet.runs.fault_injection.injectors import POLL_S, TrainCommandProcess
from ratchet.runs.fault_injection.outcome import (
    BaselineTiming,
    FaultTrialTimeline,
    TrainingFingerprint,
    TrainingMoment,
    find_differences,
    find_journal,
)
from ratchet.runs.fault_injection.plan import DOWN, ExternalFault, FaultTrial, TrainingShape
from ratchet.stages.project import Project, ignore_progress
from ratchet.storage import files
from ratchet.storage.digests import code_version
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard, Record
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.gate import ChampionFile
from ratchet.tracking.mlflow.experiments import MlflowStore

MOVED = " moved elsewhere"
"""Added to the name of a project that is moved; a space, as in many home directories."""


@dataclass(frozen=True)
class FaultTrialLimits:
    """Limits of a trial."""

    silence_s: float
    """Without a line in the journal; the trial is then ended and has failed."""
    grace_s: float
    """From a request to stop to the end of the worker: `machine.grace_period_s`."""


@dataclass
class FaultTrialRun:
    """A finished trial."""

    seen: FaultTrialTimeline = field(default_factory=FaultTrialTimeline)
    root: Path = Path()
    """Where its project is now."""
    wall_s: float = 0.0


class _FaultTrigger:
    """Waits for a moment of the running worker."""

    def __init__(self, moment: TrainingMoment, started: bool) -> None:
        self._moment, self._started = moment, started
        self._reached_s = time.monotonic() if moment.is_loading else None

    def come(self, seen: FaultTrialTimeline) -> bool:
        """Whether the moment has come, or has passed."""
        moment = self._moment
        at_work = seen.worker_steps > 0 or not self._started
        if at_work and (moment.is_loading or seen.last_step > moment.step):
            return True
        if self._reached_s is None and at_work and seen.last_step == moment.step:
            self._reached_s = time.monotonic()
        return self._reached_s is not None and time.monotonic() >= self._reached_s + moment.delay_s


class _FaultTrialRunner:
    """State of one running trial."""

    def __init__(self, trial: FaultTrial, root: Path, clock: BaselineTiming | None, limits: FaultTrialLimits) -> None:
        self.trial, self.clock, self.limits = trial, clock, limits
        self.layout = ProjectLayout(root)
        self.seen = FaultTrialTimeline()
        self.pending = list(trial.external_faults)
        self.began = time.monotonic()
        self._journal: Path | None = None

    def now(self) -> float:
        return time.monotonic() - self.began

    def read(self) -> bool:
        """Read new events of the journal, if it exists."""
        if self._journal is None:
            try:
                self._journal = find_journal(self.layout)
            except DataError:
                return False
        return self.seen.read(self._journal, self.now())

    def follow(self, command: TrainCommandProcess) -> ExternalFault | None:
        """Inject faults until the command ends. Returns the fault that ended it, if one did."""
        worker: int | None = None
        struck: int | None = None
        dealt: ExternalFault | None = None
        due: _FaultTrigger | None = None
        heard = time.monotonic()
        while command.process.poll() is None:
            if self.read():
                heard = time.monotonic()
            found = command.worker()
            if found != worker:
                worker, due = found, None
                self.seen.worker_ended(self.now())
                if worker is not None:
                    self.seen.worker_started(self.now())
                heard = time.monotonic()
            if time.monotonic() - heard > self.limits.silence_s:
                self.seen.problems.append(f"nothing happened for {self.limits.silence_s:.0f} s; the trial was ended")
                command.kill()
                break
            if worker not in (None, struck) and dealt is None and self.pending:
                due = due if due is not None else self._due()
                if due is not None and due.come(self.seen) and self._deal(self.pending[0], command):
                    blow = self.pending.pop(0)
                    due, struck = None, worker
                    # Whatever else the blow is, nothing more is dealt to this command when it is to end by it.
                    dealt = blow if blow.action not in ("kill worker", "stop worker") else None
            time.sleep(POLL_S)
        self.read()
        self.seen.worker_ended(self.now())
        return dealt

    def _due(self) -> _FaultTrigger | None:
        """When the next blow is to be dealt; None as long as what it waits for has not happened."""
        blow, seen = self.pending[0], self.seen
        if self.clock is None or seen.worker_steps < blow.worker_steps or seen.farthest_step < blow.min_step:
            return None
        started = seen.worker_steps == 0
        step = seen.checkpoint_step if started else seen.last_step
        return _FaultTrigger(self.clock.find_moment(step, started, blow.fraction), started)

    def _deal(self, blow: ExternalFault, command: TrainCommandProcess) -> bool:
        """Whether the blow met something."""
        if blow.action == "kill worker":
            met = command.signal_worker(signal.SIGKILL)
        elif blow.action == "stop worker":
            met = command.signal_worker(signal.SIGSTOP)
        elif blow.action in ("terminate", "terminate twice"):
            command.process.send_signal(signal.SIGTERM)
            if blow.action == "terminate twice":
                command.process.send_signal(signal.SIGTERM)
            met = True
        else:
            met = command.process.poll() is None
        if met:
            self.seen.record_fault(self.now(), blow.action)
        if met and (blow.action == "kill supervisor" or blow.action in DOWN) and not command.kill():
            self.seen.problems.append("the worker outlived its supervisor")
        return met

    def accept(self, blow: ExternalFault | None, exit_code: int) -> bool:
        """Whether to run the command again; records a problem when it did not end as documented."""
        if self.seen.problems or exit_code == EXIT_OK:
            return False
        if blow is None:
            self.seen.problems.append(f"exit code {exit_code}: {self._last_output()}")
            return False
        if blow.action in ("terminate", "terminate twice"):
            self._stopped(exit_code)
        elif blow.action in DOWN:
            self._while_down(blow)
        return not self.seen.problems

    def _stopped(self, exit_code: int) -> None:
        """Check how a command ended that had received SIGTERM."""
        asked = next(at for at, what in reversed(self.seen.marks) if what.startswith("terminate"))
        took = self.seen.attempts[-1][-1] - asked
        self.seen.stops_s.append(took)
        if exit_code != EXIT_INTERRUPTED:
            self.seen.problems.append(f"exit code {exit_code} after SIGTERM: {self._last_output()}")
        elif took > self.limits.grace_s:
            self.seen.problems.append(
                f"{took:.1f} s from SIGTERM to the end of the worker, {self.limits.grace_s} given"
            )
        elif self.seen.worker_steps and self.seen.checkpoint_step < self.seen.last_step:
            text = f"step {self.seen.last_step} was done, step {self.seen.checkpoint_step} sealed after SIGTERM"
            self.seen.problems.append(text)

    def _while_down(self, blow: ExternalFault) -> None:
        if blow.action == "move the project":
            goal = self.layout.root.with_name(self.layout.root.name + MOVED)
            self.layout.root.rename(goal)
            self.layout = ProjectLayout(goal)
        else:
            paths = RunPaths(find_journal(self.layout).parent)
            self.seen.notes.append(injectors.damage_run(blow.action, paths, blow.seed))
        self._journal = find_journal(self.layout)
        self.seen.skip_to_end(self._journal)

    def _last_output(self) -> str:
        lines = (self.layout.root / injectors.OUTPUT).read_text(encoding="utf-8", errors="replace").split("\n")
        return " / ".join(line.strip() for line in lines[-6:] if line.strip())[:500]


def run_trial(trial: FaultTrial, root: Path, clock: BaselineTiming | None, limits: FaultTrialLimits) -> FaultTrialRun:
    """Train the project in `root` to the end under the faults of a trial.

    Args:
        trial: see plan.py.
        root: a project of its own for this trial.
        clock: timing of an undisturbed training; None: inject no faults.
        limits: when to give up.
    """
    conduct, faults = _FaultTrialRunner(trial, root, clock, limits), trial.faults
    while True:
        with TrainCommandProcess(conduct.layout.root, faults) as command:
            blow = conduct.follow(command)
        if not conduct.accept(blow, command.process.returncode):
            break
        faults = () if trial.is_transient else faults
    conduct.seen.missed = len(conduct.pending)
    return FaultTrialRun(conduct.seen, conduct.layout.root, conduct.now())


CHECKPOINT_EVERY_STEPS = 2
STALL_S = 10.0
"""Deadline of a step in trials whose worker does nothing; ten times the longest step if that is more."""

STALL_FIRST_S = 45.0
"""The same for loading and first steps, if five times the reference's start-up is not more."""

TRIES = 3
"""Attempts at a trial whose faults came too late because training was faster than the reference."""

SILENCE_S = 240.0
"""Added to ten times the reference's time: a trial fails when its journal has no new line for so long."""

CROWD_ROWS = 4
"""Smallest micro-batch, in rows, for trials in which memory runs out: one row cannot be split."""

References = dict[tuple[object, ...], TrainingFingerprint]


@dataclass(frozen=True)
class FaultTrialResult:
    """Result of one trial."""

    trial: FaultTrial
    differences: tuple[str, ...]
    """From the undisturbed training; empty: exact."""
    problems: tuple[str, ...]
    """Manual steps that were needed, and broken promises; empty: recovered."""
    seen: FaultTrialTimeline
    wall_s: float
    folder: Path | None
    """Its project, if it was kept."""

    @property
    def exact(self) -> bool:
        """Whether it finished with the same bytes and numbers as the undisturbed training."""
        return not self.differences

    @property
    def recovered(self) -> bool:
        """Whether the trial recovered without help, as documented."""
        return not self.problems


@dataclass
class FaultCampaign:
    """Trials of one project's configuration.

    Args:
        project: stages base and prepare have run; nothing in it is changed.
        settings: short ones, see `plan.TrainingShape`; where and how often checkpoints are written is decided here.
        folder: directory for the projects of the trials, on the disk to test; created if needed.
        say: receives a line about each trial.
        keep: keep the projects of all trials, not only of failed ones.
    """

    project: ProjectLayout
    settings: Settings
    folder: Path
    say: Callable[[str], None]
    keep: bool = False
    clock: BaselineTiming | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """Facts about the machine, from the reference's journal."""
    _references: References = field(default_factory=dict)

    def run(self, plan: Sequence[FaultTrial]) -> list[FaultTrialResult]:
        """Carry out a plan.

        Raises:
            DataError, DamagedFileError: a stage before training has not run.
            RunFailedError: the undisturbed training itself failed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder = self.folder.resolve()
        self._reference(FaultTrial("none", 0))
        return [self._trial(trial) for trial in plan]

    def _trial(self, trial: FaultTrial) -> FaultTrialResult:
        """Run a trial, again if its faults came too late. A failed attempt is the result."""
        result = self._try(trial)
        for _ in range(TRIES - 1):
            if not (result.exact and result.recovered and result.seen.missed):
                break
            if result.folder is not None:
                shutil.rmtree(result.folder)
            result = self._try(trial)
        if trial.external_faults and not result.seen.delivered and result.recovered:
            result = replace(result, problems=(f"in {TRIES} attempts no fault hit the training",))
        return result

    def _try(self, trial: FaultTrial) -> FaultTrialResult:
        expected = self._reference(trial)
        carried = self._carry_out(trial, trial.name)
        seen = carried.seen
        if seen.problems:
            different = ["it did not finish"]
        else:
            found = TrainingFingerprint.from_project(ProjectLayout(carried.root))
            different = find_differences(expected, found)
        seen.problems += _find_violations(trial, seen)
        failed = bool(different or seen.problems)
        kept = carried.root if self.keep or failed else None
        if kept is None:
            shutil.rmtree(carried.root)
            # MLflow stores absolute artifact paths, so a moved project also leaves files at its old path.
            shutil.rmtree(self.folder / trial.name, ignore_errors=True)
        result = FaultTrialResult(trial, tuple(different), tuple(seen.problems), seen, carried.wall_s, kept)
        self.say(_format_result(result))
        return result

    def _reference(self, trial: FaultTrial) -> TrainingFingerprint:
        """Fingerprint of the undisturbed training with the same settings, and with the faults if the trial says so."""
        key = trial.reference
        if key not in self._references:
            undisturbed = FaultTrial("reference", len(self._references), faults=key[0], guards=key[1])
            carried = self._carry_out(undisturbed, undisturbed.name)
            seen = carried.seen
            if seen.problems or seen.kinds["attempt_started"] != 1:
                cause = "; ".join(seen.problems) or f"it took {seen.kinds['attempt_started']} attempts"
                raise RunFailedError(f"the undisturbed training failed, see {carried.root}: {cause}")
            if self.clock is None:
                self.clock, self.facts = BaselineTiming.from_timeline(seen), seen.facts
            self._references[key] = TrainingFingerprint.from_project(ProjectLayout(carried.root))
            under = f" under {key[0][0].kind}" if key[0] else ""
            self.say(f"reference{under}: {seen.farthest_step} steps in {carried.wall_s:.1f} s")
            if not self.keep:
                shutil.rmtree(carried.root)
        return self._references[key]

    def _carry_out(self, trial: FaultTrial, name: str) -> FaultTrialRun:
        settings = self._settings(trial)
        root = self.folder / name
        copy_project(self.project, root, settings, self._database())
        begun_s = self.clock.finished_s if self.clock else 0.0
        silence_s = SILENCE_S + 10 * begun_s + settings.machine.first_stall_timeout_s * trial.can_stall
        return run_trial(trial, root, self.clock, FaultTrialLimits(silence_s, settings.machine.grace_period_s))

    def _database(self) -> Path:
        """An empty MLflow database: created once (6 s), copied for each trial."""
        template = ProjectLayout(self.folder / "template")
        if not template.mlflow_database.exists():
            template.mlruns.mkdir(parents=True)
            with MlflowStore(template).connected():
                pass
        return template.mlflow_database

    def _settings(self, trial: FaultTrial) -> Settings:
        guards = self.settings.train.guards.model_copy(update=dict(trial.guards))
        train = self.settings.train.model_copy(update={"guards": guards})
        return self.settings.model_copy(update={"train": train, "machine": self._machine(trial)})

    def _machine(self, trial: FaultTrial) -> Machine:
        machine = self.settings.machine
        changes: dict[str, Any] = {
            "checkpoint_every": CHECKPOINT_EVERY_STEPS,
            "replica": None,  # else the first one's result would be everybody's
            "keep_checkpoints": max(2, machine.keep_checkpoints),
            "max_restarts": max(
                machine.max_restarts, len(trial.external_faults) + 2
            ),  # blows may follow each other without a step between
            "restart_delay_s": 0.1,
            "preemption_notice": None,
        }
        if trial.can_stall:
            start_s = self.clock.first_step_s if self.clock else 0.0
            changes |= {"stall_timeout_s": STALL_S, "first_stall_timeout_s": max(STALL_FIRST_S, 5 * start_s)}
        if any(fault.kind == "memory" for fault in trial.faults):
            changes["micro_batch_size"] = self._crowd()
        return machine.model_copy(update=changes)

    def _crowd(self) -> int:
        """Rows of a micro-batch that do not fit where the longest row does: twice as long as it, of usual rows."""
        lengths = DatasetCard.load(self.project.dataset_card).lengths.values()
        longest, usual = max(one.greatest for one in lengths), max(1, min(one.median for one in lengths))
        rows = max(CROWD_ROWS, self.settings.machine.micro_batch_size, -(-2 * longest // int(usual)))
        return min(rows, max(CROWD_ROWS, self.settings.train.batch_size))


def run_campaign(
    project: ProjectLayout, settings: Settings, plan: Sequence[FaultTrial], folder: Path, say: Callable[[str], None]
) -> list[FaultTrialResult]:
    """Carry out a plan; see Campaign."""
    return FaultCampaign(project, settings, folder, say).run(plan)


def plan_shape(project: ProjectLayout, settings: Settings, steps: int) -> TrainingShape:
    """The numbers that a plan for this project needs. Raises DataError when stage prepare has not run."""
    card = DatasetCard.load(project.dataset_card)
    longest = max((lengths.greatest for lengths in card.lengths.values()), default=1)
    if settings.train.batching == "packed":
        longest = settings.train.pack_tokens
    return TrainingShape(steps, settings.train.validate_every_steps, longest)


def copy_project(project: ProjectLayout, root: Path, settings: Settings, database: Path) -> ProjectLayout:
    """Copy a project for a trial. Base and data are linked, since nothing writes to them.

    Raises:
        DataError, DamagedFileError: stage base or prepare has not run.
    """
    base = BaseCard.load(project.base_card)
    DatasetCard.load(project.dataset_card)
    if root.exists():
        raise DataError(f"{root}: a trial of this name exists; remove it or choose another folder")
    layout = ProjectLayout(root)
    for folder in ("base", "data"):
        files.link_tree(project.experiments / folder, layout.experiments / folder)
    directory = project.root / Path(base.source).expanduser()
    if base.revision is None and directory.is_dir():  # named as seen from the project
        base.model_copy(update={"source": str(directory.resolve())}).save(layout.base_card)
    layout.params.write_text(params_file.dump(settings), encoding="utf-8")
    (root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    ChampionFile().save(layout.champion)
    layout.mlruns.mkdir()
    shutil.copyfile(database, layout.mlflow_database)
    return layout


def _find_violations(trial: FaultTrial, seen: FaultTrialTimeline) -> list[str]:
    """Events that the journal must or must not contain."""
    texts = []
    if (
        trial.expected_events
        and seen.delivered + len(trial.faults)
        and not any(seen.kinds[kind] for kind in trial.expected_events)
    ):
        texts.append(f"nothing in the journal shows the fault (expected: {' or '.join(trial.expected_events)})")
    if seen.kinds["worker_exited:stalled"] and not trial.can_stall:
        texts.append("false alarm: a working worker was declared stalled")
    return texts


def _format_result(result: FaultTrialResult) -> str:
    seen = result.seen
    what = "exact" if result.exact else f"NOT EXACT: {'; '.join(result.differences)}"
    blows = Counter(name for _, name in seen.marks)
    told = ", ".join([f"{name} x{count}" if count > 1 else name for name, count in blows.items()] + seen.notes)
    problems = f"; PROBLEM: {'; '.join(result.problems)}" if result.problems else ""
    missed = f"; {seen.missed} came too late" if seen.missed else ""
    return f"{result.trial.name}: {what} ({told or 'nothing happened'}; {result.wall_s:.1f} s){missed}{problems}"


VALIDATIONS = 3
"""In one training."""

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "safetensors")


@dataclass(frozen=True)
class ChaosOptions:
    """Which faults to inject, and into what."""

    kills: int = 5
    """Kills with each kind of signal."""
    seed: int = 0
    """Seed of every schedule."""
    faults: tuple[str, ...] | None = None
    """Rows of `plan.ROWS`; None: all."""
    steps: int = 24
    """Optimizer steps of each training."""
    keep: bool = False
    """Whether the projects of all trials are kept."""
    output: Path | None = None
    """Directory for chaos.json and timeline.png; None: experiments/chaos."""


class ChaosReport(Record):
    """Trainings under injected faults, compared with an undisturbed one."""

    seed: int
    rows: tuple[dict[str, Any], ...]
    """A summary for each kind of fault."""
    trials: int
    failures: tuple[str, ...]
    """Differences and problems, each with the name of its trial."""
    failed_trials: int
    output: Path

    @property
    def has_passed(self) -> bool:
        """Whether every trial was exact and recovered without help."""
        return self.failed_trials == 0


def chaos(
    project: Project,
    options: ChaosOptions = ChaosOptions(),
    on_progress: Callable[[str], None] = ignore_progress,
) -> ChaosReport:
    """Train a short reference, then the same under faults, and compare. The project itself is not changed.

    Args:
        project: the project; its stages base and prepare have run.
        options: which faults to inject.
        on_progress: receives a line for each trial.

    Raises:
        SettingsError: an option is out of range.
        DataError, DamagedFileError: an earlier stage has not run.
        RunFailedError: the undisturbed training failed.
    """
    layout, settings = project.layout, project.settings
    numbers = plan.allocate_counts(plan.FAULT_CATEGORIES if options.faults is None else options.faults, options.kills)
    plan.draw_plan(
        options.seed, numbers, plan.TrainingShape(options.steps, options.steps, 1)
    )  # refuses before anything is read
    for card, path in ((BaseCard, layout.base_card), (DatasetCard, layout.dataset_card)):
        card.load(path)
    output = _choose_output(layout, options)
    short = shorten_training(layout, settings, options.steps)
    trials = plan.draw_plan(options.seed, numbers, plan_shape(layout, short, options.steps))
    on_progress(f"seed {options.seed}: {len(trials)} trials of {options.steps} steps, besides undisturbed ones")
    folder = layout.runs / f".chaos-{os.getpid()}"
    trying = FaultCampaign(layout, short, folder, on_progress, options.keep)
    try:
        results = trying.run(trials)
    except BaseException:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # unless it holds something
            output.rmdir()
        raise
    if not options.keep and all(result.folder is None for result in results):
        shutil.rmtree(folder, ignore_errors=True)
    report = _build_report(options, trying, results)
    files.write_json(output / "chaos.json", report)
    plots.draw_timeline([_timeline_lane(result) for result in results], output / "timeline.png")
    failed = [result for result in results if not (result.exact and result.recovered)]
    failures = []
    for result in failed:
        failures += [f"{result.trial.name}: {text}" for text in (*result.differences, *result.problems)]
        failures.append(f"{result.trial.name}: its project is kept in {result.folder}")
    return ChaosReport(
        seed=options.seed,
        rows=tuple(report["rows"]),
        trials=len(results),
        failures=tuple(failures),
        failed_trials=len(failed),
        output=output,
    )


def shorten_training(layout: ProjectLayout, settings: Settings, steps: int) -> Settings:
    """The project's own settings, with so many optimizer steps and some validations in between.

    Raises:
        DataError, DamagedFileError, SettingsError: the data is missing, or these settings cannot train on it.
    """
    files.verify_sealed(layout.data, "data")
    rows = token_files.load_rows(layout.data, "train")
    sequences = BatchPlan(rows.lengths, settings.train).sequences
    changes = {
        "epochs": steps * settings.train.batch_size / sequences,
        "validate_every_steps": max(1, steps // VALIDATIONS),
        "early_stopping": EarlyStoppingSettings(),
    }
    return settings.model_copy(update={"train": settings.train.model_copy(update=changes)})


def _choose_output(layout: ProjectLayout, options: ChaosOptions) -> Path:
    output = options.output or layout.experiments / "chaos"
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"--output: {output} cannot be made ({error.strerror}); name another directory") from None
    return output


def _build_report(options: ChaosOptions, trying: FaultCampaign, results: Sequence[FaultTrialResult]) -> dict[str, Any]:
    clock = trying.clock
    return {
        "format": 1,
        "seed": options.seed,
        "kills": options.kills,
        "steps": options.steps,
        "reference": {"first_step_s": clock.first_step_s, "finished_s": clock.finished_s} if clock else None,
        "machine": trying.facts | {"system": platform.platform(), "cpus": os.cpu_count()},
        "versions": {name: version(name) for name in LIBRARIES}
        | {"ratchet": code_version(), "python": platform.python_version()},
        "rows": summarize_results(results),
        "trials": [_trial_entry(result) for result in results],
    }


def summarize_results(results: Sequence[FaultTrialResult]) -> list[dict[str, Any]]:
    """One line for each kind of fault."""
    lines = []
    for name in dict.fromkeys(result.trial.category for result in results):
        found = [result for result in results if result.trial.category == name]
        recoveries = sorted(s for result in found for s in result.seen.recoveries_s)
        lines.append(
            {
                "row": name,
                "text": plan.FAULT_CATEGORIES[name].description,
                "trials": len(found),
                "faults": sum(result.seen.delivered + len(result.trial.faults) for result in found),
                "exact": sum(result.exact for result in found),
                "recovered": sum(result.recovered for result in found),
                "reference_has_faults": any(result.trial.reference_has_faults for result in found),
                "slowest_recovery_s": recoveries[-1] if recoveries else None,
                "most_lost_steps": max((n for result in found for n in result.seen.lost_steps), default=0),
            }
        )
    return lines


def _trial_entry(result: FaultTrialResult) -> dict[str, Any]:
    trial, seen = result.trial, result.seen
    return {
        "name": trial.name,
        "row": trial.category,
        "exact": result.exact,
        "recovered": result.recovered,
        "differences": list(result.differences),
        "problems": list(result.problems),
        "external_faults": [asdict(blow) for blow in trial.external_faults],
        "faults": [fault.model_dump(mode="json") for fault in trial.faults],
        "guards": dict(trial.guards),
        "reference_has_faults": trial.reference_has_faults,
        "delivered": seen.delivered,
        "missed": seen.missed,
        "damage": seen.notes,
        "recoveries_s": seen.recoveries_s,
        "lost_steps": seen.lost_steps,
        "stops_s": seen.stops_s,
        "events": dict(sorted(seen.kinds.items())),
        "marks": seen.marks,
        "wall_s": result.wall_s,
        "folder": None if result.folder is None else str(result.folder),
    }


def _timeline_lane(result: FaultTrialResult) -> TimelineLane:
    seen = result.seen
    return TimelineLane(
        name=result.trial.name,
        attempts=[(attempt[0], attempt[-1]) for attempt in seen.attempts],
        steps=seen.steps,
        checkpoints=[at for at, _ in seen.checkpoints],
        marks=seen.marks,
        succeeded=result.exact and result.recovered,
    )
