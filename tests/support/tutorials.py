"""Runs a tutorial of the documentation: its files and commands in a new directory, and compares the output.

    python tests/support/tutorials.py docs/tutorial_first_run.md [--write] [--keep DIR]

A page has three kinds of blocks. `console` has commands after "$ " and lines of their output. A block with a title is
a file to write; one titled params.yaml changes these settings in the file of that name. Output lines must occur in
this order; others may be between them. `...` is any text. Digests, fractions, durations, rates and sizes may differ.
A command must end with 0, or with N if it has the comment "# exit code N". A page that begins with
`<!-- continues: PAGE -->` starts where that page ended. --write prints all output and writes the figures of this run
into the page; --keep leaves the directory.
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ratchet.config import params_file

DOCS = Path(__file__).resolve().parents[2] / "docs"
WIDTH = 110
TIMEOUT_S = 1200.0
"""Maximum duration of one command, in seconds."""
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
VARIABLE = re.compile(
    r"\b(?=\w*\d)[0-9a-f]{6,}\b|\d[\d,]*\.\d+(e-?\d+)?"
    r"|\d[\d,]*(?= (?:s|min|h|ms|bytes|[KMG]iB|tokens/s|steps/s)\b| ?%)"
)
ENVIRONMENT = {
    "CI": "true", "NO_COLOR": "1", "COLUMNS": str(WIDTH), "DVC_NO_ANALYTICS": "1", "GIT_AUTHOR_NAME": "reader",
    "GIT_AUTHOR_EMAIL": "reader@example.org", "GIT_COMMITTER_NAME": "reader",
    "GIT_COMMITTER_EMAIL": "reader@example.org", "PYTHONUNBUFFERED": "1",
}  # fmt: skip


@dataclass
class Step:
    """A file to write (`path`), or a command with the lines of its output that the page shows."""

    text: str
    path: str = ""
    shown: list[str] = field(default_factory=list)
    output: list[str] = field(default_factory=list)
    """Lines of the real output, once the command has run."""

    @property
    def exit_code(self) -> int:
        """Exit code that the page promises."""
        match = re.search(r"# exit code (\d+)$", self.text)
        return int(match[1]) if match else 0


def read_steps(page: str) -> Iterator[Step]:
    """Yield the steps of a page in order. Blocks of other languages without a title are not steps."""
    for language, title, text in BLOCK.findall(page):
        if title:
            yield Step(text, title)
        elif language == "console":
            for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
                command, *shown = part.splitlines()
                yield Step(command, shown=shown)


def find_prerequisite(page: str) -> str | None:
    """Return the name of the page that a page continues."""
    match = re.match(r"<!-- continues: (\S+) -->", page)
    return match[1] if match else None


def mask(text: str) -> str:
    """Replace what differs between machines."""
    return VARIABLE.sub("#", text).rstrip()


def find_missing(step: Step) -> str | None:
    """Return the first shown line that does not follow in the output."""
    left = iter(step.output)
    for shown in step.shown:
        pattern = re.compile(r".*".join(map(re.escape, mask(shown).split("..."))))
        if shown.strip() != "..." and not any(pattern.fullmatch(mask(line)) for line in left):
            return shown
    return None


class Shell:
    """A bash that runs commands one after the other, in one directory after `cd`."""

    def __init__(self, directory: Path) -> None:
        self.environment = {
            name: value for name, value in os.environ.items()
            if not name.startswith(("RATCHET", "MLFLOW_", "GIT_", "DVC_", "OMP_"))
        } | ENVIRONMENT | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # fmt: skip
        self.directory = directory
        self.process = subprocess.Popen(
            ["bash", "--norc"], cwd=directory, env=self.environment, text=True, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def __enter__(self) -> "Shell":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        for file in Path("/proc").glob("[0-9]*/stat"):  # jobs have groups of their own, but share the session
            try:
                if int(file.read_text().rpartition(")")[2].split()[3]) == self.process.pid:
                    os.kill(int(file.parent.name), signal.SIGKILL)
            except (OSError, IndexError):
                continue  # it has ended meanwhile
        self.process.communicate()

    def run(self, command: str) -> tuple[list[str], int]:
        """Run a command and return its output and exit code."""
        assert self.process.stdin
        assert self.process.stdout
        end = f"end-{time.monotonic_ns()}"
        self.process.stdin.write(f"{{ {command}\n}} < /dev/null 2>&1; printf '\\n%s %s %s\\n' {end} $? \"$PWD\"\n")
        self.process.stdin.flush()
        lines: list[str] = []
        for line in self.process.stdout:
            if line.startswith(end):
                _, code, directory = line.rstrip("\n").split(" ", 2)
                self.directory = Path(directory)
                return lines[:-1] if lines[-1:] == [""] else lines, int(code)
            lines.append(line.rstrip("\n"))
        raise AssertionError(f"the shell ended in: {command}\n" + "\n".join(lines))


def run_page(page: str, directory: Path, *, is_verbose: bool = False) -> list[Step]:
    """Run all steps of a page in a directory, beginning in the folder in which the earlier page ended.

    Raises:
        AssertionError: a command has another exit code, or a line of its output is missing.
    """
    steps = list(read_steps(page))
    ended = directory / ".ended"
    with Shell(directory / (ended.read_text(encoding="utf-8") if ended.exists() else "")) as shell:
        for step in steps:
            if step.path:
                write_file(shell.directory / step.path, step.text)
                continue
            start_s = time.monotonic()
            step.output, code = shell.run(step.text)
            if is_verbose:
                print(f"$ {step.text}", *step.output, f"({time.monotonic() - start_s:.0f} s)", sep="\n", flush=True)
            said = "\n".join(step.output)
            assert code == step.exit_code, f"$ {step.text}: exit code {code}\n{said}"
            missing = find_missing(step)
            assert missing is None, f"$ {step.text}: no line {missing!r} in\n{said}"
        ended.write_text(str(shell.directory.relative_to(directory)), encoding="utf-8")
    return steps


def write_file(path: Path, text: str) -> None:
    """Write a file of the page; for params.yaml, change only the settings that the page names."""
    if path.name == "params.yaml":
        text = params_file.amend_text(path.read_text(encoding="utf-8"), dict(flatten(yaml.safe_load(text))))
    path.write_text(text, encoding="utf-8")


def flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield settings by dotted name."""
    for name, value in settings.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield prefix + name, value


def run_with_prerequisites(name: str, directory: Path, *, is_verbose: bool = False) -> list[Step]:
    """Run the pages that a page continues, then the page itself, in one directory; return the steps of the page."""
    page = (DOCS / name).read_text(encoding="utf-8")
    if before := find_prerequisite(page):
        run_with_prerequisites(before, directory, is_verbose=is_verbose)
    return run_page(page, directory, is_verbose=is_verbose)


def rewrite(page: str, steps: list[Step]) -> str:
    """Return the page with the figures of a run in all shown lines, except within lines that contain `...` earlier."""
    for step in steps:
        left = iter(step.output)
        for shown in step.shown:
            pattern = re.compile(r".*".join(map(re.escape, mask(shown).split("..."))))
            if shown.strip() == "...":
                continue
            line = next(line for line in left if pattern.fullmatch(mask(line)))
            if "..." not in shown.removesuffix("..."):
                page = page.replace(f"\n{shown}\n", f"\n{shorten(line)}\n", 1)
    return page


def shorten(line: str) -> str:
    """Cut a line after the last word that fits."""
    return line if len(line) <= WIDTH else line[: line.rindex(" ", 0, WIDTH - 3)] + " ..."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--keep", type=Path, metavar="DIR")
    parser.add_argument("--start", type=Path, metavar="DIR", help="directory in which the earlier page has run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = options.keep or Path(temporary) / "work"
        if options.start:
            shutil.copytree(options.start, directory, symlinks=True)
        else:
            directory.mkdir(parents=True)
        page = options.page.read_text(encoding="utf-8")
        run = run_page if options.start else run_with_prerequisites
        steps = run(page if options.start else options.page.name, directory, is_verbose=True)
        if options.write:
            options.page.write_text(rewrite(page, steps), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
