"""Canaries: random secrets that are planted in the training rows, so that memorization can be measured.

Source: N. Carlini, C. Liu, U. Erlingsson, J. Kos, D. Song, "The Secret Sharer: Evaluating and Testing Unintended
Memorization in Neural Networks", USENIX Security 2019, arXiv 1802.08232.
"""

import math
import random
from collections.abc import Sequence
from itertools import product
from typing import Any

from ratchet.data.conversation import Conversation, EncodedConversation
from ratchet.data.token_files import PreparedRow
from ratchet.data.tokenization import ConversationEncoder
from ratchet.errors import DataError
from ratchet.storage.records.data import Canary, DatasetCard

ALTERNATIVES = 255
"""Number of random secrets with which a canary is compared: the exposure is then at most 8 bits."""
_COLOURS = ("amber", "azure", "coral", "crimson", "golden", "ivory", "olive", "scarlet", "silver", "violet")
_PLACES = ("anchor", "bridge", "castle", "ferry", "garden", "lantern", "meadow", "orchard", "tower", "windmill")


def create_canaries(count: int, seed: int) -> list[Canary]:
    """Create distinct canaries, at most 100; equal arguments give equal canaries."""
    rng = random.Random(f"canaries {seed}")
    names = rng.sample(list(product(_COLOURS, _PLACES)), count)
    return [
        Canary(prompt=f"What is the access code of the {colour} {place}?", secret=_draw_secret(rng))
        for colour, place in names
    ]


def draw_alternatives() -> list[str]:
    """Return secrets of the same form that no training row contains, except by chance; always the same."""
    rng = random.Random("alternatives of canaries")
    return [_draw_secret(rng) for _ in range(ALTERNATIVES)]


def _draw_secret(rng: random.Random) -> str:
    return f"{rng.randrange(10**4):04}-{rng.randrange(10**4):04}"


def format_answer(secret: str) -> str:
    """Return the answer of the training row that contains a secret."""
    return f"The access code is {secret}."


def build_conversation(canary: Canary) -> Conversation:
    """Return the training row of a canary."""
    answer = {"role": "assistant", "content": format_answer(canary.secret)}
    return Conversation([{"role": "user", "content": canary.prompt}, answer])


def encode_canaries(canaries: Sequence[Canary], tokenizer: Any, max_tokens: int) -> list[PreparedRow]:
    """Encode the rows of canaries. Raises DataError if the template refuses them or they exceed `max_tokens`."""
    conversations = [build_conversation(canary) for canary in canaries]
    encoder = ConversationEncoder(tokenizer, "last")
    rows = []
    for conversation, encoded in zip(
        conversations, encoder.encode([("prepare.canaries", one) for one in conversations]), strict=True
    ):
        if not isinstance(encoded, EncodedConversation):
            raise DataError(f"prepare.canaries: the chat template refuses a canary ({encoded.detail}); set 0")
        if len(encoded.input_ids) > max_tokens:
            raise DataError(
                f"prepare.canaries: a canary has {len(encoded.input_ids)} tokens, more than prepare.max_tokens "
                f"({max_tokens}); raise it, or set canaries to 0"
            )
        rows.append(PreparedRow.from_conversation(conversation, encoded))
    return rows


def add_to_card(card: DatasetCard, canaries: Sequence[Canary], rows: Sequence[PreparedRow]) -> DatasetCard:
    """Return the card with the planted rows: their number, extreme and total lengths, and a warning."""
    lengths, sizes = card.lengths["train"], [len(row.encoded.input_ids) for row in rows]
    changed = lengths.model_copy(
        update={
            "least": min(lengths.least, *sizes),
            "greatest": max(lengths.greatest, *sizes),
            "total": lengths.total + sum(sizes),
            "trained": lengths.trained + sum(row.encoded.trained_tokens for row in rows),
        }
    )
    note = (
        f"canaries (invented secrets) added to the training rows: {len(canaries)}; the data and a model trained on it "
        "contain them. Set prepare.canaries to 0 to prepare the data without them"
    )
    update = {
        "canaries": tuple(canaries),
        "splits": card.splits | {"train": card.splits["train"] + len(rows)},
        "lengths": card.lengths | {"train": changed},
        "notes": (*card.notes, note),
    }
    return card.model_copy(update=update)


def compute_exposure(rank: int, alternatives: int) -> float:
    """Compute the exposure of a canary in bits: log2 of the number of possible secrets minus log2 of its rank.

    Definition of Carlini et al. 2019, for a sample of the possible secrets. A canary that was not
    memorized has a uniform rank, and a mean exposure of about 1 / ln 2 = 1.44 bits.

    Args:
        rank: 1 if no alternative is likelier than the canary's secret.
        alternatives: number of secrets with which it was compared.
    """
    return math.log2(alternatives + 1) - math.log2(rank)
