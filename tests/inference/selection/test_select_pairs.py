"""Tests `ratchet select --pairs`: which answers become pairs, what is counted, and how stage prepare reads them."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fake_generations as made
from judge_cases import fair
from ratchet.config import params_file
from ratchet.config.base import Base
from ratchet.config.prepare import Prepare
from ratchet.config.settings import Settings
from ratchet.data import token_files
from ratchet.data.conversation import Conversation
from ratchet.data.splits import SPLITS
from ratchet.errors import DamagedFileError
from ratchet.stages import base, init
from ratchet.stages.prepare import prepare
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.output_card import card_path
from ratchet.storage.records.data import DatasetCard, SelectionCard
from scripted_endpoint import served
from select_outputs_cases import ratchet, refused

PROMPTS = [{"id": f"q{n}", "prompt": f"what is {n} + {n}", "answer": str(2 * n)} for n in range(4)]
SAID = {"q0": ["0", "7", "0 ", "8"], "q1": ["2"] * 4, "q2": ["9", "4", "4", "11"], "q3": ["5", "3", "5", "5"]}
"""Answers by prompt: right and wrong, all right, right and wrong, all wrong."""
KEEP_ALL: dict[str, Any] = {"deduplication": {"jaccard_threshold": None}}

Pairs = Callable[..., list[tuple[str, str, str]]]


@pytest.fixture
def layout(tmp_path: Path) -> ProjectLayout:
    return ProjectLayout(tmp_path / "project")


@pytest.fixture
def target(layout: ProjectLayout) -> Path:
    return layout.raw / "pairs.jsonl"


@pytest.fixture
def generated(layout: ProjectLayout, tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes settings and the answers `SAID`, or those given by prompt."""

    def write(
        said: dict[str, list[Any]] = SAID, prompts: list[dict[str, Any]] = PROMPTS, changes: Any = None, **select: Any
    ) -> Path:
        settings = made.settings_of(KEEP_ALL | select, samples=4, temperature=1.0)
        layout_ = made.project(layout.root, params_file.apply_changes(settings, changes or {}))
        asked = made.write_lines(tmp_path / "prompts.jsonl", prompts)
        return made.generation(layout_, settings, asked, lambda id, n: said[id][n], tmp_path / "answers.jsonl")

    return write


@pytest.fixture
def pairs(layout: ProjectLayout, target: Path, generated: Callable[..., Path]) -> Pairs:
    """Return a function that selects pairs from such answers, as (id, chosen, rejected)."""

    def select(*arguments: Any, **knobs: Any) -> list[tuple[str, str, str]]:
        assert ratchet(layout, generated(*arguments, **knobs), "--pairs", "--output", target) == 0
        rows = [json.loads(line) for line in target.read_bytes().splitlines()]
        return [(row["id"], *(row[name][0]["content"] for name in ("chosen", "rejected"))) for row in rows]

    return select


def card_of(target: Path) -> SelectionCard:
    return SelectionCard.load(card_path(target))


def test_right_answers_are_chosen_and_prompts_without_a_difference_counted(
    pairs: Pairs, layout: ProjectLayout, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = pairs()
    assert [(id, chosen.strip()) for id, chosen, _ in found] == [("q0", "0"), ("q2", "4")]
    assert all(rejected in set(SAID[id]) - {chosen} for id, chosen, rejected in found)
    card = card_of(target)
    assert card.pairs is not None
    assert (card.pairs.by, card.pairs.single_prompts, card.pairs.equal_prompts) == ("reference", 1, 1)
    assert (card.rows, card.prompts_with_rows, card.prompts, card.answers) == (2, 2, 4, 16)
    assert {one.name: one.dropped for one in card.filters if one.dropped} == {"not_selected": 12}
    printed = capsys.readouterr().out
    assert "2 pairs of 16 answers, for 2 of 4 prompts" in printed
    assert "no pair for 1 prompt: equal scores" in printed
    row = json.loads(target.read_bytes().splitlines()[0])
    assert row["prompt"] == [{"role": "user", "content": "what is 0 + 0"}]
    origin = row["provenance"]
    assert (origin["by"], origin["chosen"]["score"], origin["rejected"]["score"]) == ("reference", 1, 0)
    assert origin["chosen"]["generation"] == card.spec.teachers[0].generation
    before = target.read_bytes(), card_path(target).read_bytes()
    assert ratchet(layout, tmp_path / "answers.jsonl", "--pairs", "--output", target) == 0
    assert "nothing to do" in capsys.readouterr().out
    target.unlink()  # as after a kill between card and output
    (target.parent / ".partial-pairs.jsonl").write_bytes(before[0][:20])
    assert ratchet(layout, tmp_path / "answers.jsonl", "--pairs", "--output", target) == 0
    assert (target.read_bytes(), card_path(target).read_bytes()) == before
    assert "differs in pairs_by" in refused(layout, capsys, tmp_path / "answers.jsonl", "--output", target)


def test_several_pairs_of_a_prompt_use_as_many_answers_as_possible(pairs: Pairs, target: Path) -> None:
    said = {"q0": ["0", "1", "2", "3"], "q1": ["2", "1", "2.", "3"], "q2": ["4"] * 4, "q3": ["6"] * 4}
    found = pairs(said, max_per_prompt=3, final_answer_pattern="[0-9]+")
    assert {pair[1:] for pair in found if pair[0] == "q0"} == {("0", "1"), ("0", "2"), ("0", "3")}
    other = [pair[1:] for pair in found if pair[0] == "q1"]
    assert len(set(other)) == 3
    assert {text for pair in other[:2] for text in pair} == {"2", "2.", "1", "3"}  # disjoint as long as possible
    assert len({pairs(said, pairs={"seed": seed})[0] for seed in range(8) if not target.unlink()}) > 1


def test_answers_of_a_similar_length_can_be_preferred(pairs: Pairs, target: Path) -> None:
    said = {"q0": ["0", "a very long answer", "1", "also a long one"], **{f"q{n}": ["x"] * 4 for n in (1, 2, 3)}}
    assert pairs(said, pairs={"similar_length": True}) == [("q0", "0", "1")]
    card = card_of(target)
    assert card.pairs is not None
    assert (card.pairs.longer_chosen, card.pairs.chosen_characters) == (0.5, 1)


REWARD = "import json, sys\nfor line in sys.stdin: print(len(json.loads(line)['answer']))\n"


@pytest.mark.parametrize(
    ("minimum", "expected", "close"), [(0, [("q0", "aaaa", "a"), ("q1", "bb", "b")], 0), (2, [("q0", "aaaa", "a")], 1)]
)
def test_a_reward_decides_and_small_differences_make_no_pair(
    pairs: Pairs, layout: ProjectLayout, target: Path, minimum: float, expected: Any, close: int
) -> None:
    layout.root.mkdir()
    (layout.root / "score.py").write_text(REWARD, encoding="utf-8")
    said = {"q0": ["a", "aa", "aaaa", "aaa"], "q1": ["b", "bb", "b", "b"], "q2": ["c"] * 4, "q3": ["d", "e", "f", "g"]}
    found = pairs(said, reward={"command": [sys.executable, "score.py"]}, pairs={"min_difference": minimum})
    assert found == expected
    card = card_of(target)
    assert card.pairs is not None
    assert card.pairs.close_prompts == close
    assert card.pairs.longer_chosen == 1
    assert "score.py" in card.spec.reward_files


def test_a_judge_decides_by_comparing_all_different_answers(pairs: Pairs, layout: ProjectLayout, target: Path) -> None:
    said = {"q0": ["bad", "good", "bad", "bad"], **{f"q{n}": ["good"] * 4 for n in (1, 2, 3)}}
    with served(fair) as server:
        judge = {"evaluate.judge.base_url": server.url, "select.pairs.by": "judge"}
        assert pairs(said, changes=judge) == [("q0", "good", "bad")]
        assert len(server.got) == 2, "each different answer against each other, in both orders"
        target.unlink()
        card_path(target).unlink()
        assert ratchet(layout, layout.root.parent / "answers.jsonl", "--pairs", "--output", target) == 0
        assert len(server.got) == 2, "replies are stored"


@pytest.mark.parametrize(
    ("select", "message"),
    [
        ({"pairs": {"by": "reward"}}, "select.pairs.by: found reward, but there is none"),
        ({"pairs": {"by": "judge"}}, "select.pairs.by: found judge, but there is none; set evaluate.judge.base_url"),
        ({"min_agreement": 0.5}, "select.min_agreement: is set, but would drop the answers"),
    ],
)
def test_settings_that_leave_no_pairs_are_refused(
    layout: ProjectLayout, target: Path, generated: Callable[..., Path], capsys: pytest.CaptureFixture[str],
    select: dict[str, Any], message: str,
) -> None:  # fmt: skip
    assert message in refused(layout, capsys, generated(**select), "--pairs", "--output", target)
    assert not target.exists()


def test_prompts_without_a_reference_have_no_pair_by_reference(
    pairs: Pairs, layout: ProjectLayout, target: Path, generated: Callable[..., Path],
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    without = [{key: row[key] for key in ("id", "prompt")} for row in PROMPTS]
    message = refused(layout, capsys, generated(prompts=without), "--pairs", "--output", target)
    assert "select.pairs.by: found reference, but no prompt has a reference" in message
    assert [id for id, *_ in pairs(prompts=[*without[:1], *PROMPTS[1:]])] == ["q2"]
    assert card_of(target).without_reference == 1
    alike = {name: ["1", "1", "1", "1"] for name in SAID}
    target.unlink()
    card_path(target).unlink()
    message = refused(layout, capsys, generated(alike), "--pairs", "--output", target)
    assert "of 16 answers none is left" in message
    assert "no pair for 4 prompts: fewer than two different answers" in message


def test_prepare_reads_pairs_and_holds_some_out_if_no_other_source_has_pairs(
    layout: ProjectLayout, target: Path, generated: Callable[..., Path], model: Path, tmp_path: Path
) -> None:
    def talk_of(n: int) -> list[dict[str, str]]:
        texts = {"system": "Add.", "user": f"{n} + {n}", "assistant": str(2 * n)}
        return [{"role": role, "content": text} for role, text in texts.items()]

    prompts = [{"id": f"q{n}", "messages": talk_of(n)} for n in range(80)]
    said = {f"q{n}": [str(2 * n), str(2 * n + 1), "no", "none"] for n in range(80)}
    answers = generated(said, prompts)
    assert ratchet(layout, answers, "--pairs", "--output", target) == 0

    def prepared(**knobs: Any) -> tuple[DatasetCard, dict[str, list[Conversation]]]:
        sources = knobs.pop("sources", ["data/raw/pairs.jsonl"])
        settings = Settings(
            base=Base(source=str(model)),
            prepare=Prepare.model_validate({"sources": sources, "max_tokens": 512, **KEEP_ALL, **knobs}),
        )
        layout.tasks.mkdir(exist_ok=True)
        if not layout.base.exists():
            base.base(Project.from_parts(layout, settings))
        prepare(Project.from_parts(layout, settings))
        rows = {name: token_files.open_split(layout.data, name)["conversation"][:] for name in SPLITS}
        found = {name: [Conversation.from_json(text) for text in texts] for name, texts in rows.items()}
        return DatasetCard.load(layout.dataset_card), found

    card, found = prepared(task="preferences")
    assert card.rows_out == 80
    assert min(map(len, found.values())) > 0
    for talk in (talk for talks in found.values() for talk in talks):
        number = int(talk.prompt.split()[0])
        assert (talk.system, talk.response) == ("Add.", str(2 * number))
        assert talk.with_rejected.response in said[f"q{number}"][1:]
    assert card.teacher_rows == len(found["train"])
    assert any("was decided by the reference" in note for note in card.notes)
    provenance = card.source_cards["data/raw/pairs.jsonl"].teacher_provenance
    assert provenance is not None
    assert (provenance.answers, provenance.rows) == (320, 80)

    assert init.init(tmp_path / "own", target).objective == "dpo"
    assert (tmp_path / "own" / "data" / "raw" / card_path(target).name).read_bytes() == card_path(target).read_bytes()
    target.write_text(target.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    with pytest.raises(DamagedFileError, match=f"^{re.escape(str(target))}: the file changed since"):
        init.init(tmp_path / "changed", target)
    target.write_text(target.read_text(encoding="utf-8")[:-1], encoding="utf-8")

    made.write_lines(
        layout.raw / "people.jsonl",
        [{"prompt": f"say {n}", "chosen": f"yes {n}", "rejected": f"no {n}"} for n in range(80)],
    )  # fmt: skip
    sources = ["data/raw/pairs.jsonl", "data/raw/people.jsonl"]
    card, found = prepared(task="preferences", sources=sources, record_schema="preferences")
    assert not any(talk.system for name in ("validation", "test") for talk in found[name])
    assert any(talk.system for talk in found["train"])
    assert card.dropped["teacher_held_out"].count > 0
