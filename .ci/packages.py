"""Writes the list of packages in docs/architecture.md from their docstrings.

With --check it writes nothing, and exits with 1 if the list in the page differs.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "ratchet"
PAGE = ROOT / "docs" / "architecture.md"
LAYERS_TEST = ROOT / "tests" / "test_architecture.py"


def read_layers() -> list[str]:
    """Return the packages from top to bottom, in the order of the constant LAYERS in the architecture test.

    Raises:
        SystemExit: the test has no such constant.
    """
    for node in ast.parse(LAYERS_TEST.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            return [layer for layer in ast.literal_eval(node.value) if (SOURCE / layer).is_dir()]
    raise SystemExit(f"{LAYERS_TEST}: no constant LAYERS")


def describe_packages() -> str:
    """Return a line for each package, with its subpackages below it."""
    lines = []
    for layer in read_layers():
        for path in sorted((SOURCE / layer).rglob("__init__.py")):
            name = path.parent.relative_to(SOURCE).as_posix()
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
            lines.append(f"{'  ' * name.count('/')}- `{name}/`: {text}")
    return "\n".join(lines)


def main() -> int:
    """Write the list, or compare it. Return 1 if it differs with --check."""
    text = PAGE.read_text(encoding="utf-8")
    region = re.compile(r"(<!-- packages: [^\n]*-->\n).*?(<!-- /packages -->)", re.DOTALL)
    new = region.sub(lambda match: f"{match[1]}{describe_packages()}\n{match[2]}", text)
    if "--check" in sys.argv[1:]:
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
