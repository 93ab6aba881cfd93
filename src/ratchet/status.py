"""`ratchet status`: where a run stands. Imports neither torch nor MLflow."""

from ratchet.layout import Layout
from ratchet.records_gate import read_champion
from ratchet.run import directory
from ratchet.run import status as journal


def status(layout: Layout, run: str | None) -> str:
    """The verb.

    Args:
        layout: the project.
        run: run id, or its beginning; None: the latest.

    Raises:
        DataError: no such run, or several.
        DamagedError: it is of a newer version.
    """
    paths = directory.newest(layout.runs) if run is None else directory.named(layout.runs, run)
    if paths is None:
        return "no run yet; `dvc repro` starts one"
    lines = [journal.describe(paths)]
    if champion := read_champion(layout.champion).champion:
        forced = champion.forced
        note = f"; FORCED by {forced.by} against {forced.decision}: {forced.reason}" if forced else ""
        whose = f"model {champion.model_digest[:12]}, run {champion.run_id}"
        lines.append(f"champion: version {champion.version}, {whose}{note}")
    return "\n".join(lines)
