"""Compares training with TRL's SFTTrainer and transformers' Trainer: tokens per second, memory, first step, loss.

    pip install -c constraints.txt -e '.[benchmarks]'
    python benchmarks/train.py [--quick] [--rows FILE] [--threads N] [--cell NAME] [--json FILE]

All contenders train one epoch of the same prepared rows with the same base, adapter, learning rates and types, each in
a process of its own (train_cell.py), one after the other. The order rotates from round to round, and ratios are
computed within a round. Cells:

- `bundled`: the bundled requests and base, QLoRA (NF4), as `ratchet init` sets it up; answers of about five tokens;
- `questions`, `questions in 4 bits`: rows like GSM8K's (train_projects.py; real ones with `--rows`) and a Llama of ten
  million random parameters; LoRA in float32, and QLoRA;
- `limit`: plain LoRA on 30 million parameters, three rounds or more; useful FLOPs (train_limit.py) relative to the
  rate of torch.mm on the same shapes right before and after;
- on a GPU instead: QLoRA r=16 on random Llamas of 1B and 7B, 2,048 tokens packed; FLOPs relative to the data sheet's
  peak.

Contenders that batch as Ratchet does in a cell (packs or rows) compute as many sequences per step as Ratchet; the
others compute as many as hold about as many tokens. So all contenders have trained on the same tokens at the end, in
about as many steps. A micro-batch is a pack, or as many rows as hold about as many tokens: 8, the default of TRL and
Ratchet. Packs have `train.pack_tokens` tokens. On a CPU, Ratchet batches rows of similar length; in `limit`, packs.
Gradient checkpointing, which TRL enables by default, is off; `TRL as it comes` has it on. `TRL, grouped` has
`train_sampling_strategy="group_by_length"`. Throughput leaves out the first steps. Memory is that of the training
process (VmHWM; allocated memory on a GPU). The time of the first step counts from the command, as if the step had as
many tokens as later ones on average: the rows of the first step are not the same. Ratchet's code computes all
validation losses. Tokens per CPU second are reported in addition to tokens per second, because load by other
processes affects them less.
"""

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from report import finish
from report_rows import Row, at_least, at_most, middle, ratio, told
from train_cell import Told, missing
from train_limit import peak_of_gpu, useful_flops
from train_projects import Cell, build

from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.data import token_files
from ratchet.storage.layout import ProjectLayout

CELL_S = 3000
WARM_UP_STEPS = 3
NAMES = {
    "trl-packed": "TRL packed", "trl-padded": "TRL padded", "trl-grouped": "TRL, grouped",
    "trl-defaults": "TRL as it comes", "trainer": "Trainer", "unsloth-packed": "Unsloth packed",
}  # fmt: skip
SPEED = {"trl-packed": 1.15, "trl-padded": 2.0, "unsloth-packed": 1.0}
"""Smallest accepted ratio of trained tokens per second."""
CPU_MEMORY, GPU_MEMORY = 1.0, 0.8
LOSS = 0.02
"""Largest accepted relative excess of validation loss after the same tokens in another order."""
SAME_ORDER = 1e-5
OF_PEAK = 0.40
OF_MATMUL = {"AVX2": 0.85, "AVX512": 0.70}
"""Smallest accepted share of the rate of products, by torch's name for the CPU's instructions; for others .70."""
LIMIT_ROUNDS = 3
"""Smallest number of rounds of `limit`: its share varies with the memory bandwidth that other processes use."""
START = 0.5
"""Largest accepted ratio to TRL's time from the command to the first step, on a CPU."""
RATE_S = 4.0
"""Seconds for which matrix products are measured, before and after each training."""


def cpu_cells(quick: bool, threads: int) -> list[Cell]:
    """Return the cells on a CPU. A quick run has fewer rows, no questions in 4 bits, and fewer peers."""
    machine = Machine(device="cpu", threads=threads, micro_batch_size=8, micro_batch_tokens=1536)
    plain = Train(
        quantization="none", rank=16, alpha=32, epochs=1, batch_size=16, batching="by_length", pack_tokens=1024,
        learning_rate=1e-3, validate_every_steps=10**6,
    )  # fmt: skip
    bundled = plain.model_copy(update={"quantization": "nf4", "rank": 32, "alpha": 64.0, "batch_size": 32,
                                       "pack_tokens": 704})  # fmt: skip
    questions = Cell("questions", "10M", 192 if quick else 640, plain, machine, 512)
    if quick:
        questions = replace(questions, peers=("trl-packed", "trl-padded"))
    cells = [Cell("bundled", "tiny", 1000 if quick else 2400, bundled, replace_machine(machine, 16), 256), questions]
    if not quick:
        four = plain.model_copy(update={"quantization": "nf4"})
        cells.append(replace(questions, name="questions in 4 bits", train=four))
    packed = plain.model_copy(update={"batching": "packed", "batch_size": 3})
    limit = Cell("limit", "30M", 128 if quick else 320, packed, machine, 512, peers=() if quick else ("trl-packed",))
    return [*cells, limit]


def replace_machine(machine: Machine, micro_batch_size: int) -> Machine:
    """Return the same machine with other micro-batches."""
    return machine.model_copy(update={"micro_batch_size": micro_batch_size})


def gpu_cells(quick: bool) -> list[Cell]:
    """Return the cells on a GPU."""
    train = Train(
        rank=16, alpha=32, epochs=1, batch_size=8, batching="packed", pack_tokens=2048, learning_rate=2e-4,
        validate_every_steps=10**6,
    )  # fmt: skip
    machine = Machine(device="cuda", micro_batch_size=1)
    return [
        Cell(name, name, 1200, train, machine, 512, peers=("trl-packed", "unsloth-packed"))
        for name in (["1B"] if quick else ["1B", "7B"])
    ]


@dataclass(frozen=True)
class Figures:
    """Results of one contender in one round."""

    trained_s: float
    """Trained tokens per second."""
    input_s: float
    trained_cpu_s: float
    """Trained tokens per CPU second."""
    peak_bytes: int
    first_step_s: float
    """Seconds from the command to the end of a first step of average length."""
    loss: float
    seconds: float
    """Seconds of the steps over which throughput is computed."""
    cpu_s: float
    inputs: int
    """Input tokens of these steps."""
    trained: int
    losses: tuple[float, ...]

    @classmethod
    def of(cls, found: Told, begun: float) -> "Figures":
        """Compute the figures from a contender's report. `begun`: Unix time of its command in seconds."""
        warm = min(WARM_UP_STEPS, len(found.ended) - 1)
        trained, inputs = sum(found.trained_tokens[warm:]), sum(found.input_tokens[warm:])
        seconds, cpu_s = (series[-1] - series[warm - 1] for series in (found.ended, found.cpu_s))
        missing_tokens = inputs / len(found.input_tokens[warm:]) - found.input_tokens[0]
        first_step_s = found.ended[0] - begun + missing_tokens * seconds / inputs
        return cls(
            trained / seconds, inputs / seconds, trained / cpu_s if cpu_s else math.nan, found.peak_bytes,
            first_step_s, found.validation_loss, seconds, cpu_s, inputs, trained, tuple(found.losses),
        )  # fmt: skip


def run_cell(who: str, layout: ProjectLayout, threads: int) -> Figures:
    """Run one training. End the benchmark if it fails."""
    given = json.dumps({"who": who, "project": str(layout.root)})
    begun = time.time()
    printed = _process(["train_cell.py", given], threads)
    return Figures.of(Told(**json.loads(printed.splitlines()[-1])), begun)


def _process(line: Sequence[str], threads: int) -> str:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MLFLOW_", "RATCHET_", "DVC_"))}
    more = {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name(line[0])), *line[1:]], capture_output=True, text=True,
        env=clean | more, timeout=CELL_S, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{' '.join(line)}: exit code {done.returncode}\n{done.stderr[-3000:]}")
    return done.stdout


@dataclass
class Found:
    """Results of all rounds of a cell."""

    cell: Cell
    layout: ProjectLayout
    figures: dict[str, list[Figures]]
    rates: list[tuple[float, float]]
    """FLOP/s of matrix products before and after each training of Ratchet, by wall-clock and by CPU time; only for
    `limit`."""


def measure(cell: Cell, folder: Path, rounds: int, threads: int, rows: Path | None) -> Found:
    """Run all contenders in turns."""
    layout = build(folder / cell.name.replace(" ", "-"), cell, rows)
    present = ["ours", *_present(cell.peers)]
    found = Found(cell, layout, {who: [] for who in present}, [])
    for number in range(max(rounds, LIMIT_ROUNDS) if cell.name == "limit" else rounds):
        turn = number % len(present)
        for who in present[turn:] + present[:turn]:
            limited = cell.name == "limit" and who == "ours"
            before = [_rate(cell, threads)] if limited else []
            one = run_cell(who, layout, threads)
            found.figures[who].append(one)
            found.rates += [*before, _rate(cell, threads)] if limited else []
            _forget(layout)
            print(
                f"{cell.name:20} {who:16} {one.trained_s:9.1f} trained/s {one.input_s:9.1f} input/s "
                f"{one.trained_cpu_s:9.1f} trained/CPU s {one.peak_bytes / 2**20:7.0f} MiB first step "
                f"{one.first_step_s:5.1f} s loss {one.loss:.4f}", flush=True,
            )  # fmt: skip
    return found


def _forget(layout: ProjectLayout) -> None:
    """Remove the finished run, so that the next run of the same settings starts from the beginning."""
    shutil.rmtree(layout.runs, ignore_errors=True)


def _present(peers: Sequence[str]) -> Iterator[str]:
    for who in peers:
        if name := missing(who):
            print(f"skipped: {NAMES[who]}: {name} is not installed (pip install -c constraints.txt -e '.[benchmarks]')")
        else:
            yield who


def _rate(cell: Cell, threads: int) -> tuple[float, float]:
    tokens_of_micro_batch = cell.machine.micro_batch_size * 176  # about 176 tokens per GSM8K row
    given = {"shape": cell.model, "tokens": tokens_of_micro_batch, "threads": threads, "seconds": RATE_S}
    wall, cpu = json.loads(_process(["train_limit.py", json.dumps(given)], threads).splitlines()[-1])
    return wall, cpu


def judged(found: Found) -> Iterator[Row]:
    """Yield the rows of a cell."""
    name, ours = found.cell.name, found.figures["ours"]
    on_gpu = found.cell.machine.device == "cuda"
    yield told(f"{name}: trained tokens/s", *_middle([one.trained_s for one in ours]))
    yield told(f"{name}: input tokens/s", *_middle([one.input_s for one in ours]))
    yield told(f"{name}: peak memory, MiB", middle([one.peak_bytes / 2**20 for one in ours])[0])
    yield told(f"{name}: s to the first step", middle([one.first_step_s for one in ours])[0])
    for who, theirs in found.figures.items():
        if who != "ours":
            yield from _beside(f"{name}, ours / {NAMES[who]}", who, ours, theirs, on_gpu)
    if found.rates:
        yield from _of_limit(found)
    if on_gpu:
        yield from _of_peak(found)


def _beside(
    name: str, who: str, ours: Sequence[Figures], theirs: Sequence[Figures], on_gpu: bool
) -> Iterator[Row]:  # fmt: skip
    def of(field: str) -> tuple[float, float | None]:
        median, spread = ratio([getattr(one, field) for one in ours], [getattr(one, field) for one in theirs])
        return median, spread if len(ours) > 1 else None

    speed, spread = of("trained_s")
    label = f"{name}: trained tokens/s"
    yield at_least(label, speed, SPEED[who], spread) if who in SPEED else told(label, speed, spread)
    yield told(f"{name}: trained tokens/CPU s", *of("trained_cpu_s"))
    yield told(f"{name}: input tokens/s", *of("input_s"))
    label, peak = f"{name}: peak memory", of("peak_bytes")[0]
    yield at_most(label, peak, GPU_MEMORY if on_gpu else CPU_MEMORY) if who in SPEED else told(label, peak)
    label, start = f"{name}: s to the first step", of("first_step_s")[0]
    yield told(label, start) if on_gpu or who not in SPEED else at_most(label, start, START)
    yield at_most(f"{name}: validation loss after the same tokens, less 1", of("loss")[0] - 1, LOSS)


def _of_limit(found: Found) -> Iterator[Row]:
    """Yield the ratio of useful FLOP/s to the machine's FLOP/s."""
    for index, label in enumerate(("seconds", "cpu_s")):
        rate = _middle([one[index] for one in found.rates])
        if not index:
            yield told("limit: float32 products, GFLOP/s", rate[0] / 1e9, rate[1])
        for who, figures in found.figures.items():
            shares = [_flops(found, one) / getattr(one, label) / rate[0] for one in figures]
            if who == "ours" and not index:
                target = OF_MATMUL.get(torch.backends.cpu.get_cpu_capability(), 0.70)
                yield at_least("limit: useful FLOP/s of ours / of products", *_with(target, _middle(shares)))
            else:
                by = "" if not index else ", by CPU time"
                name = "ours" if who == "ours" else NAMES[who]
                yield told(f"limit: useful FLOP/s of {name} / of products{by}", *_middle(shares))


def _middle(values: Sequence[float]) -> tuple[float, float | None]:
    """Return median and spread; the spread of a single value is None."""
    median, spread = middle(values)
    return median, spread if len(values) > 1 else None


def _with(target: float, measured: tuple[float, float | None]) -> tuple[float, float, float | None]:
    return measured[0], target, measured[1]


def _flops(found: Found, one: Figures) -> float:
    """Return useful FLOPs of the timed steps: those of the epoch times the steps' share of its tokens."""
    rows = token_files.load_rows(found.layout.data, "train")
    whole = useful_flops(
        found.cell.model, found.cell.train.rank, rows.lengths.tolist(), rows.count_trained(range(len(rows)))
    )
    return whole * one.inputs / int(rows.lengths.sum())


def _of_peak(found: Found) -> Iterator[Row]:
    name = torch.cuda.get_device_name()
    peak = peak_of_gpu(name)
    if peak is None:
        print(f"skipped: model FLOP utilisation: the peak of {name} is not known here")
        return
    shares = [_flops(found, one) / one.seconds / peak for one in found.figures["ours"]]
    label = f"{found.cell.name}: model FLOP utilisation, of dense bfloat16"
    yield (
        at_least(label, *_with(OF_PEAK, _middle(shares))) if found.cell.model == "7B" else told(label, *_middle(shares))
    )


def same_order(found: Found, threads: int) -> Row:
    """Return a row for the largest relative difference between the losses of a step, Ratchet's and Trainer's, with the
    same rows in every step."""
    theirs = run_cell("trainer-in-order", found.layout, threads)
    pairs = list(zip(found.figures["ours"][0].losses, theirs.losses, strict=True))
    worst = max(abs(a / b - 1) for a, b in pairs)
    name = f"{found.cell.name}: difference from Trainer's loss of a step, {len(pairs)} steps"
    return at_most(name, worst, SAME_ORDER)


def main() -> int:
    """Run the benchmark. The exit code is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one round, fewer rows and cells")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="JSON lines of question and answer, such as GSM8K's")
    parser.add_argument("--threads", type=int, default=1, help="threads of torch, for all contenders (default: 1)")
    parser.add_argument("--cell", metavar="NAME", help="run only this cell")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    given = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    cells = gpu_cells(given.quick) if on_gpu else cpu_cells(given.quick, given.threads)
    if not on_gpu:
        print("skipped: Llamas of 1B and 7B, Unsloth: there is no CUDA device")
    if not given.rows:
        print("rows like GSM8K's: made here, with its lengths; --rows FILE takes real ones")
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="ratchet-train-") as folder:
        for cell in cells:
            if given.cell in (None, cell.name):
                found = measure(cell, Path(folder), 1 if given.quick else 3, given.threads, given.rows)
                rows += judged(found)
                if cell.name == "bundled" or (cell.name == "questions" and not given.quick):
                    rows.append(same_order(found, given.threads))
    return finish(rows, given.json)


if __name__ == "__main__":
    sys.exit(main())
