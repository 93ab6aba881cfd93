"""Sets by which models are chosen (sweeps, validation): what they share with the gate's set has been fitted to already.

The best of 30 trials on 300 rows seems some points better on these rows than it is; so a gate set must share none.
"""

from collections.abc import Iterable, Sequence

from ratchet.layout import Layout
from ratchet.records_evaluation import Objective


def shared(
    layout: Layout, ids: Iterable[str], tasks: Iterable[str], further: Sequence[Objective] = ()
) -> dict[str, int]:
    """How many of these rows and tasks belong to a set by which models are chosen, by the name of the set.

    Args:
        layout: the project; its experiments/objectives are read.
        ids: test rows.
        tasks: harness tasks, by name.
        further: sets that are not written there.

    Raises:
        DamagedError: a file there is no such set.
    """
    sets = [*further, *(Objective.load(path) for path in sorted(layout.objectives.glob("*.json")))]
    rows, names = set(ids), set(tasks)
    found = {one.name: len(rows & set(one.sample_ids)) + len(names & set(one.tasks)) for one in sets}
    return {name: count for name, count in found.items() if count}
