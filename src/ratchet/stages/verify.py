"""`ratchet verify PATH...`: is every byte as it was sealed, and, of a promoted model, as it was signed?

Checks sealed directories, runs, directories that were deployed into, and whole projects.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ratchet.errors import DamagedFileError, DataError, SettingsError
from ratchet.registry import bundle_files
from ratchet.registry.deployment import release
from ratchet.registry.signing import keys, signature
from ratchet.registry.signing.keys import SHOWN, Keyring
from ratchet.registry.signing.signature import SIGNATURE, SignatureVerdict
from ratchet.runs.directory import CHECKPOINT, RESULT, RunPaths, compute_run_id
from ratchet.runs.journal import JournalReader
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import find_differing_keys

SIGNED = {"model", release.KIND}
KINDS = SIGNED | {
    "base", "data", "distill", "distill-shard", "train", CHECKPOINT, RESULT, "evaluation", "export", "gate", "noise",
    "profile", "quantization",
}  # fmt: skip

SAID = {"unsigned": "UNSIGNED", "unknown": "UNTRUSTED", "revoked": "REVOKED", "damaged": "DAMAGED"}
"""How a line begins, by what there is to say of a signature."""

Line = tuple[bool, str]
"""Whether a thing is whole, and what is printed of it."""


@dataclass(frozen=True)
class SignatureTrust:
    """Who is asked whether a signature counts."""

    key: Keyring | None
    """The one key that must have signed, where it was named."""
    project: Path | None
    """Where a project was named."""

    def keyring(self, folder: Path) -> Keyring | None:
        """Keys that count for a folder: the named one, else those of the named project, of the one that the folder lies
        in, of the one that the command is given in; None when there is none of these."""
        if self.key is not None:
            return self.key
        for start in (self.project, folder, Path.cwd()):
            try:
                if start is not None:
                    return keys.read_keyring(ProjectLayout.find(start).keyring)
            except SettingsError:
                if start is self.project:
                    raise
        return None


def verify(paths: Sequence[Path], public_key: Path | None = None, project: Path | None = None) -> tuple[bool, str]:
    """Check everything sealed at or below these paths.

    Args:
        paths: sealed directories, runs, directories that were deployed into, projects.
        public_key: PEM file of the key that must have signed; None asks the keys.json of a project
            (`SignatureTrust.keyring`).
        project: whose keys.json counts, wherever the paths lie.

    Returns:
        Whether all is whole, and signed where it should be; and one line a thing: `ok PATH KIND DIGEST SIZE`,
        `ok PATH signature WHO`, or `DAMAGED`, `UNSIGNED`, `UNTRUSTED`, `REVOKED` with `PATH: WHAT`.

    Raises:
        SettingsError: a path is nothing that could be checked, the key's file holds none, or the project is none.
    """
    trust = SignatureTrust(keys.build_keyring([keys.read_public_key(public_key)]) if public_key else None, project)
    checks = [_choose_check(path)(path, trust) for path in paths]
    lines = [line for found in checks for line in found]
    return all(whole for whole, _ in lines), "\n".join(text for _, text in lines)


def _choose_check(path: Path) -> Callable[[Path, SignatureTrust], Iterator[Line]]:
    """What a path is. Damage may have taken what tells it, so one of several signs is enough."""
    if not path.exists():
        raise SettingsError(f"{path}: not there")
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
        f"{path}: nothing that is sealed: no {files.MANIFEST} (sealed directory), no spec.json (run), "
        f"no params.yaml beside a dvc.yaml (project), no {release.OWNER} (deployed into)"
    )


def _verify_project(root: Path, trust: SignatureTrust) -> Iterator[Line]:
    layout = ProjectLayout(root.resolve())
    outs = (
        layout.base, layout.data, layout.train, layout.export, layout.evaluate, layout.gate, layout.noise,
        layout.quantization,
    )  # fmt: skip
    things = [out for out in outs if out.exists()]
    things += _list_folders(layout.models)
    for thing in things:
        yield from _verify_signed(thing, trust)
    for folder in _list_folders(layout.runs):
        yield from _verify_run(folder, trust)
    if not things and not _list_folders(layout.runs):
        yield True, f"ok  {root}  project  nothing is sealed in it yet"


def _list_folders(parent: Path) -> list[Path]:
    """Those that are not being written or removed."""
    return sorted(p for p in parent.iterdir() if p.is_dir() and p.name[0] != ".") if parent.is_dir() else []


def _verify_deployment(root: Path, trust: SignatureTrust) -> Iterator[Line]:
    """Every release in a directory that was deployed into."""
    folders = _list_folders(root / "releases")
    for folder in folders:
        yield from _verify_signed(folder, trust)
    if not folders:
        yield True, f"ok  {root}  deployment  nothing is deployed in it"


def _verify_signed(path: Path, trust: SignatureTrust) -> Iterator[Line]:
    """A sealed directory, and what speaks for it: its bundle.json, its signature."""
    lines = list(_verify_sealed(path))
    yield from lines
    if not all(whole for whole, _ in lines):
        return
    manifest = files.read_manifest(path)
    digests = {name: sha for name, (sha, _) in manifest.files.items()}
    if manifest.kind in ("export", "model") and bundle_files.BUNDLE in digests:
        try:
            bundle_files.require_match(path, digests)
        except (DamagedFileError, DataError) as error:
            yield _damage_line(path, error)
            return
    if manifest.kind in SIGNED:
        yield _verify_signature(path, manifest.kind, digests, trust)


def _verify_signature(path: Path, kind: str, digests: Mapping[str, str], trust: SignatureTrust) -> Line:
    """By whom a whole folder is signed, and whether that counts."""
    try:
        known = trust.keyring(path)
        if known is None:
            return _unverified_line(path)
        found = (
            signature.judge_folder(path, known, digests) if kind == "model" else signature.read_signature(path, known)
        )
        if kind == release.KIND and found.state == "trusted":
            release.require_signed(path, release.verify_release(path), found.files)
    except (DamagedFileError, DataError) as error:
        return _damage_line(path, error)
    if found.state == "trusted":
        return True, f"ok  {path / SIGNATURE}  signature  {found.text}"
    return False, f"{SAID[found.state]} {path}: {_strip_path(path, found.text)}"


def _unverified_line(path: Path) -> Line:
    """Of a signature that nobody here can say anything about."""
    found: SignatureVerdict = signature.read_signature(path, Keyring())
    if found.state != "unknown":
        return False, f"{SAID[found.state]} {path}: {_strip_path(path, found.text)}"
    who = f"key {found.by[:SHOWN]}" if found.by != signature.SIGSTORE else "an identity of sigstore"
    return False, (
        f"UNTRUSTED {path}: says that it is signed by {who}, and no project here says whether to trust that; name one "
        "with --project DIR, or the key with --public-key FILE"
    )


def _verify_sealed(path: Path, kind: str | None = None, spec: dict[str, Any] | None = None) -> Iterator[Line]:
    """A sealed directory; a checkpoint must belong to the run of `spec`, or of the directory that it lies in."""
    try:
        manifest = files.verify_sealed(path, kind)
        if manifest.kind not in KINDS:
            raise DamagedFileError(f"{path / files.MANIFEST}: of the unknown kind {manifest.kind!r}")
        if manifest.kind == CHECKPOINT:
            _require_fitting(path, spec)
    except DamagedFileError as error:
        yield _damage_line(path, error)
    else:
        yield True, f"ok  {path}  {manifest.kind}  {manifest.digest[: digests.SHORT]}  {manifest.size_bytes:,} bytes"


def _damage_line(path: Path, error: Exception) -> Line:
    return False, f"DAMAGED {path}: {_strip_path(path, str(error))}"


def _strip_path(path: Path, text: str) -> str:
    """A message without the path that the line begins with."""
    return text.removeprefix(f"{path}: ").removeprefix(f"{path}/")


def _require_fitting(path: Path, spec: dict[str, Any] | None) -> None:
    """Raise DamagedFileError unless an intact checkpoint is of this run, and what it refers to is there."""
    identity, state = path / "identity.json", path / "state.json"
    if not identity.exists():
        return  # format 1 had none
    run = RunPaths(path.parent.parent)
    if spec is None and path.parent == run.checkpoints and run.spec.is_file():
        spec = _read_json(run.spec)
    found = _read_json(identity).get("spec")
    if spec is not None and (names := find_differing_keys(found if isinstance(found, dict) else {}, spec)):
        raise DamagedFileError(f"{identity}: belongs to another run, it differs in {', '.join(names)}")
    if path.parent != run.checkpoints:
        return  # of a result, which holds the best and the last beside each other
    counters = _read_json(state).get("state")
    for name in ("best_step", "good_step"):
        step = counters.get(name) if isinstance(counters, dict) else None
        if not isinstance(step, int):
            raise DamagedFileError(f"{state}: no {name} in it")
        if step and not run.checkpoint(step).exists():
            raise DamagedFileError(f"{state}: refers to the checkpoint of step {step}, which is not there")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFileError(f"{path}: unreadable ({error})") from None
    if not isinstance(value, dict):
        raise DamagedFileError(f"{path}: not an object of JSON")
    return value


def _verify_run(root: Path, trust: SignatureTrust) -> Iterator[Line]:
    """A run; nothing in it is signed."""
    run = RunPaths(root)
    spec: dict[str, Any] | None = None
    try:
        run.require_known_format()
        spec = _read_json(run.spec)
        own, name = compute_run_id(spec), root.resolve().name
        if own != name and re.fullmatch(f"[0-9a-f]{{{digests.SHORT}}}", name):  # a copy may have a name of its own
            raise DamagedFileError(f"{run.spec}: is the spec of run {own}, not {name}")
    except DamagedFileError as error:
        yield _damage_line(root, error)
    else:
        yield True, f"ok  {run.spec}  spec  {own}  {run.spec.stat().st_size:,} bytes"
    yield from _verify_journal(run)
    for path in map(run.checkpoint, run.checkpoint_steps()):
        yield from _verify_sealed(path, CHECKPOINT, spec)
    if run.result.exists():
        yield from _verify_sealed(run.result, RESULT)


def _verify_journal(run: RunPaths) -> Iterator[Line]:
    if not run.journal.exists():
        yield False, f"DAMAGED {run.journal}: missing"
        return
    reader = JournalReader(run.journal)
    events = sum(1 for _ in reader.read())
    unfinished = run.journal.stat().st_size > reader.offset
    if reader.damaged_lines:
        yield False, f"DAMAGED {run.journal}: {reader.damaged_lines} damaged line(s) beside {events} events"
    else:
        end = "  the last line is not finished" if unfinished else ""
        yield True, f"ok  {run.journal}  journal  {events} events  {run.journal.stat().st_size:,} bytes{end}"
