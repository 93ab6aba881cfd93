"""Files of answers, and servers of `ratchet label`, for its tests."""

import json
import re
import signal
import subprocess
import sys

import tiny_project
from ratchet.storage.layout import ProjectLayout

HOSTILE = '<img src=x onerror="window.ran = 1"><script>window.ran = 1</script> & \u202eabc </p>'


def write_answers(layout: ProjectLayout, count: int, equal: int = 0) -> None:
    """Write two files of answers to the same prompts; the first `equal` answers are the same."""
    for name in ("a", "b"):
        rows = [
            {
                "prompt": f"Question {k}? {HOSTILE if k % 2 else ''}",
                "answer": f"same {k}" if k < equal else f"answer {k} of {name}: {HOSTILE}",
            }
            for k in range(count)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (layout.root / f"{name}.jsonl").write_text(text, encoding="utf-8")


class LabelProcess:
    """A process of `ratchet label`."""

    def __init__(self, layout: ProjectLayout, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ratchet", "label", *arguments],
            cwd=layout.root, env=tiny_project.environment(), text=True, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert self.process.stdout is not None
        said = ""
        for line in self.process.stdout:
            said += line
            if found := re.search(r"http://\S+", line):
                self.address = found[0]
                return
        raise AssertionError(f"the server does not start: {said}")

    def stop(self, number: signal.Signals = signal.SIGINT) -> str:
        """Send a signal, wait for the end, and return the rest of the output."""
        self.process.send_signal(number)
        return self.process.communicate(timeout=60)[0]

    def __enter__(self) -> "LabelProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def lines(layout: ProjectLayout) -> list[dict[str, object]]:
    """Return the lines of the file of judgements."""
    return [json.loads(line) for line in layout.judgements.read_text(encoding="utf-8").splitlines()]
