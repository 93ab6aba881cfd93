"""Logits some columns at a time: the body of a model runs once, its head on as many positions as fit into memory.

Logits are the greatest tensor of an evaluation: 8 rows of 1,024 tokens at a vocabulary of 150,000 are 5 GB in float32,
and half a dozen of the like lie beside them while the likelihood is computed.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ratchet.errors import BaseModelError
from ratchet.models.device import Model
from ratchet.models.model_spec import body_of

CHUNK_ELEMENTS = 2**24
"""Logits that are computed at once: 64 MiB in float32, and some copies."""


class Pass:
    """One forward pass over rows that are filled on the right, without a mask.

    What makes logits of hidden states (head, soft cap, scale) is done by the model's own class: it is called again for
    every further piece, with a body that gives back a piece of what it has found.
    """

    _given: Mapping[str, Tensor] = {}

    def __init__(
        self, model: Model, input_ids: Tensor, span: tuple[int, int], *, cache: Any = None, keep: bool = False
    ) -> None:
        """Run the body, and the head on the first piece. To be called without gradients.

        Args:
            input_ids: int64 [rows, positions].
            span: first position whose logits are wanted, and the one after the last; at least one.
            cache: of the tokens before these; it is added to.
            keep: make a cache if there is none.

        Raises:
            BaseModelError: the model runs its body more than once, so pieces of it would not be the whole.
        """
        self.model = model
        self.first, self.last = span
        self._ids = input_ids
        whole = model.get_base_model() if hasattr(model, "get_base_model") else model
        vocabulary = int(whole.config.get_text_config().vocab_size)
        self._rows = len(self._laid(input_ids))
        self._width = max(1, CHUNK_ELEMENTS // (self._rows * vocabulary))
        self._body = body_of(whole)
        self._found: list[Any] = []
        given = dict(self._given) if cache is None else {**self._given, "past_key_values": cache}
        # A model that is its own body answers with logits, which are no hidden states to take pieces of.
        hooks = [] if self._body is whole else [self._body.register_forward_hook(self._take)]
        try:
            output = model(input_ids=input_ids, use_cache=keep or cache is not None, **given)
        finally:
            for hook in hooks:
                hook.remove()
        if len(self._found) > 1:
            raise BaseModelError(f"{type(whole).__name__}: runs its layers {len(self._found)} times for one text")
        self.cache: Any = getattr(output, "past_key_values", None)
        """Of all tokens up to here, if one was asked for and the model has one."""
        self._begun: Tensor = output.logits

    def pieces(self) -> Iterator[tuple[int, Tensor]]:
        """Position of the first column and logits [rows, columns, vocabulary], until all of the span are there."""
        begun, stop = self._begun, self._stop(self.first)
        if begun.shape[:2] != (self._rows, stop - self.first):
            # The class looked elsewhere for hidden states: they are whole.
            begun = self._laid(begun)[:, self.first : self.last]
            for start in range(0, begun.shape[1], self._width):
                yield self.first + start, begun[:, start : start + self._width]
            return
        yield self.first, begun
        for start in range(stop, self.last, self._width):
            yield start, self._logits(start)

    def nll(self, targets: Tensor) -> Tensor:
        """Negative log-likelihood in nats of a token at each position of the span; float32 [rows, span].

        Args:
            targets: int64 [rows, span]: the token that follows each position.
        """
        found = torch.empty(targets.shape, dtype=torch.float32, device=targets.device)
        for start, logits in self.pieces():
            columns = slice(start - self.first, start - self.first + logits.shape[1])
            chosen = targets[:, columns]
            nll = functional.cross_entropy(logits.float().flatten(0, 1), chosen.flatten(), reduction="none")
            found[:, columns] = nll.view(chosen.shape)
        return found

    def _stop(self, start: int) -> int:
        return min(start + self._width, self.last)

    def _laid(self, found: Tensor) -> Tensor:
        """What belongs to tokens, [rows, positions, ...], as rows of which a span is wanted."""
        return found

    def _take(self, _module: Any, _inputs: Any, output: Any) -> Any:
        output = changed(output, self._laid)
        self._found.append(output)
        return _some(output, slice(self.first, self._stop(self.first)))

    def _logits(self, start: int) -> Tensor:
        """Of a further piece: the model with a body that has its answer ready."""
        piece = _some(self._found[0], slice(start, self._stop(start)))
        with answering(self._body, piece):
            logits: Tensor = self.model(input_ids=self._ids, use_cache=False).logits
        return logits


class Picked(Pass):
    """A pass of which logits are wanted at single positions, wherever in a row: one row of them, in that order."""

    def __init__(
        self, model: Model, input_ids: Tensor, places: Tensor, given: Mapping[str, Tensor], *, cache: Any, keep: bool
    ) -> None:
        """Run the body, and the head on the first piece. To be called without gradients.

        Args:
            input_ids: int64 [rows, positions].
            places: int64 [wanted], ascending, each once: row x positions + position.
            given: what the model is told beside tokens and cache: mask and positions.
            cache: of the tokens before these; it is added to.
            keep: make a cache if there is none.

        Raises:
            BaseModelError: the model runs its body more than once, so pieces of it would not be the whole.
        """
        self._places, self._given = places, given
        super().__init__(model, input_ids, (0, len(places)), cache=cache, keep=keep)

    def _laid(self, found: Tensor) -> Tensor:
        return found.flatten(0, 1)[self._places].unsqueeze(0)


class Deferred(Picked):
    """The same, of which logits are computed when they are asked for: the body has run, the head has not."""

    def _stop(self, start: int) -> int:
        return min(start + 1, self.last)  # the head runs with the body, on one position

    def between(self, start: int, stop: int) -> Tensor:
        """Logits [stop - start, vocabulary] of some of the places, by their number. To be called without gradients."""
        if self._begun.shape[:2] != (1, 1):  # the class looked elsewhere for hidden states
            return self._laid(self._begun)[0, start:stop]
        with answering(self._body, _some(self._found[0], slice(start, stop))):
            logits: Tensor = self.model(input_ids=self._ids, use_cache=False).logits
        return logits[0]


@contextmanager
def answering(body: Any, answer: Any) -> Iterator[None]:
    """A model whose body has its answer ready: what is computed meanwhile is the head."""
    own = body.__dict__.get("forward")
    body.forward = lambda *_, **__: answer
    try:
        yield
    finally:
        if own is None:
            del body.forward
        else:
            body.forward = own


def _some(output: Any, columns: slice) -> Any:
    """A body's output with the hidden states of some positions."""
    return changed(output, lambda states: states[:, columns])


def changed(output: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A body's output with other hidden states."""
    if isinstance(output, tuple):
        return (change(output[0]), *output[1:])
    piece = copy.copy(output)
    piece.last_hidden_state = change(output.last_hidden_state)
    return piece
