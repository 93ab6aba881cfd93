"""Approvals of promotions: signed statements in which people agree with one verdict, and the rule that counts them.

A proposal (by the person who wants to promote) contains a verdict, so that people on other machines can read it. An
approval names the verdict by its SHA-256. The verdict names the model, the champion that the model was compared with,
and the rules, so an approval does not apply to anything else. Both are in-toto statements in the same envelope as the
signatures of models (`registry.keys`), each in a file of its own:

    experiments/approvals/VERDICT/SIGNER.proposal.json  SIGNER.json      (first 16 digits; in git)
    approvals/SIGNER.json                                                in the signed folder of a promoted model

With a server, the same texts are also in the run with the ledger (`tracking.mlflow.shared_ledger`). Names of files mean
nothing: every text is verified.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from pydantic import ValidationError

from ratchet.registry import keys, signature
from ratchet.registry.keys import SHOWN_DIGITS, Keyring, NotSignedError
from ratchet.registry.model_store import BUNDLE
from ratchet.registry.signature import Signer
from ratchet.storage import digests, files, html
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import Approver

PROPOSAL_TYPE, APPROVAL_TYPE = "urn:ratchet-llm:proposal:v1", "urn:ratchet-llm:approval:v1"
"""Predicate types of the statements."""

VALID_DAYS = 7
"""An older approval does not count: its approver may not know what has happened since."""

CLOCK_TOLERANCE = timedelta(minutes=5)
"""An approval may be this far in the future, because clocks of machines differ."""

FOLDER = "approvals"
"""Folder of the approvals in the folder of a promoted model."""

_SUBJECT = "verdict.json"


class ApprovalPredicate(Record):
    """Content of a proposal or an approval, besides the digest of the verdict."""

    model_name: str
    """Name of the registered model."""
    model_digest: str
    actor: str
    """Name that the signer gave: RATCHET_ACTOR, git's user, or the login name."""
    time: str
    """UTC, ISO 8601."""
    key: str | None = None
    """Fingerprint of the signer's key; None for an identity, which the certificate names."""
    verdict: str | None = None
    """Content of verdict.json, in a proposal."""


class SignedStatement(Record):
    """A proposal or an approval after its verification."""

    is_proposal: bool
    verdict_digest: str
    """SHA-256 of verdict.json."""
    signer: str
    """Fingerprint or identity; not proven if there is a problem."""
    predicate: ApprovalPredicate
    problem: str | None
    """Why the statement does not count; None: it counts."""
    text: str
    """The signature file."""

    @property
    def label(self) -> str:
        """Description of the signer."""
        name = f"key {self.signer[:SHOWN_DIGITS]}" if self.predicate.key else self.signer
        return f"{self.predicate.actor} ({name}, {self.predicate.time})"

    @property
    def approver(self) -> Approver:
        """The approver, for the ledger."""
        return Approver(signer=self.signer, actor=self.predicate.actor, time=self.predicate.time)

    @property
    def file_name(self) -> str:
        """Name of the file: a signer has one for each verdict."""
        name = digests.hash_bytes(self.signer.encode())[:SHOWN_DIGITS] if self.predicate.key is None else self.signer
        return f"{name[:SHOWN_DIGITS]}{'.proposal' if self.is_proposal else ''}.json"


# ------------------------------------------------------------------------------------------------------------- writing


def sign_statement(signer: Signer, verdict_digest: str, predicate: ApprovalPredicate) -> str:
    """Return a signed proposal (if the predicate has a verdict) or approval. Raises SettingsError as `Signer.sign`."""
    statement = {
        "_type": keys.STATEMENT_TYPE,
        "subject": [{"name": _SUBJECT, "digest": {"sha256": verdict_digest}}],
        "predicateType": APPROVAL_TYPE if predicate.verdict is None else PROPOSAL_TYPE,
        "predicate": predicate.model_dump(mode="json", exclude_none=True),
    }
    return signer.sign(json.dumps(statement, indent=2, ensure_ascii=False).encode())


def save_statement(layout: ProjectLayout, statement: SignedStatement) -> Path:
    """Write a statement to its file in the project, and return the path."""
    path = layout.approvals / statement.verdict_digest[:SHOWN_DIGITS] / statement.file_name
    files.write_atomic(path, statement.text)
    return path


# ------------------------------------------------------------------------------------------------------------- reading


def read_texts(folder: Path) -> dict[str, str]:
    """Return the texts of all files below a folder, by path."""
    paths = sorted(path for path in folder.rglob("*.json") if path.is_file()) if folder.is_dir() else []
    return {str(path): path.read_text(encoding="utf-8", errors="replace") for path in paths}


def read_statements(
    texts: Mapping[str, str], keyring: Keyring, now: datetime | None
) -> tuple[list[SignedStatement], list[str]]:
    """Verify proposals and approvals: signatures and times.

    Args:
        texts: signature files, by a description of their place; equal texts are read once.
        keyring: the trusted keys and identities.
        now: time at which the approvals must be valid; None: any time.

    Returns:
        The statements, and a sentence about each text that is none.
    """
    statements, problems = list[SignedStatement](), list[str]()
    for text in dict.fromkeys(texts.values()):
        where = _escape(next(place for place, other in texts.items() if other == text))
        try:
            statements.append(_read_statement(where, text, keyring, now))
        except ValueError as error:  # NotSignedError, or a time in another format
            problems.append(f"{where}: not an approval ({' '.join(str(error).split())[:300]})")
    return statements, problems


def _escape(place: str) -> str:
    """Return the name of a file, or of a place on the server, as one line of text that can be printed."""
    return html.escape_invisible(place).replace("\n", "\\n").replace("\t", "\\t")


def _read_statement(where: str, text: str, keyring: Keyring, now: datetime | None) -> SignedStatement:
    envelope = keys.parse_envelope(text)
    is_proposal, verdict_digest, predicate = _parse_payload(envelope.payload)
    # Messages show them before the signature is verified: a line break could imitate another line of the output.
    if not all(map(str.isprintable, (predicate.actor, predicate.time, envelope.fingerprint or ""))):
        raise NotSignedError("its actor, time or key has characters that cannot be printed")
    time = datetime.fromisoformat(predicate.time)
    if time.tzinfo is None:
        raise NotSignedError(f"found time {predicate.time!r}; expected one with its offset from UTC")
    verified = signature.verify_signer(where, envelope, keyring, "approve again")
    problem = None if verified.state == "trusted" else verified.message
    if problem is None and predicate.key != envelope.fingerprint:
        problem = f"{where}: the statement names key {(predicate.key or 'none')[:SHOWN_DIGITS]}, another key signed it"
    if problem is None and now is not None:
        problem = _find_time_problem(where, time, now)
    return SignedStatement(
        is_proposal=is_proposal, verdict_digest=verdict_digest, signer=verified.signer, predicate=predicate,
        problem=problem, text=text,
    )  # fmt: skip


def _parse_payload(payload: bytes) -> tuple[bool, str, ApprovalPredicate]:
    """Return whether the statement is a proposal, the digest of its verdict, and its predicate.

    Raises NotSignedError for another statement, or if the verdict in a proposal does not have the digest.
    """
    try:
        statement = json.loads(payload)
        kind, (subject,) = statement["predicateType"], statement["subject"]
        digest = subject["digest"]["sha256"]
        predicate = ApprovalPredicate.model_validate(statement["predicate"])
        is_known = statement["_type"] == keys.STATEMENT_TYPE and kind in (APPROVAL_TYPE, PROPOSAL_TYPE)
    except (ValueError, KeyError, TypeError, RecursionError, ValidationError) as error:
        raise NotSignedError(repr(error)) from None
    content = predicate.verdict
    if not is_known or (kind == PROPOSAL_TYPE) != (content is not None):
        raise NotSignedError(f"found predicate type {kind!r}")
    if content is not None and digests.hash_bytes(content.encode()) != digest:
        raise NotSignedError("its verdict does not have the digest that it names")
    return content is not None, str(digest), predicate


def _find_time_problem(where: str, time: datetime, now: datetime) -> str | None:
    """Describe why an approval of this time is not valid now; None if it is."""
    if time > now + CLOCK_TOLERANCE:
        return f"{where}: is from the future ({time.isoformat()}); check the clocks of both machines, and approve again"
    if time < now - timedelta(days=VALID_DAYS):
        return f"{where}: has expired (of {time.isoformat()}, valid for {VALID_DAYS} days); approve again"
    return None


# ------------------------------------------------------------------------------------------------------------ counting


def select_approvals(
    statements: Iterable[SignedStatement], verdict_digest: str, model_name: str
) -> tuple[list[SignedStatement], list[str]]:
    """Return the approvals of a verdict that count, one for each signer, and a sentence about each that does not."""
    valid: dict[str, SignedStatement] = {}
    problems = dict[tuple[str, str], str]()
    for statement in statements:
        if statement.is_proposal or statement.verdict_digest != verdict_digest:
            continue
        if statement.problem is not None:
            problems[statement.signer, statement.text] = f"{statement.label}: {statement.problem}"
        elif statement.predicate.model_name != model_name:
            named = statement.predicate.model_name
            problems[statement.signer, statement.text] = f"{statement.label}: approves promote.model_name {named!r}"
        elif statement.signer not in valid or valid[statement.signer].predicate.time < statement.predicate.time:
            valid[statement.signer] = statement
    # A signer with a valid approval may have older ones.
    counted = sorted(valid.values(), key=lambda statement: (statement.predicate.time, statement.predicate.actor))
    return counted, [text for (signer, _), text in problems.items() if signer not in valid]


def count_missing(signers: Sequence[str], proposer: str | None, required: int) -> int:
    """Return the number of approvals that are missing.

    Args:
        signers: signers of the approvals that count, each once.
        proposer: signer of the promotion. Its approval is one of several, but never the only one.
        required: setting promote.approvals.
    """
    others = [signer for signer in signers if signer != proposer]
    return max(0, required - len(signers if required > 1 else others))


# -------------------------------------------------------------------------------------------------------- verification


class ApprovalFinding(Record):
    """Result of the verification of an approval in the folder of a promoted model."""

    signer: str = ""
    """Fingerprint or identity; not proven if there is a problem, and empty for a file that is no approval."""
    actor: str = ""
    """Name that the signer gave."""
    time: str = ""
    verdict_digest: str = ""
    """SHA-256 of the approved verdict; the ledger's entry has the same (`PromotionApprovals`)."""
    model_name: str = ""
    problem: str | None
    """Why the approval does not count; None: a trusted signer approved the promotion of this model."""


def verify_approvals(folder: Path, keyring: Keyring, promoted_at: str | None = None) -> list[ApprovalFinding]:
    """Verify the approvals in the folder of a promoted model.

    Args:
        folder: the folder; its seal and signature are checked elsewhere (`signature.find_problem`).
        keyring: the trusted keys and identities.
        promoted_at: time of the promotion in the ledger; None: do not check the age of the approvals.

    Raises:
        DamagedFileError: the folder has no bundle.json.
    """
    texts = read_texts(folder / FOLDER)
    if not texts:
        return []
    model_digest = ModelBundle.load(folder / BUNDLE).model_digest
    now = datetime.fromisoformat(promoted_at) if promoted_at is not None else None
    statements, problems = read_statements(texts, keyring, now)
    findings = [ApprovalFinding(problem=problem) for problem in problems]
    for statement in statements:
        predicate, problem = statement.predicate, statement.problem
        if problem is None and (statement.is_proposal or predicate.model_digest != model_digest):
            problem = f"{folder / FOLDER}: {statement.label} did not approve model {model_digest[:SHOWN_DIGITS]}"
        findings.append(
            ApprovalFinding(
                signer=statement.signer, actor=predicate.actor, time=predicate.time,
                verdict_digest=statement.verdict_digest, model_name=predicate.model_name, problem=problem,
            )
        )  # fmt: skip
    return findings
