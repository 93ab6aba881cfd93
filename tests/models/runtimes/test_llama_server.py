"""Tests llama.cpp's server as a child process: its environment, invalid files, and that it always ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny_gguf
from ports import free_port
from ratchet.errors import BaseModelError, DamagedFileError, LockHeldError, RatchetError
from ratchet.models.runtimes import llama_server
from ratchet.models.runtimes.llama_server import LlamaClient

SOON_S = 30.0


def lives(pid: int) -> bool:
    """Return whether a process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait(for_it: Callable[[], bool]) -> bool:
    """Wait until the condition is true, for at most SOON_S seconds; only a hang takes longer."""
    deadline_s = time.monotonic() + SOON_S
    while not (there := for_it()) and time.monotonic() < deadline_s:
        time.sleep(0.02)
    return there


def test_a_server_is_of_this_machine_alone_and_ends_with_the_block(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The server gets no secret, uses no proxy, and names no path."""
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "secret")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.setenv("no_proxy", "")
    port = free_port()
    with llama_server.start_server(path, 1, 256, port=port) as server:
        assert lives(server.process.pid)
        assert server.address == f"http://127.0.0.1:{port}"
        assert server.request("/health") == {"status": "ok"}
        assert str(path.parent) not in json.dumps(server.request("/v1/models"))
        assert server.tokenize("hello")
        given = Path(f"/proc/{server.process.pid}/environ").read_text()
        tables = [Path(f"/proc/{server.process.pid}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    assert {entry.partition("=")[0] for entry in given.split("\0") if entry} <= set(llama_server.ENVIRONMENT_VARIABLES)
    lines = [line.split() for table in tables for line in table.splitlines()[1:]]
    bound = [line[1] for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "0A"]
    assert bound == [f"0100007F:{port:04X}"]
    assert not lives(server.process.pid)
    server.close()


def cut(path: Path, target: Path, size: int) -> Path:
    target.write_bytes(path.read_bytes()[:size])
    return target


@pytest.mark.parametrize(
    ("spoil", "kind", "said"),
    [
        (lambda p, t: cut(p, t, p.stat().st_size - 20_000), DamagedFileError, "not within the file bounds"),
        (lambda p, t: cut(p, t, 3000), DamagedFileError, "failed to read key-value pairs"),
        (lambda p, t: cut(p, t, 0), DamagedFileError, "failed to read magic"),
        (lambda p, t: tiny_gguf.patched(p, t, b"GGUF", b"hell"), DamagedFileError, "invalid magic characters: 'hell'"),
        (lambda p, t: t, DamagedFileError, "the file is missing; export it again"),
        (
            lambda p, t: tiny_gguf.patched(p, t, b"blk.1.attn_q.weight", b"blk.1.attn_x.weight"),
            DamagedFileError, r"tensor 'blk\.1\.attn_q\.weight' not found",
        ),
        (
            lambda p, t: tiny_gguf.patched(p, t, b"architecture\x08\0\0\0\x05\0\0\0\0\0\0\0llama",
                                           b"architecture\x08\0\0\0\x05\0\0\0\0\0\0\0lemma"),
            BaseModelError, "unknown model architecture: 'lemma'",
        ),
        (
            lambda p, t: tiny_gguf.patched(p, t, b"\x05\0\0\0\0\0\0\0gpt-2", b"\x05\0\0\0\0\0\0\0gpt-7"),
            BaseModelError, "unknown pre-tokenizer type: 'gpt-7'",
        ),
        (
            lambda p, t: tiny_gguf.patched(p, t, b"{% endfor %}", b"{% endfer %}"),
            BaseModelError, r"its chat template .*Unknown statement: endfer.* a simpler base\.chat_template",
        ),
        (
            lambda p, t: tiny_gguf.patched(p, t, b"in messages", b"in fun(abc)"),
            BaseModelError, r"its chat template .*hint: 'fun'.* a simpler base\.chat_template",
        ),
    ],
    ids=["truncated weights", "truncated header", "empty", "another format", "missing", "tensor missing",
         "unknown architecture", "unknown pre-tokenizer", "template syntax", "template function"],
)  # fmt: skip
def test_files_that_llama_cpp_cannot_open(
    path: Path, tmp_path: Path, spoil: Callable[[Path, Path], Path], kind: type[Exception], said: str
) -> None:
    bad = spoil(path, tmp_path / "bad.gguf")
    with pytest.raises(kind, match=said) as raised:
        llama_server.start_server(bad, 1, 256)
    assert str(bad) in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_port_that_is_taken(path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(LockHeldError, match=f"port {port} of 127.0.0.1 is in use"):
            llama_server.start_server(path, 1, 256, port=port)


def test_one_that_is_not_ready_in_time_is_ended(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[bytes]] = []
    original = subprocess.Popen

    def noted(*arguments: object, **more: object) -> subprocess.Popen[bytes]:
        begun.append(original(*arguments, **more))  # type: ignore[call-overload]
        return begun[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    with pytest.raises(RatchetError, match=r"not ready after 0 s"):
        llama_server.start_server(path, 1, 256, ready_s=0.0)
    assert [process.poll() is None for process in begun] == [False]


def test_killed_in_the_middle_of_a_request(path: Path) -> None:
    with llama_server.start_server(path, 1, 256) as server:
        server.process.send_signal(signal.SIGSTOP)  # the request never ends
        raised: list[BaseException] = []

        def ask() -> None:
            try:
                server.completion([5, 6, 7], 10)
            except RatchetError as error:
                raised.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        port = f":{int(server.address.rpartition(':')[2]):04X}"
        assert wait(lambda: any(port in line.split()[2] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]))
        server.process.kill()
        asking.join(SOON_S)
        assert not asking.is_alive()
    assert [type(one) for one in raised] == [RatchetError]
    assert "has ended (killed by SIGKILL" in str(raised[0])
    assert "model.gguf: /completion: " in str(raised[0])
    assert str(raised[0]).endswith("; try again")


def test_an_address_where_no_server_is_is_an_error() -> None:
    with pytest.raises(RatchetError, match="does not answer"):
        LlamaClient(f"http://127.0.0.1:{free_port()}", "model.gguf").request("/health")


def test_a_server_that_is_stopped_can_be_closed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_server, "STOP_TIMEOUT_S", 0.2)
    with llama_server.start_server(path, 1, 256) as server:
        server.process.send_signal(signal.SIGSTOP)
    assert not lives(server.process.pid)


def test_a_parent_that_is_killed_leaves_no_server(path: Path) -> None:
    code = (
        "import sys, time, pathlib\nfrom ratchet.models.runtimes import llama_server\n"
        "server = llama_server.start_server(pathlib.Path(sys.argv[1]), 1, 256)\n"
        "print(server.process.pid, flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert lives(pid)
        parent.kill()
    assert wait(lambda: not lives(pid))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_as_a_command_it_serves_until_a_signal(path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-m", llama_server.MODULE, str(path), "--context", "128", "--parallel", "2"]
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        client = LlamaClient(json.loads(process.stdout.readline())["address"], str(path))
        assert client.request("/props")["total_slots"] == 2
        assert client.model()["n_ctx"] >= 128
        process.send_signal(number)
        assert process.wait(SOON_S) == -number
        assert process.stdout.read() == ""
        assert "Traceback" not in process.stderr.read()


def test_a_missing_wheel_is_reported(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "xllamacpp.py").write_text("raise ImportError('no such wheel')\n")
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path))
    with pytest.raises(RatchetError, match=r"could not be started.*no such wheel.*check that xllamacpp is installed"):
        llama_server.start_server(path, 1, 256)
