"""Tests the gate's page in a real browser: filters and search, with and without JavaScript."""

from pathlib import Path

import pytest

from chromium import Browser, Tab
from gate_example import Case, case

SEEN = "#browser article"
STATUS = "#browser [role=status]"
LOST, WON, WRONG, RIGHT = (f"#browser [data-kind={kind}]" for kind in ("lo", "wo", "wr", "ri"))


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path]:
    made, target = case(40), tmp_path_factory.mktemp("small") / "gate.html"
    made.write(target)
    return made, target


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> tuple[Case, Path]:
    made, target = case(10_000), tmp_path_factory.mktemp("large") / "gate.html"
    made.write(target)
    return made, target


def flips(made: Case, against: str = "champion") -> dict[str, set[str]]:
    """Group the ids of rows by their change, counted here independently of the page."""
    new, old = (made.evidence.samples[who]["accuracy"] for who in ("candidate", against))  # type: ignore[index]
    names = {(1.0, 0.0): "lost", (0.0, 1.0): "won", (0.0, 0.0): "wrong", (1.0, 1.0): "right"}
    found: dict[str, set[str]] = {name: set() for name in names.values()}
    for sample in new:
        found[names[old[sample].value, new[sample].value]].add(sample)
    return found


def ids(tab: Tab) -> list[str]:
    """Return the visible samples by the beginning of their id."""
    return [text.split(" · ")[0] for text in tab.texts(f"{SEEN} > small")]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [(1280, 900), (400, 800)], ids=["desk", "phone"])
def test_page_opens_without_complaint_request_or_scroll_bar(
    chrome: Browser, small: tuple[Case, Path], size: tuple[int, int], dark: bool
) -> None:
    with Tab(chrome, size, dark) as tab:
        tab.assert_opens(small[1], dark)
        assert tab.texts("h1 .outcome") == ["REJECT"]


def test_foreign_content_is_refused(chrome: Browser, small: tuple[Case, Path]) -> None:
    with Tab(chrome) as tab:
        tab.open(small[1])
        tab.assert_refuses_foreign_content()


def test_a_click_on_a_filter_shows_what_it_says(chrome: Browser, small: tuple[Case, Path]) -> None:
    made, page = small
    found = flips(made)
    with Tab(chrome) as tab:
        tab.open(page)
        for button, kind in ((LOST, "lost"), (WON, "won"), (WRONG, "wrong"), (RIGHT, "right")):
            assert tab.texts(f"{button} b") == [str(len(found[kind]))]
        assert ids(tab)[: len(found["lost"])] == sorted(one[:12] for one in found["lost"])
        tab.click(LOST)
        assert tab.ask(f"document.querySelector('{LOST}').getAttribute('aria-pressed')") == "false"
        assert set(ids(tab)) == {one[:12] for one in found["won"] | found["wrong"]}
        tab.click(WON)
        tab.click(WRONG)
        assert ids(tab) == []
        assert tab.texts(STATUS) == ["No sample passes these filters."]
        tab.click(RIGHT)
        assert set(ids(tab)) <= {one[:12] for one in found["right"]}
        assert tab.texts(STATUS) == [f"1 to 10 of {len(found['right'])}"]


def test_reference_metric_and_field_are_chosen(chrome: Browser, small: tuple[Case, Path]) -> None:
    made, page = small
    with Tab(chrome) as tab:
        tab.open(page)
        tab.choose("reference", "1")
        assert tab.texts(f"{LOST} b") == [str(len(flips(made, "base")["lost"]))]
        assert set(tab.texts(f"{SEEN} .answers div:nth-child(2) small")) == {"base"}
        labels, options = (
            f"[...document.querySelectorAll('{one}')]" for one in (".selects label", "[data-by=metric] option")
        )
        topic = tab.ask(f"{labels}.find(x => x.innerText.startsWith('topic')).querySelector('select').dataset.by")
        tab.choose(topic, "=cards")
        shown = {row.id for row in made.rows if row.fields["topic"] == "cards"}
        by_kind = flips(made, "base")
        assert set(ids(tab)) == {one[:12] for one in shown & (by_kind["lost"] | by_kind["won"] | by_kind["wrong"])}
        tab.choose(topic, "")
        tab.choose("metric", tab.ask(f"{options}.find(x => x.text == 'answer_loss').value"))
        kinds = [text.split("\n")[0] for text in tab.texts("#browser .kinds button > span:nth-child(2)")]
        assert kinds == ["candidate worse", "candidate better", "equal"]
        tab.choose("metric", tab.ask(f"{options}.find(x => x.text.startsWith('harness')).value"))
        assert all(text.startswith("Poem") for text in tab.texts(f"{SEEN} .prompt p"))
        assert "rise" in tab.texts(f"{SEEN} mark")


def test_search_finds_words_and_says_when_there_are_none(chrome: Browser, small: tuple[Case, Path]) -> None:
    made, page = small
    found = flips(made)
    wanted = next(row for row in made.rows if row.id in found["lost"])
    with Tab(chrome) as tab:
        tab.open(page)
        tab.click("#browser input")
        tab.write(f"{wanted.id[:12].upper()}  customer")
        assert ids(tab) == [wanted.id[:12]]
        assert tab.texts(f"{SEEN} .prompt p") == [wanted.prompt]
        assert (tab.texts(f"{LOST} b"), tab.texts(STATUS)) == (["1"], ["1 to 1 of 1"])
        tab.write(" <b>nothing has this</b>")
        assert (ids(tab), tab.texts(f"{LOST} b")) == ([], ["0"])


def test_ten_thousand_rows_page_by_page(chrome: Browser, large: tuple[Case, Path]) -> None:
    _, page = large
    assert page.stat().st_size <= 2_000_000
    with Tab(chrome) as tab:
        tab.open(page)
        assert (tab.complaints(), tab.requests()) == ([], [page.as_uri()])
        assert "omitted to limit the page size" in tab.texts("#flipped-samples")[0]
        first = ids(tab)
        tab.click("[data-turn='1']")
        second = ids(tab)
        assert len(first) == len(second) == 10
        assert not set(first) & set(second)
        assert tab.texts(STATUS)[0].startswith("11 to 20 of ")
        tab.click("[data-turn='-1']")
        assert ids(tab) == first
        tab.click("[data-turn='-1']")
        assert ids(tab) == first


def test_all_of_it_works_by_keyboard(chrome: Browser, small: tuple[Case, Path]) -> None:
    made, page = small
    found = flips(made)
    with Tab(chrome) as tab:
        tab.open(page)
        tab.reach("document.activeElement.type === 'search'")
        assert tab.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        tab.reach("document.activeElement.dataset.kind === 'lo'")
        tab.press(" ")
        assert not set(ids(tab)) & {one[:12] for one in found["lost"]}
        tab.reach("document.activeElement.dataset.kind === 'ri'")
        tab.press("Enter")
        assert tab.texts(STATUS)[0].startswith("1 to 10 of ")
        tab.reach("document.activeElement.dataset.turn === '1'")
        tab.press("Enter")
        assert tab.texts(STATUS)[0].startswith("11 to ")
        assert tab.ask("document.activeElement.dataset.turn") == "1"


def test_without_javascript_everything_but_filters_is_there(chrome: Browser, small: tuple[Case, Path]) -> None:
    made, page = small
    found = flips(made)
    with Tab(chrome, script=False) as tab:
        tab.open(page)
        assert (tab.texts(".controls"), tab.texts(".paging")) == ([], [])
        assert ids(tab)[: len(found["lost"])] == sorted(one[:12] for one in found["lost"])
        assert {row.id[:12] for row in made.rows} <= set(ids(tab))
        assert len(tab.texts(".forest .name")) == 4
        assert tab.ask("document.querySelectorAll('svg.strip').length") == 4
        assert tab.ask("document.querySelector('.list').clientHeight < document.querySelector('.list').scrollHeight")


def test_page_can_be_printed(chrome: Browser, small: tuple[Case, Path]) -> None:
    with Tab(chrome) as tab:
        tab.open(small[1])
        tab.assert_prints()
        assert len(ids(tab)) == 9
