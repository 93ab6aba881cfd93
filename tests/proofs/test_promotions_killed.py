"""Proves the README's sentence "a worse model never ships" for promotions: a promotion that is killed at any point and
repeated leaves exactly one champion."""

import os
import random
import shutil
import signal
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from promotion_project import (
    SETTINGS,
    accept_model,
    count_in_child,
    list_champions,
    read_ledger,
    with_hooks,
    write_outputs,
)
from ratchet.config.promote import HookSettings
from ratchet.registry import outbox
from ratchet.stages.project import Project
from ratchet.stages.promote import PromoteOptions, promote, rollback
from ratchet.stages.promotions import promotions
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import read_champion

PACKAGES = ("registry", "stages")
HOOKED = with_hooks(HookSettings(command=("sh", "-c", "cat event.txt > /dev/null; echo $RATCHET_EVENT_ID >> told.txt")))
CALLS = (
    "search_registered_models", "create_registered_model", "search_model_versions", "create_model_version",
    "set_registered_model_alias", "get_model_version", "set_model_version_tag", "update_model_version", "set_tag",
)  # fmt: skip
SEED = int(os.environ.get("RATCHET_TEST_SEED", "5"))
ALL = bool(os.environ.get("RATCHET_ALL_POINTS"))
"""Whether to test each kill point. Each point takes half a second on a quiet machine, all points some minutes."""
Work = Callable[[ProjectLayout], object]


def first(layout: ProjectLayout) -> None:
    promote(Project.from_parts(layout, HOOKED))


def second(layout: ProjectLayout) -> None:
    required = HOOKED.model_copy(update={"promote": HOOKED.promote.model_copy(update={"approvals": 1})})
    promote(Project.from_parts(layout, required), PromoteOptions(force=True, reason="now"))
    assert read_ledger(layout)[-1].approvals is not None


def back(layout: ProjectLayout) -> None:
    rollback(Project.from_parts(layout, HOOKED), 1, smoke_test=accept_model)


def nothing(layout: ProjectLayout) -> None:
    write_outputs(layout, "a")


def one(layout: ProjectLayout) -> None:
    nothing(layout)
    promote(Project.from_parts(layout, SETTINGS))
    write_outputs(layout, "b", "REJECT")


def two(layout: ProjectLayout) -> None:
    one(layout)
    promote(Project.from_parts(layout, SETTINGS), PromoteOptions(force=True, reason="why not"))


SCENARIOS: dict[str, tuple[Work, Work, list[str], int]] = {
    "the first promotion": (nothing, first, ["a"], 1),
    "a promotion by force": (one, second, ["b", "a"], 2),
    "a rollback": (two, back, ["a"], 3),
}


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the hooks in this process (registry/test_outbox.py tests their own process) and skip fsync.

    No kill happens while the hooks run, because in production the process of the hooks survives its parent.
    """

    def deliver(box: Path, root: Path) -> None:
        if any(found.waiting for found in outbox.read_deliveries(box)):
            killing, files.before = files.before, lambda operation, path: None
            outbox.main([str(box), str(root)])
            files.before = killing

    monkeypatch.setattr(outbox, "deliver_pending", deliver)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    monkeypatch.setenv("RATCHET_ACTOR", "ada")


def counted(work: Work, layout: ProjectLayout, kill_at: int) -> int:
    """Do the work, and end by SIGKILL before the operation with this number (from 1). Return the number of
    operations."""
    import mlflow

    done = [0]

    def seen(*about: object) -> None:
        done[0] += 1
        if done[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def announced(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            seen()
            return original(*arguments, **options)

        return call

    files.before = seen
    for name in CALLS:
        setattr(mlflow.MlflowClient, name, announced(getattr(mlflow.MlflowClient, name)))
    work(layout)
    return done[0]


def in_child(work: Work, layout: ProjectLayout, kill_at: int) -> tuple[int, int]:
    """Do the work in a child process. Return its exit code, and the number of operations if the child was not
    killed."""
    return count_in_child(lambda: counted(work, layout, kill_at))


def problems_after(layout: ProjectLayout, expected: list[str], entries: int) -> list[str]:
    """Return the problems of the project after the work."""
    problems = list(promotions(Project.from_parts(layout, HOOKED)).problems)
    if list_champions(layout) != expected:
        problems.append(f"champions are {list_champions(layout)}")
    found = read_ledger(layout)
    if len(found) != entries:
        problems.append(f"{len(found)} entries")
    told = layout.root / "told.txt"
    said = told.read_text().split() if told.exists() else []
    if said != [found[-1].id]:
        problems.append(f"hooks were told {said}")
    if layout.promotion_intent.exists():
        problems.append("the intent is still there")
    return problems


@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_anywhere_and_repeated_there_is_one_end(
    tracked_project: ProjectLayout, tmp_path: Path, name: str
) -> None:
    prepare, work, expected, entries = SCENARIOS[name]
    prepare(tracked_project)
    (tracked_project.root / "event.txt").write_text("")

    numbers = count()

    def fresh() -> ProjectLayout:  # each trial has its own path, because MLflow caches connections by path
        trial = ProjectLayout(tmp_path / f"trial {next(numbers)}")
        shutil.copytree(tracked_project.root, trial.root)
        return trial

    status, points = in_child(work, fresh(), 0)
    assert status == 0
    print(f"{name}: {points} points; seed {SEED} (RATCHET_TEST_SEED), all with RATCHET_ALL_POINTS=1")
    assert points > 30
    problems = []
    tried = range(1, points + 1)
    for point in tried if ALL else sorted(random.Random(SEED).sample(tried, 8)):
        layout = fresh()
        assert in_child(work, layout, point)[0] == -signal.SIGKILL
        if point % 2:  # odd points run another command before the repeated one
            promotions(Project.from_parts(layout, HOOKED))
        read_champion(layout.champion)  # the file is readable at any moment
        work(layout)
        found = [f"point {point}: {text}" for text in problems_after(layout, expected, entries)]
        print(*found, sep="\n", end="\n" if found else "")
        problems += found
        shutil.rmtree(layout.root)
    assert problems == []
