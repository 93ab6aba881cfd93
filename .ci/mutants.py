"""Changes the source in small ways, one at a time, and counts how many of these mutants the tests detect.

A mutant is one changed operator, constant or condition, drawn from `src/ratchet` with a seed. The tests of its package
(`tests/<package>`, or `tests/test_<module>*.py` for a module outside packages) run on it, without the tests that
`make test` leaves out. With --proofs, the proofs of the package run as well if those tests miss it. The source is
changed in a copy of the checkout.

With --earlier FILE, written by --json, the same mutants are judged again. The test that detected a mutant runs first,
if it still exists, so that most mutants take seconds.
"""

import argparse
import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import proofs

ROOT = Path(__file__).resolve().parents[1]
LIMIT_S = 1200.0
"""Time limit of the tests in seconds. A mutant with which tests take longer counts as detected."""
PROOFS_LIMIT_S = 5400.0
"""The same limit for the proofs of a package."""
COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: Path
    line: int
    before: str
    after: str
    source: str


def find_mutants(path: Path) -> list[Mutant]:
    """Return all mutants of a file."""
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    return [mutant for node in ast.walk(tree) for mutant in _mutants_of(path, text, node)]


def _mutants_of(path: Path, text: str, node: ast.AST) -> Iterator[Mutant]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        changed = ast.Compare(node.left, [COMPARISONS[type(node.ops[0])]()], node.comparators)
    elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS and not _is_text(node):
        changed = ast.BinOp(node.left, OPERATORS[type(node.op)](), node.right)
    elif isinstance(node, ast.BoolOp):
        changed = ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        changed = node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        changed = ast.Constant(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        changed = ast.Constant(node.value + 1)
    elif isinstance(node, ast.IfExp):
        changed = ast.IfExp(ast.UnaryOp(ast.Not(), node.test), node.body, node.orelse)
    else:
        return
    before, after = ast.get_source_segment(text, node), ast.unparse(changed)
    if before is None or "\n" in before:
        return  # an expression of several lines
    lines = text.split("\n")
    line = lines[node.lineno - 1].encode()
    start, end = node.col_offset, node.end_col_offset
    lines[node.lineno - 1] = (line[:start] + f"({after})".encode() + line[end:]).decode()
    yield Mutant(path, node.lineno, before, after, "\n".join(lines))


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, ast.JoinedStr | ast.Constant) and not _is_number(side) for side in (node.left, node.right)
    )


def _is_number(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def draw(seed: int, count: int) -> list[Mutant]:
    """Return a sample of all mutants that Python can compile, each drawn with equal probability."""
    candidates = [mutant for path in sorted((ROOT / "src").rglob("*.py")) for mutant in find_mutants(path)]
    chosen: list[Mutant] = []
    generator = random.Random(seed)
    while len(chosen) < count:
        mutant = generator.choice(candidates)
        try:
            compile(mutant.source, str(mutant.path), "exec")
        except SyntaxError:  # inside an f-string or a pattern
            continue
        chosen.append(mutant)
    return chosen


def tests_of(package: str) -> list[str]:
    """Return the tests of a package or top-level module. If none has its name, return the tests that import it."""
    tests = ROOT / "tests"
    if (tests / package).is_dir():
        return [f"tests/{package}"]
    paths = [path for name in (package, package.split("_", maxsplit=1)[0]) for path in tests.glob(f"test_{name}*.py")]
    if not paths:
        imported = re.compile(rf"(import|from) ratchet\.{package}\b|from ratchet(\.{package})? import .*\b{package}\b")
        paths = [path for path in tests.rglob("test_*.py") if path.parent.name != "proofs"]
        paths = [path for path in paths if imported.search(path.read_text(encoding="utf-8"))]
    return sorted({path.relative_to(ROOT).as_posix() for path in paths})


def find_failure(
    copy: Path, paths: list[str], processes: int = 2, marked: str = "not long", limit_s: float = LIMIT_S
) -> str:
    """Return the first of these tests that fails in the copy of the checkout, or an empty text.

    `marked` selects tests by markers, as pytest's option `-m` does.

    Raises:
        SystemExit: pytest ends without a result, for instance because a path does not exist.
    """
    if not paths:
        return ""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-rfE", "-m", marked, *paths]
    if processes > 1:
        command += ["-n", str(processes), "--dist", "loadfile"]
    environment = os.environ | {"PYTHONPATH": str(copy / "src")}
    try:
        done = subprocess.run(
            command, cwd=copy, env=environment, capture_output=True, check=False, timeout=limit_s, text=True
        )
    except subprocess.TimeoutExpired:
        return f"the tests did not end within {limit_s:.0f} s"
    if done.returncode in (0, 5):  # 5: none of these tests was selected
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    if failed is None and done.returncode not in (1, 2):  # 2: a test module cannot be imported
        raise SystemExit(
            f"{' '.join(command)}\nexit code {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
        )
    return failed.group(1) if failed else "collection of the tests"


def still_fails(copy: Path, test: str) -> bool:
    """Return whether a test that detected this mutant earlier still exists and fails."""
    name = test.split("[", maxsplit=1)[0]
    file, _, function = name.partition("::")
    path = copy / file
    if not function or not path.is_file() or f"def {function.split('::')[-1]}(" not in path.read_text(encoding="utf-8"):
        return False
    return bool(find_failure(copy, [name], processes=1, marked="long or not long"))


def main() -> int:
    """Judge the mutants. The exit code is 0 for any result."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    arguments.add_argument("--count", type=int, default=40)
    arguments.add_argument("--seed", type=int, default=1)
    arguments.add_argument("--proofs", action="store_true", help="run the proofs on mutants that the tests miss")
    arguments.add_argument("--json", type=Path, help="write the result of each mutant to this file")
    arguments.add_argument("--earlier", type=Path, help="judge the mutants of this file, written by --json, again")
    arguments.add_argument("--unchecked", action="store_true", help="do not run the tests without a mutant first")
    options = arguments.parse_args()
    all_proofs = proofs.read_proofs()
    results = []
    checked: set[str] = set()
    mutants = draw(options.seed, options.count)
    earlier = json.loads(options.earlier.read_text(encoding="utf-8")) if options.earlier else []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "checkout"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "__pycache__", ".*_cache"))
        for number, mutant in enumerate(mutants, 1):
            relative = mutant.path.relative_to(ROOT)
            package = relative.parts[2].removesuffix(".py")
            target = copy / relative
            if package not in checked and not options.unchecked:
                if test := find_failure(copy, tests_of(package)):
                    raise SystemExit(f"{test} fails without a mutant; {number - 1} mutants were judged")
                checked.add(package)
            target.write_text(mutant.source, encoding="utf-8")
            first = earlier[number - 1].get("test", "") if number <= len(earlier) else ""
            test = first if first and still_fails(copy, first) else find_failure(copy, tests_of(package))
            by = "tests" if test else ""
            if not by and options.proofs:
                proof_paths = [str(proof.path.relative_to(ROOT)) for proof in all_proofs if package in proof.packages]
                test = find_failure(copy, proof_paths, marked="long", limit_s=PROOFS_LIMIT_S)
                by = "proofs" if test else ""
            shutil.copyfile(mutant.path, target)
            change = {"path": str(relative), "line": mutant.line, "before": mutant.before, "after": mutant.after}
            results.append({**change, "by": by, "test": test})
            print(
                f"{number:3} {by or 'MISSED':7} {relative}:{mutant.line} {mutant.before} -> {mutant.after}  {test}",
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    by_tests, by_proofs = (sum(result["by"] == by for result in results) for by in ("tests", "proofs"))
    print(f"{len(results)} mutants (seed {options.seed}): {by_tests} detected by tests, {by_proofs} more by proofs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
