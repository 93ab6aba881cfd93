"""Proves that a training writes no secret of the environment to any output, and that log files that cannot be written
do not stop a training."""

import base64
import json
import subprocess
from pathlib import Path
from typing import Any

import tiny_project
from ratchet.redaction import HIDDEN
from ratchet.runs.directory import RunPaths, find_newest_run
from ratchet.runs.journal import JournalReader
from ratchet.storage.layout import ProjectLayout

PACKAGES = ("runs", "redaction")
# None of these secrets is real. Some have the format of their provider, and some have no special format.
PLANTED = {
    "HF_TOKEN": "hf_" + "PlantedPlantedPlantedPlanted012345",
    "AWS_ACCESS_KEY_ID": "AKIA" + "PLANTEDPLANTED01",
    "AWS_SECRET_ACCESS_KEY": "/planted/wJalrXUtnFEMI+K7MDENG0bPxRfiCY",
    "MLFLOW_TRACKING_PASSWORD": 'planted pass"wörd/1',
    "RATCHET_WEBHOOK_URL": "https://hooks.planted.example/services/T0PLANTED/B0PLANTED/x1y2z3planted",
    "PGPASSWORD": "planted-pg-4711",
    "OPENAI_API_KEY": "sk-" + "proj-planted0123456789abcdef",
    "DATABASE_URL": "postgresql://ratchet:planted%40db-99@db.example/studies",
    "TLS_PRIVATE_KEY": "-----BEGIN PRIVATE KEY-----\nUGxhbnRlZFBsYW50ZWRQbGFudGVkUGxhbnQ==\n-----END PRIVATE KEY-----",
}
NEEDLES = [
    *(value for name, value in PLANTED.items() if name != "DATABASE_URL"),
    "planted%40db-99", "planted@db-99", "UGxhbnRlZFBsYW50", "planted%20pass", "pass\\\\\"w", "x1y2z3planted",
    base64.b64encode(PLANTED["MLFLOW_TRACKING_PASSWORD"].encode()).decode().rstrip("="),
    "sTgJ0kPlantedJwt", "planted-query-1", "planted-bearer-22",
]  # fmt: skip
# A script that simulates a verbose library: in the worker, it logs all secrets in many ways and fails the first attempt
# with them.
LOOSE_TONGUE = """
import os, sys
names = {names!r}
line = " ".join(f"{{name}}={{os.environ.get(name)}}" for name in names)

def talk(where):
    import base64, json, logging, threading, urllib.parse, warnings
    print("printed", where, line)
    print("in two", end=" ")
    print("parts:", os.environ["HF_TOKEN"][:9], sep=" ", end="")
    print(os.environ["HF_TOKEN"][9:])
    sys.stderr.write("on stderr " + repr(dict(os.environ)) + chr(10))
    sys.stdout.buffer.write(("bytes " + line + chr(10)).encode())
    for name in ("library", "transformers.modeling_utils", "torch.distributed", "huggingface_hub"):
        logging.getLogger(name).warning("logged %s", line)
    logging.getLogger("library").warning("%d", "of a wrong kind: " + line)
    warnings.warn("warned of " + line)
    print(json.dumps(dict(os.environ)), urllib.parse.quote(os.environ["MLFLOW_TRACKING_PASSWORD"], safe=""))
    print("Authorization: Bearer planted-bearer-22", base64.b64encode(os.environ["MLFLOW_TRACKING_PASSWORD"].encode()))
    print("https://x.example/?X-Amz-Signature=planted-query-1")
    print("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJwbGFudGVkIn0.sTgJ0kPlantedJwt")
    def fail(): raise ValueError("in a thread " + line)
    thread = threading.Thread(target=fail); thread.start(); thread.join()

if "ratchet.training.fork_server_main" in sys.orig_argv:
    import importlib.abc, importlib.util
    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(self, name, path, target=None):
            if name != "ratchet.training.trainer":
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            execute = spec.loader.exec_module
            def exec_module(module):
                execute(module)
                talk("while loading")
                run = module.TrainingLoop.run
                def failing(loop):
                    talk("before the first step")
                    if loop.context.journal.attempt == 1:
                        try:
                            raise KeyError("the cause " + line)
                        except KeyError as error:
                            raise RuntimeError(line) from error
                    loop.context.journal.append("notice", text="noticed " + line)
                    loop.context.journal.append("alert", text="alerted " + line)
                    return run(loop)
                module.TrainingLoop.run = failing
            spec.loader.exec_module = exec_module
            return spec
    sys.meta_path.insert(0, Finder())
"""
TALKER = """
import os, sys, threading, time

def talk():
    while True:
        print("still there", flush=True)
        time.sleep(0.01)

if "ratchet.training.fork_server_main" in sys.orig_argv:
    os.register_at_fork(after_in_child=lambda: threading.Thread(target=talk, daemon=True).start())
"""


def train(
    layout: ProjectLayout, folder: Path, more: dict[str, str] | None = None, script: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `ratchet train`. Each of its processes executes the script at its start."""
    folder.mkdir(exist_ok=True)
    (folder / "sitecustomize.py").write_text(script)
    environment = tiny_project.environment() | {"PYTHONPATH": str(folder)} | (more or {})
    return subprocess.run(
        tiny_project.command("train"), cwd=layout.root, env=environment, capture_output=True, text=True, check=False
    )


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def run_of(layout: ProjectLayout) -> RunPaths:
    found = find_newest_run(layout.runs)
    assert found is not None
    return found


def test_no_secret_of_the_environment_is_in_anything_that_a_training_leaves(tmp_path: Path) -> None:
    layout = tiny_project.prepared(tmp_path / "project")
    done = train(layout, tmp_path / "library", PLANTED, LOOSE_TONGUE.format(names=sorted(PLANTED)))
    assert done.returncode == 0, done.stderr
    run = run_of(layout)
    said = {"stdout": done.stdout.encode(), "stderr": done.stderr.encode()}
    said |= {str(path): path.read_bytes() for path in layout.root.rglob("*") if path.is_file()}
    assert [(name, needle) for name, whole in said.items() for needle in NEEDLES if needle.encode() in whole] == []

    # The messages and their other contents are in the outputs: journal, both logs, worker.log, terminal and MLflow.
    for name in ("journal.jsonl", "logs/supervisor.jsonl", "logs/worker.jsonl", "worker.log"):
        assert f"AWS_SECRET_ACCESS_KEY={HIDDEN}" in (run.root / name).read_text(encoding="utf-8"), name
    assert HIDDEN in done.stderr
    assert HIDDEN in done.stdout
    texts = {(one["level"], one["source"], one["attempt"]) for one in records(run.logs / "worker.jsonl")}
    assert texts >= {
        ("info", "stdout", 1), ("warning", "stderr", 1), ("warning", "library", 1), ("warning", "warnings", 1),
        ("error", "python", 1), ("error", "ratchet.training.exit_codes", 1), ("info", "stdout", 2),
    }  # fmt: skip
    failure = next(one for one in records(run.logs / "worker.jsonl") if one["source"] == "ratchet.training.exit_codes")
    assert failure["reason"] == "bug"
    assert "KeyError" in failure["traceback"]
    assert "The above exception was the direct cause" in failure["traceback"]


def test_the_supervisor_logs_each_event_once_and_a_finished_run_none_again(tmp_path: Path) -> None:
    settings = tiny_project.SETTINGS.model_copy(
        update={
            "machine": tiny_project.MACHINE.model_copy(update={"log_level": "debug", "system_metrics_interval_s": 0.3})
        }
    )
    layout = tiny_project.prepared(tmp_path / "project", settings)
    fault = json.dumps([{"kind": "die", "step": 5, "mark": str(tmp_path / "died")}])
    for _ in range(2):
        done = train(layout, tmp_path / "nothing", {"RATCHET_FAULTS": fault})
        assert done.returncode == 0, done.stderr
    run = run_of(layout)
    logged = [one for one in records(run.logs / "supervisor.jsonl") if one["source"] == "journal"]
    events = [
        event
        for event in JournalReader(run.journal).read()
        if event.kind not in ("step", "system_metrics", "rank_timings")
    ]
    assert [(one["event"], one["attempt"]) for one in logged] == [(event.kind, event.attempt) for event in events]
    assert [one["reason"] for one in logged if one["event"] == "worker_exited"] == ["killed"]
    assert {one["level"] for one in logged if one["event"] == "checkpoint_saved"} == {"debug"}

    samples = [event.data for event in JournalReader(run.journal).read() if event.kind == "system_metrics"]
    assert [sample["sample"] for sample in samples] == list(range(1, len(samples) + 1))
    assert len(samples) > 3
    assert any(sample["worker_memory_bytes"] for sample in samples)
    assert all(0 <= sample["cpu_percent"] <= 100 for sample in samples)


def test_a_training_whose_logs_cannot_be_written_is_the_same_training(tmp_path: Path) -> None:
    settings = tiny_project.SETTINGS.model_copy(
        update={"machine": tiny_project.MACHINE.model_copy(update={"max_restarts": 0})}
    )
    bounded = settings.machine.model_copy(update={"log_max_bytes": 4096, "log_files": 2})
    plain = tiny_project.prepared(tmp_path / "plain", settings.model_copy(update={"machine": bounded}))
    assert train(plain, tmp_path / "library", script=TALKER).returncode == 0
    root = run_of(plain).root
    sizes = {path.name: path.stat().st_size for folder in ("logs/*", "worker.log*") for path in root.glob(folder)}
    assert sizes.keys() - {"worker.log.1"} == {"supervisor.jsonl", "worker.1.jsonl", "worker.jsonl", "worker.log"}
    assert max(size for name, size in sizes.items() if name.endswith(".jsonl")) <= 4096
    assert max(sizes.values()) <= 2 * 4096
    other = tiny_project.prepared(tmp_path / "other", settings)
    run_root = other.runs / run_of(plain).root.name
    (run_root / "logs").mkdir(parents=True)
    for name in ("supervisor.jsonl", "worker.jsonl"):
        (run_root / "logs" / name).symlink_to("/dev/full")
    done = train(other, tmp_path / "library", script=TALKER)
    assert done.returncode == 0, done.stderr
    assert tiny_project.outcome(other) == tiny_project.outcome(plain)
    lines = [line for line in done.stderr.splitlines() if "cannot be written" in line]
    assert len(lines) == 1, done.stderr
    assert "No space left on device" in lines[0]
    output = (run_root / "worker.log").read_text(encoding="utf-8")
    assert output.count("worker.jsonl cannot be written (No space left on device)") == 1
    assert "still there" in output
