"""Manages releases of promoted models, and the directory into which they are deployed.

A release is one format of one promoted model with the files that its server needs, sealed:

    gguf/model-q8_0.gguf (or hf/, onnx/int8/)  Modelfile  SERVE.md  README.md  bundle.json  sbom.json  [forced.json]
    model.sig  release.json  manifest.json

All files except the last two are copies from the promoted model's folder, which was signed as a whole. `model.sig` is
included, so that each file can be compared with the signed one on any machine with the public key. Files are copied,
not linked, so that write access to a server's directory gives no access to the registry.

A deployment directory:

    deployment.json     the model that it serves
    deployments.jsonl   history: one JSON line per deployment
    releases/           sealed directories: the last three, and those that a link names; foreign files are not touched
    current, previous   links to releases; a server reads `current`
    .rollback.json      only until a rollback is recorded everywhere: its line of deployments.jsonl

A link is replaced atomically, after its target is complete and durable. `previous` is set before `current`. After a
crash in between, both links name the old release, and repeating the command completes the deployment. A rollback
exchanges the links, and is recorded in .rollback.json before it starts. After a crash, the next command finds this
record and completes the rollback, so repeating the command does not undo the exchange.
"""

import hashlib
import json
import os
import re
import socket
from collections.abc import Callable, Collection, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ratchet.config.units import utc_timestamp
from ratchet.errors import DamagedFileError, SettingsError, StorageError, first_line
from ratchet.models.base_model import DATE_FUNCTION
from ratchet.registry.deployment import server_files
from ratchet.registry.deployment.model_card import MODEL_CARD
from ratchet.registry.model_store import BUNDLE, FORCED, artifact_digest, artifact_path
from ratchet.registry.signature import SIGNATURE
from ratchet.storage import digests, files
from ratchet.storage.files import FileLock
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.progress import count_bytes
from ratchet.storage.records.base import Record, read_lines, to_json_line, write_lines
from ratchet.storage.records.export import ExportArtifact, ModelBundle
from ratchet.storage.records.gate import ForcedPromotion

KIND = "release"
RECORD = "release.json"
SBOM = "sbom.json"
NAME = re.compile(rf"\d+-[0-9a-f]{{{digests.SHORT}}}-(hf|gguf-\w+|bitsandbytes-\w+|onnx-\w+)")
"""Directory name of a release."""
_UNSIGNED = (RECORD, SIGNATURE)
KEPT_RELEASES = 3
"""Number of the most recent releases that stay on disk, in addition to releases that a link names."""
LOCK_WAIT_S = 60.0
OWNER = "deployment.json"
"""File with the name of the model that a deployment directory serves."""
LOCK = ".deploy.lock"


class Release(Record):
    """release.json: content of the directory, and the origin of each file."""

    version: int
    """Version of the registered model."""
    model_name: str
    model_digest: str
    artifact_name: str
    """Name of the artifact in bundle.json, such as `gguf/q8_0`."""
    artifact_digest: str
    signature: str
    """SHA-256 of model.sig."""
    signed_by: str
    """Fingerprint of the key, or the identity."""
    forced: ForcedPromotion | None = None
    """The forced promotion, as in the signed forced.json; None: not forced."""
    origins: dict[str, str]
    """For each file, its name in the promoted model's folder."""

    @property
    def name(self) -> str:
        """Name of the release's directory."""
        return f"{self.version}-{self.model_digest[: digests.SHORT]}-{server_files.format_slug(self.artifact_name)}"

    def __str__(self) -> str:
        """Describe the release for the user."""
        return f"version {self.version} (model {self.model_digest[: digests.SHORT]}, {self.artifact_name})"


@dataclass(frozen=True)
class PromotedModel:
    """The folder of a promoted model, whose files and signature have been verified."""

    folder: Path
    version: int
    model_name: str
    bundle: ModelBundle
    files: Mapping[str, files.Entry]
    signed_by: str

    @property
    def forced(self) -> ForcedPromotion | None:
        """Content of forced.json; None if the promotion was not forced."""
        return ForcedPromotion.load(self.folder / FORCED) if FORCED in self.files else None

    @property
    def has_dated_prompts(self) -> bool:
        """Whether the chat template writes the current date, so that prompts change every day."""
        template = self.folder / "hf" / "chat_template.jinja"
        return template.is_file() and DATE_FUNCTION in template.read_text(encoding="utf-8")


def choose_artifact(bundle: ModelBundle, format_: str | None) -> ExportArtifact:
    """Choose a format by its name, or by its kind if there is one format of this kind.

    Without a name, choose the first GGUF file, because its server needs the least; without a GGUF file, choose the
    first format, which is the merged model.

    Raises:
        SettingsError: the model has no such format; the message lists its formats.
    """
    available = ", ".join(artifact.name for artifact in bundle.artifacts)
    if not available:
        raise SettingsError(
            f"model {bundle.model_digest[: digests.SHORT]}: bundle.json lists no formats, because an earlier version "
            "exported it; run `dvc repro -f export`, and promote it again"
        )
    if format_ is None:
        return next((artifact for artifact in bundle.artifacts if artifact.kind == "gguf"), bundle.artifacts[0])
    matching = [artifact for artifact in bundle.artifacts if format_ in (artifact.name, artifact.kind)]
    if not matching:
        raise SettingsError(
            f"--format {format_}: model {bundle.model_digest[: digests.SHORT]} has {available}; choose one of them, or "
            "add the format to section export of params.yaml, run `dvc repro`, and promote"
        )
    if len(matching) > 1:
        names = ", ".join(artifact.name for artifact in matching)
        raise SettingsError(f"--format {format_}: matches {names}; choose one")
    return matching[0]


def plan_release(promoted: PromotedModel, artifact: ExportArtifact) -> Release:
    """Plan the release of a format. Raises DamagedFileError if the promoted folder lacks files for its server."""
    origins = _choose_files(promoted.files.keys(), artifact)
    if server_files.GUIDE not in origins:
        raise DamagedFileError(
            f"{promoted.folder / _name_server_folder(artifact)}: folder not found, because an earlier version promoted "
            "the model; promote it again"
        )
    return Release(
        version=promoted.version, model_name=promoted.model_name, model_digest=promoted.bundle.model_digest,
        artifact_name=artifact.name, artifact_digest=artifact.digest, signature=promoted.files[SIGNATURE][0],
        signed_by=promoted.signed_by, forced=promoted.forced, origins=origins,
    )  # fmt: skip


def _choose_files(promoted: Collection[str], artifact: ExportArtifact) -> dict[str, str]:
    """Return the files of the release of a format, each with its name in the promoted model's folder.

    Args:
        promoted: names of all files in that folder.
        artifact: the format.
    """
    path, served = artifact_path(artifact), _name_server_folder(artifact)
    origins = {name: name for name in promoted if name == path or name.startswith(f"{path}/")}
    origins |= {name.removeprefix(served): name for name in promoted if name.startswith(served)}
    # Folders from earlier versions have no card of all formats; the card of the Hugging Face format would be wrong.
    origins |= {name: name for name in (MODEL_CARD, BUNDLE, SBOM, FORCED, SIGNATURE) if name in promoted}
    return dict(sorted(origins.items()))


def _name_server_folder(artifact: ExportArtifact) -> str:
    """Return the folder of a promoted model with the files for the format's server, with a slash at the end."""
    return f"{server_files.FOLDER}/{server_files.format_slug(artifact.name)}/"


def release_size_bytes(promoted: PromotedModel, release: Release) -> int:
    """Return the size of the files that `stage_release` writes."""
    return sum(promoted.files[origin][1] for origin in release.origins.values())


def stage_release(promoted: PromotedModel, release: Release, target: Path) -> None:
    """Write and seal a release, which replaces an existing release with this name.

    Raises:
        DamagedFileError: a file of the promoted model changed since it was verified.
        OSError: the disk is full; no partial release remains.
    """
    known: dict[str, files.Entry] = {}
    size_bytes = release_size_bytes(promoted, release)
    with files.sealed_directory(target, KIND, known) as scratch, count_bytes("release copied", size_bytes) as add_bytes:
        for name, origin in release.origins.items():
            files.make_directory((scratch / name).parent)
            _copy(promoted.folder / origin, scratch / name, promoted.files[origin], add_bytes)
            known[name] = promoted.files[origin]
        release.save(scratch / RECORD)


def _copy(source: Path, target: Path, expected: files.Entry, on_bytes: Callable[[int], None]) -> None:
    hasher = hashlib.sha256()

    def hash_blocks() -> Iterator[list[bytes]]:
        for blocks in files.read_blocks(source, on_bytes):
            hasher.update(blocks[0])
            yield blocks

    files.write_blocks(target, hash_blocks())
    if hasher.hexdigest() != expected[0]:
        raise DamagedFileError(f"{source}: changed while it was copied; repeat the command, and check the disk")


def is_release(folder: Path, known: Container[str]) -> bool:
    """Return whether a directory is a release: it has a release's name, and the history or its manifest confirms it.

    Args:
        folder: the directory.
        known: names of releases in the history.
    """
    if folder.is_symlink() or not folder.is_dir() or NAME.fullmatch(folder.name) is None:
        return False
    try:
        return folder.name in known or files.read_manifest(folder).kind == KIND
    except DamagedFileError:
        return False


def verify_release(folder: Path) -> Release:
    """Verify every byte of a release and return its record. Raises DamagedFileError with the file that differs.

    Links are refused: what they point to could change later. `folder` may be the link `current` or `previous`.
    """
    _refuse_links(folder)
    manifest = files.verify_sealed(folder, KIND)
    release = Release.load(folder / RECORD)
    if manifest.files.keys() - {RECORD} != release.origins.keys():
        raise DamagedFileError(f"{folder / RECORD}: does not list the files in its folder; deploy the version again")
    return release


def _refuse_links(folder: Path) -> None:
    """Raise DamagedFileError if a release, or anything in it, is a link or a special file."""
    is_link = folder.is_symlink()
    root = folder.parent / folder.readlink() if is_link and NAME.fullmatch(folder.name) is None else folder
    if not root.is_symlink() and not root.exists():
        raise DamagedFileError(f"{root}: not found; deploy the version again")
    for path in (root, *sorted(folder.rglob("*"))):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            found = "a link" if path.is_symlink() else "a special file"
            raise DamagedFileError(
                f"{path}: found {found}; a release has only files and folders; remove it, and deploy the version again"
            )


def require_signed(folder: Path, release: Release, signed: Mapping[str, str]) -> None:
    """Compare a whole release with the signed files.

    The release must have every file that a deployment of its format copies, each at its place. The signed statement
    decides that; release.json, which is not signed, must agree.

    Args:
        folder: the release.
        release: its record.
        signed: SHA-256 of each file of the promoted model, from the signature (model.sig in `folder`).

    Raises:
        DamagedFileError: a file is missing, differs from the signed file or was not signed, or a forced promotion is
            not recorded.
    """
    actual = files.read_manifest(folder).files
    if actual.get(SIGNATURE, ("", 0))[0] != release.signature:
        raise DamagedFileError(f"{folder / SIGNATURE}: differs from its digest in {RECORD}; deploy the version again")
    for name, (sha, _) in actual.items():
        if name not in _UNSIGNED and signed.get(release.origins[name]) != sha:
            raise DamagedFileError(f"{folder / name}: differs from the signed file; deploy the version again")
    forced = ForcedPromotion.load(folder / FORCED) if release.origins.get(FORCED) == FORCED else None
    if release.forced != forced or (FORCED in signed and forced is None):
        raise DamagedFileError(
            f"{folder / RECORD}: does not record that the promotion was forced; deploy the version again"
        )
    bundle = ModelBundle.load(folder / BUNDLE)
    artifact = bundle.artifact(release.artifact_name)
    expected = (release.model_digest, release.artifact_digest)
    if artifact is None or (bundle.model_digest, artifact.digest) != expected:
        raise DamagedFileError(f"{folder / RECORD}: names another model than {BUNDLE}; deploy the version again")
    expected_files = _choose_files({*signed, SIGNATURE}, artifact)
    for name in sorted(expected_files.keys() | release.origins.keys()):
        if release.origins.get(name) == expected_files.get(name):
            continue
        if name not in release.origins:
            problem = f"missing, although format {artifact.name} has it"
        elif name not in expected_files:
            problem = f"does not belong to format {artifact.name}"
        else:
            problem = f"is a copy of {release.origins[name]}; expected {expected_files[name]}"
        raise DamagedFileError(f"{folder / name}: {problem}; deploy the version again")
    model_files = {name: sha for name, (sha, _) in actual.items()}
    if artifact_digest(artifact, model_files) != artifact.digest:
        raise DamagedFileError(
            f"{folder / artifact_path(artifact)}: differs from format {artifact.name} in {BUNDLE}; deploy the version "
            "again"
        )


# ----------------------------------------------------------------------------------------------- deployment directory


class DeploymentOwner(Record):
    """deployment.json: the model that a directory serves."""

    model_name: str
    """Name of the registered model; a directory serves only one model."""


class Deployment(Record):
    """A line of deployments.jsonl."""

    time: str
    """UTC, ISO 8601."""
    action: Literal["deploy", "rollback"]
    actor: str
    release: str
    """Directory name of the release."""
    version: int
    model_digest: str
    artifact_name: str
    previous_release: str | None
    """Release that was current before the deployment."""
    smoke_test: str | None
    """Result of the smoke test; None: not run."""
    event: str | None = None
    """Id of the ledger entry of the promotion that started the deployment."""
    forced: ForcedPromotion | None = None
    """The forced promotion of the model; None: not forced."""
    damage: str | None = None
    """Damage of the release that was current before the deployment."""


class RecordedDeployment(Record):
    """A line of experiments/deployments.jsonl, so that the project names its deployment directories."""

    directory: Path
    host: str
    deployment: Deployment


def read_recorded_deployments(layout: ProjectLayout) -> list[RecordedDeployment]:
    """Read the deployments from a project, oldest first. Raises DamagedFileError for an invalid line."""
    path = layout.deployments
    try:
        return [RecordedDeployment.model_validate(row) for row in read_lines(path)] if path.exists() else []
    except ValueError as error:
        text = " ".join(str(error).splitlines()[:2])
        raise DamagedFileError(f"{path}: not a list of deployments ({text}); restore it from git") from None


def record_deployment(layout: ProjectLayout, directory: Path, deployment: Deployment) -> None:
    """Add a deployment to the project's list, unless the list has it. Raises the errors of the list and of its disk."""
    line = RecordedDeployment(directory=directory, host=socket.gethostname(), deployment=deployment)
    with FileLock(layout.stage_lock("deployments"), f"{layout.deployments}").acquire(wait_s=LOCK_WAIT_S):
        earlier = read_recorded_deployments(layout)
        if line not in earlier:
            write_lines(layout.deployments, [one.model_dump(mode="json") for one in (*earlier, line)])


@dataclass(frozen=True)
class DeploymentDirectory:
    """A deployment directory whose lock is held."""

    root: Path
    completed_rollback: Deployment | None = None
    """An interrupted rollback that was completed when the directory was opened."""

    @property
    def releases(self) -> Path:
        """Directory of all releases."""
        return self.root / "releases"

    @property
    def current(self) -> Path:
        """Link to the release that servers read."""
        return self.root / "current"

    @property
    def previous(self) -> Path:
        """Link to the release that was current before the current one."""
        return self.root / "previous"

    @property
    def history_path(self) -> Path:
        """File with all deployments."""
        return self.root / "deployments.jsonl"

    @property
    def intent_path(self) -> Path:
        """File that records an exchange in progress."""
        return self.root / ".rollback.json"

    def linked_release(self, link: Path) -> Path | None:
        """Return the release that a link names; None without a link. Raises DamagedFileError for another target."""
        if not os.path.lexists(link):
            return None
        target = str(link.readlink()) if link.is_symlink() else ""
        folder, _, name = target.partition("/")
        if folder != self.releases.name or not name or "/" in name or name.startswith("."):
            found = f"a link to {target}" if target else "a file or directory"
            raise DamagedFileError(f"{link}: found {found}; expected a link to a release; remove it, and deploy again")
        return self.releases / name

    def activate(self, name: str) -> None:
        """Make a release current, and the current release previous."""
        current = self.linked_release(self.current)
        if current is not None and current.name != name:
            self._set_link(self.previous, current.name)
        self._set_link(self.current, name)

    def roll_back(self, entry: Deployment) -> None:
        """Exchange current and previous. If the file system has no atomic exchange, both briefly name one release.

        Args:
            entry: the line of the history from `build_deployment`; `complete_rollback` appends it.
        """
        with convert_os_errors(self.root):
            files.write_atomic(self.intent_path, to_json_line(entry.model_dump(mode="json")))
        current, previous = self.linked_release(self.current), self.linked_release(self.previous)
        if current is None or previous is None:
            raise RuntimeError("current and previous must exist")
        files.before("rename", self.current)
        if files.exchange_names(self.current, self.previous):
            files.fsync_directory(self.root)
            return
        self._set_link(self.current, previous.name)
        self._set_link(self.previous, current.name)

    def complete_rollback(self) -> Deployment | None:
        """Complete a recorded exchange, and keep its record until `forget_rollback`.

        Returns its line of the history; None if there is none, or if it had not begun.
        """
        if not self.intent_path.exists():
            return None
        try:
            entry = Deployment.model_validate_json(content := self.intent_path.read_bytes())
        except ValueError as error:
            raise DamagedFileError(
                f"{self.intent_path}: not a rollback record ({first_line(error)}); remove it"
            ) from None
        current, previous = self.linked_release(self.current), self.linked_release(self.previous)
        if current is None or current.name != entry.release:  # the exchange had not begun
            self.forget_rollback()
            return None
        expected = entry.previous_release
        if expected is not None and (previous is None or previous.name != expected):
            self._set_link(self.previous, expected)
        if not (self.history_path.exists() and self.history_path.read_bytes().endswith(content)):
            self.append_history(entry)
        return entry

    def forget_rollback(self) -> None:
        """Remove the record of an exchange, so that the next rollback is another one."""
        files.before("unlink", self.intent_path)
        self.intent_path.unlink()

    def _set_link(self, link: Path, name: str) -> None:
        files.before("rename", link)
        partial = link.with_name(f"{files.PARTIAL}{link.name}-{os.getpid()}")
        files.point_symlink(link, f"{self.releases.name}/{name}", partial)
        files.fsync_directory(self.root)

    def read_history(self) -> list[Deployment]:
        """Read all deployments, oldest first. Raises DamagedFileError for an invalid line."""
        entries = []
        lines = self.history_path.read_bytes().splitlines() if self.history_path.exists() else []
        for number, content in enumerate(lines, start=1):
            try:
                entries.append(Deployment.model_validate(json.loads(content)))
            except ValueError as error:
                reason = str(error).splitlines()[0]
                raise DamagedFileError(
                    f"{self.history_path}:{number}: not a deployment ({reason}); remove that line"
                ) from None
        return entries

    def append_history(self, entry: Deployment) -> None:
        """Append a line to the history."""
        text = self.history_path.read_bytes() if self.history_path.exists() else b""
        text += b"" if text.endswith(b"\n") or not text else b"\n"  # a user may have edited the file
        files.write_atomic(self.history_path, text + to_json_line(entry.model_dump(mode="json")).encode())

    def prune(self) -> list[str]:
        """Remove releases that are neither linked nor among the most recent ones, and return their names."""
        deployed = list(dict.fromkeys(entry.release for entry in reversed(self.read_history())))
        releases = {path.name: path for path in self.releases.iterdir() if is_release(path, deployed)}
        linked = [path.name for link in (self.current, self.previous) if (path := self.linked_release(link))]
        kept = {*linked, *[name for name in deployed if name in releases][:KEPT_RELEASES]}
        removed = sorted(releases.keys() - kept)
        for name in removed:
            files.remove_sealed(releases[name])
        return removed


def build_deployment(
    release: Release, action: Literal["deploy", "rollback"], actor: str, **details: str | None
) -> Deployment:
    """Build a line of the history for a release that becomes current.

    Args:
        release: the release.
        action: the action.
        actor: person or service that started it.
        details: `previous_release`, `smoke_test`, `event` and `damage`; see `Deployment`.
    """
    return Deployment(
        time=utc_timestamp(), action=action, actor=actor, release=release.name, version=release.version,
        model_digest=release.model_digest, artifact_name=release.artifact_name,
        previous_release=details.get("previous_release"), smoke_test=details.get("smoke_test"),
        event=details.get("event"), damage=details.get("damage"), forced=release.forced,
    )  # fmt: skip


@contextmanager
def open_directory(directory: Path, model_name: str, may_create: bool = True) -> Iterator[DeploymentDirectory]:
    """Lock a deployment directory, creating it if necessary, and clean up after interrupted commands.

    Args:
        directory: path from the user.
        model_name: name of the registered model.
        may_create: whether an empty or missing directory becomes a deployment directory.

    Raises:
        SettingsError: the path is not a directory, or the directory contains other files or serves another model.
        DamagedFileError: deployment.json cannot be read.
        LockHeldError: another process deploys into the directory.
        StorageError: the directory cannot be created or written.
    """
    try:  # links are resolved only if the path contains `..`
        root = directory.resolve() if ".." in directory.parts else directory.absolute()
    except (OSError, RuntimeError) as error:  # a cycle of links
        raise StorageError(f"{directory}: {first_line(error)}; choose another directory") from None
    lock = FileLock(root / LOCK, f"deployment directory {root}")
    with convert_os_errors(root):
        _require_directory(root, model_name, may_create)
        files.make_directory(root)
        lock.acquire(wait_s=LOCK_WAIT_S)
    with lock:
        with convert_os_errors(root):
            deployment = DeploymentDirectory(root)
            _require_directory(root, model_name, may_create)
            files.remove_partials(root)
            files.make_directory(deployment.releases)
            files.remove_partials(deployment.releases)
            if not (root / OWNER).exists():
                DeploymentOwner(model_name=model_name).save(root / OWNER)
            deployment = DeploymentDirectory(root, deployment.complete_rollback())
        yield deployment


@contextmanager
def convert_os_errors(root: Path) -> Iterator[None]:
    """Convert an OSError within the context to a StorageError about this directory."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename and str(error.filename) != str(root) else ""
        raise StorageError(
            f"{root}: cannot be created or written ({where}{error.strerror}); fix this and repeat the command, or "
            "choose another directory"
        ) from None


def _require_directory(root: Path, model_name: str, may_create: bool) -> None:
    """Raise SettingsError unless this is the deployment directory of this model, or may become it."""
    if root.exists() and not root.is_dir():
        raise SettingsError(f"{root}: found a file; expected a directory")
    if (root / OWNER).exists():
        try:
            owner = DeploymentOwner.model_validate_json((root / OWNER).read_bytes()).model_name
        except ValueError:
            raise DamagedFileError(
                f"{root / OWNER}: cannot be read, so the deployed model is unknown; if it is {model_name}, write "
                f"{json.dumps({'format': 1, 'model_name': model_name})} into the file, otherwise choose another "
                "directory"
            ) from None
        if owner != model_name:
            raise SettingsError(
                f"{root}: serves model {owner}, but this project's model is {model_name} (promote.model_name); choose "
                "another directory"
            )
        return
    releases = DeploymentDirectory(root).releases
    paths = [path for folder in (root, releases) if folder.is_dir() for path in folder.iterdir()]
    foreign = sorted(
        path.relative_to(root).as_posix()
        for path in paths
        if path != releases and path != root / LOCK and not path.name.startswith(files.PARTIAL)
    )
    if foreign:
        raise SettingsError(f"{root}: found {foreign[0]} and no deployment; choose a new or empty directory")
    if not may_create:
        raise SettingsError(f"{root}: nothing is deployed in it; run `ratchet deploy {root}`")
