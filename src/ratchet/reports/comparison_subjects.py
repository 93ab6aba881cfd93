"""What is compared, by name: a run, a trial of a sweep, a promoted version, or several as one group of seeds."""

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from ratchet.errors import DamagedError, DataError, SettingsError
from ratchet.registry import ledger
from ratchet.runs import directory
from ratchet.storage.layout import Layout
from ratchet.storage.records.gate import Champion, ChampionFile, read_champion
from ratchet.storage.records.sweep import SweepReport, Trial

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
class Member:
    """One training."""

    run_id: str
    about: str
    """What the name stood for, where it was not the run's: `version 3`, `trial 7 of lora`."""
    model_digest: str | None = None
    """Of the version that was named."""


@dataclass(frozen=True)
class Subject:
    """One of those that are compared: a training, or several that differ in their seed."""

    name: str
    """As it was given; what it is called on the page."""
    members: tuple[Member, ...]

    @property
    def run_ids(self) -> tuple[str, ...]:
        """Of its trainings."""
        return tuple(member.run_id for member in self.members)


class Names:
    """Everything in a project that can be compared, by name."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.runs = [run.root.name for run in directory.all_runs(layout.runs)]
        self._file = read_champion(layout.champion)
        self.versions = _versions(layout, self._file)
        self._reports: dict[str, SweepReport] = {}

    def subjects(self, names: Sequence[str]) -> list[Subject]:
        """Those of these names, in their order.

        Raises:
            DataError: a name that nothing has, or several have; it tells near ones.
            SettingsError: one name twice, an empty one, or too many.
        """
        if len(names) > MOST:
            raise SettingsError(f"{len(names)} to compare: more than {MOST} cannot be told apart; name fewer")
        found: dict[tuple[str, ...], Subject] = {}
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

    def subject(self, name: str) -> Subject:
        """The one of this name, or of LABEL=NAME: then the label is what it is called. Raises as `subjects`."""
        label, named, meant = name.rpartition(LABELLED)
        members = tuple(self._member(part.strip()) for part in meant.split(JOINED))
        if len({member.run_id for member in members}) < len(members):
            raise SettingsError(f"{name}: names a run twice; a group has each of its runs once")
        if named and not label.strip():
            raise SettingsError(
                f"{name}: nothing stands before {LABELLED}; write LABEL{LABELLED}NAME, or the name alone"
            )
        return Subject(label.strip() or meant, members)

    def _member(self, name: str) -> Member:
        if not name:
            raise SettingsError(f"an empty name; {HOW}")
        if name in ("champion", "anchor") or (name[:1] == "v" and name[1:].isdecimal()):
            return self._version(name)
        if "/" in name:
            return self._trial(name)
        matching = [run_id for run_id in self.runs if run_id.startswith(name)]
        if len(matching) == 1:
            return Member(matching[0], "")
        if matching:
            raise DataError(f"{name}: {len(matching)} runs begin so: {_listed(matching)}; write more of it")
        raise DataError(f"{name}: nothing of that name in {self._layout.experiments}; {self._near(name)}{HOW}")

    def _version(self, name: str) -> Member:
        if name in ("champion", "anchor"):
            one: Champion | None = getattr(self._file, name)
            if one is None:
                raise DataError(f"{name}: there is none yet; `ratchet promote` makes one")
            number = one.version
        else:
            number = int(name[1:])
        if number not in self.versions:
            known = _listed([f"v{one}" for one in self.versions]) or "none"
            raise DataError(f"{name}: no such version was promoted here; there are: {known}")
        run_id, model_digest = self.versions[number]
        return Member(run_id, f"version {number:,}", model_digest)

    def _trial(self, name: str) -> Member:
        study, _, number = name.rpartition("/")
        trials = {str(trial.number): trial for trial in self.trials(study)}
        if number not in trials:
            raise DataError(
                f"{name}: sweep {study} has no trial {number!r}; there are {_span([int(one) for one in trials])}"
            )
        run_id = trials[number].run_id
        if run_id is None:
            raise DataError(f"{name}: its values were refused, so nothing was trained ({trials[number].reason})")
        return Member(run_id, f"trial {number} of {study}")

    def trials(self, study: str) -> tuple[Trial, ...]:
        """Of a sweep, as its report tells. Raises DataError where there is no such report."""
        path = self._layout.sweep(study) / "report.json"
        if study not in self.studies():
            known = _listed(self.studies()) or "none"
            near = _maybe(get_close_matches(study, self.studies(), n=3, cutoff=0.5))
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
            except DamagedError:
                continue
        return found

    def versions_of(self, run_id: str) -> list[int]:
        """Promoted versions that came of this run."""
        return [number for number, (run, _) in self.versions.items() if run == run_id]

    def _near(self, name: str) -> str:
        everything = [*self.runs, *self.studies(), *(f"v{number}" for number in self.versions), "champion", "anchor"]
        by_beginning = {one[: max(len(name), 4)]: one for one in everything}
        near = get_close_matches(name, by_beginning, n=3, cutoff=0.5)
        runs = f"runs: {_listed(self.runs) or 'none'}; "
        return f"{_maybe([by_beginning[one] for one in near])}{runs}"


def _versions(layout: Layout, file: ChampionFile) -> dict[int, tuple[str, str]]:
    """Run and model of each version that was ever promoted; what the ledger lacks is in the champion file."""
    held = [one for one in (*file.previous, file.anchor, file.champion) if one is not None]
    found = {one.version: (one.run_id, one.model_digest) for one in held}
    found |= {one.version: (one.run_id, one.model_digest) for one in ledger.read(layout.promotions)}
    return dict(sorted(found.items()))


def _maybe(near: Sequence[str]) -> str:
    return f"did you mean {' or '.join(near)}? " if near else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more


def _span(numbers: Sequence[int]) -> str:
    return f"trials {min(numbers)} to {max(numbers)}" if numbers else "none"
