"""Settings: what a project may be told, and what holds when nobody says otherwise. Read by params.py.

Every section is a class of the same word in capitals; every field is followed by a sentence with its unit.
`machine` says *how* a run is carried out and belongs to no RunId; every other section says *what is learned*.
"""

import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ratchet.config_data import Prepare
from ratchet.config_evaluation import Evaluate
from ratchet.config_export import Export
from ratchet.config_gate import Gate, Promote
from ratchet.config_sweep import Sweep
from ratchet.config_train import Train
from ratchet.fields import (
    Count,
    Name,
    NotNegative,
    Positive,
    PositiveCount,
    Section,
    Share,
    as_tuple,
    interval_from,
    number_from,
)


class Tiny(Section):
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
    def _heads_divide(self) -> "Tiny":
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
    added_tokens: Annotated[tuple[Name, ...], BeforeValidator(as_tuple)] = ()
    """Tokens that the tokenizer gets beside its own; their rows of the embedding are learned."""
    trust_remote_code: str | None = None
    """Repeat base.source here to let the Python code run that this model brings along; null runs none."""
    convert_pickles: bool = False
    """Convert weights that come as pickles (*.bin) to safetensors, with torch's reader that runs no code."""
    tiny: Tiny = Tiny()
    """Shape and schedule of the tiny base; read only when source is `tiny`."""

    @model_validator(mode="after")
    def _trusts_its_own(self) -> "Base":
        if self.trust_remote_code not in (None, self.source):
            raise ValueError(
                f"trust_remote_code: {self.trust_remote_code} is not base.source ({self.source}); repeat it, or null"
            )
        return self


def _rows(value: Any) -> Any:
    value = number_from(value)
    if value != "auto" and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"{value!r} is no number of rows; write one, or auto")
    return value


def _interval(value: Any) -> Any:
    value = number_from(value)
    interval_from(value)
    return value


def _address(value: Any) -> Any:
    if isinstance(value, str) and re.match(r"[^/]*://[^/@]*:[^/@]*@", value):
        raise ValueError("holds a password, and params.yaml is no place for one; put it into PGPASSWORD or ~/.pgpass")
    return value


class Machine(Section):
    """How a run is carried out on this machine; changes neither what is learned nor any RunId."""

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model runs; `auto` takes a GPU when there is one."""
    threads: Count = 0
    """CPU threads of torch; 0: one for each physical core. Another number may round sums differently."""
    llama_cpp: str | None = None
    """Directory of a llama.cpp (checkout or installation) whose tools are used; null: what lies on PATH, if any."""
    micro_batch_rows: PositiveCount = 8
    """Rows (packs, when packed: 1 is frugal) computed at once; another number rounds sums, draws dropout, otherwise."""
    evaluation_rows: Annotated[int | Literal["auto"], BeforeValidator(_rows)] = "auto"
    """Rows scored at once; `auto`: as many as fit. Halved, for all models alike, where memory does not suffice."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more time."""
    on_forecast: Literal["refuse", "report"] = "refuse"
    """A run that needs more memory than there is, by the forecast: refused before anything is loaded, or only told."""
    memory_warnings: Annotated[tuple[Share, ...], BeforeValidator(as_tuple)] = (0.9, 0.97)
    """Fractions of the device's memory; the first time that a phase of a run passes one, an alert says so."""
    checkpoint_every: Annotated[str | int, BeforeValidator(_interval)] = "auto"
    """Between two checkpoints: a number of optimizer steps, a time such as `10 min`, or `auto` (Young, 1974)."""
    keep_checkpoints: PositiveCount = 2
    """Newest checkpoints kept, beside the best one. Two or more: a damaged one then costs one interval."""
    grace_s: NotNegative = 30.0
    """After SIGTERM, SIGINT or a spot notice: time within which a checkpoint is sealed and the run ends, in seconds."""
    preemption_notice: str | None = None
    """File or http URL that appears (answers 200) when this machine is about to be taken away; asked every 2 s."""
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
    studies: Annotated[str | None, BeforeValidator(_address)] = None
    """Database of the studies of sweeps, such as postgresql://user@host/name; null: a journal in experiments/sweeps."""
    lease_s: Annotated[float, BeforeValidator(number_from), Field(ge=2, allow_inf_nan=False)] = 60.0
    """A trial whose worker gave no sign of life for so long, in seconds, is taken up by another worker."""
    tracking_grace_s: NotNegative = 120.0
    """Longest wait for MLflow at the end of a run, in seconds; what is missing is sent the next time."""


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
    machine: Machine = Machine()

    @model_validator(mode="after")
    def _what_ships_is_scored(self) -> "Settings":
        if not self.export.is_plain and self.evaluate.forms != ("merged",):
            raise ValueError(
                "export merges another update than the trained adapter (export.weight, also or modules), so scores of "
                "the adapter would say nothing about it; set evaluate.forms: [merged]"
            )
        return self
