"""Records: the JSON files that stages exchange; frozen, typed, and versioned by `format`.

A record describes the outputs next to it. It contains no path of a machine, no time and no process id, so equal inputs
give equal bytes. Times and attempts are in the journal of the run.
"""

import json
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError

from ratchet.errors import DamagedFileError, DataError, first_line
from ratchet.storage import digests, files

STAGES_BY_FOLDER = {"data": "prepare"} | {name: name for name in ("base", "train", "export", "evaluate", "gate")}
"""Stages of dvc.yaml by the folders of their output below experiments/."""


class Record(BaseModel):
    """Base class of all records."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    format: Literal[1] = 1

    def save(self, path: Path) -> None:
        """Write the record as JSON, atomically."""
        files.write_json(path, self.model_dump(mode="json"))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a record.

        Raises:
            DataError: the file does not exist, because its stage has not run.
            DamagedFileError: the file is not a record of this class, or has another format version.
        """
        try:
            return cls.model_validate(json.loads(path.read_bytes()))
        except FileNotFoundError:
            stage = STAGES_BY_FOLDER.get(path.parent.name)
            remedy = f"; run the stage that writes it (`dvc repro {stage}`)" if stage else ""
            raise DataError(f"{path}: not found{remedy}") from None
        except (ValueError, RecursionError) as error:
            cause = _describe_problems(error) if isinstance(error, ValidationError) else str(error)
            raise DamagedFileError(f"{path}: not a {cls.__name__} ({cause}); create it again") from None


def _describe_problems(error: ValidationError) -> str:
    """Describe the first problem and count the others: `digest: field required, and 9 more problems`."""
    first, *others = error.errors(include_url=False)
    name = ".".join(map(str, first["loc"]))
    message = first["msg"].removeprefix("Value error, ")
    text = f"{name}: {message[:1].lower()}{message[1:]}" if name else message
    return f"{text}, and {len(others)} more problem{'s' * (len(others) > 1)}" if others else text


class SealedRecord(Record):
    """A record with the digest of its own fields, which shows later changes."""

    seal_remedy: ClassVar[str]
    """What to do if the digest differs; `{folder}` stands for the folder of the file."""
    seal: str = ""
    """Digest of all other fields."""

    def sealed(self) -> Self:
        """Return a copy with `seal`, ready to save."""
        return self.model_copy(update={"seal": self._digest()})

    def _digest(self) -> str:
        return digests.hash_json(self.model_dump(mode="json", exclude={"seal"}))

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the record. Raises the errors of `Record.load`, and DamagedFileError if the digest differs."""
        record = super().load(path)
        if record.seal != record._digest():
            remedy = cls.seal_remedy.format(folder=path.parent)
            raise DamagedFileError(f"{path}: changed since it was written (its digest differs); {remedy}")
        return record


class StoredQuantization(Record):
    """Quantization of a base model that is stored in 4 bits (by bitsandbytes)."""

    kind: Literal["nf4", "fp4"]
    double: bool
    """Whether the quantization constants are quantized too."""
    storage: str
    """Type of the tensors that hold the 4-bit weights."""


class BaseCard(Record):
    """The pinned base model."""

    source: str
    """`tiny`, a directory as in params.yaml, or a Hub id."""
    revision: str | None
    """Commit of the Hub id."""
    digest: str
    """Digest of `files`."""
    files: dict[str, str]
    """SHA-256 of every file of the model, by relative name."""
    architecture: str
    """Class name in config.json, e.g. LlamaForCausalLM."""
    parameters: int
    """Number of weights, independent of their storage; tied weights count once."""
    licence: str | None
    """Licence in the model card."""
    added_tokens: tuple[str, ...] = ()
    """base.added_tokens; part of the digest."""
    remote_code: bool = False
    """Whether the model's own Python code is used (base.trust_remote_code)."""
    converted: bool = False
    """Whether the weights were converted from pickles; the converted model is next to this card."""
    quantization: StoredQuantization | None = None
    """Quantization of the stored weights; None if the stored weights are not quantized. In that case, training
    quantizes them itself if required."""
    unused_tensors: tuple[str, ...] = ()
    """Names of stored tensors that the model class does not use; they are not loaded."""


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines, atomically."""
    files.write_atomic(path, "".join(map(to_json_line, rows)))


def to_json_line(row: dict[str, Any]) -> str:
    """Format a row as one JSON line."""
    return json.dumps(row, sort_keys=True, ensure_ascii=False) + "\n"


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read JSON lines. Raises DamagedFileError, which names the file and the line."""
    rows = []
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, UnicodeDecodeError) as error:
        raise DamagedFileError(f"{path}: cannot be read as text ({first_line(error)}); create it again") from None
    # Split at "\n" only, because a text may contain other line separators of Unicode, which JSON does not escape.
    for number, line in enumerate(text.removesuffix("\n").split("\n") if text else [], start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise DamagedFileError(f"{path}:{number}: not JSON ({error}); create it again") from None
    return rows


def find_differing_keys(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return the dotted keys, such as `train.rank`, in which two records (as JSON) differ."""
    flat_a, flat_b = flatten(a), flatten(b)
    return sorted(key for key in flat_a.keys() | flat_b.keys() if flat_a.get(key) != flat_b.get(key))


def flatten(node: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values of a record (as JSON) by dotted key."""
    flat: dict[str, Any] = {}
    for key, value in node.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat
