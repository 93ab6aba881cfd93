"""Extensions from other packages: pip installs the example package, and a project refers to its functions by name."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import fake_generations
import logged_points
import ratchet
import tiny_project
from ratchet.config import extensions, params_file
from ratchet.errors import SettingsError
from ratchet.inference import answer_selection
from ratchet.runs.directory import RunPaths
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.evaluation import EvaluationReport

PACKAGES = ("tracking", "runs")

EXAMPLE = Path(__file__).parents[1] / "examples" / "extension"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the example package into a directory and return the directory."""
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
    """Write the metadata of an installed package that has one entry point with the name of the package."""
    metadata = site / f"{package}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{group}]\n{package} = {target}\n")


def change(layout: ProjectLayout, **changes: object) -> None:
    text = layout.params.read_text(encoding="utf-8")
    layout.params.write_text(params_file.amend_text(text, {k.replace("__", "."): v for k, v in changes.items()}))


@pytest.mark.long
def test_a_filter_drops_rows_and_the_card_names_it(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed)
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


@pytest.mark.long
def test_loggers_and_a_callback_receive_each_step_once_and_a_metric_scores_every_answer(
    installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(installed)
    layout = tiny_project.prepared(tmp_path / "project")
    fewer = {"train__epochs": 0.5, "evaluate__harness__tasks": []}
    loggers = {"machine__loggers": ["csv", "json_lines"]}
    change(layout, machine__callbacks=["loss_file"], evaluate__metrics=["first_word"], **loggers, **fewer)
    done = run(layout, installed, "train")
    assert done.returncode == 0, done.stderr
    [run_directory] = [path for path in layout.runs.iterdir() if path.is_dir() and not path.name.startswith(".")]
    lines = (run_directory / "loss.txt").read_text(encoding="utf-8").splitlines()
    steps = json.loads(layout.train_report.read_text(encoding="utf-8"))["steps"]
    assert [int(line.split()[0]) for line in lines] == list(range(1, steps + 1))
    rows = (run_directory / "loggers" / "csv" / "metrics.csv").read_text(encoding="utf-8").splitlines()
    assert [int(row.split(",")[0]) for row in rows if "train/loss" in row] == list(range(1, steps + 1))
    assert len(rows) == logged_points.read("json_lines", RunPaths(run_directory)).total()
    done = run(layout, installed, "evaluate")
    assert done.returncode == 0, done.stderr
    report = EvaluationReport.load(layout.eval_report)
    for model in ("base", "candidate"):
        metric = report.scores[model].metrics["first_word"]
        assert 0 <= metric.value <= 1
        assert metric.n > 0
    assert not layout.mlflow_database.exists()  # no stage logs to MLflow, which is not among the loggers


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
    ("group", "setting", "text"),
    [
        ("ratchet.metrics", "evaluate.metrics.0", "evaluate:\n  metrics: [gone]\n"),
        ("ratchet.filters", "prepare.filters.0", "prepare:\n  filters: [gone]\n"),
        ("ratchet.rewards", "select.reward.function", "select:\n  reward: {function: gone}\n"),
        ("ratchet.loggers", "machine.loggers.0", "machine:\n  loggers: [gone]\n"),
        ("ratchet.callbacks", "machine.callbacks.0", "machine:\n  callbacks: [gone]\n"),
    ],
)
def test_an_extension_that_is_not_installed_is_refused_where_settings_are_loaded(
    group: extensions.Group, setting: str, text: str
) -> None:
    builtin = r"(one of (token_f1|mlflow), [\w, ]+, or )?"
    problem = f"{setting}: found 'gone'; expected {builtin}a name that an installed package registers in {group}"
    with pytest.raises(SettingsError, match=rf"^params.yaml:2: {problem}; "):
        params_file.parse(text)
    with pytest.raises(SettingsError, match=f"^{problem}; "):
        extensions.load_extension(group, "gone", setting)


def test_a_misspelled_extension_gets_the_nearest_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register(tmp_path, "short_answers", "ratchet.filters", "nowhere:check")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(SettingsError, match=r"found 'short_answer'; .*; did you mean short_answers\?$"):
        params_file.parse("prepare: {filters: [short_answer]}\n")


@pytest.mark.parametrize("reason", [True, "", 3])
def test_a_filter_that_returns_no_reason_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reason: object
) -> None:
    register(tmp_path, "odd", "ratchet.filters", "odd_filter:check")
    (tmp_path / "odd_filter.py").write_text(f"def check(messages):\n    return {reason!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "odd_filter", raising=False)
    layout = tiny_project.prepared(tmp_path / "project")
    change(layout, prepare__filters=["odd"])
    with pytest.raises(SettingsError, match=rf"^prepare.filters: odd returned {reason!r} at data/raw/rows.csv:2; "):
        ratchet.prepare(ratchet.Project(layout.root))


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
