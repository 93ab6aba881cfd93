"""The benchmark runner writes only to its own regions of the document and reports failed, missed and skipped
benchmarks."""

import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matplotlib.figure import Figure
from PIL import Image

from ratchet.runs.journal import JournalEvent

ROOT = Path(__file__).parents[1]
BEGUN = datetime(2026, 11, 2, 12, tzinfo=UTC)
GOOD = {"name": "x, ours / peer", "value": 1.5, "target": ">= 1.15", "ok": True, "spread": 0.1}
MISSED = {"name": "y", "value": 3.0, "target": "<= 2", "ok": False}
BUSY = {"name": "z", "value": 9.0, "target": ">= 2", "ok": False, "spread": 0.5}
QUIET = {
    "others_share": 0.02,
    "machine": {"processor": "Zen", "cpus": 2, "memory_bytes": 16e9, "system": "Linux"},
    "versions": {"torch": "2.13.0"},
}
CROWDED = QUIET | {"others_share": 0.37}
DOCUMENT = """# Ours
before
<!-- measured: one -->
old
<!-- end -->
between
<!-- measured: two -->
old
<!-- end -->
after
"""

Module = Callable[[str], ModuleType]


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Module:
    """Return a function that imports a file of benchmarks/. The directory is not a package."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return import_module


def outcome(module: Module, **changes: Any) -> Any:
    given = {
        "name": "one", "command": "python benchmarks/one.py --quick", "begun": BEGUN, "took_s": 95.4,
        "planned_s": 100.0, "rows": [GOOD], "surroundings": QUIET,
    }  # fmt: skip
    return module("regions").Outcome(**given | changes)


def test_a_region_is_filled_and_everything_else_stays(module: Module) -> None:
    filled = module("regions").filled(DOCUMENT, "two", "new\\1\n")
    assert filled == DOCUMENT.replace("between\n<!-- measured: two -->\nold", "between\n<!-- measured: two -->\nnew\\1")
    assert module("regions").filled(filled, "two", "old") == DOCUMENT


@pytest.mark.parametrize("text", [DOCUMENT, DOCUMENT.replace("two", "three") + DOCUMENT.replace("two", "three")])
def test_a_region_that_is_not_there_once_is_refused(module: Module, text: str) -> None:
    with pytest.raises(KeyError, match="measured: three"):
        module("regions").filled(text, "three", "new")


def test_a_table_has_every_row_or_only_what_is_missed(module: Module) -> None:
    written = module("regions").written
    text = written(outcome(module, rows=[GOOD, MISSED, BUSY]), "all")
    assert text.splitlines()[0] == "`python benchmarks/one.py --quick`, 2 November 2026, 95 s."
    assert "| x, ours / peer | 1.500 | ±5% | >= 1.15 | ok |" in text
    assert "| y | 3.000 |  | <= 2 | NOT OK |" in text
    assert "| z | 9.000 | ±25% | >= 2 | NOT OK: the machine is busy |" in text
    text = written(outcome(module, rows=[GOOD, MISSED]), "missed")
    assert "2 rows, 1 of them not ok." in text
    assert "| y |" in text
    assert "| x" not in text
    assert "|" not in written(outcome(module), "missed")
    assert "other processes took 37 % of the CPUs" in written(outcome(module, surroundings=CROWDED), "all")
    assert "other processes" not in written(outcome(module), "all")


def test_failures_and_what_was_skipped_are_in_table_and_summary(module: Module) -> None:
    regions = module("regions")
    failed = outcome(module, rows=(), surroundings={}, failure="exit code 1: KeyError: 'a|b'")
    skipped = outcome(module, name="two", skipped=["TRL is not installed"])
    assert "**Failed**: exit code 1: KeyError: 'ab'." in regions.written(failed, "all")
    assert "Skipped: TRL is not installed" in regions.written(skipped, "all")
    assert [one.ok for one in (skipped, failed, outcome(module, rows=[GOOD, MISSED]))] == [True, False, False]
    assert outcome(module, rows=(), skipped=["TRL is not installed"]).ok
    lines = regions.summary([failed, skipped, outcome(module, name="three", surroundings=CROWDED)], QUIET).splitlines()
    assert lines[0] == "2 November 2026; Zen, 2 CPUs, 16 GB; Linux; torch 2.13.0"
    assert lines[4:] == [
        "| one | 95 | 100 |  | 0 | failed: exit code 1: KeyError: 'ab' |",
        "| two | 95 | 100 | 2 % | 1 | skipped: TRL is not installed |",
        "| three | 95 | 100 | 37 % | 1 | busy machine |",
        "| **all** | 286 | | | | |",
    ]


@pytest.mark.parametrize(
    ("value", "target", "spread", "verdict"),
    [
        (1.0, 2.0, 0.1, "ok"),
        (1.0, 1.5, 0.4, "NOT OK: the machine is busy"),
        (1.0, 20.0, 0.4, "ok"),  # farther from the target than three spreads
        (3.0, 2.0, 0.1, "NOT OK"),
        (3.0, 2.0, 0.4, "NOT OK: the machine is busy"),
        (1.0, 2.0, None, "ok"),
    ],
)
def test_a_wide_spread_spoils_a_row_near_its_target(
    module: Module, value: float, target: float, spread: float | None, verdict: str
) -> None:
    rows, report = module("report_rows"), module("report")
    assert report.verdict(rows.at_most("s", value, target, spread)) == verdict
    assert report.verdict(rows.at_least("rows/s", target, value, spread)) == verdict


@pytest.mark.parametrize(
    ("name", "landed", "value", "target", "spread", "is_worse"),
    [
        ("ours / peer", 2.0, 1.89, ">= 1", None, True),
        ("ours / peer", 2.0, 1.91, ">= 1", None, False),
        ("ours / peer", 2.0, 2.5, ">= 1", None, False),
        ("peer / ours", 0.5, 0.53, "<= 1", None, True),
        ("peer / ours", 0.5, 0.52, "<= 1", None, False),
        ("ours / peer", 2.0, 1.79, ">= 1", 0.05, True),  # 5 % and half of the spread of either run
        ("ours / peer", 2.0, 1.85, ">= 1", 0.06, False),
        ("ours, seconds", 2.0, 9.0, "<= 10", None, False),
        ("ours / peer: seconds", 2.0, 9.0, "reported", None, False),
        ("ours / peer: loss, less 1", 1e-5, 1e-4, "<= 0.02", None, False),
    ],
)  # fmt: skip
def test_a_ratio_is_worse_beyond_five_percent_and_the_spreads(
    module: Module, name: str, landed: float, value: float, target: str, spread: float | None, is_worse: bool
) -> None:  # fmt: skip
    regions = module("regions")
    row = {"name": name, "value": landed, "target": target, "ok": True} | ({"spread": spread} if spread else {})
    page = regions.filled(DOCUMENT, "one", regions.written(outcome(module, rows=[row]), "all"))
    found = regions.regressions(page, outcome(module, rows=[row | {"value": value}]))
    assert [name in line for line in found] == [True] * is_worse
    assert not regions.regressions(page, outcome(module, name="two", rows=[row | {"value": value}]))


SCRIPTS = {
    "good": f"finish([{GOOD!r}], target)",
    "missed": f"finish([{GOOD!r}, {MISSED!r}], target)",
    "crashes": "1 / 0",
    "skips": "print('skipped: TRL is not installed') or finish([], target)",
}


@pytest.fixture
def bench(module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Create the runner in a project with four benchmarks and a document."""
    everything = module("everything")
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    for name, last in SCRIPTS.items():
        lines = ["import sys", f"sys.path.append({str(ROOT / 'benchmarks')!r})", "from pathlib import Path"]
        lines += ["from report import finish", "target = Path(sys.argv[sys.argv.index('--json') + 1])"]
        (folder / f"{name}.py").write_text("\n".join([*lines, f"sys.exit({last})"]), encoding="utf-8")
    places = "".join(f"<!-- measured: {name} -->\n<!-- end -->\n" for name in ("summary", *SCRIPTS))
    (tmp_path / "page.md").write_text(f"# Page\n{places}the end\n", encoding="utf-8")
    monkeypatch.setattr(everything, "ROOT", tmp_path)
    monkeypatch.setattr(everything, "BENCHMARKS", tuple(everything.Benchmark(name, 60) for name in SCRIPTS))
    return everything


def run(bench: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str]:
    """Run the benchmarks. Return the exit code and the resulting document."""
    page = bench.ROOT / "page.md"
    monkeypatch.setattr(sys, "argv", ["everything.py", "--document", str(page), *arguments])
    return bench.main(), page.read_text(encoding="utf-8")


def test_one_that_fails_does_not_keep_the_others(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, page = run(bench, monkeypatch, "--json", str(bench.ROOT / "kept"))
    assert code == 1
    assert "ZeroDivisionError" in page
    assert page.count("| x, ours / peer | 1.500 |") == 2
    assert "| y | 3.000 |  | <= 2 | NOT OK |" in page
    assert "Skipped: TRL is not installed" in page
    assert (page.startswith("# Page\n"), page.endswith("the end\n")) == (True, True)
    assert re.search(r"^missed: \d+ s of 60 planned; 1 not ok$", capsys.readouterr().out, re.MULTILINE)
    kept = json.loads((bench.ROOT / "kept" / "good.json").read_text(encoding="utf-8"))
    assert kept["rows"] == [GOOD]
    assert {"begun", "others_share", "machine", "versions"} <= set(kept["surroundings"])


def test_all_ok_ends_well_and_only_what_was_asked_for_is_run(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, page = run(bench, monkeypatch, "--only", "good", "skips")
    assert code == 0
    assert "<!-- measured: crashes -->\n<!-- end -->" in page
    assert "<!-- measured: summary -->\n<!-- end -->" in page


def test_a_ratio_worse_than_the_landed_one_is_named_and_fails_also_when_repeated(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = bench.ROOT / "page.md"
    region, row = "<!-- measured: good -->\n", "| x, ours / peer | 1.800 | ±5% | >= 1.15 | ok |\n"
    page.write_text(page.read_text(encoding="utf-8").replace(region, region + row), encoding="utf-8")
    git = ["git", "-C", str(bench.ROOT), "-c", "user.name=x", "-c", "user.email=x@example.org"]
    for words in (["init", "-q"], ["add", "page.md"], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    for _ in range(2):
        assert run(bench, monkeypatch, "--only", "good")[0] == 1
        assert "worse than landed: good: x, ours / peer: 1.500, landed 1.800: 17% worse" in capsys.readouterr().out


def test_one_that_takes_too_long_is_ended(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    (bench.ROOT / "benchmarks" / "good.py").write_text("import time\ntime.sleep(600)\n", encoding="utf-8")
    monkeypatch.setattr(bench, "PATIENCE", 0.01)
    code, page = run(bench, monkeypatch, "--only", "good")
    assert code == 1
    assert "**Failed**: ended after 0.01 times the planned time" in page


def test_a_document_without_a_place_is_refused_before_anything_is_measured(
    bench: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = bench.ROOT / "page.md"
    page.write_text(page.read_text().replace("measured: crashes", "measured: crash"), encoding="utf-8")
    before = page.read_text()
    assert run(bench, monkeypatch) == (2, before)
    assert "needed for crashes" in capsys.readouterr().err


def test_the_document_has_a_place_for_every_benchmark(module: Module) -> None:
    everything = module("everything")
    text = (ROOT / "docs" / "evidence_speed.md").read_text(encoding="utf-8")
    assert everything.missing_regions(text, everything.BENCHMARKS) == []
    assert sum(one.planned_s for one in everything.chosen((), full=False)) <= 60 * everything.MINUTES


def test_time_of_other_processes_is_busy_time_less_our_own(module: Module) -> None:
    reading = module("surroundings").Reading
    before = reading(at_s=100.0, busy_s=50.0, own_s=5.0, cpus=2)
    assert before.others(reading(at_s=110.0, busy_s=60.0, own_s=9.0, cpus=2)) == pytest.approx(6 / 20)
    assert before.others(reading(at_s=110.0, busy_s=54.0, own_s=10.0, cpus=2)) == 0.0
    assert before.others(before) == 0.0


def test_our_own_processes_are_not_others(module: Module) -> None:
    """CPU time of child processes counts as own time, both while they run and after the parent has waited for them."""
    reading = module("surroundings").Reading
    before = reading.now()
    code = "import time\nwhile time.process_time() < 0.5: pass\nprint('done', flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"done\n"
        living = reading.now()
        child.communicate(b"\n")
    assert living.own_s - before.own_s >= 0.4
    assert reading.now().own_s >= living.own_s - 0.1


def test_cost_of_an_interruption_on_the_simulated_clock(module: Module) -> None:
    """Repeated steps are counted as repeated. An interruption lasts until the first new step."""
    spot = module("spot_world")
    world = spot.World(project=None, folder=None, settings=None, step_s=3.0)

    def see(kind: str, clock_s: float, **data: Any) -> None:
        world.clock_s = clock_s
        world.update(JournalEvent(kind, 0.0, 1, data))

    see("worker_ready", 1.0, start_step=0)
    for step in range(1, 6):
        see("step", 1.0 + 3 * step, step=step)
    see("checkpoint_saved", 12.0, step=3)
    see("replicated", 15.0, step=3, artifact="checkpoint")
    world.costs.append(spot.Cost("gone", dealt_s=16.0))
    see("worker_ready", 90.0, start_step=3)
    for step in (4, 5, 6):
        see("step", 81.0 + 3 * step, step=step)
    assert (world.best, world.done_again, world.lags_s) == (6, 2, [3.0])
    assert (world.costs[0].lost_steps, world.costs[0].regained_s) == (2, 99.0)


def test_observers_are_held_in_every_other_block_of_steps(module: Module) -> None:
    turns = module("callbacks_cell").Turns(first=4, block=2, odd=True)
    assert [turns.held(step) for step in range(10)] == [False] * 4 + [True, True, False, False, True, True]
    other = module("callbacks_cell").Turns(first=4, block=2, odd=False)
    assert [other.held(step) for step in range(4, 10)] == [not turns.held(step) for step in range(4, 10)]


def test_cost_of_observing_is_found_whatever_the_processes_differ_by(module: Module) -> None:
    callbacks, cell = module("callbacks"), module("callbacks_cell")
    draw = random.Random(0)
    steps = range(callbacks.FIRST + 10 * callbacks.BLOCK)

    def training(odd: bool, pace: float, cost: float) -> Any:
        turns = cell.Turns(callbacks.FIRST, callbacks.BLOCK, odd)
        step_s = [pace * (1 if turns.held(step) else cost) * draw.gauss(0.3, 0.003) for step in steps]
        return cell.Training(step_s=step_s, whole_s=1.0, begun_s=1.0, supervisor_s=0.1, adapter="a", untold=[])

    for cost in (1.0, 1.03):
        for pace in (1.0, 1.2):
            pair = training(False, 1.0, cost), training(True, pace, cost)
            value, half = callbacks.compared([pair])
            assert value == pytest.approx(cost, abs=0.005), (cost, pace)
            assert half < 0.01
    loud = [one.step_s for one in pair]
    for step in range(callbacks.FIRST, len(steps), 3):
        loud[0][step] *= draw.uniform(0.5, 2.0)
    assert callbacks.compared([pair])[1] > half, "a loud machine is seen in the interval"


def test_a_page_of_a_terminal_keeps_colours_over_lines_and_letters_as_they_are(module: Module) -> None:
    lines = ["\x1b[32mgreen", "still\x1b[0m plain <b>&", "\x1b[2m\u2588\u2584\x1b[0m"]
    texts = [module("pictures_terminal").page(lines, ["ratchet", "watch", "a b"], dark) for dark in (False, True)]
    assert [text.count('style="color: #14692d') for text in texts] == [2, 0]
    assert [text.count('style="color: #78c882') for text in texts] == [0, 2]
    text = texts[0]
    assert " plain &lt;b&gt;&amp;" in text
    assert "\u2588\u2584" in text
    assert "$ ratchet watch &#x27;a b&#x27;" in text


def test_the_dashboard_is_drawn_from_answers_and_what_has_none_is_named(module: Module, tmp_path: Path) -> None:
    asked: list[str] = []

    def ask(expression: str) -> list[tuple[dict[str, str], list[tuple[float, float]]]]:
        asked.append(expression)
        if "gate" in expression:
            return []
        return [({"run": "abc", "state": "training", "le": "+Inf"}, [(10.0, 1.0), (11.0, float("nan")), (12.0, 3.0)])]

    corners = []
    for dark in (False, True):
        assert module("pictures_dashboard").draw(ask, tmp_path / "dashboard.png", dark) == ["Gate"]
        with Image.open(tmp_path / "dashboard.png") as picture:
            corners.append(picture.convert("L").getpixel((0, 0)))
    assert corners[0] > 200 and corners[1] < 50
    assert asked and not any("$" in expression for expression in asked)


def test_a_plot_has_colours_for_dark_pages(module: Module, tmp_path: Path) -> None:
    figure = Figure()
    figure.subplots().plot([1, 2], color="#0072B2")
    module("svg_colours").save(figure, tmp_path / "plot.svg")
    text = (tmp_path / "plot.svg").read_text(encoding="utf-8")
    light, dark = text.split("@media (prefers-color-scheme: dark)")
    assert "text{fill: #e3e6e9}" in dark and '[style*="stroke: #0072b2"]{stroke: #3f94d1 !important}' in dark
    assert 'style="' not in light and "stroke: #0072b2" in dark.partition("</style>")[2]
    with pytest.raises(ValueError, match="style sheet is not as expected"):
        module("svg_colours").with_dark_colours("<svg/>")


def test_pictures_say_which_programs_they_lack(
    module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures = module("pictures")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("RATCHET_CHROMIUM", raising=False)
    monkeypatch.setattr(sys, "argv", ["pictures.py", "--target", str(tmp_path / "target")])
    assert pictures.main() == 2
    assert "not here: tmux, prometheus, chromium (Debian: apt-get install" in capsys.readouterr().err
    assert not (tmp_path / "target").exists()


def test_a_picture_is_small_enough_for_a_repository(
    module: Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = module("pictures_pages")
    loud = Image.frombytes("RGB", (200, 200), random.Random(0).randbytes(3 * 200 * 200))
    monkeypatch.setattr(pages, "MOST_BYTES", 38_000)
    pages.smaller(loud, tmp_path / "loud.png")
    assert (tmp_path / "loud.png").stat().st_size <= 38_000
    monkeypatch.setattr(pages, "MOST_BYTES", 10_000)
    with pytest.raises(SystemExit, match="larger than 10,000 bytes even in 32 colours"):
        pages.smaller(loud, tmp_path / "large.png")
