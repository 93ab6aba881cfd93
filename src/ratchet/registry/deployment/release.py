"""A release: one form of one promoted model with what its server needs, sealed, in a directory that servers read.

    gguf/model-q8_0.gguf (or hf/, onnx/int8/)  Modelfile  SERVE.md  README.md  bundle.json  sbom.json  [forced.json]
    model.sig  release.json  manifest.json

Every file but the last two is a copy of one in the promoted model's folder, which was signed as a whole; `model.sig`
comes along, so that each can be compared with what was signed, here and on any machine that has the public key. Copies,
not links: whoever may write in the directory of a server must not be able to write into the registry.
"""

import hashlib
import json
import os
import re
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from ratchet.errors import DamagedFileError, SettingsError, StorageError, first_line
from ratchet.registry.bundle_files import BUNDLE, artifact_path
from ratchet.registry.deployment import server_files
from ratchet.registry.deployment.model_card import CARD
from ratchet.registry.signing.signature import SIGNATURE
from ratchet.storage import digests, disk, files
from ratchet.storage.locks import FileLock
from ratchet.storage.records.base import Record, to_json_line
from ratchet.storage.records.export import ExportArtifact, ModelBundle
from ratchet.storage.records.gate import ForcedPromotion

KIND = "release"
RECORD = "release.json"
SBOM = "sbom.json"
FORCED = "forced.json"
"""In the folder of a model that was promoted against the verdict: by whom, and why."""
_BLOCK_BYTES = 4 * 2**20
_NOT_SIGNED = (RECORD, SIGNATURE)
NAME = re.compile(rf"\d+-[0-9a-f]{{{digests.SHORT}}}-(hf|gguf-\w+|onnx-\w+)")
"""Of a release, as a directory."""


class Release(Record):
    """release.json: what the directory holds, and where each file comes from."""

    version: int
    """Of the registered model."""
    model_name: str
    model_digest: str
    form: str
    """`gguf/q8_0`: the artifact's name in bundle.json."""
    artifact_digest: str
    signature: str
    """SHA-256 of model.sig."""
    signed_by: str
    """Fingerprint of the key, or the identity."""
    forced: ForcedPromotion | None = None
    """Who promoted the model against the verdict: forced.json, which is signed."""
    origins: dict[str, str]
    """Name in the promoted model's folder, of each file here."""

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"{self.version}-{self.model_digest[: digests.SHORT]}-{server_files.format_slug(self.form)}"

    def __str__(self) -> str:
        """For people."""
        return f"version {self.version} (model {self.model_digest[: digests.SHORT]}, {self.form})"


@dataclass(frozen=True)
class PromotedModel:
    """A promoted model's folder, every byte of it verified, and its signature too."""

    folder: Path
    version: int
    model_name: str
    bundle: ModelBundle
    files: Mapping[str, files.Entry]
    signed_by: str

    @property
    def forced(self) -> ForcedPromotion | None:
        """What forced.json says, if it is there."""
        return ForcedPromotion.load(self.folder / FORCED) if FORCED in self.files else None

    @property
    def dated(self) -> bool:
        """Whether its chat template writes the date, so that its prompts change from day to day."""
        template = self.folder / "hf" / "chat_template.jinja"
        return template.is_file() and "strftime_now" in template.read_text(encoding="utf-8")


def choose_artifact(bundle: ModelBundle, wanted: str | None) -> ExportArtifact:
    """The form that the caller asks for: by its name, or by its kind if there is one of it.

    Without `wanted` it is the form that is best for most: see `_default_artifact`.

    Raises SettingsError naming those that there are.
    """
    known = ", ".join(one.name for one in bundle.artifacts)
    if not known:
        raise SettingsError(
            f"model {bundle.model_digest[: digests.SHORT]} was exported by an earlier version, without a record of its "
            "forms; `dvc repro -f export`, and promote it again"
        )
    if wanted is None:
        return _default_artifact(bundle)
    found = [one for one in bundle.artifacts if wanted in (one.name, one.kind)]
    if not found:
        raise SettingsError(
            f"--format {wanted}: model {bundle.model_digest[: digests.SHORT]} has {known}; choose one of them, or "
            "add it to section export of params.yaml, `dvc repro`, and promote"
        )
    if len(found) > 1:
        raise SettingsError(f"--format {wanted}: there are {', '.join(one.name for one in found)}; name one of them")
    return found[0]


def _default_artifact(bundle: ModelBundle) -> ExportArtifact:
    """The first GGUF file, which needs the least to run; without one, the merged model."""
    return next((one for one in bundle.artifacts if one.kind == "gguf"), bundle.artifacts[0])


def plan_release(promoted: PromotedModel, artifact: ExportArtifact) -> Release:
    """The release of this form. Raises DamagedFileError when the promoted folder lacks what its server needs."""
    where = artifact_path(artifact)
    own = [name for name in promoted.files if name == where or name.startswith(f"{where}/")]
    served = f"{server_files.FOLDER}/{server_files.format_slug(artifact.name)}/"
    origins = {name: name for name in own}
    origins |= {name.removeprefix(served): name for name in promoted.files if name.startswith(served)}
    if server_files.GUIDE not in origins:
        raise DamagedFileError(
            f"{promoted.folder / served}: not there; the model was promoted by an earlier version: promote it again"
        )
    # A folder of an earlier version has no card of all forms; that of the Hugging Face form would be wrong for others.
    origins |= {name: name for name in (CARD, BUNDLE, SBOM, FORCED, SIGNATURE) if name in promoted.files}
    return Release(
        version=promoted.version, model_name=promoted.model_name, model_digest=promoted.bundle.model_digest,
        form=artifact.name, artifact_digest=artifact.digest, signature=promoted.files[SIGNATURE][0],
        signed_by=promoted.signed_by, forced=promoted.forced, origins=dict(sorted(origins.items())),
    )  # fmt: skip


def release_size_bytes(promoted: PromotedModel, release: Release) -> int:
    """Of the files that `stage_release` will write."""
    return sum(promoted.files[origin][1] for origin in release.origins.values())


def stage_release(promoted: PromotedModel, release: Release, target: Path) -> None:
    """Write and seal a release; what is there under the name is replaced.

    Raises:
        DamagedFileError: a file of the promoted model changed since it was verified.
        OSError: the disk takes no more; nothing is left behind.
    """
    known: dict[str, files.Entry] = {}
    with files.sealed_directory(target, KIND, known) as scratch:
        for name, origin in release.origins.items():
            files.make_directory((scratch / name).parent)
            _copy(promoted.folder / origin, scratch / name, promoted.files[origin])
            known[name] = promoted.files[origin]
        release.save(scratch / RECORD)


def _copy(source: Path, target: Path, expected: files.Entry) -> None:
    read = hashlib.sha256()

    def blocks() -> Iterator[list[bytes]]:
        with source.open("rb") as stream:
            while block := stream.read(_BLOCK_BYTES):
                read.update(block)
                yield [block]

    files.write_blocks(target, blocks())
    if read.hexdigest() != expected[0]:
        raise DamagedFileError(f"{source}: changed while it was deployed; repeat, and look after that disk")


def is_release(folder: Path, known: Container[str]) -> bool:
    """Whether something among the releases is one: by its name, and by its manifest or the names that are known."""
    if folder.is_symlink() or not folder.is_dir() or NAME.fullmatch(folder.name) is None:
        return False
    try:
        return folder.name in known or files.read_manifest(folder).kind == KIND
    except DamagedFileError:
        return False


def verify_release(folder: Path) -> Release:
    """The record of a release of which every byte is as it was sealed. Raises DamagedFileError naming what is not."""
    manifest = files.verify_sealed(folder, KIND)
    release = Release.load(folder / RECORD)
    if manifest.files.keys() - {RECORD} != release.origins.keys():
        raise DamagedFileError(f"{folder / RECORD}: does not name the files beside it; deploy the version again")
    return release


def require_signed(folder: Path, release: Release, signed: Mapping[str, str]) -> None:
    """Compare a whole release with what was signed.

    Args:
        folder: the release.
        release: its record.
        signed: SHA-256 of each file of the promoted model, as its signature (model.sig in `folder`) lists it.

    Raises:
        DamagedFileError: a file is not as it was signed, or none of those that were; or it hides that it was forced.
    """
    found = files.read_manifest(folder).files
    if found.get(SIGNATURE, ("", 0))[0] != release.signature:
        raise DamagedFileError(f"{folder / SIGNATURE}: not the one that {RECORD} names; deploy the version again")
    for name, (sha, _) in found.items():
        if name not in _NOT_SIGNED and signed.get(release.origins[name]) != sha:
            raise DamagedFileError(f"{folder / name}: not as it was signed; deploy the version again")
    marked = ForcedPromotion.load(folder / FORCED) if release.origins.get(FORCED) == FORCED else None
    if release.forced != marked or (FORCED in signed and marked is None):
        raise DamagedFileError(
            f"{folder / RECORD}: does not say that the promotion was forced; deploy the version again"
        )
    bundle = ModelBundle.load(folder / BUNDLE)
    artifact = bundle.artifact(release.form)
    facts = (release.model_digest, release.artifact_digest)
    if artifact is None or (bundle.model_digest, artifact.digest) != facts:
        raise DamagedFileError(
            f"{folder / RECORD}: names another model than {BUNDLE} beside it; deploy the version again"
        )


# The directory that is deployed into: releases, and which of them is current.
#
#     deployment.json     whose it is
#     deployments.jsonl   what was deployed when, by whom; a JSON line each
#     releases/           sealed directories: the last three, and those that a link leads to; what is not ours stays
#     current, previous   links to releases: a server reads `current`
#     .rollback.json      only while the two are exchanged: the line that deployments.jsonl will get
#
# A link is replaced in one operation, and its target is whole and durable before. `previous` is set first: killed in
# between, both lead to the release that was current, and repeating the command finishes. An exchange is noted before,
# so
# that repeating one that had happened does not undo it.

KEPT = 3
"""Releases that stay on the disk: the last that were deployed. One that a link leads to stays in any case."""
LOCK_WAIT_S = 60.0
OWNER = "deployment.json"
LOCK = ".deploy.lock"


class DeploymentOwner(Record):
    """deployment.json: whose directory it is."""

    model_name: str
    """Of the registered model; one directory serves one."""


class Deployment(Record):
    """A line of deployments.jsonl."""

    time: str
    """UTC, ISO 8601."""
    action: Literal["deploy", "rollback"]
    by: str
    release: str
    """Name of its directory."""
    version: int
    model_digest: str
    form: str
    before: str | None
    """Release that was current until then."""
    smoke: str | None
    """What the smoke test found; None where there was none."""
    event: str | None = None
    """Promotion that asked for it, by the id of its line in the ledger."""
    forced: ForcedPromotion | None = None
    """Who promoted the model against the verdict."""
    damage: str | None = None
    """What was wrong with the release that was current until then."""


@dataclass(frozen=True)
class DeploymentDirectory:
    """A directory of ours, while its lock is held."""

    root: Path
    settled: Deployment | None = None
    """A rollback that had happened when its command died, and is finished now."""

    @property
    def releases(self) -> Path:
        """Where releases lie."""
        return self.root / "releases"

    @property
    def current(self) -> Path:
        """Link to what servers read."""
        return self.root / "current"

    @property
    def previous(self) -> Path:
        """Link to what was current before."""
        return self.root / "previous"

    @property
    def history(self) -> Path:
        """What was deployed."""
        return self.root / "deployments.jsonl"

    @property
    def intent(self) -> Path:
        """What is about to be exchanged."""
        return self.root / ".rollback.json"

    def target(self, link: Path) -> Path | None:
        """The release of a link; None where there is no link. Raises DamagedFileError for a link elsewhere."""
        if not os.path.lexists(link):
            return None
        written = str(link.readlink()) if link.is_symlink() else ""
        folder, _, name = written.partition("/")
        if folder != self.releases.name or not name or "/" in name or name.startswith("."):
            raise DamagedFileError(
                f"{link}: {f'leads to {written}' if written else 'is no link'}, where a link to a release belongs; "
                "remove it, and deploy again"
            )
        return self.releases / name

    def swap_in(self, name: str) -> None:
        """Make a release current, and what was current previous."""
        now = self.target(self.current)
        if now is not None and now.name != name:
            self._point(self.previous, now.name)
        self._point(self.current, name)

    def swap_back(self) -> None:
        """Exchange current and previous; where the file system cannot, previous is current for an instant."""
        now, then = self.target(self.current), self.target(self.previous)
        if now is None or then is None:
            raise RuntimeError("both links were asked for before")
        files.before("rename", self.current)
        if disk.exchange_names(self.current, self.previous):
            files.fsync_directory(self.root)
            return
        self._point(self.current, then.name)
        self._point(self.previous, now.name)

    def go_back(self, entry: Deployment) -> None:
        """Exchange current and previous; `build_deployment` is the line about it, which `settle` adds."""
        with convert_os_errors(self.root):
            files.write_atomic(self.intent, to_json_line(entry.model_dump(mode="json")))
        self.swap_back()

    def settle(self) -> Deployment | None:
        """Finish an exchange that was noted; returns its line, or None where there was none or it had not begun."""
        if not self.intent.exists():
            return None
        try:
            entry = Deployment.model_validate_json(content := self.intent.read_bytes())
        except ValueError as error:
            raise DamagedFileError(f"{self.intent}: no rollback ({first_line(error)}); remove it") from None
        now, then = self.target(self.current), self.target(self.previous)
        happened = now is not None and now.name == entry.release
        if happened and entry.before is not None and (then is None or then.name != entry.before):
            self._point(self.previous, entry.before)
        if happened and not (self.history.exists() and self.history.read_bytes().endswith(content)):
            self.note(entry)
        files.before("unlink", self.intent)
        self.intent.unlink()
        return entry if happened else None

    def _point(self, link: Path, name: str) -> None:
        files.before("rename", link)
        partial = link.with_name(f"{files.PARTIAL}{link.name}-{os.getpid()}")
        disk.point_symlink(link, f"{self.releases.name}/{name}", partial)
        files.fsync_directory(self.root)

    def log(self) -> list[Deployment]:
        """What was deployed, oldest first. Raises DamagedFileError for a line that is none."""
        found = []
        lines = self.history.read_bytes().splitlines() if self.history.exists() else []
        for number, content in enumerate(lines, start=1):
            try:
                found.append(Deployment.model_validate(json.loads(content)))
            except ValueError as error:
                first = str(error).splitlines()[0]
                raise DamagedFileError(f"{self.history}:{number}: no deployment ({first}); remove that line") from None
        return found

    def note(self, entry: Deployment) -> None:
        """Add a line."""
        text = self.history.read_bytes() if self.history.exists() else b""
        text += b"" if text.endswith(b"\n") or not text else b"\n"  # somebody edited it
        files.write_atomic(self.history, text + to_json_line(entry.model_dump(mode="json")).encode())

    def prune(self) -> list[str]:
        """Remove releases that are neither linked nor among the last that were deployed; returns their names."""
        deployed = list(dict.fromkeys(entry.release for entry in reversed(self.log())))
        ours = {path.name: path for path in self.releases.iterdir() if is_release(path, deployed)}
        linked = [target.name for link in (self.current, self.previous) if (target := self.target(link))]
        stay = {*linked, *[name for name in deployed if name in ours][:KEPT]}
        doomed = sorted(ours.keys() - stay)
        for name in doomed:
            files.remove_sealed(ours[name])
        return doomed


def utc_now() -> str:
    """UTC, ISO 8601."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def build_deployment(
    release: Release, action: Literal["deploy", "rollback"], by: str, **about: str | None
) -> Deployment:
    """A line about a release that is current now."""
    return Deployment(
        time=utc_now(), action=action, by=by, release=release.name, version=release.version,
        model_digest=release.model_digest, form=release.form, before=about.get("before"), smoke=about.get("smoke"),
        event=about.get("event"), damage=about.get("damage"), forced=release.forced,
    )  # fmt: skip


@contextmanager
def open_directory(directory: Path, model_name: str, new: bool = True) -> Iterator[DeploymentDirectory]:
    """Take a directory, made if it is not there, and clear what commands that died have left in it.

    Args:
        directory: as the user names it.
        model_name: of the registered model.
        new: it may become a deployment directory now.

    Raises:
        SettingsError: it is no directory, holds other things, or another model.
        DamagedFileError: it does not say any more which model it holds.
        LockHeldError: somebody else deploys into it.
        StorageError: it cannot be made, or not written.
    """
    root = _absolute_directory(directory)
    lock = FileLock(root / LOCK, f"deployment directory {root}")
    with convert_os_errors(root):
        _require_directory(root, model_name, new)
        files.make_directory(root)
        lock.acquire(wait_s=LOCK_WAIT_S)
    with lock:
        with convert_os_errors(root):
            place = DeploymentDirectory(root)
            _require_directory(root, model_name, new)
            files.remove_partials(root)
            files.make_directory(place.releases)
            files.remove_partials(place.releases)
            if not (root / OWNER).exists():
                DeploymentOwner(model_name=model_name).save(root / OWNER)
            place = DeploymentDirectory(root, place.settle())
        yield place


def _absolute_directory(directory: Path) -> Path:
    """The directory as people write it, links included; but `..` of a link is where the link leads to."""
    try:
        return directory.resolve() if ".." in directory.parts else directory.absolute()
    except (OSError, RuntimeError) as error:  # links that lead to each other
        raise StorageError(f"{directory}: {first_line(error)}; choose another directory") from None


@contextmanager
def convert_os_errors(root: Path) -> Iterator[None]:
    """Say of a directory what keeps us from making it or writing into it: a StorageError."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename and str(error.filename) != str(root) else ""
        raise StorageError(
            f"{root}: cannot be made or written ({where}{error.strerror}); mend that and repeat, or choose another "
            "directory"
        ) from None


def _require_directory(root: Path, model_name: str, new: bool) -> None:
    """Raise SettingsError unless this is, or may become, the directory of this model."""
    if root.exists() and not root.is_dir():
        raise SettingsError(f"{root}: is a file; name a directory that a server is to read")
    if (root / OWNER).exists():
        owner = _read_owner(root / OWNER, model_name)
        if owner != model_name:
            raise SettingsError(
                f"{root}: is where {owner} is deployed, and this project's model is {model_name} "
                "(promote.model_name); name another directory"
            )
        return
    releases = DeploymentDirectory(root).releases
    found = [path for folder in (root, releases) if folder.is_dir() for path in folder.iterdir()]
    strange = sorted(
        path.relative_to(root).as_posix()
        for path in found
        if path != releases and path != root / LOCK and not path.name.startswith(files.PARTIAL)
    )
    if strange:
        raise SettingsError(f"{root}: holds {strange[0]}, and nothing of ours; name a new or empty directory")
    if not new:
        raise SettingsError(f"{root}: nothing is deployed there; `ratchet deploy {root}` does")


def _read_owner(path: Path, model_name: str) -> str:
    """Of which model a directory is."""
    try:
        return DeploymentOwner.model_validate_json(path.read_bytes()).model_name
    except ValueError:
        raise DamagedFileError(
            f"{path}: does not say which model is deployed here; if it is {model_name}, write "
            f"{json.dumps({'format': 1, 'model_name': model_name})} into it, or else name another directory"
        ) from None
