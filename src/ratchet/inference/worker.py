"""The work of a generating process, from an opened run directory to a sealed result."""

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ratchet.errors import EXIT_INTERRUPTED, EXIT_OK, InterruptedRunError, RatchetError
from ratchet.inference import backend_factory, prompts
from ratchet.inference.answer_shards import Ledger
from ratchet.inference.backend import Question, Ties
from ratchet.inference.flush_loop import Pace
from ratchet.inference.output import seal_result
from ratchet.inference.spec import ASKED, PROMPTS, GenerationPaths, GenerationSpec, GenerationStart
from ratchet.runs.directory import RunPaths
from ratchet.runs.fault_injection.injection import Injection
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import Journal, Reader
from ratchet.storage import files
from ratchet.training.exit_codes import outcome
from ratchet.training.stopping import Stopping

WITHOUT_LABELS = ("gguf", "endpoint")
ADVICE = "not in a batch, which would have been made smaller, but for the model itself: take a smaller one"


def work(paths: RunPaths, attempt: int, stop: Stopping, heartbeat: Heartbeat) -> int:
    """Answer what is not answered yet, until the result is sealed or `stop` is asked; returns the exit code."""
    journal = Journal(paths.journal, attempt)
    try:
        _generate(paths, journal, stop, heartbeat)
    except BaseException as error:
        return outcome(error, journal, ADVICE)
    return EXIT_OK


def _generate(paths: RunPaths, journal: Journal, stop: Stopping, heartbeat: Heartbeat) -> None:
    spec, start = GenerationSpec.load(paths.spec), GenerationStart.load(paths.launch)
    own = GenerationPaths(paths.root)
    files.verify(own.prompts, ASKED)
    samples, faults = spec.generate.samples, Injection.from_environment()
    total = _count(own) * samples
    faults.watch_disk(lambda: ledger.count)
    ledger = Ledger(own, journal.attempt, total, lambda text: _told(journal, text))
    pace = Pace(ledger, journal, start.generate.shard_rows, start.machine.storage_wait_s)
    ties = Ties(
        beat=lambda: heartbeat.beat("step"),
        told=pace.note,
        before_pass=lambda tokens: faults.memory("generate", ledger.count, tokens),
        answered=lambda: ledger.count,
    )
    try:
        if ledger.count < total:
            heartbeat.beat("load")
            speaker = backend_factory.opened(spec.model.kind, start, ties)
            try:
                _compare_numbers(journal, speaker.about)
                _tell_ready(journal, ledger, total, speaker.about)
                if spec.generate.labels and spec.model.kind in WITHOUT_LABELS:
                    _told(journal, "whoever answers does not say how likely other answers are: records have null for "
                          "generate.labels")  # fmt: skip
                pace.begin()
                stop.arm(start.machine.grace_s, lambda: _leave(journal, ledger))
                heartbeat.beat("step")
                for answer in speaker.answers(_questions(own, samples, ledger), lambda: stop.asked):
                    ledger.add(answer)
                    pace.answered(answer)
                    faults.in_step(ledger.count)
                    heartbeat.beat("step")
            finally:
                speaker.close()
        else:
            _tell_ready(journal, ledger, total, {"device": "none", "compute_dtype": "none"})
        if ledger.count < total:
            _end_early(journal, ledger, pace, stop)
        heartbeat.beat("save")
        pace.patiently(lambda: _keep_all(pace), lambda: heartbeat.beat("save"))
        pace.patiently(lambda: seal_result(own, spec, ledger), lambda: heartbeat.beat("save"))
        journal.append("finished", step=total, reason="completed")
        journal.sync()
        ledger.remove()
    finally:
        ledger.close()


def _questions(paths: GenerationPaths, samples: int, ledger: Ledger) -> Iterator[Question]:
    """What is not answered yet, in the order of places."""
    for number, prompt in enumerate(prompts.kept(paths.prompts)):
        for sample in range(samples):
            place = number * samples + sample
            if not ledger.has(place):
                yield Question(place, sample, prompt)


def _count(paths: GenerationPaths) -> int:
    with (paths.prompts / PROMPTS).open("rb") as stream:
        return sum(1 for _ in stream)


def _told(journal: Journal, text: str) -> None:
    journal.append("notice", text=text)


def _compare_numbers(journal: Journal, about: Mapping[str, Any]) -> None:
    """Say so where answers are computed otherwise than those before: on another device, or in other numbers."""
    earlier = [event.data for event in Reader(journal.path).read() if event.kind == "ready"]
    names = ("device", "compute_dtype")
    for before in earlier[-1:]:
        if before["device"] != "none" and any(before.get(name) != about[name] for name in names):
            was, now = (", ".join(str(one.get(name)) for name in names) for one in (before, about))
            _told(journal, f"answers until now were computed on {was}, those from now on are on {now}: together they "
                  "are not what one of the two alone would give")  # fmt: skip


def _tell_ready(journal: Journal, ledger: Ledger, total: int, about: Mapping[str, Any]) -> None:
    journal.append("ready", start_step=ledger.count, planned_steps=total, **about)


def _keep_all(pace: Pace) -> None:
    if not pace.keep():
        raise OSError("the disk takes nothing")


def _end_early(journal: Journal, ledger: Ledger, pace: Pace, stop: Stopping) -> None:
    """Some are not answered: we were asked to stop, or whoever answers has forgotten them."""
    if not stop.asked:
        raise RatchetError(f"{ledger.count:,} answers came, and more were asked for; repeat to go on, and report it")
    stop.begin()
    pace.keep()
    journal.append("stopped", step=ledger.count, **GenerationStart.counted_in)
    raise InterruptedRunError("stopped on request")


def _leave(journal: Journal, ledger: Ledger) -> None:
    """From another thread, while a pass takes longer than the grace allows: what is in the ledger is kept."""
    journal.append("stopped", step=ledger.count, **GenerationStart.counted_in)
    os._exit(EXIT_INTERRUPTED)
