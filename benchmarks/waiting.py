"""Measures the time that a user waits, except for training: commands, `dvc repro`, start of a run, monitoring.

    pip install -c constraints.txt -e .
    python benchmarks/waiting.py [--quick] [--json FILE] [--only PART]

Targets: `ratchet --help` within 0.3 s; `ratchet status` within 0.5 s, also with 100,000 events; at least half the time
of a `dvc repro` without work is DVC's own; supervisor and journal take at most 1 % of the time at 20 steps per second;
the first step comes in half the time of Ratchet's first version, which git provides (waiting_start.py).
"""

import argparse
import tempfile
from pathlib import Path

from report import finish
from waiting_commands import rows_of_commands
from waiting_overhead import rows_of_overhead
from waiting_start import rows_of_start


def main() -> int:
    """Run the benchmark. The exit code is 0 if all targets are met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, about three minutes")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--only", choices=("commands", "start", "overhead"), help="run only this part")
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
