"""The CLI answers wrong input with one message (place, value, remedy) and exit code 2, and leaves no files."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_project
from bad_input_cases import (
    finished,  # noqa: F401 (a fixture)
    layout,  # noqa: F401 (a fixture)
)
from ratchet.cli.main import main
from ratchet.config.base import Base
from ratchet.config.prepare import Prepare, SplitSettings
from ratchet.storage import files
from ratchet.storage.files import FileLock
from ratchet.storage.layout import ProjectLayout

Refused = Callable[..., str]


@pytest.fixture
def refused(layout: ProjectLayout, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Return a function that runs a command, checks that it fails with exit code 2 and changes no file, and returns
    its message."""

    def run_it(*arguments: str) -> str:
        before = contents(layout.experiments)
        assert main(["--project", str(layout.root), *arguments]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"ratchet {arguments[0]}: ")
        assert "Traceback" not in error
        assert contents(layout.experiments) == before
        return error

    return run_it


def contents(folder: Path) -> dict[str, bytes]:
    found = {
        p.relative_to(folder).as_posix(): p.read_bytes()
        for p in folder.rglob("*")
        if p.is_file() and ".locks" not in p.parts
    }
    assert not [name for name in found if files.PARTIAL in name]
    return found


def change(layout: ProjectLayout, **sections: object) -> None:
    tiny_project.save(layout, tiny_project.SETTINGS.model_copy(update=sections))


def prepare(**changes: object) -> Prepare:
    return tiny_project.SETTINGS.prepare.model_copy(update=changes)


def test_a_missing_data_file_or_column_is_named_with_those_that_exist(layout: ProjectLayout, refused: Refused) -> None:
    change(layout, prepare=prepare(sources=("data/raw/row.csv",)))
    message = refused("prepare")
    assert "data/raw/row.csv: no such file" in message
    assert "data/raw/rows.csv" in message
    columns = tiny_project.SETTINGS.prepare.columns.model_copy(update={"response": "label"})
    change(layout, prepare=prepare(columns=columns))
    message = refused("prepare")
    assert "no column 'label'" in message
    assert "request, intent" in message


def test_input_files_that_are_empty_or_not_utf8_are_refused(layout: ProjectLayout, refused: Refused) -> None:
    (layout.raw / "rows.jsonl").write_text("")
    assert "data/raw/rows.jsonl: no rows" in refused("prepare")
    (layout.text / "more.txt").write_bytes(b"a parcel\ncaf\xe9\n")
    assert "more.txt: not UTF-8 (byte 12)" in refused("base")


def test_a_malformed_json_line_is_named_with_its_number(layout: ProjectLayout, refused: Refused) -> None:
    lines = (layout.raw / "rows.jsonl").read_text().splitlines()
    (layout.raw / "rows.jsonl").write_text("\n".join([*lines[:6], '{"request": "half', *lines[6:]]))
    change(layout, prepare=prepare(limits={"malformed": 0}))
    message = refused("prepare")
    assert "data/raw/rows.jsonl:7: not JSON" in message
    assert "prepare.limits.malformed" in message


def test_fewer_rows_than_the_splits_need(layout: ProjectLayout, refused: Refused) -> None:
    rows = [{"request": f"row {n}", "intent": "a"} for n in range(2)]
    (layout.raw / "few.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    change(layout, prepare=prepare(sources=("data/raw/few.jsonl",), split=SplitSettings(validation=0.1, test=0.1)))
    message = refused("prepare")
    assert "2 rows give" in message
    assert "needs at least one" in message


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("model.safetensors", None, "no weights (*.safetensors)"),
        ("tokenizer.json", None, "no tokenizer"),
        ("config.json", None, "no config.json"),
        ("chat_template.jinja", None, "no chat template"),
        ("config.json", b"{", "not the config of a model"),
        ("config.json", b"[]", "not the config of a model"),
        ("config.json", b"{}", "not the config of a model"),
        ("model.safetensors", b"\xff" * 1000, "damaged or truncated"),
        ("tokenizer.json", b"{", "the tokenizer cannot be loaded"),
    ],
)
def test_a_base_directory_with_a_missing_or_damaged_file(
    layout: ProjectLayout, refused: Refused, name: str, content: bytes | None, words: str
) -> None:
    shutil.copytree(layout.tiny_model, layout.root / "my base")
    if content is None:
        (layout.root / "my base" / name).unlink()
    else:
        (layout.root / "my base" / name).write_bytes(content)
    change(layout, base=Base(source="my base"))
    assert words in refused("base")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("./nowhere", "base.source: ./nowhere: no such directory"),
        ("somebody/some-model", "which needs base.revision"),
    ],
)
def test_a_missing_base(layout: ProjectLayout, refused: Refused, source: str, words: str) -> None:
    change(layout, base=Base(source=source))
    assert words in refused("base")


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ("learning_rate: fast", "train.learning_rate: found "),
        ("learning_rate: 0", "train.learning_rate: found "),
        ("lerning_rate: 0.01", "train.lerning_rate: unknown setting; did you mean learning_rate?"),
    ],
)
def test_wrong_settings_are_named_with_their_line(
    layout: ProjectLayout, refused: Refused, written: str, words: str
) -> None:
    text = layout.params.read_text()
    line = next(n for n, found in enumerate(text.splitlines(), 1) if found.startswith("  learning_rate:"))
    layout.params.write_text(text.replace("  learning_rate: 0.01\n", f"  {written}\n"))
    assert f"params.yaml:{line}: {words}" in refused("train")


def test_stages_out_of_order_or_already_running_are_refused(layout: ProjectLayout, refused: Refused) -> None:
    assert "dvc repro train" in refused("evaluate")
    assert "dvc repro evaluate" in refused("gate") or "not sealed" in refused("gate")
    with FileLock(layout.stage_lock("prepare"), "the test"):
        assert f"is in use by process {os.getpid()}" in refused("prepare")


@pytest.mark.parametrize(("code", "number"), [("ENOSPC", 1), ("EIO", 4)])
def test_the_file_is_named_when_the_disk_fails(
    refused: Refused, monkeypatch: pytest.MonkeyPatch, code: str, number: int
) -> None:
    done = []

    def fail(operation: files.Operation, path: Path) -> None:
        done.append(operation)
        if len(done) >= number and operation != "unlink":
            raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)), str(path))

    monkeypatch.setattr(files, "before", fail)
    message = refused("prepare")
    assert os.strerror(getattr(errno, code)) in message
    assert "outputs are consistent" in message


GOOD = ["--data", "rows.csv", "--prompt", "request", "--response", "intent"]


@pytest.mark.parametrize("command", ["keys", "promotions"])
def test_a_folder_in_the_place_of_a_file_is_named(layout: ProjectLayout, refused: Refused, command: str) -> None:
    path = {"keys": layout.keyring, "promotions": layout.promotions}[command]
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)
    assert f"{path}: Is a directory" in refused(command)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--data", "nowhere.csv", "--prompt", "a", "--response", "b"], "no such file"),
        (["--data", "rows.csv", "--prompt", "question", "--response", "intent"], "no column 'question'"),
        (["--data", "rows.txt", "--prompt", "a", "--response", "b"], "cannot read .txt"),
        (["--data", "empty.csv", "--prompt", "a", "--response", "b"], "empty.csv: no rows"),
        (["--data", ".", "--prompt", "a", "--response", "b"], "not a file"),
        (["--data", "rows.csv", "--prompt", "request", "--response", "request"], "expected different columns"),
        (["--data", "rows.csv", "--prompt", "", "--response", "intent"], "expected different columns"),
        (["--data", "rows.csv", "--prompt", "request", "--rejected", "intent"], "--prompt and --response (for pairs"),
        ([*GOOD, "--rejected", "intent"], "--response 'intent' --rejected 'intent': expected different columns"),
        ([*GOOD, "--rejected", "worse"], "no column 'worse' (--rejected)"),
        (["--data", "two.csv", "--prompt", "a", "--response", "b"], "more rows with other prompts are needed"),
        ([*GOOD, "--base", "./nowhere"], "expected a directory with a model"),
        ([*GOOD, "--base", ""], "expected a directory with a model"),
        ([*GOOD, "--base", "."], "expected a directory with a model"),
        ([*GOOD, "--revision", "main"], "only a hub id has one"),
    ],
)
def test_init_leaves_nothing_when_it_fails(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    tiny_project.write_rows(tmp_path)
    (tmp_path / "rows.txt").write_text("x")
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "two.csv").write_text("a,b\nx,y\nz,y\n")
    assert main(["init", "new", *arguments]) == 2
    assert words in capsys.readouterr().err
    assert not [p for p in tmp_path.iterdir() if "new" in p.name]


def test_a_directory_without_a_project_or_in_use_stays_unchanged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_project.write_rows(tmp_path)
    data = ["--data", str(tmp_path / "rows.csv"), "--prompt", "request", "--response", "intent"]
    for arguments, words in (
        (["--project", str(tmp_path), "train"], "no Ratchet project here"),
        (["init", str(tmp_path), *data], "exists and is not empty"),
    ):
        assert main(arguments) == 2
        assert words in capsys.readouterr().err
        assert {p.name for p in tmp_path.iterdir()} == {"rows.csv", "rows.jsonl"}
