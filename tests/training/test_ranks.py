"""Several ranks train one run: on one machine, on several that come and go, with real processes and real signals."""

from pathlib import Path
from typing import Any

import pytest

from rank_projects import (
    EVEN,
    PATIENCE_S,
    batches,
    events,
    free_port,
    project,
    report,
    settings,
    start,
    train,
)


def test_more_ranks_than_rows_learn_what_one_learns(prepared: Path, tmp_path: Path) -> None:
    few = EVEN.model_copy(update={"batch_rows": 2, "epochs": 0.05, "validate_every_steps": 100})
    one, three = (project(prepared, tmp_path / str(count), settings(few, gpus=count)) for count in (1, 3))
    for layout in (one, three):
        train(layout)
    assert batches(three) == batches(one) != {}
    losses = [[event.data["loss"] for event in events(layout, "step")] for layout in (one, three)]
    assert losses[1] == pytest.approx(losses[0], rel=2e-4)
    assert report(three).trained_tokens == report(one).trained_tokens


def test_a_meeting_that_nobody_comes_to_ends_with_where_it_was(prepared: Path, tmp_path: Path) -> None:
    port = free_port()
    layout = project(
        prepared, tmp_path / "project", settings(nodes="2", rendezvous=f"127.0.0.1:{port}", rendezvous_wait_s=13)
    )
    process = start(layout)
    said = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 75
    assert f"2 machines did not meet at 127.0.0.1:{port} within 13 s" in said
    (told,) = [event.data["text"] for event in events(layout, "notice") if "waits at" in event.data["text"]]
    assert f"this machine waits at 127.0.0.1:{port}: 2 machines train the run together" in told


@pytest.mark.parametrize(
    ("machine", "words"),
    [
        ({"nodes": "4:2"}, "the fewest and the most"),
        ({"nodes": "2"}, "set machine.rendezvous"),
        ({"rendezvous": "somewhere"}, "HOST:PORT"),
        ({"gpus": 0}, "no number of ranks"),
    ],
)
def test_settings_that_cannot_be_are_refused(machine: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        settings(**machine)
