"""Extensions of other packages: the example package is installed with pip, and a project names its functions."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fake_generations
import ratchet
import tiny_project
from ratchet.config import extensions, params_file
from ratchet.errors import SettingsError
from ratchet.inference import answer_selection
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.evaluation import EvaluationReport

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


def register(site: Path, package: str, group: extensions.Group, target: str) -> None:
    """Write the metadata of an installed package with one entry point of the package's name."""
    metadata = site / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{package} = {target}\n")


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


def test_a_callback_receives_each_step_once_and_a_metric_scores_every_answer(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed)
    layout = tiny_project.prepared(tmp_path / "project")
    change(layout, machine__callbacks=["loss_file"], evaluate__metrics=["first_word"])
    done = run(layout, installed, "train")
    assert done.returncode == 0, done.stderr
    [run_directory] = [path for path in layout.runs.iterdir() if path.is_dir() and not path.name.startswith(".")]
    lines = (run_directory / "loss.txt").read_text(encoding="utf-8").splitlines()
    steps = json.loads(layout.train_report.read_text(encoding="utf-8"))["steps"]
    assert [int(line.split()[0]) for line in lines] == list(range(1, steps + 1))
    done = run(layout, installed, "evaluate")
    assert done.returncode == 0, done.stderr
    report = EvaluationReport.load(layout.eval_report)
    for model in ("base", "candidate"):
        metric = report.scores[model].metrics["first_word"]
        assert 0 <= metric.value <= 1
        assert metric.n > 0


def test_a_reward_chooses_among_answers_and_the_card_names_it(installed: Path, tmp_path: Path) -> None:
    reward = {"reward": {"function": "brevity", "select_best": True}}
    settings = fake_generations.settings_of(reward, samples=2, temperature=1.0)
    layout = fake_generations.project(tmp_path / "project", settings)
    prompts = fake_generations.write_lines(layout.raw / "prompts.jsonl", [{"id": "q", "prompt": "what is water"}])
    answers = fake_generations.generation(
        layout, settings, prompts, lambda _, sample: ("a liquid that is wet", "wet")[sample], tmp_path / "answers.jsonl"
    )
    done = run(layout, installed, "select", str(answers), "--output", "data/raw/selected.jsonl")
    assert done.returncode == 0, done.stderr
    [row] = [json.loads(line) for line in (layout.raw / "selected.jsonl").read_text(encoding="utf-8").splitlines()]
    assert row["messages"][-1] == {"role": "assistant", "content": "wet"}
    [card] = [path for path in layout.raw.iterdir() if path.name.startswith("selected.jsonl.")]
    assert "brevity of ratchet-example-extension 0.1.0" in card.read_text(encoding="utf-8")


def test_a_reward_that_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path, "odd", "ratchet.rewards", "odd_reward:score")
    (tmp_path / "odd_reward.py").write_text("def score(prompts, answers, references):\n    return [float('nan')]\n")
    monkeypatch.syspath_prepend(tmp_path)
    request = {"messages": [{"role": "user", "content": "q"}], "answer": "a", "reference": None}
    (tmp_path / "requests.jsonl").write_text(json.dumps(request) + "\n")
    with pytest.raises(SettingsError, match=r"^select.reward.function: odd returned 1 numbers for 1 answers, or"):
        answer_selection.run_function("odd", tmp_path / "requests.jsonl", tmp_path)


def test_a_reward_is_a_function_or_a_command() -> None:
    with pytest.raises(ValueError, match="reward: found command and function; expected one of them"):
        fake_generations.settings_of({"reward": {"function": "brevity", "command": ["score"]}})
    with pytest.raises(ValueError, match="reward: found neither command nor function"):
        fake_generations.settings_of({"reward": {"min_score": 1}})


@pytest.mark.parametrize(
    ("group", "setting"),
    [("ratchet.metrics", "evaluate.metrics"), ("ratchet.callbacks", "machine.callbacks")],
)
def test_an_extension_that_is_not_installed_is_refused_by_name(group: extensions.Group, setting: str) -> None:
    with pytest.raises(SettingsError, match=rf"^{setting}: found 'gone', which no installed package registers"):
        extensions.load_extension(group, "gone", setting)


def test_an_extension_that_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path, "broken", "ratchet.metrics", "no_such_module:score")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SettingsError, match=r"broken .*cannot be imported: ModuleNotFoundError"):
        extensions.load_extension("ratchet.metrics", "broken", "evaluate.metrics")


def test_a_callback_that_cannot_be_created_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path, "nameless", "ratchet.callbacks", "nameless_callback:Nameless")
    (tmp_path / "nameless_callback.py").write_text("class Nameless:\n    def __init__(self, run):\n        pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    layout = tiny_project.prepared(tmp_path / "project")
    change(layout, machine__callbacks=["nameless"])
    with pytest.raises(SettingsError, match=r"^machine.callbacks: nameless failed: AttributeError: .* 'name'"):
        ratchet.train(ratchet.Project(layout.root))
