"""Uploads the files of promoted models to an MLflow server, and fetches them.

A promoted model is a logged model with the flavor `transformers` (registry.deployment.server_files). Its merged model
is stored once, for all flavors and formats; the base model is not stored. The manifest is uploaded last, so a logged
model with a manifest is complete. A fetched folder is compared with the manifest before it gets its name; the caller
checks the signature.
"""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from ratchet.errors import DamagedFileError
from ratchet.storage import digests, files
from ratchet.storage.files import MANIFEST, Manifest

IMMUTABLE = ("hf", "gguf", "bitsandbytes", "onnx", "adapter")
"""Folders whose content the model's digest determines. Their files need not be sent again after an interruption."""
DIGEST_TAG = "ratchet.model_digest"
BYTES_TAG = "ratchet.bytes"
"""Tag of a logged model with the size of all its files, also of those that are not uploaded yet."""


def upload_model(client: Any, server: str, experiment_id: str, model_digest: str, folder: Path, name: str) -> str:
    """Upload what the server lacks of a promoted model, and return the id of the logged model.

    Args:
        client: MLflow's client.
        server: address of the server.
        experiment_id: experiment of the logged model.
        model_digest: digest of the model, by which an interrupted upload is found.
        folder: sealed folder of the promoted model.
        name: name of a new logged model.
    """
    query = f"tags.`{DIGEST_TAG}` = '{model_digest}'"
    order = [{"field_name": "creation_timestamp", "ascending": True}]
    found = client.search_logged_models([experiment_id], filter_string=query, order_by=order)
    manifest = files.read_manifest(folder)
    tags = {DIGEST_TAG: model_digest, BYTES_TAG: str(sum(size for _, size in manifest.files.values()))}
    model = found[0] if found else client.create_logged_model(experiment_id, name, tags=tags)
    repository = _open_repository(model.artifact_location, server)
    stored = _read_remote_manifest(repository)
    if stored is None or stored.files != manifest.files:
        present = _list_sizes(repository) if stored is None else {}
        for file, entry in manifest.files.items():
            is_complete = file.partition("/")[0] in IMMUTABLE and present.get(file) == entry[1]
            if not is_complete and (stored is None or stored.files.get(file) != entry):
                _upload(repository, folder, file)
        _upload(repository, folder, MANIFEST)
    if str(model.status) != "READY":
        client.finalize_logged_model(model.model_id, "READY")
    return str(model.model_id)


def fetch_model(client: Any, server: str, model_id: str, folder: Path, kind: str) -> None:
    """Fetch a promoted model into a sealed folder. A folder with the same content is left unchanged.

    Files that the folder has already are copied from it.

    Raises:
        DamagedFileError: the server has no complete model, or a file differs from the manifest.
        OSError: the disk has too little free space.
    """
    repository = _open_repository(client.get_logged_model(model_id).artifact_location, server)
    manifest = _read_remote_manifest(repository)
    where = f"{server}, logged model {model_id}"
    if manifest is None:
        raise DamagedFileError(f"{where}: has no {MANIFEST}, so its upload was never finished; promote the model again")
    own = _read_own_files(folder)
    if own == manifest.files:
        return
    for file in manifest.files:
        if (path := PurePosixPath(file)).is_absolute() or ".." in path.parts or not path.parts:
            raise DamagedFileError(f"{where}: {MANIFEST} lists {file!r}, which is not the name of a file in its folder")
    files.make_directory(folder.parent)
    files.require_space(folder.parent, sum(size for _, size in manifest.files.values()))
    with files.sealed_directory(folder, kind, manifest.files) as scratch:
        for file, entry in manifest.files.items():
            target = scratch / file
            files.make_directory(target.parent)
            if own.get(file) == entry:
                shutil.copyfile(folder / file, target)
            else:
                repository.download_artifacts(file, str(scratch))
            if not target.is_file() or digests.hash_file(target) != entry[0]:
                raise DamagedFileError(f"{where}: {file} differs from {MANIFEST}; promote the model again")
            files.fsync(target)


def _open_repository(location: str, server: str) -> Any:
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

    return get_artifact_repository(location, tracking_uri=server, registry_uri=server)


def _upload(repository: Any, folder: Path, file: str) -> None:
    parent = file.rpartition("/")[0]
    repository.log_artifact(str(folder / file), parent or None)


def _read_remote_manifest(repository: Any) -> Manifest | None:
    """Read the manifest on the server; None if the upload was not finished."""
    if not any(info.path == MANIFEST for info in repository.list_artifacts()):
        return None
    with tempfile.TemporaryDirectory() as scratch:
        repository.download_artifacts(MANIFEST, scratch)
        return files.read_manifest(Path(scratch))


def _list_sizes(repository: Any, folder: str | None = None) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for info in repository.list_artifacts(folder):
        sizes |= _list_sizes(repository, info.path) if info.is_dir else {info.path: info.file_size or 0}
    return sizes


def _read_own_files(folder: Path) -> Mapping[str, files.Entry]:
    """Return the files of a local folder, as its manifest lists them; empty if there is no sealed folder."""
    try:
        return files.read_manifest(folder).files
    except DamagedFileError:
        return {}
