"""Tests `ratchet label`: the sides that can be named, the server's checks, the page in a browser, and its results."""

import http.client
import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import fake_generations
import gate_cases as cases
from chromium import Tab
from gate_cases import CURRENT, evidence, right
from label_cases import HOSTILE, lines, write_answers
from ratchet.cli.main import main
from ratchet.config import params_file
from ratchet.config.gate import MustImproveRule
from ratchet.config.generate import Generate
from ratchet.config.prepare import Prepare
from ratchet.config.settings import Settings
from ratchet.data.conversation import SourceRow
from ratchet.data.sources import SourceReader
from ratchet.errors import EXIT_INPUT, DataError, SettingsError
from ratchet.quality_gate.evidence import read_evidence, read_rows
from ratchet.quality_gate.judgements import HUMAN_PREFERENCE
from ratchet.stages.label import TOKEN_VARIABLE, label, label_results, open_task
from ratchet.stages.label_server import LabelServer, LabelSession
from ratchet.stages.project import Project
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records import base
from ratchet.storage.records.evaluation import EvaluationReport, JudgeReport, judge_file

Reply = tuple[int, dict[str, Any]]


def names(layout: ProjectLayout) -> tuple[str, str]:
    return str(layout.root / "a.jsonl"), str(layout.root / "b.jsonl")


@contextmanager
def served(
    layout: ProjectLayout,
    sides: tuple[str, str] | None = None,
    host: str = "127.0.0.1",
    token: str | None = None,
    rater: str | None = None,
) -> Iterator[LabelServer]:
    task = open_task(Project(layout.root), sides or names(layout))
    with LabelServer(LabelSession(task, layout.judgements, seed=0), host, 0, token, rater) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def post(server: LabelServer, path: str, fields: object, **headers: str) -> Reply:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    body = fields if isinstance(fields, bytes) else json.dumps(fields).encode()
    plain = {"Content-Type": "application/json"}
    connection.request("POST", path, body, plain | {name.replace("_", "-"): value for name, value in headers.items()})
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


def test_raters_judge_independently_and_undo(project: ProjectLayout) -> None:
    write_answers(project, 30)
    with served(project) as server:
        ann, bob = (post(server, "/next", {"rater": rater})[1] for rater in ("ann", "bob"))
        assert ann["sample"] == bob["sample"] and ann["total"] == 30 and ann["last"] is None
        assert sorted(ann["answers"]) == sorted(bob["answers"])
        assert not {"a.jsonl", "b.jsonl"} & set(json.dumps(ann).split('"'))
        first_of_a = 0
        for number in range(30):
            before = ann
            first_of_a += "of a:" in ann["answers"][0]
            judgement = {
                "rater": " ann ",
                "sample": ann["sample"],
                "shown": ann["shown"],
                "choice": "first",
                "note": f"note {number}",
            }
            status, ann = post(server, "/judge", judgement)
            assert (status, ann["done"]) == (200, number + 1)
            assert post(server, "/judge", judgement) == (200, ann), "sent again, it changes nothing"
        assert 5 <= first_of_a <= 25, "each side is first about as often"
        assert ann["sample"] is None and ann["last"] == {"sample": before["sample"], "note": "note 29"}
        for _ in range(2):
            _, undone = post(server, "/undo", {"rater": "ann", "sample": before["sample"]})
            assert {**undone, "last": None} == {**before, "last": None}
        assert post(server, "/next", {"rater": "bob"})[1] == bob
    found = lines(project)
    assert [line["event"] for line in found] == ["judgement"] * 30 + ["undo"]
    assert found[0]["rater"] == "ann" and found[0]["note"] == "note 0"
    with served(project) as server:  # after a restart
        assert post(server, "/next", {"rater": "ann"})[1] == {**before, "last": undone["last"]}


def test_servers_share_the_file_and_a_page_may_be_older_than_its_server(project: ProjectLayout) -> None:
    write_answers(project, 3)
    a, b = names(project)
    with served(project) as server:
        state = post(server, "/next", {"rater": "ann"})[1]
        judgement = {"rater": "ann", "sample": state["sample"], "shown": state["shown"], "note": ""}
        better = "a" if "of a:" in state["answers"][0] else "b"
        for side in ("a", "b"):
            rows = (project.root / f"{side}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
            rows = [*rows[::-1], json.dumps({"prompt": "New?", "answer": f"new {side}"}) + "\n"]
            (project.root / f"{side}.jsonl").write_text("".join(rows), encoding="utf-8")
        with served(project, (b, a)) as other:
            assert post(other, "/judge", judgement | {"choice": "first"})[0] == 200
            assert post(server, "/judge", judgement | {"choice": "second"})[0] == 200
            assert post(other, "/judge", judgement | {"choice": "first"})[1]["done"] == 1
            assert post(server, "/next", {"rater": "ann"})[1]["done"] == 1
            assert post(other, "/judge", judgement | {"choice": "first", "shown": "x"})[0] == 409
    assert [line["choice"] for line in lines(project)] == ["first", "second", "first"]
    for sides in ((a, b), (b, a)):
        report = label_results(Project(project.root), sides)
        assert (report.judged, report.samples, report.outdated) == (1, 4, 0)
        assert report.win_rate is not None and report.win_rate.value == float(f"{better}.jsonl" in sides[0])


def test_a_disk_that_is_full_is_reported_and_the_judgement_may_be_sent_again(
    project: ProjectLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    write_answers(project, 2)
    with served(project) as server:
        state = post(server, "/next", {"rater": "ann"})[1]
        judgement = {"rater": "ann", "sample": state["sample"], "shown": state["shown"], "choice": "tie", "note": ""}
        project.judgements.mkdir()
        status, reply = post(server, "/judge", judgement)
        assert status == 507 and "not saved" in reply["error"]
        project.judgements.rmdir()
        assert post(server, "/judge", judgement)[1]["done"] == 1
    assert "cannot be read (Is a directory)" in capsys.readouterr().err
    assert len(lines(project)) == 1


@pytest.mark.parametrize(
    ("path", "fields", "headers", "status"),
    [
        ("/next", {"rater": "ann"}, {"Host": "attacker.example"}, 403),
        ("/next", {"rater": "ann"}, {"Host": "127.0.0.1.attacker.example:80"}, 403),
        ("/next", {"rater": "ann"}, {"Origin": "http://attacker.example"}, 403),
        ("/next", {"rater": "ann"}, {"Origin": "null"}, 403),
        ("/next", {"rater": "ann"}, {"Host": "["}, 400),
        ("/next", {"rater": "ann"}, {"Content_Type": "text/plain"}, 415),
        ("/next", {"rater": "ann"}, {"Content_Length": "70000"}, 413),
        ("/next", {"rater": " "}, {}, 400),
        ("/next", {"rater": "x" * 61}, {}, 400),
        ("/next", {"rater": "\ud800"}, {}, 400),
        ("/next", [], {}, 400),
        ("/next", b"{", {}, 400),
        ("/judge", {"rater": "ann", "sample": "x", "shown": "x", "choice": "third", "note": ""}, {}, 400),
        ("/judge", {"rater": "ann", "sample": "x", "shown": "x", "choice": "first", "note": ""}, {}, 409),
        ("/files", {"rater": "ann"}, {}, 404),
    ],
)
def test_requests_that_are_refused(
    project: ProjectLayout, path: str, fields: object, headers: dict[str, str], status: int
) -> None:
    write_answers(project, 2)
    with served(project) as server:
        found, reply = post(server, path, fields, **headers)
        assert found == status and set(reply) == {"error"}
        for name in ("localhost", "127.0.0.2", "[::1]"):  # any name of this machine's loopback interface
            host = f"{name}:{server.server_port}"
            assert post(server, "/next", {"rater": "ann"}, Host=host, Origin=f"http://{host}")[0] == 200
    assert not project.judgements.exists()


def test_another_interface_needs_the_token(project: ProjectLayout) -> None:
    write_answers(project, 2)
    with served(project, host="0.0.0.0", token="a-long-random-token") as server:  # noqa: S104, S106
        assert server.address.endswith("/#a-long-random-token")
        for given in ({}, {"Authorization": "Bearer other"}, {"Authorization": "Bearer \xe9"}):
            assert post(server, "/next", {"rater": "ann"}, **given)[0] == 401
        host = {"Host": "my-machine.example:8770", "Authorization": "Bearer a-long-random-token"}
        assert post(server, "/next", {"rater": "ann"}, **host)[0] == 200


# ------------------------------------------------------------------------------------------------------- in a browser


def test_the_page_on_a_phone_with_hostile_answers(project: ProjectLayout, chrome: Any) -> None:
    write_answers(project, 4)
    done = "document.getElementById('label').dataset.done === '%d'"
    with served(project, token="t" * 16) as server, Tab(chrome, (360, 640), dark=True) as tab:
        tab.open(server.address)
        tab.wait_for("!document.getElementById('who').hidden")
        tab.write("Ann")
        tab.press("Enter")
        tab.wait_for(done % 0)
        seen = tab.texts("#answers p")
        assert sorted(text.split(":")[0][-1] for text in seen) == ["a", "b"]
        escaped = HOSTILE.replace("\u202e", "\\u202e").strip()
        assert all(text.endswith(escaped) for text in seen), "hostile text stays text"
        assert tab.ask("document.querySelectorAll('#label :is(img, script)').length") == 0
        assert tab.ask("document.documentElement.scrollWidth <= innerWidth")
        heights = tab.ask("[...document.querySelectorAll('[data-choice]')].map(x => x.offsetHeight)")
        assert min(heights) >= 44, "large enough for a finger"
        tab.press("n")
        tab.write("2 is wrong")
        tab.press("Escape")
        tab.press("1")
        tab.wait_for(done % 1)
        tab.click("[data-choice=tie]")
        tab.wait_for(done % 2)
        tab.press("u")
        tab.wait_for(done % 1)
        tab.press("u")
        tab.wait_for(done % 0)
        assert tab.texts("#answers p") == seen
        assert tab.ask("document.getElementById('note').value") == "2 is wrong"
        tab.press("2")
        tab.wait_for(done % 1)
        assert tab.texts("#progress") == ["Ann: 1 of 4"]
        assert tab.ask("window.ran") is None
        assert [url for url in tab.requests() if "127.0.0.1" not in url and not url.startswith("data:")] == []
        assert tab.complaints() == []
    assert [(line["event"], line.get("choice"), line.get("note")) for line in lines(project)] == [
        ("judgement", "first", "2 is wrong"),
        ("judgement", "tie", ""),
        ("undo", None, None),
        ("undo", None, None),
        ("judgement", "second", "2 is wrong"),
    ]


# ---------------------------------------------------------------------------------------------------- sides and results


@pytest.mark.parametrize("code", [0x200B, 0xAD, 0xFEFF, 0x2060, 0x200D, 0xE0041])
def test_invisible_characters_are_shown(project: ProjectLayout, code: int) -> None:
    visible = "\u0645\u06cc\u200c\u062e \U0001f469\u200d\U0001f4bb"  # joiners that Persian and emoji need
    for name, answer in (("a", f"ready{chr(code)}{visible}"), ("b", f"ready{visible}")):
        row = json.dumps({"prompt": "Ready?", "answer": answer})
        (project.root / f"{name}.jsonl").write_text(row + "\n", encoding="utf-8")
    with served(project) as server:
        answers = post(server, "/next", {"rater": "ann"})[1]["answers"]
    shown = f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
    assert sorted(answers) == sorted([f"ready{shown}{visible}", f"ready{visible}"])


def judge_all(layout: ProjectLayout, sides: tuple[str, str], prefer: str) -> None:
    """Judge every sample; the answers that contain `prefer` win."""
    session = LabelSession(open_task(Project(layout.root), sides), layout.judgements, seed=0)
    while (state := session.describe("ann"))["sample"] is not None:
        session.judge(
            "ann", state["sample"], state["shown"], "first" if prefer in state["answers"][0] else "second", ""
        )


def test_models_of_the_evaluation_are_judged_for_the_gate(
    project: ProjectLayout, capsys: pytest.CaptureFixture[str], calm: None
) -> None:
    roles = ("base", "candidate", "champion")
    cases.write(project, evidence({role: {"accuracy": right(30, 60)} for role in roles}, CURRENT))  # type: ignore[misc]
    task = open_task(Project(project.root), ("candidate", "champion"))
    assert task.are_test_rows and len(task.samples) == 60
    [sample, *_] = task.samples.values()
    assert sample.conversation.messages == [{"role": "user", "content": f"Question {sample.prompt}?"}]
    judge_all(project, ("champion", "candidate"), "candidate")
    gate = cases.gate(MustImproveRule(rule="must_improve", metric=(HUMAN_PREFERENCE,), over="champion"))
    found = cases.reason(gate.rules[0], read_evidence(project, Settings(gate=gate), {"answers": cases.TASK}))
    assert found.outcome == "pass" and "60 samples, 60 better, 0 worse" in found.text
    assert main(["--project", str(project.root), "label", "candidate", "champion", "--results", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["judged"], report["win_rate"]["value"]) == (60, 1.0)
    assert [side["digest"] for side in report["sides"]] == [cases.ADAPTER, cases.OLD]
    judge_all(project, ("candidate", "base"), "base")
    assert main(["--project", str(project.root), "label", "champion", "candidate", "--results"]) == 0
    assert "champion against candidate: 60 of 60 prompts judged\n" in capsys.readouterr().out


def test_judges_of_the_evaluation_are_compared_with_people(project: ProjectLayout) -> None:
    """Check with two judges of the same name: the first agrees with people, the second prefers the base."""
    cases.write(project, evidence({"base": {"accuracy": right(15, 30)}, "candidate": {"accuracy": right(20, 30)}}))
    ids = [row.id for row in read_rows(project)]
    judge = JudgeReport(
        model="llama", base_url="http://127.0.0.1:1/v1", rubric_digest="0" * 64, candidate="candidate", comparisons={},
        questions=1, requests=1, prompt_tokens=None, tokens=None, cost=None,
    )  # fmt: skip
    report = EvaluationReport.load(project.eval_report)
    judge = judge.model_copy(update={"additional_judges": (judge,)})
    with files.sealed_directory(project.evaluate, "evaluation") as scratch:
        ignored = shutil.ignore_patterns(files.MANIFEST)
        shutil.copytree(project.evaluate, scratch, dirs_exist_ok=True, ignore=ignored)
        report.model_copy(update={"judge_report": judge}).save(scratch / project.eval_report.name)
        lines = [
            {"id": id, "score": None if number == 0 else 1.0, "additional_judges": [{"score": 0.25}]}
            for number, id in enumerate(ids)
        ]
        base.write_lines(scratch / judge_file("base"), lines)
    judge_all(project, ("base", "candidate"), "candidate")
    for sides, rates in ((("candidate", "base"), (1.0, 0.0)), (("base", "candidate"), (0.0, 1.0))):
        first, second = label_results(Project(project.root), sides).judges
        assert (first.judge, first.agreement.value, first.agreement.n) == ("llama", 1.0, 29)
        assert (second.judge, second.agreement.value, second.agreement.n) == ("llama (2)", 0.0, 30)
        assert (first.win_rate.value, second.win_rate.value) == rates


def test_a_port_in_use_is_refused(project: ProjectLayout) -> None:
    write_answers(project, 2)
    with served(project) as server, pytest.raises(SettingsError, match=f"--port {server.server_port}: Address already"):
        label(Project(project.root), names(project), port=server.server_port)


@pytest.mark.parametrize("mode", [["--results"], ["--pairs", "out.jsonl"]], ids=" ".join)
@pytest.mark.parametrize("option", ["--rater ann", "--host 0.0.0.0", "--port 0"])
def test_options_of_the_page_are_refused_without_the_page(
    project: ProjectLayout, mode: list[str], option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--project", str(project.root), "label", "a", "b", *mode, *option.split()]) == EXIT_INPUT
    assert f"{option}: {mode[0]} shows no page; leave out one of the two" in capsys.readouterr().err


def test_a_short_token_is_refused(project: ProjectLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    write_answers(project, 2)
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    with pytest.raises(SettingsError, match="RATCHET_LABEL_TOKEN: found 6 characters; expected at least 16"):
        label(Project(project.root), names(project), host="0.0.0.0")  # noqa: S104


def test_pairs_are_read_by_prepare(project: ProjectLayout, capsys: pytest.CaptureFixture[str], calm: None) -> None:
    write_answers(project, 12, equal=2)
    judge_all(project, names(project), "of b:")
    output = project.raw / "pairs.jsonl"
    command = ["--project", str(project.root), "label", *names(project), "--pairs", str(output)]
    assert main(command) == 0
    assert capsys.readouterr().out == f"10 pairs: {output}\n"
    assert main(command) == EXIT_INPUT
    assert capsys.readouterr().err == f"ratchet label: --pairs {output}: exists; remove it, or name another file\n"
    prepare = Prepare(task="preferences", sources=("data/raw/pairs.jsonl",))
    rows = [*SourceReader(project.root, prepare).rows()]
    assert len(rows) == 10
    for row in rows:
        assert isinstance(row, SourceRow)
        assert row.conversation.prompt.startswith("Question ") and "of b:" in row.conversation.response
        assert row.conversation.rejected is not None and "of a:" in row.conversation.rejected["content"]


def test_outputs_of_generate_are_matched_by_prompt_with_other_files(project: ProjectLayout) -> None:
    settings = Settings(generate=Generate(samples=2, temperature=0.7, system_prompt="Be brief."))
    write_answers(project, 5)
    prompts = fake_generations.write_lines(project.root / "prompts.jsonl", [{"id": "x", "prompt": "Question 2? "}])
    output = fake_generations.generation(
        project, settings, prompts, lambda _, sample: f"<think>hm</think>generated {sample}", project.root / "g.jsonl"
    )
    project.params.write_text(params_file.dump(settings), encoding="utf-8")
    task = open_task(Project(project.root), (str(output), names(project)[0]))
    [sample] = task.samples.values()
    assert (sample.answers[0], sample.prompt) == ("generated 0", "x")
    assert [message["content"] for message in sample.conversation.messages] == ["Be brief.", "Question 2?"]
    assert [side.unmatched for side in task.sides] == [0, 4]


def test_prompts_of_one_side_only_are_counted(project: ProjectLayout) -> None:
    write_answers(project, 5)
    text = (project.root / "b.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (project.root / "b.jsonl").write_text("".join([*text[:3], '{"prompt": "else", "answer": "x"}\n']), encoding="utf-8")
    task = open_task(Project(project.root), names(project))
    assert [(side.answers, side.unmatched) for side in task.sides] == [(5, 2), (4, 1)]
    assert [sample.prompt for sample in task.samples.values()] == ["1", "2", "3"]


def test_sides_that_are_refused(project: ProjectLayout) -> None:
    def refuse(kind: type[Exception], a: str, b: str) -> str:
        with pytest.raises(kind) as refused:
            open_task(Project(project.root), (a, b))
        return str(refused.value)

    assert "nothing is evaluated" in refuse(DataError, "candidate", "base")
    cases.write(project, evidence({"base": {"accuracy": right(30)}, "candidate": {"accuracy": right(40)}}))
    (project.runs / "0123456789ab").mkdir(parents=True)
    assert "this run has no answers here, the evaluation is of run r1" in refuse(DataError, "0123456789ab", "base")
    assert "expected candidate or r1 (the evaluated run)" in refuse(SettingsError, "candidat", "base")
    assert "no answers of the champion (it has base, candidate)" in refuse(DataError, "champion", "base")
    assert "are the same" in refuse(SettingsError, "base", "base")
    write_answers(project, 5, equal=5)
    a, b = names(project)
    Path(b).write_text(Path(a).read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert "give equal answers to every prompt (5)" in refuse(DataError, a, b)
    assert "no such file" in refuse(DataError, a, "missing.jsonl")
    assert "have no prompt in common" in refuse(DataError, a, "base")
    Path(b).write_text('{"prompt": "Question 0?"}\n', encoding="utf-8")
    assert "no record has an answer next to its prompt" in refuse(DataError, a, b)
