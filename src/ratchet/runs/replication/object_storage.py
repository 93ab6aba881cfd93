"""Object storage of a replica: single attempts through obstore, and the meaning of its errors.

obstore (the Rust crate object_store) opens S3, Google Cloud Storage, Azure Blob Storage and folders, sends large files
in parts, and has conditional writes. Its S3, Google and Azure clients take credentials from the environment only.

obstore cannot replace an object in a folder on the condition that it is unchanged. For folders, this module compares
and renames under a file lock, and it makes each new file durable.
"""

import errno
import fcntl
import hashlib
import os
import re
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple
from urllib.parse import urlsplit
from uuid import uuid4

from ratchet.config.machine import GOOGLE_SCHEMES, S3_SCHEMES, parse_local_folder
from ratchet.redaction import HIDDEN, redact
from ratchet.storage import digests, files

if TYPE_CHECKING:
    from obstore import UpdateVersion
    from obstore.store import AzureStore, ClientConfig, GCSStore, LocalStore, RetryConfig, S3Config, S3Store

    Store = AzureStore | GCSStore | LocalStore | S3Store

Kind = Literal["absent", "place", "credentials", "clock", "network"]

PART_BYTES = 8 << 20
"""Minimum size in bytes of all parts but the last. S3 refuses parts below 5 MiB."""
MOST_PARTS = 10_000
PARTS_AT_ONCE = 4
SMALL_BYTES = 1 << 18
FASTEST_BYTES_S = 1 << 21
"""Speed in bytes/s that the time limit of a first upload assumes. The assumption is lowered after each timeout."""
PART_RETRIES = 10
PART_RETRY_S = 120.0
"""How often, and for how long, obstore repeats one part of a file. Credentials must remain valid for this time."""
UNLIMITED_S = 86_400.0
STALE_AGE_S = 86_400.0
"""Age after which a partial file counts as left behind by a process that was killed."""
MIRROR_ENDPOINT, MIRROR_REGION = "RATCHET_MIRROR_ENDPOINT_URL", "RATCHET_MIRROR_REGION"
"""Environment variables with address and region of the S3 service of a mirror, in place of the AWS_ variables."""
LONGEST_TEXT = 300
"""Maximum number of characters that are kept of a library's message."""

ABSENT = {"NoSuchKey", "NoSuchVersion", "BlobNotFound", "ENOENT"}
REPEATABLE = {"NoSuchUpload", "InvalidPart"}
"""Codes of an upload that the service has forgotten. It is repeated."""
PLACE = {
    "NoSuchBucket", "InvalidBucketName", "PermanentRedirect", "AuthorizationHeaderMalformed", "ContainerNotFound",
    "AccountNotFound", "ENOTDIR", "EISDIR", "EEXIST", "EROFS", "ENAMETOOLONG", "ELOOP",
}  # fmt: skip
CLOCK = {"RequestTimeTooSkewed", "RequestExpired"}
CREDENTIALS = {
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "ExpiredTokenException", "InvalidToken",
    "TokenRefreshRequired", "AccessDenied", "AllAccessDisabled", "AccountProblem", "NotSignedUp", "InvalidSecurity",
    "AuthenticationFailed", "AuthorizationFailure", "401", "403", "EACCES", "EPERM", "NoCredentials",
}  # fmt: skip
"""Error codes by kind (ABSENT, PLACE, CLOCK, CREDENTIALS): codes of services, HTTP status codes, names of errno."""
ADVICE: dict[Kind, str] = {
    "absent": "",
    "place": "the bucket, region or directory does not exist or is not writable: correct machine.replica, or create it",
    "credentials": "credentials are missing, wrong, expired, or lack permission to list, read, write and delete: "
    "set them in the environment",
    "clock": "this machine's clock differs by more than the service accepts: set it (NTP)",
    "network": "",
}


class ConflictError(Exception):
    """The object is not the version that a conditional write expects."""


class ContentMismatchError(OSError):
    """The stored content differs from what was sent."""


class MissingCredentialsError(Exception):
    """The environment has no credentials for the service."""


class StoredObject(NamedTuple):
    """Content of a small object, and the version that a conditional write expects."""

    content: bytes
    version: "UpdateVersion"


def strip_credentials(url: str) -> str:
    """Return a URL without user, password, query and fragment."""
    match = re.match(r"([^/]*://)(?:[^/?#]*@)?([^?#]*)", url)
    return match[1] + match[2] if match else url


def _scrub(text: str) -> str:
    """Return the message of a library in one line, without secrets from URLs and the environment."""
    text = " ".join(redact(text).split())
    text = re.sub(r"//[^/@\s]+@", f"//{HIDDEN}@", text)
    text = re.sub(r"(https?://[^\s?'\"]*)\?[^\s'\"]*", rf"\1?{HIDDEN}", text)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}…"


def _find_code(error: BaseException) -> str:
    """Return the most exact name of an error: the service's code, its HTTP status, the name of the errno, or empty."""
    text = str(error)
    for pattern in (r"<Code>([^<]+)</Code>", r"\(code: (\w+)\)", r"status code: (\d{3})"):
        if match := re.search(pattern, text):
            return match[1]
    if isinstance(error, OSError) and error.errno:
        return errno.errorcode.get(error.errno, "")
    if match := re.search(r"\(os error (\d+)\)", text):
        return errno.errorcode.get(int(match[1]), "")
    if isinstance(error, MissingCredentialsError) or "169.254.16" in text:  # a service for credentials of machines
        return "NoCredentials"
    return "PermanentRedirect" if "redirect without LOCATION" in text else ""


def classify_error(error: BaseException) -> Kind:
    """Classify an error by its cause: a missing object, the bucket or directory, the credentials, or the clock.

    All other errors are of kind `network`, and may be transient.
    """
    code = _find_code(error)
    kinds: tuple[tuple[Kind, set[str]], ...] = (
        ("place", PLACE), ("clock", CLOCK), ("absent", ABSENT), ("credentials", CREDENTIALS),
    )  # fmt: skip
    if code in REPEATABLE:
        return "network"
    known = next((kind for kind, codes in kinds if code in codes), None)
    return known or ("absent" if isinstance(error, FileNotFoundError) else "network")


def describe_error(error: BaseException) -> str:
    """Describe an error in one line, with the service's code, without secrets."""
    code, text = _find_code(error), str(error)
    summary, _, details = text.partition("\n\nDebug source:")
    if message := re.search(r"<Message>([^<]+)</Message>", text):
        summary = message[1]
    elif "error sending request" in summary or "body error" in summary:
        causes = re.findall(r'message: "([^"]+)"|(\bTimedOut\b)', details)
        summary += f": {next(filter(None, causes[-1]))}" if causes else ""
    return _scrub(summary if not code or code in summary else f"{code}: {summary}")


def is_timeout(error: BaseException) -> bool:
    """Return whether an attempt ended because of its time limit."""
    return "TimedOut" in str(error) or "kind: Timeout" in str(error)


def is_tag_of(tag: str | None, content: bytes) -> bool:
    """Return whether an ETag is the MD5 of this content. Other ETags say nothing about the content."""
    return (tag or "").strip('"') == hashlib.md5(content, usedforsecurity=False).hexdigest()


def compute_part_bytes(size: int) -> int:
    """Compute the size of the parts of a file. All parts have one size, because some services require it."""
    return max(PART_BYTES, -(-size // MOST_PARTS))


class ObjectStorage:
    """Objects by name below a URL. Every method makes one attempt and is thread-safe. FileNotFoundError means that the
    object does not exist.

    Args:
        url: `machine.replica`.
        timeout_s: time without an answer after which a request ends, in addition to the time for its body.
        slowest_bytes_s: speed in bytes/s of the slowest connection that does not count as stalled.
        retries: whether obstore repeats the request for one part of a file.
        is_mirror: whether MIRROR_ENDPOINT and MIRROR_REGION replace address and region of S3.
    """

    def __init__(
        self, url: str, timeout_s: float, slowest_bytes_s: float, retries: bool, is_mirror: bool = False
    ) -> None:
        self._url, self._timeout_s, self._slowest_bytes_s, self._retries = url, timeout_s, slowest_bytes_s, retries
        self._is_mirror = is_mirror
        self.folder = parse_local_folder(url)
        self._stores: dict[tuple[float, float, int], Store] = {}
        self._mutex = threading.Lock()
        self._bytes_s = float(max(FASTEST_BYTES_S, slowest_bytes_s))

    def reopen(self) -> None:
        """Let the next call open a new connection and read the credentials again."""
        with self._mutex:
            self._stores = {}

    def slow_down(self) -> None:
        """Assume a slower connection, because an attempt reached its time limit."""
        self._bytes_s = max(self._slowest_bytes_s, self._bytes_s / 4)

    def list(self, folder: str) -> dict[str, int]:
        """Return the names below a folder with their sizes in bytes. A missing folder is empty."""
        found = (entry for chunk in self._reading().list(folder or None) for entry in chunk)
        return {entry["path"]: entry["size"] for entry in found if not self._is_internal(entry["path"])}

    def inspect(self, name: str) -> tuple[int, str]:
        """Return size in bytes and ETag of an object."""
        found = self._reading().head(name)
        return found["size"], (found["e_tag"] or "").strip('"')

    def read(self, name: str) -> StoredObject:
        """Read a small object. Without an ETag that proves the content, it is read twice.

        Raises:
            ContentMismatchError: two reads returned different content.
        """
        first = self._read_once(name)
        if self.folder is not None:
            return first._replace(version={"e_tag": digests.hash_bytes(first.content)})
        if is_tag_of(first.version.get("e_tag"), first.content):
            return first
        if self._read_once(name).content != first.content:
            raise ContentMismatchError("two reads returned different content")
        return first

    def _read_once(self, name: str) -> StoredObject:
        answer = self._reading().get(name)
        return StoredObject(bytes(answer.bytes()), _build_version(answer.meta["e_tag"], answer.meta["version"]))

    def read_range(self, name: str, start: int, end: int) -> bytes:
        """Read the bytes of an object from offset `start` to `end`, which is not included."""
        return bytes(self._reading().get_range(name, start=start, end=end))

    def write(self, name: str, content: bytes) -> str:
        """Write a small object. Readers see the old or the new content. Return its ETag."""
        self._make_parent(name)
        return self._finish(name, self._writing(len(content)).put(name, content, use_multipart=False)["e_tag"])

    def write_blocks(self, name: str, blocks: Iterable[bytes], size: int) -> str:
        """Write an object in parts. An exception from `blocks` aborts it. Return its ETag."""
        at_once, began_s = PARTS_AT_ONCE if self._bytes_s >= FASTEST_BYTES_S else 1, time.monotonic()
        part_bytes = compute_part_bytes(size)
        store = self._open(self._timeout_s + at_once * part_bytes / self._bytes_s, 0.0, PART_RETRIES * self._retries)
        self._make_parent(name)
        written = store.put(name, iter(blocks), use_multipart=True, chunk_size=part_bytes, max_concurrency=at_once)
        speed = size / max(0.001, time.monotonic() - began_s) / 4
        self._bytes_s = min(float(max(FASTEST_BYTES_S, self._slowest_bytes_s)), max(self._bytes_s, speed))
        return self._finish(name, written["e_tag"])

    def swap(self, name: str, content: bytes, version: "UpdateVersion | None") -> "UpdateVersion":
        """Write an object if it is still of this version, or does not exist (None). Return the new version.

        Raises:
            ConflictError: the object has another version.
        """
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        if self.folder is not None:
            return self._swap_file(self.folder / name, content, version)
        try:
            written = self._writing(len(content)).put(name, content, mode=version or "create", use_multipart=False)
        except (AlreadyExistsError, PreconditionError):
            raise ConflictError(name) from None
        return _build_version(written["e_tag"], written["version"])

    def _swap_file(self, path: Path, content: bytes, version: "UpdateVersion | None") -> "UpdateVersion":
        files.make_directory(path.parent)
        partial = path.parent / f"{files.PARTIAL}{uuid4().hex}"
        files.write_blocks(partial, [[content]])  # before the lock, because a frozen process may hold it
        try:
            with (path.parent / f".{path.name}.lock").open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                found = digests.hash_bytes(path.read_bytes()) if path.exists() else None
                if found != (version["e_tag"] if version else None):
                    raise ConflictError(path.name)
                partial.replace(path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
        files.fsync_directory(path.parent)
        return {"e_tag": digests.hash_bytes(content)}

    def remove(self, name: str) -> None:
        """Remove an object."""
        self._reading().delete(name)

    def remove_stale_partials(self) -> None:
        """Remove files that killed processes left in a folder more than a day ago, by the clock of the disk."""
        for parent, _, names in os.walk(self.folder or os.devnull):
            for path in (Path(parent, name) for name in names if self._is_partial(name)):
                with suppress(FileNotFoundError):  # another process may complete or remove it
                    if path.stat().st_mtime < time.time() - STALE_AGE_S:
                        path.unlink()

    def _is_internal(self, name: str) -> bool:
        return self.folder is not None and name.rsplit("/", 1)[-1].startswith(".")

    def _is_partial(self, name: str) -> bool:
        return name.startswith(files.PARTIAL) or re.search(r"#\d+$", name) is not None

    def _make_parent(self, name: str) -> None:
        if self.folder is not None:
            files.make_directory((self.folder / name).parent)

    def _finish(self, name: str, tag: str | None) -> str:
        if self.folder is not None:
            files.fsync(self.folder / name)
            files.fsync_directory((self.folder / name).parent)
        return (tag or "").strip('"')

    def _reading(self) -> "Store":
        return self._open(UNLIMITED_S, self._timeout_s, 0)

    def _writing(self, size: int) -> "Store":
        return self._open(self._timeout_s + max(size, SMALL_BYTES) / self._bytes_s, 0.0, 0)

    def _open(self, request_s: float, read_s: float, retries: int) -> "Store":
        key = (request_s, read_s, retries)
        with self._mutex:
            if key not in self._stores:
                self._stores[key] = self._connect(*key)
            return self._stores[key]

    def _connect(self, request_s: float, read_s: float, retries: int) -> "Store":
        """Open the service or folder of the URL.

        Args:
            request_s: time limit of a whole request.
            read_s: time limit until the next bytes of an answer; 0: none.
            retries: maximum number of times that a request is repeated.
        """
        from obstore.store import AzureStore, GCSStore, LocalStore, S3Store

        if self.folder is not None:
            return LocalStore(self.folder, mkdir=True)
        parts = urlsplit(self._url)
        place, prefix = parts.netloc, self._url.partition("://")[2].partition("/")[2].strip("/") or None
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")
        address: S3Config = {}  # the library itself reads the AWS_ variables; these values win over them
        if self._is_mirror:
            endpoint = os.environ.get(MIRROR_ENDPOINT, endpoint)
            address = {"endpoint": endpoint} if endpoint else {}
            if region := os.environ.get(MIRROR_REGION):
                address["region"] = region
        client: ClientConfig = {
            "timeout": timedelta(seconds=request_s), "connect_timeout": timedelta(seconds=self._timeout_s),
            "allow_http": endpoint.startswith("http://"),
        }  # fmt: skip
        if read_s:
            client["read_timeout"] = timedelta(seconds=read_s)
        retry: RetryConfig = {"max_retries": retries, "retry_timeout": timedelta(seconds=PART_RETRY_S)}
        if parts.scheme in S3_SCHEMES:
            _require_aws_credentials()
            return S3Store(place, prefix=prefix, config=address, client_options=client, retry_config=retry)
        if parts.scheme in GOOGLE_SCHEMES:
            return GCSStore(place, prefix=prefix, client_options=client, retry_config=retry)
        container, _, host = place.rpartition("@") if "@" in place else (place, "", "")
        if host:  # abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/FOLDER
            account = host.partition(".")[0]
            return AzureStore(container, prefix=prefix, account_name=account, client_options=client, retry_config=retry)
        return AzureStore(container, prefix=prefix, client_options=client, retry_config=retry)


def _build_version(tag: str | None, version: str | None) -> "UpdateVersion":
    built: UpdateVersion = {"e_tag": tag}
    if version is not None:
        built["version"] = version
    return built


def _require_aws_credentials() -> None:
    """Raise MissingCredentialsError if the environment has no credentials and forbids to ask the machine's service."""
    sources = (
        "AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
        "AWS_CONTAINER_CREDENTIALS_FULL_URI", "AWS_SKIP_SIGNATURE",
    )  # fmt: skip
    is_disabled = os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true"
    if is_disabled and not any(os.environ.get(name) for name in sources):
        raise MissingCredentialsError("AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not set")


def read_blocks(path: Path, block_bytes: int) -> Iterator[bytes]:
    """Read a file in blocks. An empty file has one empty block."""
    with path.open("rb") as stream:
        yield stream.read(block_bytes)
        while block := stream.read(block_bytes):
            yield block
