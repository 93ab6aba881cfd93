"""Runs the fault campaign of docs/evidence_reliability.md on Ratchet, and on Hugging Face Trainer with equal inputs.

    python benchmarks/chaos.py [--quick] [--seed S] [--json FILE] [--project DIR] [--folder DIR] [--only PART ...]

Parts: `peer` (Trainer with peft under kills, damage, signals, NaN, full disks; see peer_faults.py), `damage` (crashes
inside a save, flipped bits, snapshots), `killed` (one long training with many kills: ledger, metrics, recovery),
`inside` (resume at every step, the cost of a checkpoint), `campaign` (`ratchet chaos` with a large plan). Every
schedule is drawn from the seed, which is printed and is in the JSON. The exit code is 0 only if all rows of Ratchet
meet their targets; rows of the peer are reported, not judged. Rows are named as in docs/evidence_reliability.md.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Set before torch is imported: one thread per process, and no spinning threads, because many processes share few cores.
os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}

import surroundings
from report import finish
from report_rows import at_least, at_most, count, told

from ratchet.storage.layout import ProjectLayout

PARTS = ("peer", "damage", "killed", "inside", "campaign")
STEPS = 24
"""Optimizer steps of the peer's trainings."""
PLANS = {
    True: {"sigkill": 4, "sigterm": 1, "nan": 1, "bitflip": 1},
    False: {
        "none": 2, "sigkill": 140, "supervisor": 60, "sigterm": 50, "sigstop": 2, "hang": 2, "oom": 4, "nan": 6,
        "spike": 2, "weights": 2, "enospc": 3, "eio": 3, "erofs": 3, "bitflip": 4, "torn": 3, "missing": 3,
        "journal": 3, "moved": 2,
    },
}  # fmt: skip
"""Number of faults of each category of `ratchet chaos`; the key is `quick`."""
ROW_OF = {
    "none": "R12", "sigkill": "R1", "supervisor": "R1", "sigterm": "R7", "sigstop": "R14", "hang": "R14", "oom": "R9",
    "nan": "R8", "spike": "R8", "weights": "R8", "enospc": "R6", "eio": "R6", "erofs": "R6", "bitflip": "R4",
    "torn": "R5", "missing": "R5", "journal": "R12", "moved": "R22",
}  # fmt: skip

CAMPAIGN_EPOCHS = 4
"""With so many epochs, faults occur during steps: a step of the small project takes about 40 ms."""

Say = Callable[[str], None]


def campaign(project: ProjectLayout, folder: Path, quick: bool, seed: int, say: Say) -> list[dict[str, Any]]:
    """Run `ratchet chaos` with a large plan, and return a few rows per category."""
    from small_project import rows_of

    from ratchet.config import params_file
    from ratchet.data.batches import BatchPlan
    from ratchet.runs.fault_injection import plan
    from ratchet.stages import chaos as campaigns

    settings = params_file.load(project.params)
    train = settings.train.model_copy(update={"epochs": CAMPAIGN_EPOCHS})
    settings = settings.model_copy(update={"train": train})
    steps = BatchPlan(rows_of(project, "train").lengths, settings.train).steps
    trials = plan.draw_plan(seed, PLANS[quick], campaigns.plan_shape(project, settings, steps))
    results = campaigns.FaultCampaign(project, settings, folder, say).run(trials)
    rows = []
    for name in PLANS[quick]:
        own = [result for result in results if result.trial.category == name]
        blows = sum(result.timeline.delivered + len(result.trial.faults) for result in own)
        label = f"{ROW_OF[name]} {name}, {len(own)} runs, {blows} blows"
        rows.append(count(f"{label}: not exact", sum(not result.exact for result in own)))
        rows.append(count(f"{label}: needed a hand", sum(not result.recovered for result in own)))
        if name != "none":
            rows.append(at_least(f"{label}: met it", blows, 1))
        recoveries = [seconds for result in own for seconds in result.timeline.recoveries_s]
        if recoveries:
            rows.append(told(f"{label}: slowest recovery (s)", max(recoveries)))
        if stops := [seconds for result in own for seconds in result.timeline.stops_s]:
            rows.append(at_most(f"{label}: slowest stop (s)", max(stops), settings.machine.grace_period_s))
    alarms = sum(result.timeline.kinds["worker_exited:stalled"] for result in results if not result.trial.can_stall)
    return [*rows, count("R15 false alarms of the watch", alarms)]


def peer(project: ProjectLayout, folder: Path, quick: bool, seed: int, say: Say) -> list[dict[str, Any]]:
    """Inject the peer's faults, print each result, and return the rows."""
    import peer_faults

    amounts = peer_faults.QUICK if quick else peer_faults.FULL
    return [row.as_json() for row in peer_faults.rows(project, folder, amounts, seed, STEPS, say)]


def ours(
    parts: list[str], project: ProjectLayout, folder: Path, quick: bool, seed: int, say: Say
) -> list[dict[str, Any]]:
    """Run the parts of Ratchet, and return all rows that have a target."""
    rows: list[dict[str, Any]] = []
    if "damage" in parts:
        import damage

        rows += damage.rows(project, folder, quick, seed, say)
    recovery_s: list[float] = []
    if "killed" in parts:
        import killed

        found, deaths = killed.rows(project, folder, 4 if quick else 24, seed, say)
        rows += found
        recovery_s = deaths.to_step_s
    if "inside" in parts:
        import inside

        rows += inside.rows(project, folder, recovery_s, quick, say)
    if "campaign" in parts:
        rows += campaign(project, folder / "campaign", quick, seed, say)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="about ten kills on each side: minutes")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--project", type=Path, metavar="DIR", help="a project in which base and prepare have run")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="folder for the trials; failed ones are kept")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, metavar="PART", help=", ".join(PARTS))
    options = parser.parse_args()
    print(f"seed {options.seed}", flush=True)
    began = time.monotonic()

    def say(text: str) -> None:
        print(f"{time.monotonic() - began:7.0f} s {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="ratchet-chaos-") as scratch:
        import small_project

        folder = options.folder.resolve() if options.folder else Path(scratch)
        project = (
            ProjectLayout.find(options.project) if options.project else small_project.build(Path(scratch) / "project")
        )
        say("project ready")
        trials = folder / "trials"
        trials.mkdir(parents=True)
        peers = peer(project, trials / "peer", options.quick, options.seed, say) if "peer" in options.only else []
        rows = ours(options.only, project, trials, options.quick, options.seed, say)
    if options.json:
        found = {
            "seed": options.seed, "quick": options.quick, "parts": list(options.only),
            "surroundings": surroundings.since_start(), "rows": rows, "peer": peers,
        }  # fmt: skip
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return finish(rows, None) if rows else 0


if __name__ == "__main__":
    sys.exit(main())
