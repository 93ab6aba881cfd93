"""Whether a verdict on file is still what the gate says: rules, look-ups or tasks may have changed since."""

from collections.abc import Mapping

from ratchet.config import Settings
from ratchet.errors import GateError
from ratchet.gating import evidence as reading
from ratchet.gating.judgement import judge
from ratchet.layout import Layout
from ratchet.records_gate import Reason, Verdict


def confirm(layout: Layout, settings: Settings, tasks_now: Mapping[str, str], verdict: Verdict) -> None:
    """Judge once more, which costs a second, and refuse a verdict that is not the same any more.

    Args:
        layout: the project.
        settings: as they are now.
        tasks_now: fingerprints of the local harness tasks (data.tasks.fingerprints).
        verdict: that on file.

    Raises:
        GateError: another decision, or other findings, than those on file.
        DataError, DamagedError: what it was judged by is gone or damaged.
    """
    now = judge(reading.read(layout, settings, tasks_now), settings.gate)
    if now.decision == verdict.decision and _findings(now) == _findings(verdict):
        return
    changed = next((one for one in now.reasons if _finding(one) not in _findings(verdict)), None)
    found = f" ({changed.rule}: {changed.text})" if changed else ""
    raise GateError(
        f"{layout.verdict}: says {verdict.decision}, but by the rules, tasks and look-ups of now it is {now.decision}"
        f"{found}; run `dvc repro`, or `dvc repro -f gate` if that finds nothing to do"
    )


def _findings(verdict: Verdict) -> list[tuple[str, str, str]]:
    return [_finding(one) for one in verdict.reasons]


def _finding(reason: Reason) -> tuple[str, str, str]:
    # Not the words: they name look-ups, which go on, and thresholds, whose finding may be the same.
    return reason.rule, reason.metric, reason.outcome
