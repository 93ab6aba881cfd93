"""The most that would fit: rows, tokens of a row, rank."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from ratchet.config import Machine
from ratchet.config_train import Train
from ratchet.model import forecast, targets
from ratchet.model.blueprint import Blueprint
from ratchet.model.forecast import Need, Work

LONGEST_TOKENS = 131_072
"""Longest row that is tried for models that name no limit."""


@dataclass(frozen=True)
class Largest:
    """The most that fits of each, with the others as they are; None where not even the least does."""

    micro_batch_rows: int | None
    row_tokens: int | None
    rank: int | None


def find(
    blueprint: Blueprint, settings: Train, machine: Machine, work: Work, available_bytes: int
) -> Largest:  # fmt: skip
    """The most rows, tokens of a row, and rank whose need is within `available_bytes`: each alone, the others as given.

    Rows go up to what a rank computes of a step, tokens to what the model was made for, the rank to the smallest side
    of a matrix. Tokens are found to within 1 %.
    """

    need = Need(blueprint, settings, machine, work)

    def needed(other: Work) -> int:
        return need.of(other).forecast().needed_bytes(work.sharing)

    def with_rows(rows: int) -> int:
        return needed(replace(work, rows=rows, validation_rows=min(rows, work.validation_rows or rows)))

    def with_tokens(tokens: int) -> int:
        share = tokens / work.row_tokens
        learned, checked, seen = (
            max(1, int(share * count))
            for count in (work.learned_tokens, work.validation_learned_tokens, work.validation_tokens)
        )
        longer = replace(work, row_tokens=tokens, learned_tokens=learned)
        return needed(replace(longer, validation_tokens=seen, validation_learned_tokens=checked))

    def with_rank(rank: int) -> int:
        changed = settings.model_copy(update={"rank": rank})
        return forecast.forecast(blueprint, changed, machine, work).needed_bytes(work.sharing)

    chosen = targets.choose(blueprint.layers, settings.targets, blueprint.others)
    longest = getattr(blueprint.config.get_text_config(), "max_position_embeddings", None) or LONGEST_TOKENS
    return Largest(
        micro_batch_rows=_greatest(with_rows, available_bytes, work.of_step(settings.batch_rows)),
        row_tokens=_greatest(with_tokens, available_bytes, int(longest), least=2, tolerance=0.01),
        rank=_greatest(with_rank, available_bytes, min(min(layer.inputs, layer.outputs) for layer in chosen)),
    )


def _greatest(
    need: Callable[[int], int], available_bytes: int, limit: int, least: int = 1, tolerance: float = 0.0
) -> int | None:
    """The greatest number up to `limit` that needs no more than there is; None when not even `least` does.

    Needs grow with the number, and nearly in proportion: so the next one tried lies on the line between those known.
    """
    low, high = least, max(least, limit)
    at_low = need(low)
    if at_low > available_bytes:
        return None
    at_high = need(high)
    if at_high <= available_bytes:
        return high
    while high - low > (step := max(1, int(tolerance * low))):
        share = (available_bytes - at_low) / max(1, at_high - at_low)
        guess = min(max(low + int(share * (high - low)), low + 1), high - 1)
        # Where it lies on the line, the answer is between these two.
        for number in (guess, guess + step) if (found := need(guess)) <= available_bytes else (guess, guess - step):
            if not low < number < high:
                continue
            found = found if number == guess else need(number)
            if found <= available_bytes:
                low, at_low = number, found
            else:
                high, at_high = number, found
    return low
