"""Ties: a setting that follows from another one, such as alpha = 2 * rank."""

import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from ratchet.studies.domains import Domain, as_written
from ratchet.studies.knobs import Setting, referred, shown

_NUMBER = r"\d+(?:\.\d+)?(?:[eE][+-]?\d{1,2})?|\.\d+(?:[eE][+-]?\d{1,2})?"
_KNOB = r"[A-Za-z_][A-Za-z0-9_.]*"
_PRODUCT = re.compile(rf"(?:(?P<factor>{_NUMBER})\s*\*\s*)?(?P<knob>{_KNOB})")
_QUOTIENT = re.compile(rf"(?P<knob>{_KNOB})\s*(?P<sign>[*/])\s*(?P<factor>{_NUMBER})")


@dataclass(frozen=True)
class Tie:
    """`factor` times another setting."""

    source: str
    """Dotted key."""
    factor: Fraction
    kind: str
    """Of the setting that follows (knobs.Kind)."""

    @staticmethod
    def parse(text: str, target: Setting) -> "Tie":
        """Read `2 * train.rank`, `train.rank * 2`, `train.rank / 2` or `train.rank`; `train.` may be left out.

        Raises:
            ValueError: none of these, or the other setting does not exist.
        """
        found = _PRODUCT.fullmatch(text.strip()) or _QUOTIENT.fullmatch(text.strip())
        if found is None:
            raise ValueError(f"{text!r} is no tie; write NUMBER * SETTING, SETTING / NUMBER or SETTING")
        parts = found.groupdict()
        factor = Fraction(parts["factor"] or 1)
        if not factor:
            raise ValueError(f"{text!r}: 0 ties nothing")
        factor = 1 / factor if parts.get("sign") == "/" else factor
        if factor != 1 and target.kind == "other":
            raise ValueError(f"{text!r}: {target.key} is no number; it can follow another setting only as that is")
        return Tie(referred(parts["knob"]).key, factor, target.kind)

    @property
    def text(self) -> str:
        """The same tie always in the same words."""
        if self.factor == 1:
            return self.source
        if self.factor.denominator == 1:
            return f"{self.factor} * {self.source}"
        if self.factor.numerator == 1:
            return f"{self.source} / {self.factor.denominator}"
        return f"{float(self.factor)!r} * {self.source}"

    def value(self, source: Any) -> Any:
        """What follows from a value of the other setting: exact in decimals, never rounded to a whole number.

        Raises:
            ValueError: nothing does: no number, or no whole number where the setting is one.
        """
        if self.kind == "other":
            return source
        if isinstance(source, bool) or not isinstance(source, int | float):
            raise ValueError(f"{self.source} may be {shown(source)}, which is no number")
        exact = as_written(source) * self.factor
        if self.kind == "float":
            try:
                return float(exact)
            except OverflowError:
                raise ValueError(f"{self.source} may be {shown(source)}, and what follows is out of bounds") from None
        if exact.denominator != 1:
            raise ValueError(
                f"{self.source} may be {shown(source)}, and {shown(float(exact))} is no whole number, which this "
                f"setting must be; give {self.source} a step or choices of which every one fits"
            )
        return int(exact)

    def domain(self, target: Setting, source: Domain) -> Domain:
        """Values that the setting takes where the other has those of `source`.

        Raises:
            ValueError: one of them is none for this setting.
        """
        if target.kind == "int" and source.is_continuous:
            raise ValueError(
                f"{self.source} takes any value in its range, and this setting is a whole number; give {self.source} "
                "a step or choices of which every one fits"
            )

        def follow(values: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(self._accepted(target, value) for value in values)

        return Domain(source.dimension, source.factor * self.factor, follow(source.ends), follow(source.others))

    def _accepted(self, target: Setting, source: Any) -> Any:
        value = self.value(source)
        try:
            return target.accepted(value)
        except ValueError as error:
            raise ValueError(f"where {self.source} is {shown(source)}: {error}") from None
