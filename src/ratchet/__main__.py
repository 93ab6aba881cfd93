"""`python -m ratchet` is `ratchet`."""

import sys

from ratchet.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
