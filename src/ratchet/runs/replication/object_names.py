"""Layout of a replica. All names are relative to `machine.replica`, with `/` between their parts.

    runs/RUN/spec.json                       the run's spec; never changes
    runs/RUN/objects/SHA256                  content of files, each once
    runs/RUN/checkpoints/TOKEN-STEP.json     a sealed checkpoint: files by name, with digest and size; written last
    runs/RUN/journal/TOKEN-START-END.jsonl   bytes START to END of the journal as holder TOKEN had it
    runs/RUN/result/TOKEN.json               the sealed result, like a checkpoint
    runs/RUN/claims/TOKEN-NODE.json          claims; the holder with the highest token renews its claim
    runs/RUN/entering/NODE                   a machine is choosing a token
    runs/RUN/nodes/NODE.json                 report of a machine: steps, uploads, interruptions
    speed/MACHINE-RANDOM                     test data while a machine measures its network

TOKEN counts holders of a run from 1, with eight digits. It is a fencing token: a holder that was thought dead and comes
back writes under its old token, and readers prefer the highest token. Only a holder's own claim and report are ever
overwritten, so two writers cannot damage each other's data.
"""

import re
from dataclasses import dataclass

NODE = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
"""Pattern of a machine's name in a replica."""


@dataclass(frozen=True)
class RunObjectNames:
    """Object names of one run."""

    run_id: str

    @property
    def root(self) -> str:
        return f"runs/{self.run_id}"

    @property
    def spec(self) -> str:
        return f"{self.root}/spec.json"

    def folder(self, kind: str) -> str:
        """`objects`, `checkpoints`, `journal`, `result`, `claims`, `entering` or `nodes`."""
        return f"{self.root}/{kind}"

    def object(self, digest: str) -> str:
        return f"{self.folder('objects')}/{digest}"

    def checkpoint(self, token: int, step: int) -> str:
        return f"{self.folder('checkpoints')}/{token:08d}-{step:08d}.json"

    def journal(self, token: int, start: int, end: int) -> str:
        return f"{self.folder('journal')}/{token:08d}-{start:012d}-{end:012d}.jsonl"

    def result(self, token: int) -> str:
        return f"{self.folder('result')}/{token:08d}.json"

    def claim(self, token: int, node: str) -> str:
        return f"{self.folder('claims')}/{token:08d}-{node}.json"

    def entering(self, node: str) -> str:
        return f"{self.folder('entering')}/{node}"

    def node(self, node: str) -> str:
        return f"{self.folder('nodes')}/{node}.json"


def parse_numbers(name: str) -> tuple[int, ...]:
    """Numbers at the beginning of the last part of a name: token and step, or token, start and end."""
    last = name.rsplit("/", 1)[-1]
    found = re.match(r"[0-9]+(?:-[0-9]+)*(?=[-.])", last)
    return tuple(map(int, found[0].split("-"))) if found else ()
