"""`ratchet push`: uploads the exported model to the Hugging Face hub. Loads no torch.

The files are first collected in a sealed folder, with the model card and a signature of all files. This folder has
links to the outputs of the stages, so a stage that runs meanwhile does not change what is uploaded. After an
interruption, the same command finds the folder and continues. When the commit is recorded, the folder is removed.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ratchet.config.units import format_count, utc_timestamp
from ratchet.data.harness_tasks import fingerprint_tasks
from ratchet.errors import DamagedFileError, DataError, GateError, SettingsError
from ratchet.models import base_model
from ratchet.quality_gate.decision import confirm_verdict
from ratchet.registry import hub_repository, ledger, model_store, signature
from ratchet.registry.deployment import server_files
from ratchet.registry.deployment.model_card import MODEL_CARD, describe_forced
from ratchet.registry.hub_card import CardMetadata, HubCard
from ratchet.registry.hub_repository import Upload
from ratchet.stages.project import Project, ignore_progress
from ratchet.storage import actors, digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard, Record, read_lines, write_lines
from ratchet.storage.records.evaluation import EvaluationReport
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import Decision, Verdict, read_champion
from ratchet.storage.records.push import ForcedPush, Push, PushKind
from ratchet.storage.records.training import AdapterAnalysis, TrainReport

KIND = "push"
_OVERRIDE = "\n  to push it all the same: --force --reason TEXT, which the model card shows"


@dataclass(frozen=True)
class PushOptions:
    """Options of a push."""

    kind: PushKind = "adapter"
    is_private: bool = False
    """Create the repository as a private one."""
    force: bool = False
    """Push against the gate; `reason` is required."""
    reason: str | None = None
    metadata: CardMetadata = field(default_factory=CardMetadata)
    """Metadata of the model card that the project does not contain."""


class PushResult(Record):
    """Result of a push."""

    push: Push
    """The line of experiments/pushes.jsonl."""
    is_new: bool
    """Whether a commit was made; otherwise, the repository had these files already."""
    notes: tuple[str, ...] = ()
    """Further changes, and fields that the model card does not have."""
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Judgement:
    """The gate's decision about the exported model."""

    decision: Decision | None
    forced: ForcedPush | None


def push(
    project: Project,
    repository: str,
    options: PushOptions = PushOptions(),
    on_progress: Callable[[str], None] = ignore_progress,
) -> PushResult:
    """Upload the exported model as one commit. Repeating the call changes nothing, and resumes an interrupted upload.

    Args:
        project: a project whose stages export and gate have run.
        repository: hub id, OWNER/NAME; created if it does not exist.
        options: form of the model, and fields of the card.
        on_progress: receives lines about the progress.

    Raises:
        GateError: the gate did not decide PROMOTE about this adapter, or the model was rolled back.
        SettingsError: the id is invalid, there is no token, the model was not exported or judged in this form, only
            one of `force` and `reason` is set, or there is no trusted key to sign with.
        HubError: the hub cannot be reached or refuses; nothing was committed.
        DataError, DamagedFileError: a stage's output is missing or damaged.
        LockHeldError: another push of this project is running.
    """
    layout = project.layout
    reason = ledger.check_forced_reason(options.force, options.reason)
    hub_repository.require_usable(repository)
    with project.lock(KIND):
        bundle = ModelBundle.load(layout.bundle)
        exported = model_store.verify_export(layout)
        if options.kind == "adapter":
            _require_judged_adapter(bundle)
        judgement = _judge(project, bundle, reason)
        sources = _collect_files(layout, bundle, options.kind, repository.rsplit("/", 1)[-1], exported)
        earlier = _read_pushes(layout)
        signer = signature.load_signer(layout, project.settings)
        if signer.notice:
            on_progress(signer.notice)
        if bundle.lineage is None:
            raise DataError(f"{layout.bundle}: was written by an earlier version; run `dvc repro -f export`")
        analysis = layout.train / "analysis.json"
        card = HubCard(
            repository=repository, kind=options.kind, bundle=bundle, lineage=bundle.lineage,
            trained=TrainReport.load(layout.train_report),
            analysis=AdapterAnalysis.load(analysis) if analysis.exists() else None,
            evaluation=_load_evaluation(layout, bundle), decision=judgement.decision, forced=judgement.forced,
            metadata=options.metadata.complete(bundle.lineage), signer=signer.name, files=sources,
        )  # fmt: skip
        manifest = _seal_files(layout, sources, card.render(), exported, signer)
        size = manifest.size_bytes
        on_progress(f"pushing {format_count(len(manifest.files), 'file')} ({size:,} bytes) to {repository}")
        known = {name for line in earlier if line.repository == repository for name in line.files}
        upload = Upload(repository, layout.push, manifest.file_digests, known, options.is_private)
        commit = hub_repository.publish(upload, f"{bundle.run_id}: {options.kind}, model {bundle.model_digest[:12]}")
        line = Push(
            time=utc_timestamp(), actor=actors.current_actor(layout.root), repository=repository,
            url=commit.url, revision=commit.revision, kind=options.kind, model_digest=bundle.model_digest,
            adapter_digest=bundle.adapter_digest, run_id=bundle.run_id, decision=judgement.decision,
            forced=judgement.forced, files=manifest.file_digests,
            signature=manifest.file_digests[signature.SIGNATURE], signed_by=signer.name,
        )  # fmt: skip
        recorded = _record_push(layout, earlier, line)
        files.remove_sealed(layout.push)
    notes = [signer.notice] if signer.notice else []
    warnings = [describe_forced(judgement.forced)] if judgement.forced else []
    return PushResult(
        push=recorded, is_new=commit.is_new, notes=(*notes, *card.metadata.list_omissions()),
        warnings=(*warnings, *commit.warnings),
    )  # fmt: skip


def _require_judged_adapter(bundle: ModelBundle) -> None:
    """Raise SettingsError if the gate has judged another model than the base with the trained adapter."""
    merge = bundle.merge
    if merge is not None and (merge.modules or merge.adapters != {bundle.adapter_digest: 1.0}):
        raise SettingsError(
            "the exported model is not the base with the whole trained adapter at weight 1 (export.weight, "
            "export.additional_adapters or export.modules), and only the exported model was judged; push --merged or "
            "--gguf, or remove these settings and run `dvc repro`"
        )


def _judge(project: Project, bundle: ModelBundle, reason: str | None) -> _Judgement:
    """Return the gate's decision about this adapter. Raises GateError unless it is PROMOTE or the push is forced."""
    layout = project.layout
    verdict = _load_verdict(layout, bundle)
    entries = ledger.read_entries(layout.promotions)
    own = [e for e in entries if (e.adapter_digest, e.model_digest) == (bundle.adapter_digest, bundle.model_digest)]
    withdrawal = ledger.find_withdrawal(entries, bundle.model_digest)
    if withdrawal is not None and reason is None:
        raise GateError(
            f"not pushed: model {bundle.model_digest[:12]} was rolled back on {withdrawal.time} by {withdrawal.actor}"
            f"{_OVERRIDE}"
        )
    is_champion = read_champion(layout.champion).champion_digest == bundle.model_digest
    decision: Decision | None = verdict.decision if verdict is not None else None
    promotions = [entry for entry in own if entry.action == "promote"]
    if is_champion and promotions:
        decision = promotions[-1].decision  # a champion's later verdicts only compare it with itself
    elif verdict is not None and decision == "PROMOTE":
        tasks = fingerprint_tasks(project.settings.evaluate.harness.tasks, layout.root, layout.tasks)
        try:
            confirm_verdict(layout, project.settings, tasks, verdict)
        except GateError:
            if reason is None:
                raise
            decision = None
    if decision == "PROMOTE" and withdrawal is None:
        return _Judgement(decision, None)
    if reason is not None:
        forced = ForcedPush(actor=actors.current_actor(layout.root), reason=reason, decision=decision)
        return _Judgement(decision, forced)
    if decision is None or verdict is None:
        problem = f"{layout.verdict}: is not about adapter {bundle.adapter_digest[:12]}; run `dvc repro`"
    else:
        reasons = "".join(f"\n  {r.outcome:<9} {r.text}" for r in verdict.reasons if r.outcome != "pass")
        problem = f"the gate's decision about adapter {bundle.adapter_digest[:12]} is {decision}{reasons}"
    raise GateError(f"not pushed: {problem}{_OVERRIDE}")


def _load_verdict(layout: ProjectLayout, bundle: ModelBundle) -> Verdict | None:
    """Load the verdict; None if the gate has not judged this adapter in this export."""
    if not layout.verdict.exists():
        return None
    files.verify_sealed(layout.gate, "gate")
    verdict = Verdict.load(layout.verdict)
    own = (verdict.adapter_digest, verdict.model_digest) == (bundle.adapter_digest, bundle.model_digest)
    return verdict if own else None


def _collect_files(
    layout: ProjectLayout, bundle: ModelBundle, kind: PushKind, name: str, exported: files.Manifest
) -> dict[str, Path]:
    """Return the path of each file of the model by its name in the repository.

    Raises:
        DataError: the exported model was merged from another adapter.
        SettingsError: the model was not exported in this form, or the base's path must not be commit.
    """
    adapter = sorted(path.name for path in layout.adapter.iterdir()) if layout.adapter.is_dir() else []
    if not adapter or digests.hash_tree(layout.adapter, adapter) != bundle.adapter_digest:
        raise DataError(
            f"{layout.adapter}: the exported model was merged from another adapter ({bundle.adapter_digest[:12]}); run "
            "`dvc repro`"
        )
    if kind == "gguf":
        artifacts = [artifact for artifact in bundle.artifacts if artifact.kind == "gguf"]
        if not artifacts:
            raise SettingsError("--gguf: the model has no GGUF file; set export.gguf.types, and run `dvc repro`")
        return {
            f"{name}-{artifact.type.upper()}.gguf": layout.export / model_store.artifact_path(artifact)
            for artifact in artifacts
        }
    merged = [file.removeprefix("hf/") for file in exported.files if file.startswith("hf/")]
    if kind == "merged":
        return {file: layout.merged_model / file for file in merged if file != MODEL_CARD}
    _require_public_base(layout)
    tokenizer = [file for file in merged if server_files.is_tokenizer_file(file)]
    return {file: layout.adapter / file for file in adapter} | {file: layout.merged_model / file for file in tokenizer}


def _require_public_base(layout: ProjectLayout) -> None:
    """Raise SettingsError if adapter_config.json names a directory outside the project."""
    name = str(base_model.refer_to(BaseCard.load(layout.base_card)).name)
    if name.startswith(("/", "~", "..")):
        raise SettingsError(
            f"adapter_config.json names the base as {name}, which no other machine has, and which may be private; push "
            "--merged or --gguf, or set base.source to a hub id"
        )


def _load_evaluation(layout: ProjectLayout, bundle: ModelBundle) -> EvaluationReport | None:
    """Load the evaluation; None if this adapter was not evaluated in this export."""
    if not layout.eval_report.exists():
        return None
    report = EvaluationReport.load(layout.eval_report)
    is_own = (report.adapter_digest, report.model_digest) == (bundle.adapter_digest, bundle.model_digest)
    return report if is_own else None


def _seal_files(
    layout: ProjectLayout, sources: Mapping[str, Path], card: str, exported: files.Manifest, signer: signature.Signer
) -> files.Manifest:
    """Collect the files in the sealed folder and sign them. A folder that an interrupted push left is used again if it
    has the same files, so that its signature stays the same."""
    known = {
        name: exported.files[path.relative_to(layout.export).as_posix()]
        for name, path in sources.items()
        if path.is_relative_to(layout.export)
    }
    known |= {
        name: (digests.hash_file(path), path.stat().st_size) for name, path in sources.items() if name not in known
    }
    expected = {name: sha for name, (sha, _) in known.items()} | {MODEL_CARD: digests.hash_bytes(card.encode())}
    try:
        manifest = files.verify_sealed(layout.push, KIND)
        has_same_files = {n: sha for n, sha in manifest.file_digests.items() if n != signature.SIGNATURE} == expected
        if has_same_files and signature.find_problem(layout, layout.push) is None:
            return manifest
    except DamagedFileError:
        pass  # there is none, or it is incomplete
    with files.sealed_directory(layout.push, KIND, known) as scratch:
        for name, path in sources.items():
            files.link_or_copy(path.resolve(), scratch / name)
        files.write_atomic(scratch / MODEL_CARD, card)
        signature.sign_folder(scratch, signer)
    return files.read_manifest(layout.push)


def _read_pushes(layout: ProjectLayout) -> list[Push]:
    """Read the recorded pushes, oldest first. Raises DamagedFileError."""
    if not layout.pushes.exists():
        return []
    try:
        return [Push.model_validate(line) for line in read_lines(layout.pushes)]
    except ValueError as error:
        text = " ".join(str(error).splitlines()[:2])
        raise DamagedFileError(f"{layout.pushes}: not a record of pushes ({text}); restore it from git") from None


def _record_push(layout: ProjectLayout, earlier: list[Push], line: Push) -> Push:
    """Append the push, unless the newest line for the repository is about the same commit. Return the recorded line."""
    newest = next((push for push in reversed(earlier) if push.repository == line.repository), None)
    if newest is not None and (newest.revision, newest.files) == (line.revision, line.files):
        return newest
    write_lines(layout.pushes, [json.loads(push.model_dump_json()) for push in (*earlier, line)])
    return line
