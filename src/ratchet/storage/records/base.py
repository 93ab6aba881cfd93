"""The facts that cross a stage, as JSON: frozen, typed, versioned by `format`.

A record says what is true of the outputs beside it. It holds no path of a machine, no time and no process id, so that
the same inputs give the same bytes; times and attempts are in the run's journal.
"""

import json
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from ratchet.errors import DamagedFileError, DataError, first_line
from ratchet.storage import files


class Record(BaseModel):
    """What all records share."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: Literal[1] = 1

    def save(self, path: Path) -> None:
        """Write as JSON, atomically."""
        files.write_json(path, self.model_dump(mode="json"))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote.

        Raises:
            DataError: the stage that writes it has not run.
            DamagedFileError: the file is not such a record, or of another format version.
        """
        try:
            return cls.model_validate(json.loads(path.read_bytes()))
        except FileNotFoundError:
            stage = {"data": "prepare"}.get(path.parent.name, path.parent.name)
            raise DataError(f"{path}: not there; run the stage that makes it (`dvc repro {stage}`)") from None
        except (ValueError, ValidationError) as error:
            raise DamagedFileError(f"{path}: not a {cls.__name__} ({_first_line(error)}); make it again") from None


def _first_line(error: Exception) -> str:
    return " ".join(str(error).splitlines()[:3])


class StoredQuantization(Record):
    """How the weights of a base model are quantised in its own files: by bitsandbytes, in 4 bits."""

    kind: Literal["nf4", "fp4"]
    double: bool
    """Whether the constants are quantised too."""
    storage: str
    """Type of the tensors that hold the 4-bit weights."""


class BaseCard(Record):
    """The pinned base model."""

    source: str
    """`tiny`, a directory as written in params.yaml, or a hub id."""
    revision: str | None
    """Commit of a hub id."""
    digest: str
    """Fingerprint of `files`."""
    files: dict[str, str]
    """SHA-256 of every file of the model, by relative name."""
    architecture: str
    """Class name as in config.json, e.g. LlamaForCausalLM."""
    parameters: int
    """Number of weights, tied ones once, however they are stored."""
    licence: str | None
    """As the model card declares it."""
    added_tokens: tuple[str, ...] = ()
    """Tokens of base.added_tokens; part of the digest."""
    remote_code: bool = False
    """Whether Python code that came with the model was asked for (base.trust_remote_code)."""
    converted: bool = False
    """Whether the weights were pickles; the model then lies beside this card, with the safetensors made of them."""
    quantization: StoredQuantization | None = None
    """How the files' own weights are quantised; None for ordinary numbers, which training quantises itself."""


class TrainReport(Record):
    """What training made. Deterministic: the same inputs give the same report, however often it was interrupted."""

    run_id: str
    adapter_digest: str
    base_digest: str
    data_digest: str
    steps: int
    """Optimizer steps done; fewer than planned when training stopped early."""
    planned_steps: int
    best_step: int
    kept_step: int
    """Step whose weights became the adapter."""
    validation_loss: dict[int, float]
    """Loss per answer token (nats) at each validated step."""
    final_train_loss: float
    trained_tokens: int
    input_tokens: int
    trainable_parameters: int
    total_parameters: int
    quantized_parameters: int = 0
    """Weights of the base that were in 4 bits."""


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write JSON lines, atomically."""
    files.write_atomic(path, "".join(map(to_json_line, rows)))


def to_json_line(row: dict[str, Any]) -> str:
    """One JSON line."""
    return json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines that `write_lines` wrote. Raises DamagedFileError naming file and line."""
    rows = []
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise DamagedFileError(f"{path}: no such text ({first_line(error)}); make it again") from None
    # By "\n" alone: a text may hold what Unicode calls the end of a line, which JSON does not escape.
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else [], start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise DamagedFileError(f"{path}:{number}: not JSON ({error}); make it again") from None
    return rows


def find_differing_keys(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Dotted keys, such as `train.rank`, in which two records (as JSON) differ."""
    x, y = flatten(a), flatten(b)
    return sorted(key for key in x.keys() | y.keys() if x.get(key) != y.get(key))


def flatten(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a record (as JSON) by dotted key."""
    found: dict[str, Any] = {}
    for key, value in node.items():
        found |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found
