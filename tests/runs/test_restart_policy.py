"""Table test of the restart policy."""

import signal
from typing import get_args

import pytest

from ratchet.errors import EXIT_BUG, EXIT_INPUT, EXIT_INTERRUPTED, EXIT_PEERS
from ratchet.runs.restart_policy import (
    MAX_PEERS_RESTARTS,
    FailureClass,
    GiveUp,
    Retry,
    WorkerExit,
    classify_exit,
    compute_exclusion_s,
    decide,
)

RETRIES = 3
DELAY_S = 1.0

TABLE = [
    # exit code, worker's report → failure class, decision, exit code
    (WorkerExit(-signal.SIGKILL), "killed", Retry, None),
    (WorkerExit(-signal.SIGTERM), "killed", Retry, None),
    (WorkerExit(-signal.SIGSEGV), "killed", Retry, None),
    (WorkerExit(-signal.SIGBUS), "killed", Retry, None),
    (WorkerExit(-(signal.SIGRTMIN + 3)), "killed", Retry, None),
    (WorkerExit(1, "hardware", "cuda error"), "hardware", Retry, None),
    (WorkerExit(1, "storage", "no space left on device"), "storage", Retry, None),
    (WorkerExit(2, "storage", "waited for 600 s"), "storage", GiveUp, EXIT_INPUT),
    (WorkerExit(-signal.SIGKILL, "stalled", "no heartbeat"), "stalled", Retry, None),
    (WorkerExit(-signal.SIGKILL, oom_kills=1), "out_of_memory", Retry, None),
    (WorkerExit(-signal.SIGTERM, oom_kills=1), "killed", Retry, None),
    (WorkerExit(1, "hardware", "cuda error", oom_kills=1), "hardware", Retry, None),
    (WorkerExit(0), "bug", Retry, None),
    (WorkerExit(1), "bug", Retry, None),
    (WorkerExit(3), "bug", Retry, None),
    (WorkerExit(139), "bug", Retry, None),
    (WorkerExit(1, "bug", "KeyError: 'x'"), "bug", Retry, None),
    (WorkerExit(1, "diverged", "loss is nan at step 7"), "diverged", GiveUp, EXIT_BUG),
    (WorkerExit(1, "out_of_memory", "CUDA out of memory"), "out_of_memory", GiveUp, EXIT_BUG),
    (
        WorkerExit(-signal.SIGKILL, "out_of_memory", "one row does not fit", oom_kills=1),
        "out_of_memory",
        GiveUp,
        EXIT_BUG,
    ),
    (WorkerExit(EXIT_INPUT), "data", GiveUp, EXIT_INPUT),
    (WorkerExit(EXIT_INPUT, "data", "no such module: q_prj"), "data", GiveUp, EXIT_INPUT),
    (WorkerExit(EXIT_INPUT, "too_large", "needs 3 GiB, 2 GiB are at hand"), "too_large", GiveUp, EXIT_INPUT),
    (WorkerExit(EXIT_INTERRUPTED), "preempted", GiveUp, EXIT_INTERRUPTED),
    (WorkerExit(EXIT_INTERRUPTED, "preempted"), "preempted", GiveUp, EXIT_INTERRUPTED),
    (WorkerExit(EXIT_PEERS), "peers", Retry, None),
    (WorkerExit(EXIT_PEERS, "peers", "rank 1 is gone"), "peers", Retry, None),
    (WorkerExit(EXIT_PEERS, "rendezvous", "nobody came"), "rendezvous", GiveUp, EXIT_INTERRUPTED),
    (WorkerExit(EXIT_BUG, "endpoint", "the server is silent"), "endpoint", GiveUp, EXIT_INTERRUPTED),
    # The worker's report takes precedence over its exit code.
    (WorkerExit(-signal.SIGKILL, "data", "wrong data"), "data", GiveUp, EXIT_INPUT),
    (WorkerExit(-signal.SIGABRT, "diverged", "loss is nan"), "diverged", GiveUp, EXIT_BUG),
    (WorkerExit(0, "hardware", "gone"), "hardware", Retry, None),
]


@pytest.mark.parametrize(("end", "failure", "action", "exit_code"), TABLE)
def test_table_of_decisions(
    end: WorkerExit, failure: str, action: type[Retry] | type[GiveUp], exit_code: int | None
) -> None:
    decision = decide(end, [], RETRIES, DELAY_S)
    assert classify_exit(end) == failure
    assert type(decision) is action
    assert decision.failure == failure
    assert decision.text
    assert getattr(decision, "exit_code", None) == exit_code
    for before in ([], deaths(RETRIES)):
        stopped = decide(end, before, RETRIES, DELAY_S, stopping=True)
        assert isinstance(stopped, GiveUp)
        if action is Retry:
            assert (stopped.failure, stopped.exit_code) == ("preempted", EXIT_INTERRUPTED)
            assert "asked to stop, and the worker ended: " in stopped.text
        else:
            assert (stopped.failure, stopped.exit_code) == (failure, exit_code)


def deaths(count: int, failure: FailureClass = "killed", text: str = "killed by SIGSEGV") -> list[Retry]:
    return [Retry(failure, 0.0, text)] * count


@pytest.mark.parametrize(
    ("end", "text"),
    [
        (
            WorkerExit(EXIT_BUG, "endpoint", "silent; see to the server"),
            "silent; see to the server; run it again to resume",
        ),
        (WorkerExit(EXIT_PEERS, "rendezvous", "nobody came"), "nobody came; run it again to resume"),
        (WorkerExit(EXIT_INTERRUPTED), "stopped on request; run it again to resume"),
        (WorkerExit(0), "the worker exited with code 0 but sealed no result"),
        (WorkerExit(1, "storage", "disk full"), "disk full"),
    ],
)
def test_text_of_a_decision(end: WorkerExit, text: str) -> None:
    assert decide(end, [], RETRIES, DELAY_S).text == text


def test_the_table_has_every_class() -> None:
    assert {failure for _, failure, _, _ in TABLE} == set(get_args(FailureClass))


@pytest.mark.parametrize("end", [WorkerExit(0), WorkerExit(1, "bug", "KeyError: 'x'"), WorkerExit(3)], ids=repr)
def test_a_bug_is_tried_once_more_and_shows_itself_by_coming_back(end: WorkerExit) -> None:
    first = decide(end, [], RETRIES, DELAY_S)
    assert isinstance(first, Retry)
    again = decide(end, [Retry("bug", 0.0, first.text)], RETRIES, DELAY_S)
    assert isinstance(again, GiveUp)
    assert again.exit_code == EXIT_BUG
    assert (
        again.text
        == f"{first.text}; failed the same way after a restart; gave up after 1 restart without a new checkpoint"
    )


def test_bug_after_other_deaths_is_tried_once_more_too() -> None:
    odd = WorkerExit(1, "bug", "odd")
    assert isinstance(decide(odd, deaths(2), RETRIES, DELAY_S), Retry)
    assert isinstance(decide(odd, [*deaths(1), Retry("bug", 0.0, "odd")], RETRIES, DELAY_S), GiveUp)
    assert isinstance(decide(WorkerExit(-11), [*deaths(1), Retry("bug", 0.0, "odd")], RETRIES, DELAY_S), Retry)
    for end in (odd, WorkerExit(-9), WorkerExit(1, "storage", "full")):
        decision = decide(end, [], 0, DELAY_S)
        assert isinstance(decision, GiveUp)
        assert "no restart is allowed (machine.max_restarts: 0)" in decision.text


def test_that_others_are_gone_counts_as_nobodys_failure_but_not_for_ever() -> None:
    lost = WorkerExit(EXIT_PEERS, "peers", "rank 1 is gone")
    for count in (RETRIES, MAX_PEERS_RESTARTS - 1):
        again = decide(lost, deaths(count, "peers"), RETRIES, DELAY_S)
        assert isinstance(again, Retry)
        assert again.delay_s == DELAY_S
    assert isinstance(decide(WorkerExit(-9), deaths(RETRIES, "peers"), RETRIES, DELAY_S), Retry)
    assert isinstance(decide(WorkerExit(-9), [*deaths(RETRIES, "peers"), *deaths(RETRIES)], RETRIES, DELAY_S), GiveUp)
    for failure in ("killed", "peers"):
        assert isinstance(decide(lost, deaths(MAX_PEERS_RESTARTS, failure), RETRIES, DELAY_S), GiveUp)


@pytest.mark.parametrize(
    ("failed_s", "window_s", "expected_s"),
    [([100.0], 60.0, 0.0), ([50.0, 100.0], 60.0, 60.0), ([39.0, 100.0], 60.0, 0.0), ([99.0, 100.0], 0.0, 0.0)],
)
def test_a_machine_that_fails_twice_quickly_stays_away(
    failed_s: list[float], window_s: float, expected_s: float
) -> None:
    assert compute_exclusion_s(failed_s, 100.0, window_s) == expected_s


@pytest.mark.parametrize(
    ("before", "first_s", "delay_s"),
    [(0, 1.0, 1.0), (1, 1.0, 2.0), (2, 1.0, 4.0), (5, 1.0, 32.0), (6, 1.0, 60.0), (7, 1.0, 60.0), (5000, 1.0, 60.0),
     (4, 0.0, 0.0)],
)  # fmt: skip
def test_each_death_without_progress_doubles_the_wait_up_to_a_minute(
    before: int, first_s: float, delay_s: float
) -> None:
    decision = decide(WorkerExit(-signal.SIGKILL), deaths(before), 10_000, first_s)
    assert isinstance(decision, Retry)
    assert decision.delay_s == delay_s


@pytest.mark.parametrize("failure", ["killed", "hardware", "storage", "stalled"])
@pytest.mark.parametrize("retries", [1, 3])
def test_it_gives_up_after_so_many_restarts_without_a_checkpoint(retries: int, failure: FailureClass) -> None:
    end = WorkerExit(-signal.SIGKILL, failure, "gone")
    decisions = [decide(end, deaths(n, failure, "gone"), retries, DELAY_S) for n in range(retries + 2)]
    assert [type(d) for d in decisions] == [Retry] * retries + [GiveUp] * 2
    last = decisions[retries]
    assert isinstance(last, GiveUp)
    assert last.exit_code == EXIT_BUG
    assert f"gave up after {retries} restart" in last.text
    assert "failed the same way after a restart" in last.text


def test_a_system_that_is_short_of_memory_is_tried_again_and_given_up_like_other_kills() -> None:
    end = WorkerExit(-signal.SIGKILL, oom_kills=2)
    assert "while the system ran out of memory; lower machine.micro_batch_size" in decide(end, [], 1, DELAY_S).text
    assert isinstance(decide(end, deaths(1), 1, DELAY_S), GiveUp)


def test_different_causes_are_all_named_and_those_that_differ_in_numbers_alone_are_one() -> None:
    before = [
        Retry("killed", 0.0, "killed by SIGSEGV"),
        Retry("storage", 0.0, "disk full"),
        Retry("killed", 0.0, "killed by SIGSEGV"),
    ]
    text = decide(WorkerExit(1, "hardware", "bus error"), before, 3, DELAY_S).text
    assert text == (
        "bus error; gave up after 3 restarts without a new checkpoint; earlier causes: killed by SIGSEGV; disk full"
    )
    before = [Retry("stalled", 0.0, f"no heartbeat for {age} s in phase step") for age in ("3.01", "12", "3.2")]
    text = decide(WorkerExit(-9, "stalled", "no heartbeat for 3.5 s in phase step"), before, 3, DELAY_S).text
    assert "failed the same way after a restart; gave up after 3 restarts" in text
    assert "before that" not in text


def test_a_stop_on_request_is_none_of_the_deaths() -> None:
    decision = decide(WorkerExit(EXIT_INTERRUPTED), deaths(RETRIES + 5), RETRIES, DELAY_S)
    assert isinstance(decision, GiveUp)
    assert (decision.failure, decision.exit_code) == ("preempted", EXIT_INTERRUPTED)


@pytest.mark.parametrize(
    ("end", "says"),
    [
        (WorkerExit(-signal.SIGKILL), "SIGKILL (by a person, a scheduler, or a system short of memory"),
        (WorkerExit(-signal.SIGSEGV), "SIGSEGV"),
        (WorkerExit(-(signal.SIGRTMIN + 3)), f"signal {signal.SIGRTMIN + 3}"),
        (WorkerExit(17), "exit code 17"),
    ],
)
def test_signal_or_exit_code_is_named(end: WorkerExit, says: str) -> None:
    assert says in decide(end, [], RETRIES, DELAY_S).text


@pytest.mark.parametrize(
    "end", [WorkerExit(-signal.SIGSEGV), WorkerExit(1, "storage", "no space left on device"), WorkerExit(1)], ids=repr
)
def test_what_is_never_tried_again_ends_with_its_cause_alone(end: WorkerExit) -> None:
    first, only = decide(end, [], RETRIES, DELAY_S), decide(end, [], None, DELAY_S)
    assert isinstance(only, GiveUp)
    assert (only.failure, only.exit_code, only.text) == (first.failure, EXIT_BUG, first.text)
    assert "machine.max_restarts" not in only.text
