"""Proves that machines with other data or other versions of a library are refused before they train together."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from rank_projects import EVEN, PATIENCE_S, SLOW, events, free_port, log, project, settings, start, wait_until
from ratchet import prepare
from ratchet.config_data import Split
from ratchet.layout import Layout

PACKAGES = ("training", "run")


def ended(layout: Layout) -> tuple[int, str]:
    """Exit code and words of a training that cannot begin."""
    process = start(layout)
    said = process.communicate(timeout=PATIENCE_S)[1]
    assert not layout.train.exists()
    assert not events(layout, "step")
    return process.returncode, said


def test_a_machine_with_other_data_is_refused_and_the_others_go_on(
    prepared: Path, tmp_path: Path, started: list[Any]
) -> None:
    long = EVEN.model_copy(update={"epochs": 30})
    chosen = settings(long, nodes="1:2", rendezvous=f"127.0.0.1:{free_port()}")
    first, second = (project(prepared, tmp_path / name, chosen) for name in ("first", "second"))
    changed = chosen.prepare.model_copy(update={"split": Split(validation=0.2, test=0.2)})
    shutil.rmtree(second.data)
    prepare.prepare(second, chosen.model_copy(update={"prepare": changed}))
    started.append(start(first, [SLOW]))
    wait_until(lambda: len(events(first, "step")) > 1, *started)
    code, said = ended(second)
    assert code == 2, said + log(second)
    assert "would train different things: prepared data (digest): " in said
    assert "Every machine needs the same params.yaml, prepared data, base model and libraries" in said
    done = len(events(first, "step"))
    wait_until(lambda: len(events(first, "step")) > done, *started)
    assert {event.data["ranks"] for event in events(first, "ready")} == {1}


def test_machines_with_other_versions_of_a_library_are_refused_with_both(
    prepared: Path, tmp_path: Path, started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = settings(nodes="2", rendezvous=f"127.0.0.1:{free_port()}")
    first, second = (project(prepared, tmp_path / name, chosen) for name in ("first", "second"))
    started.append(start(first))
    told = tmp_path / "other" / "peft-0.0.1.dist-info"
    told.mkdir(parents=True)
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: peft\nVersion: 0.0.1\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(told.parent))
    started.append(start(second))
    said = [process.communicate(timeout=PATIENCE_S)[1] for process in started]
    assert [process.returncode for process in started] == [2, 2], said
    for text in said:
        assert "version of peft: " in text and "0.0.1" in text
