"""`ratchet verify PATH...`: checks that no byte has changed since it was sealed or, in a promoted model, signed.

A path is a sealed directory, a run, a deployment directory or a whole project.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from ratchet.errors import DamagedFileError, DataError, ProjectError, SettingsError
from ratchet.registry import approvals, keys, model_store, signature
from ratchet.registry.deployment import release
from ratchet.registry.keys import SHOWN_DIGITS, Keyring
from ratchet.registry.signature import SIGNATURE
from ratchet.runs.directory import CHECKPOINT, RESULT, RunPaths, compute_run_id, spec_identity
from ratchet.runs.journal import JournalReader
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record, find_differing_keys

SIGNED_KINDS = {"model", release.KIND}
KINDS = SIGNED_KINDS | {
    "adapters", "base", "data", "distill", "distill-shard", "train", CHECKPOINT, RESULT, "evaluation", "export", "gate",
    "noise", "profile", "quantization",
}  # fmt: skip

FindingStatus = Literal["ok", "damaged", "unsigned", "untrusted", "revoked"]
SIGNATURE_STATUS: dict[signature.State, FindingStatus] = {
    "unsigned": "unsigned", "unknown": "untrusted", "revoked": "revoked", "damaged": "damaged",
}  # fmt: skip


class VerifyFinding(Record):
    """Result for a sealed directory, a file or a signature."""

    status: FindingStatus
    path: Path
    kind: str = ""
    """Kind of a sealed directory, or `spec`, `journal`, `signature`, `approval`, `project`, `deployment`; empty for a
    problem."""
    digest: str | None = None
    size_bytes: int | None = None
    text: str = ""
    """Details; if the status is not `ok`, the problem and what to do."""


class VerifyReport(Record):
    """Result of `ratchet verify`: all findings, in the order of the checks."""

    findings: tuple[VerifyFinding, ...]

    @property
    def is_intact(self) -> bool:
        """Whether everything is undamaged, and signed where a signature is required."""
        return all(finding.status == "ok" for finding in self.findings)


@dataclass(frozen=True)
class SignatureTrust:
    """The keys that count in the check of a signature."""

    key: Keyring | None
    """The only key that counts, from `--public-key`."""
    project: Path | None
    """The project whose keys count, from `--project`."""

    def keyring(self, folder: Path) -> Keyring | None:
        """Return the keys that count for a folder; None if there are none.

        These are tried in order: the key of `--public-key`, the keys of the project of `--project`, the keys of the
        project that contains the folder, and the keys of the project in the current directory.
        """
        if self.key is not None:
            return self.key
        for start in (self.project, folder, Path.cwd()):
            try:
                if start is not None:
                    return keys.read_keyring(ProjectLayout.find(start).keyring)
            except ProjectError:
                if start is self.project:
                    raise
        return None


def verify(paths: Sequence[Path], public_key: Path | None = None, project: Path | None = None) -> VerifyReport:
    """Check everything that is sealed in these paths.

    Args:
        paths: sealed directories, runs, deployment directories, projects.
        public_key: PEM file of the only key that counts; None: keys.json of a project (see `SignatureTrust.keyring`).
        project: the project whose keys.json counts for all paths.

    Raises:
        SettingsError: a path contains nothing that can be checked, or the file of the key contains no public key.
        ProjectError: `project` is not a project.
    """
    trust = SignatureTrust(Keyring(keys=(keys.read_public_key(public_key),)) if public_key else None, project)
    checks = [(_choose_check(path), path) for path in paths]
    return VerifyReport(findings=tuple(finding for check, path in checks for finding in check(path, trust)))


def _choose_check(path: Path) -> Callable[[Path, SignatureTrust], Iterator[VerifyFinding]]:
    """Detect the kind of a path. Damage may have removed files, so one characteristic file is enough."""
    if not path.exists():
        raise SettingsError(f"{path}: does not exist")
    if (path / "params.yaml").is_file() and (path / "dvc.yaml").is_file():
        return _verify_project
    run = RunPaths(path)
    if run.spec.is_file() or run.journal.is_file() or run.format.is_file():
        return _verify_run
    if (path / files.MANIFEST).exists():
        return _verify_signed
    if (path / release.OWNER).is_file():
        return _verify_deployment
    raise SettingsError(
        f"{path}: contains nothing that can be checked: no {files.MANIFEST} (sealed directory), no spec.json (run), "
        f"no params.yaml with dvc.yaml (project), no {release.OWNER} (deployment directory)"
    )


def _verify_project(root: Path, trust: SignatureTrust) -> Iterator[VerifyFinding]:
    layout = ProjectLayout(root.resolve())
    outputs = (
        layout.base, layout.data, layout.train, layout.export, layout.evaluate, layout.gate, layout.noise,
        layout.quantization,
    )  # fmt: skip
    sealed = [output for output in outputs if output.exists()] + _list_folders(layout.models)
    runs = _list_folders(layout.runs)
    for path in sealed:
        yield from _verify_signed(path, trust)
    for path in runs:
        yield from _verify_run(path, trust)
    if not sealed and not runs:
        yield VerifyFinding(status="ok", path=root, kind="project", text="nothing is sealed in it yet")


def _list_folders(parent: Path) -> list[Path]:
    """List the folders, without those that are being written or removed."""
    return sorted(p for p in parent.iterdir() if p.is_dir() and p.name[0] != ".") if parent.is_dir() else []


def _verify_deployment(root: Path, trust: SignatureTrust) -> Iterator[VerifyFinding]:
    directory = release.DeploymentDirectory(root)
    for link in (directory.current, directory.previous):
        try:
            directory.linked_release(link)
        except DamagedFileError as error:
            yield _build_damage(root, error)
    folders = _list_folders(directory.releases)
    for folder in folders:
        yield from _verify_signed(folder, trust)
    if not folders:
        yield VerifyFinding(status="ok", path=root, kind="deployment", text="nothing is deployed in it yet")


def _verify_signed(path: Path, trust: SignatureTrust) -> Iterator[VerifyFinding]:
    """Check a sealed directory, its bundle.json and its signature.

    The name of a release, not its manifest, decides that it must be signed: the manifest is not signed itself.
    """
    sealed = _verify_sealed(path, release.KIND if release.NAME.fullmatch(path.resolve().name) else None)
    yield sealed
    if sealed.status != "ok":
        return
    manifest = files.read_manifest(path)
    known_digests = {name: sha256 for name, (sha256, _) in manifest.files.items()}
    if manifest.kind in ("export", "model") and model_store.BUNDLE in known_digests:
        try:
            model_store.require_match(path, known_digests)
        except (DamagedFileError, DataError) as error:
            yield _build_damage(path, error)
            return
    if manifest.kind in SIGNED_KINDS:
        yield _verify_signature(path, manifest.kind, known_digests, trust)
    if manifest.kind == model_store.KIND and trust.key is None:
        with suppress(DamagedFileError):  # a damaged keyring, which the finding about the signature reports
            if (keyring := trust.keyring(path)) is not None:
                yield from map(partial(_describe_approval, path), approvals.verify_approvals(path, keyring))


def _verify_signature(path: Path, kind: str, known_digests: Mapping[str, str], trust: SignatureTrust) -> VerifyFinding:
    """Check who signed an undamaged folder, and whether that signer is trusted."""
    try:
        keyring = trust.keyring(path)
        if kind == "model" and keyring is not None:
            verdict = signature.verify_folder(path, keyring, known_digests)
        else:
            verdict = signature.read_signature(path, Keyring() if keyring is None else keyring)
        if kind == release.KIND and verdict.state == "trusted":
            release.require_signed(path, release.verify_release(path), verdict.files)
    except (DamagedFileError, DataError) as error:
        return _build_damage(path, error)
    if verdict.state == "trusted":
        return VerifyFinding(status="ok", path=path / SIGNATURE, kind="signature", text=verdict.message)
    text = _strip_path(path, verdict.message)
    if keyring is None and verdict.state == "unknown":
        is_key = verdict.signer != signature.SIGSTORE
        signer = f"key {verdict.signer[:SHOWN_DIGITS]}" if is_key else "an identity of sigstore"
        text = (
            f"claims to be signed by {signer}, but no project says whether to trust it; name one with --project DIR, "
            "or the key with --public-key FILE"
        )
    return VerifyFinding(status=SIGNATURE_STATUS[verdict.state], path=path, text=text)


def _describe_approval(path: Path, approval: approvals.ApprovalFinding) -> VerifyFinding:
    folder = path / approvals.FOLDER
    if approval.problem is not None:
        return VerifyFinding(status="untrusted", path=folder, text=_strip_path(folder, approval.problem))
    text = f"by {approval.actor} ({approval.signer[:SHOWN_DIGITS]}, {approval.time})"
    return VerifyFinding(status="ok", path=folder, kind="approval", text=text)


def _verify_sealed(path: Path, kind: str | None = None, spec: dict[str, Any] | None = None) -> VerifyFinding:
    """Check a sealed directory. A checkpoint must belong to the run of `spec`, or to the run directory around it."""
    try:
        manifest = files.verify_sealed(path, kind)
        if manifest.kind not in KINDS:
            raise DamagedFileError(f"{path / files.MANIFEST}: unknown kind {manifest.kind!r}")
        if manifest.kind == CHECKPOINT:
            _require_run_of_checkpoint(path, spec)
    except DamagedFileError as error:
        return _build_damage(path, error)
    return VerifyFinding(
        status="ok", path=path, kind=manifest.kind, digest=manifest.digest, size_bytes=manifest.size_bytes
    )


def _build_damage(path: Path, error: Exception) -> VerifyFinding:
    return VerifyFinding(status="damaged", path=path, text=_strip_path(path, str(error)))


def _strip_path(path: Path, text: str) -> str:
    """Remove the path at the beginning of a message, because the finding has the path already."""
    return text.removeprefix(f"{path}: ").removeprefix(f"{path}/")


def _require_run_of_checkpoint(path: Path, spec: dict[str, Any] | None) -> None:
    """Raise DamagedFileError unless the checkpoint belongs to this run and the checkpoints that it names exist."""
    identity, state = path / "identity.json", path / "state.json"
    if not identity.exists():
        return  # a checkpoint of format 1
    run = RunPaths(path.parent.parent)
    if spec is None and path.parent == run.checkpoints and run.spec.is_file():
        spec = files.read_json_object(run.spec)
    stored = files.read_json_object(identity).get("spec")
    identity_of_checkpoint = spec_identity(stored if isinstance(stored, dict) else {})
    if spec is not None and (names := find_differing_keys(identity_of_checkpoint, spec_identity(spec))):
        raise DamagedFileError(f"{identity}: belongs to another run, it differs in {', '.join(names)}")
    if path.parent != run.checkpoints:
        return  # in a result, which contains only the best and the last checkpoint
    counters = files.read_json_object(state).get("state")
    for name in ("best_step", "rollback_step"):
        step = counters.get(name) if isinstance(counters, dict) else None
        if not isinstance(step, int):
            raise DamagedFileError(f"{state}: has no {name}")
        if step and not run.checkpoint(step).exists():
            raise DamagedFileError(f"{state}: refers to the checkpoint of step {step}, which does not exist")


def _verify_run(root: Path, trust: SignatureTrust) -> Iterator[VerifyFinding]:
    """Check the spec, journal, checkpoints and result of a run, none of which is signed."""
    run = RunPaths(root)
    spec: dict[str, Any] | None = None
    try:
        run.require_known_format()
        spec = files.read_json_object(run.spec)
        run_id, name = compute_run_id(spec), root.resolve().name
        if run_id != name and re.fullmatch(f"[0-9a-f]{{{digests.SHORT}}}", name):  # a copy may have any other name
            raise DamagedFileError(f"{run.spec}: is the spec of run {run_id}, not {name}")
    except DamagedFileError as error:
        yield _build_damage(root, error)
    else:
        yield VerifyFinding(status="ok", path=run.spec, kind="spec", digest=run_id, size_bytes=run.spec.stat().st_size)
    yield _verify_journal(run.journal)
    for path in map(run.checkpoint, run.checkpoint_steps()):
        yield _verify_sealed(path, CHECKPOINT, spec)
    if run.result.exists():
        yield _verify_sealed(run.result, RESULT)


def _verify_journal(path: Path) -> VerifyFinding:
    if not path.exists():
        return VerifyFinding(status="damaged", path=path, text="missing")
    reader = JournalReader(path)
    events = sum(1 for _ in reader.read())
    if reader.damaged_lines:
        text = f"{reader.damaged_lines} damaged line(s) among {events} events"
        return VerifyFinding(status="damaged", path=path, text=text)
    size = path.stat().st_size
    text = f"{events} events" + ("; the last line is not finished" if size > reader.offset else "")
    return VerifyFinding(status="ok", path=path, kind="journal", size_bytes=size, text=text)
