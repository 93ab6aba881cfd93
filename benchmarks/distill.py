"""Compares a small student with and without a teacher, on the bundled task with few labels.

    pip install -c constraints.txt -e .
    python benchmarks/distill.py [--quick] [--json FILE] [--keep FOLDER] [--validation]

Both bases are tiny. They are trained on the same texts (help pages and training prompts, without labels), so they have
the same tokenizer. The teacher is trained on the labels of one half of the rows. Of the other half, the students have
few labels, and prompts without labels. There are four students; all else is equal, including steps and validation rows:

- `alone`: learns from the few labels; - `probabilities`: learns from the same rows, with the teacher's probabilities
(`train.distill`);
- `answers`: learns from the few labels and the teacher's answers to the unlabelled prompts (`ratchet generate`,
  `ratchet select`);
- `both`: learns from the rows of `answers`, with the teacher's probabilities.

Each student uses the learning rate of `rates` that gave its first seed the lowest validation loss, and keeps the
checkpoint with the lowest validation loss. Intervals are paired over rows and seeds (quality_gate/finalists.py). The
sizes and the values of DISTILL, SAMPLES and AGREEMENT were chosen on validation rows (`--validation` judges on them);
then the test rows were judged once. The time per answer is measured one row at a time, in turns with the teacher.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from distill_scores import Compared, Scores, compared, means, scores, seconds_per_answer
from distill_world import (
    DISTILLED,
    LABELLED,
    TEACHER,
    Answers,
    Division,
    add_distilled,
    asked,
    bundled,
    divide,
    keep_model,
    project,
    rows_in,
    settings_of,
    train_of,
    trained,
    with_adapter,
    with_base_of,
)
from report import finish
from report_rows import Row, at_most, told

from ratchet.config.base import TinyModelSettings
from ratchet.config.settings import Settings
from ratchet.config.train import DistillSettings
from ratchet.data import token_files
from ratchet.data.batches import TokenRows
from ratchet.models import base_model
from ratchet.models.device import Model
from ratchet.stages.distill import distill
from ratchet.stages.project import Project
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout

Split = Literal["validation", "test"]
SPLITS: tuple[Split, ...] = ("validation", "test")
TIMED = 60
"""Number of rows for which the time per answer is measured."""
TEACHER_RATE = 3e-3
TEACHER_BATCH_ROWS, BATCH_ROWS = 32, 16
SAMPLES, AGREEMENT = 3, 1.0
"""SAMPLES: answers to each prompt. AGREEMENT: share of them that must agree; otherwise the prompt is left out."""
DISTILL = DistillSettings(teacher=TEACHER, weight=0.5, temperature=1.0, top_k=64)

ARMS: dict[str, tuple[str, DistillSettings | None]] = {
    "alone": ("labels", None),
    "probabilities": ("labels", DISTILL),
    "answers": ("distilled", None),
    "both": ("distilled", DISTILL),
}
"""For each student: the name of its rows, and the teacher's probabilities, if it uses them."""
COMPARED = (
    Compared("probabilities", "alone", ("loss",)),
    Compared("answers", "alone", ("accuracy", "loss")),
    Compared("both", "alone", ("accuracy", "loss")),
    Compared("both", "answers"),
)
"""Pairs that are compared. The accuracy of `probabilities` has no target: on validation rows it did not change
reliably."""
MOST_SIZE, MOST_TIME = 0.25, 0.75
"""Targets for the ratio of student to teacher: parameters, and time per answer."""


@dataclass(frozen=True)
class Size:
    """Sizes of data, models and trainings of a mode."""

    labelled: int
    """Number of rows that have labels for the students."""
    unlabelled: int
    """Largest number of prompts that only the teacher labels."""
    validation: int
    """Number of labelled rows that select learning rate and checkpoint."""
    teacher: TinyModelSettings
    student: TinyModelSettings
    teacher_epochs: float
    steps: int
    """Optimizer steps of each student."""
    rates: tuple[float, ...]
    seeds: tuple[int, ...]


SIZES = {
    True: Size(
        160, 600, 150,
        TinyModelSettings(vocab_size=1024, hidden_size=128, intermediate_size=256, layers=3, heads=4, steps=250),
        TinyModelSettings(vocab_size=1024, hidden_size=64, intermediate_size=128, layers=2, heads=4, steps=250),
        6, 250, (3e-3,), (0, 1),
    ),
    False: Size(
        200, 1600, 200,
        TinyModelSettings(layers=4), TinyModelSettings(hidden_size=128, intermediate_size=256, layers=2, steps=400),
        9, 500, (1e-3, 3e-3), (0, 1, 2, 3, 4),
    ),
}  # fmt: skip
"""Sizes by `quick`."""


@dataclass(frozen=True)
class DistilledProjects:
    """Projects of the students and rows of the splits, after the teacher has answered."""

    size: Size
    division: Division
    teacher: Model
    answers: Answers
    projects: dict[str, ProjectLayout]
    """Keys: names of the rows that the students learn from."""
    rows: dict[Split, TokenRows]
    """Validation and test rows."""
    pad: int


def prepared(work: Path, size: Size) -> DistilledProjects:
    """Train the teacher, generate its answers, and create the students' projects."""
    division = divide(bundled(), size.labelled, size.unlabelled, size.validation)
    read = [*division.learned, *division.judged]
    big = settings_of(size.teacher, train_of(TEACHER_RATE, size.teacher_epochs, TEACHER_BATCH_ROWS))
    with_labels = project(work / "teacher", big, read, [*division.teachers, *division.judged])
    begun = time.monotonic()
    teacher = with_adapter(with_labels, big, trained(with_labels, big))
    print(f"teacher: trained in {time.monotonic() - begun:.0f} s", flush=True)
    place = keep_model(teacher, with_labels)
    answers = asked(with_labels, place, division, SAMPLES, AGREEMENT)
    own = [*division.labelled, *division.judged]
    labels = project(work / "labels", students(size), read, own)
    with_base_of(labels, work / "distilled")
    add_distilled(ProjectLayout(work / "distilled"), answers)
    distilled = project(work / "distilled", students(size, (LABELLED, DISTILLED)), read, own)
    rows: dict[Split, TokenRows] = {name: token_files.load_rows(with_labels.data, name) for name in SPLITS}
    for layout in (labels, distilled):
        if not (layout.root / TEACHER).exists():
            files.link_tree(place, layout.root / TEACHER)
        print(
            distill(Project.from_parts(layout, students(size, teacher=DISTILL)), forecast=False, on_progress=print),
            flush=True,
        )
        for name, one in rows.items():
            if not np.array_equal(token_files.load_rows(layout.data, name).input_ids, one.input_ids):
                raise SystemExit(f"{layout.data}: its {name} rows are others than the teacher's")
    pad = base_model.load_tokenizer(place).pad_token_id
    return DistilledProjects(size, division, teacher, answers, {"labels": labels, "distilled": distilled}, rows, pad)


def students(
    size: Size, tables: Sequence[str] = (LABELLED,), rate: float = 1e-3, seed: int = 0,
    teacher: DistillSettings | None = None,
    rows: int = BATCH_ROWS,
) -> Settings:  # fmt: skip
    """Return the settings of a student for this many rows. With more rows there are fewer epochs, so that steps are
    equal."""
    epochs = size.steps * BATCH_ROWS / rows
    return settings_of(size.student, train_of(rate, epochs, BATCH_ROWS, seed, teacher), tables)


def student(there: DistilledProjects, arm: str, rate: float, seed: int) -> Model:
    """Train one student."""
    name, teacher = ARMS[arm]
    layout = there.projects[name]
    settings = students(there.size, rate=rate, seed=seed, teacher=teacher, rows=rows_in(layout))
    return with_adapter(layout, settings, trained(layout, settings))


def measure(there: DistilledProjects, judged: Split) -> list[Row]:
    """Train all students, and return all rows."""
    size, rows = there.size, there.rows
    chosen: dict[str, float] = {}
    found = {"teacher": [scores(there.teacher, rows[judged])]}
    models = {"teacher": there.teacher}
    print(f"teacher: {found['teacher'][0].accuracy:.3f} right of {judged}", flush=True)
    for arm in ARMS:
        losses = {
            rate: scores(student(there, arm, rate, size.seeds[0]), rows["validation"]).loss for rate in size.rates
        }
        print(f"{arm}: validation loss by learning rate {losses}", flush=True)
        chosen[arm] = min(losses, key=losses.__getitem__)
        found[arm] = []
        for seed in size.seeds:
            models["student"] = student(there, arm, chosen[arm], seed)
            found[arm].append(one := scores(models["student"], rows[judged]))
            print(f"{arm}, seed {seed}: {one.accuracy:.3f} right, {one.loss:.3f} nats a row", flush=True)
    return [*setting(there, chosen, judged), *gains(found, rows[judged]), *costs(there, models)]


def setting(there: DistilledProjects, chosen: dict[str, float], judged: Split) -> Iterator[Row]:
    """Yield rows for the data that each model was trained on."""
    yield told(f"{judged} rows", len(there.rows[judged]))
    yield told("labelled rows of the teacher", len(there.division.teachers))
    for name, layout in there.projects.items():
        yield told(f"training rows of students: {name}", rows_in(layout))
    yield told("prompts answered by the teacher", there.answers.asked)
    yield told("teacher's answers that are right", there.answers.right)
    yield told("teacher's answers used for training", there.answers.kept)
    yield told("right answers among them", there.answers.kept_right)
    for arm, rate in chosen.items():
        yield told(f"learning rate: {arm}", rate)


def gains(found: dict[str, list[Scores]], rows: TokenRows) -> Iterator[Row]:
    """Yield rows for the gain from the teacher."""
    counts = [float(rows.count_trained([row])) for row in range(len(rows))]
    for what, tokens_of in (("accuracy", None), ("loss", counts)):
        values = {who: [one.right if tokens_of is None else one.nats for one in all_] for who, all_ in found.items()}
        yield from means(what, values, tokens_of)
        for pair in COMPARED:
            yield from compared(what, values, pair, tokens_of)


def costs(there: DistilledProjects, models: dict[str, Model]) -> Iterator[Row]:
    """Compare size and time of the student with those of the teacher."""
    sizes = {name: sum(one.numel() for one in model.parameters()) for name, model in models.items()}
    times = seconds_per_answer(models, there.rows["test"], there.pad, TIMED)
    for name in models:
        yield told(f"parameters: {name}", sizes[name])
        yield told(f"time per answer: {name}, ms", 1e3 * statistics.median(times[name]))
    yield at_most("parameters: student / teacher", sizes["student"] / sizes["teacher"], MOST_SIZE)
    pairs = [a / b for a, b in zip(times["student"], times["teacher"], strict=True)]
    yield at_most("time per answer: student / teacher, median", statistics.median(pairs), MOST_TIME)


def main() -> int:
    """Run the benchmark. The exit code is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="smaller models, fewer rows: minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="work in this folder, keep and reuse it")
    parser.add_argument("--validation", action="store_true", help="judge by validation rows: to choose settings")
    options = parser.parse_args()
    torch.set_num_threads(1)
    judged: Split = "validation" if options.validation else "test"
    with tempfile.TemporaryDirectory(prefix="ratchet-distill-") as folder:
        there = prepared(options.keep or Path(folder), SIZES[options.quick])
        return finish(measure(there, judged), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
