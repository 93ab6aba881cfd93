"""Settings: what a project may be told, and what holds when nobody says otherwise. Read by params.py.

Every section is a class of the same word in capitals; every field is followed by a sentence with its unit.
`machine` says *how* a run is carried out and belongs to no RunId; every other section says *what is learned*.
"""

from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field, model_validator

from ratchet.config.data import Prepare
from ratchet.config.evaluation import Evaluate
from ratchet.config.export import Export
from ratchet.config.fields import (
    Count,
    Name,
    NotNegative,
    Positive,
    PositiveCount,
    Section,
    Share,
    convert_to_tuple,
    parse_number,
)
from ratchet.config.gate import Gate, Promote
from ratchet.config.generate import Generate
from ratchet.config.machine import (
    EndpointSettings,
    check_interval,
    parse_database_address,
    parse_gpus,
    parse_log_bytes,
    parse_metrics_file,
    parse_mirror_url,
    parse_nodes,
    parse_ranks,
    parse_rate,
    parse_rendezvous,
    parse_rows,
    parse_tracking_server,
)
from ratchet.config.selection import Select
from ratchet.config.sweep import Sweep
from ratchet.config.train import Train


class TinyModelSettings(Section):
    """The embedded base: a small decoder that is pre-trained from scratch on the project's texts."""

    vocabulary: PositiveCount = 2048
    """Entries of the byte-level BPE vocabulary, special tokens included."""
    hidden_size: PositiveCount = 256
    """Width of the model."""
    intermediate_size: PositiveCount = 512
    """Width of the MLP blocks."""
    layers: PositiveCount = 3
    """Number of decoder blocks."""
    heads: PositiveCount = 4
    """Attention heads; must divide hidden_size."""
    sequence_tokens: PositiveCount = 96
    """Length of one packed pre-training sequence, in tokens."""
    batch_sequences: PositiveCount = 24
    """Sequences in one optimizer step."""
    steps: PositiveCount = 300
    """Optimizer steps of pre-training: the time does not depend on the size of the corpus."""
    learning_rate: Positive = 1e-2
    """Peak learning rate of pre-training (Muon, cosine): a step moves a weight by about 0.2 times this."""
    seed: Count = 0
    """Seed of initial weights and of the order of the texts."""

    @model_validator(mode="after")
    def _heads_divide(self) -> "TinyModelSettings":
        if self.hidden_size % self.heads:
            raise ValueError(f"heads: {self.heads} does not divide hidden_size {self.hidden_size}")
        return self


class Base(Section):
    """The base model: where it comes from."""

    source: Annotated[str, Field(min_length=1)] = "tiny"
    """`tiny` (built here), a local directory, or a Hugging Face hub id such as Qwen/Qwen2.5-1.5B-Instruct."""
    revision: str | None = None
    """Commit, tag or branch of a hub id; the commit it resolves to is recorded. Must be given for a hub id."""
    chat_template: Name | None = None
    """Jinja file below data/raw or data/text to use instead of the tokenizer's own chat template."""
    added_tokens: Annotated[tuple[Name, ...], BeforeValidator(convert_to_tuple)] = ()
    """Tokens that the tokenizer gets beside its own; their rows of the embedding are learned."""
    trust_remote_code: str | None = None
    """Repeat base.source here to let the Python code run that this model brings along; null runs none."""
    convert_pickles: bool = False
    """Convert weights that come as pickles (*.bin) to safetensors, with torch's reader that runs no code."""
    tiny: TinyModelSettings = TinyModelSettings()
    """Shape and schedule of the tiny base; read only when source is `tiny`."""

    @model_validator(mode="after")
    def _trusts_its_own(self) -> "Base":
        if self.trust_remote_code not in (None, self.source):
            raise ValueError(
                f"trust_remote_code: {self.trust_remote_code} is not base.source ({self.source}); repeat it, or null"
            )
        return self


WebhookEvent = Literal["finished", "failed", "stalled", "gated", "promoted"]


class RaySettings(Section):
    """The cluster on which `ratchet sweep --engine ray` places its workers, and what each of them gets there."""

    address: Name = "auto"
    """`auto`: the cluster that this machine belongs to, or RAY_ADDRESS; else HOST:PORT of its head."""
    cpus: Positive = 1
    """CPUs of a worker, and its threads where machine.threads is 0."""
    gpus: Annotated[float | Literal["auto"], BeforeValidator(parse_gpus)] = "auto"
    """GPUs of a worker; `auto`: one, if any node has one. Where nodes with GPUs come on demand, write the number."""
    resources: dict[Name, Positive] = Field(default_factory=dict)
    """Custom resources of a worker, such as {spot: 1}: only nodes started with them are used."""
    restarts: Count = 50
    """Workers replaced in each place because their node was lost, before the sweep is given up."""


class Machine(Section):
    """How a run is carried out on this machine; changes neither what is learned nor any RunId."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; `auto` takes a GPU when there is one."""
    gpus: Annotated[int | Literal["auto"], BeforeValidator(parse_ranks)] = "auto"
    """Ranks on this machine, one to a GPU; `auto`: as many as there are GPUs. On CPUs: processes."""
    nodes: Annotated[str, BeforeValidator(parse_nodes)] = "1"
    """Machines that train one run together: a number, or MIN:MAX. They come and go between the two."""
    rendezvous: Annotated[str | None, BeforeValidator(parse_rendezvous)] = None
    """Where several machines meet: HOST:PORT, the host the one that is there longest."""
    rendezvous_wait_s: Positive = 900.0
    """How long a machine waits there for MIN machines, in seconds."""
    peers_wait_s: Positive = 300.0
    """A rank that waits so long for the others, in seconds, takes them for lost; a hung one is found by its own."""
    leave_out_s: NotNegative = 600.0
    """A machine whose ranks fail twice within so many seconds stays away as long; 0: it comes back at once."""
    threads: Count = 0
    """CPU threads of torch, by whose number sums round; 0: one a physical core, or one alone below a width of 512."""
    llama_cpp: str | None = None
    """Directory of a llama.cpp (checkout or installation) whose tools are used; null: what lies on PATH, if any."""
    micro_batch_rows: PositiveCount = 8
    """Rows (packs, when packed: 1 is frugal) computed at once; another number rounds sums, draws dropout, otherwise."""
    micro_batch_tokens: Annotated[PositiveCount | None, BeforeValidator(parse_number)] = None
    """Most tokens computed at once, padding included: long rows in smaller company. null: rows alone are counted."""
    evaluation_rows: Annotated[int | Literal["auto"], BeforeValidator(parse_rows)] = "auto"
    """Rows scored at once; `auto`: as many as fit. Halved, for all models alike, where memory does not suffice."""
    activation_checkpointing: bool | Literal["auto"] = "auto"
    """Recompute activations in the backward pass: less memory, a third more time. `auto`: if one row would not fit."""
    shard_base: bool | Literal["auto"] = "auto"
    """Each rank keeps a share of the frozen base (FSDP), layers travel at every use. `auto`: if it would not fit."""
    on_forecast: Literal["refuse", "report"] = "refuse"
    """A run that needs more memory than there is, by the forecast: refused before anything is loaded, or only told."""
    memory_warnings: Annotated[tuple[Share, ...], BeforeValidator(convert_to_tuple)] = (0.9, 0.97)
    """Fractions of the device's memory; the first time that a phase of a run passes one, an alert says so."""
    checkpoint_every: Annotated[str | int, BeforeValidator(check_interval)] = "auto"
    """Between two checkpoints: a number of optimizer steps, a time such as `10 min`, or `auto` (Young, 1974)."""
    keep_checkpoints: PositiveCount = 2
    """Newest checkpoints kept, beside the best one. Two or more: a damaged one then costs one interval."""
    grace_s: NotNegative = 30.0
    """After SIGTERM, SIGINT or a spot notice: time within which a checkpoint is sealed and the run ends, in seconds."""
    preemption_notice: str | None = None
    """Who tells when this machine is to go: auto, aws, gcp, azure, or a file or URL that appears; asked every 2 s."""
    stall_s: NotNegative = 120.0
    """A worker is dead when a unit of work takes longer than this and ten times the longest so far; 0: never."""
    stall_first_s: NotNegative = 1800.0
    """The same for what has not been seen yet: loading, and the first unit of each kind (compilation), in seconds."""
    storage_wait_s: NotNegative = 600.0
    """How long the end of training waits for a disk that takes no checkpoint, in seconds; training never waits."""
    retries: Count = 3
    """Restarts in a row without a new sealed step before the supervisor gives up."""
    retry_delay_s: NotNegative = 1.0
    """Wait before a restart, in seconds; doubled each time without progress."""
    studies: Annotated[str | None, BeforeValidator(parse_database_address)] = None
    """Database of the studies of sweeps, such as postgresql://user@host/name; null: a journal in experiments/sweeps."""
    lease_s: Annotated[float, BeforeValidator(parse_number), Field(ge=2, allow_inf_nan=False)] = 60.0
    """A trial, or a run in a mirror, without a sign of life for so long, in seconds, is taken up by another machine."""
    mirror: Annotated[Name | None, BeforeValidator(parse_mirror_url)] = None
    """Second copy of a run: s3://BUCKET/FOLDER, any fsspec URL, a shared folder. Trials of sweeps are not mirrored."""
    mirror_every_s: Positive = 30.0
    """New lines of the journal are copied there so often, in seconds; checkpoints as soon as they are sealed."""
    mirror_bytes_s: Annotated[PositiveCount | None, BeforeValidator(parse_rate)] = None
    """Most that is sent there, in bytes a second, such as 20MB; null: as much as the line carries."""
    mirror_wait_s: NotNegative = 600.0
    """Wait for it, in seconds: at the start until it answers, at the end until it has the result; else exit 75."""
    tracking_grace_s: NotNegative = 120.0
    """Longest wait for MLflow at the end of a run or stage, in seconds; what is missing is sent the next time."""
    tracking: Annotated[str | None, BeforeValidator(parse_tracking_server)] = None
    """MLflow server that runs and sweeps are shown on, such as https://mlflow.example; null: the project's mlruns/."""
    metrics_port: Annotated[Annotated[int, Field(ge=1, le=65535)] | None, BeforeValidator(parse_number)] = None
    """While a run is trained, Prometheus can fetch its figures from this port; null: it cannot."""
    metrics_host: Name = "127.0.0.1"
    """Address that the port belongs to; 0.0.0.0 shows the figures to the whole network, without a password."""
    metrics_file: Annotated[Name | None, BeforeValidator(parse_metrics_file)] = None
    """The same figures as a file for node_exporter's textfile collector: an absolute path, NAME.prom; null: none."""
    metrics_wait_s: NotNegative = 20.0
    """At its end a run waits so long, in seconds, for a last fetch, if others came at such intervals; 0: never."""
    webhook_events: Annotated[tuple[WebhookEvent, ...], BeforeValidator(convert_to_tuple)] = get_args(WebhookEvent)
    """What is told to the address in RATCHET_WEBHOOK_URL (a secret, so not here), as JSON that Slack takes too."""
    webhook_wait_s: Positive = 10.0
    """Longest time that telling one event takes, all tries counted, in seconds; training never waits for it."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """What goes to a run's logs/: this, and what is graver."""
    log_bytes: Annotated[PositiveCount, BeforeValidator(parse_log_bytes)] = 10_000_000
    """Most that one file of a log holds, such as 10MB; then the next one is begun."""
    log_files: PositiveCount = 3
    """Files kept of each log, the one that is written counted; the oldest goes."""
    system_every_s: NotNegative = 30.0
    """CPU, memory, disk, network and GPUs are noted in the journal so often, in seconds; 0: never."""
    ray: RaySettings = RaySettings()
    """Where `ratchet sweep --engine ray` places workers."""
    endpoint: EndpointSettings = EndpointSettings()
    """How servers of models are asked: the judge of evaluate, and `ratchet generate --model http://...`."""

    @property
    def node_range(self) -> tuple[int, int]:
        """Fewest and most machines of `nodes`."""
        least, _, most = self.nodes.partition(":")
        return int(least), int(most or least)

    @property
    def meeting_place(self) -> str | None:
        """`rendezvous`, where there may be several machines; None: one machine meets nobody."""
        return self.rendezvous if self.node_range[1] > 1 else None

    @model_validator(mode="after")
    def _has_a_place_to_meet(self) -> "Machine":
        if self.node_range[1] > 1 and not self.rendezvous:
            raise ValueError(
                f"nodes: {self.nodes} need a place to meet; set machine.rendezvous (or --rendezvous) to HOST:PORT"
            )
        return self


class Settings(Section):
    """All of params.yaml."""

    base: Base = Base()
    prepare: Prepare = Prepare()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    export: Export = Export()
    gate: Gate = Gate()
    promote: Promote = Promote()
    sweep: Sweep = Sweep()
    generate: Generate = Generate()
    select: Select = Select()
    machine: Machine = Machine()

    @model_validator(mode="after")
    def _what_ships_is_scored(self) -> "Settings":
        if not self.export.is_plain and self.evaluate.forms != ("merged",):
            raise ValueError(
                "export merges another update than the trained adapter (export.weight, also or modules), so scores of "
                "the adapter would say nothing about it; set evaluate.forms: [merged]"
            )
        return self
