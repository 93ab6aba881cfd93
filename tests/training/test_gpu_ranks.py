"""Tests of ranks with a GPU each: their devices, and how they wait. CUDA and NCCL are simulated; tests/gpu has a test
on two GPUs."""

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ratchet.errors import PeersLostError, SettingsError
from ratchet.training import distributed
from ratchet.training.distributed import HEARTBEAT_S, RankEnvironment, RankGroup, select_device

ONE, SECOND = RankEnvironment(), RankEnvironment(rank=5, world_size=8, local_rank=1, local_world_size=2)
ALONE_ON_ITS_MACHINE = RankEnvironment(rank=1, world_size=2, local_rank=0, local_world_size=1)
GPU = torch.device("cuda", 1)
NCCL = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_RETHROW_CUDA_ERRORS")


@pytest.mark.parametrize(
    ("setting", "environment", "device", "current"),
    [
        ("auto", SECOND, GPU, [GPU]),
        ("auto", ALONE_ON_ITS_MACHINE, torch.device("cuda", 0), [torch.device("cuda", 0)]),
        ("cuda", ONE, torch.device("cuda"), []),
        ("cpu", SECOND, torch.device("cpu"), []),
    ],
)
def test_each_rank_has_a_gpu_of_its_own(
    setting: Any,
    environment: RankEnvironment,
    device: torch.device,
    current: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    selected: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", selected.append)
    assert select_device(setting, environment) == device
    assert selected == current


def test_more_ranks_than_gpus_are_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(SettingsError, match=r"machine.gpus: found 2, but this machine has 1 usable GPUs"):
        select_device("auto", SECOND)


@pytest.fixture
def created(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return the backends that are created, without the other ranks, and the variables that NCCL's reads then."""
    backends: list[Any] = []

    def new_group(backend: str, **_: Any) -> str:
        backends.append((backend, *(os.environ[name] for name in NCCL)))
        return backend

    for name in NCCL:
        monkeypatch.setenv(name, "1")  # as torch's agent sets the first
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **_: backends.append(backend))
    monkeypatch.setattr(dist, "new_group", new_group)
    return backends


@pytest.fixture
def ranks(created: list[Any]) -> RankGroup:
    return RankGroup(SECOND, GPU, lambda: None, 1.0)


def test_gradients_are_sent_by_nccl_which_leaves_its_errors_to_the_rank(ranks: RankGroup, created: list[Any]) -> None:
    assert ranks.group == "nccl"
    assert created == ["gloo", ("nccl", "0", "0")]


class _Work:
    """A collective operation as ProcessGroupNCCL has it: an error completes it, and `wait` raises the error."""

    def __init__(self, error: Exception | None, polls: int = 3) -> None:
        self.error, self.polls, self.is_awaited = error, polls, False

    def is_completed(self) -> bool:
        self.polls -= 1
        return self.polls < 0

    def wait(self) -> None:
        assert self.polls < 0, "this would block without heartbeats"
        self.is_awaited = True
        if self.error is not None:
            raise self.error


OWN = [
    torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    dist.DistBackendError(
        "NCCL error in: NCCLUtils.hpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details)"
    ),
]
LOST = [
    dist.DistBackendError("NCCL error: remote process exited or there was a network error, NCCL version 2.27.7"),
    RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer"),
]


def _fail(ranks: RankGroup, error: Exception) -> None:
    with ranks.collective_section(is_needed=True):
        raise error


@pytest.mark.parametrize(
    "fail", [lambda ranks, error: ranks.wait(_Work(error)), _fail], ids=["operation", "collective section"]
)
@pytest.mark.parametrize("error", [*OWN, *LOST], ids=lambda error: str(error)[:60])
def test_a_fault_of_the_own_gpu_is_not_that_of_another_rank(
    fail: Callable[[RankGroup, Exception], None], error: Exception, ranks: RankGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "any", lambda flag: flag)
    with pytest.raises(type(error) if error in OWN else PeersLostError) as caught:
        fail(ranks, error)
    assert str(error).splitlines()[0] in str(caught.value)


@pytest.mark.usefixtures("created")
def test_a_rank_beats_until_its_gpu_has_computed_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """The event marks the end of what is queued, so it must be recorded before it is asked."""
    asked: list[str] = []
    now_s = 0.0

    class Event:
        def record(self) -> None:
            asked.append("record")

        def query(self) -> bool:
            asked.append("query")
            return asked.count("query") > 3

        def synchronize(self) -> None:
            asked.append("synchronize")

    def sleep(_: float) -> None:
        nonlocal now_s
        now_s += 1.1 * HEARTBEAT_S

    beats: list[float] = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(distributed, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: now_s))
    ranks = RankGroup(SECOND, GPU, lambda: beats.append(now_s), 1.0)
    ranks.wait_for_device(GPU)
    assert asked == ["record", *["query"] * 4, "synchronize"]
    assert len(beats) == 3
    asked.clear()
    ranks.wait_for_device(torch.device("cpu"))
    assert not asked
