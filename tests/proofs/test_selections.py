"""Proves that a selection of generated answers is reproducible: the same answers give the same bytes, and every
answer is counted.
"""

import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import made_generations as made
from ratchet.outputs import card_of
from ratchet.records_select import SelectionCard
from select_outputs_cases import (
    answers,  # noqa: F401 (a fixture)
    layout,  # noqa: F401 (a fixture)
    ratchet,
)

PACKAGES = ("selecting", "select")
WORDS = st.sampled_from(["yes", "no", "no ", "maybe 4", "4", ""])
ANSWERS = st.tuples(WORDS, st.sampled_from(["stop", "length"]), st.sampled_from([None, -0.5, -0.25]))
KNOBS = st.fixed_dictionaries(
    {}, optional={"agreement": st.sampled_from([0.3, 0.5, 1.0]), "per_prompt": st.integers(1, 3),
                  "format": st.sampled_from(["json", "[a-z]+"]), "finishes": st.just(["stop", "length"])}
)  # fmt: skip


@given(st.lists(st.lists(ANSWERS, min_size=3, max_size=3), min_size=1, max_size=5), KNOBS)
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_answers_give_the_same_bytes_and_every_answer_is_accounted_for(
    tmp_path_factory: pytest.TempPathFactory, said: list[list[Any]], knobs: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("drawn")
    settings_ = made.settings_of(knobs | {"duplicates": {"near": None}}, samples=3, temperature=1.0)
    prompts = [{"id": str(n), "prompt": f"prompt number {n}"} for n in range(len(said))]
    found = []
    for turn in range(2):
        layout = made.project(folder / str(turn), settings_)

        def answer(id: str, sample: int) -> made.Said:
            text, finish, nats = said[int(id)][sample]
            return text, {"finish": finish, "nats": nats}

        asked = made.write_lines(folder / f"{turn}.jsonl", prompts)
        given_ = made.generation(layout, settings_, asked, answer, folder / f"answers{turn}.jsonl")
        target = layout.raw / "taught.jsonl"
        code = ratchet(layout, given_, "--output", target)
        found.append((target.read_bytes(), card_of(target).read_bytes()) if code == 0 else (b"", b""))
    assert found[0] == found[1]
    rows = [json.loads(line) for line in found[0][0].splitlines()]
    per_prompt = [sum(row["id"] == one["id"] for row in rows) for one in prompts]
    assert max(per_prompt) <= knobs.get("per_prompt", 1)
    if rows:
        card = SelectionCard.model_validate_json(found[0][1])
        assert card.answers == 3 * len(said) == card.rows + sum(one.dropped for one in card.filters)
        assert card.taught_prompts == sum(count > 0 for count in per_prompt)
    if "agreement" in knobs:
        assert all(row["provenance"]["agreement"] >= knobs["agreement"] - 1e-4 for row in rows)
