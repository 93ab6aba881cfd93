"""Runs the proofs: all of them, or with --minutes a share that fits into this time.

A proof is one file: a file of tests/proofs, or the tests of another file that have the marker `long`. It names its
packages in a constant PACKAGES; without this constant, its package is its folder. tests/proofs/seconds.json has the
seconds that each proof takes. A run writes its results into the table of docs/evidence_proofs.md: what each proof
proves, by the first paragraph of its docstring, and whether it did. With --record, it writes seconds.json too.

The share consists of three parts, as far as the minutes allow: the next fifth of all proofs; the proofs of packages
that the last commits changed; other proofs, in an order given by the hash of the last commit. The number in
tests/proofs/turn selects the fifth. Advance it before you submit (--advance), so that five submissions run every
proof. If the last commits did not advance it, the hash of the last commit selects the fifth.
"""

import argparse
import ast
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
PROOFS = ROOT / "tests" / "proofs"
SECONDS = PROOFS / "seconds.json"
PAGE = ROOT / "docs" / "evidence_proofs.md"
ENDS = {"failure": "failed", "error": "failed", "skipped": "skipped"}
"""How a test ended that did not pass, by the elements of a report in JUnit's format."""
REGION = "proofs"
"""Name of the region of PAGE that is written (benchmarks/regions.py)."""
TURN = PROOFS / "turn"
MARKER = "pytest.mark.long"
GROUPS = 5
"""Number of groups. Every proof runs at least once in this many submissions."""
PROCESSES = 2
"""Number of parallel test processes."""
RECENT_HOURS = 12
"""Commits up to this much older than the last commit count as one submission."""
UNKNOWN_S = 120.0
"""Assumed seconds of a proof that was never timed."""


@dataclass(frozen=True)
class Proof:
    """A file of proofs, its packages and its seconds."""

    path: Path
    packages: frozenset[str]
    seconds: float

    @property
    def name(self) -> str:
        """Name of the file, which no other test file has."""
        return self.path.name

    @property
    def promise(self) -> str:
        """The first paragraph of the docstring, in one line."""
        text = ast.get_docstring(ast.parse(self.path.read_text(encoding="utf-8"))) or ""
        return " ".join(text.split("\n\n")[0].split())


@dataclass
class Result:
    """The tests of one file: their seconds, and how many ended how."""

    seconds: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(f"{count} {end}" for end, count in self.counts.items())


def read_proofs() -> list[Proof]:
    """Return all proofs with their packages and the seconds that they took when they were last timed."""
    seconds = json.loads(SECONDS.read_text(encoding="utf-8")) if SECONDS.exists() else {}
    files = [path for path in PROOFS.parent.rglob("test_*.py") if path.parent == PROOFS or MARKER in path.read_text()]
    return [
        Proof(path, frozenset(read_packages(path)), float(seconds.get(path.name, UNKNOWN_S)))
        for path in sorted(files, key=lambda path: path.name)
    ]


def read_packages(path: Path) -> Sequence[str]:
    """Return the constant PACKAGES of a file, without importing the file, or the package whose tests are in its folder.

    Raises:
        SystemExit: there is neither.
    """
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PACKAGES":
            return ast.literal_eval(node.value)
    for folder in path.parents:
        if folder.parent == PROOFS.parent and (ROOT / "src" / "ratchet" / folder.name).is_dir():
            return [folder.name]
    raise SystemExit(f"{path}: no constant PACKAGES; name the packages of src/ratchet that it tests")


def changed_packages(paths: Iterable[str]) -> set[str]:
    """Return the packages and top-level modules of these paths, and the names of test files."""
    packages = set()
    for path in map(Path, paths):
        if path.parts[:2] == ("src", "ratchet") and len(path.parts) > 2:
            packages.add(path.parts[2].removesuffix(".py"))
        if path.match("tests/**/test_*.py"):
            packages.add(path.name)
    return packages


def divide(proofs: Sequence[Proof]) -> list[list[Proof]]:
    """Divide the proofs into GROUPS groups that take about equally long."""
    groups: list[list[Proof]] = [[] for _ in range(GROUPS)]
    for proof in sorted(proofs, key=lambda proof: (-proof.seconds, proof.name)):
        min(groups, key=lambda group: sum(proof.seconds for proof in group)).append(proof)
    return groups


def choose(proofs: Sequence[Proof], changed: set[str], turn: int, commit: str, minutes: float) -> list[Proof]:
    """Return the proofs that fit into this time: the next group, then proofs of changed packages, then others."""
    due = divide(proofs)[turn % GROUPS]

    def rank(proof: Proof) -> tuple[bool, bool, str]:
        is_changed = bool(proof.packages & changed) or proof.name in changed
        order = hashlib.sha256(f"{commit} {proof.name}".encode()).hexdigest()
        return proof not in due, not is_changed, order

    chosen: list[Proof] = []
    for proof in sorted(proofs, key=rank):
        seconds = [chosen_proof.seconds for chosen_proof in (*chosen, proof)]
        # In the worst schedule, the longest file begins when all others have ended.
        if (sum(seconds) + max(seconds)) / PROCESSES <= minutes * 60 or (not chosen and max(seconds) <= minutes * 60):
            chosen.append(proof)
    return chosen


def git(*arguments: str) -> list[str]:
    """Return the lines that a git command prints.

    Raises:
        CalledProcessError: git fails.
    """
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True)
    return done.stdout.split("\n")


def read_commits() -> tuple[str, list[str]]:
    """Return the last commit, and the paths changed by the commits of the last RECENT_HOURS."""
    commit, seconds = git("log", "-1", "--format=%H%n%ct")[:2]
    since = int(seconds) - RECENT_HOURS * 3600
    return commit, [path for path in git("log", f"--since={since}", "--name-only", "--format=") if path]


def read_turn(commit: str, paths: Sequence[str]) -> int:
    """Return the number of the next group: from TURN if the last commits changed it, else from the commit's hash."""
    if TURN.relative_to(ROOT).as_posix() in paths:
        return int(TURN.read_text(encoding="utf-8"))
    print(f"the last commits did not advance {TURN.relative_to(ROOT)} (--advance): the hash of the commit decides")
    return int(commit, 16)


def advance_turn() -> None:
    """Select the next group, once for each submission."""
    TURN.write_text(f"{int(TURN.read_text(encoding='utf-8')) + 1}\n", encoding="utf-8")
    print(f"{TURN.relative_to(ROOT)}: {TURN.read_text(encoding='utf-8').strip()}; commit it")


def read_results(report: Path) -> dict[str, Result]:
    """Return the result of each file, from a report in JUnit's format."""
    results: dict[str, Result] = {}
    for case in ElementTree.parse(report).iter("testcase"):  # noqa: S314 (pytest has just written it)
        result = results.setdefault(f"{case.get('classname', '').split('.')[-1]}.py", Result())
        result.seconds += float(case.get("time", 0))
        end = next((ENDS[child.tag] for child in case if child.tag in ENDS), "passed")
        result.counts[end] = result.counts.get(end, 0) + 1
    return dict(sorted(results.items()))


def run(proofs: Sequence[Proof]) -> tuple[int, Mapping[str, Result]]:
    """Run proofs in PROCESSES processes. Return pytest's exit code and the result of each file."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-n", str(PROCESSES), "--dist", "loadfile", "--durations=15"]
        command += ["-m", "long", f"--junitxml={report}", *(str(proof.path) for proof in proofs)]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        return code, read_results(report) if report.exists() else {}


def write_page(proofs: Sequence[Proof], results: Mapping[str, Result], begun: datetime, minutes: float) -> None:
    """Write machine, date and the results of a run into PAGE. Proofs that did not run keep the result that is there."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import regions
    import surroundings

    page = PAGE.read_text(encoding="utf-8")
    around = surroundings.describe(surroundings.machine(), surroundings.versions())
    lines = [f"Last run: `make prove`, {begun:%-d %B %Y}, {minutes:.0f} minutes; {around}.", ""]
    lines += ["| what is proved | file | s | result | date |", "|---|---|---:|---|---|"]
    earlier = {found[1]: found[0] for found in re.finditer(r"(?<=\| )`(\S+)` \| .*\|$", page, re.MULTILINE)}
    for proof in proofs:
        path = proof.path.relative_to(PROOFS.parents[1]).as_posix()
        row = earlier.get(path, f"`{path}` | | not run yet | |")
        if result := results.get(proof.name):
            row = f"`{path}` | {result.seconds:.0f} | {result} | {begun:%-d %B %Y} |"
        promise = proof.promise.replace("|", "\\|")
        lines.append(f"| {promise} | {row}")
    PAGE.write_text(regions.filled(page, REGION, "\n".join(lines)), encoding="utf-8")
    print(f"docs/{PAGE.name} is written; commit it")


def main() -> int:
    """Run the chosen proofs. Return pytest's exit code."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    arguments.add_argument("--minutes", type=float, help="run a share that fits into this time (default: all)")
    arguments.add_argument("--list", action="store_true", help="print the chosen proofs without running them")
    arguments.add_argument("--record", action="store_true", help=f"write the seconds of each file to {SECONDS.name}")
    arguments.add_argument("--advance", action="store_true", help="before you submit: select the next fifth")
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
        print(f"group {turn % GROUPS + 1} of {GROUPS} is next")
    for proof in proofs:
        print(f"  {'run ' if proof in chosen else 'skip'} {proof.name} ({proof.seconds:.0f} s)")
    print(f"{len(chosen)} of {len(proofs)} files of proofs", flush=True)
    if options.list or not chosen:
        return 0
    begun = datetime.now(UTC)
    code, results = run(chosen)
    if results:
        write_page(proofs, results, begun, (datetime.now(UTC) - begun).total_seconds() / 60)
    if options.record and code == 0:
        known = json.loads(SECONDS.read_text(encoding="utf-8")) if SECONDS.exists() else {}
        names = {proof.name for proof in proofs}
        seconds = {name: round(result.seconds) for name, result in results.items()}
        merged = {name: value for name, value in sorted({**known, **seconds}.items()) if name in names}
        SECONDS.write_text(json.dumps(merged, indent=2) + "\n", encoding="utf-8")
    return code


if __name__ == "__main__":
    os.environ.setdefault("DVC_NO_ANALYTICS", "1")
    sys.exit(main())
