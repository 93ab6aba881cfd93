"""Proves the first half of row R9: a real lack of memory is detected, and the advice fits the number of ranks."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

import families
from memory_cases import (
    LONG,
    PLAN,
    savings,
    settings,
)
from ratchet.config.machine import Machine
from ratchet.config.train import Train
from ratchet.models import model_spec, oom
from ratchet.models.memory import forecast
from ratchet.models.memory.forecast import MemoryWorkload

PACKAGES = ("models",)


def test_advice_names_every_setting_that_saves_with_what_it_saves_first_what_saves_most() -> None:
    def peak(train: Train, work: MemoryWorkload = LONG, machine: Machine = Machine()) -> int:  # noqa: B008 (a value)
        return forecast.forecast(PLAN, train, machine, work).peak.total_bytes

    found = savings(oom.describe_alternatives(PLAN, settings(), Machine(), LONG))
    others = {
        "prepare.max_tokens: 1000": peak(settings(), replace(LONG, row_tokens=1000, learned_tokens=500)),
        "machine.activation_checkpointing: true": peak(settings(), machine=Machine(activation_checkpointing=True)),
        "train.rank: 8": peak(settings(rank=8)),
        "train.quantization: nf4": peak(settings(quantization="nf4")),
    }
    assert found == pytest.approx({name: peak(settings()) - count for name, count in others.items()}, rel=0.02)
    assert list(found.values()) == sorted(found.values(), reverse=True)


def test_advice_for_packs_is_to_make_packs_shorter() -> None:
    packed = settings(rank=1, quantization="nf4", batching="packed")
    advice = oom.describe_alternatives(PLAN, packed, Machine(), replace(LONG, row_tokens=512, packed=True))
    assert "train.pack_tokens (and prepare.max_tokens if necessary): 256" in savings(advice)


def test_advice_is_to_share_the_base_among_the_ranks_there_are_or_among_twice_as_many() -> None:
    wide = model_spec.from_config(
        families.FAMILIES["llama"](hidden_size=512, intermediate_size=2048, num_hidden_layers=16)
    )
    short = replace(LONG, row_tokens=8, learned_tokens=4)
    two = "2 ranks (machine.gpus, machine.nodes) with machine.shard_base: true"
    assert two in oom.describe_alternatives(wide, settings(), Machine(), short)
    ranks, shared = replace(short, ranks=4), Machine(shard_base=True)
    saved = savings(oom.describe_alternatives(wide, settings(), Machine(), ranks))["machine.shard_base: true"]
    peaks = [forecast.forecast(wide, settings(), one, ranks).peak.total_bytes for one in (Machine(), shared)]
    assert saved == pytest.approx(peaks[0] - peaks[1], rel=0.02)
    assert "8 ranks (machine.gpus, machine.nodes)" in oom.describe_alternatives(wide, settings(), shared, ranks)
    assert "2 ranks" not in oom.describe_alternatives(
        wide, settings(adapter="dora", quantization="nf4"), Machine(), short
    )


EXHAUST = """
import json, resource
import numpy, torch
from ratchet.models import oom as memory

torch.ones(8, 8) @ torch.ones(8, 8)
now = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (now + 2**30, now + 2**30))
wide = torch.ones(2**15, 4, requires_grad=True)
attempts = {
    "torch": lambda: torch.empty(2**31),
    "step": lambda: (wide @ wide.T).softmax(1).sum().backward(),
    "python": lambda: bytearray(2**33),
    "numpy": lambda: numpy.ones(2**30),
    "negative": lambda: torch.empty(-1),
    "shapes": lambda: torch.ones(2, 3) @ torch.ones(2, 3),
}
found = {}
for name, attempt in attempts.items():
    try:
        attempt()
    except Exception as error:
        found[name] = memory.is_out_of_memory(error)
print(json.dumps(found))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits of the address space are Linux's")
def test_memory_that_really_runs_out_is_recognised() -> None:
    done = subprocess.run([sys.executable, "-c", EXHAUST], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == {
        "torch": True,
        "step": True,
        "python": True,
        "numpy": True,
        "negative": False,
        "shapes": False,
    }
