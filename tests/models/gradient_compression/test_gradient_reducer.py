"""Tests gradient reduction: bounds, equal bits on all ranks, no loss of unsent parts, exact resume."""

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from compression_cases import (
    COMPRESSED,
    REMEMBERING,
    largest_of_buckets,
    left_over,
    name_of,
    sizes_of_buckets,
    twelve_steps,  # noqa: F401 (a fixture)
)
from gloo_ranks import add_up, exact, flat, gradients, on_ranks, parameters, wire_of
from ratchet.config.train import GradientCompressionSettings
from ratchet.errors import DamagedFileError
from ratchet.models import gradient_compression
from ratchet.models.gradient_compression import GradientReducer, PowerSgdCompressor, build_buckets

WAYS = [{"method": "none"}, *COMPRESSED]


def compression(**settings: Any) -> GradientCompressionSettings:
    return GradientCompressionSettings.model_validate({"bucket_bytes": 2000, "block_size": 16} | settings)


def sums_of_one_step(rank: int) -> list[tuple[Tensor, int]]:
    """Return, for each method, the first sum, and the bytes that this rank sent for it."""
    found = []
    for settings in WAYS:
        given = parameters()
        wire = wire_of(given, **settings)
        found.append((add_up(wire, rank, 0, given), wire.sent_bytes))
    return found


@pytest.fixture(scope="module", params=[2, 3, 4])
def first_sums(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[Any]]:
    return request.param, on_ranks(request.param, tmp_path_factory.mktemp("sums"), sums_of_one_step)


def bounds(world: int, settings: dict[str, Any], steps: Tensor) -> Tensor:
    """Return the error bound of each number of a first sum.

    `steps` holds the magnitudes of all ranks, as (rank, number). Uncompressed sums round once per addition. With 16
    bits, each number is rounded once, and so are each addition and a division by 3; float16 rounds small numbers to
    multiples of 2^-24 of a bucket's scale. With int8, the error is half a scale of each rank plus half a scale of the
    sum.
    """
    added = steps.sum(0)
    match settings["method"]:
        case "none":
            return world * 2.0**-24 * added
        case "bf16":
            return (world + 2) * 2.0**-8 * added / 2
        case "fp16":
            return (world + 2) * 2.0**-11 * added + world**2 * 2.0**-24 * 2.0**-14 * largest_of_buckets(steps)
    scales = torch.stack([largest_of_blocks(one) for one in steps]).sum(0)
    return scales / 254 * (1 + 1 + 1 / 127)


def largest_of_blocks(numbers: Tensor, block: int = 16) -> Tensor:
    """Return, for each number, the largest of the numbers that share its scale; each bucket begins a new block."""
    return torch.cat(
        [
            torch.cat([part.max().expand(len(part)) for part in bucket.split(block)])
            for bucket in numbers.split(sizes_of_buckets())
        ]
    )


@pytest.mark.parametrize("number", range(len(WAYS)), ids=[name_of(way) for way in WAYS])
def test_a_sum_has_the_same_bits_on_every_rank_and_lies_within_its_bounds(
    first_sums: tuple[int, list[Any]], number: int
) -> None:
    world, ranks = first_sums
    total = ranks[0][number][0]
    assert all(torch.equal(found[number][0], total) for found in ranks)
    assert total.abs().sum() > 0
    if WAYS[number]["method"] in ("none", "bf16", "fp16", "int8"):
        steps = torch.stack([flat(gradients(rank, 0, parameters())).double().abs() for rank in range(world)])
        difference = (total.double() - exact(world, 0)).abs()
        assert (difference <= bounds(world, WAYS[number], steps)).all()
        assert number == 0 or difference.max() > 0


def low_rank(rank: int, sent_dtype: torch.dtype) -> list[float]:
    """Return the relative errors of PowerSGD's first three sums of gradients of rank 2."""
    given = parameters([(30, 50), (50, 30), (30, 50)])
    method = PowerSgdCompressor(dist.group.WORLD, 2, sent_dtype)
    (bucket,) = build_buckets([parameter for _, parameter in given], 10**6)
    found = []
    for step in range(3):
        draw, total = torch.Generator().manual_seed(step), torch.zeros(3 * 30 * 50)
        for other in range(2):
            left = torch.randn(30, 2, generator=draw) * (1 + other)
            one = left @ torch.randn(2, 50, generator=torch.Generator().manual_seed(7))
            total += flat([one, one.T, 2 * one])
            if other == rank:
                for (_, parameter), gradient in zip(given, (one, one.T, 2 * one), strict=True):
                    parameter.grad = gradient.clone()
        bucket.fill()
        for work in method.reduce(bucket):
            work.wait()
        found.append(float((bucket.flat - total).norm() / total.norm()))
    return found


@pytest.mark.parametrize(("sent_dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_powersgd_adds_up_matrices_of_its_rank_to_rounding(
    tmp_path: Path, sent_dtype: torch.dtype, bound: float
) -> None:
    """Error feedback adds rounding errors of bfloat16 (8 significant bits) to the next gradient.

    The errors do not have low rank, so PowerSGD cannot send them exactly; the bound for bfloat16 allows this.
    """
    for errors in on_ranks(2, tmp_path, low_rank, sent_dtype):
        assert max(errors) < bound


def test_sent_bytes_are_a_fraction_of_uncompressed_gradients(first_sums: tuple[int, list[Any]]) -> None:
    world, ranks = first_sums
    count = len(exact(1, 0))
    sent = [bytes_sent for _, bytes_sent in ranks[0]]
    assert sent[0] == pytest.approx(2 * (world - 1) / world * 4 * count, abs=len(sizes_of_buckets()))
    assert sent[1] == pytest.approx(sent[0] / 2, abs=len(sizes_of_buckets()))
    # One byte per number and 4 bytes per 16 numbers; each rank's share is a whole number of blocks.
    assert sent[0] * 1.25 / 4 <= sent[3] <= sent[0] * 1.25 / 4 + 2 * world * 20 * len(sizes_of_buckets())
    assert sent[4] < sent[5] < sent[0]


def resumed(rank: int, uncompressed_sums: int) -> list[tuple[bool, bool, int]]:
    """Return, for each method, whether twelve steps with restarts give the same sums and the same last state.

    The reference is a run without restarts. The third value is the size of the state.
    """
    found = []
    for settings in COMPRESSED:
        given = parameters()
        whole = wire_of(given, uncompressed_sums, **settings)
        sums = [add_up(whole, rank, step, given) for step in range(12)]
        wire, again = wire_of(given, uncompressed_sums, **settings), []
        for step in range(12):
            again.append(add_up(wire, rank, step, given))
            if step in (2, 6):
                states: list[Any] = [None, None]
                dist.all_gather_object(states, safetensors.torch.save(wire.state()))
                wire = wire_of(given, uncompressed_sums, **settings)
                wire.restore([safetensors.torch.load(one) for one in states])
        one, other = whole.state(), wire.state()
        same = one.keys() == other.keys() and all(torch.equal(tensor, other[name]) for name, tensor in one.items())
        found.append((all(map(torch.equal, sums, again)), same, len(one)))
    return found


@pytest.mark.parametrize("uncompressed_sums", [0, 5])
def test_resume_from_a_state_gives_same_sums(tmp_path: Path, uncompressed_sums: int) -> None:
    sizes = [1, 1, *(1 + len(sizes_of_buckets()) * n for n in (2, 2, 2))]
    for found in on_ranks(2, tmp_path, resumed, uncompressed_sums):
        assert found == [(True, True, size) for size in sizes]


def handed_over(rank: int, states: list[list[dict[str, Tensor]]]) -> list[tuple[Tensor, Any, Any]]:
    """Return, for each method, the sum of one step after restoring `states` of another number of ranks.

    The other values are the states before and after that step.
    """
    found = []
    for settings, of_ranks in zip(REMEMBERING, states, strict=True):
        given = parameters()
        wire = wire_of(given, **settings)
        wire.restore(of_ranks)
        taken = wire.state()
        found.append((add_up(wire, rank, 12, given), taken, wire.state()))
    return found


@pytest.mark.parametrize(("old", "new"), [(4, 2), (2, 4), (3, 2), (2, 3)])
def test_another_number_of_ranks_loses_nothing(
    tmp_path: Path, twelve_steps: Callable[[int], list[Any]], old: int, new: int
) -> None:
    states = [[found[number][1] for found in twelve_steps(old)] for number in range(len(REMEMBERING))]
    ranks = on_ranks(new, tmp_path, handed_over, states)
    for number, before in enumerate(states):
        had = left_over(before)
        scale = 1e-5 * largest_of_buckets(had.abs()[None])
        assert ((left_over([found[number][1] for found in ranks]) - had).abs() <= scale).all()
        total = ranks[0][number][0]
        assert all(torch.equal(found[number][0], total) for found in ranks)
        after = left_over([found[number][2] for found in ranks])
        assert ((total + after - had - exact(new, 12)).abs() <= 3 * scale + 1e-5).all()


@pytest.mark.parametrize("number", range(len(REMEMBERING)), ids=[name_of(way) for way in REMEMBERING])
def test_a_single_rank_gets_the_unsent_parts_of_all(twelve_steps: Callable[[int], list[Any]], number: int) -> None:
    states = [found[number][1] for found in twelve_steps(2)]
    given = parameters()
    wire = GradientReducer(given, None, compression(**REMEMBERING[number]))
    wire.restore(states)
    first, second = add_up(wire, 0, 12, given), add_up(wire, 0, 13, given)
    torch.testing.assert_close(first.double(), left_over(states) + exact(1, 12), rtol=1e-5, atol=1e-5)
    assert torch.equal(second, flat(gradients(0, 13, given)))
    assert wire.sent_bytes == 0
    assert "there is one rank" in wire.warning


def computed_twice(rank: int) -> list[Any]:
    """Return, for each method, a repeated step and a step with NaN on one rank, with the states before and after."""
    found = []
    for settings in COMPRESSED:
        given = parameters()
        wire = wire_of(given, **settings)
        for step in range(3):
            add_up(wire, rank, step, given)
        before = wire.state()
        first = add_up(wire, rank, 3, given)
        wire.undo()
        again, state = add_up(wire, rank, 3, given), wire.state()
        finite = []
        for bad in (float("nan"), float("inf")):
            for _, parameter in given:
                parameter.grad = torch.ones_like(parameter)
            if rank == 1:
                given[0][1].grad[3, 3] = bad  # type: ignore[index]
            wire.sum()
            finite.append(bool(flat([p.grad for _, p in given if p.grad is not None]).isfinite().all()))
        found.append((before, torch.equal(first, again), state, finite, wire.state(), add_up(wire, rank, 4, given)))
    return found


def test_a_skipped_step_leaves_the_state_unchanged(tmp_path: Path) -> None:
    for found in on_ranks(2, tmp_path, computed_twice):
        for before, same, state, finite, after, following in found:
            assert same
            assert int(state["sums"]) == int(before["sums"]) + 1
            assert finite == [False, False]
            assert state.keys() == after.keys()
            assert all(torch.equal(tensor, after[name]) for name, tensor in state.items())
            assert following.isfinite().all()


def zero_first(rank: int, of_rank: int) -> tuple[float, bool]:
    """Return the relative error of 200 sums after a first gradient of zero, as LoRA's A has.

    The second value tells whether the first sum is zero.
    """
    given = parameters([(16, 60)])
    wire = wire_of(given, method="powersgd", rank=of_rank, bucket_bytes=10**6)
    wire.sum()
    zero = not flat([p.grad for _, p in given if p.grad is not None]).any()
    steady = torch.randn(16, 60, generator=torch.Generator().manual_seed(0))
    total = torch.zeros(16, 60)
    for _ in range(200):
        given[0][1].grad = steady.clone()
        wire.sum()
        total += given[0][1].grad
    return float((total / 400 - steady).norm() / steady.norm()), zero


@pytest.mark.parametrize("of_rank", [1, 4])
def test_powersgd_learns_a_matrix_whose_first_gradient_was_zero(tmp_path: Path, of_rank: int) -> None:
    for distance, zero in on_ranks(2, tmp_path, zero_first, of_rank):
        assert zero
        assert distance < 0.2


def small_numbers(rank: int) -> Tensor:
    """Return sums in float16 of numbers that are too small for float16."""
    given = parameters([(64,)])
    wire = wire_of(given, method="fp16")
    given[0][1].grad = torch.linspace(1e-9, 1e-8, 64) * (rank + 1)
    wire.sum()
    return flat([p.grad for _, p in given if p.grad is not None])


def test_float16_has_a_scale_that_ranks_agree_on(tmp_path: Path) -> None:
    for total in on_ranks(2, tmp_path, small_numbers):
        torch.testing.assert_close(total, 3 * torch.linspace(1e-9, 1e-8, 64), rtol=4 * 2.0**-11, atol=0)


def partly_missing(rank: int) -> tuple[Tensor, Tensor]:
    """Return a sum in which this rank lacks the gradient of one parameter, and all ranks lack that of the other."""
    one, other = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2, 2))
    wire = wire_of([("one", one), ("other", other)])
    one.grad = torch.ones(3) if rank else None
    wire.sum()
    assert one.grad is not None
    assert other.grad is not None
    return one.grad, other.grad


def test_a_gradient_that_a_rank_does_not_have_counts_as_zeros(tmp_path: Path) -> None:
    for one, other in on_ranks(2, tmp_path, partly_missing):
        assert torch.equal(one, torch.ones(3))
        assert torch.equal(other, torch.zeros(2, 2))


def beside_torchs(rank: int) -> list[float]:
    """Return the relative differences of five sums of PowerSGD from those of torch's hook with the same initial Q."""
    given = parameters([(20, 30), (15, 40), (40, 12)])
    method = PowerSgdCompressor(dist.group.WORLD, 3, sent_dtype=torch.float32)  # torch's hook sends float32
    (mine,), (bucket,) = (build_buckets([parameter for _, parameter in given], 10**6) for _ in range(2))
    torch_bucket = SimpleNamespace(
        buffer=lambda: bucket.flat, gradients=bucket.gradients, index=lambda: 0, is_last=lambda: True
    )
    theirs = PowerSGDState(dist.group.WORLD, 3, start_powerSGD_iter=2, min_compression_rate=1)
    theirs.iter = 2
    theirs.q_memory_dict[0] = torch.cat(
        [torch.randn(3 * m, generator=torch.Generator().manual_seed(0)) for m in (30, 40, 12)]
    )
    theirs.p_memory_dict[0] = torch.empty(3 * (20 + 15 + 40))
    found = []
    for step in range(5):
        for (_, parameter), gradient in zip(given, gradients(rank, step, given), strict=True):
            parameter.grad = gradient
        mine.fill()
        for work in method.reduce(mine):
            work.wait()
        bucket.fill()
        total = powerSGD_hook(theirs, torch_bucket).wait() * 2
        found.append(float((mine.flat - total).norm() / total.norm()))
    dist.barrier()
    time.sleep(0.2)  # torch's threads still use the group; if they release it last, the process ends
    return found


def test_powersgd_is_torchs(tmp_path: Path) -> None:
    for distances in on_ranks(2, tmp_path, beside_torchs):
        assert max(distances) < 1e-4


def test_buckets_are_in_order_and_within_the_size_limit() -> None:
    given = [parameter for _, parameter in parameters()]
    found = build_buckets(given, 2000)
    assert [id(one) for bucket in found for one in bucket.members] == [id(one) for one in given]
    assert [bucket.number for bucket in found] == list(range(len(found)))
    assert all(len(bucket.flat) <= 500 or len(bucket.members) == 1 for bucket in found)
    assert len(found) > 1
    assert [len(one.flat) for one in build_buckets(given, 4)] == [one.numel() for one in given]
    assert build_buckets([], 2000) == []


def test_eight_bits_come_back_within_half_a_scale() -> None:
    values = torch.randn(3, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-44, 30, 96)
    back = gradient_compression.dequantize_blocks(gradient_compression.quantize_blocks(values, 6), 6)
    largest = values.view(3, -1, 6).abs().amax(-1, keepdim=True).expand(3, 16, 6).reshape(3, 96)
    assert ((back - values).abs() <= largest / 254 * (1 + 1e-6) + torch.finfo(torch.float32).tiny).all()
    assert not gradient_compression.dequantize_blocks(
        gradient_compression.quantize_blocks(torch.zeros(2, 8), 4), 4
    ).any()
    for bad in (torch.nan, torch.inf):
        values = torch.ones(1, 8)
        values[0, 1] = bad
        assert gradient_compression.dequantize_blocks(
            gradient_compression.quantize_blocks(values, 4), 4
        ).isfinite().tolist() == [[False] * 4 + [True] * 4]


@pytest.mark.parametrize(
    ("settings", "state", "text"),
    [
        ({"method": "int8"}, {"sums": torch.tensor([1]), "error.0": torch.zeros(3)}, "error.0 has 3 numbers, expected"),
        ({"method": "int8"}, {"sums": torch.tensor([1]), "q.0": torch.zeros(3)}, "expected no such tensor"),
        ({"method": "powersgd"}, {"error.0": torch.zeros(sizes_of_buckets()[0])}, "sums is missing"),
    ],
)
def test_a_state_of_other_settings_is_refused(settings: dict[str, Any], state: dict[str, Tensor], text: str) -> None:
    with pytest.raises(DamagedFileError, match=text):
        GradientReducer(parameters(), None, compression(**settings)).restore([state])


def test_without_compression_there_is_no_state_and_no_warning() -> None:
    wire = GradientReducer(parameters(), None, compression(method="none"))
    wire.restore([{}, {}])
    assert wire.state() == {}
    assert wire.warning == ""


class Group:
    """A process group with the methods that a Wire calls before it sends anything."""

    def __init__(self, count: int) -> None:
        self.count = count

    def size(self) -> int:
        return self.count

    def rank(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("world", "settings", "remark"),
    [
        (2, {"method": "powersgd", "rank": 64}, "set it below train.rank"),
        (2, {"method": "powersgd", "rank": 2}, ""),
        (12, {"method": "int8"}, ""),
    ],
    ids=["rank too high", "rank 2", "int8 of 12 ranks"],
)
def test_useless_compression_gives_a_warning(world: int, settings: dict[str, Any], remark: str) -> None:
    found = GradientReducer(parameters(), Group(world), GradientCompressionSettings(**settings)).warning
    assert remark in found
    assert bool(found) == bool(remark)


@pytest.mark.parametrize(
    ("settings", "steps", "whole"),
    [
        ({"method": "powersgd"}, 156, 16),
        ({"method": "powersgd", "warmup_ratio": 0.25}, 8, 2),
        ({"method": "powersgd", "warmup_ratio": 0}, 8, 0),
        ({"method": "int8"}, 156, 0),
    ],
)
def test_a_fraction_of_the_training_is_sent_whole_where_that_helps(
    settings: dict[str, Any], steps: int, whole: int
) -> None:
    assert GradientCompressionSettings.model_validate(settings).uncompressed_steps(steps) == whole
