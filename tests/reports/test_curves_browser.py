"""Tests the pages of trainings in a real browser: controls and texts, with and without JavaScript."""

import time
from pathlib import Path
from typing import Any

import pytest

import trained_runs
from chromium import Browser, Tab
from ratchet.config.settings import Settings
from ratchet.reports import pages as page_templates
from ratchet.stages.compare import compare
from ratchet.stages.project import Project
from ratchet.stages.report import report
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


def wait_for(tab: Tab, condition: str) -> None:
    end = time.monotonic() + 10
    while not tab.ask(condition):
        assert time.monotonic() < end, tab.texts(".readout")
        time.sleep(0.02)


def opened(tab: Tab, page: Path) -> None:
    tab.open(page)
    tab.wait_for_charts()


def traces(tab: Tab, condition: str, chart: str = LOSS) -> list[dict[str, Any]]:
    """Return the visible traces of a chart for which a condition of JavaScript holds."""
    found: list[dict[str, Any]] = tab.ask(
        f"document.querySelector('{chart}')._fullData.filter(t => t.visible && t.meta && ({condition}))"
        ".map(t => ({name: t.name, x: [...t.x], y: [...t.y], text: t.text, about: t.hovertext, dash: t.line?.dash}))"
    )
    return found


def curves(tab: Tab, chart: str = LOSS) -> list[list[float]]:
    """Return the values of the lines of a chart, by default of the first."""
    return [one["y"] for one in traces(tab, "t.meta.named", chart)]


def places(tab: Tab) -> list[list[float]]:
    return [one["x"] for one in traces(tab, "t.meta.named")]


def band(tab: Tab) -> list[list[float]]:
    """Return the lower and the upper bound of the only band of the first chart."""
    return [one["y"] for one in traces(tab, "t.meta.smooth && !t.meta.named")]


def marks(tab: Tab) -> list[str]:
    """Return the symbols on the axis of the first chart, as drawn."""
    found: list[str] = tab.ask(f"[...document.querySelectorAll('{LOSS} .textpoint text')].map(x => x.textContent)")
    return found


def axis_title(tab: Tab) -> str:
    found: str = tab.ask(f"document.querySelector('{LOSS} .xtitle').textContent")
    return found


@pytest.mark.parametrize("page", ["compare", "report"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", [(1200, 900), (400, 800)], ids=["desk", "phone"])
def test_page_opens_without_complaint_request_or_scroll_bar(
    chrome: Browser, pages: dict[str, Path], page: str, size: tuple[int, int], dark: bool
) -> None:
    with Tab(chrome, size, dark) as tab:
        tab.assert_opens(pages[page], dark)
        tab.wait_for_charts()
        assert len(tab.texts(".chart figcaption")) == 5
        # The chart is as wide as its column, so letters keep their size.
        assert (
            tab.ask(f"document.querySelector('{LOSS} .main-svg').getBoundingClientRect().width") > 0.8 * size[0] - 200
        )
        assert tab.ask(f"document.querySelector('{LOSS} .xtick text').getBoundingClientRect().height") >= 11
        ground = tab.ask("getComputedStyle(document.body).backgroundColor")
        drawn = tab.ask(f"getComputedStyle(document.querySelector('{LOSS} .js-line')).stroke")
        assert drawn not in ("none", ground)
        assert tab.ask("document.documentElement.scrollWidth <= innerWidth")
        assert tab.complaints() == []


def test_curves_are_those_of_the_runs(chrome: Browser, pages: dict[str, Path]) -> None:
    with Tab(chrome) as tab:
        opened(tab, pages["compare"])
        first, wide = curves(tab)
        assert first == pytest.approx([FIRST.loss(step) for step in range(1, 61)], rel=1e-5)
        mean = [sum(one.loss(step) for one in WIDE) / len(WIDE) for step in range(1, 61)]
        assert wide == pytest.approx(mean, rel=1e-5)
        assert len(band(tab)) == 2, "the group has a band, the single training none"
        assert [one["dash"] for one in traces(tab, "t.meta.named")] == ["solid", "dash"]
        assert len(tab.texts(".controls")) == 1


def test_without_javascript_the_numbers_are_there(chrome: Browser, pages: dict[str, Path]) -> None:
    with Tab(chrome, script=False) as tab:
        tab.open(pages["compare"])
        assert tab.texts(".controls") == []
        assert len(tab.texts(".legend bdi")) == 2
        assert set(tab.texts(".chart noscript")) == {"This chart needs JavaScript; the tables have its numbers."}
        tab.click(".chart summary")
        rows = tab.texts(".chart details[open] tbody tr")
        assert [row.split()[0] for row in rows][-1] == "60"


def test_curves_by_tokens_and_by_time_keep_their_heights_and_marks(chrome: Browser, pages: dict[str, Path]) -> None:
    with Tab(chrome) as tab:
        opened(tab, pages["compare"])
        assert places(tab)[0] == [float(step) for step in range(1, 61)]
        heights, signs = curves(tab), marks(tab)
        [about] = [one["about"] for one in traces(tab, "t.meta.on === 'marks'")]
        assert signs and all(one.startswith("first: ") for one in about), "the group had none"
        tab.choose("axis", "tokens")
        assert places(tab)[0][-1] == 60 * TRAINED_TOKENS
        assert (axis_title(tab), marks(tab)) == ("answer tokens", signs)
        tab.choose("axis", "seconds")
        assert places(tab)[0][-1] == 60 * STEP_S + 5 * VALIDATION_S
        assert (axis_title(tab), marks(tab)) == ("training time (s)", signs)
        assert curves(tab) == heights
        tab.click("[data-side='0']")
        assert marks(tab) == [], "they go with their curve"


def test_smoothing_lowers_a_spike_moves_the_band_and_can_be_undone(chrome: Browser, pages: dict[str, Path]) -> None:
    validation = "[data-chart=validation]"
    with Tab(chrome) as tab:
        opened(tab, pages["compare"])
        before, whole, kept = curves(tab), band(tab), curves(tab, validation)
        tab.choose("smooth", "90")
        assert max(curves(tab)[0]) < max(before[0]) - 2
        assert curves(tab, validation) == kept, "validations are points, and stay"
        tab.choose("smooth", "80")
        low, high = band(tab)
        assert [low, high] != whole
        for bottom, middle, top in zip(low, curves(tab)[1], high, strict=True):
            assert bottom <= middle <= top, "the mean is within its band"
        tab.choose("smooth", "0")
        assert (curves(tab), band(tab), curves(tab, validation)) == (before, whole, kept)


def test_a_curve_can_be_hidden_and_shown(chrome: Browser, pages: dict[str, Path]) -> None:
    with Tab(chrome) as tab:
        opened(tab, pages["compare"])
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
        opened(tab, pages["compare"])
        tab.reach(f"document.activeElement.matches('{LOSS}')")
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
        opened(tab, pages["compare"])
        before = curves(tab)
        tab.reach("document.activeElement.dataset.by === 'axis'")
        tab.press("ArrowDown")
        assert tab.ask("document.querySelector('[data-by=axis]').value") == "tokens"
        assert axis_title(tab) == "answer tokens"
        tab.press("ArrowUp")
        assert curves(tab) == before
        tab.press("Tab")
        assert tab.ask("document.activeElement.dataset.by") == "smooth"
        tab.press("End")
        assert tab.ask("document.activeElement.value") == "95"
        smooth = curves(tab)
        assert [len(one) for one in smooth] == [len(one) for one in before]
        assert smooth != before
        tab.press("Home")
        assert curves(tab) == before
        tab.press("Tab")
        tab.press(" ")
        assert curves(tab) == before[1:]
        tab.press("Enter")
        assert curves(tab) == before
        assert tab.ask("document.activeElement.dataset.side") == "0", "the focus stays where the reader is"


def test_signs_at_the_same_place_do_not_hide_each_other(chrome: Browser, pages: dict[str, Path]) -> None:
    with Tab(chrome) as tab:
        opened(tab, pages["report"].with_name("at_once.html"))
        drawn = f"[...document.querySelectorAll('{LOSS} .textpoint text')].map(x => x.getBoundingClientRect())"
        died, resumed = tab.ask(f"{drawn}.map(b => [b.x, b.y, b.height])")
        assert abs(died[0] - resumed[0]) < 5, "at the same step"
        assert died[1] - resumed[1] >= 10, "one above the other"


def test_a_reader_who_changes_to_dark_sees_other_colours_at_once(chrome: Browser, pages: dict[str, Path]) -> None:
    seen = f"""[getComputedStyle(document.body).backgroundColor,
        getComputedStyle(document.querySelector('{LOSS} .js-line')).stroke,
        getComputedStyle(document.querySelector('.kinds button')).color]"""
    with Tab(chrome) as tab:
        opened(tab, pages["compare"])
        light = tab.ask(seen)
        tab.choose("smooth", "50")
        drawn = curves(tab)
        tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
        wait_for(tab, f"getComputedStyle(document.querySelector('{LOSS} .js-line')).stroke !== '{light[1]}'")
        dark = tab.ask(seen)
        assert all(one != other for one, other in zip(light, dark, strict=True))
        assert curves(tab) == drawn, "what was chosen stays"


def test_values_are_read_by_pointer(chrome: Browser, pages: dict[str, Path]) -> None:
    with Tab(chrome) as tab:
        opened(tab, pages["compare"])
        tab.click(LOSS)
        x, y = tab.ask(
            f"(() => {{ const p = document.querySelector('{LOSS}'), b = p.getBoundingClientRect(), l = p._fullLayout;"
            " return [b.x + l._size.l + l.xaxis.d2p(25), b.y + l._size.t + 60]; })()"
        )
        for shift in (-1, 0):  # Plotly reads a pointer that moves
            tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x + shift, y=y)
        wait_for(tab, "document.querySelector('.readout').textContent.startsWith('step 25: first 9 ')")


def test_numbers_open_by_keyboard_without_javascript(chrome: Browser, pages: dict[str, Path]) -> None:
    with Tab(chrome, script=False) as tab:
        tab.open(pages["report"])
        shown = "[...document.querySelectorAll('.chart table')].filter(x => x.checkVisibility()).length"
        assert tab.ask(shown) == 0
        tab.click(".chart summary")
        assert tab.ask(shown) == 1
        assert len(tab.texts(".chart figcaption")) == 5


@pytest.mark.parametrize(("page", "named"), [("compare", 2), ("report", 0)])
def test_page_prints_dark_on_light(chrome: Browser, pages: dict[str, Path], page: str, named: int) -> None:
    with Tab(chrome, (794, 1123), dark=True) as tab:
        opened(tab, pages[page])
        tab.choose("axis", "tokens")
        tab.assert_prints()
        assert max(tab.ask("[...document.querySelectorAll('.main-svg')].map(x => x.clientWidth)")) <= 700
        tab.call(
            "Emulation.setEmulatedMedia", media="print", features=[{"name": "prefers-color-scheme", "value": "dark"}]
        )
        for what, holds in (("backgroundColor", "x > 250"), ("color", "x < 80")):
            code = f"getComputedStyle(document.body).{what}.match(/\\d+/g).every(x => {holds})"
            assert tab.ask(code), what
        assert len(tab.texts(".legend bdi")) == named, "colours of several have their names on paper too"
        assert len(tab.texts(".chart figcaption")) == 5


@pytest.mark.parametrize("width", [1280, 700, 400])
def test_a_metrics_name_stands_in_one_line_and_what_is_longer_than_its_room_is_broken(
    chrome: Browser, tmp_path: Path, width: int
) -> None:
    macros, style = page_templates.macros(), (page_templates.TEMPLATES / "style.css").read_text(encoding="utf-8")
    rows = [
        (macros.bdi(name), *["a figure and its bounds"] * 6) for name in ("accuracy", "answer_perplexity", "x" * 200)
    ]
    drawn = macros.table("metrics", "tnnnnnn", ("metric", *"abcdef"), rows)
    path = tmp_path / "page.html"
    path.write_text(f"<!DOCTYPE html><meta charset='utf-8'><style>{style}</style>{drawn}", encoding="utf-8")
    with Tab(chrome, (width, 900)) as tab:
        tab.open(path)
        one, name, long = tab.ask("[...document.querySelectorAll('bdi')].map(x => x.getBoundingClientRect().height)")
        assert one == name < long
        assert tab.ask("document.querySelector('tbody th').getBoundingClientRect().width") <= 19 * 16
        assert tab.ask("document.documentElement.scrollWidth <= innerWidth")
