"""Measures rows of benchmarks/chaos.py about single checkpoints: crashes during a save, damage, and snapshots."""

import os
import random
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from fingerprints import fingerprint
from report_rows import count

from ratchet.config import params_file
from ratchet.config.settings import Settings
from ratchet.models import adapters, base_model, loading
from ratchet.models.device import Model
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.training import checkpoint, optimizer
from ratchet.training.train_state import TrainSnapshot, TrainState

KEPT = 2
CRASHED = 9


@dataclass
class Training:
    """Model and optimizer without a training loop: steps use random gradients."""

    spec: RunSpec
    model: Model
    optimizer: optimizer.Optimizer

    @classmethod
    def of(cls, project: ProjectLayout, settings: Settings) -> "Training":
        """Load the project's base with a new adapter."""
        card = BaseCard.load(project.base_card)
        device = torch.device("cpu")
        base = loading.load(base_model.locate(project, card), card, settings.train, device)
        model = adapters.attach(base, settings.train, card.digest)
        spec = RunSpec(train=settings.train, data_digest="0" * 64, base_digest=card.digest)
        return cls(spec, model, optimizer.build(model, settings.train, device))

    @property
    def identity(self) -> dict[str, Any]:
        """Identity stored with each checkpoint."""
        return {"spec": self.spec.model_dump(mode="json"), "environment": {"torch": torch.__version__}}

    def step(self) -> None:
        """Take an optimizer step that changes all trainable weights and the optimizer state."""
        for _, parameter in adapters.trainable_parameters(self.model):
            parameter.grad = torch.randn_like(parameter)
        self.optimizer.step()

    def snapshot(self, step: int) -> TrainSnapshot:
        return checkpoint.take_snapshot(TrainState(step=step), self.model, self.optimizer)

    def seal(self, paths: RunPaths, taken: TrainSnapshot) -> None:
        """Write the snapshot and rotate old checkpoints, as the saver does."""
        checkpoint.write(paths, taken, self.identity, lambda: None)
        checkpoint.rotate(paths, KEPT, set())

    def newest(self, paths: RunPaths) -> TrainSnapshot | None:
        """Read the newest valid checkpoint, as a starting worker does."""
        path = checkpoint.find_newest_valid(paths, self.spec, lambda _: None)
        return None if path is None else checkpoint.read(path)


def of_snapshot(taken: TrainSnapshot) -> str:
    """Return the fingerprint of weights, optimizer and state."""
    return fingerprint({**taken.weights, **taken.optimizer_tensors}, [taken.state.to_json(), taken.optimizer_values])


def crash_points(training: Training, folder: Path) -> list[Any]:
    """R2: end the process before the k-th disk operation of one save and its rotation, for every k."""
    before = RunPaths(folder / "before")
    before.checkpoints.mkdir(parents=True)
    for step in (2, 4):
        training.step()
        training.seal(before, training.snapshot(step))
    old = of_snapshot(training.snapshot(4))
    training.step()
    taken = training.snapshot(6)
    new = of_snapshot(taken)
    failures, point = 0, 0
    while True:
        paths = RunPaths(folder / "crashed")
        shutil.copytree(before.root, paths.root)
        died = _dies_at(point, partial(training.seal, paths, taken))
        files.remove_partials(paths.checkpoints)  # a starting run, which holds the lock, does the same
        found = training.newest(paths)
        failures += found is None or of_snapshot(found) not in (old, new)
        shutil.rmtree(paths.root)
        if not died:
            break
        point += 1
    return [count(f"R2 lost after a crash at one of {point} points of a save", failures)]


def _dies_at(point: int, work: Callable[[], None]) -> bool:
    """Do the work in a forked process that ends before its operation number `point`. Return False if the work was
    completed."""
    child = os.fork()
    if child == 0:
        done = 0

        def count_down(operation: files.Operation, path: Path) -> None:
            nonlocal done
            if done == point:
                os._exit(CRASHED)  # no clean-up of any kind
            done += 1

        files.before = count_down
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, CRASHED):
        raise SystemExit(f"the save that was to crash failed otherwise: {code}")
    return code == CRASHED


def damaged(training: Training, folder: Path, flips: int, draw: random.Random) -> list[Any]:
    """R4, R5: damage each file of the newest checkpoint (flip a bit, truncate, empty, remove). The older one must be
    used."""
    paths = RunPaths(folder / "damaged")
    paths.checkpoints.mkdir(parents=True)
    for step in (2, 4):
        training.step()
        training.seal(paths, training.snapshot(step))
    newest = paths.checkpoint(4)
    names = sorted(path.name for path in newest.iterdir())
    unseen = {"flips": 0, "others": 0}
    for name in names:
        path = newest / name
        content = path.read_bytes()
        for place in (draw.randrange(8 * len(content)) for _ in range(flips)):
            flipped = bytearray(content)
            flipped[place // 8] ^= 1 << place % 8
            path.write_bytes(flipped)
            unseen["flips"] += _step_of(training, paths) != 2
        for other in (content[: len(content) // 2], content[:-1], b""):
            path.write_bytes(other)
            unseen["others"] += _step_of(training, paths) != 2
        path.unlink()
        unseen["others"] += _step_of(training, paths) != 2
        path.write_bytes(content)
        unseen["others"] += _step_of(training, paths) != 4  # the file is complete again: the newest one is used
    shutil.rmtree(paths.root)
    return [
        count(f"R4 undetected of {flips * len(names)} flipped bits in {len(names)} files", unseen["flips"]),
        count(f"R5 undetected of {4 * len(names)} cut, empty or missing files", unseen["others"]),
    ]


def _step_of(training: Training, paths: RunPaths) -> int:
    found = checkpoint.find_newest_valid(paths, training.spec, lambda _: None)
    return 0 if found is None else int(found.name.rpartition("-")[2])


def isolated(project: ProjectLayout, settings: Settings, folder: Path) -> list[Any]:
    """R26: overwrite weights and optimizer right after a snapshot. Neither the snapshot nor the saved file may
    change."""
    leaks = 0
    for name in ("adamw", "adamw_8bit"):
        train = settings.train.model_copy(update={"optimizer": name, "rank": 64})  # large enough for 8-bit states
        training = Training.of(project, settings.model_copy(update={"train": train}))
        training.step()
        taken = training.snapshot(2)
        before = of_snapshot(taken)
        with torch.no_grad():
            for tensor in _all_tensors(training):
                tensor.fill_(7)
        leaks += of_snapshot(taken) != before
        paths = RunPaths(folder / "isolated")
        paths.checkpoints.mkdir(parents=True)
        training.seal(paths, taken)
        sealed = training.newest(paths)
        leaks += sealed is None or of_snapshot(sealed) != before
        shutil.rmtree(paths.root)
    return [count("R26 snapshots changed later", leaks)]


def _all_tensors(training: Training) -> list[torch.Tensor]:
    states = [value for state in training.optimizer.state.values() for value in state.values()]
    own = [value for value in states if isinstance(value, torch.Tensor)]
    return [parameter for _, parameter in adapters.trainable_parameters(training.model)] + own


def rows(
    project: ProjectLayout, folder: Path, quick: bool, seed: int, say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Measure all rows of this module. Call it before any thread is started, because it forks."""
    settings = params_file.load(project.params)
    loading.use_threads(1)
    training = Training.of(project, settings)
    found = crash_points(training, folder)
    found += damaged(training, folder, 10 if quick else 100, random.Random(f"{seed} damaged"))
    found += isolated(project, settings, folder)
    say("  crashes in a save, damage and snapshots tried")
    return found
