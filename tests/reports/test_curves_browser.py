"""Tests the pages of trainings in a real browser: controls and texts, with and without JavaScript."""

from pathlib import Path

import pytest

import trained_runs
from chromium import Browser, Tab
from ratchet.config.settings import Settings
from ratchet.reports import run_page
from ratchet.stages.compare import compare
from ratchet.stages.project import Project
from ratchet.stages.report import report
from ratchet.storage.html import document, table, tag
from ratchet.storage.layout import ProjectLayout
from trained_runs import STEP_S, TRAINED_TOKENS, VALIDATION_S, Training

FIRST = Training(restarts=((37, 30),), spike=(25, 9.0))
WIDE = trained_runs.seeds(Training(rank=16, floor=0.8, seed=3), 3)
AT_ONCE = Training(restarts=((40, 40),), seed=9)
"""Died just after a checkpoint, so it went on where it had been."""
LOSS = "[data-chart=loss]"


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    layout = ProjectLayout(tmp_path_factory.mktemp("project"))
    for one in (FIRST, AT_ONCE, *WIDE):
        trained_runs.lay(layout, one)
    names = (f"first={FIRST.spec.run_id}", "wide=" + "+".join(one.spec.run_id for one in WIDE))
    found = {"compare": layout.root / "compare.html", "report": layout.root / "report.html"}
    compare(Project.from_parts(layout, Settings()), names, found["compare"])
    report(Project.from_parts(layout, Settings()), FIRST.spec.run_id, found["report"])
    report(Project.from_parts(layout, Settings()), AT_ONCE.spec.run_id, layout.root / "at_once.html")
    return found


def curves(tab: Tab) -> list[str]:
    """Return the lines of the first picture."""
    found: list[str] = tab.ask(f"[...document.querySelectorAll('{LOSS} polyline')].map(x => x.getAttribute('points'))")
    return found


def heights(points: str) -> list[float]:
    return [float(point.split(",")[1]) for point in points.split()]


def texts(tab: Tab) -> list[str]:
    found: list[str] = tab.ask(f"[...document.querySelectorAll('{LOSS} text')].map(x => x.textContent)")
    return found


def marks(tab: Tab) -> list[str]:
    """Return the texts of the marks on the axis of the first picture."""
    found: list[str] = tab.ask(f"[...document.querySelectorAll('{LOSS} .mark')].map(x => x.textContent)")
    return found


@pytest.mark.parametrize("page", ["compare", "report"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [(1200, 900), (400, 800)], ids=["desk", "phone"])
def test_page_opens_without_complaint_request_or_scroll_bar(
    chrome: Browser, pages: dict[str, Path], page: str, size: tuple[int, int], dark: bool
) -> None:
    with Tab(chrome, size, dark) as tab:
        tab.assert_opens(pages[page], dark)
        assert len(tab.texts(".curves figcaption")) == 5
        # The picture is as wide as its column, so letters keep their size.
        assert tab.ask(f"document.querySelector('{LOSS} svg').getBoundingClientRect().width") > 0.8 * size[0] - 200
        assert tab.ask(f"document.querySelector('{LOSS} text').getBoundingClientRect().height") >= 11
        ground = tab.ask("getComputedStyle(document.body).backgroundColor")
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


def test_curves_by_tokens_and_by_time_keep_their_heights_and_marks(chrome: Browser, pages: dict[str, Path]) -> None:
    titles = f"[...document.querySelectorAll('{LOSS} .mark title')].map(x => x.textContent)"
    with Tab(chrome) as tab:
        tab.open(pages["compare"])
        assert "60" in texts(tab)
        by_step, words, signs = curves(tab), tab.ask(titles), marks(tab)
        assert signs and all(one.startswith("first: ") for one in words), "the group had none"
        tab.choose("axis", "tokens")
        assert any(text.replace(",", "") in ("5000", "6000") for text in texts(tab)), 60 * TRAINED_TOKENS
        assert (tab.ask(titles), marks(tab)) == (words, signs)
        tab.choose("axis", "seconds")
        assert 60 * STEP_S + 6 * VALIDATION_S == 42
        assert "40 s" in texts(tab)
        assert (tab.ask(titles), marks(tab)) == (words, signs)
        assert [heights(one) for one in curves(tab)] == [heights(one) for one in by_step]
        assert curves(tab) != by_step, "validations take time, so places differ"
        tab.click("[data-side='0']")
        assert marks(tab) == [], "they go with their curve"


def test_smoothing_lowers_a_spike_moves_the_band_and_can_be_undone(chrome: Browser, pages: dict[str, Path]) -> None:
    band = f"document.querySelector('{LOSS} polygon').getAttribute('points')"
    validated = "document.querySelector('[data-chart=validation] polyline').getAttribute('points')"
    with Tab(chrome) as tab:
        tab.open(pages["compare"])
        before, whole, kept = curves(tab), tab.ask(band), tab.ask(validated)
        tab.choose("smooth", "90")
        assert min(heights(curves(tab)[0])) > min(heights(before[0])) + 50  # lower in the picture: y grows downwards
        assert tab.ask(validated) == kept, "validations are points, and stay"
        tab.choose("smooth", "80")
        line, outline = heights(curves(tab)[1]), heights(tab.ask(band))
        assert tab.ask(band) != whole
        assert len(outline) == 2 * len(line)
        for middle, top, bottom in zip(line, outline, reversed(outline), strict=False):
            assert top <= middle <= bottom, "the mean is within its band"
        tab.choose("smooth", "0")
        assert (curves(tab), tab.ask(band), tab.ask(validated)) == (before, whole, kept)


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


@pytest.mark.parametrize(
    "moves",
    [
        [(["ArrowDown"], 60), (["ArrowDown"] * 2, 40)],
        [(["ArrowRight"], 1), (["ArrowRight"] * 2, 3), (["ArrowLeft"] * 5, 1), (["ArrowUp"] * 7, 60)],
        [(["ArrowUp"], 1), (["ArrowUp"] * 7, 60), (["ArrowLeft"], 59)],
    ],
    ids=["down", "right", "up"],
)
def test_values_are_read_by_keyboard(
    chrome: Browser, pages: dict[str, Path], moves: list[tuple[list[str], int]]
) -> None:
    with Tab(chrome) as tab:
        tab.open(pages["compare"])
        tab.reach(f"document.activeElement.matches('{LOSS} svg')")
        assert tab.ask("getComputedStyle(document.activeElement).outlineStyle") == "solid"
        tab.ask("window.scrolls = 0; addEventListener('keydown', x => { window.scrolls += !x.defaultPrevented; })")
        for keys, step in moves:
            for key in keys:
                tab.press(key)
            assert tab.texts(".readout")[0].startswith(f"step {step}: first {FIRST.loss(step):.4g}"), keys
        assert tab.ask("window.scrolls") == 0, "arrows read, and do not scroll"
        assert tab.ask("document.querySelector('.readout').role") == "status", "it is read aloud"


def test_everything_can_be_chosen_by_keyboard(chrome: Browser, pages: dict[str, Path]) -> None:
    with Tab(chrome) as tab:
        tab.open(pages["compare"])
        before = curves(tab)
        tab.reach("document.activeElement.dataset.by === 'axis'")
        tab.press("ArrowDown")
        assert tab.ask("document.querySelector('[data-by=axis]').value") == "tokens"
        assert tab.ask(f"document.querySelector('{LOSS} svg').ariaLabel").startswith("Training loss by answer tokens")
        tab.press("ArrowUp")
        assert curves(tab) == before
        tab.press("Tab")
        assert tab.ask("document.activeElement.dataset.by") == "smooth"
        tab.press("End")
        assert tab.ask("document.activeElement.value") == "95"
        smooth = curves(tab)
        assert [len(heights(one)) for one in smooth] == [len(heights(one)) for one in before]
        assert smooth != before
        tab.press("Home")
        assert curves(tab) == before
        tab.press("Tab")
        tab.press(" ")
        assert curves(tab) == before[1:]
        tab.press("Enter")
        assert curves(tab) == before
        assert tab.ask("document.activeElement.dataset.side") == "0", "the focus stays where the reader is"


@pytest.mark.parametrize("script", [True, False], ids=["script", "plain"])
def test_signs_at_the_same_place_do_not_hide_each_other(chrome: Browser, pages: dict[str, Path], script: bool) -> None:
    with Tab(chrome, script=script) as tab:
        tab.open(pages["report"].with_name("at_once.html"))
        drawn = f"[...document.querySelectorAll('{LOSS} .mark')].map(x => x.getBoundingClientRect())"
        died, resumed = tab.ask(f"{drawn}.map(b => [b.x, b.y, b.height])")
        assert abs(died[0] - resumed[0]) < 5, "at the same step"
        assert died[1] - resumed[1] >= 10, "one above the other"


def test_a_reader_who_changes_to_dark_sees_other_colours_at_once(chrome: Browser, pages: dict[str, Path]) -> None:
    seen = f"""[getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector('{LOSS} polyline')).stroke,
        getComputedStyle(document.querySelector('.kinds button')).color]"""
    with Tab(chrome) as tab:
        tab.open(pages["compare"])
        light = tab.ask(seen)
        tab.choose("smooth", "50")
        drawn = curves(tab)
        tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        assert all(one != other for one, other in zip(light, tab.ask(seen), strict=True))
        assert curves(tab) == drawn, "what was chosen stays"


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


@pytest.mark.parametrize(("page", "named"), [("compare", 2), ("report", 0)])
def test_page_prints_dark_on_light(chrome: Browser, pages: dict[str, Path], page: str, named: int) -> None:
    with Tab(chrome, (794, 1123), dark=True) as tab:
        tab.open(pages[page])
        tab.choose("axis", "tokens")
        tab.assert_prints()
        tab.call(
            "Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}]
        )
        for what, holds in (("backgroundColor", "x > 250"), ("color", "x < 80")):
            code = f"getComputedStyle(document.body).{what}.match(/\\d+/g).every(x => {holds})"
            assert tab.ask(code), what
        assert len(tab.texts(".legend bdi")) == named, "colours of several have their names on paper too"
        assert len(tab.texts(".curves figcaption")) == 5


@pytest.mark.parametrize("width", [1280, 700, 400])
def test_a_metrics_name_stands_in_one_line_and_what_is_longer_than_its_room_is_broken(
    chrome: Browser, tmp_path: Path, width: int
) -> None:
    rows = [
        (tag("bdi", name), *["a figure and its bounds"] * 6) for name in ("accuracy", "answer_perplexity", "x" * 200)
    ]
    drawn = table("metrics", "tnnnnnn", ("metric", *"abcdef"), rows)
    path = tmp_path / "page.html"
    path.write_text(document("names", run_page.PAGE_STYLE.read_text(encoding="utf-8"), drawn), encoding="utf-8")
    with Tab(chrome, (width, 900)) as tab:
        tab.open(path)
        one, name, long = tab.ask("[...document.querySelectorAll('bdi')].map(x => x.getBoundingClientRect().height)")
        assert one == name < long
        assert tab.ask("document.querySelector('tbody th').getBoundingClientRect().width") <= 19 * 16
        assert tab.ask("document.documentElement.scrollWidth <= innerWidth")
