"""Tests of `ratchet watch` with several runs, the latest run, missing runs and damaged runs."""

import io
from pathlib import Path

import pytest

from ratchet.cli.main import main
from ratchet.config.machine import Machine
from ratchet.errors import DataError, SettingsError
from ratchet.runs.directory import RunPaths
from ratchet.stages.watch import watch
from ratchet.storage.layout import ProjectLayout
from trained_runs import Training, lay


def shown(layout: ProjectLayout, *runs: str, once: bool = True) -> str:
    stream = io.StringIO()
    watch(layout, Machine(), stream, runs, once=once)
    return stream.getvalue()


def test_several_runs_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ProjectLayout(tmp_path)
    names = [lay(layout, Training(seed=seed, done=40 + seed)) for seed in range(6)]
    table = shown(layout, *names)
    assert all(name in table for name in names)
    two = shown(layout, *names[:2])
    assert all(name in two for name in names[:2])
    assert len(two.splitlines()) > len(table.splitlines())  # two runs are shown as one panel each
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, shown(layout, *names).splitlines())) <= 40
    monkeypatch.setenv("COLUMNS", "200")
    assert "\x1b" not in shown(layout, *names)  # no colors, because the output is a file


def test_without_an_active_run_the_latest_is_shown(tmp_path: Path) -> None:
    layout = ProjectLayout(tmp_path)
    assert "no run in" in shown(layout)
    assert "no run in" in shown(layout, once=False)
    lay(layout, Training(seed=1))
    last = lay(layout, Training(seed=2, steps=80))  # its last event is later
    text = shown(layout, once=False)
    assert text.startswith(last)
    assert len(text.splitlines()) == 1


def test_missing_runs_replicas_and_projects_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = ProjectLayout(tmp_path)
    lay(layout, Training())
    with pytest.raises(DataError, match="zzz: matches no run"):
        shown(layout, "zzz")
    with pytest.raises(SettingsError, match="no replica is set"):
        watch(layout, Machine(), io.StringIO(), replica=True)
    monkeypatch.chdir(tmp_path)
    assert main(["watch"]) == 2
    assert "no params.yaml" in capsys.readouterr().err


def test_a_damaged_run_is_drawn(tmp_path: Path) -> None:
    layout = ProjectLayout(tmp_path)
    paths = RunPaths(layout.runs / lay(layout, Training()))
    with paths.journal.open("ab") as stream:
        stream.write(
            b'{"event":"step","t":1,"attempt":1}\n\xff\xfe{"event":\n'
            + b'{"event":"validation","t":2,"attempt":1,"loss":"x"}\n'
        )
    assert paths.root.name in shown(layout, paths.root.name)
