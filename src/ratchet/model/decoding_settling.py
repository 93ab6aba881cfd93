"""What is taken from a batch, and what the row's own plain pass decides: the rule that makes answers exact."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ratchet.model.columns import Pass
from ratchet.model.decoding_choice import DECIMALS, MARGIN, Chooser, Chosen, decided, eps_of, units
from ratchet.model.decoding_prompts import Answered, Decoding, Finish, Row
from ratchet.model.decoding_rows import BeforePass, plain
from ratchet.model.decoding_trial import Way, difference
from ratchet.model.device import Model

Told = Callable[[str, dict[str, Any]], None]


class Settler:
    """Settles tokens and mean log-probabilities of rows; `figures` counts what was chosen, and what was in doubt."""

    def __init__(self, model: Model, settings: Decoding, told: Told, before_pass: BeforePass) -> None:
        self.figures = {"chosen": 0, "doubted": 0, "means_anew": 0}
        self._model, self._settings, self._told, self._before = model, settings, told, before_pass
        self._chooser = Chooser(settings.temperature, settings.top_p)
        self._eps = eps_of(model)
        self._units = units(self._eps)
        self._alone = False

    def learn(self, way: Way) -> None:
        """How far the model was off when it was tried out."""
        self._alone = way.name == "alone"
        self._units = max(self._units, MARGIN * way.seen)
        self._told("way", {"way": way.name, "seen_units": way.seen, "bound_units": 0.0 if self._alone else self._units})

    def choose(self, rows: Sequence[Row], logits: Tensor) -> Chosen:
        """A token for each row; by its plain pass, where it is in doubt.

        Args:
            logits: [rows, vocabulary].
        """
        draws = [(row.asked.stream, len(row.ids)) for row in rows]
        chosen = self._chooser.choose(logits, draws, self._bound if self._settings.exact else 0.0)
        self.figures["chosen"] += len(rows)
        for i, row in enumerate(rows):
            if chosen.sure[i]:
                continue
            self.figures["doubted"] += 1
            self._before(row.tokens)
            own = plain(self._model, row.text())
            one = self._chooser.choose(own, draws[i : i + 1], 0.0)
            row.spoilt |= not chosen.finite[i]
            if chosen.finite[i] and one.finite[0]:
                self._seen(difference(logits[i], own[0]) / self._eps)
            for name in ("tokens", "nats", "finite", "scales"):
                getattr(chosen, name)[i] = getattr(one, name)[0]
        return chosen

    def ended(self, rows: Sequence[Row], chosen: Chosen) -> dict[int, Answered]:
        """Of the rows that end with what was chosen, by index. Rows stay as they are: a pass may yet fail."""
        found = {}
        for i, row in enumerate(rows):
            finish: Finish | None = None
            ids, nats = [*row.ids, chosen.tokens[i]], row.nats + chosen.nats[i]
            if not chosen.finite[i]:
                finish, ids, nats = "invalid", row.ids, row.nats
            elif chosen.tokens[i] in self._settings.ends:
                finish = "stop"
            elif len(ids) == row.limit:
                finish = "length" if row.limit == self._settings.max_new_tokens else "context"
            if finish is not None:
                scale = max(row.scale, chosen.scales[i])
                found[i] = Answered(row.asked.place, tuple(ids), finish, self._mean(row, ids, nats, scale))
        return found

    @property
    def _bound(self) -> float:
        """What a logit may be off, relative to its row's greatest."""
        return 0.0 if self._alone else self._units * self._eps

    def _seen(self, seen_units: float) -> None:
        """Plain logits were compared with a batch's: where they differ by more than half of the bound, it is raised."""
        if 2 * seen_units > self._units:
            self._told("bound", {"seen_units": seen_units, "bound_units": self._units})
            self._units = MARGIN * seen_units

    def _mean(self, row: Row, ids: Sequence[int], nats: float, scale: float) -> float:
        """Mean log-probability, rounded; by one plain pass over the whole text, where rounding is in doubt."""
        if not ids:
            return 0.0
        bound = self._units * self._eps  # where tokens were read alone, too: one pass over them all sums otherwise
        if self._settings.exact and not decided(nats / len(ids), len(ids), bound * scale):
            self.figures["means_anew"] += 1
            whole = [*row.asked.ids, *ids]
            self._before(len(whole) - 1)
            text = torch.tensor([whole], device=self._model.device)
            first, last = len(row.asked.ids) - 1, len(whole) - 1
            nats = -float(Pass(self._model, text[:, :-1], (first, last)).nll(text[:, first + 1 :]).double().sum())
        return round(nats / len(ids), DECIMALS) + 0.0
