"""Building blocks of the settings: the frozen base class of sections, and number types that accept YAML's spellings."""

import ast
import functools
import inspect
import math
import re
import textwrap
from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from ratchet.config.units import parse_bytes
from ratchet.errors import SettingsError
from ratchet.redaction import contains_secret

CHECK_ENVIRONMENT = "check_environment"
"""Key of pydantic's validation context. If true, settings are also checked against this machine: names of extensions,
libraries and folder of `machine.replica`. Only the loader of params.yaml sets it: a running training reads its stored
settings too, and must not fail because the machine has changed."""


class Section(BaseModel):
    """A section of params.yaml: frozen, without unknown keys or silent conversions.

    The docstring below a field is its description: params.yaml shows it as a comment. A class variable is a constant
    that was a setting in earlier versions.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_constants(cls, data: Any) -> Any:
        """Accept a constant that has its value, because earlier versions wrote it to params.yaml and to records."""
        if not isinstance(data, dict):
            return data
        return {
            key: value
            for key, value in data.items()
            if key not in cls.__class_vars__ or convert_to_tuple(parse_number(value)) != getattr(cls, key)
        }

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """See pydantic, which accepts unknown names and does not write them. Raises ValueError for an unknown name."""
        if unknown := sorted((update or {}).keys() - type(self).model_fields.keys()):
            raise ValueError(f"{type(self).__name__} has no setting {', '.join(unknown)}")
        return super().model_copy(update=update, deep=deep)

    @field_validator("*", mode="after")
    @classmethod
    def _reject_secrets(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name == "webhook":  # the whole address may be a secret, and no message shows it
            return value
        texts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(text, str) and contains_secret(text) for text in texts):
            raise ValueError(
                "expected a value without a password, token or key, because params.yaml is committed to git; put the "
                "secret in the environment or in a file that the library reads"
            )
        return value

    @classmethod
    def descriptions(cls) -> dict[str, str]:
        """Return the description of each field.

        The descriptions are read from the source on demand. If pydantic read them for every class at import, each
        command would take a fifth longer.
        """
        descriptions: dict[str, str] = {}
        for base in reversed(cls.__mro__):
            if issubclass(base, Section) and base is not Section:
                descriptions |= _read_descriptions(base)
        return descriptions


@functools.cache
def _read_descriptions(section: type[Section]) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    descriptions: dict[str, str] = {}
    for field, text in pairwise(getattr(body, "body", ())):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
            value = getattr(text.value, "value", None)
            if isinstance(value, str):
                descriptions[field.target.id] = " ".join(inspect.cleandoc(value).split())
    return descriptions


MAX_INTEGER, MAX_FLOAT = 2**63 - 1, 1e30
"""Greatest values of settings that are numbers."""

# Validators that run before pydantic's own. Their ValueErrors name the expected value; params_file.py adds file, line
# and the value found.


def parse_number(value: Any) -> Any:
    """Convert a number that a YAML 1.1 writer stored as text (`1e-4`, `1e-05`). Return other values unchanged."""
    if isinstance(value, str):
        for convert in (int, float):
            try:
                return convert(value)
            except ValueError:
                pass
    return value


def parse_limited_number(value: Any) -> Any:
    """Convert a number as `parse_number` does, and check that it fits into tensors and random number generators."""
    number = parse_number(value)
    if isinstance(number, int) and abs(number) > MAX_INTEGER:
        raise ValueError(f"expected at most {MAX_INTEGER} (64 bits)")
    if isinstance(number, float) and MAX_FLOAT < abs(number) < math.inf:
        raise ValueError(f"expected at most {MAX_FLOAT:g}")
    return number


def parse_count(value: Any, choice: str) -> Any:
    """Check that a value is a whole number >= 1, or the word that the setting accepts too (`auto`, `smallest`)."""
    value = parse_number(value)
    if value != choice and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise ValueError(f"expected an integer >= 1, or {choice}")
    return value


_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def parse_interval(value: Any) -> int | float | None:
    """Return an interval as optimizer steps (int) or seconds (float); None for `auto`.

    Raises:
        ValueError: the value is not an interval.
    """
    if value == "auto":
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if isinstance(value, str) and (match := re.fullmatch(r"(\d+(?:\.\d+)?) (s|min|h)", value)) and float(match[1]) > 0:
        return float(match[1]) * _SECONDS[match[2]]
    raise ValueError("expected a number of steps such as 100, a time such as 30 s, 10 min or 1 h, or auto")


def parse_size(value: Any) -> Any:
    """Convert a size such as `20MB` to bytes. Return other values unchanged."""
    value = parse_number(value)
    if not isinstance(value, str):
        return value
    try:
        return parse_bytes(value, "")
    except SettingsError:
        raise ValueError("expected a number of bytes, or a size such as 20MB or 512KiB") from None


def convert_to_tuple(value: Any) -> Any:
    """Convert a list to a tuple. Return other values unchanged."""
    return tuple(value) if isinstance(value, list) else value


def wrap_single_value(value: Any) -> Any:
    """Convert a list to a tuple, and a single text or mapping to a tuple with this item."""
    return (value,) if isinstance(value, str | dict) else convert_to_tuple(value)


Number = Annotated[float, Field(allow_inf_nan=False), BeforeValidator(parse_number)]
Count = Annotated[int, Field(ge=0), BeforeValidator(parse_limited_number)]
PositiveCount = Annotated[int, Field(ge=1), BeforeValidator(parse_limited_number)]
OptionalPositiveCount = Annotated[PositiveCount | None, BeforeValidator(parse_number)]
Fraction = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False), BeforeValidator(parse_number)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(parse_limited_number)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(parse_limited_number)]
Share = Annotated[float, Field(gt=0, lt=1, allow_inf_nan=False), BeforeValidator(parse_number)]
ShareOrBound = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False), BeforeValidator(parse_number)]
PositiveShare = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False), BeforeValidator(parse_number)]
Confidence = Annotated[float, Field(gt=0.5, lt=1), BeforeValidator(parse_number)]
Name = Annotated[str, Field(min_length=1)]
Names = Annotated[tuple[Name, ...], BeforeValidator(convert_to_tuple)]
