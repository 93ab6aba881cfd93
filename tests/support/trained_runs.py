"""Creates run directories of any length without training, for tests of reports about runs."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ratchet.config.machine import Machine
from ratchet.config.train import Objective, Train
from ratchet.runs.directory import RunPaths, RunSpec, TrainingLaunchSpec
from ratchet.runs.journal import JournalEvent
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.evaluation import ValidationMetric, ValidationScores, validation_scores_path
from ratchet.storage.records.training import MemoryForecast, PhaseMemory, TrainReport

BASE, DATA, OTHER_DATA = "b" * 64, "e" * 64, "f" * 64
BEGUN = 1_760_000_000.0
STEP_S, VALIDATION_S = 0.5, 2.0
INPUT_TOKENS, TRAINED_TOKENS = 512, 96
HOSTILE = '<script>alert("1")</script><img src=x onerror=alert(1)> & \' \x00\x1b[31m \u202e </svg></style>'


@dataclass(frozen=True)
class Training:
    """Description of a training whose run directory is created."""

    steps: int = 60
    done: int | None = None
    """Number of completed steps; None: all."""
    seed: int = 0
    rank: int = 8
    objective: Objective = "sft"
    floor: float = 1.0
    """Loss to which the training converges."""
    data: str = DATA
    restarts: Sequence[tuple[int, int]] = ()
    """For each restart: the step at which an attempt died, and the step from which the next attempt resumed."""
    spike: tuple[int, float] | None = None
    """Step and loss of a loss spike."""
    word: str = "killed by signal 9"
    """Reason that is recorded for each death."""
    begun: float = BEGUN
    """Time of the first event, in seconds since 1970."""

    @property
    def spec(self) -> RunSpec:
        """Return the spec of the run."""
        train = Train(
            rank=self.rank, alpha=2.0 * self.rank, seed=self.seed, batch_size=16, objective=self.objective
        )  # fmt: skip
        return RunSpec(train=train, data_digest=self.data, base_digest=BASE)

    @property
    def last(self) -> int:
        """Return the last completed step."""
        return self.steps if self.done is None else self.done

    def loss(self, step: int) -> float:
        """Return the training loss at a step."""
        if self.spike is not None and step == self.spike[0]:
            return self.spike[1]
        noise = random.Random(1000 * self.seed + step).uniform(-0.1, 0.1)
        return self.floor + 2.0 * math.exp(-step / 15) + noise

    def validation_loss(self, step: int) -> float:
        """Return the validation loss at a step."""
        return self.floor + 0.1 + 2.0 * math.exp(-step / 15) + 0.01 * (self.seed % 5)


def events(one: Training) -> Iterator[JournalEvent]:
    """Yield the journal events of a training."""
    places = [(0, 0), *one.restarts]
    for attempt, (_, start) in enumerate(places, start=1):
        end = places[attempt][0] if attempt < len(places) else one.last

        def said(kind: str, attempt: int = attempt, **data: Any) -> JournalEvent:
            return JournalEvent(kind, one.begun + data.get("step", 0) * STEP_S, attempt, data)

        yield said("attempt_started", pid=1, code_version="0.1.0+c0de")
        yield said(
            "worker_ready", start_step=start, planned_steps=one.steps, trainable_parameters=1_000,
            total_parameters=50_000,
            device="cpu", compute_dtype="float32", threads=2, ranks=1,
        )  # fmt: skip
        yield said("memory_peak", phase="steady", peak_bytes=300 * 2**20, allocated_bytes=0, host_bytes=0, device="cpu",
                   device_bytes=4 * 2**30)  # fmt: skip
        for step in range(start + 1, end + 1):
            yield said(
                "step", step=step, loss=one.loss(step), learning_rate=1e-3 * (1 - step / (2 * one.steps)),
                grad_norm=0.5 + 0.3 * math.sin(step), trained_tokens=TRAINED_TOKENS, input_tokens=INPUT_TOKENS,
                step_s=STEP_S, batch="0" * 12,
            )  # fmt: skip
            if step % 10 == 0:
                loss = one.validation_loss(step)
                yield said("validation", step=step, loss=loss, tokens=500, seconds=VALIDATION_S, improved=True)
                yield said("checkpoint_saved", step=step, is_best=True, size_bytes=10, bytes_written=10, bytes_linked=0,
                           blocked_s=0.01, seconds=0.1)  # fmt: skip
        if attempt < len(places):
            data = {"exit_code": -9, "decision": "Retry", "text": one.word, "failure_class": "killed"}
            yield JournalEvent("worker_exited", BEGUN, attempt, data)
    if one.last == one.steps:
        yield JournalEvent("finished", BEGUN + one.last, len(places),
                    {"step": one.last, "reason": "completed", "adapter_digest": "d" * 64})  # fmt: skip


def lay(layout: ProjectLayout, one: Training) -> str:
    """Write the run directory of a training to a project. Return the run id."""
    spec = one.spec
    paths = RunPaths(layout.runs / spec.run_id)
    files.make_directory(paths.root)
    spec.save(paths.spec)
    files.write_json(paths.format, {"format": 2})
    TrainingLaunchSpec(machine=Machine(device="cpu"), base_path="model", data_path="data", base=card()).save(
        paths.launch
    )
    paths.journal.write_bytes(b"".join(event.line() for event in events(one)))
    phases = tuple(PhaseMemory(phase=phase, parts={"weights": 100 * 2**20, "activations": 150 * 2**20})
                   for phase in ("loaded", "steady"))  # fmt: skip
    MemoryForecast(
        device="cpu", rows=8, row_tokens=64, learned_tokens=8, activation_checkpointing=False, phases=phases,
        host_bytes=250 * 2**20, trainable_parameters=1_000, total_parameters=50_000,
    ).save(paths.forecast)  # fmt: skip
    if one.last == one.steps:
        files.make_directory(paths.result)
        report(one).save(paths.result / "train.json")
    return spec.run_id


def card() -> BaseCard:
    """Return the card of the base."""
    return BaseCard(
        source="acme/model", revision="0123abcd", digest=BASE, files={"model.safetensors": "a" * 64},
        architecture="LlamaForCausalLM", parameters=49_000, licence="apache-2.0",
    )  # fmt: skip


def report(one: Training) -> TrainReport:
    """Return the report of a finished training."""
    losses = {step: one.validation_loss(step) for step in range(10, one.last + 1, 10)}
    best = min(losses, key=lambda step: losses[step], default=0)
    return TrainReport(
        run_id=one.spec.run_id, adapter_digest=adapter(one), base_digest=BASE, data_digest=one.data, steps=one.last,
        planned_steps=one.steps, best_step=best, kept_step=best, validation_loss=losses, final_train_loss=1.0,
        trained_tokens=TRAINED_TOKENS * one.last, input_tokens=INPUT_TOKENS * one.last, trainable_parameters=1_000,
        total_parameters=50_000,
    )  # fmt: skip


def adapter(one: Training) -> str:
    """Return the digest of the adapter."""
    return (one.spec.run_id * 6)[:64]


def score(layout: ProjectLayout, one: Training, right: float, rows: int = 200, **changes: Any) -> None:
    """Write scores of the adapter on validation rows in the form of scores of finalists. `right` is the share of right
    rows."""
    ids = tuple(f"v{row:04d}" for row in range(rows))
    draw = random.Random(one.seed)
    values: dict[ValidationMetric, tuple[float, ...]] = {
        "accuracy": tuple(float(row < right * rows) for row in range(rows)),
        "validation_loss": tuple(3.0 * (1.2 - right) + draw.uniform(0.0, 1.5) for _ in ids),
    }
    plain: dict[str, Any] = {
        "request_digest": "0123456789ab", "run_id": one.spec.run_id, "adapter_digest": adapter(one),
        "data_digest": one.data,
        "base_digest": BASE, "rows": 0, "ids": ids, "groups": (None,) * rows, "tokens": (3,) * rows, "values": values,
        "metrics": {name: sum(found) / rows for name, found in values.items()}, "numerics": {"device": "cpu"},
    }  # fmt: skip
    found = ValidationScores.model_validate({**plain, **changes}).sealed()
    found.save(validation_scores_path(layout.runs / one.spec.run_id, found.request_digest))


def seeds(one: Training, count: int) -> list[Training]:
    """Return the same training with other seeds."""
    return [replace(one, seed=one.seed + number) for number in range(count)]
