"""Harness tasks on a model in memory: agreement with the scores of the harness command, restarts after a kill, and
error messages."""

import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ratchet.config.evaluate import HarnessSettings
from ratchet.evaluation import harness
from ratchet.evaluation.scorer import ScoreStore
from ratchet.models import tiny_model
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
    """Write a project directory with a task of each kind. The texts are random words."""
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
    """A tiny model on disk and in memory, and tasks for it."""

    root: Path
    tasks: Path
    saved: Path
    model: Any
    tokenizer: Any

    def run(
        self, settings: HarnessSettings, recall: harness.HarnessResultCache | None = None
    ) -> list[harness.HarnessTaskResult]:
        store = recall or ScoreStore(None)
        return harness.run(self.model, self.tokenizer, settings, self.root, self.tasks, BATCH_ROWS, store)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    root = tmp_path_factory.mktemp("harness")
    tokenizer = tiny_model.train_tokenizer([TEXT] * 20, 300)
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
def command(bench: Bench) -> Iterator[subprocess.Popen[str]]:
    """Start the harness command on the saved model. The command runs while other tests run."""
    line = [
        sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--model_args",
        f"pretrained={bench.saved},dtype=float32", "--tasks", ",".join(TASKS), "--include_path", str(bench.tasks),
        "--batch_size", str(BATCH_ROWS), "--device",
        "cpu", "--apply_chat_template", "--log_samples", "--output_path", str(bench.root / "out"),
    ]  # fmt: skip
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(bench.root / "home"), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        line, cwd=bench.root, env=environment() | offline, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    ) as process:
        yield process
        process.kill()


@pytest.fixture(scope="module")
def ours(bench: Bench) -> dict[str, harness.HarnessTaskResult]:
    return {one.task: one for one in bench.run(HarnessSettings(tasks=(*TASKS, "both")))}


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


def of(result: harness.HarnessTaskResult, metric: str) -> harness.HarnessScores:
    return next(one for one in result.scores if one.metric == metric)


def total(scores: harness.HarnessScores) -> float:
    """Compute the metric from the scores of the samples."""
    if scores.aggregate is not None:
        return scores.aggregate.value
    if scores.kind == "perplexity":
        assert scores.weights is not None
        return math.exp(math.fsum(scores.values.values()) / math.fsum(scores.weights.values()))
    return math.fsum(scores.values.values()) / len(scores.values)
