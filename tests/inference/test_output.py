"""Tests outputs with references and extra fields, and refusals to overwrite outputs of other prompts."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

import fake_answers
from generations import Generation, project, with_generate
from ratchet.errors import EXIT_OK, SettingsError
from ratchet.inference import output
from ratchet.inference.prompts import PromptSource
from ratchet.inference.spec import GenerationCard
from ratchet.storage.output_card import card_path


def test_a_refusal_names_the_prompts_only_where_the_records_changed(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "a", "n": 1}\n', encoding="utf-8")
    kept, plain = PromptSource(path, with_generate(extra_fields=["n"])), PromptSource(path, with_generate())
    of_kept = fake_answers.spec(extra_fields=["n"]).model_copy(update={"prompts_digest": kept.measure()[1]})
    of_plain = fake_answers.spec().model_copy(update={"prompts_digest": plain.measure()[1]})
    there = fake_answers.write(tmp_path / "o.jsonl", [fake_answers.record(1, "b", None)])
    card = GenerationCard.load(card_path(there)).model_copy(update={"spec": of_plain})
    card.save(card_path(there))
    with pytest.raises(SettingsError, match=r"differs in generate\.extra_fields; remove it"):
        output.is_complete(there, of_kept, kept.digest_with)
    path.write_text('{"text": "c", "n": 1}\n', encoding="utf-8")
    changed = of_kept.model_copy(update={"prompts_digest": kept.measure()[1]})
    with pytest.raises(SettingsError, match=r"differs in generate\.extra_fields, prompts_digest; remove it"):
        output.is_complete(there, changed, kept.digest_with)
    assert kept.digest_with(fake_answers.spec(extra_fields=["gone"]).generate) is None


def test_a_refusal_says_why_the_card_is_not_valid(tmp_path: Path) -> None:
    spec, there = fake_answers.spec(), fake_answers.write(tmp_path / "o.jsonl", [fake_answers.record(1, "b", None)])
    assert output.is_complete(there, spec, lambda _: None)
    about = GenerationCard.load(card_path(there))
    for strange in ('{"rows": 7}', "no JSON"):
        card_path(there).write_text(strange, encoding="utf-8")
        with pytest.raises(
            SettingsError, match=r"`ratchet generate` did not write it \(o.jsonl.card.json is not such a card\);"
        ):
            output.is_complete(there, spec, lambda _: None)
    card_path(there).unlink()
    with pytest.raises(
        SettingsError, match=r"`ratchet generate` did not write it \(o.jsonl.card.json is missing\); re"
    ):
        output.is_complete(there, spec, lambda _: None)
    about.save(card_path(there))
    there.unlink()
    assert not output.is_complete(there, spec, lambda _: None)


def test_output_holds_references_and_fields_in_both_formats(tmp_path: Path, chat_directory: Path) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"text": "is wet", "label": "it", "topic": "sea"}\n{"text": "what", "n": 1}\n', encoding="utf-8")
    project(tmp_path / "p")
    made = Generation(tmp_path / "p", path, with_generate(extra_fields=["topic", "n"]), str(chat_directory))
    assert made.work() == EXIT_OK
    assert [(one["reference"], one["fields"]) for one in made.records()] == [("it", {"topic": "sea"}), (None, {"n": 1})]
    assert (made.paths.prompts / "prompts.jsonl").is_file()
    table = tmp_path / "out.parquet"
    card = output.write_output(made.paths, table, "m", 0)
    assert pq.read_table(table).column("fields").to_pylist() == ['{"topic": "sea"}', '{"n": 1}']
    assert list(output.read_records(table, card)) == made.records()
    assert GenerationCard.model_validate_json(card_path(table).read_bytes()) == card
