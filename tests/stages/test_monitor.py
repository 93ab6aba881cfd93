"""Tests `ratchet monitor`: logs are read exactly once, changes raise an alarm, and an alarm notifies or rolls back."""

import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from monitor_cases import MODEL, REFUSAL, START_S, monitored_project, requests, write_evaluation, write_log
from promoted_models import make_champion, promote_fake_model
from promotion_project import SETTINGS as PROMOTION_SETTINGS
from promotion_project import accept_model, count_in_child, read_ledger, write_outputs
from ratchet.cli.main import main
from ratchet.cli.monitor import format_monitor
from ratchet.config.monitor import Monitor
from ratchet.config.settings import Settings
from ratchet.errors import ChampionError, DamagedFileError, DataError, LockHeldError, SettingsError
from ratchet.stages import monitor as stage
from ratchet.stages.deploy import DeployOptions, deploy
from ratchet.stages.monitor import ANSWER_TESTS, LEARNED_REQUESTS, MonitorOptions, monitor, reset_alarms
from ratchet.stages.project import Project
from ratchet.stages.promote import PromoteOptions, promote
from ratchet.storage import files
from ratchet.storage.files import FileLock
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.gate import read_champion
from ratchet.storage.records.monitor import MonitorReport, MonitorState
from receiver import served


@pytest.fixture
def monitored(project: ProjectLayout) -> Project:
    return monitored_project(project)


def state(project: Project, version: int = 1) -> MonitorState:
    return MonitorState.load(project.layout.monitor / str(version) / "state.json")


def result(report: MonitorReport, test: str) -> Any:
    return next(one for one in report.tests if one.test == test)


def test_answers_as_in_the_evaluation_raise_no_alarm(monitored: Project, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", requests(2, 600))
    report = monitor(monitored, [log])
    assert (report.version, report.role, report.requests, report.new_requests, report.alarms) == (
        1, "merged", 600, 600, ()
    )  # fmt: skip
    assert {one.test: one.observed for one in report.tests} == dict.fromkeys(stage.TESTS, 600)
    scores = result(report, "scores")
    assert (scores.reference_rows, scores.threshold) == (300, 500_000)
    assert scores.value == pytest.approx(0.9, abs=0.03)
    assert scores.reference == pytest.approx(0.9, abs=0.05)
    again = monitor(monitored, [log])
    assert (again.requests, again.new_requests, again.notes) == (600, 0, ())
    assert again.tests == report.tests
    changed = Settings(monitor=Monitor(requests_per_false_alarm=500))
    [note] = monitor(Project.from_parts(monitored.layout, changed), [log]).notes
    assert "requests_per_false_alarm is 500 now, but some tests began with another value" in note


@pytest.mark.parametrize(
    ("changes", "test"),
    [
        ({"about": "cooking"}, "inputs"),
        ({"longer": 2.0}, "answer length"),
        ({"refused": 0.4}, "refusals"),
        ({"right": 0.5}, "scores"),
    ],
)
def test_a_change_raises_the_alarm_of_its_test(
    monitored: Project, tmp_path: Path, changes: dict[str, Any], test: str
) -> None:
    log = write_log(tmp_path / "log.jsonl", requests(2, 300))
    assert monitor(monitored, [log]).alarms == ()
    write_log(log, requests(3, 300, **changes), "a")
    alarms = {alarm.test: alarm for alarm in monitor(monitored, [log]).alarms}
    also = {"inputs": {"prompt length"}, "refusals": {"answer length"}}  # other prompts, and refusals of one length
    assert {test} <= alarms.keys() <= {test} | also.get(test, set())
    assert 280 <= alarms[test].start <= 320
    assert alarms[test].evidence >= 500_000


def test_an_alarm_stays_until_it_is_acknowledged(monitored: Project, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", requests(2, 600, right=0.3))
    [alarm] = monitor(monitored, [log]).alarms
    write_log(log, requests(4, 300), "a")
    assert monitor(monitored, [log]).alarms[0].number == alarm.number
    assert reset_alarms(monitored, "labels were wrong").alarms == ()
    [entry] = state(monitored).resets
    assert (entry.reason, entry.tests, entry.is_accepted) == ("labels were wrong", ("scores",), False)
    write_log(log, requests(5, 600), "a")
    assert monitor(monitored, [log]).alarms == ()
    write_log(log, requests(6, 600, right=0.3), "a")
    assert [one.test for one in monitor(monitored, [log]).alarms] == ["scores"]
    with pytest.raises(SettingsError, match="found an empty text"):
        reset_alarms(monitored, " ")


def test_what_is_accepted_becomes_the_reference(monitored: Project, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", requests(2, 300, about="cooking"))
    assert {one.test for one in monitor(monitored, [log]).alarms} >= {"inputs"}
    report = reset_alarms(monitored, "a new product", is_accepted=True)
    assert result(report, "inputs").learning == LEARNED_REQUESTS
    write_log(log, requests(3, LEARNED_REQUESTS + 300, about="cooking"), "a")
    report = monitor(monitored, [log])
    assert (report.alarms, result(report, "inputs").observed, result(report, "inputs").learning) == ((), 300, 0)
    write_log(log, requests(4, 300), "a")
    assert {one.test for one in monitor(monitored, [log]).alarms} >= {"inputs"}
    reset_alarms(monitored, "back")
    with pytest.raises(SettingsError, match="--reset: version 1 has no alarm"):
        reset_alarms(monitored, "again")


def test_inputs_are_compared_with_a_random_part_of_sorted_test_rows(
    monitored: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A test set with one topic after the other, and requests of both."""
    both = [*requests(1, 150), *requests(9, 150, about="cooking")]
    monkeypatch.setattr("monitor_cases.requests", lambda seed, rows: both)
    write_evaluation(monitored.layout)
    pairs = zip(requests(2, 300), requests(3, 300, about="cooking"), strict=True)
    lines = [{"prompt": line["prompt"]} for pair in pairs for line in pair]
    report = monitor(monitored, [write_log(tmp_path / "log.jsonl", lines)])
    assert (report.requests, report.alarms) == (600, ())


@pytest.mark.parametrize("rows", [40, 300, 600])
def test_a_replay_of_the_evaluation_raises_no_alarm(
    monitored: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    """The requests are the evaluated rows, twice, and every prompt is there once."""
    draw = random.Random(7)
    words = ["".join(draw.choices("abcdefghijklmnoprstuvw", k=5)) for _ in range(400)]
    lines = [{**line, "prompt": " ".join(draw.choices(words, k=20))} for line in requests(1, rows)]
    monkeypatch.setattr("monitor_cases.requests", lambda seed, count: lines)
    write_evaluation(monitored.layout)
    replayed = [{**line, "id": f"{turn} {line['id']}"} for turn in "ab" for line in lines]
    report = monitor(monitored, [write_log(tmp_path / "log.jsonl", replayed)])
    assert (report.requests, report.alarms) == (2 * rows, ())
    inputs = result(report, "inputs")
    assert inputs.value == pytest.approx(inputs.reference, rel=0.03)


def test_accepted_scores_are_what_a_loss_is_measured_from(project: ProjectLayout, tmp_path: Path) -> None:
    monitored = monitored_project(project, Settings(monitor=Monitor(score_margin=0.3)))
    log = write_log(tmp_path / "log.jsonl", requests(2, 300, right=0.4))
    assert [one.test for one in monitor(monitored, [log]).alarms] == ["scores"]
    reset_alarms(monitored, "harder questions", is_accepted=True)
    write_log(log, requests(3, LEARNED_REQUESTS, right=0.4), "a")
    write_log(log, requests(4, 600, right=0.2), "a")  # 0.7 less than the evaluation, 0.2 less than what was accepted
    report = monitor(monitored, [log])
    assert report.alarms == ()
    scores = result(report, "scores")
    assert scores.evidence > scores.threshold
    assert (scores.reference_rows, scores.is_accepted) == (LEARNED_REQUESTS, True)
    assert scores.reference == pytest.approx(0.4, abs=0.06)
    assert "(500 accepted)" in format_monitor(report)


def test_scores_may_come_later_and_references_are_compared(monitored: Project, tmp_path: Path) -> None:
    first = [line | {"score": None} for line in requests(2, 100)]
    log = write_log(tmp_path / "log.jsonl", first)
    assert result(monitor(monitored, [log]), "scores").observed == 0
    write_log(log, [{"id": line["id"], "score": 1} for line in first[:30]], "a")
    write_log(log, [{"id": line["id"], "score": 0} for line in first[:30]], "a")  # is ignored
    write_log(log, [line | {"reference": line["answer"]} for line in first[30:40]], "a")
    report = monitor(monitored, [log])
    assert (result(report, "scores").observed, result(report, "scores").value) == (40, 1.0)
    assert (report.requests, result(report, "refusals").observed, report.duplicates) == (100, 100, 0)
    report = monitor(monitored, [write_log(tmp_path / "other.jsonl", first[:5])])
    assert (report.requests, report.duplicates) == (100, 5)


def test_a_small_loss_of_the_scores_is_no_alarm(project: ProjectLayout, tmp_path: Path) -> None:
    settings = Settings(monitor=Monitor(score_margin=0.9))
    monitored = monitored_project(project, settings)
    log = write_log(tmp_path / "log.jsonl", requests(2, 600, right=0.2))
    report = monitor(monitored, [log])
    assert report.alarms == ()
    assert result(report, "scores").evidence > result(report, "scores").threshold


def test_every_line_counts_once_however_the_logs_are_renamed_and_cut(monitored: Project, tmp_path: Path) -> None:
    lines = [{key: value for key, value in line.items() if key != "id"} for line in requests(2, 60)]
    folder = tmp_path / "logs"
    folder.mkdir()
    log = write_log(folder / "log.jsonl", lines[:20])
    with log.open("a") as stream:
        stream.write(json.dumps(lines[20])[:30])  # the server is writing
    assert monitor(monitored, [folder]).requests == 20
    with log.open("a") as stream:
        stream.write(json.dumps(lines[20])[30:] + "\n")
    assert monitor(monitored, [folder]).requests == 21
    write_log(log, lines[21:25], "a")
    log.rename(folder / "log.jsonl.1")
    write_log(log, lines[25:40])
    assert monitor(monitored, [log, folder / "log.jsonl.1"]).requests == 40
    shutil.copyfile(log, folder / "copy.jsonl")
    report = monitor(monitored, [folder])
    assert report.requests == 40
    assert any("begins as another log" in note for note in report.notes)
    (folder / "copy.jsonl").unlink()
    write_log(log, lines[40:60])  # the old lines are gone
    report = monitor(monitored, [folder])
    assert report.requests == 60
    assert any("begins again; 15 lines" in note for note in report.notes)
    log.write_text(log.read_text().replace("what should", "what would", 3).replace("what would", "what should", 1))
    with pytest.raises(DataError, match=r"log\.jsonl: its first .* bytes were read before, and differ now"):
        monitor(monitored, [folder])
    assert state(monitored).requests == 60


@pytest.mark.parametrize("order", [["log.jsonl", "log.jsonl.1"], ["log.jsonl.1", "log.jsonl"]])
def test_renamed_logs_may_have_equal_first_lines(monitored: Project, tmp_path: Path, order: list[str]) -> None:
    first, *lines = requests(2, 41)
    log = write_log(tmp_path / "log.jsonl", [first, *lines[:20]])
    assert monitor(monitored, [log]).requests == 21
    log.rename(tmp_path / "log.jsonl.1")
    for _ in range(2):  # the next log does not exist yet
        report = monitor(monitored, [tmp_path / name for name in order])
        assert (report.requests, report.notes) == (21, (f"{log}: not found now; it was read before",))
    write_log(log, [first, *lines[20:]])
    report = monitor(monitored, [tmp_path / name for name in order])
    assert report.requests == 41
    assert monitor(monitored, [tmp_path / name for name in order]).new_requests == 0


def test_a_log_that_is_renamed_during_a_call_waits_for_the_next(
    monitored: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = requests(2, 40)
    log = write_log(tmp_path / "log.jsonl", lines[:20])
    monitor(monitored, [log])

    def rename(name: str) -> None:
        log.rename(tmp_path / "log.jsonl.1")
        write_log(log, lines[20:])

    find = stage.request_log.find_progress
    with monkeypatch.context() as patched:
        patched.setattr(stage.request_log, "find_progress", lambda *found: (find(*found), rename("x"))[0])
        report = monitor(monitored, [log])
    assert report.requests == 20
    assert any("was renamed during this call" in note for note in report.notes)
    assert monitor(monitored, [tmp_path / "log.jsonl.1", log]).requests == 40


def test_lines_that_are_no_request_are_counted_and_named(monitored: Project, tmp_path: Path) -> None:
    words = "the customer's own words"
    log = tmp_path / "log.jsonl"
    bad = [f'{{"prompt": 5, "answer": "{words}"}}', f"{words}", f'["{words}"]', f'{{"text": "{words}"}}']
    log.write_text("\n".join(bad) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"no request in 4 lines; .*log\.jsonl:1: prompt: found a number"):
        monitor(monitored, [log])
    bad.append('{"prompt": "a", "answer": "b", "score": 85}')
    log.write_text("\n".join([*bad, '{"prompt": "a", "answer": "b", "score": "good"}']) + "\n", encoding="utf-8")
    write_log(log, requests(2, 3), "a")
    report = monitor(monitored, [log])
    assert (report.requests, report.unusable) == (3, 6)
    assert [note.split(": ", 1)[1] for note in report.notes[:5]] == [
        "prompt: found a number; expected text", "not JSON", "found a list; expected an object",
        "found none of the known fields; expected prompt or messages, answer, or id and score",
        "score: outside 0 to 1, the unit of accuracy",
    ]  # fmt: skip
    assert f"{log}:5" in report.notes[4]
    assert words not in format_monitor(report)


def test_no_text_of_a_user_is_stored(monitored: Project, tmp_path: Path) -> None:
    lines = [line | {"prompt": f"mnemonic {number}", "id": "mail@example.org"} for number, line in
             enumerate(requests(2, 50, refused=1.0))]  # fmt: skip
    monitor(monitored, [write_log(tmp_path / "log.jsonl", lines)])
    stored = b"".join(path.read_bytes() for path in monitored.layout.experiments.rglob("*") if path.is_file())
    assert b"mnemonic" not in stored
    assert b"mail@" not in stored
    assert b"I'm sorry" not in b"".join(
        path.read_bytes() for path in monitored.layout.monitor.rglob("*") if path.is_file()
    )


def test_a_kill_at_any_time_changes_nothing(
    monitored: Project, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage, "SAVE_EVERY", 20)
    log = write_log(tmp_path / "log.jsonl", requests(2, 50))
    monitor(monitored, [log])
    expected = (monitored.layout.monitor / "1" / "state.json").read_bytes()
    for killed_at in itertools.count(1):
        shutil.rmtree(monitored.layout.monitor)

        def work(killed_at: int = killed_at) -> int:
            operations = itertools.count(1)

            def kill(*_: object) -> None:
                if next(operations) == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)

            monkeypatch.setattr(files, "before", kill)
            monitor(monitored, [log])
            return 1

        code, _ = count_in_child(work)
        monitor(monitored, [log])
        assert (monitored.layout.monitor / "1" / "state.json").read_bytes() == expected
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert killed_at > 20


def test_the_version_is_that_of_the_champion_a_number_or_a_release(monitored: Project, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", requests(2, 30))
    make_champion(monitored.layout, "b" * 64)
    with pytest.raises(DataError, match="is about model cccccccccccc, not about version 2"):
        monitor(monitored, [log])
    assert monitor(monitored, [log], MonitorOptions(version=1)).version == 1
    with pytest.raises(ChampionError, match="version 7 was never promoted; known: 1, 2"):
        monitor(monitored, [log], MonitorOptions(version=7))
    with pytest.raises(SettingsError, match="no release here; expected a directory of `ratchet deploy`"):
        monitor(monitored, [log], MonitorOptions(release=tmp_path))
    write_evaluation(monitored.layout, champion_digest="b" * 64, model_digest="e" * 64)
    with pytest.raises(DataError, match="about version 2"):
        monitor(monitored, [log])


def test_a_release_counts_from_its_deployment_on(tracked_project: ProjectLayout, tmp_path: Path) -> None:
    model = promote_fake_model(tracked_project, "a").model_digest
    project = Project.from_parts(tracked_project, Settings())
    write_evaluation(tracked_project, model_digest=model)
    deploy(project, tmp_path / "served", DeployOptions(smoke_test=False))
    lines = requests(2, 4)
    lines[3]["time"] = time.time() + 5
    log = write_log(tmp_path / "log.jsonl", lines)
    report = monitor(project, [log], MonitorOptions(release=tmp_path / "served"))
    assert (report.version, report.requests, report.earlier) == (1, 1, 3)


def test_requests_of_other_versions_and_times_are_left_out(monitored: Project, tmp_path: Path) -> None:
    lines = requests(2, 6)
    lines[0]["time"] = "2025-12-31T23:59:59Z"
    lines[1]["version"] = 3
    lines[2] |= {"time": (START_S + 2) * 1000, "version": 1}
    report = monitor(monitored, [write_log(tmp_path / "log.jsonl", lines)])
    assert (report.requests, report.earlier) == (4, 2)


def test_later_scores_of_requests_that_were_left_out_are_left_out_too(monitored: Project, tmp_path: Path) -> None:
    lines = [line | {"score": None} for line in requests(2, 6)]
    lines[0]["time"] = "2025-12-31T23:59:59Z"
    lines[1]["version"] = 3
    log = write_log(tmp_path / "log.jsonl", lines)
    report = monitor(monitored, [log])
    write_log(log, [{"id": line["id"], "score": 0} for line in lines], "a")
    report = monitor(monitored, [log])
    assert (report.requests, report.earlier, result(report, "scores").observed) == (4, 2, 4)
    write_log(log, [lines[0] | {"time": None, "score": 1}], "a")  # this version has a request with this id too
    report = monitor(monitored, [log])
    assert (report.requests, report.earlier, result(report, "scores").observed) == (5, 2, 5)


def test_clear_messages_about_what_is_missing(project: ProjectLayout, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", requests(2, 30))
    plain = Project.from_parts(project, Settings())
    with pytest.raises(ChampionError, match="there is no champion yet"):
        monitor(plain, [log])
    make_champion(project, MODEL)
    with pytest.raises(DataError, match=r"eval\.json: not found; the evaluation of version 1 must be on this machine"):
        monitor(plain, [log])
    write_evaluation(project, rows=10)
    with pytest.raises(DataError, match="has 10 independent test rows; expected at least 20"):
        monitor(plain, [log])
    write_evaluation(project)
    for metric in ("bleu", "answer_loss"):
        with pytest.raises(SettingsError, match=f"found '{metric}'; expected a metric .*: accuracy, format_validity"):
            monitor(Project.from_parts(project, Settings(monitor=Monitor(score_metric=metric))), [log])
    with pytest.raises(DataError, match=r"nothing\.jsonl: file not found"):
        monitor(plain, [tmp_path / "nothing.jsonl"])
    monitor(plain, [log])
    with pytest.raises(SettingsError, match="found 'format_validity', but the monitoring of version 1 began"):
        monitor(Project.from_parts(project, Settings(monitor=Monitor(score_metric="format_validity"))), [log])
    path = project.monitor / "1" / "state.json"
    path.write_text(path.read_text().replace('"requests": 30', '"requests": 31'))
    with pytest.raises(DamagedFileError, match="changed since it was written"):
        monitor(plain, [log])
    with FileLock(project.monitor / "1" / ".lock", "x"), pytest.raises(LockHeldError, match="monitoring of version 1"):
        monitor(plain, [log])


# --- alarms that roll back, and notifications


def promoted(layout: ProjectLayout, model: str) -> None:
    write_outputs(layout, model)
    promote(Project.from_parts(layout, PROMOTION_SETTINGS), PromoteOptions())


def list_actions(report: MonitorReport) -> set[str | None]:
    return {alarm.action for alarm in report.alarms if alarm.test in ANSWER_TESTS}


def refusing_log(path: Path, seed: int) -> Path:
    lines = [
        line | {"prompt": "Question s00001?", "answer": REFUSAL, "time": time.time() + 5} for line in requests(seed, 60)
    ]
    return write_log(path, [{key: line[key] for key in line if key != "score"} for line in lines])


def test_an_alarm_rolls_back_once_and_never_twice_in_a_row(tracked_project: ProjectLayout, tmp_path: Path) -> None:
    settings = PROMOTION_SETTINGS.model_copy(update={"monitor": Monitor(on_alarm="rollback")})
    project = Project.from_parts(tracked_project, settings)
    promoted(tracked_project, "a")
    evaluation = tmp_path / "evaluation of a"
    shutil.copytree(tracked_project.evaluate, evaluation)
    promoted(tracked_project, "b")
    log = refusing_log(tmp_path / "log.jsonl", 1)
    report = monitor(project, [log], smoke_test=accept_model)
    assert list_actions(report) == {
        "rolled back to version 1", "not rolled back: version 2 is not champion now"
    }  # fmt: skip
    entry = read_ledger(tracked_project)[-1]
    assert (entry.action, entry.version, entry.previous_version) == ("rollback", 1, 2)
    assert (entry.reason or "").startswith("ratchet monitor: answer length: ")
    assert monitor(project, [log], MonitorOptions(version=2), accept_model).alarms == report.alarms
    assert len(read_ledger(tracked_project)) == 3

    # The earlier version is champion now. Its alarm does not change the champion again.
    shutil.rmtree(tracked_project.evaluate)
    shutil.copytree(evaluation, tracked_project.evaluate)
    actions = list_actions(monitor(project, [refusing_log(tmp_path / "later.jsonl", 2)]))
    assert len(actions) == 1
    assert "became champion by an automatic rollback" in str(actions)
    assert len(read_ledger(tracked_project)) == 3


def test_a_killed_rollback_is_finished_and_recorded(
    tracked_project: ProjectLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = PROMOTION_SETTINGS.model_copy(update={"monitor": Monitor(on_alarm="rollback")})
    project = Project.from_parts(tracked_project, settings)
    promoted(tracked_project, "a")
    promoted(tracked_project, "b")
    log = refusing_log(tmp_path / "log.jsonl", 1)

    def work() -> int:
        def kill(operation: str, path: Path) -> None:
            if operation == "rename" and path == tracked_project.champion:
                os.kill(os.getpid(), signal.SIGKILL)

        monkeypatch.setattr(files, "before", kill)
        monitor(project, [log], smoke_test=accept_model)
        return 1

    assert count_in_child(work)[0] == -signal.SIGKILL
    report = monitor(project, [log], MonitorOptions(version=2), accept_model)
    assert "rolled back to version 1" in list_actions(report)
    assert [entry.version for entry in read_ledger(tracked_project)] == [1, 2, 1]
    champion = read_champion(tracked_project.champion).champion
    assert champion is not None
    assert champion.version == 1


def test_without_an_earlier_champion_or_with_a_broken_one_the_alarm_stays(
    tracked_project: ProjectLayout, tmp_path: Path
) -> None:
    settings = PROMOTION_SETTINGS.model_copy(update={"monitor": Monitor(on_alarm="rollback")})
    project = Project.from_parts(tracked_project, settings)
    promoted(tracked_project, "a")
    log = refusing_log(tmp_path / "log.jsonl", 1)
    assert list_actions(monitor(project, [log])) == {"not rolled back: there is no earlier champion"}
    promoted(tracked_project, "b")

    def refuse(model: Path) -> None:
        raise ChampionError("does not answer")

    report = monitor(project, [log], smoke_test=refuse)
    assert list_actions(report) == {None}
    assert "the rollback because of answer length failed: does not answer; the next look tries again" in report.notes
    assert "rolled back to version 1" in list_actions(monitor(project, [log], smoke_test=accept_model))


def test_the_webhook_gets_an_alarm_once_and_after_a_failure_with_the_next_call(
    project: ProjectLayout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitored = monitored_project(project)
    log = write_log(tmp_path / "log.jsonl", requests(2, 600, right=0.3))
    monitor(monitored, [log])  # without a webhook
    with served(404) as refusing:
        monkeypatch.setenv("RATCHET_WEBHOOK_URL", refusing.url)
        monitor(monitored, [log])
    assert refusing.got
    with served(200) as receiver:
        monkeypatch.setenv("RATCHET_WEBHOOK_URL", receiver.url)
        for _ in range(2):
            monitor(monitored, [log])
    [(_, _, content)] = receiver.got
    body = json.loads(content)
    assert (body["event"], body["test"], body["version"], body["action"]) == ("alarm", "scores", 1, None)
    assert "version 1 of ratchet-model: scores: 0." in body["text"]


# --- MLflow


TRACE = """
import mlflow
mlflow.set_experiment("served")
with mlflow.start_span("chat", span_type="CHAT_MODEL") as span:
    span.set_inputs({"messages": [{"role": "user", "content": "hello"}]})
    span.set_outputs({"choices": [{"message": {"role": "assistant", "content": "good morning"}}]})
mlflow.flush_trace_async_logging()
"""


def test_traces_of_mlflow_are_read_once_and_their_scores_later(tracked_project: ProjectLayout) -> None:
    from mlflow.entities import Feedback
    from mlflow.tracing.client import TracingClient

    from ratchet.tracking.mlflow.client import MlflowTracker
    from ratchet.tracking.mlflow.traces import EvaluatedAnswer

    monitored = monitored_project(tracked_project)
    tracker = MlflowTracker(tracked_project, "served")
    tracker.find_or_create("run-a", START_S * 1000)
    answers = [
        EvaluatedAnswer(line["id"], "candidate", line["prompt"], line["answer"], "another", {"accuracy": 1.0})
        for line in requests(2, 5)
    ]
    tracker.report_answers("run-a", answers, grace_s=100)
    for _ in range(2):
        report = monitor(monitored, ["mlflow:served"])
        assert (report.requests, result(report, "scores").observed, result(report, "scores").value) == (5, 5, 1.0)
    environment = os.environ | {"MLFLOW_TRACKING_URI": f"sqlite:///{tracked_project.mlflow_database}"}
    subprocess.run([sys.executable, "-c", TRACE], env=environment, check=True, cwd=tracked_project.root)
    report = monitor(monitored, ["mlflow:served"])
    assert (report.requests, result(report, "scores").observed) == (6, 5)
    with tracker.connected() as client:
        [trace] = client.search_traces(locations=[tracker.id], filter_string="trace.name = 'chat'")
        TracingClient(client.tracking_uri).log_assessment(trace.info.trace_id, Feedback(name="score", value=False))
    report = monitor(monitored, ["mlflow:served"])
    assert (report.requests, result(report, "scores").observed, report.unusable) == (6, 6, 0)
    with pytest.raises(DataError, match=r"mlflow:other: .* has no experiment of this name"):
        monitor(monitored, ["mlflow:other"])
    for name, start_s, score in (("earlier", 1_700_000_000, 1.0), ("unusable", START_S, 7.0)):
        tracker = MlflowTracker(tracked_project, name)
        tracker.find_or_create("run-b", start_s * 1000)
        tracker.report_answers("run-b", [replace(answer, scores={"accuracy": score}) for answer in answers], 100)
    for _ in range(2):
        report = monitor(monitored, ["mlflow:earlier", "mlflow:unusable"])
        assert (report.requests, report.earlier, report.unusable) == (6, 5, 5)


# --- the command


@pytest.fixture
def printed(capsys: pytest.CaptureFixture[str], calm: None) -> Iterator[Any]:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(list(arguments))
        out, err = capsys.readouterr()
        return code, out, err

    yield run


def test_the_command_shows_the_tests_and_exits_with_3_at_an_alarm(
    monitored: Project, tmp_path: Path, printed: Any
) -> None:
    log = write_log(tmp_path / "log.jsonl", requests(2, 300))
    where = ("--project", str(monitored.root), "monitor")
    code, out, _ = printed(*where, str(log))
    assert code == 0
    assert out.startswith("version 1: 300 requests compared with the evaluation, 300 of them new\n")
    assert "an alarm needs evidence of 500,000" in out
    write_log(log, requests(3, 400, right=0.3), "a")
    code, out, _ = printed(*where, str(log), "--follow")  # ends at the alarm
    assert code == 3
    assert re.search(r"\nALARM scores: 0\.[23]\d* since number (29|30)\d \(2026-", out)
    code, out, _ = printed(*where, str(log), "--json")
    assert code == 3
    assert json.loads(out)["version"] == 1
    assert printed(*where, "--reset")[0] == 2
    assert printed(*where, str(log), "--reset", "--reason", "x")[0] == 2
    assert printed(*where)[0] == 2
    assert printed(*where, "--reset", "--reason", "labels were wrong")[0] == 0


def test_following_ends_at_the_alarm_and_loads_no_torch(monitored: Project, tmp_path: Path) -> None:
    log = write_log(tmp_path / "log.jsonl", requests(2, 100))
    code = (
        "import sys; from ratchet.cli import main, monitor; monitor.LOOK_INTERVAL_S = 0.05; "
        "code = main.main(sys.argv[1:]); assert not {'torch', 'mlflow'} & sys.modules.keys(); sys.exit(code)"
    )
    command = [sys.executable, "-c", code, "--project", str(monitored.root), "monitor", str(log), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "  100 requests, no alarm\n"
        write_log(log, requests(3, 400, right=0.2), "a")
        rest = process.communicate(timeout=60)[0]
    assert process.returncode == 3
    assert "ALARM scores" in rest
