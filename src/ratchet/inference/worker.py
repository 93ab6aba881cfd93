"""The worker process of a generation: generates the missing answers, saves them, and seals the result."""

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ratchet.errors import EXIT_INTERRUPTED, EXIT_OK, InterruptedRunError, RatchetError, StorageError
from ratchet.inference import prompts
from ratchet.inference.backend import BackendCallbacks, GenerationRequest
from ratchet.inference.backend_factory import open_backend
from ratchet.inference.output import AnswerLedger, seal_result
from ratchet.inference.spec import (
    PROMPTS,
    PROMPTS_KIND,
    GenerationAnswer,
    GenerationPaths,
    GenerationSpec,
    GenerationStart,
)
from ratchet.runs.directory import RunPaths
from ratchet.runs.fault_injection.injection import FaultInjector
from ratchet.runs.heartbeat import Heartbeat
from ratchet.runs.journal import Journal, JournalReader
from ratchet.runs.signals import GracefulShutdown
from ratchet.storage import files
from ratchet.training.exit_codes import report_worker_end

FLUSH_INTERVAL_S = 1.0

KINDS_WITHOUT_LABELS = ("gguf", "endpoint")
OUT_OF_MEMORY_ADVICE = "the model itself does not fit, so a smaller batch does not help; use a smaller model"

_BATCH_KEYS = {
    "rows": "rows", "held_tokens": "tokens", "waiting": "waiting", "budget_tokens": "budget_tokens",
    "available_bytes": "available_bytes", "device_bytes": "device_bytes", "held_bytes": "held_bytes",
    "forecast_bytes": "forecast_bytes", "tokens_chosen": "tokens_chosen", "tokens_rechecked": "tokens_rechecked",
}  # fmt: skip
"""Keys of the values in a backend's `batch` event, by their keys in the journal's event `generation_progress`."""


class AnswerFlusher:
    """Saves answers about once a second and logs the progress; tolerates a full disk for a limited time.

    Args:
        ledger: ledger of the run.
        journal: journal of the run.
        shard_rows: answers per shard.
        wait_s: how long writing may fail, in seconds (machine.storage_timeout_s).
        clock_s: monotonic clock, in seconds.
    """

    def __init__(
        self, ledger: AnswerLedger, journal: Journal, shard_rows: int, wait_s: float,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        self._ledger, self._journal, self._shard_rows = ledger, journal, shard_rows
        self._wait_s, self._clock_s = wait_s, clock_s
        self._flushed_s = clock_s()
        self._tokens = 0
        self._finish = Counter[str]()
        """Answers since the last flush, by finish reason."""
        self._batch_state: dict[str, Any] = {}
        self._failing_since_s: float | None = None

    def start_timer(self) -> None:
        """Restart the timer, after the model was loaded."""
        self._flushed_s = self._clock_s()

    def on_event(self, kind: str, data: Mapping[str, Any]) -> None:
        """Handle an event of the backend."""
        if kind == "batch":
            self._batch_state = dict(data)
        elif kind == "budget":
            self._journal.append(
                "microbatch_budget", step=self._ledger.count, phase="generate", action=data["action"],
                failed_tokens=data.get("failed_tokens"), budget={"tokens": data.get("tokens")},
            )  # fmt: skip
        elif kind == "notice":
            self._journal.append("notice", text=str(data["text"]))
        else:
            self._journal.append("decoding", topic=kind, **data)

    def add(self, answer: GenerationAnswer) -> None:
        """Count an answer, and flush if the last flush was FLUSH_INTERVAL_S ago."""
        self._tokens += answer.tokens or 0
        self._finish[answer.finish] += 1
        if self._clock_s() - self._flushed_s >= FLUSH_INTERVAL_S:
            self.flush()

    def flush(self) -> bool:
        """Sync all answers, seal complete shards, and log the progress; return False if writing fails.

        Raises:
            StorageError: writing has failed for too long.
        """
        try:
            self._ledger.sync()
            self._seal()
        except OSError as error:
            self._report_storage_error(error)
            return False
        self._failing_since_s = None
        now_s = self._clock_s()
        self._journal.append(
            "generation_progress", step=self._ledger.count, tokens=self._tokens,
            seconds=round(now_s - self._flushed_s, 4), finish=dict(self._finish),
            **{name: self._batch_state.get(key) for name, key in _BATCH_KEYS.items()},
        )  # fmt: skip
        self._flushed_s, self._tokens = now_s, 0
        self._finish.clear()
        return True

    def retry_until_saved(self, action: Callable[[], None], beat: Callable[[], None]) -> None:
        """Repeat an action until it raises no OSError. Raises StorageError if it fails for too long."""
        while True:
            beat()
            try:
                action()
            except OSError as error:
                self._report_storage_error(error)
                time.sleep(FLUSH_INTERVAL_S)
            else:
                self._failing_since_s = None
                return

    def _seal(self) -> None:
        start_s = self._clock_s()
        if count := self._ledger.seal(self._shard_rows):
            seconds = round(self._clock_s() - start_s, 4)
            self._journal.append("answers_saved", step=self._ledger.count, answers=count, seconds=seconds)

    def _report_storage_error(self, error: OSError) -> None:
        now_s = self._clock_s()
        if self._failing_since_s is None:
            self._failing_since_s = now_s
            self._journal.append("alert", text=f"answers cannot be saved ({error}); they stay in memory")
        self._flushed_s = now_s
        if now_s - self._failing_since_s > self._wait_s:
            raise StorageError(f"answers cannot be saved: {error}; free disk space and run the command again")


def run_worker(paths: RunPaths, attempt: int, stop: GracefulShutdown, heartbeat: Heartbeat) -> int:
    """Generate the missing answers and seal the result, or stop on request; return the exit code."""
    journal = Journal(paths.journal, attempt)
    try:
        _generate(paths, journal, stop, heartbeat)
    except BaseException as error:
        return report_worker_end(error, journal, OUT_OF_MEMORY_ADVICE)
    return EXIT_OK


def _generate(paths: RunPaths, journal: Journal, stop: GracefulShutdown, heartbeat: Heartbeat) -> None:
    spec, start = GenerationSpec.load(paths.spec), GenerationStart.load(paths.launch)
    generation_paths = GenerationPaths(paths.root)
    files.verify_sealed(generation_paths.prompts, PROMPTS_KIND)
    samples, faults = spec.generate.samples, FaultInjector.from_environment()
    with (generation_paths.prompts / PROMPTS).open("rb") as stream:
        total = sum(1 for _ in stream) * samples
    faults.watch_disk(lambda: ledger.count)
    ledger = AnswerLedger(generation_paths, journal.attempt, total, lambda text: _log_notice(journal, text))
    flusher = AnswerFlusher(ledger, journal, start.generate.shard_rows, start.machine.storage_timeout_s)
    callbacks = BackendCallbacks(
        heartbeat=lambda: heartbeat.beat("step"),
        on_event=flusher.on_event,
        before_forward=lambda tokens: faults.memory("generate", ledger.count, tokens),
        answer_count=lambda: ledger.count,
    )
    try:
        if ledger.count < total:
            heartbeat.beat("load")
            backend = open_backend(spec.model.kind, start, callbacks)
            try:
                _report_precision_change(journal, backend.device_info)
                _log_ready(journal, ledger, total, backend.device_info)
                if spec.generate.labels and spec.model.kind in KINDS_WITHOUT_LABELS:
                    _log_notice(
                        journal,
                        "this backend does not compute likelihoods of given answers, so records have null for "
                        "generate.labels",
                    )
                flusher.start_timer()
                stop.arm(start.machine.grace_period_s, lambda: _exit_process(journal, ledger))
                heartbeat.beat("step")
                requests = _unanswered_requests(generation_paths, samples, ledger)
                for answer in backend.generate(requests, lambda: stop.is_requested):
                    ledger.add(answer)
                    flusher.add(answer)
                    faults.in_step(ledger.count)
                    heartbeat.beat("step")
            finally:
                backend.close()
        else:
            _log_ready(journal, ledger, total, {"device": "none", "compute_dtype": "none"})
        if ledger.count < total:
            _end_early(journal, ledger, flusher, stop)
        heartbeat.beat("save")
        flusher.retry_until_saved(lambda: _flush_or_raise(flusher), lambda: heartbeat.beat("save"))
        flusher.retry_until_saved(lambda: seal_result(generation_paths, spec, ledger), lambda: heartbeat.beat("save"))
        journal.append("finished", step=total, reason="completed")
        journal.sync()
        ledger.remove()
    finally:
        ledger.close()


def _unanswered_requests(paths: GenerationPaths, samples: int, ledger: AnswerLedger) -> Iterator[GenerationRequest]:
    """Yield the requests without an answer, in the order of indices."""
    for number, prompt in enumerate(prompts.read_prompts(paths.prompts)):
        for sample in range(samples):
            index = number * samples + sample
            if not ledger.has(index):
                yield GenerationRequest(index, sample, prompt)


def _log_notice(journal: Journal, text: str) -> None:
    journal.append("notice", text=text)


def _report_precision_change(journal: Journal, device_info: Mapping[str, Any]) -> None:
    """Log a notice if earlier answers were computed on another device or with another data type."""
    earlier = [event.data for event in JournalReader(journal.path).read() if event.kind == "worker_ready"]
    names = ("device", "compute_dtype")
    for previous in earlier[-1:]:
        if previous["device"] != "none" and any(previous.get(name) != device_info[name] for name in names):
            before, after = (", ".join(str(info.get(name)) for name in names) for info in (previous, device_info))
            _log_notice(
                journal,
                f"earlier answers were computed on {before}, further answers are computed on {after}; the output "
                "differs from that of either alone",
            )


def _log_ready(journal: Journal, ledger: AnswerLedger, total: int, device_info: Mapping[str, Any]) -> None:
    journal.append("worker_ready", start_step=ledger.count, planned_steps=total, **device_info)


def _flush_or_raise(flusher: AnswerFlusher) -> None:
    if not flusher.flush():
        raise OSError("answers cannot be written to disk")


def _end_early(journal: Journal, ledger: AnswerLedger, flusher: AnswerFlusher, stop: GracefulShutdown) -> None:
    """End the run on a stop request. Without a request, the backend has lost answers, which is an error."""
    if not stop.is_requested:
        raise RatchetError(
            f"the backend returned only {ledger.count:,} answers; run the command again to resume, and report this bug"
        )
    stop.acknowledge()
    flusher.flush()
    journal.append("interrupted", step=ledger.count, **GenerationStart.work_unit)
    raise InterruptedRunError("stopped on request")


def _exit_process(journal: Journal, ledger: AnswerLedger) -> None:
    """Exit from another thread if a forward pass exceeds the grace period; answers in the ledger are saved."""
    journal.append("interrupted", step=ledger.count, **GenerationStart.work_unit)
    os._exit(EXIT_INTERRUPTED)
