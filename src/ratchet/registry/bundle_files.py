"""Whether a folder holds the very files that its bundle.json speaks of: what was measured is what is there."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from ratchet.errors import DamagedFileError
from ratchet.storage import digests as digest
from ratchet.storage import files
from ratchet.storage.files import Manifest
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.export import ExportArtifact, FormatKind, ModelBundle

BUNDLE = "bundle.json"
_SBOM, _EVALUATION, _VERDICT = "sbom.json", "eval.json", "verdict.json"


def artifact_path(artifact: ExportArtifact) -> str:
    """File or folder of a form, in the export, the promoted model and its release alike."""
    return format_path(artifact.kind, artifact.type)


def format_path(kind: FormatKind, type_: str) -> str:
    """`artifact_path`, before there is anything at it."""
    if kind == "hf":
        return kind
    return f"gguf/model-{type_}.gguf" if kind == "gguf" else f"{kind}/{type_}"


def model_digest(artifacts: Iterable[ExportArtifact]) -> str:
    """Fingerprint of a model in all its forms."""
    return digest.hash_json({one.name: one.digest for one in artifacts})


def verify_export(layout: ProjectLayout) -> Manifest:
    """The export, every byte as it was sealed, and as it was measured. Raises DamagedFileError naming what is not."""
    manifest = files.verify_sealed(layout.export, "export")
    require_match(layout.export, {name: entry[0] for name, entry in manifest.files.items()})
    return manifest


def require_match(folder: Path, digests: Mapping[str, str]) -> None:
    """Compare bundle.json with the files beside it.

    Args:
        folder: an export, or a promoted model.
        digests: SHA-256 of every file in it, by relative POSIX name.

    Raises:
        DamagedFileError: naming the form, or the file, that is another one than the bundle speaks of.
    """
    bundle = ModelBundle.load(folder / BUNDLE)
    for one in bundle.artifacts:
        where = artifact_path(one)
        own = {name: sha for name, sha in digests.items() if name == where or name.startswith(f"{where}/")}
        start = where.rfind("/") + 1 if where in own else len(where) + 1
        if digest.hash_files({name[start:]: sha for name, sha in own.items()}) != one.digest:
            what = "is not the one that was measured" if own else "is missing"
            raise DamagedFileError(f"{folder / where}: form {one.name} of {BUNDLE} {what}; run `dvc repro -f export`")
    if bundle.artifacts and model_digest(bundle.artifacts) != bundle.model_digest:
        raise DamagedFileError(
            f"{folder / BUNDLE}: its model_digest is not that of its forms; run `dvc repro -f export`"
        )
    told = {_EVALUATION: bundle.evaluation, _VERDICT: bundle.verdict}
    if bundle.lineage is not None:
        told[_SBOM] = bundle.lineage.sbom_digest
    for name, wanted in told.items():
        if wanted is not None and digests.get(name) != wanted:
            raise DamagedFileError(f"{folder / name}: is not the one that {BUNDLE} names; run `dvc repro -f export`")
