"""Tests of `ratchet promote` and `ratchet rollback`: registry, ledger and champion file always agree."""

import json
import os
import re
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from promotion_project import (
    NAME,
    SETTINGS,
    accept_model,
    list_champions,
    read_ledger,
    read_tree,
    with_hooks,
    write_outputs,
    write_verdict,
)
from ratchet.cli.main import main
from ratchet.cli.promote import format_promotion
from ratchet.config import params_file
from ratchet.config.gate import AtLeastRule, Gate
from ratchet.config.promote import HookSettings
from ratchet.errors import (
    ChampionError,
    DamagedFileError,
    DataError,
    GateError,
    LockHeldError,
    SettingsError,
    TrackingError,
)
from ratchet.quality_gate import test_sets
from ratchet.registry import keys, ledger, promotion, signature
from ratchet.registry.model_store import FORCED, KIND
from ratchet.stages.audit import audit
from ratchet.stages.deploy import DeployOptions, deploy
from ratchet.stages.project import Project
from ratchet.stages.promote import PromoteOptions, PromotionResult, promote, rollback, run_smoke_test
from ratchet.stages.promotions import promotions
from ratchet.storage import digests, files
from ratchet.storage.files import FileLock
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import EvaluationReport
from ratchet.storage.records.export import ModelBundle
from ratchet.storage.records.gate import Champion, ForcedPromotion, Verdict, read_champion
from ratchet.tracking.mlflow.registry import MlflowModelRegistry

ACTOR = "ada@example.org"
FORCE = PromoteOptions(force=True, reason="the old one answers in French")


@pytest.fixture(autouse=True)
def ada(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RATCHET_ACTOR", ACTOR)


def champion(layout: ProjectLayout) -> Champion:
    found = read_champion(layout.champion).champion
    assert found is not None
    return found


def run_promote(layout: ProjectLayout, options: PromoteOptions | None = None) -> PromotionResult:
    return promote(Project.from_parts(layout, SETTINGS), options or PromoteOptions())


def run_rollback(
    layout: ProjectLayout,
    version: int | None = None,
    options: PromoteOptions | None = None,
    smoke_test: Callable[[Path], None] = accept_model,
) -> PromotionResult:
    return rollback(Project.from_parts(layout, SETTINGS), version, options or PromoteOptions(), smoke_test)


def promoted(layout: ProjectLayout, model: str) -> str:
    model_digest = write_outputs(layout, model)
    run_promote(layout)
    return model_digest


def test_promote_stores_and_registers_the_model(tracked_project: ProjectLayout) -> None:
    model_digest = write_outputs(tracked_project, "a")
    folder = tracked_project.promoted_model(model_digest)
    (folder / "hf").mkdir(parents=True)
    (folder / "hf" / "model.safetensors").write_bytes(b"half")  # a damaged copy, which promote replaces
    result = run_promote(tracked_project)
    assert (result.champion.version, result.replaced, result.plan, result.warnings) == (1, None, (), ())
    text = format_promotion(result, tracked_project)
    assert "version 1" in text
    assert "experiments/champion.json" in text
    assert list_champions(tracked_project) == ["a"]
    there = {p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()}
    served = {"MLmodel", "README.md", "requirements.txt", "python_env.yaml", "conda.yaml"}
    assert there - served == {
        "bundle.json", "verdict.json", "eval.json", "manifest.json", "model.sig",
        "hf/model.safetensors", "hf/config.json", "adapter/adapter_model.safetensors",
    }  # fmt: skip
    assert served <= there
    bundle = ModelBundle.load(folder / "bundle.json")
    assert bundle.verdict == digests.hash_file(folder / "verdict.json")
    assert bundle.evaluation == digests.hash_file(folder / "eval.json")
    assert signature.check_signature(folder, tracked_project).signer == keys.own_fingerprint(tracked_project)
    page = tracked_project.evidence / folder.name / "gate.html"  # outside the model: it shows rows of the data
    assert page.read_bytes() == tracked_project.gate_page.read_bytes()
    version = MlflowModelRegistry(tracked_project, NAME).version(1)
    assert version is not None
    assert version.source == folder.as_uri()
    assert version.tags == version.tags | {
        "ratchet.run_id": "run-a", "ratchet.base_digest": "b" * 64, "ratchet.data_digest": "d" * 64,
        "ratchet.model_digest": model_digest, "ratchet.decision": "PROMOTE", "ratchet.promoted_by": ACTOR,
        "ratchet.forced": "false", "ratchet.metric.accuracy": "0.95",
        "ratchet.metric.harness/odd_task/_/acc_none": "0.75", "ratchet.gate_page": page.as_uri(),
    }  # fmt: skip
    [entry] = read_ledger(tracked_project)
    assert result.promotion == entry
    assert (entry.action, entry.actor, entry.version, entry.previous_version, entry.decision) == (
        "promote",
        ACTOR,
        1,
        None,
        "PROMOTE",
    )
    assert (entry.model_digest, entry.is_anchor, entry.forced) == (model_digest, True, False)
    assert version.tags["ratchet.event"] == entry.id
    description = f"Promoted on {entry.time} by {ACTOR}. Decision of the gate: PROMOTE."
    assert description_of(tracked_project, 1).startswith(description)
    assert "accuracy 0.95" in description_of(tracked_project, 1)


def description_of(layout: ProjectLayout, version: int) -> str:
    from mlflow import MlflowClient

    return str(MlflowClient(f"sqlite:///{layout.mlflow_database}").get_model_version(NAME, str(version)).description)


def test_promoting_the_champion_again_changes_only_what_is_damaged(tracked_project: ProjectLayout) -> None:
    folder = tracked_project.promoted_model(promoted(tracked_project, "a"))
    write_verdict(tracked_project, "HOLD")
    before = read_tree(tracked_project.root)
    result = run_promote(tracked_project)
    assert (result.promotion, result.notes) == (None, ())
    assert "is champion already" in format_promotion(result, tracked_project)
    assert read_tree(tracked_project.root) == before

    write_verdict(tracked_project, "PROMOTE")
    weights = folder / "hf" / "model.safetensors"
    assert weights.stat().st_nlink == 1  # a copy: a change to the export does not change the champion
    weights.write_bytes(b"flipped")
    result = run_promote(tracked_project)
    assert "hf/model.safetensors" in format_promotion(result, tracked_project)
    files.verify_sealed(folder, KIND)
    signature.check_signature(folder, tracked_project)

    write_outputs(tracked_project, "b")  # replaces the export from which the model was copied
    files.verify_sealed(folder, KIND)


def test_promotions_and_rollbacks_in_turn(tracked_project: ProjectLayout) -> None:
    for model, expected in (("a", ["a"]), ("b", ["b", "a"]), ("a", ["a", "b"]), ("c", ["c", "a", "b"])):
        promoted(tracked_project, model)
        assert list_champions(tracked_project) == expected
    assert len(MlflowModelRegistry(tracked_project, NAME).versions()) == 3
    result = run_rollback(tracked_project)
    assert (result.champion.version, result.replaced and result.replaced.version) == (1, 3)
    assert "version 1" in format_promotion(result, tracked_project)
    assert list_champions(tracked_project) == ["a", "b"]
    result = run_rollback(tracked_project, 1)
    assert result.promotion is None
    assert "already" in format_promotion(result, tracked_project)
    run_rollback(tracked_project, 2)
    assert list_champions(tracked_project) == ["b"]
    with pytest.raises(ChampionError, match="no previous champion"):
        run_rollback(tracked_project)
    reinstate = PromoteOptions(reason="it was the server")
    run_rollback(tracked_project, 3, reinstate)  # a former champion can be restored by its number
    assert list_champions(tracked_project) == ["c"]
    with pytest.raises(ChampionError, match=r"version 9 of .* not registered; known: 1, 2, 3"):
        run_rollback(tracked_project, 9)


def test_rollback_refuses_a_model_that_is_damaged_missing_or_fails_the_smoke_test(
    tracked_project: ProjectLayout,
) -> None:
    folder = tracked_project.promoted_model(promoted(tracked_project, "a"))
    promoted(tracked_project, "b")

    def silent(model: Path) -> None:
        raise ChampionError(f"{model}: does not answer")

    with pytest.raises(ChampionError, match="does not answer"):
        run_rollback(tracked_project, None, smoke_test=silent)
    (folder / "hf" / "model.safetensors").write_bytes(b"weights of x")
    with pytest.raises(ChampionError, match=r"model\.safetensors.*content differs"):
        run_rollback(tracked_project)
    (folder / files.MANIFEST).unlink()
    files.seal_directory(folder, KIND)  # sealing needs no key; the signature does not match
    with pytest.raises(ChampionError, match=r"version 1.*hf/model\.safetensors"):
        run_rollback(tracked_project)
    folder.rename(tracked_project.root / "elsewhere")
    with pytest.raises(ChampionError, match="not sealed"):
        run_rollback(tracked_project)
    for options in (FORCE, PromoteOptions(anchor=True)):
        with pytest.raises(SettingsError, match="are options of `ratchet promote`"):
            run_rollback(tracked_project, None, options)
    file = read_champion(tracked_project.champion)
    assert (champion(tracked_project).version, [one.version for one in file.previous]) == (2, [1])
    assert MlflowModelRegistry(tracked_project, NAME).champion() == 2


def write_over_verdict(layout: ProjectLayout) -> None:
    write_outputs(layout, "a", "HOLD")
    text = layout.verdict.read_text(encoding="utf-8")
    layout.verdict.write_text(text.replace('"HOLD"', '"PROMOTE"'), encoding="utf-8")


def judge_another(layout: ProjectLayout, decision: str) -> None:
    write_outputs(layout, "a", decision)
    write_verdict(layout, decision, "e" * 64)


def damage_export(layout: ProjectLayout, decision: str) -> None:
    write_outputs(layout, "a", decision)
    (layout.merged_model / "model.safetensors").write_bytes(b"WEIGHTS OF a")


def remove_page(layout: ProjectLayout) -> None:
    write_outputs(layout, "a")
    layout.gate_page.unlink()


def train_again(layout: ProjectLayout) -> None:
    write_outputs(layout, "a")
    files.write_atomic(layout.adapter / "adapter_model.safetensors", "of a later training")


def evaluate_without_export(layout: ProjectLayout) -> None:
    write_outputs(layout, "a")
    report = EvaluationReport.load(layout.eval_report)
    report.model_copy(update={"model_digest": None}).save(layout.eval_report)
    files.seal_directory(layout.evaluate, "evaluation")


def rejected(layout: ProjectLayout) -> None:
    write_outputs(layout, "a", "REJECT")


REFUSED: dict[str, tuple[Callable[[ProjectLayout], object], PromoteOptions, type[Exception], str]] = {
    "HOLD": (lambda p: write_outputs(p, "a", "HOLD"), PromoteOptions(), GateError, "HOLD:\n  undecided accuracy"),
    "REJECT": (rejected, PromoteOptions(), GateError, "REJECT:\n  fail +accuracy"),
    "INVALID": (
        lambda p: write_outputs(p, "a", "INVALID"), PromoteOptions(), GateError,
        "INVALID:\n  invalid +3 test rows",
    ),
    "verdict written over": (write_over_verdict, PromoteOptions(), DamagedFileError, "manifest"),
    "verdict of another model": (
        lambda p: judge_another(p, "PROMOTE"), PromoteOptions(), GateError, "is about model eeeeeeeeeeee",
    ),
    "verdict of another model, forced": (
        lambda p: judge_another(p, "INVALID"), FORCE, GateError, "is about model eeeeeeeeeeee",
    ),
    "evaluation of no export": (
        evaluate_without_export, FORCE, GateError, r"eval\.json: is about model none, but .* run `dvc repro`",
    ),
    "gate has not run": (lambda p: None, PromoteOptions(), DataError, "dvc repro gate"),
    "damaged export": (lambda p: damage_export(p, "PROMOTE"), PromoteOptions(), DamagedFileError, "content differs"),
    "damaged export, forced": (lambda p: damage_export(p, "REJECT"), FORCE, DamagedFileError, "content differs"),
    "no page": (remove_page, PromoteOptions(), DataError, r"gate\.html: file not found"),
    "later adapter": (train_again, PromoteOptions(), DataError, r"merged from another adapter .*; run `dvc repro`"),
    "force without reason": (rejected, PromoteOptions(force=True), SettingsError, "--force needs a reason"),
    "reason without force": (rejected, PromoteOptions(reason="because"), SettingsError, "--reason is only used"),
    "blank reason": (rejected, PromoteOptions(force=True, reason=" \n"), SettingsError, "found an empty text"),
    "reason too long": (rejected, PromoteOptions(force=True, reason="x" * 2001), SettingsError, "2,001 characters"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_promotion_changes_nothing(tracked_project: ProjectLayout, name: str) -> None:
    make, options, error, says = REFUSED[name]
    make(tracked_project)
    with pytest.raises(error, match=says):
        run_promote(tracked_project, options)
    assert_nothing_promoted(tracked_project)


def test_earlier_decisions_under_other_rules_are_named(
    tracked_project: ProjectLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    tracked_project.params.write_text(params_file.dump(SETTINGS), encoding="utf-8")
    write_outputs(tracked_project, "a")
    earlier = {"rules": "of yesterday", "decision": "REJECT"}
    test_sets.record_verdict(tracked_project, Verdict.load(tracked_project.verdict).model_copy(update=earlier))
    write_verdict(tracked_project, "PROMOTE")
    for arguments in (["--dry-run"], []):
        assert main(["--project", str(tracked_project.root), "promote", *arguments]) == 0
        output = capsys.readouterr().out
        assert "\n  note: under different rules the gate decided REJECT for this model on these samples" in output
    promoted(tracked_project, "b")
    assert "under different rules" not in format_promotion(run_rollback(tracked_project), tracked_project)


def test_a_verdict_reached_by_other_rules_is_refused(tracked_project: ProjectLayout) -> None:
    write_outputs(tracked_project, "a")
    stricter = Gate(rules=(AtLeastRule(rule="at_least", metric="accuracy", value=0.99),))
    with pytest.raises(GateError, match="has PROMOTE, but the current rules, tasks and test set uses give REJECT"):
        promote(Project.from_parts(tracked_project, SETTINGS.model_copy(update={"gate": stricter})))
    assert_nothing_promoted(tracked_project)


def assert_nothing_promoted(layout: ProjectLayout) -> None:
    assert not layout.champion.exists()
    assert not layout.models.exists()
    assert MlflowModelRegistry(layout, NAME).versions() == []


def test_a_verdict_against_an_earlier_champion_is_refused(tracked_project: ProjectLayout) -> None:
    promoted(tracked_project, "a")
    write_outputs(tracked_project, "b")
    for_b = Verdict.load(tracked_project.verdict)  # verdict of b against a
    promoted(tracked_project, "c")
    write_outputs(tracked_project, "b")
    with files.sealed_directory(tracked_project.gate, "gate") as scratch:
        for_b.save(scratch / tracked_project.verdict.name)
    with pytest.raises(GateError, match=r"but the champion is now version 2 .*; run `dvc repro`"):
        run_promote(tracked_project)
    assert list_champions(tracked_project) == ["c", "a"]


# --- the anchor -------------------------------------------------------------------------------------------------------


def anchor(layout: ProjectLayout) -> int:
    found = read_champion(layout.champion).anchor
    assert found is not None
    return found.version


def test_the_first_champion_is_the_anchor_until_another_is_named(tracked_project: ProjectLayout) -> None:
    promoted(tracked_project, "a")
    promoted(tracked_project, "b")
    assert anchor(tracked_project) == 1
    write_verdict(tracked_project, "PROMOTE")
    run_promote(tracked_project, PromoteOptions(anchor=True))  # b is already champion and becomes the anchor
    assert anchor(tracked_project) == 2
    result = run_promote(tracked_project, PromoteOptions(anchor=True))
    assert "already" in format_promotion(result, tracked_project)
    run_rollback(tracked_project, 1)
    assert anchor(tracked_project) == 2
    write_outputs(tracked_project, "c")
    run_promote(tracked_project, PromoteOptions(anchor=True))
    assert anchor(tracked_project) == 3
    assert [entry.is_anchor for entry in read_ledger(tracked_project)] == [True, False, True, False, True]
    assert list_champions(tracked_project) == ["c", "a"]


def edit_champion_file(layout: ProjectLayout, **changes: Any) -> None:
    content = json.loads(layout.champion.read_bytes())
    layout.champion.write_text(json.dumps(content | changes), encoding="utf-8")


def test_an_anchor_that_was_removed_is_refused_and_a_repair_restores_it(
    tracked_project: ProjectLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    tracked_project.params.write_text(params_file.dump(SETTINGS), encoding="utf-8")
    project = Project(tracked_project.root)
    promoted(tracked_project, "a")
    promoted(tracked_project, "b")
    whole = read_champion(tracked_project.champion)
    says = (
        r"champion\.json: anchor: found none; expected version 1, according to .*promotions\.jsonl; restore .* from git"
    )
    edit_champion_file(tracked_project, anchor=None)
    for command in (["promote"], ["rollback", "1"], ["gate"], ["gate", "--check"]):
        assert main(["--project", str(project.root), *command]) == 2
        assert re.search(says, capsys.readouterr().err), command
    write_outputs(tracked_project, "c")
    for run in (lambda: run_promote(tracked_project, FORCE), lambda: run_rollback(tracked_project)):
        with pytest.raises(ChampionError, match=says):
            run()
    with pytest.raises(ChampionError, match=says):
        deploy(project, tracked_project.root / "served", DeployOptions(smoke_test=False))
    [problem] = promotions(project).problems
    assert re.search(says, problem)
    [fact] = [one for one in audit(project).list_facts("contradicted") if one.name == "champion file"]
    assert "anchor: found none; expected version 1" in fact.proof
    edit_champion_file(tracked_project, anchor=whole.anchor and whole.anchor.model_dump(), previous=[])
    with pytest.raises(ChampionError, match=r"previous\[0\]: found none; expected version 1"):
        run_promote(tracked_project)

    files.write_json(tracked_project.champion, {})
    assert any(one.name == "champion file" for one in audit(project).list_facts("contradicted"))
    run_rollback(tracked_project, 2)
    repaired = read_champion(tracked_project.champion)
    assert repaired.model_copy(update={"ledger": whole.ledger}) == whole
    assert not audit(project).list_facts("contradicted")
    assert list_champions(tracked_project) == ["b", "a"]


def test_an_emptied_champion_file_makes_no_new_anchor(tracked_project: ProjectLayout) -> None:
    promoted(tracked_project, "a")
    promoted(tracked_project, "b")
    files.write_json(tracked_project.champion, {})
    write_verdict(tracked_project, "PROMOTE")  # of b, compared with nothing
    with pytest.raises(ChampionError, match=r"names no champion, but the .*version 2.*`ratchet rollback 2`"):
        run_promote(tracked_project)
    run_rollback(tracked_project, 2)
    assert (anchor(tracked_project), list_champions(tracked_project)) == (1, ["b", "a"])
    promoted(tracked_project, "c")
    assert anchor(tracked_project) == 1


def test_a_rolled_back_anchor_has_the_mark_of_its_last_promotion(tracked_project: ProjectLayout) -> None:
    promoted(tracked_project, "a")  # the anchor, not forced
    promoted(tracked_project, "b")
    run_rollback(tracked_project, 1)
    promoted(tracked_project, "c")
    write_outputs(tracked_project, "a", "HOLD")
    run_promote(tracked_project, FORCE)
    promoted(tracked_project, "d")
    run_rollback(tracked_project, 3)
    run_rollback(tracked_project, 1)
    assert champion(tracked_project).forced is not None
    assert list_champions(tracked_project)[0] == "a"


# --- promotion against the verdict ------------------------------------------------------------------------------------


@pytest.mark.parametrize("decision", ["PROMOTE", "HOLD", "INVALID"])
def test_force_overrules_decisions_and_is_recorded_only_if_it_was_needed(
    tracked_project: ProjectLayout, decision: str
) -> None:
    write_outputs(tracked_project, "a", decision)
    text = format_promotion(run_promote(tracked_project, FORCE), tracked_project)
    needed = decision != "PROMOTE"
    assert ("FORCED" in text) is needed
    assert (f"FORCED by {ACTOR} despite the gate's decision {decision}" in text) is needed
    noted = ForcedPromotion.model_validate({"actor": ACTOR, "reason": FORCE.reason, "decision": decision})
    assert champion(tracked_project).forced == (noted if needed else None)
    [entry] = read_ledger(tracked_project)
    assert (entry.forced, entry.reason) == (needed, FORCE.reason)


def test_force_is_recorded_everywhere(tracked_project: ProjectLayout) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{tracked_project.mlflow_database}")
    run = client.create_run(client.create_experiment(NAME), tags={"ratchet.run_id": "run-a"})
    decision = "REJECT"
    a = write_outputs(tracked_project, "a", decision)
    text = format_promotion(run_promote(tracked_project, FORCE), tracked_project)
    assert f"FORCED by {ACTOR} despite the gate's decision {decision}: {FORCE.reason}" in text
    forced = ForcedPromotion.model_validate({"actor": ACTOR, "reason": FORCE.reason, "decision": decision})
    assert champion(tracked_project).forced == forced
    [entry] = read_ledger(tracked_project)
    assert (entry.forced, entry.reason, entry.decision) == (True, FORCE.reason, decision)
    version = MlflowModelRegistry(tracked_project, NAME).version(1)
    assert version is not None
    for tags in (version.tags, client.get_run(run.info.run_id).data.tags):
        assert tags == tags | {
            "ratchet.forced": "true", "ratchet.forced_by": ACTOR, "ratchet.forced_reason": FORCE.reason,
            "ratchet.decision": decision, "ratchet.event": entry.id,
        }  # fmt: skip
    assert description_of(tracked_project, 1).startswith(
        f"**FORCED** on {entry.time} by {ACTOR} despite the gate's decision"
    )
    assert ForcedPromotion.load(tracked_project.promoted_model(a) / FORCED) == forced
    files.verify_sealed(tracked_project.promoted_model(a), KIND)

    promoted(tracked_project, "b")
    assert not champion(tracked_project).forced
    result = run_rollback(tracked_project, 1)  # the promotion of version 1 is still marked as forced
    assert "FORCED" in format_promotion(result, tracked_project)
    assert champion(tracked_project).forced == forced
    write_outputs(tracked_project, "b")
    run_promote(tracked_project, FORCE)
    promoted(tracked_project, "c")
    run_rollback(tracked_project, 2)
    files.write_json(tracked_project.champion, {})  # an empty champion file: the registry has all facts
    MlflowModelRegistry(tracked_project, NAME).set_champion(1, expected=2)
    run_rollback(tracked_project, 1)
    assert champion(tracked_project).forced == forced
    promoted(tracked_project, "b")
    promoted(tracked_project, "a")  # promoted with the verdict PROMOTE, not by force
    assert champion(tracked_project).forced is None
    assert not (tracked_project.promoted_model(a) / FORCED).exists()
    version = MlflowModelRegistry(tracked_project, NAME).version(1)
    assert version is not None
    assert (version.tags["ratchet.forced"], version.tags["ratchet.decision"]) == ("false", "PROMOTE")
    assert list_champions(tracked_project)[0] == "a"


# --- dry runs ---------------------------------------------------------------------------------------------------------


def test_a_dry_run_changes_nothing_and_lists_every_step(tracked_project: ProjectLayout) -> None:
    settings = with_hooks(
        HookSettings(command=("touch", "told")), HookSettings(command=("true",), events=("rollback",))
    )
    write_outputs(tracked_project, "a", "REJECT")
    MlflowModelRegistry(tracked_project, NAME).champion()  # opening the store creates its lock file
    before = read_tree(tracked_project.root)
    hooked_project = Project.from_parts(tracked_project, settings)
    result = promote(hooked_project, PromoteOptions(force=True, reason="try", dry_run=True))
    assert (result.champion.version, result.promotion) == (0, None)
    text = format_promotion(result, tracked_project)
    for part in (
        "nothing was changed", "models/", "promotion.json", "register model", "from no version to a new version",
        f"promotions.jsonl, by {ACTOR}: try", "champion.json\n", "FORCED despite the gate's decision REJECT",
        "call command touch",
    ):  # fmt: skip
        assert part in text
    assert "command true" not in text
    after = read_tree(tracked_project.root)
    assert after.keys() - before.keys() == {"mlruns/promote.lock"}
    assert {name: after[name] for name in before} == before
    with pytest.raises(GateError, match="REJECT"):
        promote(hooked_project, PromoteOptions(dry_run=True))
    promoted(tracked_project, "a")
    promoted(tracked_project, "b")
    before = read_tree(tracked_project.root)
    result = rollback(hooked_project, None, PromoteOptions(dry_run=True, reason="slow"), accept_model)
    text = format_promotion(result, tracked_project)
    assert "from version 2 to version 1" in text
    assert "loads and answers" in text
    assert read_tree(tracked_project.root) == before


def test_a_dry_run_makes_no_folder(project: ProjectLayout) -> None:
    write_outputs(project, "a")
    before = read_tree(project.root)
    result = run_promote(project, PromoteOptions(dry_run=True))
    assert "a new version" in format_promotion(result, project)
    assert read_tree(project.root) == before
    assert not project.mlruns.exists()


def test_the_commands_print_the_records_as_json(
    tracked_project: ProjectLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    tracked_project.params.write_text(params_file.dump(SETTINGS), encoding="utf-8")

    def run_json(*arguments: str) -> PromotionResult:
        assert main(["--project", str(tracked_project.root), *arguments, "--json"]) == 0
        return PromotionResult.model_validate_json(capsys.readouterr().out)

    write_outputs(tracked_project, "a")
    planned = run_json("promote", "--dry-run")
    assert (planned.promotion, planned.champion.version, len(planned.plan)) == (None, 0, 7)
    promoted_result = run_json("promote")
    assert promoted_result.promotion == read_ledger(tracked_project)[-1]
    assert promoted_result.champion == champion(tracked_project)
    assert run_json("rollback", "1").promotion is None  # version 1 is the champion already


# --- a registry that fails or does not answer -------------------------------------------------------------------------


def test_a_damaged_registry_promotes_nothing(project: ProjectLayout) -> None:
    write_outputs(project, "a")
    project.mlruns.mkdir()
    project.mlflow_database.write_bytes(b"damaged" * 1000)
    with pytest.raises(TrackingError, match="not a database"):
        run_promote(project)
    assert not project.champion.exists()


def test_a_registry_that_is_locked_midway_leaves_nothing_half_done(
    tracked_project: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another SQLite writer locks the database just before one of the calls of MLflow."""
    import sqlalchemy
    from mlflow import MlflowClient

    def hurry(connection: Any, cursor: Any, statement: str, *rest: Any) -> tuple[str, Any]:
        return statement.replace("busy_timeout = 20000", "busy_timeout = 50"), rest[0]  # MLflow waits 20 s

    def promote_locked(call: str) -> None:
        original = getattr(MlflowClient, call)

        def locked(*arguments: Any, **options: Any) -> Any:
            with closing(sqlite3.connect(tracked_project.mlflow_database)) as other:
                other.execute("BEGIN EXCLUSIVE")
                return original(*arguments, **options)

        engines = (sqlalchemy.engine.Engine, "before_cursor_execute", hurry)
        sqlalchemy.event.listen(*engines, retval=True)
        try:
            with monkeypatch.context() as patched, pytest.raises(TrackingError, match="database is locked"):
                patched.setattr(MlflowClient, call, locked)
                run_promote(tracked_project)
        finally:
            sqlalchemy.event.remove(*engines)

    promoted(tracked_project, "a")
    calls = {"b": "create_model_version", "c": "set_registered_model_alias", "d": "update_model_version"}
    for number, (model, call) in enumerate(calls.items(), start=2):
        write_outputs(tracked_project, model)
        promote_locked(call)
        run_promote(tracked_project)
        assert list_champions(tracked_project)[0] == model
        versions = MlflowModelRegistry(tracked_project, NAME).versions()
        assert len(versions) == len(read_ledger(tracked_project)) == number
        assert all("ratchet.event" in version.tags for version in versions)
    assert list_champions(tracked_project) == ["d", "c", "b", "a"]


def test_a_fresh_clone_says_where_the_registry_is(tracked_project: ProjectLayout) -> None:
    promoted(tracked_project, "a")
    promoted(tracked_project, "b")
    tracked_project.mlruns.rename(tracked_project.root / "left on the other machine")
    for run in (run_promote, run_rollback):
        with pytest.raises(ChampionError, match=r"names version 2 .*is not in the registry.*copy it from"):
            run(tracked_project)
    assert not tracked_project.mlflow_database.exists()


def test_another_registry_is_recognized(tracked_project: ProjectLayout, tmp_path: Path, mlflow_template: Path) -> None:
    promoted(tracked_project, "a")
    clone = ProjectLayout(tmp_path / "clone")  # another registry, with another model as version 1 and champion
    clone.mlruns.mkdir(parents=True)
    clone.mlflow_database.write_bytes(mlflow_template.read_bytes())
    promoted(clone, "z")
    clone.champion.write_bytes(tracked_project.champion.read_bytes())
    clone.promotions.write_bytes(tracked_project.promotions.read_bytes())
    write_outputs(clone, "b")
    with pytest.raises(ChampionError, match=r"version 1 .*which is not in the registry"):
        run_promote(clone)
    with pytest.raises(ChampionError, match="is not in the registry"):
        run_rollback(clone, 1)


def test_a_disagreement_names_both_versions_and_each_suggested_command_works(tracked_project: ProjectLayout) -> None:
    from mlflow import MlflowClient

    promoted(tracked_project, "a")
    MlflowClient(f"sqlite:///{tracked_project.mlflow_database}").delete_registered_model_alias(NAME, "champion")
    with pytest.raises(ChampionError, match=r"points to no version.*choose one: `ratchet rollback 1`"):
        run_promote(tracked_project)
    run_rollback(tracked_project, 1)
    assert list_champions(tracked_project) == ["a"]
    promoted(tracked_project, "b")
    promoted(tracked_project, "c")
    for choice, expected in ((1, ["a", "b"]), (3, ["c", "b", "a"])):
        state = tracked_project.champion.read_bytes(), tracked_project.promotions.read_bytes()
        MlflowModelRegistry(tracked_project, NAME).set_champion(1, expected=3)  # simulates a change in the MLflow UI
        write_outputs(tracked_project, "d")
        with pytest.raises(ChampionError, match=r"names version 3 .*version 1.*`ratchet rollback 3` or .*rollback 1`"):
            run_promote(tracked_project)
        with pytest.raises(ChampionError, match="names version 3"):
            run_rollback(tracked_project)
        run_rollback(tracked_project, choice)
        assert list_champions(tracked_project) == expected
        tracked_project.champion.write_bytes(state[0])
        tracked_project.promotions.write_bytes(state[1])
        MlflowModelRegistry(tracked_project, NAME).set_champion(3, expected=choice)


# --- concurrent promotions --------------------------------------------------------------------------------------------


def test_another_promotion_that_takes_too_long_is_named(
    tracked_project: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(promotion, "LOCK_WAIT_S", 0.0)
    write_outputs(tracked_project, "a")
    with FileLock(tracked_project.mlruns / "promote.lock", "promotion").acquire():
        for run in (run_promote, run_rollback):
            with pytest.raises(LockHeldError, match=f"promotion is in use by process {os.getpid()}"):
                run(tracked_project)
    assert_nothing_promoted(tracked_project)


def test_a_champion_promoted_meanwhile_is_not_replaced(
    tracked_project: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    promoted(tracked_project, "a")
    promoted(tracked_project, "b")
    write_outputs(tracked_project, "c")
    before = tracked_project.champion.read_bytes(), tracked_project.promotions.read_bytes()
    original = MlflowModelRegistry.ensure_version

    def meanwhile(self: MlflowModelRegistry, *arguments: Any) -> int:
        self.set_champion(1, expected=2)
        return original(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(MlflowModelRegistry, "ensure_version", meanwhile)
        with pytest.raises(
            ChampionError, match="moved from version 2 to version 1 since the decision: another promotion"
        ):
            run_promote(tracked_project)
    assert (tracked_project.champion.read_bytes(), tracked_project.promotions.read_bytes()) == before
    assert not tracked_project.promotion_intent.exists()
    assert MlflowModelRegistry(tracked_project, NAME).champion() == 1


def promote_and_report(root: Path, by: str, answers: Any) -> None:
    os.environ["RATCHET_ACTOR"] = by
    try:
        layout = ProjectLayout(root)
        answers.put((by, format_promotion(run_promote(layout), layout)))
    except (ChampionError, GateError) as error:
        answers.put((by, str(error)))


def race(roots: dict[str, Path], processes: Any) -> dict[str, str]:
    answers = processes.Queue()
    racers = [processes.Process(target=promote_and_report, args=(root, by, answers)) for by, root in roots.items()]
    for racer in racers:
        racer.start()
    told = dict(answers.get(timeout=60) for _ in racers)
    for racer in racers:
        racer.join()
    return told


def test_promotions_that_race_leave_one_version(tracked_project: ProjectLayout, processes: Any) -> None:
    write_outputs(tracked_project, "a")
    told = race(dict.fromkeys(("ada", "bob", "cid"), tracked_project.root), processes)
    assert sorted("champion now" in text for text in told.values()) == [False, False, True]
    assert sum("is champion already" in text for text in told.values()) == 2
    assert list_champions(tracked_project) == ["a"]
    assert len(read_ledger(tracked_project)) == len(MlflowModelRegistry(tracked_project, NAME).versions()) == 1


def test_two_promotions_of_different_models_have_one_winner(
    tracked_project: ProjectLayout, tmp_path: Path, processes: Any
) -> None:
    """Two checkouts that share a registry promote at the same time: one succeeds and one is refused."""
    other = ProjectLayout(tmp_path / "checkout of bob")
    other.root.mkdir()
    other.mlruns.symlink_to(tracked_project.mlruns)
    write_outputs(tracked_project, "a")
    write_outputs(other, "b")
    told = race({"ada": tracked_project.root, "bob": other.root}, processes)
    [winner] = [by for by, text in told.items() if "champion now" in text]
    [loser] = told.keys() - {winner}
    assert f"the registry's alias points to version 1, promoted by {winner}. Either another checkout" in told[loser]
    won, lost = (tracked_project, other) if winner == "ada" else (other, tracked_project)
    assert list_champions(won) == ["a" if winner == "ada" else "b"]
    assert not lost.champion.exists()
    assert not lost.promotions.exists()


# --- the smoke test ---------------------------------------------------------------------------------------------------


def test_smoke_test_loads_a_real_model_and_refuses_a_broken_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from ratchet.models.answer_process import main

    words = {word: i for i, word in enumerate(["<end>", "user", "assistant", "Hello", ":", "you"])}
    inner = Tokenizer(models.WordLevel(words, "you"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"eos_token": "<end>", "pad_token": "<end>", "unk_token": "you"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, **special)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ' : ' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ ' assistant :' }}{% endif %}"
    )
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            eos_token_id=0, pad_token_id=0, bos_token_id=None,
        )
    )  # fmt: skip
    good = tmp_path / "good"
    model.save_pretrained(good)
    tokenizer.save_pretrained(good)
    assert main([str(good), "--smoke-test"]) == 0

    with torch.no_grad():
        model.model.embed_tokens.weight.fill_(float("nan"))
    broken = tmp_path / "broken"
    model.save_pretrained(broken)
    tokenizer.save_pretrained(broken)
    assert main([str(broken), "--smoke-test"]) == 1
    assert "not finite" in capsys.readouterr().err
    (broken / "model.safetensors").unlink()
    assert main([str(broken), "--smoke-test"]) == 1
    assert "OSError" in capsys.readouterr().err


def test_the_smoke_test_runs_in_a_new_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = tmp_path / "python"  # replaces the interpreter, which needs ten seconds for the same answer
    said.write_text(f"#!/bin/sh\necho $* > '{tmp_path}/arguments'\n")
    said.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(said))
    run_smoke_test(tmp_path / "model")
    arguments = ["-m", "ratchet.models.answer_process", str(tmp_path / "model"), "--smoke-test"]
    assert (tmp_path / "arguments").read_text().split() == arguments
    said.write_text("#!/bin/sh\necho first >&2; echo 'OSError: no weights' >&2; exit 1\n")
    with pytest.raises(
        ChampionError, match=r"model: does not load and answer \(OSError: no weights\); the champion is unch"
    ):
        run_smoke_test(tmp_path / "model")


def test_a_model_that_was_rolled_back_needs_force(tracked_project: ProjectLayout) -> None:
    promoted(tracked_project, "a")
    promoted(tracked_project, "b")
    run_rollback(tracked_project, None, PromoteOptions(reason="bad in production"))
    write_outputs(tracked_project, "b")
    with pytest.raises(GateError, match=r"was rolled back on .* \(bad in production\); .*--force --reason"):
        run_promote(tracked_project)
    assert list_champions(tracked_project) == ["a"]
    result = run_promote(tracked_project, PromoteOptions(force=True, reason="it was the load balancer"))
    text = format_promotion(result, tracked_project)
    assert "FORCED by" in text
    assert "despite a rollback of this model: it was the load balancer" in text
    assert list_champions(tracked_project) == ["b", "a"]
    assert champion(tracked_project).forced is not None


def test_a_rollback_to_a_model_that_was_rolled_back_needs_a_reason(
    tracked_project: ProjectLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    from mlflow import MlflowClient

    tracked_project.params.write_text(params_file.dump(SETTINGS), encoding="utf-8")
    one, two = promoted(tracked_project, "a"), promoted(tracked_project, "b")
    run_rollback(tracked_project, 1, PromoteOptions(reason="bad in production"))
    before = read_tree(tracked_project.root)
    for options in (PromoteOptions(), PromoteOptions(dry_run=True)):
        with pytest.raises(
            GateError, match=r"was rolled back on .* \(bad in production\); .*`ratchet rollback 2 --reas"
        ):
            run_rollback(tracked_project, 2, options)
    assert main(["--project", str(tracked_project.root), "rollback", "2"]) == 3
    assert "to make it champion again: `ratchet rollback 2 --reason TEXT`" in capsys.readouterr().err
    assert read_tree(tracked_project.root) == before
    client = MlflowClient(f"sqlite:///{tracked_project.mlflow_database}")
    client.set_registered_model_alias(NAME, "champion", "2")
    write_outputs(tracked_project, "c")
    with pytest.raises(ChampionError, match=r"choose one: `ratchet rollback 1` or `ratchet rollback 2 --reason TEXT`"):
        run_promote(tracked_project)
    client.set_registered_model_alias(NAME, "champion", "1")
    run_rollback(tracked_project, 2, PromoteOptions(reason="it was the load balancer"))
    entries = read_ledger(tracked_project)
    assert [ledger.find_withdrawal(entries, model) for model in (one, two)] == [None, None]
    project = Project(tracked_project.root)
    assert not any(fact.status == "contradicted" for fact in audit(project).facts)
    run_rollback(tracked_project, 1)  # version 1 was never bad, so this needs no reason
    assert ledger.find_withdrawal(read_ledger(tracked_project), two) is not None


def test_a_champion_signed_with_a_revoked_key_is_signed_again(tracked_project: ProjectLayout) -> None:
    folder = tracked_project.promoted_model(promoted(tracked_project, "a"))
    first = signature.check_signature(folder, tracked_project).signer
    now = champion(tracked_project)
    same = f"version 1 (model {now.model_digest[:12]}, run {now.run_id}) is champion already"
    assert format_promotion(run_promote(tracked_project), tracked_project) == same
    keys.revoke_trust(tracked_project, first, "the laptop was lost")
    tracked_project.private_key.unlink()
    with pytest.raises(SettingsError, match="the laptop was lost"):
        signature.check_signature(folder, tracked_project)
    with pytest.raises(SettingsError, match="ratchet keys --new"):
        run_promote(tracked_project)
    made = keys.create_key_pair(tracked_project).fingerprint
    result = run_promote(tracked_project, PromoteOptions(dry_run=True))
    assert "the laptop was lost" in format_promotion(result, tracked_project)
    with pytest.raises(SettingsError, match="the laptop was lost"):
        signature.check_signature(folder, tracked_project)
    result = run_promote(tracked_project)
    assert f"signed by key {made[:16]}" in format_promotion(result, tracked_project)
    assert signature.check_signature(folder, tracked_project).signer == made
    assert len(read_ledger(tracked_project)) == 1
