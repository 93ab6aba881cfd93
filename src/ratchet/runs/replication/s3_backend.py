"""A file as S3 takes it in parts, with the sums by which the service says what has arrived.

ETags that are MD5 sums (of an object sent at once: its MD5; of one sent in n parts: the MD5 of the parts' MD5s, and
`-n`), and composite SHA-256 checksums: Amazon S3 User Guide, "Checking object integrity in Amazon S3".
"""

import base64
import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

from ratchet.errors import DamagedFileError, SettingsError
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
from ratchet.runs.replication.retry import strip_credentials
from ratchet.storage.files import Entry

PART_BYTES = 8 << 20
"""Of all parts but the last; S3 takes none below 5 MiB."""
MOST_PARTS = 10_000


def compute_part_bytes(size: int) -> int:
    """Size of the parts of a file: equal ones, as some services insist."""
    return max(PART_BYTES, -(-size // MOST_PARTS))


def encode_base64(digest: bytes) -> str:
    """As the service writes checksums."""
    return base64.b64encode(digest).decode()


@dataclass(frozen=True)
class MultipartChecksums:
    """Sums of a file, by part of `each` bytes."""

    path: Path
    each: int
    entry: Entry
    md5s: tuple[bytes, ...]
    sha256s: tuple[bytes, ...]

    @classmethod
    def of(cls, path: Path) -> "MultipartChecksums":
        """Read a file once."""
        each, whole = compute_part_bytes(path.stat().st_size), hashlib.sha256()
        md5s, sha256s, size = [], [], 0
        for data in _read_parts(path, each):
            whole.update(data)
            size += len(data)
            md5s.append(hashlib.md5(data, usedforsecurity=False).digest())
            sha256s.append(hashlib.sha256(data).digest())
        return cls(path, each, (whole.hexdigest(), size), tuple(md5s), tuple(sha256s))

    @property
    def whole(self) -> bool:
        """Sent at once."""
        return len(self.md5s) == 1

    @property
    def etag(self) -> str:
        """Where ETags are MD5 sums."""
        if self.whole:
            return self.md5s[0].hex()
        return f"{hashlib.md5(b''.join(self.md5s), usedforsecurity=False).hexdigest()}-{len(self.md5s)}"

    @property
    def checksum(self) -> str:
        """SHA-256, as the service writes it."""
        if self.whole:
            return encode_base64(self.sha256s[0])
        return f"{encode_base64(hashlib.sha256(b''.join(self.sha256s)).digest())}-{len(self.sha256s)}"

    def data(self, number: int) -> bytes:
        """A part, counted from 1. Raises DamagedFileError when the file has gone."""
        try:
            with self.path.open("rb") as stream:
                stream.seek((number - 1) * self.each)
                return stream.read(self.each)
        except FileNotFoundError:  # which would be taken for an answer of the service
            raise DamagedFileError(f"{self.path}: was removed while it was sent; it is not mirrored") from None


def _read_parts(path: Path, each: int) -> Iterator[bytes]:
    with path.open("rb") as stream:
        yield stream.read(each)  # of an empty file: one empty part
        while data := stream.read(each):
            yield data


# A mirror in a bucket of S3, or of what speaks like it: one request a try, bodies watched while they go.
#
# Nothing is called arrived on the word of an answer alone. ETags that are MD5 sums were computed by the service from
# what
# it holds; a SHA-256 checksum counts where the service has been seen to refuse a wrong one; everything else is read
# back.

READ_BYTES = 1 << 18
RESTARTS = 4
"""Of an upload that the service forgets, or whose result is wrong although every part was right."""
REFUSALS = {"BadDigest", "XAmzContentChecksumMismatch"}
UNFINISHABLE = {"InvalidPart", "InvalidPartOrder", "InvalidRequest", "EntityTooSmall", *REFUSALS}
Sizes = list[int]
Listed = list[dict[str, Any]]


@dataclass(frozen=True)
class S3Capabilities:
    """What a service can be believed."""

    md5_tags: bool
    refuses_wrong_sums: bool


class S3Backend:
    """S3's own requests through s3fs, which finds credentials and endpoint in the environment and in boto's files."""

    def __init__(self, url: str, throttle: BandwidthThrottle, watch: TransferWatchdog, timeout_s: float) -> None:
        parts = urlsplit(url)
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        if find_spec("s3fs") is None:
            raise SettingsError(
                f"machine.mirror {strip_credentials(url)}: the library s3fs is missing (pip install s3fs)"
            )
        if not self._bucket:
            raise SettingsError(f"machine.mirror {strip_credentials(url)}: no bucket; write s3://BUCKET/PREFIX")
        self._throttle, self._watch, self._timeout_s = throttle, watch, timeout_s
        self._lock = threading.Lock()
        self._system: Any = None
        self._character: S3Capabilities | None = None
        self._uploads: dict[str, str] = {}
        self._verified: dict[str, Entry] = {}

    def reopen(self) -> None:
        with self._lock:
            self._system = None

    def list(self, folder: str) -> dict[str, int]:
        found: dict[str, int] = {}
        asked: dict[str, Any] = {"Prefix": f"{self._key(folder)}/" if folder else self._prefix and f"{self._prefix}/"}
        skipped = len(self._prefix) + 1 if self._prefix else 0
        while True:
            answer = self._call("list_objects_v2", **asked)
            found |= {one["Key"][skipped:]: int(one["Size"]) for one in answer.get("Contents", [])}
            if not answer.get("IsTruncated"):
                return found
            asked["ContinuationToken"] = answer["NextContinuationToken"]

    def size(self, name: str) -> int:
        return int(self._call("head_object", Key=self._key(name))["ContentLength"])

    def read(self, name: str) -> bytes:
        """Read again if the ETag is not the MD5 of what came: the same twice is what is there."""
        first, tag = self._get(name, {})
        if hashlib.md5(first, usedforsecurity=False).hexdigest() == tag:
            return first
        second, _ = self._get(name, {})
        if first != second:
            raise ContentMismatchError("read twice, it was not the same")
        return first

    def piece(self, name: str, start: int) -> bytes:
        return self._get(name, {"Range": f"bytes={start}-{start + PIECE_BYTES - 1}"}, some=True)[0]

    def write(self, name: str, data: bytes) -> None:
        self._put(name, data, encode_base64(hashlib.sha256(data).digest()))

    def remove(self, name: str) -> None:
        self._call("delete_object", Key=self._key(name))

    def send(self, name: str, path: Path, entry: Entry, trying: RetryCallable) -> int:
        """In parts, each verified before the object appears; what a killed process sent of it is not sent again."""
        if self._verified.get(name) == entry and trying(f"look for {name}", lambda: self._has_size(name, entry[1])):
            return 0
        parts = MultipartChecksums.of(path)
        if parts.entry != entry:
            raise build_damaged_error(path, parts.entry)
        if self._holds(name, parts, trying):
            return 0
        sent: Sizes = []
        for _ in range(RESTARTS):
            try:
                if parts.whole:
                    tag = trying(f"write {name}", lambda: self._send_whole(name, parts, sent))
                else:
                    tag = self._send_parts(name, parts, trying, sent)
            except FileNotFoundError:  # the upload has ended: by a try whose answer was lost, or by somebody else
                tag = ""
            self._uploads.pop(name, None)
            if tag == parts.etag or self._holds(name, parts, trying):
                self._verified[name] = entry
                return sum(sent)
        raise ContentMismatchError(f"{name}: sent {RESTARTS} times, and what the service holds is still something else")

    def _send_whole(self, name: str, parts: MultipartChecksums, sent: Sizes) -> str:
        """Returns the ETag of the object; `sent` grows by what arrived."""
        data = parts.data(1)
        tag = self._put(name, data, parts.checksum)
        sent.append(len(data))
        self._require(parts, 1, tag)
        return tag

    def _send_parts(self, name: str, parts: MultipartChecksums, trying: RetryCallable, sent: Sizes) -> str:
        """As `_send_whole`."""
        upload, arrived = trying(f"begin {name}", lambda: self._begun(name))
        for number, md5 in enumerate(parts.md5s, 1):
            if arrived.get(number) != md5.hex():
                arrived[number], size = trying(f"write {name}", self._part(name, upload, parts, number))
                sent.append(size)
        listed = [
            {"PartNumber": number, "ETag": f'"{arrived[number]}"', "ChecksumSHA256": encode_base64(sha256)}
            for number, sha256 in enumerate(parts.sha256s, 1)
        ]
        return trying(f"finish {name}", lambda: self._finished(name, upload, listed))

    def _finished(self, name: str, upload: str, listed: Listed) -> str:
        """Put an object together; returns its ETag. An upload that the service will not finish is given up.

        One that takes longer than a time-out is asked for again: the service does it once, and then says that it has.
        """
        this: dict[str, Any] = {"Key": self._key(name), "UploadId": upload}
        try:
            done = self._call("complete_multipart_upload", MultipartUpload={"Parts": listed}, **this)
        except OSError as error:
            if _error_code(error) not in UNFINISHABLE:
                raise
            self._call("abort_multipart_upload", **this)
            raise FileNotFoundError(f"{name}: {_error_code(error)}") from None
        return str(done["ETag"]).strip('"')

    def _begun(self, name: str) -> tuple[str, dict[int, str]]:
        """An upload that has not been finished, with the ETags of its parts; a new one if there is none."""
        key = self._key(name)
        upload = self._uploads.get(name) or self._left_behind(key)
        arrived: dict[int, str] = {}
        if upload is None:
            upload = str(self._call("create_multipart_upload", Key=key, ChecksumAlgorithm="SHA256")["UploadId"])
        else:
            asked: dict[str, Any] = {"Key": key, "UploadId": upload}
            while True:
                answer = self._call("list_parts", **asked)
                arrived |= {int(one["PartNumber"]): str(one["ETag"]).strip('"') for one in answer.get("Parts", [])}
                if not answer.get("IsTruncated"):
                    break
                asked["PartNumberMarker"] = answer["NextPartNumberMarker"]
        self._uploads[name] = upload
        return upload, arrived

    def _left_behind(self, key: str) -> str | None:
        """By a process that was killed. Some may not list uploads, and some services cannot."""
        try:
            listed = self._call("list_multipart_uploads", Prefix=key).get("Uploads", [])
        except (PermissionError, NotImplementedError):
            return None
        return next((str(one["UploadId"]) for one in listed if one["Key"] == key), None)

    def _part(self, name: str, upload: str, parts: MultipartChecksums, number: int) -> Callable[[], tuple[str, int]]:
        def send() -> tuple[str, int]:
            data = parts.data(number)
            sha256 = encode_base64(parts.sha256s[number - 1])
            asked: dict[str, Any] = {"Key": self._key(name), "UploadId": upload, "PartNumber": number}
            tag = str(self._call("upload_part", data, ChecksumSHA256=sha256, **asked)["ETag"]).strip('"')
            self._require(parts, number, tag)
            return tag, len(data)

        return send

    def _require(self, parts: MultipartChecksums, number: int, tag: str) -> None:
        """Raise ContentMismatchError if the service can be believed, and has something else."""
        if tag != parts.md5s[number - 1].hex() and self._known().md5_tags:
            raise ContentMismatchError("the service's MD5 of what arrived is another")

    def _has_size(self, name: str, size: int) -> bool:
        try:
            return self.size(name) == size
        except FileNotFoundError:
            return False

    def _holds(self, name: str, parts: MultipartChecksums, trying: RetryCallable) -> bool:
        """Whether an object is there, with exactly these bytes."""
        key = self._key(name)
        try:
            there = trying(f"look for {name}", lambda: self._call("head_object", Key=key, ChecksumMode="ENABLED"))
        except FileNotFoundError:
            return False
        if int(there["ContentLength"]) != parts.entry[1]:
            return False
        right = str(there["ETag"]).strip('"') == parts.etag
        if not right and str(there.get("ChecksumSHA256")) == parts.checksum:
            right = trying("ask what the service verifies", self._known).refuses_wrong_sums
        if right or compute_remote_digest(self, name, parts.entry[1], trying) == parts.entry[0]:
            self._verified[name] = parts.entry
            return True
        return False

    def _known(self) -> S3Capabilities:
        """Put small objects with a right and a wrong checksum, and see."""
        if self._character is None:
            name, data = f"checks/{uuid4().hex}", b"is this what arrived?"
            right, wrong = (encode_base64(hashlib.sha256(one).digest()) for one in (data, b"no"))
            tag, refuses = self._put(name, data, right), False
            try:
                self._put(name, data, wrong)
            except OSError as error:
                refuses = _error_code(error) in REFUSALS
                if not refuses:
                    raise
            self.remove(name)
            self._character = S3Capabilities(hashlib.md5(data, usedforsecurity=False).hexdigest() == tag, refuses)
        return self._character

    def _put(self, name: str, data: bytes, sha256: str) -> str:
        """Returns the ETag."""
        return str(self._call("put_object", data, Key=self._key(name), ChecksumSHA256=sha256)["ETag"]).strip('"')

    def _get(self, name: str, asked: dict[str, str], some: bool = False) -> tuple[bytes, str]:
        """Content and ETag.

        Args:
            name: of the object.
            asked: further parameters.
            some: what came before a connection broke is an answer too.
        """
        system = self._opened()

        async def get(progress: TransferProgress) -> tuple[bytes, str]:
            answer = await system._call_s3("get_object", Bucket=self._bucket, Key=self._key(name), **asked)
            body, found = answer["Body"], bytearray()
            try:
                while block := await body.read(READ_BYTES):
                    found += block
                    progress.moved()
            except Exception:  # whatever broke it: what has come counts, and the caller asks for the rest
                if not (some and found):
                    raise
            finally:
                body.close()
            return bytes(found), str(answer["ETag"]).strip('"')

        return self._watch.coroutine(get, system.loop)

    def _call(self, method: str, body: bytes | None = None, **asked: Any) -> dict[str, Any]:
        """One request."""
        system = self._opened()

        async def call(progress: TransferProgress) -> dict[str, Any]:
            sent = {} if body is None else {"Body": ThrottledBody(body, self._throttle, progress)}
            answer: dict[str, Any] = await system._call_s3(method, Bucket=self._bucket, **asked, **sent)
            return answer

        return self._watch.coroutine(call, system.loop, 0.0 if body is None else self._watch.buffered_s(len(body)))

    def _key(self, name: str) -> str:
        return f"{self._prefix}/{name}" if self._prefix else name

    def _opened(self) -> Any:
        with self._lock:
            if self._system is None:
                self._system = self._open()
            return self._system

    def _open(self) -> Any:
        import fsspec

        settings = {
            "connect_timeout": self._timeout_s,
            "read_timeout": 2 * (self._timeout_s + self._watch.buffered_s(BUFFERED_BYTES)),  # the watch is nearer
            "retries": {"mode": "standard", "total_max_attempts": 1},
            "connector_args": {"socket_factory": create_shallow_socket},
        }
        system: Any = fsspec.filesystem(
            "s3", skip_instance_cache=True, use_listings_cache=False, config_kwargs=settings
        )
        system.retries = 1  # tries are ours: patience counts them, and asks whether there is time for another
        system.connect()
        system.s3.meta.events.register_last("before-call.s3", _remove_expect_header)
        return system


def _remove_expect_header(params: dict[str, Any], **_: Any) -> None:
    """Send bodies at once: for a server that answers no `Expect: 100-continue`, the client would wait for ever."""
    params["headers"].pop("Expect", None)


def _error_code(error: BaseException) -> str:
    """The service's, of what s3fs has translated."""
    response = getattr(error.__cause__, "response", None)
    return str(response["Error"].get("Code", "")) if response else ""
