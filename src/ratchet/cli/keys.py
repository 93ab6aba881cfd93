"""`ratchet keys`: shows and changes the keys and identities that the project trusts to sign promoted models."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.cli.output import print_record
from ratchet.storage.layout import ProjectLayout

if TYPE_CHECKING:
    from ratchet.stages.keys import KeyringReport

HELP = "show or change the keys and identities that this project trusts to sign promoted models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    change = parser.add_mutually_exclusive_group()
    change.add_argument("--new", action="store_true", help="create your key pair, and trust it")
    change.add_argument("--trust", type=Path, metavar="FILE", help="trust the public key in this PEM file")
    change.add_argument("--trust-identity", metavar="WHO", help="trust what this identity signs through sigstore")
    change.add_argument("--revoke", metavar="KEY", help="no longer trust a key (its first digits) or an identity")
    parser.add_argument("--issuer", metavar="URL", help="with --trust-identity: issuer that certifies the identity")
    parser.add_argument("--reason", metavar="TEXT", help="with --revoke: the reason")


def run(arguments: argparse.Namespace) -> None:
    from ratchet.stages.keys import KeysOptions, keys

    names = ("new", "trust", "revoke", "reason", "trust_identity", "issuer")
    options = KeysOptions(**{name: getattr(arguments, name) for name in names})
    print_record(keys(ProjectLayout.find(arguments.project), options), format_keys, arguments)


def format_keys(report: "KeyringReport") -> str:
    """Format the change, then every key and identity that is or was trusted."""
    from ratchet.registry.keys import SHOWN_DIGITS

    keyring = report.keyring
    lines = []
    for key in keyring.keys:
        yours = "  (yours)" if key.fingerprint == report.own_key else ""
        lines.append(f"key {key.fingerprint[:SHOWN_DIGITS]}  {_format_trust(key.revoked)}{yours}")
    for identity in keyring.identities:
        lines.append(f"{identity.identity} of {identity.issuer}  {_format_trust(identity.revoked)}")
    if report.own_key is not None and keyring.find_key(report.own_key) is None:
        lines.append(f"key {report.own_key[:SHOWN_DIGITS]}  not trusted  (yours)")
    if report.own_key_problem is not None:
        lines.append(f"no key can sign on this machine: {report.own_key_problem}")
    lines = lines or ["no key is trusted yet; the first promotion or `ratchet keys --new` creates one"]
    return "\n".join([*_format_change(report), *lines])


def _format_trust(revoked: str | None) -> str:
    return "trusted" if revoked is None else f"revoked: {revoked}"


def _format_change(report: "KeyringReport") -> list[str]:
    from ratchet.registry.keys import SHOWN_DIGITS

    if (change := report.change) is None:
        return []
    signer = change.identity or f"key {(change.key or '')[:SHOWN_DIGITS]}"
    commit = f"commit {report.keyring_file.parent.name}/{report.keyring_file.name}"
    if change.action == "created":
        return [
            f"{signer} is created and trusted; {commit}. Back up {report.private_key_file} and keep it secret: "
            "only that file can sign with this key"
        ]
    if change.action == "trusted":
        return [f"{signer}{f' of {change.issuer}' if change.issuer else ''} is trusted; {commit}"]
    return [
        f"{signer} is revoked, its signatures are refused from now on; {commit}. "
        "If you still need models that it signed, promote them again with another key"
    ]
