"""Proves the README's sentence "a worse model never ships" for a team on an MLflow server: a promotion that is killed
before any operation on the disk, and before or after any request, leaves one champion for everybody."""

import os
import random
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mlflow_server
from ports import free_port
from promotion_project import SETTINGS, count_in_child, write_outputs
from ratchet.config.promote import HookSettings, Promote
from ratchet.config.settings import Settings
from ratchet.registry import keys, ledger, outbox
from ratchet.stages.project import Project
from ratchet.stages.promote import promote
from ratchet.stages.promotions import promotions
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import read_champion
from ratchet.tracking.mlflow.registry import MlflowModelRegistry

PACKAGES = ("registry", "stages", "tracking")
HOOK = HookSettings(command=("sh", "-c", "cat > /dev/null; echo $RATCHET_EVENT_ID >> told.txt"))
SEED = int(os.environ.get("RATCHET_TEST_SEED", "7"))
ALL = bool(os.environ.get("RATCHET_ALL_POINTS"))
"""Whether to test each kill point. Each takes some seconds."""
POINTS = 6


@pytest.fixture
def server(tmp_path: Path, mlflow_template: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    def deliver(box: Path, root: Path) -> None:
        if any(found.waiting for found in outbox.read_deliveries(box)):
            killing, files.before = files.before, lambda operation, path: None
            outbox.main([str(box), str(root)])
            files.before = killing

    monkeypatch.setattr(outbox, "deliver_pending", deliver)  # the process of the hooks survives its parent
    with mlflow_server.serve(tmp_path / "server", free_port(), mlflow_template) as address:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
        yield address


class Trial:
    """Two clones and a registered model of their own."""

    def __init__(self, folder: Path, number: int) -> None:
        hooked = Promote(model_name=f"model-{number}", hooks=(HOOK,))
        self.settings: Settings = SETTINGS.model_copy(update={"promote": hooked})
        self.ada, self.bob = ProjectLayout(folder / "ada"), ProjectLayout(folder / "bob")
        for layout in (self.ada, self.bob):
            layout.experiments.mkdir(parents=True)
        write_outputs(self.ada, "a")
        keys.load_signer(self.ada)
        shutil.copytree(self.ada.keyring.parent, self.bob.keyring.parent)
        promote(Project.from_parts(self.ada, self.settings))
        promotions(Project.from_parts(self.bob, self.settings))
        (self.ada.root / "told.txt").unlink()
        write_outputs(self.ada, "b")

    def promote(self, kill_at: int = 0) -> int:
        """Promote, and end by SIGKILL at the point with this number (from 1). Return the number of points."""
        import requests

        done = 0

        def seen(*about: object) -> None:
            nonlocal done
            done += 1
            if done == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

        request = requests.Session.request

        def announced(*arguments: Any, **options: Any) -> Any:
            seen()
            answer = request(*arguments, **options)
            seen()
            return answer

        files.before = seen
        requests.Session.request = announced  # type: ignore[method-assign]
        promote(Project.from_parts(self.ada, self.settings))
        return done

    def in_child(self, kill_at: int) -> tuple[int, int]:
        """Promote in a child process. Return its exit code, and the number of points if it was not killed."""
        return count_in_child(lambda: self.promote(kill_at))

    def problems(self) -> list[str]:
        """Return the problems after everybody's commands."""
        found = [*promotions(Project.from_parts(self.ada, self.settings)).problems]
        found += promotions(Project.from_parts(self.bob, self.settings)).problems
        entries = ledger.read_entries(self.ada.promotions)
        champion = read_champion(self.ada.champion).champion
        registry = MlflowModelRegistry.open(self.bob, self.settings)
        told = self.ada.root / "told.txt"
        checks = {
            "two entries": len(entries) == 2,
            "b is champion": champion is not None and champion.run_id == "run-b",
            "the alias names it": champion is not None and registry.champion() == champion.version,
            "two versions": len(registry.versions()) == 2,
            "both clones agree": self.bob.champion.read_bytes() == self.ada.champion.read_bytes()
            and self.bob.promotions.read_bytes() == self.ada.promotions.read_bytes(),
            "one call of the hook": told.exists() and told.read_text().split() == [entries[-1].id],
            "no intent": not self.ada.promotion_intent.exists(),
        }
        return found + [f"not true: {name}" for name, is_true in checks.items() if not is_true]


def test_a_team_has_one_champion_wherever_a_promotion_is_killed(server: str, tmp_path: Path) -> None:
    status, points = Trial(tmp_path / "whole", 0).in_child(0)
    assert status == 0
    print(f"{points} points; seed {SEED} (RATCHET_TEST_SEED), all with RATCHET_ALL_POINTS=1")
    assert points > 100
    problems = []
    for point in range(1, points + 1) if ALL else sorted(random.Random(SEED).sample(range(1, points + 1), POINTS)):
        trial = Trial(tmp_path / f"trial {point}", point)
        assert trial.in_child(point)[0] == -signal.SIGKILL
        if point % 2:  # another person comes first
            promotions(Project.from_parts(trial.bob, trial.settings))
        promote(Project.from_parts(trial.ada, trial.settings))
        problems += [f"point {point}: {text}" for text in trial.problems()]
        shutil.rmtree(tmp_path / f"trial {point}")
    assert problems == []
