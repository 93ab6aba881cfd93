"""Runs the proofs (tests/proofs): all of them, or with --minutes a share that takes no longer.

A proof is one file. It names its packages in a constant PACKAGES. tests/proofs/seconds.json has the time that each
takes; a run of all proofs writes it with --record.

The share consists of three parts, as far as the minutes allow: one fifth of all proofs, whose turn it is; the proofs of
packages that the last commits changed; others, in an order that the hash of the last commit decides. The number in
tests/proofs/turn says which fifth is next: whoever submits work advances it (--advance), so that five submissions run
every proof. Where the last commits did not advance it, the hash of the last commit decides that too.
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
TURN = PROOFS / "turn"
GROUPS = 5
"""Every proof runs at least once in so many submissions."""
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


def divide(proofs: Sequence[Proof]) -> list[list[Proof]]:
    """The proofs in GROUPS groups that take about equally long."""
    groups: list[list[Proof]] = [[] for _ in range(GROUPS)]
    for proof in sorted(proofs, key=lambda proof: (-proof.seconds, proof.name)):
        min(groups, key=lambda group: sum(one.seconds for one in group)).append(proof)
    return groups


def choose(proofs: Sequence[Proof], changed: set[str], turn: int, commit: str, minutes: float) -> list[Proof]:
    """The proofs that fit into so many minutes: the group whose turn it is, then those of what changed, then others."""
    due = divide(proofs)[turn % GROUPS]

    def rank(proof: Proof) -> tuple[bool, bool, str]:
        is_changed = bool(proof.packages & changed) or proof.name in changed
        order = hashlib.sha256(f"{commit} {proof.name}".encode()).hexdigest()
        return proof not in due, not is_changed, order

    chosen: list[Proof] = []
    for proof in sorted(proofs, key=rank):
        seconds = [one.seconds for one in (*chosen, proof)]
        # The longest file may begin when all others are done: the worst that a schedule by files can be.
        if (sum(seconds) + max(seconds)) / PROCESSES <= minutes * 60 or (not chosen and max(seconds) <= minutes * 60):
            chosen.append(proof)
    return chosen


def git(*arguments: str) -> list[str]:
    """The lines that git prints.

    Raises:
        CalledProcessError: git fails.
    """
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.split("\n")


def read_commits() -> tuple[str, list[str]]:
    """The last commit, and the paths that the commits of the last RECENT_HOURS changed."""
    commit, seconds = git("log", "-1", "--format=%H%n%ct")[:2]
    since = int(seconds) - RECENT_HOURS * 3600
    return commit, [path for path in git("log", f"--since={since}", "--name-only", "--format=") if path]


def read_turn(commit: str, paths: Sequence[str]) -> int:
    """Which group is next: the number in TURN if these paths, which the last commits changed, have it."""
    if TURN.relative_to(ROOT).as_posix() in paths:
        return int(TURN.read_text(encoding="utf-8"))
    print(f"the last commits did not advance {TURN.relative_to(ROOT)} (--advance): the hash of the commit decides")
    return int(commit, 16)


def advance_turn() -> None:
    """Give the next group its turn: once for each submission."""
    TURN.write_text(f"{int(TURN.read_text(encoding='utf-8')) + 1}\n", encoding="utf-8")
    print(f"{TURN.relative_to(ROOT)}: {TURN.read_text(encoding='utf-8').strip()}; commit it")


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
    arguments.add_argument("--advance", action="store_true", help="before you submit: give the next fifth its turn")
    options = arguments.parse_args()
    if options.advance:
        advance_turn()
        return 0
    proofs = read_proofs()
    chosen = proofs
    if options.minutes is not None:
        commit, paths = read_commits()
        changed = changed_packages(paths)
        turn = read_turn(commit, paths)
        chosen = choose(proofs, changed, turn, commit, options.minutes)
        print(f"proofs of commit {commit[:12]}, changed: {', '.join(sorted(changed)) or 'nothing'}")
        print(f"group {turn % GROUPS + 1} of {GROUPS} has its turn")
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
