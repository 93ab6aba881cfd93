"""Rules about what the model costs where it is used."""

import math
from typing import Literal

from ratchet.config_gate import Budget
from ratchet.gating.matching import IncomparableError
from ratchet.gating.rules import Case
from ratchet.records_gate import Reason


def budget(case: Case, rule: Budget) -> Reason:
    """Size of the export, or what answering costs: as exported, where that was measured."""
    costs = case.evidence.report.costs
    cost = costs.get("merged") or costs.get("candidate")
    if rule.of == "size":
        measured: float = case.evidence.bundle.size_bytes
        shown, allowed = f"the export has {_size(measured)}", _size(rule.at_most)
    elif cost is None:
        raise IncomparableError(f"{rule.of} was not measured; set evaluate.latency_rows above 0 and evaluate again")
    elif rule.of == "latency":
        measured = cost.latency_s
        shown, allowed = f"an answer takes {measured:.3g} s ({cost.rows} prompts, {cost.device})", f"{rule.at_most:g} s"
    else:
        measured = cost.memory_bytes
        shown, allowed = f"answering takes {_size(measured)} of memory ({cost.device})", _size(rule.at_most)
    if not math.isfinite(measured):
        raise IncomparableError(f"{rule.of} is {measured}, not a finite number")
    outcome: Literal["pass", "fail"] = "pass" if measured <= rule.at_most else "fail"
    return Reason(rule=rule.rule, metric=rule.of, outcome=outcome, text=f"{shown}; allowed is {allowed}")


def _size(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.4g} {unit}"
    return f"{count:g} bytes"
