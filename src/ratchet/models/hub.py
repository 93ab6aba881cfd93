"""Downloads from the Hugging Face hub, and clear messages for its errors. Imports no torch."""

import errno
import io
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from ratchet.errors import HubError, StorageError, first_line
from ratchet.storage import digests
from ratchet.storage.progress import report_progress

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)

_IGNORED = ("consolidated*", "*/*.safetensors", "*/*.bin", "*/*.json", "*/*.model", "*/*.txt")
"""Names of copies of the weights for other programs, and of files in subfolders; transformers reads neither."""


def download(repository: str, revision: str, patterns: Sequence[str]) -> Path:
    """Download the matching files of a commit and return their directory; use the cache if the hub is unavailable.

    Raises:
        HubError: neither the hub nor the cache has the commit. If the hub cannot be reached, the message lists the
            cached models.
        StorageError: the disk is full.
    """
    try:
        return _snapshot(repository, revision, patterns, local_only=False)
    except Exception as error:  # the library raises a dozen unrelated types for network, name and permission
        _raise_if_disk_is_full(error)
        if cached := find_cached(repository, revision, patterns):
            return cached
        raise HubError(f"{repository} at {revision}: {explain_error(error, reads_cache=True)}") from None


def find_cached(repository: str, revision: str, patterns: Sequence[str]) -> Path | None:
    """Return the directory of a commit in the cache; None if a file is not cached."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return _snapshot(repository, revision, patterns, local_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _snapshot(repository: str, revision: str, patterns: Sequence[str], local_only: bool) -> Path:
    from huggingface_hub import snapshot_download
    from tqdm import tqdm

    class DownloadBar(tqdm):  # type: ignore[misc]
        """Reports the bytes of all files. The bar itself is drawn to nowhere."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options | {"disable": False, "file": io.StringIO()})

        def update(self, n: float | None = 1) -> bool | None:
            is_drawn: bool | None = super().update(n)
            if self.unit == "B" and self.n:
                # The total grows while the sizes of further files become known, so the download never looks finished.
                total = max(int(self.total or 0), int(self.n) + 1)
                report_progress(f"download of {repository}", int(self.n), total, "bytes")
            return is_drawn

    with silence_library(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that the disk may be too small; if it is, there is an error
        path = snapshot_download(
            repository, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(_IGNORED),
            local_files_only=local_only, tqdm_class=DownloadBar,
        )  # fmt: skip
    return Path(path)


@contextmanager
def silence_library() -> Iterator[None]:
    """Silence the library's log, which names signed addresses of storage. Errors are raised all the same."""
    from huggingface_hub.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        logging.set_verbosity(before)


def explain_error(error: BaseException, reads_cache: bool = False) -> str:
    """Explain an exception of huggingface_hub: the problem, and what to do.

    Args:
        error: the exception; its cause counts if the library only wraps it.
        reads_cache: list the cached models if the hub cannot be reached.
    """
    from huggingface_hub import constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    causes = list(_iterate_causes(error))
    if (refusal := next((cause for cause in causes if isinstance(cause, HfHubHTTPError)), None)) is not None:
        return _explain_status(refusal.response.status_code, refusal.server_message or first_line(refusal))
    cause = (first_line(causes[-1]) or type(causes[-1]).__name__).split(". ")[0]
    if isinstance(error, HFValidationError):
        return f"not a valid hub id ({cause}); correct it"
    cached = f"; {_describe_cache()}" if reads_cache else ""
    setting = "HF_ENDPOINT and " if os.environ.get("HF_ENDPOINT") else ""
    return f"the hub cannot be reached at {constants.ENDPOINT} ({cause}){cached}; check {setting}the network"


def _explain_status(status: int, text: str) -> str:
    answer = f"the hub answers {status}: {' '.join(text.split())}"
    match status:
        case 401:
            return (
                f"{answer}; the token is missing or wrong, or it may not see this repository: check the name, and set "
                "HF_TOKEN, or run `hf auth login`"
            )
        case 403:
            return (
                f"{answer}; the repository is not yours, or the token lacks the permission: check the name and the "
                "permissions of the token"
            )
        case 404:
            return f"{answer}; check name, revision and HF_TOKEN"
        case 412 | 409:
            return f"{answer}; another user has changed the repository in the meantime: run the command again"
    return f"{answer}; run the command again later"


def raise_hub_error(error: BaseException, subject: str) -> NoReturn:
    """Raise an exception of huggingface_hub as HubError, or as StorageError if the disk is full."""
    _raise_if_disk_is_full(error)
    raise HubError(f"{subject}: {explain_error(error)}") from None


def _raise_if_disk_is_full(error: BaseException) -> None:
    from huggingface_hub import constants

    for cause in _iterate_causes(error):
        if isinstance(cause, OSError) and cause.errno in _DISK_FULL:
            raise StorageError(
                f"{cause.filename or constants.HF_HUB_CACHE}: {cause.strerror}; free some space, or set HF_HOME to a "
                "directory on a larger disk, and run the command again"
            ) from None


def _iterate_causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _describe_cache() -> str:
    """List the models in the hub's cache with their commits."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        repositories = frozenset()
    models = {
        repository.repo_id: ", ".join(sorted(found.commit_hash[: digests.SHORT] for found in repository.revisions))
        for repository in repositories
        if repository.repo_type == "model"
    }
    listed = "; ".join(f"{name} ({commits})" for name, commits in sorted(models.items()))
    return f"cached models: {listed}" if listed else f"no model is cached in {constants.HF_HUB_CACHE}"
