"""Invalid options of several ranks are refused with one message and exit code 2."""

from pathlib import Path

import pytest
import torch

import tiny_project
from rank_projects import project, settings
from ranks_refused_cases import (
    ended,
)


def test_options_that_cannot_be_are_refused(prepared: Path, tmp_path: Path) -> None:
    layout = project(prepared, tmp_path / "project", settings())
    done = tiny_project.ratchet(layout, "train", "--nodes", "3:2", "--rendezvous", "somewhere")
    assert done.returncode == 2
    assert "--nodes (machine.nodes): found '3:2'; expected a number of machines" in done.stderr
    assert "--rendezvous (machine.rendezvous): found 'somewhere'; expected HOST:PORT" in done.stderr
    assert not layout.runs.exists()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: without one, ranks are processes on the CPU")
def test_more_ranks_than_gpus_are_refused_with_both_numbers(prepared: Path, tmp_path: Path) -> None:
    there = torch.cuda.device_count()
    chosen = settings(device="cuda", gpus=there + 1)
    code, said = ended(project(prepared, tmp_path / "project", chosen))
    assert code == 2, said
    assert f"machine.gpus: found {there + 1}, and this machine has {there} that may be used" in said
