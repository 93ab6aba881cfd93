"""What to do when a worker has ended: the table."""

import signal

import pytest

from ratchet.errors import EXIT_BUG, EXIT_INPUT, EXIT_INTERRUPTED
from ratchet.run.recovery import End, GiveUp, Retry, classify, decide

RETRIES = 3
DELAY_S = 1.0

TABLE = [
    # exit code, what the worker said  → class, what is done, exit code
    (End(-signal.SIGKILL), "killed", Retry, None),
    (End(-signal.SIGTERM), "killed", Retry, None),
    (End(-signal.SIGSEGV), "killed", Retry, None),
    (End(-signal.SIGBUS), "killed", Retry, None),
    (End(-(signal.SIGRTMIN + 3)), "killed", Retry, None),
    (End(1, "hardware", "cuda error"), "hardware", Retry, None),
    (End(1, "storage", "no space left on device"), "storage", Retry, None),
    (End(1), "bug", GiveUp, EXIT_BUG),
    (End(3), "bug", GiveUp, EXIT_BUG),
    (End(139), "bug", GiveUp, EXIT_BUG),
    (End(1, "bug", "KeyError: 'x'"), "bug", GiveUp, EXIT_BUG),
    (End(1, "diverged", "loss is nan at step 7"), "diverged", GiveUp, EXIT_BUG),
    (End(1, "out_of_memory", "CUDA out of memory"), "out_of_memory", GiveUp, EXIT_BUG),
    (End(EXIT_INPUT), "input", GiveUp, EXIT_INPUT),
    (End(EXIT_INPUT, "input", "no such module: q_prj"), "input", GiveUp, EXIT_INPUT),
    (End(EXIT_INTERRUPTED), "preempted", GiveUp, EXIT_INTERRUPTED),
    (End(EXIT_INTERRUPTED, "preempted"), "preempted", GiveUp, EXIT_INTERRUPTED),
    # What the worker said counts more than how it ended.
    (End(-signal.SIGKILL, "input", "wrong data"), "input", GiveUp, EXIT_INPUT),
    (End(-signal.SIGABRT, "diverged", "loss is nan"), "diverged", GiveUp, EXIT_BUG),
    (End(0, "hardware", "gone"), "hardware", Retry, None),
]


@pytest.mark.parametrize(("end", "failure", "action", "exit_code"), TABLE)
def test_the_table(end: End, failure: str, action: type[Retry] | type[GiveUp], exit_code: int | None) -> None:
    decision = decide(end, 0, RETRIES, DELAY_S)
    assert classify(end) == failure
    assert type(decision) is action
    assert decision.failure == failure
    assert decision.text
    assert getattr(decision, "exit_code", None) == exit_code


def test_success_without_a_result_is_our_bug() -> None:
    decision = decide(End(0), 0, RETRIES, DELAY_S)
    assert decision == GiveUp("bug", EXIT_BUG, "the worker ended with success but sealed no result")


@pytest.mark.parametrize(("deaths", "delay_s"), [(0, 1.0), (1, 2.0), (2, 4.0), (5, 32.0), (6, 60.0), (7, 60.0)])
def test_each_death_without_progress_doubles_the_wait_up_to_a_minute(deaths: int, delay_s: float) -> None:
    decision = decide(End(-signal.SIGKILL), deaths, 100, DELAY_S)
    assert isinstance(decision, Retry)
    assert decision.delay_s == delay_s


def test_the_wait_stays_a_minute_however_many_deaths() -> None:
    decision = decide(End(-signal.SIGKILL), 5000, 10_000, DELAY_S)
    assert isinstance(decision, Retry)
    assert decision.delay_s == 60.0


def test_no_delay_stays_no_delay() -> None:
    decision = decide(End(-signal.SIGKILL), 4, 100, 0.0)
    assert isinstance(decision, Retry)
    assert decision.delay_s == 0.0


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_it_gives_up_after_so_many_restarts_without_a_checkpoint(retries: int) -> None:
    decisions = [decide(End(-signal.SIGKILL), deaths, retries, DELAY_S) for deaths in range(retries + 2)]
    assert [type(d) for d in decisions] == [Retry] * retries + [GiveUp] * 2
    last = decisions[-1]
    assert isinstance(last, GiveUp)
    assert last.exit_code == EXIT_BUG
    assert f"gave up after {retries} restarts" in last.text
    assert "SIGKILL" in last.text


def test_a_stop_on_request_is_none_of_the_deaths() -> None:
    decision = decide(End(EXIT_INTERRUPTED), RETRIES + 5, RETRIES, DELAY_S)
    assert isinstance(decision, GiveUp)
    assert (decision.failure, decision.exit_code) == ("preempted", EXIT_INTERRUPTED)


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (End(-signal.SIGKILL), "SIGKILL (the system may have run out of memory"),
        (End(-signal.SIGSEGV), "SIGSEGV"),
        (End(17), "exit code 17"),
        (End(1, "storage", "disk full"), "disk full"),
    ],
)
def test_the_cause_is_said(end: End, says: str) -> None:
    assert says in decide(end, 0, RETRIES, DELAY_S).text
