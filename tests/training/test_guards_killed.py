"""A training is killed in each state of its guards, and ends as if it had not been killed."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from killed_loop import FAULTS, GUARDED
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalEvent, JournalReader
from small_loop import steps

SCRIPT = Path(__file__).parent.parent / "support" / "killed_loop.py"


def find(root: Path, kind: str) -> list[JournalEvent]:
    return [event for event in JournalReader(RunPaths(root).journal).read() if event.kind == kind]


def rates(root: Path) -> dict[int, float]:
    return {event.data["step"]: event.data["learning_rate"] for event in steps(RunPaths(root))}


@pytest.mark.long
def test_a_kill_in_each_state_of_the_guards_changes_nothing(tmp_path: Path) -> None:
    # While the window fills, in the spike, while the rate is lower, just before and after the rollback, at the end.
    command = [sys.executable, str(SCRIPT), str(tmp_path), "4", "8", "10", "15", "16", "17", "24"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    whole, killed = json.loads(done.stdout.splitlines()[-1])
    assert killed == whole
    assert rates(tmp_path / "killed") == rates(tmp_path / "whole")
    spike, broken = (fault["step"] for fault in FAULTS)
    skipped = [(event.data["step"], event.data["action"]) for event in find(tmp_path / "whole", "step_skipped")]
    assert skipped == [(spike, "skip"), (broken, "roll_back")]
    recoveries = [
        event.data["text"] for event in find(tmp_path / "whole", "notice") if "recovers" in event.data["text"]
    ]
    assert [text.split(":")[0] for text in recoveries] == ["step 11", "step 19"]
    assert rates(tmp_path / "whole")[9] == GUARDED.learning_rate / 2
    assert rates(tmp_path / "whole")[12] == GUARDED.learning_rate
    assert whole["state"]["losses"]
    assert whole["state"]["token_accuracy"]
