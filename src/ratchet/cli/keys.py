"""`ratchet keys`: shows and changes the keys and identities that the project trusts to sign promoted models."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from ratchet.cli.output import add_json_argument, print_record
from ratchet.cli.projects import find_layout
from ratchet.errors import EXIT_OK

if TYPE_CHECKING:
    from ratchet.stages.keys import KeyringReport

HELP = "show or change the keys and identities that this project trusts to sign promoted models"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    change = parser.add_mutually_exclusive_group()
    change.add_argument("--new", action="store_true", help="create your key pair, and trust it")
    change.add_argument("--trust", type=Path, metavar="FILE", help="trust the public key in this PEM file")
    change.add_argument("--trust-identity", metavar="WHO", help="trust what this identity signs through sigstore")
    change.add_argument("--revoke", metavar="KEY", help="no longer trust a key (its first digits) or an identity")
    parser.add_argument("--issuer", metavar="URL", help="with --trust-identity: issuer that certifies the identity")
    parser.add_argument("--reason", metavar="TEXT", help="with --revoke: the reason")
    add_json_argument(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    from ratchet.stages.keys import KeysOptions, keys

    options = KeysOptions(
        new=arguments.new, trust=arguments.trust, revoke=arguments.revoke, reason=arguments.reason,
        trust_identity=arguments.trust_identity, issuer=arguments.issuer,
    )  # fmt: skip
    print_record(keys(find_layout(arguments), options), format_keys, arguments)
    return EXIT_OK


def format_keys(report: "KeyringReport") -> str:
    """Format the change, then every key and identity that is or was trusted."""
    from ratchet.registry.signing.keys import SHOWN_DIGITS

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
    return "\n".join(
        [
            *_format_change(report),
            *(lines or ["no key is trusted yet; the first promotion or `ratchet keys --new` creates one"]),
        ]
    )


def _format_trust(revoked: str | None) -> str:
    return "trusted" if revoked is None else f"revoked: {revoked}"


def _format_change(report: "KeyringReport") -> list[str]:
    from ratchet.registry.signing.keys import SHOWN_DIGITS

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
