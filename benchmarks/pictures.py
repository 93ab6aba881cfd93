"""Takes the screenshots of docs/pictures/ while a small project is trained, swept, evaluated and gated.

NAME.png is for light pages, and NAME-dark.png is the same for dark pages.

    make pictures
    python benchmarks/pictures.py [--target FOLDER] [--keep FOLDER]

Needs tmux, Chromium and Prometheus, about six minutes on two idle cores, and no network. All programs are real: tmux
shows the consoles, Chromium draws the pages and MLflow's UI, and pictures_dashboard.py draws the dashboard from the
answers of a Prometheus that scrapes the run every second. Exit code 2: a program is missing. `--keep` keeps the
project; if the project exists already, it is not trained again, and only pages, MLflow's UI and generations are drawn.
"""

import argparse
import json
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import IO

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
import pictures_dashboard
import pictures_generation
import pictures_pages
from pictures_pages import Browser, Tab
from pictures_project import FIRST, OTHERS, made, put, quiet, settings, short, varied
from pictures_terminal import Screen, screen
from PIL import Image
from small_project import linked

import prometheus_server
from chromium import browser, find
from ratchet.runs.directory import RunPaths
from ratchet.runs.journal import JournalReader
from ratchet.storage.layout import ProjectLayout

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "pictures"
PROGRAMS = {"tmux": "tmux", "prometheus": "prometheus"}
MOST_BYTES = 1_500_000
"""Limit for the bytes of all pictures together."""
KILLED_AT, SHOWN_AT, WATCHED_AT = 80, 190, 120
"""Steps: at KILLED_AT the first training's worker is killed; at SHOWN_AT its console is shown; at WATCHED_AT of all
other trainings, `ratchet watch` is shown."""
OVER = 3
"""Number of finished trials of the sweep when its board is shown."""
PATIENCE_S = 300.0
UI_SIZE = (1440, 800)
AUDIT_SIZE = (120, 110)
"""Columns and lines of the terminal in which the page of an audit is shown."""
ACTOR = "ada@example.org"
"""Who trains and promotes."""
SETTLE_S = 3.0
"""Seconds that a page of MLflow needs to draw everything."""
DISMISS = """[...document.querySelectorAll('button')].filter(one => one.textContent === 'Exit shared view')
    .forEach(one => [...one.parentElement.parentElement.querySelectorAll('button')].at(-1).click())"""
"""Close the note that the view is shared."""
SHOWN_METRICS = "train/"
DRAWN = """[...document.querySelectorAll('.js-plotly-plot')]
    .filter(one => one.data?.some(line => line.y?.length > 20)).length >= 3"""
"""At least three plots are curves. Plots with fewer points are bars of values that are logged once."""
WITHOUT_TOOLS = (
    "document.head.append(Object.assign(document.createElement('style'), {textContent: '.modebar {display: none}'}))"
)
VIEWS = ("Best first", "Seeds", "Sweeps")
ASSISTANT = {"mlflow.assistant.panelOpen_v1": "false", "mlflow.assistant.fab.autoOpenedOnFirstLoad_v1": "true"}
"""Keys of the browser's storage in which MLflow's UI keeps the state of its assistant, a panel that opens by itself and
would cover a third of the picture."""
DARK_THEME = "_mlflow_dark_mode_toggle_enabled"
"""Key of the browser's storage in which MLflow's UI keeps its theme."""


def main() -> int:
    """Take the pictures. The exit code is 2 if a program is missing, and 1 if the pictures are too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=Path, default=TARGET, metavar="FOLDER", help="default: docs/pictures")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="folder of the project, which is kept")
    options = parser.parse_args()
    chromium = find()
    lacking = [package for name, package in PROGRAMS.items() if shutil.which(name) is None]
    lacking += [] if chromium else ["chromium"]
    if chromium is None or lacking:
        print(f"not here: {', '.join(lacking)} (Debian: apt-get install {' '.join(lacking)})", file=sys.stderr)
        return 2
    options.target.mkdir(parents=True, exist_ok=True)
    os.environ["RATCHET_ACTOR"] = ACTOR
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pic-") as folder, ExitStack() as stack:
        scratch = Path(folder)
        drawn = stack.enter_context(browser(chromium, scratch / "browser"))
        studio = Studio(scratch, (options.keep or scratch / "support").resolve(), options.target.resolve(), drawn)
        if not studio.layout.params.exists():
            studio.train()
        studio.pages()
        studio.audit()
        studio.mlflow()
        pictures_generation.take(drawn, scratch, options.target.resolve())
    pictures = sorted(options.target.glob("*.png"))
    for picture in pictures:
        print(f"{picture.stat().st_size:>9,} bytes  {picture.name}")
    print(f"{time.monotonic() - began:.0f} s")
    if sum(picture.stat().st_size for picture in pictures) > MOST_BYTES:
        print(f"together more than {MOST_BYTES:,} bytes", file=sys.stderr)
        return 1
    return 0


class Studio:
    """Environment in which screenshots are taken."""

    def __init__(self, scratch: Path, project: Path, target: Path, drawn: Browser) -> None:
        self._scratch, self.layout, self._target, self._browser = scratch, ProjectLayout(project), target, drawn
        self._metrics = scratch / "metrics" / "ratchet.prom"
        self._metrics.parent.mkdir()
        self._port = prometheus_server.free_port()
        self._settings = settings(self._port, self._metrics, project.parent / f"{project.name}-replica")

    def train(self) -> None:
        """Run all trainings, and take the pictures of consoles and the dashboard."""
        say("project")
        made(self.layout.root, self._settings)
        put(self.layout, self._settings)
        with folder_served(self._metrics.parent) as files:
            targets = {"ratchet": [f"127.0.0.1:{self._port}"], "gate": [f"127.0.0.1:{files}/ratchet-gate.prom"]}
            with prometheus_server.serve(self._scratch / "prometheus", targets) as server:
                began = time.time()
                self._first()
                self._stages()
                server.wait("count_over_time(ratchet_gate_verdict[1m]) > 3", lambda: None)
                self._dashboard(server, began)
        self._others()
        self._sweep()
        put(self.layout, self._settings)

    def _first(self) -> None:
        """Run the first training in a terminal, and kill its worker once."""
        say("console")
        with self._screen("train") as terminal:
            steps = partial(steps_of, self.layout, put(self.layout, self._settings))
            terminal.until(lambda: steps() >= KILLED_AT, f"no step {KILLED_AT}")
            os.kill(workers(terminal.process)[-1], signal.SIGKILL)
            terminal.until(lambda: steps() >= SHOWN_AT, f"no step {SHOWN_AT}")
            self._terminal(terminal, "console")
            terminal.end()

    def _stages(self) -> None:
        say("export, evaluate, gate")
        for verb in ("export", "evaluate", "gate"):
            self._ratchet(verb)

    def _dashboard(self, server: prometheus_server.Server, began: float) -> None:
        say("dashboard")

        ended = time.time()

        def ask(expression: str) -> list[pictures_dashboard.Series]:
            found = server.ask("query_range", query=expression, start=began, end=ended, step=1)["result"]
            return [(one["metric"], [(float(at), float(value)) for at, value in one["values"]]) for one in found]

        drawn = self._scratch / "dashboard.png"
        for dark in (False, True):
            empty = pictures_dashboard.draw(ask, drawn, dark)
            with Image.open(drawn) as picture:
                target = pictures_pages.variant(self._target / "dashboard.png", dark)
                pictures_pages.smaller(picture.convert("RGB"), target)
        if empty:
            print(f"  panels without data: {', '.join(empty)}")

    def _others(self) -> None:
        """Run trainings with other seeds and ranks at the same time, and watch them from the first project."""
        say("watch")
        running, runs = [], []
        try:
            # a project trains one run at a time; the trainings share one runs directory
            for number, variant in enumerate(OTHERS):
                chosen = varied(self._settings, variant)
                project = linked(self.layout, self._scratch / f"beside-{number}", chosen)
                runs.append(put(project, chosen))
                running.append(self._start("train", project=project))
            self._watched(runs)
            for process in running:
                if process.wait(PATIENCE_S):
                    raise SystemExit(f"a training ended with exit code {process.returncode}")
        finally:
            for process in running:
                process.kill()
                process.wait()
        for variant in OTHERS:  # send these finished runs to this project's MLflow
            put(self.layout, varied(self._settings, variant))
            self._ratchet("train")
        put(self.layout, quiet(self._settings))
        self._ratchet("train")  # restores the result of the first training, which was evaluated

    def _watched(self, runs: Sequence[str]) -> None:
        wait_until(lambda: min(steps_of(self.layout, run) for run in runs) >= 1, "no training begins")
        with self._screen("watch", *(run[:6] for run in runs)) as terminal:
            terminal.until(lambda: min(steps_of(self.layout, run) for run in runs) >= WATCHED_AT, "too few steps")
            time.sleep(1.0)  # the screen is drawn twice a second
            self._terminal(terminal, "watch")

    def _sweep(self) -> None:
        say("sweep")
        put(self.layout, short(self._settings))
        with self._screen("sweep", "--workers", "2") as terminal:
            terminal.until(
                lambda: len(re.findall(r"(?m)^ *\d+ +(complete|pruned) ", terminal.text())) >= OVER, "too few trials"
            )
            self._terminal(terminal, "sweep")
            terminal.end()

    def pages(self) -> None:
        """Take screenshots of the comparison and of one run's report."""
        say("pages")
        first, other, *narrow = (put(self.layout, varied(self._settings, variant))[:6] for variant in (FIRST, *OTHERS))
        put(self.layout, quiet(self._settings))
        compared, reported = self._scratch / "compare.html", self._scratch / "report.html"
        self._ratchet("compare", f"rank16={first}+{other}", f"rank2={'+'.join(narrow)}", "--output", str(compared))
        self._ratchet("report", first, "--output", str(reported))
        for page, part, name in (
            (compared, "curves", "compare"), (reported, "curves", "report"),
            (reported, "evaluation", "report-evaluation"),
        ):  # fmt: skip
            pictures_pages.shoot(self._browser, page.as_uri(), part, self._target / f"{name}.png")

    def audit(self) -> None:
        """Take a screenshot of an audit of the promoted model."""
        say("audit")
        self._ratchet("promote")
        with screen(self._scratch, ["ratchet", "audit"], self.layout.root, AUDIT_SIZE) as terminal:
            terminal.end()
            self._terminal(terminal, "audit")

    def mlflow(self) -> None:
        """Take screenshots of MLflow's UI: the runs, the curves of one run, the sweep."""
        say("MLflow")
        port, log = prometheus_server.free_port(), self._scratch / "ui.log"
        with log.open("wb") as stream:
            process = self._start("ui", "--port", str(port), stdout=stream)
        try:
            for dark in (False, True):
                with Tab(self._browser, UI_SIZE, dark) as tab:
                    self._ui(tab, f"http://127.0.0.1:{port}", log, dark)
        finally:
            process.terminate()
            process.wait()

    def _ui(self, tab: Tab, address: str, log: Path, dark: bool) -> None:
        wait_until(lambda: answers(f"{address}/health"), "MLflow does not answer")
        views = dict(re.findall(r"^ +(\S.*?) {2,}(http\S+)$", log.read_text(encoding="utf-8"), re.MULTILINE))
        pictures_pages.opened(tab, f"{address}/health")  # the UI reads its keys once, when it is loaded
        tab.ask("localStorage.clear()")  # among others, the search of the tab before
        for key, value in (ASSISTANT | {DARK_THEME: json.dumps(dark)}).items():
            tab.ask(f"localStorage.setItem('{key}', '{value}')")
        for view in VIEWS:
            pictures_pages.opened(tab, views[view])
            pictures_pages.until(tab, "document.querySelectorAll('[role=row]').length > 3")
            time.sleep(SETTLE_S)
            tab.ask(DISMISS)
            time.sleep(SETTLE_S)
            name = f"mlflow-{view.lower().replace(' ', '-')}.png"
            pictures_pages.window(tab, pictures_pages.variant(self._target / name, dark))
        experiment = re.search(r"experiments/(\d+)", views[VIEWS[0]])
        run = self._run_of(put(self.layout, quiet(self._settings)))
        place = f"experiments/{experiment and experiment[1]}/runs/{run}/model-metrics?workflowType=machine_learning"
        pictures_pages.opened(tab, f"{address}/#/{place}")
        search = "input[placeholder='Search metric charts']"
        pictures_pages.until(tab, f'document.querySelector("{search}") !== null')
        tab.click(search)
        tab.write(SHOWN_METRICS)
        pictures_pages.until(tab, DRAWN)
        tab.ask(WITHOUT_TOOLS)
        time.sleep(SETTLE_S)
        pictures_pages.window(tab, pictures_pages.variant(self._target / "mlflow-run.png", dark))

    def _run_of(self, name: str) -> str:
        """Return MLflow's id of a run."""
        with sqlite3.connect(self.layout.mlflow_database) as store:
            found = store.execute("select run_uuid from runs where name like ?", (f"%{name}%",)).fetchone()
        if found is None:
            raise SystemExit(f"MLflow knows no run {name}")
        return str(found[0])

    def _screen(self, *words: str) -> AbstractContextManager[Screen]:
        return screen(self._scratch, ["ratchet", *words], self.layout.root)

    def _terminal(self, terminal: Screen, name: str) -> None:
        terminal.shoot(self._browser, self._scratch, self._target / f"{name}.png")

    def _ratchet(self, *words: str) -> None:
        done = subprocess.run(["ratchet", *words], cwd=self.layout.root, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"ratchet {' '.join(words)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")

    def _start(
        self, *words: str, stdout: int | IO[bytes] = subprocess.DEVNULL, project: ProjectLayout | None = None
    ) -> "subprocess.Popen[bytes]":
        """Start a command in the background. If it creates a run, the run is in the first project's runs directory."""
        environment = os.environ | {"RATCHET_RUNS": str(self.layout.runs)}
        place = (project or self.layout).root
        errors = None if stdout == subprocess.DEVNULL else subprocess.STDOUT
        return subprocess.Popen(["ratchet", *words], cwd=place, stdout=stdout, stderr=errors, env=environment)


def say(what: str) -> None:
    """Print a progress message."""
    print(f"{what} ...", flush=True)


def steps_of(layout: ProjectLayout, run: str) -> int:
    """Return the number of the last step in the journal of a run, or 0."""
    journal = RunPaths(layout.runs / run).journal
    if not journal.exists():
        return 0
    return max((event.data["step"] for event in JournalReader(journal).read() if event.kind == "step"), default=0)


def wait_until(there: Callable[[], bool], lacking: str) -> None:
    """Wait until a condition holds. Raises SystemExit after PATIENCE_S."""
    end_s = time.monotonic() + PATIENCE_S
    while not there():
        if time.monotonic() > end_s:
            raise SystemExit(lacking)
        time.sleep(0.2)


def workers(supervisor: int) -> list[int]:
    """Return the children of a process, sorted by process id, so that normally the newest is last."""
    text = "".join(path.read_text() for path in Path(f"/proc/{supervisor}/task").glob("*/children"))
    return sorted(map(int, text.split()))


def answers(address: str) -> bool:
    """Return whether a server answers."""
    try:
        with urllib.request.urlopen(address, timeout=5):  # noqa: S310 (a local address)
            return True
    except OSError:
        return False


@contextmanager
def folder_served(folder: Path) -> Iterator[int]:
    """Serve a folder over HTTP, like node_exporter's folder of text files, and return the port."""

    class Files(SimpleHTTPRequestHandler):
        extensions_map = {".prom": "text/plain; version=0.0.4"}  # noqa: RUF012

        def log_message(self, *about: object) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Files, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield int(server.server_address[1])
    finally:
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    raise SystemExit(main())
