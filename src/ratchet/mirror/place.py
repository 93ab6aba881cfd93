"""Which mirror, and which run in it, somebody means on a command line."""

from ratchet.config import Machine
from ratchet.errors import SettingsError
from ratchet.mirror import survey
from ratchet.mirror.store import Store, Terms
from ratchet.run import directory

PATIENCE_S = 30.0
"""Of somebody who waits for an answer."""
OPTION = "--mirror"


def meant(machine: Machine, words: str | bool, run: str | None) -> tuple[Store, str | None]:
    """The mirror, opened, and what was said of a run in it. `--mirror RUN` is a run in the project's own mirror.

    Args:
        machine: names the project's mirror.
        words: what followed the option; True: nothing did.
        run: named beside it.

    Raises:
        SettingsError: no mirror is named anywhere, or it cannot be opened.
    """
    url = None if isinstance(words, bool) else words
    if url is not None and run is None and "/" not in url:
        url, run = None, url
    url = url or machine.mirror
    if url is None:
        meant = f" {run}: is taken for a run, since no / is in it; in which mirror" if run else ": which one"
        raise SettingsError(
            f"{OPTION}{meant}? Set machine.mirror, or name it: {OPTION} s3://BUCKET/PREFIX, {OPTION} /FOLDER"
        )
    return Store(url, Terms(patience_s=PATIENCE_S), lambda: False), run


def named(store: Store, prefix: str) -> str:
    """The one run in a mirror whose id begins so.

    Raises:
        DataError: there is none, or more than one.
        MirrorError: the mirror cannot be reached.
    """
    return directory.one_of(survey.runs(store), prefix, "the mirror")
