"""Two ranks learn the same as one rank, and invalid settings of ranks are refused."""

from pathlib import Path
from typing import Any

import pytest

from rank_projects import (
    EVEN,
    batches,
    events,
    project,
    report,
    settings,
    train,
)


def test_two_ranks_learn_what_one_learns(prepared: Path, tmp_path: Path) -> None:
    few = EVEN.model_copy(update={"batch_size": 4, "epochs": 0.1, "validate_every_steps": 100})
    one, two = (project(prepared, tmp_path / str(count), settings(few, gpus=count)) for count in (1, 2))
    for layout in (one, two):
        train(layout)
    assert batches(two) == batches(one) != {}
    losses = [[event.data["loss"] for event in events(layout, "step")] for layout in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-4)
    assert report(two).trained_tokens == report(one).trained_tokens


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({"nodes": "4:2"}, "MIN:MAX such as 2:8"),
        ({"nodes": "2"}, "set machine.rendezvous"),
        ({"rendezvous": "somewhere"}, "HOST:PORT"),
        ({"gpus": 0}, "expected an integer >= 1, or auto"),
    ],
)
def test_settings_that_cannot_be_are_refused(machine: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settings(**machine)
