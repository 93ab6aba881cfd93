"""`ratchet watch`: real trainings of other processes, seen on a terminal of another's, in lines, and from a mirror."""

import io
from pathlib import Path

import pytest

from ratchet.cli.command_line import main
from ratchet.config.schema import Machine
from ratchet.errors import DataError, SettingsError
from ratchet.runs.directory import RunPaths
from ratchet.stages.watch import WatchOptions, watch
from ratchet.storage.layout import ProjectLayout
from trained_runs import Training, lay


def shown(layout: ProjectLayout, *runs: str, once: bool = True) -> str:
    stream = io.StringIO()
    watch(layout, Machine(), WatchOptions(runs, once=once), stream)
    return stream.getvalue()


def test_several_runs_are_shown_beside_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = ProjectLayout(tmp_path)
    names = [lay(layout, Training(seed=seed, done=40 + seed)) for seed in range(6)]
    table = shown(layout, *names)
    assert all(name in table for name in names)
    two = shown(layout, *names[:2])
    assert all(name in two for name in names[:2])
    assert len(two.splitlines()) > len(table.splitlines())  # a panel each
    monkeypatch.setenv("COLUMNS", "40")
    assert max(map(len, shown(layout, *names).splitlines())) <= 40
    monkeypatch.setenv("COLUMNS", "200")
    assert "\x1b" not in shown(layout, *names)  # a file gets no colours


def test_where_none_is_trained_the_latest_run_is_shown(tmp_path: Path) -> None:
    layout = ProjectLayout(tmp_path)
    assert "no run in" in shown(layout)
    assert "no run in" in shown(layout, once=False)
    lay(layout, Training(seed=1))
    last = lay(layout, Training(seed=2))
    told = shown(layout, once=False)
    assert told.startswith(last)
    assert len(told.splitlines()) == 1


def test_what_is_not_there_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = ProjectLayout(tmp_path)
    lay(layout, Training())
    with pytest.raises(DataError, match="zzz: no run of that name"):
        shown(layout, "zzz")
    with pytest.raises(SettingsError, match="which one"):
        watch(layout, Machine(), WatchOptions(mirror=True), io.StringIO())
    monkeypatch.chdir(tmp_path)
    assert main(["watch"]) == 2
    assert "no params.yaml" in capsys.readouterr().err


def test_a_damaged_run_is_drawn_all_the_same(tmp_path: Path) -> None:
    layout = ProjectLayout(tmp_path)
    paths = RunPaths(layout.runs / lay(layout, Training()))
    with paths.journal.open("ab") as stream:
        stream.write(
            b'{"event":"step","t":1,"attempt":1}\n\xff\xfe{"event":\n'
            + b'{"event":"validation","t":2,"attempt":1,"loss":"x"}\n'
        )
    assert paths.root.name in shown(layout, paths.root.name)
