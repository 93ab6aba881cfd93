"""What a prompt's record says beside its prompt: the answer that it has, and the fields that answers carry along."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import made_answers
from generations import SETTINGS, Generation, project, with_generate
from ratchet.config import Settings
from ratchet.config_data import Columns, Prepare
from ratchet.config_generate import Generate
from ratchet.errors import EXIT_OK, DataError, SettingsError
from ratchet.generating import output
from ratchet.generating.prompts import Prompt, Source
from ratchet.generating.spec import Card
from ratchet.outputs import card_of

USER, BOT = {"role": "user", "content": "a"}, {"role": "assistant", "content": " b\n"}


def lines(path: Path, *records: Any) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def read(path: Path, settings: Settings = SETTINGS) -> list[Prompt]:
    return list(Source(path, settings).prompts())


@pytest.mark.parametrize(
    ("record", "reference"),
    [
        ({"prompt": "a", "response": "b"}, "b"),
        ({"question": "a", "answer": 7}, "7"),
        ({"text": "a", "label": "spam"}, "spam"),
        ({"text": "a", "output": "no pair"}, None),
        ({"instruction": "a", "input": "x", "output": "b"}, "b"),
        ({"prompt": "a", "response": ""}, None),
        ({"prompt": "a", "response": {"parts": ["b"]}}, None),
        ({"messages": [USER, BOT]}, " b"),
        ({"messages": [USER]}, None),
        ({"messages": [USER, BOT, USER]}, None),
        ({"prompt": [USER, BOT]}, " b"),
    ],
    ids=[
        "pair",
        "number",
        "label",
        "no pair",
        "alpaca",
        "empty",
        "object",
        "answered",
        "asked",
        "asked again",
        "turns",
    ],
)
def test_the_answer_that_a_record_has(record: dict[str, Any], reference: str | None, tmp_path: Path) -> None:
    [prompt] = read(lines(tmp_path / "p.jsonl", record))
    assert prompt.reference == reference
    assert Prompt.from_line(prompt.line().encode()) == prompt


def test_the_column_that_the_settings_name(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"said": "a", "wanted": "b", "answer": "c"})
    columns = Columns(prompt="said", response="wanted")
    assert [one.reference for one in read(path, Settings(prepare=Prepare(columns=columns)))] == ["b"]
    assert [one.reference for one in read(path, Settings(generate=Generate(column="said")))] == ["c"]


def test_what_is_kept_of_a_record(tmp_path: Path) -> None:
    settings = with_generate(keep=["topic", "rank", "sure", "none", "left"])
    path = lines(
        tmp_path / "p.jsonl",
        {"prompt": "a", "topic": "tax", "rank": 1.5, "sure": True, "none": None, "other": []},
        {"prompt": "b", "left": 3},
    )
    assert [one.fields for one in read(path, settings)] == [
        {"topic": "tax", "rank": 1.5, "sure": True, "none": None}, {"left": 3}
    ]  # fmt: skip
    table = tmp_path / "p.parquet"
    when = pa.scalar(0, pa.timestamp("s"))
    pq.write_table(pa.table({"prompt": ["a"], "topic": [when.as_py()], "rank": [float("nan")], "left": ["x"]}), table)
    assert read(table, with_generate(keep=["topic", "rank"]))[0].fields == {
        "topic": "1970-01-01T00:00:00",
        "rank": None,
    }


def test_reference_and_fields_are_part_of_the_digest(tmp_path: Path) -> None:
    settings = with_generate(keep=["topic"])
    records = [
        {"prompt": "a", "topic": "x"},
        {"prompt": "a", "topic": "y"},
        {"prompt": "a", "topic": "x", "answer": "b"},
    ]
    digests = {Source(lines(tmp_path / f"{n}.jsonl", one), settings).measured()[1] for n, one in enumerate(records)}
    assert len(digests) == 3


def test_a_field_that_nobody_has_and_one_that_cannot_be_kept(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"prompt": "a", "topic": ["x"]})
    with pytest.raises(DataError, match=r"no record has a field 'topics' \(generate.keep\); did you mean 'topic'\?"):
        Source(path, with_generate(keep=["topics"])).measured()
    with pytest.raises(DataError, match=r"field 'topic' \(generate.keep\) is a list, expected text"):
        Source(path, with_generate(keep=["topic"])).measured()


def test_references_outside_of_the_labels_are_told(tmp_path: Path) -> None:
    path = lines(
        tmp_path / "p.jsonl", *({"text": "a", "label": one} for one in ("ham", "spam ", "eggs")), {"text": "b"}
    )
    source = Source(path, with_generate(labels=["ham", "spam"]))
    source.measured()
    assert source.notes() == [
        "3 of them have a reference",
        "references that are none of the 2 generate.labels: 1, such as 'eggs'; how likely they are is not computed",
    ]


def test_a_long_reference_is_cut_visibly(tmp_path: Path) -> None:
    fits, long = "f" * 40, "balance_not_updated_after_cheque_or_cash_deposit"
    path = lines(tmp_path / "p.jsonl", *({"text": "a", "label": one} for one in (fits, long)))
    source = Source(path, with_generate(labels=["ham", "spam"]))
    source.measured()
    assert f"such as {fits!r}, 'balance_not_updated_after_cheque_or_cas…';" in source.notes()[-1]


def test_ids_that_stand_twice_are_told(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", *({"id": one, "text": "a"} for one in ("x", "y", "x", "x", "y" * 50, "y")))
    source = Source(path, with_generate())
    for _ in range(2):
        source.measured()
        assert source.notes() == [
            "prompts whose id an earlier one has: 3, such as 'x', 'y'; in the output their order tells them apart"
        ]


def test_a_refusal_names_prompts_only_where_the_records_are_others(tmp_path: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"text": "a", "n": 1})
    kept, plain = Source(path, with_generate(keep=["n"])), Source(path, with_generate())
    of_kept = made_answers.spec(keep=["n"]).model_copy(update={"prompts_digest": kept.measured()[1]})
    of_plain = made_answers.spec().model_copy(update={"prompts_digest": plain.measured()[1]})
    there = made_answers.write(tmp_path / "o.jsonl", [made_answers.record(1, "b", None)])
    card = Card.load(card_of(there)).model_copy(update={"spec": of_plain})
    card.save(card_of(there))
    with pytest.raises(SettingsError, match=r"differs in generate\.keep; remove it"):
        output.is_there(there, of_kept, kept.digest_with)
    lines(path, {"text": "c", "n": 1})
    changed = of_kept.model_copy(update={"prompts_digest": kept.measured()[1]})
    with pytest.raises(SettingsError, match=r"differs in generate\.keep, prompts_digest; remove it"):
        output.is_there(there, changed, kept.digest_with)
    assert kept.digest_with(made_answers.spec(keep=["gone"]).generate) is None


def test_a_refusal_says_what_lies_in_the_place_of_the_card(tmp_path: Path) -> None:
    spec, there = made_answers.spec(), made_answers.write(tmp_path / "o.jsonl", [made_answers.record(1, "b", None)])
    assert output.is_there(there, spec, lambda _: None)
    about = Card.load(card_of(there))
    for strange in ('{"rows": 7}', "no JSON"):
        card_of(there).write_text(strange, encoding="utf-8")
        with pytest.raises(SettingsError, match=r"not by `ratchet generate` \(o.jsonl.card.json is no card of that\);"):
            output.is_there(there, spec, lambda _: None)
    card_of(there).unlink()
    with pytest.raises(SettingsError, match=r"not by `ratchet generate` \(no o.jsonl.card.json lies beside it\); re"):
        output.is_there(there, spec, lambda _: None)
    about.save(card_of(there))
    there.unlink()
    assert not output.is_there(there, spec, lambda _: None)


def test_records_have_both_in_either_format(tmp_path: Path, chat_directory: Path) -> None:
    path = lines(tmp_path / "p.jsonl", {"text": "is wet", "label": "it", "topic": "sea"}, {"text": "what", "n": 1})
    project(tmp_path / "p")
    made = Generation(tmp_path / "p", path, with_generate(keep=["topic", "n"]), str(chat_directory))
    assert made.work() == EXIT_OK
    assert [(one["reference"], one["fields"]) for one in made.records()] == [("it", {"topic": "sea"}), (None, {"n": 1})]
    assert (made.paths.prompts / "prompts.jsonl").is_file()
    table = tmp_path / "out.parquet"
    card = output.write(made.paths, table, "m", 0)
    assert pq.read_table(table).column("fields").to_pylist() == ['{"topic": "sea"}', '{"n": 1}']
    assert list(output.read(table, card)) == made.records()
    assert Card.model_validate_json(card_of(table).read_bytes()) == card
