"""Creates the projects of benchmarks/train.py: the bundled one, and one with rows like GSM8K and a random model.

The benchmark has the lengths of GSM8K (Cobbe et al. 2021), not its texts. Numbers of words of question and answer are
drawn from log-normal distributions with the moments and the correlation of its 7,473 training rows (logarithms of word
counts: 3.74 ± 0.37 and 3.81 ± 0.54, correlated by 0.49). The words are from the bundled texts, or numbers. `--rows
FILE` uses real rows.
"""

import csv
import json
import math
import random
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from small_project import run_first_stages

from ratchet.config.base import Base, TinyModelSettings
from ratchet.config.machine import Machine
from ratchet.config.prepare import ColumnSettings, Prepare, SourceSettings, SplitSettings
from ratchet.config.settings import Settings
from ratchet.config.train import Train
from ratchet.storage.layout import ProjectLayout

BUNDLED = Path(__file__).parents[1] / "data"
QUESTION, ANSWER, TOGETHER = (3.74, 0.37), (3.81, 0.54), 0.49
"""Mean and standard deviation of the logarithm of the number of words, and the correlation of the two logarithms."""
MODEL_TEXTS = 2000
"""Number of rows on which the tokenizer of a random model is trained."""

SHAPES: dict[str, dict[str, int]] = {
    "10M": {"vocab_size": 4096, "hidden_size": 320, "intermediate_size": 864, "num_hidden_layers": 7,
            "num_attention_heads": 5, "num_key_value_heads": 5},
    "30M": {"vocab_size": 8192, "hidden_size": 512, "intermediate_size": 1376, "num_hidden_layers": 8,
            "num_attention_heads": 8, "num_key_value_heads": 8},
    "1B": {"vocab_size": 32_000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
           "num_attention_heads": 32, "num_key_value_heads": 4},
    "7B": {"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
           "num_attention_heads": 32, "num_key_value_heads": 32},
}  # fmt: skip
"""Shapes of Llamas with random weights, by their number of parameters."""


@dataclass(frozen=True)
class Cell:
    """Project and settings that all contenders train."""

    name: str
    model: str
    """Key of SHAPES, or `tiny`: the bundled base, pre-trained."""
    rows: int
    """Number of rows of the source files; some are left out for validation and test."""
    train: Train
    machine: Machine
    max_tokens: int
    peers: tuple[str, ...] = ("trl-packed", "trl-padded", "trainer")


def build(folder: Path, cell: Cell, given: Path | None) -> ProjectLayout:
    """Create a project and run stages base and prepare.

    Args:
        folder: folder of the project.
        cell: settings of the project.
        given: JSON lines with `question` and `answer`; None: generated rows.
    """
    layout = ProjectLayout(folder)
    for place in (layout.raw, layout.text, layout.tasks, layout.experiments, layout.mlruns):
        place.mkdir(parents=True)
    settings = _bundled(layout, cell) if cell.model == "tiny" else _asked(layout, cell, given)
    run_first_stages(layout, settings)
    return layout


def _bundled(layout: ProjectLayout, cell: Cell) -> Settings:
    """Copy the data of the project that `ratchet init` creates. Its base is pre-trained for fewer steps."""
    shutil.copytree(BUNDLED / "text", layout.text, dirs_exist_ok=True)
    with (BUNDLED / "raw" / "support.csv").open(newline="", encoding="utf-8") as stream:
        rows = list(islice(csv.reader(stream), cell.rows + 1))
    with (layout.raw / "support.csv").open("w", newline="", encoding="utf-8") as stream:
        csv.writer(stream).writerows(rows)
    return Settings(
        base=Base(tiny=TinyModelSettings(steps=40)),
        prepare=Prepare(
            sources=(SourceSettings(files="data/raw/support.csv"),),
            columns=ColumnSettings(prompt="request", response="intent"),
            task="labels", max_tokens=cell.max_tokens, split=SplitSettings(validation=0.1, test=0.15),
        ),
        train=cell.train, machine=cell.machine,
    )  # fmt: skip


def _asked(layout: ProjectLayout, cell: Cell, given: Path | None) -> Settings:
    """Create questions with worked answers, and a random model."""
    rows = list(_rows_of(given)) if given else list(rows_like_gsm8k())
    with (layout.raw / "rows.jsonl").open("w", encoding="utf-8") as stream:
        stream.writelines(json.dumps(row) + "\n" for row in rows[: cell.rows])
    model = layout.root / "model"
    save_model(model, cell.model, [text for row in rows[:MODEL_TEXTS] for text in row.values()])
    return Settings(
        base=Base(source="model"),
        prepare=Prepare(
            sources=(SourceSettings(files="data/raw/rows.jsonl"),),
            columns=ColumnSettings(prompt="question", response="answer"),
            task="text", max_tokens=cell.max_tokens, split=SplitSettings(validation=0.1, test=0.05),
        ),
        train=cell.train, machine=cell.machine,
    )  # fmt: skip


def _rows_of(path: Path) -> Iterator[dict[str, str]]:
    with path.open(encoding="utf-8") as stream:
        for line in stream:
            row = json.loads(line)
            yield {"question": row["question"], "answer": row["answer"]}


def rows_like_gsm8k(count: int = 4000) -> Iterator[dict[str, str]]:
    """Yield rows with the lengths of GSM8K."""
    draw = random.Random(8)
    words = sorted(set((BUNDLED / "text" / "help.txt").read_text(encoding="utf-8").split()))
    for _ in range(count):
        first, second = draw.gauss(0, 1), draw.gauss(0, 1)
        second = TOGETHER * first + math.sqrt(1 - TOGETHER**2) * second
        lengths = [max(4, round(math.exp(m + s * x))) for (m, s), x in ((QUESTION, first), (ANSWER, second))]
        question, answer = (
            " ".join(str(draw.randint(2, 999)) if draw.random() < 0.15 else draw.choice(words) for _ in range(length))
            for length in lengths
        )
        yield {"question": question, "answer": answer}


def save_model(path: Path, shape: str, texts: list[str]) -> None:
    """Save a Llama of this shape with random weights, and a tokenizer that is trained on the texts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils.logging import disable_progress_bar

    from ratchet.models import tiny_model

    described: dict[str, Any] = dict(SHAPES[shape])
    large = shape.endswith("B")
    tokenizer = tiny_model.train_tokenizer(texts, min(4096 if large else 10**9, described["vocab_size"]))
    config = LlamaConfig(
        **described, max_position_embeddings=4096, tie_word_embeddings=False, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if large else torch.float32)
    with torch.device("cuda" if large else "cpu"):
        model = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    disable_progress_bar()
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
