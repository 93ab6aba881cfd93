"""`python -m ratchet` is `ratchet`."""

import sys

from ratchet.cli.command_line import main

if __name__ == "__main__":
    sys.exit(main())
