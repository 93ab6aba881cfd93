"""Tests the page of a sweep: complete, safe with any data, limited in size, and equal bytes for equal reports."""

import base64
import gzip
import hashlib
import json
import math
import re
from typing import Any

import pytest
from ruamel.yaml import YAML

import sweep_example as example
from page_reading import heard, read, section
from ratchet.reports import pages, sweep_charts, sweep_page
from ratchet.reports.sweep_page import format_yaml
from ratchet.storage.records.sweep import ParameterAxis, SweepReport, TrainingCost, Trial
from ratchet.tuning.trial_summary import compute_savings

FORTY = example.report(40)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    target = tmp_path_factory.mktemp("page") / "sweep.html"
    sweep_page.write(FORTY, target)
    return target.read_text(encoding="utf-8")


def table(page: str, name: str, number: int = 0) -> list[list[str]]:
    body = list(section(page, name).iter("tbody"))[number]
    return [[heard(cell) for cell in row] for row in body]


def figures(page: str) -> dict[str, tuple[str, str]]:
    """Return the key figures of the header, each with its value and note."""
    return {heard(one[0]): (heard(one[1][0]), heard(one[1][1])) for one in read(page).iterfind(".//header/dl/div")}


def changed(trial: Trial, **changes: Any) -> Trial:
    return trial.model_copy(update=changes)


def with_trials(*trials: Trial) -> SweepReport:
    best = tuple(one.number for one in trials if one.state == "complete")[:1]
    return FORTY.model_copy(update={"trials": trials, "best": best, "final_round": None, "winner": None})


# --------------------------------------------------------------------------------------------------------------- safety


def test_equal_reports_give_equal_bytes(page: str) -> None:
    assert sweep_page.render(SweepReport.model_validate_json(FORTY.model_dump_json())) == page


def test_only_our_own_scripts_may_run_and_nothing_may_be_loaded(page: str) -> None:
    own = [(pages.TEMPLATES / name).read_text(encoding="utf-8") for name in ("trials.js", "charts.js")]
    assert re.findall(r"<script>(.*?)</script>", page, flags=re.S) == own
    packed = re.search(r'<script type="text/plain" id="plotly">(.*?)</script>', page)
    assert packed
    plotly = gzip.decompress(base64.b64decode(packed[1])).decode()
    allowed = [base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (*own, plotly)]
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy
    sources = " ".join(f"'sha256-{one}'" for one in allowed)
    assert policy[1] == f"default-src 'none'; img-src data: blob:; script-src {sources}; style-src 'unsafe-inline'"
    assert not re.search(r"https?:|<link|<iframe|@import|url\((?!#)", page.replace(packed[1], ""))
    ids = re.findall(r' id="([^"]*)"', page)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'href="#([^"]*)', page)) <= set(ids)


def test_texts_of_others_are_texts() -> None:
    evil = example.HOSTILE
    trials = tuple(
        changed(
            one, reason=evil, run_id=evil, values={**one.values, "train.target_modules": evil},
            executions=tuple(take.model_copy(update={"worker": evil}) for take in one.executions),
        )
        for one in FORTY.trials
    )  # fmt: skip
    assert FORTY.final_round is not None
    finals = FORTY.final_round.model_copy(
        update={
            "reason": evil,
            "finalists": tuple(one.model_copy(update={"dropped": evil}) for one in FORTY.final_round.finalists),
            "comparisons": tuple(one.model_copy(update={"method": evil}) for one in FORTY.final_round.comparisons),
        }
    )
    axes = (*FORTY.axes, ParameterAxis(name=evil, kind="choice", choices=(evil,)))
    hostile = FORTY.model_copy(
        update={"study": evil, "sampler": evil, "pruner": evil, "stopped": evil, "trials": trials,
            "final_round": finals,
                "axes": axes, "versions": {evil: evil}, "data_digest": evil, "importances": {evil: 1.0}}
    )  # fmt: skip
    written = sweep_page.render(hostile)
    tree = read(written)
    assert "img" not in {one.tag for one in tree.iter()}
    assert not [name for one in tree.iter() for name in one.attrib if name.startswith("on")]
    assert not re.search(r"[\x00\x1b\u202e\ud800]", written)
    charts = sum(map(len, sweep_charts.build_charts(hostile).values()))
    assert len(re.findall(r"<script", written)) == charts + 3, "charts, Plotly and two scripts"
    assert '<script>alert("1")</script>' in heard(tree)


@pytest.mark.parametrize("count", [0, 1, 2])
def test_small_sweeps_have_a_page(count: int) -> None:
    written = sweep_page.render(example.report(count))
    assert figures(written)["Trials"][0] == f"{count} of {count}"
    assert ("No trial has started." in heard(section(written, "trials"))) == (count == 0)
    assert ("No recommendation yet" in heard(section(written, "adopt"))) == (count == 0)


@pytest.mark.parametrize("state", ["running", "pruned", "infeasible", "failed"])
def test_sweep_without_a_complete_trial_recommends_nothing(state: Any) -> None:
    written = sweep_page.render(example.alone(state, 3))
    assert figures(written)["Best"] == ("–", "no trial is complete")  # noqa: RUF001
    assert "No recommendation yet" in heard(section(written, "adopt"))
    assert len(table(written, "trials")) == 3


def test_objective_that_is_nan_is_left_out() -> None:
    odd = changed(FORTY.trials[0], objectives=(math.nan,))
    written = sweep_page.render(with_trials(odd, *FORTY.trials[1:4]))
    assert table(written, "trials")[0][2] == "–"  # noqa: RUF001
    assert figures(written)["Best"][0] == "–"  # noqa: RUF001


def test_a_thousand_trials_fit_into_three_megabytes() -> None:
    written = sweep_page.render(example.report(1000, workers=8))
    assert len(written.encode()) <= 3_000_000
    assert len(table(written, "trials")) == 1000


# --------------------------------------------------------------------------------------------------------- completeness


def test_every_section_is_linked_and_every_chart_is_said(page: str) -> None:
    tree = read(page)
    links = [str(one.get("href")) for nav in tree.iter("nav") for one in nav.iter("a")]
    assert links == [f"#{one.get('id')}" for one in tree.iter("section")]
    drawn = sweep_charts.build_charts(FORTY)
    charts = [one for one in tree.iter("div") if one.get("class") == "plot"]
    titles = [sweep_page.PICTURES[name][0] for name, figures in drawn.items() for _ in figures]
    assert len(charts) == len(titles) == 9, "six hyperparameters are two rows of slices"
    for one, title in zip(charts, titles, strict=True):
        assert str(one.get("aria-label")).startswith(title)


def test_the_head_says_what_came_of_it(page: str) -> None:
    said = figures(page)
    saved = compute_savings(FORTY)
    assert said["Trials"] == (
        f"{sum(trial.continues is None for trial in FORTY.trials)} of 40",
        "10 complete, 21 pruned, 7 infeasible, 2 failed; 3 pruned trials were continued later",
    )
    best = next(one for one in FORTY.trials if one.number == 11)
    assert said["Best"][0] == f"{best.objectives[0]:.4g}"
    assert said["Best"][1].startswith(f"trial 11: rank {best.values['train.rank']}, alpha")
    assert said["Winner"] == ("trial 6", "trials 11 and 6 do not differ significantly; 6 is the cheaper one")
    assert said["Saved"][0] == f"{saved.tokens / saved.full_tokens:.1%}".replace("%", " %")
    assert said["Saved"][1].startswith(f"{saved.tokens:,} of {saved.full_tokens:,} answer tokens, 1 h")
    stopped = FORTY.model_copy(update={"stopped": "3 trials failed: the tokenizer has no end of turn"})
    assert "Stopped early: 3 trials failed" in heard(next(read(sweep_page.render(stopped)).iter("header")))


def test_what_it_cost_adds_up(page: str) -> None:
    rows = {row[0]: row[1:] for row in table(page, "cost")}
    tokens = {name: 0 if row[1] == "–" else int(row[1].replace(",", "")) for name, row in rows.items()}  # noqa: RUF001
    whole = tokens.pop("full training of all")
    assert sum(tokens.values()) == whole == compute_savings(FORTY).full_tokens
    shares = [float(row[3].removesuffix(" %")) for row in rows.values() if row[3] != "–"]  # noqa: RUF001
    assert sum(shares) == pytest.approx(100, abs=0.3)
    nothing = sweep_page.render(with_trials(changed(FORTY.trials[0], cost=TrainingCost())))
    assert table(nothing, "cost")[0][1:] == ["1", "0", "0 s", "–"]  # noqa: RUF001


def test_all_trials_stand_in_the_table(page: str) -> None:
    rows = table(page, "trials")
    assert [row[0] for row in rows] == [str(one.number) for one in FORTY.trials]
    assert [row[1].split()[1] for row in rows] == [one.state for one in FORTY.trials]
    head = [heard(one) for one in next(section(page, "trials").iter("thead")).iter("th")]
    cells = [dict(zip(head, row, strict=True)) for row in rows]
    first = FORTY.trials[0]
    assert cells[0]["validation loss"] == f"{first.objectives[0]:.4f}"
    assert (cells[0]["rank"], cells[0]["adapter"], cells[0]["target_rank"]) == ("22", "dora", "–")  # noqa: RUF001
    assert cells[0]["run"] == str(first.run_id)
    assert cells[0]["tokens"] == f"{first.cost.trained_tokens:,}"
    assert cells[7]["why"] == "memory forecast: 31.4 GiB are needed, 24.0 GiB are at hand"
    assert cells[7]["validation loss"] == "–"  # noqa: RUF001
    assert cells[8]["why"].endswith("; continued by trial 10")
    assert cells[10]["why"] == "continues trial 8"
    assert (cells[12]["why"], cells[12]["tokens"]) == ("train.rank: no layer is as wide as 64", "0")
    twice = next(one for one in FORTY.trials if len(one.executions) > 1)
    assert cells[twice.number]["workers"] == ", ".join(take.worker for take in twice.executions)


def test_finalists_by_seed_and_what_tells_them_apart(page: str) -> None:
    assert FORTY.final_round is not None
    rows, compared = table(page, "finalists"), table(page, "finalists", 1)
    assert [row[0] for row in rows] == ["11", "6", "23"]
    assert rows[0][1:5] == [
        f"{mean:.4f}" for mean in (FORTY.final_round.finalists[0].mean, *FORTY.final_round.finalists[0].means)
    ]
    assert rows[1][-1] == "the winner"
    assert rows[2][-1] == "worse than the leader at p < 0.01 (Wilcoxon)"
    assert rows[2][4] == "–"  # noqa: RUF001
    assert compared[0][1:7] == [
        f"+{FORTY.final_round.comparisons[0].difference:.4f}", "\u22120.0030", "0.081", "0.0040", "0.0060", "no",
    ]  # fmt: skip
    assert compared[1][3] == "< 0.001"
    alone = sweep_page.render(FORTY.model_copy(update={"final_round": None, "winner": None}))
    assert "No final round took place" in heard(section(alone, "finalists"))
    assert "Winner" not in figures(alone)


def test_the_front_stands_in_a_table_and_nothing_is_adopted_unless_one_was_named() -> None:
    report = example.report(40, metrics=("validation_loss", "memory_bytes"), final_round=False)
    written = sweep_page.render(report)
    assert [row[0] for row in table(written, "front")] == [str(one) for one in report.best]
    assert table(written, "front")[0][2].endswith(" MiB")
    assert figures(written)["Front"][0] == f"{len(report.best)} trials"
    assert "Choose a trial from the table of the front" in heard(section(written, "adopt"))
    named = report.model_copy(update={"winner": report.best[0]})
    assert f"Trial {report.best[0]}" in heard(section(sweep_page.render(named), "adopt"))


def test_values_to_adopt_are_exact_for_every_reader_of_yaml(page: str) -> None:
    values = {
        "train.rank": 16, "train.learning_rate": 1e-05, "train.dropout": 0.1 + 0.2, "train.alpha": 32.0,
        "train.target_modules": ("q_proj", "a: b", "# no comment", "日本"), "train.adalora.target_rank": 7,
        "train.double_quantization": True, "train.tie": None, "train.adapter": "yes", "odd key.x y": "\x00\u202e",
        "train.weight_decay": 1.5e300,
    }  # fmt: skip
    wanted = {
        "train": {
            "rank": 16, "learning_rate": 1e-05, "dropout": 0.1 + 0.2, "alpha": 32.0, "double_quantization": True,
            "target_modules": ["q_proj", "a: b", "# no comment", "日本"], "adalora": {"target_rank": 7}, "tie": None,
            "adapter": "yes", "weight_decay": 1.5e300,
        },
        "odd key": {"x y": "\x00\u202e"},
    }  # fmt: skip
    for version in ("1.1", "1.2"):
        reader = YAML(typ="safe", pure=True)
        reader.version = version
        assert reader.load(format_yaml(values)) == wanted
    code = "".join(next(section(page, "adopt").iter("pre")).itertext())
    winner = next(one for one in FORTY.trials if one.number == FORTY.winner)
    assert reader.load(code)["train"]["learning_rate"] == winner.values["train.learning_rate"]


def test_reproduction_and_workers_are_shown(page: str) -> None:
    said = heard(section(page, "reproduce"))
    for wanted in ("sampler tpe, seed 0", "optuna 5.0.0", FORTY.data_digest, FORTY.base_digest, "storage sqlite"):
        assert wanted.replace(" ", "") in said.replace(" ", "")
    said = heard(section(page, "workers"))
    takes = [take for one in FORTY.trials for take in one.executions]
    assert f"{len({take.worker for take in takes})} workers in" in said
    assert f"Workers took over trials of other workers {len(takes) - len(FORTY.trials)} times" in said


# ------------------------------------------------------------------------------------------------------- pictures


def test_charts_have_colours_that_follow_light_and_dark(page: str) -> None:
    """Each colour of a chart has a dark one in charts.js; the surface has its own scale."""
    script = (pages.TEMPLATES / "charts.js").read_text(encoding="utf-8")
    known = set(re.findall(r'"(#[0-9a-f]{6})":', script))
    figures = re.findall(r'<script type="application/json">(.*?)</script>', page)
    used = {colour for text in figures for colour in re.findall(r'olor":"(#[0-9a-f]{6})"', text)}
    assert used
    assert used <= known
    assert not any(font in text for text in figures for font in ('"family"', '"template"'))


def test_what_a_chart_says_in_letters_is_left_alone() -> None:
    """Values of hyperparameters may look like colours, attributes or tags."""
    value = "#1c1e21 <b>x</b>"
    trials = tuple(changed(one, values={"train.target_modules": value}) for one in FORTY.trials)
    axes = (ParameterAxis(name="train.target_modules", kind="choice", choices=(value, "b")),)
    report = FORTY.model_copy(update={"trials": trials, "axes": axes, "importances": {}})
    [figure] = sweep_charts.build_charts(report)["slices"]
    shown = json.dumps(figure["layout"]["xaxis"]["ticktext"])
    assert "#1c1e21" in shown
    assert "&lt;b&gt;" in shown.replace("<br>", "")
