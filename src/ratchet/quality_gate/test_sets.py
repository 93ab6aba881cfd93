"""Records in experiments/test_set_uses.jsonl how test sets grow, and which models were evaluated and judged on them.

Choosing among many models by the same test rows overfits to these rows: the best of 30 models on 300 rows looks some
points better than it is. So every evaluated model is counted. A test set that grows stays the same test set: its
earlier rows come first, in the order that was fixed when they were added, and models evaluated on them still count. If
rows are missing or replaced, it is another test set.

Lines that were removed would hide uses. So the file is compared with the verdicts of promoted models, which have the
test set and the number of models at that time.
"""

import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ratchet.config import units
from ratchet.errors import DamagedFileError, DataError
from ratchet.storage import digests, files
from ratchet.storage.actors import current_actor
from ratchet.storage.digests import SHORT
from ratchet.storage.files import FileLock
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records import base
from ratchet.storage.records.gate import TestSetRows, TestSetUse, Verdict, read_champion

LOCK_WAIT_S = 60.0
"""Maximum wait for the lock of the file."""
MAX_MODELS_SHOWN = 3
"""Number of models that a message lists; the message counts the rest."""

Line = TestSetUse | TestSetRows
Ids = Mapping[str, Sequence[str]]
"""Ids of samples by harness task; those of the test rows are under TEST_ROWS."""
TEST_ROWS = ""


@dataclass(frozen=True)
class TestSet:
    """A test set as it is now: its additions, oldest first."""

    __test__ = False
    additions: tuple[TestSetRows, ...]

    @property
    def digests(self) -> frozenset[str]:
        """Digests of this test set, now and when it was smaller."""
        return frozenset(addition.digest for addition in self.additions)

    @cached_property
    def places(self) -> dict[tuple[str, str], tuple[int, int]]:
        """Place of each sample, by task (or TEST_ROWS) and id.

        A place is the number of samples of the task after the addition that brought this sample, and its number among
        them. Within an addition, test rows are ordered by id, which is a digest of their content, and documents by a
        digest of theirs.
        """
        places: dict[tuple[str, str], tuple[int, int]] = {}
        known: dict[str, int] = {}
        for addition in self.additions:
            for task, added in ({TEST_ROWS: addition.rows} | dict(addition.tasks)).items():
                begin = known.get(task, 0)
                known[task] = begin + len(added)
                in_order = sorted(added, key=lambda id: id if task == TEST_ROWS else digests.hash_json([task, id]))
                places |= {(task, id): (known[task], begin + number) for number, id in enumerate(in_order)}
        return places

    def ids(self) -> dict[str, list[str]]:
        """Return the ids of all samples, by task."""
        ids: dict[str, list[str]] = {}
        for addition in self.additions:
            for task, added in ({TEST_ROWS: addition.rows} | dict(addition.tasks)).items():
                ids.setdefault(task, []).extend(added)
        return ids


def compute_digest(ids: Ids) -> str:
    """Compute the digest of a test set: ids of the test rows, and document ids of each harness task."""
    tasks = {task: sorted(found) for task, found in ids.items() if task != TEST_ROWS}
    return digests.hash_json({"rows": sorted(ids.get(TEST_ROWS, ())), "tasks": tasks})


def register_test_set(layout: ProjectLayout, ids: Ids) -> str:
    """Record the rows of a test set: a new one, or those that were added to an earlier one.

    Returns:
        A note if rows of the test set before are missing, so that this is another one; else an empty text.

    Raises:
        DamagedFileError: A line of the file is invalid, or recorded rows do not have the recorded digest; nothing is
            written.
        LockHeldError: Another process held the lock of the file for LOCK_WAIT_S.
    """
    digest, note = compute_digest(ids), ""
    with _lock(layout):
        lines = read_lines(layout)
        if _find(lines, digest, layout):
            return ""
        earlier = _find_part(lines, ids, layout)
        if earlier is None and (before := next(_iterate_test_sets(lines, layout), None)):
            missing = sum(len({*known} - {*ids.get(task, ())}) for task, known in before.ids().items())
            note = (
                f"{missing} of {sum(map(len, before.ids().values()))} samples of the test set before are missing, so "
                "this is another test set: evidence and count of models begin again"
            )
        known = earlier.ids() if earlier else {}
        added = {task: sorted({*found} - {*known.get(task, ())}) for task, found in ids.items()}
        line = TestSetRows(
            digest=digest,
            previous=earlier.additions[-1].digest if earlier else None,
            rows=tuple(added.pop(TEST_ROWS, ())),
            tasks={task: tuple(found) for task, found in added.items() if found or task not in known},
        )
        _append(layout, *(earlier.additions if earlier else ()), line)
    return note


def sort_rows(layout: ProjectLayout, ids: Sequence[str]) -> list[str]:
    """Sort test rows: those of the newest test set that has no other rows in its order, then the others by id."""
    earlier = _find_part(read_lines(layout), {TEST_ROWS: ids}, layout, tasks=(TEST_ROWS,))
    places = earlier.places if earlier else {}
    return sorted(ids, key=lambda id: (places.get((TEST_ROWS, id), (0, len(places)))[1], id))


def _find_part(
    lines: Sequence[Line], ids: Ids, layout: ProjectLayout, tasks: Sequence[str] | None = None
) -> TestSet | None:
    """Find the newest test set with samples that are all among these, as far as they belong to these tasks."""
    for test_set in _iterate_test_sets(lines, layout):
        known = test_set.ids()
        if all({*known[task]} <= {*ids.get(task, ())} for task in (known if tasks is None else tasks) if task in known):
            return test_set
    return None


def _iterate_test_sets(lines: Sequence[Line], layout: ProjectLayout) -> Iterator[TestSet]:
    """Iterate over the recorded test sets, the newest first."""
    for line in reversed(lines):
        if isinstance(line, TestSetRows) and (test_set := _find(lines, line.digest, layout)):
            yield test_set


def read_test_set(layout: ProjectLayout, digest: str) -> TestSet | None:
    """Read the test set with this digest; None if its rows are not recorded.

    Raises:
        DamagedFileError: A line of the file is invalid, or the recorded rows do not have the recorded digest.
    """
    return _find(read_lines(layout), digest, layout)


def _find(lines: Sequence[Line], digest: str, layout: ProjectLayout) -> TestSet | None:
    """Collect the additions up to this digest, and verify their digests. None if some are not recorded here."""
    by_digest = {line.digest: line for line in reversed(lines) if isinstance(line, TestSetRows)}
    additions: list[TestSetRows] = []
    name: str | None = digest
    while name is not None:
        if (addition := by_digest.pop(name, None)) is None:
            return None
        additions.insert(0, addition)
        name = addition.previous
    for count in range(1, len(additions) + 1):
        if compute_digest(TestSet(tuple(additions[:count])).ids()) != additions[count - 1].digest:
            raise DamagedFileError(
                f"{layout.test_set_uses}: the rows of test set {additions[count - 1].digest[:12]} do not have this "
                "digest; restore the file from git"
            )
    return TestSet(tuple(additions))


def record_test_set_use(layout: ProjectLayout, test_set_digest: str, model: str, run_id: str) -> None:
    """Record that a model was evaluated on a test set. Recording the same use again changes nothing.

    Args:
        layout: The project.
        test_set_digest: Digest of the test rows and harness documents (EvaluationReport.test_set_digest).
        model: Adapter digest.
        run_id: Training run of the model.

    Raises:
        DamagedFileError: A line of the file is invalid; nothing is written.
        LockHeldError: Another process held the lock of the file for LOCK_WAIT_S.
    """
    with _lock(layout):
        _append(layout, TestSetUse(test_set_digest=test_set_digest, model=model, run_id=run_id))


def record_verdict(layout: ProjectLayout, verdict: Verdict) -> None:
    """Record the rules and the decision of a verdict, so that a later change of a margin is visible.

    Raises the same errors as `record_test_set_use`.
    """
    use = TestSetUse(
        test_set_digest=verdict.test_set_digest,
        model=verdict.adapter_digest,
        run_id=verdict.run_id,
        rules=verdict.rules,
        decision=verdict.decision,
    )
    with _lock(layout):
        _append(layout, use)


def _lock(layout: ProjectLayout) -> FileLock:
    return FileLock(layout.test_set_uses_lock, f"{layout.test_set_uses}").acquire(LOCK_WAIT_S)


def _append(layout: ProjectLayout, *lines: Line) -> None:
    """Add lines that the file lacks, and those by experiments. All experiments share the lock."""

    def add(path: Path, new: Sequence[Line]) -> None:
        known = _read_file(path)
        known_keys = set(map(_key, known))
        missing = {_key(entry): entry for entry in new if _key(entry) not in known_keys}
        if missing:
            rows = (
                entry.model_dump(mode="json", exclude={"format"}, exclude_none=True)
                for entry in (*known, *missing.values())
            )
            files.write_atomic(path, "".join(map(base.to_json_line, rows)))

    add(layout.test_set_uses, [*_read_file(layout.experiment_uses), *lines])
    if layout.is_temporary:
        add(layout.experiment_uses, lines)


def _key(line: Line) -> tuple[str | None, ...]:
    if isinstance(line, TestSetRows):
        return (line.digest,)
    return line.test_set_digest, line.model, line.rules, line.decision


def count_models(layout: ProjectLayout, test_set_digest: str, model: str) -> int:
    """Count the different models evaluated on this test set; `model` counts even if its use is not recorded.

    Models of which stored verdicts prove that they were evaluated on it count too.
    """
    return compare_uses(layout, test_set_digest, model).proven


@dataclass(frozen=True)
class UsesComparison:
    """Number of models that were evaluated on a test set, by two sources."""

    recorded: int
    """Number according to experiments/test_set_uses.jsonl."""
    known: int
    """Number of models that this file or a verdict of a promoted model names, the model in question included."""
    proven: int
    """Smallest number that agrees with that file and with the verdicts of promoted models, the model in question
    included."""
    witnesses: tuple[str, ...] = ()
    """Model digests of models that this person promoted, with verdicts that do not agree with the file. What others
    promoted may have been evaluated in another clone, so it only counts."""

    def describe_missing_lines(self, layout: ProjectLayout) -> str | None:
        """Describe that lines of the file are missing, and what to do; None if the file agrees with all verdicts."""
        if not self.witnesses:
            return None
        path = layout.test_set_uses.relative_to(layout.root).as_posix()
        hidden = len(self.witnesses) - MAX_MODELS_SHOWN
        shown = ", ".join(digest[:SHORT] for digest in self.witnesses[:MAX_MODELS_SHOWN])
        shown += f" and {hidden} more" if hidden > 0 else ""
        proof = f"the verdict of the promoted model {shown} proves"
        if len(self.witnesses) > 1:
            proof = f"the verdicts of the promoted models {shown} prove"
        remedy = f"HEAD lacks them too: see `git log -p -- {path}`, or pull the commit that has them"
        if lost := _count_lines_only_in_git(layout):
            remedy = f"HEAD has {units.format_count(lost, 'line')} that the file lacks: copy them from `git show HEAD:"
            remedy += f"{path}`"
        return (
            f"{path}: has lines about {units.format_count(self.recorded, 'model')} of this test set, but {proof} at "
            f"least {self.proven}, so lines are missing; {remedy}, and run `dvc repro -f gate`"
        )


def compare_uses(layout: ProjectLayout, test_set_digest: str, model: str) -> UsesComparison:
    """Compare the recorded uses of a test set with the verdicts of the models that this project promoted.

    A promoted model was evaluated, and its verdict has the test set and the number of models at that time. If neither
    the use of this model nor the rows of its test set are recorded, its test set may have been this one before it grew,
    so it counts.

    Args:
        layout: The project.
        test_set_digest: The test set.
        model: Adapter digest of a model that counts even if its use is not recorded.
    """
    lines = read_lines(layout)
    test_set = _find(lines, test_set_digest, layout)
    names = test_set.digests if test_set else {test_set_digest}
    known = {line.digest for line in lines if isinstance(line, TestSetRows)}
    uses = {(line.test_set_digest, line.model) for line in lines if isinstance(line, TestSetUse)}
    recorded = {used for digest, used in uses if digest in names}
    found = [
        (verdict, is_own, (verdict.test_set_digest, verdict.adapter_digest) in uses)
        for verdict, is_own in _read_promoted_verdicts(layout)
        if verdict.test_set_digest in names
        or not (verdict.test_set_digest in known or (verdict.test_set_digest, verdict.adapter_digest) in uses)
    ]
    proven = recorded | {model} | {verdict.adapter_digest for verdict, _, _ in found}
    numbers = {v.model_digest: v.test_set_uses if v.test_set_digest in names else 0 for v, _, _ in found}
    # A number may include models that others promoted, which have no lines here.
    witnesses = tuple(
        verdict.model_digest
        for verdict, is_own, is_recorded in found
        if is_own and (not is_recorded or numbers[verdict.model_digest] > len(proven))
    )
    return UsesComparison(len(recorded), len(proven), max(len(proven), *numbers.values(), 0), witnesses)


def _read_promoted_verdicts(layout: ProjectLayout) -> Iterator[tuple[Verdict, bool]]:
    """Iterate over the verdicts of the models that this project promoted, as far as they are on this machine, and
    whether this person promoted the model.

    What is unreadable is skipped, because `ratchet verify` and `ratchet audit` report it.
    """
    promoted: dict[str, bool] = {}
    with suppress(DamagedFileError):
        file = read_champion(layout.champion)
        promoted |= {one.model_digest: True for one in (file.champion, file.anchor, *file.previous) if one is not None}
    actor = current_actor(layout.root)
    with suppress(DamagedFileError, KeyError, TypeError):
        promoted |= {
            str(line["model_digest"]): line["actor"] == actor
            for line in base.read_lines(layout.promotions)
            if line["action"] == "promote"
        }
    for model_digest, is_own in promoted.items():
        with suppress(DamagedFileError, DataError, OSError):
            verdict = Verdict.load(layout.promoted_model(model_digest) / "verdict.json")
            if verdict.test_set_digest:  # verdicts of the first versions have none
                yield verdict, is_own


def _count_lines_only_in_git(layout: ProjectLayout) -> int:
    """Count the lines that the newest commit has and the file lacks; 0 without git."""
    name = layout.test_set_uses.relative_to(layout.root).as_posix()
    command = ["git", "-C", str(layout.root), "show", f"HEAD:./{name}"]
    try:
        committed = subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return 0
    present = layout.test_set_uses.read_bytes() if layout.test_set_uses.exists() else b""
    return len({*committed.splitlines()} - {*present.splitlines()})


def read_model_number(layout: ProjectLayout, test_set_digest: str, model: str) -> int:
    """Return the number of this model among those evaluated on this test set, from 1, in the order of their first
    evaluation."""
    models = list(dict.fromkeys(use.model for use in read_uses_of(layout, test_set_digest)))
    return (models.index(model) if model in models else len(models)) + 1


def read_uses_of(layout: ProjectLayout, test_set_digest: str) -> list[TestSetUse]:
    """Read the uses of a test set, those when it was smaller included."""
    lines = read_lines(layout)
    test_set = _find(lines, test_set_digest, layout)
    names = test_set.digests if test_set else {test_set_digest}
    return [line for line in lines if isinstance(line, TestSetUse) and line.test_set_digest in names]


def read_test_set_uses(layout: ProjectLayout) -> list[TestSetUse]:
    """Read all uses, those by experiments in temporary workspaces included.

    Raises DamagedFileError with the number of an invalid line.
    """
    return [line for line in read_lines(layout) if isinstance(line, TestSetUse)]


def read_lines(layout: ProjectLayout) -> list[Line]:
    """Read the lines of the file, and those by experiments in temporary workspaces that it lacks."""
    lines = _read_file(layout.test_set_uses)
    return [*lines, *(line for line in _read_file(layout.experiment_uses) if line not in lines)]


def _read_file(path: Path) -> list[Line]:
    """Read the lines of a file, oldest first; empty without a file."""
    if not path.exists():
        return []
    lines: list[Line] = []
    for number, text in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            row = json.loads(text)
            lines.append((TestSetRows if "rows" in row and "tasks" in row else TestSetUse).model_validate(row))
        except (ValueError, TypeError):
            raise DamagedFileError(
                f"{path}:{number}: not a test set use (found {text[:60].decode(errors='replace')!r}); "
                "restore the file from git, or remove this line"
            ) from None
    return lines
