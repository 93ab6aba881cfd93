"""Compares preference tuning (DPO) with TRL's DPOTrainer: trained tokens per second and memory.

    pip install -c constraints.txt -e '.[benchmarks]'
    python benchmarks/preference.py [--quick] [--pairs FILE] [--threads N] [--json FILE]

Both train one epoch of the same pairs with the same base, adapter, rates and types, each in a process of its own
(train_cell.py), one after the other; the order changes from round to round, and ratios are computed within a round. The
base is a Llama of ten million random parameters, with LoRA in float32. The pairs have the lengths of GSM8K's rows
(train_projects.py); the rejected answer is another row's. `--pairs` takes real ones: JSON lines of prompt, chosen and
rejected. A micro-batch has 4 pairs, so 8 rows, in both. Batches hold pairs of similar length, as on a CPU by default;
DPOTrainer shuffles. Throughput leaves out the first steps. Memory is that of the training process (VmHWM). That the
losses are equal is shown by tests/proofs/test_preference_losses.py.
"""

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from report import finish
from report_rows import Row, at_least, at_most, middle, ratio, told
from small_project import run_first_stages
from train import Figures, run_cell
from train_cell import missing
from train_projects import MODEL_TEXTS, rows_like_gsm8k, save_model

from ratchet.config.base import Base
from ratchet.config.machine import Machine
from ratchet.config.prepare import Prepare, SourceSettings, SplitSettings
from ratchet.config.settings import Settings
from ratchet.config.train import Train
from ratchet.storage.layout import ProjectLayout

SPEED, MEMORY = 1.5, 0.8
"""Smallest accepted ratio of trained tokens per second, and largest accepted ratio of memory."""


def build(folder: Path, given: Path | None, count: int, threads: int) -> ProjectLayout:
    """Create a project with pairs and a random model, and run stages base and prepare."""
    layout = ProjectLayout(folder)
    for place in (layout.raw, layout.text, layout.tasks, layout.experiments, layout.mlruns):
        place.mkdir(parents=True)
    questions = list(rows_like_gsm8k())
    if given:
        pairs = [json.loads(line) for line in given.read_text(encoding="utf-8").splitlines()][:count]
    else:
        answers = [row["answer"] for row in questions]
        pairs = [
            {"prompt": row["question"], "chosen": row["answer"], "rejected": answers[-1 - k]}
            for k, row in enumerate(questions[:count])
        ]
    (layout.raw / "rows.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")
    save_model(layout.root / "model", "10M", [text for row in questions[:MODEL_TEXTS] for text in row.values()])
    settings = Settings(
        base=Base(source="model"),
        prepare=Prepare(
            sources=(SourceSettings(files="data/raw/rows.jsonl"),), task="preferences", max_tokens=512,
            split=SplitSettings(validation=0.05, test=0.05),
        ),
        train=Train(
            objective="dpo", quantization="none", rank=16, alpha=32, epochs=1, batch_size=16, batching="by_length",
            learning_rate=1e-4, validate_every_steps=10**6,
        ),
        machine=Machine(device="cpu", threads=threads, micro_batch_size=4),
    )  # fmt: skip
    run_first_stages(layout, settings)
    return layout


def judged(ours: list[Figures], theirs: list[Figures]) -> list[Row]:
    """Return the rows of the report."""

    def of(name: str) -> tuple[float, float | None]:
        median, spread = ratio([getattr(one, name) for one in ours], [getattr(one, name) for one in theirs])
        return median, spread if len(ours) > 1 else None

    speed, spread = of("trained_s")
    return [
        told("trained tokens/s", middle([one.trained_s for one in ours])[0]),
        told("peak memory, MiB", middle([one.peak_bytes / 2**20 for one in ours])[0]),
        at_least("ours / DPOTrainer: trained tokens/s", speed, SPEED, spread),
        told("ours / DPOTrainer: trained tokens/CPU s", *of("trained_cpu_s")),
        at_most("ours / DPOTrainer: peak memory", of("peak_bytes")[0], MEMORY),
        told("ours / DPOTrainer: s to the first step", of("first_step_s")[0]),
    ]


def main() -> int:
    """Run the benchmark. The exit code is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round, fewer pairs")
    parser.add_argument("--pairs", type=Path, metavar="FILE", help="JSON lines of prompt, chosen and rejected")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch, for both (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    given = parser.parse_args()
    if name := missing("trl-dpo"):
        print(f"skipped: DPOTrainer: {name} is not installed (pip install -c constraints.txt -e '.[benchmarks]')")
        return finish([], given.json)
    figures: dict[str, list[Figures]] = {"ours": [], "trl-dpo": []}
    with tempfile.TemporaryDirectory(prefix="ratchet-preference-") as folder:
        layout = build(Path(folder) / "project", given.pairs, 120 if given.quick else 480, given.threads)
        for number in range(1 if given.quick else 3):
            for who in list(figures)[:: -1 if number % 2 else 1]:
                one = run_cell(who, layout, given.threads)
                figures[who].append(one)
                shutil.rmtree(layout.runs, ignore_errors=True)
                print(
                    f"{who:8} {one.trained_s:8.1f} trained/s {one.trained_cpu_s:8.1f} trained/CPU s "
                    f"{one.peak_bytes / 2**20:6.0f} MiB first step {one.first_step_s:5.1f} s", flush=True,
                )  # fmt: skip
    return finish(judged(figures["ours"], figures["trl-dpo"]), given.json)


if __name__ == "__main__":
    sys.exit(main())
