"""Tests MLflow's UI in a real browser: saved views, columns, and curves in a frame."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chromium import WAIT_S, Browser, Tab
from journaled import attempt, opened, seal_result, stored
from mlflow_server import opened_ui
from ratchet.config.settings import Settings
from ratchet.runs.directory import RunDirectory
from ratchet.stages.callbacks import TrainingCallbacks
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout


def finished(layout: ProjectLayout) -> RunDirectory:
    run = opened(layout)
    attempt(run, 1, 1, 20)
    run.journal.append("finished", step=20, reason="completed", adapter_digest="a" * 64)
    seal_result(run.paths)
    run.close()
    run.paths.page.write_text("<!DOCTYPE html><title>a page</title>")
    return run


def until(tab: Tab, *wanted: str) -> str:
    """Wait until the page contains all these texts; return its text."""
    deadline_s = time.monotonic() + WAIT_S
    while not all(text in (shown := str(tab.ask("document.body?.innerText"))) for text in wanted):
        assert time.monotonic() < deadline_s, shown
        time.sleep(0.1)
    return shown


def await_axis(ask: Callable[[str], Any], title: str) -> None:
    """Wait until the chart in the frame is drawn with this title of its x-axis."""
    deadline_s = time.monotonic() + WAIT_S
    while title not in str(shown := ask("document.querySelector('[data-chart]')?.textContent")):
        assert time.monotonic() < deadline_s, shown
        time.sleep(0.1)


def frame(chrome: Browser) -> Any:
    """Return a function that evaluates an expression in the frame in which MLflow shows an HTML artifact."""
    deadline_s = time.monotonic() + WAIT_S
    while True:
        for one in chrome.call("Target.getTargets")["targetInfos"]:
            if one["type"] == "iframe" and one["url"].startswith("blob:"):
                session = chrome.call("Target.attachToTarget", targetId=one["targetId"], flatten=True)["sessionId"]

                def ask(expression: str, session: str = session) -> Any:
                    return chrome.call("Runtime.evaluate", session, expression=expression)["result"].get("value")

                if ask("document.readyState") == "complete":
                    return ask
        assert time.monotonic() < deadline_s, "no frame"
        time.sleep(0.1)


@pytest.mark.long
def test_our_views_and_columns_and_curves_that_answer_in_the_frame_that_mlflow_shows_them_in(
    chrome: Browser, tracked_project: ProjectLayout, tmp_path: Path
) -> None:
    run = finished(tracked_project)
    callbacks = TrainingCallbacks(Project.from_parts(tracked_project, Settings()), None, None)
    for _ in range(2):
        callbacks.publish(run.paths, run.paths.page)
    mlflow_id = stored(tracked_project, run).info.run_id
    plots = tracked_project.artifacts / mlflow_id / "artifacts" / "plots"
    assert sorted(path.name for path in plots.iterdir()) == ["curves.html", "loss.html"]
    with opened_ui(tracked_project, tmp_path / "log") as ui, Tab(chrome, (1800, 900)) as tab:
        [address] = [line.split()[-1] for line in ui.said.splitlines() if line.strip().startswith("Runs ")]
        assert address.startswith(ui.url)
        tab.call("Page.navigate", url=address)
        shown = until(tab, "train.learning_rate", "train.rank", "train.epochs", "validation/loss", run.spec.run_id)
        assert "You're viewing a shared view" in shown
        assert "Trainings of Ratchet" in shown
        assert "Error loading shared view" not in shown

        tab.call("Page.navigate", url=f"{ui.url}/#/experiments/1/runs/{mlflow_id}/artifacts/plots/curves.html")
        until(tab, "curves.html")
        ask = frame(chrome)
        await_axis(ask, "optimizer steps")
        ask(
            "(() => { const x = document.querySelector('[data-by=axis]'); x.value = 'seconds';"
            " x.dispatchEvent(new Event('input', {bubbles: true})); })()"
        )
        await_axis(ask, "training time")
