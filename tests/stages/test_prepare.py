"""Tests of stage prepare: every row is counted, no test row leaks into training, and every dropped row is reported."""

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tiny_project
from ratchet.cli.main import main
from ratchet.config.base import Base
from ratchet.config.prepare import Prepare
from ratchet.config.settings import Settings
from ratchet.data import token_files
from ratchet.data.conversation import IGNORE_INDEX, Conversation
from ratchet.data.splits import SPLITS, SplitName
from ratchet.errors import DataError, SettingsError
from ratchet.evaluation import rows as evaluation_rows
from ratchet.models import base_model, tiny_model
from ratchet.stages import base
from ratchet.stages.prepare import prepare
from ratchet.stages.project import Project
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.data import DatasetCard
from ratchet.storage.records.evaluation import ValidationJob, ValidationLaunch

WORDS = ["order", "parcel", "money", "coffee", "account", "invoice", "mill", "grinder", "roast", "box", "street",
         "card", "name", "week", "price", "bag", "help"]  # fmt: skip


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Create a base model with a ChatML template and a byte-level BPE tokenizer. Its weights do not matter."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    tokenizer = tiny_model.train_tokenizer([" ".join(WORDS)] * 20, 400)
    LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=1,
            max_position_embeddings=1024,
        )
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


Run = Callable[..., DatasetCard]


@pytest.fixture
def project_of(model: Path, tmp_path: Path) -> Callable[..., tuple[ProjectLayout, Settings]]:
    """Return a function that creates a project with these rows and a pinned base. A list of rows becomes a JSON
    Lines file, a mapping becomes files by name."""

    def make(rows: Any, base_settings: dict[str, Any] | None = None, **changes: Any) -> tuple[ProjectLayout, Settings]:
        layout = ProjectLayout(tmp_path / "project")
        layout.raw.mkdir(parents=True, exist_ok=True)
        layout.tasks.mkdir(exist_ok=True)
        for name, content in (rows if isinstance(rows, dict) else {"rows.jsonl": rows}).items():
            if isinstance(content, bytes):
                (layout.raw / name).write_bytes(content)
            else:
                text = content if isinstance(content, str) else "".join(json.dumps(one) + "\n" for one in content)
                (layout.raw / name).write_text(text, encoding="utf-8")
        changes.setdefault("sources", ("data/raw/rows.jsonl",))
        chosen = Settings(base=Base(source=str(model), **(base_settings or {})), prepare=Prepare(**changes))
        tiny_project.save(layout, chosen)
        (layout.root / "dvc.yaml").write_text("stages: {}\n", encoding="utf-8")
        base.base(Project.from_parts(layout, chosen))
        return layout, chosen

    return make


@pytest.fixture
def prepared(project_of: Callable[..., tuple[ProjectLayout, Settings]]) -> Run:
    def run(rows: Any, **changes: Any) -> DatasetCard:
        layout, chosen = project_of(rows, **changes)
        prepare(Project.from_parts(layout, chosen))
        files.verify_sealed(layout.data, "data")
        return balanced(layout)

    return run


@pytest.fixture
def refused(
    project_of: Callable[..., tuple[ProjectLayout, Settings]], capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Return a function that runs `ratchet prepare`, checks that it exits with code 2 and leaves no files, and
    returns its message."""

    def run(rows: Any, **changes: Any) -> str:
        layout, _ = project_of(rows, **changes)
        before = sorted(p.name for p in layout.experiments.iterdir() if p.name != ".locks")
        assert main(["--project", str(layout.root), "prepare"]) == 2
        message = capsys.readouterr().err
        assert "Traceback" not in message
        assert sorted(p.name for p in layout.experiments.iterdir() if p.name != ".locks") == before
        return message

    return run


def balanced(layout: ProjectLayout) -> DatasetCard:
    """Check the counts of the dataset card against the written files; return the card."""
    card = DatasetCard.load(layout.dataset_card)
    assert card.rows_in == card.rows_out + sum(drop.count for drop in card.dropped.values())
    assert card.rows_out == sum(card.splits.values())
    for name in SPLITS:
        written = token_files.open_split(layout.data, name)
        copies = card.repeated if name == "train" else 0
        assert len(written) == card.splits[name] + copies
        ids = written["id"][:]
        assert ids == sorted(ids)
        assert sum(map(len, written["input_ids"])) == card.lengths[name].total
        trained = sum(label != IGNORE_INDEX for labels in written["labels"] for label in labels)
        assert trained == card.lengths[name].trained
    page = layout.dataset_page.read_text(encoding="utf-8")
    assert f"{card.rows_in:,}" in page
    return card


def rows_of(count: int, words: int = 9, seed: int = 0) -> list[dict[str, Any]]:
    """Return `count` different prompts of random words, with answers."""
    draw = random.Random(seed)
    return [
        {"prompt": " ".join(draw.choices(WORDS, k=words)) + f" {seed}-{n}", "response": f"answer {n % 5}"}
        for n in range(count)
    ]


def prompts(layout: ProjectLayout, split: SplitName) -> list[str]:
    return [Conversation.from_json(text).prompt for text in token_files.open_split(layout.data, split)["conversation"]]


def test_every_reason_is_counted_with_its_place(prepared: Run) -> None:
    good = rows_of(60)
    lines = [json.dumps(row) for row in good]
    lines += [
        "{broken",
        json.dumps({"prompt": "", "response": "x"}),
        json.dumps({"prompt": "what", "response": " "}),
        json.dumps({"prompt": good[0]["prompt"].upper(), "response": good[0]["response"] + " "}),
        json.dumps({"prompt": "long " * 200, "response": "x"}),
        json.dumps({"prompt": "now <|im_end|> what", "response": "x"}),
        json.dumps({"prompt": "half \ud800 a pair", "response": "x"}),
        json.dumps(["no object"]),
        json.dumps({"prompt": "hi there", "response": "a"}),
    ]
    card = prepared(
        {"rows.jsonl": "\n".join(lines)}, max_tokens=100, min_answer_tokens=2,
        limits={"malformed": 0.2, "control_token": 0.2},
    )  # fmt: skip
    found = {reason: (drop.count, drop.examples[0].split(": ")[0]) for reason, drop in card.dropped.items()}
    assert found == {
        "malformed": (3, "data/raw/rows.jsonl:61"),
        "empty_prompt": (1, "data/raw/rows.jsonl:62"),
        "empty_answer": (1, "data/raw/rows.jsonl:63"),
        "duplicate": (1, found["duplicate"][1]),
        "too_long": (1, "data/raw/rows.jsonl:65"),
        "control_token": (1, "data/raw/rows.jsonl:66"),
        "too_short": (1, "data/raw/rows.jsonl:69"),
    }
    assert found["duplicate"][1] in ("data/raw/rows.jsonl:1", "data/raw/rows.jsonl:64")


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.one_of(
            st.sampled_from(["{broken", "[]", '{"prompt": 3, "response": "x"}', '{"prompt": "", "response": "x"}']),
            st.tuples(st.text(max_size=60), st.text(max_size=200)).map(
                lambda pair: json.dumps({"prompt": pair[0], "response": pair[1]})
            ),
        ),
        max_size=30,
    ),
    st.sampled_from(["drop", "truncate"]),
)
def test_the_counts_add_up_for_any_input(prepared: Run, lines: list[str], too_long: str) -> None:
    lines = [json.dumps(row) for row in rows_of(60)] + lines
    unlimited = dict.fromkeys(["malformed", "refused", "control_token", "fully_masked", "truncated"])
    card = prepared({"rows.jsonl": "\n".join(lines)}, max_tokens=60, too_long=too_long, limits=unlimited)
    assert card.rows_in == sum(1 for line in lines if line.strip())


def test_rows_that_are_too_long_for_the_base_are_noted(prepared: Run) -> None:
    rows = [*rows_of(60), {"prompt": "long " * 600, "response": "x"}]
    card = prepared(rows, max_tokens=5000)
    longest = max(lengths.greatest for lengths in card.lengths.values())
    assert longest > 1024
    assert card.notes == (
        f"the longest row has {longest:,} tokens, but the base was trained on at most 1,024 (config.json); set "
        "prepare.max_tokens: 1024, which drops or truncates longer rows (prepare.too_long)",
    )
    assert prepared(rows, max_tokens=1024).notes == ()


def test_many_rows_that_were_dropped_as_too_long_are_noted(prepared: Run) -> None:
    rows = [*rows_of(60), *({"prompt": f"{n} long " * 200, "response": "x"} for n in range(6))]
    notes = prepared(rows, max_tokens=90).notes
    assert [note for note in notes if note.startswith("6 rows (9%) were dropped because they have more than 90 tokens")]


def test_answers_that_all_have_one_label_are_noted(prepared: Run) -> None:
    rows = [{**row, "label": True} for row in rows_of(60)]
    card = prepared(rows, max_tokens=90, task="preferences")
    assert [note for note in card.notes if "training answers are labelled true, so train.objective kto" in note]


def test_more_malformed_rows_than_allowed_end_the_stage_with_a_table(refused: Callable[..., str]) -> None:
    lines = [json.dumps(row) for row in rows_of(60)] + ["{broken", "[1]"]
    message = refused({"rows.jsonl": "\n".join(lines)})
    assert "prepare.limits.malformed" in message
    assert message.splitlines()[2].split() == ["malformed", "2", "3.23%", "1.00%"]
    assert "data/raw/rows.jsonl:61: not JSON" in message
    assert "data/raw/rows.jsonl:62" in message


LONG_ANSWERS = [{"prompt": f"say {n}", "response": " ".join(WORDS * 30)} for n in range(8)]
INSTRUCTION = " ".join(f"rule{n}" for n in range(40))
REFUSED: dict[str, tuple[list[dict[str, Any]], dict[str, Any], list[str]]] = {
    "no test rows": (rows_of(60), {"split": {"test": 0.0}}, ["0 test rows, and test needs at least one"]),
    "all too long": (rows_of(60), {"max_tokens": 1}, ["0 train", "raise prepare.max_tokens or change"]),
    "too long": (
        [*rows_of(60), {"prompt": "long " * 200, "response": "x"}], {"max_tokens": 90, "too_long": "raise"},
        ["data/raw/rows.jsonl:61: "],
    ),
    "truncated": (
        rows_of(60) + LONG_ANSWERS, {"max_tokens": 90, "too_long": "truncate",
            "deduplication": {"jaccard_threshold": None}},
        ["prepare.limits.truncated"],
    ),
    "shared instruction": (
        [{"prompt": f"{INSTRUCTION}: {WORDS[n % 17]} {n}", "response": f"answer {n % 5}"} for n in range(80)],
        {"max_tokens": 400}, ["prepare.limits.near_duplicate", "raise prepare.deduplication.jaccard_threshold"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_rows_that_end_the_stage(refused: Callable[..., str], name: str) -> None:
    rows, changes, says = REFUSED[name]
    message = refused(rows, **changes)
    assert all(text in message for text in says), message


def test_near_duplicates_are_dropped_within_and_across_splits(prepared: Run, tmp_path: Path) -> None:
    originals = rows_of(80, words=40)
    near = [{**row, "prompt": row["prompt"] + " please"} for row in originals[:40]]
    card = prepared([*originals, *near], max_tokens=400, limits={"near_duplicate": None})
    assert card.dropped["near_duplicate"].count == 40
    assert card.near_duplicates is not None
    assert card.near_duplicates.clusters == 40
    assert 0 < card.near_duplicates.across_splits < 40
    layout = ProjectLayout(tmp_path / "project")
    seen = [prompt.removesuffix(" please") for name in SPLITS for prompt in prompts(layout, name)]
    assert len(seen) == len(set(seen)) == 80
    kept = prepared([*originals, *near], max_tokens=400, deduplication={"jaccard_threshold": None})
    assert kept.rows_out == 120


def test_a_test_row_is_kept_before_its_near_duplicate_in_training(prepared: Run, tmp_path: Path) -> None:
    own = rows_of(10, words=40, seed=1)
    train = [{**row, "prompt": "please " + row["prompt"]} for row in own] + rows_of(80, words=40, seed=2)
    card = prepared(
        {"train.jsonl": train, "own.jsonl": own},
        sources=({"files": "data/raw/train.jsonl"}, {"files": "data/raw/own.jsonl", "split": "test"}),
        max_tokens=400,
    )
    layout = ProjectLayout(tmp_path / "project")
    assert sorted(prompts(layout, "test")) == sorted(row["prompt"] for row in own)
    assert card.dropped["near_duplicate"].count == 10
    assert card.wanted["test"] == 0


def test_benchmark_rows_are_dropped_from_training_or_end_the_stage(prepared: Run, refused: Callable[..., str]) -> None:
    rows = rows_of(80, words=40)
    leaked = [{"question": "So: " + row["prompt"].upper(), "answer": "?"} for row in rows[:20]]
    names = {"rows.jsonl": rows, "exam.jsonl": leaked}
    card = prepared(names, max_tokens=400, leakage={"files": ("data/raw/exam.jsonl",)})
    leak = card.leaks["data/raw/exam.jsonl"]
    assert (leak.documents, leak.rows) == (20, 20)
    in_test = 20 - card.dropped["leaked"].count
    assert 0 < in_test < 20  # rows of the test split are not trained on, so they stay
    assert "data/raw/exam.jsonl: " in card.dropped["leaked"].examples[0]
    message = refused(names, max_tokens=400, leakage={"files": ("data/raw/exam.jsonl",), "action": "fail"})
    assert "data/raw/exam.jsonl: 20 rows" in message


def test_a_harness_task_of_the_project_is_an_evaluation_set(
    project_of: Callable[..., tuple[ProjectLayout, Settings]],
) -> None:
    rows = rows_of(80, words=40)
    layout, chosen = project_of(rows, max_tokens=400)
    (layout.tasks / "exam.jsonl").write_text(
        "".join(json.dumps({"q": row["prompt"], "a": "b"}) + "\n" for row in rows[:12]), encoding="utf-8"
    )
    (layout.tasks / "exam.yaml").write_text(
        "# unlike answers.yaml this does not read experiments/data/test.jsonl\n"
        "task: exam\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: data/tasks/exam.jsonl\n"
        'test_split: test\noutput_type: generate_until\ndoc_to_text: "{{q}}"\ndoc_to_target: "{{a}}"\n'
        "metric_list:\n  - metric: exact_match\n",
        encoding="utf-8",
    )
    leakage = chosen.prepare.leakage.model_copy(update={"tasks": ("exam",)})
    chosen = chosen.model_copy(update={"prepare": chosen.prepare.model_copy(update={"leakage": leakage})})
    prepare(Project.from_parts(layout, chosen))
    assert balanced(layout).leaks["exam"].rows == 12


def test_truncation_keeps_the_end_of_turn_and_is_counted(prepared: Run, tmp_path: Path) -> None:
    rows = rows_of(60) + LONG_ANSWERS
    loose = {"truncated": None}
    card = prepared(rows, max_tokens=90, too_long="truncate", limits=loose, deduplication={"jaccard_threshold": None})
    assert sum(cut.rows for cut in card.truncated.values()) == 8
    assert sum(cut.tokens for cut in card.truncated.values()) > 8 * 100
    layout = ProjectLayout(tmp_path / "project")
    end = base_model.load_tokenizer(base_model.locate(layout, base.BaseCard.load(layout.base_card))).eos_token_id
    for name in SPLITS:
        for ids, labels in zip(
            *(token_files.open_split(layout.data, name)[key] for key in ("input_ids", "labels")), strict=True
        ):
            assert len(ids) <= 90
            assert [label for label in labels if label != IGNORE_INDEX][-1] == end


@pytest.mark.parametrize("too_long", ["truncate_prompt", "truncate_both"])
def test_cut_prompts_are_counted_and_stored_as_they_are_trained_on(
    prepared: Run, tmp_path: Path, too_long: str
) -> None:
    document = " ".join(random.Random(4).choice(WORDS) for _ in range(400))
    long = [{"prompt": f"{word} {document}", "response": f"mill {word} box"} for word in WORDS[:8]]
    loose = {"truncated": None}
    card = prepared(
        rows_of(60) + long, max_tokens=90, too_long=too_long, limits=loose, deduplication={"jaccard_threshold": None}
    )
    assert card.rows_out == 68
    assert sum(cut.rows for cut in card.truncated.values()) == 8
    layout = ProjectLayout(tmp_path / "project")
    tokenizer = base_model.load_tokenizer(base_model.locate(layout, base.BaseCard.load(layout.base_card)))
    answers = set()
    for name in SPLITS:
        written = token_files.open_split(layout.data, name)
        assert max(map(len, written["input_ids"])) <= 90
        for text, ids in zip(written["conversation"], written["input_ids"], strict=True):
            messages = Conversation.from_json(text).messages
            assert tokenizer.apply_chat_template(messages, return_dict=False) == ids
            answers.add(messages[-1]["content"])
    complete = {row["response"] for row in long} <= answers
    assert complete == (too_long == "truncate_prompt")


FLAWED = [
    {"prompt": "garbled one", "response": "The cafÃ© is closed today", "score": 5},
    {"prompt": "garbled two", "response": "The caf\ufffd is closed today", "score": 5},
    {"prompt": "spam", "response": "buy coffee now " * 40, "score": 5},
    {"prompt": "cut off", "response": "The parcel was sent today. It will arrive on the", "score": 5},
    {"prompt": "code", "response": "Run this:\n```python\nprint(1)", "score": 5},
    {"prompt": "low", "response": "a mill", "score": "1.5"},
    {"prompt": "none", "response": "a grinder"},
]


def test_flawed_rows_are_reported_and_dropped_only_by_checks_that_the_settings_name(
    prepared: Run, tmp_path: Path
) -> None:
    rows = [*({**row, "score": 3} for row in rows_of(60)), *FLAWED]
    quality: dict[str, Any] = {"field": "score", "minimum": 2}
    free: dict[str, Any] = {"max_tokens": 1000, "deduplication": {"jaccard_threshold": None}}
    card = prepared(rows, quality=quality, **free)
    assert {check: flaw.count for check, flaw in card.flaws.items()} == {
        "garbled": 2, "spam": 1, "cut_off": 2, "low_score": 2,
    }  # fmt: skip
    assert card.rows_out == len(rows) and not any(flaw.is_dropped for flaw in card.flaws.values())
    assert card.flaws["garbled"].examples[0].startswith("data/raw/rows.jsonl:61: wrong encoding")
    assert "'Ã©' is probably 'é'" in card.flaws["garbled"].examples[0]
    page = ProjectLayout(tmp_path / "project").dataset_page.read_text(encoding="utf-8")
    assert "Rows that fail a check" in page and "rows.jsonl:64" in page
    plain = prepared(rows, **free)
    assert "low_score" not in plain.flaws and plain.digest == card.digest
    dropping = prepared(rows, quality=quality | {"drop": ["garbled", "low_score"]}, **free)
    assert {reason: drop.count for reason, drop in dropping.dropped.items()} == {"garbled": 2, "low_score": 2}
    assert dropping.flaws["spam"].count == 1 and dropping.flaws["garbled"].is_dropped


def test_rows_of_other_languages_are_found_offline(prepared: Run) -> None:
    pytest.importorskip("py3langid")
    other = [
        {"prompt": "Wo ist meine Karte geblieben?", "response": "Sie wurde gestern verschickt."},
        {"prompt": "Je voudrais annuler ma commande", "response": "Elle est annulée, merci de votre patience."},
        {"prompt": "Danke", "response": "Bitte"},  # too short to tell
    ]
    english = [
        {"prompt": f"Where is parcel number {n}, please?", "response": f"It left our shop {n} days ago."}
        for n in range(60)
    ]
    free = {"deduplication": {"jaccard_threshold": None}}
    card = prepared(english + other, languages=["en"], **free)
    assert card.flaws["language"].count == 2 and card.rows_out == 63
    assert card.flaws["language"].examples[0].startswith("data/raw/rows.jsonl:61: de with probability")
    card = prepared(english + other, languages=["en", "de"], quality={"drop": "language"}, **free)
    assert card.dropped["language"].count == 1


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"quality": {"field": "scroe", "minimum": 2}}, ["prepare.quality.field", "'scroe'", "score"]),
        ({"languages": ["xx"]}, ["prepare.languages", "found xx", "en"]),
        ({"split": {"stratify": "scroe"}}, ["prepare.split.stratify: no record has a field 'scroe'; did you mean"]),
    ],
)
def test_a_check_that_cannot_work_is_refused(
    refused: Callable[..., str], changes: dict[str, Any], parts: list[str]
) -> None:
    message = refused([{**row, "score": 3} for row in rows_of(60)], **changes)
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "changes",
    [{"quality": {"field": "score"}}, {"quality": {"drop": ["low_score"]}}, {"quality": {"drop": ["language"]}},
     {"languages": ["english"]}, {"semantic_duplicates": {"threshold": 0.9}}],
)  # fmt: skip
def test_incomplete_settings_of_checks_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"missing|found|pattern"):
        Prepare(**changes)


def test_weights_repeat_and_thin_out_training_rows_alone(prepared: Run) -> None:
    half, twice = rows_of(200, seed=1), rows_of(100, seed=2)
    card = prepared(
        {"half.jsonl": half, "twice.jsonl": twice},
        sources=({"files": "data/raw/half.jsonl", "weight": 0.5}, {"files": "data/raw/twice.jsonl", "weight": 2}),
    )
    out = card.dropped["sampled_out"].count
    assert 50 < out < 100  # of about 150 training rows
    assert card.repeated == pytest.approx(75, abs=15)
    assert card.splits["validation"] + card.splits["test"] == pytest.approx(75, abs=25)


def test_groups_stay_together_and_strata_are_balanced(prepared: Run, tmp_path: Path) -> None:
    rows = [{**row, "user": n % 20, "kind": "ab"[n % 2]} for n, row in enumerate(rows_of(200))]
    prepared(rows, split={"group": "user"})
    layout = ProjectLayout(tmp_path / "project")
    user = {row["prompt"]: row["user"] for row in rows}
    homes = [{user[prompt] for prompt in prompts(layout, name)} for name in SPLITS]
    assert not homes[0] & homes[1] and not homes[0] & homes[2] and not homes[1] & homes[2]
    card = prepared(rows, split={"stratify": "kind", "test": 0.2, "validation": 0.1})
    assert {name: one.splits for name, one in card.strata.items()} == {
        "a": {"train": 70, "validation": 10, "test": 20}, "b": {"train": 70, "validation": 10, "test": 20},
    }  # fmt: skip


def test_adding_rows_moves_no_old_row(prepared: Run, tmp_path: Path) -> None:
    rows = rows_of(150)
    layout = ProjectLayout(tmp_path / "project")
    prepared(rows[:100])
    before = {prompt: name for name in SPLITS for prompt in prompts(layout, name)}
    prepared(rows[50:] + rows[:50])
    after = {prompt: name for name in SPLITS for prompt in prompts(layout, name)}
    assert {prompt: after[prompt] for prompt in before} == before


def test_equal_rows_give_equal_bytes_in_any_order_and_format(prepared: Run) -> None:
    rows = rows_of(90)
    first = prepared(rows)
    assert first.source_cards["data/raw/rows.jsonl"].record_schema.startswith("columns prompt, response")
    assert first.source_cards["data/raw/rows.jsonl"].rows == 90
    assert prepared(rows) == first  # the file was written again with the same bytes
    lines = "".join(json.dumps(row) + "\n" for row in reversed(rows)).encode()
    second = prepared({"rows.jsonl.gz": gzip.compress(lines)}, sources=("data/raw/rows.jsonl.gz",))
    assert first.digest == second.digest
    third = prepared({"rows.json": json.dumps(rows)}, sources=("data/raw/*.json",))
    assert third.digest == first.digest
    changed = prepared([*rows[:-1], {**rows[-1], "response": "another"}])
    assert changed.digest != first.digest


def test_conversations_with_tools_and_several_turns(prepared: Run, tmp_path: Path) -> None:
    rows = [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": f"first {n} {WORDS[n % 17]}"},
                {"role": "assistant", "content": "one", **({"train": n % 2 == 0} if n % 5 else {})},
                {"role": "user", "content": "second"},
                {"role": "assistant", "content": f"two {n}", "train": True},
                {"role": "user", "content": "nobody answers"},
            ]
        }
        for n in range(60)
    ]
    every = prepared(rows, deduplication={"jaccard_threshold": None})
    last = prepared(rows, turns="last", deduplication={"jaccard_threshold": None})
    flagged = prepared(rows, turns="flagged", deduplication={"jaccard_threshold": None})
    counts = [sum(lengths.trained for lengths in card.lengths.values()) for card in (last, flagged, every)]
    assert counts[0] < counts[1] < counts[2]
    layout = ProjectLayout(tmp_path / "project")
    text = token_files.open_split(layout.data, "train")["conversation"][0]
    assert Conversation.from_json(text).messages[-1]["role"] == "assistant"
    document = json.loads((layout.data / "test.jsonl").read_text().splitlines()[0])
    assert (document["system"], document["prompt"]) == ("Be brief.", "second")


def test_a_template_of_the_project_replaces_the_tokenizers(
    project_of: Callable[..., tuple[ProjectLayout, Settings]],
) -> None:
    names = {
        "rows.jsonl": rows_of(60),
        "chat.jinja": "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}",
    }
    layout, chosen = project_of(names, {"chat_template": "data/raw/chat.jinja"})
    prepare(Project.from_parts(layout, chosen))
    card = balanced(layout)
    assert card.end_of_turn == "<|im_end|>"
    tokenizer = base_model.load_tokenizer(
        base_model.locate(layout, base.BaseCard.load(layout.base_card)), layout.chat_template
    )
    assert tokenizer.decode(token_files.open_split(layout.data, "train")["input_ids"][0]).startswith(
        "<|im_start|>user: "
    )


def test_the_reference_of_a_tool_call_is_what_the_template_writes(
    project_of: Callable[..., tuple[ProjectLayout, Settings]],
) -> None:
    names = {
        "rows.jsonl": [
            {
                "messages": [
                    {"role": "user", "content": f"{row['prompt']} now"},
                    {"role": "assistant", "content": "ready "} if n % 2 else
                    {"role": "assistant", "tool_calls": [{"function": {"name": "pay", "arguments": {"sum": n}}}]},
                ]
            }
            for n, row in enumerate(rows_of(60))
        ],
        "chat.jinja": "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% if m.tool_calls %}"
        "<call>{{ m.tool_calls[0].function | tojson }}</call>{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    }  # fmt: skip
    layout, chosen = project_of(names, {"chat_template": "data/raw/chat.jinja"}, max_tokens=400)
    prepare(Project.from_parts(layout, chosen))
    test = evaluation_rows.read(layout, chosen)
    calls = {conversation.calls_tools for conversation in test.conversations}
    assert calls == {True, False}
    for conversation, reference in zip(test.conversations, test.expected, strict=True):
        if conversation.calls_tools:
            function = conversation.messages[-1]["tool_calls"][0]["function"]
            assert reference == f"<call>{json.dumps(function)}</call>"
        else:
            assert reference == "ready"
    assert [row.expected for row in test.iterate_records([])] == test.references


def pairs_of(count: int) -> list[dict[str, Any]]:
    """Return rows with two answers; the chosen one has the more words."""
    return [
        {"prompt": row["prompt"], "chosen": f"order parcel money coffee {n}", "rejected": f"box {n}"}
        for n, row in enumerate(rows_of(count))
    ]


def test_pairs_of_answers_are_two_conversations_with_one_prompt(
    project_of: Callable[..., tuple[ProjectLayout, Settings]],
) -> None:
    rows = pairs_of(60)
    rows[5]["rejected"] = rows[5]["chosen"]
    rows[6]["rejected"] = ""
    rows[7]["rejected"] = "\ufffd"
    layout, chosen = project_of(rows, task="preferences", max_tokens=400)
    prepare(Project.from_parts(layout, chosen))
    card = balanced(layout)
    assert {reason: drop.count for reason, drop in card.dropped.items()} == {"equal_answers": 1, "empty_answer": 1}
    assert card.flaws["garbled"].count == 1
    assert card.pairs is not None
    assert card.pairs.longer_chosen == 1
    assert card.pairs.chosen_tokens > card.pairs.rejected_tokens
    assert any("prefer long answers" in note for note in card.notes)
    assert "Chosen is longer" in layout.dataset_page.read_text(encoding="utf-8")
    dataset = token_files.open_split(layout.data, "train")
    rows_of_pairs = token_files.load_rows(layout.data, "train", "dpo")
    assert len(rows_of_pairs) == 2 * len(dataset)
    assert token_files.read_lengths(layout.data, "train", "dpo").tolist() == rows_of_pairs.lengths.tolist()
    assert token_files.load_rows(layout.data, "train").lengths.tolist() == rows_of_pairs.lengths[::2].tolist()
    labelled = token_files.load_rows(layout.data, "train", "kto")  # a pair is two answers
    assert labelled.input_ids.tolist() == rows_of_pairs.input_ids.tolist()
    assert labelled.is_desirable is not None
    assert labelled.is_desirable.tolist() == [True, False] * len(dataset)
    tokenizer = base_model.load_tokenizer(base_model.locate(layout, base.BaseCard.load(layout.base_card)))
    for number, text in enumerate(dataset["conversation"]):
        conversation = Conversation.from_json(text)
        for row, answer in ((2 * number, conversation), (2 * number + 1, conversation.with_rejected)):
            span = slice(rows_of_pairs.offsets[row], rows_of_pairs.offsets[row + 1])
            ids, labels = rows_of_pairs.input_ids[span].tolist(), rows_of_pairs.labels[span].tolist()
            learned = [label for label in labels if label != IGNORE_INDEX]
            assert tokenizer.decode(learned).startswith(answer.response)
            assert conversation.prompt in tokenizer.decode(ids)
    assert evaluation_rows.read(layout, chosen).rejected is not None


def test_labelled_answers_are_learned_by_kto_and_only_desirable_ones_by_others(
    project_of: Callable[..., tuple[ProjectLayout, Settings]],
) -> None:
    rows = [{**row, "label": n % 3 == 0} for n, row in enumerate(rows_of(60))]
    files_of_rows = {"rows.jsonl": rows, "pairs.jsonl": pairs_of(61)[60:]}
    sources = ("data/raw/rows.jsonl", "data/raw/pairs.jsonl")
    layout, chosen = project_of(
        files_of_rows, task="preferences", max_tokens=400, limits={"malformed": 0.1}, sources=sources
    )
    prepare(Project.from_parts(layout, chosen))
    card = DatasetCard.load(layout.dataset_card)
    assert card.pairs is None
    assert (
        card.dropped["malformed"]
        .examples[0]
        .startswith(
            "data/raw/pairs.jsonl:1: it has a rejected answer, but the first row (data/raw/rows.jsonl:1) has a label"
        )
    )
    labelled, desirable = (token_files.load_rows(layout.data, "train", objective) for objective in ("kto", "sft"))
    assert labelled.is_desirable is not None
    assert card.desirable_rows == labelled.is_desirable.sum() == len(desirable)
    assert len(desirable) < len(labelled) == card.splits["train"]
    of_kind = [labelled.list_ids(row) for row in labelled.is_desirable.nonzero()[0]]
    assert of_kind == [desirable.list_ids(row) for row in range(len(desirable))]
    assert token_files.read_lengths(layout.data, "train", "kto").tolist() == labelled.lengths.tolist()
    assert token_files.read_lengths(layout.data, "train").tolist() == desirable.lengths.tolist()
    assert [row.is_desirable for row in evaluation_rows.read(layout, chosen).conversations] == [True] * len(
        (layout.data / "test.jsonl").read_text(encoding="utf-8").splitlines()
    )
    with pytest.raises(DataError, match=r"train\.objective: dpo compares .* one answer with a label; set .*: kto"):
        token_files.load_rows(layout.data, "train", "dpo")
    job = ValidationJob(run_ids=(), metrics=("preference_accuracy",))
    with pytest.raises(SettingsError, match=r"preference_accuracy compares .* these rows have one answer each"):
        ValidationLaunch(job=job, max_new_tokens=8, machine=chosen.machine).require_measurable(card)
    assert f"{card.desirable_rows:,}" in layout.dataset_page.read_text(encoding="utf-8")


def test_pairs_can_be_read_as_text(
    project_of: Callable[..., tuple[ProjectLayout, Settings]],
) -> None:
    layout, chosen = project_of(pairs_of(60), max_tokens=400)
    prepare(Project.from_parts(layout, chosen))
    card = balanced(layout)
    assert card.pairs is None
    assert card.rows_out == 60
    assert evaluation_rows.read(layout, chosen).rejected is None
    with pytest.raises(DataError, match=r"compares a chosen and a rejected answer.*prepare\.task: preferences"):
        token_files.load_rows(layout.data, "train", "dpo")


def test_data_without_pairs_are_refused(refused: Callable[..., str]) -> None:
    message = refused(rows_of(60), task="preferences")
    assert "prepare.limits.malformed" in message
    assert "no rejected answer" in message


def chat(n: int, **flags: Any) -> dict[str, Any]:
    turns = [("user", f"first {n} {WORDS[n % 17]}"), ("assistant", "one"), ("user", "more"), ("assistant", f"two {n}")]
    messages: list[dict[str, Any]] = [{"role": role, "content": text} for role, text in turns]
    messages[1] |= flags
    return {"messages": messages}


def test_an_answer_flagged_not_to_be_learned_is_not_whatever_the_turns(prepared: Run) -> None:
    def trained(turns: str = "all", **flags: Any) -> int:
        card = prepared([chat(n, **flags) for n in range(60)], turns=turns, deduplication={"jaccard_threshold": None})
        return sum(one.trained for one in card.lengths.values())

    last = trained("last")
    assert trained(train=False) == trained(weight=0) == last < trained()


def test_a_prompt_of_an_own_test_file_is_not_learned_from_with_another_answer(prepared: Run, tmp_path: Path) -> None:
    rows = rows_of(80)
    own = [{**row, "response": "something else"} for row in rows[:20]]
    sources = ({"files": "data/raw/rows.jsonl"}, {"files": "data/raw/own.jsonl", "split": "test"})
    card = prepared({"rows.jsonl": rows, "own.jsonl": own}, sources=sources)
    assert card.dropped["leaked"].count == 20
    assert card.dropped["leaked"].examples[0].endswith("its prompt is in the test rows too")
    layout = ProjectLayout(tmp_path / "project")
    assert not set(prompts(layout, "test")) & {*prompts(layout, "train"), *prompts(layout, "validation")}


def test_a_group_of_an_own_test_file_is_not_learned_from(prepared: Run) -> None:
    rows = [{**row, "user": n % 10} for n, row in enumerate(rows_of(80))]
    own = [{**row, "user": 3} for row in rows_of(5, seed=4)]
    sources = ({"files": "data/raw/rows.jsonl"}, {"files": "data/raw/own.jsonl", "split": "test"})
    card = prepared({"rows.jsonl": rows, "own.jsonl": own}, sources=sources, split={"group": "user"})
    assert card.dropped["leaked"].count == 8
    assert "its group is in the test rows too" in card.dropped["leaked"].examples[0]


def test_indentation_is_learned_and_labels_are_bare(prepared: Run, tmp_path: Path) -> None:
    rows = [{**row, "response": f"    return {n}"} for n, row in enumerate(rows_of(60))]
    layout = ProjectLayout(tmp_path / "project")
    prepared(rows)
    answers = [Conversation.from_json(t).response for t in token_files.open_split(layout.data, "train")["conversation"]]
    assert all(answer.startswith("    return") for answer in answers)
    card = prepared([{**row, "response": f" {n % 2} "} for n, row in enumerate(rows_of(60))], task="labels")
    assert set(card.labels) == {"0", "1"}


TOOL = {"type": "function", "function": {"name": "clock", "parameters": {}}}
NOTED: dict[str, tuple[list[dict[str, Any]], dict[str, Any], list[str]]] = {
    "last question": (
        [{"messages": [*chat(n)["messages"], {"role": "user", "content": "?"}]} for n in range(60)],
        {"deduplication": {"jaccard_threshold": None}}, ["60 messages after the last answer"],
    ),
    "tools": (
        [{**chat(n), "tools": [TOOL]} for n in range(60)], {"deduplication": {"jaccard_threshold": None}},
        ["omits tools"],
    ),
    "stratum of one row": (
        [{**row, "kind": "rare" if n == 0 else "often"} for n, row in enumerate(rows_of(60))],
        {"split": {"stratify": "kind"}}, ["1 strata", "rare"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NOTED)
def test_omissions_are_noted(prepared: Run, name: str) -> None:
    rows, changes, says = NOTED[name]
    notes = prepared(rows, **changes).notes
    assert any(all(text in note for text in says) for note in notes), notes


def test_a_template_without_system_messages_is_noted(project_of: Callable[..., tuple[ProjectLayout, Settings]]) -> None:
    names = {
        "rows.jsonl": [{**row, "system": "Be brief."} for row in rows_of(60)],
        "chat.jinja": "{% for m in messages %}{% if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    }
    layout, chosen = project_of(names, {"chat_template": "data/raw/chat.jinja"})
    prepare(Project.from_parts(layout, chosen))
    assert any("omits system messages" in note for note in balanced(layout).notes)


def test_a_template_that_cuts_what_the_user_says_or_cannot_be_used_is_refused(
    project_of: Callable[..., tuple[ProjectLayout, Settings]], capsys: pytest.CaptureFixture[str]
) -> None:
    names = {
        "rows.jsonl": rows_of(60),
        "chat.jinja": "\ufeff{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content[:20] }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    }
    layout, _ = project_of(names, {"chat_template": "data/raw/chat.jinja"})
    assert main(["--project", str(layout.root), "prepare"]) == 2
    message = capsys.readouterr().err
    assert "prepare.limits.refused" in message
    assert "omits or changes a user message" in message
    (layout.raw / "chat.jinja").write_text("{% for m in messages %}", encoding="utf-8")
    assert main(["--project", str(layout.root), "base"]) == 2
    assert "data/raw/chat.jinja" in capsys.readouterr().err


def test_near_duplicates_with_another_label_are_noted(prepared: Run) -> None:
    rows = [{**row, "response": "ab"[n % 2]} for n, row in enumerate(rows_of(60, words=40))]
    other = [{"prompt": row["prompt"] + " please", "response": "c"} for row in rows[:6]]
    card = prepared([*rows, *other], max_tokens=400, task="labels")
    assert card.near_duplicates is not None
    assert card.near_duplicates.contradicting == 6
    assert any(note.startswith("6 dropped near-duplicates have another label") for note in card.notes)


def test_a_harness_task_that_cannot_be_loaded_is_one_message(
    project_of: Callable[..., tuple[ProjectLayout, Settings]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # avoids half a minute of download attempts
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    layout, _ = project_of(rows_of(60), leakage={"tasks": ("exam",)})
    for task in (
        "output_type: generate_until",
        'doc_to_text: "{{q"',
        'doc_to_text: "{{missing}}"',
        "dataset_path: nowhere",
        "x: \xe9",
    ):
        (layout.tasks / "exam.yaml").write_text(f"task: exam\n{task}\n", encoding="latin-1")
        assert main(["--project", str(layout.root), "prepare"]) == 2, task
        message = capsys.readouterr().err
        assert "exam" in message
        assert "Traceback" not in message
