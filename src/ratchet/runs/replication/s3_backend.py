"""S3 backend: multipart uploads that are resumed, and verified by the service's checksums.

A successful answer does not prove that the content arrived, but two checksums do. One is an ETag that is an MD5 sum,
because the service computes it from the stored content. The other is a SHA-256 checksum, if a test has shown that the
service refuses an object with a wrong checksum. Content without such a checksum is read back.

The ETag of an object that was sent in one request is the MD5 of its content. The ETag of an object that was sent in n
parts is the MD5 of the MD5s of its parts, followed by `-n`. Composite SHA-256 checksums are built in the same way
(Amazon S3 User Guide, "Checking object integrity in Amazon S3").
"""

import base64
import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from ratchet.errors import DamagedFileError
from ratchet.runs.replication.backend import (
    BUFFERED_BYTES,
    PIECE_BYTES,
    BandwidthThrottle,
    ContentMismatchError,
    RetryCallable,
    ThrottledBody,
    TransferProgress,
    TransferWatchdog,
    build_damaged_error,
    compute_remote_digest,
    create_shallow_socket,
)
from ratchet.storage.files import Entry

PART_BYTES = 8 << 20
"""Minimum size in bytes of all parts but the last. S3 refuses parts below 5 MiB."""
MOST_PARTS = 10_000
READ_BYTES = 1 << 18
RESTARTS = 4
"""Maximum number of attempts of an upload. Another attempt is made if the service forgets the upload, or if the stored
object is wrong although every part was correct."""
REFUSALS = {"BadDigest", "XAmzContentChecksumMismatch"}
"""Error codes with which a service refuses a wrong checksum."""
UNFINISHABLE = {"InvalidPart", "InvalidPartOrder", "InvalidRequest", "EntityTooSmall", *REFUSALS}
"""Error codes with which a service refuses to complete an upload."""
Sizes = list[int]
Listed = list[dict[str, Any]]


def compute_part_bytes(size: int) -> int:
    """Compute the size of the parts of a file. All parts have one size, because some services require it."""
    return max(PART_BYTES, -(-size // MOST_PARTS))


def encode_base64(digest: bytes) -> str:
    """Encode a digest as the service writes checksums."""
    return base64.b64encode(digest).decode()


@dataclass(frozen=True)
class MultipartChecksums:
    """Checksums of the parts of a file."""

    path: Path
    part_bytes: int
    entry: Entry
    md5s: tuple[bytes, ...]
    sha256s: tuple[bytes, ...]

    @classmethod
    def from_file(cls, path: Path) -> "MultipartChecksums":
        """Compute the checksums in one pass over a file."""
        part_bytes, file_digest = compute_part_bytes(path.stat().st_size), hashlib.sha256()
        md5s, sha256s, size = [], [], 0
        for data in _read_parts(path, part_bytes):
            file_digest.update(data)
            size += len(data)
            md5s.append(hashlib.md5(data, usedforsecurity=False).digest())
            sha256s.append(hashlib.sha256(data).digest())
        return cls(path, part_bytes, (file_digest.hexdigest(), size), tuple(md5s), tuple(sha256s))

    @property
    def is_single_request(self) -> bool:
        """Whether the file is sent in one request."""
        return len(self.md5s) == 1

    @property
    def etag(self) -> str:
        """ETag of the object if the service uses MD5 sums."""
        if self.is_single_request:
            return self.md5s[0].hex()
        return f"{hashlib.md5(b''.join(self.md5s), usedforsecurity=False).hexdigest()}-{len(self.md5s)}"

    @property
    def checksum(self) -> str:
        """SHA-256 checksum of the object, as the service writes it."""
        if self.is_single_request:
            return encode_base64(self.sha256s[0])
        return f"{encode_base64(hashlib.sha256(b''.join(self.sha256s)).digest())}-{len(self.sha256s)}"

    def data(self, number: int) -> bytes:
        """Read a part, counted from 1. Raises DamagedFileError if the file was removed."""
        try:
            with self.path.open("rb") as stream:
                stream.seek((number - 1) * self.part_bytes)
                return stream.read(self.part_bytes)
        except FileNotFoundError:  # this error would look like an answer of the service
            raise DamagedFileError(f"{self.path}: was removed while it was sent; it is not replicated") from None


def _read_parts(path: Path, part_bytes: int) -> Iterator[bytes]:
    with path.open("rb") as stream:
        yield stream.read(part_bytes)  # an empty file has one empty part
        while data := stream.read(part_bytes):
            yield data


@dataclass(frozen=True)
class S3Capabilities:
    """Checksums of a service that Ratchet can rely on."""

    md5_tags: bool
    """Whether ETags are MD5 sums."""
    refuses_wrong_sums: bool
    """Whether the service refuses an object with a wrong SHA-256 checksum."""


class S3Backend:
    """S3 through s3fs, which finds credentials and endpoint in the environment and in boto's files."""

    def __init__(self, url: str, throttle: BandwidthThrottle, watch: TransferWatchdog, timeout_s: float) -> None:
        parts = urlsplit(url)
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        self._throttle, self._watch, self._timeout_s = throttle, watch, timeout_s
        self._lock = threading.Lock()
        self._system: Any = None
        self._capabilities: S3Capabilities | None = None
        self._uploads: dict[str, str] = {}
        self._verified: dict[str, Entry] = {}

    def reopen(self) -> None:
        with self._lock:
            self._system = None

    def list(self, folder: str) -> dict[str, int]:
        found: dict[str, int] = {}
        parameters: dict[str, Any] = {
            "Prefix": f"{self._key(folder)}/" if folder else self._prefix and f"{self._prefix}/"
        }
        skipped = len(self._prefix) + 1 if self._prefix else 0
        while True:
            answer = self._call("list_objects_v2", **parameters)
            found |= {entry["Key"][skipped:]: int(entry["Size"]) for entry in answer.get("Contents", [])}
            if not answer.get("IsTruncated"):
                return found
            parameters["ContinuationToken"] = answer["NextContinuationToken"]

    def size(self, name: str) -> int:
        return int(self._call("head_object", Key=self._key(name))["ContentLength"])

    def read(self, name: str) -> bytes:
        """Read an object. Read it a second time if its ETag is not the MD5 of the content; two equal reads count as
        correct."""
        first, tag = self._get(name, {})
        if hashlib.md5(first, usedforsecurity=False).hexdigest() == tag:
            return first
        second, _ = self._get(name, {})
        if first != second:
            raise ContentMismatchError("two reads returned different content")
        return first

    def piece(self, name: str, start: int) -> bytes:
        return self._get(name, {"Range": f"bytes={start}-{start + PIECE_BYTES - 1}"}, allow_partial=True)[0]

    def write(self, name: str, data: bytes) -> None:
        self._put(name, data, encode_base64(hashlib.sha256(data).digest()))

    def remove(self, name: str) -> None:
        self._call("delete_object", Key=self._key(name))

    def send(self, name: str, path: Path, entry: Entry, retry: RetryCallable) -> int:
        """Upload in parts. Each part is verified before the object appears. Parts that a killed process sent are not
        sent again."""
        if self._verified.get(name) == entry and retry(f"look for {name}", lambda: self._has_size(name, entry[1])):
            return 0
        parts = MultipartChecksums.from_file(path)
        if parts.entry != entry:
            raise build_damaged_error(path, parts.entry)
        if self._has_content(name, parts, retry):
            return 0
        sent: Sizes = []
        for _ in range(RESTARTS):
            try:
                if parts.is_single_request:
                    tag = retry(f"write {name}", lambda: self._send_in_one_request(name, parts, sent))
                else:
                    tag = self._send_parts(name, parts, retry, sent)
            except FileNotFoundError:  # another process, or an attempt whose answer was lost, ended the upload
                tag = ""
            self._uploads.pop(name, None)
            if tag == parts.etag or self._has_content(name, parts, retry):
                self._verified[name] = entry
                return sum(sent)
        raise ContentMismatchError(f"{name}: sent {RESTARTS} times, but the stored content still differs")

    def _send_in_one_request(self, name: str, parts: MultipartChecksums, sent: Sizes) -> str:
        """Upload a file in one request. Return its ETag, and append the bytes sent to `sent`."""
        data = parts.data(1)
        tag = self._put(name, data, parts.checksum)
        sent.append(len(data))
        self._require(parts, 1, tag)
        return tag

    def _send_parts(self, name: str, parts: MultipartChecksums, retry: RetryCallable, sent: Sizes) -> str:
        """Upload a file in parts. Return its ETag, and append the bytes sent to `sent`."""
        upload, arrived = retry(f"begin {name}", lambda: self._begin_upload(name))
        for number, md5 in enumerate(parts.md5s, 1):
            if arrived.get(number) != md5.hex():
                arrived[number], size = retry(f"write {name}", self._part(name, upload, parts, number))
                sent.append(size)
        listed = [
            {"PartNumber": number, "ETag": f'"{arrived[number]}"', "ChecksumSHA256": encode_base64(sha256)}
            for number, sha256 in enumerate(parts.sha256s, 1)
        ]
        return retry(f"finish {name}", lambda: self._finish_upload(name, upload, listed))

    def _finish_upload(self, name: str, upload: str, listed: Listed) -> str:
        """Complete a multipart upload and return the ETag of the object.

        An upload that the service refuses to complete is aborted. A request that times out is sent again: the service
        completes the upload once, and then answers that it is complete.
        """
        upload_key: dict[str, Any] = {"Key": self._key(name), "UploadId": upload}
        try:
            answer = self._call("complete_multipart_upload", MultipartUpload={"Parts": listed}, **upload_key)
        except OSError as error:
            if _error_code(error) not in UNFINISHABLE:
                raise
            self._call("abort_multipart_upload", **upload_key)
            raise FileNotFoundError(f"{name}: {_error_code(error)}") from None
        return str(answer["ETag"]).strip('"')

    def _begin_upload(self, name: str) -> tuple[str, dict[int, str]]:
        """Return the id of the unfinished upload and the ETags of its parts. If there is none, begin a new upload."""
        key = self._key(name)
        upload = self._uploads.get(name) or self._find_unfinished_upload(key)
        arrived: dict[int, str] = {}
        if upload is None:
            upload = str(self._call("create_multipart_upload", Key=key, ChecksumAlgorithm="SHA256")["UploadId"])
        else:
            parameters: dict[str, Any] = {"Key": key, "UploadId": upload}
            while True:
                answer = self._call("list_parts", **parameters)
                arrived |= {int(part["PartNumber"]): str(part["ETag"]).strip('"') for part in answer.get("Parts", [])}
                if not answer.get("IsTruncated"):
                    break
                parameters["PartNumberMarker"] = answer["NextPartNumberMarker"]
        self._uploads[name] = upload
        return upload, arrived

    def _find_unfinished_upload(self, key: str) -> str | None:
        """Return the id of an upload that a killed process left unfinished; None without one, or without the
        permission to list uploads."""
        try:
            listed = self._call("list_multipart_uploads", Prefix=key).get("Uploads", [])
        except (PermissionError, NotImplementedError):
            return None
        return next((str(upload["UploadId"]) for upload in listed if upload["Key"] == key), None)

    def _part(self, name: str, upload: str, parts: MultipartChecksums, number: int) -> Callable[[], tuple[str, int]]:
        def send() -> tuple[str, int]:
            data = parts.data(number)
            sha256 = encode_base64(parts.sha256s[number - 1])
            parameters: dict[str, Any] = {"Key": self._key(name), "UploadId": upload, "PartNumber": number}
            tag = str(self._call("upload_part", data, ChecksumSHA256=sha256, **parameters)["ETag"]).strip('"')
            self._require(parts, number, tag)
            return tag, len(data)

        return send

    def _require(self, parts: MultipartChecksums, number: int, tag: str) -> None:
        """Raise ContentMismatchError if the service's ETag is an MD5 sum and differs from that of a part."""
        if tag != parts.md5s[number - 1].hex() and self._probe_capabilities().md5_tags:
            raise ContentMismatchError("the service's MD5 of the received data differs")

    def _has_size(self, name: str, size: int) -> bool:
        try:
            return self.size(name) == size
        except FileNotFoundError:
            return False

    def _has_content(self, name: str, parts: MultipartChecksums, retry: RetryCallable) -> bool:
        """Return whether the object exists with exactly this content."""
        key = self._key(name)
        try:
            answer = retry(f"look for {name}", lambda: self._call("head_object", Key=key, ChecksumMode="ENABLED"))
        except FileNotFoundError:
            return False
        if int(answer["ContentLength"]) != parts.entry[1]:
            return False
        is_same = str(answer["ETag"]).strip('"') == parts.etag
        if not is_same and str(answer.get("ChecksumSHA256")) == parts.checksum:
            is_same = retry("test which checksums the service verifies", self._probe_capabilities).refuses_wrong_sums
        if is_same or compute_remote_digest(self, name, parts.entry[1], retry) == parts.entry[0]:
            self._verified[name] = parts.entry
            return True
        return False

    def _probe_capabilities(self) -> S3Capabilities:
        """Test what the service verifies: write small objects with a right and a wrong checksum."""
        if self._capabilities is None:
            name, data = f"checks/{uuid4().hex}", b"is this what arrived?"
            right, wrong = (encode_base64(hashlib.sha256(content).digest()) for content in (data, b"no"))
            tag, refuses = self._put(name, data, right), False
            try:
                self._put(name, data, wrong)
            except OSError as error:
                refuses = _error_code(error) in REFUSALS
                if not refuses:
                    raise
            self.remove(name)
            self._capabilities = S3Capabilities(hashlib.md5(data, usedforsecurity=False).hexdigest() == tag, refuses)
        return self._capabilities

    def _put(self, name: str, data: bytes, sha256: str) -> str:
        """Write an object in one request; return its ETag."""
        return str(self._call("put_object", data, Key=self._key(name), ChecksumSHA256=sha256)["ETag"]).strip('"')

    def _get(self, name: str, parameters: dict[str, str], allow_partial: bool = False) -> tuple[bytes, str]:
        """Read content and ETag of an object.

        Args:
            name: the object.
            parameters: further parameters of the request.
            allow_partial: return the bytes that were received if the connection breaks.
        """
        system = self._get_system()

        async def get(progress: TransferProgress) -> tuple[bytes, str]:
            answer = await system._call_s3("get_object", Bucket=self._bucket, Key=self._key(name), **parameters)
            body, received = answer["Body"], bytearray()
            try:
                while block := await body.read(READ_BYTES):
                    received += block
                    progress.moved()
            except Exception:  # the received bytes are valid; the caller requests the rest
                if not (allow_partial and received):
                    raise
            finally:
                body.close()
            return bytes(received), str(answer["ETag"]).strip('"')

        return self._watch.coroutine(get, system.loop)

    def _call(self, method: str, body: bytes | None = None, **parameters: Any) -> dict[str, Any]:
        """Send one request."""
        system = self._get_system()

        async def call(progress: TransferProgress) -> dict[str, Any]:
            sent = {} if body is None else {"Body": ThrottledBody(body, self._throttle, progress)}
            answer: dict[str, Any] = await system._call_s3(method, Bucket=self._bucket, **parameters, **sent)
            return answer

        return self._watch.coroutine(call, system.loop, 0.0 if body is None else self._watch.buffered_s(len(body)))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _get_system(self) -> Any:
        with self._lock:
            if self._system is None:
                self._system = self._open()
            return self._system

    def _open(self) -> Any:
        import fsspec

        settings = {
            "connect_timeout": self._timeout_s,
            # Longer than the watchdog's limit, which ends a request first.
            "read_timeout": 2 * (self._timeout_s + self._watch.buffered_s(BUFFERED_BYTES)),
            "retries": {"mode": "standard", "total_max_attempts": 1},
            "connector_args": {"socket_factory": create_shallow_socket},
        }
        system: Any = fsspec.filesystem(
            "s3", skip_instance_cache=True, use_listings_cache=False, config_kwargs=settings
        )
        system.retries = 1  # RetryPolicy retries, within its time limit
        system.connect()
        system.s3.meta.events.register_last("before-call.s3", _remove_expect_header)
        return system


def _remove_expect_header(params: dict[str, Any], **_: Any) -> None:
    """Let requests not wait for `100 Continue`, which some servers never send."""
    params["headers"].pop("Expect", None)


def _error_code(error: BaseException) -> str:
    """Return the service's code of an error that s3fs has translated; empty without one."""
    response = getattr(error.__cause__, "response", None)
    return str(response["Error"].get("Code", "")) if response else ""
