"""Verdict and Bundle → registered version → alias `champion` → ledger, champion file, hooks; and back. No torch.

Everything that may refuse is asked before anything is changed; then the intent is written, and `promotion.road` does
what is left, in an order of which every step may be repeated. What a command that died has left is finished or dropped
by the next one, before it does anything of its own. docs/promotion.md has the table.
"""

import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from ratchet.config.schema import Settings
from ratchet.data.harness_tasks import fingerprint_tasks
from ratchet.errors import ChampionError, GateError, SettingsError
from ratchet.gate.decision import confirm_verdict
from ratchet.registry import bundle_files, hooks, ledger, model_store, outbox, promotion, promotion_record
from ratchet.registry.deployment import model_files
from ratchet.registry.promotion_record import UNREGISTERED, PromotionIntent, version_label
from ratchet.registry.signing import policy
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import EvaluationReport
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import Champion, ChampionFile, ForcedPromotion, Promotion, Verdict, read_champion
from ratchet.tracking.mlflow.registry import MlflowModelRegistry

SMOKE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class PromoteOptions:
    """How a promotion or a rollback is asked for."""

    force: bool = False
    """Promote against the verdict; `reason` must say why."""
    reason: str | None = None
    dry_run: bool = False
    """Say what would be done, and change nothing."""
    anchor: bool = False
    """Make it the anchor, too."""


def promote(layout: ProjectLayout, settings: Settings, options: PromoteOptions = PromoteOptions()) -> str:
    """Make the exported model champion; returns what to tell. Repeating it changes nothing.

    Raises:
        SettingsError: a hook that cannot be told; force without a reason, or a reason without force.
        GateError: the verdict is not PROMOTE, or is not about this model, or compared it with an earlier champion, or
            would be another by the rules of now.
        ChampionError: champion file and registry disagree, or somebody else promoted meanwhile.
        LockHeldError: another promotion is at work.
        DataError, DamagedFileError: a stage's output is missing or damaged, or the ledger is.
        SettingsError: there is no key to sign with that this project trusts.
        TrackingError: MLflow's database cannot be used.
    """
    reason = ledger.normalize_reason(options.reason)
    if options.force != (reason is not None):
        raise SettingsError(
            "--force wants a reason: --reason TEXT" if options.force else "--reason is for --force: give both"
        )
    hooks.check_hooks(settings.promote.hooks)
    with _promotion_lock(layout, options):
        told = _recover_interrupted(layout, options)
        if told and options.dry_run:
            return told[0]
        verdict, bundle = _load_verdict(layout), ModelBundle.load(layout.bundle)
        exported = bundle_files.verify_export(layout)
        before = _load_champion_file(layout)
        registry = MlflowModelRegistry(layout, settings.promote.model_name)
        if (
            before.champion
            and before.champion.model_digest == bundle.model_digest
            and not _should_anchor(before, options)
        ):
            _check_alias(layout, registry, before, target=None)
            told = [*told, *_restore_champion(layout, settings, bundle, exported, before.champion, options)]
            return _format_messages([*told, f"{version_label(before.champion)} is champion already"], layout, "")
        report = EvaluationReport.load(layout.eval_report)
        _check_evidence(layout, verdict, report, bundle, before)
        confirm_verdict(
            layout, settings, fingerprint_tasks(settings.evaluate.harness.tasks, layout.root, layout.tasks), verdict
        )
        _check_decision(verdict, bundle, forced=options.force)
        back = _check_return(layout, bundle, forced=options.force)
        known = registry.number_of(bundle.model_digest)
        alias = _check_alias(layout, registry, before, target=known)
        model_store.collect_sources(layout, bundle, exported)  # refuses what is missing
        who, now = ledger.current_actor(layout.root), promotion_record.utc_now()
        forced = options.force and (verdict.decision != "PROMOTE" or back)
        champion = Champion(
            version=UNREGISTERED, model_digest=bundle.model_digest, adapter_digest=bundle.adapter_digest,
            run_id=bundle.run_id,
            forced=ForcedPromotion(by=who, reason=reason or "", decision=verdict.decision) if forced else None,
        )  # fmt: skip
        about = PromotionIntent(
            id=promotion_record.new_event_id(), time=now, action="promote", by=who, project=layout.root.name,
            model_name=settings.promote.model_name, champion=champion, alias=alias,
            before=before.champion.version if before.champion else None, decision=verdict.decision, reason=reason,
            anchored=options.anchor or (before.anchor is None and not forced), hooks=settings.promote.hooks,
            description=promotion_record.describe_version(champion, who, now, bundle, verdict, report),
        )  # fmt: skip
        folder = layout.promoted_model(bundle.model_digest)
        if options.dry_run:
            return promotion_record.describe_plan(
                layout, about, known, f"keep the model as {folder}", policy.describe_signer(layout, settings)
            )
        told = [*told, *_store_model(layout, settings, bundle, exported, champion.forced)[1]]
        tags = promotion_record.model_tags(
            bundle, verdict, report, model_store.gate_page_path(layout, bundle.model_digest).as_uri()
        )
        entry, event = promotion.execute_promotion(
            layout,
            registry,
            about,
            lambda: registry.ensure_version(bundle.model_digest, folder, bundle.run_id, tags),
        )
    return _format_messages([*told, _success_message(layout, entry, champion, before)], layout, event)


def rollback(
    layout: ProjectLayout,
    settings: Settings,
    version: int | None,
    options: PromoteOptions = PromoteOptions(),
    check: Callable[[Path], None] | None = None,
) -> str:
    """Make an earlier version champion again; returns what to tell.

    Args:
        version: the registered version; None takes the previous champion.
        options: `force` and `anchor` are for promotions.
        check: raises ChampionError for a model folder that does not work; by default loads it in a process of its own.

    Raises:
        SettingsError: a hook that cannot be told, an empty reason, or an option that a rollback does not have.
        ChampionError: no such version, its model is gone, damaged or does not answer, somebody else promoted meanwhile,
            or champion file and registry disagree and this is neither's version.
        DamagedFileError: the ledger is broken.
        LockHeldError: another promotion is at work.
        TrackingError: MLflow's database cannot be used.
    """
    if options.force or options.anchor:
        raise SettingsError("rollback: --force and --anchor are for `ratchet promote`")
    reason = ledger.normalize_reason(options.reason)
    hooks.check_hooks(settings.promote.hooks)
    with _promotion_lock(layout, options):
        told = _recover_interrupted(layout, options)
        if told and options.dry_run:
            return told[0]
        before = _load_champion_file(layout)
        registry = MlflowModelRegistry(layout, settings.promote.model_name)
        if version is None:
            if not before.previous:
                raise ChampionError(f"{layout.champion}: names no previous champion, so there is none to go back to")
            version = before.previous[0].version
        alias = _check_alias(layout, registry, before, target=version)
        champion = _load_registered(registry, before, version)
        if before.champion and before.champion.version == version and alias == version:
            return _format_messages([*told, f"{version_label(champion)} is champion already"], layout, "")
        (check or run_smoke_test)(_require_trusted(layout, champion))
        about = PromotionIntent(
            id=promotion_record.new_event_id(), time=promotion_record.utc_now(), action="rollback",
            by=ledger.current_actor(layout.root),
            project=layout.root.name, model_name=settings.promote.model_name, champion=champion, alias=alias,
            before=before.champion.version if before.champion else None, decision=None, reason=reason, anchored=False,
            hooks=settings.promote.hooks,
        )  # fmt: skip
        if options.dry_run:
            return promotion_record.describe_plan(
                layout, about, version, f"{version_label(champion)} is whole, loads and answers"
            )
        entry, event = promotion.execute_promotion(layout, registry, about, lambda: version)
    return _format_messages([*told, _success_message(layout, entry, champion, before)], layout, event)


def _restore_champion(
    layout: ProjectLayout, settings: Settings, bundle: ModelBundle, exported: files.Manifest, now: Champion,
    options: PromoteOptions,
) -> list[str]:  # fmt: skip
    """Make the champion's folder anew from the export if it is damaged, or signed by nobody who is trusted now."""
    folder = layout.promoted_model(bundle.model_digest)
    wrong = policy.find_problem(layout, folder)
    if wrong is None or options.dry_run:
        return [] if wrong is None else [f"dry run: {wrong}: it would be made and signed again"]
    by, told = _store_model(layout, settings, bundle, exported, now.forced)
    return [*told, f"{wrong}: made again from {layout.export}, signed by {by}"]


def _store_model(
    layout: ProjectLayout,
    settings: Settings,
    bundle: ModelBundle,
    exported: files.Manifest,
    forced: ForcedPromotion | None,
) -> tuple[str, list[str]]:
    """Sign and seal the model's folder; who signed, and what to tell of it."""
    signer = policy.load_signer(layout, settings)
    extra = model_files.build_model_files(
        layout.export, bundle, settings.promote.model_name, forced
    ) | model_store.forced_marker(forced)
    model_store.store_model(layout, bundle, exported, extra, policy.ProjectSigner(layout, signer))
    return signer.by, [signer.told] if signer.told else []


def _require_trusted(layout: ProjectLayout, champion: Champion) -> Path:
    """Its Hugging Face folder. Raises ChampionError unless every byte is as somebody whom the project trusts signed."""
    folder = model_store.verify_version(layout, champion)
    if doubt := policy.find_problem(layout, folder.parent):
        raise ChampionError(
            f"{version_label(champion)} cannot be champion: {doubt}; choose another: `ratchet rollback VERSION`"
        )
    return folder


def run_smoke_test(model: Path) -> None:
    """Load a Hugging Face folder in a fresh process and let it answer. Raises ChampionError with what it said."""
    command = [sys.executable, "-m", "ratchet.models.smoke_test", str(model)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SMOKE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ChampionError(f"{model}: did not answer within {SMOKE_TIMEOUT_S:g} s; champion is unchanged") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ChampionError(f"{model}: does not load and answer ({last}); champion is unchanged")


def _promotion_lock(layout: ProjectLayout, options: PromoteOptions) -> AbstractContextManager[object]:
    if options.dry_run and not layout.mlruns.is_dir():
        return nullcontext()  # nobody can be at work, and the lock's folder would be a change
    return promotion.acquire_lock(layout)


def _recover_interrupted(layout: ProjectLayout, options: PromoteOptions) -> list[str]:
    """Finish or drop what an interrupted command has left; what to tell of it."""
    if not options.dry_run:
        text = promotion.recover_interrupted(layout, lambda model_name: MlflowModelRegistry(layout, model_name))
        return [text] if text else []
    found = promotion.find_interrupted(layout, lambda model_name: MlflowModelRegistry(layout, model_name))
    if found is None:
        return []
    will = "would be finished" if found.forward else "would be dropped"
    about = f"begun on {found.intent.time} by {found.intent.by}"
    return [f"dry run: an interrupted {found.intent.action}, {about}, {will} first: `ratchet promotions` does that"]


def _load_champion_file(layout: ProjectLayout) -> ChampionFile:
    """The champion file, once it and the ledger are known to belong together."""
    file = read_champion(layout.champion)
    ledger.check_champion(layout.promotions, ledger.read_entries(layout.promotions), file)
    return file


def _should_anchor(before: ChampionFile, options: PromoteOptions) -> bool:
    """Whether the champion is to become the anchor, and is not yet."""
    same = before.anchor and before.champion and before.anchor.version == before.champion.version
    return options.anchor and not same


def _check_evidence(
    layout: ProjectLayout, verdict: Verdict, report: EvaluationReport, bundle: ModelBundle, before: ChampionFile
) -> None:
    """Raise GateError unless verdict and evaluation are about this model beside this champion, force or not."""
    for path, found in ((layout.verdict, verdict.model_digest), (layout.eval_report, report.model_digest)):
        if found != bundle.model_digest:
            raise GateError(
                f"{path}: is about model {(found or 'none')[:12]}, "
                f"but {layout.export} holds {bundle.model_digest[:12]}; run `dvc repro`"
            )
    pairs = [("champion", verdict.champion_digest, before.champion)]
    if verdict.anchor_digest is not None:
        pairs.append(("anchor", verdict.anchor_digest, before.anchor))
    for what, was, now in pairs:
        if was != (now.model_digest if now else None):
            raise GateError(
                f"{layout.verdict}: compared with {what} {(was or 'none')[:12]}, but the {what} is now "
                f"{version_label(now) if now else 'none'}"
                f"{promotion_record.describe_last_promotion(ledger.read_entries(layout.promotions))}; "
                "run `dvc repro`"
            )


def _load_verdict(layout: ProjectLayout) -> Verdict:
    """The verdict on file, as it was sealed."""
    verdict = Verdict.load(layout.verdict)
    files.verify_sealed(layout.gate, "gate")
    return verdict


def _check_return(layout: ProjectLayout, bundle: ModelBundle, forced: bool) -> bool:
    """Whether this model was rolled back; that it comes again must be said. Raises GateError where it is not."""
    back = ledger.find_withdrawal(ledger.read_entries(layout.promotions), bundle.model_digest)
    if back is None or forced:
        return back is not None
    why = f" ({back.reason})" if back.reason else ""
    raise GateError(
        f"model {bundle.model_digest[:12]} was champion and was rolled back on {back.time} by {back.by}{why}; "
        "if it is to be champion again: `ratchet promote --force --reason TEXT`"
    )


def _check_decision(verdict: Verdict, bundle: ModelBundle, forced: bool) -> None:
    if verdict.decision == "PROMOTE" or forced:
        return
    reasons = "".join(f"\n  {r.outcome:<9} {r.text}" for r in verdict.reasons if r.outcome != "pass")
    raise GateError(f"model {bundle.model_digest[:12]} is not promoted, the verdict is {verdict.decision}:{reasons}")


def _check_alias(
    layout: ProjectLayout, registry: MlflowModelRegistry, file: ChampionFile, target: int | None
) -> int | None:
    """The version that the alias is at, once it is known that it may move from there.

    Raises ChampionError unless file and alias agree, or one of them names `target`, which is to be champion: that is
    so when the alias was moved by hand, and one of the two versions is chosen.
    """
    filed, alias = file.champion, registry.champion()
    if filed is not None:
        found = registry.version(filed.version)
        if found is None or found.model_digest != filed.model_digest:
            raise ChampionError(
                f"{layout.champion} names {version_label(filed)}, which the registry in {layout.mlruns} does not have. "
                "Git does not hold mlruns/: copy it from where that version was promoted, or, if it is lost, "
                f"start anew: echo {{}} > {layout.champion}; dvc repro"
            )
    number = filed.version if filed else None
    if number == alias or (target is not None and target in (number, alias)):
        return alias
    ways = " or ".join(f"`ratchet rollback {version}`" for version in (number, alias) if version is not None)
    at = registry.version(alias) if alias is not None else None
    by = f", promoted by {at.tags['ratchet.promoted_by']}" if at and "ratchet.promoted_by" in at.tags else ""
    raise ChampionError(
        f"{layout.champion} names {version_label(filed) if filed else 'no champion'}, but the registry's alias is at "
        f"{'no version' if alias is None else f'version {alias}{by}'}: somebody promoted from another checkout (then "
        f"take over their commit), or one of them was changed by hand. Then choose: {ways}"
    )


def _load_registered(registry: MlflowModelRegistry, file: ChampionFile, number: int) -> Champion:
    """What is known of a version. Raises ChampionError when it is not registered."""
    found = registry.version(number)
    if found is None:
        known = ", ".join(str(v.number) for v in registry.versions()) or "none"
        raise ChampionError(f"version {number} of {registry.model_name} is not registered; known: {known}")
    named = promotion_record.find_version(file, number)
    if named and named.model_digest == found.model_digest:
        return named
    return Champion(
        version=number,
        model_digest=found.model_digest,
        adapter_digest=found.tags[promotion_record.ADAPTER],
        run_id=found.tags[promotion_record.RUN],
        forced=promotion_record.parse_forced(found.tags),
    )


def _success_message(layout: ProjectLayout, entry: Promotion, champion: Champion, before: ChampionFile) -> str:
    now = version_label(champion.model_copy(update={"version": entry.version}))
    how = "again" if entry.action == "rollback" else "now"
    formerly = f", after {version_label(before.champion)}" if before.champion else ""
    forced = champion.forced
    why = ""
    if forced and entry.action == "promote":
        against = "it was rolled back" if forced.decision == "PROMOTE" else f"the verdict is {forced.decision}"
        why = f"\n  FORCED by {forced.by}, although {against}: {forced.reason}"
    paths = " and ".join(str(path.relative_to(layout.root)) for path in (layout.champion, layout.promotions))
    return f"{now} is champion {how}{formerly}; commit {paths}{why}"


def _format_messages(told: Sequence[str], layout: ProjectLayout, event: str) -> str:
    """The lines, and how the hooks took it."""
    lines = list(told)
    if problem := outbox.deliver_pending(layout.outbox, layout.root):
        lines.append(f"warning: {problem}")
    return "\n  ".join([*lines, *outbox.describe_deliveries(layout.outbox, event)])
