"""How likely each of generate.labels is as the whole answer to a prompt, by a model in memory.

Each prompt is computed by itself, with its labels in groups of a fixed number, so that no batch, restart or shortage of
memory has a say in how sums are rounded; told to 4 decimals, as mean log-probabilities are.
"""

import math
from collections.abc import Sequence
from typing import Any

from ratchet.config.generate import Generate
from ratchet.data import chat_template
from ratchet.data.conversation import MASKED, Conversation, Encoded, Refused
from ratchet.data.template_rendering import ControlTokens
from ratchet.errors import DataError, SettingsError
from ratchet.inference.backend import Ties
from ratchet.models import label_scoring as label_room
from ratchet.models import oom
from ratchet.models.decoding.decoder import Decoder
from ratchet.models.decoding.prompts import context
from ratchet.models.decoding.token_choice import DECIMALS

GROUP_LABELS = 16
"""Computed at once, each on a copy of the prompt's keys and values. In groups of another number sums would be rounded
otherwise."""
KEPT_PROMPTS = 4096
"""Whose likelihoods wait for further samples of the same prompt."""
_QUESTION = {"role": "user", "content": "One?"}

Nats = list[float | None]


def ids_of(tokenizer: Any, settings: Generate) -> list[list[int]] | None:
    """Token ids of each of generate.labels as the whole answer, end of turn included; [] if there are none.

    Returns:
        None where the chat template writes an answer otherwise than behind its prompt: then there is nothing to give a
        likelihood of.

    Raises:
        SettingsError: one of them cannot be an answer, or two are the same to the tokenizer.
    """
    if not settings.labels:
        return []
    prompt = chat_template.prompt_ids(tokenizer, Conversation([_QUESTION]))
    found: list[list[int]] = []
    for label, one in zip(settings.labels, _encoded(tokenizer, settings.labels), strict=True):
        if isinstance(one, Refused):
            raise SettingsError(f"generate.labels: {label!r} can be no answer: {one.detail}; take it out")
        if one.input_ids[: len(prompt)] != prompt:
            return None
        learned = [i for i, target in enumerate(one.labels) if target != MASKED]
        ids = one.input_ids[len(prompt) : learned[-1] + 1]
        said = tokenizer.decode([i for i in ids if i not in ControlTokens(tokenizer).ids], skip_special_tokens=False)
        if not said.strip().endswith(label):
            raise SettingsError(
                f"generate.labels: {label!r}: the tokenizer writes it as {said.strip()!r}, so no answer can be this "
                "label; name what it writes"
            )
        if len(ids) > settings.max_new_tokens:
            raise SettingsError(
                f"generate.labels: {label!r} takes {len(ids)} tokens with its end, and answers have "
                f"{settings.max_new_tokens} at most; raise generate.max_new_tokens"
            )
        if ids in found:
            other = settings.labels[found.index(ids)]
            raise SettingsError(f"generate.labels: {label!r} and {other!r} are the same tokens; take one of them out")
        found.append(ids)
    return found


def _encoded(tokenizer: Any, labels: Sequence[str]) -> list[Encoded | Refused]:
    asked = [(repr(label), Conversation([_QUESTION, {"role": "assistant", "content": label}])) for label in labels]
    try:
        return chat_template.Encoder(tokenizer, "last").encode(asked)
    except DataError as error:
        raise SettingsError(f"generate.labels: {error}") from None


class Likelihoods:
    """Asks one model, prompt by prompt.

    Args:
        model: in evaluation mode.
        labels: token ids of each, see `ids_of`.
        pad: token that shorter labels are filled with.
        ties: of the run.
        samples: answers to each prompt.
    """

    def __init__(self, model: Any, labels: Sequence[Sequence[int]], pad: int, ties: Ties, samples: int) -> None:
        self._model, self._labels, self._pad, self._ties, self._samples = model, labels, pad, ties, samples
        self._context = context(model)
        self._kept: dict[int, Nats | None] = {}
        self._without_room = 0

    def of(self, place: int, prompt: Sequence[int], decoder: Decoder) -> Nats | None:
        """Log-probability in nats of each label; None of one that the context has no room for, or that is no number;
        None if memory does not suffice for a prompt alone.

        Args:
            place: of the answer: those to one prompt follow each other.
            prompt: token ids.
            decoder: that holds memory, and can make room.
        """
        number = place // self._samples
        if number not in self._kept:
            self._ties.beat()
            found = self._with_room(prompt, decoder)
            if self._samples == 1:
                return found
            if len(self._kept) >= KEPT_PROMPTS:
                del self._kept[next(iter(self._kept))]
            self._kept[number] = found
        return self._kept[number]

    def tell(self) -> None:
        """Say how many prompts are without likelihoods for want of memory, if any."""
        if self._without_room:
            text = f"prompts without likelihoods of labels, because memory did not suffice: {self._without_room:,}"
            self._ties.told("notice", {"text": text})

    def _with_room(self, prompt: Sequence[int], decoder: Decoder) -> Nats | None:
        for make_room in (decoder.make_room, oom.release):
            try:
                return self._computed(prompt)
            except Exception as error:
                if not oom.is_exhausted(error):
                    raise
            make_room()
        self._without_room += 1
        return None

    def _computed(self, prompt: Sequence[int]) -> Nats:
        found: Nats = [None] * len(self._labels)
        longest = math.inf if self._context is None else self._context - len(prompt)
        fitting = [k for k, label in enumerate(self._labels) if len(label) <= longest]
        if not fitting:
            return found
        labels = [self._labels[k] for k in fitting]
        self._ties.before_pass(len(prompt) + max(map(len, labels)))
        [scores] = label_room.label_scores(self._model, [prompt], labels, GROUP_LABELS, self._pad)
        for k, nats in zip(fitting, scores, strict=True):
            found[k] = round(nats, DECIMALS) + 0.0 if math.isfinite(nats) else None
        return found
