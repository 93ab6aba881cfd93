"""`ratchet keys`: the keys and identities whose signatures on promoted models the project trusts."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ratchet.errors import SettingsError
from ratchet.registry import keys as signing_keys
from ratchet.registry.keys import Keyring
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record


@dataclass(frozen=True)
class KeysOptions:
    """Options of `ratchet keys`: at most one change of the keyring; by default none."""

    new: bool = False
    """Create a key pair and trust it."""
    trust: Path | None = None
    """PEM file of a public key to trust."""
    revoke: str | None = None
    """Fingerprint of a key (or its beginning), or an identity, whose trust is revoked."""
    reason: str | None = None
    """Reason for the revocation."""
    trust_identity: str | None = None
    """Identity to trust, which signs through sigstore."""
    issuer: str | None = None
    """OpenID Connect issuer that certifies the identity."""


class KeyringChange(Record):
    """A change of the keyring."""

    action: Literal["created", "trusted", "revoked"]
    key: str | None = None
    """Fingerprint of the key."""
    identity: str | None = None
    issuer: str | None = None


class KeyringReport(Record):
    """The project's keyring."""

    keyring: Keyring
    keyring_file: Path
    private_key_file: Path
    own_key: str | None
    """Fingerprint of the key that signs on this machine."""
    own_key_problem: str | None
    """Reason why no key can sign on this machine."""
    change: KeyringChange | None
    """The change; None if nothing changed."""


def keys(layout: ProjectLayout, options: KeysOptions = KeysOptions()) -> KeyringReport:
    """Change the keyring if the options require it, and return the keyring.

    Raises:
        SettingsError: options contradict each other, a file contains no public key, or a fingerprint is unknown.
        DamagedFileError: keys.json was changed by hand.
        LockHeldError: another process changes the keyring.
    """
    _check_options(options)
    change = _change_keyring(layout, options)
    own_key, problem = None, None
    try:
        own_key = signing_keys.own_fingerprint(layout)
    except SettingsError as error:
        problem = str(error)
    return KeyringReport(
        keyring=signing_keys.read_keyring(layout.keyring), keyring_file=layout.keyring,
        private_key_file=layout.private_key, own_key=own_key, own_key_problem=problem, change=change,
    )  # fmt: skip


def _check_options(options: KeysOptions) -> None:
    changes = [options.new, options.trust is not None, options.revoke is not None, options.trust_identity is not None]
    if sum(changes) > 1:
        raise SettingsError("give only one of --new, --trust, --trust-identity and --revoke")
    if (options.revoke is None) != (options.reason is None):
        raise SettingsError("--revoke FINGERPRINT and --reason TEXT belong together: give both or neither")
    if (options.trust_identity is None) != (options.issuer is None):
        raise SettingsError("--trust-identity WHO and --issuer URL belong together: give both or neither")


def _change_keyring(layout: ProjectLayout, options: KeysOptions) -> KeyringChange | None:
    if options.new:
        return KeyringChange(action="created", key=signing_keys.create_key_pair(layout).fingerprint)
    if options.trust is not None:
        return KeyringChange(action="trusted", key=signing_keys.trust_key(layout, options.trust).fingerprint)
    if options.trust_identity is not None and options.issuer is not None:
        trusted = signing_keys.trust_identity(layout, options.trust_identity, options.issuer)
        return KeyringChange(action="trusted", identity=trusted.identity, issuer=trusted.issuer)
    if options.revoke is not None and options.reason is not None:
        revoked = signing_keys.revoke_trust(layout, options.revoke, options.reason)
        if signing_keys.read_keyring(layout.keyring).find_key(revoked) is None:
            return KeyringChange(action="revoked", identity=revoked)
        return KeyringChange(action="revoked", key=revoked)
    return None
