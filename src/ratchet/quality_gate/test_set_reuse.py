"""Uses of a test set: which models were evaluated and judged on it, and overlaps with sets for model selection.

Choosing among many models by the same test rows overfits to these rows: the best of 30 models on 300 rows looks some
points better than it is. So every evaluated model is counted, and the gate holds above gate.max_test_set_uses. For the
same reason a test set must not share rows or tasks with a set by which models are selected (sweeps, validation).
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
from ratchet.storage.records.gate import Decision, TestSetUse, Verdict

LOCK_WAIT_S = 60.0


def record_test_set_use(layout: ProjectLayout, test_set_digest: str, model: str, run_id: str) -> None:
    """Record that a model was evaluated on a test set. Recording it again changes nothing.

    Args:
        layout: The project.
        test_set_digest: Digest of the test rows and harness documents (EvaluationReport.test_set_digest).
        model: Adapter digest.
        run_id: Training run of the model.

    Raises:
        DamagedFileError: A line of the file is invalid; nothing is written.
        LockHeldError: Another process held the lock of the file for a minute.
    """
    _append_use(layout, TestSetUse(test_set_digest=test_set_digest, model=model, run_id=run_id))


def record_verdict(layout: ProjectLayout, verdict: Verdict) -> None:
    """Record the rules and the decision of a verdict, so that a margin changed afterwards leaves a trace.

    Raises the same errors as `record_test_set_use`.
    """
    use = TestSetUse(
        test_set_digest=verdict.test_set_digest,
        model=verdict.adapter_digest,
        run_id=verdict.run_id,
        rules=verdict.rules,
        decision=verdict.decision,
    )
    _append_use(layout, use)


def _append_use(layout: ProjectLayout, use: TestSetUse) -> None:
    with FileLock(layout.stage_lock("test_set_uses"), f"{layout.test_set_uses}").acquire(LOCK_WAIT_S):
        uses = read_test_set_uses(layout.test_set_uses)
        if any(_use_key(known) == _use_key(use) for known in uses):
            return
        rows = (known.model_dump(mode="json", exclude={"format"}, exclude_none=True) for known in (*uses, use))
        files.write_atomic(layout.test_set_uses, "".join(map(base.to_json_line, rows)))


def _use_key(use: TestSetUse) -> tuple[str, str, str | None, str | None]:
    return use.test_set_digest, use.model, use.rules, use.decision


def list_earlier_decisions(layout: ProjectLayout, test_set_digest: str, model: str, rules: str) -> tuple[Decision, ...]:
    """List the decisions about this model on this test set under different rules, oldest first."""
    return tuple(
        use.decision
        for use in read_test_set_uses(layout.test_set_uses)
        if (use.test_set_digest, use.model) == (test_set_digest, model) and use.decision and use.rules != rules
    )


def count_models(layout: ProjectLayout, test_set_digest: str, model: str) -> int:
    """Count the different models evaluated on this test set; `model` always counts."""
    uses = read_test_set_uses(layout.test_set_uses)
    return len({use.model for use in uses if use.test_set_digest == test_set_digest} | {model})


def read_test_set_uses(path: Path) -> list[TestSetUse]:
    """Read all uses, oldest first; empty without a file. Raises DamagedFileError with the number of an invalid line."""
    if not path.exists():
        return []
    uses = []
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            uses.append(TestSetUse.model_validate(json.loads(text)))
        except ValueError:
            raise DamagedFileError(
                f"{path}:{number}: not a test set use (found {text[:60].decode(errors='replace')!r}); "
                "restore the file from git, or remove this line"
            ) from None
    return uses


def count_overlaps(
    layout: ProjectLayout, ids: Iterable[str], tasks: Iterable[str], further: Sequence[ObjectiveSet] = ()
) -> dict[str, int]:
    """Count the test rows and tasks that belong to a set for model selection, by the name of that set.

    Args:
        layout: The project; its folder experiments/objectives is read.
        ids: Test rows.
        tasks: Names of harness tasks.
        further: Sets that are not in that folder.

    Raises:
        DamagedFileError: A file in that folder is not such a set.
    """
    sets = [*further, *(ObjectiveSet.load(path) for path in sorted(layout.objectives.glob("*.json")))]
    rows, names = set(ids), set(tasks)
    counts = {one.name: len(rows & set(one.sample_ids)) + len(names & set(one.tasks)) for one in sets}
    return {name: count for name, count in counts.items() if count}
