"""The pages of trainings in a real browser: what a reader chooses, hides and reads, with and without JavaScript."""

from pathlib import Path

import pytest
from chromium import Browser, Tab

import trained_runs
from ratchet import config
from ratchet.compare import compare
from ratchet.layout import Layout
from ratchet.report import report
from trained_runs import STEP_S, TRAINED_TOKENS, VALIDATION_S, Training

FIRST = Training(restarts=((37, 30),), spike=(25, 9.0))
WIDE = trained_runs.seeds(Training(rank=16, floor=0.8, seed=3), 3)
LOSS = "[data-chart=loss]"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    layout = Layout(tmp_path_factory.mktemp("project"))
    for one in (FIRST, *WIDE):
        trained_runs.lay(layout, one)
    names = (f"first={FIRST.spec.run_id}", "wide=" + "+".join(one.spec.run_id for one in WIDE))
    found = {"compare": layout.root / "compare.html", "report": layout.root / "report.html"}
    compare(layout, config.Settings(), names, found["compare"])
    report(layout, config.Settings(), FIRST.spec.run_id, found["report"])
    return found


def choose(tab: Tab, by: str, value: str) -> None:
    """A value of a control, as its reader would: the page is told of the change."""
    tab.ask(
        f"(() => {{ const x = document.querySelector('[data-by={by}]'); x.value = '{value}';"
        " x.dispatchEvent(new Event('input', {bubbles: true})); })()"
    )


def curves(tab: Tab) -> list[str]:
    """The lines of the first picture."""
    found: list[str] = tab.ask(f"[...document.querySelectorAll('{LOSS} polyline')].map(x => x.getAttribute('points'))")
    return found


def heights(points: str) -> list[float]:
    return [float(point.split(",")[1]) for point in points.split()]


def texts(tab: Tab) -> list[str]:
    found: list[str] = tab.ask(f"[...document.querySelectorAll('{LOSS} text')].map(x => x.textContent)")
    return found


@pytest.mark.parametrize("page", ["compare", "report"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [(1200, 900), (400, 800)], ids=["desk", "phone"])
def test_it_opens_without_a_complaint_a_request_or_a_scroll_bar(
    chrome: Browser, pages: dict[str, Path], page: str, size: tuple[int, int], dark: bool
) -> None:
    with Tab(chrome, size, dark) as tab:
        tab.open(pages[page])
        assert tab.requests() == [pages[page].as_uri()]
        assert tab.complaints() == []
        assert tab.ask("document.documentElement.scrollWidth <= innerWidth")
        assert len(tab.texts(".curves figcaption")) == 5
        # The picture is as wide as its place, so that letters keep their size.
        assert tab.ask(f"document.querySelector('{LOSS} svg').getBoundingClientRect().width") > 0.8 * size[0] - 200
        assert tab.ask(f"document.querySelector('{LOSS} text').getBoundingClientRect().height") >= 11
        ground = tab.ask("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, ground.removeprefix("rgb(").removesuffix(")").split(","))) < 200) == dark
        drawn = tab.ask(f"getComputedStyle(document.querySelector('{LOSS} polyline')).stroke")
        assert drawn not in ("none", ground)


def test_the_script_draws_what_the_page_had(chrome: Browser, pages: dict[str, Path]) -> None:
    with Tab(chrome, script=False) as plain, Tab(chrome) as live:
        plain.open(pages["compare"])
        live.open(pages["compare"])
        for still, moved in zip(curves(plain), curves(live), strict=True):
            assert heights(still) == pytest.approx(heights(moved), abs=0.2)
        assert plain.texts(".controls") == []
        assert len(plain.texts(".legend bdi")) == 2
        assert len(live.texts(".controls")) == 1
        bands = f"document.querySelectorAll('{LOSS} polygon').length"
        assert plain.ask(bands) == live.ask(bands) == 1, "the group has a band, the single training none"


def test_curves_go_by_tokens_and_time_too(chrome: Browser, pages: dict[str, Path]) -> None:
    with Tab(chrome) as tab:
        tab.open(pages["compare"])
        assert "60" in texts(tab)
        by_step = curves(tab)
        choose(tab, "axis", "tokens")
        assert any(text.replace(",", "") in ("5000", "6000") for text in texts(tab)), 60 * TRAINED_TOKENS
        choose(tab, "axis", "seconds")
        assert 60 * STEP_S + 6 * VALIDATION_S == 42
        assert "40 s" in texts(tab)
        assert [heights(one) for one in curves(tab)] == [heights(one) for one in by_step]
        assert curves(tab) != by_step, "validations take time, so places differ"


def test_smoothing_takes_the_spike_down_and_can_be_undone(chrome: Browser, pages: dict[str, Path]) -> None:
    with Tab(chrome) as tab:
        tab.open(pages["compare"])
        before = curves(tab)
        choose(tab, "smooth", "90")
        assert min(heights(curves(tab)[0])) > min(heights(before[0])) + 50  # downwards: y grows
        validated = "document.querySelector('[data-chart=validation] polyline').getAttribute('points')"
        kept = tab.ask(validated)
        choose(tab, "smooth", "0")
        assert curves(tab) == before
        assert tab.ask(validated) == kept, "validations are points, and stay"


def test_a_curve_can_be_hidden_and_shown(chrome: Browser, pages: dict[str, Path]) -> None:
    with Tab(chrome) as tab:
        tab.open(pages["compare"])
        before = curves(tab)
        tab.click("[data-side='0']")
        assert curves(tab) == before[1:], "what is left does not move"
        assert tab.ask("document.querySelector(\"[data-side='0']\").getAttribute('aria-pressed')") == "false"
        tab.click("[data-side='1']")
        assert curves(tab) == []
        tab.click("[data-side='0']")
        tab.click("[data-side='1']")
        assert curves(tab) == before


def test_values_are_read_by_keyboard(chrome: Browser, pages: dict[str, Path]) -> None:
    with Tab(chrome) as tab:
        tab.open(pages["compare"])
        for _ in range(80):
            tab.press("Tab")
            if tab.ask(f"document.activeElement === document.querySelector('{LOSS} svg')"):
                break
        else:
            pytest.fail("the keyboard does not reach the picture")
        assert tab.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        tab.press("ArrowDown")
        last = tab.texts(".readout")[0]
        assert last.startswith(f"step 60: first {FIRST.loss(60):.4g}")
        for _ in range(2):
            tab.press("ArrowDown")
        assert tab.texts(".readout")[0].startswith(f"step 40: first {FIRST.loss(40):.4g}")


def test_values_are_read_by_pointer(chrome: Browser, pages: dict[str, Path]) -> None:
    with Tab(chrome) as tab:
        tab.open(pages["compare"])
        tab.click(f"{LOSS} svg")
        x, y, wide = tab.ask(
            f"(() => {{ const b = document.querySelector('{LOSS} svg').getBoundingClientRect();"
            " return [b.x, b.y + 100, b.width]; })()"
        )
        tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + 62 + (wide - 74) * 25 / 60, y=y)
        assert tab.texts(".readout")[0].startswith("step 25: first 9 ")


def test_numbers_open_by_keyboard_without_javascript(chrome: Browser, pages: dict[str, Path]) -> None:
    with Tab(chrome, script=False) as tab:
        tab.open(pages["report"])
        shown = "[...document.querySelectorAll('.curves table')].filter(x => x.checkVisibility()).length"
        assert tab.ask(shown) == 0
        tab.click(".curves summary")
        assert tab.ask(shown) == 1
        assert len(tab.texts(".curves figcaption")) == 5


def test_it_can_be_printed(chrome: Browser, pages: dict[str, Path]) -> None:
    for page in pages.values():
        with Tab(chrome, (794, 1123)) as tab:
            tab.open(page)
            tab.call("Emulation.setEmulatedMedia", media="print")
            assert (tab.texts(".controls"), tab.texts("nav")) == ([], [])
            assert tab.ask("document.documentElement.scrollWidth <= innerWidth"), "the sheet is wide enough"
            assert tab.call("Page.printToPDF")["data"].startswith("JVBERi0")
