"""Runs the proofs (tests/proofs): all of them, or with --minutes a share that takes no longer.

The share: first the proofs of packages that the last commits changed, then others in an order that the hash of the last
commit decides. A proof is one file; it names its packages in a constant PACKAGES, and how long it takes stands in
tests/proofs/seconds.json, which a run of all proofs writes with --record.
"""

import argparse
import ast
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PROOFS = ROOT / "tests" / "proofs"
SECONDS = PROOFS / "seconds.json"
PROCESSES = 2
RECENT_HOURS = 12
"""Commits that are not older than this, counted back from the last one, are what a submission changes."""
UNKNOWN_S = 120.0
"""Of a proof that was never timed."""


@dataclass(frozen=True)
class Proof:
    """One file of proofs."""

    name: str
    packages: frozenset[str]
    seconds: float


def read_proofs() -> list[Proof]:
    """All proofs, with what they prove packages of and the seconds that they took when they were last timed."""
    seconds = json.loads(SECONDS.read_text(encoding="utf-8")) if SECONDS.exists() else {}
    proofs = []
    for path in sorted(PROOFS.glob("test_*.py")):
        packages = frozenset(read_packages(path))
        proofs.append(Proof(path.name, packages, float(seconds.get(path.name, UNKNOWN_S))))
    return proofs


def read_packages(path: Path) -> Sequence[str]:
    """The constant PACKAGES of a file, which is not imported.

    Raises:
        SystemExit: the file has none.
    """
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PACKAGES":
            return ast.literal_eval(node.value)
    raise SystemExit(f"{path}: no constant PACKAGES; name the packages of src/ratchet whose promise it proves")


def changed_packages(paths: Iterable[str]) -> set[str]:
    """Packages, and modules beside them, that own these paths; of a proof, its file name."""
    packages = set()
    for path in map(Path, paths):
        if path.parts[:2] == ("src", "ratchet") and len(path.parts) > 2:
            packages.add(path.parts[2].removesuffix(".py"))
        if path.match("tests/proofs/test_*.py"):
            packages.add(path.name)
    return packages


def choose(proofs: Sequence[Proof], changed: set[str], commit: str, minutes: float) -> list[Proof]:
    """The proofs that fit into so many minutes on PROCESSES processes: those of what changed come first."""

    def rank(proof: Proof) -> tuple[bool, str]:
        is_changed = bool(proof.packages & changed) or proof.name in changed
        return not is_changed, hashlib.sha256(f"{commit} {proof.name}".encode()).hexdigest()

    chosen: list[Proof] = []
    for proof in sorted(proofs, key=rank):
        seconds = [one.seconds for one in (*chosen, proof)]
        # The longest file may begin when all others are done: the worst that a schedule by files can be.
        if (sum(seconds) + max(seconds)) / PROCESSES <= minutes * 60 or (not chosen and max(seconds) <= minutes * 60):
            chosen.append(proof)
    return chosen


def read_commits() -> tuple[str, list[str]]:
    """The last commit, and the paths that the commits of the last RECENT_HOURS changed."""

    def git(*arguments: str) -> list[str]:
        done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
        return done.stdout.split("\n")

    commit, seconds = git("log", "-1", "--format=%H%n%ct")[:2]
    since = int(seconds) - RECENT_HOURS * 3600
    return commit, [path for path in git("log", f"--since={since}", "--name-only", "--format=") if path]


def read_seconds(report: Path) -> dict[str, float]:
    """Seconds of each file, from a report in JUnit's format."""
    seconds: dict[str, float] = {}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 (pytest wrote it a moment ago)
        name = f"{case.get('classname', '').split('.')[-1]}.py"
        seconds[name] = seconds.get(name, 0.0) + float(case.get("time", 0))
    return {name: round(value) for name, value in sorted(seconds.items())}


def run(proofs: Sequence[Proof]) -> tuple[int, Mapping[str, float]]:
    """Run these in PROCESSES processes; returns pytest's exit code and the seconds of each file."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-n", str(PROCESSES), "--dist", "loadfile", "--durations=15"]
        command += [f"--junitxml={report}", *(str(PROOFS / proof.name) for proof in proofs)]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        return code, read_seconds(report) if report.exists() else {}


def main() -> int:
    """Exit code: pytest's."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    arguments.add_argument("--minutes", type=float, help="run a share that takes no longer (default: all)")
    arguments.add_argument("--list", action="store_true", help="print what would run, and run nothing")
    arguments.add_argument("--record", action="store_true", help=f"write the seconds of each file to {SECONDS.name}")
    options = arguments.parse_args()
    proofs = read_proofs()
    chosen = proofs
    if options.minutes is not None:
        commit, paths = read_commits()
        changed = changed_packages(paths)
        chosen = choose(proofs, changed, commit, options.minutes)
        print(f"proofs of commit {commit[:12]}, changed: {', '.join(sorted(changed)) or 'nothing'}")
    for proof in proofs:
        print(f"  {'run ' if proof in chosen else 'skip'} {proof.name} ({proof.seconds:.0f} s)")
    print(f"{len(chosen)} of {len(proofs)} files of proofs", flush=True)
    if options.list or not chosen:
        return 0
    code, seconds = run(chosen)
    if options.record and code == 0:
        known = json.loads(SECONDS.read_text(encoding="utf-8")) if SECONDS.exists() else {}
        names = {proof.name for proof in proofs}
        merged = {name: value for name, value in sorted({**known, **seconds}.items()) if name in names}
        SECONDS.write_text(json.dumps(merged, indent=2) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    os.environ.setdefault("DVC_NO_ANALYTICS", "1")
    sys.exit(main())
