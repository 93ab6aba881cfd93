"""Checks that the files of an export or a promoted model are the ones that bundle.json records, and names their
paths."""

from collections.abc import Iterable, Mapping
from pathlib import Path

from ratchet.errors import DamagedFileError
from ratchet.storage import digests as digest
from ratchet.storage import files
from ratchet.storage.files import Manifest
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.export import ExportArtifact, FormatKind, ModelBundle

BUNDLE = "bundle.json"
SBOM = "sbom.json"
_EVALUATION, _VERDICT = "eval.json", "verdict.json"


def artifact_path(artifact: ExportArtifact) -> str:
    """Relative path of a format, in the export, the promoted model and its release alike."""
    return format_path(artifact.kind, artifact.type)


def format_path(kind: FormatKind, type_: str) -> str:
    """Relative path of a format with this kind and type."""
    if kind == "hf":
        return kind
    return f"gguf/model-{type_}.gguf" if kind == "gguf" else f"{kind}/{type_}"


def model_digest(artifacts: Iterable[ExportArtifact]) -> str:
    """Digest of a model: of the digests of all its formats."""
    return digest.hash_json({one.name: one.digest for one in artifacts})


def verify_export(layout: ProjectLayout) -> Manifest:
    """Verify the seal of the export and bundle.json. Raises DamagedFileError with the first file that differs."""
    manifest = files.verify_sealed(layout.export, "export")
    require_match(layout.export, {name: entry[0] for name, entry in manifest.files.items()})
    return manifest


def require_match(folder: Path, digests: Mapping[str, str]) -> None:
    """Compare a folder's files with its bundle.json.

    Args:
        folder: an export, or a promoted model.
        digests: SHA-256 of every file in it by relative POSIX name.

    Raises:
        DamagedFileError: a format or a file differs from bundle.json; the message names it.
    """
    bundle = ModelBundle.load(folder / BUNDLE)
    for one in bundle.artifacts:
        path = artifact_path(one)
        found = {name: sha for name, sha in digests.items() if name == path or name.startswith(f"{path}/")}
        start = path.rfind("/") + 1 if path in found else len(path) + 1
        if digest.hash_files({name[start:]: sha for name, sha in found.items()}) != one.digest:
            problem = f"differs from format {one.name} in" if found else f"missing; format {one.name} is in"
            raise DamagedFileError(f"{folder / path}: {problem} {BUNDLE}; run `dvc repro -f export`")
    if bundle.artifacts and model_digest(bundle.artifacts) != bundle.model_digest:
        raise DamagedFileError(
            f"{folder / BUNDLE}: model_digest does not match the digests of its formats; run `dvc repro -f export`"
        )
    expected = {_EVALUATION: bundle.evaluation, _VERDICT: bundle.verdict}
    if bundle.lineage is not None:
        expected[SBOM] = bundle.lineage.sbom_digest
    for name, sha in expected.items():
        if sha is not None and digests.get(name) != sha:
            raise DamagedFileError(f"{folder / name}: differs from its digest in {BUNDLE}; run `dvc repro -f export`")
