"""Flags that all commands share, names that are nearly right, and the completion of a shell."""

import argparse
import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tiny_project
from ratchet.cli.main import COMMANDS, TEXT_COMMANDS, build_parser, main
from ratchet.errors import EXIT_INPUT
from ratchet.storage.layout import ProjectLayout

pytestmark = pytest.mark.usefixtures("calm")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["trian"], "found 'trian'; did you mean ratchet train?"),
        (["--project", ".", "statsu"], "did you mean ratchet status?"),
        (["xyz"], "found 'xyz'; `ratchet --help` lists all"),
        (["train", "--forec"], "unknown: --forec; did you mean --force?"),
        (["doctor", "--requires=cpus=1"], "unknown: --requires=cpus=1; did you mean --require?"),
        (["--projct", ".", "train"], "unknown: --projct; did you mean --project?"),
        (["--json", "status"], "unknown before the command: --json; write it after the command"),
        (["status", "abc", "def"], "unknown: def"),
        (["submit", "--priority", "x"], "argument --priority: found 'x'; expected a whole number"),
        (["forecast", "--device", "tpu"], "found 'tpu'; expected one of: cpu, cuda"),
        (["train", "-q", "-v"], "not allowed with argument"),
    ],
)
def test_what_is_not_known_gets_the_nearest_name_and_exit_code_2(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    printed = capsys.readouterr()
    assert hint in printed.err
    assert printed.out == ""


@pytest.mark.parametrize(
    "arguments",
    [["--version"], ["doctor", "--help"], ["config"], ["status", "--json"]],
    ids=" ".join,
)
def test_output_that_cannot_be_written_is_one_message(arguments: list[str], tmp_path: Path) -> None:
    environment = {name: value for name, value in tiny_project.environment().items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ratchet", *arguments], cwd=tmp_path, env=environment, stdout=full,
            stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert ("no Ratchet project" if "status" in arguments else "standard output: No space left on device") in line


def test_a_wrong_setting_is_reported_before_the_libraries_are_loaded(tmp_path: Path) -> None:
    layout = tiny_project.write(tmp_path / "project")
    layout.params.write_text(layout.params.read_text(encoding="utf-8") + "\nunknown: 1\n", encoding="utf-8")
    code = "import sys; from ratchet.cli.main import main; print(main(['evaluate']), 'torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=layout.root, env=tiny_project.environment(), capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["2", "False"]
    assert "unknown" in done.stderr


def test_every_command_has_the_shared_flags() -> None:
    parser = build_parser()
    required = {
        "init": ["d", "--data", "f"], "deploy": ["d"], "adapters": ["d", "a=b"], "compare": ["a"], "verify": ["p"],
        "generate": ["f"],
        "select": ["a", "--output", "o"], "label": ["a", "b"], "completion": ["bash"],
        "push": ["owner/name"], "submit": ["--attempts", "0"], "work": ["--on-idle", "true"], "queue": ["--retry", "1"],
    }  # fmt: skip
    for name in COMMANDS:
        words = [name, *required.get(name, [])]
        assert not (parser.parse_args(words).quiet or parser.parse_args(words).verbose)
        assert parser.parse_args(["-q", *words]).quiet and parser.parse_args([*words, "--quiet"]).quiet
        assert parser.parse_args(["--verbose", *words]).verbose and parser.parse_args([*words, "-v"]).verbose
        assert hasattr(parser.parse_args(words), "json") == (name not in TEXT_COMMANDS)


def test_a_script_completes_commands_flags_values_and_directories(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "rows.csv").touch()
    environment = tiny_project.environment()

    def complete(*words: str) -> list[str]:
        """Return what bash proposes for the last word, after it has sourced the script."""
        quoted = " ".join(f"'{word}'" for word in ("ratchet", *words))
        code = f"""
            source "$1"
            COMP_WORDS=({quoted}); COMP_CWORD={len(words)}; COMP_LINE="{" ".join(("ratchet", *words))}"
            _shtab_ratchet ratchet "$2" "$3" 2>/dev/null
            printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        before = ("ratchet", *words)[-2]
        command = ["bash", "-c", code, "bash", str(tmp_path / "script"), words[-1], before]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
        return [word.strip() for word in done.stdout.splitlines() if word.strip()]

    script = subprocess.run(
        tiny_project.command("completion", "bash"), env=environment, capture_output=True, text=True, check=True
    )
    (tmp_path / "script").write_text(script.stdout, encoding="utf-8")
    assert complete("pro") == ["promote", "promotions"]
    assert complete("train", "--pro") == ["--profile"]
    assert complete("forecast", "--device", "c") == ["cpu", "cuda"]
    assert complete("--project", "f") == ["folder"]
    assert complete("init", "--data", "r") == ["rows.csv"]


@pytest.mark.parametrize("shell", ["zsh", "tcsh"])
def test_other_shells_have_a_script(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    script = capsys.readouterr().out
    assert "complete" in script or "compdef" in script
    assert "promotions" in script


def test_a_traceback_and_the_time_are_shown_on_request_only(
    project: ProjectLayout, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    assert main(["--project", str(project.root), "status", "hf_abcdefgh"]) == 2
    plain = capsys.readouterr()
    assert plain.err.startswith("ratchet status: ")
    assert plain.err.count("\n") == 1
    handlers = logging.getLogger().handlers.copy()
    assert main(["--project", str(project.root), "status", "-v", "hf_abcdefgh"]) == 2
    assert logging.getLogger().handlers == handlers  # the next command in this process shows no log records
    verbose = capsys.readouterr()
    assert verbose.out == ""
    assert "Traceback (most recent call last)" in verbose.err
    assert verbose.err.endswith(plain.err)
    assert "  ratchet status: " in verbose.err
    assert "hf_abcdefgh" not in plain.err + verbose.err


FAILURES = {
    "init": ["--data", "missing.csv", "d"], "base": [], "prepare": [], "distill": [], "train": [],
    "sweep": ["--report"], "evaluate": [], "export": [], "gate": [], "promote": [], "rollback": [], "approve": [],
    "promotions": [], "deploy": ["d"], "adapters": ["d", "a=b"], "keys": ["--revoke", "abc"], "audit": [],
    "monitor": ["missing.jsonl"], "generate": ["missing.jsonl", "--output", "o.jsonl"],
    "select": ["missing.jsonl", "--output", "o.jsonl"], "label": ["a", "b"], "forecast": ["--memory", "much"],
    "doctor": ["--require", "nothing"], "config": ["nothing"], "status": ["nothing"], "compare": ["a", "b"],
    "push": ["owner/name"], "submit": ["--attempts", "0"], "work": ["--on-idle", "true"], "queue": ["--retry", "1"],
    "team": [], "report": ["nothing"], "verify": ["missing"], "reset": ["nothing"], "chaos": ["--faults", "nothing"],
}  # fmt: skip
"""Arguments with which each command fails in an empty project."""


def test_the_failures_are_those_of_all_commands_that_report() -> None:
    assert FAILURES.keys() == COMMANDS.keys() - TEXT_COMMANDS


@pytest.mark.parametrize("name", FAILURES)
def test_with_json_a_failure_is_json_too(
    name: str, project: ProjectLayout, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project.root)
    if name == "promotions":
        project.promotions.write_text("{damaged\n", encoding="utf-8")  # a record that reports the problem, and exit 2
    code = main([name, *FAILURES[name], "--json"])
    printed = capsys.readouterr()
    result = json.loads(printed.out)
    assert code in (2, 3)
    if name == "promotions":
        assert result["problems"]
        return
    assert result["error"]["exit_code"] == code
    assert result["error"]["type"].endswith("Error")
    assert result["error"]["message"] in printed.err


def read_json(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command with `--json` and `-v`, and return its result. Everything else is on standard error."""
    capsys.readouterr()
    assert main([*arguments, "--json", "-v"]) == 0
    printed = capsys.readouterr()
    assert f"  ratchet {arguments[2]}: " in printed.err
    return json.loads(printed.out)


def test_json_is_the_record_of_the_python_api(
    prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from ratchet.stages import base, config, keys, prepare, promotions, status, verify
    from ratchet.stages.project import Project

    layout = tiny_project.prepared(tmp_path / "project")
    place, project = ["--project", str(layout.root)], Project(layout.root)
    records = {
        ("base",): lambda: base.base(project),
        ("prepare",): lambda: prepare.prepare(project),
        ("config", "train"): lambda: config.config(layout, "train"),
        ("status",): lambda: status.status(layout, None),
        ("keys",): lambda: keys.keys(layout, keys.KeysOptions()),
        ("promotions",): lambda: promotions.promotions(project),
        ("verify", str(layout.data)): lambda: verify.verify([layout.data], None, layout.root),
    }
    for arguments, create in records.items():
        assert read_json([*place, *arguments], capsys) == json.loads(create().model_dump_json()), arguments


def test_quiet_leaves_the_result(prepared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = tiny_project.prepared(tmp_path / "project")
    main(["--project", str(layout.root), "base"])
    loud = capsys.readouterr()
    main(["--project", str(layout.root), "base", "-q"])
    quiet = capsys.readouterr()
    assert "pre-training" in loud.out
    assert quiet.err == ""
    assert loud.out.endswith(quiet.out)
    assert quiet.out.startswith("base tiny: ")


def test_a_subparser_is_kept_for_each_command() -> None:
    [commands] = [a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    assert build_parser().commands.keys() == commands.choices.keys() == COMMANDS.keys()


def test_a_message_that_troubleshooting_explains_ends_with_a_link(
    project: ProjectLayout, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (project.root / "rows.csv").write_bytes("prompt,response\nprix,très cher\n".encode("latin-1"))
    monkeypatch.chdir(project.root)
    assert main(["init", "new", "--data", "rows.csv", "--json"]) == EXIT_INPUT
    printed = capsys.readouterr()
    link = json.loads(printed.out)["error"]["help"]
    assert link.endswith("#the-text-looks-corrupted")
    assert printed.err.splitlines()[-1] == f"See {link}"
    monkeypatch.setattr("ratchet.cli.troubleshooting.DOCUMENTATION", "https://docs.example")
    assert main(["init", "new", "--data", "rows.csv"]) == EXIT_INPUT
    assert "See https://docs.example/troubleshooting.html#the-text-looks-corrupted\n" in capsys.readouterr().err
    monkeypatch.setattr("ratchet.cli.troubleshooting.DOCUMENTATION", "The documentation")
    monkeypatch.setattr("ratchet.cli.troubleshooting.CLONE", project.root)  # as if installed without a clone
    assert main(["init", "new", "--data", "rows.csv"]) == EXIT_INPUT
    place = "The documentation, page troubleshooting, section the-text-looks-corrupted"
    assert capsys.readouterr().err.splitlines()[-1] == f"See {place}"
    assert main(["init", "new", "--data", "none.csv", "--json"]) == EXIT_INPUT
    printed = capsys.readouterr()
    assert json.loads(printed.out)["error"]["help"] is None
    assert "See" not in printed.err


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_that_a_closed_pipe_did_not_take_does_not_change_the_exit_code(stream: str, tmp_path: Path) -> None:
    code = "import sys; from ratchet.cli.main import main; sys.stdout.write('x'); sys.exit(main(sys.argv[1:]))"
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as output:
        command = [sys.executable, "-c", code, "--project", str(tmp_path), "status"]
        environment = os.environ | {"PYTHONUNBUFFERED": ""}
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {stream: output}
        done = subprocess.run(command, **streams, env=environment, check=False)
    assert done.returncode == 2, done.stderr
