"""Whether a folder holds the very files that its bundle.json speaks of: what was measured is what is there."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from ratchet.errors import DamagedError
from ratchet.storage import digests as digest
from ratchet.storage import files
from ratchet.storage.files import Manifest
from ratchet.storage.layout import Layout
from ratchet.storage.records.export import Artifact, Bundle, FormatKind

BUNDLE = "bundle.json"
_SBOM, _EVALUATION, _VERDICT = "sbom.json", "eval.json", "verdict.json"


def place(artifact: Artifact) -> str:
    """File or folder of a form, in the export, the promoted model and its release alike."""
    return place_of(artifact.kind, artifact.type)


def place_of(kind: FormatKind, type_: str) -> str:
    """`place`, before there is anything at it."""
    if kind == "hf":
        return kind
    return f"gguf/model-{type_}.gguf" if kind == "gguf" else f"{kind}/{type_}"


def model_digest(artifacts: Iterable[Artifact]) -> str:
    """Fingerprint of a model in all its forms."""
    return digest.of_json({one.name: one.digest for one in artifacts})


def verified(layout: Layout) -> Manifest:
    """The export, every byte as it was sealed, and as it was measured. Raises DamagedError naming what is not."""
    manifest = files.verify(layout.export, "export")
    require(layout.export, {name: entry[0] for name, entry in manifest.files.items()})
    return manifest


def require(folder: Path, digests: Mapping[str, str]) -> None:
    """Compare bundle.json with the files beside it.

    Args:
        folder: an export, or a promoted model.
        digests: SHA-256 of every file in it, by relative POSIX name.

    Raises:
        DamagedError: naming the form, or the file, that is another one than the bundle speaks of.
    """
    bundle = Bundle.load(folder / BUNDLE)
    for one in bundle.artifacts:
        where = place(one)
        own = {name: sha for name, sha in digests.items() if name == where or name.startswith(f"{where}/")}
        start = where.rfind("/") + 1 if where in own else len(where) + 1
        if digest.of_files({name[start:]: sha for name, sha in own.items()}) != one.digest:
            what = "is not the one that was measured" if own else "is missing"
            raise DamagedError(f"{folder / where}: form {one.name} of {BUNDLE} {what}; run `dvc repro -f export`")
    if bundle.artifacts and model_digest(bundle.artifacts) != bundle.model_digest:
        raise DamagedError(f"{folder / BUNDLE}: its model_digest is not that of its forms; run `dvc repro -f export`")
    told = {_EVALUATION: bundle.evaluation, _VERDICT: bundle.verdict}
    if bundle.lineage is not None:
        told[_SBOM] = bundle.lineage.sbom_digest
    for name, wanted in told.items():
        if wanted is not None and digests.get(name) != wanted:
            raise DamagedError(f"{folder / name}: is not the one that {BUNDLE} names; run `dvc repro -f export`")
