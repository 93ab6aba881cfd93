"""Tests of `ratchet forecast` for a model config and for a project: text, JSON and page."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tiny_project
from forecast_cases import find_largest_sizes
from forecast_command_cases import (
    LARGE,
    ON_GPU,
    SETTINGS,
    asked,
    config,  # noqa: F401 (a fixture)
    lines,
)
from ratchet.cli.forecast import format_forecast
from ratchet.config import units
from ratchet.config.machine import Machine
from ratchet.config.settings import Settings
from ratchet.config.train import Train
from ratchet.errors import BaseModelError, SettingsError
from ratchet.models import model_spec
from ratchet.models.memory import forecast
from ratchet.models.memory.forecast import MemoryWorkload
from ratchet.stages import forecast as verb
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.base import BaseCard
from ratchet.storage.records.training import PHASES, MemoryForecast


@pytest.fixture(scope="module")
def known(config: Path) -> dict[str, Any]:
    """Return the forecast for a known amount of memory."""
    return asked(config, memory_bytes=LARGE)


def test_the_answer_is_the_forecast_of_the_largest_micro_batch(config: Path, known: dict[str, Any]) -> None:
    work = MemoryWorkload(
        rows=3, row_tokens=64, learned_tokens=32, packed=False, device="cuda", validation_rows=3, validation_tokens=64,
        validation_learned_tokens=32,
    )  # fmt: skip
    plan = model_spec.load(config)
    expected = forecast.forecast(plan, SETTINGS.train, SETTINGS.machine, work)
    written = MemoryForecast.model_validate(known["forecast"])
    assert written.phases == expected.phases
    assert (known["peak_bytes"], known["peak_phase"]) == (expected.peak.total_bytes, expected.peak.phase)
    assert written.trainable_parameters == expected.trainable_parameters
    assumption = "No data is prepared: the forecast assumes rows of 64 tokens and learns from 50% of them."
    assert any(assumption in note for note in written.notes)
    limits = find_largest_sizes(plan, SETTINGS.train, SETTINGS.machine, work, LARGE)
    assert known["largest"] == {
        "micro_batch_size": limits.micro_batch_size, "row_tokens": limits.row_tokens, "rank": limits.rank,
    }  # fmt: skip


def test_the_json_always_has_the_same_keys(config: Path, known: dict[str, Any]) -> None:
    unknown = asked(config)
    assert list(known) == list(unknown) == [
        "format", "architecture", "forecast", "peak_bytes", "peak_phase", "needed_bytes", "available_bytes", "fits",
        "largest", "packed", "local_ranks",
    ]  # fmt: skip
    assert (known["architecture"], known["available_bytes"], known["fits"]) == ("LlamaForCausalLM", 24 * 2**30, True)
    assert (unknown["available_bytes"], unknown["fits"], unknown["largest"]) == (None, None, None)
    assert [phase["phase"] for phase in known["forecast"]["phases"]] == list(PHASES)


def test_rows_and_tokens_of_the_command_line_come_before_those_of_the_settings(config: Path) -> None:
    usual, more = asked(config), asked(config, rows=5, tokens=256)
    assert [usual["forecast"][key] for key in ("rows", "row_tokens", "learned_tokens")] == [3, 64, 32]
    assert [more["forecast"][key] for key in ("rows", "row_tokens", "learned_tokens")] == [5, 256, 128]
    assert more["peak_bytes"] > usual["peak_bytes"]
    packed = SETTINGS.model_copy(update={"train": Train(rank=4, alpha=8, batching="packed", pack_tokens=512)})
    assert asked(config, packed)["forecast"]["row_tokens"] == 512


def test_the_table_holds_every_part_of_every_phase(config: Path) -> None:
    found = MemoryForecast.model_validate(asked(config)["forecast"])
    text = lines(config)
    size, unit = units.choose_unit(found.peak.total_bytes)
    parts = {part for phase in found.phases for part in phase.parts}
    rows = {line[: line.index("  ")]: line.split()[-len(PHASES) :] for line in text[3 : 5 + len(parts)]}
    assert rows.keys() == {unit, "in all", *parts}
    assert rows["in all"] == [f"{phase.total_bytes / size:,.2f}" for phase in found.phases]
    for part in parts:
        amounts = [phase.parts.get(part) for phase in found.phases]
        assert rows[part] == [f"{amount / size:,.2f}" if amount else "-" for amount in amounts], part


def test_on_a_cpu_it_is_compared_with_the_memory_of_this_machine_or_a_ranks_share(config: Path) -> None:
    found = asked(config, device="cpu")
    assert found["fits"] is True
    assert found["available_bytes"] > 2**28
    assert found["forecast"]["host_bytes"] == found["peak_bytes"]
    text = "\n".join(lines(config, device="cpu", ranks=4, memory_bytes=LARGE))
    assert "6.00 GiB available for each of 4 ranks: it fits" in text


def test_a_page_is_written_as_well(config: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    text = lines(config, html=page)
    assert text[0] == lines(config)[0]
    assert f"<strong><bdi>{units.format_bytes(asked(config)['peak_bytes'])}</bdi></strong>" in page.read_text(
        encoding="utf-8"
    )


def test_ranks_hold_what_they_need_to_add_up_gradients_and_their_part_of_a_step(config: Path) -> None:
    alone, pair = asked(config)["forecast"], asked(config, ranks=2)["forecast"]
    assert (alone["ranks"], pair["ranks"]) == (1, 2)
    of_step = {phase["phase"]: phase["parts"] for phase in pair["phases"]}["steady"]
    assert of_step["communication"] >= 4 * pair["trainable_parameters"]
    assert "communication" not in str(alone["phases"])
    gpus = Machine(gpus=2, micro_batch_size=3)
    nodes = Machine(gpus=1, nodes="2:4", rendezvous="host:1", micro_batch_size=3)
    for machine in (gpus, nodes):
        found = asked(config, SETTINGS.model_copy(update={"machine": machine}))["forecast"]
        assert (found["ranks"], found["phases"]) == (2, pair["phases"]), "as settings say"
    assert SETTINGS.train.batch_size == 32
    assert asked(config, ranks=16)["forecast"]["rows"] == 2
    assert asked(config, ranks=16, rows=3)["forecast"]["rows"] == 3, "rows that are asked for are taken"


@pytest.fixture
def layout(prepared: Path) -> ProjectLayout:
    """Create a prepared project; the tests of this module only read it."""
    return ProjectLayout(prepared)


def test_rows_are_those_of_the_prepared_data(layout: ProjectLayout) -> None:
    found = json.loads(verb.forecast(layout, tiny_project.SETTINGS, ON_GPU).model_dump_json())["forecast"]
    card = json.loads(layout.dataset_card.read_text(encoding="utf-8"))
    assert found["rows"] == tiny_project.MACHINE.micro_batch_size
    assert found["row_tokens"] == card["lengths"]["train"]["greatest"]
    assert 1 <= found["learned_tokens"] < found["row_tokens"]
    assert not any("No data is prepared" in note for note in found["notes"])
    longer = json.loads(
        verb.forecast(layout, tiny_project.SETTINGS, replace(ON_GPU, tokens=600, rows=2)).model_dump_json()
    )["forecast"]
    assert (longer["rows"], longer["row_tokens"]) == (2, 600)
    share = found["learned_tokens"] / found["row_tokens"]
    assert longer["learned_tokens"] == pytest.approx(600 * share, abs=1)


def test_a_note_says_that_another_base_has_other_tokens(layout: ProjectLayout, config: Path) -> None:
    said = "The lengths of rows are those of the prepared data, in tokens of the project's own base."
    assert said in format_forecast(verb.forecast(layout, tiny_project.SETTINGS, replace(ON_GPU, base=config)))
    assert said not in format_forecast(verb.forecast(layout, tiny_project.SETTINGS, ON_GPU))


def test_weights_are_never_read(layout: ProjectLayout, tmp_path: Path) -> None:
    shutil.copytree(layout.root, tmp_path / "project")
    copy = ProjectLayout(tmp_path / "project")
    (copy.tiny_model / "model.safetensors").unlink()
    assert "LlamaForCausalLM" in format_forecast(verb.forecast(copy, tiny_project.SETTINGS, ON_GPU))


def test_a_directory_is_read_before_stage_base_and_beside_a_card_of_another_source(
    project: ProjectLayout, config: Path
) -> None:
    settings = Settings.model_validate({"base": {"source": str(config.parent)}})
    assert not project.base_card.exists()
    assert "LlamaForCausalLM" in format_forecast(verb.forecast(project, settings, ON_GPU))
    BaseCard(
        source="elsewhere", revision=None, digest="d" * 64, files={}, architecture="X", parameters=1, licence=None
    ).save(project.base_card)
    assert "LlamaForCausalLM" in format_forecast(verb.forecast(project, settings, ON_GPU))


def test_without_a_base_the_message_names_the_flag(project: ProjectLayout, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"base.source: tiny: stage base has not run.*--base"):
        verb.forecast(project, Settings(), ON_GPU)
    hub = Settings.model_validate({"base": {"source": "org/model", "revision": "main"}})
    with pytest.raises(SettingsError, match=r"base.source: org/model: stage base has not run"):
        verb.forecast(project, hub, ON_GPU)
    with pytest.raises(SettingsError, match=r"no Ratchet project here: name a base with --base"):
        verb.forecast(None, Settings(), ON_GPU)
    with pytest.raises(SettingsError, match=r"--base .*gone.json: no such file"):
        verb.forecast(None, Settings(), replace(ON_GPU, base=tmp_path / "gone.json"))
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(BaseModelError, match=r"config.json"):
        verb.forecast(None, Settings(), replace(ON_GPU, base=tmp_path))


@pytest.mark.parametrize(
    ("option", "expected"),
    [("rows", "1 to 10,000"), ("tokens", "1 to 10,000,000"), ("memory_bytes", "1 or more"), ("ranks", "1 to 10,000")],
)
def test_numbers_out_of_range_are_refused(config: Path, option: str, expected: str) -> None:
    with pytest.raises(SettingsError, match=rf"found 0; expected {expected}$"):
        asked(config, **{option: 0})
    if option != "memory_bytes":
        with pytest.raises(SettingsError, match=rf"found 1,000,000,000; expected {expected}$"):
            asked(config, **{option: 10**9})


def test_a_micro_batch_that_no_machine_could_hold_is_refused(config: Path) -> None:
    with pytest.raises(SettingsError, match=r"10,000 rows of 1,000,000 tokens: .* has 10,000,000,000 tokens; .*--rows"):
        asked(config, rows=10_000, tokens=1_000_000)


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("24GiB", 24 * 2**30), ("24 GB", 24 * 10**9), ("24564MiB", 24564 * 2**20), ("1.5gib", 3 * 2**29),
        ("512kB", 512_000), (" 2TiB ", 2**41), ("100b", 100),
    ],
)  # fmt: skip
def test_amounts_of_memory_are_read(text: str, count: int) -> None:
    assert units.parse_bytes(text, "--memory") == count


@pytest.mark.parametrize("text", ["", "24", "24G", "GiB", "-1GiB", "1e3MiB", "0GiB", "nan GiB", "24 gigabytes", "٢GiB"])
def test_invalid_amounts_of_memory_are_refused(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--memory: .*24GiB"):
        units.parse_bytes(text, "--memory")


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (1023, "1023 bytes"), (1536, "1.5 KiB"), (2**20, "1.0 MiB"), (5 * 2**29, "2.50 GiB")],
)
def test_amounts_are_written_for_people(count: int, text: str) -> None:
    assert units.format_bytes(count) == text
