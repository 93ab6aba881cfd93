"""The regular duties of a generating worker: answers made durable, shards sealed, progress told."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ratchet.errors import EXIT_INTERRUPTED, EXIT_OK, InterruptedRunError, RatchetError, StorageError
from ratchet.inference import backend_factory, prompts
from ratchet.inference.answer_shards import AnswerLedger
from ratchet.inference.backend import BackendCallbacks, GenerationRequest
from ratchet.inference.output import seal_result
from ratchet.inference.spec import ASKED, PROMPTS, GenerationAnswer, GenerationPaths, GenerationSpec, GenerationStart
from ratchet.runs.directory import RunPaths
from ratchet.runs.fault_injection.injection import FaultInjector
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import Journal, JournalReader
from ratchet.storage import files
from ratchet.training.exit_codes import report_worker_end
from ratchet.training.stopping import GracefulShutdown

EVERY_S = 1.0
_LIVE = {
    "rows": "rows", "held_tokens": "tokens", "waiting": "waiting", "budget_tokens": "budget_tokens",
    "available_bytes": "available_bytes", "device_bytes": "device_bytes", "held_bytes": "held_bytes",
    "forecast_bytes": "forecast_bytes", "chosen": "chosen", "doubted": "doubted",
}  # fmt: skip
"""Of what a model in memory tells of its batches, by the name that it has in the journal's `answered`."""


class AnswerFlusher:
    """Keeps what was answered, about every second; waits for a disk that takes nothing, but not for ever.

    Args:
        ledger: of the run.
        journal: of the run.
        shard_rows: answers that are sealed together.
        wait_s: how long a disk may take nothing (machine.storage_wait_s).
        clock_s: monotonic.
    """

    def __init__(
        self, ledger: AnswerLedger, journal: Journal, shard_rows: int, wait_s: float,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._ledger, self._journal, self._rows, self._wait_s, self._clock_s = (
            ledger,
            journal,
            shard_rows,
            wait_s,
            clock_s,
        )
        self._told_s = clock_s()
        self._tokens = 0
        self._finish = Counter[str]()
        """Answers since the last telling, by how they ended."""
        self._live: dict[str, Any] = {}
        self._failing_since_s: float | None = None

    def begin(self) -> None:
        """The model is loaded: seconds count from now on."""
        self._told_s = self._clock_s()

    def note(self, kind: str, data: Mapping[str, Any]) -> None:
        """Take what a speaker tells."""
        if kind == "batch":
            self._live = dict(data)
        elif kind == "budget":
            tokens, failed = data.get("tokens"), data.get("failed_tokens")
            self._journal.append(
                "budget", step=self._ledger.count, phase="generate", action=data["action"], failed_tokens=failed,
                budget={"tokens": tokens},
            )  # fmt: skip
        elif kind == "notice":
            self._journal.append("notice", text=str(data["text"]))
        else:
            self._journal.append("decoding", about=kind, **data)

    def answered(self, answer: GenerationAnswer) -> None:
        """One more; what is due is done."""
        self._tokens += answer.tokens or 0
        self._finish[answer.finish] += 1
        if self._clock_s() - self._told_s >= EVERY_S:
            self.keep()

    def keep(self) -> bool:
        """Make all durable, seal what can be sealed, and tell where we are; False: the disk does not take it now.

        Raises:
            StorageError: it has not for too long.
        """
        try:
            self._ledger.keep()
            self._seal()
        except OSError as error:
            self._fails(error)
            return False
        self._failing_since_s = None
        now_s = self._clock_s()
        self._journal.append(
            "answered", step=self._ledger.count, tokens=self._tokens, seconds=round(now_s - self._told_s, 4),
            finish=dict(self._finish), **{name: self._live.get(told) for name, told in _LIVE.items()},
        )  # fmt: skip
        self._told_s, self._tokens = now_s, 0
        self._finish.clear()
        return True

    def patiently(self, act: Callable[[], None], beat: Callable[[], None]) -> None:
        """Do it again until the disk takes it. Raises StorageError when it has not for too long."""
        while True:
            beat()
            try:
                act()
            except OSError as error:
                self._fails(error)
                time.sleep(EVERY_S)
            else:
                self._failing_since_s = None
                return

    def _seal(self) -> None:
        begun_s = self._clock_s()
        if count := self._ledger.seal(self._rows):
            seconds = round(self._clock_s() - begun_s, 4)
            self._journal.append("shard", step=self._ledger.count, answers=count, seconds=seconds)

    def _fails(self, error: OSError) -> None:
        now_s = self._clock_s()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
            self._journal.append("alert", text=f"answers cannot be kept ({error}); they wait in memory")
        self._told_s = now_s
        if now_s - self._failing_since_s > self._wait_s:
            raise StorageError(f"answers could not be kept: {error}. Make room, and repeat")


# The work of a generating process, from an opened run directory to a sealed result.

WITHOUT_LABELS = ("gguf", "endpoint")
ADVICE = "not in a batch, which would have been made smaller, but for the model itself: take a smaller one"


def run_worker(paths: RunPaths, attempt: int, stop: GracefulShutdown, heartbeat: Heartbeat) -> int:
    """Answer what is not answered yet, until the result is sealed or `stop` is asked; returns the exit code."""
    journal = Journal(paths.journal, attempt)
    try:
        _generate(paths, journal, stop, heartbeat)
    except BaseException as error:
        return report_worker_end(error, journal, ADVICE)
    return EXIT_OK


def _generate(paths: RunPaths, journal: Journal, stop: GracefulShutdown, heartbeat: Heartbeat) -> None:
    spec, start = GenerationSpec.load(paths.spec), GenerationStart.load(paths.launch)
    own = GenerationPaths(paths.root)
    files.verify_sealed(own.prompts, ASKED)
    samples, faults = spec.generate.samples, FaultInjector.from_environment()
    total = _count_prompts(own) * samples
    faults.watch_disk(lambda: ledger.count)
    ledger = AnswerLedger(own, journal.attempt, total, lambda text: _log_notice(journal, text))
    pace = AnswerFlusher(ledger, journal, start.generate.shard_rows, start.machine.storage_wait_s)
    ties = BackendCallbacks(
        beat=lambda: heartbeat.beat("step"),
        told=pace.note,
        before_pass=lambda tokens: faults.memory("generate", ledger.count, tokens),
        answered=lambda: ledger.count,
    )
    try:
        if ledger.count < total:
            heartbeat.beat("load")
            speaker = backend_factory.open_backend(spec.model.kind, start, ties)
            try:
                _report_precision_change(journal, speaker.about)
                _log_ready(journal, ledger, total, speaker.about)
                if spec.generate.labels and spec.model.kind in WITHOUT_LABELS:
                    _log_notice(journal, "whoever answers does not say how likely other answers are: "
                          "records have null for generate.labels")  # fmt: skip
                pace.begin()
                stop.arm(start.machine.grace_s, lambda: _exit_process(journal, ledger))
                heartbeat.beat("step")
                for answer in speaker.answers(_pending_requests(own, samples, ledger), lambda: stop.asked):
                    ledger.add(answer)
                    pace.answered(answer)
                    faults.in_step(ledger.count)
                    heartbeat.beat("step")
            finally:
                speaker.close()
        else:
            _log_ready(journal, ledger, total, {"device": "none", "compute_dtype": "none"})
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


def _pending_requests(paths: GenerationPaths, samples: int, ledger: AnswerLedger) -> Iterator[GenerationRequest]:
    """What is not answered yet, in the order of places."""
    for number, prompt in enumerate(prompts.read_prompts(paths.prompts)):
        for sample in range(samples):
            place = number * samples + sample
            if not ledger.has(place):
                yield GenerationRequest(place, sample, prompt)


def _count_prompts(paths: GenerationPaths) -> int:
    with (paths.prompts / PROMPTS).open("rb") as stream:
        return sum(1 for _ in stream)


def _log_notice(journal: Journal, text: str) -> None:
    journal.append("notice", text=text)


def _report_precision_change(journal: Journal, about: Mapping[str, Any]) -> None:
    """Say so where answers are computed otherwise than those before: on another device, or in other numbers."""
    earlier = [event.data for event in JournalReader(journal.path).read() if event.kind == "ready"]
    names = ("device", "compute_dtype")
    for before in earlier[-1:]:
        if before["device"] != "none" and any(before.get(name) != about[name] for name in names):
            was, now = (", ".join(str(one.get(name)) for name in names) for one in (before, about))
            _log_notice(journal, f"answers until now were computed on {was}, those from now on are on {now}: "
                  "together they are not what one of the two alone would give")  # fmt: skip


def _log_ready(journal: Journal, ledger: AnswerLedger, total: int, about: Mapping[str, Any]) -> None:
    journal.append("ready", start_step=ledger.count, planned_steps=total, **about)


def _keep_all(pace: AnswerFlusher) -> None:
    if not pace.keep():
        raise OSError("the disk takes nothing")


def _end_early(journal: Journal, ledger: AnswerLedger, pace: AnswerFlusher, stop: GracefulShutdown) -> None:
    """Some are not answered: we were asked to stop, or whoever answers has forgotten them."""
    if not stop.asked:
        raise RatchetError(f"{ledger.count:,} answers came, and more were asked for; repeat to go on, and report it")
    stop.begin()
    pace.keep()
    journal.append("stopped", step=ledger.count, **GenerationStart.counted_in)
    raise InterruptedRunError("stopped on request")


def _exit_process(journal: Journal, ledger: AnswerLedger) -> None:
    """From another thread, while a pass takes longer than the grace allows: what is in the ledger is kept."""
    journal.append("stopped", step=ledger.count, **GenerationStart.counted_in)
    os._exit(EXIT_INTERRUPTED)
