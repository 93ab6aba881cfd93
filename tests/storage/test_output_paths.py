"""Output paths are checked before the work: unusable paths are refused, and no file is left behind."""

import errno
import os
from pathlib import Path

import pytest

from ratchet.errors import SettingsError
from ratchet.storage import files


@pytest.mark.parametrize("name", ["new.jsonl", "there.jsonl", "link.jsonl", "a/b/new.jsonl", "n" * 200])
def test_a_writable_path_is_accepted_and_nothing_is_created(name: str, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("mine", encoding="utf-8")
    (tmp_path / "link.jsonl").symlink_to("there.jsonl")
    before = sorted(tmp_path.rglob("*"))
    files.require_writable(tmp_path / name, "--output")
    assert sorted(tmp_path.rglob("*")) == before
    assert (tmp_path / "there.jsonl").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("there.jsonl/new.jsonl", "there.jsonl: File exists"),
        ("n" * 252, "File name too long"),
        ("n" * 300 + "/new.jsonl", "File name too long"),
        ("dangling.jsonl", "found a broken link to nothing; remove it"),
        ("loop.jsonl", "found a broken link"),
        ("folder.jsonl", "found a directory; name a file in it"),
        ("queue.jsonl", "expected a regular file"),
        ("/proc/new.jsonl", "cannot be created"),
        ("/proc/a/new.jsonl", "cannot be created"),
    ],
)
def test_an_unusable_path_is_refused(name: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "there.jsonl").write_text("mine", encoding="utf-8")
    (tmp_path / "dangling.jsonl").symlink_to("nothing")
    (tmp_path / "loop.jsonl").symlink_to("loop.jsonl")
    (tmp_path / "folder.jsonl").mkdir()
    os.mkfifo(tmp_path / "queue.jsonl")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SettingsError, match=says) as caught:
        files.require_writable(tmp_path / name, "--output")
    assert str(caught.value).startswith("--output ")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_another_process_fills_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unlink = Path.unlink

    def busy(path: Path, missing_ok: bool = False) -> None:
        unlink(path, missing_ok)
        (tmp_path / "a" / "theirs").touch()

    monkeypatch.setattr(Path, "unlink", busy)
    files.require_writable(tmp_path / "a" / "b" / "new.jsonl", "--output")
    assert sorted(tmp_path.rglob("*")) == [tmp_path / "a", tmp_path / "a" / "theirs"]


def test_a_full_disk_is_reported_with_the_file() -> None:
    with pytest.raises(OSError, match="No space left") as caught:
        files.write_blocks(Path("/dev/full"), [[b"x" * 100_000]])
    assert (caught.value.errno, caught.value.filename) == (errno.ENOSPC, "/dev/full")
