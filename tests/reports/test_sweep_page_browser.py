"""Tests the page of a sweep in a real browser: sorting and filters, with and without JavaScript."""

from pathlib import Path

import pytest

import sweep_example as example
from chromium import Browser, Tab
from ratchet.reports import sweep_page
from ratchet.storage.records.sweep import SweepReport

FORTY = example.report(40)
ROWS = "#sweep tbody tr"
STATUS = "#sweep [role=status]"


def written(report: SweepReport, folder: Path) -> Path:
    target = folder / "sweep.html"
    sweep_page.write(report, target)
    return target


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(FORTY, tmp_path_factory.mktemp("forty"))


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(example.report(1000, workers=8), tmp_path_factory.mktemp("thousand"))


def column(tab: Tab, number: int) -> list[str]:
    """Return the cells of a column, from top to bottom."""
    return tab.texts(f"{ROWS} > :nth-child({number + 1})")


def numbers(tab: Tab) -> list[int]:
    return [int(text) for text in column(tab, 0)]


def place(tab: Tab, name: str) -> int:
    """Return the number of a column."""
    return [text.split("\n")[0].strip() for text in tab.texts("#sweep thead th")].index(name)


def head(tab: Tab, name: str) -> str:
    """Return the selector of a column's button."""
    return f"#sweep thead th:nth-child({place(tab, name) + 1}) button"


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [(1200, 900), (400, 800)], ids=["desk", "phone"])
def test_page_opens_without_complaint_request_or_scroll_bar(
    chrome: Browser, page: Path, size: tuple[int, int], dark: bool
) -> None:
    with Tab(chrome, size, dark) as tab:
        tab.assert_opens(page, dark)
        tab.wait_for_charts()
        assert len(tab.texts(".chart figcaption")) == 9
        # Letters in charts use the font and text color of the page, and are large enough.
        ink = tab.ask("getComputedStyle(document.body).color")
        text = "document.querySelector('.chart .xtick text')"
        assert tab.ask(f"getComputedStyle({text}).fill") == ink
        assert tab.ask(f"getComputedStyle({text}).fontFamily") == tab.ask("getComputedStyle(document.body).fontFamily")
        assert tab.ask(f"{text}.getBoundingClientRect().height") >= 8
        assert tab.ask("document.documentElement.scrollWidth <= innerWidth")
        assert tab.complaints() == []


def test_foreign_content_is_refused(chrome: Browser, page: Path) -> None:
    with Tab(chrome) as tab:
        tab.open(page)
        tab.assert_refuses_foreign_content()


def test_a_click_on_a_head_sorts_by_it_and_another_one_the_other_way(chrome: Browser, page: Path) -> None:
    known = {one.number: one.objectives[0] for one in FORTY.trials if one.objectives}
    without = {one.number for one in FORTY.trials if one.state in ("infeasible", "failed")}
    with Tab(chrome) as tab:
        tab.open(page)
        assert numbers(tab) == list(range(40))
        assert tab.ask("document.querySelector('#sweep th').getAttribute('aria-sort')") == "ascending"
        tab.click(head(tab, "validation loss"))
        values = [float(text) for text in column(tab, 2) if text != "–"]  # noqa: RUF001
        assert values == sorted(values)
        assert numbers(tab)[0] == min(known, key=lambda one: known[one])
        assert set(numbers(tab)[-len(without) :]) == without
        tab.click(head(tab, "validation loss"))
        values = [float(text) for text in column(tab, 2) if text != "–"]  # noqa: RUF001
        assert values == sorted(values, reverse=True)
        assert set(numbers(tab)[-len(without) :]) == without, "what has no value stands last, whichever way"
        sorts = "[...document.querySelectorAll('#sweep th')].map(x => x.getAttribute('aria-sort')).filter(Boolean)"
        assert tab.ask(sorts) == ["descending"]
        tab.click(head(tab, "learning_rate"))
        rates = [next(t for t in FORTY.trials if t.number == n).values["train.learning_rate"] for n in numbers(tab)]
        assert rates == sorted(rates), "1.2e-4 is a number"
        tab.click(head(tab, "target_modules"))
        texts = column(tab, place(tab, "target_modules"))
        assert texts == sorted(texts)


def test_states_and_words_filter(chrome: Browser, page: Path) -> None:
    by_state = {
        state: [one.number for one in FORTY.trials if one.state == state] for state in ("complete", "infeasible")
    }
    with Tab(chrome) as tab:
        tab.open(page)
        assert tab.texts(STATUS) == ["40 trials"]
        for state in ("pruned", "failed", "infeasible"):
            tab.click(f"#sweep [data-state={state}]")
        assert numbers(tab) == by_state["complete"]
        assert tab.texts(STATUS) == [f"{len(by_state['complete'])} of 40 trials"]
        assert tab.ask("document.querySelector('[data-state=pruned]').getAttribute('aria-pressed')") == "false"
        tab.click("#sweep [data-state=complete]")
        assert tab.texts(STATUS) == ["0 of 40 trials"]
        tab.click("#sweep [data-state=infeasible]")
        tab.click("#sweep input")
        tab.write("FORECAST  24.0")
        assert numbers(tab) == [7, 27]
        tab.write(" <b>nothing has this</b>")
        assert numbers(tab) == []


def test_all_of_it_works_by_keyboard(chrome: Browser, page: Path) -> None:
    with Tab(chrome) as tab:
        tab.open(page)
        tab.reach("document.activeElement.getAttribute('aria-label')?.startsWith('Optimization history.')")
        tab.reach("document.activeElement.type === 'search'")
        assert tab.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        tab.reach("document.activeElement.dataset.state === 'pruned'")
        tab.press(" ")
        assert not {one.number for one in FORTY.trials if one.state == "pruned"} & set(numbers(tab))
        tab.reach("document.activeElement.textContent === 'rank'")
        assert tab.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        tab.press("Enter")
        ranks = [next(one for one in FORTY.trials if one.number == n).values["train.rank"] for n in numbers(tab)]
        assert ranks == sorted(ranks)
        assert tab.ask("document.activeElement.textContent") == "rank"


def test_without_javascript_everything_but_filters_is_there(chrome: Browser, page: Path) -> None:
    with Tab(chrome, script=False) as tab:
        tab.open(page)
        assert (tab.texts(".controls"), tab.texts("thead button")) == ([], [])
        assert numbers(tab) == list(range(40))
        assert len(tab.texts(".chart figcaption")) == 9
        assert set(tab.texts(".chart noscript")) == {"This chart needs JavaScript; the tables have its numbers."}


@pytest.mark.long
def test_a_thousand_trials_stay_within_a_box_and_can_be_sorted(chrome: Browser, large: Path) -> None:
    assert large.stat().st_size <= 3_000_000
    with Tab(chrome) as tab:
        tab.open(large)
        tab.wait_for_charts()
        assert tab.complaints() == []
        assert {one.partition(":")[0] for one in tab.requests()} == {"file", "data"}
        box = "document.querySelector('#sweep .scroll')"
        assert tab.ask(f"{box}.clientHeight < {box}.scrollHeight")
        tab.click(head(tab, "tokens"))
        tab.click(head(tab, "tokens"))
        assert column(tab, place(tab, "tokens"))[0] == "207,000"


def test_page_can_be_printed(chrome: Browser, page: Path) -> None:
    with Tab(chrome, (794, 1123)) as tab:
        tab.open(page)
        tab.wait_for_charts()
        tab.assert_prints()
        assert max(tab.ask("[...document.querySelectorAll('.main-svg')].map(x => x.clientWidth)")) <= 700
        box = "document.querySelector('#sweep .scroll')"
        assert tab.ask(f"{box}.clientHeight >= {box}.scrollHeight"), "all trials are printed"
