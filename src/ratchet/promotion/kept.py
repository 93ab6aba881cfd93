"""Folders of promoted models: the export, its adapter and what speaks for it, sealed outside DVC's reach.

    hf/  adapter/  bundle.json  verdict.json  eval.json  gate.html  [forced.json]

A folder is named by the model's digest, so nobody refers to it before a promotion does, and it may be made early.
"""

from contextlib import suppress
from pathlib import Path

from ratchet import digest, files
from ratchet.errors import ChampionError, DamagedError, DataError
from ratchet.layout import Layout
from ratchet.promotion.succession import name
from ratchet.records_export import Bundle
from ratchet.records_gate import Champion, Forced

KIND = "model"
FORCED = "forced.json"
"""Who forced the promotion and why; only there if it was."""


def sources(layout: Layout, bundle: Bundle, exported: files.Manifest) -> dict[str, Path]:
    """Where each file of the folder comes from, by its name in the folder.

    Raises DataError when the adapter is another one by now, or the gate's page is missing.
    """
    adapter = sorted(p.name for p in layout.adapter.iterdir()) if layout.adapter.is_dir() else []
    if not adapter or digest.of_tree(layout.adapter, adapter) != bundle.adapter_digest:
        raise DataError(
            f"{layout.adapter}: not adapter {bundle.adapter_digest[:12]}, which the exported model was merged from; "
            "run `dvc repro`"
        )
    if not layout.gate_page.is_file():
        raise DataError(f"{layout.gate_page}: not there; run the stage that makes it (`dvc repro -f gate`)")
    found = {file: layout.export / file for file in exported.files}
    found |= {f"adapter/{file}": layout.adapter / file for file in adapter}
    return found | {"verdict.json": layout.verdict, "eval.json": layout.eval_report, "gate.html": layout.gate_page}


def keep(layout: Layout, bundle: Bundle, exported: files.Manifest) -> None:
    """Seal the folder of this model; one that is whole and says the same is left as it is.

    A model that is promoted again takes its newest verdict and evaluation with it. Raises DamagedError when the export
    changed meanwhile.
    """
    folder = layout.promoted_model(bundle.model_digest)
    wanted = sources(layout, bundle, exported)
    files.remove_partials(layout.models)
    if folder.exists():
        with suppress(DamagedError):  # then it is made again
            whole = files.verify(folder, KIND).files
            if (folder / FORCED).exists():
                wanted[FORCED] = folder / FORCED
            if whole.keys() == wanted.keys() and all(whole[n][0] == digest.of_file(p) for n, p in wanted.items()):
                return
    with files.sealed_directory(folder, KIND) as scratch:
        for file, path in wanted.items():
            files.link_or_copy(path.resolve(), scratch / file)  # DVC may have made it a link into its cache
    kept = files.read_manifest(folder).files
    changed = [file for file in exported.files if kept[file] != exported.files[file]]
    if changed:
        raise DamagedError(f"{layout.export / changed[0]}: changed while it was promoted; run `dvc repro` and repeat")


def mark(folder: Path, forced: Forced | None) -> None:
    """Let the folder say that its promotion was forced, or that it was not; doing it again changes nothing."""
    path = folder / FORCED
    wanted = files.json_bytes(forced.model_dump(mode="json")) if forced else None
    if (path.read_bytes() if path.exists() else None) == wanted:
        return
    manifest = files.read_manifest(folder)
    known: dict[str, files.Entry] = {}
    with files.sealed_directory(folder, KIND, known) as scratch:
        for file, entry in manifest.files.items():
            if file == FORCED:
                continue
            target = scratch / file
            files.make_directory(target.parent)
            if files.link(folder / file, target):
                known[file] = entry
            else:
                files.link_or_copy(folder / file, target)
        if wanted is not None:
            files.write_atomic(scratch / FORCED, wanted)


def verified(layout: Layout, champion: Champion) -> Path:
    """The Hugging Face folder of a promoted version, every byte checked. Raises ChampionError if it is not whole."""
    folder = layout.promoted_model(champion.model_digest)
    try:
        files.verify(folder, KIND)
    except DamagedError as error:
        raise ChampionError(
            f"{name(champion)} cannot be champion: {error}. Bring the folder back from a backup, "
            "or choose another version: `ratchet rollback VERSION`"
        ) from error
    return folder / "hf"
