"""Generations of a study: `sweep`, `sweep.2`, `sweep.3`; each has one identity, and is never searched under another.

A generation is made in an order that a crash may end anywhere: the study, what marks it as ours, its identity, then the
trials of the one before it, and last the number of those. Whoever comes next goes on where it stopped.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import count
from typing import Any

from optuna.exceptions import DuplicatedStudyError
from optuna.study import StudyDirection

from ratchet.errors import DamagedError, SettingsError
from ratchet.studies.descent import Descent, carry_over
from ratchet.studies.identity import differences
from ratchet.studies.space import Space
from ratchet.studies.storage import Storage

FORMAT = 1
"""Of studies; a higher one was written by a newer Ratchet."""
FORMAT_KEY, IDENTITY_KEY, VERSIONS_KEY = "ratchet.format", "ratchet.identity", "ratchet.versions"
PARENT_KEY = "ratchet.parent"
CARRIED_KEY = "ratchet.carried"
_DIRECTIONS = {"minimize": StudyDirection.MINIMIZE, "maximize": StudyDirection.MAXIMIZE}
_LIBRARIES = {"optuna": "optuna", "cmaes": "cmaes", "ratchet": "ratchet-llm"}


@dataclass(frozen=True)
class Generation:
    """A study in a storage."""

    name: str
    study_id: int
    attributes: Mapping[str, Any]

    @property
    def identity(self) -> dict[str, Any] | None:
        """None where a crash left a study without."""
        found: dict[str, Any] | None = self.attributes.get(IDENTITY_KEY)
        return found


def generations(storage: Storage, name: str) -> list[Generation]:
    """All there are, oldest first.

    Raises:
        SettingsError: a study of that name belongs to another program.
        DamagedError: one was written by a newer Ratchet.
        StorageError: the storage does not answer.
    """
    return list(_existing(storage, name))


def _existing(storage: Storage, name: str) -> Iterator[Generation]:
    with storage.connected():
        studies = {study.study_name: study for study in storage.optuna.get_all_studies()}
    for number in count(1):
        here = _numbered(name, number)
        if here not in studies:
            return
        found = Generation(here, studies[here]._study_id, studies[here].user_attrs)
        if FORMAT_KEY not in found.attributes and (found.attributes or _has_trials(storage, found)):
            raise SettingsError(
                f"{storage.where}: the study {here!r} was made by another program; choose another "
                "sweep.name in params.yaml"
            )
        if (form := found.attributes.get(FORMAT_KEY, FORMAT)) > FORMAT:
            raise DamagedError(
                f"{storage.where}: the study {here!r} was written by a newer version of Ratchet (format {form}, this "
                f"one knows {FORMAT}); update Ratchet on this machine"
            )
        yield found


def find_or_make(storage: Storage, name: str, identity: Mapping[str, Any], space: Space, fork: bool) -> Generation:
    """The newest generation of exactly this identity; a new one where there is none and one may be made.

    Args:
        storage: where.
        name: of the study, without a generation.
        identity: see `studies.identity`.
        space: that it tells of; trials of the generation before that lie in it are carried over by a fork.
        fork: whether a new generation may follow others.

    Raises:
        SettingsError: there are generations, all of other identities, and `fork` is not set.
        SettingsError, DamagedError: see `generations`.
        BusyError, StorageError: see `Storage.locked`.
    """
    wanted = json.loads(json.dumps(identity))
    with storage.locked(), storage.connected():
        there = generations(storage, name)
        same = [one for one in there if one.identity == wanted]
        if same:
            return _completed(storage, same[-1], wanted, space)
        parents = [one for one in there if one.identity is not None]
        following = _numbered(name, len(there) + 1)
        if parents and not fork:
            raise SettingsError(_refusal(parents[-1], wanted, following))
        directions = [_DIRECTIONS[direction] for _, direction in wanted["objectives"]]
        unborn = there[-1:] if there and there[-1].identity is None else []
        if unborn and storage.optuna.get_study_directions(unborn[0].study_id) == directions:
            following, study_id = unborn[0].name, unborn[0].study_id
        else:
            study_id = _create(storage, following, directions)
        _describe(storage, study_id, wanted, parents[-1].name if parents else None)
        return _completed(storage, _read(storage, following, study_id), wanted, space)


def _refusal(newest: Generation, wanted: Mapping[str, Any], following: str) -> str:
    changes = "".join(f"\n  {line}" for line in differences(newest.identity or {}, wanted))
    return (
        f"params.yaml: the study {newest.name!r} searches something else than what is written now:{changes}\n"
        f"Take the changes back to go on with it; or start {following!r}, which takes over those of its trials that "
        "still count, with `ratchet sweep --fork`; or give another sweep.name"
    )


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}.{number}"


def _has_trials(storage: Storage, study: Generation) -> bool:
    with storage.connected():
        return bool(storage.optuna.get_n_trials(study.study_id))


def _create(storage: Storage, name: str, directions: list[StudyDirection]) -> int:
    try:
        return storage.optuna.create_new_study(directions, name)
    except DuplicatedStudyError:
        raise SettingsError(
            f"{storage.where}: another program has made a study {name!r} at the same moment; choose another sweep.name"
        ) from None


def _describe(storage: Storage, study_id: int, identity: Mapping[str, Any], parent: str | None) -> None:
    described = {FORMAT_KEY: FORMAT, VERSIONS_KEY: _versions(), PARENT_KEY: parent, IDENTITY_KEY: identity}
    for key, value in described.items():
        storage.optuna.set_study_user_attr(study_id, key, value)


def _versions() -> dict[str, str]:
    found = {}
    for library, distribution in _LIBRARIES.items():
        try:
            found[library] = version(distribution)
        except PackageNotFoundError:
            found[library] = "not installed"
    return found


def _read(storage: Storage, name: str, study_id: int) -> Generation:
    return Generation(name, study_id, dict(storage.optuna.get_study_user_attrs(study_id)))


def _completed(storage: Storage, made: Generation, identity: Mapping[str, Any], space: Space) -> Generation:
    """Carry over what a new generation still lacks."""
    if CARRIED_KEY not in made.attributes:
        parent = made.attributes[PARENT_KEY]
        carried = 0
        if parent is not None:
            old = _read(storage, parent, storage.optuna.get_study_id_from_name(parent))
            descent = Descent(old.identity or {}, identity, space)
            carried = carry_over(storage, old.study_id, made.study_id, descent)
        storage.optuna.set_study_user_attr(made.study_id, CARRIED_KEY, carried)
    return _read(storage, made.name, made.study_id)
