"""The signature's file: a sigstore bundle around a DSSE envelope around an in-toto statement that lists every file.

The form is that of OpenSSF Model Signing 1.0, so that its `model_signing` command, or anything else that knows it, can
check what is written here. Sources: the in-toto Statement v1 (in-toto/attestation, spec/v1), the DSSE protocol 1.0
(secure-systems-lab/dsse, protocol.md), sigstore's bundle v0.3 (sigstore/protobuf-specs), and for the predicate
sigstore/model-transparency (model_signing.signing).

Files are hashed by whoever calls: a sealed folder's were compared with its manifest a moment before.
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
    """A file that is no signature of this form; the message says in which way."""


@dataclass(frozen=True)
class DsseEnvelope:
    """A signature as it was read; nothing in it is proved."""

    payload: bytes
    """The statement, as it was signed."""
    signature: bytes
    fingerprint: str | None
    """Key that it says made it; None where a certificate of sigstore stands instead."""
    text: str
    """The whole file."""


def build_statement(name: str, digests: Mapping[str, str], ignored: tuple[str, ...]) -> bytes:
    """The bytes that are signed; equal files give equal bytes.

    Args:
        name: of the model; says something to people, and proves nothing.
        digests: SHA-256 of each file, by relative POSIX name.
        ignored: names of files in the same folder that the signature does not cover.
    """
    names = sorted(digests, key=PurePosixPath)
    root = hashlib.sha256(b"".join(bytes.fromhex(digests[one]) for one in names)).hexdigest()
    value = {
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
    return json.dumps(value, indent=2, ensure_ascii=False).encode()


def parse_digests(payload: bytes) -> dict[str, str]:
    """SHA-256 of every file that a statement lists. Raises NotSignedError for a statement of another form."""
    try:
        value = json.loads(payload)
        kinds = (value["_type"], value["predicateType"])
        serialization = value["predicate"]["serialization"]
        resources = value["predicate"]["resources"]
        rows = [(str(row["name"]), str(row["algorithm"]), str(row["digest"])) for row in resources]
        root, subjects = value["subject"][0]["digest"]["sha256"], len(value["subject"])
        whole = hashlib.sha256(b"".join(bytes.fromhex(sha) for _, _, sha in rows)).hexdigest()
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise NotSignedError(f"its statement is not one about a model ({error!r})") from None
    if kinds != (STATEMENT_TYPE, PREDICATE_TYPE):
        raise NotSignedError(f"its statement is of the kind {kinds[1]!r}, not {PREDICATE_TYPE!r}")
    if serialization.get("method") != "files" or serialization.get("allow_symlinks") or subjects != 1:
        raise NotSignedError("it lists something else than whole files")
    found = {name: sha for name, algorithm, sha in rows if algorithm == "sha256"}
    if len(found) != len(rows):
        raise NotSignedError("it lists a file twice, or by another digest than SHA-256")
    if whole != root:
        raise NotSignedError("the digest of all files in it is not that of the files that it lists")
    return found


def encode_payload(payload: bytes) -> bytes:
    """What a key signs: the pre-authentication encoding of DSSE, `DSSEv1 LENGTH TYPE LENGTH PAYLOAD`."""
    return b"DSSEv1 %d %s %d %s" % (len(PAYLOAD_TYPE), PAYLOAD_TYPE.encode(), len(payload), payload)


def build_bundle(payload: bytes, signature: bytes, fingerprint: str) -> str:
    """The file of a signature that a key made."""
    value = {
        "mediaType": MEDIA_TYPE,
        "verificationMaterial": {"publicKey": {"hint": fingerprint}, "tlogEntries": []},
        "dsseEnvelope": {
            "payload": base64.b64encode(payload).decode(),
            "payloadType": PAYLOAD_TYPE,
            "signatures": [{"sig": base64.b64encode(signature).decode(), "keyid": ""}],
        },
    }
    return json.dumps(value)


def parse_envelope(text: str) -> DsseEnvelope:
    """Take a signature's file apart. Raises NotSignedError when it is none."""
    try:
        value = json.loads(text)
        envelope, material = value["dsseEnvelope"], value["verificationMaterial"]
        payload = _decode_base64(envelope["payload"])
        (signature,) = (_decode_base64(one["sig"]) for one in envelope["signatures"])
        hint = material["publicKey"]["hint"] if "publicKey" in material else None
        kinds = (value["mediaType"], envelope["payloadType"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NotSignedError(f"no signature ({error!r})") from None
    if kinds != (MEDIA_TYPE, PAYLOAD_TYPE):
        raise NotSignedError(f"a bundle of the kinds {kinds[0]!r}, {kinds[1]!r}, which this version does not know")
    if hint is None and "certificate" not in material:
        raise NotSignedError("neither key nor certificate in it")
    return DsseEnvelope(payload, signature, None if hint is None else str(hint), text)


def _decode_base64(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
