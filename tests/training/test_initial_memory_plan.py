"""Tests of the memory plan before loading: it is reported once per run, and refused if not even one row fits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers

from initial_memory_plan_cases import (
    MACHINE,
    SHARED,
    SHORT,
    SIZE,
    TRAIN,
    WORK,
    Room,
    asked,
    begun_with,
    notices,
    room,  # noqa: F401 (a fixture)
    wide,  # noqa: F401 (a fixture)
)
from ratchet.data.batches import BatchPlan, TokenRows
from ratchet.data.conversation import IGNORE_INDEX
from ratchet.errors import SettingsError
from ratchet.models import model_spec
from ratchet.models.memory import forecast
from ratchet.models.model_spec import ModelSpec
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalReader
from ratchet.storage.records.training import MemoryForecast
from ratchet.training import memory_monitor
from ratchet.training.memory_monitor import InitialMemoryPlan
from small_loop import SHAPE

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def llama() -> ModelSpec:
    return model_spec.from_config(transformers.LlamaConfig(**SHAPE | SIZE))


def rows_of(lengths: list[int], learned: list[tuple[int, int]]) -> TokenRows:
    labels = [[k if a <= k < b else IGNORE_INDEX for k in range(n)] for n, (a, b) in zip(lengths, learned, strict=True)]
    return TokenRows.from_lists([list(range(n)) for n in lengths], labels)


def test_work_is_that_of_the_longest_rows_or_the_fullest_packs() -> None:
    rows = rows_of([5, 30, 20, 8], [(1, 5), (25, 30), (10, 14), (2, 4)])
    checked = rows_of([7, 9], [(3, 7), (5, 9)])
    work = memory_monitor.compute_largest_work(BatchPlan(rows.lengths, TRAIN), rows, checked, MACHINE, CPU)
    assert (work.rows, work.row_tokens, work.packed, work.device) == (2, 30, False, "cpu")
    assert work.learned_tokens == 5  # the mean of 5 and 4 positions, rounded up
    assert (work.validation_rows, work.validation_tokens, work.validation_learned_tokens) == (2, 9, 4)
    rows = rows_of([20, 12, 9, 6], [(1, 20), (1, 12), (1, 9), (1, 6)])
    packed = TRAIN.model_copy(update={"batching": "packed", "pack_tokens": 21, "batch_size": 2})
    work = memory_monitor.compute_largest_work(BatchPlan(rows.lengths, packed), rows, rows, MACHINE, CPU)
    assert (work.rows, work.row_tokens, work.packed) == (2, 21, True)


def test_forecast_is_told_once_for_each_work_and_kept_beside_the_journal(tmp_path: Path, llama: ModelSpec) -> None:
    events = asked(tmp_path, llama)
    assert [event.kind for event in events] == ["memory_forecast"]
    kept = MemoryForecast.load(RunPaths(tmp_path).forecast)
    assert MemoryForecast.model_validate(events[0].data["forecast"]) == kept
    assert (kept.rows, kept.row_tokens, kept.learned_tokens) == (32, 512, 256)
    assert asked(tmp_path, llama) == events, "a second attempt says nothing new"
    for count, changes in enumerate([{"rows": 4}, {"rows": 4, "ranks": 2}], start=2):
        other = asked(tmp_path, llama, work=replace(WORK, **changes))
        assert [event.kind for event in other] == ["memory_forecast"] * count


def test_on_a_cpu_a_run_begins_with_as_many_rows_as_fit(tmp_path: Path, llama: ModelSpec, room: Room) -> None:
    """Too little memory reduces the rows before the training starts. On a CPU no allocation fails: Linux overcommits
    memory and kills the process that uses it."""

    def needed(rows: int) -> int:
        fewer = replace(WORK, rows=rows, validation_rows=rows)
        return forecast.forecast(llama, TRAIN, MACHINE, fewer).peak.total_bytes

    assert begun_with(tmp_path, llama) == InitialMemoryPlan(), "all fit"
    room(int((needed(8) + needed(16)) / 2 / memory_monitor.SAFE_SHARE))
    assert begun_with(tmp_path, llama) == InitialMemoryPlan(8 * WORK.row_tokens)
    assert "starting with 8 rows" in list(JournalReader(tmp_path / "journal.jsonl").read())[-1].data["text"]


def test_on_a_gpu_a_run_begins_with_all_rows(tmp_path: Path, llama: ModelSpec, room: Room) -> None:
    """An allocation that does not fit fails there, and then micro-batches are made smaller."""
    work = replace(WORK, device="cuda")
    whole = forecast.forecast(llama, TRAIN, MACHINE, work).peak.total_bytes
    room(whole - 1)
    assert begun_with(tmp_path, llama, work=work) == InitialMemoryPlan()
    (notice,) = notices(tmp_path)
    assert notice.endswith("micro-batches shrink when they do not fit")


def test_what_fits_with_fewer_rows_at_a_time_is_a_notice(tmp_path: Path, llama: ModelSpec, room: Room) -> None:
    whole = forecast.forecast(llama, TRAIN, MACHINE, WORK).peak.total_bytes
    single = forecast.forecast(llama, TRAIN, MACHINE, WORK.single_row()).peak.total_bytes
    assert single < whole
    room((whole + single) // 2)
    notices = [event.data["text"] for event in asked(tmp_path, llama) if event.kind == "notice"]
    assert len(notices) == 1
    assert "32 rows at a time would need" in notices[0]


@pytest.mark.long
def test_work_that_does_not_fit_with_one_row_is_refused_or_reported(
    tmp_path: Path, llama: ModelSpec, room: Room
) -> None:
    for name in ("refused", "reported"):
        (tmp_path / name).mkdir()
    room(2**20)
    with pytest.raises(SettingsError, match="even with one row at a time") as refused:
        asked(tmp_path / "refused", llama)
    for words in (
        "1.0 MiB are available",
        "Nothing was loaded",
        "--force",
        "machine.on_insufficient_memory: report",
        "The forecast needs",
    ):
        assert words in str(refused.value), words
    events = asked(tmp_path / "reported", llama, MACHINE.model_copy(update={"on_insufficient_memory": "report"}))
    assert [event.kind for event in events] == ["memory_forecast", "alert"]


def test_a_model_without_a_forecast_may_train(
    tmp_path: Path, llama: ModelSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_such_operation(*_: object) -> MemoryForecast:
        raise NotImplementedError("aten::mystery")

    monkeypatch.setattr(forecast, "forecast", no_such_operation)
    events = asked(tmp_path, llama)
    assert [event.kind for event in events] == ["notice"]
    assert "no memory forecast for this model (NotImplementedError: aten::mystery)" in events[0].data["text"]
    assert "train.rank" in memory_monitor.suggest_memory_changes(llama, TRAIN, MACHINE, WORK, 64), (
        "advice without figures"
    )


def test_advice_for_a_row_that_did_not_fit_has_figures(llama: ModelSpec) -> None:
    said = memory_monitor.suggest_memory_changes(llama, TRAIN, MACHINE, WORK, 4000)
    for words in ("The forecast needs", "prepare.max_tokens: 2000", "less)"):
        assert words in said, words


@pytest.mark.parametrize(
    ("ranks", "beginning", "said"),
    [
        (1, InitialMemoryPlan(), ["machine.shard_base: true has no effect with a single rank"]),
        (2, InitialMemoryPlan(shard_base=True), []),
    ],
)
def test_base_is_shared_by_several_ranks_on_request_though_it_would_fit(
    tmp_path: Path, llama: ModelSpec, ranks: int, beginning: InitialMemoryPlan, said: list[str]
) -> None:
    assert begun_with(tmp_path, llama, SHARED, replace(WORK, ranks=ranks)) == beginning
    assert notices(tmp_path) == said


def test_ranks_of_one_machine_without_gpus_load_one_after_the_other(
    tmp_path: Path, wide: ModelSpec, room: Room
) -> None:
    """Four copies of the whole base do not fit, one copy does."""
    short = replace(SHORT, device="cpu", local_ranks=4)
    found = forecast.forecast(wide, TRAIN, SHARED, short)
    assert found.peak.phase == "loaded"
    enough = 4 * found.needed_bytes(4) + 2**20
    room(enough)
    assert enough < 4 * found.peak.total_bytes
    assert begun_with(tmp_path, wide, SHARED, short) == InitialMemoryPlan(shard_base=True)
