"""Tests roles, tenants and quotas with real users of a real MLflow server."""

import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest

import mlflow_server
import tiny_project
from mlflow_server import ADMIN, PASSWORD
from ports import free_port
from promotion_project import SETTINGS, accept_model, write_outputs
from ratchet.cli.main import main
from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.errors import PermissionRefusedError, QuotaError, RatchetError, SettingsError
from ratchet.registry import keys
from ratchet.stages.approve import approve
from ratchet.stages.project import Project
from ratchet.stages.promote import promote, rollback
from ratchet.stages.promotions import promotions
from ratchet.stages.team import TeamOptions, TeamReport, require_run_quota, team
from ratchet.storage import digests
from ratchet.storage.layout import ProjectLayout
from ratchet.tracking.mlflow.client import MlflowTracker
from ratchet.tracking.mlflow.registry import MlflowModelRegistry
from ratchet.tracking.mlflow.team import TeamMember, Tenant

ROLES = {"vera": "viewer", "tom": "trainer", "pia": "promoter"}
LOSS = "validation/loss"
POINT = "k"
"""Metric that a member of the tenant adds in a request that strangers may not make."""
STRANGER = "zoe"
"""A promoter of the other tenant."""
RUN_ID = "0a1b2c3d4e5f"


@contextmanager
def user(server: str, name: str, tenant: str) -> Iterator[None]:
    """Let this process be a user of a tenant for the duration of the block."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("MLFLOW_TRACKING_URI", server)
        patched.setenv("MLFLOW_WORKSPACE", tenant)
        patched.setenv("MLFLOW_TRACKING_USERNAME", name)
        patched.setenv("MLFLOW_TRACKING_PASSWORD", PASSWORD)
        patched.setenv("RATCHET_USER_PASSWORD", PASSWORD)
        patched.setenv("RATCHET_ACTOR", name)
        yield


def name_model(settings: Settings, name: str) -> Settings:
    return settings.model_copy(update={"promote": settings.promote.model_copy(update={"model_name": name})})


@dataclass
class Company:
    """A tenant, and clones of its project by user."""

    server: str
    folder: Path
    tenant: str
    model_name: str
    layouts: dict[str, ProjectLayout] = field(default_factory=dict)

    def project(self, actor: str) -> Project:
        settings = name_model(SETTINGS, self.model_name)
        if actor not in self.layouts:
            layout = ProjectLayout(self.folder / actor)
            layout.experiments.mkdir(parents=True)
            layout.params.write_text(params_file.dump(settings), encoding="utf-8")
            (layout.root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
            if self.layouts:
                shutil.copytree(next(iter(self.layouts.values())).keyring.parent, layout.keyring.parent)
            else:
                keys.load_signer(layout)  # creates the pair of keys, which the clones share
            self.layouts[actor] = layout
        return Project.from_parts(self.layouts[actor], settings)

    def team(self, actor: str, **options: Any) -> TeamReport:
        with user(self.server, actor, self.tenant):
            return team(self.project(actor), TeamOptions(**options))

    def promote(self, actor: str, model: str) -> int:
        write_outputs(self.project(actor).layout, model)
        with user(self.server, actor, self.tenant):
            return promote(self.project(actor)).champion.version

    def registry(self, actor: str) -> MlflowModelRegistry:
        project = self.project(actor)
        return MlflowModelRegistry.open(project.layout, project.settings)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, mlflow_template: Path) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server") / "server"
    with mlflow_server.serve(folder, free_port(), mlflow_template, "NO_PERMISSIONS") as address:
        yield address


@pytest.fixture(scope="module")
def acme(server: str, tmp_path_factory: pytest.TempPathFactory) -> Company:
    """Return a tenant with three users, a training and a champion."""
    acme = Company(server, tmp_path_factory.mktemp("acme"), "acme", "support")
    for name, role in ROLES.items():
        acme.team(ADMIN, grant=name, role=role)
    with user(server, "tom", "acme"):
        tracker = open_tracker(acme, "tom")
        run = tracker.find_or_create(RUN_ID, 1000)
        with tracker.connected() as client:
            client.log_metric(run.info.run_id, LOSS, 1.5)
            client.log_dict(run.info.run_id, {"of": "support"}, "settings.yaml")
    assert acme.promote("pia", "a") == 1
    return acme


@pytest.fixture(scope="module")
def zenith(server: str, tmp_path_factory: pytest.TempPathFactory, acme: Company) -> Company:
    zenith = Company(server, tmp_path_factory.mktemp("zenith"), "zenith", "billing")
    zenith.team(ADMIN, grant=STRANGER, role="promoter")
    return zenith


def open_tracker(company: Company, actor: str) -> MlflowTracker:
    project = company.project(actor)
    return MlflowTracker.open(project.layout, project.settings)


# --- roles ------------------------------------------------------------------------------------------------------------


def test_everybody_in_a_tenant_reads_runs_and_the_champion(acme: Company) -> None:
    for actor in ROLES:
        with user(acme.server, actor, "acme"):
            metrics = dict(open_tracker(acme, actor).find(RUN_ID).data.metrics)
            metrics.pop(POINT, None)  # by a test that may run before
            assert metrics == {LOSS: 1.5}
            history = promotions(acme.project(actor))
            assert {entry.promotion.actor for entry in history.entries} == {"pia"}
            assert history.problems == ()
            digest = history.entries[0].promotion.model_digest
            acme.registry(actor).fetch_model(digest)
            assert acme.project(actor).layout.promoted_model(digest).is_dir()


@pytest.mark.parametrize("actor", ["vera", "tom"])
def test_who_is_no_promoter_changes_no_champion(acme: Company, actor: str) -> None:
    with user(acme.server, "pia", "acme"):
        numbers = [version.number for version in acme.registry("pia").versions()]
    with user(acme.server, actor, "acme"):
        promotions(acme.project(actor))
    message = rf"refused the access to user {actor} \(status 403\); .* to change it, role promoter"
    with pytest.raises(PermissionRefusedError, match=message) as refused:
        acme.promote(actor, f"of-{actor}")
    assert refused.value.exit_code == 2
    layout = acme.project(actor).layout
    assert not layout.promotion_intent.exists()
    settings = acme.project(actor).settings
    requiring = settings.model_copy(update={"promote": settings.promote.model_copy(update={"approvals": 1})})
    for propose_or_approve in (promote, partial(approve, verdict=digests.hash_file(layout.verdict))):
        with user(acme.server, actor, "acme"), pytest.raises(PermissionRefusedError, match=message):
            propose_or_approve(Project.from_parts(layout, requiring))
        assert not layout.approvals.exists(), "no signed file that could be committed"
    with user(acme.server, "pia", "acme"):
        registry = acme.registry("pia")
        assert (registry.champion(), [version.number for version in registry.versions()]) == (1, numbers)


@pytest.mark.long
def test_a_trainer_cannot_roll_back_and_leaves_no_intent(acme: Company) -> None:
    assert acme.promote("pia", "b") == 2
    with user(acme.server, "tom", "acme"):
        promotions(acme.project("tom"))
        with pytest.raises(PermissionRefusedError, match="role promoter"):
            rollback(acme.project("tom"), smoke_test=accept_model)
    assert not acme.project("tom").layout.promotion_intent.exists()
    with user(acme.server, "pia", "acme"):
        assert rollback(acme.project("pia"), smoke_test=accept_model).champion.version == 1


def test_a_viewer_logs_nothing(acme: Company) -> None:
    with user(acme.server, "vera", "acme"):
        with pytest.raises(PermissionRefusedError, match=r"to log runs there, role trainer.*--grant vera"):
            open_tracker(acme, "vera").find_or_create("000000000000", 1000)
        assert open_tracker(acme, "vera").find("000000000000") is None


def test_a_trainer_changes_neither_ledger_nor_quota_nor_models(acme: Company) -> None:
    """Without Ratchet, too."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository
    from requests import HTTPError

    with user(acme.server, "pia", "acme"):
        client = MlflowClient(acme.server)
        ledger, quota = (client.get_experiment_by_name(name) for name in ("support.promotions", "ratchet.quota"))
        [run] = client.search_runs([ledger.experiment_id])
        model = client.search_logged_models([ledger.experiment_id])[0]
        trained = client.search_runs([client.get_experiment_by_name("support").experiment_id])[0].info.run_id
    with user(acme.server, "tom", "acme"):
        client = MlflowClient(acme.server)
        client.set_tag(trained, "note", "a trainer changes runs")
        client.delete_traces(client.get_run(trained).info.experiment_id, trace_ids=["tr-none"])
        repository = get_artifact_repository(model.artifact_location, tracking_uri=acme.server)
        (acme.folder / "evil").write_text("evil")
        refused = {
            "alias": lambda: client.set_registered_model_alias("support", "champion", "2"),
            "version tag": lambda: client.set_model_version_tag("support", "1", "ratchet.forced", "no"),
            "new version": lambda: client.create_model_version("support", "models:/" + model.model_id),
            "ledger": lambda: client.log_param(run.info.run_id, "promotion.000099", "x"),
            "ledger run": lambda: client.delete_run(run.info.run_id),
            "files": lambda: repository.log_artifact(str(acme.folder / "evil"), "hf"),
            "quota": lambda: client.set_experiment_tag(quota.experiment_id, "ratchet.quota_runs", "9999"),
            "quota removed": lambda: client.delete_experiment(quota.experiment_id),
            "new experiment": lambda: client.create_experiment("mine"),
            "new model": lambda: client.create_registered_model("mine"),
            "workspace": lambda: client.create_workspace("mine"),
            "run removed": lambda: client.delete_run(trained),
        }
        for what, change in refused.items():
            with pytest.raises((MlflowException, HTTPError), match="Permission denied"):
                change()
                pytest.fail(f"{what}: a trainer could change it")


def test_a_role_replaces_the_one_before_and_can_be_revoked(acme: Company) -> None:
    acme.team(ADMIN, grant="ute", role="promoter")
    report = acme.team(ADMIN, grant="ute", role="viewer")
    assert TeamMember(user="ute", role="viewer", is_administrator=False) in report.members
    assert report.created_user is None
    with user(acme.server, "ute", "acme"), pytest.raises(PermissionRefusedError):
        open_tracker(acme, "ute").find_or_create("000000000000", 1000)
    assert "ute" not in [member.user for member in acme.team(ADMIN, revoke="ute").members]
    with user(acme.server, "ute", "acme"), pytest.raises(PermissionRefusedError, match="user ute has no role in ten"):
        team(acme.project("ute"))


def grant_and_die(company: Company, calls: int) -> None:
    original, made = Tenant._call, iter(range(1000))

    def die(self: Tenant, method: str, path: str, version: int = 3, **arguments: Any) -> dict[str, Any]:
        if method != "GET" and next(made) == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, method, path, version, **arguments)

    Tenant._call = die  # type: ignore[method-assign]
    company.team(ADMIN, grant="max", role="trainer")


@pytest.mark.parametrize("calls", [3, *(pytest.param(calls, marks=pytest.mark.long) for calls in (0, 7, 14))])
def test_a_killed_grant_is_completed_by_the_same_command(
    acme: Company, processes: Any, tmp_path: Path, calls: int
) -> None:
    company = Company(acme.server, tmp_path, f"killed-{calls}", "support")
    company.project(ADMIN)
    process = processes.Process(target=grant_and_die, args=(company, calls))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    for _ in range(2):
        assert company.team(ADMIN, grant="max", role="trainer").members == (
            TeamMember(user="max", role="trainer", is_administrator=False),
        )
    with user(company.server, ADMIN, company.tenant):
        project = company.project(ADMIN)
        tenant = Tenant(project.layout, project.settings, company.server)
        roles = tenant._call("GET", "roles/list", workspace=company.tenant)["roles"]
    known = {role["name"]: len(role["permissions"]) for role in roles if role["name"].startswith("ratchet.")}
    assert known == {"ratchet.viewer": 2, "ratchet.trainer": 4, "ratchet.promoter": 6}


def test_wrong_options_and_servers_are_refused(acme: Company, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(text: str, actor: str = ADMIN, **options: Any) -> None:
        with pytest.raises(RatchetError, match=text) as refused:
            acme.team(actor, **options)
        assert refused.value.exit_code == 2
        assert PASSWORD not in str(refused.value)

    refuse("--grant USER and --role ROLE belong together", grant="tom")
    refuse("found '-1'; expected a number of trainings, or none", quota_runs="-1")
    refuse("found '9{40}'; expected a number of trainings", quota_runs="9" * 5000)
    refuse("--quota-disk: found 'much'", quota_disk="much")
    refuse("has no user of this name", revoke="nobody")
    refuse(r"user tom \(status 403\); only an administrator", "tom", quota_runs="5")
    refuse(r"user tom \(status 403\); only an administrator", "tom", grant="tom", role="promoter")
    with monkeypatch.context() as changed:
        changed.setattr("ratchet.tracking.mlflow.team.PASSWORD", "RATCHET_UNSET_PASSWORD")
        refuse("has no user ines: set RATCHET_UNSET_PASSWORD", grant="ines", role="viewer")
    with user(acme.server, ADMIN, ""), pytest.raises(SettingsError, match="set MLFLOW_WORKSPACE to the name of the te"):
        team(acme.project(ADMIN), TeamOptions(grant="tom", role="viewer"))
    with pytest.raises(SettingsError, match="the project's own store, which has no users"):
        team(acme.project(ADMIN))


# --- tenants ----------------------------------------------------------------------------------------------------------

NAMES = ("acme", "support", "vera", "tom", "pia", RUN_ID)
"""Names of one tenant, which no other sees."""


@dataclass(frozen=True)
class Ids:
    """What a stranger may have guessed or overheard."""

    experiment: str
    ledger: str
    run: str
    model: str
    artifacts: str


@pytest.fixture(scope="module")
def ids(acme: Company) -> Ids:
    from mlflow import MlflowClient

    with user(acme.server, "pia", "acme"):
        client = MlflowClient(acme.server)
        experiment, ledger = (client.get_experiment_by_name(n).experiment_id for n in ("support", "support.promotions"))
        run = next(r for r in client.search_runs([experiment]) if r.data.tags["ratchet.run_id"] == RUN_ID).info
        model = client.search_logged_models([ledger])[0]
        assert "/workspaces/acme/" in model.artifact_location
        return Ids(experiment, ledger, run.run_id, model.model_id, run.artifact_uri.partition("mlflow-artifacts:/")[2])


REQUESTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "experiment": ("GET", "api/2.0/mlflow/experiments/get", {"experiment_id": "{experiment}"}),
    "experiment by name": ("GET", "api/2.0/mlflow/experiments/get-by-name", {"experiment_name": "support"}),
    "experiments": ("GET", "api/2.0/mlflow/experiments/search", {"max_results": 100}),
    "run": ("GET", "api/2.0/mlflow/runs/get", {"run_id": "{run}"}),
    "runs": ("POST", "api/2.0/mlflow/runs/search", {"experiment_ids": ["{experiment}"]}),
    "a point": (
        "POST", "api/2.0/mlflow/runs/log-metric", {"run_id": "{run}", "key": POINT, "value": 1, "timestamp": 1},
    ),
    "metric history": ("GET", "api/2.0/mlflow/metrics/get-history", {"run_id": "{run}", "metric_key": LOSS}),
    "metric history of pages": (
        "GET", "ajax-api/2.0/mlflow/metrics/get-history-bulk", {"run_id": "{run}", "metric_key": LOSS},
    ),
    "datasets": (
        "POST", "ajax-api/2.0/mlflow/experiments/search-datasets", {"experiment_ids": ["{experiment}"]},
    ),
    "artifacts of a run": ("GET", "api/2.0/mlflow/artifacts/list", {"run_id": "{run}"}),
    "artifact of a run": ("GET", "get-artifact", {"run_uuid": "{run}", "path": "settings.yaml"}),
    "artifact by path": ("GET", "api/2.0/mlflow-artifacts/artifacts/{artifacts}/settings.yaml", {}),
    "artifact by its path in the tenant": (
        "GET", "api/2.0/mlflow-artifacts/artifacts/{experiment}/{run}/artifacts/settings.yaml", {},
    ),
    "artifact by path, encoded": ("GET", "api/2.0/mlflow-artifacts/artifacts/workspaces/%61cme/{experiment}/x", {}),
    "artifacts by path": ("GET", "api/2.0/mlflow-artifacts/artifacts", {"path": "workspaces/acme/{experiment}"}),
    "root of the artifacts": ("GET", "api/2.0/mlflow-artifacts/artifacts", {}),
    "tenants in the artifacts": ("GET", "api/2.0/mlflow-artifacts/artifacts", {"path": "workspaces"}),
    "artifacts above": ("GET", "api/2.0/mlflow-artifacts/artifacts", {"path": "../workspaces/acme"}),
    "upload": ("PUT", "api/2.0/mlflow-artifacts/artifacts/{artifacts}/evil", {}),
    "logged model": ("GET", "api/2.0/mlflow/logged-models/{model}", {}),
    "logged models": ("POST", "api/2.0/mlflow/logged-models/search", {"experiment_ids": ["{ledger}"]}),
    "files of a logged model": ("GET", "api/2.0/mlflow/logged-models/{model}/artifacts/directories", {}),
    "file of a logged model": (
        "GET", "ajax-api/2.0/mlflow/logged-models/{model}/artifacts/files", {"artifact_file_path": "manifest.json"},
    ),
    "registered model": ("GET", "api/2.0/mlflow/registered-models/get", {"name": "support"}),
    "registered models": ("GET", "api/2.0/mlflow/registered-models/search", {"max_results": 100}),
    "version": ("GET", "api/2.0/mlflow/model-versions/get", {"name": "support", "version": "1"}),
    "versions": ("GET", "api/2.0/mlflow/model-versions/search", {"filter": "name = 'support'"}),
    "champion": ("GET", "api/2.0/mlflow/registered-models/alias", {"name": "support", "alias": "champion"}),
    "source of a version": (
        "GET", "api/2.0/mlflow/model-versions/get-download-uri", {"name": "support", "version": "1"},
    ),
    "file of a version": (
        "GET", "model-versions/get-artifact", {"name": "support", "version": "1", "path": "manifest.json"},
    ),
    "traces": ("GET", "api/2.0/mlflow/traces", {"experiment_ids": ["{experiment}"]}),
    "traces, newer": (
        "POST", "api/3.0/mlflow/traces/search",
        {"locations": [{"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": "{experiment}"}}]},
    ),
    "graphql": (
        "POST", "graphql",
        {"query": 'query {{ mlflowGetExperiment(input: {{experimentId: "{experiment}"}}) {{ experiment {{name}} }} }}'},
    ),
    "users": ("GET", "api/2.0/mlflow/users/list", {}),
    "user": ("GET", "api/2.0/mlflow/users/get", {"username": "vera"}),
    "roles": ("GET", "api/3.0/mlflow/roles/list", {"workspace": "acme"}),
    "all roles": ("GET", "api/3.0/mlflow/roles/list", {}),
    "role of a user": ("GET", "api/3.0/mlflow/users/roles/list", {"username": "vera"}),
    "tenants": ("GET", "api/3.0/mlflow/workspaces", {}),
    "tenant": ("GET", "api/3.0/mlflow/workspaces/acme", {}),
}  # fmt: skip


INVALID = {"artifact by path, encoded", "tenants in the artifacts", "artifacts above"}
"""Requests that are not valid even for an administrator."""


def fill(value: Any, ids: Ids) -> Any:
    if isinstance(value, str):
        return value.format(**vars(ids))
    if isinstance(value, dict):
        return {key: fill(item, ids) for key, item in value.items()}
    return [fill(item, ids) for item in value] if isinstance(value, list) else value


def test_a_tenant_reads_nothing_of_another(acme: Company, zenith: Company, ids: Ids) -> None:
    """Whichever tenant the request names. An administrator gets an answer to each request, so it is a valid one."""
    names = [name for name in (*NAMES, ids.run, ids.model) if name != "tom"]
    with httpx2.Client(base_url=acme.server) as client:
        for what, (method, path, arguments) in REQUESTS.items():
            content = {"params" if method == "GET" else "json": fill(arguments, ids)}
            ask = partial(client.request, method, "/" + path.format(**vars(ids)), **content)
            valid = ask(auth=(ADMIN, PASSWORD), headers={"X-MLFLOW-WORKSPACE": "acme"})
            assert (valid.status_code == 200) == (what not in INVALID), f"{what}: {valid.text}"
            for workspace in ("", "zenith", "acme"):
                answer = ask(auth=(STRANGER, PASSWORD), headers={"X-MLFLOW-WORKSPACE": workspace})
                assert answer.status_code in (200, 403, 404), f"{what}, {workspace}: {answer.text}"
                if answer.status_code == 200:
                    assert [name for name in names if name in answer.text] == [], f"{what}, {workspace}"
                elif answer.status_code == 403:
                    assert answer.text == "Permission denied"


def test_names_of_a_tenant_are_in_no_output_of_another(
    acme: Company, zenith: Company, capfd: pytest.CaptureFixture[str], calm: None
) -> None:
    assert zenith.promote(STRANGER, "z") == 1
    project = zenith.project(STRANGER)
    place = ["--project", str(project.root)]
    capfd.readouterr()
    with user(zenith.server, STRANGER, "zenith"):
        for arguments in (
            ["team"],
            ["promotions"],
            ["queue"],
            ["status"],
            ["team", "--grant", "x", "--role", "viewer"],
        ):
            main([*place, *arguments])
    with user(zenith.server, STRANGER, "acme"):  # the other tenant, with the own name of the model
        for command in ("team", "promotions", "promote"):
            assert main([*place, command]) == 2
    printed = capfd.readouterr()
    text = (printed.out + printed.err).replace("workspace acme", "").replace("tenant acme", "")  # what the user wrote
    assert "billing" in text
    assert [name for name in NAMES if name in text] == []


# --- quotas -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small_tenant(server: str, tmp_path_factory: pytest.TempPathFactory) -> Company:
    """Return a tenant with one training."""
    small = Company(server, tmp_path_factory.mktemp("small"), "small", "support")
    small.team(ADMIN, grant="pia", role="promoter")
    with user(server, "pia", "small"):
        open_tracker(small, "pia").find_or_create(RUN_ID, 1000)
    return small


@pytest.fixture
def small(small_tenant: Company) -> Company:
    """Return the tenant with a quota of one training, which exists, and of 1 kB."""
    small_tenant.team(ADMIN, quota_runs="1", quota_disk="1kB")
    return small_tenant


def test_a_new_run_above_the_quota_is_refused_and_one_that_exists_is_not(
    small: Company, tmp_path: Path, prepared: Path, capfd: pytest.CaptureFixture[str], calm: None
) -> None:
    layout = tiny_project.prepared(tmp_path / "project", name_model(tiny_project.SETTINGS, "support"))
    small.team(ADMIN, quota_disk="none")
    capfd.readouterr()
    with user(small.server, "pia", "small"):
        for command, needed in (("train", "one more"), ("submit", "one more"), ("sweep", "20 more")):
            assert main(["--project", str(layout.root), command]) == 2
            message = f"{command}: quota: tenant small has 1 of 1 trainings on {small.server}, and this needs {needed}."
            assert message in capfd.readouterr().err
        assert not list(layout.runs.glob("*/journal.jsonl"))
        require_run_quota(small.project("pia"), RUN_ID)
        with pytest.raises(QuotaError, match="this needs 20 more"):
            require_run_quota(small.project("pia"), new_runs=20)


@pytest.mark.long
def test_a_model_above_the_quota_is_not_uploaded(small: Company) -> None:
    from mlflow import MlflowClient

    with pytest.raises(QuotaError, match=r"uses 0 bytes of 1000 bytes .* and this model needs") as refused:
        small.promote("pia", "a" * 2000)
    assert refused.value.exit_code == 2
    layout = small.project("pia").layout
    assert not layout.promotion_intent.exists()
    with user(small.server, "pia", "small"):
        assert small.registry("pia").versions() == []
    report = small.team(ADMIN, quota_disk="none")
    assert (report.quota_bytes, report.quota_runs) == (None, 1)
    assert small.promote("pia", "a" * 2000) == 1
    model = layout.promoted_model(next(layout.models.iterdir()).name)
    stored = sum(path.stat().st_size for path in model.rglob("*") if path.is_file() and path.name != "manifest.json")
    assert small.team(ADMIN).model_bytes == stored
    with user(small.server, "pia", "small"):
        client = MlflowClient(small.server)
        ledger = client.get_experiment_by_name(f"{small.model_name}.promotions")
        [uploaded] = client.search_logged_models([ledger.experiment_id])
        for text, counted in (("many", 0), ("9" * 5000, 0), (str(stored), stored)):
            client.set_logged_model_tags(uploaded.model_id, {"ratchet.bytes": text})
            assert small.team("pia").model_bytes == counted, "a changed tag stops nobody's work"


def test_the_replica_counts(small: Company, tmp_path: Path) -> None:
    replica = tmp_path / "replica" / "runs" / "0123456789ab"
    replica.mkdir(parents=True)
    (replica / "spec.json").write_bytes(b"x" * 3000)
    project = small.project("pia")
    machine = project.settings.machine.model_copy(update={"replica": str(tmp_path / "replica")})
    project = Project.from_parts(project.layout, project.settings.model_copy(update={"machine": machine}))
    small.team(ADMIN, quota_runs="none", quota_disk="2kB")
    with user(small.server, "pia", "small"):
        with pytest.raises(QuotaError, match=r"2.9 KiB in machine.replica\)"):
            require_run_quota(project)
        require_run_quota(project, "0123456789ab")  # another machine has begun it


def test_a_server_that_does_not_answer_stops_no_training(small: Company, capfd: pytest.CaptureFixture[str]) -> None:
    with user(f"http://127.0.0.1:{free_port()}", "pia", "small"):
        require_run_quota(small.project("pia"), "0" * 12)
    assert "the quota was not checked" in capfd.readouterr().err
