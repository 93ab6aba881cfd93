"""The harness's tasks on a model in memory: its own command's scores, kept across a kill; what odd tasks are told."""

import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ratchet.config_evaluation import Harness
from ratchet.data import tasks
from ratchet.errors import SettingsError
from ratchet.evaluation.store import ScoreStore
from ratchet.model import tiny
from ratchet.services import harness
from tiny_project import environment

ROWS = 22
BATCH_ROWS = 4
TEXT = "the cat sat on a mat while dogs barked and seven birds sang loud songs over wet green fields"
WORDS = TEXT.split()

CHOICE = """\
task: choice
dataset_path: json
dataset_kwargs:
  data_files:
    test: data/tasks/choice.jsonl
    train: data/tasks/shots.jsonl
test_split: test
fewshot_split: train
num_fewshot: 1
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{gold}}"
metric_list:
  - metric: acc
  - metric: acc_norm
"""

WRITE = """\
include: _common
task: write
output_type: generate_until
doc_to_target: "{{answer}}"
generation_kwargs: {until: ["birds"], do_sample: false, max_gen_toks: 12}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true}
  - {metric: bleu, aggregation: bleu, higher_is_better: true}
  - {metric: !function own.letters, aggregation: mean}
"""

COMMON = """\
dataset_path: json
dataset_kwargs: {data_files: {test: data/tasks/write*.jsonl}}
test_split: test
doc_to_text: "{{question}}"
"""

READ = """\
task: read
dataset_path: json
dataset_kwargs: {data_files: {test: data/tasks/read.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - metric: word_perplexity
  - metric: byte_perplexity
  - metric: bits_per_byte
"""

LAST = """\
include: _common
task: last
output_type: loglikelihood
doc_to_target: " {{answer}}"
metric_list:
  - metric: perplexity
  - metric: acc
"""

BOTH = """\
group: both
task: [last, choice]
aggregate_metric_list:
  - {metric: acc, weight_by_size: true}
"""

TASKS = ("choice", "write", "read", "last")


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_tasks(root: Path) -> Path:
    """A project folder with tasks of every kind over random words."""
    draw = random.Random(3)

    def words(least: int, most: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(least, most)))

    folder = root / "data" / "tasks"
    folder.mkdir(parents=True)
    choices = [
        {"question": words(2, 9), "choices": [words(1, 3) for _ in range(2 + i % 4)], "gold": i % 2}
        for i in range(ROWS + 3)
    ]
    write(folder / "choice.jsonl", choices[:ROWS])
    write(folder / "shots.jsonl", choices[ROWS:])
    questions = [{"question": words(2, 9), "answer": words(1, 2)} for _ in range(ROWS)]
    write(folder / "write-1.jsonl", questions[:10])
    write(folder / "write-2.jsonl", questions[10:])
    write(folder / "read.jsonl", [{"text": words(5, 120)} for _ in range(9)])
    yaml = {"choice": CHOICE, "write": WRITE, "read": READ, "last": LAST, "both": BOTH}
    for name, text in yaml.items():
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    (folder / "_common").write_text(COMMON, encoding="utf-8")
    (folder / "own.py").write_text(
        "def letters(references, predictions, **_):\n    return float(len(predictions[0]))\n"
    )
    return folder


@dataclass
class Bench:
    """A tiny model, on disk and loaded, and tasks for it."""

    root: Path
    tasks: Path
    saved: Path
    model: Any
    tokenizer: Any

    def run(self, settings: Harness, recall: harness.Recall | None = None) -> list[harness.TaskResult]:
        store = recall or ScoreStore(None)
        return harness.run(self.model, self.tokenizer, settings, self.root, self.tasks, BATCH_ROWS, store)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("harness")
    tokenizer = tiny.train_tokenizer([TEXT] * 20, 300)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=160, initializer_range=0.3, bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(root / "hf")
    tokenizer.save_pretrained(root / "hf")
    return Bench(root, write_tasks(root), root / "hf", model, tokenizer)


@pytest.fixture(scope="module")
def command(bench: Bench) -> subprocess.Popen[str]:
    """The harness's own command on the saved model, at work while other tests are."""
    line = [
        sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args",
        f"pretrained={bench.saved},dtype=float32", "--tasks", ",".join(TASKS), "--include_path", str(bench.tasks),
        "--batch_size", str(BATCH_ROWS), "--device",
        "cpu", "--apply_chat_template", "--log_samples", "--output_path", str(bench.root / "out"),
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(bench.root / "home"), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        line, cwd=bench.root, env=environment() | offline, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


@pytest.fixture(scope="module")
def ours(bench: Bench, command: subprocess.Popen[str]) -> dict[str, harness.TaskResult]:
    return {one.task: one for one in bench.run(Harness(tasks=(*TASKS, "both")))}


@pytest.fixture(scope="module")
def theirs(bench: Bench, command: subprocess.Popen[str], ours: Any) -> dict[str, Any]:
    text, _ = command.communicate(timeout=300)
    assert command.returncode == 0, text
    folder = next((bench.root / "out").glob("*/"))
    results = json.loads(next(folder.glob("results_*.json")).read_text())
    samples = {
        task: [json.loads(line) for line in next(folder.glob(f"samples_{task}_*.jsonl")).read_text().splitlines()]
        for task in TASKS
    }
    return {"results": results["results"], "samples": samples}


def of(result: harness.TaskResult, metric: str) -> harness.HarnessScores:
    return next(one for one in result.scores if one.metric == metric)


def total(scores: harness.HarnessScores) -> float:
    """The figure that the samples make."""
    if scores.figure is not None:
        return scores.figure.value
    if scores.kind == "perplexity":
        assert scores.weights is not None
        return math.exp(math.fsum(scores.values.values()) / math.fsum(scores.weights.values()))
    return math.fsum(scores.values.values()) / len(scores.values)


@pytest.mark.parametrize(
    ("task", "metric"),
    [
        ("choice", "acc"), ("choice", "acc_norm"), ("write", "exact_match"), ("write", "bleu"), ("write", "letters"),
        ("read", "word_perplexity"), ("read", "byte_perplexity"), ("read", "bits_per_byte"), ("last", "perplexity"),
        ("last", "acc"),
    ],
)  # fmt: skip
def test_scores_are_those_of_the_harness_command(task: str, metric: str, ours: Any, theirs: Any) -> None:
    assert total(of(ours[task], metric)) == pytest.approx(theirs["results"][task][f"{metric},none"], rel=1e-6)


@pytest.mark.parametrize("task", TASKS)
def test_every_document_has_the_command_s_score(task: str, ours: Any, theirs: Any) -> None:
    found = {one["id"]: one for one in ours[task].documents}
    assert len(found) == len(theirs["samples"][task]) > 0
    for sample in theirs["samples"][task]:
        document = found[sample["doc_hash"]]
        said = [answer for one in sample["resps"] for answer in one]
        if task == "write":
            assert document["answers"] == said
            assert of(ours[task], "letters").values[sample["doc_hash"]] == sample["letters"]
        else:
            nats = [float(one[0] if isinstance(one, list) else one) for one in said]
            # The command batches requests of all tasks together, we each task's alone: float32 rounds them apart.
            assert document["likelihoods"] == pytest.approx(nats, rel=1e-6)
        if task == "choice":
            assert document["scores"] == {"acc": sample["acc"], "acc_norm": sample["acc_norm"]}


def test_the_tasks_are_no_formality(ours: Any) -> None:
    """Else equality would say little: some choices are right, answers differ, some stop early."""
    assert 0 < total(of(ours["choice"], "acc")) < 1
    lengths = set(of(ours["write"], "letters").values.values())
    assert len(lengths) > 5


def test_directions_are_known_or_said_to_be_unknown(ours: Any) -> None:
    assert {one.metric: one.better for one in ours["write"].scores} == {
        "exact_match": "higher",
        "bleu": "higher",
        "letters": "unknown",
    }
    assert {one.better for one in ours["read"].scores} == {"lower"}


def test_chance_is_the_mean_share_of_right_choices(ours: Any) -> None:
    by_hand = sum(1 / (2 + i % 4) for i in range(ROWS)) / ROWS
    assert ours["choice"].chance == pytest.approx(by_hand)
    assert ours["write"].chance is None


def test_a_group_is_all_documents_of_its_tasks(ours: Any) -> None:
    both, parts = ours["both"], (ours["last"], ours["choice"])
    assert len(both.documents) == 2 * ROWS
    pooled = [value for part in parts for value in of(part, "acc").values.values()]
    assert total(of(both, "acc")) == pytest.approx(sum(pooled) / len(pooled))
    assert [one.metric for one in both.scores] == ["acc"]


@dataclass
class Counting:
    """Counts what is computed, and what is only recalled; may end the process."""

    store: ScoreStore
    die_after: int | None = None
    made: list[str] = field(default_factory=list)

    def take(self, key: str, make: Callable[[], Any]) -> Any:
        def count() -> Any:
            if self.die_after is not None and len(self.made) == self.die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            self.made.append(key)
            return make()

        return self.store.take(key, count)


def test_a_killed_run_goes_on_and_ends_as_if_nothing_had_been(bench: Bench, ours: Any, tmp_path: Path) -> None:
    settings = Harness(tasks=TASKS)
    child = os.fork()
    if child == 0:
        try:
            bench.run(settings, Counting(ScoreStore(tmp_path / "scores.jsonl"), die_after=6))
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL

    again = Counting(ScoreStore(tmp_path / "scores.jsonl"))
    resumed = bench.run(settings, again)
    assert resumed == [ours[name] for name in TASKS]
    whole = Counting(ScoreStore(None))
    bench.run(settings, whole)
    assert len(again.made) == len(whole.made) - 6

    nothing = Counting(ScoreStore(tmp_path / "scores.jsonl"))
    assert bench.run(settings, nothing) == resumed
    assert nothing.made == []


def test_drawn_answers_are_drawn_again_after_a_kill(bench: Bench, tmp_path: Path) -> None:
    folder = bench.root / "drawn"
    folder.mkdir()
    text = WRITE.replace("include: _common", COMMON.rstrip()).replace(
        "do_sample: false", "do_sample: true, temperature: 1.0"
    )
    (folder / "drawn.yaml").write_text(text.replace("task: write", "task: drawn"))
    (folder / "own.py").write_text((bench.tasks / "own.py").read_text())

    def run(recall: harness.Recall) -> list[harness.TaskResult]:
        settings = Harness(tasks=("drawn",))
        return harness.run(bench.model, bench.tokenizer, settings, bench.root, folder, BATCH_ROWS, recall)

    @dataclass
    class Half:
        """Keeps every second chunk only."""

        store: ScoreStore
        count: int = 0

        def take(self, key: str, make: Callable[[], Any]) -> Any:
            self.count += 1
            return self.store.take(key, make) if self.count % 2 else make()

    first = run(Half(ScoreStore(tmp_path / "scores.jsonl")))
    torch.manual_seed(99)
    assert run(ScoreStore(tmp_path / "scores.jsonl")) == first


def test_the_digest_is_of_what_was_asked(bench: Bench, ours: Any, tmp_path: Path) -> None:
    root = tmp_path / "other"
    folder = write_tasks(root)

    def digest(fewshot: int | None = None, limit: int | None = None) -> str:
        settings = Harness(tasks=("choice",), fewshot=fewshot, limit=limit)
        found = harness.run(bench.model, bench.tokenizer, settings, root, folder, BATCH_ROWS, ScoreStore(None))
        return found[0].digest

    same = digest()
    assert same == ours["choice"].digest  # of another folder, which counts for nothing
    changed = {digest(fewshot=2), digest(limit=5)}
    rows = [json.loads(line) for line in (folder / "choice.jsonl").read_text().splitlines()]
    rows[7]["gold"] = 1 - rows[7]["gold"]
    write(folder / "choice.jsonl", rows)
    changed.add(digest())
    (folder / "choice.yaml").write_text(CHOICE.replace("{{question}}", "Q: {{question}}"))
    changed.add(digest())
    assert len(changed) == 4
    assert same not in changed


def test_equal_documents_are_named(bench: Bench, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path)
    rows = [json.loads(line) for line in (folder / "choice.jsonl").read_text().splitlines()]
    write(folder / "choice.jsonl", [*rows, rows[4]])
    with pytest.raises(SettingsError, match=r"task choice: documents 5 and 23 are the same \([0-9a-f]{12}\)"):
        harness.run(
            bench.model, bench.tokenizer, Harness(tasks=("choice",)), tmp_path, folder, BATCH_ROWS, ScoreStore(None)
        )


def test_scores_that_are_no_number_stay_so(bench: Bench, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path)
    (folder / "own.py").write_text("def letters(references, predictions, **_):\n    return float('nan')\n")
    found = harness.run(
        bench.model, bench.tokenizer, Harness(tasks=("write",)), tmp_path, folder, BATCH_ROWS, ScoreStore(None)
    )
    assert all(math.isnan(value) for value in of(found[0], "letters").values.values())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Harness(tasks=("nothing",)), r"no task 'nothing' in .*there are: both, choice, last, read, write"),
        (Harness(tasks=("choice",), library=("choice",)), "'choice' is in tasks and in library"),
        (Harness(tasks=("torn",)), r"torn.yaml: no task of the harness"),
        (Harness(tasks=("gone",)), r"cannot load gone \(FileNotFoundError"),
        (Harness(tasks=("loose",)), "loose is several tasks without a mean .*name them instead: last, choice"),
        (Harness(tasks=("long",)), "cannot run long: .*must be less than model's maximum sequence length"),
        (
            Harness(tasks=("wide",)),
            r"evaluate\.harness\.tasks: the harness cannot run wide: document 7: a continuation has \d+ "
            "tokens, and the model reads 160 at most; change that document, or take it out",
        ),
    ],
    ids=["unknown", "both", "torn", "no data", "group", "too long", "long choice"],
)
def test_what_cannot_be_run_is_said(bench: Bench, settings: Harness, message: str, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path)
    if settings.tasks != ("nothing",):
        (folder / "torn.yaml").write_text("task: [torn\n")
        (folder / "gone.yaml").write_text(READ.replace("task: read", "task: gone").replace("read.jsonl", "gone.jsonl"))
        (folder / "loose.yaml").write_text(BOTH.partition("aggregate")[0].replace("both", "loose"))
        (folder / "long.yaml").write_text(WRITE.replace("task: write", "task: long").replace("12}", "400}"))
        (folder / "wide.yaml").write_text(CHOICE.replace("task: choice", "task: wide"))
        rows = [json.loads(line) for line in (folder / "choice.jsonl").read_text().splitlines()]
        rows[6]["choices"][-1] = TEXT * 12
        write(folder / "choice.jsonl", rows)
    with pytest.raises(SettingsError, match=message):
        harness.run(bench.model, bench.tokenizer, settings, tmp_path, folder, BATCH_ROWS, ScoreStore(None))


@pytest.fixture
def library(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Puts a folder in the place of the harness's own tasks, whose index takes 20 seconds."""
    from lm_eval.tasks import TaskManager

    return lambda folder: monkeypatch.setattr(
        harness, "_library", lambda: TaskManager(include_path=str(folder), include_defaults=False)
    )


def test_a_library_task_whose_data_cannot_be_fetched(
    bench: Bench, library: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import lm_eval.tasks

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path)
    library(Path(lm_eval.tasks.__file__).parent / "arc")
    with pytest.raises(
        SettingsError, match=r"library: the data of arc_easy cannot be had .*'allenai/ai2_arc'.*network"
    ):
        bench.run(Harness(library=("arc_easy",)))
    with pytest.raises(SettingsError, match=r"no task 'arc_eazy'; perhaps arc_easy"):
        bench.run(Harness(library=("arc_eazy",)))


def test_a_library_s_documents_may_be_the_same(
    bench: Bench, library: Callable[[Path], None], tmp_path: Path, ours: Any
) -> None:
    """Nobody here can mend them: they are counted, and still pair one to one."""
    folder = write_tasks(tmp_path)
    rows = [json.loads(line) for line in (folder / "choice.jsonl").read_text().splitlines()]
    write(folder / "choice.jsonl", [*rows, rows[4]])
    library(folder)
    settings = Harness(library=("choice",))
    found = harness.run(bench.model, bench.tokenizer, settings, tmp_path, folder, BATCH_ROWS, ScoreStore(None))[0]
    values = of(found, "acc").values
    assert len(values) == ROWS + 1
    twice = next(key for key in values if key.endswith("#2"))
    assert values[twice] == values[twice.removesuffix("#2")]


def test_the_caller_s_random_numbers_and_folder_stay(bench: Bench) -> None:
    random.seed(5)
    expected, before = random.Random(5).random(), Path.cwd()
    bench.run(Harness(tasks=("read",), limit=2))
    assert random.random() == expected
    assert Path.cwd() == before


@pytest.mark.parametrize(
    ("task", "file", "changed"),
    [
        ("choice", "choice.yaml", True), ("choice", "choice.jsonl", True), ("choice", "shots.jsonl", True),
        ("choice", "write-2.jsonl", False), ("choice", "own.py", False), ("write", "write-2.jsonl", True),
        ("write", "_common", True), ("write", "own.py", True), ("both", "choice.jsonl", True),
        ("both", "_common", True), ("both", "read.jsonl", False),
    ],
)  # fmt: skip
def test_a_task_s_fingerprint_is_of_all_that_it_is_made_of(task: str, file: str, changed: bool, tmp_path: Path) -> None:
    folder = write_tasks(tmp_path)
    before = tasks.fingerprints(["choice", "write", "both"], tmp_path, folder)
    assert sorted(before) == ["both", "choice", "write"]
    (folder / file).write_text((folder / file).read_text() + "\n")
    assert (tasks.fingerprints([task], tmp_path, folder)[task] != before[task]) is changed


def test_fingerprints_of_tasks_that_are_gone_or_torn(tmp_path: Path) -> None:
    folder = write_tasks(tmp_path)
    before = tasks.fingerprints(["choice"], tmp_path, folder)
    (folder / "choice.jsonl").unlink()
    assert tasks.fingerprints(["choice"], tmp_path, folder) != before
    (folder / "choice.yaml").write_text("task: [choice")
    assert tasks.fingerprints(["choice", "unknown"], tmp_path, folder) == {}


def test_fingerprints_need_no_harness() -> None:
    heavy = ("lm_eval", "torch", "datasets")
    code = f"import sys; from ratchet.services import harness; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
