"""Tests passthrough fields: they are stored with their rows and never trained on."""

import json
from pathlib import Path
from typing import Any

import pytest

import tiny_project
from ratchet.config.base import Base
from ratchet.config.prepare import (
    ColumnSettings,
    DeduplicationSettings,
    Prepare,
    SourceSettings,
    SplitSettings,
)
from ratchet.config.settings import Settings
from ratchet.data import token_files
from ratchet.data.splits import SPLITS
from ratchet.errors import DataError
from ratchet.runs.directory import RunSpec
from ratchet.stages import base, init, prepare
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DatasetCard


def records(count: int = 60) -> list[dict[str, Any]]:
    """Build requests with a channel (text), an urgency (number), a flag, and a thread that two rows share."""
    topics = ["refund", "parcel", "login"]
    return [
        {
            "prompt": f"please see to my {topics[n % 3]} number {n}",
            "response": topics[n % 3],
            "channel": ["email", "phone ☎"][n % 2],
            "urgency": n / 4,
            "known": n % 2 == 0,
            "thread": f"t{n // 2}",
        }
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prepare a base model once; the tests do not depend on its weights."""
    layout = tiny_project.write(tmp_path_factory.mktemp("base"))
    base.base(Project.from_parts(layout, tiny_project.SETTINGS))
    return layout.tiny_model


def project(root: Path, model: Path, rows: list[dict[str, Any]], **changes: Any) -> tuple[ProjectLayout, Settings]:
    layout = ProjectLayout(root)
    for folder in (layout.raw, layout.tasks):
        folder.mkdir(parents=True, exist_ok=True)
    (layout.raw / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (layout.tasks / "answers.yaml").write_text(init.harness_task_yaml(8), encoding="utf-8")
    (layout.root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
    chosen = Prepare(
        sources=(SourceSettings(files="data/raw/rows.jsonl"),),
        columns=ColumnSettings(prompt="prompt", response="response"),
        deduplication=DeduplicationSettings(jaccard_threshold=None), **changes,
    )  # fmt: skip
    settings = Settings(base=Base(source=str(model)), prepare=chosen)
    tiny_project.save(layout, settings)
    if not layout.base_card.exists():
        base.base(Project.from_parts(layout, settings))
    return layout, settings


def prepared(root: Path, model: Path, rows: list[dict[str, Any]], **changes: Any) -> tuple[ProjectLayout, DatasetCard]:
    layout, settings = project(root, model, rows, **changes)
    prepare.prepare(Project.from_parts(layout, settings))
    return layout, DatasetCard.load(layout.dataset_card)


def written(layout: ProjectLayout) -> dict[str, tuple[dict[str, str], str | None]]:
    """Map the content of each row's first message to its fields and its group."""
    found = {}
    for split in SPLITS:
        data = token_files.open_split(layout.data, split)
        for text, fields, group in zip(data["conversation"], data["fields"], data["group"], strict=True):
            found[json.loads(text)["messages"][0]["content"]] = (json.loads(fields), group)
    return found


def test_fields_and_the_group_of_the_split_stay_with_their_rows_as_text(tmp_path: Path, model: Path) -> None:
    rows, split = records(), SplitSettings(group="thread", validation=0.2, test=0.3)
    layout, card = prepared(tmp_path, model, rows, extra_fields=("channel", "urgency", "known"), split=split)
    found = written(layout)
    assert len(found) == card.rows_out == 60
    assert found[rows[5]["prompt"]][0] == {"channel": "phone ☎", "urgency": "1.25", "known": "false"}
    assert found[rows[8]["prompt"]][0] == {"channel": "email", "urgency": "2.0", "known": "true"}
    assert {prompt: group for prompt, (_, group) in found.items()} == {row["prompt"]: row["thread"] for row in rows}


def test_passthrough_fields_do_not_change_the_run_id(tmp_path: Path, model: Path) -> None:
    layout, without = prepared(tmp_path, model, records())
    documents = (layout.data / "test.jsonl").read_bytes()
    _, one = prepared(tmp_path, model, records(), extra_fields=("channel",))
    assert (layout.data / "test.jsonl").read_bytes() == documents
    changed = [{**row, "channel": "chat"} for row in records()]
    _, other = prepared(tmp_path, model, changed, extra_fields=("channel",))
    cards = (without, one, other)
    runs = {RunSpec(train=tiny_project.TRAIN, data_digest=card.digest, base_digest="b").run_id for card in cards}
    assert len(runs) == 1
    assert len({card.fields_digest for card in cards}) == 3


def test_the_fields_of_duplicates_do_not_depend_on_row_order(tmp_path: Path, model: Path) -> None:
    again = [{**row, "channel": "chat"} for row in records()]
    layout, one = prepared(tmp_path, model, [*records(), *again], extra_fields=("channel", "urgency"))
    first = written(layout)
    _, other = prepared(tmp_path, model, [*reversed(again), *records()], extra_fields=("channel", "urgency"))
    assert one.dropped["duplicate"].count == 60
    assert {fields["channel"] for fields, _ in first.values()} == {"email", "phone ☎", "chat"}
    assert (written(layout), other.fields_digest) == (first, one.fields_digest)


def test_missing_values_are_empty_and_counted(tmp_path: Path, model: Path) -> None:
    rows = records()
    rows[3]["channel"] = None
    del rows[4]["channel"]
    layout, card = prepared(tmp_path, model, rows, extra_fields=("channel", "urgency"))
    found = written(layout)
    assert [found[rows[n]["prompt"]][0]["channel"] for n in (3, 4, 5)] == ["", "", "phone ☎"]
    assert {group for _, group in found.values()} == {None}
    assert card.missing_fields == {"channel": 2, "urgency": 0}
    assert "field 'channel' (prepare.extra_fields) has no value in 2 of 60 rows" in card.notes
    assert "has no value in 2 of 60 rows" in layout.dataset_page.read_text(encoding="utf-8")


def test_lists_and_objects_are_kept_as_json(tmp_path: Path, model: Path) -> None:
    rows = records()
    rows[3]["channel"], rows[4]["channel"] = [{"n": 1, "m": None}, "ü"], {}
    layout, _ = prepared(tmp_path, model, rows, extra_fields=("channel",))
    found = written(layout)
    assert [found[rows[n]["prompt"]][0]["channel"] for n in (3, 4)] == ['[{"n": 1, "m": null}, "ü"]', "{}"]


def test_a_field_that_no_record_has_is_refused_with_suggestions(tmp_path: Path, model: Path) -> None:
    layout, settings = project(tmp_path, model, records(), extra_fields=("chanel",))
    with pytest.raises(
        DataError, match=r"prepare\.extra_fields: no record has a field 'chanel'; did you mean 'channel'\?"
    ):
        prepare.prepare(Project.from_parts(layout, settings))
    assert not layout.data.exists()


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (["a", "\ud800"], "half a surrogate pair"),
        ("a\0b", "NUL"),
    ],
    ids=["list", "nul"],
)
def test_an_unsupported_field_value_is_a_malformed_row(tmp_path: Path, model: Path, value: Any, said: str) -> None:
    rows = records()
    rows[7]["channel"] = value
    layout, card = prepared(tmp_path, model, rows, extra_fields=("channel",), limits={"malformed": 0.05})
    assert card.dropped["malformed"].count == 1
    assert "rows.jsonl:8: field 'channel' (prepare.extra_fields)" in card.dropped["malformed"].examples[0]
    assert said in card.dropped["malformed"].examples[0]
    assert rows[7]["prompt"] not in written(layout)


def test_rows_prepared_without_field_columns_are_refused(tmp_path: Path, model: Path) -> None:
    import pyarrow as pa

    layout, _ = prepared(tmp_path, model, records())
    path = layout.data / "test.arrow"
    with pa.OSFile(str(path)) as stream:
        table = pa.ipc.open_stream(stream).read_all().drop_columns(["group", "fields"])
    with pa.ipc.new_stream(str(path), table.schema) as writer:
        writer.write_table(table)
    with pytest.raises(DataError, match="dvc repro -f prepare"):
        token_files.open_split(layout.data, "test")
