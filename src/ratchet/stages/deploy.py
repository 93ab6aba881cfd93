"""`ratchet deploy`: copies a promoted model into a directory that a model server reads. No torch.

The ledger names the model of every version, so the project's own MLflow database is not needed. If registered models
are on a server, its ledger decides, and files that this machine lacks are fetched from it; so no project is needed
either, only the public key that must have signed (`open_model_on_server`). Before the link `current` moves, every
byte and the signature of a release are checked, and a test server answers from the release (unless --no-smoke is set).
Until then servers see no change.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NoReturn

from pydantic import ValidationError

from ratchet.config.mlflow_environment import REGISTRY, TRACKING, resolve_addresses
from ratchet.config.promote import Promote
from ratchet.config.settings import Settings
from ratchet.errors import (
    ChampionError,
    DamagedFileError,
    DataError,
    LockHeldError,
    RatchetError,
    SettingsError,
    StorageError,
    TrackingError,
)
from ratchet.registry import approvals, keys, ledger, model_store, signature
from ratchet.registry.deployment import release as releases
from ratchet.registry.deployment import smoke_test as smoke_tests
from ratchet.registry.deployment.model_card import describe_forced
from ratchet.registry.deployment.release import Deployment, DeploymentDirectory, PromotedModel, Release
from ratchet.stages.project import Project
from ratchet.storage import actors, files
from ratchet.storage.layout import ProjectLayout, find_user_cache
from ratchet.storage.records.base import Record
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import Promotion, read_champion
from ratchet.tracking.mlflow.registry import MlflowModelRegistry

POLL_INTERVAL_S = 1.0
"""Time between two checks for a new champion in the project's own files."""
SERVER_POLL_INTERVAL_S = 10.0
"""Time between two checks for a new champion on a server; each takes two requests."""
RETRY_AFTER_S = 60.0
"""Delay before the next attempt after a temporary failure: a full disk, or a lock that another process holds."""
DISAGREEMENT_TOLERANCE_S = 5.0
"""Time after which a disagreement between ledger and champion file is reported. A shorter disagreement is normal,
because a promotion writes first the ledger and then the champion file, and a loaded disk delays the second."""


@dataclass(frozen=True)
class DeployOptions:
    """Format, version and checks of a deployment."""

    format: str | None = None
    """`hf`, `gguf`, `bitsandbytes`, `onnx`, or an artifact's name such as `gguf/q8_0`. None: the directory's present
    format, or in a new directory the first GGUF file."""
    version: int | None = None
    """A registered version; None: the champion."""
    rollback: bool = False
    """Go back to the previous release instead of deploying a version."""
    smoke_test: bool = True
    """Start a server with the release and test that it answers, before the release becomes current."""


DeployStatus = Literal["deployed", "unchanged", "rolled_back", "rollback_finished"]


class DeployResult(Record):
    """Result of a deployment or a rollback."""

    status: DeployStatus
    """`unchanged`: the release was current already. `rollback_finished`: a killed command had exchanged the links, and
    this command added the line to the history."""
    deployment: Deployment
    """The last line of the directory's history."""
    current: Path
    """The link that servers follow."""
    warnings: tuple[str, ...] = ()

    @property
    def guide(self) -> Path:
        """Instructions for starting a server."""
        return self.current / "SERVE.md"


def open_model_on_server(model_name: str | None, public_key: Path | None) -> Project:
    """Open a registered model on an MLflow server, on a machine without a project.

    Its files are kept in a cache of the user, and checked at every deployment.

    Args:
        model_name: name of the registered model; None: the default of promote.model_name.
        public_key: PEM file of the only key that counts.

    Raises:
        SettingsError: the environment names no server, there is no public key, or MLflow has no such names.
    """
    try:
        settings = Settings(promote=Promote() if model_name is None else Promote(model_name=model_name))
    except ValidationError:
        raise SettingsError(
            f"--model: found {model_name!r}; expected the name of a registered model: letters, digits, `.`, `_` and `-`"
        ) from None
    if resolve_addresses(settings, None).registry is None:
        raise SettingsError(
            f"no Ratchet project here, and no MLflow server: change to a project, or set {TRACKING} or {REGISTRY}"
        )
    if public_key is None:
        raise SettingsError(
            "no Ratchet project here, so no key is trusted: name the public key that must have signed the model with "
            "--public-key FILE (in the project: `jq -j '.keys[0].public' .ratchet/keys.json > key.pem` writes it)"
        )
    keyring = keys.Keyring(keys=(keys.read_public_key(public_key),))
    layout = ProjectLayout(find_user_cache() / "models" / settings.promote.model_name)
    files.make_directory(layout.keyring.parent)
    keyring.save(layout.keyring)
    return Project.from_parts(layout, settings)


def deploy(project: Project, directory: Path, options: DeployOptions = DeployOptions()) -> DeployResult:
    """Make a promoted model the current release of a directory. Repeating the call changes nothing.

    Raises:
        ChampionError: the version does not exist, its folder is missing, or its answers differ from those that stage
            export verified.
        SettingsError: the directory contains something else, the model does not have the format, its signer or a
            person who approved it is not trusted, or options contradict each other.
        DamagedFileError: a byte differs from the signed one, or there is no signature.
        LockHeldError, StorageError, OSError: another process deploys into the directory, or the directory cannot be
            written.
        TrackingError: the server with the registered models cannot be used.
    """
    layout = project.layout
    registry = MlflowModelRegistry.open(layout, project.settings)
    if options.rollback:
        if options.format is not None or options.version is not None:
            raise SettingsError("--rollback goes to the previous release: leave out --format and --version")
        return _roll_back(layout, registry, directory)
    result = _deploy_version(project, registry, directory, options)
    warnings = _record(layout, result.current.parent, result.deployment)
    return result.model_copy(update={"warnings": (*result.warnings, *warnings)})


def _record(layout: ProjectLayout, directory: Path, deployment: Deployment) -> list[str]:
    """Add a deployment to the project's list. A failure is a warning, because the release is current already."""
    if not layout.params.exists():  # a machine without the project
        return []
    try:
        releases.record_deployment(layout, directory, deployment)
    except (DamagedFileError, LockHeldError, OSError) as error:
        return [f"not recorded in {layout.deployments}: {error}"]
    return []


def _deploy_version(
    project: Project, registry: MlflowModelRegistry, directory: Path, options: DeployOptions
) -> DeployResult:
    """Deploy the champion, or the version of the options; see `deploy`."""
    layout, model_name = project.layout, registry.model_name
    version, model_digest, event, warning = _choose_version(layout, registry, options.version)
    registry.fetch_model(model_digest)
    promoted = _load_promoted(layout, model_name, version, model_digest)
    with releases.open_directory(directory, model_name) as server_dir:
        warnings = _end_rollback(layout, server_dir, server_dir.completed_rollback)
        current_format = _current_format(server_dir)  # also raises for a damaged history before anything changes
        artifact = releases.choose_artifact(promoted.bundle, options.format or current_format)
        release = releases.plan_release(promoted, artifact)
        before = server_dir.linked_release(server_dir.current)
        current, damage = _inspect_release(layout, before) if before is not None else (None, None)
        warnings += [describe_forced(release.forced)] if release.forced else []
        if damage is not None:
            warnings.append(
                f"the release that was current until now was damaged: {damage}. Servers may have read it: restart "
                f"them, and find out who can write in {server_dir.releases}"
            )
        warnings += [warning] if warning is not None else []
        if current == release:
            return _keep_current(layout, server_dir, release, warnings)
        tested = _stage_release(layout, server_dir, promoted, release, options.smoke_test, warnings)
        server_dir.activate(release.name)
        deployment = releases.build_deployment(
            release, "deploy", actors.current_actor(layout.root), smoke_test=tested, event=event, damage=damage,
            previous_release=before.name if before else None,
        )  # fmt: skip
        with _report_after_switch(server_dir, release):
            server_dir.append_history(deployment)
            server_dir.prune()
        return _build_result("deployed", deployment, server_dir, warnings)


def _build_result(
    status: DeployStatus, deployment: Deployment, server_dir: DeploymentDirectory, warnings: Iterable[str] = ()
) -> DeployResult:
    return DeployResult(status=status, deployment=deployment, current=server_dir.current, warnings=tuple(warnings))


def _read_entries(layout: ProjectLayout, registry: MlflowModelRegistry) -> list[Promotion]:
    """Read the ledger, with the entries on the server that this project has not fetched."""
    entries = ledger.read_entries(layout.promotions)
    if registry.shared is None:
        return entries
    shared = registry.shared.read()
    return entries + ledger.find_missing(layout.promotions, entries, shared, registry.where) if entries else shared


def _choose_version(
    layout: ProjectLayout, registry: MlflowModelRegistry, version: int | None
) -> tuple[int, str, str | None, str | None]:
    """Return version and model to deploy, the ledger's event that made the version champion, and a warning."""
    entries, file = _read_entries(layout, registry), read_champion(layout.champion)
    if registry.shared is None:
        ledger.check_champion(layout, entries, file)
    elif not entries:
        raise ChampionError(f"{registry.where}: {registry.model_name} has no champion yet; `ratchet promote` makes one")
    if version is None and registry.shared is not None:
        return entries[-1].version, entries[-1].model_digest, entries[-1].id, None
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
    withdrawal = ledger.find_withdrawal(entries, models[version])
    return version, models[version], None, _describe_withdrawal(version, withdrawal) if withdrawal else None


def _describe_withdrawal(version: int, withdrawal: Promotion) -> str:
    why = f" ({withdrawal.reason})" if withdrawal.reason else ""
    return f"version {version} was rolled back on {withdrawal.time} by {withdrawal.actor}{why}"


def _load_promoted(layout: ProjectLayout, model_name: str, version: int, model_digest: str) -> PromotedModel:
    """Check every byte and the signature of a promoted model's folder, and load its bundle."""
    folder = layout.promoted_model(model_digest)
    if not folder.is_dir():
        raise ChampionError(
            f"version {version}: {folder} does not exist. Git does not track mlruns/: copy it from the machine where "
            "that version was promoted"
        )
    manifest = files.verify_sealed(folder, model_store.KIND)
    signed = signature.check_signature(folder, layout, manifest.file_digests)
    model_store.require_match(folder, manifest.file_digests)
    bundle = ModelBundle.load(folder / model_store.BUNDLE)
    if bundle.model_digest != model_digest:
        raise DamagedFileError(f"{folder}: contains model {bundle.model_digest[:12]}, not {model_digest[:12]}")
    _require_approvals(layout, folder, version)
    return PromotedModel(folder, version, model_name, bundle, manifest.files, signed.signer)


def _require_approvals(layout: ProjectLayout, folder: Path, version: int) -> None:
    """Raise SettingsError if an approval in a promoted model's folder does not count any more.

    A machine without the project knows only the key that signed the model, so it cannot judge approvals.
    """
    if not layout.params.exists():
        return
    for approval in approvals.verify_approvals(folder, keys.read_keyring(layout.keyring)):
        if approval.problem is not None:
            raise SettingsError(
                f"version {version}: an approval of its promotion does not count: {approval.problem}. Deploy another "
                "version (--version N), or promote a model with new approvals"
            )


def _current_format(server_dir: DeploymentDirectory) -> str | None:
    """Return the directory's present format; None in a new directory. Raises DamagedFileError for a damaged history."""
    current, history = server_dir.linked_release(server_dir.current), server_dir.read_history()
    if current is None:
        return None
    try:
        return Release.load(current / releases.RECORD).artifact_name
    except (DataError, DamagedFileError):  # the release is written again, in the same format
        return next((entry.artifact_name for entry in reversed(history) if entry.release == current.name), None)


def _inspect_release(layout: ProjectLayout, folder: Path) -> tuple[Release | None, str | None]:
    """Return (release, None) if the release is intact and signed, otherwise (None, damage).

    If only its signer is no longer trusted, return (None, None).
    """
    try:
        return check_release(layout, folder), None
    except (DataError, DamagedFileError) as error:
        return None, str(error)
    except SettingsError:
        return None, None


def _keep_current(
    layout: ProjectLayout, server_dir: DeploymentDirectory, release: Release, warnings: list[str]
) -> DeployResult:
    """Keep the current release. Adds the line to the history if a killed command did not write that line."""
    history = server_dir.read_history()
    if not history or history[-1].release != release.name:
        before = history[-1].release if history else None
        history.append(
            releases.build_deployment(release, "deploy", actors.current_actor(layout.root), previous_release=before)
        )
        server_dir.append_history(history[-1])
    server_dir.prune()
    return _build_result("unchanged", history[-1], server_dir, warnings)


def _stage_release(
    layout: ProjectLayout,
    server_dir: DeploymentDirectory,
    promoted: PromotedModel,
    release: Release,
    smoke_test: bool,
    warnings: list[str],
) -> str | None:
    """Write the release and test it; returns the result of the smoke test. A release that fails the test is removed.

    An existing release of this name is used only if it is intact and signed. A damaged release adds to `warnings`.
    """
    folder = server_dir.releases / release.name
    existing, damage = _inspect_release(layout, folder) if folder.exists() else (None, None)
    if damage is not None and folder != server_dir.linked_release(server_dir.current):
        warnings.append(f"an earlier release of this name is replaced: {damage}")
    if existing != release:
        files.require_space(server_dir.releases, releases.release_size_bytes(promoted, release))
        releases.stage_release(promoted, release, folder)
    if not smoke_test:
        return None
    try:
        artifact = releases.choose_artifact(promoted.bundle, release.artifact_name)
        return smoke_tests.run_smoke_test(folder, artifact, promoted.has_dated_prompts)
    except RatchetError as error:
        if folder not in map(server_dir.linked_release, (server_dir.current, server_dir.previous)):
            files.remove_sealed(folder)
        raise type(error)("\n  ".join([str(error), *(f"warning: {text}" for text in warnings)])) from error


def _roll_back(layout: ProjectLayout, registry: MlflowModelRegistry, directory: Path) -> DeployResult:
    """Check every byte of the previous release against its signature, then exchange current and previous."""
    with releases.open_directory(directory, registry.model_name, may_create=False) as server_dir:
        if server_dir.completed_rollback is not None:
            warnings = _end_rollback(layout, server_dir, server_dir.completed_rollback)
            return _build_result("rollback_finished", server_dir.completed_rollback, server_dir, warnings)
        current, previous = map(server_dir.linked_release, (server_dir.current, server_dir.previous))
        if current is None or previous is None or current == previous:
            raise ChampionError(
                f"{server_dir.root}: there is no release before the current one; "
                "name a version: `ratchet deploy DIR --version N`"
            )
        release = check_release(layout, previous)
        warnings = [describe_forced(release.forced)] if release.forced else []
        try:
            if (folder := layout.promoted_model(release.model_digest)).is_dir():
                _require_approvals(layout, folder, release.version)
            withdrawal = ledger.find_withdrawal(_read_entries(layout, registry), release.model_digest)
        except (
            ChampionError,
            DamagedFileError,
            DataError,
            TrackingError,
        ) as error:  # an emergency must not wait for a server
            withdrawal = None
            warnings.append(str(error))
        if withdrawal is not None:
            raise ChampionError(
                f"{_describe_withdrawal(release.version, withdrawal)}; to deploy it anyway: --version {release.version}"
            )
        deployment = releases.build_deployment(
            release, "rollback", actors.current_actor(layout.root), previous_release=current.name
        )
        server_dir.roll_back(deployment)
        with _report_after_switch(server_dir, release):
            server_dir.complete_rollback()
            warnings += _end_rollback(layout, server_dir, deployment)
        return _build_result("rolled_back", deployment, server_dir, warnings)


def _end_rollback(layout: ProjectLayout, server_dir: DeploymentDirectory, rollback: Deployment | None) -> list[str]:
    """Add a rollback to the project's list and remove its record, in this order: without its record, a repeated command
    would go back to the release before. Return warnings."""
    if rollback is None:
        return []
    warnings = _record(layout, server_dir.root, rollback)
    server_dir.forget_rollback()
    return warnings


@contextmanager
def _report_after_switch(server_dir: DeploymentDirectory, release: Release) -> Iterator[None]:
    """Run the steps after the link has moved. If the disk is full, the error reports that the release is current."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            f"{server_dir.current}: points to {release.name} now, but {server_dir.root} cannot be written "
            f"({error.strerror}); free some space and run the command again: it adds the line to "
            f"{server_dir.history_path.name} and changes nothing else"
        ) from None


def check_release(layout: ProjectLayout, folder: Path) -> Release:
    """Require that a release is complete and that a trusted key signed every byte. Returns its record.

    Raises:
        DamagedFileError: a byte differs, or a file is missing; the message names the file.
        SettingsError: the project does not trust the signer.
    """
    release = releases.verify_release(folder)
    signed = signature.require_trusted(signature.read_signature(folder, keys.read_keyring(layout.keyring)))
    releases.require_signed(folder, release, signed.files)
    return release


# `--watch`: follow the champion.


def watch_champion(
    project: Project,
    directory: Path,
    options: DeployOptions,
    on_deploy: Callable[[DeployResult], None],
    on_problem: Callable[[str], None],
) -> NoReturn:
    """Deploy the champion, then every new champion, until KeyboardInterrupt.

    After a failure the current release stays. If the disk is full or another process holds the lock, the next attempt
    follows after a minute; after other failures, at the next promotion.

    Args:
        project: the project.
        directory: where to deploy.
        options: options; `version` and `rollback` must not be set.
        on_deploy: receives the result of each deployment.
        on_problem: receives a description of each failure, once.

    Raises:
        SettingsError: `version` or `rollback` is set.
    """
    if options.rollback or options.version is not None:
        raise SettingsError("--watch follows the champion: leave out --version and --rollback")
    registry = MlflowModelRegistry.open(project.layout, project.settings)
    watcher = _ChampionWatcher(project, registry, directory, options, on_deploy, on_problem)
    while True:
        watcher.poll()
        time.sleep(POLL_INTERVAL_S if registry.server is None else SERVER_POLL_INTERVAL_S)


@dataclass
class _ChampionWatcher:
    """Deploys whenever ledger or champion file have changed, and reports each result once."""

    project: Project
    registry: MlflowModelRegistry
    directory: Path
    options: DeployOptions
    on_deploy: Callable[[DeployResult], None]
    on_problem: Callable[[str], None]
    _handled_state: object = None
    """State of ledger and champion file at the last deployment."""
    _retry_s: float | None = None
    """Time (time.monotonic()) of the next attempt even if nothing changes; None: no attempt is planned."""
    _disagree_since_s: float | None = None
    """Time (time.monotonic()) since which ledger and champion file disagree; None: they agree."""
    _last_report: DeployResult | str | None = None

    def poll(self) -> None:
        """Deploy if ledger or champion file have changed, or if an attempt is due."""
        try:
            state = self._read_state()
        except (TrackingError, DamagedFileError, ChampionError) as error:
            self._report(f"not deployed: {error}")
            return
        must_retry = self._retry_s is not None and time.monotonic() >= self._retry_s
        if state == self._handled_state and not must_retry and self._disagree_since_s is None:
            return
        try:
            if self.registry.shared is None:
                layout = self.project.layout
                entries = ledger.read_entries(layout.promotions)
                ledger.check_champion(layout, entries, read_champion(layout.champion))
        except (
            ChampionError,
            DataError,
            DamagedFileError,
            OSError,
        ) as error:  # they differ between two steps of a promotion
            now_s = time.monotonic()
            if self._disagree_since_s is None:
                self._disagree_since_s = now_s
            if now_s - self._disagree_since_s >= DISAGREEMENT_TOLERANCE_S:
                self._report(f"not deployed: {error}")
            return
        self._handled_state, self._retry_s, self._disagree_since_s = state, None, None
        try:
            self._report(deploy(self.project, self.directory, self.options))
        except (LockHeldError, StorageError, OSError) as error:
            self._retry_s = time.monotonic() + RETRY_AFTER_S
            self._report(f"not deployed, next attempt in {RETRY_AFTER_S:g} s: {error}")
        except RatchetError as error:
            if self._is_unchanged(state):  # otherwise the next poll deploys what has changed meanwhile
                self._report(f"not deployed, the current release stays: {error}")

    def _is_unchanged(self, state: object) -> bool:
        try:
            return self._read_state() == state
        except TrackingError:
            self._retry_s = time.monotonic() + RETRY_AFTER_S
            return True

    def _read_state(self) -> object:
        """Return a value that changes with every promotion."""
        if self.registry.shared is not None:
            return [entry.digest for entry in self.registry.shared.read()]
        return tuple(map(_file_state, (self.project.layout.promotions, self.project.layout.champion)))

    def _report(self, event: DeployResult | str) -> None:
        """Report an event unless it repeats the last one: a state that changes meanwhile is deployed twice."""
        last = self._last_report
        if isinstance(event, DeployResult) and isinstance(last, DeployResult) and event.status == "unchanged":
            is_repeated = (event.deployment, event.warnings) == (last.deployment, last.warnings)
        else:
            is_repeated = event == last
        if is_repeated:
            return
        self._last_report = event
        if isinstance(event, str):
            self.on_problem(event)
        else:
            self.on_deploy(event)


def _file_state(path: Path) -> object:
    """Return a value that changes when the file is replaced; the file is never edited in place."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
