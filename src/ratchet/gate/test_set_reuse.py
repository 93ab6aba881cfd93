"""Models whose scores on a gate set were seen: each look makes the set say a little less about the next model.

Choosing among many models by the same test rows fits them to these rows: the best of 30 on 300 rows seems some points
better than it is. So looks are counted, and the gate holds when there were too many (gate.lookups).
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from ratchet.errors import DamagedFileError
from ratchet.storage import files
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.locks import FileLock
from ratchet.storage.records import base
from ratchet.storage.records.evaluation import ObjectiveSet
from ratchet.storage.records.gate import Decision, GateSetLookup, Verdict

LOCK_WAIT_S = 60.0


def record_look(layout: ProjectLayout, gate_set: str, model: str, run_id: str) -> None:
    """Write down that this model's scores on this gate set were seen; saying it again changes nothing.

    Args:
        layout: the project.
        gate_set: fingerprint of the test rows and harness documents (EvalReport.gate_set).
        model: adapter digest.
        run_id: of its training.

    Raises:
        DamagedFileError: a line of the file cannot be read; nothing is written.
        LockHeldError: another process has been writing it for a minute.
    """
    _append_look(layout, GateSetLookup(gate_set=gate_set, model=model, run_id=run_id))


def record_verdict(layout: ProjectLayout, verdict: Verdict) -> None:
    """Write down by which rules a model was judged, and how: a margin that is changed afterwards leaves a trace.

    Raises like `record_look`.
    """
    _append_look(
        layout,
        GateSetLookup(
            gate_set=verdict.gate_set,
            model=verdict.adapter_digest,
            run_id=verdict.run_id,
            rules=verdict.rules,
            decision=verdict.decision,
        ),
    )


def _append_look(layout: ProjectLayout, added: GateSetLookup) -> None:
    with FileLock(layout.stage_lock("lookups"), f"{layout.lookups}").acquire(LOCK_WAIT_S):
        known = read_looks(layout.lookups)
        if any(_look_key(one) == _look_key(added) for one in known):
            return
        dumped = (one.model_dump(mode="json", exclude={"format"}, exclude_none=True) for one in (*known, added))
        files.write_atomic(layout.lookups, "".join(map(base.to_json_line, dumped)))


def _look_key(one: GateSetLookup) -> tuple[str, str, str | None, str | None]:
    return one.gate_set, one.model, one.rules, one.decision


def list_earlier_decisions(layout: ProjectLayout, gate_set: str, model: str, rules: str) -> tuple[Decision, ...]:
    """What the gate said of this model on this gate set under other rules, oldest first."""
    return tuple(
        one.decision
        for one in read_looks(layout.lookups)
        if (one.gate_set, one.model) == (gate_set, model) and one.decision and one.rules != rules
    )


def count_models(layout: ProjectLayout, gate_set: str, model: str) -> int:
    """Different models that were looked at with this gate set, `model` counted in any case."""
    return len({one.model for one in read_looks(layout.lookups) if one.gate_set == gate_set} | {model})


def read_looks(path: Path) -> list[GateSetLookup]:
    """All look-ups, oldest first; none where there is no file. Raises DamagedFileError naming the line that is none."""
    if not path.exists():
        return []
    found = []
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            found.append(GateSetLookup.model_validate(json.loads(text)))
        except ValueError:
            raise DamagedFileError(
                f"{path}:{number}: not a look-up ({text[:60].decode(errors='replace')!r}); "
                "take the file from git again, or remove this line"
            ) from None
    return found


# Sets by which models are chosen (sweeps, validation): what they share with the gate's set has been fitted to already.
#
# The best of 30 trials on 300 rows seems some points better on these rows than it is; so a gate set must share none.


def count_overlaps(
    layout: ProjectLayout, ids: Iterable[str], tasks: Iterable[str], further: Sequence[ObjectiveSet] = ()
) -> dict[str, int]:
    """How many of these rows and tasks belong to a set by which models are chosen, by the name of the set.

    Args:
        layout: the project; its experiments/objectives are read.
        ids: test rows.
        tasks: harness tasks, by name.
        further: sets that are not written there.

    Raises:
        DamagedFileError: a file there is no such set.
    """
    sets = [*further, *(ObjectiveSet.load(path) for path in sorted(layout.objectives.glob("*.json")))]
    rows, names = set(ids), set(tasks)
    found = {one.name: len(rows & set(one.sample_ids)) + len(names & set(one.tasks)) for one in sets}
    return {name: count for name, count in found.items() if count}
