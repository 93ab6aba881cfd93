"""What sections of settings are made of: number types that read like YAML, and the frozen section itself."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def number_from(value: Any) -> Any:
    """Accept a number that YAML 1.1 writers quoted or spelled as text (`1e-4`, `1e-05`); leave the rest to pydantic."""
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return value
        return int(number) if number.is_integer() and not any(c in value.lower() for c in ".e") else number
    return value


def as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


Number = Annotated[float, BeforeValidator(number_from), Field(allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(number_from), Field(ge=0)]
PositiveCount = Annotated[int, BeforeValidator(number_from), Field(ge=1)]
Fraction = Annotated[float, BeforeValidator(number_from), Field(ge=0, lt=1, allow_inf_nan=False)]
Positive = Annotated[float, BeforeValidator(number_from), Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, BeforeValidator(number_from), Field(ge=0, allow_inf_nan=False)]
Limit = Annotated[float, BeforeValidator(number_from), Field(ge=0, le=1, allow_inf_nan=False)] | None
Name = Annotated[str, Field(min_length=1)]


class Section(BaseModel):
    """What all sections share: frozen, no unknown keys, no silent conversions."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True)
