"""Measures gradient compression: bytes sent, time of a step's sum over slow links, and loss after equal tokens.

    pip install -c constraints.txt -e .
    python benchmarks/compression.py [--quick] [--json FILE] [--only bytes|loss]

Two ranks use gloo and one core each (compression_cell.py). The gradients of the first part are those of a LoRA of rank
16 on all linear layers of a model like Qwen2.5-0.5B, 8.8 million numbers (quick: a quarter). The ranks run in two
network namespaces; tc limits their link (compression_link.py), which needs root. Calculated bytes are compared with the
interface's counter. Gradients are summed after the backward pass, so the sum adds its time to the step; an unlimited
link shows the cost of compression itself. All methods take turns, round by round.

The second part trains a small model on the bundled requests with each method and several seeds: same rows, same order,
same steps. The noise is the variation of `none` between seeds: a method is within the noise if its mean loss is higher
by at most two standard errors of a difference of two means.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import small_project
from compression_link import End, NoLinkError, link, shape
from report import finish
from report_rows import Row, at_least, at_most, count, middle, ratio, told

from ratchet.config.settings import Settings
from ratchet.config.train import GradientCompressionSettings

METHODS: dict[str, dict[str, Any]] = {
    "none": {"method": "none"},
    "bf16": {"method": "bf16"},
    "fp16": {"method": "fp16"},
    "int8": {"method": "int8"},
    "powersgd": {"method": "powersgd"},
    "powersgd-4 at once": {"method": "powersgd", "rank": 4, "warmup_ratio": 0},
}
AGGRESSIVE = {"powersgd-4 at once"}
"""Methods whose loss is reported without a target. The other methods, with default settings, must not lose quality."""
LINKS = {"100 Mbit/s": "100mbit", "1 Gbit/s": "1gbit", "unshaped": None}
LAYERS, QUICK_LAYERS, RANK = 24, 6, 16
ROUNDS, QUICK_ROUNDS = 9, 5
SEEDS, QUICK_SEEDS = 5, 3
STEPS = 1000
"""Steps of the training for which bytes are computed. Its first steps may be sent uncompressed."""
SAVED_PERCENT = 49.9
"""Target in per cent: half, minus the four bytes per bucket with which float16 agrees on a scale."""
HEADERS_PERCENT = 6.0
"""Allowed excess in per cent for Ethernet, IP and TCP headers: 66 of 1,514 bytes, and the same number for each
acknowledgement in the other direction."""
CELL_S = 1500
TRAIN_ROWS = 1200
BASE_STEPS = 150
"""Pre-training steps of the base, so that the adapter has a trained model to adapt."""
TRAIN = {
    "quantization": "none", "rank": RANK, "alpha": 2 * RANK, "epochs": 3, "batch_size": 16, "learning_rate": 0.01,
    "dropout": 0.05, "warmup_ratio": 0.05,
}  # fmt: skip


@dataclass(frozen=True)
class Rank:
    """Place where one of the two ranks runs."""

    prefix: Sequence[str] = ()
    interface: str = "lo"


def on_both(given: dict[str, Any], ranks: tuple[Rank, Rank], meeting: str) -> list[dict[str, Any]]:
    """Run compression_cell.py on both ranks, and return their results. End the benchmark if one fails."""
    script = Path(__file__).with_name("compression_cell.py")
    started = []
    for number, rank in enumerate(ranks):
        asked = given | {"number": number, "interface": rank.interface, "meeting": meeting}
        environment = os.environ | {
            "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1",
            "GLOO_SOCKET_IFNAME": rank.interface, "TORCH_CPP_LOG_LEVEL": "ERROR",
        }  # fmt: skip
        command = [*rank.prefix, sys.executable, str(script), json.dumps(asked)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
    until = time.monotonic() + CELL_S
    try:  # if one rank fails, the other would wait for it
        while time.monotonic() < until and all(not process.returncode for process in started):
            if all(process.poll() is not None for process in started):
                break
            time.sleep(0.05)
    finally:
        for process in started:
            process.kill()
    found = [process.communicate()[0] for process in started]
    if any(process.returncode for process in started):
        raise SystemExit(f"compression_cell.py ended with {[process.returncode for process in started]}")
    return [json.loads(text.splitlines()[-1]) for text in found]


# -------------------------------------------------------------------------------------------------- bytes and seconds


def over_links(quick: bool) -> Iterator[Row]:
    """Measure all methods over links of each speed, or report why no link can be created."""
    given = {
        "what": "link", "methods": METHODS, "rank": RANK, "layers": QUICK_LAYERS if quick else LAYERS,
        "rounds": QUICK_ROUNDS if quick else ROUNDS,
    }  # fmt: skip
    try:
        with link() as ends:
            ranks = (_there(ends[0]), _there(ends[1]))
            for port, (name, rate) in enumerate(LINKS.items(), 29_600):
                shape(ends, rate)
                both = on_both(given, ranks, f"tcp://{ends[0].address}:{port}")
                if port == 29_600:
                    yield from _bytes(both)
                yield from _seconds(name, both)
    except NoLinkError as error:
        print(f"skipped: links of 100 Mbit/s and 1 Gbit/s between two network namespaces: {error}", flush=True)
        with tempfile.TemporaryDirectory(prefix="ratchet-compression-") as folder:
            both = on_both(given, (Rank(), Rank()), f"file://{folder}/meeting")
        yield from _bytes(both, shared=True)
        yield from _seconds("loopback", both)


def _there(end: End) -> Rank:
    return Rank(end.prefix, end.interface)


def _bytes(both: Sequence[dict[str, Any]], shared: bool = False) -> Iterator[Row]:
    """Yield rows for the bytes that a rank sends per sum. `shared`: the counter includes both ranks and is ignored."""
    methods = [one["methods"] for one in both]
    whole = sum(middle(method["none"]["sent"])[0] for method in methods)
    yield told("numbers in a gradient, millions", both[0]["numbers"] / 1e6)
    yield told("none: MB sent by a rank per sum", whole / 2e6)
    for name, settings in METHODS.items():
        sent = sum(middle(method[name]["sent"])[0] for method in methods)
        if name != "none":
            saved = 100 * (1 - sent / whole)
            yield told(f"{name}: bytes of a compressed sum, % less than none", saved)
            compressed = 1 - GradientCompressionSettings.model_validate(settings).uncompressed_steps(STEPS) / STEPS
            yield at_least(f"{name}: bytes of a whole training, % less than none", compressed * saved, SAVED_PERCENT)
        if not shared:
            counted = sum(middle(method[name]["counted"])[0] for method in methods)
            more = 100 * (counted / sent - 1)
            yield at_most(f"{name}: counted by the interfaces, % more than said", more, HEADERS_PERCENT)


def _seconds(link_name: str, both: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """Yield rows for the seconds until the later rank has the sum."""
    ranks = [one["methods"] for one in both]
    seconds = {
        name: [max(pair) for pair in zip(*(rank[name]["seconds"] for rank in ranks), strict=True)] for name in METHODS
    }
    for name, values in seconds.items():
        yield told(f"{link_name}, {name}: seconds that a sum adds to a step", *middle(values))
        if name != "none":
            yield told(f"{link_name}, {name}: none / {name}", *ratio(seconds["none"], values))


# --------------------------------------------------------------------------------------------------------------- loss


def after_equal_tokens(quick: bool) -> Iterator[Row]:
    """Compare the validation loss of each method with that of `none`."""
    with tempfile.TemporaryDirectory(prefix="ratchet-compression-") as folder:
        layout = small_project.build(Path(folder) / "project", TRAIN_ROWS, _settings())
        given = {
            "what": "loss", "methods": METHODS, "seeds": QUICK_SEEDS if quick else SEEDS, "train": TRAIN,
            "base": str(layout.tiny_model), "data": str(layout.data),
        }  # fmt: skip
        found = on_both(given, (Rank(), Rank()), f"file://{folder}/meeting")[0]
    losses = {name: [one["loss"] for one in runs] for name, runs in found.items()}
    everything = [one for runs in found.values() for one in runs]
    yield told("answer tokens trained, each training", everything[0]["tokens"])
    yield told("steps, each training", everything[0]["steps"])
    yield count("trainings with other tokens", sum(one["tokens"] != everything[0]["tokens"] for one in everything))
    yield count("trainings after which the ranks' weights differ", sum(not one["alike"] for one in everything))
    noise = statistics.stdev(losses["none"])
    standard_error = noise * (2 / len(losses["none"])) ** 0.5
    yield told("none: validation loss, nats per token", statistics.mean(losses["none"]))
    yield told("none: standard deviation from seed to seed", noise)
    for name, values in losses.items():
        if name != "none":
            above = statistics.mean(values) - statistics.mean(losses["none"])
            yield told(f"{name}: loss above none's, nats per token", above)
            row = f"{name}: loss above none's, standard errors"
            yield told(row, above / standard_error) if name in AGGRESSIVE else at_most(row, above / standard_error, 2)


def _settings() -> Settings:
    """Return the settings of the small project, with a base that is pre-trained for longer."""
    small = small_project.SETTINGS
    base = small.base.model_copy(update={"tiny": small.base.tiny.model_copy(update={"steps": BASE_STEPS})})
    return small.model_copy(update={"base": base})


def main() -> int:
    """Run the benchmark. The exit code is 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a quarter of the gradient, 5 rounds, 3 seeds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    parser.add_argument("--only", choices=("bytes", "loss"), help="run only this part")
    given = parser.parse_args()
    rows: list[Row] = []
    if given.only != "loss":
        rows += over_links(given.quick)
    if given.only != "bytes":
        rows += after_equal_tokens(given.quick)
    return finish(rows, given.json)


if __name__ == "__main__":
    sys.exit(main())
