"""Entry point of the worker process of a generation."""

import sys

from ratchet.inference.spec import GenerationStart
from ratchet.training import worker_main


def _import_worker() -> worker_main.Work:
    from ratchet.inference.worker import run_worker

    return run_worker


if __name__ == "__main__":
    sys.exit(worker_main.main(sys.argv[1:], GenerationStart, _import_worker))
