"""Models that are quantised in their own files: what they are, and whether they can be trained against. No torch."""

from typing import Any, Literal, cast, get_args

from ratchet.config.train import Train
from ratchet.errors import BaseModelError, SettingsError
from ratchet.storage.records.base import StoredQuantization

Kind = Literal["nf4", "fp4"]


def detect(config: dict[str, Any], where: str) -> StoredQuantization | None:
    """How the weights beside a config.json are quantised; None for ordinary numbers.

    Absent keys mean what transformers' BitsAndBytesConfig means by them.

    Args:
        config: contents of config.json.
        where: its directory, for messages.

    Raises:
        BaseModelError: by a method other than bitsandbytes' 4 bits. Adapters could be trained against some of them,
            but what they would be merged into is not what they were trained against.
    """
    stored = config.get("quantization_config")
    if not stored:  # some files hold null
        return None
    if not isinstance(stored, dict):
        raise BaseModelError(f"{where}: quantization_config of config.json is {stored!r}; bring the original file")
    bits8, bits4 = bool(stored.get("load_in_8bit")), bool(stored.get("load_in_4bit"))
    kind = stored.get("bnb_4bit_quant_type", "fp4")
    if not bits4 or bits8 or kind not in get_args(Kind):
        method = "bitsandbytes 8 bits" if bits8 else str(stored.get("quant_method", "an unnamed method"))
        raise BaseModelError(
            f"base.source: the weights of {where} are quantised already ({method}), and training is against ordinary "
            "weights or bitsandbytes' NF4 and FP4: take the model that it was made from"
        )
    storage = str(stored.get("bnb_4bit_quant_storage", "uint8")).removeprefix("torch.")
    return StoredQuantization(
        kind=cast(Kind, kind), double=bool(stored.get("bnb_4bit_use_double_quant")), storage=storage
    )


def require_same_quantization(stored: StoredQuantization, settings: Train, where: str) -> None:
    """Raises SettingsError unless `settings` ask for exactly what the files hold: nothing is ever quantised twice."""
    wanted = {
        "quantization": stored.kind,
        "double_quantization": stored.double,
        "quantization_storage": stored.storage,
    }
    if wrong := {key: value for key, value in wanted.items() if getattr(settings, key) != value}:
        asked = ", ".join(f"{key}: {_format_yaml_value(getattr(settings, key))}" for key in wrong)
        todo = ", ".join(f"train.{key}: {_format_yaml_value(value)}" for key, value in wrong.items())
        raise SettingsError(
            f"train.{asked}, but the weights of {where} are quantised already, and cannot be again: set {todo}; "
            "or take the model that it was made from"
        )


def _format_yaml_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
