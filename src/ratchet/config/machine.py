"""Section `machine` of params.yaml: how a run executes on this machine. It changes neither results nor the RunId."""

import math
import re
import threading
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args
from urllib.parse import unquote, urlsplit

from pydantic import BeforeValidator, Field, ValidationInfo, model_validator

from ratchet.config.extensions import make_name_validator
from ratchet.config.fields import (
    CHECK_ENVIRONMENT,
    Count,
    Name,
    NotNegative,
    OptionalPositiveCount,
    Positive,
    PositiveCount,
    Section,
    convert_to_tuple,
    parse_count,
    parse_interval,
    parse_number,
    parse_size,
)

MIN_LOG_BYTES = 4096
"""Enough for one record with its fields."""

UNUSABLE_STUDY_DATABASES = {
    "sqlite": "an SQLite file cannot be shared by machines; null uses one in the project",
    "mysql": "only PostgreSQL is tested",
    "redis": "only PostgreSQL is tested, and Redis may lose stored data",
}
"""Reasons against other databases of studies, by scheme of the address."""

S3_SCHEMES = ("s3", "s3a")
GOOGLE_SCHEMES = ("gs", "gcs")
AZURE_SCHEMES = ("az", "abfs", "abfss")
LOCAL_SCHEMES = ("", "file", "local")
"""Schemes of a replica that is a folder; empty: the address is a path."""
LOGGERS = ("mlflow", "tensorboard", "wandb", "dvclive", "json_lines")
"""Names of the loggers that are part of Ratchet (tracking/loggers.py)."""
STAT_TIMEOUT_S = 2.0
"""Longest wait for a disk that is asked whether a path is a file. A network disk may not answer at all."""


def find_study_storage_problem(url: str) -> str:
    """Return why an address cannot be that of a study database; empty if it can. The text has no part of the address
    but its scheme, because the rest may be a password."""
    expected = "expected postgresql://USER@HOST:PORT/DATABASE, or null for an SQLite file in experiments/sweeps"
    scheme = url.partition(":")[0].lower()
    if not re.fullmatch(r"postgres(ql)?(\+psycopg)?", scheme):
        reason = UNUSABLE_STUDY_DATABASES.get(scheme.partition("+")[0], "only PostgreSQL is supported")
        return f"{expected}; {reason}"
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (raises ValueError for an invalid port)
    except ValueError:
        return f"invalid host or port; {expected}"
    if parts.password is not None or "password=" in parts.query:
        return (
            "expected an address without a password, because params.yaml is committed to git; remove it (and change "
            "it), and set it in the environment variable PGPASSWORD or in ~/.pgpass"
        )
    return "" if parts.path.strip("/") else f"the address has no database; {expected}"


def find_replica_problem(url: str) -> str:
    """Return why an address cannot be that of a replica; empty if it can. Only the text is checked."""
    if not url.isprintable():
        return "expected an address without control characters"
    if url.startswith("/") and "://" not in url:
        return ""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 (raises ValueError for an invalid port)
    except ValueError:
        return "expected a URL with a valid host and port, such as s3://BUCKET/FOLDER"
    scheme = parts.scheme
    checks = (
        (
            parts.password is not None or "?" in url,
            "a URL without a password or query, because params.yaml is committed to git; put credentials into the "
            "environment",
        ),
        ("#" in url, "a URL without #"),
        (
            not re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", url),
            "a URL such as s3://BUCKET/FOLDER, or an absolute path",
        ),
        (
            scheme not in (*S3_SCHEMES, *GOOGLE_SCHEMES, *AZURE_SCHEMES, *LOCAL_SCHEMES),
            f"a shared folder, s3://, gs:// or az://; scheme {scheme} cannot hold a replica (mount other storage as a "
            "folder, for example with sshfs or rclone)",
        ),
        (
            scheme in LOCAL_SCHEMES and (parts.netloc or not parts.path.startswith("/")),
            "file:///FOLDER, an absolute path",
        ),
        (
            scheme in S3_SCHEMES and not re.fullmatch(r"[A-Za-z0-9._-]{1,255}", parts.netloc),
            f"{scheme}://BUCKET/FOLDER with the name of a bucket",
        ),
        (
            scheme in (*GOOGLE_SCHEMES, *AZURE_SCHEMES) and not parts.netloc.strip("@"),
            f"{scheme}://BUCKET/FOLDER",
        ),
    )
    return next((f"expected {expected}" for is_wrong, expected in checks if is_wrong), "")


def find_replica_environment_problem(url: str) -> str:
    """Return why this machine cannot use a replica with this valid address; empty if it can. No server is contacted."""
    if (folder := parse_local_folder(url)) is not None and (file := _find_file_in_path(folder)):
        return f"expected a folder, but {file} is not one"
    if find_spec("obstore") is None:
        return "expected the library obstore, which is not installed; pip install 'ratchet-llm[storage]'"
    return ""


def parse_local_folder(url: str) -> Path | None:
    """Return the folder that is the replica; None if the replica is in another kind of storage."""
    if "://" not in url:
        return Path(url)
    parts = urlsplit(url)
    return Path(unquote(parts.path)) if parts.scheme in LOCAL_SCHEMES else None


def _find_file_in_path(folder: Path) -> Path | None:
    """Return the part of a path that exists and is not a folder; None if there is none, or the disk does not answer."""
    found: list[Path] = []

    def look() -> None:
        with suppress(OSError):
            existing = next(path for path in (folder, *folder.parents) if path.exists())
            found.extend([] if existing.is_dir() else [existing])

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(STAT_TIMEOUT_S)
    return found[0] if found else None


# Validators: each takes a value as written in params.yaml, and returns what pydantic then checks.


def _parse_auto_count(value: Any) -> Any:
    return parse_count(value, "auto")


def _check_interval(value: Any) -> Any:
    value = parse_number(value)
    parse_interval(value)
    return value


def _check_study_storage(value: Any) -> Any:
    if isinstance(value, str) and (problem := find_study_storage_problem(value)):
        raise ValueError(problem)
    return value


def _parse_worker_gpus(value: Any) -> Any:
    value = parse_number(value)
    if value != "auto" and (not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value < math.inf):
        raise ValueError("expected a number of GPUs >= 0, or auto")
    return value


def _parse_nodes(value: Any) -> Any:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    match = re.fullmatch(r"([0-9]+)(?::([0-9]+))?", text) if isinstance(text, str) else None
    if not match or not 1 <= int(match[1]) <= int(match[2] or match[1]):
        raise ValueError("expected a number of machines such as 4, or MIN:MAX such as 2:8")
    return text


def _check_rendezvous(value: Any) -> Any:
    match = re.fullmatch(r"[^\s/:]+:([0-9]{1,5})", value) if isinstance(value, str) else None
    if isinstance(value, str) and not (match and 0 < int(match[1]) < 65536):
        raise ValueError("expected HOST:PORT, where HOST is one of the machines")
    return value


def _check_replica_url(value: Any, info: ValidationInfo) -> Any:
    if isinstance(value, str):
        problem = find_replica_problem(value)
        if not problem and (info.context or {}).get(CHECK_ENVIRONMENT):
            problem = find_replica_environment_problem(value)
        if problem:
            raise ValueError(problem)
    return value


def _parse_log_bytes(value: Any) -> Any:
    size = parse_size(value)
    if isinstance(size, int) and not isinstance(size, bool) and size < MIN_LOG_BYTES:
        raise ValueError(f"expected at least {MIN_LOG_BYTES} bytes, enough for one line")
    return size


def find_server_problem(value: str) -> str | None:
    """Return why a text is not the address of an MLflow server; None if it is one."""
    if re.match(r"[^/]*://[^/@]*@", value):
        return (
            "expected an address without user and password; put them into MLFLOW_TRACKING_USERNAME and "
            "MLFLOW_TRACKING_PASSWORD"
        )
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", value):
        return "expected the address of an MLflow server, http://HOST:PORT or https://HOST"
    return None


def _check_tracking_uri(value: Any) -> Any:
    if isinstance(value, str) and (problem := find_server_problem(value)):
        raise ValueError(problem)
    return value


def _parse_loggers(value: Any) -> Any:
    names = convert_to_tuple(value)
    if isinstance(names, tuple) and len({*map(str, names)}) < len(names):
        raise ValueError("expected each logger once")
    return names


def _check_metrics_file(value: Any) -> Any:
    if isinstance(value, str) and not (value.startswith("/") and re.search(r"[^/]\.prom$", value)):
        raise ValueError("expected an absolute path that ends in .prom")
    return value


WebhookEvent = Literal["finished", "failed", "stalled", "gated", "promoted", "alarm"]


class EndpointSettings(Section):
    """Requests to OpenAI-compatible servers (vLLM, llama.cpp and others); the key is in RATCHET_ENDPOINT_KEY."""

    max_concurrency: PositiveCount = 8
    """Requests in flight at once."""
    timeout_s: Positive = 600.0
    """Timeout of a whole answer, in seconds. Then the request is sent again."""
    max_attempts: PositiveCount = 8
    """Attempts per request, after status 429 and 5xx, broken connections, stalls and unusable answers; then exit 75."""
    retry_delay_s: Positive = 1.0
    """Delay before the second attempt, in seconds. It doubles up to 60 s; a Retry-After header overrides it."""


class RaySettings(Section):
    """Ray cluster for `ratchet sweep --engine ray`."""

    address: Name = "auto"
    """HOST:PORT of the cluster's head, or `auto`: RAY_ADDRESS, or the cluster of this machine."""
    cpus: Positive = 1
    """CPUs per worker; also its threads if machine.threads is 0."""
    gpus: Annotated[float | Literal["auto"], BeforeValidator(_parse_worker_gpus)] = "auto"
    """GPUs per worker. `auto`: one if any node has one. Set a number if nodes with GPUs start on demand."""
    resources: dict[Name, Positive] = Field(default_factory=dict)
    """Custom resources per worker, such as {spot: 1}: only nodes that were started with them are used."""
    max_restarts: ClassVar[int] = 50
    """Replacements of each worker whose node was lost before the sweep fails."""


class Machine(Section):
    """How a run executes on this machine. Changes neither results nor the RunId."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the model. `auto`: a GPU if there is one."""
    gpus: Annotated[int | Literal["auto"], BeforeValidator(_parse_auto_count)] = "auto"
    """Ranks on this machine, one per GPU (processes on CPUs). `auto`: one for each GPU."""
    nodes: Annotated[str, BeforeValidator(_parse_nodes)] = "1"
    """Machines that train one run together: a number, or MIN:MAX. Within the range, machines can join and leave."""
    rendezvous: Annotated[str | None, BeforeValidator(_check_rendezvous)] = None
    """Address where several machines meet, HOST:PORT. Choose the host that runs longest."""
    rendezvous_timeout_s: Positive = 900.0
    """Timeout for MIN machines to join, in seconds."""
    peer_timeout_s: ClassVar[float] = 300.0
    """A rank that waits this long for other ranks, in seconds, treats them as lost."""
    node_cooldown_s: ClassVar[float] = 600.0
    """A machine whose ranks fail twice within this time, in seconds, is excluded for as long."""
    threads: Count = 0
    """CPU threads of torch; affects rounding. 0: one per physical core, but one in all if hidden_size < 512."""
    llama_cpp: str | None = None
    """Directory of llama.cpp (checkout or installation) with its tools. null: those on PATH, if any."""
    micro_batch_size: PositiveCount = 8
    """Rows (packs, if packed: 1 saves memory) computed at once. Another size changes rounding and dropout draws."""
    micro_batch_tokens: OptionalPositiveCount = None
    """Maximum tokens computed at once, padding included; long rows then form smaller micro-batches. null: no limit."""
    evaluation_batch_size: Annotated[int | Literal["auto"], BeforeValidator(_parse_auto_count)] = "auto"
    """Rows scored at once. `auto`: as many as fit. Halved for all models alike if memory runs out."""
    activation_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass: less memory, a third more time. `auto`: only if needed to fit."""
    shard_base: bool | Literal["auto"] = "auto"
    """Shard the frozen base over the ranks (FSDP); layers are gathered at each use. `auto`: only if needed to fit."""
    on_insufficient_memory: Literal["refuse", "report"] = "refuse"
    """If the forecast exceeds the memory: refuse the run before anything is loaded, or only report it."""
    memory_ladder: bool = False
    """Act before the device's memory runs out: at 80 % a notice, 85 % smaller micro-batches, 95 % a checkpoint too."""
    max_gpu_celsius: OptionalPositiveCount = None
    """Pause training while a GPU is hotter than this, until it is 5 degrees below. null: no limit."""
    memory_warnings: ClassVar[tuple[float, ...]] = (0.9, 0.97)
    """Fractions of the device's memory. The first time that a phase of a run exceeds one, there is an alert."""
    checkpoint_every: Annotated[str | int, BeforeValidator(_check_interval)] = "auto"
    """Checkpoint interval: optimizer steps, a time such as `10 min`, or `auto` (Young, 1974)."""
    keep_checkpoints: PositiveCount = 2
    """Newest checkpoints to keep besides the best one. With two or more, a damaged one costs only one interval."""
    grace_period_s: NotNegative = 30.0
    """Time to save a checkpoint and end after SIGTERM, SIGINT or a preemption notice, in seconds."""
    preemption_notice: str | None = None
    """Preemption notices to poll every 2 s: auto, aws, gcp, azure, or a file or URL that appears. null: none."""
    stall_timeout_s: NotNegative = 120.0
    """A worker hangs if a unit of work takes this long, in seconds, and ten times the longest so far. 0: no check."""
    first_stall_timeout_s: NotNegative = 1800.0
    """The same for work without history: loading, and the first unit of each kind (compilation), in seconds."""
    storage_timeout_s: NotNegative = 600.0
    """How long the end of training waits for a disk that refuses checkpoints, in seconds. Training does not wait."""
    max_restarts: Count = 3
    """Restarts in a row without a newly saved step before the supervisor gives up."""
    restart_delay_s: NotNegative = 1.0
    """Delay before a restart, in seconds. It doubles while there is no progress."""
    study_storage: Annotated[str | None, BeforeValidator(_check_study_storage)] = None
    """Database of Optuna studies and of the job queue, such as postgresql://user@host/name. null: SQLite files here."""
    lease_timeout_s: Annotated[float, Field(ge=2, allow_inf_nan=False), BeforeValidator(parse_number)] = 60.0
    """After this time without a heartbeat, in seconds, another machine takes over a trial or a replicated run."""
    replica: Annotated[Name | None, BeforeValidator(_check_replica_url)] = None
    """Second copy of each run: s3://, gs:// or az://BUCKET/FOLDER, or a shared folder. Not for trials of sweeps."""
    replica_mirror: Annotated[Name | None, BeforeValidator(_check_replica_url)] = None
    """Copy of `replica` in this region, made by the storage service. A restore reads large files from it first."""
    replica_interval_s: Positive = 30.0
    """Interval for copying new journal lines to the replica, in seconds. Checkpoints are copied as soon as saved."""
    replica_bytes_per_s: Annotated[PositiveCount | None, BeforeValidator(parse_size)] = None
    """Maximum upload rate to the replica, in bytes per second or such as 20MB. null: no limit."""
    replica_timeout_s: NotNegative = 600.0
    """Wait for the replica at the start (until it responds) and end (until complete), in seconds; then exit 75."""
    tracking_timeout_s: NotNegative = 120.0
    """Maximum wait for MLflow at the end of a run or stage, in seconds. The rest is sent next time."""
    tracking_uri: Annotated[str | None, BeforeValidator(_check_tracking_uri)] = None
    """MLflow server for runs, sweeps and registered models. null: MLFLOW_TRACKING_URI, else the project's mlruns/."""
    logged_answers: Count = 20
    """Generated answers of stage evaluate that MLflow gets as traces, with question, scores and verdicts. 0: none."""
    metrics_port: Annotated[Annotated[int, Field(ge=1, le=65535)] | None, BeforeValidator(parse_number)] = None
    """Port on which Prometheus can scrape metrics during training. null: none."""
    metrics_host: Name = "127.0.0.1"
    """Address to bind metrics_port to. 0.0.0.0 exposes the metrics to the whole network, without a password."""
    metrics_file: Annotated[Name | None, BeforeValidator(_check_metrics_file)] = None
    """File for node_exporter's textfile collector with the same metrics: an absolute path NAME.prom. null: none."""
    metrics_scrape_wait_s: NotNegative = 20.0
    """Maximum wait for a last scrape at the end of a run, in seconds, if scrapes came at such intervals. 0: no wait."""
    loggers: Annotated[
        tuple[Annotated[Name, make_name_validator("ratchet.loggers", LOGGERS)], ...], BeforeValidator(_parse_loggers)
    ] = ("mlflow",)
    """Where metrics go: mlflow, tensorboard, wandb, dvclive, json_lines, or a name from a package's ratchet.loggers."""
    callbacks: Annotated[
        tuple[Annotated[Name, make_name_validator("ratchet.callbacks")], ...], BeforeValidator(convert_to_tuple)
    ] = ()
    """Callbacks of installed packages (entry points ratchet.callbacks). They receive the journal of each training."""
    webhook_events: Annotated[tuple[WebhookEvent, ...], BeforeValidator(convert_to_tuple)] = get_args(WebhookEvent)
    """Events to post as Slack-compatible JSON to RATCHET_WEBHOOK_URL (an environment variable, as it is a secret)."""
    webhook_timeout_s: ClassVar[float] = 10.0
    """Timeout for posting one event, all attempts included, in seconds. Training never waits for it."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Minimum level of records in a run's logs/."""
    log_max_bytes: Annotated[PositiveCount, BeforeValidator(_parse_log_bytes)] = 10_000_000
    """Maximum size of a log file, in bytes or such as 10MB; then the next file starts."""
    log_files: PositiveCount = 3
    """Files to keep of each log, the current one included."""
    system_metrics_interval_s: NotNegative = 30.0
    """Interval for recording CPU, memory, disk, network and GPU use in the journal, in seconds. 0: never."""
    ray: RaySettings = RaySettings()
    """Ray cluster for `ratchet sweep --engine ray`."""
    endpoint: EndpointSettings = EndpointSettings()
    """Requests to model servers: the judge of evaluate, and `ratchet generate --model http://...`."""

    @property
    def node_range(self) -> tuple[int, int]:
        """Minimum and maximum number of machines."""
        minimum, _, maximum = self.nodes.partition(":")
        return int(minimum), int(maximum or minimum)

    @property
    def active_rendezvous(self) -> str | None:
        """`rendezvous` if there can be several machines, else None."""
        return self.rendezvous if self.node_range[1] > 1 else None

    @model_validator(mode="after")
    def _check_nodes(self) -> "Machine":
        if self.node_range[1] > 1 and not self.rendezvous:
            raise ValueError(
                f"nodes: found {self.nodes}, which needs a meeting address; set machine.rendezvous (or --rendezvous) "
                "to HOST:PORT"
            )
        return self
