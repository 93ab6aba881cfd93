"""Writes the terminal session in README.md: runs its commands in a new project, and keeps the lines worth showing.

    python .ci/readme.py [--check] [--keep DIR]

Takes about six minutes on two idle cores, and needs no network. With --check it writes nothing, and exits with 1 if a
line of the README differs from the output in more than its numbers and digests. --keep runs in this directory, which
must not exist.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- session: written by `python .ci/readme.py` -->\n", "<!-- /session -->"
NAME = "my-project"
WIDTH = 110
KILLED_AT = 80
"""Optimizer step of the first training after which everything is killed."""
COMMANDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (f"ratchet init {NAME} --data support.csv", (rf"^{NAME}: ",)),
    ("dvc repro", (r"rows in, .* out: ", r"^  starting, ", r"^Killed")),
    ("dvc repro", (r"^  resuming from step ", r"^run \w+: ", r"^  validation loss .* digest")),
    ("ratchet gate --check", (r"^PROMOTE: ", r"  must_improve: ", r"  export_parity: ")),
    ("ratchet promote", (r" is champion now",)),
)
"""Commands in their order, and the lines of their output to show. The second one is killed."""


def run(command: str, directory: Path, *, is_killed: bool = False) -> str:
    """Run a command in a session of its own and return its output; `is_killed` kills all of it at KILLED_AT."""
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            command.split(), cwd=directory, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            env={**os.environ, "CI": "true", "DVC_NO_ANALYTICS": "1", "NO_COLOR": "1"},
        )  # fmt: skip
        while child.poll() is None:
            time.sleep(0.2)
            if is_killed and read_step(directory) >= KILLED_AT:
                for process in find_descendants(child.pid):
                    os.kill(process, signal.SIGKILL)
        output.seek(0)
        return output.read() + ("Killed\n" if child.returncode == -signal.SIGKILL else "")


def read_step(directory: Path) -> int:
    """Return the newest step in the journals of a project's runs; 0 without any."""
    texts = [path.read_text(encoding="utf-8") for path in directory.glob("experiments/runs/*/journal.jsonl")]
    return max((int(step) for text in texts for step in re.findall(r'"step":\s*(\d+)', text)), default=0)


def find_descendants(pid: int) -> list[int]:
    """Return a process and all processes that it started, directly or not."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, IndexError):  # it has ended meanwhile
            continue
    found = [pid]
    for parent in found:
        found += [child for child, of in parents.items() if of == parent]
    return found


def write_session(directory: Path) -> str:
    """Run all commands and return the session as Markdown."""
    (directory / "support.csv").write_bytes((ROOT / "data" / "raw" / "support.csv").read_bytes())
    lines = []
    for number, (command, patterns) in enumerate(COMMANDS):
        where = directory / NAME if number else directory
        output = run(command, where, is_killed=number == 1).splitlines()
        lines.append(f"$ {f'cd {NAME} && ' if number == 1 else ''}{command}")
        for pattern in patterns:
            lines.append(shorten(next((line for line in output if re.search(pattern, line)), f"MISSING {pattern}")))
    return "```console\n" + "\n".join(lines) + "\n```\n"


def shorten(line: str) -> str:
    """Cut a line after the last word that fits."""
    return line if len(line) <= WIDTH else line[: line.rindex(" ", 0, WIDTH - 3)] + " ..."


def mask(text: str) -> str:
    """Replace digests and numbers, which differ between machines."""
    return re.sub(r"\b[0-9a-f]{12,}\b|\d[\d,.]*", "#", text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--keep", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = arguments.keep or Path(temporary)
        directory.mkdir(parents=True, exist_ok=directory == Path(temporary))
        session = write_session(directory)
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    shown, after = rest.split(END)
    if arguments.check:
        differing = [line for line in shown.splitlines() if mask(line) not in map(mask, session.splitlines())]
        print("\n".join(differing) or "README.md: the session is current")
        return 1 if differing else 0
    README.write_text(before + BEGIN + session + END + after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
