"""Entry of a generating process: as training/start.py, of which it is the other half."""

import sys

from ratchet.generating.spec import GenerationStart
from ratchet.training import start


def _generating() -> start.Work:
    from ratchet.generating.worker import work

    return work


if __name__ == "__main__":
    sys.exit(start.main(sys.argv[1:], GenerationStart, _generating))
