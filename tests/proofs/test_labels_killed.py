"""Proves that no judgement of a person is lost: 50 judgements in a browser, while the server is killed repeatedly."""

import signal
from typing import Any

from chromium import Tab
from label_cases import LabelProcess, lines, write_answers
from ports import free_port
from ratchet.stages.label import label_results
from ratchet.stages.project import Project
from ratchet.storage.layout import ProjectLayout

PACKAGES = ("stages", "reports", "quality_gate")
COUNT = 50
KILLS_BEFORE, KILLS_DURING = {7, 23, 24}, {12, 30, 41}
"""Numbers of judgements before which the server is killed, and of those whose request may still be in progress then."""


def test_fifty_judgements_outlive_the_server(project: ProjectLayout, chrome: Any) -> None:
    write_answers(project, COUNT + 2, equal=2)
    options = ("a.jsonl", "b.jsonl", "--port", str(free_port()), "--rater", "ann")
    server = LabelProcess(project, *options)
    shown = []
    try:
        with Tab(chrome, (360, 640)) as tab:
            tab.open(server.address)
            for number in range(COUNT):
                tab.wait_for(f"document.getElementById('label').dataset.done === '{number}'")
                shown.append(tab.texts("#answers p"))
                key = "12ts"[number % 4]
                if number in KILLS_BEFORE:  # the key is pressed while there is no server; the page sends it again
                    server.stop(signal.SIGKILL)
                    tab.press(key)
                    tab.wait_for("!document.getElementById('error').hidden")
                    server = LabelProcess(project, *options)
                else:
                    tab.press(key)
                    if number in KILLS_DURING:
                        server.stop(signal.SIGKILL)
                        server = LabelProcess(project, *options)
            tab.wait_for(f"document.getElementById('label').dataset.done === '{COUNT}'")
            assert tab.texts("#end") == ["All prompts are judged. Thank you."]
        server.stop(signal.SIGKILL)
    finally:
        server.process.kill()
        server.process.communicate()
    found = lines(project)
    choices = {"1": "first", "2": "second", "t": "tie", "s": "skip"}
    assert [line["choice"] for line in found] == [choices["12ts"[number % 4]] for number in range(COUNT)]
    assert len({line["sample"] for line in found}) == COUNT
    assert all(line["event"] == "judgement" and line["rater"] == "ann" for line in found)
    report = label_results(Project(project.root), (str(project.root / "a.jsonl"), str(project.root / "b.jsonl")))
    assert (report.judged, report.skipped, report.samples, report.identical_answers) == (38, 12, 50, 2)
    wins = sum(
        0.5 if line["choice"] == "tie" else float(f"of {name}:" in texts[0 if line["choice"] == "first" else 1])
        for line, texts, name in zip(found, shown, "a" * COUNT, strict=True)
        if line["choice"] != "skip"
    )
    assert report.win_rate is not None and report.win_rate.value == wins / 38
