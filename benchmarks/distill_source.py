"""Compares a teacher's probabilities on disk with a teacher in memory: time of a micro-batch, and loss.

    pip install -c constraints.txt -e .
    python benchmarks/distill_source.py [--quick] [--json FILE]

The benchmark computes loss and gradient of one micro-batch of a small student (random weights, LoRA on all layers, one
thread, float32). Four ways take turns: without a teacher; with the teacher's 32 most probable tokens from disk (stored
before, as `ratchet distill` does); with the same tokens from a teacher in memory; and with all tokens from a teacher in
memory. Ratios are medians over rounds. The cost of storing the probabilities is reported as the number of passes over
the rows that compensate for it.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import finish
from report_rows import Row, at_most, ratio, told
from transformers import LlamaConfig, LlamaForCausalLM

from ratchet.config.train import DistillSettings, Train
from ratchet.data.batches import TokenRows
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.models import adapters, chunked_loss, model_spec
from ratchet.models.device import Model, use_threads
from ratchet.models.loss import SequenceBatch
from ratchet.models.teacher import TeacherCandidate, TeacherModel
from ratchet.storage import files
from ratchet.storage.records.data import DISTILLATION_CARD, DistillationCard
from ratchet.training.distillation import (
    KIND,
    OnlineTeacherReader,
    TeacherShardPlan,
    TeacherShardReader,
    TeacherShardWriter,
)

CPU = torch.device("cpu")
VOCABULARY, TOP_K = 8000, 32
STUDENT = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 4}
TEACHER = {"hidden_size": 320, "intermediate_size": 960, "num_hidden_layers": 8, "num_attention_heads": 5}
AT_ONCE, TOKENS = 8, 96
SIZES = {True: {"rounds": 9, "rows": 64}, False: {"rounds": 40, "rows": 256}}
"""Number of rounds and rows by `quick`."""
LARGEST_DIFFERENCE = 1e-3
"""Limit for the difference of losses with the same tokens from disk and from memory. Probabilities on disk have 16
bits."""

Ask = Callable[[list[list[int]], SequenceBatch], Any]


def settings(top_k: int | None) -> Train:
    """Return the settings of a student that learns from a teacher in the same process."""
    distill = DistillSettings(teacher="teacher", mode="online", temperature=2.0, top_k=top_k)
    return Train(quantization="none", rank=8, alpha=16, distill=distill)


def random_rows(count: int) -> TokenRows:
    """Return random rows. Half of the tokens of each row are trained on."""
    draw = np.random.default_rng(1)
    ids = draw.integers(3, VOCABULARY, (count, TOKENS)).tolist()
    return TokenRows.from_lists(ids, [[IGNORE_INDEX] * (TOKENS // 2) + row[TOKENS // 2 :] for row in ids])


def model_of(shape: dict[str, int], spread: float) -> LlamaForCausalLM:
    """Return a model with random weights. The larger `spread` is, the more peaked are the model's distributions."""
    torch.manual_seed(1)
    return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, initializer_range=spread, **shape))


def on_disk(folder: Path, found: TeacherCandidate, rows: TokenRows) -> tuple[TeacherShardReader, float]:
    """Store the teacher's probabilities of all rows as `ratchet distill` does. Return a reader and the seconds."""
    chosen, plan, out = settings(TOP_K), TeacherShardPlan.from_rows(rows), folder / "distill"
    begun_s = time.perf_counter()
    shards = TeacherShardWriter(folder / "shards", plan)
    shards.write(TeacherModel(found, chosen, CPU), rows, AT_ONCE, lambda _: None)
    with files.sealed_directory(out, KIND) as scratch:
        shards.gather(scratch)
        DistillationCard(
            digest="d", teacher="teacher", teacher_digest="d", data_digest="d", quantization="none",
            compute_dtype="float32", temperature=2.0, top_k=TOP_K, rows=plan.rows, positions=plan.positions,
            tokens=VOCABULARY, teacher_rows=VOCABULARY, base_rows=VOCABULARY, teacher_loss=0.0, left_out=0.0,
            teacher_parameters=found.spec.parameters, base_parameters=1,
        ).save(scratch / DISTILLATION_CARD)  # fmt: skip
    return TeacherShardReader(out, rows, chosen.distill, "d"), time.perf_counter() - begun_s


def one(model: Model, ask: Ask | None, rows: TokenRows, number: int) -> tuple[float, float]:
    """Return seconds and loss of a micro-batch."""
    sequences = [[(AT_ONCE * number + place) % len(rows)] for place in range(AT_ONCE)]
    begun_s = time.perf_counter()
    batch = SequenceBatch.from_sequences(rows, sequences, CPU)
    loss = chunked_loss.forward_backward(
        model, batch, 1e-3, teacher_targets=None if ask is None else ask(sequences, batch)
    )
    seconds = time.perf_counter() - begun_s
    model.zero_grad()
    return seconds, float(loss)


def measured(folder: Path, rounds: int, count: int) -> list[Row]:
    """Measure all ways in turns. The order rotates from round to round."""
    rows = random_rows(count)
    model_of(TEACHER, 0.08).save_pretrained(folder / "teacher")
    found = TeacherCandidate(folder / "teacher", model_spec.load(folder / "teacher"), VOCABULARY, VOCABULARY)
    stored, asking_s = on_disk(folder, found, rows)
    ways: dict[str, Ask | None] = {"none": None, "disk": stored.get_targets}
    ways |= {
        name: OnlineTeacherReader(found, settings(k), rows, CPU).get_targets
        for name, k in (("memory", TOP_K), ("all", None))
    }
    model = adapters.attach(model_of(STUDENT, 0.02), settings(TOP_K), "base", (), rounds)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    losses: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(-1, rounds):
        names = list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]
        for name in names:
            took_s, loss = one(model, ways[name], rows, max(0, number))
            if number >= 0:  # the first round is a warm-up
                seconds[name].append(took_s)
                losses[name].append(loss)
    apart = max(abs(a - b) / abs(b) for a, b in zip(losses["disk"], losses["memory"], strict=True))
    dearer_s = statistics.median(seconds["memory"]) - statistics.median(seconds["disk"])
    pays = asking_s / (dearer_s * count / AT_ONCE) if dearer_s > 0 else float("inf")
    return [
        at_most("loss, disk and memory: largest difference", apart, LARGEST_DIFFERENCE),
        told("micro-batch without a teacher, s", statistics.median(seconds["none"])),
        told("micro-batch, disk / none", *ratio(seconds["disk"], seconds["none"])),
        told("micro-batch, memory / none", *ratio(seconds["memory"], seconds["none"])),
        told("micro-batch, memory / disk", *ratio(seconds["memory"], seconds["disk"])),
        told("micro-batch, every token / disk", *ratio(seconds["all"], seconds["disk"])),
        told("passes over the rows until storing probabilities has paid", pays),
        told("parameters: teacher / student", found.spec.parameters / sum(p.numel() for p in model.parameters())),
    ]


def main() -> int:
    """Run the benchmark. The exit code is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and rows")
    parser.add_argument("--json", type=Path, help="file for the rows")
    options = parser.parse_args()
    use_threads(1)
    size = SIZES[options.quick]
    with tempfile.TemporaryDirectory() as work:
        return finish(measured(Path(work), size["rounds"], size["rows"]), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
