"""Proves that a killed and restarted judge requests only the missing judgements."""

import signal
import subprocess
import sys
from pathlib import Path

from judge_cases import (
    answers,
    fair,
    rows,
    settings,
)
from ratchet.evaluation.judge import JudgeSession
from ratchet.storage.layout import ProjectLayout
from scripted_endpoint import JSON, Said, served

PACKAGES = ("evaluation",)
CHILD = """
import sys
from pathlib import Path
sys.path.insert(0, {support!r})
from judge_cases import answers, rows, settings
from ratchet.evaluation.judge import JudgeSession
from ratchet.storage.layout import ProjectLayout
JudgeSession.from_settings(ProjectLayout(Path({root!r})), settings({url!r})).judge_answers(answers(10), rows(10), print)
"""


def test_killed_it_asks_only_what_is_missing(tmp_path: Path) -> None:
    stall = [True]

    def script(body: JSON, number: int) -> Said:
        return Said(stalls=True) if stall and number >= 12 else fair(body)

    with served(script) as server:
        support = str(Path(__file__).parents[1] / "support")
        code = CHILD.format(support=support, root=str(tmp_path), url=server.url)
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL)
        kept = ProjectLayout(tmp_path).scores
        while sum(path.read_bytes().count(b"\n") for path in kept.glob("*.jsonl")) < 12:
            assert child.poll() is None
            server.over.wait(0.02)
        child.send_signal(signal.SIGKILL)
        child.wait()
        stall.clear()
        before = len(server.got)
        judge = JudgeSession.from_settings(ProjectLayout(tmp_path), settings(server.url))
        assert judge is not None
        judgements, _, _ = judge.judge_answers(answers(10), rows(10), lambda _: None)
        assert len(server.got) - before == 20 - 12
    assert judgements.comparisons["base"].rows == 10
