"""Tests the gate's page: complete, safe with any data, limited in size, and equal bytes for equal verdicts."""

import base64
import dataclasses
import hashlib
import html
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from gate_example import DIGESTS, HOSTILE, LABELS, Case, case, compared
from page_reading import heard, read, section
from ratchet.reports import sample_browser, verdict_page
from ratchet.storage.html import NONE
from ratchet.storage.records.evaluation import EvaluatedRow, ModelRole, SampleScore
from ratchet.storage.records.gate import ChampionFile, RuleResult


def table(page: str, name: str, number: int = 0) -> list[list[str]]:
    """Return the cells of a section's table."""
    body = list(section(page, name).iter("tbody"))[number]
    return [[heard(cell) for cell in row] for row in body]


def undecided(figures: tuple[float, ...], n: int, metric: str = "accuracy", **more: Any) -> RuleResult:
    """Build an undecided result of a rule against the champion, with these figures."""
    found = compared(metric, "champion", figures, n, **more)
    return RuleResult(rule="must_not_regress", metric=metric, outcome="undecided", text="-", comparisons=(found,))


def pairing(made: Case, metric: str, against: str) -> sample_browser.PairedSampleScores:
    """Return the samples of a metric, paired with those of a reference."""
    found = sample_browser.pair_scores(made.verdict, made.evidence)
    return next(one for one in found if (one.metric, one.against) == (metric, against))


def changed(made: Case, **changes: Any) -> Case:
    """Return the same case with another verdict or other evidence."""
    verdict = {key: value for key, value in changes.items() if key in type(made.verdict).model_fields}
    evidence = {key: value for key, value in changes.items() if key not in verdict}
    return dataclasses.replace(
        made,
        verdict=made.verdict.model_copy(update=verdict),
        evidence=dataclasses.replace(made.evidence, **evidence),
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return case().write(tmp_path_factory.mktemp("page") / "gate.html")


def test_equal_evidence_in_any_order_gives_equal_bytes(page: str, tmp_path: Path) -> None:
    made = case()
    turned = dataclasses.replace(
        made,
        answers={who: dict(reversed(list(given.items()))) for who, given in reversed(list(made.answers.items()))},
        evidence=dataclasses.replace(
            made.evidence,
            samples={
                who: {name: dict(reversed(list(found.items()))) for name, found in reversed(list(by_metric.items()))}
                for who, by_metric in reversed(list(made.evidence.samples.items()))
            },
        ),
    )
    assert turned.write(tmp_path / "gate.html") == page


def test_policy_allows_only_own_script_and_page_loads_nothing(page: str) -> None:
    scripts = re.findall(r"<script>(.*?)</script>", page, flags=re.S)
    own = (Path(verdict_page.__file__).with_name("templates") / "samples.js").read_text(encoding="utf-8")
    assert scripts == [own]
    allowed = base64.b64encode(hashlib.sha256(own.encode()).digest()).decode()
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    assert policy[1] == f"default-src 'none'; script-src 'sha256-{allowed}'; style-src 'unsafe-inline'"
    assert not re.search(r"https?:|<link|<img|<iframe|url\(", page)


def test_hostile_texts_do_not_become_markup(tmp_path: Path) -> None:
    made = case()
    rows = [
        EvaluatedRow.model_construct(
            **{**dict(row), "prompt": HOSTILE, "expected": HOSTILE, "fields": {HOSTILE: HOSTILE}}
        )
        for row in made.rows
    ]
    spoiled = tuple(reason.model_copy(update={"text": HOSTILE, "metric": HOSTILE}) for reason in made.verdict.reasons)
    answers = {who: {name: [HOSTILE, "plain"] for name in given} for who, given in made.answers.items()}
    hostile = changed(dataclasses.replace(made, rows=rows, answers=answers), reasons=spoiled, run_id=HOSTILE)
    written = hostile.write(tmp_path / "gate.html")
    tree = read(written)
    assert "img" not in {one.tag for one in tree.iter()}
    assert not [name for one in tree.iter() for name in one.attrib if name.startswith("on")]
    assert not re.search(r"[\x00\x1b\u202e\ud800]", written)
    assert "\\u202e" in heard(tree)


def test_head_navigation_and_pictures_are_complete(page: str) -> None:
    tree = read(page)
    links = [str(one.get("href")) for nav in tree.iter("nav") for one in nav.iter("a")]
    assert links == [f"#{one.get('id')}" for one in tree.iter("section")]
    assert all(one.get("aria-label") for one in tree.iter("svg") if one.get("role") == "img")
    assert html.unescape(page).count("aria-hidden") > 0
    head = next(tree.iter("header"))
    said = heard(head)
    assert "REJECT" in said
    assert "A rule fails: do not promote this model." in said
    candidate, champion, anchor = (DIGESTS[who][:12] for who in ("candidate", "champion", "anchor"))
    assert [heard(one) for one in head.iter("strong")] == [candidate, "r-2f81", champion, anchor]
    assert "The champion, version 4, was promoted despite the verdict HOLD by mira: demo on Friday" in said


@pytest.mark.parametrize("decision", ["PROMOTE", "HOLD", "REJECT", "INVALID"])
def test_every_decision_has_a_shape_and_words_of_its_own(decision: str, tmp_path: Path) -> None:
    written = changed(case(12), decision=decision).write(tmp_path / "gate.html")
    found = next(one for one in read(written).iter("h1"))
    assert heard(found).startswith(decision)
    outlines = {one.get("d") for one in found.iter("path")}
    others = {"PROMOTE": "M0-7a7", "HOLD": "M0-8 8 0 0", "REJECT": "M-6.4", "INVALID": "M0-8 8 6.4"}
    assert [name for name, start in others.items() if any(str(one).startswith(start) for one in outlines)] == [decision]


@pytest.mark.parametrize("metric", ["accuracy", "human_preference"])
def test_a_strip_shows_difference_bounds_margin_zero_and_what_can_be_detected(metric: str, tmp_path: Path) -> None:
    reason = undecided((0.02, -0.04, 0.06, -0.02, 0.03), 40, metric, better=3, worse=1)
    written = changed(case(12), reasons=(reason,)).write(tmp_path / "gate.html")
    strip = next(one for one in section(written, "comparisons").iter("svg") if one.get("class") == "strip")

    def share(value: float) -> float:
        return 100 * (value + 0.045) / 0.11  # from -0.04 to 0.06, with 5 % of that on both sides

    def at(text: str | None) -> float:
        return float(str(text).removesuffix("%"))

    lines = {one.get("class"): (at(one.get("x1")), at(one.get("x2"))) for one in strip.iter("line")}
    assert lines["zero"] == pytest.approx((share(0), share(0)), abs=0.01)
    assert lines["dashed"] == pytest.approx((share(-0.02), share(-0.02)), abs=0.01)
    assert lines["bounds"] == pytest.approx((share(-0.04), share(0.06)), abs=0.01)
    seen = next(one for one in strip.iter("rect"))
    assert (at(seen.get("x")), at(seen.get("width"))) == pytest.approx((share(-0.03), 100 * 0.06 / 0.11), abs=0.01)
    assert at([one.get("x") for one in strip.iter("svg")][-1]) == pytest.approx(share(0.02), abs=0.01)
    assert strip.get("aria-label") == (
        f"{metric} against champion: +2.00 percentage points, bounds \u22124.00 and +6.00, threshold \u22122.00; "
        "the rule undecided"
    )


def test_rules_comparisons_and_metrics_are_complete_and_in_order(page: str) -> None:
    rules = table(page, "rules")
    assert [row[0] for row in rules] == ["fails", "undecided", "holds", "holds", "holds", "holds"]
    assert rules[0] == [
        "fails", "must not regressanswer_loss", "answer_loss is 0.091 worse than the anchor's; 0.05 are allowed",
    ]  # fmt: skip

    comparisons = section(page, "comparisons")
    assert [heard(one) for one in comparisons.iter("figcaption")] == [
        "Difference in percentage points",
        "Difference in nats per token, mean of rows",
        "Difference in per cent of the perplexity",
    ], "each unit has its own axis"
    figures = comparisons.iter("figure")
    assert [sum(one.get("class") == "strip" for one in figure.iter("svg")) for figure in figures] == [2, 1, 1]
    first, second, third, fourth = table(page, "comparisons")
    assert first[1:7] == [
        "+41.00+35.00 to +46.00", "0.00", "4018 better, 2 worse", "< 0.001Holm < 0.001", "5.00", "\u2013",
    ]  # fmt: skip
    assert (second[6], third[3], third[6]) == ("2,310", "40in 31 groups", "sufficient")
    assert fourth[1] == "\u22121.10\u2212\u221e to +0.20"

    rows = table(page, "metrics")
    assert [row[0].split("higher")[0].split("lower")[0] for row in rows] == [
        "accuracy", "answer_loss", "general_perplexity", "harness/poems/acc,none",
    ]  # fmt: skip
    assert "chance 5.0 %" in rows[0][0]
    slices = next(section(page, "metrics").iter("details"))
    assert [heard(one) for one in slices.iter("h3")] == [
        "tokens <= 64", "tokens <= 128", "tokens <= 1024", "topic = billing", "topic = cards", "topic = identity",
        "topic = transfers",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "figures",
    [
        (0.0, 0.0, 0.0, 0.0, 0.0),
        (0.0, -math.inf, math.inf, -0.05, math.inf),
        (math.nan, math.nan, math.nan, -0.05, math.nan),
    ],
    ids=["nothing differs", "no bounds", "no numbers"],
)
def test_plot_without_finite_bounds(figures: tuple[float, ...], tmp_path: Path) -> None:
    written = changed(case(12), reasons=(undecided(figures, 40),)).write(tmp_path / "gate.html")
    drawn = ElementTree.tostring(section(written, "comparisons"), encoding="unicode")
    assert "nan" not in drawn
    assert "inf" not in drawn


def test_flips_are_counted_over_all_samples(page: str) -> None:
    made = case()
    new, old = (made.evidence.samples[who]["accuracy"] for who in ("candidate", "champion"))
    pairs = [(old[one].value, new[one].value) for one in new]
    rows = {row[0]: row[1:] for row in table(page, "flipped-samples")}
    counts = [str(pairs.count(kind)) for kind in ((1, 0), (0, 1), (0, 0), (1, 1))]
    assert rows["accuracycandidate against champion"] == ["40", *counts]
    total, lost, won, *others = rows["answer_losscandidate against champion"]
    assert (int(lost) + int(won) + int(others[1]), others[0]) == (int(total), NONE), "a loss is never wrong"
    assert "general_perplexitycandidate against base" not in rows, "its samples have no text"


def test_a_sample_shows_prompt_expected_answer_and_both_answers_with_what_differs(page: str) -> None:
    made = case()
    first = next(section(page, "flipped-samples").iter("article"))
    row = next(row for row in made.rows if heard(first).count(row.id[:12]))
    texts = [heard(one) for one in first.iter("p")]
    assert texts[1:] == [row.prompt, row.expected, row.expected, made.answers["candidate"][row.id][0]]
    assert "accuracy 1 \u2192 0" in texts[0]
    assert row.expected in [heard(one) for one in first.iter("mark")]
    assert f"topic = {row.fields['topic']}" in heard(first)


def test_graded_scores_are_ordered_by_how_much_was_lost() -> None:
    found = pairing(case(), "answer_loss", "base")
    gains = [found.scores[one][0] - found.scores[one][1] for one in found.kinds["lost"]]
    assert found.graded
    assert gains == sorted(gains)
    assert max(gains) < 0
    assert all(found.scores[one][1] < found.scores[one][0] for one in found.kinds["won"])


def test_perplexities_are_compared_per_token_and_what_is_no_number_is_left_out() -> None:
    made = case(12)
    samples: dict[ModelRole, dict[str, Mapping[str, SampleScore]]] = {
        who: dict(found) for who, found in made.evidence.samples.items()
    }
    samples["base"]["general_perplexity"] = {
        "x": SampleScore(id="x", value=8.0, weight=4.0),
        "y": SampleScore(id="y", value=1.0),
    }
    samples["candidate"]["general_perplexity"] = {
        "x": SampleScore(id="x", value=9.0, weight=6.0),
        "y": SampleScore.model_construct(id="y", value=math.nan, weight=1.0),
    }
    found = pairing(changed(made, samples=samples), "general_perplexity", "base")
    assert (dict(found.scores), list(found.kinds["won"])) == ({"x": (math.exp(2.0), math.exp(1.5))}, ["x"])


def test_the_form_that_the_gate_compared_is_shown(tmp_path: Path) -> None:
    made = case(12)
    scores = dict(made.evidence.report.scores)
    scores["merged"] = scores["candidate"].model_copy(update={"model_format": "merged"})
    samples = {**made.evidence.samples, "merged": made.evidence.samples["champion"]}
    reason = undecided((0.0, -0.1, 0.1, -0.02, 0.05), 12, role="merged")
    report = made.evidence.report.model_copy(update={"scores": scores})
    made = changed(made, report=report, samples=samples, reasons=(reason,))
    forms = [pairing(made, "accuracy", against).candidate for against in ("champion", "base")]
    assert forms == ["merged", "candidate"]
    rows = [row[0] for row in table(made.write(tmp_path / "gate.html"), "flipped-samples")]
    assert rows[0] == "accuracymerged against champion"


@pytest.mark.parametrize(("count", "words"), [(10_000, 12), (700, 500)], ids=["many", "long"])
def test_page_stays_below_two_megabytes_and_says_what_is_left_out(count: int, words: int, tmp_path: Path) -> None:
    made = case(count, words)
    long = {who: {name: [given[0] * words] for name, given in found.items()} for who, found in made.answers.items()}
    written = dataclasses.replace(made, answers=long if words > 12 else made.answers).write(tmp_path / "gate.html")
    assert len(written.encode()) <= 2_000_000
    said = " ".join(map(heard, section(written, "flipped-samples").iter("p")))
    left_out = re.search(r"([\d,]+) samples shown; ([\d,]+) that changed between right and wrong are omitted", said)
    assert left_out
    assert int(left_out[1].replace(",", "")) == len(list(section(written, "flipped-samples").iter("article")))
    shown = [one.get("data-k", "") for one in section(written, "flipped-samples").iter("article")]
    flipped = sum(bool(re.match(r"\d+(lo|wo)", one)) for one in shown)
    assert flipped > 0.5 * len(shown), "flips come first"
    if words > 12:
        assert "characters ...]" in said


def test_worst_labels_come_first_with_their_confusions(page: str) -> None:
    made = case()
    found = made.evidence.report.scores["candidate"].per_class
    order = sorted(LABELS, key=lambda name: (found[name]["f1"], name))
    assert [row[0] for row in table(page, "labels")] == order[:15]
    assert [row[0] for row in table(page, "labels", 1)] == order[15:]
    wrong = sum(made.answers["candidate"][row.id] != [row.expected] for row in made.rows)
    assert sum(int(row[2]) for row in table(page, "labels", 2)) == wrong


def test_forgetting_parity_costs_noise_and_lineage(page: str) -> None:
    base = case().evidence.report.scores
    values = {who: base[who].metrics["general_perplexity"].value for who in ("base", "candidate")}
    risen = values["candidate"] / values["base"] - 1
    assert table(page, "forgetting")[1][-1] == f"{risen:+.1%}".replace("-", "\u2212").replace("%", " %")
    assert table(page, "export-parity")[0][1] == "3.1e-06"
    assert table(page, "cost-and-floors")[0] == ["candidate", "0.123", "0.2", "61.5", "3.00 GiB", "8", "cpu"]
    assert table(page, "noise")[0][3] == "0 of 40"
    lineage = heard(section(page, "lineage"))
    digests = [*DIGESTS.values(), "d" * 64, "e" * 64, "9" * 64, "3" * 64]
    for wanted in (*digests, "tasks.poems", "the batch was halved once"):
        assert wanted[:12] in lineage
    assert "3 models, including this one" in lineage


Spoil = Callable[[Case], Case]


def without_scores(made: Case) -> Case:
    report = made.evidence.report.model_copy(update={"scores": {}, "costs": {}, "contracts": {}, "notes": ()})
    bare = changed(made, report=report, samples={}, noise=None, champion=ChampionFile(), reasons=())
    return changed(bare, decision="INVALID", champion_digest=None, anchor_digest=None)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (
            without_scores,
            {
                "rules": "No rule was applied.",
                "comparisons": "No rule compares two models.",
                "flipped-samples": "No reference has samples that can be shown next to the candidate's.",
                "metrics": "Nothing was measured.",
                "forgetting": "Perplexity of general text was not measured.",
                "labels": "The answers are not labels.",
                "noise": "Not measured. Run `ratchet gate --aa` to evaluate the candidate a second time.",
                "cost-and-floors": "Latency and memory were not measured (set evaluate.latency_rows).",
            },
        ),
        (
            lambda made: dataclasses.replace(made, rows=(), answers={}, documents={}),
            {"flipped-samples": "No reference has samples that can be shown next to the candidate's."},
        ),
        (lambda made: dataclasses.replace(made, answers={}), {"labels": "No label was confused with another."}),
    ],
    ids=["no scores", "no texts", "no answers"],
)
def test_missing_parts_are_named(spoil: Spoil, said: Mapping[str, str], tmp_path: Path) -> None:
    written = spoil(case(12)).write(tmp_path / "gate.html")
    for name, sentence in said.items():
        assert sentence in heard(section(written, name)), name
