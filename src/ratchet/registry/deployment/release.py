"""A release: one form of one promoted model with what its server needs, sealed, in a directory that servers read.

    gguf/model-q8_0.gguf (or hf/, onnx/int8/)  Modelfile  SERVE.md  README.md  bundle.json  sbom.json  [forced.json]
    model.sig  release.json  manifest.json

Every file but the last two is a copy of one in the promoted model's folder, which was signed as a whole; `model.sig`
comes along, so that each can be compared with what was signed, here and on any machine that has the public key. Copies,
not links: whoever may write in the directory of a server must not be able to write into the registry.
"""

import hashlib
import re
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ratchet.errors import DamagedError, SettingsError
from ratchet.registry.bundle_files import BUNDLE, place
from ratchet.registry.deployment import server_files
from ratchet.registry.deployment.model_card import CARD
from ratchet.registry.signing.signature import SIGNATURE
from ratchet.storage import digests, files
from ratchet.storage.records.base import Record
from ratchet.storage.records.export import Artifact, Bundle
from ratchet.storage.records.gate import Forced

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
    forced: Forced | None = None
    """Who promoted the model against the verdict: forced.json, which is signed."""
    origins: dict[str, str]
    """Name in the promoted model's folder, of each file here."""

    @property
    def name(self) -> str:
        """Of its directory."""
        return f"{self.version}-{self.model_digest[: digests.SHORT]}-{server_files.slug(self.form)}"

    def __str__(self) -> str:
        """For people."""
        return f"version {self.version} (model {self.model_digest[: digests.SHORT]}, {self.form})"


@dataclass(frozen=True)
class Promoted:
    """A promoted model's folder, every byte of it verified, and its signature too."""

    folder: Path
    version: int
    model_name: str
    bundle: Bundle
    files: Mapping[str, files.Entry]
    signed_by: str

    @property
    def forced(self) -> Forced | None:
        """What forced.json says, if it is there."""
        return Forced.load(self.folder / FORCED) if FORCED in self.files else None

    @property
    def dated(self) -> bool:
        """Whether its chat template writes the date, so that its prompts change from day to day."""
        template = self.folder / "hf" / "chat_template.jinja"
        return template.is_file() and "strftime_now" in template.read_text(encoding="utf-8")


def choose(bundle: Bundle, wanted: str | None) -> Artifact:
    """The form that is asked for: by its name, by its kind if there is one of it, or as is best for most: see `_usual`.

    Raises SettingsError naming those that there are.
    """
    known = ", ".join(one.name for one in bundle.artifacts)
    if not known:
        raise SettingsError(
            f"model {bundle.model_digest[: digests.SHORT]} was exported by an earlier version, without a record of its "
            "forms; `dvc repro -f export`, and promote it again"
        )
    if wanted is None:
        return _usual(bundle)
    found = [one for one in bundle.artifacts if wanted in (one.name, one.kind)]
    if not found:
        raise SettingsError(
            f"--format {wanted}: model {bundle.model_digest[: digests.SHORT]} has {known}; choose one of them, or "
            "add it to section export of params.yaml, `dvc repro`, and promote"
        )
    if len(found) > 1:
        raise SettingsError(f"--format {wanted}: there are {', '.join(one.name for one in found)}; name one of them")
    return found[0]


def _usual(bundle: Bundle) -> Artifact:
    """The first GGUF file, which needs the least to run; without one, the merged model."""
    return next((one for one in bundle.artifacts if one.kind == "gguf"), bundle.artifacts[0])


def planned(promoted: Promoted, artifact: Artifact) -> Release:
    """The release of this form. Raises DamagedError when the promoted folder lacks what its server needs."""
    where = place(artifact)
    own = [name for name in promoted.files if name == where or name.startswith(f"{where}/")]
    served = f"{server_files.FOLDER}/{server_files.slug(artifact.name)}/"
    origins = {name: name for name in own}
    origins |= {name.removeprefix(served): name for name in promoted.files if name.startswith(served)}
    if server_files.GUIDE not in origins:
        raise DamagedError(
            f"{promoted.folder / served}: not there; the model was promoted by an earlier version: promote it again"
        )
    # A folder of an earlier version has no card of all forms; that of the Hugging Face form would be wrong for others.
    origins |= {name: name for name in (CARD, BUNDLE, SBOM, FORCED, SIGNATURE) if name in promoted.files}
    return Release(
        version=promoted.version, model_name=promoted.model_name, model_digest=promoted.bundle.model_digest,
        form=artifact.name, artifact_digest=artifact.digest, signature=promoted.files[SIGNATURE][0],
        signed_by=promoted.signed_by, forced=promoted.forced, origins=dict(sorted(origins.items())),
    )  # fmt: skip


def size_bytes(promoted: Promoted, release: Release) -> int:
    """Of the files that `stage` will write."""
    return sum(promoted.files[origin][1] for origin in release.origins.values())


def stage(promoted: Promoted, release: Release, target: Path) -> None:
    """Write and seal a release; what is there under the name is replaced.

    Raises:
        DamagedError: a file of the promoted model changed since it was verified.
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
        raise DamagedError(f"{source}: changed while it was deployed; repeat, and look after that disk")


def is_ours(folder: Path, known: Container[str]) -> bool:
    """Whether something among the releases is one: by its name, and by its manifest or the names that are known."""
    if folder.is_symlink() or not folder.is_dir() or NAME.fullmatch(folder.name) is None:
        return False
    try:
        return folder.name in known or files.read_manifest(folder).kind == KIND
    except DamagedError:
        return False


def whole(folder: Path) -> Release:
    """The record of a release of which every byte is as it was sealed. Raises DamagedError naming what is not."""
    manifest = files.verify(folder, KIND)
    release = Release.load(folder / RECORD)
    if manifest.files.keys() - {RECORD} != release.origins.keys():
        raise DamagedError(f"{folder / RECORD}: does not name the files beside it; deploy the version again")
    return release


def require_signed(folder: Path, release: Release, signed: Mapping[str, str]) -> None:
    """Compare a whole release with what was signed.

    Args:
        folder: the release.
        release: its record.
        signed: SHA-256 of each file of the promoted model, as its signature (model.sig in `folder`) lists it.

    Raises:
        DamagedError: a file is not as it was signed, or none of those that were; or it hides that it was forced.
    """
    found = files.read_manifest(folder).files
    if found.get(SIGNATURE, ("", 0))[0] != release.signature:
        raise DamagedError(f"{folder / SIGNATURE}: not the one that {RECORD} names; deploy the version again")
    for name, (sha, _) in found.items():
        if name not in _NOT_SIGNED and signed.get(release.origins[name]) != sha:
            raise DamagedError(f"{folder / name}: not as it was signed; deploy the version again")
    marked = Forced.load(folder / FORCED) if release.origins.get(FORCED) == FORCED else None
    if release.forced != marked or (FORCED in signed and marked is None):
        raise DamagedError(f"{folder / RECORD}: does not say that the promotion was forced; deploy the version again")
    bundle = Bundle.load(folder / BUNDLE)
    artifact = bundle.artifact(release.form)
    facts = (release.model_digest, release.artifact_digest)
    if artifact is None or (bundle.model_digest, artifact.digest) != facts:
        raise DamagedError(f"{folder / RECORD}: names another model than {BUNDLE} beside it; deploy the version again")
