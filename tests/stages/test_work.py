"""`ratchet submit`, `ratchet work` and `ratchet queue`. Real trainings are in tests/proofs/test_queued_runs.py."""

import errno
import os
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

import group_cases
import ratchet
import tiny_project
from ratchet.cli.main import main
from ratchet.config import params_file
from ratchet.errors import InputError, RunFailedError, SettingsError, StorageError
from ratchet.runs.job_queue import Job, JobQueue
from ratchet.stages import work as stage
from ratchet.stages.submit import open_queue, read_queue, submit
from ratchet.stages.work import make_workspace, work
from ratchet.storage.layout import ProjectLayout

pytestmark = pytest.mark.usefixtures("calm")


def git(root: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
    return subprocess.run(
        ["git", *identity, *arguments], cwd=root, check=True, capture_output=True, text=True
    ).stdout.strip()


def ignore(text: str) -> None:
    """Print no progress."""


def jobs(project: ratchet.Project) -> list[Job]:
    return list(read_queue(project).jobs)


def test_a_job_has_all_settings_of_the_moment(
    project: ProjectLayout, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RATCHET__TRAIN__ALPHA", "5")
    monkeypatch.setenv("RATCHET__MACHINE__THREADS", "3")
    arguments = ["--set", "train.rank=3", "--set", "base.source=models/other", "--priority", "2", "--until", "gate"]
    assert main(["--project", str(project.root), "-q", "submit", *arguments]) == 0
    assert capsys.readouterr().out == (
        "job 1 in queue model: until gate, base.source: models/other, train.rank: 3, train.alpha: 5; 1 job waiting "
        "(`ratchet work` runs them)\n"
    ).replace("queue model", f"queue {ratchet.Project(project.root).settings.promote.model_name}")
    monkeypatch.delenv("RATCHET__TRAIN__ALPHA")
    [job] = jobs(ratchet.Project(project.root))
    train = params_file.parse(job.params).train
    assert (train.rank, train.alpha, job.priority) == (3, 5, 2)

    assert main(["--project", str(project.root), "-q", "queue"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("experiments/queue/jobs.db: 1 waiting")
    columns = "job state priority attempts until run worker lease until settings"
    assert lines[1].split() == columns.split()
    assert lines[2].split()[:6] == ["1", "waiting", "2", "0", "of", "5"]
    assert main(["--project", str(project.root), "-q", "queue", "--cancel", "1"]) == 0
    assert main(["--project", str(project.root), "-q", "queue", "--cancel", "1"]) == 2
    assert "is cancelled; expected a job that is waiting or running" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["submit", "--set", "train.rnk=8"], "override train.rnk: unknown setting; did you mean rank?"),
        (["submit", "--set", "machine.threads=1"], "--set machine.threads: section machine is that of the worker"),
        (["submit", "--set", "train.init_adapter=champion"], "set the RunId of the promoted model"),
        (["submit", "--attempts", "0"], "--attempts 0: expected 1 to 1000000"),
        (["submit", "--priority", "9" * 20], "expected -1000000 to 1000000"),
        (["queue", "--retry", "9" * 20], "does not exist"),
        (["work", "--exit-when-idle=-5"], "--exit-when-idle -5: expected seconds >= 0"),
        (["work", "--exit-when-idle=nan"], "--exit-when-idle nan: expected seconds >= 0"),
        (["submit", "--revision", "nowhere"], "--revision nowhere: git has no such commit"),
        (["submit", "--until", "prepare"], "found 'prepare'; expected one of: train, export, evaluate, gate"),
        (["work", "--on-idle", "true"], "--on-idle: found without --exit-when-idle; give both"),
        (["work", "--exit-when-idle", "--on-idle", "no-such-program -h"], "--on-idle no-such-program -h: no program"),
        (["queue", "--retry", "7"], "job 7 of queue"),
        (["queue", "--export-metrics"], "--export-metrics: set machine.metrics_port or machine.metrics_file"),
    ],
)  # fmt: skip
def test_bad_input_is_one_message(
    arguments: list[str], message: str, project: ProjectLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(["--project", str(project.root), "-q", *arguments])
    except SystemExit as exit:
        code = int(exit.code or 0)
    assert code == 2
    assert message in capsys.readouterr().err


def test_a_workspace_of_a_commit_has_its_files_and_the_data_that_dvc_tracks(tmp_path: Path) -> None:
    layout = tiny_project.write(tmp_path / "project")
    root = layout.root
    git(root, "init", "-q")
    subprocess.run([sys.executable, "-m", "dvc", "init", "-q"], cwd=root, check=True)
    (root / ".gitignore").write_text("/models\n", encoding="utf-8")
    (root / "models").mkdir()
    subprocess.run([sys.executable, "-m", "dvc", "add", "-q", "data/raw/rows.csv"], cwd=root, check=True)
    git(root, "add", "-A")
    git(root, "commit", "-q", "-m", "first")
    old = (layout.raw / "rows.csv").read_bytes()
    (layout.raw / "rows.csv").unlink()
    (layout.raw / "rows.csv").write_bytes(old.splitlines(keepends=True)[0])
    subprocess.run([sys.executable, "-m", "dvc", "add", "-q", "data/raw/rows.csv"], cwd=root, check=True)
    train = tiny_project.TRAIN.model_copy(update={"rank": 32})
    tiny_project.save(layout, tiny_project.SETTINGS.model_copy(update={"train": train}))
    git(root, "commit", "-q", "-a", "-m", "second")

    project = ratchet.Project(root)
    submitted = submit(project, {"train.alpha": 7}, revision="HEAD~1")
    job = submitted.job
    assert job.revision == git(root, "rev-parse", "HEAD~1")
    settings = params_file.parse(job.params)
    assert (settings.train.rank, settings.train.alpha) == (tiny_project.TRAIN.rank, 7)
    target = make_workspace(layout, layout.queue / "job-1.1", settings, job.revision)
    assert (target.raw / "rows.csv").read_bytes() == old
    assert (target.root / "models").resolve() == root / "models"
    assert (target.runs, target.mlruns, target.is_temporary) == (layout.runs, layout.mlruns, True)
    assert not (target.root / ".git").exists()
    with pytest.raises(InputError, match="is not in this clone, and no remote has it; push it to a branch"):
        make_workspace(layout, layout.queue / "job-2.1", settings, "0" * 40)

    for number, (link, is_inside) in enumerate({"params.yaml": True, "/etc": False, "data/../../other": False}.items()):
        (root / "link").unlink(missing_ok=True)
        (root / "link").symlink_to(link)
        git(root, "add", "link")
        git(root, "commit", "-q", "-m", link)
        make = partial(
            make_workspace, layout, layout.queue / f"job-3.{number}", settings, git(root, "rev-parse", "HEAD")
        )
        if is_inside:
            assert (make().root / "link").readlink() == Path(link)
        else:
            with pytest.raises(InputError, match=f"link is a link to {link}, outside of the project"):
                make()


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch, project: ProjectLayout) -> Callable[[str], None]:
    """Replace the stages of jobs by a program."""
    monkeypatch.setattr(stage, "build_run_spec", lambda layout, settings: type("Spec", (), {"run_id": "run"}))

    def replace(program: str) -> None:
        script = project.root / "program.py"
        script.write_text(program, encoding="utf-8")
        monkeypatch.setattr(stage, "STAGE_COMMAND", [sys.executable, str(script)])

    return replace


def test_exit_codes_decide_about_the_job(project: ProjectLayout, stages: Callable[[str], None]) -> None:
    opened = ratchet.Project(project.root, {"machine.restart_delay_s": 0})
    print_error = "import json, sys; print(json.dumps({'error': {'type': 'X', 'message': 'why', 'exit_code': 0}}));"
    for code, until, expected in ((3, "gate", "done"), (2, "train", "failed"), (1, "train", "failed")):
        stages(f"{print_error} sys.exit({code} if sys.argv[3] == {until!r} else 0)")
        job = submit(opened, until=until, max_attempts=3).job
        work(opened, ignore, exit_when_idle_s=0.0)
        found = next(entry for entry in jobs(opened) if entry.id == job.id)
        assert (found.state, found.attempts) == (expected, {3: 1, 2: 2, 1: 3}[code])
        assert found.note.startswith(f"{until}: why")
    stages('print(\'{"decision": "HOLD"}\')')
    job = submit(opened, until="gate").job
    work(opened, ignore, exit_when_idle_s=0.0)
    found = next(entry for entry in jobs(opened) if entry.id == job.id)
    assert (found.state, found.note) == ("done", "gate: HOLD")


def test_a_machine_with_other_data_does_not_train_another_run_for_the_job(
    project: ProjectLayout, stages: Callable[[str], None]
) -> None:
    stages("import pathlib, sys; pathlib.Path('ran').open('a').write(sys.argv[3] + ' ')")
    opened = ratchet.Project(project.root)
    queue = open_queue(opened)
    job = submit(opened, max_attempts=1).job
    claimed = queue.claim("elsewhere/1", 60.0)
    assert claimed is not None
    assert queue.set_run(claimed, "0123456789ab")
    assert queue.release(claimed, "stopped", is_counted=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.root)
        assert work(opened, ignore, exit_when_idle_s=0.0).failed == (job.id,)
    [found] = jobs(opened)
    assert found.state == "failed"
    assert "differ from those of the last attempt: they make run run, that one made 0123456789ab" in found.note
    assert (project.root / "ran").read_text(encoding="utf-8").split() == ["base", "prepare"]


def test_a_database_that_does_not_answer_for_a_moment_is_no_failure_of_the_job(
    project: ProjectLayout, stages: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stages("")
    original, outages = JobQueue.set_run, [StorageError("no answer"), StorageError("no answer")]

    def set_run(self: JobQueue, job: Job, run_id: str) -> bool:
        if outages:
            raise outages.pop()
        return original(self, job, run_id)

    monkeypatch.setattr(JobQueue, "set_run", set_run)
    opened, lines = ratchet.Project(project.root), list[str]()
    submit(opened)
    assert work(opened, lines.append, exit_when_idle_s=0.0).done == (1,)
    assert not outages and jobs(opened)[0].run_id == "run"
    assert any("no answer (trying again for" in line for line in lines)


def test_a_worker_on_which_three_jobs_fail_ends(project: ProjectLayout, stages: Callable[[str], None]) -> None:
    stages("raise SystemExit(1)")
    opened = ratchet.Project(project.root)
    for _ in range(4):
        submit(opened)
    with pytest.raises(RunFailedError, match="3 jobs in a row failed here, the last with: base: exit code 1"):
        work(opened, ignore, exit_when_idle_s=0.0)
    assert read_queue(opened).counts["waiting"] == 4  # for another machine, after a delay


def test_a_job_whose_workspace_cannot_be_written_waits_for_another_attempt(
    project: ProjectLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def raise_full_disk(*_: object) -> ProjectLayout:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(stage, "make_workspace", raise_full_disk)
    opened = ratchet.Project(project.root, {"machine.restart_delay_s": 0})
    job = submit(opened, max_attempts=2).job
    later = project.queue / f"job-{job.id}.9"  # of another worker on this machine
    later.mkdir(parents=True)
    assert work(opened, ignore, exit_when_idle_s=0.0).failed
    [found] = jobs(opened)
    assert "No space left on device" in found.note
    assert later.is_dir()


def test_a_cancelled_job_is_stopped(project: ProjectLayout, stages: Callable[[str], None]) -> None:
    started = project.root / "started"
    stages(f"import pathlib, time; pathlib.Path({str(started)!r}).touch(); time.sleep(600)")
    opened = ratchet.Project(project.root, {"machine.lease_timeout_s": 2.0})
    number = submit(opened).job.id
    lines = []

    def watch(text: str) -> None:
        lines.append(text)

    def cancel_when_started() -> None:
        group_cases.until(started.exists, "the stage has started")
        open_queue(opened).cancel(number)

    canceller = threading.Thread(target=cancel_when_started)
    canceller.start()
    work(opened, watch, exit_when_idle_s=0.0)
    canceller.join()
    assert any("was cancelled; nothing more is stored about it" in line for line in lines)
    assert jobs(opened)[0].state == "cancelled"


def test_a_failing_hook_is_reported(project: ProjectLayout) -> None:
    with pytest.raises(RunFailedError, match="--on-idle false: the command failed"):
        work(ratchet.Project(project.root), ignore, exit_when_idle_s=0.0, on_idle="false")
    with pytest.raises(SettingsError, match="No closing quotation"):
        work(ratchet.Project(project.root), ignore, exit_when_idle_s=0.0, on_idle="'")


def test_prometheus_scrapes_the_length_of_the_queue(
    project: ProjectLayout, started: list["subprocess.Popen[str]"]
) -> None:
    opened = ratchet.Project(project.root)
    submit(opened)
    submit(opened)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free_port = probe.getsockname()[1]
    variables = {"RATCHET__MACHINE__METRICS_PORT": str(free_port)}
    process = subprocess.Popen(
        tiny_project.command("queue", "--export-metrics"), cwd=project.root, text=True, stdout=subprocess.PIPE,
        env=tiny_project.environment() | variables,
    )  # fmt: skip
    started.append(process)
    assert process.stdout is not None
    assert "exporting the jobs of queue" in process.stdout.readline()
    with urllib.request.urlopen(f"http://127.0.0.1:{free_port}/metrics") as answer:
        text = answer.read().decode()
    name = opened.settings.promote.model_name
    assert f'ratchet_queue_jobs{{queue="{name}",state="waiting"}} 2.0' in text
    assert f'ratchet_queue_jobs{{queue="{name}",state="running"}} 0.0' in text
