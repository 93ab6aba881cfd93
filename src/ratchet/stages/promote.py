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
from ratchet.data.harness_tasks import fingerprints
from ratchet.errors import ChampionError, GateError, SettingsError
from ratchet.gate.decision import confirm
from ratchet.registry import bundle_files, hooks, ledger, model_store, outbox, promotion, promotion_record
from ratchet.registry.deployment import model_files
from ratchet.registry.promotion_record import UNREGISTERED, Intent, name
from ratchet.registry.signing import policy
from ratchet.storage import files
from ratchet.storage.layout import Layout
from ratchet.storage.records.evaluation import EvalReport
from ratchet.storage.records.export import Bundle
from ratchet.storage.records.gate import Champion, ChampionFile, Forced, Promotion, Verdict, read_champion
from ratchet.tracking.mlflow.registry import Registry

SMOKE_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Options:
    """How a promotion or a rollback is asked for."""

    force: bool = False
    """Promote against the verdict; `reason` must say why."""
    reason: str | None = None
    dry_run: bool = False
    """Say what would be done, and change nothing."""
    anchor: bool = False
    """Make it the anchor, too."""


def promote(layout: Layout, settings: Settings, options: Options = Options()) -> str:
    """Make the exported model champion; returns what to tell. Repeating it changes nothing.

    Raises:
        SettingsError: a hook that cannot be told; force without a reason, or a reason without force.
        GateError: the verdict is not PROMOTE, or is not about this model, or compared it with an earlier champion, or
            would be another by the rules of now.
        ChampionError: champion file and registry disagree, or somebody else promoted meanwhile.
        BusyError: another promotion is at work.
        DataError, DamagedError: a stage's output is missing or damaged, or the ledger is.
        SettingsError: there is no key to sign with that this project trusts.
        TrackingError: MLflow's database cannot be used.
    """
    reason = ledger.reason(options.reason)
    if options.force != (reason is not None):
        raise SettingsError(
            "--force wants a reason: --reason TEXT" if options.force else "--reason is for --force: give both"
        )
    hooks.check(settings.promote.hooks)
    with _promotion_lock(layout, options):
        told = _recovered(layout, options)
        if told and options.dry_run:
            return told[0]
        verdict, bundle = _verdict(layout), Bundle.load(layout.bundle)
        exported = bundle_files.verified(layout)
        before = _champion_file(layout)
        registry = Registry(layout, settings.promote.model_name)
        if before.champion and before.champion.model_digest == bundle.model_digest and not _anchors(before, options):
            _agreed(layout, registry, before, target=None)
            told = [*told, *_vouched(layout, settings, bundle, exported, before.champion, options)]
            return _say([*told, f"{name(before.champion)} is champion already"], layout, "")
        report = EvalReport.load(layout.eval_report)
        _check_evidence(layout, verdict, report, bundle, before)
        confirm(layout, settings, fingerprints(settings.evaluate.harness.tasks, layout.root, layout.tasks), verdict)
        _check_decision(verdict, bundle, forced=options.force)
        back = _check_return(layout, bundle, forced=options.force)
        known = registry.number_of(bundle.model_digest)
        alias = _agreed(layout, registry, before, target=known)
        model_store.sources(layout, bundle, exported)  # refuses what is missing
        who, now = ledger.who(layout.root), promotion_record.now()
        forced = options.force and (verdict.decision != "PROMOTE" or back)
        champion = Champion(
            version=UNREGISTERED, model_digest=bundle.model_digest, adapter_digest=bundle.adapter_digest,
            run_id=bundle.run_id,
            forced=Forced(by=who, reason=reason or "", decision=verdict.decision) if forced else None,
        )  # fmt: skip
        about = Intent(
            id=promotion_record.new_id(), time=now, action="promote", by=who, project=layout.root.name,
            model_name=settings.promote.model_name, champion=champion, alias=alias,
            before=before.champion.version if before.champion else None, decision=verdict.decision, reason=reason,
            anchored=options.anchor or (before.anchor is None and not forced), hooks=settings.promote.hooks,
            description=promotion_record.description(champion, who, now, bundle, verdict, report),
        )  # fmt: skip
        folder = layout.promoted_model(bundle.model_digest)
        if options.dry_run:
            return promotion_record.plan(
                layout, about, known, f"keep the model as {folder}", policy.plan(layout, settings)
            )
        told = [*told, *_kept(layout, settings, bundle, exported, champion.forced)[1]]
        tags = promotion_record.of_model(
            bundle, verdict, report, model_store.page(layout, bundle.model_digest).as_uri()
        )
        entry, event = promotion.carry_out(
            layout,
            registry,
            about,
            lambda: registry.ensure_version(bundle.model_digest, folder, bundle.run_id, tags),
        )
    return _say([*told, _success(layout, entry, champion, before)], layout, event)


def rollback(
    layout: Layout,
    settings: Settings,
    version: int | None,
    options: Options = Options(),
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
        DamagedError: the ledger is broken.
        BusyError: another promotion is at work.
        TrackingError: MLflow's database cannot be used.
    """
    if options.force or options.anchor:
        raise SettingsError("rollback: --force and --anchor are for `ratchet promote`")
    reason = ledger.reason(options.reason)
    hooks.check(settings.promote.hooks)
    with _promotion_lock(layout, options):
        told = _recovered(layout, options)
        if told and options.dry_run:
            return told[0]
        before = _champion_file(layout)
        registry = Registry(layout, settings.promote.model_name)
        if version is None:
            if not before.previous:
                raise ChampionError(f"{layout.champion}: names no previous champion, so there is none to go back to")
            version = before.previous[0].version
        alias = _agreed(layout, registry, before, target=version)
        champion = _registered(registry, before, version)
        if before.champion and before.champion.version == version and alias == version:
            return _say([*told, f"{name(champion)} is champion already"], layout, "")
        (check or smoke_test)(_trusted(layout, champion))
        about = Intent(
            id=promotion_record.new_id(), time=promotion_record.now(), action="rollback", by=ledger.who(layout.root),
            project=layout.root.name, model_name=settings.promote.model_name, champion=champion, alias=alias,
            before=before.champion.version if before.champion else None, decision=None, reason=reason, anchored=False,
            hooks=settings.promote.hooks,
        )  # fmt: skip
        if options.dry_run:
            return promotion_record.plan(layout, about, version, f"{name(champion)} is whole, loads and answers")
        entry, event = promotion.carry_out(layout, registry, about, lambda: version)
    return _say([*told, _success(layout, entry, champion, before)], layout, event)


def _vouched(
    layout: Layout, settings: Settings, bundle: Bundle, exported: files.Manifest, now: Champion, options: Options
) -> list[str]:  # fmt: skip
    """Make the champion's folder anew from the export if it is damaged, or signed by nobody who is trusted now."""
    folder = layout.promoted_model(bundle.model_digest)
    wrong = policy.doubt(layout, folder)
    if wrong is None or options.dry_run:
        return [] if wrong is None else [f"dry run: {wrong}: it would be made and signed again"]
    by, told = _kept(layout, settings, bundle, exported, now.forced)
    return [*told, f"{wrong}: made again from {layout.export}, signed by {by}"]


def _kept(
    layout: Layout, settings: Settings, bundle: Bundle, exported: files.Manifest, forced: Forced | None
) -> tuple[str, list[str]]:
    """Sign and seal the model's folder; who signed, and what to tell of it."""
    signer = policy.signer(layout, settings)
    extra = model_files.files_of(layout.export, bundle, settings.promote.model_name, forced) | model_store.marked(
        forced
    )
    model_store.keep(layout, bundle, exported, extra, policy.Vouching(layout, signer))
    return signer.by, [signer.told] if signer.told else []


def _trusted(layout: Layout, champion: Champion) -> Path:
    """Its Hugging Face folder. Raises ChampionError unless every byte is as somebody whom the project trusts signed."""
    folder = model_store.verified(layout, champion)
    if doubt := policy.doubt(layout, folder.parent):
        raise ChampionError(f"{name(champion)} cannot be champion: {doubt}; choose another: `ratchet rollback VERSION`")
    return folder


def smoke_test(model: Path) -> None:
    """Load a Hugging Face folder in a fresh process and let it answer. Raises ChampionError with what it said."""
    command = [sys.executable, "-m", "ratchet.models.smoke_test", str(model)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=SMOKE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        raise ChampionError(f"{model}: did not answer within {SMOKE_TIMEOUT_S:g} s; champion is unchanged") from None
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ChampionError(f"{model}: does not load and answer ({last}); champion is unchanged")


def _promotion_lock(layout: Layout, options: Options) -> AbstractContextManager[object]:
    if options.dry_run and not layout.mlruns.is_dir():
        return nullcontext()  # nobody can be at work, and the lock's folder would be a change
    return promotion.lock(layout)


def _recovered(layout: Layout, options: Options) -> list[str]:
    """Finish or drop what an interrupted command has left; what to tell of it."""
    if not options.dry_run:
        text = promotion.recover(layout, lambda model_name: Registry(layout, model_name))
        return [text] if text else []
    found = promotion.left(layout, lambda model_name: Registry(layout, model_name))
    if found is None:
        return []
    will = "would be finished" if found.forward else "would be dropped"
    about = f"begun on {found.intent.time} by {found.intent.by}"
    return [f"dry run: an interrupted {found.intent.action}, {about}, {will} first: `ratchet promotions` does that"]


def _champion_file(layout: Layout) -> ChampionFile:
    """The champion file, once it and the ledger are known to belong together."""
    file = read_champion(layout.champion)
    ledger.check(layout.promotions, ledger.read(layout.promotions), file)
    return file


def _anchors(before: ChampionFile, options: Options) -> bool:
    """Whether the champion is to become the anchor, and is not yet."""
    same = before.anchor and before.champion and before.anchor.version == before.champion.version
    return options.anchor and not same


def _check_evidence(layout: Layout, verdict: Verdict, report: EvalReport, bundle: Bundle, before: ChampionFile) -> None:
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
                f"{name(now) if now else 'none'}{promotion_record.since(ledger.read(layout.promotions))}; "
                "run `dvc repro`"
            )


def _verdict(layout: Layout) -> Verdict:
    """The verdict on file, as it was sealed."""
    verdict = Verdict.load(layout.verdict)
    files.verify(layout.gate, "gate")
    return verdict


def _check_return(layout: Layout, bundle: Bundle, forced: bool) -> bool:
    """Whether this model was rolled back; that it comes again must be said. Raises GateError where it is not."""
    back = ledger.withdrawn(ledger.read(layout.promotions), bundle.model_digest)
    if back is None or forced:
        return back is not None
    why = f" ({back.reason})" if back.reason else ""
    raise GateError(
        f"model {bundle.model_digest[:12]} was champion and was rolled back on {back.time} by {back.by}{why}; "
        "if it is to be champion again: `ratchet promote --force --reason TEXT`"
    )


def _check_decision(verdict: Verdict, bundle: Bundle, forced: bool) -> None:
    if verdict.decision == "PROMOTE" or forced:
        return
    reasons = "".join(f"\n  {r.outcome:<9} {r.text}" for r in verdict.reasons if r.outcome != "pass")
    raise GateError(f"model {bundle.model_digest[:12]} is not promoted, the verdict is {verdict.decision}:{reasons}")


def _agreed(layout: Layout, registry: Registry, file: ChampionFile, target: int | None) -> int | None:
    """The version that the alias is at, once it is known that it may move from there.

    Raises ChampionError unless file and alias agree, or one of them names `target`, which is to be champion: that is
    so when the alias was moved by hand, and one of the two versions is chosen.
    """
    filed, alias = file.champion, registry.champion()
    if filed is not None:
        found = registry.version(filed.version)
        if found is None or found.model_digest != filed.model_digest:
            raise ChampionError(
                f"{layout.champion} names {name(filed)}, which the registry in {layout.mlruns} does not have. "
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
        f"{layout.champion} names {name(filed) if filed else 'no champion'}, but the registry's alias is at "
        f"{'no version' if alias is None else f'version {alias}{by}'}: somebody promoted from another checkout (then "
        f"take over their commit), or one of them was changed by hand. Then choose: {ways}"
    )


def _registered(registry: Registry, file: ChampionFile, number: int) -> Champion:
    """What is known of a version. Raises ChampionError when it is not registered."""
    found = registry.version(number)
    if found is None:
        known = ", ".join(str(v.number) for v in registry.versions()) or "none"
        raise ChampionError(f"version {number} of {registry.model_name} is not registered; known: {known}")
    named = promotion_record.known(file, number)
    if named and named.model_digest == found.model_digest:
        return named
    return Champion(
        version=number,
        model_digest=found.model_digest,
        adapter_digest=found.tags[promotion_record.ADAPTER],
        run_id=found.tags[promotion_record.RUN],
        forced=promotion_record.forced_of(found.tags),
    )


def _success(layout: Layout, entry: Promotion, champion: Champion, before: ChampionFile) -> str:
    now = name(champion.model_copy(update={"version": entry.version}))
    how = "again" if entry.action == "rollback" else "now"
    formerly = f", after {name(before.champion)}" if before.champion else ""
    forced = champion.forced
    why = ""
    if forced and entry.action == "promote":
        against = "it was rolled back" if forced.decision == "PROMOTE" else f"the verdict is {forced.decision}"
        why = f"\n  FORCED by {forced.by}, although {against}: {forced.reason}"
    paths = " and ".join(str(path.relative_to(layout.root)) for path in (layout.champion, layout.promotions))
    return f"{now} is champion {how}{formerly}; commit {paths}{why}"


def _say(told: Sequence[str], layout: Layout, event: str) -> str:
    """The lines, and how the hooks took it."""
    lines = list(told)
    if problem := outbox.deliver(layout.outbox, layout.root):
        lines.append(f"warning: {problem}")
    return "\n  ".join([*lines, *outbox.describe(layout.outbox, event)])
