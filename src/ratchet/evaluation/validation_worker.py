"""Entry of the scoring process: `python -m ratchet.evaluation.validation_worker PROJECT LAUNCH [PARENT_PID]`.

Scores adapters of finished runs on validation rows, never on test rows. LAUNCH is a HeldOutLaunch as JSON; answers are
left in the run directories (records_held_out.path_in), complete or not at all. The exit code is the command line's; of
a failure the last line on stderr says `class of ratchet.errors: why`. With PARENT_PID it does not outlive that process.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from ratchet.errors import EXIT_INTERRUPTED, EXIT_OK, InterruptedRunError, RatchetError
from ratchet.runs.signals import die_with_parent
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import HeldOutLaunch


def main(arguments: list[str]) -> int:
    """Score, and say of each run what came of it. Light until its life is tied to its parent's: torch takes seconds."""
    if len(arguments) > 2:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != int(arguments[2]):  # it died before we asked
            return EXIT_INTERRUPTED
    signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        launch = HeldOutLaunch.model_validate_json(arguments[1])
        from ratchet.evaluation import validation_scoring

        for found in validation_scoring.score_runs(ProjectLayout(Path(arguments[0])), launch):
            figures = ", ".join(f"{name} {value:.4f}" for name, value in found.figures.items())
            print(f"run {found.run_id}: {figures} ({len(found.ids)} rows)", flush=True)
    except KeyboardInterrupt:
        return _report_error(InterruptedRunError("stopped; nothing half-written is left, repeat it"))
    except RatchetError as error:
        return _report_error(error)
    return EXIT_OK


def _report_error(error: RatchetError) -> int:
    print(f"{type(error).__name__}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return error.exit_code


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    for deaf in (signal.SIGTERM, signal.SIGINT):  # one request is enough: another would break off the tidying up
        signal.signal(deaf, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
