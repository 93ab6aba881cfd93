"""Folders of promoted models: the export, its adapter and what speaks for it, signed and sealed outside DVC's reach.

    hf/  gguf/  onnx/  adapter/  bundle.json  sbom.json  verdict.json  eval.json  [forced.json]  MLmodel ...  model.sig

A folder is named by the model's digest, so nobody refers to it before a promotion does, and it may be made early. No
row of the data is in it; the gate's page, which shows some, is kept beside the models (`ProjectLayout.evidence`).
"""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from ratchet.errors import ChampionError, DamagedFileError, DataError
from ratchet.registry.promotion_record import version_label
from ratchet.storage import digests, disk, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import Champion, ForcedPromotion

KIND = "model"
FORCED = "forced.json"
"""Who forced the promotion and why; only there if it was."""
BUNDLE = "bundle.json"

BLOCK_BYTES = 8 * 2**20

Content = Path | bytes
"""What a file of the folder holds: that of another file, or these bytes."""


class FolderSigner(Protocol):
    """Who vouches for the folder."""

    @property
    def name(self) -> str:
        """Of the signature's file in the folder."""
        ...

    def sign(self, folder: Path) -> None:
        """Write the signature over every other file."""
        ...

    def holds(self, folder: Path) -> bool:
        """Whether the folder is signed, by a key that is trusted."""
        ...


def collect_sources(layout: ProjectLayout, bundle: ModelBundle, exported: files.Manifest) -> dict[str, Content]:
    """What each file of the folder holds, by its name in the folder; all but what depends on how it is promoted.

    Raises DataError when the adapter is another one by now, or the gate's page is missing.
    """
    adapter = sorted(p.name for p in layout.adapter.iterdir()) if layout.adapter.is_dir() else []
    if not adapter or digests.hash_tree(layout.adapter, adapter) != bundle.adapter_digest:
        raise DataError(
            f"{layout.adapter}: not adapter {bundle.adapter_digest[:12]}, which the exported model was merged from; "
            "run `dvc repro`"
        )
    if not layout.gate_page.is_file():
        raise DataError(f"{layout.gate_page}: not there; run the stage that makes it (`dvc repro -f gate`)")
    evaluation, verdict = layout.eval_report.read_bytes(), layout.verdict.read_bytes()
    whole = bundle.model_copy(
        update={"evaluation": digests.hash_bytes(evaluation), "verdict": digests.hash_bytes(verdict)}
    ).model_dump(mode="json")
    found: dict[str, Content] = {file: layout.export / file for file in exported.files if file != BUNDLE}
    found |= {f"adapter/{file}": layout.adapter / file for file in adapter}
    return found | {BUNDLE: files.json_bytes(whole), "verdict.json": verdict, "eval.json": evaluation}


def store_model(
    layout: ProjectLayout,
    bundle: ModelBundle,
    exported: files.Manifest,
    extra: Mapping[str, bytes],
    signing: FolderSigner,
) -> None:
    """Seal the folder of this model; one that is whole, says the same and is signed is left as it is.

    A model that is promoted again takes its newest verdict and evaluation with it, and is signed again.

    Args:
        exported: of the export, as it was verified.
        extra: further files: what MLflow wants to find, forced.json (`forced_marker`).
        signing: signs it, before it is sealed.

    Raises:
        DamagedFileError: the export changed meanwhile.
        OSError: the disk has no room for a copy.
    """
    folder = layout.promoted_model(bundle.model_digest)
    wanted = {**collect_sources(layout, bundle, exported), **extra}
    files.remove_partials(layout.models)
    _store_gate_page(layout, bundle)
    if folder.exists():
        with suppress(DamagedFileError):  # then it is made again
            whole = dict(files.verify_sealed(folder, KIND).files)
            whole.pop(signing.name, None)
            same = whole.keys() == wanted.keys() and all(whole[n][0] == _content_digest(c) for n, c in wanted.items())
            if same and signing.holds(folder):
                return
    disk.require_space(layout.mlruns, sum(_content_size(content) for content in wanted.values()))
    with files.sealed_directory(folder, KIND) as scratch:
        for file, content in wanted.items():
            files.make_directory((scratch / file).parent)
            if isinstance(content, Path):
                files.write_blocks(scratch / file, _read_blocks(content))
            else:
                files.write_atomic(scratch / file, content)
        signing.sign(scratch)
    kept = files.read_manifest(folder).files
    changed = [file for file in exported.files if file != BUNDLE and kept[file] != exported.files[file]]
    if changed:
        raise DamagedFileError(
            f"{layout.export / changed[0]}: changed while it was promoted; run `dvc repro` and repeat"
        )


def forced_marker(forced: ForcedPromotion | None) -> dict[str, bytes]:
    """The file by which a folder says that its promotion was forced; nothing when it was not."""
    return {FORCED: files.json_bytes(forced.model_dump(mode="json"))} if forced else {}


def gate_page_path(layout: ProjectLayout, model_digest: str) -> Path:
    """Where the gate's page of a promoted model is kept."""
    return layout.evidence / layout.promoted_model(model_digest).name / layout.gate_page.name


def _store_gate_page(layout: ProjectLayout, bundle: ModelBundle) -> None:
    target, content = gate_page_path(layout, bundle.model_digest), layout.gate_page.read_bytes()
    if not target.exists() or target.read_bytes() != content:
        files.make_directory(target.parent)
        files.write_atomic(target, content)


def _read_blocks(path: Path) -> Iterator[list[bytes]]:
    """A file's content. A copy and no link: whoever writes into a stage's output must not write into the champion."""
    with path.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            yield [block]


def _content_size(content: Content) -> int:
    return content.stat().st_size if isinstance(content, Path) else len(content)


def _content_digest(content: Content) -> str:
    return digests.hash_file(content) if isinstance(content, Path) else digests.hash_bytes(content)


def verify_version(layout: ProjectLayout, champion: Champion) -> Path:
    """The Hugging Face folder of a promoted version, every byte checked. Raises ChampionError if it is not whole."""
    folder = layout.promoted_model(champion.model_digest)
    try:
        files.verify_sealed(folder, KIND)
    except DamagedFileError as error:
        raise ChampionError(
            f"{version_label(champion)} cannot be champion: {error}. Bring the folder back from a backup, "
            "or choose another version: `ratchet rollback VERSION`"
        ) from error
    return folder / "hf"
