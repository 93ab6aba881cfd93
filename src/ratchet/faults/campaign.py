"""Train a short reference, then the same under every fault of a plan, and compare. One training at a time."""

import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ratchet import files, params
from ratchet.card import DatasetCard
from ratchet.config import Machine, Settings
from ratchet.errors import DataError, RunFailedError
from ratchet.faults.chronicle import Chronicle, Clock
from ratchet.faults.outcome import Outcome, differences
from ratchet.faults.plan import Shape, Trial
from ratchet.faults.trial import Carried, Limits, carry_out
from ratchet.layout import Layout
from ratchet.records import BaseCard
from ratchet.records_gate import ChampionFile
from ratchet.store import Store

CHECKPOINT_EVERY_STEPS = 2
STALL_S = 10.0
"""Deadline of a step in trials whose worker does nothing; ten times the longest step if that is more."""

STALL_FIRST_S = 45.0
"""The same for loading and first steps, if five times the reference's start-up is not more."""

TRIES = 3
"""Of a trial whose blows came too late, because training went faster than the reference."""

SILENCE_S = 240.0
"""Added to ten times the reference's time: a journal without a new line for so long is a failure."""

CROWD_ROWS = 4
"""Of a micro-batch, at least, where memory is to run out: one row cannot be made smaller."""

References = dict[tuple[object, ...], Outcome]


@dataclass(frozen=True)
class TrialResult:
    """What one trial came to."""

    trial: Trial
    differences: tuple[str, ...]
    """From the undisturbed training; empty: exact."""
    problems: tuple[str, ...]
    """What needed a hand, or was not as promised; empty: recovered."""
    seen: Chronicle
    wall_s: float
    folder: Path | None
    """Its project, if it was kept."""

    @property
    def exact(self) -> bool:
        """Finished, and every byte and every number as in the undisturbed training."""
        return not self.differences

    @property
    def recovered(self) -> bool:
        """Without a hand, and as every command's contract says."""
        return not self.problems


@dataclass
class Campaign:
    """Trials of one project's configuration.

    Args:
        project: stages base and prepare have run; nothing in it is changed.
        settings: short ones, see `plan.Shape`; where and how often checkpoints are written is decided here.
        folder: for the projects of the trials, on the disk that is to be tried; made if needed.
        say: told what goes on, a line at a time.
        keep: leave the projects of all trials; otherwise only those of failed ones.
    """

    project: Layout
    settings: Settings
    folder: Path
    say: Callable[[str], None]
    keep: bool = False
    clock: Clock | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    """Of the machine, as the reference's worker told them."""
    _references: References = field(default_factory=dict)

    def run(self, plan: Sequence[Trial]) -> list[TrialResult]:
        """Carry out a plan.

        Raises:
            DataError, DamagedError: a stage before training has not run.
            RunFailedError: the undisturbed training itself failed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder = self.folder.resolve()
        self._reference(Trial("none", 0))
        return [self._trial(trial) for trial in plan]

    def _trial(self, trial: Trial) -> TrialResult:
        """Repeated while all is well but not all blows met; what was not well at any try is the result."""
        result = self._try(trial)
        for _ in range(TRIES - 1):
            if not (result.exact and result.recovered and result.seen.missed):
                break
            if result.folder is not None:
                shutil.rmtree(result.folder)
            result = self._try(trial)
        if trial.blows and not result.seen.delivered and result.recovered:
            result = replace(result, problems=(f"in {TRIES} tries no blow met the training",))
        return result

    def _try(self, trial: Trial) -> TrialResult:
        expected = self._reference(trial)
        carried = self._carry_out(trial, trial.name)
        seen = carried.seen
        if seen.problems:
            different = ["it did not finish"]
        else:
            found = Outcome.of(Layout(carried.root))
            different = differences(expected, found)
        seen.problems += _broken_promises(trial, seen)
        failed = bool(different or seen.problems)
        kept = carried.root if self.keep or failed else None
        if kept is None:
            shutil.rmtree(carried.root)
            # MLflow knows the place of a run's artifacts by its whole path: of a moved project, the old one again.
            shutil.rmtree(self.folder / trial.name, ignore_errors=True)
        result = TrialResult(trial, tuple(different), tuple(seen.problems), seen, carried.wall_s, kept)
        self.say(_line(result))
        return result

    def _reference(self, trial: Trial) -> Outcome:
        """What the undisturbed training comes to under the same settings (and faults, if the trial says so)."""
        key = trial.reference
        if key not in self._references:
            undisturbed = Trial("reference", len(self._references), faults=key[0], guards=key[1])
            carried = self._carry_out(undisturbed, undisturbed.name)
            seen = carried.seen
            if seen.problems or seen.kinds["attempt"] != 1:
                cause = "; ".join(seen.problems) or f"it took {seen.kinds['attempt']} attempts"
                raise RunFailedError(f"the undisturbed training failed, see {carried.root}: {cause}")
            if self.clock is None:
                self.clock, self.facts = Clock.of(seen), seen.facts
            self._references[key] = Outcome.of(Layout(carried.root))
            under = f" under {key[0][0].kind}" if key[0] else ""
            self.say(f"reference{under}: {seen.farthest_step} steps in {carried.wall_s:.1f} s")
            if not self.keep:
                shutil.rmtree(carried.root)
        return self._references[key]

    def _carry_out(self, trial: Trial, name: str) -> Carried:
        settings = self._settings(trial)
        root = self.folder / name
        copy_project(self.project, root, settings, self._database())
        begun_s = self.clock.finished_s if self.clock else 0.0
        silence_s = SILENCE_S + 10 * begun_s + settings.machine.stall_first_s * trial.stalls
        return carry_out(trial, root, self.clock, Limits(silence_s, settings.machine.grace_s))

    def _database(self) -> Path:
        """MLflow's database as it is when new: made once (6 s), copied for each trial."""
        template = Layout(self.folder / "template")
        if not template.mlflow_database.exists():
            template.mlruns.mkdir(parents=True)
            with Store(template).connected():
                pass
        return template.mlflow_database

    def _settings(self, trial: Trial) -> Settings:
        guards = self.settings.train.guards.model_copy(update=dict(trial.guards))
        train = self.settings.train.model_copy(update={"guards": guards})
        return self.settings.model_copy(update={"train": train, "machine": self._machine(trial)})

    def _machine(self, trial: Trial) -> Machine:
        machine = self.settings.machine
        changes: dict[str, Any] = {
            "checkpoint_every": CHECKPOINT_EVERY_STEPS,
            "mirror": None,  # else the first one's result would be everybody's
            "keep_checkpoints": max(2, machine.keep_checkpoints),
            "retries": max(machine.retries, len(trial.blows) + 2),  # blows may follow each other without a step between
            "retry_delay_s": 0.1,
            "preemption_notice": None,
        }
        if trial.stalls:
            start_s = self.clock.first_step_s if self.clock else 0.0
            changes |= {"stall_s": STALL_S, "stall_first_s": max(STALL_FIRST_S, 5 * start_s)}
        if any(fault.kind == "memory" for fault in trial.faults):
            changes["micro_batch_rows"] = self._crowd()
        return machine.model_copy(update=changes)

    def _crowd(self) -> int:
        """Rows of a micro-batch that do not fit where the longest row does: twice as long as it, of usual rows."""
        lengths = DatasetCard.load(self.project.dataset_card).lengths.values()
        longest, usual = max(one.greatest for one in lengths), max(1, min(one.median for one in lengths))
        rows = max(CROWD_ROWS, self.settings.machine.micro_batch_rows, -(-2 * longest // int(usual)))
        return min(rows, max(CROWD_ROWS, self.settings.train.batch_rows))


def run(
    project: Layout, settings: Settings, plan: Sequence[Trial], folder: Path, say: Callable[[str], None]
) -> list[TrialResult]:
    """Carry out a plan; see Campaign."""
    return Campaign(project, settings, folder, say).run(plan)


def shape(project: Layout, settings: Settings, steps: int) -> Shape:
    """What a plan for this project must know. Raises DataError when stage prepare has not run."""
    card = DatasetCard.load(project.dataset_card)
    longest = max((lengths.greatest for lengths in card.lengths.values()), default=1)
    if settings.train.batching == "packed":
        longest = settings.train.pack_tokens
    return Shape(steps, settings.train.validate_every_steps, longest)


def copy_project(project: Layout, root: Path, settings: Settings, database: Path) -> Layout:
    """A project of its own that trains on the same base and data: linked, for nothing ever writes to them.

    Raises:
        DataError, DamagedError: stage base or prepare has not run.
    """
    base = BaseCard.load(project.base_card)
    DatasetCard.load(project.dataset_card)
    if root.exists():
        raise DataError(f"{root}: there is a trial of that name already; remove it, or take another folder")
    layout = Layout(root)
    for folder in ("base", "data"):
        files.link_tree(project.experiments / folder, layout.experiments / folder)
    directory = project.root / Path(base.source).expanduser()
    if base.revision is None and directory.is_dir():  # named as seen from the project
        base.model_copy(update={"source": str(directory.resolve())}).save(layout.base_card)
    layout.params.write_text(params.dump(settings), encoding="utf-8")
    (root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    ChampionFile().save(layout.champion)
    layout.mlruns.mkdir()
    shutil.copyfile(database, layout.mlflow_database)
    return layout


def _broken_promises(trial: Trial, seen: Chronicle) -> list[str]:
    """What the journal must show, or must not."""
    texts = []
    if trial.shows and seen.delivered + len(trial.faults) and not any(seen.kinds[kind] for kind in trial.shows):
        texts.append(f"nothing in the journal shows the fault (expected: {' or '.join(trial.shows)})")
    if seen.kinds["died:stalled"] and not trial.stalls:
        texts.append("false alarm: a worker that was at work was taken for stalled")
    return texts


def _line(result: TrialResult) -> str:
    seen = result.seen
    what = "exact" if result.exact else f"NOT EXACT: {'; '.join(result.differences)}"
    blows = Counter(name for _, name in seen.marks)
    told = ", ".join([f"{name} x{count}" if count > 1 else name for name, count in blows.items()] + seen.notes)
    problems = f"; PROBLEM: {'; '.join(result.problems)}" if result.problems else ""
    missed = f"; {seen.missed} came too late" if seen.missed else ""
    return f"{result.trial.name}: {what} ({told or 'nothing happened'}; {result.wall_s:.1f} s){missed}{problems}"
