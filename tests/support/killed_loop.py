"""A training of small_loop.py with guards, in processes that are killed by SIGKILL at chosen steps.

    python killed_loop.py ROOT STEP...

Trains in ROOT/whole without a kill, and in ROOT/killed, where each STEP is killed in the middle of one attempt. The
processes are forked, so that libraries are imported only once. Prints both results.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from ratchet.config.train import EarlyStoppingSettings, GuardSettings
from ratchet.runs.fault_injection.injection import FaultInjector, InjectedFault
from ratchet.storage import digests
from small_loop import SMALL, loop_of, trained_by

GUARDED = SMALL.model_copy(
    update={
        "guards": GuardSettings(
            on_non_finite="roll_back", on_loss_spike="skip", on_rising_loss="report", window_steps=10,
            learning_rate_factor=0.5, recovery_steps=3, snapshot_every_steps=3,
        ),
        "early_stopping": EarlyStoppingSettings(plateau_validations=50, metrics=("loss", "token_accuracy")),
        "schedule": "warmup_stable_decay",
        "final_learning_rate_share": 0.1,
        "cooldown_ratio": 0.5,
    }
)  # fmt: skip
FAULTS = ({"kind": "spike", "step": 8, "times": 0}, {"kind": "non_finite", "step": 16, "times": 0})


def train(root: Path, killed_step: int | None) -> dict[str, object]:
    """Train until the end or the kill; return the final state and a digest of the weights."""
    faults = FAULTS if killed_step is None else (*FAULTS, {"kind": "die", "step": killed_step})
    loop = loop_of(root, GUARDED, faults=FaultInjector(tuple(map(InjectedFault.model_validate, faults))))
    state = loop.run()
    weights = {name: digests.hash_bytes(tensor.numpy().tobytes()) for name, tensor in trained_by(loop).items()}
    return {"state": state.to_json(), "weights": digests.hash_json(weights)}


def main(root: Path, killed_steps: list[int]) -> None:
    torch.set_num_threads(1)  # a forked process has no threads of its parent
    for step in killed_steps:
        pid = os.fork()
        if pid == 0:
            train(root / "killed", step)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if not os.WIFSIGNALED(status) or os.WTERMSIG(status) != signal.SIGKILL:
            raise SystemExit(f"step {step}: the process ended with status {status}")
    print(json.dumps([train(root / name, None) for name in ("whole", "killed")]))


if __name__ == "__main__":
    main(Path(sys.argv[1]), [int(text) for text in sys.argv[2:]])
