"""`ratchet approve`: shows the verdict that a person wants to promote, and signs an approval of it. Loads no torch.

The verdict is that of this project, or comes from a proposal, which `ratchet promote` signs if approvals are missing:
in git, or on the server. So a person can approve on a machine without the evaluation.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from ratchet.config.units import utc_timestamp
from ratchet.errors import DataError, GateError, SettingsError
from ratchet.registry import approvals, keys, model_store, signature
from ratchet.registry.approvals import ApprovalPredicate, SignedStatement
from ratchet.registry.keys import MIN_DIGITS, SHOWN_DIGITS, Keyring
from ratchet.registry.signature import Signer
from ratchet.stages.gate import check_verdict
from ratchet.stages.project import Project
from ratchet.storage import actors, digests
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record
from ratchet.storage.records.gate import Approver, Verdict, read_champion
from ratchet.tracking.mlflow.registry import MlflowModelRegistry


class ApprovalReport(Record):
    """A verdict, and the approvals of its promotion."""

    verdict_digest: str
    """SHA-256 of verdict.json."""
    verdict: Verdict
    model_name: str
    """Name of the registered model."""
    is_judged_here: bool
    """Whether this machine has the evaluation, and judged again with the same result."""
    proposals: tuple[str, ...]
    """Who asked for approval: name, key and time."""
    required: int
    """Setting promote.approvals."""
    missing: int
    """Number of approvals that are missing. The approval of a proposer is not the only one."""
    approvers: tuple[Approver, ...]
    """Whose approvals count."""
    problems: tuple[str, ...]
    """Why other approvals do not count."""
    own: Approver | None
    """The own approval; None: nothing was signed."""
    is_new: bool
    """Whether the approval was signed now; it may have existed before."""
    file: Path | None
    """File of the own approval, to commit."""
    server: str | None
    """Server that has the approval, too."""
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class CollectedStatements:
    """All proposals and approvals that this checkout and the server have."""

    statements: Sequence[SignedStatement]
    problems: Sequence[str]
    """A sentence about each file or text that is neither."""

    def select(self, verdict_digest: str, model_name: str) -> tuple[list[SignedStatement], list[str]]:
        """Return the approvals of a verdict that count, and why others do not."""
        counted, problems = approvals.select_approvals(self.statements, verdict_digest, model_name)
        # Folders and parameters have the verdict's digest in their names.
        return counted, [*problems, *(p for p in self.problems if verdict_digest[:SHOWN_DIGITS] in p)]

    def find(self, is_proposal: bool, verdict_digest: str, signer: str, model_name: str) -> SignedStatement | None:
        """Find a statement of this signer that counts."""
        sought = (is_proposal, verdict_digest, signer, model_name)
        found = (
            s
            for s in self.statements
            if s.problem is None and (s.is_proposal, s.verdict_digest, s.signer, s.predicate.model_name) == sought
        )
        return next(found, None)


def collect_statements(layout: ProjectLayout, registry: MlflowModelRegistry, keyring: Keyring) -> CollectedStatements:
    """Read and verify the proposals and approvals in this checkout and on the server. Raises TrackingError."""
    texts = approvals.read_texts(layout.approvals)
    if registry.shared is not None:
        texts |= registry.shared.read_approvals()
    return CollectedStatements(*approvals.read_statements(texts, keyring, datetime.now(UTC)))


def publish_statement(
    layout: ProjectLayout,
    registry: MlflowModelRegistry,
    signer: Signer,
    collected: CollectedStatements,
    verdict_text: str,
    is_proposal: bool,
) -> tuple[SignedStatement, Path, bool]:
    """Sign a proposal or approval unless there is one, and store it on the server and in this checkout.

    After an interruption, the next call stores what is missing.

    Returns:
        The statement, its file, and whether it was signed now.
    """
    verdict_digest = digests.hash_bytes(verdict_text.encode())
    statement = collected.find(is_proposal, verdict_digest, signer.signer, registry.model_name)
    is_new = statement is None
    if statement is None:
        predicate = ApprovalPredicate(
            model_name=registry.model_name,
            model_digest=Verdict.model_validate_json(verdict_text).model_digest,
            actor=actors.current_actor(layout.root),
            time=utc_timestamp(),
            key=signer.fingerprint if isinstance(signer, keys.KeySigner) else None,
            verdict=verdict_text if is_proposal else None,
        )
        text = approvals.sign_statement(signer, verdict_digest, predicate)
        [statement] = approvals.read_statements({signer.name: text}, keys.read_keyring(layout.keyring), None)[0]
    if registry.shared is not None:  # first, so that a refusal by the server leaves no signed file to commit
        registry.shared.add_approval(verdict_digest, statement.text)
    return statement, approvals.save_statement(layout, statement), is_new


def approve(project: Project, verdict: str | None = None) -> ApprovalReport:
    """Sign an approval of the promotion that a verdict allows. Repeating the call changes nothing.

    Args:
        project: its setting promote.approvals says how many approvals a promotion needs.
        verdict: the first digits of the verdict's digest; None: only return the verdict, and sign nothing.

    Raises:
        SettingsError: the project needs no approvals, no or several verdicts have these digits, or there is no trusted
            key to sign with.
        GateError: the verdict is not PROMOTE, was compared with another champion, or today's rules give another
            verdict.
        DataError, DamagedFileError: the verdict, or an output that it is about, is missing or damaged.
        TrackingError: the server cannot be used.
    """
    layout, settings = project.layout, project.settings
    required = settings.promote.approvals
    if not required:
        raise SettingsError(
            "promote.approvals: found 0, so promotions of this project need no approval; to require one, set it to 1"
        )
    registry = MlflowModelRegistry.open(layout, settings)
    keyring = keys.read_keyring(layout.keyring)
    collected = collect_statements(layout, registry, keyring)
    champion_digest = _read_champion_digest(layout, registry)
    digest, text, is_own = _choose_verdict(layout, collected, registry.model_name, verdict, champion_digest)
    content = Verdict.model_validate_json(text)
    proposals = _list_proposals(collected.statements, digest, registry.model_name)
    is_judged_here = is_own and layout.bundle.exists()
    if verdict is not None and (is_judged_here or not proposals):
        check_verdict(project)
        model_store.verify_export(layout)
    own: SignedStatement | None = None
    path, is_new, notes = None, False, list[str]()
    if verdict is not None:
        _require_approvable(content, digest, champion_digest)
        if keyring.is_empty:
            raise SettingsError(
                f"{layout.keyring}: this project trusts no key, so no approval can count; `ratchet keys --new` creates "
                "yours"
            )
        signer = signature.load_signer(layout, settings)
        own, path, is_new = publish_statement(layout, registry, signer, collected, text, is_proposal=False)
        if any(proposal.signer == own.signer for proposal in proposals):
            notes.append("you proposed this promotion yourself: at least one other person must approve it, too")
        if is_new:
            collected = collect_statements(layout, registry, keyring)
    counted, problems = collected.select(digest, registry.model_name)
    proposer = proposals[0].signer if len(proposals) == 1 else None
    return ApprovalReport(
        verdict_digest=digest, verdict=content, model_name=registry.model_name,
        is_judged_here=verdict is not None and is_judged_here, proposals=tuple(p.label for p in proposals),
        required=required, missing=approvals.count_missing([s.signer for s in counted], proposer, required),
        approvers=tuple(statement.approver for statement in counted), problems=tuple(problems),
        own=own.approver if own else None, is_new=is_new, file=path, server=registry.server if own else None,
        notes=tuple(notes),
    )  # fmt: skip


def _read_champion_digest(layout: ProjectLayout, registry: MlflowModelRegistry) -> str | None:
    """Return the digest of the champion: on the server, if something was promoted there, else in this checkout."""
    entries = registry.shared.read() if registry.shared is not None else []
    return entries[-1].model_digest if entries else read_champion(layout.champion).champion_digest


def _choose_verdict(
    layout: ProjectLayout,
    collected: CollectedStatements,
    model_name: str,
    prefix: str | None,
    champion_digest: str | None,
) -> tuple[str, str, bool]:
    """Choose the verdict with these first digits; without digits, the only one that can be promoted.

    Returns:
        Its digest, its text, and whether it is the verdict of this project.

    Raises SettingsError if there is none, or several.
    """
    candidates: dict[str, tuple[str, bool]] = {}
    names: dict[str, str] = {}
    rejected: dict[str, str] = {}
    for statement in collected.statements:
        if (content := statement.predicate.verdict) is None or statement.predicate.model_name != model_name:
            continue
        if statement.problem is not None:
            rejected[statement.verdict_digest] = statement.problem
            continue
        candidates[statement.verdict_digest] = content, False
        names[statement.verdict_digest] = f"proposed by {statement.label}"
    if layout.verdict.exists():
        text = layout.verdict.read_text(encoding="utf-8", errors="replace")
        digest = digests.hash_bytes(text.encode())
        candidates[digest] = text, True
        names[digest] = names.get(digest, "the verdict of this project")
    if prefix is None:
        open_ones = {d: c for d, c in candidates.items() if not _find_obstacle(_parse(c[0]), d, champion_digest)}
        matching = open_ones or {d: c for d, c in candidates.items() if c[1]}
    else:
        matching = {d: c for d, c in candidates.items() if d.startswith(prefix.lower()) and len(prefix) >= MIN_DIGITS}
        # A proposal that does not count hides neither the own verdict nor the same proposal by another person.
        found_rejected = [p for d, p in rejected.items() if d.startswith(prefix.lower()) and len(prefix) >= MIN_DIGITS]
        if found_rejected and not matching:
            raise SettingsError(f"{prefix}: the proposal does not count: {found_rejected[0]}")
    if len(matching) == 1:
        [(digest, (text, is_own))] = matching.items()
        _parse(text)
        return digest, text, is_own
    if not candidates:
        raise DataError(
            f"no verdict to approve: neither {layout.verdict} nor a proposal in {layout.approvals} or on the server. "
            "`ratchet promote`, run by the person who wants to promote, makes one; in git, pull its commit"
        )
    listed = "".join(f"\n  {d[:12]}  {names[d]}" for d in matching or candidates)
    found = "found several verdicts" if matching else "found no verdict that can be approved now"
    if prefix is not None:
        found = f"VERDICT: found {prefix!r}, which names no single verdict"
    raise SettingsError(f"{found}; name one with `ratchet approve VERDICT`:{listed}")


def _parse(text: str) -> Verdict:
    try:
        return Verdict.model_validate(json.loads(text))
    except (ValueError, ValidationError) as error:
        raise DataError(f"the verdict cannot be read ({' '.join(str(error).split())[:300]})") from None


def _list_proposals(statements: Iterable[SignedStatement], digest: str, model_name: str) -> list[SignedStatement]:
    """Return the trusted proposals of a verdict, one for each signer."""
    proposals = {
        statement.signer: statement
        for statement in statements
        if statement.is_proposal and statement.problem is None and statement.verdict_digest == digest
        and statement.predicate.model_name == model_name
    }  # fmt: skip
    return list(proposals.values())


def _find_obstacle(verdict: Verdict, digest: str, champion_digest: str | None) -> str | None:
    """Describe why a verdict cannot be approved now; None if it can."""
    if verdict.decision != "PROMOTE":
        return (
            f"verdict {digest[:12]} is {verdict.decision}; only PROMOTE can be approved. In an emergency one person "
            "alone may use `ratchet promote --force --reason TEXT`, which is shown for ever"
        )
    if champion_digest != verdict.champion_digest:
        now = "this model" if champion_digest == verdict.model_digest else (champion_digest or "none")[:12]
        return (
            f"verdict {digest[:12]} compared with champion {(verdict.champion_digest or 'none')[:12]}, but that is "
            f"now {now}; fetch it (`ratchet promotions`), evaluate again (`dvc repro`), and propose the new verdict"
        )
    return None


def _require_approvable(verdict: Verdict, digest: str, champion_digest: str | None) -> None:
    """Raise GateError unless the verdict can be approved now."""
    if obstacle := _find_obstacle(verdict, digest, champion_digest):
        raise GateError(obstacle)
