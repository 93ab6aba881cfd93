"""`ratchet keys`: who may sign promoted models of this project, and who may no longer."""

from dataclasses import dataclass
from pathlib import Path

from ratchet.errors import SettingsError
from ratchet.registry.signing import keys as keyring
from ratchet.registry.signing import keys as pairs
from ratchet.registry.signing.keys import SHOWN, Keyring
from ratchet.storage.layout import ProjectLayout


@dataclass(frozen=True)
class KeysOptions:
    """What is to be done; nothing: only list."""

    new: bool = False
    """Make a key pair, and trust it."""
    trust: Path | None = None
    """Trust the public key in this PEM file."""
    revoke: str | None = None
    """Trust the key of this fingerprint (or its beginning), or this identity, no longer."""
    reason: str | None = None
    """Why it is revoked."""
    trust_identity: str | None = None
    """Trust what this identity signs through sigstore."""
    issuer: str | None = None
    """Who vouches for the identity."""


def keys(layout: ProjectLayout, options: KeysOptions = KeysOptions()) -> str:
    """Do what is asked; returns what to tell: what was done, and everybody who is or was trusted.

    Raises:
        SettingsError: options that do not go together, a file without a key, a fingerprint that is none.
        DamagedFileError: keys.json was tampered with.
        LockHeldError: somebody else is changing it.
    """
    _check_options(options)
    said = _apply_options(layout, options)
    return "\n".join([*said, *_list_keys(layout, keyring.read_keyring(layout.keyring))])


def _check_options(options: KeysOptions) -> None:
    asked = [options.new, options.trust is not None, options.revoke is not None, options.trust_identity is not None]
    if sum(asked) > 1:
        raise SettingsError("keys: --new, --trust, --trust-identity and --revoke are done one at a time")
    if (options.revoke is None) != (options.reason is None):
        raise SettingsError("keys: --revoke FINGERPRINT and --reason TEXT belong together")
    if (options.trust_identity is None) != (options.issuer is None):
        raise SettingsError("keys: --trust-identity WHO and --issuer URL belong together")


def _apply_options(layout: ProjectLayout, options: KeysOptions) -> list[str]:
    commit = f"commit {layout.keyring.relative_to(layout.root)}"
    if options.new:
        key = pairs.create_key_pair(layout)
        return [f"key {key.fingerprint[:SHOWN]} is made and trusted; {commit}, and keep {layout.private_key}: it alone "
                "can sign as this key, and nobody else should see it"]  # fmt: skip
    if options.trust is not None:
        return [f"key {pairs.trust_key(layout, options.trust).fingerprint[:SHOWN]} is trusted; {commit}"]
    if options.trust_identity is not None and options.issuer is not None:
        one = pairs.trust_identity(layout, options.trust_identity, options.issuer)
        return [f"{one.identity} of {one.issuer} is trusted; {commit}"]
    if options.revoke is not None and options.reason is not None:
        whom = pairs.revoke_trust(layout, options.revoke, options.reason)
        shown = whom if "@" in whom or "/" in whom else f"key {whom[:SHOWN]}"
        return [f"{shown} is revoked: what it signed is refused from now on; {commit}, and promote again what is still "
                "wanted, with another key"]  # fmt: skip
    return []


def _list_keys(layout: ProjectLayout, known: Keyring) -> list[str]:
    own, wrong = None, []
    try:
        own = pairs.own_fingerprint(layout)
    except SettingsError as error:
        wrong = [f"no key signs here: {error}"]
    lines = [
        _format_key(f"key {key.fingerprint[:SHOWN]}", key.revoked, "  (yours)" if key.fingerprint == own else "")
        for key in known.keys
    ]
    lines += [_format_key(f"{one.identity} of {one.issuer}", one.revoked, "") for one in known.identities]
    if own is not None and known.key(own) is None:
        lines.append(f"key {own[:SHOWN]}  not trusted  (yours)")
    return [*lines, *wrong] or ["no key is trusted yet; the first promotion makes one, or `ratchet keys --new`"]


def _format_key(who: str, revoked: str | None, whose: str) -> str:
    return f"{who}  {'trusted' if revoked is None else f'revoked: {revoked}'}{whose}"
