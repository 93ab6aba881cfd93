"""Champion → verified, signed, smoke-tested release → link `current`; and back. Neither torch nor MLflow.

The ledger says which version is which model, so MLflow's database is not asked. Nothing that a server reads changes
before everything that may refuse was asked; docs/deployment.md has the order and what a death at each point leaves.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ratchet.config.schema import Settings
from ratchet.errors import (
    EXIT_OK,
    ChampionError,
    DamagedFileError,
    DataError,
    LockHeldError,
    RatchetError,
    SettingsError,
    StorageError,
)
from ratchet.registry import bundle_files, ledger, model_store
from ratchet.registry.deployment import release as places
from ratchet.registry.deployment import release as releases
from ratchet.registry.deployment import smoke_test as smokes
from ratchet.registry.deployment.model_card import describe_forced
from ratchet.registry.deployment.release import DeploymentDirectory, PromotedModel, Release
from ratchet.registry.signing import keys, signature
from ratchet.storage import disk, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import Promotion, read_champion

POLL_S = 1.0
"""Between two looks at the ledger."""
AGAIN_S = 60.0
"""Before what may pass (a full disk, somebody else's lock) is tried again."""
PATIENCE = 3
"""Looks in a row at a ledger and a champion file that do not agree, before that is told: a promotion writes first one,
then the other."""

Say = Callable[[str], object]


@dataclass(frozen=True)
class DeployOptions:
    """What is to be deployed, and how."""

    form: str | None = None
    """`hf`, `gguf`, `onnx`, or a form's whole name; None: as the directory has it, at first the first GGUF file."""
    version: int | None = None
    """A registered version; None: the champion."""
    rollback: bool = False
    """Instead, back to the release before."""
    smoke: bool = True
    """Start a server on it before it becomes current."""


def deploy(layout: ProjectLayout, settings: Settings, directory: Path, options: DeployOptions = DeployOptions()) -> str:
    """Put a promoted model into a directory that a server reads; returns what to tell. Repeating it changes nothing.

    Raises:
        ChampionError: no such version, its folder is gone, or it does not answer as it was verified.
        SettingsError: a directory that is not ours, a form that the model does not have, a signature of a key that is
            not trusted; options that contradict each other.
        DamagedFileError: a byte differs, or nobody signed.
        LockHeldError, StorageError, OSError: the directory is in use, or its disk takes nothing.
    """
    if options.rollback:
        if options.form is not None or options.version is not None:
            raise SettingsError("--rollback goes to the release before: leave out --format and --version")
        return _roll_back(layout, settings, directory)
    version, model_digest, event, warning = _choose_version(layout, options.version)
    promoted = _load_promoted(layout, settings, version, model_digest)
    with places.open_directory(directory, settings.promote.model_name) as place:
        usual = _current_form(place)
        release = releases.plan_release(promoted, releases.choose_artifact(promoted.bundle, options.form or usual))
        before = place.target(place.current)
        found, damage = _inspect_release(layout, before) if before is not None else (None, None)
        warnings = _collect_warnings(place, release, warning, damage)
        if found == release:
            return _report_current(layout, place, release, warnings)
        told = _stage_release(layout, place, promoted, release, options.smoke, warnings)
        place.swap_in(release.name)
        about = {"before": before.name if before else None, "smoke": told, "event": event, "damage": damage}
        with _report_after_switch(place, release):
            place.note(places.build_deployment(release, "deploy", ledger.current_actor(layout.root), **about))
            place.prune()
        return _success_message(place, release, before, told, warnings)


def _choose_version(layout: ProjectLayout, version: int | None) -> tuple[int, str, str | None, str | None]:
    """Version and model to deploy, the ledger's event about it, and what to warn of."""
    entries, file = ledger.read_entries(layout.promotions), read_champion(layout.champion)
    ledger.check_champion(layout.promotions, entries, file)
    if version is None:
        if file.champion is None:
            raise ChampionError(f"{layout.champion}: there is no champion yet; `ratchet promote` makes one")
        event = next((e.id for e in reversed(entries) if e.version == file.champion.version), None)
        return file.champion.version, file.champion.model_digest, event, None
    models = {c.version: c.model_digest for c in file.previous} | {e.version: e.model_digest for e in entries}
    if file.champion is not None:
        models[file.champion.version] = file.champion.model_digest
    if version not in models:
        known = ", ".join(map(str, sorted(models))) or "none"
        raise ChampionError(f"version {version} was never promoted; known: {known}")
    back = ledger.find_withdrawal(entries, models[version])
    return version, models[version], None, _withdrawal_message(version, back) if back else None


def _withdrawal_message(version: int, back: Promotion) -> str:
    why = f" ({back.reason})" if back.reason else ""
    return f"version {version} was rolled back on {back.time} by {back.by}{why}"


def _load_promoted(layout: ProjectLayout, settings: Settings, version: int, model_digest: str) -> PromotedModel:
    """The promoted model's folder, once every byte of it and its signature are known to be good."""
    folder = layout.promoted_model(model_digest)
    if not folder.is_dir():
        raise ChampionError(
            f"version {version}: {folder} is not there. Git does not hold mlruns/: copy it from where that version was "
            "promoted"
        )
    manifest = files.verify_sealed(folder, model_store.KIND)
    known = {name: sha for name, (sha, _) in manifest.files.items()}
    signed = signature.check_signature(folder, layout, known)
    bundle_files.require_match(folder, known)
    bundle = ModelBundle.load(folder / bundle_files.BUNDLE)
    if bundle.model_digest != model_digest:
        raise DamagedFileError(f"{folder}: holds model {bundle.model_digest[:12]}, not {model_digest[:12]}")
    return PromotedModel(folder, version, settings.promote.model_name, bundle, manifest.files, signed.by)


def _current_form(place: DeploymentDirectory) -> str | None:
    """The form that the directory has now. Raises DamagedFileError for a history that cannot be read."""
    now, log = place.target(place.current), place.log()
    try:
        return Release.load(now / releases.RECORD).form if now is not None else None
    except (DataError, DamagedFileError):  # it is made again, in the same form
        return next((entry.form for entry in reversed(log) if now is not None and entry.release == now.name), None)


def _inspect_release(layout: ProjectLayout, folder: Path) -> tuple[Release | None, str | None]:
    """A release that is whole and as it was signed, else what is wrong with its files; neither, if only the key is no
    longer trusted."""
    try:
        return check_release(layout, folder), None
    except (DataError, DamagedFileError) as error:
        return None, str(error)
    except SettingsError:
        return None, None


def _collect_warnings(
    place: DeploymentDirectory, release: Release, warning: str | None, damage: str | None
) -> list[str]:
    """What whoever deploys should know: about the promotion, and about what servers were reading until now."""
    found = [describe_forced(release.forced)] if release.forced else []
    if damage is not None:
        found.append(
            f"what was current until now was damaged: {damage}. Servers may have read that: restart them, and find out "
            f"who can write in {place.releases}"
        )
    return [f"warning: {text}" for text in [*found, *([warning] if warning else [])]]


def _report_current(layout: ProjectLayout, place: DeploymentDirectory, release: Release, warnings: list[str]) -> str:
    """It is current already; a line that a command which died owes is added."""
    log = place.log()
    if not log or log[-1].release != release.name:
        place.note(
            places.build_deployment(
                release, "deploy", ledger.current_actor(layout.root), before=log[-1].release if log else None
            )
        )
    place.prune()
    return "\n  ".join([f"{release} is deployed in {place.current} already", *warnings])


def _stage_release(
    layout: ProjectLayout,
    place: DeploymentDirectory,
    promoted: PromotedModel,
    release: Release,
    smoke: bool,
    warnings: list[str],
) -> str | None:
    """Have the release on the disk, and let it answer; returns what the smoke test found. A refused one is removed.

    One that is there is believed only as far as its signature goes; what is wrong with it is added to the warnings.
    """
    folder = place.releases / release.name
    found, damage = _inspect_release(layout, folder) if folder.exists() else (None, None)
    if damage is not None and folder != place.target(place.current):
        warnings.append(f"warning: the release of this name that was there is made again: {damage}")
    if found != release:
        disk.require_space(place.releases, releases.release_size_bytes(promoted, release))
        releases.stage_release(promoted, release, folder)
    if not smoke:
        return None
    try:
        return smokes.run_smoke_test(folder, releases.choose_artifact(promoted.bundle, release.form), promoted.dated)
    except RatchetError as error:
        if folder not in (place.target(place.current), place.target(place.previous)):
            files.remove_sealed(folder)
        raise type(error)("\n  ".join([str(error), *warnings])) from error


def _roll_back(layout: ProjectLayout, settings: Settings, directory: Path) -> str:
    """Exchange current and previous, once every byte of previous is known to be as it was signed."""
    with places.open_directory(directory, settings.promote.model_name, new=False) as place:
        now, then = place.target(place.current), place.target(place.previous)
        if place.settled is not None:
            return f"{place.settled.release} is current again already: a rollback had come so far, and is finished now"
        if now is None or then is None or now == then:
            raise ChampionError(
                f"{place.root}: there is no release before the current one to go back to; "
                "name a version: `ratchet deploy DIR --version N`"
            )
        release = check_release(layout, then)
        unread = _require_not_withdrawn(layout, release)
        place.go_back(places.build_deployment(release, "rollback", ledger.current_actor(layout.root), before=now.name))
        with _report_after_switch(place, release):
            place.settle()
        told = f"{release} is current again in {place.current}, in the place of {now.name}; every byte is as signed"
        return "\n  ".join([told, *_collect_warnings(place, release, unread, damage=None)])


@contextmanager
def _report_after_switch(place: DeploymentDirectory, release: Release) -> Iterator[None]:
    """What follows once a release is current; where the disk takes it no more, say that it is current all the same."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{place.current}: leads to {release.name} now, but {place.root} takes no more ({error.strerror}); make "
            f"room and repeat: that adds the line to {place.history.name}, and changes nothing else"
        ) from None


def _require_not_withdrawn(layout: ProjectLayout, release: Release) -> str | None:
    """Raise ChampionError for a model that was rolled back. A broken ledger keeps nobody from going back: a warning."""
    try:
        back = ledger.find_withdrawal(ledger.read_entries(layout.promotions), release.model_digest)
    except DamagedFileError as error:
        return str(error)
    if back is not None:
        raise ChampionError(
            f"{_withdrawal_message(release.version, back)}; if you want it: --version {release.version}"
        )
    return None


def check_release(layout: ProjectLayout, folder: Path) -> Release:
    """Require that a release is whole, and as somebody whom the project trusts signed it; returns its record.

    Raises:
        DamagedFileError: a byte differs, or a file is missing; the message names it.
        SettingsError: signed by somebody whom the project does not trust, or no longer.
    """
    release = releases.verify_release(folder)
    signed = signature.require_trusted(signature.read_signature(folder, keys.read_keyring(layout.keyring)))
    releases.require_signed(folder, release, signed.files)
    return release


def _success_message(
    place: DeploymentDirectory, release: Release, before: Path | None, smoke: str | None, warnings: list[str]
) -> str:
    after = f", after {before.name}" if before is not None and before.name != release.name else ""
    lines = [
        f"{release} is current in {place.current}{after}",
        f"smoke test: {smoke}" if smoke else "no server was started on it: its answers were not asked for",
        f"how to serve it: {place.current / 'SERVE.md'}",
    ]
    return "\n  ".join([*lines, *warnings])


# --- following the champion -------------------------------------------------------------------------------------------


def watch_champion(layout: ProjectLayout, settings: Settings, directory: Path, options: DeployOptions, say: Say) -> int:
    """Deploy the champion, then every new one, until SIGTERM or Ctrl-C; returns the exit code.

    What is refused is told once, what is current stays, and the next promotion is waited for; what may pass (a full
    disk, a lock) is tried again every minute.

    Raises:
        SettingsError: options that a watch does not have, or a directory that is not ours.
    """
    if options.rollback or options.version is not None:
        raise SettingsError("--watch follows the champion: leave out --version and --rollback")
    say(f"watching {layout.promotions}; SIGTERM or Ctrl-C ends it")
    watcher = _ChampionWatcher(layout, settings, directory, options, say)
    try:
        while True:
            watcher.look()
            time.sleep(POLL_S)
    except KeyboardInterrupt:  # the command line makes one of SIGTERM
        say(f"stopped watching; what is current in {directory} stays so")
        return EXIT_OK


class _ChampionWatcher:
    """What a watch has seen and said."""

    def __init__(
        self, layout: ProjectLayout, settings: Settings, directory: Path, options: DeployOptions, say: Say
    ) -> None:
        self._act: Callable[[], str] = lambda: deploy(layout, settings, directory, options)
        self._layout = layout
        self._say = say
        self._seen: object = None
        """The state of ledger and champion file that was dealt with."""
        self._due_s = 0.0
        """When to try again, by time.monotonic(), though nothing changed; 0: not at all."""
        self._disagreed = 0
        self._said = ""

    def look(self) -> None:
        """Act if there is something to do."""
        state = tuple(_file_state(path) for path in (self._layout.promotions, self._layout.champion))
        again = self._due_s and time.monotonic() >= self._due_s
        if state == self._seen and not again and not self._disagreed:
            return
        if not self._in_agreement():
            return
        self._seen, self._due_s = state, 0.0
        try:
            self._tell(self._act())
        except (LockHeldError, StorageError, OSError) as error:
            self._due_s = time.monotonic() + AGAIN_S
            self._tell(f"not deployed, tried again in {AGAIN_S:g} s: {error}")
        except RatchetError as error:
            self._tell(f"not deployed, what is current stays so: {error}")

    def _in_agreement(self) -> bool:
        """Whether ledger and champion file belong together; between two steps of a promotion they do not."""
        try:
            file = read_champion(self._layout.champion)
            ledger.check_champion(self._layout.promotions, ledger.read_entries(self._layout.promotions), file)
        except (DataError, DamagedFileError, OSError) as error:
            self._disagreed += 1
            if self._disagreed >= PATIENCE:
                self._tell(f"not deployed: {error}")
            return False
        self._disagreed = 0
        return True

    def _tell(self, text: str) -> None:
        """Say something, but not the same again and again."""
        if text != self._said:
            self._said = text
            self._say(f"{places.utc_now()}  {text}")


def _file_state(path: Path) -> object:
    """Changes when the file does: it is replaced as a whole."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size
