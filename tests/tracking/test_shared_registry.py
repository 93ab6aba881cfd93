"""Tests registered models on a server: a team has one champion, and a person who is killed blocks no other."""

import itertools
import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import mlflow_server
from ports import free_port
from promoted_models import store_fake_model, write_fake_export
from promotion_project import SETTINGS, accept_model, read_tree, write_outputs, write_verdict
from ratchet.cli.main import main
from ratchet.cli.promote import format_promotion
from ratchet.cli.promotions import format_history
from ratchet.config import params_file
from ratchet.config.units import utc_timestamp
from ratchet.errors import ChampionError, DamagedFileError, DataError, GateError, RatchetError
from ratchet.registry import keys, ledger, signature
from ratchet.registry.approvals import verify_approvals
from ratchet.registry.promotion import PromotionIntent, execute_promotion, new_event_id
from ratchet.stages.approve import approve
from ratchet.stages.audit import audit
from ratchet.stages.deploy import DeployOptions, DeployResult, deploy, watch_champion
from ratchet.stages.generate import generate
from ratchet.stages.project import Project
from ratchet.stages.promote import PromoteOptions, promote, rollback
from ratchet.stages.promotions import promotions
from ratchet.storage import digests, files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import Champion, read_champion
from ratchet.tracking.mlflow import model_files
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.registry import MlflowModelRegistry
from ratchet.tracking.mlflow.shared_ledger import SharedLedger

FORCE = PromoteOptions(force=True, reason="the new one answers in French")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    with mlflow_server.serve(folder / "server", free_port(), mlflow_template) as address:
        yield address


class Team:
    """People with a clone each. They share keys, as in git, and an MLflow server."""

    def __init__(self, folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._monkeypatch = folder, monkeypatch
        promote_settings = SETTINGS.promote.model_copy(update={"model_name": name})
        self.settings = SETTINGS.model_copy(update={"promote": promote_settings})
        self.layouts: dict[str, ProjectLayout] = {}
        first = self.clone("ada")
        write_outputs(first, "unused")
        keys.load_signer(first)  # creates the pair of keys

    def clone(self, actor: str) -> ProjectLayout:
        layout = ProjectLayout(self._folder / actor)
        layout.experiments.mkdir(parents=True)
        layout.params.write_text(params_file.dump(self.settings), encoding="utf-8")
        (layout.root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
        if self.layouts:
            shutil.copytree(self.layouts["ada"].keyring.parent, layout.keyring.parent)
        self.layouts[actor] = layout
        return layout

    def project(self, actor: str) -> Project:
        self._monkeypatch.setenv("RATCHET_ACTOR", actor)
        return Project.from_parts(self.layouts[actor], self.settings)

    def registry(self, actor: str) -> MlflowModelRegistry:
        return MlflowModelRegistry.open(self.layouts[actor], self.settings)

    def promote(self, actor: str, model: str, decision: str = "PROMOTE") -> str:
        """Promote a model, by force unless the decision is PROMOTE."""
        write_outputs(self.layouts[actor], model, decision)
        options = PromoteOptions() if decision == "PROMOTE" else FORCE
        return format_promotion(promote(self.project(actor), options), self.layouts[actor])

    def history(self, actor: str) -> str:
        return format_history(promotions(self.project(actor)))

    def files(self, actor: str) -> tuple[bytes, bytes]:
        layout = self.layouts[actor]
        return layout.champion.read_bytes(), layout.promotions.read_bytes()


@pytest.fixture
def team(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Team:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    team = Team(tmp_path, request.node.name.replace("[", "-").replace("]", ""), monkeypatch)
    team.clone("bob")
    return team


def test_a_team_sees_one_champion_and_each_fetches_it(team: Team, server: str) -> None:
    said = team.promote("ada", "a")
    assert "version 1" in said
    assert not team.layouts["ada"].mlflow_database.exists()
    registry = team.registry("bob")
    assert (registry.champion(), [v.number for v in registry.versions()]) == (1, [1])
    with pytest.raises(RatchetError, match=r"ada made version 1 .* champion on .*`ratchet promotions`") as refused:
        team.promote("bob", "b")
    assert refused.value.exit_code == 2
    assert not team.layouts["bob"].champion.exists()
    assert f"fetched from {server}: promote of version 1 by ada" in team.history("bob")
    assert team.files("bob") == team.files("ada")
    folder = team.layouts["bob"].promoted_model(read_champion(team.layouts["bob"].champion).champion_digest or "")
    assert not folder.exists()
    prompts = team.layouts["bob"].root / "prompts.jsonl"
    prompts.touch()
    with pytest.raises(DataError, match=r"prompts\.jsonl"):  # it is empty; the model is fetched first
        generate(team.project("bob"), prompts, prompts.with_name("answers.jsonl"), "champion")
    files.verify_sealed(folder, "model")
    assert signature.find_problem(team.layouts["bob"], folder) is None
    assert "version 2" in team.promote("bob", "b")
    assert "fetched" in team.history("ada")
    assert team.files("bob") == team.files("ada")
    result = rollback(team.project("ada"), smoke_test=accept_model)
    assert (result.champion.version, registry.champion()) == (1, 1)
    assert "rollback" in team.history("bob")
    assert team.files("bob") == team.files("ada")
    assert "version 3" in team.promote("bob", "c", "HOLD")
    team.history("ada")
    rollback(team.project("ada"), 1, smoke_test=accept_model)
    rollback(team.project("ada"), 3, PromoteOptions(reason="version 1 is worse"), smoke_test=accept_model)
    champion = read_champion(team.layouts["ada"].champion).champion
    assert champion is not None
    assert champion.forced is not None
    team.history("bob")
    assert team.files("bob") == team.files("ada"), "the mark of the forced promotion returns in every clone"


@pytest.mark.long
def test_an_audit_fetches_the_model_and_compares_with_the_server(team: Team, server: str) -> None:
    team.promote("ada", "a")
    report = audit(team.project("bob"))
    assert report.list_facts("contradicted") == []
    verified = {fact.name: fact.proof for fact in report.list_facts("verified")}
    assert verified["ledger on the server"] == verified["alias and version"] == server
    assert {"files", "signature", "decision"} <= verified.keys()
    files.verify_sealed(team.layouts["bob"].promoted_model(report.model_digest), "model")

    team.history("bob")
    team.promote("bob", "b", "HOLD")
    assert "1 of them not fetched yet" in next(
        fact.text for fact in audit(team.project("ada"), 1).facts if fact.name == "ledger on the server"
    )
    layout = team.layouts["ada"]
    team.history("ada")
    entries = ledger.read_entries(layout.promotions)
    changed = entries[-1].model_copy(update={"actor": "eve", "digest": ""})
    ledger.write_entries(layout.promotions, [entries[0], ledger.chain_entry(entries[:1], changed)])
    problems = {fact.name: fact.proof for fact in audit(team.project("ada"), 1).list_facts("contradicted")}
    assert "promotions.jsonl:2: has promote of version 2 by eve" in problems["ledger on the server"]
    assert "promotions.jsonl" in problems["champion file"]


def run_promotion(layout: ProjectLayout, settings: Any, changes: dict[str, str], answers: Any, dies_in: str) -> None:
    os.environ |= changes  # a process has the environment in which its fork server started
    actor = changes["RATCHET_ACTOR"]
    if dies_in:
        from mlflow import MlflowClient

        owner: Any = MlflowModelRegistry if hasattr(MlflowModelRegistry, dies_in) else MlflowClient
        original, calls = getattr(owner, dies_in), itertools.count()

        def die(self: Any, *arguments: Any, **others: Any) -> Any:
            if owner is MlflowModelRegistry or next(calls) == 1:  # after the first of several requests
                os.kill(os.getpid(), signal.SIGKILL)
            return original(self, *arguments, **others)

        setattr(owner, dies_in, die)
    try:
        answers.put((actor, format_promotion(promote(Project.from_parts(layout, settings)), layout)))
    except RatchetError as error:
        answers.put((actor, f"{type(error).__name__}: {error}"))


def variables(actor: str) -> dict[str, str]:
    return {"RATCHET_ACTOR": actor, "MLFLOW_TRACKING_URI": os.environ["MLFLOW_TRACKING_URI"]}


@pytest.mark.long
def test_two_people_at_once_have_one_winner(team: Team, processes: Any) -> None:
    for number in range(2):  # the first promotion creates the registered model
        for actor in team.layouts:
            write_outputs(team.layouts[actor], f"{actor}{number}")
        answers = processes.Queue()
        racers = [
            processes.Process(target=run_promotion, args=(layout, team.settings, variables(actor), answers, ""))
            for actor, layout in team.layouts.items()
        ]
        for racer in racers:
            racer.start()
        told = dict(answers.get(timeout=300) for _ in racers)
        for racer in racers:
            racer.join()
        [winner] = [actor for actor, text in told.items() if "champion now" in text]
        [loser] = told.keys() - {winner}
        assert told[loser].startswith("ChampionError: "), told
        assert f"{winner} made version" in told[loser]
        assert not team.layouts[loser].promotion_intent.exists()
        for actor in (loser, winner):
            team.history(actor)
        assert team.files("ada") == team.files("bob")
        champion = read_champion(team.layouts["ada"].champion).champion
        assert champion is not None
        assert (champion.run_id, team.registry("ada").champion()) == (f"run-{winner}{number}", champion.version)
        assert len(ledger.read_entries(team.layouts["ada"].promotions)) == number + 1


def kill_in(team: Team, processes: Any, actor: str, method: str) -> None:
    answers = processes.Queue()
    process = processes.Process(
        target=run_promotion, args=(team.layouts[actor], team.settings, variables(actor), answers, method)
    )
    process.start()
    process.join(300)
    assert process.exitcode == -signal.SIGKILL


def test_a_person_who_is_killed_before_the_commit_blocks_nobody(team: Team, processes: Any) -> None:
    write_outputs(team.layouts["ada"], "a")
    kill_in(team, processes, "ada", "commit")
    assert team.registry("bob").champion() is None
    assert "version 2" in team.promote("bob", "b")
    said = team.history("ada")
    assert "dropped without any effect" in said
    assert team.files("ada") == team.files("bob")


@pytest.mark.parametrize(
    "method",
    [
        "move_alias",
        *(pytest.param(name, marks=pytest.mark.long) for name in ("annotate_version", "set_model_version_tag")),
    ],
)
def test_a_commit_is_completed_by_another_person(team: Team, processes: Any, method: str) -> None:
    write_outputs(team.layouts["ada"], "a")
    kill_in(team, processes, "ada", method)
    assert team.registry("bob").champion() == (None if method == "move_alias" else 1)
    said = team.history("bob")
    assert "the promote of version 1 by ada" in said
    assert "completed" in said
    assert team.registry("bob").champion() == 1
    version = team.registry("bob").version(1)
    assert version is not None
    assert version.tags["ratchet.promoted_by"] == "ada"
    assert "version 2" in team.promote("bob", "b")
    said = team.history("ada")
    assert "was interrupted after version 1 had become champion: completed" in said
    assert team.registry("ada").champion() == 2, "the late completion does not move the alias back"
    assert team.files("ada") == team.files("bob")


@pytest.mark.long
def test_an_interrupted_upload_is_continued(team: Team, processes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    upload = model_files._upload

    def fail_after_three(repository: Any, folder: Path, file: str) -> None:
        if len(sent) == 3:
            raise ConnectionError("the network is gone")
        sent.append(file)
        upload(repository, folder, file)

    with monkeypatch.context() as patched:
        patched.setattr(model_files, "_upload", fail_after_three)
        with pytest.raises(RatchetError, match="the network is gone") as refused:
            team.promote("ada", "a")
    assert refused.value.exit_code == 2
    assert team.registry("bob").versions() == [], "a version that is registered has its files"
    assert not team.layouts["ada"].promotion_intent.exists()
    assert "version 1" in format_promotion(promote(team.project("ada")), team.layouts["ada"])
    digest = read_champion(team.layouts["ada"].champion).champion_digest or ""
    team.registry("bob").fetch_model(digest)
    files.verify_sealed(team.layouts["bob"].promoted_model(digest), "model")


@pytest.mark.long
def test_an_alias_that_was_moved_by_hand_is_reported(team: Team) -> None:
    team.promote("ada", "a")
    team.promote("ada", "b")
    team.registry("ada").set_champion(1, expected=2)
    assert "`ratchet rollback 2` or `ratchet rollback 1`" in team.history("ada")
    plan = rollback(team.project("ada"), 2, PromoteOptions(dry_run=True), smoke_test=accept_model).plan
    assert any("add the entry to the ledger on " in step for step in plan)
    assert not any("upload" in step for step in plan), "a rollback uploads nothing"
    rollback(team.project("ada"), 2, smoke_test=accept_model)
    assert team.registry("ada").champion() == 2


def test_a_ledger_of_another_project_is_refused(team: Team, server: str) -> None:
    """A checkout whose history contradicts the server changes nothing."""
    team.promote("ada", "a")
    monkey = pytest.MonkeyPatch()
    with monkey.context() as without:
        without.delenv("MLFLOW_TRACKING_URI")
        team.promote("bob", "b")  # in the project's own registry
    before = team.files("bob")
    write_verdict(team.layouts["bob"], "PROMOTE")
    with pytest.raises(RatchetError, match=f"the first promotion on {server} .* does not follow this ledger"):
        promote(team.project("bob"))
    assert "does not follow this ledger" in team.history("bob")
    assert team.files("bob") == before


@pytest.mark.parametrize("is_own", [True, False], ids=["own", "deleted"])
def test_a_version_that_is_not_on_the_server_gets_the_remedy_that_helps(
    team: Team, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_own: bool
) -> None:
    from mlflow import MlflowClient

    with monkeypatch.context() as changed:
        if is_own:
            changed.delenv("MLFLOW_TRACKING_URI")
        promote_fake(team, "ada", "a")
    remedy = f"keep that one: MLFLOW_REGISTRY_URI=sqlite:///{team.layouts['ada'].mlflow_database}"
    if not is_own:
        MlflowClient(server, server).delete_model_version(team.settings.promote.model_name, "1")
        remedy = "It was promoted there, and its version was deleted since: promote it again"
    with pytest.raises(ChampionError, match=re.escape(remedy)):
        deploy(team.project("ada"), tmp_path / "srv", DeployOptions(smoke_test=False))
    assert f"{remedy}. To start without a champion: echo {{}} > " in team.history("ada")


# --- approvals --------------------------------------------------------------------------------------------------------


def run_approval(layout: ProjectLayout, settings: Any, changes: dict[str, str], verdict: str, is_killed: bool) -> None:
    os.environ |= changes
    if is_killed:
        add = SharedLedger.add_approval

        def die(*arguments: Any) -> None:
            add(*arguments)
            os.kill(os.getpid(), signal.SIGKILL)

        SharedLedger.add_approval = die  # type: ignore[method-assign]
    approve(Project.from_parts(layout, settings), verdict)


@pytest.fixture
def approving(team: Team) -> Team:
    """Return people with a key each, of whom two must approve. Ada has a model."""
    team.clone("eve")
    promote_settings = team.settings.promote.model_copy(update={"approvals": 2})
    team.settings = team.settings.model_copy(update={"promote": promote_settings})
    trusted = keys.Keyring()
    for layout in team.layouts.values():
        layout.private_key.unlink()
        layout.keyring.unlink()
        trusted = trusted.with_key(keys.create_key_pair(layout))
    for layout in team.layouts.values():
        trusted.save(layout.keyring)
    write_outputs(team.layouts["ada"], "a")
    return team


def approve_in_process(team: Team, processes: Any, actor: str, verdict: str, is_killed: bool = False) -> Any:
    process = processes.Process(
        target=run_approval, args=(team.layouts[actor], team.settings, variables(actor), verdict, is_killed)
    )
    process.start()
    return process


@pytest.mark.long
def test_people_on_other_machines_approve_at_once(approving: Team, server: str, processes: Any) -> None:
    team = approving
    verdict = digests.hash_file(team.layouts["ada"].verdict)
    with pytest.raises(GateError, match=f"it lacks 2 approvals .*on a machine that uses {server}, or after"):
        promote(team.project("ada"))
    assert team.registry("bob").champion() is None
    shown = approve(team.project("bob"))
    assert (shown.verdict_digest, shown.verdict.run_id, shown.own) == (verdict, "run-a", None)
    assert shown.proposals[0].startswith("ada (key ")
    killed = approve_in_process(team, processes, "bob", verdict, is_killed=True)
    killed.join(300)
    assert killed.exitcode == -signal.SIGKILL
    assert not team.layouts["bob"].approvals.exists()
    assert [approver.actor for approver in approve(team.project("eve")).approvers] == ["bob"]
    shared = team.registry("eve").shared
    assert shared is not None
    written = shared.read_approvals().values()
    racers = [approve_in_process(team, processes, actor, verdict) for actor in ("bob", "eve")]
    for racer in racers:
        racer.join(300)
        assert racer.exitcode == 0
    [own] = team.layouts["bob"].approvals.rglob("*.json")
    assert own.read_text() in written, "the killed approval was completed"
    report = approve(team.project("ada"))
    assert (sorted(a.actor for a in report.approvers), report.missing, report.problems) == (["bob", "eve"], 0, ())
    assert "version 1" in format_promotion(promote(team.project("ada")), team.layouts["ada"])
    assert len(list(team.layouts["ada"].approvals.rglob("*.json"))) == 3, "ada's checkout gets the approvals, too"
    assert "fetched" in team.history("bob")
    assert team.files("bob") == team.files("ada")
    [entry] = ledger.read_entries(team.layouts["bob"].promotions)
    assert entry.approvals is not None
    assert sorted(approver.actor for approver in entry.approvals.approvers) == ["bob", "eve"]
    team.registry("eve").fetch_model(entry.model_digest)
    folder = team.layouts["eve"].promoted_model(entry.model_digest)
    findings = verify_approvals(folder, keys.read_keyring(team.layouts["eve"].keyring), entry.time)
    assert sorted((finding.actor, finding.problem) for finding in findings) == [("bob", None), ("eve", None)]


def test_what_others_write_on_the_server_is_no_approval(approving: Team, server: str, tmp_path: Path) -> None:
    """Everybody may write parameters on the server, but only trusted keys approve, and nobody removes an approval."""
    from mlflow import MlflowClient

    team = approving
    verdict = digests.hash_file(team.layouts["ada"].verdict)
    with pytest.raises(GateError):
        promote(team.project("ada"))
    report = approve(team.project("bob"), verdict)
    assert report.own is not None
    assert report.file is not None
    shared = team.registry("eve").shared
    assert shared is not None
    text = report.file.read_text()
    shared.add_approval(verdict, text.replace(report.own.signer, str(keys.own_fingerprint(team.layouts["eve"]))))
    shared.add_approval(verdict, "x" * 7000)
    [place] = [where for where, stored in shared.read_approvals().items() if stored == text]
    _, run, name = place.rsplit(", ", 2)
    client = MlflowClient(server, server)
    run_id = run.removeprefix("run ")
    with pytest.raises(Exception, match="Changing param values is not allowed"):
        client.log_param(run_id, f"{name}.000", "nothing")
    client.log_param(run_id, f"approval.{verdict}.{'0' * 64}.000", text)  # a name of another text
    with pytest.raises(GateError, match="it lacks 1 approval ") as refused:
        promote(team.project("ada"))
    said = str(refused.value)
    assert said.count("approved by bob") == 1
    assert "the file was changed or forged" in said
    assert "not an approval" in said
    assert approve(team.project("eve"), verdict).missing == 0
    promote(team.project("ada"))
    with pytest.raises(GateError, match="but that is now this model"):
        approve(team.project("eve"), verdict)


# --- deployment -------------------------------------------------------------------------------------------------------


def promote_fake(team: Team, actor: str, model: str) -> str:
    """Promote a model with a GGUF format of a few bytes. Return its digest."""
    layout, registry = team.layouts[actor], team.registry(actor)
    project = team.project(actor)
    write_fake_export(layout.root / "made" / model, model)
    bundle = store_fake_model(layout, layout.root / "made" / model, ("hf", "gguf/q8_0"))
    before = read_champion(layout.champion)
    champion = Champion(version=0, model_digest=bundle.model_digest, adapter_digest="a" * 64, run_id="run")
    intent = PromotionIntent(
        id=new_event_id(), time=utc_timestamp(), action="promote", actor=actor, project=project.root.name,
        model_name=registry.model_name, champion=champion, alias=registry.champion(),
        previous_version=before.champion.version if before.champion else None, decision="PROMOTE", reason=None,
        is_anchor=False, server=registry.server,
    )  # fmt: skip
    folder = layout.promoted_model(bundle.model_digest)
    execute_promotion(layout, registry, intent, lambda: registry.ensure_version(bundle.model_digest, folder, "run", {}))
    return bundle.model_digest


def test_a_machine_deploys_that_has_only_the_address(
    team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], calm: None
) -> None:
    digest = promote_fake(team, "ada", "a")
    name = team.settings.promote.model_name
    keyring = keys.read_keyring(team.layouts["ada"].keyring)
    (tmp_path / "key.pem").write_text(keyring.keys[0].public)
    machine = tmp_path / "machine"
    machine.mkdir()
    monkeypatch.chdir(machine)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command = ["deploy", "srv", "--model", name, "--no-smoke"]
    assert main(command) == 2
    assert "no key is trusted: name the public key" in capsys.readouterr().err
    assert main(["deploy", "srv", "--model", "a/b", "--public-key", "../key.pem"]) == 2
    assert "--model: found 'a/b'; expected the name of a registered model" in capsys.readouterr().err
    assert not (machine / "srv").exists()
    assert main([*command, "--public-key", "../key.pem"]) == 0
    said = capsys.readouterr().out
    assert f"version 1 (model {digest[:12]}, gguf/q8_0) is current" in said
    assert (machine / "srv/current/gguf/model-q8_0.gguf").read_text() == "gguf/q8_0 of a"
    assert main([*command, "--public-key", "../key.pem"]) == 0
    assert "is deployed in" in capsys.readouterr().out
    promote_fake(team, "ada", "b")
    assert main([*command, "--public-key", "../key.pem"]) == 0
    assert (machine / "srv/current/gguf/model-q8_0.gguf").read_text() == "gguf/q8_0 of b"
    assert main([*command, "--public-key", "../key.pem", "--version", "1"]) == 0
    assert (machine / "srv/current/gguf/model-q8_0.gguf").read_text() == "gguf/q8_0 of a"
    assert main(["deploy", "srv", "--model", name, "--public-key", "../key.pem", "--rollback"]) == 0
    assert (machine / "srv/current/gguf/model-q8_0.gguf").read_text() == "gguf/q8_0 of b"
    capsys.readouterr()
    other = ProjectLayout(tmp_path / "other")
    (tmp_path / "other.pem").write_text((keys.load_signer(other), keys.read_keyring(other.keyring).keys[0].public)[1])
    assert main([*command, "--public-key", "../other.pem"]) == 2
    assert "which this project does not trust" in capsys.readouterr().err
    # In a clone without champion.json and export, the keys of the project count.
    result = deploy(team.project("bob"), tmp_path / "bob-srv", DeployOptions(smoke_test=False))
    assert (result.deployment.version, result.deployment.model_digest) == (2, digest_of(team, "ada"))
    assert not team.layouts["bob"].champion.exists()


def digest_of(team: Team, actor: str) -> str:
    return read_champion(team.layouts[actor].champion).champion_digest or ""


@pytest.mark.parametrize("content", [b"another model", None])
def test_changed_bytes_on_the_server_are_refused(
    team: Team, tmp_path: Path, server: str, content: bytes | None
) -> None:
    digest = promote_fake(team, "ada", "a")
    registry = team.registry("ada")
    version = registry.version(1)
    assert version is not None
    from mlflow import MlflowClient

    client = MlflowClient(server, server)
    model_id = version.source.rpartition("/")[2]
    changed = tmp_path / "model-q8_0.gguf"
    changed.write_bytes(content or b"another model")
    client.log_model_artifact(model_id, str(changed), "gguf")
    if content is None:  # the manifest agrees with the changed file, but nobody signed it
        forged = tmp_path / "forged"
        shutil.copytree(team.layouts["ada"].promoted_model(digest), forged)
        shutil.copyfile(changed, forged / "gguf" / "model-q8_0.gguf")
        (forged / files.MANIFEST).unlink()
        files.seal_directory(forged, "model")
        client.log_model_artifact(model_id, str(forged / files.MANIFEST))
    expected = r"gguf/model-q8_0.gguf" if content is None else f"{files.MANIFEST}; promote the model again"
    with pytest.raises(DamagedFileError, match=expected):
        deploy(team.project("bob"), tmp_path / "srv", DeployOptions(smoke_test=False))
    assert not (tmp_path / "srv" / "current").exists()


@pytest.mark.parametrize("status", [401, None])
def test_a_server_that_refuses_or_is_gone_gives_one_message(
    team: Team, status: int | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], calm: None
) -> None:
    port = free_port()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "planted-token-77")
    write_outputs(team.layouts["ada"], "a")
    before = read_tree(team.layouts["ada"].root)
    with refusing_server(port, status):
        assert main(["--project", str(team.layouts["ada"].root), "promote"]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1, said
    assert ("check MLFLOW_TRACKING_TOKEN" if status else "onnection refused") in said
    assert "planted-token-77" not in said
    after = read_tree(team.layouts["ada"].root)
    assert {name for name in after if after[name] != before.get(name)} <= {
        "mlruns/promote.lock", "mlruns/mlflow.lock"
    }  # fmt: skip


@contextmanager
def refusing_server(port: int, status: int | None) -> Iterator[None]:
    """Answer every request with this status; without one, listen on no port."""

    class Refusal(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(int(status or 0))
            self.end_headers()

        def do_POST(self) -> None:
            self.do_GET()

        def log_message(self, *arguments: Any) -> None:
            pass

    if status is None:
        yield
        return
    with ThreadingHTTPServer(("127.0.0.1", port), Refusal) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield
        server.shutdown()


def test_a_watch_follows_the_server(team: Team, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ratchet.stages.deploy.SERVER_POLL_INTERVAL_S", 0.1)
    promote_fake(team, "ada", "a")
    deployed: list[int] = []

    def on_deploy(result: DeployResult) -> None:
        deployed.append(result.deployment.version)
        if len(deployed) == 2:
            raise KeyboardInterrupt
        promote_fake(team, "ada", "b")

    with pytest.raises(KeyboardInterrupt):
        watch_champion(team.project("bob"), tmp_path / "srv", DeployOptions(smoke_test=False), on_deploy, pytest.fail)
    assert deployed == [1, 2]


def test_a_refused_report_is_one_line_and_no_failure(
    team: Team, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    port = free_port()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{port}")
    with refusing_server(port, 401):
        MlflowTracker.open(team.layouts["ada"], team.settings).report_answers("run", [], grace_s=100)
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert "the server refused the access (status 401); check MLFLOW_TRACKING_TOKEN" in said


@pytest.mark.long
def test_changed_tags_neither_hide_a_forced_promotion_nor_rename_a_model(team: Team, server: str) -> None:
    """The ledger counts, not what everybody may write on the server."""
    from mlflow import MlflowClient

    name = team.settings.promote.model_name
    for model, decision in (("a", "PROMOTE"), ("b", "HOLD")):
        team.promote("ada", model, decision)
    rollback(team.project("ada"), smoke_test=accept_model)
    client = MlflowClient(server, server)
    client.set_model_version_tag(name, "2", "ratchet.forced", "false")
    client.delete_model_version_tag(name, "2", "ratchet.adapter_digest")
    rollback(team.project("ada"), 2, PromoteOptions(reason="version 1 is worse"), smoke_test=accept_model)
    champion = read_champion(team.layouts["ada"].champion).champion
    assert champion is not None
    assert champion.forced is not None
    team.history("bob")
    assert team.files("bob") == team.files("ada")
    rollback(team.project("ada"), 1, smoke_test=accept_model)
    client.set_model_version_tag(name, "2", "ratchet.model_digest", champion.model_digest[::-1])
    before = team.files("ada")
    with pytest.raises(ChampionError, match=r"version 2 .* tag ratchet.model_digest of the version was changed"):
        rollback(team.project("ada"), 2, smoke_test=accept_model)
    assert team.files("ada") == before


def test_a_version_that_was_never_champion_is_no_target_of_a_rollback(team: Team, processes: Any) -> None:
    team.promote("ada", "a")
    write_outputs(team.layouts["ada"], "b")
    kill_in(team, processes, "ada", "commit")
    with pytest.raises(ChampionError, match=r"version 2 .* was never champion"):
        rollback(team.project("ada"), 2, smoke_test=accept_model)
    assert team.registry("ada").champion() == 1


def test_a_deleted_ledger_is_reported_and_restored(team: Team, server: str, tmp_path: Path) -> None:
    from mlflow import MlflowClient

    for model in ("a", "b"):
        promote_fake(team, "ada", model)
        deploy(team.project("ada"), tmp_path / "srv", DeployOptions(smoke_test=False))
    client = MlflowClient(server, server)
    run_id = client.get_registered_model(team.settings.promote.model_name).tags["ratchet.ledger"]
    client.delete_run(run_id)
    advice = f"mlflow runs restore --run-id {run_id}"
    assert advice in team.history("ada")
    with pytest.raises(ChampionError, match=advice):
        rollback(team.project("ada"), smoke_test=accept_model)
    with pytest.raises(ChampionError, match=advice):
        deploy(team.project("ada"), tmp_path / "srv", DeployOptions(smoke_test=False))
    result = deploy(team.project("ada"), tmp_path / "srv", DeployOptions(rollback=True))
    assert result.deployment.version == 1, "an emergency does not wait for the server"
    client.restore_run(run_id)
    assert "the ledger is intact: 2 lines" in team.history("ada")
