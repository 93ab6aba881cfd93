"""Builds and parses signature files: a sigstore bundle with a DSSE envelope with an in-toto statement that lists files.

The format is OpenSSF Model Signing 1.0, so its `model_signing` command and other implementations can verify the files.
Sources: the in-toto Statement v1 (in-toto/attestation, spec/v1), the DSSE protocol 1.0 (secure-systems-lab/dsse,
protocol.md), sigstore's bundle v0.3 (sigstore/protobuf-specs), and for the predicate sigstore/model-transparency
(model_signing.signing).

Callers hash the files: those of a sealed folder were just compared with its manifest.
"""

import base64
import binascii
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

MEDIA_TYPE = "application/vnd.dev.sigstore.bundle.v0.3+json"
PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://model_signing/signature/v1.0"


class NotSignedError(ValueError):
    """The file is not a signature in this format; the message says why."""


@dataclass(frozen=True)
class DsseEnvelope:
    """A parsed signature file; nothing in it is verified."""

    payload: bytes
    """The signed statement."""
    signature: bytes
    fingerprint: str | None
    """The key named in the file; None if it contains a sigstore certificate instead."""
    text: str
    """Content of the whole file."""


def build_statement(name: str, digests: Mapping[str, str], ignored: tuple[str, ...]) -> bytes:
    """Build the statement to be signed; equal files give equal bytes.

    Args:
        name: name of the model for readers; it proves nothing.
        digests: SHA-256 of each file by relative POSIX name.
        ignored: names of files in the same folder that the signature does not cover.
    """
    names = sorted(digests, key=PurePosixPath)
    root = hashlib.sha256(b"".join(bytes.fromhex(digests[one]) for one in names)).hexdigest()
    statement = {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": root}}],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "serialization": {
                "method": "files",
                "hash_type": "sha256",
                "allow_symlinks": False,
                "ignore_paths": list(ignored),
            },
            "resources": [{"name": one, "algorithm": "sha256", "digest": digests[one]} for one in names],
        },
    }
    return json.dumps(statement, indent=2, ensure_ascii=False).encode()


def parse_digests(payload: bytes) -> dict[str, str]:
    """Parse the SHA-256 of every file in a statement. Raises NotSignedError for a statement in another format."""
    try:
        statement = json.loads(payload)
        types = (statement["_type"], statement["predicateType"])
        serialization = statement["predicate"]["serialization"]
        resources = statement["predicate"]["resources"]
        rows = [(str(row["name"]), str(row["algorithm"]), str(row["digest"])) for row in resources]
        root, subjects = statement["subject"][0]["digest"]["sha256"], len(statement["subject"])
        total = hashlib.sha256(b"".join(bytes.fromhex(sha) for _, _, sha in rows)).hexdigest()
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise NotSignedError(f"its statement is not about a model ({error!r})") from None
    if types != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise NotSignedError(f"its statement: found predicate type {types[1]!r}; expected {PREDICATE_TYPE!r}")
    if serialization.get("method") != "files" or serialization.get("allow_symlinks") or subjects != 1:
        raise NotSignedError("its statement does not list whole files")
    digests = {name: sha for name, algorithm, sha in rows if algorithm == "sha256"}
    if len(digests) != len(rows):
        raise NotSignedError("its statement lists a file twice, or a digest other than SHA-256")
    if total != root:
        raise NotSignedError("its statement's total digest does not match the files that it lists")
    return digests


def encode_payload(payload: bytes) -> bytes:
    """Encode the bytes that a key signs: DSSE's pre-authentication encoding `DSSEv1 LENGTH TYPE LENGTH PAYLOAD`."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def build_bundle(payload: bytes, signature: bytes, fingerprint: str) -> str:
    """Build the signature file for a signature by a key."""
    bundle = {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": fingerprint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return json.dumps(bundle)


def parse_envelope(text: str) -> DsseEnvelope:
    """Parse a signature file. Raises NotSignedError if it is not one."""
    try:
        bundle = json.loads(text)
        envelope, material = bundle["dsseEnvelope"], bundle["verificationMaterial"]
        payload = _decode_base64(envelope["payload"])
        (signature,) = (_decode_base64(one["sig"]) for one in envelope["signatures"])
        hint = material["publicKey"]["hint"] if "publicKey" in material else None
        types = (bundle["mediaType"], envelope["payloadType"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NotSignedError(f"not a signature file ({error!r})") from None
    if types != (MEDIA_TYPE, PAYLOAD_TYPE):
        raise NotSignedError(f"found a bundle with types {types[0]!r}, {types[1]!r}, which this version cannot read")
    if hint is None and "certificate" not in material:
        raise NotSignedError("found neither a key nor a certificate")
    return DsseEnvelope(payload, signature, None if hint is None else str(hint), text)


def _decode_base64(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
