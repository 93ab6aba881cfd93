"""Proves that a selection of generated answers is reproducible: the same answers give the same bytes, and each answer
is counted."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fake_generations as made
import generations
from ratchet.cli.main import main
from ratchet.storage.output_card import card_path
from ratchet.storage.records.data import SelectionCard
from select_outputs_cases import (
    PROMPTS,
    answers,  # noqa: F401 (a fixture)
    layout,  # noqa: F401 (a fixture)
    ratchet,
)

PACKAGES = ("inference", "stages")
WORDS = st.sampled_from(["yes", "no", "no ", "maybe 4", "4", ""])
ANSWERS = st.tuples(WORDS, st.sampled_from(["stop", "length"]), st.sampled_from([None, -0.5, -0.25]))
KNOBS = st.fixed_dictionaries(
    {}, optional={"min_agreement": st.sampled_from([0.3, 0.5, 1.0]), "max_per_prompt": st.integers(1, 3),
                  "answer_format": st.sampled_from(["json", "[a-z]+"]), "finish_reasons": st.just(["stop", "length"])}
)  # fmt: skip


@given(st.lists(st.lists(ANSWERS, min_size=3, max_size=3), min_size=1, max_size=5), KNOBS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_answers_give_the_same_bytes_and_every_answer_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, said: list[list[Any]], knobs: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("drawn")
    settings_ = made.settings_of(knobs | {"deduplication": {"jaccard_threshold": None}}, samples=3, temperature=1.0)
    prompts = [{"id": str(n), "prompt": f"prompt number {n}"} for n in range(len(said))]
    found = []
    for turn in range(2):
        layout = made.project(folder / str(turn), settings_)

        def answer(id: str, sample: int) -> made.Said:
            text, finish, nats = said[int(id)][sample]
            return text, {"finish": finish, "mean_log_probability": nats}

        asked = made.write_lines(folder / f"{turn}.jsonl", prompts)
        given_ = made.generation(layout, settings_, asked, answer, folder / f"answers{turn}.jsonl")
        target = layout.raw / "distilled.jsonl"
        code = ratchet(layout, given_, "--output", target)
        found.append((target.read_bytes(), card_path(target).read_bytes()) if code == 0 else (b"", b""))
    assert found[0] == found[1]
    rows = [json.loads(line) for line in found[0][0].splitlines()]
    per_prompt = [sum(row["id"] == one["id"] for row in rows) for one in prompts]
    assert max(per_prompt) <= knobs.get("max_per_prompt", 1)
    if rows:
        card = SelectionCard.model_validate_json(found[0][1])
        assert card.answers == 3 * len(said) == card.rows + sum(one.dropped for one in card.filters)
        assert card.prompts_with_rows == sum(count > 0 for count in per_prompt)
    if "min_agreement" in knobs:
        assert all(row["provenance"]["agreement"] >= knobs["min_agreement"] - 1e-4 for row in rows)


@pytest.mark.usefixtures("calm")
def test_from_a_real_teacher_to_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    teacher = generations.chat_directory(tmp_path / "teacher")
    settings_ = made.settings_of(
        {"finish_reasons": ["stop", "length"], "min_agreement": 0.3}, samples=3, temperature=0.9
    )
    settings_ = generations.with_generate(settings_, max_new_tokens=4, extra_fields=["area"], labels=["wet", "hot"])
    layout = made.project(tmp_path / "project", settings_.model_copy(update={"machine": generations.SETTINGS.machine}))
    prompts = made.write_lines(tmp_path / "p.jsonl", [one | {"area": 7, "answer": "wet"} for one in PROMPTS])
    given_, target = tmp_path / "answers.jsonl", layout.raw / "distilled.jsonl"
    asked = ["--project", str(layout.root), "generate", str(prompts), "--model", str(teacher), "--output", str(given_)]
    assert main(asked) == 0
    assert ratchet(layout, given_, "--output", target) == 0
    said = capsys.readouterr().out
    rows = [json.loads(line) for line in target.read_bytes().splitlines()]
    assert f"{len(rows)} rows of 12 answers, for {len(rows)} of 4 prompts" in said
    for row in rows:
        records = [json.loads(line) for line in given_.read_bytes().splitlines()]
        record = next(one for one in records if (one["id"], one["sample"]) == (row["id"], row["provenance"]["sample"]))
        assert row["messages"][-1] == {"role": "assistant", "content": record["answer"]}
        assert row["area"] == 7
        assert row["provenance"]["model"] == record["model"]
