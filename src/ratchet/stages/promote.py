"""`ratchet promote` and `ratchet rollback`: change which registered version is champion. Loads no torch.

All checks come before the first change. Then the intent is written, and `registry.promotion` makes the changes in
steps, each of which can be repeated: version, alias `champion`, ledger, champion file, hooks. If a command is killed,
the next one finishes or drops its promotion.
"""

import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from ratchet.config.units import describe_failure, format_count, utc_timestamp
from ratchet.data.harness_tasks import fingerprint_tasks
from ratchet.errors import DOCUMENTATION, ChampionError, GateError, PermissionRefusedError, SettingsError
from ratchet.quality_gate.decision import confirm_verdict
from ratchet.quality_gate.rules import describe_changed_rules
from ratchet.registry import approvals, keys, ledger, model_store, outbox, promotion, provenance, signature
from ratchet.registry.deployment import server_files
from ratchet.registry.outbox import HookDelivery
from ratchet.registry.promotion import UNREGISTERED, PromotionIntent, version_label
from ratchet.runs.directory import RunPaths
from ratchet.stages.approve import collect_statements, publish_statement
from ratchet.stages.project import Project
from ratchet.stages.team import require_model_quota
from ratchet.storage import actors, digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import Record
from ratchet.storage.records.evaluation import EvaluationReport
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import (
    Champion,
    ChampionFile,
    ForcedPromotion,
    Promotion,
    PromotionApprovals,
    Verdict,
    read_champion,
)
from ratchet.tracking.mlflow.model_files import DIGEST_TAG
from ratchet.tracking.mlflow.registry import MlflowModelRegistry, MlflowModelVersion

SMOKE_TEST_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class PromoteOptions:
    """Options of a promotion or a rollback."""

    force: bool = False
    """Promote against the verdict, or without the required approvals; `reason` is required."""
    reason: str | None = None
    dry_run: bool = False
    """List the steps, and change nothing."""
    anchor: bool = False
    """Make the model the anchor as well."""


class PromotionResult(Record):
    """Result of a promotion or a rollback."""

    champion: Champion
    """The champion; in a dry run, the model that would become champion (version 0: not registered yet)."""
    replaced: Champion | None = None
    """The previous champion."""
    promotion: Promotion | None = None
    """The new line of the ledger; None if the champion did not change."""
    plan: tuple[str, ...] = ()
    """The steps, in a dry run."""
    deliveries: tuple[HookDelivery, ...] = ()
    """How the event was delivered to each hook."""
    notes: tuple[str, ...] = ()
    """Further changes: an interrupted command was finished or dropped, a key pair created, a model folder repaired.
    Also earlier decisions of the gate about the model, under other rules."""
    warnings: tuple[str, ...] = ()


def promote(project: Project, options: PromoteOptions = PromoteOptions()) -> PromotionResult:
    """Make the exported model champion. Repeating the call changes nothing.

    Raises:
        SettingsError: a hook cannot be called, only one of `force` and `reason` is set, or there is no trusted key to
            sign with.
        GateError: the verdict is not PROMOTE, is about another model or another champion, or today's rules give another
            verdict; or approvals are missing (then the verdict is now a proposal, which others can approve).
        ChampionError: champion file and registry disagree, or the champion changed meanwhile.
        QuotaError: the tenant's quota has no room for the files of the model.
        LockHeldError: another promotion is running.
        DataError, DamagedFileError: a stage's output or the ledger is missing or damaged.
        TrackingError: MLflow's database cannot be used.
    """
    from ratchet.stages.callbacks import notify_promotions

    layout, settings = project.layout, project.settings
    reason = ledger.check_forced_reason(options.force, options.reason)
    outbox.check_hooks(settings.promote.hooks)
    with notify_promotions(project), _acquire_lock(layout, options):
        registry = MlflowModelRegistry.open(layout, settings)
        if options.dry_run and (interrupted := _plan_recovery(layout, registry)):
            return interrupted
        notes = [] if options.dry_run else recover_interrupted(layout, registry)
        verdict, bundle = Verdict.load(layout.verdict), ModelBundle.load(layout.bundle)
        files.verify_sealed(layout.gate, "gate")
        exported = model_store.verify_export(layout)
        before = _load_champion_file(layout, registry)
        folder = layout.promoted_model(bundle.model_digest)
        is_champion = before.champion is not None and before.champion.model_digest == bundle.model_digest
        is_anchor = before.anchor and before.champion and before.anchor.version == before.champion.version
        if before.champion is not None and is_champion and (is_anchor or not options.anchor):
            check_alias(layout, registry, before, target=None)
            problem = signature.find_problem(layout, folder)
            if options.dry_run:
                repair = (f"copy the model from {layout.export} and sign it again: {problem}",) if problem else ()
                return PromotionResult(champion=before.champion, replaced=before.champion, plan=repair)
            if problem is not None:  # a byte changed, or the signer is no longer trusted
                signer, signer_notes = _store_model(
                    project, registry, bundle, exported, before.champion.forced,
                    _find_stored_approvals(layout, registry, bundle.model_digest),
                )  # fmt: skip
                registry.ensure_version(bundle.model_digest, folder, bundle.run_id, {})  # a server gets the new files
                notes += [*signer_notes, f"{problem}: copied again from {layout.export}, signed by {signer}"]
            return _build_result(layout, champion=before.champion, replaced=before.champion, notes=tuple(notes))
        report = EvaluationReport.load(layout.eval_report)
        _check_evidence(layout, verdict, report, bundle, before)
        tasks = fingerprint_tasks(settings.evaluate.harness.tasks, layout.root, layout.tasks)
        confirm_verdict(layout, settings, tasks, verdict)
        notes += [f"note: {describe_changed_rules(verdict)}"] if verdict.earlier_decisions else []
        if verdict.decision != "PROMOTE" and not options.force:
            raise _build_refusal(verdict)
        was_withdrawn = _check_withdrawal(layout, bundle, forced=options.force)
        registered = registry.find_version(bundle.model_digest)
        alias = check_alias(layout, registry, before, target=None if _is_emptied(layout, before) else registered)
        model_store.collect_sources(layout, bundle, exported)  # raises for a missing file
        if registered is None:
            require_model_quota(project, sum(size for _, size in exported.files.values()))
        actor, time = actors.current_actor(layout.root), utc_timestamp()
        approved = _check_approvals(project, registry, options, bundle)
        is_forced = options.force and (verdict.decision != "PROMOTE" or was_withdrawn or approved.missing > 0)
        champion = Champion(
            version=UNREGISTERED, model_digest=bundle.model_digest, adapter_digest=bundle.adapter_digest,
            run_id=bundle.run_id,
            forced=ForcedPromotion(
                actor=actor, reason=reason or "", decision=verdict.decision, missing_approvals=approved.missing
            ) if is_forced else None,
        )  # fmt: skip
        intent = PromotionIntent(
            id=promotion.new_event_id(), time=time, action="promote", actor=actor, project=layout.root.name,
            model_name=settings.promote.model_name, champion=champion, alias=alias,
            previous_version=before.champion.version if before.champion else None, decision=verdict.decision,
            reason=reason, is_anchor=options.anchor or (before.anchor is None and not is_forced),
            hooks=settings.promote.hooks, server=registry.server, approvals=approved.record,
            description=promotion.describe_version(champion, actor, time, bundle, verdict, report),
        )  # fmt: skip
        if options.dry_run:
            first_steps = f"store the model as {folder}", signature.describe_signer(layout, settings)
            plan = promotion.plan_steps(layout, intent, registered, *first_steps)
            return PromotionResult(champion=champion, replaced=before.champion, plan=plan, notes=tuple(notes))
        _, signer_notes = _store_model(project, registry, bundle, exported, champion.forced, approved)
        page = None if registry.server else model_store.gate_page_path(layout, bundle.model_digest).as_uri()
        tags = promotion.model_tags(bundle, verdict, report, page)
        entry, event = promotion.execute_promotion(
            layout,
            registry,
            intent,
            lambda: registry.ensure_version(bundle.model_digest, folder, bundle.run_id, tags),
        )
    return _build_result(
        layout, event, champion=champion.model_copy(update={"version": entry.version}), replaced=before.champion,
        promotion=entry, notes=(*notes, *signer_notes),
    )  # fmt: skip


def rollback(
    project: Project,
    version: int | None = None,
    options: PromoteOptions = PromoteOptions(),
    smoke_test: Callable[[Path], None] | None = None,
) -> PromotionResult:
    """Make an earlier version champion again.

    Args:
        project: section promote of its settings has the hooks.
        version: the registered version; None: the previous champion.
        options: `force` and `anchor` must not be set.
        smoke_test: raises ChampionError for a model folder that does not work; None: `run_smoke_test`.

    Raises:
        SettingsError: a hook cannot be called, the reason is empty, or `force` or `anchor` is set.
        GateError: the version was itself rolled back, and the options have no reason.
        ChampionError: the version does not exist or was never champion; its model is missing, damaged, not signed by a
            trusted key, or fails the smoke test; the champion changed meanwhile; or champion file and registry name
            different versions, and neither is the version to restore.
        DamagedFileError: the ledger is damaged.
        LockHeldError: another promotion is running.
        TrackingError: MLflow's database cannot be used.
    """
    from ratchet.stages.callbacks import notify_promotions

    layout, settings = project.layout, project.settings
    if options.force or options.anchor:
        raise SettingsError("rollback: --force and --anchor are options of `ratchet promote`")
    reason = ledger.normalize_reason(options.reason)
    outbox.check_hooks(settings.promote.hooks)
    with notify_promotions(project), _acquire_lock(layout, options):
        registry = MlflowModelRegistry.open(layout, settings)
        if options.dry_run and (interrupted := _plan_recovery(layout, registry)):
            return interrupted
        notes = [] if options.dry_run else recover_interrupted(layout, registry)
        before = _load_champion_file(layout, registry)
        if version is None and not before.previous:
            raise ChampionError(f"{layout.champion}: there is no previous champion to roll back to")
        target = before.previous[0].version if version is None else version
        alias = check_alias(layout, registry, before, target=target)
        champion = _load_promoted(layout, registry, before, target)
        if before.champion and before.champion.version == target and alias == target:
            if options.dry_run:
                return PromotionResult(champion=champion, replaced=champion)
            return _build_result(layout, champion=champion, replaced=champion, notes=tuple(notes))
        withdrawal = ledger.find_withdrawal(ledger.read_entries(layout.promotions), champion.model_digest)
        if withdrawal is not None and reason is None:
            raise GateError(
                f"{version_label(champion)} was champion and {_describe_withdrawal(withdrawal)}; to make it champion "
                f"again: `ratchet rollback {target} --reason TEXT`"
            )
        if not layout.promoted_model(champion.model_digest).is_dir():
            registry.fetch_model(champion.model_digest)
        folder = model_store.verify_version(layout, champion)
        if problem := signature.find_problem(layout, folder.parent):
            raise ChampionError(
                f"{version_label(champion)} cannot be champion: {problem}; choose another: `ratchet rollback VERSION`"
            )
        (smoke_test or run_smoke_test)(folder)
        intent = PromotionIntent(
            id=promotion.new_event_id(), time=utc_timestamp(), action="rollback",
            actor=actors.current_actor(layout.root), project=layout.root.name, model_name=settings.promote.model_name,
            champion=champion, alias=alias, previous_version=before.champion.version if before.champion else None,
            decision=None, reason=reason, is_anchor=False, hooks=settings.promote.hooks, server=registry.server,
        )  # fmt: skip
        if options.dry_run:
            checked = f"{version_label(champion)} is complete, signed, loads and answers (checked now)"
            plan = promotion.plan_steps(layout, intent, target, checked)
            return PromotionResult(champion=champion, replaced=before.champion, plan=plan)
        entry, event = promotion.execute_promotion(layout, registry, intent, lambda: target)
    return _build_result(
        layout, event, champion=champion, replaced=before.champion, promotion=entry, notes=tuple(notes)
    )


def run_smoke_test(model: Path) -> None:
    """Load a Hugging Face folder in a new process and generate an answer. Raises ChampionError if that fails."""
    command = [sys.executable, "-m", "ratchet.models.answer_process", str(model), "--smoke-test"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SMOKE_TEST_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ChampionError(
            f"{model}: did not answer within {SMOKE_TEST_TIMEOUT_S:g} s; the champion is unchanged"
        ) from None
    if done.returncode != 0:
        reason = describe_failure(done.stderr, done.returncode)
        raise ChampionError(f"{model}: does not load and answer ({reason}); the champion is unchanged")


def _build_result(
    layout: ProjectLayout,
    event: str = "",
    *,
    champion: Champion,
    replaced: Champion | None,
    promotion: Promotion | None = None,
    notes: tuple[str, ...] = (),
) -> PromotionResult:
    """Deliver every event in the outbox to its hooks, then build the result."""
    problem = outbox.deliver_pending(layout.outbox, layout.root)
    deliveries = outbox.read_event_deliveries(layout.outbox, event) if event else ()
    return PromotionResult(
        champion=champion,
        replaced=replaced,
        promotion=promotion,
        deliveries=deliveries,
        notes=notes,
        warnings=(problem,) if problem else (),
    )


def _acquire_lock(layout: ProjectLayout, options: PromoteOptions) -> AbstractContextManager[object]:
    if options.dry_run and not layout.mlruns.is_dir():
        return nullcontext()  # no promotion can be running, and a dry run does not create the lock's folder
    return promotion.acquire_lock(layout)


def recover_interrupted(layout: ProjectLayout, registry: MlflowModelRegistry) -> list[str]:
    """Finish or drop an interrupted promotion of this project, and finish one of another person on the server.

    Returns a sentence about each.
    """
    text = promotion.recover_interrupted(layout, lambda intent: _open_registry(intent, registry))
    notes = [text] if text else []
    try:
        entry = registry.complete_newest()
    except PermissionRefusedError as error:
        return [*notes, f"the newest promotion is not complete on {registry.where}, and this user cannot: {error}"]
    if entry is not None:
        notes.append(
            f"the {entry.action} of version {entry.version} by {entry.actor}, {entry.time}, was not complete on "
            f"{registry.where}: completed"
        )
    return notes


def _open_registry(intent: PromotionIntent, registry: MlflowModelRegistry) -> MlflowModelRegistry:
    """Return the registry of an interrupted command. Raises ChampionError if it is not the one in use now."""
    if intent.server != registry.server:
        used, now = intent.server or "the project's own registry", registry.server or "the project's own registry"
        raise ChampionError(
            f"{registry.layout.promotion_intent}: the {intent.action} that {intent.actor} started on {intent.time} was "
            f"interrupted; it used {used}, but registered models are now in {now}. Use the former, and repeat the "
            f"command ({DOCUMENTATION}, page promotion)"
        )
    return registry if intent.model_name == registry.model_name else registry.open_model(intent.model_name)


def _plan_recovery(layout: ProjectLayout, registry: MlflowModelRegistry) -> PromotionResult | None:
    """Return the steps of a dry run after an interrupted command; None if no command was interrupted."""
    interrupted = promotion.find_interrupted(layout, lambda intent: _open_registry(intent, registry))
    if interrupted is None:
        return None
    step = "finish" if interrupted.is_committed else "drop"
    started = f"started on {interrupted.intent.time} by {interrupted.intent.actor}"
    plan = (
        f"{step} the interrupted {interrupted.intent.action}, {started}; `ratchet promotions` does only that",
        "then start this command: repeat the dry run after that to see its steps",
    )
    replaced = read_champion(layout.champion).champion
    return PromotionResult(champion=interrupted.intent.champion, replaced=replaced, plan=plan)


def _store_model(
    project: Project,
    registry: MlflowModelRegistry,
    bundle: ModelBundle,
    exported: files.Manifest,
    forced: ForcedPromotion | None,
    approved: "_CheckedApprovals",
) -> tuple[str, tuple[str, ...]]:
    """Write, sign and seal the model's folder. Returns the signer, and notes about its key.

    Raises GateError if the only approval is by the signer, whose certified identity (sigstore) is known only now.
    """
    layout, settings = project.layout, project.settings
    signer = signature.load_signer(layout, settings)
    report = EvaluationReport.load(layout.eval_report)
    evaluation = report if report.adapter_digest == bundle.adapter_digest else None
    extra_files = server_files.build_model_files(layout.export, bundle, settings.promote.model_name, forced, evaluation)
    extra_files |= {**model_store.forced_marker(forced), **approved.files}
    if RunPaths(layout.runs / bundle.run_id).journal.is_file():
        tags = registry.read_run_tags(bundle.run_id)
        extra_files |= provenance.build_provenance(layout, bundle, tags)
    model_store.store_model(layout, bundle, exported, extra_files, signer)
    if (record := approved.record) is not None:
        folder = layout.promoted_model(bundle.model_digest)
        signed_by = signature.read_signature(folder, keys.read_keyring(layout.keyring)).signer
        approvers = [approver.signer for approver in record.approvers]
        if record.missing < approvals.count_missing(approvers, signed_by, record.required):
            raise GateError(
                f"{folder}: {signed_by} signed the model, and is the only one who approved; another person must approve"
            )
    return signer.name, (signer.notice,) if signer.notice else ()


def _load_champion_file(layout: ProjectLayout, registry: MlflowModelRegistry) -> ChampionFile:
    """Load the champion file.

    Raises:
        DamagedFileError: the champion file does not match the ledger, or the ledger contradicts that of the server.
        ChampionError: a field of the champion file differs from the ledger, or the server has newer promotions.
    """
    if registry.shared is not None:
        shared = registry.shared.read()
        entries = ledger.read_entries(layout.promotions)
        if missing := ledger.find_missing(layout.promotions, entries, shared, registry.where):
            newest = missing[-1]
            raise ChampionError(
                f"{layout.champion}: {newest.actor} made version {newest.version} (model {newest.model_digest[:12]}) "
                f"champion on {registry.where} ({newest.action}, {newest.time}), and this project has not fetched it: "
                "`ratchet promotions` does; then compare with it: `dvc repro`. Nothing was changed"
            )
    file = read_champion(layout.champion)
    ledger.check_champion(layout, ledger.read_entries(layout.promotions), file)
    return file


def _is_emptied(layout: ProjectLayout, file: ChampionFile) -> bool:
    """Return whether the champion file is empty, but the ledger is not. Then the alias decides nothing: a promotion of
    the version that it names would make this version the anchor."""
    return file.is_empty and bool(ledger.read_entries(layout.promotions))


def _check_evidence(
    layout: ProjectLayout, verdict: Verdict, report: EvaluationReport, bundle: ModelBundle, before: ChampionFile
) -> None:
    """Raise GateError unless verdict and evaluation are about this model and this champion, even with `--force`."""
    for path, digest in ((layout.verdict, verdict.model_digest), (layout.eval_report, report.model_digest)):
        if digest != bundle.model_digest:
            raise GateError(
                f"{path}: is about model {(digest or 'none')[:12]}, "
                f"but {layout.export} contains {bundle.model_digest[:12]}; run `dvc repro`"
            )
    opponents = [("champion", verdict.champion_digest, before.champion)]
    if verdict.anchor_digest is not None:
        opponents.append(("anchor", verdict.anchor_digest, before.anchor))
    for role, compared, current in opponents:
        if compared != (current.model_digest if current else None):
            raise GateError(
                f"{layout.verdict}: compared with {role} {(compared or 'none')[:12]}, but the {role} is now "
                f"{version_label(current) if current else 'none'}"
                f"{promotion.describe_last_promotion(ledger.read_entries(layout.promotions))}; run `dvc repro`"
            )


def _build_refusal(verdict: Verdict) -> GateError:
    """Return the error for a verdict that is not PROMOTE, with the rules that the model does not pass."""
    reasons = "".join(f"\n  {r.outcome:<9} {r.text}" for r in verdict.reasons if r.outcome != "pass")
    return GateError(f"model {verdict.model_digest[:12]} is not promoted, the verdict is {verdict.decision}:{reasons}")


def _check_withdrawal(layout: ProjectLayout, bundle: ModelBundle, forced: bool) -> bool:
    """Return whether this model was rolled back before. If so, raise GateError unless the promotion is forced."""
    withdrawal = ledger.find_withdrawal(ledger.read_entries(layout.promotions), bundle.model_digest)
    if withdrawal is None or forced:
        return withdrawal is not None
    raise GateError(
        f"model {bundle.model_digest[:12]} was champion and {_describe_withdrawal(withdrawal)}; to promote it again: "
        "`ratchet promote --force --reason TEXT`"
    )


def _describe_withdrawal(withdrawal: Promotion) -> str:
    why = f" ({withdrawal.reason})" if withdrawal.reason else ""
    return f"was rolled back on {withdrawal.time} by {withdrawal.actor}{why}"


@dataclass(frozen=True)
class _CheckedApprovals:
    """Approvals of a promotion."""

    record: PromotionApprovals | None = None
    """None: the project requires none."""
    files: Mapping[str, bytes] = field(default_factory=dict)
    """Their signature files, by name in the folder of the model."""

    @property
    def missing(self) -> int:
        """Number of approvals that are missing."""
        return self.record.missing if self.record is not None else 0


def _check_approvals(
    project: Project, registry: MlflowModelRegistry, options: PromoteOptions, bundle: ModelBundle
) -> _CheckedApprovals:
    """Collect the approvals of the verdict.

    Raises GateError if some are missing and the promotion is not forced. Then the verdict is a proposal, which others
    can approve; not after a dry run.
    """
    layout, required = project.layout, project.settings.promote.approvals
    if not required:
        return _CheckedApprovals()
    keyring = keys.read_keyring(layout.keyring)
    collected = collect_statements(layout, registry, keyring)
    verdict_text = layout.verdict.read_text(encoding="utf-8")
    verdict_digest = digests.hash_bytes(verdict_text.encode())
    counted, problems = collected.select(verdict_digest, registry.model_name)
    # Without trusted keys, no approval counts; a dry run creates none, and a forced promotion creates one later.
    is_keyless = keyring.is_empty and (options.dry_run or options.force)
    signer = None if is_keyless else signature.load_signer(layout, project.settings)
    proposer = signer.signer if signer is not None else None
    missing = approvals.count_missing([approval.signer for approval in counted], proposer, required)
    if missing and not options.force:
        where = ""
        if signer is not None and not options.dry_run:
            _, path, _ = publish_statement(layout, registry, signer, collected, verdict_text, is_proposal=True)
            where = f"on a machine that uses {registry.server}, or " if registry.server else ""
            where = f" ({where}after you commit and push {path.relative_to(layout.root)})"
        lines = [f"approved by {approval.label}" for approval in counted]
        lines += [f"does not count: {problem}" for problem in problems]
        if signer is not None and signer.notice:
            lines.append(signer.notice)
        if required == 1 and counted:
            lines.append("the person who promotes cannot be the only one who approves")
        listed = "".join(f"\n  {line}" for line in lines)
        raise GateError(
            f"model {bundle.model_digest[:12]} is not promoted: it lacks {format_count(missing, 'approval')} "
            f"(promote.approvals: {required}). Ask others to run `ratchet approve {verdict_digest[:12]}`{where}, then "
            f"repeat `ratchet promote`{listed}"
        )
    if not options.dry_run:
        for approval in counted:  # those from the server; git then has them together with the ledger
            approvals.save_statement(layout, approval)
    record = PromotionApprovals(
        required=required, missing=missing, verdict_digest=verdict_digest,
        approvers=tuple(approval.approver for approval in counted),
    )  # fmt: skip
    return _CheckedApprovals(record, _name_files(counted))


def _name_files(statements: Sequence[approvals.SignedStatement]) -> dict[str, bytes]:
    """Return the signature files of approvals, by their name in the folder of the model."""
    return {f"{approvals.FOLDER}/{statement.file_name}": statement.text.encode() for statement in statements}


def _find_stored_approvals(
    layout: ProjectLayout, registry: MlflowModelRegistry, model_digest: str
) -> _CheckedApprovals:
    """Return the signature files of the approvals with which a model was promoted last, as far as they exist."""
    entries = ledger.read_entries(layout.promotions)
    own = [entry for entry in entries if entry.action == "promote" and entry.model_digest == model_digest]
    if not own or (record := own[-1].approvals) is None:
        return _CheckedApprovals()
    named = {(record.verdict_digest, approver) for approver in record.approvers}
    collected = collect_statements(layout, registry, keys.read_keyring(layout.keyring))
    kept = [
        statement
        for statement in collected.statements
        if not statement.is_proposal and (statement.verdict_digest, statement.approver) in named
    ]
    return _CheckedApprovals(files=_name_files(kept))


def check_alias(
    layout: ProjectLayout, registry: MlflowModelRegistry, file: ChampionFile, target: int | None
) -> int | None:
    """Check that champion file and registry agree. Returns the version that the alias `champion` points to.

    Raises:
        ChampionError: champion file and alias name different versions, and neither is `target`, the version that will
            be champion. (If one of them is `target`, the alias was moved by hand, and the command decides for
            `target`.)
    """
    champion, alias = file.champion, registry.champion()
    if champion is not None:
        registered = registry.version(champion.version)
        if registered is None or registered.model_digest != champion.model_digest:
            raise ChampionError(
                f"{layout.champion} names {version_label(champion)}, which is not in the registry {registry.where}. "
                f"{registry.explain_missing(champion.model_digest)}. To start without a champion: "
                f"echo {{}} > {layout.champion}; dvc repro"
            )
    number = champion.version if champion else None
    if number == alias or (target is not None and target in (number, alias)):
        return alias
    at_alias = registry.version(alias) if alias is not None else None
    choices = [f"`ratchet rollback {number}`"] if number is not None else []
    if at_alias is not None and _was_champion(layout, registry, at_alias):
        entries = ledger.read_entries(layout.promotions)
        needs_reason = ledger.find_withdrawal(entries, at_alias.model_digest) is not None
        choices.append(f"`ratchet rollback {at_alias.number}{' --reason TEXT' if needs_reason else ''}`")
    commands = " or ".join(choices)
    promoted_by = at_alias.tags.get("ratchet.promoted_by") if at_alias else None
    by = f", promoted by {promoted_by}" if promoted_by is not None else ""
    in_file = version_label(champion) if champion else "no champion"
    raise ChampionError(
        f"{layout.champion} names {in_file}, but the registry's alias points "
        f"to {'no version' if alias is None else f'version {alias}{by}'}. Either another checkout promoted it (then "
        f"pull its commit), or one of the two was changed by hand (then "
        + (f"choose one: {commands})" if commands else f"remove the alias in {registry.where})")
    )


def _was_champion(layout: ProjectLayout, registry: MlflowModelRegistry, version: MlflowModelVersion) -> bool:
    """Return whether the ledger has this version; or, for an own registry, whether another checkout promoted it."""
    entries = ledger.read_entries(layout.promotions)
    is_in_ledger = any((e.version, e.model_digest) == (version.number, version.model_digest) for e in entries)
    needed = {promotion.EVENT, promotion.ADAPTER, promotion.RUN}
    return is_in_ledger or (registry.server is None and needed <= version.tags.keys())


def _load_promoted(layout: ProjectLayout, registry: MlflowModelRegistry, file: ChampionFile, number: int) -> Champion:
    """Load a version that was champion before.

    The ledger says what its model is and whether it was forced, because everybody who may write to the registry can
    change tags. Tags count only for a version that another checkout with the same `mlruns/` promoted.

    Raises:
        ChampionError: the version is not registered, is registered for another model, or was never champion.
    """
    registered = registry.version(number)
    if registered is None:
        known = ", ".join(str(v.number) for v in registry.versions()) or "none"
        raise ChampionError(f"version {number} of {registry.model_name} is not registered; known: {known}")
    entries = ledger.read_entries(layout.promotions)
    named = [entry for entry in entries if entry.version == number]
    same = [entry for entry in named if entry.model_digest == registered.model_digest]
    recorded = promotion.find_version(file, number)
    is_recorded = recorded is not None and recorded.model_digest == registered.model_digest
    if same and (not is_recorded or any(entry.action == "promote" for entry in same)):
        return ledger.champion_of(same[-1], entries)
    if recorded is not None and is_recorded:
        return recorded
    if named:
        raise ChampionError(
            f"version {number} of {registry.model_name} has model {registered.model_digest[:12]} in "
            f"{registry.where}, but {layout.promotions} has {named[-1].model_digest[:12]}: tag {DIGEST_TAG} of the "
            "version was changed by hand, or the registry is another one; the champion is unchanged"
        )
    if not _was_champion(layout, registry, registered):
        raise ChampionError(
            f"version {number} of {registry.model_name} was never champion, so it is no target of a rollback; "
            "`ratchet promotions` lists those that were"
        )
    tags = registered.tags
    return Champion(
        version=number,
        model_digest=registered.model_digest,
        adapter_digest=tags[promotion.ADAPTER],
        run_id=tags[promotion.RUN],
        forced=promotion.parse_forced(tags),
    )
