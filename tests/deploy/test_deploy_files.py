"""The files of deploy/ can be parsed by their tools, and all settings, commands and variables in them exist."""

import configparser
import os
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import mlflow.environment_variables
import pytest
import yaml
from sqlalchemy import make_url
from yamllint import linter
from yamllint.config import YamlLintConfig

from ratchet import errors
from ratchet.cli.main import COMMANDS, build_parser
from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.runs.job_queue import JobQueue, JobRequest
from ratchet.storage.layout import ProjectLayout

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
SKY: dict[str, Any] = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text(encoding="utf-8"))
KUBERNETES = {
    document["kind"]: document
    for document in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text(encoding="utf-8"))
}
SLURM = (DEPLOY / "slurm.sh").read_text(encoding="utf-8")
TEXTS = {path.name: path.read_text(encoding="utf-8") for path in sorted(DEPLOY.rglob("*")) if path.is_file()}
MONITORING = DEPLOY / "monitoring"
GRACE_S = Settings().machine.grace_period_s


def instructions() -> list[tuple[str, str]]:
    """Return instruction and arguments of each line of the Dockerfile, without comments, with continued lines
    joined."""
    lines = "\n".join(line for line in TEXTS["Dockerfile"].splitlines() if not line.startswith("#"))
    found = [line.split(maxsplit=1) for line in lines.replace("\\\n", " ").splitlines() if line.strip()]
    return [(word, rest) for word, rest in found]


def is_setting(path: str) -> bool:
    """Return whether a name such as `machine.replica` is a setting."""
    section, _, name = path.partition(".")
    there = getattr(Settings(), section, None)
    return there is not None and name in type(there).model_fields


@pytest.mark.parametrize("name", TEXTS)
def test_settings_commands_and_variables_in_the_files_exist(name: str) -> None:
    text = TEXTS[name]
    assert [path for path in re.findall(r"\bmachine\.[a-z_]+", text) if not is_setting(path)] == []
    verbs = set(re.findall(r"(?:exec |`|^  )ratchet ([a-z]+)\b", text, re.MULTILINE))
    assert verbs <= set(COMMANDS), verbs
    source = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src").rglob("*.py"))
    assert [word for word in re.findall(r"RATCHET_[A-Z]+", text) if word not in source] == []


def test_the_image_copies_existing_files_and_runs_without_root() -> None:
    found = instructions()
    copied = [source for word, rest in found if word == "COPY" for source in rest.split()[:-1]]
    assert copied
    assert [source for source in copied if not (ROOT / source).exists()] == []
    users = [rest for word, rest in found if word == "USER"]
    assert users and users[-1] not in ("root", "0")
    after = found[[word for word, _ in found].index("USER") :]
    assert not any("apt-get" in rest or "pip install" in rest for _, rest in after), "needs root"
    entry = dict(found)["ENTRYPOINT"]
    assert yaml.safe_load(entry) == ["tini", "--", "ratchet"]


def test_the_image_has_the_torch_and_the_extras_of_the_project() -> None:
    pinned = re.search(r"^TORCH \?= (\S+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert pinned is not None
    defaults = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG")
    assert defaults["TORCH"] == pinned[1]
    assert f"torch{defaults['TORCH'][5:]}" in TEXTS["skypilot.yaml"]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert all(f"\n{extra} = [" in project for extra in defaults["EXTRAS"].split(","))


def test_composed_services_wait_for_existing_services_with_health_checks() -> None:
    services = COMPOSE["services"]
    for name, service in services.items():
        for other, wanted in service.get("depends_on", {}).items():
            assert wanted["condition"] == "service_healthy"
            assert "healthcheck" in services[other], f"{name} waits for {other}, which never says that it is ready"
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert source.startswith("$") or source in COMPOSE["volumes"], volume
        assert {use["source"] for use in service.get("configs", [])} <= set(COMPOSE["configs"])
        if "image" in service and not service["image"].startswith("ratchet"):
            assert not service["image"].endswith(":latest") and ":" in service["image"], service["image"]
        for port in service.get("ports", []):
            assert port.startswith("127.0.0.1:"), f"{name} would be open to everybody"
    for content in COMPOSE["configs"].values():
        assert set(content) in ({"file"}, {"content"})
        assert "content" in content or (DEPLOY / content["file"]).is_file()
    assert yaml.safe_load(COMPOSE["configs"]["grafana"]["content"])["datasources"]


def test_composed_addresses_are_services_and_valid_settings() -> None:
    told = re.findall(r"(machine\.\w+): (\S+?)(?: ·|$)", TEXTS["compose.yaml"], re.MULTILINE)
    written = {path.removeprefix("machine."): value for path, value in told}
    assert set(written) == {"tracking_uri", "replica", "study_storage", "metrics_port", "metrics_host"}
    machine = params_file.parse(yaml.safe_dump({"machine": written})).machine
    addresses = [value for name, value in written.items() if not name.startswith("metrics")]
    hosts = {re.sub(r".*@|.*//", "", value).split(":")[0].split("/")[0] for value in addresses} - {"replica"}
    assert hosts <= set(COMPOSE["services"])
    scraped = yaml.safe_load((MONITORING / "prometheus.yml").read_text(encoding="utf-8"))["scrape_configs"]
    targets = {target for job in scraped for each in job["static_configs"] for target in each["targets"]}
    assert {target.split(":")[0] for target in targets} <= set(COMPOSE["services"])
    assert f"trainer:{machine.metrics_port}" in targets
    served = {use["target"] for use in COMPOSE["services"]["prometheus"]["configs"]}
    assert served == {"/etc/prometheus/prometheus.yml", "/etc/prometheus/alerts.yml"}
    provider = yaml.safe_load(COMPOSE["configs"]["dashboards"]["content"])["providers"][0]["options"]["path"]
    assert any(use["target"].startswith(provider) for use in COMPOSE["services"]["grafana"]["configs"])


def test_the_server_with_users_changes_services_that_exist() -> None:
    changes = yaml.safe_load(TEXTS["teams.yaml"])
    assert set(changes["services"]) <= set(COMPOSE["services"])
    assert (DEPLOY / changes["configs"]["basic_auth"]["file"]).is_file()
    before, after = COMPOSE["services"]["mlflow"]["entrypoint"], changes["services"]["mlflow"]["entrypoint"]
    assert after == [*before, "--app-name=basic-auth", "--enable-workspaces"]
    assert COMPOSE["configs"]["databases"]["content"] in changes["configs"]["databases"]["content"]
    known = vars(mlflow.environment_variables)
    given = {name for service in changes["services"].values() for name in service["environment"]}
    assert [name for name in given if name not in known] == []
    auth = configparser.ConfigParser()
    auth.read_string(TEXTS["basic_auth.ini"])
    assert auth["mlflow"]["default_permission"] == "NO_PERMISSIONS"


def test_mlflow_reads_the_variables_that_it_is_given() -> None:
    code = "from mlflow.cli import server; print(*(option.envvar for option in server.params))"
    asked = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    known = set(asked.stdout.split())
    given = {name for name in COMPOSE["services"]["mlflow"]["environment"] if name.startswith("MLFLOW_")}
    assert given - known == {"MLFLOW_DISABLE_TELEMETRY"}


def test_passwords_are_required_and_none_is_in_the_files() -> None:
    asked = set(re.findall(r"\$\{(\w+_PASSWORD):\?", TEXTS["compose.yaml"]))
    assert set(re.findall(r"^(\w+)=$", TEXTS["env.example"], re.MULTILINE)) == asked
    for text in TEXTS.values():
        for name, value in re.findall(r"(\w*(?:PASSWORD|SECRET_ACCESS_KEY)\w*): *(\S+)", text):
            assert value.startswith(("$", '"$')) or value == "null", f"{name} is written down"


def test_all_grace_periods_exceed_the_shutdown_time() -> None:
    assert int(COMPOSE["services"]["trainer"]["stop_grace_period"].removesuffix("s")) > GRACE_S + 30
    pod = KUBERNETES["Job"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > GRACE_S + 30
    found = re.search(r"--signal=TERM@(\d+)", SLURM)
    assert found is not None and int(found[1]) > GRACE_S + 30


def test_the_job_distinguishes_exit_codes() -> None:
    rules = KUBERNETES["Job"]["spec"]["podFailurePolicy"]["rules"]
    by_code = {code: rule["action"] for rule in rules for code in rule.get("onExitCodes", {}).get("values", [])}
    assert by_code == {errors.EXIT_INTERRUPTED: "Ignore", errors.EXIT_INPUT: "FailJob"}
    assert any(c["type"] == "DisruptionTarget" for rule in rules for c in rule.get("onPodConditions", []))
    assert KUBERNETES["Job"]["spec"]["template"]["spec"]["restartPolicy"] == "Never", "the policy asks for it"
    assert errors.EXIT_INTERRUPTED in SKY["resources"]["job_recovery"]["recover_on_exit_codes"]


def test_the_job_uses_the_address_of_its_service_and_its_priority() -> None:
    spec = KUBERNETES["Job"]["spec"]
    name, pod = KUBERNETES["Job"]["metadata"]["name"], spec["template"]["spec"]
    assert pod["subdomain"] == KUBERNETES["Service"]["metadata"]["name"]
    assert KUBERNETES["Service"]["spec"]["selector"] == {"job-name": name}
    assert pod["priorityClassName"] == KUBERNETES["PriorityClass"]["metadata"]["name"]
    told = re.search(r"machine\.rendezvous: (\S+?)\.?\n", TEXTS["kubernetes.yaml"])
    assert told is not None and told[1].startswith(f"{name}-0.{pod['subdomain']}:")
    assert build_parser().parse_args(pod["containers"][0]["args"]).command == "train"


def test_requirements_of_a_node_are_valid_options() -> None:
    [asked] = re.findall(r"ratchet (doctor .*)", SKY["run"])
    options = build_parser().parse_args(asked.split())
    assert options.require


def executable(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def cluster(tmp_path: Path, project: ProjectLayout) -> dict[str, str]:
    """Create fake Slurm commands, with this machine as both nodes, and a `ratchet` that records where it is started."""
    commands = tmp_path / "bin"
    commands.mkdir()
    executable(
        commands, "scontrol", f'if [[ $1 == show ]]; then printf "n1\\nn2\\n"; else echo "$*" >> {tmp_path}/asked; fi'
    )
    executable(
        commands, "srun",
        'shift; for i in 0 1; do SLURM_PROCID=$i "$@" & pids+=($!); done; code=0; '
        'for pid in "${pids[@]}"; do wait "$pid" || code=$?; done; exit $code',
    )  # fmt: skip
    executable(commands, "ratchet", f'echo "$PWD $*" >> {tmp_path}/trained; exit "$ENDS"')
    for folder in ("data/raw", "experiments/base", "experiments/data"):
        (project.root / folder).mkdir(parents=True)
    (project.experiments / "champion.json").write_text("{}\n", encoding="utf-8")
    return {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(project.root),
        "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_ID": "123456", "SLURM_NNODES": "2",
    }  # fmt: skip


@pytest.mark.parametrize(("ends", "requeued"), [(0, ""), (75, "requeue 123456\n"), (2, "")])
def test_slurm_script_trains_on_all_nodes_and_requeues_after_an_interruption(
    ends: int, requeued: str, cluster: dict[str, str], project: ProjectLayout, tmp_path: Path
) -> None:
    for _ in range(2):  # in the second round, the copies exist
        (tmp_path / "asked").write_text("", encoding="utf-8")
        (tmp_path / "trained").write_text("", encoding="utf-8")
        command, environment = ["bash", DEPLOY / "slurm.sh"], cluster | {"ENDS": str(ends)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == ends, done.stderr
        assert (tmp_path / "asked").read_text(encoding="utf-8") == requeued
        copy = project.root / ".nodes" / "1"
        trained = (tmp_path / "trained").read_text(encoding="utf-8").splitlines()
        wanted = "train --nodes 2 --rendezvous n1:23456"
        assert sorted(trained) == sorted([f"{project.root} {wanted}", f"{copy} {wanted}"])
        understood = build_parser().parse_args(wanted.split())
        given = {"machine.nodes": understood.nodes, "machine.rendezvous": understood.rendezvous}
        machine = params_file.load(copy / "params.yaml", given).machine
        assert (machine.nodes, machine.rendezvous) == ("2", "n1:23456")
        assert (copy / "experiments" / "champion.json").is_file()


def test_the_scaled_job_counts_the_jobs_of_the_queue(project: ProjectLayout) -> None:
    config = YamlLintConfig(
        "{extends: default, rules: {line-length: {max: 120}, document-start: disable, braces: disable}}"
    )
    assert list(linter.run(TEXTS["keda.yaml"], config)) == []
    spec = yaml.safe_load(TEXTS["keda.yaml"])["spec"]
    [container] = spec["jobTargetRef"]["template"]["spec"]["containers"]
    options = build_parser().parse_args(container["args"])
    assert (options.command, options.exit_when_idle) == ("work", 60.0)
    variables = {entry["name"]: entry["value"] for entry in container["env"]}
    machine = params_file.parse("{}\n", environment=variables).machine
    assert machine.replica is not None
    [trigger] = spec["triggers"]
    address = make_url(str(machine.study_storage))
    written = trigger["metadata"]
    assert (address.host, address.database, address.username) == (
        written["host"],
        written["dbName"],
        written["userName"],
    )
    assert spec["jobTargetRef"]["template"]["spec"]["terminationGracePeriodSeconds"] > GRACE_S + 30

    queue = JobQueue(project, None, "support")
    for _ in range(3):
        queue.submit(JobRequest(params=""))
    finished = queue.claim("node/1", 60.0)
    assert finished is not None and queue.finish(finished, "done", "")
    assert queue.claim("node/1", 60.0)
    with closing(sqlite3.connect(project.job_queue)) as connection:
        assert connection.execute(written["query"]).fetchone() == (2,)
