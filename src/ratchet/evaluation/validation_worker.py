"""Process that scores adapters: `python -m ratchet.evaluation.validation_worker PROJECT LAUNCH [PARENT_PID]`.

The process scores the adapters of finished runs on validation rows, never on test rows. LAUNCH is a ValidationLaunch as
JSON. The scores are stored in the run directories (validation_scores_path), complete or not at all. The exit codes are
those of the command line. After a failure, the last line on stderr is `class of ratchet.errors: reason`. With
PARENT_PID, the process ends with its parent.
"""

import os
import signal
import sys
from pathlib import Path
from types import FrameType

from ratchet.config.units import format_count
from ratchet.errors import EXIT_INTERRUPTED, EXIT_OK, InterruptedRunError, RatchetError
from ratchet.runs.signals import die_with_parent
from ratchet.storage.layout import ProjectLayout
from ratchet.storage.records.evaluation import ValidationLaunch


def main(arguments: list[str]) -> int:
    """Score the runs and print one line per run.

    torch takes seconds to import, so it is imported only after the process is tied to its parent.
    """
    if len(arguments) > 2:
        die_with_parent(signal.SIGKILL)
        if os.getppid() != int(arguments[2]):  # The parent died before `die_with_parent`.
            return EXIT_INTERRUPTED
    signal.signal(signal.SIGTERM, _raise_interrupt)
    try:
        launch = ValidationLaunch.model_validate_json(arguments[1])
        from ratchet.evaluation import validation_scoring

        for scores in validation_scoring.score_runs(ProjectLayout(Path(arguments[0])), launch):
            metrics = ", ".join(f"{name} {value:.4f}" for name, value in scores.metrics.items())
            print(f"run {scores.run_id}: {metrics} ({format_count(len(scores.ids), 'row')})", flush=True)
    except (KeyboardInterrupt, RatchetError) as error:
        failure = error
        if not isinstance(failure, RatchetError):
            failure = InterruptedRunError("interrupted; stored scores are complete, run the command again")
        print(f"{type(failure).__name__}: {' '.join(str(failure).split())}", file=sys.stderr, flush=True)
        return failure.exit_code
    return EXIT_OK


def _raise_interrupt(number: int, frame: FrameType | None) -> None:
    for repeated in (signal.SIGTERM, signal.SIGINT):  # A second signal would interrupt the clean-up.
        signal.signal(repeated, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
