"""Stores and verifies promoted models: signed and sealed folders with the export, its adapter and its reports.

    hf/  gguf/  bitsandbytes/  onnx/  adapter/  bundle.json  sbom.json  provenance.json  verdict.json  eval.json
    [forced.json]  MLmodel ...  model.sig

The folders are not outputs of DVC. A folder's name contains the model's digest. Nothing refers to a folder before the
promotion, so the folder can be written early. A folder contains no row of the data; the gate's page, which shows rows,
is stored separately (`ProjectLayout.evidence`).

The formats and reports of an export or a promoted model must have the digests in its bundle.json (`require_match`).
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from ratchet.errors import ChampionError, DamagedFileError, DataError
from ratchet.registry import keys
from ratchet.registry.promotion import version_label
from ratchet.registry.signature import SIGNATURE, Signer, sign_folder, verify_folder
from ratchet.storage import digests, files
from ratchet.storage.files import Manifest
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.progress import count_bytes
from ratchet.storage.records.export import ExportArtifact, FormatKind, ModelBundle
from ratchet.storage.records.gate import Champion, ForcedPromotion

KIND = "model"
"""Kind in the manifest of a promoted model's folder."""

BUNDLE = "bundle.json"
SBOM = "sbom.json"
EVALUATION, VERDICT = "eval.json", "verdict.json"
FORCED = "forced.json"
"""File with the actor and the reason of a forced promotion; the folders of other promotions lack this file."""

Content = Path | bytes
"""Content of a file: a file to copy, or bytes."""


def store_model(
    layout: ProjectLayout,
    bundle: ModelBundle,
    exported: files.Manifest,
    extra: Mapping[str, bytes],
    signer: Signer,
) -> None:
    """Store a model. A complete and signed folder with the same content is left unchanged.

    A model that is promoted again gets its newest verdict and evaluation, and a new signature.

    Args:
        layout: the project.
        bundle: the exported model.
        exported: manifest of the verified export.
        extra: further files: server files, and forced.json (`forced_marker`).
        signer: signs the folder before it is sealed.

    Raises:
        DamagedFileError: the export changed during the copy.
        OSError: the disk has too little free space.
    """
    folder = layout.promoted_model(bundle.model_digest)
    contents = {**collect_sources(layout, bundle, exported), **extra}
    files.remove_partials(layout.models)
    page, page_content = gate_page_path(layout, bundle.model_digest), layout.gate_page.read_bytes()
    if not page.exists() or page.read_bytes() != page_content:
        files.write_atomic(page, page_content)
    if folder.exists():
        with suppress(DamagedFileError):  # a damaged folder is written again
            stored = files.verify_sealed(folder, KIND).file_digests
            is_same = stored.keys() - {SIGNATURE} == contents.keys() and all(
                stored[name]
                == (digests.hash_file(content) if isinstance(content, Path) else digests.hash_bytes(content))
                for name, content in contents.items()
            )
            if is_same and verify_folder(folder, keys.read_keyring(layout.keyring), stored).state == "trusted":
                return
    sizes = (content.stat().st_size if isinstance(content, Path) else len(content) for content in contents.values())
    files.require_space(layout.mlruns, size_bytes := sum(sizes))
    with files.sealed_directory(folder, KIND) as scratch, count_bytes("model copied", size_bytes) as add_bytes:
        for file, content in contents.items():
            files.make_directory((scratch / file).parent)
            if isinstance(content, Path):  # a link instead would let a later stage change the promoted model
                files.write_blocks(scratch / file, files.read_blocks(content, add_bytes))
            else:
                files.write_atomic(scratch / file, content)
        sign_folder(scratch, signer)
    written = files.read_manifest(folder).files
    changed = [file for file in exported.files if file != BUNDLE and written[file] != exported.files[file]]
    if changed:
        raise DamagedFileError(
            f"{layout.export / changed[0]}: changed during the promotion; run `dvc repro`, and promote again"
        )


def collect_sources(layout: ProjectLayout, bundle: ModelBundle, exported: files.Manifest) -> dict[str, Content]:
    """Collect the content of each file in the folder, apart from the files in `extra` of `store_model`.

    Raises:
        DataError: the adapter has changed since the export, or the gate's page is missing.
    """
    adapter = sorted(p.name for p in layout.adapter.iterdir()) if layout.adapter.is_dir() else []
    if not adapter or digests.hash_tree(layout.adapter, adapter) != bundle.adapter_digest:
        raise DataError(
            f"{layout.adapter}: the exported model was merged from another adapter ({bundle.adapter_digest[:12]}); run "
            "`dvc repro`"
        )
    if not layout.gate_page.is_file():
        raise DataError(f"{layout.gate_page}: file not found; run `dvc repro -f gate`")
    evaluation, verdict = layout.eval_report.read_bytes(), layout.verdict.read_bytes()
    complete_bundle = bundle.model_copy(
        update={"evaluation": digests.hash_bytes(evaluation), "verdict": digests.hash_bytes(verdict)}
    ).model_dump(mode="json")
    sources: dict[str, Content] = {file: layout.export / file for file in exported.files if file != BUNDLE}
    sources |= {f"adapter/{file}": layout.adapter / file for file in adapter}
    return sources | {BUNDLE: files.json_bytes(complete_bundle), VERDICT: verdict, EVALUATION: evaluation}


def forced_marker(forced: ForcedPromotion | None) -> dict[str, bytes]:
    """Return the file that marks a folder as a forced promotion, by name; empty if the promotion was not forced."""
    return {FORCED: files.json_bytes(forced.model_dump(mode="json"))} if forced else {}


def gate_page_path(layout: ProjectLayout, model_digest: str) -> Path:
    """Return the path of the stored gate page of a promoted model."""
    return layout.evidence / layout.promoted_model(model_digest).name / layout.gate_page.name


def verify_version(layout: ProjectLayout, champion: Champion) -> Path:
    """Return a version's Hugging Face folder after checking every byte. Raises ChampionError for damage."""
    folder = layout.promoted_model(champion.model_digest)
    try:
        files.verify_sealed(folder, KIND)
    except DamagedFileError as error:
        raise ChampionError(
            f"{version_label(champion)} cannot be champion: {error}. Restore the folder from a backup, or choose "
            "another version: `ratchet rollback VERSION`"
        ) from error
    return folder / "hf"


# Files of an export or a promoted model, and their digests in bundle.json.


def verify_export(layout: ProjectLayout) -> Manifest:
    """Verify the seal of the export and bundle.json. Raises DamagedFileError with the first file that differs."""
    manifest = files.verify_sealed(layout.export, "export")
    require_match(layout.export, manifest.file_digests)
    return manifest


def require_match(folder: Path, file_digests: Mapping[str, str]) -> None:
    """Compare a folder's files with its bundle.json.

    Args:
        folder: an export, or a promoted model.
        file_digests: SHA-256 of every file in the folder by relative POSIX name.

    Raises:
        DamagedFileError: a format or a file differs from bundle.json; the message names it.
    """
    bundle = ModelBundle.load(folder / BUNDLE)
    for artifact in bundle.artifacts:
        if (found := artifact_digest(artifact, file_digests)) != artifact.digest:
            problem = f"differs from format {artifact.name} in" if found else f"missing; format {artifact.name} is in"
            path = folder / artifact_path(artifact)
            raise DamagedFileError(f"{path}: {problem} {BUNDLE}; run `dvc repro -f export`")
    if bundle.artifacts and model_digest(bundle.artifacts) != bundle.model_digest:
        raise DamagedFileError(
            f"{folder / BUNDLE}: model_digest does not match the digests of its formats; run `dvc repro -f export`"
        )
    expected = {EVALUATION: bundle.evaluation, VERDICT: bundle.verdict}
    if bundle.lineage is not None:
        expected[SBOM] = bundle.lineage.sbom_digest
    for name, sha in expected.items():
        if sha is not None and file_digests.get(name) != sha:
            raise DamagedFileError(f"{folder / name}: differs from its digest in {BUNDLE}; run `dvc repro -f export`")


def artifact_digest(artifact: ExportArtifact, file_digests: Mapping[str, str]) -> str | None:
    """Compute the digest of a format from the SHA-256 of each file in its folder; None if the format has no file."""
    path = artifact_path(artifact)
    own = {name: sha for name, sha in file_digests.items() if name == path or name.startswith(f"{path}/")}
    start = path.rfind("/") + 1 if path in own else len(path) + 1
    return digests.hash_files({name[start:]: sha for name, sha in own.items()}) if own else None


def artifact_path(artifact: ExportArtifact) -> str:
    """Return the relative path of a format. It is the same in the export, the promoted model and its release."""
    return format_path(artifact.kind, artifact.type)


def format_path(kind: FormatKind, type_: str) -> str:
    """Return the relative path of a format with this kind and type."""
    if kind == "hf":
        return kind
    return f"gguf/model-{type_}.gguf" if kind == "gguf" else f"{kind}/{type_}"


def model_digest(artifacts: Iterable[ExportArtifact]) -> str:
    """Return the digest of a model, computed from the digests of all its formats."""
    return digests.hash_json({artifact.name: artifact.digest for artifact in artifacts})
