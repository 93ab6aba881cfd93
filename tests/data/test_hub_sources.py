"""Tests datasets of the Hugging Face hub at a pinned commit, with a small local server in place of the hub."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import unquote, urlparse

import pytest

import tiny_project
from ratchet.config.prepare import ColumnSettings, DeduplicationSettings, Prepare, SourceSettings
from ratchet.data import sources
from ratchet.data.sources import SourceReader
from ratchet.errors import DataError
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DatasetCard

PINNED, UNKNOWN = "a" * 40, "b" * 40

CARD = """---
dataset_info:
  features:
  - name: text
    dtype: string
  - name: label
    dtype:
      class_label:
        names:
          '0': card_arrival
          '1': lost_card
---
"""
ROWS = [{"text": "Where is my card?", "label": 0}, {"text": "I lost it", "label": 1}, {"text": "Hm", "label": -1}]
LARGE = "c" * 40
FIRST, SECOND = "train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"
SHARDS = [
    [{"text": f"{shard} {n} " + "the card is lost " * 20, "label": n % 2} for n in range(3000)] for shard in range(2)
]
FILES = {
    LARGE: {
        "README.md": CARD.encode(),
        **{
            name: "".join(json.dumps(row) + "\n" for row in rows).encode()
            for name, rows in zip((FIRST, SECOND), SHARDS, strict=True)
        },
    },
    PINNED: {"README.md": CARD.encode(), "train.jsonl": "".join(json.dumps(row) + "\n" for row in ROWS).encode()},
}


class Hub(BaseHTTPRequestHandler):
    """Serves the part of the hub's interface that loading a dataset needs."""

    fetched: ClassVar[list[str]] = []
    """Each request for the content of a file."""
    cuts: ClassVar[list[str]] = []
    """Names of files. The next answer with one of them ends after half of its bytes."""
    held: ClassVar[dict[str, threading.Event]] = {}
    """Files that are sent half; then the event is set, and the server waits until the client is gone."""

    def do_HEAD(self) -> None:
        self._answer(None)

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def log_message(self, *_: Any) -> None:
        """Suppress the log."""

    def _answer(self, asked: Any) -> None:
        match unquote(urlparse(self.path).path).strip("/").split("/"):
            case ["datasets", "org", "name", "resolve", commit, file]:
                self._file(commit, file)
            case ["api", "datasets", "org", "name", kind, commit, *rest] if commit in FILES:
                entries = [
                    {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha256(data).hexdigest()[:40]}
                    for name, data in FILES[commit].items()
                ]
                documents = {
                    "revision": {
                        "id": "org/name",
                        "sha": commit,
                        "siblings": [{"rfilename": n} for n in FILES[commit]],
                    },
                    "tree": [] if rest else entries,
                    "paths-info": [entry for entry in entries if asked and entry["path"] in asked["paths"]],
                }
                self._send(200, json.dumps(documents[kind]).encode(), {"Content-Type": "application/json"})
            case _:
                self._send(404, b"", {"X-Error-Code": "RepoNotFound"})

    def _file(self, commit: str, file: str) -> None:
        if commit not in FILES:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif file not in FILES[commit]:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        else:
            data, status = FILES[commit][file], 200
            headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": commit}
            headers["Accept-Ranges"] = "bytes"
            if self.command == "GET":
                self.fetched.append(file)
            if wanted := self.headers.get("Range"):
                begin, _, end = wanted.removeprefix("bytes=").partition("-")
                last = min(int(end or len(data)), len(data) - 1)
                headers["Content-Range"] = f"bytes {begin}-{last}/{len(data)}"
                data, status = data[int(begin) : last + 1], 206
            self._send(status, data, headers, file)

    def _send(self, status: int, body: bytes, headers: dict[str, str], file: str = "") -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if file in self.cuts:
            self.cuts.remove(file)
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        elif event := self.held.pop(file, None):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            event.set()
            self.connection.recv(1)  # returns when the client is gone
        else:
            self.wfile.write(body)


# The library reads the endpoint and the offline switch at import, so each attempt needs its own process.
ATTEMPT = """
import json, sys
from ratchet.config.prepare import SourceSettings
from ratchet.data import sources as hub
from ratchet.errors import DataError
import datasets
datasets.config.STREAMING_READ_RETRY_INTERVAL = 0.01
from pathlib import Path
for settings in json.loads(sys.argv[1]):
    shards = Path(folder) if (folder := settings.pop("shards", None)) else None
    try:
        print(json.dumps(list(hub.read_hub_records(SourceSettings(**settings), shards))))
    except DataError as error:
        print(json.dumps(str(error)))
"""


def attempt(home: Path, endpoint: str, *settings: dict[str, str], offline: bool = False) -> list[Any]:
    """Read each of these sources; return its records, or the message of the refusal."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    environment |= {"HF_HUB_OFFLINE": str(int(offline))}
    command = [sys.executable, "-c", ATTEMPT, json.dumps(settings)]
    done = subprocess.run(command, env=environment, cwd=home, capture_output=True, text=True, timeout=120, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_pinned_rows_are_downloaded_once_and_then_read_from_the_cache(tmp_path: Path, endpoint: str) -> None:
    pinned = {"dataset": "org/name", "revision": PINNED}
    rows, no_split, no_commit, no_dataset = attempt(
        tmp_path, endpoint, pinned, {**pinned, "dataset_split": "test"}, {**pinned, "revision": UNKNOWN},
        {**pinned, "dataset": "org/other"},
    )  # fmt: skip
    expected = [
        ["org/name[train]#0", {"text": "Where is my card?", "label": "card_arrival"}],
        ["org/name[train]#1", {"text": "I lost it", "label": "lost_card"}],
        ["org/name[train]#2", {"text": "Hm", "label": None}],
    ]
    assert rows == expected
    assert no_split.startswith(f"org/name@{PINNED}[test]: cannot be loaded from the hub")
    assert "train" in no_split
    assert UNKNOWN in no_commit
    assert no_dataset.startswith(f"org/other@{PINNED}[train]: cannot be loaded from the hub")

    cached, other, unseen = attempt(
        tmp_path, endpoint, pinned, {**pinned, "revision": UNKNOWN}, {**pinned, "dataset": "org/other"}, offline=True
    )
    assert cached == expected
    # The library alone would return the rows of the other commit here.
    assert other.startswith(
        f"org/name@{UNKNOWN}[train]: the hub did not return this commit, and the cache holds commit {PINNED}"
    )
    assert unseen.startswith(f"org/other@{PINNED}[train]: cannot be loaded from the hub")


@pytest.mark.long
def test_a_streamed_dataset_has_the_same_rows_and_leaves_no_copy(tmp_path: Path, endpoint: str) -> None:
    large = {"dataset": "org/name", "revision": LARGE}
    streaming = {**large, "streaming": True}
    homes = tmp_path / "copy", tmp_path / "stream"
    for home in homes:
        home.mkdir()
    [copied] = attempt(homes[0], endpoint, large)
    Hub.cuts += [SECOND]
    streamed, no_split, sharded = attempt(
        homes[1], endpoint, streaming, {**streaming, "dataset_split": "test"},
        {**streaming, "shards": str(tmp_path / "shards")},
    )  # fmt: skip
    assert not Hub.cuts  # a connection was lost, and the rest was read again
    assert streamed == sharded == copied and len(copied) == 6000
    assert copied[3000] == ["org/name[train]#3000", {**SHARDS[1][0], "label": "card_arrival"}]
    sizes = [sum(path.stat().st_size for path in home.rglob("*") if path.is_file()) for home in homes]
    size = sum(map(len, FILES[LARGE].values()))
    assert sizes[0] > size and sizes[1] < size / 20
    assert no_split.startswith(f"org/name@{LARGE}[test]: cannot be loaded from the hub")

    [damaged] = tmp_path.glob("shards/*/00001/rows.arrow")
    with damaged.open("r+b") as stream:
        stream.write(b"damage")
    Hub.fetched.clear()
    assert attempt(homes[1], endpoint, {**streaming, "shards": str(tmp_path / "shards")}) == [copied]
    assert SECOND in Hub.fetched and FIRST not in Hub.fetched


@pytest.mark.long
def test_a_killed_preparation_reads_only_the_shards_that_it_lacks(
    tmp_path: Path, endpoint: str, prepared: Path, started: list["subprocess.Popen[bytes]"]
) -> None:
    layout = ProjectLayout(tmp_path / "project")
    shutil.copytree(prepared, layout.root)
    settings = Prepare(
        sources=({"dataset": "org/name", "revision": LARGE, "streaming": True},),
        columns=ColumnSettings(prompt="text", response="label"),
        deduplication=DeduplicationSettings(jaccard_threshold=None),
    )
    tiny_project.save(layout, tiny_project.SETTINGS.model_copy(update={"prepare": settings}))
    variables = {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "home"), "NO_PROXY": "127.0.0.1"}
    Hub.held[SECOND] = event = threading.Event()
    command, environment = tiny_project.command("prepare"), tiny_project.environment() | variables
    started.append(subprocess.Popen(command, cwd=layout.root, env=environment, stderr=subprocess.DEVNULL))
    assert event.wait(300)
    started[0].kill()
    started[0].wait()
    [folder] = layout.streamed_shards.iterdir()
    assert (folder / "00000").is_dir() and not (folder / "00001").exists()

    Hub.fetched.clear()
    subprocess.run(command, cwd=layout.root, env=environment, check=True)
    assert SECOND in Hub.fetched and FIRST not in Hub.fetched
    assert not layout.streamed_shards.exists()
    card = DatasetCard.load(layout.dataset_card)
    assert card.rows_in == card.rows_out == 6000


@pytest.mark.long
def test_a_killed_download_continues_with_the_files_that_it_lacks(tmp_path: Path, endpoint: str) -> None:
    Hub.held[SECOND] = event = threading.Event()
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path), "NO_PROXY": "127.0.0.1"}
    settings = json.dumps([{"dataset": "org/name", "revision": LARGE}])
    process = subprocess.Popen(
        [sys.executable, "-c", ATTEMPT, settings], env=environment, cwd=tmp_path, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )  # fmt: skip
    assert event.wait(120)
    while not any(path.name == FIRST for path in tmp_path.rglob("snapshots/*/*")):
        time.sleep(0.05)
    process.kill()
    process.communicate()
    Hub.fetched.clear()
    [rows] = attempt(tmp_path, endpoint, {"dataset": "org/name", "revision": LARGE})
    assert len(rows) == 6000
    assert SECOND in Hub.fetched and FIRST not in Hub.fetched


def test_shards_of_earlier_settings_are_removed(tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    (shards / "of-another-source").mkdir(parents=True)
    source = {"dataset": "org/name", "revision": LARGE, "streaming": True}
    SourceReader(tmp_path, Prepare(sources=(source,)), shards).remove_other_shards()
    assert not list(shards.iterdir())


def test_streaming_of_files_is_refused() -> None:
    with pytest.raises(ValueError, match="files are always streamed"):
        SourceSettings(files="data/raw/rows.csv", streaming=True)


@pytest.mark.parametrize("revision", ["main", "v1.0", PINNED[:12], "A" * 40])
def test_a_revision_that_is_not_a_commit_is_refused(revision: str) -> None:
    with pytest.raises(DataError, match="expected the 40 hexadecimal digits of a commit"):
        next(sources.read_hub_records(SourceSettings(dataset="org/name", revision=revision)))


def test_a_local_folder_with_the_datasets_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "org" / "name"
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text('{"text": "planted", "label": 0}\n')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match="a local folder org/name exists"):
        next(sources.read_hub_records(SourceSettings(dataset="org/name", revision=PINNED)))
