"""Loggers: write the metrics of a run for TensorBoard, W&B or DVCLive, as JSON lines, or by a class of a package.

A logger receives the rows of a run in order, each once. The journal is the only record of what was logged: at every
start, and after a failure, a logger begins with an empty folder and receives all rows again. So its output has each
point once after any kills, without a record of its position that could disagree with the output.
"""

import json
import netrc
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from ratchet.config.extensions import load_extension
from ratchet.config.extras import EXTRAS, require_libraries
from ratchet.config.machine import LOGGERS
from ratchet.config.settings import Settings
from ratchet.errors import first_line
from ratchet.runs.callbacks import RunCallback, Status
from ratchet.runs.directory import RunPaths, RunSpec
from ratchet.runs.journal import JournalEvent, JournalReader
from ratchet.runs.log import print_message
from ratchet.runs.tracking_payload import LeaderCallback, MetricPointExtractor, StoredSteps, collect_parameters
from ratchet.storage import files

STATE_FILE = "state.json"
"""File in the folder of a logger: the number of rows and the status at the end of the run. While the run has no other,
the output stays as it is, so `ratchet train` of a finished run changes nothing."""
MAX_ROWS = 1000
"""Maximum number of rows per call of a logger."""
WANDB_TIMEOUT_S = 30.0
"""Maximum wait for the server at the start of a run in W&B, and for the upload at its end."""


class MetricRow(NamedTuple):
    """Metrics of one event of the journal, under the names that they have in MLflow."""

    step: int
    """Optimizer step; for metrics that begin with `system/`, the number of the sample."""
    t: float
    """Unix time, in seconds."""
    values: Mapping[str, float]


@dataclass(frozen=True)
class LoggedRun:
    """Description of a run for its loggers."""

    id: str
    """RunId."""
    name: str
    """RunId; in a sweep, `trial N`."""
    group: str
    """Study of the sweep; empty for other runs."""
    project: str
    """Name under which the project registers its models (`promote.model_name`)."""
    parameters: Mapping[str, str]
    """Settings that determine the result, as in MLflow."""
    folder: Path
    """Empty folder for the output of the logger."""


class MetricLogger(Protocol):
    """Receiver of the metrics of a run. It is created with a LoggedRun.

    A class whose output is on a server sets `is_shared = True`: of several machines, only that of rank 0 logs. It also
    sets `logged_rows`, the number of rows that the server has already; they are not passed again.
    """

    def log(self, rows: Sequence[MetricRow]) -> None:
        """Log the next rows. After an exception, a new logger receives all rows again."""

    def finish(self, status: Status) -> None:
        """Close the output. A run that is not FINISHED may be resumed later, with a new logger."""


CreateLogger = Callable[[LoggedRun], MetricLogger]


def load_loggers(settings: Settings) -> dict[str, CreateLogger]:
    """Return the classes of `machine.loggers` by name, without MLflow, which has its own callback.

    Raises:
        MissingLibraryError: the library of one of them is not installed.
        SettingsError: the class of another package cannot be imported.
    """
    loggers: dict[str, CreateLogger] = {}
    for name in settings.machine.loggers:
        if name not in LOGGERS:
            loggers[name] = load_extension("ratchet.loggers", name, "machine.loggers")
        elif name != "mlflow":
            if name in EXTRAS:
                require_libraries(f"machine.loggers: {name}", name)
            loggers[name] = _LOGGER_CLASSES[name]
    return loggers


def create_callback(
    name: str, create: CreateLogger, run: RunPaths, settings: Settings, trial: tuple[str, int] | None = None
) -> RunCallback:
    """Create the callback of a logger for a run. A trial of a sweep is given by its study and its number."""
    callback = LoggerCallback(name, create, run, settings, trial)
    if getattr(create, "is_shared", False) and settings.machine.node_range[1] > 1:
        return LeaderCallback(callback, run.journal)
    return callback


class LoggerCallback:
    """Callback that passes the rows of a run to a logger."""

    is_deferred = True

    def __init__(
        self, name: str, create: CreateLogger, run: RunPaths, settings: Settings, trial: tuple[str, int] | None
    ) -> None:
        self.name = name
        self._create, self._paths, self._settings, self._trial = create, run, settings, trial
        self._folder = run.loggers / name
        self._rows = _RowReader(run.journal)
        self._logger: MetricLogger | None = None

    def on_events(self, events: Sequence[JournalEvent]) -> None:
        """Log what is new in the journal. This reads the journal itself, because a new logger needs all of it."""
        if self._logger is None:
            for _ in self._rows.read():
                pass
            if self._rows.count == self._read_state().get("rows", 0):
                return
        self._log()

    def on_end(self, status: Status) -> None:
        """Log the rest and close the output."""
        self.on_events(())
        if self._logger is None:
            if not self._rows.count or self._read_state().get("status") == status:
                return
            self._log()
        logger, self._logger = self._logger, None
        if logger is not None:
            logger.finish(status)
            files.write_json(self._folder / STATE_FILE, {"rows": self._rows.count, "status": status})

    def forget(self) -> None:
        """Give up the logger; the next call begins with a new one."""
        logger, self._logger = self._logger, None
        self._rows = _RowReader(self._paths.journal)
        if logger is not None:
            with suppress(Exception):  # it may be the logger that has failed
                logger.finish("KILLED")

    def _log(self) -> None:
        """Log the rows that are not logged yet; first create the logger, unless there is one."""
        try:
            if self._logger is None:
                self._logger = self._create_logger()
            rows = self._rows.read()
            while batch := list(islice(rows, MAX_ROWS)):
                self._logger.log(batch)
        except Exception:
            self.forget()
            raise

    def _create_logger(self) -> MetricLogger:
        """Create the logger with an empty folder, and skip the rows that it has already."""
        self._rows = _RowReader(self._paths.journal)
        if self._folder.exists():
            shutil.rmtree(self._folder)
        files.make_directory(self._folder)
        spec = RunSpec.load(self._paths.spec)
        study, number = self._trial or ("", 0)
        logger = self._create(
            LoggedRun(
                id=spec.run_id,
                name=f"trial {number}" if study else spec.run_id,
                group=study,
                project=self._settings.promote.model_name,
                parameters=collect_parameters(spec, self._settings),
                folder=self._folder,
            )
        )
        for _ in islice(self._rows.read(), getattr(logger, "logged_rows", 0)):
            pass
        return logger

    def _read_state(self) -> dict[str, Any]:
        try:
            state = json.loads((self._folder / STATE_FILE).read_bytes())
        except (FileNotFoundError, ValueError):  # nothing was logged, or a power loss cut the file off
            return {}
        return state if isinstance(state, dict) else {}


class LoggerCallbackGroup:
    """Callback that calls the callbacks of several loggers. If one fails, the others still receive their rows."""

    name = "loggers"

    def __init__(self, callbacks: Sequence[RunCallback]) -> None:
        self._callbacks = callbacks

    def on_events(self, events: Sequence[JournalEvent]) -> None:
        """Call every callback, and then raise the first failure."""
        self._call_all(lambda callback: callback.on_events(events))

    def on_end(self, status: Status) -> None:
        """Call every callback, and then raise the first failure."""
        self._call_all(lambda callback: callback.on_end(status))

    def _call_all(self, call: Callable[[RunCallback], None]) -> None:
        failures: list[Exception] = []
        for callback in self._callbacks:
            try:
                call(callback)
            except Exception as error:  # raised below, after the other callbacks
                error.args = (f"{callback.name}: {first_line(error)}",)
                failures.append(error)
        if failures:
            raise failures[0]


class _RowReader:
    """Reader of the rows of a journal. It follows the journal, and gives the same rows in the same order every time."""

    def __init__(self, journal: Path) -> None:
        self._reader, self._extractor, self._stored = JournalReader(journal), MetricPointExtractor(), StoredSteps()
        self.count = 0
        """Number of rows read so far."""

    def read(self) -> Iterator[MetricRow]:
        """Yield the next rows."""
        for event in self._reader.read():
            if points := self._stored.select_new(self._extractor.extract(event)):
                self._stored.add(points)
                self.count += 1
                yield MetricRow(points[0].step, event.t, {point.key: point.value for point in points})


class JsonLinesLogger:
    """Writes `metrics.jsonl`, a line for each row, and `run.json`."""

    def __init__(self, run: LoggedRun) -> None:
        described = {"id": run.id, "name": run.name, "group": run.group, "parameters": dict(run.parameters)}
        files.write_json(run.folder / "run.json", described)
        self._stream = (run.folder / "metrics.jsonl").open("w", encoding="utf-8")

    def log(self, rows: Sequence[MetricRow]) -> None:
        """Append a line for each row."""
        self._stream.writelines(json.dumps({"step": row.step, "t": row.t, **row.values}) + "\n" for row in rows)
        self._stream.flush()

    def finish(self, status: Status) -> None:
        """Close the file."""
        self._stream.close()


class TensorBoardLogger:
    """Writes an event file with the metrics as scalars, and the parameters for the page HParams.

    The file is written here, because TensorBoard's own EventFileWriter writes in a thread, which prints a traceback for
    every failure.
    """

    def __init__(self, run: LoggedRun) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams import metadata
        from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionStartInfo
        from tensorboard.summary.writer.record_writer import RecordWriter

        t = time.time()
        self._stream = (run.folder / f"events.out.tfevents.{t:010.0f}.{socket.gethostname()}.{os.getpid()}").open("wb")
        self._event, self._summary, self._writer = Event, Summary, RecordWriter(self._stream)
        start = SessionStartInfo(group_name=run.group, start_time_secs=t)
        for name, value in run.parameters.items():
            try:
                start.hparams[name].number_value = float(value)
            except ValueError:
                start.hparams[name].string_value = value
        data = metadata.create_summary_metadata(HParamsPluginData(session_start_info=start))
        parameters = Summary.Value(tag=metadata.SESSION_START_INFO_TAG, metadata=data, tensor=metadata.NULL_TENSOR)
        self._write(wall_time=t, file_version="brain.Event:2")
        # An open TensorBoard then drops the points of the file that this one replaces.
        self._write(wall_time=t, session_log=SessionLog(status=SessionLog.START))
        self._write(wall_time=t, summary=Summary(value=[parameters]))

    def _write(self, **fields: Any) -> None:
        self._writer.write(self._event(**fields).SerializeToString())

    def log(self, rows: Sequence[MetricRow]) -> None:
        """Write the rows, and flush them."""
        for row in rows:
            values = [self._summary.Value(tag=key, simple_value=value) for key, value in row.values.items()]
            self._write(step=row.step, wall_time=row.t, summary=self._summary(value=values))
        self._writer.flush()

    def finish(self, status: Status) -> None:
        """Close the file."""
        self._writer.close()


class DvcliveLogger:
    """Writes the files of DVCLive: a table for each metric, the last values, the parameters, and their `dvc.yaml`."""

    def __init__(self, run: LoggedRun) -> None:
        from dvclive import Live

        class LiveFiles(Live):  # type: ignore[misc]
            """Files alone. Live itself would make a DVC repository of any git repository around the current folder."""

            def _init_dvc(self) -> None:
                self._dvc_file = self._init_dvc_file()

        self._live = LiveFiles(str(run.folder), dvcyaml=str(run.folder / "dvc.yaml"), save_dvc_exp=False)
        self._live.log_params(dict(run.parameters))
        self._step = 0

    def log(self, rows: Sequence[MetricRow]) -> None:
        """Append the rows to the tables, and write the last values."""
        for row in rows:
            self._live.step = row.step
            for key, value in row.values.items():
                self._live.log_metric(key, value)
                if not key.startswith("system/"):
                    self._step = row.step
        self._live.step = self._step
        self._live.make_summary()
        self._live.make_dvcyaml()

    def finish(self, status: Status) -> None:
        """Do nothing: everything is written."""


class WandbLogger:
    """Logs to Weights & Biases: online with a key in the environment or in ~/.netrc, otherwise offline.

    Each row is a step of W&B; the axes are the metrics `step` and `system/sample`. W&B receives the metrics and the
    parameters, and nothing else about the machine.
    """

    is_shared = True

    def __init__(self, run: LoggedRun) -> None:
        import wandb

        # A service that an earlier process shares by this variable would keep the run open after a kill of this one.
        os.environ.pop("WANDB_SERVICE", None)
        mode: Any = os.environ.get("WANDB_MODE") or ("online" if _has_wandb_key() else "offline")
        settings = wandb.Settings(
            console="off", silent=True, disable_code=True, disable_git=True, label_disable=True,
            x_disable_machine_info=True, x_disable_stats=True, x_save_requirements=False,
            init_timeout=WANDB_TIMEOUT_S, finish_timeout=WANDB_TIMEOUT_S,
        )  # fmt: skip
        wandb.setup(settings)  # so that the login, which comes before the run, is silent too
        self._run = wandb.init(
            id=run.id, name=run.name, group=run.group or None, job_type="trial" if run.group else "train",
            project=os.environ.get("WANDB_PROJECT") or run.project, config=dict(run.parameters), dir=str(run.folder),
            mode=mode, resume="allow", reinit="create_new", settings=settings,
        )  # fmt: skip
        folder = Path(self._run.dir).parent
        print_message(f"wandb: {self._run.url or f'{mode}; `wandb sync {folder}` sends the run'}")
        self.logged_rows = self._next_row = self._run.starting_step
        for prefix, axis in (("train", "step"), ("validation", "step"), ("system", "system/sample")):
            self._run.define_metric(f"{prefix}/*", step_metric=axis)

    def log(self, rows: Sequence[MetricRow]) -> None:
        """Log each row as a step."""
        for row in rows:
            is_system = any(key.startswith("system/") for key in row.values)
            axis = {"system/sample" if is_system else "step": row.step}
            self._run.log({**axis, **row.values, "_timestamp": row.t}, step=self._next_row, commit=True)
            self._next_row += 1

    def finish(self, status: Status) -> None:
        """End the run in W&B, where a run that was stopped shows as failed until it is resumed."""
        self._run.finish(exit_code=0 if status == "FINISHED" else 1)


def _has_wandb_key() -> bool:
    """Return whether W&B would find a key without asking for it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


_LOGGER_CLASSES: Mapping[str, CreateLogger] = {
    "tensorboard": TensorBoardLogger,
    "wandb": WandbLogger,
    "dvclive": DvcliveLogger,
    "json_lines": JsonLinesLogger,
}
"""Classes by their names in LOGGERS."""
