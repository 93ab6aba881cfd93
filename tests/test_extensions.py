"""Extensions of other packages: the example package is installed with pip, and a project names its functions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tiny_project
from ratchet.config import extensions, params_file
from ratchet.errors import SettingsError
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DatasetCard

EXAMPLE = Path(__file__).parents[1] / "examples" / "extension"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the installed example package."""
    target = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source")
    for path in EXAMPLE.iterdir():
        if path.is_file():
            (source / path.name).write_bytes(path.read_bytes())
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "--target", str(target), str(source)], check=True)
    return target


def run(layout: ProjectLayout, site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = tiny_project.environment() | {"PYTHONPATH": os.pathsep.join([str(site), *sys.path])}
    return subprocess.run(
        tiny_project.command(*arguments), cwd=layout.root, env=environment, capture_output=True, text=True, check=False
    )


def change(layout: ProjectLayout, **changes: object) -> None:
    text = layout.params.read_text(encoding="utf-8")
    layout.params.write_text(params_file.amend_text(text, {k.replace("__", "."): v for k, v in changes.items()}))


def test_a_filter_drops_rows_and_the_card_names_it(installed: Path, tmp_path: Path) -> None:
    layout = tiny_project.prepared(tmp_path / "project")
    with (layout.raw / "rows.jsonl").open("a", encoding="utf-8") as stream:
        stream.writelines(json.dumps({"request": f"say yes {n}", "intent": "ok"}) + "\n" for n in range(5))
    change(layout, prepare__filters=["short_answers"])
    done = run(layout, installed, "prepare")
    assert done.returncode == 0, done.stderr
    card = DatasetCard.load(layout.dataset_card)
    assert card.dropped["filtered"].count == 5
    assert "short_answers of ratchet-example-extension 0.1.0" in " ".join(card.notes)
    assert "ok" not in card.labels


def test_a_callback_receives_each_step_once(installed: Path, tmp_path: Path) -> None:
    layout = tiny_project.prepared(tmp_path / "project")
    change(layout, machine__callbacks=["loss_file"])
    done = run(layout, installed, "train")
    assert done.returncode == 0, done.stderr
    [run_directory] = [path for path in layout.runs.iterdir() if path.is_dir() and not path.name.startswith(".")]
    lines = (run_directory / "loss.txt").read_text(encoding="utf-8").splitlines()
    steps = json.loads(layout.train_report.read_text(encoding="utf-8"))["steps"]
    assert [int(line.split()[0]) for line in lines] == list(range(1, steps + 1))


@pytest.mark.parametrize(
    ("group", "setting"),
    [("ratchet.metrics", "evaluate.metrics"), ("ratchet.callbacks", "machine.callbacks")],
)
def test_an_extension_that_is_not_installed_is_refused_by_name(group: extensions.Group, setting: str) -> None:
    with pytest.raises(SettingsError, match=rf"^{setting}: found 'gone', which no installed package registers"):
        extensions.load_extension(group, "gone", setting)


def test_an_extension_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "broken-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[ratchet.metrics]\nbroken = no_such_module:score\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SettingsError, match=r"broken .*cannot be imported: ModuleNotFoundError"):
        extensions.load_extension("ratchet.metrics", "broken", "evaluate.metrics")
