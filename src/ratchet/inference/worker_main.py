"""Entry point of the worker process of a generation."""

import sys

from ratchet.inference.spec import GenerationStart
from ratchet.training import worker_main


def _import_worker() -> worker_main.Work:
    from ratchet.inference.worker import run_worker

    return run_worker


def main(arguments: list[str]) -> int:
    """Generate the answers of a run (see `training.worker_main.run_process`)."""
    return worker_main.run_process(arguments, GenerationStart, _import_worker)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
