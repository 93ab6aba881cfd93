"""`ratchet status --mirror`: where runs stand, from any machine, without their directories."""

from ratchet.config import Machine
from ratchet.mirror import place, survey


def mirrored(machine: Machine, words: str | bool, run: str | None) -> str:
    """The verb: all runs in a mirror, or one.

    Args:
        machine: settings of the project, or those of a new one.
        words: what followed `--mirror`: a URL, the beginning of a run's id, or True: nothing.
        run: the beginning of a run's id; None: all.

    Raises:
        SettingsError: there is no mirror, or none that may be used like this.
        DataError: no such run there, or several.
        MirrorError: it cannot be reached.
    """
    store, run = place.meant(machine, words, run)
    if run is not None:
        return survey.describe(store, place.named(store, run))
    return "\n".join(survey.line(store, one) for one in survey.runs(store)) or "no run in this mirror yet"
