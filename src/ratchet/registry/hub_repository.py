"""Uploads a folder to a repository of the Hugging Face hub as one commit.

Large files are uploaded first and are invisible until the commit, which contains all files at once: a repository never
shows a part of a model. After an interruption, the library uploads only what the hub does not have yet. A commit that
exists already is not made again.
"""

import io
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from ratchet.errors import HubError, InputError, SettingsError
from ratchet.models import hub
from ratchet.storage.progress import report_progress

_MODEL_FILE = re.compile(r".*\.(safetensors|bin|gguf|onnx|pth?|h5|msgpack|index\.json)|adapter_config\.json")
"""Files that loaders would mix with those of another model in the same repository."""


@dataclass(frozen=True)
class Upload:
    """A folder and its repository."""

    repository: str
    folder: Path
    files: Mapping[str, str]
    """SHA-256 of each file in the folder, by its name in the repository."""
    earlier_files: Collection[str]
    """Names of files that earlier pushes of this project put into the repository; those not in `files` are removed."""
    is_private: bool
    """Create the repository as a private one."""


@dataclass(frozen=True)
class HubCommit:
    """The newest commit of the repository after an upload."""

    revision: str
    """Commit with exactly these files."""
    url: str
    is_new: bool
    """Whether this upload made the commit; otherwise, the repository had these files already."""
    warnings: tuple[str, ...] = ()
    """Warnings of the hub about the model card."""


def require_usable(repository: str) -> None:
    """Raise SettingsError for an invalid hub id, or if there is no token."""
    from huggingface_hub import get_token
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise SettingsError(f"{repository!r}: not a valid hub id ({error}); correct it") from None
    if "/" not in repository:
        raise SettingsError(f"{repository!r}: expected OWNER/NAME, such as your-name/{repository}")
    if get_token() is None:
        raise SettingsError(f"{repository}: found no token of the hub; set HF_TOKEN, or run `hf auth login`")


def publish(upload: Upload, message: str) -> HubCommit:
    """Create the repository if necessary, and commit the folder to its branch main.

    Raises:
        HubError: the hub cannot be reached or refuses; the repository contains files of another model, or is public
            although it should be private. Nothing was committed.
        StorageError: the disk is full.
    """
    try:
        with hub.silence_library(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            commit = _publish(upload, message)
    except InputError:
        raise
    except Exception as error:  # the library raises a dozen unrelated types for network, name and permission
        hub.raise_hub_error(error, upload.repository)
    texts = tuple(
        " ".join(str(warning.message).split()) for warning in caught if warning.category is UserWarning
    )  # others are for the library's developers
    return replace(commit, warnings=texts)


def _publish(upload: Upload, message: str) -> HubCommit:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

    api, repository = HfApi(), upload.repository
    url = str(api.create_repo(repository, private=upload.is_private or None, exist_ok=True))
    api.auth_check(repository, write=True)  # `create_repo` accepts a public repository of another user
    info = api.model_info(repository)
    if upload.is_private and not info.private:
        raise HubError(
            f"{repository}: is public, but --private is set; make it private on its settings page, or leave out "
            "--private"
        )
    present = {sibling.rfilename for sibling in info.siblings or ()}
    foreign = sorted(name for name in present - {*upload.files, *upload.earlier_files} if _MODEL_FILE.fullmatch(name))
    if foreign:
        raise HubError(
            f"{repository}: contains {foreign[0]}, which this project did not push; programs would mix the two models: "
            "push to another repository, or remove that file on the hub"
        )
    bar = _UploadBar(f"upload to {repository}", sum((upload.folder / name).stat().st_size for name in upload.files))

    class ReportedFile(CommitOperationAdd):  # type: ignore[misc]
        """A file whose upload is reported. The library's bars are disabled. Uploads by Xet do not read it here."""

        @contextmanager
        def as_file(self, with_tqdm: bool = False) -> Iterator[io.BufferedReader]:
            """Open the file. The library sets `with_tqdm` to upload it."""
            with _CountedFile(io.FileIO(self.path_or_fileobj), bar if with_tqdm else None) as file:
                yield file

    operations: list[CommitOperationAdd | CommitOperationDelete] = []
    for name, sha in upload.files.items():
        operation = ReportedFile(name, upload.folder / name)
        operation.upload_info.sha256 = bytes.fromhex(sha)  # known, so the library need not read the file twice
        operations.append(operation)
    for name in sorted(present & set(upload.earlier_files) - set(upload.files)):
        operations.append(CommitOperationDelete(name, is_folder=False))
    bar.add(0)
    commit = api.create_commit(repository, operations, commit_message=message, parent_commit=info.sha)
    bar.end()
    return HubCommit(commit.oid, url, commit.oid != info.sha)


@dataclass
class _UploadBar:
    """Reports the uploaded bytes of all files. A part that is sent again counts again, but never completes the task."""

    task: str
    total: int
    done: int = 0

    def add(self, count: int) -> None:
        self.done = min(self.done + count, self.total - 1)
        report_progress(self.task, self.done, self.total, "bytes")

    def end(self) -> None:
        report_progress(self.task, self.total, self.total, "bytes")


class _CountedFile(io.BufferedReader):
    """A file that reports to a bar what is read from it."""

    def __init__(self, file: io.FileIO, bar: _UploadBar | None) -> None:
        super().__init__(file)
        self._bar = bar

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        if self._bar is not None:
            self._bar.add(len(data))
        return data
