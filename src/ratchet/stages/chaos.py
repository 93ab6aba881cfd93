"""`ratchet chaos`: proves on this project that faults do not change the result of a training.

A campaign trains an undisturbed reference, then runs trials. In each trial it starts a training, injects faults when
they are due, restarts the training as a user would, and compares the result with the reference.
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

LIBRARIES = ("torch", "transformers", "peft", "bitsandbytes", "safetensors")
CHECKPOINT_EVERY_STEPS = 2
VALIDATIONS = 3
"""Number of validations in one training."""
STALL_S = 10.0
"""Timeout of a step in trials with a stalled worker. As in every run, it is at least ten times the longest step."""
STALL_FIRST_S = 45.0
"""Timeout of loading and the first steps in trials with a stalled worker, or five times the start-up time of the
reference if that is longer."""
MAX_ATTEMPTS = 3
"""Maximum number of attempts at a trial whose faults came too late because training was faster than the reference."""
SILENCE_S = 240.0
"""A trial fails if its journal has no new line for a longer time than this plus ten times the reference's duration."""
MIN_CROWDED_ROWS = 4
"""Smallest micro-batch, in rows, for trials in which memory runs out, because a single row cannot be split."""
MOVED_SUFFIX = " moved elsewhere"
"""Text that is added to the name of a moved project. The text contains spaces, as many home directories do."""


@dataclass(frozen=True)
class ChaosOptions:
    """Options of `ratchet chaos`."""

    kills: int = 5
    """Number of kills with each kind of signal."""
    seed: int = 0
    """Seed of every schedule."""
    faults: tuple[str, ...] | None = None
    """Kinds of fault to inject, from `plan.FAULT_CATEGORIES`; None: all."""
    steps: int = 24
    """Number of optimizer steps of each training."""
    keep: bool = False
    """Whether the projects of all trials are kept."""
    output: Path | None = None
    """Directory for chaos.json and timeline.html; None: experiments/chaos."""


class ChaosReport(Record):
    """Trainings under injected faults, compared with an undisturbed training."""

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
    """Train a short reference, train it again under faults, and compare. The project itself does not change.

    Args:
        project: a project whose stages base and prepare have run.
        options: which faults to inject.
        on_progress: receives a line for each trial.

    Raises:
        SettingsError: an option is out of range.
        DataError, DamagedFileError: an earlier stage has not run.
        RunFailedError: the undisturbed training failed.
    """
    layout, settings = project.layout, project.settings
    counts = plan.allocate_counts(plan.FAULT_CATEGORIES if options.faults is None else options.faults, options.kills)
    # Check the options before anything is read.
    plan.draw_plan(options.seed, counts, plan.TrainingShape(options.steps, options.steps, 1))
    BaseCard.load(layout.base_card)
    DatasetCard.load(layout.dataset_card)
    output = options.output or layout.experiments / "chaos"
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"--output: {output} cannot be created ({error.strerror}); name another directory"
        ) from None
    short = shorten_training(layout, settings, options.steps)
    trials = plan.draw_plan(options.seed, counts, plan_shape(layout, short, options.steps))
    on_progress(
        f"seed {options.seed}: {len(trials)} trials of {options.steps} steps, in addition to undisturbed trainings"
    )
    folder = layout.runs / f".chaos-{os.getpid()}"
    campaign = FaultCampaign(layout, short, folder, on_progress, options.keep)
    try:
        results = campaign.run(trials)
    except BaseException:
        if not options.keep:
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # it is not empty
            output.rmdir()
        raise
    if not options.keep and all(result.folder is None for result in results):
        shutil.rmtree(folder, ignore_errors=True)
    rows, clock = summarize_results(results), campaign.clock
    versions = {name: version(name) for name in LIBRARIES}
    report = {
        "format": 1,
        "seed": options.seed,
        "kills": options.kills,
        "steps": options.steps,
        "reference": {"first_step_s": clock.first_step_s, "finished_s": clock.finished_s} if clock else None,
        "machine": campaign.facts | {"system": platform.platform(), "cpus": os.cpu_count()},
        "versions": versions | {"ratchet": code_version(), "python": platform.python_version()},
        "rows": rows,
        "trials": [_build_trial_entry(result) for result in results],
    }
    files.write_json(output / "chaos.json", report)
    plots.draw_timeline([_build_lane(result) for result in results], output / "timeline.html")
    failed = [result for result in results if not (result.exact and result.recovered)]
    failures = []
    for result in failed:
        failures += [f"{result.trial.name}: {text}" for text in (*result.differences, *result.problems)]
        failures.append(f"{result.trial.name}: its project is kept in {result.folder}")
    return ChaosReport(
        seed=options.seed,
        rows=tuple(rows),
        trials=len(results),
        failures=tuple(failures),
        failed_trials=len(failed),
        output=output,
    )


def shorten_training(layout: ProjectLayout, settings: Settings, steps: int) -> Settings:
    """Return the project's settings with this number of optimizer steps and with VALIDATIONS validations.

    Raises:
        DataError, DamagedFileError, SettingsError: the data are missing, or these settings cannot train on them.
    """
    files.verify_sealed(layout.data, "data")
    rows = token_files.load_rows(layout.data, "train", settings.train.objective)
    sequences = BatchPlan(rows.lengths, settings.train).sequences
    changes = {
        "epochs": steps * settings.train.batch_size / sequences,
        "validate_every_steps": max(1, steps // VALIDATIONS),
        "validate_every_epochs": None,
        "early_stopping": EarlyStoppingSettings(),
    }
    return settings.model_copy(update={"train": settings.train.model_copy(update=changes)})


@dataclass
class _FaultTrigger:
    """Decides when a fault is due: at a moment of the training that the running worker reaches."""

    moment: TrainingMoment
    is_starting: bool
    reached_s: float | None = None

    def __post_init__(self) -> None:
        if self.moment.is_loading:
            self.reached_s = time.monotonic()

    def is_due(self, timeline: FaultTrialTimeline) -> bool:
        """Return whether the worker has reached or passed the moment."""
        has_steps = timeline.worker_steps > 0 or not self.is_starting
        if has_steps and (self.moment.is_loading or timeline.last_step > self.moment.step):
            return True
        if self.reached_s is None and has_steps and timeline.last_step == self.moment.step:
            self.reached_s = time.monotonic()
        return self.reached_s is not None and time.monotonic() >= self.reached_s + self.moment.delay_s


class _FaultTrialRunner:
    """Runs the commands of one trial and injects its faults.

    Args:
        trial: see plan.py.
        root: the project of this trial; no other trial uses it.
        clock: timing of an undisturbed training; None: inject no faults.
        silence_s: longest time without a new line in the journal; after it, the trial is stopped and counts as failed.
        grace_s: longest time from a stop request until the worker ends.
    """

    def __init__(
        self, trial: FaultTrial, root: Path, clock: BaselineTiming | None, silence_s: float, grace_s: float
    ) -> None:
        self.trial, self.clock, self.silence_s, self.grace_s = trial, clock, silence_s, grace_s
        self.layout = ProjectLayout(root)
        """The trial's project, which a fault may move."""
        self.timeline = FaultTrialTimeline()
        self.pending = list(trial.external_faults)
        self._began_s = time.monotonic()
        self._journal: Path | None = None

    def run(self) -> None:
        """Train the project to the end under the faults of the trial."""
        faults = self.trial.faults
        while True:
            with TrainCommandProcess(self.layout.root, faults) as command:
                ending_fault = self._inject_faults(command)
            if not self._should_rerun(ending_fault, command.process.returncode):
                break
            faults = () if self.trial.is_transient else faults
        self.timeline.missed = len(self.pending)

    def now_s(self) -> float:
        """Return the seconds since the start of the trial."""
        return time.monotonic() - self._began_s

    def _read(self) -> bool:
        """Read new events of the journal, if it exists."""
        if self._journal is None:
            try:
                self._journal = find_journal(self.layout)
            except DataError:
                return False
        return self.timeline.read(self._journal, self.now_s())

    def _inject_faults(self, command: TrainCommandProcess) -> ExternalFault | None:
        """Inject faults until the command ends. Returns the fault that ends the command, if there was one."""
        worker: int | None = None
        faulted_worker: int | None = None
        ending_fault: ExternalFault | None = None
        trigger: _FaultTrigger | None = None
        last_event_s = time.monotonic()
        while command.process.poll() is None:
            if self._read():
                last_event_s = time.monotonic()
            current_worker = command.worker()
            if current_worker != worker:
                worker, trigger = current_worker, None
                self.timeline.worker_ended(self.now_s())
                if worker is not None:
                    self.timeline.worker_started(self.now_s())
                last_event_s = time.monotonic()
            if time.monotonic() - last_event_s > self.silence_s:
                self.timeline.problems.append(f"nothing happened for {self.silence_s:.0f} s; the trial was stopped")
                command.kill()
                break
            if worker not in (None, faulted_worker) and ending_fault is None and self.pending:
                trigger = trigger if trigger is not None else self._create_trigger()
                if trigger is not None and trigger.is_due(self.timeline) and self._inject(self.pending[0], command):
                    fault = self.pending.pop(0)
                    trigger, faulted_worker = None, worker
                    # A fault that ends the command is the last one for this command.
                    ending_fault = fault if fault.action not in ("kill worker", "stop worker") else None
            time.sleep(POLL_S)
        self._read()
        self.timeline.worker_ended(self.now_s())
        return ending_fault

    def _create_trigger(self) -> _FaultTrigger | None:
        """Create the trigger of the next fault; None until the steps that the fault requires are done."""
        fault, timeline = self.pending[0], self.timeline
        if self.clock is None or timeline.worker_steps < fault.worker_steps or timeline.farthest_step < fault.min_step:
            return None
        is_starting = timeline.worker_steps == 0
        step = timeline.checkpoint_step if is_starting else timeline.last_step
        return _FaultTrigger(self.clock.find_moment(step, is_starting, fault.fraction), is_starting)

    def _inject(self, fault: ExternalFault, command: TrainCommandProcess) -> bool:
        """Inject a fault. Returns whether the fault reached a running process."""
        was_injected = True
        if fault.action in ("kill worker", "stop worker"):
            was_injected = command.signal_worker(signal.SIGKILL if fault.action == "kill worker" else signal.SIGSTOP)
        elif fault.action in ("terminate", "terminate twice"):
            for _ in range(2 if fault.action == "terminate twice" else 1):
                command.process.send_signal(signal.SIGTERM)
        else:
            was_injected = command.process.poll() is None
        if was_injected:
            self.timeline.record_fault(self.now_s(), fault.action)
            if (fault.action == "kill supervisor" or fault.action in DOWN) and not command.kill():
                self.timeline.problems.append("the worker outlived its supervisor")
        return was_injected

    def _should_rerun(self, fault: ExternalFault | None, exit_code: int) -> bool:
        """Return whether to run the command again; record a problem if the command did not end as documented."""
        problems = self.timeline.problems
        if problems or exit_code == EXIT_OK:
            return False
        if fault is None:
            problems.append(f"exit code {exit_code}: {self._last_output()}")
        elif fault.action in ("terminate", "terminate twice"):
            self._check_stop(exit_code)
        elif fault.action in DOWN:
            self._inject_offline(fault)
        return not problems

    def _check_stop(self, exit_code: int) -> None:
        """Check a command that ended after SIGTERM: exit code, duration and checkpoint."""
        timeline = self.timeline
        signal_s = next(at_s for at_s, action in reversed(timeline.marks) if action.startswith("terminate"))
        duration_s = timeline.attempts[-1][-1] - signal_s
        timeline.stops_s.append(duration_s)
        if exit_code != EXIT_INTERRUPTED:
            timeline.problems.append(f"exit code {exit_code} after SIGTERM: {self._last_output()}")
        elif duration_s > self.grace_s:
            timeline.problems.append(
                f"{duration_s:.1f} s from SIGTERM to the end of the worker, {self.grace_s} allowed"
            )
        elif timeline.worker_steps and timeline.checkpoint_step < timeline.last_step:
            timeline.problems.append(
                f"step {timeline.last_step} was done, but the checkpoint after SIGTERM is of step "
                f"{timeline.checkpoint_step}"
            )

    def _inject_offline(self, fault: ExternalFault) -> None:
        """Inject a fault into the files of the project while no process runs."""
        if fault.action == "move the project":
            new_root = self.layout.root.with_name(self.layout.root.name + MOVED_SUFFIX)
            self.layout.root.rename(new_root)
            self.layout = ProjectLayout(new_root)
        else:
            paths = RunPaths(find_journal(self.layout).parent)
            self.timeline.notes.append(injectors.damage_run(fault.action, paths, fault.seed))
        self._journal = find_journal(self.layout)
        self.timeline.skip_to_end(self._journal)

    def _last_output(self) -> str:
        lines = (self.layout.root / injectors.OUTPUT).read_text(encoding="utf-8", errors="replace").split("\n")
        return " / ".join(line.strip() for line in lines[-6:] if line.strip())[:500]


@dataclass(frozen=True)
class FaultTrialResult:
    """Result of one trial."""

    trial: FaultTrial
    differences: tuple[str, ...]
    """Differences from the undisturbed training; empty if the trial is exact."""
    problems: tuple[str, ...]
    """Deviations from documented behaviour, such as a wrong exit code; empty if the trial recovered without help."""
    timeline: FaultTrialTimeline
    wall_s: float
    folder: Path | None
    """The trial's project, if it was kept."""

    @property
    def exact(self) -> bool:
        """Whether the trial finished with the same bytes and numbers as the undisturbed training."""
        return not self.differences

    @property
    def recovered(self) -> bool:
        """Whether the trial recovered without help, as documented."""
        return not self.problems


@dataclass
class FaultCampaign:
    """Runs the trials of a plan, each in a copy of one project.

    Args:
        project: a project whose stages base and prepare have run; the campaign does not change it.
        settings: settings of a short training, see `plan.TrainingShape`; the campaign chooses the checkpoint interval.
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
    _references: dict[tuple[object, ...], TrainingFingerprint] = field(default_factory=dict)

    def run(self, trials: Sequence[FaultTrial]) -> list[FaultTrialResult]:
        """Run the trials of a plan.

        Raises:
            DataError, DamagedFileError: a stage before training has not run.
            RunFailedError: the undisturbed training failed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder = self.folder.resolve()
        self._reference(FaultTrial("none", 0))
        return [self._run_trial(trial) for trial in trials]

    def _run_trial(self, trial: FaultTrial) -> FaultTrialResult:
        """Run a trial; repeat the trial if its faults came too late and nothing failed."""
        result = self._run_attempt(trial)
        for _ in range(MAX_ATTEMPTS - 1):
            if not (result.exact and result.recovered and result.timeline.missed):
                break
            if result.folder is not None:
                shutil.rmtree(result.folder)
            result = self._run_attempt(trial)
        if trial.external_faults and not result.timeline.delivered and result.recovered:
            result = replace(result, problems=(f"in {MAX_ATTEMPTS} attempts no fault hit the training",))
        return result

    def _run_attempt(self, trial: FaultTrial) -> FaultTrialResult:
        expected = self._reference(trial)
        run = self._run_in_copy(trial, trial.name)
        wall_s, timeline, root = run.now_s(), run.timeline, run.layout.root
        differences = ["it did not finish"]
        if not timeline.problems:
            differences = find_differences(expected, TrainingFingerprint.from_project(run.layout))
        # Events that the journal must or must not contain.
        was_hit = timeline.delivered + len(trial.faults) > 0
        if trial.expected_events and was_hit and not any(timeline.kinds[kind] for kind in trial.expected_events):
            kinds = " or ".join(trial.expected_events)
            timeline.problems.append(f"nothing in the journal shows the fault (expected: {kinds})")
        if timeline.kinds["worker_exited:stalled"] and not trial.can_stall:
            timeline.problems.append("false alarm: a working worker was declared stalled")
        kept = root if self.keep or differences or timeline.problems else None
        if kept is None:
            shutil.rmtree(root)
            # MLflow stores absolute artifact paths, so a moved project also leaves files at its old path.
            shutil.rmtree(self.folder / trial.name, ignore_errors=True)
        result = FaultTrialResult(trial, tuple(differences), tuple(timeline.problems), timeline, wall_s, kept)
        self.say(_format_result(result))
        return result

    def _reference(self, trial: FaultTrial) -> TrainingFingerprint:
        """Train the trial's reference, unless an earlier trial has the same one, and return its fingerprint."""
        key = trial.reference
        if key not in self._references:
            undisturbed = FaultTrial("reference", len(self._references), faults=key[0], guards=key[1])
            run = self._run_in_copy(undisturbed, undisturbed.name)
            wall_s, timeline = run.now_s(), run.timeline
            if timeline.problems or timeline.kinds["attempt_started"] != 1:
                cause = "; ".join(timeline.problems) or f"it took {timeline.kinds['attempt_started']} attempts"
                raise RunFailedError(f"the undisturbed training failed, see {run.layout.root}: {cause}")
            if self.clock is None:
                self.clock, self.facts = BaselineTiming.from_timeline(timeline), timeline.facts
            self._references[key] = TrainingFingerprint.from_project(run.layout)
            faults = f" under {key[0][0].kind}" if key[0] else ""
            self.say(f"reference{faults}: {timeline.farthest_step} steps in {wall_s:.1f} s")
            if not self.keep:
                shutil.rmtree(run.layout.root)
        return self._references[key]

    def _run_in_copy(self, trial: FaultTrial, name: str) -> _FaultTrialRunner:
        guards = self.settings.train.guards.model_copy(update=dict(trial.guards))
        train = self.settings.train.model_copy(update={"guards": guards})
        machine = self._machine(trial)
        root = self.folder / name
        copy_project(
            self.project, root, self.settings.model_copy(update={"train": train, "machine": machine}), self._database()
        )
        reference_s = self.clock.finished_s if self.clock else 0.0
        silence_s = SILENCE_S + 10 * reference_s + machine.first_stall_timeout_s * trial.can_stall
        runner = _FaultTrialRunner(trial, root, self.clock, silence_s, machine.grace_period_s)
        runner.run()
        return runner

    def _database(self) -> Path:
        """Create an empty MLflow database once (6 s), because every trial needs a copy. Returns its path."""
        template = ProjectLayout(self.folder / "template")
        if not template.mlflow_database.exists():
            template.mlruns.mkdir(parents=True)
            with MlflowStore(template).connected():
                pass
        return template.mlflow_database

    def _machine(self, trial: FaultTrial) -> Machine:
        machine = self.settings.machine
        changes: dict[str, Any] = {
            "checkpoint_every": CHECKPOINT_EVERY_STEPS,
            "replica": None,  # otherwise every trial would restore the result of the first trial
            "keep_checkpoints": max(2, machine.keep_checkpoints),
            # There may be several faults without a step between them.
            "max_restarts": max(machine.max_restarts, len(trial.external_faults) + 2),
            "restart_delay_s": 0.1,
            "preemption_notice": None,
        }
        if trial.can_stall:
            start_s = self.clock.first_step_s if self.clock else 0.0
            changes |= {"stall_timeout_s": STALL_S, "first_stall_timeout_s": max(STALL_FIRST_S, 5 * start_s)}
        if any(fault.kind == "memory" for fault in trial.faults):
            # So many rows of median length have at least twice the tokens of the longest row, and so exceed a memory
            # budget for that row. The batch size limits the number.
            lengths = DatasetCard.load(self.project.dataset_card).lengths.values()
            longest, median = max(split.greatest for split in lengths), max(1, min(split.median for split in lengths))
            rows = max(MIN_CROWDED_ROWS, machine.micro_batch_size, -(-2 * longest // int(median)))
            changes["micro_batch_size"] = min(rows, max(MIN_CROWDED_ROWS, self.settings.train.batch_size))
        return machine.model_copy(update=changes)


def plan_shape(project: ProjectLayout, settings: Settings, steps: int) -> TrainingShape:
    """Return the properties of a training that a plan depends on. Raises DataError if stage prepare has not run."""
    card = DatasetCard.load(project.dataset_card)
    longest = max((lengths.greatest for lengths in card.lengths.values()), default=1)
    if settings.train.batching == "packed":
        longest = settings.train.pack_tokens
    return TrainingShape(steps, settings.train.validate_every_steps, longest)


def copy_project(project: ProjectLayout, root: Path, settings: Settings, database: Path) -> None:
    """Copy a project for a trial. Base and data are linked, because nothing writes to them.

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
    if base.revision is None and directory.is_dir():  # a path relative to the project
        base.model_copy(update={"source": str(directory.resolve())}).save(layout.base_card)
    layout.params.write_text(params_file.dump(settings), encoding="utf-8")
    (root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    ChampionFile().save(layout.champion)
    layout.mlruns.mkdir()
    shutil.copyfile(database, layout.mlflow_database)


def _format_result(result: FaultTrialResult) -> str:
    timeline = result.timeline
    verdict = "exact" if result.exact else f"NOT EXACT: {'; '.join(result.differences)}"
    counts = Counter(action for _, action in timeline.marks)
    faults = [f"{action} x{count}" if count > 1 else action for action, count in counts.items()] + timeline.notes
    problems = f"; PROBLEM: {'; '.join(result.problems)}" if result.problems else ""
    missed = f"; {timeline.missed} came too late" if timeline.missed else ""
    injected = ", ".join(faults) or "nothing happened"
    return f"{result.trial.name}: {verdict} ({injected}; {result.wall_s:.1f} s){missed}{problems}"


def summarize_results(results: Sequence[FaultTrialResult]) -> list[dict[str, Any]]:
    """Summarize the results, in one row for each kind of fault."""
    rows = []
    for name in dict.fromkeys(result.trial.category for result in results):
        own = [result for result in results if result.trial.category == name]
        rows.append(
            {
                "row": name,
                "text": plan.FAULT_CATEGORIES[name].description,
                "trials": len(own),
                "faults": sum(result.timeline.delivered + len(result.trial.faults) for result in own),
                "exact": sum(result.exact for result in own),
                "recovered": sum(result.recovered for result in own),
                "reference_has_faults": any(result.trial.reference_has_faults for result in own),
                "slowest_recovery_s": max((s for result in own for s in result.timeline.recoveries_s), default=None),
                "most_lost_steps": max((n for result in own for n in result.timeline.lost_steps), default=0),
            }
        )
    return rows


def _build_trial_entry(result: FaultTrialResult) -> dict[str, Any]:
    trial, timeline = result.trial, result.timeline
    return {
        "name": trial.name,
        "row": trial.category,
        "exact": result.exact,
        "recovered": result.recovered,
        "differences": list(result.differences),
        "problems": list(result.problems),
        "external_faults": [asdict(fault) for fault in trial.external_faults],
        "faults": [fault.model_dump(mode="json") for fault in trial.faults],
        "guards": dict(trial.guards),
        "reference_has_faults": trial.reference_has_faults,
        "delivered": timeline.delivered,
        "missed": timeline.missed,
        "damage": timeline.notes,
        "recoveries_s": timeline.recoveries_s,
        "lost_steps": timeline.lost_steps,
        "stops_s": timeline.stops_s,
        "events": dict(sorted(timeline.kinds.items())),
        "marks": timeline.marks,
        "wall_s": result.wall_s,
        "folder": None if result.folder is None else str(result.folder),
    }


def _build_lane(result: FaultTrialResult) -> TimelineLane:
    timeline = result.timeline
    return TimelineLane(
        result.trial.name,
        [(attempt[0], attempt[-1]) for attempt in timeline.attempts],
        timeline.steps,
        [at_s for at_s, _ in timeline.checkpoints],
        timeline.marks,
        result.exact and result.recovered,
    )
