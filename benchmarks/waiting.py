"""Measures everything but training that a user waits for: commands, `dvc repro`, start of a run, monitoring.

    pip install -c constraints.txt -e .
    python benchmarks/waiting.py [--quick] [--json FILE]

Targets: `ratchet --help` within .3 s, `ratchet status` within .5 s, also with 100,000 events; most of a `dvc repro`
that has nothing to do is DVC's own; supervisor and journal take no more than 1 % of the time at 20 steps a second; the
first step comes in half of the time that the first version took (which git is asked for; waiting_start.py).
"""

import argparse
import tempfile
from pathlib import Path

from report import finish
from waiting_commands import rows_of_commands
from waiting_overhead import rows_of_overhead
from waiting_start import rows_of_start


def main() -> int:
    """Run it; 0 if all targets are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, about three minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--only", choices=("commands", "start", "overhead"), help="one part of it")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="ratchet-waiting-") as folder:
        scratch = Path(folder)
        if options.only in (None, "commands"):
            rows += rows_of_commands(scratch, rounds=3 if options.quick else 9)
        if options.only in (None, "start"):
            rows += rows_of_start(scratch, rounds=3 if options.quick else 7)
        if options.only in (None, "overhead"):
            rows += rows_of_overhead(scratch, rounds=1 if options.quick else 3, seconds=10.0)
    return finish(rows, options.json)


if __name__ == "__main__":
    raise SystemExit(main())
