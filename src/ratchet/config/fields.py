"""What sections of settings are made of: number types that read like YAML, and the frozen section itself."""

import ast
import inspect
import re
import textwrap
from itertools import pairwise
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from ratchet.redaction import contains_secret


def parse_number(value: Any) -> Any:
    """Accept a number that YAML 1.1 writers quoted or spelled as text (`1e-4`, `1e-05`); leave the rest to pydantic."""
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
        return int(number) if number.is_integer() and not any(c in value.lower() for c in ".e") else number
    return value


_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def parse_interval(value: Any) -> int | float | None:
    """An interval as it is written: optimizer steps (int), a time (float, in seconds), or `auto` (None).

    Raises:
        ValueError: it is none of these.
    """
    if value == "auto":
        return None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    if isinstance(value, str) and (found := re.fullmatch(r"(\d+(?:\.\d+)?) (s|min|h)", value)) and float(found[1]) > 0:
        return float(found[1]) * _SECONDS[found[2]]
    raise ValueError(f"{value!r} is no interval; write a number of steps, a time such as 30 s, 10 min or 1 h, or auto")


def convert_to_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Number = Annotated[float, BeforeValidator(parse_number), Field(allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(parse_number), Field(ge=0)]
PositiveCount = Annotated[int, BeforeValidator(parse_number), Field(ge=1)]
Fraction = Annotated[float, BeforeValidator(parse_number), Field(ge=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, BeforeValidator(parse_number), Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, BeforeValidator(parse_number), Field(ge=0, allow_inf_nan=False)]
Limit = Annotated[float, BeforeValidator(parse_number), Field(ge=0, le=1, allow_inf_nan=False)] | None
Share = Annotated[float, BeforeValidator(parse_number), Field(gt=0, lt=1, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """What all sections share: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @field_validator("*", mode="after")
    @classmethod
    def _reveals_nothing(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name == "webhook":  # addresses to post to are secrets themselves, and are shown nowhere
            return value
        texts = value if isinstance(value, tuple) else (value,)
        if any(isinstance(text, str) and contains_secret(text) for text in texts):
            raise ValueError(
                "holds a password, a token or a key, and settings are kept with the project for everybody to read; "
                "leave it out, and give it in the environment, or in files that the library which needs it reads"
            )
        return value

    @classmethod
    def sentences(cls) -> dict[str, str]:
        """What stands below each knob in the source.

        Read when it is asked for: pydantic would read it whenever a class is made, a fifth of the time of each command.
        """
        found: dict[str, str] = {}
        for one in reversed(cls.__mro__):
            if issubclass(one, Section) and one is not Section:
                found |= _read_sentences(one)
        return found


def _read_sentences(section: type[Section]) -> dict[str, str]:
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    below: dict[str, str] = {}
    for knob, text in pairwise(getattr(body, "body", ())):
        if isinstance(knob, ast.AnnAssign) and isinstance(knob.target, ast.Name) and isinstance(text, ast.Expr):
            value = getattr(text.value, "value", None)
            if isinstance(value, str):
                below[knob.target.id] = inspect.cleandoc(value)
    return below
