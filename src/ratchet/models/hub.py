"""The hub's client: a commit's files, from the network or the cache, and what to say when they are in neither."""

from collections.abc import Sequence
from pathlib import Path

from ratchet.errors import BaseModelError
from ratchet.storage import digests

_UNREAD = ("consolidated*", "*/*.safetensors", "*/*.bin", "*/*.json", "*/*.model", "*/*.txt")
"""The same weights once more for other programs, and what lies in folders: transformers reads neither."""


def download(repository: str, revision: str, wanted: Sequence[str]) -> Path:
    """Directory of a commit with the wanted files; from the cache when the hub cannot be asked.

    Args:
        repository: a hub id.
        revision: commit, tag or branch.
        wanted: names of files, with wildcards.

    Raises:
        BaseModelError: neither has it; says which models are cached.
    """
    try:
        return _snapshot(repository, revision, wanted, local_only=False)
    except Exception as error:  # the library raises a dozen unrelated types for network, name and permission
        found = cached(repository, revision, wanted)
        if found is None:
            raise _unavailable(repository, revision, error) from None
        return found


def _snapshot(repository: str, revision: str, wanted: Sequence[str], local_only: bool) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repository,
            revision=revision,
            allow_patterns=list(wanted),
            ignore_patterns=list(_UNREAD),
            local_files_only=local_only,
        )
    )


def cached(repository: str, revision: str, wanted: Sequence[str]) -> Path | None:
    """The same from the cache alone; None when not all of it is there."""
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return _snapshot(repository, revision, wanted, local_only=True)
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def _unavailable(repository: str, revision: str, error: Exception) -> BaseModelError:
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    said = str(error).strip().splitlines()
    cause = said[0].split(". ")[0] if said else type(error).__name__
    if isinstance(error, HfHubHTTPError) and error.response is not None:
        what = f"the hub answers: {cause}; check name, revision and HF_TOKEN"
    elif isinstance(error, HFValidationError):
        what = f"no hub id can be so written ({cause})"
    else:
        what = f"the hub cannot be reached ({cause}); {_cache()}; check the network"
    return BaseModelError(f"base.source: {repository} at {revision}: {what}, or give a local directory")


def _cache() -> str:
    """The models that lie in the hub's cache, with their commits, in words."""
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        repositories = frozenset()
    models = {
        found.repo_id: ", ".join(sorted(revision.commit_hash[: digests.SHORT] for revision in found.revisions))
        for found in repositories
        if found.repo_type == "model"
    }
    listed = "; ".join(f"{name} ({commits})" for name, commits in sorted(models.items()))
    return f"cached here are: {listed}" if listed else f"no model is cached in {constants.HF_HUB_CACHE}"
